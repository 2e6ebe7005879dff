"""Tests of check.py: it passes what is right, and flags planted mistakes.

    python -m pytest test_check.py
"""
import argparse
import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import check
import kernels
import maps
import moe
import small
from check import Row, check_experts, check_router
from test_moe import (
    DEVICE, compiled, error, fresh_start, needs, on_a_card, on_device, slow, slow_but)

HERE = Path(__file__).resolve().parent


def by_expert(x, probs, indices, fc1, fc2):
    """The textbook: for each expert, the rows of its tokens."""
    y = torch.zeros_like(x)
    for e in range(len(fc1)):
        t, k = (indices == e).nonzero(as_tuple=True)
        gate, up = (x[t] @ fc1[e].t()).chunk(2, -1)
        rows = F.silu(gate) * up @ fc2[e].t() * probs[t, k, None]
        y = y.index_add(0, t, rows.to(x.dtype))
    return y


def expert_mlp(x, probs, indices, fc1, fc2):
    E, _, H = fc1.shape
    plan = kernels.plan_permutation(indices, E)
    return kernels.expert_mlp(x, probs, plan, fc1.view(E, 2, -1, H), fc2)


def small_experts(x, probs, indices, fc1, fc2):
    places = small.sort_by_expert(indices, len(fc1))
    return small.experts(x, probs, fc1, fc2, places, native=False)


