"""Calls of attention at new lengths of a cache: which plan they take, what they launch, and what
that costs the host."""

from functools import partial

import pytest
import torch
from conftest import submodule
from interpreter import compiled

pytest.importorskip("triton.experimental.gluon")
from launching import started  # noqa: E402
from test_host_calls import forget_other_models, functions, hopper, once  # noqa: E402, F401

pytestmark = compiled
HALF, MORE = torch.bfloat16, 22  # functions of a new length beside those of a repeated one
KNOWN = submodule("attention.ops").KVCACHE_ATTENTION


def cached(S, B=2, HQ=8, HK=2, D=64, dtype=HALF, mask="bool"):
    """q, keys, values and mask."""
    k, v = (torch.zeros(B, HK, S, D, dtype=dtype) for _ in "kv")
    masks = {
        None: lambda: None,
        "bool": lambda: torch.ones(B, 1, 1, S, dtype=torch.bool),
        "one row": lambda: torch.ones(1, 1, 1, S, dtype=torch.bool).expand(B, 1, 1, S),
        "longer": lambda: torch.ones(B, 1, 1, 2 * S, dtype=torch.bool)[..., ::2],
        "added": lambda: torch.zeros(B, 1, 1, S, dtype=dtype),
    }
    return torch.zeros(B, 1, HQ, D, dtype=dtype), k, v, masks[mask]()


def attend(kernel, q, k, v, mask=None, length=None, **options):
    return kernel.attention_with_kvcache(q, k, v, length, attention_mask=mask, **options)


@pytest.mark.parametrize("mask", [None, "bool"])
@torch.no_grad()
def test_functions_of_a_new_length(hopper, mask):  # noqa: F811
    """The plan of another length says how it is launched; a call without one has more than three
    times as many functions."""
    for S in range(2, 130):  # all numbers of parts up to here, all kinds of strides
        attend(hopper, *cached(S, mask=mask))
    repeated = functions(partial(attend, hopper, *cached(129, mask=mask)))
    assert repeated <= 8
    for S in (*range(100, 116), *range(65, 120, 7)):
        new = once(partial(attend, hopper, *cached(S, mask=mask)))
        assert repeated <= new <= repeated + MORE
    assert len(KNOWN.sizes) == 1
    KNOWN.cache_clear()
    assert once(partial(attend, hopper, *cached(100, mask=mask))) > 3.5 * (repeated + MORE)


def of_release() -> int:
    """More functions of a layer where transformers knows its cache by two names (5.24)."""
    return 3 * hasattr(pytest.importorskip("transformers").utils.generic, "_rename_kwargs_for_bc")


LAYERS = {1: 101, 4: 106}  # functions of a layer of a Llama, transformers' and torch's among them


@pytest.mark.parametrize("batch", LAYERS)
@torch.no_grad()
def test_functions_of_a_token(hopper, batch, monkeypatch):  # noqa: F811
    """A token through a model at a new length: attention's first call looks for its launches, and
    the layers behind it have them; padded rows, so that there is a mask."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import random_model

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    forget_other_models(monkeypatch)
    monkeypatch.setattr(submodule("layers.few_tokens"), "_makes_plans", lambda where: True)
    ids, mask = torch.ones(2, batch, 40, dtype=torch.long)
    mask[0, :2] = batch == 1
    new, repeated = {}, {}
    for layers in (2, 4):
        model = random_model("llama", **sizes, head_dim=64, num_hidden_layers=layers).bfloat16()
        hopper.kernelize(model)
        cache = transformers.DynamicCache(config=model.config)

        def token(at, model=model, cache=cache):
            model(ids[:, at : at + 1], past_key_values=cache, attention_mask=mask[:, : at + 1])

        model(ids[:, :6], past_key_values=cache, attention_mask=mask[:, :6])
        for at in range(6, 38):
            token(at)
        new[layers] = once(partial(token, 38))
        cache.crop(-1)
        repeated[layers] = once(partial(token, 38))
    for layers in (2, 4):
        assert 0 < new[layers] - repeated[layers] <= MORE
    assert 50 < (repeated[4] - repeated[2]) / 2 <= LAYERS[batch] + of_release()


@pytest.mark.parametrize("D", [64, 24])
@pytest.mark.parametrize("mask", [None, "bool", "one row", "longer", "added"])
@torch.no_grad()
def test_launches_of_a_new_length(hopper, mask, D):  # noqa: F811
    """Those of a call whose plan knows no other length, and the code that Triton's binder takes."""
    every = [*range(1, 40), 63, 64, 65, 255, 256, 257, 258, 2047, 2048, 2049, 5, 17]
    runs = []
    for forgets in (False, True):
        KNOWN.cache_clear()
        with started() as starts:
            for S in every:
                attend(hopper, *cached(S, D=D, mask=mask))
                if forgets:
                    KNOWN.cache_clear()
        runs.append([start[:-1] for start in starts])
        assert len(KNOWN.sizes) == (0 if forgets else 2)  # 1, and all others
    assert runs[0] == runs[1] and len(runs[0]) > len(every)


