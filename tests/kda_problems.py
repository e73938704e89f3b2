"""Problems of Kimi Delta Attention: calls of its two forms, and their truth in fp64."""

import torch
from conftest import submodule

calls = submodule("kda.call")
GATES = ("softplus", "bounded", "slow", "floor", "wild", "zero", "reset")


def draw_gates(kind: str, shape, generator, device="cpu") -> torch.Tensor:
    """Log decays [B, T, HV, K]: of both formulas; next to none; all at the bound; one in eight at
    -80; none at all; one in eight at minus infinity."""
    on = {"generator": generator, "device": device}
    n = torch.randn(shape, **on)
    if kind == "softplus":
        rate = torch.linspace(0.1, 16, shape[2], device=device)[:, None]
        return -rate * torch.nn.functional.softplus(n - 3)
    if kind == "bounded":
        return -5 * torch.sigmoid(n)
    if kind == "slow":
        return -0.01 * torch.rand(shape, **on)
    if kind == "floor":
        return torch.full(shape, -5.0, device=device)
    if kind == "zero":
        return torch.zeros(shape, device=device)
    g = -0.01 * torch.rand(shape, **on)
    strong = -80.0 if kind == "wild" else -torch.inf
    return g.masked_fill(torch.rand(shape, **on) < 0.125, strong)


def kda_inputs(
    B, T, H, HV, K, V, dtype=torch.float32, gates="softplus", seed=0, alike=0.0, device="cpu"
):
    """q, k, v, g, beta by name; alike: how much the keys have in common."""
    rng = torch.Generator().manual_seed(seed)
    n = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    q, k, v = n(B, T, H, K), n(B, T, H, K) + alike * n(1, 1, H, K), n(B, T, HV, V)
    g, beta = draw_gates(gates, (B, T, HV, K), rng), torch.rand(B, T, HV, generator=rng)
    x = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": beta}
    return {name: y.to(device) for name, y in x.items()}


def terms_of_A_log(dg, g, dt_bias, bounded: bool) -> torch.Tensor:
    """What the gradient of A_log is a sum of, in fp64, from that of raw gates g [.., HV, K]. Terms
    are of either sign and may cancel, so its error is relative to the norm of them all."""
    a = wide(g) if dt_bias is None else wide(g) + wide(dt_bias).view(g.shape[-2:])
    return wide(dg) * (a if bounded else torch.nn.functional.softplus(a) / a.sigmoid())


def wide(x):
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def truth(function, **given):
    """What the function gives in fp64, from copies."""
    copies = {n: x.clone() if torch.is_tensor(x) else x for n, x in given.items()}
    return function(**{name: wide(x) for name, x in copies.items()})
