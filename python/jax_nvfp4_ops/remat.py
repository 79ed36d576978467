"""What `jax.checkpoint` may keep of a quantized linear layer."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

T = TypeVar("T")

# The names of a layer's residuals, x and w quantized for the backward pass, and of its result. With all three kept nothing is
# quantized twice.
RESIDUAL_NAMES = ("nvfp4_x", "nvfp4_w", "nvfp4_y")

# A policy for `jax.checkpoint`: keeps what `RESIDUAL_NAMES` names. JAX's own `dots_*` policies do not see these ops.
checkpoint_policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)


def named(tree: T, name: str) -> T:
    """The tree with each leaf named for checkpoint policies."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), tree)
