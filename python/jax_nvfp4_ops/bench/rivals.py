"""What is measured: groups of functions that do the same work, this package's first."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_nvfp4_ops as nvfp4
from jax_nvfp4_ops.bench.cases import Case
from jax_nvfp4_ops.recipes import Recipe

OPS = ("quantize", "matmul", "linear")
OURS = "nvfp4"
# Reads x and writes it: what no quantization can do without half of.
YARDSTICK = "copy of x"

# Arguments of nvfp4.quantize by name; "dtype" is that of x. The amax is given, but for the last.
QUANTIZES: dict[str, dict[str, Any]] = {
    "rows": {"axis": -1},
    "columns": {"axis": -2},
    "rows + columns": {"axis": (-1, -2)},
    "rows + columns, 16x16": {"axis": (-1, -2), "block": "16x16"},
    "rows, SR": {"axis": -1, "rounding": "sr"},
    "rows, Hadamard": {"axis": -1, "hadamard": True},
    # What NVIDIA's recipe makes of activations and of gradients.
    "rows + columns Hadamard": {"axis": (-1, -2), "hadamard": (False, True)},
    "rows SR + columns SR Hadamard": {
        "axis": (-1, -2),
        "rounding": "sr",
        "hadamard": (False, True),
    },
    "rows, float32": {"axis": -1, "dtype": jnp.float32},
    "rows, float16": {"axis": -1, "dtype": jnp.float16},
    "rows, amax included": {"axis": -1, "find_amax": True},
}

_TE_ONLY_LAYERS = "it has no public function for this step alone; see --op linear"


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to do the work of a group.

    Args:
      name: For tables.
      function: What is timed: arrays to arrays, without static arguments.
      operands: Makes one set of its operands, random ones.
      limit: Which of the device's rates of FLOP/s bounds it: "fp4", "fp8", "bf16", "f32"; "mixed" for several.
      unavailable: Why it can not run here; None if it can.
      proof: A word that the program compiled for a GPU holds if it is what the name says.
    """

    name: str
    function: Callable[..., Any]
    operands: Callable[[], Sequence[Any]]
    limit: str = "bf16"
    unavailable: str | None = None
    proof: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Rivals that do the same work.

    Args:
      op: One of OPS.
      case: The shape.
      variant: How; empty where there is only one way.
      flops: Floating point operations of the work, those of quantization not counted.
      rivals: This package's first.
    """

    op: str
    case: Case
    variant: str
    flops: int
    rivals: tuple[Rival, ...]

    @property
    def name(self) -> str:
        """As --list prints it and --filter searches it."""
        return "/".join(part for part in (self.op, self.case.name, self.variant) if part)


@dataclasses.dataclass(frozen=True)
class Platform:
    """What decides which rivals can run.

    Args:
      name: "cpu", "gpu" or another of JAX's.
      capability: Compute capability of a CUDA GPU; (0, 0) elsewhere.
    """

    name: str
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, device: jax.Device) -> Platform:
        """The platform of a JAX device."""
        number = re.match(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(device.platform, (int(number[1]), int(number[2])) if number else (0, 0))

    @property
    def our_limit(self) -> str:
        """What bounds this package's GEMM: without FP4 tensor cores it multiplies in bfloat16."""
        return "fp4" if self.name == "gpu" and self.capability >= (10, 0) else "bf16"

    def lacks_fp8(self) -> str | None:
        """Why there is no fp8 product here."""
        if self.name != "gpu":
            return f"{self.name}: no fp8 arithmetic; XLA would convert to wider floats first"
        if self.capability < (8, 9):
            return f"compute capability {self._text} has no fp8 tensor cores; 8.9 is the first"
        return None

    def lacks_scaled_matmul(self, case: Case) -> str | None:
        """Why jax.nn.scaled_matmul can not multiply NVFP4 operands here."""
        if not hasattr(jax.nn, "scaled_matmul"):
            return f"jax {jax.__version__} has none"
        if case.k % 16:
            return f"it needs K a multiple of 16; here it is {case.k}"
        return self._lacks_block_scaling()

    def lacks_scaled_dot_general(self) -> str | None:
        """The same for jax.nn.scaled_dot_general."""
        if not hasattr(jax.nn, "scaled_dot_general"):
            return f"jax {jax.__version__} has none"
        return self._lacks_block_scaling()

    def lacks_float32_rival(self) -> str | None:
        """Why float32 is no rival here."""
        return None if self.name == "cpu" else "measured on CPUs only, where it is XLA's fastest"

    def lacks_transformer_engine(self) -> str | None:
        """Why TransformerEngine's layer can not run here."""
        if self.name != "gpu":
            return f"{self.name}: it runs on CUDA GPUs only"
        if self.capability < (10, 0):
            return f"its NVFP4 needs compute capability 10.0; this is {self._text}"
        try:
            import transformer_engine.jax.flax  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
        except Exception as error:
            return f"can not be imported: {type(error).__name__}: {error}"
        return None

    @property
    def _text(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"

    def _lacks_block_scaling(self) -> str | None:
        if self.name == "gpu" and self.capability < (10, 0):
            return (
                f"cuDNN's block-scaled products need compute capability 10.0; this is {self._text}"
            )
        return None


def groups(op: str, cases: Sequence[Case], platform: Platform, recipe: Recipe) -> list[Group]:
    """Everything that is measured of an op."""
    if op == "quantize":
        return [quantize_group(case, variant) for case in cases for variant in QUANTIZES]
    if op == "matmul":
        return [matmul_group(case, platform) for case in cases]
    return [linear_group(case, platform, recipe) for case in cases]


def _normal(index: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    # The same numbers in every type. "rbg" is the fastest of JAX's generators, and these need not be good.
    x = jax.random.normal(jax.random.key(index, impl="rbg"), shape, jnp.bfloat16)
    return x.astype(dtype)


def _key() -> jax.Array:
    return jax.random.key_data(jax.random.key(3))


def quantize_group(case: Case, variant: str) -> Group:
    """Quantizing the activations x[M, K]."""
    options = dict(QUANTIZES[variant])
    dtype = options.pop("dtype", jnp.bfloat16)
    find_amax = options.pop("find_amax", False)

    def operands() -> Sequence[Any]:
        x = _normal(0, case.m, case.k, dtype=dtype)
        return x, jnp.max(jnp.abs(x)).astype(jnp.float32), _key()

    def of(quantize: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: jax.Array, amax: jax.Array, key: jax.Array) -> Any:
            more = {"key": key} if options.get("rounding") == "sr" else {}
            if not find_amax:
                more["amax"] = amax
            return quantize(x, **options, **more)

        return run

    return Group(
        "quantize",
        case,
        variant,
        0,
        (
            Rival(OURS, of(nvfp4.quantize), operands),
            Rival("jnp under jit", of(jnp_quantize), operands),
            Rival(YARDSTICK, lambda x: -x, lambda: operands()[:1]),
            Rival(
                "TransformerEngine",
                of(jnp_quantize),
                operands,
                unavailable=_TE_ONLY_LAYERS,
            ),
        ),
    )


def jnp_quantize(
    x: jax.Array,
    *,
    axis: int | tuple[int, ...],
    block: str = "1x16",
    rounding: str = "rne",
    hadamard: bool | tuple[bool, ...] = False,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """What a user of jnp would write for the same codes and scales, random bits of `jax.random`; the baseline.

    Args:
      x: float[R, K].
      axis: As in `nvfp4.quantize`, and so the others.
      block: "1x16" or "16x16".
      rounding: "rne" or "sr".
      hadamard: Of each axis.
      key: u32[2].
      amax: f32[].

    Returns:
      Codes, linear scales and global scale of each axis.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    transforms = hadamard if isinstance(hadamard, tuple) else (hadamard,) * len(axes)
    h = jnp.ones((1, 1))
    while h.shape[0] < 16:
        h = jnp.block([[h, h], [h, -h]])
    results: list[jax.Array] = []
    for a, transform in zip(axes, transforms, strict=True):
        m = x.astype(jnp.float32)
        m = m.T if a == -2 else m
        rows, k = m.shape
        m = jnp.pad(m, ((0, 0), (0, -k % 16))).reshape(rows, -1, 16)
        if transform:
            m = (m @ (h / 4)).astype(jnp.bfloat16).astype(jnp.float32)
        largest = jnp.max(jnp.abs(m)) if amax is None else amax
        encode = 2688 / largest
        block_amax = jnp.max(jnp.abs(m), -1, keepdims=True)
        if block == "16x16":
            tiles = jnp.pad(block_amax, ((0, -rows % 16), (0, 0), (0, 0)))
            tiles = tiles.reshape(-1, 16, tiles.shape[1], 1)
            tiles = jnp.broadcast_to(tiles.max(1, keepdims=True), tiles.shape)
            block_amax = tiles.reshape(-1, tiles.shape[2], 1)[:rows]
        scale = jnp.minimum(block_amax * (encode / 6), 448).astype(jnp.float8_e4m3fn)
        y = m * (encode / jnp.maximum(scale.astype(jnp.float32), 2**-9))
        magnitude = jnp.minimum(jnp.abs(y), 6)
        if key is not None:
            step = jnp.where(magnitude >= 4, 2.0, jnp.where(magnitude >= 2, 1.0, 0.5))
            base = jnp.where(magnitude >= 4, 4.0, jnp.where(magnitude >= 2, 2.0, 0.0))
            noise = jax.random.bits(key, m.shape, jnp.uint8).astype(jnp.float32) / 256
            code = (jnp.floor(magnitude / step + noise) + base).astype(jnp.uint8)
        else:
            code = jnp.zeros(m.shape, jnp.uint8)
            for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
                code += magnitude > tie
        code |= jnp.signbit(y).astype(jnp.uint8) << 3
        packed = code[..., 0::2] | code[..., 1::2] << 4
        scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8)
        results += [packed.reshape(rows, -1), scales, 1 / encode]
    return tuple(results)


def matmul_group(case: Case, platform: Platform) -> Group:
    """The GEMM alone, y[M, N] = x[M, K] w[N, K]^T, on operands that are quantized already."""
    m, n, k = case.m, case.n, case.k
    contract = (((1,), (1,)), ((), ()))

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, contract)

    def floats(dtype: Any) -> Callable[[], Sequence[Any]]:
        return lambda: (_normal(0, m, k, dtype=dtype), _normal(1, n, k, dtype=dtype))

    def quantized() -> Sequence[Any]:
        return tuple(nvfp4.quantize(x) for x in floats(jnp.bfloat16)())

    def ours(x: nvfp4.NVFP4Array, w: nvfp4.NVFP4Array) -> jax.Array:
        return nvfp4.matmul(x, w, out_dtype=jnp.bfloat16)

    def scaled_operands() -> Sequence[Any]:
        pairs = [(q.as_f4()[None], q.linear_scales()[None]) for q in quantized()]
        return tuple(array for pair in zip(*pairs, strict=True) for array in pair)

    def scaled_matmul(x: jax.Array, w: jax.Array, s: jax.Array, t: jax.Array) -> jax.Array:
        return jax.nn.scaled_matmul(x, w, s, t, preferred_element_type=jnp.bfloat16)[0]

    def fp8(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.bfloat16)

    return Group(
        "matmul",
        case,
        "",
        case.flops,
        (
            Rival(OURS, ours, quantized, platform.our_limit),
            Rival("bf16 dot", dot, floats(jnp.bfloat16)),
            Rival(
                "f32 dot",
                dot,
                floats(jnp.float32),
                "f32",
                unavailable=platform.lacks_float32_rival(),
            ),
            Rival(
                "fp8 dot",
                fp8,
                lambda: tuple(x.astype(jnp.float8_e4m3fn) for x in floats(jnp.bfloat16)()),
                "fp8",
                unavailable=platform.lacks_fp8(),
                proof="$f8",
            ),
            Rival(
                "jax.nn.scaled_matmul",
                scaled_matmul,
                scaled_operands,
                "fp4",
                unavailable=platform.lacks_scaled_matmul(case),
                proof="blockScaledDot",
            ),
            Rival("TransformerEngine", dot, floats(jnp.bfloat16), unavailable=_TE_ONLY_LAYERS),
        ),
    )


def linear_group(case: Case, platform: Platform, recipe: Recipe) -> Group:
    """A linear layer, forward and backward: y, dx and dw of x[M, K], w[K, N] and the gradient g[M, N]."""
    m, n, k = case.m, case.n, case.k

    def floats(dtype: Any = jnp.bfloat16) -> Sequence[Any]:
        shapes = ((m, k), (k, n), (m, n))
        return tuple(_normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))

    def step(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(x: jax.Array, w: jax.Array, g: jax.Array, *key: jax.Array) -> Any:
            y, vjp = jax.vjp(lambda x, w: layer(x, w, *key), x, w)
            return y, vjp(g)

        return run

    def ours(x: jax.Array, w: jax.Array, *key: jax.Array) -> jax.Array:
        return nvfp4.matmul(x, w, recipe=recipe, key=key[0] if recipe.needs_key else None)

    def scaled_dot_general(x: jax.Array, w: jax.Array) -> jax.Array:
        config = jax.nn.get_scaled_dot_general_config("nvfp4")
        dims = (((1,), (0,)), ((), ()))
        y: jax.Array = jax.nn.scaled_dot_general(
            x, w, dims, preferred_element_type=jnp.bfloat16, configs=[config] * 3
        )
        return y

    return Group(
        "linear",
        case,
        recipe.name,
        3 * case.flops,
        (
            Rival(
                OURS,
                step(ours),
                lambda: (*floats(), _key()),
                platform.our_limit if recipe.backward == "nvfp4" else "mixed",
            ),
            Rival("bf16 dot", step(jnp.dot), floats),
            Rival(
                "f32 dot",
                step(jnp.dot),
                lambda: floats(jnp.float32),
                "f32",
                unavailable=platform.lacks_float32_rival(),
            ),
            # Its gradients are products in full precision.
            Rival(
                "jax.nn.scaled_dot_general",
                step(scaled_dot_general),
                floats,
                "mixed",
                unavailable=platform.lacks_scaled_dot_general(),
                proof="blockScaledDot",
            ),
            Rival(
                "TransformerEngine",
                step(_transformer_engine_layer),
                lambda: (*floats(), _key()),
                "fp4",
                unavailable=platform.lacks_transformer_engine(),
            ),
            Rival(
                "fp8 dot",
                step(jnp.dot),
                floats,
                "fp8",
                unavailable="JAX has no fp8 layer of its own; see --op matmul, or TransformerEngine",
            ),
        ),
    )


def _transformer_engine_layer(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    """TransformerEngine's layer, in its default NVFP4 recipe."""
    import transformer_engine.jax as te
    from transformer_engine.common.recipe import (  # type: ignore[import-not-found, unused-ignore]
        NVFP4BlockScaling,
    )
    from transformer_engine.jax.flax import DenseGeneral

    layer = DenseGeneral(features=w.shape[1], use_bias=False, dtype=x.dtype)
    with te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
        # Rounding of gradients is stochastic, from this stream.
        y: jax.Array = layer.apply({"params": {"kernel": w}}, x, rngs={"sr_rng": key})
    return y
