"""What the documentation says is true of the code."""
