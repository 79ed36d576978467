"""Floats to NVFP4."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_ops import _primitive, layout
from jax_nvfp4_ops._compat import ShapedArray
from jax_nvfp4_ops._sharding import Axes, Dim, Divider, Shards
from jax_nvfp4_ops.amax import amax_p, check_matrix, greatest
from jax_nvfp4_ops.array import NVFP4Array
from jax_nvfp4_ops.format import HADAMARD_SIGNS, Format

_TARGET = "nvfp4_quantize_v1"

# The factors by which rows and columns are divided over devices: whole tiles of scales, and finer parts. These are whole bytes of
# packed rows in the transpose too, which are filled to 32 codes.
_ROW, _COLUMN = ("row", "row_part"), ("column", "column_part")
_PART = 32


@dataclasses.dataclass(frozen=True)
class Output:
    """One result of the primitive.

    Args:
      format: How it is quantized.
      amax: Which value of the operand amax belongs to it.
      partner: Whether there is an operand that its global scale is multiplied with, so that the alpha of a GEMM results.
    """

    format: Format
    amax: int = 0
    partner: bool = False

    def flags(self) -> int:
        """The bits of the handler's attribute."""
        f = self.format
        return (
            1
            | (f.block == "16x16") << 1
            | (f.rounding == "sr") << 2
            | f.hadamard << 3
            | self.partner << 4
            | self.amax << 5
        )


