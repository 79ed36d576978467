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


# --- what is linear in its operands --------------------------------------------------------------


def quantized(leaves, like):
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_matmul_is_linear_in_scales_bias_and_accumulate(lead):
    quantize = jax.vmap(nvfp4.quantize) if lead else nvfp4.quantize
    qa, qb = quantize(normal((*lead, 6, 40))), quantize(normal((*lead, 5, 40), seed=1))
    bias, accumulate = normal((5,), seed=2), normal((*lead, 6, 5), seed=3)
    weight = normal((*lead, 6, 5), seed=4)

    def f(a, b, bias, accumulate):
        x = quantized((qa.packed, qa.scales, a), qa)
        w = quantized((qb.packed, qb.scales, b), qb)
        y = nvfp4.matmul(x, w, out_dtype=jnp.float32, bias=bias, accumulate=accumulate)
        return jnp.sum(y * weight)

    args = qa.global_scale, qb.global_scale, jnp.asarray(bias), jnp.asarray(accumulate)
    da, db, dbias, daccumulate = jax.grad(f, (0, 1, 2, 3))(*args)
    product = np.asarray(nvfp4.matmul(qa, qb, out_dtype=jnp.float32), np.float64)
    total = (product * weight).sum((-1, -2))
    np.testing.assert_allclose(da, total / np.asarray(args[0]), rtol=1e-5)
    np.testing.assert_allclose(db, total / np.asarray(args[1]), rtol=1e-5)
    np.testing.assert_allclose(dbias, weight.reshape(-1, 5).sum(0), rtol=1e-5)
    assert_same_bits(daccumulate, weight)
    # Forward mode gives the same directional derivative.
    tangents = jax.tree.map(lambda x: jnp.ones_like(x) * 0.5, args)
    _, forward = jax.jvp(f, args, tangents)
    backward = sum(np.sum(np.asarray(d) * 0.5) for d in (da, db, dbias, daccumulate))
    assert float(forward) == pytest.approx(float(backward), rel=1e-5)


def test_dequantize_is_linear_in_the_global_scale():
    q = jax.vmap(nvfp4.quantize)(normal((3, 6, 40)))
    weight = normal((3, 6, 40), seed=1)

    def f(scale):
        x = quantized((q.packed, q.scales, scale), q).dequantize(jnp.float32)
        return jnp.sum(x * weight)

    values = np.asarray(q.dequantize(), np.float64)
    want = (values * weight).sum((-1, -2)) / np.asarray(q.global_scale)
    np.testing.assert_allclose(jax.grad(f)(q.global_scale), want, rtol=1e-5)


# --- fake_quantize and quantize_weight -----------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
def test_fake_quantize_rounds_and_passes_gradients_through(axis):
    x = wide((20, 48), BF16)
    y, pull = jax.vjp(lambda x: nvfp4.fake_quantize(x, axis=axis, block="16x16"), x)
    want = oracle.dequantize(oracle.quantize(x, axis=axis, block="16x16"), BF16)
    assert_same_bits(y, want if axis == -1 else want.T)
    g = wide((20, 48), BF16, 1)
    assert_same_bits(pull(jnp.asarray(g))[0], g)
    x = jnp.asarray(x)
    f = jax.jit(jax.vmap(lambda x, key: nvfp4.fake_quantize(x, rounding="sr", key=key)))
    keys = jax.random.split(KEY, 2)
    got = f(jnp.stack([x, x]), keys)
    for i in range(2):
        assert_same_bits(got[i], nvfp4.fake_quantize(x, rounding="sr", key=keys[i]))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_a_weight_that_is_quantized_before_gives_the_same_bits(recipe):
    x, w, g = wide((33, 48), BF16), wide((48, 17), BF16, 1), wide((33, 17), BF16, 2)
    key = KEY if recipe.needs_key else None
    weight = nvfp4.quantize_weight(w, recipe=recipe)

    def f(x, w):
        return nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key)

    y, pull = jax.vjp(lambda x: f(x, weight), x)
    want, both = jax.vjp(f, x, w)
    assert_same_bits(y, want)
    assert_same_bits(pull(jnp.asarray(g))[0], both(jnp.asarray(g))[0])
    assert_same_bits(jax.jit(f)(x, weight), want)
    forward = nvfp4.quantize_weight(w, recipe=recipe, backward=False)
    assert_same_bits(f(x, forward), want)
    if recipe.backward == "nvfp4":
        with pytest.raises(ValueError, match=r"dot_general: w must be quantized for the backward"):
            jax.grad(lambda x: jnp.sum(f(x, forward)))(x)


def test_a_quantized_weight_for_another_product_is_an_error():
    x, w = wide((33, 48)), wide((17, 48), seed=1)
    weight = nvfp4.quantize_weight(w, contracting=1)
    y = nvfp4.dot_general(x, weight, (((1,), (1,)), ((), ())), recipe=nvfp4.recipes.NVIDIA)
    assert_same_bits(y, nvfp4.einsum("tk,nk->tn", x, w, recipe=nvfp4.recipes.NVIDIA))
    with pytest.raises(
        ValueError, match=r"dot_general: w was quantized for contracting axes \(1,\)"
    ):
        nvfp4.dot_general(x.T[:17].T, weight, MATRIX, recipe=nvfp4.recipes.NVIDIA)
