"""NVFP4 to floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_nvfp4_ops import _primitive, layout
from jax_nvfp4_ops._compat import ShapedArray
from jax_nvfp4_ops._sharding import Axes, Divider, Shards

_TARGET = "nvfp4_dequantize_v1"


def _abstract_eval(
    codes: Any, scales: Any, global_scale: Any, *, k: int, dtype: Any
) -> list[ShapedArray]:
    del scales, global_scale
    return [ShapedArray((*codes.shape[:-1], k), dtype)]


def _call(
    codes: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array,
    *,
    platform: str,
    k: int,
    dtype: Any,
) -> Sequence[jax.Array]:
    del platform
    result = jax.ShapeDtypeStruct((*codes.shape[:-1], k), dtype)
    return jax.ffi.ffi_call(_TARGET, [result])(codes, scales, global_scale)


def _axes(
    divider: Divider, codes: Any, scales: Any, global_scale: Any, *, k: int, dtype: Any
) -> Axes:
    del dtype
    leading = divider.leading(codes.shape[:-2])
    rows = divider.axis("row", codes.shape[-2], layout.TILE_ROWS)
    columns = divider.axis("column", k, layout.TILE_COLUMNS)
    packed = columns if "column" in divider.sizes else ("packed",)
    return Axes(
        operands=(
            (*leading, rows, packed),
            (
                *leading,
                divider.tiles("row", scales.shape[-3]),
                divider.tiles("column", scales.shape[-2]),
                ("tile",),
            ),
            leading[: global_scale.ndim],
        ),
        results=((*leading, rows, columns),),
        sizes=divider.sizes,
    )


def _local(
    call: Callable[..., Any],
    shards: Shards,
    operands: Sequence[jax.Array],
    *,
    k: int,
    dtype: Any,
) -> Sequence[jax.Array]:
    return list(call(*operands, k=k // shards.count("column"), dtype=dtype))


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    operands = _primitive.batch_repeated(operands, axes)
    return dequantize_p.bind(*operands, **params), (0,)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    # x = u * global_scale, linear in the global scale; codes and block scales have no derivative.
    codes, scales, global_scale = primals
    results = dequantize_p.bind(*primals, **params)
    if not _primitive.is_nonzero(tangents[2]):
        return results, [_primitive.zero_tangent(results[0])]
    (unit,) = dequantize_p.bind(codes, scales, jnp.ones_like(global_scale), **params)
    factor = tangents[2].reshape(global_scale.shape + (1,) * (unit.ndim - global_scale.ndim))
    return results, [(unit * factor).astype(params["dtype"])]


dequantize_p = _primitive.define(
    "nvfp4_dequantize",
    call=_call,
    abstract_eval=_abstract_eval,
    batch=_batch,
    jvp=_jvp,
    axes=_axes,
    local=_local,
)
