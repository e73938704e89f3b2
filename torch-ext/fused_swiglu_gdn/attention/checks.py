"""Checks of norm, rotary embedding, gate and attention over a cache."""

import torch

from ..fp8.call import BLOCK, SCALES, blocks_of
from ..norm.call import CASTING_MODES
from ..runtime import checks
from ..runtime.call import tensors_in
from . import call as calls

NORMS = ("head", "all")
# channels that turn together: those half of R apart; neighbours; neighbours, which are stored half
# of R apart
ROTARY = ("halves", "pairs", "pairs_to_halves")


def _tables(cos, sin, interleaved, q, sizes) -> None:
    if not _all_or_none({"cos": cos, "sin": sin}):
        return
    checks.is_tensor("cos", cos)
    dims = "N T R"
    if interleaved:
        sizes["2"], dims = 2, "N T R/2" if cos.ndim < 4 else "N T R/2 2"
    checks.has_shape("cos", cos, dims, sizes)
    checks.has_shape("sin", sin, dims, sizes)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.is_floating(name, table)
        checks.same_device(name, table, "q", q)
    _tables_agree(cos, sin, sizes)
    if interleaved:
        pairs = sizes["D"] // 2
        if not 0 < sizes["R/2"] <= pairs:
            raise ValueError(
                f"cos must have angles for up to {pairs} pairs of channels, [B or 1, T, R / 2] or "
                f"[B or 1, T, R / 2, 2] where interleaved, got {list(cos.shape)}"
            )
    elif not 0 < sizes["R"] <= sizes["D"] or sizes["R"] % 2:
        raise ValueError(
            f"cos must have an even number of channels up to {sizes['D']}, got {sizes['R']}"
        )


def _tables_agree(cos, sin, sizes) -> None:
    checks.agrees("sin", sin, "cos", cos)
    if sizes["N"] not in (1, sizes["B"]):
        raise ValueError(f"cos must have batch {sizes['B']}, as q, or 1, got {sizes['N']}")


def _all_or_none(written: dict) -> bool:
    """Checks that all of these arguments are given, or none; whether they are."""
    missing = [name for name, x in written.items() if x is None]
    if missing and len(missing) < len(written):
        given = next(name for name in written if name not in missing)
        raise ValueError(f"{missing[0]} must be given where {given} is, got None")
    return not missing


def _caches(q, written: dict, cache_position, sizes) -> None:
    """Checks what is written to a cache and the cache, tensors with their shapes, and where."""
    tensors = {name: x for name, (x, _) in written.items()}
    every = {**tensors, "cache_position": cache_position}
    if not _all_or_none(every):
        return
    for name, (x, dims) in written.items():
        checks.has_shape(name, x, dims, sizes)
    checks.is_tensor("cache_position", cache_position)
    if cache_position.ndim:
        raise ValueError(
            "cache_position must be the one slot of the first token, a tensor without dimensions, "
            f"got one of shape {list(cache_position.shape)}"
        )
    checks.has_dtype("cache_position", cache_position, checks.INDICES)
    for name, x in tensors.items():
        checks.is_floating(name, x)
    for name, x in every.items():
        checks.same_device(name, x, "q", q)
    caches = [name for name in tensors if name.endswith("_cache")]
    for name in caches:
        checks.has_memory(name, tensors[name])
    if sizes["T"] > sizes["S"]:
        raise ValueError(
            f"{caches[0]} must have at least {sizes['T']} slots, one for each token, "
            f"got {sizes['S']}"
        )


def _needs_no_gradient(call, why: str) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in zip(call._fields, tensors_in(call)):
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient {why}: call under torch.no_grad()"
            )


