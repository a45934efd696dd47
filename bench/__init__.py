"""The benchmark: Covenant beside the bare disk and beside its peers, in one run. See `python -m bench --help`."""
