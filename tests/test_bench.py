"""The benchmarks: what they count, that they time what they say, and their command line."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from b200 import audit, plugin
from helpers import assert_same_bits
from jax_nvfp4_ops import recipes
from jax_nvfp4_ops.bench import cases, cli, limits, measure, report, rivals

ROOT = pathlib.Path(__file__).parent.parent
TINY = "32x64x96"
CPU = rivals.Platform("cpu")
B200 = rivals.Platform("gpu", (10, 0))


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Tables as in a file, whatever the width of the terminal that the tests were started in."""
    monkeypatch.delenv("COLUMNS", raising=False)


def tiny(op: str, variant: str = "", platform=CPU) -> rivals.Group:
    """The group of an op at a tiny shape."""
    found = rivals.groups(op, cases.select([TINY], 1), platform, recipes.NVIDIA)
    return next(g for g in found if variant in ("", g.variant))


# ---- Shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layers", "experts", "others", "published"),
    [
        # Layers, experts in a layer, other parameters (embedding and head, routers), billions of parameters.
        ("llama-8b", 32, 1, 2 * 128256 * 4096, 8.03),
        ("llama-70b", 80, 1, 2 * 128256 * 8192, 70.6),
        ("llama-405b", 126, 1, 2 * 128256 * 16384, 405.9),
        ("mixtral-8x7b", 32, 8, 2 * 32000 * 4096 + 32 * 8 * 4096, 46.7),
    ],
)
def test_the_layers_of_a_model_have_its_parameters(model, layers, experts, others, published):
    of_layers = sum(
        layer.n * layer.k * (experts if name.startswith("expert") else 1)
        for name, layer in cases.MODELS[model].items()
    )
    assert (layers * of_layers + others) * 1e-9 == pytest.approx(published, abs=0.06)


def test_the_layers_of_deepseek_v3_have_its_parameters():
    size = {name: layer.n * layer.k for name, layer in cases.MODELS["deepseek-v3"].items()}
    attention = sum(size[name] for name in ("q_a", "q_b", "kv_a", "kv_b", "o"))
    dense = size["dense_gate_up"] + size["dense_down"]
    experts = 256 * (size["expert_gate_up"] + size["expert_down"])
    shared = size["shared_gate_up"] + size["shared_down"]
    total = 61 * attention + 3 * dense + 58 * (experts + shared + 256 * 7168) + 2 * 129280 * 7168
    assert total * 1e-9 == pytest.approx(671.0, abs=0.06)


def test_experts_see_their_share_of_the_tokens():
    by_name = {case.name: case.m for case in cases.select(["all"], tokens=8192)}
    assert by_name["llama-8b/o"] == by_name["deepseek-v3/shared_down"] == 8192
    assert by_name["mixtral-8x7b/expert_down"] == 8192 * 2 // 8
    assert by_name["deepseek-v3/expert_down"] == 8192 * 8 // 256


def test_a_case_that_is_named_twice_is_there_once():
    names = ["llama-8b/o", "llama-8b", "3x4x5", "3x4x5"]
    assert [c.name for c in cases.select(names, 7)] == [
        *("llama-8b/o", "llama-8b/qkv", "llama-8b/gate_up", "llama-8b/down", "3x4x5")
    ]


def test_an_unknown_case_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"got 'llama-8b/dwon'; did you mean llama-8b/down\?"):
        cases.select(["llama-8b/dwon"], 1)


def test_bytes_are_those_of_the_arrays():
    case = cases.Case("", 200, 72, 176)
    group = rivals.matmul_group(case, CPU)
    for rival, kind, y in zip(group.rivals[:3], ("nvfp4", "bf16", "f32"), (0, 0, 1), strict=True):
        operands = jax.eval_shape(rival.operands)
        found = measure.nbytes((operands, jax.eval_shape(rival.function, *operands)))
        scalars = 8 if kind == "nvfp4" else 0  # global scales
        assert found == case.matmul_bytes(kind, ("bf16", "f32")[y]) + scalars
    for variant, results in (("rows", 1), ("rows + columns", 2)):
        rival = rivals.quantize_group(case, variant).rivals[0]
        operands = jax.eval_shape(rival.operands)
        found = measure.nbytes((operands, jax.eval_shape(rival.function, *operands)))
        assert found == case.quantize_bytes("bf16", results) + 12 + 4 * results  # amax, key, scales


def test_four_bits_are_half_a_byte():
    f4 = jax.ShapeDtypeStruct((6, 32), jnp.float4_e2m1fn)
    assert measure.nbytes((f4, jax.ShapeDtypeStruct((3,), jnp.bfloat16))) == 6 * 16 + 6


