"""The oracle of the tests: docs/numerics.md in NumPy, written from that page alone.

It never imports the package and shares no code with it: the two agree because both follow the
page. Arrays are plain NumPy arrays (bfloat16 through ml_dtypes).

`quantize` takes [..., rows, K] and works along the last axis, or along the one before it
(`axis=-2`), and then the result is that of the transpose.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)


def _silent():
    return np.errstate(all="ignore")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def f32(x) -> np.ndarray:
    """f32, bf16 or f16 to float32 (exact)."""
    return np.asarray(x).astype(F32)


def bf16_round(x: np.ndarray) -> np.ndarray:
    with _silent():
        return x.astype(BF16).astype(F32)


def pad_axis(x: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    """Fills `axis` with zeros to a multiple."""
    fill = [(0, 0)] * x.ndim
    fill[axis] = (0, -x.shape[axis] % multiple)
    return np.pad(x, fill)


# --- the formats ----------------------------------------------------------------------------------


def encode_e2m1(y: np.ndarray) -> np.ndarray:
    """Codes, rounded to nearest (a tie to the even code), saturating."""
    y = np.asarray(y, F32)
    a = np.abs(y)
    index = np.zeros(y.shape, np.uint8)
    for midpoint in (0.25, 1.25, 2.5, 5.0):  # the code below is even: a tie stays
        index += a > F32(midpoint)
    for midpoint in (0.75, 1.75, 3.5):  # the code above is even: a tie goes up
        index += a >= F32(midpoint)
    return index | (np.signbit(y).astype(np.uint8) << 3)


def encode_e2m1_sr(y: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Codes, rounded stochastically with the nine bits `u`."""
    y = np.asarray(y, F32)
    h = (np.minimum(np.abs(y), F32(6)) * F32(2.0**-14)).astype(np.float16).view(np.uint16)
    index = ((h.astype(np.uint32) + u) >> 9).astype(np.uint8)
    return index | (np.signbit(y).astype(np.uint8) << 3)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


# --- random bits ----------------------------------------------------------------------------------


def philox4x32(counter, key, rounds: int = 10) -> tuple[np.ndarray, ...]:
    """Philox4x32 of four counter words and two key words (broadcast u32 arrays)."""
    c = [np.asarray(w, np.uint64) for w in counter]
    k = [np.uint64(int(w)) for w in key]
    low = np.uint64(0xFFFFFFFF)
    with _silent():
        for _ in range(rounds):
            p0 = np.uint64(0xD2511F53) * c[0]
            p1 = np.uint64(0xCD9E8D57) * c[2]
            c = [
                (p1 >> np.uint64(32)) ^ c[1] ^ k[0],
                p1 & low,
                (p0 >> np.uint64(32)) ^ c[3] ^ k[1],
                p0 & low,
            ]
            k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return tuple(w.astype(np.uint32) for w in np.broadcast_arrays(*c))


def random_bits(rows: int, blocks: int, key, stream: int, first_row: int = 0) -> np.ndarray:
    """The nine random bits of every element of a quantized matrix: u32[rows, blocks * 16]."""
    row = np.arange(first_row, first_row + rows, dtype=np.uint64)[:, None]
    block = np.arange(blocks, dtype=np.uint64)[None, :]
    words = philox4x32(
        (block, row & np.uint64(0xFFFFFFFF), row >> np.uint64(32), np.uint64(stream)), key
    )
    words = np.stack(words, -1) if rows and blocks else np.zeros((rows, blocks, 4), np.uint32)
    u = np.stack([words >> np.uint32(s) & np.uint32(511) for s in (0, 16, 7, 23)], -1)
    return u.reshape(rows, blocks * 16)


# --- the Hadamard transform -----------------------------------------------------------------------


def hadamard_matrix() -> np.ndarray:
    """H16 in Sylvester order (entries +-1)."""
    h = np.ones((1, 1), F32)
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    return h


