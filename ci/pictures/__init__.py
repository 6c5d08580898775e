"""The pictures of the pages, made from real runs and from descriptions as text. Knows nothing of the pages' words."""
