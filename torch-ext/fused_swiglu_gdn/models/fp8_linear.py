"""transformers' FP8Linear, the linear of checkpoints in FP8 with block scales: which are served.

Of its class the forward is transformers' own, and calls its function fp8_linear, of the known
arguments, with the tensors of its module. Both are looked at for patches in every call (Pinned).
"""

import inspect
import sys
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from ..fp8.call import BLOCK, ROWS, SCALES, blocks_of
from ..fp8.ops import PRODUCT
from ..layers.fp8.weights import SCHEME, Fp8Form, scheme_of
from ..layers.own_classes import Code
from ..layers.own_code import is_in_its_file
from ..layers.pinned import Pinned
from ..layers.pins import names_in
from ..layers.plain import why_not_tensor
from ..layers.tensor_parallel import local, own_of_shards
from .code import Refused
from .serving import own_class
from .trial import while_unchanged
from .trust import code_of

HOME = "transformers.integrations.finegrained_fp8"
ARGUMENTS = (
    "input", "weight", "weight_scale_inv", "block_size", "bias", "activation_scale",
    "allow_deepgemm",
)  # fmt: skip

_forms: Dict[type, tuple] = {}


def is_fp8_linear(kind: type) -> bool:
    """The class is transformers' FP8Linear, or one made of it."""
    own = getattr(sys.modules.get(HOME), "FP8Linear", None)
    return own is not None and issubclass(kind, own)


def fp8_linear(module: nn.Module) -> Tuple[str, Optional[str], Optional[Fp8Form]]:
    """Our layer for a module that is_fp8_linear, why it is left alone or None, and its form."""
    kind = own_class(module)
    form = while_unchanged(_forms, kind, (kind.forward, sys.modules[HOME].fp8_linear), _find)
    if isinstance(form, str):  # why the class is not served
        return "FP8Linear", form, None
    return "FP8Linear", why_not_fp8(module), form


def _find(kind: type) -> Tuple[Union[Fp8Form, str], Tuple[Pinned, ...]]:
    home = sys.modules[HOME]
    if kind is not home.FP8Linear:
        raise Refused(
            f"is a {kind.__name__}, not FP8Linear: its class multiplies in a way of its own"
        )
    forward = code_above(home, kind)
    weight, scale, bias, x = (torch.ones(4, 4) for _ in range(4))
    weight, block = weight.to(torch.float8_e4m3fn), (4, 4)
    module = SimpleNamespace(
        weight=weight, weight_scale_inv=scale, block_size=block, bias=bias, activation_scale=None,
        _deepgemm_disabled=False, training=False,
    )  # fmt: skip
    given = {**dict(zip(ARGUMENTS, (x, weight, scale, block, bias, None))), ARGUMENTS[-1]: True}
    if given_to_products(forward.inner, module, x) != [given]:
        raise Refused("its forward multiplies in another way")
    return Fp8Form(kind, forward.pins), (forward.pins,)


def code_above(home: ModuleType, kind: type, method: str = "forward") -> Code:
    """The code of a method that calls the module's fp8_linear, which is the known one; raises
    Refused. What that calls is not looked into: transformers loads its kernels at a first call."""
    if not is_in_its_file(home.fp8_linear, "transformers"):
        raise Refused("its forward calls fp8_linear, which is patched")
    if tuple(inspect.signature(home.fp8_linear).parameters) != ARGUMENTS:
        raise Refused("its forward calls an fp8_linear of other arguments")
    return code_of(kind, method, ends=names_in(home.fp8_linear.__code__))


def given_to_products(function: FunctionType, module: object, *args: object) -> List[dict]:
    """The arguments with which a method calls fp8_linear, in place of which it finds a stub.

    Tensors are those of the module: a dict compares them by identity.
    """
    found: List[dict] = []

    def fp8_linear(*given, **words):
        found.append({**dict(zip(ARGUMENTS, given)), **words})
        return found

    def apply_if_grad(_, function, *given):
        return function(*given)

    space = {**function.__globals__, "fp8_linear": fp8_linear, "_apply_if_grad": apply_if_grad}
    cells = function.__closure__
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    try:
        result = copy(module, *args)
    except Exception as error:
        raise Refused(f"its forward raises {type(error).__name__} when tried") from None
    return found if result is found else []


