"""Each kind of device gives the CPU backend's bits, and products as exact.

Without a GPU the other device is a second CPU device, so that this file itself is tested. On a machine with a GPU,
`JAX_PLATFORMS=cuda,cpu NVFP4_REQUIRE_CUDA=1` makes it part of the run: tools/gpu_check.sh does that.
"""

import itertools
import os

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import pytest
from helpers import DTYPES, assert_same_bits, assert_same_tree, normal, wide


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    """The device that is compared with the first CPU device."""
    if request.param == "cpu":
        return jax.devices("cpu")[1]
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        if os.environ.get("NVFP4_REQUIRE_CUDA") == "1":
            pytest.fail(f"NVFP4_REQUIRE_CUDA=1, and there is no CUDA device: {error}")
        pytest.skip("no CUDA device here; tools/gpu_check.sh runs this on a machine with one")


def on(device, f, *arrays):
    """f(*arrays) under jit, on a device; the results in NumPy."""
    placed = jax.device_put(arrays, device)
    results = jax.jit(f)(*placed)
    assert {d for x in jax.tree.leaves(results) for d in x.devices()} == {device}
    return jax.tree.map(np.asarray, jax.device_get(results))


def assert_same(device, f, *arrays):
    assert_same_tree(on(device, f, *arrays), on(jax.devices("cpu")[0], f, *arrays))


