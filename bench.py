"""What the layer costs, beside what else one could use.

    python bench.py layer                            # and its parts, and decoding
    python bench.py overlap [--profile]              # the shared expert beside the routed path
    python bench.py ranks [--against FOLDER]         # over ep; beside another copy of these files
    python bench.py families                         # published layers, scaled down
    python bench.py models                           # Hugging Face models with our experts, blocks
    python bench.py card                             # one GPU: times, TFLOP/s, GB/s, syncs
    python bench.py curves --run FOLDER              # draws runs of examples/train.py --out FOLDER
    python bench.py order                            # draws docs/overlap.svg from docs/overlap.md

Before anything is timed, the output and the gradients of every candidate are compared with those
of a plain loop over the experts in fp64, or of eager mode where the loop cannot compute the same.
Candidates take turns in one process, in an order that is shuffled anew every round. Times are
medians with the 10th and 90th percentile, and ratios are those of medians. A backward is timed
with its forward and never subtracted. Letters: kernels.py.
"""
import argparse
import gc
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import compat
import grouped
import kernels
import maps
import moe
import small
from examples import measure_steps, steps
from models.configs import read_config
from models.experts import register_experts
from models.live import replace_blocks
from ranks.parallel import ProcessGroups

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = ACCELERATOR.type if ACCELERATOR else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SHORT = {FP32: "fp32", BF16: "bf16"}
TOLERANCE = {FP32: 1e-5, BF16: 2e-2}          # of ‖difference‖ / ‖right‖, for each tensor
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

FP64_DEVICE = DEVICE if DEVICE == "cuda" else "cpu"                  # not every device has fp64
BF16_IS_SLOW = DEVICE == "cpu" and not compat.cpu_multiplies_in(BF16)   # no matrix instructions


# ---- Cases ----

class Case(NamedTuple):
    T: int
    H: int
    F: int
    E: int
    K: int
    dtype: torch.dtype

    def __str__(self):
        sizes = f"T={self.T} H={self.H} F={self.F} E={self.E} K={self.K}"
        return f"{sizes} {SHORT[self.dtype]} {DEVICE}"

    def tiny(self) -> "Case":
        return self._replace(
            T=min(self.T, 64),
            K=min(self.K, 4),
            H=32,
            F=16,
            E=8)

    def config(self, module=moe, **fields):
        return module.MoEConfig(
            hidden_size=self.H,
            ffn_hidden_size=self.F,
            num_experts=self.E,
            topk=self.K,
            params_dtype=self.dtype,
            **fields)


FORWARD, BOTH = "forward", "forward + backward"
OURS, PEER = "layer, compiled", "Hugging Face grouped_mm, compiled"
MANY_EXPERTS = (2048, 512, 256, 64, 8)                     # T, H, F, E, K
FEW_EXPERTS = (2048, 512, 1024, 8, 2)
SMALL_EXPERTS = (4096, 256, 128, 128, 8)
SIZES = (MANY_EXPERTS, FEW_EXPERTS, SMALL_EXPERTS)
LAYER = [Case(*sizes, dtype) for sizes in SIZES for dtype in SHORT]
EAGER_SIZES = (
    MANY_EXPERTS,
    (512, 256, 96, 16, 4),
    (512, 64, 64, 16, 4),
)
EAGER = [Case(*sizes, dtype) for sizes in EAGER_SIZES for dtype in SHORT]
PERMUTE = [Case(*MANY_EXPERTS, dtype)._replace(E=E) for dtype in SHORT for E in (64, 256)]
ROUTER = [Case(*MANY_EXPERTS, BF16)._replace(E=256)]
DECODE = [Case(1, 2048, 768, 128, 8, BF16)] + [
    Case(T, 512, 256, 64, 8, dtype) for T in (1, 2, 4, 8, 16) for dtype in (FP32, BF16)]
RANKS = [Case(1024, 512, 256, E, K, FP32) for E, K in ((16, 4), (64, 8))]
CARD = [
    Case(40960, 768, 256, 128, 8, BF16),
    Case(24576, 1536, 256, 128, 8, BF16),
    Case(32768, 4096, 512, 128, 8, BF16),
    Case(32768, 4096, 1024, 64, 4, BF16),
]


# ---- Candidates: functions to time ----

class Candidate(NamedTuple):
    """A function or a module. Its step computes the gradients of the inputs and parameters too."""
    function: Callable
    inputs: list[Tensor]
    grads: list[Tensor] = []                  # of the outputs; none: a step is only a forward

    def parameters(self) -> list[Tensor]:
        if isinstance(self.function, nn.Module):
            return list(self.function.parameters())
        return []

    def forward(self) -> Tensor | list:
        return self.function(*self.inputs)

    def step(self) -> list[Tensor]:
        y = self.forward()
        outputs = [y] if isinstance(y, Tensor) else y
        if not self.grads:
            return outputs
        leaves = [leaf for leaf in self.inputs + self.parameters() if leaf.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, leaves, self.grads)]

    def bytes_kept(self) -> int:
        return measure_steps.bytes_kept(self.forward, self.parameters())

    def compiled(self, dynamic: bool | None = None) -> "Candidate":
        function = torch.compile(self.function, fullgraph=True, dynamic=dynamic)
        return self._replace(function=function)

    def both(self, name: str) -> dict[str, "Candidate"]:
        return {f"{name}, compiled": self.compiled(), f"{name}, eager": self}



