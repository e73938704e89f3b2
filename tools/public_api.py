"""The public API of a package as its source says it, and what a newer one breaks of it.

    python tools/public_api.py          # writes tests/api_v<version>.json; additions only

Read from the syntax trees, so that a build on the Hub is looked at without running it.
"""

import argparse
import ast
import json
import pathlib
import sys

from sources import ROOT, package_dir, read_config

FLAGS = ("has_backward", "can_torch_compile")  # of a layer: kernelize decides by them
BUMP = "bump the version in build.toml"


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def literal_all(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    return []


def definition(module, name):
    """(file, syntax node) of a name of the module file, its relative imports followed."""
    for node in parse(module).body:
        if getattr(node, "name", None) == name:
            return module, node
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            folder = module.parents[node.level - 1]
            target = folder.joinpath(*(node.module.split(".") if node.module else [alias.name]))
            file = target.with_suffix(".py")
            file = file if file.exists() else target / "__init__.py"
            return definition(file, alias.name) if node.module else (file, parse(file))
    raise KeyError(f"{module}: {name} is in __all__ and cannot be found")


def signature(function):
    """The parameters and their defaults, without annotations: "(x, w, *, block=64)"."""
    arguments = function.args
    for argument in [
        *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
        arguments.vararg, arguments.kwarg,
    ]:  # fmt: skip
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def describe_class(name, node, file):
    """The constructor and the public methods and flags of a class, with those of its bases in the
    package. file: that of the class."""
    found = {name: "class"}
    for base in node.bases:
        inherited = find(file, base)
        if inherited is not None:
            found.update(describe_class(name, inherited[1], inherited[0]))
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            if member.name == "__init__":
                found[name] = signature(member)
            elif any(getattr(d, "id", None) == "property" for d in member.decorator_list):
                found[f"{name}.{member.name}"] = "property"
            elif not member.name.startswith("_"):
                found[f"{name}.{member.name}"] = signature(member)
        elif isinstance(member, ast.Assign):
            target = getattr(member.targets[0], "id", "")
            if target in FLAGS:
                found[f"{name}.{target}"] = ast.unparse(member.value)
            elif isinstance(member.value, ast.Call) and not target.startswith("_"):
                made = made_by(file, member.value.func, target)
                found.update({} if made is None else {f"{name}.{target}": signature(made)})
    return found


def find(file, expression):
    """(file, syntax node) of what a plain name in a file of the package means, or None."""
    try:
        return definition(file, expression.id)
    except (AttributeError, KeyError):  # another expression, or from elsewhere
        return None


def made_by(file, maker, name):
    """The function of this name inside the function that makes it, or None."""
    _, node = find(file, maker) or (None, None)
    inner = [x for x in getattr(node, "body", ()) if getattr(x, "name", None) == name]
    return inner[0] if inner else None


def public_api(package):
    """{name: signature} of __all__; classes and the modules in it are opened."""
    init = pathlib.Path(package) / "__init__.py"
    found = {}

    def describe(module, name, prefix):
        file, node = definition(module, name)
        if isinstance(node, ast.Module):
            for inner in literal_all(node):
                describe(file, inner, f"{prefix}{name}.")
        elif isinstance(node, ast.ClassDef):
            found.update(describe_class(prefix + name, node, file))
        else:
            found[prefix + name] = signature(node)

    for name in literal_all(parse(init)):
        describe(init, name, "")
    return dict(sorted(found.items()))


def parameters(text):
    """(positional names, {name: default or None} of all, names of *args and **kwargs)."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    defaults = dict.fromkeys([*positional, *(a.arg for a in arguments.kwonlyargs)])
    for name, value in zip(reversed(positional), reversed(arguments.defaults)):
        defaults[name] = ast.unparse(value)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults):
        defaults[argument.arg] = ast.unparse(value) if value else None
    rest = {a.arg for a in (arguments.vararg, arguments.kwarg) if a}
    return positional, defaults, rest


def signature_break(old, new):
    """Why a call written for the old signature may not work with the new one; None if it does."""
    if not old.startswith("("):  # a flag, or a class without a constructor of its own
        return None if old == new or old == "class" else f"was {old}, is {new}"
    if not new.startswith("("):
        return f"was {old}, is {new}"
    (old_order, old_defaults, old_rest), (order, defaults, rest) = parameters(old), parameters(new)
    if order[: len(old_order)] != old_order or not old_defaults.keys() <= defaults.keys():
        return f"was {old}, is {new}"
    if old_rest - rest:
        return f"no longer takes {', '.join(sorted(old_rest - rest))}"
    for name, default in defaults.items():
        if name not in old_defaults:
            if default is None:
                return f"new parameter {name} has no default"
        elif old_defaults[name] not in (None, default):
            return f"the default of {name} was {old_defaults[name]}, is {default}"
    return None


def breaks(old, new):
    """One line for each name of the old API that callers can no longer use as before."""
    lines = [f"{name} is gone" for name in old if name not in new]
    for name in old:
        why = signature_break(old[name], new[name]) if name in new else None
        if why:
            lines.append(f"{name}: {why}")
    return lines


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    config, _ = read_config(ROOT)
    file = ROOT / "tests" / f"api_v{config['general']['version']}.json"
    new = public_api(package_dir(ROOT, config))
    broken = breaks(json.loads(file.read_text()), new) if file.exists() else []
    if broken:
        sys.exit("\n".join([f"{BUMP}: this breaks callers of {file.name[4:-5]}", *broken]))
    file.write_text(json.dumps(new, indent=1) + "\n")
    print(f"wrote {file.relative_to(ROOT)}: {len(new)} names")


if __name__ == "__main__":
    main()
