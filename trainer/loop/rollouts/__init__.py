"""Prompts to trajectories: sampling a batch, sampling ahead, and held-out questions."""
