"""Differentiable products that compute on quantized operands: dot_general, einsum, matmul."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_nvfp4_ops import _sharding
from jax_nvfp4_ops.amax import _FLOATS
from jax_nvfp4_ops.array import NVFP4Array
from jax_nvfp4_ops.format import Format
from jax_nvfp4_ops.layout import TILE_ROWS
from jax_nvfp4_ops.matmul import check_out_dtype, matmul_quantized
from jax_nvfp4_ops.quantize import key_words, quantize_along
from jax_nvfp4_ops.recipes import NVIDIA, Recipe
from jax_nvfp4_ops.remat import named

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is quantized once and used in many products. `quantize_weight` makes it.

    Attributes:
      fprop: NVFP4[..., N, K], quantized along the axes that the forward product contracts.
      dgrad: NVFP4[..., K, N], quantized along the others, for the gradient of x; None if it is not needed.
      shape: Of the array that was quantized.
      contracting: Its axes that the product contracts, and `batch` those that it maps over.
    """

    fprop: NVFP4Array
    dgrad: NVFP4Array | None
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    contracting: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    batch: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes of the array that was quantized."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Of the array that was quantized."""
        return self.fprop.dtype


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an operand of any rank is seen as matrices [*batch, rows, columns], or [*rows, columns].

    Attributes:
      permutation: Of the operand's axes, to batch, then free and contracting ones.
      shape: Of its matrices.
      contracting_last: Whether a row is contracted, else a column.
    """

    permutation: tuple[int, ...]
    shape: tuple[int, ...]
    contracting_last: bool

    def matrices(self, x: jax.Array) -> jax.Array:
        """The operand as matrices."""
        return x.transpose(self.permutation).reshape(self.shape)

    def restore(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The array of the given shape that `matrices` was made of."""
        permuted = tuple(shape[a] for a in self.permutation)
        inverse = tuple(int(a) for a in np.argsort(self.permutation))
        return matrices.reshape(permuted).transpose(inverse)


def _layout(
    shape: tuple[int, ...],
    contracting: tuple[int, ...],
    batch: tuple[int, ...],
    rows_apart: bool = False,
) -> _Layout:
    free = tuple(a for a in range(len(shape)) if a not in contracting and a not in batch)
    # Contracting axes go first if that moves nothing: quantize reads a matrix along both axes alike.
    first = (*batch, *contracting, *free) == tuple(range(len(shape)))
    last = (*batch, *free, *contracting) == tuple(range(len(shape)))
    groups = (free, contracting) if last or not first else (contracting, free)
    sizes = tuple(math.prod(shape[a] for a in group) for group in groups)
    if rows_apart and last and not batch and len(free) > 1 and shape[free[-1]] % TILE_ROWS == 0:
        # Whole tiles: a mesh may divide each axis of the rows, which merged in memory it could not.
        sizes = (*(shape[a] for a in free), sizes[1])
    return _Layout(
        (*batch, *groups[0], *groups[1]), (*(shape[a] for a in batch), *sizes), last or not first
    )


@dataclasses.dataclass(frozen=True)
class _Config:
    """What is static about a linear product of matrices."""

    recipe: Recipe
    x_last: bool  # x is [..., M, K], else [..., K, M]
    w_last: bool  # w is [..., N, K], else [..., K, N]
    x_dtype: Any
    w_dtype: Any
    out_dtype: Any
    merged: int  # so many axes before the last two of x are rows of the one matrix
    # Of the matrices, where shardings are part of types: their gradients have the same.
    x_sharding: Any
    w_sharding: Any  # None: there is no w but a quantized one, and no gradient for it


def _quantize(
    x: jax.Array,
    contracting_last: bool,
    contracting: Format | None,
    free: Format | None,
    **options: Any,
) -> tuple[Any, Any]:
    """x quantized along its contracting and along its free axis, in one pass."""
    if contracting_last:
        return quantize_along(x, contracting, free, **options)
    rows, columns = quantize_along(x, free, contracting, **options)
    return columns, rows


