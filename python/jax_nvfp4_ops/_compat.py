"""Every import from JAX that its compatibility policy does not cover, in one place."""

from typing import TYPE_CHECKING, Any

import jax
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext, parse_flatten_op_sharding
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

if TYPE_CHECKING:
    from jax.extend.core import Primitive
else:
    # jax.extend.core has it too, and loads Pallas with it: 100 ms of everyone's import.
    Primitive = type(jax.lax.add_p)


def needs_devices(primitive: Primitive) -> None:
    """Says that what a primitive is lowered to depends on the devices."""
    prim_requires_devices_during_lowering.add(primitive)


def partitioning_devices(ctx: Any) -> int:
    """The number of devices over which XLA divides what is lowered, if it does, and may be told how; else 0.

    It can not be told inside of a shard_map that is manual over some axes only.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, SPMDAxisContext):
        return 0 if context.manual_axes else int(context.mesh.size)
    if isinstance(context, ShardingContext) and context.num_devices > 1:
        return int(context.num_devices)
    return 0


def no_abstract_mesh() -> Any:
    """A context in which arrays have no shardings in their types."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


__all__ = [
    "ArrayMapping",
    "CompoundFactor",
    "Primitive",
    "SdyShardingRule",
    "ShapedArray",
    "ad",
    "apply_primitive",
    "batching",
    "custom_partitioning",
    "mlir",
    "needs_devices",
    "no_abstract_mesh",
    "parse_flatten_op_sharding",
    "partitioning_devices",
]
