"""How an engine's ranks are started: one file for each way, and one that finds ranks another process started."""
