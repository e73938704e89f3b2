"""Time, memory and error of `linear_cross_entropy` and `token_log_probs` beside Liger and torch.

    python benchmarks/compare_loss.py [--json FILE]     on a GPU

A step is the loss and its gradients of hidden states [M, 4096] and, unless it is frozen, of the
weight [V, 4096], in bf16. torch makes logits, and a loss of them in fp32. Liger is its fused linear
cross entropy with sums in fp32 and pieces of 1024 rows. The floor is two products for a frozen
weight and three for a trained one. Peaks are MiB beyond what was allocated before. The last rows
are a training step of a Llama of 8 layers with loss=True beside the same without.
"""

import statistics
from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import memory
from peers import peer
from runner import relative_error, run

H = 4096
CASES = [  # M, V, frozen
    (8192, 128256, False), (4096, 128256, False), (8192, 248320, False), (32768, 248320, False),
    (8192, 128256, True), (8192, 248320, True),
]  # fmt: skip
RUNS = 5


def by_torch(x, w, target):
    return F.cross_entropy((x @ w.t()).float(), target)


def by_liger(liger, x, w, target):
    pieces = max(1, 1024 * len(w) // x.numel())
    return liger(x, w, target, accum_dtype=torch.float32, chunk_mem_const=pieces)


def tensors(M: int, V: int, frozen: bool = False) -> tuple:
    x = torch.randn(M, H, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(V, H, device="cuda") * 0.02).bfloat16().requires_grad_(not frozen)
    target = torch.randint(V, (M,), device="cuda")
    target[:7] = -100
    return x, w, target


def step(loss, x, w, target):
    leaves = [x, w] if w.requires_grad else [x]
    return torch.autograd.grad(loss(x, w, target), leaves)


def median_ms(calls: dict) -> dict:
    """Of each call, in turns, so that all meet the same clocks."""
    times: dict = {name: [] for name in calls}
    for _ in range(RUNS + 1):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def peaks(calls: dict) -> dict:
    found = {}
    for name, call in calls.items():
        call()
        torch.cuda.empty_cache()
        found[name] = memory(call)[1]
    return found


def losses(package, torchs: bool = True) -> dict:
    found = {"ours": package.linear_cross_entropy}
    liger = peer("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if liger:
        found["liger"] = partial(by_liger, liger)
    return {**found, "torch": by_torch} if torchs else found


def products(x, w, frozen: bool) -> float:
    """ms of a step's products alone."""
    x, w = x.detach(), w.detach()
    z = x @ w.t()
    calls = {"logits": lambda: torch.mm(x, w.t(), out=z), "dx": lambda: z @ w}
    if not frozen:
        calls["dw"] = lambda: z.t() @ x
    return sum(median_ms(calls).values())


def errors(calls: dict, x, w, target) -> dict:
    """Of dx and dw from fp64 in pieces of rows, and of the loss."""
    X, W = x.detach().double(), w.detach().double()
    dx, dw, total, n = torch.empty_like(X), torch.zeros_like(W), 0.0, (target != -100).sum()
    for i in range(0, len(X), 512):
        z = (X[i : i + 512] @ W.t()).requires_grad_()
        loss = F.cross_entropy(z, target[i : i + 512], reduction="sum") / n
        (g,) = torch.autograd.grad(loss, z)
        dx[i : i + 512], total = g @ W, total + loss.detach()
        dw.addmm_(g.t(), X[i : i + 512])
        del z, g
    found = {}
    for name, loss in calls.items():
        out = loss(x, w, target)
        a, b = torch.autograd.grad(out, (x, w))
        found[name] = {
            "loss": relative_error(out, total), "dx": relative_error(a, dx),
            "dw": relative_error(b, dw),
        }  # fmt: skip
    return found


def loss_row(package, M: int, V: int, frozen: bool) -> dict:
    x, w, target = tensors(M, V, frozen)
    calls = losses(package, torchs=M < 32768)
    steps = {name: partial(step, loss, x, w, target) for name, loss in calls.items()}
    row = {"what": f"loss, M {M}, V {V}" + ", frozen weight" * frozen}
    if M == 4096:
        row["error"] = errors(calls, x, w, target)
    row["ms"] = {**median_ms(steps), "products": products(x, w, frozen)}
    row["peak_mib"] = peaks(steps)
    return row


def tokens_row(package, M: int, V: int) -> dict:
    """Log-probabilities and entropies: the forward, and with a gradient of each token's."""
    x, w, target = tensors(M, V)
    each = torch.randn(M, device="cuda")

    def ours():
        return package.token_log_probs(x, w, target, entropy=True)

    def torchs():
        logs = (x @ w.t()).float().log_softmax(1)
        counted = target.clamp(min=0)[:, None]
        return logs.gather(1, counted)[:, 0], -(logs.exp() * logs).sum(1)

    def gradients(function):
        log_prob, entropy = function()
        return torch.autograd.grad((log_prob * each).mean() - 0.01 * entropy.mean(), (x, w))

    steps = {"ours": partial(gradients, ours), "torch": partial(gradients, torchs)}
    row = {"what": f"token_log_probs with entropy, M {M}, V {V}"}
    row["ms"], row["peak_mib"] = median_ms(steps), peaks(steps)
    with torch.no_grad():
        row["forward_ms"] = median_ms({"ours": ours, "torch": torchs})
        row["forward_peak_mib"] = peaks({"ours": ours, "torch": torchs})
    return row


def model_row(package) -> dict:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=H, intermediate_size=14336, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().train()
    ids = torch.randint(128256, (1, 4096), device="cuda")
    ms, peak = {}, {}
    for turn in range(4):  # in turns, twice each
        name, loss = (("ours", True), ("logits", False))[turn % 2]
        package.kernelize(model, loss=loss)

        def training_step():
            model(input_ids=ids, labels=ids).loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        training_step()
        ms.setdefault(name, []).append(median_ms({name: training_step})[name])
        peak.update(peaks({name: training_step}))
    ms = {name: min(found) for name, found in ms.items()}
    return {"what": "training step, Llama of 8 layers, 4096 tokens", "ms": ms, "peak_mib": peak}


def rows(package, options):
    for case in CASES:
        yield loss_row(package, *case)
        torch.cuda.empty_cache()
    yield tokens_row(package, 8192, 128256)
    torch.cuda.empty_cache()
    yield model_row(package)


if __name__ == "__main__":
    run(__doc__, "loss", rows)
