"""Results as records, files, tables and plots; and the comparison of two files."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jax_nvfp4_ops.bench.limits import Limits
from jax_nvfp4_ops.bench.measure import Measurement, percentile
from jax_nvfp4_ops.bench.rivals import OURS, YARDSTICK, Group

# The first words of a file, so that --compare knows its own. A change of fields is a new number.
FORMAT = "jax_nvfp4_ops bench 1"

# Packages whose version can change a figure.
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "transformer-engine",
    "numpy",
)
_CSV_FIELDS = (
    *("op", "case", "variant", "m", "n", "k", "rival", "reason"),
    *("median_s", "p10_s", "p90_s", "flops", "bytes", "flops_per_s", "bytes_per_s"),
    *("percent_of_flops", "percent_of_bandwidth", "speedup", "sets", "cold"),
)


def versions() -> dict[str, str]:
    """Versions of what has a part in the figures."""
    import jax_nvfp4_ops

    found = {"python": platform.python_version(), "jax_nvfp4_ops": jax_nvfp4_ops.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def records(
    group: Group, measurements: Sequence[Measurement], limits: Limits
) -> list[dict[str, Any]]:
    """One record for each rival of a group, as it goes into the JSON file. Times are seconds of one call."""
    ours = next((m for m in measurements if m.rival == OURS and not m.reason), None)
    result = []
    for m in measurements:
        record: dict[str, Any] = {
            "op": group.op,
            "case": group.case.name,
            "variant": group.variant,
            **{axis: getattr(group.case, axis) for axis in ("m", "n", "k")},
            "rival": m.rival,
            "reason": m.reason,
        }
        if not m.reason:
            flops, bandwidth = limits.flops.get(m.limit), limits.bandwidth
            record |= {
                "median_s": m.median,
                "p10_s": m.percentile(10),
                "p90_s": m.percentile(90),
                "seconds": list(m.seconds),
                "flops": group.flops,
                "bytes": m.nbytes,
                "flops_per_s": group.flops / m.median,
                "bytes_per_s": m.nbytes / m.median,
                "percent_of_flops": 100 * group.flops / m.median / flops
                if flops and group.flops
                else None,
                "percent_of_bandwidth": 100 * m.nbytes / m.median / bandwidth
                if bandwidth
                else None,
                "sets": m.sets,
                "cold": m.cold,
                "moved_out_of_loop": list(m.moved),
            }
            if ours and m.rival != OURS:
                # Turn by turn, so that a change of the machine's speed meets both.
                ratios = [theirs / own for theirs, own in zip(m.seconds, ours.seconds, strict=True)]
                record["speedup"] = percentile(ratios, 50)
                record["speedup_p10"] = percentile(ratios, 10)
                record["speedup_p90"] = percentile(ratios, 90)
        result.append(record)
    return result


def write_json(path: str, result: Mapping[str, Any]) -> None:
    """Writes a file of results, whole or not at all."""
    new = pathlib.Path(path + ".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(new, path)


def write_csv(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the records as a table, without the single turns."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, _CSV_FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def duration(seconds: float) -> str:
    """Seconds in the unit that suits, with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{_digits(seconds * scale)} {unit}"
    raise AssertionError


def _digits(x: float) -> str:
    return (
        f"{x:.0f}"
        if x >= 100
        else f"{x:.1f}"
        if x >= 10
        else f"{x:.2f}"
        if x >= 0.1
        else f"{x:.2g}"
    )


def _percent(x: float | None) -> str:
    return "" if x is None else f"{x:.0f} %"


def _speedup(row: Mapping[str, Any]) -> Text:
    ratio = row.get("speedup")
    if ratio is None:
        return Text("")
    # To be slower than a copy is no defeat.
    style = "dim" if row["rival"] == YARDSTICK else "green" if ratio >= 1 else "bold red"
    return Text(f"{ratio:.2f} x", style=style)


def console() -> Console:
    """Standard output; wide where it is no terminal, as nothing wraps there."""
    wide = None if Console().is_terminal or "COLUMNS" in os.environ else 160
    return Console(width=wide, highlight=False)


