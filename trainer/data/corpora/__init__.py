"""Corpora: what is wrong with one, and one made of documents of the user's own."""
