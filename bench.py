"""What the layer costs, beside what else one could use.

    python bench.py [layer | overlap | ranks | families | models] [--quick] [--json FILE] [--plot FILE]
    python bench.py ranks --against FOLDER           # beside another copy of these files

Before anything is timed, every candidate's output and gradients are compared with a plain loop over the experts in
fp64. Candidates take turns in one process, in an order shuffled anew every round; times are medians with the 10th and
90th percentile, ratios those of medians. A backward is timed with its forward, never subtracted. Letters: kernels.py.
"""
import argparse
import copy
import gc
import importlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
import types
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import families
import kernels
import moe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SHORT = {FP32: "fp32", BF16: "bf16"}
TOLERANCE = {FP32: 1e-5, BF16: 2e-2}         # on ‖difference‖ / ‖loop in fp64‖ of a tensor
SLOW = {dtype for dtype in SHORT if DEVICE == "cpu" and kernels._slow_on_cpu(dtype)}     # no matrix instructions
OURS, PEER = "layer, compiled", "Hugging Face grouped_mm, compiled"


class Case(NamedTuple):
    T: int
    H: int
    F: int
    E: int
    K: int
    dtype: torch.dtype

    def __str__(self):
        return f"T={self.T} H={self.H} F={self.F} E={self.E} K={self.K} {SHORT[self.dtype]} {DEVICE}"


class Limits(NamedTuple):
    """What is to be reached: forward + backward over the products alone, and over Hugging Face's."""
    products: float | None
    peer: float | None


class Scale(NamedTuple):
    cases: list[Case]
    eager: list[Case]
    permute: list[Case]
    router: Case
    decode: Case
    rounds: int                               # at most so many runs of a candidate
    seconds: float                            # and about so much time, but two runs at least


LIMITS = {Case(2048, 512, 256, 64, 8, FP32): Limits(1.10, 0.80),
          Case(2048, 512, 256, 64, 8, BF16): Limits(1.30, 0.85),
          Case(2048, 512, 1024, 8, 2, FP32): Limits(1.08, 0.96),
          Case(2048, 512, 1024, 8, 2, BF16): Limits(1.15, 0.96),
          Case(4096, 256, 128, 128, 8, FP32): Limits(1.20, 0.75),
          Case(4096, 256, 128, 128, 8, BF16): Limits(1.35, 0.80)}
FULL = Scale(
    cases=list(LIMITS),
    eager=[Case(*sizes, dtype) for sizes in ((2048, 512, 256, 64, 8), (512, 256, 96, 16, 4), (512, 64, 64, 16, 4))
           for dtype in (FP32, BF16)],
    permute=[Case(2048, 512, 256, E, 8, dtype) for dtype in (FP32, BF16) for E in (64, 256)],
    router=Case(2048, 512, 256, 256, 8, FP32 if BF16 in SLOW else BF16),
    decode=Case(1, 2048, 768, 128, 8, BF16),
    rounds=20, seconds=6.0)
QUICK = Scale(
    cases=[Case(64, 32, 16, 8, 4, FP32), Case(64, 32, 16, 8, 2, BF16)],
    eager=[Case(64, 32, 16, 8, 4, FP32)],
    permute=[Case(64, 32, 16, E, 2, FP32) for E in (64, 256)],
    router=Case(64, 32, 16, 32, 2, FP32),
    decode=Case(1, 64, 32, 8, 2, BF16),
    rounds=5, seconds=0.5)
GRAPH = Case(48, 64, 32, 16, 8, FP32)         # for recompiles and host syncs, where size does not matter


# ---- Report: rows as they come, the targets' table at the end ----

class Report:
    def __init__(self, header: dict):
        self.data = {"header": header, "rows": [], "targets": [], "notes": []}
        print("   ".join(f"{name}: {value}" for name, value in header.items()))

    def times(self, case: Case, part: str, timings: dict, base: str, remarks: dict = {}) -> None:
        """A line per candidate, ours first: median and spread, over the base's median, and ours over it."""
        ours = next(iter(timings.values()))
        print(f"  {part:<36}{'ms':>10}{'10 % .. 90 %':>23}{'runs':>6}{'/ base':>9}{'ours / it':>11}")
        for name, t in timings.items():
            row = {"case": str(case), "part": part, "candidate": name, **t._asdict(), "base": base,
                   "over_base": t.ms / timings[base].ms, "ours_over": ours.ms / t.ms,
                   "remark": "<- base" if name == base else remarks.get(name, "")}
            print(f"    {name:<34}{t.ms:>10.3f}{t.ms_10:>11.3f} ..{t.ms_90:>9.3f}{t.runs:>6}{row['over_base']:>9.2f}"
                  f"{row['ours_over']:>11.2f}  {row['remark']}".rstrip())
            self.data["rows"].append(row)

    def fact(self, case: Case, what: str, value: float, remark: str = "", limit: float | None = None, judge=True) -> None:
        """One figure; with a limit also a target, not judged where the limit is for another shape or device."""
        print(f"    {what:<48}{value:>10.4g}  {remark}".rstrip())
        self.data["rows"].append({"case": str(case), "what": what, "value": value, "remark": remark})
        if limit is not None:
            reached = ("reached" if value <= limit else "MISSED") if judge else "not judged"
            self.data["targets"].append({**self.data["rows"][-1], "limit": limit, "reached": reached})

    def note(self, text: str) -> None:
        print(f"  note: {text}")
        self.data["notes"].append(text)

    def print_targets(self) -> None:
        print(f"\n  {'target':<86}{'figure':>9}{'at most':>9}")
        for t in self.data["targets"]:
            print(f"    {t['what']:<49}{t['case']:<36}{t['value']:>8.4g}{t['limit']:>9.4g}  {t['reached']}")


