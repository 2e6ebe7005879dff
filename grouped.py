"""The grouped matrix product: row block e times matrix e, forward and backward, on every device.
Open it to see which product runs where.

On some cards and CPUs the product in bf16 is torch's own, F.grouped_mm, which reads the offsets on
their device. (If you call it yourself, mind that it leaves unrouted rows uninitialised, and that
the weight's gradient comes in the transposed layout.) Elsewhere the product is a custom op, which
copies the offsets to the host. On a CPU it multiplies expert after expert. On a card the launches
of so many small products would take longer than the products, so there it multiplies batches of
experts of similar size.
"""
import contextlib
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from .compat import (
        always_holds, check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32,
        once_differentiable, op, take_rows)
else:
    from compat import (
        always_holds, check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32,
        once_differentiable, op, take_rows)


# ---- The product ----

def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, H] · weights [E, H, F] -> [N, F]: row block e times weights[e].

    rows, weights and the result have one dtype, also under autocast. offsets [E] int32, ascending,
    are the ends of the row blocks (not checked: that would sync). Rows at or beyond offsets[-1]
    come out as zeros with zero gradients; an expert without rows gets a zero weight gradient.

    In bf16 this is F.grouped_mm, without a sync, on H100, H200, B200, B300 and on a CPU with matrix
    instructions for bf16, if H and F are multiples of 8, E is below 1024, and data pointers are
    multiples of 16 bytes (compiled code does not check these). Otherwise the forward copies the
    offsets to the host: the one sync of forward and backward.

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
    def forward(ctx, rows, weight, bias, native, offsets, index):
        ctx.native = native
        ctx.save_for_backward(rows, weight, offsets, index)
        return product(rows, weight.mT, RowBlocks(offsets, index, native), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, weight, offsets, index = ctx.saved_tensors
        blocks = RowBlocks(offsets, index, ctx.native)
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
        # rows, weight, bias, native, offsets, index
        return grad_rows, grad_weight, grad_bias, None, None, None


def linear(rows: Tensor, weight: Tensor, blocks: "RowBlocks", bias: Tensor | None = None) -> Tensor:
    """rows [N, I] -> [N, O]: weight[e] · row + bias[e] for the rows of expert e, weight [E, O, I],
    bias [E, O]. Unrouted rows are zeros without a gradient, or in both raw: see leaves_raw. blocks
    is what row_blocks returns, once for all products with these offsets.
    """
    return _Linear.apply(rows, weight, bias, blocks.native, blocks.offsets, blocks.index)


# ---- Which way: each product is native, or an op ----

class RowBlocks(NamedTuple):
    """The ends of the row blocks, where the products read them: on their device if the product is
    native, else on the host. With an index experts are multiplied in batches: see _read_in_batches.
    """
    offsets: Tensor
    index: Tensor | None = None
    native: bool = False


def row_blocks(offsets, num_rows, *operands):
    """The RowBlocks for products of the operands, N = num_rows rows, and of their gradients. If the
    offsets are copied to the host, this copy is the only sync of forward and backward.
    """
    # If there are no rows, Inductor gives a transposed operand strides that F.grouped_mm refuses.
    if _native(*operands) and not always_holds(num_rows == 0):
        return RowBlocks(offsets, native=True)
    if offsets.is_cpu:
        return RowBlocks(offsets)
    return RowBlocks(*_read_in_batches(offsets, num_rows))


def leaves_raw(blocks):
    """Whether products leave unrouted rows raw, holding anything: native ones in a graph do."""
    return blocks.native and torch.compiler.is_compiling()


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
    if blocks.native:
        return _native_product(rows, weights, blocks.offsets, bias)
    return _rows_times_weights(rows, weights, bias, blocks.offsets, blocks.index)


def weight_grad(a, b, blocks, exact=False):
    """(Row block e of a)ᵀ · row block e of b -> [E, I, O]. Unrouted rows belong to no block. Exact:
    fp32 is not rounded to TF32 or bf16, whatever torch.set_float32_matmul_precision says.
    """
    if blocks.native:
        return _native_weight_grad(a, b, blocks.offsets)
    return _rows_times_rows(a, b, blocks.offsets, blocks.index, exact=exact)


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


def _native_product(rows, weights, offsets, bias):
    out = F.grouped_mm(rows, weights, offs=offsets)
    if bias is not None:
        out = out + take_rows(bias, expert_of_rows(len(rows), offsets))
    # F.grouped_mm leaves unrouted rows uninitialised. In a graph they stay so: see zero_raw.
    return out if torch.compiler.is_compiling() else out.masked_fill(unrouted(out, offsets), 0.0)


def _native_weight_grad(a, b, offsets):
    grad = F.grouped_mm(a.t(), b, offs=offsets)
    # CUTLASS before 4.3 leaves empty blocks uninitialised (pytorch #172439).
    if _cuda_generation(offsets.device) == 10:
        grad = grad.masked_fill(rows_of_each(offsets)[:, None, None] == 0, 0.0)
    return grad


# ---- The rest: products that read the offsets on the host ----

@functools.cache
def _slow_on_cpu(dtype):
    """Whether this CPU lacks matrix instructions for dtype: then fp32 is 10 to 100 times as fast.
    """
    return dtype in (torch.bfloat16, torch.float16) and not cpu_multiplies_in(dtype)


def _mm(a, b, bias=None, out=None):
    """a · b + bias, for matrices or batches of them. Summed in fp32 at least, rounded once."""
    if a.is_cpu and _slow_on_cpu(a.dtype) and a.shape[-2] > 1:
        wide = _mm(a.float(), b.float(), bias if bias is None else bias.float())
        return wide.to(a.dtype) if out is None else out.copy_(wide)
    if bias is None:
        return torch.matmul(a, b, out=out)
    if a.ndim == 2:
        return torch.addmm(bias, a, b, out=out)
    return torch.baddbmm(bias[:, None], a, b, out=out)


@functools.lru_cache(maxsize=128)                # shared by the products of a forward
def _plan_batches(ends):
    """(alone, batches) of the offsets `ends`: every expert with rows is in one of them.

    An expert with a twelfth of all rows or more is alone. Of the others, the largest and all that
    have more than half as many rows are a batch for one torch.bmm, (experts, size): each expert has
    `size` slots, as many as the largest has rows. Then the same with those that are left.

    A product copies the rows and weights of one batch at a time. To bound this memory, a batch is
    cut into batches of at most a third of these experts, with slots for a third of all rows.
    """
    rows = {e: end - start for e, (start, end) in enumerate(zip((0, *ends), ends)) if end > start}
    alone = [e for e in rows if 12 * rows[e] >= ends[-1]]
    others = sorted(set(rows).difference(alone), key=lambda e: -rows[e])
    left = others
    batches = []
    while left:
        size = rows[left[0]]
        experts = sorted(e for e in left if 2 * rows[e] > size)
        left = left[len(experts):]
        most = math.ceil(min(len(others), ends[-1] / size) / 3)
        batches += [(experts[i:i + most], size) for i in range(0, len(experts), most)]
    return alone, batches


@op(lambda offsets, num_rows: (
        torch.empty_like(offsets, device="cpu"), offsets.new_empty(len(offsets) + 2 * num_rows)),
    cudagraph_unsafe=True)
def _read_in_batches(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(a copy of the offsets on the host, the index of the batches on the card).

    The index [E + 2·N] int32 holds the experts of all batches in order. From E on it holds the row
    of each of their slots, N if the slot is spare.
    """
    on_host = offsets.to("cpu", copy=True)
    ends = on_host.tolist()
    starts = [0, *ends]
    index = offsets.new_full((len(ends) + 2 * num_rows,), num_rows)
    table = []
    slot = 0
    for experts, size in _plan_batches(tuple(ends))[1]:
        for e in experts:
            table.append((e, slot + size, starts[e] - slot, ends[e]))
            slot += size
    if table:
        columns = torch.tensor(table, dtype=torch.int32, device="cpu").t().contiguous()
        # Except on CUDA and ROCm, a copy that does not block may read freed memory.
        columns = columns.to(offsets.device, non_blocking=offsets.is_cuda)
        id_n, slot_end_n, shift_n, row_end_n = columns.unbind()
        slot_l = torch.arange(slot, dtype=torch.int32, device=offsets.device)
        place_l = torch.bucketize(slot_l, slot_end_n, right=True)
        row_l = slot_l + shift_n[place_l]
        index[:len(id_n)] = id_n
        index[len(ends):][:slot] = row_l.masked_fill_(row_l >= row_end_n[place_l], num_rows)
    return on_host, index


def _alone(offsets, index):
    """[(expert, slice of its rows)] of the experts that have rows and are in no batch. On a CPU
    there is no index, so no batches.
    """
    ends = offsets.tolist()
    starts = 0, *ends
    alone = range(len(ends)) if index is None else _plan_batches(tuple(ends))[0]
    return [(e, slice(starts[e], ends[e])) for e in alone if ends[e] > starts[e]]


def _batches(offsets, index, num_rows):
    """For each batch (which, size, row_l, read_l): what selects its experts from [E, ..], the slots
    of each, the row of each slot, N if the slot is spare, and the row that it reads.
    """
    batches = [] if index is None else _plan_batches(tuple(offsets.tolist()))[1]
    if not batches:
        return
    id_E, row_L = index.long().tensor_split([len(offsets)])
    read_L = row_L.clamp(max=num_rows - 1)               # a spare slot reads some row
    place = slot = 0
    for experts, size in batches:
        places = slice(place, place + len(experts))
        slots = slice(slot, slot + len(experts) * size)
        place, slot = places.stop, slots.stop
        which = slice(experts[0], experts[-1] + 1)       # of neighbours no weight is copied
        if experts[-1] - experts[0] >= len(experts):
            which = id_E[places]
        yield which, size, row_L[slots], read_L[slots]


@op(lambda rows, weights, *_: rows.new_empty(rows.shape[0], weights.shape[2]),
    flops=lambda rows, weights, *_: 2 * rows[0] * math.prod(weights[1:]), cudagraph_unsafe=True)
def _rows_times_weights(
    rows: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, index: Tensor | None,
) -> Tensor:
    N = rows.shape[0]
    out = rows.new_empty(N if index is None else N + 1, weights.shape[2])
    for e, block in _alone(offsets, index):
        _mm(rows[block], weights[e], None if bias is None else bias[e], out=out[block])
    for which, size, row_l, read_l in _batches(offsets, index, N):
        gathered = rows.index_select(0, read_l).unflatten(0, (-1, size))
        products = _mm(gathered, weights[which], None if bias is None else bias[which])
        out.index_copy_(0, row_l, products.flatten(0, 1))    # what is spare to row N, not read
        del gathered, products                           # before the next batch needs memory
    out[offsets[-1]:].zero_()
    return out[:N]


@op(lambda a, b, offsets, *_, **__: a.new_empty(offsets.shape[0], a.shape[1], b.shape[1]),
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1], cudagraph_unsafe=True)
def _rows_times_rows(
    a: Tensor, b: Tensor, offsets: Tensor, index: Tensor | None, exact: bool,
) -> Tensor:
    out = a.new_empty(len(offsets), a.shape[1], b.shape[1])
    if 0 in rows_of_each(offsets):
        out.zero_()                                      # for experts without rows
    with exact_fp32() if exact else contextlib.nullcontext():
        for e, block in _alone(offsets, index):
            _mm(a[block].t(), b[block], out=out[e])
        for which, size, row_l, read_l in _batches(offsets, index, len(a)):
            spare_l1 = (row_l == len(a))[:, None]
            of_a, of_b = [
                x.index_select(0, read_l).masked_fill_(spare_l1, 0.0).unflatten(0, (-1, size))
                for x in (a, b)]
            out[which] = torch.bmm(of_a.mT, of_b)
            del of_a, of_b                               # before the next batch needs memory
    return out
