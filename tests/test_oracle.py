"""The oracle itself: against vectors that others computed, and against what ml_dtypes rounds to."""

import golden
import ml_dtypes
import numpy as np
import oracle
import pytest

F32 = np.float32


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[np.asarray(x).dtype.itemsize])


@pytest.mark.parametrize(("name", "variant", "axis"), list(golden.cases()))
def test_quantize_gives_the_golden_codes_scales_and_amax(name, variant, axis):
    block, _, rotate = variant.partition("_")
    half = "_t" if axis == -2 else ""
    expected = golden.load(name)
    operand = oracle.operand(golden.tensor(name), axis, bool(rotate))
    got = oracle.quantize(golden.tensor(name), axis=axis, block=block, rotate=bool(rotate))
    amax = expected[f"{variant}/amax_" + ("col" if axis == -2 else "row")]
    assert bits(oracle.amax(operand)) == bits(amax[0])
    np.testing.assert_array_equal(got.scales, expected[f"{variant}/scale{half}"])
    assert golden.same_codes(got.packed, expected[f"{variant}/data{half}"])
    if rotate:
        # As values: -0 equals 0, whose sign the reference drops.
        rotated = golden.bf16(expected[f"{variant}/post_rht_t_bf16_bits"])
        np.testing.assert_array_equal(operand, rotated.astype(F32))


def test_every_golden_half_is_used():
    assert len(list(golden.cases())) == 78


def test_hadamard_matrix():
    expected = golden.load("hadamard16")
    np.testing.assert_array_equal(oracle.hadamard_matrix() / 4, expected["H_unsigned"])
    np.testing.assert_array_equal(oracle.SIGNS, expected["sign"].ravel())
    mask = sum(1 << i for i, sign in enumerate(oracle.SIGNS) if sign < 0)
    assert mask == 0xD7E8
    # The transform of the unit vectors is the matrix: its butterflies are those of H16.
    np.testing.assert_array_equal(oracle.hadamard(np.eye(16, dtype=F32)), expected["H_signed"])


@pytest.mark.parametrize("name", golden.SWIZZLES)
def test_tiles_lie_where_the_tensor_cores_read_them(name):
    expected = golden.load(name)
    index = expected["swizzled_index_of_linear"]
    rows, blocks = index.shape
    assert blocks == int(expected["k"]) // 16
    scales = np.random.default_rng(0).integers(1, 127, index.shape, np.uint8)
    tiles = oracle.to_tiles(scales)
    np.testing.assert_array_equal(tiles.reshape(-1)[index], scales)
    assert np.count_nonzero(tiles) == scales.size  # the rest is zero
    np.testing.assert_array_equal(oracle.from_tiles(tiles, rows, blocks), scales)


