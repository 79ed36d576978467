"""Trains a byte-level GPT twice, with NVFP4 linears and without, on Python's own standard library, and compares.

    python examples/train_gpt.py [--size small] [--steps 250] [--recipe nvidia] [--seed 0] [--mesh data=4,model=2]

Both models start from the same weights and see the same bytes. Every linear layer of a block computes in NVFP4, forward and
backward; embeddings, norms, output head and attention products stay in float32. A checkpoint is written now and then, and on
Ctrl-C; the same command goes on from there, to the same bits as a run that was not interrupted, and with another --mesh from the
same bits. What a mesh needs is SPECS, `on_mesh` and the places of the arrays in `main`: the ops find their shards by themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
import math
import os
import pathlib
import signal
import sys
import sysconfig
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY = 256  # bytes
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Dimensions of a model and of its batches."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=64, batch=8),
    "small": Size(layers=4, width=256, heads=4, context=128, batch=8),
    "medium": Size(layers=6, width=384, heads=6, context=256, batch=16),
}

# ---- data


def read_corpus(minimum: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's sources in the order of their names: training, and every tenth file for validation."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    # Names below the folder: where the folder itself lies must not matter.
    names = sorted(p.relative_to(folder) for p in folder.rglob("*.py"))
    others = {"site-packages", "dist-packages", "test"}
    files = [folder / name for name in names if others.isdisjoint(name.parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        parts[i % 10 == 9].append(path.read_bytes())
    train, validation = (np.frombuffer(b"".join(p), np.uint8) for p in parts)
    for name, data in (("training", train), ("validation", validation)):
        if data.size < minimum:
            sys.exit(
                f"train_gpt: the standard library at {folder} must have {minimum} bytes for {name}; got {data.size}."
            )
    return train, validation


def batch_at(data: np.ndarray, size: Size, seed: int, step: int) -> np.ndarray:
    """int32[batch, context + 1]: a batch that depends on seed and step only."""
    starts = np.random.default_rng((seed, step)).integers(0, data.size - size.context, size.batch)
    return np.stack([data[s : s + size.context + 1] for s in starts]).astype(np.int32)


# ---- devices

# FSDP over "data", tensor parallel over "model": by columns what begins a branch of a block, by rows what ends it.
SPECS = {
    "embedding": P(None, "data"),
    "qkv": P("data", "model"),
    "out": P("model", "data"),
    "up": P("data", "model"),
    "down": P("model", "data"),
    "head": P("data", "model"),
}  # norms are whole everywhere


def make_mesh(axes: dict[str, int], size: Size) -> Mesh:
    """The devices of all processes, or as many as the mesh has."""
    for name, what, whole in (
        ("data", "batch", size.batch),
        ("data", "width", size.width),
        ("model", "number of heads", size.heads),
        ("model", "vocabulary", VOCABULARY),
    ):
        if whole % axes[name]:
            sys.exit(f"train_gpt: --mesh {name} must divide the {what}, {whole}; got {axes[name]}.")
    devices, processes, count = jax.devices(), jax.process_count(), math.prod(axes.values())
    if count > len(devices) or (processes > 1 and count != len(devices)):
        sys.exit(
            f"train_gpt: --mesh must have {'up to' if processes == 1 else 'all of'} the {len(devices)} devices that there are; "
            f"got {count}. CPUs: set JAX_NUM_CPU_DEVICES={math.ceil(count / processes)}."
        )
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices[:count])


def places(mesh: Mesh, tree: Any) -> Any:
    """The sharding of each array of a tree of parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, SPECS.get(path[-1].key, P())), tree
    )


def put(tree: Any, shardings: Any) -> Any:
    """Arrays that each process has whole, on the devices; `jax.device_put` would compare the processes' copies first."""
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), tree, shardings
    )


def on_mesh(x: jax.Array, *axes: str | None) -> jax.Array:
    """x with its first axes sharded like this, and whole in the others."""
    return jax.lax.with_sharding_constraint(x, P(*axes))


