"""Tests of the changes in dicts and lists that a graph's watch notices."""

import pytest
import torch
from conftest import submodule

watch = submodule("decoding.watch")


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


class Settings:
    """An object with attributes, of a user's own class."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Block(torch.nn.Module):
    """Holds what a forward may read in every kind of container, most of them empty."""

    def __init__(self):
        super().__init__()
        self.of_names, self.listed = torch.nn.ModuleDict(), torch.nn.ModuleList()
        self.of_parameters = torch.nn.ParameterDict()
        self.table, self.members, self.queue, self.values = {}, set(), [], {1: "a"}
        self.nested = {"a": {"b": [1, {"c": 2}]}}
        self.pair = ({"in a tuple": 1}, 2)
        self.settings = Settings(scale=2.0, inner=Settings(more=1))
        self.hidden = [torch.nn.Linear(2, 2)]
        self.x = torch.nn.Linear(2, 2)


CHANGES = {
    "ModuleDict": lambda m: m.of_names.update({"new": torch.nn.Linear(2, 2)}),
    "ModuleList": lambda m: m.listed.append(torch.nn.Linear(2, 2)),
    "ParameterDict": lambda m: m.of_parameters.update({"new": torch.ones(2)}),
    "dict": lambda m: m.table.update(new=torch.nn.Linear(2, 2)),
    "set": lambda m: m.members.add("new"),
    "list": lambda m: m.queue.append(torch.ones(2)),
    "keys that are numbers": lambda m: m.values.update({2: "b"}),
    "a nested dict": lambda m: m.nested["a"].update(new=1),
    "a dict in a list in a dict": lambda m: m.nested["a"]["b"][1].update(c=3),
    "a dict in a tuple": lambda m: m.pair[0].update(new=1),
    "an object": lambda m: setattr(m.settings, "scale", 3.0),
    "an object's attribute": lambda m: setattr(m.settings, "new", 3.0),
    "an object in an object": lambda m: setattr(m.settings.inner, "more", 2),
    "a module that only a list has": lambda m: setattr(
        m.hidden[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "a parameter of a linear": lambda m: m.x.register_parameter("bias", None),
    "a hook of a linear": lambda m: m.x.register_forward_hook(print),
    "a hook of a module": lambda m: m.register_forward_pre_hook(print),
    "a buffer": lambda m: m.register_buffer("new", torch.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_containers_that_were_empty_and_what_they_hold(change):
    model = torch.nn.Sequential(Block())
    one = watch.ModelWatch(model)
    assert one.holds()
    CHANGES[change](model[0])
    assert not one.holds()
    assert watch.ModelWatch(model).holds()


def test_values_that_move_between_neighbours():
    block = torch.nn.Module()
    block.first, block.second = [1, 2], [3]
    one = watch.ModelWatch(block)
    block.second.insert(0, block.first.pop())
    assert not one.holds()


def test_a_large_container_is_seen_by_its_size():
    block = torch.nn.Module()
    block.table = dict.fromkeys(range(watch.MOST + 1))
    one = watch.ModelWatch(block)
    assert one.holds() and len(one.watch.values) < watch.MOST
    block.table["one more"] = 1
    assert not one.holds()


def test_hooks_of_other_modules_do_not_count():
    model, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    one = watch.ModelWatch(model)
    other.register_forward_hook(print)
    torch.nn.Parameter(torch.ones(2)).register_hook(print)
    assert one.holds()


def test_cycles():
    block = torch.nn.Module()
    block.table = {"block": block}
    block.table["table"] = block.table
    assert watch.ModelWatch(block).holds()
