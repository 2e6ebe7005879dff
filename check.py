"""Does it compute a Mixture-of-Experts layer? This holds a function of yours against plain loops.

    python check.py experts my_kernel.py:moe --dtype bf16 --device cuda
    python check.py router my_router.py:route --topk 4 --score_function sigmoid --with_bias

Copy this file beside your kernel: it needs only torch. The functions:

experts  f(x [T, H], probs [T, K] fp32, indices [T, K] int64, fc1 [E, 2F, H], fc2 [E, H, F])
         -> y [T, H]. In fc1 the gate rows come first. Index E is unrouted and adds nothing.
router   f(logits [T, E] fp32, expert_bias [E] or None) -> (probs [T, K], indices [T, K]) or
         (probs [T, E], map [T, E] bool)

A figure is your error over the plain loop's error in the same dtype, both against fp64. It is
printed as "ok" up to 4, as a number up to 16, then as "wrong". "refused" means that your function
raised an exception, which is an answer, not a mistake. Look for mistakes in fp32: in bf16 one of
some percent may be as small as the rounding.

--list names the cases; --case NAME runs one and shows the first rows that are off. The exit status
is 1 if something is wrong, 2 if all cases are refused, the function cannot be loaded or an option
does not fit, else 0.

Notes, of which only the first makes a row wrong:

its inputs are changed          A tensor that the function was given holds other values afterwards.
differs from run to run         The same call twice gave other bits.
not the top logits of N tokens  The choice is right by the scores, some of which are equal, as where
                                a sigmoid is 1 in fp32. By the logits it would be another.
kept for the backward           What autograd saves, over the bytes of x [T, H] and of fc1's output
                                [T·K, 2F]: with 1.00 it saves little else.
a token without the others      Whether 9 of 512 tokens have the same bits when they are alone.
                                If not, a sum is taken in an order that depends on T.
N graphs for four T             By torch.compile. 2 are enough: for the first T, and for all others.
"""
import argparse
import ast
import importlib.util
import inspect
import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FINE, WRONG = 4, 16                                     # times the plain loop's error


# ---- The definition ----

def expert_loop(x, probs, indices, fc1, fc2):
    """y_t = Σ_k probs[t, k] · fc2[e] · (silu(gate) · up), where e = indices[t, k]."""
    y, fc1, fc2 = [], fc1.unbind(), fc2.unbind()
    for x_t, probs_t, indices_t in zip(x, probs.to(x.dtype), indices.tolist()):
        y_t = torch.zeros_like(x_t)
        for prob, e in zip(probs_t, indices_t):
            if e < len(fc1):
                gate, up = (fc1[e] @ x_t).chunk(2)
                y_t = y_t + prob * (fc2[e] @ (F.silu(gate) * up))
        y.append(y_t)
    return torch.stack(y) if y else x * 1


SCORE_FUNCTIONS = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def probs_of(logits, indices, o):
    """[T, K]: the probs of the chosen experts, whatever chose them. o: options of check_router."""
    normalise = o.norm_topk_prob
    if normalise is None and o.score_function == "softmax" and not o.pre_softmax:
        p = logits.gather(1, indices).softmax(-1)
    else:
        p = SCORE_FUNCTIONS[o.score_function](logits).gather(1, indices)
        if normalise or normalise is None and o.score_function != "softmax" and o.topk > 1:
            p = p / (p.sum(-1, keepdim=True) + o.norm_eps)
    return p * (o.scaling_factor or 1.0)


