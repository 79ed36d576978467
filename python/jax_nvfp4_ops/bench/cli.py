"""`python -m jax_nvfp4_ops bench`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_INSTALL = "pip install 'jax-nvfp4-ops[bench]' (in a clone: '.[bench]')"
_PLOTS = (".png", ".pdf", ".svg")

# Where the command line says nothing: (GPU, CPU), whole run and --quick.
_TOKENS = {False: (8192, 512), True: (1024, 64)}
_CASES = {False: ["llama-8b"], True: ["llama-8b/o"]}
_REPEATS = {False: 11, True: 3}
_SECONDS = {False: 0.05, True: 0.005}

_DESCRIPTION = """\
Measures quantization, the GEMM and whole linear layers at the shapes of known models, in turns with what JAX and
TransformerEngine have for the same. A figure is the median over turns, with the 10th and 90th percentile; a ratio is made
turn by turn. Compare ratios of one run, not times of two machines."""


def _positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a positive {word}; got {text!r}")
        return value

    return parse


def _output(suffixes: Sequence[str]) -> Callable[[str], str]:
    """A file that can be written, so that no run is lost at its end."""

    def parse(path: str) -> str:
        if not path.endswith(tuple(suffixes)):
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}; got {path!r}")
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise argparse.ArgumentTypeError(
                f"must lie in a folder that is there; got {path!r}: make {folder!r} first"
            )
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise argparse.ArgumentTypeError(f"must be writable; got {path!r}")
        return path

    return parse


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"must be a regular expression; got {text!r}: {error}"
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m jax_nvfp4_ops bench",
        description=_DESCRIPTION,
        epilog="More, and what the figures mean: docs/benchmarking.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "--op",
        choices=("quantize", "matmul", "linear", "all"),
        default="all",
        help="linear: forward and backward (default: all)",
    )
    p.add_argument(
        "--case",
        action="append",
        metavar="NAME",
        help="a model (llama-8b), a layer (llama-8b/down), all, or sizes MxNxK; may be repeated "
        "(default: llama-8b)",
    )
    p.add_argument(
        "--filter", type=_pattern, metavar="REGEX", help="only names of --list that match"
    )
    p.add_argument(
        "--tokens",
        type=_positive(int),
        metavar="M",
        help=f"rows of the activations (default: {_TOKENS[False][0]}, on a CPU {_TOKENS[False][1]})",
    )
    p.add_argument(
        "--recipe", default="nvidia", metavar="NAME", help="of linear layers (default: nvidia)"
    )
    p.add_argument(
        "--repeats",
        type=_positive(int),
        metavar="N",
        help=f"turns of each rival (default: {_REPEATS[False]})",
    )
    p.add_argument(
        "--seconds",
        type=_positive(float),
        metavar="S",
        help=f"what a turn lasts at least (default: {_SECONDS[False]})",
    )
    p.add_argument("--quick", action="store_true", help="a first look: one small shape, few turns")
    p.add_argument("--json", type=_output([".json"]), metavar="FILE", help="write everything here")
    p.add_argument("--csv", type=_output([".csv"]), metavar="FILE", help="write a table here")
    p.add_argument(
        "--plot", type=_output(_PLOTS), metavar="FILE", help="draw a roofline (.png, .pdf, .svg)"
    )
    instead = p.add_mutually_exclusive_group()
    instead.add_argument(
        "--list", action="store_true", help="show what would be measured, and measure nothing"
    )
    instead.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="show the ratios of two files of --json, and measure nothing",
    )
    return p


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, 1 if this package could not be measured, 2 for bad arguments."""
    p = parser()
    options = p.parse_args(arguments)
    try:
        import rich  # noqa: F401

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        print(f"bench: {error.name} must be installed: {_INSTALL}", file=sys.stderr)
        return 1
    if options.compare:
        return _compare(p, options.compare)

    import jax

    # A call ends when its result is there: several at a time would be another measurement.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        device = jax.devices()[0]
    except Exception as error:  # of several types, from plugins too
        print(
            f"bench: JAX finds no device: {type(error).__name__}: {error}\nbench: `python -m jax_nvfp4_ops doctor` says more",
            file=sys.stderr,
        )
        return 1
    return _Run(p, options, device, list(arguments)).start()


