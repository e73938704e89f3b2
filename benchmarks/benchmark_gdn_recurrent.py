"""Wall-clock benchmark of `fused_recurrent_gated_delta_rule` for `kernels benchmark`; kernel time
against other libraries is in compare_gdn_recurrent.py."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Workloads:
    """One sequence and 64.

    One token a sequence, gates raw and q, k normalised in the kernel, the state in place.
    """

    HEADS = (0, 0)

    def tensors(self, B):
        H, HV = self.HEADS
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16

        def normal(*shape):
            return torch.randn(*shape, device=self.device)

        self.q, self.k = normal(2, B, 1, H, 128).to(dtype).unbind(0)  # [B, 1, H, K]
        self.v = normal(B, 1, HV, 128).to(dtype)  # [B, 1, HV, V]
        self.a, self.b = normal(2, B, 1, HV).to(dtype).unbind(0)  # [B, 1, HV]
        self.A_log, self.dt_bias = normal(HV), normal(HV)
        self.start = normal(B, HV, 128, 128) * 0.1  # [B, HV, K, V]
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
        q, k = (
            F.normalize(x[:, 0].float(), dim=-1).repeat_interleave(
                self.HEADS[1] // self.HEADS[0], 1
            )
            for x in (self.q, self.k)
        )  # [B, HV, K]
        v, beta = self.v[:, 0].float(), self.b[:, 0].float().sigmoid()[..., None]
        g = -self.A_log.exp() * F.softplus(self.a[:, 0].float() + self.dt_bias)  # [B, HV]
        S = self.start * g.exp()[..., None, None]  # [B, HV, K, V]
        delta = (v - (S * k[..., None]).sum(-2)) * beta
        S = S + k[..., None] * delta[..., None, :]
        return ((S * q[..., None]).sum(-2) * 128**-0.5)[:, None].to(self.q.dtype)

    def setup_decode_1(self):
        self.tensors(1)

    def setup_decode_64(self):
        self.tensors(64)

    benchmark_decode_1 = benchmark_decode_64 = run
    verify_decode_1 = verify_decode_64 = reference


class DecodeQwen35Small(_Workloads, Benchmark):
    """16 heads of q and k, 32 of v: Qwen3.5-4B."""

    seed = 0
    HEADS = (16, 32)


class DecodeQwen35Large(_Workloads, Benchmark):
    """16 heads of q and k, 64 of v."""

    seed = 0
    HEADS = (16, 64)
