"""quantize: bit for bit what the oracle and the golden vectors have."""

import functools
import os

import golden
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import (
    BF16,
    DTYPES,
    assert_quantized,
    assert_same_bits,
    assert_same_tree,
    key_words,
    normal,
    wide,
)

KEY = jax.random.key(7)
VARIANTS = [
    {"axis": axis, "block": block, "rounding": rounding, "hadamard": hadamard}
    for axis in (-1, -2)
    for block in ("1x16", "16x16")
    for rounding in ("rne", "sr")
    for hadamard in (False, True)
]


def variant_id(v):
    return f"{v['axis']}-{v['block']}-{v['rounding']}" + ("-rht" if v["hadamard"] else "")


def key_for(variant):
    return {"key": KEY} if variant["rounding"] == "sr" else {}


def expected(x, variant, amax=None):
    return oracle.quantize(
        x,
        axis=variant["axis"],
        block=variant["block"],
        rounding=variant["rounding"],
        rotate=variant["hadamard"],
        key=key_words(KEY),
        tensor_amax=amax,
    )


@pytest.mark.parametrize(("name", "variant", "axis"), list(golden.cases()))
def test_golden_vectors(name, variant, axis):
    block, _, rotate = variant.partition("_")
    half = "_t" if axis == -2 else ""
    g = golden.load(name)
    q = nvfp4.quantize(golden.tensor(name), axis=axis, block=block, hadamard=bool(rotate))
    np.testing.assert_array_equal(q.linear_scales().view(np.uint8), g[f"{variant}/scale{half}"])
    assert golden.same_codes(np.asarray(q.codes), g[f"{variant}/data{half}"])
    amax = g[f"{variant}/amax_" + ("col" if axis == -2 else "row")][0]
    assert_same_bits(q.global_scale, oracle.global_scale(amax))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant(variant, dtype, instruction_set):
    x = wide((133, 304), DTYPES[dtype])
    assert_quantized(nvfp4.quantize(x, **variant, **key_for(variant)), expected(x, variant))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 16), (5, 17), (16, 15), (33, 80), (129, 31), (2, 3, 20, 40), (3, 1, 70), (1, 300)],
    ids=str,
)
def test_every_shape(variant, shape):
    x = wide(shape)
    assert_quantized(nvfp4.quantize(x, **variant, **key_for(variant)), expected(x, variant))


@pytest.mark.parametrize("scale", [1.0, 1e-39])
@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_many_tasks(block, scale, instruction_set):
    """Larger than any piece that a thread works on, and a multiple of none; subnormals on all."""
    x = (wide((401, 2120)) * np.float32(scale)).astype(BF16)
    variant = {"axis": -1, "block": block, "rounding": "sr", "hadamard": True}
    rows, columns = nvfp4.quantize(
        x, axis=(-1, -2), block=block, rounding="sr", hadamard=True, key=KEY
    )
    assert_quantized(rows, expected(x, variant))
    assert_quantized(columns, expected(x, {**variant, "axis": -2}))
    want = oracle.dequantize(expected(x, variant))
    assert_same_bits(rows.dequantize(jnp.float32, transformed=True)[:, :2120], want)


@pytest.mark.parametrize("first", VARIANTS[:8], ids=variant_id)
@pytest.mark.parametrize("second", VARIANTS[8:], ids=variant_id)
def test_both_orientations_in_one_pass(first, second):
    x = wide((2, 37, 50), BF16)
    both = {name: (first[name], second[name]) for name in ("block", "rounding", "hadamard")}
    key = KEY if "sr" in both["rounding"] else None
    rows, columns = nvfp4.quantize(x, axis=(-1, -2), **both, key=key)
    assert_quantized(rows, expected(x, first))
    assert_quantized(columns, expected(x, second))


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("amax", [0.0, 0.25, 3.0, 1e4, 1e-38, 3e38])
def test_amax_is_an_operand(variant, amax):
    """Smaller than the true one as a delayed amax is, larger, and at the ends of float32."""
    x = normal((20, 48))
    q = nvfp4.quantize(x, **variant, **key_for(variant), amax=jnp.float32(amax))
    assert_quantized(q, expected(x, variant, np.float32(amax)))


