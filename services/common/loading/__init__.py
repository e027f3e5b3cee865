"""Imports at run time: modules on first use, extras that may be missing, users' own code."""
