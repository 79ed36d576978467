"""dot_general and einsum: y, dx and dw of every recipe, bit for bit those of the oracle."""

import functools

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
    Canonical,
    assert_same_bits,
    assert_same_tree,
    linear,
    normal,
    wide,
)
from jax import export

KEY = jax.random.key(5)
RECIPES = {
    "nvidia": (nvfp4.recipes.NVIDIA, oracle.NVIDIA),
    "rne": (nvfp4.recipes.RNE, oracle.RNE),
}
# Every option where the presets do not have it.
OTHER = (
    nvfp4.Recipe(
        x_fprop=nvfp4.Format(hadamard=True),
        w_fprop=nvfp4.Format("16x16", hadamard=True),
        g_dgrad=nvfp4.Format("16x16", "sr", True),
        w_dgrad=nvfp4.Format(hadamard=True),
        x_wgrad=nvfp4.Format("16x16"),
        g_wgrad=nvfp4.Format("16x16", "sr"),
    ),
    oracle.Recipe(
        x_fprop=oracle.How(rotate=True),
        w_fprop=oracle.How("16x16", rotate=True),
        g_dgrad=oracle.How("16x16", "sr", True),
        w_dgrad=oracle.How(rotate=True),
        x_wgrad=oracle.How("16x16"),
        g_wgrad=oracle.How("16x16", "sr"),
    ),
)
MATRIX = (((1,), (0,)), ((), ()))  # x[T, K] w[K, N]


def key_for(recipe):
    return KEY if recipe.needs_key else None


def with_gradients(x, w, g, dims, recipe, **kw):
    def f(x, w):
        return nvfp4.dot_general(x, w, dims, recipe=recipe, key=key_for(recipe), **kw)

    y, pull = jax.vjp(f, x, w)
    return y, *pull(jnp.asarray(g))


def check(x, w, dims, name, dtype=None, **kw):
    """y, dx, dw of the package are the oracle's."""
    recipe, theirs = OTHER if name == "other" else RECIPES[name]
    out = jnp.dtype(dtype or jnp.result_type(x, w))
    c = Canonical(np.shape(x), np.shape(w), dims)
    g = wide((*c.batch, *c.m, *c.n), out, seed=9)
    got = with_gradients(x, w, g, dims, recipe, **kw)
    want = linear(x, w, g, dims, theirs, KEY, out)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    return got


