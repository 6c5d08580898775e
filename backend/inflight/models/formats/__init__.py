"""How checkpoints store the weights of matrix products: a file for each way (weight_formats.py chooses one)."""
