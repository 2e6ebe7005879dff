"""Mixture-of-Experts as plain tensor functions: the definition, then gate, route, balance, permute,
activations, experts, in the order a token meets them. Open it for the mathematics.

Letters   S sequence length, B batch, T = S·B tokens (token t is s·B + b; with batch_first
          b·S + s), M rows that arrive at a rank, H hidden size, E experts, K experts per
          token, N = T·K assignments, F expert FFN size, P parts of fc1's output (2: gate and
          up), ℓ latent size, C expert capacity, G groups of experts. Capitals that end a name
          are the tensor's axes: rows_NH is [N, H], probs_N1 is [N, 1].
Words     logits: the router's raw output. scores: logits after the score function. probs:
          the factors that combine the experts' outputs. routing_map [T, E] bool and
          indices [T, K] int64: which experts each token goes to.
Unrouted  An assignment with index E: dropped, or of padding. It sorts after all experts, is
          never computed, adds nothing, and has gradient 0.
Masks     A padding_mask is bool; True means padding.
Autocast  is not followed: a product is in its operands' dtype, the router's in router_dtype.

No function keeps a state or knows the config. You may add to two tables, SCORE_FUNCTIONS and
ACTIVATIONS. Compiled, each function is one graph for the first T that it meets, forward and
backward. The second T makes another graph, which then serves every T from 2 on. On torch 2.13 to
2.15 a sort of more than 32,767 rows makes one more.
"""
import functools
import math
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if __package__:
    from . import compat, grouped
    from .compat import (
        always_holds, as_number, cast, check_known, check_one_dtype, check_shapes, exact_fp32,
        first_derivative_only, holds_in_this_graph, is_decoding, is_integer, op, take_rows, upcast)
else:
    import compat
    import grouped
    from compat import (
        always_holds, as_number, cast, check_known, check_one_dtype, check_shapes, exact_fp32,
        first_derivative_only, holds_in_this_graph, is_decoding, is_integer, op, take_rows, upcast)


# ---- The definition ----

def moe_loop(x: Tensor, router: Tensor, fc1: Tensor, fc2: Tensor, topk: int) -> Tensor:
    """What a Mixture-of-Experts layer computes (arXiv 1701.06538): each token goes to the `topk`
    experts with the highest logits, whose outputs are added with the weights softmax(those logits).

    x [T, H], router [E, H], fc1 [E, 2, F, H] (gate and up), fc2 [E, H, F] -> [T, H].

    >>> x, router, fc1 = torch.ones(1, 2), torch.eye(3, 2), torch.ones(3, 2, 4, 2)
    >>> moe_loop(x, router, fc1, torch.ones(3, 2, 4), topk=2)
    tensor([[14.0928, 14.0928]])
    """
    y = torch.zeros_like(x)
    for t, token in enumerate(x):
        logits, experts = (router @ token).topk(topk)
        for p, e in zip(logits.softmax(0), experts):
            gate, up = fc1[e] @ token
            y[t] += p * (fc2[e] @ (F.silu(gate) * up))
    return y


# ---- Gate: tokens -> logits ----

def sum_tokens(x):
    """x [T, columns] -> [columns], in x.dtype."""
    # In one sum the compiler would add row after row on a CPU (4e-6 off over 8,192 tokens, in three
    # levels 2e-7), and make one more graph above 4,096 tokens.
    for _ in range(2):
        blocks = x.shape[0] // 64 + 2            # at least 2: one would have a graph of its own
        # With a view in place of unfold an export would hold only for some T.
        x = F.pad(x, (0, 0, 0, blocks * 64 - x.shape[0])).unfold(0, 64, 64).sum(-1)
    return x.sum(0)


def takes_bf16(a, b):
    """Whether a product with fp32 sums takes both operands as they are, in bf16: on NVIDIA's cards.
    """
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and torch.version.hip is None


def multiply_bf16(a, b, out_dtype):
    """a · b with fp32 sums, rounded once, for operands that takes_bf16. For bodies of ops."""
    if out_dtype == torch.float32:
        return torch.mm(a, b, out_dtype=out_dtype)
    setting = torch.backends.cuda.matmul
    reduced = setting.allow_bf16_reduced_precision_reduction         # partial sums in bf16
    if reduced:
        setting.allow_bf16_reduced_precision_reduction = False
    try:
        return torch.mm(a, b)
    finally:
        if reduced:
            setting.allow_bf16_reduced_precision_reduction = True


def in_bf16_parts(x):
    """x [T, E] in fp32 -> [T, 3·E] in bf16: three parts that add up to x, to the last bit."""
    parts = []
    for _ in range(3):
        # The first 8 of 24 bits, by a mask: in a graph a cast to bf16 and back need not round.
        part = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(part.bfloat16())
        x = x - part
    return torch.cat(parts, 1)


# It is an op because of exact_fp32, which a graph cannot enter. From plain code a graph would also
# make the backward's fp32 copies of the operands already in the forward, and keep them.
@op(lambda a, b, dtype, out_dtype, *_:
     a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype),
    flops=lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1])
@exact_fp32()
def _product_in(
    a: Tensor, b: Tensor, dtype: torch.dtype, out_dtype: torch.dtype, bias: Tensor | None = None,
) -> Tensor:
    """a · b + bias, computed in dtype and returned in out_dtype."""
    if dtype == torch.float32 and takes_bf16(a, b):
        product = multiply_bf16(a, b, out_dtype=out_dtype if bias is None else dtype)
    else:
        product = a.to(dtype) @ b.to(dtype)
    if bias is not None:
        product += bias.to(dtype)
    return product.to(out_dtype)


def _weight_grad(grad, x, dtype, out_dtype):
    """gradᵀ [E, T] · x [T, H], computed in dtype, without a copy of x in that dtype."""
    if dtype == grad.dtype == torch.float32 and takes_bf16(x, x):
        sums = _product_in(in_bf16_parts(grad).t(), x, dtype=dtype, out_dtype=dtype)
        return sums.view(3, grad.shape[1], x.shape[1]).sum(0).to(out_dtype)
    return _product_in(grad.t(), x, dtype=dtype, out_dtype=out_dtype)


