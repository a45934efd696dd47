"""The clients of a daemon, over lines that fail."""
