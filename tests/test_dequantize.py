"""dequantize: bit for bit `code * (scale * global scale)`, rounded once."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import DTYPES, assert_same_bits, assert_same_tree, wide

OUT = list(DTYPES)


def random_quantized(shape, seed=0, global_scale=0.37):
    """Any codes and any scales, as (NVFP4Array, what the oracle calls it)."""
    rng = np.random.default_rng(seed)
    *lead, rows, k = shape
    blocks = oracle.ceil_div(k, 16)
    codes = rng.integers(0, 16, (*lead, rows, blocks * 16), np.uint8)
    scales = rng.integers(0, 0x7F, (*lead, rows, blocks), np.uint8)
    codes[..., k:] = 0
    q = oracle.Quantized(codes, scales, np.float32(global_scale), k)
    array = nvfp4.NVFP4Array(
        jnp.asarray(q.packed),
        jnp.asarray(q.tiles),
        jnp.asarray(q.global_scale),
        k=k,
        block="1x16",
        hadamard=False,
        dtype=jnp.float32,
    )
    return array, q


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 17), (3, 16), (33, 80), (129, 31), (2, 3, 20, 40), (300, 1100)], ids=str
)
def test_every_code_and_scale(shape, dtype, instruction_set):
    array, q = random_quantized(shape)
    with np.errstate(over="ignore"):
        assert_same_bits(array.dequantize(DTYPES[dtype]), oracle.dequantize(q, DTYPES[dtype]))


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 2.9e-39, 1e-38, 1e-30, 1.0, 1e30, 1.27e35, np.nan])
def test_every_global_scale(scale, dtype):
    """Subnormals are kept and overflow is Inf, under jit too."""
    array, q = random_quantized((20, 64), global_scale=scale)
    expected = oracle.dequantize(q, DTYPES[dtype])
    assert_same_bits(array.dequantize(DTYPES[dtype]), expected)
    assert_same_bits(jax.jit(lambda q: q.dequantize(DTYPES[dtype]))(array), expected)


@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_the_error_is_within_half_a_step(block):
    """Against the input, so that a global scale that is lost is noticed."""
    x = wide((33, 80)) * np.float32(100)
    q = nvfp4.quantize(x, block=block)
    scale = np.repeat(oracle.E4M3[oracle.quantize(x, block=block).scales], 16, -1)
    step = scale * float(q.global_scale)
    # The largest step of the grid is 2, between 4 and 6; a rounded scale lets a block's largest
    # value lie above 6 by a sixteenth, or by more where the scale is subnormal: half of its step.
    bound = np.maximum(step, np.abs(x) / 16 + 2.0**-9 * 3 * float(q.global_scale))
    assert (np.abs(np.asarray(q.dequantize(jnp.float32)) - x) <= bound * 1.0001).all()


def test_what_was_quantized_along_the_other_axis_comes_back_transposed():
    x = wide((20, 48))
    q = nvfp4.quantize(x, axis=-2)
    assert q.dequantize(jnp.float32).shape == (48, 20)
    assert_same_bits(
        q.dequantize(jnp.float32), nvfp4.quantize(np.ascontiguousarray(x.T)).dequantize(jnp.float32)
    )


def test_jit_equals_eager_and_vmap_is_a_loop():
    x = wide((3, 4, 20, 40)) * np.array([1, 1e3, 1e-3], np.float32)[:, None, None, None]
    q = jax.vmap(nvfp4.quantize)(x)

    def f(q):
        return q.dequantize(jnp.bfloat16)

    got = jax.vmap(f)(q)
    assert_same_tree(jax.jit(jax.vmap(f))(q), got)
    for i in range(3):
        assert_same_bits(got[i], f(nvfp4.quantize(x[i])))


def test_vmap_over_some_leaves():
    """One tensor under several global scales."""
    array, q = random_quantized((20, 40))
    scales = jnp.array([0.5, 2.0, 3.0])
    leaves, tree = jax.tree.flatten(array)
    axes = jax.tree.unflatten(tree, [None, None, 0])
    many = jax.tree.unflatten(tree, [*leaves[:2], scales])
    got = jax.vmap(lambda q: q.dequantize(jnp.float32), in_axes=(axes,))(many)
    for value, scale in zip(got, scales, strict=True):
        want = oracle.Quantized(q.codes, q.scales, np.float32(scale), q.k)
        assert_same_bits(value, oracle.dequantize(want))


@hypothesis.given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 140),
    st.integers(1, 80),
    st.sampled_from(OUT),
    st.floats(width=32, min_value=0),
    st.integers(0, 2**32 - 1),
)
def test_any_quantized_array(lead, rows, k, dtype, global_scale, seed):
    array, q = random_quantized((*lead, rows, k), seed, global_scale)
    assert_same_bits(array.dequantize(DTYPES[dtype]), oracle.dequantize(q, DTYPES[dtype]))