def _operand_key(key: jax.Array | None, number: int, *formats: Format | None) -> jax.Array | None:
    """The key of operand `number`; None where no format draws. The gradient, 0, takes the caller's key as it is."""
    if all(f is None or f.rounding == "rne" for f in formats):
        return None
    if key is None or number == 0:
        return key
    typed = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(typed, number))


def _quantize_x(x: jax.Array, key: Any, c: _Config, backward: bool) -> tuple[Any, Any]:
    free = c.recipe.x_wgrad if backward else None
    return _quantize(
        x,
        c.x_last,
        c.recipe.x_fprop,
        free,
        key=_operand_key(key, 1, c.recipe.x_fprop, free),
        amax_axes=c.recipe.amax_axes,
        merged=c.merged,
    )


def _quantize_w(w: Any, quantized: Any, key: Any, c: _Config, backward: bool) -> tuple[Any, Any]:
    if quantized is not None:
        return quantized.fprop, quantized.dgrad
    free = c.recipe.w_dgrad if backward else None
    return _quantize(
        w,
        c.w_last,
        c.recipe.w_fprop,
        free,
        key=_operand_key(key, 2, c.recipe.w_fprop, free),
        amax_axes=c.recipe.amax_axes,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear(x: jax.Array, w: Any, quantized: Any, key: Any, c: _Config) -> jax.Array:
    """y[..., M, N] of matrices x and w in the layouts of the config.

    `quantized` is a QuantizedWeight of w, or None; without w there is no gradient for it.
    """
    return matmul_quantized(
        _quantize_x(x, key, c, backward=False)[0],
        _quantize_w(w, quantized, key, c, backward=False)[0],
        out_dtype=c.out_dtype,
        partial_sums=c.recipe.partial_sums,
    )


def _linear_fwd(
    x: jax.Array, w: Any, quantized: Any, key: Any, c: _Config
) -> tuple[jax.Array, Any]:
    recipe = c.recipe
    if recipe.needs_key and key is None:
        raise ValueError(
            f"dot_general: key must be given to differentiate with recipe {recipe}, which rounds stochastically; got None. "
            "Pass key=jax.random.key(seed), a fresh one for each step and layer."
        )
    nvfp4 = recipe.backward == "nvfp4"
    x_fprop, x_wgrad = _quantize_x(x, key, c, backward=nvfp4)
    w_fprop, w_dgrad = _quantize_w(w, quantized, key, c, backward=nvfp4)
    if nvfp4 and w_dgrad is None:
        raise ValueError(
            "dot_general: w must be quantized for the backward pass too, to differentiate x; make it with "
            "quantize_weight(w, ..., backward=True), or pass the array itself."
        )
    y = matmul_quantized(x_fprop, w_fprop, out_dtype=c.out_dtype, partial_sums=recipe.partial_sums)
    y = named(y, "nvfp4_y")
    kept = (
        (named(x_wgrad, "nvfp4_x"), named(w_dgrad, "nvfp4_w"))
        if nvfp4
        else (named(x_fprop, "nvfp4_x"), named(w_fprop, "nvfp4_w"))
    )
    return y, (*kept, quantized, key)


def _linear_bwd(c: _Config, residuals: Any, g: jax.Array) -> tuple[Any, Any, Any, Any]:
    x, w, quantized, key = residuals
    backward = _backward_nvfp4 if c.recipe.backward == "nvfp4" else _backward_bf16
    dx, dw = backward(c, x, w, key, g, c.w_sharding is not None)
    dx = _sharding.like(dx, c.x_sharding)
    dw = dw if dw is None else _sharding.like(dw, c.w_sharding)
    dkey = None if key is None else np.zeros(key.shape, jax.dtypes.float0)
    return dx, dw, jax.tree.map(_zero_cotangent, quantized), dkey


def _zero_cotangent(leaf: jax.Array) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _backward_nvfp4(
    c: _Config, x: NVFP4Array, w: NVFP4Array, key: Any, g: jax.Array, with_dw: bool
) -> tuple[jax.Array, jax.Array | None]:
    # x is [..., K, M] and w is [..., K, N] here, quantized along M and N. quantize(g) makes the alphas of both products.
    recipe = c.recipe
    wgrad = recipe.g_wgrad if with_dw else None
    g_rows, g_columns = quantize_along(
        g,
        recipe.g_dgrad,
        wgrad,
        key=_operand_key(key, 0, recipe.g_dgrad, wgrad),
        partners={-1: w.global_scale, -2: x.global_scale} if with_dw else {-1: w.global_scale},
        amax_axes=recipe.amax_axes,
        merged=c.merged,
    )
    product = functools.partial(matmul_quantized, partial_sums=recipe.partial_sums)
    dgrad = (g_rows, w) if c.x_last else (w, g_rows)
    dx = product(*dgrad, out_dtype=c.x_dtype, alphas=[g_rows.global_scale])
    if not with_dw:
        return dx, None
    operands = (g_columns, x) if c.w_last else (x, g_columns)
    return dx, product(
        *operands, merged=c.merged, out_dtype=c.w_dtype, alphas=[g_columns.global_scale]
    )


def _backward_bf16(
    c: _Config, x: NVFP4Array, w: NVFP4Array, key: Any, g: jax.Array, with_dw: bool
) -> tuple[jax.Array, jax.Array | None]:
    # x is [..., M, K] and w is [..., N, K] here, quantized along K.
    del key
    shape, rows = g.shape, math.prod(g.shape[g.ndim - 2 - c.merged : -1])
    g = g.astype(jnp.bfloat16).reshape(*shape[: g.ndim - 2 - c.merged], rows, shape[-1])
    batch = tuple(range(g.ndim - 2))
    m, n = g.ndim - 2, g.ndim - 1

    def product(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int, dtype: Any) -> jax.Array:
        dot = functools.partial(
            lax.dot_general,
            dimension_numbers=(((a_axis,), (b_axis,)), (batch, batch)),
            preferred_element_type=jnp.float32,
        )
        # XLA's CPU backend refuses some batched products of bfloat16: there as float32, which is the same sum.
        in_float32 = lambda a, b: dot(a.astype(jnp.float32), b.astype(jnp.float32))  # noqa: E731
        return lax.platform_dependent(a, b, cpu=in_float32, default=dot).astype(dtype)

    w16 = w.dequantize(jnp.bfloat16)
    dx = product(g, n, w16, m, c.x_dtype) if c.x_last else product(w16, m, g, n, c.x_dtype)
    if c.merged:
        dx = dx.reshape(*shape[:-1], dx.shape[-1])
    if not with_dw:
        return dx, None
    x16 = x.dequantize(jnp.bfloat16)
    x16 = x16.reshape(*g.shape[:-1], x16.shape[-1]) if c.merged else x16
    return dx, product(g, m, x16, m, c.w_dtype) if c.w_last else product(x16, m, g, m, c.w_dtype)


_linear.defvjp(_linear_fwd, _linear_bwd)


def _check_recipe(op: str, recipe: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{op}: recipe must be a Recipe, as nvfp4.recipes.NVIDIA; got {recipe!r}. "
            "A preset's name is looked up with nvfp4.recipes.PRESETS[name]."
        )


def _check_float(op: str, name: str, x: Any) -> None:
    if not any(x.dtype == t for t in _FLOATS):
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16 or float16; got {x.dtype}. Cast it with {name}.astype(jnp.float32)."
        )


