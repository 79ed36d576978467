"""csrc/core against ml_dtypes and the oracle, on this machine and, under emulation, on aarch64.

By default the encoders see four million floats all over the range and the neighbourhood of every
midpoint. NVFP4_EXHAUSTIVE=1 shows them all 2^32 (a quarter of an hour).
"""

import os

import ml_dtypes
import native
import numpy as np
import oracle
import pytest

F32, U32 = np.float32, np.uint32
EXHAUSTIVE = os.environ.get("NVFP4_EXHAUSTIVE") == "1"


def build(target, tmp_path_factory):
    folder = native.shared_folder(tmp_path_factory, "core")
    return native.build([native.CPP / "core_test.cc"], folder, target)


@pytest.fixture(scope="module", params=["host", "aarch64"])
def core(request, tmp_path_factory):
    return build(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def host_core(tmp_path_factory):
    return build("host", tmp_path_factory)


# What each encoder must give: the conversion of ml_dtypes, with saturation where it has none.
ENCODERS = {
    "encode_e2m1": (
        np.uint8,
        lambda x: np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15,
        oracle.E2M1,
    ),
    "encode_e4m3": (
        np.uint8,
        lambda x: np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        oracle.E4M3,
    ),
    "encode_bf16": (
        np.uint16,
        lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint16),
        np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32),
    ),
    "encode_f16": (
        np.uint16,
        lambda x: x.astype(np.float16).view(np.uint16),
        np.arange(2**16, dtype=np.uint16).view(np.float16).astype(F32),
    ),
}
MAGNITUDE = {"encode_e2m1": 15, "encode_e4m3": 0x7F, "encode_bf16": 0x7FFF, "encode_f16": 0x7FFF}
NAN = {"encode_e2m1": 0, "encode_e4m3": 0x7F, "encode_bf16": 0x7F81, "encode_f16": 0x7C01}


def check_encoder(name, x, got):
    """`got` is what csrc/core made of `x`; NaN may have any payload (and is any code of E2M1)."""
    _, expected, _ = ENCODERS[name]
    nan = np.isnan(x)
    with np.errstate(all="ignore"):
        wrong = ~nan & (got != expected(x))
    assert not wrong.any(), (name, x[wrong][:5], got[wrong][:5])
    assert (got[nan] & MAGNITUDE[name] >= NAN[name]).all()
    if name == "encode_e2m1":
        assert (got < 16).all()


def neighbourhood(values):
    """Every value, every midpoint of neighbours, and the two floats on each side of them."""
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(F32)
    around = (points.view(U32)[:, None] + np.arange(-2, 3).astype(U32)).reshape(-1)
    return np.unique(around).view(F32)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_rounds_as_ml_dtypes(core, name):
    dtype, _, values = ENCODERS[name]
    spread = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(U32).view(F32)
    limits = np.array([0, -0.0, np.inf, -np.inf, np.nan, 464, 65504, 65520], F32)
    for x in (spread, neighbourhood(values), limits):
        check_encoder(name, x, core(name, inputs=x, dtype=dtype))


@pytest.mark.skipif(not EXHAUSTIVE, reason="all 2^32 floats: NVFP4_EXHAUSTIVE=1")
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_rounds_every_float_as_ml_dtypes(host_core, name):
    chunk = 2**24
    for first in range(0, 2**32, chunk):
        x = np.arange(first, first + chunk, dtype=np.uint64).astype(U32).view(F32)
        check_encoder(name, x, host_core(name, first, chunk, dtype=ENCODERS[name][0]))


@pytest.mark.parametrize("name", ENCODERS)
def test_decoder_gives_every_code(core, name):
    dtype, _, values = ENCODERS[name]
    got = core(
        name.replace("encode", "decode"), inputs=np.arange(len(values)).astype(dtype), dtype=F32
    )
    nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(U32)[~nan], values.view(U32)[~nan])  # -0 too


