"""A Mixture-of-Experts layer for one device, in one file. Copy it: it needs torch 2.11 or later.

    layer = MoE(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2, enable_expert_bias=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    compiled = torch.compile(layer, fullgraph=True)
    for x, target in data:                               # x [.., 64]
        (compiled(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.finish_step()                              # on several ranks give it a group

For a log there are layer.balance_loss and layer.max_violation, before finish_step.

The same input gives bitwise the same output and gradients.

Letters: T tokens, H hidden size, E experts, K experts per token, N = T·K assignments, W FFN size of
an expert. If a name ends in capitals, they are the axes of the tensor: x_TH is [T, H].
"""
import math
import re
import threading
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula

if torch.__version__ < "2.11.dev0":
    raise RuntimeError(f"torch is {torch.__version__}; this file needs 2.11 or later")


def moe_loop(x: Tensor, router: Tensor, fc1: Tensor, fc2: Tensor, topk: int) -> Tensor:
    """What the layer computes. x [T, H], router [E, H], fc1 [E, 2, W, H], fc2 [E, H, W]."""
    y = torch.zeros_like(x)
    for t in range(len(x)):
        chosen, experts = (router @ x[t]).topk(topk)
        for prob, e in zip(chosen.softmax(-1), experts):
            gate, up = fc1[e] @ x[t]
            y[t] += prob * (fc2[e] @ (F.silu(gate) * up))
    return y


def cast(x, dtype):
    """x in dtype. (On torch 2.11 a compiled autograd function whose forward ends in x.to(x.dtype)
    gets wrong gradients.)
    """
    return x if x.dtype == dtype else x.to(dtype)


