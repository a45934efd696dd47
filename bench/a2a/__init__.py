"""The A2A protocol, beside the official SDK."""