def table(rows: Sequence[Mapping[str, Any]], *, giga: bool) -> Table:
    """The table of one op and case.

    Args:
      rows: Records of that op and case.
      giga: Whether rates are shown in GFLOP/s and GB/s; else in TFLOP/s and TB/s.
    """
    first = rows[0]
    prefix, scale = ("G", 1e-9) if giga else ("T", 1e-12)
    # What a layer must read and write at least says little of what its three products do.
    rates = [
        (rate, percent, prefix + unit)
        for rate, percent, unit, wanted in (
            ("flops_per_s", "percent_of_flops", "FLOP/s", any(r.get("flops") for r in rows)),
            ("bytes_per_s", "percent_of_bandwidth", "B/s", first["op"] != "linear"),
        )
        if wanted
    ]
    limited = {percent for _, percent, _ in rates if any(r.get(percent) for r in rows)}
    several = len({row["variant"] for row in rows}) > 1
    title = f"{first['op']} {first['case']}"
    if not several and first["variant"]:
        title += f", {first['variant']}"
    shown = Table(
        title=f"{title}: M {first['m']}  N {first['n']}  K {first['k']}", title_justify="left"
    )
    if several:
        shown.add_column("variant")
    shown.add_column("")
    for header in ("time", "p10 - p90"):
        shown.add_column(header, justify="right", no_wrap=True)
    for _, percent, unit in rates:
        shown.add_column(unit, justify="right", no_wrap=True)
        if percent in limited:
            shown.add_column("of limit", justify="right", no_wrap=True)
    shown.add_column(f"speedup of {OURS}", justify="right", no_wrap=True)
    variant = None
    for row in rows:
        if row["reason"]:
            continue
        cells: list[str | Text] = []
        if several:
            if variant not in (None, row["variant"]):
                shown.add_section()
            cells.append(row["variant"] if row["variant"] != variant else "")
            variant = row["variant"]
        cells.append(Text(row["rival"], style="bold" if row["rival"] == OURS else ""))
        cells.append(duration(row["median_s"]))
        cells.append(f"{duration(row['p10_s'])} - {duration(row['p90_s'])}")
        for rate, percent, _ in rates:
            cells.append(_digits(row[rate] * scale))
            if percent in limited:
                cells.append(_percent(row[percent]))
        cells.append(_speedup(row))
        shown.add_row(*cells)
    return shown


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a table does not show: who did not run and why, what ran from the cache."""
    reasons = dict.fromkeys((row["rival"], row["reason"]) for row in rows if row["reason"])
    lines = [f"not run: {rival}: {reason}" for rival, reason in reasons]
    warm = dict.fromkeys(row["rival"] for row in rows if not row["reason"] and not row["cold"])
    if warm:
        lines.append(f"from the cache, as the shape is small: {', '.join(warm)}")
    moved = dict.fromkeys(
        (row["rival"], ", ".join(row["moved_out_of_loop"]))
        for row in rows
        if not row["reason"] and row["moved_out_of_loop"]
    )
    lines += [
        f"not timed, as XLA moved it out of the loop: {rival}: {what}" for rival, what in moved
    ]
    return lines


def sections(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Records in order, one list for each op and case."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["op"], row["case"]), []).append(row)
    yield from found.values()


# ---- Two files ---------------------------------------------------------------------------------------


def read_json(path: str) -> dict[str, Any]:
    """A file that `write_json` wrote.

    Raises:
      ValueError: If it is none.
    """
    try:
        result = json.loads(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"must be a file that `bench --json` wrote; {path}: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        found = result.get("format") if isinstance(result, dict) else None
        raise ValueError(
            f"must be a file that `bench --json` of this version wrote, with format {FORMAT!r}; "
            f"{path} has {found!r}. Measure again"
        )
    return result


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], Table, list[str]]:
    """What differs between two files of results.

    Returns:
      Differences of the circumstances; a table of times, and of times relative to the rivals; what only one file has.
    """
    circumstances = []
    for part in ("device", "settings", "versions"):
        for key in dict.fromkeys([*old[part], *new[part]]):
            before, after = old[part].get(key), new[part].get(key)
            if before != after:
                circumstances.append(f"{part}, {key}: {before} -> {after}")

    def measured(result: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        fields = ("op", "case", "m", "n", "k", "variant", "rival")
        return {tuple(r[f] for f in fields): r for r in result["results"] if not r["reason"]}

    before, after = measured(old), measured(new)
    shown = Table(title="new against old", title_justify="left")
    shown.add_column("")
    for header in ("old", "new", "speedup", "", f"speedup of {OURS}: old", "new"):
        shown.add_column(header, justify="right", no_wrap=True)
    for key, o in before.items():
        if key not in after:
            continue
        n = after[key]
        ratio = o["median_s"] / n["median_s"]
        # The turns of one overlap with those of the other: the difference may be chance.
        overlap = o["p10_s"] <= n["p90_s"] and n["p10_s"] <= o["p90_s"]
        style = "" if overlap else "green" if ratio >= 1 else "bold red"
        vs = [r.get("speedup") for r in (o, n)]
        shown.add_row(
            _name(o),
            duration(o["median_s"]),
            duration(n["median_s"]),
            Text(f"{ratio:.2f} x", style=style),
            "within spread" if overlap else "",
            *("" if r is None else f"{r:.2f} x" for r in vs),
        )
    alone = [f"only in the old file: {_name(before[key])}" for key in before if key not in after]
    alone += [f"only in the new file: {_name(after[key])}" for key in after if key not in before]
    return circumstances, shown, alone


def _name(row: Mapping[str, Any]) -> str:
    name = "/".join(part for part in (row["op"], row["case"], row["variant"]) if part)
    return f"{name}: {row['rival']}"


# ---- A picture ---------------------------------------------------------------------------------------


def plot(path: str, result: Mapping[str, Any]) -> None:
    """Draws a roofline of products, and the traffic of quantizations, to a file.

    Args:
      path: Of a .png, .pdf or .svg.
      result: As it goes into the JSON file.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["results"] if not row["reason"]]
    products = [row for row in rows if row["flops"]]
    streams = [row for row in rows if not row["flops"]]
    panels = [
        (draw, chosen) for draw, chosen in ((_roofline, products), (_traffic, streams)) if chosen
    ]
    figure = Figure(figsize=(8 * max(len(panels), 1), 6), layout="constrained")
    device, found = result["device"], result["versions"]
    figure.suptitle(
        f"{device['kind']}, jax_nvfp4_ops {found['jax_nvfp4_ops']}, jax {found['jax']}, {result['date'][:10]}"
    )
    units = ("G", 1e-9) if device["platform"] == "cpu" else ("T", 1e-12)
    for index, (draw, chosen) in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), index + 1), chosen, result["limits"], *units)
    figure.savefig(path, dpi=120)


