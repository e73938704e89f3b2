"""Tests of kernelize(model, replay=...): tokens equal those of decoding that writes every state,
also if callers read, copy, reorder, reset or replace the cache's states meanwhile."""

import copy
import pickle

import pytest
import torch
from conftest import submodule
from tiny_models import WITH_GDN, random_model, tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, NEW = 4, 11  # of a ring; tokens that a test generates
CLOSE = {torch.float64: {"rtol": 0, "atol": 1e-12}, torch.float32: {"rtol": 0, "atol": 2e-5}}
every_model = pytest.mark.parametrize("name", WITH_GDN)


@pytest.fixture(autouse=True)
def small_states_pay(monkeypatch):
    """A ring for tiny states, too, and where no kernel serves."""
    monkeypatch.setattr(submodule("layers.replay"), "pays", lambda state: True)


def both(kernel, name, dtype=None, device="cpu", **sizes):
    """A served model, and one that decodes with rings; torch has no mixtures of experts in fp64."""
    dense = name in ("qwen3_5_text", "olmo_hybrid")
    dtype = (torch.float64 if dense else torch.float32) if dtype is None else dtype
    plain = random_model(name, device, **sizes).to(dtype)
    ringed = copy.deepcopy(plain)
    kernel.kernelize(plain)
    kernel.kernelize(ringed, replay=ROWS)
    return plain, ringed


def assert_close(found, want):
    torch.testing.assert_close(found, want, **CLOSE[want.dtype])


def layers_of(cache):
    return [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]


def states(cache):
    """HeldStates of all layers that have such."""
    kind = submodule("layers.replay").HeldStates
    return [x.recurrent_states for x in layers_of(cache) if isinstance(x.recurrent_states, kind)]


def state_of(cache):
    return layers_of(cache)[0].recurrent_states[0]


class Pair:
    """A cache of each of two models, through which the same goes."""

    def __init__(self, models, batch=3, prompt=7):
        self.models = models
        self.caches = [transformers.DynamicCache(config=m.config) for m in models]
        self.random = torch.Generator().manual_seed(0)
        self.batch = batch
        self.feed(prompt)

    @torch.no_grad()
    def feed(self, count, times=1):
        for _ in range(times):
            ids = torch.randint(2, 97, (self.batch, count), generator=self.random)
            ids = ids.to(self.models[0].device)
            want, found = (
                m(ids, past_key_values=c).logits for m, c in zip(self.models, self.caches)
            )
            assert_close(found, want)

    def each(self, change):
        for cache in self.caches:
            change(cache)

    def check_states(self):
        want, found = map(state_of, self.caches)
        assert_close(found, want)


@every_model
def test_greedy_tokens(kernel, name):
    plain, ringed = both(kernel, name)
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask}
    for kind in ("dynamic", "static"):
        want, found = (
            m.generate(ids, cache_implementation=kind, disable_compile=True, **options)
            for m in (plain, ringed)
        )
        assert torch.equal(found, want)


@every_model
def test_logits_and_states(kernel, name):
    x = Pair(both(kernel, name))
    x.feed(1, 2 * ROWS + 1)
    assert len(states(x.caches[1])) == 1 and not states(x.caches[0])
    held = states(x.caches[1])[0].held
    assert held.cursor[:, 1].tolist() == [1, 1, 1]
    x.check_states()
    assert not held.cursor.any()  # written
    x.feed(1, ROWS)
    x.feed(5)  # more of the prompt: from the state with all tokens
    x.feed(1, ROWS + 1)
    x.check_states()
    assert states(x.caches[1])[0].held is held
    assert not states(copy.deepcopy(x.caches[1]))  # which are plain


def test_two_layers_of_which_one_runs(kernel):
    """Cursors are the layers' own."""
    x = Pair(both(kernel, "qwen3_5_text"))
    x.feed(1, 2)
    extra = torch.randn(3, 1, 32, generator=x.random).double()
    with torch.no_grad():
        for _ in range(3):
            want, found = (
                m.model.layers[0].linear_attn(extra, c) for m, c in zip(x.models, x.caches)
            )
            assert_close(found, want)
    x.feed(1, ROWS)
    x.check_states()


def offload(cache):
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


def replace(cache):
    for layer in layers_of(cache):
        layer.recurrent_states = {0: layer.recurrent_states[0] * 0.5}


