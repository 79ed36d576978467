"""The demo: what it writes, what an interruption leaves, that it resumes to the same bits, and its errors."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo plots: pip install jax-nvfp4-ops[examples]")

pytestmark = pytest.mark.slow

DEMO = pathlib.Path(__file__).parent.parent / "examples" / "train_gpt.py"
TINY = ["--size", "tiny", "--steps", "12", "--batch", "4"]


@pytest.fixture(scope="module")
def demo() -> types.ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", DEMO)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# The demo, sent Ctrl-C by itself when it has shown its fifth step: a signal from here might come too late.
INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train_gpt
show = train_gpt.Progress.show
def show_and_interrupt(self, done, text):
    show(self, done, text)
    if done == 5:
        os.kill(os.getpid(), signal.SIGINT)
train_gpt.Progress.show = show_and_interrupt
sys.exit(train_gpt.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_once(tmp_path_factory):
    """Runs of the same settings share what XLA has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def run(*arguments, before=()) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", *before, str(DEMO), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted, and what it said."""
    out = tmp_path_factory.mktemp("whole")
    done = run(*TINY, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def arrays(out: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(out / "checkpoint.npz") as file:
        return {name: file[name] for name in file.files}


def test_a_run_writes_table_plot_and_text(whole):
    out, text = whole
    assert "12 steps of 256 bytes, 3,072 in all" in text
    assert "time a step, median" in text
    assert (out / "table.txt").read_text().strip() in text
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "The NVFP4 model writes:" in text
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint.npz", "loss.png", "table.txt"]


def test_both_models_learn_and_differ(whole):
    out, _ = whole
    history = json.loads(str(arrays(out)["meta"]))["history"]
    for name in ("f32", "nvidia"):
        assert history[name][-1] < history[name][0] - 0.3
    # Step 0 sees the same weights; the difference is the forward pass in four bits.
    assert 0 < abs(history["f32"][0] - history["nvidia"][0]) < 0.1
    assert history["f32"][1:] != history["nvidia"][1:]
    assert all(0 < x < 0.5 for shares in history["underflow"] for x in shares)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of the same that was interrupted at step 5."""
    out = tmp_path_factory.mktemp("interrupted")
    stopped = run(*TINY, "--out", out, before=["-c", INTERRUPTED])
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted at step 5" in stopped.stdout
    return out


def test_an_interrupted_run_resumes_to_the_same_bits(whole, interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.npz", "loss.png"]
    partial = json.loads(str(arrays(tmp_path)["meta"]))
    assert partial["step"] == 5 and len(partial["history"]["nvidia"]) == 5

    done = run(*TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"goes on with {tmp_path / 'checkpoint.npz'} at step 5" in done.stdout
    expected, got = arrays(whole[0]), arrays(tmp_path)
    assert expected.keys() == got.keys()
    states = [name for name in expected if name != "meta"]
    assert len(states) > 2
    for name in states:
        assert np.array_equal(expected[name], got[name]), name
    expected, got = (json.loads(str(x["meta"])) for x in (expected, got))
    assert [len(x) for x in got.pop("seconds").values()] == [12, 12]
    del expected["seconds"]
    assert expected == got


def test_another_experiment_does_not_overwrite_a_checkpoint(whole):
    out, _ = whole
    before = (out / "checkpoint.npz").read_bytes()
    done = run(*TINY, "--seed", 1, "--out", out)
    assert done.returncode == 1
    assert "is of a run with other settings (seed)" in done.stderr
    assert (out / "checkpoint.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "fp3"], "argument --recipe: invalid choice: 'fp3'"),
        (["--steps", "0"], "argument --steps: must be at least 1; got 0"),
        (["--batch", "-2"], "argument --batch: must be at least 1; got -2"),
        (["--size", "huge"], "argument --size: invalid choice: 'huge'"),
        (["--out", str(DEMO)], "--out must be a folder that can be written to"),
        (
            [*TINY, "--mesh", "model=2"],
            "--mesh must have up to the 1 devices that there are; got 2. CPUs: set JAX_NUM_CPU_DEVICES=2.",
        ),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    done = run("--out", tmp_path, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "4"], "argument --mesh: must be like data=4,model=2; got '4'"),
        (["--mesh", "data=0"], "argument --mesh: must be like data=4,model=2; got 'data=0'"),
        (["--mesh", "rows=2"], "argument --mesh: must be like data=4,model=2; got 'rows=2'"),
        (["--process", "1"], "argument --process: must be less than --processes 1; got 1"),
        (["--processes", "2"], "argument --coordinator: must be given with --processes; got none"),
    ],
)
def test_bad_arguments_of_meshes(demo, capsys, arguments, message):
    with pytest.raises(SystemExit):
        demo.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 3, "model": 1}, "--mesh data must divide the batch, 8; got 3"),
        ({"data": 1, "model": 4}, "--mesh model must divide the number of heads, 2; got 4"),
        ({"data": 8, "model": 2}, "up to the 8 devices .* got 16. .* JAX_NUM_CPU_DEVICES=16"),
    ],
)
def test_a_mesh_that_does_not_fit(demo, mesh, message):
    with pytest.raises(SystemExit, match=message):
        demo.make_mesh(mesh, demo.SIZES["tiny"])


def test_a_mesh_of_several_processes_has_all_their_devices(demo, monkeypatch):
    monkeypatch.setattr(demo.jax, "process_count", lambda: 2)
    message = "must have all of the 8 devices that there are; got 4. .* JAX_NUM_CPU_DEVICES=2"
    with pytest.raises(SystemExit, match=message):
        demo.make_mesh({"data": 2, "model": 2}, demo.SIZES["tiny"])


def test_a_mesh_may_have_some_of_the_devices(demo):
    mesh = demo.make_mesh(demo.parse(["--mesh", "model=2,data=2"]).mesh, demo.SIZES["tiny"])
    assert dict(mesh.shape) == {"data": 2, "model": 2}
    assert demo.make_mesh(demo.parse([]).mesh, demo.SIZES["tiny"]).size == 1


def test_a_run_goes_on_with_another_mesh(whole, interrupted, tmp_path, monkeypatch):
    """To losses that are as near as sums in another order, and the codes that flip, leave them."""
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    done = run(*TINY, "--mesh", "data=2,model=2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "at step 5" in done.stdout and ", on 4 devices" in done.stdout
    assert "The NVFP4 model writes:" in done.stdout
    expected, got = (json.loads(str(arrays(x)["meta"]))["history"] for x in (whole[0], tmp_path))
    moved = {}
    for name in ("f32", "nvidia"):
        assert got[name][:5] == expected[name][:5]
        moved[name] = np.abs(np.subtract(got[name], expected[name])).max()
    # Sums have another order, which the optimizer's division by small moments enlarges; and codes of NVFP4 flip, which is
    # less than rounding to it at all.
    gap = np.abs(np.subtract(expected["nvidia"], expected["f32"])).max()
    assert moved["f32"] < 1e-5 and moved["nvidia"] < gap


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "changed"])
def test_a_damaged_checkpoint(demo, whole, tmp_path, damage):
    good = bytearray((whole[0] / "checkpoint.npz").read_bytes())
    half = len(good) // 2
    changed = bytearray(good)
    changed[half] ^= 0xFF  # the archive has checksums
    bad = {"text": b"no", "empty": b"", "cut": good[:half], "changed": changed}[damage]
    path = tmp_path / "checkpoint.npz"
    path.write_bytes(bad)
    with pytest.raises(SystemExit, match="must be a checkpoint of this program"):
        demo.Run({}, 0, {}, {}, {}).load(path)
    assert path.read_bytes() == bad


def test_a_write_that_fails_leaves_the_old_file(demo, tmp_path):
    path = tmp_path / "a.txt"
    demo.write_atomically(path, lambda p: p.write_text("old"))

    def fail(p: pathlib.Path) -> None:
        p.write_text("ne")
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        demo.write_atomically(path, fail)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_the_corpus_does_not_depend_on_where_the_library_lies(demo, tmp_path, monkeypatch):
    corpora = []
    for name in ("python", "test/site-packages/python"):
        folder = tmp_path / name
        for i in range(20):
            (folder / "json").mkdir(parents=True, exist_ok=True)
            (folder / "json" / f"{i:02}.py").write_bytes(bytes([i]) * 10)
        for other in ("test", "site-packages"):
            (folder / other).mkdir()
            (folder / other / "x.py").write_bytes(b"x" * 1000)
        monkeypatch.setattr(demo.sysconfig, "get_path", lambda _, folder=folder: str(folder))
        corpora.append([set(data.tolist()) for data in demo.read_corpus(20)])
    assert corpora == [[set(range(20)) - {9, 19}, {9, 19}]] * 2
    with pytest.raises(SystemExit, match="must have 21 bytes for validation; got 20"):
        demo.read_corpus(21)


@pytest.mark.parametrize("size", [(64, 16), (64, 17), (100, 16)])
def test_batches_depend_on_seed_and_step_alone(demo, size):
    length, context = size
    data = np.arange(length, dtype=np.uint8)
    shape = demo.Size(layers=1, width=16, heads=1, context=context, batch=3)
    batches = {(s, i): demo.batch_at(data, shape, s, i) for s in range(2) for i in range(20)}
    for (seed, step), batch in batches.items():
        assert batch.shape == (3, context + 1) and batch.dtype == np.int32
        assert np.array_equal(np.diff(batch), np.ones((3, context)))
        assert np.array_equal(batch, demo.batch_at(data, shape, seed, step))
    assert len({batch.tobytes() for batch in batches.values()}) > 35
