"""Tests: plain-loop oracles first, then one section per section of the sources.

    python -m pytest test_moe.py                every section, in minutes
    python -m pytest test_moe.py -k test_route_ one section: its word begins its tests' names
    SLOW=1 python -m pytest test_moe.py         also what is slow by nature

The words of the sections: route, balance, permute, activation, experts, config, layer, router,
groups, shared, graph, parallel, trainer, compile, files, families, live.

The oracles share no code with their subjects, walk one token and one choice at a time, and run in
float64. Every letter has a different size wherever it can, so that a swapped axis fails.
"""
import ast
import collections
import contextlib
import copy
import dataclasses
import doctest
import functools
import importlib
import inspect
import itertools
import math
import os
import random
import re
import socket
import sys
import textwrap
import time
import types
import warnings
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.distributed.device_mesh import DeviceMesh

import kernels
import moe
import parallel
from kernels import (
    activation, activation_back, apply_router_token_dropping, combine_rows,
    compute_routing_scores_for_aux_loss, expert_mlp, gather_rows, get_capacity,
    get_updated_expert_bias, group_limited_topk, grouped_mm, linear, pad_routing_map, permute,
    plan_permutation, quantile_expert_bias, required_bias_histogram, sinkhorn, sort_chunks_by_idxs,
    swiglu, swiglu_back, switch_load_balancing_loss_func, topk_routing_with_score_function,
    unpermute, weighted_swiglu, weighted_swiglu_back, z_loss_func)
from moe import (
    MoEConfig, MoELayer, ProcessGroups, SharedExpertMLP, SharedExpertState, TopKRouter,
    finish_step, load_balancing_metrics, record_routing, reduce_gradients, replay_routing,
    set_aux_loss_scale, update_expert_bias)

HERE = Path(__file__).resolve().parent
INF = math.inf
NAN = math.nan
slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="slow: runs with SLOW=1")


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test draws from one seed, and leaves no compiled code, dtype or loss scale behind."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    set_aux_loss_scale(1.0)


def close(got, want, tol: float = 1e-9) -> None:
    if isinstance(got, (list, tuple)):
        for pair in zip(got, want, strict=True):
            close(*pair, tol)
    else:
        torch.testing.assert_close(got, want.to(got.dtype), rtol=tol, atol=tol)


def same(got, want) -> None:
    """Equal to the last bit; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def error(function, *args, **kwargs) -> str:
    """The type and text of the error that a call raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def check_errors(table, kind: type = ValueError) -> None:
    """Each row is a call and a phrase of the error, of type `kind`, that it raises."""
    for call, phrase in table:
        text = error(call)
        assert text.startswith(kind.__name__) and phrase in text, f"{phrase!r} is not in {text!r}"


def check_error_table(table: str, **names) -> None:
    """Each row is `call => phrase`: the call raises a ValueError whose text holds the phrase. A
    phrase that begins with another type names that."""
    for row in table.strip().splitlines():
        call, phrase = row.strip().split(" => ")
        text = error(eval, call, {**globals(), **names})
        kind = re.match(r"(\w+Error: |)", phrase)[0] or "ValueError: "
        assert text.startswith(kind) and phrase in text, f"{row}: {text}"


def grads(output: Tensor, inputs, upstream: Tensor | None = None) -> list[Tensor]:
    """Gradients of output to the inputs; an input that was not used is a failure."""
    if upstream is None:
        upstream = torch.ones_like(output)
    return list(torch.autograd.grad(output, inputs, upstream))


def leaf(*shape: int) -> Tensor:
    """Random fp64 values that require a gradient."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def compiled(function, backend="aot_eager", **kwargs):
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


# ---- Oracles ----

def score_loop(x_E: list, kind: str) -> list:
    if kind == "softmax":
        total = sum(x.exp() for x in x_E)
        return [x.exp() / total for x in x_E]
    if kind == "sigmoid":
        return [1 / (1 + (-x).exp()) for x in x_E]
    return [(1 + x.exp()).log().sqrt() for x in x_E]


def best(values: list, n: int) -> list[int]:
    """The places of the n largest values, the largest first, equal ones in order."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:n]


