"""Runs Python as on a machine with one CUDA card, on a machine without: see card/README.md.

    python card/emulate.py [--capability 8,0] -m pytest test_moe.py
    python card/emulate.py [--capability 8,0] script.py

The memory of the card is the host's. Ops run on the CPU (device.cpp), and the kernels that
Inductor generates run in Triton's interpreter.
"""
import argparse
import contextlib
import functools
import gc
import hashlib
import importlib.machinery
import importlib.util
import multiprocessing.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "device.cpp"
MOST_ELEMENTS = 1 << 20         # of a block: few programs, since each is slow


# ---- Start: this Python again, with what torch has to find when it is imported ----

def torch_folder() -> Path:
    """The folder of this Python's torch. Ends the process where no card can be emulated."""
    spec = importlib.util.find_spec("torch")
    install = "pip install torch==2.13.0 triton==3.7.1"
    if spec is None:
        sys.exit(f"the emulated card needs a torch without CUDA: {install}")
    folder = Path(spec.origin).parent
    version = (folder / "version.py").read_text()
    if re.search(r"^(cuda|hip)\b.*= '", version, re.MULTILINE):
        found = re.search(r"__version__ = '(.+?)'", version)[1]
        sys.exit(f"the emulated card needs a torch without CUDA, and this one is {found}. "
                 f"Use a virtual environment: {install}")
    if importlib.util.find_spec("triton") is None:
        sys.exit(f"the emulated card needs Triton, whose interpreter runs its kernels: {install}")
    return folder


