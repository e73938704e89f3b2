"""The attention function that a module's config names."""

import sys
from typing import Callable, Optional

from torch import nn

from .words import Value, Word

NAME = "config._attn_implementation"
# a PreTrainedConfig finds its attributes by Python code, seven calls for this one; here they lie
OWN, LAYERS = "_attn_implementation_internal", "_heterogeneity_spec"
_attributes = object.__getattribute__


class Interface:
    """Looks a function up in transformers' registry, as a module of one class does.

    The answer is remembered with all that it follows from: the config's class, its way to an
    attribute and its property, the name, and the registry's class and entry.
    """

    def __init__(self, name: Word, eager: Callable):
        self.name, self.eager = Value(name), eager
        self.plain = (name.how, name.what) == ("attribute", NAME)
        self.known: Optional[tuple] = None
        self.function: Optional[Callable] = None

    def of(self, module: nn.Module) -> Callable:
        """The function that the module calls; an error as from transformers if there is none."""
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        facts = None
        if self.plain:
            try:
                config, kind = module.__dict__["config"], type(registry)
                own, at = type(config), _attributes(config, "__dict__")
                name = at[OWN]
                entry = registry._local_mapping.get(name) or registry._global_mapping.get(name)
                if at.get(LAYERS) is None and "get_interface" not in registry.__dict__:
                    facts = (
                        own, own.__getattribute__, own._attn_implementation, name,
                        kind, kind.get_interface, kind.__getitem__, entry,
                    )  # fmt: skip
            except (AttributeError, KeyError, TypeError):
                pass  # of a release that keeps them elsewhere
            if facts is not None and facts == self.known:
                return self.function
        function = registry.get_interface(self.name.of(module), self.eager)
        self.known, self.function = facts, function
        return function