def choose_loop(logits_E, c: MoEConfig, bias_E) -> list[int]:
    """The K experts of one token, best first."""
    if bias_E is None and c.num_groups is None:
        return best(list(logits_E), c.topk)
    score_E = [s.item() for s in score_loop(list(logits_E), c.score_function)]
    if bias_E is not None:
        score_E = [s + b.item() for s, b in zip(score_E, bias_E)]
    if c.num_groups is not None:
        size = c.num_experts // c.num_groups
        n = c.group_score_topk or c.topk // c.group_topk
        groups = [sorted(score_E[e:e + size]) for e in range(0, c.num_experts, size)]
        kept = best([sum(group[-n:]) for group in groups], c.group_topk)
        score_E = [s if e // size in kept else -INF for e, s in enumerate(score_E)]
    return best(score_E, c.topk)


def route_loop(logits_TE: Tensor, c: MoEConfig, bias_E=None, given_TK=None):
    """(probs [T, K], indices [T, K]), one token at a time; differentiable."""
    probs_TK = logits_TE.new_zeros(len(logits_TE), c.topk)
    indices_TK = torch.zeros(probs_TK.shape, dtype=torch.int64)
    norm = c.norm_topk_prob
    over_chosen = norm is None and c.score_function == "softmax" and not c.pre_softmax
    if norm is None:
        norm = c.score_function != "softmax" and c.topk > 1
    for t, logits_E in enumerate(logits_TE):
        chosen = choose_loop(logits_E, c, bias_E) if given_TK is None else given_TK[t].tolist()
        real = [k for k in range(c.topk) if chosen[k] < c.num_experts]
        if over_chosen:
            p = score_loop([logits_E[chosen[k]] for k in real], "softmax")
        else:
            scores = score_loop(list(logits_E), c.score_function)
            p = [scores[chosen[k]] for k in real]
        if norm:
            total = sum(p) + c.norm_eps
            p = [x / total for x in p]
        for k, x in zip(real, p):
            probs_TK[t, k] = x * (c.scaling_factor or 1.0)
        indices_TK[t] = torch.tensor(chosen)
    return merge_loop(probs_TK, indices_TK, c.num_experts)


def merge_loop(probs_TK: Tensor, indices_TK: Tensor, E: int):
    """An expert that a token names more than once: its first slot gets the probs of all."""
    merged_TK = torch.zeros_like(probs_TK)
    indices_TK = indices_TK.clone()
    for t, chosen in enumerate(indices_TK.tolist()):
        for k, e in enumerate(chosen):
            first = chosen.index(e)
            merged_TK[t, first] = merged_TK[t, first] + probs_TK[t, k]
            if first < k:
                indices_TK[t, k] = E
    return merged_TK, indices_TK


def act_loop(h_F: Tensor, c: MoEConfig) -> Tensor:
    if c.activation == "relu2":
        return torch.where(h_F > 0, h_F * h_F, 0.0)
    a, b = h_F.chunk(2)
    if c.activation_clamp_value is not None:
        a = a.clamp(max=c.activation_clamp_value)
        b = b.clamp(-c.activation_clamp_value, c.activation_clamp_value)
    if c.situ_linear_beta is not None:
        b = c.situ_linear_beta * (b / c.situ_linear_beta).tanh()
    if c.activation == "swiglu":
        gate = a / (1 + (-a).exp())
    elif c.activation == "quick_geglu":
        gate = a / (1 + (-c.glu_alpha * a).exp())
    elif c.activation == "geglu":
        gate = 0.5 * a * (1 + ((2 / math.pi) ** 0.5 * (a + 0.044715 * a ** 3)).tanh())
    else:
        gate = c.situ_beta * (a / c.situ_beta).tanh() / (1 + (-a).exp())
    return gate * (b + c.glu_linear_offset)


def expert_loop(x_H: Tensor, e: int, c: MoEConfig, w: dict) -> Tensor:
    h_F = (w["experts.fc1"][e] @ x_H).flatten()
    if not c.add_bias_linear:
        return w["experts.fc2"][e] @ act_loop(h_F, c)
    h_F = h_F + w["experts.fc1_bias"][e].flatten()
    return w["experts.fc2"][e] @ act_loop(h_F, c) + w["experts.fc2_bias"][e]


def moe_loop(x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, c: MoEConfig, w: dict) -> Tensor:
    """y_t = Σ_k p_tk · expert(i_tk, x_t), or Σ_k expert(i_tk, p_tk · x_t); with latent experts
    up · norm(the same of down · x_t)."""
    rows = []
    for x, p_K, e_K in zip(x_TH, probs_TK, indices_TK.tolist()):
        if c.latent_size is not None:
            x = w["latent_down.weight"] @ x
        y = torch.zeros_like(x)
        for p, e in zip(p_K, e_K):
            if e < c.num_experts and c.apply_probs_on == "input":
                y = y + expert_loop(p * x, e, c, w=w)
            elif e < c.num_experts:
                y = y + p * expert_loop(x, e, c, w=w)
        if c.latent_norm:
            y = y / ((y * y).sum() / len(y) + c.latent_norm_eps).sqrt() * w["latent_up.norm"]
        if c.latent_size is not None:
            y = w["latent_up.weight"] @ y
        rows.append(y)
    return torch.stack(rows) if rows else x_TH * 0


def switch_loss_loop(logits_TE: Tensor, c: MoEConfig, coeff: float, valid) -> Tensor:
    """coeff · E/(K·T²) · Σ_e n_e Σ_t s_te over the valid tokens, with their own plain top K."""
    counts = [0] * c.num_experts
    sums = [0] * c.num_experts
    for t in valid:
        s = score_loop(list(logits_TE[t]), c.score_function)
        for e in best(s, c.topk):
            counts[e] += 1
        sums = [total + s_e / sum(s) for total, s_e in zip(sums, s)]
    scale = coeff * c.num_experts / (c.topk * max(len(valid), 1) ** 2)
    return logits_TE.new_zeros(()) + scale * sum(n * s for n, s in zip(counts, sums))


def z_loss_loop(logits_TE: Tensor, coeff: float, valid) -> Tensor:
    total = logits_TE.new_zeros(())
    for t in valid:
        total = total + sum(x.exp() for x in logits_TE[t]).log() ** 2
    return coeff * total / max(len(valid), 1)


ACTIVATIONS = [
    dict(activation="swiglu"),
    dict(activation="swiglu", activation_clamp_value=0.5),
    dict(activation="geglu"),
    dict(activation="geglu", glu_linear_offset=0.5),
    dict(activation="quick_geglu"),
    dict(activation="quick_geglu", glu_alpha=1.3, glu_linear_offset=1.0),
    dict(activation="quick_geglu", activation_clamp_value=0.7),
    dict(activation="situ"),
    dict(activation="situ", situ_beta=1.5, situ_linear_beta=0.7),
    dict(activation="relu2"),
]


def random_config(rng: random.Random, **fixed) -> MoEConfig:
    """A valid config over everything the layer can do; E = 8, K ≤ 4."""
    while True:
        options = dict(
            hidden_size=6, ffn_hidden_size=5, num_experts=8, topk=rng.randint(1, 4), init_std=0.5,
            params_dtype=torch.float64, router_dtype=torch.float64,
            score_function=rng.choice(["softmax", "sigmoid", "sqrtsoftplus"]),
            pre_softmax=rng.choice([False, True]),
            norm_topk_prob=rng.choice([None, None, True, False]),
            norm_eps=rng.choice([1e-20, 1e-2]),
            scaling_factor=rng.choice([None, 2.5]),
            router_bias=rng.choice([False, True]),
            enable_expert_bias=rng.choice([False, True]),
            add_bias_linear=rng.choice([False, True]),
            apply_probs_on=rng.choice(["activation", "input"]),
            latent_size=rng.choice([None, 7]),
            latent_norm=rng.choice([False, True]),
            latent_norm_eps=rng.choice([1e-5, 0.1]),
            z_loss_coeff=rng.choice([None, 0.1]))
        options.update(rng.choice(ACTIVATIONS))
        if rng.random() < 0.4:
            options.update(num_groups=4, group_topk=2, group_score_topk=rng.choice([1, 2]))
        if rng.random() < 0.4:
            options.update(load_balancing_type="aux_loss", aux_loss_coeff=0.3)
        try:
            return MoEConfig(**{**options, **fixed})
        except ValueError:
            continue


def random_layer(config: MoEConfig) -> MoELayer:
    """A layer whose biases are random too."""
    layer = MoELayer(config)
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if name.endswith(("bias", "norm")):
                tensor.normal_(0, 0.3)
    return layer


def random_indices(
        T: int, E: int, K: int, nowhere: float = 0.2, repeats: float = 0.0) -> Tensor:
    """[T, K]: distinct experts, some of them replaced by E, which means nowhere, and some by the
    expert of another slot."""
    indices = torch.rand(T, E).argsort(1)[:, :K]
    indices = torch.where(torch.rand(T, K) < repeats, indices[:, :1], indices)
    return torch.where(torch.rand(T, K) < nowhere, E, indices)


# ---- Route ----

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def test_route_matches_loop():
    """Random configurations: indices exactly, probs and gradients to rounding, both forms equal."""
    rng = random.Random(1)
    for _ in range(200):
        c = random_config(rng)
        T = rng.choice([0, 1, 2, 5, 11])
        logits = torch.randn(T, 8, dtype=torch.float64) * rng.choice([0.5, 3.0])
        logits.requires_grad_()
        bias = torch.randn(8) * 0.3 if c.enable_expert_bias else None
        given = None
        if rng.random() < 0.3:
            given = random_indices(T, 8, c.topk, nowhere=0.3, repeats=0.3).to(rng.choice(INTEGERS))
        route = functools.partial(
            topk_routing_with_score_function, logits, c.topk, use_pre_softmax=c.pre_softmax,
            num_groups=c.num_groups, group_topk=c.group_topk, scaling_factor=c.scaling_factor,
            score_function=c.score_function, expert_bias=bias, precomputed_indices=given,
            norm_topk_prob=c.norm_topk_prob, norm_eps=c.norm_eps,
            group_score_topk=c.group_score_topk)
        probs, indices = route(dense_output=True)
        want_probs, want_indices = route_loop(logits, c, bias, given_TK=given)
        same(indices, want_indices)
        close(probs, want_probs)
        if want_probs.requires_grad:
            upstream = torch.randn_like(probs)
            want_grads = grads(want_probs, [logits], upstream)
            close(grads(probs, [logits], upstream), want_grads, 1e-8)

        want_map = torch.zeros(T, 9, dtype=torch.bool)
        want_TE = want_map.double()
        for t, k in itertools.product(range(T), range(c.topk)):
            want_map[t, indices[t, k]] = True
            want_TE[t, indices[t, k]] = probs[t, k]
        same(route(), (want_TE[:, :8], want_map[:, :8]))


def test_route_dtypes():
    """The arithmetic is fp32, and its result is rounded once."""
    logits = torch.randn(7, 8).bfloat16()
    for kind in ("softmax", "sigmoid", "sqrtsoftplus"):
        route = functools.partial(
            topk_routing_with_score_function, topk=3, score_function=kind, dense_output=True)
        probs, indices = route(logits.float())
        same(route(logits), (probs.bfloat16(), indices))


def test_route_where_scores_saturate_or_underflow():
    """An fp32 sigmoid is 1 from a logit of 17 on; the choice still tells 18 from 30."""
    route = topk_routing_with_score_function
    logits = torch.tensor([[30.0, 18.0, 25.0, 40.0]])
    assert route(logits, 3, score_function="sigmoid", dense_output=True)[1].tolist() == [[3, 0, 2]]
    logits = torch.tensor([[-200.0, -90.0, 0.0, 30.0]], requires_grad=True)
    probs = route(logits, 4, score_function="sqrtsoftplus")[0]
    assert grads(probs, [logits])[0].isfinite().all()


def test_route_masked_groups_lose_to_negative_scores():
    """Groups that are out are masked with -inf: a mask of 0 would beat the negative biased scores
    of the group that is in (DeepSeek-V3 #741, vllm #13474)."""
    bias = torch.tensor([-2.0, -3.0, -4.0, -5.0])
    indices = topk_routing_with_score_function(
        torch.zeros(1, 4), 2, score_function="sigmoid", expert_bias=bias,
        num_groups=2, group_topk=1, dense_output=True)[1]
    assert indices.tolist() == [[0, 1]]
    scores, indices = group_limited_topk(
        bias[None], topk=2, num_tokens=1, num_experts=4, num_groups=2, group_topk=1)
    assert indices.tolist() == [[0, 1]] and scores.tolist() == [[-2, -3]]


def test_route_errors():
    logits = torch.randn(6, 4)
    indices = torch.zeros(6, 3).long()
    check_error_table("""
        route(logits[None], 2) => logits has shape [1, 6, 4]
        route(logits, 5) => topk is 5
        route(logits, 0) => topk is 0
        route(logits, 2, score_function="tanh") => score_function is 'tanh'
        route(logits, 2, num_groups=2) => num_groups = 2 and group_topk = None
        route(logits, 2, num_groups=3, group_topk=1) => num_groups = 3 does not divide
        route(logits, 2, num_groups=0, group_topk=1) => num_groups = 0 does not divide
        route(logits, 3, num_groups=4, group_topk=2) => 4 groups of 1 experts cannot hold
        route(logits, 2, num_groups=2, group_topk=0) => group_topk = 0 of num_groups = 2
        route(logits, 2, num_groups=2, group_topk=3) => group_topk = 3 of num_groups = 2
        route(logits, 2, num_groups=2, group_topk=2, group_score_topk=3) => score_topk is 3
        route(logits, 2, num_groups=2, group_topk=2, group_score_topk=0) => score_topk is 0
        route(logits, 2, expert_bias=logits[0, :3]) => expert_bias has shape [3]; needs [E = 4]
        route(logits, 2, precomputed_indices=indices) => shape [6, 3]; needs [T = 6, K = 2]
        group_limited_topk(logits[None], 2, 6, 4, 2, 1) => scores has shape [1, 6, 4]
        aux(logits[None], 2, "softmax") => logits has shape [1, 6, 4]
        aux(logits, 2, "tanh") => score_function is 'tanh'
        kernels.routing_to_map(logits[None], indices, 4) => probs has shape [1, 6, 4]
        kernels.routing_to_map(logits, indices, 4) => indices has shape [6, 3]
        """, route=topk_routing_with_score_function, aux=compute_routing_scores_for_aux_loss,
        logits=logits, indices=indices)


# ---- Balance ----

@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balance_losses_match_loops(kind):
    """With any tokens masked; what a masked token holds changes nothing."""
    c = MoEConfig(4, 4, 6, topk=2, score_function=kind)
    mask = torch.rand(11) < 0.4
    for padding in (torch.zeros_like(mask), mask, torch.ones_like(mask)):
        logits = leaf(11, 6)
        valid = (~padding).nonzero().flatten()
        want = switch_loss_loop(logits, c, 0.25, valid=valid) + z_loss_loop(logits, 0.3, valid)
        want_grads = grads(want + 0 * logits.sum(), [logits])
        for total in (len(valid), torch.tensor(len(valid))):
            garbage = torch.where(padding[:, None], 50.0, logits)
            routing_map, scores = compute_routing_scores_for_aux_loss(
                garbage, 2, kind, padding_mask=padding)
            assert (scores[padding] == 0).all() and not routing_map[padding].any()
            loss = switch_load_balancing_loss_func(
                scores, routing_map.sum(0), total, topk=2, num_experts=6, moe_aux_loss_coeff=0.25)
            loss = loss + z_loss_func(garbage[None], 0.3, padding[None])
            close([loss, *grads(loss, [logits])], [want, *want_grads])


def test_balance_losses_at_even_load_and_without_tokens():
    """The switch loss is its coefficient where the load is even."""
    switch_loss = functools.partial(
        switch_load_balancing_loss_func, topk=2, num_experts=6, moe_aux_loss_coeff=0.25)
    even = switch_loss(torch.full((12, 6), 1 / 6), torch.full((6,), 4), 12)
    close(even, torch.tensor(0.25), 1e-6)
    for nothing in (0, torch.tensor(0)):
        assert switch_loss(torch.zeros(0, 6), torch.zeros(6), nothing) == 0
    assert z_loss_func(torch.zeros(0, 5), 0.3) == 0
    logits = torch.tensor([[1.0, 2.0], [NAN, NAN]], requires_grad=True)
    loss = z_loss_func(logits, 0.3, torch.tensor([False, True]))
    same(loss, z_loss_func(logits[:1], 0.3))
    assert grads(loss, [logits])[0].isfinite().all()


def sinkhorn_loop(cost: Tensor, tol: float, rounds: int = 256) -> Tensor | None:
    """Megatron's loop; None where it has not stopped by then."""
    A = cost.exp()
    T, E = A.shape
    d1 = torch.ones(E, dtype=A.dtype)
    for _ in range(rounds):
        d0 = (1 / T) / ((A * d1).sum(1) + 1e-8)
        last = d1
        d1 = (1 / E) / ((A * d0[:, None]).sum(0) + 1e-8)
        if (d1 - last).abs().mean() <= tol:
            return d1 * A * d0[:, None]
    return None


def test_balance_sinkhorn_matches_loop_and_stays_finite():
    stopped = 0
    for T, E in [(64, 8), (33, 5), (3, 7), (1, 4)] * 8:
        cost = torch.rand(T, E, dtype=torch.float64) * 10 - 5
        want = sinkhorn_loop(cost, 1e-4)
        if want is not None:
            stopped += 1
            close(sinkhorn(cost), want, 1e-5)
    assert stopped >= 16
    for scale in (1e2, 1e4):
        assert sinkhorn(torch.randn(33, 5) * scale).isfinite().all()
    assert sinkhorn(torch.zeros(0, 5)).shape == (0, 5)


def test_balance_capacity_in_python_floats():
    assert get_capacity(10, 3, 1.0) == 4
    assert get_capacity(10, 3, 1.0, min_capacity=7) == 7
    for N, E, factor in [(7, 49, 7.0), (100, 3, 1.1), (2048 * 8, 64, 1.25), (29, 7, 0.3)]:
        assert get_capacity(N, E, factor) == math.ceil(N / E * factor)
    in_graph = compiled(lambda x: x.new_zeros(get_capacity(len(x) * 3, 7, 1.1)), dynamic=True)
    for T in (5, 29, 70, 91, 333):
        assert len(in_graph(torch.zeros(T))) == get_capacity(T * 3, 7, 1.1)


def dropping_loop(probs, routing_map, capacity, policy, pad):
    T, E = routing_map.shape
    out_probs = torch.zeros_like(probs)
    out_map = torch.zeros_like(routing_map)
    for e in range(E):
        routed = [t for t in range(T) if routing_map[t, e]]
        others = [t for t in range(T) if not routing_map[t, e]]
        if policy == "probs":
            routed.sort(key=lambda t: -float(probs[t, e]))           # stable: equal ones in order
        kept = routed[:capacity]
        out_probs[kept, e] = probs[kept, e]
        out_map[kept, e] = True
        if pad:
            out_map[others[:capacity - len(kept)], e] = True
    return out_probs, out_map


@pytest.mark.parametrize("policy, pad", [
    ("probs", False), ("probs", True), ("position", False), ("position", True)])
def test_balance_token_dropping_matches_loop(policy, pad):
    drop = functools.partial(
        apply_router_token_dropping, router_topk=2, drop_policy=policy, pad_to_capacity=pad)
    for factor in (0.3, 1.0, 1.5, 9.0):
        for _ in range(6):
            probs, routing_map = topk_routing_with_score_function(torch.randn(13, 5), 2)
            probs = torch.where(torch.rand(13, 5) < 0.2, 0.0, probs)  # ties, and routed with prob 0
            capacity = math.ceil(13 * 2 / 5 * factor)
            want = dropping_loop(probs, routing_map, capacity, policy=policy, pad=pad)
            same(drop(probs, routing_map, capacity_factor=factor), want)


def test_balance_expert_bias_update():
    counts = torch.tensor([5.0, 1.0, 3.0, 3.0])
    bias = torch.tensor([0.1, 0.2, 0.3, 0.4])
    want = torch.tensor([0.09, 0.21, 0.30, 0.40])
    close(get_updated_expert_bias(counts, bias, 0.01), want, 1e-7)
    close(get_updated_expert_bias(counts / 7, bias, 0.01), want, 1e-7)       # means of counts
    even = torch.full((3,), 2.0 ** 24 + 2)                  # the mean of three in fp32 could round
    same(get_updated_expert_bias(even, bias[:3], 0.01), bias[:3])
    uneven = torch.tensor([2 ** 40 + 1, 2 ** 40, 2 ** 40])  # not even in fp64 could n·E round here
    want = bias[:3] + torch.tensor([-0.01, 0.01, 0.01])
    same(get_updated_expert_bias(uneven, bias[:3], 0.01), want)


def bias_loop(scores_TE: list, bias_E: list, K: int, num_bins: int) -> list[list[int]]:
    """How many tokens need which bias, one token and one expert at a time."""
    low = min(bias_E) - 1
    width = (max(bias_E) + 1 - low) / num_bins
    counts = [[0] * num_bins for _ in bias_E]
    for s_E in scores_TE:
        alpha = sorted(s + b for s, b in zip(s_E, bias_E))[-K - 1]
        for e, s in enumerate(s_E):
            place = math.floor((alpha - s - low) / width)
            counts[e][min(max(place, 0), num_bins - 1)] += 1
    return counts


def quantile_loop(counts: list[list[int]], bias_E: list, K: int) -> list[float]:
    """The K/E quantile of every expert's required bias, linear inside a bin."""
    low = min(bias_E) - 1
    width = (max(bias_E) + 1 - low) / len(counts[0])
    found = []
    for row in counts:
        wanted = K / len(counts) * sum(row)
        i = 0
        while row[i] < wanted:
            wanted -= row[i]
            i += 1
        found.append(low + width * (i + wanted / row[i]))
    return [b - sum(found) / len(found) for b in found]


@pytest.mark.parametrize(
    "T, E, K, num_bins", [(1, 2, 1, 7), (9, 4, 1, 10), (40, 6, 3, 1000), (33, 5, 4, 50)])
def test_balance_quantiles_match_loop(T, E, K, num_bins):
    for _ in range(5):
        scores = torch.rand(T, E).double()
        bias = torch.randn(E).double() / 5
        mask = torch.rand(T) < 0.3
        mask[0] = False
        want = bias_loop(scores[~mask].tolist(), bias.tolist(), K, num_bins=num_bins)
        scores[mask] = NAN                                            # padding may hold anything
        histogram = required_bias_histogram(scores, bias, K, num_bins=num_bins, padding_mask=mask)
        same(histogram, torch.tensor(want).int())
        parts = zip(scores.tensor_split(2), mask.tensor_split(2))     # microbatches, or ranks
        same(sum(required_bias_histogram(s, bias, K, num_bins=num_bins, padding_mask=m)
                 for s, m in parts), histogram)
        found = torch.tensor(quantile_loop(want, bias.tolist(), K), dtype=torch.float64)
        close(quantile_expert_bias(histogram, bias, K), found, 1e-12)


def test_balance_quantiles_at_their_edges():
    """No token: the bias to the bit. Counts that fp32 cannot tell apart. Values beyond the range,
    NaN: the end bins."""
    bias = torch.tensor([0.1, -0.3, 0.25])
    same(quantile_expert_bias(torch.zeros(3, 10).int(), bias, 1), bias)
    third = 5 * 10**8 + 1                          # times E beyond int32
    counts = torch.tensor([0, 0, 0, 0, third, 2 * third, 0, 0, 0, 0]).expand(3, 10).clone()
    counts[0, 4:6] += torch.tensor([-1, 1])        # the quantile is just behind the end of bin 4
    got = quantile_expert_bias(counts.int(), bias.double(), 1)
    width = (bias.double().max() - bias.double().min() + 2) / 10
    close(got[0] - got[1], width / (2 * third + 1), 1e-15)
    scores = torch.tensor([[5.0, 0.5, -4.0], [NAN, NAN, NAN]])
    histogram = required_bias_histogram(scores, torch.zeros(3), 1, num_bins=10)
    assert histogram.sum(1).tolist() == [2, 2, 2]
    assert histogram[0, 0] == 2 and histogram[2, 9] == 1


@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
def test_balance_router_by_quantiles(score_function):
    """After one update the loads of the same tokens are even, from any skew, without a setting;
    then they stay."""
    layer = MoELayer(MoEConfig(
        16, 4, 32, topk=4, score_function=score_function, enable_expert_bias=True,
        bias_update="quantile", norm_topk_prob=False))
    router = layer.router
    with torch.no_grad():
        router.weight.mul_(20)
    xs = torch.randn(4, 1000, 16)
    violations = []
    for _ in range(5):
        for x in xs:
            layer(x)
        assert router.bias_histogram.sum() == 4 * 1000 * 32
        violations.append((router.local_tokens_per_expert.max() / 500 - 1).item())
        update_expert_bias(layer)
        assert router.local_tokens_per_expert.sum() == 0 and router.bias_histogram.sum() == 0
    assert violations[0] > 0.5 and violations[-1] < 0.2, violations

    mask = torch.rand(1000) < 0.5                                    # a padding token needs no bias
    layer(xs[0], mask)
    scores = kernels.SCORE_FUNCTIONS[score_function](router.gating(xs[0]))[~mask]
    same(router.bias_histogram, required_bias_histogram(scores, router.expert_bias, 4))
    layer.load_state_dict(layer.state_dict())                        # another bias from now on
    same(router.bias_histogram, torch.zeros_like(router.bias_histogram))
    router.reset_bias_histogram()
    assert router.bias_histogram.sum() == 0 and router.bias_histogram.dtype == torch.int32


@pytest.mark.parametrize("T", [1, 4095, 4097, pytest.param(10 ** 6, marks=slow)])
def test_balance_sums_over_tokens_are_accurate(T):
    """In fp32, eager and in one graph for all T, as in float64 to a few units of the last place."""
    logits = torch.randn(T, 8) * 0.3
    leaves = logits, torch.rand(8)
    functions = [
        lambda x, n: switch_load_balancing_loss_func(x.softmax(1), n, T, 2, 8, 0.1),
        lambda x, n: z_loss_func(x, 0.1),
        lambda x, n: kernels.weighted_token_sum(torch.full_like(x, 1 / 3), n)]
    for function in functions:
        want = function(*[x.double() for x in leaves])
        for how in (function, compiled(function, "inductor")):
            got = how(*leaves)
            assert got.dtype == torch.float32
            close(got.double(), want, 3e-7)


def test_balance_errors():
    logits = torch.randn(6, 4)
    routing_map = torch.rand(6, 4) < 0.5
    check_error_table("""
        loss(logits[None], bias, 6, 2, 4, 0.1) => probs has shape [1, 6, 4]
        sinkhorn(logits[None]) => cost has shape [1, 6, 4]
        drop(logits, routing_map, 2, 1.0, "random") => drop_policy is 'random'
        drop(logits, routing_map[:5], 2, 1.0) => routing_probs has shape [6, 4]; needs [T = 5
        drop(logits[None], routing_map[None], 2, 1.0) => routing_map has shape [1, 6, 4]
        required_bias_histogram(logits, bias, 4) => topk is 4 and num_bins 1000
        required_bias_histogram(logits, bias, 0) => topk is 0 and num_bins 1000
        required_bias_histogram(logits, bias, 2, 0) => topk is 2 and num_bins 0
        required_bias_histogram(logits, bias[:3], 2) => expert_bias has shape [3]
        required_bias_histogram(logits[None], bias, 2) => scores has shape [1, 6, 4]
        quantile_expert_bias(logits, bias, 2) => expert_bias has shape [4]; needs [E = 6]
        quantile_expert_bias(bias, bias, 2) => histogram has shape [4]
        """, loss=switch_load_balancing_loss_func, drop=apply_router_token_dropping,
        logits=logits, routing_map=routing_map, bias=logits[0])


# ---- Permute ----

def layout(plan, topk: int) -> str:
    tokens = (plan.order // topk).tolist()
    start = 0
    lines = []
    for e, end in enumerate(plan.offsets.tolist()):
        lines.append(f"expert {e}: tokens {tokens[start:end]}")
        start = end
    return "\n".join([*lines, f"nowhere:  tokens {tokens[start:]}"])


def test_permute_layout():
    plan = plan_permutation(torch.tensor([[2, 0], [0, 1], [2, 4]]), num_experts=4)  # 4 = nowhere
    assert_expected_inline(layout(plan, 2), """\
expert 0: tokens [0, 1]
expert 1: tokens [1]
expert 2: tokens [0, 2]
expert 3: tokens []
nowhere:  tokens [2]""")
    assert plan.counts.tolist() == [2, 1, 2, 0] and plan.offsets.tolist() == [2, 3, 5, 5]
    assert [x.dtype for x in plan] == [torch.int64] * 3 + [torch.int32]
    same(plan.order[plan.inverse.flatten()], torch.arange(6))


def rows_loop(places: list, tokens: Tensor, probs: Tensor):
    """(rows, probs, indices) of the (expert, token) of every row; token T leaves the row empty."""
    rows = torch.zeros(len(places), tokens.shape[1])
    row_probs = torch.zeros(len(places))
    for i, (e, t) in enumerate(places):
        if t < len(tokens):
            rows[i] = tokens[t]
            row_probs[i] = probs[t, e]
    return rows, row_probs, torch.tensor([t for e, t in places], dtype=torch.int64)


def added_loop(places: list, tokens: Tensor, probs: Tensor) -> Tensor:
    """[T, H]: every row times its prob, added to its token."""
    total = torch.zeros_like(tokens, dtype=torch.float64)
    for e, t in places:
        if t < len(tokens):
            total[t] += tokens[t].double() * float(probs[t, e])
    return total


@pytest.mark.parametrize("T, E, K", [(0, 4, 2), (1, 1, 1), (7, 4, 2), (33, 8, 8), (64, 256, 3)])
def test_permute_index_form_equals_map_form(T, E, K):
    """The two forms agree to the last bit: rows, order, probs, and the tokens added up again."""
    indices = random_indices(T, E, K)
    tokens = torch.randn(T, 5)
    probs = torch.rand(T, K).masked_fill(indices == E, 0.0)
    plan = plan_permutation(indices, E)
    probs_TE, routing_map = kernels.routing_to_map(probs, indices, E)
    n = int(plan.offsets[-1])
    rows, row_probs, sorted_indices = permute(tokens, routing_map, probs_TE, num_out_tokens=T * K)
    same(gather_rows(tokens, plan), rows)
    same((plan.order // K)[:n], sorted_indices[:n])
    same(kernels.gather_probs(probs, plan), row_probs)
    same(plan.counts, routing_map.sum(0))
    places = [(e, t) for t in range(T) for e in indices[t].tolist() if e < E]
    want = added_loop(places, tokens, probs_TE)
    close(combine_rows(rows, plan, probs), want, 1e-6)
    got = unpermute(
        rows, sorted_indices, tokens.shape, probs=probs_TE, routing_map=routing_map)
    close(got, want, 1e-6)


@pytest.mark.parametrize("T, E", [(0, 3), (1, 4), (7, 4), (20, 3)])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_permute_matches_loop(T, E, density):
    tokens = torch.randn(T, 5)
    probs = torch.rand(T, E)
    routing_map = torch.rand(T, E) < density
    ones = [(e, t) for e in range(E) for t in range(T) if routing_map[t, e]]
    for n in {None, len(ones), len(ones) + 3, max(len(ones) - 2, 0)}:
        size = len(ones) if n is None else n
        places = (ones + [(0, T)] * 3)[:size]
        rows, row_probs, index = permute(tokens, routing_map, probs, num_out_tokens=n)
        same((rows, row_probs, index), rows_loop(places, tokens, probs))
        got = unpermute(rows, index, tokens.shape, probs=probs, routing_map=routing_map)
        close(got, added_loop(places, tokens, probs), 1e-6)
        got = unpermute(rows, index, tokens.shape)
        close(got, added_loop(places, tokens, torch.ones(T, E)), 1e-6)


@pytest.mark.parametrize(
    "T, E, C", [(0, 3, 2), (7, 4, 3), (7, 4, 7), (3, 4, 6), (20, 3, 1), (5, 2, 0)])
def test_permute_drop_and_pad_matches_loop(T, E, C):
    """Also with a capacity above the token count, where the original breaks."""
    routing_map = torch.rand(T, E) < 0.4
    tokens = torch.randn(T, 5)
    probs = torch.rand(T, E)
    places = []
    for e in range(E):
        in_order = sorted(range(T), key=lambda t: not routing_map[t, e])
        places += [(e, t) for t in (in_order + [T] * C)[:C]]
    rows, row_probs, index = permute(
        tokens, routing_map, probs, num_out_tokens=E * C, drop_and_pad=True)
    same((rows, row_probs, index), rows_loop(places, tokens, probs))
    got = unpermute(
        rows, index, tokens.shape, probs=probs, routing_map=routing_map, drop_and_pad=True)
    close(got, added_loop(places, tokens, probs), 1e-6)


@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permute_gradients(drop_and_pad):
    """By gradcheck, and zeros for the rows that are ignored."""
    routing_map = torch.rand(6, 4) < 0.5
    tokens = leaf(6, 3)
    probs = leaf(6, 4)
    n = 4 * 7 if drop_and_pad else int(routing_map.sum()) + 3
    back = functools.partial(
        unpermute, restore_shape=(6, 3), probs=probs, routing_map=routing_map,
        drop_and_pad=drop_and_pad)

    def there_and_back(tokens, probs):
        rows, row_probs, index = permute(
            tokens, routing_map, probs, num_out_tokens=n, drop_and_pad=drop_and_pad)
        return back(rows * row_probs[:, None], index, probs=probs)

    assert torch.autograd.gradcheck(there_and_back, (tokens, probs))
    rows = torch.full((n, 3), NAN, dtype=torch.float64, requires_grad=True)
    out = back(rows, torch.full((n,), 6))
    for zeros in (out, *grads(out, [rows, probs])):
        assert (zeros == 0).all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=slow)])
@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permute_fused_is_the_function_compiled(monkeypatch, drop_and_pad, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    kernels._compiled.cache_clear()
    tokens = torch.randn(6, 3, requires_grad=True)
    probs = torch.rand(6, 4, requires_grad=True)
    routing_map = torch.rand(6, 4) < 0.5
    results = []
    for fused in (False, True):
        options = dict(fused=fused, drop_and_pad=drop_and_pad)
        rows, row_probs, index = permute(tokens, routing_map, probs, num_out_tokens=16, **options)
        out = unpermute(rows, index, tokens.shape, probs=probs, routing_map=routing_map, **options)
        results.append([rows, row_probs, index, out, *grads(out.square(), [tokens, probs])])
    close(results[1], results[0], 1e-5)
    assert counters["stats"]["unique_graphs"] == 2
    kernels._compiled.cache_clear()


def test_permute_index_form_gradients():
    plan = plan_permutation(random_indices(7, 4, 3, nowhere=0.3), 4)
    tokens = leaf(7, 5)
    rows = leaf(21, 5)
    probs = leaf(7, 3)
    check = torch.autograd.gradcheck
    assert check(lambda x: gather_rows(x, plan), (tokens,))
    assert check(lambda r: combine_rows(r, plan), (rows,))
    assert check(lambda r, p: combine_rows(r, plan, p), (rows, probs))


def test_permute_rows_that_go_nowhere_reach_nothing():
    """A NaN in such a row, or in the gradient that comes to it, changes no output, no gradient."""
    indices = torch.tensor([[0, 3], [3, 3], [1, 0]])                  # 3 = nowhere
    plan = plan_permutation(indices, 3)
    n = int(plan.offsets[-1])
    rows = torch.randn(6, 4)
    probs = torch.rand(3, 2)
    nans = torch.zeros(6, 4)
    nans[n:] = NAN
    for p in (None, probs):
        same(combine_rows(rows + nans, plan, p), combine_rows(rows, plan, p))
    tokens = torch.randn(3, 4, requires_grad=True)
    grad_tokens = grads(gather_rows(tokens, plan), [tokens], 1 + nans)[0]
    same(grad_tokens, torch.tensor([[1.0], [0.0], [2.0]]).expand(3, 4))
    inputs = [(rows + nans).requires_grad_(), probs.requires_grad_()]
    grad_rows, grad_probs = grads(combine_rows(inputs[0], plan, probs), inputs)
    assert grad_rows.isfinite().all() and (grad_rows[n:] == 0).all()
    assert grad_probs.isfinite().all() and (grad_probs[indices == 3] == 0).all()


def test_permute_combines_in_fp32():
    """256 + 8 · 1: bf16 sums would stay at 256."""
    plan = plan_permutation(torch.arange(9)[None], 9)
    rows = torch.tensor([256.0] + [1.0] * 8).bfloat16()[:, None]
    assert combine_rows(rows, plan).item() == 264
    assert unpermute(rows, torch.zeros(9).long(), (1, 1)).item() == 264


def test_permute_sorts_chunks():
    sizes = torch.tensor([2, 0, 3, 1, 0, 4])
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    x = torch.randn(10, 3)
    probs = torch.rand(10)
    x_chunks = x.split(sizes.tolist())
    prob_chunks = probs.split(sizes.tolist())
    want = torch.cat([x_chunks[i] for i in order]), torch.cat([prob_chunks[i] for i in order])
    same(sort_chunks_by_idxs(x, sizes, order, probs=probs), want)
    assert sort_chunks_by_idxs(x, sizes, order)[1] is None


def test_permute_pads_the_map():
    for multiple in (1, 4, 16):
        routing_map = torch.rand(11, 6) < torch.tensor([0.0, 0.1, 0.4, 0.6, 0.9, 1.0])
        want = routing_map.clone()
        for e in range(6):
            others = [t for t in range(11) if not routing_map[t, e]]
            want[others[:-int(routing_map[:, e].sum()) % multiple], e] = True
        same(pad_routing_map(routing_map, multiple), want)


def test_permute_errors():
    check_error_table("""
        permute(x, ones[:5]) => routing_map has shape [5, 4]; needs [T = 6
        permute(x[None], ones) => tokens has shape [1, 6, 8]
        permute(x, ones[None]) => routing_map has shape [1, 6, 4]
        permute(x, ones.float()) => TypeError: routing_map is torch.float32
        permute(x, ones.cfloat()) => TypeError: routing_map is torch.complex64
        permute(x, ones, probs[:, :3]) => probs has shape [6, 3]
        permute(x, ones, fused=True) => num_out_tokens is None, which gives
        permute(x, ones, None, 7, drop_and_pad=True) => num_out_tokens is 7
        permute(x, ones, drop_and_pad=True) => is None; with drop_and_pad
        unpermute(x, index, (6, 8), probs) => probs is given without routing_map
        unpermute(x, index[:5], (6, 8)) => sorted_indices has shape [5]
        unpermute(x, index, (6, 7)) => permuted_tokens has shape [6, 8]; needs [rows, H = 7]
        unpermute(x[None], index, (6, 8)) => permuted_tokens has shape [1, 6, 8]
        unpermute(x, index, (6, 8), probs[:5], ones[:5]) => shape [5, 4]; needs [T = 6, E]
        unpermute(x, index, (6, 8), probs[:5], ones) => probs has shape [5, 4]
        plan_permutation(torch.zeros(6, 2), 4) => TypeError: indices is [6, 2] torch.float32
        plan_permutation(index, 4) => TypeError: indices is [6] torch.int64
        gather_rows(x[:5], plan) => tokens has shape [5, 8]
        gather_rows(x[None], plan) => tokens has shape [1, 6, 8]
        combine_rows(x, plan) => rows has shape [6, 8]
        combine_rows(torch.zeros(12, 8), plan, probs) => probs has shape [6, 4]
        sort_chunks_by_idxs(x, sizes, sizes[:2]) => sorted_idxs has shape [2]
        sort_chunks_by_idxs(x, sizes[None], sizes[None]) => split_sizes has shape [1, 3]
        sort_chunks_by_idxs(x, sizes, sizes, probs[:5]) => probs has 5 rows and input 6
        pad_routing_map(ones, 0) => pad_multiple is 0
        pad_routing_map(ones[None], 2) => routing_map has shape [1, 6, 4]
        """, x=torch.randn(6, 8), probs=torch.randn(6, 4), ones=torch.ones(6, 4).bool(),
        index=torch.zeros(6).long(), sizes=torch.full((3,), 2),
        plan=plan_permutation(torch.zeros(6, 2).long(), 4))


# ---- Activations ----

@pytest.mark.parametrize("fields", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_activation_matches_autograd(fields, weighted):
    """Values, and both ways to the gradient, against autograd through the plain formula in fp64."""
    c = MoEConfig(4, 4, 4, topk=2, **fields)
    options = c.activation_options
    del options["fp8_input_store"]
    y = leaf(5, 3, 8)
    inputs = [y]
    w = None
    want = torch.stack([act_loop(row, c) for row in y.flatten(0, 1)]).unflatten(0, (5, 3))
    g = torch.randn_like(want)
    if weighted:
        w = leaf(5, 3, 1)
        inputs = [y, w]
        want = want * w
    got = activation(y, weights=w, **options)
    close(got, want)
    got_grads = grads(got, inputs, g)
    close(got_grads, grads(want, inputs, g))
    with torch.no_grad():
        by_hand = activation_back(g, y, weights=w, **options)
    same(list(by_hand) if weighted else [by_hand], got_grads)


def test_activation_swiglu_names_gate_first():
    gate = 3.0
    up = 2.0
    want = up * gate / (1 + math.exp(-gate))
    close(swiglu(torch.tensor([[gate, up]])), torch.tensor([[want]]), 1e-6)
    g = torch.randn(6, 4)
    y = torch.randn(6, 8)
    w = torch.rand(6, 1, dtype=torch.float64)
    same(weighted_swiglu(y, w), activation(y, weights=w))
    same(swiglu_back(g, y), activation_back(g, y))
    same(weighted_swiglu_back(g, y, w), activation_back(g, y, weights=w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_rounds_once(dtype):
    y = torch.randn(64, 16, dtype=dtype)
    g = torch.randn(64, 8, dtype=dtype)
    w = torch.rand(64, 1)
    same(weighted_swiglu(y, w), weighted_swiglu(y.float(), w).to(dtype))
    want_y, want_w = weighted_swiglu_back(g.float(), y.float(), w)
    same(weighted_swiglu_back(g, y, w), (want_y.to(dtype), want_w))
    assert want_w.dtype == torch.float32
    assert weighted_swiglu_back(g, y, w.to(dtype))[1].dtype == dtype


def test_activation_gradient_passes_at_the_bound_of_the_clamp():
    """By formula: torch.clamp's own gradient there is 1 up to torch 2.13, and 0 from 2.14 on."""
    y = torch.tensor([[0.7, -0.7, 0.71, 0.7, -0.7, -0.71]], requires_grad=True)
    a, b = y.detach().clamp(max=0.7).chunk(2, dim=1)
    b = b.clamp(min=-0.7)
    s = a.sigmoid()
    within_a = torch.tensor([1.0, 1.0, 0.0])
    within_b = torch.tensor([1.0, 1.0, 0.0])
    want = torch.cat([b * s * (1 + a * (1 - s)) * within_a, a * s * within_b], 1)
    for function in (activation, compiled(activation, "inductor")):
        close(grads(function(y, clamp_value=0.7), [y])[0], want, 1e-6)
    same(activation_back(torch.ones(1, 3), y, clamp_value=0.7) == 0, want == 0)


@pytest.mark.parametrize("kind", list(kernels.ACTIVATIONS))
def test_activation_back_compiles_where_its_input_requires_grad(kind):
    """torch's backward functions have no derivative of their own."""
    g, y = torch.randn(3, 4), torch.randn(3, 8, requires_grad=True)
    if kernels.ACTIVATIONS[kind].parts == 1:
        y = torch.randn(3, 4, requires_grad=True)
    w = torch.rand(3, 1, requires_grad=True)
    for weights in (None, w):
        want = activation_back(g, y, kind, weights)
        close(compiled(activation_back, "inductor")(g, y, kind, weights), want, 1e-6)
    if kind == "swiglu":
        same(compiled(swiglu_back)(g, y), swiglu_back(g, y))
        close(compiled(weighted_swiglu_back)(g, y, w), weighted_swiglu_back(g, y, w), 1e-6)


def saved_bytes(function, exclude=()) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of function()."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function()
    for tensor in exclude:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


def test_activation_keeps_only_its_input():
    """With fp8_input_store as fp8, which the backward alone sees."""
    y = torch.randn(64, 32)
    w = torch.rand(64, 1)
    y[0, :2] = torch.tensor([1e4, -1e4])                              # beyond e4m3's 448
    stored = y.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    y.requires_grad_()
    act = functools.partial(activation, weights=w)
    assert saved_bytes(lambda: act(y * 1)) == (64 * 32 + 64) * 4
    assert saved_bytes(lambda: act(y * 1, fp8_input_store=True)) == 64 * 32 + 64 * 4
    out = act(y, fp8_input_store=True)
    g = torch.randn(64, 16)
    same(out, act(y))
    same(grads(out, [y], g)[0], activation_back(g, stored, weights=w)[0])


def test_activation_errors():
    check_error_table("""
        activation(x, "silu") => kind is 'silu'
        activation(x[:, :7]) => y has shape [6, 7]
        activation(x, weights=torch.ones(6)) => weights has shape [6]
        swiglu_back(x, x) => g has shape [6, 8]; needs [6, 4]
        activation_back(half, x, "relu2") => g has shape [6, 4]; needs [6, 8]
        activation(x, "relu2", clamp_value=1.0) => clamp_value is 1.0; relu2 has no such constant
        activation(x, "relu2", clamp_value=None) => has no such constant, it has none
        activation(x, alpha=1.702) => it has linear_offset, clamp_value
        activation(x, beta=2.0) => has no such constant
        activation(x, "situ", clamp_value=1.0) => it has beta, linear_beta
        activation(x, slope=1.0) => slope is 1.0; swiglu has no such constant
        activation(x, "situ", beta=0.0) => beta is 0.0
        activation_back(half, x, "situ", linear_beta=-1.0) => linear_beta is -1.0
        """, x=torch.randn(6, 8), half=torch.randn(6, 4))


# ---- Grouped product and experts ----

@pytest.mark.parametrize("dtype, tol", [
    (torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_experts_grouped_mm_matches_loop(dtype, tol):
    """Also with rows past the last offset, an expert without rows, and an expanded gradient."""
    rows = torch.randn(11, 8, dtype=dtype)
    weights = torch.randn(4, 8, 16, dtype=dtype)
    offsets = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    want = [torch.zeros(shape).double() for shape in [(11, 16), (11, 8), (4, 8, 16)]]
    for e, block in enumerate([range(0, 3), range(3, 3), range(3, 8), range(8, 9)]):
        for i in block:
            want[0][i] = rows[i].double() @ weights[e].double()
            want[1][i] = weights[e].double().sum(1)
            want[2][e] += rows[i].double()[:, None]
    rows[9:] = NAN                                          # pytorch #193633: garbage past the end
    rows.requires_grad_()
    weights.requires_grad_()
    out = grouped_mm(rows, weights, offsets)
    got = [out, *grads(out.sum(), [rows, weights])]                   # the gradient has stride 0
    assert [x.dtype for x in got] == [dtype] * 3
    close(got, want, tol * 10)
    assert (out[9:] == 0).all() and (got[1][9:] == 0).all() and (got[2][1] == 0).all()


def test_experts_grouped_mm_ignores_autocast():
    rows = torch.randn(4, 8)
    weights = torch.randn(2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_mm(rows, weights, torch.tensor([2, 4], dtype=torch.int32))
    assert out.dtype == torch.float32


@pytest.mark.parametrize("options", [
    dict(add_bias_linear=True), dict(latent_size=7, latent_norm=True)])
def test_experts_backward_ignores_autocast(options):
    layer = MoELayer(MoEConfig(6, 5, 4, topk=2, init_std=0.5, **options))
    x = torch.randn(9, 6).requires_grad_()
    leaves = [x, *layer.parameters()]
    want = grads(layer(x), leaves)
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = grads(y, leaves)
    same(got, want)


def with_native_products(monkeypatch) -> None:
    """From now on the CPU is a card on which torch's grouped product reads the offsets. In eager
    mode the rows that it leaves uninitialised are NaN."""
    def poisoned(rows, other, offs):
        out = product(rows, other, offs=offs)
        if out.ndim == 2 and not torch.compiler.is_compiling():
            out[offs[-1]:] = NAN
        return out
    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", poisoned)
    monkeypatch.setattr(kernels, "_on_card", lambda offsets: True)
    monkeypatch.setattr(kernels, "_native", lambda *operands: True)


@pytest.mark.parametrize("options", [
    dict(),
    dict(add_bias_linear=True, apply_probs_on="input", topk=1, pre_softmax=True),
    dict(add_bias_linear=True, activation="relu2"),
    dict(add_bias_linear=True, activation_fp8_input_store=True)])
def test_experts_formulas_for_cuda_equal_the_ops(monkeypatch, options):
    """The branch that runs torch's own grouped product, on the CPU, where it runs eagerly."""
    layer = random_layer(MoEConfig(16, 8, 5, **{"topk": 3, "init_std": 0.5, **options}))
    x = torch.randn(20, 16, requires_grad=True)
    mask = torch.arange(20) % 4 == 0                                  # rows past the last offset
    upstream = torch.randn(20, 16)
    inputs = [x, *layer.parameters()]
    want = layer(x, mask)
    want_grads = grads(want, inputs, upstream)
    with_native_products(monkeypatch)
    got = layer(x, mask)
    close([got, *grads(got, inputs, upstream)], [want, *want_grads], 1e-5)
    rows = torch.randn(20, 16, requires_grad=True)
    offsets = torch.tensor([3, 9, 14], dtype=torch.int32)
    out = grouped_mm(rows, torch.randn(3, 16, 8), offsets)
    same(out[14:], torch.zeros(6, 8))
    same(grads(out, [rows])[0][14:], torch.zeros(6, 16))


def test_experts_formulas_for_cuda_keep_as_little(monkeypatch):
    """Compiled, they keep neither the gathered rows nor the activation's output."""
    with_native_products(monkeypatch)
    T, H, F_, K = 256, 64, 32, 4
    layer = MoELayer(MoEConfig(H, F_, 8, topk=K, params_dtype=torch.bfloat16))
    function = compiled(layer, "inductor")
    x = torch.randn(T, H).bfloat16().requires_grad_()
    kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
    needed = 2 * (T * H + T * K * 2 * F_)                             # tokens, fc1's output
    assert kept <= 1.05 * needed + T * K * (3 * 8 + 4) + T * 8 * 4, kept     # ids, probs, logits


def test_experts_errors():
    x = torch.randn(6, 8)
    fc1 = torch.zeros(4, 2, 4, 8)
    fc2 = torch.zeros(4, 8, 4)
    plan = plan_permutation(torch.zeros(6, 2).long(), 4)

    def mlp(tokens=x, probs=torch.rand(6, 2), plan=plan, fc1=fc1, fc2=fc2, **options):
        return expert_mlp(tokens, probs, plan, fc1=fc1, fc2=fc2, **options)

    check_error_table("""
        grouped_mm(x, torch.zeros(4, 9, 2), ends) => weights has shape [4, 9, 2]; needs [E, H = 8
        grouped_mm(x, weights[0], ends) => weights has shape [8, 2]
        grouped_mm(x[0], weights, ends) => rows has shape [8]
        grouped_mm(x, weights, ends[:, None]) => offsets has shape [4, 1]
        grouped_mm(x, weights.double(), ends) => TypeError: rows is torch.float32
        grouped_mm(x, weights, ends.long()) => TypeError: offsets is torch.int64
        mlp(fc1=fc1[:, :1]) => fc1 has shape [4, 1, 4, 8]; needs [E = 4, P = 2
        mlp(fc1=fc1[0]) => fc1 has shape [2, 4, 8]
        mlp(fc2=fc2[:, :7]) => fc2 has shape [4, 7, 4]
        mlp(x[None]) => tokens has shape [1, 6, 8]
        mlp(x[:, :7]) => F, H = 7]
        mlp(x[:5]) => tokens has shape [5, 8]; needs [T = 6
        mlp(probs=x[:, :1]) => probs has shape [6, 1]; needs [T = 6, K = 2]
        mlp(plan=plan._replace(counts=x[0, :5])) => fc1 has shape [4, 2, 4, 8]; needs [E = 5
        mlp(fc1_bias=torch.zeros(4, 4, 2)) => fc1_bias has shape [4, 4, 2]
        mlp(fc2_bias=torch.zeros(4, 1)) => fc2_bias has shape [4, 1]
        mlp(fc1_bias=torch.zeros(4, 2, 4).double()) => TypeError: tokens is torch.float32
        mlp(fc2_bias=torch.zeros(4, 8).double()) => TypeError: tokens is torch.float32
        linear(x, torch.zeros(5, 7)) => weight has shape [5, 7]; needs [out, in = 8]
        linear(x, torch.zeros(5, 8), norm=x[0, :5]) => norm has shape [5]; needs [in = 8]
        linear(x, torch.zeros(5, 8).double()) => TypeError: rows is torch.float32
        mlp(x.double()) => TypeError: tokens is torch.float64
        mlp(fc2=fc2.double()) => TypeError: tokens is torch.float32
        mlp(kind="silu") => kind is 'silu'
        mlp(kind="relu2") => needs [E = 4, P = 1
        mlp(kind="relu2", linear_offset=1.0) => relu2 has no such constant
        """, mlp=mlp, x=x, fc1=fc1, fc2=fc2, plan=plan, ends=plan.offsets,
        weights=torch.zeros(4, 8, 2))


# ---- Config and errors ----

def test_config_errors():
    sizes = dict(hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2)

    def config(**fields):
        return MoEConfig(**{**sizes, **fields})

    def quantile(**fields):
        return config(**{"bias_update": "quantile", "enable_expert_bias": True, **fields})

    def sinkhorn(**fields):
        return config(**{"load_balancing_type": "sinkhorn", **fields})

    check_error_table("""
        config(hidden_size=0) => hidden_size = 0: needs a positive int
        config(ffn_hidden_size=-1) => ffn_hidden_size = -1: needs a positive int
        config(num_experts=8.0) => num_experts = 8.0: needs a positive int
        config(topk=0) => topk = 0: needs a positive int
        config(topk=9) => topk = 9, num_experts = 8
        config(topk=1) => topk = 1, norm_topk_prob = None, pre_softmax = False
        config(topk=1, score_function="sigmoid", norm_topk_prob=True) => norm_topk_prob = True
        config(activation="silu") => swiglu, geglu, quick_geglu, situ, relu2
        config(score_function="tanh") => softmax, sigmoid, sqrtsoftplus
        config(apply_probs_on="x") => needs one of activation, input
        config(apply_probs_on="input") => "input" is for topk = 1
        config(pre_softmax=True, score_function="sigmoid") => pre_softmax = True
        config(router_dtype=torch.int64) => router_dtype = torch.int64
        config(params_dtype="bf16") => params_dtype = 'bf16'
        config(num_groups=4) => num_groups = 4, group_topk = None
        config(group_topk=4) => group_topk = 4, num_groups = None: group_topk is nothing without
        config(group_score_topk=1) => group_score_topk = 1, num_groups = None
        config(num_groups=3, group_topk=1) => num_groups = 3 does not divide
        config(num_groups=4, group_topk=1, topk=3) => cannot hold topk = 3
        config(num_groups=4, group_topk=4) => group_score_topk is 0
        config(num_groups=4, group_topk=2, group_score_topk=3) => group_score_topk is 3
        config(activation="relu2", glu_linear_offset=1.0) => 'relu2', glu_linear_offset = 1.0
        config(activation="relu2", activation_clamp_value=7.0) => activation_clamp_value = 7.0
        config(activation="situ", activation_clamp_value=1.0) => activation_clamp_value = 1.0
        config(glu_alpha=1.0) => 'swiglu', glu_alpha = 1.0
        config(situ_beta=2.0) => 'swiglu', situ_beta = 2.0
        config(situ_linear_beta=2.0) => 'swiglu', situ_linear_beta = 2.0
        config(activation="situ", situ_beta=0.0) => situ_beta = 0.0
        config(activation="situ", situ_linear_beta=-1.0) => situ_linear_beta = -1.0
        config(activation_clamp_value=0.0) => activation_clamp_value = 0.0: needs a positive
        config(load_balancing_type="auxloss") => none, aux_loss, seq_aux_loss, global_aux
        config(load_balancing_type=aux, aux_loss_coeff=0.1) => a tuple of the same length
        config(load_balancing_type=aux, aux_loss_coeff=(0.1, 0.2)) => a tuple of the same length
        config(aux_loss_coeff=(0.1,)) => a tuple of the same length
        config(load_balancing_type=("none", *aux), aux_loss_coeff=(0.0, 0.1)) => at most once
        config(load_balancing_type="aux_loss") => aux_loss_coeff = 0.0: aux_loss needs
        config(load_balancing_type="seq_aux_loss", aux_loss_coeff=-0.1) => -0.1: seq_aux_loss needs
        config(load_balancing_type="global_aux_loss", aux_loss_coeff=NAN) => nan: global_aux_loss
        config(load_balancing_type=aux, aux_loss_coeff=(INF,)) => (inf,): aux_loss needs
        config(aux_loss_coeff=0.1) => load_balancing_type = 'none', aux_loss_coeff = 0.1
        sinkhorn(num_groups=2, group_topk=1) => 'sinkhorn', num_groups = 2
        sinkhorn(scaling_factor=2.0) => 'sinkhorn', scaling_factor = 2.0
        sinkhorn(enable_expert_bias=True) => enable_expert_bias = True
        sinkhorn(norm_topk_prob=True) => 'sinkhorn', norm_topk_prob
        sinkhorn(pre_softmax=True) => 'sinkhorn', pre_softmax
        sinkhorn(aux_loss_coeff=0.1) => sinkhorn goes alone
        sinkhorn(score_function="sigmoid") => sinkhorn goes alone
        config(load_balancing_type=("sinkhorn", *aux), aux_loss_coeff=(0.0, 0.1)) => goes alone
        config(z_loss_coeff=-1.0) => z_loss_coeff = -1.0
        config(input_jitter_eps=-0.1) => input_jitter_eps = -0.1
        config(capacity_factor=0.0) => capacity_factor = 0.0: needs a positive
        config(capacity_factor=1.0, token_drop_policy="random") => one of probs, position
        config(token_drop_policy="position") => capacity_factor = None
        config(pad_to_capacity=True) => pad_to_capacity is nothing without
        config(bias_update="median") => bias_update = 'median': needs one of sign, quantile
        quantile(enable_expert_bias=False) => bias_update = 'quantile', enable_expert_bias = False
        quantile(bias_update_rate=1e-2) => bias_update = 'quantile', bias_update_rate = 0.01
        quantile(topk=8) => quantile needs topk < num_experts
        quantile(num_groups=4, group_topk=2) => quantile needs topk < num_experts, no groups
        quantile(score_function="sqrtsoftplus") => quantile needs topk < num_experts
        config(latent_size=0) => latent_size = 0: needs a positive int
        config(latent_norm=True) => latent_norm = True, latent_size = None
        config(latent_size=4, latent_norm_eps=0.0) => latent_norm_eps = 0.0
        config(shared_expert_intermediate_size=0) => a positive int
        config(shared_expert_gate=True) => shared_expert_gate = True
        config(shared_expert_overlap=True) => shared_expert_overlap = True
        """, config=config, quantile=quantile, sinkhorn=sinkhorn, aux=("aux_loss",))


def test_config_and_state_dict():
    """The names and shapes; what does not fit changes nothing."""
    layer = MoELayer(MoEConfig(
        8, 5, 4, topk=2, router_bias=True, enable_expert_bias=True, add_bias_linear=True))
    before = copy.deepcopy(layer.state_dict())
    lines = [f"{name} {list(t.shape)} {t.dtype}" for name, t in before.items()]
    assert_expected_inline("\n".join(lines), """\
router.weight [4, 8] torch.float32
router.bias [4] torch.float32
router.expert_bias [4] torch.float32
experts.fc1 [4, 2, 5, 8] torch.float32
experts.fc2 [4, 8, 5] torch.float32
experts.fc1_bias [4, 2, 5] torch.float32
experts.fc2_bias [4, 8] torch.float32""")
    bad = {**before, "experts.fc1": torch.zeros(4, 2, 5, 9)}
    assert "size mismatch for experts.fc1" in error(layer.load_state_dict, bad)
    del bad["experts.fc1"]
    assert 'Missing key(s) in state_dict: "experts.fc1"' in error(layer.load_state_dict, bad)
    same(layer.state_dict(), before)


def signatures(owner, names=None) -> str:
    """The public functions that a module or a class defines: names, arguments in order,
    defaults. With `names` these alone."""
    home = getattr(owner, "__module__", owner.__name__)
    lines = []
    for name, function in vars(owner).items():
        if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != home:
            continue
        if names and name not in names:
            continue
        parameters = inspect.signature(function).parameters.values()
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        lines += textwrap.wrap(f"{name}{bare}", 96, subsequent_indent="    ")
    return "\n".join(lines)


def test_config_signatures():
    """Other people's code depends on names, order and defaults."""
    assert_expected_inline(signatures(kernels), """\
has_autocast(device_type)
without_autocast(x)
op(fake, mutates_args=(), cudagraph_unsafe=False)
upcast(x)
check_known(name, value, known)
check_shapes(known=None, **tensors)
is_integer(x)
router_gating_linear(tokens, weight, bias, router_dtype)
pick(scores, indices)
routing_to_map(probs, indices, num_experts)
merge_repeats(indices, num_experts)
topk_routing_with_score_function(logits, topk, use_pre_softmax=False, num_groups=None,
    group_topk=None, scaling_factor=None, score_function='softmax', expert_bias=None,
    dense_output=False, precomputed_indices=None, norm_topk_prob=None, norm_eps=1e-20,
    group_score_topk=None)
group_limited_topk(scores, topk, num_tokens, num_experts, num_groups, group_topk,
    group_score_topk=None)
check_groups(topk, num_experts, num_groups, group_topk, group_score_topk)
compute_routing_scores_for_aux_loss(logits, topk, score_function, padding_mask=None)
weighted_token_sum(scores, factors)
switch_load_balancing_loss_func(probs, tokens_per_expert, total_num_tokens, topk, num_experts,
    moe_aux_loss_coeff)
z_loss_func(logits, z_loss_coeff, padding_mask=None)
sinkhorn(cost, tol=0.0001, padding_mask=None)
get_capacity(num_tokens, num_experts, capacity_factor, min_capacity=None)
apply_router_token_dropping(routing_probs, routing_map, router_topk, capacity_factor,
    drop_policy='probs', pad_to_capacity=False)
get_updated_expert_bias(tokens_per_expert, expert_bias, expert_bias_update_rate,
    tp_dp_cp_group=None)
required_bias_histogram(scores, expert_bias, topk, num_bins=1000, padding_mask=None)
quantile_expert_bias(histogram, expert_bias, topk)
plan_permutation(indices, num_experts)
gather_rows(tokens, plan)
combine_rows(rows, plan, probs=None)
gather_probs(probs, plan)
pad_plan(plan, capacity)
permute(tokens, routing_map, probs=None, num_out_tokens=None, fused=False, drop_and_pad=False)
unpermute(permuted_tokens, sorted_indices, restore_shape, probs=None, routing_map=None,
    fused=False, drop_and_pad=False)
sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs=None)
pad_routing_map(routing_map, pad_multiple)
constants_of(kind)
activation(y, kind='swiglu', weights=None, fp8_input_store=False, **constants)
activation_back(g, y, kind='swiglu', weights=None, **constants)
swiglu(y)
weighted_swiglu(y, weights)
swiglu_back(g, y)
weighted_swiglu_back(g, y, weights)
grouped_mm(rows, weights, offsets)
expert_mlp(tokens, probs, plan, fc1, fc2, fc1_bias=None, fc2_bias=None, kind='swiglu',
    fp8_input_store=False, **constants)
linear(rows, weight, norm=None, eps=1e-05)""")
    assert_expected_inline(signatures(moe), """\
set_aux_loss_scale(scale)
finish_step(model)
update_expert_bias(model)
record_routing(model)
replay_routing(model, indices, missing='unrouted')
load_balancing_metrics(model, reduce=False)
overlap_state_check(required_state, next_state)
set_tensor_grad_fn_sequence_sr(tensor, value)""")
    assert_expected_inline(signatures(TopKRouter), """\
forward(self, input, padding_mask=None, topk_indices=None, dense_output=False)
route(self, input, padding_mask=None, topk_indices=None)
routing(self, logits, padding_mask=None)
apply_input_jitter(self, input)
choose(self, logits, padding_mask=None, topk_indices=None)
sinkhorn_load_balancing(self, logits)
get_aux_loss_coeff(self, aux_loss_type)
is_aux_loss_enabled(self)
apply_z_loss(self, logits, padding_mask=None)
attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, aux_loss_name,
    reduce_group, reduce_group_has_dp=False, valid_token_count=None)""")
    assert_expected_inline(signatures(SharedExpertMLP), """\
forward(self, hidden_states)
pre_forward_comm(self, input, wait_current_stream=True)
linear_fc1_forward_and_act(self, overlapped_comm_output=None)
linear_fc2_forward(self, overlapped_comm_output=None)
post_forward_comm(self)
get_output(self)
wait_current_stream(self)
reset_overlap(self)
reset_parameters(self)
shard(self, name)
gradient_group(self, name)""")
    assert_expected_inline(signatures(parallel), """\
group_size(group)
group_rank(group)
all_sum(x, group)
exchange(rows, send, receive, group)
wait(buffer)
enter_tp(x, group, sequence_parallel)
leave_tp(x, group, sequence_parallel)
copy_rows(parameter, rows, first=0)
gathered(parameter)
reduce_gradients(module)
gradient_norm(module_or_parameters, groups)""")


def failed_examples(docstring: str, names: dict) -> str:
    """What doctest reports of the `>>>` examples in a docstring; empty if they all hold."""
    test = doctest.DocTestParser().get_doctest(docstring, dict(names), "example", None, 0)
    reports = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)   # not pytest's -v
    runner.run(test, out=reports.append)
    return "".join(reports)


def check_examples(module) -> None:
    """Those in the docstrings of the module, and of every function, method and class in it."""
    assert failed_examples(">>> 1 + 1\n3", {}) and failed_examples(">>> 1 / 0", {})
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            torch.manual_seed(0)
            reports = failed_examples(ast.get_docstring(node) or "", vars(module))
            assert not reports, reports


def test_config_examples_in_docstrings():
    for module in (kernels, moe, parallel):
        check_examples(module)


# ---- Layer ----

def layer_loop(layer: MoELayer, x: Tensor, mask=None, given=None):
    """(output, attached losses) of the layer by the oracles; differentiable."""
    c = layer.config
    w = dict(layer.named_parameters())
    x_TH = x.flatten(0, -2)
    T = len(x_TH)
    padding = [False] * T if mask is None else mask.flatten().tolist()
    valid = [t for t in range(T) if not padding[t]]
    logits_TE = x_TH.new_zeros(T, c.num_experts)
    for t in range(T):
        logits_TE[t] = w["router.weight"] @ x_TH[t] + w.get("router.bias", 0)
    if given is not None:
        given = given.view(-1, c.topk)
    probs_TK, indices_TK = route_loop(logits_TE, c, layer.router.expert_bias, given_TK=given)
    for t in set(range(T)) - set(valid):
        indices_TK[t] = c.num_experts
    loss = logits_TE.sum() * 0
    if c.load_balancing_type == "aux_loss":
        loss = loss + switch_loss_loop(logits_TE, c, c.aux_loss_coeff, valid=valid)
    if c.z_loss_coeff:
        loss = loss + z_loss_loop(logits_TE, c.z_loss_coeff, valid)
    return moe_loop(x_TH, probs_TK, indices_TK, c=c, w=w).view_as(x), loss


def check_layer_against_loop(seed: int, backend: str | None = None) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    layer = random_layer(random_config(rng))
    S, B = rng.choice([(3, 2), (5, 1), (2, 4)])
    x = leaf(S, B, 6)
    mask = torch.rand(S, B) < 0.3 if rng.random() < 0.4 else None
    given = None
    if rng.random() < 0.3:
        given = random_indices(S * B, 8, layer.config.topk, nowhere=0.0, repeats=0.3)
    scale = rng.choice([1.0, 0.25])
    weights = dict(layer.named_parameters())
    upstream = torch.randn_like(x)
    inputs = [x, *weights.values()]

    want, loss = layer_loop(layer, x, mask, given=given)
    want_grads = torch.autograd.grad(
        (want * upstream).sum() + scale * loss, inputs, allow_unused=True, materialize_grads=True)
    function = layer if backend is None else compiled(layer, backend)
    got = function(x, mask, given)
    set_aux_loss_scale(scale)                                         # between forward and backward
    got_grads = grads(got, inputs, upstream)
    set_aux_loss_scale(1.0)
    names = ["y", "x", *weights]
    for name, a, b in zip(names, [got, *got_grads], [want, *want_grads], strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-8, atol=1e-8, msg=lambda m: f"{name}, seed {seed}, {layer.config}: {m}")


def test_layer_matches_loop():
    """Random configurations, output and every gradient, losses attached, in fp64."""
    for seed in range(80):
        check_layer_against_loop(seed)


@pytest.mark.parametrize("backend, seeds", [
    ("aot_eager", range(2)),
    pytest.param("aot_eager", range(2, 20), marks=slow),
    pytest.param("inductor", range(3), marks=slow)])
def test_layer_in_one_graph_matches_loop(backend, seeds):
    for seed in seeds:
        torch._dynamo.reset()
        check_layer_against_loop(1000 + seed, backend)


def test_layer_router_forward_and_route_are_one_choice():
    router = random_layer(MoEConfig(
        8, 4, 6, topk=3, score_function="sigmoid", enable_expert_bias=True,
        router_bias=True)).router
    x = torch.randn(5, 2, 8)
    mask = torch.rand(5, 2) < 0.4
    probs_TE, routing_map = router(x, mask)
    same((probs_TE, routing_map), kernels.routing_to_map(*router.route(x, mask), 6))
    same((probs_TE, routing_map), router.routing(router.gating(x), mask))
    assert routing_map.sum(1).tolist() == (~mask.flatten() * 3).tolist()


EVERYTHING = [
    dict(load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
         aux_loss_coeff=(0.1, 0.1, 0.1), z_loss_coeff=0.1, calculate_per_token_loss=True,
         add_bias_linear=True, router_bias=True, capacity_factor=1.0, input_jitter_eps=0.1),
    dict(load_balancing_type="sinkhorn", capacity_factor=1.0, token_drop_policy="position",
         apply_probs_on="input", topk=1),
]


@pytest.mark.parametrize(
    "options", [dict(), *EVERYTHING, dict(EVERYTHING[0], batch_first=True)],
    ids=["plain", "losses", "sinkhorn", "batch first"])
def test_layer_without_tokens_or_with_padding_alone(options):
    """An empty or zero result, and zero gradients, not None."""
    layer = MoELayer(MoEConfig(8, 4, 4, **{"topk": 2, **options}))
    nothing = torch.zeros(0, 3, 8, requires_grad=True)
    x = torch.randn(3, 2, 8, requires_grad=True)
    mask = torch.ones(3, 2, dtype=torch.bool)
    for function, *args in [(layer, x, mask), (layer, nothing), (compiled(layer), nothing)]:
        y = function(*args)
        assert y.shape == args[0].shape
        for zeros in (y, *grads(y, [args[0], *layer.parameters()])):
            assert (zeros == 0).all()


def test_layer_padding_mask_true_means_padding():
    """What a padded token holds changes no other output, no loss and no gradient
    (Megatron-LM #1984 #5569 #6111)."""
    layer = MoELayer(MoEConfig(
        8, 4, 4, topk=2, load_balancing_type="aux_loss", aux_loss_coeff=0.5, z_loss_coeff=0.5))
    x = torch.randn(6, 2, 8)
    mask = torch.rand(6, 2) < 0.4
    noisy = torch.where(mask[..., None], torch.randn_like(x) * 10, x)
    results = []
    for y in (layer(x, mask), layer(noisy, mask), layer(x[~mask])):
        results.append([y, *grads(y, list(layer.parameters()))])
    same(results[1], results[0])
    y, *weight_grads = results[0]
    assert (y[mask] == 0).all()
    close(results[2], [y[~mask], *weight_grads], 1e-6)     # the same tokens with no padding at all


def test_layer_nan_in_one_token_stays_there():
    layer = MoELayer(MoEConfig(8, 4, 6, topk=2, add_bias_linear=True, init_std=0.5))
    x = torch.randn(9, 8)
    others = torch.arange(9) != 4
    want = layer(x)
    x[4] = NAN
    used = layer.router.route(x)[1][4].tolist()
    untouched = [e for e in range(6) if e not in used]
    y = layer(x)
    assert y[4].isnan().all()
    same(y[others], want[others])
    for g in grads(y.nan_to_num(), list(layer.experts.parameters())):
        assert untouched and g[untouched].isfinite().all()


def test_layer_jitter_reaches_the_router_alone():
    """Same experts' input, other routing weights; off in eval (transformers #33969)."""
    layer = MoELayer(MoEConfig(8, 4, 4, topk=2, input_jitter_eps=0.5, init_std=0.5))
    x = torch.randn(20, 8)
    seen = []
    layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(x)
    same(seen, [x])
    noise = layer.router.apply_input_jitter(x) / x
    assert noise.min() >= 0.5 and noise.max() <= 1.5 and noise.std() > 0.1
    assert not torch.equal(layer.router.route(x)[0], layer.router.route(x)[0])
    layer.eval()
    same(layer.router.apply_input_jitter(x), x)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=slow)])
def test_layer_router_stays_fp32(whole):
    """In a bf16 model and under autocast, also compiled (megablocks #91, prime-rl #2952)."""
    for dtype in (torch.bfloat16, torch.float32):
        layer = MoELayer(MoEConfig(16, 8, 8, topk=2, params_dtype=dtype, init_std=0.3))
        function = compiled(layer) if whole else layer
        x = torch.randn(50, 16).to(dtype).requires_grad_()
        want = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            logits = layer.router.gating(x)
            y = function(x)
        assert logits.dtype == torch.float32 and y.dtype == dtype
        close(logits, x.double() @ layer.router.weight.double().t(), 1e-5)
        inputs = [x, *layer.parameters()]
        assert [g.dtype for g in grads(y, inputs)] == [p.dtype for p in inputs]
    assert not torch.equal(y, want)                                   # the experts ran in bf16
    close(y, want, 0.05)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=slow)])
def test_layer_aux_loss_reaches_the_router(backend):
    """Without the caller's help, at its full size, only in training (Automodel #1412, transformers
    #28255). One graph for all scales: the value at the backward counts."""
    layer = MoELayer(MoEConfig(
        8, 4, 4, topk=2, load_balancing_type="aux_loss", aux_loss_coeff=0.3, z_loss_coeff=0.2))
    weights = [layer.router.weight]
    x = torch.randn(7, 2, 8)
    function = layer if backend is None else compiled(layer, backend)
    logits = x.double().flatten(0, 1) @ layer.router.weight.double().t()
    loss = switch_loss_loop(logits, layer.config, 0.3, valid=range(14))
    want = grads(loss + z_loss_loop(logits, 0.2, range(14)), weights)[0]
    for scale in (1.0, 0.5, torch.tensor(4.0)):
        y = function(x)
        set_aux_loss_scale(scale)
        close(grads(y, weights, torch.zeros_like(y)), [want * scale], 1e-6)
    assert counters["stats"]["unique_graphs"] == (backend is not None)
    layer.eval()
    y = layer(x)
    assert (grads(y, weights, torch.zeros_like(y))[0] == 0).all()


def test_layer_metrics_of_the_latest_training_forward():
    first = MoELayer(MoEConfig(8, 4, 4, topk=2, load_balancing_type="aux_loss", aux_loss_coeff=0.3))
    second = MoELayer(MoEConfig(8, 4, 4, topk=3, z_loss_coeff=0.2))
    model = torch.nn.Sequential(first, second)
    assert load_balancing_metrics(model)["max_violation"].isnan().all()
    x = torch.randn(9, 8)
    y = first(x)
    indices = [first.router.route(x)[1], second.router.route(y)[1]]
    counts = torch.stack([torch.bincount(i.flatten(), minlength=4) for i in indices])
    for function in (model, compiled(model)):
        function(x)
        m = load_balancing_metrics(model)
        assert list(m) == ["load_balancing_loss", "z_loss", "max_violation", "tokens_per_expert"]
        same(m["tokens_per_expert"], counts)
        close(m["max_violation"], counts.amax(1) / counts.double().mean(1) - 1, 1e-6)
        assert m["load_balancing_loss"].isnan().tolist() == [False, True]
        assert m["z_loss"].isnan().tolist() == [True, False]
        close(m["z_loss"][1], z_loss_func(second.router.gating(y), 1.0), 1e-6)
        model.eval()(torch.randn(5, 8))                               # is not counted
        same(load_balancing_metrics(model.train())["tokens_per_expert"], counts)


def test_layer_metrics_of_layers_of_different_sizes():
    first, second = [MoELayer(MoEConfig(8, 4, E, topk=2)) for E in (3, 5)]
    model = torch.nn.Sequential(first, second)
    model(torch.randn(9, 8))
    m = load_balancing_metrics(model)
    counts = [layer.router.counts.last_tokens_per_expert.tolist() for layer in model]
    assert m["tokens_per_expert"].tolist() == [[*counts[0], -1, -1], counts[1]]
    for violation, count in zip(m["max_violation"].tolist(), counts):
        assert violation == pytest.approx(max(count) / (18 / len(count)) - 1)


def test_layer_dtype_casts_keep_the_expert_bias():
    """fp32 through casts and round trips: steps of 1e-3 vanish in bf16 (Megatron-LM #1482)."""
    layer = MoELayer(MoEConfig(8, 4, 4, topk=2, enable_expert_bias=True))
    want = torch.tensor([1.001, 1.002, -0.5003, 0.0])
    layer.router.expert_bias.copy_(want)
    for cast in (lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16),
                 lambda m: m.bfloat16(), copy.deepcopy):
        layer = cast(layer)
        same(layer.router.expert_bias, want)
    assert layer.router.weight.dtype == torch.bfloat16
    other = MoELayer(layer.config).bfloat16()
    other.load_state_dict(layer.state_dict())
    same(other.router.expert_bias, want)


def test_layer_on_the_meta_device():
    config = MoEConfig(
        8, 4, 4, topk=2, enable_expert_bias=True, router_bias=True, add_bias_linear=True)
    torch.manual_seed(5)
    want = MoELayer(config)
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.router.reset_parameters()
    layer.experts.reset_parameters()
    same(layer.state_dict(), want.state_dict())


def test_layer_errors():
    check_error_table("""
        layer(torch.randn(6, 9)) => input has shape [6, 9]
        layer(x.bfloat16()) => TypeError: tokens is torch.bfloat16
        layer(x, torch.zeros(5).bool()) => padding_mask is [5] torch.bool
        layer(x, torch.zeros(6)) => padding_mask is [6] torch.float32
        layer(x, None, torch.zeros(6, 3).long()) => topk_indices is [6, 3] torch.int64
        layer(x, None, torch.zeros(6, 2)) => topk_indices is [6, 2] torch.float32
        layer(x, None, torch.zeros(6, 2).bool()) => [6, 2] torch.bool; needs [6, 2] or [6, 2] of an
        load_balancing_metrics(torch.nn.Linear(2, 2)) => (Linear) has no Router
        """, layer=MoELayer(MoEConfig(8, 4, 4, topk=2)), x=torch.randn(6, 8))


def test_layer_batch_first_is_the_transposed_layer():
    """[B, S, H] in and out, masks and indices too; each loss has its gradient, in one graph too."""
    torch.manual_seed(0)
    config = shared_config(
        init_std=0.5, z_loss_coeff=0.1, load_balancing_type=tuple(moe.LOSS_NAMES),
        aux_loss_coeff=(0.2, 0.3, 0.4))
    layer = MoELayer(config)
    mine = MoELayer(dataclasses.replace(config, batch_first=True))
    mine.load_state_dict(layer.state_dict())
    x = leaf(7, 3, 6)
    mask = torch.rand(7, 3) < 0.3
    indices = torch.rand(7, 3, 4).argsort(-1)[..., :2]
    for given in ((), (mask,), (mask, indices)):
        want = layer(x, *given)
        want_grads = grads(want.sin(), [x, *layer.parameters()])
        for call in (mine, compiled(mine)):
            mine.router.reset_global_aux_loss_tracker()
            got = call(x.transpose(0, 1), *(t.transpose(0, 1) for t in given)).transpose(0, 1)
            close_all([got, *grads(got.sin(), [x, *mine.parameters()])], [want, *want_grads])
        layer.router.reset_global_aux_loss_tracker()
        for a, b in zip(load_balancing_metrics(mine).values(),
                        load_balancing_metrics(layer).values()):
            close(a.double(), b.double(), 1e-6)
    # Taken the other way round, the sequences' loss is another one.
    layer(x.transpose(0, 1))
    wrong = load_balancing_metrics(layer)["seq_load_balancing_loss"]
    mine(x.transpose(0, 1))
    assert (wrong - load_balancing_metrics(mine)["seq_load_balancing_loss"]).abs() > 1e-3
    assert "needs [B, S, 6] or [T, 6]" in error(mine, x[..., :5])
    close(mine(x.flatten(0, 1)), layer(x.flatten(0, 1)))     # [T, H] is one sequence


def test_layer_output_init_std_is_that_of_the_output_projections():
    config = small_config(latent_size=5, shared_expert_intermediate_size=8, init_std=0.5,
                          shared_expert_gate=True, router_bias=True)
    states = []
    for std in (None, 0.125):
        torch.manual_seed(4)
        states.append(MoELayer(dataclasses.replace(config, output_init_std=std)).state_dict())
    for name, scaled in states[1].items():
        ratio = 0.25 if name.endswith(("fc2", "latent_up.weight")) else 1.0
        same(scaled, states[0][name] * ratio)
    assert "0 or more, or None" in error(small_config, output_init_std=-1.0)


# ---- Router: balancing, counting ----

TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def small_config(**fields) -> MoEConfig:
    return MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=2, **fields)