def _axes(op: str, name: str, axes: Any, ndim: int) -> tuple[int, ...]:
    try:
        given = tuple(int(a) for a in axes)
    except TypeError:
        raise TypeError(f"{op}: the {name} must be a sequence of axes; got {axes!r}.") from None
    normalized = tuple(a + ndim if a < 0 else a for a in given)
    if len(set(normalized)) != len(normalized) or any(not 0 <= a < ndim for a in normalized):
        raise ValueError(
            f"{op}: the {name} must be different axes of an array of {ndim} axes; got {given}."
        )
    return normalized


def quantize_weight(
    w: jax.Array,
    *,
    contracting: int | Sequence[int] = 0,
    batch: int | Sequence[int] = (),
    recipe: Recipe = NVIDIA,
    key: jax.Array | None = None,
    backward: bool = True,
) -> QuantizedWeight:
    """Quantizes a weight once, for products that use it many times (inference, gradient accumulation).

    Args:
      w: f32|bf16|f16[...], as it would be passed to `dot_general`.
      contracting: Its axes that the product will contract; 0 is the first axis of a [K, N] kernel.
      batch: Its axes that the product will map over.
      recipe: The recipe of the product.
      key: A `jax.random` key, if the recipe rounds weights stochastically.
      backward: Whether to quantize for the gradient of x as well.

    Returns:
      What `dot_general`, `einsum` and `matmul` take in place of w: the product then has a gradient for x, and none for w. Or
      what `dot_general` and `matmul` take beside w, as `quantized`: then w has its gradient too.

    Raises:
      TypeError, ValueError: As `dot_general`.

    >>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> w = nvfp4.quantize_weight(jnp.eye(32))
    >>> nvfp4.matmul(jnp.ones((1, 32)), w).sum()
    Array(32., dtype=float32)
    """
    w = jnp.asarray(w)
    _check_float("quantize_weight", "w", w)
    _check_recipe("quantize_weight", recipe)
    contracting = (contracting,) if isinstance(contracting, int) else contracting
    batch = (batch,) if isinstance(batch, int) else batch
    contracting = _axes("quantize_weight", "contracting axes", contracting, w.ndim)
    batch = _axes("quantize_weight", "batch axes", batch, w.ndim)
    free = recipe.w_dgrad if backward and recipe.backward == "nvfp4" else None
    if "sr" in (recipe.w_fprop.rounding, getattr(free, "rounding", "rne")) and key is None:
        raise ValueError(
            f"quantize_weight: key must be given for recipe {recipe}, which rounds w stochastically; got None."
        )
    words = None if key is None else key_words("quantize_weight", key)
    at = _layout(w.shape, contracting, batch)
    fprop, dgrad = _quantize(
        at.matrices(w),
        at.contracting_last,
        recipe.w_fprop,
        free,
        key=_operand_key(words, 2, recipe.w_fprop, free),
    )
    return QuantizedWeight(fprop, dgrad, w.shape, contracting, batch)


