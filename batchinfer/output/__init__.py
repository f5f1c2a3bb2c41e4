"""Completions to Parquet: schema and writer."""