def in_fp64(function: Callable, like: Candidate) -> list[Tensor]:
    """Outputs and gradients of the function, on the inputs and parameters of another candidate."""
    leaves = like.inputs + like.parameters()
    wide = [leaf.detach().to(FP64_DEVICE).double().requires_grad_() for leaf in leaves]
    grads = [grad.to(FP64_DEVICE).double() for grad in like.grads]
    return Candidate(function, wide, grads).step()


def check(candidates: dict, right: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Ends the program if an output or a gradient is wrong."""
    for name, candidate in candidates.items():
        for pair in zip(candidate.step(), right, strict=True):
            got, want = (x.detach().to(FP64_DEVICE).double().flatten() for x in pair)
            size = want.norm().clamp(min=1e-30)
            error = (got - want).norm() / size
            if not error <= TOLERANCE[dtype]:
                sys.exit(f"check failed: {name}: an output or gradient is off by {error:.2e}")


# ---- Report: tables of times as they come, figures at the end ----

COLUMNS = "       ms          10 % .. 90 % runs  tokens/s  / base"
ROW = (
    "    {candidate:<37}{ms:>9.3f}{ms_10:>10.3f} ..{ms_90:>9.3f}{runs:>5}{tokens_per_s:>10.0f}"
    "{over_base:>8.2f}")
FIGURE = "  {case}\n    {what:<70}{value:>9.4g}"


def time_in_turn(
    candidates: dict,
    rounds: int,
    seconds: float,
    method: str = "step",
    before: Callable = lambda: None,
) -> dict[str, list]:
    """name -> milliseconds of each run of the method, once warm; `before` is called before each.
    A slow candidate sits rounds out so that its runs take about `seconds`."""
    functions = {name: getattr(candidate, method) for name, candidate in candidates.items()}
    for function in functions.values():
        function()
    gc.collect()
    gc.freeze()                               # collections between the runs skip what is loaded
    synchronize = torch.get_device_module(DEVICE).synchronize
    samples = {name: [] for name in functions}
    shuffle = random.Random(0)
    for i in range(rounds):
        share = seconds * 1e3 * (i + 1) / rounds
        due = [name for name, ms in samples.items() if sum(ms) <= share]
        for name in shuffle.sample(due, len(due)):
            before()
            synchronize()
            start = time.perf_counter()
            functions[name]()
            synchronize()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def fastest(medians: dict[str, float], start: str) -> str | None:
    """The candidate with the smallest median among those whose names start so."""
    names = [name for name in medians if name.startswith(start)]
    return min(names, key=medians.get, default=None)


class Report:
    def __init__(self, args: argparse.Namespace):
        self.quick = args.quick
        self.against, self.profile = args.against, args.profile
        self.rounds, self.seconds = (5, 0.5) if args.quick else (20, 6.0)
        device = DEVICE
        if DEVICE == "cpu":
            device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
        elif DEVICE in ("cuda", "xpu"):
            device = torch.get_device_module(DEVICE).get_device_name()
        given_back = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"}.isdisjoint(os.environ)
        self.header = {
            "device": device,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "bf16 matrix instructions": not BF16_IS_SLOW,
            "freed memory": "given back" if given_back else "kept",
            "transformers": HAS_TRANSFORMERS,
            "load": round(os.getloadavg()[0], 1),
        }
        self.rows, self.figures = [], []
        print("   ".join(f"{name}: {value}" for name, value in self.header.items()))

    def cases(self, cases: Iterable[Case]) -> list[Case]:
        """All of them; with --quick the first two, tiny."""
        return [case.tiny() for case in cases][:2] if self.quick else list(cases)

    def progress(self, things: list) -> Iterable:
        """The things, one after the other, with a line that says how long is left."""
        start = time.perf_counter()
        for done, thing in enumerate(things):
            if done:
                minutes = (time.perf_counter() - start) / 60
                left = minutes / done * (len(things) - done)
                print(f"\n{done} of {len(things)} cases in {minutes:.1f} min, "
                      f"about {left:.1f} left")
            yield thing

    def compare(self, case: Case, what: str, candidates: dict, beside: list[str]) -> None:
        """Times the candidates, and reports them."""
        method = "forward" if what == FORWARD else "step"
        samples = time_in_turn(candidates, self.rounds, self.seconds, method=method)
        self.times(case, what, samples, beside)

    def times(self, case: Case, what: str, samples: dict, beside: list[str]) -> None:
        """A line per candidate. A name in `beside` stands for the fastest candidate that starts so:
        the time of the first candidate over that one's is a figure. The first name is the base of
        the table."""
        levels = torch.tensor([0.5, 0.1, 0.9])
        times = {
            name: torch.tensor(ms).quantile(levels).tolist()
            for name, ms in samples.items()
        }
        medians = {name: ms for name, (ms, _, _) in times.items()}
        ours = next(iter(medians))
        base = fastest(medians, beside[0])
        print(f"\n{case}\n    {what:<37}{COLUMNS}")
        for name, (ms, ms_10, ms_90) in times.items():
            row = dict(
                case=str(case),
                what=what,
                candidate=name,
                ms=ms,
                ms_10=ms_10,
                ms_90=ms_90,
                runs=len(samples[name]),
                tokens_per_s=case.T / ms * 1e3,
                over_base=ms / medians[base])
            print(ROW.format(**row))
            self.rows.append(row)
        for start in beside:
            other = fastest(medians, start)
            if other is not None:
                self.figure(case, f"{what}: {ours} / {other}", medians[ours] / medians[other])

    def figure(self, case: Case, what: str, value: float) -> None:
        self.figures.append(dict(case=str(case), what=what, value=value))

    def print_figures(self) -> None:
        print("\nfigures")
        for figure in self.figures:
            print(FIGURE.format(**figure))


# ---- The layer, and what is right ----

def layer_and_input(config: moe.MoEConfig, T: int) -> tuple[moe.MoELayer, Tensor, list[Tensor]]:
    """(layer, x, [gradient of the output]).

    Tokens whose K-th and next best expert nearly tie are not taken: rounding would decide there,
    and the candidates would route differently.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = moe.MoELayer(config).to(DEVICE)
    drawn = torch.randn(2 * T + 16, config.hidden_size).to(config.params_dtype)
    logits = F.linear(drawn.double(), layer.router.weight.cpu().double())
    best = logits.topk(config.topk + 1).values
    clear = best[:, -2] - best[:, -1] > 1e-4
    x = drawn[clear][:T, None].to(DEVICE).clone().requires_grad_()
    return layer, x, [torch.randn_like(x)]


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def ffn(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return F.linear(swiglu(F.linear(x, fc1)), fc2)


def loop_over_experts(
    topk: int, x: Tensor, router: Tensor, fc1: Tensor, fc2: Tensor, *shared: Tensor,
) -> Tensor:
    """y_t = Σ_k p_tk · ffn_e(x_t), e = i_tk, one expert after the other, and the shared expert.
    Nothing here is the project's."""
    x_TH = x.flatten(0, -2)
    chosen_TK, indices_TK = F.linear(x_TH, router).topk(topk)
    probs_TK = chosen_TK.softmax(-1)
    y_TH = torch.zeros_like(x_TH)
    for e in range(len(fc1)):
        token, k = (indices_TK == e).nonzero(as_tuple=True)
        rows = ffn(x_TH[token], fc1[e].flatten(0, 1), fc2[e])
        y_TH = y_TH.index_add(0, token, rows * probs_TK[token, k, None])
    if shared:
        fc1, fc2 = shared
        y_TH = y_TH + ffn(x_TH, fc1.flatten(0, 1), fc2)
    return y_TH.view_as(x)


# ---- What else one could use, from small.py to Hugging Face's block ----

def bare_products(layer: moe.MoELayer, x: Tensor) -> dict[str, Candidate]:
    """The products that no layer can do without, in two ways: two in a forward, four more in a
    backward, on contiguous rows in expert order with the layer's own split."""
    _, indices_TK = layer.router.route(x)
    plan = kernels.plan_permutation(indices_TK, layer.config.num_experts)
    counts = plan.counts.tolist()
    rows = x.flatten(0, 1)[plan.order // layer.config.topk]
    fc1 = layer.experts.fc1.flatten(1, 2)
    fc2 = layer.experts.fc2
    act = torch.randn_like(rows @ fc2[0])
    inputs = [leaf.detach().requires_grad_(x.requires_grad) for leaf in (rows, fc1, act, fc2)]

    def products(multiply):
        return lambda rows, fc1, act, fc2: [multiply(rows, fc1.mT), multiply(act, fc2.mT)]

    def per_expert(rows, weights):
        return torch.cat([a @ b for a, b in zip(rows.split(counts), weights)])

    grads = []
    if x.requires_grad:
        grads = [torch.randn_like(y) for y in products(per_expert)(*inputs)]
    ours = partial(grouped.grouped_mm, offsets=plan.offsets)
    like = Candidate(products(ours), inputs, grads)
    candidates = {"products by grouped.grouped_mm": like}
    if DEVICE == "cpu" or x.dtype == BF16:
        torchs = partial(F.grouped_mm, offs=plan.offsets)
        candidates["products by F.grouped_mm"] = Candidate(products(torchs), inputs, grads)
    check(candidates, in_fp64(products(per_expert), like), x.dtype)
    return candidates


def of_one_file(kind: type, case: Case, layer: moe.MoELayer) -> nn.Module:
    """small.py's layer, or one of examples/steps.py, with the weights of ours."""
    other = kind(case.H, case.F, case.E, case.K).to(DEVICE, case.dtype)
    other.load_state_dict(dict(zip(other.state_dict(), layer.parameters())))
    return other


def sorted_rows(case: Case, layer: moe.MoELayer, x: Tensor, grads: list) -> dict[str, Candidate]:
    """What one writes first, step 2 of examples/steps.py. Compiled only in bf16: F.grouped_mm
    refuses fp32 in a graph of torch 2.13.
    """
    x_TH, grad_TH = x.detach().flatten(0, 1).requires_grad_(), grads[0].flatten(0, 1)
    plain = of_one_file(steps.Sorted, case, layer)
    candidates = Candidate(plain, [x_TH], [grad_TH]).both("sorted rows")
    if case.dtype != BF16:
        del candidates["sorted rows, compiled"]
    return candidates


def dense_ffn(case: Case, x: Tensor, grads: list[Tensor]) -> dict[str, Candidate]:
    """A SwiGLU of width K·F: the same active parameters and products, no routing."""
    width = case.K * case.F
    shapes = ((2 * width, case.H), (case.H, width))
    weights = [torch.randn(shape).to(x).requires_grad_() for shape in shapes]
    inputs = [x, *weights]
    candidates = Candidate(ffn, inputs, grads).both("dense FFN")
    check(candidates, in_fp64(ffn, like=candidates["dense FFN, eager"]), case.dtype)
    return candidates


def published_fields(case: Case) -> dict[str, int]:
    """The case's sizes, each under every name that configs of published models have for it."""
    sizes = {
        "hidden_size d_model": case.H,
        "intermediate_size moe_intermediate_size ffn_hidden_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size": case.F,
        "num_experts num_local_experts n_routed_experts moe_num_experts": case.E,
        "num_experts_per_tok moe_k moe_topk moe_top_k": case.K,
    }
    return {name: size for names, size in sizes.items() for name in names.split()}


def hugging_face_block(case: Case, layer: moe.MoELayer, how: str) -> nn.Module:
    """Qwen3-MoE's block on our weights, with that implementation of the experts. Its gate has fp32
    logits, as our router: on bf16 logits it chooses other experts."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    config = Qwen3MoeConfig(norm_topk_prob=True, **published_fields(case))
    config._experts_implementation = how
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    block.gate.weight = nn.Parameter(layer.router.weight.detach().float())
    block.experts.gate_up_proj = nn.Parameter(layer.experts.fc1.detach().flatten(1, 2))
    block.experts.down_proj = nn.Parameter(layer.experts.fc2.detach())

    def in_dtype(_gate, _x, output):
        logits, probs, indices = output
        return logits, probs.to(case.dtype), indices

    block.gate.register_forward_pre_hook(lambda _gate, x: x[0].float())
    block.gate.register_forward_hook(in_dtype)
    block.experts = block._modules.pop("experts")          # parameters in our order
    return block


# ---- layer: its cases, the experts alone, the permute part, the router, one token ----

def bench_case(report: Report, case: Case) -> None:
    """The layer beside the bare products, a dense FFN and Hugging Face's block."""
    layer, x, grads = layer_and_input(case.config(), case.T)
    candidates = Candidate(layer, [x], grads).both("layer")
    candidates |= Candidate(of_one_file(small.MoE, case, layer), [x], grads).both("small.py")
    candidates |= sorted_rows(case, layer, x, grads)
    if HAS_TRANSFORMERS:
        for how in ("grouped_mm", "eager"):
            block = hugging_face_block(case, layer, how)
            candidates |= Candidate(block, [x], grads).both(f"Hugging Face {how}")
        del candidates["Hugging Face eager, compiled"]     # its loop is no graph
    right = in_fp64(partial(loop_over_experts, case.K), like=candidates[OURS])
    check(candidates, right, case.dtype)
    candidates |= dense_ffn(case, x, grads) | bare_products(layer, x)
    for what in (FORWARD, BOTH):
        report.compare(
            case, what, candidates, ["products", PEER, "small.py, compiled", "sorted rows"])

    N = case.T * case.K
    needed = (case.T * case.H + N * 2 * case.F) * case.dtype.itemsize   # the input, fc1's output
    plan = N * (3 * 8 + 4) + case.E * 4       # indices, order, inverse; fp32 probs; int32 offsets
    for name in (OURS, "layer, eager"):
        ratio = (candidates[name].bytes_kept() - plan) / needed
        report.figure(case, f"bytes kept / (T·H + N·2F), {name}", value=ratio)
    for name, candidate in candidates.items():
        if name.startswith(("layer", "small.py", "sorted rows", "Hugging Face")):
            kept = candidate.bytes_kept() / case.T / 1e3
            report.figure(case, f"kB kept a token, {name}", value=kept)


def bench_eager(report: Report, case: Case) -> None:
    """The experts alone, in eager mode: Hugging Face's module with our products and with theirs."""
    if not HAS_TRANSFORMERS:
        return
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


@torch.no_grad()
def bench_decode(report: Report, case: Case) -> None:
    """Few tokens without gradients, beside Hugging Face's block and the products of the experts."""
    layer, x, _ = layer_and_input(case.config(), case.T)
    x = x.detach()
    ours = Candidate(layer.eval(), [x])
    candidates = ours.both("layer")
    if case.T > 1:                                # one token has a graph of its own
        candidates["layer, compiled for any T"] = ours.compiled(dynamic=True)
    if HAS_TRANSFORMERS:
        for how in ("grouped_mm", "batched_mm"):
            block = hugging_face_block(case, layer, how).eval()
            candidates |= Candidate(block, [x]).both(f"Hugging Face {how}")
    right = in_fp64(partial(loop_over_experts, case.K), like=candidates[OURS])
    with torch.no_grad():
        check(candidates, right, case.dtype)
        candidates |= bare_products(layer, x)
        report.compare(case, "decoding, forward", candidates, ["products", PEER])


def bench_layer(report: Report) -> None:
    benches = {
        bench_case: LAYER,
        bench_eager: EAGER,
        bench_permute: PERMUTE,
        bench_router: ROUTER,
        bench_decode: DECODE,
    }
    pairs = [(bench, case) for bench, cases in benches.items() for case in report.cases(cases)]
    for bench, case in report.progress(pairs):
        bench(report, case)


# ---- overlap: the shared expert on its own stream beside the routed path ----

def bench_overlap(report: Report) -> None:
    """With and without overlap: bitwise the same. Only CUDA has a second stream to save time."""
    case = report.cases(LAYER)[0]
    candidates = {}
    for name, overlap in {"in steps, eager": True, "one go, eager": False}.items():
        config = case.config(shared_expert_intermediate_size=1024, shared_expert_overlap=overlap)
        layer, x, grads = layer_and_input(config, case.T)
        candidates[name] = Candidate(layer, [x], grads)
    right = in_fp64(partial(loop_over_experts, case.K), like=candidates[name])
    check(candidates, right, case.dtype)
    results = [candidate.step() for candidate in candidates.values()]
    differ = sum(not torch.equal(a, b) for a, b in zip(*results))
    report.figure(case, "tensors that differ, overlap on / off", value=differ)
    report.compare(case, BOTH, candidates, ["one go"])
    if report.profile:
        trace = traced(candidates["in steps, eager"])
        for phase, (shared, routed, exchange) in beside_in(trace).items():
            print(f"{phase}: the shared expert's kernels run {shared:.0f} us, {routed:.0f} of them "
                  f"beside the routed path and {exchange:.0f} beside an exchange")


def traced(candidate: Candidate) -> dict:
    """One step under torch.profiler, as the JSON that Chrome reads. A forward and its backward are
    marked by these words."""
    candidate.step()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("forward"):
            output = candidate.forward()
        with torch.profiler.record_function("backward"):
            torch.autograd.backward(output, candidate.grads)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())


def beside_in(trace: dict) -> dict[str, tuple[float, float, float]]:
    """"forward" and "backward" -> microseconds: in which kernels of the shared expert run, in which
    some of the routed path run at the same time, and in which an exchange does.

    Of the streams without an exchange (NCCL's kernels), the main one has the most kernel time; the
    shared expert's is the other. A kernel is of the direction in which the host launched it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events
             if event.get("cat") == "user_annotation"}
    launched = {event["args"]["correlation"]: event["ts"] for event in events
                if "correlation" in event.get("args", ()) and event["cat"] != "kernel"}
    kernels_of = {}                                        # stream -> kernels
    for event in events:
        if event.get("cat") == "kernel":
            stream = "exchange" if "nccl" in event["name"].lower() else event["args"]["stream"]
            kernels_of.setdefault(stream, []).append(event)
    exchange = kernels_of.pop("exchange", [])
    main, *others = sorted(kernels_of.values(), key=lambda kernels: -busy(intervals(kernels)))
    shared = others[0] if others else []

    result = {}
    for phase in ("forward", "backward"):
        start, end = marks[phase]
        own = intervals(kernel for kernel in shared
                        if start <= launched[kernel["args"]["correlation"]] <= end)
        result[phase] = (
            busy(own), busy(common(own, intervals(main))), busy(common(own, intervals(exchange))))
    return result


def intervals(kernels: Iterable[dict]) -> list[tuple[float, float]]:
    """When any of the kernels runs: intervals in order, which do not touch."""
    merged = []
    for start, end in sorted((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common(first: list, second: list) -> list[tuple[float, float]]:
    """When both are on."""
    cuts = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in cuts if start < end]


def busy(spans: list) -> float:
    return sum(end - start for start, end in spans)


# ---- ranks: experts over two and four processes ----

def other_copy(folder: str) -> tuple:
    """(moe.py, ProcessGroups) of another copy of these files, as a package of its own."""
    package = types.ModuleType("other_copy")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    in_ranks = Path(folder, "ranks").is_dir()              # not in older copies
    parallel = "ranks.parallel" if in_ranks else "parallel"
    files = [importlib.import_module(f"other_copy.{file}") for file in ("moe", parallel)]
    return files[0], files[1].ProcessGroups


def time_on_rank(rank: int, ranks: int, store: str, case: Case, report: Report, queue) -> None:
    """The layer over ep = ranks, gloo, one thread each. All results are compared; all ranks run
    the candidates in the same order, with a barrier before each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    modules = {"layer": (moe, ProcessGroups)}
    if report.against:
        modules["other copy"] = other_copy(report.against)
    torch.manual_seed(rank)
    x = torch.randn(case.T, 1, case.H, requires_grad=True)
    grads = [torch.randn_like(x)]
    candidates = {}
    weights = None
    torch.manual_seed(0)
    for name, (module, groups) in modules.items():
        config = case.config(
            module, shared_expert_intermediate_size=1024, shared_expert_overlap=True)
        layer = module.MoELayer(config, groups.from_mesh(mesh))
        weights = weights or layer.state_dict()            # a copy may draw others from the seed
        layer.load_state_dict(weights)
        candidates |= Candidate(layer, [x], grads).both(name)
    check(candidates, candidates["layer, eager"].step(), case.dtype)
    samples = time_in_turn(candidates, report.rounds, float("inf"), before=dist.barrier)
    if rank == 0:
        queue.put(samples)
    dist.destroy_process_group()


def bench_ranks(report: Report) -> None:
    """The layer with overlap over processes: one graph beside eager mode and another copy."""
    sizes = [(ranks, case) for ranks in (2, 4) for case in report.cases(RANKS)]
    for ranks, case in report.progress(sizes[::3 if report.quick else 1]):
        queue = torch.multiprocessing.get_context("forkserver").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            args = (ranks, f"{folder}/store", case, report, queue)
            torch.multiprocessing.start_processes(
                time_on_rank, args, nprocs=ranks, start_method="forkserver")
        beside = ["layer, eager", "other copy, compiled"]
        report.times(case, f"ep {ranks}, {BOTH}", queue.get(), beside)


# ---- families: published layers, scaled down to H = 256 ----

FAMILIES = {                                  # F in the published proportion to H, and E, K
    "mixtral": (896, 8, 2),
    "olmoe": (128, 64, 8),
    "qwen3_moe": (96, 128, 8),
    "qwen2_moe": (176, 60, 4),
    "qwen3_next": (64, 512, 10),
    "deepseek_v2": (80, 160, 6),
    "deepseek_v3": (72, 256, 8),
    "kimi_k2": (72, 384, 8),
    "llama4_text": (408, 16, 1),
    "gpt_oss": (256, 32, 4),
    "ernie4_5_moe": (152, 64, 6),
    "nemotron_h": (176, 128, 6),
    "dbrx": (448, 16, 4),
}


def bench_families(report: Report) -> None:
    """The routed experts of every family beside their bare products."""
    for model_type in report.progress(list(FAMILIES)[::5 if report.quick else 1]):
        sizes = (512, 256, *FAMILIES[model_type])
        case = report.cases([Case(*sizes, FP32)])[0]
        fields = published_fields(case)
        published = {"model_type": model_type, "ffn_config": fields, **fields}
        config = moe.MoEConfig(**read_config(published).fields)
        config = replace(config, shared_expert_intermediate_size=None, shared_expert_gate=False)
        layer, x, grads = layer_and_input(config, case.T)
        candidates = Candidate(layer, [x], grads).both("layer")
        check(candidates, candidates["layer, eager"].step(), case.dtype)
        candidates |= bare_products(layer, x)
        report.compare(case, f"{model_type}, {BOTH}", candidates, ["products"])


# ---- models: whole Hugging Face models of some 100 M random parameters ----

MODELS = {                                    # F, E, K
    "qwen3_moe": (384, 32, 4),
    "deepseek_v3": (256, 64, 6),
    "gpt_oss": (768, 16, 4),
}
DEEPSEEK = dict(
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    kv_lora_rank=128,
    q_lora_rank=256)


class LossOf(nn.Module):
    """The loss of a random model, the same for every implementation of the experts."""

    def __init__(self, model_type: str, case: Case, experts: str):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type,
            vocab_size=8192,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            **DEEPSEEK if model_type == "deepseek_v3" else {"head_dim": 64},
            **published_fields(case))
        self.model = AutoModelForCausalLM.from_config(config).to(DEVICE, case.dtype)
        if experts == "blocks":
            replace_blocks(self.model)
        else:
            self.model.set_experts_implementation(experts)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, labels=tokens, use_cache=False).loss