# ---- Rivals ------------------------------------------------------------------------------------------


def values(packed, scales, global_scale, shape):
    """What packed codes and linear scales mean; independent of the package."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)[:, : shape[1]]
    sign = 1 - 2.0 * (codes >> 3)
    scales = np.asarray(scales).view(jnp.float8_e4m3fn).astype(np.float64)
    return sign * grid[codes & 7] * np.repeat(scales, 16, 1)[:, : shape[1]] * float(global_scale)


@pytest.mark.parametrize("variant", rivals.QUANTIZES)
def test_quantizing_in_jnp_gives_what_ours_gives(variant):
    group = rivals.quantize_group(cases.Case("", 48, 1, 80), variant)
    ours, theirs = group.rivals[:2]
    operands = ours.operands()
    quantized = jax.tree.leaves(
        jax.jit(ours.function)(*operands), is_leaf=lambda x: hasattr(x, "codes")
    )
    found = jax.jit(theirs.function)(*operands)
    assert len(found) == 3 * len(quantized)
    for index, q in enumerate(quantized):
        expected = np.asarray(q.dequantize(jnp.float32, transformed=True), np.float64)
        got = values(*(np.asarray(a) for a in found[3 * index : 3 * index + 3]), expected.shape)
        if q.hadamard:  # without the signs, which are a matter of one pass more
            assert got.std() == pytest.approx(expected.std(), rel=0.1)
        elif "SR" in variant:  # other random bits: no more than a step of the grid apart
            assert np.abs(got - expected).max() <= 2.001 * np.abs(expected).max() / 6
            assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.95
        else:  # a division in place of a multiplication, which can take a tie elsewhere
            assert np.isclose(got, expected, rtol=1e-6).mean() > 0.99


def correlation(a, b) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_rivals_that_run_here_make_the_same_product(op):
    group = tiny(op)
    results, refused = {}, {}
    for rival in group.rivals:
        if not rival.unavailable:
            try:
                results[rival.name] = jax.tree.leaves(jax.jit(rival.function)(*rival.operands()))
            except NotImplementedError as error:
                refused[rival.name] = str(error)
    # Of scaled_matmul, which versions before 0.11 have on GPUs only.
    assert all("scaled_matmul" in text for text in refused.values())
    assert {rivals.OURS, "bf16 dot", "f32 dot"} <= set(results)
    x, w, *g = next(r for r in group.rivals if r.name == "f32 dot").operands()
    products = [x @ w, g[0] @ w.T, x.T @ g[0]] if g else [x @ w.T]
    for name, found in results.items():
        for got, expected in zip(found, products, strict=True):
            assert got.shape == expected.shape
            # Normal numbers differ by an eighth or so after four bits, from type to type not at all.
            assert correlation(got, expected) > (0.95 if op == "linear" else 0.97), name


def test_who_can_not_run_says_why():
    reasons = {r.name: r.unavailable for op in rivals.OPS for r in tiny(op).rivals}
    assert reasons["bf16 dot"] is None
    assert "cpu: it runs on CUDA GPUs only" in reasons["TransformerEngine"]
    assert "no fp8" in rivals.Platform("cpu").lacks_fp8()
    hopper, ampere = rivals.Platform("gpu", (9, 0)), rivals.Platform("gpu", (8, 0))
    assert hopper.lacks_fp8() is None and "8.0 has no fp8" in ampere.lacks_fp8()
    case = cases.Case("", 16, 16, 32)
    assert "10.0; this is 9.0" in hopper.lacks_scaled_matmul(case)
    assert B200.lacks_scaled_matmul(case) is None
    assert "multiple of 16; here it is 40" in B200.lacks_scaled_matmul(cases.Case("", 8, 8, 40))
    assert "10.0; this is 9.0" in hopper.lacks_transformer_engine()
    assert "can not be imported: ModuleNotFoundError" in B200.lacks_transformer_engine()
    assert (hopper.our_limit, B200.our_limit) == ("bf16", "fp4")


def test_transformer_engine_is_called_as_its_documentation_says(monkeypatch):
    """A double of its interface: `autocast(enabled=, recipe=)` around `DenseGeneral.apply`."""
    within = []

    class Autocast:
        def __init__(self, *, enabled, recipe):
            assert enabled and recipe == "NVFP4BlockScaling()"

        def __enter__(self):
            within.append(self)

        def __exit__(self, *error):
            within.pop()

    class DenseGeneral:
        def __init__(self, *, features, use_bias, dtype):
            assert not use_bias
            self.features, self.dtype = features, dtype

        def apply(self, variables, x, *, rngs):
            assert within and rngs["sr_rng"].dtype == jnp.uint32
            kernel = variables["params"]["kernel"]
            assert kernel.shape == (x.shape[-1], self.features)
            return (x @ kernel).astype(self.dtype)

    modules = {
        "transformer_engine": {},
        "transformer_engine.jax": {"autocast": Autocast},
        "transformer_engine.jax.flax": {"DenseGeneral": DenseGeneral},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"NVFP4BlockScaling": lambda: "NVFP4BlockScaling()"},
    }
    for name, names in modules.items():
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    assert B200.lacks_transformer_engine() is None
    group = tiny("linear", platform=B200)
    theirs = next(r for r in group.rivals if r.name == "TransformerEngine")
    expected = next(r for r in group.rivals if r.name == "bf16 dot")
    operands = theirs.operands()
    got = jax.jit(theirs.function)(*operands)
    for a, b in zip(*map(jax.tree.leaves, (got, expected.function(*operands[:3]))), strict=True):
        assert correlation(a, b) > 0.999


# ---- Timing ------------------------------------------------------------------------------------------


def counting(calls: list[int], *, pure=False) -> rivals.Rival:
    """A rival whose calls are counted; XLA may drop, merge or move a pure one as any other operation."""

    def count(x):
        calls.append(1)
        return np.zeros((4,), np.float32)

    callback = jax.pure_callback if pure else jax.experimental.io_callback
    return rivals.Rival(
        "counting",
        lambda x: callback(count, jax.ShapeDtypeStruct((4,), jnp.float32), x),
        lambda: (jnp.ones((8,)),),
    )


@pytest.mark.parametrize("loop", [False, True])
def test_a_run_makes_as_many_calls_as_it_divides_by(loop):
    calls: list[int] = []
    program = measure.Program(counting(calls), jax.devices()[0], cache=150, loop=loop)
    assert program.nbytes == 32 + 16
    assert program.sets == 7  # ceil(300 / 48)
    assert program.cold
    if loop:
        program._make_loop(5)
        assert program.calls == 35
    else:
        program.calls = 12
    calls.clear()
    assert program.run() > 0
    assert len(calls) == program.calls


@pytest.mark.parametrize("op", rivals.OPS)
def test_a_loop_has_the_results_of_its_calls(op):
    """What runs on a GPU, with a CPU's operations."""
    for rival in tiny(op).rivals[:2]:
        program = measure.Program(rival, jax.devices()[0], cache=1, loop=True)
        program.sets, program._operands = 2, 2 * program._operands
        program._make_loop(3)
        program.run()
        expected = jax.tree.leaves(jax.jit(rival.function)(*rival.operands()))
        for results in program._results:
            for got, wanted in zip(results, expected, strict=True):
                assert_same_bits(got, wanted)