def of_all_processes(*values: int) -> np.ndarray:
    """u32[processes, values]: for decisions, which all have to take alike, or one waits for the others forever."""
    values = np.array(values, np.uint32)
    return multihost_utils.process_allgather(values).reshape(-1, len(values))


# ---- model

Linear = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # x[..., K], w[K, N], key


def linear_layers(kind: str) -> Linear:
    """The linear layer of a model: a recipe's name, "f32" or "bf16"."""
    if kind in nvfp4.recipes.PRESETS:
        recipe = nvfp4.recipes.PRESETS[kind]

        def linear(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
            return nvfp4.dot_general(
                x, w, (((x.ndim - 1,), (0,)), ((), ())), recipe=recipe, key=key
            )

        return linear
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[kind]
    return lambda x, w, key: jnp.dot(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)


def init_params(size: Size, key: jax.Array) -> Params:
    d, n = size.width, size.layers
    keys = iter(jax.random.split(key, 2 + 4 * n))

    def normal(shape: tuple[int, ...], scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal((VOCABULARY, d), 0.7),  # as large as what the blocks add, or it drowns
        "head": normal((d, VOCABULARY), d**-0.5),
        "norm": jnp.ones(d),
        "layers": [
            {
                "qkv": normal((d, 3 * d), d**-0.5),
                "out": normal((d, d), (2 * n * d) ** -0.5),
                "up": normal((d, 4 * d), d**-0.5),
                "down": normal((4 * d, d), (8 * n * d) ** -0.5),
                "norm1": jnp.ones(d),
                "norm2": jnp.ones(d),
            }
            for _ in range(n)
        ],
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: pairs of channels of x[B, T, heads, width], each turned by the token's position."""
    half = x.shape[-1] // 2
    speed = 1000.0 ** (-np.arange(half) / half)
    angle = np.outer(np.arange(x.shape[1]), speed)[:, None].astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return jnp.concatenate(turned, -1)


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention in float32; qkv[B, T, 3 * width]."""
    b, t, _ = qkv.shape
    # A device has some of the heads; its columns of qkv are other ones.
    parts = (x.reshape(b, t, heads, -1) for x in jnp.split(on_mesh(qkv, "data"), 3, -1))
    q, k, v = (on_mesh(x, "data", None, "model") for x in parts)
    q, k = rotate(q), rotate(k)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tril(np.ones((t, t), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(b, t, -1)


def forward(
    params: Params,
    tokens: jax.Array,
    key: jax.Array,
    linear: Linear,
    size: Size,
    probe: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Logits[B, T, 256]; and the input of the last block's first MLP layer, to whose result `probe` is added."""
    x = on_mesh(params["embedding"][tokens], "data")
    for i, p in enumerate(params["layers"]):
        keys = jax.random.split(jax.random.fold_in(key, i), 4)
        h = attention(linear(rms_norm(x, p["norm1"]), p["qkv"], keys[0]), size.heads)
        x = on_mesh(x + linear(h, p["out"], keys[1]), "data")
        watched = rms_norm(x, p["norm2"])
        h = linear(watched, p["up"], keys[2])
        if probe is not None and i == size.layers - 1:
            h = h + probe
        x = on_mesh(x + linear(jax.nn.gelu(h), p["down"], keys[3]), "data")
    return rms_norm(x, params["norm"]) @ params["head"], watched


def loss_of(
    params: Params, batch: jax.Array, key: jax.Array, linear: Linear, size: Size, probe: Any = None
) -> tuple:
    logits, watched = forward(params, batch[:, :-1], key, linear, size, probe)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, batch[:, 1:, None], -1)), watched


# ---- training


