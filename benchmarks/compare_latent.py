"""Latent attention of one token over a cache of latents, beside what transformers computes.

    python benchmarks/compare_latent.py [--json FILE]      on a GPU
    python benchmarks/compare_latent.py --models           a token of models by CUDA graphs
    python benchmarks/compare_latent.py --layers           attention of a layer with its projections

The peer sends the whole cache through kv_b_proj at every token and calls SDPA, as transformers
does. Times are by CUDA graph, over as many caches in turn as L2 does not hold. The floor is the
time that the latents and the weight take at 4.28 TB/s.
Of models, a token on a full static cache is one CUDA graph: transformers, kernelized but for
attention, and kernelized.
"""

import gc
import itertools
from functools import partial
from typing import Iterator

import torch
import torch.nn.functional as F
from kernel_time import graph_ms, graphed, in_turns, memory, milliseconds, wall
from model_cases import PROMPT, model_of, prompts
from runner import SECONDS, relative_error, run, submodule

MODELS = {  # heads, C, N, R, V
    "GLM-4.7-Flash": (20, 512, 192, 64, 256),
    "DeepSeek-V2-Lite": (16, 512, 128, 64, 128),
    "Kimi Linear": (32, 512, 128, 64, 128),
    "DeepSeek-V3": (128, 512, 128, 64, 128),
}
SIZES = ((1, 1024), (1, 8192), (1, 32768), (16, 8192), (16, 32768), (64, 8192))  # batch, slots
TOKENS = {  # batch, slots
    "glm4_moe_lite": ("GLM-4.7-Flash", ((1, 8192), (1, 32768), (16, 8192))),
    "kimi_linear": ("Kimi Linear", ((1, 32768),)),
    "deepseek_v2": ("DeepSeek-V2-Lite", ((1, 8192), (16, 8192))),
}
ARGUMENTS = {
    **SECONDS,
    "--layers": {"action": "store_true", "help": "a layer, not attention alone"},
    "--models": {"nargs": "*", "choices": TOKENS, "help": "tokens of models, not attention alone"},
}
WAYS = {
    "transformers": None,
    "attention left alone": lambda package, model: package.kernelize(model, skip=["attention"]),
    "ours": lambda package, model: package.kernelize(model),
}
# models whose own forward runs FLA's kernels, which tune themselves for minutes: their prompts and
# transformers' tokens are in the record of compare_whole.py
TUNED = ("kimi_linear",)
FP8 = (("GLM-4.7-Flash", 1, 8192), ("GLM-4.7-Flash", 16, 8192), ("DeepSeek-V3", 1, 8192),
       ("DeepSeek-V3", 16, 8192))  # fmt: skip
L2, MOST = 200 << 20, 20 << 30  # bytes: of all caches of a call; of the peer's keys and values
SPEED = 4.28e6  # bytes a microsecond


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def expanded(q, latents, rotated, weight, N: int, mask) -> torch.Tensor:
    """The whole cache through the projection, keys in a tensor of their own, and SDPA."""
    (B, _, H, D), S = q.shape, latents.shape[2]
    kv = F.linear(latents, weight).view(B, S, H, -1).transpose(1, 2)
    k = kv.new_empty(B, H, S, D)
    k[..., :N].copy_(kv[..., :N])
    k[..., N:].copy_(rotated.expand(-1, H, -1, -1))
    v = kv[..., N:]
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=D**-0.5)
    return o.transpose(1, 2)


def errors(package, y, q, latents, rotated, weight, N: int, mask) -> dict:
    """Of a batch's first sequence, whose result y begins with: relative to fp64 of the same
    inputs."""
    first, some = (x[:1] for x in (q, latents, rotated)), mask[:1]
    q, latents, rotated = first
    wide = (x.double() for x in (q, latents, rotated, weight))
    right = package.latent_attention_with_kvcache(*wide, qk_nope_head_dim=N, attention_mask=some)
    found = {"ours": y[:1], "expanded": expanded(q, latents, rotated, weight, N, some)}
    return {name: relative_error(y, right) for name, y in found.items()}


