"""The engine: token ids in, tokens and logprobs out; it knows nothing of files."""
