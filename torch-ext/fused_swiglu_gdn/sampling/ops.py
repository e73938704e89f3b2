"""The choice of a token as an operation of decoding; not part of the API."""

from ..fp8.ops import EagerOperation
from . import reference
from .call import Choose

CHOOSE = EagerOperation("sampling.choose", "choose_fwd", Choose, reference)
