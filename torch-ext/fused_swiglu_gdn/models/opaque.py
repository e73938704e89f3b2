"""Arguments of a forward whose role is not known: they may be passed on, and say who reads them."""

from typing import Callable, NoReturn

from .code import Refused


class Read(Refused):
    """Raised when a stub of an argument, or of an attribute of the module, is read."""

    def __init__(self, name: str, how: str):
        super().__init__(f"its forward reads {name}")
        self.name, self.how = name, how


def _reading(how: str) -> Callable:
    def read(self, *_, **__):
        raise Read(name_of(self), how)

    return read


class Opaque:
    """An argument that the formula does not use, or whose role is unknown yet."""

    __hash__ = object.__hash__
    __class__ = property(_reading("isinstance"))

    def __init__(self, name: str):
        self.__dict__["opaque_name"] = name

    def __getattr__(self, name):
        raise Read(name_of(self), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Raises: a function of torch was called on it, or on a list that contains it."""
        everything = [*args, *(kwargs or {}).values()]
        for value in everything:
            if type(value) in (tuple, list):
                everything += value
            elif issubclass(type(value), Opaque):
                raise Read(name_of(value), f"__{function.__name__.strip('_')}__")
        raise Refused(f"its forward calls {function.__name__} with a stub")


for _how in (
    "setattr", "getitem", "setitem", "call", "add", "radd", "sub", "rsub", "mul", "rmul", "pow",
    "rpow", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "matmul", "lt", "le", "gt",
    "ge", "eq", "ne", "bool", "len", "iter", "contains", "neg", "invert", "and", "rand", "or",
    "ror", "int", "float", "index", "str", "format",
):  # fmt: skip
    setattr(Opaque, f"__{_how}__", _reading(f"__{_how}__"))
Opaque.__hash__ = object.__hash__  # which __eq__ takes away


class Opaques(dict):
    """One Opaque for each name."""

    def __missing__(self, name: str) -> Opaque:
        self[name] = Opaque(name)
        return self[name]


def name_of(opaque: Opaque) -> str:
    return opaque.__dict__["opaque_name"]


def read_by(x: object, part: str) -> NoReturn:
    """Raises because a part is called on something other than one tensor."""
    if issubclass(type(x), Opaque):
        raise Read(name_of(x), "part")
    raise Refused(f"it calls {part} in a way that is not known")