def _compare(p: argparse.ArgumentParser, paths: Sequence[str]) -> int:
    from jax_nvfp4_ops.bench import report

    try:
        old, new = map(report.read_json, paths)
    except ValueError as error:
        p.error(f"argument --compare: {error}")
    circumstances, table, alone = report.compare(old, new)
    out = report.console()
    for line in circumstances:
        out.print(line, markup=False)
    out.print(table)
    for line in alone:
        out.print(line, markup=False)
    return 0


class _Run:
    """One run, from the options to the files."""

    def __init__(
        self, p: argparse.ArgumentParser, options: argparse.Namespace, device: Any, words: list[str]
    ) -> None:
        from jax_nvfp4_ops import instruction_sets, recipes
        from jax_nvfp4_ops.bench import cases, measure, report, rivals

        self.options, self.device = options, device
        self.out = report.console()
        on_cpu = device.platform == "cpu"
        tokens = options.tokens or _TOKENS[options.quick][on_cpu]
        if options.recipe not in recipes.PRESETS:
            p.error(
                f"argument --recipe: must be one of {', '.join(recipes.PRESETS)}; got {options.recipe!r}"
            )
        try:
            chosen = cases.select(options.case or _CASES[options.quick], tokens)
        except ValueError as error:
            p.error(f"argument --case: {error}")
        ops = rivals.OPS if options.op == "all" else (options.op,)
        platform = rivals.Platform.of(device)
        recipe = recipes.PRESETS[options.recipe]
        # Case by case, so that an interrupted run has whole ones.
        self.groups = [
            group
            for case in chosen
            for op in ops
            for group in rivals.groups(op, [case], platform, recipe)
            if not options.filter or options.filter.search(group.name)
        ]
        if not self.groups:
            p.error(
                f"argument --filter: must match a name of --list; got {options.filter.pattern!r}"
            )
        self.settings = measure.Settings(
            options.repeats or _REPEATS[options.quick], options.seconds or _SECONDS[options.quick]
        )
        self.result: dict[str, Any] = {
            "format": report.FORMAT,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "jax_nvfp4_ops", "bench", *words]),
            "complete": False,
            "versions": report.versions(),
            "device": {
                "platform": device.platform,
                "kind": device.device_kind,
                "instruction_set": instruction_sets()[0] if on_cpu else None,
            },
            "settings": {
                "tokens": tokens,
                "recipe": options.recipe,
                "repeats": self.settings.repeats,
                "seconds": self.settings.seconds,
            },
            "limits": {},
            "results": [],
        }

    def start(self) -> int:
        from jax_nvfp4_ops.bench import limits, measure, report, rivals

        if self.options.list:
            self._list()
            return 0
        bounds = limits.of_device(self.device)
        self.result["device"] |= bounds.facts
        self.result["limits"] = {
            "flops": dict(bounds.flops),
            "bandwidth": bounds.bandwidth,
            "cache": bounds.cache,
            "source": bounds.source,
        }
        self._introduce(bounds)
        rows = self.result["results"]
        begun = 0
        interrupted = False
        try:
            with self._progress() as tell:
                for index, group in enumerate(self.groups):
                    tell(index, group.name, "")
                    found = measure.measure(
                        group,
                        self.device,
                        bounds.cache,
                        self.settings,
                        lambda step, i=index, name=group.name: tell(i, name, step),  # type: ignore[misc]
                    )
                    rows += report.records(group, found, bounds)
                    after = self.groups[index + 1] if index + 1 < len(self.groups) else None
                    if after is None or (after.op, after.case) != (group.op, group.case):
                        self._show(rows[begun:])
                        begun = len(rows)
                    self._save()
            self.result["complete"] = True
        except KeyboardInterrupt:
            interrupted = True
            self._show(rows[begun:])
            self.out.print("interrupted: what has been measured is kept", style="bold")
        self._save()
        if self.options.plot and any(not row["reason"] for row in rows):
            report.plot(self.options.plot, self.result)
        for path in (self.options.json, self.options.csv, self.options.plot):
            if path and os.path.exists(path):
                self.out.print(f"wrote {path}", markup=False)
        if interrupted:
            return 130
        failed = [row for row in rows if row["rival"] == rivals.OURS and row["reason"]]
        if failed:
            self.out.print(
                f"{rivals.OURS} failed in {len(failed)} of {len(self.groups)}; "
                "`python -m jax_nvfp4_ops doctor` says whether this installation is sound",
                style="bold red",
            )
        return 1 if failed else 0

    def _introduce(self, bounds: Any) -> None:
        device, found = self.result["device"], self.result["versions"]
        name = device.get("name") or device.get("cpu") or device["kind"]
        if device["instruction_set"]:
            name += f", {device['cores']} cores, instruction set {device['instruction_set']}"
        self.out.print(
            f"{name}; jax_nvfp4_ops {found['jax_nvfp4_ops']}, jax {found['jax']}", style="bold"
        )
        flops = ", ".join(f"{f} {v * 1e-12:.0f} TFLOP/s" for f, v in bounds.flops.items())
        if bounds.bandwidth:
            tera = bounds.bandwidth >= 1e12
            flops += (", " if flops else "") + (
                f"memory {bounds.bandwidth * (1e-12 if tera else 1e-9):.3g} {'TB/s' if tera else 'GB/s'}"
            )
        self.out.print(f"limits: {flops or 'none'} ({bounds.source})", markup=False)
        if device.get("load", 0) > device.get("cores", 1) / 2:
            self.out.print(
                f"the machine is busy (load {device['load']}): trust ratios alone",
                style="bold red",
            )
        settings = self.settings
        self.out.print(
            f"{len(self.groups)} comparison{'s' * (len(self.groups) > 1)} of {settings.repeats} turns, "
            f"each of at least {settings.seconds} s\n"
        )

    def _list(self) -> None:
        from rich.table import Table

        shown = Table()
        numbers = ("M", "N", "K", "GFLOP")
        for header in ("name", *numbers, "against", "not run"):
            shown.add_column(header, justify="right" if header in numbers else "left")
        for group in self.groups:
            case = group.case
            shown.add_row(
                group.name,
                *(str(size) for size in (case.m, case.n, case.k)),
                f"{group.flops * 1e-9:.4g}" if group.flops else "",
                ", ".join(r.name for r in group.rivals[1:] if not r.unavailable),
                ", ".join(r.name for r in group.rivals if r.unavailable),
            )
        self.out.print(shown)
        reasons = dict.fromkeys(
            (r.name, r.unavailable) for g in self.groups for r in g.rivals if r.unavailable
        )
        for name, reason in reasons:
            self.out.print(f"not run: {name}: {reason}", markup=False)

    def _show(self, rows: Sequence[Any]) -> None:
        from jax_nvfp4_ops.bench import report

        for section in report.sections(rows):
            if any(not row["reason"] for row in section):
                self.out.print(report.table(section, giga=self.device.platform == "cpu"))
            for line in report.remarks(section):
                self.out.print(line, style="dim", markup=False)
            self.out.print()

    def _save(self) -> None:
        """After each comparison: a crash in the next one loses nothing."""
        from jax_nvfp4_ops.bench import report

        if self.options.json:
            report.write_json(self.options.json, self.result)
        if self.options.csv:
            report.write_csv(self.options.csv, self.result["results"])

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[int, str, str], None]]:
        """A bar on a terminal; elsewhere a line on standard error for each comparison."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        where = self.out if self.out.is_terminal else Console(stderr=True)
        count = len(self.groups)
        if not where.is_terminal:

            def say(index: int, name: str, step: str) -> None:
                if not step:
                    print(f"[{index + 1}/{count}] {name}", file=sys.stderr, flush=True)

            yield say
            return
        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        # Drawn between the turns: a thread that draws would take time from what is measured.
        with Progress(*columns, console=where, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=count)

            def show(index: int, name: str, step: str) -> None:
                bar.update(task, completed=index, description=f"{name} {step}", refresh=True)

            yield show
