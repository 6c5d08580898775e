"""Pictures as rows of embeddings, computed in a process of their own beside whoever asks the engine."""
