"""The machine code of a generated kernel. It needs no card, but Triton, whose wheel has NVIDIA's
assembler and disassembler.
"""
import collections
import itertools
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_compat import libdevice
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MEMORY = r"LDG|STG|ATOMG?|RED|REDG"                   # of the card
CONTROL = r"BAR|BRA|CALL|WARPSYNC|BSSY|BSYNC"


class Machine(NamedTuple):
    registers: int                           # of a thread
    spills: int                              # loads and stores of what has no register
    shared: int                              # bytes of a block's shared memory
    loads: dict[int, int]                    # bits that a thread loads at once -> instructions
    stores: dict[int, int]
    barriers: int                            # at which all threads of a block wait for each other
    order: list[str]                         # the instructions of MEMORY and CONTROL, as they come


def machine_code(source: str, capability: str) -> Machine:
    """Of a Triton kernel that Inductor wrote, with the first of the settings that it would try."""
    triton_helpers.libdevice = libdevice             # the emulated card has another
    name = re.search(r"@triton\.jit\s+def (\w+)\(", source)[1]
    kernel = getattr(PyCodeCache.load(source), name)
    meta = kernel._create_compile_meta(kernel.configs[0])
    options = kernel._create_compile_options(kernel.configs[0], meta)
    major, minor = map(int, capability.split(","))
    binary = triton.compile(
        ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]),
        target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        used = printed(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        listing = printed(TOOLS / "nvdisasm", file.name)
    instructions = re.findall(            # an address in /* */, a predicate such as @!P0, an opcode
        rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?({MEMORY}|{CONTROL})\b([\w.]*)", listing, re.M)
    order = [opcode + width(rest) for opcode, rest in instructions]
    if order[-1:] == ["BRA"]:
        order.pop()                          # a jump to itself behind the end
    count = collections.Counter(order)
    return Machine(
        int(re.search(r"REG:(\d+)", used)[1]), len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        binary.metadata.shared, of_width(count, "LDG"), of_width(count, "STG"), count["BAR"], order)


def printed(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def width(rest: str) -> str:
    """Of what follows LDG or STG: .128, .64, .16, .8 or nothing, for 32 bits."""
    bits = re.search(r"\.(128|64|U16|S16|16|U8|S8|8)\b", rest)
    return "." + bits[1].lstrip("US") if bits else ""


def of_width(count, opcode) -> dict[int, int]:
    return {bits: count[name] for bits, name in (
        (128, f"{opcode}.128"), (64, f"{opcode}.64"), (32, opcode), (16, f"{opcode}.16"),
        (8, f"{opcode}.8")) if count[name]}


def in_short(order: list[str]) -> str:
    """The instructions in their order, eight of a kind as 8*LDG.128, in lines of 100 columns."""
    runs = [(name, len([*same])) for name, same in itertools.groupby(order)]
    words = [name if times == 1 else f"{times}*{name}" for name, times in runs]
    return textwrap.fill(" ".join(words), 100)
