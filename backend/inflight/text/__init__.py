"""Text to token ids and back: tokenizer, detokenizer, stop strings.

Shared by all who ask an engine: tritonserver's stub and the library. Knows nothing of tensors, of tritonserver, of
requests or of ranks, and imports only the ground floor.
"""
