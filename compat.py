"""What torch makes necessary: custom ops, casts, exact fp32 products, checks of shapes, and every
private name of torch that these files use. Open it where another file's call is not clear.
"""
import contextlib
import functools
import re
import threading

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import (
    guard_or_false, guard_scalar, statically_known_true)
from torch.utils.flop_counter import flop_registry, register_flop_formula


# Dynamo of torch 2.11 cannot trace is_autocast_available.
@torch.compiler.assume_constant_result
def has_autocast(device_type: str) -> bool:
    """Whether tensors on this type of device can be under autocast."""
    return torch.amp.is_autocast_available(device_type)


def without_autocast(x: Tensor):
    """A context without autocast for the device of x."""
    if not has_autocast(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def op(fake, mutates_args=(), cudagraph_unsafe=False, flops=None):
    """Decorator: registers a function as a custom op. Its annotations are the op's schema.

    The compiler calls the op as it is; autocast does not reach inside. `fake` takes the same
    arguments and returns empty results. cudagraph_unsafe: the host reads values in it, which a CUDA
    graph would not read again, so CUDA graphs leave it out. `flops` takes shapes in place of
    tensors and returns what torch.utils.flop_counter counts.
    """
    tags = [torch.Tag.cudagraph_unsafe] if cudagraph_unsafe else []

    def register(function):
        @functools.wraps(function)
        def body(*args, **kwargs):
            with op_without_autocast():
                return function(*args, **kwargs)

        # The name has the module's in it, so that copies of a file do not collide.
        namespace = "moe_" + re.sub(r"\W", "_", function.__module__, flags=re.ASCII)
        name = function.__name__.strip("_")
        registered = torch.library.custom_op(
            f"{namespace}::{name}", body, mutates_args=mutates_args, tags=tags)
        registered.register_fake(fake)
        if flops is not None:
            packet = getattr(getattr(torch.ops, namespace), name)
            if packet not in flop_registry:                # a module may be imported twice
                register_flop_formula(packet)(
                    lambda *args, out_shape, **kwargs: flops(*args, **kwargs))
        return registered

    return register


def first_derivative_only(backward):
    """Decorator for the backward of an autograd function: create_graph=True is a RuntimeError. A
    second derivative would treat what the forward kept as constants, and be wrong without an error.
    (torch's once_differentiable lets some cases pass. In compiled code torch raises an error.)
    """
    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_second_derivative(backward)
        return backward(ctx, *grads)

    return checked


def _refuse_second_derivative(backward):
    raise RuntimeError(
        f"create_graph is True, and {backward.__qualname__} has no derivative: this project has "
        f"only first derivatives. Leave create_graph out")


@op(lambda value, made_before: torch.empty_like(value))
def copy_after(value: Tensor, made_before: Tensor) -> Tensor:
    """A copy of value, which the compiler makes after the other tensor.

    So copy_after(value, grad) is made in the backward. Without it the compiler may compute things
    from `value` already in the forward, and keep them for the backward. If the value changes in
    between, as the loss scale may, it would be read too early.
    """
    return value.clone()


def cast(x, dtype):
    """x in dtype. (On torch 2.11 a compiled autograd function whose forward ends in x.to(x.dtype)
    gets wrong gradients.)
    """
    return x if x.dtype == dtype else x.to(dtype)


def upcast(x):
    """x in fp32 at least."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def check_known(name, value, known):
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known: {', '.join(map(repr, known))}")


def check_shapes(known: dict[str, int] | None = None, **tensors) -> None:
    """ValueError unless every tensor has the axes named for it; TypeError: no tensor.

    `check_shapes({"E": 4}, rows=(rows, "N H"), weights=(weights, "E H F"))`: a letter is the same
    size everywhere, `known` gives some sizes, and None is not checked.
    """
    sizes = dict(known or {})
    for name, (tensor, axes) in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; needs a tensor [{axes}]")
        letters = axes.split()
        found = dict(zip(letters, tensor.shape))
        needed = {**found, **sizes}
        if tensor.ndim != len(letters) or any(found[a] != needed[a] for a in found):
            _refuse_shape(name, tensor, letters, sizes)
        sizes = needed


def _refuse_shape(name, tensor, letters, sizes):
    needed = [f"{a} = {sizes[a]}" if a in sizes else a for a in letters]
    raise ValueError(f"{name} has shape {list(tensor.shape)}; needs [{', '.join(needed)}]")


def check_one_dtype(**tensors):
    if len({tensor.dtype for tensor in tensors.values() if tensor is not None}) > 1:
        _refuse_dtypes(tensors)


def _refuse_dtypes(tensors):
    found = [f"{name} is {x.dtype}" for name, x in tensors.items() if x is not None]
    raise TypeError(f"{', '.join(found)}; they need one dtype")


def is_integer(x: Tensor) -> bool:
    """Whether x has an integer dtype, which bool is not."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


_precision_lock = threading.Lock()                  # a backward has one per device
_PRECISIONS = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul


@contextlib.contextmanager
def exact_fp32():
    """fp32 products are in fp32 here, even if torch.set_float32_matmul_precision or torch.backends
    has replaced them by TF32 or bf16. For bodies of ops: a graph cannot change these global
    settings.

    A setting that allows less is set to IEEE during the product, and other threads see that. Then
    it gets its old value back. If the setting above it has the same value, it is inherited from
    there again, as if nobody had set it. The switch of XPUs, torch.backends.mkldnn.allow_tf32, is
    not changed.
    """
    with _precision_lock:
        found = [(setting, setting.fp32_precision) for setting in _PRECISIONS]
        lowered = [pair for pair in found if pair[1] not in ("ieee", "none")]
        try:
            for setting, _ in lowered:
                setting.fp32_precision = "ieee"
            yield
        finally:
            for setting, precision in lowered:
                setting.fp32_precision = "none"     # now it is inherited
                if setting.fp32_precision != precision:
                    setting.fp32_precision = precision


# ---- What the layer is not told: FSDP2's weights, and other ranks ----
# For all else about ranks the layer's files ask base.OneProcess, with one exception:
# kernels.get_updated_expert_bias sums over the group that it is given.

def is_in_parts(parameter: Tensor | None) -> bool:
    """Whether FSDP2 has replaced the parameter by a DTensor, and not gathered it for a call."""
    if parameter is None or type(parameter) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor
    return isinstance(parameter, DTensor)


def whole(parameter) -> Tensor | None:
    """The whole parameter. FSDP2 gathers it in a call of the module that it shards; if you call the
    router of a sharded layer directly, it is gathered here, and its gradient averaged.
    """
    if not is_in_parts(parameter):
        return parameter
    from torch.distributed.tensor import Partial
    average = [Partial("avg")] * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=average)


