"""Ollama's API over the same engine.

fields ─> asks ─> Served, Call      a body becomes what its client wants
rendering                           what the model writes becomes one JSON object, or a line of JSON for each piece
models                              what is known of the model
api                                 the paths
"""
