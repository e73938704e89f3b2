"""Decoding with a ring as operations. Forward only."""

from torch import Tensor

from ..runtime.call import tensors_in
from ..runtime.dtypes import at_least_fp32
from ..runtime.operation import Operation
from . import checks_replay as checks
from .call import ReplayCall, RingAdvance, RingMaterialise
from .ops_train import cast
from .reference import replay as reference

FAMILY = "gdn.replay"


def _replayed(call: ReplayCall) -> Tensor:
    o = reference.gdn_replay_fwd(call)
    return o if call.out is not None else o.contiguous()


def _advanced(call: RingAdvance) -> None:
    reference.gdn_ring_advance(*call[:4], call.ring_g.shape[2], *call.options)


def _materialised(call: RingMaterialise) -> Tensor:
    _, null_index, inplace = call.options
    found = reference.gdn_ring_materialise(*tensors_in(call), null_index, inplace)
    return found if inplace else found.contiguous()


def _states(call: RingMaterialise) -> Tensor:
    state = call.state
    return at_least_fp32(state).new_empty(call.cursor.shape[0], *state.shape[1:])


REPLAY = Operation(
    FAMILY, "gdn_replay_fwd", ReplayCall, _replayed, check=checks.replay, cast=cast,
    fake=lambda call: None if call.out is not None else call.v.new_empty(call.v.shape),
    written=("initial_state", "ring_k", "ring_u", "ring_g", "out"),
)  # fmt: skip
ADVANCE = Operation(
    FAMILY, "gdn_ring_advance", RingAdvance, _advanced, check=checks.advance, outputs=0,
    written=("cursor",),
)  # fmt: skip
MATERIALISE = Operation(
    FAMILY, "gdn_ring_materialise", RingMaterialise, _materialised, check=checks.materialise,
    fake=_states,
)  # fmt: skip
MATERIALISE_IN_PLACE = Operation(
    FAMILY, "gdn_ring_materialise", RingMaterialise, _materialised, check=checks.materialise,
    fake=lambda call: None, written=("state",), schema="gdn_ring_materialise_inplace",
)  # fmt: skip
