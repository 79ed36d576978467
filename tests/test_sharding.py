"""Ops on a mesh of devices: the bits of one device, and no collective that moves more than it must."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import pytest
from helpers import DTYPES, assert_same_bits, assert_same_tree, normal, wide
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

KEY = jax.random.key(3)
RNE = nvfp4.recipes.RNE


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)


def put(mesh, *pairs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def collectives(compiled) -> list[tuple[str, str]]:
    """(type, collective) of each in the program, in order of their names."""
    pattern = r"= \(?(\w+)\[[^=]* (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return sorted(re.findall(pattern, compiled.as_text()))


def run(f, *arrays):
    """f under jit, and its collectives."""
    compiled = jax.jit(f).lower(*arrays).compile()
    return compiled(*arrays), collectives(compiled)


# The largest magnitude, as an integer: all that quantizing a sharded tensor has to send.
AMAX = ("s32", "all-reduce")

SPECS = [P("d"), P(None, "m"), P("d", "m"), P("m", "d"), P("m"), P(("m", "d"))]


def quantizations(x):
    both = nvfp4.quantize(x, axis=(-1, -2), rounding=("sr", "sr"), hadamard=(False, True), key=KEY)
    return (
        nvfp4.amax(x, ("plain", "rows", "columns")),
        nvfp4.quantize(x),
        nvfp4.quantize(x, axis=-2, block="16x16", rounding="sr", key=KEY),
        both,
        both[0].dequantize(x.dtype),
        both[1].dequantize(jnp.float32, transformed=True),
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_quantize_has_the_bits_of_one_device(mesh, spec, dtype):
    x = jnp.asarray(wide((1024, 512), dtype))
    (placed,) = put(mesh, (x, spec))
    expected = jax.jit(quantizations)(x)
    got, sent = run(quantizations, placed)
    assert_same_tree(got, expected)
    assert set(sent) == {AMAX}
    assert_same_tree(quantizations(placed), expected)  # eager
    rows = got[1]
    assert rows.packed.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_quantize_where_shardings_are_types(explicit, spec):
    x = jnp.asarray(wide((1024, 512), DTYPES["bf16"]))
    expected = jax.jit(quantizations)(x)
    spec = P(*spec, *(None,) * (2 - len(spec)))
    with jax.set_mesh(explicit):
        (placed,) = put(explicit, (x, spec))
        types = []

        def f(x):
            results = quantizations(x)
            types.append(jax.typeof(results[1].packed).sharding.spec)
            return results

        got, sent = run(f, placed)
    assert types[0] == spec
    assert_same_tree(jax.device_get(got), jax.device_get(expected))
    assert set(sent) == {AMAX}


@pytest.mark.parametrize(
    "spec", [P("d"), P("d", None, "m"), P("d", "m"), P(None, "d", "m"), P("m", "d")], ids=str
)
def test_leading_axes(mesh, spec):
    x = jnp.asarray(wide((8, 512, 256)))
    (placed,) = put(mesh, (x, spec))
    got, sent = run(quantizations, placed)
    assert_same_tree(got, jax.jit(quantizations)(x))
    assert set(sent) == {AMAX}


U8 = {("u8", "all-gather"), ("u8", "all-to-all"), ("u8", "collective-permute")}


@pytest.mark.parametrize("shape", [(256, 512), (384, 96), (64, 2048), (2, 192, 64)], ids=str)
@pytest.mark.parametrize("spec", [P("d"), P(None, "m"), P(("d", "m")), P("m", "d")], ids=str)
def test_parts_finer_than_a_tile(mesh, shape, spec):
    """Down to 32 rows or columns: codes stay where they are, scales are put together."""
    x = jnp.asarray(wide(shape))
    spec = P(*(None,) * (len(shape) - 2), *spec)
    (placed,) = put(mesh, (x, spec))

    def f(x):
        return nvfp4.quantize(x, axis=(-1, -2), block="16x16", rounding="sr", key=KEY)

    got, sent = run(f, placed)
    assert_same_tree(got, jax.jit(f)(x))
    parts = [
        size
        // int(np.prod([mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,))]))
        for size, axes in zip(shape, (*spec, None), strict=False)
        if axes
    ]
    if all(part % 32 == 0 for part in parts):
        assert set(sent) <= {AMAX, *U8}
        assert got[0].packed.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape))


def test_parts_finer_than_a_tile_where_shardings_are_types(explicit):
    x = jnp.asarray(wide((256, 128)))
    with jax.set_mesh(explicit):
        (placed,) = put(explicit, (x, P("d", None)))
        types = []

        def f(x):
            q = nvfp4.quantize(x, axis=(-1, -2))
            types.extend(jax.typeof(a).sharding.spec for a in (q[0].packed, q[0].scales))
            return q

        got, sent = run(f, placed)
    assert types == [P("d", None), P(None, None, None)]
    assert_same_tree(jax.device_get(got), jax.device_get(jax.jit(f)(x)))
    assert set(sent) <= {AMAX, *U8}


def test_what_is_gathered_for_lack_of_parts_is_said(explicit):
    x = jnp.asarray(wide((200, 64)))
    with jax.set_mesh(explicit):
        (placed,) = put(explicit, (x, P("d", None)))
        with pytest.warns(
            UserWarning, match=r"nvfp4_quantize: axis 0 .*\(200, 64\) is sharded over 'd'"
        ):
            got = jax.jit(lambda x: nvfp4.quantize(x))(placed)
    assert_same_tree(jax.device_get(got), jax.device_get(nvfp4.quantize(x)))


@pytest.mark.parametrize("shape", [(200, 80), (16, 464), (96, 16), (5, 2048), (40, 8)], ids=str)
def test_shapes_that_do_not_tile(mesh, shape):
    """XLA gathers what can not be divided."""
    x = jnp.asarray(wide(shape))
    for spec in (P("d"), P(None, "m"), P(("d", "m"))):
        count = [
            int(np.prod([mesh.shape[a] for a in (axes if isinstance(axes, tuple) else (axes,))]))
            for axes in spec
            if axes
        ]
        if shape[len(spec) - 1] % count[0] == 0:
            (placed,) = put(mesh, (x, spec))
            assert_same_tree(jax.jit(quantizations)(placed), jax.jit(quantizations)(x))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_on_one_device_is_seen_on_all(mesh, value):
    x = normal((1024, 256))
    x[700, 3] = value
    (placed,) = put(mesh, (x, P("d", "m")))
    got = jax.jit(lambda x: nvfp4.quantize(x).dequantize(jnp.float32))(placed)
    assert np.isnan(got).all()


# ---- Products


def product(x, w, bias, accumulate):
    a, b = nvfp4.quantize(x), nvfp4.quantize(w)
    return nvfp4.matmul(a, b, out_dtype=accumulate.dtype, bias=bias, accumulate=accumulate)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [(P("d"), P()), (P(), P("d")), (P("d"), P("m")), (P("d"), P("d"))],
    ids=str,
)
def test_matmul_has_the_bits_of_one_device(mesh, x_spec, w_spec, dtype):
    x, w = normal((512, 256), seed=1), normal((1024, 256), seed=2)
    rest = normal((1024,), seed=3), normal((512, 1024), dtype, 4)
    m, n = (*x_spec, None)[0], (*w_spec, None)[0]
    at = P(m, n if n != m else None)
    placed = put(mesh, (x, x_spec), (w, w_spec), (rest[0], P(at[1])), (rest[1], at))
    got, sent = run(product, *placed)
    assert_same_bits(got, jax.jit(product)(x, w, *rest))
    # Both along one axis: the codes and scales of one are gathered.
    gathered = 2 if x_spec == w_spec else 0
    assert sent.count(("u8", "all-gather")) == gathered
    assert set(sent) <= {AMAX, ("u8", "all-gather")}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_matmul_over_a_divided_k_is_rounded_once(mesh, dtype):
    x, w = normal((256, 512), seed=1), normal((384, 512), seed=2)
    rest = normal((384,), seed=3), normal((256, 384), dtype, 4)
    placed = put(mesh, (x, P(None, "d")), (w, P(None, "d")))
    got, sent = run(product, *placed, *rest)
    assert ("f32", "all-reduce") in sent and ("u8", "all-gather") not in sent
    a, b = (nvfp4.quantize(v).dequantize(jnp.float32) for v in (x, w))
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    exact = a @ b.T + rest[0].astype(np.float64) + rest[1].astype(np.float64)
    # 512 products in float32, in any order, bias and accumulate; then the rounding of the result.
    bound = (
        516
        * 2.0**-24
        * (np.abs(a) @ np.abs(b).T + np.abs(rest[0]) + np.abs(rest[1].astype(np.float64)))
    )
    bound += float(jnp.finfo(dtype).eps) * np.abs(exact)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize(
    "spec",
    [P("d"), P(None, "m"), P("d", "m"), P("m", "d"), P(("d", "m")), P(None, ("m", "d"))],
    ids=str,
)
def test_of_a_sum_each_device_gets_its_part(mesh, spec):
    """The gradients of weights that are sharded (FSDP) are scattered; bias and what is accumulated are like the result."""
    x, w = normal((512, 1024), seed=1), normal((256, 1024), seed=2)
    rest = normal((256,), seed=3), normal((512, 256), seed=4)

    def f(x, w, bias, accumulate):
        y = product(x, w, bias, accumulate)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, spec))

    tokens, columns = P(None, ("d", "m")), P((*spec, None)[1])
    placed = put(mesh, (x, tokens), (w, tokens), (rest[0], columns), (rest[1], spec))
    got, sent = run(f, *placed)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_close([got], [product(x, w, *rest)])
    axes = {a for entry in spec if entry for a in np.ravel(entry)}
    # What is scattered over one axis is summed over the other.
    left = {("f32", "all-reduce")} if len(axes) == 1 else set()
    assert set(sent) == {AMAX, ("f32", "reduce-scatter")} | left


def test_sequence_parallel_activations_are_gathered_quantized(mesh):
    """Between products the model axis divides the tokens, inside of them the features."""
    between, inside = NamedSharding(mesh, P(("d", "m"))), NamedSharding(mesh, P("d", "m"))
    x, up, down = (normal(s, seed=i) for i, s in enumerate([(2048, 512), (512, 256), (256, 512)]))

    def f(x, up, down):
        def block(x, up, down):
            h = nvfp4.matmul(x, up, key=KEY)
            h = jax.lax.with_sharding_constraint(h, inside)
            y = nvfp4.matmul(jnp.tanh(h), down, key=KEY)
            return jax.lax.with_sharding_constraint(y, between), h

        (y, h), pull = jax.vjp(block, x, up, down)
        gradients = pull((y, jnp.zeros_like(h)))
        return h, y, *map(jax.lax.with_sharding_constraint, gradients, shardings)

    specs = between.spec, P("d", "m"), P("m", "d")
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    placed = put(mesh, *zip((x, up, down), specs, strict=True))
    got, sent = run(f, *placed)
    expected = jax.jit(f)(x, up, down)
    assert_same_bits(got[0], expected[0])
    assert_close(got[1:2], expected[1:2])
    assert set(sent) <= {AMAX, ("u8", "all-gather"), ("f32", "reduce-scatter")}


# ---- Layers


def layer(x, w, g, key=KEY, recipe=nvfp4.recipes.NVIDIA):
    y, pull = jax.vjp(lambda x, w: nvfp4.matmul(x, w, key=key, recipe=recipe), x, w)
    return y, *pull(g)


def assert_close(got, expected):
    """Products may be sums of parts in another order: of 1024 terms in float32."""
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 1024 * 2.0**-24 * np.abs(b).max()


LAYERS = {
    "data": (P("d"), P(), P("d")),
    "fsdp, input": (P("d"), P("d"), P("d")),
    "fsdp, output": (P("d"), P(None, "d"), P("d")),
    "tensor, columns": (P(), P(None, "m"), P(None, "m")),
    "tensor, rows": (P(None, "m"), P("m"), P()),
    "fsdp and tensor": (P("d"), P("d", "m"), P("d", "m")),
}


@pytest.mark.parametrize("specs", LAYERS.values(), ids=LAYERS)
def test_a_layer(mesh, specs):
    x, w, g = (normal(s, seed=i) for i, s in enumerate([(1024, 512), (512, 1024), (1024, 1024)]))
    placed = put(mesh, *zip((x, w, g), specs, strict=True))
    got, sent = run(layer, *placed)
    assert_close(got, jax.jit(layer)(x, w, g))
    # Of what is quantized, no float is gathered.
    assert set(sent) <= {
        AMAX,
        ("u8", "all-gather"),
        ("f32", "all-reduce"),
        ("f32", "reduce-scatter"),
    }


@pytest.mark.parametrize("specs", LAYERS.values(), ids=LAYERS)
def test_a_layer_where_shardings_are_types(explicit, specs):
    x, w, g = (normal(s, seed=i) for i, s in enumerate([(1024, 512), (512, 1024), (1024, 1024)]))
    whole = [P(*s, *(None,) * (2 - len(s))) for s in specs]
    expected = jax.jit(layer)(x, w, g)
    with jax.set_mesh(explicit):
        placed = put(explicit, *zip((x, w, g), whole, strict=True))

        def f(x, w, key):
            # g with the sharding that y has, as after a loss.
            y, pull = jax.vjp(lambda x, w: nvfp4.matmul(x, w, key=key), x, w)
            return y, *pull(jax.sharding.reshard(jnp.asarray(g), jax.typeof(y).sharding))

        got, sent = run(f, *placed[:2], KEY)
        for gradient, spec in zip(got[1:], whole, strict=False):
            assert gradient.sharding.spec == spec
    assert_close(jax.device_get(got), expected)
    assert ("f32", "all-gather") not in sent


TOKENS = {
    "batch": (P("d"), P(), P("d")),
    "sequence": (P(None, "d"), P(), P(None, "d")),
    "batch and sequence": (P("d", "m"), P(), P("d", "m")),
    "batch and sequence, fsdp": (P("d", "m"), P(None, "d"), P("d", "m")),
    "sequence to tensor": (P("d", "m"), P(None, "m"), P("d", None, "m")),
    "tensor to sequence": (P("d", None, "m"), P("m"), P("d", "m")),
}


@pytest.mark.parametrize("specs", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("recipe", nvfp4.recipes.PRESETS.values(), ids=str)
def test_a_layer_of_batch_and_sequence(mesh, specs, recipe):
    """x[B, T, K]: B and T may be divided, and are rows of one matrix all the same."""
    shapes = [(8, 512, 256), (256, 1024), (8, 512, 1024)]
    x, w, g = (normal(s, seed=i) for i, s in enumerate(shapes))
    key = KEY if recipe.needs_key else None

    def f(x, w, g):
        return layer(x, w, g, key, recipe)

    flat = jax.jit(f)(x.reshape(-1, 256), w, g.reshape(-1, 1024))
    flat = (flat[0].reshape(g.shape), flat[1].reshape(x.shape), flat[2])
    assert_same_tree(jax.jit(f)(x, w, g), flat)
    got, sent = run(f, *put(mesh, *zip((x, w, g), specs, strict=True)))
    assert_close(got, flat)
    if recipe.backward == "nvfp4":
        # Activations that are gathered travel as codes and scales too.
        allowed = {AMAX, *U8, ("f32", "all-reduce"), ("f32", "reduce-scatter")}
        assert set(sent) <= allowed


def test_layers_in_a_scan_with_remat(mesh):
    """FSDP over the layers of a scan: codes are gathered, and are the residuals."""
    x, w = normal((1024, 256), DTYPES["bf16"]), normal((4, 256, 256), DTYPES["bf16"], 1, 0.1)

    def loss(w, x):
        @functools.partial(jax.checkpoint, policy=nvfp4.checkpoint_policy)
        def block(x, w):
            return x + jnp.tanh(nvfp4.matmul(x, w, recipe=RNE)), None

        y, _ = jax.lax.scan(block, x, w)
        return (y.astype(jnp.float32) ** 2).mean(), y

    placed = put(mesh, (w, P(None, "m", None)), (x, P("d")))
    (_, y), dw = jax.jit(jax.value_and_grad(loss, has_aux=True))(*placed)
    (_, y_of_one), dw_of_one = jax.jit(jax.value_and_grad(loss, has_aux=True))(w, x)
    assert_same_bits(y, y_of_one)
    a, b = (np.asarray(v, np.float64) for v in (dw, dw_of_one))
    # wgrad sums over the tokens of four devices, in another order, and rounds to bfloat16.
    assert np.abs(a - b).max() <= 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(b).max()


@pytest.mark.parametrize("name", [None, "d"])
def test_vmap_over_a_sharded_axis(mesh, name):
    """Stages of a pipeline: each has its own scale; nothing is sent."""
    x = jnp.asarray(wide((8, 128, 256)))
    (placed,) = put(mesh, (x, P("d")))
    f = jax.vmap(quantizations, spmd_axis_name=name)
    got, sent = run(f, placed)
    assert_same_tree(got, jax.jit(f)(x))
    assert not sent


# ---- shard_map


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("manual", [{"d", "m"}, {"d"}], ids=["all manual", "one manual"])
def test_shard_map(mesh, check, manual):
    x = jnp.asarray(wide((1024, 256)))

    def f(x):
        return nvfp4.quantize(x, amax=jax.lax.pmax(nvfp4.amax(x)[0], "d")).packed

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check, axis_names=manual
    )
    assert_same_bits(jax.jit(mapped)(x), nvfp4.quantize(x).packed)


def test_results_that_vary_are_not_taken_for_replicated(mesh):
    def f(x):
        return nvfp4.quantize(x).packed

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P())
    with pytest.raises(ValueError, match=r"varying over \{d\}"):
        jax.jit(mapped)(jnp.zeros((1024, 256)))


@pytest.mark.parametrize("check", [True, False])
def test_gradients_in_shard_map(mesh, check):
    """A weight that every device has gets the sum of their gradients."""
    x, w, g = (normal(s, seed=i) for i, s in enumerate([(512, 128), (128, 256), (512, 256)]))

    def local(x, w, g):
        return jnp.sum(nvfp4.matmul(x, w, key=KEY) * g)[None]

    def sharded(x, w):
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("d"), P(), P("d")),
            out_specs=P("d"),
            check_vma=check,
            axis_names={"d", "m"},
        )
        return mapped(x, w, g).sum()

    def apart(x, w):
        # Each device quantizes what it has, by itself.
        parts = zip(jnp.split(x, 4), jnp.split(jnp.asarray(g), 4), strict=True)
        return sum(local(xi, w, gi)[0] for xi, gi in parts)

    got = jax.jit(jax.grad(sharded, argnums=(0, 1)))(x, w)
    assert_close(got, jax.jit(jax.grad(apart, argnums=(0, 1)))(x, w))


def test_operands_that_vary_over_different_axes(mesh):
    x, w = normal((512, 128), seed=1), normal((128, 256), seed=2)

    def f(x, w):
        q = nvfp4.quantize(w, axis=-2)
        return nvfp4.matmul(nvfp4.quantize(x), q) + q.dequantize().sum()

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P(None, "m")), out_specs=P("d", "m"))
    assert jax.jit(mapped)(x, w).shape == (512, 256)


def test_largest_magnitudes_over_manual_axes(mesh):
    """With them the devices of a shard_map quantize as one, but for random bits."""
    recipe = dataclasses.replace(RNE, amax_axes=("d",))
    x, w = normal((512, 128), seed=1), normal((128, 256), seed=2)
    x[300] *= 100

    def f(x, w):
        mapped = jax.shard_map(
            lambda x, w: nvfp4.matmul(x, w, recipe=recipe),
            mesh=mesh,
            in_specs=(P("d"), P()),
            out_specs=P("d"),
            check_vma=False,
        )
        return mapped(x, w)

    assert_same_bits(jax.jit(f)(x, w), nvfp4.matmul(x, w, recipe=RNE))


def test_partial_sums_in_bfloat16(mesh):
    recipe = dataclasses.replace(RNE, partial_sums="bfloat16")
    x, w = normal((256, 512), DTYPES["bf16"], 1), normal((512, 256), DTYPES["bf16"], 2)
    placed = put(mesh, (x, P(None, "d")), (w, P("d")))
    rounded = jax.jit(lambda x, w: nvfp4.matmul(x, w, recipe=recipe))(*placed)
    whole = jax.jit(lambda x, w: nvfp4.matmul(x, w, recipe=RNE))(*placed)
    exact = np.asarray(whole, np.float64)
    got = np.asarray(rounded, np.float64)
    assert (got != exact).any()
    # Each of four parts, none more than a few times the size of the largest sum, is rounded to 8 bits.
    assert np.abs(got - exact).max() <= 4 * 2.0**-8 * np.abs(exact).max()


def test_gspmd_partitions_too():
    """The propagation that JAX had before, for who still uses it; in a process of its own, as the choice is the process's."""
    program = """
import jax, jax.numpy as jnp, jax_nvfp4_ops as nvfp4, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = jax.random.normal(jax.random.key(0), (1024, 512))
f = jax.jit(lambda x: nvfp4.quantize(x, axis=(-1, -2), rounding="sr", key=jax.random.key(1)))
placed = jax.device_put(x, NamedSharding(mesh, P("d", "m")))
assert "all-gather" not in f.lower(placed).compile().as_text()
for a, b in zip(jax.tree.leaves(f(placed)), jax.tree.leaves(f(x)), strict=True):
    np.testing.assert_array_equal(a, b)
"""
    settings = {"JAX_USE_SHARDY_PARTITIONER": "0", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
