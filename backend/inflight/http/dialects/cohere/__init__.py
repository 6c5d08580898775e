"""Cohere's API, as far as it is not Jina's too (see openai/rerank)."""
