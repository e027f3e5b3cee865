"""Compressed postings in segments: an index that is built in bounded memory, added to, deleted from and
merged."""
