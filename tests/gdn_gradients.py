"""Calls of the gradient of the chunked gated delta rule, and their gradients in fp64."""

import torch
from conftest import gdn_inputs, submodule

recurrent = submodule("gdn.reference.recurrent")
written_out = submodule("gdn.reference.backward")
calls = submodule("gdn.call")

GRADS = "q k v g beta A_log dt_bias initial_state".split()


class Case:
    """Inputs, gradients of the outputs and options of one call."""

    def __init__(
        self, B, T, H, HV, K, V, dtype, device="cpu", gates="slow", seed=0, l2norm=False,
        gate=False, dt_bias=True, sigmoid=False, negative=False, v_first=False, lengths=None,
        states=True, zero_beta=False,
    ):  # fmt: skip
        if lengths is not None:
            B, T = 1, sum(lengths)
        x = gdn_inputs(B, T, H, HV, K, V, dtype, device, seed, gates)
        random = torch.Generator(device=device).manual_seed(seed + 1)

        def normal(*shape, dtype=x["g"].dtype):
            x = torch.randn(*shape, generator=random, device=device, dtype=torch.float64)
            return x.to(dtype)

        self.cu_seqlens = None
        N = B
        if lengths is not None:
            N = len(lengths)
            ends = torch.tensor(lengths, device=device).cumsum(0)
            self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        x.update(A_log=None, dt_bias=None, initial_state=None)
        shape = (N, HV, V, K) if v_first else (N, HV, K, V)
        self.d_final = None
        if states:
            x["initial_state"] = normal(*shape) * 0.2
            self.d_final = normal(*shape) * 0.1
        if l2norm:
            x["k"] = normal(B, T, H, K, dtype=dtype)
        if gate:
            x["g"] = normal(B, T, HV, dtype=dtype)
            x["A_log"] = torch.linspace(-3, 2.5, HV, device=device).to(x["beta"].dtype)
            x["dt_bias"] = normal(HV) if dt_bias else None
        if sigmoid:
            x["beta"] = normal(B, T, HV, dtype=dtype)
        if zero_beta:
            x["beta"][:, ::5] = 0
        self.inputs = tuple(x[name] for name in GRADS)
        self.do = normal(B, T, HV, V, dtype=dtype)
        self.flags = (l2norm, sigmoid, negative, v_first)
        self.scale = K**-0.5

    def expected(self):
        """Gradients by automatic differentiation of the recurrence in fp64, and its o."""
        leaves = [None if x is None else x.double().requires_grad_() for x in self.inputs]
        has_final = self.d_final is not None
        options = calls.RecurrentOptions(self.scale, *self.flags, has_final)
        o, state = recurrent.gdn_recurrent_fwd(
            calls.RecurrentCall(*leaves, None, None, None, self.cu_seqlens, None, options)
        )
        loss = (o * self.do.double()).sum()
        if has_final:
            loss = loss + (state * self.d_final.double()).sum()
        given = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad(loss, given))
        return [None if x is None else next(grads) for x in leaves]

    def gradients(self, module, prepared=None, values_only=False):
        call = self.backward(prepared, values_only)
        if module is written_out:
            return module.gdn_chunk_bwd(call)
        return module.prepare_gdn_chunk_bwd(call)(*call.tensors)

    def backward(self, prepared=None, values_only=False):
        """The call of the gradient."""
        prepared, options = prepared or (None, None, None), self.call().options
        tensors = (*self.inputs, self.cu_seqlens, self.do, self.d_final, *prepared)
        return calls.GdnBackward(*tensors, calls.GradientOptions(values_only, *options))

    def call(self):
        options = calls.GdnOptions(self.scale, *self.flags)
        return calls.GdnCall(*self.inputs, None, self.cu_seqlens, options)
