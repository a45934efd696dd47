"""One replica of an agent: ours, and that of the official SDK."""
