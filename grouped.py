"""The grouped matrix product: row block e times matrix e, forward and backward, on every kind of
device.
"""
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from .compat import (
        check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32, once_differentiable, op)
else:
    from compat import (
        check_one_dtype, check_shapes, cpu_multiplies_in, exact_fp32, once_differentiable, op)


def expert_of(row_TK, offsets):
    """[T, K]: the expert of each row number, E for unrouted rows."""
    return torch.bucketize(row_TK.t(), offsets, right=True).t()


# ---- Grouped matrix product: row block e times matrix e ----
# Torch's grouped product reads the offsets on some cards itself (see _native). Elsewhere the two
# products are custom ops, which read a copy of the offsets on the host. On a CPU they loop over the
# experts and gather the rows of one just before its product, while these are in the cache. Small
# blocks go to torch's own loop at once (see _loops_in_torch). On a card a loop would be bound by
# its launches, so experts of similar size are multiplied as one batch (see _plan_batches).
# The compiler sees no rows that an op has gathered, so it cannot keep them for the backward.

class Rows(NamedTuple):
    """The rows [N, ..] of a product: x, or with token_N the rows x[token_N]."""
    x: Tensor
    token_N: Tensor | None = None

    def count(self):
        rows = self.x if self.token_N is None else self.token_N
        return rows.shape[0]                 # len() would fix a symbolic size

    def block(self, start=0, end=None):
        """Rows start to end."""
        if self.token_N is None:
            return self.x[start:end]
        return self.x.index_select(0, self.token_N[start:end])

    def in_slots(self, row_L):
        """x, and the row of x for each slot; any for a spare slot."""
        source_L = row_L.clamp(max=self.count() - 1)
        if self.token_N is not None:
            source_L = self.token_N.index_select(0, source_L)
        return self.x, source_L


@functools.cache
def _slow_on_cpu(dtype):
    """Whether this CPU has no matrix instructions for dtype.

    A product then takes 10 to 100 times as long as one in fp32.
    """
    return dtype in (torch.bfloat16, torch.float16) and not cpu_multiplies_in(dtype)


def _mm(a, b, out, bias=None):
    """out = a · b (+ bias), summed in fp32 at least, rounded once."""
    if a.is_cpu and _slow_on_cpu(a.dtype) and a.shape[0] > 1:
        product = a.float() @ b.float()
        if bias is not None:
            product.add_(bias)
        out.copy_(product)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _aligned(*operands):
    """Whether widths and strides are multiples of 16 bytes, as torch's grouped product
    needs them.
    """
    for x in operands:
        steps = [step or 1 for step in x.stride() if step != 1]        # 0 as 1: it does not fit
        if any(size * x.itemsize % 16 for size in (*x.shape[1:], *steps)):
            return False
    return True


def _loops_in_torch(a, b, rows_each):
    """Whether torch's grouped product, which loops in C++ on a CPU, takes a and b and is faster
    than the loop here.

    It is if an expert has at most 64 KiB of rows on average: there the cost of the Python
    loop shows.
    """
    if a.dtype == torch.float64 or a.dtype != torch.float32 and _slow_on_cpu(a.dtype):
        return False
    row_bytes = a.itemsize * max(a.shape[-1], b.shape[-1])
    return rows_each * row_bytes <= 2 ** 16 and _aligned(a, b)


def _blocks(ends):
    """(expert, first row, end) of every expert, given the list of the offsets."""
    return zip(range(len(ends)), [0, *ends], ends)


