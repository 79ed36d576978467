"""What the gradients are worth, beside being the oracle's (test_dot_general.py)."""

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import BF16, assert_same_bits, normal, wide

KEY = jax.random.key(3)
MATRIX = (((1,), (0,)), ((), ()))
RECIPES = {
    r.name: r for r in (nvfp4.recipes.NVIDIA, nvfp4.recipes.RNE, nvfp4.recipes.BF16_BACKWARD)
}


def parts(x, w, g, recipe, key=KEY, **kw):
    key = key if recipe.needs_key else None
    y, pull = jax.vjp(
        lambda x, w: nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key, **kw), x, w
    )
    return y, *pull(g)


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_gradients_are_those_of_the_product(recipe):
    """Within what four bits allow: relative error 0.095 for each RNE operand of normal values,
    0.111 with 16x16 blocks, 0.138 with SR, independent of each other (docs/numerics.md)."""
    x, w, g = normal((256, 128)), normal((128, 192), seed=1), normal((256, 192), seed=2)
    y, dx, dw = parts(x, w, g, recipe)
    assert relative(y, x @ w) < 0.16
    assert relative(dx, g @ w.T) < 0.19
    assert relative(dw, x.T @ g) < 0.19


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_bf16_backward_multiplies_the_quantized_residuals(dtype):
    """dx = g w_q^T and dw = x_q^T g with operands in bf16 and sums in f32."""
    x, w, g = wide((48, 80), dtype), wide((80, 40), dtype, 1), wide((48, 40), dtype, 2)
    y, dx, dw = parts(x, w, g, nvfp4.recipes.BF16_BACKWARD)
    qx, qw = oracle.quantize(x), oracle.quantize(w.T, block="16x16")
    assert_same_bits(y, oracle.matmul(qx, qw, dtype=dtype))
    xq, wq = (oracle.dequantize(q, BF16).astype(np.float64) for q in (qx, qw))
    g64 = g.astype(BF16).astype(np.float64)
    # At most K roundings of a sum of magnitudes in f32, and that to the result's type.
    eps = 2.0**-8 if dtype == BF16 else 0
    for got, a, b in ((dx, g64, wq), (dw.T, g64.T, xq)):
        bound = a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b)) + eps * np.abs(a @ b)
        assert (np.abs(np.asarray(got, np.float64) - a @ b) <= bound).all()


def test_zero_inputs_have_zero_gradients():
    zeros = jnp.zeros((16, 64))
    for recipe in RECIPES.values():
        y, dx, dw = parts(zeros, zeros.T, jnp.zeros((16, 16)), recipe)
        assert not np.asarray(y).any()
        assert not np.asarray(dx).any()
        assert not np.asarray(dw).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_a_gradient_that_is_not_finite_reaches_dx_and_dw(recipe, bad):
    """As loss scaling needs it."""
    x, w, g = normal((32, 48)), normal((48, 64), seed=1), normal((32, 64), seed=2)
    g[31, 63] = bad
    _, dx, dw = parts(x, w, g, recipe)
    assert not np.isfinite(dx).all()
    assert not np.isfinite(dw).all()
    if recipe.backward == "nvfp4":
        assert np.isnan(dx).all()
        assert np.isnan(dw).all()


@pytest.mark.parametrize("which", ["x", "w"])
def test_an_operand_that_is_not_finite_reaches_everything(which):
    x, w, g = normal((32, 48)), normal((48, 64), seed=1), normal((32, 64), seed=2)
    (x if which == "x" else w)[3, 4] = np.nan
    y, dx, dw = parts(x, w, g, nvfp4.recipes.NVIDIA)
    assert np.isnan(y).all()
    assert np.isnan(dw if which == "x" else dx).all()


def test_the_gradient_of_nvidia_is_unbiased():
    """Averaged over keys, dx tends to the product with the quantized weight. g was quantized
    before, so that no value saturates."""
    x, w = normal((32, 48)), normal((48, 64), seed=1)
    g = np.asarray(nvfp4.quantize(normal((32, 64), seed=2)).dequantize())
    g = (g * 0.9).astype(np.float32)
    q = oracle.quantize(g)
    limit = np.repeat(oracle.E4M3[q.scales] * q.global_scale * 6, 16, -1)
    g = np.where(np.abs(g) == np.abs(g).max(), g, np.clip(g, -limit, limit))
    draws = 4000
    keys = jax.random.split(KEY, draws)

    @jax.jit
    def one(key):
        return parts(x, w, g, nvfp4.recipes.NVIDIA, key)[1]

    mean = np.zeros((32, 48))
    squares = np.zeros((32, 48))
    for some in keys.reshape(8, -1):
        dx = np.asarray(jax.vmap(one)(some), np.float64)
        mean += dx.sum(0) / draws
        squares += (dx**2).sum(0) / draws
    wq = oracle.dequantize(oracle.quantize(w.T, block="16x16"), np.float64)
    truth = g.astype(np.float64) @ wq
    deviation = np.sqrt(np.maximum(squares - mean**2, 0) / draws)
    # Five deviations of the mean, and the rounding of P(up) to nine bits: 2^-10 of a step of 2.
    scale = np.repeat(oracle.E4M3[oracle.quantize(g).scales] * q.global_scale, 16, -1)
    floor = (2.0**-9 * scale) @ np.abs(wq) + 1e-6 * np.abs(truth).max()
    assert (np.abs(mean - truth) <= 5 * deviation + floor).all()
    # One draw alone is far off: the bound above is not a loose one.
    assert np.abs(np.asarray(one(keys[0])) - truth).max() > 10 * deviation.max()


def test_gradients_of_a_bias_and_of_what_follows_are_exact():
    x, w = normal((16, 32)), normal((32, 8), seed=1)

    def f(bias, scale):
        y = nvfp4.dot_general(x, w, MATRIX, recipe=nvfp4.recipes.RNE)
        return jnp.sum(scale * (y + bias))

    bias, scale = jax.grad(f, (0, 1))(jnp.zeros(8), jnp.float32(3))
    np.testing.assert_array_equal(bias, np.full(8, 48))
    y = np.asarray(nvfp4.dot_general(x, w, MATRIX, recipe=nvfp4.recipes.RNE), np.float64)
    assert float(scale) == pytest.approx(y.sum(), rel=1e-5)


def test_only_what_is_wanted_is_differentiated():
    """Integers, keys and constants beside x and w do not disturb."""
    x, w = normal((16, 32)), normal((32, 8), seed=1)

    def f(w, key, n):
        y = nvfp4.dot_general(x, w, MATRIX, recipe=nvfp4.recipes.NVIDIA, key=key)
        return jnp.sum(y) * n

    g = jax.grad(f)(w, KEY, 2)
    assert g.shape == w.shape
    assert np.isfinite(g).all()
    assert np.count_nonzero(g)


@pytest.mark.parametrize("m_n_k", [(0, 8, 32), (16, 0, 32), (16, 8, 0)], ids=str)
def test_empty_axes(m_n_k):
    m, n, k = m_n_k
    for recipe in RECIPES.values():
        y, dx, dw = parts(jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n)), recipe)
        for got, shape in ((y, (m, n)), (dx, (m, k)), (dw, (k, n))):
            assert got.shape == shape
            assert not np.asarray(got).any()
