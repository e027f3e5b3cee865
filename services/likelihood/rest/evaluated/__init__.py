"""Evaluations of a run on pages: what lies in its folder, and what its training asked itself."""
