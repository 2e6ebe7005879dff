"""The grouped matrix product: row block e times matrix e, forward and backward, on every device.
Open it to see which product runs where.

Three products do the work, and row_blocks chooses. F.grouped_mm is torch's own: in bf16, on a few
cards and CPUs. (If you call it yourself, mind that it leaves unrouted rows uninitialised, and that
the weight's gradient comes in the transposed layout.) grouped_triton.py is for other cards, dtypes
and sizes, where Triton has code for them. Both read the offsets on their device. A loop over
experts is for the rest; it copies the offsets to the host.
"""
import contextlib
import functools
import importlib
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from .compat import (
        always_holds, check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32,
        first_derivative_only, op, take_rows)
else:
    from compat import (
        always_holds, check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32,
        first_derivative_only, op, take_rows)


# ---- The product ----

def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, H] · weights [E, H, F] -> [N, F]: row block e times weights[e].

    rows, weights and the result have one dtype, also under autocast. offsets [E] int32, ascending,
    are the ends of the row blocks (not checked: that would sync). Rows at or beyond offsets[-1]
    come out as zeros with zero gradients; an expert without rows gets a zero weight gradient.

    In bf16 this is F.grouped_mm, without a sync, on H100, H200, B200, B300 and on a CPU with matrix
    instructions for bf16, if H and F are multiples of 8, E is below 1024, and data pointers are
    multiples of 16 bytes (compiled code does not check these). Otherwise it is Triton's, without a
    sync too, on CUDA (from compute capability 8.0), ROCm and XPU, except in fp64. Elsewhere, and
    without Triton, it is a loop over experts: on a device other than a CPU the forward copies the
    offsets to the host, the one sync of forward and backward.

    >>> weights = torch.tensor([[[10.]], [[100.]]])
    >>> offsets = torch.tensor([1, 2], dtype=torch.int32)
    >>> grouped_mm(torch.tensor([[1.], [2.], [3.]]), weights, offsets).flatten()
    tensor([ 10., 200.,   0.])
    """
    check_shapes(rows=(rows, "N H"), weights=(weights, "E H F"), offsets=(offsets, "E"))
    check_one_dtype(rows=rows, weights=weights)
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets is {offsets.dtype}; needs torch.int32")
    blocks = row_blocks(offsets, rows.shape[0], rows, weights)
    # The inner mask is for the gradient of the rows.
    return zero_raw(linear(zero_raw(rows, blocks), weights.mT, blocks), blocks)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, offsets, by):
        ctx.by = by
        ctx.save_for_backward(rows, weight, offsets)
        return product(rows, weight.mT, RowBlocks(offsets, by), bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        rows, weight, offsets = ctx.saved_tensors
        blocks = RowBlocks(offsets, ctx.by)
        need_rows, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        if not _begins_aligned(grad):
            grad = grad.clone()
        grad_rows = grad_weight = grad_bias = None
        # grad_rows = grad · weight, grad_weight = gradᵀ · rows, grad_bias = Σ grad
        if need_rows:
            grad_rows = product(grad, weight, blocks)
        if need_weight and weight.stride(-1) <= weight.stride(-2):
            grad_weight = weight_grad(grad, rows, blocks)
        elif need_weight:                                # the weight's layout is transposed
            grad_weight = weight_grad(rows, grad, blocks).mT
        if need_bias:
            grad_bias = bias_grad(grad, blocks)
        # rows, weight, bias, offsets, by
        return grad_rows, grad_weight, grad_bias, None, None


def linear(rows: Tensor, weight: Tensor, blocks: "RowBlocks", bias: Tensor | None = None) -> Tensor:
    """rows [N, I] -> [N, O]: weight[e] · row + bias[e] for the rows of expert e, weight [E, O, I],
    bias [E, O]. Unrouted rows are zeros with a zero gradient; in a graph both may be raw: see
    leaves_raw. blocks is what row_blocks returns, once for all products with these offsets.
    """
    return _Linear.apply(rows, weight, bias, *blocks)


# ---- Which way: torch's product, Triton's, or a loop ----

class RowBlocks(NamedTuple):
    """The ends of the row blocks, and which product they are for. "torch" is F.grouped_mm, "triton"
    is grouped_triton; both read the offsets on their device. "loop" is a product for each expert,
    with the offsets on the host.
    """
    offsets: Tensor
    by: str = "loop"


def row_blocks(offsets, num_rows, *operands):
    """The RowBlocks for products of the operands, N = num_rows rows, and of their gradients. If the
    offsets are copied to the host, this copy is the only sync of forward and backward.
    """
    # If there are no rows, Inductor gives a transposed operand strides that F.grouped_mm refuses.
    if _native(*operands) and not always_holds(num_rows == 0):
        return RowBlocks(offsets, "torch")
    if _has_triton_product(offsets.device, operands[0].dtype):
        return RowBlocks(offsets, "triton")
    return RowBlocks(offsets if offsets.is_cpu else _read_on_host(offsets))


def leaves_raw(blocks):
    """Whether unrouted rows of products may be raw, holding anything: in a graph, F.grouped_mm's
    are. (Those of Triton are zeros, which is not used: with the masks that raw rows need, Inductor
    writes the gradients of gate and up in one kernel.)
    """
    return blocks.by != "loop" and torch.compiler.is_compiling()


def zero_raw(rows, blocks):
    """rows with zeros in place of raw rows, and with zeros for their gradient.

    The compiler cannot fuse a product, so a mask behind each would be a kernel that reads and
    writes all rows. Behind an activation the mask is a part of the activation's kernel.
    """
    if leaves_raw(blocks):
        return rows.masked_fill(unrouted(rows, blocks.offsets), 0.0)
    return rows


def product(rows, weights, blocks, bias=None):
    """Row block e · weights[e] + bias[e] -> [N, O], for weights [E, I, O] and bias [E, O]. Unrouted
    rows are zeros, or raw: see leaves_raw.
    """
    offsets = blocks.offsets
    if blocks.by == "loop":
        return _rows_times_weights(rows, weights, bias, offsets)
    if blocks.by == "triton":
        out = _triton_rows_times_weights(rows, weights, offsets)
    else:
        out = F.grouped_mm(rows, weights, offs=offsets)
    if bias is not None:
        out = out + take_rows(bias, expert_of_rows(len(rows), offsets))
    # Unrouted rows are uninitialised by F.grouped_mm, and zeros by Triton until a bias is added.
    # In a graph they stay what they are: see zero_raw.
    if torch.compiler.is_compiling() or blocks.by == "triton" and bias is None:
        return out
    return out.masked_fill(unrouted(out, offsets), 0.0)


def weight_grad(a, b, blocks, exact=False):
    """(Row block e of a)ᵀ · row block e of b -> [E, I, O]. Unrouted rows belong to no block. Exact:
    fp32 is not rounded to TF32 or bf16, whatever torch.set_float32_matmul_precision says.
    """
    if blocks.by == "loop":
        return _rows_times_rows(a, b, blocks.offsets, exact=exact)
    if blocks.by == "triton":
        return _triton_rows_times_rows(a, b, blocks.offsets, exact=exact)
    grad = F.grouped_mm(a.t(), b, offs=blocks.offsets)
    # CUTLASS before 4.3 leaves empty blocks uninitialised (pytorch #172439).
    if _cuda_generation(blocks.offsets.device) == 10:
        grad = grad.masked_fill(rows_of_each(blocks.offsets)[:, None, None] == 0, 0.0)
    return grad


def bias_grad(rows, blocks):
    """rows [N, O] -> [E, O]: the sum of each row block, as a product, without atomics."""
    ones = rows.new_ones(rows.shape[0], 8)               # one column would do, and 8 are aligned
    return weight_grad(rows, ones, blocks, exact=True)[..., 0]


def rows_of_each(offsets):
    """offsets [E] -> how many rows each expert has, [E] int32."""
    return offsets.diff(prepend=offsets.new_zeros(1))


# ---- Native: torch's product, where it reads the offsets on their device ----

@torch.compiler.assume_constant_result
def _cuda_generation(device):
    """The major number of an NVIDIA card's compute capability, else 0."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    return torch.cuda.get_device_capability(device)[0]