def bench_model(report: Report, model_type: str, case: Case) -> None:
    """One model with our experts, the library's and our blocks."""
    torch._dynamo.reset()
    inputs = [torch.randint(1, 64, (1, case.T), device=DEVICE)]
    grads = [torch.ones((), device=DEVICE)]
    candidates = {}
    for experts in (register_experts(), "grouped_mm", "eager"):
        loss = LossOf(model_type, case, experts)
        candidates |= Candidate(loss, inputs, grads).both(experts)
    del candidates["eager, compiled"]                      # its loop is no graph
    if case.dtype == FP32:
        check(candidates, candidates["eager, eager"].step(), FP32)
    loss = LossOf(model_type, case, "blocks")
    candidates |= Candidate(loss, inputs, grads).both("blocks")
    report.compare(case, f"{model_type}, {BOTH}", candidates, ["grouped_mm"])


def bench_models(report: Report) -> None:
    """Every model with few and with many tokens."""
    if not HAS_TRANSFORMERS:
        return
    pairs = []
    for model_type in list(MODELS)[:1] if report.quick else MODELS:
        sizes = (512, *MODELS[model_type])
        cases = [Case(T, *sizes, dtype) for T in (64, 512) for dtype in SHORT]
        pairs += [(model_type, case) for case in report.cases(cases)]
    for model_type, case in report.progress(pairs):
        bench_model(report, model_type, case)


