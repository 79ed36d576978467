"""NVFP4Array: a pytree with a logical shape, indexing, views, and a description of itself."""

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import ml_dtypes
import numpy as np
import oracle
import pytest
from helpers import BF16, assert_quantized, assert_same_bits, assert_same_tree, normal, wide
from test_dequantize import random_quantized


@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (33, 80), (2, 3, 20, 41), (0, 16), (4, 0)])
def test_shapes_and_views(shape):
    x = wide(shape, BF16)
    q, want = nvfp4.quantize(x), oracle.quantize(x)
    *lead, k = shape
    assert q.shape == shape
    assert q.ndim == len(shape)
    assert q.size == np.prod(shape)
    assert q.dtype == jnp.bfloat16
    assert q.block == "1x16"
    assert not q.hadamard
    assert q.k == k
    assert q.nbytes == q.packed.size + q.scales.size + 4
    assert q.codes.dtype == jnp.uint8
    assert q.codes.shape == (*lead, oracle.ceil_div(k, 2))
    np.testing.assert_array_equal(oracle.unpack(q.codes)[..., :k], want.codes[..., :k])
    scales = q.linear_scales()
    assert scales.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), want.scales)
    f4 = q.as_f4()
    assert f4.dtype == jnp.float4_e2m1fn
    assert f4.shape == shape
    np.testing.assert_array_equal(
        np.asarray(f4).astype(np.float32), oracle.E2M1[want.codes[..., :k]]
    )


def test_it_costs_four_and_a_half_bits_a_value():
    q = nvfp4.quantize(jnp.ones((256, 512)))
    assert q.nbytes == 256 * 512 // 2 + 256 * 512 // 16 + 4


def test_axis_minus_two_is_the_transpose():
    x = wide((2, 20, 48))
    q = nvfp4.quantize(x, axis=-2)
    assert q.shape == (2, 48, 20)
    assert q.k == 20
    assert_quantized(q, oracle.quantize(np.swapaxes(x, -1, -2)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_astype_is_dequantize(dtype):
    array, q = random_quantized((20, 40))
    assert_same_bits(array.astype(dtype), oracle.dequantize(q, dtype))
    assert array.dequantize().dtype == array.dtype


@pytest.mark.parametrize("k", [16, 20, 100])
def test_transformed_values_come_back(k):
    """`dequantize` undoes the transform; `transformed=True` gives what is stored."""
    x = normal((30, k))
    q = nvfp4.quantize(x, hadamard=True)
    want = oracle.quantize(x, rotate=True)
    padded = oracle.Quantized(want.codes, want.scales, want.global_scale, want.codes.shape[-1])
    stored = oracle.dequantize(padded)
    assert_same_bits(q.dequantize(jnp.float32, transformed=True), stored)
    inverse = oracle.hadamard_matrix() / 4 * oracle.SIGNS
    back = (stored.reshape(30, -1, 16).astype(np.float64) @ inverse).reshape(30, -1)[:, :k]
    # A float32 sum of 16 terms, in any order.
    bound = 16 * 2.0**-24 * np.abs(stored).max() * 16
    np.testing.assert_allclose(q.dequantize(jnp.float32), back, rtol=0, atol=bound)
    error = np.linalg.norm(np.asarray(q.dequantize(jnp.float32)) - x) / np.linalg.norm(x)
    assert error < 0.12  # 0.095 for normal values


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, 3),
        (slice(None), 2),
        (1, 2),
        (..., slice(3, 17), slice(None)),
        (0, slice(None), slice(130, None)),
        (slice(None), 1, slice(None, None, 2)),
        (slice(None), slice(0, 0)),
        ...,
    ],
    ids=str,
)
@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_indexing_is_that_of_the_values(index, block):
    x = wide((3, 4, 140, 40))
    q = nvfp4.quantize(x, block=block)
    assert_same_bits(q[index].dequantize(), np.asarray(q.dequantize())[index])
    assert_same_bits(jax.jit(lambda q: q[index].dequantize())(q), np.asarray(q.dequantize())[index])


def test_indexing_after_vmap_takes_the_global_scale_along():
    x = wide((3, 20, 40)) * np.array([1, 10, 100], np.float32)[:, None, None]
    q = jax.vmap(nvfp4.quantize)(x)
    assert q.global_scale.shape == (3,)
    assert_same_bits(q[1].dequantize(), nvfp4.quantize(x[1]).dequantize())
    assert_same_bits(q[1:, :5].dequantize(), np.asarray(q.dequantize())[1:, :5])


