"""What devices send to each other for a layer of a Llama-70B on 8, 64 and 512 B200s, as XLA compiles it, without one.

`python benchmarks/scaling.py` needs no GPU and takes about three minutes. It compiles a layer forward and backward in the
recipe NVIDIA, in bfloat16 and in FP8, with its weights divided over all devices (FSDP) and over groups of 8 in tensor
parallelism (FSDP x TP), counts collectives, and prints tables for docs/sharding.md. tests/b200/ does the work, and installs JAX's
CUDA plugin (about 140 MB) into build/ where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

import jax
from b200 import collectives, plugin, sharded

DEVICES = (8, 64, 512)
LAYOUTS = {"FSDP": sharded.fsdp, "FSDP x TP": sharded.fsdp_tp}
NAMES = {"bf16": "bfloat16", "fp8": "FP8", "nvfp4": "NVFP4"}
COLUMNS = (*collectives.PURPOSES, "all")


def measure(
    name: str, layout_name: str, devices: int, partial_sums: str, tokens: int
) -> dict[str, Any]:
    """Collectives, and MB that a device receives, by purpose."""
    layout = LAYOUTS[layout_name](devices)
    step, *arguments = sharded.layer_step(
        layout, sharded.LINEARS[name](layout, partial_sums), tokens
    )
    found = collectives.compiled(step, *arguments, mesh=layout.mesh)
    row: dict[str, Any] = {
        "devices": devices,
        "layout": layout_name,
        "mesh": dict(layout.mesh.shape),
        "partial_sums": partial_sums,
        "name": name,
    }
    for column in COLUMNS:
        mine = [c for c in found if column in ("all", c.purpose(layout.model))]
        row[column] = {
            "collectives": sum(c.times for c in mine),
            "MB": round(sum(c.times * c.bytes for c in mine) / 1e6, 4),
        }
    return row


def table(partial_sums: str, devices: list[int], tokens: int) -> list[dict[str, Any]]:
    """Prints the table of one type of partial sums, and returns its rows."""
    print(f"\nPartial sums in {partial_sums}:\n")
    columns = ["devices", "layout", "", *COLUMNS, "all, of bfloat16's"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    rows = []
    for count in devices:
        for layout in LAYOUTS:
            base = None
            for name in NAMES:
                row = measure(name, layout, count, partial_sums, tokens)
                base = base or row["all"]["MB"]
                cells = [f"{row[c]['collectives']} / {row[c]['MB']:.1f}" for c in COLUMNS]
                cells.append(f"{row['all']['MB'] / base:.2f}")
                print(f"| {count} | {layout} | {NAMES[name]} | {' | '.join(cells)} |", flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument(
        "--tokens", type=int, default=sharded.TOKENS, help="of each part of the batch"
    )
    parser.add_argument("--json", type=pathlib.Path, help="a file for the same figures")
    options = parser.parse_args()
    if bad := [n for n in options.devices if n < 8 or n % 8]:
        parser.error(f"--devices: must be multiples of 8, the devices of a host; got {bad}")
    plugin.load()
    print(
        f"jax {jax.__version__}; {options.tokens} tokens of each part of the batch; collectives / MB that a device receives"
    )
    rows = []
    for partial_sums in ("float32", "bfloat16"):
        rows += table(partial_sums, options.devices, options.tokens)
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
