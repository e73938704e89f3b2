"""Time, error and memory of `fused_experts` against transformers' grouped_mm experts.

    python benchmarks/compare_experts.py [--models 35B 30B] [--tokens 1 64] [--json FILE]   on a GPU
    python benchmarks/compare_experts.py --sonicmoe         beside SonicMoE, too
    python benchmarks/compare_experts.py --first-call       a new process, nothing compiled before

`limit` is the time that the chip needs at least: 6 S H I operations at 720 TFLOP/s or the weights
of the experts that are hit at 4.28 TB/s, whichever is more (a training step: three times that). A
forward is timed by CUDA graph over several routings, so that the weights of a few experts do not
stay in L2; an eager training step by events, each started on an idle GPU. SonicMoE is the package
`sonic-moe`, which compiles for minutes: beside it each one's first call is timed, too, and forwards
are timed eagerly, as steps are.
"""

import json
import sys
from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import event_ms, graph_ms, host_us, memory, seconds
from runner import DEVICE, SECONDS, in_fresh_process, load_package, relative_error, run

MODELS = {  # experts, slots of a token, model width, hidden width
    "35B": (256, 8, 2048, 512),
    "Next": (512, 10, 2048, 512),
    "30B": (128, 8, 2048, 768),
    "Mixtral": (8, 2, 4096, 14336),
    "gpt-oss": (32, 4, 2880, 2880),  # weights transposed, gate and up in turn, biases
}
TITLES = {
    "35B": "Qwen3.5-35B-A3B",
    "Next": "Qwen3-Next-80B",
    "30B": "Qwen3-30B-A3B",
    "Mixtral": "Mixtral-8x7B",
    "gpt-oss": "gpt-oss-20b",
}
NOTE = (
    "transformers 5.17 masks the rows of experts held elsewhere in every call, 5.22 under expert "
    "parallelism only: its grouped_mm is faster there at many tokens."
)
ARGUMENTS = {
    "--models": {"nargs": "*", "default": list(MODELS), "choices": MODELS},
    "--tokens": {"nargs": "*", "type": int, "default": (1, 16, 64, 512, 8192, 32768)},
    "--training": {"nargs": "*", "type": int, "default": (8192, 32768)},
    "--first-call": {"action": "store_true", "help": "a new process, too"},
    "--sonicmoe": {"action": "store_true", "help": "beside SonicMoE, eagerly"},
    **SECONDS,
}
CALL_ONCE = "--call-once"


class Module(torch.nn.Module):
    """Attributes of a module of experts that transformers' implementations read."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    has_post_expert_norm, _is_expert_parallel = False, False

    def __init__(self, w_gate_up, w_down, *biases):
        super().__init__()
        self.num_experts, self.act_fn = w_down.shape[0], F.silu
        self.gate_up_proj, self.down_proj = w_gate_up, w_down
        if biases:
            self.has_bias = self.is_transposed = True
            self.is_concatenated = False
            self.gate_up_proj_bias, self.down_proj_bias = biases

    def _apply_gate(self, gate_up):
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up
        return gated_as_gpt_oss(gate_up)


def gated_as_gpt_oss(gate_up):
    """As transformers writes it."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def weights_of(model, requires_grad=False) -> list:
    E, _, H, N = MODELS[model]
    shapes = ((E, 2 * N, H), (E, H, N))
    if model == "gpt-oss":
        shapes = ((E, H, 2 * N), (E, N, H), (E, 2 * N), (E, H))
    made = [torch.empty(s, device=DEVICE, dtype=torch.bfloat16).normal_(0, s[-1] ** -0.5)
            for s in shapes]  # fmt: skip
    return [torch.nn.Parameter(w, requires_grad=requires_grad) for w in made]


def inputs(model, T, seed=0) -> tuple:
    """x [T, H], ids and weights [T, K] of a random router."""
    E, K, H, _ = MODELS[model]
    random = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(T, H, device=DEVICE, generator=random).bfloat16()
    top, ids = torch.rand(T, E, device=DEVICE, generator=random).topk(K, -1)
    return x, ids, (top / top.sum(-1, keepdim=True)).bfloat16()


def ours(package, weights, x, ids, top, **more):
    if len(weights) == 2:
        return package.fused_experts(x, *weights, ids, top, **more)
    w_gate_up, w_down, b_gate_up, b_down = weights
    return package.fused_experts(
        x, w_gate_up.mT, w_down.mT, ids, top, b_gate_up=b_gate_up, b_down=b_down,
        activation="swigluoai", limit=7.0, interleaved=True, **more,
    )  # fmt: skip


def contenders(package, weights, sonic=False) -> dict:
    """out [T, H] of x, ids, weights of the slots; by name."""
    from transformers.integrations import moe

    module = Module(*weights)
    found = {
        "ours": partial(ours, package, weights),
        "grouped_mm": lambda *args: moe.grouped_mm_experts_forward(module, *args),
    }
    if sonic and len(weights) == 2:
        found["sonicmoe"] = partial(by_sonicmoe, *weights)
    return found


