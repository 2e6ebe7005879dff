"""What the compiler makes of code that MoE layers are written in, and of what replaces it.

    python examples/port.py

prints for each pair of functions, which compute the same, what torch.compile makes of them. Why,
and what to write instead: docs/port.md. T tokens, H hidden size, E experts, K experts per token,
N = T·K rows. Capitals at the end of a name are the tensor's axes.
"""
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.measure_steps import CALLS, bytes_kept                          # noqa: E402
from examples.steps import Gather, again, collect, spread                     # noqa: E402
from grouped import grouped_mm                                                # noqa: E402

H, E, K = 32, 6, 2


class Pair(NamedTuple):
    today: Callable
    instead: Callable
    make: Callable                       # T -> the arguments


def tokens(T: int, *axes: int) -> Tensor:
    return torch.randn(T, *(axes or (H,)), generator=torch.Generator().manual_seed(T))


def one_expert(T: int) -> tuple:
    """x [T, H], weight [E, H, H], the expert of each token."""
    return tokens(T).requires_grad_(), tokens(E, H, H).requires_grad_(), tokens(T, E).argmax(1)


# ---- 1: a loop with `where` ----

def loop(x_TH, weight, expert_T):
    y_TH = torch.zeros_like(x_TH)
    for e in range(E):
        token_M, = torch.where(expert_T == e)
        y_TH[token_M] = x_TH[token_M] @ weight[e]
    return y_TH


def sorted_rows(x_TH, weight, expert_T):
    order_T = expert_T.argsort(stable=True)
    inverse_T = order_T.argsort()
    rows_TH = Gather.apply(x_TH, at_first, at_second, order_T, inverse_T)
    y_TH = grouped_mm(rows_TH, weight, ends_of(expert_T[order_T]))
    return Gather.apply(y_TH, at_second, at_first, order_T, inverse_T)


def at_first(x, first, second):
    return x[first]


def at_second(x, first, second):
    return x[second]


def ends_of(sorted_N):
    """Where the rows of each expert end: how many ids are smaller than the next one."""
    next_E = torch.arange(1, E + 1, device=sorted_N.device)
    return torch.searchsorted(sorted_N, next_E, out_int32=True)


# ---- 2: sizes on the host ----

def split_by_sizes(x_TH, weight, expert_T):
    order_T = expert_T.argsort(stable=True)
    sizes = torch.stack([(expert_T == e).sum() for e in range(E)]).tolist()
    rows = [rows @ matrix for rows, matrix in zip(x_TH[order_T].split(sizes), weight)]
    return torch.cat(rows)[order_T.argsort()]


# ---- 3: boolean masks ----

def with_padding(T):
    return tokens(T).requires_grad_(), tokens(T, 1)[:, 0] > 1.0


def taken_by_mask(x_TH, padding_T):
    y_TH = torch.zeros_like(x_TH)
    y_TH[~padding_T] = F.silu(x_TH[~padding_T])
    return y_TH


def masked(x_TH, padding_T):
    return F.silu(x_TH).masked_fill(padding_T[:, None], 0.0)


# ---- 4: counts ----

def of_indices(T):
    return tokens(T, E).topk(K).indices,                 # [T, K]


def bincount(indices_TK):
    return indices_TK.flatten().bincount(minlength=E)


def ends(indices_TK):
    return ends_of(indices_TK.flatten().sort().values).diff(prepend=indices_TK.new_zeros(1).int())


# ---- 5: adding rows to tokens ----

def places(T):
    """order [N]: row -> assignment t·K + k, and its inverse [T, K]."""
    indices_TK, = of_indices(T)
    order_N = indices_TK.flatten().argsort(stable=True)
    return order_N, order_N.argsort().view(T, K)


def with_rows(T):
    return tokens(T * K, H).requires_grad_(), *places(T)


