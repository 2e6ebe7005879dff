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
raised an exception, which is an answer, not a mistake. "-" is a gradient that a case does not need.
Look for mistakes in fp32: in bf16 one of some percent may be as small as the rounding.

--list names the cases; --case NAME runs one and shows the first rows that are off. For experts,
--shape T E K H F adds a case with your sizes. The last line says what "ok" covers, and how many
cases are refused. The exit status is 1 if something is wrong. It is 2 if the function cannot be
loaded, if an option does not fit, or if every case is refused (but not if --case names one). With
--strict it is 3 if most cases are refused. Else it is 0.

Notes, of which only the first makes a row wrong:

its inputs are changed          A tensor that the function was given, or the gradient of y, holds
                                other values afterwards. In a model others read it as well.
differs from run to run         The same call twice gave other bits.
not the top logits of N tokens  The choice is right by the scores, some of which are equal, as where
                                a sigmoid is 1 in fp32. By the logits it would be another.
kept for the backward           What autograd saves, over the bytes of x [T, H] and of fc1's output
                                [T·K, 2F]: 1.00 means that it saves hardly anything else.
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
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple, Sequence, get_args

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
    """The probs [T, K] of the experts in `indices`, however they were chosen. o: the options of
    check_router.
    """
    normalise = o.norm_topk_prob
    if normalise is None and o.score_function == "softmax" and not o.pre_softmax:
        p = logits.gather(1, indices).softmax(-1)
    else:
        p = SCORE_FUNCTIONS[o.score_function](logits).gather(1, indices)
        if normalise or normalise is None and o.score_function != "softmax" and o.topk > 1:
            p = p / (p.sum(-1, keepdim=True) + o.norm_eps)
    return p * (o.scaling_factor or 1.0)