@pytest.mark.parametrize("name", [*RECIPES, "other"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tkn", [(64, 80, 48), (33, 70, 17), (128, 256, 130), (1, 16, 1)], ids=str)
def test_every_recipe(tkn, dtype, name, instruction_set):
    t, k, n = tkn
    check(wide((t, k), DTYPES[dtype]), wide((k, n), DTYPES[dtype], 1), MATRIX, name)


DIMENSIONS = [
    ((33, 40), (17, 40), (((1,), (1,)), ((), ()))),
    ((40, 33), (40, 17), (((0,), (0,)), ((), ()))),
    ((40, 33), (17, 40), (((0,), (1,)), ((), ()))),
    ((2, 5, 40), (40, 17), (((2,), (0,)), ((), ()))),
    ((2, 5, 40), (40, 3, 7), (((2,), (0,)), ((), ()))),
    ((2, 5, 8, 6), (3, 6, 7, 8), (((2, 3), (3, 1)), ((), ()))),
    ((2, 5, 8, 6), (3, 6, 7, 8), (((3, 2), (1, 3)), ((), ()))),  # the other order of K
    ((3, 5, 40), (3, 40, 17), (((2,), (1,)), ((0,), (0,)))),
    ((5, 3, 40), (17, 40, 3), (((2,), (1,)), ((1,), (2,)))),
    ((2, 5, 3, 4, 10), (3, 10, 7, 2, 4), (((4, 3), (1, 4)), ((2, 0), (0, 3)))),
    ((40,), (40, 17), (((0,), (0,)), ((), ()))),  # no free axis of x
    ((33, 40), (40,), (((1,), (0,)), ((), ()))),
    ((40,), (40,), (((0,), (0,)), ((), ()))),
    ((3, 40), (3, 40), (((1,), (1,)), ((0,), (0,)))),
    ((3, 5), (3, 7), (((), ()), ((0,), (0,)))),  # nothing is contracted: outer products
]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("x_shape", "w_shape", "dims"), DIMENSIONS, ids=str)
def test_every_kind_of_dimension_numbers(x_shape, w_shape, dims, name):
    x, w = wide(x_shape), wide(w_shape, seed=1)
    y, dx, dw = check(x, w, dims, name)
    exact = jax.eval_shape(functools.partial(jax.lax.dot_general, dimension_numbers=dims), x, w)
    assert y.shape == exact.shape
    assert dx.shape == x.shape
    assert dw.shape == w.shape


def test_negative_axes_are_counted_from_the_end():
    x, w = wide((2, 5, 40)), wide((40, 17), seed=1)
    want = nvfp4.dot_general(x, w, (((2,), (0,)), ((), ())), recipe=nvfp4.recipes.RNE)
    got = nvfp4.dot_general(x, w, (((-1,), (-2,)), ((), ())), recipe=nvfp4.recipes.RNE)
    assert_same_bits(got, want)


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_preferred_element_type(out, name):
    """The type of y and of its gradient; those of x and w keep theirs."""
    x, w = wide((33, 40), BF16), wide((40, 17), BF16, 1)
    check(x, w, MATRIX, name, out, preferred_element_type=out)


@pytest.mark.parametrize("types", [("bf16", "f32"), ("f32", "bf16"), ("f16", "bf16")], ids=str)
def test_mixed_types(types):
    x, w = wide((33, 40), DTYPES[types[0]]), wide((40, 17), DTYPES[types[1]], 1)
    check(x, w, MATRIX, "nvidia")


EINSUMS = [
    ("tk,kn->tn", (33, 40), (40, 17)),
    ("btk,kn->btn", (2, 5, 40), (40, 17)),
    ("btk,nk->btn", (2, 5, 40), (17, 40)),
    ("btd,dhk->bthk", (2, 5, 40), (40, 3, 7)),
    ("bthk,hkd->btd", (2, 5, 3, 16), (3, 16, 9)),
    ("tk,kn->nt", (33, 40), (40, 17)),
    ("ebk,ekn->ebn", (3, 5, 40), (3, 40, 17)),
    ("ebk,ekn->ben", (3, 5, 40), (3, 40, 17)),
    ("...k,kn->...n", (2, 3, 40), (40, 17)),
    (" t k , k n -> t n ", (33, 40), (40, 17)),
]


@pytest.mark.parametrize(("spec", "x_shape", "w_shape"), EINSUMS, ids=str)
def test_einsum(spec, x_shape, w_shape):
    """Equal to numpy's of the quantized values, but for the rounding of the sum."""
    x, w = wide(x_shape), wide(w_shape, seed=1)
    y = nvfp4.einsum(spec, x, w, recipe=nvfp4.recipes.RNE)
    exact = np.einsum(spec.replace(" ", ""), x, w)
    assert y.shape == exact.shape
    assert y.dtype == jnp.float32
    assert np.linalg.norm(y - exact) < 0.2 * np.linalg.norm(exact)  # two operands of 0.1 each


def test_einsum_has_the_bits_of_dot_general():
    x, w = wide((2, 5, 40), BF16), wide((40, 3, 7), BF16, 1)
    want = nvfp4.dot_general(x, w, (((2,), (0,)), ((), ())), recipe=nvfp4.recipes.NVIDIA, key=KEY)
    got = nvfp4.einsum("btd,dhk->bthk", x, w, recipe=nvfp4.recipes.NVIDIA, key=KEY)
    assert_same_bits(got, want)


def test_a_recipe_that_draws_in_the_forward_pass():
    """x and w have bits of their own, which no other operand has, and which the key decides."""
    sr = nvfp4.Format(rounding="sr")
    recipe = nvfp4.Recipe(x_fprop=sr, w_fprop=sr)
    x = normal((32, 48))

    def f(key):
        return np.asarray(nvfp4.dot_general(x, x.T, MATRIX, recipe=recipe, key=key))

    assert_same_bits(f(KEY), f(KEY))
    assert (f(KEY) != f(jax.random.key(6))).mean() > 0.9
    # With the same codes for x and x.T the product would be symmetric.
    assert (f(KEY) != f(KEY).T).mean() > 0.8
    mean = np.mean([f(key) for key in jax.random.split(KEY, 64)], 0)
    one = np.linalg.norm(f(KEY) - x @ x.T)
    assert np.linalg.norm(mean - x @ x.T) < one / 4  # noise, not bias: an eighth


# --- transformations ----------------------------------------------------------------------------


def loss_parts(recipe):
    """y, dx and dw as one function of arrays."""

    def f(x, w, g, key):
        key = key if recipe.needs_key else None
        y, pull = jax.vjp(
            lambda x, w: nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key), x, w
        )
        return y, *pull(g)

    return f


