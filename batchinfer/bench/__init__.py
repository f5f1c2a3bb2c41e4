"""Throughput of this machine on given prompts, beside the least time they can take on it."""
