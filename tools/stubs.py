"""Writes the type stub of the compiled module with pybind11-stubgen.

pybind11-stubgen knows pybind11's functions as Python's built-in routines. nanobind's functions have
a type of their own, `nb_func`, and would be written as variables of that type; their docstrings
start with a signature of the same form, so it is enough to say that they are functions.
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
            if type(member).__name__ == "nb_func":
                return self.handle_function(path, member)
            return super().handle_module_member(path, module, member)

        def parse_type_str(self, annotation_str: str) -> Any:
            # nanobind's name for it depends on the Python that it was built for. Type checkers know
            # typing_extensions without an installation.
            if annotation_str.strip() == "types.CapsuleType":
                annotation_str = "typing_extensions.CapsuleType"
            return super().parse_type_str(annotation_str)

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
