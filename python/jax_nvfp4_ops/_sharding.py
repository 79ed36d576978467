"""How an op partitions over a mesh of devices.

One description of an op's axes (`Axes`) gives the rule by which XLA propagates shardings through it, what each device
computes, and the types of its results where shardings are part of types (explicit meshes, manual axes).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
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
    rows are ("row", "row_of_tile"), and the tiles ("row",). An array may be sharded along the factors that have a size here.

    Args:
      operands: Of each operand, the factors of each of its axes; () for an axis of size 1 that is repeated.
      results: Likewise.
      sizes: Of each factor that may be sharded.
      reduced: Factors over which results are reduced, where they may be sharded.
      sums: Whether the one result is a sum over them: see `assign_sum`.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    reduced: tuple[str, ...] = ()
    sums: bool = False

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """The same as a rule for Shardy."""
        undivided: list[str] = []
        sizes: dict[str, int] = {}  # of factors; an axis that is one factor says its size itself

        def factor(dim: Dim, size: int) -> Any:
            if len(dim) == 1:
                if dim[0] not in self.sizes and dim[0] not in undivided:
                    undivided.append(dim[0])
                return dim[0]
            names = []
            for name in dim or ("one",):
                if name not in self.sizes:
                    # What is left of this axis: another size than in another array.
                    undivided.append(f"undivided{len(undivided)}")
                    name = undivided[-1]
                    sizes[name] = size
                else:
                    sizes[name] = self.sizes[name]
                    size //= sizes[name]
                names.append(name)
            return names[0] if len(names) == 1 else CompoundFactor(*names)

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
                axes = list(_names(entry))
                for factor in dim:
                    if factor not in self.sizes:
                        break
                    left, mine = self.sizes[factor], list[str]()
                    while axes and axes[0] not in taken and left % axis_sizes[axes[0]] == 0:
                        left //= axis_sizes[axes[0]]
                        mine.append(axes.pop(0))
                    if mine and factor not in chosen:
                        chosen[factor] = tuple(mine)
                        taken |= set(mine)
                    if left > 1:  # the next factor is divided only if this one is, to the end
                        break
        return chosen

    def assign_sum(
        self,
        specs: Sequence[Sequence[Any]],
        axis_sizes: Mapping[str, int],
        wanted: Sequence[Any],
        shape: Sequence[int],
    ) -> tuple[dict[str, tuple[str, ...]], dict[Dim, tuple[str, ...]]]:
        """Likewise for a sum over the reduced factors that is to be sharded like `wanted`, and has this shape.

        Devices sum up what they have parts of in every operand. Else the result decides, so that operands are gathered that are
        sharded otherwise: codes, where activations between products are divided along the sequence, or a weight of FSDP.

        Returns:
          The mesh axes of each factor, and for each axis of the result those over which the sum is scattered.
        """
        (result,) = self.results
        every = [
            [(dim, _names(entry)) for dim, entry in zip(dims, spec, strict=False)]
            for dims, spec in zip(self.operands, specs, strict=True)
        ]
        parts: dict[str, list[tuple[str, ...]]] = {}
        elsewhere = {a for entry in wanted for a in _names(entry)}
        for dim, names in (pair for array in every for pair in array):
            if self.is_reduced(dim):
                parts.setdefault(dim[0], []).append(names)
            else:
                elsewhere |= set(names)

        def summed(factor: str) -> tuple[str, ...]:
            mine = parts[factor]
            longest = max(mine, key=lambda names: len(names))
            return tuple(
                takewhile(lambda a: a not in elsewhere or all(a in p for p in mine), longest)
            )

        sums = self.assign(
            [[summed(d[0]) if self.is_reduced(d) else () for d, _ in array] for array in every],
            axis_sizes,
        )
        over = {a for names in sums.values() for a in names}

        def others(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(takewhile(lambda a: a not in over, names))

        chosen = dataclasses.replace(self, operands=(result, *self.operands)).assign(
            [
                [others(_names(entry)) for entry in wanted],
                *(
                    [() if self.is_reduced(dim) else others(names) for dim, names in array]
                    for array in every
                ),
            ],
            axis_sizes,
        )
        scattered = {}
        for dim, entry, size in zip(result, wanted, shape, strict=True):
            whole = tuple(a for factor in dim for a in chosen.get(factor, ()))
            names = _names(entry)
            rest = names[len(whole) :] if names[: len(whole)] == whole else ()
            mine = tuple(takewhile(over.__contains__, rest))
            even = size % math.prod(axis_sizes[a] for a in whole + mine) == 0
            scattered[dim] = mine if even else ()
        return chosen | sums, scattered

    def is_reduced(self, dim: Dim) -> bool:
        """Whether results are reduced over this axis of an operand."""
        return bool(dim) and dim[0] in self.reduced

    @staticmethod
    def spec(
        dims: tuple[Dim, ...],
        chosen: Mapping[str, tuple[str, ...]],
        scattered: Mapping[Dim, tuple[str, ...]] | None = None,
    ) -> PartitionSpec:
        """Of an array with these axes."""
        further = scattered or {}
        entries = (
            (*(a for factor in dim for a in chosen.get(factor, ())), *further.get(dim, ()))
            for dim in dims
        )
        return PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries))


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


@dataclasses.dataclass
class Divider:
    """Makes the factors of axes for a number of devices.

    Args:
      devices: Their number. Only its prime factors divide an axis: 86 tiles of scales, for 8 devices, are 2 times 43.
      sizes: Of the factors made so far.
    """

    devices: int
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def leading(self, shape: Sequence[int]) -> tuple[Dim, ...]:
        """The leading axes of matrices, each a factor of its own."""
        self.sizes |= {f"axis{i}": size for i, size in enumerate(shape) if size > 1}
        return tuple((f"axis{i}",) for i in range(len(shape)))

    def axis(self, name: str, size: int, unit: int, part: int | None = None) -> Dim:
        """An axis that may be divided into whole units, and these further into whole parts."""
        factors = []
        if size % unit == 0 and (count := self._dividing(size // unit)) > 1:
            self.sizes[name] = count
            factors.append(name)
            size //= count
        if part is not None and size % part == 0 and size > part:
            self.sizes[f"{name}_part"] = size // part
            factors.append(f"{name}_part")
            size = part
        return (*factors, f"{name}_rest") if size > 1 or not factors else tuple(factors)

    def tiles(self, name: str, count: int) -> Dim:
        """The axis of the tiles in which the scales of such an axis lie."""
        if name not in self.sizes:
            return (f"{name}_tiles",)
        return (name,) if count == self.sizes[name] else (name, f"{name}_tiles_of_unit")

    def _dividing(self, size: int) -> int:
        """The greatest divisor of size that has no other prime factors than the number of devices."""
        product = 1
        while size and (common := math.gcd(size, self.devices)) > 1:
            product *= common
            size //= common
        return product


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one device has of a partitioned call.

    Args:
      chosen: The mesh axes by which each factor is sharded.
      counts: Into how many parts.
      scattered: For each axis of a sum, the mesh axes over which it is scattered.
    """

    chosen: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, int]
    scattered: tuple[tuple[str, ...], ...] = ()

    def index(self, *factors: str) -> Any:
        """Which part of the product of these factors this device has."""
        axes = self.axes(factors)
        return jax.lax.axis_index(axes) if axes else 0

    def count(self, *factors: str) -> int:
        """The number of parts."""
        return math.prod(self.counts.get(f, 1) for f in factors)

    def axes(self, factors: Sequence[str]) -> tuple[str, ...]:
        """The mesh axes of several factors."""
        return tuple(a for f in factors for a in self.chosen.get(f, ()))

    def sum(self, x: jax.Array, *factors: str) -> jax.Array:
        """The sum over the devices that have parts of these factors: of it, this device's part."""
        over = self.axes(factors)
        for axis, mine in enumerate(self.scattered):
            if mine:
                x = jax.lax.psum_scatter(x, mine, scatter_dimension=axis, tiled=True)
                over = tuple(a for a in over if a not in mine)
        return jax.lax.psum(x, over) if over else x


