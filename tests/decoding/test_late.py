"""generate with cuda_graphs: transformers' tokens, streams, scores, caches and random numbers,
though its loop reads a token late whether to stop.

On a CPU a graph is emulated, and a value is on the host once it was waited for.
"""

import copy
import gc
import inspect
import pickle
import sys
import types
import weakref

import decoding
import pytest
import torch
from conftest import submodule
from decoding import NEW, generate, lively, on_every_device, own, padded, random_state, tiny
from emulated_graph import EmulatedGenerator
from tiny_models import tokens

transformers = pytest.importorskip("transformers")
logits_process = pytest.importorskip("transformers.generation.logits_process")
stopping = pytest.importorskip("transformers.generation.stopping_criteria")
pytestmark = pytest.mark.filterwarnings("ignore")
device, graph = decoding.device, decoding.graph  # fixtures

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
KEPT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
EOS = {"eos": True}
# tokens are about as likely as each other: rows end after six tokens, and soon
SOON = {**SAMPLED, "temperature": 5.0, "eos": list(range(30, 97)), "min_new_tokens": 6}


class Tape:
    """A streamer, which keeps what it is given."""

    def __init__(self, until=None):
        self.values, self.until = [], until

    def put(self, value):
        assert value.device.type == "cpu"
        self.values.append(value)
        if len(self.values) == self.until:
            raise KeyboardInterrupt

    def end(self):
        self.values.append(torch.tensor(-1))

    @property
    def heard(self):
        return [value.tolist() for value in self.values]


def tokenizer():
    """Tokenizer of the words 0 to 96: one letter, or two."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {letters[i % 26] + letters[i // 26] * (i >= 26): i for i in range(97)}
    found = Tokenizer(models.WordLevel(words, unk_token="a"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    found.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="a")


def theirs(model, ids, graphed=False, **options):
    return generate(own(model), ids, graphed=graphed, **options)


def theirs_to_the_bit(model, ids, **options):
    """On a GPU libraries may choose other kernels where they are captured."""
    return theirs(model, ids, graphed=ids.is_cuda, **options)


def ends(model, ids, mask):
    """Tokens that end rows at different times: each row's greedy ones, ever later."""
    free = theirs(model, ids, attention_mask=mask)
    return sorted({int(free[row, ids.shape[1] + 4 + 2 * row]) for row in range(len(ids))})


def cache_of(out):
    return out.get("cache") if out.get("cache") is not None else out.get("past_key_values")


def values_of(cache):
    """All tensors that a cache holds, and its length."""
    found = [torch.as_tensor(cache.get_seq_length()).reshape(-1).long().cpu()]
    for layer in cache.layers:
        for value in layer.__dict__.values():
            parts = dict(value).values() if hasattr(value, "keys") else [value]
            found += [x for x in parts if isinstance(x, torch.Tensor)]
    return found


def compare(model, ids, mask, eos=None, seed=0, streamed=True, **options):
    """Both ways; what transformers' own gave."""
    found = []
    for way in (theirs_to_the_bit, generate):
        tape = Tape() if streamed else None
        torch.manual_seed(seed)
        words = {"attention_mask": mask, "pad_token_id": 0, "streamer": tape, **options}
        out = way(model, ids, eos_token_id=eos, **words)
        found.append((out, tape and tape.heard, random_state(ids)))
    (a, heard, state), (b, heard_too, state_too) = found
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in ("scores", "logits"):
            for x, y in zip(a[name], b[name], strict=True):
                assert torch.equal(x, y)
        for x, y in zip(values_of(cache_of(a)), values_of(cache_of(b)), strict=True):
            assert torch.equal(x, y)
        a, b = a.sequences, b.sequences
    assert torch.equal(a, b)
    assert heard == heard_too
    assert torch.equal(state, state_too), "another random state"
    return a


CASES = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "three tokens": {"max_new_tokens": 3},
    "eos": EOS,
    "eos without a streamer": {**EOS, "streamed": False},
    "least": {**EOS, "min_new_tokens": 11},
    "repetition": {**EOS, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "time": {**EOS, "max_time": 60.0},
    "sampled": SAMPLED,
    "sampled, eos": SOON,
    "sampled, eos, more": {**SOON, "min_p": 0.01, "renormalize_logits": True, "streamed": False},
    "sequences": {**SOON, "num_return_sequences": 3},
    "kept": {**KEPT, "streamed": False},
    "kept, eos": {**KEPT, **EOS},
    "kept, sampled": {**KEPT, **SAMPLED, "streamed": False},
    "kept, sampled, eos": {**KEPT, **SOON},
}


