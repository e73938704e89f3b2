"""The limit that every module of projection/ shares."""

MAX_TOKENS = 64  # that the kernels take