def moe_layer(x, probs, indices, fc1, fc2):
    """MoELayer, with a router that gives these probs and indices."""
    E, F2, H = fc1.shape
    config = moe.MoEConfig(
        H, F2 // 2, E, topk=indices.shape[1], pre_softmax=True, params_dtype=x.dtype)
    layer = moe.MoELayer(config)
    layer.router.forward = lambda *args, **kwargs: (probs, indices)
    weights = {"experts.fc1": fc1.view(E, 2, -1, H), "experts.fc2": fc2}
    return torch.func.functional_call(layer, weights, (x,))


@pytest.mark.parametrize("function, dtype", slow_but([
    (expert_mlp, torch.float32), (small_experts, torch.bfloat16)], [
    *[(expert_mlp, dtype) for dtype in check.DTYPES.values()], (by_expert, torch.float32),
    (by_expert, torch.bfloat16), (moe_layer, torch.float32), (moe_layer, torch.bfloat16),
    (small_experts, torch.float32), (small_experts, torch.bfloat16),
    (compiled(expert_mlp, "inductor"), torch.float32),
    *[(check.expert_loop, dtype) for dtype in check.DTYPES.values()]]))
def test_check_passes_right_experts(function, dtype, capsys):
    rows = check_experts(function, dtype, DEVICE)
    assert [row.case for row in rows] == list(check.EXPERT_CASES)
    assert [*rows[0].ratios] == ["y", "grad x", "grad probs", "grad fc1", "grad fc2"]
    assert not any(row.wrong or row.refused for row in rows), capsys.readouterr().out


def swapped(x, probs, indices, fc1, fc2):
    up, gate = fc1.chunk(2, 1)
    return by_expert(x, probs, indices, torch.cat((gate, up), 1), fc2)


def loses_last_row(x, probs, indices, fc1, fc2):
    last = indices.flatten().sort(stable=True).indices[-1:]
    lost = torch.zeros(indices.numel(), dtype=torch.bool).index_fill(0, last, True)
    return by_expert(x, probs, indices.masked_fill(lost.view_as(indices), len(fc1)), fc1, fc2)


def repeats_count_once(x, probs, indices, fc1, fc2):
    again = (indices[:, 1:] == indices[:, :1]).nonzero(as_tuple=True)
    indices = indices.clone()
    indices[:, 1:][again] = len(fc1)
    return by_expert(x, probs, indices, fc1, fc2)


def clamps(x, probs, indices, fc1, fc2):
    """Unrouted assignments are computed by a real expert."""
    return by_expert(x, probs, indices.clamp(max=len(fc1) - 1), fc1, fc2)


def multiplies_by_zero(x, probs, indices, fc1, fc2):
    """Every expert computes every token; what is not chosen is multiplied by 0."""
    one_hot = F.one_hot(indices, len(fc1) + 1)[..., :-1].to(probs.dtype)
    weights = (one_hot * probs[..., None]).sum(1).to(x.dtype)
    gate, up = torch.einsum("th,efh->etf", x, fc1).chunk(2, -1)
    return torch.einsum("te,etf,ehf->th", weights, F.silu(gate) * up, fc2)


def ignores_strides(x, probs, indices, fc1, fc2):
    fc1, fc2 = [torch.as_strided(w, w.shape, torch.empty_like(
        w, memory_format=torch.contiguous_format).stride()) for w in (fc1, fc2)]
    return by_expert(x, probs, indices, fc1, fc2)


def ignores_strides_of_x(x, probs, indices, fc1, fc2):
    H = x.shape[1]
    return by_expert(torch.as_strided(x, x.shape, (H, 1)), probs, indices, fc1, fc2)


def adds_in_fp16(x, probs, indices, fc1, fc2):
    return sum(
        by_expert(x, probs[:, k:k + 1], indices[:, k:k + 1], fc1, fc2).half()
        for k in range(indices.shape[1])).to(x.dtype)


def no_gradient_to_probs(x, probs, *args):
    return by_expert(x, probs.detach(), *args)


def prob_before_activation(x, probs, indices, fc1, fc2):
    return sum(
        by_expert(x * probs[:, k, None].to(x.dtype), torch.ones_like(probs[:, k:k + 1]),
                  indices[:, k:k + 1], fc1, fc2) for k in range(indices.shape[1]))


def normalises(x, probs, *args):
    return by_expert(x, probs / probs.sum(1, keepdim=True).clamp(min=1e-9), *args)


def too_few_experts(x, probs, indices, fc1, fc2):
    """One with the largest number is never computed."""
    return by_expert(x, probs, indices, fc1[:-1], fc2[:-1])


class GradientOfX(torch.autograd.Function):
    """The gradient of x is that of the first choice alone."""
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.function(grad), None


def random_gradient(x, *args):
    noise = lambda grad: grad * (1 + 1e-3 * torch.rand_like(grad))
    return by_expert(GradientOfX.apply(x, noise), *args)


def forgets_to_add(x, probs, indices, fc1, fc2):
    """y is stored, not added: the last choice of a token wins."""
    return by_expert(x, probs[:, -1:], indices[:, -1:], fc1, fc2)


def first_block_of_h(x, probs, indices, fc1, fc2):
    """A product that stops after its first 256 columns."""
    mask = (torch.arange(x.shape[1], device=x.device) < 256).to(x.dtype)
    return by_expert(x * mask, probs, indices, fc1, fc2)


def first_block_of_f(x, probs, indices, fc1, fc2):
    mask = (torch.arange(fc2.shape[2], device=x.device) < 256).to(x.dtype)
    return by_expert(x, probs, indices, fc1, fc2 * mask)


def first_block_of_rows(x, probs, indices, fc1, fc2):
    """An expert that computes its first 256 rows alone."""
    place = F.one_hot(indices.flatten(), len(fc1) + 1).cumsum(0)
    place = place.gather(1, indices.flatten()[:, None]).view_as(indices)
    return by_expert(x, probs, indices.masked_fill(place > 256, len(fc1)), fc1, fc2)


def six_choices(x, probs, indices, fc1, fc2):
    return by_expert(x, probs[:, :6], indices[:, :6], fc1, fc2)


def ids_in_seven_bits(x, probs, indices, fc1, fc2):
    return by_expert(x, probs, indices.masked_fill(indices > 127, len(fc1)), fc1, fc2)


def ids_in_a_byte(x, probs, indices, fc1, fc2):
    return by_expert(x, probs, indices.to(torch.uint8).long(), fc1, fc2)


class Workspace(torch.autograd.Function):
    """What the backward needs lies in one buffer for all forwards."""
    buffers = {}

    @staticmethod
    def forward(ctx, x):
        ctx.buffer = Workspace.buffers.setdefault(x.shape, torch.empty_like(x))
        ctx.buffer.copy_(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.buffer.cos()


def static_workspace(x, *args):
    return by_expert(Workspace.apply(x).asin().where(x.abs() < 1.5, x), *args)


def writes_to_its_input(x, probs, indices, fc1, fc2):
    y = by_expert(x.clone(), probs, indices.clone(), fc1, fc2)
    indices.fill_(0)
    return y


def narrow(x, probs, indices, fc1, fc2):
    return by_expert(x, probs, indices, fc1, fc2)[:, :-1]


def wrong_under_no_grad(*args):
    return by_expert(*args) * (1 if torch.is_grad_enabled() else 2)


def wrong_when_decoding(x, *args):
    return by_expert(x, *args) * (2 if len(x) == 1 and not torch.is_grad_enabled() else 1)


def needs_gradient_of(needed, lost):
    """Where the first of x, probs, fc1, fc2 needs no gradient, the second gets none either."""
    def function(x, probs, indices, fc1, fc2):
        tensors = dict(x=x, probs=probs, fc1=fc1, fc2=fc2)
        if torch.is_grad_enabled() and not tensors[needed].requires_grad:
            tensors[lost] = tensors[lost].detach()
        return by_expert(**tensors, indices=indices)
    function.__name__ = f"needs_gradient_of_{needed}_for_{lost}"
    return function


class Backward(torch.autograd.Function):
    """The identity, whose backward does something to the gradient."""
    @staticmethod
    def forward(ctx, y, function):
        ctx.function = function
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return ctx.function(grad), None


def as_rows(z):
    return torch.as_strided(z, z.shape, (z.shape[1], 1))


def ignores_strides_of_probs(x, probs, indices, fc1, fc2):
    return by_expert(x, as_rows(probs), indices, fc1, fc2)


def ignores_strides_of_indices(x, probs, indices, fc1, fc2):
    if indices.stride(1) > 1:                          # as those of the other cases are not
        indices = as_rows(indices)
    return by_expert(x, probs, indices, fc1, fc2)


def ignores_strides_of_the_gradient(*args):
    return Backward.apply(by_expert(*args), as_rows)


def takes_rows_to_be_dense(x, *args):
    """It looks at the last stride alone."""
    return by_expert(as_rows(x) if x.stride(1) == 1 else x, *args)


def reads_beyond_columns(x, probs, indices, fc1, fc2):
    """Columns beyond the last are multiplied by 0."""
    if x.stride(0) > x.shape[1] and x.stride(1) == 1:
        H = x.shape[1]
        beyond = torch.as_strided(x.detach(), (len(x), 1), x.stride(), x.storage_offset() + H)
        x = x + 0 * beyond
    return by_expert(x, probs, indices, fc1, fc2)


def first_tokens(limit):
    def function(x, *args):
        return by_expert(x, *args) * (torch.arange(len(x)) < limit)[:, None]
    function.__name__ = f"first_{limit}_tokens"
    return function


def first_400_rows(x, probs, indices, fc1, fc2):
    place = F.one_hot(indices.flatten(), len(fc1) + 1).cumsum(0)
    place = place.gather(1, indices.flatten()[:, None]).view_as(indices)
    return by_expert(x, probs, indices.masked_fill(place > 400, len(fc1)), fc1, fc2)


def first_300_columns(x, *args):
    return by_expert(x, *args) * (torch.arange(x.shape[1]) < 300)


def first_512_of_f(x, probs, indices, fc1, fc2):
    mask = (torch.arange(fc2.shape[2]) < 512).to(x.dtype)
    return by_expert(x, probs, indices, fc1, fc2 * mask)


def loses_expert_128(x, probs, indices, fc1, fc2):
    return by_expert(x, probs, indices.masked_fill(indices == 128, len(fc1)), fc1, fc2)


def loses_full_blocks(x, probs, indices, fc1, fc2):
    """The last block of 64 rows, where it is full."""
    place = F.one_hot(indices.flatten(), len(fc1) + 1).cumsum(0)
    rows = place[-1] if len(place) else place.sum(0)
    place = place.gather(1, indices.flatten()[:, None]).view_as(indices)
    lost = (rows % 64 == 0)[indices] & (place > rows[indices] - 64)
    return by_expert(x, probs, indices.masked_fill(lost, len(fc1)), fc1, fc2)


def takes_one_choice_to_be_sorted(x, probs, indices, fc1, fc2):
    return by_expert(x, probs, indices.sort(0).values if probs.shape[1] == 1 else indices, fc1, fc2)


def divides_by_no_rows(x, probs, indices, fc1, fc2):
    routed = (indices < len(fc1)).sum()
    return by_expert(x, probs, indices, fc1, fc2) * routed / routed


def cached_by(key, what="fc1"):
    """What is made ready once for each key: a weight for the product, or the indices."""
    def function(x, probs, indices, fc1, fc2):
        tensors = dict(fc1=fc1, fc2=fc2, indices=indices)
        z = tensors[what]
        known = function.cache.setdefault((*z.shape, key(z)), (z, z.detach().clone()))[1]
        tensors[what] = z + (known - z.detach())         # the old values, the gradient of today
        return by_expert(x, probs, **tensors)
    function.cache, function.__name__ = {}, f"cached_{what}"
    return function


cached_by_address = cached_by(lambda z: z.data_ptr())
indices_cached_by_address = cached_by(lambda z: z.data_ptr(), "indices")
cached_by_address_and_version = cached_by(lambda z: (z.data_ptr(), z._version), "fc2")
cached_by_object = cached_by(id)


def writes_to_the_gradient(*args):
    return Backward.apply(by_expert(*args), lambda grad: grad.clone() + 0 * grad.zero_())


def writes_to_x_in_the_backward(x, *args):
    return Backward.apply(by_expert(x.clone(), *args), lambda grad: (x.data.zero_(), grad)[1])


def writes_to_fc2(x, probs, indices, fc1, fc2):
    y = by_expert(x, probs, indices, fc1.clone(), fc2.clone())
    fc2.data.zero_()
    return y


def scales_x_in_place(x, *args):
    return by_expert(x.mul_(2), *args) / 2              # refused where x is a leaf with a gradient


def writes_to_probs(x, probs, indices, fc1, fc2):
    y = by_expert(x, probs.clone(), indices, fc1, fc2)
    probs.data.div_(2)
    return y


def gradient_adds_up(x, probs, *args):
    """The buffer of the probs' gradient is not emptied between steps."""
    def back(grad):
        sums[key] = sums.get(key, 0) + grad
        return sums[key]
    key, sums = (probs.shape, probs.data_ptr()), gradient_adds_up.sums
    return by_expert(x, Backward.apply(probs, back), *args)


gradient_adds_up.sums = {}


ALL, MANY = "random routing", "all tokens to one expert"
WRONG = [
    (swapped, ALL, "y"), (loses_last_row, ALL, "y"), (no_gradient_to_probs, ALL, "grad probs"),
    (repeats_count_once, "a token names an expert twice", "y"),
    (clamps, "unrouted assignments (index E)", "grad probs"),
    (multiplies_by_zero, "NaN in tokens without experts", "grad fc1"),
    (ignores_strides, "transposed weights", "y"),
    (ignores_strides_of_x, "tokens are a strided view", "y"),
    (adds_in_fp16, "large values", "y"), (prob_before_activation, ALL, "y"),
    (normalises, ALL, "y"), (too_few_experts, "all tokens to one expert", "y"),
    (random_gradient, ALL, "grad x"), (forgets_to_add, ALL, "y"), (narrow, ALL, "y"),
    (first_block_of_h, "several blocks of each size", "y"),
    (first_block_of_f, "several blocks of each size", "y"),
    (first_block_of_rows, "several blocks of each size", "y"),
    (six_choices, "K = 12, each of 520 experts", "y"),
    (ids_in_seven_bits, "K = 12, each of 520 experts", "y"),
    (ids_in_a_byte, "K = 12, each of 520 experts", "y"),
    (static_workspace, ALL, "grad x"), (writes_to_its_input, ALL, "y"),
    (wrong_under_no_grad, "under no_grad", "y"),
    (wrong_when_decoding, "one token under no_grad", "y"),
    (needs_gradient_of("x", "fc1"), "gradients of the weights alone", "grad fc1"),
    (needs_gradient_of("x", "probs"), "gradients of probs and fc2 alone", "grad probs"),
    (needs_gradient_of("fc1", "x"), "gradients of x and probs alone", "grad x"),
    (needs_gradient_of("fc2", "fc1"), "gradients of x and fc1 alone", "grad fc1"),
    (needs_gradient_of("probs", "x"), "gradients of x and fc1 alone", "grad x"),
    (ignores_strides_of_probs, "probs are a strided view", "y"),
    (ignores_strides_of_indices, "probs are a strided view", "y"),
    (ignores_strides_of_the_gradient, "a strided gradient", "grad fc2"),
    (takes_rows_to_be_dense, "columns of wider tensors", "y"),
    (reads_beyond_columns, "columns of wider tensors", "y"),
    *[(first_tokens(limit), MANY, "y") for limit in (512, 1024, 2048)],
    (first_400_rows, MANY, "y"), (first_300_columns, "wide tokens and experts", "y"),
    (first_512_of_f, "wide tokens and experts", "y"),
    (loses_expert_128, "K = 12, each of 520 experts", "grad probs"),
    (loses_full_blocks, "64 tokens for each expert", "y"),
    (takes_one_choice_to_be_sorted, "64 tokens for each expert", "y"),
    (divides_by_no_rows, "all assignments unrouted", "y"),
    *[(function, "inputs changed in place", "y")
      for function in (cached_by_address, indices_cached_by_address, cached_by_object)],
    (cached_by_address_and_version, "new inputs at the old addresses", "y"),
    (writes_to_the_gradient, ALL, "y"), (writes_to_x_in_the_backward, ALL, "y"),
    (scales_x_in_place, "under no_grad", "y"), (writes_to_fc2, ALL, "y"),
    (writes_to_probs, ALL, "y"), (gradient_adds_up, ALL, "grad probs"),
]


@pytest.mark.parametrize("function, case, result, dtype", slow_but(
    [(*planted, torch.float32) for planted in WRONG],
    [(*planted, dtype) for planted in WRONG for dtype in (torch.float32, torch.bfloat16)
     if planted[0] != random_gradient or dtype == torch.float32]))     # 0.1 %: bf16 rounds more
def test_check_flags_planted_mistakes(function, case, result, dtype, capsys):
    """In the case that is there for it, and --case shows a row with both values."""
    [row] = check_experts(function, dtype, DEVICE, case=case)
    printed = capsys.readouterr().out
    assert row.wrong and row.ratios[result] > check.WRONG, printed
    assert any(text in printed for text in (
        f"{result}[", f"{result} has shape", "its inputs are changed: ")), printed


KNOBS = [
    {}, dict(topk=4), dict(topk=1, pre_softmax=True), dict(pre_softmax=True),
    dict(norm_topk_prob=False), dict(pre_softmax=True, norm_topk_prob=True, norm_eps=1e-2),
    dict(score_function="sigmoid"), dict(score_function="sigmoid", topk=1, num_experts=6),
    dict(score_function="sqrtsoftplus", topk=3, norm_topk_prob=False, scaling_factor=1.5),
    dict(score_function="sigmoid", topk=4, num_experts=32, num_groups=4, group_topk=2,
         scaling_factor=2.5),
    dict(topk=6, num_groups=4, group_topk=3, group_score_topk=1, num_experts=32),
    dict(score_function="sqrtsoftplus", topk=4, num_groups=4, group_topk=2, norm_eps=1e-6),
]


def route(logits, bias, topk=2, pre_softmax=False, num_experts=None, dense=True, **knobs):
    return maps.topk_routing_with_score_function(
        logits, topk, use_pre_softmax=pre_softmax, expert_bias=bias, dense_output=dense, **knobs)


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("dense", [False, True])
def test_check_passes_right_routers(knobs, dense, capsys):
    rows = check_router(
        lambda logits, bias: route(logits, bias, dense=dense, **knobs), with_bias=True,
        device=DEVICE, **knobs)
    assert len(rows) == 2 * len(check.router_cases(16, with_bias=False))
    assert [*rows[0].ratios] == ["choice", "probs", "gradient"]
    assert not any(row.wrong or row.refused for row in rows), capsys.readouterr().out


def test_check_takes_ties_either_way(capsys):
    """The top K of scores in place of logits: where a sigmoid saturates, a note says so. Among
    logits that are equal any choice is right."""
    def by_scores(logits, bias):
        probs, indices = logits.sigmoid().topk(2)
        return probs / (probs.sum(-1, keepdim=True) + 1e-20), indices
    rows = check_router(by_scores, score_function="sigmoid", device=DEVICE)
    assert not any(row.wrong for row in rows)
    assert "not the top logits of" in capsys.readouterr().out
    o = types.SimpleNamespace(topk=2, num_groups=None)
    assert check.is_choice([3, 1], [1.0, 2.0, 2.0, 2.0], o, slack=0)
    assert not check.is_choice([0, 1], [1.0, 2.0, 2.0, 2.0], o, slack=0)
    o = types.SimpleNamespace(topk=2, num_groups=3, group_topk=1, group_score_topk=1)
    scores = [5.0, 1.0, 5.0, 0.0, 4.0, 4.5]              # groups of two; the first two tie
    assert check.is_choice([0, 1], scores, o, slack=0)
    assert check.is_choice([3, 2], scores, o, slack=0)
    assert not check.is_choice([0, 2], scores, o, slack=0)
    assert not check.is_choice([4, 5], scores, o, slack=0)


def test_check_passes_unusual_routers():
    """A sigmoid by hand, indices in int32, unsorted, logits changed in place."""
    def unusual(logits, bias):
        logits.add_(0.0)
        scores = 1 / (1 + (-logits).exp())
        indices = logits.topk(2, sorted=False).indices.flip(1)
        probs = scores.gather(1, indices)
        return probs / (probs.sum(-1, keepdim=True) + 1e-20), indices.int()
    rows = check_router(unusual, score_function="sigmoid", device=DEVICE)
    # 1 / (1 + exp(60)) has lost its gradient in fp32: the one case that is rightly wrong.
    assert [row.case for row in rows if row.wrong or row.refused] == ["far below zero (minus 60)"]


def test_check_refuses_options_that_do_not_fit():
    table = {
        "score_function is 'tanh'; known: softmax, sigmoid, sqrtsoftplus": dict(
            score_function="tanh"),
        "topk is 17": dict(topk=17), "num_groups 5": dict(num_groups=5, group_topk=2),
        "group_topk None": dict(num_groups=4),
        "num_groups 0": dict(num_groups=0, group_topk=1),
        "group_topk 5": dict(num_groups=4, group_topk=5),
        "topk is 5, num_groups 8 and group_topk 2": dict(topk=5, num_groups=8, group_topk=2),
        "group_score_topk is 0 (topk // group_topk unless given)": dict(num_groups=8, group_topk=4),
        "group_score_topk is 3": dict(num_groups=8, group_topk=1, group_score_topk=3)}
    for text, options in table.items():
        assert text in error(check_router, right_route, **options)


def adds_bias_to_probs(logits, bias):
    probs, indices = (logits.sigmoid() + bias).topk(4)
    return 2.5 * probs / probs.sum(1, keepdim=True), indices


def ignores_groups(logits, bias):
    return route(logits, bias, topk=4, score_function="sigmoid", scaling_factor=2.5)


def masks_groups_by_0(logits, bias):
    """Where biased scores are negative, a masked group wins."""
    biased = logits.sigmoid() + bias
    groups = biased.unflatten(1, (4, 8)).topk(2).values.sum(2)
    kept = torch.zeros_like(groups).scatter(1, groups.topk(2).indices, 1)
    indices = (biased * kept.repeat_interleave(8, 1)).topk(4).indices
    probs = logits.sigmoid().gather(1, indices)
    return 2.5 * probs / (probs.sum(1, keepdim=True) + 1e-20), indices


def right_route(logits, bias):
    return route(logits, bias, **KNOBS[9])


def no_scaling(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs / 2.5, indices


def no_gradient(logits, bias):
    return right_route(logits.detach(), bias)


def in_bf16(logits, bias):
    return right_route(logits.bfloat16().float(), bias)


def five_experts(logits, bias):
    probs, chosen = route(logits, bias, dense=False, **KNOBS[9])
    return probs, chosen | (torch.arange(32) == 0)


def same_expert_twice(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs, indices[:, :1].expand(indices.shape)


def beyond_the_last(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs, indices + 1


def probs_beside_the_map(logits, bias):
    probs, chosen = route(logits, bias, dense=False, **KNOBS[9])
    return probs + 0.3 * ~chosen, chosen


def zeroes_the_bias(logits, bias):
    result = right_route(logits, bias)
    if bias is not None:
        bias.zero_()
    return result


def zeroes_the_logits(logits, bias):
    result = right_route(logits * 1, bias)
    logits.zero_()
    return result


def zeroes_the_gradient(logits, bias):
    probs, indices = right_route(logits, bias)
    return Backward.apply(probs, lambda grad: grad.clone() + 0 * grad.zero_()), indices


def first_1024_logits(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs * (torch.arange(len(probs)) < 1024)[:, None], indices


def ignores_strides_of_logits(logits, bias):
    return right_route(as_rows(logits), bias)


def other_probs_under_no_grad(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs if torch.is_grad_enabled() else probs * 2, indices


def loses_logit_128(logits, bias):
    return right_route(logits.masked_fill(torch.arange(logits.shape[1]) == 128, -1e4), bias)


def three_probs(logits, bias):
    probs, indices = right_route(logits, bias)
    return probs[:, :3], indices


@pytest.mark.parametrize("function, case, result", [
    (adds_bias_to_probs, "random logits, bias", "probs"),
    (ignores_groups, "random logits, bias", "choice"),
    (masks_groups_by_0, "random logits, bias", "choice"),
    (no_scaling, "random logits, bias", "probs"), (no_gradient, "random logits", "gradient"),
    (in_bf16, "nearly equal logits", "choice"), (five_experts, "random logits", "choice"),
    (same_expert_twice, "one token", "choice"), (beyond_the_last, "one token", "choice"),
    (three_probs, "one token", "probs"), (probs_beside_the_map, "one token", "choice"),
    (zeroes_the_bias, "random logits, bias", "choice"),
    (zeroes_the_logits, "random logits", "choice"),
    (zeroes_the_gradient, "random logits", "choice"),
    (first_1024_logits, "2,100 tokens", "probs"),
    (ignores_strides_of_logits, "transposed logits", "choice"),
    (other_probs_under_no_grad, "under no_grad, bias", "probs")])
def test_check_flags_planted_routers(function, case, result):
    [row] = check_router(function, **KNOBS[9], with_bias=True, device=DEVICE, case=case)
    assert row.wrong and row.ratios[result] > check.WRONG, row


def test_check_refused_is_no_mistake(capsys):
    def refuses(x, *args):
        if len(x) < 2:
            raise NotImplementedError("at least two tokens\nand more")
        return expert_mlp(x, *args)
    rows = {row.case: row for row in check_experts(refuses, device=DEVICE)}
    assert rows["one token"] == Row(
        "one token", {}, "NotImplementedError: at least two tokens", wrong=False)
    assert rows["random routing"].refused is None
    out = capsys.readouterr().out
    assert "refused: NotImplementedError: at least two tokens" in out
    assert "times the bytes of x and fc1's output" in out
    assert "torch.compile(fullgraph=True): 2 graphs for four T" in out
    assert "case is 'two'; known: random" in error(check_experts, expert_mlp, case="two")


@slow
def test_check_what_is_no_matter_of_right_and_wrong(capsys):
    def noisy(x, *args):
        return by_expert(x, *args) * (1 + 1e-6 * torch.rand(1, device=x.device))
    check_experts(noisy, device=DEVICE)
    out = capsys.readouterr().out
    assert "differs from run to run" in out and "other bits" in out

    def breaks(x, *args):
        torch._dynamo.graph_break()
        return by_expert(x, *args)
    check_experts(breaks, device=DEVICE)
    out = capsys.readouterr().out
    assert "torch.compile(fullgraph=True): Unsupported" in out and "differs" not in out


def test_check_notes_of_a_row(capsys):
    """NaN again is no difference from run to run; NaN that is replaced is a changed input."""
    [row] = check_experts(multiplies_by_zero, device=DEVICE, case="NaN in tokens without experts")
    out = capsys.readouterr().out
    assert row.wrong and "differs from run to run" not in out

    def replaces_nan(x, *args):
        x.data.nan_to_num_()
        return by_expert(x, *args)
    check_experts(replaces_nan, device=DEVICE, case="NaN in tokens without experts")
    assert "its inputs are changed" in capsys.readouterr().out
    for note in ("differs from run to run", "its inputs are changed", "a token without the others",
                 "other bits", "not the top logits of", "kept for the backward", "graphs for"):
        assert note in " ".join(check.__doc__.split()), note


def test_check_runs_on_python_3_10():
    """warnings.catch_warnings has action= from 3.11 on. (Its lines run on a card alone.)"""
    calls = [node for node in ast.walk(ast.parse(Path(check.__file__).read_text()))
             if isinstance(node, ast.Call) and "catch_warnings" in ast.unparse(node.func)]
    assert calls and not any(word.arg == "action" for call in calls for word in call.keywords)


def test_check_says_what_each_option_is(monkeypatch):
    def look(self):
        raise LookupError([action.option_strings for action in self._actions if not action.help])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", look)
    with pytest.raises(LookupError) as found:
        check.main()
    assert found.value.args == ([],)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Calls check.py as from the command line, in an empty folder: status, what is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["check.py", *args])
        try:
            check.main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code)
        return status, *capsys.readouterr()
    return call


@slow
def test_check_from_the_command_line(tmp_path, run):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def moe(x, probs, indices, fc1, fc2):\n"
        "    return x * 2\n"
        "def route(logits, bias):\n"
        "    s = logits.sigmoid() if bias is None else logits.sigmoid() + bias\n"
        "    indices = s.topk(3).indices\n"
        "    return logits.sigmoid().gather(1, indices), indices\n")
    status, out, _ = run(
        "experts", "--dtype", "bf16", "mine.py:moe", "--json", "rows.json", "--shape", *"94122")
    assert status == 1 and "wrong" in out and '"ok" covers bf16; T 2100' in out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"] for row in rows] == [*check.EXPERT_CASES, "T=9 E=4 K=1 H=2 F=2"]
    assert rows[0]["wrong"] and "Infinity" not in (tmp_path / "rows.json").read_text()
    status, out, _ = run(
        "router", "mine.py:route", "--topk", "3", "--score_function", "sigmoid", "--with_bias",
        "--norm_topk_prob", "False", "--case", "one token, bias")
    assert status == 0 and len(out.splitlines()) == 3

    # A package with neighbours; a name that the standard library has; no other file of that name.
    (tmp_path / "kit").mkdir()
    for name, text in (("__init__", ""), ("k", "K = 2"), ("random", (
            "from .k import K\ndef route(logits, bias):\n"
            "    p, i = logits.topk(K)\n    return p.softmax(-1), i\n"))):
        (tmp_path / "kit" / f"{name}.py").write_text(text)
    status, out, err = run("router", "kit/random.py:route")
    assert status == 0 and "random logits" in out, err
    assert run("router", "kit/mine.py:route")[0] == 2
    (tmp_path / "raises.py").write_text("def moe(*args):\n    return args[9]\n")
    for what in ("experts", "router"):
        status, out, err = run(what, "raises.py:moe")
        assert status == 2 and "refused: IndexError" in out and '"ok" covers' not in out, err
        assert err == "every case is refused: nothing is checked\n"
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)")
    assert run("router", "exits.py:route")[0] == 2


def test_check_refuses_most_cases_strictly(tmp_path, run):
    """--strict has a status of its own for a function that refuses more than half of the cases. A
    wrong case comes before it, and with all refused nothing is checked."""
    (tmp_path / "mine.py").write_text(
        "def route(logits, bias, least=9):\n"
        "    if len(logits) > least:\n"
        "        raise NotImplementedError\n"
        "    p, i = logits.topk(2)\n"
        "    return p.softmax(-1), i\n"
        "def half(logits, bias):\n"
        "    return route(logits, bias, least=9999 if logits.requires_grad else 0)\n"
        "def wrong(logits, bias):\n"
        "    p, i = route(logits, bias)\n"
        "    return p * 2, i\n"
        "def none(logits, bias):\n"
        "    return route(logits, bias, least=-1)\n")
    for name, plain, strict, end in (
            ("route", 0, 3, "REFUSED of ALL cases are refused"), ("wrong", 1, 1, "are refused"),
            ("none", 2, 2, "no case ran; ALL of ALL cases are refused")):
        for args, want in (((), plain), (("--strict",), strict)):
            status, out, _ = run("router", f"mine.py:{name}", *args)
            refused, cases = out.count("refused: "), len(out.splitlines()) - 2
            assert status == want, (name, args, out)
            assert out.endswith(end.replace("REFUSED", str(refused)).replace("ALL", str(cases))
                                + "\n"), out
            assert 2 * refused > cases
    status, out, _ = run("router", "mine.py:half", "--strict")
    assert status == 0 and " 0 of " not in out and out.endswith(" cases are refused\n")
    status, out, _ = run("router", "mine.py:none", "--strict", "--case", "random logits")
    assert status == 3 and out.endswith("no case ran; 1 of 1 cases are refused\n")
    assert run("router", "mine.py:none", "--case", "random logits")[0] == 0


def test_check_refuses_most_cases_strictly(tmp_path, run):
    """--strict has a status of its own for a function that refuses more than half of the cases. A
    wrong case comes before it, and with all refused nothing is checked."""
    (tmp_path / "mine.py").write_text(
        "def route(logits, bias, least=9):\n"
        "    if len(logits) > least:\n"
        "        raise NotImplementedError\n"
        "    p, i = logits.topk(2)\n"
        "    return p.softmax(-1), i\n"
        "def half(logits, bias):\n"
        "    return route(logits, bias, least=9999 if logits.requires_grad else 0)\n"
        "def wrong(logits, bias):\n"
        "    p, i = route(logits, bias)\n"
        "    return p * 2, i\n"
        "def none(logits, bias):\n"
        "    return route(logits, bias, least=-1)\n")
    for name, plain, strict, end in (
            ("route", 0, 3, "REFUSED of ALL cases are refused"), ("wrong", 1, 1, "are refused"),
            ("none", 2, 2, "no case ran; ALL of ALL cases are refused")):
        for args, want in (((), plain), (("--strict",), strict)):
            status, out, _ = run("router", f"mine.py:{name}", *args)
            refused, cases = out.count("refused: "), len(out.splitlines()) - 2
            assert status == want, (name, args, out)
            assert out.endswith(end.replace("REFUSED", str(refused)).replace("ALL", str(cases))
                                + "\n"), out
            assert 2 * refused > cases
    status, out, _ = run("router", "mine.py:half", "--strict")
    assert status == 0 and " 0 of " not in out and out.endswith(" cases are refused\n")
    status, out, _ = run("router", "mine.py:none", "--strict", "--case", "random logits")
    assert status == 3 and out.endswith("no case ran; 1 of 1 cases are refused\n")
    assert run("router", "mine.py:none", "--case", "random logits")[0] == 0


def test_check_refuses_most_cases_strictly(tmp_path, run):
    """--strict has a status of its own for a function that refuses more than half of the cases. A
    wrong case comes before it, and with all refused nothing is checked."""
    (tmp_path / "mine.py").write_text(
        "def route(logits, bias, least=9):\n"
        "    if len(logits) > least:\n"
        "        raise NotImplementedError\n"
        "    p, i = logits.topk(2)\n"
        "    return p.softmax(-1), i\n"
        "def half(logits, bias):\n"
        "    return route(logits, bias, least=9999 if logits.requires_grad else 0)\n"
        "def wrong(logits, bias):\n"
        "    p, i = route(logits, bias)\n"
        "    return p * 2, i\n"
        "def none(logits, bias):\n"
        "    return route(logits, bias, least=-1)\n")
    for name, plain, strict, end in (
            ("route", 0, 3, "REFUSED of ALL cases are refused"), ("wrong", 1, 1, "are refused"),
            ("none", 2, 2, "no case ran; ALL of ALL cases are refused")):
        for args, want in (((), plain), (("--strict",), strict)):
            status, out, _ = run("router", f"mine.py:{name}", *args)
            refused, cases = out.count("refused: "), len(out.splitlines()) - 2
            assert status == want, (name, args, out)
            assert out.endswith(end.replace("REFUSED", str(refused)).replace("ALL", str(cases))
                                + "\n"), out
            assert 2 * refused > cases
    status, out, _ = run("router", "mine.py:half", "--strict")
    assert status == 0 and " 0 of " not in out and out.endswith(" cases are refused\n")
    status, out, _ = run("router", "mine.py:none", "--strict", "--case", "random logits")
    assert status == 3 and out.endswith("no case ran; 1 of 1 cases are refused\n")
    assert run("router", "mine.py:none", "--case", "random logits")[0] == 0


def test_check_lists_cases(run):
    experts, router = [*check.EXPERT_CASES], [*check.router_cases(16, False)]
    for args, cases in ((["router", "x"], router), (["experts"], experts), ([], experts + router),
                        (["experts", "--shape", *"94122"], [*experts, "T=9 E=4 K=1 H=2 F=2"])):
        assert run(*args, "--list") == (0, "\n".join(cases) + "\n", "")


def test_check_refuses_a_command_line(tmp_path, run):
    """With status 2 and one line."""
    (tmp_path / "mine.py").write_text("def moe(x, *args):\n    return x\n")
    table = {
        "x.py": "write: check.py experts|router FILE:FUNCTION; or --list", "": "write: ",
        "mine.py:moe": "write: ", "experts mine.py": "write: ", "x.py --list": "write: ",
        "experts": "write: ", "experts mine.py:no": "mine.py:no cannot be loaded: AttributeError",
        "router no.py:moe": "no.py:moe cannot be loaded: FileNotFoundError",
        "experts mine.py:moe --num_experts 128": "--num_experts is no option of experts",
        "experts mine.py:moe --topk 4 --case no": "--topk is no option of experts",
        "router mine.py:moe --dtype bf16": "--dtype is no option of router",
        "router mine.py:moe --shape 9 4 1 2 2": "--shape is no option of router",
        "experts mine.py:moe --shape 9 4 5 2 2": "shape T=9 E=4 K=5 H=2 F=2: needs K from 1 to E",
        "experts mine.py:moe --case no": "case is 'no'; known: random routing",
        "router mine.py:moe --score_function sigmiod": "score_function is 'sigmiod'; known: ",
        "router mine.py:moe --topk 99": "topk is 99; needs 1 to 16"}
    for args, text in table.items():
        status, out, err = run(*args.split())
        assert (status, out) == (2, "") and err.startswith(text) and err.count("\n") == 1, args


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell's pipe")
def test_check_whose_output_is_closed():
    """As `| head -1` does."""
    done = subprocess.Popen(
        [sys.executable, HERE / "check.py", "--list"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)
    done.stdout.close()
    assert done.stderr.read() == "the output was closed before its end\n"
    assert done.wait(timeout=200) == 2


@slow
def test_check_shapes_of_your_own(capsys):
    """What is wrong with 128 experts alone is found by that shape alone."""
    def wrong_at_128(x, probs, indices, fc1, fc2):
        return by_expert(x, probs, indices, fc1, fc2) * (2 if len(fc1) == 128 else 1)
    *rows, mine = check_experts(
        wrong_at_128, device=DEVICE, shapes=[(9, 4, 1, 8, 8), (20, 128, 4, 16, 8)])
    assert mine.case == "T=20 E=128 K=4 H=16 F=8" and mine.wrong
    assert not any(row.wrong or row.refused for row in rows)
    for shape in ((-1, 4, 1, 8, 8), (9, 0, 1, 8, 8), (9, 4, 0, 8, 8), (9, 4, 1, 0, 8),
                  (9, 4, 1, 8, 0), (9, 4, 5, 8, 8)):
        assert "needs K from 1 to E" in error(check_experts, by_expert, shapes=[shape])


def test_check_says_what_ok_covers(capsys):
    """Sizes of the cases that ran, not of those that the function refuses."""
    def small_alone(x, probs, indices, fc1, fc2):
        if len(x) > 100 or len(fc1) > 100 or not torch.is_grad_enabled():
            raise NotImplementedError
        return by_expert(x, probs, indices, fc1, fc2)
    rows = check_experts(small_alone, torch.bfloat16, DEVICE)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == (
        '"ok" covers bf16; T 37, E 64, K 6, H 1040, F 528, rows an expert 37 at most; '
        f"all gradients, some gradients; {sum(row.refused is not None for row in rows)} of "
        f"{len(rows)} cases are refused")
    assert not any(row.wrong for row in rows)
    check_experts(by_expert, device=DEVICE, case="one token", shapes=[(99, 200, 9, 8, 8)])
    assert capsys.readouterr().out.splitlines()[-1] == (
        '"ok" covers fp32; T 1, E 6, K 2, H 16, F 24, rows an expert 1 at most; all gradients; '
        "0 of 1 cases are refused")
    for with_bias, end in ((False, ""), (True, ", all gradients with a bias, no_grad with a bias")):
        rows = check_router(route, with_bias=with_bias, device=DEVICE)
        assert capsys.readouterr().out.splitlines()[-1] == (
            f'"ok" covers fp32; T 2100, E 16, K 2 at most; all gradients, no_grad{end}; '
            f"0 of {len(rows)} cases are refused")


def test_check_says_which_inputs_are_changed(capsys):
    for function, names in ((writes_to_its_input, "indices"), (writes_to_probs, "probs"),
                            (writes_to_fc2, "fc2"), (writes_to_the_gradient, "grad_y"),
                            (writes_to_x_in_the_backward, "x")):
        check_experts(function, device=DEVICE, case=ALL)
        _, row, *_ = capsys.readouterr().out.splitlines()
        assert row.rstrip().endswith(f"its inputs are changed: {names}")
    for function, names in ((zeroes_the_bias, "bias"), (zeroes_the_logits, "logits"),
                            (zeroes_the_gradient, "grad_probs")):
        check_router(function, **KNOBS[9], with_bias=True, device=DEVICE, case="one token, bias")
        _, row, *_ = capsys.readouterr().out.splitlines()
        assert row.rstrip().endswith(f"its inputs are changed: {names}")


def adapter(name: str):
    """The function of an adapter in docs/change.md."""
    _, text = (HERE / "docs/change.md").read_text().split(f"<!-- {name} adapter example -->")
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    return names["moe"]


@needs("transformers")
def test_check_adapter_for_transformers():
    row, *_ = check_experts(adapter("transformers"), case="random routing")
    assert not row.wrong and not row.refused


def test_check_adapters_for_others(monkeypatch):
    """With stand-ins that take what torchtitan's and ScatterMoE's modules take."""
    class GroupedExperts(torch.nn.Module):
        def __init__(self, dim, hidden_dim, num_experts, use_grouped_mm):
            super().__init__()
            for name in ("w1", "w2", "w3"):
                self.register_parameter(name, torch.nn.Parameter(torch.empty(0)))

        def forward(self, x, num_tokens_per_expert):
            blocks = zip(x.split(num_tokens_per_expert.tolist()), self.w1, self.w2, self.w3)
            return torch.cat([(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t()
                              for x, w1, w2, w3 in blocks])

    class Weight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(0))

    class GLUMLP(torch.nn.Module):
        def __init__(self, input_size, hidden_size, num_experts, top_k):
            super().__init__()
            self.experts, self.output_experts = Weight(), Weight()

        def forward(self, x, expert_p, expert_idxs):
            up, gate = self.experts.weight.chunk(2, 1)
            return by_expert(
                x, expert_p, expert_idxs, torch.cat((gate, up), 1), self.output_experts.weight)

    for path, module in (("torchtitan.models.moe.moe", GroupedExperts), ("scattermoe.mlp", GLUMLP)):
        for end in range(len(path.split("."))):
            name = ".".join(path.split(".")[:end + 1])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        setattr(sys.modules[path], module.__name__, module)
        function = adapter(path.split(".")[0])
        for case in ("random routing", "experts without tokens", "K = E"):
            [row] = check_experts(function, device=DEVICE, case=case)
            assert not row.wrong and not row.refused, row