class _Batch(NamedTuple):
    """Experts that one torch.bmm multiplies. Each has `rows` slots for its rows. Where it has
    fewer rows, its last slots are spare.
    """
    experts: list[int]         # ascending
    neighbours: slice | None   # the experts as a slice; None if a number between them is missing
    rows: int
    ids: slice                 # where they are among the experts of all batches
    slots: slice               # where their slots are among those of all batches

    def own(self, x, part):
        """[experts, rows, ..]: the slots of this batch in x, which has those of its part."""
        start = part[0].slots.start
        return x[self.slots.start - start:self.slots.stop - start].unflatten(0, (-1, self.rows))

    def select(self, weights, ids):
        """weights[experts], a copy only if they are no neighbours."""
        if self.neighbours is not None:
            return weights[self.neighbours]
        if weights.stride(2) != 1:
            return weights.mT.index_select(0, ids).mT    # copied as it lies in memory
        return weights.index_select(0, ids)


def _neighbours(experts):
    first, last = experts[0], experts[-1]
    return slice(first, last + 1) if last - first < len(experts) else None


@functools.lru_cache(maxsize=128)                # so that the products of one forward share it
def _plan_batches(ends):
    """(blocks, parts) of the offsets `ends`: every expert with rows is in one of them, once.

    An expert with a twelfth of all rows or more is a block, multiplied alone: see _blocks. The
    others form classes of similar size. A class takes experts in descending order, each with as
    many slots as its first has rows, while all slots so far are at most 1.3 times the rows.

    To bound the memory of a product, the slots are cut into parts, lists of batches. A part
    ends with the expert that completes a quarter of all slots, or four slots for each expert
    if that is more. A batch is of one class and one part. It has at most a third of the
    experts, unless they are neighbours, whose weights are not copied.
    """
    blocks = []
    rows_E = {}
    for e, start, end in _blocks(ends):
        rows = end - start
        if 12 * rows >= ends[-1] > 0:
            blocks.append((e, start, end))
        elif rows:
            rows_E[e] = rows

    classes = {}                                 # by size, which differs from class to class
    size = total = slots = 0
    for e in sorted(rows_E, key=rows_E.get, reverse=True):
        total += rows_E[e]
        if not classes or 10 * (slots + size) > 13 * total:
            size = rows_E[e]
        classes.setdefault(size, []).append(e)
        slots += size

    quarter = max(slots / 4, 4 * len(rows_E))
    most_copied = math.ceil(len(rows_E) / 3)
    parts = []
    left = 0                                     # of the quarter of this part
    ids = own_slots = slice(0, 0)
    for size, experts in classes.items():
        experts.sort()
        while experts:
            if left <= 0:
                parts.append([])
                left = quarter
            taken = experts[:math.ceil(left / size)]
            if _neighbours(taken) is None:
                taken = taken[:most_copied]
            experts = experts[len(taken):]
            ids = slice(ids.stop, ids.stop + len(taken))
            own_slots = slice(own_slots.stop, own_slots.stop + len(taken) * size)
            left -= len(taken) * size
            parts[-1].append(_Batch(taken, _neighbours(taken), size, ids, own_slots))
    return blocks, parts


