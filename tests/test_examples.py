"""The demo: what it writes, what an interruption leaves, that it resumes to the same bits, and its errors."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo plots: pip install jax-nvfp4-ops[examples]")

pytestmark = pytest.mark.slow

DEMO = pathlib.Path(__file__).parent.parent / "examples" / "train_gpt.py"
TINY = ["--size", "tiny", "--steps", "12", "--batch", "4"]


def command(*arguments) -> list[str]:
    return [sys.executable, "-W", "error", str(DEMO), *map(str, arguments)]


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


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
    assert "12 steps of 256 bytes" in text
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


def test_an_interrupted_run_resumes_to_the_same_bits(whole, tmp_path):
    process = subprocess.Popen(
        command(*TINY, "--out", tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted at step" in rest
    assert (tmp_path / "loss.png").exists()
    assert not (tmp_path / "table.txt").exists()

    done = run(*TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "goes on with" in done.stdout
    expected, got = arrays(whole[0]), arrays(tmp_path)
    assert expected.keys() == got.keys()
    for name in expected:
        assert np.array_equal(expected[name], got[name]), name


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
    ],
)
def test_bad_arguments(arguments, message):
    done = run(*arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint.npz").write_bytes(b"no")
    done = run(*TINY, "--out", tmp_path)
    assert done.returncode == 1
    assert "must be a checkpoint of this program" in done.stderr
