"""What can be searched: the protocol `SearchIndex`, and its kinds."""
