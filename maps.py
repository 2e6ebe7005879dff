"""Megatron's functions on maps [T, E], and its activations with their gradients, for code that
comes from there: see docs/megatron.md. The layer needs none of them.
"""
import functools
import math
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from . import kernels
    from .compat import check_known, check_shapes, is_integer, upcast
else:
    import kernels
    from compat import check_known, check_shapes, is_integer, upcast


# ---- Choice ----

def topk_routing_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None,
    score_function: str = "softmax", expert_bias: Tensor | None = None, dense_output: bool = False,
    precomputed_indices: Tensor | None = None, norm_topk_prob: bool | None = None,
    norm_eps: float = 1e-20, group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """kernels.topk_routing with Megatron's result: (probs [T, E], routing_map [T, E] bool), or with
    `dense_output` (probs [T, K], indices [T, K] int64).
    """
    probs_TK, indices_TK = kernels.topk_routing(
        logits, topk, use_pre_softmax=use_pre_softmax, num_groups=num_groups,
        group_topk=group_topk, scaling_factor=scaling_factor, score_function=score_function,
        expert_bias=expert_bias, precomputed_indices=precomputed_indices,
        norm_topk_prob=norm_topk_prob, norm_eps=norm_eps, group_score_topk=group_score_topk)
    if dense_output:
        return probs_TK, indices_TK
    return kernels.routing_to_map(probs_TK, indices_TK, logits.shape[1])


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(the chosen scores [T, K], indices [T, K]): the top K of scores [T, E] within the best
    `group_topk` of `num_groups` equal groups of experts (arXiv 2405.04434, 2412.19437).

    A group's score is the sum of its `group_score_topk` best scores (default: topk // group_topk;
    DeepSeek-V2 takes 1, DeepSeek-V3 2). A score in the best groups wins over all experts of the
    other groups, even if it is negative.

    >>> scores = torch.tensor([[5.0, 0.0, 4.0, 4.0]])
    >>> group_limited_topk(scores, topk=2, num_tokens=1, num_experts=4, num_groups=2, group_topk=1)
    (tensor([[4., 4.]]), tensor([[2, 3]]))
    """
    check_shapes({"T": num_tokens, "E": num_experts}, scores=(scores, "T E"))
    group_score_topk = kernels.check_groups(
        topk, num_experts, num_groups=num_groups, group_topk=group_topk,
        group_score_topk=group_score_topk)
    masked_TE = kernels.only_best_groups(scores, num_groups, group_topk, group_score_topk)
    indices_TK = masked_TE.topk(topk, dim=-1).indices
    return kernels.pick(scores, indices_TK), indices_TK


# ---- Drop ----

def _as_map(routing_map):
    """routing_map [T, E] as bool."""
    check_shapes(routing_map=(routing_map, "T E"))
    if routing_map.dtype != torch.bool and not is_integer(routing_map):
        raise TypeError(f"routing_map is {routing_map.dtype}; needs torch.bool or an integer dtype")
    return routing_map.bool()


def _place_by_position(routing_map):
    """[T, E] int64: each token's place in the column, the routed tokens in order, then the others.
    """
    place_of_routed_TE = routing_map.cumsum(0)
    place_of_others_TE = (~routing_map).cumsum(0) + routing_map.sum(0)
    return torch.where(routing_map, place_of_routed_TE, place_of_others_TE) - 1


def _place_by_key(keys):
    """[T, E] int64: each key's place in its column, the largest first, equal ones in order."""
    return keys.argsort(dim=0, descending=True, stable=True).argsort(dim=0)


def apply_router_token_dropping(
    routing_probs: Tensor, routing_map: Tensor, router_topk: int, capacity_factor: float,
    drop_policy: str = "probs", pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """(probs, routing_map), both [T, E], with every expert cut to its capacity C.

    C = kernels.get_capacity(T·router_topk, E, capacity_factor). drop_policy "probs" keeps an
    expert's C most probable tokens, equal ones in order; "position" its first C. With
    `pad_to_capacity` every column has exactly min(C, T) ones: the fillers are the lowest-numbered
    tokens not routed to that expert, at prob 0.

    >>> probs = torch.tensor([[0.2, 0.0], [0.9, 0.0], [0.0, 0.5]])
    >>> apply_router_token_dropping(probs, probs > 0, router_topk=1, capacity_factor=0.5)[0]
    tensor([[0.0000, 0.0000],
            [0.9000, 0.0000],
            [0.0000, 0.5000]])
    """
    check_known("drop_policy", drop_policy, ("probs", "position"))
    routing_map = _as_map(routing_map)
    check_shapes(routing_map=(routing_map, "T E"), routing_probs=(routing_probs, "T E"))
    T, E = routing_map.shape
    capacity = kernels.get_capacity(T * router_topk, E, capacity_factor)
    if drop_policy == "position":
        place_TE = _place_by_position(routing_map)
    else:
        place_TE = _place_by_key(routing_probs.detach().masked_fill(~routing_map, -math.inf))

    within_TE = place_TE < capacity
    kept_TE = routing_map & within_TE
    probs_TE = routing_probs.masked_fill(~kept_TE, 0.0)
    return probs_TE, (within_TE if pad_to_capacity else kept_TE)


# ---- Permute ----

@functools.cache
def _compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=True)


