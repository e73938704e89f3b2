"""Wall-clock benchmark of `chunk_gated_delta_rule` for `kernels benchmark`; kernel time against
other libraries is in compare_gdn.py."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class _Workloads:
    """Prompts of 512 and 2048 tokens.

    One prompt, q and k normalised in the kernel; the state starts from zero and is returned.
    """

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

    def setup_prefill_512(self):
        self.tensors(512)

    def setup_prefill_2048(self):
        self.tensors(2048)

    benchmark_prefill_512 = benchmark_prefill_2048 = run
    verify_prefill_512 = verify_prefill_2048 = reference


class PrefillQwen35Small(_Workloads, Benchmark):
    """16 heads of q and k, 32 of v: Qwen3.5-4B."""

    seed = 0
    HEADS = (16, 32)


class PrefillQwen35Large(_Workloads, Benchmark):
    """16 heads of q and k, 64 of v."""

    seed = 0
    HEADS = (16, 64)
