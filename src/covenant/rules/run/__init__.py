"""Runs: what a durable agent did, how it waits and wakes, and how it is taken up again. (Contract 18-24.)"""
