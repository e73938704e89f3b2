"""Wall-clock benchmark of `fused_experts` for `kernels benchmark`; kernel time against other
libraries is in compare_experts.py."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Workloads:
    """Decoding one sequence and 64, and a prefill of 512 tokens.

    Weights scaled so that the result is small beside the runner's absolute tolerance.
    """

    E, K, H, N = 0, 0, 0, 0  # experts, slots of a token, model width, hidden width

    def tensors(self, T):
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        kind = {"device": self.device, "dtype": dtype}
        self.x = torch.randn(T, self.H, **kind)  # [T, H]
        self.w_gate_up = torch.randn(self.E, 2 * self.N, self.H, **kind) * 0.4 * self.H**-0.5
        self.w_down = torch.randn(self.E, self.H, self.N, **kind) * 0.4 * self.N**-0.5
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

    def setup_decode_1(self):
        self.tensors(1)

    def setup_decode_64(self):
        self.tensors(64)

    def setup_prefill_512(self):
        self.tensors(512)

    benchmark_decode_1 = benchmark_decode_64 = benchmark_prefill_512 = run
    verify_decode_1 = verify_decode_64 = verify_prefill_512 = reference


class ExpertsQwen35(_Workloads, Benchmark):
    """Qwen3.5-35B-A3B."""

    seed = 0
    E, K, H, N = 256, 8, 2048, 512


class ExpertsQwen3(_Workloads, Benchmark):
    """Qwen3-30B-A3B."""

    seed = 0
    E, K, H, N = 128, 8, 2048, 768
