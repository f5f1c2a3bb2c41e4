"""Evaluation of completions: one evaluator per file."""
