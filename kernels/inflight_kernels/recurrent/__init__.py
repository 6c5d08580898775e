"""Layers that keep a state for each sequence instead of keys and values for each token."""
