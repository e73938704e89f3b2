"""Decoding with a ring as operations. Forward only."""

from torch import Tensor

from ..runtime.dtypes import at_least_fp32
from ..runtime.operation import Operation
from . import checks_replay as checks
from .call import ReplayCall, RingAdvance, RingMaterialise
from .ops_train import cast
from .reference import replay as reference

FAMILY = "gdn.replay"


def _states(call: RingMaterialise) -> Tensor:
    state = call.state
    return at_least_fp32(state).new_empty(call.cursor.shape[0], *state.shape[1:])


REPLAY = Operation(
    FAMILY, "gdn_replay_fwd", ReplayCall, reference.gdn_replay_fwd, check=checks.replay, cast=cast,
    fake=lambda call: None if call.out is not None else call.v.new_empty(call.v.shape),
    written=("initial_state", "ring_k", "ring_u", "ring_g", "out"),
)  # fmt: skip
ADVANCE = Operation(
    FAMILY, "gdn_ring_advance", RingAdvance, reference.gdn_ring_advance, check=checks.advance,
    outputs=0, written=("cursor",),
)  # fmt: skip
_STATES = (FAMILY, "gdn_ring_materialise", RingMaterialise, reference.gdn_ring_materialise)
MATERIALISE = Operation(*_STATES, check=checks.materialise, fake=_states)
MATERIALISE_IN_PLACE = Operation(
    *_STATES, check=checks.materialise, fake=lambda call: None, written=("state",),
    schema="gdn_ring_materialise_inplace",
)  # fmt: skip