def is_choice(chosen, s, o, slack):
    """Whether a token's chosen experts are the top K of its scores s [E]. With groups, only experts
    of its best groups compete. Scores that differ by at most the slack are a tie, which may fall
    either way.
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

NEED = "x", "probs", "fc1", "fc2"                       # what can need a gradient
INPUTS = *NEED, "indices", "grad_y"


def every(n, z):
    """[T, 1]: whether a token is an n-th one."""
    return torch.arange(len(z))[:, None] % n == 0


def unroute(indices):
    return indices.masked_fill(every(torch.tensor([3, 5]), indices), 6)


def transpose(z):
    """The same values, in the memory of the transposed tensor."""
    return z.mT.contiguous().mT


def widen(z):
    """The same values, as the first columns of a wider tensor. No function may use the others."""
    return F.pad(z, (0, 3), value=math.nan if z.is_floating_point() else 10 ** 6)[..., :-3]


def reverse(z):
    """Gives a tensor the values of other tokens or experts, in place. A second call restores it."""
    return z.copy_(z.flip(0))


def reverse_in_new(z):
    """As reverse, but returns a new tensor at the old address, as an allocator often does."""
    return z.new_empty(0).set_(reverse(z).detach())


# name -> arguments of expert_case: sizes, what is done to an input, what needs a gradient
EXPERT_CASES = {
    "random routing": {},
    "all tokens to one expert": dict(T=2100, K=1, indices=lambda z: z.fill_(5)),
    "experts without tokens": dict(
        E=16, indices=lambda z: z[:, :1] % 2 * 5 + torch.tensor([2, 7])),
    "more experts than tokens": dict(T=5, E=64, K=4),
    "several blocks of each size": dict(T=450, E=3, H=264, W=272),
    "wide tokens and experts": dict(T=7, E=2, H=1040, W=528),
    "64 tokens for each expert": dict(
        T=256, E=4, K=1, indices=lambda z: 5 * torch.arange(256)[:, None] % 256 // 64),
    "K = 12, each of 520 experts": dict(
        T=65, E=520, K=12, indices=lambda z: (7 * torch.arange(65 * 12) % 520).view(z.shape)),
    "K = E": dict(K=6),
    "one token": dict(T=1),
    "no token": dict(T=0),
    "a token names an expert twice": dict(indices=lambda z: z[:, :1].where(every(3, z), z)),
    "unrouted assignments (index E)": dict(indices=unroute),
    "all assignments unrouted": dict(indices=lambda z: z.fill_(6)),
    "NaN in tokens without experts": dict(
        indices=unroute, x=lambda z: z.masked_fill(every(15, z), math.nan)),
    "probs of 0 and above 1": dict(probs=lambda z: z * (torch.arange(len(z))[:, None] % 4)),
    "large values": dict(x=lambda z: z * (8 if z.dtype == torch.float16 else 300)),
    "transposed weights": dict(fc1=transpose, fc2=transpose),
    "tokens are a strided view": dict(x=lambda z: torch.stack((z, -z), 2)[..., 0]),
    "probs are a strided view": dict(probs=transpose, indices=transpose),
    "a strided gradient": dict(grad_y=transpose),
    "an expanded gradient, of y.sum()": dict(
        grad_y=lambda z: torch.ones_like(z[:1, :1]).expand(z.shape)),
    "columns of wider tensors": dict.fromkeys(INPUTS, widen),
    "sizes that are no multiples of 8": dict(H=17, W=13),
    "under no_grad": dict(needs=()),
    "one token under no_grad": dict(T=1, needs=()),
    "gradients of x and probs alone": dict(needs=("x", "probs")),
    "gradients of the weights alone": dict(needs=("fc1", "fc2")),
    "gradients of x and fc1 alone": dict(needs=("x", "fc1")),
    "gradients of probs and fc2 alone": dict(needs=("probs", "fc2")),
    "inputs changed in place": dict(before=reverse),
    "new inputs at the old addresses": dict(before=reverse_in_new),
}


def shape_cases(shapes):
    """As EXPERT_CASES, from (T, E, K, H, F) each. ValueError: sizes that cannot be."""
    cases = {}
    for T, E, K, H, W in shapes:
        name = f"T={T} E={E} K={K} H={H} F={W}"
        if min(T, K - 1, E - K, H - 1, W - 1) < 0:
            raise ValueError(f"shape {name}: needs K from 1 to E, H and F from 1")
        cases[name] = dict(T=T, E=E, K=K, H=H, W=W)
    return cases


def change_inputs(c, changes):
    """Replaces inputs of a case. changes: name -> what makes the new tensor from the old one."""
    with torch.no_grad():
        for name, change in changes.items():
            setattr(c, name, change(getattr(c, name)))


def expert_case(
        dtype, device, T=37, E=6, K=2, H=16, W=24, needs=NEED, before=None, **changes):
    """The inputs as fields, drawn on the CPU: x [T, H], probs [T, K], indices [T, K], fc1
    [E, 2W, H], fc2 [E, H, W], and grad_y [T, H], the gradient of y.

    needs: the inputs that need a gradient. If none does, the function runs under no_grad.
    before: changes all inputs for one call that comes first, and changes them back after it.
    changes: input -> what makes the tensor of this case from the drawn one.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    randn = lambda *shape, scale=1.0: (
        scale * torch.randn(shape, generator=draw, device="cpu")).to(device, dtype)
    rand = lambda *shape: torch.rand(shape, generator=draw, device="cpu")
    c = SimpleNamespace(
        x=randn(T, H), probs=rand(T, K).to(device),
        indices=rand(T, E).argsort(1).to(device)[:, :K],    # devices break ties differently
        fc1=randn(E, 2 * W, H, scale=H ** -0.5), fc2=randn(E, H, W, scale=W ** -0.5),
        grad_y=randn(T, H), needs=needs, before=before and dict.fromkeys(INPUTS, before))
    with torch.device(device):
        change_inputs(c, changes)
    return c


def router_cases(E, with_bias):
    """name -> logits [T, E], expert_bias [E] or None, on the CPU, and whether gradients are on."""
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
        "2,100 tokens": randn(2100, E),
        "transposed logits": transpose(randn(64, E)),
        "under no_grad": randn(64, E),
    }
    biases = {"": None, ", bias": 0.1 * randn(E) - 1} if with_bias else {"": None}
    return {name + end: dict(logits=x, bias=bias, with_grad=name != "under no_grad")
            for end, bias in biases.items() for name, x in cases.items()}


class Row(NamedTuple):
    case: str
    ratios: dict[str, float]      # result -> its error over the plain loop's
    refused: str | None           # the exception
    wrong: bool


class Results(NamedTuple):
    runs: list[dict]              # result -> tensor, of each call of the function
    plain: dict                   # the same of the plain loop
    right: dict                   # and of the plain loop in fp64
    changed: list[str]            # inputs that hold other values afterwards
    note: str
    sizes: dict[str, int]
    way: str                      # which gradients were asked for


