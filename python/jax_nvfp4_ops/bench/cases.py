"""Shapes of the linear layers of known models, for benchmarks and tests.

A linear layer is `y[M, N] = x[M, K] w[K, N]`, M tokens. Layers that models compute together (q, k and v; gate and up) are
one product here.

>>> from jax_nvfp4_ops.bench import cases
>>> [case] = cases.select(["llama-8b/down"], tokens=8192)
>>> case
Case(name='llama-8b/down', m=8192, n=4096, k=14336)
>>> case.flops, case.matmul_bytes("bf16")
(962072674304, 419430400)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence

from jax_nvfp4_ops import layout

# Bytes of an element of a matrix; NVFP4 has its scales beside it, see `quantized_bytes`.
ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1}


def quantized_bytes(rows: int, k: int) -> int:
    """Bytes of codes and block scales of a [rows, k] matrix, padding included."""
    return math.prod(layout.codes_shape(rows, k)) + math.prod(layout.scales_shape(rows, k))


@dataclasses.dataclass(frozen=True)
class Case:
    """One product `y[m, n] = x[m, k] w[k, n]`."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating point operations of the product; the backward pass has two such products more."""
        return 2 * self.m * self.n * self.k

    def matmul_bytes(self, operands: str, result: str = "bf16") -> int:
        """Bytes of memory traffic: each operand read once, the result written once.

        Args:
          operands: "nvfp4", or a key of ELEMENT_BYTES.
          result: A key of ELEMENT_BYTES.
        """
        y = self.m * self.n * ELEMENT_BYTES[result]
        if operands == "nvfp4":
            return quantized_bytes(self.m, self.k) + quantized_bytes(self.n, self.k) + y
        return (self.m + self.n) * self.k * ELEMENT_BYTES[operands] + y

    def quantize_bytes(self, source: str = "bf16", results: int = 1) -> int:
        """Bytes that quantizing x reads and writes: x once, and what each of one or two results holds."""
        x = self.m * self.k * ELEMENT_BYTES[source]
        return x + sum([quantized_bytes(self.m, self.k), quantized_bytes(self.k, self.m)][:results])


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer of a model.

    Args:
      n: Features of the result.
      k: Features of the operand.
      one_in: It sees one in so many tokens: an expert's share, where all get equally many.
    """

    n: int
    k: int
    one_in: int = 1


# From the config.json of each model: hidden and intermediate sizes, heads, experts.
MODELS: Mapping[str, Mapping[str, Layer]] = {
    # 32 heads and 8 key-value heads of 128.
    "llama-8b": {
        "qkv": Layer(6144, 4096),
        "o": Layer(4096, 4096),
        "gate_up": Layer(28672, 4096),
        "down": Layer(4096, 14336),
    },
    # 64 heads and 8 key-value heads of 128.
    "llama-70b": {
        "qkv": Layer(10240, 8192),
        "o": Layer(8192, 8192),
        "gate_up": Layer(57344, 8192),
        "down": Layer(8192, 28672),
    },
    # 128 heads and 8 key-value heads of 128.
    "llama-405b": {
        "qkv": Layer(18432, 16384),
        "o": Layer(16384, 16384),
        "gate_up": Layer(106496, 16384),
        "down": Layer(16384, 53248),
    },
    # Attention as in Llama 8B; 2 of 8 experts a token.
    "mixtral-8x7b": {
        "qkv": Layer(6144, 4096),
        "o": Layer(4096, 4096),
        "expert_gate_up": Layer(28672, 4096, one_in=4),
        "expert_down": Layer(4096, 14336, one_in=4),
    },
    # Latent attention: q through 1536, k and v through 512, and 64 rotary features; 128 heads of 128 + 64
    # for q and k, 128 for v. The first three layers are dense; elsewhere 8 of 256 experts a token and a
    # shared one.
    "deepseek-v3": {
        "q_a": Layer(1536, 7168),
        "q_b": Layer(24576, 1536),
        "kv_a": Layer(576, 7168),
        "kv_b": Layer(32768, 512),
        "o": Layer(7168, 16384),
        "dense_gate_up": Layer(36864, 7168),
        "dense_down": Layer(7168, 18432),
        "shared_gate_up": Layer(4096, 7168),
        "shared_down": Layer(7168, 2048),
        "expert_gate_up": Layer(4096, 7168, one_in=32),
        "expert_down": Layer(7168, 2048, one_in=32),
    },
}


def select(names: Sequence[str], tokens: int) -> list[Case]:
    """The cases that are meant by names, each once.

    Args:
      names: Each a model ("llama-8b"), a layer of one ("llama-8b/down"), "all", or sizes MxNxK ("512x4096x4096"), which
        have an M of their own.
      tokens: M of a model's layers, but for the experts, who see their share.

    Raises:
      ValueError: For a name that is unknown.
    """
    known = {
        f"{model}/{name}": Case(f"{model}/{name}", -(-tokens // layer.one_in), layer.n, layer.k)
        for model, layers in MODELS.items()
        for name, layer in layers.items()
    }
    chosen: dict[str, Case] = {}
    for name in names:
        sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
        if sizes:
            chosen[name] = Case(name, *(int(size) for size in sizes.groups()))
        elif name == "all":
            chosen |= known
        elif name in MODELS:
            chosen |= {key: case for key, case in known.items() if key.startswith(f"{name}/")}
        elif name in known:
            chosen[name] = known[name]
        else:
            near = difflib.get_close_matches(name, [*MODELS, *known], 1)
            raise ValueError(
                f"must be a model ({', '.join(MODELS)}), a layer such as llama-8b/down, all, or sizes "
                f"MxNxK such as 512x4096x4096; got {name!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    return list(chosen.values())
