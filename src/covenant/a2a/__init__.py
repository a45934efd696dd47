"""The A2A protocol: what its wire looks like, what its errors are called, and a client that loses nothing."""
