"""Writes the type stub of the compiled module with pybind11-stubgen.

pybind11-stubgen knows pybind11's functions as Python's built-in routines. nanobind's functions have
a type of their own, `nb_func`, and would be written as variables of that type, or (from Python 3.13
on, where `inspect` looks into their type) as functions of anything. But their docstrings begin with a
signature of the form that it reads.
"""

from __future__ import annotations

import logging
import pathlib
import types
from typing import Any

import pybind11_stubgen
from pybind11_stubgen.structs import QualifiedName

STUB = pathlib.Path(__file__).resolve().parent.parent / "python/jax_nvfp4_ops/_native.pyi"
HEADER = "# Written by `python3 tools/dev.py stubs`; do not edit."


def _parser() -> Any:
    arguments = pybind11_stubgen.arg_parser().parse_args(
        ["--exit-code", "jax_nvfp4_ops._native"], namespace=pybind11_stubgen.CLIArgs()
    )
    base = type(pybind11_stubgen.stub_parser_from_args(arguments))

    class NanobindParser(base):
        def handle_module_member(
            self, path: QualifiedName, module: types.ModuleType, member: Any
        ) -> Any:
            if type(member).__name__ != "nb_func":
                return super().handle_module_member(path, module, member)
            functions = self.parse_function_docstring(path[-1], member.__doc__.splitlines())
            if not functions:
                raise ValueError(f"{path}: the docstring must begin with a signature")
            return functions

    return NanobindParser()


def stub_of(module: types.ModuleType) -> str:
    """Text of the stub of a module; raises if something in it can not be described."""
    logging.basicConfig(level=logging.WARNING)
    parser = _parser()
    parsed = parser.handle_module(QualifiedName.from_str(module.__name__), module)
    parser.finalize()
    printer = pybind11_stubgen.Printer(invalid_expr_as_ellipses=False, print_value_comments=False)
    return "\n".join([HEADER, *printer.print_module(parsed), ""])


if __name__ == "__main__":
    from jax_nvfp4_ops import _native

    STUB.write_text(stub_of(_native))
    print(f"wrote {STUB}")
