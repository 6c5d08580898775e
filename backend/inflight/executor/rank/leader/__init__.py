"""What only the first rank has: the socket for the fronts, and the account and the queue of their requests."""