FEW = ("greedy", "one token", "three tokens", "eos", "sampled, eos", "kept", "kept, sampled, eos")


@pytest.mark.parametrize(
    "name, batch",
    [("llama", 1), ("llama", 4), ("qwen3_5_text", 1), ("qwen3_5_text", 4), ("gemma2", 4)],
)
@on_every_device
def test_all_is_as_transformers_has_it(graph, name, device, batch):
    model = lively(name, device)
    ids, mask = padded(batch, 9, device)
    eos = ends(model, ids, mask)
    lengths = {}
    for what in CASES if batch > 1 else FEW:
        case = CASES[what]
        options = {n: x for n, x in case.items() if n != "eos"}
        given = eos if case.get("eos") is True else case.get("eos")
        lengths[what] = compare(model, ids, mask, eos=given, **options).shape[1] - 9
    assert lengths["greedy"] == NEW and 4 < lengths["eos"] < NEW
    assert lengths.get("least", NEW) >= 11 and 6 < lengths["sampled, eos"] < NEW
    assert graph.captures > 0


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_when_tokens_are_read(graph, name, device):
    """A token comes to the streamer once the next one's replay is launched, and one replay is too
    many where a sequence ends by a token; none where its length or its cache is known or kept."""
    model = lively(name, device)
    ids, mask = padded(1, 9, device)
    eos = ends(model, ids, mask)
    launched = []

    class Launched(Tape):
        def put(self, value):
            super().put(value)
            launched.append(graph.replays)

    words = {"attention_mask": mask, "pad_token_id": 0}
    found = generate(model, ids, streamer=Launched(), eos_token_id=eos, **words)
    count = found.shape[1] - 9
    assert 4 <= count < NEW
    # prompt, its token, an eager step's token; each later one with the next one launched
    assert launched == [0, 0, 0, *range(2, count)] and graph.replays == count - 1
    launched.clear()
    graph.replays = 0
    generate(model, ids, streamer=Launched(), **words)
    assert launched == [0, 0, 0, *range(2, NEW - 1), NEW - 2] and graph.replays == NEW - 2
    for options, spare in ((KEPT, {}), ({}, {"cache": True})):
        graph.replays = 0
        if spare:
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
            options = {"past_key_values": cache, "cache_implementation": None}
        generate(model, ids, eos_token_id=eos, **words, **options)
        assert graph.replays == count - 2


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@on_every_device
def test_two_turns_on_one_cache(graph, name, device):
    model = lively(name, device)
    ids, mask = padded(2, 9, device)
    eos, found = ends(model, ids, mask), []
    for way in (theirs_to_the_bit, generate):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        words = {"pad_token_id": 0, "past_key_values": cache, "cache_implementation": None}
        first = way(model, ids, attention_mask=mask, eos_token_id=eos, **words)
        seen = [x.clone() for x in values_of(cache)]
        more = torch.cat([first, ids[:, :5]], dim=1)
        again = torch.cat([mask, torch.ones_like(more[:, 9:])], dim=1)
        second = way(model, more, attention_mask=again, max_new_tokens=7, **words)
        found.append([first, *seen, second, *values_of(cache)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert graph.replays > 0


@on_every_device
def test_stop_strings_are_graphed(graph, device):
    model, words = lively("llama", device), tokenizer()
    ids, mask = padded(1, 9, device)
    free = theirs(model, ids, attention_mask=mask)
    text = words.convert_ids_to_tokens(int(free[0, 9 + 6]))
    options = {"stop_strings": [text], "tokenizer": words, "attention_mask": mask}
    expected = theirs(model, ids, **options)
    assert expected.shape[1] <= 9 + 7
    assert torch.equal(generate(model, ids, **options), expected)
    assert graph.replays == expected.shape[1] - 9 - 1


@on_every_device
def test_several_lengths(graph, device):
    """The least of them counts."""
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    for lengths in ((18, 15), (15, 18)):
        criteria = stopping.StoppingCriteriaList(map(stopping.MaxLengthCriteria, lengths))
        options = {"attention_mask": mask, "stopping_criteria": criteria}
        found = generate(model, ids, **options)
        assert torch.equal(found, theirs(model, ids, **options)) and found.shape[1] == 15


@on_every_device
def test_no_token_too_many_without_a_slot(graph, device):
    """A length of the user's may be more than the cache has; it is full when the row ends."""
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    free = theirs(model, ids, attention_mask=mask)[0, 9:].tolist()
    count = next(n for n in range(5, NEW) if free[n - 1] not in free[: n - 1])
    longer = stopping.StoppingCriteriaList([stopping.MaxLengthCriteria(9 + NEW)])
    options = {"eos_token_id": free[count - 1], "max_new_tokens": count, "attention_mask": mask}
    expected = theirs(model, ids, **options)
    assert expected.shape[1] == 9 + count
    assert torch.equal(generate(model, ids, stopping_criteria=longer, **options), expected)
    assert graph.replays == count - 2


# what goes to transformers' own loop


class Counts:
    """Counts how often it is called."""

    def __init__(self):
        self.calls = 0


class CountsScores(Counts, transformers.LogitsProcessor):
    def __call__(self, ids, scores):
        self.calls += 1
        return scores


class CountsStops(Counts, transformers.StoppingCriteria):
    def __call__(self, ids, scores, **options):
        self.calls += 1
        return ids[:, 0] < 0


@pytest.mark.parametrize("kind", [CountsScores, CountsStops])
@on_every_device
def test_code_of_the_users_is_called_once_a_token(graph, device, kind):
    model = lively("llama", device)
    ids, mask = padded(2, 9, device)
    words = {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": ends(model, ids, mask)}
    counting = kind()
    name = "logits_processor" if kind is CountsScores else "stopping_criteria"
    found = generate(model, ids, **{name: [counting]}, **words)
    assert counting.calls == found.shape[1] - 9 < NEW
    assert graph.replays == counting.calls - 2


REFUSED = {  # functions of the user's, models that are asked, and states that are counted on
    "LogitsProcessor", "LogitsWarper", "PrefixConstrainedLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor", "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection", "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor", "WatermarkLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
}  # fmt: skip


def test_every_processor_and_criterion_is_known():
    """By name: a new one of transformers' is to be looked at."""
    late = submodule("decoding.late")
    found = classes_of(logits_process, transformers.LogitsProcessor)
    assert late.PROCESSORS <= found and not late.PROCESSORS & REFUSED
    assert found - late.PROCESSORS <= REFUSED
    found = classes_of(stopping, transformers.StoppingCriteria)
    assert found - late.CRITERIA <= {"StoppingCriteria", "ConfidenceCriteria"}
    assert late.CRITERIA <= found


def classes_of(file, base):
    return {n for n, x in vars(file).items() if isinstance(x, type) and issubclass(x, base)}


@on_every_device
def test_other_ways_to_decode_get_the_model(graph, device):
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    seen = []

    def decode(model, input_ids, **options):
        seen.append(model)
        return input_ids

    generate(model, ids, custom_generate=decode)
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(module))
    for options in (
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2, "cache_implementation": None},
    ):
        words = {"attention_mask": mask, "pad_token_id": 0, **options}
        assert torch.equal(generate(model, ids, **words), theirs(model, ids, **words))
    assert graph.captures == 0
    generate(model, ids, attention_mask=mask, guidance_scale=1.5)
    handle.remove()
    words = {"attention_mask": mask, "guidance_scale": 1.5}
    assert torch.equal(generate(model, ids, **words), theirs(model, ids, **words))
    assert len(seen) > 10 and all(each is model for each in seen)
    with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
        generate(model, ids, num_beams=2, streamer=Tape())
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        generate(model, ids, stop_strings=["a"])


@pytest.mark.parametrize(
    "change",
    ["another loop", "other arguments", "another class", "other modes", "another generate"],
)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_releases_that_are_not_known(graph, device, change, monkeypatch):
    """Their own loop decodes, by graphs."""
    utils, model = transformers.generation.utils, lively("llama", device)
    ids, mask = padded(1, 9, device)
    words = {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": ends(model, ids, mask)}
    loop, check, kind = utils.GenerationMixin._sample, utils.DeferredStopCheck, type(model)

    class Other(check):
        def finish(self, more=None):
            return super().finish()

    if change == "another loop":
        wrapped = lambda self, *args, **options: loop(self, *args, **options)  # noqa: E731
        monkeypatch.setattr(utils.GenerationMixin, "_sample", wrapped)
    elif change == "other arguments":
        renamed = types.FunctionType(
            loop.__code__.replace(co_varnames=("self", "ids", *loop.__code__.co_varnames[2:])),
            loop.__globals__, loop.__name__, loop.__defaults__, loop.__closure__,
        )  # fmt: skip
        monkeypatch.setattr(utils.GenerationMixin, "_sample", renamed)
    elif change == "other modes":
        monkeypatch.setattr(utils, "GENERATION_MODES_MAPPING", {})
    elif change == "another class":
        monkeypatch.setattr(utils, "DeferredStopCheck", Other)
    else:
        own_generate = lambda self, *args, **options: self._generate(*args, **options)  # noqa: E731
        monkeypatch.setattr(kind, "_generate", kind.generate, raising=False)
        monkeypatch.setattr(kind, "generate", own_generate)
    why = submodule("decoding.late").why_not_late(kind)
    own_reason = "generate is not transformers' own"
    assert why == (own_reason if change == "another generate" else "its loop is of no known form")
    if change != "other modes":
        found = generate(model, ids, **words)
        assert torch.equal(found, theirs(model, ids, **words))
        assert graph.replays == found.shape[1] - 9 - 2
    row = submodule("decoding.generate").serve_graphs(model)
    assert row.note == f"CUDA graph, and a wait in each token: {why}"
    assert "generate" not in model.__dict__ and "get_compiled_call" in model.__dict__


def test_this_release_is_known():
    assert submodule("decoding.late").why_not_late(transformers.LlamaForCausalLM) is None


@pytest.mark.parametrize("positions", [None, 5])
def test_criteria_are_those_of_transformers(positions, monkeypatch):
    """Rows that end, at all lengths; and transformers' word on more positions than there are."""
    said = []
    monkeypatch.setattr(stopping.logger, "warning_once", said.append)
    length = stopping.MaxLengthCriteria(7, max_position_embeddings=positions)
    eos = [stopping.EosTokenCriteria(torch.tensor([3, 5])), stopping.EosTokenCriteria(4)]
    torch.manual_seed(0)
    for others in (eos, eos[:1], eos[1:], []):
        theirs = stopping.StoppingCriteriaList([*others, length])
        mine = submodule("decoding.late").Criteria(theirs)
        assert list(mine) == list(theirs) and mine.max_length == theirs.max_length == 7
        seen = set()
        for size in (1, 4, 5, 6, 7, 8) * 3:
            ids = torch.randint(0, 9, (4, size))
            words = []
            for criteria in (theirs, mine):
                said.clear()
                words.append((criteria(ids, None).tolist(), len(said)))
            assert words[0] == words[1]
            seen.add((any(words[0][0]), all(words[0][0])))
        assert ((True, False) in seen) == bool(others) and {(False, False), (True, True)} <= seen


# the model's own


@on_every_device
def test_a_stream_that_raises(graph, device):
    model = lively("qwen3_5_text", device)
    ids, mask = padded(1, 9, device)
    expected = theirs(model, ids, attention_mask=mask)
    for until in (1, 2, 3, 4, 7):
        heard = []
        for way in (theirs, generate):
            tape = Tape(until)
            with pytest.raises(KeyboardInterrupt):
                way(model, ids, streamer=tape, attention_mask=mask)
            heard.append(tape.heard)
        assert heard[0] == heard[1]
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
    heard = []
    for way in (theirs_to_the_bit, generate):  # a cache that lives on is never a token ahead
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        words = {"past_key_values": cache, "cache_implementation": None, "streamer": Tape(7)}
        with pytest.raises(KeyboardInterrupt):
            way(model, ids, attention_mask=mask, **words)
        heard.append(values_of(cache))
    for a, b in zip(*heard, strict=True):
        assert torch.equal(a, b)


@on_every_device
def test_what_generate_changes_is_changed_on_the_model(kernel, graph, device):
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    before = set(model.__dict__)
    generate(model, ids, attention_mask=mask)
    assert model._previous_max_cache_length == 9 + NEW - 1
    assert set(model.__dict__) - before == {"_previous_max_cache_length"}
    assert type(model) is transformers.LlamaForCausalLM
    own_method = type(model).generate.__get__(model)
    assert inspect.signature(model.generate) == inspect.signature(own_method)
    assert model.generate.__doc__ == own_method.__doc__
    assert kernel.restore(model) == 1
    assert model.generate == own_method and "generate" not in model.__dict__


@on_every_device
def test_a_generate_of_the_users(kernel, graph, device):
    model = tiny("llama", device)
    model.generate = lambda *args, **options: "mine"
    note = kernel.kernelize(model, cuda_graphs=True).rows[-1].note
    assert note == "CUDA graph, and a wait in each token: generate is set on the model"
    assert model.generate() == "mine"
    kernel.restore(model)
    assert model.generate() == "mine"


@on_every_device
def test_copies_and_pickles(graph, device):
    model = lively("llama", device)
    ids, mask = padded(1, 9, device)
    other = copy.deepcopy(model)
    assert other.generate.model is other and model.generate.model is model
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    other.generation_config.max_length = 9 + 5
    expected = theirs(other, ids, attention_mask=mask, max_new_tokens=None)
    found = generate(other, ids, attention_mask=mask, max_new_tokens=None)
    assert torch.equal(found, expected) and found.shape[1] == 9 + 5
    shallow = copy.copy(model)
    assert torch.equal(generate(shallow, ids), theirs(model, ids))
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None


class Generates(transformers.GenerationMixin, torch.nn.Module):
    """Models of transformers hold functions that cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(2, 2)

    def get_compiled_call(self, compile_config):
        return self.__call__


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_pickle_has_the_models_own_generate(graph, device):
    model = Generates()
    assert submodule("decoding.generate").serve_graphs(model).reason is None
    assert "generate" in model.__dict__
    again = pickle.loads(pickle.dumps(model))
    assert again.generate == Generates.generate.__get__(again)
    assert again.get_compiled_call == Generates.get_compiled_call.__get__(again)
    assert submodule("decoding.generate").serve_graphs(again).note == "CUDA graph"
    third = pickle.loads(pickle.dumps(again))
    assert (
        submodule("decoding.generate").restore_graphs(third.named_modules()) == 0
    )  # it has no replacement
    assert not third.__dict__.keys() & {"generate", "get_compiled_call"}
    submodule("decoding.generate").restore_graphs(again.named_modules())
    assert again.__dict__.keys() == Generates().__dict__.keys()


@on_every_device
def test_adapters_of_peft_read_late(graph, device):
    peft = pytest.importorskip("peft")
    model = tiny("llama", device, initializer_range=0.4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    assert submodule("decoding.generate").serve_graphs(model).reason is None
    ids, mask = padded(1, 9, device)
    inner = model.base_model.model
    words = {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": ends(inner, ids, mask)}
    expected = theirs(inner, ids, **words)
    found = generate(model, ids, **words)
    assert torch.equal(found, expected)
    assert graph.replays == found.shape[1] - 9 - 1


@on_every_device
def test_pipelines_read_late(graph, device):
    model, words = lively("llama", device), tokenizer()
    text = "quickfoxes"
    ids = torch.tensor([words(text)["input_ids"]], device=device)
    stop = int(theirs(model, ids)[0, 10 + 6])
    model.generation_config.eos_token_id = stop
    compiled = transformers.CompileConfig()
    compiled._compile_all_devices = True
    options = {"cache_implementation": "static", "do_sample": False, "compile_config": compiled}
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=words, device=device)
    found = pipeline(text, max_new_tokens=NEW, return_full_text=False, **options)
    expected = theirs(model, ids, eos_token_id=stop)[0, 10:]
    assert found[0]["generated_text"] == words.decode(expected)
    assert graph.replays == len(expected) - 1


# random numbers


def test_what_another_thread_draws_is_not_given_back():
    draws = submodule("decoding.late").Draws
    for between in (False, True):
        torch.manual_seed(0)
        generator = EmulatedGenerator()
        mine = draws(generator)
        states = []
        for token in range(3):
            torch.rand(1)
            if between and token == 2:
                generator.get_offset()
                torch.rand(1)  # another's
            mine.note()
            states.append(torch.get_rng_state())
        mine.take_back()
        assert torch.equal(torch.get_rng_state(), states[2 if between else 1])


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_functions_of_a_token(graph, device):
    """The host's time for a token that is a replay: functions of decoding/ that run."""
    model, ids, counts = lively("llama", "cpu"), tokens(1, 9), []

    def count(frame, event, _):
        if event == "call" and "/decoding/" in frame.f_code.co_filename:
            counts[-1] += "fused_swiglu_gdn" in frame.f_code.co_filename

    for new in (20, 20, 40):  # the first call looks at the model's class
        counts.append(0)
        sys.setprofile(count)
        try:
            generate(model, ids, max_new_tokens=new)
        finally:
            sys.setprofile(None)
    assert 20 < (counts[2] - counts[1]) / 20 <= 60
