"""Training by several processes and on several meshes: the bits, the random draws and the checkpoints of one."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import pytest
from b200 import audit, plugin
from helpers import assert_same_bits, assert_same_tree, normal
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.slow

DEMO = pathlib.Path(__file__).parent.parent / "examples" / "train_gpt.py"
AXES = ("data", "model")
MESHES = {"8": (4, 2), "8 other": (2, 4), "1": (1, 1)}
STEPS = 3  # of training, before the Ctrl-C


def load_demo():
    """The training program as a module, with a size whose every shard has whole tiles of scales on eight devices."""
    spec = importlib.util.spec_from_file_location("train_gpt", DEMO)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    module.SIZES["tiles"] = module.Size(layers=1, width=512, heads=4, context=64, batch=8)
    return module


def sums(demo, mesh) -> dict[str, np.ndarray]:
    """Of the same numbers over 2, 4 and all 8 devices: what an all-reduce makes of them."""
    results = {}
    for axes in (("model",), ("data",), AXES):
        for dtype in (np.float32, np.int32):
            x = normal((8, 4096), scale=1e3).astype(dtype)
            x = demo.put(x, NamedSharding(mesh, P(AXES)))
            summed = jax.shard_map(
                functools.partial(jax.lax.psum, axis_name=axes),
                mesh=mesh,
                in_specs=P(AXES),
                out_specs=P(tuple(a for a in AXES if a not in axes)),
            )
            name = f"{np.dtype(dtype)} over {'x'.join(axes)}"
            results[name] = multihost_utils.process_allgather(jax.jit(summed)(x), tiled=True)
    return results


# ---- Processes


def train(out: str, port: str, processes: str, process: str, *options: str) -> int:
    """What a process of these tests does: some steps, Ctrl-C in the last process alone, sums."""
    demo = load_demo()
    show = demo.Progress.show

    def show_and_interrupt(self, done, text):
        show(self, done, text)
        if done == STEPS and int(process) == int(processes) - 1:
            os.kill(os.getpid(), signal.SIGINT)

    demo.Progress.show = show_and_interrupt
    code = demo.main(
        [
            *("--size", "tiles", "--steps", "50", "--mesh", "data=4,model=2", "--out", out),
            *("--coordinator", f"127.0.0.1:{port}"),
            *("--processes", processes, "--process", process, *options),
        ]
    )
    results = sums(demo, demo.make_mesh({"data": 4, "model": 2}, demo.SIZES["tiles"]))
    if process == "0":
        np.savez(pathlib.Path(out) / "sums.npz", **results)
    return code


if __name__ == "__main__":
    sys.exit(train(*sys.argv[1:]))


def run_together(folder, commands, expected=0, timeout=300.0, **environment) -> list[str]:
    """What processes print that run at the same time. The first that fails, or the timeout, ends all; that fails the test."""
    children, logs = [], []
    try:
        for i, command in enumerate(commands):
            out, err = (folder / f"{kind}{i}" for kind in ("out", "err"))
            logs.append((out, err))
            with out.open("w") as stdout, err.open("w") as stderr:
                environ = {**os.environ, **environment}
                children.append(
                    subprocess.Popen(
                        [sys.executable, *command], stdout=stdout, stderr=stderr, env=environ
                    )
                )
        end = time.monotonic() + timeout
        while True:
            codes = [child.poll() for child in children]
            failed = any(code not in (None, expected) for code in codes)
            if None not in codes or failed or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
    if codes != [expected] * len(codes):
        texts = (
            f"process {i} exited with {code} (None: it was ended after the others, or {timeout} s):\n{err.read_text()}"
            for i, (code, (_, err)) in enumerate(zip(codes, logs, strict=True))
        )
        pytest.fail("\n".join(texts))
    return [out.read_text() for out, _ in logs]


def run_training(folder, processes: int, options=lambda i: ()) -> list[str]:
    """What each process prints; 130 says that it stopped by a Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    commands = [
        ("-W", "error", __file__, str(folder / "out"), *map(str, (port, processes, i)), *options(i))
        for i in range(processes)
    ]
    return run_together(folder, commands, expected=130, JAX_NUM_CPU_DEVICES=str(8 // processes))


def arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("matplotlib", reason="the demo plots: pip install jax-nvfp4-ops[examples]")
    yield load_demo()
    del sys.modules["train_gpt"]


@pytest.fixture(scope="module")
def size(demo):
    return demo.SIZES["tiles"]


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory):
    """Folder, and output by process, of the same training by two processes of four devices and by one of eight."""
    results = {}
    for processes in (2, 1):
        folder = tmp_path_factory.mktemp(f"by{processes}")
        results[processes] = folder / "out", run_training(folder, processes)
    return results


def test_two_processes_have_the_bits_of_one(runs):
    """Both through gloo: random draws, weights, moments, losses, and the shares of zeros of a stochastic rounding."""
    (two, printed), (one, _) = runs[2], runs[1]
    assert sorted(p.name for p in two.iterdir()) == ["checkpoint.npz", "loss.png", "sums.npz"]
    got, expected = arrays(two / "checkpoint.npz"), arrays(one / "checkpoint.npz")
    got_meta, expected_meta = (json.loads(str(x.pop("meta"))) for x in (got, expected))
    assert len(got) == 2 * 3 * 9
    assert_same_tree(got, expected)
    del got_meta["seconds"], expected_meta["seconds"]
    assert got_meta == expected_meta
    # The last process alone had a Ctrl-C; all stopped at the same step.
    assert got_meta["step"] == STEPS
    losses = got_meta["history"]
    assert losses["nvidia"] != losses["f32"]
    assert all(loss[-1] < loss[0] - 1 for loss in (losses["nvidia"], losses["f32"]))
    # What gloo says of itself goes to the same stream, in pieces.
    assert f"interrupted at step {STEPS}" in printed[0] and "on 8 devices" in printed[0]
    assert "interrupted" not in printed[1] and "parameters" not in printed[1]


def test_only_float_sums_over_more_than_two_devices_depend_on_the_transport(demo, size, runs):
    """Gloo adds around a ring, one process in the order of its devices: over two devices that is the same sum."""
    two, one = (arrays(runs[n][0] / "sums.npz") for n in (2, 1))
    assert_same_tree(two, one)
    within = sums(demo, demo.make_mesh({"data": 4, "model": 2}, size))
    assert within.keys() == two.keys()
    for name, count in {"model": 2, "data": 4, "dataxmodel": 8}.items():
        assert_same_bits(two[f"int32 over {name}"], within[f"int32 over {name}"])
        a, b = (x[f"float32 over {name}"].astype(np.float64) for x in (two, within))
        if count == 2:
            np.testing.assert_array_equal(a, b)
        # Of either sum each of count - 1 additions is rounded.
        x = np.abs(normal((8, 4096), scale=1e3)).astype(np.float64).sum(0).max()
        assert np.abs(a - b).max() <= 2 * (count - 1) * 2.0**-24 * x


def test_processes_that_differ_say_so(demo, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="all processes must have the same options"):
        run_training(tmp_path, 2, options=lambda i: ("--seed", str(i)))


def test_a_process_that_fails_ends_the_others_and_is_shown(tmp_path):
    start = time.monotonic()
    waits, fails = "import time; time.sleep(600)", "raise SystemExit('it was me')"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)process 1 exited with 1 .*it was me"):
        run_together(tmp_path, [("-c", waits), ("-c", fails)])
    with pytest.raises(pytest.fail.Exception, match="process 0 exited with None"):
        run_together(tmp_path, [("-c", waits)], timeout=0.5)
    assert time.monotonic() - start < 60


