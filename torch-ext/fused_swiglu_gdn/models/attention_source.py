"""What the forward of an attention module hands to its attention function, read from its source."""

import ast
import collections
from typing import Callable

from .code import BUILTINS, Refused


def attention_call(source) -> ast.Call:
    """The one call of the attention function, which alone gets the module itself."""
    found = [
        node for node in ast.walk(source.definition)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and node.func.id not in BUILTINS and node.args
        and isinstance(node.args[0], ast.Name) and node.args[0].id == "self"
    ]  # fmt: skip
    if len(found) != 1:
        raise Refused("it does not call one attention function, by its configuration")
    return found[0]


def handed_on(source) -> set:
    """Attributes that its forward only hands to the cache and to the attention function: ours hands
    on what they are at the time of the call."""
    own = [function for function, _ in source.pinned.codes if function is not source.forward]
    if any(f.__code__.co_varnames[:1] == ("self",) for f in own):
        return set()
    places = [keyword.value for keyword in attention_call(source).keywords]
    for node in ast.walk(source.definition):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "get_interface",
            "update",
        ):
            places += node.args
    handed = collections.Counter(path for place in places for path in _paths(place))
    everywhere = collections.Counter(_paths(source.definition))
    return {path for path, count in handed.items() if everywhere[path] == count}


def _paths(tree: ast.AST) -> list:
    """The attributes of the module that are read in a part of a forward."""
    paths = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            paths.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            paths.append(f"{ast.unparse(node.args[0])}.{node.args[1].value}")
    return [path[5:] for path in paths if path.startswith("self.")]


def keywords_of(source) -> Callable:
    """module -> the keywords that its forward gives the attention function, in its own words."""
    keys, values = [], []
    for keyword in attention_call(source).keywords:
        if keyword.arg is not None:
            if isinstance(keyword.value, ast.Name) and keyword.value.id == keyword.arg:
                continue  # an argument that is handed on
            names = {node.id for node in ast.walk(keyword.value) if isinstance(node, ast.Name)}
            if not names <= {"self", "getattr"}:
                raise Refused(f"it gives {ast.unparse(keyword)} to its attention function")
            keys.append(ast.Constant(keyword.arg))
            values.append(keyword.value)
    tree = ast.parse("lambda self: 0", mode="eval")
    tree.body.body = ast.Dict(keys, values)
    return eval(
        compile(ast.fix_missing_locations(tree), "<keywords>", "eval"), {"getattr": getattr}
    )
