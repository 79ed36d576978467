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

# M, N, K, and the least ratio that we accept.
MATMULS = {
    "2048 x 2048 x 2048": (2048, 2048, 2048, 2.0),
    "1024 x 4096 x 4096": (1024, 4096, 4096, 2.0),
    "128 x 768 x 768": (128, 768, 768, None),
    "32 x 4096 x 4096": (32, 4096, 4096, None),
    "1 x 4096 x 4096": (1, 4096, 4096, 4.0),
}

QUANTIZES = {
    "rows": {"axis": -1},
    "rows, float32": {"axis": -1, "dtype": jnp.float32},
    "rows + columns": {"axis": (-1, -2)},
    "rows + columns, 16x16": {"axis": (-1, -2), "block": "16x16"},
    "rows, SR": {"axis": -1, "rounding": "sr"},
    "rows, Hadamard": {"axis": -1, "hadamard": True},
    "rows + columns Hadamard": {"axis": (-1, -2), "hadamard": (False, True)},
    "rows SR + columns SR Hadamard": {
        "axis": (-1, -2),
        "rounding": "sr",
        "hadamard": (False, True),
    },
}


def measure(rivals: dict[str, Callable[[], jax.Array]], repeats: int) -> dict[str, float]:
    """Median seconds a call of each, in turns; short calls are repeated to some 30 ms."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    calls = {}
    for name, f in rivals.items():
        jax.block_until_ready(f())
        start = time.perf_counter()
        jax.block_until_ready(f())
        calls[name] = max(1, round(0.03 / (time.perf_counter() - start)))
    for _ in range(repeats):
        for name, f in rivals.items():
            time.sleep(0.01)
            jax.block_until_ready(f())
            start = time.perf_counter()
            for _ in range(calls[name]):
                y = f()
            jax.block_until_ready(y)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(t) for name, t in times.items()}


def jnp_quantize(x, *, axis, block="1x16", rounding="rne", hadamard=False, key=None, amax):
    """What a user of jnp would write for the same codes and scales (random bits of jax.random)."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    hadamards = hadamard if isinstance(hadamard, tuple) else (hadamard,) * len(axes)
    h = jnp.ones((1, 1))
    while h.shape[0] < 16:
        h = jnp.block([[h, h], [h, -h]])
    results = []
    for a, had in zip(axes, hadamards, strict=True):
        m = x.astype(jnp.float32)
        m = m.T if a == -2 else m
        m = m.reshape(m.shape[0], -1, 16)
        if had:
            m = (m @ (h / 4)).astype(jnp.bfloat16).astype(jnp.float32)
        encode = 2688 / amax
        block_amax = jnp.max(jnp.abs(m), -1, keepdims=True)
        if block == "16x16":
            tiles = block_amax.reshape(-1, 16, block_amax.shape[1], 1)
            block_amax = jnp.broadcast_to(tiles.max(1, keepdims=True), tiles.shape).reshape(
                block_amax.shape
            )
        scale = jnp.minimum(block_amax * (encode / 6), 448).astype(jnp.float8_e4m3fn)
        y = m * (encode / jnp.maximum(scale.astype(jnp.float32), 2**-9))
        magnitude = jnp.minimum(jnp.abs(y), 6)
        if rounding == "sr":
            step = jnp.where(magnitude >= 4, 2.0, jnp.where(magnitude >= 2, 1.0, 0.5))
            base = jnp.where(magnitude >= 4, 4.0, jnp.where(magnitude >= 2, 2.0, 0.0))
            noise = jax.random.bits(key, m.shape, jnp.uint8).astype(jnp.float32) / 256
            code = (jnp.floor(magnitude / step + noise) + base).astype(jnp.uint8)
        else:
            code = sum(
                (magnitude > t).astype(jnp.uint8) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
            )
        code = code | (jnp.signbit(y).astype(jnp.uint8) << 3)
        packed = code[..., 0::2] | code[..., 1::2] << 4
        results += [
            packed.reshape(m.shape[0], -1),
            jax.lax.bitcast_convert_type(scale[..., 0], jnp.uint8),
            encode,
        ]
    return tuple(results)


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
        theirs = jax.jit(lambda x, a, o=options: jnp_quantize(x, amax=a, **o))
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
