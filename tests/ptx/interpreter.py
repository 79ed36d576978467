"""Executes PTX: what nvcc made of a kernel for a target, inline assembly included, with NumPy.

Every instruction runs for all threads of a grid that are at it; those that are behind go first. A
program that does what no program should ends with an `Error` that quotes the instruction: accesses
outside of a buffer or misaligned, reads of what was never written, two threads at one byte of shared
memory with no barrier between or of global memory at all, barriers and shuffles that not all threads
reach. What the interpreter does not know is an error too: instructions, modifiers, operands.

    memory = Memory()
    out = memory.output("out", 4096)
    result = launch(parse(text)["kernel"], grid=(2, 1, 1), threads=256, parameters, memory)
"""

from __future__ import annotations

import dataclasses
import re
import struct

import ml_dtypes
import numpy as np

WARP = 32
SECTOR = 32
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
PREDICATE = np.dtype(bool)
TYPES = {
    "pred": PREDICATE,
    **{f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
       for kind in "bus" for size in (1, 2, 4, 8)},
    "f32": np.dtype("f4"),
}  # fmt: skip
COLLECTIVE = ("shfl", "redux")  # of the lanes that a mask names, the last operand
SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.([xyz])|%laneid")


class Error(Exception):
    """The program did what it must not, or what this interpreter does not know."""


# ---- Parsing


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    modifiers: tuple[str, ...]
    operands: tuple  # names and numbers; a tuple for {..}, an Address for [..]
    guard: str | None
    guard_inverted: bool
    text: str
    position: int  # in the file, without comments


@dataclasses.dataclass(frozen=True)
class Address:
    base: str
    offset: int


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: dict[str, int]  # offsets
    parameter_bytes: int
    registers: dict[str, str]  # types
    shared: dict[str, int]  # offsets
    shared_bytes: int
    code: list[Instruction]
    labels: dict[str, int]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def parse(text: str, ending: str = "") -> dict[str, Kernel]:
    """The kernels of a PTX file, or those of them whose names end so."""
    text = without_comments(text)
    dynamic = re.findall(r"^\s*\.extern\s+\.shared\s[^;]*?(\w+)\[\]\s*;", text, re.M)
    shared = []
    for size in re.finditer(r"^\.(?:visible )?shared .align (\d+) .b8 (\w+)\[(\d+)\]", text, re.M):
        shared.append((int(size[1]), size[2], int(size[3])))
    kernels = {}
    for entry in re.finditer(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{;]*\{", text):
        if not entry[1].endswith(ending):
            continue
        end = entry.end()
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        kernels[entry[1]] = _Parser(entry[1], entry[2], shared, dynamic).parse(
            text[: end - 1], entry.end()
        )
    return kernels


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Parser:
    def __init__(self, name: str, parameters: str, shared: list, dynamic: list[str]):
        self.kernel = Kernel(name, {}, 0, {}, {}, 0, [], {})
        self.scopes: list[dict[str, str]] = [{}]
        self.dynamic = dynamic
        for parameter in filter(str.strip, parameters.split(",")):
            match = re.fullmatch(
                r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^%]*?\s)?(\w+)(?:\[(\d+)\])?\s*",
                parameter,
            )
            if match is None:
                raise Error(f"unknown parameter: {parameter}")
            size = TYPES[match[2]].itemsize
            offset = _align(self.kernel.parameter_bytes, int(match[1] or size))
            self.kernel.parameters[match[3]] = offset
            self.kernel.parameter_bytes = offset + size * int(match[4] or 1)
        for alignment, variable, size in shared:
            self.add_shared(variable, alignment, size)

    def add_shared(self, name: str, alignment: int, size: int) -> None:
        offset = _align(self.kernel.shared_bytes, alignment)
        self.kernel.shared[name] = offset
        self.kernel.shared_bytes = offset + size

    def parse(self, body: str, at: int) -> Kernel:
        while at < len(body):
            char = body[at]
            if char.isspace() or char == ";":
                at += 1
            elif char == "{":  # of inline assembly: its registers are its own
                self.scopes.append({})
                at += 1
            elif char == "}":
                self.scopes.pop()
                at += 1
            elif label := re.compile(r"([\w$]+):").match(body, at):
                self.kernel.labels[label[1]] = len(self.kernel.code)
                at = label.end()
            else:
                end = body.index(";", at)
                self.statement(" ".join(body[at:end].split()), at)
                at = end + 1
        for name in self.dynamic:
            self.kernel.shared[name] = _align(self.kernel.shared_bytes, 1024)
        return self.kernel

    def statement(self, text: str, position: int) -> None:
        if match := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
            for name in match[2].split(","):
                name, _, count = name.strip().partition("<")
                for i in range(int(count[:-1])) if count else [None]:
                    self.declare(name if i is None else f"{name}{i}", match[1])
        elif match := re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            self.add_shared(match[2], int(match[1]), int(match[3]))
        elif text.startswith(".pragma"):
            pass
        elif match := re.fullmatch(r"(?:@(!?)(%?\w+) )?([a-z]\w*)((?:[.:]+\w+)*) ?(.*)", text):
            self.kernel.code.append(
                Instruction(
                    match[3],
                    tuple(m for m in re.split(r"[.:]+", match[4]) if m),
                    self.operands(match[5]),
                    self.resolve(match[2]) if match[2] else None,
                    match[1] == "!",
                    text,
                    position,
                )
            )
        else:
            raise Error(f"unknown statement: {text}")

    def declare(self, name: str, kind: str) -> None:
        if kind not in TYPES:
            raise Error(f"unknown register type: {kind}")
        unique = name if len(self.scopes) == 1 else f"{name}@{len(self.kernel.code)}"
        self.scopes[-1][name] = unique
        self.kernel.registers[unique] = kind

    def resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def operands(self, text: str) -> tuple:
        parts, depth, current = [], 0, ""
        for char in text + ",":
            depth += (char in "{[") - (char in "}]")
            if char == "," and depth == 0:
                parts.append(current.strip())
                current = ""
            else:
                current += char
        return tuple(self.operand(p) for p in parts if p)

    def operand(self, text: str):
        if text.startswith("{"):
            return self.operands(text[1:-1])
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return Address(self.resolve(base.strip()), int(offset or 0))
        if "|" in text:
            return tuple(self.resolve(p) for p in text.split("|"))
        return self.resolve(text)


