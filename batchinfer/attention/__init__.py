"""Attention over the prefix tree: the AttentionBackend seam and its implementations."""
