"""How an engine's ranks come to live: each file one way to start them, or to find those that somebody else started."""