@pytest.mark.parametrize(
    "index", [(..., 5), (0, 0, 0), (0, 0), (slice(None), 3), None, ([1, 2],), 7.0, (0, 0, 0, 0)]
)
def test_what_can_not_be_indexed_is_an_error(index):
    q = nvfp4.quantize(wide((2, 20, 40)))
    with pytest.raises((IndexError, TypeError), match=r"^NVFP4Array: .*got .*\. Use"):
        q[index]


def test_tree_map_scan_cond_and_while():
    x = wide((3, 20, 40), BF16)
    q = jax.vmap(nvfp4.quantize)(x)
    copy = jax.tree.map(lambda leaf: leaf + 0, q)
    assert isinstance(copy, nvfp4.NVFP4Array)
    assert copy.shape == q.shape
    assert_same_tree(copy, q)

    def step(carry, q):
        return carry, q.dequantize()

    _, values = jax.lax.scan(step, 0, q)
    assert_same_bits(values, q.dequantize())
    one = q[0]
    picked = jax.jit(
        lambda p, q: jax.lax.cond(p, lambda: q, lambda: jax.tree.map(jnp.zeros_like, q))
    )
    assert_same_tree(picked(True, one), one)
    looped = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, one))[1]
    assert_same_tree(looped, one)


def test_paths_name_the_leaves():
    leaves = jax.tree_util.tree_leaves_with_path({"w": nvfp4.quantize(jnp.ones((4, 16)))})
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert names == ["w/packed", "w/scales", "w/global_scale"]


def test_structures_differ_where_static_parts_do():
    a, b = nvfp4.quantize(jnp.ones((4, 31))), nvfp4.quantize(jnp.ones((4, 32)))
    assert a.packed.shape == b.packed.shape
    assert jax.tree.structure(a) != jax.tree.structure(b)


def test_eval_shape():
    spec = jax.eval_shape(nvfp4.quantize, jax.ShapeDtypeStruct((2, 20, 41), jnp.bfloat16))
    q = nvfp4.quantize(jnp.zeros((2, 20, 41), jnp.bfloat16))
    assert spec.shape == q.shape
    for a, b in zip(jax.tree.leaves(spec), jax.tree.leaves(q), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_repr_says_shape_and_error():
    x = normal((64, 256))
    text = repr(nvfp4.quantize(x))
    for word in ("NVFP4Array", "(64, 256)", "1x16", "float32", "global_scale", "error"):
        assert word in text
    repr(nvfp4.quantize(jnp.zeros((2, 16))))
    repr(nvfp4.quantize(jnp.zeros((0, 16))))
    repr(nvfp4.quantize(jnp.full((2, 16), jnp.nan)))
    repr(jax.vmap(nvfp4.quantize)(jnp.ones((3, 2, 16))))
    jax.jit(lambda x: (repr(nvfp4.quantize(x)), x)[1])(x)  # a tracer has no statistics
    repr(jax.eval_shape(nvfp4.quantize, x))
    repr(jax.tree.map(lambda leaf: None, nvfp4.quantize(x)))


def test_statistics():
    x = normal((512, 512))
    x[:16] = 0
    q = nvfp4.quantize(x)
    s = {name: float(value) for name, value in q.statistics().items()}
    codes = oracle.quantize(x).codes & 7
    assert s["zero"] == pytest.approx((codes == 0).mean())
    assert s["saturated"] == pytest.approx((codes == 7).mean())
    assert s["underflowed"] == pytest.approx(16 / 512)
    # An expectation from the codes alone. A block's largest value is nearly exact, which it does
    # not know: it is above the error, by a fourth for normal values.
    actual = np.linalg.norm(np.asarray(q.dequantize()) - x) / np.linalg.norm(x)
    assert actual < s["relative_error"] < 1.3 * actual


def test_numpy_leaves_work():
    """As a checkpoint gives them back."""
    x = wide((20, 40))
    q = jax.tree.map(np.asarray, nvfp4.quantize(x))
    assert_same_bits(q.dequantize(), nvfp4.quantize(x).dequantize())
    other = nvfp4.quantize(x)
    assert_same_bits(
        nvfp4.matmul(q, other, out_dtype=jnp.float32),
        oracle.matmul(oracle.quantize(x), oracle.quantize(x)),
    )


def test_orbax_keeps_it(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    q = nvfp4.quantize(wide((20, 40)))
    with checkpoint.StandardCheckpointer() as writer:
        writer.save(tmp_path / "q", {"w": q})
        writer.wait_until_finished()
        back = writer.restore(tmp_path / "q", jax.eval_shape(lambda: {"w": q}))
    assert_same_tree(back["w"], q)


def test_as_f4_is_the_dtype_that_ml_dtypes_has():
    array, q = random_quantized((3, 32))
    values = np.asarray(array.as_f4())
    assert values.dtype == ml_dtypes.float4_e2m1fn
    np.testing.assert_array_equal(values.view(np.uint8) & 15, q.codes)
