"""A corpus file, and the index folder that it becomes: description, passages, whole rows, segments."""
