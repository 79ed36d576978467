"""One layer of a Llama-70B on a mesh of B200s, forward and backward: in NVFP4, in bfloat16 and in FP8.

In NVFP4 it is written as for one device, with shardings of weights and activations; XLA finds the collectives. The rivals have
theirs written out, the fewest there are for such a layer: what XLA finds by itself is more in places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from b200 import plugin
from b200.programs import KEY, Spec, rms_norm

# Of Llama-70B. q, k and v are one weight, by groups of heads, and so are gate and up, by halves of such groups.
MODEL, FEED_FORWARD, HEADS, KV_HEADS, HEAD = 8192, 28672, 64, 8, 128
WEIGHTS = {
    "qkv": (MODEL, (HEADS + 2 * KV_HEADS) * HEAD),
    "o": (HEADS * HEAD, MODEL),
    "gate_up": (MODEL, 2 * FEED_FORWARD),
    "down": (FEED_FORWARD, MODEL),
}
# Those whose results the model axis divides; of the others it divides what is contracted.
COLUMNS = ("qkv", "gate_up")
TOKENS = 8192  # of each part of the batch


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a layer lies on a mesh.

    Args:
      mesh: The devices.
      data: The axes that divide the batch, and weights (FSDP).
      model: The axis of tensor parallelism, which divides the tokens between the products (sequence parallelism); or None.
      weight: The axes that divide rows and columns of a weight of COLUMNS; of the others, columns and rows.
    """

    mesh: Mesh
    data: tuple[str, ...]
    model: str | None
    weight: tuple[Any, Any]

    @property
    def parts(self) -> int:
        """Of the batch."""
        return math.prod(self.mesh.shape[a] for a in self.data)

    def weights(self, name: str) -> PartitionSpec:
        """How a weight is divided."""
        return PartitionSpec(*(self.weight if name in COLUMNS else self.weight[::-1]))

    @property
    def between(self) -> PartitionSpec:
        """How activations [tokens, features] are divided between the products of a block."""
        return PartitionSpec((*self.data, self.model) if self.model else self.data)

    @property
    def inside(self) -> PartitionSpec:
        """Likewise between two products: those of COLUMNS and of the others."""
        return PartitionSpec(self.data, self.model)


def fsdp(devices: int) -> Layout:
    """Weights divided over all devices."""
    mesh = plugin.mesh(devices, names=("data",))
    return Layout(mesh, ("data",), None, ("data", None))