def test_philox(core):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (1000, 6), U32)
    words[0] = 0
    words[1] = 0xFFFFFFFF
    got = core("philox", inputs=words, dtype=U32).reshape(-1, 4)
    # The known-answer vectors of Random123, then the oracle.
    assert got[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert got[1].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    for words_of_one, expected in zip(words[:100], got, strict=False):
        assert [int(w) for w in oracle.philox4x32(words_of_one[2:], words_of_one[:2])] == list(
            expected
        )


POSITION = np.dtype([("key", U32, 2), ("row", np.int64), ("block", np.int64), ("stream", U32, 2)])


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("row", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7])
def test_random_bits_of_a_block(core, row, stream):
    blocks = np.array([0, 1, 167, 2**27])
    position = np.zeros(blocks.size, POSITION)
    position["key"], position["row"], position["block"] = (7, 2**32 - 5), row, blocks
    position["stream"][:, 0] = stream
    got = core("block_random", inputs=position, dtype=U32).reshape(-1, 16)
    for block, u in zip(blocks, got, strict=True):
        words = oracle.philox4x32((block, row % 2**32, row // 2**32, stream), (7, 2**32 - 5))
        expected = [int(words[i // 4]) >> (0, 16, 7, 23)[i % 4] & 511 for i in range(16)]
        assert u.tolist() == expected


def test_stochastic_rounding(core):
    """Every value of `u` for many y: the codes of the oracle, and so its distribution."""
    rng = np.random.default_rng(0)
    y = np.concatenate(
        [
            neighbourhood(oracle.E2M1),
            rng.uniform(-6.5, 6.5, 2000).astype(F32),
            np.exp(rng.uniform(-80, 80, 500)).astype(F32),
            np.array([np.inf, -np.inf, 1e-45, 2.0**-10, 2.0**-11], F32),
        ]
    )
    y = y[~np.isnan(y)]
    record = np.zeros((y.size, 512), [("y", F32), ("u", U32)])
    record["y"], record["u"] = y[:, None], np.arange(512)
    got = core("encode_stochastic", inputs=record).reshape(record.shape)
    np.testing.assert_array_equal(got, oracle.encode_e2m1_sr(record["y"], record["u"]))


def test_hadamard(core):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5000, 16)).astype(F32)
    x[1000:2000] *= np.exp(rng.uniform(-30, 30, (1000, 1))).astype(F32)  # rows of their own scale
    x[2000:3000] *= np.exp(rng.uniform(-30, 30, (1000, 16))).astype(F32)
    x[3000:3016] = np.eye(16)
    x[3016:3034] = 0
    x[3017] = -0.0
    # Row i of H16, as signs of zeros: its transform is -0 at i (its signs make the others +0).
    x[3018:3034] = np.copysign(0, -oracle.hadamard_matrix() * oracle.SIGNS)
    for mask in (0xD7E8, 0):
        signs = np.array([-1 if mask >> i & 1 else 1 for i in range(16)], F32)
        record = np.zeros(len(x), [("x", F32, 16), ("signs", U32)])
        record["x"], record["signs"] = x, mask
        got = core("hadamard", inputs=record, dtype=F32).reshape(x.shape)
        np.testing.assert_array_equal(got.view(U32), oracle.hadamard(x, signs).view(U32))


def test_block(core):
    """Scale, encode factor, code and value of a block, for amaxes all over the range of float32."""
    rng = np.random.default_rng(0)
    n = 200_000
    record = np.zeros(n, [("tensor", F32), ("block", F32), ("x", F32)])
    record["tensor"] = np.exp2(rng.uniform(-149, 127.9, n))
    record["tensor"][: n // 4] = rng.uniform(1, 4, n // 4)
    # From far below the tensor's to, as with a delayed amax, above it.
    with np.errstate(over="ignore"):
        record["block"] = record["tensor"] * np.exp2(rng.uniform(-30, 2, n).astype(F32))
    record["block"][::7] = 0
    record["x"] = record["block"] * rng.uniform(-1, 1, n).astype(F32)
    edges = [0, 1e-45, 7.9e-36, 7.8e-36, 7.6e35, oracle.FLT_MAX, 2688, 1]
    record["tensor"][: len(edges)] = edges
    record["block"][: len(edges)] = edges
    record["x"][: len(edges)] = edges
    # Blocks whose scale lies within three floats of the middle between two E4M3 numbers.
    near = record["tensor"][n // 4 : n // 2]
    grid = oracle.E4M3[:0x7F].astype(np.float64)
    middle = rng.choice((grid[1:] + grid[:-1]) / 2, near.size)
    with np.errstate(over="ignore"):
        factor = np.minimum(F32(2688) / near, oracle.FLT_MAX) * F32(1 / 6)
        block = (middle / factor).astype(F32).view(U32) + rng.integers(-3, 4, near.size)
    record["block"][n // 4 : n // 2] = block.astype(U32).view(F32)
    record = record[np.isfinite(record["tensor"]) & np.isfinite(record["block"])]
    out = np.dtype(
        [("global", F32), ("encode", F32), ("value", F32), ("scale", U32), ("code", U32)]
    )
    got = core("block", inputs=record, dtype=out)
    with np.errstate(all="ignore"):
        s_enc = np.where(
            record["tensor"] == 0, F32(1), np.minimum(F32(2688) / record["tensor"], oracle.FLT_MAX)
        )
        s_dec = F32(1) / s_enc
        scale = oracle.encode_e4m3(np.minimum(record["block"] * (s_enc * F32(1 / 6)), F32(448)))
        encode = np.minimum(F32(1) / (oracle.E4M3[scale] * s_dec), oracle.FLT_MAX)
        code = oracle.encode_e2m1(record["x"] * encode)
        value = oracle.E2M1[code] * (oracle.E4M3[scale] * s_dec)
    for name, expected in (("global", s_dec), ("encode", encode), ("value", value)):
        np.testing.assert_array_equal(got[name].view(U32), expected.view(U32), name)
    np.testing.assert_array_equal(got["scale"], scale)
    np.testing.assert_array_equal(got["code"], code)


@pytest.mark.parametrize("amax", [np.nan, np.inf])
def test_block_of_a_tensor_that_is_not_finite(core, amax):
    record = np.zeros(3, [("tensor", F32), ("block", F32), ("x", F32)])
    record["tensor"], record["block"], record["x"] = amax, [1, amax, 0], [1, amax, 0]
    out = np.dtype(
        [("global", F32), ("encode", F32), ("value", F32), ("scale", U32), ("code", U32)]
    )
    got = core("block", inputs=record, dtype=out)
    assert np.isnan(got["global"]).all()
    assert np.isnan(got["value"]).all()
    assert (got["scale"] < 0x7F).all()
    assert (got["code"] < 16).all()


def layout(core, rows, k, row, block):
    out = core("layout", inputs=np.array([rows, k, row, block], np.int64), dtype=np.int64)
    return dict(zip(("stride", "blocks", "tiles", "size", "offset"), map(int, out), strict=True))


@pytest.mark.parametrize("rows", [1, 31, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("k", [1, 15, 16, 17, 64, 80, 11008])
def test_scale_layout(core, rows, k):
    blocks = oracle.ceil_div(k, 16)
    marks = np.arange(1, rows * blocks + 1, dtype=np.int64).reshape(rows, blocks)
    row, block = np.indices(marks.shape)
    record = np.stack([np.full_like(row, rows), np.full_like(row, k), row, block], -1)
    out = core("layout", inputs=record.astype(np.int64), dtype=np.int64).reshape(rows, blocks, 5)
    tiles = oracle.ceil_div(blocks, 4)
    expected = [
        oracle.ceil_div(k, 32) * 16,
        blocks,
        tiles,
        oracle.ceil_div(rows, 128) * tiles * 512,
    ]
    assert (out[..., :4] == expected).all()
    # Where the oracle puts each mark (its two bytes apart), the function points at.
    low = oracle.to_tiles((marks & 255).astype(np.uint8)).reshape(-1)
    high = oracle.to_tiles((marks >> 8 & 255).astype(np.uint8)).reshape(-1)
    offset = out[..., 4]
    np.testing.assert_array_equal(low[offset] + 256 * high[offset].astype(np.int64), marks & 65535)
    assert len(np.unique(offset)) == marks.size
    assert offset.max() < expected[3]


def test_offsets_beyond_31_bits(core):
    """M = 798916 and K = 2688, and more: no offset is computed in 32 bits."""
    rows, k = 798_916, 2688
    got = layout(core, rows, k, rows - 1, k // 16 - 1)
    assert rows * k > 2**31
    assert got["stride"] * rows == rows * k // 2
    tile = (rows - 1) // 128 * 42 + 41
    assert got["offset"] == tile * 512 + (rows - 1) % 32 * 16 + (rows - 1) % 128 // 32 * 4 + 3
    assert got["size"] == 6242 * 42 * 512
    # Codes and scales both beyond 2^31 and 2^32 bytes.
    rows, k = 2**24 + 5, 2**14 + 16
    got = layout(core, rows, k, rows - 1, 1024)
    assert got["stride"] == 2**13 + 16
    assert got["size"] == (2**17 + 1) * 257 * 512 > 2**32
    assert got["offset"] == (2**17 * 257 + 256) * 512 + 4 * 16
    # A single row of more than 2^31 elements.
    got = layout(core, 1, 2**33 + 1, 0, 2**29)
    assert (got["stride"], got["blocks"]) == (2**32 + 16, 2**29 + 1)
    assert got["offset"] == 2**27 * 512
