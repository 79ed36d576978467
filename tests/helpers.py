"""What several tests share: comparisons of bits, and what the oracle says of a call."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import oracle

BF16 = ml_dtypes.bfloat16
DTYPES = {"f32": np.float32, "bf16": BF16, "f16": np.float16}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def assert_same_bits(got, expected):
    """Equal shapes, types and bits; a NaN equals a NaN (its payload is nobody's contract)."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.dtype.kind not in "fV":  # V: ml_dtypes
        np.testing.assert_array_equal(got, expected)
        return
    word = WORDS[got.dtype.itemsize]
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    different = (got.view(word) != expected.view(word)) & ~nan
    assert not different.any(), (
        f"{different.sum()} of {different.size} differ, first at {np.argwhere(different)[0]}: "
        f"got {got[different][0]!r}, expected {expected[different][0]!r}"
    )


def assert_same_tree(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, got, expected)


def assert_quantized(q, expected: oracle.Quantized):
    """An NVFP4Array holds what the oracle says, padding included."""
    assert_same_bits(q.global_scale, expected.global_scale)
    np.testing.assert_array_equal(q.scales, expected.tiles)
    np.testing.assert_array_equal(q.packed, expected.packed)
    assert q.k == expected.k
    assert q.shape == (*expected.codes.shape[:-1], expected.k)


def key_words(key) -> np.ndarray:
    """The two words that the random bits are made from."""
    return np.asarray(jax.random.key_data(key))


def normal(shape, dtype=np.float32, seed=0, scale=1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def wide(shape, dtype=np.float32, seed=0) -> np.ndarray:
    """Values whose magnitudes span blocks of very different sizes, zeros and -0 among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, shape))
    if shape:
        x *= np.exp2(rng.uniform(-12, 4, (*shape[:-1], 1)))  # rows of different sizes
    x = np.asarray(x)
    x[rng.random(shape) < 0.05] = 0.0
    x[rng.random(shape) < 0.02] = -0.0
    return x.astype(dtype)


class Canonical:
    """`dot_general`'s operands as [*batch, rows, K] matrices, and its results back again."""

    def __init__(self, x_shape, w_shape, dimension_numbers):
        (self.xc, self.wc), (self.xb, self.wb) = dimension_numbers
        self.xf = [i for i in range(len(x_shape)) if i not in (*self.xc, *self.xb)]
        self.wf = [i for i in range(len(w_shape)) if i not in (*self.wc, *self.wb)]
        self.x_shape, self.w_shape = x_shape, w_shape
        self.batch = tuple(x_shape[i] for i in self.xb)
        self.m = tuple(x_shape[i] for i in self.xf)
        self.n = tuple(w_shape[i] for i in self.wf)

    def _matrix(self, array, batch, free, contracting):
        array = np.transpose(np.asarray(array), (*batch, *free, *contracting))
        b, f = len(batch), len(free)
        sizes = [int(np.prod(s)) for s in (array.shape[b : b + f], array.shape[b + f :])]
        return array.reshape(*array.shape[:b], *sizes)

    def _original(self, matrix, shape, batch, free, contracting):
        order = (*batch, *free, *contracting)
        array = matrix.reshape([shape[i] for i in order])
        return np.transpose(array, np.argsort(order))

    def x(self, x):
        return self._matrix(x, self.xb, self.xf, self.xc)

    def w(self, w):
        return self._matrix(w, self.wb, self.wf, self.wc)

    def g(self, g):
        return np.asarray(g).reshape(*self.batch, int(np.prod(self.m)), int(np.prod(self.n)))

    def y(self, matrix):
        return matrix.reshape((*self.batch, *self.m, *self.n))

    def dx(self, matrix):
        return self._original(matrix, self.x_shape, self.xb, self.xf, self.xc)

    def dw(self, matrix):
        return self._original(matrix, self.w_shape, self.wb, self.wf, self.wc)


def linear(x, w, g, dimension_numbers, recipe, key=None, dtype=None):
    """The oracle's y, dx and dw of a dot_general: y in `dtype`, the gradients in their types."""
    c = Canonical(np.shape(x), np.shape(w), dimension_numbers)
    words = None if key is None else key_words(key)
    x2, w2, g2 = c.x(x), c.w(w), c.g(g)
    y = c.y(oracle.fprop(x2, w2, recipe, dtype or np.asarray(g).dtype))
    dx = c.dx(oracle.dgrad(g2, w2, recipe, words, np.asarray(x).dtype))
    dw = c.dw(oracle.wgrad(g2, x2, recipe, words, np.asarray(w).dtype))
    return y, dx, dw
