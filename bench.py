"""What the layer costs, beside what else one could use.

    python bench.py layer                # the layer, and few tokens without gradients
    python bench.py card                 # one GPU: also TFLOP/s, GB/s, bytes at the peak, syncs

It needs the layer's files and small.py; with transformers, Hugging Face's block is timed too. Other
questions have a script in benchmarks/.

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
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compat
import grouped
import kernels
import moe
import small

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
DECODE = [Case(1, 2048, 768, 128, 8, BF16)] + [
    Case(T, 512, 256, 64, 8, dtype) for T in (1, 2, 4, 8, 16) for dtype in (FP32, BF16)]
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
        """Of the storages that a forward keeps for the backward, but for the parameters'."""
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _alive = self.forward()
        for parameter in self.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(kept.values())

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


def of_one_file(case: Case, layer: moe.MoELayer) -> nn.Module:
    """small.py's layer with the weights of ours."""
    other = small.MoE(case.H, case.F, case.E, case.K).to(DEVICE, case.dtype)
    other.load_state_dict(dict(zip(other.state_dict(), layer.parameters())))
    return other


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


# ---- layer: many tokens, and few ----

def bench_case(report: Report, case: Case) -> None:
    """The layer beside the bare products, a dense FFN and Hugging Face's block."""
    layer, x, grads = layer_and_input(case.config(), case.T)
    candidates = Candidate(layer, [x], grads).both("layer")
    candidates |= Candidate(of_one_file(case, layer), [x], grads).both("small.py")
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
            case, what, candidates, ["products", PEER, "small.py, compiled"])

    for name, candidate in candidates.items():
        if name.startswith(("layer", "small.py", "Hugging Face")):
            kept = candidate.bytes_kept() / case.T / 1e3
            report.figure(case, f"kB kept a token, {name}", value=kept)


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
    benches = {bench_case: LAYER, bench_decode: DECODE}
    pairs = [(bench, case) for bench, cases in benches.items() for case in report.cases(cases)]
    for bench, case in report.progress(pairs):
        bench(report, case)


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
        card_layer(report, case)
        card_rows(report, case)
    if DEVICE == "cuda":
        card_syncs(report, case)


# ---- Command line ----

def parser_of(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--json", metavar="FILE", help="all that is printed, as JSON")
    return parser


def run(bench: Callable, args: argparse.Namespace) -> None:
    """Calls bench(report), and prints its figures."""
    report = Report(args)
    bench(report)
    report.print_figures()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(vars(report), file)


def main() -> None:
    modes = dict(layer=bench_layer, card=bench_card)
    parser = parser_of(__doc__)
    parser.add_argument("mode", nargs="?", default="layer", choices=modes)
    args = parser.parse_args()
    run(modes[args.mode], args)


if __name__ == "__main__":
    main()
