"""Processes that turn tokens into text for a program of the library (`num_postprocess_workers`)."""