WHOLE = Shards({}, {})

# A device's part of the results, from its part of the operands.
Local = Callable[[Shards, Sequence[jax.Array]], Sequence[jax.Array]]


# XLA may shard by a part of an axis. Parts of prime size have names of their own: by axis, (name, size) of each.
_Parts = Mapping[str, tuple[tuple[str, int], ...]]


def _prime_parts(axis_sizes: Mapping[str, int]) -> _Parts:
    parts = {}
    for name, size in axis_sizes.items():
        mine, divisor = list[tuple[str, int]](), 2
        while size > 1:
            if size % divisor:
                divisor += 1
                continue
            mine.append((f"{name}/{len(mine)}", divisor))
            size //= divisor
        parts[name] = tuple(mine)
    return parts


def _refined(mesh: Mesh) -> Mesh:
    """The same devices with axes of prime sizes."""
    named = [part for mine in _prime_parts(mesh.shape).values() for part in mine]
    return Mesh(mesh.devices.reshape([s for _, s in named]), tuple(n for n, _ in named))


def _in_parts(spec: Any, parts: _Parts) -> tuple[Any, ...]:
    entries = (e if isinstance(e, tuple) else () if e is None else (e,) for e in spec)
    return tuple(tuple(name for axis in e for name, _ in parts[axis]) for e in entries)


