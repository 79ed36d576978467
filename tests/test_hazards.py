"""What went wrong in public NVFP4 libraries, one test for each, numbered as in their list."""

import functools

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import (
    BF16,
    assert_quantized,
    assert_same_bits,
    assert_same_tree,
    normal,
    wide,
)
from jax_nvfp4_ops import _cuda, _primitive
from test_dequantize import random_quantized

KEY = jax.random.key(1)
MATRIX = (((1,), (0,)), ((), ()))
NVIDIA, RNE = nvfp4.recipes.NVIDIA, nvfp4.recipes.RNE


def dot(x, w, key=KEY, recipe=NVIDIA):
    return nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key if recipe.needs_key else None)


def test_01_tiled_scales_have_their_padded_size_and_come_back():
    x = wide((33, 80))
    q = nvfp4.quantize(x)
    assert q.scales.size == 128 * 8
    np.testing.assert_array_equal(
        np.asarray(q.linear_scales()).view(np.uint8), oracle.quantize(x).scales
    )


@pytest.mark.parametrize("m", [1, 5, 127, 129])
def test_02_padding_of_scales_is_zero(m):
    """Memory that held 0xFF before is reused; test_memory.py poisons it for certain."""
    x = wide((m, 80))
    for _ in range(3):
        jax.block_until_ready(jnp.full((256 * 8 * 512,), 255, jnp.uint8))
        q = nvfp4.quantize(x)
        assert_quantized(q, oracle.quantize(x))  # the oracle's padding is zero
    y = nvfp4.matmul(q, nvfp4.quantize(wide((m, 80), seed=1)), out_dtype=jnp.float32)
    assert np.isfinite(y).all()


@pytest.mark.parametrize("m", [1, 5, 32, 127, 128, 129])
def test_03_rows_that_do_not_fill_a_tile(m):
    """Sizes; the memory checker runs in test_memory.py."""
    x = wide((m, 11008), BF16)
    q = nvfp4.quantize(x)
    assert q.packed.shape == (m, 5504)
    assert q.scales.shape == (oracle.ceil_div(m, 128), 172, 512)
    assert_quantized(q, oracle.quantize(x))


def test_04_n_and_k_that_are_no_multiple_of_32():
    x, w = wide((33, 464)), wide((16, 464), seed=1)
    y = nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w), out_dtype=jnp.float32)
    assert_same_bits(y, oracle.matmul(oracle.quantize(x), oracle.quantize(w)))


def test_05_an_amax_of_zero():
    zeros = jnp.zeros((16, 64))
    q = nvfp4.quantize(zeros)
    assert q.global_scale == 1
    assert_same_bits(q.dequantize(), zeros)
    y, pull = jax.vjp(dot, zeros, normal((64, 8)))
    dx, dw = pull(jnp.ones_like(y))
    assert not np.asarray(y).any()
    assert np.isfinite(dx).all()
    assert not np.asarray(dw).any()
    x = wide((16, 64))
    x[3] = 0  # blocks of zeros in a tensor that is not
    assert_quantized(nvfp4.quantize(x), oracle.quantize(x))
    assert not np.asarray(nvfp4.quantize(x).dequantize())[3].any()


def test_06_a_stored_global_scale_of_zero():
    array, _ = random_quantized((16, 64), global_scale=0.0)
    assert not np.asarray(array.dequantize()).any()
    other, _ = random_quantized((8, 64), 1)
    y = np.asarray(nvfp4.matmul(array, other, out_dtype=jnp.float32))
    assert not y.any()  # zeros: neither Inf nor NaN


def test_07_amax_is_of_magnitudes():
    x = -np.abs(wide((16, 64)))
    q = nvfp4.quantize(x)
    assert_same_bits(q.dequantize(), -np.asarray(nvfp4.quantize(-x).dequantize()))
    assert np.isclose(np.asarray(q.dequantize()).min(), x.min(), rtol=0.07)