@torch.compiler.assume_constant_result
def _has_native_product(device):
    """Whether torch's grouped product in bf16 is quick there and does not wait for the device."""
    if device.type == "cpu":
        return not _slow_on_cpu(torch.bfloat16)
    return _cuda_generation(device) in (9, 10)


def _begins_aligned(x):
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


def _native(*operands):
    """Whether torch's grouped product takes rows or matrices [E, ..] as they are: in bf16, E below
    1024, widths, strides and (in eager mode) addresses multiples of 16 bytes, on a device that has
    the product.
    """
    for x in operands:
        if x.dtype != torch.bfloat16 or x.ndim == 3 and len(x) >= 1024:
            return False
        steps = [step or 1 for step in x.stride() if step != 1]        # stride 0 is not aligned
        unaligned = any(size * x.itemsize % 16 for size in (*x.shape[1:], *steps))
        if unaligned or not _begins_aligned(x):
            return False
    return _has_native_product(operands[0].device)


def expert_of(row_TK, offsets):
    """[T, K]: the expert of each row number, E for unrouted rows."""
    return torch.bucketize(row_TK.t(), offsets, right=True).t()


def expert_of_rows(num_rows, offsets):
    """[N]: the expert of each row, for unrouted rows the last expert."""
    row_N = torch.arange(num_rows, dtype=torch.int32, device=offsets.device)
    return expert_of(row_N, offsets).clamp(max=len(offsets) - 1)