def test_work_that_xla_moves_out_of_the_loop_is_reported():
    """On a CPU it does, as that backend drops barriers early; a pure callback shows it."""
    calls: list[int] = []
    program = measure.Program(counting(calls, pure=True), jax.devices()[0], cache=150, loop=True)
    program._make_loop(5)
    calls.clear()
    program.run()
    assert (len(calls) < program.calls) == bool(program.moved)
    assert "custom-call" in program.moved


def test_work_in_the_loop_is_not_reported():
    text = """HloModule jit_loop

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %custom-call.1 = f32[8]{0} custom-call(%x), custom_call_target="nvfp4_matmul_v1"
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0), sharding={replicated}
  %constant_1 = s32[] constant(0)
  %copy.2 = s32[] copy(%constant_1)
  %tuple.4 = (s32[], f32[8]{0}) tuple(%copy.2, %p0)
  %while.1 = (s32[], f32[8]{0}) while(%tuple.4), condition=%c, body=%body
  ROOT %get-tuple-element.1 = f32[8]{0} get-tuple-element(%while.1), index=1
}
"""
    assert measure.moved_out_of_loop(text) == ()
    more = "  %fusion.1 = (f32[8]{0}, f32[]) fusion(%p0), kind=kLoop\n  %constant_1"
    assert measure.moved_out_of_loop(text.replace("  %constant_1", more, 1)) == ("fusion",)


@pytest.fixture(scope="module")
def b200():
    """Compiles for the chip; nothing runs."""
    plugin.load_for_tests()


# Sizes whose products XLA gives to cuBLASLt, cuDNN, and us.
COMPILED = "256x512x1024"


