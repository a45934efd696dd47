"""The command line: what a person or a script types. Every command but `serve` and the offline ones asks a daemon."""
