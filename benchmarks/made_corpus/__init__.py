"""Corpora of up to tens of millions of passages, made with the statistics of a small real one."""