def plot(rows: list[dict], file: str) -> None:
    """Forward + backward over the bare products, with the spread, case by case."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = [row for row in rows if row.get("part") == "forward + backward"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = pyplot.subplots(len(cases), figsize=(9, 3 * len(cases)), squeeze=False)
    for axis, case in zip(axes.flat, cases):
        for row in reversed([row for row in rows if row["case"] == case]):
            low, ratio, high = (row["over_base"] * row[key] / row["ms"] for key in ("ms_10", "ms", "ms_90"))
            axis.barh(row["candidate"], ratio, xerr=[[ratio - low], [high - ratio]], color="C0")
        axis.set(title=case, xscale="log", xlabel="forward + backward over the bare products")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


# ---- Timing: candidates in turn ----

class Timing(NamedTuple):
    ms: float                                 # median
    ms_10: float
    ms_90: float
    runs: int


def milliseconds(function: Callable) -> float:
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def timing(samples: list[float]) -> Timing:
    return Timing(*torch.tensor(samples).quantile(torch.tensor([0.5, 0.1, 0.9])).tolist(), len(samples))


def time_in_turn(candidates: dict[str, Callable], scale: Scale) -> dict[str, Timing]:
    """Every candidate (warm already) once a round, the order shuffled anew; slow ones sit rounds out."""
    gc.collect()
    gc.freeze()                               # collections between the runs do not walk through what is loaded
    samples, shuffle = {name: [] for name in candidates}, random.Random(0)
    for i in range(scale.rounds):
        share = scale.seconds * 1e3 * i / scale.rounds
        due = [name for name, ms in samples.items() if i in (0, scale.rounds - 1) or min(ms) * len(ms) <= share]
        for name in shuffle.sample(due, len(due)):
            samples[name].append(milliseconds(candidates[name]))
    return {name: timing(ms) for name, ms in samples.items()}


# ---- Candidates: functions of x [T, 1, H], on the layer's weights ----

class Candidate(NamedTuple):
    function: Callable
    leaves: list[Tensor]                      # what gets gradients: x, router weight, fc1, fc2

    def forward(self) -> Tensor:
        return self.function(self.leaves[0])

    def step(self, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, grad)

    def results(self, grad: Tensor) -> list[Tensor]:
        return [self.forward(), *self.step(grad)]


def layer_and_input(case: Case, **options) -> tuple[moe.MoELayer, list[Tensor], Tensor]:
    """(layer, leaves, gradient). `options` are further fields of its config. Tokens whose K-th and next best
    expert nearly tie are not taken: there rounding decides, and candidates would route differently."""
    torch.manual_seed(0)
    layer = moe.MoELayer(moe.MoEConfig(case.H, case.F, case.E, case.K, params_dtype=case.dtype, **options)).to(DEVICE)
    drawn = torch.randn(2 * case.T + 16, case.H).to(DEVICE, case.dtype)
    best = (drawn.double() @ layer.router.weight.detach().double().t()).topk(case.K + 1).values
    x = drawn[best[:, -2] - best[:, -1] > 1e-4][:case.T, None].clone().requires_grad_()
    return layer, [x, layer.router.weight, layer.experts.fc1, layer.experts.fc2], torch.randn_like(x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, like the project's own products in fp32 where the dtype has no matrix instructions."""
    return F.linear(x.float(), weight.float()).to(x.dtype) if x.dtype in SLOW else F.linear(x, weight)


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def loop_over_experts(topk: int, x: Tensor, router: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """y_t = Σ_k p_tk · fc2_e · swiglu(fc1_e · x_t), e = i_tk, one expert after the other: nothing of the project's."""
    x_TH = x.flatten(0, 1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    chosen_TK, indices_TK = F.linear(x_TH.to(wide), router.to(wide)).topk(topk)
    probs_TK = chosen_TK.softmax(-1)
    y_TH = torch.zeros_like(x_TH)
    for e, (fc1_2FH, fc2_HF) in enumerate(zip(fc1.flatten(1, 2).unbind(), fc2.unbind())):
        token, k = (indices_TK == e).nonzero(as_tuple=True)
        rows = linear(swiglu(linear(x_TH[token], fc1_2FH)), fc2_HF)
        y_TH = y_TH.index_add(0, token, (rows * probs_TK[token, k, None]).to(x.dtype))
    return y_TH.view_as(x)


def dense_ffn(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return linear(swiglu(linear(x, fc1)), fc2)


def dense_candidates(case: Case, x: Tensor) -> dict[str, Candidate]:
    """A SwiGLU of width K·F: the same active parameters and arithmetic, no routing."""
    fc1 = (0.02 * torch.randn(2 * case.K * case.F, case.H)).to(x).requires_grad_()
    fc2 = (0.02 * torch.randn(case.H, case.K * case.F)).to(x).requires_grad_()
    function = partial(dense_ffn, fc1=fc1, fc2=fc2)
    return {"dense FFN, compiled": Candidate(torch.compile(function, fullgraph=True), [x, fc1, fc2]),
            "dense FFN, eager": Candidate(function, [x, fc1, fc2])}


class GateInFp32(torch.nn.Module):
    """Their gate on fp32 logits, as our router: on bf16 logits its choices are other ones."""

    def __init__(self, gate: torch.nn.Module, weight: Tensor):
        super().__init__()
        self.gate = gate
        gate.weight = torch.nn.Parameter(weight.detach().float())

    def forward(self, x_TH: Tensor):
        logits, probs, indices = self.gate(x_TH.float())
        return logits, probs.to(x_TH.dtype), indices


def hugging_face_block(case: Case, router: Tensor, fc1: Tensor, fc2: Tensor, experts: str) -> torch.nn.Module:
    """Qwen3-MoE's block on our weights, its experts "eager" or "grouped_mm" (Mixtral's are the same code)."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    config = Qwen3MoeConfig(hidden_size=case.H, moe_intermediate_size=case.F, num_experts=case.E,
                            num_experts_per_tok=case.K, norm_topk_prob=True)
    config._experts_implementation = experts
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    block.gate = GateInFp32(block.gate, router)
    block.experts.gate_up_proj = torch.nn.Parameter(fc1.detach().flatten(1, 2))
    block.experts.down_proj = torch.nn.Parameter(fc2.detach())
    return block


@cache
def hugging_face_product() -> Callable:
    return importlib.import_module("transformers.integrations.moe")._grouped_mm


def hugging_face_candidates(case: Case, leaves: list[Tensor]) -> dict[str, Candidate]:
    """Outside bf16 the backward of their product does not compile: there the compiled block calls it in eager mode."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    whole, product = case.dtype == BF16, hugging_face_product()
    sys.modules[product.__module__]._grouped_mm = product if whole else torch.compiler.disable(product)
    x, *weights = leaves
    found = {}
    for name in ("Hugging Face eager", "Hugging Face grouped_mm, eager", PEER):
        block = hugging_face_block(case, *weights, name.split()[2].strip(","))
        theirs = [x, block.gate.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        found[name] = Candidate(torch.compile(block, fullgraph=whole) if name == PEER else block, theirs)
    return found


# ---- The bare products: what no layer can do without ----

def bare_products(case: Case, layer: moe.MoELayer, x: Tensor, backward: bool) -> dict[str, Callable]:
    """The two products of a forward and, with `backward`, the four of a backward: the layer's own split, contiguous rows
    in expert order, fresh outputs; by F.grouped_mm, by torch.mm per expert, by the project's own per expert."""
    plan = kernels.plan_permutation(layer.router.route(x)[1], case.E)
    blocks = [block for block in kernels._blocks(plan.offsets) if block[1] < block[2]]
    x_TH, N = x.detach().flatten(0, 1), case.T * case.K
    rows_NH, act_NF = x_TH[plan.order // case.K], x_TH.new_empty(N, case.F).normal_()
    grad_NH, grad_N2F = x_TH.new_empty(N, case.H).normal_(), x_TH.new_empty(N, layer.config.parts * case.F).normal_()
    fc1, fc2 = layer.experts.fc1.detach().flatten(1, 2), layer.experts.fc2.detach()         # [E, 2F, H], [E, H, F]

    def all_products(product, weight_product):
        out = [product(rows_NH, fc1.transpose(1, 2)), product(act_NF, fc2.transpose(1, 2))]
        if backward:
            out += [product(grad_NH, fc2), weight_product(grad_NH, act_NF),
                    product(grad_N2F, fc1), weight_product(grad_N2F, rows_NH)]
        return out

    def by_loop(mm):
        def product(rows, weights):
            out = rows.new_empty(N, weights.shape[2])
            for e, start, end in blocks:
                mm(rows[start:end], weights[e], out[start:end])
            return out

        def weight_product(grad, rows):
            out = grad.new_zeros(case.E, grad.shape[1], rows.shape[1])
            for e, start, end in blocks:
                mm(grad[start:end].t(), rows[start:end], out[e])
            return out
        return all_products(product, weight_product)

    def by_grouped_mm():
        return all_products(lambda rows, weights: F.grouped_mm(rows, weights, offs=plan.offsets),
                            lambda grad, rows: F.grouped_mm(grad.t(), rows, offs=plan.offsets))
    ways = {"products by torch.mm": partial(by_loop, lambda a, b, out: torch.mm(a, b, out=out)),
            "products by kernels._mm": partial(by_loop, kernels._mm)}
    return ways | ({"products by F.grouped_mm": by_grouped_mm} if DEVICE == "cpu" or case.dtype == BF16 else {})


def fastest(timings: dict[str, Timing]) -> str:
    return min((name for name in timings if name.startswith("products")), key=lambda name: timings[name].ms)


# ---- Checks: a failure ends the program with code 1 ----

def require_close(name: str, got, want, dtype: torch.dtype) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = a.detach().double().flatten(), b.detach().double().flatten()
        error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
        if not error <= TOLERANCE[dtype]:
            sys.exit(f"check failed: {name}, tensor {i}: relative error {error:.2e} > {TOLERANCE[dtype]:.0e}; nothing timed")


def loop_in_fp64(case: Case, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    """[y, and the gradients of x, router weight, fc1, fc2] of the plain loop."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return Candidate(lambda x: loop_over_experts(case.K, x, *wide[1:]), wide).results(grad.double())


def differing_runs(candidate: Candidate, grad: Tensor, runs: int = 20) -> int:
    first = candidate.results(grad)
    return sum(not all(map(torch.equal, first, candidate.results(grad))) for _ in range(runs - 1))


# ---- Compilation: seconds, kernels, breaks, recompiles, host syncs, bytes kept ----

def compile_cold(layer: moe.MoELayer, leaves: list[Tensor], grad: Tensor) -> tuple[Callable, float, int, int]:
    """(the compiled layer, seconds for a forward and backward with nothing cached, kernels generated, graph breaks)."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    with fresh_cache():
        compiled = torch.compile(layer, fullgraph=True)
        seconds = milliseconds(lambda: Candidate(compiled, leaves).step(grad)) / 1e3
    return compiled, seconds, metrics.generated_kernel_count, sum(counters["graph_break"].values())


def host_syncs() -> list[str]:
    """The nodes of the captured forward and backward that wait for the device."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
    nodes = []

    def keep(graph_module, _):
        nodes.extend(graph_module.graph.nodes)
        return make_boxed_func(graph_module.forward)
    torch._dynamo.reset()
    layer, leaves, grad = layer_and_input(GRAPH)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    Candidate(torch.compile(layer, fullgraph=True, dynamic=True, backend=backend), leaves).step(grad)

    def syncs(node):
        value = node.meta.get("val")
        return "_local_scalar_dense" in str(node.target) or "nonzero" in str(node.target) or \
            isinstance(value, (Tensor, torch.SymInt)) and bool(free_unbacked_symbols(value))
    return [str(node.target) for node in nodes if syncs(node)]


def new_graphs() -> tuple[int, int, int]:
    """Graphs compiled, after the first dynamic compile, over ten T in 2 .. 8192; for T = 0; for T = 1."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    layer, (_, *weights), _ = layer_and_input(GRAPH)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)

    def compiles(*sizes):
        before = counters["stats"]["unique_graphs"]
        for T in sizes:
            x = torch.randn(T, 1, GRAPH.H, device=DEVICE, requires_grad=True)
            Candidate(compiled, [x, *weights]).step(torch.randn_like(x))
        return counters["stats"]["unique_graphs"] - before
    compiles(GRAPH.T)
    return compiles(2, 3, 7, 16, 65, 256, 1000, 2048, 4096, 8192), compiles(0), compiles(1)


def bytes_kept(candidate: Candidate) -> int:
    """Bytes of the storages that the forward saves for the backward, without the parameters'."""
    parameters = {leaf.untyped_storage().data_ptr() for leaf in candidate.leaves[1:]}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = candidate.forward()
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


# ---- The layer: its cases, the permute part, one token, the graphs ----

def bench_case(report: Report, scale: Scale, case: Case) -> None:
    """The layer beside the bare products, a dense FFN, the loop and Hugging Face's block."""
    layer, leaves, grad = layer_and_input(case)
    compiled, *cost = compile_cold(layer, leaves, grad)
    candidates = {OURS: Candidate(compiled, leaves), "layer, eager": Candidate(layer, leaves),
                  "loop over experts, eager": Candidate(lambda x: loop_over_experts(case.K, x, *leaves[1:]), leaves),
                  **hugging_face_candidates(case, leaves)}
    want = loop_in_fp64(case, leaves, grad)
    for name, candidate in candidates.items():
        require_close(name, candidate.results(grad), want, case.dtype)
    dense = dense_candidates(case, leaves[0])
    require_close("dense FFN", *(candidate.results(grad) for candidate in dense.values()), case.dtype)
    products = {backward: bare_products(case, layer, leaves[0], backward) for backward in (False, True)}
    results = {name: product() for name, product in products[True].items()}
    for name, result in results.items():
        require_close(name, result, results["products by kernels._mm"], case.dtype)
    candidates |= dense

    print(f"\n{case}")
    case_facts(report, scale, case, candidates, grad, *cost)
    remarks = {name: "its products lack bf16 instructions here" for name in candidates
               if case.dtype in SLOW and name.startswith("Hugging")}
    timings = time_in_turn({name: c.forward for name, c in candidates.items()} | products[False], scale)
    report.times(case, "forward", timings, fastest(timings), remarks)
    timings = time_in_turn({name: partial(c.step, grad) for name, c in candidates.items()} | products[True], scale)
    report.times(case, "forward + backward", timings, fastest(timings), remarks)
    limits = LIMITS.get(case, Limits(None, None))
    for what, name, limit in (("the products alone", fastest(timings), limits.products), (PEER, PEER, limits.peer)):
        if name in timings:
            report.fact(case, f"f + b / {what}", timings[OURS].ms / timings[name].ms, remarks.get(name, name),
                        limit, case.dtype not in SLOW)


def case_facts(report, scale, case, candidates, grad, seconds: float, count: int, breaks: int) -> None:
    N = case.T * case.K
    minimum = (case.T * case.H + N * 2 * case.F) * case.dtype.itemsize            # the input and fc1's output
    small = N * (3 * 8 + 4) + case.E * 4      # indices, order, inverse int64; probs fp32; offsets int32
    report.fact(case, "cold compile, seconds", seconds, "forward and backward, nothing cached")
    report.fact(case, "graph breaks, fullgraph=True", breaks, limit=0)
    report.fact(case, "kernels generated, forward + backward", count, "", {FP32: 17, BF16: 20}[case.dtype], DEVICE == "cpu")
    for name in (OURS, "layer, eager"):
        kept = bytes_kept(candidates[name]) - small
        report.fact(case, f"bytes kept / (T·H + N·2F), {name}", kept / minimum,
                    f"{kept / 2**20:.2f} MiB, beside {small / 2**20:.2f} MiB of indices and probs", 1.05, scale is FULL)
        report.fact(case, f"runs of 20 that differ in a bit, {name}", differing_runs(candidates[name], grad), limit=0)


def index_path(tokens: Tensor, probs_TK: Tensor, indices_TK: Tensor, E: int) -> Tensor:
    plan = kernels.plan_permutation(indices_TK, E)
    rows = kernels.gather_rows(tokens, plan)
    rows = kernels.activation(rows, weights=probs_TK.flatten()[plan.order][:, None])
    return kernels.combine_rows(rows, plan)


def map_path(tokens: Tensor, probs_TE: Tensor, map_TE: Tensor, K: int) -> Tensor:
    rows, probs, sorted_indices = kernels.permute(tokens, map_TE, probs_TE, num_out_tokens=len(tokens) * K)
    rows = kernels.weighted_swiglu(rows, probs[:, None])
    return kernels.unpermute(rows, sorted_indices, (len(tokens), rows.shape[1]))


def bench_permute(report: Report, scale: Scale, case: Case) -> None:
    """permute + weighted SwiGLU + unpermute, no products between: [T, H] -> [N, H] -> [N, H/2] -> [T, H/2]."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens = torch.randn(case.T, case.H).to(DEVICE, case.dtype).requires_grad_()
    grad = torch.randn(case.T, case.H // 2).to(DEVICE, case.dtype)
    probs_TK, indices_TK = torch.rand(case.T, case.E, device=DEVICE).topk(case.K)
    probs_TE, map_TE = kernels.routing_to_map(probs_TK, indices_TK, case.E)
    compiled_index, compiled_map = (torch.compile(path, fullgraph=True) for path in (index_path, map_path))
    ours = Candidate(lambda x: compiled_index(x, probs_TK, indices_TK, case.E), [tokens, probs_TK.requires_grad_()])
    theirs = Candidate(lambda x: compiled_map(x, probs_TE, map_TE, case.K), [tokens, probs_TE.requires_grad_()])

    wide = [tokens.detach().double().requires_grad_(), probs_TK.detach().double().requires_grad_()]
    want = Candidate(lambda x: sum(swiglu(x) * wide[1][:, k, None] for k in range(case.K)), wide).results(grad.double())
    require_close("index path", ours.results(grad), want, case.dtype)
    y, grad_tokens, grad_probs = theirs.results(grad)
    require_close("[T,E] path", [y, grad_tokens, grad_probs.gather(1, indices_TK)], want, case.dtype)

    print(f"\nT={case.T} H={case.H} E={case.E} K={case.K} {SHORT[case.dtype]} {DEVICE}: without the products")
    index_name, map_name = "index path [T,K], compiled", "[T,E] path, compiled"
    timings = time_in_turn({index_name: partial(ours.step, grad), map_name: partial(theirs.step, grad)}, scale)
    report.times(case, "permute, SwiGLU, unpermute: f + b", timings, map_name)
    report.fact(case, "permute part: index path / [T,E] path", timings[index_name].ms / timings[map_name].ms, "", 1.0,
                scale is FULL)


def bench_router(report: Report, scale: Scale) -> None:
    """The router by itself beside the whole layer: logits, choice, probs, and the gradients of x and the weight; then
    with the histogram of quantile balancing."""
    case = scale.router
    for label, limit, options in (("", 0.08, {}), (", quantile", 0.12, dict(enable_expert_bias=True, bias_update="quantile"))):
        layer, leaves, grad = layer_and_input(case, **options)
        torch._dynamo.reset()
        compiled, route = torch.compile(layer, fullgraph=True), torch.compile(layer.router.route, fullgraph=True)
        whole = Candidate(compiled, leaves)
        router = Candidate(lambda x: route(x)[0], leaves[:2])
        require_close(OURS, whole.results(grad), loop_in_fp64(case, leaves, grad), case.dtype)
        grad_TK = torch.randn_like(router.forward())
        print(f"\n{case}: the router's share{label}")
        timings = time_in_turn({"router, compiled": partial(router.step, grad_TK), OURS: partial(whole.step, grad)}, scale)
        report.times(case, "forward + backward", timings, OURS)
        share = timings["router, compiled"].ms / timings[OURS].ms
        report.fact(case, f"f + b: router / layer{label}", share, "", limit, scale is FULL)


def bench_latent(report: Report, scale: Scale, case: Case) -> None:
    """Latent experts, ℓ = H / 2, beside those of width H, at equal active parameters."""
    latent = case.H // 2
    width = round((3 * case.K * case.F * case.H - 2 * latent * case.H) / (3 * case.K * latent) / 8) * 8
    plain, leaves, grad = layer_and_input(case)
    layers = {"ℓ = H / 2, compiled": layer_and_input(case._replace(F=width), latent_size=latent)[0], "ℓ = None, compiled": plain}
    steps, active = {}, {}
    torch._dynamo.reset()
    for name, layer in layers.items():
        layer.router.load_state_dict(plain.router.state_dict())
        candidate = Candidate(torch.compile(layer, fullgraph=True), [leaves[0], *layer.parameters()])
        double = copy.deepcopy(layer).double()
        x = leaves[0].detach().double().requires_grad_()
        want = Candidate(double, [x, *double.parameters()]).results(grad.double())
        require_close(name, candidate.results(grad), want, case.dtype)
        steps[name] = partial(candidate.step, grad)
        experts = sum(p.numel() for p in layer.experts.parameters()) * case.K // case.E
        around = [] if layer.latent is None else layer.latent.parameters()
        active[name] = experts + sum(p.numel() for p in around)
    print(f"\n{case}: latent experts, F = {width}; active parameters beside the router's: {active}")
    timings = time_in_turn(steps, scale)
    report.times(case, "forward + backward", timings, "ℓ = None, compiled")
    ratio = timings["ℓ = H / 2, compiled"].ms / timings["ℓ = None, compiled"].ms
    report.fact(case, "f + b: ℓ = H / 2 over ℓ = None", ratio, f"F = {width}")


def bench_eager(report: Report, scale: Scale, case: Case) -> None:
    """The experts alone, in eager mode: a Hugging Face experts module with its product and with ours."""
    if importlib.util.find_spec("transformers") is None:
        return
    _, leaves, _ = layer_and_input(case)
    ours = families.register_experts()
    experts = hugging_face_block(case, *leaves[1:], ours).experts
    x = leaves[0].detach().flatten(0, 1).requires_grad_()
    probs, indices = torch.rand(case.T, case.E, device=DEVICE, dtype=case.dtype).topk(case.K)
    leaves, grad, steps = [x, probs.requires_grad_(), *experts.parameters()], torch.randn_like(x), {}

    def run(how: str) -> list[Tensor]:
        experts.config._experts_implementation = how
        return Candidate(lambda x: experts(x, indices, probs), leaves).results(grad)
    want = run("eager")
    for how in (ours, "grouped_mm"):
        require_close(how, run(how), want, case.dtype)
        steps[f"experts, {how}, eager"] = partial(run, how)
    print(f"\n{case}: the experts alone, eager mode")
    timings = time_in_turn(steps, scale)
    report.times(case, "forward + backward", timings, "experts, grouped_mm, eager")
    mine, theirs = timings.values()
    report.fact(case, "experts, eager: ours / grouped_mm", mine.ms / theirs.ms, "", 1.0,
                scale is FULL and case.dtype not in SLOW)


@torch.no_grad()
def bench_decode(report: Report, scale: Scale) -> None:
    """One token in eval: the layer beside the products of the K chosen experts."""
    case = scale.decode
    layer, leaves, _ = layer_and_input(case)
    layer.eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    want = loop_over_experts(case.K, *(leaf.double() for leaf in leaves))
    calls = {OURS: partial(compiled, leaves[0]), "layer, eager": partial(layer, leaves[0])}
    for name, call in calls.items():
        require_close(name, [call()], [want], case.dtype)
    print(f"\n{case}: one token, eval")
    timings = time_in_turn(calls | bare_products(case, layer, leaves[0], backward=False), scale)
    base = fastest(timings)
    report.times(case, "forward", timings, base)
    report.fact(case, "decoding / the K chosen experts' products", timings[OURS].ms / timings[base].ms, base, 1.5,
                scale is FULL)


def bench_graphs(report: Report) -> None:
    print(f"\n{GRAPH}: compiled with dynamic=True")
    syncs, (others, zero, one) = host_syncs(), new_graphs()
    report.fact(GRAPH, "host syncs in the captured graphs", len(syncs), " ".join(syncs), 0)
    report.fact(GRAPH, "recompiles, ten T in 2 .. 8192", others, limit=0)
    report.fact(GRAPH, "compiles for T = 0", zero, limit=1)
    report.fact(GRAPH, "compiles for T = 1", one, limit=1)


def bench_layer(report: Report, scale: Scale) -> None:
    if importlib.util.find_spec("transformers") is None:
        report.note("transformers is not installed: Hugging Face's blocks are left out")
    for case in scale.cases:
        bench_case(report, scale, case)
    for case in scale.eager:
        bench_eager(report, scale, case)
    for case in scale.permute:
        bench_permute(report, scale, case)
    bench_router(report, scale)
    for case in scale.cases[:2]:
        bench_latent(report, scale, case)
    bench_decode(report, scale)
    bench_graphs(report)


# ---- overlap: the shared expert on its own stream beside the routed path ----

def steps_in_order(layer: moe.MoELayer, x: Tensor) -> list[str]:
    """What a forward runs, in the order in which it is issued."""
    order, shared = [], layer.shared_experts
    places = [(shared, name) for name in ("pre_forward_comm", "linear_fc1_forward_and_act", "linear_fc2_forward",
                                          "post_forward_comm", "get_output")]
    places += [(layer.router, "forward"), (layer.experts, "forward")]
    for owner, name in places:
        def noted(function, label, *args, **kwargs):
            order.append(label)
            return function(*args, **kwargs)
        label = {layer.router: "[route]", layer.experts: "[experts]"}.get(owner, name)
        setattr(owner, name, partial(noted, getattr(owner, name), label))
    layer(x)
    for owner, name in places:
        delattr(owner, name)
    return order


def bench_overlap(report: Report, scale: Scale) -> None:
    """With and without overlap, on the same weights: bitwise the same results; times where there is a second stream."""
    case = scale.cases[0]._replace(dtype=BF16) if DEVICE == "cuda" else scale.cases[0]
    torch.manual_seed(0)
    config = moe.MoEConfig(case.H, case.F, case.E, case.K, params_dtype=case.dtype, shared_expert_intermediate_size=2 * case.H)
    one_go = moe.MoELayer(config).to(DEVICE)
    in_steps = moe.MoELayer(replace(config, shared_expert_overlap=True)).to(DEVICE)
    in_steps.load_state_dict(one_go.state_dict())
    x = torch.randn(case.T, 1, case.H, device=DEVICE, dtype=case.dtype, requires_grad=True)
    grad, eager = torch.randn_like(x), {}
    for name, layer in {"one go": one_go, "in steps": in_steps}.items():
        eager[name] = Candidate(layer, [x, *layer.parameters()])
    wide = [leaf.detach().double() for leaf in (x, one_go.router.weight, one_go.experts.fc1, one_go.experts.fc2)]
    dense = dense_ffn(wide[0], *(w.detach().double().flatten(0, -2) for w in (one_go.shared_experts.fc1, one_go.shared_experts.fc2)))
    require_close("one go", [one_go(x)], [loop_over_experts(case.K, *wide) + dense], case.dtype)
    print(f"\n{case}, shared expert of {2 * case.H}")
    differ = sum(not torch.equal(a, b) for a, b in zip(*(c.results(grad) for c in eager.values())))
    report.fact(case, "tensors that differ, overlap on / off", differ, f"outputs and gradients, of {len(eager['one go'].leaves) + 1}", 0)
    report.note("issued: " + ", ".join(steps_in_order(in_steps, x)))
    if DEVICE == "cpu":
        report.note("no accelerator, so no second stream: order and numerics only, nothing is timed")
        return
    for layer in (one_go, in_steps):
        layer.compile(fullgraph=True)
    candidates = {"overlap, compiled": eager["in steps"], "one go, compiled": eager["one go"]}
    for what in ("forward", "forward + backward"):
        calls = {name: c.forward if what == "forward" else partial(c.step, grad) for name, c in candidates.items()}
        for call in calls.values():
            call()
        report.times(case, what, time_in_turn(calls, scale), "one go, compiled")


# ---- ranks: experts over two processes ----

def other_copy(folder: str):
    """moe.py of another copy of these files, as a package of its own."""
    package = types.ModuleType("other_copy")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    return importlib.import_module("other_copy.moe")


def time_on_rank(rank: int, store: str, case: Case, rounds: int, against: str | None, queue) -> None:
    """Forward + backward of the layer over ep = 2, gloo, one thread each. All candidates' results are
    compared; both ranks run them in the same order, a barrier before each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    candidates = {}
    for name, module in ({"": moe} | ({" of the other copy": other_copy(against)} if against else {})).items():
        config = module.MoEConfig(case.H, case.F, case.E, case.K, shared_expert_intermediate_size=2 * case.H,
                                  shared_expert_overlap=True)
        for how in ("compiled", "eager"):
            torch.manual_seed(0)
            layer = module.MoELayer(config, module.ProcessGroups.from_mesh(mesh))
            if how == "compiled":
                layer.compile(fullgraph=True)
            torch.manual_seed(rank)
            x = torch.randn(case.T, 1, case.H, requires_grad=True)
            candidates[how + name] = Candidate(layer, [x, *layer.parameters()])
    grad, want = torch.randn_like(x), None
    for name, candidate in candidates.items():
        got = candidate.results(grad)
        want = want or got
        require_close(name, got, want, FP32)
    samples, shuffle = {name: [] for name in candidates}, random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(candidates), len(candidates)):
            dist.barrier()
            samples[name].append(milliseconds(partial(candidates[name].step, grad)))
    if rank == 0:
        queue.put(samples)
    dist.destroy_process_group()


def bench_ranks(report: Report, scale: Scale, against: str | None = None) -> None:
    """The layer with overlap over two processes: one graph beside eager mode, and beside another copy of these files."""
    case = QUICK.cases[0] if scale is QUICK else Case(1024, 512, 256, 16, 4, FP32)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = f"{folder}/store", case, scale.rounds, against, queue
        processes = [context.Process(target=time_on_rank, args=(rank, *args)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(600)
            if any(process.exitcode != 0 for process in processes):
                sys.exit("bench.py ranks: a process failed; its error is above")
        finally:
            for process in processes:
                process.kill()
    print(f"\n{case}, shared expert of {2 * case.H} with overlap, ep 2, gloo, one thread a process")
    report.times(case, "forward + backward", {name: timing(ms) for name, ms in queue.get().items()}, "compiled")


# ---- Published models: scaled down to H = 256, with their own E, K and F / H ----

MODELS = {                                    # H, F, E, K as published, and what else the config says
    "mixtral": (4096, 14336, 8, 2, {}), "granitemoe": (1024, 512, 32, 8, {}), "jamba": (4096, 14336, 16, 2, {}),
    "olmoe": (2048, 1024, 64, 8, {}), "qwen3_moe": (2048, 768, 128, 8, {"norm_topk_prob": True}),
    "qwen2_moe": (2048, 1408, 60, 4, {"shared_expert_intermediate_size": 5632}),
    "qwen3_next": (2048, 512, 512, 10, {"shared_expert_intermediate_size": 512}),
    "deepseek_v2": (5120, 1536, 160, 6, {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
                                         "routed_scaling_factor": 16.0}),
    "deepseek_v3": (7168, 2048, 256, 8, {}), "kimi_k2": (7168, 2048, 384, 8, {"n_group": 1}),
    "glm4_moe": (4096, 1408, 128, 8, {}), "dots1": (4096, 1408, 128, 6, {"n_shared_experts": 2, "norm_topk_prob": True}),
    "llama4_text": (5120, 8192, 16, 1, {}), "gpt_oss": (2880, 2880, 32, 4, {}), "ernie4_5_moe": (2560, 1536, 64, 6, {}),
    "minimax_m2": (3072, 1536, 256, 8, {}), "hunyuan_v1_moe": (4096, 3072, 64, 8, {}),
    "lfm2_moe": (2048, 1792, 32, 4, {}),
    "nemotron_h": (2688, 1856, 128, 6, {"moe_shared_expert_intermediate_size": 3712}), "dbrx": (6144, 10752, 16, 4, {})}


def published_config(model_type: str, H: int) -> moe.MoEConfig:
    """The family's layer, its sizes times H / its hidden size in multiples of 8, under every name that a family uses."""
    published, F_, E, K, others = MODELS[model_type]

    def scaled(size):
        return 8 * round(size * H / published / 8)
    F_, others = scaled(F_), {name: scaled(value) if "size" in name else value for name, value in others.items()}
    return families.config_from_hf({
        "model_type": model_type, **dict.fromkeys(("hidden_size", "d_model"), H),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), F_),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), K),
        "ffn_config": {"ffn_hidden_size": F_, "moe_num_experts": E, "moe_top_k": K}, **others})


def bench_families(report: Report, scale: Scale) -> None:
    """Forward + backward of every family's layer, compiled, over its bare products: the routed ones with the same split,
    and the shared expert's."""
    T, H = (64, 32) if scale is QUICK else (512, 256)
    title = f"T={T} H={H} fp32 {DEVICE}: f + b, compiled"
    print(f"\n  {title:<48}{'ms':>10}{'10 % .. 90 %':>23}{'tokens/s':>10}{'/ products':>12}")
    for model_type in list(MODELS)[::7] if scale is QUICK else MODELS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = published_config(model_type, H)
        case = Case(T, H, config.ffn_hidden_size, config.num_experts, config.topk, FP32)
        Fs = config.shared_expert_intermediate_size
        layer, x = moe.MoELayer(config).to(DEVICE), torch.randn(T, 1, H, device=DEVICE, requires_grad=True)
        leaves, grad = [x, *layer.parameters()], torch.randn(T, 1, H, device=DEVICE)
        compiled = Candidate(torch.compile(layer, fullgraph=True), leaves)
        require_close(model_type, compiled.results(grad), Candidate(layer, leaves).results(grad), FP32)
        candidates = {OURS: partial(compiled.step, grad)} | bare_products(case, layer, x, True)
        if Fs:
            fc1, fc2 = layer.shared_experts.fc1.detach().flatten(0, 1).requires_grad_(), layer.shared_experts.fc2
            products = Candidate(lambda x: linear(linear(x, fc1)[..., :Fs], fc2), [x, fc1, fc2])
            candidates["shared expert's products"] = partial(products.step, grad)
        timings = time_in_turn(candidates, scale)
        ours, base = timings[OURS], timings[fastest(timings)].ms
        base += timings["shared expert's products"].ms if Fs else 0.0
        what, speed = f"{model_type}: F={case.F} E={case.E} K={case.K} Fs={Fs or 0}", T / ours.ms * 1e3
        print(f"    {what:<46}{ours.ms:>10.3f}{ours.ms_10:>11.3f} ..{ours.ms_90:>9.3f}{speed:>10.0f}"
              f"{ours.ms / base:>12.2f}")
        report.data["rows"].append({"case": str(case), "part": what, "candidate": OURS, **ours._asdict(),
                                    "tokens_per_s": speed, "over_products": ours.ms / base})


# ---- models: whole Hugging Face models of some 100 M random parameters ----

SIZES = dict(vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=8, intermediate_size=1024)
WHOLE_MODELS = {
    "Qwen3Moe": dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384, head_dim=64),
    "DeepseekV3": dict(n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=256, n_group=4,
                       topk_group=2, first_k_dense_replace=1, qk_nope_head_dim=32, qk_rope_head_dim=32,
                       v_head_dim=64, kv_lora_rank=128, q_lora_rank=256),
    "GptOss": dict(num_local_experts=16, num_experts_per_tok=4, intermediate_size=768, head_dim=64)}
TINY = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2)


def whole_model(name: str, dtype: torch.dtype, experts: str, quick: bool):
    """The same random model for every implementation of the experts; "blocks": replace_blocks."""
    import transformers
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **WHOLE_MODELS[name], **(TINY if quick else {})})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE, dtype)
    if experts == "blocks":
        families.replace_blocks(model)
    else:
        model.set_experts_implementation(experts)
    return model


