"""Uses of generate: ways to decode, kinds of caches, CUDA graphs."""

import copy
import pickle

import torch
from sides import Generated, use
from subjects import WITH_RING
from tiny_models import random_model
from uses_forward import together, without_functions

NEW = 18  # of 16 and more a call without a word about caches is graphed
KEPT = {"return_dict_in_generate": True, "output_logits": True}


def generate(s, model, ids=None, new=NEW, kept=True, **options):
    """Tokens, logits and states. kept=False: the tokens alone, as most people call it."""
    ids = s.ids() if ids is None and "inputs_embeds" not in options else ids
    words = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    words = {**KEPT, **words} if kept else words
    if s.graph is not None and s.kernel is not None:  # on a CPU, too, by the way that a GPU takes
        import transformers

        words["compile_config"] = config = transformers.CompileConfig()
        config._compile_all_devices = True
    else:
        words.setdefault("disable_compile", True)
    torch.manual_seed(1)
    out = model.generate(ids, **words)
    if not kept:
        return Generated(sequences=out)
    cache = out.get("past_key_values")
    cache = cache.self_attention_cache if hasattr(cache, "self_attention_cache") else cache
    return Generated(sequences=out.sequences, logits=list(out.logits), cache=cache)


def mask_of(ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return mask


WAYS = {
    "greedily": {},
    "by sampling": {"do_sample": True, "top_k": 7, "temperature": 1.3},
    "by beams": {"num_beams": 3},
    "by beams and sampling": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "several sequences of each": {"do_sample": True, "num_return_sequences": 3},
    "a prompt in chunks": {"prefill_chunk_size": 4},
    "without a cache": {"use_cache": False},
    "with penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "with guidance": {"guidance_scale": 1.5},
    "until words": {"eos_token_id": list(range(30, 60)), "min_new_tokens": 3},
    "static cache": {"cache_implementation": "static"},
    "static cache, a prompt in chunks": {
        "cache_implementation": "static", "prefill_chunk_size": 4,
    },
    "static cache, by beams": {"cache_implementation": "static", "num_beams": 2},
    "static cache, by sampling": {"cache_implementation": "static", "do_sample": True},
}  # fmt: skip


def way(name, options):
    @use(f"generate {name}")
    def plainly(s):
        return generate(s, s.served(), **options)

    @use(f"generate {name}, CUDA graphs", graphs=True)
    def graphed(s):
        model = s.served(cuda_graphs=True)
        return [generate(s, model, kept=kept, **options) for kept in (False, True)]


for _name, _options in WAYS.items():
    way(_name, _options)


def both(name, **facts):
    """A use of generate, with CUDA graphs and without."""

    def add(function):
        @use(f"generate {name}", **facts)
        def plainly(s):
            return function(s, s.served())

        @use(f"generate {name}, CUDA graphs", graphs=True, **facts)
        def graphed(s):
            return function(s, s.served(cuda_graphs=True))

        return function

    return add


@both("with padding")
def padding(s, model):
    return generate(s, model, attention_mask=mask_of(s.ids()), kept=False)


@both("static cache, with padding")
def static_padding(s, model):
    mask = mask_of(s.ids())
    return generate(s, model, attention_mask=mask, cache_implementation="static")


@both("by lookup in the prompt")
def lookup(s, model):
    return generate(s, model, s.ids(1, 9), prompt_lookup_num_tokens=3, kept=False)


@both("with an assistant")
def assistant(s, model):
    helper = random_model("llama", s.device, num_hidden_layers=1)
    return generate(s, model, s.ids(1, 9), assistant_model=s.serve(helper), kept=False)


@both("from inputs_embeds")
def embeds(s, model):
    with torch.no_grad():
        x = model.get_input_embeddings()(s.ids())
    return [generate(s, model, inputs_embeds=x, kept=kept) for kept in (False, True)]


@both("on, with the cache of before")
def further(s, model):
    first = generate(s, model, new=1)
    ids = torch.cat([s.ids(), s.ids(2, 3, seed=1)], 1)
    return [first, generate(s, model, ids, past_key_values=first["cache"])]


@both("on, with a static cache of before")
def further_static(s, model):
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    first = generate(s, model, past_key_values=cache, new=1)
    ids = torch.cat([s.ids(), s.ids(2, 3, seed=1)], 1)
    return [first, generate(s, model, ids, past_key_values=cache)]


@both("twice, with another batch between")
def batches(s, model):
    return [generate(s, model, s.ids(n, 9, seed=n), kept=False, new=18) for n in (2, 1, 2)]


@both("with a hook of a layer")
def hook(s, model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    return generate(s, model, kept=False)


@both("with weights that change between")
def changed(s, model):
    first = generate(s, model, kept=False)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.mul_(1.3)
    return [first, generate(s, model, kept=False)]


both("after half()", rough=True)(lambda s, model: generate(s, model.half()))


@both("under autocast", rough=True)
def autocast(s, model):
    with torch.autocast(s.device, torch.bfloat16):
        return generate(s, model)


@both("in inference_mode, and outside again")
def inference(s, model):
    with torch.inference_mode():
        inside = generate(s, model, kept=False)
    inside["sequences"] = inside["sequences"].clone()
    return [inside, generate(s, model, kept=False)]


both("a deepcopy")(lambda s, model: generate(s, copy.deepcopy(model), kept=False))


@both("a pickle")
def pickled(s, model):
    model = pickle.loads(pickle.dumps(without_functions(model)))
    return generate(s, model, kept=False)


@both("then restore")
def restored(s, model):
    first = generate(s, model, kept=False)
    return [first, generate(s, s.restore(model), kept=False)]


@both("with scores and hidden states")
def hidden(s, model):
    words = {"output_hidden_states": True, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(
        s.ids(), max_new_tokens=20, do_sample=False, pad_token_id=0, disable_compile=True, **words
    )
    return Generated(sequences=out.sequences, logits=list(out.scores), hidden=out.hidden_states)


@both("with a streamer")
def streamed(s, model):
    class Tape:
        def __init__(self):
            self.seen = []

        def put(self, x):
            self.seen += x.flatten().tolist()

        def end(self):
            self.seen.append(-1)

    tape = Tape()
    out = generate(s, model, s.ids(1, 9), kept=False, streamer=tape)
    return Generated(**out, seen=tape.seen)


@both("with a processor of logits")
def processed(s, model):
    from transformers import LogitsProcessorList

    def shifted(ids, scores):
        return scores.roll(1, -1) + scores

    return generate(s, model, logits_processor=LogitsProcessorList([shifted]))


@both("with soft words of its own")
def soft(s, model):
    """A model whose inputs are one token longer than its ids, as prompt tuning has them."""
    kind = type(model)

    class Soft(kind):
        def prepare_inputs_for_generation(self, ids, past_key_values=None, **words):
            found = super().prepare_inputs_for_generation(
                ids, past_key_values=past_key_values, **words
            )
            if found.get("input_ids") is not None and found["input_ids"].shape[1] > 1:
                x = self.get_input_embeddings()(found.pop("input_ids"))
                found["inputs_embeds"] = torch.cat([x[:, :1] * 0.5, x[:, :1] * 2, x], 1)
                found["attention_mask"] = found["position_ids"] = None
                found.pop("cache_position", None)
            return found

    model.__class__ = Soft
    return generate(s, model, kept=False)


@use("graphed_step", graphs=True)
def graphed_step(s):
    import transformers

    model = s.served()
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        found = [model(s.ids(), past_key_values=cache).logits[:, -1:]]
        step = model if s.kernel is None else s.kernel.graphed_step(model, cache, batch_size=2)
        for token in s.ids(2, 8, seed=1).split(1, 1):
            words = {"past_key_values": cache} if step is model else {}
            found.append(step(token, **words).logits.clone())
    return [found, cache]


@use("replay=16, CUDA graphs", graphs=True, only=WITH_RING)
def ring(s):
    model = s.served(cuda_graphs=True, replay=16)
    return [
        generate(s, model, cache_implementation="static", new=40),
        generate(s, model, kept=False, new=40),
    ]


@use("generate in three threads")
def threads(s):
    model = s.served()
    return together([lambda i=i: generate(s, model, s.ids(seed=i), kept=False) for i in range(3)])
