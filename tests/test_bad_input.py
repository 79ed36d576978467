"""Errors say which argument, what it has to be, and what came; odd shapes are none."""

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import assert_quantized, assert_same_bits, wide

KEY = jax.random.key(0)
MATRIX = (((1,), (0,)), ((), ()))
X = wide((8, 32))


@pytest.fixture(scope="module")
def q():
    return nvfp4.quantize(X)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_quantize_takes_floats(dtype):
    with pytest.raises(TypeError, match=rf"quantize: x must be float32.*; got {dtype}\. "):
        nvfp4.quantize(jnp.zeros((8, 32), dtype))
    with pytest.raises(TypeError, match=rf"amax: x must be float32.*; got {dtype}\. "):
        nvfp4.amax(jnp.zeros((8, 32), dtype))


def test_float64_is_not_taken_silently():
    with jax.enable_x64(True):
        x = jnp.zeros((8, 32), jnp.float64)
        with pytest.raises(TypeError, match=r"quantize: x must be .*; got float64\. Cast"):
            nvfp4.quantize(x)
        with pytest.raises(TypeError, match=r"dot_general: .*; got float64"):
            nvfp4.dot_general(x, x.T, MATRIX, recipe=nvfp4.recipes.RNE)
        # And under it everything else works as ever.
        assert_quantized(nvfp4.quantize(jnp.asarray(X)), oracle.quantize(X))
        y = nvfp4.dot_general(jnp.asarray(X), jnp.asarray(X.T), MATRIX, recipe=nvfp4.recipes.RNE)
        assert y.dtype == jnp.float32


@pytest.mark.parametrize("shape", [(), (32,)])
def test_quantize_takes_two_axes_or_more(shape):
    with pytest.raises(ValueError, match=r"quantize: x must have two axes.*; got shape \("):
        nvfp4.quantize(jnp.zeros(shape))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": -3}, ValueError, r"axis must be -1, -2 .*; got -3"),
        ({"axis": (-1, -1)}, ValueError, r"axis must be .*; got \(-1, -1\)"),
        ({"axis": "last"}, ValueError, r"axis must be .*; got 'last'"),
        ({"block": "1x32"}, ValueError, r"block must be one of '1x16', '16x16'; got '1x32'"),
        ({"block": 16}, TypeError, r"block must be .*; got 16"),
        ({"rounding": "up"}, ValueError, r"rounding must be one of 'rne', 'sr'; got 'up'"),
        ({"rounding": None}, TypeError, r"rounding must be .*; got None"),
        ({"hadamard": 1}, TypeError, r"hadamard must be .*; got 1"),
        ({"axis": (-1, -2), "block": ("1x16",)}, TypeError, r"block must be .*; got \('1x16',\)"),
        ({"rounding": "sr"}, ValueError, r"key must be given .*; got None\. Pass key="),
        ({"key": KEY}, ValueError, r"key must be None .*rne"),
        (
            {"rounding": "sr", "key": 5},
            TypeError,
            r"key must come from jax.random.key.*; got 5",
        ),
        ({"rounding": "sr", "key": jnp.zeros(2)}, TypeError, r"key must .*; got float32\[2\]"),
        (
            {"rounding": "sr", "key": jnp.zeros(3, jnp.uint32)},
            TypeError,
            r"key must .*; got uint32\[3\]",
        ),
        (
            {"rounding": "sr", "key": jax.random.split(KEY, 3)},
            ValueError,
            r"key must be one key; got .*\(3,\)",
        ),
        ({"amax": jnp.ones(8)}, ValueError, r"amax must be a scalar.*; got .*\(8,\)"),
        (
            {"axis": (-1, -2), "amax": (1.0, 2.0, 3.0)},
            ValueError,
            r"amax must be .* 2 scalars.*; got ",
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_options_of_quantize(options, error, message):
    with pytest.raises(error, match=message):
        nvfp4.quantize(X, **options)


def test_axis_counted_from_the_front_is_the_same_axis():
    assert_quantized(nvfp4.quantize(X, axis=1), oracle.quantize(X))
    assert_quantized(nvfp4.quantize(X, axis=0), oracle.quantize(X, axis=-2))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [((), r"outputs must name .*; got none"), (("rows", "all"), r"outputs must be one of .*'all'")],
)
def test_outputs_of_amax(outputs, message):
    with pytest.raises(ValueError, match=f"amax: {message}"):
        nvfp4.amax(X, outputs)


