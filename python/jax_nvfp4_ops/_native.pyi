# Written by `python3 tools/dev.py stubs`; do not edit.
"""
The compiled half of jax_nvfp4_ops.
"""
from __future__ import annotations
import collections.abc
import typing_extensions
__all__: list[str] = ['instruction_sets', 'load_cublaslt', 'registrations', 'select_instruction_set', 'set_cublaslt_finder', 'xla_ffi_version']
def instruction_sets() -> list[str]:
    """
    Instruction sets that the CPU backend can use here, best first.
    """
def load_cublaslt(path: str) -> None:
    """
    Makes matmul on CUDA use the cuBLASLt at this path from its next call on; raises ImportError if it can not.
    """
def registrations() -> dict[str, dict[str, dict[str, typing_extensions.CapsuleType]]]:
    """
    FFI handlers by platform, then by target name, then by stage.
    """
def select_instruction_set(name: str) -> str:
    """
    Makes the CPU backend of this process use an instruction set, and returns the name of the one before. All give the same bits.
    """
def set_cublaslt_finder(finder: collections.abc.Callable[[], collections.abc.Sequence[str]]) -> None:
    """
    Sets what lists the paths of cuBLASLt to try, best first, when matmul first runs on CUDA.
    """
def xla_ffi_version() -> tuple[int, int]:
    """
    Version of the XLA FFI that this module was built with.
    """