def close_all(got, want, tol: float = 1e-9) -> None:
    torch.testing.assert_close(list(got), list(want), rtol=tol, atol=tol, equal_nan=True)


def outcome(function, x: Tensor, module: torch.nn.Module, upstream: Tensor | None = None) -> list:
    """The output, then the gradients of the input and of every parameter."""
    y = function(x)
    return [y, *grads(y, [x, *module.parameters()], upstream)]


def random_balance(rng: random.Random) -> dict:
    """Fields of MoEConfig: any subset of the losses, per-token losses, dropping; or sinkhorn."""
    fields = dict(z_loss_coeff=rng.choice([None, 0.1]), calculate_per_token_loss=rng.random() < 0.3)
    if rng.random() < 0.4:
        fields |= dict(
            capacity_factor=rng.choice([0.5, 1.0]),
            pad_to_capacity=rng.random() < 0.5,
            token_drop_policy=rng.choice(["probs", "position"]))
    if rng.random() < 0.15:
        none = ("num_groups", "group_topk", "group_score_topk", "scaling_factor", "norm_topk_prob")
        return dict.fromkeys(none) | fields | dict(
            load_balancing_type="sinkhorn",
            aux_loss_coeff=0.0,
            score_function="softmax",
            enable_expert_bias=False,
            pre_softmax=False)
    types = tuple(kind for kind in TYPES if rng.random() < 0.5)
    if not types:
        return fields | dict(load_balancing_type="none", aux_loss_coeff=0.0)
    coeffs = tuple(0.1 * (i + 1) for i in range(len(types)))
    return fields | dict(load_balancing_type=types, aux_loss_coeff=coeffs)