@pytest.mark.parametrize(
    ("op", "variant", "targets"),
    [
        ("quantize", "rows, amax included", ["nvfp4_amax", "nvfp4_quantize"]),
        ("quantize", "rows + columns, 16x16", ["nvfp4_quantize"]),
        ("matmul", "", ["nvfp4_matmul"]),
        ("linear", "", ["nvfp4_amax", "nvfp4_quantize", "nvfp4_matmul"]),
    ],
)
def test_on_a_b200_each_round_of_the_loop_does_all_the_work(b200, op, variant, targets):
    sets, rounds = 6, 10
    [case] = cases.select([COMPILED], 1)
    found = rivals.groups(op, [case], B200, recipes.NVIDIA)
    group = next(g for g in found if variant in ("", g.variant))
    for rival in group.rivals:
        if rival.unavailable:
            continue
        leaves, tree = jax.tree.flatten(tuple(jax.eval_shape(rival.operands)))

        def flat(*leaves, function=rival.function, tree=tree):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

        results = jax.eval_shape(flat, *leaves)
        report = audit.audit(
            measure.in_a_loop(flat, rounds),
            *([leaves] * sets, [results] * sets),
            donate=(1,),
            options=measure._SERIAL,
        )
        if rival.name == rivals.OURS:
            one = audit.audit(flat, *leaves)
            for target in targets:
                assert report.calls(target) == one.calls(target) * sets * rounds > 0, target
        # Each call writes to memory of its own, which is used again in the next round.
        assert report.aliased == sets * measure.nbytes(results)
        # XLA may transpose an operand of a rival before the loop, to the rival's advantage; a remark says so.
        moved = measure.moved_out_of_loop(report.text)
        assert moved == () or (rival.name != rivals.OURS and moved == ("fusion",)), rival.name
        if rival.proof:
            assert rival.proof in report.text
        flops = sum(k.times * k.flops for k in report.kernels)
        if "dot" in rival.name and rival.proof is None:
            assert flops == sets * rounds * group.flops


def test_calls_go_round_the_sets():
    program = measure.Program(counting([]), jax.devices()[0], cache=150, loop=False)
    used = []
    program._call = lambda *leaves: used.append(leaves[0].unsafe_buffer_pointer())
    program.calls = 2 * program.sets
    program.run()
    assert len(set(used)) == program.sets
    assert used[: program.sets] == used[program.sets :]


def test_the_number_of_sets_is_bounded():
    small = measure.Program(counting([]), jax.devices()[0], cache=1 << 20, loop=False)
    assert small.sets == measure.MOST_SETS and not small.cold
    large = measure.Program(counting([]), jax.devices()[0], cache=10, loop=False)
    assert large.sets == 1 and large.cold


@pytest.mark.parametrize("loop", [False, True])
def test_a_run_is_made_to_last(monkeypatch, loop):
    """A clock of its own: a launch takes 1 ms, a call 10 us."""
    launch = 1e-3 if loop else 0.0
    monkeypatch.setattr(measure.Program, "run", lambda self: launch + 1e-5 * self.calls)
    program = measure.Program(counting([]), jax.devices()[0], cache=150, loop=loop)
    program.fit(0.05)
    assert 0.04 <= program.run() <= 0.06
    assert program.calls >= 4000


def test_what_xla_compiled_to_something_else_is_not_measured():
    rival = rivals.Rival("fp8", lambda x: -x, lambda: (jnp.ones(8),), proof="$f8")
    with pytest.raises(RuntimeError, match=r"'\$f8' is not in the program"):
        measure.Program(rival, jax.devices()[0], cache=10, loop=True)


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(measure, "_SERIAL", {"xla_gpu_of_another_version": "SERIALIZE"})
    program = measure.Program(counting([]), jax.devices()[0], cache=10, loop=True)
    assert program.run() > 0


def test_rivals_take_turns(monkeypatch):
    order = []

    def logged(self):
        order.append(self.rival.name)
        return 12.0

    monkeypatch.setattr(measure.Program, "run", logged)
    monkeypatch.setattr(measure.Program, "fit", lambda self, seconds: setattr(self, "calls", 4))
    found = measure.measure(tiny("matmul"), jax.devices()[0], 10, measure.Settings(3, 0.0))
    names = [m.rival for m in found if not m.reason]
    assert len(names) >= 3
    assert order[-3 * len(names) :] == 3 * names
    assert all(m.seconds == (3.0, 3.0, 3.0) for m in found if not m.reason)