def key_words(op: str, key: jax.Array) -> jax.Array:
    """The two words u32[2] of a `jax.random` key (typed, or a raw uint32 array) that Philox is keyed with."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"{op}: key must come from jax.random.key(seed); got {key!r}.")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim == 0:
            key = jax.random.key_data(key)
        else:
            raise ValueError(
                f"{op}: key must be one key; got an array of keys of shape {key.shape}. Take one, or use jax.vmap."
            )
    if key.dtype != jnp.uint32 or key.shape not in ((2,), (4,)):
        raise TypeError(
            f"{op}: key must come from jax.random.key(seed); got {key.dtype}{list(key.shape)}."
        )
    # The halves of a key of four words ("rbg") are often equal: they must not cancel.
    return key if key.shape == (2,) else key[:2] + 2 * key[2:]


def _pair(name: str, value: Any, kind: type, count: int) -> tuple[Any, ...]:
    if isinstance(value, kind):
        return (value,) * count
    if (
        isinstance(value, tuple | list)
        and len(value) == count
        and all(isinstance(v, kind) for v in value)
    ):
        return tuple(value)
    if count == 1:
        raise TypeError(f"quantize: {name} must be a {kind.__name__}; got {value!r}.")
    raise TypeError(
        f"quantize: {name} must be a {kind.__name__}, or {count} for {count} axes; got {value!r}."
    )


def quantize(
    x: jax.Array,
    *,
    axis: int | tuple[int, int] = -1,
    block: str | tuple[str, str] = "1x16",
    rounding: str | tuple[str, str] = "rne",
    hadamard: bool | tuple[bool, bool] = False,
    key: jax.Array | None = None,
    amax: jax.Array | tuple[jax.Array, jax.Array] | None = None,
) -> Any:
    """Quantizes a tensor to NVFP4.

    `x ~ E2M1 code * E4M3 block scale * global scale`, with a block of 16 elements along `axis`.

    Args:
      x: f32|bf16|f16[..., R, K], any sizes. All leading axes share one global scale.
      axis: -1 quantizes along K. -2 quantizes the transpose [..., K, R] along R. Both in one pass over x: (-1, -2).
      block: "1x16" or "16x16"; for two axes also a pair, as with the next two.
      rounding: "rne" (nearest even) or "sr" (stochastic).
      hadamard: Whether to apply the random Hadamard transform along the axis first.
      key: A `jax.random` key; needed for "sr", refused without it.
      amax: f32[]: the largest magnitude that the scales shall hold (after the transform, if there is one), where the
        caller has it already; greater magnitudes saturate. By default it is computed. If the caller's amax is finite
        but x has a NaN or Inf, that does not reach the result.

    Returns:
      An `NVFP4Array` of shape [..., R, K] (axis -1) or [..., K, R] (axis -2), or a pair of them, in the order of `axis`.

    Raises:
      TypeError: For another dtype, a key that is none, options of another type.
      ValueError: For fewer than two axes, unknown options, a missing or a needless key.

    Numerics: docs/numerics.md, bit by bit, on every platform.
    Derivative: none (an error); use `dot_general`, or `fake_quantize` for a straight-through estimate.
    Batching: as if each example were quantized by itself, with a global scale (and random bits) of its own.
    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.

    >>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> q = nvfp4.quantize(jnp.arange(32.0).reshape(1, 32))
    >>> q.codes.shape, q.linear_scales().shape
    ((1, 16), (1, 2))
    >>> q.dequantize(jnp.float32)[0, -4:].tolist()
    [31.0, 31.0, 31.0, 31.0]
    """
    x = jnp.asarray(x)
    check_matrix("quantize", x)
    axes = axis if isinstance(axis, tuple) else (axis,)
    normalized = tuple(a - x.ndim if isinstance(a, int) and a >= 0 else a for a in axes)
    if normalized not in ((-1,), (-2,), (-1, -2), (-2, -1)):
        raise ValueError(f"quantize: axis must be -1, -2 or both, (-1, -2); got {axis!r}.")
    options = zip(
        _pair("block", block, str, len(axes)),
        _pair("rounding", rounding, str, len(axes)),
        _pair("hadamard", hadamard, bool, len(axes)),
        strict=True,
    )
    formats = dict(zip(normalized, (Format(*o) for o in options), strict=True))
    stochastic = any(f.rounding == "sr" for f in formats.values())
    if stochastic and key is None:
        raise ValueError(
            "quantize: key must be given for rounding='sr'; got None. Pass key=jax.random.key(seed)."
        )
    if not stochastic and key is not None:
        raise ValueError(
            "quantize: key must be None for rounding='rne', which draws nothing; drop it, or use 'sr'."
        )
    words = None if key is None else key_words("quantize", key)
    values, which = None, {}
    if amax is not None:
        try:
            given = tuple(
                jnp.abs(jnp.asarray(a, jnp.float32))
                for a in (amax if isinstance(amax, tuple | list) else (amax,))
            )
        except (TypeError, ValueError):
            raise TypeError(f"quantize: amax must be a float32 scalar; got {amax!r}.") from None
        if len(given) not in (1, len(axes)) or any(a.shape != () for a in given):
            raise ValueError(
                f"quantize: amax must be a scalar, or {len(axes)} scalars for {len(axes)} axes; "
                f"got shapes {[a.shape for a in given]}."
            )
        values = jnp.stack(given)
        which = {a: min(i, len(given) - 1) for i, a in enumerate(normalized)}
    rows, columns = quantize_along(
        x, formats.get(-1), formats.get(-2), key=words, amax=values, which=which
    )
    results = tuple(rows if a == -1 else columns for a in normalized)
    return results if isinstance(axis, tuple) and len(axis) == 2 else results[0]


def quantize_along(
    x: jax.Array,
    rows: Format | None,
    columns: Format | None,
    *,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    which: Mapping[int, int] | None = None,
    partners: dict[int, jax.Array] | None = None,
    amax_axes: tuple[str, ...] = (),
    merged: int = 0,
) -> tuple[Any, Any]:
    """Quantizes x[..., R, K] along its last axis, the one before it, or both, in one call of the primitive.

    Args:
      x: f32|bf16|f16[..., R, K].
      rows: How along K (axis -1), or None.
      columns: How along R (axis -2), or None.
      key: u32[2], for stochastic rounding.
      amax: f32[values]; computed where None.
      which: By axis, which value of amax belongs to it.
      partners: f32[] by axis: a factor of that result's global scale.
      amax_axes: Manual axes over which a computed amax is taken.
      merged: The second result is of one matrix of all rows, in so many axes before R too, without a reshape that would move
        what is sharded: of x[*S, R, K] it is the transpose [K, *S, R], quantized along (*S, R). R is a multiple of 128.

    Returns:
      NVFP4Array[..., R, K] or None, NVFP4Array[..., K, R] or None.
    """
    formats = {axis: f for axis, f in ((-1, rows), (-2, columns)) if f is not None}
    partners = partners or {}
    if amax is None:
        source = {
            axis: (("rows" if axis == -1 else "columns") if f.hadamard else "plain")
            for axis, f in formats.items()
        }
        values = tuple(o for o in ("plain", "rows", "columns") if o in source.values())
        (amax,) = _primitive.bind(
            amax_p, jax.lax.stop_gradient(x), example_ndim=0, outputs=values, signs=HADAMARD_SIGNS
        )
        if amax_axes:
            try:
                amax = greatest(amax, amax_axes)
            except NameError as error:
                raise ValueError(
                    f"Recipe: amax_axes must name manual axes of a jax.shard_map around the call; got {amax_axes}: {error}"
                ) from None
        which = {axis: values.index(o) for axis, o in source.items()}
    which = which or {}
    operands = [amax]
    if any(f.rounding == "sr" for f in formats.values()):
        operands.append(key)
    operands += [partners[axis] for axis in formats if axis in partners]
    outputs = {axis: Output(f, which[axis], axis in partners) for axis, f in formats.items()}
    results = iter(
        _primitive.bind(
            quantize_p,
            x,
            *operands,
            rows=outputs.get(-1),
            columns=outputs.get(-2),
            signs=HADAMARD_SIGNS,
            merged=merged,
        )
    )

    def take(axis: int) -> NVFP4Array | None:
        if axis not in formats:
            return None
        f = formats[axis]
        return NVFP4Array(
            next(results),
            next(results),
            next(results),
            k=x.shape[axis],
            block=f.block,
            hadamard=f.hadamard,
            dtype=x.dtype,
        )

    return take(-1), take(-2)


def _shapes(
    shape: tuple[int, ...],
    example_ndim: int,
    rows: Output | None,
    columns: Output | None,
    merged: int,
) -> list[Any]:
    *lead, r, k = shape
    split = len(lead) - merged
    results = []
    for output, out_rows, out_k, between in (
        (rows, r, k, ()),
        (columns, k, r, tuple(lead[split:])),
    ):
        if output is not None:
            front = lead[: len(lead) - len(between)]
            codes, scales = (
                layout.codes_shape(out_rows, out_k),
                layout.scales_shape(out_rows, out_k),
            )
            results += [
                ((*front, codes[0], *between, *codes[1:]), jnp.uint8),
                ((*front, scales[0], *between, *scales[1:]), jnp.uint8),
                (shape[:example_ndim], jnp.float32),
            ]
    return results


def _abstract_eval(
    x: Any,
    amax: Any,
    *operands: Any,
    rows: Output | None,
    columns: Output | None,
    signs: int,
    merged: int,
    origin: bool = False,
) -> list[ShapedArray]:
    del operands, signs, origin
    return [ShapedArray(s, d) for s, d in _shapes(x.shape, amax.ndim - 1, rows, columns, merged)]


def _call(
    x: jax.Array,
    *operands: jax.Array,
    platform: str,
    rows: Output | None,
    columns: Output | None,
    signs: int,
    merged: int,
    origin: bool = False,
) -> Sequence[jax.Array]:
    del platform
    example_ndim = operands[0].ndim - 1
    shapes = _shapes(x.shape, example_ndim, rows, columns, merged)
    segment = x.shape[-2]
    if merged:
        front = x.shape[: x.ndim - 2 - merged]
        rows_of_all = math.prod(x.shape[len(front) : -1])
        x = x.reshape(*front, rows_of_all, x.shape[-1])
    results = [
        jax.ShapeDtypeStruct(s, d) for s, d in _shapes(x.shape, example_ndim, rows, columns, 0)
    ]
    called = jax.ffi.ffi_call(_TARGET, results)(
        x,
        *operands,
        rows=np.int64(rows.flags() if rows else 0),
        columns=np.int64(columns.flags() if columns else 0),
        signs=np.int64(signs),
        origin=np.int64((segment if merged else 1) if origin else 0),
    )
    return [y.reshape(shape) for y, (shape, _) in zip(called, shapes, strict=True)]


def _axes(
    divider: Divider,
    x: Any,
    amax: Any,
    *operands: Any,
    rows: Output | None,
    columns: Output | None,
    signs: int,
    merged: int,
) -> Axes:
    # A device's part has whole tiles of scales in each result; or it is finer, and the tiles are put together of several.
    del signs
    leading = divider.leading(x.shape[:-2])
    long, short = layout.TILE_ROWS, layout.TILE_COLUMNS
    row = divider.axis("row", x.shape[-2], long if rows else short, None if merged else _PART)
    column = divider.axis("column", x.shape[-1], long if columns else short, _PART)
    examples = leading[: amax.ndim - 1]
    results: list[tuple[Dim, ...]] = []
    split = len(leading) - merged
    r, k = x.shape[-2:]
    for output, (name, dim, size), (k_name, k_dim, k_size), between in (
        (rows, ("row", row, r), ("column", column, k), ()),
        (columns, ("column", column, k), ("row", row, r), leading[split:]),
    ):
        if output is None:
            continue
        front = leading[: len(leading) - len(between)]
        row_tiles, column_tiles, _ = layout.scales_shape(size, k_size)
        results += [
            (*front, dim, *between, k_dim if len(k_dim) > 1 else (f"{k_name}_packed",)),
            (
                *front,
                divider.tiles(name, row_tiles),
                *between,
                divider.tiles(k_name, column_tiles),
                ("tile",),
            ),
            examples,
        ]
    words = [("word",)] if len(operands) > 0 and operands[0].ndim == amax.ndim else []
    return Axes(
        operands=(
            (*leading, row, column),
            (*examples, ("value",)),
            *((*examples, dim) for dim in words),
            *(examples,) * (len(operands) - len(words)),
        ),
        results=tuple(results),
        sizes=divider.sizes,
    )


def _local(
    call: Callable[..., Any], shards: Shards, operands: Sequence[jax.Array], **params: Any
) -> Sequence[jax.Array]:
    x, amax, *rest = operands
    stochastic = any(
        o is not None and o.format.rounding == "sr" for o in (params["rows"], params["columns"])
    )
    batch = range(amax.ndim - 1, x.ndim - 2)
    origin = stochastic and bool(shards.axes((*_ROW, *_COLUMN, *(f"axis{i}" for i in batch))))
    if origin:
        rest.insert(1, _origin(shards, x.shape, batch))
    results = list(call(x, amax, *rest, origin=origin, **params))
    r, k = x.shape[-2:]
    merged = params["merged"]
    wanted = [
        (names, sizes, between)
        for output, names, sizes, between in (
            (params["rows"], (_ROW[1], _COLUMN[1]), (r, k), 0),
            (params["columns"], (_COLUMN[1], _ROW[1]), (k, r), merged),
        )
        if output is not None
    ]
    for i, (names, (rows, columns), between) in enumerate(wanted):
        if not shards.axes(names):
            continue
        tiles = results[3 * i + 1]
        axes = tiles.shape[tiles.ndim - 2 - between : -2]  # those merged with the tiles' columns
        linear = layout.scales_to_linear(
            tiles.reshape(
                *tiles.shape[: tiles.ndim - 2 - between],
                math.prod(axes) * tiles.shape[-2],
                tiles.shape[-1],
            ),
            rows,
            columns * math.prod(axes),
        )
        for axis, name in zip((linear.ndim - 2, linear.ndim - 1), names, strict=True):
            if over := shards.axes((name,)):
                linear = jax.lax.all_gather(linear, over, axis=axis, tiled=True)
        whole = layout.scales_from_linear(linear)
        columns_of_each = layout.scales_shape(rows, columns * shards.count(names[1]))[1]
        results[3 * i + 1] = whole.reshape(
            *whole.shape[:-2], *axes, columns_of_each, whole.shape[-1]
        )
    return results


def _origin(shards: Shards, shape: Sequence[int], batch: range) -> jax.Array:
    """u32[4 + matrices]: where a device's part of a tensor lies in it (csrc/ops/quantize.h), for its random bits."""
    r, k = shape[-2:]
    number, count = jnp.zeros((), jnp.uint32), 1
    for i in reversed(batch):
        name, size = f"axis{i}", shape[i]
        places = shards.index(name) * size + jnp.arange(size)
        number = number[None] + (places * count).astype(jnp.uint32).reshape(
            (size,) + (1,) * number.ndim
        )
        count *= size * shards.count(name)
    begin = jnp.array(
        [
            shards.index(*_ROW) * r,
            shards.index(*_COLUMN) * k,
            shards.count(*_ROW) * r,
            shards.count(*_COLUMN) * k,
        ],
        jnp.uint32,
    )
    return jnp.concatenate([begin, number.reshape(-1)])


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    # Every operand has the examples first; one that is not mapped is the same for each.
    operands = _primitive.batch_repeated(operands, axes)
    results = quantize_p.bind(*operands, **params)
    return results, (0,) * len(results)


quantize_p = _primitive.define(
    "nvfp4_quantize",
    call=_call,
    abstract_eval=_abstract_eval,
    batch=_batch,
    axes=_axes,
    local=_local,
    jvp=_primitive.refuse_derivative(
        "quantize",
        "use nvfp4.dot_general, which has a first derivative, nvfp4.fake_quantize, or jax.lax.stop_gradient(x)",
    ),
)