def test_dequantize_dtype(q):
    with pytest.raises(TypeError, match=r"dequantize: dtype must be float32.*; got int32"):
        q.dequantize(jnp.int32)


def test_operands_of_matmul(q):
    def fails(error, message, a=q, b=q, **kw):
        with pytest.raises(error, match=f"matmul: {message}"):
            nvfp4.matmul(a, b, **{"out_dtype": jnp.float32, **kw})

    fails(
        ValueError, r"a and b must have the same last axis, K; got .*axis=-2", b=nvfp4.quantize(X.T)
    )
    fails(ValueError, r"a and b must both have the Hadamard", b=nvfp4.quantize(X, hadamard=True))
    fails(TypeError, r"out_dtype must be float32.*; got int8", out_dtype=jnp.int8)
    fails(ValueError, r"bias must be .*\(8,\).*; got float32\[7\]", bias=jnp.zeros(7))
    fails(ValueError, r"bias must be .*; got int32\[8\]", bias=jnp.zeros(8, jnp.int32))
    fails(ValueError, r"accumulate must be .*; got float32\[8, 7\]", accumulate=jnp.zeros((8, 7)))
    fails(
        ValueError,
        r"accumulate must be float32.*; got bfloat16",
        accumulate=jnp.zeros((8, 8), jnp.bfloat16),
    )
    fails(
        ValueError,
        r"the leading axes of a and b must broadcast; got",
        a=nvfp4.quantize(wide((2, 8, 32))),
        b=nvfp4.quantize(wide((3, 8, 32))),
    )


def test_operands_of_dot_general():
    def fails(error, message, x=X, w=X.T, dims=MATRIX, recipe=nvfp4.recipes.RNE, key=None, **kw):
        with pytest.raises(error, match=f"dot_general: {message}"):
            nvfp4.dot_general(x, w, dims, recipe=recipe, key=key, **kw)

    fails(TypeError, r"x must .*; got int32", x=jnp.zeros((8, 32), jnp.int32))
    fails(TypeError, r"w must .*; got complex64", w=jnp.zeros((32, 8), jnp.complex64))
    fails(
        ValueError,
        r"the contracting axes of x and w must .*; got \[32\] .* and \[33\]",
        w=jnp.zeros((33, 8)),
    )
    axes = r"the x contracting axes must be different axes of an array of 2 axes; got "
    fails(ValueError, axes + r"\(2,\)", dims=(((2,), (0,)), ((), ())))
    fails(ValueError, axes + r"\(1, 1\)", dims=(((1, 1), (0, 1)), ((), ())))
    fails(ValueError, axes + r"\(-3,\)", dims=(((-3,), (0,)), ((), ())))
    fails(ValueError, r".*batch", dims=(((1,), (0,)), ((0,), ())))
    fails(
        ValueError, r"an axis of x must be contracting or batch", dims=(((1,), (0,)), ((1,), (0,)))
    )
    fails(TypeError, r"the x contracting axes must be a sequence.*; got 1", dims=((1, 0), ((), ())))
    fails((TypeError, ValueError), r"dimension_numbers must be .*; got", dims="ij,jk->ik")
    fails((TypeError, ValueError), r"dimension_numbers must be .*; got", dims=None)
    fails((TypeError, ValueError), r"dimension_numbers must be .*; got", dims=((1,), (0,)))
    fails(TypeError, r"recipe must be .*; got 'nvidia'", recipe="nvidia")
    fails(
        TypeError, r"key must come from jax.random.key.*; got", recipe=nvfp4.recipes.NVIDIA, key=3
    )
    fails(
        TypeError,
        r"preferred_element_type must be .*; got int32",
        preferred_element_type=jnp.int32,
    )


def test_a_recipe_that_draws_needs_a_key_to_be_differentiated():
    def f(x):
        return jnp.sum(nvfp4.dot_general(x, X.T, MATRIX, recipe=nvfp4.recipes.NVIDIA))

    with pytest.raises(ValueError, match=r"dot_general: key must be .*got None"):
        jax.grad(f)(X)


def test_a_recipe_that_draws_in_the_forward_pass_needs_a_key():
    recipe = nvfp4.Recipe(x_fprop=nvfp4.Format(rounding="sr"))
    with pytest.raises(ValueError, match=r"dot_general: key must be given .*; got None"):
        nvfp4.dot_general(X, X.T, MATRIX, recipe=recipe)


