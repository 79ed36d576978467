"""How one operand of a GEMM is quantized."""

from __future__ import annotations

import dataclasses

BLOCKS = ("1x16", "16x16")
ROUNDINGS = ("rne", "sr")

# The sign vector of the random Hadamard transform: bit i set where element i changes its sign.
HADAMARD_SIGNS = 0xD7E8


def check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises if `value` is not one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"{where}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}."
        )


@dataclasses.dataclass(frozen=True)
class Format:
    """How one operand of a GEMM is quantized along the contraction axis.

    Args:
      block: What shares a scale: "1x16", 16 elements of a row, or "16x16", a tile, whose transpose has the same codes.
      rounding: "rne", to nearest even, or "sr", stochastic: unbiased, needs a key.
      hadamard: Whether groups of 16 are first multiplied with a signed Hadamard matrix, which spreads outliers. Both
        operands of a GEMM or none: the transforms cancel in the product.

    Raises:
      ValueError: For an unknown block or rounding.
      TypeError: If hadamard is not a bool.
    """

    block: str = "1x16"
    rounding: str = "rne"
    hadamard: bool = False

    def __post_init__(self) -> None:
        check_choice("Format", "block", self.block, BLOCKS)
        check_choice("Format", "rounding", self.rounding, ROUNDINGS)
        if not isinstance(self.hadamard, bool):
            raise TypeError(f"Format: hadamard must be True or False; got {self.hadamard!r}.")

    def __str__(self) -> str:
        return " ".join([self.block, self.rounding, *(["hadamard"] if self.hadamard else [])])