# ---- card: the layer on one GPU ----

def card_layer(report: Report, case: Case) -> None:
    """The layer beside the bare products, a dense FFN and Hugging Face's block: times, TFLOP/s (6
    or 18 · T·F·H·K), bytes. It is checked on the first 4096 tokens."""
    layer, x, grads = layer_and_input(case.config(), case.T)

    def layers(x, grads):
        candidates = Candidate(layer, [x], grads).both("layer")
        if HAS_TRANSFORMERS:
            block = hugging_face_block(case, layer, "grouped_mm")
            candidates |= Candidate(block, [x], grads).both("Hugging Face grouped_mm")
        return candidates

    candidates = layers(x[:4096].detach().requires_grad_(), [grads[0][:4096]])
    right = in_fp64(partial(loop_over_experts, case.K), like=candidates[OURS])
    check(candidates, right, case.dtype)
    torch._dynamo.reset()                                  # graphs for only this T
    candidates = layers(x, grads) | dense_ffn(case, x, grads) | bare_products(layer, x)
    for what, factor in ((FORWARD, 6), (BOTH, 18)):
        report.compare(case, what, candidates, ["products", PEER])
        for row in report.rows[-len(candidates):]:
            rate = factor * case.T * case.F * case.H * case.K / row["ms"] / 1e9
            report.figure(case, f"{what}: {row['candidate']}, TFLOP/s", value=rate)
    for name, candidate in candidates.items():
        kept = candidate.bytes_kept() / 2 ** 20
        report.figure(case, f"{name}: MiB kept for the backward", value=kept)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            candidate.step()
            peak = (torch.cuda.max_memory_allocated() - before) / 2 ** 20
            report.figure(case, f"{name}: MiB at the peak of a step", value=peak)