def _points(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    rate: str,
    scale: float,
    position: Callable[[Any], float],
    *,
    upright: bool,
) -> None:
    """Rates of each rival, with their 10th and 90th percentiles.

    Args:
      axes: Where to draw.
      rows: Records.
      rate: "flops_per_s" or "bytes_per_s".
      scale: Of the rate.
      position: Where a record lies along the other axis.
      upright: Whether rates go up, else to the right.
    """
    from matplotlib.colors import TABLEAU_COLORS

    colors = list(TABLEAU_COLORS)
    rivals = list(dict.fromkeys(row["rival"] for row in rows))
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["rival"]), []).append(row)
    for (op, rival), chosen in groups.items():
        middle = [row[rate] * scale for row in chosen]
        spread = [
            [
                max(0.0, v - v * row["median_s"] / row["p90_s"])
                for v, row in zip(middle, chosen, strict=True)
            ],
            [
                max(0.0, v * row["median_s"] / row["p10_s"] - v)
                for v, row in zip(middle, chosen, strict=True)
            ],
        ]
        places = [position(row) for row in chosen]
        if not upright:  # rivals beside each other, not on top
            places = [p + 0.2 * (rivals.index(rival) - (len(rivals) - 1) / 2) for p in places]
        axes.errorbar(
            *((places, middle) if upright else (middle, places)),
            **{"yerr" if upright else "xerr": spread},
            fmt="s" if op == "linear" else "o",
            color=colors[rivals.index(rival) % len(colors)],
            label=f"{op}: {rival}",
            capsize=2,
            markersize=5,
        )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def _roofline(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    limits: Mapping[str, Any],
    prefix: str,
    scale: float,
) -> None:
    """Products: FLOP/s against FLOP per byte, under the roofs of the device."""

    def intensity(row: Mapping[str, Any]) -> float:
        return float(row["flops"] / row["bytes"])

    bandwidth = limits["bandwidth"]
    reach = [min(map(intensity, rows)) / 4, max(map(intensity, rows)) * 4]
    roofs = dict(limits["flops"])
    if bandwidth and not roofs:
        roofs["memory"] = bandwidth * reach[1]
    for format_, flops in roofs.items():
        knee = [flops / bandwidth] if bandwidth else []
        points = sorted([*reach, *(k for k in knee if reach[0] < k < reach[1])])
        heights = [min(flops, bandwidth * p if bandwidth else flops) * scale for p in points]
        axes.plot(points, heights, color="0.5", linewidth=1)
        axes.annotate(format_, (points[-1], heights[-1]), ha="right", va="bottom", color="0.4")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of operands and results",
        ylabel=f"{prefix}FLOP/s",
        title="Products",
    )
    _points(axes, rows, "flops_per_s", scale, intensity, upright=True)


def _traffic(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    limits: Mapping[str, Any],
    prefix: str,
    scale: float,
) -> None:
    """Quantization: bytes per second of each variant, a point for each case."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    axes.set_yticks(range(len(variants)), variants)
    axes.invert_yaxis()
    if limits["bandwidth"]:
        axes.axvline(limits["bandwidth"] * scale, color="0.5", linewidth=1)
        axes.annotate(
            "memory ",
            (limits["bandwidth"] * scale, 0.01),
            xycoords=("data", "axes fraction"),
            ha="right",
            color="0.4",
        )
    axes.set(xlabel=f"{prefix}B/s read and written", title="Quantize")
    _points(
        axes, rows, "bytes_per_s", scale, lambda row: variants.index(row["variant"]), upright=False
    )
    axes.set_xlim(left=0)
