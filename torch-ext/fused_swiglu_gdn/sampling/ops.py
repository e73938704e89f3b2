"""The choice of a token as an operation of decoding; not part of the API."""

from ..runtime.eager_operation import EagerOperation
from . import reference
from .call import Choose

CHOOSE = EagerOperation("sampling.choose", "choose_fwd", Choose, reference)
