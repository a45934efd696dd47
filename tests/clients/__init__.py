"""Clients that others wrote, unmodified, against a real daemon: `make clients`."""
