"""Is recognition strict? Single changes of the forwards of norms, attention modules and decoder
layers of transformers, and which of them are still taken for what they were.

    python tests/mutants.py [--only TYPE ...] [--every N]

Every place of a forward, and of the functions that it calls, is changed in turn: an operand or a
call is dropped, a sign turned, a keyword left out, a constant raised, a part taken for another, an
assignment dropped, a condition negated. A change that is still recognised as the same form is
printed: it must compute the same. Exits with 1 if one is printed that HARMLESS has not.
"""

import argparse
import ast
import copy
import inspect
import linecache
import sys
import textwrap
import types
import warnings

from conftest import submodule
from tiny_models import random_model

TYPES = ("llama", "qwen3", "qwen3_5_text", "olmo_hybrid", "gemma2", "phi3", "glm", "ernie4_5",
         "glm4v_text", "pixtral")  # fmt: skip
FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "rotate_half_llm")
SWAPS = {
    "q_proj": "k_proj", "k_proj": "v_proj", "q_norm": "k_norm", "k_norm": "q_norm",
    "input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm",
    "scaling": "head_dim", "layer_idx": "head_dim", "float32": "float64",
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}


class Mutation(ast.NodeTransformer):
    """Changes the n-th place of a function; `what` says how, None where there are fewer."""

    def __init__(self, n: int):
        self.n, self.count, self.what = n, 0, None

    def hit(self, node, what: str) -> bool:
        self.count += 1
        if self.count - 1 == self.n:
            self.what = f"{what}: {ast.unparse(ast.fix_missing_locations(node))[:70]}"
        return self.count - 1 == self.n

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if self.hit(node, "left operand only"):
            return node.left
        other = OPERATORS.get(type(node.op))
        if other and self.hit(node, f"{other.__name__} instead"):
            return ast.BinOp(node.left, other(), node.right)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if node.args and self.hit(node, "argument instead of call"):
            return node.args[0]
        for i, word in enumerate(node.keywords):
            if word.arg and self.hit(node, f"without {word.arg}="):
                node.keywords = node.keywords[:i] + node.keywords[i + 1 :]
                return node
        return node

    def visit_Constant(self, node):
        number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return ast.Constant(node.value + 1) if number and self.hit(node, "+1") else node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr in SWAPS and self.hit(node, f"{SWAPS[node.attr]} instead"):
            return ast.Attribute(node.value, SWAPS[node.attr], node.ctx)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        return ast.Pass() if self.hit(node, "dropped") else node

    def visit_If(self, node):
        self.generic_visit(node)
        if self.hit(node.test, "negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node


def function_of(tree: ast.Module, name: str, scope: dict):
    """The function of a tree, with a source that can be read as that of a file can."""
    text = ast.unparse(ast.fix_missing_locations(tree))
    file = f"<mutant of {name} {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(scope)
    exec(compile(text, file, "exec"), space)
    made = space[name]
    function = types.FunctionType(made.__code__, scope, name, made.__defaults__)
    function.__kwdefaults__ = made.__kwdefaults__
    return function


def places(kind: type, scope, form):
    """(owner, name) of the functions that a class's forward consists of."""
    yield kind, "forward"
    if "_norm" in vars(kind):
        yield kind, "_norm"
    called = {function.__name__ for function, _ in form.pinned.codes}
    for name in FUNCTIONS:
        if name in called:
            yield scope, name


def tree_of(owner, name: str) -> ast.Module:
    """A function as its file has it, without decorators and annotations."""
    if inspect.isclass(owner):
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(vars(owner)[name])))
        tree = ast.parse(text)
    else:
        body = ast.parse(inspect.getsource(owner)).body
        tree = ast.Module([n for n in body if getattr(n, "name", None) == name], [])
    function = tree.body[0]
    function.decorator_list, function.returns = [], None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    return tree