def test_a_rival_that_fails_is_reported_and_the_others_measured():
    group = tiny("matmul")

    def fails(x, w):
        raise ValueError("no such thing\nat all")

    broken = rivals.Rival("broken", fails, group.rivals[1].operands)
    group = rivals.Group("matmul", group.case, "", group.flops, (*group.rivals[:2], broken))
    ours, dot, failed = measure.measure(
        group, jax.devices()[0], 10, measure.Settings(2, 0.0), lambda text: None
    )
    assert failed.reason == "ValueError: no such thing"
    assert ours.reason is None and dot.reason is None


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 100])
def test_percentiles_are_numpys(percent):
    values = list(np.random.default_rng(0).normal(size=11))
    assert measure.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert measure.percentile([3.0], percent) == 3.0


# ---- Limits ------------------------------------------------------------------------------------------

# Published dense throughput with float32 accumulation, in TFLOP/s, of a product with so many SMs at a boost clock in
# MHz. NVIDIA: A100 and H100 white papers; Ampere GA102, Ada and RTX Blackwell architecture white papers; L40S and
# Blackwell data sheets. For B200 and B300 no boost clock is published: 1.85 GHz is what their bfloat16 figure implies.
PUBLISHED = [
    ("A100 SXM", (8, 0), 108, 1410, {"bf16": 312}),
    ("RTX A6000", (8, 6), 84, 1800, {"bf16": 154.8}),
    ("GeForce RTX 3090", (8, 6), 82, 1695, {"bf16": 71}),
    ("L40S", (8, 9), 142, 2520, {"bf16": 362, "fp8": 733}),
    ("GeForce RTX 4090", (8, 9), 128, 2520, {"bf16": 165.2, "fp8": 330.3}),
    ("H100 SXM", (9, 0), 132, 1830, {"bf16": 989.4, "fp8": 1978.9}),
    ("B200", (10, 0), 148, 1850, {"bf16": 2250, "fp8": 4500, "fp4": 9000}),
    ("B300", (10, 3), 148, 1850, {"bf16": 2250, "fp8": 4500, "fp4": 13500}),
    ("GeForce RTX 5090", (12, 0), 170, 2407, {"bf16": 209.5, "fp8": 419, "fp4": 1676}),
    ("RTX PRO 6000", (12, 0), 188, 2617, {"bf16": 503.8, "fp8": 1007.6, "fp4": 2015}),
]


class Driver:
    """A double of cuda.bindings.driver: each function returns a status and its answer."""

    class CUdevice_attribute:  # noqa: N801
        def __getattr__(self, name):
            return name.removeprefix("CU_DEVICE_ATTRIBUTE_")

    CUdevice_attribute = CUdevice_attribute()

    def __init__(self, name, attributes, fail=None):
        self.name, self.attributes, self.fail = name, attributes, fail

    def _answer(self, function, *answer):
        return (999 if function == self.fail else 0, *answer)

    def cuInit(self, flags):  # noqa: N802
        return self._answer("cuInit")

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return self._answer("cuDeviceGet", ordinal)

    def cuDeviceGetName(self, size, device):  # noqa: N802
        return self._answer("cuDeviceGetName", self.name.encode().ljust(size, b"\0"))

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return self._answer("cuDeviceGetAttribute", self.attributes[attribute])

    def cuDriverGetVersion(self):  # noqa: N802
        return self._answer("cuDriverGetVersion", 13010)


def driver(name, capability, sms, mhz, fail=None) -> Driver:
    return Driver(
        f"NVIDIA {name}",
        {
            "COMPUTE_CAPABILITY_MAJOR": capability[0],
            "COMPUTE_CAPABILITY_MINOR": capability[1],
            "MULTIPROCESSOR_COUNT": sms,
            "CLOCK_RATE": mhz * 1000,
            "MEMORY_CLOCK_RATE": 3996000,
            "GLOBAL_MEMORY_BUS_WIDTH": 7680,
            "L2_CACHE_SIZE": 132644864,
        },
        fail,
    )


@pytest.mark.parametrize("product", PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_limits_of_a_gpu_are_the_published_ones(product):
    name, capability, sms, mhz, tflops = product
    found = limits.of_cuda(driver(name, capability, sms, mhz), 0)
    assert {f: v * 1e-12 for f, v in found.flops.items()} == pytest.approx(tflops, rel=0.015)


def test_limits_of_a_gpus_memory():
    found = limits.of_cuda(driver("NVIDIA B200", (10, 0), 148, 1965), 0)
    assert found.bandwidth == pytest.approx(7.67e12, rel=0.001)  # as measured figures quote it
    assert found.cache == 132644864
    assert found.facts["driver_cuda"] == "13.1"
    assert found.facts["name"] == "NVIDIA NVIDIA B200"


def test_a_capability_that_is_not_in_the_table_has_no_flops():
    found = limits.of_cuda(driver("New", (13, 0), 10, 1000), 0)
    assert found.flops == {} and "13.0 are not in the table" in found.source
    assert found.bandwidth


class Gpu:
    platform, local_hardware_id, device_kind, compute_capability = "gpu", 0, "NVIDIA B200", "10.0"


def bindings(monkeypatch, driver) -> None:
    """Puts a double in place of cuda.bindings; None for a package that is not there."""
    package = types.ModuleType("cuda.bindings")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package if driver else None)


