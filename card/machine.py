"""The machine code of a kernel, generated or of grouped_triton.py. It needs no card, but Triton,
whose wheel has NVIDIA's assembler and disassembler.
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
# What multiplies: a tensor core (16 bits, or TF32), in code for several cards, or a thread (fp32).
MULTIPLY = r"HMMA|HGMMA|UTCHMMA|UTCQMMA|FFMA"


class Machine(NamedTuple):
    registers: int                           # of a thread
    spills: int                              # loads and stores of what has no register
    shared: int                              # bytes of a block's shared memory
    loads: dict[int, int]                    # bits that a thread loads at once -> instructions
    stores: dict[int, int]
    barriers: int                            # at which all threads of a block wait for each other
    before_loads: int                        # of them, with a load of the card's memory behind
    order: list[str]                         # the instructions of MEMORY and CONTROL, as they come
    copies: dict[int, int]                   # to shared memory, for which no thread waits
    multiplies: dict[str, int]               # instructions of MULTIPLY


def machine_code(source: str, capability: str) -> Machine:
    """Of a Triton kernel that Inductor wrote, with the first of the settings that it would try."""
    triton_helpers.libdevice = libdevice             # the emulated card has another
    name = re.search(r"@triton\.jit\s+def (\w+)\(", source)[1]
    kernel = getattr(PyCodeCache.load(source), name)
    meta = kernel._create_compile_meta(kernel.configs[0])
    options = kernel._create_compile_options(kernel.configs[0], meta)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    return disassembled(triton.compile(source, nvidia(capability), options))


# The kernels of grouped_triton.py, and what is constant in most calls: strides of 1, 64 experts.
PRODUCTS = {
    "_rows_times_weights_kernel": dict(EXPERTS=128, row_inner=1, weight_inner=1),
    "_rows_times_rows_kernel": dict(a_inner=1, b_inner=1),
}


def settings_of():
    """[(dtype, precision, settings) ..]: all that grouped_triton.tiles may choose."""
    import torch
    from grouped_triton import tiles
    listed = []
    for dtype, precision in [("bfloat16", "ieee"), ("float16", "ieee"), ("float32", "ieee"),
                             ("float32", "tf32")]:
        for rows in (1, 16, 32, 64, 128):
            settings = tiles(rows, 1, getattr(torch, dtype))
            if (dtype, precision, settings) not in listed:
                listed.append((dtype, precision, settings))
    return listed


def nvidia(capability: str) -> GPUTarget:
    major, minor = map(int, capability.split(","))
    return GPUTarget("cuda", 10 * major + minor, 32)


def product(name: str, dtype: str, target: GPUTarget, **settings):
    """A kernel of grouped_triton.py, compiled for rows and weights whose sizes are multiples of 16.
    The settings are the kernel's constants, num_warps and num_stages.
    """
    import grouped_triton
    kernel = getattr(grouped_triton, name)
    options = {key: settings.pop(key) for key in ("num_warps", "num_stages")}
    pointer = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    signature = {
        name: "constexpr" if name in settings else "*i32" if name == "offsets_ptr"
        else pointer if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    place = kernel.arg_names.index
    constants = {(place(name),): value for name, value in settings.items()}
    multiples = {
        (place(name),): [["tt.divisibility", 16]] for name in kernel.arg_names
        if name not in (*settings, "N", "E", "rows", "columns")}
    return triton.compile(ASTSource(kernel, signature, constants, multiples), target, options)


def disassembled(binary) -> Machine:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        used = printed(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        listing = printed(TOOLS / "nvdisasm", file.name)
    instructions = re.findall(            # an address in /* */, a predicate such as @!P0, an opcode
        rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?({MEMORY}|{CONTROL})\b([\w.]*)", listing, re.M)
    copies = re.findall(r"\bLDGSTS\b([\w.]*)", listing)
    multiplies = re.findall(rf"\b({MULTIPLY})2?\b", listing)
    order = [opcode + width(rest) for opcode, rest in instructions]
    if order[-1:] == ["BRA"]:
        order.pop()                          # a jump to itself behind the end
    count = collections.Counter(order)
    last_load = max((i for i, name in enumerate(order) if name.startswith("LDG")), default=0)
    return Machine(
        int(re.search(r"REG:(\d+)", used)[1]), len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        binary.metadata.shared, of_width(count, "LDG"), of_width(count, "STG"), count["BAR"],
        order[:last_load].count("BAR"), order,
        of_width(collections.Counter("LDGSTS" + width(rest) for rest in copies), "LDGSTS"),
        dict(collections.Counter(multiplies)))


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