# ---- Meshes


def targets(tree, shardings):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def assert_placed(tree, shardings):
    jax.tree.map(
        lambda x, s: (
            None
            if x.sharding.is_equivalent_to(s, x.ndim)
            else pytest.fail(f"{x.sharding} is not {s}")
        ),
        tree,
        shardings,
    )


@pytest.fixture(scope="module")
def mesh_of(demo, size):
    """Meshes of this process, by their names in MESHES."""
    meshes = {
        name: demo.make_mesh(dict(zip(AXES, counts, strict=True)), size)
        for name, counts in MESHES.items()
    }
    return meshes.__getitem__


@pytest.fixture(scope="module")
def params(demo, size):
    return jax.device_get(demo.init_params(size, jax.random.key(0)))


@pytest.fixture(scope="module")
def place(demo, mesh_of, params):
    """The shardings of (params, first moments, second moments) on a mesh."""
    return lambda name: (demo.places(mesh_of(name), params),) * 3


@pytest.fixture(scope="module")
def saved(runs):
    """What two processes left of the NVFP4 model's state, and of the history."""
    file = arrays(runs[2][0] / "checkpoint.npz")
    return [file[f"nvidia/{i}"] for i in range(27)], json.loads(str(file["meta"]))


@pytest.fixture(scope="module")
def load(demo, runs, params, place, saved):
    """The same state on a mesh of this process, by the demo."""

    def state_on(name: str):
        start = targets((params,) * 3, place(name))
        run = demo.Run(saved[1]["settings"], 0, {"nvidia": start}, {}, {})
        run.load(runs[2][0] / "checkpoint.npz")
        return run.states["nvidia"]

    return state_on


