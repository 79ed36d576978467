"""Compiles JAX programs for a B200 without one, and counts what would run on it."""
