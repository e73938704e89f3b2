"""Layers that train by CUDA graphs: kernelize(model, training_graphs=True).

The decoder layers of a model run as they are for a few steps; then each is captured, forward and
gradients (layer_step.py), and later steps of the same shapes replay. In every call the conditions
are asked anew, and where one fails the layer runs as it is.
"""

import functools
import sys
import threading
import weakref
from itertools import chain
from typing import Callable, List, Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..decoding.capture import Graph
from ..layers.plain import Named, torch_unpatched
from ..runtime import dispatch
from .layer_call import Eager, device_of, key_of
from .layer_step import LayerStep
from .report import Row
from .serving import GRAPHS, is_served, may_move, own_class, say_once, serve, why_replaced

LAYER = "DecoderLayer"  # what decoder layers are served as
WARM = 2  # calls of a shape in a row before it is captured
PAYS = 32  # replays that pay for a capture, with room to spare
WASTED = 3  # captures that may be in vain
HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _say(layer: nn.Module, reason: str) -> None:
    say_once(f"{type(layer).__name__} trains without a CUDA graph: {reason}")


class LayerGraphs:
    """The graphs of one layer, and of which calls they are.

    A copy of the layer captures its own; a pickle holds none.
    """

    def __init__(self, layer: nn.Module):
        self.of, self.lock = weakref.ref(layer), threading.RLock()
        self.key: Optional[tuple] = None  # of the calls that the step is for
        self.step: Optional[LayerStep] = None
        self.next: Optional[tuple] = None  # of the latest call that had another one
        self.met = self.replays = self.wasted = 0
        self.eager = 0  # calls that run as they are now, in other threads
        self.reason: Optional[str] = None  # why no call is for graphs

    def __reduce__(self):
        return type(None), ()  # copies, too

    def __call__(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict):
        with self.lock:
            step, ticket, tensors = self._replay_of(layer, call, args, kwargs)
            self.eager += ticket is None
            self.replays += ticket is not None
        if ticket is not None:
            return step.run(tensors, ticket)
        try:
            return call(layer, *args, **kwargs)
        finally:
            with self.lock:
                self.eager -= 1

    def _replay_of(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict) -> tuple:
        """The graphs that serve a call, the right to replay them, or None, and its tensors."""
        tensors: List[torch.Tensor] = []
        if self.reason is not None or not _may_replay():
            return None, None, tensors
        try:
            key = key_of((args, kwargs), tensors)
            device = device_of(tensors)
        except Eager as why:
            _say(layer, str(why))
            return None, None, tensors
        if Graph.why_not(device) is not None or Graph.busy():
            return None, None, tensors
        step = self._known((key, _modes(device)))
        if step is None and self.met > WARM and not self.eager and _trains(layer, tensors):
            step = self._captured(layer, call, args, kwargs, tensors)
        return step, None if step is None else step.take(), tensors

    def _known(self, key: tuple) -> Optional[LayerStep]:
        """The graphs of calls with this key, or None; counts those in a row that have none."""
        if self.step is not None and key == self.key:
            if self.step.holds():
                self.met = 0
                return self.step
            self._drop()
        self.next, self.met = key, 1 + (self.met if key == self.next else 0)
        return None

    def _captured(self, layer, call, args, kwargs, tensors: list) -> Optional[LayerStep]:
        if self.step is not None:
            self._drop()
        if self.reason is None:
            try:
                self.step = LayerStep(layer, call, args, kwargs, tensors)
            except Exception as error:
                cause = error.__context__ or error  # the end of a capture fails after its cause
                self.reason = str(cause).partition("\n")[0] or type(cause).__name__
        if self.reason is not None:
            _say(layer, self.reason)
        self.key, self.met = self.next, 0
        return self.step

    def _drop(self) -> None:
        self.wasted += self.replays < PAYS
        self.step, self.key, self.replays = None, None, 0
        if self.wasted >= WASTED:
            self.reason = "shapes or weights changed again and again"


def _may_replay() -> bool:
    """True if nothing but eager autograd sees a call."""
    recorder = sys.modules.get("transformers.utils.output_capturing")
    return (
        HOOKS(True) is None  # of gradient checkpointing, or that keep tensors elsewhere
        and torch_unpatched()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._current_graph_task_id() == -1  # inside a backward pass
        and not torch.is_anomaly_enabled()
        and not (recorder is not None and recorder._active_collector.get())
    )


def _modes(device: torch.device) -> tuple:
    """Switches that change what a layer computes."""
    C, kind = torch._C, device.type
    return (
        Graph.place(device), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind),
        dispatch.forced, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        C._get_flash_sdp_enabled(), C._get_mem_efficient_sdp_enabled(), C._get_math_sdp_enabled(),
        C._get_cudnn_sdp_enabled(), _fp32_products(), F.scaled_dot_product_attention,
    )  # fmt: skip


def _fp32_products() -> object:
    """The precision of torch's products in fp32; torch refuses one of its two questions about it,
    depending on how it was set."""
    ask = getattr(torch._C, "_get_fp32_precision_getter", None)
    return torch._C._get_cublas_allow_tf32() if ask is None else ask("cuda", "matmul")


def _trains(layer: nn.Module, tensors: list) -> bool:
    """True if the layer has gradients to compute."""
    return any([x.requires_grad for x in chain(tensors, layer.parameters())])


@functools.cache
def _graphed(call: Callable) -> Callable:
    """A layer's forward by graphs, or by `call` where they do not serve."""

    @functools.wraps(call)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return call(self, *args, **kwargs)
        graphs = self.__dict__.get(GRAPHS)
        if graphs is None:
            graphs = self.__dict__[GRAPHS] = LayerGraphs(self)
        if graphs.of() is not self:  # a replica of DataParallel, or copy.copy's
            return call(self, *args, **kwargs)
        return graphs(self, call, args, kwargs)

    return forward


def _is_layer(module: nn.Module) -> bool:
    """True for what our decoder layers serve, and for what transformers checkpoints."""
    if type(module).__dict__.get("served_as") == LAYER:
        return True
    kinds = own_class(module).__mro__
    name = "transformers.modeling_layers"
    return any([k.__name__ == "GradientCheckpointingLayer" and k.__module__ == name for k in kinds])


def serve_training_graphs(modules: Named, where: torch.device, exchanges: bool) -> Row:
    """Makes the layers of a model train by CUDA graphs; returns a row of the report. exchanges:
    layers of several GPUs send each other states."""
    kind, count, inside = type(modules[0][1]).__name__, 0, ""
    reason = None if may_move(where) else Graph.why_not(where)
    if exchanges or any([m.__dict__.get("_tp_size") not in (None, 1) for _, m in modules]):
        reason = "its layers exchange tensors with other GPUs"
    elif HOOKS is None:
        reason = f"torch {torch.__version__} does not tell who saves activations"
    for name, module in modules if reason is None else ():
        if not _is_layer(module) or inside and name.startswith(inside):
            continue
        if not is_served(module) and why_replaced(module) is not None:
            continue
        inside, served = f"{name}.", type(module).__dict__.get("served_as", "training")
        serve(module, served, _graphed(type(module).forward))
        count += 1
    if reason is None and not count:
        reason = "it has no layers of transformers, or others have replaced their forwards"
    note = None if reason else f"CUDA graphs of {count} layers"
    return Row("", kind, "training", note, reason and f"no CUDA graph: {reason}")


def restore_training_graphs(modules: Named) -> None:
    """Frees what serve_training_graphs has added to layers."""
    for _, module in modules:
        module.__dict__.pop(GRAPHS, None)