@torch.no_grad()
def test_plans_of_other_facts(hopper):  # noqa: F811
    """What a plan is for beside S: all else is checked anew."""
    q, k, v, mask = call = cached(33)
    attend(hopper, *call)

    def known(q, k, v, mask, length=None, scale=None):
        return KNOWN.sizes.find((q, k, v, length, mask), (scale,)) is not None

    assert known(*call) and known(*cached(34)) and known(*cached(5000))
    assert known(*cached(40)[:3], cached(50)[3][..., :40])  # other strides of rows
    more = [torch.zeros(2, 2, 80, 64, dtype=HALF)[:, :, :40] for _ in "kv"]
    assert known(q, *more, cached(40)[3])
    other = {
        "one slot": cached(1),
        "no slot": cached(0),
        "keys of another length": (q, cached(34)[1], v, mask),
        "values of another length": (q, k, cached(34)[2], mask),
        "a mask of another length": (q, k, v, cached(34)[3]),
        "no mask": (q, k, v, None),
        "lengths": (*call, torch.tensor(3)),
        "scale": (*call, None, 0.5),
        "batch": cached(33, B=3),
        "a mask of one row": (q, k, v, mask[:1]),
        "key heads": cached(33, HK=4),
        "query heads": cached(33, HQ=4),
        "head dim": cached(33, D=32),
        "values of another head dim": (q, k, cached(33, D=32)[2], mask),
        "dtype": cached(33, dtype=torch.float16),
        "dtype of the mask": cached(33, mask="added"),
        "device": (q, k.to("meta"), v, mask),
        "a gradient": (q, k.clone().requires_grad_(), v, mask),
        "steps between channels": (q, torch.zeros(2, 2, 33, 128, dtype=HALF)[..., ::2], v, mask),
        "steps between slots": (q, torch.zeros(2, 2, 66, 64, dtype=HALF)[:, :, ::2], v, mask),
        "steps in the mask": (q, k, v, cached(33, mask="longer")[3]),
        "fewer dims": (q, k[0], v, mask),
        "no tensor": (q, None, v, mask),
        "a list": (q, [k], v, mask),
        "one cache for both": (q, k, k, mask),
    }
    assert [what for what, args in other.items() if known(*args)] == []
    with torch.enable_grad():
        assert not known(*call)


@pytest.mark.parametrize("wrong", ["k_cache", "v_cache", "attention_mask"])
@torch.no_grad()
def test_errors_after_a_plan(hopper, wrong):  # noqa: F811
    for S in (33, 34, 35):
        attend(hopper, *cached(S))
    place = ["k_cache", "v_cache", "attention_mask"].index(wrong) + 1
    call = list(cached(36))
    call[place] = cached(37)[place]
    with pytest.raises(ValueError, match="must have shape|shape"):
        attend(hopper, *call)
    with pytest.raises(ValueError, match="at least one slot"):
        attend(hopper, *cached(0))


@torch.no_grad()
def test_memory_of_many_lengths(hopper):  # noqa: F811
    """Neither the plans nor what one of them keeps grow with the number of lengths."""
    launch = submodule("runtime.launch")
    for S in range(2, 3000):
        attend(hopper, *cached(S, B=1, HK=1, HQ=1, D=16))
    assert len(KNOWN) == KNOWN._count == 4 and len(KNOWN.sizes) == KNOWN.sizes._count == 1
    ((row,),) = KNOWN.sizes._rows.values()
    held = dict(zip(row[-1].__code__.co_freevars, row[-1].__closure__))
    assert len(held["launches"].cell_contents.made) < 40
    assert len(launch._codes) < 40


def test_guards_of_a_varying_size():
    module = submodule("runtime.cache")
    cache, x = module.CallCache({1: 1, 2: 0}), torch.zeros(3)

    def pair(n, m=None, width=4):
        return x, torch.zeros(2, n, width), torch.zeros(n if m is None else m)

    with torch.no_grad():
        cache.keep(pair(5), (), "plan")
        for n in (2, 3, 5, 1000):
            assert cache.find(pair(n), ()) == "plan"
        assert cache.find((x, torch.zeros(2, 9, 4)[:, :7], torch.zeros(7)), ()) == "plan"
        for other in (
            pair(1), pair(0), pair(5, 6), pair(5, width=3), (x, *pair(5)[1:][::-1]),
            (x, torch.zeros(2, 5, 8)[..., ::2], torch.zeros(5)), (x, pair(5)[1], None),
            (x, pair(5)[1], torch.zeros(10)[::2]), (x, pair(5)[1].double(), torch.zeros(5)),
            (x, torch.zeros(3, 5, 4), torch.zeros(5)), (x, pair(5)[1], torch.zeros(5, 1)),
        ):  # fmt: skip
            assert cache.find(other, ()) is None
        for exact in (pair(1), pair(5, 6)):  # kept as they are
            cache.keep(exact, (), "exact")
            assert cache.find(exact, ()) == "exact"
        assert cache.find(pair(6, 7), ()) is None and cache.find(pair(5), ()) == "plan"
        same = torch.zeros(4)
        double = module.CallCache({1: 0, 2: 0})
        double.keep((x, same, same), (), "same")
        assert double.find((x, same, same), ()) == "same"
        assert double.find((x, *torch.zeros(2, 4)), ()) is None