@pytest.mark.parametrize("scale", [1e-45, 1e-42, 1e-38, 3e-36, 8e-36, 1e-20, 1e20, 7.6e35, 3e38])
@pytest.mark.parametrize("variant", VARIANTS[:8], ids=variant_id)
def test_ends_of_the_range(scale, variant):
    x = np.clip(normal((20, 48)), -1, 1).astype(np.float64) * scale
    x = x.astype(np.float32)
    x[0, 0] = scale
    if variant["hadamard"] and scale > 1e37:
        x /= np.float32(16)  # the transform itself would overflow
    q, want = nvfp4.quantize(x, **variant, **key_for(variant)), expected(x, variant)
    assert_quantized(q, want)
    values = q.dequantize(jnp.float32, transformed=True)
    assert_same_bits(values, oracle.dequantize(want))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_nan_and_inf_reach_the_global_scale(variant, dtype, bad):
    x = normal((33, 40), DTYPES[dtype])
    x[32, 39] = bad
    q = nvfp4.quantize(x, **variant, **key_for(variant))
    assert np.isnan(q.global_scale)
    assert np.isnan(np.asarray(q.dequantize(jnp.float32))).all()
    assert (np.asarray(q.scales) < 0x7F).all()  # neither NaN nor a sign
    unused = oracle.from_tiles(q.scales, *q.shape[-2:-1], oracle.ceil_div(q.k, 16))
    assert np.count_nonzero(q.scales) == np.count_nonzero(unused)  # the padding is zero


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_jit_equals_eager(variant):
    x = jnp.asarray(wide((40, 70), BF16))
    f = functools.partial(nvfp4.quantize, **variant, **key_for(variant))
    assert_same_tree(jax.jit(f)(x), f(x))


def test_negation_negates_the_codes():
    x = wide((17, 50))
    q, negated = nvfp4.quantize(x), nvfp4.quantize(-x)
    np.testing.assert_array_equal(q.scales, negated.scales)
    codes, other = (oracle.unpack(np.asarray(a.packed))[:, :50] for a in (q, negated))
    np.testing.assert_array_equal(codes ^ 8, other)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_zeros_keep_their_signs(variant, instruction_set):
    x = np.copysign(np.zeros((32, 64), np.float32), normal((32, 64)))
    x[:16, :16] = -0.0
    x[16:, :48] = normal((16, 48)) * (normal((16, 48), seed=1) > 0)
    assert_quantized(nvfp4.quantize(x, **variant, **key_for(variant)), expected(x, variant))


def test_16x16_codes_of_the_transpose_are_the_transpose_of_the_codes():
    x = wide((48, 80))
    rows, columns = nvfp4.quantize(x, axis=(-1, -2), block="16x16")
    codes, transposed = (oracle.unpack(np.asarray(q.codes)) for q in (rows, columns))
    np.testing.assert_array_equal(codes, transposed.T)


def test_quantizing_again_changes_nothing():
    """The values of a quantized tensor are on its grid: the same values come back."""
    x = normal((64, 64))
    values = nvfp4.quantize(x).dequantize(jnp.float32)
    assert_same_bits(
        nvfp4.quantize(values, amax=jnp.max(jnp.abs(x))).dequantize(jnp.float32), values
    )


# --- vmap ---------------------------------------------------------------------------------------


def stack(q, i):
    return jax.tree.map(lambda leaf: leaf[i], q)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("in_axis", [0, 1, -1])
def test_vmap_is_a_loop(variant, in_axis):
    """Each example has a global scale of its own; the key is shared."""
    x = wide((3, 20, 40), BF16)
    x *= np.array([1, 8, 64], BF16)[:, None, None]
    f = functools.partial(nvfp4.quantize, **variant, **key_for(variant))
    q = jax.vmap(f, in_axes=in_axis)(np.moveaxis(x, 0, in_axis))
    for i in range(3):
        assert_quantized(stack(q, i), expected(x[i], variant))


@pytest.mark.parametrize("variant", VARIANTS[1::2], ids=variant_id)
def test_nested_vmap(variant):
    x = wide((2, 3, 20, 40), BF16)
    f = functools.partial(nvfp4.quantize, **variant, **key_for(variant))
    q = jax.vmap(jax.vmap(f, in_axes=1), in_axes=1, out_axes=1)(np.moveaxis(x, (0, 1), (1, 2)))
    q = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), q)
    for i in range(2):
        for j in range(3):
            assert_quantized(stack(stack(q, i), j), expected(x[i, j], variant))


