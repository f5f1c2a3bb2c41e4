"""Completions out: one Parquet file, the input's columns untouched beside the new ones."""