@pytest.fixture(scope="module")
def program_on(demo, size, mesh_of, params, place):
    """A step of training, compiled for a mesh."""

    @functools.cache
    def compiled(name: str):
        step = demo.make_step(demo.linear_layers("nvidia"), size, 50, 0, place(name))
        by_row = NamedSharding(mesh_of(name), P("data"))
        batch = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32, sharding=by_row)
        with jax.set_mesh(mesh_of(name)):
            return step.lower(targets((params,) * 3, place(name)), batch, 0).compile()

    return compiled


@pytest.fixture(scope="module")
def step_on(demo, size, mesh_of, program_on):
    """loss = step_on(mesh, state, number): a step of training; the state is donated."""
    train, _ = demo.read_corpus(100 * size.context)

    def run(name: str, state, number: int) -> float:
        batch = demo.batch_at(train, size, 0, number)
        batch = demo.put(batch, NamedSharding(mesh_of(name), P("data")))
        return float(program_on(name)(state, batch, number)[1])

    return run


@jax.jit
def draws(state, key):
    """First moments, which are like gradients, as the backward pass quantizes a gradient."""
    layer = state[1]["layers"][0]
    both = {"axis": (-1, -2), "rounding": "sr", "hadamard": (False, True)}
    return {
        name: nvfp4.quantize(layer[name], **both, key=jax.random.fold_in(key, i))
        for i, name in enumerate(("qkv", "out", "up", "down"))
    }


def test_one_process_adds_in_another_order_than_gloo(demo, params, place, step_on, saved):
    """Of the first forward pass only the mean over four parts of the batch depends on the order of sums."""
    zeros = jax.tree.map(np.zeros_like, params)
    loss = step_on("8", demo.put((params, zeros, zeros), place("8")), 0)
    assert loss == pytest.approx(saved[1]["history"]["nvidia"][0], rel=2 * 3 * 2.0**-24)