def by_sonicmoe(w_gate_up, w_down, x, ids, top):
    """As transformers' "sonicmoe" calls it, which takes it from the Hub."""
    import sonicmoe
    from sonicmoe.enums import ActivationType

    T, K = ids.shape
    token = torch.arange(T, device=x.device, dtype=torch.int32)[:, None].expand(T, K).reshape(-1)
    out, _ = sonicmoe.moe_general_routing_inputs(
        x, top.reshape(-1), token, ids.reshape(-1).int(), w_gate_up.permute(1, 2, 0), None,
        w_down.permute(1, 2, 0), None, E=w_down.shape[0], stream_id=None,
        activation_type=ActivationType.SWIGLU, concat_layout=True,
        is_inference_mode_enabled=not torch.is_grad_enabled(),
    )  # fmt: skip
    return out


def limit_us(model, T, ids) -> float:
    _, K, H, N = MODELS[model]
    flops = 6 * T * K * H * N / 720e12
    return 1e6 * max(flops, len(ids.unique()) * 3 * H * N * 2 / 4.28e12)


def error(out, x, ids, top, w_gate_up, w_down, *biases) -> float:
    """Relative error of up to 12 tokens against fp64."""
    tokens = torch.linspace(0, x.shape[0] - 1, min(12, x.shape[0])).long().unique().tolist()
    ref = torch.zeros(len(tokens), x.shape[1], device=DEVICE, dtype=torch.float64)
    for i, t in enumerate(tokens):
        for e, weight in zip(ids[t].tolist(), top[t].double()):
            if biases:
                b_gate_up, b_down = (bias[e].double() for bias in biases)
                z = gated_as_gpt_oss(x[t].double() @ w_gate_up[e].double() + b_gate_up)
                ref[i] += weight * (z @ w_down[e].double() + b_down)
            else:
                gate, up = (w_gate_up[e].double() @ x[t].double()).chunk(2)
                ref[i] += weight * (w_down[e].double() @ (F.silu(gate) * up))
    return relative_error(out[tokens], ref)


def measure_forward(package, model, T, weights, sonic=False) -> dict:
    count = 1 if sonic else 8 if T <= 64 else 2 if T <= 512 else 1
    args = [inputs(model, T, seed) for seed in range(count)]
    how = ", eager" if sonic else ""
    row = {"what": f"{TITLES[model]}, {T} token{'s' * (T > 1)}{how}", "us": {}}
    row.update(limit_us=limit_us(model, T, args[0][1]), error={})
    with torch.no_grad():
        for name, call in contenders(package, weights, sonic).items():
            if sonic:
                row.setdefault("first_s", {})[name] = seconds(lambda c=call: c(*args[0]))
            row["error"][name] = error(call(*args[0]), *args[0], *weights)
            calls = [partial(call, *each) for each in args]
            row["us"][name] = 1e3 * (event_ms(calls[0]) if sonic else graph_ms(calls))
            if T == 1:
                row.setdefault("host_us", {})[name] = host_us(calls[0], 50)
    x, ids, top = args[0]
    row["served"] = package.implementation_of(ours, package, weights, x, ids, top)
    return row


def measure_training(package, model, T, sonic=False) -> dict:
    """A step with the gradients of x, both weights and the routing weights."""
    weights = weights_of(model, requires_grad=True)
    x, ids, top = inputs(model, T)
    x, top, dout = x.requires_grad_(), top.requires_grad_(), torch.randn_like(x)
    row = {"what": f"{TITLES[model]}, {T} tokens, training step", "us": {}}
    row.update(limit_us=3 * limit_us(model, T, ids), held_mib={}, peak_mib={})
    calls = contenders(package, weights, sonic)
    calls["ours, recompute=True"] = partial(ours, package, weights, recompute=True)

    def backward(out):
        return torch.autograd.grad(out, (x, top, *weights), dout)

    for name, call in calls.items():
        forward = partial(call, x, ids, top)
        step = partial(lambda forward: backward(forward()), forward)
        if sonic:
            row.setdefault("first_s", {})[name] = seconds(step)
        row["us"][name] = 1e3 * event_ms(step)
        held, row["peak_mib"][name] = memory(forward, backward)
        row["held_mib"][name] = held - dout.nbytes / 2**20  # without the result
    return row


@torch.no_grad()
def call_once() -> None:
    """Prints seconds of calls at 35B's sizes in this process: decoding, then other numbers of
    tokens and other routings."""
    package, weights, found = load_package(), weights_of("35B"), {}
    for name, T, seed in (("T=1", 1, 0), ("T=1, other routing", 1, 1), ("T=2", 2, 0),
                          ("T=8192", 8192, 0), ("T=8000", 8000, 1)):  # fmt: skip
        x, ids, top = inputs("35B", T, seed)
        found[name] = round(seconds(partial(package.fused_experts, x, *weights, ids, top)), 4)
    print(json.dumps(found))


def rows(package, options):
    options.facts["note"] = NOTE
    for model in options.models:
        weights = weights_of(model)
        for T in options.tokens:
            yield measure_forward(package, model, T, weights, options.sonicmoe)
        del weights
        for T in options.training:
            torch.cuda.empty_cache()
            yield measure_training(package, model, T, options.sonicmoe)
    if options.first_call:
        options.facts["first_calls"] = in_fresh_process(CALL_ONCE)


main = partial(run, __doc__, "experts", rows, ARGUMENTS)

if __name__ == "__main__":
    if CALL_ONCE in sys.argv:
        call_once()
    else:
        main()
