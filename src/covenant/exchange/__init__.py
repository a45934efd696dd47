"""The one door: authenticate, authorise, run, audit. Every surface calls it, and none talks to a store."""