class RouterLoop:
    """Oracle of TopKRouter in training: one token at a time, with sums of its own."""

    def __init__(self, config: MoEConfig, bias_E):
        self.config = config
        self.bias_E = bias_E
        self.counts = [0] * config.num_experts
        self.sums = [0] * config.num_experts
        self.steps = 0

    def __call__(self, logits_SBE, mask=None, given=None):
        """(probs [T, K], indices [T, K], loss)."""
        S, B, E = logits_SBE.shape
        logits_TE = logits_SBE.flatten(0, 1)
        valid = [t for t in range(S * B) if mask is None or not mask.flatten()[t]]
        if "sinkhorn" in self.config.balancing:
            probs, indices = self.sinkhorn(logits_TE, valid, given)
        else:
            probs, indices = route_loop(logits_TE, self.config, self.bias_E, given_TK=given)
        indices = indices.clone()
        for t in set(range(S * B)) - set(valid):
            indices[t] = E
        for e in indices[indices < E].tolist():
            self.counts[e] += 1
        if self.config.capacity_factor is not None:
            self.drop(probs, indices)
        return torch.where(indices < E, probs, 0.0), indices, self.loss(logits_TE, valid, B)

    def sinkhorn(self, logits_TE, valid, given):
        """The top K of the valid tokens' balanced costs, after 256 rounds at most; a score of all
        logits is the prob."""
        K = self.config.topk
        indices = given
        if given is None:
            indices = torch.zeros(len(logits_TE), K, dtype=torch.int64)
            A = logits_TE.detach()[valid].exp()
            d1 = torch.ones(A.shape[1], dtype=A.dtype)
            for _ in range(256):
                d0 = 1 / max(len(valid), 1) / (A @ d1 + 1e-8)
                last = d1
                d1 = 1 / len(d1) / (d0 @ A + 1e-8)
                if (d1 - last).abs().mean() <= 1e-4:
                    break
            for t, d, row in zip(valid, d0, A):
                indices[t] = torch.tensor(best(list(d1 * row * d), K))
        kind = "sigmoid" if K == 1 else "softmax"
        rows = []
        for row, chosen in zip(logits_TE, indices):
            scores = [*score_loop(list(row), kind), row.new_zeros(())]
            rows.append(torch.stack([scores[e] for e in chosen]))
        return merge_loop(torch.stack(rows), indices, self.config.num_experts)

    def drop(self, probs, indices) -> None:
        """Each expert keeps its first C tokens, by prob or by position."""
        E = self.config.num_experts
        C = math.ceil(indices.numel() / E * self.config.capacity_factor)
        for e in range(E):
            takers = [tuple(place) for place in (indices == e).nonzero().tolist()]
            if self.config.token_drop_policy == "probs":
                takers.sort(key=lambda place: -probs[place].item())
            for place in takers[C:]:
                indices[place] = E

    def loss(self, logits_TE, valid, B):
        config = self.config
        loss = logits_TE.new_zeros(())
        if config.z_loss_coeff:
            loss = loss + z_loss_loop(logits_TE, config.z_loss_coeff, valid)
        for kind, coeff in config.balancing.items():
            if kind == "aux_loss":
                loss = loss + switch_loss_loop(logits_TE, config, coeff, valid=valid)
            if kind == "seq_aux_loss":
                for b in range(B):
                    own = [t for t in valid if t % B == b]
                    loss = loss + switch_loss_loop(logits_TE, config, coeff, valid=own) / B
            if kind == "global_aux_loss":
                loss = loss + self.global_loss(logits_TE, coeff, valid)
        if config.calculate_per_token_loss:
            return loss * len(valid)
        return loss

    def global_loss(self, logits_TE, coeff, valid):
        """coeff · E/(K·T²) · Σ_e n_e Σ_t s_te, with the mean n and T of the forwards so far."""
        E = self.config.num_experts
        K = self.config.topk
        loss = logits_TE.new_zeros(())
        self.steps += 1
        for t in valid:
            for e in best(list(logits_TE[t]), K):
                self.sums[e] += 1
        total = sum(self.sums) / self.steps / K
        for t in valid:
            s = score_loop(list(logits_TE[t]), self.config.score_function)
            mean = sum(n * x for n, x in zip(self.sums, s)) / self.steps
            loss = loss + mean / sum(s)
        return loss * coeff * E / K / max(total, 1) ** 2


def check_router_against_loop(seed: int, backend: str | None) -> None:
    """Two microbatches, because the global loss sums over them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    config = random_config(rng, **random_balance(rng))
    router = random_layer(config).router
    route = router.route
    if backend is not None:
        route = compiled(route, backend)
    oracle = RouterLoop(config, router.expert_bias)
    S, B = rng.choice([(3, 2), (4, 3), (7, 1)])
    masked = rng.random() < 0.4
    replay = rng.random() < 0.2
    scale = rng.choice([1.0, 0.5])
    set_aux_loss_scale(scale)
    for _ in range(2):
        x = torch.randn(S, B, 6, dtype=torch.float64) * 2
        mask = given = None
        if masked:
            mask = torch.rand(S, B) < 0.3
        if replay:
            given = random_indices(S * B, 8, config.topk, repeats=0.3)
        probs, indices = route(x, mask, given)

        rows = [router.weight @ row for row in x.flatten(0, 1)]
        logits = torch.stack(rows).view(S, B, 8)
        if router.bias is not None:
            logits = logits + router.bias
        want_probs, want_indices, loss = oracle(logits, mask, given)
        same(indices, want_indices)
        close(probs, want_probs)

        upstream = torch.randn_like(probs)
        leaves = list(router.parameters())
        total = (want_probs * upstream).sum() + scale * loss
        want = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        close_all(grads(probs, leaves, upstream), want, 1e-8)
    if config.enable_expert_bias:
        assert router.local_tokens_per_expert.tolist() == oracle.counts
    if "global_aux_loss" in config.balancing:
        assert router.global_tokens_per_expert.tolist() == oracle.sums
        assert router.ga_steps == oracle.steps


FUZZ = int(os.environ.get("MOE_FUZZ", "300"))         # random router configurations; MOE_FUZZ=5000


@pytest.mark.parametrize("first, last", [
    (0, 60), pytest.param(60, 180, marks=slow), pytest.param(180, FUZZ, marks=slow)])
def test_router_matches_loop(first, last):
    """All options mixed. One configuration in thirty also runs as one graph."""
    for seed in range(first, last):
        check_router_against_loop(seed, backend=None)
        if seed % 30 == 29:
            check_router_against_loop(seed, backend="aot_eager")


@pytest.mark.parametrize("K", [1, 3])
def test_router_sinkhorn_takes_given_indices(K):
    """Unrouted and repeated ones too: probs and gradients of the loop."""
    config = MoEConfig(
        6, 5, 8, topk=K, load_balancing_type="sinkhorn", params_dtype=torch.float64,
        router_dtype=torch.float64)
    router = TopKRouter(config)
    x = torch.randn(7, 1, 6, dtype=torch.float64)
    given = random_indices(7, 8, K, repeats=0.5)
    probs, indices = router.route(x, topk_indices=given)
    logits = torch.stack([router.weight @ row for row in x.flatten(0, 1)]).view(7, 1, 8)
    want_probs, want_indices, _ = RouterLoop(config, None)(logits, given=given)
    same(indices, want_indices)
    close(probs, want_probs)
    upstream = torch.randn_like(probs)
    close(grads(probs, [router.weight], upstream), grads(want_probs, [router.weight], upstream))


def test_router_base_class_is_ready_to_use():
    """A router of one's own: two methods, and the weight is drawn as TopKRouter's."""
    class Argmax(moe.Router):
        def routing(self, logits):
            chosen = logits.flatten(0, -2).argmax(-1)
            one_hot = F.one_hot(chosen, self.config.num_experts)
            return one_hot.to(logits.dtype), one_hot.bool()

        def forward(self, input):
            return self.routing(self.gating(input))
    config = small_config(router_bias=True)
    torch.manual_seed(1)
    mine = Argmax(config)
    torch.manual_seed(1)
    same(mine.weight, TopKRouter(config).weight)
    same(mine.bias, torch.zeros(6))
    mine.set_layer_number(3)
    assert mine.layer_number == 3
    assert mine(torch.randn(5, 3, 8))[1].sum() == 15
    with pytest.raises(TypeError):
        moe.Router(config)


def test_router_coefficients():
    config = small_config(load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.7, 0.3))
    router = TopKRouter(config)
    assert [router.get_aux_loss_coeff(kind) for kind in TYPES] == [0.1, 0.7, 0.3]
    assert router.is_aux_loss_enabled()
    plain = TopKRouter(small_config(z_loss_coeff=0.1))
    assert plain.get_aux_loss_coeff("aux_loss") == 0.0 and not plain.is_aux_loss_enabled()


def test_router_sinkhorn_ignores_autocast():
    x = torch.randn(64, 8)
    want = sinkhorn(x)
    with torch.autocast("cpu", torch.bfloat16):
        same(sinkhorn(x), want)


def choice(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


ROUTER_ERRORS = [             # the method, its arguments, a phrase of the message
    ("routing", (torch.zeros(5, 3, 6), choice(3, 5).bool()),
     "padding_mask is [3, 5] torch.bool; needs [5, 3] torch.bool, True = padding"),
    ("forward", (torch.zeros(8),), "input has shape [8]; needs [S, B, 8] or [T, 8]"),
    ("forward", (torch.zeros(2, 5, 3, 8),), "input has shape [2, 5, 3, 8]"),
    ("route", (torch.zeros(5, 3, 8), None, choice(5, 2)),
     "topk_indices is [5, 2] torch.int64; needs [15, 2] or [5, 3, 2] of an integer dtype"),
    ("route", (torch.zeros(5, 3, 8), None, choice(3, 5, 2)), "is [3, 5, 2]"),
    ("route", (torch.zeros(5, 8), None, torch.zeros(5, 2)), "is [5, 2] torch.float32"),
    ("attach_and_log_load_balancing_loss", (torch.zeros(5), 0.1, torch.zeros(()), "mse", None),
     "aux_loss_name is 'mse'; known: load_balancing_loss")]


def test_router_errors():
    router = TopKRouter(small_config())
    check_errors((functools.partial(getattr(router, method), *args), phrase)
                 for method, args, phrase in ROUTER_ERRORS)


def test_router_padded_capacity_map():
    """The [T, E] form holds the fillers, at prob 0; the [T, K] form never does."""
    router = random_layer(small_config(capacity_factor=1.0, pad_to_capacity=True)).router
    x = torch.randn(13, 8)
    probs_TE, map_TE = router(x)
    probs, indices = router.route(x)
    assert map_TE.sum(0).tolist() == [math.ceil(13 * 2 / 6)] * 6
    real_probs, real_map = kernels.routing_to_map(probs, indices, 6)
    same(probs_TE, real_probs)
    assert (map_TE & real_map).equal(real_map)
    assert (probs_TE[map_TE & ~real_map] == 0).all()


def test_router_forced_balance():
    """Random experts of even load whatever the weights, and still a gradient."""
    router = MoELayer(small_config(force_load_balancing=True)).router
    with torch.no_grad():
        router.weight[0] += 100
    probs, indices = router.route(torch.rand(2400, 8))
    counts = torch.bincount(indices.flatten(), minlength=6)
    assert (counts - 800).abs().max() < 120
    assert grads(probs[:, 0], [router.weight])[0].any()


# Ways to run a layer: under checkpoints, in a graph, and both.

def checkpointed(f, x, reentrant):
    return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)


def nested(f, x, inner, outer):
    return checkpointed(lambda y: checkpointed(f, y, inner), x, outer)


def selective(f, x):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])
    return checkpoint(f, x, use_reentrant=False, context_fn=keep)


WAYS = {
    "plain": lambda f: f,
    "reentrant": lambda f: lambda x: checkpointed(f, x, True),
    "non-reentrant": lambda f: lambda x: checkpointed(f, x, False),
    "compiled": lambda f: compiled(f),
    "compiled inside reentrant": lambda f: WAYS["reentrant"](compiled(f)),
    "compiled inside non-reentrant": lambda f: WAYS["non-reentrant"](compiled(f)),
    "compiled around reentrant": lambda f: torch.compile(WAYS["reentrant"](f), backend="aot_eager"),
    "compiled around non-reentrant": lambda f: compiled(WAYS["non-reentrant"](f)),
    "inductor around non-reentrant": lambda f: compiled(WAYS["non-reentrant"](f), "inductor"),
    "inductor inside non-reentrant": lambda f: WAYS["non-reentrant"](compiled(f, "inductor")),
    "nested non in non": lambda f: lambda x: nested(f, x, False, outer=False),
    "nested non in re": lambda f: lambda x: nested(f, x, False, outer=True),
    "nested re in non": lambda f: lambda x: nested(f, x, True, outer=False),
    "nested re in re": lambda f: lambda x: nested(f, x, True, outer=True),
    "selective": lambda f: lambda x: selective(f, x),
}


def slow_but(quick, names) -> list:
    """The cases of a test: those that are not quick run with SLOW=1."""
    return [pytest.param(name, marks=[] if name in quick else slow) for name in names]


EAGER_WAYS = tuple(name for name in WAYS if "compiled" not in name and "inductor" not in name)
QUICK_WAYS = (*EAGER_WAYS, "compiled around non-reentrant")


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, WAYS))
def test_router_counts_exactly_once(way):
    """torchtitan #1593: a checkpoint's second forward must not count again. One step, two forwards
    in flight, three accumulated; nothing in eval or under no_grad. The histogram of biases too."""
    layer = MoELayer(small_config(
        score_function="sigmoid", enable_expert_bias=True, bias_update="quantile",
        input_jitter_eps=0.1))
    function = WAYS[way](layer)
    counts = layer.router.local_tokens_per_expert

    def forward():
        return function(torch.randn(7, 8, requires_grad=True)).sum()
    forward().backward()
    assert counts.sum() == 14
    a = forward()
    b = forward()
    a.backward(), b.backward()
    assert counts.sum() == 42
    for _ in range(3):
        forward().backward()
    assert counts.sum() == 84
    with torch.no_grad():
        forward()
    layer.eval()
    forward().backward()
    assert counts.sum() == 84
    assert (layer.router.bias_histogram.sum(1) == 42).all()
    assert load_balancing_metrics(layer)["tokens_per_expert"].sum() == 14


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, [
    "reentrant", "non-reentrant", "compiled", "compiled inside reentrant", "nested re in re",
    "compiled around non-reentrant", "inductor around non-reentrant"]))
def test_router_global_loss_under_checkpoints(way):
    """The running sums grow once. Each forward's gradient uses the sums of its own first pass, over
    three accumulated forwards. Two are in flight where that is possible: a reentrant checkpoint
    counts in the order of the backwards, and a checkpoint inside a graph refuses a forward whose
    sums have moved on."""
    in_turn = way not in ("non-reentrant", "compiled")
    results = []
    for name in ("plain", way):
        torch.manual_seed(3)
        config = small_config(load_balancing_type="global_aux_loss", aux_loss_coeff=0.5)
        layer = MoELayer(config)
        function = WAYS[name](layer)
        router = layer.router
        a, b, c = [torch.randn(8, 8).requires_grad_() for _ in range(3)]
        ya = function(a)
        if in_turn:
            ya.sum().backward()
        yb = function(b)
        if not in_turn:
            ya.sum().backward()
        yb.sum().backward()
        function(c).sum().backward()
        assert router.ga_steps == 3 and router.global_tokens_per_expert.sum() == 48
        results.append([router.weight.grad, router.global_tokens_per_expert.clone()])

        if "around" in name:
            pending = function(a)
            function(b)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                pending.sum().backward()
        router.reset_global_aux_loss_tracker()
        assert router.ga_steps == 0 and router.global_tokens_per_expert.sum() == 0
    close_all(*results, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_router_recomputation_is_bitwise(reentrant):
    """Ties, jitter and dropping in a checkpoint: routing and gradients of the run without
    (Automodel #2635 #3140 #3325 #3743, NeMo-RL #1203)."""
    config = small_config(
        input_jitter_eps=0.3, capacity_factor=0.7, z_loss_coeff=0.1,
        load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.2, 0.3))
    results = []
    for run in (lambda f, x: f(x), functools.partial(checkpointed, reentrant=reentrant)):
        torch.manual_seed(3)
        layer = MoELayer(config)
        with torch.no_grad():
            layer.router.weight[1:4] = layer.router.weight[:1]
        x = torch.randn(6, 2, 8, requires_grad=True)
        y = run(layer, x)
        y.square().sum().backward()
        results.append([y, x.grad, *[p.grad for p in layer.parameters()]])
    same(*results)


def test_router_counts_do_not_depend_on_the_split():
    """Bias counts exactly, per-token losses' gradient to rounding, however a batch is cut
    (Megatron-LM #3672 #5798 #7213, torchtitan #4148)."""
    results = []
    for pieces in (1, 4):
        torch.manual_seed(3)
        layer = MoELayer(small_config(
            score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.25,
            load_balancing_type="seq_aux_loss", aux_loss_coeff=0.2, z_loss_coeff=0.1,
            calculate_per_token_loss=True))
        for piece in torch.randn(5, 8, 8).chunk(pieces, dim=1):
            layer(piece).sum().backward()
        router = layer.router
        counts = router.local_tokens_per_expert.clone()
        update_expert_bias(layer)
        assert (router.local_tokens_per_expert == 0).all()
        results.append([counts, router.expert_bias, router.weight.grad])
    (counts, bias, gradient), other = results
    same([counts, bias], other[:2])
    assert counts.sum() == 80
    same(bias, (counts.mean() - counts).sign() * 0.25)
    close(gradient, other[2], 1e-5)


def test_router_counts_beyond_what_bf16_holds():
    """Units survive in sums that bf16 would round (Megatron-LM #7081)."""
    layer = MoELayer(small_config(enable_expert_bias=True)).bfloat16()
    counts = layer.router.local_tokens_per_expert.fill_(2.0 ** 23)
    layer(torch.randn(7, 8).bfloat16())
    assert (counts - 2.0 ** 23).sum() == 14 and counts.dtype == torch.float32


def test_router_hooks_fire():
    """In the layer, and through route: each is the router's call."""
    layer = MoELayer(small_config())
    calls = []
    layer.router.register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(4, 8)
    layer(x), layer.router.route(x), layer.router(x)
    assert len(calls) == 3


# ---- Process groups ----

def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@functools.cache
def rank_server():
    """Ranks are forked from one server, which has imported torch and this file once for all tests.

    It starts with the first rank and ends with this process. It sees no CUDA device: a process that
    has asked for one cannot be forked.
    """
    from multiprocessing import forkserver
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        __name__, "torch._inductor.compile_fx", "torch.distributed.checkpoint",
        "torch.distributed.fsdp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def start_ranks(function, ranks: int, *args) -> list:
    """Processes of function(rank, ranks, port, *args)."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        arguments = (rank, ranks, port, *args)
        process = rank_server().Process(target=function, args=arguments, daemon=True)
        process.start()
        processes.append(process)
    return processes


def end_ranks(processes: list) -> None:
    for process in processes:
        process.kill()
        process.join()


def over_ranks(ranks: int):
    """A test whose body(rank, ranks, **fixtures) runs in `ranks` processes of one gloo group."""
    def decorate(body):
        def test(**fixtures):
            spawn_gloo(body, ranks, **fixtures)
        test.body = body
        test.__name__ = body.__name__
        test.__module__ = body.__module__
        test.__doc__ = body.__doc__
        _, _, *fixtures = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(fixtures)
        return test
    return decorate


def spawn_gloo(function, ranks: int, seconds: float = 240, **kwargs) -> None:
    """function(rank, ranks, **kwargs) in `ranks` processes of one gloo group.

    If a rank raises, dies or takes too long, all are killed, and the error has the tracebacks.
    """
    from multiprocessing.connection import wait
    errors = rank_server().SimpleQueue()
    name = function.__module__, function.__name__
    processes = start_ranks(_rank_main, ranks, name, kwargs, errors)
    deadline = time.monotonic() + seconds
    try:
        while True:
            codes = [process.exitcode for process in processes]
            if any(codes) or None not in codes:
                break
            pairs = zip(processes, codes)
            running = [process.sentinel for process, code in pairs if code is None]
            if not wait(running, deadline - time.monotonic()):
                raise AssertionError(f"{function.__name__}: ranks hang")
        if any(codes):
            texts = [f"exit codes of the ranks: {codes}"]
            while not errors.empty():
                texts.append(errors.get())
            raise AssertionError("\n".join(texts))
    finally:
        end_ranks(processes)


def _rank_main(rank, ranks, port, name, kwargs, errors):
    import traceback
    try:
        module, function = name
        function = getattr(sys.modules.get(module) or importlib.import_module(module), function)
        with gloo_group(rank, ranks, port):
            getattr(function, "body", function)(rank, ranks, **kwargs)
            torch.distributed.barrier()              # nobody leaves while others still connect
    except BaseException:
        errors.put(f"rank {rank}: {traceback.format_exc()[-20000:]}")
        sys.exit(1)


@contextlib.contextmanager
def gloo_group(rank: int, ranks: int, port: int):
    """The group of all ranks. A rank that waits for another one gives up after 60 s."""
    from datetime import timedelta
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def mesh_of(**sizes: int):
    """mesh_of(dp=2, ep=2): dp is the outer dim."""
    names = tuple(sizes)
    return torch.distributed.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


def one_rank_fails(rank, ranks, how):
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1:
        raise ZeroDivisionError
    if how == "hangs":
        time.sleep(600)
    torch.distributed.all_reduce(torch.ones(1))


def test_groups_report_a_rank_that_fails():
    """spawn_gloo, on which all tests over ranks stand: no failure passes, no rank stays behind."""
    start = time.monotonic()
    for how, text in [
            ("raises", "ZeroDivisionError"), ("killed", "-9"), ("hangs", "ZeroDivisionError")]:
        with pytest.raises(AssertionError, match=text):
            spawn_gloo(one_rank_fails, 2, how=how)
        assert not torch.multiprocessing.active_children()
    with pytest.raises(AssertionError, match="ranks hang"):
        spawn_gloo(one_rank_fails, 1, how="hangs", seconds=2)
    assert time.monotonic() - start < 300


def groups_of_meshes(rank, ranks):
    """from_mesh: who is in which group, as rank 1 of 4 sees it."""
    def members(**sizes):
        groups = vars(ProcessGroups.from_mesh(mesh_of(**sizes)))
        ranks_of = torch.distributed.get_process_group_ranks
        return {name: group and ranks_of(group) for name, group in groups.items()}

    everyone = [0, 1, 2, 3]
    ep_tp = members(ep=2, tp=2)
    dp_ep = members(dp=2, ep=2)
    if rank == 1:
        assert ep_tp == dict(
            tp=[0, 1], ep=[1, 3], tp_cp=[0, 1], dp_cp=[1, 3], tp_dp_cp=everyone, expt_dp=[0, 1])
        assert dp_ep == dict(
            tp=None, ep=[0, 1], tp_cp=None, dp_cp=everyone, tp_dp_cp=everyone, expt_dp=[1, 3])
    assert "needs names among" in error(ProcessGroups.from_mesh, mesh_of(pp=4))
    assert "needs tp_dp_cp too" in error(ProcessGroups, ep=torch.distributed.group.WORLD)


def test_groups_of_a_mesh():
    spawn_gloo(groups_of_meshes, 4)


LOSSES = dict(load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.2, 0.3), z_loss_coeff=0.1)


def balanced_over_ranks(rank, ranks):
    """Two microbatches on each rank against one process on the whole batch. The ranks cut up the
    sequence, or the batch."""
    world = torch.distributed.group.WORLD
    global_loss = dict(load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    for (axis, groups, losses), bias_update in itertools.product([
            (0, ProcessGroups(tp_dp_cp=world, tp_cp=world), LOSSES),
            (1, ProcessGroups(tp_dp_cp=world), global_loss)], ("sign", "quantile")):
        config = MoEConfig(
            8, 4, num_experts=6, topk=2, score_function="sigmoid", enable_expert_bias=True,
            bias_update=bias_update, router_dtype=torch.float64, params_dtype=torch.float64,
            **losses)
        whole, mine = whole_and_mine(config, groups)
        route = mine.router.route
        if bias_update == "quantile" and axis == 0:
            route = compiled(route)

        def part(tensor):
            return tensor.chunk(ranks, axis)[rank].contiguous()
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(8, 4, 8, dtype=torch.float64)
                mask = torch.rand(8, 4) < 0.3
                upstream = torch.randn(8, 4, 2, dtype=torch.float64)
                whole.router.route(x, mask)[0].backward(upstream.flatten(0, 1))
                route(part(x), part(mask))[0].backward(part(upstream).flatten(0, 1))
            close(parallel.all_sum(mine.router.weight.grad, world), whole.router.weight.grad)
            got = load_balancing_metrics(mine, reduce=True)
            want = load_balancing_metrics(whole)
            for name in want:
                exact = name in ("tokens_per_expert", "max_violation")
                close(got[name].double(), want[name].double(), 0 if exact else 1e-5)
            finish_both(mine, whole)
            mine.zero_grad(), whole.zero_grad()

    whole, mine = whole_and_mine(config, ProcessGroups(tp_cp=world))      # and tp_cp alone
    x = torch.randn(8, 4, 8, dtype=torch.float64)
    whole.router.route(x), mine.router.route(x.chunk(ranks)[rank])
    same(load_balancing_metrics(mine, reduce=True)["tokens_per_expert"],
         load_balancing_metrics(whole)["tokens_per_expert"])


def test_groups_share_counts_losses_and_bias():
    """Over groups they are what one process computes on the whole batch."""
    spawn_gloo(balanced_over_ranks, 2)


# ---- Shared expert ----

ONE_GRAPH = {
    "losses": dict(load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.2, 0.3), z_loss_coeff=0.1,
                   calculate_per_token_loss=True, shared_expert_gate=True, latent_size=5,
                   latent_norm=True, score_function="sigmoid", enable_expert_bias=True,
                   bias_update="quantile"),
    "sinkhorn": dict(load_balancing_type="sinkhorn"),
    "bias and groups": dict(score_function="sigmoid", enable_expert_bias=True, num_groups=2,
                            group_topk=1, scaling_factor=2.5),
    "padding": dict(capacity_factor=0.7, pad_to_capacity=True, token_drop_policy="position"),
    "gpt_oss": dict(activation="quick_geglu", glu_linear_offset=1.0, activation_clamp_value=0.5,
                    add_bias_linear=True, router_bias=True),
    "relu2 on the input": dict(activation="relu2", apply_probs_on="input", capacity_factor=0.7,
                               topk=1, pre_softmax=True),
    "situ": dict(activation="situ", situ_beta=1.5, situ_linear_beta=2.0, add_bias_linear=True),
}

STEPS = {                     # each step, and the state that it needs
    "pre_forward_comm": "IDLE",
    "linear_fc1_forward_and_act": "PRE_FORWARD_COMM_DONE",
    "linear_fc2_forward": "FC1_FORWARD_DONE",
    "post_forward_comm": "FC2_FORWARD_DONE",
    "get_output": "POST_FORWARD_COMM_DONE"}


def shared_config(**fixed) -> MoEConfig:
    small = dict(
        hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, shared_expert_intermediate_size=8,
        params_dtype=torch.float64, router_dtype=torch.float64)
    return MoEConfig(**{**small, **fixed})


def shared_loop(shared: SharedExpertMLP, x: Tensor) -> Tensor:
    """fc2 · act(fc1 · x) · sigmoid(gate · x), one token at a time."""
    rows = []
    for x_H in x.flatten(0, -2):
        y_H = shared.fc2 @ act_loop(shared.fc1.flatten(0, 1) @ x_H, shared.config)
        if shared.gate_weight is not None:
            y_H = y_H * score_loop([shared.gate_weight[0] @ x_H], "sigmoid")[0]
        rows.append(y_H)
    return torch.stack(rows).view(x.shape)


def take_step(shared, name: str, x: Tensor):
    """One step by its name. Only the first takes the input."""
    if name == "pre_forward_comm":
        return shared.pre_forward_comm(x)
    return getattr(shared, name)()


def in_steps(shared, x: Tensor) -> Tensor:
    for name in STEPS:
        out = take_step(shared, name, x)
    return out


@pytest.mark.parametrize("kind", kernels.ACTIVATIONS)
def test_shared_matches_loop(kind):
    """At once, in five steps and as one graph: the output and gradients of the loop. The steps give
    the same bits."""
    values = dict(glu_linear_offset=0.5, activation_clamp_value=0.6, situ_beta=1.5,
                  situ_linear_beta=0.7, glu_alpha=1.3)
    takes = kernels.constants_of(kind)
    options = {name: value for name, value in values.items() if moe._CONSTANTS[name] in takes}
    config = shared_config(activation=kind, init_std=0.5, shared_expert_overlap=True, **options)
    upstream = torch.randn(5, 3, 6, dtype=torch.float64)
    for gate in (False, True):
        shared = SharedExpertMLP(config, gate)
        x = leaf(5, 3, 6)
        want = outcome(functools.partial(shared_loop, shared), x, shared, upstream=upstream)
        at_once = outcome(shared, x, shared, upstream=upstream)
        close_all(at_once, want)
        same(outcome(functools.partial(in_steps, shared), x, shared, upstream=upstream), at_once)
    close_all(outcome(compiled(shared), x, shared, upstream=upstream), want)


@pytest.mark.parametrize("overlap, backend", [
    (False, None), (True, None), (True, "aot_eager"),
    pytest.param(False, "aot_eager", marks=slow)])
def test_shared_in_the_layer_matches_loop(overlap, backend):
    """The layer with a shared expert is the routed loop plus the shared loop. A padding token gets
    the shared one alone."""
    config = shared_config(shared_expert_overlap=overlap, shared_expert_gate=True, init_std=0.5)
    layer = random_layer(config)
    shared = layer.shared_experts
    mask = torch.rand(5, 3) < 0.3
    x = leaf(5, 3, 6)
    upstream = torch.randn(5, 3, 6, dtype=torch.float64)

    def loop(x):
        return layer_loop(layer, x, mask)[0] + shared_loop(shared, x)
    want = outcome(loop, x, layer, upstream=upstream)
    if backend is not None:
        layer.compile(backend=backend, fullgraph=True)
    got = outcome(lambda x: layer(x, mask), x, layer, upstream=upstream)
    assert shared._overlap_state is SharedExpertState.IDLE and shared.cached_output is None
    close_all(got, want)
    same(got[0][mask], shared(x)[mask])


def test_shared_under_autocast():
    """The products run in bf16; the sum with the routed experts' output is in fp32."""
    layer = MoELayer(shared_config(
        shared_expert_overlap=True, shared_expert_gate=True, latent_size=7, latent_norm=True,
        init_std=0.3, params_dtype=torch.float32, router_dtype=torch.float32))
    x = torch.randn(9, 6, requires_grad=True)
    exact = outcome(layer, x, layer)
    with torch.autocast("cpu", torch.bfloat16):
        got = outcome(layer, x, layer)
        whole = outcome(compiled(layer), x, layer)
    assert {tensor.dtype for tensor in (*got, *whole)} == {torch.float32}
    assert not torch.equal(got[0], exact[0])
    for a, b, c in zip(got, whole, exact, strict=True):
        unit = c.abs().max().item()
        close(a, c, 0.05 * unit)
        close(b, a, 0.02 * unit)


