"""All that crosses the border of a process, and the interfaces by which fronts, launchers and ranks know each other."""