# ---- Memory


@dataclasses.dataclass
class Buffer:
    name: str
    data: np.ndarray  # u8
    written: np.ndarray  # bool
    address: int
    writer: np.ndarray  # the thread of this launch that wrote a byte, or -1


class Memory:
    """Global memory. Buffers lie far apart: an access beside one is outside of all."""

    _SPACING = 1 << 36

    def __init__(self):
        self.buffers: list[Buffer] = []

    def _add(self, name: str, data: np.ndarray, written: bool) -> Buffer:
        buffer = Buffer(
            name,
            data,
            np.full(data.size, written),
            (len(self.buffers) + 1) * self._SPACING,
            np.full(data.size, -1, np.int64),
        )
        self.buffers.append(buffer)
        return buffer

    def input(self, name: str, array: np.ndarray) -> Buffer:
        return self._add(name, np.ascontiguousarray(array).reshape(-1).view(U8).copy(), True)

    def output(self, name: str, size: int) -> Buffer:
        return self._add(name, np.full(size, 0xE5, U8), False)

    def find(self, address: int) -> Buffer | None:
        index = int(address) // self._SPACING - 1
        return self.buffers[index] if 0 <= index < len(self.buffers) else None


# ---- Arithmetic


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there (an inexact one gets an odd last
    bit), so that the second rounding, to 29 bits less, is the only one that counts.
    """
    product, c = a.astype("f8") * b.astype("f8"), c.astype("f8")
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view("i8")
    step = np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & 1 == 0)
    return np.where(inexact, bits + step, bits).view("f8").astype("f4")


def _saturated(x: np.ndarray, largest: float, dtype, nan: int) -> np.ndarray:
    codes = np.clip(x, -largest, largest).astype(dtype).view(U8)
    return np.where(np.isnan(x), U8(nan), codes)


def e2m1(x: np.ndarray) -> np.ndarray:
    return _saturated(x, 6, ml_dtypes.float4_e2m1fn, 7) & U8(15)


def e4m3(x: np.ndarray) -> np.ndarray:
    return _saturated(x, 448, ml_dtypes.float8_e4m3fn, 0x7F)


HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def _half_bits(x: np.ndarray, kind: str) -> np.ndarray:
    return np.where(np.isnan(x), U16(0x7FFF), x.astype(HALVES[kind]).view(U16))


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(U32) | high.astype(U32) << U32(16)


def _extreme(name: str, modifiers: tuple, values: list[np.ndarray], infinity: int) -> np.ndarray:
    """min or max of floats given as bits: NaN loses, or wins with .NaN; -0 is below 0."""
    kind = values[0].dtype.type
    sign = kind(1 << (8 * values[0].dtype.itemsize - 1))
    nan_bits = kind(int(sign) - 1)
    result = values[0]
    for value in values[1:]:
        a, b = result, value
        flip = kind(0)
        if "xorsign" in modifiers:
            flip = (a ^ b) & sign
            a, b = a & ~sign, b & ~sign
        nan_a, nan_b = (a & ~sign) > infinity, (b & ~sign) > infinity
        # Negative floats order against their bits.
        key_a, key_b = (np.where(v & sign, ~v, v | sign) for v in (a, b))
        first = key_a >= key_b if name == "max" else key_a <= key_b
        result = np.where(first, a, b)
        if "NaN" in modifiers:
            result = np.where(nan_a | nan_b, nan_bits, result)
        else:
            result = np.where(
                nan_a & nan_b, nan_bits, np.where(nan_a, b, np.where(nan_b, a, result))
            )
        result = (result | flip).astype(kind)
    return result


def _compare(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    nan = np.zeros(1, bool)
    if a.dtype.kind == "f":
        nan = np.isnan(a) | np.isnan(b)
        if how in ("num", "nan"):
            return nan == (how == "nan")
    unordered = a.dtype.kind == "f" and how.endswith("u") and how != "u"
    how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how[:-1] if unordered else how)
    functions = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less,
        "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip
    if how not in functions:
        raise Error(f"unknown comparison {how}")
    result = functions[how](a, b)
    return result | nan if unordered else result & ~nan


# ---- Execution


@dataclasses.dataclass
class Result:
    """What a launch did."""

    warp_instructions: int
    executed: set[int]  # positions of instructions
    sectors: dict[str, list[int]]  # of a global access: [bytes used, sectors, bytes of a thread]


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    threads: int,
    parameters: bytes,
    memory: Memory,
    dynamic_shared: int = 0,
) -> Result:
    return _Grid(kernel, grid, threads, parameters, memory, dynamic_shared).run()


class _Grid:
    def __init__(self, kernel, grid, threads, parameters, memory, dynamic_shared):
        if len(parameters) < kernel.parameter_bytes:
            raise Error(f"{kernel.name} has {kernel.parameter_bytes} bytes of parameters")
        self.kernel, self.grid, self.threads, self.memory = kernel, grid, threads, memory
        self.parameters = np.frombuffer(parameters, U8)
        self.blocks = int(np.prod(grid))
        self.n = threads * self.blocks
        self.all = np.arange(self.n)
        self.thread, self.block = self.all % threads, self.all // threads
        self.warps = self.block * -(-threads // WARP) + self.thread // WARP
        dynamic = [kernel.shared[n] for n in kernel.shared]
        self.shared_bytes = max([kernel.shared_bytes, *dynamic]) + dynamic_shared
        size = self.blocks * self.shared_bytes
        self.shared = np.full(size, 0xFF, U8)
        self.shared_written = np.zeros(size, bool)
        # Who touched a byte since the block's last barrier: -1 nobody, -2 several.
        self.shared_writer, self.shared_reader = np.full((2, size), -1, np.int64)
        self.registers: dict[str, np.ndarray] = {}
        self.result = Result(0, set(), {})
        self.mask = np.ones(self.n, bool)
        for buffer in memory.buffers:
            buffer.writer[:] = -1

    # -- Control

    def run(self) -> Result:
        code, end = self.kernel.code, len(self.kernel.code)
        pc = np.zeros(self.n, np.int64)
        at_barrier, for_lanes = np.zeros((2, self.n), bool)  # who waits
        targets = set(self.kernel.labels.values())
        with np.errstate(all="ignore"):
            while True:
                where = np.where(at_barrier | for_lanes, end, pc)
                at = int(where.min())
                if at == end:
                    if for_lanes.any():
                        raise Error(
                            f"lanes of the mask are elsewhere: {code[pc[for_lanes][0]].text}"
                        )
                    if not at_barrier.any():
                        return self.result
                    self.pass_barrier(pc, at_barrier)
                    continue
                here = where == at
                while True:  # a run of instructions for the same threads
                    instruction = code[at]
                    if instruction.name in COLLECTIVE:
                        here = here | (for_lanes & (pc == at))
                        pc[here] = at
                        for_lanes[here] = self.misses_lanes(instruction, here)
                        here = here & ~for_lanes
                        if not here.any():
                            break
                    active = here
                    if instruction.guard is not None:
                        guard = self.registers.get(instruction.guard)
                        if guard is None:
                            raise Error(f"a guard that was never written: {instruction.text}")
                        active = here & (guard ^ instruction.guard_inverted)
                    self.count(instruction, here)
                    at += 1
                    if instruction.name == "bra":
                        pc[here] = at
                        pc[active] = self.kernel.labels[instruction.operands[0]]
                        break
                    if instruction.name in ("ret", "exit"):
                        pc[here] = at
                        pc[active] = end
                        break
                    if instruction.name in ("bar", "barrier"):
                        if instruction.modifiers != ("sync",) or instruction.operands != ("0",):
                            raise Error(f"unknown barrier: {instruction.text}")
                        pc[here] = at
                        at_barrier |= active
                        break
                    self.mask = active
                    if active.any():
                        try:
                            self.execute(instruction)
                        except Error as error:
                            raise Error(f"{error}: {instruction.text}") from None
                    if at in targets:
                        pc[here] = at
                        break

    def pass_barrier(self, pc: np.ndarray, at_barrier: np.ndarray) -> None:
        """All threads wait at barriers or have ended."""
        waiting = at_barrier.reshape(self.blocks, self.threads)
        places = pc.reshape(self.blocks, self.threads)
        for block in np.flatnonzero(waiting.any(1)):
            if not waiting[block].all():
                raise Error("a barrier that not all threads reach: some have ended")
            if (places[block] != places[block, 0]).any():
                raise Error("a barrier that not all threads reach: some wait at another")
            part = slice(block * self.shared_bytes, (block + 1) * self.shared_bytes)
            self.shared_writer[part] = self.shared_reader[part] = -1
        at_barrier[:] = False

    def count(self, instruction: Instruction, here: np.ndarray) -> None:
        warps = len(np.unique(self.warps[here])) if not here.all() else self.n // WARP
        self.result.warp_instructions += warps
        self.result.executed.add(instruction.position)

    # -- Operands

    def get(self, operand: str, dtype) -> np.ndarray:
        """An operand of all threads, its bits taken as `dtype`; wider registers are cut."""
        dtype = np.dtype(dtype)
        if operand in self.kernel.registers:
            value = self.registers.get(operand)
            if value is None:
                raise Error(f"{operand} was never written")
            if PREDICATE in (dtype, value.dtype):
                if dtype != value.dtype:
                    raise Error("a predicate is no number")
                return value
            if value.dtype.itemsize < dtype.itemsize:
                raise Error(f"{operand} is too narrow")
            return value.astype(f"u{dtype.itemsize}", copy=False).view(dtype)
        value = self.constant(operand)
        if isinstance(value, np.ndarray):
            return value.astype(f"u{dtype.itemsize}").view(dtype)
        if dtype == PREDICATE:
            return np.full(self.n, bool(value))
        bits = value & (1 << 8 * dtype.itemsize) - 1
        return np.full(self.n, bits, f"u{dtype.itemsize}").view(dtype)

    def constant(self, operand: str):
        if match := SPECIAL.fullmatch(operand):
            if operand == "%laneid":
                return self.thread % WARP
            axis = "xyz".index(match[2])
            sizes = (
                (self.threads, 1, 1) if "tid" in match[1] and "cta" not in match[1] else self.grid
            )
            if match[1].startswith("n"):
                return sizes[axis]
            index = self.thread if match[1] == "tid" else self.block
            return index // int(np.prod(sizes[:axis])) % sizes[axis]
        if operand in self.kernel.shared:
            return self.kernel.shared[operand]
        if operand in self.kernel.parameters:
            return self.kernel.parameters[operand]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return int(operand[2:], 16)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return int(operand.rstrip("U"), 0)
        raise Error(f"unknown operand {operand}")

    def set(self, register: str, value: np.ndarray) -> None:
        if register == "_":
            return
        if register not in self.kernel.registers:
            raise Error(f"unknown register {register}")
        kind = TYPES[self.kernel.registers[register]]
        if (kind == PREDICATE) != (value.dtype == PREDICATE):
            raise Error(f"a predicate is no number: {register}")
        if kind != PREDICATE:
            if value.dtype.itemsize > kind.itemsize:
                raise Error(f"{register} is too narrow")
            if value.dtype.itemsize < kind.itemsize and value.dtype.kind == "i":
                value = value.astype(f"i{kind.itemsize}")
            value = value.view(f"u{value.dtype.itemsize}").astype(f"u{kind.itemsize}", copy=False)
        old = self.registers.get(register)
        if old is None or self.mask.all():
            self.registers[register] = np.array(value)
        else:
            self.registers[register] = np.where(self.mask, value, old)

    # -- Instructions

    def execute(self, instruction: Instruction) -> None:
        method = getattr(self, f"do_{instruction.name}", None)
        if method is None:
            raise Error("unknown instruction")
        method(list(instruction.modifiers), instruction.operands, instruction)

    @staticmethod
    def known(modifiers: list[str], *allowed: str) -> None:
        if unknown := set(modifiers) - set(allowed):
            raise Error(f"unknown modifier {sorted(unknown)[0]}")

    def arithmetic(self, name: str, m: list[str], o: tuple) -> None:
        functions = {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
            "div": lambda a, b: a / b, "fma": fma,
        }  # fmt: skip
        self.known(m[:-1], "rn", "f32")
        if "rn" not in m and name in ("div", "fma"):
            raise Error("unknown rounding")
        if m[-1] == "f32x2":
            values = [self.get(x, U64).view("f4").reshape(-1, 2) for x in o[1:]]
            halves = [functions[name](*(v[:, i] for v in values)) for i in (0, 1)]
            self.set(o[0], np.stack(halves, 1).reshape(-1).view(U64))
        elif m[-1] in HALVES:  # two halves or one, and a float32
            if "f32" not in m:
                raise Error("unknown type")
            halves = [self.get(x, U16).view(HALVES[m[-1]]).astype("f4") for x in o[1:-1]]
            self.set(o[0], functions[name](*halves, self.get(o[-1], "f4")))
        elif m[-1] == "f32":
            self.set(o[0], functions[name](*(self.get(x, "f4") for x in o[1:])))
        else:
            raise Error("unknown type")

    def integer(self, name: str, m: list[str], o: tuple) -> None:
        kind = TYPES[m[-1]]
        a, b = self.get(o[1], kind), self.get(o[2], kind)
        if name in ("mul", "mad"):
            self.known(m[:-1], "lo", "wide", "hi")
            if "wide" in m or "hi" in m:
                if kind.itemsize > 4:
                    raise Error("unknown width")
                wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
                product = a.astype(wide) * b.astype(wide)
                if "hi" in m:
                    product = (product >> wide.type(8 * kind.itemsize)).astype(kind)
            else:
                product = a * b
            if name == "mad":
                product = product + self.get(o[3], product.dtype)
            self.set(o[0], product)
            return
        self.known(m[:-1])
        if name in ("div", "rem"):
            if (b[self.mask] == 0).any():
                raise Error("a division by zero")
            divisor = np.where(b == 0, kind.type(1), b)
            quotient = np.abs(a) // np.abs(divisor) if kind.kind == "i" else a // divisor
            if kind.kind == "i":
                quotient = np.where((a < 0) != (divisor < 0), -quotient, quotient)
            self.set(o[0], (quotient if name == "div" else a - quotient * divisor).astype(kind))
        else:
            functions = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
            self.set(o[0], functions[name](a, b))

    def _number(name):  # noqa: N805
        def do(self, m, o, _):
            is_float = m[-1] not in TYPES or m[-1] == "f32"
            (self.arithmetic if is_float else self.integer)(name, m, o)

        return do

    do_add, do_sub, do_mul, do_div, do_fma, do_mad, do_rem = map(
        _number, ("add", "sub", "mul", "div", "fma", "mad", "rem")
    )

    def do_rcp(self, m, o, _):
        if m != ["rn", "f32"]:
            raise Error("unknown rounding")
        self.set(o[0], np.float32(1) / self.get(o[1], "f4"))

    def _extremes(name):  # noqa: N805
        def do(self, m, o, _):
            if m[-1] in ("f16x2", "bf16x2"):
                self.known(m[:-1], "NaN", "xorsign", "abs")
                infinity = 0x7C00 if m[-1] == "f16x2" else 0x7F80
                words = [self.get(x, U32) for x in o[1:]]
                low = _extreme(name, m, [w.astype(U16) for w in words], infinity)
                high = _extreme(name, m, [(w >> U32(16)).astype(U16) for w in words], infinity)
                self.set(o[0], _join(low, high))
            elif m[-1] == "f32":
                self.known(m[:-1], "NaN")
                self.set(o[0], _extreme(name, m, [self.get(x, U32) for x in o[1:]], 0x7F800000))
            else:
                self.integer(name, m, o)

        return do

    do_min, do_max = map(_extremes, ("min", "max"))

    def do_abs(self, m, o, _):
        if m != ["f32"]:
            raise Error("unknown type")
        self.set(o[0], self.get(o[1], U32) & U32(0x7FFFFFFF))

    def do_neg(self, m, o, _):
        if m == ["f32"]:
            self.set(o[0], self.get(o[1], U32) ^ U32(0x80000000))
        else:
            self.known(m[1:])
            self.set(o[0], -self.get(o[1], TYPES[m[0]]))

    def _bitwise(function):  # noqa: N805
        def do(self, m, o, _):
            self.known(m[1:])
            self.set(o[0], function(*(self.get(x, TYPES[m[0]]) for x in o[1:])))

        return do

    do_and, do_or, do_xor, do_not = map(
        _bitwise, (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert)
    )

    def do_shl(self, m, o, _):
        kind = TYPES[m[0]]
        bits = 8 * kind.itemsize
        by = self.get(o[2], U32)
        value = self.get(o[1], kind) << np.minimum(by, bits - 1).astype(kind)
        self.set(o[0], np.where(by >= bits, kind.type(0), value))

    def do_shr(self, m, o, _):
        kind = TYPES[m[0]]
        bits = 8 * kind.itemsize
        by = self.get(o[2], U32)
        value = self.get(o[1], kind) >> np.minimum(by, bits - 1).astype(kind)
        self.set(o[0], value if kind.kind == "i" else np.where(by >= bits, kind.type(0), value))

    def do_shf(self, m, o, _):
        self.known(m, "l", "r", "wrap", "b32")
        low, high, by = (self.get(x, U32).astype(U64) for x in o[1:])
        if "wrap" not in m:
            raise Error("unknown mode")
        both, by = high << U64(32) | low, by & U64(31)
        self.set(o[0], (both << by >> U64(32) if m[0] == "l" else both >> by).astype(U32))

    def do_lop3(self, m, o, _):
        self.known(m, "b32")
        a, b, c = (self.get(x, U32) for x in o[1:4])
        table = int(o[4], 0)
        result = np.zeros(self.n, U32)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.set(o[0], result)

    def do_prmt(self, m, o, _):
        self.known(m, "b32")
        low, high, selector = (self.get(x, U32).astype(U64) for x in o[1:])
        both = high << U64(32) | low
        result = np.zeros(self.n, U32)
        for i in range(4):
            nibble = selector >> U64(4 * i) & U64(15)
            byte = both >> U64(8) * (nibble & U64(7)) & U64(255)
            byte = np.where(nibble & U64(8), U64(255) * (byte >> U64(7)), byte)
            result |= byte.astype(U32) << U32(8 * i)
        self.set(o[0], result)

    def do_bfe(self, m, o, _):
        self.known(m, "u32")
        position, length = (self.get(x, U32).astype(U64) & U64(255) for x in o[2:])
        field = (U64(1) << np.minimum(length, U64(32))) - U64(1)
        value = self.get(o[1], U32).astype(U64) >> np.minimum(position, U64(63))
        self.set(o[0], (value & field).astype(U32))

    def do_mov(self, m, o, _):
        kind = TYPES[m[0]]
        unsigned = kind if kind == PREDICATE else np.dtype(f"u{kind.itemsize}")
        if isinstance(o[1], tuple):
            part = np.dtype(f"u{kind.itemsize // len(o[1])}")
            parts = [self.get(x, part) for x in o[1]]
            self.set(o[0], np.stack(parts, 1).reshape(-1).view(unsigned))
        elif isinstance(o[0], tuple):
            part = np.dtype(f"u{kind.itemsize // len(o[0])}")
            parts = self.get(o[1], unsigned).view(part).reshape(self.n, -1)
            for i, register in enumerate(o[0]):
                self.set(register, np.ascontiguousarray(parts[:, i]))
        else:
            self.set(o[0], self.get(o[1], unsigned))

    def do_cvta(self, m, o, _):
        self.known(m, "to", "global", "u64")
        self.set(o[0], self.get(o[1], U64))

    def do_selp(self, m, o, _):
        kind = np.dtype(f"u{TYPES[m[0]].itemsize}")
        first, second = (self.get(x, kind) for x in o[1:3])
        self.set(o[0], np.where(self.get(o[3], bool), first, second))

    def do_setp(self, m, o, _):
        kind = TYPES[m[-1]]
        result = _compare(m[0], self.get(o[1], kind), self.get(o[2], kind))
        if len(m) == 3:
            combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[m[1]]
            inverted = o[3].startswith("!")
            result = combine(result, self.get(o[3].lstrip("!"), bool) ^ inverted)
        self.set(o[0], result)

    def do_cvt(self, m, o, _):
        to, source, how = m[-2], m[-1], m[:-2]
        if source == "f32" and to in ("e2m1x2", "e4m3x2") and how == ["rn", "satfinite"]:
            encode, bits, kind = (e2m1, 4, U8) if to == "e2m1x2" else (e4m3, 8, U16)
            high, low = (encode(self.get(x, "f4")).astype(kind) for x in o[1:])
            self.set(o[0], high << kind(bits) | low)
        elif source == "f32" and to in ("f16x2", "bf16x2") and how == ["rn"]:
            high, low = (_half_bits(self.get(x, "f4"), to[:-2]) for x in o[1:])
            self.set(o[0], _join(low, high))
        elif to == "f16x2" and source in ("e2m1x2", "e4m3x2") and how == ["rn"]:
            if source == "e2m1x2":
                codes = self.get(o[1], U8)
                parts = [codes & U8(15), codes >> U8(4)]
                dtype = ml_dtypes.float4_e2m1fn
            else:
                parts = list(self.get(o[1], U16).view(U8).reshape(-1, 2).T)
                dtype = ml_dtypes.float8_e4m3fn
            values = [np.ascontiguousarray(p).view(dtype).astype("f4") for p in parts]
            self.set(o[0], _join(*(_half_bits(v, "f16") for v in values)))
        elif to == "f32" and source in HALVES and not how:
            self.set(o[0], self.get(o[1], U16).view(HALVES[source]).astype("f4"))
        elif to in HALVES and source == "f32" and how == ["rn"]:
            self.set(o[0], _half_bits(self.get(o[1], "f4"), to))
        elif to == "f32" and source in TYPES and source != "f32" and how == ["rn"]:
            self.set(o[0], self.get(o[1], TYPES[source]).astype("f4"))
        elif to in TYPES and source in TYPES and "f32" not in (to, source) and not how:
            self.set(o[0], self.get(o[1], TYPES[source]).astype(TYPES[to]))
        else:
            raise Error("unknown conversion")

    # -- Memory

    def do_ld(self, m, o, instruction):
        count, kind = self.vector(m)
        size = count * kind.itemsize
        if m[0] == "param":
            where = np.where(self.mask, self.addresses(o[1]), 0)
            if (where < 0).any() or (where + size > self.kernel.parameter_bytes).any():
                raise Error("an access outside of the parameters")
            data = self.parameters[where[:, None] + np.arange(size)]
        else:
            data = np.zeros((self.n, size), U8)
            for source, index, on in self.access(m[0], o[1], size, False, instruction):
                data[on] = source[index]
        data = data.view(kind)
        for i, register in enumerate(o[0] if isinstance(o[0], tuple) else [o[0]]):
            self.set(register, np.ascontiguousarray(data[:, i]))

    def do_st(self, m, o, instruction):
        count, kind = self.vector(m)
        values = [self.get(x, kind) for x in (o[1] if isinstance(o[1], tuple) else [o[1]])]
        data = np.ascontiguousarray(np.stack(values, 1)).view(U8).reshape(self.n, -1)
        for to, index, on in self.access(m[0], o[0], count * kind.itemsize, True, instruction):
            to[index] = data[on]

    def vector(self, m: list[str]) -> tuple[int, np.dtype]:
        self.known(m[1:-1], "nc", "v2", "v4", "v8")
        return next((int(x[1:]) for x in m if re.fullmatch(r"v\d", x)), 1), TYPES[m[-1]]

    def addresses(self, address: Address) -> np.ndarray:
        base = address.base
        wide = (
            TYPES[self.kernel.registers[base]].itemsize == 8 if base in self.kernel.registers else 0
        )
        return self.get(base, U64 if wide else U32).astype(np.int64) + address.offset

    def access(self, space, address, size, write, instruction, atomic=False):
        """Checks the active threads' accesses; yields (bytes, index [threads, size], threads)."""
        where = self.addresses(address)
        on = np.flatnonzero(self.mask)
        if (where[on] % size).any():
            raise Error(f"a misaligned access of {size} bytes")
        span = np.arange(size)
        if space == "shared":
            if (where[on] < 0).any() or (where[on] + size > self.shared_bytes).any():
                raise Error("an access outside of shared memory")
            index = (self.block[on] * self.shared_bytes + where[on])[:, None] + span
            self.check_shared(index, on, write)
            yield self.shared, index, on
            return
        if space != "global":
            raise Error(f"unknown state space {space}")
        self.count_sectors(where, on, size, instruction)
        for start in np.unique(where[on] // Memory._SPACING):
            buffer = self.memory.find(start * Memory._SPACING)
            some = on[where[on] // Memory._SPACING == start]
            if buffer is None or (where[some] + size > buffer.address + buffer.data.size).any():
                raise Error("an access outside of all buffers")
            index = (where[some] - buffer.address)[:, None] + span
            if (not write or atomic) and not buffer.written[index].all():
                raise Error(f"a read of what was never written, in {buffer.name}")
            if not atomic:
                self.check_global(buffer, index, some, write)
            if write:
                buffer.written[index] = True
            yield buffer.data, index, some

    def check_global(self, buffer, index, threads, write):
        writer = buffer.writer[index]
        if ((writer != -1) & (writer != threads[:, None])).any():
            raise Error(f"two threads at one byte of {buffer.name}")
        if write:
            buffer.writer[index] = threads[:, None]
            if (buffer.writer[index] != threads[:, None]).any():
                raise Error(f"two threads write one byte of {buffer.name}")

    def check_shared(self, index, threads, write):
        me = np.broadcast_to(threads[:, None], index.shape)
        writer, reader = self.shared_writer[index], self.shared_reader[index]
        if ((writer != -1) & (writer != me)).any():
            raise Error("a race in shared memory: written by another thread")
        if write:
            if ((reader != -1) & (reader != me)).any():
                raise Error("a race in shared memory: read by another thread")
            self.shared_writer[index] = me
            if (self.shared_writer[index] != me).any():
                raise Error("a race in shared memory: two threads write")
            self.shared_written[index] = True
            return
        if not self.shared_written[index].all():
            raise Error("a read of shared memory that was never written")
        self.shared_reader[index] = np.where((reader == -1) | (reader == me), me, -2)
        several = index[self.shared_reader[index] != me]
        self.shared_reader[several] = -2

    def count_sectors(self, where, on, size, instruction):
        byte = (where[on][:, None] + np.arange(size)).reshape(-1)
        warp = np.repeat(self.warps[on], size)
        used = np.unique(np.stack([warp, byte], 1), axis=0)
        sectors = np.unique(np.stack([used[:, 0], used[:, 1] // SECTOR], 1), axis=0)
        counts = self.result.sectors.setdefault(instruction.text, [0, 0, size])
        counts[0] += len(used)
        counts[1] += len(sectors)

    def do_atom(self, m, o, instruction):
        m = [part for part in m if part not in ("relaxed", "gpu")]  # the defaults
        if m[0] != "global" or m[1] not in ("max", "add") or m[2] not in ("u32",):
            raise Error("unknown atomic")
        value, old = self.get(o[2], U32), np.zeros(self.n, U32)
        for data, index, on in self.access("global", o[1], 4, True, instruction, atomic=True):
            words = data.view(U32)
            for i, thread in enumerate(on):
                at = index[i, 0] // 4
                old[thread] = words[at]
                words[at] = (
                    max(words[at], value[thread]) if m[1] == "max" else words[at] + value[thread]
                )
        self.set(o[0], old)

    def do_red(self, m, o, instruction):
        self.do_atom(m, ("_", *o), instruction)

    # -- Warps

    def misses_lanes(self, instruction: Instruction, here: np.ndarray) -> np.ndarray:
        """Of threads that are `here`: whether lanes that their mask names are not."""
        if instruction.guard is not None:
            raise Error(f"unknown guard: {instruction.text}")
        lane = (self.thread % WARP).astype(U64)
        present = np.zeros(self.n // WARP, U64)
        np.bitwise_or.at(present, self.warps[here], U64(1) << lane[here])
        mask = self.get(instruction.operands[-1], U32)[here].astype(U64)
        if (mask >> lane[here] & U64(1) == 0).any():
            raise Error(f"a mask without the lane itself: {instruction.text}")
        return mask & ~present[self.warps[here]] != 0

    def do_shfl(self, m, o, _):
        if m[0] != "sync" or m[1] not in ("bfly", "idx", "down", "up") or m[2] != "b32":
            raise Error("unknown shuffle")
        to, predicate = o[0] if isinstance(o[0], tuple) else (o[0], None)
        mask = self.get(o[4], U32)
        lane = self.thread % WARP
        value, by, limits = (self.get(x, U32) for x in o[1:4])
        by, clamp, segment = by & 31, limits & 31, limits >> U32(8) & 31
        low = lane & segment
        high = low | (clamp & ~segment)
        source = {
            "bfly": lane ^ by, "idx": low | (by & ~segment),
            "down": lane + by.astype(np.int64), "up": lane - by.astype(np.int64),
        }[m[1]].astype(np.int64)  # fmt: skip
        inside = source >= high if m[1] == "up" else source <= high
        source = np.where(inside, source, lane)
        if (mask[self.mask] >> source[self.mask].astype(U32) & 1 == 0).any():
            raise Error("a shuffle from a lane that its mask does not name")
        self.set(to, value[self.all - lane + source])
        if predicate is not None:
            self.set(predicate, inside)

    def do_redux(self, m, o, _):
        if m != ["sync", "max", "u32"]:
            raise Error("unknown reduction")
        mask = self.get(o[2], U32)
        if (mask[self.mask] != 0xFFFFFFFF).any():
            raise Error("unknown mask")
        value = self.get(o[1], U32).reshape(-1, WARP).max(1)
        self.set(o[0], np.repeat(value, WARP))


def pack(*fields: tuple[str, object]) -> bytes:
    """A C struct: (format of `struct`, value) each, aligned as C does."""
    return struct.pack("@" + "".join(f for f, _ in fields), *(v for _, v in fields))
