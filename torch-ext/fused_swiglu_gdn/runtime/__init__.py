"""What every operation stands on: choice of a kernel, launching, tuning, checks, verification."""
