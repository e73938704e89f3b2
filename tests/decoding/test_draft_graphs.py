"""Drafts in CUDA graphs: tokens, logits and states are those without drafts.

Equal tokens alone prove nothing: with states that are never taken back they were still equal.
On a CPU a graph is emulated: emulated_graph.py.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import decoding
import pytest
import torch
from conftest import submodule
from decoding import generate, kernelized, on_every_device, tiny
from tiny_models import tokens

transformers = pytest.importorskip("transformers")
from transformers.generation import candidate_generator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures
loop = submodule("decoding.draft_loop")
MODELS = ["llama", "gemma2", "qwen3_5_text", "olmo_hybrid", "qwen3_5_moe_text", "kimi_linear"]


class Oracle(submodule("decoding.drafters").Drafter):
    """Drafts the tokens that will come, but for one at a place of each round."""

    truth, wrong = [], None

    def __init__(self, count):
        self.count, self.ids = count, []

    def add(self, token):
        self.ids.append(token)

    def drafts(self):
        found = list(self.truth[len(self.ids) : len(self.ids) + self.count])
        if self.wrong is not None and len(found) > self.wrong:
            found[self.wrong] = (found[self.wrong] + 1) % 90
        return found


@pytest.fixture
def rounds(graph, monkeypatch):
    for module in ("rounds", "draft_loop"):
        monkeypatch.setattr(submodule(f"decoding.{module}"), "Graph", graph)
    return graph


@pytest.fixture
def serving(device, monkeypatch):
    """Layers run their class's own forward where there are no kernels, KDA's among them: here our
    torch code."""
    if device == "cpu":
        for module in ("layers.forward", "decoding.rows"):
            monkeypatch.setattr(submodule(module), "serves", lambda *given: True)


def cache_of(out):
    return out.get("cache") if out.get("cache") is not None else out.past_key_values


def states_of(out):
    """Of each layer what it keeps of the text."""
    found = []
    for layer in cache_of(out).layers:
        if getattr(layer, "recurrent_states", None):
            found += [layer.recurrent_states[0], layer.conv_states[0][..., 1:]]
        else:
            n = int(layer.cumulative_length)
            found += [layer.keys[:, :, :n], layer.values[:, :, :n]]
    return found


def assert_the_same(one, two, limit):
    assert torch.equal(one.sequences, two.sequences)
    assert len(one.logits) == len(two.logits)
    for a, b in [*zip(one.logits, two.logits), *zip(states_of(one), states_of(two), strict=True)]:
        assert a.shape == b.shape
        assert ((a - b).abs().max() / b.abs().max().clamp_min(1e-9)).item() <= limit


def run(model, ids, **options):
    return generate(model, ids, return_dict_in_generate=True, output_logits=True, **options)


# Both ways are true fp32, TF32 is off, and the rules of a few tokens have no tensor core products:
# only the order of sums differs, by 5e-7 on a CPU, and on a GPU by that of cuBLAS' kernels, too.
LIMIT = {"cpu": 2e-5, "cuda": 1e-4}


# how many drafts, and which of them is wrong; the loop is one for all models
ROUNDS = [(name, 3, wrong) for name in MODELS for wrong in (None, 1)]
ROUNDS += [
    (name, *more) for name in ("llama", "qwen3_5_text") for more in ((3, 0), (1, None), (7, 5))
]


@pytest.mark.parametrize("name, count, wrong", ROUNDS)
@on_every_device
def test_drafts_of_an_oracle(kernel, rounds, request, monkeypatch, name, count, wrong, device):
    if name == "kimi_linear":
        request.getfixturevalue("serving")
    model, ids = tiny(name, device), tokens(1, 11, device=device)
    kernel.kernelize(model, cuda_graphs=True)
    new = 40 if wrong is not None else 8 * (count + 1)
    before = run(model, ids, max_new_tokens=new)
    monkeypatch.setattr(Oracle, "truth", before.sequences[0].tolist())
    monkeypatch.setattr(Oracle, "wrong", wrong)
    monkeypatch.setattr(loop, "Lookup", Oracle)
    monkeypatch.setattr(loop.Pace, "WORTH", 0)
    rounds.captures = rounds.replays = 0
    after = run(model, ids, max_new_tokens=new, prompt_lookup_num_tokens=count)
    assert_the_same(after, before, LIMIT[device])
    assert rounds.captures >= 1 and rounds.replays >= 3
    if wrong is None:
        assert rounds.replays <= new // (count + 1) + 1


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_states_that_are_not_put_back_are_seen(kernel, rounds, monkeypatch, device):
    """That these tests can fail."""
    model, ids = tiny("qwen3_5_text", "cpu"), tokens(1, 11)
    kernel.kernelize(model, cuda_graphs=True)
    before = run(model, ids, max_new_tokens=24)
    monkeypatch.setattr(Oracle, "truth", before.sequences[0].tolist())
    monkeypatch.setattr(Oracle, "wrong", 1)
    monkeypatch.setattr(loop, "Lookup", Oracle)
    rows = submodule("decoding.rows").TakesBack
    keep = rows.keep

    def forgets(self, right, given):
        keep(self, right, given)
        self.accepted.fill_(given)

    monkeypatch.setattr(rows, "keep", forgets)
    with pytest.raises(AssertionError):
        assert_the_same(
            run(model, ids, max_new_tokens=24, prompt_lookup_num_tokens=3), before, 2e-5
        )


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_layers_that_keep_no_states(kernel, rounds, monkeypatch, device):
    """No token is drafted for a model whose layers run their class's own forward."""
    ids, words = tokens(1, 11), {"max_new_tokens": 24, "prompt_lookup_num_tokens": 3}
    model = kernelized(kernel, "kimi_linear", "cpu")
    with pytest.raises(ValueError, match="stateful"):
        run(model, ids, **words)
    model = kernelized(kernel, "qwen3_5_text", "cpu")
    of_rows = submodule("decoding.rows")._layer_class
    monkeypatch.setattr(loop, "Lookup", Oracle)
    monkeypatch.setattr(Oracle, "truth", list(range(90)))

    def layer_class(own, T):
        kind = of_rows(own, T)
        monkeypatch.setattr(kind, "takes_back", lambda self, tokens: False)
        return kind

    monkeypatch.setattr(submodule("decoding.rows"), "_layer_class", layer_class)
    with pytest.raises(RuntimeError, match="did not keep the state"):
        run(model, ids, **words)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_graphs_go_with_their_call(kernel, rounds, monkeypatch, name, device):
    """Nothing holds them that waits for the garbage collector, nor the cache."""
    model, ids = tiny(name, device), tokens(1, 4, device=device).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    monkeypatch.setattr(loop.Pace, "WORTH", 0)
    gc.collect()
    before = len(rounds.alive)
    gc.disable()
    try:
        rounds.captures = 0
        run(model, ids, max_new_tokens=24, prompt_lookup_num_tokens=3)
        assert rounds.captures > 0 and len(rounds.alive) == before
    finally:
        gc.enable()


