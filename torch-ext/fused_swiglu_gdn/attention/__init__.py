"""What surrounds attention in a decoder layer, and attention of one token over a static cache."""
