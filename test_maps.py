"""Tests of maps.py: Megatron's and NeMo's functions on maps [T, E], against loops and kernels.py.

    python -m pytest test_maps.py
    python -m pytest test_maps.py -k test_permute_      one section, by its tests' first word

The words: route, drop, permute, activation. It needs test_moe.py and the layer's seven files.
"""
import functools
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

if __package__:                                      # copied into a package
    from . import kernels, maps
    from .kernels import activation, combine_rows, gather_rows, plan_permutation, topk_routing
    from .maps import (
        activation_back, apply_router_token_dropping, group_limited_topk, pad_routing_map, permute,
        sort_chunks_by_idxs, swiglu, swiglu_back, topk_routing_with_score_function, unpermute,
        weighted_swiglu, weighted_swiglu_back)
    from .moe import MoEConfig, TopKRouter
    from .test_moe import (
        ACTIVATIONS, BIASED, INTEGERS, NAN, about, check_error_table, close, compiled, fp32_leaf,
        fresh_start, grads, graphs_made, integers_used, leaf, on_device, outcome, random_config,
        random_indices, same, slow_but, small_config)
else:
    import kernels
    import maps
    from kernels import activation, combine_rows, gather_rows, plan_permutation, topk_routing
    from maps import (
        activation_back, apply_router_token_dropping, group_limited_topk, pad_routing_map, permute,
        sort_chunks_by_idxs, swiglu, swiglu_back, topk_routing_with_score_function, unpermute,
        weighted_swiglu, weighted_swiglu_back)
    from moe import MoEConfig, TopKRouter
    from test_moe import (
        ACTIVATIONS, BIASED, INTEGERS, NAN, about, check_error_table, close, compiled, fp32_leaf,
        fresh_start, grads, graphs_made, integers_used, leaf, on_device, outcome, random_config,
        random_indices, same, slow_but, small_config)


# ---- Route ----

def test_route_in_both_forms():
    """Of random configurations: with dense_output kernels.topk_routing's indices, else its map."""
    for seed in range(100):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        c = random_config(rng)
        logits = torch.randn(rng.choice([0, 1, 11]), 8, dtype=torch.float64)
        options = dict(c.routing_options)
        assert options.pop("probs_dtype") is None
        options["expert_bias"] = torch.randn(8) if c.enable_expert_bias else None
        if rng.random() < 0.3:
            options["precomputed_indices"] = random_indices(
                len(logits), 8, c.topk, nowhere=0.3, repeats=0.3).to(rng.choice(INTEGERS))
        with about(f"seed {seed}", c):
            want = topk_routing(logits, **options)
            same(topk_routing_with_score_function(logits, dense_output=True, **options), want)
            same(topk_routing_with_score_function(logits, **options),
                 kernels.routing_to_map(*want, 8))


def test_route_masked_groups_lose_to_negative_scores():
    """Groups that are not chosen lose even to negative scores, as in kernels.topk_routing."""
    bias = torch.tensor([-2.0, -3.0, -4.0, -5.0])
    scores, indices = group_limited_topk(
        bias[None], topk=2, num_tokens=1, num_experts=4, num_groups=2, group_topk=1)
    assert indices.tolist() == [[0, 1]] and scores.tolist() == [[-2, -3]]


def test_route_errors():
    """Of the map form alone. Those of kernels.topk_routing are tested in test_moe.py."""
    x = torch.randn(1, 6, 4)
    check_error_table("""
        group_limited_topk(x, 2, 6, 4, 2, 1) => scores has shape [1, 6, 4]
        topk_routing_with_score_function(x, 2) => logits has shape [1, 6, 4]
        topk_routing_with_score_function(x[0], 5) => topk is
        """, x=x)


# ---- Drop ----

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
def test_drop_matches_loop(policy, pad):
    drop = functools.partial(
        apply_router_token_dropping, router_topk=2, drop_policy=policy, pad_to_capacity=pad)
    for factor in (0.3, 1.0, 1.5, 9.0):
        for _ in range(6):
            probs, routing_map = topk_routing_with_score_function(torch.randn(13, 5), 2)
            probs = torch.where(torch.rand(13, 5) < 0.2, 0.0, probs)  # ties, and routed with prob 0
            capacity = math.ceil(13 * 2 / 5 * factor)
            want = dropping_loop(probs, routing_map, capacity, policy=policy, pad=pad)
            same(drop(probs, routing_map, capacity_factor=factor), want)


def test_drop_errors():
    check_error_table("""
        drop(logits, routing_map, 2, 1.0, "random") => drop_policy is 'random'
        drop(logits, routing_map[:5], 2, 1.0) => routing_probs has shape [6, 4]; needs [T = 5
        drop(logits[None], routing_map[None], 2, 1.0) => routing_map has shape [1, 6, 4]
        """, drop=apply_router_token_dropping, logits=torch.randn(6, 4),
        routing_map=torch.rand(6, 4) < 0.5)


