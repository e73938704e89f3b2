"""Tests of the changes in dicts and lists that a graph's watch notices."""

import pytest
import torch
from conftest import submodule

watch = submodule("models.watch")


class Holds:
    """Holds attributes that Python may store in the object itself or in a dict."""


def tables():
    held = Holds()
    held.first, held.second = 1, "two"
    return {
        "dict": {"a": 1, "b": torch.zeros(2), "c": None},
        "attributes": held.__dict__,
        "keys that are no strings": {1: "a", (2, 3): 4.0},
        "emptied": {name: name for name in "abcdef"},
        "empty": {},
        "module": torch.nn.Linear(2, 3).__dict__,
    }


@pytest.mark.parametrize("name", tables())
def test_every_kind_of_dict(name):
    found = tables()
    one = watch.Watch(list(found.values()))
    assert len(one.values) == sum(map(len, found.values())) and one.holds()
    table = found[name]
    key = next(iter(table), "key")
    old = table.get(key)
    table[key] = "another"
    assert not one.holds()
    if old is None:
        del table[key]
    else:
        table[key] = old
    assert one.holds()
    table["one more"] = 1
    assert not one.holds()
    del table["one more"]
    assert one.holds()
    if old is not None:
        del table[key]
        assert not one.holds()


def test_attributes_that_are_set():
    held = Holds()
    held.value = 1
    one = watch.Watch([held.__dict__])
    for value in range(2, 99):  # as Python makes faster what is done often
        held.value = value
        assert not one.holds()
        held.value = 1
        assert one.holds()
    del held.value
    assert not one.holds()


def test_tensors_that_move_and_lists_that_grow():
    x, values = torch.zeros(4), [1]
    one = watch.Watch([{"x": x}], [values])
    x.add_(1)
    assert one.holds()
    values.append(2)
    assert not one.holds()
    values.pop()
    assert one.holds()
    x.data = torch.zeros(4)
    assert not one.holds()


def test_the_hook_of_another_threads_prompt():
    """The hook does not end a watch that began before it was set, or while it was set."""
    model = torch.nn.Sequential(torch.nn.ReLU())
    hook, own = submodule("models.serving").HOOK, model[0]._forward_pre_hooks
    before = watch.ModelWatch(model)
    own[hook] = print
    during = watch.ModelWatch(model)
    assert before.holds() and during.holds() and not during.counts_on()
    del own[hook]
    assert before.holds() and during.holds() and not during.counts_on()
    handle = model[0].register_forward_pre_hook(print)
    assert not before.holds() and not during.holds()
    handle.remove()
