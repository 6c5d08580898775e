"""What Triton tensors and request parameters mean: each dialect as a table, and the values that clients may send."""