def dot_general(
    x: jax.Array,
    w: jax.Array | QuantizedWeight,
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Recipe = NVIDIA,
    key: jax.Array | None = None,
    preferred_element_type: Any = None,
    quantized: QuantizedWeight | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` on NVFP4 operands, in the forward and in the backward pass.

    `y = q(x) q(w)`, and in the backward pass `dx = q(g) q(w)^T` and `dw = q(x)^T q(g)`, each operand quantized along the
    contraction of its own GEMM as the recipe says.

    Args:
      x: f32|bf16|f16[...]: the activation.
      w: f32|bf16|f16[...]: the weight; or a `QuantizedWeight`.
      dimension_numbers: `((x contracting, w contracting), (x batch, w batch))`, as for `jax.lax.dot_general`.
        Other axes of x make the rows M, those of w the columns N. Any sizes; axes are only moved in memory if
        the groups are interleaved.
      recipe: How to quantize; see `nvfp4.recipes`.
      key: A `jax.random` key, a fresh one for each step and layer; needed to differentiate with a recipe that rounds
        gradients stochastically.
      preferred_element_type: dtype of y: float32, bfloat16 or float16; by default that of x and w, promoted.
      quantized: What `quantize_weight` made of w, to compute with; w itself then only receives its gradient. For several
        microbatches of one step: quantize before their loop.

    Returns:
      y[batch, x's other axes, w's other axes].

    Raises:
      TypeError: For another dtype or recipe.
      ValueError: For dimension numbers that do not fit, or a missing key.

    Numerics: docs/numerics.md; x, w and g have one global scale each. NaN and Inf in an operand make all of the result NaN.
    Derivative: with respect to x and w, as above; the rounding counts as the identity. Kept for the backward pass are the
      quantized x and w, named "nvfp4_x" and "nvfp4_w" (and y "nvfp4_y") for `jax.checkpoint`; see `checkpoint_policy`.
    Batching: as if each example were computed by itself.
    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.

    >>> import jax, jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> x, w = jnp.ones((4, 64)), jnp.ones((64, 8))
    >>> nvfp4.dot_general(x, w, (((1,), (0,)), ((), ())))[0, 0]
    Array(64., dtype=float32)
    """
    return _dot_general(
        "dot_general", x, w, dimension_numbers, recipe, key, preferred_element_type, quantized
    )


def _dot_general(
    op: str,
    x: Any,
    w: Any,
    dimension_numbers: Any,
    recipe: Any,
    key: Any,
    preferred_element_type: Any,
    quantized: Any = None,
) -> jax.Array:
    if isinstance(x, NVFP4Array | QuantizedWeight) or isinstance(w, NVFP4Array):
        raise TypeError(
            f"{op}: x must be an array, and w an array or a QuantizedWeight; got {type(x).__name__} and {type(w).__name__}. "
            "Two NVFP4Arrays are multiplied by nvfp4.matmul; quantize_weight prepares a weight."
        )
    x = jnp.asarray(x)
    w = w if isinstance(w, QuantizedWeight) else jnp.asarray(w)
    _check_recipe(op, recipe)
    for name, operand in (("x", x), ("w", w)):
        _check_float(op, name, operand)
    try:
        (x_contracting, w_contracting), (x_batch, w_batch) = dimension_numbers
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: dimension_numbers must be ((x contracting, w contracting), (x batch, w batch)); got {dimension_numbers!r}."
        ) from None
    x_contracting = _axes(op, "x contracting axes", x_contracting, x.ndim)
    w_contracting = _axes(op, "w contracting axes", w_contracting, w.ndim)
    x_batch = _axes(op, "x batch axes", x_batch, x.ndim)
    w_batch = _axes(op, "w batch axes", w_batch, w.ndim)
    for name, contracting, batch in (("x", x_contracting, x_batch), ("w", w_contracting, w_batch)):
        if set(contracting) & set(batch):
            raise ValueError(
                f"{op}: an axis of {name} must be contracting or batch, not both; got {contracting} and {batch}."
            )
    for kind, x_axes, w_axes in (
        ("contracting", x_contracting, w_contracting),
        ("batch", x_batch, w_batch),
    ):
        x_sizes, w_sizes = [x.shape[a] for a in x_axes], [w.shape[a] for a in w_axes]
        if x_sizes != w_sizes:
            raise ValueError(
                f"{op}: the {kind} axes of x and w must have the same sizes; got {x_sizes} (axes {x_axes} of x, shape {x.shape}) "
                f"and {w_sizes} (axes {w_axes} of w, shape {w.shape})."
            )
    out_dtype = (
        jnp.result_type(x.dtype, w.dtype)
        if preferred_element_type is None
        else preferred_element_type
    )
    out_dtype = check_out_dtype(
        op, out_dtype, "out_dtype" if op == "matmul" else "preferred_element_type"
    )
    words = None if key is None else key_words(op, key)
    if recipe.forward_needs_key and words is None:
        raise ValueError(
            f"{op}: key must be given for recipe {recipe}, which rounds x or w stochastically; got None."
        )

    x_at = _layout(x.shape, x_contracting, x_batch, rows_apart=True)
    w_at = _layout(w.shape, w_contracting, w_batch)
    if quantized is not None and not (
        isinstance(quantized, QuantizedWeight) and not isinstance(w, QuantizedWeight)
    ):
        raise TypeError(
            f"{op}: quantized must be a QuantizedWeight of the array w; got {type(quantized).__name__} for {type(w).__name__}. "
            "Make it with nvfp4.quantize_weight."
        )
    if quantized is not None and quantized.shape != w.shape:
        raise ValueError(
            f"{op}: quantized must be made of w, of shape {w.shape}; got one of {quantized.shape}."
        )
    matrices = None if isinstance(w, QuantizedWeight) else w_at.matrices(w)
    quantized = w if isinstance(w, QuantizedWeight) else quantized
    if quantized is not None and (quantized.contracting, quantized.batch) != (
        w_contracting,
        w_batch,
    ):
        raise ValueError(
            f"{op}: w was quantized for contracting axes {quantized.contracting} and batch axes {quantized.batch}; "
            f"got {w_contracting} and {w_batch}. Quantize it for this product."
        )
    # Inside of a shard_map derivatives are summed over axes that only one operand varies over: outside of _linear.
    x_matrices, matrices, quantized, words = _sharding.vary_alike_trees(
        x_at.matrices(x), matrices, quantized, words
    )
    config = _Config(
        recipe,
        x_at.contracting_last,
        w_at.contracting_last,
        x.dtype,
        w.dtype,
        out_dtype,
        len(x_at.shape) - len(x_batch) - 2,
        jax.typeof(x_matrices).sharding,
        None if matrices is None else jax.typeof(matrices).sharding,
    )
    y = _linear(x_matrices, matrices, quantized, words, config)
    free = [
        tuple(s for a, s in enumerate(v.shape) if a not in contracting and a not in batch)
        for v, contracting, batch in ((x, x_contracting, x_batch), (w, w_contracting, w_batch))
    ]
    return y.reshape(*(x.shape[a] for a in x_batch), *free[0], *free[1])


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array | QuantizedWeight,
    *,
    recipe: Recipe = NVIDIA,
    key: jax.Array | None = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`jnp.einsum` of an activation and a weight on NVFP4 operands.

    Args:
      subscripts: As "btd,df->btf" or "...k,kn->...n". A letter stands at most once in each operand; a letter that
        the result lacks is in both operands.
      x: f32|bf16|f16[...]: the activation.
      w: f32|bf16|f16[...]: the weight; or a `QuantizedWeight`.
      recipe: As for `dot_general`, which computes it.
      key: As for `dot_general`.
      preferred_element_type: As for `dot_general`.

    Returns:
      The result, axes in the order of the subscripts.

    Raises:
      ValueError: For subscripts that are no such product, or do not fit the shapes.
      TypeError: As `dot_general`.

    Numerics, derivative, batching, source: as `dot_general`.

    >>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> nvfp4.einsum("...k,kn->n...", jnp.ones((2, 3, 32)), jnp.ones((32, 5))).shape
    (5, 2, 3)
    """
    w_ndim = w.ndim if isinstance(w, QuantizedWeight) else jnp.ndim(w)
    x_labels, w_labels, out_labels = _parse_einsum(subscripts, jnp.ndim(x), w_ndim)
    batch = [c for c in x_labels if c in w_labels and c in out_labels]
    contracting = [c for c in x_labels if c in w_labels and c not in out_labels]

    def axes(labels: Sequence[str], of: Sequence[str]) -> tuple[int, ...]:
        return tuple(of.index(c) for c in labels)

    dims = (
        (axes(contracting, x_labels), axes(contracting, w_labels)),
        (axes(batch, x_labels), axes(batch, w_labels)),
    )
    y = _dot_general("einsum", x, w, dims, recipe, key, preferred_element_type)
    shared = {*batch, *contracting}
    natural = (
        batch + [c for c in x_labels if c not in shared] + [c for c in w_labels if c not in shared]
    )
    return y.transpose(axes(out_labels, natural))


def _parse_einsum(
    subscripts: str, x_ndim: int, w_ndim: int
) -> tuple[list[str], list[str], list[str]]:
    """Labels of the axes of x, w and the result; those of an ellipsis are numbered from the right."""
    if not isinstance(subscripts, str) or subscripts.count("->") != 1 or subscripts.count(",") != 1:
        raise ValueError(f"einsum: subscripts must be of the form 'x,w->y'; got {subscripts!r}.")
    inputs, out = subscripts.replace(" ", "").split("->")

    def expand(term: str, ndim: int | None) -> list[str]:
        letters = term.replace("...", "", 1)
        if not all(c.isalpha() for c in letters):
            raise ValueError(
                f"einsum: subscripts must be letters and one '...' in each term; got {term!r} in {subscripts!r}."
            )
        if len(set(letters)) != len(letters):
            raise ValueError(
                f"einsum: a letter must stand once in a term; got {term!r} in {subscripts!r}."
            )
        hidden = 0
        if "..." in term:
            hidden = hidden_most if ndim is None else ndim - len(letters)
        if ndim is not None and (hidden < 0 or len(letters) + hidden != ndim):
            raise ValueError(
                f"einsum: {term!r} in {subscripts!r} must fit an operand of {ndim} axes."
            )
        before, _, after = term.partition("...")
        return [*before, *(f"...{i}" for i in reversed(range(hidden))), *after]

    x_term, w_term = inputs.split(",")
    hidden_most = 0
    x_labels, w_labels = expand(x_term, x_ndim), expand(w_term, w_ndim)
    hidden_most = max(sum(c.startswith("...") for c in labels) for labels in (x_labels, w_labels))
    out_labels = expand(out, None)
    for c in out_labels:
        if c not in x_labels and c not in w_labels:
            raise ValueError(
                f"einsum: each letter of the result must be in an operand; got {c!r} in {subscripts!r}."
            )
    for c in {*x_labels, *w_labels} - {*out_labels}:
        if c not in x_labels or c not in w_labels:
            raise ValueError(
                f"einsum: a letter that the result lacks must be in both operands; got {c!r} in {subscripts!r}. Sum it before."
            )
    return x_labels, w_labels, out_labels


def matmul(
    x: jax.Array | NVFP4Array,
    w: jax.Array | NVFP4Array | QuantizedWeight,
    *,
    out_dtype: Any = None,
    bias: jax.Array | None = None,
    accumulate: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    recipe: Recipe = NVIDIA,
    key: jax.Array | None = None,
    quantized: QuantizedWeight | None = None,
) -> jax.Array:
    """The product of two matrices in NVFP4.

    Two quantized arrays are multiplied as they are stored, `x[..., M, K] w[..., N, K]^T`:
    a weight [K, N] is quantized with axis=-2.
    Two arrays are multiplied like `x @ w`, `x[..., M, K] w[K, N]`, differentiably, as `dot_general` does.

    Args:
      x: NVFP4[..., M, K]; or f32|bf16|f16[..., M, K].
      w: NVFP4[..., N, K], leading axes broadcast with those of x; or f32|bf16|f16[K, N] or [*batch of x, K, N], or a
        `QuantizedWeight` of one.
      out_dtype: float32, bfloat16 or float16; by default that of what was quantized, promoted.
      bias: f32|bf16|f16[N], added to each row before the result is rounded (quantized arrays), or to the result.
      accumulate: out_dtype[..., M, N], added likewise. With quantized arrays its memory is used for the result if it is donated.
      column_scale: f32|bf16|f16[N], quantized arrays only: a factor of each column, before bias and accumulate. For weights
        that were quantized apart, with global scales of their own, and are multiplied as one (q, k and v; gate and up).
      recipe: For arrays, as for `dot_general`; quantized arrays have it behind them.
      key: For arrays, as for `dot_general`.
      quantized: For arrays, as for `dot_general`.

    Returns:
      out_dtype[..., M, N].

    Raises:
      TypeError, ValueError: For shapes, dtypes and kinds that do not fit.

    Numerics: docs/numerics.md.
    Derivative: arrays as `dot_general`; quantized arrays: with respect to global scales, bias and accumulate.
    Batching: as if each example were computed by itself; an operand that is not mapped is not copied.

    >>> import jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> x, w = nvfp4.quantize(jnp.ones((2, 32))), nvfp4.quantize(jnp.ones((3, 32)))
    >>> nvfp4.matmul(x, w, out_dtype=jnp.bfloat16).tolist()
    [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """
    if quantized is not None and isinstance(x, NVFP4Array | QuantizedWeight):
        raise TypeError(
            f"matmul: quantized must be None for an x that is quantized; got {type(quantized).__name__}."
        )
    if isinstance(x, NVFP4Array) and isinstance(w, NVFP4Array):
        dtype = jnp.result_type(x.dtype, w.dtype) if out_dtype is None else out_dtype
        return matmul_quantized(
            x, w, out_dtype=dtype, bias=bias, accumulate=accumulate, column_scale=column_scale
        )
    if isinstance(x, NVFP4Array) or isinstance(w, NVFP4Array):
        raise TypeError(
            f"matmul: x and w must both be NVFP4Arrays or both arrays; got {type(x).__name__} and {type(w).__name__}. "
            "Quantize the other with nvfp4.quantize, or prepare a weight with nvfp4.quantize_weight."
        )
    if column_scale is not None:
        raise TypeError(
            f"matmul: column_scale must be None for arrays that are not quantized; got {column_scale!r}. Multiply the result."
        )
    x = jnp.asarray(x)
    w = w if isinstance(w, QuantizedWeight) else jnp.asarray(w)
    if x.ndim < 2 or w.ndim < 2:
        raise ValueError(
            f"matmul: x and w must have two axes or more; got shapes {x.shape} and {w.shape}."
        )
    if w.ndim != 2 and w.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"matmul: w must be [K, N], or have the leading axes of x; got shapes {x.shape} and {w.shape}."
        )
    batch = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim - 2,)), (batch, batch))
    y = _dot_general("matmul", x, w, dims, recipe, key, out_dtype, quantized)
    for name, term, shape in (("bias", bias, y.shape[-1:]), ("accumulate", accumulate, y.shape)):
        if term is None:
            continue
        if jnp.shape(term) != shape:
            raise ValueError(f"matmul: {name} must have shape {shape}; got {jnp.shape(term)}.")
        y = y + jnp.asarray(term).astype(y.dtype)
    return y


def fake_quantize(
    x: jax.Array,
    *,
    axis: int = -1,
    block: str = "1x16",
    rounding: str = "rne",
    hadamard: bool = False,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
) -> jax.Array:
    """Rounds a tensor to what NVFP4 can hold, with a straight-through gradient.

    `dequantize(quantize(x))`, of the shape and dtype of x.

    Args:
      x: f32|bf16|f16[..., R, K].
      axis: As for `quantize`, -1 or -2.
      block: As for `quantize`.
      rounding: As for `quantize`.
      hadamard: As for `quantize`.
      key: As for `quantize`.
      amax: As for `quantize`.

    Returns:
      Like x.

    Raises:
      TypeError, ValueError: As `quantize`.

    Derivative: the identity.

    >>> import jax, jax.numpy as jnp, jax_nvfp4_ops as nvfp4
    >>> jax.grad(lambda x: nvfp4.fake_quantize(x).sum())(jnp.ones((1, 16)))[0, :2]
    Array([1., 1.], dtype=float32)
    """
    from jax_nvfp4_ops.quantize import quantize

    x = jnp.asarray(x)

    @jax.custom_jvp
    def rounded(x: jax.Array) -> jax.Array:
        q = quantize(
            x, axis=axis, block=block, rounding=rounding, hadamard=hadamard, key=key, amax=amax
        )
        y = q.dequantize()
        return y if axis in (-1, x.ndim - 1) else jnp.swapaxes(y, -1, -2)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))
    return rounded(x)