def is_choice(chosen, s, o, slack):
    """Whether a token's chosen experts are the top K of its scores s [E]; with groups, of its best
    groups. Scores that differ by at most the slack are a tie, which may fall either way.
    """
    if len(set(chosen)) != o.topk or not 0 <= min(chosen) <= max(chosen) < len(s):
        return False
    if o.num_groups:
        size = len(s) // o.num_groups
        best = o.group_score_topk
        value = [sum(sorted(s[first:first + size])[-best:]) for first in range(0, len(s), size)]
        bar = sorted(value)[-o.group_topk]
        used = {e // size for e in chosen}
        if len(used) > o.group_topk or min(value[g] for g in used) < bar - slack:
            return False
        used |= {g for g, v in enumerate(value) if v > bar + slack}
        s = [v if e // size in used else -math.inf for e, v in enumerate(s)]
    return min(s[e] for e in chosen) >= sorted(s)[-o.topk] - slack


# ---- Cases ----

def as_it_is(c):
    pass


def unroute(c):
    c.indices[torch.arange(c.T)[:, None] % torch.tensor([3, 5]) == 0] = c.E


# name -> (what differs from T = 37, E = 6, K = 2, H = 16, F = 24, what is done to the tensors)
EXPERT_CASES = {
    "random routing": ({}, as_it_is),
    "all tokens to one expert": (dict(K=1), lambda c: c.indices.fill_(c.E - 1)),
    "experts without tokens": (dict(E=16), lambda c: c.indices.copy_(
        c.indices[:, :1] % 2 * 5 + torch.tensor([2, 7]))),
    "more experts than tokens": (dict(T=5, E=64, K=4), as_it_is),
    "several blocks of each size": (dict(T=450, E=3, H=264, W=272), as_it_is),
    "K = 8 of 300 experts": (dict(T=40, E=300, K=8), as_it_is),
    "K = E": (dict(K=6), as_it_is),
    "one token": (dict(T=1), as_it_is),
    "no token": (dict(T=0), as_it_is),
    "a token names an expert twice": ({}, lambda c: c.indices[::3].copy_(c.indices[::3, :1])),
    "unrouted assignments (index E)": ({}, unroute),
    "NaN in tokens without experts": ({}, lambda c: (unroute(c), c.x[::15].fill_(math.nan))),
    "probs of 0 and above 1": ({}, lambda c: c.probs.mul_(torch.arange(c.T)[:, None] % 4)),
    "large values": ({}, lambda c: c.x.mul_(8 if c.x.dtype == torch.float16 else 300)),
    "transposed weights": ({}, lambda c: vars(c).update(
        fc1=c.fc1.mT.contiguous().mT, fc2=c.fc2.mT.contiguous().mT)),
    "tokens are a strided view": ({}, lambda c: vars(c).update(
        x=torch.stack((c.x, -c.x), 2)[..., 0])),
    "an expanded gradient, of y.sum()": ({}, lambda c: vars(c).update(
        grad=torch.ones_like(c.grad[:1, :1]).expand(c.grad.shape))),
    "sizes that are no multiples of 8": (dict(H=17, W=13), as_it_is),
}


def expert_case(dtype, device, change, T=37, E=6, K=2, H=16, W=24):
    """([x, probs, fc1, fc2], indices, gradient of y), drawn on the CPU."""
    draw = torch.Generator("cpu").manual_seed(0)
    randn = lambda *shape, scale=1.0: (
        scale * torch.randn(shape, generator=draw, device="cpu")).to(device, dtype)
    rand = lambda *shape: torch.rand(shape, generator=draw, device="cpu").to(device)
    c = SimpleNamespace(
        T=T, E=E, x=randn(T, H), probs=rand(T, K), indices=rand(T, E).argsort(1)[:, :K],
        fc1=randn(E, 2 * W, H, scale=H ** -0.5), fc2=randn(E, H, W, scale=W ** -0.5),
        grad=randn(T, H))
    with torch.device(device):
        change(c)
    return [c.x, c.probs, c.fc1, c.fc2], c.indices, c.grad


def router_cases(E, with_bias):
    """name -> (logits [T, E], expert_bias [E] or None), on the CPU."""
    draw = torch.Generator("cpu").manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=draw, device="cpu")
    cases = {
        "random logits": randn(64, E),
        "large logits (times 30)": 30 * randn(64, E),
        "saturated (plus 20)": randn(64, E) + 20,
        "far below zero (minus 60)": randn(64, E) - 60,
        "one logit of 1e4": F.pad(randn(8, E - 1), (1, 0), value=1e4),
        "nearly equal logits": 1 + 1e-3 * torch.linspace(-1, 1, E, device="cpu").expand(8, E),
        "one token": randn(1, E),
        "no token": randn(0, E),
    }
    biases = {"": None, ", bias": 0.1 * randn(E) - 1} if with_bias else {"": None}
    return {name + end: (x, bias) for end, bias in biases.items() for name, x in cases.items()}


class Row(NamedTuple):
    case: str
    ratios: dict[str, float]      # result -> its error over the plain loop's
    refused: str | None           # the exception
    wrong: bool


def row_errors(got, right):
    """‖got - right‖ of each row, over the root mean square of ‖right‖ of all; inf for NaN
    and for another shape.
    """
    if got.shape != right.shape:
        return torch.tensor([math.inf])
    got, right = [z.detach().cpu().double().flatten(1) for z in (got, right)]
    size = right.norm(dim=1).square().mean().sqrt().clamp(min=1e-30)
    return ((got - right).norm(dim=1) / size).nan_to_num(math.inf, math.inf)


def same(a, b):
    """Whether both have the same values. A NaN is equal to a NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def compare(name, results, dtype, note, show) -> Row:
    """results: title -> (got, plain loop, loop in fp64). The worst row counts; the loop's error is
    taken as half an eps at least.
    """
    ratios, off = {}, []
    for title, (got, plain, right) in results.items():
        floor = max([torch.finfo(dtype).eps / 2, *row_errors(plain, right).tolist()])
        errors = row_errors(got, right) / floor
        ratios[title] = max([0.0, *errors.tolist()])
        if show and got.shape != right.shape:
            off.append(f"\n    {title} has shape {[*got.shape]}, right {[*right.shape]}")
            continue
        for i in (errors > WRONG).nonzero().flatten()[:show].tolist():
            a, b = [[f"{v:.4g}" for v in z[i].flatten()[:4].tolist()] for z in (got, right)]
            off.append(f"\n    {title}[{i}]: got {a}, right {b}")
    marks = ["ok" if r <= FINE else f"{r:.1f}" if r <= WRONG else "wrong" for r in ratios.values()]
    print(f"{name:<34}" + "".join(f"{m:>11}" for m in marks), note, *off, sep="   ")
    return Row(name, ratios, None, "wrong" in marks)


def one_line(exception):
    return f"{type(exception).__name__}: {exception}".strip().split("\n")[0][:90]


def run_cases(cases, case, titles, results_of, dtype) -> list[Row]:
    """A row for each case, or for the one with the name `case`."""
    if case not in (None, *cases):
        raise ValueError(f"case is {case!r}; known: {', '.join(cases)}")
    print(f"{'':<34}" + "".join(f"{title:>11}" for title in titles))
    rows = []
    for name in [case] if case else cases:
        torch._dynamo.reset()
        try:
            results, note = results_of(*cases[name])
        except Exception as e:
            rows.append(Row(name, {}, one_line(e), False))
            print(f"{name:<34}   refused: {one_line(e)}")
        else:
            rows.append(compare(name, dict(zip(titles, results)), dtype, note, show=bool(case)))
    return rows


def gradients(y, leaves, grad):
    """Zeros for one that is None, and for y of another shape."""
    grads = [None] * len(leaves)
    if y.requires_grad and y.shape == grad.shape:
        grads = torch.autograd.grad(y, leaves, grad.to(y), allow_unused=True)
    return [torch.zeros_like(z) if g is None else g for z, g in zip(leaves, grads)]


def step(function, tensors, indices, grad):
    """[y, and the gradients of x, probs, fc1, fc2]"""
    leaves = [z.detach().requires_grad_() for z in tensors]
    x, probs, fc1, fc2 = leaves
    y = function(x, probs, indices, fc1, fc2)
    if y.requires_grad:                      # another forward must not touch what this one keeps
        function(x.detach().flip(0), probs, indices, fc1, fc2)
    return [y, *gradients(y, leaves, grad)]


def check_experts(
    function: Callable, dtype: torch.dtype = torch.float32, device: str = "cpu",
    case: str | None = None,
) -> list[Row]:
    """Prints a table and returns its rows. case: one name of EXPERT_CASES; None: all."""
    def results_of(sizes, change):
        tensors, indices, grad = expert_case(dtype, "cpu", change, **sizes)
        right = step(expert_loop, [z.double() for z in tensors], indices, grad.double())
        plain = step(expert_loop, tensors, indices, grad)
        there = expert_case(dtype, device, change, **sizes)
        got, again = step(function, *there), step(function, *there)
        note = "" if all(map(same, got, again)) else "differs from run to run"
        fresh = expert_case(dtype, device, change, **sizes)
        if not all(map(same, (*fresh[0], fresh[1]), (*there[0], there[1]))):
            got[0], note = got[0] * math.nan, "its inputs are changed"
        return zip(got, plain, right), note

    titles = "y", "grad x", "grad probs", "grad fc1", "grad fc2"
    rows = run_cases(EXPERT_CASES, case, titles, results_of, dtype)
    if case is None:
        try:
            print_properties(function, dtype, device)
        except Exception as e:
            print(f"the lines on memory, bits and graphs refused: {one_line(e)}")
    return rows


def print_properties(function, dtype, device):
    """What is no matter of right and wrong."""
    tensors, indices, grad = expert_case(
        dtype, device, as_it_is, T=512, E=16, K=4, H=64, W=64)
    x, probs, fc1, fc2 = [z.requires_grad_() for z in tensors]
    first = lambda T: (x[:T], probs[:T], indices[:T], fc1, fc2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: saved.append(z) or z, lambda z: z):
        y = function(*first(512))
    storages = [z.untyped_storage() for z in (*saved, fc1, fc2)]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    ratio = (sum(kept.values()) - fc1.nbytes - fc2.nbytes) / (x.nbytes + 512 * 4 * 128 * x.itemsize)
    print(f"kept for the backward: {ratio:.2f} times the bytes of x and fc1's output")
    bits = "the same bits" if torch.equal(y[:9], function(*first(9))) else "other bits"
    print(f"a token without the others: {bits}")
    torch._dynamo.reset()
    counters.clear()
    try:
        graph = torch.compile(function, backend="eager", fullgraph=True)
        for T in (512, 480, 300, 200):
            graph(*first(T))
        result = f"{counters['stats']['unique_graphs']} graphs for four T"
    except Exception as e:
        result = type(e).__name__
    print(f"torch.compile(fullgraph=True): {result}")
    if x.is_cuda:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(function, [x, probs, fc1, fc2], indices, grad)
        torch.cuda.set_sync_debug_mode("default")
        with torch.profiler.profile() as profiled:
            step(function, [x, probs, fc1, fc2], indices, grad)
        syncs = sum("synchronizing" in str(warning.message) for warning in caught)
        launches = sum(event.device_type.name == "CUDA" for event in profiled.events())
        print(f"forward and backward: {syncs} host syncs, {launches} kernels and copies")


def check_options(o):
    """ValueError: options of check_router that do not fit. Sets the default of group_score_topk."""
    E, K, groups, best = o.num_experts, o.topk, o.num_groups, o.group_topk
    if o.score_function not in SCORE_FUNCTIONS:
        known = ", ".join(SCORE_FUNCTIONS)
        raise ValueError(f"score_function is {o.score_function!r}; known: {known}")
    if not 1 <= K <= E:
        raise ValueError(f"topk is {K}; needs 1 to {E}, the number of experts")
    if groups is None and best is None:
        return
    if None in (groups, best) or not 1 <= best <= groups or E % groups or best * E // groups < K:
        raise ValueError(
            f"topk is {K}, num_groups {groups} and group_topk {best} of {E} experts; needs groups "
            "that divide the experts, and as many of them as hold topk")
    if o.group_score_topk is None:
        o.group_score_topk = K // best
    if not 1 <= o.group_score_topk <= E // groups:
        raise ValueError(f"group_score_topk is {o.group_score_topk} (topk // group_topk unless "
                         f"given); needs 1 to {E // groups}, the experts of a group")


def check_router(
    function: Callable, topk: int = 2, score_function: str = "softmax", pre_softmax: bool = False,
    norm_topk_prob: bool | None = None, norm_eps: float = 1e-20,
    scaling_factor: float | None = None, num_groups: int | None = None,
    group_topk: int | None = None, group_score_topk: int | None = None, with_bias: bool = False,
    num_experts: int = 16, device: str = "cpu", case: str | None = None,
) -> list[Row]:
    """As check_experts. The options are those of a MoE config; with_bias: also with a bias."""
    o = SimpleNamespace(**locals())
    check_options(o)

    def results_of(logits, bias):
        ours = logits.to(device, copy=True).requires_grad_()
        probs, indices = function(ours * 1, bias if bias is None else bias.to(device))
        if indices.dtype == torch.bool:
            beside = (probs.masked_fill(indices, 0.0) != 0).any(1)
            no_choice = beside | (indices.sum(1) != topk)
            indices = indices.int().topk(topk, 1).indices
            probs, indices = probs.gather(1, indices), indices.masked_fill(no_choice[:, None], -1)
        indices = indices.cpu().long()

        scores = SCORE_FUNCTIONS[score_function](logits) + (0 if bias is None else bias)
        by_logits = bias is None and not num_groups
        is_right, ties = logits.new_ones(len(logits), 1), 0
        for t, (chosen, s, x) in enumerate(zip(indices.tolist(), scores.tolist(), logits.tolist())):
            exact = by_logits and is_choice(chosen, x, o, slack=0)
            slack = 2e-6 * (abs(sorted(s)[-topk]) + (bias is not None))
            is_right[t] = exact or is_choice(chosen, s, o, slack)
            ties += by_logits and not exact

        leaves = logits.clone().requires_grad_(), logits.double().requires_grad_()
        all_probs = probs, *[probs_of(x, indices.clamp(0, num_experts - 1), o) for x in leaves]
        draw = torch.Generator("cpu").manual_seed(2)
        grad = torch.rand(len(logits), topk, generator=draw, device="cpu")
        grads = [gradients(p, [x], grad)[0] for p, x in zip(all_probs, (ours, *leaves))]
        ones = torch.ones_like(is_right)
        note = f"not the top logits of {ties} tokens" if ties else ""
        return [(is_right, ones, ones), all_probs, grads], note

    cases = router_cases(num_experts, with_bias)
    return run_cases(cases, case, ("choice", "probs", "gradient"), results_of, torch.float32)


OPTIONS = {
    "topk": "K, the experts of a token; default 2",
    "score_function": f"{', '.join(SCORE_FUNCTIONS)}; default softmax",
    "pre_softmax": "the softmax is over all experts, not over the chosen",
    "norm_topk_prob": "True or False: probs have sum 1; default: not with pre_softmax or K = 1",
    "norm_eps": "is added to that sum; default 1e-20",
    "scaling_factor": "multiplies the probs",
    "num_groups": "equal groups of experts, of which a token uses only the best",
    "group_topk": "how many groups are the best",
    "group_score_topk": "how many best scores are summed for a group; default topk // group_topk",
    "with_bias": "also cases with an expert bias, which chooses and is not in the probs",
    "num_experts": "E of the cases; default 16",
    "device": "where the function's tensors are; default cpu",
    "case": "only the case of this name, with the first values that are off",
}


def load(place: str) -> Callable:
    """The function of FILE:FUNCTION. The file may be part of a package."""
    file, name = place.rsplit(":", 1)
    path = root = Path(file).resolve(strict=True)
    while (root.parent / "__init__.py").exists():
        root = root.parent
    sys.path[:0] = [str(root.parent), str(path.parent)]
    dotted = ".".join(path.relative_to(root.parent).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(dotted, path)
    sys.modules[dotted] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=["experts", "router"], help="what the function computes")
    add("function", nargs="?", default="FILE:FUNCTION", metavar="FILE:FUNCTION",
        help="the file may be part of a package")
    add("--dtype", default="fp32", choices=DTYPES, help="of experts: of x and the weights")
    add("--json", metavar="FILE", help="writes the rows there")
    add("--list", action="store_true", help="names the cases and ends")
    _, *options = inspect.signature(check_router).parameters.values()
    for option in options:
        kind, *_ = get_args(option.annotation) or [option.annotation]
        read = dict(type=ast.literal_eval if kind is bool else kind, default=option.default)
        if option.default is False:
            read = dict(action="store_true")
        add(f"--{option.name}", help=OPTIONS[option.name], **read)
    args = parser.parse_args()
    cases = EXPERT_CASES
    if args.what == "router":
        cases = router_cases(args.num_experts, args.with_bias)
    if args.list:
        print(*cases, sep="\n")
        return
    try:
        function = load(args.function)
    except (Exception, SystemExit) as e:
        print(f"{args.function} cannot be loaded: {one_line(e)}", file=sys.stderr)
        sys.exit(2)
    try:
        if args.what == "experts":
            rows = check_experts(function, DTYPES[args.dtype], args.device, args.case)
        else:
            rows = check_router(function, **{o.name: getattr(args, o.name) for o in options})
    except ValueError as e:
        parser.error(str(e))
    if args.json:
        rows_now = [{**row._asdict(), "ratios": {name: r if math.isfinite(r) else None
                     for name, r in row.ratios.items()}} for row in rows]
        Path(args.json).write_text(json.dumps(rows_now, indent=1))
    if args.case is None and all(row.refused for row in rows):
        print("every case is refused: nothing is checked", file=sys.stderr)
        sys.exit(2)
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()
