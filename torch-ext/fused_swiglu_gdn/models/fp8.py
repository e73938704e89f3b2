"""transformers' modules of checkpoints in FP8 with block scales: FP8Linear, and FP8Experts, which
are served through transformers' own table of implementations (experts.py).

The classes are transformers' own, and so is their code, which gives transformers' fp8_linear, a
function of the known arguments, the tensors that it is to get. The loop of FP8Experts over its
experts is run on small weights in 16 and more bits, where it takes no scales. All functions are
looked at for patches in every call (Pinned).
"""

import inspect
import sys
from types import FunctionType, SimpleNamespace
from typing import Optional, Tuple, Union

import torch
from torch import nn

from ..experts.ops_fp8 import FP8, fp8_experts
from ..fp8.call import BLOCK, ROWS, SCALES, blocks_of
from ..fp8.ops import PRODUCT
from ..layers.activations import activation_of
from ..layers.fp8.weights import SCHEME, Fp8Form, scheme_of, takes
from ..layers.own_classes import Code
from ..layers.own_code import is_in_its_file
from ..layers.pinned import Pinned
from ..layers.pins import names_in
from ..layers.plain import PLAIN_TENSORS, told, why_not_tensor
from ..layers.tensor_parallel import local, own_of_shards
from .code import Refused
from .experts_before import fall_back, loop_of
from .experts_trial import FLAGS, Form, computes
from .serving import own_class, why_not_on
from .stand_ins import quiet
from .trial import while_unchanged
from .trust import code_of

HOME = "transformers.integrations.finegrained_fp8"
ARGUMENTS = (
    "input", "weight", "weight_scale_inv", "block_size", "bias", "activation_scale",
    "allow_deepgemm",
)  # fmt: skip
WEIGHTS = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")


def is_fp8_linear(kind: type) -> bool:
    """The class is transformers' FP8Linear, or one made of it."""
    return _is_made_of(kind, "FP8Linear")


def is_fp8_experts(module: nn.Module) -> bool:
    """A module is transformers' FP8Experts, or of a class made of it."""
    return _is_made_of(own_class(module), "FP8Experts")


def _is_made_of(kind: type, name: str) -> bool:
    own = getattr(sys.modules.get(HOME), name, None)
    return own is not None and issubclass(kind, own)


# -- their code


def _code_of(kind: type, name: str, method: str = "forward") -> Code:
    """The code of a method of transformers' class of this name, above fp8_linear, which is the
    known one; raises Refused. What that calls is not looked into: transformers loads its kernels
    at a first call."""
    home = sys.modules[HOME]
    if kind is not getattr(home, name):
        raise Refused(f"is a {kind.__name__}, not {name}: its class computes in a way of its own")
    if not is_in_its_file(home.fp8_linear, "transformers"):
        raise Refused("its forward calls fp8_linear, which is patched")
    if tuple(inspect.signature(home.fp8_linear).parameters) != ARGUMENTS:
        raise Refused("its forward calls an fp8_linear of other arguments")
    return code_of(kind, method, ends=names_in(home.fp8_linear.__code__))


def _refuse_products(function: FunctionType, given: tuple, module: object, *args: object) -> None:
    """Raises Refused if a method does not call fp8_linear, in place of which it finds a stub, with
    these tensors and all else as in `module`, and return what it gives."""
    found: list = []

    def fp8_linear(*positional, **named):
        words = {**dict(zip(ARGUMENTS, positional)), **named}
        found.append([words.get(name) for name in ARGUMENTS])
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
    x, weight, scale, bias = given
    # a list compares tensors by identity
    if result is not found or found != [[x, weight, scale, module.block_size, bias, None, True]]:
        raise Refused("its forward multiplies in another way")


def _tensors() -> Tuple[torch.Tensor, ...]:
    """x, the weight, its scales and the bias of a small product."""
    x, weight, scale, bias = (torch.ones(4, 4) for _ in range(4))
    return x, weight.to(torch.float8_e4m3fn), scale, bias


# -- linears


def fp8_linear(module: nn.Module) -> Tuple[str, Optional[str], Optional[Fp8Form]]:
    """Our layer for a module that is_fp8_linear, why it is left alone or None, and its form."""
    kind = own_class(module)
    functions = kind.forward, sys.modules[HOME].fp8_linear
    form = while_unchanged(_find_linear, kind, functions)
    if isinstance(form, str):  # why the class is not served
        return "FP8Linear", form, None
    return "FP8Linear", _why_not_linear(module), form


def _find_linear(kind: type) -> Tuple[Union[Fp8Form, str], Tuple[Pinned, ...]]:
    forward, given = _code_of(kind, "FP8Linear"), _tensors()
    x, weight, scale, bias = given
    module = SimpleNamespace(
        weight=weight, weight_scale_inv=scale, block_size=(4, 4), bias=bias, activation_scale=None,
        _deepgemm_disabled=False, training=False,
    )  # fmt: skip
    _refuse_products(forward.inner, given, module, x)
    return Fp8Form(kind, forward.pins), (forward.pins,)


def _why_not_linear(module: nn.Module) -> Optional[str]:
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
        _why_not_scheme(module)
        or _why_not_parameters(weight, scale, bias)
        or _why_not_sizes(weight, scale)
        or _why_no_product(weight, scale)
    )


def _why_not_scheme(module: nn.Module) -> Optional[str]:
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
        _why_not_parameter("its weight", weight, torch.float8_e4m3fn)
        or _why_not_parameter("its scale", scale, *SCALES)
        or (None if bias is None else _why_not_parameter("its bias", bias, torch.bfloat16))
    )