class _LinearIn(torch.autograd.Function):
    """tokens [.., H] · weightᵀ + bias -> [T, E], computed and returned in dtype."""

    @staticmethod
    def forward(ctx, dtype, tokens, weight, bias):
        ctx.save_for_backward(tokens, weight)        # tokens_TH may be a copy
        ctx.dtype = dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        tokens_TH = tokens.reshape(-1, tokens.shape[-1])
        if bias is None:
            return _product_in(tokens_TH, weight.t(), dtype=dtype, out_dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        if wide != dtype:
            tokens_TH, weight = tokens_TH.to(dtype), weight.to(dtype)
        # Rounded to dtype once, behind the bias
        return _product_in(tokens_TH, weight.t(), dtype=wide, out_dtype=dtype, bias=bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        tokens, weight = ctx.saved_tensors
        _, need_tokens, need_weight, need_bias = ctx.needs_input_grad
        grad_tokens = grad_weight = grad_bias = None
        # grad_tokens = grad · weight, grad_weight = gradᵀ · tokens, grad_bias = Σ_t grad
        if need_weight:
            tokens_TH = tokens.reshape(-1, tokens.shape[-1])
            grad_weight = _weight_grad(
                grad, tokens_TH, dtype=ctx.dtype, out_dtype=weight.dtype)
        if need_tokens:
            parts = grad
            if ctx.dtype == torch.float32 and takes_bf16(tokens, weight):
                parts, weight = in_bf16_parts(grad), weight.repeat(3, 1)
            grad_TH = _product_in(parts, weight, dtype=ctx.dtype, out_dtype=tokens.dtype)
            grad_tokens = grad_TH.view(tokens.shape)
        if need_bias:
            grad_bias = sum_tokens(upcast(grad)).to(ctx.bias_dtype)
        # dtype, tokens, weight, bias
        return None, grad_tokens, grad_weight, grad_bias


def router_gating_linear(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype,
) -> Tensor:
    """logits [.., E] = tokens [.., H] · weight [E, H]ᵀ + bias [E].

    The product is in router_dtype, whatever the operands' dtypes, autocast and
    torch.set_float32_matmul_precision are. It is rounded once, after the bias is added. Gradients
    have the operands' dtypes. For the backward the operands are kept, and no copies of them.

    >>> tokens, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4)
    >>> router_gating_linear(tokens, weight, bias=None, router_dtype=torch.float32)
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    if _is_one_token(tokens) and router_dtype.itemsize >= 4:
        # The compiler writes the product: a call of an op, and its copy of the weight in fp32, take
        # longer than that.
        token_1H = tokens.view(1, -1)
        check_shapes(tokens=(token_1H, "T H"), weight=(weight, "E H"))
        logits_TE = (token_1H.to(router_dtype) * weight.to(router_dtype)).sum(-1)[None]
        if bias is not None:
            logits_TE = logits_TE + bias.to(router_dtype)
    else:
        logits_TE = _LinearIn.apply(router_dtype, tokens, weight, bias)
    return logits_TE.view(*tokens.shape[:-1], weight.shape[0])


def _is_one_token(tokens):
    """Whether this is a graph without gradients for one token, which is a graph of its own."""
    return is_decoding() and holds_in_this_graph(math.prod(tokens.shape[:-1]) == 1)


# ---- Route: logits -> which experts, with which probs ----

def scatter_columns(values: Tensor, indices: Tensor, columns: int, fill: int = 0) -> Tensor:
    """[T, columns] of `fill`, with values[t, k] in column indices[t, k]. An index that is no column
    is left out. If a row names a column more than once, the last value counts.
    """
    # A scatter would do, but Inductor's may be read too early on a CPU (pytorch #185509).
    column_E = torch.arange(columns, device=indices.device)
    out = values.new_full((values.shape[0], columns), fill)
    for index_T1, value_T1 in zip(indices.split(1, dim=1), values.split(1, dim=1)):
        out = torch.where(index_T1 == column_E, value_T1, out)
    return out


def _gather_columns(values, indices):
    """[T, K]: values[t, indices[t, k]]; 0 for the index after the last column."""
    return F.pad(values, (0, 1)).gather(1, indices)


def _sum_columns(values, indices, columns):
    """scatter_columns, but a column that a row names more than once gets the sum."""
    column_E = torch.arange(columns, device=indices.device)
    sums = 0.0
    for index_T1, value_T1 in zip(indices.split(1, dim=1), upcast(values).split(1, dim=1)):
        sums = sums + torch.where(index_T1 == column_E, value_T1, 0.0)
    return cast(sums, values.dtype)


class WithGradient(torch.autograd.Function):
    """Returns value. The gradient of x is back(grad, *tensors)."""

    @staticmethod
    def forward(ctx, value, x, back, *tensors):
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return compat.as_no_view(value, value.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        tensors = ctx.saved_tensors      # once: under a checkpoint a second read fails
        # value, x, back, *tensors
        return None, ctx.back(grad, *tensors), None, *[None] * len(tensors)


def with_gradient(x, function, back, *tensors):
    """function(x, *tensors), whose gradient is back(grad, *tensors)."""
    # The function is called outside of WithGradient: in a graph of torch 2.11 a checkpoint does not
    # compute again what is inside an autograd function.
    return WithGradient.apply(function(x.detach(), *tensors), x, back, *tensors)


def straight_through(value, gradient_of):
    """value, whose gradient becomes that of another tensor of its shape."""
    return WithGradient.apply(value, gradient_of, lambda grad: grad)


def pick(scores: Tensor, indices: Tensor) -> Tensor:
    """scores [T, E] -> [T, K]: scores[t, indices[t, k]]; 0 for index E."""
    back = functools.partial(scatter_columns, columns=scores.shape[1])
    return with_gradient(scores, _gather_columns, back, indices)


def _map_of(indices, num_experts):
    """indices [T, K] -> routing_map [T, E] bool."""
    return scatter_columns(torch.ones_like(indices, dtype=torch.bool), indices, num_experts)


def routing_to_map(probs: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(probs [T, K], indices [T, K]) -> (probs [T, E], routing_map [T, E] bool), without index E.

    >>> routing_to_map(torch.tensor([[0.7, 0.3]]), torch.tensor([[2, 0]]), num_experts=3)
    (tensor([[0.3000, 0.0000, 0.7000]]), tensor([[ True, False,  True]]))
    """
    check_shapes(probs=(probs, "T K"), indices=(indices, "T K"))
    to_map = functools.partial(scatter_columns, columns=num_experts)
    probs_TE = with_gradient(probs, to_map, _gather_columns, indices)
    return probs_TE, _map_of(indices, num_experts)


def merge_repeats(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(indices, copies), both [T, K] int64, of indices [T, K] in [0, E] of any integer dtype.

    If a token names an expert more than once, the expert keeps its first slot, and its other slots
    become E. `copies` is how often the token names each slot's expert: 0 for E.

    >>> merge_repeats(torch.tensor([[1, 0, 1]]), num_experts=2)
    (tensor([[1, 0, 2]]), tensor([[2, 1, 0]]))
    """
    indices_TK = indices.long()
    same_TKK = indices_TK[:, :, None] == indices_TK[:, None, :]
    repeats_TK = same_TKK.tril(-1).any(-1)               # equal to an earlier slot
    indices_TK = indices_TK.masked_fill(repeats_TK, num_experts)
    return indices_TK, same_TKK.sum(-1).masked_fill(indices_TK == num_experts, 0)


def _sqrtsoftplus(x):
    # Below -87 softplus underflows to 0, where the root's gradient is 0 / 0. Clamped it is 0.
    tiny = torch.finfo(x.dtype).tiny
    return F.softplus(x, threshold=40.0).clamp(min=tiny).sqrt()


# Each must be increasing, so that logits and scores have the same top K, and must not be negative,
# since scores are divided by their sum.
SCORE_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": functools.partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


def _what_sums_to_1(score_function, topk, use_pre_softmax, norm_topk_prob):
    """How a token's K probs are normalised: "softmax", "sum" or None. See topk_routing, step 3."""
    if norm_topk_prob is not None:
        return "sum" if norm_topk_prob else None
    if score_function == "softmax":
        return None if use_pre_softmax else "softmax"
    return "sum" if topk > 1 else None


def topk_routing(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None,
    score_function: str = "softmax", expert_bias: Tensor | None = None,
    precomputed_indices: Tensor | None = None, norm_topk_prob: bool | None = None,
    norm_eps: float = 1e-20, group_score_topk: int | None = None,
    probs_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The K experts of every token and their probs, from logits [T, E].

    1. The scores are softmax over E, sigmoid, or sqrt(softplus) of the logits, in fp32 at least.
    2. The choice, best first, is the top K of the logits, which order experts as the scores do.
       With `expert_bias` [E] it is the top K of scores + bias (arXiv 2408.15664). With
       `num_groups` it comes from the best `group_topk` groups: see only_best_groups.
       `precomputed_indices` [T, K] in [0, E], of any integer dtype, replaces the choice. An
       expert named again counts once, in its first slot, with the sum of both probs. The range
       is not checked: that would sync the device.
    3. The probs are the chosen experts' scores, without the bias. `norm_topk_prob` says whether
       they are divided by (their sum + norm_eps); use_pre_softmax then has no effect. With
       norm_topk_prob None, Megatron's convention holds:

       - softmax without use_pre_softmax: a softmax over the chosen logits
       - softmax with use_pre_softmax: not normalised
       - sigmoid and sqrtsoftplus: normalised if K > 1

    4. The probs are multiplied by `scaling_factor`.

    Returns (probs [T, K], indices [T, K] int64). The probs have the dtype of the logits, and the
    arithmetic is in fp32 at least. With probs_dtype the probs have that dtype, and the arithmetic
    is in the wider of the two dtypes. If both are bf16, or both fp16, every step is rounded to that
    dtype, in a graph too, and the choice is the top K of the rounded scores. ValueError: an unknown
    score function, or sizes that do not fit.

    >>> logits = torch.tensor([[2.0, 0.0, 2.0], [0.0, 1.0, -9.0]])
    >>> probs, indices = topk_routing(logits, topk=1, use_pre_softmax=True)
    >>> indices.tolist(), probs[1].item()
    ([[0], [1]], 0.7310...)
    """
    check_known("score_function", score_function, SCORE_FUNCTIONS)
    check_shapes(
        {"K": topk}, logits=(logits, "T E"), expert_bias=(expert_bias, "E"),
        precomputed_indices=(precomputed_indices, "T K"))
    E = logits.shape[1]
    if not 1 <= topk <= E:
        raise ValueError(f"topk is {topk}; needs 1 <= topk <= num_experts = {E}")
    if (num_groups is None) != (group_topk is None):
        raise ValueError(f"num_groups = {num_groups} and group_topk = {group_topk} go together: "
                         f"give both or neither")
    if precomputed_indices is not None and not is_integer(precomputed_indices):
        raise TypeError(f"precomputed_indices is {precomputed_indices.dtype}; "
                        f"needs an integer dtype")
    if precomputed_indices is None and num_groups is not None:
        group_score_topk = check_groups(
            topk, E, num_groups=num_groups, group_topk=group_topk,
            group_score_topk=group_score_topk)

    # The choice, which has no gradient
    arithmetic = torch.promote_types(logits.dtype, probs_dtype or torch.float32)
    logits_TE = cast(logits, arithmetic)
    narrow = arithmetic.itemsize < 4
    copies_TK = None
    if precomputed_indices is not None:
        indices_TK, copies_TK = merge_repeats(precomputed_indices, E)
    else:
        ranked_TE = logits_TE.detach()
        if narrow:
            ranked_TE = _rounded_probs(
                ranked_TE, indices=None, copies=None, score_function=score_function,
                normalised=None, norm_eps=0.0, scaling_factor=None)
        elif expert_bias is not None or num_groups is not None:
            ranked_TE = SCORE_FUNCTIONS[score_function](ranked_TE)
        if expert_bias is not None:
            ranked_TE = ranked_TE + expert_bias
        if num_groups is not None:
            ranked_TE = only_best_groups(ranked_TE, num_groups, group_topk, group_score_topk)
        indices_TK = ranked_TE.topk(topk, dim=1).indices

    # Its probs
    normalised = _what_sums_to_1(score_function, topk, use_pre_softmax, norm_topk_prob)
    steps = score_function, normalised, norm_eps, scaling_factor
    probs_TK = _probs_of_chosen(logits_TE, indices_TK, copies_TK, *steps)
    if narrow and torch.compiler.is_compiling():
        # The op gives the rounded values; the steps above, which autograd can see, the gradient.
        rounded_TK = _rounded_probs(logits_TE.detach(), indices_TK, copies_TK, *steps)
        probs_TK = straight_through(rounded_TK, gradient_of=probs_TK)
    return probs_TK.to(probs_dtype or logits.dtype), indices_TK


def _probs_of_chosen(
    logits_TE, indices_TK, copies_TK, score_function, normalised, norm_eps, scaling_factor,
):
    """Steps 3 and 4 of topk_routing, for all experts if indices_TK is None. An expert counts as
    often as copies_TK says, if given.
    """
    if normalised == "softmax":
        chosen_TK = pick(logits_TE, indices_TK)
        if copies_TK is not None:
            # n · exp(x) = exp(x + log n), with a finite log n for n = 0 too
            log_n = copies_TK.to(chosen_TK.dtype).log()
            chosen_TK = chosen_TK + log_n.clamp(min=torch.finfo(chosen_TK.dtype).min)
        probs_TK = chosen_TK.softmax(-1)
    else:
        probs_TK = SCORE_FUNCTIONS[score_function](logits_TE)
        if indices_TK is not None:
            probs_TK = pick(probs_TK, indices_TK)
        if copies_TK is not None:
            probs_TK = probs_TK * copies_TK
        if normalised == "sum":
            probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + norm_eps)
    if scaling_factor is not None:
        probs_TK = probs_TK * scaling_factor
    if copies_TK is not None:
        probs_TK = probs_TK.masked_fill(copies_TK == 0, 0.0)
    return probs_TK


# It is an op because the compiler would leave out the roundings between the steps.
@op(lambda logits, indices, *_: logits.new_empty((logits if indices is None else indices).shape))
def _rounded_probs(
    logits: Tensor, indices: Tensor | None, copies: Tensor | None, score_function: str,
    normalised: str | None, norm_eps: float, scaling_factor: float | None,
) -> Tensor:
    probs_TK = _probs_of_chosen(
        logits, indices, copies, score_function, normalised, norm_eps, scaling_factor)
    return probs_TK.contiguous()


def only_best_groups(scores, groups, best, members):
    """scores [T, E], -inf outside of each token's best groups. A group's score is the sum of its
    best members' scores (arXiv 2405.04434, 2412.19437).
    """
    T, E = scores.shape
    scores_TGe = scores.reshape(T, groups, E // groups)
    best_Tb = scores_TGe.topk(members).values.sum(-1).topk(best).indices
    group_G = torch.arange(groups, device=scores.device)
    kept_TG = (best_Tb[:, :, None] == group_G).any(1)
    return scores_TGe.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


def check_groups(
    topk: int, num_experts: int, num_groups: int, group_topk: int, group_score_topk: int | None,
) -> int:
    """group_score_topk, by default topk // group_topk. ValueError: sizes that do not fit."""
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups = {num_groups} does not divide num_experts = {num_experts}; "
                         f"groups need equal sizes")
    size = num_experts // num_groups
    if not 1 <= group_topk <= num_groups or group_topk * size < topk:
        raise ValueError(
            f"group_topk = {group_topk} of num_groups = {num_groups} groups of {size} experts "
            f"cannot hold topk = {topk}; "
            f"needs 1 <= group_topk <= num_groups and group_topk * {size} >= topk")
    if group_score_topk is None:
        group_score_topk = topk // group_topk
    if not 1 <= group_score_topk <= size:
        raise ValueError(
            f"group_score_topk is {group_score_topk} (topk // group_topk = {topk} // {group_topk} "
            f"unless given); set it to 1..{size}, a group has {size} experts")
    return group_score_topk


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(routing_map [T, E] bool, scores [T, E]) for the balance losses, from logits [T, E]: the top
    K of the logits, without bias and groups, and the scores in fp32 at least, divided by their sum
    over E. Both are zero at padding (padding_mask [T]).
    """
    check_known("score_function", score_function, SCORE_FUNCTIONS)
    check_shapes(logits=(logits, "T E"), padding_mask=(padding_mask, "T"))
    logits_TE = upcast(logits)
    scores_TE = SCORE_FUNCTIONS[score_function](logits_TE)
    if score_function != "softmax":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    map_TE = _map_of(logits_TE.topk(topk, dim=1).indices, logits_TE.shape[1])
    if padding_mask is not None:
        map_TE = map_TE & ~padding_mask[:, None]
        scores_TE = scores_TE.masked_fill(padding_mask[:, None], 0.0)
    return map_TE, scores_TE


# ---- Balance: losses, capacity, and the bias that needs no loss ----

def weighted_token_sum(
    scores: Tensor, factors: Tensor, sequence: Tensor | None = None,
) -> Tensor:
    """Σ_e factors[e] · Σ_t scores[t, e], 0-d. With sequence [T] int64 and factors [n, E]:
      Σ_t Σ_e factors[sequence[t], e] · scores[t, e].

    scores [T, E] are taken in fp32 at least. Factors get no gradient. The backward uses the factors
    of this forward, even if a checkpoint runs it again with other ones.
    """
    scores = upcast(scores)
    factors = factors.detach().to(scores.dtype)
    shape = scores.shape
    # Both functions below read the factors from here. As arguments they would be computed again by
    # a checkpoint.
    def add(x):
        if sequence is None:
            return (sum_tokens(x) * factors).sum()
        return sum_tokens(x * factors[sequence]).sum()

    def spread(grad):
        if sequence is None:
            return (grad * factors).expand(shape)
        return (grad * factors)[sequence]

    return with_gradient(scores, add, spread)


def switch_load_balancing_loss_func(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int,
    num_experts: int, moe_aux_loss_coeff: float | Tensor,
) -> Tensor:
    """coeff · E / (K·T²) · Σ_e n_e · Σ_t probs[t, e], 0-d (arXiv 2101.03961; global: 2501.11873).

    probs [T, E] are scores that sum to 1 per token. tokens_per_expert n [E] and total_num_tokens T,
    an int or a 0-d tensor, are counted over the same tokens: one batch, or the batches of all
    ranks. T counts as at least 1. With an even load the value is coeff.

    >>> even = torch.full((6, 3), 1 / 3)
    >>> switch_load_balancing_loss_func(even, torch.tensor([4, 4, 4]), total_num_tokens=6, topk=2,
    ...                                 num_experts=3, moe_aux_loss_coeff=0.5)
    tensor(0.5000)
    """
    check_shapes(
        {"E": num_experts}, probs=(probs, "T E"), tokens_per_expert=(tokens_per_expert, "E"))
    probs = upcast(probs)
    scale = moe_aux_loss_coeff * num_experts / topk
    T = total_num_tokens
    T = T.clamp(min=1) if isinstance(T, Tensor) else max(T, 1)
    return weighted_token_sum(probs, tokens_per_expert.to(probs.dtype) / T / T * scale)


def sequence_counts(routing_map: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """counts [n, E + 1] int64 of n sequences: each expert's tokens, then all tokens. routing_map
    [T, E] bool; sequence [T] int64 in [0, n), the sequence of each token.
    """
    counts = sequence.new_zeros(num_sequences, routing_map.shape[1] + 1)
    return counts.index_add(0, sequence, F.pad(routing_map.long(), (0, 1), value=1))


def switch_loss_of_sequences(
    probs: Tensor, counts: Tensor, sequence: Tensor, topk: int, moe_aux_loss_coeff: float,
) -> Tensor:
    """The switch loss of each sequence, averaged over those that have tokens (arXiv 2412.19437),
    0-d. Each sequence has its own counts (see sequence_counts) and its own T, both without padding.
    probs [T, E] sum to 1 per token.
    """
    probs = upcast(probs)
    counts_nE, length_n = counts[:, :-1], counts[:, -1]
    T_n1 = (counts_nE.sum(1, keepdim=True).to(probs.dtype) / topk).clamp(min=1)
    sequences = (length_n > 0).sum().clamp(min=1).to(probs.dtype)
    scale = moe_aux_loss_coeff * counts_nE.shape[1] / topk / sequences
    return weighted_token_sum(probs, counts_nE.to(probs.dtype) / T_n1 / T_n1 * scale, sequence)


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """coeff · the mean over valid tokens of logsumexp(logits[t])², 0-d (arXiv 2202.08906).

    logits [.., E], padding_mask [..].

    >>> z_loss_func(torch.zeros(5, 1), z_loss_coeff=0.1), z_loss_func(torch.ones(5, 1), 0.1)
    (tensor(0.), tensor(0.1000))
    """
    logits = upcast(logits)
    if padding_mask is None:
        padding_mask = torch.zeros_like(logits[..., 0], dtype=torch.bool)
    # The logits are masked too, since a NaN at padding would reach the gradient.
    lse = logits.masked_fill(padding_mask[..., None], 0.0).logsumexp(-1)
    lse = lse.masked_fill(padding_mask, 0.0)
    valid = (~padding_mask).sum().clamp(min=1).to(lse.dtype)
    return weighted_token_sum(lse.square().reshape(-1, 1), z_loss_coeff / valid)


@op(lambda cost, tol, padding_mask:
     torch.empty_like(cost, memory_format=torch.contiguous_format))
@exact_fp32()
def _sinkhorn(cost: Tensor, tol: float, padding_mask: Tensor | None) -> Tensor:
    T, E = cost.shape
    tokens = max(T, 1)
    A_TE = (cost - cost.amax(1, keepdim=True)).exp()
    if padding_mask is not None:
        A_TE = A_TE.masked_fill(padding_mask[:, None], 0.0)
        tokens = (~padding_mask).sum().clamp(min=1)

    start_E = A_TE.new_ones(E)
    for _ in range(256):
        d0_T = (1 / tokens) / (A_TE @ start_E + 1e-8)
        d1_E = (1 / E) / (d0_T @ A_TE + 1e-8)
        done = (d1_E - start_E).abs().mean() <= tol
        # On other devices a read of `done` would sync. So all 256 rounds run, and those that come
        # after `done` change nothing.
        if cost.device.type == "cpu" and done:
            break
        start_E = torch.where(done, start_E, d1_E)
    return (d1_E * A_TE * d0_T[:, None]).contiguous()


def sinkhorn(cost: Tensor, tol: float = 1e-4, padding_mask: Tensor | None = None) -> Tensor:
    """exp(cost) [T, E] with its rows scaled to sum to about 1/T and its columns to about 1/E.

      A = exp(cost - its row's maximum), d0 = (1/T) / (A·d1 + 1e-8), d1 = (1/E) / (Aᵀ·d0 + 1e-8)

    from d1 = 1, until the mean absolute change of d1 is at most tol, or for 256 rounds. The result
    is d1 · A · d0[:, None]: finite for costs up to ±1e4, without a gradient. Padding tokens
    (padding_mask [T]) get rows of 0, and the other rows are as if there were no padding.
    """
    check_shapes(cost=(cost, "T E"), padding_mask=(padding_mask, "T"))
    return _sinkhorn(upcast(cost.detach()), tol, padding_mask).to(cost.dtype)


def get_capacity(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None,
) -> int:
    """C = ceil(num_tokens / num_experts · capacity_factor), at least min_capacity. num_tokens
    counts assignments, T·K.

    >>> get_capacity(num_tokens=10, num_experts=4, capacity_factor=1.5)
    4
    """
    capacity = math.ceil(num_tokens / num_experts * as_number(capacity_factor))
    return max(capacity, min_capacity or 0)


def place_in_expert(indices: Tensor, probs: Tensor | None, num_experts: int) -> Tensor:
    """[T, K] int64: how many assignments of the same expert come before this one. With probs [T, K]
    the higher prob comes first, and of equal ones the earlier; without probs the earlier comes
    first. indices [T, K].

    >>> place_in_expert(torch.tensor([[0], [0], [1]]), torch.tensor([[0.2], [0.9], [0.5]]), 2)
    tensor([[1],
            [0],
            [0]])
    """
    ids_N = indices.flatten()
    if probs is None:
        sorted_N, order_N = _sort_by_expert(ids_N, num_experts)
    else:
        first_N = probs.flatten().argsort(descending=True, stable=True)
        sorted_N, order_N = _sort_by_expert(ids_N[first_N], num_experts)
        order_N = take_rows(first_N, order_N)
    start_E = F.pad(_ends(sorted_N, num_experts), (1, 0))            # index E too
    return (order_N.int().argsort() - start_E[ids_N]).view_as(indices)


def get_updated_expert_bias(
    tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float,
    tp_dp_cp_group=None,
) -> Tensor:
    """bias + rate · sign(mean(n) - n): up for experts with too few tokens (arXiv 2408.15664).

    tokens_per_expert n [.., E], whole numbers of any dtype, is first summed over `tp_dp_cp_group`,
    in a copy. The result has expert_bias.dtype. That should be fp32: bf16 loses steps of 1e-3.

    >>> counts, bias = torch.tensor([5, 1, 3]), torch.zeros(3)
    >>> get_updated_expert_bias(counts, bias, expert_bias_update_rate=0.5)
    tensor([-0.5000,  0.5000,  0.0000])
    """
    with torch.no_grad():
        counts = tokens_per_expert.to(torch.int64, copy=True)
        if tp_dp_cp_group is not None and tp_dp_cp_group.size() > 1:
            torch.distributed.all_reduce(counts, group=tp_dp_cp_group)
        # The sum is compared with E·n, in integers, so an even load gives exactly 0.
        missing = counts.sum(-1, keepdim=True) - counts * counts.shape[-1]
        return expert_bias + missing.sign().to(expert_bias.dtype) * expert_bias_update_rate


def _bias_bins(expert_bias, num_bins):
    """(lower end, width), 0-d, of uniform bins over [min b - 1, max b + 1], in fp32 at least."""
    bias_E = upcast(expert_bias)
    low = bias_E.min() - 1
    return low, (bias_E.max() + 1 - low) / num_bins


# It is an op because Inductor's code for a card gave other counts, in Triton's interpreter.
@op(lambda slots, num_slots: slots.new_empty(num_slots, dtype=torch.int32))
def _count_slots(slots: Tensor, num_slots: int) -> Tensor:
    """How often each slot is in slots [n] int64; num_slots is not counted."""
    counts = torch.zeros(num_slots + 1, dtype=torch.int32, device=slots.device)
    ones = torch.ones((), dtype=torch.int32, device=slots.device).expand_as(slots)
    return counts.scatter_add_(0, slots, ones)[:-1].clone()


def required_bias_histogram(
    scores: Tensor, expert_bias: Tensor, topk: int, num_bins: int = 1000,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """[E, num_bins] int32, for quantile balancing (Kimi K3 technical report, section 2.3.3). Row e
    says, for each bin, how many tokens need a bias in this bin to choose expert e.

    The scores s [T, E] are in [0, 1]. A token chooses the top K of s + b, where b [E] is
    expert_bias. Token t would choose expert e with any bias above r[t, e] = α_t - s[t, e], where
    α_t is the (K+1)-th largest of s_t + b. For an expert that it does not choose now, the K-th
    would be exact: r is too low by the gap between the two, as in the report. The bins are uniform
    from min b - 1 to max b + 1, and the outer ones take what lies beyond. Padding (padding_mask
    [T]) is left out. Histograms of microbatches and ranks add up exactly.
    ValueError: shapes that do not fit, topk not below E, or num_bins below 1.
    """
    check_shapes(
        scores=(scores, "T E"), expert_bias=(expert_bias, "E"), padding_mask=(padding_mask, "T"))
    E = scores.shape[1]
    if not 1 <= topk < E or num_bins < 1:
        raise ValueError(f"topk is {topk} and num_bins {num_bins}; "
                         f"needs 1 <= topk < num_experts = {E} and num_bins >= 1")
    with torch.no_grad():
        scores_TE = upcast(scores)
        alpha_T1 = (scores_TE + expert_bias).topk(topk + 1, dim=1).values[:, -1:]
        low, width = _bias_bins(expert_bias, num_bins)
        bins_TE = (alpha_T1 - scores_TE - low) / width
        bins_TE = bins_TE.nan_to_num().clamp(0, num_bins - 1).long()

        slots_TE = torch.arange(E, device=scores.device) * num_bins + bins_TE
        if padding_mask is not None:
            slots_TE = slots_TE.masked_fill(padding_mask[:, None], E * num_bins)     # not counted
        return _count_slots(slots_TE.flatten(), E * num_bins).view(E, num_bins)


def quantile_expert_bias(histogram: Tensor, expert_bias: Tensor, topk: int) -> Tensor:
    """The new bias [E]: with it a share K/E of the tokens would choose each expert, at the old
    thresholds α_t. Then the mean over E is subtracted from it, which changes no choice.

    histogram [E, num_bins] is the sum of required_bias_histogram over all tokens, and expert_bias
    [E] is the bias that was given to it. Before the mean is subtracted, the new bias is the K/E
    quantile of each row, linear inside its bin. It has expert_bias.dtype. An empty histogram
    changes nothing.
    """
    check_shapes(histogram=(histogram, "E num_bins"), expert_bias=(expert_bias, "E"))
    E, num_bins = histogram.shape
    if not 1 <= topk < E:
        raise ValueError(f"topk is {topk}; needs 1 <= topk < num_experts = {E}")
    low, width = _bias_bins(expert_bias, num_bins)
    histogram = histogram.long()
    running = histogram.cumsum(1)
    # Both sides are multiplied by E, since K/E would be rounded.
    wanted_E1 = running[:, -1:] * topk
    bin_E1 = (running * E < wanted_E1).sum(1, keepdim=True)
    inside_E1 = histogram.gather(1, bin_E1)
    below_E1 = running.gather(1, bin_E1) - inside_E1
    share_E1 = (wanted_E1 - below_E1 * E).to(low.dtype) / (inside_E1 * E)
    new_E = (low + width * (bin_E1 + share_E1)).flatten()
    new_E = (new_E - new_E.mean()).to(expert_bias.dtype)
    return torch.where(running[0, -1] > 0, new_E, expert_bias)


_INTEGERS = torch.uint8, torch.int16, torch.int32, torch.int64


def _sort_by_expert(ids_N, num_experts):
    """(the ids_N sorted, their order [N]); the tokens of an expert stay in order."""
    if ids_N.is_cpu and not torch.compiler.is_compiling() and compat.has_values(ids_N):
        _check_range(ids_N, num_experts)
    # A card sorts digit by digit, so it is quicker in a dtype with few digits.
    narrow = next(d for d in _INTEGERS if num_experts <= torch.iinfo(d).max)
    return ids_N.to(narrow).sort(stable=True)


def _check_range(ids_N, num_experts):
    if ids_N.numel() and not 0 <= ids_N.min() <= ids_N.max() <= num_experts:
        raise ValueError(f"indices has {ids_N.min()} to {ids_N.max()}; needs 0 to num_experts = "
                         f"{num_experts}, which is for unrouted ones")


def _ends(sorted_N, num_experts):
    """[E] int32: where each expert's rows end in the sorted ids."""
    expert_E = torch.arange(num_experts, dtype=sorted_N.dtype, device=sorted_N.device)
    return torch.searchsorted(sorted_N, expert_E, right=True, out_int32=True)


def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Assignments per expert [E] int64 of indices [T, K] int64 in [0, E]; E is not counted. The
    range is checked as in plan_permutation.

    >>> count_experts(torch.tensor([[0, 2], [2, 3]]), 3)
    tensor([1, 0, 2])
    """
    sorted_N, _ = _sort_by_expert(indices.flatten(), num_experts)
    return grouped.rows_of_each(_ends(sorted_N, num_experts)).long()


# ---- Permute, index form: what the layer runs on ----
# With the inverse permutation a token finds its rows by a gather, and adds them up over k, in the
# forward and in the backward. That needs no atomics: the same input gives bitwise the same result.

class Plan(NamedTuple):
    """Where each of the N = T·K assignments goes when rows are grouped by expert."""
    order: Tensor      # [N] int64      row -> assignment t·K + k
    inverse: Tensor    # [T, K] int64   assignment -> row
    counts: Tensor     # [E] int64      rows per expert
    offsets: Tensor    # [E] int32      running sums of the counts; unrouted rows come after


def plan_permutation(indices: Tensor, num_experts: int) -> Plan:
    """The Plan of indices [T, K] int64 in [0, E].

    Rows are sorted by expert, unrouted ones (index E) last, and by token within an expert. The
    range is checked in eager mode on a CPU. Elsewhere that would sync the device.

    >>> plan = plan_permutation(torch.tensor([[2, 0], [0, 1]]), num_experts=3)
    >>> plan.order.tolist(), plan.counts.tolist()
    ([1, 2, 3, 0], [2, 1, 1])
    """
    if indices.ndim != 2 or indices.dtype != torch.int64:
        _refuse_indices(indices)
    sorted_N, order_N = _sort_by_expert(indices.flatten(), num_experts)
    # In memory it is [K, T], so that the rows of the k-th choice are read one after the other.
    inverse_KT = order_N.int().argsort().view(indices.shape).t().contiguous()
    offsets_E = _ends(sorted_N, num_experts)
    counts_E = grouped.rows_of_each(offsets_E).long()
    return Plan(order_N, inverse_KT.t(), counts=counts_E, offsets=offsets_E)


def _refuse_indices(indices):
    raise TypeError(f"indices is {list(indices.shape)} {indices.dtype}; needs [T, K] torch.int64")


def _spread_rows(tokens, order, inverse, offsets):
    """[N, H]: row n is a copy of its token. Unrouted rows and fillers are zeros."""
    T, K = inverse.shape
    row_N = torch.arange(order.shape[0], device=order.device)
    token_N = torch.where(row_N < offsets[-1], order // K, T)
    return take_rows(F.pad(tokens, (0, 0, 0, 1)), token_N)            # row T holds zeros


def _collect_rows(rows, order, inverse, offsets):
    """[T, H] in rows.dtype: Σ_k rows[inverse[t, k]] without unrouted rows, in fp32 at least.
    Compiled, this is one kernel, without a tensor [T, K, H].
    """
    unrouted_TK = inverse >= offsets[-1]
    total_TH = None
    for k in range(inverse.shape[1]):
        picked_TH = upcast(take_rows(rows, inverse[:, k]))
        picked_TH = picked_TH.masked_fill(unrouted_TK[:, k, None], 0.0)
        total_TH = picked_TH if total_TH is None else total_TH + picked_TH
    return cast(total_TH, rows.dtype)


def _spread_gradient(grad, order, inverse, offsets):
    # The backward also gathers the tokens again. If both gathers read the same `order`, a graph
    # would make both in one kernel, and keep the tokens' rows until it needs them. So this one
    # reads a copy.
    return _spread_rows(grad, compat.copy_after(order, grad), inverse, offsets)


def gather_rows(tokens: Tensor, plan: Plan) -> Tensor:
    """tokens [T, H] -> rows [N, H] in expert order. Unrouted rows are zeros without a gradient.

    >>> plan = plan_permutation(torch.tensor([[1], [0], [2]]), num_experts=2)     # 2: unrouted
    >>> gather_rows(torch.tensor([[1.], [2.], [3.]]), plan).flatten()
    tensor([2., 1., 0.])
    """
    check_shapes(inverse=(plan.inverse, "T K"), tokens=(tokens, "T H"))
    places = plan.order, plan.inverse, plan.offsets
    return with_gradient(tokens, _spread_rows, _collect_rows, *places)


def combine_rows(rows: Tensor, plan: Plan, probs: Tensor | None = None) -> Tensor:
    """rows [N, H] -> tokens [T, H]: y_t = Σ_k probs[t, k] · rows[inverse[t, k]].

    Without probs [T, K] all are 1. The sum is in fp32 at least, the result in rows.dtype. A NaN in
    an unrouted row reaches nothing.

    >>> plan = plan_permutation(torch.tensor([[1, 0]]), num_experts=2)
    >>> combine_rows(torch.tensor([[1.], [2.]]), plan, probs=torch.tensor([[0.5, 3.0]]))
    tensor([[4.]])
    """
    check_shapes(
        order=(plan.order, "N"), inverse=(plan.inverse, "T K"), rows=(rows, "N H"),
        probs=(probs, "T K"))
    weighted = rows
    if probs is not None:
        weighted = upcast(rows) * gather_probs(probs, plan)
    places = plan.order, plan.inverse, plan.offsets
    out = with_gradient(weighted, _collect_rows, _spread_gradient, *places)
    return out.to(rows.dtype)


def gather_probs(probs: Tensor, plan: Plan) -> Tensor:
    """probs [T, K] -> [N, 1], each row's prob; 0 for fillers."""
    places = plan.order, plan.inverse, plan.offsets
    return with_gradient(probs, _spread_probs, _collect_probs, *places)


def _spread_probs(probs, order, inverse, offsets):
    probs_N = probs.flatten()
    if not always_holds(order.shape[0] == probs_N.shape[0]):
        probs_N = F.pad(probs_N, (0, 1))                 # for fillers, whose order is T·K
    return take_rows(probs_N, order)[:, None]


def _collect_probs(grad, order, inverse, offsets):
    picked_TK = take_rows(grad.flatten(), inverse.t()).t()           # in memory inverse is [K, T]
    return picked_TK.masked_fill(inverse >= offsets[-1], 0.0)


# ---- Activations: functions of the parts of fc1's output ----
# Each takes one part, or the gate and the up part, and computes in their dtype. ACTIVATIONS says
# which, and names the constants.

def _limited(gate, up, linear_offset, clamp_value):
    if clamp_value is not None:
        gate = gate.clamp(max=clamp_value)
        up = up.clamp(-clamp_value, clamp_value)
    return gate, up + linear_offset if linear_offset else up


def swiglu(
    gate: Tensor, up: Tensor, linear_offset: float = 0.0, clamp_value: float | None = None,
) -> Tensor:
    """silu(gate) · (up + linear_offset) (arXiv 2002.05202). clamp_value v first clamps gate to at
    most v, and up to -v .. v.
    """
    gate, up = _limited(gate, up, linear_offset, clamp_value)
    return F.silu(gate) * up


def geglu(
    gate: Tensor, up: Tensor, linear_offset: float = 0.0, clamp_value: float | None = None,
) -> Tensor:
    """swiglu with the tanh form of GELU."""
    gate, up = _limited(gate, up, linear_offset, clamp_value)
    return F.gelu(gate, approximate="tanh") * up


def quick_geglu(
    gate: Tensor, up: Tensor, linear_offset: float = 0.0, clamp_value: float | None = None,
    alpha: float = 1.702,
) -> Tensor:
    """swiglu with gate · sigmoid(alpha · gate)."""
    gate, up = _limited(gate, up, linear_offset, clamp_value)
    return gate * torch.sigmoid(alpha * gate) * up


def situ(
    gate: Tensor, up: Tensor, beta: float = 1.0, linear_beta: float | None = None,
) -> Tensor:
    """beta · tanh(gate / beta) · sigmoid(gate) · up (Kimi K3). linear_beta l replaces up by
    l · tanh(up / l). Both are positive.
    """
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def relu2(y: Tensor) -> Tensor:
    """relu(y)², without a gate (arXiv 2109.08668)."""
    return y.relu().square()


def relu(y: Tensor) -> Tensor:
    """relu(y), without a gate (arXiv 2101.03961)."""
    return y.relu()


def gelu(y: Tensor) -> Tensor:
    """The tanh form of GELU, without a gate (arXiv 1606.08415)."""
    return F.gelu(y, approximate="tanh")


class Activation(NamedTuple):
    """A function, and what it is a function of."""
    function: "Callable[..., Tensor]"
    parts: int = 2                       # P of fc1's output: 2, gate and up, or 1
    takes_expert: bool = False           # a further argument `expert` [.., 1]: each row's expert
    constants: tuple[str, ...] = ()      # names of further parameters, with defaults


_LIMITS = "linear_offset", "clamp_value"
ACTIVATIONS = {
    "swiglu": Activation(swiglu, constants=_LIMITS),
    "geglu": Activation(geglu, constants=_LIMITS),
    "quick_geglu": Activation(quick_geglu, constants=(*_LIMITS, "alpha")),
    "situ": Activation(situ, constants=("beta", "linear_beta")),
    "relu2": Activation(relu2, parts=1),
    "relu": Activation(relu, parts=1),
    "gelu": Activation(gelu, parts=1),
}


def activation_of(kind, **constants) -> Activation:
    """The Activation of this name in ACTIVATIONS, or the given one, or that of a function of gate
    and up, with these constants bound. ValueError: an unknown name or constant.
    """
    made = kind
    if isinstance(kind, str):
        check_known("kind", kind, ACTIVATIONS)
        made = ACTIVATIONS[kind]
    elif not isinstance(kind, Activation):
        made = Activation(kind)
    for name, value in constants.items():
        if name not in made.constants:
            raise ValueError(f"{name} is {value}; {kind} has no such constant, it has "
                             f"{', '.join(made.constants) or 'none'}")
        # It is checked here and not in situ, since in torch 2.11 an error inside a checkpoint
        # leaves the checkpoint's hooks on.
        if made.function is situ and value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; needs a positive number")
    bound = functools.partial(made.function, **constants) if constants else made.function
    return Activation(_with_numbers(bound), made.parts, made.takes_expert, made.constants)


def again(function, *tensors: Tensor) -> Tensor:
    """function(*tensors). Only the tensors are kept for the backward: it computes the function once
    more, and autograd makes its gradient. A graph computes only elementwise code and gathers again,
    eager mode products too.
    """
    # A checkpoint asks for the state of autocast, which the meta device does not have.
    if not torch.is_grad_enabled() or not compat.has_autocast(tensors[0].device.type):
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def again_in_a_graph(function, *tensors: Tensor) -> Tensor:
    """`again` for code that calls a function of your own. In eager mode it is computed once, and
    autograd keeps what its gradient needs. So it may draw numbers, write in place, keep a state,
    and read parameters that change before the backward, as any module may. In a graph it may draw
    numbers: AOTAutograd has the backward draw the same ones.
    """
    return again(function, *tensors) if torch.compiler.is_compiling() else function(*tensors)


def is_named(made: Activation) -> bool:
    """Whether its function, without constants, is one of ACTIVATIONS. If not, it is your own."""
    function = made.function
    while isinstance(function, functools.partial):
        function = function.func
    return any(function is named.function for named in ACTIVATIONS.values())


def _with_numbers(function):
    """The function, its constants as plain numbers: with dynamic=True they are symbolic, and a
    checkpoint in a graph refuses these.
    """
    if not isinstance(function, functools.partial):
        return function
    return functools.partial(function.func, *function.args, **{
        name: as_number(x) if isinstance(x, (int, float)) else x
        for name, x in function.keywords.items()})


def parts_of_rows(y, parts, axis=-2):
    """The P parts [.., F] of y [.., P·F], as views. axis: -2 if the last axis of y is (P, F), -1 if
    it is (F, P), with the parts interleaved.
    """
    F_ = y.shape[-1] // parts
    sizes = (parts, F_) if axis == -2 else (F_, parts)
    return y.reshape(*y.shape[:-1], *sizes).unbind(axis)


def activated(split, weights, made, expert=None, unrouted=None):
    """made.function(*split) · weights [.., 1] -> [.., F] in the parts' dtype. expert [.., 1] is for
    a function that takes it, else None. The function sees ones, without a gradient, in rows where
    unrouted [.., 1] is True.
    """
    shape, dtype = split[0].shape, split[0].dtype
    if unrouted is not None:
        # Not y as a whole, so that in the backward the mask comes last, before the parts' gradients
        # are joined: see grouped.unrouted.
        split = [part.masked_fill(unrouted, 1.0) for part in split]
    beside = {} if expert is None else {"expert": expert}
    out = made.function(*map(upcast, split), **beside)
    check_result(made.function, out, shape)
    return cast(out if weights is None else out * upcast(weights), dtype)


def activated_rows(y, weights, made):
    """activated(the parts of y [.., P·F], ..). A function of your own gets copies of the parts, so
    that it may write over them.
    """
    split = parts_of_rows(y, made.parts)
    if not is_named(made):
        split = [part.clone() for part in split]
    return activated(split, weights, made)


def check_result(function, out, shape) -> None:
    """ValueError unless an activation's result is a real tensor in the shape of a part."""
    if not isinstance(out, Tensor):
        raise ValueError(f"{function} returns a {type(out).__name__}; needs a tensor {[*shape]}")
    if out.shape != shape or not out.is_floating_point():
        raise ValueError(f"{function} returns {out.dtype} {list(out.shape)}; needs a floating "
                         f"dtype and the shape of a part, {[*shape]}")


class _StoreFp8(torch.autograd.Function):
    """y -> (y as fp8 e4m3, zeros in the shape and dtype of y, which take no memory). Autograd gives
    an fp8 tensor no gradient. So the stored value is added to the zeros, and the gradient of the
    zeros becomes that of y.
    """

    @staticmethod
    def forward(ctx, y):
        ctx.set_materialize_grads(False)
        stored = y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        ctx.mark_non_differentiable(stored)
        return stored, y.new_zeros(()).expand_as(y)

    @staticmethod
    def backward(ctx, _, grad):
        return grad


def _of_stored(value):
    """value(y, weights) as a function of the two results of _StoreFp8(y), and of the weights."""
    return lambda stored, zeros, weights: value(stored.to(zeros.dtype) + zeros, weights)


def check_activation(y, weights, parts, g=None):
    *rows, width = y.shape
    if width % parts:
        raise ValueError(f"y has shape {list(y.shape)}; needs an even last axis, [.., 2F]")
    for name, x, columns in (("weights", weights, 1), ("g", g, width // parts)):
        if x is not None and x.shape != (*rows, columns):
            raise ValueError(f"{name} has shape {list(x.shape)}; needs {[*rows, columns]}")


def check_stored(fp8_input_store, made):
    if fp8_input_store and not is_named(made):
        raise ValueError(f"fp8_input_store is True, and {made.function} is not in ACTIVATIONS; "
                         f"leave it out: the function would be computed twice, on y and on the "
                         f"stored y")


def activation(
    y: Tensor, kind: "str | Activation | Callable[..., Tensor]" = "swiglu",
    weights: Tensor | None = None, fp8_input_store: bool = False, **constants: float | None,
) -> Tensor:
    """The activation `kind` of y [.., P·F] (P = 2: gate, then up; 1 for "relu2", "relu" and
    "gelu"), times weights [.., 1] of any dtype -> [.., F] in y.dtype, computed in fp32 at least and
    rounded once.

    kind: a name in ACTIVATIONS, or an elementwise function of your own, of gate and up, or an
      Activation, which says what else it takes. It may write over its parts: they are no views of
      y.
    constants: of those that the Activation names. y and weights are kept for the backward, which
    computes the activation again. In eager mode a function of your own is computed only once, and
    autograd keeps what it needs.
    fp8_input_store: y is kept as fp8 e4m3, clamped to ±448, while the forward uses the unrounded y.
    ValueError: an unknown kind or constant, shapes that do not fit, or fp8_input_store with a
    function of your own, since it computes both.

    >>> activation(torch.tensor([1.0, -2.0, 3.0]), kind="relu2")
    tensor([1., 0., 9.])
    >>> activation(torch.tensor([1.0, 2.0]), kind=lambda gate, up: gate * up)
    tensor([2.])
    """
    made = activation_of(kind, **constants)
    if made.takes_expert:
        raise ValueError(f"{made.function} takes the row's expert, which only expert_mlp knows")
    check_activation(y, weights, made.parts)
    check_stored(fp8_input_store, made)

    def value(y, weights):
        return activated_rows(y, weights, made)

    if not is_named(made):
        return again_in_a_graph(value, y, weights)
    if not fp8_input_store:
        return again(value, y, weights)
    act = again(_of_stored(value), *_StoreFp8.apply(y), weights)
    with torch.no_grad():
        exact = value(y, weights)
    return straight_through(exact, gradient_of=act)


# ---- Experts ----

def _sum_of_biases(probs, bias, indices):
    """Σ_k probs[t, k] · bias[indices[t, k]]. Index E adds nothing."""
    last = len(bias) - 1
    probs = probs.masked_fill(indices > last, 0.0)
    total_TH = 0.0
    for prob_T, index_T in zip(probs.unbind(1), indices.clamp(max=last).unbind(1)):
        total_TH = total_TH + prob_T[:, None] * take_rows(bias, index_T)
    return total_TH


class _BiasAdded(torch.autograd.Function):
    """y_t + Σ_k probs[t, k] · bias[indices[t, k]] in y.dtype, with products and sums in fp32 at
    least. Index E adds nothing.

    In plain code the gradient of the sum would be in fp32: copies of [T, H] for two products.
    """

    @staticmethod
    def forward(ctx, y, probs, bias, indices):
        probs_TE = _sum_columns(probs, indices, len(bias))
        ctx.save_for_backward(probs_TE, bias, indices)
        ctx.wide = torch.promote_types(y.dtype, torch.float32)
        if torch.compiler.is_compiling():
            # A part of combine_rows' kernel, for which a product would write [T, H] in fp32.
            biases_TH = _sum_of_biases(probs.to(ctx.wide), bias.to(ctx.wide), indices)
        else:
            biases_TH = _product_in(probs_TE, bias, dtype=ctx.wide, out_dtype=ctx.wide)
        return cast(y + biases_TH, y.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        probs_TE, bias, indices = ctx.saved_tensors
        grad_probs = grad_bias = None
        # The gradient of probs_TE is grad · biasᵀ, that of the bias probs_TEᵀ · grad
        if ctx.needs_input_grad[1]:
            grad_TE = _product_in(grad, bias.t(), dtype=ctx.wide, out_dtype=probs_TE.dtype)
            grad_probs = _gather_columns(grad_TE, indices)
        if ctx.needs_input_grad[2]:
            grad_bias = _weight_grad(probs_TE, grad, dtype=ctx.wide, out_dtype=bias.dtype)
        # y, probs, bias, indices
        return grad, grad_probs, grad_bias, None


def _flat_weights(fc1, fc1_bias):
    """(fc1 [E, P·F, H], its bias [E, P·F], the axis of P where the last axis of fc1's output is
    split: -2 for [.., P, F], -1 for [.., F, P]).

    No weight is copied: where gate and up of a row are neighbours in memory, P comes last. The
    weights become flat because strides of [E, P, F, H] may look unaligned to F.grouped_mm.
    """
    axis = -2
    if fc1.stride(1) < fc1.stride(2):
        axis = -1
        fc1, fc1_bias = [x if x is None else x.transpose(1, 2) for x in (fc1, fc1_bias)]
    return fc1.flatten(1, 2), fc1_bias if fc1_bias is None else fc1_bias.flatten(1), axis


def _are_few(probs, fc1):
    """Whether to compute without a plan: in a graph without gradients, up to 2·E assignments on a
    CPU, E / 2 on a card or with transposed weights. 2·E was measured ("Decoding" in
    docs/results.md). On a card nobody has measured: there 2·E assignments would read up to twice
    what a grouped product reads.
    """
    if not is_decoding():
        return False
    quick = probs.is_cpu and fc1.stride(2) == 1
    most = 2 * len(fc1) if quick else len(fc1) // 2
    return holds_in_this_graph(probs.numel() <= most)


def _mlp_in_place(tokens, probs, indices, fc1, fc2, fc1_bias, fc2_bias, split, made):
    """expert_mlp for few tokens. Each assignment reads its expert's weights in place: the compiler
    makes no tensor of fc1's rows.
    """
    E = len(fc1)
    expert_TK = indices.clamp(0, E - 1)
    weights = upcast(take_rows(fc1, expert_TK))
    hidden = (weights * upcast(tokens)[:, None, None]).sum(-1)                    # [T, K, P·F]
    if fc1_bias is not None:
        hidden = hidden + take_rows(fc1_bias, expert_TK)
    act_TKF = activated(
        split(hidden), probs[..., None], made,
        expert=expert_TK[..., None] if made.takes_expert else None)
    out_TKH = (upcast(take_rows(fc2, expert_TK)) * act_TKF[:, :, None]).sum(-1)
    if fc2_bias is not None:
        out_TKH = out_TKH + upcast(probs)[..., None] * take_rows(fc2_bias, expert_TK)
    return cast(out_TKH.masked_fill((indices >= E)[..., None], 0.0).sum(1), tokens.dtype)


def _bias_of_rows(bias, num_rows, blocks):
    """bias [E, O] -> [N, O]: each row's. The blocks' offsets are on their device."""
    def gather(bias, offsets):
        return take_rows(bias, grouped.expert_of_rows(num_rows, offsets))

    def back(grad, offsets):
        return grouped.bias_grad(grad.contiguous(), grouped.RowBlocks(offsets, blocks.by))

    return with_gradient(bias, gather, back, blocks.offsets)


def _rows_of_stored(to_experts, split, value, from_experts, tokens, fc1, probs):
    """from_experts(value(split(to_experts(tokens, fc1)), probs)), where an fp8 copy is kept of
    to_experts' output. The result is the exact one, the gradient that of the copy.
    """
    def to_store(tokens, fc1):
        hidden = to_experts(tokens, fc1)
        return hidden.detach(), *_StoreFp8.apply(hidden)

    def of_hidden(hidden, probs):
        return value(split(hidden), probs)

    hidden, stored, zeros = again(to_store, tokens, fc1)
    act = again(_of_stored(of_hidden), stored, zeros, probs)
    with torch.no_grad():
        # A graph keeps `stored` only if its forward uses it, so here it does. (Part by part, in the
        # activation's kernel, 134 MB less would move, but torch 2.11 would keep fc1's output.)
        exact = from_experts(of_hidden(hidden, compat.copy_after(probs, stored)))
    # Nobody reads the product with `act`, so a graph leaves it out. Eager mode computes it.
    return straight_through(exact, gradient_of=from_experts(act))


def _mlp_of_rows(
    tokens, probs, plan, fc1, fc2, fc1_bias, fc2_bias, split, made, fp8_input_store,
):
    """expert_mlp for any number of tokens: rows in expert order, and two grouped products."""
    N = plan.order.shape[0]
    blocks = grouped.row_blocks(plan.offsets, N, fc1, fc2)
    expert_N1 = None
    if made.takes_expert:
        expert_N1 = grouped.expert_of_rows(N, plan.offsets)[:, None]

    # In a graph such a product and a bias would be two kernels. The activation's kernel takes the
    # bias along.
    fused_bias = None
    if grouped.leaves_raw(blocks) and not fp8_input_store:
        fc1_bias, fused_bias = None, fc1_bias
    named = is_named(made)

    def to_experts(tokens, fc1):
        return grouped.linear(gather_rows(tokens, plan), fc1, blocks, fc1_bias)

    def value(hidden, probs):
        if fused_bias is not None:
            hidden = hidden + _bias_of_rows(fused_bias, N, blocks)
        return of_parts(split(hidden), probs)

    def of_parts(split, probs):
        # The parameters of a function of your own get sums over all rows. Zeros in unrouted ones
        # would make them NaN, if the slope at 0 is infinite. So the function sees ones. In a graph
        # named functions do too: the backward of a long one would else read `hidden` once more.
        unrouted = None
        if not named or grouped.leaves_raw(blocks):
            unrouted = grouped.unrouted(split[0], plan.offsets)
        act = activated(
            split, gather_probs(probs, plan), made, expert=expert_N1, unrouted=unrouted)
        return grouped.zero_raw(act, blocks)

    def from_experts(act):
        return grouped.linear(act, fc2, blocks)

    if fp8_input_store and torch.is_grad_enabled():
        rows = _rows_of_stored(to_experts, split, of_parts, from_experts, tokens, fc1, probs)
    else:
        # The tokens and `hidden` are kept, in eager mode also the activation. The backward computes
        # the rows and the activation again, in eager mode also fc1's product.
        hidden = again(to_experts, tokens, fc1)
        act = again(value, hidden, probs) if named else again_in_a_graph(value, hidden, probs)
        rows = from_experts(act)
    y = combine_rows(rows, plan)
    if fc2_bias is None:
        return y
    return _BiasAdded.apply(y, probs, fc2_bias, grouped.expert_of(plan.inverse, plan.offsets))


def expert_mlp(
    tokens: Tensor, probs: Tensor, plan: Plan, fc1: Tensor, fc2: Tensor,
    fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    kind: "str | Activation | Callable[..., Tensor]" = "swiglu", fp8_input_store: bool = False,
    indices: Tensor | None = None, **constants: float | None,
) -> Tensor:
    """y_t = Σ_k p_tk · expert_{i_tk}(x_t), where
      expert_e(x) = fc2[e] · activation(fc1[e] · x + fc1_bias[e]) + fc2_bias[e].

    tokens [T, H], probs [T, K] of any dtype, the plan of the indices [T, K] (plan_permutation's,
    not padded), fc1 [E, P, F, H] (P = 2: gate and up; 1 for relu2, relu, gelu), fc2 [E, H, F],
    fc1_bias [E, P, F], fc2_bias [E, H] -> [T, H]. Tokens, weights and the result have one dtype.
    kind, fp8_input_store and constants are `activation`'s. If you give the `indices` [T, K] int64
    that the plan was made of, a graph without gradients for few tokens reads them in place of the
    plan, and does not compute the plan.

    fc1 and fc2 may be transposed views, gate and up interleaved; no weight is copied as long as P
    and F are adjacent in memory. The probs are multiplied in before fc2, so fc2's output is not
    kept for the backward. The arguments are, and fc1's output [N, P·F], in eager mode also the
    activation [N, F], and with fc2_bias a tensor [T, E]. ValueError and TypeError: shapes and
    dtypes that do not fit.

    >>> x, plan = torch.tensor([[3.0]]), plan_permutation(torch.tensor([[1]]), num_experts=2)
    >>> fc1, fc2 = torch.ones(2, 1, 1, 1), torch.tensor([[[1.0]], [[10.0]]])
    >>> expert_mlp(x, torch.tensor([[0.5]]), plan, fc1, fc2, kind="relu2")
    tensor([[45.]])
    """
    made = activation_of(kind, **constants)
    check_shapes(
        {"E": len(plan.counts), "P": made.parts}, inverse=(plan.inverse, "T K"),
        indices=(indices, "T K"), tokens=(tokens, "T H"), probs=(probs, "T K"),
        fc1=(fc1, "E P F H"), fc2=(fc2, "E H F"),
        fc1_bias=(fc1_bias, "E P F"), fc2_bias=(fc2_bias, "E H"))
    check_one_dtype(tokens=tokens, fc1=fc1, fc2=fc2, fc1_bias=fc1_bias, fc2_bias=fc2_bias)
    check_stored(fp8_input_store, made)

    fc1, fc1_bias, axis = _flat_weights(fc1, fc1_bias)
    weights = fc1, fc2, fc1_bias, fc2_bias

    split = functools.partial(parts_of_rows, parts=made.parts, axis=axis)
    if _are_few(probs, fc1):
        if indices is None:
            indices = grouped.expert_of(plan.inverse, plan.offsets)
        return _mlp_in_place(tokens, probs, indices, *weights, split, made)
    return _mlp_of_rows(tokens, probs, plan, *weights, split, made, fp8_input_store)