@pytest.fixture(params=[*RECIPES, "bf16_backward"])
def recipe(request):
    return (
        nvfp4.recipes.BF16_BACKWARD
        if request.param == "bf16_backward"
        else RECIPES[request.param][0]
    )


def operands(*lead):
    x, w = wide((*lead, 33, 48), BF16), wide((*lead, 48, 17), BF16, 1)
    return jnp.asarray(x), jnp.asarray(w), jnp.asarray(wide((*lead, 33, 17), BF16, 2))


def test_jit_equals_eager(recipe):
    x, w, g = operands()
    f = loss_parts(recipe)
    assert_same_tree(jax.jit(f)(x, w, g, KEY), f(x, w, g, KEY))


@pytest.mark.parametrize(
    "axes",
    [(0, 0, 0, 0), (0, None, 0, None), (None, 0, 0, None), (None, None, 0, 0), (0, 0, 0, None)],
)
def test_vmap_is_a_loop(axes, recipe):
    x, w, g = operands(3)
    keys = jax.random.split(KEY, 3)
    f = loss_parts(recipe)
    args = [a if i == 0 else a[0] for a, i in zip((x, w, g, keys), axes, strict=True)]
    got = jax.vmap(f, in_axes=axes)(*args)
    for i in range(3):
        one = [a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)]
        (y, *gradients), want = jax.tree.map(lambda leaf, i=i: leaf[i], got), f(*one)
        assert_same_bits(y, want[0])
        if recipe.backward == "nvfp4":
            assert_same_tree(gradients, list(want[1:]))
        else:  # XLA's own dot, which may sum in another order: one unit of bf16 then
            for a, b in zip(gradients, want[1:], strict=True):
                a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
                np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max() / 16)


def test_vmap_over_other_axes_and_nested():
    f = loss_parts(nvfp4.recipes.NVIDIA)
    x, w, g = operands(2, 3)
    want = [[f(x[i, j], w[i, j], g[i, j], KEY) for j in range(3)] for i in range(2)]
    inner = jax.vmap(f, in_axes=(-1, 1, 0, None))
    got = jax.vmap(inner, in_axes=(0, 0, 0, None))(
        jnp.moveaxis(x, 1, -1), jnp.moveaxis(w, 1, 2), g, KEY
    )
    for i in range(2):
        for j in range(3):
            assert_same_tree(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], got), want[i][j])


def test_scan_is_a_loop(recipe):
    x, w, g = operands(3)
    keys = jax.random.split(KEY, 3)
    f = loss_parts(recipe)
    _, got = jax.lax.scan(lambda c, a: (c, f(*a)), 0, (x, w, g, keys))
    for i in range(3):
        assert_same_tree(jax.tree.map(lambda leaf, i=i: leaf[i], got), f(x[i], w[i], g[i], keys[i]))


