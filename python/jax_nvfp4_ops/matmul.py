"""The product of quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_ops import _cuda, _primitive, layout
from jax_nvfp4_ops._compat import ShapedArray
from jax_nvfp4_ops._sharding import Axes, Dim, Divider, Shards
from jax_nvfp4_ops.array import NVFP4Array

_TARGET = "nvfp4_matmul_v1"
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_out_dtype(op: str, dtype: Any, name: str = "out_dtype") -> Any:
    """The dtype of a result; raises unless it is one that a GEMM can write."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if not any(known == t for t in _FLOATS):
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16 or float16; got {known or repr(dtype)}."
        )
    return known


def matmul_quantized(
    a: NVFP4Array,
    b: NVFP4Array,
    *,
    out_dtype: Any,
    alphas: Sequence[jax.Array] | None = None,
    bias: jax.Array | None = None,
    accumulate: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    partial_sums: Any = jnp.float32,
    merged: int = 0,
) -> jax.Array:
    """`alpha a b^T (column_scale) (+ bias) (+ accumulate)`.

    Args:
      a: NVFP4[..., M, K].
      b: NVFP4[..., N, K].
      out_dtype: float32, bfloat16 or float16.
      alphas: f32, one or two factors of the product; by default the global scales of a and b.
      bias: float[N].
      accumulate: out_dtype[..., M, N]; if donated, the result takes its memory.
      column_scale: float[N], a factor of each column; the result is rounded once even so.
      partial_sums: float32 or bfloat16: where devices have parts of K, the type in which their sums are sent and added.
      merged: a and b are [M, *S, R] and [N, *S, R] with so many axes S, which are contracted too, as `quantize_along` makes them.

    Returns:
      out_dtype[..., M, N]; the leading axes of a and b are broadcast.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, NVFP4Array):
            raise TypeError(
                f"matmul: {name} must be an NVFP4Array; got {type(operand).__name__}. Use nvfp4.quantize."
            )
    if not merged:
        a.check("matmul")
        b.check("matmul")
    if a.k != b.k:
        raise ValueError(
            f"matmul: a and b must have the same last axis, K; got {a.shape} and {b.shape}. Quantized operands are "
            "[..., M, K] and [..., N, K]: quantize a matrix [K, N] with axis=-2."
        )
    if a.hadamard != b.hadamard:
        raise ValueError(
            f"matmul: a and b must both have the Hadamard transform or neither, as it cancels in the product; "
            f"got a.hadamard={a.hadamard}, b.hadamard={b.hadamard}."
        )
    dtype = check_out_dtype("matmul", out_dtype)
    m, n = a.shape[-2 - merged], b.shape[-2 - merged]
    try:
        batch = np.broadcast_shapes(a.shape[: -2 - merged], b.shape[: -2 - merged])
    except ValueError:
        raise ValueError(
            f"matmul: the leading axes of a and b must broadcast; got {a.shape} and {b.shape}."
        ) from None
    operands = []
    for x in (a, b):
        ndim = len(batch) + merged
        operands += [_with_axes(x.packed, ndim + 2), _with_axes(x.scales, ndim + 3)]
    if alphas is None:
        # A global scale has axes for the first of its array's leading axes.
        alphas = [
            _with_axes(x.global_scale, x.global_scale.ndim + len(batch) + 2 - x.ndim)
            for x in (a, b)
        ]
    operands += alphas
    if bias is not None:
        bias = _one_for_each_column("bias", bias, n)
        operands.append(bias)
    if accumulate is not None:
        accumulate = jnp.asarray(accumulate)
        if accumulate.shape != (*batch, m, n) or accumulate.dtype != dtype:
            raise ValueError(
                f"matmul: accumulate must be {dtype}{[*batch, m, n]}, like the result; "
                f"got {accumulate.dtype}{list(accumulate.shape)}."
            )
        operands.append(accumulate)
    if column_scale is not None:
        column_scale = _one_for_each_column("column_scale", column_scale, n)
        (y,) = _primitive.bind(
            matmul_p,
            *operands[: 4 + len(alphas)],
            alphas=len(alphas),
            bias=False,
            accumulate=False,
            out_dtype=jnp.dtype(jnp.float32),
            partial_sums=jnp.dtype(partial_sums),
            merged=merged,
        )
        y = y * column_scale.astype(jnp.float32)
        for term in (bias, accumulate):
            if term is not None:
                y = y + term.astype(jnp.float32)
        return y.astype(dtype)
    (y,) = _primitive.bind(
        matmul_p,
        *operands,
        alphas=len(alphas),
        bias=bias is not None,
        accumulate=accumulate is not None,
        out_dtype=dtype,
        partial_sums=jnp.dtype(partial_sums),
        merged=merged,
    )
    return y


def _one_for_each_column(name: str, value: Any, n: int) -> jax.Array:
    expected = f"matmul: {name} must be float32, bfloat16 or float16 of shape ({n},), one for each row of b; "
    try:
        array = jnp.asarray(value)
    except TypeError:
        raise TypeError(f"{expected}got {value!r}.") from None
    if array.shape != (n,) or not any(array.dtype == t for t in _FLOATS):
        raise ValueError(f"{expected}got {array.dtype}{list(array.shape)}.")
    return array


def _with_axes(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


# The operands behind codes and scales, in order: alphas, bias, accumulate. Leading axes of each are the product's, or 1 where
# the operand is repeated; it may lack the last ones (alpha) or all (bias).


def _batch_shape(
    operands: Sequence[Any], *, alphas: int, bias: bool, accumulate: bool, merged: int
) -> tuple[int, ...]:
    trailing = [2 + merged, 3 + merged] * 2 + [0] * alphas + [1] * bias + [2] * accumulate
    leading = [x.shape[: x.ndim - t] for x, t in zip(operands, trailing, strict=True)]
    rank = len(leading[0])
    return np.broadcast_shapes(*(s + (1,) * (rank - len(s)) for s in leading))


def _abstract_eval(
    *operands: Any,
    alphas: int,
    bias: bool,
    accumulate: bool,
    out_dtype: Any,
    partial_sums: Any = None,
    merged: int = 0,
) -> list[ShapedArray]:
    del partial_sums
    batch = _batch_shape(operands, alphas=alphas, bias=bias, accumulate=accumulate, merged=merged)
    m, n = (x.shape[-2 - merged] for x in (operands[0], operands[2]))
    return [ShapedArray((*batch, m, n), out_dtype)]


def _call(
    *operands: jax.Array,
    platform: str,
    alphas: int,
    bias: bool,
    accumulate: bool,
    out_dtype: Any,
) -> Sequence[jax.Array]:
    (y,) = _abstract_eval(
        *operands, alphas=alphas, bias=bias, accumulate=accumulate, out_dtype=out_dtype
    )
    workspace = 0
    if platform == "cuda":
        m, n = y.shape[-2:]
        workspace = _cuda.workspace_size(m, n, operands[0].shape[-1])
        operands, alphas = _with_one_alpha(operands, alphas)
    # XLA shares the workspace between calls.
    results = [
        jax.ShapeDtypeStruct(y.shape, out_dtype),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call(
        _TARGET, results, input_output_aliases={len(operands) - 1: 0} if accumulate else None
    )
    return call(*operands, alphas=np.int64(alphas), bias=bias, accumulate=accumulate)[:1]


def _axes(
    divider: Divider,
    *operands: Any,
    alphas: int,
    bias: bool,
    accumulate: bool,
    out_dtype: Any,
    partial_sums: Any,
    merged: int,
) -> Axes:
    del out_dtype, partial_sums
    batch = _batch_shape(operands, alphas=alphas, bias=bias, accumulate=accumulate, merged=merged)
    a_codes, a_scales, b_codes, b_scales, *_ = operands
    leading = divider.leading(batch)
    m = divider.axis("m", a_codes.shape[-2 - merged], layout.TILE_ROWS)
    n = divider.axis("n", b_codes.shape[-2 - merged], layout.TILE_ROWS)
    between = tuple(
        divider.axis(f"k{i}", size, 1) for i, size in enumerate(a_codes.shape[-1 - merged : -1])
    )
    k = divider.axis("k", a_codes.shape[-1], layout.TILE_COLUMNS // 2)
    trailing: list[tuple[Dim, ...]] = []
    for name, dim, scales in (("m", m, a_scales), ("n", n, b_scales)):
        trailing.append((dim, *between, k))
        trailing.append(
            (
                divider.tiles(name, scales.shape[-3 - merged]),
                *between,
                divider.tiles("k", scales.shape[-2]),
                ("tile",),
            )
        )
    trailing += [()] * alphas + [(n,)] * bias + [(m, n)] * accumulate
    return Axes(
        operands=tuple(
            (
                *(
                    # Of size 1 where it is repeated.
                    dim if size == whole else ()
                    for dim, size, whole in zip(leading, x.shape[: x.ndim - len(t)], batch)  # noqa: B905
                ),
                *t,
            )
            for x, t in zip(operands, trailing, strict=True)
        ),
        results=((*leading, m, n),),
        sizes=divider.sizes,
        reduced=_contracted(merged),
        sums=True,
    )


def _contracted(merged: int) -> tuple[str, ...]:
    """The factors of what is contracted."""
    return (*(f"k{i}" for i in range(merged)), "k")


def _local(
    call: Callable[..., Any],
    shards: Shards,
    operands: Sequence[jax.Array],
    *,
    alphas: int,
    bias: bool,
    accumulate: bool,
    out_dtype: Any,
    partial_sums: Any,
    merged: int,
) -> Sequence[jax.Array]:
    if merged:
        codes_and_scales = [
            x.reshape(
                *x.shape[: x.ndim - t - merged],
                math.prod(x.shape[x.ndim - t - merged : x.ndim - t + 1]),
                *x.shape[x.ndim - t + 1 :],
            )
            for x, t in zip(operands[:4], (1, 2, 1, 2), strict=True)
        ]
        operands = [*codes_and_scales, *operands[4:]]
    if not shards.axes(_contracted(merged)):
        return _with_more_rows(
            call, operands, alphas=alphas, bias=bias, accumulate=accumulate, out_dtype=out_dtype
        )
    # Each device has a part of K: bias and accumulate are added to the sum of the parts.
    factors, rest = operands[: 4 + alphas], list(operands[4 + alphas :])
    (y,) = _with_more_rows(
        call, factors, alphas=alphas, bias=False, accumulate=False, out_dtype=partial_sums
    )
    y = shards.sum(y, *_contracted(merged)).astype(jnp.float32)
    if bias:
        b = rest.pop(0).astype(jnp.float32)
        y = y + b.reshape(b.shape[:-1] + (1,) * (y.ndim - b.ndim) + b.shape[-1:])
    if accumulate:
        y = y + rest.pop(0).astype(jnp.float32)
    return [y.astype(out_dtype)]


def _with_more_rows(
    call: Callable[..., Any], operands: Sequence[jax.Array], **params: Any
) -> Sequence[jax.Array]:
    """The call, with one product instead of a batch where only the rows of a differ: they lie one below the other."""
    a_codes, a_scales, *rest = operands
    batch, m = a_codes.shape[:-2], a_codes.shape[-2]
    others = rest[: len(rest) - params["accumulate"]]
    trailing = (2, 3, *(0,) * params["alphas"], *(1,) * params["bias"])
    repeated = all(
        math.prod(x.shape[: x.ndim - t]) == 1 for x, t in zip(others, trailing, strict=True)
    )
    if not repeated or m % layout.TILE_ROWS or math.prod(batch) <= 1:
        return list(call(*operands, **params))
    one, count = (1,) * len(batch), math.prod(batch)
    a_codes = a_codes.reshape(*one, count * m, a_codes.shape[-1])
    a_scales = a_scales.reshape(*one, count * a_scales.shape[-3], *a_scales.shape[-2:])
    accumulated = [x.reshape(*one, count * m, x.shape[-1]) for x in rest[len(others) :]]
    (y,) = call(a_codes, a_scales, *others, *accumulated, **params)
    return [y.reshape(*batch, m, y.shape[-1])]


def _with_one_alpha(
    operands: tuple[jax.Array, ...], alphas: int
) -> tuple[tuple[jax.Array, ...], int]:
    """The same operands with the product of two alphas in their place: cuBLASLt reads one, from the device."""
    if alphas == 1:
        return operands, 1
    first, second = operands[4:6]
    rank = max(first.ndim, second.ndim)
    first, second = (x.reshape(x.shape + (1,) * (rank - x.ndim)) for x in (first, second))
    return (*operands[:4], first * second, *operands[6:]), 1


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    # An operand that is not mapped is repeated by the kernel, not in memory; only accumulate, which is
    # overwritten, has to be whole.
    operands, size = _primitive.batch_to_front(operands, axes)
    operands = [x[None] if a is None else x for x, a in zip(operands, axes, strict=True)]
    if params["accumulate"]:
        operands[-1] = jnp.broadcast_to(operands[-1], (size, *operands[-1].shape[1:]))
    return matmul_p.bind(*operands, **params), (0,)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    # y = alpha u + bias + accumulate: linear in each of them; codes and block scales have no derivative.
    (y,) = matmul_p.bind(*primals, **params)
    alphas, dtype = params["alphas"], params["out_dtype"]
    dy = None
    for i in range(4, len(primals)):
        if not _primitive.is_nonzero(tangents[i]):
            continue
        dx = tangents[i]
        if i < 4 + alphas:
            others = [jnp.ones_like(p) if j == i else p for j, p in enumerate(primals)][
                : 4 + alphas
            ]
            (unit,) = matmul_p.bind(
                *others,
                alphas=alphas,
                bias=False,
                accumulate=False,
                out_dtype=dtype,
                partial_sums=params["partial_sums"],
                merged=params["merged"],
            )
            term = unit * dx.reshape(dx.shape + (1,) * (y.ndim - dx.ndim))
        elif params["bias"] and i == 4 + alphas:
            # The axes that bias lacks are leading ones; rows are repeated.
            term = dx.reshape(dx.shape[:-1] + (1,) * (y.ndim - dx.ndim) + dx.shape[-1:])
        else:
            term = dx
        term = jnp.broadcast_to(term, y.shape).astype(dtype)
        dy = term if dy is None else dy + term
    return [y], [_primitive.zero_tangent(y) if dy is None else dy]


matmul_p = _primitive.define(
    "nvfp4_matmul",
    call=_call,
    abstract_eval=_abstract_eval,
    batch=_batch,
    jvp=_jvp,
    axes=_axes,
    local=_local,
)
