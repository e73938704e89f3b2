"""Decoding with CUDA graphs: in transformers' generate and by hand.

The files by what they are for:

- a step as a graph: graphs (in generate), graphed_step (by hand), capture, output
- when a graph computes the same: graph_rules, watch
- what generate does around a step: static_cache, caches, windows, ahead (positions and masks),
  choosing (the token), late (the check whether to stop), rehearsal (kernels compiled early)
- drafts: drafts (in transformers' rounds), draft_loop and rounds (rounds as graphs), reading, rows
  (tokens that are taken back); from where: lookup, assistants, mtp
- in_place (methods of a model that are replaced)
"""
