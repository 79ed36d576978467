"""Every import from JAX that its compatibility policy does not cover, in one place."""

from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

__all__ = ["Primitive", "ShapedArray", "ad", "apply_primitive", "batching", "mlir"]
