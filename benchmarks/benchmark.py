"""Wall-clock benchmark of `fused_swiglu` for `kernels benchmark`; kernel time against other
libraries is in compare_swiglu.py."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Workloads:
    """Decoding one sequence and 64, and a prefill of 512 tokens.

    Weights scaled so that z is small beside the runner's absolute tolerance.
    """

    K, N = 0, 0

    def tensors(self, M):
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        kind = {"device": self.device, "dtype": dtype}
        self.x = torch.randn(M, self.K, **kind)  # [M, K]
        self.w_gate, self.w_up = (
            torch.randn(self.N, self.K, **kind) * 0.2 * self.K**-0.5 for _ in range(2)
        )  # [N, K]

    def run(self):
        self.out = self.kernel.fused_swiglu(self.x, self.w_gate, self.w_up)

    def reference(self):
        return F.silu(F.linear(self.x, self.w_gate)) * F.linear(self.x, self.w_up)

    def setup_decode_1(self):
        self.tensors(1)

    def setup_decode_64(self):
        self.tensors(64)

    def setup_prefill_512(self):
        self.tensors(512)

    benchmark_decode_1 = benchmark_decode_64 = benchmark_prefill_512 = run
    verify_decode_1 = verify_decode_64 = verify_prefill_512 = reference


class SwigluQwen3Small(_Workloads, Benchmark):
    """Qwen3-0.6B."""

    seed = 0
    K, N = 1024, 3072


class SwigluLlama8B(_Workloads, Benchmark):
    """Llama-3.1-8B."""

    seed = 0
    K, N = 4096, 14336
