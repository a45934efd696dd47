"""Durable agents, beside their peers."""
