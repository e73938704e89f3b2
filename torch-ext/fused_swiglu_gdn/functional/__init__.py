"""The public functions: docstring, checks, operator."""
