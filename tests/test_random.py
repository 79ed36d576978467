"""Stochastic rounding: unbiased, and its bits are a function of key, stream and position alone."""

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import assert_quantized, assert_same_bits, key_words, normal, wide

KEY = jax.random.key(11)


def codes(q):
    return oracle.unpack(np.asarray(q.packed))[..., : q.k]


def sr(x, key=KEY, **kw):
    return nvfp4.quantize(x, rounding="sr", key=key, **kw)


def bound(x, draws, block="1x16", axis=-1):
    """How far the mean of `draws` may be from x: six deviations and the rounding to nine bits."""
    q = oracle.quantize(x, block=block, axis=axis)
    scale = np.repeat(oracle.E4M3[q.scales] * q.global_scale, 16, -1)[..., : q.k].astype(np.float64)
    y = np.abs(np.asarray(x if axis == -1 else x.T, np.float64)) / scale
    step = np.where(y < 2, 0.5, np.where(y < 4, 1, 2)) * scale
    # One of two neighbours: a deviation of half a step at most. P(up) is off by at most 2^-10.
    return step * (6 * 0.5 / np.sqrt(draws) + 2.0**-10 + 2.0**-20)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_the_mean_over_ten_thousand_keys_is_the_value(block, axis, instruction_set):
    x = normal((16, 32), seed=3)
    # A block's largest value may lie above 6 steps when its scale was rounded down, and saturates:
    # that one is biased by construction, and held within.
    q = oracle.quantize(x, block=block, axis=axis)
    limit = np.repeat(oracle.E4M3[q.scales] * q.global_scale * 6, 16, -1)[..., : q.k]
    x = np.clip(x, *((-limit, limit) if axis == -1 else (-limit.T, limit.T)))
    amax = oracle.amax(normal((16, 32), seed=3))
    draws = 10_000
    keys = jax.random.split(KEY, draws)

    @jax.jit
    def total(keys):
        def one(key):
            return sr(x, key, block=block, axis=axis, amax=amax).dequantize(jnp.float32)

        return jnp.sum(jax.vmap(one)(keys), 0)

    mean = sum(np.asarray(total(k), np.float64) for k in keys.reshape(10, -1)) / draws
    truth = (x if axis == -1 else x.T).astype(np.float64)
    assert (np.abs(mean - truth) <= bound(x, draws, block, axis)).all()
    assert np.count_nonzero(mean) == mean.size


def test_elements_are_independent():
    rows = 2**14
    x = np.zeros((rows, 16), np.float32)
    x[:, 0] = 6  # the scale is then 1 (with amax 2688 ...)
    x[:, 1:] = 0.25  # between 0 and 0.5: half of them go up
    up = codes(sr(x, amax=np.float32(2688)))[:, 1:] == 1
    assert (
        oracle.E4M3[np.asarray(sr(x, amax=np.float32(2688)).linear_scales())[0, 0].view(np.uint8)]
        == 1
    )
    n = up.size
    assert abs(up.mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
    # Elements of a block are independent of each other, those that share bits of a word too.
    correlation = np.corrcoef(up.T)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(rows)
    # And so are rows.
    flat = up.reshape(-1) - 0.5
    assert abs(np.mean(flat[:-15] * flat[15:])) * 4 < 5 / np.sqrt(n)


@pytest.mark.parametrize("fraction", [1, 2, 100, 255, 256, 511])
def test_the_probability_is_exact_to_nine_bits(fraction):
    rows = 2**15
    x = np.full((rows, 16), 1 + fraction / 1024, np.float32)  # from 1 to 1.5 in 512 steps
    x[:, 0] = 6
    up = codes(sr(x, amax=np.float32(2688)))[:, 1:] == 3
    p = fraction / 512
    deviation = np.sqrt(p * (1 - p) / up.size)
    assert abs(up.mean() - p) < 5 * deviation


def test_values_on_the_grid_stay():
    x = np.tile(oracle.E2M1, (64, 3)) * np.float32(0.5)
    x[:, 0] = 3
    q = sr(x, amax=np.float32(2688 / 2))
    assert_same_bits(q.dequantize(jnp.float32), x)


def test_it_saturates():
    x = normal((32, 64)) * np.float32(100)
    q = sr(x, amax=np.float32(1))
    assert (np.abs(np.asarray(q.dequantize(jnp.float32))) <= 1).all()
    assert_quantized(
        q, oracle.quantize(x, rounding="sr", key=key_words(KEY), tensor_amax=np.float32(1))
    )


def test_bits_depend_on_the_position_alone():
    """A part of a tensor has the bits of that part: rows by their number, blocks by theirs."""
    x = wide((70, 160))
    amax = oracle.amax(x)
    whole = codes(sr(x, amax=amax))
    np.testing.assert_array_equal(codes(sr(x[:33], amax=amax)), whole[:33])
    np.testing.assert_array_equal(codes(sr(x[:, :48], amax=amax)), whole[:, :48])
    # The rows of all leading axes count as one sequence.
    split = codes(sr(x.reshape(7, 10, 160), amax=amax))
    np.testing.assert_array_equal(split.reshape(70, 160), whole)


def test_streams_of_the_two_orientations_differ():
    x = np.full((64, 64), 0.25, np.float32)
    x[::16] = x[:, ::16] = 6  # the largest of each block, along either axis
    rows, columns = sr(x, axis=(-1, -2), amax=np.float32(2688))
    inner = np.arange(64) % 16 != 0
    a, b = (codes(q)[inner][:, inner] == 1 for q in (rows, columns))
    for other in (b, b.T):
        agree = np.mean(a == other)
        assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(a.size)


def test_another_key_gives_other_bits_and_the_same_key_the_same():
    x = normal((64, 64))
    assert_same_bits(sr(x).packed, sr(x).packed)
    other = np.mean(codes(sr(x, jax.random.key(12))) != codes(sr(x)))
    assert 0.2 < other < 0.8


def test_key_forms():
    """Typed and raw keys are the same."""
    x = normal((20, 40))
    raw = jax.random.key_data(KEY)
    assert_same_bits(sr(x, raw).packed, sr(x).packed)
    assert_same_bits(jax.jit(sr)(x, KEY).packed, sr(x).packed)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_four_words(impl):
    """Those of jax.random.key, split and fold_in repeat two words, which must not cancel."""
    x = normal((20, 40))
    key = jax.random.key(1, impl=impl)
    assert_same_bits(sr(x, key).packed, sr(x, key).packed)
    keys = [key, jax.random.key(2, impl=impl), jax.random.fold_in(key, 7), *jax.random.split(key)]
    assert len({np.asarray(sr(x, k).packed).tobytes() for k in keys}) == len(keys)


def test_leading_zeros_of_a_key_matter():
    x = normal((20, 64))
    words = [np.array(w, np.uint32) for w in ((0, 5), (5, 0), (0, 0), (2**32 - 1, 2**32 - 1))]
    packed = {np.asarray(sr(x, w).packed).tobytes() for w in words}
    assert len(packed) == 4
    for w in words:
        assert_quantized(sr(x, w), oracle.quantize(x, rounding="sr", key=w))
