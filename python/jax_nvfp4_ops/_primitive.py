"""Registers the FFI targets of the native module, and makes a JAX primitive of each op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_nvfp4_ops import _cuda, _native, _sharding
from jax_nvfp4_ops._compat import (
    Primitive,
    ShapedArray,
    ad,
    apply_primitive,
    batching,
    mlir,
    needs_devices,
    partitioning_devices,
)

# The platforms that an op is lowered for, as JAX spells them in a lowering and in a registration.
_LOWERING_PLATFORMS = {"cpu": "cpu", "CUDA": "cuda"}


# Those that this build has targets for, as a registration spells them.
_BUILT_FOR = tuple(_native.registrations())

# Of each op's primitive, the one that a device runs on its part of a partitioned call.
local_primitives: dict[Primitive, Primitive] = {}


def _register_targets() -> None:
    for platform, targets in _native.registrations().items():
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform)
    _native.set_cublaslt_finder(_cuda.find_cublaslt)


_register_targets()


def define(
    name: str,
    *,
    call: Callable[..., Sequence[jax.Array]],
    abstract_eval: Callable[..., Sequence[ShapedArray]],
    batch: Callable[..., tuple[Sequence[jax.Array], Sequence[int]]],
    jvp: Callable[..., tuple[Sequence[jax.Array], Sequence[Any]]],
    axes: Callable[..., _sharding.Axes],
    local: Callable[..., Sequence[jax.Array]],
) -> Primitive:
    """Makes the primitive of one op.

    Args:
      name: Its name in a jaxpr.
      call: `call(*operands, platform=, **params)` calls the FFI target; platform is "cpu" or "cuda".
      abstract_eval: `abstract_eval(*avals, **params)`, with all checks of its operands.
      batch: `batch(operands, axes, **params)`, where an axis is None for an operand that is not mapped.
      jvp: `jvp(primals, tangents, **params)`.
      axes: `axes(divider, *avals, **params)` says how operands and results may be sharded.
      local: `local(call, shards, operands, **params)` is what one device computes, with `call(*operands, **params)` for the op
        on its part.

    Returns:
      The primitive; `bind` returns a list.
    """
    # What one device runs: no shardings, no batching.
    inner = Primitive(f"{name}_local")
    inner.multiple_results = True
    inner.def_abstract_eval(
        lambda *avals, **params: _sharding.typed(name, None, avals, abstract_eval(*avals, **params))
    )
    for spelled, platform in _LOWERING_PLATFORMS.items():
        lowering = mlir.lower_fun(functools.partial(call, platform=platform), multiple_results=True)
        rule = functools.partial(_lower_if_built, name, spelled, lowering)
        mlir.register_lowering(inner, rule, platform=platform)
    mlir.register_lowering(inner, functools.partial(_refuse_platform, name))

    def lower(ctx: Any, *values: Any, **params: Any) -> Any:
        part = functools.partial(_run_local, inner, local, params)
        if devices := partitioning_devices(ctx):
            f = _sharding.partitioned(
                axes(_sharding.Divider(devices), *ctx.avals_in, **params),
                ctx.avals_in,
                ctx.avals_out,
                part,
            )
        else:
            f = functools.partial(_run_whole, part)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *values)

    primitive = Primitive(name)
    local_primitives[primitive] = inner
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(
        lambda *avals, **params: _sharding.typed(
            name,
            lambda devices: axes(_sharding.Divider(devices), *avals, **params),
            avals,
            abstract_eval(*avals, **params),
        )
    )
    mlir.register_lowering(primitive, lower)
    needs_devices(primitive)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


def _lower_if_built(
    name: str, spelled: str, lowering: Any, ctx: Any, *values: Any, **params: Any
) -> Any:
    # A program for another machine, with another build, may be lowered here.
    if spelled not in _BUILT_FOR and _cuda.is_here():
        raise NotImplementedError(
            f"{name}: there is a CUDA device, but this build of jax_nvfp4_ops is for {' and '.join(_BUILT_FOR)} alone. "
            "Install a wheel with CUDA (jax-nvfp4-ops[cuda13]), or build it with nvcc of CUDA 13.0 or later on PATH."
        )
    return lowering(ctx, *values, **params)


def _refuse_platform(name: str, ctx: Any, *values: Any, **params: Any) -> Any:
    del values, params
    raise NotImplementedError(
        f"{name} runs on {' and '.join(_LOWERING_PLATFORMS.values())}; got {', '.join(ctx.module_context.platforms)}. "
        "Place its operands on one of those, or set JAX_PLATFORMS."
    )


def _run_local(
    inner: Primitive, local: Any, params: dict[str, Any], shards: Any, operands: Any
) -> Any:
    return local(inner.bind, shards, operands, **params)


def _run_whole(part: Any, *operands: jax.Array) -> Any:
    return part(_sharding.WHOLE, operands)


def bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> Any:
    """Binds a primitive to operands that may vary over different manual axes."""
    return primitive.bind(*_sharding.vary_alike(*operands), **params)


def refuse_derivative(op: str, fix: str) -> Callable[..., Any]:
    """A jvp rule for an op that has no derivative: an error instead of silent zeros."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        del primals, tangents, params
        raise NotImplementedError(
            f"{op}: x must not be differentiated, as rounding has no derivative; {fix}."
        )

    return jvp


def batch_to_front(operands: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], int]:
    """Moves the mapped axis of each mapped operand to the front; returns them and its size."""
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    return [
        x if a is None else jax.numpy.moveaxis(x, a, 0) for x, a in zip(operands, axes, strict=True)
    ], size


def batch_repeated(operands: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """The same, with operands that are not mapped repeated: each has the mapped axis in front."""
    operands, size = batch_to_front(operands, axes)
    return [
        jax.numpy.broadcast_to(x, (size, *x.shape)) if a is None else x
        for x, a in zip(operands, axes, strict=True)
    ]


def is_nonzero(tangent: Any) -> bool:
    """Whether a tangent in a jvp rule is not a symbolic zero."""
    return not isinstance(tangent, ad.Zero)


def zero_tangent(x: jax.Array) -> Any:
    """The symbolic zero of a float result in a jvp rule."""
    return ad.Zero(jax.typeof(x))
