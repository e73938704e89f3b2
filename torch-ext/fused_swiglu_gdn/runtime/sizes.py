"""Sizes of grids and tiles in plain Python. Triton's functions of these names are for kernels; each
call of one from the host takes some microseconds."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