def fused_qk_norm_rope(call: calls.QkNormRope) -> calls.QkNormRope:
    *tensors, (eps, casting_mode, offset, norm, interleaved) = call
    q, k, cos, sin, q_weight, k_weight, v, key_cache, value_cache, cache_position = tensors
    sizes: dict = {}
    checks.has_shape("q", q, "B T HQ D", sizes)
    checks.has_shape("k", k, "B T HK D", sizes)
    checks.is_floating("q", q)
    checks.agrees("k", k, "q", q)
    checks.is_number("eps", eps, "non-negative")
    checks.is_one_of("casting_mode", casting_mode, CASTING_MODES)
    checks.is_number("offset", offset)
    checks.is_one_of("norm", norm, NORMS)
    checks.are_flags(interleaved=interleaved)
    _tables(cos, sin, interleaved, q, sizes)
    for name, weight, heads in (("q_weight", q_weight, "HQ"), ("k_weight", k_weight, "HK")):
        if weight is None:
            continue
        width = "D" if norm == "head" else f"{heads}*D"
        sizes[f"{heads}*D"] = sizes[heads] * sizes["D"]
        checks.has_form(name, weight, width, sizes, "q", q)
    written = {
        "v": (v, "B T HK DV"), "key_cache": (key_cache, "B HK S D"),
        "value_cache": (value_cache, "B HK S DV"),
    }  # fmt: skip
    _caches(q, written, cache_position, sizes)
    if key_cache is not None:
        _needs_no_gradient(call, "where caches are given, which are written in place")
    _holds_cache_position(cache_position, k, key_cache)
    flags = norm == "all", bool(interleaved)
    return calls.QkNormRope(*tensors, calls.QkOptions(float(eps), float(offset), *flags))


def _holds_cache_position(cache_position, k, key_cache) -> None:
    """Checks that the cache has a slot for each token; on a GPU the kernel checks, and writes
    NaN."""
    if not checks.readable(cache_position):
        return
    first, T, S = int(cache_position), k.shape[1], key_cache.shape[2]
    if not 0 <= first <= S - T:
        raise ValueError(
            f"cache_position must be {checks.between(0, S - T)}, with T = {T} tokens and "
            f"S = {S} slots, got {first}"
        )


def _over_slots(q, cache: str, cache_seqlens, mask, dims: str, softmax_scale, sizes) -> None:
    """Checks what attention over the slots of a cache gets besides tensors of heads."""
    if sizes["S"] == 0:
        raise ValueError(f"{cache} must have at least one slot, got 0")
    if cache_seqlens is not None:
        checks.is_tensor("cache_seqlens", cache_seqlens)
        checks.has_dtype("cache_seqlens", cache_seqlens, checks.INDICES)
        checks.same_device("cache_seqlens", cache_seqlens, "q", q)
        if cache_seqlens.ndim:
            checks.has_shape("cache_seqlens", cache_seqlens, "B", sizes)
    if mask is not None:
        checks.has_form("attention_mask", mask, dims, sizes, "q", q, (torch.bool, *checks.FLOATING))
        if sizes["N"] not in (1, sizes["B"]):
            raise ValueError(f"attention_mask must have batch {sizes['B']} or 1, got {sizes['N']}")
    if softmax_scale is not None:
        checks.is_number("softmax_scale", softmax_scale)
    if cache_seqlens is not None:
        _holds_cache_seqlens(cache_seqlens, sizes["S"], cache)


def _holds_cache_seqlens(cache_seqlens, S: int, cache: str) -> None:
    """Checks that no more slots are filled than exist; on a GPU the kernel clamps the length."""
    if not checks.readable(cache_seqlens):
        return
    wrong = [n for n in cache_seqlens.flatten().tolist() if not 0 <= n <= S]
    if wrong:
        raise ValueError(
            f"cache_seqlens must be {checks.between(0, S)}, with S = {S} slots in {cache}, "
            f"got {wrong[0]}"
        )


def sigmoid_gate(call: calls.SigmoidGate) -> calls.SigmoidGate:
    x, gate, _ = call
    checks.is_tensor("x", x)
    checks.is_floating("x", x)
    checks.has_shape_of("gate", gate, "x", x)
    checks.is_floating("gate", gate)
    checks.same_device("gate", gate, "x", x)
    return call


