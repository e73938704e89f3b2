"""One function of a forward, statement by statement."""

import ast
import sys
from typing import Callable, List, NoReturn, Optional, Set, Tuple, Union

from .code import BY_DTYPE, Raised, Refused, in_short, is_text, logs, nodes_of
from .expressions import Expressions
from .values import VALUE, Closure, Given, Known, Own, Plain, Several, Words, merged

MOST = 20_000  # statements and calls of one forward


class Body(Expressions):
    """The call of one function, with what is known of its names."""

    def __init__(self, reader, function, definition, env: dict, owner, outer=None):
        self.reader, self.function, self.definition = reader, function, definition
        self.env, self.owner, self.outer = env, owner, outer
        self.returns: List[object] = []
        self.passing = None  # the arguments with which a wrapper calls what it wraps
        stored = [
            node.id for node in nodes_of(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
        ]  # fmt: skip
        self.local: Set[str] = {*env, *stored}

    def refuse(self, node: ast.AST) -> NoReturn:
        raise self.refused(node)

    @staticmethod
    def refused(node: ast.AST) -> Refused:
        return Refused(f"its forward has `{in_short(node)}`")

    def needs(self, operation: str, node: ast.AST) -> None:
        """Notes an operation of MORE."""
        self.reader.source.need(operation, f"has `{in_short(node)}`")

    def run(self) -> object:
        """Returns the function's result."""
        if isinstance(self.definition, ast.Lambda):
            return self.expression(self.definition.body)
        if not self.block(self.definition.body):
            self.returns.append(Plain(None))
        found = self.returns[0]
        for value in self.returns[1:]:
            found = merged(found, value)
        return found

    def block(self, statements: List[ast.stmt]) -> bool:
        """Reads statements; whether whatever follows them is never reached."""
        held = len(self.reader.path)
        try:
            for node in statements:
                self.reader.steps += 1
                if self.reader.steps > MOST:
                    raise Refused("its forward is too long to read")
                read = getattr(self, f"read_{type(node).__name__}", None)
                if read is None:
                    self.refuse(node)
                if read(node):
                    return True
            return False
        finally:
            del self.reader.path[held:]

    def read_Pass(self, node: ast.Pass) -> None:
        pass

    def read_Raise(self, node: ast.Raise) -> None:
        raise Raised(str(self.refused(node)))

    def read_Return(self, node: ast.Return) -> bool:
        value = Plain(None) if node.value is None else self.expression(node.value)
        if self.outer is None and self.reader.depth == 1:
            self.use(value, node)
        self.returns.append(value)
        return True

    def read_Assign(self, node: ast.Assign) -> None:
        value = self.expression(node.value)
        for target in node.targets:
            if type(target) is ast.Name:
                self.env[target.id] = value
            else:
                self.assign(target, value, node)

    def read_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.expression(node.value), node)
        elif not isinstance(node.target, ast.Name):
            self.refuse(node)

    def read_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.refuse(node)
        before = self.read_Name(ast.Name(node.target.id, ast.Load()))
        if isinstance(before, (Given, Own, Several, Words)):  # it would be written to
            self.refuse(node)
        value = self.expression(node.value)
        self.env[node.target.id] = self.operation(node.op, before, value, node)

    def read_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.refuse(node)
            self.env.pop(target.id, None)

    def read_Expr(self, node: ast.Expr) -> None:
        if is_text(node) or logs(node, self.function.__globals__):
            return
        if not isinstance(node.value, ast.Call):
            self.refuse(node)
        self.read_Call(node.value, idle=True)

    def read_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            self.refuse(node)
        self.env[node.name] = self.closure(node)

    def closure(self, node: Union[ast.FunctionDef, ast.Lambda]) -> Closure:
        a = node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
        defaults = dict(zip(names[len(names) - len(a.defaults) :], a.defaults))
        defaults.update({arg.arg: d for arg, d in zip(a.kwonlyargs, a.kw_defaults) if d})
        return Closure(node, self, {n: self.expression(d) for n, d in defaults.items()})

    def read_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.split(".")[0]
            if name not in sys.modules:
                self.refuse(node)
            self.env[alias.asname or name] = Plain(sys.modules[name])

    def read_ImportFrom(self, node: ast.ImportFrom) -> None:
        home = sys.modules.get(node.module) if not node.level else None
        for alias in node.names:
            if not hasattr(home, alias.name):
                self.refuse(node)
            place = (vars(home), alias.name)
            self.env[alias.asname or alias.name] = Plain(getattr(home, alias.name), place)

    def read_For(self, node: ast.For) -> bool:
        several = self.expression(node.iter)
        if not isinstance(several, Several) or node.orelse:
            self.refuse(node)
        for value in several.values:
            self.assign(node.target, value, node)
            if self.block(node.body):
                return True
        return False

    def read_With(self, node: ast.With) -> bool:
        for item in node.items:
            call = item.context_expr
            if not isinstance(call, ast.Call) or not self.is_context(call):
                self.refuse(node)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, VALUE, node)
        return self.block(node.body)

    def read_Assert(self, node: ast.Assert) -> None:
        held = self.truth(self.expression(node.test), node.test)
        if isinstance(held, Plain):
            return None if held.value else self.refuse(node)
        if held.on != {"none"} or held.text is not None:  # of what is computed, the probe tells
            self.exclude(negated(held), None, node)

    def read_If(self, node: ast.If) -> bool:
        if not node.orelse and all(self.does_nothing(inner) for inner in node.body):
            self.expression(node.test)
            return False
        ways = (lambda: self.block(node.body)), (lambda: self.block(node.orelse))
        found = self.either(node.test, *ways, optional=not node.orelse)
        open_ways = [env for ended, env, _ in found if not ended]
        if not open_ways:
            return True
        self.env = open_ways[0]
        for env in open_ways[1:]:
            self.env = {n: merged(v, self.env.get(n, VALUE)) for n, v in env.items()} | {
                n: VALUE for n in self.env if n not in env
            }
        if len(found) > len(open_ways):  # the others returned
            self.reader.path.append(next(held for ended, _, held in found if not ended))
        return False

    def does_nothing(self, node: ast.stmt) -> bool:
        plain = isinstance(node, ast.Pass) or is_text(node)
        return plain or logs(node, self.function.__globals__)

    # -- two ways

    def either(
        self, test: ast.expr, yes: Callable, no: Callable, optional: bool = False
    ) -> List[Tuple]:
        """[(what a way gives, the names after it, the condition of it)] of those that a call may
        take. One that cannot be read is for calls that are not ours, and so is an `optional` one
        for nothing or under torch.jit; one by other sizes is refused, unless it raises."""
        held = self.truth(self.expression(test), test)
        if isinstance(held, Plain):
            return [((yes if held.value else no)(), self.env, Known("True", frozenset()))]
        before, found, refused = self.env, [], []
        ways = [(held, yes), (negated(held), no)]
        by_size = held.on & {"size", "derived"}
        nothing = by_size and held.text is not None and held.text.endswith(" == 0)")
        if optional and (nothing or "call" in held.on and not by_size):
            refused.append((held, self.refused(test)))
            del ways[0]
        for condition, way in ways:
            self.env, mark = dict(before), self.reader.mark()
            returned = len(self.returns)
            self.reader.path.append(condition)
            try:
                found.append((way(), self.env, condition))
            except Refused as why:
                self.reader.back_to(mark)
                del self.returns[returned:]
                refused.append((condition, why))
            finally:
                self.reader.path.pop()
        self.env = before
        if len(refused) > 1:
            raise refused[0][1]
        for condition, why in refused:
            if by_size and not nothing and not isinstance(why, Raised):
                raise why
            self.exclude(condition, why, test)
        if not refused and (by_size or "call" in held.on):
            self.refuse(test)
        if not refused and "dtype" in held.on:
            self.reader.source.need(BY_DTYPE)
        self.reader.source.switches |= {name[1:] for name in held.on if name.startswith("=")}
        if len(found) == 1:
            self.env = found[0][1]
        return found

    def exclude(self, condition: Known, why: Optional[Refused], node: ast.AST) -> None:
        """Calls for which the condition holds here are for the forward itself."""
        if condition.text is None or condition.on <= {"own"}:
            raise why or self.refused(node)
        everything = [known for known in (*self.reader.path, condition) if known.text is not None]
        self.reader.source.excluded.append(" and ".join(f"({known.text})" for known in everything))


def negated(held: Known) -> Known:
    return held._replace(text=None if held.text is None else f"not ({held.text})")
