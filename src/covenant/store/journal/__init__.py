"""The journal engine: a folder of hash-chained JSON lines."""
