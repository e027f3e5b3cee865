"""Detectors of what the learner does to the policy."""