@op(lambda offsets, num_rows: (
        torch.empty_like(offsets, device="cpu"),
        offsets.new_empty(len(offsets) + 13 * num_rows // 10)),
    cudagraph_unsafe=True)
def _read_in_batches(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(a copy of the offsets on the host, the index of the batches on the card).

    The index [E + L] int32 holds the experts of the batches in their order; and for each of
    L = 13 N // 10 slots its row, N for a spare slot. What has E entries is made on the host,
    what has L on the card.
    """
    on_host = offsets.to("cpu", copy=True)
    ends = tuple(on_host.tolist())
    starts = 0, *ends
    table = []
    slot = 0
    for batch in sum(_plan_batches(ends)[1], []):
        for e in batch.experts:
            table.append((e, slot + batch.rows, starts[e] - slot, ends[e]))
            slot += batch.rows
    # Slots beyond the last batch are those of an expert without rows.
    L = 13 * num_rows // 10
    table += [(0, L, 0, 0)] * (len(starts) - len(table))
    # Elsewhere than on CUDA and ROCm a copy that does not block may read freed memory.
    table = torch.tensor([*zip(*table)], dtype=torch.int32, device="cpu")
    table = table.to(offsets.device, non_blocking=offsets.is_cuda)
    experts_E, slot_ends_E, shifts_E, row_ends_E = table.unbind()

    slot_L = torch.arange(L, dtype=torch.int32, device=offsets.device)
    expert_L = torch.bucketize(slot_L, slot_ends_E, right=True)
    row_L = slot_L + shifts_E.index_select(0, expert_L)
    row_L.masked_fill_(row_L >= row_ends_E.index_select(0, expert_L), num_rows)
    return on_host, torch.cat((experts_E[:-1], row_L))


def _work(offsets, index):
    """(blocks, parts): what is multiplied alone, and what in batches. Without an index, which is
    on a CPU, nothing is a batch.
    """
    ends = offsets.tolist()
    return (_blocks(ends), []) if index is None else _plan_batches(tuple(ends))


def _multiply(rows, weights, bias, offsets, index):
    """The products of _rows_times_weights, but for unrouted rows. Spare slots write to row N."""
    blocks, parts = _work(offsets, index)
    N = rows.count()
    out = rows.x.new_empty(N + 1 if parts else N, weights.shape[2])
    for e, start, end in blocks:
        if start < end:
            bias_e = bias if bias is None else bias[e]
            _mm(rows.block(start, end), weights[e], out=out[start:end], bias=bias_e)
    if parts:
        expert_E, row_L = index.long().tensor_split([len(weights)])
        x, source_L = rows.in_slots(row_L)
    for part in parts:
        span = slice(part[0].slots.start, part[-1].slots.stop)
        block = x.index_select(0, source_L[span])
        product = out.new_empty(len(block), out.shape[1])
        for batch in part:
            ids = expert_E[batch.ids]
            factors = batch.own(block, part), batch.select(weights, ids)
            if bias is None:
                torch.bmm(*factors, out=batch.own(product, part))
            else:
                bias_b = bias.index_select(0, ids)[:, None]
                torch.baddbmm(bias_b, *factors, out=batch.own(product, part))
            del factors
        out.index_copy_(0, row_L[span], product)
        del block, product                               # before the next part needs memory
    return out[:N]


def _empty_product(x, token_N, weights, bias, offsets, index):
    return x.new_empty(Rows(x, token_N).count(), weights.shape[2])


def _product_flops(x, token_N, weights, *_):
    [rows] = token_N or x[:1]
    return 2 * rows * weights[1] * weights[2]


@op(_empty_product, cudagraph_unsafe=True, flops=_product_flops)
def _rows_times_weights(
    x: Tensor, token_N: Tensor | None, weights: Tensor, bias: Tensor | None, offsets: Tensor,
    index: Tensor | None,
) -> Tensor:
    rows = Rows(x, token_N)
    if index is None and bias is None and _loops_in_torch(x, weights, rows.count() / len(weights)):
        out = F.grouped_mm(rows.block(), weights, offs=offsets)
    else:
        out = _multiply(rows, weights, bias, offsets, index)
    out[offsets[-1]:].zero_()
    return out


def _multiply_rows(a, b, offsets, index):
    """The products of _rows_times_rows. Spare slots hold zeros."""
    blocks, parts = _work(offsets, index)
    out = a.x.new_empty(len(offsets), a.x.shape[1], b.x.shape[1])
    if index is not None and 0 in offsets.diff(prepend=offsets.new_zeros(1)):
        out.zero_()                                      # experts without rows are in no batch
    for e, start, end in blocks:
        _mm(a.block(start, end).t(), b.block(start, end), out=out[e])      # without rows: zeros
    if parts:
        expert_E, row_L = index.long().tensor_split([len(out)])
        spare_L1 = (row_L == a.count())[:, None]
        sources = a.in_slots(row_L), b.in_slots(row_L)
    for part in parts:
        span = slice(part[0].slots.start, part[-1].slots.stop)
        block_a, block_b = [
            x.index_select(0, source_L[span]).masked_fill_(spare_L1[span], 0.0)
            for x, source_L in sources]
        for batch in part:
            factors = batch.own(block_a, part).mT, batch.own(block_b, part)
            if batch.neighbours is None:
                out.index_copy_(0, expert_E[batch.ids], torch.bmm(*factors))
            else:
                torch.bmm(*factors, out=out[batch.neighbours])
        del block_a, block_b, factors                    # before the next part needs memory
    return out


def _empty_weight_grad(a, token_a, b, token_b, offsets, index):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _weight_grad_flops(a, token_a, b, *_):
    [rows] = token_a or a[:1]
    return 2 * rows * a[1] * b[1]


@op(_empty_weight_grad, cudagraph_unsafe=True, flops=_weight_grad_flops)
def _rows_times_rows(
    a: Tensor, token_a: Tensor | None, b: Tensor, token_b: Tensor | None, offsets: Tensor,
    index: Tensor | None,
) -> Tensor:
    rows_a, rows_b = Rows(a, token_a), Rows(b, token_b)
    if index is None and _loops_in_torch(a, b, rows_a.count() / len(offsets)):
        return F.grouped_mm(rows_a.block().t(), rows_b.block(), offs=offsets)
    return _multiply_rows(rows_a, rows_b, offsets, index)


@torch.compiler.assume_constant_result
def _cuda_generation(device):
    """The major number of the compute capability of a card from NVIDIA, else 0."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def _begins_aligned(x):
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


def _native(*operands):
    """Whether torch's grouped product takes the operands, rows or matrices [E, ..], as they
    are, and reads the offsets on the card.

    It does in bf16 on CUDA, not on ROCm, on compute capability 9.x and 10.x (H100, H200,
    B200, B300), with fewer than 1,024 matrices, if widths, strides and data pointers are
    multiples of 16 bytes. A graph cannot see data pointers: there they are assumed aligned.
    """
    for x in operands:
        if x.dtype != torch.bfloat16 or x.ndim == 3 and len(x) >= 1024:
            return False
        if not _begins_aligned(x):
            return False
    return _aligned(*operands) and _cuda_generation(operands[0].device) in (9, 10)


class Read(NamedTuple):
    """The offsets where the products read them: native on a card, else on the host. With an index
    (see _read_in_batches) the products are batches of experts.
    """
    offsets: Tensor
    index: Tensor | None = None
    native: bool = False


def where_read(offsets, num_rows, *operands):
    """The Read for products of the operands, and of their gradients, with N = num_rows rows.

    One copy and one index serve forward and backward of a layer. The copy is their one sync.
    """
    if offsets.is_cpu:
        return Read(offsets)
    if _native(*operands):
        return Read(offsets, native=True)
    return Read(*_read_in_batches(offsets, num_rows))


def _native_product(rows, weights, offsets, bias):
    out = F.grouped_mm(rows, weights, offs=offsets)
    if bias is not None:
        row_N = torch.arange(out.shape[0], device=out.device)
        expert_N = expert_of(row_N, offsets)
        out = out + bias[expert_N.clamp(max=len(offsets) - 1)]
    return out


def product(rows, weights, read, bias=None):
    """Row block e · weights[e] + bias[e] -> [N, O], for weights [E, I, O] and bias [E, O].
    Unrouted rows are zeros, but uninitialised where the product is native.
    """
    offsets, index, native = read
    if native:
        return _native_product(rows.block(), weights, offsets, bias)
    return _rows_times_weights(*rows, weights, bias, offsets, index)


def _native_weight_grad(a, b, offsets):
    grad = F.grouped_mm(a.t(), b, offs=offsets)
    # A CUTLASS before 4.3 leaves empty blocks uninitialised there (pytorch #172439).
    if _cuda_generation(offsets.device) == 10:
        rows_E = offsets.diff(prepend=offsets.new_zeros(1))
        grad = grad.masked_fill(rows_E[:, None, None] == 0, 0.0)
    return grad


def weight_grad(a, b, read):
    """(Row block e of a)ᵀ · row block e of b -> [E, I, O]. Unrouted rows belong to no block."""
    offsets, index, native = read
    if native:
        return _native_weight_grad(a.block(), b.block(), offsets)
    return _rows_times_rows(*a, *b, offsets, index)


# This is an op for exact_fp32: a sum is not rounded as products may be.
@op(lambda rows, offsets, index: rows.new_empty(offsets.shape[0], rows.shape[1]),
    cudagraph_unsafe=True)
@exact_fp32()
def _block_sums(rows: Tensor, offsets: Tensor, index: Tensor | None) -> Tensor:
    ones = rows.new_ones(rows.shape[0], 8)               # one column, and as many as are aligned
    return _rows_times_rows(rows, None, ones, None, offsets, index)[..., 0].clone()


def bias_grad(rows, read):
    """rows [N, O] -> [E, O]: the sum of each row block."""
    if not read.native:
        return _block_sums(rows, read.offsets, read.index)
    ones = rows.new_ones(rows.shape[0], 8)
    return _native_weight_grad(rows, ones, read.offsets)[..., 0]


def _zeroed_product(rows, weights, read):
    """The product of rows [N, I], with zeros from offsets[-1] on."""
    out = product(Rows(rows), weights, read)
    if read.native:
        row_N = torch.arange(out.shape[0], device=out.device)
        out = out.masked_fill((row_N >= read.offsets[-1])[:, None], 0.0)
    return out


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, offsets):
        read = where_read(offsets, rows.shape[0], rows, weights)
        ctx.native = read.native
        ctx.save_for_backward(rows, weights, read.offsets, read.index)
        return _zeroed_product(rows, weights, read)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, weights, *read = ctx.saved_tensors
        read = Read(*read, ctx.native)
        need_rows, need_weights, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        if not _begins_aligned(grad):
            grad = grad.clone()
        grad_rows = grad_weights = None
        # grad_rows = grad · weightsᵀ, grad_weights = rowsᵀ · grad
        if need_rows:
            grad_rows = _zeroed_product(grad, weights.mT, read)
        if need_weights:
            grad_weights = weight_grad(Rows(rows), Rows(grad), read)
        # rows, weights, offsets
        return grad_rows, grad_weights, None


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, H] · weights [E, H, F] -> [N, F]: row block e times weights[e].

    rows and weights have one dtype, which is the result's, also under autocast. offsets
    [E] int32 are the ends of the row blocks; they ascend. Rows at or beyond offsets[-1]
    come out as zeros and get zero gradients. An expert without rows gets a zero weight
    gradient.

    On H100, H200, B200 and B300, in bf16, with H and F multiples of 8 and E below 1024, this
    is torch.nn.functional.grouped_mm without a sync. It needs data pointers that are
    multiples of 16 bytes; compiled code does not check that. On other devices than the CPU
    the forward otherwise copies the offsets to the host, the one sync of forward and
    backward, and multiplies experts of similar size as one batch. That the offsets ascend and
    end within N is not checked: checking would sync too.

    >>> weights = torch.tensor([[[10.]], [[100.]]])
    >>> offsets = torch.tensor([1, 2], dtype=torch.int32)
    >>> grouped_mm(torch.tensor([[1.], [2.], [3.]]), weights, offsets).flatten()
    tensor([ 10., 200.,   0.])
    """
    check_shapes(rows=(rows, "N H"), weights=(weights, "E H F"), offsets=(offsets, "E"))
    check_one_dtype(rows=rows, weights=weights)
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets is {offsets.dtype}; needs torch.int32")
    return _GroupedMM.apply(rows, weights, offsets)
