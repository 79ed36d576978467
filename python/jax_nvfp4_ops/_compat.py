"""Every import from JAX that its compatibility policy does not cover, in one place."""

from typing import TYPE_CHECKING

import jax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:
    # jax.extend.core has it too, and loads Pallas with it: 100 ms of everyone's import.
    Primitive = type(jax.lax.add_p)

__all__ = ["Primitive", "ShapedArray", "ad", "apply_primitive", "batching", "mlir"]
