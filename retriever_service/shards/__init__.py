"""An index in shards: several servers of this package, and one before them that merges what they find."""
