# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "kernels",
#     "numpy",
#     "torch",
# ]
# ///
"""Loads the kernel that `python tools/build.py` or kernel-builder has built here, and calls it."""

from pathlib import Path

import kernels
import torch

kernel = kernels.get_local_kernel(Path(__file__).resolve().parent)
device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"Using device: {device}")

x = torch.randn(4, 1024, device=device)
w_gate, w_up = torch.randn(2, 3072, 1024, device=device) / 32
result = kernel.fused_swiglu(x, w_gate, w_up)
by = kernel.implementation_of(kernel.fused_swiglu, x, w_gate, w_up)
print(f"Output: {list(result.shape)}, computed by: {by}")

expected = torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T)
assert torch.allclose(result, expected, rtol=1e-3, atol=1e-3), "another result than torch's"
print("Success!")