def test_shared_steps_refuse_every_wrong_order():
    """In every state every other step is refused, and nothing changes. The right one goes on."""
    shared = SharedExpertMLP(shared_config(shared_expert_overlap=True), gate=True)
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    tensors = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output",
               "gate_score")

    def caches():
        return [getattr(shared, name) for name in (*tensors, "_overlap_state")]

    def refused(step, phrase):
        before = caches()
        message = error(take_step, shared, step, x)
        assert message == f"RuntimeError: {step} needs {phrase}; reset_overlap() starts again"
        assert all(a is b for a, b in zip(before, caches()))

    found = 0
    for right, state in STEPS.items():
        for step, needed in STEPS.items():
            if step != right:
                refused(step, f"the state {needed}, found {state}")
        for name in tensors:
            value = getattr(shared, name)
            if value is not None:
                found += 1
                setattr(shared, name, None)
                refused(right, f"{name} from the step before, found None")
                setattr(shared, name, value)
        out = take_step(shared, right, x)
    assert found == 8
    close(out, shared(x))
    assert caches() == [None] * 5 + [SharedExpertState.IDLE]

    plain = SharedExpertMLP(shared_config(), gate=False)
    assert "needs shared_expert_overlap=True, found False" in error(plain.get_output)
    assert plain.stream is None
    plain.wait_current_stream()
    wrong = torch.randn(4, 7, dtype=torch.float64)
    assert "hidden_states has shape [4, 7]; needs [.., 6]" in error(plain, wrong)
    assert "shared_expert_intermediate_size is None" in error(
        SharedExpertMLP, shared_config(shared_expert_intermediate_size=None), False)


def test_shared_layer_works_again_after_an_exception(monkeypatch):
    """In any step, in the router, in the experts, in a wrong input: the next forward is right."""
    config = shared_config(shared_expert_overlap=True, shared_expert_gate=True)
    layer = MoELayer(config)
    shared = layer.shared_experts
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    want = layer(x)
    parts = ("_score", "_enter", "_fc1_and_act", "_fc2", "_leave", *STEPS)
    places = [(layer.router, "forward"), (layer.experts, "forward"), (layer, "dispatch")]

    def fail(*_, **__):
        raise ZeroDivisionError
    for owner, name in [*((shared, part) for part in parts), *places]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(ZeroDivisionError):
                layer(x)
        assert shared._overlap_state is SharedExpertState.IDLE and shared.cached_fc1_input is None
        same(layer(x), want)
    with pytest.raises(ValueError):
        layer(torch.randn(4, 1, 7, dtype=torch.float64))
    shared.pre_forward_comm(x)
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:   # a step by itself, too
        patch.setattr(shared, "_fc1_and_act", fail)
        shared.linear_fc1_forward_and_act()
    assert shared._overlap_state is SharedExpertState.IDLE and shared.gate_score is None
    same(layer(x), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_shared_overlap_under_checkpoint(reentrant):
    layer = MoELayer(shared_config(shared_expert_overlap=True, init_std=0.5))
    x = leaf(4, 2, 6)
    leaves = [x, *layer.parameters()]
    want = grads(layer(x).sin().sum(), leaves)
    for _ in range(2):
        for tensor in leaves:
            tensor.grad = None
        checkpointed(layer, x, reentrant).sin().sum().backward()
        same([tensor.grad for tensor in leaves], want)


class Recorder:
    """A stream that writes down who waits for whom, and every operation that runs on it."""
    current: list = []

    def __init__(self, name, trace):
        self.name = name
        self.trace = trace

    def wait_stream(self, other):
        self.trace.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        Recorder.current.append(self)

    def __exit__(self, *_):
        Recorder.current.pop()


def stand_in(patch, main, side, record_stream=lambda tensor, stream: None) -> None:
    """From now on the CPU is an accelerator with these two streams, on any build of torch."""
    Recorder.current = [main]
    patch.setattr(moe, "_current_stream", lambda device: Recorder.current[-1])
    patch.setitem(moe._SIDE_STREAMS, torch.device("cpu"), side)
    patch.setattr(torch.Tensor, "record_stream", record_stream)


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, trace):
        ctx.name = name
        ctx.trace = trace
        trace.append(f"{name} on {Recorder.current[-1].name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.trace.append(f"{ctx.name} backward")
        return grad, None, None


def recorded(shared, trace, monkeypatch) -> None:
    """From now on the shared expert's streams and products write to the trace."""
    stand_in(monkeypatch, Recorder("main", trace), Recorder("side", trace), lambda _, stream: (
        trace.append(f"a tensor lives until {stream.name} has read it")))

    def noted(function, name, *args):
        y = function(*args)
        if y is not None:
            return Note.apply(y, "shared" + name, trace)
    for name in ("_score", "_enter", "_fc1_and_act", "_fc2", "_leave"):
        monkeypatch.setattr(shared, name, functools.partial(noted, getattr(shared, name), name))


def test_shared_order_and_waits(monkeypatch):
    """Steps that are given `overlapped_comm_output`: in the backward each communication goes first,
    and the side stream waits."""
    shared = SharedExpertMLP(shared_config(shared_expert_overlap=True), gate=True)
    trace = []
    recorded(shared, trace, monkeypatch)
    x = leaf(4, 1, 6)
    shared.pre_forward_comm(x)
    dispatched = Note.apply(x.sin(), "dispatch", trace)
    shared.linear_fc1_forward_and_act(dispatched)
    rows = Note.apply(dispatched.cos(), "experts", trace)
    combined = Note.apply(rows.sin(), "combine", trace)
    shared.linear_fc2_forward(combined)
    shared.post_forward_comm()
    out = combined + shared.get_output()
    trace.append("")
    out.sum().backward()
    assert_expected_inline("\n".join(trace), """\
side waits for main
a tensor lives until side has read it
shared_score on side
shared_enter on side
dispatch on main
shared_fc1_and_act on side
experts on main
combine on main
shared_fc2 on side
shared_leave on side
main waits for side
a tensor lives until main has read it

combine backward
side waits for main
a tensor lives until side has read it
shared_leave backward
shared_fc2 backward
experts backward
dispatch backward
side waits for main
shared_fc1_and_act backward
shared_enter backward
shared_score backward
main waits for side
a tensor lives until main has read it
a tensor lives until main has read it
a tensor lives until main has read it
a tensor lives until main has read it""")


def test_shared_frozen_parts_on_the_side_stream(monkeypatch):
    """What is frozen gets no gradient. The rest gets the same gradients as without a stream."""
    shared = SharedExpertMLP(shared_config(shared_expert_overlap=True, init_std=0.5), gate=True)
    for frozen in (("fc2",), ("input", "fc1"), ("input", "fc1", "gate_weight")):
        for name, parameter in shared.named_parameters():
            parameter.requires_grad_(name not in frozen)
        x = torch.randn(4, 1, 6, dtype=torch.float64, requires_grad="input" not in frozen)
        leaves = [tensor for tensor in (x, *shared.parameters()) if tensor.requires_grad]
        want = grads(shared(x), leaves)
        with monkeypatch.context() as patch:
            recorded(shared, [], patch)
            same(grads(in_steps(shared, x), leaves), want)
            shared.pre_forward_comm(x)
            trained = [weight.requires_grad for weight in shared._weights]
            assert trained == [name not in frozen for name in ("fc1", "fc2", "gate_weight")]
            shared.reset_overlap()


def test_shared_layer_order_and_waits(monkeypatch):
    """In the layer: the shared expert's steps on the side stream, around the routed experts."""
    layer = MoELayer(shared_config(shared_expert_overlap=True))
    trace = []
    recorded(layer.shared_experts, trace, monkeypatch)
    route = layer.router.gating
    run_experts = layer.experts.forward
    monkeypatch.setattr(layer.router, "gating", lambda *args: Note.apply(
        route(*args), "router", trace))
    monkeypatch.setattr(layer.experts, "forward", lambda *args: Note.apply(
        run_experts(*args), "experts", trace))
    out = layer(leaf(4, 1, 6))
    trace.append("")
    out.sum().backward()
    shown = [line for line in trace if "lives" not in line]
    assert_expected_inline("\n".join(shown), """\
side waits for main
shared_enter on side
router on main
shared_fc1_and_act on side
experts on main
shared_fc2 on side
shared_leave on side
main waits for side

side waits for main
shared_leave backward
shared_fc2 backward
experts backward
side waits for main
shared_fc1_and_act backward
router backward
shared_enter backward
main waits for side""")


def test_shared_layer_on_two_streams_matches_one(monkeypatch):
    """Output and gradients of the layer without overlap, also where the input is frozen."""
    for frozen in ((), ("x",), ("router.weight", "experts.fc1", "experts.fc2")):
        layer = MoELayer(shared_config(shared_expert_overlap=True, shared_expert_gate=True))
        plain = MoELayer(dataclasses.replace(layer.config, shared_expert_overlap=False))
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad="x" not in frozen)
        results = []
        for model in (plain, layer):
            leaves = [x] if x.requires_grad else []
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
                leaves += [parameter] if parameter.requires_grad else []
            with monkeypatch.context() as patch:
                if model is layer:
                    recorded(layer.shared_experts, [], patch)
                y = model(x)
                results.append([y, *grads(y.sin(), leaves)])
        close(*results)


@pytest.mark.parametrize("gate", [False, True])
def test_shared_recomputation_starts_on_the_main_stream(gate, monkeypatch):
    """A non-reentrant checkpoint recomputes at the first node that unpacks a tensor, on that node's
    stream. It has to be the last one of the overlap, which is on the main stream."""
    layer = MoELayer(shared_config(shared_expert_overlap=True, shared_expert_gate=gate))
    recorded(layer.shared_experts, [], monkeypatch)
    route = layer.router.forward
    apply = moe._FromSideStream.apply
    asked_by = []
    made_on = []

    def noted_route(*args, **kwargs):
        node = torch._C._current_autograd_node()
        asked_by.append(None if node is None else node.name())
        return route(*args, **kwargs)

    def noted_apply(x):
        made_on.append(Recorder.current[-1].name)
        return apply(x)
    monkeypatch.setattr(layer.router, "forward", noted_route)
    monkeypatch.setattr(moe._FromSideStream, "apply", noted_apply)
    x = leaf(4, 1, 6)
    checkpointed(layer, x, reentrant=False).sum().backward()
    assert asked_by == [None, "_FromSideStreamBackward"] and set(made_on) == {"main"}


class Clock:
    """A stream of a RaceCheck. `seen[stream]` is the last operation of that stream which is done
    before the next operation here."""

    def __init__(self, check, name):
        self.check = check
        self.name = name
        self.seen = collections.Counter()

    def wait_stream(self, other):
        if self.check.notices("waits"):
            self.seen |= other.seen

    def __enter__(self):
        self.check.entered.append(self)

    def __exit__(self, *_):
        self.check.entered.pop()


class Used(NamedTuple):
    """A block of memory: the stream whose pool it is from, and (stream, number) of operations."""
    gone: Callable
    home: Clock
    recorded: set
    written: list
    read: list


class RaceCheck(torch.utils._python_dispatch.TorchDispatchMode):
    """Whether an eager forward and backward on two streams would race on an accelerator.

    Each operation reads and writes memory at a time of its stream's clock. An operation of the
    other stream has to be waited for before its result is read, before what it reads is written
    over, and before its memory is given out again, unless the memory was recorded on that stream.
    Autograd runs a node on the stream of its forward. Its own waits between nodes are not counted:
    they would hide that one of the project's is missing, which a graph then lacks.

    `ignored` is what does not happen: "_fork_stream waits, forward", ..
    """
    bodies = {op._qualname: op._init_fn for op in (moe._fork_stream, moe._join_stream)}

    def __init__(self, patch, ignored=None):
        super().__init__()
        self.main, self.side = Clock(self, "main"), Clock(self, "side")
        self.entered = []
        self.node_streams = {}               # a node's sequence number -> its forward's stream
        self.memory = {}
        self.freed = []                      # (pool, stream, number): freed before that was done
        self.races = []
        self.ignored = ignored
        self.noticed = []
        stand_in(patch, self.main, self.side, lambda tensor, stream: (
            self.notices("records") and self.used(tensor).recorded.add(stream)))
        patch.setattr(moe, "_current_stream", lambda device: self.current())

    def notices(self, what) -> bool:
        frame = sys._getframe()
        while frame.f_code.co_filename != moe.__file__:
            frame = frame.f_back
        direction = "forward" if torch._C._current_autograd_node() is None else "backward"
        self.noticed.append(f"{frame.f_code.co_name} {what}, {direction}")
        return self.noticed[-1] != self.ignored

    def current(self) -> Clock:
        node = torch._C._current_autograd_node()
        if self.entered:
            return self.entered[-1]
        return self.main if node is None else self.node_streams.get(node._sequence_nr(), self.main)

    def used(self, tensor) -> Used:
        from torch.multiprocessing.reductions import StorageWeakRef
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            gone = StorageWeakRef(storage).expired
            self.memory[storage._cdata] = Used(gone, self.current(), set(), [], [])
        return self.memory[storage._cdata]

    def check(self, what, stream, operations):
        for other, number in operations:
            if stream.seen[other] < number:
                self.races.append(f"{what} on {stream.name} before {other.name} is done")

    def collect(self):
        for key, used in list(self.memory.items()):
            if used.gone():
                del self.memory[key]
                self.freed += [(used.home, *operation) for operation in used.written + used.read
                               if operation[0] not in (used.home, *used.recorded)]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        stream = self.current()
        # An autograd function's node is made before its forward runs.
        self.node_streams.setdefault(torch._C._autograd._get_sequence_nr() - 1, stream)
        body = self.bodies.get(function.name().split(".")[0])
        if body is not None:
            with self:
                return body(*args, **kwargs)

        self.collect()
        stream.seen[stream] += 1
        now = stream, stream.seen[stream]
        leaves = torch.utils._pytree.tree_leaves
        inputs = []
        changed = False
        for i, argument in enumerate(function._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_written = bool(argument.alias_info and argument.alias_info.is_write)
            changed |= is_written
            inputs += [(is_written, self.used(x)) for x in leaves(value) if isinstance(x, Tensor)]
        before = set(self.memory)
        out = function(*args, **kwargs)
        outputs = [x for x in leaves(out) if isinstance(x, Tensor)]
        new = [x for x in outputs if x.untyped_storage()._cdata not in before]
        if new:
            freed = [operation for home, *operation in self.freed if home is stream]
            self.check(f"memory is given to {function.name()}", stream, freed)
            self.freed = [row for row in self.freed if row[0] is not stream]
        if outputs and not new and not changed:              # a view touches nothing
            return out
        if re.match(r"aten::(new_\w+|\w+_like)$", function.name().split(".")[0]):
            inputs = []                                      # a shape alone
        for is_written, used in inputs:
            self.check(f"{function.name()} reads", stream, used.written)
            if is_written:
                self.check(f"{function.name()} writes", stream, used.read)
                used.written[:], used.read[:] = [now], []
            else:
                used.read.append(now)
        for tensor in new:
            self.used(tensor).written[:] = [now]
        return out


def races_of(function, x: Tensor, leaves, ignored=None, noticed=None) -> list[str]:
    """The races of a forward without grad, of two forwards in a row, and of both backwards."""
    for leaf in leaves:
        leaf.grad = None
    with pytest.MonkeyPatch.context() as patch, RaceCheck(patch, ignored) as check:
        with torch.no_grad():
            function(x.detach()).sin()
        (function(x).sin().sum() + function(x).sin().sum()).backward()
        for leaf in leaves:
            leaf.grad.sin()
    if noticed is not None:
        noticed += check.noticed
    return check.races


class Normed(torch.nn.Module):
    """A cheap op before each layer, in place of a model."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]))
        return x


@pytest.mark.parametrize("way", slow_but(["plain", "non-reentrant"], EAGER_WAYS))
@pytest.mark.parametrize("gate", [False, True])
def test_shared_overlap_has_no_race(gate, way):
    """Automodel #3109: every configuration, alone, behind a norm, twice, and in checkpoints."""
    for options in ONE_GRAPH.values() if way in ("plain", "non-reentrant") else [{}]:
        options = {**options, "shared_expert_overlap": True, "shared_expert_gate": gate}
        layers = [MoELayer(shared_config(**options)) for _ in range(2)]
        for model in (layers[0], Normed(layers[0]), Normed(*layers)):
            x = leaf(4, 3, 6)
            model(x)                                         # what is made at the first call
            races = races_of(WAYS[way](model), x, [x, *model.parameters()])
            assert not races, (options, races[:3])


def test_shared_every_wait_is_needed():
    """Without it, the check finds a race. In a layer the side stream waits before it works again:
    a record for the current stream is needed only where the steps do not wait by themselves. What
    _BackwardStreamWait waits for is an order, not a tensor."""
    config = shared_config(shared_expert_overlap=True, shared_expert_gate=True)
    model = Normed(MoELayer(config))
    shared = SharedExpertMLP(config, gate=True)

    def without_waiting(x):
        """Two inputs, for both of which the side stream waits at once."""
        inputs = [x.cos(), x.sin()]
        shared.wait_current_stream()
        while inputs:
            shared.pre_forward_comm(inputs.pop(), wait_current_stream=False)
            for name in [*STEPS][1:]:
                y = getattr(shared, name)()
            y = y.cos()
            if y.requires_grad:
                y.sum().backward()
        return y.detach().requires_grad_()
    x = leaf(4, 3, 6)
    lines = []
    for function, module in ((model, model), (without_waiting, shared)):
        noticed = []
        leaves = [x, *module.parameters()]
        assert not races_of(function, x, leaves, noticed=noticed)
        for what in dict.fromkeys(noticed):
            found = races_of(function, x, leaves, ignored=what)
            race = found[0].replace("moe_kernels::", "") if found else "no race"
            lines.append(f"{what}: {race}")
        lines.append("")
    assert_expected_inline("\n".join(lines), """\
_fork_stream waits, forward: aten::mm reads on side before main is done
_fork_stream records, forward: memory is given to aten::index_select on main before side is done
_join_stream waits, forward: aten::clone reads on main before side is done
_join_stream records, forward: no race
_fork_stream waits, backward: aten::mul.Tensor reads on side before main is done
_fork_stream records, backward: memory is given to value_in_backward on main before side is done
backward waits, backward: no race
_join_stream waits, backward: aten::clone reads on main before side is done
_join_stream records, backward: no race

wait_current_stream waits, forward: aten::mm reads on side before main is done
forward records, forward: memory is given to aten::new_empty on main before side is done
_join_stream waits, forward: aten::clone reads on main before side is done
_join_stream records, forward: memory is given to aten::mm on side before main is done
_fork_stream waits, backward: aten::mul.Tensor reads on side before main is done
_fork_stream records, backward: no race
backward waits, backward: no race
_join_stream waits, backward: aten::clone reads on main before side is done
_join_stream records, backward: memory is given to aten::mm on side before main is done
""")


def test_shared_overlap_survives_pickle_and_deepcopy(monkeypatch):
    """The side stream is made when the parameters come to a device: drawn, loaded, copied, or
    moved."""
    import pickle
    devices = []
    monkeypatch.setattr(moe, "_make_side_stream", lambda device: devices.append(device.type))
    layer = MoELayer(shared_config(shared_expert_overlap=True))
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        same(other(x), layer(x))
    same(compiled(other)(x), layer(x))
    assert devices == ["cpu", "cpu", "cpu"]
    layer.to("meta")
    with torch.device("meta"):
        MoELayer(shared_config(shared_expert_overlap=True))
    assert devices[3:] == ["meta", "meta"]


def test_shared_sequence_number_without_a_graph():
    moe.set_tensor_grad_fn_sequence_sr(torch.zeros(3), 7)             # no grad_fn: nothing to do
    moe.set_tensor_grad_fn_sequence_sr(None, 7)
    y = torch.zeros(3, requires_grad=True).sin()
    moe.set_tensor_grad_fn_sequence_sr(y, 7)
    assert y.grad_fn._sequence_nr() == 7


def test_shared_steps_compile_one_by_one():
    shared = SharedExpertMLP(shared_config(shared_expert_overlap=True), gate=True)
    x = leaf(4, 1, 6)
    want = outcome(shared, x, shared)
    for name in STEPS:
        setattr(shared, name, compiled(getattr(shared, name)))
    close_all(outcome(functools.partial(in_steps, shared), x, shared), want)


def shared_over_tp(rank, ranks):
    """tp ranks that all hold the whole sequence, against one process."""
    groups = ProcessGroups(tp=torch.distributed.group.WORLD)
    for how in ("in one go", "in steps", "compiled"):
        config = shared_config(init_std=0.5, shared_expert_overlap=how == "in steps")
        torch.manual_seed(0)
        whole = SharedExpertMLP(config, gate=True)
        torch.manual_seed(0)
        mine = SharedExpertMLP(config, gate=True, pg_collection=groups)
        function = mine
        if how == "in steps":
            function = functools.partial(in_steps, mine)
        if how == "compiled":
            function = compiled(mine)

        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
        x_r = x.detach().clone().requires_grad_()
        upstream = torch.randn_like(x)
        want = whole(x)
        got = function(x_r)
        close(got, want)
        want.backward(upstream), got.backward(upstream)
        reduce_gradients(mine)                               # dp_cp is None: nothing to sum
        close(x_r.grad, x.grad)
        close(mine.gate_weight.grad, whole.gate_weight.grad)
        for a, b in ((mine.fc1, whole.fc1), (mine.fc2, whole.fc2)):
            same(a, b.chunk(ranks, 1)[rank])
            close(a.grad, b.grad.chunk(ranks, 1)[rank])
        if how != "in steps":
            with torch.no_grad():
                close(function(x_r.detach()), want)

    odd = shared_config(shared_expert_intermediate_size=7)
    assert "is 7; needs a multiple of the tp size, 2" in error(SharedExpertMLP, odd, False, groups)
    assert "set sequence_parallel=True" in error(MoELayer, shared_config(), groups)


def layer_over_tp(rank, ranks):
    """The whole layer with sequence parallelism is the layer of one process."""
    groups = ProcessGroups.from_mesh(mesh_of(tp=ranks))
    for overlap, per_token, how in [
            (False, True, "eager"), (True, False, "eager"), (True, True, "aot_eager")]:
        whole, mine = whole_and_mine(shared_config(
            shared_expert_gate=True, init_std=0.5, score_function="sigmoid",
            enable_expert_bias=True, calculate_per_token_loss=per_token, latent_size=7,
            latent_norm=True, sequence_parallel=True, shared_expert_overlap=overlap,
            **LOSSES), groups)
        mine = copy.deepcopy(mine)                           # keeps its groups
        if how != "eager":
            mine.compile(backend=how, fullgraph=True)
        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn_like(x)
        want = whole(x)
        got = mine(x.chunk(ranks)[rank])
        close(got, want.chunk(ranks)[rank])
        want.backward(upstream)
        got.backward(upstream.chunk(ranks)[rank].contiguous())
        check_gradients(mine, whole)
        finish_both(mine, whole)


def shared_and_layer_over_tp(rank, ranks):
    shared_over_tp(rank, ranks)
    layer_over_tp(rank, ranks)


def test_shared_expert_and_layer_over_two_tp_ranks():
    spawn_gloo(shared_and_layer_over_tp, 2)


def saved_layer(groups=None) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(shared_config(
        shared_expert_gate=True, sequence_parallel=True, score_function="sigmoid",
        enable_expert_bias=True, add_bias_linear=True, latent_size=7, latent_norm=True), groups)
    layer.router.expert_bias.copy_(torch.arange(4.0))
    return layer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shared_overlap_on_cuda():
    """Overlap on and off give the same bits, but for the input's gradient: its three parts are
    added in another order. The kernels of the two streams run side by side."""
    from torch.profiler import ProfilerActivity, profile
    one, two = [MoELayer(MoEConfig(
        1024, 512, 16, topk=4, shared_expert_intermediate_size=2048, shared_expert_gate=True,
        shared_expert_overlap=overlap, params_dtype=torch.bfloat16)).cuda()
        for overlap in (False, True)]
    two.load_state_dict(one.state_dict())
    for _ in range(100):
        x = torch.randn(4096, 1, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, grad_x, *others = outcome(two, x, two)
        want_y, want_grad_x, *want_others = outcome(one, x, one)
        same([y, *others], [want_y, *want_others])
        close(grad_x, want_grad_x, 2e-2)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        two(x).sum().backward()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type.name == "CUDA"]
    spans = [(e.time_range.start, e.time_range.end, e.device_resource_id) for e in events]
    pairs = [(a, b) for a, b in itertools.product(spans, spans) if a[2] != b[2]]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs)


# ---- One graph for every configuration ----

def everything_of(model, call, inputs, upstreams) -> list:
    """Of forwards that are all in flight before their backwards: outputs, gradients and counts."""
    leaves = [*model.parameters(), *(x for x, *_ in inputs)]
    for tensor in leaves:
        tensor.grad = None
    outputs = [call(*args) for args in inputs]
    for y, upstream in zip(outputs, upstreams):
        y.backward(upstream)
    return [*outputs, *[tensor.grad for tensor in leaves], *model.buffers(), *counts_of(model)]


def graphs_over_T(layer, options: dict, sizes, mask: bool = False, given: bool = False) -> int:
    """How many graphs a compiled copy of the layer needs for inputs of these T. Each result is that
    of the eager layer."""
    torch._dynamo.reset()
    counters.clear()
    other = copy.deepcopy(layer)
    function = compiled(other, **options)
    for T in sizes:
        inputs = []
        for _ in range(2):
            x = leaf(T, 2, 6)
            padding = choice = None
            if mask:
                padding = torch.rand(T, 2) < 0.2
            if given:
                choice = random_indices(2 * T, 4, layer.config.topk, repeats=0.3)
            inputs.append((x, padding, choice))
        upstreams = [torch.randn_like(x) for x, *_ in inputs]
        want = everything_of(layer, layer, inputs, upstreams=upstreams)
        close_all(everything_of(other, function, inputs, upstreams=upstreams), want)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", slow_but(["losses"], ONE_GRAPH))
def test_graph_with_overlap(name):
    """What eager mode gives, with a mask: two graphs, the second for every T."""
    layer = MoELayer(shared_config(shared_expert_overlap=True, init_std=0.5, **ONE_GRAPH[name]))
    assert graphs_over_T(layer, {}, (7, 9, 40), mask=True) == 2
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


@slow
@pytest.mark.parametrize("name", ["losses", "sinkhorn", "padding", "gpt_oss"])
def test_graph_dynamic_from_the_first_call(name):
    """One graph, also for a replayed choice."""
    layer = MoELayer(shared_config(shared_expert_overlap=True, init_std=0.5, **ONE_GRAPH[name]))
    assert graphs_over_T(layer, dict(dynamic=True), (7, 9, 40), given=name != "sinkhorn") == 1


@pytest.mark.parametrize("first", [4, pytest.param(6, marks=slow), pytest.param(1000, marks=slow)])
def test_graph_dynamic_where_a_length_is_the_layers_own(first):
    """The first T is E, or the number of the losses, or of the histogram's bins."""
    layer = MoELayer(small_config(
        z_loss_coeff=0.1, score_function="sigmoid", enable_expert_bias=True, bias_update="quantile",
        load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.2, 0.3), add_bias_linear=True,
        router_bias=True, shared_expert_intermediate_size=8, shared_expert_overlap=True))
    function = compiled(layer, dynamic=True)
    for T in (first, 5, 9):
        function(torch.randn(T, 8)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@slow
@pytest.mark.parametrize("overlap, shared, sizes, graphs", [
    (True, 8, (20, 37, 64), 2),
    (False, 8, (20, 37, 64), 2),
    (False, 8, (5,), 1),
    (False, None, (5,), 1)])
def test_graph_through_inductor(overlap, shared, sizes, graphs):
    """T from 18 on has one graph: below, torch's own decomposition of a product guards on T. At
    T = 5, Inductor's code for CPUs read the target of a scatter before it was written (pytorch
    #185509): the gradient of the chosen scores was lost beside that of a balance loss. This depends
    on what Inductor fuses, so test_compile_without_host_sync checks that no graph has a scatter."""
    layer = MoELayer(shared_config(
        shared_expert_overlap=overlap, shared_expert_intermediate_size=shared, init_std=0.5,
        load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1))
    assert graphs_over_T(layer, dict(backend="inductor"), sizes, mask=len(sizes) > 1) == graphs


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, [
    "compiled inside reentrant", "compiled inside non-reentrant", "compiled around reentrant",
    "compiled around non-reentrant", "inductor around non-reentrant", "nested non in re"]))
def test_graph_with_overlap_and_checkpoints(way):
    """Around the compiled layer and inside the graph, either checkpoint: outputs, gradients and
    counts of eager mode."""
    layer = MoELayer(shared_config(
        shared_expert_overlap=True, shared_expert_gate=True, init_std=0.5,
        score_function="sigmoid", enable_expert_bias=True))
    other = copy.deepcopy(layer)
    inputs = [(leaf(5, 2, 6),), (leaf(5, 2, 6),)]
    upstreams = [torch.randn_like(x) for x, in inputs]
    want = everything_of(layer, layer, inputs, upstreams=upstreams)
    close_all(everything_of(other, WAYS[way](other), inputs, upstreams=upstreams), want)
    assert other.shared_experts._overlap_state is SharedExpertState.IDLE


