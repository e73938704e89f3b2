"""The forward of served modules that take hidden states among other arguments."""

from typing import Callable

import torch

from .norm import serves


def forward_by(form, serve: Callable, name: str) -> Callable:
    """serve(module, form, hidden_states, arguments by name), or the forward of the class where no
    kernel may serve and where serve gives None."""
    kind, names, renamed = form.kind, form.names, form.renamed
    place = names.index("hidden_states")

    def forward(self, *args, **kwargs):
        x = args[place] if len(args) > place else kwargs.get("hidden_states")
        if torch.compiler.is_compiling() or not serves(x) or not renamed.isdisjoint(kwargs):
            return kind.forward(self, *args, **kwargs)
        given = {**kwargs, **dict(zip(names, args))} if args else kwargs
        found = serve(self, form, x, given)
        return kind.forward(self, *args, **kwargs) if found is None else found

    forward.__wrapped__ = kind.forward  # whose arguments inspect and torch.fx then find
    forward.__qualname__ = f"{name}.forward"
    return forward
