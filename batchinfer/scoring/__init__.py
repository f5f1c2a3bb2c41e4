"""Teacher-forced scores of given texts: log-likelihoods, perplexities, divergences of two models."""
