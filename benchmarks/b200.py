"""What whole steps cost on a B200, as XLA compiles them: launches, bytes, temporaries, a lower bound of the time.

`python benchmarks/b200.py` needs no GPU and takes about a minute. It compiles a linear layer, a scan over layers and a train
step of a llama for a B200, in the NVIDIA recipe, in bfloat16 and with JAX's own NVFP4
(`jax.nn.scaled_dot_general`), and prints tables for docs/b200.md. tests/b200/ does the work, and
installs JAX's CUDA plugin (about 140 MB) into build/ where it is missing.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import jax
from b200 import audit, programs

TOKENS = 8192
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672))  # K, N
NAMES = {"bf16": "bfloat16", "stock": "scaled_dot_general", "nvfp4": "jax_nvfp4_ops"}


def minimum(m: int, k: int, n: int, backward: bool) -> float:
    """Bytes of separate products with an amax pass for each tensor: bfloat16, codes and scales of 0.5625 bytes."""
    operands = 2 + 2 + 0.5625 + 0.5625  # amax, quantize: read, write; product: read
    if not backward:
        return operands * (m * k + k * n) + 2 * m * n
    return (operands + 2 * 0.5625 + 2) * (m * k + k * n + m * n)  # the other axis, a result


def table(title: str, *columns: str) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")


def row(title: str, *cells: str) -> None:
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def figures(report: audit.Report, unit: float = 1e6) -> str:
    return (
        f"{report.launches} / {report.bytes / unit:.{0 if unit == 1e6 else 2}f} / "
        f"{report.temporaries / 2**20:.0f} / {report.seconds * 1e6:.0f}"
    )


def linear_layers() -> None:
    table(
        f"K, N of {TOKENS} tokens",
        *NAMES.values(),
        "bytes of the last to the minimum",
        "its copies",
    )
    for k, n in SHAPES:
        for program in (programs.forward, programs.forward_backward):
            reports = {
                name: audit.audit(*program(programs.LINEARS[name], TOKENS, k, n)) for name in NAMES
            }
            ours = reports["nvfp4"]
            least = minimum(TOKENS, k, n, program is programs.forward_backward)
            row(
                f"{k}, {n}, {program.__name__.replace('_', ' + ')}",
                *(figures(report) for report in reports.values()),
                f"{ours.bytes / least:.4f}",
                str(len(ours.moves)),
            )


def steps() -> None:
    table("step", *NAMES.values())
    scan = {
        name: audit.audit(
            *programs.scan_step(programs.LINEARS[name], 4, TOKENS, 4096), donate=(0, 1)
        )
        for name in ("bf16", "nvfp4")
    }
    # JAX's function can not be traced inside of a scan with jax.checkpoint (0.10.2, 0.12.0.1).
    row("scan", figures(scan["bf16"], 1e9), "-", figures(scan["nvfp4"], 1e9))
    llama = {
        name: audit.audit(*programs.llama_step(linear), donate=(0, 1, 2))
        for name, linear in programs.LINEARS.items()
    }
    row("llama", *(figures(llama[name], 1e9) for name in NAMES))

    counts = ("amax", "quantize", "matmul")
    table("of jax_nvfp4_ops", *counts, "launches outside of graphs", "donated GB")
    for title, report in (("scan", scan["nvfp4"]), ("llama", llama["nvfp4"])):
        row(
            title,
            *(str(report.calls(f"nvfp4_{op}")) for op in counts),
            str(sum(k.times * k.launches for k in report.outside_graphs)),
            f"{report.aliased / 1e9:.3f}",
        )


def compile_times(runs: int) -> None:
    """Of the llama; rivals take turns."""
    seconds: dict[str, list[float]] = {"bf16": [], "nvfp4": []}
    for _ in range(runs):
        for name, times in seconds.items():
            jax.clear_caches()
            step = programs.llama_step(programs.LINEARS[name])
            times.append(audit.audit(*step, donate=(0, 1, 2)).compile_seconds)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    table("trace, lower and compile the llama", "bfloat16, s", "jax_nvfp4_ops, s", "ratio")
    row(
        f"median of {runs}",
        *(f"{median[name]:.2f}" for name in seconds),
        f"{median['nvfp4'] / median['bf16']:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="of each compilation that is timed")
    runs = parser.parse_args().runs
    print(f"jax {jax.__version__}; launches / MB (steps: GB) / MiB of temporaries / us at least")
    linear_layers()
    steps()
    compile_times(runs)


if __name__ == "__main__":
    main()