def test_limits_without_bindings_or_driver_say_what_is_missing(monkeypatch):
    bindings(monkeypatch, None)
    found = limits.of_device(Gpu)
    assert "pip install 'jax-nvfp4-ops[bench]'" in found.source
    assert found.cache >= 128 << 20 and found.bandwidth is None and not found.flops
    bindings(monkeypatch, driver("B200", (10, 0), 148, 1965, fail="cuDeviceGetAttribute"))
    assert "cuDeviceGetAttribute failed with 999" in limits.of_device(Gpu).source
    bindings(monkeypatch, driver("B200", (10, 0), 148, 1965))
    assert limits.of_device(Gpu).flops["fp4"] == 32768 * 148 * 1965e6
    assert rivals.Platform.of(Gpu) == B200
    amd = types.SimpleNamespace(platform="gpu", compute_capability="gfx942")
    assert rivals.Platform.of(amd) == rivals.Platform("gpu")


def test_the_real_bindings_have_what_is_asked_of_them():
    """Without a driver, which is the case of most machines that test this, every call fails cleanly."""
    pytest.importorskip("cuda.bindings", reason="pip install 'jax-nvfp4-ops[bench]'")
    from cuda.bindings import driver as real

    for name in driver("", (0, 0), 0, 0).attributes:
        assert hasattr(real.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    names = ("cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute")
    assert all(callable(getattr(real, name)) for name in (*names, "cuDriverGetVersion"))
    bindings = limits.of_device(Gpu)  # no traceback, with a driver or without
    assert bindings.flops or bindings.source.startswith("not known: ")


def test_limits_of_this_cpu(monkeypatch):
    monkeypatch.setattr(limits, "_cpu_cache", lambda: 1 << 20)
    found = limits.of_device(jax.devices()[0])
    assert 1e8 < found.bandwidth < 1e13
    assert not found.flops
    assert "measured" in found.source


# ---- Records, files, plots ----------------------------------------------------------------------------


def result_of(median: float = 1e-3, *, fast: float = 2.0, flops=True) -> dict:
    """A file of a B200, as if measured."""
    bounds = limits.of_cuda(driver("NVIDIA B200", (10, 0), 148, 1965), 0)
    rows = []
    for op, variant in (("matmul", ""), ("quantize", "rows"), ("quantize", "columns")):
        group = tiny(op, variant, B200)
        times = tuple(median * t for t in (0.9, 1.0, 1.2))
        found = [
            measure.Measurement(r.name, r.limit, r.unavailable or None)
            if r.unavailable
            else measure.Measurement(
                r.name,
                r.limit,
                None,
                times if r.name == rivals.OURS else tuple(fast * t for t in times),
                1 << 20,
                8,
                True,
            )
            for r in group.rivals
        ]
        rows += report.records(group, found, bounds)
    return {
        "format": report.FORMAT,
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"jax": "0.10.2", "jax_nvfp4_ops": "0.1.0"},
        "device": {"platform": "gpu", "kind": "NVIDIA B200"},
        "settings": {"tokens": 32},
        "limits": {
            "flops": dict(bounds.flops) if flops else {},
            "bandwidth": bounds.bandwidth,
        },
        "results": rows,
    }


def test_records_have_rates_shares_and_ratios():
    rows = result_of()["results"]
    ours, dot = rows[0], next(r for r in rows if r["rival"] == "bf16 dot")
    flops = 2 * 32 * 64 * 96
    assert ours["flops_per_s"] == pytest.approx(flops / 1e-3)
    assert ours["percent_of_flops"] == pytest.approx(100 * flops / 1e-3 / (32768 * 148 * 1965e6))
    assert dot["percent_of_flops"] == pytest.approx(100 * flops / 2e-3 / (8192 * 148 * 1965e6))
    assert ours["percent_of_bandwidth"] == pytest.approx(
        100 * (1 << 20) / 1e-3 / 7.672e12, rel=1e-3
    )
    assert dot["speedup"] == dot["speedup_p10"] == dot["speedup_p90"] == pytest.approx(2)
    assert "speedup" not in ours
    reasons = [r["reason"] for r in rows if r["rival"] == "TransformerEngine"]
    assert len(reasons) == 3 and all(reasons)


