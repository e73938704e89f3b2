"""One batch over several processes: who holds which tokens, and what they tell each other."""
