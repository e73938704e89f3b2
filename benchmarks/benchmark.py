"""Wall-clock benchmarks for `kernels benchmark`, which loads this file alone; kernel time against
other libraries is in compare_*.py.

Inputs are scaled so that results are small beside the runner's absolute tolerance.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def at_sizes(**sizes: int):
    """Adds a workload for each size to a class: its tensors, the timed call and the reference."""

    def add(kind: type) -> type:
        for name, size in sizes.items():
            setattr(kind, f"setup_{name}", lambda self, size=size: self.tensors(size))
            setattr(kind, f"benchmark_{name}", kind.run)
            setattr(kind, f"verify_{name}", kind.reference)
        return kind

    return add


class _Workloads:
    """What all have in common: only classes that are Benchmarks are run."""

    seed = 0

    def normal(self, *shape, wide=False):
        """In bf16; `wide`, or on a CPU, in fp32."""
        narrow = torch.float32 if wide or self.device == "cpu" else torch.bfloat16
        return torch.randn(*shape, device=self.device).to(narrow)


@at_sizes(decode_1=1, decode_64=64, prefill_512=512)
class _Swiglu(_Workloads):
    """`fused_swiglu`: decoding one sequence and 64, and a prefill of 512 tokens."""

    K, N = 0, 0

    def tensors(self, M):
        self.x = self.normal(M, self.K)  # [M, K]
        self.w_gate, self.w_up = self.normal(2, self.N, self.K) * 0.2 * self.K**-0.5  # [N, K]

    def run(self):
        self.out = self.kernel.fused_swiglu(self.x, self.w_gate, self.w_up)

    def reference(self):
        return F.silu(F.linear(self.x, self.w_gate)) * F.linear(self.x, self.w_up)


class SwigluQwen3Small(_Swiglu, Benchmark):
    """Qwen3-0.6B."""

    K, N = 1024, 3072


class SwigluLlama8B(_Swiglu, Benchmark):
    """Llama-3.1-8B."""

    K, N = 4096, 14336


@at_sizes(decode_1=1, decode_64=64, prefill_512=512)
class _Experts(_Workloads):
    """`fused_experts`: decoding one sequence and 64, and a prefill of 512 tokens."""

    E, K, H, N = 0, 0, 0, 0  # experts, slots of a token, model width, hidden width

    def tensors(self, T):
        self.x = self.normal(T, self.H)  # [T, H]
        self.w_gate_up = self.normal(self.E, 2 * self.N, self.H) * 0.4 * self.H**-0.5
        self.w_down = self.normal(self.E, self.H, self.N) * 0.4 * self.N**-0.5
        scores = torch.rand(T, self.E, device=self.device).softmax(-1)
        self.weights, self.index = scores.topk(self.K, dim=-1)  # [T, K]

    def run(self):
        args = (self.x, self.w_gate_up, self.w_down, self.index, self.weights)
        self.out = self.kernel.fused_experts(*args)

    def reference(self):
        out = torch.zeros(self.x.shape, device=self.x.device)
        for expert in self.index.unique().tolist():
            token, slot = (self.index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(self.x[token], self.w_gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.w_down[expert])
            out.index_add_(0, token, y.float() * self.weights[token, slot, None])
        return out.to(self.x.dtype)


class ExpertsQwen35(_Experts, Benchmark):
    """Qwen3.5-35B-A3B."""

    E, K, H, N = 256, 8, 2048, 512


class ExpertsQwen3(_Experts, Benchmark):
    """Qwen3-30B-A3B."""

    E, K, H, N = 128, 8, 2048, 768


@at_sizes(prefill_512=512, prefill_2048=2048)
class _Prefill(_Workloads):
    """`chunk_gated_delta_rule` on prompts of 512 and 2048 tokens.

    One prompt, q and k normalised in the kernel; the state starts from zero and is returned.
    """

    HEADS = (0, 0)  # of q and k, of v

    def tensors(self, T):
        H, HV = self.HEADS
        self.q, self.k = self.normal(2, 1, T, H, 128)  # [B, T, H, K]
        self.v = self.normal(1, T, HV, 128)  # [B, T, HV, V]
        self.g = F.logsigmoid(self.normal(1, T, HV, wide=True) + 4)  # [B, T, HV] fp32
        self.beta = self.normal(1, T, HV, wide=True).sigmoid()  # [B, T, HV] fp32

    def run(self):
        self.out, self.state = self.kernel.chunk_gated_delta_rule(
            self.q, self.k, self.v, self.g, self.beta, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def reference(self):
        """Chunks of 64 tokens in plain torch, fp32: what transformers does without a kernel, with
        a triangular solve for its loop over the rows of a chunk."""

        def chunks(x, heads):  # [1, T, heads, ..] -> [HV, NT, C, ..]
            x = x[0].float().repeat_interleave(self.HEADS[1] // heads, 1)
            return x.transpose(0, 1).unflatten(1, (-1, 64))

        H, HV = self.HEADS
        q, k = (F.normalize(chunks(x, H), dim=-1) for x in (self.q, self.k))
        v, beta = chunks(self.v, HV), chunks(self.beta, HV)[..., None]
        G = chunks(self.g, HV).cumsum(-1)
        gam = G.exp()[..., None]
        decay = (G[..., :, None] - G[..., None, :]).tril().exp().tril()  # [HV, NT, C, C]
        A = beta * (k @ k.mT) * decay  # the solve takes its diagonal for 1
        right = torch.cat([beta * v, beta * gam * k], -1)
        solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
        u, w = solved.chunk(2, -1)  # [HV, NT, C, V], [HV, NT, C, K]
        P, k_end = (q @ k.mT) * decay, k * (G[..., -1:] - G).exp()[..., None]
        S, out = torch.zeros(HV, 128, 128, device=self.device), []
        for c in range(G.shape[1]):
            new = u[:, c] - w[:, c] @ S
            out.append((gam[:, c] * q[:, c]) @ S + P[:, c] @ new)
            S = gam[:, c, -1:] * S + k_end[:, c].mT @ new
        out = torch.cat(out, 1).transpose(0, 1) * 128**-0.5  # [T, HV, V]
        return out[None].to(self.v.dtype)


class PrefillQwen35Small(_Prefill, Benchmark):
    """16 heads of q and k, 32 of v: Qwen3.5-4B."""

    HEADS = (16, 32)


class PrefillQwen35Large(_Prefill, Benchmark):
    """16 heads of q and k, 64 of v."""

    HEADS = (16, 64)


@at_sizes(decode_1=1, decode_64=64)
class _Decode(_Workloads):
    """`fused_recurrent_gated_delta_rule` on a token of one sequence, and of 64.

    Gates raw and q, k normalised in the kernel, the state in place.
    """

    HEADS = (0, 0)  # of q and k, of v

    def tensors(self, B):
        H, HV = self.HEADS
        self.q, self.k = self.normal(2, B, 1, H, 128)  # [B, 1, H, K]
        self.v = self.normal(B, 1, HV, 128)  # [B, 1, HV, V]
        self.a, self.b = self.normal(2, B, 1, HV)  # [B, 1, HV]
        self.A_log, self.dt_bias = self.normal(2, HV, wide=True)
        self.start = self.normal(B, HV, 128, 128, wide=True) * 0.1  # [B, HV, K, V]
        self.state = self.start.clone()

    def run(self):
        # every call goes on from the state that the one before left
        self.out, _ = self.kernel.fused_recurrent_gated_delta_rule(
            self.q, self.k, self.v, self.a, self.b, initial_state=self.state,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=self.A_log,
            dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True, inplace_final_state=True,
        )  # fmt: skip

    def reference(self):
        """The same step in plain torch, as transformers has it: norms, gates, state and output."""
        each = self.HEADS[1] // self.HEADS[0]
        q, k = (
            F.normalize(x[:, 0].float(), dim=-1).repeat_interleave(each, 1)
            for x in (self.q, self.k)
        )  # [B, HV, K]
        v, beta = self.v[:, 0].float(), self.b[:, 0].float().sigmoid()[..., None]
        g = -self.A_log.exp() * F.softplus(self.a[:, 0].float() + self.dt_bias)  # [B, HV]
        S = self.start * g.exp()[..., None, None]  # [B, HV, K, V]
        delta = (v - (S * k[..., None]).sum(-2)) * beta
        S = S + k[..., None] * delta[..., None, :]
        return ((S * q[..., None]).sum(-2) * 128**-0.5)[:, None].to(self.q.dtype)


class DecodeQwen35Small(_Decode, Benchmark):
    """16 heads of q and k, 32 of v: Qwen3.5-4B."""

    HEADS = (16, 32)


class DecodeQwen35Large(_Decode, Benchmark):
    """16 heads of q and k, 64 of v."""

    HEADS = (16, 64)
