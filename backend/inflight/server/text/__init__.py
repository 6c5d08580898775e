"""Text to token ids and back: tokenizer, detokenizer, stop strings. Knows nothing of tensors or of tritonserver."""
