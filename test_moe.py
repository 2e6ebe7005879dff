"""Tests: plain-loop oracles first, then one section per section of the sources.

The oracles share no code with their subjects, walk one token and one choice at a time, and run in float64. Every letter
has a different size wherever it can, so that a swapped axis fails.
"""
import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics

import families
import kernels
import moe
import parallel
from kernels import (
    activation, activation_back, apply_router_token_dropping, combine_rows,
    compute_routing_scores_for_aux_loss, expert_mlp, gather_rows, get_capacity,
    get_updated_expert_bias, group_limited_topk, grouped_mm, latent_up, pad_routing_map, permute,
    plan_permutation, quantile_expert_bias, required_bias_histogram, sinkhorn, sort_chunks_by_idxs,
    swiglu, swiglu_back, switch_load_balancing_loss_func, topk_routing_with_score_function,
    unpermute, weighted_swiglu, weighted_swiglu_back, z_loss_func)
from moe import (
    MoEConfig, MoELayer, ProcessGroups, SharedExpertMLP, SharedExpertState, TopKRouter, load_balancing_metrics,
    record_routing, reduce_gradients, replay_routing, set_aux_loss_scale, update_expert_bias)

HERE = Path(__file__).resolve().parent
INF, NAN = math.inf, math.nan


slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="slow: runs with SLOW=1")


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test draws from one seed, and leaves no compiled code, dtype or loss scale behind."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    set_aux_loss_scale(1.0)


def close(got: Tensor, want: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), rtol=tol, atol=tol)


def same(got, want) -> None:
    """Equal to the last bit; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def error(function, *args, **kwargs) -> str:
    """The type and text of the error that a call raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def grads(output: Tensor, inputs, upstream: Tensor | None = None) -> list[Tensor]:
    """Gradients of output to the inputs; an input that was not used is a failure."""
    return list(torch.autograd.grad(output, inputs, torch.ones_like(output) if upstream is None else upstream))


def compiled(function, backend="aot_eager", **kwargs):
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


# ---- Oracles ----

def score_loop(x_E: list, kind: str) -> list:
    if kind == "softmax":
        total = sum(x.exp() for x in x_E)
        return [x.exp() / total for x in x_E]
    return [1 / (1 + (-x).exp()) if kind == "sigmoid" else (1 + x.exp()).log().sqrt() for x in x_E]


def best(values: list, n: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i].item() if isinstance(values[i], Tensor) else -values[i])[:n]


def choose_loop(logits_E, c: MoEConfig, bias_E) -> list[int]:
    """The K experts of one token, best first."""
    if bias_E is None and c.num_groups is None:
        return best(list(logits_E), c.topk)
    score_E = [float(s) + (0.0 if bias_E is None else float(bias_E[e]))
               for e, s in enumerate(score_loop(list(logits_E), c.score_function))]
    if c.num_groups is not None:
        size, n = c.num_experts // c.num_groups, c.group_score_topk or c.topk // c.group_topk
        groups = [score_E[g * size:(g + 1) * size] for g in range(c.num_groups)]
        kept = best([sum(sorted(group)[-n:]) for group in groups], c.group_topk)
        score_E = [s if e // size in kept else -INF for e, s in enumerate(score_E)]
    return best(score_E, c.topk)


def route_loop(logits_TE: Tensor, c: MoEConfig, bias_E=None, given_TK=None) -> tuple[Tensor, Tensor]:
    """(probs [T, K], indices [T, K]), one token at a time; differentiable."""
    T, K, E = len(logits_TE), c.topk, c.num_experts
    probs_TK, indices_TK = logits_TE.new_zeros(T, K), torch.zeros(T, K, dtype=torch.int64)
    over_chosen = c.score_function == "softmax" and not c.pre_softmax and c.norm_topk_prob is None
    norm = c.norm_topk_prob if c.norm_topk_prob is not None else c.score_function != "softmax" and K > 1
    for t in range(T):
        chosen = choose_loop(logits_TE[t], c, bias_E) if given_TK is None else given_TK[t].tolist()
        real = [k for k in range(K) if chosen[k] < E]
        if over_chosen:
            p = score_loop([logits_TE[t, chosen[k]] for k in real], "softmax")
        else:
            all_scores = score_loop(list(logits_TE[t]), c.score_function)
            p = [all_scores[chosen[k]] for k in real]
        if norm:
            total = sum(p) + c.norm_eps
            p = [x / total for x in p]
        for k, x in zip(real, p):
            probs_TK[t, k] = x * (1.0 if c.scaling_factor is None else c.scaling_factor)
        indices_TK[t] = torch.tensor(chosen)
    return probs_TK, indices_TK


def act_loop(h_F: Tensor, c: MoEConfig) -> Tensor:
    if c.activation == "relu2":
        return torch.where(h_F > 0, h_F * h_F, 0.0)
    a, b = h_F[:len(h_F) // 2], h_F[len(h_F) // 2:]
    if c.activation_clamp_value is not None:
        a, b = a.clamp(max=c.activation_clamp_value), b.clamp(-c.activation_clamp_value, c.activation_clamp_value)
    if c.activation == "situ" and c.situ_linear_beta is not None:
        b = c.situ_linear_beta * (b / c.situ_linear_beta).tanh()
    gate = {"swiglu": lambda: a / (1 + (-a).exp()), "situ": lambda: c.situ_beta * (a / c.situ_beta).tanh() / (1 + (-a).exp()), "quick_geglu": lambda: a / (1 + (-c.glu_alpha * a).exp()),
            "geglu": lambda: 0.5 * a * (1 + ((2 / math.pi) ** 0.5 * (a + 0.044715 * a ** 3)).tanh())}[c.activation]()
    return gate * (b + c.glu_linear_offset)


def expert_loop(x_H: Tensor, e: int, c: MoEConfig, w: dict) -> Tensor:
    h_F = (w["experts.fc1"][e] @ x_H).flatten()
    if c.add_bias_linear:
        h_F = h_F + w["experts.fc1_bias"][e].flatten()
    y_H = w["experts.fc2"][e] @ act_loop(h_F, c)
    return y_H + w["experts.fc2_bias"][e] if c.add_bias_linear else y_H


def moe_loop(x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, c: MoEConfig, w: dict) -> Tensor:
    """y_t = Σ_k p_tk · expert(i_tk, x_t), or Σ_k expert(i_tk, p_tk · x_t); with latent experts up · norm(the same of
    down · x_t)."""
    rows = []
    for x_H, p_K, e_K in zip(x_TH, probs_TK, indices_TK.tolist()):
        z = x_H if c.latent_size is None else w["latent.down"] @ x_H
        y = torch.zeros_like(z)
        for p, e in zip(p_K, e_K):
            if e < c.num_experts:
                y = y + (expert_loop(p * z, e, c, w) if c.apply_probs_on == "input" else p * expert_loop(z, e, c, w))
        if c.latent_norm:
            y = y / ((y * y).sum() / len(y) + c.latent_norm_eps).sqrt() * w["latent.norm"]
        rows.append(y if c.latent_size is None else w["latent.up"] @ y)
    return torch.stack(rows) if rows else x_TH * 0


def switch_loss_loop(logits_TE: Tensor, c: MoEConfig, coeff: float, valid: list[int]) -> Tensor:
    """coeff · E/(K·T²) · Σ_e n_e Σ_t s_te over the valid tokens, with their own plain top K."""
    E, total = c.num_experts, max(len(valid), 1)
    counts, sums = [0] * E, [logits_TE.new_zeros(()) for _ in range(E)]
    for t in valid:
        s = score_loop(list(logits_TE[t]), c.score_function)
        whole = sum(s)
        for e in best(s, c.topk):
            counts[e] += 1
        for e in range(E):
            sums[e] = sums[e] + s[e] / whole
    return coeff * E / (c.topk * total ** 2) * sum(n * s for n, s in zip(counts, sums))


def z_loss_loop(logits_TE: Tensor, coeff: float, valid: list[int]) -> Tensor:
    return coeff * sum((sum(x.exp() for x in logits_TE[t]).log() ** 2 for t in valid), logits_TE.new_zeros(())) / max(len(valid), 1)


def permute_loop(routing_map: Tensor) -> list[tuple[int, int]]:
    """(expert, token) of every row."""
    T, E = routing_map.shape
    return [(e, t) for e in range(E) for t in range(T) if routing_map[t, e]]


def random_config(rng: random.Random, **fixed) -> MoEConfig:
    """A valid config over everything the layer can do; E = 8, K ≤ 4."""
    while True:
        K, score = rng.randint(1, 4), rng.choice(["softmax", "sigmoid", "sqrtsoftplus"])
        groups = rng.random() < 0.3
        kind = rng.choice(["swiglu", "geglu", "quick_geglu", "relu2", "situ"])
        gated, aux, latent = kind not in ("relu2", "situ"), rng.random() < 0.4, rng.random() < 0.4
        options = dict(
            hidden_size=6, ffn_hidden_size=5, num_experts=8, topk=K, activation=kind, init_std=0.5,
            glu_alpha=rng.choice([1.702, 1.3]) if kind == "quick_geglu" else 1.702,
            situ_beta=rng.choice([1.0, 1.5]) if kind == "situ" else 1.0,
            situ_linear_beta=rng.choice([None, 0.7]) if kind == "situ" else None, latent_size=7 if latent else None,
            latent_norm=latent and rng.random() < 0.5, latent_norm_eps=rng.choice([1e-5, 0.1]),
            glu_linear_offset=rng.choice([0.0, 1.0]) if gated else 0.0,
            activation_clamp_value=rng.choice([None, 0.7]) if gated else None,
            add_bias_linear=rng.random() < 0.4, apply_probs_on=rng.choice(["input", "activation", "output"]),
            score_function=score, pre_softmax=score == "softmax" and rng.random() < 0.5,
            norm_topk_prob=rng.choice([None, None, True, False]), norm_eps=rng.choice([1e-20, 1e-2]),
            num_groups=4 if groups else None, group_topk=2 if groups else None,
            group_score_topk=rng.choice([1, 2]) if groups else None, scaling_factor=rng.choice([None, 2.5]),
            router_bias=rng.random() < 0.3, enable_expert_bias=rng.random() < 0.4, router_dtype=torch.float64,
            params_dtype=torch.float64, load_balancing_type="aux_loss" if aux else "none", aux_loss_coeff=0.3 if aux else 0.0,
            z_loss_coeff=rng.choice([None, 0.1]))
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


# ---- Route ----

def test_routing_matches_loop():
    """300 random configurations: indices exactly, probs and gradients to rounding, both forms the same choice."""
    rng = random.Random(1)
    for _ in range(300):
        c = random_config(rng)
        T = rng.choice([0, 1, 2, 5, 11])
        logits = (torch.randn(T, 8, dtype=torch.float64) * rng.choice([0.5, 3.0])).requires_grad_()
        bias = torch.randn(8) * 0.3 if c.enable_expert_bias else None
        given = None
        if rng.random() < 0.3:                                       # E = nowhere, the others distinct
            given = torch.stack([torch.randperm(8)[:c.topk] for _ in range(T)]) if T else torch.empty(0, c.topk).long()
            given = torch.where(torch.rand(given.shape) < 0.3, 8, given)
        args = (c.topk, c.pre_softmax, c.num_groups, c.group_topk, c.scaling_factor, c.score_function, bias)
        more = dict(precomputed_indices=given, norm_topk_prob=c.norm_topk_prob, norm_eps=c.norm_eps,
                    group_score_topk=c.group_score_topk)
        probs, indices = topk_routing_with_score_function(logits, *args, dense_output=True, **more)
        want_probs, want_indices = route_loop(logits, c, bias, given)
        same(indices, want_indices)
        close(probs, want_probs)
        upstream = torch.randn_like(probs)
        if want_probs.requires_grad:
            close(grads(probs, [logits], upstream)[0], grads(want_probs, [logits], upstream)[0], 1e-8)

        probs_TE, routing_map = topk_routing_with_score_function(logits, *args, **more)
        for t in range(T):
            row = {int(e): probs[t, k] for k, e in enumerate(indices[t]) if e < 8}
            assert routing_map[t].nonzero().flatten().tolist() == sorted(row)
            same(probs_TE[t], torch.stack([row.get(e, torch.zeros(()).double()) for e in range(8)]))


def test_routing_dtypes():
    logits = torch.randn(7, 8).bfloat16()
    for kind in ("softmax", "sigmoid", "sqrtsoftplus"):
        probs, indices = topk_routing_with_score_function(logits, 3, score_function=kind, dense_output=True)
        wide, wide_indices = topk_routing_with_score_function(logits.float(), 3, score_function=kind, dense_output=True)
        assert probs.dtype == torch.bfloat16 and indices.dtype == torch.int64
        same(indices, wide_indices)
        same(probs, wide.bfloat16())                                  # fp32 inside, rounded once


def test_saturated_scores_follow_the_logits():
    """An fp32 sigmoid is 1 from a logit of 17 on; the choice still tells 18 from 30."""
    logits = torch.tensor([[30.0, 18.0, 25.0, 40.0]])
    indices = topk_routing_with_score_function(logits, 3, score_function="sigmoid", dense_output=True)[1]
    assert indices.tolist() == [[3, 0, 2]]


def test_sqrtsoftplus_gradient_where_it_underflows():
    logits = torch.tensor([[-200.0, -90.0, 0.0, 30.0]], requires_grad=True)
    probs = topk_routing_with_score_function(logits, 4, score_function="sqrtsoftplus", dense_output=True)[0]
    assert grads(probs, [logits])[0].isfinite().all()


def test_masked_groups_lose_to_negative_scores():
    """Groups that are out are masked with -inf: a mask of 0 would beat the negative biased scores of the group that is in
    (DeepSeek-V3 #741, vllm #13474)."""
    logits, bias = torch.zeros(1, 4), torch.tensor([-2.0, -3.0, -4.0, -5.0])
    indices = topk_routing_with_score_function(
        logits, 2, score_function="sigmoid", expert_bias=bias, num_groups=2, group_topk=1, dense_output=True)[1]
    assert indices.tolist() == [[0, 1]]
    assert group_limited_topk(bias[None], 2, 1, 4, 2, 1)[1].tolist() == [[0, 1]]


def test_expert_bias_chooses_but_does_not_weigh():
    logits = torch.randn(9, 8)
    free = topk_routing_with_score_function(logits, 8, score_function="sigmoid", norm_topk_prob=False)[0]
    bias = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    probs, routing_map = topk_routing_with_score_function(
        logits, 2, score_function="sigmoid", expert_bias=bias, norm_topk_prob=False)
    assert routing_map[:, :2].all() and not routing_map[:, 2:].any()
    same(probs[:, :2], free[:, :2])


def test_aux_loss_scores_match_loop():
    for kind, masked in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), (False, True)):
        logits = torch.randn(9, 5, dtype=torch.float64)
        mask = torch.arange(9) % 3 == 1 if masked else None
        routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, kind, mask)
        for t in range(9):
            s = score_loop(list(logits[t]), kind)
            gone = masked and t % 3 == 1
            close(scores[t], torch.zeros(5) if gone else torch.stack([x / sum(s) for x in s]))
            assert routing_map[t].nonzero().flatten().tolist() == ([] if gone else sorted(best(s, 2)))


# ---- Balance ----

def test_switch_loss_matches_loop_and_is_coeff_at_even_load():
    c = MoEConfig(4, 4, 6, 2)
    logits = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    for total in (11, torch.tensor(11)):
        loss = switch_load_balancing_loss_func(scores, routing_map.sum(0), total, 2, 6, 0.25)
        want = switch_loss_loop(logits, c, 0.25, list(range(11)))
        close(loss, want)
        close(grads(loss, [logits])[0] if isinstance(total, int) else torch.zeros(1),
              grads(want, [logits])[0] if isinstance(total, int) else torch.zeros(1))
        routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    even = switch_load_balancing_loss_func(torch.full((12, 6), 1 / 6), torch.full((6,), 4), 12, 2, 6, 0.25)
    close(even, torch.tensor(0.25), 1e-6)
    for nothing in (0, torch.tensor(0)):
        assert switch_load_balancing_loss_func(torch.zeros(0, 6), torch.zeros(6), nothing, 2, 6, 0.25) == 0


def test_z_loss_matches_loop():
    logits = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 3) < 0.4
    for m in (None, mask, torch.ones_like(mask)):
        valid = [t for t in range(12) if m is None or not m.flatten()[t]]
        got, want = z_loss_func(logits, 0.3, m), z_loss_loop(logits.flatten(0, 1), 0.3, valid)
        close(got, want)
        if valid:
            close(grads(got, [logits])[0], grads(want, [logits])[0])
    assert z_loss_func(torch.zeros(0, 5), 0.3) == 0
    poisoned = logits.detach().masked_fill(mask[..., None], NAN).requires_grad_()
    loss = z_loss_func(poisoned, 0.3, mask)
    same(loss, z_loss_func(logits, 0.3, mask))
    assert grads(loss, [poisoned])[0].isfinite().all()


def sinkhorn_loop(cost: Tensor, tol: float, rounds: int = 256) -> Tensor | None:
    """Megatron's loop; None where it has not stopped by then."""
    A = cost.exp()
    d0, d1 = torch.ones(A.shape[0], dtype=A.dtype), torch.ones(A.shape[1], dtype=A.dtype)
    for _ in range(rounds):
        d0 = (1 / len(d0)) / ((A * d1).sum(1) + 1e-8)
        new = (1 / len(d1)) / ((A * d0[:, None]).sum(0) + 1e-8)
        change, d1 = (new - d1).abs().mean(), new
        if change <= tol:
            return d1 * A * d0[:, None]
    return None