def upcast(x):
    """x in fp32 at least."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def sum_tokens(x):
    """x [T, columns] -> [columns], in x.dtype."""
    # In one sum the compiler would add row after row on a CPU (4e-6 off over 8,192 tokens, in three
    # levels 2e-7), and make one more graph above 4,096 tokens.
    for _ in range(2):
        blocks = x.shape[0] // 64 + 2            # at least 2: one would have a graph of its own
        # With a view in place of unfold an export would hold only for some T.
        x = F.pad(x, (0, 0, 0, blocks * 64 - x.shape[0])).unfold(0, 64, 64).sum(-1)
    return x.sum(0)


def sort_by_expert(indices, num_experts):
    """indices [T, K] -> order [N] (row -> assignment t·K + k), row_KT [K, T] (assignment -> row),
    offsets [E] int32 (where an expert's rows end). Index E, unrouted, comes last.
    """
    ids_N, order_N = indices.flatten().sort(stable=True)     # an expert's tokens stay in order
    row_KT = order_N.int().argsort().view(indices.shape).t().contiguous()
    experts_E = torch.arange(num_experts, device=indices.device)
    offsets_E = torch.searchsorted(ids_N, experts_E, right=True, out_int32=True)
    return order_N, row_KT, offsets_E


def rows_of_each(offsets):
    """offsets [E] -> how many rows each expert has, [E] int32."""
    return offsets.diff(prepend=offsets.new_zeros(1))


# F.grouped_mm, torch's own product, takes bf16 and reads the offsets on their device. Where it does
# not run, the product is a loop, with up to E launches, and the host has to read the offsets: once
# for all products. (In moe.py's layer it is one launch, of a kernel in Triton.)
@torch.compiler.assume_constant_result
def native_product(device) -> str:
    """What F.grouped_mm runs on here: "H100" or H200, "B200" or B300, "bf16 CPU", else "none"."""
    if device.type == "cuda" and torch.version.hip is None:
        return {9: "H100", 10: "B200"}.get(torch.cuda.get_device_capability(device)[0], "none")
    mkldnn = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return "bf16 CPU" if mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "none"


# The module's name is part of the ops' names, so that copies of this file do not collide.
namespace = re.sub(r"\W", "_", f"moe_{__name__}")


# CUDA graphs leave this op out, because the host reads the offsets in it.
@torch.library.custom_op(
    f"{namespace}::loop_over_experts", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def loop_over_experts(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    out, ends = empty_product(a, b, offsets), offsets.tolist()
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        if b.ndim == 3 and start < end:
            multiply(a[start:end], b[e], out[start:end])
        elif b.ndim == 2 and start < end:
            multiply(a[:, start:end], b[start:end], out[e])
        elif b.ndim == 2:
            out[e] = 0.0
    if b.ndim == 3:
        out[ends[-1]:] = 0.0
    return out


@loop_over_experts.register_fake
def empty_product(a, b, offsets):
    sizes = a.shape[0], b.shape[-1]
    return a.new_empty(sizes if b.ndim == 3 else (offsets.shape[0], *sizes))


def multiply(a, b, out):
    """out = a · b"""
    narrow = a.is_cpu and a.itemsize == 2 and a.shape[0] > 1
    if narrow and (a.dtype == torch.float16 or native_product(a.device) == "none"):
        # Where a CPU has no instructions for the dtype, fp32 is 10 to 100 times as fast. (Whether
        # it has them for fp16 is not asked here.)
        wide = out.new_empty(out.shape, dtype=torch.float32)
        out.copy_(torch.mm(a.float(), b.float(), out=wide))
    else:
        torch.mm(a, b, out=out)              # out= also keeps autocast away


def grouped_mm(a, b, offsets, native):
    """a [N, I] · b [E, I, O] -> [N, O]: row block e times b[e].
    a [I, N] · b [N, O] -> [E, I, O]: the product of block e of a and block e of b.
    """
    if not native:
        return loop_over_experts(a, b, offsets)
    out = F.grouped_mm(a, b, offs=offsets)
    # F.grouped_mm leaves unrouted rows uninitialised, on a B200 also the product of an expert that
    # has no rows. In a graph the rows stay so: a mask here would be a kernel of its own, while
    # behind swiglu, and in combine, it is a part of their kernels.
    if b.ndim == 3:
        return out if torch.compiler.is_compiling() else zero_unrouted(out, offsets)
    if native_product(a.device) == "B200":
        out = out.masked_fill((rows_of_each(offsets) == 0)[:, None, None], 0.0)
    return out


def zero_unrouted(rows, offsets):
    """rows [N, ..] with zeros from the end of the last expert's rows on."""
    row_N = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    # amax is offsets[-1]. Since it is a reduction, Inductor writes the gradients of gate and up in
    # one kernel; otherwise a second would join them, and read fc1's output again.
    return rows.masked_fill((row_N >= offsets.amax())[:, None], 0.0)


def swiglu(hidden, prob=None):
    """silu(gate) · up · prob, for hidden [.., 2W]: gate, then up. fp32 at least, rounded once."""
    gate, up = map(upcast, hidden.chunk(2, -1))
    act = F.silu(gate) * up
    return cast(act if prob is None else act * prob, hidden.dtype)


def again(function, *args):
    """function(*args). Only the arguments are kept: the backward computes the function again."""
    if args[0].is_meta:                      # a checkpoint asks whether autocast is on there
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def as_no_view(x, shape):
    """x in this shape, but no view to autograd. FSDP2 warns of modules that return views, and what
    an autograd function returns could not be changed in place.
    """
    return torch.ops.aten._unsafe_view(x, shape)


class WithGradient(torch.autograd.Function):
    """Returns value. The gradient of x is back(grad, *tensors)."""
    @staticmethod
    def forward(ctx, value, x, back, *tensors):
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return as_no_view(value, value.shape)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        tensors = ctx.saved_tensors      # once: under a checkpoint a second read fails
        return None, ctx.back(grad, *tensors), None, *[None] * len(tensors)


def with_gradient(x, function, back, *tensors):
    """function(x, *tensors), whose gradient is back(grad, *tensors)."""
    # The function is called outside of WithGradient: in a graph of torch 2.11 a checkpoint does not
    # compute again what is inside an autograd function.
    return WithGradient.apply(function(x.detach(), *tensors), x, back, *tensors)


def take_rows(x, index):
    """x[index], for an index that was made here: a graph does not check it. On a card a check is a
    barrier in front of each load.
    """
    if torch.compiler.is_compiling():
        return torch.ops.aten._unsafe_index(x, [index])
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


# Rows are gathered from tokens, and tokens from rows. The gradient of each way is the other way, so
# a gather too, while autograd's would be a scatter.

def spread(x, order, row_KT, offsets):
    """x [T, H] -> [N, H]: each row is a copy of its token."""
    return take_rows(x, order // len(row_KT))


def combine(rows, order, row_KT, offsets):
    """rows [N, H] -> [T, H]: the sum of each token's routed rows, in fp32 at least. No atomics."""
    # The backward gathers x again and this function's gradient, both by `order`: a graph has one
    # kernel for both, and more memory at the peak. kernels.combine_rows keeps them apart, by an op.
    picked = [upcast(take_rows(rows, row_T)) for row_T in row_KT]
    if torch.compiler.is_compiling():        # in eager mode unrouted rows are zeros: see grouped_mm
        unrouted_KT1 = (row_KT >= offsets[-1])[..., None]
        picked = [z.masked_fill(mask_T1, 0.0) for z, mask_T1 in zip(picked, unrouted_KT1)]
    return cast(sum(picked), rows.dtype)


def to_rows(probs, order, row_KT, offsets):
    """probs [T, K] -> [N, 1]"""
    return take_rows(probs.flatten(), order)[:, None]


def to_tokens(rows, order, row_KT, offsets):
    """rows [N, 1] -> [T, K]; 0 for unrouted rows."""
    picked_KT = take_rows(rows.flatten(), row_KT)
    return picked_KT.masked_fill(row_KT >= offsets[-1], 0.0).t().contiguous()


class GroupedLinear(torch.autograd.Function):
    """rows [N, I] -> [N, O]: weight[e] · row. weight is [E, O, I], and so is its gradient."""
    @staticmethod
    def forward(ctx, rows, weight, offsets, native):
        ctx.save_for_backward(rows, weight, offsets)
        ctx.native = native
        return grouped_mm(rows, weight.mT, offsets, native)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, offsets = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_mm(grad, weight, offsets, ctx.native)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_mm(grad.t(), rows, offsets, ctx.native)
        return grad_rows, grad_weight, None, None


def experts(x, probs, fc1, fc2, places, native):
    """y_t = Σ_k p_tk · fc2[e] · swiglu(fc1[e] · x_t), e = indices[t, k]; fc1 is [E, 2W, H]."""
    offsets = places[-1]
    read = offsets if native or offsets.is_meta else offsets.cpu()   # the loop reads on the host

    def first(x, fc1):
        rows = with_gradient(x, spread, combine, *places)                           # [N, H]
        return GroupedLinear.apply(rows, fc1, read, native)                         # [N, 2W]

    def activate(hidden, probs):
        act = swiglu(hidden, with_gradient(probs, to_rows, to_tokens, *places))     # [N, W]
        return zero_unrouted(act, offsets) if native and torch.compiler.is_compiling() else act

    act = again(activate, again(first, x, fc1), probs)
    rows = GroupedLinear.apply(act, fc2, read, native)                              # [N, H]
    return with_gradient(rows, combine, spread, *places)


class Count(torch.autograd.Function):
    """Returns y. The backward adds `noted` to leaf.grad: once, even where y is computed twice."""
    @staticmethod
    def forward(ctx, y, leaf, noted):
        ctx.save_for_backward(noted)
        return as_no_view(y, y.shape)

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivative()
        noted, = ctx.saved_tensors
        return grad, noted.float(), None


def mlp_in_place(x, probs, indices, fc1, fc2):
    """`experts` for few tokens, in a graph without gradients: weights are read in place, and no
    tensor of fc1's rows is made.
    """
    expert_TK = indices.clamp(0, len(fc1) - 1)
    weights = upcast(take_rows(fc1, expert_TK))
    hidden = (weights * upcast(x)[:, None, None]).sum(-1)                           # [T, K, 2W]
    act = swiglu(hidden, probs[..., None])
    rows = (upcast(take_rows(fc2, expert_TK)) * act[:, :, None]).sum(-1)            # [T, K, H]
    return cast(rows.masked_fill((indices == len(fc1))[..., None], 0.0).sum(1), x.dtype)


@torch.compiler.assume_constant_result       # Dynamo of torch 2.11 would trace it as True
def is_exporting():
    return torch.compiler.is_exporting()


def is_decoding():
    """Whether this is a graph without gradients."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def holds_in_this_graph(condition):
    """Whether a condition on sizes holds. For sizes where it does not, the compiler makes another
    graph. An export has one graph, so there the answer is whether it holds for all sizes.
    """
    return (statically_known_true if is_exporting() else guard_or_false)(condition)


# WithGradient and Count call it. Every backward of forward's routed path passes one of them.
def refuse_second_derivative():
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph is True; this layer has only first derivatives")


def takes_bf16(a, b):
    """Whether a product with fp32 sums takes both as they are, in bf16: on NVIDIA's cards."""
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


precision_lock = threading.Lock()                # what it guards is global to all threads


@torch.library.custom_op(f"{namespace}::upcast_product", mutates_args=())
def upcast_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a · b in fp32 at least, also under autocast and where products may be in TF32 or bf16."""
    settings = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    with precision_lock, torch.autocast(a.device.type, enabled=False):
        found = [(setting, setting.fp32_precision) for setting in settings]
        lowered = [(setting, low) for setting, low in found if low not in ("ieee", "none")]
        try:
            for setting, _ in lowered:
                setting.fp32_precision = "ieee"
            if takes_bf16(a, b):
                return multiply_bf16(a, b, out_dtype)
            return (upcast(a) @ upcast(b)).to(out_dtype)
        finally:
            for setting, low in lowered:
                setting.fp32_precision = "none"          # now it is inherited
                if setting.fp32_precision != low:
                    setting.fp32_precision = low


upcast_product.register_fake(
    lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype))


def flops(a, b, *_, out_shape, **__):
    """What torch.utils.flop_counter counts for a · b, of matrices or batches of them."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


ops = getattr(torch.ops, namespace)
for product in (torch.ops.aten._grouped_mm, ops.loop_over_experts, ops.upcast_product):
    if product not in flop_registry:
        register_flop_formula(product)(flops)


class Logits(torch.autograd.Function):
    """x [T, H] · router [E, H]ᵀ in fp32 at least. x is kept in its dtype, without an fp32 copy."""
    @staticmethod
    def forward(ctx, x, router):
        ctx.save_for_backward(x, router)
        return upcast_product(x, router.t(), torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def backward(ctx, grad):
        x, router = ctx.saved_tensors
        grad_x = grad_router = None
        factor, weights = grad, router
        in_parts = takes_bf16(x, router)
        if in_parts:                             # so that x and its gradient stay in bf16
            factor, weights = in_bf16_parts(grad), router.repeat(3, 1)
        if ctx.needs_input_grad[0]:
            grad_x = upcast_product(factor, weights, x.dtype)
        if ctx.needs_input_grad[1]:
            grad_router = upcast_product(factor.t(), x, grad.dtype)
            if in_parts:
                grad_router = grad_router.view(3, *router.shape).sum(0)
            grad_router = grad_router.to(router.dtype)
        return grad_x, grad_router


def logits_of(x, router):
    """x [T, H] -> [T, E]"""
    # For one token an op's call, and its copy of the weight in fp32, take longer than the product
    # that the compiler writes.
    if is_decoding() and holds_in_this_graph(x.shape[0] == 1):
        return (upcast(x)[:, None] * upcast(router)).sum(-1)
    return Logits.apply(x, router)


class Pick(torch.autograd.Function):
    """scores[t, indices[t, k]]. The backward also returns the gradient of the balance loss
    Σ_e factors[e] · Σ_t all_scores[t, e], as if it had been added to the main loss.
    """
    @staticmethod
    def forward(ctx, scores, indices, all_scores, factors):
        ctx.save_for_backward(indices, factors)
        ctx.shape = scores.shape
        return scores.gather(1, indices)

    @staticmethod
    def backward(ctx, grad):
        indices, factors = ctx.saved_tensors
        # A scatter would do, but Inductor's may be read too early on a CPU (pytorch #185509).
        column_E = torch.arange(ctx.shape[1], device=grad.device)
        grad_scores = 0.0
        for index_T1, grad_T1 in zip(indices.split(1, 1), grad.split(1, 1)):
            grad_scores = grad_scores + torch.where(index_T1 == column_E, grad_T1, 0.0)
        return grad_scores, None, None if factors is None else factors.expand(ctx.shape), None


def check_groups(number, best, members, num_experts, topk):
    if members is None and type(best) is int and best > 0:
        members = topk // best
    groups = number, best, members
    if [type(n) for n in groups] == [int] * 3 and number > 0 and num_experts % number == 0:
        size = num_experts // number
        if topk <= best * size <= num_experts and 1 <= members <= size:
            return groups
    raise ValueError(
        f"num_groups, group_topk and group_score_topk are {groups}; needs integers: a divisor of "
        f"{num_experts} experts; how many groups are best, which hold topk, {topk}, of them; how "
        "many scores of a group are summed, by default topk // group_topk")


def only_best_groups(scores, groups, best, members):
    """scores [T, E], -inf outside of each token's best groups, by the sum of a group's best."""
    T, E = scores.shape
    scores_TGe = scores.reshape(T, groups, E // groups)
    best_Tb = scores_TGe.topk(members).values.sum(-1).topk(best).indices
    group_G = torch.arange(groups, device=scores.device)
    kept_TG = (best_Tb[:, :, None] == group_G).any(1)
    return scores_TGe.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


class MoE(nn.Module):
    """x [.., H] -> the same shape and dtype: y_t = Σ_k p_tk · expert(x_t), plus shared(x_t).

    The arguments are fields of moe.MoEConfig, where a balance loss also needs load_balancing_type.

    score_function: "softmax" or "sigmoid" (arXiv 2412.19437) of the logits.
    enable_expert_bias: a bias in fp32 that changes the choice but not the probs, see finish_step.
    aux_loss_coeff: of the balance loss, coeff · E / (K·T²) · Σ_e n_e · Σ_t scores[t, e], where n_e
      is how many tokens have e among the top K of their logits (arXiv 2101.03961). In training
      the backward adds its gradient, so do not add the loss yourself. Multiply the coefficient by
      what you multiply the main loss by, such as 1 / microbatches or a GradScaler's scale.
    shared_expert_intermediate_size: W of a shared expert, which computes every token.
    shared_expert_gate: the shared expert's output times sigmoid(shared_gate · x).
    norm_topk_prob: False: the probs are the chosen scores, softmax over all E or sigmoid. True:
      these divided by their sum. None, for softmax: a softmax over the chosen logits, which is what
      True gives but keeps less for the backward; for sigmoid: True if K > 1.
    scaling_factor: of the probs; None is 1.
    num_groups, group_topk, group_score_topk: the experts are in equal groups, one after the other,
      and a token has experts of its best groups, by the sum of a group's best scores: how many
      groups, how many of them are best, how many scores are summed (K // group_topk by default).
      DeepSeek-V3 (arXiv 2412.19437): 8, 4, 2.

    Under autocast the experts' products are in its dtype. Logits, scores, activations and the sum
    over a token's experts are in fp32 at least; the shared expert's gate, and the sum with its
    output, are in the dtype of x. On H100 and B200 in bf16, with H and W in multiples of 8 and E
    below 1024, nothing waits for the card. Elsewhere on a card a forward syncs once, and a step has
    up to 6·E launches of products, in eager mode 7·E; moe.py's layer has 6 or 7, and no sync where
    Triton runs. x must be finite, at padding too.

    Compiled with fullgraph=True it is one graph for a fixed shape. For x [T, H] there are at most
    four over all T from 1 on, without gradients five. With more axes each counts by itself, and the
    compiler's limit is 8: if more than one changes, compile with dynamic=True too.
    """
    expert_bias: Tensor | None

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_experts: int, topk: int,
        score_function: str = "softmax", enable_expert_bias: bool = False,
        aux_loss_coeff: float = 0.0, shared_expert_intermediate_size: int | None = None, *,
        shared_expert_gate: bool = False, norm_topk_prob: bool | None = None,
        scaling_factor: float | None = None, num_groups: int | None = None,
        group_topk: int | None = None, group_score_topk: int | None = None,
    ):
        super().__init__()
        if score_function not in ("softmax", "sigmoid"):
            raise ValueError(f'score_function is {score_function!r}; needs "softmax" or "sigmoid"')
        if not (type(topk) is int and 1 <= topk <= num_experts):
            raise ValueError(
                f"topk is {topk}; needs an integer from 1 to {num_experts}, the number of experts")
        if topk == 1 and (norm_topk_prob or norm_topk_prob is None and score_function == "softmax"):
            raise ValueError(
                f"topk is 1 and norm_topk_prob is {norm_topk_prob}: the one prob is always 1, so "
                "the router would not learn; needs norm_topk_prob=False, or None with \"sigmoid\"")
        self.topk, self.score_function, self.norm_topk_prob = topk, score_function, norm_topk_prob
        self.scaling_factor = 1.0 if scaling_factor is None else scaling_factor
        self.aux_loss_coeff = aux_loss_coeff
        for name in ("scaling_factor", "aux_loss_coeff"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; needs a finite number")
        given = num_groups, group_topk, group_score_topk
        self.groups = None if given == (None,) * 3 else check_groups(*given, num_experts, topk)
        if shared_expert_gate and not shared_expert_intermediate_size:
            raise ValueError("shared_expert_gate is True; needs shared_expert_intermediate_size")
        E, H, W, Ws = num_experts, hidden_size, ffn_hidden_size, shared_expert_intermediate_size
        new = lambda *shape: nn.Parameter(torch.empty(shape))
        self.router = new(E, H)
        self.fc1 = new(E, 2, W, H)                                             # gate and up
        self.fc2 = new(E, H, W)
        self.shared_fc1 = new(2, Ws, H) if Ws else None
        self.shared_fc2 = new(H, Ws) if Ws else None
        self.shared_gate = new(1, H) if shared_expert_gate else None
        bias = torch.empty(E, dtype=torch.float32) if enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        # Counts [E] and T · balance loss are the gradient of a leaf. It is no parameter, since an
        # optimizer would change it, and no buffer, since DDP would overwrite it by rank 0's.
        self.leaf = torch.empty(E + 1, dtype=torch.float32, device="meta")
        self._place_counts()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew; bias and counts are 0."""
        for weight in self.parameters():
            weight.normal_(std=0.02)
        for buffer in self.buffers():
            buffer.zero_()
        self._empty()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """padding_mask [..] bool: tokens with True get no routed expert and are not counted."""
        E, H, W = self.fc2.shape
        dtype = self.fc2.dtype
        # Autocast casts no fp64, so if x or the weights are in fp64, nothing is cast. The meta
        # device has no autocast.
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        casts = autocast and torch.float64 not in (x.dtype, dtype)
        if x.dtype != dtype and not (casts and x.is_floating_point()):
            raise ValueError(f"x is {x.dtype}; needs {dtype}")
        self._check_shapes(x, padding_mask)
        x_TH = x.flatten(0, -2)
        probs, indices, balance = self._route(x, padding_mask)
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
        # F.grouped_mm also needs weights and strides at multiples of 16 bytes: not checked.
        fits = dtype == torch.bfloat16 and H % 8 == W % 8 == 0 and E < 1024 and len(x_TH) > 0
        native = fits and native_product(x.device) != "none"
        places = sort_by_expert(indices, E)
        x_TH, fc1, fc2 = [cast(z, dtype) for z in (x_TH, self.fc1.flatten(1, 2), self.fc2)]
        # A sort pays with more assignments than `most`. On a card nobody has measured how many.
        most = 2 * E if x.is_cpu else E // 2
        if is_decoding() and holds_in_this_graph(indices.numel() <= most):
            y = mlp_in_place(x_TH, probs, indices, fc1, fc2)
        else:
            y = experts(x_TH, probs, fc1, fc2, places, native)
        y = as_no_view(y.to(x.dtype), x.shape)
        if self.shared_fc1 is not None:
            hidden = F.linear(x, self.shared_fc1.flatten(0, 1))
            shared = F.linear(again(swiglu, hidden), self.shared_fc2).to(x.dtype)
            if self.shared_gate is not None:
                shared = (shared * torch.sigmoid(F.linear(x, self.shared_gate))).to(x.dtype)
            y = y + shared
        self._place_counts()
        if self.training and y.requires_grad:
            counts = rows_of_each(places[-1])
            balance = counts.new_zeros(1) if balance is None else balance[None]
            y = Count.apply(y, self.leaf, torch.cat((counts, balance)))
        return y

    def route(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [.., H], padding_mask [..] -> (probs [T, K], indices [T, K]); index E is unrouted."""
        self._check_shapes(x, padding_mask)
        return self._route(x, padding_mask)[:2]

    def _check_shapes(self, x, padding_mask):
        H = self.router.shape[1]
        if x.ndim < 2 or x.shape[-1] != H:
            raise ValueError(f"x has shape {list(x.shape)}; needs [.., T, {H}]")
        if padding_mask is not None:
            found, needed = (padding_mask.dtype, padding_mask.shape), (torch.bool, x.shape[:-1])
            if found != needed:
                raise ValueError(f"padding_mask is {found}; needs {needed}")

    def _route(self, x, padding_mask):
        """(probs, indices, T · balance loss / aux_loss_coeff or None)"""
        E, K = self.router.shape[0], self.topk
        padding = None if padding_mask is None else padding_mask.flatten()
        logits = logits_of(x.flatten(0, -2), self.router)
        sigmoid = self.score_function == "sigmoid"
        score = torch.sigmoid if sigmoid else lambda z: z.softmax(-1)
        ranked = logits
        if self.expert_bias is not None or self.groups is not None:
            ranked = score(logits.detach())
            if self.expert_bias is not None:
                ranked = ranked + self.expert_bias
            if self.groups is not None:
                ranked = only_best_groups(ranked, *self.groups)
        indices = ranked.topk(K).indices
        all_scores = factors = balance = None
        if self.aux_loss_coeff and self.training and torch.is_grad_enabled():
            all_scores = score(logits)
            if sigmoid:
                all_scores = all_scores / (all_scores.sum(-1, keepdim=True) + 1e-20)
            best = indices if ranked is logits else logits.topk(K).indices
            if padding is not None:
                best = best.masked_fill(padding[:, None], E)
                all_scores = all_scores.masked_fill(padding[:, None], 0.0)
            n_E = rows_of_each(sort_by_expert(best, E)[2]).to(logits.dtype)
            T = (n_E.sum() / K).clamp(min=1)
            factors = n_E / T / T * (self.aux_loss_coeff * E / K)
            balance = (n_E * sum_tokens(all_scores.detach())).sum() / T * (E / K)
        norm = self.norm_topk_prob
        over_chosen = norm is None and not sigmoid
        probs = Pick.apply(logits if over_chosen else score(logits), indices, all_scores, factors)
        if over_chosen:
            probs = probs.softmax(-1)
        elif norm or norm is None and K > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        if self.scaling_factor != 1.0:
            probs = probs * self.scaling_factor
        if padding is not None:
            probs = probs.masked_fill(padding[:, None], 0.0)
            indices = indices.masked_fill(padding[:, None], E)
        return probs, indices, balance

    @property
    def counts(self) -> Tensor:
        """[E] in fp32: tokens of each expert since finish_step, exact up to 2**24 on each rank."""
        return self.noted[:-1]

    @property
    def max_violation(self) -> Tensor:
        """max_e n_e / mean n - 1 of the counts (arXiv 2408.15664); NaN if nothing is counted."""
        return self.counts.amax() * len(self.counts) / self.counts.sum() - 1

    @property
    def balance_loss(self) -> Tensor:
        """Over the counted tokens, without the coefficient: 1 for an even load, NaN for no tokens,
        0 if aux_loss_coeff is 0.
        """
        return self.noted[-1] * self.topk / self.counts.sum()

    @torch.no_grad()
    def finish_step(self, rate: float = 1e-3, group=None) -> None:
        """Ends a training step: call it after the optimizer's step. An expert bias rises for an
        expert with few tokens, falls for one with many (arXiv 2408.15664). The counts begin anew.

        A forward is counted in its .backward(); torch.autograd.grad and .backward(inputs=..) count
        nothing. group: the ranks that train the same weights, whose counts are summed.
        """
        if self.expert_bias is None:
            return self._empty()
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if group is None and ranks > 1:
            raise RuntimeError(
                f"group is None and {ranks} ranks run: their biases would drift apart; needs the "
                "ranks that train this model: torch.distributed.group.WORLD if all do, a group of "
                "one rank if it trains alone")
        if self.noted._version == self.counted_at:   # the values would need a sync
            warnings.warn(
                "no backward has counted on this rank since the last finish_step: a forward in "
                "train() is counted in its .backward(), not by torch.autograd.grad", stacklevel=3)
        counts = self.counts.long()
        if group is not None:
            dist.all_reduce(counts, group=group)
        self.expert_bias = self.expert_bias.float()          # assign=True may have loaded bf16
        self.expert_bias += rate * (counts.sum() - counts * len(counts)).sign().float()
        self._empty()

    def _empty(self):
        self.noted.zero_()
        self.counted_at = self.noted._version

    def extra_repr(self) -> str:
        E, H, W = self.fc2.shape
        options = dict(
            score_function="softmax", aux_loss_coeff=0.0, norm_topk_prob=None, scaling_factor=1.0)
        chosen = dict(hidden_size=H, ffn_hidden_size=W, num_experts=E, topk=self.topk)
        chosen |= {name: getattr(self, name) for name in options}
        if self.shared_fc1 is not None:
            chosen["shared_expert_intermediate_size"] = self.shared_fc1.shape[1]
        if self.groups is not None:
            chosen |= zip(("num_groups", "group_topk", "group_score_topk"), self.groups)
        chosen["enable_expert_bias"] = None if self.expert_bias is None else True
        chosen["shared_expert_gate"] = None if self.shared_gate is None else True
        return ", ".join(f"{k}={v!r}" for k, v in chosen.items() if v != options.get(k))

    @torch.compiler.assume_constant_result           # a graph runs this while it is traced
    def _place_counts(self) -> None:
        """Brings the counts to the weights' device: fully_shard moves weights without _apply. From
        the meta device, which has no values, they begin with 0.
        """
        device, old = self.router.device, self.leaf
        if old.grad is None or old.device != device:
            with torch.inference_mode(False):                # else training could not add to them
                leaf = torch.zeros_like(old, device=device, requires_grad=True)
                leaf.grad = torch.zeros_like(leaf) if old.is_meta else old.grad.to(device)
            torch._dynamo.mark_static(leaf)      # else a graph may tie its length to x's
            self.leaf, self.noted, self.counted_at = leaf, leaf.grad, None

    def __setstate__(self, state):                       # pickle leaves out the gradient of a leaf
        super().__setstate__(state)
        self.leaf.grad, self.counted_at = self.noted, None

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self._place_counts()                             # assign=True may bring another device
        self._empty()                                    # counts are of the old weights and bias

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        self._place_counts()
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)      # stays in fp32
        return self
