"""Infrastructure under every operation: dispatch, launching, tuning, checks and verification."""