def unrouted(rows, offsets):
    """rows [N, ..] -> [N, 1] bool: whether a row is unrouted."""
    # amax is offsets[-1], written as a reduction, so that the gradients of gate and up depend on
    # one. Inductor then writes both in the kernel that computes them. Otherwise a second kernel
    # would join them, and read fc1's output again: see "What a card moves" in docs/compile.md.
    row_N = torch.arange(rows.shape[0], dtype=torch.int32, device=offsets.device)
    return (row_N >= offsets.amax())[:, None]


# ---- The shapes and the work of what follows ----

def _fake_product(rows, weights, *_):
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _fake_weight_grad(a, b, offsets, *_, **__):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _flops_of_product(rows, weights, *_):
    return 2 * rows[0] * math.prod(weights[1:])


def _flops_of_weight_grad(a, b, *_, **__):
    return 2 * a[0] * a[1] * b[1]


# ---- In Triton: products that read the offsets on their device ----

@functools.cache
def _triton():
    """grouped_triton.py, or None where there is no Triton or nobody copied that file."""
    try:
        return importlib.import_module(f"{__package__}.grouped_triton" if __package__
                                       else "grouped_triton")
    except ImportError:
        return None


@torch.compiler.assume_constant_result
def _has_triton_product(device, dtype):
    """Whether Triton's product runs there. For NVIDIA's cards before 8.0 its code would spill
    thousands of numbers.
    """
    if device.type not in ("cuda", "xpu") or dtype == torch.float64 or _triton() is None:
        return False
    return bool(device.type == "xpu" or torch.version.hip or _cuda_generation(device) >= 8)


@op(_fake_product, flops=_flops_of_product)
def _triton_rows_times_weights(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return _triton().rows_times_weights(rows, weights, offsets)


@op(_fake_weight_grad, flops=_flops_of_weight_grad)
def _triton_rows_times_rows(a: Tensor, b: Tensor, offsets: Tensor, exact: bool) -> Tensor:
    return _triton().rows_times_rows(a, b, offsets, exact)


# ---- The rest: a loop over experts, with the offsets on the host ----

@functools.cache
def _slow_on_cpu(dtype):
    """Whether this CPU lacks matrix instructions for dtype: then fp32 is 10 to 100 times as fast.
    """
    return dtype in (torch.bfloat16, torch.float16) and not cpu_multiplies_in(dtype)


def _mm(a, b, bias=None, out=None):
    """a · b + bias. Summed in fp32 at least, rounded once."""
    if a.is_cpu and _slow_on_cpu(a.dtype) and a.shape[-2] > 1:
        return out.copy_(_mm(a.float(), b.float(), bias if bias is None else bias.float()))
    if bias is None:
        return torch.matmul(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


@op(lambda offsets: torch.empty_like(offsets, device="cpu"), cudagraph_unsafe=True)
def _read_on_host(offsets: Tensor) -> Tensor:
    return offsets.to("cpu", copy=True)


def _blocks_with_rows(offsets):
    """[(expert, slice of its rows)] of the experts that have rows."""
    ends = offsets.tolist()
    blocks = enumerate(zip((0, *ends), ends))
    return [(e, slice(start, end)) for e, (start, end) in blocks if end > start]


@op(_fake_product, flops=_flops_of_product, cudagraph_unsafe=True)
def _rows_times_weights(
    rows: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor,
) -> Tensor:
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for e, block in _blocks_with_rows(offsets):
        _mm(rows[block], weights[e], None if bias is None else bias[e], out=out[block])
    out[offsets[-1]:].zero_()
    return out


@op(_fake_weight_grad, flops=_flops_of_weight_grad, cudagraph_unsafe=True)
def _rows_times_rows(a: Tensor, b: Tensor, offsets: Tensor, exact: bool) -> Tensor:
    out = a.new_empty(len(offsets), a.shape[1], b.shape[1])
    if 0 in rows_of_each(offsets):
        out.zero_()                                      # for experts without rows
    with exact_fp32() if exact else contextlib.nullcontext():
        for e, block in _blocks_with_rows(offsets):
            _mm(a[block].t(), b[block], out=out[e])
    return out
