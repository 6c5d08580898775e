"""GGUF files, which llama.cpp reads, as folders of checkpoints: config.json and the tokenizer are made of a file's
metadata, and its weights stay where they are.

Everything behind this room reads folders. Loads neither torch nor transformers; tensors are read in `models`.
"""