def _in_whole_axes(spec: Any, parts: _Parts) -> PartitionSpec:
    """The axes of which all parts are there."""
    entries = []
    for e in spec:
        names = e if isinstance(e, tuple) else () if e is None else (e,)
        axes = dict.fromkeys(n.rpartition("/")[0] for n in names)
        whole = tuple(a for a in axes if all(n in names for n, _ in parts[a]))
        entries.append(whole[0] if len(whole) == 1 else whole or None)
    return PartitionSpec(*entries)


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
        mesh = _refined(mesh)
        scattered: dict[Dim, tuple[str, ...]] = {}
        if axes.sums:
            (result,) = result_shapes
            specs = [_spec_of(mesh, a) for a in arg_shapes]
            wanted = _spec_of(mesh, result)
            chosen, scattered = axes.assign_sum(specs, mesh.shape, wanted, result.shape)
        else:
            chosen = assign(mesh, arg_shapes)
        counts = {f: math.prod(mesh.shape[a] for a in names) for f, names in chosen.items()}
        shards = Shards(chosen, counts, tuple(scattered.values()))

        def place(dims: tuple[Dim, ...]) -> NamedSharding:
            # What is summed up is not divided like the sum.
            further = {} if any(map(axes.is_reduced, dims)) else scattered
            return NamedSharding(mesh, axes.spec(dims, chosen, further))

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
    op: str,
    axes_of: Callable[[int], Axes] | None,
    operands: Sequence[Any],
    results: Sequence[ShapedArray],
) -> list[ShapedArray]:
    """The results with what types say of shardings and of manual axes, from the operands.

    Warns of an operand that is gathered because the op can not be divided as it is. (Of a mesh whose shardings are not in types
    nothing is known here.)
    """
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return list(results)
    varying = [x.manual_axis_type.varying for x in operands]
    if any(v != varying[0] for v in varying):
        raise ValueError(
            f"{op}: operands must vary over the same manual axes; got "
            f"{[sorted(map(str, v)) for v in varying]}. Use jax.lax.pcast(x, axis, to='varying')."
        )
    manual = operands[0].manual_axis_type
    if axes_of is None:
        specs = [PartitionSpec(*(None,) * len(r.shape)) for r in results]
    else:
        axes = axes_of(math.prod(mesh.axis_sizes))
        padded = [
            tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in operands
        ]
        parts = _prime_parts(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
        chosen = axes.assign(
            [_in_parts(s, parts) for s in padded],
            {n: s for mine in parts.values() for n, s in mine},
        )
        used = {name for names in chosen.values() for name in names}
        for x, spec in zip(operands, padded, strict=True):
            for i, entry in enumerate(spec):
                names = _in_parts((entry,), parts)[0]
                if set(names) - used:
                    warnings.warn(
                        f"{op}: axis {i} of an operand of shape {x.shape} is sharded over {entry!r}, but can not be divided into "
                        "so many parts of 32 (matmul: of whole tiles of scales, 128 rows or 64 columns). It is gathered on every "
                        "device. Choose another size, or shard another axis.",
                        stacklevel=2,
                    )
        specs = [_in_whole_axes(axes.spec(d, chosen), parts) for d in axes.results]
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
