"""The type stub of the compiled module: as generated now, shipped, and understood by a type checker."""

import importlib.resources
import importlib.util
import pathlib
import shutil

import pytest
from jax_nvfp4_ops import _native

pytest.importorskip("pybind11_stubgen", reason="needs the dev extra")
mypy = pytest.importorskip("mypy.api", reason="needs the dev extra")

TOOL = pathlib.Path(__file__).parent.parent / "tools" / "stubs.py"
PACKAGE = importlib.resources.files("jax_nvfp4_ops")


def test_the_stub_is_the_one_that_the_module_gives():
    spec = importlib.util.spec_from_file_location("stubs", TOOL)
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    shipped = (PACKAGE / "_native.pyi").read_text()
    assert shipped == stubs.stub_of(_native), "run `python3 tools/dev.py stubs`"


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


# What a user may write, and the type checker's complaint.
USES = {
    "names: list[str] = native.instruction_sets()": None,
    "previous: str = native.select_instruction_set(name='portable')": None,
    "version: tuple[int, int] = native.xla_ffi_version()": None,
    "handler = native.registrations()['cpu']['nvfp4_matmul_v1']['execute']": None,
    "native.select_instruction_set(3)": 'has incompatible type "int"; expected "str"',
    "numbers: list[int] = native.instruction_sets()": "Incompatible types in assignment",
    "native.registration()": 'Module has no attribute "registration"',
}


def test_a_type_checker_sees_what_the_functions_take_and_return(tmp_path, monkeypatch):
    shutil.copy(PACKAGE / "_native.pyi", tmp_path / "native.pyi")
    (tmp_path / "user.py").write_text("\n".join(["import native", *USES, ""]))
    monkeypatch.chdir(tmp_path)
    output, errors, _ = mypy.run(["--strict", "--config-file=", "--python-version=3.11", "user.py"])
    assert not errors
    *complaints, summary = output.splitlines()
    expected = {line: text for line, text in enumerate(USES.values(), 2) if text is not None}
    assert summary.startswith(f"Found {len(expected)} errors in 1 file"), output
    for complaint, (line, text) in zip(complaints, expected.items(), strict=True):
        assert complaint.startswith(f"user.py:{line}: error: "), output
        assert text in complaint, output