def learning_rate(step: jax.Array, steps: int) -> jax.Array:
    warmup = max(1, steps // 20)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((step - warmup) / max(1, steps - warmup), 0, 1)))
    return 2e-3 * jnp.where(step < warmup, (step + 1) / warmup, 0.1 + 0.9 * cosine)


def make_step(linear: Linear, size: Size, steps: int, seed: int, place: tuple) -> Callable:
    """One step of AdamW; state is (params, first moments, second moments), and `place` its shardings."""

    def train_step(state: tuple, batch: jax.Array, step: jax.Array) -> tuple:
        params, m, v = state
        key = jax.random.fold_in(jax.random.key(seed), step)
        (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, batch, key, linear, size
        )
        norm = jnp.sqrt(sum(jnp.tensordot(g, g, g.ndim) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, grads)
        rate, t = learning_rate(step, steps), step + 1

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            decay = 0.1 * p if p.ndim == 2 else 0.0
            return p - rate * (m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay)

        return (jax.tree.map(update, params, m, v), m, v), loss

    return jax.jit(train_step, donate_argnums=0, out_shardings=(place, None))


def make_underflow(recipe: nvfp4.Recipe, linear: Linear, size: Size, seed: int) -> Callable:
    """Shares of x, w and g of the last block's first MLP layer that are not 0 but become 0 in NVFP4.

    Each is quantized as the recipe says for its first product: x and w for y, g for dx.
    """

    def lost(x: jax.Array, to: nvfp4.Format, key: jax.Array) -> jax.Array:
        x = x.reshape(-1, x.shape[-1])
        q = nvfp4.quantize(
            x, block=to.block, rounding=to.rounding, key=key if to.rounding == "sr" else None
        )
        zero = q.as_f4().astype(jnp.float32) == 0
        return jnp.sum(zero & (x != 0)) / jnp.maximum(1, jnp.sum(x != 0))

    def underflow(params: Params, batch: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        probe = jnp.zeros((size.batch, size.context, 4 * size.width))
        g, x = jax.grad(loss_of, argnums=5, has_aux=True)(params, batch, key, linear, size, probe)
        w = params["layers"][-1]["up"].T
        g_lost = lost(g, recipe.g_dgrad, key) if recipe.backward == "nvfp4" else jnp.float32(0)
        return jnp.stack([lost(x, recipe.x_fprop, key), lost(w, recipe.w_fprop, key), g_lost])

    return jax.jit(underflow)


# ---- files


def write_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """The file is whole, old or new, whatever happens. Of several processes the first one writes."""
    if jax.process_index():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclasses.dataclass
class Run:
    """What a checkpoint holds: the settings, the step, both models, the history, and the seconds of each step."""

    settings: dict[str, Any]
    step: int
    states: dict[str, tuple]
    history: dict[str, list]
    seconds: dict[str, list[float]]

    def save(self, path: pathlib.Path) -> None:
        leaves = {
            f"{name}/{i}": multihost_utils.process_allgather(x, tiled=True)
            for name, s in self.states.items()
            for i, x in enumerate(jax.tree.leaves(s))
        }
        meta = json.dumps(
            {
                "settings": self.settings,
                "step": self.step,
                "history": self.history,
                "seconds": self.seconds,
            }
        )
        write_atomically(path, lambda p: np.savez(p, meta=np.array(meta), **leaves))

    def load(self, path: pathlib.Path) -> None:
        """Replaces everything by what the file holds, if that is the same experiment."""
        try:
            with path.open("rb") as opened, np.load(opened) as file:
                meta = json.loads(str(file["meta"]))
                leaves = {k: file[k] for k in file.files if k != "meta"}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            sys.exit(
                f"train_gpt: {path} must be a checkpoint of this program; got {error!r}. Pass --restart, or another --out."
            )
        if meta["settings"] != self.settings:
            different = [k for k in self.settings if meta["settings"].get(k) != self.settings[k]]
            sys.exit(
                f"train_gpt: {path} is of a run with other settings ({', '.join(different)}). "
                "Pass those again to go on with it, --restart to overwrite it, or another --out."
            )
        self.step, self.history, self.seconds = meta["step"], meta["history"], meta["seconds"]
        for name, state in self.states.items():
            shardings, structure = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, state))
            arrays = [leaves[f"{name}/{i}"] for i in range(structure.num_leaves)]
            self.states[name] = jax.tree.unflatten(structure, put(arrays, shardings))


def smooth(values: list[float], width: int) -> np.ndarray:
    """Mean of the last `width` values at each point."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    first = np.maximum(np.arange(len(values)) + 1 - width, 0)
    return (total[1:] - total[first]) / (np.arange(len(values)) + 1 - first)


def plot(run: Run, names: tuple[str, str], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    baseline, quantized = names
    history = run.history
    width = max(1, run.settings["steps"] // 20)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name in names:
        axes[0].plot(smooth(history[name], width), label=name)
    axes[0].set(title=f"training loss, mean of {width} steps", xlabel="step", ylabel="nats a byte")
    axes[0].legend()
    axes[1].plot(smooth(np.subtract(history[quantized], history[baseline]).tolist(), width))
    axes[1].axhline(0, color="gray", linewidth=0.8)
    axes[1].set(title=f"gap, {quantized} - {baseline}", xlabel="step", ylabel="nats a byte")
    for i, tensor in enumerate(("x", "w", "g")):
        axes[2].plot(
            history["underflow_steps"], [100 * u[i] for u in history["underflow"]], label=tensor
        )
    axes[2].set(
        title="not 0, but 0 in NVFP4 (last block, MLP)",
        xlabel="step",
        ylabel="% of the values",
        ylim=(0, None),
    )
    axes[2].legend()
    write_atomically(path, lambda p: figure.savefig(p, dpi=110))
    pyplot.close(figure)


# ---- what a person sees


class Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, total: int, first: int) -> None:
        self.total, self.first, self.start = total, first, time.perf_counter()
        self.terminal = sys.stdout.isatty()

    def show(self, done: int, text: str) -> None:
        elapsed = time.perf_counter() - self.start
        left = elapsed / max(1, done - self.first) * (self.total - done)
        if self.terminal:
            filled = 30 * done // self.total
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{self.total}  {text}  {left:4.0f} s left ",
                end="",
                flush=True,
            )
        elif done == self.total or done % max(1, self.total // 10) == 0:
            print(
                f"step {done}/{self.total}  {text}  {elapsed:.0f} s, {left:.0f} s left", flush=True
            )

    def end(self) -> None:
        if self.terminal:
            print()


def sample(params: Params, linear: Linear, size: Size, seed: int, prompt: bytes, count: int) -> str:
    """`count` bytes that the model writes after the prompt, at temperature 0.7."""

    @jax.jit
    def next_byte(
        params: Params, window: jax.Array, length: jax.Array, key: jax.Array
    ) -> jax.Array:
        logits, _ = forward(params, window[None], key, linear, size)
        return jax.random.categorical(key, logits[0, length - 1] / 0.7)

    text = list(prompt)
    for i in range(count):
        tail = text[-size.context :]
        window = np.zeros(size.context, np.int32)
        window[: len(tail)] = tail
        key = jax.random.fold_in(jax.random.key(seed), i)
        text.append(int(next_byte(params, window, len(tail), key)))
    return bytes(text).decode("utf-8", "replace")


def table(
    run: Run,
    names: tuple[str, str],
    size: Size,
    validation: dict[str, float],
) -> str:
    baseline, quantized = names
    last = min(100, len(run.history[baseline]))
    count = sum(x.size for x in jax.tree.leaves(run.states[baseline][0]))
    loss = {name: float(np.mean(run.history[name][-last:])) for name in names}
    lines = [
        f"{count / 1e6:.2f}M parameters, {run.step} steps of {size.batch * size.context} bytes, "
        f"{run.step * size.batch * size.context:,} in all",
        f"{'':28} {baseline:>10} {quantized:>14} {'gap':>18}",
    ]
    for label, values in (
        (f"training loss, last {last} steps", loss),
        ("validation loss", validation),
    ):
        gap = values[quantized] - values[baseline]
        lines.append(
            f"{label:28} {values[baseline]:10.4f} {values[quantized]:14.4f} {gap:+9.4f} "
            f"({100 * gap / values[baseline]:+.2f} %)"
        )
    if run.step > 2:  # the first steps compile
        seconds = {name: float(np.median(run.seconds[name][2:])) for name in names}
        ratio = seconds[baseline] / seconds[quantized]
        lines.append(
            f"{'time a step, median':28} {1e3 * seconds[baseline]:7.0f} ms "
            f"{1e3 * seconds[quantized]:11.0f} ms {ratio:10.2f}x as fast"
        )
    return "\n".join(lines)


def parse_mesh(text: str) -> dict[str, int]:
    axes = {"data": 1, "model": 1}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if name not in axes or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"must be like data=4,model=2; got {text!r}")
        axes[name] = int(count)
    return axes


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--recipe", choices=nvfp4.recipes.PRESETS, default="nvidia")
    parser.add_argument(
        "--baseline",
        choices=["f32", "bf16"],
        default="f32",
        help="what the linears of the other model compute in",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="sequences a step (default: of the size)")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("runs/train_gpt"),
        help="folder for checkpoint, plot, table",
    )
    parser.add_argument(
        "--restart", action="store_true", help="start anew even if --out has a checkpoint"
    )
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        default="data=1,model=1",
        help="devices by axes: data=4,model=2 (default: one device)",
    )
    parser.add_argument("--coordinator", help="host:port of process 0, where there are several")
    parser.add_argument("--processes", type=int, default=1, help="how many there are")
    parser.add_argument("--process", type=int, default=0, help="which of them this is, from 0")
    args = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("batch", 1), ("seed", 0), ("processes", 1), ("process", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"argument --{name}: must be at least {least}; got {value}")
    if args.process >= args.processes:
        parser.error(
            f"argument --process: must be less than --processes {args.processes}; got {args.process}"
        )
    if args.processes > 1 and args.coordinator is None:
        parser.error(
            "argument --coordinator: must be given with --processes; got none. Pass host:port of process 0"
        )
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.coordinator is not None:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
        if args.process:
            sys.stdout = io.StringIO()  # the first process speaks for all
    size = SIZES[args.size]
    if args.batch is not None:
        size = dataclasses.replace(size, batch=args.batch)
    names = (args.baseline, args.recipe)
    if importlib.util.find_spec("matplotlib") is None:  # better now than after the training
        sys.exit(
            "train_gpt: matplotlib must be installed, for the plot; pip install matplotlib, "
            "or run python3 tools/dev.py demo."
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"train_gpt: --out must be a folder that can be written to; got {error}.")
    checkpoint = args.out / "checkpoint.npz"
    train, held_out = read_corpus(100 * size.context)
    settings = {
        **dataclasses.asdict(size), "steps": args.steps, "recipe": args.recipe, "baseline": args.baseline, "seed": args.seed,
        "corpus": zlib.crc32(train),  # another Python has another library
    }  # fmt: skip

    mesh = make_mesh(args.mesh, size)
    params = jax.device_get(init_params(size, jax.random.key(args.seed)))  # each process has all
    place = (places(mesh, params),) * 3

    def fresh_state() -> tuple:
        zeros = jax.tree.map(np.zeros_like, params)
        return put((params, zeros, zeros), place)

    def place_batch(batch: np.ndarray) -> jax.Array:
        return put(batch, NamedSharding(mesh, P("data")))

    linears = {name: linear_layers(name) for name in names}
    history: dict[str, list] = {
        **{name: [] for name in names},
        "underflow_steps": [],
        "underflow": [],
    }
    states = {name: fresh_state() for name in names}
    run = Run(settings, 0, states, history, {name: [] for name in names})
    if checkpoint.exists() and not args.restart:
        run.load(checkpoint)
        print(f"goes on with {checkpoint} at step {run.step}")
    options = zlib.crc32(json.dumps([settings, args.mesh]).encode())
    started = of_all_processes(run.step, options)
    if (started != started[0]).any():
        sys.exit(
            f"train_gpt: all processes must have the same options, Python and files in --out; got steps "
            f"{started[:, 0].tolist()} and checksums of options {started[:, 1].tolist()}."
        )
    print(
        f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2f}M parameters "
        f"on {train.size / 1e6:.1f} MB of the standard library: "
        f"{args.baseline} against NVFP4, recipe {args.recipe}"
        + (f", on {mesh.size} devices" if mesh.size > 1 else "")
    )

    steps = {name: make_step(linears[name], size, args.steps, args.seed, place) for name in names}
    recipe = nvfp4.recipes.PRESETS[args.recipe]
    underflow = make_underflow(recipe, linears[args.recipe], size, args.seed)
    stop: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def ask_to_stop(number: int, frame: Any) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C does not wait

    signal.signal(signal.SIGINT, ask_to_stop)
    progress = Progress(args.steps, run.step)
    saved = time.perf_counter()
    stats_every = max(1, args.steps // 25)
    try:
        with jax.set_mesh(mesh):
            while run.step < args.steps:
                late = time.perf_counter() - saved > 30
                stopped, late = of_all_processes(bool(stop), late).any(0)
                if stopped:
                    break
                if late:
                    run.save(checkpoint)
                    saved = time.perf_counter()
                batch = place_batch(batch_at(train, size, args.seed, run.step))
                if run.step % stats_every == 0:
                    shares = underflow(run.states[args.recipe][0], batch, run.step)
                    run.history["underflow"].append(np.asarray(shares).tolist())
                    run.history["underflow_steps"].append(run.step)
                for name in names:
                    start = time.perf_counter()
                    run.states[name], loss = steps[name](run.states[name], batch, run.step)
                    run.history[name].append(float(loss))
                    run.seconds[name].append(time.perf_counter() - start)
                run.step += 1
                losses = [run.history[name][-1] for name in names]
                progress.show(run.step, f"{names[0]} {losses[0]:.3f}  {names[1]} {losses[1]:.3f}")
                if not np.isfinite(losses).all():
                    sys.exit(
                        f"\ntrain_gpt: the loss is no longer finite at step {run.step}: "
                        f"{dict(zip(names, losses, strict=True))}."
                    )
    finally:
        signal.signal(signal.SIGINT, before)
        progress.end()
    run.save(checkpoint)
    plot(run, names, args.out / "loss.png")
    if run.step < args.steps:
        print(
            f"interrupted at step {run.step}: {checkpoint} and {args.out / 'loss.png'} are written; the same command goes on."
        )
        return 130

    evaluate = {
        name: jax.jit(lambda p, b, f=linears[name]: loss_of(p, b, jax.random.key(0), f, size)[0])
        for name in names
    }
    batches = [place_batch(batch_at(held_out, size, 1 << 32, i)) for i in range(16)]
    with jax.set_mesh(mesh):
        validation = {
            name: float(np.mean([evaluate[name](run.states[name][0], b) for b in batches]))
            for name in names
        }
    text = table(run, names, size, validation)
    write_atomically(args.out / "table.txt", lambda p: p.write_text(text + "\n"))
    print(f"\n{text}\n\nplot: {args.out / 'loss.png'}\n\nThe NVFP4 model writes:\n")
    # One sequence is no batch for a mesh: on one device.
    params = multihost_utils.process_allgather(run.states[args.recipe][0], tiled=True)
    one = jax.make_mesh((1, 1), mesh.axis_names, mesh.axis_types, devices=jax.local_devices()[:1])
    with jax.set_mesh(one):
        print(sample(params, linears[args.recipe], size, args.seed, b"def ", 300))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ntrain_gpt: interrupted; the same command goes on from the last checkpoint.")
