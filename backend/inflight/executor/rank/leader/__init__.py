"""What only the first rank has: the socket for the fronts, and the book and the queue of their requests."""