def test_gradient_through_scan_over_layers():
    layers, t, k = 4, 16, 32
    w, x = normal((layers, k, k), scale=0.2), normal((t, k), seed=1)
    keys = jax.random.split(KEY, layers)

    def layer(x, w, key):
        return jnp.tanh(nvfp4.dot_general(x, w, MATRIX, recipe=nvfp4.recipes.NVIDIA, key=key))

    def scanned(w, x):
        return jnp.sum(jax.lax.scan(lambda x, a: (layer(x, *a), None), x, (w, keys))[0] ** 2)

    def unrolled(w, x):
        for i in range(layers):
            x = layer(x, w[i], keys[i])
        return jnp.sum(x**2)

    got, want = jax.grad(scanned)(w, x), jax.grad(unrolled)(w, x)
    # tanh and its derivative are XLA's, compiled differently in a loop body: bits may differ there,
    # and a code with them. All but a few gradients agree.
    close = np.isclose(got, want, rtol=1e-3, atol=1e-5 * np.abs(want).max())
    assert close.mean() > 0.98
    assert np.count_nonzero(want) > want.size // 2


def test_while_and_cond(recipe):
    x, w, _ = operands()
    w = w[:, :1] @ jnp.ones((1, 48), BF16) / 48
    key = key_for(recipe)

    def step(x):
        return nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key)

    want = step(step(step(x)))
    got = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]
    assert_same_bits(got, want)
    picked = jax.jit(lambda p: jax.lax.cond(p, step, lambda x: x, x))
    assert_same_bits(picked(True), step(x))
    assert_same_bits(picked(False), x)


@pytest.mark.parametrize("policy", [None, "ours", "everything", "nothing"])
def test_remat_changes_no_bit(policy, recipe):
    policies = {
        None: None,
        "ours": nvfp4.checkpoint_policy,
        "everything": jax.checkpoint_policies.everything_saveable,
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }
    x, w, g = operands()
    key = key_for(recipe)

    def f(x, w):
        return nvfp4.dot_general(x, w, MATRIX, recipe=recipe, key=key)

    rematerialized = jax.checkpoint(f, policy=policies[policy])

    def parts(f):
        y, pull = jax.vjp(f, x, w)
        return y, *pull(g)

    assert_same_tree(parts(rematerialized), parts(f))


def exported(f, args):
    checks = [
        export.DisabledSafetyCheck.custom_call(f"nvfp4_{op}_v1")
        for op in ("amax", "quantize", "dequantize", "matmul")
    ]
    return export.export(jax.jit(f), disabled_checks=checks)(*args)


def test_export(recipe):
    f, args = loss_parts(recipe), (*operands(), jax.random.key_data(KEY))
    assert_same_tree(tuple(exported(f, args).call(*args)), tuple(f(*args)))


def test_export_serialized(recipe):
    pytest.importorskip("flatbuffers")
    f, args = loss_parts(recipe), (*operands(), jax.random.key_data(KEY))
    program = export.deserialize(exported(f, args).serialize())
    assert_same_tree(tuple(program.call(*args)), tuple(f(*args)))


def test_export_of_any_number_of_rows(recipe):
    """Backward too, which contracts the rows."""
    x, w, g = operands()
    f, key = loss_parts(recipe), jax.random.key_data(KEY)
    (rows,) = export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct((rows, n), BF16) for n in (x.shape[1], g.shape[1])]
    program = exported(f, [shapes[0], w, shapes[1], key])
    for n in (1, 16, 33):
        args = x[:n], w, g[:n], key
        assert_same_tree(tuple(program.call(*args)), tuple(f(*args)))


