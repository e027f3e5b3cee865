"""CollapseBench: runs of the laboratory, each with one cause of a fall and one cure."""