OPTIONS = {
    "lookup": {},
    "an end inside": {"eos_token_id": list(range(40, 60))},
    "padding": {"padding": 3},
    "scores": {
        "repetition_penalty": 1.3, "min_new_tokens": 9, "eos_token_id": [7, 9, 11, 30, 31],
        "output_scores": True,
    },
    "length inside": {"max_new_tokens": 17},
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_prompt_lookup(kernel, rounds, monkeypatch, name, what, device):
    model, ids = tiny(name, device), tokens(1, 4, device=device).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    options = {"max_new_tokens": 24, **OPTIONS[what]}
    monkeypatch.setattr(loop.Pace, "WORTH", 0)
    if options.pop("padding", 0):
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][:, :3] = 0
    before = run(model, ids, **options)
    rounds.replays = 0
    after = run(model, ids, **options, prompt_lookup_num_tokens=3)
    assert_the_same(after, before, LIMIT[device])
    if "output_scores" in options:
        for a, b in zip(after.scores, before.scores, strict=True):
            close = torch.isclose(a, b, rtol=1e-4, atol=LIMIT[device])
            assert bool((close | (a == b)).all())
    assert rounds.replays > 0 or len(before.logits) < 8


@on_every_device
def test_a_window_that_fills_has_no_rounds(kernel, rounds, device):
    """A round of several tokens fills it in another way than one token does."""
    model = tiny("gemma2", device, sliding_window=12)
    ids = tokens(1, 4, device=device).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    before = model.generate(ids, max_new_tokens=24, do_sample=False)
    rounds.captures = 0
    after = model.generate(ids, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(before, after) and rounds.captures == 0


@pytest.mark.parametrize("name", ["mm_token_type_ids", "others"])
@on_every_device
def test_an_input_as_long_as_the_text(kernel, rounds, name, device):
    """Before release 5.23 Qwen3.5 has one after images, which a token does not read; with another
    one no graph is replayed again."""
    model, ids = tiny("llama", device), tokens(1, 4, device=device).repeat(1, 4)
    kind = type(model)

    class Growing(kind):
        def prepare_inputs_for_generation(self, ids, **words):
            found = super().prepare_inputs_for_generation(ids, **words)
            return {**found, name: torch.zeros_like(ids)}

    model.__class__ = Growing
    before = run(model, ids, graphed=False, max_new_tokens=24)
    kernel.kernelize(model, cuda_graphs=True)
    for words in ({}, {"prompt_lookup_num_tokens": 3}):
        rounds.captures = rounds.replays = 0
        after = run(model, ids, max_new_tokens=24, **words)
        # a capture is replayed at once
        assert (rounds.replays > rounds.captures) == (name == "mm_token_type_ids")
        assert_the_same(after, before, LIMIT[device])


class Streamed:
    def __init__(self):
        self.calls, self.ended = [], 0

    def put(self, value):
        self.calls.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@on_every_device
def test_tokens_come_one_by_one(kernel, rounds, device):
    """To a streamer, and to a criterion of one's own, which ends inside a round."""
    model, ids = tiny("qwen3_5_text", device), tokens(1, 3, device=device).repeat(1, 5)
    kernel.kernelize(model, cuda_graphs=True)
    lengths = []

    def stops(input_ids, scores, **given):
        lengths.append(input_ids.shape[1])
        return torch.full((1,), input_ids.shape[1] == 31, device=input_ids.device)

    found = []
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        streamer = Streamed()
        lengths.clear()
        out = run(model, ids, max_new_tokens=40, streamer=streamer, stopping_criteria=[stops],
                  **options)  # fmt: skip
        assert out.sequences.shape[1] == 31 and lengths == list(range(16, 32))
        assert streamer.calls[1:] == [[x] for x in out.sequences[0, 15:].tolist()]
        found.append((out, streamer.ended))
    assert found[0][1] == found[1][1] == 1
    assert_the_same(found[1][0], found[0][0], LIMIT[device])


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_tokens_that_are_launched_before_the_last_is_known(
    kernel, rounds, monkeypatch, name, drawn, device
):
    """While drafts rest. Tokens, ends and the generator's state are those of waiting for each."""
    model, ids = tiny(name, device), tokens(1, 11, device=device)
    kernel.kernelize(model, cuda_graphs=True)
    monkeypatch.setattr(loop, "Lookup", Oracle)
    monkeypatch.setattr(Oracle, "truth", [])
    round_of = submodule("decoding.rounds").Round
    generator = rounds.generator(ids.device)

    def call(follows, **options):
        with monkeypatch.context() as patched:
            if not follows:
                patched.setattr(round_of, "follows", lambda self: False)
            torch.manual_seed(3)
            rounds.replays = 0
            found = generate(model, ids, max_new_tokens=40, prompt_lookup_num_tokens=3,
                             do_sample=drawn, **options)  # fmt: skip
        return found[0].tolist(), generator.get_offset(), rounds.replays

    text, _, replays = call(False)
    assert call(True)[::2] == (text, replays)  # the length is known
    # eight tokens without a draft, before which none is expected, and a graph of one token
    n = next(n for n in range(24, 50) if text[n] not in text[11:n])
    one, two = (call(follows, eos_token_id=text[n]) for follows in (False, True))
    assert one[:2] == two[:2] and len(one[0]) == n + 1
    assert two[2] == one[2] + 1


@on_every_device
def test_a_call_without_a_word_about_caches(kernel, rounds, device):
    """Gets a static cache, as undrafted calls do, where it pays; a short one keeps its own."""
    model, ids = tiny("llama", device), tokens(1, 4, device=device).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    words = {"do_sample": False, "pad_token_id": 0, "prompt_lookup_num_tokens": 3}
    if device == "cpu":
        words["compile_config"] = config = transformers.CompileConfig()
        config._compile_all_devices = True
    for new, graphed in ((32, True), (8, False)):
        rounds.replays = 0
        after = model.generate(ids, max_new_tokens=new, **words)
        assert (rounds.replays > 0) == graphed
        plain = type(model).generate(
            model, ids, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        assert torch.equal(after, plain)


@on_every_device
def test_drawn_tokens_are_distributed_as_without_drafts(kernel, rounds, monkeypatch, device):
    """Chi-squared of the third and fourth new token, of which rounds draw several at once."""
    V = 24
    model, ids = tiny("llama", device, vocab_size=V), tokens(1, 6, device=device) % V
    kernel.kernelize(model, cuda_graphs=True)
    model.get_output_embeddings().weight.data.mul_(8)
    choose, rows = submodule("decoding.choosing").choice_of, []
    options = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
    config = transformers.GenerationConfig(do_sample=True, **options)
    processors = model._get_logits_processor(config, input_ids_seq_length=6)
    made = loop.RowChoice(choose(processors, True), ids)
    logits = torch.randn(3, V, device=device).mul_(2)
    read = torch.tensor([3, 5, 7], device=device)
    for _ in range(4000):
        rows.append(made.choose(logits, read, 6)[0])
    drawn = torch.stack(rows).cpu()
    for i in range(3):
        p = processors(ids, logits[i : i + 1].clone()).softmax(-1)[0].cpu()
        counts = torch.bincount(drawn[:, i], minlength=V).double()
        assert counts[p == 0].sum() == 0
        kept = p > 0
        expected = p[kept].double() * len(drawn)
        chi, free = ((counts[kept] - expected) ** 2 / expected).sum().item(), int(kept.sum()) - 1
        assert chi < free + 5 * (2 * free) ** 0.5
    right = (drawn[:, 0] == 5).double().mean().item()  # rows are drawn one without the other
    both = ((drawn[:, 0] == 5) & (drawn[:, 1] == 7)).double().mean().item()
    second = (drawn[:, 1] == 7).double().mean().item()
    assert abs(both - right * second) < 0.03


@on_every_device
def test_drawn_tokens_in_rounds(kernel, rounds, device):
    """A seed gives the same tokens twice, and a top-k of one those of greedy decoding."""
    model, ids = tiny("qwen3_5_text", device), tokens(1, 4, device=device).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    options = {"max_new_tokens": 24, "do_sample": True, "prompt_lookup_num_tokens": 3}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(run(model, ids, **options).sequences)
    assert torch.equal(*found) and found[0].shape[1] == 40
    greedy = run(model, ids, max_new_tokens=24)
    assert_the_same(run(model, ids, **options, top_k=1), greedy, LIMIT[device])


class InSomeRounds(candidate_generator.CandidateGenerator):
    """Two drafts in every fourth round, of which one is right."""

    def __init__(self, truth):
        self.truth, self.calls = truth, 0

    def get_candidates(self, input_ids, *args, **given):
        n, self.calls = input_ids.shape[1], self.calls + 1
        found = self.truth[:, n : n + 2 * (self.calls % 4 == 0)].clone()
        found[:, 1:] = (found[:, 1:] + 1) % 90
        return torch.cat([input_ids, found], 1), None

    def update_candidate_strategy(self, *given):
        pass


@on_every_device
def test_a_cache_that_is_passed_in(kernel, rounds, monkeypatch, device):
    """From 5.24 transformers takes it, and asks for our step: rounds without a draft are replays,
    also behind rounds whose drafts were cropped."""
    model = tiny("llama", device)
    ids = tokens(1, 12, device=device)  # nothing to look up at first
    kernel.kernelize(model, cuda_graphs=True)

    def call(**options):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        return run(model, ids, max_new_tokens=40, past_key_values=cache, cache_implementation=None,
                   **options)  # fmt: skip

    before = call()
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        with pytest.raises(ValueError, match="(?i)static"):
            call(prompt_lookup_num_tokens=2)
        return
    monkeypatch.setattr(
        transformers.generation.GenerationMixin, "_get_candidate_generator",
        lambda self, **given: InSomeRounds(before.sequences),
    )  # fmt: skip
    rounds.replays = 0
    after = call(prompt_lookup_num_tokens=2)
    assert_the_same(after, before, LIMIT[device])
    assert rounds.replays > 0


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_what_is_left_to_transformers(kernel, rounds, device):
    model, ids = tiny("llama", "cpu"), tokens(1, 4).repeat(1, 4)
    kernel.kernelize(model, cuda_graphs=True)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    rounds.captures = 0
    for more in ({"no_repeat_ngram_size": 30}, {"disable_compile": True}):
        after = model.generate(ids, **options, prompt_lookup_num_tokens=3, **more)
        assert torch.equal(after, before) and rounds.captures == 0
    with pytest.raises(ValueError, match="batch_size"):
        model.generate(ids.repeat(2, 1), **options, prompt_lookup_num_tokens=3)
    kernel.restore(model)
    assert "generate" not in model.__dict__


def test_lookup():
    lookup = submodule("decoding.drafters")
    found = lookup.Lookup(4)
    for token in (1, 2, 3, 1, 2, 4, 5, 1, 2):
        found.add(token)
    assert found.drafts() == [4, 5, 1, 2]  # what followed last
    found.add(9)
    assert found.drafts() == []
    found = lookup.Lookup(4)
    for token in (7, 7, 7):
        found.add(token)
    assert found.drafts() == [7, 7, 7, 7]


def test_pace():
    """Drafts rest after 8 rounds that do not pay, and twice as long when 4 more do not, either."""
    pace, drafter = submodule("decoding.drafters").Pace(), SimpleNamespace(drafts=lambda: [3, 4])
    rests = []
    for rounds in (8, 4, 4):
        for _ in range(rounds):
            assert pace.drafts(drafter) == [3, 4] and not pace.rests()
            pace.note(1)
        rest = 0
        while pace.rests():
            assert pace.drafts(drafter) == []
            rest += 1
        rests.append(rest)
    assert rests == [64, 128, 256]
    for n in range(32):
        assert pace.rest == 512
        pace.note(1 + (n % 2))
        assert pace.drafts(drafter) == [3, 4]
    assert pace.rest == 64
    for n in range(32):  # above half of what a round is to add, and below all of it
        assert not pace.rests()
        pace.note(2 if n % 8 == 0 else 1)
    assert pace.rests()
    pace.waits = 0
    drafter.drafts = list
    for n in range(10):
        assert pace.rests() == (n >= 8)
        assert pace.drafts(drafter) == []


def test_weights_that_are_read():
    """Embeddings are not, and of experts those that are chosen: more by several tokens."""

    def read(model, tokens=1):
        return submodule("decoding.drafters").Weights(model).read(tokens)

    dense, model = tiny("qwen3_5_text", "cpu"), tiny("qwen3_5_moe_text", "cpu")
    count = sum(x.numel() for x in dense.parameters()) - dense.model.embed_tokens.weight.numel()
    tied = dense.lm_head.weight is dense.model.embed_tokens.weight
    assert read(dense) == read(dense, 5) == count + tied * dense.lm_head.weight.numel()
    stacks = [x.numel() for name, x in model.named_parameters() if ".mlp.experts." in name]
    E, K = model.config.num_experts, model.config.num_experts_per_tok
    assert len(stacks) > 1 and 1 < K < E
    one, two, many = (read(model, n) for n in (1, 2, 10**6))
    assert many - one == pytest.approx(sum(stacks) * (1 - K / E))
    assert two - one == pytest.approx(sum(stacks) * K / E * (1 - K / E))


def mtp_of(kernel, model, count):
    layer = submodule("decoding.mtp").Mtp(model, 1)
    torch.manual_seed(2)
    weights = {f"mtp.{n}": torch.randn(x.shape) * 0.1 for n, x in layer.state_dict().items()}
    return kernel.load_mtp(model, weights, count)


def with_a_helper(rounds, monkeypatch, model, ids, helper, device, words):
    """Asserts that drafts of an assistant or an MTP layer change nothing; returns the output
    without them."""
    monkeypatch.setattr(loop.Pace, "WORTH", -9)
    before = run(model, ids, **words)
    rounds.captures = rounds.replays = 0
    assert_the_same(run(model, ids, assistant_model=helper, **words), before, LIMIT[device])
    return before


END = {"eos_token_id": list(range(40, 60))}


@pytest.mark.parametrize(
    "name, count, options",
    [("qwen3_5_text", 1, {}), ("qwen3_5_text", 3, {}), ("qwen3_5_text", 3, END),
     ("qwen3_5_moe_text", 1, END), ("qwen3_5_moe_text", 3, {}), ("qwen3_next", 3, {})],
)  # fmt: skip
@on_every_device
def test_an_mtp_layer(kernel, rounds, monkeypatch, name, count, options, device):
    """Its rounds are graphs; tokens, logits and states are those without it, and a round that is
    launched before the tokens of the last are known changes nothing."""
    model, ids = tiny(name, device), tokens(1, 11, device=device)
    kernel.kernelize(model, cuda_graphs=True)
    layer = mtp_of(kernel, model, count)
    words = {"max_new_tokens": 24, **options}
    before = with_a_helper(rounds, monkeypatch, model, ids, layer, device, words)
    needed = -(-(len(before.logits) - 1) // (count + 1))  # rounds, were all drafts right
    assert needed < 3 or rounds.captures == 1 and rounds.replays >= needed - 1
    ahead = generate(model, ids, assistant_model=layer, **words)
    assert torch.equal(ahead, before.sequences)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_drafts_of_an_mtp_layer(kernel, rounds, monkeypatch, device):
    """Whatever number of drafts is right: they are those of the layer on the whole text, without a
    cache, and logits and states are as without drafts."""
    model, ids = tiny("qwen3_5_text", "cpu"), tokens(1, 11)
    kernel.kernelize(model, cuda_graphs=True)
    layer = mtp_of(kernel, model, 2)
    monkeypatch.setattr(loop.Pace, "WORTH", -9)
    before = run(model, ids, max_new_tokens=40)
    text = before.sequences[0]
    right = torch.arange(len(text) + 3) % 5 > torch.arange(len(text) + 3) % 3
    table = (torch.cat([text, text[:3]]) + (~right).long()) % 97
    drafter, seen = loop.MtpRounds, []
    own, launch = drafter.after, loop.Loop._launch

    def after(self, read, tokens, hidden, right, before):
        """As many drafts are right as the table has it; those of the layer are kept."""
        self.own = own(self, read, tokens, hidden, right, before)
        return torch.cat([self.own[:1], table[before + right + 1 + torch.arange(2)]])

    def launched(self, now, given):
        if now.T > 1:
            seen.append((list(self.ids), self.drafter.own.tolist()))
        return launch(self, now, given)

    monkeypatch.setattr(drafter, "after", after)
    monkeypatch.setattr(loop.Loop, "_launch", launched)
    assert_the_same(run(model, ids, max_new_tokens=40, assistant_model=layer), before, 2e-5)
    lengths = [len(read) for read, _ in seen]
    assert {b - a for a, b in zip(lengths, lengths[1:])} == {1, 2, 3}
    for read, (last, *drafts) in seen:
        assert last == read[-1]
        read = torch.tensor([read])
        with torch.no_grad():
            hidden = model.model(read[:, :-1]).last_hidden_state
            places = torch.arange(1, read.shape[1])[None]
            h = layer(model, read[:, 1:], hidden, places, None)
            assert model.lm_head(h[:, -1]).argmax(-1).item() == drafts[0]
            more = torch.tensor([[*read[0].tolist(), drafts[0]]])
            h = layer(model, more[:, 1:], torch.cat([hidden, h[:, -1:]], 1), places.new_tensor(
                [list(range(1, more.shape[1]))]), None)  # fmt: skip
            assert model.lm_head(h[:, -1]).argmax(-1).item() == drafts[1]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_an_mtp_layer_in_threads(kernel, rounds, device):
    """Each reads the hidden states of its own calls; a hook of another keeps it from no graph."""
    model = tiny("qwen3_5_text", "cpu")
    prompts = [tokens(1, 11, seed=seed) for seed in range(3)]
    kernel.kernelize(model, cuda_graphs=True)
    layer = mtp_of(kernel, model, 2)
    before = [run(model, ids, max_new_tokens=24) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        after = list(pool.map(
            lambda ids: run(model, ids, max_new_tokens=24, assistant_model=layer), prompts
        ))  # fmt: skip
    for one, two in zip(after, before):
        assert_the_same(one, two, LIMIT[device])
    reading = submodule("decoding.reading")
    with reading.last_hidden(model) as found, ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model(prompts[0])).result()
        assert found.states is None
        assert submodule("decoding.graph_rules").why_not_model(model) is None
        model(prompts[0])
    assert found.states.shape == (1, 11, model.config.hidden_size)


@on_every_device
def test_drafts_of_an_mtp_layer_that_rest(kernel, rounds, monkeypatch, device):
    """They do not pay: after 8 rounds tokens come one by one, and drafts come again."""
    model, ids = tiny("qwen3_5_text", device), tokens(1, 11, device=device)
    kernel.kernelize(model, cuda_graphs=True)
    layer = mtp_of(kernel, model, 2)
    monkeypatch.setattr(loop.Pace, "REST", 4)
    before = run(model, ids, max_new_tokens=40)
    pace, found = loop.Pace.note, []

    def note(self, count):
        found.append(count)
        pace(self, count)

    monkeypatch.setattr(loop.Pace, "note", note)
    assert_the_same(
        run(model, ids, max_new_tokens=40, assistant_model=layer), before, LIMIT[device]
    )
    assert sum(found) < 37 and len(found) > 12
    ahead = generate(model, ids, max_new_tokens=40, assistant_model=layer)
    assert torch.equal(ahead, before.sequences)


@pytest.mark.parametrize(
    "helper, options", [("qwen3", END), ("qwen3", {}), ("qwen3_5_text", {}), ("gemma2", {})]
)
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_an_assistant(kernel, rounds, monkeypatch, name, helper, options, device):
    """Dense, hybrid, with windows: rounds and its own tokens are replays."""
    model, ids = tiny(name, device), tokens(1, 11, device=device)
    assistant = tiny(helper, device)
    kernel.kernelize(model, cuda_graphs=True)
    words = {"max_new_tokens": 24, **options}
    with_a_helper(rounds, monkeypatch, model, ids, assistant, device, words)
    if not options:
        assert rounds.captures == 1 and rounds.replays >= 3


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "kimi_linear"])
@on_every_device
def test_drafts_of_an_assistant(kernel, rounds, request, monkeypatch, name, rest, device):
    """They are those of the assistant on the whole text, whatever number of them was right, and
    where they have rested: what it has read of wrong ones is taken back, of its states as well."""
    if name == "kimi_linear":
        request.getfixturevalue("serving")
    ids = tokens(1, 11, device=device)
    model, assistant = tiny(name, device), tiny(name, device)  # the same: all drafts are right
    assistant.generation_config.num_assistant_tokens = 3
    kernel.kernelize(model, cuda_graphs=True)
    kernel.kernelize(assistant, cuda_graphs=True)
    pace = {"REST": 4, "WINDOW": 2, "WORTH": 9} if rest else {"WORTH": -9}
    for each, value in pace.items():
        monkeypatch.setattr(loop.Pace, each, value)
    before = run(model, ids, max_new_tokens=40)
    text = before.sequences[0]
    place = torch.arange(len(text) + 4, device=device)
    table = (torch.cat([text, text[:4]]) + (place % 5 <= place % 3).long()) % 97
    own, launch, seen = loop.Assistant._chain, loop.Loop._launch, []
    kept = place[:3].clone()

    def chain(self, pair, length):
        """The table makes some drafts wrong."""
        kept.copy_(own(self, pair, length))
        return table[length + 2 + place[:3]]

    def launched(self, now, given):
        if now.T > 1:
            seen.append((list(self.ids), kept.tolist()))
        return launch(self, now, given)

    monkeypatch.setattr(loop.Assistant, "_chain", chain)
    monkeypatch.setattr(loop.Loop, "_launch", launched)
    after = run(model, ids, max_new_tokens=40, assistant_model=assistant)
    assert_the_same(after, before, LIMIT[device])
    kernel.restore(assistant)
    assert len(seen) > 3
    for read, found in seen:
        logits = assistant(torch.tensor([read + found], device=device)).logits[0]
        assert logits[len(read) - 1 : -1].argmax(-1).tolist() == found
