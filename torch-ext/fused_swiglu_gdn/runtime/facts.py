"""What a call depends on besides the values of its tensors, and bounds on what is kept by it."""

import weakref


def facts(*tensors) -> tuple:
    """Of tensors or None: all that checks, choice of kernel and launch ask, but for addresses."""
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.__class__)
            for x in tensors
        ]
    )


def keep(plans: dict, key, plan):
    """Adds a plan under its key, and returns it; a dict that has grown large starts anew."""
    if len(plans) >= 1024:
        plans.clear()
    plans[key] = plan
    return plan


class Bound:
    """A limit on what many holders keep together: past it all of them forget.

    A server meets ever new lengths, each with a plan of its own; what plans keep must not add up.
    """

    def __init__(self, most: int):
        self.most, self.count = most, 0
        self.holders: weakref.WeakSet = weakref.WeakSet()

    def count_one(self, holder) -> None:
        """The holder, which has a method forget(), is about to keep one thing more."""
        if self.count >= self.most:
            for each in list(self.holders):
                each.forget()
            self.count = 0
        self.count += 1
        self.holders.add(holder)
