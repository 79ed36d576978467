"""The largest magnitude of a tensor, and of its Hadamard transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_ops import _primitive
from jax_nvfp4_ops._compat import ShapedArray
from jax_nvfp4_ops._sharding import Axes, Divider, Shards
from jax_nvfp4_ops.format import HADAMARD_SIGNS, check_choice
from jax_nvfp4_ops.layout import BLOCK

_TARGET = "nvfp4_amax_v1"
# The values that can be asked for, and the bits that stand for them in the handler's attribute.
_OUTPUTS = {"plain": 1, "rows": 2, "columns": 4}

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_matrix(op: str, x: jax.Array) -> None:
    """Raises unless x is f32|bf16|f16[..., R, K]."""
    if not any(x.dtype == t for t in _FLOATS):
        raise TypeError(
            f"{op}: x must be float32, bfloat16 or float16; got {x.dtype}. Cast it with x.astype(jnp.float32)."
        )
    if x.ndim < 2:
        raise ValueError(
            f"{op}: x must have two axes or more, [..., R, K]; got shape {x.shape}. Add one with x.reshape(1, -1)."
        )


def amax(x: jax.Array, outputs: Sequence[str] = ("plain",)) -> tuple[jax.Array, ...]:
    """The largest magnitudes of a tensor, those wanted, in one op.

    `max |x|`, or the same after the random Hadamard transform along K or along R. `quantize` computes what it needs
    by itself; this is for who wants to keep an amax, or to share one.

    Args:
      x: f32|bf16|f16[..., R, K].
      outputs: Of "plain", "rows" (after the transform along K) and "columns" (along R).

    Returns:
      f32[] for each of `outputs`, in that order. 0 for an empty tensor; NaN or Inf if x has a NaN or Inf.

    Raises:
      TypeError: For another dtype.
      ValueError: For fewer than two axes, or an unknown output.

    Numerics: exact; the transform as docs/numerics.md has it.
    Derivative: none (an error). Batching: one value for each example.

    >>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> [float(a) for a in nvfp4.amax(jnp.full((16, 16), -3.0), ("plain", "rows"))]
    [3.0, 6.0]
    """
    x = jnp.asarray(x)
    check_matrix("amax", x)
    wanted = tuple(outputs)
    if not wanted:
        raise ValueError(
            "amax: outputs must name at least one of 'plain', 'rows', 'columns'; got none."
        )
    for output in wanted:
        check_choice("amax", "outputs", output, tuple(_OUTPUTS))
    distinct = tuple(o for o in _OUTPUTS if o in wanted)
    (values,) = _primitive.bind(amax_p, x, example_ndim=0, outputs=distinct, signs=HADAMARD_SIGNS)
    return tuple(values[distinct.index(o)] for o in wanted)


def _abstract_eval(
    x: Any, *, example_ndim: int, outputs: tuple[str, ...], signs: int
) -> list[ShapedArray]:
    del signs
    return [ShapedArray((*x.shape[:example_ndim], len(outputs)), jnp.float32)]


def _call(
    x: jax.Array, *, platform: str, example_ndim: int, outputs: tuple[str, ...], signs: int
) -> Sequence[jax.Array]:
    del platform
    result = jax.ShapeDtypeStruct((*x.shape[:example_ndim], len(outputs)), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, [result])(
        x,
        example_ndim=np.int64(example_ndim),
        outputs=np.int64(sum(_OUTPUTS[o] for o in outputs)),
        signs=np.int64(signs),
    )


def _axes(
    divider: Divider, x: Any, *, example_ndim: int, outputs: tuple[str, ...], signs: int
) -> Axes:
    # The transform's blocks of 16 are not divided.
    del signs
    leading = divider.leading(x.shape[:-2])
    rows = divider.axis("row", x.shape[-2], BLOCK if "columns" in outputs else 1)
    columns = divider.axis("column", x.shape[-1], BLOCK if "rows" in outputs else 1)
    return Axes(
        operands=((*leading, rows, columns),),
        results=((*leading[:example_ndim], ("value",)),),
        sizes=divider.sizes,
        reduced=(*(d[0] for d in leading[example_ndim:]), "row", "column"),
    )


def _local(
    call: Callable[..., Any],
    shards: Shards,
    operands: Sequence[jax.Array],
    *,
    example_ndim: int,
    **params: Any,
) -> Sequence[jax.Array]:
    (largest,) = call(*operands, example_ndim=example_ndim, **params)
    (x,) = operands
    leading = [f"axis{i}" for i in range(example_ndim, x.ndim - 2)]
    if over := shards.axes((*leading, "row", "column")):
        largest = greatest(largest, over)
    return [largest]


def greatest(magnitudes: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The greatest f32 magnitudes over mesh axes."""
    # As integers they have the same order, and a NaN is the greatest: some collectives lose it.
    bits = jax.lax.pmax(jax.lax.bitcast_convert_type(magnitudes, jnp.int32), axes)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, example_ndim: int, **params: Any
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    (x,), _ = _primitive.batch_to_front(operands, axes)
    return amax_p.bind(x, example_ndim=example_ndim + 1, **params), (0,)


amax_p = _primitive.define(
    "nvfp4_amax",
    call=_call,
    abstract_eval=_abstract_eval,
    batch=_batch,
    axes=_axes,
    local=_local,
    jvp=_primitive.refuse_derivative("amax", "wrap x in jax.lax.stop_gradient"),
)
