"""Every op is complete: the files and lines of "Add an op" in CONTRIBUTING.md are there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def listed_ops() -> list[str]:
    """The one list of ops is in CMakeLists.txt."""
    return re.search(r"set\(NVFP4_OPS ([^)]*)\)", read("CMakeLists.txt"))[1].split()


def read(path: str) -> str:
    file = ROOT / path
    return file.read_text() if file.exists() else ""


def parts(op: str) -> list[tuple[str, str]]:
    """(file, what must be in it) of everything that an op consists of."""
    name = "".join(word.capitalize() for word in op.split("_"))
    return [
        # Six files of its own...
        (f"csrc/ops/{op}.h", f"void {name}OnCpu("),
        (f"csrc/ops/{op}_cuda.cu", "__global__ void"),
        (f"csrc/ops/{op}.cc", f"XLA_FFI_DEFINE_HANDLER_SYMBOL({name}Cpu,"),
        (f"csrc/ops/{op}.cc", f"XLA_FFI_DEFINE_HANDLER_SYMBOL({name}Cuda,"),
        (f"csrc/ops/{op}_cpu.cc", f"void {name}OnCpu("),
        (f"python/jax_nvfp4_ops/{op}.py", f"{op}_p = _primitive.define("),
        (f"tests/test_{op}.py", "def test_"),
        # ...and a line in each of these.
        ("csrc/module.cc", f"XLA_FFI_DECLARE_HANDLER_SYMBOL({name}Cpu);"),
        ("csrc/module.cc", f'{{"nvfp4_{op}_v1", Execute({name}Cpu)}}'),
        ("csrc/module.cc", f"XLA_FFI_DECLARE_HANDLER_SYMBOL({name}Cuda);"),
        ("docs/architecture.md", f"| `{op}` |"),
    ]


def missing(op: str) -> list[str]:
    """What an op lacks, in words."""
    return [
        f"{path}: add `{text}`" if (ROOT / path).exists() else f"{path}: add this file"
        for path, text in parts(op)
        if re.sub(r"\s", "", text) not in re.sub(r"\s", "", read(path))
    ]


@pytest.mark.parametrize("op", listed_ops())
def test_an_op_is_complete(op):
    assert not missing(op), 'see "Add an op" in CONTRIBUTING.md'


def test_an_op_that_is_only_in_the_list_lacks_everything():
    assert [line.split(":")[0] for line in missing("round_trip")] == [
        path for path, _ in parts("round_trip")
    ]


def test_every_file_of_csrc_ops_belongs_to_a_listed_op():
    stems = {
        path.stem.removesuffix("_cpu").removesuffix("_cuda")
        for path in (ROOT / "csrc/ops").glob("*.cc")
    }
    assert stems == set(listed_ops())


def test_every_source_file_is_compiled():
    cmake = read("CMakeLists.txt")
    for path in [*(ROOT / "csrc/cpu").glob("*.cc"), *(ROOT / "csrc/cuda").glob("*.cc")]:
        assert f"{path.relative_to(ROOT)}" in cmake, "CMakeLists.txt lists every file"


def test_every_target_belongs_to_a_listed_op():
    from jax_nvfp4_ops import _native

    targets = {f"nvfp4_{op}_v1" for op in listed_ops()}
    for platform, handlers in _native.registrations().items():
        assert set(handlers) == targets, platform