def test_08_the_global_scale_multiplies():
    """Amax 42 makes the encode scale 64: codes decode the same by either convention, exactly."""
    x = np.clip(wide((16, 64)), -42, 42)
    x[0, 0] = 42
    q = nvfp4.quantize(x)
    assert q.global_scale == np.float32(1 / 64)
    codes = oracle.E2M1[oracle.unpack(np.asarray(q.packed))][:, :64]
    scales = np.repeat(np.asarray(q.linear_scales(), np.float32), 16, -1)
    assert_same_bits(q.dequantize(), codes * (scales / np.float32(64)))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_09_the_global_scale_is_not_dropped(scale):
    x = normal((64, 64)) * np.float32(scale)
    q = nvfp4.quantize(x)
    error = np.linalg.norm(np.asarray(q.dequantize()) - x) / np.linalg.norm(x)
    assert error < 0.105  # 0.095 for normal values


def test_10_a_factor_of_each_column():
    qx, qw = nvfp4.quantize(wide((33, 80))), nvfp4.quantize(wide((24, 80), seed=1))
    scale, bias = normal((24,), seed=2), normal((24,), seed=3)
    accumulate = normal((33, 24), BF16, 4)
    y = np.asarray(nvfp4.matmul(qx, qw, out_dtype=jnp.float32))
    got = nvfp4.matmul(qx, qw, out_dtype=jnp.float32, column_scale=scale)
    assert_same_bits(got, y * scale)
    got = nvfp4.matmul(qx, qw, out_dtype=BF16, column_scale=scale, bias=bias, accumulate=accumulate)
    # Rounded once.
    assert_same_bits(got, (y * scale + bias + accumulate.astype(np.float32)).astype(BF16))
    for bad in (np.ones(23, np.float32), np.arange(24), np.float32(2)):
        with pytest.raises(ValueError, match=r"matmul: column_scale must be .* of shape \(24,\)"):
            nvfp4.matmul(qx, qw, column_scale=bad)
    with pytest.raises(TypeError, match="column_scale must be None for arrays"):
        nvfp4.matmul(wide((4, 32)), wide((32, 4)), column_scale=scale)


