"""Prompts from files, folders and datasets: reading, columns, tokenization in batches."""
