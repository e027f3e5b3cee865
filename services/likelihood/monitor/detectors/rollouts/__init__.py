"""Detectors of what is sampled: rewards, form, searches, text."""
