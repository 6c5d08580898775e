"""Everything that is passed between processes, and the interfaces between fronts, launchers and ranks."""
