"""The routed experts in FP8 with block scales: x is quantised once a token, z by the launch that
makes it.

Up to FEW tokens nothing is sorted: an entry is a tile. A row has the same bits in any batch. Sizes:
T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Callable, NamedTuple, Optional

import torch

from ...fp8.call import BLOCK, padded
from ...fp8.portable.quantise import is_quantised_here, quantise_launch
from ...runtime import device, tuning
from ...runtime.launch import Launch
from ..call import Fp8Experts
from ..portable.combine import combine
from ..portable.launching import launch_of
from ..portable.routing import Routing, route
from .fp8_products import down_kernel, up_kernel
from .fp8_spread import spread_launch
from .fp8_wide import BM, places_of, wide_launch

FEW = 8  # tokens up to which entries are not sorted by expert


def _lies_so(codes: torch.Tensor, scales: torch.Tensor, shape: tuple) -> bool:
    """A weight [E, N, K] with a scale for each 128 x 128 values, as TMA reads it."""
    E, N, K = shape
    return (
        codes.shape == shape
        and codes.dtype is torch.float8_e4m3fn
        and scales.dtype is torch.float32
        and K % BLOCK == N % BLOCK == 0
        and scales.shape == (E, N // BLOCK, K // BLOCK)
        and codes.is_contiguous()
        and scales.is_contiguous()
        and scales.device == codes.device
    )


def _supports(call: Fp8Experts) -> bool:
    x, w_gate_up, s_gate_up, w_down, s_down, ids, weights, _ = call
    if w_down.ndim != 3 or x.ndim != 2 or ids.ndim != 2 or weights.shape != ids.shape:
        return False
    (E, H, I), K = w_down.shape, ids.shape[1]
    return (
        (not device.is_gpu(x.device) or device.has_wgmma(x.device))
        and _lies_so(w_gate_up, s_gate_up, (E, 2 * I, H))
        and _lies_so(w_down, s_down, (E, H, I))
        and 0 < E <= 1024
        and 0 < K <= 64
        and I > 0
        and x.shape == (ids.shape[0], H)
        and x.shape[0] * K < 2**29
        and x.device == w_down.device == ids.device == weights.device
        and ids.dtype in (torch.int32, torch.int64)
        and is_quantised_here(x)
        and weights.dtype != torch.float64
    )


class _Products(NamedTuple):
    """Gate and up with the gate, and down."""

    routing: Routing  # without a buffer
    up: Launch
    down: Launch


def _config(where: torch.device, T: int, K: int, E: int) -> dict:
    if T <= FEW:
        return tuning.lookup("hopper_experts_fp8_few", where)
    return tuning.lookup("hopper_experts_fp8", where, rows=max(1, T * K // E))


def _products(where: torch.device, T: int, K: int, E: int, H: int, I: int) -> _Products:  # noqa: E741
    """Prepares the products of calls of these sizes, except of those that fp8_wide.py computes."""
    config, pdl = _config(where, T, K, E), device.overlaps_launches(where)
    height, S = config["HEIGHT"], T * K
    routing = Routing(None, T, K, E, height)
    places, tiles = (S, S) if T <= FEW else (routing.places, routing.tiles)

    def launch(kernel, maps: tuple, columns: int, numbers: tuple, sizes: tuple, tile: dict):
        options = (("num_warps", tile["num_warps"]), ("num_stages", tile["num_stages"]))
        constexprs = (*sizes, height, tile["GROUP"], pdl)
        size = tiles * (columns // BLOCK)
        return launch_of(kernel, size, where, maps, numbers, constexprs, options, pdl)

    box = (1, BLOCK, BLOCK)
    maps = (((places, I), (height, BLOCK)), ((E, H, I), box))
    numbers, up = (S, E, padded(T), places), config["up"]
    return _Products(
        routing,
        launch(up_kernel, (((2 * E, I, H), box),), I, numbers, (H, I, K), up),
        launch(down_kernel, maps, H, (S, E, places), (H, I), config["down"]),
    )


def prepare_fp8_experts_fwd(call: Fp8Experts) -> Optional[Callable]:
    """The tensors of a call -> [T, H]. The weights begin at multiples of 16 bytes, which the caller
    sees to."""
    if not _supports(call):
        return None
    x, ids = call.x, call.ids
    (E, H, I), (T, K), where = call.w_down.shape, ids.shape, x.device
    wide = _config(where, T, K, E)["HEIGHT"] == BM.value
    run, pdl = (_wide if wide else _plain)(x, K, E, H, I), device.overlaps_launches(where)

    def experts(x, w_gate_up, s_gate_up, w_down, s_down, ids, weights):
        ids, weights = ids.contiguous(), weights.contiguous()
        y, routed = run(x, w_gate_up, s_gate_up, w_down, s_down, ids)
        return combine(y, weights, routed, ids, pdl=pdl)

    return experts


def _plain(x, K: int, E: int, H: int, I: int) -> Callable:  # noqa: E741
    """(y by places, routing) from all but the weights of the slots."""
    quantise, P = quantise_launch(x), padded(x.shape[0])
    routing, up, down = _products(x.device, x.shape[0], K, E, H, I)
    few, S = routing.T <= FEW, routing.T * routing.K
    places, pdl = S if few else routing.places, device.overlaps_launches(x.device)

    def run(x, w_gate_up, s_gate_up, w_down, s_down, ids):
        routed = routing if few else route(ids, E, routing.height, pdl)
        codes = x.new_empty((P, H), dtype=torch.float8_e4m3fn)
        scales = x.new_empty((H // BLOCK, P), dtype=torch.float32)
        quantise(x, codes, scales)
        z = codes.new_empty((places, I))
        z_scales = z.new_empty((I // BLOCK, places), dtype=torch.float32)
        up(w_gate_up, codes, scales, s_gate_up, ids, routed.buffer, z, z_scales)
        y = x.new_empty((places, H))
        down(z, w_down, z_scales, s_down, ids, routed.buffer, y)
        return y, routed

    return run


def _wide(x, K: int, E: int, H: int, I: int) -> Callable:  # noqa: E741
    """The same of many rows an expert."""
    where, e4m3 = x.device, torch.float8_e4m3fn
    routing, pdl = Routing(None, x.shape[0], K, E, BM.value), device.overlaps_launches(where)
    places = places_of(routing)
    spread = spread_launch(where, x.shape[0], K, E, H, x.stride(0), places)
    up, down = wide_launch(where, routing, H, I, True), wide_launch(where, routing, I, H, False)

    def run(x, w_gate_up, s_gate_up, w_down, s_down, ids):
        routed = route(ids, E, routing.height, pdl)
        codes = torch.empty((places, H), dtype=e4m3, device=where)
        scales = torch.empty((H // BLOCK, places), dtype=torch.float32, device=where)
        spread(x, codes, scales, routed.buffer)
        z = torch.empty((places, I), dtype=e4m3, device=where)
        z_scales = torch.empty((I // BLOCK, places), dtype=torch.float32, device=where)
        up(codes, scales, w_gate_up, z, s_gate_up, z_scales, routed.buffer)
        del codes, scales
        y = torch.empty((places, H), dtype=torch.bfloat16, device=where)
        down(z, z_scales, w_down, y, s_down, None, routed.buffer)
        return y, routed

    return run