# Tails of every kind, no rows, no columns, one tile, several tiles, more tiles than a block of threads takes.
SHAPES = [(1, 1), (5, 16), (33, 80), (127, 129), (128, 128), (16, 464), (2, 3, 64, 48)]
SHAPES += [(0, 32), (32, 0), (384, 640), (130, 2048)]
OUTPUTS = list(itertools.product(["1x16", "16x16"], ["rne", "sr"], [False, True]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_quantize(device, shape, dtype):
    x = wide(shape, dtype)
    for block, rounding, hadamard in OUTPUTS:
        if block == "16x16" and hadamard:
            continue
        key = jax.random.key(3) if rounding == "sr" else None
        for axis in (-1, -2, (-1, -2)):
            assert_same(
                device,
                lambda x, a=axis, b=block, r=rounding, h=hadamard, k=key: nvfp4.quantize(
                    x, axis=a, block=b, rounding=r, hadamard=h, key=k
                ),
                x,
            )


def test_quantize_what_recipes_mix(device):
    for x in (wide((256, 384), DTYPES["bf16"]), wide((100, 72))):
        assert_same(
            device,
            lambda x: nvfp4.quantize(
                x,
                axis=(-1, -2),
                rounding=("sr", "sr"),
                hadamard=(False, True),
                key=jax.random.key(1),
            ),
            x,
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(device, value):
    x = normal((40, 64))
    x[17, 33] = value
    assert_same(device, lambda x: nvfp4.quantize(x, axis=(-1, -2)), x)
    got = on(device, lambda x: nvfp4.quantize(x).dequantize(jnp.float32), x)
    assert np.isnan(got).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_amax_and_dequantize(device, dtype):
    for shape in SHAPES:
        x = wide(shape, dtype)
        assert_same(device, lambda x: nvfp4.amax(x, ("plain", "rows", "columns")), x)
        assert_same(
            device, lambda x, d=dtype: nvfp4.quantize(x.astype(jnp.float32)).dequantize(d), x
        )


def test_every_example_of_a_batch(device):
    keys = jax.random.split(jax.random.key(0), 3)
    assert_same(
        device,
        lambda x, words: jax.vmap(
            lambda x, w: nvfp4.quantize(
                x, axis=(-1, -2), rounding="sr", key=jax.random.wrap_key_data(w)
            )
        )(x, words),
        wide((3, 50, 70)),
        np.asarray(jax.random.key_data(keys)),
    )


def test_stochastic_rounding_is_unbiased(device):
    x = np.tile(np.array([0.3, 1.1, 2.7, 5.2, -0.1, -3.4, 6.0, 0.9], np.float32), (1, 4))

    def mean(x):
        keys = jax.random.split(jax.random.key(7), 10_000)
        q = jax.vmap(lambda k: nvfp4.quantize(x, rounding="sr", key=k).dequantize(jnp.float32))(
            keys
        )
        return q.mean(0)

    got = on(device, mean, x)
    # Five standard errors of a value that is one of two neighbours, at most 2 apart before the block scale of about 1.
    assert (np.abs(got - x) < 5 * 2 * 0.5 / np.sqrt(10_000)).all(), np.abs(got - x).max()


PRODUCTS = [(1, 8, 32), (16, 16, 464), (33, 80, 80), (64, 7, 100), (128, 128, 128), (129, 515, 257)]
PRODUCTS += [(256, 384, 512), (1, 1, 1), (1, 515, 1040)]


def check_product(y, a, b, dtype, extra=0.0):
    """y = a b^T, off by no more than sums in float32, in any order, and one rounding of the result may be."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    exact = a @ b.T + extra
    bound = (a.shape[1] + 4) * 2.0**-24 * (np.abs(a) @ np.abs(b).T + np.abs(extra))
    bound += float(jnp.finfo(dtype).eps) * np.abs(exact) + float(jnp.finfo(dtype).tiny)
    assert np.count_nonzero(y) > 0.9 * y.size
    assert (np.abs(y.astype(np.float64) - exact) <= bound).all(), np.max(np.abs(y - exact) / bound)


@pytest.mark.parametrize("mnk", PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_matmul(device, mnk, dtype):
    m, n, k = mnk
    x, w = normal((m, k), seed=1), normal((n, k), seed=2)
    bias, accumulate = normal((n,), seed=3), normal((m, n), dtype, seed=4)

    def f(x, w, bias, accumulate):
        a, b = nvfp4.quantize(x), nvfp4.quantize(w, block="16x16")
        return (
            a.dequantize(jnp.float32),
            b.dequantize(jnp.float32),
            nvfp4.matmul(a, b, out_dtype=dtype),
            nvfp4.matmul(a, b, out_dtype=dtype, bias=bias),
            nvfp4.matmul(a, b, out_dtype=dtype, bias=bias.astype(jnp.bfloat16)),
            nvfp4.matmul(a, b, out_dtype=dtype, accumulate=accumulate),
        )

    a, b, plain, biased, half_biased, accumulated = on(device, f, x, w, bias, accumulate)
    check_product(plain, a, b, dtype)
    check_product(biased, a, b, dtype, bias.astype(np.float64))
    check_product(half_biased, a, b, dtype, bias.astype(DTYPES["bf16"]).astype(np.float64))
    check_product(accumulated, a, b, dtype, accumulate.astype(np.float64))


def test_matmul_of_no_columns_and_no_rows(device):
    for m, n, k in ((4, 8, 0), (0, 8, 32), (4, 0, 32)):
        y = on(
            device,
            lambda x, w: nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w)),
            normal((m, k)),
            normal((n, k)),
        )
        assert_same_bits(y, np.zeros((m, n), np.float32))


def test_matmul_over_a_batch(device):
    x, w = normal((3, 40, 64), seed=1), normal((3, 24, 64), seed=2)

    def f(x, w):
        a, b = jax.vmap(nvfp4.quantize)(x), jax.vmap(nvfp4.quantize)(w)
        y = jax.vmap(lambda a, b: nvfp4.matmul(a, b, out_dtype=jnp.float32))(a, b)
        return a.dequantize(jnp.float32), b.dequantize(jnp.float32), y

    a, b, y = on(device, f, x, w)
    for i in range(3):
        check_product(y[i], a[i], b[i], np.float32)


@pytest.mark.parametrize("recipe", nvfp4.recipes.PRESETS.values(), ids=str)
@pytest.mark.parametrize("dtype", [DTYPES["f32"], DTYPES["bf16"]], ids=["f32", "bf16"])
def test_a_linear_layer(device, recipe, dtype):
    """y, dx and dw are as far from the CPU's as the order of sums allows, and runs again give the same bits."""
    x, w, g = normal((96, 160), dtype), normal((160, 72), dtype, 1), normal((96, 72), dtype, 2)
    key = jax.random.key(5) if recipe.needs_key else None

    def f(x, w, g):
        y, pullback = jax.vjp(lambda x, w: nvfp4.matmul(x, w, recipe=recipe, key=key), x, w)
        return (y, *pullback(g))

    program = jax.jit(f)
    placed = jax.device_put((x, w, g), device)
    first = jax.device_get(program(*placed))
    for _ in range(5):  # on a GPU later runs replay a graph
        assert_same_tree(jax.device_get(program(*placed)), first)
    for got, expected in zip(first, on(jax.devices("cpu")[0], f, x, w, g), strict=True):
        assert got.dtype == expected.dtype == dtype
        got, expected = got.astype(np.float64), expected.astype(np.float64)
        # Sums in another order: 160 products of up to 10 times the result's size, in float32; then one rounding.
        step = 160 * 10 * 2.0**-24 + float(jnp.finfo(dtype).eps)
        assert np.abs(got - expected).max() <= step * np.abs(expected).max()


def test_programs_of_many_shapes_side_by_side(device):
    """What one program works in is not another's: each gives the same bits among others as alone."""
    shapes = [(64, 64, 64), (200, 24, 80), (1, 264, 512)]
    f = jax.jit(lambda x, w: nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w)))
    inputs = [jax.device_put((normal((m, k)), normal((n, k))), device) for m, n, k in shapes]
    alone = [jax.device_get(f(*i)) for i in inputs]
    pending = [f(*i) for _ in range(10) for i in inputs]
    for y, expected in zip(pending, alone * 10, strict=True):
        assert_same_bits(y, expected)


def test_layers_in_a_scan(device):
    w = normal((4, 64, 64), DTYPES["bf16"], scale=0.1)

    def loss(x, w):
        y, _ = jax.lax.scan(
            lambda x, w: (x + nvfp4.matmul(x, w, recipe=nvfp4.recipes.RNE), None), x, w
        )
        return (y.astype(jnp.float32) ** 2).mean()

    x = normal((32, 64), DTYPES["bf16"])
    got = on(device, jax.grad(loss, argnums=(0, 1)), x, w)
    expected = on(jax.devices("cpu")[0], jax.grad(loss, argnums=(0, 1)), x, w)
    for a, b in zip(got, expected, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        # A rounding of bfloat16 that falls otherwise may move codes of the layers after it: a few steps of FP4 among many.
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)