def attention_with_kvcache(call: calls.KvCacheAttention) -> calls.KvCacheAttention:
    q, k_cache, v_cache, cache_seqlens, attention_mask, (softmax_scale,) = call
    sizes = {"1": 1}
    checks.has_shape("q", q, "B 1 HQ D", sizes)
    checks.has_shape("k_cache", k_cache, "B HK S D", sizes)
    checks.has_shape("v_cache", v_cache, "B HK S D", sizes)
    checks.is_floating("q", q)
    checks.agrees("k_cache", k_cache, "q", q)
    checks.agrees("v_cache", v_cache, "q", q)
    checks.share_heads("q", sizes["HQ"], "k_cache", sizes["HK"])
    _over_slots(q, "k_cache", cache_seqlens, attention_mask, "N 1 1 S", softmax_scale, sizes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    return calls.KvCacheAttention(*tensors_in(call), calls.KvOptions(scale))


def latent_attention_with_kvcache(call: calls.LatentAttention) -> calls.LatentAttention:
    q, latents, rotated, weight, weight_scale, cache_seqlens, mask, (nope, softmax_scale) = call
    sizes = {"1": 1}
    checks.has_shape("q", q, "B T H N+R", sizes)
    checks.has_shape("latents", latents, "B 1 S C", sizes)
    checks.has_shape("rotated", rotated, "B 1 S R", sizes)
    checks.has_shape("weight", weight, "H*(N+V) C", sizes)
    checks.is_floating("q", q)
    for name, x in (("latents", latents), ("rotated", rotated)):
        checks.agrees(name, x, "q", q)
    _scaled("weight", weight, weight_scale, q)
    H, R, rows = sizes["H"], sizes["R"], sizes["H*(N+V)"]
    checks.is_int("qk_nope_head_dim", nope, 1)
    if sizes["N+R"] != nope + R:
        raise ValueError(
            f"q must have heads of {nope + R} channels, {nope} and the {R} of rotated, "
            f"got {sizes['N+R']}"
        )
    if H == 0 or rows % H or rows // H <= nope:
        raise ValueError(
            f"weight must have as many rows for each of the {H} heads of q, more than {nope}, "
            f"got {rows}"
        )
    one = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[2] == 1
    dims = "N 1 1 S" if one else "N 1 T S"
    _over_slots(q, "latents", cache_seqlens, mask, dims, softmax_scale, sizes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    return calls.LatentAttention(*tensors_in(call), calls.LatentOptions(nope, scale))


def _scaled(name: str, weight, scale, q) -> None:
    """Checks a weight that agrees with q, or one in FP8 with a scale for 128 x 128 values."""
    if scale is None:
        checks.agrees(name, weight, "q", q)
        return
    sizes = dict(zip((f"rows/{BLOCK}", f"columns/{BLOCK}"), map(blocks_of, weight.shape)))
    checks.has_form(f"{name}_scale", scale, " ".join(sizes), sizes, "q", q, SCALES)
    checks.has_dtype(name, weight, (torch.float8_e4m3fn,))
    checks.same_device(name, weight, "q", q)


def fused_latent_norm_rope(call: calls.LatentNormRope) -> calls.LatentNormRope:
    *tensors, (eps, rotary) = call
    q, kv, weight, cos, sin, latent_cache, rotated_cache, cache_position = tensors
    sizes = {"1": 1}
    checks.has_shape("q", q, "B T H N+R", sizes)
    checks.has_shape("kv", kv, "B T C+R", sizes)
    checks.has_shape("weight", weight, "C", sizes)
    checks.is_floating("q", q)
    checks.agrees("kv", kv, "q", q)
    checks.is_floating("weight", weight)
    checks.same_device("weight", weight, "q", q)
    checks.is_number("eps", eps, "non-negative")
    checks.is_one_of("rotary", rotary, ROTARY)
    R = sizes["R"] = sizes["C+R"] - sizes["C"]
    if not 0 <= R <= sizes["N+R"]:
        raise ValueError(
            f"kv must have {sizes['C']} channels, as weight, and up to {sizes['N+R']} rotary ones, "
            f"got {sizes['C+R']}"
        )
    if _all_or_none({"cos": cos, "sin": sin}):
        if R % 2:
            raise ValueError(f"kv must have an even number of rotary channels, got {R}")
        sizes["R/2"] = R // 2
        dims = "N T R" if rotary == "halves" else "N T R/2"
        for name, table in (("cos", cos), ("sin", sin)):
            checks.has_form(name, table, dims, sizes, "q", q)
        _tables_agree(cos, sin, sizes)
    checks.has_memory("q", q)
    written = {
        "latent_cache": (latent_cache, "B 1 S C"),
        "rotated_cache": (rotated_cache, "B 1 S R"),
    }
    _caches(q, written, cache_position, sizes)
    _needs_no_gradient(call, "as q is written in place")
    _holds_cache_position(cache_position, q, latent_cache)
    return calls.LatentNormRope(*tensors, calls.LatentRopeOptions(float(eps), rotary))
