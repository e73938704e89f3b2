"""Decoding with CUDA graphs: in transformers' generate and by hand.

A call of generate, from file to file:

- generate gives transformers a view of the model, whose loops are those of late and drafts
- late runs transformers' own loop, which learns a token late whether to stop; static_cache gives it
  a cache for graphs, and rehearsal compiles kernels before the prompt
- graphs.Step is one token of that loop: eager, then captured, then replayed while graph_rules and
  windows allow it and watch sees no change; inputs has its positions and masks, choosing its token
- draft_loop is a loop of our own, with drafts: rounds.Round is one call of several tokens, by the
  same rules, which counts the drafts that were right; rows takes the others back; reading has the
  inputs. Drafts come from drafters (the text itself), assistants or mtp
- drafts has what that leaves to transformers' assisted decoding

graphed_step is a step of a loop by hand. capture has all calls of torch's CUDA graphs; caches,
in_place and output are about transformers' caches, methods and outputs.
"""
