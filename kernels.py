"""Mixture-of-Experts as plain tensor functions, in the order a token meets them: route, balance, permute, experts.

Letters  S sequence length, B batch, T = S·B tokens (token t = s·B + b), H hidden size, E experts, K experts per token,
         N = T·K assignments, F expert FFN size, P parts of fc1's output (2: gate, up), ℓ latent size, C expert
         capacity, G expert groups. A suffix names a tensor's axes: rows_NH is [N, H].
Words    logits: the router's raw output. scores: logits after the score function; they choose the experts. probs: the
         weights that combine the experts' outputs. routing_map [T, E] bool and indices [T, K] int64: who goes where.
Nowhere  An assignment with index E goes nowhere (dropped, or of a padding token): it sorts behind all experts, none
         computes it, and it adds nothing to any output or gradient.
Masks    A padding_mask is boolean, True = padding.

No state, no config, no process group beyond an argument. `torch.compile(fullgraph=True)` takes every function whole,
forward and backward, for every T with one dynamic graph; the exceptions say so where they stand.
"""
import functools
import math
import re
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar      # with dynamic=True Dynamo makes floats symbolic

# copies of this file under several names do not collide
_NAMESPACE = "moe_" + re.sub(r"\W", "_", __name__, flags=re.ASCII)


def without_autocast(x: Tensor):
    """A context in which products of tensors on x's device are computed in their own dtype."""
    device = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
    return torch.autocast(device, enabled=False)


def _op(fake, mutates_args=(), reads_on_host: bool = False):
    """Decorator: registers a function, whose first argument is a tensor, as a custom op.

    The compiler calls the op as it is, and autocast does not reach inside. `fake` takes the same
    arguments and gives empty tensors of the results' shapes and dtypes. An op that decides
    something on the host says so: the compiler then leaves it out of CUDA graphs.
    """
    def register(function):
        @functools.wraps(function)
        def body(*args, **kwargs):
            with without_autocast(args[0]):
                return function(*args, **kwargs)
        op = torch.library.custom_op(
            f"{_NAMESPACE}::{function.__name__.strip('_')}", body, mutates_args=mutates_args,
            tags=[torch.Tag.cudagraph_unsafe] if reads_on_host else [])
        op.register_fake(fake)
        return op
    return register


def _upcast(x: Tensor) -> Tensor:
    """x in fp32 at least: fp64 stays fp64."""
    return x if x.dtype == torch.float64 else x.float()


def _check_known(name: str, value, known) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known: {', '.join(map(repr, known))}")


def _shape_2d(name: str, x: Tensor, axes: str = "[T, E]") -> tuple[int, int]:
    """The shape of x, or a ValueError."""
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}; needs {axes}")
    return x.shape


def _check_bias(expert_bias: Tensor, E: int) -> None:
    if expert_bias.shape != (E,):
        raise ValueError(f"expert_bias has shape {list(expert_bias.shape)}; needs [{E}], one entry per expert")


def _as_map(routing_map: Tensor) -> Tensor:
    """routing_map [T, E] as bool; it may have any integer dtype."""
    _shape_2d("routing_map", routing_map)
    if routing_map.is_floating_point() or routing_map.is_complex():
        raise TypeError(f"routing_map is {routing_map.dtype}; needs torch.bool or an integer dtype")
    return routing_map.bool()


# ---- Route: logits -> who goes where, and with what weight ----

# A scatter is an op: Inductor's code for CPUs may read its target too early (pytorch #185509).
@_op(lambda values, indices, columns, fill=0: values.new_empty(values.shape[0], columns))
def _scatter_columns(values: Tensor, indices: Tensor, columns: int, fill: int = 0) -> Tensor:
    """[T, columns]: values[t, k] in column indices[t, k], else `fill`. Column `columns` is cut off."""
    out = values.new_full((values.shape[0], columns + 1), fill).scatter_(1, indices, values)
    return out[:, :columns].contiguous()


def _gather_columns(values: Tensor, indices: Tensor) -> Tensor:
    """[T, K]: values[t, indices[t, k]]; the column behind the last one holds zeros."""
    return F.pad(values, (0, 1)).gather(1, indices)


