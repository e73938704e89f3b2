"""MLPs with a gate: down(act(gate(x)) * up(x))."""

from torch import nn

from ..swiglu.api import fused_swiglu, fused_swiglu_mlp
from .plain import activation_of, parameters_of, same_dtype


def activation_function(mlp: nn.Module):
    """The activation by either name that models have for it."""
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def _fused(x, w_gate, w_up, b_gate, b_up, down: nn.Module, activation: str):
    plain = parameters_of(down)
    if plain is not None and same_dtype(x, plain[0]):
        w_down, b_down = plain
        return fused_swiglu_mlp(
            x, w_gate, w_up, w_down, b_gate, b_up, b_down, activation=activation
        )
    return down(fused_swiglu(x, w_gate, w_up, b_gate, b_up, activation=activation))


class SwiGLUMLP(nn.Module):
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)), both products and the gate in one launch.

    For the MLP of Llama, Mistral, Qwen2, Qwen3, Qwen3.5, OLMo and every other of that shape, with
    biases or without. An activation, adapter, hook or weight that the kernel does not know is
    left to the modules themselves.

    Shapes:
        x: [..., K] -> [..., K]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x):
        modules = self._modules
        activation = activation_of(self.act_fn)
        gate, up = parameters_of(modules["gate_proj"]), parameters_of(modules["up_proj"])
        plain = activation is not None and gate is not None and up is not None
        if not (plain and same_dtype(x, gate[0], up[0])):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        (w_gate, b_gate), (w_up, b_up) = gate, up
        return _fused(x, w_gate, w_up, b_gate, b_up, modules["down_proj"], activation)


class SwiGLUGateUp(nn.Module):
    """SwiGLUMLP on one weight [gate; up]: gate, up = gate_up_proj(x).chunk(2, -1). Phi-3, GLM-4.

    Shapes:
        x: [..., K] -> [..., K]
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x):
        act_fn, plain = activation_function(self), parameters_of(self.gate_up_proj)
        activation = activation_of(act_fn)
        if activation is None or plain is None or not same_dtype(x, plain[0]):
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return self.down_proj(act_fn(gate) * up)
        w_gate, w_up = plain[0].chunk(2)  # [N, K] each
        b_gate, b_up = (None, None) if plain[1] is None else plain[1].chunk(2)
        return _fused(x, w_gate, w_up, b_gate, b_up, self.down_proj, activation)


class _GateUpConversion:
    """How a checkpoint's gate_proj and up_proj become gate_up_proj (and back, on saving).

    A descriptor, since a kernel may import transformers only when transformers asks for this.
    """

    def __get__(self, instance, owner):
        from transformers.core_model_loading import Concatenate, WeightConverter

        return [
            WeightConverter(
                [f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"],
                f"mlp.gate_up_proj.{kind}",
                operations=[Concatenate(dim=0)],
            )
            for kind in ("weight", "bias")
        ]


class SwiGLUGateUpLayout(nn.Module):
    """The parameters of SwiGLUGateUp: transformers builds this class in an MLP's place.

    With from_pretrained(..., kernel_config=KernelConfig({"LlamaMLP": "org/repo:SwiGLUGateUp"})).
    """

    conversion_mapping = _GateUpConversion()

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        from transformers.activations import ACT2FN

        hidden = intermediate_size or config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)
