"""What whole steps launch and move on a B200, as XLA compiles them, without one.

tests/b200/ compiles for the chip and reads XLA's output; nothing runs. The first tests compare what it
says with figures worked out by hand. docs/b200.md has the method and the figures.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import pytest
from b200 import audit, collectives, plugin, programs, sharded

BF16, F32 = jnp.bfloat16, jnp.float32
KEY = programs.KEY
M = 8192  # tokens
NVFP4 = programs.LINEARS["nvfp4"]


@pytest.fixture(scope="module", autouse=True)
def _plugin():
    plugin.load_for_tests()


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- The audit itself.


def test_audit_of_a_product():
    x, w = spec(1024, 2048), spec(2048, 512)
    report = audit.audit(jnp.dot, x, w)
    (kernel,) = report.kernels
    assert (kernel.launches, kernel.times, kernel.graphed) == (1, 1, False)
    assert kernel.read == 2 * (1024 * 2048 + 2048 * 512)
    assert kernel.written == 2 * 1024 * 512  # and not the workspace
    assert (kernel.flops, kernel.precision) == (2 * 1024 * 2048 * 512, "bf16")


@pytest.mark.parametrize(
    ("function", "read", "written"),
    [
        (lambda x: jnp.tanh(x) + x, 4, 4),
        (lambda x: (x + 1, x.astype(F32)), 4, 12),
        (lambda x: x[:256] * 2, 1, 1),
        (lambda x: jnp.max(x, axis=1), 4, 0),
    ],
)
def test_audit_of_bytes(function, read, written):
    report = audit.audit(function, spec(1024, 2048))
    small = 1 << 15  # partial and final results of the reduction
    assert abs(sum(k.read for k in report.kernels) - (read << 20)) <= small
    assert abs(sum(k.written for k in report.kernels) - (written << 20)) <= small


def test_audit_of_a_scan():
    """Bodies count as often as they run, and touch one slice of a stacked array."""

    def function(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    report = audit.audit(function, spec(1024, 1024), spec(6, 1024, 1024))
    assert report.calls("__cublas") == 6
    assert [k.times for k in report.kernels if k.flops] == [6]
    # A product and its tanh, and a copy of the slice where XLA makes one.
    one = 2 * 1024 * 1024
    assert 6 * 5 * one <= report.bytes <= (6 * 7 + 2) * one + 1024


def test_audit_of_moves_and_donation():
    x = spec(1024, 2048)
    (move,) = audit.audit(lambda x: x.T, x).moves
    assert move.read == move.written == 2 * 1024 * 2048
    assert audit.audit(lambda x: x + 1, x).moves == []
    assert audit.audit(lambda x: x + 1, x).aliased == 0
    assert audit.audit(lambda x: x + 1, x, donate=(0,)).aliased == 2 * 1024 * 2048


def test_audit_of_command_buffers():
    def chain(x):
        for _ in range(8):
            x = jnp.cumsum(x @ x, 0)
        return x

    assert audit.audit(chain, spec(256, 256)).outside_graphs == []
    assert len(audit.audit(lambda x: x + 1, spec(256, 256)).outside_graphs) == 1  # too short


def test_audit_of_collectives():
    mesh = plugin.mesh(8)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((8192, 64), jnp.uint8, sharding=sharding)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    gather = jax.jit(lambda x: x, out_shardings=whole)
    assert audit.audit(gather, x, devices=8).collectives == {"all-gather": 8192 * 64}


# ---- One linear layer.

# K, N, and MiB of temporaries forward, and forward and backward.
SHAPES = [
    (4096, 4096, 59, 74),
    (4096, 14336, 82, 145),
    (14336, 4096, 127, 109),
    (8192, 28672, 194, 384),
]
AMAX, QUANTIZE, MATMUL = "nvfp4_amax_v1", "nvfp4_quantize_v1", "nvfp4_matmul_v1"


def kernels_of(report):
    return sorted(" ".join(sorted(k.ops)) for k in report.kernels for _ in range(k.launches))


@pytest.mark.parametrize(("k", "n", "temporaries", "_"), SHAPES)
def test_linear_forward(k, n, temporaries, _):
    report = audit.audit(*programs.forward(NVFP4, M, k, n))
    # multiply: of the two global scales.
    assert kernels_of(report) == sorted([AMAX, QUANTIZE] * 2 + ["multiply", MATMUL])
    # x and w are read twice and written once along K; the product reads that and writes y.
    assert report.bytes <= 1.005 * (2 * (2 + 2 + 2 * 0.5625) / 2 * (M * k + k * n) + 2 * M * n)
    assert report.outside_graphs == []
    assert report.temporaries <= 1.05 * temporaries * 2**20


@pytest.mark.parametrize(("k", "n", "_", "temporaries"), SHAPES)
def test_linear_forward_and_backward(k, n, _, temporaries):
    report = audit.audit(*programs.forward_backward(NVFP4, M, k, n))
    assert kernels_of(report) == sorted([AMAX, QUANTIZE, MATMUL] * 3 + ["multiply"])
    # Of each of x, w, g: two reads, codes and scales (0.5625 bytes) written along both axes and read once,
    # and one result of that shape.
    assert report.bytes <= 1.005 * (2 + 2 + 4 * 0.5625 + 2) * (M * k + k * n + M * n)
    assert report.outside_graphs == []
    assert report.temporaries <= 1.05 * temporaries * 2**20


@pytest.mark.parametrize(
    ("subscripts", "x", "w"),
    [
        ("btd,df->btf", (2, 256, 512), (512, 768)),
        ("btd,fd->btf", (2, 256, 512), (768, 512)),  # a transposed kernel, an embedding
        ("btd,dhk->bthk", (2, 256, 512), (512, 6, 128)),
        ("bthk,hkd->btd", (2, 256, 6, 128), (6, 128, 512)),
        ("dt,df->tf", (512, 256), (512, 768)),
        ("ecd,edf->ecf", (4, 256, 512), (4, 512, 768)),  # experts
        ("md,df->mf", (33, 80), (80, 24)),
        ("md,df->mf", (5, 17), (17, 3)),
    ],
)
def test_no_layout_is_moved_in_memory(subscripts, x, w):
    y = jax.eval_shape(lambda x, w: jnp.einsum(subscripts, x, w), spec(*x), spec(*w))

    def step(x, w, key, g):
        _, pullback = jax.vjp(lambda x, w: nvfp4.einsum(subscripts, x, w, key=key), x, w)
        return pullback(g)

    report = audit.audit(step, spec(*x), spec(*w), KEY, spec(*y.shape))
    assert kernels_of(report) == sorted([AMAX, QUANTIZE] * 3 + [MATMUL] * 2)


def test_accumulation_is_in_place():
    def step(accumulator, x, w):
        return nvfp4.matmul(x, w, out_dtype=F32, accumulate=accumulator)

    x, w = (
        jax.eval_shape(lambda x: nvfp4.quantize(x), spec(rows, 512, dtype=F32))
        for rows in (256, 384)
    )
    report = audit.audit(step, spec(256, 384, dtype=F32), x, w, donate=(0,))
    assert kernels_of(report) == sorted([MATMUL, "multiply"])
    assert report.aliased == 4 * 256 * 384


# ---- Whole steps.


def test_scan():
    """Launches and bytes of four layers, whose quantized x and w are kept, nothing quantized again."""
    step, ws, x, key = programs.scan_step(NVFP4, 4, M, 4096)
    report = audit.audit(step, ws, x, key, donate=(0, 1))
    # jax 0.10 copies slices of stacked arrays; later ones read and write them in place.
    old = jax.__version_info__ < (0, 11)
    assert report.launches <= (151 if old else 115)
    assert report.bytes <= (8.35e9 if old else 7.46e9)
    assert report.aliased == 2 * (ws.size + x.size)
    assert [report.calls(f) for f in (AMAX, QUANTIZE, MATMUL)] == [12, 12, 12]
    # Both loops are; what XLA has between and behind them is too little for a graph.
    assert not any("/" in k.name for k in report.outside_graphs)


@pytest.fixture(scope="module")
def llama():
    step, *arguments = programs.llama_step(NVFP4)
    return audit.audit(step, *arguments, donate=(0, 1, 2)), arguments


def test_llama(llama):
    report, (parameters, *_) = llama
    # 7 linear layers in each of 2: w once each; x once for q, k and v, for o, for gate and up, and for down;
    # g for each.
    assert report.calls(QUANTIZE) == report.calls(AMAX) == 2 * (7 + 4 + 7)
    assert report.calls(MATMUL) == 2 * 7 * 3
    assert report.temporaries <= 4.4e9
    assert report.bytes <= 58.4e9
    assert report.launches <= 232
    assert report.aliased == 3 * 4 * sum(p.size for p in jax.tree.leaves(parameters))
    assert report.outside_graphs == []


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sharded_weight_is_gathered_quantized(axis):
    devices = 8
    mesh, spec_of = plugin.mesh(devices), jax.sharding.PartitionSpec
    tokens = jax.sharding.NamedSharding(mesh, spec_of("x"))
    weight = jax.sharding.NamedSharding(mesh, spec_of("x") if axis == 0 else spec_of(None, "x"))
    step, x, w, key = programs.forward(NVFP4, devices * M, 4096, 14336)
    x, w = x.update(sharding=tokens), w.update(sharding=weight)
    report = audit.audit(jax.jit(step, out_shardings=tokens), x, w, key, devices=devices)
    assert sorted(report.collectives) == ["all-gather", "all-reduce"]  # codes and scales; amax
    received = report.collectives["all-gather"] * (devices - 1) / devices
    assert received <= 29e6  # bytes a device; in bfloat16 102.8e6


# ---- Hazard 28: jit equals eager.


def differs_with_excess_precision(function, *arguments):
    """Whether XLA drops a rounding from the function when it may."""
    texts = []
    for allowed in (True, False):
        options = {"xla_allow_excess_precision": allowed}
        text = audit.audit(function, *arguments, options=options).text
        # From the first computation on, without source positions and what the backend chose.
        text = text[re.search(r"^(ENTRY )?%\S+ \(", text, re.MULTILINE).start() :]
        texts.append(re.sub(r", (metadata|backend_config)=\{.*", "", text))
    return texts[0] != texts[1]


def test_xla_drops_roundings_if_it_may():
    for dtype in (BF16, jnp.float4_e2m1fn):
        assert differs_with_excess_precision(
            lambda x: x.astype(dtype).astype(F32) * 2,  # noqa: B023
            spec(256, 128, dtype=F32),
        )


@pytest.mark.parametrize("recipe", nvfp4.recipes.PRESETS)
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, F32), (F32, BF16, BF16)]
)
def test_28_no_rounding_is_dropped_from_a_product(recipe, dtypes):
    x_dtype, w_dtype, out_dtype = dtypes

    def step(x, w, key, g, bias, accumulate):
        def f(x, w):
            return nvfp4.matmul(
                x,
                w,
                bias=bias,
                accumulate=accumulate,
                out_dtype=out_dtype,
                key=key,
                recipe=nvfp4.recipes.PRESETS[recipe],
            )

        y, pullback = jax.vjp(f, x.astype(x_dtype), w.astype(w_dtype))
        return y, pullback(g.astype(out_dtype))

    wide = [(256, 128), (128, 384), (256, 384), (384,), (256, 384)]
    x, w, g, bias, accumulate = (spec(*s, dtype=F32) for s in wide)
    assert not differs_with_excess_precision(step, x, w, KEY, g, bias, accumulate)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nvfp4.quantize(x.astype(BF16), axis=(-1, -2)),
        lambda x: nvfp4.quantize(x.astype(BF16), amax=jnp.max(jnp.abs(x.astype(BF16)))),
        lambda x: nvfp4.fake_quantize(x.astype(BF16), hadamard=True).astype(F32) * 2,
        lambda x: nvfp4.quantize(x.astype(BF16)).dequantize().astype(F32) * 2,
        lambda x: nvfp4.quantize(x).statistics(),
    ],
    ids=["quantize", "amax", "fake_quantize", "dequantize", "statistics"],
)
def test_28_no_rounding_is_dropped_from_an_op(function):
    assert not differs_with_excess_precision(function, spec(256, 128, dtype=F32))


def test_the_hadamard_transform_back_is_not_rounded_to_tf32():
    q = jax.eval_shape(lambda x: nvfp4.quantize(x, hadamard=True), spec(256, 128, dtype=F32))
    text = audit.audit(lambda q: q.dequantize(), q).text
    assert re.search(r'"operand_precision":\["HIGHEST","HIGHEST"\]', text), text


# ---- What devices send to each other.


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,2,4},{1,3,5}}", [0, 2, 4]),
        ("{}", [0, 1, 2, 3, 4, 5]),
        ("[2,3]<=[6]", [0, 1, 2]),
        ("[2,3]<=[3,2]T(1,0)", [0, 2, 4]),
        ("mesh['a'=3,'b'=2] {'a'}", [0, 2, 4]),
        ("mesh['a'=3,'b'=2] {'b'}", [0, 1]),
        ("mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'b'}", [0, 3]),
        ("mesh['a'=6] {'a':(1)3}", [0, 2, 4]),
        ("mesh['a'=6] {'a':(3)2}", [0, 1]),
    ],
)
def test_groups_of_devices(groups, first):
    attributes = f", channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert collectives._group("all-gather", attributes, 6) == first


def test_collectives_are_those_of_the_program():
    mesh = plugin.mesh(2, 4, names=("data", "model"))
    spec_of = jax.sharding.PartitionSpec

    def place(*axes):
        return jax.sharding.NamedSharding(mesh, spec_of(*axes))

    def function(x):
        def local(x):
            y = jax.lax.all_gather(x, "model", tiled=True)
            y, _ = jax.lax.scan(lambda y, _: (jax.lax.psum(y, "data"), None), y, length=3)
            return jax.lax.psum_scatter(y, "model", tiled=True)

        return jax.shard_map(
            local, mesh=mesh, in_specs=spec_of("model"), out_specs=spec_of("model"), check_vma=False
        )(x)

    x = jax.ShapeDtypeStruct((4096,), F32, sharding=place("model"))
    found = collectives.compiled(jax.jit(function), x, mesh=mesh)
    assert [(c.op, c.axes, c.devices, c.times, c.bytes) for c in found] == [
        ("all-gather", ("model",), 4, 1, 3 * 4096),
        ("all-reduce", ("data",), 2, 3, 4 * 4096),
        ("reduce-scatter", ("model",), 4, 1, 3 * 4096),
    ]


@pytest.mark.parametrize("rows", [128, 64, 32])
def test_a_weight_of_few_rows_on_each_device_is_gathered_quantized(rows):
    """Down to 32, which are less than a tile of scales: these are gathered as bytes, too."""
    devices = 64
    mesh = plugin.mesh(devices)
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    step, x, w, key = programs.forward(NVFP4, devices * 1024, devices * rows, 4096)
    x, w = x.update(sharding=at), w.update(sharding=at)
    key = key.update(sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    found = collectives.compiled(jax.jit(step, out_shardings=at), x, w, key, mesh=mesh)
    assert {t for c in found if c.purpose(None) == "weights" for t in c.dtypes} == {"u8"}
    sent = sum(c.bytes for c in found)
    assert sent <= 0.5625 * (devices - 1) / devices * w.size + 100


MESHES = {
    "FSDP": lambda: sharded.fsdp(8),
    "FSDP along both axes": lambda: sharded.Layout(
        plugin.mesh(4, 2, names=("data", "data2")), ("data", "data2"), None, ("data", "data2")
    ),
    "FSDP x TP": lambda: sharded.fsdp_tp(8, 4),
}


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def layer(request):
    """Collectives of a layer of a Llama-70B forward and backward on eight B200s: in bfloat16, and in NVFP4."""
    layout = request.param()

    def found(name):
        step, *arguments = sharded.layer_step(layout, sharded.LINEARS[name](layout, "float32"))
        return collectives.compiled(step, *arguments, mesh=layout.mesh)

    return layout.model, found("bf16"), found("nvfp4")


def received(found, model, purpose):
    return sum(c.times * c.bytes for c in found if c.purpose(model) == purpose)


def test_weights_and_activations_of_a_layer_are_sent_quantized(layer):
    model, bf16, nvfp4 = layer
    kinds = {c.purpose(model): set() for c in nvfp4}
    for c in nvfp4:
        kinds[c.purpose(model)] |= {(c.op, *c.dtypes)}
    gathered = {("all-gather", "u8")}
    assert kinds.pop("scales") == {("all-reduce", "s32")}
    assert kinds.pop("weights") == gathered
    assert kinds.pop("activations, gathered", gathered) == gathered
    # 16 bits for 4.5, forward and backward.
    ratio = received(bf16, model, "weights") / received(nvfp4, model, "weights")
    assert 3.5 < ratio < 3.56
    if model:
        # x forward, x backward and g: 3 times 16 bits. Here g is sent along both axes: 4 times 4.5.
        purpose = "activations, gathered"
        assert received(bf16, model, purpose) / received(nvfp4, model, purpose) > 2.6
    # What is left are sums.
    assert set(kinds) <= {"gradients", "activations, summed"}


def test_of_sums_each_device_gets_its_part(layer):
    model, bf16, nvfp4 = layer
    sums = [c for c in nvfp4 if c.purpose(model) in ("gradients", "activations, summed")]
    # Gradients of norms are whole on each device.
    large = [c for c in sums if c.elements > 2 * sharded.MODEL]
    assert {c.op for c in large} == {"reduce-scatter"}
    for purpose in ("gradients", "activations, summed"):
        assert received(nvfp4, model, purpose) <= received(bf16, model, purpose)