def test_recipes_that_make_no_sense():
    sr, rht = nvfp4.Format(rounding="sr"), nvfp4.Format(hadamard=True)
    with pytest.raises(ValueError, match=r"Recipe: x_wgrad and g_wgrad must both have hadamard"):
        nvfp4.Recipe(x_wgrad=rht)
    with pytest.raises(TypeError, match=r"Recipe: x_fprop must be a Format; got '1x16'"):
        nvfp4.Recipe(x_fprop="1x16")
    with pytest.raises(ValueError, match=r"Recipe: backward must be one of .*; got 'fp8'"):
        nvfp4.Recipe(backward="fp8")
    with pytest.raises(ValueError, match=r"Format: block must be one of .*; got '8x8'"):
        nvfp4.Format(block="8x8")
    assert nvfp4.Recipe(g_dgrad=sr).needs_key


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ij,jk->i", r"a letter that the result lacks must be in both operands; got 'k'"),
        ("ij,jk->ikk", r"a letter must stand once in a term; got 'ikk'"),
        ("ii,ij->j", r"a letter must stand once in a term; got 'ii'"),
        ("ij,jk->ikl", r"each letter of the result must be in an operand; got 'l'"),
        ("ijk,kl->ijl", r"'ijk' .* must fit an operand of 2 axes"),
        ("i1,1k->ik", r"subscripts must be letters"),
        ("ij->ij", r"subscripts must be of the form"),
        ("ij,jk", r"subscripts must be of the form"),
        ("ij,jk,kl->il", r"subscripts must be of the form"),
        (3, r"subscripts must be of the form .*; got 3"),
    ],
)
def test_subscripts_that_are_no_product(spec, message):
    with pytest.raises(ValueError, match=rf"einsum: {message}"):
        nvfp4.einsum(spec, X[:, :8], X[:8, :8], recipe=nvfp4.recipes.RNE)


@pytest.mark.parametrize("shapes", [((32,), (32, 8)), ((8, 32), (32,)), ((2, 8, 32), (3, 32, 8))])
def test_matmul_of_arrays_that_it_does_not_take(shapes):
    x, w = map(jnp.zeros, shapes)
    with pytest.raises(ValueError, match=r"matmul: .* must .*; got shapes "):
        nvfp4.matmul(x, w, recipe=nvfp4.recipes.RNE)


def test_matmul_of_an_array_and_a_quantized_one(q):
    with pytest.raises(TypeError, match=r"matmul: x and w must both be.*; got .*NVFP4Array"):
        nvfp4.matmul(X, q)


def test_quantize_has_no_silent_derivative():
    """An error that says what to use, instead of gradients that are zero."""
    with pytest.raises(NotImplementedError, match=r"quantize: x must not be differentiated.*; use"):
        jax.grad(lambda x: jnp.sum(nvfp4.quantize(x).dequantize()))(X)
    with pytest.raises(NotImplementedError, match=r"amax: x must not be differentiated"):
        jax.grad(lambda x: nvfp4.amax(x)[0])(X)
    # Nor is there an error where nothing is differentiated.
    jax.grad(lambda x, w: jnp.sum(nvfp4.quantize(w).dequantize() * x))(X, X)


def test_errors_come_while_tracing():
    with pytest.raises(TypeError, match="quantize: x must be float32"):
        jax.jit(nvfp4.quantize).lower(jnp.zeros((8, 32), jnp.int32))
    with pytest.raises(TypeError, match="quantize: x must be float32"):
        jax.eval_shape(nvfp4.quantize, jax.ShapeDtypeStruct((8, 32), jnp.int8))


def test_leaves_of_an_array_that_do_not_fit_are_an_error_not_a_crash(q):
    """Put together by hand: memory is never read out of bounds."""
    short = nvfp4.NVFP4Array(
        q.packed,
        q.scales,
        q.global_scale,
        k=4096,
        block="1x16",
        hadamard=False,
        dtype=jnp.float32,
    )
    for op, f in (
        ("dequantize", short.dequantize),
        ("matmul", lambda: nvfp4.matmul(short, q, out_dtype=jnp.float32)),
        ("matmul", lambda: nvfp4.matmul(q, short, out_dtype=jnp.float32)),
    ):
        with pytest.raises(ValueError, match=rf"{op}: an NVFP4Array with k=4096 must have packed"):
            f()
    whole = {"packed": q.packed, "scales": q.scales, "global_scale": q.global_scale}
    for name, leaf in (
        ("packed", q.packed.astype(jnp.int8)),
        ("scales", q.scales[..., :256]),
        ("scales", q.linear_scales()),
        ("global_scale", jnp.ones(3)),
    ):
        bad = nvfp4.NVFP4Array(
            **{**whole, name: leaf}, k=q.k, block=q.block, hadamard=False, dtype=q.dtype
        )
        with pytest.raises(ValueError, match=f"dequantize: an NVFP4Array .* must have {name}"):
            bad.dequantize()


