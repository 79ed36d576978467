"""Ratios of the CPU backend to XLA's own code, measured side by side in one run.

    python benchmarks/cpu.py [matmul] [quantize] [linear] [--repeats 7] [--json FILE]

Rivals take turns within each repeat, so that a change of the machine's speed meets all of them; a figure is the median over
repeats. Compare ratios, and only within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
from jax_nvfp4_ops.bench import rivals

# M, N, K, and the least ratio that we accept.
MATMULS = {
    "2048 x 2048 x 2048": (2048, 2048, 2048, 2.0),
    "1024 x 4096 x 4096": (1024, 4096, 4096, 2.0),
    "128 x 768 x 768": (128, 768, 768, None),
    "32 x 4096 x 4096": (32, 4096, 4096, None),
    "1 x 4096 x 4096": (1, 4096, 4096, 4.0),
}

# Those of the command `bench`, but for a few that are much like others.
QUANTIZES = {
    name: options
    for name, options in rivals.QUANTIZES.items()
    if name not in ("columns", "rows, float16", "rows, amax included")
}


def measure(turns: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, float]:
    """Median seconds a call of each, in turns; short calls are repeated to some 30 ms."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    calls = {}
    for name, f in turns.items():
        jax.block_until_ready(f())
        start = time.perf_counter()
        jax.block_until_ready(f())
        calls[name] = max(1, round(0.03 / (time.perf_counter() - start)))
    for _ in range(repeats):
        for name, f in turns.items():
            time.sleep(0.01)
            jax.block_until_ready(f())
            start = time.perf_counter()
            for _ in range(calls[name]):
                y = f()
            jax.block_until_ready(y)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(t) for name, t in times.items()}


def bench_matmul(repeats: int) -> list[dict]:
    rows = []
    dot = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    ours = jax.jit(lambda x, w: nvfp4.matmul(x, w, out_dtype=jnp.float32))
    for name, (m, n, k, bar) in MATMULS.items():
        x = jax.random.normal(jax.random.key(0), (m, k))
        w = jax.random.normal(jax.random.key(1), (n, k))
        qx, qw = nvfp4.quantize(x), nvfp4.quantize(w)
        seconds = measure({"ours": partial(ours, qx, qw), "rival": partial(dot, x, w)}, repeats)
        rows.append(
            row(
                f"matmul {name}",
                "XLA float32 dot",
                seconds,
                bar,
                f"{m * n * k / seconds['ours'] * 1e-9:.0f} GMAC/s",
            )
        )
    return rows


def bench_quantize(repeats: int) -> list[dict]:
    """The op itself, with the amax given; on 4096 x 4096."""
    rows = []
    key = jax.random.key(0, impl="rbg")  # the faster of JAX's generators
    for name, options in QUANTIZES.items():
        options = dict(options)
        x = jax.random.normal(jax.random.key(1), (4096, 4096), options.pop("dtype", jnp.bfloat16))
        if options.get("rounding") == "sr":
            options["key"] = key
        amax = jnp.float32(6)
        ours = jax.jit(lambda x, a, o=options: nvfp4.quantize(x, amax=a, **o))
        theirs = jax.jit(lambda x, a, o=options: rivals.jnp_quantize(x, amax=a, **o))
        seconds = measure(
            {"ours": partial(ours, x, amax), "rival": partial(theirs, x, amax)},
            max(3, repeats // 2),
        )
        note = f"{x.nbytes / seconds['ours'] * 1e-9:.1f} GB/s in"
        rows.append(row(f"quantize {name}", "jnp under jit", seconds, 15.0, note))
    return rows


def bench_linear(repeats: int) -> list[dict]:
    t, k, n = 1024, 4096, 4096
    x, w, g = (
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((t, k), (k, n), (t, n)))
    )
    key = jax.random.key(3)

    def step(f):
        def run(x, w, g):
            y, vjp = jax.vjp(f, x, w)
            return y, vjp(g)

        return jax.jit(run)

    ours = step(lambda x, w: nvfp4.matmul(x, w, key=key))
    theirs = step(jnp.dot)
    seconds = measure({"ours": lambda: ours(x, w, g), "rival": lambda: theirs(x, w, g)}, repeats)
    return [
        row(
            f"Linear {t} x {k} x {n}, forward + backward",
            "the same in float32",
            seconds,
            1.0,
            "NVIDIA recipe",
        )
    ]


def row(name: str, rival: str, seconds: dict[str, float], bar: float | None, note: str) -> dict:
    return {
        "case": name,
        "rival": rival,
        "ours_ms": seconds["ours"] * 1e3,
        "rival_ms": seconds["rival"] * 1e3,
        "ratio": seconds["rival"] / seconds["ours"],
        "bar": bar,
        "note": note,
    }


BENCHES = {"matmul": bench_matmul, "quantize": bench_quantize, "linear": bench_linear}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", choices=[*BENCHES, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, instruction set {nvfp4.instruction_sets()[0]}")
    print(f"{'case':46} {'ours':>10} {'rival':>10} {'ratio':>7} {'bar':>5}  rival; note")
    rows = []
    for name in args.which or BENCHES:
        for r in BENCHES[name](args.repeats):
            rows.append(r)
            bar = "" if r["bar"] is None else f"{r['bar']:.0f}x"
            below = "" if r["bar"] is None or r["ratio"] >= r["bar"] else "  BELOW THE BAR"
            print(
                f"{r['case']:46} {r['ours_ms']:7.2f} ms {r['rival_ms']:7.2f} ms {r['ratio']:6.2f}x {bar:>5}  "
                f"{r['rival']}; {r['note']}{below}",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=2)


if __name__ == "__main__":
    main()
