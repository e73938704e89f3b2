"""Context parallelism: the tokens of a batch that each rank holds, and the collectives between
ranks."""
