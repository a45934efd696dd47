"""What may happen, pure: no I/O, no clock, no randomness of its own, no await."""
