"""The stub's own threads, one a file, and what each of them works with."""