def why_not_fp8(module: nn.Module) -> Optional[str]:
    """Why an FP8Linear of the known class is left alone, or None."""
    parameters = module.__dict__["_parameters"]
    weight, scale, bias = map(parameters.get, ("weight", "weight_scale_inv", "bias"))
    if weight is None or scale is None:
        return "has a weight or scales that are no parameter of its own"
    if own_of_shards(module, module.__dict__.get("forward")) is not None:
        cut = {p.dim for p in getattr(weight, "placements", ()) if p.is_shard()}
        weight, scale, bias = map(local, (weight, scale, bias))
        for axis, name in enumerate(("rows", "columns")):
            size = weight.shape[axis]
            if axis in cut and size % BLOCK:  # others might begin inside a block of scales
                return f"tensor parallel shards of {size} {name}, not multiples of {BLOCK}"
    return (
        why_not_scheme(module)
        or _why_not_parameters(weight, scale, bias)
        or _why_not_sizes(weight, scale)
        or _why_no_product(weight, scale)
    )


def why_not_scheme(module: nn.Module) -> Optional[str]:
    """Why a module is left alone for how its weights in FP8 are scaled, or None."""
    block, scheme, given = scheme_of(module)
    if scheme != SCHEME[1] or given is not None:
        words = "static" if scheme == SCHEME[1] else scheme
        return f"FP8 with {words} activations; those of activation_scheme='dynamic' are served"
    if block is None:
        return f"FP8 with one scale for its whole weight; one for {BLOCK} x {BLOCK} is served"
    if block != SCHEME[0]:
        size = " x ".join(map(str, block)) if isinstance(block, tuple) else block
        return f"FP8 with blocks of {size}; those of {BLOCK} x {BLOCK} are served"
    return None


def _why_not_parameters(weight, scale, bias) -> Optional[str]:
    return (
        why_not_parameter("its weight", weight, torch.float8_e4m3fn)
        or why_not_parameter("its scale", scale, *SCALES)
        or (None if bias is None else why_not_parameter("its bias", bias, torch.bfloat16))
    )


def why_not_parameter(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> Optional[str]:
    """Why a parameter is no plain tensor of one of these dtypes, or None."""
    reason = why_not_tensor(x)
    if reason is not None and not reason.startswith("is of dtype"):
        return f"{name} {reason}"
    if x.dtype in dtypes:
        return None
    words = [str(d).replace("torch.", "") for d in (x.dtype, dtypes[0])]
    return f"{name} is of dtype {words[0]}; {words[1]} is served"


def _why_not_sizes(weight, scale) -> Optional[str]:
    if weight.ndim != 2 or not (_lies_in_rows(weight) and _lies_in_rows(scale)):
        return "its weight or scales are no matrix that lies in rows"
    N, K = weight.shape
    if K % ROWS or N % ROWS:
        return f"its {K} input or {N} output features are no multiple of {ROWS}"
    if scale.shape != (blocks_of(N), blocks_of(K)):
        return f"its scales are of shape {list(scale.shape)}, not one for {BLOCK} x {BLOCK}"
    if (weight.data_ptr() | scale.data_ptr()) % 16:
        return "its weight or scales do not begin at a multiple of 16 bytes"
    return None


def _lies_in_rows(x: torch.Tensor) -> bool:
    """A matrix that is dense, or one row that stands for all those that FSDP2 gathers."""
    return x.is_contiguous() or x.stride() == (0, 1)


def _why_no_product(weight, scale) -> Optional[str]:
    if weight.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    if not weight.is_contiguous():  # where a call is looked at once more
        weight, scale = weight[:BLOCK].contiguous(), scale[:1].contiguous()
    if PRODUCT.serving((weight, scale)) is not None:
        return None
    return (
        f"torch {torch.__version__} with CUDA {torch.version.cuda} has no product of FP8 blocks "
        f"for {weight.shape[1]} input features on this GPU: it needs Hopper, CUDA 12.9 and, where "
        "they are no multiple of 512, torch.nn.functional.scaled_mm"
    )