def _assignment_probs(probs, token, expert):
    """[rows]: probs[token, expert] of probs [T, E]; 0 for token T."""
    padded = F.pad(probs, (0, 1, 0, 1))                  # zeros for token T and for expert E
    return padded.flatten().index_select(0, token * padded.shape[1] + expert)


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None,
    num_out_tokens: int | None = None, fused: bool = False, drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies the tokens [T, H] to rows that are sorted by expert, and by token within an expert.

    routing_map [T, E] is bool or 0/1. Returns (permuted_tokens [rows, H], permuted_probs [rows] or
    None, sorted_indices [rows] int64). Row i is token sorted_indices[i]; its prob comes from probs
    [T, E].

    num_out_tokens: the number of rows, a static shape. If the map has fewer ones, the last rows are
      zeros with prob 0 and sorted index T. If it has more, its last ones get no row. None: a row
      for each one of the map, which syncs and has a data-dependent shape (eager mode only).
    drop_and_pad: every expert has C = num_out_tokens / E rows: its first C tokens, then the
      lowest-numbered tokens not routed to it, with their prob in `probs`. If C > T, the last C - T
      rows of every expert are zeros with sorted index T.
    fused: runs this function through torch.compile.

    On CUDA the backward adds with atomics, unlike kernels.gather_rows.

    >>> routing_map = torch.tensor([[0, 1], [1, 1]])
    >>> rows, _, token = permute(torch.tensor([[1.], [2.]]), routing_map)
    >>> rows.flatten(), token
    (tensor([2., 1., 2.]), tensor([1, 0, 1]))
    """
    routing_map = _as_map(routing_map)
    check_shapes(tokens=(tokens, "T H"), routing_map=(routing_map, "T E"), probs=(probs, "T E"))
    T, E = routing_map.shape
    if drop_and_pad and (num_out_tokens is None or num_out_tokens % E):
        raise ValueError(f"num_out_tokens is {num_out_tokens}; "
                         f"with drop_and_pad it needs a multiple of E = {E}")
    if fused and num_out_tokens is None:
        raise ValueError("num_out_tokens is None, which gives a data-dependent shape; "
                         "fused=True needs a number")
    if fused and not torch.compiler.is_compiling():
        return _compiled(permute)(
            tokens, routing_map, probs, num_out_tokens=num_out_tokens, drop_and_pad=drop_and_pad)
    if num_out_tokens is None:
        num_out_tokens = int(routing_map.sum())

    row = torch.arange(num_out_tokens, device=tokens.device)
    if drop_and_pad:
        # The routed tokens of each expert, then the others; T where it has no more. (A pad whose
        # value or width depends on T would need a graph for each T.)
        token_TE = (~routing_map).byte().argsort(dim=0, stable=True)
        capacity = max(num_out_tokens // E, 1)
        expert, place = row // capacity, row % capacity
        token = F.pad(token_TE, (0, 0, 0, 1))[place.clamp(max=T), expert]
        token = torch.where(place < T, token, T)
    else:
        # Row i is the map's i-th one, column by column, found by bisection.
        ones_so_far = routing_map.t().flatten().cumsum(0)
        place = torch.searchsorted(ones_so_far, row + 1)         # E·T beyond the last one
        token = torch.where(place < E * T, place % max(T, 1), T)
        expert = place // max(T, 1)

    permuted = F.pad(tokens, (0, 0, 0, 1)).index_select(0, token)     # row T holds zeros
    if probs is not None:
        probs = _assignment_probs(probs, token, expert)
    return permuted, probs, token


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape, probs: Tensor | None = None,
    routing_map: Tensor | None = None, fused: bool = False, drop_and_pad: bool = False,
) -> Tensor:
    """Adds the rows [rows, H] of `permute` to their tokens: [T, H] = restore_shape.

    With probs [T, E], which needs routing_map [T, E], each row is first multiplied by its prob.
    Rows with sorted index T are ignored. The sum is in fp32 at least, on CUDA with atomics (unlike
    kernels.combine_rows); the result has permuted_tokens.dtype. fused, drop_and_pad: see permute.

    >>> unpermute(torch.tensor([[2.], [1.], [2.]]), torch.tensor([1, 0, 1]), restore_shape=(2, 1))
    tensor([[1.],
            [4.]])
    """
    T, H = restore_shape
    if routing_map is not None:
        routing_map = _as_map(routing_map)
    elif probs is not None:
        raise ValueError("probs is given without routing_map, which says the expert of each row; "
                         "pass the one given to permute")
    check_shapes(
        {"T": T, "H": H}, permuted_tokens=(permuted_tokens, "rows H"),
        sorted_indices=(sorted_indices, "rows"), routing_map=(routing_map, "T E"),
        probs=(probs, "T E"))
    if fused and not torch.compiler.is_compiling():
        return _compiled(unpermute)(
            permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map,
            drop_and_pad=drop_and_pad)

    rows = upcast(permuted_tokens)
    if probs is not None:
        row = torch.arange(rows.shape[0], device=rows.device)
        if drop_and_pad:
            expert = row // max(rows.shape[0] // probs.shape[1], 1)
        else:
            ends_E = routing_map.sum(0).cumsum(0)
            expert = torch.bucketize(row, ends_E, right=True)
        rows = rows * _assignment_probs(probs, sorted_indices, expert)[:, None]
    out = rows.new_zeros(T + 1, H).index_add(0, sorted_indices, rows)     # row T: ignored
    return out[:T].to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reorders the chunks of input [rows, ..]: chunk j of the output is chunk sorted_idxs[j].

    split_sizes [n] and sorted_idxs [n], a permutation, are int tensors on the device. The sizes
    must sum to `rows` (not checked: that would sync). probs [rows, ..] moves along. Returns
    (output, permuted_probs or None).

    >>> sizes, order = torch.tensor([1, 2]), torch.tensor([1, 0])
    >>> sort_chunks_by_idxs(torch.tensor([10, 20, 21]), sizes, order)[0]
    tensor([20, 21, 10])
    """
    check_shapes(split_sizes=(split_sizes, "chunks"), sorted_idxs=(sorted_idxs, "chunks"))
    if probs is not None and probs.shape[0] != input.shape[0]:
        raise ValueError(f"probs has {probs.shape[0]} rows and input {input.shape[0]}; "
                         f"they need the same number")
    starts = split_sizes.cumsum(0) - split_sizes
    new_sizes = split_sizes[sorted_idxs].long()
    new_starts = new_sizes.cumsum(0) - new_sizes
    shifts = starts[sorted_idxs] - new_starts                    # new place -> old one

    row = torch.arange(input.shape[0], device=input.device)
    source = row + shifts.repeat_interleave(new_sizes, output_size=input.shape[0])
    if probs is not None:
        probs = probs.index_select(0, source)
    return input.index_select(0, source), probs


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """routing_map [T, E] (bool or 0/1) in its dtype: the first zeros of each column become ones,
    until its count is a multiple of pad_multiple, or T.

    >>> pad_routing_map(torch.tensor([[0], [0], [1]]), pad_multiple=2).flatten()
    tensor([1, 0, 1])
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is {pad_multiple}; needs 1 or more")
    map_TE = _as_map(routing_map)
    counts_E = map_TE.sum(0)
    wanted_E = (counts_E + pad_multiple - 1) // pad_multiple * pad_multiple
    return (_place_by_position(map_TE) < wanted_E).to(routing_map.dtype)


# ---- Activations ----

class _ActivationBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, y, weights, made):
        return _gradients(g, y, weights, made)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("activation_back has no derivative: this project has only first "
                           "derivatives. Detach its results")


def _gradients(g, y, weights, made):
    """(grad_y, grad_weights or None)"""
    inputs = [y.detach()] if weights is None else [y.detach(), weights.detach()]

    def value(y, weights=None):
        return kernels.activated_rows(y, weights, made)

    if torch.compiler.is_compiling():          # the compiler cannot trace torch.autograd.grad
        grads = torch.func.vjp(value, *inputs)[1](g.detach())
    else:
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in inputs]
            grads = torch.autograd.grad(value(*leaves), leaves, g.detach().to(y.dtype))
    return grads[0], None if weights is None else grads[1]


def activation_back(
    g: Tensor, y: Tensor, kind: "str | kernels.Activation | Callable[..., Tensor]" = "swiglu",
    weights: Tensor | None = None, **constants: float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gradient of kernels.activation, given g [.., F]: grad_y in y.dtype; with weights (grad_y,
    grad_weights [.., 1] in weights.dtype, summed over F in fp32 at least). The results have no
    derivative: in eager mode asking for one is a RuntimeError, in compiled code they are constants.
    """
    made = kernels.activation_of(kind, **constants)
    kernels.check_activation(y, weights, made.parts, g=g)
    # The compiler cannot trace a backward that is an error.
    with_error = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    with torch.set_grad_enabled(with_error):
        grad_y, grad_weights = _ActivationBack.apply(g, y, weights, made)
    return grad_y if weights is None else (grad_y, grad_weights)


def swiglu(y: Tensor) -> Tensor:
    """silu(a) · b for y = [a, b] [.., 2F] -> [.., F].

    >>> swiglu(torch.tensor([0.0, 20.0, 5.0, 5.0]))
    tensor([  0., 100.])
    """
    return kernels.activation(y)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """silu(a) · b · weights of y = [a, b] [.., 2F], weights [.., 1] of any dtype -> [.., F]."""
    return kernels.activation(y, weights=weights)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of swiglu to y [.., 2F], given g [.., F]."""
    return activation_back(g, y)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(grad_y [.., 2F] in y.dtype, grad_weights [.., 1] in weights.dtype) of weighted_swiglu."""
    return activation_back(g, y, weights=weights)