def fp8_row(package, name: str, B: int, S: int) -> dict:
    """A weight in FP8 with scales for 128 x 128 values, read as it is, or made in bf16 in each call
    by a launch before the others. Errors are relative to fp64 of what the weight stands for."""
    (H, C, N, R, V), fp8 = MODELS[name], submodule("fp8.reference")
    codes = (normal(H * (N + V), C) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-H * (N + V) // 128), C // 128, device="cuda") * C**-0.5 / 50
    q, mask = normal(B, 1, H, N + R), torch.ones(B, 1, 1, S, dtype=torch.bool, device="cuda")
    length, count = torch.tensor(S, device="cuda"), max(1, min(16, -(-L2 // (B * S * (C + R) * 2))))
    caches = [(normal(B, 1, S, C), normal(B, 1, S, R)) for _ in range(count)]
    weights = [(codes.clone(), scale.clone()) for _ in caches]
    ours = partial(package.latent_attention_with_kvcache, qk_nope_head_dim=N, attention_mask=mask)
    made = submodule("fp8.ops").DEQUANTISE
    calls = {
        "ours": [partial(ours, q, *one, w, length, weight_scale=s)
                 for one, (w, s) in zip(caches, weights)],
        "a weight made in bf16": [lambda one=one, pair=pair: ours(q, *one, made(pair), length)
                                  for one, pair in zip(caches, weights)],
    }  # fmt: skip
    us = {way: graph_ms(each) * 1e3 for way, each in calls.items()}
    wide = (x.double() for x in (q[:1], *(x[:1] for x in caches[0])))
    right = package.latent_attention_with_kvcache(
        *wide, fp8.dequantised(codes, scale).double(), qk_nope_head_dim=N, attention_mask=mask[:1]
    )
    error = {way: relative_error(each[0]()[:1], right) for way, each in calls.items()}
    floor = (B * S * (C + R) * 2 + codes.numel()) / SPEED
    what = f"{name}, a weight in FP8, {B} x {S}"
    return {"what": what, "us": us, "floor_us": floor, "error": error}


def step_of(model, B: int, S: int):
    """A token on a cache of S slots whose last one it writes, always the same."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=S)
    token = torch.randint(5, model.config.vocab_size, (B, 1), device="cuda")
    model(token, past_key_values=cache)
    layers = [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]
    lengths = torch.zeros(len(layers), 2, dtype=torch.int64, device="cuda")  # each on 16 bytes
    for layer, length in zip(layers, lengths):
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length = length[0]
    place = torch.full((B, 1), S - 1, device="cuda")

    def step():
        lengths.fill_(S - 1)
        return model(token, past_key_values=cache, position_ids=place).logits

    return step


def layers_of(model, B: int, S: int):
    """Attention of all layers, each over its own full cache of S slots: what stands between the
    norm before it and the residual's sum."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=S)
    model(torch.full((B, 1), 5, device="cuda"), past_key_values=cache)
    lengths = torch.zeros(len(cache.layers), 2, dtype=torch.int64, device="cuda")
    for layer, length in zip(cache.layers, lengths):
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length = length[0]
    x, place = normal(B, 1, model.config.hidden_size), torch.full((B, 1), S - 1, device="cuda")
    tables = model.model.rotary_emb(x, place)
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device="cuda")

    def call():
        lengths.fill_(S - 1)
        for layer in model.model.layers:
            y, _ = layer.self_attn(
                hidden_states=x, position_embeddings=tables, attention_mask=mask,
                position_ids=place, past_key_values=cache, use_cache=True,
            )  # fmt: skip
        return y

    return call


def layer_row(package, model, title: str, B: int, S: int) -> dict:
    """Attention of a layer, transformers' and ours."""
    call, replays, found = layers_of(model, B, S), {}, {}
    for way in ("transformers", "ours"):
        if WAYS[way]:
            WAYS[way](package, model)
        found[way] = call().clone()
        replays[way] = graphed(call)
        package.restore(model)
    us = in_turns(replays, 5, partial(wall, least=0.05))
    count = len(model.model.layers)
    us = {way: time / count for way, time in us.items()}
    what = f"{title}, attention of a layer with its projections, {B} x {S}"
    return {"what": what, "us": us, "difference": differences(found)}


def differences(logits: dict) -> dict:
    """Of each way from the first: routers choose other experts for other last bits."""
    first = logits.pop(next(iter(logits)))
    return {way: relative_error(y, first) for way, y in logits.items()}


def prompt_row(package, model, title: str) -> dict:
    """An eager prompt, each way in turns."""
    call, logits = prompts({"model": model})["model"], {}

    def clock(kernelize) -> float:
        if kernelize:
            kernelize(package, model)
        us = milliseconds({"": call}, rounds=1, rep=200)[""] * 1e3
        logits[next(way for way, each in WAYS.items() if each is kernelize)] = call()
        package.restore(model)
        return us

    us = in_turns(WAYS, 3, clock)
    what = f"{title}, 8 layers, a prompt of {PROMPT}, eager"
    return {"what": what, "us": us, "difference": differences(logits)}


@torch.no_grad()
def model_rows(package, names) -> Iterator[dict]:
    for name in names or TOKENS:
        title, sizes = TOKENS[name]
        model, ways = model_of(name), dict(WAYS)
        if name in TUNED:
            del ways["transformers"]
        for B, S in sizes:
            if name in TUNED:  # the first forward is ours
                package.kernelize(model)
            step, replays, logits, peak = step_of(model, B, S), {}, {}, {}
            package.restore(model)
            for way, kernelize in ways.items():
                print(kernelize and kernelize(package, model), flush=True)
                logits[way] = step().clone()
                peak[way] = memory(step)[1]
                replays[way] = graphed(step)
                package.restore(model)
            us = in_turns(replays, 5, partial(wall, least=0.1))
            what = f"{title}, 8 layers, a token by graphs, {B} x {S}"
            row = {"what": what, "us": us, "peak_mib": peak}
            if name not in TUNED:  # whose recurrent states are other ones in each call
                row["difference"] = differences(logits)
            yield row
            del step, replays
            gc.collect()
            torch.cuda.empty_cache()
        if name not in TUNED:
            yield prompt_row(package, model, title)


@torch.no_grad()
def layer_rows(package) -> Iterator[dict]:
    name = "glm4_moe_lite"
    title, sizes = TOKENS[name]
    model = model_of(name, mlp_layer_types=["dense"] * 8)  # no experts, which are not called
    for B, S in sizes[:2]:
        yield layer_row(package, model, title, B, S)


@torch.no_grad()
def rows(package, options) -> Iterator[dict]:
    if options.layers:
        yield from layer_rows(package)
        return
    if options.models is not None:
        yield from model_rows(package, options.models)
        return
    for (name, sizes), (B, S) in itertools.product(MODELS.items(), SIZES):
        H, C, N, R, V = sizes
        what = f"{name}, {B} x {S}"
        q, weight = normal(B, 1, H, N + R), normal(H * (N + V), C) * C**-0.5
        mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device="cuda")
        length, bytes_of_one = torch.tensor(S, device="cuda"), B * S * (C + R) * 2
        count = max(1, min(16, -(-L2 // bytes_of_one)))
        caches = [(normal(B, 1, S, C), normal(B, 1, S, R)) for _ in range(count)]
        ours = partial(
            package.latent_attention_with_kvcache, qk_nope_head_dim=N, attention_mask=mask
        )
        calls = {"ours": [partial(ours, q, *one, weight, length) for one in caches]}
        if B * S * H * (2 * N + V + R) * 2 < MOST:
            calls["expanded"] = [partial(expanded, q, *one, weight, N, mask) for one in caches[:2]]
        us = {name: graph_ms(each) * 1e3 for name, each in calls.items()}
        peak = {name: memory(each[0])[1] for name, each in calls.items()}
        floor = (bytes_of_one + weight.numel() * 2) / SPEED
        y = calls["ours"][0]()
        error = errors(package, y, q, *caches[0], weight, N, mask)
        yield {"what": what, "us": us, "floor_us": floor, "peak_mib": peak, "error": error}
        del calls, caches, y
        torch.cuda.empty_cache()
    for case in FP8:
        yield fp8_row(package, *case)


if __name__ == "__main__":
    run(
        __doc__,
        lambda options: (
            "latent_models" if options.layers or options.models is not None else "latent_attention"
        ),
        rows,
        ARGUMENTS,
        merge=True,
    )
