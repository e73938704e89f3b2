"""Stands in for the package causal_conv1d, by the convolution of flash-linear-attention (FLA)."""

prompts = None  # a function that serves prompts in FLA's place


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    if prompts is not None:
        return prompts(hidden_states, weight, bias, activation)
    from fla.modules.causal_conv1d import causal_conv1d

    x = hidden_states.transpose(1, 2)
    return causal_conv1d(x, weight, bias, activation=activation)[0].transpose(1, 2)


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    from fla.modules.causal_conv1d import causal_conv1d_update as update

    x = hidden_states.transpose(1, 2)
    y, _ = update(x, conv_state, weight=weight, bias=bias, activation=activation)
    return y.transpose(1, 2)
