"""What `unspiral data validate` compares questions with: an index, other questions."""