# ---- Permute ----

def rows_loop(places: list, tokens: Tensor, probs: Tensor):
    """(rows, probs, indices) of the (expert, token) of every row; token T leaves the row empty."""
    rows = torch.zeros(len(places), tokens.shape[1])
    row_probs = torch.zeros(len(places))
    for i, (e, t) in enumerate(places):
        if t < len(tokens):
            rows[i] = tokens[t]
            row_probs[i] = probs[t, e]
    return rows, row_probs, torch.tensor([t for e, t in places], dtype=torch.int64)


def there_and_back(tokens, routing_map, probs, n: int | None, **options) -> tuple[Tensor, ...]:
    """The three values of permute, and unpermute's tokens."""
    rows, row_probs, index = permute(tokens, routing_map, probs, num_out_tokens=n, **options)
    back = unpermute(rows, index, tokens.shape, probs, routing_map, **options)
    return rows, row_probs, index, back


def flat_there_and_back(*args, **options) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in there_and_back(*args, **options)])


def added_loop(places: list, tokens: Tensor, probs: Tensor) -> Tensor:
    """[T, H]: every row times its prob, added to its token."""
    total = torch.zeros_like(tokens, dtype=torch.float64)
    for e, t in places:
        if t < len(tokens):
            total[t] += tokens[t].double() * float(probs[t, e])
    return total


