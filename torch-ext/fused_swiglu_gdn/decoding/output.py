"""A model's output, rebuilt for every replay."""

from collections import OrderedDict
from typing import Any

CACHE = object()  # where the cache stands, which an output that is kept would keep alive


class Output:
    """A model's output around its cache, without the work of its class's constructor, which is a
    considerable part of the host's time for a replay. logits: what takes the place of its own."""

    def __init__(self, out: Any, cache: Any, logits: Any = None):
        if not isinstance(out, dict) or not any(x is cache for x in out.values()):
            raise RuntimeError(f"it returns a {type(out).__name__} without its cache")
        self.kind = type(out)
        self.base = OrderedDict if isinstance(out, OrderedDict) else dict
        self.items = _put(CACHE, cache, dict(out.items()))
        self.attributes = _put(CACHE, cache, getattr(out, "__dict__", {}))
        for table in (self.items, self.attributes):
            if logits is not None and "logits" in table:
                table["logits"] = logits

    def around(self, cache: Any) -> dict:
        out = self.kind.__new__(self.kind)
        if self.attributes:
            out.__dict__.update(_put(cache, CACHE, self.attributes))
        for name, value in _put(cache, CACHE, self.items).items():
            self.base.__setitem__(out, name, value)
        return out

    def is_that_of(self, out: Any) -> bool:
        """True if the other is an output around the same logits."""
        logits = self.items.get("logits")
        return logits is not None and isinstance(out, dict) and out.get("logits") is logits


def _put(new: Any, old: Any, table: dict) -> dict:
    return {name: new if x is old else x for name, x in table.items()}