def build(kind: str, *flags: str) -> Path:
    """The shared library of device.cpp, built once for each torch: "preloaded" or "device"."""
    torch = torch_folder()
    sources = SOURCE.read_bytes() + bytes(torch) + (torch / "version.py").read_bytes()
    key = hashlib.sha256(sources).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"card-{os.getuid()}" / f"{kind}-{key}.so"
    if target.exists():
        return target
    if shutil.which("g++") is None:
        sys.exit("the emulated card needs g++, to build its device once")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    includes = torch / "include", torch / "include/torch/csrc/api/include"
    subprocess.run([
        "g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", SOURCE, "-o", unfinished, *flags,
        *[f"-I{folder}" for folder in (*includes, sysconfig.get_path("include"))],
        f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10"], check=True)
    unfinished.replace(target)
    return target


def start(capability: str) -> None:
    """Starts this Python again with the preloaded library, if that is not done yet."""
    if "CARD_PRELOAD" in os.environ:
        os.environ.pop("LD_PRELOAD")         # what this process starts goes without it
        return
    preload = str(build("preloaded", "-DPRELOADED"))
    os.environ.update(
        CARD_CAPABILITY=capability, CARD_PRELOAD=preload, LD_PRELOAD=preload,
        TRITON_INTERPRET="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        TORCHINDUCTOR_COMPILE_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# ---- Install: torch, Triton and Inductor see one card ----

@functools.cache
def install() -> None:
    """One card for this process. It has to be started with CARD_PRELOAD in LD_PRELOAD."""
    import torch
    path = build("device", "-DTORCH_EXTENSION_NAME=card_device", "-ltorch", "-ltorch_cpu",
                 "-ltorch_python")
    loader = importlib.machinery.ExtensionFileLoader("card_device", str(path))
    device = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(device)
    sys.modules["card_device"] = device
    capability = tuple(map(int, os.environ["CARD_CAPABILITY"].split(",")))
    properties = types.SimpleNamespace(
        name="emulated card", major=capability[0], minor=capability[1], total_memory=80 << 30,
        multi_processor_count=108, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936, L2_cache_size=40 << 20, gcnArchName="")
    install_cuda(torch, device, properties)
    install_storage(torch, device)
    install_interpreter(torch, device)
    install_triton(torch, properties)


def install_cuda(torch, device, properties):
    """What of torch.cuda asks a driver."""
    cuda = torch.cuda
    answers = dict(
        is_available=True, _is_compiled=True, is_initialized=True, _is_in_bad_fork=False,
        device_count=1, current_device=0, _exchange_device=0, _maybe_exchange_device=0,
        get_device_properties=properties, get_device_name=properties.name,
        get_device_capability=(properties.major, properties.minor), is_bf16_supported=True,
        is_current_stream_capturing=False, mem_get_info=(8 << 30, 8 << 30), _lazy_init=None,
        _get_device_properties=properties, set_device=None, synchronize=None, manual_seed=None,
        manual_seed_all=None, seed_all=None,
        empty_cache=None)
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    # Its random numbers are the CPU's.
    cuda.default_generators = (torch.default_generator,)
    torch.Generator = type("Generator", (torch.Generator,), {
        "__new__": lambda cls, device="cpu": super(torch.Generator, cls).__new__(cls)})
    cuda.get_rng_state = lambda device_=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device_=None: torch.set_rng_state(state)
    cuda.set_sync_debug_mode = lambda mode: device.warn_of_syncs(mode in (1, 2, "warn", "error"))
    cuda.memory_allocated = lambda device_=None: device.allocated()
    cuda.max_memory_allocated = lambda device_=None: device.peak()
    cuda.reset_peak_memory_stats = lambda device_=None: device.reset_peak()
    cuda.Stream = torch.Stream
    cuda.Event = torch.Event
    cuda.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    cuda.current_stream = lambda device_=None: torch.accelerator.current_stream()
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_synchronize = lambda: None
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda")


def install_storage(torch, device):
    """What Python asks of a storage: deepcopy clones it, pickle moves it, FSDP2 resizes it."""
    def whole(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def moved(storage, *, device, non_blocking=False):
        return whole(storage).to(device).untyped_storage()

    def resize(storage, size, elsewhere=torch.UntypedStorage.resize_):
        if storage.device.type != "cuda":
            return elsewhere(storage, size)
        device.resize_storage(whole(storage), size)
        return storage

    torch.UntypedStorage.resize_ = resize
    torch.UntypedStorage.to = moved
    torch.UntypedStorage.clone = lambda storage: whole(storage).clone().untyped_storage()


def install_triton(torch, properties):
    """A driver, which Inductor asks for the kind of the card."""
    import triton
    from triton.backends.compiler import GPUTarget
    target = GPUTarget("cuda", properties.major * 10 + properties.minor, 32)
    limits = {
        "max_shared_mem": properties.shared_memory_per_block_optin, "warpSize": 32,
        "multiprocessor_count": properties.multi_processor_count}
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, is_active=lambda: True,
        get_current_stream=lambda *args: 0, set_current_device=lambda *args: None,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits)))


# ---- The kernels that Inductor generates, in Triton's interpreter ----

def install_interpreter(torch, device):
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    folder = Path(tempfile.mkdtemp(prefix="card-kernels-"))
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
    AsyncCompile.triton = lambda self, name, source, device_str="cuda": Kernel(
        name, source, folder=folder, on_host=device.on_host)
    torch._inductor.config.shape_padding = False             # it would time products
    torch._functorch.config.graphsafe_rng_functionalization = False
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_helpers.libdevice = Libdevice()
    round_conversions(torch)
    run_kernels_of_ones_own(device)
    patch_once()


class Heuristics:
    """Takes the place of Inductor's triton_heuristics in the source of a kernel: its decorators
    keep what they are told.
    """

    def __getattr__(self, name):
        def heuristic(*args, **told):
            def decorate(function):
                function.told = told
                return function
            return decorate
        return heuristic


def power_of_two(n):
    return 1 << max(int(n) - 1, 0).bit_length()


def block_size(size, most):
    """A block for an axis. Where a block of up to 4096 divides the size, Inductor leaves out the
    mask; then the block has to divide it too.
    """
    divisor = size & -size
    if divisor >= 512:
        return min(divisor, most)
    return min(power_of_two(size), most, 4096)


class Kernel:
    """A generated kernel. `run` takes what the launcher of Inductor's generated code gives."""

    def __init__(self, name, source, folder, on_host):
        self.on_host = on_host
        source = source.replace(
            "import triton_helpers, triton_heuristics", "import triton_helpers")
        # Triton reads the source of a function from its file.
        module = types.ModuleType(f"{name}_{abs(hash(source)):x}")
        module.__file__ = str(folder / f"{module.__name__}.py")
        module.triton_heuristics = Heuristics()
        Path(module.__file__).write_text(source)
        sys.modules[module.__name__] = module
        exec(compile(source, module.__file__, "exec"), vars(module))
        self.function = getattr(module, name)

    def blocks(self, given):
        """The block of each axis, by name."""
        names = [name for name in self.function.arg_names if name not in given]
        told = self.function.told
        left = MOST_ELEMENTS
        if "R0_BLOCK" not in names:                  # a persistent reduction holds a whole row
            left //= power_of_two(told.get("size_hints", {}).get("r0_", 1))
        sizes = {}
        for name in sorted(names, key=lambda name: not name.startswith("R")):
            if name == "RSPLIT_SIZE":
                sizes[name] = power_of_two(told["inductor_meta"].get(name, 64))
            elif name == "NUM_STAGES":
                sizes[name] = 1
            else:
                axis = name.removesuffix("BLOCK").lower()
                size = given.get(f"{axis}numel", given.get(f"{axis}_numel", 1))
                sizes[name] = block_size(int(size), left)
                left = max(left // sizes[name], 1)
        return sizes

    def run(self, *args, stream=None, **kwargs):
        from torch._inductor.runtime.triton_heuristics import GridExpr
        names = self.function.arg_names
        given = {**dict(zip(names, args)), **kwargs}
        sizes = self.blocks(given)
        grid = GridExpr.from_meta(self.function.told["inductor_meta"], sizes, mode="python")
        scope = {**given, **sizes}
        for line in grid.prefix:
            exec(line, {}, scope)
        programs = [int(eval(str(n), {}, scope)) for n in (grid.x_grid, grid.y_grid, grid.z_grid)]
        if not all(programs):
            return
        values = [scope[name] for name in names]
        frees = "CARD_MEMORY" in os.environ
        if frees:
            gc.freeze()                              # so that collect() looks at new objects alone
        self.function[tuple(programs)](*[
            self.on_host(x) if hasattr(x, "data_ptr") else x for x in values])
        if frees:
            del values
            gc.collect()                             # the interpreter's cycles hold the buffers
            gc.unfreeze()


class Libdevice:
    """The functions of CUDA's libdevice that Inductor calls, by numpy."""

    def __getattr__(self, name):
        import numpy as np
        known = dict(
            rsqrt=lambda x: 1 / np.sqrt(x), sigmoid=lambda x: 1 / (1 + np.exp(-x)), pow=np.power,
            nearbyint=np.rint, llrint=np.rint)
        function = known.get(name) or getattr(np, name)

        def run(x, *others):
            from triton.language import block_type, int1, tensor
            from triton.runtime.interpreter import TensorHandle
            others = [y.handle.data if hasattr(y, "handle") else y for y in others]
            value = function(x.handle.data, *others)
            if value.dtype == bool:
                kind = block_type(int1, x.shape) if x.shape else int1
                return tensor(TensorHandle(value, int1), kind)
            value = value.astype(x.handle.data.dtype)
            return tensor(TensorHandle(value, x.handle.dtype), x.type)
        return run


def round_conversions(torch):
    """A card rounds where the interpreter cuts off (bf16) or loses the carry (fp8)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    convert = interpreter._convert_float
    rounded = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert_float(x, from_type, to_type, rounding_mode):
        if to_type in rounded and from_type == tl.bfloat16:
            x = convert(x, from_type, tl.float32, None)
            from_type = tl.float32
        if to_type not in rounded or from_type != tl.float32:
            return convert(x, from_type, to_type, rounding_mode)
        wide = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
        narrow = wide.to(rounded[to_type])
        bits = torch.int16 if narrow.itemsize == 2 else torch.uint8
        return narrow.view(bits).numpy().view(f"u{narrow.itemsize}")

    interpreter._convert_float = convert_float


def run_kernels_of_ones_own(device):
    """A kernel that is launched by hand works in the card's memory. The interpreter would copy its
    arguments to the host and back, and multiply the bits of bf16 as integers.
    """
    import numpy as np
    from triton.runtime import interpreter

    def init_args_hst(self, args, kwargs):
        def host(x):
            return device.on_host(x) if hasattr(x, "data_ptr") else x
        return [host(x) for x in args], {name: host(x) for name, x in kwargs.items()}

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        def wide(x):
            if x.dtype.scalar.is_bf16():
                return (x.data.astype(np.uint32) << 16).view(np.float32)
            return x.data.astype(np.float32)
        return interpreter.TensorHandle(wide(a) @ wide(b) + d.data, d.dtype.scalar)

    interpreter.GridExecutor._init_args_hst = init_args_hst
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_once():
    """At each call of a function within a kernel the interpreter replaces the language's functions
    again, which takes longer than the function. Once is enough for each module. Nor need each sum
    of integers be compared with one of 64 bits.
    """
    from triton.runtime import interpreter
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False)
    patched = set()

    def call(self, *args, **kwargs):
        module = self.fn.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


# ---- Command line ----

class Progress:
    """A plugin of pytest: after every tenth of the tests, how many are left and how long."""

    def pytest_collection_finish(self, session):
        self.start, self.count, self.done = time.monotonic(), len(session.items), 0
        self.terminal = session.config.pluginmanager.getplugin("terminalreporter")

    def pytest_runtest_logfinish(self):
        self.done += 1
        if self.done % (self.count // 10 or 1) == 0 and self.terminal:
            minutes = (time.monotonic() - self.start) / 60
            left = minutes / self.done * (self.count - self.done)
            self.terminal.ensure_newline()
            self.terminal.write_line(
                f"{self.done} of {self.count} tests in {minutes:.1f} min, about {left:.1f} left")


def main():
    parser = argparse.ArgumentParser(usage="emulate.py [--capability 8,0] (-m module | script) ..")
    parser.add_argument("--capability", default="9,0", help="9,0 is an H100, 8,0 an A100")
    parser.add_argument("-m", dest="run", action="store_const", const=runpy.run_module,
                        default=runpy.run_path, help="run a module, as python -m does")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    start(options.capability)
    # Before torch is imported: in this folder code.py would hide Python's module of that name.
    sys.path[0] = os.getcwd()
    install()
    sys.argv = [options.program, *options.arguments]
    if options.run is runpy.run_module and options.program == "pytest":
        import pytest
        sys.exit(pytest.main(options.arguments, plugins=[Progress()]))
    options.run(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
