"""Anthropic's Messages API over the same engine.

fields, conversation ─> asks ─> Served, Call      a body becomes what its client wants
content_blocks ─> rendering                       what the model writes becomes content blocks, whole or as events
api, errors                                       the paths, and errors in Anthropic's form
"""
