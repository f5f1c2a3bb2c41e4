"""Evaluators, one short file each."""
