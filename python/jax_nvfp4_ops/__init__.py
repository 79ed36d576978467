"""NVFP4 (block-scaled FP4) operations for JAX.

>>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
>>> q = nvfp4.quantize(jnp.linspace(-1, 1, 64).reshape(2, 32))
>>> q.shape, q.codes.dtype
((2, 32), dtype('uint8'))
"""

import sys

#: What importing the rest raised, where `python -m jax_nvfp4_ops doctor` is to explain it; elsewhere it is raised.
import_error: Exception | None = None
try:
    from jax_nvfp4_ops import recipes
    from jax_nvfp4_ops._native import instruction_sets, select_instruction_set
    from jax_nvfp4_ops.amax import amax
    from jax_nvfp4_ops.array import NVFP4Array
    from jax_nvfp4_ops.dot import (
        QuantizedWeight,
        dot_general,
        einsum,
        fake_quantize,
        matmul,
        quantize_weight,
    )
    from jax_nvfp4_ops.format import Format
    from jax_nvfp4_ops.quantize import quantize
    from jax_nvfp4_ops.recipes import Recipe
    from jax_nvfp4_ops.remat import RESIDUAL_NAMES, checkpoint_policy
except Exception as error:
    # Python imports a package before it runs it, and argv[0] is "-m" until then.
    if sys.argv[:1] != ["-m"] or __name__ not in sys.orig_argv:
        raise
    import_error = error

__version__ = "0.1.0"

__all__ = [
    "RESIDUAL_NAMES",
    "Format",
    "NVFP4Array",
    "QuantizedWeight",
    "Recipe",
    "amax",
    "checkpoint_policy",
    "dot_general",
    "einsum",
    "fake_quantize",
    "instruction_sets",
    "matmul",
    "quantize",
    "quantize_weight",
    "recipes",
    "select_instruction_set",
]