def fsdp_tp(devices: int, model: int = 8) -> Layout:
    """Tensor parallelism within groups of devices, FSDP over the groups, sequence parallelism between products."""
    names = ("data", "model")
    return Layout(plugin.mesh(devices // model, model, names=names), names[:1], "model", names)


# A product of the layer: of x, a weight in float32, a key, the weight's name.
Linear = Callable[[jax.Array, jax.Array, jax.Array, str], jax.Array]


def nvfp4_linear(layout: Layout, partial_sums: str) -> Linear:
    """Of this package, in the recipe NVIDIA."""
    recipe = dataclasses.replace(nvfp4.recipes.NVIDIA, partial_sums=partial_sums)
    del layout

    def linear(x: jax.Array, w: jax.Array, key: jax.Array, name: str) -> jax.Array:
        del name
        return nvfp4.matmul(x, w.astype(x.dtype), key=key, recipe=recipe)

    return linear


def _rival(
    layout: Layout,
    partial_sums: str,
    encode: Callable[..., Any],
) -> Linear:
    """A product whose operands are sent as `encode` makes them, a pair of an array and a factor."""
    data, model = layout.data, layout.model
    every = layout.mesh.axis_names
    sums = jnp.dtype(partial_sums)

    def gather(x: jax.Array, axes: Any, axis: int) -> jax.Array:
        return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x

    def scatter(x: jax.Array, axes: Any, axis: int) -> jax.Array:
        return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x

    def product(a: Any, b: Any, contracting: tuple[int, int]) -> jax.Array:
        (x, x_scale), (y, y_scale) = a, b
        dims = (((contracting[0],), (contracting[1],)), ((), ()))
        z = lax.dot_general(x, y, dims, preferred_element_type=sums)
        return z if x_scale is None else (z * (x_scale * y_scale)).astype(sums)

    def linear(x: jax.Array, w: jax.Array, key: jax.Array, name: str) -> jax.Array:
        del key
        column = name in COLUMNS
        # Data axes divide rows or columns of a weight, or one of two both of them.
        divided = [
            tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a in data)
            for e in layout.weights(name)
        ]
        outer, inner = (
            (layout.between, layout.inside) if column else (layout.inside, layout.between)
        )
        manual = functools.partial(jax.shard_map, mesh=layout.mesh, check_vma=False)

        def whole(w: jax.Array) -> Any:
            w, scale = encode(w.astype(jnp.bfloat16), every, False)
            for axis, axes in enumerate(divided):
                w = gather(w, axes, axis)
            return w, scale

        def tokens(x: jax.Array, gathered: bool, gradient: bool) -> Any:
            x, scale = encode(x, every, gradient)
            return gather(x, model, 0) if gathered else x, scale

        @functools.partial(manual, in_specs=(outer, layout.weights(name)), out_specs=inner)
        def forward(x: jax.Array, w: jax.Array) -> jax.Array:
            y = product(tokens(x, column, False), whole(w), (1, 0))
            return (y if column else scatter(y, model, 0)).astype(x.dtype)

        @functools.partial(
            manual,
            in_specs=(outer, layout.weights(name), inner),
            out_specs=(outer, layout.weights(name)),
        )
        def backward(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
            g8 = tokens(g, not column, True)
            dx = product(g8, whole(w), (1, 1))
            dx = (scatter(dx, model, 0) if column else dx).astype(x.dtype)
            dw = product(tokens(x, column, False), g8, (0, 0))
            for axis, axes in enumerate(divided):
                dw = scatter(dw, axes, axis)
            return dx, dw.astype(w.dtype)

        @jax.custom_vjp
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            return forward(x, w)

        f.defvjp(
            lambda x, w: (checkpoint_name(forward(x, w), "nvfp4_y"), (x, w)),
            lambda residuals, g: backward(*residuals, g),
        )
        return f(x, w)

    return linear


def bf16_linear(layout: Layout, partial_sums: str) -> Linear:
    """In bfloat16."""
    return _rival(layout, partial_sums, lambda x, every, gradient: (x, None))


def fp8_linear(layout: Layout, partial_sums: str) -> Linear:
    """In FP8: a scale for each tensor, e4m3, and e5m2 for gradients. What is sent is quantized before."""

    def encode(x: jax.Array, every: Any, gradient: bool) -> Any:
        dtype = jnp.float8_e5m2 if gradient else jnp.float8_e4m3fn
        wide = x.astype(jnp.float32)
        largest = lax.pmax(jnp.max(jnp.abs(wide)), every)
        scale = jnp.maximum(largest, 1e-30) / float(jnp.finfo(dtype).max)
        return (wide / scale).astype(dtype), scale

    return _rival(layout, partial_sums, encode)


LINEARS: dict[str, Callable[[Layout, str], Linear]] = {
    "bf16": bf16_linear,
    "fp8": fp8_linear,
    "nvfp4": nvfp4_linear,
}


def layer_step(layout: Layout, linear: Linear, tokens: int = TOKENS) -> tuple[Any, ...]:
    """A layer forward and backward, and its arguments; parameters and their gradients are float32, the rest bfloat16.

    What remains of the forward pass are inputs and the results of products, and in NVFP4 the quantized x and w:
    weights are gathered again for the backward pass, as where layers are many.
    """

    def at(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))

    @functools.partial(jax.checkpoint, policy=nvfp4.checkpoint_policy)
    def layer(x: jax.Array, w: Any, key: jax.Array) -> jax.Array:
        count, groups = x.shape[0], KV_HEADS

        def product(x: jax.Array, name: str) -> jax.Array:
            y = linear(x, w[name], key, name)
            return at(y, layout.inside if name in COLUMNS else layout.between)

        h = at(rms_norm(x, w["norm_attention"]), layout.between)
        qkv = product(h, "qkv").reshape(count, groups, -1, HEAD)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
        # In the place of attention: like it within a sequence, which no axis divides here, and a group of heads.
        a = at((q * jnp.tanh(k) + v).reshape(count, -1), layout.inside)
        x = at(x + product(a, "o"), layout.between)
        h = at(rms_norm(x, w["norm_feed_forward"]), layout.between)
        gate_up = product(h, "gate_up").reshape(count, groups, 2, -1)
        u = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
        return at(x + product(at(u.reshape(count, -1), layout.inside), "down"), layout.between)

    def step(x: jax.Array, w: Any, key: jax.Array, g: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, w: layer(x, w, key), x, w)
        return y, *pullback(g)

    def place(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(layout.mesh, spec)

    w = {
        name: Spec(shape, jnp.float32, sharding=place(layout.weights(name)))
        for name, shape in WEIGHTS.items()
    }
    for name in ("norm_attention", "norm_feed_forward"):
        w[name] = Spec((MODEL,), jnp.float32, sharding=place(PartitionSpec()))
    x = Spec((tokens * layout.parts, MODEL), jnp.bfloat16, sharding=place(layout.between))
    key = KEY.update(sharding=place(PartitionSpec()))
    results = x.sharding, x.sharding, {name: p.sharding for name, p in w.items()}
    return jax.jit(step, out_shardings=results), x, w, key, x
