"""A step of latent attention whose tokens attend by the kernel of latent.py."""

from typing import Callable, Optional

from ..call import LatentStep
from ..portable import latent_step
from .latent import form_of, takes


def prepare_latent_step(call: LatentStep) -> Optional[Callable]:
    """The function of portable/latent_step.py."""
    fits = takes(latent_step.attention_of(call))
    return latent_step.prepared(call, form_of) if fits else None