def text_of(renderable) -> str:
    console = report.console()
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_tables_show_the_figures():
    sections = list(report.sections(result_of()["results"]))
    assert [section[0]["op"] for section in sections] == ["matmul", "quantize"]
    matmul = text_of(report.table(sections[0], giga=False))
    assert "1.00 ms" in matmul and "920 us - 1.16 ms" in matmul and "2.00 x" in matmul
    assert "TFLOP/s" in matmul and matmul.count("of limit") == 2
    quantize = text_of(report.table(sections[1], giga=True))
    assert "columns" in quantize and "GB/s" in quantize and "FLOP/s" not in quantize
    assert any("TransformerEngine" in line for line in report.remarks(sections[0]))
    row = sections[0][1] | {"moved_out_of_loop": ["transpose", "copy"], "cold": False}
    assert report.remarks([row]) == [
        "from the cache, as the shape is small: bf16 dot",
        "not timed, as XLA moved it out of the loop: bf16 dot: transpose, copy",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (4.567e-4, "457 us"), (1.5e-7, "0.15 us")],
)
def test_durations(seconds, text):
    assert report.duration(seconds) == text


@pytest.mark.parametrize("flops", [True, False])
def test_plots(tmp_path, flops):
    pytest.importorskip("matplotlib", reason="pip install 'jax-nvfp4-ops[bench]'")
    result = result_of(flops=flops)
    for name, chosen in (
        ("all.png", result["results"]),
        ("quantize.svg", [r for r in result["results"] if r["op"] == "quantize"]),
        ("matmul.pdf", [r for r in result["results"] if r["op"] == "matmul"]),
    ):
        report.plot(str(tmp_path / name), result | {"results": chosen})
        assert (tmp_path / name).stat().st_size > 5000


def test_a_comparison_tells_change_from_chance():
    old, new = result_of(1e-3), result_of(0.5e-3)
    new["versions"] = new["versions"] | {"jax": "0.12.0"}
    del new["results"][-4:]
    circumstances, table, alone = report.compare(old, new)
    assert circumstances == ["versions, jax: 0.10.2 -> 0.12.0"]
    text = text_of(table)
    assert "2.00 x" in text and "within spread" not in text
    assert any("only in the old file: quantize/32x64x96/columns: nvfp4" in line for line in alone)
    _, table, alone = report.compare(old, result_of(0.95e-3))
    assert "1.05 x" in text_of(table) and "within spread" in text_of(table) and not alone


# ---- The command --------------------------------------------------------------------------------------