def index_add(rows_NH, order_N, inverse_TK):
    y_TH = rows_NH.new_zeros(len(inverse_TK), H)
    return y_TH.index_add(0, order_N // K, rows_NH)


def sum_of_gathers(rows_NH, order_N, inverse_TK):
    return Gather.apply(rows_NH, collect, spread, order_N, inverse_TK)


# ---- 6: a copy of each token, whose gradient autograd makes ----

def with_tokens(T):
    return tokens(T).requires_grad_(), *places(T)


def index_tokens(x_TH, order_N, inverse_TK):
    return x_TH[order_N // K].sin()


def gather_tokens(x_TH, order_N, inverse_TK):
    return Gather.apply(x_TH, spread, collect, order_N, inverse_TK).sin()


# ---- 7: the prob behind the second product ----

def with_probs(T):
    return (tokens(T, 2 * H).requires_grad_(), tokens(T, 1).sigmoid().requires_grad_(),
            tokens(H, 4 * H).requires_grad_())


def silu_of(hidden):
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def prob_behind(hidden, prob_N1, fc2):
    return (silu_of(hidden) @ fc2) * prob_N1


def prob_before(hidden, prob_N1, fc2):
    return again(lambda hidden, prob_N1: silu_of(hidden) * prob_N1, hidden, prob_N1) @ fc2


# ---- 8: dispatch by a product with a mask ----

def one_hot_mask(x_TH, weight, expert_T):
    most = len(x_TH)                                                 # no token is dropped
    own_TE = expert_T[:, None] == torch.arange(E)
    place_T = ((own_TE.cumsum(0) - 1) * own_TE).sum(1)
    mask_TEC = (own_TE[..., None] & (place_T[:, None, None] == torch.arange(most))).to(x_TH.dtype)
    rows_ECH = torch.einsum("tec,th->ech", mask_TEC, x_TH)
    return torch.einsum("tec,ech->th", mask_TEC, rows_ECH @ weight)


# ---- 9: the inverse of a sort ----

def inverse_by_scatter(indices_TK):
    order_N = indices_TK.flatten().argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N))
    return inverse_N


def inverse_by_sort(indices_TK):
    return indices_TK.flatten().argsort(stable=True).argsort()


# ---- 10: the router's product in fp32 ----

def narrow(T):
    return tokens(T).bfloat16().requires_grad_(), tokens(E).bfloat16().requires_grad_()


def logits_of_a_copy(x_TH, router):
    return x_TH.float() @ router.float().t()


def logits_again(x_TH, router):
    return again(logits_of_a_copy, x_TH, router)


# ---- 11: a length in a condition ----

def of_tokens(T):
    return tokens(T).requires_grad_(),


def short_differs(x_TH):
    if len(x_TH) < 40:
        return x_TH.sin()
    return x_TH.cos()


def both_ways(x_TH):
    is_short_T = torch.full((len(x_TH),), len(x_TH)) < 40
    return torch.where(is_short_T[:, None], x_TH.sin(), x_TH.cos())


PAIRS = {
    "1 a loop with where": Pair(loop, sorted_rows, one_expert),
    "2 tolist, split": Pair(split_by_sizes, sorted_rows, one_expert),
    "3 x[mask]": Pair(taken_by_mask, masked, with_padding),
    "4 bincount": Pair(bincount, ends, of_indices),
    "5 index_add": Pair(index_add, sum_of_gathers, with_rows),
    "6 x[token]": Pair(index_tokens, gather_tokens, with_tokens),
    "7 the prob behind fc2": Pair(prob_behind, prob_before, with_probs),
    "8 a one-hot mask": Pair(one_hot_mask, sorted_rows, one_expert),
    "9 the inverse by a scatter": Pair(inverse_by_scatter, inverse_by_sort, of_indices),
    "10 x.float()": Pair(logits_of_a_copy, logits_again, narrow),
    "11 if T < n": Pair(short_differs, both_ways, of_tokens),
}


class Made(NamedTuple):
    """What torch.compile makes of a function, without fullgraph=True."""
    breaks: int                          # of the graph
    graphs: int                          # compiled for three lengths
    kernels: int                         # for the first length, forward and backward
    scatters: int                        # of these, which write to places that they look up
    atomics: int                         # additions to a place to which other threads add
    kept: int                            # bytes for the backward beside the arguments


LENGTHS = 48, 36, 60
OPTIONS = {"cpp.threads": 2, "cpp.min_chunk_size": 1, "force_disable_caches": True}


def made_of(function: Callable, make: Callable) -> Made:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function)
    codes = []
    with (mock.patch.object(GraphLowering, "save_output_code", codes.append),
          torch._inductor.config.patch(OPTIONS)):
        for T in LENGTHS:
            arguments = make(T)
            y = compiled(*arguments)
            if y.requires_grad:
                y.sum().backward()
            if T == LENGTHS[0]:
                first = "\n".join(codes)
        graphs = counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        arguments = make(LENGTHS[0])
        kept = bytes_kept(lambda: compiled(*arguments), arguments)
    calls = CALLS.findall(first)
    scatters = [call for call in calls if re.search("index_put|index_add|scatter", call)]
    atomics = re.findall(r"atomic_add\w*[<(]", first)
    return Made(breaks, graphs, len(calls), len(scatters), len(atomics), kept)


def main() -> None:
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    print(f"H, E, K = {H}, {E}, {K}; T = {', '.join(map(str, LENGTHS))}; torch {torch.__version__}")
    print(f"{'':28}{'':9}" + "".join(f"{name:>9}" for name in Made._fields))
    for name, pair in PAIRS.items():
        for which in ("today", "instead"):
            made = made_of(getattr(pair, which), pair.make)
            print(f"{name if which == 'today' else '':28}{which:9}"
                  + "".join(f"{number:9}" for number in made), flush=True)


if __name__ == "__main__":
    main()
