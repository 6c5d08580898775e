"""How well, how fast and how safely guides are followed, without a network and without fetching anything."""
