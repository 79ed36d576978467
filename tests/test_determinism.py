"""The same bits whatever the number of threads and the instruction set of a process."""

import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax_nvfp4_ops as nvfp4
import numpy as np
import pytest
from helpers import BF16, wide
from jax_nvfp4_ops import _native


def digest() -> str:
    """Of every op on tensors of many tasks, with tails."""
    x, w = wide((389, 1100), BF16), wide((270, 1100), seed=1)
    key = jax.random.key(3)
    q = nvfp4.quantize(x, axis=(-1, -2), rounding="sr", hadamard=True, key=key)
    qw = nvfp4.quantize(w, hadamard=True, block="16x16")
    y = nvfp4.matmul(q[0], qw, out_dtype=jnp.bfloat16)
    results = [*nvfp4.amax(x, ("plain", "rows", "columns")), q, y, qw.dequantize(transformed=True)]
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(results):
        sha.update(np.asarray(leaf).tobytes())
    return sha.hexdigest()


PROGRAM = """
import os
import test_determinism

print(test_determinism.digest())
print(test_determinism._native.select_instruction_set("portable"))
threads = [open(f"/proc/self/task/{i}/comm").read() for i in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in threads))
"""


@pytest.mark.parametrize(
    ("threads", "isa"), [(1, _native.instruction_sets()[0]), (7, _native.instruction_sets()[-1])]
)
def test_another_process_gives_the_same_bits(threads, isa):
    environment = {
        "NPROC": str(threads),  # the size of XLA's thread pool
        "JAX_NVFP4_OPS_ISA": isa,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(), isa, str(threads)]