class _Adjoint(torch.autograd.Function):
    """there(x, *tensors); its gradient is back(grad, *tensors)."""

    @staticmethod
    def forward(ctx, x, there, back, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.back = back
        return there(x, *tensors)

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors                  # asked for once: a checkpoint unpacks them once
        # x, there, back, *tensors
        return ctx.back(grad, *tensors), None, None, *[None] * len(tensors)


def pick(scores: Tensor, indices: Tensor) -> Tensor:
    """scores [T, E], indices [T, K] in [0, E] -> scores[t, indices[t, k]] [T, K], 0 for index E."""
    back = functools.partial(_scatter_columns, columns=scores.shape[1])
    return _Adjoint.apply(scores, _gather_columns, back, indices)


def _map_of(indices: Tensor, num_experts: int) -> Tensor:
    """indices [T, K] -> routing_map [T, E] bool."""
    return _scatter_columns(torch.ones_like(indices, dtype=torch.bool), indices, num_experts)


def _sqrtsoftplus(x: Tensor) -> Tensor:
    # the clamp keeps the gradient 0, not NaN, where softplus underflows (x < -87)
    return F.softplus(x, threshold=40.0).clamp(min=torch.finfo(x.dtype).tiny).sqrt()


SCORE_FUNCTIONS = {"softmax": functools.partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": _sqrtsoftplus}


def topk_routing_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None, dense_output: bool = False, precomputed_indices: Tensor | None = None,
    norm_topk_prob: bool | None = None, norm_eps: float = 1e-20, group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The K experts of every token and their probs, from logits [T, E].

    1. scores = softmax over E, sigmoid, or sqrt(softplus) of the logits, in fp32 at least.
    2. Chosen, in descending order: the top K logits; with `expert_bias` [E] the top K of scores + bias (arXiv
       2408.15664: the bias only chooses); with `num_groups` the same among the best `group_topk` groups (see
       group_limited_topk); or `precomputed_indices` [T, K] int64 in [0, E], E = nowhere. Those of one token are
       distinct below E; neither is checked, that would sync the device.
    3. probs = the unbiased scores of the chosen, divided by (their sum + norm_eps) if `norm_topk_prob`. None is
       Megatron's convention: softmax with use_pre_softmax=False normalises (as a softmax over the chosen logits), with
       True it does not; sigmoid and sqrtsoftplus normalise if K > 1.
    4. times `scaling_factor`.

    Returns (probs [T, E], routing_map [T, E] bool), or with `dense_output` (probs [T, K], indices [T, K] int64); probs
    in logits.dtype. ValueError: unknown score function, sizes that do not fit.
    """
    T, E = _shape_2d("logits", logits)
    _check_known("score_function", score_function, SCORE_FUNCTIONS)
    if not 1 <= topk <= E:
        raise ValueError(f"topk is {topk}; needs 1 <= topk <= num_experts = {E}")
    if (num_groups is None) != (group_topk is None):
        raise ValueError(f"num_groups = {num_groups} and group_topk = {group_topk} go together: give both or neither")
    if expert_bias is not None:
        _check_bias(expert_bias, E)
    if precomputed_indices is not None and precomputed_indices.shape != (T, topk):
        raise ValueError(f"precomputed_indices has shape {list(precomputed_indices.shape)}; needs [{T}, {topk}]")

    logits_TE = _upcast(logits)
    over_chosen = score_function == "softmax" and not use_pre_softmax and norm_topk_prob is None
    if norm_topk_prob is None:
        norm_topk_prob = score_function != "softmax" and topk > 1
    # what becomes the probs: a softmax over the chosen logits needs no softmax over E
    base_TE = logits_TE if over_chosen else SCORE_FUNCTIONS[score_function](logits_TE)

    if precomputed_indices is not None:
        indices_TK = precomputed_indices
    elif num_groups is None and expert_bias is None:
        indices_TK = logits_TE.topk(topk, dim=1).indices              # not of the scores: a sigmoid saturates into ties
    else:
        with torch.no_grad():
            scores_TE = SCORE_FUNCTIONS[score_function](logits_TE)
            scores_TE = scores_TE if expert_bias is None else scores_TE + expert_bias
            if num_groups is None:
                indices_TK = scores_TE.topk(topk, dim=1).indices
            else:
                indices_TK = group_limited_topk(scores_TE, topk, T, E, num_groups, group_topk, group_score_topk)[1]

    probs_TK = pick(base_TE, indices_TK)
    if precomputed_indices is not None:
        nowhere_TK = indices_TK >= E
        probs_TK = probs_TK.masked_fill(nowhere_TK, torch.finfo(base_TE.dtype).min if over_chosen else 0.0)
    if over_chosen:
        probs_TK = probs_TK.softmax(-1)
    if norm_topk_prob:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + norm_eps)
    if scaling_factor is not None:
        probs_TK = probs_TK * scaling_factor
    if precomputed_indices is not None:
        probs_TK = probs_TK.masked_fill(nowhere_TK, 0.0)
    probs_TK = probs_TK.to(logits.dtype)
    return (probs_TK, indices_TK) if dense_output else routing_to_map(probs_TK, indices_TK, E)


def routing_to_map(probs: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(probs [T, K], indices [T, K]) -> (probs [T, E], routing_map [T, E] bool); index E is left out."""
    _shape_2d("probs", probs, "[T, K]")
    if indices.shape != probs.shape:
        raise ValueError(f"indices has shape {list(indices.shape)}; needs that of probs, {list(probs.shape)}")
    there = functools.partial(_scatter_columns, columns=num_experts)
    return _Adjoint.apply(probs, there, _gather_columns, indices), _map_of(indices, num_experts)


def check_groups(
    topk: int, num_experts: int, num_groups: int, group_topk: int, group_score_topk: int | None,
) -> tuple[int, int]:
    """(experts in a group, group_score_topk with its default topk // group_topk), or a ValueError."""
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups = {num_groups} does not divide num_experts = {num_experts}; groups need equal sizes")
    size = num_experts // num_groups
    if not 1 <= group_topk <= num_groups or group_topk * size < topk:
        raise ValueError(f"group_topk = {group_topk} of num_groups = {num_groups} groups of {size} experts cannot hold "
                         f"topk = {topk}; needs 1 <= group_topk <= num_groups and group_topk * {size} >= topk")
    score_topk = topk // group_topk if group_score_topk is None else group_score_topk
    if not 1 <= score_topk <= size:
        raise ValueError(f"group_score_topk is {score_topk} (topk // group_topk = {topk} // {group_topk} unless given); "
                         f"set it to 1..{size}, a group has {size} experts")
    return size, score_topk


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Top K of scores [T, E] within the best `group_topk` of `num_groups` equal groups (arXiv 2405.04434, 2412.19437).

    A group's score is the sum of its `group_score_topk` best scores (default topk // group_topk). The other groups are
    masked with -inf, so that a negative score wins over them. Returns (the chosen scores [T, K], indices [T, K]).
    """
    group_size, group_score_topk = check_groups(topk, num_experts, num_groups, group_topk, group_score_topk)
    if scores.shape != (num_tokens, num_experts):
        raise ValueError(f"scores has shape {list(scores.shape)}; needs [{num_tokens}, {num_experts}], [T, E]")
    grouped_TGE = scores.view(num_tokens, num_groups, group_size)
    score_TG = grouped_TGE.topk(group_score_topk, dim=-1).values.sum(-1)
    best = score_TG.topk(group_topk, dim=-1).indices
    stays_TG = _map_of(best, num_groups)
    masked_TE = grouped_TGE.masked_fill(~stays_TG[..., None], -math.inf).view(num_tokens, num_experts)
    indices_TK = masked_TE.topk(topk, dim=-1).indices
    return pick(scores, indices_TK), indices_TK


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(routing_map [T, E] bool, scores [T, E]) for the balance losses, from logits [T, E].

    scores: the score function over all E, each token's sum 1, in fp32 at least. The map is their plain top K: no bias,
    no groups. Tokens with padding_mask [T] True are zero in both.
    """
    _check_known("score_function", score_function, SCORE_FUNCTIONS)
    _shape_2d("logits", logits)
    logits_TE = _upcast(logits)
    scores_TE = SCORE_FUNCTIONS[score_function](logits_TE)
    if score_function != "softmax":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    map_TE = _map_of(logits_TE.topk(topk, dim=1).indices, logits_TE.shape[1])
    if padding_mask is not None:
        map_TE = map_TE & ~padding_mask[:, None]
        scores_TE = scores_TE.masked_fill(padding_mask[:, None], 0.0)
    return map_TE, scores_TE


# ---- Balance: losses, capacity, the bias that needs no loss ----

def _sum_tokens(x: Tensor) -> Tensor:
    """Σ over the first axis, in fp64: no digits lost for any T, and one graph (an fp32 sum on a CPU guards on 4096)."""
    return x.sum(0, dtype=torch.float64)


class _WeightedTokenSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, coefficients):
        ctx.coefficients, ctx.like = coefficients, scores.shape    # not save_for_backward: see weighted_token_sum
        return (_sum_tokens(scores) * coefficients).sum().to(_upcast(scores).dtype)

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.coefficients).to(grad.dtype).expand(ctx.like), None


