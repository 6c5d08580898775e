"""The client side of an engine: a front tracks its requests, sends them to the leader and receives the responses."""
