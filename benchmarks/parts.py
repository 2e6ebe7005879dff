"""Parts of the layer: the permute part by indices and by maps, the router beside the whole layer,
and Hugging Face's experts in eager mode with our products and theirs (needs transformers).

    python benchmarks/parts.py
"""
import sys
from functools import partial
from pathlib import Path

import torch

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernels
import maps
from bench import (
    BF16, BOTH, DEVICE, FP64_DEVICE, HAS_TRANSFORMERS, MANY_EXPERTS, OURS, SHORT, Candidate, Case,
    Report, check, hugging_face_block, in_fp64, layer_and_input, loop_over_experts, parser_of, run,
    swiglu)
from models.experts import register_experts

EAGER_SIZES = MANY_EXPERTS, (512, 256, 96, 16, 4), (512, 64, 64, 16, 4)
EAGER = [Case(*sizes, dtype) for sizes in EAGER_SIZES for dtype in SHORT]
PERMUTE = [Case(*MANY_EXPERTS, dtype)._replace(E=E) for dtype in SHORT for E in (64, 256)]
ROUTER = [Case(*MANY_EXPERTS, BF16)._replace(E=256)]


def bench_permute(report: Report, case: Case) -> None:
    """permute, weighted SwiGLU, unpermute: [T, H] -> [N, H] -> [N, H/2] -> [T, H/2]. By indices and
    by maps, without the products."""
    _, x, _ = layer_and_input(case.config(), case.T)
    x = x.detach().flatten(0, 1).requires_grad_()
    grad = torch.randn_like(swiglu(x))
    scores_TE = torch.rand(case.T, case.E, device=DEVICE)
    probs_TK, indices_TK = scores_TE.topk(case.K)
    probs_TE, map_TE = kernels.routing_to_map(probs_TK, indices_TK, case.E)

    def index_path(x, probs_TK):
        plan = kernels.plan_permutation(indices_TK, case.E)
        weights = probs_TK.flatten()[plan.order]
        rows = kernels.activation(kernels.gather_rows(x, plan), weights=weights[:, None])
        return kernels.combine_rows(rows, plan)

    def map_path(x, probs_TE):
        N = case.T * case.K
        rows, weights, token = maps.permute(x, map_TE, probs_TE, num_out_tokens=N)
        rows = kernels.activation(rows, weights=weights[:, None])
        return maps.unpermute(rows, token, restore_shape=grad.shape)

    def right(mask, x, probs):
        return swiglu(x) * (mask * probs).sum(1, keepdim=True)

    candidates = {}
    wide_map = map_TE.to(FP64_DEVICE)
    for function, probs, mask in ((index_path, probs_TK, 1), (map_path, probs_TE, wide_map)):
        path = Candidate(function, [x, probs.requires_grad_()], [grad]).compiled()
        candidates[function.__name__] = path
        want = in_fp64(partial(right, mask), like=path)
        check({"permute part": path}, want, case.dtype)
    report.compare(case, f"permute part, {BOTH}", candidates, ["map_path"])


def bench_router(report: Report, case: Case) -> None:
    """The router beside the layer that it is a part of; then both with the histogram of quantile
    balancing."""
    quantile = dict(enable_expert_bias=True, bias_update="quantile")
    for what, fields in ((BOTH, {}), (f"quantile, {BOTH}", quantile)):
        layer, x, grads = layer_and_input(case.config(**fields), case.T)
        whole = Candidate(layer, [x], grads).compiled()
        right = in_fp64(partial(loop_over_experts, case.K), like=whole)
        check({OURS: whole}, right, case.dtype)

        def route(x, _weight, router=layer.router):
            return router.route(x)[0]

        inputs = [x, layer.router.weight]
        grads_TK = [torch.randn_like(route(*inputs))]
        router = Candidate(route, inputs, grads_TK).compiled()
        candidates = {"router": router, OURS: whole}
        report.compare(case, what, candidates, [OURS])


def bench_eager(report: Report, case: Case) -> None:
    """The experts alone, in eager mode: Hugging Face's module with our products and with theirs."""
    layer, x, _ = layer_and_input(case.config(), case.T)
    x = x.detach().flatten(0, 1).requires_grad_()
    scores = torch.rand(case.T, case.E, device=DEVICE)
    probs, indices = scores.topk(case.K)
    inputs = [x, indices, probs.to(case.dtype).requires_grad_()]
    grads = [torch.randn_like(x)]
    candidates = {}
    for how in (register_experts(), "grouped_mm", "eager"):
        experts = hugging_face_block(case, layer, how).experts
        candidates[how] = Candidate(experts, inputs, grads)
    loop = candidates.pop("eager")
    check(candidates, loop.step(), case.dtype)
    report.compare(case, f"experts, {BOTH}", candidates, ["grouped_mm"])


def bench_parts(report: Report) -> None:
    benches = {bench_permute: PERMUTE, bench_router: ROUTER}
    if HAS_TRANSFORMERS:
        benches[bench_eager] = EAGER
    pairs = [(bench, case) for bench, cases in benches.items() for case in report.cases(cases)]
    for bench, case in report.progress(pairs):
        bench(report, case)


if __name__ == "__main__":
    run(bench_parts, parser_of(__doc__).parse_args())