def test_donation():
    x, w, g = operands()
    f = loss_parts(nvfp4.recipes.NVIDIA)
    want = f(x, w, g, KEY)
    got = jax.jit(f, donate_argnums=(0, 1))(jnp.copy(x), jnp.copy(w), g, KEY)
    assert_same_tree(got, want)


def test_sharded_is_unsharded():
    """Rows of x over devices: the random bits are those of the positions in the whole tensor."""
    x, w, g = (jnp.asarray(wide(s, BF16, i)) for i, s in enumerate([(64, 48), (48, 17), (64, 17)]))
    f = jax.jit(loss_parts(nvfp4.recipes.NVIDIA))
    want = f(x, w, g, KEY)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    got = f(
        jax.device_put(x, rows),
        jax.device_put(w, everywhere),
        jax.device_put(g, rows),
        jax.device_put(KEY, everywhere),
    )
    assert_same_tree(got, want)


# --- quantized operands -------------------------------------------------------------------------


def test_a_weight_that_is_quantized_already():
    """[N, K], as quantize(w, axis=-2) of w[K, N] gives it: the bits are those of the array."""
    x, w = wide((33, 40)), wide((40, 17), seed=1)
    q = nvfp4.quantize(w, axis=-2, block="16x16")
    y = nvfp4.matmul(nvfp4.quantize(x), q, out_dtype=jnp.float32)
    want = nvfp4.dot_general(x, w, MATRIX, recipe=nvfp4.recipes.NVIDIA, key=KEY)
    assert_same_bits(y, want)


@pytest.mark.parametrize(
    "shapes",
    [((33, 40), (40, 17)), ((2, 3, 5, 40), (40, 7)), ((3, 5, 40), (3, 40, 7))],
    ids=str,
)
def test_matmul_of_arrays_is_dot_general(shapes):
    x, w = wide(shapes[0], BF16), wide(shapes[1], BF16, 1)
    batch = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim - 2,)), (batch, batch))
    recipe = nvfp4.recipes.NVIDIA
    y = nvfp4.matmul(x, w, recipe=recipe, key=KEY)
    assert_same_bits(y, nvfp4.dot_general(x, w, dims, recipe=recipe, key=KEY))
    assert y.shape == jnp.matmul(x, w).shape
    y = nvfp4.matmul(x, w, out_dtype=jnp.float32)  # NVIDIA is the default, and needs no key here
    want = nvfp4.dot_general(x, w, dims, recipe=recipe, preferred_element_type=jnp.float32)
    assert_same_bits(y, want)


# --- any shape ----------------------------------------------------------------------------------


@st.composite
def products(draw):
    """Shapes and dimension numbers: axes of each kind, shuffled."""
    sizes = {
        kind: draw(st.lists(st.integers(1, 24 if kind == "contract" else 9), max_size=2))
        for kind in ("batch", "m", "n", "contract")
    }
    labels = {kind: [f"{kind}{i}" for i in range(len(s))] for kind, s in sizes.items()}
    size = {label: s for kind in sizes for label, s in zip(labels[kind], sizes[kind], strict=True)}
    x = draw(st.permutations(labels["batch"] + labels["m"] + labels["contract"]))
    w = draw(st.permutations(labels["batch"] + labels["n"] + labels["contract"]))
    contract = draw(st.permutations(labels["contract"]))
    batch = draw(st.permutations(labels["batch"]))
    dims = (
        (tuple(x.index(a) for a in contract), tuple(w.index(a) for a in contract)),
        (tuple(x.index(a) for a in batch), tuple(w.index(a) for a in batch)),
    )
    return tuple(size[a] for a in x), tuple(size[a] for a in w), dims


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)  # a second each
@hypothesis.given(
    products(),
    st.sampled_from([*RECIPES, "other"]),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 2**32 - 1),
)
def test_any_dot_general(shapes, name, dtype, seed):
    x_shape, w_shape, dims = shapes
    check(wide(x_shape, DTYPES[dtype], seed), wide(w_shape, DTYPES[dtype], seed + 1), dims, name)