def modules_of(model, recognise) -> dict:
    """{class: its modules that are recognised, one of each kind} of norms, attention and layers.
    MLPs and GDN layers have their own (tests/refactors.py)."""
    found, done = {}, set()
    for module in model.modules():
        finding, key = recognise(module), (type(module), tuple(module._modules))
        if finding is None or finding.form is None or key in done:
            continue
        if finding.kind in ("mlp", "gdn"):
            continue
        if finding.reason is None:
            done.add(key)
            found.setdefault(type(module), []).append(module)
    return found


def trusting_recognise(module):
    """What is found where the user has named the module's class, which is patched."""
    with submodule("models.trust").trusting((type(module),)):
        return submodule("models.recognise").recognise(module)


def meaning(finding) -> tuple:
    """What a form says, without the code by which it was recognised."""
    if finding is None or finding.reason is not None:
        return None
    form = finding.form._asdict()
    keywords = form.pop("keywords", None)
    code = keywords and keywords.__code__
    words = code and (code.co_code, code.co_consts, code.co_names)
    apart = ("pinned", "guards", "arguments")
    return {**{n: v for n, v in form.items() if n not in apart}, "keywords": words}


def mutants(kind: str, every: int = 1, first: int = 0):
    """(how many were tried, those that pass) of every n-th change of a type of models."""
    recognise = trusting_recognise
    tried, passed, count = 0, [], first
    for cls, modules in modules_of(random_model(kind), recognise).items():
        scope, plain = sys.modules[cls.__module__], [recognise(module) for module in modules]
        for owner, name in places(cls, scope, plain[0].form):
            kept, tree = vars(owner)[name], tree_of(owner, name)
            places_of_all = Mutation(-1)
            places_of_all.visit(copy.deepcopy(tree))
            for n in range(places_of_all.count):
                count += 1
                if count % every:
                    continue
                mutation = Mutation(n)
                changed = mutation.visit(copy.deepcopy(tree))
                try:
                    setattr(owner, name, function_of(changed, name, vars(scope)))
                    tried += 1
                    # a change of what another layer of the class does counts for that one
                    if all(meaning(recognise(m)) == meaning(f) for m, f in zip(modules, plain)):
                        passed.append(f"{cls.__name__}.{name} {mutation.what}")
                except SyntaxError:
                    continue
                finally:
                    setattr(owner, name, kept)
    return tried, passed


# of what passes: norms computed in fp64 inside, where no bit of a 16-bit result is another, a value
# that is never used, a default that no call takes, a leading dimension of 1 that broadcasting adds,
# and dropouts that drop nothing, since a layer with one that does is refused
HARMLESS = {
    *(f"{name}RMSNorm.forward float64 instead: torch.float32"
      for name in ("Llama", "Qwen3", "OlmoHybrid", "Phi3", "Glm", "Glm4v", "Ernie4_5", "Pixtral")),
    *(f"OlmoHybridAttention.forward dropped: {t} = (None, None)"
      for t in ("cos, sin", "(cos, sin)")),  # as Python 3.11 spells it, and 3.10
    "PixtralAttention.apply_rotary_pos_emb +1: 1",
    *(f"PixtralAttention.apply_rotary_pos_emb dropped: {t} = {t}.unsqueeze(unsqueeze_dim)"
      for t in ("cos", "sin")),
    *(f"Phi3DecoderLayer.forward argument instead of call: self.resid_{name}_dropout(hidden_states)"
      for name in ("attn", "mlp")),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=TYPES, metavar="TYPE")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    harmful = 0
    for kind in options.only:
        tried, passed = mutants(kind, options.every)
        bad = [what for what in passed if what not in HARMLESS]
        harmful += len(bad)
        print(f"{kind}: {tried} changes, {len(passed)} pass, {len(bad)} of them perhaps harmful")
        for what in passed:
            print(f"    {what}", flush=True)
    return 1 if harmful else 0


if __name__ == "__main__":
    sys.exit(main())
