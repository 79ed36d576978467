"""amax: the largest magnitude, plain and after the Hadamard transform along K or along R."""

import golden
import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import oracle
import pytest
from helpers import BF16, DTYPES, assert_same_bits, normal, wide

OUTPUTS = ("plain", "rows", "columns")


def expected(x):
    operands = x, oracle.operand(x, -1, True), oracle.operand(x, -2, True)
    return tuple(oracle.amax(operand) for operand in operands)


def assert_amaxes(got, want):
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)


@pytest.mark.parametrize("name", [n for n in golden.TENSORS if n.startswith(("normal", "cauchy"))])
def test_golden_vectors(name):
    g = golden.load(name)
    plain, columns = nvfp4.amax(golden.tensor(name), ("plain", "columns"))
    assert_same_bits(plain, g["1x16/amax_row"][0])
    assert_same_bits(columns, g["1x16_rht/amax_col"][0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 17), (16, 16), (33, 80), (2, 3, 20, 41), (300, 1100)], ids=str
)
def test_every_output(shape, dtype, instruction_set):
    x = wide(shape, DTYPES[dtype])
    assert_amaxes(nvfp4.amax(x, OUTPUTS), expected(x))


@pytest.mark.parametrize("outputs", [("rows",), ("columns", "plain"), ("plain", "columns", "rows")])
def test_order_of_the_outputs_is_that_of_the_call(outputs):
    x = wide((20, 40))
    want = dict(zip(OUTPUTS, expected(x), strict=True))
    assert_amaxes(nvfp4.amax(x, outputs), [want[o] for o in outputs])


@pytest.mark.parametrize("position", [(0, 0), (19, 39), (7, 16)])
@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_finds_it_anywhere(position, value):
    x = normal((20, 40))
    x[position] = value
    assert_amaxes(nvfp4.amax(x, OUTPUTS), expected(x))
    assert nvfp4.amax(x)[0] == 100


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf(dtype, bad, instruction_set):
    for position in [(0, 0), (36, 99), (20, 50)]:
        x = normal((37, 100), DTYPES[dtype])
        x[position] = bad
        assert not np.isfinite(nvfp4.amax(x, OUTPUTS)).any()


def test_overflow_of_the_transform_is_not_hidden():
    x = np.full((16, 16), 3e38, np.float32)
    plain, rows, columns = nvfp4.amax(x, OUTPUTS)
    assert plain == np.float32(3e38)
    assert not np.isfinite(rows)
    assert not np.isfinite(columns)


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38])
def test_subnormals_count(scale):
    """XLA's threads flush them to zero; an op must not."""
    x = (normal((16, 32)).clip(-1, 1) * scale).astype(np.float32)
    x[3, 3] = scale
    assert_amaxes(nvfp4.amax(x, OUTPUTS), expected(x))
    assert_amaxes(jax.jit(lambda x: nvfp4.amax(x, OUTPUTS))(x), expected(x))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (2, 0, 16)], ids=str)
def test_empty(shape):
    assert_amaxes(nvfp4.amax(jnp.zeros(shape), OUTPUTS), (np.float32(0),) * 3)


def test_vmap_and_jit():
    x = wide((3, 2, 20, 40), BF16)
    f = jax.jit(jax.vmap(lambda x: nvfp4.amax(x, OUTPUTS), in_axes=1))
    for got, want in zip(f(np.moveaxis(x, 0, 1)), zip(*map(expected, x), strict=True), strict=True):
        assert_same_bits(got, np.stack(want))