def own_part(parameter) -> tuple[Tensor, list[int]]:
    """(this rank's part of the parameter, where the part begins along each axis)."""
    if not is_in_parts(parameter):
        return parameter, [0] * parameter.ndim
    return parameter.to_local(), list(place_of_part(parameter))


def num_processes() -> int:
    """How many ranks torch.distributed has; 1 if it has not begun."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# ---- Private names of torch ----
# Those that only several ranks need are at the end of ranks/parallel.py and ranks/sharding.py, all
# others are here. test_sources_private_names_of_torch finds any that are elsewhere, and
# test_compile_private_names_of_torch finds what a new torch has changed.

def as_number(x: float) -> float:
    """x as a plain number: with dynamic=True Dynamo makes floats symbolic."""
    return guard_scalar(x)


def always_holds(condition: bool) -> bool:
    """Whether a condition on sizes holds in every run of this graph, without a guard; in eager mode
    the condition itself.
    """
    return statically_known_true(condition)


# Dynamo of torch 2.11 would trace it as True in every graph.
@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    return torch.compiler.is_exporting()


def is_decoding() -> bool:
    """Whether this is a graph without gradients."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def holds_in_this_graph(condition: bool) -> bool:
    """Whether a condition on sizes holds. For sizes where it does not, the compiler makes another
    graph. An export has one graph, so there the answer is whether it holds for all sizes. For a
    size that is known only when the graph runs, the answer is False.
    """
    return (statically_known_true if is_exporting() else guard_or_false)(condition)


def version_of(x: Tensor) -> int | None:
    """How often x was changed in place. None: x was made in inference mode, where nobody counts."""
    return None if x.is_inference() else x._version


# A context for the body of an op, on any device; Dynamo cannot trace it.
op_without_autocast = torch._C._DisableAutocast

# torch.utils.flop_counter has no formula for F.grouped_mm.
if torch.ops.aten._grouped_mm not in flop_registry:
    @register_flop_formula(torch.ops.aten._grouped_mm)
    def _flops_of_grouped_mm(a, b, *_, out_shape, **__):
        groups = a[0] if len(a) == len(b) == 3 else 1
        return 2 * groups * a[-2] * a[-1] * b[-1]


# () -> whether autocast is on for any type of device.
is_any_autocast = torch._C._is_any_autocast_enabled


def cpu_multiplies_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for bf16 or fp16. Nothing public says so."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], for an index that was made here: a graph does not check it. On a card a check is a
    barrier in front of each load.
    """
    if torch.compiler.is_compiling():
        return torch.ops.aten._unsafe_index(x, [index])
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def as_no_view(x: Tensor, shape) -> Tensor:
    """x in this shape, but no view to autograd: FSDP2 warns of modules that return views."""
    return torch.ops.aten._unsafe_view(x, shape)


def unchecked_side_effects(method):
    """Decorator of a method that writes to its module, which Dynamo refuses in a checkpointed
    region of a graph. It is safe: a recomputation writes the same, or a later step drops it.
    """
    @functools.wraps(method)
    def run(self, *args, **kwargs):
        return torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(
            method, self, *args, **kwargs)

    return run


def in_backward() -> bool:
    """Whether a node of autograd is running."""
    return torch._C._current_autograd_node() is not None


def with_fixed_address(tensor: Tensor) -> Tensor:
    """The tensor, with a shape and address on which the compiler may rely. Otherwise dynamic=True
    would tie its shape to an equal length of the first input.
    """
    torch._dynamo.mark_static_address(tensor, guard=False)
    torch._dynamo.mark_static(tensor)
    return tensor


def reads_on_host():
    """A context in which Dynamo traces `tolist`."""
    return torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True)


def makes_cuda_graphs() -> bool:
    """Whether what is being compiled becomes CUDA graphs."""
    from torch._inductor import config
    return config.triton.cudagraphs


def backward_order(node) -> int:
    """The sequence number of a node: of those that are ready, autograd takes the highest first."""
    return node._sequence_nr()


def set_backward_order(node, value: int) -> None:
    node._set_sequence_nr(value)


def has_values(x: Tensor) -> bool:
    """False on the meta device and under FakeTensorMode."""
    from torch._subclasses.fake_tensor import is_fake
    return not (x.is_meta or is_fake(x))


def place_of_part(parameter) -> tuple:
    """Where this rank's part of a DTensor begins along each axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    return compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements)[1]
