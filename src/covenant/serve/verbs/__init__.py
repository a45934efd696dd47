"""What each request does: one function for each, the same for every surface."""
