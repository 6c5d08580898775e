"""How a replica's ranks are started: one file for each way, one that finds ranks another process started, and one that
keeps loaded ranks in reserve."""
