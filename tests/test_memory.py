"""amax, quantize and dequantize in poisoned memory of the exact size, under a memory checker.

The same program runs under emulation on aarch64, so this is also the test of the kernels that this
machine does not have.
"""

import platform

import native
import numpy as np
import oracle
import pytest
from helpers import DTYPES, assert_same_bits, wide

CSRC = native.ROOT / "csrc"
TYPES = {"f32": 0, "bf16": 1, "f16": 2}
KEY = (12345, 2**32 - 7)


def sources(target):
    """The units of the three ops, without those of other architectures."""
    machine = platform.machine() if target == "host" else target
    x86 = ("_avx2", "_avxvnni", "_avx512vnni")
    foreign = ("_neon",) if machine in ("x86_64", "AMD64") else x86
    units = [CSRC / "ops" / f"{op}_cpu.cc" for op in ("amax", "quantize", "dequantize")]
    units += [CSRC / "cpu" / "isa.cc", *sorted((CSRC / "cpu").glob("quantize*.cc"))]
    return [native.CPP / "ops_test.cc", *(u for u in units if not u.stem.endswith(foreign))]


@pytest.fixture(scope="module", params=["host", "aarch64"])
def ops(request, tmp_path_factory):
    flags = native.SANITIZE if request.param == "host" else []
    folder = native.shared_folder(tmp_path_factory, "ops")
    return native.build(sources(request.param), folder, request.param, flags)


def isas(ops):
    return ops("isas").tobytes().decode().split()


FLAGS = {
    "1x16": 1,
    "16x16": 1 | 2,
    "1x16 sr": 1 | 4,
    "1x16 rht": 1 | 8,
    "16x16 sr rht": 1 | 2 | 4 | 8,
}


def quantize(ops, isa, x, dtype, rows, columns):
    """What the program wrote, for each orientation: packed codes, tiles, global scale."""
    batch = int(np.prod(x.shape[:-2]))
    r, k = x.shape[-2:]
    how = [None if name is None else FLAGS[name] for name in (rows, columns)]
    amaxes = [
        oracle.amax(oracle.operand(x, axis, bool((f or 0) & 8)))
        for axis, f in zip((-1, -2), how, strict=True)
    ]
    out = ops(
        *("quantize", isa, batch, r, k, TYPES[dtype], how[0] or 0, how[1] or 0),
        *(float(a).hex() for a in amaxes),
        *KEY,
        inputs=x,
    )
    results = []
    for f, (m, n) in zip(how, ((r, k), (k, r)), strict=True):
        if f is None:
            results.append(None)
            continue
        lead = x.shape[:-2]
        shapes = [
            (*lead, m, oracle.ceil_div(n, 32) * 16),
            (*lead, oracle.ceil_div(m, 128), oracle.ceil_div(oracle.ceil_div(n, 16), 4), 512),
        ]
        parts = []
        for shape in shapes:
            size = int(np.prod(shape))
            parts.append(out[:size].reshape(shape))
            out = out[size:]
        results.append((*parts, out[:4].view(np.float32)[0]))
        out = out[4:]
    assert out.size == 0
    return results


def check(ops, shape, dtype, rows, columns, seed=0):
    x = wide(shape, DTYPES[dtype], seed)
    for isa in isas(ops):
        got = quantize(ops, isa, x, dtype, rows, columns)
        for axis, name, result in zip((-1, -2), (rows, columns), got, strict=True):
            if name is None:
                continue
            want = oracle.quantize(
                x,
                axis=axis,
                block=name.split()[0],
                rounding="sr" if "sr" in name else "rne",
                rotate="rht" in name,
                key=KEY,
            )
            packed, tiles, scale = result
            np.testing.assert_array_equal(packed, want.packed, f"{isa} codes {axis}")
            np.testing.assert_array_equal(tiles, want.tiles, f"{isa} scales {axis}")
            assert scale == want.global_scale


@pytest.mark.parametrize("shape", [(1, 80), (127, 17), (129, 300), (2, 3, 40, 70)], ids=str)
@pytest.mark.parametrize("name", FLAGS)
def test_quantize_writes_all_it_owns_and_nothing_else(ops, shape, name):
    other = list(FLAGS)[(list(FLAGS).index(name) + 2) % len(FLAGS)]
    check(ops, shape, "f32", name, None)
    check(ops, shape, "bf16", None, name)
    check(ops, shape, "f16", name, other)


@pytest.mark.parametrize("m", [1, 5, 32, 127, 128, 129])
def test_quantize_of_a_long_row(ops, m):
    check(ops, (m, 11008), "bf16", "1x16", "1x16 rht" if m in (5, 129) else None)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (0, 5, 16)], ids=str)
def test_quantize_of_nothing(ops, shape):
    check(ops, shape, "f32", "1x16", "16x16")


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (129, 300), (2, 3, 40, 70), (0, 16)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_amax_reads_nothing_else(ops, shape, dtype):
    x = wide(shape, DTYPES[dtype])
    want = [oracle.amax(oracle.operand(x, *how)) for how in ((-1, False), (-1, True), (-2, True))]
    for isa in isas(ops):
        batch, (r, k) = int(np.prod(x.shape[:-2])), x.shape[-2:]
        got = ops("amax", isa, batch, r, k, TYPES[dtype], inputs=x, dtype=np.float32)
        assert_same_bits(got, np.array(want, np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (129, 300), (2, 3, 40, 70), (0, 16)], ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_dequantize_reads_and_writes_nothing_else(ops, shape, dtype):
    q = oracle.quantize(wide(shape))
    for isa in isas(ops):
        batch, (r, k) = int(np.prod(shape[:-2])), shape[-2:]
        inputs = q.packed.tobytes() + q.tiles.tobytes() + np.float32(q.global_scale).tobytes()
        got = ops(
            *("dequantize", isa, batch, r, k, TYPES[dtype]), inputs=inputs, dtype=DTYPES[dtype]
        )
        assert_same_bits(got.reshape(shape), oracle.dequantize(q, DTYPES[dtype]))
