"""Times rivals side by side.

On a GPU one sample is one execution of a compiled program that does the work many times in a loop, so that neither
launches from the host nor the end of a program count; XLA runs the body of the loop as a CUDA graph. On a CPU one sample is a
number of calls, each waited for, which is how short calls come there.

Both go round several sets of operands and results, together larger than the last cache: the data comes from memory, as
it does in training, where a layer's weights have long been evicted.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_nvfp4_ops.bench.rivals import Group, Rival

MOST_SETS = 64
_MOST_BYTES = 1 << 30  # of all sets of one rival, but for one set larger than this
_MOST_ROUNDS = 10_000  # of a loop
# One call after the other: a graph would run independent ones side by side.
_SERIAL: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long is measured.

    Args:
      repeats: Turns that each rival takes.
      seconds: What one turn lasts at least.
    """

    repeats: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is known of one rival of a group.

    Attributes:
      rival: Its name.
      limit: Which rate bounds it.
      reason: Why there are no figures; None where there are.
      seconds: One call, of each turn.
      nbytes: What a call reads and writes: operands and results, each once.
      sets: Sets of operands that were gone round.
      cold: Whether these are larger than the last cache.
      moved: Operations that XLA moved out of the loop, so that they were not timed.
    """

    rival: str
    limit: str
    reason: str | None = None
    seconds: tuple[float, ...] = ()
    nbytes: int = 0
    sets: int = 0
    cold: bool = False
    moved: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """Seconds of a call that so many percent of the turns stay below."""
        return percentile(self.seconds, percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation between the nearest values."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def nbytes(tree: Any) -> int:
    """Bytes that the arrays of a tree occupy."""
    return sum(x.size * _bits(x.dtype) // 8 for x in jax.tree.leaves(tree))


def _bits(dtype: Any) -> int:
    return 4 if dtype == jnp.float4_e2m1fn else 8 * int(jnp.dtype(dtype).itemsize)


_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][a-z0-9-]*)\(([^)]*)")
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}


def moved_out_of_loop(text: str) -> tuple[str, ...]:
    """Operations that a compiled program, which is to do all its work in one loop, does outside of it.

    Args:
      text: The optimized HLO, the only language in which XLA tells what it made.
    """
    entry = text.partition("\nENTRY ")[2].partition("\n}")[0]
    found = []
    for line in entry.splitlines():
        match = _INSTRUCTION.match(line)
        if match and match[1] not in _NO_WORK and "%constant" not in match[2]:
            found.append(match[1])
    return tuple(dict.fromkeys(found))


def in_a_loop(function: Callable[..., list[Any]], rounds: int) -> Callable[[Any, Any], Any]:
    """A function of sets of operands and of results, which calls `function` with each set in turn, so many times."""

    def loop(operands: Any, results: Any) -> Any:
        def one_round(_: Any, results: Any) -> Any:
            # So that the calls do not move out of the loop, as they do the same each time: for a GPU,
            # XLA drops barriers after the passes that move. moved_out_of_loop checks it.
            barrier = jax.lax.optimization_barrier((operands, results))
            return [function(*leaves) for leaves in barrier[0]]

        return jax.lax.fori_loop(0, rounds, one_round, results)

    return loop


class Program:
    """A rival, compiled for sets of operands.

    Args:
      rival: What is timed.
      device: Where.
      cache: Bytes of the device's last cache.
      loop: Whether to loop on the device, as on a GPU, or to call from here.
    """

    def __init__(self, rival: Rival, device: jax.Device, cache: int, *, loop: bool) -> None:
        self.rival = rival
        self._loop = loop
        with jax.default_device(device):
            first = rival.operands()
            leaves, tree = jax.tree.flatten(tuple(first))
            results = jax.eval_shape(rival.function, *first)
            self.nbytes = nbytes((leaves, results))
            wanted = math.ceil(min(2 * cache, _MOST_BYTES) / max(self.nbytes, 1))
            self.sets = min(max(wanted, 1), MOST_SETS)
            self.cold = self.sets * self.nbytes > cache
            # Random data costs the power that real data costs; that of all sets may be the same.
            self._operands = [leaves] + [
                [jnp.array(x, copy=True) for x in leaves] for _ in range(self.sets - 1)
            ]
        # Flat operands: the tree of a quantized array takes Python's time in every call.
        self._flat: Callable[..., list[Any]] = lambda *leaves: jax.tree.leaves(
            rival.function(*jax.tree.unflatten(tree, leaves))
        )
        self._shapes = jax.tree.leaves(results)
        self._next = 0
        self._results: list[list[jax.Array]] = []
        self.calls = 1  # of one run
        self.moved: tuple[str, ...] = ()
        if loop:
            self._make_loop(1)
        else:
            self._call = jax.jit(self._flat).lower(*leaves).compile()
        self.run()

    def run(self) -> float:
        """Seconds of one run."""
        start = time.perf_counter()
        if self._loop:
            self._results = self._call(self._operands, self._results)
            jax.block_until_ready(self._results)
        else:
            for _ in range(self.calls):
                jax.block_until_ready(self._call(*self._operands[self._next]))
                self._next = (self._next + 1) % self.sets
        return time.perf_counter() - start

    def fit(self, seconds: float) -> None:
        """Makes a run last about so many seconds."""
        for _ in range(3):  # the launch of a short loop makes its calls seem longer than they are
            # The shortest of a few: a first one may have to fetch pages.
            shortest = min(self.run() for _ in range(3))
            if shortest >= 0.8 * seconds:
                return
            calls = math.ceil(self.calls * seconds / max(shortest, 1e-9))
            if not self._loop:
                self.calls = calls
            else:
                self._make_loop(min(math.ceil(calls / self.sets), _MOST_ROUNDS))
                self.run()

    def _make_loop(self, rounds: int) -> None:
        """Compiles a program that goes round all sets so many times, each result to its own memory."""
        self._results = [
            [jnp.zeros(s.shape, s.dtype, device=self._operands[0][0].device) for s in self._shapes]
            for _ in range(self.sets)
        ]
        loop = jax.jit(in_a_loop(self._flat, rounds), donate_argnums=1)
        lowered = loop.lower(self._operands, self._results)
        try:
            self._call = lowered.compile(compiler_options=_SERIAL)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            self._call = lowered.compile()
        self.calls = rounds * self.sets
        text = self._call.as_text() or ""
        self.moved = moved_out_of_loop(text)
        if self.rival.proof and self.rival.proof not in text:
            raise RuntimeError(
                f"XLA compiled it to other operations ({self.rival.proof!r} is not in the program)"
            )


def measure(
    group: Group,
    device: jax.Device,
    cache: int,
    settings: Settings,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Figures of each rival of a group; one that fails has the reason instead.

    Args:
      group: What to measure.
      device: Where.
      cache: Bytes of the device's last cache.
      settings: How long.
      tell: Is told of each step in words.
    """
    failures = {r.name: r.unavailable for r in group.rivals if r.unavailable}
    programs: dict[str, Program] = {}
    for rival in group.rivals:
        if rival.name in failures:
            continue
        tell(f"compiling {rival.name}")
        try:
            programs[rival.name] = Program(rival, device, cache, loop=device.platform != "cpu")
            programs[rival.name].fit(settings.seconds)
        except Exception as error:
            failures[rival.name] = _short(error)
            programs.pop(rival.name, None)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(settings.repeats):
        tell(f"turn {turn + 1} of {settings.repeats}")
        for name, program in list(programs.items()):
            try:
                if settings.seconds:
                    time.sleep(0.005)  # for threads of the one before to go to sleep
                times[name].append(program.run() / program.calls)
            except Exception as error:
                failures[name] = _short(error)
                del programs[name]
    measurements = [
        Measurement(r.name, r.limit, failures[r.name])
        if r.name in failures
        else Measurement(
            r.name,
            r.limit,
            None,
            tuple(times[r.name]),
            programs[r.name].nbytes,
            programs[r.name].sets,
            programs[r.name].cold,
            programs[r.name].moved,
        )
        for r in group.rivals
    ]
    programs.clear()
    gc.collect()  # their memory is for the next group
    return measurements


def _short(error: Exception) -> str:
    """An error's first line, no longer than a table bears."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
