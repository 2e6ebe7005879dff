"""What a compiled module launches, forward and backward. Nothing is computed: the code that
Inductor has written runs on tensors without memory (fake tensors), and each of its kernels is
replaced by one that notes its arguments.
"""
import contextlib
import re
import types
from typing import NamedTuple
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Ops that multiply the rows of each expert: torch's, and those of this project where it has none.
GROUPED = (
    "_grouped_mm", "triton_rows_times_weights", "triton_rows_times_rows", "rows_times_weights",
    "rows_times_rows", "loop_over_experts")


class Launch(NamedTuple):
    name: str
    kind: str                                # "kernel" (generated), "op", "grouped" (a product)
    read: int                                # bytes
    written: int
    source: str = ""                         # of a kernel
    inside: tuple["Launch", ...] = ()        # of an op of this project: what its body launches


def nbytes(values) -> int:
    """Bytes of all tensors among the values. What is repeated by a stride of 0 counts once."""
    total = 0
    for x in tree_leaves(values):
        if isinstance(x, Tensor):
            repeats = [size for size, stride in zip(x.shape, x.stride()) if stride == 0]
            total += x.nbytes // max(torch.Size(repeats).numel(), 1)
    return total


class Kernel:
    """Takes the place of a generated kernel. Inductor names its tensors in_ptr0, out_ptr0 and
    in_out_ptr0. Its own name is set once the code with its launches has been read.
    """

    def __init__(self, source, parameters, noted):
        self.source, self.parameters, self.noted, self.name = source, parameters, noted, ""
        # A Triton kernel may write over a tensor that is no longer needed, without a read of it.
        self.unread = [name for name in parameters if name.startswith("in_out_")
                       and "@triton" in source and f"tl.load({name} " not in source]

    def __call__(self, *args, **kwargs):
        given = list(zip(self.parameters, args))
        read = [value for name, value in given
                if not name.startswith("out_") and name not in self.unread]
        written = [value for name, value in given if name.startswith(("out_", "in_out_"))]
        self.noted.append(Launch(self.name, "kernel", nbytes(read), nbytes(written), self.source))

    run = __call__                           # of a Triton kernel


def inside_of(op, args, kwargs) -> tuple[Launch, ...]:
    """What the body of an op of this project launches, if that does not depend on values."""
    defined = OPDEFS.get(f"{op.namespace}::{op._opname}")
    inside = []
    if defined is None:
        return ()
    try:
        with Ops(inside):
            defined._init_fn(*args, **kwargs)
    except DataDependentOutputException:     # a body that reads values: the loop of a sinkhorn
        return ()
    return tuple(inside)


class Ops(TorchDispatchMode):
    """Notes each op that is neither a view nor an allocation."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "aten":           # `to` is a view or a copy, `@` may be several ops
            with self:
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = op(*args, **kwargs)
        if op.is_view or op.namespace == "prim" or op._opname in ("empty_strided", "promote_types"):
            return result
        read, written = [], []
        for i, argument in enumerate(op._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes:
                written.append(value)
            # copy_after waits for made_before, and does not read it.
            if not argument.is_out and argument.name != "made_before":
                read.append(value)
        if not written:
            written.append(result)
        kind = "grouped" if op._opname in GROUPED else "op"
        name = f"{op.namespace}.{op._opname}"
        moved = nbytes(read), nbytes(written)
        inside = inside_of(op, args, kwargs) if kind == "op" else ()
        if inside:
            moved = sum(launch.read for launch in inside), sum(launch.written for launch in inside)
        self.noted.append(Launch(name, kind, *moved, inside=inside))
        return result


def part(x, size, stride, offset=0):
    return x.as_strided(size, stride, x.storage_offset() + offset)


def nothing(*args):
    pass


@contextlib.contextmanager
def noting():
    """Within, what Inductor generates runs without kernels. Yields {"forward": [Launch ..],
    "backward": [..]}, which fill while it runs.
    """
    launches = {"forward": [], "backward": []}
    noted = []

    def triton(self, name, source, device_str="cuda"):
        head = re.search(rf"def {name}\((.*?)\):", source, re.DOTALL)[1]
        return Kernel(source, re.findall(r"(\w+)(?: : tl.constexpr)?(?:, |$)", head), noted)

    def cpp(self, types, source):
        head = re.search(r"kernel\((.*?)\)", source, re.DOTALL)[1]
        return Kernel(source, re.findall(r"(\w+)(?:,|$)", head), noted)

    def compile_to_module(graph):
        code, _ = graph.codegen()
        module = types.ModuleType("generated")
        exec(code.value, vars(module))
        for name, value in vars(module).items():
            if isinstance(value, Kernel):
                value.name = name
        # These look at memory.
        vars(module).update(
            reinterpret_tensor=part, copy_if_misaligned=lambda x: x, assert_alignment=nothing,
            empty_strided_cpu=lambda size, stride, dtype: torch.empty_strided(
                size, stride, dtype=dtype))

        def call(args):
            with Ops(noted):
                result = module.call(args)
            launches["backward" if graph.is_backward else "forward"] += noted
            noted.clear()
            return result
        return types.SimpleNamespace(call=call, runner=None, __file__="generated.py")

    with (
        mock.patch.object(AsyncCompile, "triton", triton),
        mock.patch.object(AsyncCompile, "cpp_pybinding", cpp),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield launches


def launches_of(module, inputs) -> dict[str, list[Launch]]:
    """Of one step of torch.compile(module), with a gradient of the output. Call it, and make the
    module, in a FakeTensorMode.
    """
    torch._dynamo.reset()
    with noting() as launches:
        outputs = torch.compile(module, fullgraph=True)(*inputs)
        outputs = [y for y in tree_leaves(outputs) if isinstance(y, Tensor) and y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return launches