def test_sinkhorn_matches_loop_and_stays_finite():
    stopped = 0
    for seed, (T, E) in itertools.product(range(8), [(64, 8), (33, 5), (3, 7), (1, 4)]):
        cost = (torch.rand(T, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10 - 5)
        want = sinkhorn_loop(cost, 1e-4)
        if want is not None:
            stopped += 1
            got = sinkhorn(cost)
            close(got, want, 1e-5)
            close(got.sum(0), torch.full((E,), 1 / E), 0.01)
            close(got.sum(1), torch.full((T,), 1 / T), 0.01)
    assert stopped >= 16
    for scale in (1e2, 1e4):
        assert sinkhorn(torch.randn(33, 5) * scale).isfinite().all()
    assert sinkhorn(torch.zeros(0, 5)).shape == (0, 5)
    cost = torch.randn(17, 5)
    same(compiled(sinkhorn)(cost), sinkhorn(cost))


def test_capacity_in_python_floats():
    assert get_capacity(10, 3, 1.0) == 4 and get_capacity(10, 3, 1.0, min_capacity=7) == 7
    for T, E, factor in [(7, 49, 7.0), (100, 3, 1.1), (2048 * 8, 64, 1.25), (29, 7, 0.3)]:
        assert get_capacity(T, E, factor) == math.ceil(T / E * factor)

    def in_graph(x):
        return x.new_zeros(get_capacity(x.shape[0] * 3, 7, 1.1))
    f = compiled(in_graph, dynamic=True)
    for T in (5, 29, 70, 91, 333):
        assert len(f(torch.zeros(T))) == get_capacity(T * 3, 7, 1.1)


def dropping_loop(probs, routing_map, capacity, policy, pad):
    T, E = routing_map.shape
    out_probs, out_map = torch.zeros_like(probs), torch.zeros_like(routing_map)
    for e in range(E):
        routed = [t for t in range(T) if routing_map[t, e]]
        if policy == "probs":
            routed.sort(key=lambda t: -float(probs[t, e]))           # stable: equal ones in order
        for t in routed[:capacity]:
            out_probs[t, e], out_map[t, e] = probs[t, e], True
        if pad:
            for t in [t for t in range(T) if not routing_map[t, e]][:max(min(capacity, T) - len(routed), 0)]:
                out_map[t, e] = True
    return out_probs, out_map


@pytest.mark.parametrize("policy, pad", [*itertools.product(["probs", "position"], [False, True])])
def test_token_dropping_matches_loop(policy, pad):
    f = compiled(apply_router_token_dropping, dynamic=True)
    for seed, factor in itertools.product(range(6), (0.3, 1.0, 1.5, 9.0)):
        logits = torch.randn(13, 5, generator=torch.Generator().manual_seed(seed))
        probs, routing_map = topk_routing_with_score_function(logits, 2)
        probs = torch.where(torch.rand(13, 5) < 0.2, 0.0, probs)      # ties, and a routed token with prob 0
        want = dropping_loop(probs, routing_map, math.ceil(13 * 2 / 5 * factor), policy, pad)
        for function in (apply_router_token_dropping, f):
            same(function(probs, routing_map, 2, factor, policy, pad), want)
    assert counters["stats"]["unique_graphs"] <= 4                    # one a factor


def test_expert_bias_update():
    counts, bias = torch.tensor([5.0, 1.0, 3.0, 3.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    close(get_updated_expert_bias(counts, bias, 0.01), torch.tensor([0.09, 0.21, 0.30, 0.40]), 1e-7)
    even = torch.full((3,), 2.0 ** 24 + 2)                            # the mean of three in fp32 could round
    same(get_updated_expert_bias(even, bias[:3], 0.01), bias[:3])


def bias_loop(scores_TE: list, bias_E: list, K: int, num_bins: int) -> list[list[int]]:
    """How many tokens need which bias, one token and one expert at a time."""
    low = min(bias_E) - 1
    width = (max(bias_E) + 1 - low) / num_bins
    counts = [[0] * num_bins for _ in bias_E]
    for s_E in scores_TE:
        alpha = sorted((s + b for s, b in zip(s_E, bias_E)), reverse=True)[K]
        for e, s in enumerate(s_E):
            counts[e][min(max(math.floor((alpha - s - low) / width), 0), num_bins - 1)] += 1
    return counts


def quantile_loop(counts: list[list[int]], bias_E: list, K: int) -> list[float]:
    low, num_bins = min(bias_E) - 1, len(counts[0])
    width, found = (max(bias_E) + 1 - low) / num_bins, []
    for row in counts:
        wanted, below = K / len(counts) * sum(row), 0
        for i, n in enumerate(row):
            if below + n >= wanted:
                found.append(low + width * (i + (wanted - below) / n))
                break
            below += n
    return [b - sum(found) / len(found) for b in found]


@pytest.mark.parametrize("T, E, K, num_bins", [(1, 2, 1, 7), (9, 4, 1, 10), (40, 6, 3, 1000), (33, 5, 4, 50)])
def test_quantile_balancing_matches_loop(T, E, K, num_bins):
    for _ in range(5):
        scores, bias = torch.rand(T, E, dtype=torch.float64), torch.randn(E, dtype=torch.float64) / 5
        mask = torch.rand(T) < 0.3
        valid = scores[~mask]
        scores[mask] = NAN                                            # padding may hold anything
        want = bias_loop(valid.tolist(), bias.tolist(), K, num_bins)
        for function in (required_bias_histogram, compiled(required_bias_histogram)):
            same(function(scores, bias, K, num_bins, mask), torch.tensor(want).int())
        halves = [required_bias_histogram(part, bias, K, num_bins, m) for part, m in zip(scores.tensor_split(2), mask.tensor_split(2))]
        same(halves[0] + halves[1], torch.tensor(want).int())         # over microbatches and ranks, in any order
        if mask.all():
            continue
        found = torch.tensor(quantile_loop(want, bias.tolist(), K), dtype=torch.float64)
        for function in (quantile_expert_bias, compiled(quantile_expert_bias)):
            close(function(torch.tensor(want), bias, K), found, 1e-12)


@pytest.mark.parametrize("K", [1, 3, 7])
def test_quantile_balancing_is_the_quantile(K):
    """torch.quantile of the required biases, up to two bins' width, where they lie dense."""
    scores, bias = torch.rand(20000, 8).sigmoid(), torch.randn(8) / 5
    required = (scores + bias).topk(K + 1, dim=1).values[:, -1:] - scores
    want = torch.stack([torch.quantile(r_T, K / 8) for r_T in required.double().T])
    got = quantile_expert_bias(required_bias_histogram(scores, bias, K), bias, K)
    close(got.double(), want - want.mean(), 2 * (bias.max() - bias.min() + 2) / 1000)
    assert abs(got.sum()) < 1e-6 and got.dtype == torch.float32


def test_quantile_balancing_at_its_edges():
    """No token: the bias to the bit. Counts that fp32 cannot tell apart. Values beyond the range, NaN: the end bins."""
    bias = torch.tensor([0.1, -0.3, 0.25])
    same(quantile_expert_bias(torch.zeros(3, 10).int(), bias, 1), bias)
    n = 3 * 10**7 + 3
    counts = torch.zeros(3, 10, dtype=torch.int32)
    counts[:, 4], counts[:, 5] = n // 3, n - n // 3                   # the quantile is the very end of bin 4
    low, width = bias.double().min() - 1, (bias.double().max() - bias.double().min() + 2) / 10
    counts[0, 4], counts[0, 5] = n // 3 - 1, n - n // 3 + 1           # here just behind it
    got = quantile_expert_bias(counts, bias.double(), 1)
    close(got[0] - got[1], width / (n - n // 3 + 1), 1e-15)
    scores = torch.tensor([[5.0, 0.5, -4.0], [NAN, NAN, NAN]])
    histogram = required_bias_histogram(scores, torch.zeros(3), 1, 10)
    assert (histogram.sum(1) == 2).all() and histogram[0, 0] == 2 and histogram[2, 9] == 1


def test_router_balances_by_quantiles():
    """After one update the loads of the same tokens are even, from any skew, without a setting; then they stay."""
    for score_function in ("sigmoid", "softmax"):
        layer = MoELayer(MoEConfig(16, 4, 32, 4, score_function=score_function, enable_expert_bias=True, bias_update="quantile",
                                   norm_topk_prob=False))
        with torch.no_grad():
            layer.router.weight.mul_(20)
        xs, violations = [torch.randn(1000, 16) for _ in range(4)], []
        for step in range(5):
            for x in xs:
                layer(x)
            violations.append(max(layer.router.local_tokens_per_expert / 500 - 1).item())
            update_expert_bias(layer)
            assert layer.router.local_tokens_per_expert.sum() == 0 and layer.router.bias_histogram.sum() == 0
        assert violations[0] > 0.5 and violations[-1] < 0.2, violations
        for x in xs:
            layer(x)
        assert layer.router.bias_histogram.sum() == 4 * 1000 * 32
        layer.load_state_dict(layer.state_dict())                     # another bias from now on
        assert layer.router.bias_histogram.sum() == 0
        mask = torch.rand(1000) < 0.5                                 # a padding token needs no bias
        layer(xs[0], mask)
        scores = kernels.SCORE_FUNCTIONS[score_function](layer.router.gating(xs[0]))[~mask]
        same(layer.router.bias_histogram, required_bias_histogram(scores, layer.router.expert_bias, 4))
        layer.router.reset_bias_histogram()
        assert layer.router.bias_histogram.sum() == 0 and layer.router.bias_histogram.dtype == torch.int32


# ---- Permute ----

def layout(plan, topk: int) -> str:
    tokens, start, lines = (plan.order // topk).tolist(), 0, []
    for e, end in enumerate(plan.offsets.tolist()):
        lines.append(f"expert {e}: tokens {tokens[start:end]}")
        start = end
    return "\n".join([*lines, f"nowhere:  tokens {tokens[start:]}"])


def test_permutation_layout():
    plan = plan_permutation(torch.tensor([[2, 0], [0, 1], [2, 4]]), num_experts=4)      # 4 = nowhere
    assert_expected_inline(layout(plan, 2), """\
expert 0: tokens [0, 1]
expert 1: tokens [1]
expert 2: tokens [0, 2]
expert 3: tokens []
nowhere:  tokens [2]""")
    assert plan.counts.tolist() == [2, 1, 2, 0] and plan.offsets.tolist() == [2, 3, 5, 5]
    assert [x.dtype for x in plan] == [torch.int64] * 3 + [torch.int32]
    same(plan.order[plan.inverse.flatten()], torch.arange(6))


def random_indices(T: int, E: int, K: int, nowhere: float = 0.2) -> Tensor:
    indices = torch.rand(T, E).argsort(1)[:, :K]
    return torch.where(torch.rand(T, K) < nowhere, E, indices)


@pytest.mark.parametrize("T, E, K", [(0, 4, 2), (1, 1, 1), (7, 4, 2), (33, 8, 8), (64, 256, 3)])
def test_index_path_equals_map_path(T, E, K):
    """The two forms agree to the last bit: rows, order, probs, and the tokens added up again."""
    indices, H = random_indices(T, E, K), 5
    probs = torch.rand(T, K).masked_fill(indices == E, 0.0)
    tokens = torch.randn(T, H)
    plan = plan_permutation(indices, E)
    probs_TE, routing_map = kernels.routing_to_map(probs, indices, E)
    n = int(plan.offsets[-1])
    rows, row_probs, sorted_indices = permute(tokens, routing_map, probs_TE, num_out_tokens=T * K)
    same(gather_rows(tokens, plan), rows)
    same((plan.order // K)[:n], sorted_indices[:n])
    same(probs.flatten()[plan.order], row_probs)
    assert plan.counts.tolist() == routing_map.sum(0).tolist()
    want = torch.zeros(T, H, dtype=torch.float64)
    for t, k in itertools.product(range(T), range(K)):
        if indices[t, k] < E:
            want[t] += float(probs[t, k]) * tokens[t].double()
    close(combine_rows(rows, plan, probs), want, 1e-6)
    close(unpermute(rows, sorted_indices, tokens.shape, probs_TE, routing_map), want, 1e-6)


@pytest.mark.parametrize("T, E", [(0, 3), (1, 4), (7, 4), (20, 3)])
def test_permute_matches_loop(T, E):
    H = 5
    for density in (0.0, 0.4, 1.0):
        routing_map = torch.rand(T, E) < density
        tokens, probs = torch.randn(T, H), torch.rand(T, E)
        ones = permute_loop(routing_map)
        for n in {None, len(ones), len(ones) + 3, max(len(ones) - 2, 0)}:
            rows, row_probs, index = permute(tokens, routing_map, probs, n)
            size = len(ones) if n is None else n
            assert rows.shape == (size, H) and row_probs.shape == index.shape == (size,)
            for i in range(size):
                e, t = ones[i] if i < len(ones) else (None, T)
                assert index[i] == t
                same(rows[i], tokens[t] if t < T else torch.zeros(H))
                same(row_probs[i], probs[t, e] if t < T else torch.zeros(()))
            for weights in (None, probs):
                want = torch.zeros(T, H)
                for e, t in ones[:size]:
                    want[t] += tokens[t] * (1.0 if weights is None else probs[t, e])
                close(unpermute(rows, index, tokens.shape, weights, routing_map), want, 1e-6)


@pytest.mark.parametrize("T, E, C", [(0, 3, 2), (7, 4, 3), (7, 4, 7), (3, 4, 6), (20, 3, 1), (5, 2, 0)])
def test_drop_and_pad_matches_loop(T, E, C):
    """Also with a capacity above the token count, where the original breaks."""
    H, routing_map = 5, torch.rand(T, E) < 0.4
    tokens, probs = torch.randn(T, H), torch.rand(T, E)
    rows, row_probs, index = permute(tokens, routing_map, probs, E * C, drop_and_pad=True)
    assert rows.shape == (E * C, H)
    want = torch.zeros(T, H)
    for e in range(E):
        own = [t for t in range(T) if routing_map[t, e]]
        tokens_of_e = ((own + [t for t in range(T) if t not in own])[:C] + [T] * C)[:C]
        assert index[e * C:(e + 1) * C].tolist() == tokens_of_e
        for i, t in enumerate(tokens_of_e):
            same(rows[e * C + i], tokens[t] if t < T else torch.zeros(H))
            same(row_probs[e * C + i], probs[t, e] if t < T else torch.zeros(()))
            if t < T:
                want[t] += tokens[t] * probs[t, e]
    close(unpermute(rows, index, tokens.shape, probs, routing_map, drop_and_pad=True), want, 1e-6)


@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permute_gradients_and_fused(drop_and_pad):
    """fused=True is the same function compiled; gradients by gradcheck, the ignored rows' zero."""
    routing_map = torch.rand(6, 4) < 0.5
    tokens = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    n = 4 * 7 if drop_and_pad else int(routing_map.sum()) + 3

    def there_and_back(tokens, probs, fused=False):
        rows, row_probs, index = permute(tokens, routing_map, probs, n, fused, drop_and_pad)
        return unpermute(rows * row_probs[:, None], index, tokens.shape, probs, routing_map, fused, drop_and_pad)
    assert torch.autograd.gradcheck(there_and_back, (tokens, probs))
    close(there_and_back(tokens, probs, fused=True), there_and_back(tokens, probs))

    rows = torch.full((n, 3), NAN, dtype=torch.float64, requires_grad=True)
    index = torch.full((n,), 6)
    out = unpermute(rows, index, tokens.shape, probs, routing_map, drop_and_pad=drop_and_pad)
    assert (out == 0).all() and all((g == 0).all() for g in grads(out, [rows, probs]))


def test_index_path_gradients():
    indices = random_indices(7, 4, 3, nowhere=0.3)
    plan = plan_permutation(indices, 4)
    tokens = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(21, 5, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, plan), (tokens,))
    assert torch.autograd.gradcheck(lambda r: combine_rows(r, plan), (rows,))
    assert torch.autograd.gradcheck(lambda r, p: combine_rows(r, plan, p), (rows, probs))


def test_rows_that_go_nowhere_reach_nothing():
    """A NaN in such a row, or in the gradient that comes to it, changes no output and no gradient."""
    indices = torch.tensor([[0, 3], [3, 3], [1, 0]])                  # 3 = nowhere
    plan = plan_permutation(indices, 3)
    n = int(plan.offsets[-1])
    rows = torch.randn(6, 4)
    poisoned = rows.clone()
    poisoned[n:] = NAN
    probs = torch.rand(3, 2)
    for p in (None, probs):
        same(combine_rows(poisoned, plan, p), combine_rows(rows.index_fill(0, torch.arange(n, 6), 0.0), plan, p))
    tokens = torch.randn(3, 4, requires_grad=True)
    upstream = torch.ones(6, 4)
    upstream[n:] = NAN
    same(grads(gather_rows(tokens, plan), [tokens], upstream)[0], torch.tensor([[1.0] * 4, [0.0] * 4, [2.0] * 4]))
    poisoned.requires_grad_(), probs.requires_grad_()
    grad_rows, grad_probs = grads(combine_rows(poisoned, plan, probs), [poisoned, probs])
    assert grad_rows.isfinite().all() and (grad_rows[n:] == 0).all()
    assert grad_probs.isfinite().all() and (grad_probs[indices == 3] == 0).all()


def test_combine_sums_in_fp32():
    """256 + 8 · 1: bf16 sums would stay at 256."""
    plan = plan_permutation(torch.arange(9)[None], 9)
    rows = torch.tensor([256.0] + [1.0] * 8).bfloat16()[:, None]
    assert combine_rows(rows, plan).item() == 264 and unpermute(rows, torch.zeros(9).long(), (1, 1)).item() == 264


def test_sort_chunks_matches_loop():
    sizes, order = torch.tensor([2, 0, 3, 1, 0, 4]), torch.tensor([3, 1, 5, 0, 4, 2])
    x, probs = torch.randn(10, 3, requires_grad=True), torch.rand(10)
    chunks, prob_chunks = x.split(sizes.tolist()), probs.split(sizes.tolist())
    for function in (sort_chunks_by_idxs, compiled(sort_chunks_by_idxs)):
        out, out_probs = function(x, sizes, order, probs)
        same(out, torch.cat([chunks[i] for i in order]))
        same(out_probs, torch.cat([prob_chunks[i] for i in order]))
        assert function(x, sizes, order)[1] is None


def test_pad_routing_map_matches_loop():
    for multiple in (1, 4, 16):
        routing_map = torch.rand(11, 6) < torch.tensor([0.0, 0.1, 0.4, 0.6, 0.9, 1.0])
        want = routing_map.clone()
        for e in range(6):
            need = -int(routing_map[:, e].sum()) % multiple
            for t in [t for t in range(11) if not routing_map[t, e]][:need]:
                want[t, e] = True
        same(pad_routing_map(routing_map, multiple), want)
        same(compiled(pad_routing_map)(routing_map, multiple), want)


# ---- Activations ----

CASES = [("swiglu", {}), ("geglu", {}), ("quick_geglu", {}), ("quick_geglu", dict(alpha=1.3, linear_offset=1.0, clamp_value=0.7)),
         ("swiglu", dict(clamp_value=0.5)), ("geglu", dict(linear_offset=0.5)), ("relu2", {}), ("situ", {}),
         ("situ", dict(beta=1.5, linear_beta=0.7))]


@pytest.mark.parametrize("kind, options", CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_activation_matches_autograd(kind, options, weighted):
    """Values, and both ways to the gradient, against autograd through the plain formula in fp64."""
    c = MoEConfig(4, 4, 4, 2, activation=kind, glu_alpha=options.get("alpha", 1.702),
                  glu_linear_offset=options.get("linear_offset", 0.0), activation_clamp_value=options.get("clamp_value"),
                  situ_beta=options.get("beta", 1.0), situ_linear_beta=options.get("linear_beta"))
    y = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    w = torch.rand(5, 3, 1, dtype=torch.float64, requires_grad=True) if weighted else None
    want = torch.stack([torch.stack([act_loop(row, c) for row in block]) for block in y])
    want = want * w if weighted else want
    got = activation(y, kind, w, **options)
    close(got, want)
    g, inputs = torch.randn_like(want), [y, w] if weighted else [y]
    got_grads, by_hand = grads(got, inputs, g), activation_back(g, y.detach(), kind, w, **options)
    for got_grad, want_grad in zip(got_grads, grads(want, inputs, g), strict=True):
        close(got_grad, want_grad)
    for hand_grad, got_grad in zip(by_hand if weighted else [by_hand], got_grads, strict=True):
        same(hand_grad.detach(), got_grad)


def test_swiglu_names_gate_first():
    y = torch.tensor([[3.0, 2.0]])                                    # gate 3, up 2
    close(swiglu(y), torch.tensor([[2 * 3 / (1 + math.exp(-3))]]), 1e-6)
    g, w = torch.randn(6, 4), torch.rand(6, 1, dtype=torch.float64)
    y = torch.randn(6, 8)
    same(weighted_swiglu(y, w), activation(y, weights=w))
    same(swiglu_back(g, y), activation_back(g, y))
    same(weighted_swiglu_back(g, y, w), activation_back(g, y, weights=w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_rounds_once(dtype):
    y, w, g = torch.randn(64, 16, dtype=dtype), torch.rand(64, 1), torch.randn(64, 8, dtype=dtype)
    out = weighted_swiglu(y, w)
    assert out.dtype == dtype
    same(out, weighted_swiglu(y.float(), w).to(dtype))
    grad_y, grad_w = weighted_swiglu_back(g, y, w)
    want_y, want_w = weighted_swiglu_back(g.float(), y.float(), w)
    assert grad_w.dtype == torch.float32
    same(grad_y, want_y.to(dtype))
    same(grad_w, want_w)
    assert weighted_swiglu_back(g, y, w.to(dtype))[1].dtype == dtype


def test_clamp_gradient_at_the_bound_is_torchs():
    y = torch.tensor([[0.7, -0.7, 0.71, 0.7, -0.7, -0.71]], requires_grad=True)
    a, b = y[:, :3].clamp(max=0.7), y[:, 3:].clamp(-0.7, 0.7)
    want = grads(F.silu(a) * b, [y])[0]
    close(grads(activation(y, clamp_value=0.7), [y])[0], want, 1e-6)
    assert (want == 0).sum() == 2


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
    y = torch.randn(64, 32, requires_grad=True)
    w = torch.rand(64, 1)
    assert saved_bytes(lambda: activation(y * 1, weights=w)) == (64 * 32 + 64) * 4
    assert saved_bytes(lambda: activation(y * 1, weights=w, fp8_input_store=True)) == 64 * 32 + 64 * 4


def test_fp8_input_store_rounds_the_backward_alone():
    y, g = torch.randn(32, 16), torch.randn(32, 8)
    y[0, 0] = 1e4                                                     # beyond e4m3's 448
    y.requires_grad_()
    stored = y.detach().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    out = activation(y, fp8_input_store=True)
    same(out, activation(y))
    same(grads(out, [y], g)[0], activation_back(g, stored))


# ---- Grouped product and experts ----

@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_grouped_mm_matches_loop(dtype, tol):
    """Also with rows past the last offset, an expert without rows, and an expanded gradient."""
    rows = torch.randn(11, 8, dtype=dtype)
    weights = torch.randn(4, 8, 16, dtype=dtype)
    offsets = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    rows[9:] = NAN                                                    # pytorch #193633: garbage past the end
    for function in (grouped_mm, compiled(grouped_mm)):
        r, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = function(r, w, offsets)
        assert out.dtype == dtype
        want = torch.zeros(11, 16, dtype=torch.float64)
        for e, (start, end) in enumerate([(0, 3), (3, 3), (3, 8), (8, 9)]):
            want[start:end] = rows[start:end].double() @ weights[e].double()
        close(out, want, tol * 10)
        same(out[9:], torch.zeros_like(out[9:]))
        grad_r, grad_w = torch.autograd.grad(out.sum(), [r, w])       # .sum()'s gradient is expanded, stride 0
        same(grad_r[9:], torch.zeros_like(grad_r[9:]))
        same(grad_w[1], torch.zeros_like(grad_w[1]))
        close(grad_w[2], rows[3:8].double().sum(0)[:, None].expand(8, 16), tol * 10)
        close(grad_r[:3], weights[0].double().sum(1).expand(3, 8), tol * 10)


def test_grouped_mm_ignores_autocast():
    rows, weights, offsets = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([2, 4], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_mm(rows, weights, offsets).dtype == torch.float32


def test_formulas_for_cuda_equal_the_ops(monkeypatch):
    """The branch that runs torch's own grouped product, driven on the CPU, where that product runs eagerly."""
    c = dict(hidden_size=16, ffn_hidden_size=8, num_experts=5, topk=3)
    for kw in [dict(), dict(add_bias_linear=True, apply_probs_on="input"), dict(activation="relu2", add_bias_linear=True)]:
        layer = random_layer(MoEConfig(**c, **kw, init_std=0.5))
        x = torch.randn(20, 16, requires_grad=True)
        mask = torch.arange(20) % 4 == 0                              # leaves rows past the last offset
        params = [x, *layer.parameters()]
        want = layer(x, mask)
        want_grads = grads(want, params, torch.linspace(-1, 1, want.numel()).view_as(want))
        monkeypatch.setattr(kernels, "_native", lambda x, w: True)
        got = layer(x, mask)
        got_grads = grads(got, params, torch.linspace(-1, 1, want.numel()).view_as(want))
        monkeypatch.undo()
        for a, b in zip([got, *got_grads], [want, *want_grads], strict=True):
            close(a, b, 1e-5)


@pytest.mark.parametrize("probs_on", ["activation", "input"])
def test_formulas_for_cuda_keep_as_little(monkeypatch, probs_on):
    """Compiled, they keep neither the gathered rows nor the activation's output for the backward."""
    monkeypatch.setattr(kernels, "_native", lambda *_: True)
    T, H, F_, K = 256, 64, 32, 4
    layer = MoELayer(MoEConfig(H, F_, 8, K, params_dtype=torch.bfloat16, apply_probs_on=probs_on))
    function, x = torch.compile(layer, fullgraph=True), torch.randn(T, H).bfloat16().requires_grad_()
    kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
    assert kept <= 1.05 * 2 * (T * H + T * K * 2 * F_) + T * K * (3 * 8 + 4) + T * 8 * 4, kept     # ids, probs, logits


# ---- Config and errors ----

def test_refused_configs():
    def refused(**kw):
        return error(MoEConfig, **{**dict(hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2), **kw}) + "\n"
    assert_expected_inline("".join([
        refused(topk=9), refused(topk=0), refused(activation="silu"), refused(score_function="tanh"), refused(apply_probs_on="x"),
        refused(topk=1), refused(topk=1, score_function="sigmoid", norm_topk_prob=True),
        refused(pre_softmax=True, score_function="sigmoid"), refused(router_dtype=torch.int64), refused(params_dtype="bf16"),
        refused(num_groups=4), refused(group_score_topk=1), refused(num_groups=3, group_topk=1),
        refused(num_groups=4, group_topk=1, topk=3), refused(num_groups=4, group_topk=4, topk=2),
        refused(num_groups=4, group_topk=2, group_score_topk=3),
        refused(activation="relu2", glu_linear_offset=1.0), refused(activation="relu2", activation_clamp_value=7.0),
        refused(glu_alpha=1.0), refused(activation_clamp_value=0.0),
        refused(load_balancing_type="auxloss"), refused(load_balancing_type=("aux_loss",), aux_loss_coeff=0.1),
        refused(load_balancing_type=("none", "aux_loss"), aux_loss_coeff=(0.1, 0.1)),
        refused(z_loss_coeff=-1.0), refused(input_jitter_eps=-0.1),
        refused(aux_loss_coeff=0.1), refused(load_balancing_type="sinkhorn", scaling_factor=2.0),
        refused(load_balancing_type="sinkhorn", aux_loss_coeff=0.1), refused(load_balancing_type="sinkhorn", score_function="sigmoid"),
        refused(load_balancing_type=("sinkhorn", "aux_loss"), aux_loss_coeff=(0.0, 0.1)),
        refused(load_balancing_type="sinkhorn", num_groups=2, group_topk=1), refused(load_balancing_type="sinkhorn", enable_expert_bias=True),
        refused(pad_to_capacity=True), refused(token_drop_policy="position"), refused(capacity_factor=0.0),
        refused(capacity_factor=1.0, token_drop_policy="random"), refused(shared_expert_overlap=True),
        refused(shared_expert_intermediate_size=0),
        refused(load_balancing_type="aux_loss"), refused(load_balancing_type="seq_aux_loss", aux_loss_coeff=-0.1),
        refused(load_balancing_type=("aux_loss", "global_aux_loss"), aux_loss_coeff=(0.1, 0.0)),
        refused(load_balancing_type="aux_loss", aux_loss_coeff=NAN),
        refused(bias_update="median"), refused(bias_update="quantile"),
        *[refused(bias_update="quantile", enable_expert_bias=True, **kw) for kw in (
            dict(topk=8), dict(num_groups=4, group_topk=2), dict(score_function="sqrtsoftplus"), dict(bias_update_rate=1e-2))],
        refused(latent_size=0), refused(latent_norm=True), refused(latent_size=4, latent_norm_eps=0.0),
        refused(activation="situ", activation_clamp_value=1.0), refused(activation="situ", glu_linear_offset=1.0),
        refused(activation="situ", situ_beta=0.0), refused(activation="situ", situ_linear_beta=-1.0), refused(situ_beta=2.0),
        refused(situ_linear_beta=2.0),
    ]), """\
ValueError: topk = 9, num_experts = 8: a token cannot have more experts than there are; lower topk
ValueError: topk = 0: needs a positive int
ValueError: activation = 'silu': needs one of swiglu, geglu, quick_geglu, situ, relu2
ValueError: score_function = 'tanh': needs one of softmax, sigmoid, sqrtsoftplus
ValueError: apply_probs_on = 'x': needs one of input, activation, output
ValueError: topk = 1, norm_topk_prob = None, pre_softmax = False: the one prob is always 1, so the router gets no gradient; set pre_softmax=True or norm_topk_prob=False
ValueError: topk = 1, norm_topk_prob = True, pre_softmax = False: the one prob is always 1, so the router gets no gradient; set pre_softmax=True or norm_topk_prob=False
ValueError: pre_softmax = True, score_function = 'sigmoid': only softmax has a before and an after; leave pre_softmax out
ValueError: router_dtype = torch.int64: needs a floating torch.dtype
ValueError: params_dtype = 'bf16': needs a floating torch.dtype
ValueError: num_groups = 4, group_topk = None: give both or neither
ValueError: group_score_topk = 1, num_groups = None: no groups to score; set num_groups and group_topk too
ValueError: num_groups = 3 does not divide num_experts = 8; groups need equal sizes
ValueError: group_topk = 1 of num_groups = 4 groups of 2 experts cannot hold topk = 3; needs 1 <= group_topk <= num_groups and group_topk * 2 >= topk
ValueError: group_score_topk is 0 (topk // group_topk = 2 // 4 unless given); set it to 1..2, a group has 2 experts
ValueError: group_score_topk is 3 (topk // group_topk = 2 // 2 unless given); set it to 1..2, a group has 2 experts
ValueError: activation = 'relu2', glu_linear_offset = 1.0: relu2 has no such constant; leave glu_linear_offset out
ValueError: activation = 'relu2', activation_clamp_value = 7.0: relu2 has no such constant; leave activation_clamp_value out
ValueError: activation = 'swiglu', glu_alpha = 1.0: swiglu has no such constant; leave glu_alpha out
ValueError: activation_clamp_value = 0.0: needs a positive number, or None
ValueError: load_balancing_type = 'auxloss': needs none, aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, or a tuple of them
ValueError: load_balancing_type = ('aux_loss',), aux_loss_coeff = 0.1: one type takes a float, several a tuple of the same length
ValueError: load_balancing_type = ('none', 'aux_loss'): each type at most once, and "none" beside no other
ValueError: z_loss_coeff = -1.0: needs 0 or more, or None
ValueError: input_jitter_eps = -0.1: needs 0 or more, or None
ValueError: load_balancing_type = 'none', aux_loss_coeff = 0.1: a coefficient of no loss; name the type, or leave it out
ValueError: load_balancing_type = 'sinkhorn', scaling_factor = 2.0: sinkhorn has its own choice and probs; leave scaling_factor out
ValueError: load_balancing_type = 'sinkhorn', aux_loss_coeff = 0.1, score_function = 'softmax': sinkhorn goes alone, without a coefficient, and with softmax
ValueError: load_balancing_type = 'sinkhorn', aux_loss_coeff = 0.0, score_function = 'sigmoid': sinkhorn goes alone, without a coefficient, and with softmax
ValueError: load_balancing_type = ('sinkhorn', 'aux_loss'), aux_loss_coeff = (0.0, 0.1), score_function = 'softmax': sinkhorn goes alone, without a coefficient, and with softmax
ValueError: load_balancing_type = 'sinkhorn', num_groups = 2: sinkhorn has its own choice and probs; leave num_groups out
ValueError: load_balancing_type = 'sinkhorn', enable_expert_bias = True: sinkhorn has its own choice and probs; leave enable_expert_bias out
ValueError: capacity_factor = None, pad_to_capacity = True, token_drop_policy = 'probs': nothing is dropped; set capacity_factor too
ValueError: capacity_factor = None, pad_to_capacity = False, token_drop_policy = 'position': nothing is dropped; set capacity_factor too
ValueError: capacity_factor = 0.0: needs a positive number, or None
ValueError: token_drop_policy = 'random': needs one of probs, position
ValueError: shared_expert_intermediate_size = None, shared_expert_gate = False, shared_expert_overlap = True: there is no shared expert; set shared_expert_intermediate_size too
ValueError: shared_expert_intermediate_size = 0: needs a positive int, or None
ValueError: load_balancing_type = 'aux_loss', aux_loss_coeff = 0.0: aux_loss needs a positive coefficient; give one, or leave the type out
ValueError: load_balancing_type = 'seq_aux_loss', aux_loss_coeff = -0.1: seq_aux_loss needs a positive coefficient; give one, or leave the type out
ValueError: load_balancing_type = ('aux_loss', 'global_aux_loss'), aux_loss_coeff = (0.1, 0.0): global_aux_loss needs a positive coefficient; give one, or leave the type out
ValueError: load_balancing_type = 'aux_loss', aux_loss_coeff = nan: aux_loss needs a positive coefficient; give one, or leave the type out
ValueError: bias_update = 'median': needs one of sign, quantile
ValueError: bias_update = 'quantile', enable_expert_bias = False: there is no bias to update; set enable_expert_bias=True too
ValueError: bias_update = 'quantile', topk = 8, num_experts = 8, num_groups = None, score_function = 'softmax': quantile needs topk < num_experts, no groups, and scores in [0, 1], of softmax or sigmoid
ValueError: bias_update = 'quantile', topk = 2, num_experts = 8, num_groups = 4, score_function = 'softmax': quantile needs topk < num_experts, no groups, and scores in [0, 1], of softmax or sigmoid
ValueError: bias_update = 'quantile', topk = 2, num_experts = 8, num_groups = None, score_function = 'sqrtsoftplus': quantile needs topk < num_experts, no groups, and scores in [0, 1], of softmax or sigmoid
ValueError: bias_update = 'quantile', bias_update_rate = 0.01: quantile has no rate; leave bias_update_rate out
ValueError: latent_size = 0: needs a positive int, or None
ValueError: latent_norm = True, latent_size = None: there is nothing to normalise; set latent_size too
ValueError: latent_norm_eps = 0.0: needs a positive number
ValueError: activation = 'situ', activation_clamp_value = 1.0: situ has no such constant; leave activation_clamp_value out
ValueError: activation = 'situ', glu_linear_offset = 1.0: situ has no such constant; leave glu_linear_offset out
ValueError: situ_beta = 0.0: needs a positive number, or None
ValueError: situ_linear_beta = -1.0: needs a positive number, or None
ValueError: activation = 'swiglu', situ_beta = 2.0: swiglu has no such constant; leave situ_beta out
ValueError: activation = 'swiglu', situ_linear_beta = 2.0: swiglu has no such constant; leave situ_linear_beta out
""")


def test_error_texts():
    logits, x = torch.randn(6, 4), torch.randn(6, 8)
    routing_map, plan = torch.rand(6, 4) < 0.5, plan_permutation(torch.zeros(6, 2).long(), 4)
    layer = MoELayer(MoEConfig(8, 4, 4, 2))
    tok = topk_routing_with_score_function
    mlp = functools.partial(expert_mlp, x, torch.rand(6, 2), plan, torch.zeros(4, 2, 4, 8), torch.zeros(4, 8, 4))
    lines = [
        error(tok, logits, 5), error(tok, logits, 2, score_function="tanh"), error(tok, logits, 2, num_groups=2),
        error(tok, logits, 2, num_groups=3, group_topk=1), error(tok, logits, 3, num_groups=4, group_topk=2),
        error(tok, logits, 2, num_groups=2, group_topk=2, group_score_topk=3),
        error(tok, logits, 2, expert_bias=torch.zeros(3)), error(tok, logits, 2, precomputed_indices=torch.zeros(6, 3).long()),
        error(apply_router_token_dropping, logits, routing_map, 2, 1.0, "random"),
        error(apply_router_token_dropping, logits, routing_map[:5], 2, 1.0),
        error(permute, x, routing_map[:5]), error(permute, x, routing_map.float()), error(permute, x, routing_map, logits[:, :3]),
        error(permute, x, routing_map, fused=True), error(permute, x, routing_map, num_out_tokens=7, drop_and_pad=True),
        error(permute, x, routing_map, drop_and_pad=True),
        error(unpermute, x, torch.zeros(6).long(), (6, 8), logits), error(unpermute, x, torch.zeros(5).long(), (6, 8)),
        error(unpermute, x, torch.zeros(6).long(), (6, 8), logits[:5], routing_map[:5]),
        error(plan_permutation, torch.zeros(6, 2), 4), error(gather_rows, x[:5], plan), error(combine_rows, x, plan),
        error(combine_rows, torch.zeros(12, 8), plan, logits), error(sort_chunks_by_idxs, x, torch.ones(3).long(), torch.ones(2).long()),
        error(pad_routing_map, routing_map, 0), error(activation, x, "silu"), error(activation, x[:, :7]),
        error(activation, x, "relu2", clamp_value=1.0), error(activation, x, weights=torch.ones(6)), error(swiglu_back, x, x),
        error(grouped_mm, x, torch.zeros(4, 9, 2), plan.offsets), error(grouped_mm, x, torch.zeros(4, 8, 2).double(), plan.offsets),
        error(grouped_mm, x, torch.zeros(4, 8, 2), plan.offsets.long()),
        error(expert_mlp, x, torch.rand(6, 2), plan, torch.zeros(4, 1, 4, 8), torch.zeros(4, 8, 4)),
        error(layer, torch.randn(6, 9)), error(layer, x.bfloat16()), error(layer, x, torch.zeros(5).bool()), error(layer, x, torch.zeros(6)),
        error(layer, x, None, torch.zeros(6, 3).long()), error(load_balancing_metrics, torch.nn.Linear(2, 2)),
        error(tok, logits[None], 2), error(compute_routing_scores_for_aux_loss, logits[None], 2, "softmax"),
        error(group_limited_topk, logits[None], 2, 6, 4, 2, 1), error(sinkhorn, logits[None]),
        error(switch_load_balancing_loss_func, logits[None], logits[0], 6, 2, 4, 0.1), error(permute, x, routing_map[None]),
        error(apply_router_token_dropping, logits[None], routing_map[None], 2, 1.0), error(pad_routing_map, routing_map[None], 2),
        error(kernels.routing_to_map, logits[None], torch.zeros(1, 6, 2).long(), 4), error(kernels.routing_to_map, logits, torch.zeros(6, 2).long(), 4),
        error(mlp, fc1_bias=torch.zeros(4, 4, 2)), error(mlp, fc2_bias=torch.zeros(4, 1)), error(mlp, fc2_bias=torch.zeros(7, 8)),
        error(mlp, fc1_bias=torch.zeros(4, 2, 4).double()), error(mlp, kind="silu"), error(mlp, kind="relu2", linear_offset=1.0),
        error(expert_mlp, x[None], torch.rand(6, 2), plan, torch.zeros(4, 2, 4, 8), torch.zeros(4, 8, 4)),
        error(mlp, down=torch.zeros(5, 8)), error(mlp, down=torch.zeros(8, 5)), error(activation, x, beta=2.0),
        error(activation, x, "situ", beta=0.0), error(activation, x, "situ", clamp_value=1.0), error(activation, x, alpha=1.0),
        error(activation_back, x[:, :4], x, "situ", linear_beta=-1.0), error(required_bias_histogram, logits, logits[0], 4),
        error(required_bias_histogram, logits, logits[0, :3], 2), error(required_bias_histogram, logits[None], logits[0], 2),
        error(required_bias_histogram, logits, logits[0], 2, 0), error(quantile_expert_bias, logits, logits[0], 2),
    ]
    assert_expected_inline("\n".join(lines), """\
ValueError: topk is 5; needs 1 <= topk <= num_experts = 4
ValueError: score_function is 'tanh'; known: 'softmax', 'sigmoid', 'sqrtsoftplus'
ValueError: num_groups = 2 and group_topk = None go together: give both or neither
ValueError: num_groups = 3 does not divide num_experts = 4; groups need equal sizes
ValueError: group_topk = 2 of num_groups = 4 groups of 1 experts cannot hold topk = 3; needs 1 <= group_topk <= num_groups and group_topk * 1 >= topk
ValueError: group_score_topk is 3 (topk // group_topk = 2 // 2 unless given); set it to 1..2, a group has 2 experts
ValueError: expert_bias has shape [3]; needs [4], one entry per expert
ValueError: precomputed_indices has shape [6, 3]; needs [6, 2]
ValueError: drop_policy is 'random'; known: 'probs', 'position'
ValueError: routing_probs [6, 4] and routing_map [5, 4] need the same shape [T, E]
ValueError: tokens [6, 8] and routing_map [5, 4] need shapes [T, H] and [T, E] with the same T
TypeError: routing_map is torch.float32; needs torch.bool or an integer dtype
ValueError: probs has shape [6, 3]; needs the routing_map's [6, 4]
ValueError: num_out_tokens is None, which gives a data-dependent shape; fused=True needs a number
ValueError: num_out_tokens is 7; with drop_and_pad it needs a multiple of E = 4
ValueError: num_out_tokens is None; with drop_and_pad it needs a multiple of E = 4
ValueError: probs without routing_map: which expert a row belongs to is read from routing_map; pass the one given to permute
ValueError: permuted_tokens [6, 8] and sorted_indices [5] need shapes [rows, 8] and [rows] for restore_shape [6, 8]
ValueError: probs [5, 4] and routing_map [5, 4] need shape [6, E]
TypeError: indices is [6, 2] torch.float32; needs [T, K] torch.int64
ValueError: tokens has shape [5, 8]; the plan needs [6, H]
ValueError: rows has shape [6, 8]; the plan needs [12, H]
ValueError: probs has shape [6, 4]; the plan needs [6, 2], [T, K]
ValueError: split_sizes [3] and sorted_idxs [2] need the same shape [chunks]
ValueError: pad_multiple is 0; needs 1 or more
ValueError: kind is 'silu'; known: 'swiglu', 'geglu', 'quick_geglu', 'situ', 'relu2'
ValueError: y has shape [6, 7]; swiglu needs an even last axis, [.., 2F]
ValueError: clamp_value is 1.0; needs None, since relu2 has no such constant
ValueError: weights has shape [6]; needs [6, 1], one per row of y
ValueError: g has shape [6, 8]; needs [6, 4], the shape of the activation's output
ValueError: rows [6, 8], weights [4, 9, 2] and offsets [4] need shapes [N, H], [E, H, F] and [E]
TypeError: rows is torch.float32, weights torch.float64 and offsets torch.int32; needs one dtype for rows and weights, and torch.int32 offsets
TypeError: rows is torch.float32, weights torch.float32 and offsets torch.int64; needs one dtype for rows and weights, and torch.int32 offsets
ValueError: tokens [6, 8], fc1 [4, 1, 4, 8] and fc2 [4, 8, 4] need shapes [T, H], [E, 2, F, H] and [E, H, F] for swiglu and a plan of 4 experts
ValueError: input has shape [6, 9]; needs [S, B, 8] or [T, 8]
TypeError: tokens is torch.bfloat16, fc1 torch.float32 and fc2 torch.float32; they need one dtype
ValueError: padding_mask is [5] torch.bool; needs [6] torch.bool, True = padding
ValueError: padding_mask is [6] torch.float32; needs [6] torch.bool, True = padding
ValueError: topk_indices is [6, 3] torch.int64; needs [6, 2] or [6, 2] torch.int64
ValueError: model (Linear) has no TopKRouter
ValueError: logits has shape [1, 6, 4]; needs [T, E]
ValueError: logits has shape [1, 6, 4]; needs [T, E]
ValueError: scores has shape [1, 6, 4]; needs [6, 4], [T, E]
ValueError: cost has shape [1, 6, 4]; needs [T, E]
ValueError: probs has shape [1, 6, 4]; needs [T, E]
ValueError: routing_map has shape [1, 6, 4]; needs [T, E]
ValueError: routing_map has shape [1, 6, 4]; needs [T, E]
ValueError: routing_map has shape [1, 6, 4]; needs [T, E]
ValueError: probs has shape [1, 6, 4]; needs [T, K]
ValueError: indices has shape [6, 2]; needs that of probs, [6, 4]
ValueError: fc1_bias has shape [4, 4, 2]; needs [4, 2, 4]
ValueError: fc2_bias has shape [4, 1]; needs [4, 8]
ValueError: fc2_bias has shape [7, 8]; needs [4, 8]
TypeError: fc1_bias is torch.float64 and tokens torch.float32; they need one dtype
ValueError: kind is 'silu'; known: 'swiglu', 'geglu', 'quick_geglu', 'situ', 'relu2'
ValueError: linear_offset is 1.0; needs 0.0, since relu2 has no such constant
ValueError: tokens [1, 6, 8] and fc1 [4, 2, 4, 8] need shapes [T, H] and [E, P, F, H]
ValueError: tokens [6, 8], fc1 [4, 2, 4, 8] and fc2 [4, 8, 4] need shapes [T, H], [E, 2, F, H] and [E, H, F] for swiglu and a plan of 4 experts
ValueError: down has shape [8, 5]; needs [latent, 8]
ValueError: beta is 2.0; needs 1.0, since swiglu has no such constant
ValueError: beta is 0.0; needs a positive number
ValueError: clamp_value is 1.0; needs None, since situ has no such constant
ValueError: alpha is 1.0; needs 1.702, since swiglu has no such constant
ValueError: linear_beta is -1.0; needs a positive number
ValueError: topk is 4 and num_bins 1000; needs 1 <= topk < num_experts = 4 and num_bins >= 1
ValueError: expert_bias has shape [3]; needs [4], one entry per expert
ValueError: scores has shape [1, 6, 4]; needs [T, E]
ValueError: topk is 2 and num_bins 0; needs 1 <= topk < num_experts = 4 and num_bins >= 1
ValueError: expert_bias has shape [4]; needs [6], one entry per expert""")


def test_misshapen_state_dict_changes_nothing():
    layer = MoELayer(MoEConfig(8, 4, 4, 2))
    before = copy.deepcopy(layer.state_dict())
    bad = {**before, "experts.fc1": torch.zeros(4, 2, 5, 8)}
    assert "size mismatch for experts.fc1" in error(layer.load_state_dict, bad)
    bad = {name: tensor for name, tensor in before.items() if name != "router.weight"}
    assert "router.weight" in error(layer.load_state_dict, bad)
    same(layer.experts.fc1, before["experts.fc1"])
    assert_expected_inline("\n".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in random_layer(MoEConfig(
        8, 5, 4, 2, router_bias=True, enable_expert_bias=True, add_bias_linear=True)).state_dict().items()), """\
router.weight [4, 8] torch.float32
router.bias [4] torch.float32
router.expert_bias [4] torch.float32
experts.fc1 [4, 2, 5, 8] torch.float32
experts.fc2 [4, 8, 5] torch.float32
experts.fc1_bias [4, 2, 5] torch.float32
experts.fc2_bias [4, 8] torch.float32""")


# ---- Layer ----

def layer_loop(layer: MoELayer, x: Tensor, mask=None, given=None):
    """(output, attached losses) of the layer by the oracles; differentiable in x and the parameters."""
    c, w, x_TH = layer.config, dict(layer.named_parameters()), x.flatten(0, -2)
    valid = [t for t in range(len(x_TH)) if mask is None or not mask.flatten()[t]]
    logits_TE = torch.stack([w["router.weight"] @ row for row in x_TH]) if len(x_TH) else x_TH @ w["router.weight"].t()
    if c.router_bias:
        logits_TE = logits_TE + w["router.bias"]
    probs_TK, indices_TK = route_loop(logits_TE, c, layer.router.expert_bias, None if given is None else given.view(-1, c.topk))
    probs_TK, indices_TK = probs_TK.clone(), indices_TK.clone()
    gone = [t for t in range(len(x_TH)) if t not in valid]
    indices_TK[gone] = c.num_experts
    loss = logits_TE.sum() * 0
    if c.load_balancing_type == "aux_loss":
        loss = loss + switch_loss_loop(logits_TE, c, c.aux_loss_coeff, valid)
    if c.z_loss_coeff:
        loss = loss + z_loss_loop(logits_TE, c.z_loss_coeff, valid)
    return moe_loop(x_TH, probs_TK, indices_TK, c, w).view_as(x), loss


def check_layer_against_loop(rng: random.Random, backend: str, tol: float = 1e-8) -> None:
    config = random_config(rng)
    layer = random_layer(config)
    S, B = rng.choice([(3, 2), (5, 1), (2, 4)])
    x = torch.randn(S, B, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(S, B) < 0.3 if rng.random() < 0.4 else None
    given = torch.rand(S * B, 8).argsort(1)[:, :config.topk] if rng.random() < 0.3 else None
    want, loss = layer_loop(layer, x, mask, given)
    upstream, inputs, scale = torch.randn_like(x), [x, *layer.parameters()], rng.choice([1.0, 0.25])
    want_grads = torch.autograd.grad((want * upstream).sum() + scale * loss, inputs, allow_unused=True, materialize_grads=True)
    for f in (layer, compiled(layer, backend)):
        got = f(x, mask, given)
        set_aux_loss_scale(scale)                                     # between forward and backward
        close(got, want, tol)
        for name, a, b in zip(["x", *dict(layer.named_parameters())], grads(got, inputs, upstream), want_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=lambda m: f"{name}, {config}: {m}")


@pytest.mark.parametrize("seed", range(6))
def test_layer_matches_loop(seed):
    """60 random configurations, eager and as one graph, output and every gradient, losses attached, in fp64."""
    for i in range(10):
        torch._dynamo.reset()
        torch.manual_seed(100 * seed + i)
        check_layer_against_loop(random.Random(100 * seed + i), "aot_eager")


@pytest.mark.parametrize("seed", range(4))
def test_layer_through_inductor_matches_loop(seed):
    torch.manual_seed(seed)
    check_layer_against_loop(random.Random(1000 + seed), "inductor")


def test_layer_is_router_and_expert_loop_in_public_functions():
    """The layer's fused backward against the same layer composed of the public, separately differentiable functions."""
    for probs_on in ("activation", "output", "input"):
        layer = MoELayer(MoEConfig(8, 6, 5, 3, apply_probs_on=probs_on, init_std=0.5))
        x = torch.randn(20, 8, requires_grad=True)
        probs, indices = layer.router.route(x)
        plan = plan_permutation(indices, 5)
        rows, row_probs = gather_rows(x, plan), probs.flatten()[plan.order][:, None]
        rows = rows * row_probs if probs_on == "input" else rows
        h = grouped_mm(rows, layer.experts.fc1.flatten(1, 2).transpose(1, 2), plan.offsets)
        a = activation(h, weights=row_probs if probs_on == "activation" else None)
        y = combine_rows(grouped_mm(a, layer.experts.fc2.transpose(1, 2), plan.offsets), plan, probs if probs_on == "output" else None)
        got, inputs, upstream = layer(x), [x, *layer.parameters()], torch.randn_like(x)
        close(got, y, 1e-5)
        for a, b in zip(grads(got, inputs, upstream), grads(y, inputs, upstream), strict=True):
            close(a, b, 1e-5)


def test_router_forward_and_route_are_one_choice():
    router = random_layer(MoEConfig(8, 4, 6, 3, score_function="sigmoid", enable_expert_bias=True, router_bias=True)).router
    x, mask = torch.randn(5, 2, 8), torch.rand(5, 2) < 0.4
    probs, indices = router.route(x, mask)
    probs_TE, routing_map = router(x, mask)
    want = kernels.routing_to_map(probs, indices, 6)
    same(probs_TE, want[0]), same(routing_map, want[1])
    assert not routing_map[mask.flatten()].any() and routing_map[~mask.flatten()].sum(1).eq(3).all()
    same(router.routing(router.gating(x), mask), (probs_TE, routing_map))


EVERYTHING = [
    dict(load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"), aux_loss_coeff=(0.1, 0.1, 0.1), z_loss_coeff=0.1,
         add_bias_linear=True, router_bias=True, capacity_factor=1.0, calculate_per_token_loss=True, input_jitter_eps=0.1),
    dict(load_balancing_type="sinkhorn", capacity_factor=1.0, token_drop_policy="position", apply_probs_on="input"),
]


def test_empty_batch():
    """T = 0: an empty result, zero gradients, not None."""
    for kw in [dict(), *EVERYTHING]:
        layer = MoELayer(MoEConfig(8, 4, 4, 2, **kw))
        for f in (layer, compiled(layer)):
            x = torch.zeros(0, 3, 8, requires_grad=True)
            y = f(x)
            assert y.shape == (0, 3, 8)
            for g in grads(y, [x, *layer.parameters()]):
                assert (g == 0).all()


def test_all_padding_changes_nothing():
    for kw in EVERYTHING:
        layer = MoELayer(MoEConfig(8, 4, 4, 2, **kw))
        x = torch.randn(3, 2, 8, requires_grad=True)
        y = layer(x, torch.ones(3, 2, dtype=torch.bool))
        assert (y == 0).all()
        assert all((g == 0).all() for g in grads(y, [x, *layer.parameters()]))


def test_padding_mask_true_means_padding():
    """What a padded token holds changes no other output, no loss and no gradient (Megatron-LM #1984 #5569 #6111)."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, load_balancing_type="aux_loss", aux_loss_coeff=0.5, z_loss_coeff=0.5))
    x, mask = torch.randn(6, 2, 8), torch.rand(6, 2) < 0.4
    noisy = torch.where(mask[..., None], torch.randn_like(x) * 10, x)
    results = []
    for value in (x, noisy):
        y = layer(value, mask)
        assert (y[mask] == 0).all()
        results.append([y, *grads(y, list(layer.parameters()))])
    same(results[0], results[1])
    valid = layer(x[~mask])                                           # the same tokens with no padding at all
    close(valid, results[0][0][~mask], 1e-6)
    for a, b in zip(grads(valid, list(layer.parameters())), results[0][1:]):
        close(a, b, 1e-6)


def test_nan_in_one_token_stays_there():
    layer = MoELayer(MoEConfig(8, 4, 6, 2, add_bias_linear=True, init_std=0.5))
    x = torch.randn(9, 8)
    bad = x.clone()
    bad[4] = NAN
    for f in (layer, compiled(layer)):
        probs, indices = layer.router.route(bad)
        y = f(bad)
        others = torch.arange(9) != 4
        assert y[4].isnan().all()
        same(y[others], layer(x)[others])
        fc1, fc2, b1, b2 = grads(y[others].sum() + y[4].nan_to_num().sum(), [*layer.experts.parameters()])
        touched = torch.zeros(6, dtype=torch.bool).scatter(0, indices[4], True)
        for g in (fc1, fc2, b1, b2):
            assert g[~touched].isfinite().all()
        assert not touched.all()


def test_jitter_reaches_the_router_alone():
    """Same experts' input, other routing weights; off in eval (transformers #33969)."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, input_jitter_eps=0.5, init_std=0.5))
    x, seen = torch.randn(20, 8), []
    layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(x), layer(x)
    same(seen[0], x), same(seen[1], x)
    noisy = layer.router.apply_input_jitter(x) / x
    assert noisy.min() >= 0.5 and noisy.max() <= 1.5 and noisy.std() > 0.1
    assert not torch.equal(layer.router.route(x)[0], layer.router.route(x)[0])
    layer.eval()
    same(layer.router.apply_input_jitter(x), x)


@pytest.mark.parametrize("whole", [False, True])
def test_router_stays_fp32(whole):
    """In a bf16 model and under autocast, also compiled (megablocks #91, prime-rl #2952)."""
    layer = MoELayer(MoEConfig(16, 8, 8, 2, params_dtype=torch.bfloat16))
    x = torch.randn(50, 16).bfloat16().requires_grad_()
    logits = layer.router.gating(x)
    assert logits.dtype == torch.float32
    close(logits, x.double() @ layer.router.weight.double().t(), 1e-5)
    y = (compiled(layer) if whole else layer)(x)
    assert y.dtype == torch.bfloat16
    for g, p in zip(grads(y, [x, *layer.parameters()]), [x, *layer.parameters()], strict=True):
        assert g.dtype == p.dtype == torch.bfloat16

    layer = MoELayer(MoEConfig(16, 8, 8, 2, init_std=0.3))
    function, x = compiled(layer) if whole else layer, torch.randn(50, 16, requires_grad=True)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.router.gating(x).dtype == torch.float32
        y = function(x)
    close(layer.router.gating(x), x.double() @ layer.router.weight.double().t(), 1e-5)
    assert y.dtype == torch.float32 and not torch.equal(y, want)
    close(y, want, 0.05)                                              # the experts ran in bf16
    for g, p in zip(grads(y, [x, *layer.parameters()]), [x, *layer.parameters()], strict=True):
        assert g.dtype == p.dtype == torch.float32


def test_aux_loss_reaches_the_router():
    """Without the caller's help, at its full size, and only in training (Automodel #1412, transformers #28255)."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, load_balancing_type="aux_loss", aux_loss_coeff=0.3, z_loss_coeff=0.2))
    x = torch.randn(7, 2, 8)
    logits = layer.router.gating(x)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits.flatten(0, 1), 2, "softmax")
    loss = switch_load_balancing_loss_func(scores, routing_map.sum(0), 14, 2, 4, 0.3) + z_loss_func(logits, 0.2)
    want = grads(loss, [layer.router.weight])[0]
    got = torch.autograd.grad(layer(x).sum() * 0, [layer.router.weight])[0]
    close(got, want, 1e-6)
    set_aux_loss_scale(torch.tensor(4.0))
    close(torch.autograd.grad(layer(x).sum() * 0, [layer.router.weight])[0], want * 4, 1e-6)
    layer.eval()
    assert (torch.autograd.grad(layer(x).sum() * 0, [layer.router.weight])[0] == 0).all()


def test_loss_scale_in_compiled_code():
    """One graph for all values; what counts is the value at the backward."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, load_balancing_type="aux_loss", aux_loss_coeff=0.3))
    function, x = compiled(layer, "inductor"), torch.randn(7, 8)
    base = torch.autograd.grad(function(x).sum() * 0, [layer.router.weight])[0]
    graphs = counters["stats"]["unique_graphs"]
    for scale in (0.5, 3.0, torch.tensor(7.0)):
        y = function(x)
        set_aux_loss_scale(scale)
        close(torch.autograd.grad(y.sum() * 0, [layer.router.weight])[0], base * scale, 1e-6)
    assert counters["stats"]["unique_graphs"] == graphs


def test_every_used_parameter_gets_a_gradient():
    """Zeros for an expert without tokens, never None or NaN (Automodel #935, Megatron-LM #4851)."""
    layer = MoELayer(MoEConfig(8, 4, 16, 2, add_bias_linear=True))
    layer(torch.randn(3, 8)).sum().backward()
    used = layer.router.route(torch.randn(3, 8))[1]
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    assert (layer.experts.fc1.grad.flatten(1).abs().amax(1) == 0).sum() >= 10 and used.shape == (3, 2)


def test_metrics_of_the_latest_training_forward():
    model = torch.nn.Sequential(MoELayer(MoEConfig(8, 4, 4, 2, load_balancing_type="aux_loss", aux_loss_coeff=0.3)),
                                MoELayer(MoEConfig(8, 4, 4, 3, z_loss_coeff=0.2)))
    assert load_balancing_metrics(model)["max_violation"].isnan().all()
    x = torch.randn(9, 8)
    for f in (model, compiled(model)):
        f(x)
        indices = [model[0].router.route(x)[1], model[1].router.route(model[0](x))[1]]
        m = load_balancing_metrics(model)
        counts = torch.stack([torch.bincount(i.flatten(), minlength=4) for i in indices])
        same(m["tokens_per_expert"], counts)
        close(m["max_violation"], counts.amax(1) / counts.double().mean(1) - 1, 1e-6)
        assert list(m) == ["load_balancing_loss", "z_loss", "max_violation", "tokens_per_expert"]
        assert m["load_balancing_loss"].isnan().tolist() == [False, True] and m["z_loss"].isnan().tolist() == [True, False]
        close(m["z_loss"][1], z_loss_func(model[1].router.gating(model[0](x)), 1.0), 1e-6)
        model.eval()(torch.randn(5, 8)), model.train()                # an eval forward is not counted
        same(load_balancing_metrics(model)["tokens_per_expert"], counts)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_routes_the_same(reentrant):
    """Tied logits and jitter in a checkpoint: gradients bitwise those of the run without (Automodel #2635 #3140 #3325)."""
    config = MoEConfig(8, 4, 6, 2, input_jitter_eps=0.3, load_balancing_type="aux_loss", aux_loss_coeff=0.1)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        layer = MoELayer(config)
        with torch.no_grad():
            layer.router.weight[1:] = layer.router.weight[:1]         # every logit of a token is the same
        x = torch.randn(12, 8, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *[p.grad for p in layer.parameters()]])
    same(results[0], results[1])


def test_dtype_casts_keep_the_expert_bias():
    """fp32 through casts and round trips: steps of 1e-3 vanish in bf16 (Megatron-LM #1482)."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, enable_expert_bias=True))
    layer.router.expert_bias.copy_(torch.tensor([1.001, 1.002, -0.5003, 0.0]))
    want = layer.router.expert_bias.clone()
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), copy.deepcopy):
        cast(layer)
        assert layer.router.expert_bias.dtype == torch.float32
        same(layer.router.expert_bias, want)
    other = MoELayer(layer.config).bfloat16()
    other.load_state_dict(layer.state_dict())
    same(other.router.expert_bias, want)


def test_meta_device_construction():
    config = MoEConfig(8, 4, 4, 2, enable_expert_bias=True, router_bias=True, add_bias_linear=True)
    torch.manual_seed(5)
    want = MoELayer(config)
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in (layer.router, layer.experts):
        module.reset_parameters()
    same(layer.state_dict(), want.state_dict())
    same(layer(torch.ones(3, 8)), want(torch.ones(3, 8)))


# ---- Router: balancing, counting ----

TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def small_config(**fields) -> MoEConfig:
    return MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=2, **fields)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


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
            probs, indices = route_loop(logits_TE, self.config, self.bias_E, given)
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
        K, indices = self.config.topk, given
        if given is None:
            indices = torch.zeros(len(logits_TE), K, dtype=torch.int64)
            A = logits_TE.detach()[valid].exp()
            d1 = torch.ones(A.shape[1], dtype=A.dtype)
            for _ in range(256):
                d0 = 1 / max(len(valid), 1) / (A @ d1 + 1e-8)
                last, d1 = d1, 1 / len(d1) / (d0 @ A + 1e-8)
                if (d1 - last).abs().mean() <= 1e-4:
                    break
            for t, d, row in zip(valid, d0, A):
                indices[t] = torch.tensor(best(list(d1 * row * d), K))
        kind = "sigmoid" if K == 1 else "softmax"
        rows = []
        for row, chosen in zip(logits_TE, indices):
            scores = [*score_loop(list(row), kind), row.new_zeros(())]
            rows.append(torch.stack([scores[e] for e in chosen]))
        return torch.stack(rows), indices

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
                loss = loss + switch_loss_loop(logits_TE, config, coeff, valid)
            if kind == "seq_aux_loss":
                for b in range(B):
                    own = [t for t in valid if t % B == b]
                    loss = loss + switch_loss_loop(logits_TE, config, coeff, own) / B
            if kind == "global_aux_loss":
                loss = loss + self.global_loss(logits_TE, coeff, valid)
        if config.calculate_per_token_loss:
            return loss * len(valid)
        return loss

    def global_loss(self, logits_TE, coeff, valid):
        """coeff · E/(K·T²) · Σ_e n_e Σ_t s_te, with the mean n and T of the forwards so far."""
        E, K = self.config.num_experts, self.config.topk
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
            given = random_indices(S * B, 8, config.topk)
        probs, indices = route(x, mask, given)

        rows = [router.weight @ row for row in x.flatten(0, 1)]
        logits = torch.stack(rows).view(S, B, 8)
        if router.bias is not None:
            logits = logits + router.bias
        want_probs, want_indices, loss = oracle(logits, mask, given)
        same(indices, want_indices)
        close(probs, want_probs)

        upstream, leaves = torch.randn_like(probs), list(router.parameters())
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
     "topk_indices is [5, 2] torch.int64; needs [15, 2] or [5, 3, 2] torch.int64"),
    ("route", (torch.zeros(5, 3, 8), None, choice(3, 5, 2)), "is [3, 5, 2]"),
    ("route", (torch.zeros(5, 8), None, torch.zeros(5, 2)), "is [5, 2] torch.float32"),
    ("attach_and_log_load_balancing_loss", (torch.zeros(5), 0.1, torch.zeros(()), "mse", None),
     "aux_loss_name is 'mse'; known: load_balancing_loss")]


def test_router_errors():
    router = TopKRouter(small_config())
    for method, args, phrase in ROUTER_ERRORS:
        message = error(getattr(router, method), *args)
        assert message.startswith("ValueError: ") and phrase in message


def test_router_train_balances_each_sequence():
    """--balance seq: the sequences are the rows of the batch, not the positions."""
    import train
    words = "--balance seq --layers 1 --hidden 16 --experts 4 --context 12 --batch 3 --no-compile"
    args = train.parse_args(words.split())
    block = train.ByteModel(args, "moe").blocks[0]
    seen = []
    block.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    block(torch.randn(3, 12, 16))                                     # [B, S, H]
    assert seen[0].shape == (12, 3, 16)
    logits = block.ffn.router.gating(seen[0]).double()
    each = [switch_loss_loop(sequence, block.ffn.config, 1.0, list(range(12)))
            for sequence in logits.unbind(1)]
    got = load_balancing_metrics(block)["seq_load_balancing_loss"]
    close(got, torch.stack(each).mean()[None], 1e-5)


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
    "nested non in non": lambda f: lambda x: nested(f, x, False, False),
    "nested non in re": lambda f: lambda x: nested(f, x, False, True),
    "nested re in non": lambda f: lambda x: nested(f, x, True, False),
    "nested re in re": lambda f: lambda x: nested(f, x, True, True),
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
    a, b = forward(), forward()
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
        function, router = WAYS[name](layer), layer.router
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


def start_ranks(function, ranks: int, *args) -> list:
    """Processes of function(rank, ranks, port, *args)."""
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=(rank, ranks, port, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def spawn_gloo(function, ranks: int, *args) -> None:
    """function(rank, ranks, *args) in `ranks` processes of one gloo group; all are joined or killed whatever fails."""
    processes = start_ranks(_rank_main, ranks, function, args)
    try:
        deadline = time.monotonic() + 240
        while any(process.is_alive() for process in processes):
            assert time.monotonic() < deadline, "ranks hang"
            assert not any(process.exitcode for process in processes), "a rank failed; its traceback is above"
            processes[0].join(0.2)
            time.sleep(0.1)
        assert not any(process.exitcode for process in processes), "a rank failed; its traceback is above"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(rank, ranks, port, function, args):
    import datetime
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                                         timeout=datetime.timedelta(seconds=60))
    try:
        function(rank, ranks, *args)
    finally:
        torch.distributed.destroy_process_group()


def balanced_over_ranks(rank, ranks, over_sequence):
    """Two microbatches on each rank against one process on the whole batch; the sequence or the batch is cut up."""
    group = torch.distributed.group.WORLD
    config = MoEConfig(8, 4, 6, 2, score_function="sigmoid", enable_expert_bias=True, router_dtype=torch.float64,
                       params_dtype=torch.float64, load_balancing_type=TYPES if over_sequence else "global_aux_loss",
                       aux_loss_coeff=(0.1, 0.2, 0.3) if over_sequence else 0.3, z_loss_coeff=0.1 if over_sequence else None)
    groups = ProcessGroups(tp_dp_cp=group, tp_cp=group if over_sequence else None)
    if over_sequence:                                                 # tp_cp alone: the losses of the cut sequence
        torch.manual_seed(0)
        part, all_of_it = MoELayer(config, ProcessGroups(tp_cp=group)), MoELayer(config)
        part.load_state_dict(all_of_it.state_dict())
        x = torch.randn(8, 4, 8, dtype=torch.float64)
        part.router.route(x.chunk(ranks)[rank]), all_of_it.router.route(x)
        a, b = load_balancing_metrics(part, reduce=True), load_balancing_metrics(all_of_it)
        for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", "tokens_per_expert"):
            close(a[name].double(), b[name].double(), 1e-5)
    for compile in (False, True):
        config = dataclasses.replace(config, bias_update="quantile" if compile else "sign")
        torch.manual_seed(0)
        whole, mine = MoELayer(config), MoELayer(config, groups)
        mine.load_state_dict(whole.state_dict())
        route = compiled(mine.router.route) if compile else mine.router.route
        for step in range(3):
            for _ in range(2):
                x, mask = torch.randn(8, 4, 8, dtype=torch.float64), torch.rand(8, 4) < 0.3
                want = whole.router.route(x, mask)[0]
                upstream = torch.randn(8, 4, 2, dtype=torch.float64)
                want.backward(upstream.flatten(0, 1))
                x_r, mask_r, up_r = [t.chunk(ranks, 0 if over_sequence else 1)[rank].contiguous() for t in (x, mask, upstream)]
                probs, indices = route(x_r, mask_r)
                probs.backward(up_r.flatten(0, 1))
            gradient = mine.router.weight.grad.clone()
            torch.distributed.all_reduce(gradient)
            close(gradient, whole.router.weight.grad, 1e-9)
            a, b = load_balancing_metrics(mine, reduce=True), load_balancing_metrics(whole)
            same(a["tokens_per_expert"], b["tokens_per_expert"]), same(a["max_violation"], b["max_violation"])
            for name in b:
                close(a[name].double(), b[name].double(), 1e-5)
            update_expert_bias(mine), update_expert_bias(whole)
            same(mine.router.expert_bias, whole.router.expert_bias)
            others = [torch.empty(6) for _ in range(ranks)]
            torch.distributed.all_gather(others, mine.router.expert_bias)
            assert all(torch.equal(o, others[0]) for o in others)
            mine.zero_grad(), whole.zero_grad()
            for layer in (mine, whole):
                layer.router.reset_global_aux_loss_tracker()


def test_router_over_two_ranks():
    """Counts, losses and the bias over groups: what one process computes on the whole batch."""
    spawn_gloo(balanced_both_ways, 2)


def balanced_both_ways(rank, ranks):
    for over_sequence in (False, True):
        balanced_over_ranks(rank, ranks, over_sequence)


# ---- Shared expert ----

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
    takes = kernels.ACTIVATIONS[kind].takes
    options = {name: value for name, value in values.items() if moe._CONSTANTS[name] in takes}
    config = shared_config(activation=kind, init_std=0.5, shared_expert_overlap=True, **options)
    upstream = torch.randn(5, 3, 6, dtype=torch.float64)
    for gate in (False, True):
        shared = SharedExpertMLP(config, gate)
        x = leaf(5, 3, 6)
        want = outcome(functools.partial(shared_loop, shared), x, shared, upstream)
        at_once = outcome(shared, x, shared, upstream)
        close_all(at_once, want)
        same(outcome(functools.partial(in_steps, shared), x, shared, upstream), at_once)
    close_all(outcome(compiled(shared), x, shared, upstream), want)


@pytest.mark.parametrize("overlap, backend", [
    (False, None), (True, None), (True, "aot_eager"),
    pytest.param(False, "aot_eager", marks=slow)])
def test_shared_in_the_layer_matches_loop(overlap, backend):
    """The layer with a shared expert is the routed loop plus the shared loop. A padding token gets
    the shared one alone."""
    config = shared_config(shared_expert_overlap=overlap, shared_expert_gate=True, init_std=0.5)
    layer = random_layer(config)
    shared, mask = layer.shared_experts, torch.rand(5, 3) < 0.3
    x = leaf(5, 3, 6)
    upstream = torch.randn(5, 3, 6, dtype=torch.float64)

    def loop(x):
        return layer_loop(layer, x, mask)[0] + shared_loop(shared, x)
    want = outcome(loop, x, layer, upstream)
    if backend is not None:
        layer.compile(backend=backend, fullgraph=True)
    got = outcome(lambda x: layer(x, mask), x, layer, upstream)
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
    shared, x = layer.shared_experts, torch.randn(4, 1, 6, dtype=torch.float64)
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
    Recorder.current = [Recorder("main", trace)]
    monkeypatch.setattr(moe, "_current_stream", lambda device: Recorder.current[-1])
    monkeypatch.setitem(moe._SIDE_STREAMS, torch.device("cpu"), Recorder("side", trace))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: trace.append(
        f"a tensor lives until {stream.name} has read it"))

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
    route, run_experts = layer.router.gating, layer.experts.forward
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


@pytest.mark.parametrize("gate", [False, True])
def test_shared_recomputation_starts_on_the_main_stream(gate, monkeypatch):
    """A non-reentrant checkpoint recomputes at the first node that unpacks a tensor, on that node's
    stream. It has to be the last one of the overlap, which is on the main stream."""
    layer = MoELayer(shared_config(shared_expert_overlap=True, shared_expert_gate=gate))
    recorded(layer.shared_experts, [], monkeypatch)
    route, apply = layer.router.forward, moe._FromSideStream.apply
    asked_by, made_on = [], []

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


def test_shared_overlap_survives_pickle_and_deepcopy(monkeypatch):
    """The side stream is made when the parameters come to a device: loaded, copied, or moved."""
    import pickle
    devices = []
    monkeypatch.setattr(moe, "_make_side_stream", lambda device: devices.append(device.type))
    layer = MoELayer(shared_config(shared_expert_overlap=True))
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        same(other(x), layer(x))
    same(compiled(other)(x), layer(x))
    assert devices == ["cpu", "cpu"]
    layer.to("meta")
    assert devices[2] == "meta"


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
    """tp ranks against the unsharded module: outputs and all gradients, in one go, compiled, and in steps."""
    group = torch.distributed.group.WORLD
    for parallel, kind, overlap in itertools.product((True, False), ("swiglu", "relu2"), (False, True)):
        config = shared_config(activation=kind, sequence_parallel=parallel, shared_expert_overlap=overlap, init_std=0.5)
        torch.manual_seed(0)
        whole = SharedExpertMLP(dataclasses.replace(config, sequence_parallel=False, shared_expert_overlap=False), gate=True)
        torch.manual_seed(0)
        mine = SharedExpertMLP(config, gate=True, pg_collection=ProcessGroups(tp=group))
        same(mine.fc1, whole.fc1.chunk(ranks, 1)[rank]), same(mine.fc2, whole.fc2.chunk(ranks, 1)[rank])
        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
        upstream, part = torch.randn_like(x), (lambda t: t.chunk(ranks)[rank] if parallel else t)
        want = whole(x)
        want_x, want_1, want_2, want_g = grads(want, [x, *whole.parameters()], upstream)
        x_r = part(x).detach().clone().requires_grad_()
        for function in [functools.partial(in_steps, mine)] if overlap else [mine, compiled(mine)]:
            got = function(x_r)
            close(got, part(want))
            got.backward(part(upstream).contiguous())
            reduce_gradients(mine)                                    # the groups say: dp_cp None; so only ..
            if parallel:                                              # .. the gate, which saw its part of the tokens
                torch.distributed.all_reduce(mine.gate_weight.grad)
            close(x_r.grad, part(want_x)), close(mine.gate_weight.grad, want_g)
            close(mine.fc1.grad, want_1.chunk(ranks, 1)[rank]), close(mine.fc2.grad, want_2.chunk(ranks, 1)[rank])
            mine.zero_grad(), setattr(x_r, "grad", None)

    assert error(SharedExpertMLP, shared_config(shared_expert_intermediate_size=7), False, ProcessGroups(tp=group)) == \
        "ValueError: shared_expert_intermediate_size is 7; needs a multiple of the tp size, 2"
    assert "set sequence_parallel=True" in error(MoELayer, shared_config(), ProcessGroups(tp=group))


def layer_over_tp(rank, ranks, folder):
    """The whole layer with sequence parallelism; then its checkpoint, written at tp 2, and one written at tp 1 and read."""
    import torch.distributed.checkpoint as dcp
    shared_over_tp(rank, ranks)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    groups = ProcessGroups.from_mesh(mesh)
    losses = dict(load_balancing_type=TYPES, aux_loss_coeff=(0.1, 0.2, 0.3), z_loss_coeff=0.1)
    for overlap, per_token in ((False, True), (True, False), (True, True)):
        config = shared_config(sequence_parallel=True, shared_expert_overlap=overlap, shared_expert_gate=True, init_std=0.5,
                               score_function="sigmoid", enable_expert_bias=True, calculate_per_token_loss=per_token,
                               latent_size=7, latent_norm=True, **losses)
        torch.manual_seed(0)
        whole = MoELayer(dataclasses.replace(config, sequence_parallel=False, shared_expert_overlap=False))
        torch.manual_seed(0)
        mine = MoELayer(config, groups)
        mine = copy.deepcopy(mine)                                    # keeps its groups
        if overlap:
            mine.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn_like(x)
        want, got = whole(x), mine(x.chunk(ranks)[rank])
        close(got, want.chunk(ranks)[rank])
        want.backward(upstream), got.backward(upstream.chunk(ranks)[rank].contiguous())
        reduce_gradients(mine)
        sharded = {"shared_experts.fc1", "shared_experts.fc2"}
        for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
            close(a.grad, b.grad.chunk(ranks, 1)[rank] if name in sharded else b.grad)
        update_expert_bias(mine), update_expert_bias(whole)
        same(mine.router.expert_bias, whole.router.expert_bias)
    mine, sharded = saved_layer(groups), {"shared_experts.fc1", "shared_experts.fc2"}
    dcp.save(mine.sharded_state_dict("a."), checkpoint_id=f"{folder}/tp2")
    for tensor in mine.state_dict().values():
        tensor.zero_()
    dcp.load(mine.sharded_state_dict("a."), checkpoint_id=f"{folder}/tp1")
    for (name, a), b in zip(mine.state_dict().items(), saved_layer().state_dict().values()):
        same(a, b.chunk(ranks, 1)[rank] if name in sharded else b)


def saved_layer(groups=None) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(shared_config(shared_expert_gate=True, sequence_parallel=True, score_function="sigmoid",
                                   enable_expert_bias=True, add_bias_linear=True, latent_size=7, latent_norm=True), groups)
    layer.router.expert_bias.copy_(torch.arange(4.0))
    return layer


def test_shared_expert_layer_and_checkpoints_over_two_tp_ranks(tmp_path):
    import torch.distributed.checkpoint as dcp
    layer, other = saved_layer(), saved_layer()
    state = layer.sharded_state_dict("a.")
    assert list(state) == ["a." + name for name in layer.state_dict()]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(state.values(), layer.state_dict().values()))
    dcp.save(state, checkpoint_id=f"{tmp_path}/tp1")
    spawn_gloo(layer_over_tp, 2, str(tmp_path))
    for tensor in other.state_dict().values():
        tensor.zero_()
    dcp.load(other.sharded_state_dict("a."), checkpoint_id=f"{tmp_path}/tp2")
    for a, b in zip(other.state_dict().values(), layer.state_dict().values()):
        same(a, b)
    assert_expected_inline(error(layer.sharded_state_dict, "", ((0, 1, 2),)), """ValueError: sharded_offsets is ((0, 1, 2),) and metadata None; both need to be empty: layers are told apart by their prefix""")


def mesh_groups(rank, ranks):
    """from_mesh: who is in which group, as rank 1 of 4 sees it."""
    def members(*names):
        groups = ProcessGroups.from_mesh(torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        return {name: None if group is None else torch.distributed.get_process_group_ranks(group) for name, group in vars(groups).items()}
    got = members("ep", "tp")
    if rank == 1:
        assert got == dict(tp=[0, 1], ep=[1, 3], tp_cp=[0, 1], dp_cp=[1, 3], tp_dp_cp=[0, 1, 2, 3], expt_dp=[0, 1]), got
    got = members("dp", "ep")
    if rank == 1:
        assert got == dict(tp=None, ep=[0, 1], tp_cp=None, dp_cp=[0, 1, 2, 3], tp_dp_cp=[0, 1, 2, 3], expt_dp=[1, 3]), got
    assert "needs names among" in error(ProcessGroups.from_mesh, torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)))
    assert "needs tp_dp_cp too" in error(ProcessGroups, ep=torch.distributed.group.WORLD)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shared_overlap_on_cuda():
    """Overlap on and off give the same bits. The kernels of the two streams run side by side."""
    from torch.profiler import ProfilerActivity, profile
    one, two = [MoELayer(MoEConfig(
        1024, 512, 16, 4, shared_expert_intermediate_size=2048, shared_expert_gate=True,
        shared_expert_overlap=overlap, params_dtype=torch.bfloat16)).cuda()
        for overlap in (False, True)]
    two.load_state_dict(one.state_dict())
    for _ in range(100):
        x = torch.randn(4096, 1, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        same(outcome(two, x, two), outcome(one, x, one))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        two(x).sum().backward()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type.name == "CUDA"]
    spans = [(e.time_range.start, e.time_range.end, e.device_resource_id) for e in events]
    pairs = [(a, b) for a, b in itertools.product(spans, spans) if a[2] != b[2]]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs)


# ---- One graph for every configuration ----

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
    "relu2 on the input": dict(activation="relu2", apply_probs_on="input", capacity_factor=0.7),
    "situ": dict(activation="situ", situ_beta=1.5, situ_linear_beta=2.0, apply_probs_on="output"),
}


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
                choice = random_indices(2 * T, 4, layer.config.topk)
            inputs.append((x, padding, choice))
        upstreams = [torch.randn_like(x) for x, *_ in inputs]
        want = everything_of(layer, layer, inputs, upstreams)
        close_all(everything_of(other, function, inputs, upstreams), want)
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
    want = everything_of(layer, layer, inputs, upstreams)
    close_all(everything_of(other, WAYS[way](other), inputs, upstreams), want)
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


def captured(layer: MoELayer, x: Tensor) -> str:
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
    side, main = CapturedStream(cpu), CapturedStream(cpu)

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
        patch.setitem(moe._SIDE_STREAMS, cpu, side)
        patch.setattr(moe, "_current_stream", lambda device: main)
        patch.setattr(torch._dynamo.symbolic_convert, "SymbolicStreamState", Current, raising=False)
        patch.setattr(streams, "_get_stream_by_index", lambda index: side)
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: main)
        patch.setattr(passes, "new_event", lambda *_: next(events))
        patch.setattr(passes, "get_roofline_estimate", lambda _: 0.0)
        patch.setattr(passes, "get_current_stream", lambda _: 0)
        patch.setattr(passes, "get_device", lambda _: types.SimpleNamespace(type="cuda"))
        compiled(layer, backend)(x).sum().backward()
    return "\n".join(lines)


def test_graph_puts_the_shared_expert_on_the_side_stream():
    """Forward and backward, without ranks: gate, fc1 and fc2 of the shared expert are on the side
    stream, between a fork and a join; the rest is on the main one."""
    layer = MoELayer(MoEConfig(
        32, 24, 4, 2, shared_expert_intermediate_size=40, shared_expert_overlap=True,
        shared_expert_gate=True))
    x = torch.randn(20, 32, requires_grad=True)
    assert_expected_inline(captured(layer, x), """\
forward
side  mm
main  mm
side  mm
main  rows_times_weights
main  rows_times_weights
side  mm
main  join_stream, behind 0 more
backward
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
main  join_stream, behind 3 more""")


# ---- Expert parallel ----

MESHES = [(("ep",), (4,)), (("ep", "tp"), (2, 2)), (("dp", "ep"), (2, 2)), (("dp", "ep"), (4, 1))]
BALANCED = dict(load_balancing_type=("aux_loss", "seq_aux_loss"), aux_loss_coeff=(0.1, 0.2), z_loss_coeff=0.1)
PARALLEL_CASES = [            # (config, whether one process takes the whole batch at once, or each rank's as a microbatch)
    (dict(score_function="sigmoid", enable_expert_bias=True, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3,
          bias_update="quantile"), True),
    (dict(**BALANCED, shared_expert_gate=True, add_bias_linear=True), False),
    (dict(capacity_factor=0.8, apply_probs_on="input", latent_size=7), False),
    (dict(capacity_factor=0.8, pad_to_capacity=True, add_bias_linear=True, latent_size=7, latent_norm=True), False),
    (dict(capacity_factor=9.0, pad_to_capacity=True, token_drop_policy="position", activation="relu2"), False),
]


def own_part(name: str, tensor: Tensor, groups) -> Tensor:
    """What a rank holds of one process's parameter or gradient."""
    if name.startswith("experts.") and groups.ep is not None:
        return tensor.chunk(groups.ep.size())[groups.ep.rank()]
    if name.startswith("shared_experts.fc") and groups.tp is not None:
        return tensor.chunk(groups.tp.size(), 1)[groups.tp.rank()]
    return tensor


def check_parallel_layer(rank, ranks, groups, options, at_once, overlap, how) -> None:
    """Outputs, gradients, counts and bias of this rank against one process."""
    tp = 1 if groups.tp is None else groups.tp.size()
    config = shared_config(shared_expert_overlap=overlap, sequence_parallel=True, init_std=0.5, **options)
    torch.manual_seed(0)
    whole = MoELayer(dataclasses.replace(config, shared_expert_overlap=False))
    torch.manual_seed(0)
    mine = MoELayer(config, groups)
    if how != "eager":
        mine.compile(backend=how, fullgraph=True)
    x = torch.randn(4, 2 * ranks // tp, 6, dtype=torch.float64, requires_grad=True)
    mask, upstream = torch.rand(x.shape[:2]) < 0.2, torch.randn_like(x)

    def part(t, r=rank):                                              # the batch over dp and ep, the sequence over tp
        return t[:, r // tp * 2:r // tp * 2 + 2].chunk(tp)[r % tp]
    if at_once:
        y = whole(x, mask)
        y.backward(upstream)
        want = part(y)
    else:                                                             # what is defined per rank spans tp_cp; capacity does not
        width = tp if config.capacity_factor is None else 1
        for first in range(0, ranks, width):
            a, b, u = (torch.cat([part(t, r) for r in range(first, first + width)]) for t in (x, mask, upstream))
            y = whole(a, b)
            y.backward(u)
            if first <= rank < first + width:
                want = y.chunk(width)[rank - first]
    x_r = part(x).detach().clone().requires_grad_()
    got = mine(x_r, part(mask))
    close(got, want)
    got.backward(part(upstream).contiguous())
    close(x_r.grad, part(x.grad))
    reduce_gradients(mine)
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        close(a.grad, own_part(name, b.grad, groups))
    if at_once:
        same(load_balancing_metrics(mine, reduce=True)["tokens_per_expert"], load_balancing_metrics(whole)["tokens_per_expert"])
        close(load_balancing_metrics(mine, reduce=True)["global_load_balancing_loss"],
              load_balancing_metrics(whole)["global_load_balancing_loss"], 1e-6)
        update_expert_bias(mine), update_expert_bias(whole)
        same(mine.router.expert_bias, whole.router.expert_bias)


def check_skew(rank, ranks, groups) -> None:
    """All tokens to one rank; T = 0 on a rank; all padding on a rank; uneven T."""
    config = shared_config(init_std=0.5, shared_expert_overlap=True)
    torch.manual_seed(0)
    whole = MoELayer(dataclasses.replace(config, shared_expert_overlap=False))
    torch.manual_seed(0)
    mine, sizes = MoELayer(config, groups), [5, 0, 3, 7]
    xs = [torch.randn(T, 6, dtype=torch.float64, requires_grad=True) for T in sizes]
    masks = [torch.full((T,), T == 3) for T in sizes]
    for given in (None, [torch.tensor([[0, 4]]).expand(T, 2).contiguous() for T in sizes]):
        total = 0
        for r in range(ranks):
            want = whole(xs[r], masks[r], given and given[r])
            total = total + want.sin().sum()
            if r == rank:
                got = mine(xs[r], masks[r], given and given[r])
                close(got, want)
                got.sin().sum().backward()
        reduce_gradients(mine)
        mine_x, xs[rank].grad = xs[rank].grad, None
        total.backward()
        close(mine_x, xs[rank].grad)
        for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
            close(a.grad, own_part(name, b.grad, groups))
        whole.zero_grad(), mine.zero_grad()
        for x in xs:
            x.grad = None


def check_what_moves(rank, groups, folder) -> None:
    """The order of launches, forward and backward; collectives and host syncs a forward; memory."""
    for pad in (False, True):
        config = shared_config(shared_expert_overlap=True, shared_expert_intermediate_size=4, ffn_hidden_size=32, hidden_size=16,
                               **(dict(capacity_factor=2.0, pad_to_capacity=True) if pad else {}))
        layer, trace, calls = MoELayer(config, groups), [], []
        assert layer.experts.fc1.shape[0] == 1                        # of four, over four ranks
        Recorder.current = [Recorder("main", trace)]
        with pytest.MonkeyPatch.context() as patch:
            def before(owner, name, note):
                function = getattr(owner, name)

                def noting(*args, **kwargs):
                    note(*args)
                    return function(*args, **kwargs)
                patch.setattr(owner, name, noting)
            before(parallel, "exchange", lambda rows, *_: trace.append(f"{'rows' if rows.ndim == 2 else 'counts' if rows.dtype == torch.int64 else 'probs'} issued"))
            before(parallel, "wait", lambda _: trace.append("waited"))
            before(torch.Tensor, "tolist", lambda _: calls.append(sys._getframe(2).f_code.co_filename))
            for owner, name, label in ((layer.shared_experts, "_fc1_and_act", "shared fc1"), (layer.shared_experts, "_fc2", "shared fc2"),
                                       (layer.experts, "forward", "experts")):
                patch.setattr(owner, name, functools.partial(
                    lambda function, label, *args: Note.apply(function(*args), label, trace), getattr(owner, name), label))
            out = layer(torch.randn(8, 16, dtype=torch.float64, requires_grad=True))
            trace.append(f"{calls.count(moe.__file__)} host syncs\n")
            out.sum().backward()
        if rank == 0:
            Path(folder, f"trace{pad}").write_text("\n".join(trace))
    layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=False, capacity_factor=None, pad_to_capacity=False), groups)
    given = (torch.arange(4)[None] + torch.arange(2)[:, None]).t().repeat(64, 1) % 4          # even: every rank receives N rows
    x = torch.randn(256, 16, dtype=torch.float64, requires_grad=True)
    shared, layer.shared_experts = layer.shared_experts, None
    kept, rows = saved_bytes(lambda: layer(x, topk_indices=given), [*layer.parameters()]), 256 * 2
    least = 8 * (256 * 16 + rows * 16 + rows * 2 * 32)                # x, the received rows, fc1's output
    small = 8 * (256 * 4 + 3 * rows + 8 * rows)                       # logits; probs; orders and inverses
    assert least <= kept <= 1.05 * least + small, (kept, least, small)


def check_parallel_checkpoints(rank, folder) -> None:
    """Written at each of (ep, tp), read at each, bitwise."""
    import torch.distributed.checkpoint as dcp
    sizes = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
    layers = []
    for size in sizes:
        mesh = torch.distributed.init_device_mesh("cpu", size, mesh_dim_names=("dp", "ep", "tp"))
        layers.append((saved_layer(ProcessGroups.from_mesh(mesh)), f"{folder}/{size[1]}{size[2]}"))
        state = layers[-1][0].sharded_state_dict("a.")
        for a, b in zip(state.values(), layers[-1][0].state_dict().values(), strict=True):       # no temporary that a load fills
            assert getattr(a, "_local_tensor", a).data_ptr() == b.data_ptr()
        dcp.save(state, checkpoint_id=layers[-1][1])
    whole = saved_layer().state_dict()
    for (layer, _), (_, path) in itertools.product(layers, [*layers, (None, f"{folder}/alone")]):
        for tensor in layer.state_dict().values():
            tensor.zero_()
        dcp.load(layer.sharded_state_dict("a."), checkpoint_id=path)
        for name, tensor in layer.state_dict().items():
            same(tensor, own_part(name, whole[name], layer.pg_collection))


def check_parallel_families(groups) -> None:
    """Each rank reads its experts out of a whole model's tensors, and writes them under their global numbers."""
    config = dict(model_type="qwen2_moe", hidden_size=6, moe_intermediate_size=5, num_experts=8, num_experts_per_tok=2,
                  shared_expert_intermediate_size=4, norm_topk_prob=True)
    config = families.config_from_hf(config)
    torch.manual_seed(3)
    whole = MoELayer(config)
    tensors = families.to_hf(whole, "qwen2_moe", "mlp.")
    mine = MoELayer(config, groups)
    families.from_hf(mine, tensors, "qwen2_moe", "mlp.")
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        same(a, own_part(name, b, groups))
    out = families.to_hf(mine, "qwen2_moe", "mlp.")
    assert {name for name in out if ".experts." in name} == {
        f"mlp.experts.{e}.{part}_proj.weight" for e in range(8)[groups.ep.rank() * 2:groups.ep.rank() * 2 + 2]
        for part in ("gate", "up", "down")}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in out.items())


def check_gradient_norm(mesh, groups) -> None:
    """Of gradients that are the weights; experts over ep and FSDP2 over dp at once, where there are both."""
    from torch.distributed.fsdp import fully_shard
    layer, whole = saved_layer(groups), saved_layer()
    if "dp" in mesh.mesh_dim_names:
        fully_shard(layer, mesh=mesh["dp"])
    for p in layer.parameters():
        p.grad = p.detach().clone()
    close(parallel.gradient_norm(layer, groups), torch.stack([p.norm() for p in whole.parameters()]).norm())


def parallel_ranks(rank, ranks, folder):
    """All that needs four ranks, in one set of processes."""
    mesh_groups(rank, ranks)
    for names, sizes in MESHES:
        mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        groups = ProcessGroups.from_mesh(mesh)
        check_gradient_norm(mesh, groups)
        for i, (options, at_once) in enumerate(PARALLEL_CASES):
            if sizes == (4, 1) and i not in (0, 3):                   # ep of one rank
                continue
            compile = [(i == 0, "aot_eager")] if (sizes, i) in (((2, 2), 0), ((4,), 3)) and "dp" not in names else []
            for overlap, how in [(False, "eager"), (True, "eager")] * (i % 2 == 0) or [(True, "eager")]:
                check_parallel_layer(rank, ranks, groups, options, at_once, overlap, how)
            for overlap, how in compile:
                check_parallel_layer(rank, ranks, groups, options, at_once, overlap, how)
        if names == ("ep",):
            check_skew(rank, ranks, groups)
            check_what_moves(rank, groups, folder)
            check_parallel_families(groups)
            assert error(MoELayer, shared_config(num_experts=6), groups) == \
                "ValueError: num_experts is 6; needs a multiple of the ep size, 4"
    check_parallel_checkpoints(rank, folder)


def test_parallel_layer_equals_one_process(tmp_path):
    """ep 4, ep 2 × tp 2 with sequence parallelism, dp 2 × ep 2, ep 1; overlap on and off; eager and compiled."""
    import torch.distributed.checkpoint as dcp
    layer = saved_layer()
    dcp.save(layer.sharded_state_dict("a."), checkpoint_id=f"{tmp_path}/alone")
    spawn_gloo(parallel_ranks, 4, str(tmp_path))
    for path in ("11", "21", "12", "22", "41"):                             # read without any process group
        other = saved_layer()
        for tensor in other.state_dict().values():
            tensor.zero_()
        dcp.load(other.sharded_state_dict("a."), checkpoint_id=f"{tmp_path}/{path}")
        for a, b in zip(other.state_dict().values(), layer.state_dict().values()):
            same(a, b)
    assert_expected_inline((tmp_path / "traceFalse").read_text(), """\
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
    assert (tmp_path / "traceTrue").read_text() == (tmp_path / "traceFalse").read_text().replace(
        "counts issued\nwaited\n", "").replace("1 host syncs", "0 host syncs")


RANKS_ONE_GRAPH = [           # (config, mesh dims, T of each rank in turn, options of torch.compile, graphs)
    (dict(**BALANCED, shared_expert_gate=True), ("ep",), [(5, 7), (8, 3), (9, 20), (40, 31)], {}, 2),
    (dict(capacity_factor=0.8, latent_size=7, latent_norm=True), ("ep",), [(5, 0), (8, 3), (0, 20), (40, 0)], dict(dynamic=True), 2),     # T = 0 takes its own
    (dict(capacity_factor=0.8, pad_to_capacity=True), ("ep",), [(5, 5), (8, 8), (31, 31)], dict(dynamic=True), 1),
    (dict(score_function="sigmoid", enable_expert_bias=True), ("tp",), [(4, 4), (6, 6), (8, 8)], {}, 2),
    (dict(shared_expert_gate=True), ("ep",), [(40, 33), (52, 64), (90, 41)], dict(backend="inductor"), 2),
]


def one_graph_over_ranks(rank, ranks, folder):
    """Compiled, the layer gives what it gives in eager mode, bit for bit in its counts, at another T on each rank; T = 0
    on one; either checkpoint; the router and the layer sharded by FSDP2; the order of a graph."""
    from torch.distributed.fsdp import fully_shard
    def groups_of(dim):
        return ProcessGroups.from_mesh(torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=(dim,)))
    def compare(layer, other, function, T):
        x = torch.randn(T, 6, dtype=torch.float64, requires_grad=True)
        results, upstream = [], torch.randn_like(x)
        for model, call in ((layer, layer), (other, function)):
            x.grad = None
            y = call(x)
            y.backward(upstream)
            results.append([y, x.grad, *[p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()],
                            *model.buffers(), *counts_of(model)])
            model.zero_grad()
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    for options, (dim,), sizes, how, graphs in RANKS_ONE_GRAPH:
        layer = MoELayer(shared_config(shared_expert_overlap=True, sequence_parallel=True, init_std=0.5, **options), groups_of(dim))
        other = copy.deepcopy(layer)
        torch._dynamo.reset(), counters.clear()
        function = compiled(other, **how)
        for Ts in sizes:
            compare(layer, other, function, Ts[rank])
        assert counters["stats"]["unique_graphs"] <= graphs, (options, counters["stats"]["unique_graphs"])
    layer = MoELayer(shared_config(shared_expert_overlap=True, init_std=0.5), groups_of("ep"))
    for way in ("reentrant", "non-reentrant", "compiled inside non-reentrant", "compiled around non-reentrant"):
        torch._dynamo.reset()
        other = copy.deepcopy(layer)
        compare(layer, other, WAYS[way](other), 5 + rank)
    with torch.autograd.set_detect_anomaly(True):                     # which reads gradients that may be in flight
        layer(torch.randn(5, 6, dtype=torch.float64, requires_grad=True)).sum().backward()
    lines = captured(layer, torch.randn(20 + rank, 6, dtype=torch.float64, requires_grad=True))
    if rank == 0:
        Path(folder, "graph").write_text(lines)

    torch.manual_seed(7)                                              # FSDP2 averages: the same weights and x on both ranks
    plain = MoELayer(shared_config(init_std=0.5))
    for parts in (lambda m: [m.router], lambda m: [m.router, m.experts, m.shared_experts, m]):
        sharded = copy.deepcopy(plain)
        for part in parts(sharded):
            fully_shard(part)
        compare(plain, sharded, sharded, 5)
        x = torch.randn(5, 6, dtype=torch.float64)
        same(sharded.router.route(x)[1], plain.router.route(x)[1])


def test_one_graph_over_two_ranks(tmp_path):
    spawn_gloo(one_graph_over_ranks, 2, str(tmp_path))
    assert_expected_inline((tmp_path / "graph").read_text(), """\
forward
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
main  join_stream, behind 2 more""")


def failing_rank(rank, ranks, port, folder, how):
    """Rank 1 fails in the middle of a step; the others must end by themselves, with an error."""
    def step(rank, ranks):
        groups = ProcessGroups(ep=torch.distributed.group.WORLD, tp_dp_cp=torch.distributed.group.WORLD)
        layer = MoELayer(shared_config(), groups)
        for i in range(3):
            if rank == 1 and i == 1 and how != "backward raises":
                os.kill(os.getpid(), 9) if how == "killed" else (_ for _ in ()).throw(ZeroDivisionError)
            y = layer(torch.randn(4, 6, dtype=torch.float64, requires_grad=True))
            if rank == 1 and i == 1:
                y.register_hook(lambda grad: 1 / 0)
            y.sum().backward()
    try:
        _rank_main(rank, ranks, port, step, ())
    except BaseException as e:
        Path(folder, f"{how}{rank}").write_text(type(e).__name__)
        os._exit(1)


@pytest.mark.parametrize("how", ["killed", "forward raises", "backward raises"])
def test_parallel_rank_that_fails_ends_the_others(tmp_path, how):
    processes = start_ranks(failing_rank, 2, str(tmp_path), how)
    try:
        for process in processes:
            process.join(90)
        assert all(process.exitcode for process in processes), [process.exitcode for process in processes]
        assert (tmp_path / f"{how}0").exists()                        # the healthy rank ended by an error of its own
    finally:
        for process in processes:
            process.kill()


# ---- In other people's trainers ----

def counts_of(model) -> list[Tensor]:
    """What the routers keep beside their state dict: counts, sums, latest losses."""
    kept = [getattr(router, name) for router in moe._routers(model) for name in moe._COUNTS]
    return [tensor for tensor in kept if tensor is not None]


def trained_over_ranks(rank, ranks):
    """All that needs two ranks, in one set of processes."""
    counts_under_ddp(rank, ranks)
    sharded_from_meta(rank, ranks)
    norms_over_ranks(rank, ranks)


def counts_under_ddp(rank, ranks):
    """DDP broadcasts rank 0's buffers before every forward: counts and sums must not be among them."""
    group = torch.distributed.group.WORLD
    config = MoEConfig(8, 4, 6, 2, score_function="sigmoid", enable_expert_bias=True, params_dtype=torch.float64,
                       router_dtype=torch.float64, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    torch.manual_seed(1)
    mine = MoELayer(config, ProcessGroups(tp_dp_cp=group))
    alone, want = copy.deepcopy(mine), torch.zeros(6)
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
    for a, b in zip(mine.parameters(), alone.parameters()):           # DDP averages over ranks
        torch.distributed.all_reduce(b.grad)
        close(a.grad, b.grad / ranks)
    torch.distributed.all_reduce(want)
    update_expert_bias(model)
    close(mine.router.expert_bias, 1e-3 * (want.mean() - want).sign(), 1e-9)
    assert [name for name, _ in mine.named_buffers()] == ["router.expert_bias"]


def sharded_from_meta(rank, ranks):
    """Meta device, fully_shard, to_empty, reset_parameters: what one process draws and computes. Each part alone, all
    of them nested, the layer; in bf16 by FSDP2's own casts; the shared expert in steps cannot be sharded alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    config = shared_config(router_bias=True, add_bias_linear=True, shared_expert_gate=True, num_experts=5, init_std=0.5,
                           latent_size=7, latent_norm=True,
                           score_function="sigmoid", enable_expert_bias=True)
    torch.manual_seed(5)
    plain = MoELayer(config)
    x, upstream = torch.randn(2, 7, 6, dtype=torch.float64)
    want = plain(x)
    want.backward(upstream)
    whole_shards = torch.distributed.tensor.Shard(1)
    for names, options in ([("router",), {}], [("latent",), {}], [("experts",), {}], [("shared_experts",), {}], [("",), {}],
                           [("router", "experts", "latent", "shared_experts", ""), {}],
                           [("shared_experts",), dict(shard_placement_fn=lambda p: whole_shards if p.ndim == 3 else None)]):
        with torch.device("meta"):
            layer = MoELayer(config)
        for name in names:
            fully_shard(layer.get_submodule(name), **options)
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        def full(t):
            return t.full_tensor() if hasattr(t, "full_tensor") else t
        for a, b in zip(layer.state_dict().values(), plain.state_dict().values(), strict=True):
            same(full(a), b)
        got = layer(x)                                                # the same x on both: an average is the gradient
        close(got, want)
        got.backward(upstream)
        for a, b in zip(layer.parameters(), plain.parameters()):
            close(full(a.grad), b.grad)
        alone = copy.deepcopy(plain.router)
        layer.zero_grad(), alone.zero_grad()
        (probs, indices), (want_probs, want_indices) = layer.router.route(x), alone.route(x)     # without the layer's call
        same(indices, want_indices)
        probs[:, 0].sum().backward(), want_probs[:, 0].sum().backward()
        for a, b in zip(layer.router.parameters(), alone.parameters(), strict=True):
            close(full(a.grad), b.grad)
    half = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert half(x).dtype == torch.bfloat16
    close(half(x).double(), want, 0.1)
    layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=True))
    fully_shard(layer.shared_experts)
    assert "shard the layer, not its shared expert alone" in error(layer, x)
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


def norms_over_ranks(rank, ranks):
    """The norm of a module's gradients over ep, tp, FSDP2; gradients are set to the weights."""
    from torch.distributed.fsdp import fully_shard

    def with_gradients(layer):
        for p in layer.parameters():
            p.grad = p.detach().clone()
        return layer
    config = shared_config(sequence_parallel=True, router_bias=True, shared_expert_gate=True, init_std=0.5)
    results = {}
    for name in ("alone", "ep", "tp", "fsdp", "fsdp parts"):
        groups = None
        if name in ("ep", "tp"):
            groups = ProcessGroups.from_mesh(torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,)))
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6, dtype=torch.float64), MoELayer(config, groups))
        if name.startswith("fsdp"):
            fully_shard(model[1] if name == "fsdp" else model[1].experts)
        results[name] = parallel.gradient_norm(with_gradients(model), groups)
        if groups is None:
            close(parallel.gradient_norm(model.parameters(), groups), results[name])
        else:
            assert "needs the module" in error(parallel.gradient_norm, model.parameters(), groups)
            assert "over a group that groups lacks" in error(parallel.gradient_norm, model, None)
        model[1].zero_grad()
        close(parallel.gradient_norm(model, groups), torch.nn.utils.get_total_norm([p.detach() for p in model[0].parameters()]))
        if name == "alone":
            want = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()])
    for norm in results.values():
        close(norm, want)
        assert norm.dtype == torch.float64 and norm.ndim == 0


def test_trainers_over_two_ranks():
    """DDP, FSDP2 from the meta device, gradient norms."""
    spawn_gloo(trained_over_ranks, 2)


def test_gradient_norm_of_one_process():
    layer = MoELayer(shared_config())
    assert parallel.gradient_norm(layer, None) == 0
    layer(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    want = torch.stack([p.grad.norm() for p in layer.parameters()]).norm()
    close(parallel.gradient_norm(layer, None), want)
    close(parallel.gradient_norm([p for p in layer.parameters()], ProcessGroups()), want)
    norm = parallel.gradient_norm(MoELayer(MoEConfig(8, 4, 4, 2, params_dtype=torch.bfloat16)), None)
    assert norm.dtype == torch.float32


def test_counts_follow_a_weight_moved_without_apply():
    """fully_shard moves parameters and buffers, no other tensors."""
    layer = MoELayer(MoEConfig(8, 4, 4, 2, enable_expert_bias=True, score_function="sigmoid"))
    router = layer.router
    router.weight, router.expert_bias = torch.nn.Parameter(router.weight.to("meta")), router.expert_bias.to("meta")
    router(torch.zeros(5, 8, device="meta"))
    assert {tensor.device.type for tensor in counts_of(layer)} == {"meta"}


FROZEN = ["", "experts", "experts.fc1", "experts.fc2", "experts.fc1 experts.fc1_bias experts.fc2_bias", "router", "x",
          "x experts", "x router experts.fc1", "x router experts.fc1 experts.fc1_bias"]


@pytest.mark.parametrize("probs_on", ["activation", "input"])
def test_frozen_parameters_cost_nothing(probs_on):
    """Grouped products and the router's, in the backward, eager and compiled; the other gradients stay as they are."""
    layer = MoELayer(MoEConfig(6, 5, 4, 2, add_bias_linear=True, router_bias=True, apply_probs_on=probs_on,
                               pre_softmax=True, params_dtype=torch.float64, router_dtype=torch.float64))
    x = torch.randn(7, 6, dtype=torch.float64)
    named = {"x": x, **dict(layer.named_parameters())}
    for tensor in named.values():
        tensor.requires_grad_()
    want = dict(zip(named, grads(layer(x).sin().sum(), list(named.values()))))
    lines = []
    for frozen in FROZEN:
        for name, tensor in named.items():
            tensor.requires_grad_(not any(name.startswith(part) for part in frozen.split()))
        live = [name for name, tensor in named.items() if tensor.requires_grad]
        counted = []
        for how in ("eager", "compiled"):
            calls = dict.fromkeys(("rows_times_weights", "rows_times_rows", "product_in"), 0)
            torch._dynamo.reset()
            function = layer if how == "eager" else compiled(layer)
            loss = function(x).sin().sum()

            class Count(torch.utils._python_dispatch.TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    name = func.name().split("::")[1]
                    if name in calls:
                        calls[name] += 1
                    return func(*args, **(kwargs or {}))
            with Count():
                got = torch.autograd.grad(loss, [named[name] for name in live])
            for name, grad in zip(live, got, strict=True):
                close(grad, want[name])
            counted.append(" ".join(map(str, calls.values())))
        assert counted[0] == counted[1], (frozen, counted)
        lines.append(f"{counted[0]}  {frozen or 'nothing'}")
    got = "\n".join(lines)
    if probs_on == "activation":
        assert_expected_inline(got, """\
2 4 2  nothing
2 0 2  experts
2 2 2  experts.fc1
2 2 2  experts.fc2
2 1 2  experts.fc1 experts.fc1_bias experts.fc2_bias
2 4 1  router
1 4 1  x
1 0 1  x experts
0 2 0  x router experts.fc1
0 2 0  x router experts.fc1 experts.fc1_bias""")
    else:
        assert_expected_inline(got, """\
2 4 2  nothing
2 0 2  experts
2 2 2  experts.fc1
2 2 2  experts.fc2
2 1 2  experts.fc1 experts.fc1_bias experts.fc2_bias
2 4 1  router
2 4 1  x
2 0 1  x experts
0 2 0  x router experts.fc1
0 2 0  x router experts.fc1 experts.fc1_bias""")


def test_frozen_latent_experts_cost_nothing():
    """Products with down and up in the backward: x · downᵀ is computed again for fc1's gradient alone."""
    layer = MoELayer(MoEConfig(6, 5, 4, 2, latent_size=7, latent_norm=True))
    counts, x = {}, torch.randn(9, 6, requires_grad=True)

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[frozen] += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))
    for frozen in ("nothing", "experts.fc1", "experts", "latent.down", "latent", "x"):
        counts[frozen] = 0
        for name, tensor in {"x": x, **dict(layer.named_parameters())}.items():
            tensor.requires_grad_(not name.startswith(frozen))
        loss = layer(x).sum()
        with Count():
            loss.backward()
    assert_expected_inline(str(counts), """{'nothing': 5, 'experts.fc1': 4, 'experts': 4, 'latent.down': 4, 'latent': 3, 'x': 4}""")


@pytest.mark.parametrize("kind", list(kernels.ACTIVATIONS))
def test_activation_slopes_by_differences(kind):
    """Every entry of the table, by itself and inside the experts."""
    width, takes = 2 if kernels.ACTIVATIONS[kind].gated else 1, kernels.ACTIVATIONS[kind].takes
    values = dict(alpha=1.3, linear_offset=0.5, clamp_value=0.9, beta=1.5, linear_beta=0.7)
    constants = dict(kind=kind, **{name: values[name] for name in takes})
    y = torch.randn(5, 3 * width, dtype=torch.float64, requires_grad=True)
    w = torch.rand(5, 1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(functools.partial(activation, **constants), (y,))
    torch.autograd.gradcheck(lambda y, w: activation(y, weights=w, **constants), (y, w))
    plan = plan_permutation(random_indices(4, 3, 2), 3)
    shapes = [(4, 6), (4, 2), (3, width, 5, 6), (3, 6, 5), (3, width, 5), (3, 6)]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for probs_on in ("input", "activation", "output"):
        torch.autograd.gradcheck(lambda x, p, *w: expert_mlp(x, p, plan, *w, probs_on=probs_on, **constants), operands)


@pytest.mark.parametrize("score_function", list(kernels.SCORE_FUNCTIONS))
def test_score_function_slopes_by_differences(score_function):
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    for options in (dict(), dict(norm_topk_prob=True), dict(norm_topk_prob=False, scaling_factor=2.5),
                    dict(expert_bias=torch.rand(6)), dict(num_groups=3, group_topk=2)):
        torch.autograd.gradcheck(lambda x: topk_routing_with_score_function(
            x, 2, score_function=score_function, dense_output=True, **options)[0], (logits,))
    scores = compute_routing_scores_for_aux_loss(logits, 2, score_function)[1]
    close(scores.sum(1), torch.ones(5))


def test_a_new_activation_is_one_entry(monkeypatch):
    """In the table, it is known to the config, the experts and the shared expert, forward and backward."""
    assert "known: 'swiglu'" in error(activation, torch.randn(3, 4), "tanh")
    monkeypatch.setitem(kernels.ACTIVATIONS, "tanh", kernels.Activation(
        lambda a, c: a.tanh(), lambda g, a, c: g * (1 - a.tanh().square()), gated=False))
    layer = MoELayer(shared_config(activation="tanh", init_std=1.0))
    assert layer.experts.fc1.shape == (4, 1, 5, 6) and layer.shared_experts.fc1.shape == (1, 8, 6)
    x, weights = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), list(layer.parameters())
    probs, indices = layer.router.route(x)

    def expert(x_H, e):
        return layer.experts.fc2[e] @ (layer.experts.fc1[e, 0] @ x_H).tanh()
    routed = torch.stack([sum(probs[t, k] * expert(x[t], indices[t, k]) for k in range(2)) for t in range(5)])
    want = routed + (x @ layer.shared_experts.fc1[0].T).tanh() @ layer.shared_experts.fc2.T
    want_grads = grads(want.sin(), [x, *weights])
    for function in (layer, compiled(layer)):
        close(function(x), want)
        for a, b in zip(grads(function(x).sin(), [x, *weights]), want_grads, strict=True):
            close(a, b)


@pytest.mark.parametrize("on", ["torch.set_default_dtype(torch.float16)", "torch.set_default_device('meta')",
                                "mode = torch.inference_mode(); mode.__enter__()", "torch.set_grad_enabled(False)"])
def test_loss_scale_whatever_is_on_at_import(on, tmp_path):
    """What is on where moe.py is imported does not reach the scale: fp32, on the CPU, outside of inference mode."""
    script = f"""
import torch
{on}
import moe
for device, scale in moe._LOSS_SCALE.items():
    print(device, scale.dtype, scale.device, scale.is_inference())
torch.set_default_dtype(torch.float32), torch.set_default_device("cpu")
with torch.inference_mode(False), torch.enable_grad():
    moe.set_aux_loss_scale(2.0 ** 18)
    layer = moe.MoELayer(moe.MoEConfig(8, 4, 4, 2, z_loss_coeff=0.1))
    logits = torch.ones(3, 4, requires_grad=True)
    layer.router.routing(logits)[0].mul(0).sum().backward()
    print(logits.grad.sum(1).unique().tolist())
"""
    (tmp_path / "script.py").write_text(script)
    done = run("script.py", cwd=tmp_path, PYTHONPATH=str(HERE))
    lse = 1 + math.log(4)                                             # d/dx of 0.1·lse² is 0.1·2·lse
    scale, gradient = done.stdout.splitlines()
    assert scale == "cpu torch.float32 cpu False"
    close(torch.tensor(json.loads(gradient)), torch.tensor([2.0 ** 18 * 0.1 * 2 * lse / 3]), 1.0)


def test_loss_scale_leaves_no_graph():
    scale = torch.tensor(3.0, requires_grad=True)
    set_aux_loss_scale(scale * 2)
    kept = moe._loss_scale(torch.device("cpu"))
    assert kept == 6 and not kept.requires_grad and kept.grad_fn is None
    assert "needs a float or a 0-d tensor" in error(set_aux_loss_scale, torch.ones(2))


def test_saved_overlap_layer_runs_in_a_fresh_process(tmp_path):
    layer = MoELayer(MoEConfig(6, 5, 4, 2, shared_expert_intermediate_size=8, shared_expert_overlap=True))
    x = torch.randn(5, 6)
    torch.save((layer, x), tmp_path / "layer.pt")
    (tmp_path / "script.py").write_text("""
import torch
layer, x = torch.load("layer.pt", weights_only=False)
torch.save(layer(x), "out.pt")
""")
    run("script.py", cwd=tmp_path, PYTHONPATH=str(HERE))
    same(torch.load(tmp_path / "out.pt"), layer(x))


def test_forced_balance_with_minus_infinity():
    """A masked logit (-inf) stays out of the random values; the gradient passes straight through."""
    router = TopKRouter(MoEConfig(8, 4, 5, 2, force_load_balancing=True, pre_softmax=True))
    logits = torch.randn(6, 5)
    logits[:, 1], logits[2] = -INF, -INF
    for route in (router.routing, compiled(router.routing)):
        logits = logits.detach().requires_grad_()
        probs, routing_map = route(logits)
        assert probs.isfinite().all() and (routing_map.sum(1) == 2).all()
        grad = grads(probs[:, 0], [logits])[0]
        assert grad.isfinite().all() and grad.abs().sum() > 0


def test_forward_on_the_meta_device():
    """Shapes without memory, also where T·K·H is beyond 2^31; and what autocast cannot know there."""
    with torch.device("meta"):
        layer = MoELayer(MoEConfig(4096, 512, 64, 8, shared_expert_intermediate_size=64, enable_expert_bias=True,
                                   score_function="sigmoid", load_balancing_type="aux_loss", aux_loss_coeff=0.1))
        x = torch.randn(1 << 20, 4096, requires_grad=True)
        y = layer(x)
        y.sum().backward()
    assert y.shape == x.shape and y.is_meta
    assert all(p.grad.shape == p.shape for p in (x, *layer.parameters()))


class IndexArithmetic(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects products of integers that are not int64, and indices of another dtype."""

    def __init__(self):
        super().__init__()
        self.narrow, self.seen = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in ("mul", "floor_divide", "remainder", "index_select", "gather", "index", "index_add"):
            self.seen.add(name)
            index = {"index_select": 2, "gather": 2, "index_add": 2}.get(name)
            checked = [out] if index is None and name != "index" else args[1] if name == "index" else [args[index]]
            for t in checked:
                if t is not None and not t.is_floating_point() and t.dtype not in (torch.int64, torch.bool):
                    self.narrow.append(f"{func.name()} {t.dtype}")
        return out


def test_index_times_width_is_int64():
    """torchtitan #2430: beyond 2^31 elements an int32 product of an index and a row's width is another row."""
    mode, x = IndexArithmetic(), torch.randn(6, 8, requires_grad=True)
    config = MoEConfig(8, 4, 4, 2, capacity_factor=1.0, pad_to_capacity=True, add_bias_linear=True)
    with mode:
        MoELayer(config)(x).sum().backward()
        plan = plan_permutation(random_indices(6, 4, 2), 4)
        padded = kernels.pad_plan(plan, 6)
        combine_rows(gather_rows(x, padded), padded, torch.rand(6, 2)).sum().backward()
        routing_map, probs = torch.rand(6, 4) < 0.5, torch.rand(6, 4)
        for pad in (False, True):
            rows, _, order = permute(x, routing_map, probs, 12, drop_and_pad=pad)
            unpermute(rows, order, x.shape, probs, routing_map, drop_and_pad=pad)
        sort_chunks_by_idxs(x, torch.tensor([2, 1, 3]).int(), torch.tensor([1, 2, 0]))
    assert mode.seen >= {"mul", "index_select", "gather", "index", "index_add", "floor_divide"}, mode.seen
    assert not mode.narrow, mode.narrow


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 60 << 30, reason="no CUDA device of 60 GiB")
def test_rows_beyond_two_to_the_31_elements_on_cuda():
    T, K, H = 1 << 16, 8, 8192                                        # 2^32 elements
    tokens = torch.arange(T, device="cuda").remainder(251).bfloat16()[:, None].expand(T, H).contiguous()
    plan = plan_permutation(torch.arange(K, device="cuda").repeat(T, 1), K)
    for gather, combine in ((gather_rows, combine_rows), (compiled(gather_rows, "inductor"), compiled(combine_rows, "inductor"))):
        rows = gather(tokens, plan)
        same(rows[-3:, -1].cpu(), tokens[-3:, -1].cpu())
        same(combine(rows, plan)[-3:, -1].cpu(), (tokens[-3:, -1] * K).cpu())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_routing_maps(dtype):
    """0 and 1 in any integer dtype, as the originals take them, are the boolean map; what comes back is boolean."""
    routing_map, probs, x = torch.rand(9, 4) < 0.4, torch.rand(9, 4), torch.randn(9, 6)
    numbers = routing_map.to(dtype)
    for options in (dict(), dict(num_out_tokens=20), dict(num_out_tokens=12, drop_and_pad=True)):
        want, got = permute(x, routing_map, probs, **options), permute(x, numbers, probs, **options)
        same(got, want)
        pad = "drop_and_pad" in options
        same(unpermute(got[0], got[2], x.shape, probs, numbers, drop_and_pad=pad),
             unpermute(want[0], want[2], x.shape, probs, routing_map, drop_and_pad=pad))
    same(pad_routing_map(numbers, 4), pad_routing_map(routing_map, 4))
    for policy, pad in itertools.product(("probs", "position"), (False, True)):
        want = apply_router_token_dropping(probs, routing_map, 2, 0.7, policy, pad)
        got = apply_router_token_dropping(probs, numbers, 2, 0.7, policy, pad)
        same(got, want)
        assert got[1].dtype == torch.bool
    router = TopKRouter(MoEConfig(6, 4, 4, 2, enable_expert_bias=True, score_function="sigmoid"))
    router._apply_expert_bias(numbers)
    same(router.local_tokens_per_expert, routing_map.sum(0).float())
    assert "routing_map is torch.float32" in error(permute, x, routing_map.float())


def test_kernels_under_a_name_with_a_hyphen(tmp_path):
    """Op names are made of the module's name, whatever it is."""
    shutil.copy(HERE / "kernels.py", tmp_path / "my-kernels.v2.py")
    (tmp_path / "script.py").write_text("""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("my-kernels.v2", "my-kernels.v2.py")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
plan = module.plan_permutation(torch.tensor([[1], [0]]), 2)
print(plan.order.tolist(), torch.ops.moe_my_kernels_v2.plan_permutation.default.name())
""")
    assert run("script.py", cwd=tmp_path).stdout == "[1, 0] moe_my_kernels_v2::plan_permutation\n"


def test_native_product_where_it_fits(monkeypatch):
    """torch's grouped product on CUDA, in bf16, on two kinds of card, in multiples of 16 bytes; what reads the card runs
    inside a graph."""
    card = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card[0])

    def on_cuda(t):
        return types.SimpleNamespace(is_cuda=True, dtype=t.dtype, shape=t.shape, stride=t.stride, device="cuda",
                                     itemsize=t.itemsize)

    def native(rows, weights):
        return kernels._native(on_cuda(rows.bfloat16()), on_cuda(weights))
    rows, weights = torch.empty(10, 16), torch.empty(4, 16, 24, dtype=torch.bfloat16)
    fits = {
        "as it is": native(rows, weights),
        "transposed": native(rows, weights.transpose(1, 2)),
        "fp32": native(rows, weights.float()),
        "on a CPU": kernels._native(rows.bfloat16(), weights),
        "12 columns of the rows": native(rows[:, :12].contiguous(), weights),
        "12 columns of the weights": native(rows, weights[:, :, :12].contiguous()),
        "every second weight": native(rows, weights.repeat(1, 1, 2)[:, :, ::2]),
        "weights 20 apart": native(rows, torch.empty(4, 16, 20, dtype=torch.bfloat16)[:, :, :16]),
        "expanded": native(rows, weights[:1].expand(4, 16, 24)),
    }
    for card[0] in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        fits[f"compute capability {card[0]}"] = native(rows, weights)
    assert_expected_inline("\n".join(f"{yes!s:<5}  {name}" for name, yes in fits.items()), """\
True   as it is
True   transposed
False  fp32
False  on a CPU
False  12 columns of the rows
False  12 columns of the weights
False  every second weight
False  weights 20 apart
False  expanded
False  compute capability (8, 0)
False  compute capability (8, 9)
True   compute capability (9, 0)
True   compute capability (10, 0)
False  compute capability (12, 0)""")
    same(compiled(lambda x: x + kernels._one_kernel_card(x.device))(torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_products_loop_in_torch(dtype, monkeypatch):
    """The loop in C++ and the one in Python give the same bits: an expert without rows, rows of none, a scale."""
    monkeypatch.setattr(kernels, "_slow_on_cpu", lambda dtype: False)
    x, weights = torch.randn(9, 16).to(dtype), torch.randn(4, 24, 16).to(dtype)
    plan = plan_permutation(torch.tensor([[0, 4], [3, 0], [1, 3], [0, 1], [3, 4], [0, 3], [1, 0], [3, 1], [4, 0]]), 4)
    token_N, offsets, scale = plan.order // 2, plan.offsets, torch.rand(18, 1)
    grad = torch.randn(18, 24).to(dtype)
    results = {}
    for in_torch in (True, False):
        called = []
        monkeypatch.setattr(kernels, "_loops_in_torch", lambda *args: called.append(args) or in_torch)
        results[in_torch] = [
            kernels._rows_times_weights(x, token_N, scale, weights.transpose(1, 2), None, offsets),
            kernels._rows_times_weights(grad, None, None, weights, None, offsets),
            kernels._rows_times_rows(grad, None, x, token_N, scale, offsets),
            kernels._rows_times_rows(x, token_N, grad, None, None, offsets),
            kernels._rows_times_weights(x, token_N, None, weights[:, :6].transpose(1, 2), None, offsets),
            kernels._rows_times_weights(grad, None, None, weights, weights[:, 0], offsets)]
        assert called
        assert not results[in_torch][0][15:].any() and not results[in_torch][3][2].any()
    same(results[True], results[False])
    monkeypatch.undo()
    few, many = torch.empty(40, 16), torch.empty(2 ** 14, 256)
    ways = {"few": few, "many": many, "many tokens": (few, torch.zeros(2 ** 14, dtype=torch.int64)),
            "few tokens": (many, torch.zeros(40, dtype=torch.int64)), "fp64": few.double(), "6 columns": few[:, :6].contiguous()}
    found = {name: kernels._loops_in_torch(*(way if isinstance(way, tuple) else (way, None)), 4) for name, way in ways.items()}
    assert_expected_inline(str(found), """{'few': True, 'many': False, 'many tokens': False, 'few tokens': True, 'fp64': False, '6 columns': False}""")


def test_ops_that_decide_on_the_host_stay_out_of_cuda_graphs():
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_kernels::")]
    names += [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_moe::")]
    def unsafe(name):
        op = getattr(torch.ops.moe_kernels, name).default
        return torch.Tag.cudagraph_unsafe in op.tags
    assert_expected_inline("\n".join(f"{'host' if unsafe(name) else 'device':<6}  {name}" for name in sorted(names)), """\
device  count_experts
device  fork_stream
device  join_stream
device  place_in_column
device  plan_permutation
device  product_in
host    rows_times_rows
host    rows_times_weights
host    running_mean
device  scatter_columns
device  sinkhorn
host    update_once
device  value_in_backward""")


def test_overlap_with_cuda_graphs_is_refused():
    """mode="reduce-overhead" sets this switch; graphs of one memory pool must not be replayed on two streams."""
    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    layer = MoELayer(MoEConfig(32, 24, 4, 2, shared_expert_intermediate_size=40, shared_expert_overlap=True))
    x = torch.randn(20, 32, requires_grad=True)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        with pytest.raises(Exception, match="compile without them, or without overlap"):
            captured(layer, x)


def test_index_nowhere_gives_the_routers_gradient():
    """transformers #48687: an index that computes a real expert leaves the loss right and the router's gradient wrong."""
    for options in (dict(), dict(apply_probs_on="input"), dict(apply_probs_on="output", add_bias_linear=True),
                    dict(score_function="sigmoid"), dict(pre_softmax=True)):
        layer = random_layer(MoEConfig(6, 5, 4, 3, params_dtype=torch.float64, router_dtype=torch.float64, **options))
        x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
        given = random_indices(7, 4, 3, nowhere=0.5)
        want, inputs = layer_loop(layer, x, given=given)[0], [x, *layer.parameters()]
        want_grads = grads(want.sin(), inputs)
        for function in (layer, compiled(layer)):
            got = function(x, topk_indices=given)
            close(got, want)
            for a, b in zip(grads(got.sin(), inputs), want_grads, strict=True):
                close(a, b)


def test_index_nowhere_gives_its_prob_no_gradient():
    """Whatever the prob there is, and with every bias."""
    indices = torch.tensor([[0, 3], [3, 1], [2, 0]])                  # of three experts: 3 is nowhere
    plan, probs = plan_permutation(indices, 3), torch.rand(3, 2, requires_grad=True)
    weights = [torch.randn(shape) for shape in ((3, 2, 5, 6), (3, 6, 5), (3, 2, 5), (3, 6))]
    for probs_on in ("input", "activation", "output"):
        grad = grads(expert_mlp(torch.randn(3, 6), probs, plan, *weights, probs_on=probs_on).sum(), [probs])[0]
        assert torch.equal(grad == 0, indices == 3)


def three_layers(**options) -> torch.nn.Module:
    """Dense and MoE layers in turn."""
    config = MoEConfig(8, 4, 6, 2, **options)
    return torch.nn.Sequential(*[part for _ in range(3) for part in (torch.nn.Linear(8, 8), MoELayer(config))])


@pytest.mark.parametrize("way", WAYS)
def test_record_and_replay(way):
    """verl #7340, #5037: what is recorded is what each router chose, in module order; a replay takes effect, in each
    router with its own record, and the recomputation of a checkpoint replays the same."""
    model, x = three_layers(enable_expert_bias=True, score_function="sigmoid"), torch.randn(9, 8, requires_grad=True)
    function, chosen, y = WAYS[way](model), [], x.detach()
    for part in model:
        if isinstance(part, MoELayer):
            with torch.no_grad():
                chosen.append(part.router.route(y)[1])
        y = part(y)
    with record_routing(model) as record:
        want = function(x)
        want.sum().backward()
    same(record.indices, chosen)
    others = [torch.rand(9, 6).argsort(1)[:, :2] for _ in range(3)]
    leaves, results = [x, *model.parameters()], []
    for indices in (others, torch.stack(others)):
        model.zero_grad()
        x.grad = None
        with replay_routing(model, indices), record_routing(model) as record:
            got = function(x)
            got.sum().backward()
        same(record.indices, others)
        results.append([got, *[leaf.grad for leaf in leaves]])
    y = x
    for i, part in enumerate(model):
        y = part(y, topk_indices=others[i // 2]) if i % 2 else part(y)
    expected = [y, *grads(y, leaves)]
    for result in results:
        for a, b in zip(result, expected, strict=True):
            close(a, b, 1e-5)
    close(function(x), want, 1e-6)                                    # and nothing stays behind


def test_record_holds_the_choice_before_dropping():
    """E where padding is; in eval too; the latest forward; it stays after the context."""
    model = three_layers(capacity_factor=0.25)
    mask = torch.arange(9) % 4 == 1
    router = model[1].router
    for function in (router.route, compiled(router.route)):
        with record_routing(model) as record:
            assert record.indices == [None] * 3
            function(torch.randn(4, 8))
            router.eval()
            x = torch.randn(9, 8)
            dropped = function(x, mask)[1]
        router.train()
        assert record.indices[1:] == [None] * 2 and (record.indices[0] == 6).equal(mask[:, None].expand(9, 2))
        assert (dropped == 6).sum() > (record.indices[0] == 6).sum()
        with replay_routing(model, [record.indices[0].where(~mask[:, None], -1), *record.indices[1:]]):      # -1 is E
            same(function(x)[1], dropped)
    with torch.inference_mode(), record_routing(model) as record:
        model(x)
    with replay_routing(model, record.indices):                       # tensors of inference mode, used in training
        model(x).sum().backward()


def test_replay_refuses_what_does_not_fit():
    model, x = three_layers(enable_expert_bias=True, score_function="sigmoid"), torch.randn(5, 8)
    good = [torch.rand(5, 6).argsort(1)[:, :2] for _ in range(3)]

    def replayed(*indices):
        with replay_routing(model, indices):
            model(x)

    def nested(context, *args):
        with context(model, *args), context(model, *args):
            pass
    lines = [error(replayed, *good[:2]), error(nested, replay_routing, good), error(nested, record_routing),
             error(record_routing(torch.nn.Linear(2, 2)).__enter__)]
    for bad in (good[1][:4], good[1][:, :1], good[1].float()):
        update_expert_bias(model)
        lines.append(error(replayed, good[0], bad, good[2]))
        counted = [model[i].router.local_tokens_per_expert.sum().item() for i in (1, 3, 5)]
        assert counted == [10, 0, 0]                                  # the router that refuses has changed nothing
    with pytest.raises(ZeroDivisionError):
        with replay_routing(model, good), record_routing(model):
            1 / 0
    assert all(not router._recording and router._replayed is None for router in moe._routers(model))
    assert_expected_inline("\n".join(lines), """\
ValueError: indices is for 2 layers; the model has 3 routers: 1.router, 3.router, 5.router
ValueError: model is replaying already; leave replay_routing first
ValueError: model is being recorded already; leave record_routing first
ValueError: model (Linear) has no TopKRouter
ValueError: indices of 3.router is [4, 2] torch.int64; needs [5, 2] or [5, 2] torch.int64
ValueError: indices of 3.router is [5, 1] torch.int64; needs [5, 2] or [5, 2] torch.int64
ValueError: indices of 3.router is [5, 2] torch.float32; needs [5, 2] or [5, 2] torch.int64""")


def test_replay_recompiles_once():
    model, x = three_layers(), torch.randn(5, 8)
    function = compiled(model)
    function(x)
    for _ in range(4):
        with replay_routing(model, [torch.rand(5, 6).argsort(1)[:, :2] for _ in range(3)]):
            function(x)
        function(x)
    assert counters["stats"]["unique_graphs"] == 2
    for _ in range(3):
        with record_routing(model):
            function(x)
    assert counters["stats"]["unique_graphs"] == 3


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
    layer = MoELayer(MoEConfig(H, F_, 16, K, params_dtype=dtype))
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
    """T·H + T·ℓ + N·2F elements, indices, probs: down · x is computed again, and so is the norm."""
    T, H, width, F_, K = 512, 512, 256, 64, 4
    layer = MoELayer(MoEConfig(H, F_, 16, K, latent_size=width, latent_norm=norm))
    x = torch.randn(T, H, requires_grad=True)
    least = 4 * (T * H + T * width + T * K * 2 * F_)
    small = T * K * (8 + 8 + 4) + 4 * T * 16
    for call in (layer, compiled(layer, "inductor")):
        kept = saved_bytes(lambda: call(x), exclude=layer.parameters())
        assert least <= kept <= 1.01 * least + small


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_compile_bitwise_repeatable(backend):
    layer = MoELayer(MoEConfig(
        64, 32, 16, 4, load_balancing_type="aux_loss", aux_loss_coeff=0.1, add_bias_linear=True))
    function = layer
    if backend is not None:
        function = compiled(layer, backend)
    x = torch.randn(257, 64, requires_grad=True)
    upstream = torch.linspace(-1, 1, x.numel()).view_as(x)
    first = outcome(function, x, layer, upstream)
    for _ in range(20):
        same(outcome(function, x, layer, upstream), first)


def test_compile_fp8_store_halves_what_bf16_keeps():
    layer = MoELayer(MoEConfig(
        64, 32, 16, 8, params_dtype=torch.bfloat16, activation_fp8_input_store=True))
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
        8, 4, 16, 8, load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1,
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
        probs, routing_map, 2, 1.0, pad_to_capacity=True)
    rows, row_probs, index = permute(
        tokens, pad_routing_map(routing_map, 2), probs, num_out_tokens=T * 4)
    out = unpermute(rows * row_probs[:, None], index, tokens.shape, probs, routing_map)

    indices = topk_routing_with_score_function(logits, 2, dense_output=True)[1]
    plan = plan_permutation(indices, E)
    gathered = gather_rows(tokens, plan)
    out = out + combine_rows(grouped_mm(gathered, w, plan.offsets), plan, probs[:, :2])
    out = out + latent_up(combine_rows(gathered, plan), w[0], w[1, 0], 1e-5)
    chunks = sort_chunks_by_idxs(gathered, plan.counts, torch.arange(E - 1, -1, -1))[0]

    map_TE, scores = compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    counts = map_TE.sum(0)
    loss = switch_load_balancing_loss_func(scores, counts, T, 2, E, 0.1) + z_loss_func(logits, 0.1)
    bias = get_updated_expert_bias(counts.float(), bias, 0.1)
    bias = bias + quantile_expert_bias(required_bias_histogram(scores, bias, 2, 50), bias, 2)
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
        got, want = function(*args), all_kernels(*args)
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
    token, offsets = plan.order // 2, plan.offsets
    x, w, b = torch.randn(9, 8), torch.randn(4, 6, 8), torch.randn(4, 6)
    h, scale = torch.randn(18, 6), torch.rand(18, 1)
    wide, narrow = torch.float64, torch.float32
    for op, args in [
            (kernels._plan_permutation, (indices, 4)),
            (kernels.value_in_backward, (torch.ones(()), x)),
            (kernels._place_in_column, (x,)),
            (kernels._scatter_columns, (torch.rand(9, 2), indices, 4)),
            (kernels._scatter_columns, (indices, indices, 4, 7)),
            (kernels._sinkhorn, (x, 1e-4, None)),
            (kernels._rows_times_weights, (x, token, scale, w.transpose(1, 2), b, offsets)),
            (kernels._rows_times_weights, (h, None, None, w, None, offsets)),
            (kernels._rows_times_rows, (x, token, h, None, scale, offsets)),
            (kernels._rows_times_rows, (h, None, x, token, scale, offsets)),
            (kernels._product_in, (torch.randn(4, 9), x, wide, narrow)),
            (kernels.count_experts, (indices, 4)),
            (moe._update_once, (torch.zeros(4), torch.ones(4), True)),
            (moe._running_mean, (torch.zeros(4), torch.zeros(()), torch.ones(4)))]:
        torch.library.opcheck(op, args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compile_cuda_layer_matches_cpu():
    layer = MoELayer(MoEConfig(64, 32, 8, 2))
    x = torch.randn(100, 64)
    want = layer(x)
    gpu = copy.deepcopy(layer).cuda().bfloat16()
    x_gpu = x.cuda().bfloat16().requires_grad_()
    for function in (gpu, compiled(gpu, "inductor")):
        first = outcome(function, x_gpu, gpu)
        close(first[0].float().cpu(), want, 0.05)
        for _ in range(20):
            same(outcome(function, x_gpu, gpu), first)


# ---- Files: copied, run, benchmarked ----

def run(*args, cwd=HERE, timeout=300, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, timeout=timeout, capture_output=True, text=True,
                          env={**os.environ, **env})


def test_three_files_copied_elsewhere(tmp_path):
    """Into a folder, and into a package; both at once in one process, so that their ops must not collide."""
    package = tmp_path / "package"
    package.mkdir(), (package / "__init__.py").touch()
    for folder in (tmp_path, package):
        for name in ("kernels.py", "moe.py", "parallel.py"):
            shutil.copy(HERE / name, folder)
    code = ("import torch, moe, package.moe as pm; x = torch.ones(3, 8)\n"
            "for m in (moe, pm): print(tuple(m.MoELayer(m.MoEConfig(8, 4, 4, 2))(x).shape), m.kernels.__name__)")
    done = run("-W", "error::SyntaxWarning", "-c", code, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["(3, 8) kernels", "(3, 8) package.kernels"], done.stderr


def test_sources_import_torch_and_einops_alone():
    standard = {"abc", "collections", "contextlib", "dataclasses", "enum", "functools", "math", "re", "types", "typing"}
    for name, local in [("kernels.py", set()), ("parallel.py", set()), ("moe.py", {"kernels", "parallel"}),
                        ("families.py", {"moe", "operator"})]:
        text = (HERE / name).read_text()
        found = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))
        if name == "families.py":                     # inside the one function that needs it
            found -= set(re.findall(r"^        from (transformers)\b", text, re.M))
        assert found <= {"torch", "einops"} | standard | local, found


TINY = "--steps 6 --layers 1 --hidden 16 --experts 4 --batch 2 --context 32 --save-every 3 --no-compile --dtype float32".split()


def test_train_resumes_bit_for_bit(tmp_path, capsys):
    """Stopped at step 3 by an exception in step 4, resumed: the same weights and optimizer state as in one go."""
    data = tmp_path / "data"
    data.mkdir()
    for i in range(10):
        (data / f"{i}.txt").write_text(f"file {i}: " + "all work and no play " * 60)
    whole = run(HERE / "train.py", *TINY, "--data", data, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    stop = ("import sys, train\nreal = train.get_batch\n"
            "def get_batch(data, args, step, device):\n"
            "    if step == 4: raise SystemExit(7)\n"
            "    return real(data, args, step, device)\n"
            "train.get_batch = get_batch\ntrain.main()")
    cut = run("-c", stop, *TINY, "--data", data, "--out", tmp_path / "cut", PYTHONPATH=str(HERE))
    assert cut.returncode == 7, cut.stderr
    resumed = run(HERE / "train.py", *TINY, "--data", data, "--out", tmp_path / "cut", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    files = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "cut")]
    same(files[0]["model"], files[1]["model"])
    same(files[0]["optimizer"]["state"], files[1]["optimizer"]["state"])

    import train
    path, settings = tmp_path / "cut" / "checkpoint.pt", files[1]["settings"]
    good = path.read_bytes()
    assert train.load_checkpoint(path, settings)["step"] == 6
    for content in (good[:len(good) // 2], b"not a checkpoint", b""):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(SystemExit, match="2"):
            train.load_checkpoint(tmp_path / "bad.pt", settings)
        assert "train.py: error: --resume: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        train.load_checkpoint(path, {**settings, "experts": 8})
    assert "experts (checkpoint 4, now 8)" in capsys.readouterr().err and path.read_bytes() == good


def start_train(ranks: int, *args) -> list[subprocess.Popen]:
    """train.py in `ranks` processes, as torchrun starts them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}
    return [subprocess.Popen([sys.executable, "train.py", *map(str, args)], cwd=HERE, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(ranks)]


def finish_train(processes, kill_last_at: Path | None = None) -> list[int]:
    """Exit codes; with a path, the last process is killed as soon as that file is there."""
    try:
        deadline = time.monotonic() + 120
        while kill_last_at is not None and not kill_last_at.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if kill_last_at is not None:
            processes[-1].kill()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert kill_last_at is not None or not any(p.returncode for p in processes), outputs
        return [process.returncode for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_parallel_train_with_a_killed_rank(tmp_path):
    """Two ranks follow one process's curve; one is killed, the other ends with an error, --resume goes on bit for bit;
    a checkpoint of ep 2 goes on at ep 1, and one of ep 1 at ep 2; with FSDP too."""
    (tmp_path / "text").write_bytes(b"".join(b"%d squared is %d\n" % (i, i * i) for i in range(2000)))
    common = ("--data", tmp_path / "text", "--steps", 20, "--layers", 1, "--hidden", 16, "--experts", 4, "--batch", 2,
              "--context", 32, "--save-every", 8, "--shared", 16, "--no-compile", "--dtype", "float32")

    def losses(name):
        records = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        assert [r["step"] for r in records] == list(range(1, 21))
        return torch.tensor([r["loss"] for r in records], dtype=torch.float64)
    runs = [start_train(2, *common, "--ep", 2, "--overlap", "--out", tmp_path / "two"),
            start_train(1, *common, "--overlap", "--out", tmp_path / "one")]
    for processes in runs:
        finish_train(processes)
    close(losses("two"), losses("one"), 1e-5)

    killed, alone = (tmp_path / name / "checkpoint.pt" for name in ("killed", "alone"))
    runs = [start_train(2, *common, "--ep", 2, "--overlap", "--out", tmp_path / "killed"),
            start_train(1, *common, "--overlap", "--out", tmp_path / "alone")]
    codes = [finish_train(processes, kill_last_at=path) for processes, path in zip(runs, (killed, alone))]
    assert all(codes[0]) and len(codes[0]) == 2, codes
    shutil.copytree(tmp_path / "killed", tmp_path / "killed1"), shutil.copytree(tmp_path / "alone", tmp_path / "alone2")
    resumed = [start_train(ranks, *common, "--overlap", *more, "--out", tmp_path / name, "--resume")
               for name, ranks, *more in (("killed", 2, "--ep", 2), ("killed1", 1), ("alone2", 2, "--ep", 2, "--fsdp"))]
    for processes in resumed:
        finish_train(processes)
    same(losses("killed"), losses("two"))
    close(losses("killed1"), losses("one"), 1e-5), close(losses("alone2"), losses("one"), 1e-5)


def test_train_refuses_settings_that_do_not_fit(capsys):
    import train
    for args in ("--ep 2", "--overlap", "--topk 9", "--hidden 3", "--steps 0", "--lr nan"):
        with pytest.raises(SystemExit, match="2"):
            train.parse_args(args.split())
    assert_expected_inline(capsys.readouterr().err, """\
train.py: error: --ep is 2; needs to divide the 1 processes (torchrun --nproc-per-node 2 train.py ..) and --experts = 8
train.py: error: --overlap needs a shared expert: set --shared SIZE
train.py: error: --topk is 9; a byte cannot go to more experts than --experts = 8
train.py: error: --hidden is 3; needs an even number, rotary embeddings turn pairs
train.py: error: --steps is 0; needs 1 or more
train.py: error: --lr is nan; needs a positive number
""")


def test_bench_runs_quickly(tmp_path):
    """The shortest of its commands; .ci/run runs the others."""
    done = run(HERE / "bench.py", "overlap", "--quick", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["targets"][0]["value"] == 0 and data["targets"][0]["reached"] == "reached"


# ---- Published models ----
#
# For each family, written from its published equations and nothing else: a small config with the published field names,
# tensors under the published names, and a forward of one token at a time.

E8, H6, F5, T7 = 8, 6, 5, 7                          # a shared expert has Fs = F5, F5 · 2 or 4; K is 3, or 1 for llama4
L4, V9 = 4, 9                                        # the latent size; a hash layer's vocabulary


def fam_normal(shapes: dict, dtype=torch.float64) -> dict[str, Tensor]:
    """Always the same numbers; a bias that only chooses is fp32, and small enough to leave the scores their say."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        chooses = "expert_bias" in name or "correction" in name or name.endswith("gate.bias")
        found[name] = torch.randn(*shape, generator=generator, dtype=torch.float64) * (0.2 if chooses else 0.7)
        found[name] = found[name].to(torch.float32 if chooses else dtype)
    return found


def fam_each(gate: str, up: str, down: str, H: int = H6) -> dict:
    return {f"experts.{e}.{name}.weight": (H, F5) if name == down else (F5, H)
            for e in range(E8) for name in (gate, up, down) if name}


def fam_shared(name: str, Fs: int, names=("gate_proj", "up_proj", "down_proj")) -> dict:
    gate, up, down = (f"{name}.{part}.weight" for part in names)
    return {gate: (Fs, H6), up: (Fs, H6), down: (H6, Fs)}


def silu(a):
    return a / (1 + (-a).exp())


def fam_ffn(x, gate, up, down, act=lambda a, b: silu(a) * b):
    return down @ act(gate @ x, up @ x)


def situ(beta: float, linear_beta: float | None):
    """beta·tanh(a/beta)·sigmoid(a) times b; with linear_beta b is squashed in the same way."""
    def act(a, b):
        squashed = b if linear_beta is None else linear_beta * (b / linear_beta).tanh()
        return beta * (a / beta).tanh() / (1 + (-a).exp()) * squashed
    return act


def oai_glu(limit: float):
    def act(a, b):
        gate, up = a.clamp(max=limit), b.clamp(-limit, limit)
        return (up + 1) * gate / (1 + (-1.702 * gate).exp())
    return act


def clamped_swiglu(limit: float):
    return lambda a, b: silu(a.clamp(max=limit)) * b.clamp(-limit, limit)


def over_chosen(logits, c, t, K):
    chosen = best(list(logits), K)
    return list(zip(chosen, score_loop([logits[e] for e in chosen], "softmax")))


def over_all(logits, c, t, K, norm=False, scale=1.0):
    scores = score_loop(list(logits), "softmax")
    chosen = best(scores, K)
    total = sum(scores[e] for e in chosen) if norm else 1.0
    return [(e, scores[e] / total * scale) for e in chosen]


def by_config(logits, c, t, K):
    return over_all(logits, c, t, K, c["norm_topk_prob"])


def v2_route(logits, c, t, K):
    """Groups by their one best score, the others' scores are 0; no normalising, but a factor."""
    scores = score_loop(list(logits), "softmax")
    if c["topk_method"] == "group_limited_greedy":
        size = E8 // c["n_group"]
        tops = [max(s.item() for s in scores[g * size:(g + 1) * size]) for g in range(c["n_group"])]
        kept = best(tops, c["topk_group"])
        scores = [s if e // size in kept else 0.0 * s for e, s in enumerate(scores)]
    return [(e, scores[e] * c["routed_scaling_factor"]) for e in best(scores, K)]


def sigmoid_route(logits, c, t, K, bias=None, eps=1e-20, norm=True, scale=1.0, groups=1, kept_groups=1):
    """Chosen by sigmoid + bias, in the groups with the best sum of two; weighed by the sigmoid."""
    scores = score_loop(list(logits), "sigmoid")
    biased = [s.item() + (0.0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
    size = E8 // groups
    kept = best([sum(sorted(biased[g * size:(g + 1) * size])[-2:]) for g in range(groups)], kept_groups)
    chosen = best([b if e // size in kept else -INF for e, b in enumerate(biased)], K)
    total = sum(scores[e] for e in chosen) + eps if norm else 1.0
    return [(e, scores[e] / total * scale) for e in chosen]


def v3_route(logits, c, t, K):
    return sigmoid_route(logits, c, t, K, t["gate.e_score_correction_bias"], 1e-20, c["norm_topk_prob"],
                         c["routed_scaling_factor"], c["n_group"], c["topk_group"])


def ernie_route(logits, c, t, K):
    scores = score_loop(list(logits), "softmax")
    chosen = best([s.item() + b.item() for s, b in zip(scores, t["moe_statics.e_score_correction_bias"][0])], K)
    total = sum(scores[e] for e in chosen).clamp(min=1e-12)
    return [(e, scores[e] / total) for e in chosen]


def kimi_route(logits, c, t, K):
    return sigmoid_route(logits, c, t, K, t["gate.e_score_correction_bias"],
                         norm=c["moe_renormalize"], scale=c["routed_scaling_factor"])


def bailing_route(logits, c, t, K):
    return v3_route(logits, c, {"gate.e_score_correction_bias": t["gate.expert_bias"]}, K)


def v4_route(logits, c, t, K):
    """Chosen by sqrt(softplus) + bias, weighed by sqrt(softplus), normalised, times a factor."""
    scores = [(1 + logit.exp()).log().sqrt() for logit in logits]
    chosen = best([s.item() + b.item() for s, b in zip(scores, t["gate.bias"])], K)
    total = sum(scores[e] for e in chosen)
    return [(e, scores[e] / total * c["routed_scaling_factor"]) for e in chosen]


def mistral_route(logits, c, t, K):
    """Softmax over all, in the groups with the best sum of two; normalised, times a factor."""
    scores = score_loop(list(logits), "softmax")
    size = E8 // c["n_group"]
    groups = [scores[g * size:(g + 1) * size] for g in range(c["n_group"])]
    kept = best([sum(sorted(s.item() for s in group)[-2:]) for group in groups], c["topk_group"])
    chosen = best([s.item() if e // size in kept else -INF for e, s in enumerate(scores)], K)
    total = sum(scores[e] for e in chosen)
    return [(e, scores[e] / total * c["routed_scaling_factor"]) for e in chosen]


def biased_by(name: str, scale: float):
    """Sigmoid plus the bias of that name, normalised, times a factor."""
    return lambda logits, c, t, K: sigmoid_route(logits, c, t, K, t[name], scale=scale)


def gpt_oss_expert(x, t, e):
    y = x @ t["experts.gate_up_proj"][e] + t["experts.gate_up_proj_bias"][e]
    act = oai_glu(1.5)(y[0::2], y[1::2])
    return act @ t["experts.down_proj"][e] + t["experts.down_proj_bias"][e]


def inkling2_expert(x, t, e):
    gate_and_up, down = t["experts.w13_weight"][e], t["experts.w2_weight"][e]
    return fam_ffn(x, gate_and_up[0::2], gate_and_up[1::2], down, act=situ(0.7, 1.2))


def by_names(*names: str, **act):
    """names: of the gate, up and down projections."""
    return lambda x, t, e: fam_ffn(x, *(t[f"experts.{e}.{name}.weight"] for name in names), **act)


def shared_by(
    name: str, gate: str | None = None, names=("gate_proj", "up_proj", "down_proj"), **act,
):
    def shared(x, t):
        y = fam_ffn(x, *(t[f"{name}.{part}.weight"] for part in names), **act)
        return y if gate is None else y / (1 + (-(t[gate] @ x)).exp())
    return shared


def kimi_up(r, t):
    """RMSNorm in the latent space, then back to H."""
    normed = r / (r.square().mean() + 1e-3).sqrt() * t["routed_expert_norm.weight"]
    return t["routed_expert_up_proj.weight"] @ normed


@dataclasses.dataclass
class Published:
    config: dict
    shapes: dict
    router: str                                       # name of [E, H]
    route: object
    expert: object
    shared: object = None
    block: tuple = ()                                 # the library's config and block, arguments
    down: object = None                               # of latent experts: into their space
    up: object = None                                 # and back


GUD, W132 = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SIZES = {"hidden_size": H6, "num_experts_per_tok": 3, "hidden_act": "silu"}
SMALL = {**SIZES, "intermediate_size": F5}
MOE_SIZED = {**SIZES, "moe_intermediate_size": F5, "intermediate_size": 17}
GROUPS = {"n_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
          "routed_scaling_factor": 2.5, "n_routed_experts": E8, "n_shared_experts": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.4, "norm_topk_prob": True, "n_routed_experts": E8,
             "n_shared_experts": 2}
GATE = {"gate.weight": (E8, H6)}
V3_SHAPES = {**GATE, "gate.e_score_correction_bias": (E8,), **fam_each(*GUD), **fam_shared("shared_experts", 2 * F5)}
V3 = dict(shapes=V3_SHAPES, router="gate.weight", route=v3_route, expert=by_names(*GUD),
          shared=shared_by("shared_experts"))
KIMI = {"hidden_size": H6, "hidden_act": "silu", "moe_intermediate_size": F5,
        "intermediate_size": 17, "num_experts": E8, "num_experts_per_token": 3,
        "num_shared_experts": 2, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "num_expert_group": 1, "topk_group": 1}
KIMI_SHAPES = {**GATE, "gate.e_score_correction_bias": (E8,),
               **fam_shared("shared_experts", 2 * F5)}


def relu2_of(name: str, x, t):
    return t[f"{name}.down_proj.weight"] @ (t[f"{name}.up_proj.weight"] @ x).clamp(min=0) ** 2


RELU2 = dict(
    router="gate.weight", route=v3_route, expert=lambda x, t, e: relu2_of(f"experts.{e}", x, t),
    shared=functools.partial(relu2_of, "shared_experts"))
QWEN2 = dict(
    shapes={**GATE, **fam_each(*GUD), **fam_shared("shared_expert", 4), "shared_expert_gate.weight": (1, H6)},
    router="gate.weight", route=by_config, expert=by_names(*GUD),
    shared=shared_by("shared_expert", "shared_expert_gate.weight"))

PUBLISHED = {
    "mixtral": Published(
        {**SMALL, "num_local_experts": E8, "router_jitter_noise": 0.0}, {**GATE, **fam_each(*W132)}, "gate.weight",
        over_chosen, by_names(*W132), block=("MixtralConfig", "MixtralSparseMoeBlock")),
    "granitemoe": Published(
        {**SMALL, "num_local_experts": E8},
        {"router.layer.weight": (E8, H6), "input_linear.weight": (E8, 2 * F5, H6), "output_linear.weight": (E8, H6, F5)},
        "router.layer.weight", over_chosen, lambda x, t, e: fam_ffn(
            x, t["input_linear.weight"][e, :F5], t["input_linear.weight"][e, F5:], t["output_linear.weight"][e]),
        block=("GraniteMoeConfig", "GraniteMoeMoE")),
    "jamba": Published(
        {**SMALL, "num_experts": E8}, {"router.weight": (E8, H6), **fam_each(*GUD)}, "router.weight", over_all,
        by_names(*GUD), block=("JambaConfig", "JambaSparseMoeBlock")),
    "olmoe": Published(
        {**SMALL, "num_experts": E8, "norm_topk_prob": False}, {**GATE, **fam_each(*GUD)}, "gate.weight", by_config,
        by_names(*GUD), block=("OlmoeConfig", "OlmoeSparseMoeBlock")),
    "qwen3_moe": Published(
        {**MOE_SIZED, "num_experts": E8, "norm_topk_prob": True}, {**GATE, **fam_each(*GUD)}, "gate.weight", by_config,
        by_names(*GUD), block=("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock")),
    "qwen2_moe": Published(
        {**MOE_SIZED, "num_experts": E8, "norm_topk_prob": False, "shared_expert_intermediate_size": 4}, **QWEN2,
        block=("Qwen2MoeConfig", "Qwen2MoeSparseMoeBlock")),
    "qwen3_next": Published(
        {**MOE_SIZED, "num_experts": E8, "norm_topk_prob": True, "shared_expert_intermediate_size": 4}, **QWEN2,
        block=("Qwen3NextConfig", "Qwen3NextSparseMoeBlock")),
    "deepseek_v2": Published(
        {**MOE_SIZED, "n_routed_experts": E8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
         "scoring_func": "softmax", "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
         "norm_topk_prob": False},
        {**GATE, **fam_each(*GUD), **fam_shared("shared_experts", 2 * F5)}, "gate.weight", v2_route, by_names(*GUD),
        shared_by("shared_experts"), ("DeepseekV2Config", "DeepseekV2Moe")),
    "deepseek_v3": Published({**MOE_SIZED, **GROUPS}, **V3, block=("DeepseekV3Config", "DeepseekV3MoE")),
    "kimi_k2": Published({**MOE_SIZED, **GROUPS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}, **V3),
    "glm4_moe": Published({**MOE_SIZED, **ONE_GROUP}, **V3, block=("Glm4MoeConfig", "Glm4MoeMoE")),
    "dots1": Published({**MOE_SIZED, **ONE_GROUP}, **V3, block=("Dots1Config", "Dots1MoE")),
    "llama4_text": Published(
        {**SMALL, "num_experts_per_tok": 1, "num_local_experts": E8, "intermediate_size_mlp": 17,
         "router_jitter_noise": 0.0},
        {"router.weight": (E8, H6), "experts.gate_up_proj": (E8, H6, 2 * F5), "experts.down_proj": (E8, F5, H6),
         **fam_shared("shared_expert", F5)}, "router.weight", functools.partial(sigmoid_route, norm=False),
        lambda x, t, e: fam_ffn(x, t["experts.gate_up_proj"][e, :, :F5].T, t["experts.gate_up_proj"][e, :, F5:].T,
                                t["experts.down_proj"][e].T),
        shared_by("shared_expert"), ("Llama4TextConfig", "Llama4TextMoe")),
    "gpt_oss": Published(
        {**SMALL, "num_local_experts": E8, "swiglu_limit": 1.5},
        {"router.weight": (E8, H6), "router.bias": (E8,), "experts.gate_up_proj": (E8, H6, 2 * F5),
         "experts.gate_up_proj_bias": (E8, 2 * F5), "experts.down_proj": (E8, F5, H6),
         "experts.down_proj_bias": (E8, H6)},
        "router.weight", over_chosen, gpt_oss_expert, block=("GptOssConfig", "GptOssMLP")),
    "ernie4_5_moe": Published(
        {"hidden_size": H6, "hidden_act": "silu", "moe_intermediate_size": F5, "intermediate_size": 17,
         "moe_num_experts": E8, "moe_k": 3, "moe_num_shared_experts": 2, "use_bias": False},
        {**GATE, "moe_statics.e_score_correction_bias": (1, E8), **fam_each(*GUD),
         **fam_shared("shared_experts", 2 * F5)},
        "gate.weight", ernie_route, by_names(*GUD), shared_by("shared_experts"),
        ("Ernie4_5_MoeConfig", "Ernie4_5_MoeSparseMoeBlock")),
    "minimax_m2": Published(
        {**SMALL, "num_local_experts": E8, "scoring_func": "sigmoid", "use_routing_bias": True,
         "shared_intermediate_size": 0},
        {**GATE, "e_score_correction_bias": (E8,), **fam_each(*W132)}, "gate.weight",
        lambda logits, c, t, K: sigmoid_route(logits, c, t, K, t["e_score_correction_bias"], eps=0.0), by_names(*W132),
        block=("MiniMaxM2Config", "MiniMaxM2SparseMoeBlock")),
    "hunyuan_v1_moe": Published(
        {"hidden_size": H6, "hidden_act": "silu", "intermediate_size": F5, "num_experts": E8, "moe_topk": [3] * 4,
         "moe_intermediate_size": [F5] * 4, "num_shared_expert": [1] * 4, "use_mixed_mlp_moe": True,
         "norm_topk_prob": True},
        {"gate.wg.weight": (E8, H6), **fam_each(*GUD), **fam_shared("shared_mlp", F5)}, "gate.wg.weight",
        functools.partial(over_all, norm=True), by_names(*GUD), shared_by("shared_mlp"),
        ("HunYuanMoEV1Config", "HunYuanMoEV1Moe")),
    "lfm2_moe": Published(
        {"hidden_size": H6, "num_experts_per_tok": 3, "moe_intermediate_size": F5, "intermediate_size": 17,
         "num_experts": E8, "norm_topk_prob": True, "routed_scaling_factor": 1.3, "use_expert_bias": True},
        {**GATE, "expert_bias": (E8,), **fam_each(*W132)}, "gate.weight",
        lambda logits, c, t, K: sigmoid_route(logits, c, t, K, t["expert_bias"], 1e-6, scale=1.3), by_names(*W132),
        block=("Lfm2MoeConfig", "Lfm2MoeSparseMoeBlock")),
    "nemotron_h": Published(
        {"hidden_size": H6, "num_experts_per_tok": 3, "moe_intermediate_size": F5,
         "moe_shared_expert_intermediate_size": 4, "mlp_hidden_act": "relu2", "mlp_bias": False, "n_group": 4,
         "topk_group": 2, "n_routed_experts": E8,
         "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {**GATE, "gate.e_score_correction_bias": (E8,), **fam_each("", "up_proj", "down_proj"),
         "shared_experts.up_proj.weight": (4, H6), "shared_experts.down_proj.weight": (H6, 4)},
        **RELU2, block=("NemotronHConfig", "NemotronHMoE")),
    "dbrx": Published(
        {"d_model": H6, "ffn_config": {"ffn_hidden_size": F5, "moe_num_experts": E8, "moe_top_k": 3, "moe_jitter_eps": 0,
                                       "moe_normalize_expert_weights": 1.0}},
        {"router.layer.weight": (E8, H6), **{f"experts.mlp.{name}": (E8 * F5, H6) for name in ("w1", "v1", "w2")}},
        "router.layer.weight", functools.partial(over_all, norm=True), lambda x, t, e: fam_ffn(
            x, *(t[f"experts.mlp.{name}"][e * F5:(e + 1) * F5] for name in ("w1", "v1")),
            t["experts.mlp.w2"][e * F5:(e + 1) * F5].T), block=("DbrxConfig", "DbrxFFN")),
    "kimi_linear": Published(
        KIMI, {**KIMI_SHAPES, **fam_each(*W132)}, "gate.weight", kimi_route, by_names(*W132),
        shared_by("shared_experts"), ("KimiLinearConfig", "KimiLinearMoE")),
    "kimi_k3": Published(
        {**KIMI, "hidden_act": "situ", "activation_situ_beta": 0.8,
         "activation_situ_linear_beta": 1.5, "routed_expert_hidden_size": L4,
         "latent_moe_use_norm": True, "rms_norm_eps": 1e-3,
         "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc"},
        {**KIMI_SHAPES, **fam_each(*W132, L4), "routed_expert_down_proj.weight": (L4, H6),
         "routed_expert_up_proj.weight": (H6, L4), "routed_expert_norm.weight": (L4,)},
        "gate.weight", kimi_route, by_names(*W132, act=situ(0.8, 1.5)),
        shared_by("shared_experts", act=situ(0.8, 1.5)),
        down=lambda x, t: t["routed_expert_down_proj.weight"] @ x, up=kimi_up),
    "deepseek_v4": Published(
        {**SIZES, "moe_intermediate_size": F5, "n_routed_experts": E8, "n_shared_experts": 1,
         "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
         "routed_scaling_factor": 1.5, "swiglu_limit": 0.9, "num_hidden_layers": 2,
         "mlp_layer_types": ["moe", "moe"]},
        {**GATE, "gate.bias": (E8,), **fam_each(*W132), **fam_shared("shared_experts", F5, W132)},
        "gate.weight", v4_route, by_names(*W132, act=clamped_swiglu(0.9)),
        shared_by("shared_experts", names=W132, act=clamped_swiglu(0.9)),
        ("DeepseekV4Config", "DeepseekV4SparseMoeBlock", 1)),
    "inkling2_text": Published(
        {**SIZES, "moe_intermediate_size": F5, "n_routed_experts": E8, "route_scale": 2.5,
         "scoring_func": "sigmoid", "mlp_gate_softcap": 0.7, "mlp_up_softcap": 1.2},
        {**GATE, "gate.bias": (E8,), "experts.w13_weight": (E8, 2 * F5, H6),
         "experts.w2_weight": (E8, H6, F5)},
        "gate.weight", biased_by("gate.bias", 2.5), inkling2_expert,
        block=("Inkling2TextConfig", "Inkling2SparseMoeBlock")),
    "flint": Published(
        {**MOE_SIZED, "num_experts": E8, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 4},
        {**GATE, **fam_each(*GUD), **fam_shared("shared_expert", 4)}, "gate.weight",
        lambda logits, c, t, K: sigmoid_route(logits, c, t, K, norm=c["norm_topk_prob"]),
        by_names(*GUD), shared_by("shared_expert"), ("FlintConfig", "FlintSparseMoeBlock")),
    "mistral_large4_text": Published(
        {**MOE_SIZED, "n_routed_experts": E8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.3},
        {**GATE, **fam_each(*W132), **fam_shared("shared_experts", 2 * F5, W132)}, "gate.weight",
        mistral_route, by_names(*W132), shared_by("shared_experts", names=W132),
        ("MistralLarge4TextConfig", "MistralLarge4TextMoE")),
    "minimax_m3_vl_text": Published(
        {**SMALL, "hidden_act": "swigluoai", "num_local_experts": E8, "shared_intermediate_size": 4,
         "dense_intermediate_size": 17, "n_shared_experts": 1, "scoring_func": "sigmoid",
         "use_routing_bias": True, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
         "swiglu_limit": 0.9},
        {**GATE, "e_score_correction_bias": (E8,), **fam_each(*W132),
         **fam_shared("shared_experts", 4)},
        "gate.weight", biased_by("e_score_correction_bias", 2.0), by_names(*W132, act=oai_glu(0.9)),
        shared_by("shared_experts", act=oai_glu(0.9)),
        ("MiniMaxM3VLTextConfig", "MiniMaxM3VLSparseMoeBlock")),
    "bailing_hybrid": Published(
        {**MOE_SIZED, "num_experts": E8, "num_shared_experts": 2, "n_group": 4, "topk_group": 2,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
         "moe_router_enable_expert_bias": True},
        {**GATE, "gate.expert_bias": (E8,), **fam_each(*GUD),
         **fam_shared("shared_experts", 2 * F5)},
        "gate.weight", bailing_route, by_names(*GUD), shared_by("shared_experts"),
        ("BailingHybridConfig", "BailingHybridMoE")),
    "axk2": Published(
        {**MOE_SIZED, **ONE_GROUP, "n_group": None, "topk_group": None},
        V3_SHAPES, "gate.weight", biased_by("gate.e_score_correction_bias", 1.4), by_names(*GUD),
        shared_by("shared_experts"), ("AXK2Config", "AXK2MoE")),
    "dots3_note_text": Published(
        {**MOE_SIZED, **GROUPS, "shared_experts_intermediate_size": 2},
        {**V3_SHAPES, **fam_shared("shared_experts", 2 * 2)}, "gate.weight", v3_route,
        by_names(*GUD), shared_by("shared_experts"), ("Dots3NoteTextConfig", "Dots3NoteTextMoE")),
    "beam": Published(
        {**MOE_SIZED, "num_experts": E8, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5},
        {**GATE, "gate.e_score_correction_bias": (E8,), **fam_each(*GUD)}, "gate.weight", v3_route,
        by_names(*GUD), block=("BeamConfig", "BeamMoE")),
    "qwen4_exp_text": Published(
        {**MOE_SIZED, "num_experts": E8, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 4},
        **QWEN2, block=("Qwen4ExpTextConfig", "Qwen4ExpTextSparseMoeBlock")),
}
EVERY_FAMILY = pytest.mark.parametrize("model_type", PUBLISHED)


def published_loop(model_type: str, x: Tensor, t: dict) -> Tensor:
    """The family's block, one token at a time."""
    p, rows = PUBLISHED[model_type], []
    fields = {**p.config, **p.config.get("ffn_config", {})}
    names = "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"
    K = next(fields[name] for name in names if name in fields)
    for x_H in x.flatten(0, -2):
        logits = t[p.router] @ x_H + (t["router.bias"] if "router.bias" in t else 0.0)
        chosen = p.route(logits, p.config, t, K[0] if isinstance(K, list) else K)
        z = x_H if p.down is None else p.down(x_H, t)
        if model_type == "llama4_text":
            y = sum(p.expert(weight * z, t, e) for e, weight in chosen)
        else:
            y = sum(weight * p.expert(z, t, e) for e, weight in chosen)
        y = y if p.up is None else p.up(y, t)
        rows.append(y if p.shared is None else y + p.shared(x_H, t))
    return torch.stack(rows).view(x.shape)


def fam_config(model_type: str, dtype=torch.float64, **fixed) -> MoEConfig:
    config = families.config_from_hf({"model_type": model_type, **PUBLISHED[model_type].config, **fixed})
    return dataclasses.replace(config, params_dtype=dtype, router_dtype=torch.promote_types(dtype, torch.float32))


def fam_tensors(model_type: str, dtype=torch.float64, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: t for name, t in fam_normal(PUBLISHED[model_type].shapes, dtype).items()}


def fam_layer(model_type: str, dtype=torch.float64) -> MoELayer:
    return families.from_hf(MoELayer(fam_config(model_type, dtype)), fam_tensors(model_type, dtype), model_type)


AS_HELD = {                                           # model_type -> published name -> name held
    "ernie4_5_moe": {
        "moe_statics.e_score_correction_bias": "gate.moe_statics.e_score_correction_bias"},
    "minimax_m3_vl_text": {"e_score_correction_bias": "gate.e_score_correction_bias"},
    "bailing_hybrid": {"gate.expert_bias": "gate.e_score_correction_bias"},
    "inkling2_text": {"gate.bias": "gate.e_score_correction_bias",
                      "experts.w2_weight": "experts.down_proj"}}
for _type in ("deepseek_v4", "mistral_large4_text"):
    AS_HELD[_type] = {f"shared_experts.{a}.weight": f"shared_experts.{b}.weight" for a,
                      b in zip(W132, GUD)}
AS_HELD["deepseek_v4"]["gate.bias"] = "gate.e_score_correction_bias"


def as_held(model_type: str, t: dict) -> dict:
    """The same tensors as a loaded model holds them: those of the experts stacked, gate above up."""
    def stack(name):
        return torch.stack([t[f"experts.{e}.{name}.weight"] for e in range(E8)])
    held = {AS_HELD.get(model_type, {}).get(name, name): tensor for name, tensor in t.items()
            if not re.match(r"experts\.\d", name)}
    if model_type == "granitemoe":
        return {"router.weight": held["router.layer.weight"], "experts.gate_up_proj": held["input_linear.weight"],
                "experts.down_proj": held["output_linear.weight"]}
    if model_type == "inkling2_text":
        gate_and_up = held.pop("experts.w13_weight")
        held["experts.gate_up_proj"] = torch.cat([gate_and_up[:, 0::2], gate_and_up[:, 1::2]], 1)
    if model_type == "minimax_m3_vl_text":
        gate_and_up = [held.pop(f"shared_experts.{name}_proj.weight") for name in ("gate", "up")]
        held["shared_experts.gate_up_proj.weight"] = torch.cat(gate_and_up)
    if model_type == "nemotron_h":
        return {**held, "experts.up_proj": stack("up_proj"), "experts.down_proj": stack("down_proj")}
    for gate, up, down in (GUD, W132):
        if f"experts.0.{gate}.weight" in t:
            held["experts.gate_up_proj"] = torch.cat([stack(gate), stack(up)], 1)
            held["experts.down_proj"] = stack(down)
    return held


def test_families_are_those_listed_here():
    assert list(families.FAMILIES) == list(PUBLISHED)
    not_there = [name for name in PUBLISHED if name not in IN_THE_LIBRARY]
    assert not_there == ["kimi_k2", "kimi_k3"]


@EVERY_FAMILY
def test_families_match_published_loop(model_type):
    """Output, and gradients under the published names, eager and compiled in one graph."""
    prefix, t = "model.layers.3.mlp.", fam_tensors(model_type)
    layer = MoELayer(fam_config(model_type))
    other = {"model.layers.33.mlp.gate.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    assert families.from_hf(layer, {**other, **{prefix + name: x for name, x in t.items()}}, model_type, prefix) is layer
    leaves = {name: x.requires_grad_() for name, x in t.items() if "bias" not in name or model_type == "gpt_oss"}
    x = torch.randn(T7, 2, H6, dtype=torch.float64, requires_grad=True)
    want, upstream = published_loop(model_type, x, t), torch.randn(T7, 2, H6, dtype=torch.float64)
    want_grads = torch.autograd.grad(want, [x, *leaves.values()], upstream, materialize_grads=True)    # no tokens: zeros
    for function in (layer, compiled(layer)):
        got = function(x)
        close(got, want, 1e-8)
        gradients = copy.deepcopy(layer)
        x_grad, *by_parameter = grads(got, [x, *layer.parameters()], upstream)
        close(x_grad, want_grads[0], 1e-8)
        with torch.no_grad():
            for parameter, grad in zip(gradients.parameters(), by_parameter, strict=True):
                parameter.copy_(grad)
        named = families.to_hf(gradients, model_type)
        for name, grad in zip(leaves, want_grads[1:], strict=True):
            close(named[name], grad, 1e-8)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_families_through_inductor(model_type):
    """In fp32, as one graph; gradients of the family whose activation the others do not have."""
    layer, x = fam_layer(model_type, torch.float32), torch.randn(T7, H6)
    with torch.set_grad_enabled(model_type == "gpt_oss"):
        got = compiled(layer, "inductor")(x)
    close(got, published_loop(model_type, x.double(), fam_tensors(model_type)), 1e-5)
    if got.requires_grad:
        for a, b in zip(grads(got, list(layer.parameters())), grads(layer(x), list(layer.parameters())), strict=True):
            close(a, b, 1e-5)


@EVERY_FAMILY
def test_families_round_trip(model_type):
    """Both layouts in, one out: bitwise, in fp32 and bf16, under a prefix; the copies share nothing with the layer."""
    for dtype in (torch.float32, torch.bfloat16):
        t, layer = fam_tensors(model_type, dtype, "a.b."), MoELayer(fam_config(model_type, dtype))
        families.from_hf(layer, t, model_type, "a.b.")
        out = families.to_hf(layer, model_type, "a.b.")
        assert out.keys() == t.keys()
        for name in t:
            same(out[name], t[name])
            assert out[name].is_contiguous()
        held = MoELayer(fam_config(model_type, dtype))
        families.from_hf(held, as_held(model_type, fam_tensors(model_type, dtype)), model_type)
        same(held.state_dict(), layer.state_dict())
        again = MoELayer(fam_config(model_type, dtype))
        families.from_hf(again, out, model_type, "a.b.")
        same(again.state_dict(), layer.state_dict())
        before = copy.deepcopy(layer.state_dict())
        for tensor in out.values():
            tensor.zero_()
        same(layer.state_dict(), before)


def test_families_layouts_where_two_F_equal_H():
    """unsloth-zoo #849: at 2F = H a matrix has the same shape as its transpose, so no shape can tell the layout."""
    sizes = dict(hidden_size=6, num_experts_per_tok=2, num_local_experts=4, num_experts=4)
    for model_type, name, view in [
            ("qwen3_moe", "experts.gate_up_proj", lambda t: (t[:, :3], t[:, 3:])),                 # as held in memory
            ("granitemoe", "input_linear.weight", lambda t: (t[:, :3], t[:, 3:])),
            ("llama4_text", "experts.gate_up_proj", lambda t: (t[:, :, :3].mT, t[:, :, 3:].mT)),
            ("gpt_oss", "experts.gate_up_proj", lambda t: (t[:, :, 0::2].mT, t[:, :, 1::2].mT))]:
        width = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
        config = families.config_from_hf({"model_type": model_type, **sizes, width: 3})
        layer = MoELayer(config)
        tensors = families.to_hf(layer, model_type)
        if model_type == "qwen3_moe":
            gate, up, down = (torch.stack([tensors[f"experts.{e}.{part}_proj.weight"] for e in range(4)])
                              for part in ("gate", "up", "down"))
            tensors = {"gate.weight": tensors["gate.weight"], "experts.gate_up_proj": torch.cat((gate, up), 1),
                       "experts.down_proj": down}
        gate, up = view(tensors[name])
        assert tensors[name].shape == (4, 6, 6)
        same(gate, layer.experts.fc1[:, 0]), same(up, layer.experts.fc1[:, 1])
        other = families.from_hf(MoELayer(config), tensors, model_type)
        same(other.state_dict(), layer.state_dict())


IN_THE_LIBRARY = [model_type for model_type, published in PUBLISHED.items() if published.block]


@pytest.mark.parametrize("model_type", IN_THE_LIBRARY)
def test_families_match_the_library(model_type):
    """The library's own block on its own random weights: output and gradients; its config, as object and as dict, and
    its defaults."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    published = PUBLISHED[model_type]
    config_name, block_name, *others = published.block
    kwargs = {name: value[0] if isinstance(value, list) and name != "mlp_layer_types" else value
              for name, value in published.config.items()}
    if model_type == "gpt_oss":
        kwargs.pop("swiglu_limit")                    # theirs is always 7
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}      # hidden_size is divisible
    heads = {} if model_type == "dbrx" else heads
    theirs = getattr(transformers, config_name)(**kwargs, **heads)
    theirs._experts_implementation = "eager"
    if model_type == "dbrx":
        theirs.ffn_config.hidden_size = H6
    modeling = pytest.importorskip(type(theirs).__module__.replace("configuration_", "modeling_"))
    block = getattr(modeling, block_name)(theirs, *others)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.7)
    config = families.config_from_hf(theirs)
    assert config == families.config_from_hf(theirs.to_dict())
    assert config == families.config_from_hf({"model_type": model_type, **published.config, **(
        {"swiglu_limit": 7.0} if model_type == "gpt_oss" else {})})
    ends = "_size", "_experts", "_tok", "_token", "_k", "topk", "d_model"
    counts_of_shared = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    sizes = {name: value * 4 if name in ("n_routed_experts", "num_experts") else value for name, value in kwargs.items()
             if name.endswith(ends) and name not in counts_of_shared}
    if model_type == "dbrx":
        sizes["ffn_config"] = {name: value for name, value in kwargs["ffn_config"].items() if "normalize" not in name}
    by_default = getattr(transformers, config_name)(**sizes, **heads)
    layer_idx = 3 if model_type == "deepseek_v4" else None            # the first without a table
    assert families.config_from_hf(by_default, layer_idx) == families.config_from_hf(
        {"model_type": model_type, **sizes}, layer_idx)
    layer = families.from_hf(MoELayer(config), block.state_dict(), model_type)
    x = torch.randn(2, T7, H6, requires_grad=True)
    want, got = block(x.clone()), layer(x)
    want = (want[0] if isinstance(want, tuple) else want).view(x.shape)
    close(got, want, 1e-5)
    upstream, parameters = torch.randn(x.shape), dict(block.named_parameters())
    parameters = {name: p for name, p in parameters.items() if p.requires_grad}
    want_grads = torch.autograd.grad(want, [x, *parameters.values()], upstream, materialize_grads=True)
    x_grad, *got_grads = grads(got, [x, *layer.parameters()], upstream)
    close(x_grad, want_grads[0], 1e-5)
    with torch.no_grad():                             # their gradients into a layer: the same way as their weights
        theirs = {**block.state_dict(), **dict(zip(parameters, want_grads[1:]))}
        named = families.from_hf(copy.deepcopy(layer), theirs, model_type)
    for a, b in zip(got_grads, named.parameters(), strict=True):
        close(a, b, 1e-5)


def test_families_config_dtype_and_defaults():
    """The dtype is the config's; published defaults fill what is left out; text_config is looked into."""
    base = {"model_type": "deepseek_v3", "hidden_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 32,
            "num_experts_per_tok": 4}
    config = families.config_from_hf(base)
    assert (config.params_dtype, config.num_groups, config.group_topk, config.group_score_topk, config.scaling_factor,
            config.norm_topk_prob, config.shared_expert_intermediate_size) == (torch.float32, 8, 4, 2, 2.5, True, 16)
    for given in ({"torch_dtype": "bfloat16"}, {"dtype": torch.bfloat16}, {"dtype": "torch.bfloat16"}):
        assert families.config_from_hf({**base, **given}).params_dtype == torch.bfloat16
    assert families.config_from_hf(types.SimpleNamespace(**base)) == config
    outer, bf16 = {"model_type": "kimi_k25"}, dataclasses.replace(config, params_dtype=torch.bfloat16)
    assert families.config_from_hf({**outer, "text_config": base}) == config
    for text, given in ((base, {"dtype": "bfloat16"}), (base, {"torch_dtype": "bfloat16"}),
                        ({**base, "dtype": "bfloat16"}, {"torch_dtype": "float16"})):            # the inner one wins
        assert families.config_from_hf({**outer, "text_config": text, **given}) == bf16
        assert families.config_from_hf({**outer, "text_config": {**outer, "text_config": text}, **given}) == bf16
    assert families.config_from_hf({**base, "n_shared_experts": None}).shared_expert_intermediate_size is None
    oss = families.config_from_hf({"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
                                   "num_local_experts": 32, "num_experts_per_tok": 4})
    assert oss.activation == "quick_geglu"
    assert (oss.glu_alpha, oss.glu_linear_offset, oss.activation_clamp_value) == (1.702, 1.0, 7.0)
    dbrx = {"model_type": "dbrx", **PUBLISHED["dbrx"].config}
    assert families.config_from_hf(dbrx).norm_topk_prob is True
    dbrx["ffn_config"] = {**dbrx["ffn_config"], "moe_normalize_expert_weights": None}
    assert families.config_from_hf(dbrx).norm_topk_prob is False
    v2 = fam_config("deepseek_v2", topk_method="greedy")
    assert (v2.num_groups, v2.group_topk, v2.group_score_topk) == (None, None, None)
    assert fam_config("mixtral", hidden_act="gelu_pytorch_tanh").activation == "geglu"
    assert fam_config("dots1", n_group=None, topk_group=None) == fam_config("dots1")
    assert not fam_config("lfm2_moe", use_expert_bias=False).enable_expert_bias
    assert fam_config("qwen3_moe", norm_topk_prob=False).norm_topk_prob is False


def test_families_other_knobs_match_published_loop(monkeypatch):
    """What a config may say beside the small configs above: greedy V2, probs that are not normalised, no expert bias."""
    for model_type, fixed, drop in [
            ("deepseek_v2", {"topk_method": "greedy"}, ()), ("deepseek_v3", {"norm_topk_prob": False}, ()),
            ("qwen3_moe", {"norm_topk_prob": False}, ()), ("olmoe", {"norm_topk_prob": True}, ()),
            ("mixtral", {"num_experts_per_tok": 2}, ()), ("flint", {"norm_topk_prob": False}, ()),
            ("kimi_linear", {"moe_renormalize": False}, ()),
            ("mistral_large4_text", {"n_group": 1, "topk_group": 1}, ()),
            ("beam", {"n_group": 1, "topk_group": 1}, ())]:
        monkeypatch.setitem(PUBLISHED, model_type, dataclasses.replace(
            PUBLISHED[model_type], config={**PUBLISHED[model_type].config, **fixed}))
        x = torch.randn(T7, H6, dtype=torch.float64)
        close(fam_layer(model_type)(x), published_loop(model_type, x, fam_tensors(model_type)), 1e-8)


def test_families_nemotron_h_with_latent_experts(monkeypatch):
    """All that the other families are tested for, with experts narrower than the model."""
    plain = PUBLISHED["nemotron_h"]
    shapes = {**plain.shapes, **fam_each("", "up_proj", "down_proj", L4),
              "fc1_latent_proj.weight": (L4, H6), "fc2_latent_proj.weight": (H6, L4)}
    monkeypatch.setitem(PUBLISHED, "nemotron_h", dataclasses.replace(
        plain, config={**plain.config, "moe_latent_size": L4}, shapes=shapes,
        down=lambda x, t: t["fc1_latent_proj.weight"] @ x,
        up=lambda r, t: t["fc2_latent_proj.weight"] @ r))
    test_families_match_published_loop("nemotron_h")
    test_families_round_trip("nemotron_h")
    test_families_match_the_library("nemotron_h")


def test_families_kimi_linear_reads_what_kimi_k3_adds():
    """The outer type chooses the row; the inner one alone gives the same layer, or is refused."""
    text = {"model_type": "kimi_linear", **PUBLISHED["kimi_k3"].config}
    config = families.config_from_hf({"model_type": "kimi_k3", "text_config": text,
                                      "dtype": "bfloat16"})
    assert (config.latent_size, config.latent_norm, config.latent_norm_eps) == (L4, True, 1e-3)
    assert (config.activation, config.situ_beta, config.situ_linear_beta) == ("situ", 0.8, 1.5)
    assert config == dataclasses.replace(families.config_from_hf(text), params_dtype=torch.bfloat16)
    del text["hidden_act"]
    assert families.config_from_hf(text).activation == "situ"
    quantised = {**text, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert "situ_beta = 0.8" in error(families.config_from_hf, {**text, "hidden_act": "silu"})
    texts = [error(families.config_from_hf, {"model_type": "kimi_k3", "text_config": quantised}),
             error(families.to_hf, fam_layer("kimi_k3"), "deepseek_v3")]
    t = fam_tensors("kimi_k3", torch.float32)
    t["experts.0.w1.weight_packed"] = t.pop("experts.0.w1.weight").to(torch.uint8)
    t["experts.0.w1.weight_scale"] = torch.zeros(1, dtype=torch.uint8)
    texts.append(error(families.from_hf, fam_layer("kimi_k3", torch.float32), t, "kimi_k3"))
    assert_expected_inline(in_lines(texts), """\
ValueError: this kimi_k3 config cannot be expressed: quantization_config is given; needs dequantised weights and a
    config without it
ValueError: layer is no deepseek_v3 block: latent_size = 4 (needs None), latent_norm = True (needs False), situ_beta
    = 0.8 (needs 1.0), situ_linear_beta = 1.5 (needs None); build it with config_from_hf
ValueError: tensors do not make a kimi_k3 block, nothing was changed:
  experts.0.w1.weight [5, 4] is missing
  experts.0.w1.weight_packed is of quantised weights; dequantise them first
  experts.0.w1.weight_scale is of quantised weights; dequantise them first""")


@pytest.mark.parametrize("outer", ["inkling2", "mistral_large4", "minimax_m3_vl", "dots3_note",
                                   "qwen4_exp"])
def test_families_composite_models(outer):
    """The outer config and the outer name do as the text model's; the library's objects too."""
    text = f"{outer}_text"
    plain = fam_config(text, torch.float32)
    inner = {"model_type": text, **PUBLISHED[text].config}
    for config in ({"model_type": outer, "text_config": inner}, {"text_config": inner},
                   {"model_type": outer, "text_config": {**inner, "model_type": "minimax_m2"}},
                   {**inner, "model_type": outer}):          # dots3_note is published like this
        assert families.config_from_hf(config) == plain
    t = fam_tensors(text, torch.float32)
    layer = families.from_hf(MoELayer(plain), t, outer)
    same(families.to_hf(layer, outer), t)
    transformers = pytest.importorskip("transformers", reason="reads the configs of transformers")
    name = PUBLISHED[text].block[0]
    kwargs = {"num_attention_heads": 2, "num_key_value_heads": 2, **PUBLISHED[text].config}
    theirs = transformers.PreTrainedConfig()
    theirs.model_type, theirs.text_config = outer, getattr(transformers, name)(**kwargs)
    assert families.config_from_hf(theirs) == plain


def test_families_layers_that_differ():
    """DeepSeek-V4's first layers choose by a table: which layer it is has to be said."""
    def config(layer_idx=None, **fixed):
        text = {"model_type": "deepseek_v4", **PUBLISHED["deepseek_v4"].config,
                "num_hidden_layers": 4, **fixed}
        text = {name: value for name, value in text.items() if value != "left out"}
        return families.config_from_hf(text, layer_idx)

    def by_score(**fixed):
        return [config(layer_idx, **fixed).enable_expert_bias for layer_idx in range(4)]
    types = ["hash_moe", "hash_moe", "moe", "moe"]
    for given in ({"mlp_layer_types": types}, {"mlp_layer_types": "left out", "num_hash_layers": 2},
                  {"mlp_layer_types": None, "num_hash_layers": 2}):
        assert by_score(**given) == [False, False, True, True]
        assert config(3, **given) == config(mlp_layer_types=["moe"] * 4)
        assert config(0, **given) == config(mlp_layer_types=["hash_moe"] * 4)
    published = {"mlp_layer_types": "left out"}                       # three hash layers
    assert by_score(**published) == [False, False, False, True]
    assert config(num_hash_layers=0, **published) == config(3, **published)
    hunyuan = {"model_type": "hunyuan_v1_moe", **PUBLISHED["hunyuan_v1_moe"].config,
               "moe_topk": [3, 2, 1, 2]}
    assert families.config_from_hf(hunyuan, layer_idx=1).topk == 2
    kimi = {"model_type": "kimi_linear", **KIMI, "mlp_layer_types": ["dense", "sparse"]}
    v3 = {"model_type": "deepseek_v3", **PUBLISHED["deepseek_v3"].config, "first_k_dense_replace": 2}
    assert families.config_from_hf(v3, 2) == families.config_from_hf(v3)
    assert families.config_from_hf({**v3, "mlp_layer_types": ["sparse"] * 3}, 1) == families.config_from_hf(v3)
    assert families.config_from_hf(kimi, layer_idx=1) == families.config_from_hf(kimi)
    texts = [error(config, mlp_layer_types=types), error(config, **published),
             error(config, 4, mlp_layer_types=types), error(config, -1, mlp_layer_types=types),
             error(config, 1, mlp_layer_types=["moe", "dense"]),
             error(families.config_from_hf, hunyuan), error(families.config_from_hf, kimi, 0),
             error(families.config_from_hf, v3, 1)]
    assert_expected_inline(in_lines(texts), """\
ValueError: this deepseek_v4 config cannot be expressed: mlp_layer_types is 'hash_moe' or 'moe', by layer; needs
    layer_idx
ValueError: this deepseek_v4 config cannot be expressed: the first 3 layers are hash layers; needs layer_idx
ValueError: this deepseek_v4 config cannot be expressed: mlp_layer_types has 4 values; layer_idx is 4
ValueError: this deepseek_v4 config cannot be expressed: layer_idx is -1; needs 0 or more
ValueError: this deepseek_v4 config cannot be expressed: mlp_layer_types is 'dense'; needs 'moe' or 'hash_moe' or
    None
ValueError: this hunyuan_v1_moe config cannot be expressed: moe_topk is 3 or 2 or 1, by layer; needs layer_idx
ValueError: this kimi_linear config cannot be expressed: mlp_layer_types is 'dense'; needs 'sparse' or 'moe' or None
ValueError: this deepseek_v3 config cannot be expressed: the first 2 layers are dense; layer_idx is 1""")


def v4_hash_block():
    """(layer, published tensors with the table, table) of a hash layer."""
    config = fam_config("deepseek_v4", mlp_layer_types=["hash_moe", "hash_moe"])
    t = fam_tensors("deepseek_v4")
    del t["gate.bias"]
    table = torch.stack([torch.randperm(E8)[:3] for _ in range(V9)])
    return MoELayer(config), {**t, "gate.tid2eid": table}, table


def test_families_hash_layer():
    """The table stays with the caller: neither read nor unexpected, and not given back."""
    layer, t, table = v4_hash_block()
    lazy, plain = Lazy(t, True), {name: x for name, x in t.items() if name != "gate.tid2eid"}
    families.from_hf(layer, lazy, "deepseek_v4")
    assert sorted(lazy.loads) == sorted(plain) and layer.router.expert_bias is None
    same(families.to_hf(layer, "deepseek_v4"), plain)
    ids, x = torch.randint(V9, (T7, 2)), torch.randn(T7, 2, H6, dtype=torch.float64)
    rows = []
    for x_H, token in zip(x.flatten(0, 1), ids.flatten()):
        logits = {e: t["gate.weight"][e] @ x_H for e in table[token].tolist()}
        scores = {e: (1 + logit.exp()).log().sqrt() for e, logit in logits.items()}
        y = sum(score / sum(scores.values()) * 1.5 * PUBLISHED["deepseek_v4"].expert(x_H, t, e)
                for e, score in scores.items())
        rows.append(y + PUBLISHED["deepseek_v4"].shared(x_H, t))
    for function in (layer, compiled(layer)):
        close(function(x, topk_indices=table[ids]), torch.stack(rows).view(x.shape), 1e-8)
    missing = error(families.from_hf, MoELayer(fam_config("deepseek_v4")), t, "deepseek_v4")
    assert missing.splitlines()[1:] == ["  gate.bias [8] is missing"]


def test_families_hash_layer_matches_the_library():
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    published = {**PUBLISHED["deepseek_v4"].config, "mlp_layer_types": ["hash_moe", "moe"]}
    theirs = transformers.DeepseekV4Config(**published, num_attention_heads=2, vocab_size=V9)
    theirs._experts_implementation = "eager"
    modeling = pytest.importorskip(type(theirs).__module__.replace("configuration_", "modeling_"))
    block, (_, _, table) = modeling.DeepseekV4SparseMoeBlock(theirs, 0), v4_hash_block()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.7)
        block.gate.tid2eid.copy_(table)
    config = families.config_from_hf(theirs, layer_idx=0)
    assert config == families.config_from_hf(theirs.to_dict(), layer_idx=0)
    layer = families.from_hf(MoELayer(config), block.state_dict(), "deepseek_v4")
    ids, x = torch.randint(V9, (2, T7)), torch.randn(2, T7, H6, requires_grad=True)
    want, got = block(x, ids), layer(x, topk_indices=table[ids])
    close(got, want, 1e-5)
    upstream = torch.randn(x.shape)
    close(*(torch.autograd.grad(y, x, upstream)[0] for y in (got, want)), 1e-5)


def test_families_block_without_a_name_of_its_own():
    """Mistral Large 4: attention and norms lie under the same prefix, and are left alone. A text
    model that is saved without the rest has the shared expert's held names."""
    name, prefix = "mistral_large4_text", "layers.3."
    t = fam_tensors(name, torch.float32, prefix)
    around = {f"{prefix}{other}.weight": torch.zeros(2)
              for other in ("attention.wo", "ffn_norm", "gate_up")}
    blank = MoELayer(fam_config(name, torch.float32))
    layer = families.from_hf(blank, {**t, **around}, name, prefix)
    same(families.to_hf(layer, name, prefix), t)
    renamed = {prefix + AS_HELD[name].get(key, key): x
               for key, x in fam_tensors(name, torch.float32).items()}
    other = families.from_hf(MoELayer(layer.config), {**renamed, **around}, name, prefix)
    same(other.state_dict(), layer.state_dict())
    wrong = {**t, **around, f"{prefix}experts.0.w4.weight": torch.zeros(2),
             f"{prefix}experts.0.w1.scale": torch.zeros(2)}
    assert_expected_inline(in_lines([error(families.from_hf, layer, wrong, name, prefix)]), """\
ValueError: tensors do not make a mistral_large4_text block, nothing was changed:
  layers.3.experts.0.w4.weight is unexpected
  layers.3.experts.0.w1.scale is of quantised weights; dequantise them first""")


def in_lines(texts: list[str]) -> str:
    return "\n".join(textwrap.fill(line, 116, subsequent_indent="    ", drop_whitespace=True, replace_whitespace=False)
                     for text in texts for line in text.split("\n"))


def test_families_refused_configs():
    """Everything that would make another model is named; nothing is computed as something else."""
    def refused(model_type, **fixed):
        return error(families.config_from_hf, {"model_type": model_type, **PUBLISHED[model_type].config, **fixed})
    dbrx = PUBLISHED["dbrx"].config["ffn_config"]
    texts = [
        error(families.config_from_hf, {"model_type": "gpt2"}), error(families.config_from_hf, {}),
        error(families.config_from_hf, {"model_type": "phimoe"}),
        error(families.config_from_hf, {"model_type": "llama4", "quantization_config": {}, "text_config": {}}),
        refused("mixtral", hidden_act="gelu"), refused("mixtral", router_jitter_noise=0.1),
        refused("mixtral", num_local_experts=None, num_experts=4),
        refused("qwen3_moe", quantization_config={"quant_method": "fp8"}, dtype="float8_e4m3fn"),
        refused("qwen3_moe", num_experts_per_tok=[2, 2, 4]), refused("qwen3_moe", n_group=4, scoring_func="sigmoid"),
        refused("deepseek_v2", topk_method="noaux_tc"), refused("deepseek_v2", norm_topk_prob=True),
        refused("deepseek_v2", mlp_bias=True), refused("deepseek_v3", topk_method="greedy", scoring_func="softmax"),
        refused("ernie4_5_moe", use_bias=True, moe_norm_min=0.1), refused("minimax_m2", use_routing_bias=False),
        refused("hunyuan_v1_moe", moe_topk=[8, 4]),
        refused("hunyuan_v1_moe", moe_intermediate_size=[7, 7], num_shared_expert=2),
        refused("nemotron_h", mlp_hidden_act="silu"), refused("qwen3_moe", moe_latent_size=3),
        refused("nemotron_h", n_shared_experts=2),
        refused("jamba", norm_topk_prob=True), refused("llama4_text", hidden_act="relu"),
        refused("gpt_oss", hidden_act="gelu"),
        refused("dbrx", ffn_config={**dbrx, "moe_normalize_expert_weights": 2.0}),
        refused("dbrx", ffn_config={**dbrx, "moe_jitter_eps": 0.01, "ffn_act_fn": {"name": "gelu"}}),
        error(families.config_from_hf, {"model_type": "hy_v4"}),
        refused("kimi_linear", moe_router_activation_func="softmax", hidden_act="gelu"),
        refused("deepseek_v4", scoring_func="softmax", norm_topk_prob=False, n_shared_experts=2),
        refused("inkling2_text", scoring_func="softmax", hidden_act="gelu"),
        refused("flint", hidden_act="gelu", n_group=2),
        refused("mistral_large4_text", norm_topk_prob=False),
        refused("axk2", n_group=8, topk_group=4),
        refused("minimax_m3_vl_text", hidden_act="gelu", use_routing_bias=False,
                n_shared_experts=2),
        refused("bailing_hybrid", score_function="softmax", moe_router_enable_expert_bias=False),
        refused("dots3_note_text", mlp_bias=True),
        refused("beam", scoring_func="softmax", n_shared_experts=1),
        refused("qwen4_exp_text", scoring_func="sigmoid"),
        error(families.config_from_hf, {"model_type": "mixtral"})]
    assert_expected_inline(in_lines(texts), """\
ValueError: model_type is 'gpt2'; known: mixtral, granitemoe, jamba, olmoe, qwen3_moe, qwen2_moe, qwen3_next,
    deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, llama4_text, gpt_oss, ernie4_5_moe, minimax_m2,
    hunyuan_v1_moe, lfm2_moe, nemotron_h, dbrx, kimi_linear, kimi_k3, deepseek_v4, inkling2_text, flint,
    mistral_large4_text, minimax_m3_vl_text, bailing_hybrid, axk2, dots3_note_text, beam, qwen4_exp_text
ValueError: model_type is None; known: mixtral, granitemoe, jamba, olmoe, qwen3_moe, qwen2_moe, qwen3_next,
    deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, llama4_text, gpt_oss, ernie4_5_moe, minimax_m2,
    hunyuan_v1_moe, lfm2_moe, nemotron_h, dbrx, kimi_linear, kimi_k3, deepseek_v4, inkling2_text, flint,
    mistral_large4_text, minimax_m3_vl_text, bailing_hybrid, axk2, dots3_note_text, beam, qwen4_exp_text
ValueError: model_type is 'phimoe': its SparseMixer router takes the second expert from a softmax that masks the
    first, with a gradient estimator of its own; the layer has no such router
ValueError: this llama4 config cannot be expressed: hidden_size is missing; intermediate_size is missing;
    num_experts_per_tok or num_experts_per_token is missing; num_local_experts or num_experts is missing;
    quantization_config is given; needs dequantised weights and a config without it
ValueError: this mixtral config cannot be expressed: hidden_act is 'gelu'; needs 'silu' or 'swish' or
    'gelu_pytorch_tanh'
ValueError: this mixtral config cannot be expressed: router_jitter_noise is 0.1; needs 0.0 or None
ValueError: this mixtral config cannot be expressed: num_local_experts = None and num_experts = 4 contradict each
    other
ValueError: this qwen3_moe config cannot be expressed: dtype is float8_e4m3fn; needs float64, float32, bfloat16,
    float16; quantization_config is given; needs dequantised weights and a config without it
ValueError: this qwen3_moe config cannot be expressed: num_experts_per_tok is 2 or 4, by layer; needs layer_idx
ValueError: this qwen3_moe config cannot be expressed: scoring_func is 'sigmoid'; needs 'softmax' or None; n_group
    is 4; needs 1 or 0 or None
ValueError: this deepseek_v2 config cannot be expressed: topk_method is 'noaux_tc'; needs 'greedy' or
    'group_limited_greedy'
ValueError: this deepseek_v2 config cannot be expressed: norm_topk_prob is True; needs False or None
ValueError: this deepseek_v2 config cannot be expressed: mlp_bias is True; needs False or None
ValueError: this deepseek_v3 config cannot be expressed: topk_method is 'greedy'; needs 'noaux_tc' or None;
    scoring_func is 'softmax'; needs 'sigmoid' or None
ValueError: this ernie4_5_moe config cannot be expressed: use_bias is True; needs False or None; moe_norm_min is
    0.1; needs 1e-12 or 0.0
ValueError: this minimax_m2 config cannot be expressed: use_routing_bias is False; needs True
ValueError: this hunyuan_v1_moe config cannot be expressed: moe_topk is 8 or 4, by layer; needs layer_idx
ValueError: this hunyuan_v1_moe config cannot be expressed: intermediate_size = 5 and moe_intermediate_size = 7
    contradict each other; num_shared_expert is 2; needs 1
ValueError: this nemotron_h config cannot be expressed: mlp_hidden_act is 'silu'; needs 'relu2'
ValueError: this qwen3_moe config cannot be expressed: moe_latent_size is 3; needs None
ValueError: this nemotron_h config cannot be expressed: n_shared_experts is 2; needs 1 or None
ValueError: this jamba config cannot be expressed: norm_topk_prob is True; needs False or None
ValueError: this llama4_text config cannot be expressed: hidden_act is 'relu'; needs 'silu' or 'swish' or
    'gelu_pytorch_tanh'
ValueError: this gpt_oss config cannot be expressed: hidden_act is 'gelu'; needs 'silu' or 'swish' or None
ValueError: this dbrx config cannot be expressed: ffn_config.moe_normalize_expert_weights is 2.0; needs 1.0 or None
ValueError: this dbrx config cannot be expressed: ffn_config.ffn_act_fn.name is 'gelu'; needs 'silu' or 'swish' or
    'gelu_pytorch_tanh'; ffn_config.moe_jitter_eps is 0.01; needs 0.0 or None
ValueError: model_type is 'hy_v4': it clamps gate and up of the routed experts alone; the layer's clamp holds for
    the shared expert too
ValueError: this kimi_linear config cannot be expressed: hidden_act is 'gelu'; needs 'silu' or 'swish' or
    'gelu_pytorch_tanh' or 'situ'; moe_router_activation_func is 'softmax'; needs 'sigmoid' or None
ValueError: this deepseek_v4 config cannot be expressed: scoring_func is 'softmax'; needs 'sqrtsoftplus' or
    'sigmoid'; norm_topk_prob is False; needs True or None; n_shared_experts is 2; needs 1 or None
ValueError: this inkling2_text config cannot be expressed: hidden_act is 'gelu'; needs 'silu' or 'swish' or None;
    scoring_func is 'softmax'; needs 'sigmoid' or None
ValueError: this flint config cannot be expressed: hidden_act is 'gelu'; needs 'silu' or 'swish' or
    'gelu_pytorch_tanh'; n_group is 2; needs 1 or 0 or None
ValueError: this mistral_large4_text config cannot be expressed: norm_topk_prob is False; needs True or None
ValueError: this axk2 config cannot be expressed: n_group is 8; needs 1 or 0 or None
ValueError: this minimax_m3_vl_text config cannot be expressed: hidden_act is 'gelu'; needs 'swigluoai' or 'silu' or
    None; n_shared_experts is 2; needs 1 or None; use_routing_bias is False; needs True or None
ValueError: this bailing_hybrid config cannot be expressed: score_function is 'softmax'; needs 'sigmoid' or None;
    moe_router_enable_expert_bias is False; needs True or None
ValueError: this dots3_note_text config cannot be expressed: mlp_bias is True; needs False or None
ValueError: this beam config cannot be expressed: scoring_func is 'softmax'; needs 'sigmoid' or None;
    n_shared_experts is 1; needs 0 or None
ValueError: this qwen4_exp_text config cannot be expressed: scoring_func is 'sigmoid'; needs 'softmax' or None
ValueError: this mixtral config cannot be expressed: hidden_size is missing; intermediate_size is missing;
    num_experts_per_tok or num_experts_per_token is missing; num_local_experts or num_experts is missing""")


def test_families_misfits():
    """One error for all that is wrong under the prefix, and a layer that stays as it was."""
    layer = fam_layer("mixtral", torch.float32)
    before = copy.deepcopy(layer.state_dict())
    t = fam_tensors("mixtral", torch.float32, "mlp.")
    del t["mlp.experts.1.w3.weight"], t["mlp.gate.weight"]
    t["mlp.experts.0.w1.weight"] = torch.zeros(H6, F5)
    t["mlp.experts.0.w1.weight_scale"] = t["other.experts.0.w1.weight"] = torch.zeros(1)
    t["mlp.experts.2.w2.weight"] = torch.zeros(H6, F5, dtype=torch.float8_e4m3fn)
    t["mlp.experts.8.w2.weight"] = torch.zeros(H6, F5)
    held = as_held("mixtral", fam_tensors("mixtral", torch.float32))
    held["experts.gate_up_proj"] = held["experts.gate_up_proj"].transpose(1, 2)
    fused = MoELayer(fam_config("gpt_oss"))
    texts = [
        error(families.from_hf, layer, t, "mixtral", "mlp."), error(families.from_hf, layer, held, "mixtral"),
        error(families.from_hf, layer, t, "qwen4"), error(families.from_hf, layer, t, "phimoe"),
        error(families.from_hf, layer, t, "gpt_oss"), error(families.to_hf, layer, "jamba"),
        error(families.to_hf, layer, "qwen2_moe"), error(families.to_hf, fam_layer("nemotron_h"), "deepseek_v3"),
        error(families.from_hf, fused, {}, "gpt_oss", "mlp.")]
    same(layer.state_dict(), before)
    assert_expected_inline(in_lines(texts), """\
ValueError: tensors do not make a mixtral block, nothing was changed:
  mlp.gate.weight [8, 6] is missing
  mlp.experts.1.w3.weight [5, 6] is missing
  mlp.experts.0.w1.weight_scale is of quantised weights; dequantise them first
  mlp.experts.8.w2.weight is unexpected
  mlp.experts.0.w1.weight is [6, 5]; needs [5, 6]
  mlp.experts.2.w2.weight is float8_e4m3fn; needs float64, float32, bfloat16, float16
ValueError: tensors do not make a mixtral block, nothing was changed:
  experts.gate_up_proj is [8, 6, 10]; needs [8, 10, 6]
ValueError: model_type is 'qwen4'; known: mixtral, granitemoe, jamba, olmoe, qwen3_moe, qwen2_moe, qwen3_next,
    deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, llama4_text, gpt_oss, ernie4_5_moe, minimax_m2,
    hunyuan_v1_moe, lfm2_moe, nemotron_h, dbrx, kimi_linear, kimi_k3, deepseek_v4, inkling2_text, flint,
    mistral_large4_text, minimax_m3_vl_text, bailing_hybrid, axk2, dots3_note_text, beam, qwen4_exp_text
ValueError: model_type is 'phimoe': its SparseMixer router takes the second expert from a softmax that masks the
    first, with a gradient estimator of its own; the layer has no such router
ValueError: layer is no gpt_oss block: activation = 'swiglu' (needs 'quick_geglu'), glu_linear_offset = 0.0 (needs
    1.0), add_bias_linear = False (needs True), router_bias = False (needs True); build it with config_from_hf
ValueError: layer is no jamba block: norm_topk_prob = True (needs False); build it with config_from_hf
ValueError: layer is no qwen2_moe block: shared_expert_gate = False (needs True); build it with config_from_hf
ValueError: layer is no deepseek_v3 block: activation = 'relu2' (needs one that is gated); build it with
    config_from_hf
ValueError: tensors do not make a gpt_oss block, nothing was changed:
  mlp.router.weight [8, 6] is missing
  mlp.router.bias [8] is missing
  mlp.experts.gate_up_proj [8, 6, 10] is missing
  mlp.experts.gate_up_proj_bias [8, 10] is missing
  mlp.experts.down_proj [8, 5, 6] is missing
  mlp.experts.down_proj_bias [8, 6] is missing""")


class Lazy:
    """Loads a tensor on [name], and knows the most that were alive at once; with `slices` also safetensors' way."""

    def __init__(self, tensors: dict, slices: bool):
        self.tensors, self.loads, self.alive, self.peak = tensors, [], 0, 0
        if slices:
            self.get_slice = lambda name: types.SimpleNamespace(
                get_shape=lambda: list(tensors[name].shape), get_dtype=lambda: "F32")

    def keys(self):
        return self.tensors.keys()

    def gone(self):
        self.alive -= 1

    def __getitem__(self, name):
        self.loads.append(name)
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        tensor = self.tensors[name].clone()
        weakref.finalize(tensor, self.gone)
        return tensor


@pytest.mark.parametrize("slices", [False, True])
def test_families_stream(slices):
    """One tensor at a time, nothing outside of the prefix; each once where shapes are known before, else twice."""
    for model_type in ("deepseek_v3", "gpt_oss"):
        t = fam_tensors(model_type, torch.float32, "mlp.")
        lazy = Lazy({**t, "lm_head.weight": torch.zeros(3)}, slices)
        layer = families.from_hf(MoELayer(fam_config(model_type, torch.float32)), lazy, model_type, "mlp.")
        same(layer.state_dict(), fam_layer(model_type, torch.float32).state_dict())
        assert (lazy.peak, lazy.alive) == (1, 0)
        assert sorted(lazy.loads) == sorted([*t] * (1 if slices else 2))
        del lazy.tensors[next(iter(t))]
        lazy.loads.clear()
        error(families.from_hf, layer, lazy, model_type, "mlp.")
        assert lazy.alive == 0 and (not slices or not lazy.loads)


def test_families_read_safetensors_files(tmp_path):
    """An open file as it is: shapes from its header, one tensor after the other."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a safetensors file; the package is not there")
    t = fam_tensors("ernie4_5_moe", torch.bfloat16, "model.layers.1.mlp.")
    safetensors.save_file(t, tmp_path / "a.safetensors")
    config = fam_config("ernie4_5_moe", torch.float32)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        layer = families.from_hf(MoELayer(config), file, "ernie4_5_moe", "model.layers.1.mlp.")
        want = families.from_hf(MoELayer(config), t, "ernie4_5_moe", "model.layers.1.mlp.")
        same(layer.state_dict(), want.state_dict())
    out = families.to_hf(layer, "ernie4_5_moe")
    safetensors.save_file(out, tmp_path / "b.safetensors")
    same(safetensors.load_file(tmp_path / "b.safetensors"), out)
    safetensors.save_file({name: x.to(torch.float8_e4m3fn) for name, x in t.items()}, tmp_path / "c.safetensors")
    with safetensors.safe_open(tmp_path / "c.safetensors", "pt") as file:
        text = error(families.from_hf, layer, file, "ernie4_5_moe", "model.layers.1.mlp.")
        assert "gate.weight is F8_E4M3; needs" in text


class OneOf:
    """As much of a process group as from_hf and to_hf ask for."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.size = lambda: rank, lambda: ranks


def shard(layer: MoELayer, group: OneOf, **groups) -> MoELayer:
    """The layer as one rank of ep or tp holds it."""
    def cut(x, dim):
        return torch.nn.Parameter(x.detach().chunk(group.size(), dim)[group.rank()].clone())
    part = copy.deepcopy(layer)
    part.pg_collection = types.SimpleNamespace(**{"ep": None, "tp": None, **groups})
    if "ep" in groups:
        for name, parameter in list(part.experts.named_parameters()):
            setattr(part.experts, name, cut(parameter, 0))
    else:
        shared = part.shared_experts
        shared.fc1, shared.fc2 = cut(shared.fc1, 1), cut(shared.fc2, 1)
    return part


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "dbrx", "nemotron_h", "kimi_k3"])
def test_families_over_ep_ranks(model_type):
    """Each rank takes its experts from either layout, and needs no others; together they give the whole model back."""
    whole, t, found = fam_layer(model_type, torch.float32), fam_tensors(model_type, torch.float32), {}
    for group in (OneOf(0, 4), OneOf(1, 4), OneOf(2, 4), OneOf(3, 4)):
        want = shard(whole, group, ep=group)
        blank = fam_layer(model_type, torch.float32)
        with torch.no_grad():
            for parameter in blank.parameters():
                parameter.zero_()
        for tensors in (t, as_held(model_type, t)):
            lazy = Lazy(tensors, True)
            same(families.from_hf(shard(blank, group, ep=group), lazy, model_type).state_dict(), want.state_dict())
            read = {int(e) for name in lazy.loads for e in re.findall(r"^experts\.(\d+)", name)}
            assert read <= {2 * group.rank(), 2 * group.rank() + 1}
        if model_type in ("gpt_oss", "dbrx"):
            text = error(families.to_hf, want, model_type)
            continue
        out = families.to_hf(want, model_type)
        same(families.from_hf(shard(blank, group, ep=group), out, model_type).state_dict(), want.state_dict())
        found.update(out)
    if model_type == "gpt_oss":
        assert_expected_inline(in_lines([text]), """\
ValueError: spread over ranks: experts.gate_up_proj, experts.gate_up_proj_bias, experts.down_proj,
    experts.down_proj_bias; needs a layer without ep and tp: save sharded_state_dict() and load it there""")
    elif model_type != "dbrx":
        same(found, families.to_hf(whole, model_type))


def test_families_over_tp_ranks():
    """Each rank takes its part of the shared expert, from either layout; writing it refuses."""
    for model_type in ("minimax_m3_vl_text", "deepseek_v3"):
        whole, t = fam_layer(model_type, torch.float32), fam_tensors(model_type, torch.float32)
        layouts = t, as_held(model_type, t)
        for group, tensors in itertools.product((OneOf(0, 2), OneOf(1, 2)), layouts):
            want = shard(whole, group, tp=group)
            part = shard(MoELayer(whole.config), group, tp=group)
            same(families.from_hf(part, tensors, model_type).state_dict(), want.state_dict())
    assert_expected_inline(in_lines([error(families.to_hf, part, "deepseek_v3")]), """\
ValueError: spread over ranks: shared_experts.gate_proj.weight, shared_experts.up_proj.weight,
    shared_experts.down_proj.weight; needs a layer without ep and tp: save sharded_state_dict() and load it there""")


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_families_upcycle(kind):
    """At the start the dense FFN where probs sum to 1, a shared expert included; with noise the experts part."""
    for options in ({}, {"shared_expert_intermediate_size": 8}, {"score_function": "sigmoid", "router_bias": True},
                    {"apply_probs_on": "output", "add_bias_linear": True}):
        config = MoEConfig(hidden_size=H6, ffn_hidden_size=F5, num_experts=E8, topk=3, activation=kind,
                           params_dtype=torch.float64, router_dtype=torch.float64, **options)
        gate, up, down = (torch.randn(*shape, dtype=torch.float64) for shape in ((F5, H6), (F5, H6), (H6, F5)))
        gate = gate if kind == "swiglu" else None
        layer, x = families.upcycle(config, gate, up, down), torch.randn(T7, 2, H6, dtype=torch.float64)
        dense = torch.stack([fam_ffn(x_H, gate, up, down) if kind == "swiglu" else down @ (up @ x_H).clamp(min=0) ** 2
                             for x_H in x.flatten(0, 1)]).view(x.shape)
        close(layer(x), dense, 1e-6)
    noisy = families.upcycle(config, gate, up, down, noise=0.1).experts
    for weight in (*noisy.fc1.unbind(1), noisy.fc2):
        spread = (weight - weight.mean(0)).std() / weight.mean(0).std()
        assert 0.05 < spread < 0.2 and (weight[0] - weight[1]).abs().min() > 0
    if kind == "swiglu":
        narrow = dataclasses.replace(config, latent_size=L4)
        assert error(families.upcycle, narrow, gate, up, down) == (
            "ValueError: latent_size is 4; needs None, since an expert is as wide as the dense FFN")
        assert_expected_inline(error(families.upcycle, config, up, up.T, down, -1.0), """\
ValueError: up_proj is [6, 5]; needs [5, 6]; noise is -1.0; needs 0 or more""")


def test_families_example_in_the_readme():
    """The example runs as it stands, with the tensors of one block: the published output, and the same tensors back."""
    text = (HERE / "README.md").read_text().split("<!-- families example -->")[1]
    example = re.search(r"```python\n(.*?)```", text, re.S)[1]
    assert len(example.strip().split("\n")) <= 10
    tensors = fam_tensors("qwen3_moe", torch.float32, "model.layers.0.mlp.")
    scope = {"hf_config": {"model_type": "qwen3_moe", **PUBLISHED["qwen3_moe"].config}, "tensors": tensors,
             "x": torch.randn(4, 2, H6)}
    exec(example, scope)
    close(scope["y"], published_loop("qwen3_moe", scope["x"].double(), fam_tensors("qwen3_moe")), 1e-5)
    same(scope["back"], tensors)


# ---- Live models of the Hugging Face library ----

class Part(torch.nn.Module):
    """A module that holds parameters, and calls nothing."""

    def forward(self, x):
        return x


class StandIn(torch.nn.Module):
    """A block as the library holds it, whose forward is the published loop."""

    def __init__(self, model_type: str, dtype=torch.float64):
        super().__init__()
        self.model_type, self.tensors = model_type, fam_tensors(model_type, dtype)
        for name, tensor in as_held(model_type, self.tensors).items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, Part())
                owner = getattr(owner, part)
            if "bias" in name and model_type != "gpt_oss":
                owner.register_buffer(last, tensor.clone())
            else:
                setattr(owner, last, torch.nn.Parameter(tensor.clone()))

    def forward(self, x):
        return published_loop(self.model_type, x, self.tensors)


class StandInModel(torch.nn.Module):
    """Layers 0 and 2 have a block of the family, layer 1 is dense."""

    def __init__(self, model_type: str, dtype=torch.float64):
        super().__init__()
        self.config, self.dtype = {"model_type": model_type, **PUBLISHED[model_type].config}, dtype
        if "mlp_layer_types" in self.config:
            self.config["mlp_layer_types"] = ["moe"] * 3
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"mlp": module}) for module in (
            StandIn(model_type, dtype), torch.nn.LayerNorm(H6), StandIn(model_type, dtype)))


def router_name(model_type: str) -> str:
    """The child of a block as held that is its router."""
    return next(iter(as_held(model_type, fam_tensors(model_type)))).split(".")[0]


@EVERY_FAMILY
def test_replace_blocks_matches_published_loop(model_type):
    """Outputs, hooks of the router, the state dict, and what the old block's flags were."""
    old, model = StandInModel(model_type), StandInModel(model_type)
    logits = []
    model.layers[0]["mlp"].get_submodule(router_name(model_type)).register_forward_hook(
        lambda module, args, output: logits.append(output))
    frozen = next(name for name in model.state_dict() if re.search(r"\.experts\.(down_proj|mlp.w2)$", name))
    model.get_parameter(frozen).requires_grad_(False)
    model.layers[2].eval()
    assert families.replace_blocks(model) == ["layers.0.mlp", "layers.2.mlp"]
    first, last = model.layers[0]["mlp"], model.layers[2]["mlp"]
    memory = [tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()]
    assert len(set(memory)) == len(memory)            # or safetensors would take them for tied
    assert first.training and not last.training and not last.router.training
    assert [p.requires_grad for p in (first.experts.fc2, first.experts.fc1, last.experts.fc2)] == [False, True, True]
    same(model.state_dict(), old.state_dict())
    x = torch.randn(3, T7, H6, dtype=torch.float64)
    got = first(x)
    if model_type in ("gpt_oss", "llama4_text"):
        got, beside = got
        assert beside.shape == (3 * T7, {"gpt_oss": 3, "llama4_text": E8}[model_type])
    close(got.view(x.shape), old.layers[0]["mlp"](x), 1e-8)
    router = PUBLISHED[model_type].router
    bias = fam_tensors(model_type).get("router.bias", torch.zeros(1))
    close(logits[0], x.flatten(0, 1) @ fam_tensors(model_type)[router].T + bias, 1e-9)
    other = StandInModel(model_type)
    families.replace_blocks(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(old.state_dict())
    same(other.state_dict(), old.state_dict())


def test_replace_blocks_keeps_dtypes_and_memory():
    """A router kept in fp32, as it is; the state dict's experts are the parameters, not copies of them."""
    model = StandInModel("qwen3_moe", torch.bfloat16)
    model.layers[0]["mlp"].gate.float()
    families.replace_blocks(model)
    first, last = model.layers[0]["mlp"], model.layers[2]["mlp"]
    assert [w.dtype for w in (first.router.weight, last.router.weight, first.experts.fc1)] \
        == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert first.config.params_dtype == torch.bfloat16 and first.config.router_dtype == torch.float32
    held = model.state_dict()["layers.0.mlp.experts.gate_up_proj"]
    assert held.data_ptr() == first.experts.fc1.data_ptr()


def test_a_replaced_model_is_saved_whole(tmp_path):
    model, x = StandInModel("qwen2_moe"), torch.randn(3, T7, H6, dtype=torch.float64)
    families.replace_blocks(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    same(loaded.state_dict(), model.state_dict())
    same(loaded.layers[2]["mlp"](x), model.layers[2]["mlp"](x))


def test_replace_blocks_reads_published_names_too():
    model, t = StandInModel("mixtral"), fam_tensors("mixtral", prefix="layers.2.mlp.")
    families.replace_blocks(model)
    with torch.no_grad():
        model.layers[2]["mlp"].experts.fc1.zero_()
    found = model.load_state_dict(t, strict=False)
    same(model.state_dict(), StandInModel("mixtral").state_dict())
    assert not found.unexpected_keys and "layers.1.mlp.weight" in found.missing_keys
    del t["layers.2.mlp.experts.3.w2.weight"]
    assert "layers.2.mlp.experts.3.w2.weight" in error(model.load_state_dict, t)
    t["layers.2.mlp.gate.weight"] = torch.zeros(H6, E8)
    assert "layers.2.mlp.gate.weight is [6, 8]; needs [8, 6]" in error(model.load_state_dict, t, strict=False)
    nothing = model.load_state_dict({}, strict=False).missing_keys
    assert nothing == [name for name in StandInModel("mixtral").state_dict()]


def test_replaced_blocks_take_tensors_by_assignment():
    """From the meta device, and in another dtype: as torch's assign does with every other parameter."""
    given = StandInModel("qwen2_moe").to(torch.bfloat16).state_dict()
    for start in ("meta", "cpu"):
        model = StandInModel("qwen2_moe")
        families.replace_blocks(model, enable_expert_bias=True)
        biases = {name: torch.ones(E8) for name in model.state_dict() if "expert_bias" in name}
        model.to(start)
        found = model.load_state_dict({**given, **biases}, assign=True)
        assert not found.missing_keys and not found.unexpected_keys
        block = model.layers[0]["mlp"]
        assert block.router.expert_bias.dtype == torch.float32
        assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
        same(model.state_dict(), {**given, **biases})
    part = "layers.0.mlp.shared_expert.gate_proj.weight"              # fills half of a parameter
    model.load_state_dict({part: torch.zeros_like(given[part])}, strict=False, assign=True)
    same(model.state_dict(), {**given, **biases, part: torch.zeros_like(given[part])})


def test_replaced_blocks_draw_what_changes_add():
    """Biases at zero, a shared expert at random: nothing is left as it lay in memory."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)          # fills new memory with NaN
    try:
        model = StandInModel("mixtral")
        families.replace_blocks(model, router_bias=True, add_bias_linear=True, shared_expert_intermediate_size=4,
                                shared_expert_gate=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert before
    block = model.layers[2]["mlp"]
    assert not block.router.bias.any() and not block.experts.fc1_bias.any() and not block.experts.fc2_bias.any()
    assert 0.01 < block.shared_experts.fc1.std() < 0.04 and block.shared_experts.gate_weight.abs().max() < 0.1
    old = StandInModel("mixtral").state_dict()
    same({name: model.state_dict()[name] for name in old}, old)


def test_a_block_at_two_places_is_replaced_at_both():
    model = StandInModel("qwen3_moe")
    model.layers[2]["mlp"] = model.layers[0]["mlp"]
    assert families.replace_blocks(model) == ["layers.0.mlp"]
    assert model.layers[2]["mlp"] is model.layers[0]["mlp"]
    assert isinstance(model.layers[0]["mlp"], families.HuggingFaceBlock)


def test_replaced_blocks_have_all_of_this_project():
    """Changes, a bias with its update, metrics, record and replay, a loss per sequence, one graph."""
    model = StandInModel("qwen3_moe")
    changes = dict(enable_expert_bias=True, bias_update="quantile", load_balancing_type="seq_aux_loss",
                   aux_loss_coeff=0.1)
    families.replace_blocks(model, **changes)
    block, x = model.layers[0]["mlp"], torch.randn(3, T7, H6, dtype=torch.float64)
    kept = model.state_dict()
    own = [name for name in kept if "expert_bias" in name]
    assert own == ["layers.0.mlp.router.expert_bias", "layers.2.mlp.router.expert_bias"]
    with record_routing(model) as record:
        y = block(x)
    assert load_balancing_metrics(model)["tokens_per_expert"].sum().item() == 3 * T7 * 3
    with replay_routing(model, [record.indices[0].flip(0), record.indices[0]]):
        assert not torch.equal(block(x), y)
    y.sum().backward()
    update_expert_bias(model)
    assert block.router.expert_bias.abs().max() > 0
    graph = compiled(block)
    for shape in ((3, T7), (2, 9)):
        x = torch.randn(*shape, H6, dtype=torch.float64)
        close(graph(x), block(x), 1e-9)
    again = StandInModel("qwen3_moe")
    families.replace_blocks(again, **changes)
    again.load_state_dict(model.state_dict())
    same(again.layers[0]["mlp"].router.expert_bias, block.router.expert_bias)
    # [B, S, H] here is [S, B, H] to a layer of its own: the same loss, which has the same gradient
    layer = MoELayer(block.config)
    layer.load_state_dict({name: p for name, p in block.named_parameters()} | dict(block.named_buffers()))
    for module, z in ((block, x), (layer, x.transpose(0, 1))):
        module.router.weight.grad = None
        (module(z).sum() * 0).backward()
    assert layer.router.weight.grad.abs().max() > 0
    close(block.router.weight.grad, layer.router.weight.grad, 1e-9)


def test_replace_blocks_holds_one_block_twice(monkeypatch):
    """Each old block is gone before the next layer gets its memory."""
    model, alive = StandInModel("qwen3_moe"), []
    old = [weakref.ref(model.layers[i]["mlp"].experts.down_proj) for i in (0, 2)]
    put = families._put_block

    def counted(*args):
        alive.append([ref() is not None for ref in old])
        put(*args)
    monkeypatch.setattr(families, "_put_block", counted)
    families.replace_blocks(model)
    assert alive == [[True, True], [False, True]] and [ref() for ref in old] == [None, None]


def test_replace_blocks_changes_nothing_when_it_refuses():
    model = StandInModel("deepseek_v3")
    before = {name: id(module) for name, module in model.named_modules()}
    misshapen, meta, dense = (StandInModel("deepseek_v3") for _ in range(3))
    misshapen.layers[2]["mlp"].gate.weight = torch.nn.Parameter(torch.zeros(4, H6))
    meta.layers[2].to("meta")
    dense.layers = dense.layers[1:2]
    other = StandInModel("qwen3_moe")
    other.config["model_type"] = "qwen3"
    texts = [error(families.replace_blocks, model, topk=9), error(families.replace_blocks, model, top_k=2),
             error(families.replace_blocks, model, params_dtype=torch.bfloat16),
             error(families.replace_blocks, model, ffn_hidden_size=9),
             error(families.replace_blocks, model, activation="relu2"),
             error(families.replace_blocks, misshapen), error(families.replace_blocks, meta),
             error(families.replace_blocks, dense), error(families.replace_blocks, "model"),
             error(families.replace_blocks, other)]
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert {name: id(module) for name, module in misshapen.named_modules()}.keys() == before.keys()
    families.replace_blocks(model)
    texts.append(error(families.replace_blocks, model))
    assert_expected_inline(in_lines(texts), """\
ValueError: topk = 9, num_experts = 8: a token cannot have more experts than there are; lower topk
TypeError: MoEConfig.__init__() got an unexpected keyword argument 'top_k'
ValueError: changes has params_dtype; blocks keep their dtypes: cast the model instead
ValueError: tensors do not make a deepseek_v3 block, nothing was changed:
  layers.0.mlp.experts.gate_up_proj is [8, 10, 6]; needs [8, 18, 6]
  layers.0.mlp.experts.down_proj is [8, 6, 5]; needs [8, 6, 9]
ValueError: changes has activation = 'relu2'; needs one that is gated, as 'swiglu'
ValueError: tensors do not make a deepseek_v3 block, nothing was changed:
  layers.2.mlp.gate.weight is [4, 6]; needs [8, 6]
ValueError: model has tensors on the meta device; needs weights: load it first
ValueError: model has no deepseek_v3 block to replace; replaced already: none
TypeError: model is a str; needs a model of the Hugging Face library
ValueError: model_type is 'qwen3'; known: mixtral, granitemoe, jamba, olmoe, qwen3_moe, qwen2_moe, qwen3_next,
    deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, llama4_text, gpt_oss, ernie4_5_moe, minimax_m2,
    hunyuan_v1_moe, lfm2_moe, nemotron_h, dbrx, kimi_linear, kimi_k3, deepseek_v4, inkling2_text, flint,
    mistral_large4_text, minimax_m3_vl_text, bailing_hybrid, axk2, dots3_note_text, beam, qwen4_exp_text
ValueError: model has no deepseek_v3 block to replace; replaced already: layers.0.mlp, layers.2.mlp""")


def test_families_lists_are_cut_at_ten():
    """A prefix that fits nothing is one line; long lists have ten entries and their number."""
    layer, t = fam_layer("qwen3_moe"), {}
    for i in range(12):
        t |= fam_tensors("qwen3_moe", prefix=f"model.layers.{i}.mlp.")
    t["model.layers.12.mlp.gate.weight"] = torch.zeros(1)
    texts = [error(families.from_hf, layer, t, "qwen3_moe", prefix)
             for prefix in ("", "model.layers.3.mlp", "model.layers.3.", "layers.3.mlp.")]
    texts.append(error(families.from_hf, layer, {"lm_head.weight": t["model.layers.0.mlp.gate.weight"]}, "qwen3_moe"))
    texts.append(error(families.from_hf, layer, {"gate.weight": t["model.layers.0.mlp.gate.weight"]}, "qwen3_moe"))
    swapped = families.from_hf, t, layer, "qwen3_moe"
    meta = MoELayer(layer.config).to("meta")
    texts += [error(*swapped), error(families.from_hf, layer, list(t), "qwen3_moe"),
              error(families.from_hf, layer, t, "model.layers.3.mlp."),
              error(families.from_hf, meta, t, "qwen3_moe", "model.layers.3.mlp.")]
    assert_expected_inline(in_lines(texts), """\
ValueError: no tensor of a qwen3_moe block is at prefix ''; prefixes that fit: model.layers.0.mlp.,
    model.layers.1.mlp., model.layers.2.mlp., model.layers.3.mlp., model.layers.4.mlp., model.layers.5.mlp.,
    model.layers.6.mlp., model.layers.7.mlp., model.layers.8.mlp., model.layers.9.mlp., .. 12 in all
ValueError: no tensor of a qwen3_moe block is at prefix 'model.layers.3.mlp'; prefixes that fit:
    model.layers.0.mlp., model.layers.1.mlp., model.layers.2.mlp., model.layers.3.mlp., model.layers.4.mlp.,
    model.layers.5.mlp., model.layers.6.mlp., model.layers.7.mlp., model.layers.8.mlp., model.layers.9.mlp., .. 12
    in all
ValueError: no tensor of a qwen3_moe block is at prefix 'model.layers.3.'; prefixes that fit: model.layers.0.mlp.,
    model.layers.1.mlp., model.layers.2.mlp., model.layers.3.mlp., model.layers.4.mlp., model.layers.5.mlp.,
    model.layers.6.mlp., model.layers.7.mlp., model.layers.8.mlp., model.layers.9.mlp., .. 12 in all
ValueError: no tensor of a qwen3_moe block is at prefix 'layers.3.mlp.'; prefixes that fit: model.layers.0.mlp.,
    model.layers.1.mlp., model.layers.2.mlp., model.layers.3.mlp., model.layers.4.mlp., model.layers.5.mlp.,
    model.layers.6.mlp., model.layers.7.mlp., model.layers.8.mlp., model.layers.9.mlp., .. 12 in all
ValueError: no tensor of a qwen3_moe block is at prefix ''; prefixes that fit: none
ValueError: tensors do not make a qwen3_moe block, nothing was changed:
  experts.0.gate_proj.weight [5, 6] is missing
  experts.1.gate_proj.weight [5, 6] is missing
  experts.2.gate_proj.weight [5, 6] is missing
  experts.3.gate_proj.weight [5, 6] is missing
  experts.4.gate_proj.weight [5, 6] is missing
  experts.5.gate_proj.weight [5, 6] is missing
  experts.6.gate_proj.weight [5, 6] is missing
  experts.7.gate_proj.weight [5, 6] is missing
  experts.0.up_proj.weight [5, 6] is missing
  experts.1.up_proj.weight [5, 6] is missing
  .. 24 in all
TypeError: layer is a dict; needs a MoELayer
TypeError: tensors is a list; needs a mapping, name -> tensor
ValueError: model_type is 'model.layers.3.mlp.'; known: mixtral, granitemoe, jamba, olmoe, qwen3_moe, qwen2_moe,
    qwen3_next, deepseek_v2, deepseek_v3, kimi_k2, glm4_moe, dots1, llama4_text, gpt_oss, ernie4_5_moe, minimax_m2,
    hunyuan_v1_moe, lfm2_moe, nemotron_h, dbrx, kimi_linear, kimi_k3, deepseek_v4, inkling2_text, flint,
    mistral_large4_text, minimax_m3_vl_text, bailing_hybrid, axk2, dots3_note_text, beam, qwen4_exp_text
ValueError: layer is on the meta device and cannot take weights; call layer.to_empty(device=..) and
    reset_parameters() of its modules first""")


@contextlib.contextmanager
def without_transformers():
    names = [name for name in sys.modules if name.split(".")[0] == "transformers"]
    hidden = {name: sys.modules.pop(name) for name in names}
    sys.modules["transformers"] = None
    try:
        yield
    finally:
        del sys.modules["transformers"]
        sys.modules.update(hidden)


def test_register_experts_without_the_library():
    with without_transformers(), pytest.raises(ImportError) as missing:
        families.register_experts()
    assert_expected_inline(str(missing.value), """\
register_experts needs the Hugging Face library: pip install 'transformers>=5'""")


def experts_of_the_library():
    """(class, an instance with random weights) of every experts class behind its experts interface."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    models = Path(transformers.__file__).parent / "models"
    sizes = dict(hidden_size=8, moe_intermediate_size=6, intermediate_size=6, num_experts=4, num_local_experts=4,
                 n_routed_experts=4, moe_num_experts=4)
    for file in sorted(models.glob("*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*?\nclass (\w+)", file.read_text(), re.M):
            modeling = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            configs = importlib.import_module(modeling.__name__.replace("modeling_", "configuration_"))
            experts = None
            for config_class in vars(configs).values():
                if isinstance(config_class, type) and issubclass(config_class, transformers.PreTrainedConfig):
                    with contextlib.suppress(Exception):     # of a model's other parts
                        config = config_class()
                        for field, size in sizes.items():
                            with contextlib.suppress(Exception):
                                setattr(config, field, size)
                        config._experts_implementation = "eager"
                        if getattr(config, "moe_latent_size", None):
                            config.moe_latent_size = 8
                        experts = getattr(modeling, name)(config)
                        break
            with torch.no_grad():
                for parameter in experts.parameters():
                    parameter.normal_(0, 0.5)
            yield name, experts


def test_register_experts_in_every_class_of_the_library():
    """Output and gradients of all experts classes, with an index that goes nowhere; or a refusal by name."""
    refused, checked = [], []
    for name, experts in experts_of_the_library():
        families.register_experts()
        E, H = experts.num_experts, experts.down_proj.shape[2 if experts.is_transposed else 1]
        x, probs = torch.randn(T7, H, requires_grad=True), torch.rand(T7, 2, requires_grad=True)
        indices = torch.stack([torch.randperm(E)[:2] for _ in range(T7)])
        indices[2, 1], indices[3] = E, E + 5
        leaves, upstream = [x, probs, *experts.parameters()], torch.randn(T7, H)
        nowhere = indices >= E                               # not every loop of theirs takes E
        want = experts(x, indices.masked_fill(nowhere, 0), probs.masked_fill(nowhere, 0.0))
        want = [want, *grads(want, leaves, upstream)]
        experts.config._experts_implementation = "moe_py"
        try:
            got = experts(x, indices, probs)
        except NotImplementedError as why:
            refused.append(str(why))
            continue
        for a, b in zip([got, *grads(got, leaves, upstream)], want, strict=True):
            close(a, b, 2e-5)
        checked.append(name)
    assert len(checked) >= 61
    assert_expected_inline(in_lines(refused), """\
DeepseekOcr2TextExperts: act_fn transformers.activations.GELUActivation cannot be expressed by kernels.expert_mlp;
    try replace_blocks, or another implementation
Ernie4_5_VLMoeMoeExperts: act_fn transformers.activations.QuickGELUActivation cannot be expressed by
    kernels.expert_mlp; try replace_blocks, or another implementation
MuseSparkExperts: has_post_expert_norm cannot be expressed by kernels.expert_mlp; try replace_blocks, or another
    implementation
UnlimitedOcrTextExperts: act_fn transformers.activations.GELUActivation cannot be expressed by kernels.expert_mlp;
    try replace_blocks, or another implementation""")


def test_register_experts_refuses_by_class():
    """An overridden gate is recognised by the class that has it: a subclass of a known one is unknown."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss
    families.register_experts()
    texts = [error(families.register_experts, name) for name in ("eager", "grouped_mm")]

    class GptOssExperts(modeling_gpt_oss.GptOssExperts):
        def _apply_gate(self, gate_up):
            return gate_up[..., ::2]
    config = GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=4)
    config._experts_implementation = "moe_py"
    with torch.no_grad(), pytest.raises(NotImplementedError) as refused:
        GptOssExperts(config)(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    texts.append(str(refused.value).split("GptOssExperts: ")[1].replace(__name__, "here"))
    from transformers.models.nemotron_h import NemotronHConfig, modeling_nemotron_h
    config = NemotronHConfig(hidden_size=8, moe_intermediate_size=6, n_routed_experts=4, mlp_hidden_act="silu")
    config._experts_implementation = "moe_py"
    with torch.no_grad(), pytest.raises(NotImplementedError) as refused:
        modeling_nemotron_h.NemotronHExperts(config)(
            torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    texts.append(str(refused.value))
    assert_expected_inline(in_lines(texts), """\
ValueError: name is 'eager', an implementation of the library; needs another name
ValueError: name is 'grouped_mm', an implementation of the library; needs another name
the overridden _apply_gate (here.test_register_experts_refuses_by_class.<locals>.GptOssExperts._apply_gate) cannot
    be expressed by kernels.expert_mlp; try replace_blocks, or another implementation
NemotronHExperts: has_gate = False with swiglu cannot be expressed by kernels.expert_mlp; try replace_blocks, or
    another implementation""")


def test_register_experts_in_the_weights_dtype():
    """fp32 tokens, as a norm gives them under autocast, and bf16 weights: products in bf16, an output in fp32."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    config = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=6, num_experts=4)
    config._experts_implementation = families.register_experts()
    experts = modeling_qwen3_moe.Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.5)
    x, indices, probs = torch.randn(T7, 8), torch.randint(4, (T7, 1)), torch.rand(T7, 1)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x, indices, probs)
    assert got.dtype == torch.float32
    same(got, experts(x.bfloat16(), indices, probs).float())


LAYOUTS = {"in order": "e p f h", "transposed": "e h p f", "interleaved": "e f p h",
           "transposed and interleaved": "e h f p"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("clamp_value", [None, 0.5])
def test_experts_take_weights_in_any_layout(how, bias, clamp_value):
    """Views: the same output and gradients as of weights in order, eager and compiled, and no copy of a weight."""
    from einops import rearrange
    E, F_, H, T, K = 4, 5, 6, 7, 3
    weights = [torch.randn(E, 2, F_, H), torch.randn(E, H, F_)]
    weights += [torch.randn(E, 2, F_), torch.randn(E, H)] if bias else []
    weights = [w.double().requires_grad_() for w in weights]
    axes, held_bias = LAYOUTS[how], "e p f" if "p f" in LAYOUTS[how] else "e f p"
    held = [rearrange(weights[0], f"e p f h -> {axes}"),
            rearrange(weights[1], "e h f -> e f h") if "transposed" in how else weights[1]]
    held += [rearrange(weights[2], f"e p f -> {held_bias}"), weights[3]] if bias else []
    held = [w.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for w in held]
    x, probs = torch.randn(T, H).double().requires_grad_(), torch.rand(T, K).double().requires_grad_()
    plan = plan_permutation(torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)]), E)

    def ours(x, probs, fc1, fc2, *biases):
        fc1, fc2 = rearrange(fc1, f"{axes} -> e p f h"), fc2.mT if "transposed" in how else fc2
        biases = [rearrange(biases[0], f"{held_bias} -> e p f"), biases[1]] if biases else []
        return expert_mlp(x, probs, plan, fc1, fc2, *biases, clamp_value=clamp_value)
    want = expert_mlp(x, probs, plan, *weights, clamp_value=clamp_value)
    upstream, own = torch.randn(T, H).double(), {w.untyped_storage().data_ptr() for w in held}
    want_grads = grads(want, [x, probs, *weights], upstream)
    for function in (ours, compiled(ours)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            got = function(x, probs, *held)
        close(got, want)
        by_held = grads(got, [x, probs, *held], upstream)
        for a, b in zip(by_held[:2], want_grads[:2], strict=True):
            close(a, b)
        close(rearrange(by_held[2], f"{axes} -> e p f h"), want_grads[2])
        close(by_held[3].mT if "transposed" in how else by_held[3], want_grads[3])
        if bias:
            close(rearrange(by_held[4], f"{held_bias} -> e p f"), want_grads[4])
        large = [t for t in kept if t.numel() >= E * H * F_ and t.untyped_storage().data_ptr() not in own]
        assert all(t.shape[0] == T * K for t in large)


WHOLE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=24, moe_intermediate_size=24, head_dim=8, max_position_embeddings=64, pad_token_id=0)
MLA = dict(num_key_value_heads=4, head_dim=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, kv_lora_rank=8,
           q_lora_rank=8)
LINEAR = dict(num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8)
MIXED = {**MLA, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 2}
WHOLE_EXTRAS = {
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
                  mamba_dt_rank=2),
    "qwen3_next": LINEAR, "kimi_linear": MIXED, "bailing_hybrid": MIXED,
    "qwen4_exp_text": {**LINEAR, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "deepseek_v2": MLA, "deepseek_v3": {**MLA, "first_k_dense_replace": 1}, "axk2": MLA, "mistral_large4_text": MLA,
    "dots3_note_text": MLA, "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=0),
    "nemotron_h": dict(mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2),
    "flint": dict(mlp_only_layers=[]), "beam": dict(mlp_layer_types=["sparse"] * 2)}


def whole_model(model_type: str, **fixed) -> torch.nn.Module:
    """A tiny language model of the library with random weights; its experts are those of the library's loop."""
    transformers = pytest.importorskip("transformers", reason="builds models of transformers")
    fields = {name: value[0] if isinstance(value, list) and name != "mlp_layer_types" else value
              for name, value in PUBLISHED[model_type].config.items()}
    fields = {**fields, **WHOLE, **WHOLE_EXTRAS.get(model_type, {}), **fixed}
    fields = {name: value for name, value in fields.items() if value is not None}
    if model_type == "dbrx":
        ffn = {**fields["ffn_config"], "ffn_hidden_size": 24, "hidden_size": 32}
        fields = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64, ffn_config=ffn,
                      attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4))
    config = getattr(transformers, PUBLISHED[model_type].block[0])(**fields)
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    own = {name: value for name, value in vars(modeling).items() if getattr(value, "config_class", None) is type(config)}
    ends = "ForCausalLM", "ForConditionalGeneration", "TextModel"
    model = next(own[name] for end in ends for name in own if name.endswith(end))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    if model_type not in ("llama4_text", "dbrx"):
        model.set_experts_implementation("eager")
    return model


def whole_logits(model, ids: Tensor, **options) -> Tensor:
    out = model(ids, use_cache=False, **options)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def three_steps(model, ids: Tensor) -> list[float]:
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02), []
    for _ in range(3):
        logits = whole_logits(model, ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten() % logits.shape[-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_type", IN_THE_LIBRARY)
def test_replaced_models_of_the_library(model_type, tmp_path):
    """Logits, generate, the block's own output, router logits, saving, loading, training, checkpoints, bf16."""
    theirs = whole_model(model_type).eval()
    ours, ids = copy.deepcopy(theirs), torch.randint(1, 64, (2, T7))
    block_name = PUBLISHED[model_type].block[1]
    names = [name for name, module in theirs.named_modules() if type(module).__name__ == block_name]
    assert names and families.replace_blocks(ours) == names
    with torch.no_grad():
        want, got = whole_logits(theirs, ids), whole_logits(ours, ids)
        close(got, want, 1e-4)
        x = torch.randn(2, T7, 32)
        options = {"input_ids": ids} if model_type == "deepseek_v4" else {}
        outputs = [model.get_submodule(names[0])(x.clone(), **options) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
        recorded = [model(ids, use_cache=False, output_router_logits=True).router_logits for model in (ours, theirs)]
        assert len(recorded[0]) == len(names)
        torch.testing.assert_close(*recorded, rtol=1e-4, atol=1e-4)
    same(ours.state_dict(), theirs.state_dict())
    if hasattr(theirs, "generate"):
        same(*(model.generate(ids, max_new_tokens=4, do_sample=False) for model in (ours, theirs)))
    ours.save_pretrained(tmp_path)
    again, found = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    same(again.state_dict(), theirs.state_dict())
    close(whole_logits(again.eval(), ids), whole_logits(theirs.eval(), ids), 1e-4)
    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable()
    losses = three_steps(theirs, ids)
    assert losses == pytest.approx(three_steps(ours, ids), abs=1e-3)
    assert losses == pytest.approx(three_steps(checkpointed, ids), abs=1e-3)
    if model_type != "inkling2_text":                 # which mixes dtypes in bf16 itself
        halves = ours.to(torch.bfloat16)
        assert whole_logits(halves, ids).isfinite().all()
        kept = {p.dtype for p in halves.parameters()} - {torch.float32}
        assert kept == {torch.bfloat16}


def test_replaced_model_with_hash_layers(tmp_path):
    """DeepSeek-V4's table goes with the block, is saved, and the forward gets the token numbers."""
    theirs = whole_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]).eval()
    with torch.no_grad():
        theirs.model.layers[0].mlp.gate.tid2eid.copy_(torch.stack([torch.randperm(E8)[:3] for _ in range(64)]))
    ours, ids = copy.deepcopy(theirs), torch.randint(1, 64, (2, T7))
    families.replace_blocks(ours)
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)
    same(ours.state_dict(), theirs.state_dict())
    with torch.no_grad():
        ours.model.layers[0].mlp.hash_table.zero_()
    ours.load_state_dict(theirs.state_dict())
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)


def test_replaced_model_under_the_librarys_trainer_loss():
    """The library's own balance loss, from router logits, has the same gradients through our router."""
    theirs, ids = whole_model("qwen3_moe", router_aux_loss_coef=0.1).double(), torch.randint(1, 64, (2, T7))
    theirs(ids[:1], use_cache=False, output_router_logits=True)       # installs the hooks before
    ours = copy.deepcopy(theirs)
    families.replace_blocks(ours)
    losses = [model(ids, labels=ids, use_cache=False, output_router_logits=True) for model in (ours, theirs)]
    close(losses[0].aux_loss, losses[1].aux_loss, 1e-9)
    close(losses[0].loss, losses[1].loss, 1e-9)
    for out in losses:
        out.loss.backward()
    close(ours.model.layers[0].mlp.router.weight.grad, theirs.model.layers[0].mlp.gate.weight.grad, 1e-7)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "inkling2_text", "lfm2_moe"])
def test_registered_experts_in_whole_models(model_type):
    """Loss and every gradient as with the library's loop; each experts module is one graph; generate; autocast."""
    model, ids = whole_model(model_type), torch.randint(1, 64, (2, T7))

    def results():
        logits = whole_logits(model, ids)
        upstream = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        return [logits, *torch.autograd.grad(logits, list(model.parameters()), upstream, materialize_grads=True)]
    want, written = results(), model.generate(ids, max_new_tokens=4, do_sample=False)
    model.set_experts_implementation(families.register_experts())
    for a, b in zip(results(), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item() + 1e-6)
    same(model.generate(ids, max_new_tokens=4, do_sample=False), written)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = whole_logits(model, ids)
    assert logits.isfinite().all() and logits.shape == want[0].shape
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "has_gate"):
            module.compile(fullgraph=True, backend="aot_eager")
    for a, b in zip(results(), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item() + 1e-6)


def test_registered_experts_keep_little_for_the_backward():
    """At Qwen3-MoE's proportions: T·H + N·2F, within 5%; the library's grouped_mm keeps more than twice that."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    T, H, F_, E, K = 256, 128, 48, 16, 4
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F_, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = families.register_experts()
    experts = modeling_qwen3_moe.Qwen3MoeExperts(config)
    x, probs = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    indices = torch.rand(T, E).topk(K).indices
    kept = {}
    for name in ("moe_py", "grouped_mm"):
        config._experts_implementation = name
        sizes = {p.untyped_storage().data_ptr(): 0 for p in experts.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            sizes.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = experts(x, indices, probs)
        kept[name] = sum(sizes.values())
        del alive
    small = T * K * (3 * 8 + 4) + E * 4
    assert kept["moe_py"] - small <= 1.05 * 4 * (T * H + T * K * 2 * F_)
    assert kept["moe_py"] <= 0.4 * kept["grouped_mm"]


def test_replace_blocks_example_in_the_readme(tmp_path, monkeypatch, capsys):
    """The example runs as it stands: what is saved gives the same logits again."""
    pytest.importorskip("transformers", reason="builds a model of transformers")
    monkeypatch.chdir(tmp_path)
    text = (HERE / "README.md").read_text().split("<!-- replace example -->")[1]
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], {})
    names, violation, equal = capsys.readouterr().out.strip().split("\n")
    assert names == "['model.layers.0.mlp', 'model.layers.1.mlp']" and equal == "True"
    assert violation.startswith("tensor([")