@pytest.mark.parametrize("name", golden.GEMMS)
def test_matmul_is_the_golden_product(name):
    g = golden.load(name)

    def operand(side):
        codes = oracle.unpack(g[f"{side}_data"])
        scale = oracle.global_scale(g[f"{side}_amax"][0])
        return oracle.Quantized(codes, g[f"{side}_scale"], scale, codes.shape[-1])

    a, b = operand("a"), operand("b")
    # The golden sum and ours round K / 16 times each, in their own orders, and alpha differs in
    # its last bits: (K / 16 + 4) half units of the sum of magnitudes.
    magnitude = (
        np.abs(oracle.dequantize(a, np.float64)) @ np.abs(oracle.dequantize(b, np.float64)).T
    )
    bound = (a.k // 16 + 4) * 2.0**-24 * magnitude
    y = oracle.matmul(a, b)
    assert (np.abs(y.astype(np.float64) - g["y_f32"]) <= bound).all()
    exact = oracle.dequantize(a, np.float64) @ oracle.dequantize(b, np.float64).T
    assert (np.abs(y - exact) <= bound).all()
    assert np.count_nonzero(y) > y.size // 2
    # An f32 difference of a few bits moves a bf16 result by one unit at most, and rarely.
    different = oracle.matmul(a, b, dtype=ml_dtypes.bfloat16) != golden.bf16(g["y_bf16_bits"])
    assert different.mean() < 1e-3


@pytest.mark.parametrize("name", golden.GEMMS)
def test_quantize_gives_the_operands_of_the_golden_gemm(name):
    g = golden.load(name)
    axis = -2 if "wgrad" in name else -1
    two_dimensional = "w16x16" in name or "outlier" in name
    for side, block in (("a", "1x16"), ("b", "16x16" if two_dimensional else "1x16")):
        x = golden.bf16(g[f"{side}_input_bf16_bits"])
        q = oracle.quantize(x, axis=axis, block=block)
        assert oracle.amax(x) == g[f"{side}_amax"][0]
        assert golden.same_codes(q.packed, g[f"{side}_data"])
        np.testing.assert_array_equal(q.scales, g[f"{side}_scale"])


# The known-answer vectors of philox4x32-10 in the distribution of Random123.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter, key, expected):
    assert tuple(int(w) for w in oracle.philox4x32(counter, key)) == expected


def test_random_bits_of_an_element_are_those_of_its_position():
    key = (123, 456)
    u = oracle.random_bits(5, 3, key, 1, first_row=2**32 - 2)
    for row, col in [(0, 0), (1, 17), (2, 30), (4, 47)]:
        position = 2**32 - 2 + row
        word = oracle.philox4x32((col // 16, position % 2**32, position // 2**32, 1), key)
        shift = (0, 16, 7, 23)[col % 4]
        assert u[row, col] == int(word[col % 16 // 4]) >> shift & 511
    assert u.min() >= 0
    assert u.max() < 512


def test_e2m1_rounds_as_ml_dtypes():
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0, 1], F32)
    near = np.concatenate(
        [midpoints, np.nextafter(midpoints, F32(9)), np.nextafter(midpoints, F32(-9))]
    )
    y = np.concatenate([near, -near, np.random.default_rng(0).normal(0, 3, 10000).astype(F32)])
    expected = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(oracle.encode_e2m1(y), expected)
    np.testing.assert_array_equal(
        oracle.E2M1, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
    )


def test_stochastic_rounding_has_the_probability_of_the_contract():
    y = np.concatenate([np.linspace(-6.5, 6.5, 2001, dtype=F32), oracle.E2M1])
    u = np.arange(512)[:, None]
    values = oracle.E2M1[oracle.encode_e2m1_sr(np.broadcast_to(y, (512, y.size)), u)]
    clamped = np.clip(y, -6, 6).astype(np.float64)
    step = np.where(np.abs(clamped) < 2, 0.5, np.where(np.abs(clamped) < 4, 1, 2))
    assert (np.abs(values.mean(0, dtype=np.float64) - clamped) <= step * 2.0**-10).all()
    assert (np.abs(values - clamped) < step).all()  # one of the two neighbours
    on_grid = np.isin(clamped, oracle.E2M1)
    assert (values[:, on_grid] == clamped[on_grid]).all()


def test_pack_is_the_inverse_of_unpack():
    codes = np.random.default_rng(0).integers(0, 16, (3, 5, 48), np.uint8)
    packed = oracle.pack(codes)
    assert packed.shape == (3, 5, 32)
    np.testing.assert_array_equal(oracle.unpack(packed)[..., :48], codes)
    assert not oracle.unpack(packed)[..., 48:].any()
    assert packed[0, 0, 0] == codes[0, 0, 0] | codes[0, 0, 1] << 4


def test_the_transform_of_both_operands_leaves_the_product():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 40)).astype(F32), rng.normal(size=(5, 40)).astype(F32)
    product = oracle.hadamard(x) @ oracle.hadamard(y).T
    # bf16 keeps 8 bits: each of the 48 products is off by 2^-8 of |x| |y| at most.
    bound = 2.0**-7 * np.abs(oracle.hadamard(x)) @ np.abs(oracle.hadamard(y)).T
    assert (np.abs(product - x @ y.T) <= bound).all()


def test_the_reciprocal_decides():
    """Scale byte 0x07 and x = 0.02392577938735485: 1.75 by the reciprocal, less by division."""
    x = np.zeros((1, 16), F32)
    x[0, 0] = 0.02392577938735485
    with np.errstate(all="ignore"):
        scale = oracle.E4M3[7]
        assert F32(x[0, 0] * (F32(1) / scale)) == 1.75
        assert F32(x[0, 0] / scale) < 1.75
    assert oracle.encode_e2m1(x * (F32(1) / scale))[0, 0] == 4
