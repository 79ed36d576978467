"""Recipes: what is quantized how in the three GEMMs of a linear layer; the presets `NVIDIA`, `RNE`, `BF16_BACKWARD`."""

from __future__ import annotations

import dataclasses

from jax_nvfp4_ops.format import Format, check_choice

BACKWARDS = ("nvfp4", "bf16")
PARTIAL_SUMS = ("float32", "bfloat16")

_RNE = Format()
_SR = Format(rounding="sr")
_TILE = Format(block="16x16")

# Each GEMM with the names of its operands.
_GEMMS = (
    ("fprop", "x_fprop", "w_fprop"),
    ("dgrad", "g_dgrad", "w_dgrad"),
    ("wgrad", "x_wgrad", "g_wgrad"),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is quantized how in `y = x w` (fprop), `dx = g w^T` (dgrad) and `dw = x^T g` (wgrad).

    x is the activation, w the weight, g the gradient of y. Each GEMM quantizes both of its operands along its own
    contraction axis.

    Args:
      x_fprop: x along K.
      w_fprop: w along K.
      g_dgrad: g along N.
      w_dgrad: w along N.
      x_wgrad: x along M (the tokens).
      g_wgrad: g along M.
      backward: "nvfp4", or "bf16": dgrad and wgrad in bfloat16 from the quantized x and w of fprop, g not quantized; the
        four formats of the backward GEMMs are then without effect.
      partial_sums: "float32" or "bfloat16": where a mesh divides what a GEMM contracts (tensor parallel rows; the tokens, in
        wgrad), the type in which the devices' sums are sent and added. bfloat16 halves the bytes, and rounds once more.
      amax_axes: Inside of a `jax.shard_map`, the manual axes over which the largest magnitude of each tensor is taken. Without
        them each device scales what it has by itself. Elsewhere it is always that of the whole tensor.
      name: For messages and tables.

    Raises:
      ValueError: If only one operand of a GEMM has the Hadamard transform, or backward is unknown.
      TypeError: If a format is no `Format`.

    >>> import jax_nvfp4_ops as nvfp4
    >>> nvfp4.recipes.NVIDIA.g_wgrad
    Format(block='1x16', rounding='sr', hadamard=True)
    """

    x_fprop: Format = _RNE
    w_fprop: Format = _RNE
    g_dgrad: Format = _RNE
    w_dgrad: Format = _RNE
    x_wgrad: Format = _RNE
    g_wgrad: Format = _RNE
    backward: str = "nvfp4"
    partial_sums: str = "float32"
    amax_axes: tuple[str, ...] = ()
    name: str = "custom"

    def __post_init__(self) -> None:
        check_choice("Recipe", "backward", self.backward, BACKWARDS)
        check_choice("Recipe", "partial_sums", self.partial_sums, PARTIAL_SUMS)
        if not isinstance(self.amax_axes, tuple):
            raise TypeError(
                f"Recipe: amax_axes must be a tuple of names of mesh axes; got {self.amax_axes!r}. For one axis: ('data',)."
            )
        for gemm, a, b in _GEMMS:
            for operand in (a, b):
                if not isinstance(getattr(self, operand), Format):
                    raise TypeError(
                        f"Recipe: {operand} must be a Format; got {getattr(self, operand)!r}."
                    )
            if getattr(self, a).hadamard != getattr(self, b).hadamard:
                raise ValueError(
                    f"Recipe: {a} and {b} must both have hadamard or neither, as the transforms cancel only in the product of "
                    f"{gemm}; got {getattr(self, a).hadamard} and {getattr(self, b).hadamard}."
                )

    @property
    def needs_key(self) -> bool:
        """Whether a forward or a backward pass draws random bits."""
        return self.forward_needs_key or (
            any(
                getattr(self, name).rounding == "sr"
                for name in ("g_dgrad", "w_dgrad", "x_wgrad", "g_wgrad")
            )
            and self.backward == "nvfp4"
        )

    @property
    def forward_needs_key(self) -> bool:
        """Whether a forward pass alone draws random bits."""
        return "sr" in (self.x_fprop.rounding, self.w_fprop.rounding)

    def __str__(self) -> str:
        return self.name


# Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149. 16x16 blocks give the weight the same codes in
# forward and backward; SR keeps the gradient unbiased; the Hadamard transform spreads the outliers of wgrad's operands.
NVIDIA = Recipe(
    w_fprop=_TILE,
    w_dgrad=_TILE,
    g_dgrad=_SR,
    x_wgrad=Format(hadamard=True),
    g_wgrad=Format(rounding="sr", hadamard=True),
    name="nvidia",
)

# The baseline that a recipe has to beat: 1x16 blocks, nearest rounding everywhere.
RNE = Recipe(name="rne")

# The forward pass of NVIDIA; the backward GEMMs in bfloat16, from the quantized x and w.
BF16_BACKWARD = Recipe(w_fprop=_TILE, w_dgrad=_TILE, backward="bf16", name="bf16_backward")

PRESETS = {recipe.name: recipe for recipe in (NVIDIA, RNE, BF16_BACKWARD)}