@pytest.mark.parametrize("shape", [(0, 32), (8, 0), (0, 0), (2, 0, 32), (0, 8, 32)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_empty_tensors_are_quantized(shape, axis):
    x = np.zeros(shape, np.float32)
    q = nvfp4.quantize(x, axis=axis)
    assert_quantized(q, oracle.quantize(x, axis=axis))
    assert_same_bits(q.dequantize(), x if axis == -1 else np.swapaxes(x, -1, -2))


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1.1754942e-38])
@pytest.mark.parametrize("jit", [False, True])
def test_subnormals_are_numbers(value, jit):
    x = np.full((16, 32), value, np.float32)
    x[0, 0] = -value
    f = jax.jit(nvfp4.quantize) if jit else nvfp4.quantize
    q = f(x)
    assert_quantized(q, oracle.quantize(x))
    assert_same_bits(q.dequantize(), oracle.dequantize(oracle.quantize(x)))
    other = np.full((16, 32), 1e20, np.float32)
    y = nvfp4.matmul(q, f(other), out_dtype=jnp.float32)
    assert_same_bits(y, oracle.matmul(oracle.quantize(x), oracle.quantize(other)))
    # Far below float32's normal numbers the encode factor is clamped, and codes are 0.
    assert np.asarray(y).any() == (value > 1e-39)


@pytest.mark.parametrize("shape", [(0, 128, 64), (3, 0, 64), (3, 128, 0), (0, 128, 0)], ids=str)
def test_empty_axes_of_tokens(shape):
    """Batch and sequence, which are rows of one matrix."""
    x, w = jnp.ones(shape), jnp.ones((shape[-1], 16))
    y, pull = jax.vjp(lambda x, w: nvfp4.matmul(x, w, recipe=nvfp4.recipes.RNE), x, w)
    dx, dw = pull(jnp.ones_like(y))
    assert (y.shape, dx.shape, dw.shape) == ((*shape[:-1], 16), x.shape, w.shape)
    assert not np.asarray(y).any() and not np.asarray(dw).any()


def test_what_is_no_vector_of_columns():
    q = nvfp4.quantize(jnp.ones((4, 32)))
    for name in ("bias", "column_scale"):
        with pytest.raises(TypeError, match=rf"matmul: {name} must be .* of shape \(4,\).*got 'x'"):
            nvfp4.matmul(q, q, **{name: "x"})


def test_amax_axes_outside_of_a_shard_map():
    recipe = nvfp4.Recipe(amax_axes=("d",))
    with pytest.raises(ValueError, match=r"amax_axes must name manual axes of a jax\.shard_map"):
        nvfp4.matmul(jnp.ones((4, 32)), jnp.ones((32, 8)), recipe=recipe)


def test_a_quantized_weight_that_is_not_of_w():
    x, w = jnp.ones((4, 32)), jnp.ones((32, 16))
    qw = nvfp4.quantize_weight(w)
    with pytest.raises(
        TypeError, match="quantized must be a QuantizedWeight of the array w; got ArrayImpl"
    ):
        nvfp4.matmul(x, w, quantized=w, recipe=nvfp4.recipes.RNE)
    with pytest.raises(TypeError, match="for QuantizedWeight"):
        nvfp4.matmul(x, qw, quantized=qw, recipe=nvfp4.recipes.RNE)
    with pytest.raises(
        ValueError, match=r"quantized must be made of w, of shape \(32, 8\); got one of \(32, 16\)"
    ):
        nvfp4.matmul(x, jnp.ones((32, 8)), quantized=qw, recipe=nvfp4.recipes.RNE)
    other = nvfp4.quantize_weight(w, contracting=1)
    with pytest.raises(ValueError, match=r"w was quantized for contracting axes \(1,\)"):
        nvfp4.matmul(x, w, quantized=other, recipe=nvfp4.recipes.RNE)
    with pytest.raises(TypeError, match="quantized must be None for an x that is quantized"):
        nvfp4.matmul(nvfp4.quantize(x), nvfp4.quantize(w, axis=-2), quantized=qw)