def command(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_nvfp4_ops", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_a_run_from_the_shell(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'jax-nvfp4-ops[bench]'")
    files = {name: tmp_path / f"result.{name}" for name in ("json", "csv", "png")}
    done = command(
        *("bench", "--quick", "--case", TINY, "--filter", "rows$|matmul|linear"),
        *("--json", files["json"], "--csv", files["csv"], "--plot", files["png"]),
    )
    assert done.returncode == 0, done.stderr
    assert "[1/3] quantize/32x64x96/rows\n" in done.stderr
    for words in (
        "jnp under jit",
        "bf16 dot",
        "not run: TransformerEngine",
        f"wrote {files['csv']}",
    ):
        assert words in done.stdout
    result = json.loads(files["json"].read_text())
    assert result["complete"] and result["format"] == report.FORMAT
    assert result["command"].startswith("python -m jax_nvfp4_ops bench --quick --case 32x64x96")
    assert result["versions"]["jax"] == jax.__version__
    assert result["device"]["platform"] == "cpu" and result["limits"]["bandwidth"] > 0
    ours = [row for row in result["results"] if row["rival"] == "nvfp4"]
    assert [row["op"] for row in ours] == ["quantize", "matmul", "linear"]
    assert all(row["median_s"] > 0 and len(row["seconds"]) == 3 for row in ours)
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert len(rows) == len(result["results"])
    assert float(rows[0]["median_s"]) == ours[0]["median_s"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")

    done = command("bench", "--compare", files["json"], files["json"])
    assert done.returncode == 0, done.stderr
    assert "1.00 x" in done.stdout and "matmul/32x64x96: bf16 dot" in done.stdout


@pytest.fixture
def small_cache(monkeypatch):
    """Runs in this process: no gigabyte for the measurement of bandwidth, and the setting of JAX put back."""
    monkeypatch.setattr(limits, "_cpu_cache", lambda: 1 << 16)
    yield
    jax.config.update("jax_cpu_enable_async_dispatch", True)


def test_the_list_measures_nothing(small_cache, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure", None)
    assert cli.main(["--list", "--case", "llama-8b", "--tokens", "77"]) == 0
    out = capsys.readouterr().out
    assert "linear/llama-8b/gate_up/nvidia" in out and " 77 " in out and "28672" in out
    assert "not run: TransformerEngine: cpu: it runs on CUDA GPUs only" in out


def test_an_interrupted_run_keeps_what_it_has(small_cache, monkeypatch, tmp_path, capsys):
    real = measure.measure

    def interrupted(group, *arguments):
        if group.op == "linear":
            raise KeyboardInterrupt
        return real(group, *arguments)

    monkeypatch.setattr(measure, "measure", interrupted)
    file = tmp_path / "part.json"
    arguments = ["--quick", "--case", TINY, "--filter", "matmul|linear", "--json", str(file)]
    assert cli.main(arguments) == 130
    result = json.loads(file.read_text())
    assert not result["complete"]
    assert {row["op"] for row in result["results"]} == {"matmul"}
    assert "interrupted" in capsys.readouterr().out


def test_a_failure_of_ours_is_the_exit_status(small_cache, monkeypatch, capsys):
    monkeypatch.setattr(rivals, "QUANTIZES", {"rows": {"axis": -3}})  # which quantize refuses
    assert cli.main(["--quick", "--op", "quantize", "--case", TINY]) == 1
    out = capsys.readouterr().out
    assert "not run: nvfp4: ValueError: quantize: axis must be" in out
    assert "nvfp4 failed in 1 of 1" in out and "doctor" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: must be a positive whole number; got '0'"),
        (["--seconds", "nan"], "argument --seconds: must be a positive number; got 'nan'"),
        (["--repeats", "x"], "argument --repeats: must be a positive whole number; got 'x'"),
        (["--case", "lama-8b"], "got 'lama-8b'; did you mean llama-8b?"),
        (["--filter", "("], "argument --filter: must be a regular expression; got '('"),
        (["--filter", "none such"], "must match a name of --list; got 'none such'"),
        (["--recipe", "x"], f"must be one of {', '.join(recipes.PRESETS)}; got 'x'"),
        (["--json", "no/such/a.json"], "make 'no/such' first"),
        (["--json", "a.txt"], "must end in .json; got 'a.txt'"),
        (["--plot", "a.jpg"], "must end in .png or .pdf or .svg; got 'a.jpg'"),
        (["--compare", "no.json", "b.json"], "must be a file that `bench --json` wrote; no.json"),
        (["--list", "--compare", "a", "b"], "not allowed with"),
        (["--op", "gemm"], "invalid choice: 'gemm'"),
    ],
)
def test_bad_arguments(small_cache, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_the_commands_of_the_documentation_are_ones():
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    lines = re.findall(r"^python -m jax_nvfp4_ops bench *(.*)$", page, re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        options = cli.parser().parse_args(shlex.split(line, comments=True))
        assert cases.select(options.case or ["all"], 1)
        assert options.recipe in recipes.PRESETS


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_what_is_missing_is_named(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["--plot", "a.png"]) == 1
    expected = f"bench: {package} must be installed: pip install 'jax-nvfp4-ops[bench]'"
    assert capsys.readouterr().err.startswith(expected)


def test_without_a_device_there_is_no_traceback():
    done = command("bench", "--quick", JAX_PLATFORMS="cuda")
    assert done.returncode == 1
    assert "bench: JAX finds no device" in done.stderr and "Traceback" not in done.stderr
    assert "python -m jax_nvfp4_ops doctor" in done.stderr


@pytest.mark.parametrize("words", [["bench", "--list", "--case", "all"], ["doctor"]])
def test_a_pipe_that_closes_makes_no_traceback(words):
    arguments = [sys.executable, "-m", "jax_nvfp4_ops", *words]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_the_command_line_names_its_commands():
    done = command("measure")
    assert done.returncode == 2 and "(choose from 'bench', 'doctor')" in done.stderr.replace(
        "choose from bench, doctor", "choose from 'bench', 'doctor'"
    )
    assert command("--help").returncode == 0


def test_the_package_imports_none_of_this():
    code = (
        "import sys, jax_nvfp4_ops; "
        "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'matplotlib') "
        "or m.startswith('jax_nvfp4_ops.') and m.split('.')[1] in ('bench', 'doctor', '__main__')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