@pytest.mark.parametrize("T, E, K", [(0, 4, 2), (1, 1, 1), (7, 4, 2), (33, 8, 8), (64, 256, 3)])
def test_permute_index_form_equals_map_form(T, E, K):
    """Rows, order and probs to the last bit; the tokens added up again to fp32's rounding."""
    indices = random_indices(T, E, K)
    tokens = torch.randn(T, 5)
    probs = torch.rand(T, K).masked_fill(indices == E, 0.0)
    plan = plan_permutation(indices, E)
    probs_TE, routing_map = kernels.routing_to_map(probs, indices, E)
    n = int(plan.offsets[-1])
    rows, row_probs, index, back = there_and_back(tokens, routing_map, probs_TE, T * K)
    same(gather_rows(tokens, plan), rows)
    same((plan.order // K)[:n], index[:n])
    same(kernels.gather_probs(probs, plan), row_probs[:, None])
    same(plan.counts, routing_map.sum(0))
    close(combine_rows(rows, plan, probs), back, 1e-6)


@pytest.mark.parametrize("T, E", [(0, 3), (1, 4), (7, 4), (20, 3)])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_permute_matches_loop(T, E, density):
    """For any number of rows; for any capacity, above the token count too, where the original
    breaks."""
    tokens = torch.randn(T, 5)
    probs = torch.rand(T, E)
    routing_map = torch.rand(T, E) < density
    ones = [(e, t) for e in range(E) for t in range(T) if routing_map[t, e]]
    cases = [(None, False, ones)]
    for n in (len(ones), len(ones) + 3, max(len(ones) - 2, 0)):
        cases.append((n, False, (ones + [(0, T)] * 3)[:n]))
    for C in (0, 1, 3, T, T + 3):
        places = []
        for e in range(E):
            in_order = sorted(range(T), key=lambda t: not routing_map[t, e])
            places += [(e, t) for t in (in_order + [T] * C)[:C]]
        cases.append((E * C, True, places))
    for n, pad, places in cases:
        *got, back = there_and_back(tokens, routing_map, probs, n, drop_and_pad=pad)
        same(tuple(got), rows_loop(places, tokens, probs))
        close(back, added_loop(places, tokens, probs), 1e-6)
        back = unpermute(got[0], got[2], tokens.shape)
        close(back, added_loop(places, tokens, torch.ones(T, E)), 1e-6)


@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permute_gradients(drop_and_pad):
    """By gradcheck, and zeros for the rows that are ignored."""
    routing_map = torch.rand(6, 4) < 0.5
    probs = leaf(6, 4)
    n = 4 * 7 if drop_and_pad else int(routing_map.sum()) + 3
    options = dict(drop_and_pad=drop_and_pad)
    assert torch.autograd.gradcheck(lambda tokens, probs: flat_there_and_back(
        tokens, routing_map, probs, n, **options), (leaf(6, 3), probs))
    rows = torch.full((n, 3), NAN, dtype=torch.float64, requires_grad=True)
    out = unpermute(rows, torch.full((n,), 6), (6, 3), probs, routing_map, **options)
    for zeros in (out, *grads(out, [rows, probs])):
        assert (zeros == 0).all()


@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permute_fused_is_the_function_compiled(monkeypatch, drop_and_pad, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    maps._compiled.cache_clear()
    routing_map = torch.rand(6, 4) < 0.5

    inputs = fp32_leaf(6, 3), fp32_leaf(6, 4)
    fused, plain = [outcome(lambda tokens, probs: flat_there_and_back(
        tokens, routing_map, probs, 16, fused=fused, drop_and_pad=drop_and_pad), inputs)
        for fused in (True, False)]
    close(fused, plain, 1e-5)
    assert graphs_made() == 2
    maps._compiled.cache_clear()


@pytest.mark.parametrize("rows, drop_and_pad, dynamic", slow_but(
    [("48", False, None), ("48", True, None), ("48", True, True)],
    itertools.product(["48", "E*T", "E*(T//2 + 1)"], [False, True], [None, True])))
def test_permute_graphs_over_T(rows, drop_and_pad, dynamic):
    """Of permute as of unpermute: one for the first T, and one for the others. The capacity is
    above, at and below T."""
    E = 4
    functions = [compiled(f, dynamic=dynamic) for f in (permute, unpermute)]
    for T in (5, 9, 40, 12, 17):
        tokens, probs = fp32_leaf(T, 3), fp32_leaf(T, E)
        routing_map = torch.rand(T, E) < 0.5
        n = eval(rows, dict(E=E, T=T))

        def there_and_back(permute, unpermute):
            permuted = permute(
                tokens, routing_map, probs, num_out_tokens=n, drop_and_pad=drop_and_pad)
            back = unpermute(
                permuted[0], permuted[2], (T, 3), probs=probs, routing_map=routing_map,
                drop_and_pad=drop_and_pad)
            return *permuted, back, *grads(back, [tokens, probs])
        with about(f"T = {T}"):
            close(there_and_back(*functions), there_and_back(permute, unpermute), 1e-5)
    assert graphs_made() == (2 if dynamic else 4)


def test_permute_sorts_chunks():
    sizes = torch.tensor([2, 0, 3, 1, 0, 4])
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    x = torch.randn(10, 3)
    probs = torch.rand(10)
    want = [torch.cat([t.split(sizes.tolist())[i] for i in order]) for t in (x, probs)]
    same(sort_chunks_by_idxs(x, sizes, order, probs=probs), tuple(want))
    assert sort_chunks_by_idxs(x, sizes, order)[1] is None


def test_permute_pads_the_map():
    for multiple in (1, 4, 16):
        routing_map = torch.rand(11, 6) < torch.tensor([0.0, 0.1, 0.4, 0.6, 0.9, 1.0])
        want = routing_map.clone()
        for e in range(6):
            others = [t for t in range(11) if not routing_map[t, e]]
            want[others[:-int(routing_map[:, e].sum()) % multiple], e] = True
        same(pad_routing_map(routing_map, multiple), want)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_permute_integer_routing_maps(dtype):
    """0 and 1 in any integer dtype are the boolean map. What comes back is boolean; a padded map
    has the dtype that was given."""
    routing_map = torch.rand(9, 4) < 0.4
    probs = torch.rand(9, 4)
    x = torch.randn(9, 6)

    def all_of_it(routing_map):
        router = TopKRouter(small_config(num_experts=4, **BIASED))
        router._apply_expert_bias(routing_map)
        router.counts.attach_to(fp32_leaf(1)).backward()
        assert router.local_tokens_per_expert.sum() == routing_map.sum()
        padded = pad_routing_map(routing_map, 4)
        assert padded.dtype == routing_map.dtype
        results = [permute(x, routing_map)[0], router.local_tokens_per_expert, padded.bool()]
        for pad in (False, True):
            results += there_and_back(x, routing_map, probs, 12, drop_and_pad=pad)
            for policy in ("probs", "position"):
                results += apply_router_token_dropping(
                    probs, routing_map, 2, capacity_factor=0.7, drop_policy=policy,
                    pad_to_capacity=pad)
        return results
    same(all_of_it(routing_map.to(dtype)), all_of_it(routing_map))


def test_permute_combines_in_fp32():
    """256 + 8 · 1: bf16 sums would stay at 256."""
    rows = torch.tensor([256.0] + [1.0] * 8).bfloat16()[:, None]
    assert unpermute(rows, torch.zeros(9).long(), (1, 1)).item() == 264


def test_permute_errors():
    check_error_table("""
        permute(x, ones[:5]) => routing_map has shape [5, 4]; needs [T = 6
        permute(x[None], ones) => tokens has shape [1, 6, 8]
        permute(x, ones[None]); pad_routing_map(ones[None], 2) => routing_map has shape [1, 6, 4]
        permute(x, ones.float()); permute(x, ones.cfloat()) => TypeError: routing_map is torch.
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
        sort_chunks_by_idxs(x, sizes, sizes[:2]) => sorted_idxs has shape [2]
        sort_chunks_by_idxs(x, sizes[None], sizes[None]) => split_sizes has shape [1, 3]
        sort_chunks_by_idxs(x, sizes, sizes, probs[:5]) => probs has 5 rows and input 6
        pad_routing_map(ones, 0) => pad_multiple is 0
        """, x=torch.randn(6, 8), probs=torch.randn(6, 4), ones=torch.ones(6, 4).bool(),
        index=torch.zeros(6).long(), sizes=torch.full((3,), 2))


def test_permute_index_times_width_is_int64():
    """As in the layer: an int32 product of an index and a row's width would overflow."""
    x = fp32_leaf(6, 8)
    routing_map = torch.rand(6, 4) < 0.5

    def run():
        for pad in (False, True):
            there_and_back(x, routing_map, torch.rand(6, 4), 12, drop_and_pad=pad)
        sort_chunks_by_idxs(x, torch.tensor([2, 1, 3]).int(), torch.tensor([1, 2, 0]))
    seen = integers_used(run)
    assert len(seen) >= 3
    assert set().union(*seen.values()) <= {torch.int64, torch.bool, torch.float32}, seen


# ---- Activations ----

@pytest.mark.parametrize("fields", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_activation_back_is_the_gradient(fields, weighted):
    """Of kernels.activation, to the bit; by the name with constants, and by a function."""
    c = MoEConfig(4, 4, 4, topk=2, **fields)
    kind = c.bound_activation
    y = leaf(5, 3, 8)
    w = leaf(5, 3, 1) if weighted else None
    out = activation(y, kind, w)
    g = torch.randn_like(out)
    want = grads(out, [y, w] if weighted else [y], g)
    with torch.no_grad():
        constants = getattr(kind.function, "keywords", {})
        for options in (dict(kind=kind), dict(kind=c.activation, **constants)):
            back = activation_back(g, y, weights=w, **options)
            same(list(back) if weighted else [back], want)


def test_activation_back_beyond_a_clamp():
    """0, as the gradient there is."""
    y = torch.tensor([[0.6, -0.8, 0.71, 0.6, -0.6, -0.71]], requires_grad=True)
    want = grads(activation(y, clamp_value=0.7), [y])[0]
    got = activation_back(torch.ones(1, 3), y.detach(), clamp_value=0.7)
    same(got == 0, want == 0)
    assert (got == 0).any()


def test_activation_swiglu_names():
    g = torch.randn(6, 4)
    y = torch.randn(6, 8)
    w = torch.rand(6, 1, dtype=torch.float64)
    same(swiglu(y), activation(y))
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
    got_y, got_w = weighted_swiglu_back(g, y, w)
    same(got_y, want_y.to(dtype))
    close(got_w, want_w, 1e-6)
    assert want_w.dtype == torch.float32
    assert weighted_swiglu_back(g, y, w.to(dtype))[1].dtype == dtype


@pytest.mark.parametrize("kind", list(kernels.ACTIVATIONS))
def test_activation_back_compiles_where_its_input_requires_grad(kind):
    """torch's backward functions have no derivative of their own."""
    g, y = torch.randn(3, 4), fp32_leaf(3, 8)
    if kernels.ACTIVATIONS[kind].parts == 1:
        y = fp32_leaf(3, 4)
    w = torch.rand(3, 1, requires_grad=True)
    for weights in (None, w):
        want = activation_back(g, y, kind, weights)
        close(compiled(activation_back)(g, y, kind, weights), want, 1e-6)
    if kind == "swiglu":
        same(compiled(swiglu_back)(g, y), swiglu_back(g, y))
        close(compiled(weighted_swiglu_back)(g, y, w), weighted_swiglu_back(g, y, w), 1e-6)


@pytest.mark.parametrize("made", [
    kernels.activation_of("quick_geglu", alpha=1.3, linear_offset=1.0, clamp_value=0.7),
    kernels.activation_of("situ", beta=1.5, linear_beta=2.0),
    kernels.ACTIVATIONS["relu2"]])
def test_activation_back_of_one_that_is_made(made):
    """With dynamic=True the compiler turns its constants into symbolic numbers."""
    g, y = torch.randn(3, 4), torch.randn(3, 4 * made.parts)
    want = activation_back(g, y, made)
    close(compiled(lambda g, y: activation_back(g, y, made), dynamic=True)(g, y), want, 1e-6)


def test_activation_errors():
    """Of the backwards alone. Those of kernels.activation are tested in test_moe.py."""
    check_error_table("""
        swiglu_back(x, x) => g has shape [6, 8]; needs [6, 4]
        activation_back(half, x, "relu2") => g has shape [6, 4]; needs [6, 8]
        activation_back(half, x, made, alpha=1.702) => it has linear_offset, clamp_value
        activation_back(half, x, "situ", linear_beta=-1.0) => linear_beta is -1.0
        """, x=torch.randn(6, 8), half=torch.randn(6, 4),
        made=kernels.ACTIVATIONS["swiglu"])
