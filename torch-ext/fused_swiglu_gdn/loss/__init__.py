"""The next-token loss: cross entropy of logits and targets, in one pass each way."""