@slow
def test_graph_of_several_layers():
    layers = torch.nn.Sequential(*[
        MoELayer(shared_config(shared_expert_overlap=overlap, init_std=0.5))
        for overlap in (True, False)])
    x = leaf(9, 2, 6)
    close_all(outcome(compiled(layers), x, layers), outcome(layers, x, layers))
    assert counters["stats"]["unique_graphs"] == 1


class CapturedStream(torch.Stream):
    def wait_stream(self, other): ...


SHOWN = ("mm", "addmm", "rows_times_weights", "rows_times_rows", "fork_stream", "join_stream",
         "all_to_all_single", "wait_tensor")


def captured(layer: MoELayer, x: Tensor, grad: bool = True) -> str:
    """The products, exchanges and stream crossings of the layer's compiled forward and backward, in
    the graphs' order, each with its stream. Streams of the CPU stand in for an accelerator's, and
    what AOTAutograd asks an accelerator for is answered here. The partitioner is Inductor's."""
    import torch._dynamo.graph_bytecode_inputs as inputs
    import torch._dynamo.variables.streams as streams
    import torch._functorch._aot_autograd.streams as passes
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.source import CurrentStreamSource
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    cpu = torch.device("cpu")
    events = itertools.count(100)
    lines = []
    side = CapturedStream(cpu)
    main = CapturedStream(cpu)

    class Current(streams.SymbolicStreamState):       # the current stream has index 0
        def __init__(self):
            super().__init__()
            inputs.reset_user_object_tracking()
            inputs.register_user_object(main, CurrentStreamSource(cpu))

    def show(node):
        name = str(node.target).removesuffix(".default").removesuffix(".dtype_layout")
        name = name.split(".")[-1]
        if name in SHOWN:
            on_side = (node.meta.get("custom") or {}).get("stream") is not None
            line = ("main  ", "side  ")[on_side] + name.replace("addmm", "mm")
            if name == "join_stream":
                line += f", behind {len(node.args[1])} more"
            lines.append(line)

    def record(title):
        def compiler(graph_module, _):
            lines.append(title)
            for node in graph_module.graph.nodes:
                show(node)
            return make_boxed_func(graph_module.forward)
        return compiler
    backend = aot_autograd(
        fw_compiler=record("forward"),
        bw_compiler=record("backward"),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"))
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, main, side)
        patch.setattr(torch._dynamo.symbolic_convert, "SymbolicStreamState", Current, raising=False)
        patch.setattr(streams, "_get_stream_by_index", lambda index: side)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: main)
        for module in (torch._dynamo.utils, torch._dynamo.guards):                # torch 2.15
            patch.setattr(module, "get_current_stream", lambda *_: main, raising=False)
        patch.setattr(passes, "new_event", lambda *_: next(events))
        patch.setattr(passes, "get_roofline_estimate", lambda _: 0.0)
        patch.setattr(passes, "get_current_stream", lambda _: 0)
        patch.setattr(passes, "get_device", lambda _: types.SimpleNamespace(type="cuda"))
        with torch.set_grad_enabled(grad):
            y = compiled(layer, backend)(x)
        if grad:
            y.sum().backward()
    return "\n".join(lines)


def test_graph_puts_the_shared_expert_on_the_side_stream():
    """Forward and backward, without ranks: gate, fc1 and fc2 of the shared expert are on the side
    stream, between a fork and a join; the rest is on the main one."""
    layer = MoELayer(MoEConfig(
        32, 24, 4, topk=2, shared_expert_intermediate_size=40, shared_expert_overlap=True,
        shared_expert_gate=True))
    x = torch.randn(20, 32, requires_grad=True)
    assert_expected_inline(captured(layer, x), """\
forward
main  fork_stream
side  mm
main  mm
side  mm
main  rows_times_weights
main  rows_times_weights
side  mm
main  join_stream, behind 0 more
backward
main  fork_stream
main  rows_times_weights
main  fork_stream
side  mm
side  mm
main  rows_times_weights
main  rows_times_rows
main  rows_times_rows
main  rows_times_weights
side  mm
side  mm
side  mm
side  mm
main  join_stream, behind 4 more""")


@pytest.mark.parametrize("gate", [False, True])
def test_graph_on_two_streams_without_gradients(gate):
    """In evaluation, and in training where the input or the shared expert is frozen. The fork comes
    first; a frozen weight has no product in the backward."""
    layer = MoELayer(MoEConfig(
        32, 24, 4, topk=2, shared_expert_intermediate_size=40, shared_expert_overlap=True,
        shared_expert_gate=gate))
    want = captured(layer, torch.randn(20, 32, requires_grad=True)).split("\nbackward\n")
    assert captured(layer, torch.randn(20, 32), grad=False).splitlines()[1] == "main  fork_stream"
    forward, backward = captured(layer, torch.randn(20, 32)).split("\nbackward\n")
    assert forward.splitlines()[1] == "main  fork_stream"
    assert backward.count("side  mm") < want[1].count("side  mm")
    layer.shared_experts.requires_grad_(False)
    x = torch.randn(20, 32, requires_grad=True)
    forward, backward = captured(layer, x).split("\nbackward\n")
    assert backward.count("side  mm") == want[1].count("side  mm") - 2 - gate
    assert backward.splitlines()[-1] == "main  join_stream, behind 1 more"


# ---- Expert parallel ----

BALANCED = dict(
    load_balancing_type=("aux_loss", "seq_aux_loss"), aux_loss_coeff=(0.1, 0.2), z_loss_coeff=0.1)
PADDED = dict(capacity_factor=0.8, pad_to_capacity=True)
# name -> (config, whether one process takes the whole batch at once; else each rank's in turn)
PARALLEL_CASES = {
    "global loss, quantile": (
        dict(score_function="sigmoid", enable_expert_bias=True, bias_update="quantile",
             load_balancing_type="global_aux_loss", aux_loss_coeff=0.3), True),
    "losses, gate": (dict(**BALANCED, shared_expert_gate=True, add_bias_linear=True), False),
    "dropping": (dict(capacity_factor=0.8, apply_probs_on="input", latent_size=7, topk=1,
                      pre_softmax=True), False),
    "padded": (dict(**PADDED, add_bias_linear=True, latent_size=7, latent_norm=True), False),
    "capacity above T": (
        dict(capacity_factor=9.0, pad_to_capacity=True, token_drop_policy="position",
             activation="relu2"), False),
}


def own_part(name: str, tensor: Tensor, groups) -> Tensor:
    """What a rank holds of one process's parameter or gradient."""
    if name.startswith("experts.") and groups.ep is not None:
        return tensor.chunk(groups.ep.size())[groups.ep.rank()]
    if name.startswith("shared_experts.fc") and groups.tp is not None:
        return tensor.chunk(groups.tp.size(), 1)[groups.tp.rank()]
    return tensor


def whole_and_mine(config: MoEConfig, groups) -> tuple[MoELayer, MoELayer]:
    """One process's layer, and this rank's with the same weights."""
    torch.manual_seed(0)
    whole = MoELayer(dataclasses.replace(config, shared_expert_overlap=False))
    torch.manual_seed(0)
    return whole, MoELayer(config, groups)


@functools.cache
def group_of_one() -> ProcessGroups:
    """For a model of its own on every rank. This is collective."""
    return ProcessGroups(tp_dp_cp=torch.distributed.new_subgroups(1)[0])


def finish_both(mine: MoELayer, whole: MoELayer) -> None:
    """The end of a step: the same biases, averages that start anew."""
    whole.router.pg_collection = group_of_one()
    for layer in (mine, whole):
        finish_step(layer)
        if layer.router.ga_steps is not None:
            assert layer.router.ga_steps == 0 == layer.router.global_tokens_per_expert.sum()
    same(mine.router.expert_bias, whole.router.expert_bias)


def check_gradients(mine: MoELayer, whole: MoELayer) -> None:
    reduce_gradients(mine)
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        close(a.grad, own_part(name, b.grad, mine.pg_collection))


def check_parallel_layer(rank, ranks, groups, case, overlap, how) -> None:
    """Outputs, gradients, counts and bias of this rank against one process."""
    options, at_once = PARALLEL_CASES[case]
    tp = 1 if groups.tp is None else groups.tp.size()
    config = shared_config(
        shared_expert_overlap=overlap, sequence_parallel=True, init_std=0.5, **options)
    whole, mine = whole_and_mine(config, groups)
    if how != "eager":
        mine.compile(backend=how, fullgraph=True)
    x = torch.randn(4, 2 * ranks // tp, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(x.shape[:2]) < 0.2
    upstream = torch.randn_like(x)

    def part(tensor, r=rank):
        first = r // tp * 2                  # the batch over dp and ep, the sequence over tp
        return tensor[:, first:first + 2].chunk(tp)[r % tp]
    if at_once:
        y = whole(x, mask)
        y.backward(upstream)
        want = part(y)
    else:                                    # losses span tp_cp, the capacity does not
        width = tp if config.capacity_factor is None else 1
        for first in range(0, ranks, width):
            x_m, mask_m, upstream_m = [
                torch.cat([part(tensor, r) for r in range(first, first + width)])
                for tensor in (x, mask, upstream)]
            y = whole(x_m, mask_m)
            y.backward(upstream_m)
            if first <= rank < first + width:
                want = y.chunk(width)[rank - first]

    x_r = part(x).detach().clone().requires_grad_()
    got = mine(x_r, part(mask))
    close(got, want)
    got.backward(part(upstream).contiguous())
    close(x_r.grad, part(x.grad))
    check_gradients(mine, whole)
    if at_once:
        a = load_balancing_metrics(mine, reduce=True)
        b = load_balancing_metrics(whole)
        same(a["tokens_per_expert"], b["tokens_per_expert"])
        close(a["global_load_balancing_loss"], b["global_load_balancing_loss"], 1e-6)
        finish_both(mine, whole)


def check_ranks_without_tokens(rank, ranks, groups) -> None:
    """Uneven T, T = 0 on a rank, all padding on another; then all tokens to one rank."""
    whole, mine = whole_and_mine(shared_config(init_std=0.5, shared_expert_overlap=True), groups)
    sizes = [5, 0, 3, 7]
    xs = [torch.randn(T, 6, dtype=torch.float64, requires_grad=True) for T in sizes]
    masks = [torch.full((T,), T == 3) for T in sizes]
    one_rank = [torch.tensor([[0, 4]]).expand(T, 2).contiguous() for T in sizes]
    for given in ([None] * ranks, one_rank):
        wants = [whole(x, mask, indices) for x, mask, indices in zip(xs, masks, given)]
        x_r = xs[rank].detach().clone().requires_grad_()
        got = mine(x_r, masks[rank], given[rank])
        close(got, wants[rank])
        got.sin().sum().backward()
        sum(want.sin().sum() for want in wants).backward()
        close(x_r.grad, xs[rank].grad)
        check_gradients(mine, whole)
        whole.zero_grad(), mine.zero_grad()
        for x in xs:
            x.grad = None


def check_repeated_indices(rank, ranks, groups) -> None:
    """Megatron-LM #6699: experts that a token names twice, with a capacity and over ep."""
    for options in (dict(), dict(capacity_factor=0.8), PADDED):
        whole, mine = whole_and_mine(shared_config(init_std=0.5, **options), groups)
        xs = [leaf(7, 6) for _ in range(ranks)]
        given = [random_indices(7, 4, 2, repeats=0.6).int() for _ in range(ranks)]
        wants = [whole(x, topk_indices=indices) for x, indices in zip(xs, given)]
        x_r = xs[rank].detach().clone().requires_grad_()
        got = mine(x_r, topk_indices=given[rank])
        close(got, wants[rank])
        got.sin().sum().backward()
        sum(want.sin().sum() for want in wants).backward()
        close(x_r.grad, xs[rank].grad)
        check_gradients(mine, whole)


def check_gradient_norm(groups, mesh) -> None:
    """The norm of gradients that are the weights: experts over ep, the shared expert over tp, FSDP2
    over dp, all at once where the mesh has them; beside a dense layer."""
    from torch.distributed.fsdp import fully_shard
    dense = torch.nn.Linear(6, 6, dtype=torch.float64)
    model, whole = [torch.nn.Sequential(dense, saved_layer(over)) for over in (groups, None)]
    want = torch.nn.utils.get_total_norm([p.detach() for p in whole.parameters()])
    if "dp" in mesh.mesh_dim_names:
        fully_shard(model[1].experts, mesh=mesh["dp"])
        fully_shard(model[1], mesh=mesh["dp"])
    for p in model.parameters():
        p.grad = p.detach().clone()
    norm = parallel.gradient_norm(model, groups)
    close(norm, want)
    assert norm.dtype == torch.float64 and norm.ndim == 0
    if groups.ep.size() > 1:
        assert "needs the module" in error(parallel.gradient_norm, model.parameters(), groups)
        assert "a group that groups lacks" in error(parallel.gradient_norm, model, None)
    model[1].zero_grad()
    norms = [dense.weight.norm(), dense.bias.norm()]
    close(parallel.gradient_norm(model, groups), torch.stack(norms).norm())


def check_fsdp_beside_ep(rank, ranks, groups, mesh) -> None:
    """Experts sharded over the ranks that hold the same ones, the rest over all: the mean over all
    ranks (pytorch #160285, Megatron-LM #5956)."""
    from torch.distributed.fsdp import fully_shard
    whole, mine = whole_and_mine(shared_config(init_std=0.5), groups)
    fully_shard(mine.experts, mesh=mesh["dp"])
    mine.experts.set_gradient_divide_factor(ranks)
    fully_shard(mine, mesh=torch.distributed.init_device_mesh("cpu", (ranks,)))
    x = torch.randn(4 * ranks, 6, dtype=torch.float64)
    mine(x.chunk(ranks)[rank]).sin().sum().backward()
    whole(x).sin().sum().div(ranks).backward()
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        close(full(a.grad), own_part(name, b.grad, groups))
    want = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    close(parallel.gradient_norm(mine, groups), want)


class NoExchange(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses every collective."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "c10d" not in function.namespace, function.name()
        return function(*args, **kwargs or {})


def check_groups_of_one(rank, ranks) -> None:
    """A mesh with dims of one rank, or groups made by hand: no collective but those over all ranks,
    no read on the host, and the bits of the layer without groups."""
    alone = [torch.distributed.new_group([r]) for r in range(ranks)][rank]
    by_hand = ProcessGroups(*[alone] * 6)
    for groups, options in itertools.product(
            [by_hand, ProcessGroups.from_mesh(mesh_of(dp=ranks, ep=1, tp=1))],
            [dict(**LOSSES, calculate_per_token_loss=True), dict(PADDED, z_loss_coeff=0.1)]):
        whole, mine = whole_and_mine(shared_config(
            score_function="sigmoid", enable_expert_bias=True, shared_expert_gate=True,
            sequence_parallel=groups is not by_hand, **options), groups)
        if groups is not by_hand:                            # its tp_dp_cp is all ranks
            mine.router._apply_global_aux_loss = lambda probs, *_: probs
            whole.router._apply_global_aux_loss = lambda probs, *_: probs
        x = leaf(5, 3, 6)
        mask = torch.rand(5, 3) < 0.2
        probs, indices = whole.eval().router.route(x)
        given = probs, indices, plan_permutation(indices, 4)
        want = whole.train()(x, mask)
        want_grads = grads(want, [x, *whole.parameters()])
        with NoExchange():
            assert type(mine.dispatch(x.flatten(0, 1), *given)) is parallel.Local
            got = mine(x, mask)
            same([got, *grads(got, [x, *mine.parameters()])], [want, *want_grads])
            plain = mine.sharded_state_dict()
            if groups is by_hand:
                reduce_gradients(mine)
                finish_both(mine, whole)
        assert type(plain["experts.fc1"]) is Tensor
    from torch.distributed.fsdp import fully_shard
    layer = fully_shard(saved_layer(), mesh=DeviceMesh.from_group(alone, "cpu"))
    for p in layer.parameters():
        p.grad = p.detach().clone()
    with NoExchange():
        parallel.gradient_norm(layer, None)
    with NoExchange(), pytest.raises(AssertionError, match="allreduce"):
        torch.distributed.all_reduce(torch.ones(1))


def layers_over_meshes(rank, ranks):
    for sizes in (dict(ep=4), dict(ep=2, tp=2), dict(dp=2, ep=2), dict(dp=4, ep=1)):
        mesh = mesh_of(**sizes)
        groups = ProcessGroups.from_mesh(mesh)
        check_gradient_norm(groups, mesh)
        for case, overlap in itertools.product(PARALLEL_CASES, (False, True)):
            check_parallel_layer(rank, ranks, groups, case=case, overlap=overlap, how="eager")
        if sizes == dict(dp=2, ep=2):
            check_fsdp_beside_ep(rank, ranks, groups, mesh)
        if sizes == dict(ep=4):
            check_ranks_without_tokens(rank, ranks, groups)
            check_repeated_indices(rank, ranks, groups)
            text = error(MoELayer, shared_config(num_experts=6), groups)
            assert text == "ValueError: num_experts is 6; needs a multiple of the ep size, 4"
    check_groups_of_one(rank, ranks)


def test_parallel_layer_equals_one_process():
    """ep 4, ep 2 × tp 2 with sequence parallelism, dp 2 × ep 2, ep 1; overlap on and off."""
    spawn_gloo(layers_over_meshes, 4)


def compiled_layers_over_meshes(rank, ranks):
    for sizes, case, overlap in [
            (dict(ep=2, tp=2), "global loss, quantile", True), (dict(ep=4), "padded", False)]:
        groups = ProcessGroups.from_mesh(mesh_of(**sizes))
        check_parallel_layer(rank, ranks, groups, case=case, overlap=overlap, how="aot_eager")


@slow
def test_parallel_compiled_layer_equals_one_process():
    spawn_gloo(compiled_layers_over_meshes, 4, seconds=900)


def overlap_over_ranks(rank, ranks):
    for sizes, options in (dict(ep=2), {}), (dict(ep=2), PADDED), (dict(tp=2), {}):
        groups = ProcessGroups.from_mesh(mesh_of(**sizes))
        config = shared_config(
            shared_expert_overlap=True, shared_expert_gate=True, sequence_parallel=True, **options)
        model = Normed(MoELayer(config, groups))
        x = leaf(6, 6)
        races = races_of(model, x, [x, *model.parameters()])
        assert not races, (sizes, options, races[:3])


def test_parallel_overlap_has_no_race():
    spawn_gloo(overlap_over_ranks, 2)


def order_of_a_step(layer) -> str:
    """The exchanges, waits and parts of forward and backward, in the order of their launches."""
    trace = []
    syncs = []

    def kind_of(rows):
        if rows.ndim == 2:
            return "rows"
        return "counts" if rows.dtype == torch.int64 else "probs"

    Recorder.current = [Recorder("main", trace)]
    with pytest.MonkeyPatch.context() as patch:
        def before(owner, name, note):
            function = getattr(owner, name)

            def noting(*args, **kwargs):
                note(*args)
                return function(*args, **kwargs)
            patch.setattr(owner, name, noting)

        def noted(owner, name, label):
            function = getattr(owner, name)
            patch.setattr(owner, name, lambda *args: Note.apply(function(*args), label, trace))

        before(parallel, "exchange", lambda rows, *_: trace.append(f"{kind_of(rows)} issued"))
        before(parallel, "wait", lambda _: trace.append("waited"))
        before(torch.Tensor, "tolist", lambda _: syncs.append(sys._getframe(2)))
        noted(layer.shared_experts, "_fc1_and_act", "shared fc1")
        noted(layer.shared_experts, "_fc2", "shared fc2")
        noted(layer.experts, "forward", "experts")
        out = layer(torch.randn(8, 16, dtype=torch.float64, requires_grad=True))
        of_layer = [frame for frame in syncs if frame.f_code.co_filename == parallel.__file__]
        trace.append(f"{len(of_layer)} host syncs\n")
        out.sum().backward()
    return "\n".join(trace)


def order_and_memory(rank, ranks, folder):
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    config = shared_config(shared_expert_intermediate_size=4, ffn_hidden_size=32, hidden_size=16)
    padded = dict(capacity_factor=2.0, pad_to_capacity=True)
    for name, options in (("dropless", {}), ("padded", padded)):
        layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=True, **options), groups)
        assert layer.experts.fc1.shape[0] == 1               # of four, over four ranks
        order = order_of_a_step(layer)
        if rank == 0:
            Path(folder, name).write_text(order)

    layer = MoELayer(config, groups)
    layer.shared_experts = None
    T = 256
    K = 2
    rows = T * K                                             # even: every rank receives as many
    even = (torch.arange(4)[None] + torch.arange(2)[:, None]).t().repeat(64, 1) % 4
    x = torch.randn(T, 16, dtype=torch.float64, requires_grad=True)
    kept = saved_bytes(lambda: layer(x, topk_indices=even), [*layer.parameters()])
    least = 8 * (T * 16 + rows * 16 + rows * 2 * 32)         # x, the received rows, fc1's output
    small = 8 * (T * 4 + 3 * rows + 8 * rows)                # logits; probs; orders and inverses
    assert least <= kept <= 1.05 * least + small, (kept, least, small)


def test_parallel_order_and_memory(tmp_path):
    """The order of launches, the host syncs, and what is kept for the backward."""
    spawn_gloo(order_and_memory, 4, str(tmp_path))
    dropless = (tmp_path / "dropless").read_text()
    padded = (tmp_path / "padded").read_text()
    assert_expected_inline(dropless, """\
counts issued
waited
rows issued
probs issued
shared fc1 on main
waited
waited
experts on main
rows issued
shared fc2 on main
waited
1 host syncs

rows issued
shared fc2 backward
waited
experts backward
probs issued
rows issued
shared fc1 backward
waited
waited""")
    without_counts = dropless.removeprefix("counts issued\nwaited\n")
    assert padded == without_counts.replace("1 host syncs", "0 host syncs")


CHECKPOINT_SIZES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]


def checkpoints_over_ranks(rank, ranks, folder):
    """Written at each size of (dp, ep, tp), read at each, bitwise."""
    import torch.distributed.checkpoint as dcp
    layers = []
    paths = [f"{folder}/alone"]
    for dp, ep, tp in CHECKPOINT_SIZES:
        layer = saved_layer(ProcessGroups.from_mesh(mesh_of(dp=dp, ep=ep, tp=tp)))
        state = layer.sharded_state_dict("a.")
        for a, b in zip(state.values(), layer.state_dict().values(), strict=True):
            local = getattr(a, "_local_tensor", a)           # no temporary that a load would fill
            assert local.data_ptr() == b.data_ptr()
        paths.append(f"{folder}/{ep}{tp}")
        dcp.save(state, checkpoint_id=paths[-1])
        layers.append(layer)

    whole = saved_layer().state_dict()
    for layer, path in itertools.product(layers, paths):
        for tensor in layer.state_dict().values():
            tensor.zero_()
        dcp.load(layer.sharded_state_dict("a."), checkpoint_id=path)
        for name, tensor in layer.state_dict().items():
            same(tensor, own_part(name, whole[name], layer.pg_collection))


def test_parallel_checkpoints(tmp_path):
    """Written and read at each size, also without any process group; the layer's own tensors."""
    import torch.distributed.checkpoint as dcp
    layer = saved_layer()
    state = layer.sharded_state_dict("a.")
    assert list(state) == ["a." + name for name in layer.state_dict()]
    assert "both need to be empty" in error(layer.sharded_state_dict, "", ((0, 1, 2),))
    assert "both need to be empty" in error(layer.sharded_state_dict, metadata={"a": 1})
    dcp.save(state, checkpoint_id=f"{tmp_path}/alone")
    spawn_gloo(checkpoints_over_ranks, 4, str(tmp_path))
    for _, ep, tp in CHECKPOINT_SIZES:
        other = saved_layer()
        for tensor in other.state_dict().values():
            tensor.zero_()
        dcp.load(other.sharded_state_dict("a."), checkpoint_id=f"{tmp_path}/{ep}{tp}")
        same(other.state_dict(), layer.state_dict())


# (config, mesh dim, T of each rank in turn, options of torch.compile, graphs)
RANKS_ONE_GRAPH = [
    (dict(shared_expert_gate=True), "ep", [(5, 7), (8, 3)], dict(dynamic=True), 1),
    (dict(**BALANCED, shared_expert_gate=True), "ep", [(5, 7), (8, 3), (9, 20), (40, 31)], {}, 2),
    (PADDED, "ep", [(5, 5), (8, 8), (31, 31)], dict(dynamic=True), 1),
    (dict(capacity_factor=0.8, latent_size=7, latent_norm=True), "ep",
     [(5, 0), (8, 3), (0, 20), (40, 0)], dict(dynamic=True), 2),          # T = 0 takes its own
    (dict(score_function="sigmoid", enable_expert_bias=True), "tp",
     [(4, 4), (6, 6), (8, 8)], {}, 2),
    (dict(shared_expert_gate=True), "ep",
     [(40, 33), (52, 64), (90, 41)], dict(backend="inductor"), 2),
    (dict(BALANCED, score_function="sigmoid", enable_expert_bias=True, bias_update="quantile"),
     "ep", [(4, 4), (7, 5), (9, 4)], dict(dynamic=True), 1),              # 4 is E, and the losses
]


def compare_steps(layer, other, function, T: int) -> None:
    """A step of `layer` and one of `other`, called through `function`, give and change the same."""
    x = torch.randn(T, 6, dtype=torch.float64, requires_grad=True)
    results = []
    upstream = torch.randn_like(x)
    for model, call in ((layer, layer), (other, function)):
        x.grad = None
        y = call(x)
        y.backward(upstream)
        slopes = [p.grad for p in model.parameters()]
        results.append([y, x.grad, *slopes, *model.buffers(), *counts_of(model)])
        model.zero_grad()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def one_graph_over_ranks(rank, ranks, cases):
    for options, dim, sizes, how, graphs in cases:
        config = shared_config(
            shared_expert_overlap=True, sequence_parallel=True, init_std=0.5, **options)
        layer = MoELayer(config, ProcessGroups.from_mesh(mesh_of(**{dim: ranks})))
        other = copy.deepcopy(layer)
        torch._dynamo.reset(), counters.clear()
        function = compiled(other, **how)
        for Ts in sizes:
            compare_steps(layer, other, function, T=Ts[rank])
        assert counters["stats"]["unique_graphs"] <= graphs, options


@pytest.mark.parametrize("cases", [
    RANKS_ONE_GRAPH[:1], pytest.param(RANKS_ONE_GRAPH[1:], marks=slow)], ids=["one", "more"])
def test_parallel_layer_is_one_graph(cases):
    """Compiled, the layer gives what it gives in eager mode, at another T on each rank."""
    spawn_gloo(one_graph_over_ranks, 2, cases, seconds=900)


def overlapped_layer(ranks) -> MoELayer:
    config = shared_config(shared_expert_overlap=True, init_std=0.5)
    return MoELayer(config, ProcessGroups.from_mesh(mesh_of(ep=ranks)))


def checkpointed_over_ranks(rank, ranks, ways):
    layer = overlapped_layer(ranks)
    for way in ways:
        torch._dynamo.reset()
        other = copy.deepcopy(layer)
        compare_steps(layer, other, WAYS[way](other), T=5 + rank)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    # It reads every gradient at once, also one in flight: each of the three exchanges is awaited
    # where it is issued, and once more where it is due.
    with torch.autograd.set_detect_anomaly(True), pytest.MonkeyPatch.context() as patch:
        y = layer(x)
        waits = []
        wait = parallel.wait
        patch.setattr(parallel, "wait", lambda buffer: waits.append(buffer) or wait(buffer))
        y.sum().backward()
        assert len(waits) == 6


@pytest.mark.parametrize("ways", [
    ["reentrant", "non-reentrant"],
    pytest.param(["compiled inside non-reentrant", "compiled around non-reentrant"], marks=slow)])
def test_parallel_layer_under_checkpoints(ways):
    spawn_gloo(checkpointed_over_ranks, 2, ways)


def graph_over_ranks(rank, ranks, folder):
    x = torch.randn(20 + rank, 6, dtype=torch.float64, requires_grad=True)
    lines = captured(overlapped_layer(ranks), x)
    if rank == 0:
        Path(folder, "graph").write_text(lines)
    # Padded, and over tp: the side stream works between its fork and a join that comes last.
    x = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    for dim, options in (("ep", PADDED), ("tp", {})):
        torch._dynamo.reset()
        config = shared_config(shared_expert_overlap=True, sequence_parallel=True, **options)
        layer = MoELayer(config, ProcessGroups.from_mesh(mesh_of(**{dim: ranks})))
        for half in captured(layer, x).removeprefix("forward\n").split("\nbackward\n"):
            half = half.splitlines()
            sides = [i for i, line in enumerate(half) if line.startswith("side")]
            assert sides and "main  fork_stream" in half[:sides[0]], half
            assert half[-1].startswith("main  join_stream"), half


def test_parallel_order_of_the_graph(tmp_path):
    spawn_gloo(graph_over_ranks, 2, str(tmp_path))
    assert_expected_inline((tmp_path / "graph").read_text(), """\
forward
main  fork_stream
main  mm
main  all_to_all_single
main  wait_tensor
main  all_to_all_single
main  all_to_all_single
side  mm
main  wait_tensor
main  wait_tensor
main  rows_times_weights
main  rows_times_weights
main  all_to_all_single
side  mm
main  wait_tensor
main  join_stream, behind 0 more
backward
main  fork_stream
main  rows_times_weights
main  fork_stream
main  all_to_all_single
side  mm
side  mm
main  wait_tensor
main  rows_times_weights
main  rows_times_rows
main  rows_times_rows
main  rows_times_weights
main  all_to_all_single
main  all_to_all_single
side  mm
side  mm
main  wait_tensor
main  wait_tensor
main  join_stream, behind 3 more""")


