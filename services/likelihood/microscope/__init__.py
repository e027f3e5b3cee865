"""The microscope: a bounded sample of each step, token by token, and what the update did to it."""
