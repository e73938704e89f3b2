"""Models whose layers transformers runs by functions of another package."""

import sys

import fresh
import pytest
from conftest import ROOT

pytest.importorskip("transformers")


FLA = """
import torch

@torch.compiler.disable
def {0}(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    raise AssertionError("needs a GPU")

def {1}(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    raise AssertionError("needs a GPU")
"""
BESIDE_FLA = """
import sys
sys.path[:0] = {paths!r}
import conftest
import peers
from tiny_models import random_model
sys.modules.pop("fla"), sys.modules.pop("causal_conv1d", None)
peers.install_fla_convolution()
kernel = conftest.load_package()
for name in ("qwen3_5_text", "kimi_linear"):
    model = random_model(name)
    with conftest.submodule("runtime.dispatch").force("reference"):
        kernel.kernelize(model)
    layer = model.model.layers[0]
    mixer = getattr(layer, "linear_attn", None) or layer.self_attn
    print(type(mixer).__name__, getattr(type(mixer), "served_as", None))
"""


def test_layers_beside_fla(tmp_path):
    """transformers decodes with FLA's functions, and convolves with causal_conv1d's, where these
    are installed: here as benchmarks/ has them, whose rows of ours need served layers."""
    for room, names in (
        ("gated_delta_rule", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")),
        ("kda", ("chunk_kda", "fused_recurrent_kda")),
    ):
        folder = tmp_path / "fla" / "ops" / room
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(FLA.format(*names))
    for folder in (tmp_path / "fla", tmp_path / "fla" / "ops"):
        (folder / "__init__.py").write_text("")
    code = BESIDE_FLA.format(paths=[str(tmp_path), str(ROOT / "benchmarks"), *sys.path])
    done = fresh.python("-c", code)
    assert done.returncode == 0, done.stderr
    served = [line.split() for line in done.stdout.splitlines()]
    assert served == [
        ["Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet"],
        ["KimiLinearDeltaAttention", "KimiDeltaAttention"],
    ]