def failing_rank(rank, ranks, port, folder, how):
    """Rank 1 fails in the middle of a step; the others must end by themselves, with an error."""
    def fail(grad=None):
        if how == "killed":
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError

    try:
        with gloo_group(rank, ranks, port):
            world = torch.distributed.group.WORLD
            layer = MoELayer(shared_config(), ProcessGroups(ep=world, tp_dp_cp=world))
            for step in range(3):
                fails = rank == 1 and step == 1
                if fails and how != "backward raises":
                    fail()
                y = layer(torch.randn(4, 6, dtype=torch.float64, requires_grad=True))
                if fails:
                    y.register_hook(fail)
                y.sum().backward()
    except BaseException as e:
        Path(folder, f"{how}{rank}").write_text(type(e).__name__)
        os._exit(1)


@pytest.mark.parametrize("how", ["killed", "forward raises", "backward raises"])
def test_parallel_rank_that_fails_ends_the_others(tmp_path, how):
    processes = start_ranks(failing_rank, 2, str(tmp_path), how)
    try:
        for process in processes:
            process.join(90)
        assert all(process.exitcode for process in processes), processes
        assert (tmp_path / f"{how}0").exists()               # the healthy rank has raised too
    finally:
        end_ranks(processes)


# ---- In other people's trainers ----

def counts_of(model) -> list[Tensor]:
    """What the routers keep beside their state dict: counts, sums, latest losses."""
    return [tensor for router in moe._routers(model) for tensor in router.counts.tensors().values()]


def counts_under_ddp(rank, ranks):
    """DDP broadcasts rank 0's buffers before every forward. Counts must not be among them."""
    config = MoEConfig(
        hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=2, score_function="sigmoid",
        enable_expert_bias=True, params_dtype=torch.float64, router_dtype=torch.float64,
        load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    torch.manual_seed(1)
    mine = MoELayer(config, ProcessGroups(tp_dp_cp=torch.distributed.group.WORLD))
    alone = copy.deepcopy(mine)
    want = torch.zeros(6)
    model = torch.nn.parallel.DistributedDataParallel(mine)
    for _ in range(3):
        x = torch.randn(ranks, 7, 8, dtype=torch.float64)[rank]
        for logits_E in (x @ alone.router.weight.T).tolist():
            want[best(logits_E, 2)] += 1
        for layer in (model, alone):
            layer(x).sum().backward()
    same(mine.router.local_tokens_per_expert, want)
    for a, b in zip(counts_of(mine), counts_of(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, equal_nan=True)
    for a, b in zip(mine.parameters(), alone.parameters()):  # DDP averages over ranks
        torch.distributed.all_reduce(b.grad)
        close(a.grad, b.grad / ranks)
    torch.distributed.all_reduce(want)
    update_expert_bias(model)
    close(mine.router.expert_bias, 1e-3 * (want.mean() - want).sign())
    assert [name for name, _ in mine.named_buffers()] == ["router.expert_bias"]


def subsets(*names: str):
    return itertools.chain(*(itertools.combinations(names, n) for n in range(len(names) + 1)))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shards_of_rows(parameter):
    return torch.distributed.tensor.Shard(1) if parameter.ndim == 3 else None


PARTS = ("router", "latent_down", "experts", "latent_up", "shared_experts", "")


def sharded_from_meta(rank, ranks):
    """Meta device, fully_shard, to_empty, reset_parameters: what one process draws and computes.

    Each part alone, all of them nested, the layer; in bf16 by FSDP2's own casts. The shared expert
    cannot be sharded alone where it runs in steps.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    config = shared_config(
        router_bias=True, add_bias_linear=True, shared_expert_gate=True, num_experts=5,
        init_std=0.5, latent_size=7, latent_norm=True, score_function="sigmoid",
        enable_expert_bias=True)
    torch.manual_seed(5)
    plain = MoELayer(config)
    x, upstream = torch.randn(2, 7, 6, dtype=torch.float64)
    want = plain(x)
    want.backward(upstream)
    by_rows = dict(shard_placement_fn=shards_of_rows)
    alone = [((name,), {}) for name in PARTS]
    for names, options in [*alone, (PARTS, {}), (("shared_experts",), by_rows)]:
        with torch.device("meta"):
            layer = MoELayer(config)
        for name in names:
            fully_shard(layer.get_submodule(name), **options)
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for a, b in zip(layer.state_dict().values(), plain.state_dict().values(), strict=True):
            same(full(a), b)

        got = layer(x)                       # the same x on both ranks: averages change nothing
        close(got, want)
        got.backward(upstream)
        same(counts_of(layer), counts_of(plain))
        for a, b in zip(layer.parameters(), plain.parameters()):
            close(full(a.grad), b.grad)

        router = copy.deepcopy(plain.router)                 # without the layer's call
        layer.zero_grad(), router.zero_grad()
        probs, indices = layer.router.route(x)
        want_probs, want_indices = router.route(x)
        same(indices, want_indices)
        probs[:, 0].sum().backward(), want_probs[:, 0].sum().backward()
        for a, b in zip(layer.router.parameters(), router.parameters(), strict=True):
            close(full(a.grad), b.grad)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    assert half(x).dtype == torch.bfloat16
    close(half(x).double(), want, 0.1)
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    for name in PARTS[:-1]:                                  # the layer keeps its input's dtype
        layer = MoELayer(dataclasses.replace(config, params_dtype=torch.float32))
        fully_shard(layer.get_submodule(name), mp_policy=policy)
        assert layer(x.float()).dtype == torch.float32, name
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for parts in subsets("latent_down", "experts", "latent_up"):
        half = copy.deepcopy(plain)
        for name in (*parts, ""):                            # they return fp32 into a bf16 layer
            fully_shard(half.get_submodule(name), mp_policy=policy)
        got = half(x)
        assert got.dtype == torch.float32
        close(got.double(), want, 0.1)
        got.sum().backward()
        assert all(torch.isfinite(full(p.grad)).all() for p in half.parameters())

    alone = dataclasses.replace(
        config, shared_expert_intermediate_size=None, shared_expert_gate=False, **BALANCED)
    router = fully_shard(TopKRouter(alone))
    layer = fully_shard(MoELayer(alone))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)          # "returned a view tensor"
        outputs = router.route(x)[0], layer(x)
    for output in outputs:
        output.sum().backward()
    layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=True))
    fully_shard(layer.shared_experts)
    assert "shard the layer, not its shared expert alone" in error(layer, x)
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


def trained_over_ranks(rank, ranks):
    counts_under_ddp(rank, ranks)
    sharded_from_meta(rank, ranks)


def test_trainer_over_two_ranks():
    """DDP, FSDP2 from the meta device."""
    spawn_gloo(trained_over_ranks, 2)


class LoRA(torch.nn.Module):
    """W -> W + B · A. With experts, [E, F, H] matrices each have their own A and B."""

    def __init__(self, *shape: int, rank: int = 3):
        super().__init__()
        *batch, rows, columns = shape
        self.A = torch.nn.Parameter(torch.empty(*batch, rank, columns, dtype=torch.float64))
        self.B = torch.nn.Parameter(torch.empty(*batch, rows, rank, dtype=torch.float64))

    def forward(self, weight):
        return weight + self.B @ self.A


def with_lora(layer: MoELayer) -> MoELayer:
    """Adapters on the router, the latent products and every expert, with values from a seed."""
    from torch.nn.utils.parametrize import register_parametrization
    targets = [(layer.router, "weight"), (layer.latent_up, "weight"),
               (layer.experts, "fc1"), (layer.experts, "fc2")]
    ep = layer.pg_collection.ep
    torch.manual_seed(9)
    for module, name in targets:
        weight = getattr(module, name).requires_grad_(False)
        lora = LoRA(*weight.shape)
        for parameter in lora.parameters():
            if module is layer.experts and parallel.group_size(ep) > 1:
                whole = torch.randn(4, *parameter.shape[1:], dtype=torch.float64) / 3
                parameter.data = whole.chunk(ep.size())[ep.rank()]
            else:
                parameter.data = torch.randn_like(parameter) / 3
        register_parametrization(module, name, lora)
    return layer


def lora_over_ranks(rank, ranks, folder):
    """LoRA by parametrization over ep: gradients, their norm and a checkpoint of one process."""
    import torch.distributed.checkpoint as dcp
    from torch.nn.utils.parametrize import register_parametrization
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    config = shared_config(latent_size=7, init_std=0.5)
    whole, mine = map(with_lora, whole_and_mine(config, groups))
    x = torch.randn(8, 6, dtype=torch.float64)
    want = whole(x)
    got = mine(x.chunk(ranks)[rank])
    close(got, want.chunk(ranks)[rank])
    want.sin().sum().backward()
    got.sin().sum().backward()
    reduce_gradients(mine)
    trained = 0
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        assert a.requires_grad == b.requires_grad
        if a.requires_grad:
            trained += "lora" in name.lower() or ".parametrizations." in name
            close(a.grad, own_part(name, b.grad, groups))
    assert trained == 8
    close(parallel.gradient_norm(mine, groups), parallel.gradient_norm(whole, None))

    state = mine.sharded_state_dict()
    assert list(state) == list(mine.state_dict())
    assert state["experts.parametrizations.fc1.0.A"].shape == (4, 2, 3, 7)
    dcp.save(state, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    dcp.load(mine.sharded_state_dict(), checkpoint_id=folder)
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        same(a, own_part(name, b, groups))

    shared = LoRA(2, 5, 7)                                   # one A, one B for all experts
    register_parametrization(mine.experts, "fc1", shared)
    for call in (mine.sharded_state_dict, lambda: reduce_gradients(mine)):
        text = error(call)
        assert "experts.parametrizations.fc1.1.A has shape [2, 3, 7], and fc1 [2, 2, 5, 7]" in text
        assert "is sharded along axis 0: needs as many axes and that size there" in text, text


def ranks_that_are_not_known(rank, ranks):
    """Several ranks, a router without groups: refused before anything changes; the two ways out."""
    config = small_config(enable_expert_bias=True, load_balancing_type="global_aux_loss",
                          aux_loss_coeff=0.1)
    torch.manual_seed(rank)
    batches = torch.randn(2, 9, 8)
    layers = [MoELayer(config, groups) for groups in (
        None, ProcessGroups.from_mesh(mesh_of(dp=ranks)["dp"]), group_of_one())]
    biases = []
    for layer in layers:
        layer.load_state_dict(layers[1].state_dict())
        for x in batches:
            layer(x).sum().backward()
    kept = copy.deepcopy(counts_of(layers[0]))
    for call in (update_expert_bias, finish_step):
        text = error(call, torch.nn.Sequential(layers[1], layers[0]))
        assert text.startswith("ValueError: tp_dp_cp is None and 2 ranks run"), text
        assert 'MoELayer(config, ProcessGroups.from_mesh(mesh["dp"]))' in text
        assert "ProcessGroups(tp_dp_cp=group) with a group of one rank" in text
    torch.testing.assert_close(counts_of(layers[0]), kept, rtol=0, atol=0, equal_nan=True)
    assert not layers[1].router.expert_bias.any()
    for layer in layers[1:]:
        finish_step(layer)
        both = [torch.empty(6) for _ in range(ranks)]
        torch.distributed.all_gather(both, layer.router.expert_bias)
        biases.append(both)
    same(*biases[0])
    assert not torch.equal(*biases[1])
    finish_step(MoELayer(small_config()))                    # nothing to pool


def pipeline_of_two(rank, ranks):
    """PipelineStage with the shapes given: counts, gradients and biases of one process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    mesh = mesh_of(pp=ranks, dp=1)
    config = shared_config(
        batch_first=True, score_function="sigmoid", enable_expert_bias=True, init_std=0.5,
        z_loss_coeff=0.1, load_balancing_type=("seq_aux_loss", "global_aux_loss"),
        aux_loss_coeff=(0.3, 0.2), params_dtype=torch.float32, router_dtype=torch.float32)
    torch.manual_seed(3)
    whole = [MoELayer(config, group_of_one()) for _ in range(ranks)]
    mine = MoELayer(config, ProcessGroups.from_mesh(mesh["dp"]))
    mine.load_state_dict(whole[rank].state_dict())
    x, target = torch.randn(2, 8, 5, 6)
    small = torch.empty(2, 5, 6, requires_grad=True)
    stage = PipelineStage(
        mine, rank, ranks, torch.device("cpu"), input_args=(small,), output_args=(small,))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)    # scale_grads=True
    set_aux_loss_scale(1.0)                                  # it divides all gradients by 4
    for _ in range(2):
        mine.zero_grad()
        first, last = rank == 0, rank == ranks - 1
        schedule.step(*([x] if first else []), **(dict(target=target) if last else {}))
        for layer in whole:
            layer.zero_grad()
        set_aux_loss_scale(1 / 4)
        # All forwards before the first backward, as the schedule has them.
        losses = []
        for x_m, target_m in zip(x.chunk(4), target.chunk(4)):
            for layer in whole:
                x_m = layer(x_m)
            losses.append(F.mse_loss(x_m, target_m) / 4)
        for loss in losses:
            loss.backward()
        set_aux_loss_scale(1.0)
        assert mine.router.local_tokens_per_expert.sum() == 8 * 5 * 2
        for a, b in zip(mine.parameters(), whole[rank].parameters(), strict=True):
            close(a.grad, b.grad, 1e-5)
        for layer in (mine, *whole):
            finish_step(layer)
        same(mine.router.expert_bias, whole[rank].router.expert_bias)


def trainers_recipes(rank, ranks, folder):
    ranks_that_are_not_known(rank, ranks)
    lora_over_ranks(rank, ranks, folder)
    pipeline_of_two(rank, ranks)


def test_trainer_recipes_over_two_ranks(tmp_path):
    """The expert bias without groups, LoRA, a pipeline."""
    spawn_gloo(trainers_recipes, 2, str(tmp_path))


def test_router_balance_losses_see_the_plain_top_k():
    """As the SPEC of the losses has it: neither groups nor the expert bias change their map
    (Megatron-LM #5195 asks whether they should)."""
    losses = dict(load_balancing_type=tuple(moe.LOSS_NAMES), aux_loss_coeff=(0.1, 0.2, 0.3),
                  score_function="sigmoid")
    plain = TopKRouter(small_config(**losses))
    limited = TopKRouter(small_config(
        **losses, num_groups=3, group_topk=1, enable_expert_bias=True))
    limited.load_state_dict(plain.state_dict(), strict=False)
    limited.expert_bias.copy_(torch.arange(6.0))
    x = torch.randn(5, 3, 8)
    chosen = [router.route(x)[1].sort(1).values for router in (plain, limited)]
    assert not torch.equal(*chosen)
    logged = [load_balancing_metrics(router) for router in (plain, limited)]
    for name in moe.LOSS_NAMES.values():
        same(logged[1][name], logged[0][name])


def test_trainer_last_two_axes_are_out_and_in():
    """Of every weight: what Muon and low-rank methods take for one matrix."""
    config = MoEConfig(
        6, 5, num_experts=4, topk=2, latent_size=7, shared_expert_intermediate_size=8,
        add_bias_linear=True, router_bias=True, shared_expert_gate=True, latent_norm=True)
    shapes = {name: list(p.shape[-2:]) for name, p in MoELayer(config).named_parameters()
              if p.ndim >= 2 and not name.endswith("_bias")}
    assert shapes == {
        "router.weight": [4, 6], "experts.fc1": [5, 7], "experts.fc2": [7, 5],
        "latent_down.weight": [7, 6], "latent_up.weight": [6, 7],
        "shared_experts.fc1": [8, 6], "shared_experts.fc2": [6, 8],
        "shared_experts.gate_weight": [1, 6]}


def test_trainer_gradient_norm_of_one_process():
    layer = MoELayer(shared_config())
    assert parallel.gradient_norm(layer, None) == 0
    layer(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    want = torch.stack([p.grad.norm() for p in layer.parameters()]).norm()
    close(parallel.gradient_norm(layer, None), want)
    close(parallel.gradient_norm([p for p in layer.parameters()], ProcessGroups()), want)
    layer = MoELayer(MoEConfig(8, 4, 4, topk=2, params_dtype=torch.bfloat16))
    assert parallel.gradient_norm(layer, None).dtype == torch.float32


def test_trainer_counts_follow_a_weight_moved_without_apply():
    """fully_shard moves parameters and buffers, no other tensors."""
    layer = MoELayer(MoEConfig(8, 4, 4, topk=2, enable_expert_bias=True, score_function="sigmoid"))
    router = layer.router
    router.weight = torch.nn.Parameter(router.weight.to("meta"))
    router.expert_bias = router.expert_bias.to("meta")
    router(torch.zeros(5, 8, device="meta"))
    assert {tensor.device.type for tensor in counts_of(layer)} == {"meta"}


def test_trainer_counts_start_where_a_state_dict_is_assigned():
    """From the meta device without to_empty: the counts are made by the first forward."""
    config = MoEConfig(8, 4, 4, topk=2, enable_expert_bias=True, score_function="sigmoid")
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.load_state_dict(MoELayer(config).state_dict(), assign=True)
    layer(torch.randn(5, 8)).sum().backward()
    assert layer.router.local_tokens_per_expert.sum() == 10
    finish_step(layer)
    assert layer.router.expert_bias.any()


class CountOps(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of the ops named."""

    def __init__(self, *names: str):
        super().__init__()
        self.calls = dict.fromkeys(names, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1]
        if name in self.calls:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


# frozen -> calls of rows_times_weights, rows_times_rows and product_in in the backward. The last is
# the router's product, and that of fc2_bias.
FROZEN = {
    "": (2, 3, 4),
    "experts": (2, 0, 3),
    "experts.fc1": (2, 1, 4),                                 # and its bias
    "experts.fc2": (2, 2, 3),
    "router": (2, 3, 3),
    "x": (1, 3, 3),
    "x experts": (1, 0, 2),
    "x router experts.fc1": (0, 1, 1),
}


@pytest.mark.parametrize("cases, how", [
    (FROZEN, "eager"), (["experts"], "compiled"),
    pytest.param(FROZEN, "compiled", marks=slow)])
def test_trainer_frozen_parameters_cost_nothing(cases, how):
    """Grouped products and the router's in the backward; the other gradients stay as they are."""
    layer = MoELayer(MoEConfig(
        6, 5, num_experts=4, topk=2, add_bias_linear=True, router_bias=True, pre_softmax=True,
        params_dtype=torch.float64, router_dtype=torch.float64))
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    named = {"x": x, **dict(layer.named_parameters())}
    want = dict(zip(named, grads(layer(x).sin().sum(), list(named.values()))))
    for frozen in cases:
        for name, tensor in named.items():
            tensor.requires_grad_(not any(name.startswith(part) for part in frozen.split()))
        live = [name for name, tensor in named.items() if tensor.requires_grad]
        torch._dynamo.reset()
        function = layer if how == "eager" else compiled(layer)
        loss = function(x).sin().sum()
        with CountOps("rows_times_weights", "rows_times_rows", "product_in") as count:
            got = torch.autograd.grad(loss, [named[name] for name in live])
        for name, grad in zip(live, got, strict=True):
            close(grad, want[name])
        assert tuple(count.calls.values()) == FROZEN[frozen], frozen


def test_trainer_frozen_latent_experts_cost_nothing():
    """Products in the backward, beside those of the experts."""
    layer = MoELayer(MoEConfig(6, 5, 4, topk=2, latent_size=7, latent_norm=True))
    x = torch.randn(9, 6, requires_grad=True)
    products = {}
    for frozen in ("nothing", "experts.fc1", "experts", "latent_down", "latent", "x"):
        for name, tensor in {"x": x, **dict(layer.named_parameters())}.items():
            tensor.requires_grad_(not name.startswith(frozen))
        loss = layer(x).sum()
        with CountOps("mm") as count:
            loss.backward()
        products[frozen] = count.calls["mm"]
    assert products == {
        "nothing": 4, "experts.fc1": 4, "experts": 4, "latent_down": 3, "latent": 2, "x": 3}


def two_layers(**options) -> torch.nn.Module:
    """A MoE layer, a dense one, another MoE layer."""
    config = MoEConfig(8, 4, 6, topk=2, **options)
    return torch.nn.Sequential(MoELayer(config), torch.nn.Linear(8, 8), MoELayer(config))


def random_choices(T: int) -> list[Tensor]:
    """For the routers of two_layers."""
    return [torch.rand(T, 6).argsort(1)[:, :2] for _ in range(2)]


QUICK_WAYS = ["compiled inside non-reentrant"]
QUICK_WAYS += [way for way in WAYS if not way.startswith(("compiled", "inductor"))]


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=[] if way in QUICK_WAYS else slow) for way in WAYS])
def test_trainer_record_and_replay(way):
    """verl #7340, #5037: what is recorded is what each router chose, in module order. A replay
    takes effect, in each router with its own record, and a recomputation replays the same."""
    model = two_layers(enable_expert_bias=True, score_function="sigmoid")
    x = torch.randn(9, 8, requires_grad=True)
    function = WAYS[way](model)
    first, dense, second = model
    with torch.no_grad():
        y = dense(first(x))
        chosen = [first.router.route(x)[1], second.router.route(y)[1]]
    with record_routing(model) as record:
        want = function(x)
        want.sum().backward()
    same(record.indices, chosen)

    others = random_choices(9)
    leaves = [x, *model.parameters()]
    y = second(dense(first(x, topk_indices=others[0])), topk_indices=others[1])
    expected = [y, *grads(y, leaves)]
    for indices in (others, torch.stack(others)):
        model.zero_grad()
        x.grad = None
        with replay_routing(model, indices), record_routing(model) as record:
            got = function(x)
            got.sum().backward()
        same(record.indices, others)
        for a, b in zip([got, *[leaf.grad for leaf in leaves]], expected, strict=True):
            close(a, b, 1e-5)
    close(function(x), want, 1e-6)                           # nothing stays behind


def test_trainer_replayed_padding_reaches_no_expert():
    """miles #2697: -1 is no expert, neither 0 .. K-1. A mask holds for tokens routed live too."""
    layer = MoELayer(small_config())
    x = torch.randn(40, 8)
    real = torch.arange(40) < 10
    indices = random_choices(40)[0].where(real[:, None], -1)
    want = torch.bincount(indices[real].flatten(), minlength=6)
    for mask, missing in ((None, "unrouted"), (~real, "unrouted"), (~real, "live")):
        with replay_routing(layer, [indices], missing=missing):
            y = layer(x, mask)
        assert not y[~real].any() and y[real].any(1).all()
        same(load_balancing_metrics(layer)["tokens_per_expert"][0], want)


def test_trainer_record_holds_the_choice_before_dropping():
    """E where padding is; in eval too; the latest forward; it stays after the context."""
    model = two_layers(capacity_factor=0.25)
    mask = torch.arange(9) % 4 == 1
    router = model[0].router
    for function in (router.route, compiled(router.route)):
        with record_routing(model) as record:
            assert record.indices == [None] * 2
            function(torch.randn(4, 8))
            router.eval()
            x = torch.randn(9, 8)
            dropped = function(x, mask)[1]
        router.train()
        chosen, other = record.indices
        assert other is None
        assert (chosen == 6).equal(mask[:, None].expand(9, 2))
        assert (dropped == 6).sum() > (chosen == 6).sum()
        with replay_routing(model, [chosen.where(~mask[:, None], -1), other]):    # -1 is E
            same(function(x)[1], dropped)
    with record_routing(model) as record:                     # repeats as given: replayed the same
        want = router.route(x, mask, torch.zeros(9, 2, dtype=torch.int16))
    with replay_routing(model, record.indices):
        same(router.route(x, mask), want)
    with torch.inference_mode(), record_routing(model) as record:
        model(x)
    with replay_routing(model, record.indices):      # tensors of inference mode, in training
        model(x).sum().backward()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_trainer_replay_routes_missing_rows_itself(how):
    """missing="live": a token whose row has a -1 goes where its router sends it."""
    model = two_layers(enable_expert_bias=True, score_function="sigmoid", capacity_factor=0.9)
    model[0].router.expert_bias.normal_()
    x = torch.randn(9, 8, requires_grad=True)
    first, dense, second = model
    others = [indices.clone() for indices in random_choices(9)]
    others[0][[2, 8], 1] = -1
    others[1][-1] = -1
    with torch.no_grad():
        chosen = first.router.choose(first.router.gating(x))[1]
        given = torch.where((others[0] < 0).any(1, keepdim=True), chosen, others[0])
        logits = second.router.gating(dense(first(x, topk_indices=given)))
        last = torch.cat([others[1][:-1], second.router.choose(logits)[1][-1:]])
    y = second(dense(first(x, topk_indices=given)), topk_indices=last)
    leaves = [x, *model.parameters()]
    want = [y, *grads(y, leaves)]
    function = model if how == "eager" else compiled(model)
    with replay_routing(model, others, missing="live"), record_routing(model) as record:
        got = function(x)
    same(record.indices, [given, last])
    close([got, *grads(got, leaves)], want, 1e-5)
    with replay_routing(model, [i.short() for i in others]), record_routing(model) as record:
        function(x)
    same(record.indices, [i.where(i >= 0, 6) for i in others])


def test_trainer_replay_refuses_what_does_not_fit():
    model = two_layers(enable_expert_bias=True, score_function="sigmoid")
    x = torch.randn(5, 8)
    good = random_choices(5)

    def replayed(*indices):
        with replay_routing(model, indices):
            model(x)

    def twice(context, *args):
        with context(model, *args), context(model, *args):
            pass

    for phrase, call, *args in [
            ("is for 1 layers; the model has 2 routers: 0.router, 2.router", replayed, good[0]),
            ("is replaying already; leave replay_routing first", twice, replay_routing, good),
            ("missing is 'drop'; known: 'unrouted', 'live'",
             replay_routing(model, good, missing="drop").__enter__),
            ("recorded already; leave record_routing first", twice, record_routing),
            ("(Linear) has no Router", record_routing(torch.nn.Linear(2, 2)).__enter__)]:
        text = error(call, *args)
        assert text.startswith("ValueError: ") and phrase in text, text
    needed = "needs [5, 2] or [5, 2] of an integer dtype"
    for bad, found in [
            (good[1][:4], "[4, 2] torch.int64"), (good[1][:, :1], "[5, 1] torch.int64"),
            (good[1].float(), "[5, 2] torch.float32")]:
        update_expert_bias(model)
        text = error(replayed, good[0], bad)
        assert text == f"ValueError: indices of 2.router is {found}; {needed}"
        counted = [model[i].router.local_tokens_per_expert.sum().item() for i in (0, 2)]
        assert counted == [10, 0]            # the router that refuses has changed nothing
    text = error(replayed, good[0], None)
    assert text.startswith("ValueError: indices of 2.router is None: "), text
    with pytest.raises(ZeroDivisionError):
        with replay_routing(model, good), record_routing(model):
            1 / 0
    for router in moe._routers(model):
        assert not router._recording and router._replayed is None


def test_trainer_replay_recompiles_once():
    model = two_layers()
    x = torch.randn(5, 8)
    function = compiled(model)
    function(x)
    for _ in range(3):
        with replay_routing(model, random_choices(5)):
            function(x)
        function(x)
    assert counters["stats"]["unique_graphs"] == 2
    for _ in range(2):
        with record_routing(model):
            function(x)
    assert counters["stats"]["unique_graphs"] == 3


# ---- Across sections: slopes, dtypes of indices, devices, what is on at import ----

@pytest.mark.parametrize("kind", list(kernels.ACTIVATIONS))
def test_activation_slopes_by_differences(kind):
    """Every entry of the table, and what a new one has to fulfil."""
    values = dict(alpha=1.3, linear_offset=0.5, clamp_value=0.9, beta=1.5, linear_beta=0.7)
    constants = {name: values[name] for name in kernels.constants_of(kind)}
    y = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 1, dtype=torch.float64, requires_grad=True)
    for w in (None, weights):
        function = functools.partial(activation, kind=kind, **constants)
        torch.autograd.gradcheck(lambda y, w: function(y, weights=w), (y, w))
    assert "known: 'swiglu'" in error(activation, y, "tanh")


def test_router_loss_scale_whatever_is_on_at_import(tmp_path):
    """What is on where moe.py is imported does not reach the scale: fp32, on the CPU, outside of
    inference mode. Each case imports it in a process of its own, forked where torch is there."""
    (tmp_path / "script.py").write_text("""
import os, einops, torch, torch.distributed.tensor
for on in (lambda: torch.set_default_dtype(torch.float16), lambda: torch.set_default_device("meta"),
           lambda: torch.inference_mode().__enter__(), lambda: torch.set_grad_enabled(False)):
    if os.fork():
        os.wait()
        continue
    kept = on()
    import moe
    scale = moe._loss_scale(torch.device("cpu"))
    torch.set_default_dtype(torch.float32), torch.set_default_device("cpu")
    with torch.inference_mode(False), torch.enable_grad():
        moe.set_aux_loss_scale(2.0 ** 18)
        layer = moe.MoELayer(moe.MoEConfig(8, 4, 4, 2, z_loss_coeff=0.1))
        logits = torch.ones(3, 4, requires_grad=True)
        layer.router.routing(logits)[0].mul(0).sum().backward()
    print(scale.dtype, scale.device, scale.is_inference(), logits.grad.sum(1)[0].item(), flush=True)
    os._exit(0)
""")
    lines = run("script.py", cwd=tmp_path, PYTHONPATH=str(HERE)).stdout.splitlines()
    lse = 1 + math.log(4)                    # the slope of 0.1·lse² is 0.1·2·lse
    assert len(lines) == 4
    for *scale, gradient in map(str.split, lines):
        assert scale == ["torch.float32", "cpu", "False"]
        assert float(gradient) == pytest.approx(2.0 ** 18 * 0.1 * 2 * lse / 3, abs=1.0)


def test_router_loss_scale_leaves_no_graph():
    scale = torch.tensor(3.0, requires_grad=True)
    set_aux_loss_scale(scale * 2)
    kept = moe._loss_scale(torch.device("cpu"))
    assert kept == 6 and not kept.requires_grad and kept.grad_fn is None
    assert "needs a float or a 0-d tensor" in error(set_aux_loss_scale, torch.ones(2))


