"""Emulates a CUDA graph on a CPU: the calls of one step are repeated on the same memory.

A replay runs no Python: whatever Python would do anew in each step is as it was when the graph was
captured, and a read of a value by the host cannot be captured at all.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
         "aten::masked_select"}  # fmt: skip


def tensors_in(values) -> list:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [x for v in values for x in tensors_in(v)] if isinstance(values, (tuple, list)) else []


class Recording(TorchDispatchMode):
    """Keeps the calls inside, and takes back at the end what they wrote into older tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()
        self.read = {}  # storages of before -> how many tensors of the recording they have
        self.random = torch.get_rng_state()  # a capture draws no numbers

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where functions made of others come here whole
            with self:
                out = function.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        schema = function._schema
        if schema.name in READS:
            raise RuntimeError(f"{schema.name} is not permitted when a stream is capturing")
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in tensors_in(given):
                    storage = x.untyped_storage()
                    if storage.data_ptr() not in self.made:
                        self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        if schema.name == "aten::lift_fresh":  # a number of Python's
            self.made.add(args[0].untyped_storage().data_ptr())
        out = function(*args, **kwargs)
        read = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        for x in tensors_in(out):
            self.made |= {x.untyped_storage().data_ptr()} - read
        self.calls.append((function, *map(self.alias, (args, kwargs, out))))
        return out

    def alias(self, values):
        """The values with tensors of the recording's own on the same memory."""
        if isinstance(values, dict):
            return {name: self.alias(x) for name, x in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)([self.alias(x) for x in values])
        if not isinstance(values, torch.Tensor):
            return values
        storage = values.untyped_storage()
        if storage.data_ptr() not in self.made:
            known = self.read.setdefault(storage.data_ptr(), [storage, 1])
            known[1] += 1
        return values.detach()

    def check(self):
        """A graph keeps no memory of before alive: it reads what is there instead."""
        for storage, mine in self.read.values():
            if storage.data_ptr() and torch._C._storage_Use_Count(storage._cdata) <= mine:
                raise RuntimeError(f"a graph reads {storage.nbytes()} bytes that were freed")

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.set_rng_state(self.random)
        for storage, values in self.before.values():
            storage.copy_(values)
        self.before.clear()


class EmulatedGraph:
    """Stands for decoding/capture.py:Graph."""

    pool = None

    def __init__(self, device):
        self.recording = None

    @staticmethod
    def why_not(device):
        return None

    @staticmethod
    def place(device):
        return 0

    @staticmethod
    def memory(device):
        return 2**30

    @staticmethod
    def busy():
        return False

    @staticmethod
    def delivery(device, like):
        return EmulatedDelivery(device, like)

    @staticmethod
    def generator(device):
        return EmulatedGenerator()

    def run(self, call):
        return call()

    def capture(self, call):
        self.recording = Recording()
        with self.recording:
            return call()

    def replay(self):
        self.recording.check()
        for function, args, kwargs, out in self.recording.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_in(out), tensors_in(again)):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class EmulatedDelivery:
    """Stands for decoding/capture.py:Delivery: what was sent is there once it was waited for."""

    def __init__(self, device, like):
        self.values = [torch.full_like(x, -1) for x in like]
        self.sent = None

    def send(self, tensors):
        self.sent = [x.clone() for x in tensors]

    def wait(self):
        for mine, x in zip(self.values, self.sent):
            mine.copy_(x)
        return self.values


class EmulatedGenerator:
    """torch's generator with the offsets of one on a GPU: 4 for each draw."""

    def __init__(self):
        self.states = {}
        self.offset = 0
        self.get_offset()

    def get_offset(self):
        state = torch.get_rng_state()
        if not torch.equal(state, self.states.get(self.offset, torch.empty(0))):
            self.offset += 4
            self.states[self.offset] = state
        return self.offset

    def set_offset(self, offset):
        self.offset = offset
        torch.set_rng_state(self.states[offset])
