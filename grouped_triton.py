"""The grouped product as two kernels in Triton, for cards on which torch's own product would wait
for the host. They read the offsets on the card. grouped.py calls them; nothing else needs Triton.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor


def tiles(num_rows: int, num_experts: int, dtype: torch.dtype) -> dict[str, int]:
    """The settings of a kernel, by the rows of an expert's output: on average num_rows /
    num_experts in rows_times_weights, H in rows_times_rows. To change the settings, change this
    function. (`python benchmarks/tiles.py` times others.)

    A program computes a tile of ROWS x COLUMNS numbers and adds INNER products of each at a time.
    The sizes depend on nothing that a card or a clock says, so the same input gives the same bits.
    """
    wide = dtype == torch.float32
    rows = min(max(triton.next_power_of_2(num_rows // num_experts), 16), 64 if wide else 128)
    return dict(
        ROWS=rows, COLUMNS=64 if wide else 128, INNER=32, num_warps=8 if rows == 128 else 4,
        num_stages=3 if wide else 4)


def precision(dtype: torch.dtype, exact: bool = False) -> str:
    """How fp32 is multiplied: as torch's own products do it, if it need not be exact."""
    if dtype != torch.float32 or exact or torch.version.hip:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@triton.jit
def _find_tile(tile, offsets_ptr, N, E, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of rows, which has one expert. The
    unrouted rows are those of an expert E; a tile beyond them has no rows.
    """
    e = tl.arange(0, EXPERTS)                                       # EXPERTS > E
    start_e = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    start_e = tl.where(e > E, N, start_e)
    end_e = tl.load(offsets_ptr + e, mask=e < E, other=N)
    tiles_e = (end_e - start_e + ROWS - 1) // ROWS
    last_e = tl.cumsum(tiles_e, 0)
    expert = tl.sum((last_e <= tile).to(tl.int32), 0)
    first_e = start_e + (tile - last_e + tiles_e) * ROWS
    first = tl.sum(tl.where(e == expert, first_e, 0), 0)
    end = tl.sum(tl.where(e == expert, end_e, 0), 0)
    return expert, first, end


# Else Triton would compile once more when N is no multiple of 16.
@triton.jit(do_not_specialize=["N"])
def _rows_times_weights_kernel(
    rows_ptr, weights_ptr, offsets_ptr, out_ptr, N, H, F, E, columns,
    row_step, row_inner, weight_step, weight_inner, weight_column,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[n, f] = Σ_h rows[n, h] · weights[expert of n, h, f]; unrouted rows are zeros."""
    tile = tl.program_id(0)
    expert, first, end = _find_tile(tile // columns, offsets_ptr, N, E, EXPERTS, ROWS)
    n = first + tl.arange(0, ROWS)[:, None]
    f = tile % columns * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    h = tl.arange(0, INNER)
    # A row or an expert times its step may be beyond 2^31.
    a_ptrs = rows_ptr + n.to(tl.int64) * row_step + h[None, :] * row_inner
    b_ptrs = (weights_ptr + expert.to(tl.int64) * weight_step
              + h[:, None] * weight_inner + f * weight_column)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    inner = tl.where(expert < E, H, 0)
    for start in range(0, inner, INNER):
        a = tl.load(a_ptrs, mask=(n < end) & (start + h[None, :] < H), other=0.0)
        b = tl.load(b_ptrs, mask=(start + h[:, None] < H) & (f < F), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_ptrs += INNER * row_inner
        b_ptrs += INNER * weight_inner
    place = n.to(tl.int64) * F + f
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(n < end) & (f < F))


@triton.jit
def _rows_times_rows_kernel(
    a_ptr, b_ptr, offsets_ptr, out_ptr, H, F, rows, columns, a_step, a_inner, b_step, b_inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):
    """out[e, h, f] = Σ a[n, h] · b[n, f] over the rows n of expert e; zeros if it has none."""
    tile = tl.program_id(0)
    e = tile // (rows * columns)
    h = tile // columns % rows * ROWS + tl.arange(0, ROWS)[:, None]
    f = tile % columns * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets_ptr + e)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, end, INNER):
        n = start + tl.arange(0, INNER)
        n_wide = n.to(tl.int64)
        a = tl.load(a_ptr + n_wide[None, :] * a_step + h * a_inner,
                    mask=(n[None, :] < end) & (h < H), other=0.0)
        b = tl.load(b_ptr + n_wide[:, None] * b_step + f * b_inner,
                    mask=(n[:, None] < end) & (f < F), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = (e.to(tl.int64) * H + h) * F + f
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(h < H) & (f < F))


def rows_times_weights(rows: Tensor, weights: Tensor, offsets: Tensor, **settings) -> Tensor:
    """Row block e of rows [N, H] · weights[e] of [E, H, F] -> [N, F]; unrouted rows are zeros. Any
    strides; offsets [E] int32 on the same card. `settings` replace those of `tiles`.
    """
    (N, H), (E, _, F) = rows.shape, weights.shape
    out = rows.new_empty(N, F)
    settings = {**tiles(N, E, rows.dtype), **settings}
    columns = triton.cdiv(F, settings["COLUMNS"])
    most = triton.cdiv(N, settings["ROWS"]) + min(N, E)      # each may fill its last tile in part
    if most * columns:
        with torch.accelerator.device_index(rows.get_device()):
            _rows_times_weights_kernel[(most * columns,)](
                rows, weights, offsets.contiguous(), out, N, H, F, E, columns, *rows.stride(),
                *weights.stride(), EXPERTS=triton.next_power_of_2(E + 1),
                PRECISION=precision(rows.dtype), **settings)
    return out


def rows_times_rows(a: Tensor, b: Tensor, offsets: Tensor, exact: bool, **settings) -> Tensor:
    """(Row block e of a [N, H])ᵀ · row block e of b [N, F] -> [E, H, F]. Exact: fp32 is not rounded
    to TF32, whatever torch.set_float32_matmul_precision says.
    """
    E, H, F = len(offsets), a.shape[1], b.shape[1]
    out = a.new_empty(E, H, F)
    settings = {**tiles(H, 1, a.dtype), **settings}
    settings["COLUMNS"] = min(settings["COLUMNS"], max(triton.next_power_of_2(F), 16))
    rows, columns = triton.cdiv(H, settings["ROWS"]), triton.cdiv(F, settings["COLUMNS"])
    if out.numel():
        with torch.accelerator.device_index(a.get_device()):
            _rows_times_rows_kernel[(E * rows * columns,)](
                a, b, offsets.contiguous(), out, H, F, rows, columns, *a.stride(), *b.stride(),
                PRECISION=precision(a.dtype, exact), **settings)
    return out