def test_router_forced_balance_with_minus_infinity():
    """A masked logit (-inf) stays out of the random values; the gradient passes through."""
    router = TopKRouter(MoEConfig(8, 4, 5, topk=2, force_load_balancing=True, pre_softmax=True))
    logits = torch.randn(6, 5)
    logits[:, 1] = -INF
    logits[2] = -INF
    for route in (router.routing, compiled(router.routing)):
        logits = logits.detach().requires_grad_()
        probs, routing_map = route(logits)
        assert probs.isfinite().all() and (routing_map.sum(1) == 2).all()
        grad = grads(probs[:, 0], [logits])[0]
        assert grad.isfinite().all() and grad.abs().sum() > 0


def test_layer_shapes_beyond_two_to_the_31_on_the_meta_device():
    """Shapes without memory, also where T·K·H is beyond 2^31."""
    config = MoEConfig(
        hidden_size=4096, ffn_hidden_size=512, num_experts=64, topk=8, enable_expert_bias=True,
        shared_expert_intermediate_size=64, score_function="sigmoid",
        load_balancing_type="aux_loss", aux_loss_coeff=0.1)
    with torch.device("meta"):
        layer = MoELayer(config)
        x = torch.randn(1 << 20, 4096, requires_grad=True)
        y = layer(x)
        y.sum().backward()
    assert y.shape == x.shape and y.is_meta
    assert all(p.grad.shape == p.shape for p in (x, *layer.parameters()))


class IndexArithmetic(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects products of integers that are not int64, and indices of another dtype."""

    def __init__(self):
        super().__init__()
        self.narrow = []
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("mul", "floor_divide", "remainder"):
            checked = [out]
        elif name in ("index_select", "gather", "index_add"):
            checked = [args[2]]
        elif name == "index":
            checked = [index for index in args[1] if index is not None]
        else:
            return out
        self.seen.add(name)
        for tensor in checked:
            if not tensor.is_floating_point() and tensor.dtype not in (torch.int64, torch.bool):
                self.narrow.append(f"{func.name()} {tensor.dtype}")
        return out


def test_permute_index_times_width_is_int64():
    """torchtitan #2430: beyond 2^31 elements an int32 product of an index and a row's width
    overflows."""
    mode = IndexArithmetic()
    x = torch.randn(6, 8, requires_grad=True)
    config = MoEConfig(
        8, 4, 4, topk=2, capacity_factor=1.0, pad_to_capacity=True, add_bias_linear=True)
    with mode:
        MoELayer(config)(x).sum().backward()
        plan = plan_permutation(random_indices(6, 4, 2), 4)
        padded = kernels.pad_plan(plan, 6)
        combine_rows(gather_rows(x, padded), padded, torch.rand(6, 2)).sum().backward()
        routing_map = torch.rand(6, 4) < 0.5
        probs = torch.rand(6, 4)
        for pad in (False, True):
            rows, _, order = permute(x, routing_map, probs, num_out_tokens=12, drop_and_pad=pad)
            unpermute(rows, order, x.shape, probs=probs, routing_map=routing_map, drop_and_pad=pad)
        sort_chunks_by_idxs(x, torch.tensor([2, 1, 3]).int(), torch.tensor([1, 2, 0]))
    assert mode.seen >= {"mul", "index_select", "gather", "index", "index_add", "floor_divide"}
    assert not mode.narrow, mode.narrow


big_card = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] >= 60 << 30


@pytest.mark.skipif(not big_card, reason="no CUDA device of 60 GiB")
def test_permute_rows_beyond_two_to_the_31_elements_on_cuda():
    T, K, H = 1 << 16, 8, 8192                               # 2^32 elements
    values = torch.arange(T, device="cuda").remainder(251).bfloat16()
    tokens = values[:, None].expand(T, H).contiguous()
    plan = plan_permutation(torch.arange(K, device="cuda").repeat(T, 1), K)
    for how in (lambda function: function, lambda function: compiled(function, "inductor")):
        rows = how(gather_rows)(tokens, plan)
        same(rows[-3:, -1].cpu(), tokens[-3:, -1].cpu())
        same(how(combine_rows)(rows, plan)[-3:, -1].cpu(), (tokens[-3:, -1] * K).cpu())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_permute_integer_routing_maps(dtype):
    """0 and 1 in any integer dtype are the boolean map. What comes back is boolean; a padded map
    has the dtype that was given."""
    routing_map = torch.rand(9, 4) < 0.4
    probs = torch.rand(9, 4)
    x = torch.randn(9, 6)

    def all_of_it(routing_map):
        for pad in (False, True):
            rows, _, order = permute(x, routing_map, probs, num_out_tokens=12, drop_and_pad=pad)
            yield rows, order
            yield unpermute(
                rows, order, x.shape, probs=probs, routing_map=routing_map, drop_and_pad=pad)
            for policy in ("probs", "position"):
                yield apply_router_token_dropping(
                    probs, routing_map, 2, capacity_factor=0.7, drop_policy=policy,
                    pad_to_capacity=pad)
        yield permute(x, routing_map)[0]
        padded = pad_routing_map(routing_map, 4)
        assert padded.dtype == routing_map.dtype
        yield padded.bool()
        config = MoEConfig(6, 4, 4, topk=2, enable_expert_bias=True, score_function="sigmoid")
        router = TopKRouter(config)
        router._apply_expert_bias(routing_map)
        yield router.local_tokens_per_expert
    for got, want in zip(all_of_it(routing_map.to(dtype)), all_of_it(routing_map), strict=True):
        same(got, want)
    assert "routing_map is torch.float32" in error(permute, x, routing_map.float())


def test_files_kernels_under_a_name_with_a_hyphen(monkeypatch):
    """Op names are made of the module's name, whatever it is."""
    name = "my-kernels.v2"
    spec = importlib.util.spec_from_file_location(name, HERE / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert module.plan_permutation(torch.tensor([[1], [0]]), 2).order.tolist() == [1, 0]
    op = torch.ops.moe_my_kernels_v2.plan_permutation.default
    assert op.name() == "moe_my_kernels_v2::plan_permutation"


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a CUDA device."""
    device = torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def test_experts_native_product_where_it_fits(monkeypatch):
    """torch's grouped product on CUDA: in bf16, on two generations of cards, never on ROCm, with
    fewer than 1,024 experts, in multiples of 16 bytes. What reads the card runs inside a graph."""
    card = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", None)

    def native(*operands):
        return kernels._native(*[x.as_subclass(OnCuda) for x in operands])
    rows = torch.empty(10, 16).bfloat16()
    weights = torch.empty(4, 16, 24).bfloat16()
    assert native(rows, weights)
    assert native(rows, weights.transpose(1, 2))
    assert not native(rows, weights.float())
    assert not kernels._native(rows, weights)                                       # on a CPU
    assert not native(rows[:, :12].contiguous(), weights)
    assert not native(rows, weights[:, :, :12].contiguous())
    assert not native(rows, weights.repeat(1, 1, 2)[:, :, ::2])                     # strided
    assert not native(rows, torch.empty(4, 16, 20).bfloat16()[:, :, :16])           # 20 apart
    assert not native(rows, weights[:1].expand(4, 16, 24))
    pair = torch.empty(4 * 16 * 24 + 8).bfloat16()
    assert not native(rows, pair[1:1 - 8].view(4, 16, 24))                          # its pointer
    assert native(rows, pair[8:].view(4, 16, 24))
    many = torch.empty(1024, 8, 8).bfloat16()
    assert native(many[1:]) and not native(many)
    for card in ((7, 5), (8, 0), (8, 9), (11, 0), (12, 0)):
        assert not native(rows, weights), card
    for card in ((9, 0), (10, 0), (10, 3)):
        assert native(rows, weights), card
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not native(rows, weights)
    function = compiled(lambda x: x + kernels._reads_offsets_itself(x.device))
    same(function(torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("options", [
    dict(), dict(add_bias_linear=True), dict(latent_size=7)])
def test_experts_read_the_offsets_on_the_host_once(monkeypatch, options):
    """On a card without torch's own product: one copy for all products of forward and backward.
    The card is the CPU; its offsets may not be read but in the copy."""
    copies = []
    read = []

    def copy_to_host(offsets):
        copies.append(offsets.clone())
        return copies[-1]

    def on_card(offsets):
        return offsets.data_ptr() not in [copy.data_ptr() for copy in copies]

    def blocks(offsets):
        read.append(on_card(offsets))
        return _blocks(offsets)
    _blocks = kernels._blocks
    layer = random_layer(MoEConfig(16, 8, 5, topk=3, init_std=0.5, **options))
    x = torch.randn(20, 16, requires_grad=True)
    inputs = [x, *layer.parameters()]
    want = layer(x)
    want_grads = grads(want, inputs)
    monkeypatch.setattr(kernels, "_on_card", on_card)
    monkeypatch.setattr(kernels, "_copy_to_host", copy_to_host)
    monkeypatch.setattr(kernels, "_blocks", blocks)
    monkeypatch.setattr(kernels, "_loops_in_torch", lambda *_: False)
    monkeypatch.setattr(F, "grouped_mm", None)
    got = layer(x)
    close([got, *grads(got, inputs)], [want, *want_grads], 1e-5)
    assert len(copies) == 1 and read == [False] * (7 if "add_bias_linear" in options else 6)
    offsets = torch.tensor([3, 9, 20], dtype=torch.int32)
    grads(grouped_mm(x, torch.randn(3, 16, 4, requires_grad=True), offsets), [x])
    assert len(copies) == 2


def test_experts_without_rows_have_zero_gradients_on_a_card(monkeypatch):
    """Torch's product may leave them uninitialised (pytorch #172439). The card is a stand-in."""
    a, b = torch.randn(9, 6), torch.randn(9, 4)
    offsets = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    want = kernels._weight_grad(kernels._Rows(a), kernels._Rows(b), offsets)
    assert [bool(grad.any()) for grad in want] == [False, True, False, True, False]

    def garbage(rows_t, rows, offs):
        grad = kernels._rows_times_rows(rows_t.t(), None, rows, None, offs)
        grad[[0, 2, 4]] = torch.tensor([NAN, INF, -7.0])[:, None, None]
        return grad
    monkeypatch.setattr(F, "grouped_mm", garbage)
    monkeypatch.setattr(kernels, "_on_card", lambda offsets: True)
    monkeypatch.setattr(kernels, "_leaves_empty_blocks", lambda device: True)
    same(kernels._weight_grad(kernels._Rows(a), kernels._Rows(b), offsets), want)
    monkeypatch.undo()
    for card, fits in (((9, 0), False), ((10, 0), True), ((10, 3), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
        assert kernels._leaves_empty_blocks(torch.device("cuda")) is fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_small_products_loop_in_torch(dtype, monkeypatch):
    """The loop in C++ and the one in Python give the same bits: an expert without rows, rows of
    none."""
    monkeypatch.setattr(kernels, "_slow_on_cpu", lambda dtype: False)
    x = torch.randn(9, 16).to(dtype)
    grad = torch.randn(18, 24).to(dtype)
    weights = torch.randn(4, 24, 16).to(dtype)
    plan = plan_permutation(torch.tensor(
        [[0, 4], [3, 0], [1, 3], [0, 1], [3, 4], [0, 3], [1, 0], [3, 1], [4, 0]]), 4)
    token_N = plan.order // 2
    offsets = plan.offsets
    results = {}
    for in_torch in (True, False):
        called = []

        def loops_in_torch(*args):
            called.append(args)
            return in_torch
        monkeypatch.setattr(kernels, "_loops_in_torch", loops_in_torch)
        forward = kernels._rows_times_weights
        back = kernels._rows_times_rows
        results[in_torch] = [
            forward(x, token_N, weights.transpose(1, 2), None, offsets),
            forward(grad, None, weights, None, offsets),
            back(grad, None, x, token_N, offsets),
            back(x, token_N, grad, None, offsets),
            forward(x, token_N, weights[:, :6].transpose(1, 2), None, offsets),
            forward(grad, None, weights, weights[:, 0], offsets)]
        assert called
        assert not results[in_torch][0][15:].any() and not results[in_torch][3][2].any()
    same(results[True], results[False])
    monkeypatch.undo()

    few = torch.empty(40, 16)
    many = torch.empty(2 ** 14, 256)
    for x, tokens, loops in [
            (few, None, True), (many, None, False), (few, 2 ** 14, False), (many, 40, True),
            (few.double(), None, False), (few[:, :6].contiguous(), None, False)]:
        token_N = None if tokens is None else torch.zeros(tokens, dtype=torch.int64)
        assert kernels._loops_in_torch(x, token_N, 4) == loops, (x.shape, tokens)


class NoFloat64(torch.utils._python_dispatch.TorchDispatchMode):
    """A device without float64, as Apple's and Intel's: refused in every op, and in the ops that
    the project's own ops are made of."""
    bodies = {op._qualname: op._init_fn for module in (kernels, moe) for op in vars(module).values()
              if isinstance(op, torch._library.custom_ops.CustomOpDef)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.name().split(".")[0]
        if name in self.bodies:
            with self:
                out = self.bodies[name](*args, **kwargs)
        else:
            out = function(*args, **kwargs)
        for x in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{name}: this device has no float64")
        return out


FLOAT32_CASES = {
    **ONE_GRAPH,
    **{f"activation {i}": fields for i, fields in enumerate(ACTIVATIONS)},
    "fp8": dict(activation_fp8_input_store=True),
    "random": dict(input_jitter_eps=0.1, force_load_balancing=True),
    "bf16": dict(params_dtype=torch.bfloat16, router_dtype=torch.bfloat16, router_bias=True),
    "sign": dict(enable_expert_bias=True, router_bias=True, capacity_factor=0.7),
}


@pytest.mark.parametrize("name", FLOAT32_CASES)
def test_compile_nothing_is_float64_without_a_float64_input(name):
    """pytorch #122602, torch-xpu-ops #1742: forward, backward, both bias updates and metrics."""
    options = dict(params_dtype=torch.float32, router_dtype=torch.float32)
    config = dataclasses.replace(
        shared_config(shared_expert_overlap=True), **{**options, **FLOAT32_CASES[name]})
    with NoFloat64():
        with pytest.raises(TypeError, match="no float64"):
            kernels.value_in_backward(torch.ones(2).double(), torch.ones(2))
        layer = MoELayer(config)
        x = torch.randn(5, 3, 6, dtype=config.params_dtype, requires_grad=True)
        layer(x, torch.rand(5, 3) < 0.2).sum().backward()
        parallel.gradient_norm(layer, None)
        update_expert_bias(layer)
        layer.router.reset_global_aux_loss_tracker()
        load_balancing_metrics(layer, reduce=True)
        with record_routing(layer) as record:
            layer.eval()(x)
        with replay_routing(layer, record.indices, missing="live"):
            layer(x)
        rows, _, order = permute(x[0], torch.ones(3, 2).bool(), torch.rand(3, 2), num_out_tokens=5)
        unpermute(rows, order, (3, 6))


def test_compile_ops_that_decide_on_the_host_stay_out_of_cuda_graphs():
    lines = []
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        space, name = full_name.split("::")
        if space != "moe_kernels":
            continue
        op = getattr(torch.ops.moe_kernels, name).default
        where = "host" if torch.Tag.cudagraph_unsafe in op.tags else "device"
        lines.append(f"{where:<6}  {name}")
    assert_expected_inline("\n".join(lines), """\
host    copy_to_host
device  count_experts
device  fork_stream
device  join_stream
device  place_by_key
device  plan_permutation
device  product_in
host    rows_times_rows
host    rows_times_weights
host    running_sums
device  scatter_columns
device  sinkhorn
device  sum_tokens
host    update_once
device  value_in_backward""")


def test_compile_overlap_with_cuda_graphs_is_refused():
    """mode="reduce-overhead" sets this switch; graphs of one memory pool must not be replayed on
    two streams."""
    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    layer = MoELayer(MoEConfig(
        32, 24, 4, topk=2, shared_expert_intermediate_size=40, shared_expert_overlap=True))
    x = torch.randn(20, 32, requires_grad=True)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        with pytest.raises(Exception, match="compile without them, or without overlap"):
            captured(layer, x)


def test_experts_index_nowhere_gives_the_routers_gradient():
    """transformers #48687: an index that computes a real expert leaves the loss right and the
    router's gradient wrong."""
    for options in [
            dict(), dict(apply_probs_on="input", topk=1, pre_softmax=True),
            dict(score_function="sigmoid"), dict(add_bias_linear=True), dict(pre_softmax=True)]:
        layer = random_layer(MoEConfig(6, 5, 4, **{
            "topk": 3, "params_dtype": torch.float64, "router_dtype": torch.float64, **options}))
        x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
        given = random_indices(7, 4, layer.config.topk, nowhere=0.5, repeats=0.3)
        leaves = [x, *layer.parameters()]
        want = layer_loop(layer, x, given=given)[0]
        want_grads = grads(want.sin(), leaves)
        for function in (layer, compiled(layer)) if not options else (layer,):
            got = function(x, topk_indices=given)
            close(got, want)
            for a, b in zip(grads(got.sin(), leaves), want_grads, strict=True):
                close(a, b)


def test_experts_index_nowhere_gives_its_prob_no_gradient():
    """Whatever the prob there is, and with every bias."""
    indices = torch.tensor([[0, 3], [3, 1], [2, 0]])         # of three experts: 3 is nowhere
    plan = plan_permutation(indices, 3)
    probs = torch.rand(3, 2, requires_grad=True)
    weights = [torch.randn(shape) for shape in ((3, 2, 5, 6), (3, 6, 5), (3, 2, 5), (3, 6))]
    y = expert_mlp(torch.randn(3, 6), probs, plan, *weights)
    grad = grads(y.sum(), [probs])[0]
    assert torch.equal(grad == 0, indices == 3)


def test_experts_named_twice_count_twice():
    """expert_mlp takes indices as they are, biases included; a layer merges repeats before."""
    indices = torch.tensor([[0, 0], [2, 1], [1, 1]])
    probs = leaf(3, 2)
    x = leaf(3, 6)
    weights = [leaf(*shape) for shape in ((3, 2, 5, 6), (3, 6, 5), (3, 2, 5), (3, 6))]
    inputs = [x, probs, *weights]
    got = expert_mlp(x, probs, plan_permutation(indices, 3), *weights)
    halves = [expert_mlp(x, probs[:, k:k + 1], plan_permutation(indices[:, k:k + 1], 3), *weights)
              for k in range(2)]
    want = halves[0] + halves[1]
    close_all([got, *grads(got.sin(), inputs)], [want, *grads(want.sin(), inputs)])


# ---- Compile, memory, repeatability ----

@pytest.fixture
def no_cpp_compiler(monkeypatch):
    """Inductor generates its kernels, but none is compiled or run. Counts and sizes are right; the
    numbers are zeros."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def zeros(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", zeros)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *args: None)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield
    PyCodeCache.cache_clear()


@pytest.mark.parametrize("dtype, count", [
    (torch.float32, 13), pytest.param(torch.bfloat16, 15, marks=slow)])
def test_compile_kernels_and_bytes(dtype, count, no_cpp_compiler):
    """Kernels that Inductor generates for forward and backward; the rest are products, top-k and
    the ops of kernels.py. Kept for the backward: T·H + N·2F elements, indices and probs, and at
    most 5% more."""
    T, H, F_, K = 512, 512, 256, 8
    layer = MoELayer(MoEConfig(H, F_, 16, topk=K, params_dtype=dtype))
    function = compiled(layer, "inductor")
    x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    metrics.reset()
    function(x).sum().backward()
    assert metrics.generated_kernel_count == count
    least = (T * H + T * K * 2 * F_) * x.element_size()
    for call in (layer, function):
        kept = saved_bytes(lambda: call(x), exclude=layer.parameters())
        assert least <= kept <= 1.05 * least + T * K * (8 + 4)


@pytest.mark.parametrize("norm", [False, True])
def test_compile_bytes_kept_with_latent_experts(norm, no_cpp_compiler):
    """T·H + 2·T·ℓ + N·2F elements, indices, probs: the norm is computed again."""
    T, H, width, F_, K = 512, 512, 256, 64, 4
    layer = MoELayer(MoEConfig(H, F_, 16, topk=K, latent_size=width, latent_norm=norm))
    x = torch.randn(T, H, requires_grad=True)
    least = 4 * (T * H + 2 * T * width + T * K * 2 * F_)
    small = T * K * (8 + 8 + 4) + 4 * T * 16
    for call in (layer, compiled(layer, "inductor")):
        kept = saved_bytes(lambda: call(x), exclude=layer.parameters())
        assert least <= kept <= 1.01 * least + small


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_compile_bitwise_repeatable(backend):
    layer = MoELayer(MoEConfig(
        64, 32, 16, topk=4, load_balancing_type="aux_loss", aux_loss_coeff=0.1,
        add_bias_linear=True))
    function = layer
    if backend is not None:
        function = compiled(layer, backend)
    x = torch.randn(257, 64, requires_grad=True)
    upstream = torch.linspace(-1, 1, x.numel()).view_as(x)
    first = outcome(function, x, layer, upstream=upstream)
    for _ in range(20):
        same(outcome(function, x, layer, upstream=upstream), first)


def test_compile_fp8_store_halves_what_bf16_keeps():
    layer = MoELayer(MoEConfig(
        64, 32, 16, topk=8, params_dtype=torch.bfloat16, activation_fp8_input_store=True))
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    kept = saved_bytes(lambda: layer(x), exclude=layer.parameters())
    small = 256 * 8 * (3 * 8 + 4)             # three int64 of size N, and probs
    assert kept <= 1.05 * (256 * 64 * 2 + 256 * 8 * 64) + small
    plain = MoELayer(dataclasses.replace(layer.config, activation_fp8_input_store=False))
    plain.load_state_dict(layer.state_dict())
    same(layer(x), plain(x))
    close(outcome(layer, x, layer)[1], outcome(plain, x, plain)[1], 0.05)


@slow
def test_compile_no_recompile_over_T():
    """One dynamic graph from T = 2 to beyond 32767 assignments, where a sort's own lowering guards.
    T = 0 and T = 1 may each have a graph of their own."""
    def graphs(function, *sizes):
        for T in sizes:
            function(torch.randn(T, 8, requires_grad=True)).sum().backward()
        return counters["stats"]["unique_graphs"]
    layer = MoELayer(MoEConfig(
        8, 4, 16, topk=8, load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1,
        router_bias=True, add_bias_linear=True))
    function = compiled(layer, "inductor", dynamic=True)
    assert graphs(function, 64) == 1
    assert graphs(function, 2, 3, 17, 100, 1000, 4095, 4096, 4097, 5000, 8192) == 1
    assert graphs(function, 0, 1, 0, 1, 65) <= 3


def test_compile_without_host_sync():
    """The joint graph holds no .item(), no nonzero, no unbacked size: ready for CUDA graphs and
    export. It has no scatter: see test_graph_gives_the_routers_gradient_at_few_tokens."""
    from torch._functorch.aot_autograd import aot_module_simplified
    targets = []

    def record(graph_module, _):
        for node in graph_module.graph.nodes:
            targets.append(str(node.target))
            shape = getattr(node.meta.get("val"), "shape", ())
            assert not any(str(size).startswith("u") for size in shape)
        return graph_module

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=record, bw_compiler=record)
    for options in [
            dict(force_load_balancing=True, input_jitter_eps=0.1, capacity_factor=2.0),
            dict(load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1,
                 score_function="sigmoid", num_groups=3, group_topk=2, enable_expert_bias=True,
                 add_bias_linear=True),
            dict(enable_expert_bias=True, bias_update="quantile", latent_size=4, latent_norm=True)]:
        layer = MoELayer(small_config(**options))
        compiled(layer, backend)(torch.randn(6, 2, 8, requires_grad=True)).sum().backward()
    assert any("plan_permutation" in target for target in targets)
    for name in ("_local_scalar_dense", "nonzero", "aten.item", "aten.scatter"):
        assert not [target for target in targets if name in target]


def all_kernels(tokens, logits, y, w):
    """A number that depends on every function of kernels.py."""
    T, E = logits.shape
    bias = logits.detach()[0]
    probs, routing_map = topk_routing_with_score_function(
        logits, 2, num_groups=2, group_topk=1, expert_bias=bias)
    probs, routing_map = apply_router_token_dropping(
        probs, routing_map, 2, capacity_factor=1.0, pad_to_capacity=True)
    rows, row_probs, index = permute(
        tokens, pad_routing_map(routing_map, 2), probs, num_out_tokens=T * 4)
    out = unpermute(
        rows * row_probs[:, None], index, tokens.shape, probs=probs, routing_map=routing_map)

    indices = topk_routing_with_score_function(logits, 2, dense_output=True)[1]
    plan = plan_permutation(indices, E)
    gathered = gather_rows(tokens, plan)
    out = out + combine_rows(grouped_mm(gathered, w, plan.offsets), plan, probs[:, :2])
    out = out + linear(combine_rows(gathered, plan), w[0], w[1, 0], eps=1e-5)
    chunks = sort_chunks_by_idxs(gathered, plan.counts, torch.arange(E - 1, -1, -1))[0]

    map_TE, scores = compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    counts = map_TE.sum(0)
    loss = z_loss_func(logits, 0.1) + switch_load_balancing_loss_func(
        scores, counts, T, topk=2, num_experts=E, moe_aux_loss_coeff=0.1)
    bias = get_updated_expert_bias(counts.float(), bias, 0.1)
    histogram = required_bias_histogram(scores, bias, 2, num_bins=50)
    bias = bias + quantile_expert_bias(histogram, bias, 2)
    loss = loss + sinkhorn(logits).sum() + bias.sum()
    out = out.sum() + weighted_swiglu(y, row_probs[:T, None]).sum()
    return out + chunks[:T].sum() + loss


def test_compile_every_kernel():
    """Every function of kernels.py is in one dynamic graph, forward and backward, for T >= 2."""
    function = compiled(all_kernels)

    def inputs(T):
        torch.manual_seed(T)
        shapes = (T, 6), (T, 4), (T, 8), (4, 6, 6)
        return [torch.randn(shape).requires_grad_() for shape in shapes]
    for T in (9, 2, 31, 4096):
        args = inputs(T)
        for tensor in args[:3]:
            torch._dynamo.mark_dynamic(tensor, 0)
        got = function(*args)
        want = all_kernels(*args)
        close_all([got, *grads(got, args)], [want, *grads(want, args)], 1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_compile_export_with_dynamic_T():
    config = small_config(score_function="sigmoid", num_groups=3, group_topk=2)
    layer = MoELayer(config).eval()
    T = torch.export.Dim("T", min=1, max=65536)
    program = torch.export.export(layer, (torch.randn(12, 8),), dynamic_shapes=({0: T},))
    for n in (1, 5, 300):
        x = torch.randn(n, 8)
        same(program.module()(x), layer(x))


def test_compile_ops_pass_opcheck():
    indices = random_indices(9, 4, 2)
    plan = plan_permutation(indices, 4)
    token = plan.order // 2
    offsets = plan.offsets
    x, w, b = torch.randn(9, 8), torch.randn(4, 6, 8), torch.randn(4, 6)
    h = torch.randn(18, 6)
    wide = torch.float64
    narrow = torch.float32
    for op, args in [
            (kernels._plan_permutation, (indices, 4)),
            (kernels.value_in_backward, (torch.ones(()), x)),
            (kernels._place_by_key, (x,)),
            (kernels._scatter_columns, (torch.rand(9, 2), indices, 4)),
            (kernels._scatter_columns, (indices, indices, 4, 7)),
            (kernels._sinkhorn, (x, 1e-4, None)),
            (kernels._rows_times_weights, (x, token, w.transpose(1, 2), b, offsets)),
            (kernels._rows_times_weights, (h, None, w, None, offsets)),
            (kernels._rows_times_rows, (x, token, h, None, offsets)),
            (kernels._rows_times_rows, (h, None, x, token, offsets)),
            (kernels._product_in, (torch.randn(4, 9), x, wide, narrow)),
            (kernels.count_experts, (indices, 4)),
            (kernels._sum_tokens, (x,)),
            (kernels._copy_to_host, (offsets,)),
            (moe._update_once, (torch.zeros(4), torch.ones(4), True)),
            (moe._running_sums, (torch.zeros(4), torch.zeros(()), torch.ones(4)))]:
        torch.library.opcheck(op, args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compile_cuda_layer_matches_cpu():
    layer = MoELayer(MoEConfig(64, 32, 8, topk=2))
    x = torch.randn(100, 64)
    want = layer(x)
    gpu = copy.deepcopy(layer).cuda().bfloat16()
    x_gpu = x.cuda().bfloat16().requires_grad_()
    logits = x_gpu.double() @ gpu.router.weight.double().t()          # not of rounded products
    close(gpu.router.gating(x_gpu).double(), logits, 1e-5)
    for function in (gpu, compiled(gpu, "inductor")):
        first = outcome(function, x_gpu, gpu)
        close(first[0].float().cpu(), want, 0.05)
        for _ in range(20):
            same(outcome(function, x_gpu, gpu), first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compile_cuda_syncs_of_a_step(dtype):
    """None where torch's grouped product reads the offsets on the card, else one."""
    import warnings
    layer = MoELayer(MoEConfig(64, 32, 8, topk=2, params_dtype=dtype, add_bias_linear=True)).cuda()
    x = torch.randn(100, 64, device="cuda", dtype=dtype, requires_grad=True)
    native = dtype == torch.bfloat16 and kernels._reads_offsets_itself(x.device)
    for function in (layer, compiled(layer, "inductor")):
        function(x).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            function(x).sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        assert sum("synchronizing" in str(w.message) for w in caught) == (0 if native else 1)
