"""Whole steps in the NVIDIA recipe, and what they are compared with: a linear layer, a scan, a train step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
from jax.ad_checkpoint import checkpoint_name

Linear = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Spec = jax.ShapeDtypeStruct
KEY = Spec((2,), jnp.uint32)
ATTENTION_TARGETS = ("test_attention_forward", "test_attention_backward")


def _bf16(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return jnp.dot(x, w)


def _stock(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    """JAX's own NVFP4: global scales of 1, gradients from unquantized residuals."""
    del key
    config = jax.nn.get_scaled_dot_general_config("nvfp4")
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.nn.scaled_dot_general(
        x, w, dimensions, configs=[config] * 3, preferred_element_type=x.dtype
    )


def _nvfp4(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    return nvfp4.matmul(x, w, key=key)


LINEARS: Mapping[str, Linear] = {"bf16": _bf16, "stock": _stock, "nvfp4": _nvfp4}


def forward(linear: Linear, m: int, k: int, n: int) -> tuple[Any, ...]:
    """A linear layer as it runs where no gradient is wanted, with its arguments."""
    return linear, Spec((m, k), jnp.bfloat16), Spec((k, n), jnp.bfloat16), KEY


def forward_for_gradient(linear: Linear, m: int, k: int, n: int) -> tuple[Any, ...]:
    """The forward pass of a training step: with what it keeps for the backward pass."""

    def step(x: jax.Array, w: jax.Array, key: jax.Array) -> Any:
        return jax.vjp(lambda x, w: linear(x, w, key), x, w)

    return (step, *forward(linear, m, k, n)[1:])


def forward_backward(linear: Linear, m: int, k: int, n: int) -> tuple[Any, ...]:
    """A linear layer and both of its gradients."""

    def step(x: jax.Array, w: jax.Array, key: jax.Array, g: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, w: linear(x, w, key), x, w)
        return (y, *pullback(g))

    return (step, *forward(linear, m, k, n)[1:], Spec((m, n), jnp.bfloat16))


def rms_norm(x: jax.Array, gain: jax.Array | None = None) -> jax.Array:
    wide = x.astype(jnp.float32)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (y if gain is None else y * gain.astype(jnp.float32)).astype(x.dtype)


def scan_step(linear: Linear, layers: int, m: int, k: int) -> tuple[Any, ...]:
    """A step of SGD through a scan over layers of the same shape, which keeps the quantized x and w of each.

    Arguments to donate: the weights and x, whose gradient is returned as for a stage of a pipeline.
    """
    policy = jax.checkpoint_policies.save_only_these_names("nvfp4_x", "nvfp4_w")

    def step(ws: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + linear(rms_norm(x), w, key), None

        def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(layer, x, ws)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, (dws, dx) = jax.value_and_grad(loss, (0, 1))(ws, x)
        return ws - 1e-3 * dws, dx, value

    return step, Spec((layers, k, k), jnp.bfloat16), Spec((m, k), jnp.bfloat16), KEY


# ---- A llama: two layers, unrolled, every linear layer quantized but the last one (the logits).

MODEL, FEED_FORWARD, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
VOCABULARY, BATCH, LENGTH, LAYERS = 32768, 2, 4096, 2


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """In the place of a fused attention kernel: one launch forward, one backward."""
    return _attention_forward(q, k, v)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    results = (Spec(q.shape, q.dtype), Spec(q.shape[:3], jnp.float32))
    out, log_sum = jax.ffi.ffi_call(ATTENTION_TARGETS[0], results)(q, k, v)
    out, log_sum = (checkpoint_name(x, "attention") for x in (out, log_sum))
    return out, (q, k, v, out, log_sum)


def _attention_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    results = tuple(Spec(x.shape, x.dtype) for x in residuals[:3])
    return tuple(jax.ffi.ffi_call(ATTENTION_TARGETS[1], results)(*residuals, g))


attention.defvjp(_attention_forward, _attention_backward)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, length, heads, head]."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency)[None, :, None]
    u, v = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = (u * jnp.cos(angle) - v * jnp.sin(angle), u * jnp.sin(angle) + v * jnp.cos(angle))
    return jnp.concatenate(turned, -1).astype(x.dtype)


def _llama_layer(linear: Linear, x: jax.Array, w: Any, key: jax.Array) -> jax.Array:
    def dot(x: jax.Array, name: str) -> jax.Array:
        y = linear(x.reshape(-1, x.shape[-1]), w[name], key)
        return y.reshape(*x.shape[:-1], -1)

    h = rms_norm(x, w["norm_attention"])
    q, k, v = (dot(h, name).reshape(BATCH, LENGTH, -1, HEAD) for name in ("q", "k", "v"))
    a = attention(_rotate(q), _rotate(k), v).reshape(x.shape)
    x = x + dot(a, "o")
    h = rms_norm(x, w["norm_feed_forward"])
    return x + dot(jax.nn.silu(dot(h, "gate")) * dot(h, "up"), "down")


def llama_step(linear: Linear) -> tuple[Any, ...]:
    """A train step with AdamW on float32 parameters, computed in bfloat16; donate arguments 0, 1 and 2."""

    def loss(parameters: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        x = w["embedding"][tokens]
        for layer in w["layers"]:
            x = _llama_layer(linear, x, layer, key)
        h = rms_norm(x, w["norm"])
        logits = jnp.dot(h, w["head"], preferred_element_type=jnp.float32)
        wanted = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - wanted)

    def step(parameters: Any, mean: Any, square: Any, tokens: jax.Array, key: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, tokens, key)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, gradient)
        parameters = jax.tree.map(
            lambda p, m, v: p - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p),
            parameters,
            mean,
            square,
        )
        return parameters, mean, square, value

    layer = {
        "q": (MODEL, HEADS * HEAD),
        "k": (MODEL, KV_HEADS * HEAD),
        "v": (MODEL, KV_HEADS * HEAD),
        "o": (HEADS * HEAD, MODEL),
        "gate": (MODEL, FEED_FORWARD),
        "up": (MODEL, FEED_FORWARD),
        "down": (FEED_FORWARD, MODEL),
        "norm_attention": (MODEL,),
        "norm_feed_forward": (MODEL,),
    }
    shapes = {
        "embedding": (VOCABULARY, MODEL),
        "head": (MODEL, VOCABULARY),
        "norm": (MODEL,),
        "layers": [layer] * LAYERS,
    }
    parameters = jax.tree.map(
        lambda shape: Spec(shape, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    return step, parameters, parameters, parameters, Spec((BATCH, LENGTH), jnp.int32), KEY
