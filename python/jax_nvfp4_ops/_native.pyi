# Written by `python3 tools/dev.py stubs`; do not edit.
"""
The compiled half of jax_nvfp4_ops.
"""
from __future__ import annotations
import typing_extensions
__all__: list[str] = ['instruction_sets', 'registrations', 'select_instruction_set', 'xla_ffi_version']
def instruction_sets() -> list[str]:
    """
    Instruction sets that the CPU backend can use here, best first.
    """
def registrations() -> dict[str, dict[str, typing_extensions.CapsuleType]]:
    """
    FFI handlers by platform, then by target name.
    """
def select_instruction_set(name: str) -> str:
    """
    Makes the CPU backend of this process use an instruction set, and returns the name of the one before. All give the same bits.
    """
def xla_ffi_version() -> tuple[int, int]:
    """
    Version of the XLA FFI that this module was built with.
    """
