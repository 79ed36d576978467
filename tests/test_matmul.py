"""matmul on quantized operands: the oracle's bits, which round once a block."""

import golden
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import BF16, DTYPES, assert_same_bits, normal, wide
from test_dequantize import random_quantized

OUT = list(DTYPES)


def expected(a, b, **kw):
    with np.errstate(over="ignore", invalid="ignore"):
        return oracle.matmul(a, b, **kw)


@pytest.mark.parametrize("name", golden.GEMMS)
def test_golden_products(name):
    g = golden.load(name)
    axis = -2 if "wgrad" in name else -1
    two_dimensional = "w16x16" in name or "outlier" in name
    a, b = (golden.bf16(g[f"{side}_input_bf16_bits"]) for side in "ab")
    qa = nvfp4.quantize(a, axis=axis)
    qb = nvfp4.quantize(b, axis=axis, block="16x16" if two_dimensional else "1x16")
    y = np.asarray(nvfp4.matmul(qa, qb, out_dtype=jnp.float32))
    assert np.count_nonzero(y) > y.size // 2
    # As in test_oracle.py: K / 16 + 4 roundings on each side, of the sum of magnitudes.
    magnitude = np.abs(np.asarray(qa.dequantize(jnp.float32), np.float64)) @ np.abs(
        np.asarray(qb.dequantize(jnp.float32), np.float64).T
    )
    assert (np.abs(y - g["y_f32"]) <= (qa.k // 16 + 4) * 2.0**-24 * magnitude).all()


SHAPES = [
    (1, 1, 1),
    (1, 7, 16),
    (2, 3, 15),
    (5, 17, 33),
    (16, 16, 464),
    (33, 80, 80),
    (64, 64, 64),
    (127, 130, 257),
    (128, 128, 128),
    (1, 515, 1040),
    (259, 5, 100),
]


@pytest.mark.parametrize("mnk", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", OUT)
def test_every_shape(mnk, dtype, instruction_set):
    m, n, k = mnk
    a, qa = random_quantized((m, k), 1, 2.0**-8)
    b, qb = random_quantized((n, k), 2, 2.0**-9 * 1.1)
    y = nvfp4.matmul(a, b, out_dtype=DTYPES[dtype])
    assert_same_bits(y, expected(qa, qb, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("scale", [0.01, 3e-23])
def test_many_tasks(scale, instruction_set):
    """Several cache blocks along each of M, N and K; results that are subnormal on all threads."""
    a, qa = random_quantized((300, 4240), 1, scale)
    b, qb = random_quantized((530, 4240), 2, scale)
    want = expected(qa, qb)
    assert np.count_nonzero(want) > want.size // 2
    assert_same_bits(nvfp4.matmul(a, b, out_dtype=jnp.float32), want)


@pytest.mark.parametrize("code", [7, 15])
def test_largest_sums(code, instruction_set):
    """Every product 36, every scale 448: no integer overflows on the way."""
    k = 4096
    q = [
        oracle.Quantized(
            np.full((5, k), c, np.uint8), np.full((5, k // 16), 0x7E, np.uint8), np.float32(1), k
        )
        for c in (code, 7)
    ]
    arrays = [
        nvfp4.NVFP4Array(
            jnp.asarray(x.packed),
            jnp.asarray(x.tiles),
            jnp.float32(1),
            k=k,
            block="1x16",
            hadamard=False,
            dtype=jnp.float32,
        )
        for x in q
    ]
    y = nvfp4.matmul(*arrays, out_dtype=jnp.float32)
    assert_same_bits(y, expected(*q))
    assert (np.abs(y) == np.float32(36.0 * k * 448**2)).all()
    # Beyond the range of float16, within that of the others.
    assert np.isinf(np.asarray(nvfp4.matmul(*arrays, out_dtype=jnp.float16))).all()


@pytest.mark.parametrize("scales", [(1e-45, 1.0), (3e-39, 4e-39), (1e-20, 1e-20), (1e20, 1e20)])
def test_alpha_at_the_ends_of_the_range(scales):
    """Their product may be subnormal, 0 or Inf: as the contract's multiplication has it."""
    a, qa = random_quantized((5, 64), 1, scales[0])
    b, qb = random_quantized((6, 64), 2, scales[1])
    assert_same_bits(nvfp4.matmul(a, b, out_dtype=jnp.float32), expected(qa, qb))
    f = jax.jit(lambda a, b: nvfp4.matmul(a, b, out_dtype=jnp.float32))
    assert_same_bits(f(a, b), expected(qa, qb))


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("bias_dtype", OUT)
@pytest.mark.parametrize("accumulates", [False, True])
def test_bias_and_accumulate_round_in_order(dtype, bias_dtype, accumulates, instruction_set):
    a, qa = random_quantized((37, 100), 1, 0.01)
    b, qb = random_quantized((19, 100), 2, 0.001)
    bias = normal((19,), DTYPES[bias_dtype], 3, 100)
    accumulate = normal((37, 19), DTYPES[dtype], 4, 1000) if accumulates else None
    got = nvfp4.matmul(a, b, out_dtype=DTYPES[dtype], bias=bias, accumulate=accumulate)
    want = expected(qa, qb, bias=bias, accumulate=accumulate, dtype=DTYPES[dtype])
    assert_same_bits(got, want)


def test_accumulate_takes_the_memory_of_a_donated_array():
    a, qa = random_quantized((64, 64), 1)
    b, qb = random_quantized((64, 64), 2)
    accumulate = normal((64, 64), seed=3)
    f = jax.jit(
        lambda c, a, b: nvfp4.matmul(a, b, out_dtype=jnp.float32, accumulate=c), donate_argnums=0
    )
    donated = jax.device_put(jnp.asarray(accumulate))
    where = donated.unsafe_buffer_pointer()
    y = f(donated, a, b)
    assert donated.is_deleted()
    assert y.unsafe_buffer_pointer() == where
    assert_same_bits(y, expected(qa, qb, accumulate=accumulate))
    # Not donated, it stays as it was.
    kept = jnp.asarray(accumulate)
    nvfp4.matmul(a, b, out_dtype=jnp.float32, accumulate=kept).block_until_ready()
    assert_same_bits(kept, accumulate)


@pytest.mark.parametrize(
    ("a_lead", "b_lead"),
    [
        ((3,), (3,)),
        ((3,), ()),
        ((), (3,)),
        ((2, 3), (3,)),
        ((2, 1), (1, 3)),
        ((1,), (3,)),
        ((0,), ()),
    ],
    ids=str,
)
def test_leading_axes_are_broadcast(a_lead, b_lead):
    a, qa = random_quantized((*a_lead, 5, 40), 1, 0.01)
    b, qb = random_quantized((*b_lead, 7, 40), 2, 0.01)
    y = nvfp4.matmul(a, b, out_dtype=jnp.float32)
    assert_same_bits(y, expected(qa, qb))


@pytest.mark.parametrize("mnk", [(0, 5, 32), (5, 0, 32), (0, 0, 32), (5, 6, 0), (0, 6, 0)], ids=str)
def test_empty_operands(mnk):
    m, n, k = mnk
    qa, qb = nvfp4.quantize(jnp.ones((m, k))), nvfp4.quantize(jnp.ones((n, k)))
    y = nvfp4.matmul(qa, qb, out_dtype=jnp.float32)
    assert_same_bits(y, np.zeros((m, n), np.float32))
    bias, accumulate = normal((n,)), normal((m, n), seed=1)
    y = nvfp4.matmul(qa, qb, out_dtype=jnp.float32, bias=bias, accumulate=accumulate)
    assert_same_bits(y, bias + accumulate)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_reach_every_product(bad):
    x = normal((5, 40))
    x[4, 39] = bad
    q, other = nvfp4.quantize(x), nvfp4.quantize(normal((6, 40)))
    assert np.isnan(np.asarray(nvfp4.matmul(q, other, out_dtype=jnp.float32))).all()
    assert np.isnan(np.asarray(nvfp4.matmul(other, q, out_dtype=jnp.bfloat16), np.float32)).all()
    zero = nvfp4.quantize(jnp.zeros((6, 40)))
    assert np.isnan(np.asarray(nvfp4.matmul(q, zero, out_dtype=jnp.float32))).all()


def test_transforms_of_both_operands_cancel():
    """The product of transformed operands is that of the originals, within what four bits allow."""
    x, w = normal((40, 200)), normal((50, 200), seed=1)
    qx, qw = (nvfp4.quantize(v, hadamard=True) for v in (x, w))
    y = np.asarray(nvfp4.matmul(qx, qw, out_dtype=jnp.float32))
    assert_same_bits(y, expected(*(oracle.quantize(v, rotate=True) for v in (x, w))))
    # Each operand's relative error is about 0.095 (mean square 9e-3), independent between them.
    error = np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T)
    assert error < 0.18


def test_transforms_cancel_where_k_is_no_multiple_of_16():
    """What the transform puts past K belongs to the product."""
    x, w = normal((40, 20)), normal((50, 20), seed=1)
    y = nvfp4.matmul(*(nvfp4.quantize(v, hadamard=True) for v in (x, w)), out_dtype=jnp.float32)
    assert_same_bits(y, expected(*(oracle.quantize(v, rotate=True) for v in (x, w))))
    assert np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T) < 0.18


def test_jit_equals_eager():
    a, _ = random_quantized((70, 300), 1, 0.01)
    b, _ = random_quantized((30, 300), 2, 0.01)
    for dtype in DTYPES.values():
        f = lambda a, b, dtype=dtype: nvfp4.matmul(a, b, out_dtype=dtype)  # noqa: E731
        assert_same_bits(jax.jit(f)(a, b), f(a, b))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_is_a_loop(axes):
    x = wide((3, 2, 10, 40)) * np.array([1, 100, 1e-3], np.float32)[:, None, None, None]
    w = wide((3, 2, 12, 40), seed=1)
    bias, accumulate = normal((3, 12)), normal((3, 2, 10, 12), seed=2)
    qx = jax.vmap(nvfp4.quantize)(x) if axes[0] == 0 else nvfp4.quantize(x[0])
    qw = jax.vmap(nvfp4.quantize)(w) if axes[1] == 0 else nvfp4.quantize(w[0])

    def f(a, b, bias, accumulate):
        return nvfp4.matmul(a, b, out_dtype=jnp.float32, bias=bias, accumulate=accumulate)

    for bias_axis in (0, None):
        for accumulate_axis in (0, None):
            c = bias if bias_axis == 0 else bias[0]
            d = accumulate if accumulate_axis == 0 else accumulate[0]
            got = jax.vmap(f, in_axes=(*axes, bias_axis, accumulate_axis))(qx, qw, c, d)
            for i in range(3):
                one = [x[i if axes[0] == 0 else 0], w[i if axes[1] == 0 else 0]]
                want = expected(
                    *map(oracle.quantize, one),
                    bias=bias[i if bias_axis == 0 else 0],
                    accumulate=accumulate[i if accumulate_axis == 0 else 0],
                )
                assert_same_bits(got[i], want)


def test_nested_vmap():
    x, w = wide((2, 3, 10, 40)), wide((3, 12, 40), seed=1)
    f = jax.vmap(
        jax.vmap(lambda x, w: nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w), out_dtype=BF16)),
        in_axes=(0, None),
    )
    got = f(x, w)
    for i in range(2):
        for j in range(3):
            want = expected(oracle.quantize(x[i, j]), oracle.quantize(w[j]), dtype=BF16)
            assert_same_bits(got[i, j], want)


@hypothesis.given(
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(0, 300),
    st.sampled_from(OUT),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_product(m, n, k, dtype, with_bias, seed):
    a, qa = random_quantized((m, k), seed, 0.003)
    b, qb = random_quantized((n, k), seed + 1, 0.02)
    bias = normal((n,), np.float32, seed) if with_bias else None
    got = nvfp4.matmul(a, b, out_dtype=DTYPES[dtype], bias=bias)
    assert_same_bits(got, expected(qa, qb, bias=bias, dtype=DTYPES[dtype]))