def weighted_token_sum(scores: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_e coefficients[e] · Σ_t scores[t, e], 0-d, scores [T, E] in fp32 at least, coefficients [E] fp64 without gradient. The backward
    uses the coefficients of this forward even if an activation checkpoint computes another one in its recomputation."""
    return _WeightedTokenSum.apply(_upcast(scores), coefficients.detach())


def switch_load_balancing_loss_func(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int, num_experts: int,
    moe_aux_loss_coeff: float,
) -> Tensor:
    """coeff · E / (K·T²) · Σ_e n_e · Σ_t probs[t, e], a 0-d tensor (arXiv 2101.03961; global form 2501.11873).

    probs [T, E]: scores with sum 1 per token. tokens_per_expert n [E], counted over total_num_tokens T (at least 1; an
    int or a 0-d tensor): of one batch, or of all ranks. Its minimum is coeff, reached with even load.
    """
    _shape_2d("probs", probs)
    total = total_num_tokens.clamp(min=1) if isinstance(total_num_tokens, Tensor) else max(total_num_tokens, 1)
    return weighted_token_sum(probs, tokens_per_expert.double() / total / total * (moe_aux_loss_coeff * num_experts / topk))


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """coeff · mean over valid t of logsumexp(logits[t])², a 0-d tensor (arXiv 2202.08906). logits [.., E]."""
    logits = _upcast(logits)
    if padding_mask is None:
        padding_mask = torch.zeros_like(logits[..., 0], dtype=torch.bool)
    lse = logits.masked_fill(padding_mask[..., None], 0.0).logsumexp(-1).masked_fill(padding_mask, 0.0)
    valid = (~padding_mask).sum().clamp(min=1)
    return (_sum_tokens(lse.square().flatten()) * z_loss_coeff / valid).to(logits.dtype)


@_op(lambda cost, tol, padding_mask: torch.empty_like(cost, memory_format=torch.contiguous_format))
def _sinkhorn(cost: Tensor, tol: float, padding_mask: Tensor | None) -> Tensor:
    T, E = cost.shape
    tokens = max(T, 1)
    A_TE = (cost - cost.amax(1, keepdim=True)).exp()                  # never overflows; rescales d0 alone
    if padding_mask is not None:
        A_TE, tokens = A_TE.masked_fill(padding_mask[:, None], 0.0), (~padding_mask).sum().clamp(min=1)
    d0_T, d1_E = A_TE.new_ones(T), A_TE.new_ones(E)
    done = torch.zeros((), dtype=torch.bool, device=cost.device)
    for _ in range(256):
        new0_T = (1 / tokens) / (A_TE @ d1_E + 1e-8)
        new1_E = (1 / E) / (new0_T @ A_TE + 1e-8)
        d0_T, last_E, d1_E = torch.where(done, d0_T, new0_T), d1_E, torch.where(done, d1_E, new1_E)
        done = done | ((d1_E - last_E).abs().mean() <= tol)
        if cost.device.type == "cpu" and done:                        # elsewhere reading it would sync: frozen instead
            break
    return d1_E * A_TE * d0_T[:, None]


def sinkhorn(cost: Tensor, tol: float = 1e-4, padding_mask: Tensor | None = None) -> Tensor:
    """A doubly normalised exp(cost) [T, E]: rows sum to 1/T, columns to 1/E, within tol. No gradient.

    A = exp(cost); from ones, d0 = (1/T)/(A·d1 + 1e-8), d1 = (1/E)/(Aᵀ·d0 + 1e-8) until the mean absolute change of d1
    is at most tol, or for 256 rounds; d1·A·d0[:, None]. Finite for costs up to ±1e4: a row's maximum is taken off.
    Tokens with padding_mask [T] True carry no mass: T counts the others, as if they were alone.
    """
    _shape_2d("cost", cost)
    return _sinkhorn(_upcast(cost.detach()), tol, padding_mask).to(cost.dtype)


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """C = ceil(num_tokens / num_experts · capacity_factor), at least min_capacity; num_tokens counts assignments T·K."""
    return max(math.ceil(num_tokens / num_experts * guard_scalar(capacity_factor)), min_capacity or 0)


@_op(lambda keys: torch.empty_like(keys, dtype=torch.int64))
def _place_in_column(keys: Tensor) -> Tensor:
    """[T, E] int64: each key's place in its column, the largest first, equal ones in order. An op because the
    compiler's own lowering of a sort guards on the length."""
    order_TE = keys.argsort(dim=0, descending=True, stable=True)
    places_TE = torch.arange(keys.shape[0], device=keys.device)[:, None].expand(keys.shape)
    return torch.empty_like(order_TE).scatter_(0, order_TE, places_TE)


def _rank_in_column(routing_map: Tensor) -> Tensor:
    """[T, E] int64: a token's place in its expert's column, the routed in order first, then the others in order."""
    ones_TE = routing_map.long()
    routed_TE = ones_TE.cumsum(0)
    others_TE = (1 - ones_TE).cumsum(0) + ones_TE.sum(0)
    return torch.where(routing_map, routed_TE, others_TE) - 1


def apply_router_token_dropping(
    routing_probs: Tensor, routing_map: Tensor, router_topk: int, capacity_factor: float, drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cuts every expert to its capacity C = get_capacity(T·router_topk, E, capacity_factor) -> (probs, map), [T, E].

    drop_policy "probs" keeps an expert's C most probable routed tokens, equal ones in order; "position" its first C.
    `pad_to_capacity` fills every column to exactly min(C, T) ones with the lowest-numbered unrouted tokens, at prob 0.
    """
    _check_known("drop_policy", drop_policy, ("probs", "position"))
    routing_map = _as_map(routing_map)
    if routing_probs.shape != routing_map.shape:
        raise ValueError(f"routing_probs {list(routing_probs.shape)} and routing_map {list(routing_map.shape)} "
                         f"need the same shape [T, E]")
    T, E = routing_map.shape
    capacity = get_capacity(T * router_topk, E, capacity_factor)
    if drop_policy == "position":
        rank_TE = _rank_in_column(routing_map)
    else:
        rank_TE = _place_in_column(routing_probs.detach().masked_fill(~routing_map, -math.inf))
    within_TE = rank_TE < capacity
    kept_TE = routing_map & within_TE
    return routing_probs.masked_fill(~kept_TE, 0.0), within_TE if pad_to_capacity else kept_TE


def get_updated_expert_bias(
    tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float, tp_dp_cp_group=None,
) -> Tensor:
    """bias + rate · sign(mean(n) - n): up for the underloaded (arXiv 2408.15664). n [.., E] is all-reduced first, in a
    copy, over `tp_dp_cp_group`. In expert_bias.dtype; keep that fp32: steps of 1e-3 vanish in bf16."""
    with torch.no_grad():
        counts = tokens_per_expert
        if tp_dp_cp_group is not None:
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=tp_dp_cp_group)
        # E·n against the sum, not n against the mean: integers, so that an even load is exactly 0
        total, E = counts.double().sum(-1, keepdim=True), counts.shape[-1]
        return expert_bias + (total - counts.double() * E).sign().to(expert_bias.dtype) * expert_bias_update_rate


def _bias_bins(expert_bias: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """(lower end, width), 0-d, of uniform bins over [min b - 1, max b + 1]; fp32 at least."""
    bias_E = _upcast(expert_bias)
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / num_bins


def required_bias_histogram(
    scores: Tensor, expert_bias: Tensor, topk: int, num_bins: int = 1000, padding_mask: Tensor | None = None,
) -> Tensor:
    """How many tokens need which bias: [E, num_bins] int32, the statistic of quantile balancing
    (Kimi K3 technical report, section 2.3.3).

    scores s [T, E] in [0, 1], chosen by s + expert_bias b [E]. α_t is the (K+1)-th largest of s_t + b, and
    r[t, e] = α_t - s[t, e] the bias with which token t is about to choose expert e. The bins are uniform over
    [min b - 1, max b + 1]; values beyond an end belong to its bin. Tokens with padding_mask [T] True are left out.
    Sums of such histograms, over microbatches or ranks, are exact: they are integers.
    ValueError: shapes that do not fit, topk not below E, num_bins below 1.
    """
    E = _shape_2d("scores", scores)[1]
    _check_bias(expert_bias, E)
    if not 1 <= topk < E or num_bins < 1:
        raise ValueError(f"topk is {topk} and num_bins {num_bins}; needs 1 <= topk < num_experts = {E} and num_bins >= 1")
    with torch.no_grad():
        scores_TE = _upcast(scores)
        alpha_T1 = (scores_TE + expert_bias).topk(topk + 1, dim=1).values[:, -1:]
        low, width = _bias_bins(expert_bias, num_bins)
        bins_TE = ((alpha_T1 - scores_TE - low) / width).nan_to_num().clamp(0, num_bins - 1).long()
        if padding_mask is not None:
            bins_TE = bins_TE.masked_fill(padding_mask[:, None], num_bins)
        slots_TE = torch.arange(E, device=scores.device) * (num_bins + 1) + bins_TE
        counts = count_experts(slots_TE, E * (num_bins + 1))
        return counts.view(E, num_bins + 1)[:, :num_bins].int()


def quantile_expert_bias(histogram: Tensor, expert_bias: Tensor, topk: int) -> Tensor:
    """The bias [E] with which each expert would have been chosen by its share K/E of the tokens, minus its mean over E.

    histogram [E, num_bins] of required_bias_histogram, summed over all tokens; expert_bias [E] as it was there. Row e's
    K/E quantile, linear inside its bin, the first whose running count reaches K/E · n. An empty histogram changes
    nothing. In expert_bias.dtype.
    """
    E, num_bins = _shape_2d("histogram", histogram, "[E, num_bins]")
    _check_bias(expert_bias, E)
    low, width = _bias_bins(expert_bias.double(), num_bins)
    running = histogram.long().cumsum(1)
    wanted_E1 = running[:, -1:] * topk                                # times E, like the counts: exact
    bin_E1 = (running * E < wanted_E1).sum(1, keepdim=True).clamp(max=num_bins - 1)
    inside_E1 = histogram.long().gather(1, bin_E1)
    below_E1 = running.gather(1, bin_E1) - inside_E1
    share_E1 = (wanted_E1 - below_E1 * E).double() / (inside_E1 * E)
    new_E = (low + width * (bin_E1 + share_E1)).flatten()
    new_E = (new_E - new_E.mean()).to(expert_bias.dtype)
    return torch.where(running[0, -1] > 0, new_E, expert_bias)


@_op(lambda indices, num_experts: indices.new_empty(num_experts))
def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Assignments per expert [E] int64 of indices [T, K] int64 in [0, E]; index E is not counted."""
    ids_N = indices.flatten()
    counts = ids_N.new_zeros(num_experts + 1).scatter_add_(0, ids_N, ids_N.new_ones(1).expand_as(ids_N))
    return counts[:num_experts].clone()


@_op(lambda value, grad: torch.empty_like(value))
def value_in_backward(value: Tensor, grad: Tensor) -> Tensor:
    """value, as it is when the backward has reached `grad`, which is otherwise unused: without it
    the partitioner may compute, in the forward, whatever is made of value alone."""
    return value.clone()


# ---- Permute, index form: what the layer runs on. Static shapes, no atomics, an inverse ----

class Permutation(NamedTuple):
    """Where each of the N = T·K assignments goes when rows are grouped by expert."""
    order: Tensor      # [N] int64      row -> assignment t·K + k
    inverse: Tensor    # [T, K] int64   assignment -> row
    counts: Tensor     # [E] int64      rows per expert
    offsets: Tensor    # [E] int32      running sums of the counts; rows at or beyond offsets[-1] go nowhere


def _empty_plan(indices, num_experts):
    (T, K), new = indices.shape, functools.partial(indices.new_empty, dtype=torch.int64)
    return new(T * K), new(K, T), new(num_experts), new(num_experts).int()


@_op(_empty_plan)
def _plan_permutation(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_N = indices.flatten()
    order_N = ids_N.argsort(stable=True)                     # stable: an expert's tokens stay in order
    rows_N = torch.arange(ids_N.numel(), device=ids_N.device)
    inverse_TK = torch.empty_like(order_N).scatter_(0, order_N, rows_N).view(indices.shape)
    counts_E = count_experts(indices, num_experts)
    return order_N, inverse_TK.t().contiguous(), counts_E, counts_E.cumsum(0).int()


def plan_permutation(indices: Tensor, num_experts: int) -> Permutation:
    """The Permutation of indices [T, K] int64 in [0, E]: experts ascending, tokens ascending within an expert, index E
    (nowhere) last. The range is not checked: that would sync the device."""
    if indices.ndim != 2 or indices.dtype != torch.int64:
        raise TypeError(f"indices is {list(indices.shape)} {indices.dtype}; needs [T, K] torch.int64")
    order, inverse_KT, counts, offsets = _plan_permutation(indices, num_experts)
    return Permutation(order, inverse_KT.t(), counts, offsets)        # kept [K, T]: one choice's rows are contiguous


def _expert_of(row_TK: Tensor, offsets: Tensor) -> Tensor:
    """[T, K]: the expert of each row number; E behind offsets[-1]. Row numbers lie as a plan's inverse, [K, T] in memory."""
    return torch.bucketize(row_TK.t(), offsets, right=True).t()


def _sum_rows(rows: Tensor, inverse: Tensor, offsets: Tensor | None = None, probs: Tensor | None = None) -> Tensor:
    """[T, H]: Σ_k probs[t, k] · rows[inverse[t, k]], in fp32 at least. Rows from offsets[-1] on are left out (None:
    they are zeros already). Unrolled over K: one kernel of gathers and adds, no [T, K, H]."""
    total_TH = None
    for k, row_T in enumerate(inverse.unbind(1)):
        picked_TH = _upcast(rows.index_select(0, row_T))
        if probs is not None:
            picked_TH = picked_TH * probs[:, k, None]
        if offsets is not None:
            picked_TH = picked_TH.masked_fill((row_T >= offsets[-1])[:, None], 0.0)
        total_TH = picked_TH if total_TH is None else total_TH + picked_TH
    return total_TH.to(rows.dtype)


def _dot_rows(rows: Tensor, inverse: Tensor, tokens: Tensor) -> Tensor:
    """[T, K]: Σ_h rows[inverse[t, k], h] · tokens[t, h], in fp32 at least."""
    tokens_TH = _upcast(tokens)
    return torch.stack([(_upcast(rows.index_select(0, row_T)) * tokens_TH).sum(-1) for row_T in inverse.unbind(1)], dim=1)


def _spread_rows(tokens: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    """[N, H]: row i is its token's; rows at or beyond offsets[-1], and of fillers, are zeros."""
    T, K = inverse.shape
    row_N = torch.arange(order.shape[0], device=order.device)
    token_N = torch.where(row_N < offsets[-1], order // K, T)
    return F.pad(tokens, (0, 0, 0, 1)).index_select(0, token_N)       # row T holds zeros


def _collect_rows(rows: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    return _sum_rows(rows, inverse, offsets)


def gather_rows(tokens: Tensor, plan: Permutation) -> Tensor:
    """tokens [T, H] -> rows [N, H] in expert order. Rows that go nowhere are zeros and pass no gradient back."""
    if tokens.ndim != 2 or tokens.shape[0] != plan.inverse.shape[0]:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; the plan needs [{plan.inverse.shape[0]}, H]")
    return _Adjoint.apply(tokens, _spread_rows, _collect_rows, plan.order, plan.inverse, plan.offsets)


def combine_rows(rows: Tensor, plan: Permutation, probs: Tensor | None = None) -> Tensor:
    """rows [N, H] -> tokens [T, H]: y_t = Σ_k probs[t, k] · rows[inverse[t, k]] (probs [T, K], or 1).

    Summed in fp32 at least, in rows.dtype. Rows that go nowhere are left out by their number: a NaN there reaches
    nothing. The backward is a gather: bitwise repeatable, like the forward.
    """
    if rows.ndim != 2 or rows.shape[0] != plan.order.shape[0]:
        raise ValueError(f"rows has shape {list(rows.shape)}; the plan needs [{plan.order.shape[0]}, H]")
    if probs is not None and probs.shape != plan.inverse.shape:
        raise ValueError(f"probs has shape {list(probs.shape)}; the plan needs {list(plan.inverse.shape)}, [T, K]")
    weighted = rows if probs is None else _upcast(rows) * gather_probs(probs, plan)[:, None]
    return _Adjoint.apply(
        weighted, _collect_rows, _spread_rows, plan.order, plan.inverse, plan.offsets).to(rows.dtype)


def gather_probs(probs: Tensor, plan: Permutation) -> Tensor:
    """probs [T, K] -> [N]: each row's. Zeros for rows that go nowhere; the backward is a gather."""
    by_assignment = plan._replace(inverse=plan.inverse.reshape(-1, 1))
    return gather_rows(probs.reshape(-1, 1), by_assignment).view(-1)


def pad_plan(plan: Permutation, capacity: int) -> Permutation:
    """The plan with exactly C = `capacity` rows an expert: row e·C + c is expert e's c-th.

    Rows without an assignment are fillers: their order is T·K, and gather_rows makes them zeros.
    Row E·C, beyond the last offset, stands for all assignments that go nowhere. That no expert has
    more than C rows is not checked: that would sync the device.
    """
    (E,), device = plan.counts.shape, plan.order.device
    starts_E = plan.offsets.long() - plan.counts
    slot_EC = torch.arange(capacity, device=device).expand(E, capacity)
    N = plan.order.shape[0]
    row_EC = torch.where(slot_EC < plan.counts[:, None], starts_E[:, None] + slot_EC, N)
    order_or_filler = torch.cat((plan.order, plan.order.new_full((1,), N)))
    expert_TK = _expert_of(plan.inverse, plan.offsets)
    slot_TK = expert_TK * capacity + plan.inverse - starts_E[expert_TK.clamp(max=E - 1)]
    return Permutation(
        order=order_or_filler[F.pad(row_EC.flatten(), (0, 1))],
        inverse=slot_TK.masked_fill(expert_TK == E, E * capacity),
        counts=torch.full_like(plan.counts, capacity),
        offsets=(torch.arange(1, E + 1, device=device) * capacity).int())


# ---- Permute, [T, E] form: Megatron's functions ----

@functools.cache
def _compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=True)


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None,
    fused: bool = False, drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """tokens [T, H], routing_map [T, E] bool or 0/1 -> (permuted_tokens [rows, H], permuted_probs [rows] or None,
    sorted_indices [rows] int64): experts ascending, tokens ascending within one; row i is token sorted_indices[i].

    num_out_tokens: exactly so many rows, a static shape. Rows beyond the map's ones are zeros with prob 0 and sorted
      index T; with fewer rows than ones the last are cut off. None: as many as the map has ones, which syncs and has a
      data-dependent shape: eager only.
    drop_and_pad: every expert has exactly C = num_out_tokens / E rows: its first C tokens, then the lowest-numbered
      tokens not routed to it, with the prob that `probs` [T, E] holds there; rows beyond T are zeros, index T.
    fused: this same function through torch.compile.
    On CUDA the backward adds with atomics; gather_rows does not.
    """
    routing_map = _as_map(routing_map)
    if tokens.ndim != 2 or routing_map.shape[0] != tokens.shape[0]:
        raise ValueError(f"tokens {list(tokens.shape)} and routing_map {list(routing_map.shape)} need shapes [T, H] and "
                         f"[T, E] with the same T")
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(f"probs has shape {list(probs.shape)}; needs the routing_map's {list(routing_map.shape)}")
    (T, E), device = routing_map.shape, tokens.device
    if drop_and_pad and (num_out_tokens is None or num_out_tokens % E):
        raise ValueError(f"num_out_tokens is {num_out_tokens}; with drop_and_pad it needs a multiple of E = {E}")
    if fused and num_out_tokens is None:
        raise ValueError("num_out_tokens is None, which gives a data-dependent shape; fused=True needs a number")
    if fused and not torch.compiler.is_compiling():
        return _compiled(permute)(tokens, routing_map, probs, num_out_tokens, False, drop_and_pad)
    if num_out_tokens is None:
        num_out_tokens = int(routing_map.sum())

    row = torch.arange(num_out_tokens, device=device)
    if drop_and_pad:
        capacity = num_out_tokens // E
        rank_TE = _rank_in_column(routing_map)
        slot_TE = torch.arange(E, device=device) * capacity + rank_TE
        slot_TE = torch.where(rank_TE < capacity, slot_TE, num_out_tokens)                # the last slot is cut off
        token_TE = torch.arange(T, device=device)[:, None].expand(T, E)
        token = _scatter_columns(token_TE.reshape(1, -1), slot_TE.view(1, -1), num_out_tokens, fill=T)[0]
        expert = row // max(capacity, 1)
    else:                                                # the i-th one of the map, read column by column, by bisection
        ones_ET = rearrange(routing_map, "t e -> (e t)").long().cumsum(0)
        place = torch.searchsorted(ones_ET, row + 1)                                      # E·T beyond the last one
        token = torch.where(place < E * T, place % max(T, 1), T)
        expert = place // max(T, 1)
    permuted = F.pad(tokens, (0, 0, 0, 1)).index_select(0, token)                         # row T holds zeros
    if probs is not None:
        flat = F.pad(rearrange(probs, "t e -> (t e)"), (0, 1))
        probs = flat.index_select(0, torch.where(token < T, token * E + expert, T * E))
    return permuted, probs, token


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape, probs: Tensor | None = None,
    routing_map: Tensor | None = None, fused: bool = False, drop_and_pad: bool = False,
) -> Tensor:
    """Adds the rows [rows, H] of `permute` back to their tokens: y_t = Σ over rows i of t of rows[i], [T, H] =
    restore_shape. With probs [T, E] (needs routing_map [T, E]) row i is first multiplied by its own prob.

    Summed in fp32 at least, in permuted_tokens.dtype. Rows with sorted index T are ignored, whatever they hold.
    fused, drop_and_pad: as in permute. On CUDA the sum uses atomics; combine_rows does not.
    """
    T, H = restore_shape
    if permuted_tokens.ndim != 2 or permuted_tokens.shape[1] != H or sorted_indices.shape != permuted_tokens.shape[:1]:
        raise ValueError(f"permuted_tokens {list(permuted_tokens.shape)} and sorted_indices {list(sorted_indices.shape)} "
                         f"need shapes [rows, {H}] and [rows] for restore_shape [{T}, {H}]")
    routing_map = None if routing_map is None else _as_map(routing_map)
    if probs is not None and routing_map is None:
        raise ValueError("probs without routing_map: which expert a row belongs to is read from routing_map; pass the one "
                         "given to permute")
    if probs is not None and (probs.shape != routing_map.shape or probs.shape[0] != T):
        raise ValueError(f"probs {list(probs.shape)} and routing_map {list(routing_map.shape)} need shape [{T}, E]")
    if fused and not torch.compiler.is_compiling():
        return _compiled(unpermute)(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, False, drop_and_pad)

    rows = _upcast(permuted_tokens)
    if probs is not None:
        E = probs.shape[1]
        row = torch.arange(rows.shape[0], device=rows.device)
        if drop_and_pad:
            expert = row // max(rows.shape[0] // E, 1)
        else:
            expert = torch.bucketize(row, routing_map.sum(0).cumsum(0), right=True).clamp(max=E - 1)
        flat = F.pad(rearrange(probs, "t e -> (t e)"), (0, 1))
        rows = rows * flat.index_select(0, torch.where(sorted_indices < T, sorted_indices * E + expert, T * E))[:, None]
    out = rows.new_zeros(T + 1, H).index_add(0, sorted_indices, rows)                     # row T takes the ignored
    return out[:T].to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reorders the chunks of input [rows, ..]: chunk j of the output is chunk sorted_idxs[j], split_sizes[it] rows long.

    split_sizes [n], sorted_idxs [n] (a permutation): int tensors on the device; split_sizes sums to `rows`, which is
    not checked (that would sync). probs [rows, ..] moves along. Returns (output, permuted_probs or None).
    """
    if split_sizes.shape != sorted_idxs.shape or split_sizes.ndim != 1:
        raise ValueError(f"split_sizes {list(split_sizes.shape)} and sorted_idxs {list(sorted_idxs.shape)} need the same "
                         f"shape [chunks]")
    if probs is not None and probs.shape[0] != input.shape[0]:
        raise ValueError(f"probs has {probs.shape[0]} rows and input {input.shape[0]}; they need the same number")
    starts = split_sizes.cumsum(0) - split_sizes
    sizes = split_sizes[sorted_idxs]
    ends = sizes.cumsum(0)
    shift = starts[sorted_idxs] - (ends - sizes)                      # from a chunk's new place to its old one
    row = torch.arange(input.shape[0], device=input.device)
    source = row + shift[torch.bucketize(row, ends, right=True).clamp(max=len(ends) - 1)]
    return input.index_select(0, source), None if probs is None else probs.index_select(0, source)


def pad_routing_map(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """routing_map [T, E] (bool or 0/1), as bool, with the first zeros of every column made ones until its count is a
    multiple of pad_multiple, or T."""
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is {pad_multiple}; needs 1 or more")
    routing_map = _as_map(routing_map)
    counts_E = routing_map.sum(0)
    wanted_E = (counts_E + pad_multiple - 1) // pad_multiple * pad_multiple
    return _rank_in_column(routing_map) < wanted_E


# ---- Activations: y [.., 2F] -> act(first half) · second half ----

class Activation(NamedTuple):
    """act: value(a, constants) is act(a), back(g, a, constants) is g·act'(a)."""
    value: Callable
    back: Callable
    takes: tuple[str, ...] = ()                              # the constants that it has
    gated: bool = True


class Constants(NamedTuple):
    """Which activation, and its constants: see `activation`."""
    kind: str = "swiglu"
    alpha: float = 1.702
    linear_offset: float = 0.0
    clamp_value: float | None = None
    beta: float = 1.0
    linear_beta: float | None = None
    interleaved: bool = False                                # y = [a_0, b_0, a_1, b_1, ..], see expert_mlp


def _quick_gelu_back(g: Tensor, a: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * a)
    return g * s * (1 + alpha * a * (1 - s))


def _situ_back(g: Tensor, a: Tensor, beta: float) -> Tensor:
    t, s = torch.tanh(a / beta), torch.sigmoid(a)
    return g * s * ((1 - t * t) + beta * t * (1 - s))


_GLU = ("linear_offset", "clamp_value")
_aten = torch.ops.aten                                       # one kernel in eager mode
ACTIVATIONS = {
    "swiglu": Activation(                            # one sigmoid for both, once it is compiled
        lambda a, c: a * torch.sigmoid(a), lambda g, a, c: _aten.silu_backward(g, a), _GLU),
    "geglu": Activation(
        lambda a, c: F.gelu(a, approximate="tanh"),
        lambda g, a, c: _aten.gelu_backward(g, a, approximate="tanh"), _GLU),
    "quick_geglu": Activation(
        lambda a, c: a * torch.sigmoid(c.alpha * a),
        lambda g, a, c: _quick_gelu_back(g, a, c.alpha), ("alpha", *_GLU)),
    "situ": Activation(
        lambda a, c: c.beta * torch.tanh(a / c.beta) * torch.sigmoid(a),
        lambda g, a, c: _situ_back(g, a, c.beta), ("beta", "linear_beta")),
    "relu2": Activation(
        lambda a, c: a.relu().square(), lambda g, a, c: 2 * g * a.relu(), gated=False),
}


def _split(y: Tensor, c: Constants) -> Tensor:
    """y [.., 2F] -> its halves a and b [2, .., F]."""
    pattern = "... (f two) -> two ... f" if c.interleaved else "... (two f) -> two ... f"
    return rearrange(y, pattern, two=2)


def _halves(y: Tensor, c: Constants) -> tuple[Tensor, Tensor]:
    """(a, what a's activation is multiplied by)."""
    a, b = _split(y, c)
    if c.clamp_value is not None:
        a, b = a.clamp(max=c.clamp_value), b.clamp(-c.clamp_value, c.clamp_value)
    if c.linear_beta is not None:
        b = c.linear_beta * torch.tanh(b / c.linear_beta)
    return a, b + c.linear_offset if c.linear_offset else b


def _value(y: Tensor, c: Constants) -> Tensor:
    """activation's value without weights, in fp32 at least."""
    act, wide = ACTIVATIONS[c.kind], _upcast(y)
    if not act.gated:
        return act.value(wide, c)
    a, b = _halves(wide, c)
    return act.value(a, c) * b


def _weighted(value: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (value if weights is None else value * weights).to(dtype)


def _activate_back(
    g: Tensor, y: Tensor, weights: Tensor | None, c: Constants,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(grad_y in y.dtype, grad_weights [.., 1] in fp32 at least, or None, _value(y))."""
    act, g_wide, wide = ACTIVATIONS[c.kind], _upcast(g), _upcast(y)
    g_out = g_wide if weights is None else g_wide * weights
    if act.gated:
        a, b = _halves(wide, c)
        gate = act.value(a, c)
        value, grad_a, grad_b = gate * b, act.back(g_out * b, a, c), g_out * gate
        if c.linear_beta is not None:                                 # tanh' = 1 - tanh²
            grad_b = grad_b * (1 - (b / c.linear_beta).square())
        if c.clamp_value is not None:                                 # torch.clamp's gradient: 1 at the bound
            raw_a, raw_b = _split(wide, c)
            grad_a = grad_a.masked_fill(~(raw_a <= c.clamp_value), 0.0)
            grad_b = grad_b.masked_fill(~(raw_b.abs() <= c.clamp_value), 0.0)
        grads = grad_a.to(y.dtype), grad_b.to(y.dtype)
        grad_y = torch.stack(grads, -1).flatten(-2) if c.interleaved else torch.cat(grads, -1)
    else:
        value = act.value(wide, c)
        grad_y = act.back(g_out, wide, c).to(y.dtype)
    return grad_y, None if weights is None else (g_wide * value).sum(-1, keepdim=True), value


def _to_fp8(y: Tensor) -> Tensor:
    return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, constants, fp8_input_store):
        ctx.constants, ctx.dtype = constants, y.dtype
        ctx.save_for_backward(_to_fp8(y) if fp8_input_store else y, weights)
        return _weighted(_value(y, constants), weights, y.dtype)

    @staticmethod
    def backward(ctx, g):
        y, weights = ctx.saved_tensors
        grad_y, grad_weights, _ = _activate_back(g, y.to(ctx.dtype), weights, ctx.constants)
        # y, weights, constants, fp8_input_store
        return grad_y, None if weights is None else grad_weights.to(weights.dtype), None, None


def _constants(*given) -> Constants:
    """The Constants, checked, and as numbers: an autograd function cannot take the compiler's symbolic floats."""
    kind, *values = given
    _check_known("kind", kind, ACTIVATIONS)
    constants = Constants(kind, *[None if x is None else guard_scalar(x) for x in values])
    for name, default in Constants._field_defaults.items():
        value = getattr(constants, name)
        if name != "kind" and name not in ACTIVATIONS[kind].takes and value != default:
            raise ValueError(f"{name} is {value}; needs {default}, since {kind} has no such constant")
        if name in ("beta", "linear_beta") and value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; needs a positive number")
    return constants


def _check_activation(y: Tensor, weights: Tensor | None, c: Constants, g: Tensor | None = None) -> None:
    gated = ACTIVATIONS[c.kind].gated
    if gated and y.shape[-1] % 2:
        raise ValueError(f"y has shape {list(y.shape)}; {c.kind} needs an even last axis, [.., 2F]")
    if weights is not None and weights.shape != (*y.shape[:-1], 1):
        raise ValueError(f"weights has shape {list(weights.shape)}; needs {[*y.shape[:-1], 1]}, one per row of y")
    out = [*y.shape[:-1], y.shape[-1] // 2 if gated else y.shape[-1]]
    if g is not None and list(g.shape) != out:
        raise ValueError(f"g has shape {list(g.shape)}; needs {out}, the shape of the activation's output")


def activation(
    y: Tensor, kind: str = "swiglu", weights: Tensor | None = None, alpha: float = 1.702, linear_offset: float = 0.0,
    clamp_value: float | None = None, fp8_input_store: bool = False, *, beta: float = 1.0,
    linear_beta: float | None = None,
) -> Tensor:
    """act(a)·(b + linear_offset)·weights for y = [a, b] [.., 2F] -> [.., F] in y.dtype; weights [.., 1] of any dtype.

    "swiglu": act is SiLU (arXiv 2002.05202); "geglu": tanh GELU; "quick_geglu": a·sigmoid(alpha·a);
    "situ": beta·tanh(a/beta)·sigmoid(a), where b becomes linear_beta·tanh(b/linear_beta) if that is given. Not gated:
    "relu2", relu(y)² on y [.., F] (arXiv 2109.08668). clamp_value v first clamps a <= v and -v <= b <= v. Arithmetic
    in fp32 at least, rounded once. For the backward only y and weights are kept; with fp8_input_store y as fp8 e4m3,
    clamped to ±448 (the forward still uses the unrounded y).
    """
    constants = _constants(kind, alpha, linear_offset, clamp_value, beta, linear_beta)
    _check_activation(y, weights, constants)
    return _Activation.apply(y, weights, constants, fp8_input_store)


def activation_back(
    g: Tensor, y: Tensor, kind: str = "swiglu", weights: Tensor | None = None, alpha: float = 1.702,
    linear_offset: float = 0.0, clamp_value: float | None = None, *, beta: float = 1.0, linear_beta: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gradient of `activation`, given g [.., F]: grad_y in y.dtype; with weights (grad_y, grad_weights [.., 1] in
    weights.dtype, summed over F in fp32 at least). At the clamp's bound the gradient passes, as torch.clamp's does."""
    constants = _constants(kind, alpha, linear_offset, clamp_value, beta, linear_beta)
    _check_activation(y, weights, constants, g)
    grad_y, grad_weights, _ = _activate_back(g, y, weights, constants)
    return grad_y if weights is None else (grad_y, grad_weights.to(weights.dtype))


def swiglu(y: Tensor) -> Tensor:
    """silu(a)·b for y = [a, b] [.., 2F] -> [.., F]."""
    return activation(y)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """silu(a)·b·weights, weights [.., 1]; in y.dtype whatever the weights' dtype."""
    return activation(y, weights=weights)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient of swiglu to y [.., 2F], given g [.., F]."""
    return activation_back(g, y)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weighted_swiglu: (grad_y [.., 2F] in y.dtype, grad_weights [.., 1] in weights.dtype)."""
    return activation_back(g, y, weights=weights)


# ---- Grouped matrix product: row block e times weight e ----
# Both products take their rows as x [N, ..], or as tokens x [T, ..] with `token_N`, the token of each
# row, and gather them themselves. Off CUDA they are custom ops that loop over the experts and read the
# offsets on the host: an expert's rows are gathered just before its product, while they are in cache,
# and the compiler sees no gathered rows to save for the backward.

@functools.cache
def _slow_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU has no matrix instructions for dtype: its products then take 10 to 100 times those of fp32."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _mm(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b (+ bias), summed in fp32 at least, rounded once."""
    if a.device.type == "cpu" and _slow_on_cpu(a.dtype) and a.shape[0] > 1:
        product = a.float() @ b.float()
        out.copy_(product if bias is None else product.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _blocks(offsets: Tensor):
    """(expert, first row, end) of every expert."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, start, end
        start = end


def _rows_of(
    x: Tensor, token_N: Tensor | None, scale: Tensor | None, start: int = 0, end: int | None = None,
) -> Tensor:
    """Rows start to end of x, or with `token_N` of the tokens they came from; times scale [N, 1]."""
    rows = x[start:end] if token_N is None else x.index_select(0, token_N[start:end])
    return rows if scale is None else (rows * scale[start:end]).to(x.dtype)


def _aligned(*operands: Tensor) -> bool:
    """Whether widths and strides are multiples of 16 bytes, as torch's grouped product needs them."""
    def fits(x):
        steps = [step for step in x.stride() if step != 1]
        return 0 not in steps and all(n * x.itemsize % 16 == 0 for n in (*x.shape[1:], *steps))
    return all(map(fits, operands))


def _loops_in_torch(x: Tensor, token_N: Tensor | None, experts: int) -> bool:
    """Whether torch's grouped product, which loops in C++ on a CPU, is faster than the loop here.

    It is where an expert has so few rows (64 KiB on average) that the cost of the Python loop shows.
    """
    rows = len(x if token_N is None else token_N)
    few = rows * x.shape[1] * x.itemsize <= experts * 2 ** 16
    fast = x.dtype != torch.float64 and not _slow_on_cpu(x.dtype)
    return x.device.type == "cpu" and few and fast and _aligned(x)


def _empty_product(x, token_N, scale, weights, bias, offsets):
    return x.new_empty((x if token_N is None else token_N).shape[0], weights.shape[2])


@_op(_empty_product, reads_on_host=True)
def _rows_times_weights(
    x: Tensor, token_N: Tensor | None, scale: Tensor | None, weights: Tensor, bias: Tensor | None,
    offsets: Tensor,
) -> Tensor:
    if bias is None and _loops_in_torch(x, token_N, len(weights)) and _aligned(weights):
        out = F.grouped_mm(_rows_of(x, token_N, scale), weights, offs=offsets)
        out[offsets[-1]:].zero_()
        return out
    out, end = _empty_product(x, token_N, scale, weights, bias, offsets), 0
    for e, start, end in _blocks(offsets):
        if start < end:
            rows = _rows_of(x, token_N, scale, start, end)
            _mm(rows, weights[e], out[start:end], None if bias is None else bias[e])
    out[end:].zero_()
    return out


def _empty_weight_grad(a, token_a, b, token_b, scale, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


@_op(_empty_weight_grad, reads_on_host=True)
def _rows_times_rows(
    a: Tensor, token_a: Tensor | None, b: Tensor, token_b: Tensor | None, scale: Tensor | None,
    offsets: Tensor,
) -> Tensor:
    if _loops_in_torch(a, token_a, len(offsets)) and _loops_in_torch(b, token_b, len(offsets)):
        rows_a = _rows_of(a, token_a, None)
        return F.grouped_mm(rows_a.t(), _rows_of(b, token_b, scale), offs=offsets)
    out = _empty_weight_grad(a, token_a, b, token_b, scale, offsets)
    for e, start, end in _blocks(offsets):
        rows_a = _rows_of(a, token_a, None, start, end)
        _mm(rows_a.t(), _rows_of(b, token_b, scale, start, end), out[e])                  # no rows: zeros
    return out


@torch.compiler.assume_constant_result
def _one_kernel_card(device: torch.device) -> bool:
    """Whether torch's grouped product reads the offsets on this card, not on the host."""
    return torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def _native(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes the operands, rows or matrices, as they are.

    It is for bf16 on CUDA, compute capability 9.0 and 10.0 (H100, H200, B200), with widths and strides
    in multiples of 16 bytes. Elsewhere it would copy the offsets to the host.
    """
    on_cuda = all(x.is_cuda and x.dtype == torch.bfloat16 for x in operands)
    return on_cuda and _aligned(*operands) and _one_kernel_card(operands[0].device)


def _zero_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows at or beyond offsets[-1] as zeros: torch's grouped product leaves them uninitialised."""
    row_N = torch.arange(rows.shape[0], device=rows.device)
    return rows.masked_fill((row_N >= offsets[-1])[:, None], 0.0)


def _all_rows_of(x: Tensor, token_N: Tensor | None, scale: Tensor | None, offsets: Tensor) -> Tensor:
    return _zero_tail(_rows_of(x, token_N, scale), offsets)


def _product(x, token_N, scale, weights, bias, offsets) -> Tensor:
    """Row block e · weights[e] + bias[e] -> [N, O]: weights [E, I, O], bias [E, O] or None."""
    if not _native(x, weights):
        return _rows_times_weights(x, token_N, scale, weights, bias, offsets)
    rows = _all_rows_of(x, token_N, scale, offsets)
    out = F.grouped_mm(rows, weights, offs=offsets)
    if bias is not None:
        row_N = torch.arange(rows.shape[0], device=x.device)
        out = out + bias[torch.bucketize(row_N, offsets, right=True).clamp(max=len(offsets) - 1)]
    return _zero_tail(out, offsets)


def _weight_grad(a, token_a, b, token_b, scale, offsets) -> Tensor:
    """(Row block e of a)ᵀ · row block e of b -> [E, A, B]; `scale` [N, 1] multiplies the rows of b."""
    if not _native(a, b):
        return _rows_times_rows(a, token_a, b, token_b, scale, offsets)
    rows_a, rows_b = _all_rows_of(a, token_a, None, offsets), _all_rows_of(b, token_b, scale, offsets)
    return F.grouped_mm(rows_a.t(), rows_b, offs=offsets)


def _bias_grad(a, token_N, scale, offsets) -> Tensor:
    """Σ over the rows of block e, times scale [N, 1] -> [E, A]: a product with one column, padded to 8."""
    return _weight_grad(a, token_N, F.pad(scale.to(a.dtype), (0, 7)), None, None, offsets)[:, :, 0]


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, offsets):
        ctx.save_for_backward(rows, weights, offsets)
        return _product(rows, None, None, weights, None, offsets)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, offsets = ctx.saved_tensors
        grad, grad_rows, grad_weights = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(grad, None, None, weights.transpose(1, 2), None, offsets)
        if ctx.needs_input_grad[1]:
            grad_weights = _weight_grad(rows, None, grad, None, None, offsets)
        return grad_rows, grad_weights, None


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, H], weights [E, H, F] of one dtype, offsets [E] int32 (ends of the row blocks, ascending) -> [N, F].

    Row block e times weights[e]. Rows at or beyond offsets[-1] come out as zeros and get zero gradients; an expert
    without rows gets a zero weight gradient. The dtype is the inputs', also under autocast. On CUDA in bf16, with H and
    F multiples of 8, it is torch.nn.functional.grouped_mm; elsewhere a loop whose offsets are read on the host, which
    syncs on CUDA. That the offsets ascend and end within N is not checked: that would sync too.
    """
    E = offsets.shape[0]
    if rows.ndim != 2 or weights.ndim != 3 or offsets.shape != (E,) or weights.shape[:2] != (E, rows.shape[1]):
        raise ValueError(f"rows {list(rows.shape)}, weights {list(weights.shape)} and offsets {list(offsets.shape)} need "
                         f"shapes [N, H], [E, H, F] and [E]")
    if rows.dtype != weights.dtype or offsets.dtype != torch.int32:
        raise TypeError(f"rows is {rows.dtype}, weights {weights.dtype} and offsets {offsets.dtype}; needs one dtype for "
                        f"rows and weights, and torch.int32 offsets")
    return _GroupedMM.apply(rows, weights, offsets)


# ---- Experts: gather, fc1, activation, fc2, combine, with a backward that keeps only fc1's output ----

def _project(tokens: Tensor, down: Tensor | None) -> Tensor:
    """tokens [T, H] · down [ℓ, H]ᵀ, the experts' latent space; without `down` the tokens."""
    if down is None:
        return tokens
    with without_autocast(tokens):
        return tokens @ down.t()


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, down, probs, fc1, fc2, fc1_bias, fc2_bias, order, inverse, offsets, probs_on, constants,
                fp8_input_store):
        token_N, probs_N1 = order // inverse.shape[1], probs.flatten().index_select(0, order)[:, None]
        scale, weights, outer = ((probs_N1, None, None) if probs_on == "input" else
                                 (None, probs_N1, None) if probs_on == "activation" else (None, None, probs))
        latent = _project(tokens, down)
        hidden = _product(latent, token_N, scale, fc1.transpose(1, 2), fc1_bias, offsets)
        value = _weighted(_value(hidden, constants), weights, hidden.dtype)
        rows_NH = _product(value, None, None, fc2.transpose(1, 2), fc2_bias, offsets)
        hidden = _to_fp8(hidden) if fp8_input_store else hidden
        ctx.save_for_backward(tokens, down, probs, fc1, fc2, fc1_bias, fc2_bias, hidden, order, inverse, offsets)
        ctx.probs_on, ctx.constants = probs_on, constants
        return _sum_rows(rows_NH, inverse, None, outer)

    @staticmethod
    def backward(ctx, grad):
        tokens, down, probs, fc1, fc2, fc1_bias, fc2_bias, hidden, order, inverse, offsets = ctx.saved_tensors
        need_tokens, need_down, need_probs, need_fc1, need_fc2, need_fc1_bias, need_fc2_bias = ctx.needs_input_grad[:7]
        need_latent = need_tokens or need_down
        on_input, grad = ctx.probs_on == "input", grad.contiguous()
        # what is made of these depends on grad, so the compiler cannot keep it from the forward
        order = value_in_backward(order, grad)
        token_N, probs_N1 = order // inverse.shape[1], probs.flatten().index_select(0, order)[:, None]
        hidden = hidden.to(grad.dtype)
        if on_input:
            hidden = value_in_backward(hidden, grad)
        # fc2 is linear, so probs behind it and probs before it have one backward, and neither needs fc2's output
        scale, weights = (probs_N1, None) if on_input else (None, probs_N1)
        grad_tokens = grad_down = grad_probs = grad_fc1 = grad_fc2 = grad_fc1_bias = grad_fc2_bias = None
        latent = tokens
        if down is not None and (need_fc1 or need_probs and on_input):
            latent = _project(value_in_backward(tokens, grad), down)

        if need_latent or need_probs or need_fc1 or need_fc1_bias:
            grad_act = _product(grad, token_N, None, fc2, None, offsets)
            grad_hidden, grad_weights, value = _activate_back(grad_act, hidden, weights, ctx.constants)
        elif need_fc2:
            value = _value(hidden, ctx.constants)
        if need_fc2:
            value = _weighted(value, weights, hidden.dtype)
            grad_fc2 = _weight_grad(grad, token_N, value, None, None, offsets)
        if need_fc1:
            grad_fc1 = _weight_grad(grad_hidden, None, latent, token_N, scale, offsets)
        if need_latent or need_probs and on_input:
            grad_rows = _product(grad_hidden, None, None, fc1, None, offsets)
        if need_latent:
            grad_latent = _sum_rows(grad_rows, inverse, None, probs if on_input else None)
            grad_tokens, grad_down = grad_latent, None
            if down is not None:
                grad_tokens = grad_latent @ down if need_tokens else None
                grad_down = grad_latent.t() @ tokens if need_down else None

        ones_N1 = torch.ones_like(probs_N1)
        if need_fc1_bias:
            grad_fc1_bias = _bias_grad(grad_hidden, None, ones_N1, offsets)
        if need_fc2_bias:
            grad_fc2_bias = _bias_grad(grad, token_N, ones_N1 if on_input else weights, offsets)
        if need_probs:
            grad_probs = _dot_rows(grad_rows, inverse, latent) if on_input else grad_weights.flatten()[inverse]
            if fc2_bias is not None and not on_input:
                expert_TK = _expert_of(inverse, offsets).clamp(max=len(offsets) - 1)
                grad_probs = grad_probs + _dot_rows(fc2_bias, expert_TK, grad)
            grad_probs = grad_probs.masked_fill(inverse >= offsets[-1], 0.0).to(probs.dtype)
        return (grad_tokens, grad_down, grad_probs, grad_fc1, grad_fc2, grad_fc1_bias, grad_fc2_bias,
                None, None, None, None, None, None)


def expert_mlp(
    tokens: Tensor, probs: Tensor, plan: Permutation, fc1: Tensor, fc2: Tensor, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, probs_on: str = "activation", kind: str = "swiglu", alpha: float = 1.702,
    linear_offset: float = 0.0, clamp_value: float | None = None, fp8_input_store: bool = False, *, beta: float = 1.0,
    linear_beta: float | None = None, down: Tensor | None = None,
) -> Tensor:
    """y_t = Σ_k p_tk · expert_{i_tk}(x_t), expert_e(x) = fc2[e] · activation(fc1[e] · x + fc1_bias[e]) + fc2_bias[e].

    tokens [T, H], probs [T, K], plan of the indices [T, K], fc1 [E, P, F, H] (P = 2: gate, up; 1 for relu2), fc2
    [E, H, F], fc1_bias [E, P, F], fc2_bias [E, H] -> [T, H]; tokens and weights of one dtype, probs of any.
    down [ℓ, H]: the experts are of width ℓ, fc1 [E, P, F, ℓ] and fc2 [E, ℓ, F], take x·downᵀ and give [T, ℓ].
    probs_on: where p is applied. "activation", between the products, and "output", behind them, differ in rounding
      only; "input" is expert(p·x), another function.
    fc1 and fc2 may be views with any strides, gate and up interleaved in memory too: no weight is copied.
    Kept for the backward: the arguments and fc1's output [N, P·F] (as fp8 e4m3 with fp8_input_store). ValueError and
    TypeError for shapes and dtypes that do not fit.
    """
    _check_known("probs_on", probs_on, ("input", "activation", "output"))
    constants = _constants(kind, alpha, linear_offset, clamp_value, beta, linear_beta)
    if tokens.ndim != 2 or fc1.ndim != 4:
        raise ValueError(f"tokens {list(tokens.shape)} and fc1 {list(fc1.shape)} need shapes [T, H] and [E, P, F, H]")
    (E, P, F_, H), parts = fc1.shape, 2 if ACTIVATIONS[kind].gated else 1
    if down is not None and (down.ndim != 2 or down.shape[1] != tokens.shape[1]):
        raise ValueError(f"down has shape {list(down.shape)}; needs [latent, {tokens.shape[1]}]")
    width = tokens.shape[1] if down is None else down.shape[0]
    if P != parts or fc2.shape != (E, H, F_) or width != H or plan.counts.shape != (E,):
        raise ValueError(f"tokens {list(tokens.shape)}, fc1 {list(fc1.shape)} and fc2 {list(fc2.shape)} need shapes [T, H], "
                         f"[E, {parts}, F, H] and [E, H, F] for {kind} and a plan of {plan.counts.shape[0]} experts")
    for name, bias, shape in (("fc1_bias", fc1_bias, (E, P, F_)), ("fc2_bias", fc2_bias, (E, H))):
        if bias is not None and bias.shape != shape:
            raise ValueError(f"{name} has shape {list(bias.shape)}; needs {list(shape)}")
        if bias is not None and bias.dtype != tokens.dtype:
            raise TypeError(f"{name} is {bias.dtype} and tokens {tokens.dtype}; they need one dtype")
    if tokens.shape[0] != plan.inverse.shape[0] or probs.shape != plan.inverse.shape:
        raise ValueError(f"tokens {list(tokens.shape)} and probs {list(probs.shape)} need shapes [T, H] and [T, K] = "
                         f"{list(plan.inverse.shape)}, as the plan")
    if not tokens.dtype == fc1.dtype == fc2.dtype:
        raise TypeError(f"tokens is {tokens.dtype}, fc1 {fc1.dtype} and fc2 {fc2.dtype}; they need one dtype")
    if probs_on == "activation" and fc2_bias is not None:
        probs_on = "output"                                           # p·(fc2·a + b): the bias wants the prob too
    if fc1.stride(1) < fc1.stride(2):                                 # gate and up of a row are neighbours
        constants, fc1 = constants._replace(interleaved=True), fc1.transpose(1, 2)
        fc1_bias = None if fc1_bias is None else fc1_bias.transpose(1, 2)
    return _ExpertMLP.apply(
        tokens, down, probs, fc1.flatten(1, 2), fc2, None if fc1_bias is None else fc1_bias.flatten(1), fc2_bias,
        plan.order, plan.inverse, plan.offsets, probs_on, constants, fp8_input_store)


class _LatentUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, up, norm, eps):
        ctx.save_for_backward(rows, up, norm)
        ctx.eps = eps
        return _normalised(rows, norm, eps)[0] @ up.t()

    @staticmethod
    def backward(ctx, grad):
        rows, up, norm = ctx.saved_tensors
        rows, grad_rows, grad_up, grad_norm = value_in_backward(rows, grad), None, None, None
        normed, unit, scale = _normalised(rows, norm, ctx.eps)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            grad_normed = grad @ up
        if ctx.needs_input_grad[1]:
            grad_up = grad.t() @ normed
        if ctx.needs_input_grad[2]:
            grad_norm = _sum_tokens(grad_normed * unit).to(norm.dtype)
        if ctx.needs_input_grad[0]:
            grad_unit = _upcast(grad_normed) * norm
            grad_rows = scale * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
            grad_rows = grad_rows.to(rows.dtype)
        # rows, up, norm, eps
        return grad_rows, grad_up, grad_norm, None


def _normalised(rows: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(unit · norm in rows.dtype, unit, scale): unit = rows · scale has a mean square of 1."""
    wide = _upcast(rows)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = wide * scale
    return (unit * norm).to(rows.dtype), unit, scale


def latent_up(rows: Tensor, up: Tensor, norm: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """rows [T, ℓ] -> rows · upᵀ [T, H], up [H, ℓ]; with norm [ℓ] after an RMSNorm, in fp32 at least
    (arXiv 1910.07467). Keeps rows alone for the backward."""
    if norm is None:
        return F.linear(rows, up)
    with without_autocast(rows):
        return _LatentUp.apply(rows, up, norm, guard_scalar(eps))


# An op: of an upcast in the graph, the compiler would keep the copy for the backward.
@_op(lambda a, b, dtype, out_dtype: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype))
def _product_in(a: Tensor, b: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) @ b.to(dtype)).to(out_dtype)


class _Gating(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, bias, dtype):
        ctx.save_for_backward(tokens, weight)
        ctx.dtype, ctx.bias_dtype = dtype, None if bias is None else bias.dtype
        with without_autocast(tokens):
            logits = tokens.to(dtype) @ weight.to(dtype).t()
            return logits if bias is None else logits + bias.to(dtype)

    @staticmethod
    def backward(ctx, grad):
        tokens, weight = ctx.saved_tensors
        grad_TE, grad_tokens, grad_weight, grad_bias = grad.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            grad_tokens = _product_in(grad_TE, weight, ctx.dtype, tokens.dtype).view_as(tokens)
        if ctx.needs_input_grad[1]:
            grad_weight = _product_in(grad_TE.t(), tokens.flatten(0, -2), ctx.dtype, weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _sum_tokens(grad_TE).to(ctx.bias_dtype)
        # tokens, weight, bias, dtype
        return grad_tokens, grad_weight, grad_bias, None


def router_gating_linear(tokens: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """logits [.., E] = tokens [.., H] · weight [E, H]ᵀ + bias [E], computed in and returned as router_dtype whatever the
    operands' dtypes and autocast say; the gradients come back in the operands' dtypes. Keeps the operands as they are
    for the backward, not their copies in router_dtype."""
    return _Gating.apply(tokens, weight, bias, router_dtype)