CHANGES = {
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "read": lambda cache: [dict(layer.recurrent_states) for layer in layers_of(cache)],
    "offloaded": offload,
    "copied": lambda cache: setattr(cache, "layers", copy.deepcopy(cache.layers)),
    "pickled": lambda cache: setattr(cache, "layers", pickle.loads(pickle.dumps(cache.layers))),
    "replaced": replace,
    "scaled": lambda cache: [x.recurrent_states[0].mul_(0.5) for x in layers_of(cache)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_happens_to_a_cache(kernel, change):
    x = Pair(both(kernel, "qwen3_5_text"))
    for _ in range(3):
        x.feed(1, ROWS - 2)
        x.each(CHANGES[change])
    x.check_states()
    x.feed(1, ROWS + 2)
    x.check_states()


def test_crop(kernel):
    """A layer with a state cannot be cropped, with a ring or without; where it records the past,
    transformers crops the convolution's inputs and nothing else."""
    x = Pair(both(kernel, "qwen3_5_text"))
    x.feed(1, 2)
    layers = [layer for cache in x.caches for layer in layers_of(cache)]
    for layer in layers:
        assert not layer.is_croppable
        with pytest.raises(RuntimeError, match="does not track past states"):
            layer.crop(-1)
    x.feed(1, ROWS + 1)
    for layer in layers:
        layer.activate_past_recording()
    for crop in (0, -1, 0, -2):
        x.feed(1, 3)
        for layer in layers:
            layer.crop(crop)
        x.check_states()
    x.feed(1, ROWS + 1)
    x.check_states()


def test_a_cache_that_is_reset_is_used_again(kernel):
    models = both(kernel, "qwen3_5_text")
    x = Pair(models)
    x.caches = [transformers.StaticCache(config=m.config, max_cache_len=40) for m in models]
    for prompt in (7, 1):
        x.feed(prompt)
        x.feed(1, ROWS + 2)
        x.check_states()
        x.feed(1, 1)
        x.each(lambda cache: cache.reset())


def test_a_state_that_is_put_back(kernel):
    """The tokens since it was read are in it: it is the one that decoding goes on from."""
    x = Pair(both(kernel, "qwen3_5_text"))
    x.feed(1, 2)
    kept = [state_of(cache) for cache in x.caches]
    x.feed(1, 2)
    for cache, state in zip(x.caches, kept):
        layers_of(cache)[0].recurrent_states[0] = state
    assert states(x.caches[1])[0].held is not None
    x.feed(1, ROWS + 1)
    x.check_states()


def test_restored_in_the_middle(kernel):
    x = Pair(both(kernel, "qwen3_5_text", torch.float32))
    x.feed(1, ROWS - 1)
    for model in x.models:
        kernel.restore(model)
    x.feed(1, 3)
    for model, rows in zip(x.models, (0, ROWS)):
        kernel.kernelize(model, replay=rows)
    x.feed(1, 3)
    x.check_states()


def test_gradients_after_rings(kernel):
    x = Pair(both(kernel, "qwen3_5_text"))
    x.feed(1, 3)
    ids = tokens(3, 1)
    for model, cache in zip(x.models, x.caches):
        model(ids, past_key_values=cache).logits.square().mean().backward()
    for a, b in zip(*(m.parameters() for m in x.models)):
        if a.grad is not None:
            assert_close(b.grad, a.grad)


def test_autocast_and_inference_mode(kernel):
    x = Pair(both(kernel, "qwen3_5_text", torch.float32))
    with torch.inference_mode():
        x.feed(1, 2)
    ids = tokens(3, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for model, cache in zip(x.models, x.caches):
            model(ids, past_key_values=cache)
    with torch.inference_mode():
        assert state_of(x.caches[1]).isfinite().all()
    x.models[1](ids, past_key_values=x.caches[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs(kernel, dtype):
    """The cursor goes on in replays, which run no Python; a read state has all tokens."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    eager = random_model("qwen3_5_text", "cuda", **sizes).to(dtype)
    graphed = copy.deepcopy(eager)
    kernel.kernelize(eager, replay=ROWS)
    report = kernel.kernelize(graphed, replay=ROWS, cuda_graphs=True)
    assert "written once in 4 tokens" in str(report)
    caches = [transformers.StaticCache(config=eager.config, max_cache_len=64) for _ in "ab"]
    step = kernel.graphed_step(graphed, caches[1], 3)
    for turn in range(2):
        for model, cache in zip((eager, graphed), caches):
            with torch.no_grad():
                model(tokens(3, 7, seed=turn, device="cuda"), past_key_values=cache)
        for t in range(3 * ROWS):
            ids = tokens(3, 1, seed=t, device="cuda")
            with torch.no_grad():
                want = eager(ids, past_key_values=caches[0]).logits
            assert torch.equal(step(ids).logits, want)
            if t in (ROWS + 1, 3 * ROWS - 1):
                assert torch.equal(state_of(caches[1]), state_of(caches[0]))
        assert step.reason is None and step._step.graph is not None
        for cache in caches:
            cache.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_on_the_gpu(kernel, name):
    """Kernels, grouped heads and all: the tokens and states of decoding without rings."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    x = Pair(both(kernel, name, torch.float32, "cuda", **sizes))
    for _ in range(3):
        x.feed(1, ROWS + 1)
        x.check_states()
    x.feed(9)
    x.feed(1, ROWS + 1)
    x.each(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0], device="cuda")))
    x.feed(1, ROWS + 1)
    x.check_states()


def test_report_and_arguments(kernel):
    model = random_model("llama")
    assert "no Gated DeltaNet layer" in kernel.kernelize(model, replay=16).left[-1].reason
    report = kernel.kernelize(random_model("qwen3_next"), replay=16)
    assert report.left[-1].reason == "no replay: the model is on cpu"
    for value, error in ((1, ValueError), (-2, ValueError), (True, TypeError), ("16", TypeError)):
        with pytest.raises(error, match="replay must be"):
            kernel.kernelize(model, replay=value)


def test_rings_begin_in_graphs_alone(kernel, monkeypatch):
    """Rings are used for large fp32 states that have kernels; otherwise layers decode without
    them."""
    monkeypatch.undo()
    x = Pair(both(kernel, "qwen3_5_text"))
    module = submodule("layers.replay")
    with module.rings_begin():
        x.feed(1, 2)
    assert not states(x.caches[1])
    monkeypatch.setattr(module.dispatch, "has_kernels", lambda *args: True)
    small, large = (torch.zeros(1).expand(size // 4) for size in (2**20, 2**25))
    assert not module.pays(large)
    with module.rings_begin():
        assert module.pays(large) and not module.pays(small) and not module.pays(large.double())
    assert not module.pays(large)