def _why_not_parameter(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> Optional[str]:
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


# -- experts


def form_of_fp8(kind: type) -> Union[Tuple[str, ...], str]:
    """The attributes that the gate of FP8Experts reads, which are to be None, or why a class is
    not served."""
    functions = kind.forward, kind._apply_gate, kind.linear, sys.modules[HOME].fp8_linear
    return while_unchanged(_find_experts, kind, functions)


def _find_experts(kind: type) -> Tuple[Union[Tuple[str, ...], str], Tuple[Pinned, ...]]:
    loop = loop_of(kind, sys.modules[HOME].ALL_FP8_EXPERTS_FUNCTIONS)
    methods = ("forward", "_apply_gate", "linear")
    codes = [_code_of(kind, "FP8Experts", method) for method in methods]
    x, weight, scale, _ = _tensors()
    module = SimpleNamespace(block_size=(4, 4), _deepgemm_disabled=False, training=False)
    _refuse_products(codes[-1].inner, (x, weight, scale, None), module, x, weight, scale)
    unset = tuple(sorted({*kind._apply_gate.__code__.co_names} - {"act_fn", *dir(torch.Tensor)}))
    ones = torch.ones(8)
    more = {
        **FLAGS, **dict.fromkeys(unset), "linear": kind.linear, "activation_scheme": SCHEME[1],
        "gate_up_proj_scale_inv": ones, "down_proj_scale_inv": ones,
    }  # fmt: skip
    pinned = tuple([code.pins for code in codes])
    with quiet():
        if not computes(kind, loop, Form(), FLAGS, **more):
            return "its formula is another", pinned
    return unset, pinned


def why_not_fp8_experts(module: nn.Module) -> Optional[str]:
    """Why a module of FP8 experts is left alone, whatever the device; None if it is not."""
    form = form_of_fp8(own_class(module))
    if isinstance(form, str):
        return form
    return _why_not_formula(module, form) or _why_not_weights(module)


def _why_not_formula(module: nn.Module, unset: Tuple[str, ...]) -> Optional[str]:
    for name in ("_apply_gate", "linear"):
        if name in module.__dict__:
            return f"it has a {name} of its own"
    for name, value in FLAGS.items():
        if getattr(module, name, value) is not value:
            return f"{name} is {getattr(module, name)}"
    for name in unset:
        if getattr(module, name, None) is not None:
            return f"its gate is another: {name} is {getattr(module, name)}"
    activation = getattr(module, "act_fn", None)
    if activation_of(activation) != "silu":
        return f"its activation is {type(activation).__name__}, not silu"
    return _why_not_scheme(module)


def _why_not_weights(module: nn.Module) -> Optional[str]:
    found = [module._parameters.get(name) for name in WEIGHTS]
    for name, x in zip(WEIGHTS, found):
        if x is None or name in module.__dict__:
            return f"{name} is no parameter of its own"
        if told(x, "dtype") is torch.int8:
            return f"{name} is FP4, packed in int8; float8_e4m3fn is served"
        wanted = SCALES if "scale" in name else (torch.float8_e4m3fn,)
        reason = _why_not_parameter(name, x, *wanted)
        if reason is not None:
            return reason
    w_gate_up, s_gate_up, w_down, s_down = found
    if w_down.ndim != 3 or w_gate_up.ndim != 3:
        return "its weights are not of three dimensions"
    E, H, N = w_down.shape
    if w_gate_up.shape != (E, 2 * N, H):
        return f"gate_up_proj is of shape {list(w_gate_up.shape)}, not {[E, 2 * N, H]}"
    if H % BLOCK or N % BLOCK or not H * N:
        return f"its widths, {H} and {N}, are not multiples of {BLOCK}"
    for name, x, w in (("gate_up", s_gate_up, w_gate_up), ("down", s_down, w_down)):
        if x.shape != (E, w.shape[1] // BLOCK, w.shape[2] // BLOCK):
            return (
                f"{name}_proj_scale_inv is of shape {list(x.shape)}, not one for {BLOCK} x {BLOCK}"
            )
    if not all(x.is_contiguous() for x in found):
        return "its weights or scales are not contiguous"
    return None


def why_not_fp8_here(module: nn.Module) -> Optional[str]:
    """Why no kernel serves FP8Experts that are the formula, by the device."""
    return why_not_on(module.down_proj.device, *FP8)


def fp8_experts_forward(
    self: nn.Module, *given: torch.Tensor, **named: torch.Tensor
) -> torch.Tensor:  # [T, H]
    """Computes FP8Experts for transformers: x [T, H], ids [T, K], weights [T, K]."""
    y, reason = None, "it is not called with three tensors by position"
    if not named and len(given) == 3:
        y, reason = _computed(self, *given)
    if y is not None:
        return y
    table = sys.modules[HOME].ALL_FP8_EXPERTS_FUNCTIONS
    return fall_back(self, table, reason, *given, **named)


def _computed(
    self: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Tuple[Optional[torch.Tensor], Optional[str]]:
    """Returns our result; or None, and the reason if the user should know it."""
    if torch.compiler.is_compiling():
        return None, None
    form = form_of_fp8(own_class(self))
    if isinstance(form, str):
        return None, form
    reason = _why_not_formula(self, form)
    if reason is not None or not takes(x, FP8):
        return None, reason
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        return None, "a gradient is needed"
    tensors = (x, *map(self._parameters.get, WEIGHTS), ids, weights)
    if all([type(t) in PLAIN_TENSORS for t in tensors]):
        with torch.no_grad():
            y = fp8_experts(*tensors)
        if y is not None:
            return y, None
    return None, _why_not_weights(self) or why_not_fp8_here(self)
