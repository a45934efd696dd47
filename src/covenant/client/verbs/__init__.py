"""The verbs of a daemon, from this end: one function for each."""
