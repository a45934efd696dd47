"""The surfaces: HTTP and local IPC. Thin: decode, call the exchange, encode."""
