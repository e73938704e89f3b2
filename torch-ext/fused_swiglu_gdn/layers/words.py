"""Tables of the arguments of calls that a replaced module makes, with the source of each."""

import operator
from typing import Iterable, NamedTuple, Optional, Tuple

from torch import nn


class Word(NamedTuple):
    """An argument of a call, and the source of its value."""

    name: str  # "" of one by position
    # "argument": one of the module's own call, or its default; "attribute", "parameter": the
    # module's, read in each call; "table": the n-th of the rotary tables; "rest": the keywords that
    # the module's forward has no name for; "dict": of such words; "constant"
    how: str
    what: object = None
    default: object = None  # of an argument; the type of a constant


class Value:
    """The value of a word that is an attribute or a constant."""

    def __init__(self, word: Optional[Word]):
        self.constant = None if word is None or word.how != "constant" else word.what
        fixed = word is None or word.how == "constant"
        self.of = self._constant if fixed else operator.attrgetter(word.what)

    def _constant(self, module: nn.Module) -> object:
        return self.constant


class Words:
    """The arguments that a table describes."""

    def __init__(self, table: Iterable[Word]):
        self.constants, self.arguments, self.attributes = {}, [], []
        self.parameters, self.tables, self.rest, self.dicts = [], [], [], []
        self.empty = True
        for name, how, what, default in table:
            self.empty = False
            if how == "constant":
                self.constants[name] = what
            elif how == "argument":
                self.arguments.append((name, what, default))
            elif how == "attribute":
                self.attributes.append((name, operator.attrgetter(what)))
            elif how == "parameter":
                self.parameters.append((name, what))
            elif how == "table":
                self.tables.append((name, what))
            elif how == "rest":
                self.rest.append(name)
            else:
                self.dicts.append((name, Words(what)))

    def made(self, module: nn.Module, given: dict, rest: dict, tables: Optional[Tuple]) -> dict:
        """The arguments by their names, for a call of the module with `given`."""
        made = dict(self.constants)
        for name, get in self.attributes:
            made[name] = get(module)
        for name, argument, default in self.arguments:
            made[name] = given.get(argument, default)
        for name, parameter in self.parameters:
            made[name] = module.__dict__["_parameters"][parameter]
        for name, n in self.tables:
            made[name] = tables[n]
        for name in self.rest:
            made[name] = rest
        for name, words in self.dicts:
            made[name] = words.made(module, given, rest, tables)
        return made
