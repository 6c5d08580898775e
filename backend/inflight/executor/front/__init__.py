"""The side that asks: a front keeps account of its requests and carries them to an engine's leader and back."""