@torch.no_grad()
def card_rows(report: Report, case: Case) -> None:
    """Permute and combine beside a device copy, in GB/s."""
    layer, x, _ = layer_and_input(case.config(), case.T)
    x_TH = x.detach().flatten(0, 1)
    _, indices_TK = layer.router.route(x_TH)
    plan = kernels.plan_permutation(indices_TK, case.E)
    rows = kernels.gather_rows(x_TH, plan)
    candidates = {
        "permute": Candidate(lambda x: kernels.gather_rows(x, plan), [x_TH]).compiled(),
        "combine": Candidate(lambda rows: kernels.combine_rows(rows, plan), [rows]).compiled(),
        "copy": Candidate(torch.clone, [rows]),
    }
    check({"permute": candidates["permute"]}, [x_TH[plan.order // case.K]], case.dtype)
    combined = rows.to(FP64_DEVICE).double()[plan.inverse.to(FP64_DEVICE)].sum(1)
    check({"combine": candidates["combine"]}, [combined], case.dtype)
    report.compare(case, "rows, forward", candidates, ["copy"])
    moved = {"permute": 2 * rows.numel(), "combine": rows.numel() + x.numel()}
    for row in report.rows[-len(candidates):]:
        size = moved.get(row["candidate"], 2 * rows.numel()) * rows.itemsize
        report.figure(case, f"{row['candidate']}, GB/s", value=size / row["ms"] / 1e6)


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
def card_products(report: Report, case: Case) -> None:
    """fc1's product and its weight's gradient, alone: by grouped_triton.py in several tiles, by
    torch, where that reads the offsets on the card, and by a loop over experts."""
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


class Exchanged:
    """One rank's dispatch, which copies as many rows as the all-to-alls out and back would."""

    def __init__(self, local, rows: Tensor):
        self.local = local
        self.rows = rows
        self.wait_and_combine = local.wait_and_combine

    def wait_for_rows(self) -> tuple:
        self.rows.clone()
        return self.local.wait_for_rows()

    def send_back(self, y: Tensor) -> Tensor:
        self.rows.clone()
        return self.local.send_back(y)


def card_overlap(report: Report, case: Case) -> None:
    """The shared expert in steps on its own stream beside copies, and in one go. Eager mode."""
    candidates = {}
    for name, overlap in {"in steps": True, "one go": False}.items():
        config = case.config(
            shared_expert_intermediate_size=case.K * case.F, shared_expert_overlap=overlap)
        layer, x, grads = layer_and_input(config, case.T)
        rows = x.detach().flatten(0, 1).repeat(case.K, 1)
        dispatch = layer.dispatch
        layer.dispatch = lambda *args, dispatch=dispatch, rows=rows, **kwargs: Exchanged(
            dispatch(*args, **kwargs), rows)
        candidates[name] = Candidate(layer, [x], grads)
    check({"in steps": candidates["in steps"]}, candidates["one go"].step(), case.dtype)
    for what in (FORWARD, BOTH):
        report.compare(case, what, candidates, ["one go"])


def card_syncs(report: Report, case: Case) -> None:
    """How often a step makes the host wait for the card."""
    for dtype in SHORT:
        case = case._replace(dtype=dtype)
        layer, x, grads = layer_and_input(case.config(), case.T)
        for name, candidate in Candidate(layer, [x], grads).both("layer").items():
            candidate.step()
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                candidate.step()
            torch.cuda.set_sync_debug_mode("default")
            syncs = sum("synchronizing" in str(warning.message) for warning in caught)
            report.figure(case, f"{name}: host syncs of a step", value=syncs)


def bench_card(report: Report) -> None:
    """At most 10 minutes on one GPU."""
    if DEVICE != "cuda":
        print("card: no CUDA device. Without one only --quick runs, at small sizes, without syncs.")
        if not report.quick:
            return
    if not HAS_TRANSFORMERS:
        print("card: transformers is not installed, so its block is left out.")
    print("card: the library's own kernels are left out: their package has the name of kernels.py.")
    report.seconds = min(report.seconds, 2.0)
    for case in report.progress(report.cases(CARD)):
        card_products(report, case)
        card_layer(report, case)
        card_rows(report, case)
        card_overlap(report, case)
    if DEVICE == "cuda":
        card_syncs(report, case)


# ---- The runs of examples/train.py ----

def draw_curves(folder: Path) -> None:
    """The losses of the run and of its baselines; for every MoE each expert's load over the steps.
    Needs matplotlib."""
    from matplotlib.figure import Figure
    runs = {}
    for path in [folder / "log.jsonl", *sorted(folder.glob("*/log.jsonl"))]:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        runs[path.parent.name] = {
            key: [(record["step"], record[key]) for record in records if key in record]
            for key in ("loss", "held_out", "tokens_per_expert")}
    moes = {name: run for name, run in runs.items() if run["tokens_per_expert"]}
    figure = Figure(figsize=(5 + 3 * len(moes), 4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(moes), width_ratios=[5] + [3] * len(moes))
    for i, (name, run) in enumerate(runs.items()):
        for key, style in (("loss", ":"), ("held_out", "o-")):
            left.plot(*zip(*run[key]), f"C{i}{style}", label=f"{name}, {key}")
    left.set(title="loss in bits per byte", xlabel="step")
    left.legend(ncols=2)
    for axes, (name, run) in zip(others, moes.items()):
        steps, loads = zip(*run["tokens_per_expert"])
        load_TLE = torch.tensor(loads, dtype=torch.float64)          # T: reports, L: layers
        share_TLE = load_TLE / load_TLE.mean(2, keepdim=True)
        layers = share_TLE.shape[1]
        image = axes.imshow(
            share_TLE.flatten(1).t(), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r",
            interpolation="nearest", extent=(0, steps[-1], layers, 0))
        axes.set(title=f"load, {name}", xlabel="step", ylabel="layer, its experts",
                 yticks=range(layers + 1))
    if moes:
        figure.colorbar(image, label="share of an expert, 1 = even")
    figure.savefig(folder / "curves.png")
    print(f"curves: {folder / 'curves.png'}")


# ---- The order of launches with overlap ----

COLORS = {"main": "#9ec5e8", "side": "#f5b971", "ep": "#cfd8cf"}
LANES = {"main": "main stream", "side": "side stream", "ep": "all-to-all"}
HEIGHT, GAP, LEFT = 20, 14, 96                       # of a box, between lanes, of the first box
LETTER = 6.4                                         # width of a letter


class Picture:
    """Boxes in lanes, from left to right in the order of their launches, as SVG. A width is that of
    the words in a box, not a time."""

    def __init__(self):
        self.shapes = []
        self.top, self.right = 8, 0

    def text(self, x: float, y: float, words: str, size: int = 11) -> None:
        self.shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}">{words}</text>')

    def box(self, lane: str, x: float, width: float, y: float, words: str) -> None:
        self.shapes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="3" '
            f'fill="{COLORS[lane]}"/>')
        self.text(x + 5, y + 14, words)

    def direction(self, title: str, lines: list[str]) -> None:
        """One panel. A line is `where  what, what x2, ..`; where: main, side, ep or backward."""
        self.text(8, self.top + 12, title, size=13)
        rows = dict(main=self.top + 22)
        rows["side"] = rows["main"] + HEIGHT + GAP
        rows["ep"] = rows["side"] + HEIGHT + GAP
        for lane, y in rows.items():
            self.text(8, y + 14, LANES[lane])
        x = LEFT
        flying = []                                  # (what, where it begins, y) of the exchanges
        for line in lines:
            where, _, steps = line.partition("  ")
            for step in re.sub(r"(\w+) x2", r"\1, \1", steps).split(", "):
                if step.startswith("waits for"):
                    start, end = rows[step.split()[-1]] + HEIGHT, rows[where]
                    if start > end:
                        start, end = start - HEIGHT, end + HEIGHT
                    self.shapes.append(
                        f'<path d="M{x:.0f} {start:.0f}V{end:.0f}" stroke="#444" stroke-width="2" '
                        f'marker-end="url(#tip)"/>')
                    x += 10
                elif step.endswith(" issued"):
                    used = [y for *_, y in flying]
                    y = rows["ep"] if rows["ep"] not in used else rows["ep"] + HEIGHT + 2
                    flying.append((step.removesuffix(" issued"), x, y))
                elif step == "waited":
                    what, begin, y = flying.pop(0)
                    x = max(x, begin + LETTER * len(what) + 10)
                    self.box("ep", begin, x - begin, y, what)
                else:
                    lane = "side" if step.startswith("shared") else "main"
                    words = step.removeprefix("shared_").replace("_and_", ", ")
                    width = LETTER * len(words) + 10
                    self.box(lane, x, width, rows[lane], words)
                    x += width + 2
        self.right = max(self.right, x + 10)
        self.top = rows["ep"] + 2 * HEIGHT + 16

    def __str__(self) -> str:
        width, height = round(self.right), round(self.top)
        shapes = "\n".join(self.shapes)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
 font-family="sans-serif">
<marker id="tip" markerWidth="5" markerHeight="5" refX="4" refY="2.5" orient="auto">
<path d="M0 0L5 2.5L0 5z" fill="#444"/></marker>
<rect width="100%" height="100%" fill="white"/>
{shapes}
</svg>
"""


def draw_order(page: Path) -> str:
    """The SVG of the order that stands in the page: a forward, an empty line, its backward."""
    _, after = page.read_text().split("<!-- order -->\n```\n")
    forward, backward = after.split("\n```")[0].split("\n\n")
    picture = Picture()
    picture.direction("forward", forward.splitlines())
    picture.direction("backward", backward.splitlines())
    return str(picture)


# ---- Command line ----

COMMANDS = dict(
    layer=bench_layer,
    overlap=bench_overlap,
    ranks=bench_ranks,
    families=bench_families,
    models=bench_models,
    card=bench_card)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command", nargs="?", default="layer", choices=[*COMMANDS, "curves", "order"])
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument(
        "--profile", action="store_true", help="overlap: reads a trace of a CUDA card")
    parser.add_argument("--against", metavar="FOLDER", help="ranks: another copy of these files")
    parser.add_argument(
        "--run", metavar="FOLDER", default="out", help="curves: --out of examples/train.py")
    parser.add_argument("--json", metavar="FILE", help="all that is printed, as JSON")
    args = parser.parse_args()
    if args.command == "curves":
        draw_curves(Path(args.run))
        return
    if args.command == "order":
        docs = Path(__file__).resolve().parent / "docs"
        (docs / "overlap.svg").write_text(draw_order(docs / "overlap.md"))
        return
    if args.against and args.command != "ranks":
        parser.error("--against goes with ranks")
    if args.profile and (args.command != "overlap" or DEVICE != "cuda"):
        parser.error(f"--profile goes with overlap, on a CUDA card; this device is {DEVICE}")
    report = Report(args)
    COMMANDS[args.command](report)
    report.print_figures()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(vars(report), file)


if __name__ == "__main__":
    main()
