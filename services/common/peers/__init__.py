"""Services of one run that ask each other, and how they make sure of each other first."""