def model_step(model, tokens: Tensor) -> list[Tensor]:
    """[the loss, and every parameter's gradient]"""
    logits = model(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def experts_kept(model, experts: str, T: int) -> tuple[int, int]:
    """Bytes that the experts of one block keep for the backward, and T·H + N·2F beside them."""
    module = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "has_gate"))
    module.config._experts_implementation = experts
    H, K, dtype = model.config.hidden_size, model.config.num_experts_per_tok, model.dtype
    indices = torch.rand(T, module.num_experts, device=DEVICE).topk(K).indices
    probs = torch.rand(T, K, device=DEVICE, dtype=dtype, requires_grad=True)
    x = torch.randn(T, H, device=DEVICE, dtype=dtype, requires_grad=True)
    kept = bytes_kept(Candidate(lambda x: module(x, indices, probs), [x, *module.parameters()]))
    return kept, (T * H + T * K * module.gate_up_proj[0].numel() // H) * dtype.itemsize


def bench_model(report: Report, scale: Scale, name: str, dtype: torch.dtype, T: int, many: bool) -> None:
    """Forward + backward of one model on T tokens; compiled too, and without batched_mm, where they are `many`:
    it would keep 2F·H elements for each row."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    ours, quick = families.register_experts(), scale is QUICK
    library = ("eager", "grouped_mm") if many else ("eager", "batched_mm", "grouped_mm")
    case = f"{name} T={T} {SHORT[dtype]} {DEVICE}"
    tokens = torch.randint(1, 64, (1, T), device=DEVICE)
    steps, want = {}, None
    for experts in (ours, "blocks", *library):
        model = whole_model(name, dtype, experts, quick)
        got = model_step(model, tokens)
        if experts != "blocks" and dtype == FP32:
            want = want or got
            require_close(f"{case} {experts}", got, want, dtype)
        steps[f"{experts}, eager"] = partial(model_step, model, tokens)
        if many and experts != "eager":
            whole = whole_model(name, dtype, experts, quick)
            counters.clear()
            whole.compile()
            steps[f"{experts}, compiled"] = step = partial(model_step, whole, tokens)
            step()
            report.fact(case, f"graph breaks, {experts}", sum(counters["graph_break"].values()))
    print(f"\n{case}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    report.times(case, "forward + backward", time_in_turn(steps, scale), "grouped_mm, eager")
    kept = {experts: experts_kept(model, experts, T) for experts in (ours, *library)}
    for experts, (size, minimum) in kept.items():
        report.fact(case, f"bytes the experts keep / (T·H + N·2F), {experts}", size / minimum)
    report.fact(case, "bytes kept: ours over grouped_mm's", kept[ours][0] / kept["grouped_mm"][0],
                limit=0.4, judge=not quick and many)


def bench_models(report: Report, scale: Scale) -> None:
    """Whole models with the library's experts, with ours, and with our blocks."""
    if importlib.util.find_spec("transformers") is None:
        report.note("transformers is not installed: there are no models to time")
        return
    quick = scale is QUICK
    few, many = (4, 32) if quick else (64, 512)
    for name in list(WHOLE_MODELS)[:1] if quick else WHOLE_MODELS:
        for dtype in (FP32,) if quick else (FP32, BF16):
            bench_model(report, scale, name, dtype, few, many=False)
            bench_model(report, scale, name, dtype, many, many=True)


# ---- Command line ----

COMMANDS = {"layer": bench_layer, "overlap": bench_overlap, "ranks": bench_ranks,
            "families": bench_families, "models": bench_models}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the layer costs, beside what else one could use.")
    parser.add_argument("command", nargs="?", default="layer", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds, no verdict on time and bytes")
    parser.add_argument("--against", metavar="FOLDER", help="ranks: another copy of kernels.py, moe.py, .. to time beside")
    parser.add_argument("--json", metavar="FILE", help="all that is printed, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="the ratios to the bare products (needs matplotlib)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")      # transformers'
    scale = QUICK if args.quick else FULL
    report = Report({
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__, "threads": torch.get_num_threads(), "bf16 matrix instructions": BF16 not in SLOW,
        "runs": f"at most {scale.rounds} or about {scale.seconds:g} s a candidate", "load": round(os.getloadavg()[0], 1)})
    if args.against and args.command != "ranks":
        parser.error("--against goes with ranks")
    COMMANDS[args.command](report, scale, *([args.against] if args.against else []))
    report.print_targets()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        report.note("matplotlib is not installed: no plot")
    elif args.plot:
        plot(report.data["rows"], args.plot)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report.data, file, indent=1)
    differing = [t["what"] for t in report.data["targets"] if t["what"].startswith("runs of 20") and t["value"] > 0]
    sys.exit(f"check failed: {', '.join(differing)}" if differing else 0)


if __name__ == "__main__":
    main()
