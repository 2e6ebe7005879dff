"""fc1's product and its weight's gradient, alone, on one card: by grouped_triton.py in several
tiles, by torch, where that reads the offsets on the card, and by a loop over experts.

    python benchmarks/tiles.py
"""
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grouped
import kernels
from bench import (
    CARD, DEVICE, FP64_DEVICE, Candidate, Case, Report, check, layer_and_input, parser_of, run)

TILE = "ROWS", "COLUMNS", "INNER", "num_warps", "num_stages"        # of grouped_triton's kernels
TILES = [
    (32, 128, 32, 4, 4), (64, 64, 32, 4, 3), (64, 128, 32, 4, 4), (64, 128, 64, 4, 4),
    (128, 64, 32, 4, 4), (128, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]


def in_tiles(product: Callable, inputs: list[Tensor]) -> dict[str, Candidate]:
    """A product of grouped_triton.py in the tile that it chooses, and in those of TILES that fit
    into the card's shared memory."""
    from triton.runtime.errors import OutOfResources
    candidates = {"chosen": Candidate(product, inputs)}
    for sizes in TILES:
        candidate = Candidate(partial(product, **dict(zip(TILE, sizes))), inputs)
        try:
            candidate.step()
        except OutOfResources:
            continue
        candidates[", ".join(map(str, sizes))] = candidate
    return candidates


@torch.no_grad()
def bench_products(report: Report, case: Case) -> None:
    layer, x, _ = layer_and_input(case.config(), case.T)
    x_TH = x.detach().flatten(0, 1)
    _, indices_TK = layer.router.route(x_TH)
    plan = kernels.plan_permutation(indices_TK, case.E)
    rows = kernels.gather_rows(x_TH, plan)
    weights = layer.experts.fc1.detach().flatten(1, 2).mT
    grad = torch.randn(len(rows), weights.shape[2], dtype=case.dtype, device=DEVICE)
    triton = grouped._triton() if DEVICE == "cuda" else None
    by_torch = grouped.RowBlocks(plan.offsets, "torch") if grouped._native(rows, weights) else None
    by_loop = grouped.RowBlocks(plan.offsets.cpu())

    def compare(what, other, tiled, product):
        inputs = [rows, other]
        candidates = in_tiles(tiled, inputs) if triton else {}
        if by_torch:
            candidates["F.grouped_mm"] = Candidate(partial(product, blocks=by_torch), inputs)
        candidates["a loop"] = Candidate(partial(product, blocks=by_loop), inputs)
        right = product(*[x.to(FP64_DEVICE).double() for x in inputs], by_loop)
        check(candidates, [right], case.dtype)
        report.compare(case, what, candidates, ["a loop"])

    offsets = dict(offsets=plan.offsets)
    compare("rows x weights", weights, triton and partial(triton.rows_times_weights, **offsets),
            grouped.product)
    compare("rows x rows", grad,
            triton and partial(triton.rows_times_rows, exact=False, **offsets), grouped.weight_grad)


def bench_tiles(report: Report) -> None:
    for case in report.progress(report.cases(CARD)):
        bench_products(report, case)


if __name__ == "__main__":
    run(bench_tiles, parser_of(__doc__).parse_args())