def row_errors(got, right):
    """The error of each row: ‖got - right‖ over the root mean square of all rows' ‖right‖. It is
    inf for NaN and for another shape.
    """
    if got.shape != right.shape:
        return torch.tensor([math.inf])
    got, right = [z.detach().cpu().double().flatten(1) for z in (got, right)]
    size = right.norm(dim=1).square().mean().sqrt().clamp(min=1e-30)
    return ((got - right).norm(dim=1) / size).nan_to_num(math.inf, math.inf)


def same(a, b):
    """Whether both have the same values. A NaN is equal to a NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def compare(name, titles, results, dtype, show) -> Row:
    """Prints and returns the row of a case: each result's error over the plain loop's. The worst
    token of all runs counts. The loop's error may be 0, so it is taken as half an eps at least.
    """
    ratios, off, note = {}, [], results.note
    for title, right in results.right.items():
        floor = max([torch.finfo(dtype).eps / 2, *row_errors(results.plain[title], right).tolist()])
        for got in [run[title] for run in results.runs]:
            errors = row_errors(got, right) / floor
            ratios[title] = max([ratios.get(title, 0.0), *errors.tolist()])
            if got.shape != right.shape:
                off.append(f"\n    {title} has shape {[*got.shape]}, right {[*right.shape]}")
                continue
            for i in (errors > WRONG).nonzero().flatten()[:1].tolist():
                a, b = [[f"{v:.4g}" for v in z[i].flatten()[:4].tolist()] for z in (got, right)]
                off.append(f"\n    {title}[{i}]: got {a}, right {b}")
    if results.changed:
        ratios[titles[0]] = math.inf
        note = f"its inputs are changed: {', '.join(results.changed)}"
    mark = lambda r: "ok" if r <= FINE else f"{r:.1f}" if r <= WRONG else "wrong"
    marks = [mark(ratios[title]) if title in ratios else "-" for title in titles]
    details = off if show else []
    print(f"{name:<34}" + "".join(f"{m:>11}" for m in marks), note, *details, sep="   ")
    return Row(name, ratios, None, "wrong" in marks)


def one_line(exception):
    return f"{type(exception).__name__}: {exception}".strip().split("\n")[0][:90]


def run_cases(cases, case, titles, results_of, dtype) -> tuple[list[Row], str]:
    """(rows, the line on what they cover): a row for each case, or for the one named `case`."""
    if case not in (None, *cases):
        raise ValueError(f"case is {case!r}; known: {', '.join(cases)}")
    print(f"{'':<34}" + "".join(f"{title:>11}" for title in titles))
    rows, sizes, ways = [], {}, {}
    for name in [case] if case else cases:
        torch._dynamo.reset()
        try:
            results = results_of(**cases[name])
        except Exception as e:
            rows.append(Row(name, {}, one_line(e), False))
            print(f"{name:<34}   refused: {one_line(e)}")
            continue
        rows.append(compare(name, titles, results, dtype, show=bool(case)))
        sizes = {size: max(n, sizes.get(size, 0)) for size, n in results.sizes.items()}
        ways[results.way] = True
    largest = ", ".join(f"{size} {n}" for size, n in sizes.items())
    short = {known: short for short, known in DTYPES.items()}.get(dtype, dtype)
    covered = f'"ok" covers {short}; {largest} at most; {", ".join(ways)}'
    if not ways:
        covered = "no case ran"
    refused = sum(row.refused is not None for row in rows)
    return rows, f"{covered}; {refused} of {len(rows)} cases are refused"


def gradients(y, leaves, grad) -> dict:
    """title -> gradient, for those leaves (title -> tensor) that need one. A gradient is zeros if y
    does not depend on the leaf, or if y and grad, the gradient of y, have different shapes.
    """
    leaves = {title: z for title, z in leaves.items() if z.requires_grad}
    grads = [None] * len(leaves)
    if y.requires_grad and y.shape == grad.shape:
        grads = torch.autograd.grad(y, [*leaves.values()], grad.to(y), allow_unused=True)
    return {title: torch.zeros_like(leaves[title]) if g is None else g
            for title, g in zip(leaves, grads)}


def changed_inputs(pairs) -> list[str]:
    """The names whose tensors hold other values than before. pairs: name -> (tensor or None, its
    values before).
    """
    return [name for name, (z, before) in pairs.items()
            if z is not None and not same(z, before.to(z))]


def step(function, c) -> dict:
    """Calls the function. Returns y and the gradients that the case needs."""
    leaves = {f"grad {name}": getattr(c, name).requires_grad_(name in c.needs) for name in NEED}
    with torch.set_grad_enabled(bool(c.needs)):
        y = function(c.x, c.probs, c.indices, c.fc1, c.fc2)
        if function is not expert_loop:      # a second forward must not touch what the first keeps
            function(c.x.detach().flip(0), c.probs, c.indices, c.fc1, c.fc2)
    return {"y": y, **gradients(y, leaves, c.grad_y)}


def check_experts(
    function: Callable, dtype: torch.dtype = torch.float32, device: str = "cpu",
    case: str | None = None, shapes: Sequence[tuple] = (),
) -> list[Row]:
    """Prints a table and returns its rows.

    case: one name of EXPERT_CASES, or "T=.. E=.. K=.. H=.. F=.." of a shape; None: all.
    shapes: (T, E, K, H, F) each, of further cases with random routing.
    ValueError: a case that is unknown, a size that cannot be.
    """
    def results_of(**options):
        plain, right, c, fresh = [
            expert_case(dtype, place, **options) for place in ("cpu", "cpu", device, device)]
        for name in (*NEED, "grad_y"):
            setattr(right, name, getattr(right, name).double())
        if c.before:
            change_inputs(c, c.before)
            step(function, c)
            change_inputs(c, c.before)
        got, again = step(function, c), step(function, c)
        repeats = all(map(same, got.values(), again.values()))
        (T, K), (E, H, W) = c.indices.shape, c.fc2.shape
        rows = plain.indices[plain.indices < E].bincount(minlength=1).max().item()
        return Results(
            [got] if repeats else [got, again], step(expert_loop, plain), step(expert_loop, right),
            changed=changed_inputs({n: (getattr(c, n), getattr(fresh, n)) for n in INPUTS}),
            note="" if repeats else "differs from run to run",
            sizes={"T": T, "E": E, "K": K, "H": H, "F": W, "rows an expert": rows},
            way={4: "all gradients", 0: "no_grad"}.get(len(c.needs), "some gradients"))

    titles = "y", "grad x", "grad probs", "grad fc1", "grad fc2"
    cases = {**EXPERT_CASES, **shape_cases(shapes)}
    rows, covered = run_cases(cases, case, titles, results_of, dtype)
    if case is None:
        try:
            print_properties(function, dtype, device)
        except Exception as e:
            print(f"the lines on memory, bits and graphs refused: {one_line(e)}")
    print(covered)
    return rows


def print_properties(function, dtype, device):
    """Prints what is neither right nor wrong: the bytes kept for the backward, whether a token has
    the same bits alone, how many graphs are made; on a card also syncs and launches.
    """
    c = expert_case(dtype, device, T=512, E=16, K=4, H=64, W=64)
    x, probs, fc1, fc2 = [getattr(c, name).requires_grad_() for name in c.needs]
    first = lambda T: (x[:T], probs[:T], c.indices[:T], fc1, fc2)
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
            step(function, c)
        torch.cuda.set_sync_debug_mode("default")
        with torch.profiler.profile() as profiled:
            step(function, c)
        syncs = sum("synchronizing" in str(warning.message) for warning in caught)
        launches = sum(event.device_type.name == "CUDA" for event in profiled.events())
        print(f"forward and backward: {syncs} host syncs, {launches} kernels and copies")


def check_options(o):
    """Refuses options of check_router that do not fit together, by a ValueError. Sets the default
    of group_score_topk.
    """
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
    """Prints a table and returns its rows, as check_experts does.

    The options are the fields of a MoE config with these names. with_bias adds cases with an expert
    bias. ValueError: options that do not fit together, a case that is unknown.
    """
    o = SimpleNamespace(**locals())
    check_options(o)

    def results_of(logits, bias, with_grad):
        leaf = logits.to(device, copy=True).requires_grad_(with_grad)
        bias_there = None if bias is None else bias.to(device, copy=True)
        with torch.set_grad_enabled(with_grad):
            given = leaf * 1                 # a leaf could not be changed in place
            probs, indices = function(given, bias_there)
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

        def results(logits, probs, choice, grad):
            grads = gradients(probs, {"gradient": logits}, grad)
            return {"choice": choice, "probs": probs, **grads}

        draw = torch.Generator("cpu").manual_seed(2)
        grad = torch.rand(len(logits), topk, generator=draw, device="cpu")
        grad_there, loops = grad.to(probs, copy=True), []
        for x in (logits.clone(), logits.double()):
            right = probs_of(x.requires_grad_(with_grad), indices.clamp(0, num_experts - 1), o)
            loops.append(results(x, right, torch.ones_like(is_right), grad))
        return Results(
            [results(leaf, probs, is_right, grad_there)], *loops,
            changed=changed_inputs({"logits": (given, leaf), "bias": (bias_there, bias),
                                    "grad_probs": (grad_there, grad)}),
            note=f"not the top logits of {ties} tokens" if ties else "",
            sizes={"T": len(logits), "E": num_experts, "K": topk},
            way=("no_grad", "all gradients")[with_grad] + " with a bias" * (bias is not None))

    cases = router_cases(num_experts, with_bias)
    titles = "choice", "probs", "gradient"
    rows, covered = run_cases(cases, case, titles, results_of, torch.float32)
    print(covered)
    return rows


CHECKS = {"experts": check_experts, "router": check_router}
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
    """The function of FILE:FUNCTION. The file may be part of a package. ValueError: whatever keeps
    it from being loaded.
    """
    try:
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
    except (Exception, SystemExit) as e:
        raise ValueError(f"{place} cannot be loaded: {one_line(e)}") from e


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS)      # so that the defaults are those of the functions
    add, refuse = parser.add_argument, lambda text: parser.exit(2, f"{text}\n")
    add("what", nargs="?", metavar="experts|router", help="what the function computes")
    add("place", nargs="?", metavar="FILE:FUNCTION", help="the file may be part of a package")
    add("--dtype", choices=DTYPES, help="of experts: of x and the weights; default fp32")
    add("--shape", nargs=5, type=int, action="append", metavar=("T", "E", "K", "H", "F"),
        dest="shapes", help="of experts: a further case of these sizes; may be repeated")
    add("--json", metavar="FILE", help="writes the rows there")
    add("--list", action="store_true", help="names the cases and ends")
    add("--strict", action="store_true", help="the exit status is 3 if most cases are refused")
    _, *options = inspect.signature(check_router).parameters.values()
    for option in options:
        kind, *_ = get_args(option.annotation) or [option.annotation]
        read = dict(type=ast.literal_eval if kind is bool else kind)
        if option.default is False:
            read = dict(action="store_true")
        add(f"--{option.name}", help=OPTIONS[option.name], **read)
    given = vars(parser.parse_intermixed_args())
    what, place, file, listed, strict = [
        given.pop(n, None) for n in ("what", "place", "json", "list", "strict")]

    known = what in CHECKS or listed and what is None
    if not known or not listed and ":" not in str(place):
        refuse("write: check.py experts|router FILE:FUNCTION; or --list")
    for name in given if what else ():
        if name not in inspect.signature(CHECKS[what]).parameters:
            refuse(f"--{name.replace('shapes', 'shape')} is no option of {what}")
    try:
        if listed:
            cases = {"experts": [*EXPERT_CASES, *shape_cases(given.get("shapes", ()))],
                     "router": [*router_cases(16, given.get("with_bias"))]}
            print(*cases[what] if what else sum(cases.values(), []), sep="\n")
            return
        if "dtype" in given:
            given["dtype"] = DTYPES[given["dtype"]]
        rows = CHECKS[what](load(place), **given)
    except ValueError as e:
        refuse(e)
    if file:
        rows_now = [{**row._asdict(), "ratios": {name: r if math.isfinite(r) else None
                     for name, r in row.ratios.items()}} for row in rows]
        Path(file).write_text(json.dumps(rows_now, indent=1))
    refused = sum(row.refused is not None for row in rows)
    if "case" not in given and refused == len(rows):
        refuse("every case is refused: nothing is checked")
    if any(row.wrong for row in rows):
        sys.exit(1)
    sys.exit(3 if strict and 2 * refused > len(rows) else 0)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    try:
        main()
    except BrokenPipeError:                      # for example from `| head`
        print("the output was closed before its end", file=sys.stderr)
        os._exit(2)                              # sys.exit would write to the closed output again
