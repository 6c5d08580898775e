"""OpenAI's API, with vLLM's fields.

fields, messages ─> asks ─> Served, Call      a body becomes what its client wants
deltas, frames ─> answer, stream              what the model writes becomes JSON, whole or as chunks
api, models, errors                           the paths, and errors in OpenAI's form
responses                                     its other API of chats: items instead of messages
"""