def hadamard(x: np.ndarray, signs: np.ndarray = SIGNS) -> np.ndarray:
    """RHT along the last axis, rounded to bfloat16: f32[..., ceil(K / 16) * 16]."""
    x = pad_axis(f32(x), -1, 16)
    y = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16) * signs
    with _silent():
        for stride in (1, 2, 4, 8):
            pairs = y.reshape(*y.shape[:-1], 8 // stride, 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([a + b, a - b], -2).reshape(y.shape)
        y = y * F32(0.25)
    return bf16_round(y.reshape(x.shape))


# --- quantize -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix, not yet packed.

    codes u8[..., rows, ceil(K / 16) * 16], one a byte; scales u8[..., rows, ceil(K / 16)].
    """

    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.float32
    k: int

    @property
    def packed(self) -> np.ndarray:
        return pack(self.codes)

    @property
    def tiles(self) -> np.ndarray:
        return to_tiles(self.scales)

    @property
    def values(self) -> np.ndarray:
        return dequantize(self)


def amax(x: np.ndarray) -> np.float32:
    """Largest magnitude; 0 of an empty tensor; NaN when there is one."""
    x = np.abs(f32(x))
    return F32(x.max()) if x.size else F32(0)


def encode_scale(tensor_amax) -> np.float32:
    """S_enc."""
    tensor_amax = F32(tensor_amax)
    if tensor_amax == 0:
        return F32(1)
    with _silent():
        return F32(np.minimum(F32(2688) / tensor_amax, FLT_MAX))


def global_scale(tensor_amax) -> np.float32:
    """S_dec."""
    if not np.isfinite(tensor_amax):
        return F32(np.nan)
    return F32(F32(1) / encode_scale(tensor_amax))


def block_amax(x: np.ndarray, block: str) -> np.ndarray:
    """Largest magnitude of each block of f32[..., rows, blocks * 16]: f32[..., rows, blocks]."""
    a = np.abs(x).reshape(*x.shape[:-1], x.shape[-1] // 16, 16).max(-1)
    if block == "1x16":
        return a
    rows = x.shape[-2]
    tiles = pad_axis(a, -2, 16)
    tiles = tiles.reshape(*tiles.shape[:-2], tiles.shape[-2] // 16, 16, tiles.shape[-1]).max(-2)
    return np.repeat(tiles, 16, axis=-2)[..., :rows, :]


def operand(x, axis: int, rotate: bool) -> np.ndarray:
    """What is quantized: f32, transposed for axis -2, rotated or not, filled to whole blocks."""
    x = f32(x)
    if axis == -2:
        x = np.swapaxes(x, -1, -2)
    return hadamard(x) if rotate else pad_axis(x, -1, 16)


def quantize(
    x,
    *,
    axis: int = -1,
    block: str = "1x16",
    rounding: str = "rne",
    rotate: bool = False,
    key=None,
    tensor_amax=None,
) -> Quantized:
    """Quantizes [..., rows, K] along `axis`; `key` is two u32 words."""
    k = np.shape(x)[axis]
    x = operand(x, axis, rotate)
    if tensor_amax is None:
        tensor_amax = amax(x)
    s_enc, s_dec = encode_scale(tensor_amax), global_scale(tensor_amax)
    with _silent():
        s = np.minimum(block_amax(x, block) * (s_enc * F32(F32(1) / F32(6))), F32(448))
        scales = encode_e4m3(s)
        enc = np.minimum(F32(1) / (E4M3[scales] * s_dec), FLT_MAX)
        y = x * np.repeat(enc, 16, axis=-1)
    if rounding == "rne":
        codes = encode_e2m1(y)
    else:
        rows = int(np.prod(x.shape[:-1]))
        u = random_bits(rows, x.shape[-1] // 16, key, 0 if axis == -1 else 1)
        codes = encode_e2m1_sr(y, u.reshape(x.shape))
    return Quantized(codes, scales, s_dec, k)


def dequantize(q: Quantized, dtype=np.float32) -> np.ndarray:
    """[..., rows, K] in `dtype`."""
    with _silent():
        scale = np.repeat(E4M3[q.scales] * q.global_scale, 16, axis=-1)
        return (E2M1[q.codes] * scale)[..., : q.k].astype(dtype)


# --- layout in memory -----------------------------------------------------------------------------


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, rows filled to 32 codes: u8[..., rows, ceil(K / 32) * 16]."""
    codes = pad_axis(codes, -1, 32)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    packed = np.asarray(packed)
    return np.stack([packed & 15, packed >> 4], -1).reshape(
        *packed.shape[:-1], packed.shape[-1] * 2
    )


def to_tiles(scales: np.ndarray) -> np.ndarray:
    """u8[..., rows, blocks] to u8[..., ceil(rows / 128), ceil(blocks / 4), 512]."""
    rows, blocks = scales.shape[-2:]
    tiles = np.zeros((*scales.shape[:-2], ceil_div(rows, 128), ceil_div(blocks, 4), 512), np.uint8)
    r, c = np.arange(rows)[:, None], np.arange(blocks)[None, :]
    tiles[..., r // 128, c // 4, r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
    return tiles


def from_tiles(tiles: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    r, c = np.arange(rows)[:, None], np.arange(blocks)[None, :]
    return np.asarray(tiles)[..., r // 128, c // 4, r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


# --- GEMM -----------------------------------------------------------------------------------------


def matmul(
    a: Quantized, b: Quantized, *, alpha=None, bias=None, accumulate=None, dtype=np.float32
) -> np.ndarray:
    """a[..., M, K] b[..., N, K]^T to [..., M, N]: one rounding a block, in order of the blocks."""
    blocks = a.scales.shape[-1]
    # Twice the code is an integer: the sums of 16 products are exact in float32, in any order.
    ai = (E2M1[a.codes] * 2).reshape(*a.codes.shape[:-1], blocks, 16)
    bi = (E2M1[b.codes] * 2).reshape(*b.codes.shape[:-1], blocks, 16)
    lead = np.broadcast_shapes(a.codes.shape[:-2], b.codes.shape[:-2])
    acc = np.zeros((*lead, a.codes.shape[-2], b.codes.shape[-2]), F32)
    with _silent():
        for i in range(blocks):
            inner = ai[..., i, :] @ np.swapaxes(bi[..., i, :], -1, -2) * F32(0.25)
            acc += (
                E4M3[a.scales[..., i]][..., :, None] * E4M3[b.scales[..., i]][..., None, :] * inner
            )
        alpha = a.global_scale * b.global_scale if alpha is None else alpha
        y = F32(alpha) * acc if np.ndim(alpha) == 0 else np.asarray(alpha, F32) * acc
        if bias is not None:
            y = y + f32(bias)
        if accumulate is not None:
            y = y + f32(accumulate)
        return y.astype(dtype)


# --- the linear of a recipe -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class How:
    """How one operand of one GEMM is quantized."""

    block: str = "1x16"
    rounding: str = "rne"
    rotate: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The operands of the three GEMMs."""

    x_fprop: How = How()
    w_fprop: How = How()
    g_dgrad: How = How()
    w_dgrad: How = How()
    g_wgrad: How = How()
    x_wgrad: How = How()


NVIDIA = Recipe(
    w_fprop=How("16x16"),
    w_dgrad=How("16x16"),
    g_dgrad=How(rounding="sr"),
    g_wgrad=How(rounding="sr", rotate=True),
    x_wgrad=How(rotate=True),
)
RNE = Recipe()


def _q(x, how: How, axis: int, key=None) -> Quantized:
    return quantize(x, axis=axis, key=key, **dataclasses.asdict(how))


def fprop(x, w, recipe: Recipe, dtype=np.float32) -> np.ndarray:
    """x[..., T, K] w[..., N, K]^T: [..., T, N]."""
    return matmul(_q(x, recipe.x_fprop, -1), _q(w, recipe.w_fprop, -1), dtype=dtype)


def dgrad(g, w, recipe: Recipe, key=None, dtype=np.float32) -> np.ndarray:
    """g[..., T, N] w[..., N, K]: [..., T, K], contracted over N."""
    return matmul(_q(g, recipe.g_dgrad, -1, key), _q(w, recipe.w_dgrad, -2), dtype=dtype)


def wgrad(g, x, recipe: Recipe, key=None, dtype=np.float32) -> np.ndarray:
    """g[..., T, N]^T x[..., T, K]: [..., N, K], contracted over T."""
    return matmul(_q(g, recipe.g_wgrad, -2, key), _q(x, recipe.x_wgrad, -2), dtype=dtype)
