"""The threads of the stub process, one per file, with the classes that they use."""
