"""What every part of a product of few tokens goes by."""

MAX_TOKENS = 64  # that the kernels take
