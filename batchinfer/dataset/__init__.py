"""Prompts in: Parquet, JSON Lines, OpenAI Batch and Hugging Face datasets, as windows of Arrow tables."""