def test_weights_of_blocks_are_gathered_in_four_bits(program_on, params):
    """FSDP: every device needs the columns, or rows, of its part of the model; float32 gathers are of other things."""
    gathers = re.findall(
        r"= \(?(\w+)\[([\d,]*)\][^=]* all-gather(?:-start)?\(", program_on("8").as_text()
    )
    shapes = {(kind, tuple(sorted(map(int, dims.split(","))))) for kind, dims in gathers}
    for name in ("qkv", "out", "up", "down"):
        shape = params["layers"][0][name].shape
        columns = name in ("qkv", "up")
        part = (shape[0], shape[1] // 2) if columns else (shape[0] // 2, shape[1])
        # Of fprop's codes, which lie along the first axis.
        assert ("u8", tuple(sorted((part[0] // 2, part[1])))) in shapes, name
        assert not shapes & {("f32", tuple(sorted(x))) for x in (shape, part)}, name


@pytest.mark.parametrize("name", MESHES)
def test_the_demo_goes_on_with_any_mesh(load, place, saved, name):
    state = load(name)
    assert_placed(state, place(name))
    assert_same_tree(jax.tree.leaves(state), saved[0])


@pytest.fixture(scope="module")
def orbax_checkpoint(load, tmp_path_factory):
    """Written from the mesh data=4, model=2."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    path = tmp_path_factory.mktemp("orbax") / "state"
    with checkpoint.StandardCheckpointer() as writer:
        writer.save(path, load("8"))
    return path


@pytest.mark.parametrize("name", MESHES)
def test_orbax_goes_on_with_any_mesh(load, step_on, place, mesh_of, orbax_checkpoint, name):
    from orbax import checkpoint

    expected = load("8")
    with checkpoint.StandardCheckpointer() as reader:
        state = reader.restore(orbax_checkpoint, targets(expected, place(name)))
    assert_placed(state, place(name))
    assert_same_tree(state, expected)

    key = jax.random.fold_in(jax.random.key(0), STEPS)
    with jax.set_mesh(mesh_of(name)):
        got = draws(state, key)
    with jax.set_mesh(mesh_of("8")):
        assert_same_tree(got, draws(expected, key))

    loss, loss_of_8 = step_on(name, state, STEPS), step_on("8", expected, STEPS)
    # On another mesh float32 sums have another order. Where one ends beside the boundary of two codes, a code of one token
    # flips: of half a million a few, each of which moves the loss of one of 512 tokens by some hundredths.
    assert loss == loss_of_8 if name == "8" else loss == pytest.approx(loss_of_8, rel=2.0**-14)


# ---- Weights that are quantized once


MICROBATCHES, TOKENS, WIDTH = 3, 512, 512


@pytest.fixture(scope="module")
def layer():
    """A weight, and x and the gradient g of the result by microbatch."""
    shapes = [(WIDTH, WIDTH), (MICROBATCHES, TOKENS, WIDTH), (MICROBATCHES, TOKENS, WIDTH)]
    return [normal(shape, seed=i) for i, shape in enumerate(shapes)]


SPECS = (P("data", "model"), P(None, "data"), P(None, "data", "model"))


def assert_close(got, expected):
    """Parts of sums of 512 products in float32 may be added in another order, and those of few microbatches."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    assert np.abs(got - expected).max() <= 512 * 2.0**-24 * np.abs(expected).max()


def on(mesh, arrays, specs=SPECS):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def plain(x, w, qw, key):
    """With the array itself: on the CPU the compiler quantizes it before the loop, for a GPU in each turn of it."""
    return nvfp4.matmul(x, w, key=key)


def shared(x, w, qw, key):
    """What is quantized once is computed with; w has its gradient."""
    return nvfp4.matmul(x, w, quantized=qw, key=key)


def accumulate(linear, w, xs, gs):
    """dw summed over microbatches; y and dx of each."""
    qw = nvfp4.quantize_weight(w)

    def microbatch(dw, batch):
        x, g, key = batch
        y, pull = jax.vjp(lambda x, w: linear(x, w, qw, key), x, w)
        dx, part = pull(g)
        return dw + part, (y, dx)

    keys = jax.random.split(jax.random.key(5), MICROBATCHES)
    return jax.lax.scan(microbatch, jnp.zeros_like(w), (xs, gs, keys))


def calls(compiled, op: str) -> tuple[int, int]:
    """How often a program calls an op outside of its loops, and in them."""
    computations = compiled.as_text().split("\n\n")
    count = {True: 0, False: 0}
    for text in computations:
        count[text.startswith("ENTRY")] += text.count(f'custom_call_target="nvfp4_{op}_v1"')
    return count[True], count[False]


def apart(layer):
    """What accumulate shall return: each microbatch by itself."""
    w, xs, gs = layer
    keys = jax.random.split(jax.random.key(5), MICROBATCHES)
    total, ys = np.zeros_like(w), []
    for x, g, key in zip(xs, gs, keys, strict=True):
        y, pull = jax.vjp(lambda x, w, key=key: nvfp4.matmul(x, w, key=key), x, w)
        dx, dw = jax.device_get(pull(g))
        total += dw
        ys.append((y, dx))
    return total, tuple(np.stack(y) for y in zip(*ys, strict=True))


@pytest.mark.parametrize("linear", [plain, shared])
def test_microbatches_share_the_quantized_weight(layer, linear):
    program = jax.jit(functools.partial(accumulate, linear)).lower(*layer).compile()
    # In the loop: x and g, each along both axes.
    assert calls(program, "quantize") == (1, 2)
    assert calls(program, "matmul") == (0, 3)
    assert_same_tree(program(*layer), apart(layer))


@pytest.mark.parametrize("linear", [plain, shared])
@pytest.mark.parametrize("name", ["8", "8 other"])
def test_microbatches_on_a_mesh_share_it_too(layer, mesh_of, linear, name):
    placed = on(mesh_of(name), layer)
    program = jax.jit(functools.partial(accumulate, linear)).lower(*placed).compile()
    assert calls(program, "quantize") == (1, 2)
    jax.tree.map(assert_close, program(*placed), apart(layer))


def test_microbatches_on_a_b200_share_it(layer):
    plugin.load_for_tests()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layer]
    report = audit.audit(functools.partial(accumulate, shared), *shapes)
    assert report.calls("nvfp4_quantize") == 1 + 2 * MICROBATCHES
    assert report.calls("nvfp4_matmul") == 3 * MICROBATCHES


def test_a_quantized_weight_alone_has_a_gradient_for_x_only(layer):
    w, xs, gs = layer
    key = jax.random.key(5)

    def pull(x, qw, g):
        return jax.vjp(lambda x, qw: nvfp4.matmul(x, qw, key=key), x, qw)[1](g)

    dx, dqw = jax.jit(pull)(xs[0], nvfp4.quantize_weight(w), gs[0])
    assert_same_bits(dx, jax.vjp(lambda x: nvfp4.matmul(x, w, key=key), xs[0])[1](gs[0])[0])
    # Codes are integers, without a derivative; that of the scales is zero by definition.
    assert dqw.fprop.packed.dtype == jax.dtypes.float0
    assert dqw.fprop.global_scale == 0


def test_orbax_moves_a_quantized_weight_to_another_mesh(layer, mesh_of, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    w, xs, _ = layer
    quantize = jax.jit(nvfp4.quantize_weight)
    of_8, of_other = (quantize(on(mesh_of(n), [w], SPECS[:1])[0]) for n in ("8", "8 other"))
    shardings = jax.tree.map(lambda x: x.sharding, of_other)
    assert not of_8.fprop.packed.sharding.is_equivalent_to(shardings.fprop.packed, 2)
    tree = {"layer": of_8, "x": nvfp4.quantize(on(mesh_of("8"), [xs[0]], [P("data")])[0])}
    rows = NamedSharding(mesh_of("8 other"), P("model"))
    whole = NamedSharding(mesh_of("8 other"), P())
    target = {
        "layer": targets(of_8, shardings),
        "x": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=rows if x.ndim == 2 else whole
            ),
            tree["x"],
        ),
    }
    with checkpoint.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "tree", tree)
        orbax.wait_until_finished()
        back = orbax.restore(tmp_path / "tree", target)
    assert_placed(back, jax.tree.map(lambda x: x.sharding, target))
    assert_same_tree(back, tree)
    assert_same_tree(back["layer"], nvfp4.quantize_weight(w))
    assert_close(jax.jit(nvfp4.matmul)(xs[0], back["layer"]), nvfp4.matmul(xs[0], w))
