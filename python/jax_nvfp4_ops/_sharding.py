"""How an op partitions over a mesh of devices.

One description of an op's axes (`Axes`) gives the rule by which XLA propagates shardings through it, what each device
computes, and the types of its results where shardings are part of types (explicit meshes, manual axes).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_nvfp4_ops._compat import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    ShapedArray,
    custom_partitioning,
    no_abstract_mesh,
    parse_flatten_op_sharding,
)

Dim = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """What the axes of an op's operands and results have to do with each other.

    Every axis of an array is a product of factors, the major one first: the rows of a matrix whose scales lie in tiles of 128
    rows are ("rows", "row_of_tile"), and the tiles ("rows",). An array may be sharded along the first factor of an axis.

    Args:
      operands: Of each operand, the factors of each of its axes; () for an axis of size 1 that is repeated.
      results: Likewise.
      sizes: Of each factor that may be sharded.
      reduced: Factors over which results are reduced, where they may be sharded.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    reduced: tuple[str, ...] = ()

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """The same as a rule for Shardy."""
        undivided: list[str] = []
        sizes: dict[str, int] = {}  # of factors; an axis that is one factor says its size itself

        def factor(dim: Dim, size: int) -> Any:
            if len(dim) == 1 and dim[0] in self.sizes:
                return dim[0]
            if len(dim) == 1:
                if dim[0] not in undivided:
                    undivided.append(dim[0])
                return dim[0]
            undivided.append(f"undivided{len(undivided)}")
            if not dim:
                return undivided[-1]
            # What one place of the first factor holds.
            sizes[dim[0]] = self.sizes[dim[0]]
            sizes[undivided[-1]] = size // self.sizes[dim[0]]
            return CompoundFactor(dim[0], undivided[-1])

        def mappings(arrays: Sequence[Any], axes: tuple[tuple[Dim, ...], ...]) -> Any:
            return tuple(
                ArrayMapping(*(factor(d, s) for d, s in zip(dims, x.shape, strict=True)))
                for dims, x in zip(axes, arrays, strict=True)
            )

        mapped = mappings(operands, self.operands), mappings(results, self.results)
        whole = {f for arrays in mapped for a in arrays for f in a if isinstance(f, str)}
        factor_sizes: dict[str, Any] = {f: s for f, s in sizes.items() if f not in whole}
        return SdyShardingRule(
            *mapped,
            reduction_factors=tuple(f for f in self.reduced if f in whole or f in sizes),
            need_replication_factors=tuple(undivided),
            **factor_sizes,
        )

    def assign(
        self, specs: Sequence[Sequence[Any]], axis_sizes: Mapping[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each factor, where operands are sharded by `specs`; the first operand that has a factor decides."""
        chosen: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for dims, spec in zip(self.operands, specs, strict=True):
            for dim, entry in zip(dims, spec, strict=False):
                if not dim or dim[0] in chosen or dim[0] not in self.sizes:
                    continue
                axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                count = math.prod(axis_sizes[a] for a in axes)
                if count == 1 or taken & set(axes) or self.sizes[dim[0]] % count:
                    continue
                chosen[dim[0]] = axes
                taken |= set(axes)
        return chosen

    @staticmethod
    def spec(dims: tuple[Dim, ...], chosen: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
        """Of an array with these axes."""
        entries = (chosen.get(dim[0], ()) if dim else () for dim in dims)
        return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries))


def leading_axes(shape: Sequence[int]) -> tuple[tuple[Dim, ...], dict[str, int]]:
    """The leading axes of matrices, each a factor of its own, and the sizes of these."""
    sizes = {f"axis{i}": size for i, size in enumerate(shape) if size > 1}
    return tuple((f"axis{i}",) for i in range(len(shape))), sizes


def divide(name: str, size: int, unit: int, sizes: dict[str, int]) -> Dim:
    """An axis that may be divided into parts of whole units; `sizes` gets its factor, if it may."""
    if size % unit or size < 2 * unit:
        return (f"{name}_whole",)
    sizes[name] = size // unit
    return (name,) if unit == 1 else (name, f"{name}_of_unit")


def tiles(name: str, count: int, sizes: Mapping[str, int]) -> Dim:
    """The axis of the tiles in which the scales of such an axis lie."""
    if name not in sizes:
        return (f"{name}_tiles",)
    return (name,) if count == sizes[name] else (name, f"{name}_tiles_of_unit")


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one device has of a partitioned call.

    Args:
      chosen: The mesh axes by which each factor is sharded.
      counts: Into how many parts.
    """

    chosen: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, int]

    def index(self, factor: str) -> Any:
        """Which part this device has."""
        axes = self.chosen.get(factor, ())
        return jax.lax.axis_index(axes) if axes else 0

    def count(self, factor: str) -> int:
        """The number of parts."""
        return self.counts.get(factor, 1)

    def axes(self, factors: Sequence[str]) -> tuple[str, ...]:
        """The mesh axes of several factors."""
        return tuple(a for f in factors for a in self.chosen.get(f, ()))


WHOLE = Shards({}, {})

# A device's part of the results, from its part of the operands.
Local = Callable[[Shards, Sequence[jax.Array]], Sequence[jax.Array]]


def _refined(mesh: Mesh) -> Mesh:
    """The same devices with axes of prime sizes: XLA may shard by a part of an axis, which then has a name."""
    names, sizes = [], []
    for name, size in mesh.shape.items():
        part, divisor = 0, 2
        while size > 1:
            if size % divisor:
                divisor += 1
                continue
            names.append(f"{name}/{part}")
            sizes.append(divisor)
            size //= divisor
            part += 1
    return Mesh(mesh.devices.reshape(sizes), tuple(names))


def _spec_of(mesh: Mesh, array: Any) -> tuple[Any, ...]:
    """How an array is sharded, in axes of a refined mesh."""
    if array.sharding is None:  # GSPMD does not know yet
        return (None,) * len(array.shape)
    (spec, *_) = parse_flatten_op_sharding(array.sharding._hlo_sharding, mesh)
    return tuple(spec) + (None,) * (len(array.shape) - len(spec))


def partitioned(
    axes: Axes, operands: Sequence[Any], results: Sequence[Any], local: Local
) -> Callable[..., Any]:
    """A function of the operands that XLA may partition."""
    function = custom_partitioning(lambda *xs: tuple(local(WHOLE, xs)))

    def assign(mesh: Mesh, arg_shapes: Any) -> dict[str, tuple[str, ...]]:
        return axes.assign([_spec_of(mesh, a) for a in arg_shapes], mesh.shape)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        mesh = _refined(mesh)
        chosen = assign(mesh, arg_shapes)
        counts = {f: math.prod(mesh.shape[a] for a in names) for f, names in chosen.items()}
        shards = Shards(chosen, counts)

        def place(dims: tuple[Dim, ...]) -> NamedSharding:
            return NamedSharding(mesh, axes.spec(dims, chosen))

        def lower(*xs: jax.Array) -> tuple[jax.Array, ...]:
            # What a device computes has no shardings in its types.
            with no_abstract_mesh():
                return tuple(local(shards, xs))

        return (
            mesh,
            lower,
            tuple(place(d) for d in axes.results),
            tuple(place(d) for d in axes.operands),
        )

    def infer(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        del result_shapes
        mesh = _refined(mesh)
        chosen = assign(mesh, arg_shapes)
        return tuple(NamedSharding(mesh, axes.spec(d, chosen)) for d in axes.results)

    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=axes.rule(operands, results),
    )
    return function


def typed(
    axes_of: Callable[[], Axes] | None, operands: Sequence[Any], results: Sequence[ShapedArray]
) -> list[ShapedArray]:
    """The results with what types say of shardings and of manual axes, from the operands."""
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return list(results)
    varying = [x.manual_axis_type.varying for x in operands]
    if any(v != varying[0] for v in varying):
        raise ValueError(
            "the operands of an NVFP4 op must vary over the same manual axes; got "
            f"{[sorted(map(str, v)) for v in varying]}. Use jax.lax.pcast(x, axis, to='varying')."
        )
    manual = operands[0].manual_axis_type
    if axes_of is None:
        specs = [PartitionSpec(*(None,) * len(r.shape)) for r in results]
    else:
        axes = axes_of()
        padded = [
            tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in operands
        ]
        chosen = axes.assign(padded, dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
        specs = [axes.spec(d, chosen) for d in axes.results]
    return [
        ShapedArray(r.shape, r.dtype, sharding=NamedSharding(mesh, s), manual_axis_type=manual)
        for r, s in zip(results, specs, strict=True)
    ]


def like(x: jax.Array, sharding: Any) -> jax.Array:
    """x with this sharding, where shardings are part of types."""
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, sharding)


def vary_alike(*operands: Any) -> tuple[Any, ...]:
    """The operands, made to vary over the same manual axes: the union of theirs."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x
        for x, v in zip(operands, varying, strict=True)
    )


def vary_alike_trees(*trees: Any) -> Any:
    """The same for all arrays of several trees."""
    leaves, structure = jax.tree.flatten(trees)
    return jax.tree.unflatten(structure, vary_alike(*leaves))