def test_vmap_over_any_subset_of_operands():
    x = wide((3, 20, 40))
    keys = jax.random.split(KEY, 3)
    amax = jnp.array([1.0, 2.0, 50.0])

    def f(x, key, amax):
        return nvfp4.quantize(x, axis=(-1, -2), rounding="sr", key=key, amax=amax)

    for axes in [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0)]:
        operands = [a if i == 0 else a[1] for a, i in zip((x, keys, amax), axes, strict=True)]
        q = jax.vmap(f, in_axes=axes)(*operands)
        for i in range(3):
            one = [a[i] if j == 0 else a for a, j in zip(operands, axes, strict=True)]
            assert_same_tree(stack(q, i), f(*one))


def test_vmap_with_spmd_axis_name():
    x = wide((4, 20, 40))
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        f = jax.jit(jax.vmap(nvfp4.quantize, spmd_axis_name="stage"))
        q = f(x)
    for i in range(4):
        assert_quantized(stack(q, i), oracle.quantize(x[i]))


@pytest.mark.skipif(
    os.environ.get("NVFP4_EXHAUSTIVE") != "1", reason="12 GB of memory: NVFP4_EXHAUSTIVE=1"
)
def test_more_than_two_to_the_31_elements():
    """The last rows of a tensor of more elements than 32 bits count, along either axis."""
    m, k = 798_944, 2704
    assert m * k > 2**31
    part = wide((16, k), BF16)
    x = jnp.tile(part, (m // 16, 1))
    assert x.size == m * k
    amax = oracle.amax(part)
    rows = nvfp4.quantize(x, rounding="sr", key=KEY, amax=amax)
    last = np.asarray(rows.packed[-16:])
    u = oracle.random_bits(16, k // 16, key_words(KEY), 0, first_row=m - 16)
    want = oracle.quantize(part)
    with np.errstate(all="ignore"):
        enc = np.float32(1) / (oracle.E4M3[want.scales] * want.global_scale)
        y = part.astype(np.float32) * np.repeat(np.minimum(enc, oracle.FLT_MAX), 16, -1)
    np.testing.assert_array_equal(last, oracle.pack(oracle.encode_e2m1_sr(y, u)))
    back = rows[-16:].dequantize()
    np.testing.assert_array_equal(
        np.asarray(rows[-16:].linear_scales()).view(np.uint8), want.scales
    )
    assert back.shape == (16, k)
    del rows, back
    columns = nvfp4.quantize(x, axis=-2, amax=amax)
    want = oracle.quantize(part, axis=-2)
    np.testing.assert_array_equal(
        columns.packed, np.tile(want.codes[:, 0::2] | want.codes[:, 1::2] << 4, (1, m // 16))
    )


# --- any input ----------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """Small tensors of any shape, type, orientation, and of extreme values."""
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, k = draw(st.integers(1, 140)), draw(st.integers(1, 70))
    dtype = draw(st.sampled_from(list(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*lead, rows, k)
    kind = draw(st.sampled_from(["normal", "bits", "sparse", "one", "grid"]))
    if kind == "bits":  # any finite bit pattern
        word = np.uint32 if dtype == "f32" else np.uint16
        x = rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True).view(DTYPES[dtype])
        x = np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(DTYPES[dtype])
    else:
        x = rng.normal(size=shape) * 2.0 ** draw(st.integers(-20, 12))
        if kind == "sparse":
            x *= rng.random(shape) < 0.05
        elif kind == "one":
            x[...] = 0
            x.reshape(-1)[rng.integers(x.size)] = draw(st.sampled_from([-1.0, 1e-5, 2.0**12]))
        elif kind == "grid":
            x = rng.choice(oracle.E2M1, shape) * rng.choice([0.25, 1, 4], (*shape[:-1], 1))
        x = x.astype(DTYPES[dtype])
    return x


@hypothesis.given(tensors(), st.sampled_from(VARIANTS), st.integers(0, 2**32 - 1))
def test_any_tensor(x, variant, seed):
    key = jax.random.key(seed)
    keys = {"key": key} if variant["rounding"] == "sr" else {}
    q = nvfp4.quantize(x, **variant, **keys)
    want = oracle.quantize(
        x,
        axis=variant["axis"],
        block=variant["block"],
        rounding=variant["rounding"],
        rotate=variant["hadamard"],
        key=key_words(key),
    )
    if np.isnan(want.global_scale):  # the transform of the largest values overflows
        assert np.isnan(q.global_scale)
    else:
        assert_quantized(q, want)
