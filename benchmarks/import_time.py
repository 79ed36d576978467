"""Time that `import jax_nvfp4_ops` takes beyond `import jax`: median of a few fresh processes.

Usage: python benchmarks/import_time.py [--runs 7]

Python's own `-X importtime` measures it. JAX's modules that only this package loads count as ours.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys

BAR_MS = 50
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")


def measure() -> tuple[float, dict[str, float]]:
    """Total, and the own time of each module loaded after jax, in ms."""
    command = [sys.executable, "-X", "importtime", "-c", "import jax; import jax_nvfp4_ops"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    log = done.stderr
    rows = [match.groups() for match in map(LINE.match, log.splitlines()) if match]
    after_jax = rows[1 + [name for *_, name in rows].index("jax") :]
    total = next(int(all_us) / 1e3 for _, all_us, _, name in after_jax if name == "jax_nvfp4_ops")
    return total, {name: int(own_us) / 1e3 for own_us, _, _, name in after_jax}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    count = parser.parse_args().runs
    measure()  # compiles to bytecode, which an installed package has
    runs = [measure() for _ in range(count)]
    total = statistics.median(total for total, _ in runs)
    print(f"import jax_nvfp4_ops, beyond jax: {total:.1f} ms (bar: {BAR_MS} ms)")
    names = dict.fromkeys(name for _, modules in runs for name in modules)
    times = {n: statistics.median(modules.get(n, 0.0) for _, modules in runs) for n in names}
    for name, time in sorted(times.items(), key=lambda item: -item[1])[:8]:
        print(f"  {time:6.1f} ms  {name}")


if __name__ == "__main__":
    main()