@pytest.mark.parametrize(
    "view", [lambda x: x[:, ::2], lambda x: x.T, lambda x: x[3:20, 5:45], lambda x: x[::-1, ::-1]]
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_11_a_strided_view_is_read_as_its_copy(view, axis):
    x = wide((40, 64), BF16)
    want = nvfp4.quantize(np.ascontiguousarray(view(x)), axis=axis)
    assert_quantized(want, oracle.quantize(view(x), axis=axis))
    assert_same_tree(nvfp4.quantize(view(x), axis=axis), want)  # a NumPy view
    assert_same_tree(nvfp4.quantize(view(jnp.asarray(x)), axis=axis), want)
    assert_same_tree(jax.jit(lambda x: nvfp4.quantize(view(x), axis=axis))(x), want)


def test_12_shapes_of_more_than_31_bits():
    """Nothing is allocated; the offsets themselves are in test_core.py."""
    for m, k in [(798_916, 2688), (2**31 // 2688 + 1, 2688), (2**20, 2**13), (1, 2**33)]:
        x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        rows, columns = jax.eval_shape(lambda x: nvfp4.quantize(x, axis=(-1, -2)), x)
        assert rows.packed.shape == (m, oracle.ceil_div(k, 32) * 16)
        assert columns.packed.shape == (k, oracle.ceil_div(m, 32) * 16)
        tiles = (oracle.ceil_div(k, 128), oracle.ceil_div(oracle.ceil_div(m, 16), 4), 512)
        assert columns.scales.shape == tiles


@pytest.mark.parametrize("shape", [(0, 32, 8), (16, 0, 8), (16, 32, 0)], ids=str)
def test_13_empty_axes(shape):
    m, k, n = shape
    for recipe in (NVIDIA, RNE):
        y, pull = jax.vjp(
            lambda x, w, r=recipe: dot(x, w, recipe=r), jnp.ones((m, k)), jnp.ones((k, n))
        )
        dx, dw = pull(jnp.ones((m, n)))
        assert y.shape == (m, n)
        assert dx.shape == (m, k)
        assert dw.shape == (k, n)
        assert not np.asarray(y).any() or k
        assert not np.asarray(dx).any()
        assert not np.asarray(dw).any()


def test_14_codes_come_from_the_reciprocal():
    """A block scale of 7 * 2^-9 and a value that is 1.75 times it by the reciprocal, and less by
    division: the tie goes to 2, code 4."""
    x = np.zeros((1, 16), np.float32)
    x[0, :2] = 6 * 7 / 512, 0.02392577938735485
    q = nvfp4.quantize(x, amax=np.float32(2688))
    assert np.asarray(q.linear_scales()).view(np.uint8)[0, 0] == 7
    assert int(q.packed[0, 0]) == 4 << 4 | 7


def test_15_ties_go_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    x = np.zeros((2, 16), np.float32)
    x[0, :7], x[1, :7] = ties, -ties
    x[:, 15] = 6
    q = nvfp4.quantize(x, amax=np.float32(2688))
    values = np.asarray(q.dequantize())
    np.testing.assert_array_equal(values[0, :7], [0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(values[1, :7], [0, -1, -1, -2, -2, -4, -4])


def test_15_codes_come_from_the_rounded_scale():
    """A block amax of 6.36 gives a scale of 1, not 1.06, and so 3.6 rounds to 4, not to 3."""
    x = np.zeros((1, 16), np.float32)
    x[0, :2] = 6.36, 3.6
    q = nvfp4.quantize(x, amax=np.float32(2688))
    np.testing.assert_array_equal(np.asarray(q.dequantize())[0, :2], [6, 4])


def test_16_stochastic_rounding_rounds_up_too(instruction_set):
    x = np.array([[6, 0.25, -0.25, 0.1, 0.4, 0.75, 1.1, 1.3, 2.5, -2.2, 3.1, 3.9, 4.5, 5.5, 0, 1]])
    x = x.astype(np.float32)
    keys = jax.random.split(KEY, 10_000)

    def one(key):
        return nvfp4.quantize(x, rounding="sr", key=key, amax=jnp.float32(2688)).dequantize()

    mean = np.asarray(jax.jit(jax.vmap(one))(keys), np.float64).mean(0)
    step = np.where(np.abs(x) < 2, 0.5, np.where(np.abs(x) < 4, 1, 2))
    assert (np.abs(mean - x) <= step * (5 * 0.5 / 100 + 2.0**-10)).all()


def test_17_a_product_is_compared_with_that_of_the_raw_data():
    x, w = normal((64, 128)), normal((48, 128), seed=1)
    y = np.asarray(nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w), out_dtype=jnp.float32))
    exact = x @ w.T
    assert np.count_nonzero(y) == y.size
    assert np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.15  # sqrt(2) * 0.095 and noise


def test_18_random_bits_do_not_depend_on_devices():
    x = jnp.asarray(wide((64, 48)))
    f = jax.jit(lambda x, key: nvfp4.quantize(x, axis=(-1, -2), rounding="sr", key=key))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for spec in [("data",), (None, "data")]:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        got = f(jax.device_put(x, sharding), jax.device_put(KEY, replicated))
        assert_same_tree(got, f(x, KEY))


def test_23_large_values_are_not_clipped():
    x = wide((16, 64))
    x[0, 0] = 1e5
    q = nvfp4.quantize(x)
    assert_quantized(q, oracle.quantize(x))
    np.testing.assert_allclose(np.asarray(q.dequantize())[0, 0], 1e5, rtol=1e-6)


@pytest.mark.parametrize("ratio", [28672, 57344])
def test_23_blocks_of_very_different_sizes(ratio):
    """448 * 64 apart the small block has the smallest normal scale, twice that a subnormal one."""
    x = np.zeros((1, 32), np.float32)
    x[0, :16], x[0, 16:] = 2688, 2688 / ratio
    q = nvfp4.quantize(x)
    assert_quantized(q, oracle.quantize(x))
    assert_same_bits(q.dequantize(), x)


def test_24_leading_axes_are_rows():
    x = wide((2, 3, 64))
    flat = nvfp4.quantize(x.reshape(6, 64))
    q = nvfp4.quantize(x)
    assert_same_bits(np.asarray(q.packed).reshape(6, 32), flat.packed)
    assert_same_bits(q.global_scale, flat.global_scale)
    assert_same_bits(np.asarray(q.linear_scales()).reshape(6, 4), flat.linear_scales())
    w = wide((64, 8), seed=1)
    dims = (((2,), (0,)), ((), ()))
    y = nvfp4.dot_general(x, w, dims, recipe=NVIDIA, key=KEY)
    assert_same_bits(np.asarray(y).reshape(6, 8), dot(x.reshape(6, 64), w))


def test_24_statistics_do_not_count_padding():
    q = nvfp4.quantize(np.ones((5, 17), np.float32))
    s = q.statistics()
    assert s["zero"] == 0
    assert s["saturated"] == 1
    assert s["underflowed"] == 0


@pytest.mark.parametrize("k", [1, 7, 15, 17, 31, 33, 65])
@pytest.mark.parametrize("axis", [-1, -2])
def test_26_an_odd_axis_gives_the_right_answer(k, axis):
    x, w = wide((9, k)), wide((5, k), seed=1)
    x, w = (x, w) if axis == -1 else (x.T, w.T)
    qx, qw = nvfp4.quantize(x, axis=axis), nvfp4.quantize(w, axis=axis)
    assert_quantized(qx, oracle.quantize(x, axis=axis))
    want = oracle.matmul(oracle.quantize(x, axis=axis), oracle.quantize(w, axis=axis))
    assert_same_bits(nvfp4.matmul(qx, qw, out_dtype=jnp.float32), want)


def test_26_f32_equals_bf16_where_that_is_exact():
    x = wide((33, 80), BF16)
    for options in (
        {},
        {"axis": -2, "hadamard": True},
        {"block": "16x16", "rounding": "sr", "key": KEY},
    ):
        a, b = nvfp4.quantize(x, **options), nvfp4.quantize(x.astype(np.float32), **options)
        for leaf, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert_same_bits(leaf, other)


def test_27_mixed_types_equal_the_explicit_cast():
    x, w = wide((33, 40), BF16), wide((40, 17), seed=1)
    assert_same_bits(dot(x, w), dot(x.astype(np.float32), w))
    qx, qw = nvfp4.quantize(x), nvfp4.quantize(w, axis=-2)
    for bias in (normal((17,)), normal((17,), BF16), normal((17,), np.float16)):
        for out in (jnp.float32, jnp.bfloat16):
            got = nvfp4.matmul(qx, qw, out_dtype=out, bias=bias)
            want = nvfp4.matmul(qx, qw, out_dtype=out, bias=bias.astype(np.float32))
            assert_same_bits(got, want)


def test_28_jit_does_not_remove_the_round_trip():
    x = jnp.asarray(wide((33, 80)))

    def round_trip(x):
        return nvfp4.quantize(x).dequantize(jnp.float32)

    assert_same_bits(jax.jit(round_trip)(x), round_trip(x))
    assert (np.asarray(jax.jit(round_trip)(x)) != np.asarray(x)).any()

    def by_view(x):
        q = nvfp4.quantize(x)
        return q.as_f4().astype(jnp.float32), q.linear_scales().astype(jnp.float32)

    assert_same_tree(jax.jit(by_view)(x), by_view(x))


def test_30_a_platform_without_targets_is_named():
    """While lowering, not by XLA when the program runs."""
    f = jax.jit(lambda x: nvfp4.quantize(x))
    with pytest.raises(NotImplementedError, match=r"nvfp4_amax runs on cpu and cuda; got tpu"):
        f.trace(jnp.ones((16, 32))).lower(lowering_platforms=("tpu",))


def test_30_a_build_without_cuda_says_so(monkeypatch):
    f = jax.jit(lambda x: nvfp4.quantize(x))
    monkeypatch.setattr(_primitive, "_BUILT_FOR", ("cpu",))
    # For another machine, with another build: exporting is not running.
    f.trace(jnp.ones((16, 32))).lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(_cuda, "is_here", lambda: True)
    with pytest.raises(
        NotImplementedError, match=r"this build of jax_nvfp4_ops is for cpu alone.*nvcc"
    ):
        f.trace(jnp.ones((17, 32))).lower(lowering_platforms=("cuda",))


# --- 31: what is quantized how often ------------------------------------------------------------


def calls(f, *args, op="quantize"):
    """How often the compiled program calls an op."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return text.count(f'custom_call_target="nvfp4_{op}_v1"')


def training_operands():
    x, w, g = (wide(s, BF16, i) for i, s in enumerate([(64, 48), (48, 32), (64, 32)]))
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(g)


def gradients(x, w, g, key, wrap=lambda f: f):
    y, pull = jax.vjp(wrap(lambda x, w: dot(x, w, key)), x, w)
    return y, *pull(g)


def test_31_each_tensor_is_quantized_once():
    """x, w and g, each along both axes in one pass; three products."""
    args = *training_operands(), KEY
    assert calls(gradients, *args) == 3
    assert calls(gradients, *args, op="matmul") == 3
    assert calls(gradients, *args, op="dequantize") == 0


def traced(f, *args, op="quantize"):
    """How often the traced program has an op, before XLA merges what is alike."""

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            total += equation.primitive.name == f"nvfp4_{op}"
            for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
                inner = getattr(value, "jaxpr", value)  # of a closed one
                total += count(inner) if hasattr(inner, "eqns") else 0
        return total

    return count(jax.make_jaxpr(f)(*args).jaxpr)


@pytest.mark.parametrize(("policy", "quantized", "multiplied"), [("ours", 3, 3), ("none", 5, 3)])
def test_31_remat_with_our_policy_quantizes_nothing_twice(policy, quantized, multiplied):
    args = *training_operands(), KEY
    options = {"policy": nvfp4.checkpoint_policy} if policy == "ours" else {}

    def rematerialized(*args):
        return gradients(*args, wrap=lambda f: jax.checkpoint(f, **options))

    assert traced(rematerialized, *args) == quantized
    assert traced(rematerialized, *args, op="matmul") == multiplied
    assert traced(gradients, *args) == 3


def test_31_our_policy_keeps_the_result_too():
    """With a following op that needs y, the product is not computed twice either."""
    args = *training_operands(), KEY

    def f(x, w, g, key, policy):
        def layer(x, w):
            return jnp.tanh(dot(x, w, key))

        y, pull = jax.vjp(jax.checkpoint(layer, policy=policy), x, w)
        return y, *pull(g)

    ours = functools.partial(f, policy=nvfp4.checkpoint_policy)
    assert traced(ours, *args, op="matmul") == 3
    assert traced(functools.partial(f, policy=None), *args, op="matmul") == 4


def test_31_residuals_are_the_quantized_tensors():
    x, w, _ = training_operands()
    _, pull = jax.vjp(lambda x, w: dot(x, w), x, w)
    residuals = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes")]
    assert all(r.dtype != x.dtype for r in residuals)
    # Codes of x[48, 64] and w[48, 32] and their scales in whole tiles, of which these are few.
    codes = (x.size + w.size) // 2
    scales = (1 + 1) * 512  # ceil(48 / 128) * ceil(64 / 64), the same for 32
    assert sum(r.nbytes for r in residuals) <= codes + scales + 64


def test_31_projections_of_one_input_share_its_quantization():
    """q, k and v: XLA merges the three quantizations of x; only the weights differ."""
    x, w, _ = training_operands()

    def three(x, a, b, c):
        return [dot(x, w) for w in (a, b, c)]

    assert calls(three, x, w, w + 1, w + 2) == 4


def test_32_a_shape_error_is_raised_while_tracing_and_names_the_axis():
    with pytest.raises((ValueError, TypeError), match=r"(?s)dot_general: .*(40|41).*(41|40)"):
        jax.jit(lambda x, w: dot(x, w)).lower(jnp.ones((8, 40)), jnp.ones((41, 8)))
    a, b = nvfp4.quantize(jnp.ones((8, 40))), nvfp4.quantize(jnp.ones((8, 41)))
    with pytest.raises(ValueError, match=r"matmul: .*last axis.*\(8, 40\) and \(8, 41\)"):
        nvfp4.matmul(a, b, out_dtype=jnp.float32)


def test_33_vmap_with_spmd_axis_name():
    """The stages of a pipeline: a stack of layers under vmap, one a device."""
    x, w = wide((4, 8, 32)), wide((4, 32, 16), seed=1)
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stage"))

    def stage(x, w):
        y, pull = jax.vjp(dot, x, w)
        return y, *pull(y)

    with jax.set_mesh(mesh):
        f = jax.jit(jax.vmap(stage, spmd_axis_name="stage"))
        got = f(jax.device_put(x, sharding), jax.device_put(w, sharding))
    for i in range(4):
        assert_same_tree(jax.tree.map(lambda leaf, i=i: leaf[i], got), stage(x[i], w[i]))
