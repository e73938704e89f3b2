"""Wall-clock benchmark of `chunk_gated_delta_rule` for `kernels benchmark`; kernel time against
other libraries is in compare_gdn.py."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Prefill:
    """One prompt, q and k normalised in the kernel; the state starts from zero and is returned."""

    HEADS = (0, 0)

    def tensors(self, T):
        H, HV = self.HEADS
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16

        def normal(*shape):
            return torch.randn(*shape, device=self.device)

        self.q, self.k = normal(2, 1, T, H, 128).to(dtype).unbind(0)  # [B, T, H, K]
        self.v = normal(1, T, HV, 128).to(dtype)  # [B, T, HV, V]
        self.g = F.logsigmoid(normal(1, T, HV) + 4)  # [B, T, HV] fp32
        self.beta = normal(1, T, HV).sigmoid()  # [B, T, HV] fp32

    def run(self):
        self.out, self.state = self.kernel.chunk_gated_delta_rule(
            self.q, self.k, self.v, self.g, self.beta, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def reference(self):
        """The recurrence, token by token, in fp32."""
        H, HV = self.HEADS
        q, k = (
            F.normalize(x[0].float(), dim=-1).repeat_interleave(HV // H, 1)
            for x in (self.q, self.k)
        )
        v, decay, beta = self.v[0].float(), self.g[0].exp()[..., None], self.beta[0][..., None]
        S = torch.zeros(HV, 128, 128, device=self.device)
        out = torch.empty_like(v)
        for t in range(v.shape[0]):
            S = S * decay[t][..., None]
            write = beta[t] * (v[t] - torch.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t][:, :, None] * write[:, None, :]
            out[t] = torch.einsum("hk,hkv->hv", q[t], S) * 128**-0.5
        return out[None].to(self.v.dtype)


def _workloads(H, HV):
    """Prompts of 512 and 2048 tokens, at one model's heads."""

    class Workloads(_Prefill):
        def setup_prefill_512(self):
            self.tensors(512)

        def setup_prefill_2048(self):
            self.tensors(2048)

        benchmark_prefill_512 = benchmark_prefill_2048 = _Prefill.run
        verify_prefill_512 = verify_prefill_2048 = _Prefill.reference

    Workloads.HEADS = (H, HV)
    return Workloads


class PrefillQwen35Small(_workloads(16, 32), Benchmark):
    """16 heads of q and k, 32 of v: Qwen3.5-4B."""

    seed = 0


class PrefillQwen35Large(_workloads(16, 64), Benchmark):
    """16 heads of q and k, 64 of v."""

    seed = 0
