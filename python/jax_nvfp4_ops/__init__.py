"""NVFP4 (block-scaled FP4) operations for JAX.

>>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
>>> q = nvfp4.quantize(jnp.linspace(-1, 1, 64).reshape(2, 32))
>>> q.shape, q.codes.dtype
((2, 32), dtype('uint8'))
"""

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
