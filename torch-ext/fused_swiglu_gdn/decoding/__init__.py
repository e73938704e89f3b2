"""Decoding with CUDA graphs: in transformers' generate and by hand.

The files by what they are for:

- what is set on a model: generate, in_place (methods that are replaced)
- a step as a graph: graphs (who captures and who replays), capture, inputs (positions and masks),
  choosing (the token), output; graphed_step (a step by hand)
- when a graph computes the same: graph_rules, watch, windows
- what generate does around a step: static_cache, caches, late (the check whether to stop),
  rehearsal (kernels compiled early)
- drafts: drafts (in transformers' rounds), draft_loop and rounds (rounds as graphs), reading, rows
  (tokens that are taken back); from where: lookup, assistants, mtp
"""
