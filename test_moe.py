"""Tests of the layer, moe.py to compat.py: plain-loop oracles first, then a section a topic.

    python -m pytest test_moe.py                in minutes
    python -m pytest test_moe.py -k test_route_ one section: its word begins its tests' names
    SLOW=1 python -m pytest test_moe.py         the slow tests too
    DEVICE=cuda python -m pytest test_moe.py    on that device, see card/README.md

The words: route, balance, permute, activation, experts, config, layer, router, shared, record.
It needs the seven files of the layer beside it, torch, pytest and expecttest.

The oracles share no code with their subjects, walk one token and one choice at a time, and run in
float64. Every letter has a different size wherever it can, so that a swapped axis fails.
"""
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import random
import re
import sys
import types
import warnings
from typing import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.utils import counters

if __package__:                                      # copied into a package
    from . import base, compat, grouped, kernels, moe, shared_experts
    from . import router as router_file
    from .grouped import grouped_mm
    from .kernels import (
        Activation, activation, combine_rows, compute_routing_scores_for_aux_loss, expert_mlp,
        gather_rows, get_capacity, get_updated_expert_bias, plan_permutation, quantile_expert_bias,
        required_bias_histogram, sinkhorn, switch_load_balancing_loss_func, topk_routing,
        z_loss_func)
    from .moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics, record_routing, replay_routing, set_aux_loss_scale,
        update_expert_bias)
else:
    import base
    import compat
    import grouped
    import kernels
    import moe
    import router as router_file
    import shared_experts
    from grouped import grouped_mm
    from kernels import (
        Activation, activation, combine_rows, compute_routing_scores_for_aux_loss, expert_mlp,
        gather_rows, get_capacity, get_updated_expert_bias, plan_permutation, quantile_expert_bias,
        required_bias_histogram, sinkhorn, switch_load_balancing_loss_func, topk_routing,
        z_loss_func)
    from moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics, record_routing, replay_routing, set_aux_loss_scale,
        update_expert_bias)

LAYER = compat, grouped, kernels, base, router_file, shared_experts, moe
INF = math.inf
NAN = math.nan
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="slow: runs with SLOW=1")

# The tests run on this device. The emulated card of card/ has an environment variable of its own.
DEVICE = torch.device(os.environ.get("DEVICE", "cpu")).type
EMULATED = "CARD_PRELOAD" in os.environ


def about_the_cpu(reason: str):
    """Marks a test that runs on the CPU alone."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"about the CPU: {reason}")


on_a_card = pytest.mark.skipif(DEVICE != "cuda", reason="needs a card: DEVICE=cuda")


def needs(*libraries: str):
    """Marks a test of libraries that are not in requirements.txt."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing or libraries)}")


class SkipFloat64(torch.overrides.TorchFunctionMode):
    """Skips a test that needs float64, on a device that has none."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.float64 in (*args, *kwargs.values()) or function is Tensor.double:
            pytest.skip(f"float64, which {DEVICE} does not have")
        return function(*args, **kwargs)


@functools.cache
def has_float64(device: str) -> bool:
    try:
        return bool(torch.ones((), dtype=torch.float64, device=device))
    except (TypeError, RuntimeError):
        return False


@pytest.fixture(autouse=True)
def on_device(request):
    """New tensors and modules are on DEVICE. The tests of a card say themselves where: a default
    would hide an op that does not."""
    if DEVICE == "cpu" or request.function.__name__.startswith("test_card_"):
        yield
        return
    torch.set_default_device(DEVICE)
    with contextlib.nullcontext() if has_float64(DEVICE) else SkipFloat64():
        yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test draws from one seed, and leaves no compiled code or dtype behind."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield


def slow_but(quick, cases) -> list:
    """The cases of a test: those that are not quick run with SLOW=1."""
    return [pytest.param(*(case if isinstance(case, tuple) else [case]),
                         marks=[] if case in quick else slow) for case in cases]


# ---- Equal, refused, compiled ----

def close(got, want, tol: float = 1e-9) -> None:
    """Tensors, or lists of them; NaN equals NaN. `want` is cast to the dtype of `got`: dtypes are
    not compared."""
    if isinstance(got, Tensor):
        torch.testing.assert_close(
            got, want.to(got.dtype), rtol=tol, atol=tol, equal_nan=True)
    else:
        for pair in zip(got, want, strict=True):
            close(*pair, tol)


def same(got, want) -> None:
    """Equal to the last bit, dtypes too; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def grads(output: Tensor, inputs, upstream: Tensor | None = None) -> list[Tensor]:
    """Gradients of output to the inputs; an input that was not used is a failure."""
    if upstream is None:
        upstream = torch.ones_like(output)
    return list(torch.autograd.grad(output, inputs, upstream))


def counts_of(model) -> list[Tensor]:
    """What the routers keep beside their state dict: counts, sums, latest losses."""
    modules = getattr(model, "modules", list)()
    routers = [module for module in modules if isinstance(module, moe.Router)]
    return [tensor for router in routers for tensor in router.counts.tensors().values()]


def outcome(function, *calls) -> list[Tensor]:
    """What the calls give, all in flight before the first backward, and what they change.

    A call is a tensor or the tuple of arguments. The outputs; the gradients of the arguments and of
    the function's parameters that require one; buffers and counts, which are then set back.
    """
    calls = [call if isinstance(call, tuple) else (call,) for call in calls]
    leaves = [x for call in calls for x in call if isinstance(x, Tensor) and x.requires_grad]
    leaves += [p for p in getattr(function, "parameters", list)() if p.requires_grad]
    state = [*getattr(function, "buffers", list)(), *counts_of(function)]
    before = [tensor.clone() for tensor in state]
    for tensor in leaves:
        tensor.grad = None
    outputs = [function(*call) for call in calls]
    for y in outputs:
        y.backward(torch.arange(1.0, 1 + y.numel()).sin().view_as(y).to(y))
    slopes = [tensor.grad for tensor in leaves]
    assert all(slope is not None for slope in slopes), "an input or a parameter was not used"
    after = [tensor.clone() for tensor in state]
    with torch.no_grad():
        for tensor, value in zip(state, before):
            tensor.copy_(value)
    for tensor in leaves:
        tensor.grad = None
    return [*[y.detach() for y in outputs], *slopes, *after]


def agree(got, want, *calls, tol: float = 1e-9) -> None:
    """Two functions or modules have the same outcome; with tol=0 to the last bit."""
    close(outcome(got, *calls), outcome(want, *calls), tol)


@contextlib.contextmanager
def about(*what):
    """A failure inside names these things: a seed, a configuration."""
    try:
        yield
    except Exception as failed:
        raise AssertionError(f"{', '.join(map(str, what))}: {failed}") from failed


def leaf(*shape: int, dtype=torch.float64) -> Tensor:
    """Random values that require a gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


fp32_leaf = functools.partial(leaf, dtype=torch.float32)


def error(function, *args, **kwargs) -> str:
    """The type and text of the error that a call raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def check_error_table(table: str, **names) -> None:
    """Each row is `call => phrase`, or `call; call => phrase`: each call raises a ValueError whose
    text holds the phrase. A phrase that begins with another type names that."""
    for row in table.strip().splitlines():
        calls, phrase = row.strip().split(" => ")
        kind = re.match(r"(\w+Error: |)", phrase)[0] or "ValueError: "
        for call in calls.split("; "):
            text = error(eval, call, {**sys._getframe(1).f_globals, **names})
            assert text.startswith(kind) and phrase in text, f"{call}: {text}"


def twin(module, **fields):
    """A layer or router with the same weights, whose config has other values of these fields."""
    other = type(module)(dataclasses.replace(module.config, **fields))
    other.load_state_dict(module.state_dict(), strict=False)
    return other


def compiled(function, backend: str | None = "aot_eager", **kwargs):
    """One graph; the function itself where the backend is None."""
    if backend is None:
        return function
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


def graphs_made() -> int:
    """How many the compiler has made in this test."""
    return counters["stats"]["unique_graphs"]


def checkpointed(f, reentrant: bool):
    return lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=reentrant)


reentrant = functools.partial(checkpointed, reentrant=True)
non_reentrant = functools.partial(checkpointed, reentrant=False)
with_inductor = functools.partial(compiled, backend="inductor")


def selective(f):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])
    return lambda *args: checkpoint(f, *args, use_reentrant=False, context_fn=keep)


def hooked(f):
    """With hooks on saved tensors that are not the checkpoint's."""
    def run(*args):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            return f(*args)
    return run


def offloaded(f):
    def run(*args):
        with torch.autograd.graph.save_on_cpu():
            return f(*args)
    return run


def before_another(f):
    """The checkpoint's own hooks see a tensor after f, so that it runs again."""
    return lambda *args: f(*args).clamp(-1e9, 1e9)


def in_turn(*wrappers):
    """The wrappers as one; the first is the innermost."""
    return lambda f: functools.reduce(lambda inner, wrap: wrap(inner), wrappers, f)


# The ways to run a module. WAYS[name](module) gives what module(x) gives.
WAYS = {
    "plain": in_turn(),
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested non in non": in_turn(non_reentrant, non_reentrant),
    "nested non in re": in_turn(non_reentrant, reentrant),
    "nested re in non": in_turn(reentrant, non_reentrant),
    "nested re in re": in_turn(reentrant, reentrant),
    "selective": selective,
    "hooks in non-reentrant": in_turn(hooked, before_another, non_reentrant),
    "offload in non-reentrant": in_turn(offloaded, before_another, non_reentrant),
    "hooks around non-reentrant": in_turn(non_reentrant, hooked),
    "hooks in reentrant": in_turn(hooked, before_another, reentrant),
    "hooks in nested non in non": in_turn(
        hooked, before_another, non_reentrant, before_another, non_reentrant),
    "compiled": compiled,
    "compiled inside reentrant": in_turn(compiled, reentrant),
    "compiled inside non-reentrant": in_turn(compiled, non_reentrant),
    "compiled around reentrant": in_turn(                              # it breaks the graph
        reentrant, functools.partial(torch.compile, backend="aot_eager")),
    "compiled around non-reentrant": in_turn(non_reentrant, compiled),
    "inductor around non-reentrant": in_turn(non_reentrant, with_inductor),
    "inductor inside non-reentrant": in_turn(with_inductor, non_reentrant),
}
EAGER_WAYS = list(WAYS)[:13]
QUICK_WAYS = [*EAGER_WAYS, "compiled around non-reentrant"]


def of_module(module, function):
    """args -> function(module, *args), for `outcome` and `agree`: with all that the module has."""
    call = functools.partial(function, module)
    for name in ("parameters", "buffers", "modules"):
        setattr(call, name, getattr(module, name))
    return call


def run_as(way: str, module: torch.nn.Module):
    """The module in a way of WAYS, for `outcome` and `agree`: with its parameters and counts."""
    function = WAYS[way](module)
    return of_module(module, lambda module, *args: function(*args))


def ops_of(*modules) -> list:
    """The ops that these modules define."""
    return [op for module in modules for op in vars(module).values()
            if isinstance(op, torch._library.custom_ops.CustomOpDef)]


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells note(name, args, out) of every op. It looks into the ops of some modules: at those that
    they are made of, too. `inside` has the names of the former while they run."""

    supports_higher_order_operators = True           # "auto_functionalized_v2" around a mutating op

    def __init__(self, note: Callable, into: Iterable = ()):
        super().__init__()
        self.note = note
        self.bodies = {op._qualname: op._init_fn for op in ops_of(*into)}
        self.inside = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        qualname = function.name().split(".")[0]
        name = qualname.split("::")[-1]
        self.inside.append(name)
        with self if qualname in self.bodies else contextlib.nullcontext():
            out = self.bodies.get(qualname, function)(*args, **kwargs or {})
        self.inside.pop()
        self.note(name, args, out)
        return out


# ---- Configurations ----

LOSS_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
LOSSES = dict(load_balancing_type=LOSS_TYPES, aux_loss_coeff=(0.1, 0.2, 0.3), z_loss_coeff=0.1)
BIASED = dict(score_function="sigmoid", enable_expert_bias=True)
QUANTILE = dict(**BIASED, bias_update="quantile")
# What a layer can be, by a name; the fields beside those of small_config or exact_config.
CONFIGS = {
    "losses": dict(**LOSSES, **QUANTILE, calculate_per_token_loss=True, shared_expert_gate=True,
                   latent_size=7, latent_norm=True),
    "sinkhorn": dict(load_balancing_type="sinkhorn"),
    "bias and groups": dict(score_function="sigmoid", enable_expert_bias=True, num_groups=2,
                            group_topk=1, scaling_factor=2.5),
    "dropping": dict(capacity_factor=0.8, apply_probs_on="input", latent_size=7, topk=1,
                     pre_softmax=True, activation="relu2"),
    "padded": dict(capacity_factor=0.8, pad_to_capacity=True, token_drop_policy="position",
                   add_bias_linear=True),
    "gpt_oss": dict(activation="quick_geglu", glu_linear_offset=1.0, activation_clamp_value=0.5,
                    add_bias_linear=True, router_bias=True),
    "situ": dict(activation="situ", situ_beta=1.5, situ_linear_beta=2.0, add_bias_linear=True),
}


def small_config(**fields) -> MoEConfig:
    """In fp32, without a shared expert; [S, B, H]."""
    small = dict(hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=2, batch_first=False)
    return MoEConfig(**{**small, **fields})


def exact_config(**fields) -> MoEConfig:
    """In fp64, with a shared expert; [S, B, H]."""
    small = dict(
        hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, shared_expert_intermediate_size=8,
        params_dtype=torch.float64, router_dtype=torch.float64, init_std=0.5, batch_first=False)
    return MoEConfig(**{**small, **fields})


def small_layer(**fields) -> MoELayer:
    return MoELayer(small_config(**fields))


def exact_layer(**fields) -> MoELayer:
    return MoELayer(exact_config(**fields))


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


def gelu_loop(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x ** 3)).tanh())


def act_loop(h_F: Tensor, c: MoEConfig) -> Tensor:
    if c.activation == "relu2":
        return torch.where(h_F > 0, h_F * h_F, 0.0)
    if c.activation == "relu":
        return torch.where(h_F > 0, h_F, 0.0)
    if c.activation == "gelu":
        return gelu_loop(h_F)
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
        gate = gelu_loop(a)
    else:
        gate = c.situ_beta * (a / c.situ_beta).tanh() / (1 + (-a).exp())
    return gate * (b + c.glu_linear_offset)


def expert_loop(x_H: Tensor, e: int, c: MoEConfig, w: dict) -> Tensor:
    h_PF = w["experts.fc1"][e] @ x_H
    if c.add_bias_linear:
        h_PF = h_PF + w["experts.fc1_bias"][e]
    y_H = w["experts.fc2"][e] @ act_loop(h_PF.flatten(), c)
    return y_H + w["experts.fc2_bias"][e] if c.add_bias_linear else y_H


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


def shared_loop(shared: SharedExpertMLP, x: Tensor) -> Tensor:
    """fc2 · act(fc1 · x) · sigmoid(gate · x), one token at a time."""
    rows = []
    for x_H in x.flatten(0, -2):
        y_H = shared.fc2 @ act_loop(shared.fc1.flatten(0, 1) @ x_H, shared.config)
        if shared.gate_weight is not None:
            y_H = y_H * score_loop([shared.gate_weight[0] @ x_H], "sigmoid")[0]
        rows.append(y_H)
    return torch.stack(rows).view(x.shape)


def layer_loop(layer: MoELayer, x: Tensor, probs_TK: Tensor, indices_TK: Tensor) -> Tensor:
    """The routed experts, and the shared one."""
    weights = dict(layer.named_parameters())
    y_TH = moe_loop(x.flatten(0, -2), probs_TK, indices_TK, c=layer.config, w=weights)
    y = y_TH.view_as(x)
    return y if layer.shared_experts is None else y + shared_loop(layer.shared_experts, x)


def counts_loop(logits_TE: Tensor, c: MoEConfig, valid) -> list[int]:
    """How many of the valid tokens have each expert in their plain top K."""
    chosen = [e for t in valid for e in best(list(logits_TE[t]), c.topk)]
    return [chosen.count(e) for e in range(c.num_experts)]


def switch_loss_loop(logits_TE, c: MoEConfig, coeff: float, valid, counts=None) -> Tensor:
    """coeff · E/(K·T²) · Σ_e n_e Σ_t s_te over the valid tokens; T is Σ_e n_e / K. The counts n are
    those of these tokens, or given."""
    if counts is None:
        counts = counts_loop(logits_TE, c, valid)
    loss = logits_TE.new_zeros(())
    for t in valid:
        s = score_loop(list(logits_TE[t]), c.score_function)
        loss = loss + sum(n * s_e for n, s_e in zip(counts, s)) / sum(s)
    return loss * coeff * c.num_experts / c.topk / max(sum(counts) / c.topk, 1) ** 2


def z_loss_loop(logits_TE: Tensor, coeff: float, valid) -> Tensor:
    total = logits_TE.new_zeros(())
    for t in valid:
        total = total + sum(x.exp() for x in logits_TE[t]).log() ** 2
    return coeff * total / max(len(valid), 1)


def sinkhorn_loop(cost: Tensor, tol: float, rounds: int = 256):
    """Megatron's loop: (exp cost, d0, d1, whether it has stopped by itself)."""
    A = cost.exp()
    T, E = A.shape
    d1 = torch.ones(E, dtype=A.dtype)
    for _ in range(rounds):
        d0 = 1 / max(T, 1) / ((A * d1).sum(1) + 1e-8)
        last = d1
        d1 = 1 / E / ((A * d0[:, None]).sum(0) + 1e-8)
        if (d1 - last).abs().mean() <= tol:
            return A, d0, d1, True
    return A, d0, d1, False


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


class RouterLoop:
    """Oracle of TopKRouter in training: one token at a time, with counts and sums of its own."""

    def __init__(self, router: TopKRouter):
        self.router = router
        self.config = router.config
        self.counts = [0] * self.config.num_experts
        self.sums = [0] * self.config.num_experts
        self.steps = 0

    def __call__(self, x_SBH: Tensor, mask=None, given=None, bounds=None):
        """(probs [T, K], indices [T, K], loss), differentiable."""
        config = self.config
        E = config.num_experts
        S, B = x_SBH.shape[:2]
        sequences = [range(b, S * B, B) for b in range(B)]
        if bounds is not None:
            pairs = zip(bounds.tolist(), bounds[1:].tolist())
            sequences = [range(first, last) for first, last in pairs if first < last]
        rows = [self.router.weight @ x_H for x_H in x_SBH.flatten(0, 1)]
        logits_TE = torch.stack(rows)
        if self.router.bias is not None:
            logits_TE = logits_TE + self.router.bias
        valid = [t for t in range(len(rows)) if mask is None or not mask.flatten()[t]]
        if "sinkhorn" in config.balancing:
            probs, indices = self.sinkhorn(logits_TE, valid, given)
        else:
            probs, indices = route_loop(logits_TE, config, self.router.expert_bias, given_TK=given)
        for t in set(range(len(rows))) - set(valid):
            indices[t] = E
        for e in indices[indices < E].tolist():
            self.counts[e] += 1
        if config.capacity_factor is not None:
            self.drop(probs, indices)
        loss = self.loss(logits_TE, valid, sequences)
        return torch.where(indices < E, probs, 0.0), indices, loss

    def sinkhorn(self, logits_TE, valid, given):
        """The top K of the valid tokens' balanced costs, after 256 rounds at most; a score of all
        logits is the prob."""
        K = self.config.topk
        indices = given
        if given is None:
            indices = torch.zeros(len(logits_TE), K, dtype=torch.int64)
            A, d0, d1, _ = sinkhorn_loop(logits_TE.detach()[valid], 1e-4)
            for t, d, row in zip(valid, d0, A):
                indices[t] = torch.tensor(best(list(d1 * row * d), K))
        over_all = dataclasses.replace(
            self.config, load_balancing_type="none", norm_topk_prob=False, pre_softmax=K > 1,
            score_function="sigmoid" if K == 1 else "softmax")
        return route_loop(logits_TE, over_all, given_TK=indices)

    def drop(self, probs, indices) -> None:
        """Each expert keeps its first C tokens, by prob or by position."""
        self.dropped = 0
        E = self.config.num_experts
        C = math.ceil(indices.numel() / E * self.config.capacity_factor)
        for e in range(E):
            takers = [tuple(place) for place in (indices == e).nonzero().tolist()]
            if self.config.token_drop_policy == "probs":
                takers.sort(key=lambda place: -probs[place].item())
            for place in takers[C:]:
                indices[place] = E
                self.dropped += 1

    def loss(self, logits_TE, valid, sequences):
        config = self.config
        loss = logits_TE.sum() * 0
        if config.z_loss_coeff:
            loss = loss + z_loss_loop(logits_TE, config.z_loss_coeff, valid)
        for kind, coeff in config.losses.items():
            parts, means = [valid], None
            if kind == "seq_aux_loss":
                parts = [[t for t in valid if t in sequence] for sequence in sequences]
            if kind == "global_aux_loss":                    # the counts of the forwards so far
                new = counts_loop(logits_TE, config, valid)
                self.sums = [n + more for n, more in zip(self.sums, new)]
                self.steps += 1
                means = [n / self.steps for n in self.sums]
            for part in parts:
                own = switch_loss_loop(logits_TE, config, coeff, valid=part, counts=means)
                loss = loss + own / len(parts)
        return loss * len(valid) if config.calculate_per_token_loss else loss


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
    dict(activation="relu"),
    dict(activation="gelu"),
]


def random_config(rng: random.Random) -> MoEConfig:
    """A config that can be trained, over everything the layer can do; E = 8, K ≤ 4."""
    choices = dict(
        topk=[1, 2, 3, 4],
        score_function=["softmax", "sigmoid", "sqrtsoftplus"],
        pre_softmax=[False, True],
        norm_topk_prob=[None, None, True, False],
        norm_eps=[1e-20, 1e-2],
        scaling_factor=[None, 2.5],
        router_bias=[False, True],
        enable_expert_bias=[False, True],
        add_bias_linear=[False, True],
        apply_probs_on=["activation", "activation", "input"],
        latent_size=[None, 7],
        latent_norm=[False, True],
        latent_norm_eps=[1e-5, 0.1],
        shared_expert_intermediate_size=[None, None, 8],
        shared_expert_gate=[False, True],
        shared_expert_overlap=[False, True],
        z_loss_coeff=[None, 0.1],
        calculate_per_token_loss=[False, False, True])
    while True:
        options = {name: rng.choice(values) for name, values in choices.items()}
        options |= rng.choice(ACTIVATIONS)
        if rng.random() < 0.4:
            options |= dict(num_groups=4, group_topk=2, group_score_topk=rng.choice([1, 2]))
        if rng.random() < 0.4:
            options |= dict(
                capacity_factor=rng.choice([0.5, 1.0]), pad_to_capacity=rng.random() < 0.5,
                token_drop_policy=rng.choice(["probs", "position"]))
        types = tuple(kind for kind in LOSS_TYPES if rng.random() < 0.4)
        if types:
            coeffs = tuple(0.1 * (i + 1) for i in range(len(types)))
            options |= dict(load_balancing_type=types, aux_loss_coeff=coeffs)
        if rng.random() < 0.15:
            for name in ("num_groups", "group_topk", "group_score_topk", "scaling_factor",
                         "norm_topk_prob", "aux_loss_coeff", "score_function",
                         "enable_expert_bias", "pre_softmax"):
                options.pop(name, None)
            options |= dict(load_balancing_type="sinkhorn")
        with contextlib.suppress(ValueError):
            config = exact_config(num_experts=8, **options)
            if not config.always_one:
                return config


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


def random_bounds(T: int, rng: random.Random) -> Tensor:
    """cu_seqlens of a pack of T tokens. Some sequences have no tokens; the last ones are such."""
    inner = sorted(rng.choices(range(T + 1), k=rng.randrange(5)))
    dtype = rng.choice([torch.int32, torch.int64])
    return torch.tensor([0, *inner, *[T] * rng.randint(1, 3)], dtype=dtype)


# ---- Route ----

def test_route_matches_loop():
    """Random configurations: indices exactly, probs and gradients to rounding, both forms equal."""
    for seed in range(200):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        c = random_config(rng)
        with about(f"seed {seed}", c):
            T = rng.choice([0, 1, 2, 5, 11])
            logits = torch.randn(T, 8, dtype=torch.float64) * rng.choice([0.5, 3.0])
            logits.requires_grad_()
            bias = torch.randn(8) * 0.3 if c.enable_expert_bias else None
            given = None
            if rng.random() < 0.3:
                given = random_indices(T, 8, c.topk, nowhere=0.3, repeats=0.3)
                given = given.to(rng.choice(INTEGERS))
            probs, indices = topk_routing(
                logits, expert_bias=bias, precomputed_indices=given, **c.routing_options)
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
            same(kernels.routing_to_map(probs, indices, 8), (want_TE[:, :8], want_map[:, :8]))


def test_route_dtypes():
    """The arithmetic is fp32, and its result is rounded once."""
    logits = torch.randn(7, 8).bfloat16()
    for kind in ("softmax", "sigmoid", "sqrtsoftplus"):
        route = functools.partial(topk_routing, topk=3, score_function=kind)
        probs, indices = route(logits.float())
        same(route(logits), (probs.bfloat16(), indices))


def test_route_with_probs_of_another_dtype():
    """Wider than the logits or narrower: the arithmetic is that of the wider dtype, and is rounded
    once. Of two 16-bit dtypes every step is rounded, and rounded scores are compared."""
    logits = torch.randn(256, 8).bfloat16()
    bias = torch.randn(8) * 0.1
    score = dict(softmax=lambda x: x.softmax(-1), sigmoid=torch.sigmoid,
                 sqrtsoftplus=lambda x: F.softplus(x).sqrt())
    for kind in score:
        route = functools.partial(
            topk_routing, topk=3, score_function=kind, norm_topk_prob=True,
            scaling_factor=2.5, expert_bias=bias)
        probs, indices = route(logits.float())
        same(route(logits, probs_dtype=torch.float32), (probs, indices))
        same(route(logits.float(), probs_dtype=torch.bfloat16), (probs.bfloat16(), indices))

        narrow, chosen = route(logits, probs_dtype=torch.bfloat16)
        scores = score[kind](logits)
        for t in range(len(logits)):
            ranked = [(scores[t, e] + bias[e]).item() for e in range(8)]
            assert sorted(ranked[e] for e in chosen[t]) == sorted(ranked)[-3:]
            picked = scores[t, chosen[t]]
            same(narrow[t], picked / picked.sum() * 2.5)
        assert not torch.equal(narrow.float(), probs)
        plain = functools.partial(topk_routing, logits, topk=3, score_function=kind)
        same(plain(probs_dtype=torch.bfloat16)[1], scores.topk(3).indices)
        assert not torch.equal(plain()[1], scores.topk(3).indices)     # logits have fewer ties


def test_router_with_probs_of_another_dtype():
    """In all forms, with a gradient, and as one graph."""
    for router_dtype, probs_dtype in itertools.product([torch.float32, torch.bfloat16], repeat=2):
        router = TopKRouter(MoEConfig(
            16, 4, 8, topk=3, params_dtype=torch.bfloat16, router_dtype=router_dtype,
            probs_dtype=probs_dtype, init_std=0.5))
        x = torch.randn(5, 2, 16, dtype=torch.bfloat16)
        logits = router.gating(x)
        probs, indices = router.route(x)
        assert logits.dtype == router_dtype and probs.dtype == probs_dtype
        assert router(x)[0].dtype == router.routing(logits)[0].dtype == probs_dtype
        same(probs, topk_routing(logits.flatten(0, 1), 3, probs_dtype=probs_dtype)[0])
        (probs * torch.randn_like(probs)).sum().backward()
        assert router.weight.grad.abs().sum() > 0
        same(compiled(lambda x: router.route(x)[1])(x), indices)


def test_route_where_scores_saturate_or_underflow():
    """An fp32 sigmoid is 1 from a logit of 17 on; the choice still tells 18 from 30."""
    logits = torch.tensor([[30.0, 18.0, 25.0, 40.0]])
    assert topk_routing(logits, 3, score_function="sigmoid")[1].tolist() == [[3, 0, 2]]
    logits = torch.tensor([[-200.0, -90.0, 0.0, 30.0]], requires_grad=True)
    probs = topk_routing(logits, 4, score_function="sqrtsoftplus")[0]
    assert grads(probs, [logits])[0].isfinite().all()


def test_route_masked_groups_lose_to_negative_scores():
    """Groups that are out are masked with -inf: a mask of 0 would beat the negative biased scores
    of the group that is in (DeepSeek-V3 #741, vllm #13474)."""
    bias = torch.tensor([-2.0, -3.0, -4.0, -5.0])
    indices = topk_routing(
        torch.zeros(1, 4), 2, score_function="sigmoid", expert_bias=bias, num_groups=2,
        group_topk=1)[1]
    assert indices.tolist() == [[0, 1]]


def test_route_errors():
    logits = torch.randn(6, 4)
    check_error_table("""
        route(x, 2); aux(x, 2, "softmax") => logits has shape [1, 6, 4]
        route(logits, 5); route(logits, 0) => topk is
        route(logits, 2, score_function="tanh"); aux(logits, 2, "tanh") => score_function is 'tanh'
        groups() => num_groups = 2 and group_topk = None
        groups(num_groups=3, group_topk=1); groups(num_groups=0, group_topk=1) => does not divide
        groups(topk=3, num_groups=4, group_topk=2) => 4 groups of 1 experts cannot hold
        groups(group_topk=0); groups(group_topk=3) => of num_groups = 2
        groups(group_topk=2, group_score_topk=3); groups(group_topk=2, group_score_topk=0) => score
        route(logits, 2, expert_bias=logits[0, :3]) => expert_bias has shape [3]; needs [E = 4]
        route(logits, 2, precomputed_indices=indices) => shape [6, 3]; needs [T = 6, K = 2]
        kernels.routing_to_map(x, indices, 4) => probs has shape [1, 6, 4]
        kernels.routing_to_map(logits, indices, 4) => indices has shape [6, 3]
        """, route=topk_routing, aux=compute_routing_scores_for_aux_loss,
        groups=functools.partial(topk_routing, logits, topk=2, num_groups=2),
        logits=logits, x=logits[None], indices=torch.zeros(6, 3).long())


# ---- Balance ----

@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balance_losses_match_loops(kind):
    """With any tokens masked, or none there; what a masked token holds changes nothing."""
    c = MoEConfig(4, 4, 6, topk=2, score_function=kind)
    mask = torch.rand(11) < 0.4
    for padding in (torch.zeros_like(mask), mask, torch.ones_like(mask), mask[:0]):
        logits = leaf(len(padding), 6)
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


def test_balance_z_loss_of_nan_in_padding():
    logits = torch.tensor([[1.0, 2.0], [NAN, NAN]], requires_grad=True)
    loss = z_loss_func(logits, 0.3, torch.tensor([False, True]))
    same(loss, z_loss_func(logits[:1], 0.3))
    assert grads(loss, [logits])[0].isfinite().all()


def test_balance_switch_loss_of_sequences():
    """The mean of the losses of those that have tokens, each with its own counts and T."""
    probs = leaf(15, 4)
    sequence = torch.tensor([0, 2, 2, 0, 4, 4, 4, 0, 2, 2, 4, 4, 0, 0, 4])
    map_TE = torch.rand(15, 4) < 0.5
    map_TE[sequence == 4] = False                            # padding
    counts = kernels.sequence_counts(map_TE, sequence, 5)
    losses = []
    for n in range(5):
        own = sequence == n
        same(counts[n], torch.cat([map_TE[own].sum(0), own.sum()[None]]))
        if own.any():
            losses.append(switch_load_balancing_loss_func(
                probs[own], map_TE[own].sum(0), map_TE[own].sum() / 2, topk=2, num_experts=4,
                moe_aux_loss_coeff=0.3))
    want = sum(losses) / 3
    got = kernels.switch_loss_of_sequences(probs, counts, sequence, 2, 0.3)
    close([got, *grads(got, [probs])], [want, *grads(want, [probs])])
    for n in (0, 3):                                         # sequences without tokens
        counts = kernels.sequence_counts(map_TE[:0], sequence[:0], n)
        assert counts.shape == (n, 5)
        assert kernels.switch_loss_of_sequences(probs[:0], counts, sequence[:0], 2, 0.3) == 0


def test_balance_sinkhorn_matches_loop_and_stays_finite():
    all_stopped = 0
    for T, E in [(64, 8), (33, 5), (3, 7), (1, 4)] * 8:
        cost = torch.rand(T, E, dtype=torch.float64) * 10 - 5
        A, d0, d1, stopped = sinkhorn_loop(cost, 1e-4)
        if stopped:
            all_stopped += 1
            close(sinkhorn(cost), d1 * A * d0[:, None], 1e-5)
    assert all_stopped >= 16
    for scale in (1e2, 1e4):
        assert sinkhorn(torch.randn(33, 5) * scale).isfinite().all()
    assert sinkhorn(torch.zeros(0, 5)).shape == (0, 5)
    x = torch.randn(64, 8)
    want = sinkhorn(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        same(sinkhorn(x), want)


def test_balance_capacity_in_python_floats():
    assert get_capacity(10, 3, 1.0, min_capacity=7) == 7
    for N, E, factor, capacity in [
            (10, 3, 1.0, 4), (0, 3, 1.0, 0), (7, 49, 7.0, 1), (100, 3, 1.1, 37),
            (2048 * 8, 64, 1.25, 320), (29, 7, 0.3, 2)]:
        assert get_capacity(N, E, factor) == capacity
    in_graph = compiled(lambda x: x.new_zeros(get_capacity(len(x) * 3, 7, 1.1)), dynamic=True)
    for T, capacity in ((5, 3), (29, 14), (70, 33), (91, 43), (333, 157)):
        assert len(in_graph(torch.zeros(T))) == capacity


def test_balance_expert_bias_update():
    counts = torch.tensor([5.0, 1.0, 3.0, 3.0])
    bias = torch.tensor([0.1, 0.2, 0.3, 0.4])
    want = torch.tensor([0.09, 0.21, 0.30, 0.40])
    close(get_updated_expert_bias(counts, bias, 0.01), want, 1e-7)
    even = torch.full((3,), 2.0 ** 24 + 2)                  # the mean of three in fp32 could round
    same(get_updated_expert_bias(even, bias[:3], 0.01), bias[:3])
    uneven = torch.tensor([2 ** 40 + 1, 2 ** 40, 2 ** 40])  # not even in fp64 could n·E round here
    want = bias[:3] + torch.tensor([-0.01, 0.01, 0.01])
    same(get_updated_expert_bias(uneven, bias[:3], 0.01), want)


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
            router.route(x)[0].sum().backward()
        assert router.bias_histogram.sum() == 4 * 1000 * 32
        violations.append((router.local_tokens_per_expert.max() / 500 - 1).item())
        update_expert_bias(layer)
        assert router.local_tokens_per_expert.sum() == 0 and router.bias_histogram.sum() == 0
    assert violations[0] > 0.5 and max(violations[1:]) < 0.2, violations

    mask = torch.rand(1000) < 0.5                                    # a padding token needs no bias
    router.route(xs[0], mask)[0].sum().backward()
    scores = kernels.SCORE_FUNCTIONS[score_function](router.gating(xs[0]))[~mask]
    same(router.bias_histogram, required_bias_histogram(scores, router.expert_bias, 4))
    layer.load_state_dict(layer.state_dict())                        # another bias from now on
    same(router.bias_histogram, torch.zeros_like(router.bias_histogram))
    assert not router.local_tokens_per_expert.any()                  # they are of another model too
    router.reset_bias_histogram()
    assert router.bias_histogram.sum() == 0 and router.bias_histogram.dtype == torch.int32


@pytest.mark.parametrize("T, backend", slow_but(
    [(1, None), (4095, None), (4097, None)],
    itertools.product([1, 4095, 4097, 10 ** 6], [None, "inductor"])))
def test_balance_sums_over_tokens_are_accurate(T, backend):
    """In fp32, eager and in a graph, as in float64 to a few units of the last place. In the last
    function all values are 1/3, so roundings go one way: one sum in a graph is 1.2e-5 off at 4097.
    """
    logits = torch.randn(T, 8) * 0.3
    leaves = logits, torch.rand(8)
    functions = [
        lambda x, n: switch_load_balancing_loss_func(x.softmax(1), n, T, 2, 8, 0.1),
        lambda x, n: z_loss_func(x, 0.1),
        lambda x, n: kernels.weighted_token_sum(torch.full_like(x, 1 / 3), n)]
    for function, tol in zip(functions, (3e-7, 3e-7, 5e-7 if T == 10 ** 6 else 3e-7)):
        want = function(*[x.double() for x in leaves])
        got = compiled(function, backend)(*leaves)
        assert got.dtype == torch.float32
        close(got.double(), want, tol)


def test_balance_errors():
    logits = torch.randn(6, 4)
    check_error_table("""
        loss(logits[None], bias, 6, 2, 4, 0.1) => probs has shape [1, 6, 4]
        loss(logits, logits[:4], 6, 2, 4, 0.1) => tokens_per_expert has shape [4, 4]; needs [E = 4]
        sinkhorn(logits[None]) => cost has shape [1, 6, 4]
        required(logits, bias, 4); required(logits, bias, 0) => topk is
        required(logits, bias, 2, 0) => topk is 2 and num_bins 0
        required(logits, bias[:3], 2) => expert_bias has shape [3]
        required(logits[None], bias, 2) => scores has shape [1, 6, 4]
        quantile_expert_bias(logits, bias, 2) => expert_bias has shape [4]; needs [E = 6]
        quantile_expert_bias(bias, bias, 2) => histogram has shape [4]
        quantile_expert_bias(logits[:4], bias, 4) => topk is 4; needs 1 <= topk < num_experts = 4
        """, loss=switch_load_balancing_loss_func, required=required_bias_histogram, logits=logits,
        bias=logits[0])


# ---- Permute ----

def test_permute_layout():
    plan = plan_permutation(torch.tensor([[2, 0], [0, 1], [2, 4]]), num_experts=4)
    starts = [0, *plan.offsets.tolist(), 6]
    tokens = (plan.order // 2).tolist()
    names = [*[f"expert {e}" for e in range(4)], "unrouted"]
    lines = [f"{name}: tokens {tokens[a:b]}" for name, a, b in zip(names, starts, starts[1:])]
    assert_expected_inline("\n".join(lines), """\
expert 0: tokens [0, 1]
expert 1: tokens [1]
expert 2: tokens [0, 2]
expert 3: tokens []
unrouted: tokens [2]""")
    assert [x.dtype for x in plan] == [torch.int64] * 3 + [torch.int32]
    same(plan.order[plan.inverse.flatten()], torch.arange(6))


@pytest.mark.parametrize("E, dtype", [
    (1, torch.uint8), (255, torch.uint8), (256, torch.int16), (32767, torch.int16),
    (32768, torch.int32)])
def test_permute_sorts_few_digits(E, dtype):
    """By the narrowest dtype that holds the unrouted index E; the order is that of int64."""
    indices = torch.randint(E + 1, (50, 4))
    indices[::7] = torch.tensor([E, E - 1, 0, E])
    sorted_in = []
    with Watch(lambda name, args, out: sorted_in.append(args[0].dtype) if "sort" in name else None):
        order = plan_permutation(indices, E).order
    assert set(sorted_in) == {dtype, torch.int32}            # then row numbers, for the inverse
    same(order, indices.flatten().argsort(stable=True))


def test_permute_index_form_gradients():
    plan = plan_permutation(random_indices(7, 4, 3, nowhere=0.3), 4)
    check = torch.autograd.gradcheck
    assert check(lambda x: gather_rows(x, plan), (leaf(7, 5),))
    assert check(lambda r: combine_rows(r, plan), (leaf(21, 5),))
    assert check(lambda r, p: combine_rows(r, plan, p), (leaf(21, 5), leaf(7, 3)))


def test_permute_rows_that_go_nowhere_reach_nothing():
    """A NaN in such a row, or in the gradient that comes to it, changes no output, no gradient."""
    indices = torch.tensor([[0, 3], [3, 3], [1, 0]])         # 3: unrouted
    plan = plan_permutation(indices, 3)
    n = int(plan.offsets[-1])
    rows = torch.randn(6, 4)
    probs = torch.rand(3, 2)
    nans = torch.zeros(6, 4)
    nans[n:] = NAN
    for p in (None, probs):
        same(combine_rows(rows + nans, plan, p), combine_rows(rows, plan, p))
    tokens = fp32_leaf(3, 4)
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


def test_permute_errors():
    check_error_table("""
        gather_rows(x[None], plan) => tokens has shape [1, 6, 8]
        plan_permutation(zeros, 4); plan_permutation(index, 4) => TypeError: indices is [6
        gather_rows(x[:5], plan) => tokens has shape [5, 8]
        combine_rows(x, plan) => rows has shape [6, 8]
        combine_rows(torch.zeros(12, 8), plan, probs) => probs has shape [6, 4]
        """, x=torch.randn(6, 8), probs=torch.randn(6, 4), index=torch.zeros(6).long(),
        zeros=torch.zeros(6, 2), plan=plan_permutation(torch.zeros(6, 2).long(), 4))


@about_the_cpu("on a card the check would wait for the values")
@pytest.mark.parametrize("E, wrong", [(8, 256), (8, 65539), (3, 4), (256, -1), (8, -1)])
def test_permute_refuses_indices_out_of_range(E, wrong):
    """Sorted in a narrow dtype, they would become another expert's."""
    indices = torch.tensor([[0, wrong]])
    for function in (plan_permutation, kernels.count_experts):
        with pytest.raises(ValueError, match=f"indices has .*{wrong}.*; needs 0 to num_experts"):
            function(indices, E)


def integers_used(run) -> dict[str, set]:
    """Dtypes of what an op of run() computes with indices, or takes as indices. Those of index
    arithmetic are of their results."""
    ops = ("mul", "floor_divide", "remainder", "index_select", "gather", "index_add", "index")
    seen = {}

    def note(name, args, out):
        tensors = torch.utils._pytree.tree_leaves(out if name in ops[:3] else args[1:])
        if name in ops:
            dtypes = [x.dtype for x in tensors if isinstance(x, Tensor)]
            seen[name] = seen.get(name, set()).union(dtypes)
    with Watch(note):
        run()
    return seen


def test_permute_index_times_width_is_int64():
    """torchtitan #2430: beyond 2^31 elements an int32 product of an index and a row's width
    overflows."""
    x = fp32_leaf(6, 8)
    plan = plan_permutation(random_indices(6, 3, 2), 3)

    def run():
        small_layer(**CONFIGS["padded"])(x).sum().backward()
        combine_rows(gather_rows(x, plan), plan, torch.rand(6, 2)).sum().backward()
    seen = integers_used(run)
    assert len(seen) >= 5
    assert set().union(*seen.values()) <= {torch.int64, torch.bool, torch.float32}, seen


# ---- Activations ----

@pytest.mark.parametrize("fields", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_activation_matches_autograd(fields, weighted):
    """Values and gradients, against autograd through the plain formula in fp64."""
    c = MoEConfig(4, 4, 4, topk=2, **fields)
    kind = c.bound_activation
    y = leaf(5, 3, 8)
    w = leaf(5, 3, 1) if weighted else None
    inputs = [y, w] if weighted else [y]
    want = torch.stack([act_loop(row, c) for row in y.flatten(0, 1)]).unflatten(0, (5, 3))
    if weighted:
        want = want * w
    g = torch.randn_like(want)
    got = activation(y, kind, w)
    constants = getattr(kind.function, "keywords", {})
    same(activation(y, c.activation, w, **constants), got)
    assert len(fields) > 1 or activation(y, c.activation, w).equal(got)      # the same defaults
    got_grads = grads(got, inputs, g)
    close([got, *got_grads], [want, *grads(want, inputs, g)])


def test_activation_gradient_at_a_clamp():
    """0 beyond its bounds. At a bound it is torch's own: 1 up to torch 2.13, and 0 from 2.14 on."""
    y = torch.tensor([[0.6, -0.8, 0.71, 0.6, -0.6, -0.71]], requires_grad=True)
    a, b = y.detach().clamp(max=0.7).chunk(2, dim=1)
    b = b.clamp(min=-0.7)
    s = a.sigmoid()
    within_a = torch.tensor([1.0, 1.0, 0.0])
    within_b = torch.tensor([1.0, 1.0, 0.0])
    want = torch.cat([b * s * (1 + a * (1 - s)) * within_a, a * s * within_b], 1)
    for function in (activation, compiled(activation)):
        close(grads(function(y, clamp_value=0.7), [y])[0], want, 1e-6)


class TwoExperts(torch.nn.Module):
    """expert_mlp twice, and activation, with an activation that is made already."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.plan = plan_permutation(random_indices(7, 3, 2), 3)

    def forward(self, x, probs, fc1, fc2):
        y = x
        for _ in range(2):
            y = expert_mlp(y, probs, self.plan, fc1, fc2, kind=self.made)
        return y + activation(x.repeat(1, self.made.parts), self.made)


@slow
@pytest.mark.parametrize("made", [
    kernels.activation_of("quick_geglu", alpha=1.3, linear_offset=1.0, clamp_value=0.7),
    kernels.activation_of("situ", beta=1.5, linear_beta=2.0),
    kernels.ACTIVATIONS["relu2"]])
def test_activation_made_before_it_is_compiled(made):
    """With dynamic=True the compiler turns its constants into symbolic numbers."""
    two = TwoExperts(made)
    shapes = (7, 4), (7, 2), (3, made.parts, 5, 4), (3, 4, 5)
    agree(compiled(two, dynamic=True), two, tuple(leaf(*shape) for shape in shapes))


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
    """With fp8_input_store it is kept in fp8, and only the backward sees the rounding."""
    y = torch.randn(64, 32)
    w = torch.rand(64, 1)
    y[0, 0], y[1, 1], y[2, 16], y[3, 17] = 1e4, -1e4, 1e4, -1e4      # beyond e4m3's 448
    stored = y.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    y.requires_grad_()
    act = functools.partial(activation, weights=w)
    assert saved_bytes(lambda: act(y * 1)) == (64 * 32 + 64) * 4
    stand_in = 4                                             # a zero in y's shape and dtype
    assert saved_bytes(lambda: act(y * 1, fp8_input_store=True)) == 64 * 32 + 64 * 4 + stand_in
    out = act(y, fp8_input_store=True)
    g = torch.randn(64, 16)
    same(out, act(y))
    stored.requires_grad_()
    close(grads(out, [y], g)[0], grads(act(stored), [stored], g)[0], 1e-6)


def test_activation_errors():
    check_error_table("""
        activation(x, "silu") => kind is 'silu'
        activation(x[:, :7]) => y has shape [6, 7]; needs an even last axis
        activation(x, weights=torch.ones(6)) => weights has shape [6]
        activation(x, "relu2", clamp_value=None) => relu2 has no such constant, it has none
        activation(x, made, alpha=1.702) => it has linear_offset, clamp_value
        activation(x, kernels.swiglu, clamp_value=1.0) => has no such constant, it has none
        activation(x, alpha=1.702); activation(x, beta=2.0) => it has linear_offset, clamp_value
        activation(x, "situ", clamp_value=1.0) => situ has no such constant, it has beta, linear_
        activation(x, "situ", beta=0.0) => beta is 0.0
        activation(x, "situ", linear_beta=-1.0) => linear_beta is -1.0
        """, x=torch.randn(6, 8), made=kernels.ACTIVATIONS["swiglu"],
        kernels=kernels)


# ---- Grouped product and experts ----

def with_native_products(monkeypatch, in_graphs: bool = False) -> None:
    """From now on the CPU is a card on which torch's grouped product reads the offsets. In eager
    mode, if you want it in graphs too, the rows that it leaves uninitialised are NaN."""
    def poisoned(rows, other, offs):
        out = product(rows, other, offs=offs)
        if out.ndim == 2 and (in_graphs or not torch.compiler.is_compiling()):
            out = out.masked_fill((torch.arange(len(out)) >= offs[-1])[:, None], NAN)
        return out
    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", poisoned)
    monkeypatch.setattr(
        grouped, "row_blocks", lambda offsets, *_: grouped.RowBlocks(offsets, "torch"))


def without_products(monkeypatch) -> None:
    """From now on one expert is multiplied after the other, and the offsets are read on the host,
    as on a device that has neither torch's grouped product nor Triton."""
    monkeypatch.setattr(grouped, "row_blocks", lambda offsets, *_: grouped.RowBlocks(
        grouped._read_on_host(offsets)))


def with_triton(monkeypatch) -> None:
    """From now on a CPU is a card on which the products are Triton's. A loop stands in for its
    kernels. On a card nothing changes."""
    if DEVICE == "cpu":
        stand_in = types.SimpleNamespace(
            rows_times_weights=lambda rows, weights, offsets: (
                grouped._rows_times_weights(rows, weights, None, offsets)),
            rows_times_rows=grouped._rows_times_rows)
        monkeypatch.setattr(grouped, "_triton", lambda: stand_in)
        monkeypatch.setattr(
            grouped, "row_blocks", lambda offsets, *_: grouped.RowBlocks(offsets, "triton"))


# Who multiplies, and what makes it so.
PRODUCTS = {
    "this device": lambda monkeypatch: None, "a loop": without_products, "triton": with_triton,
    "native": with_native_products,
}


@pytest.mark.parametrize("who, dtype, tol", [
    ("this device", torch.float64, 1e-9),
    *[(who, *case) for who in ("this device", "a loop", "triton") for case in [
        (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)]],
    pytest.param("native", torch.float32, 1e-5, marks=about_the_cpu("it stands in for a card"))])
def test_experts_grouped_mm_matches_loop(monkeypatch, who, dtype, tol):
    """NaN in the rows past the last offset; an expert without rows; an expanded gradient. Autocast
    changes nothing."""
    sizes = [3, 4, 0, *[3, 4] * 8]
    offsets = torch.tensor(sizes).cumsum(0).int()
    rows = torch.randn(70, 8, dtype=dtype)
    weights = leaf(19, 8, 16, dtype=dtype)
    want = [torch.zeros(shape).double() for shape in [(70, 16), (70, 8), (19, 8, 16)]]
    expert_of = [e for e in range(19) for _ in range(sizes[e])]
    for i, e in enumerate(expert_of):
        want[0][i] = rows[i].double() @ weights[e].double()
        want[1][i] = weights[e].double().sum(1)
        want[2][e] += rows[i].double()[:, None]
    rows[63:] = NAN                                         # pytorch #193633: garbage past the end
    rows.requires_grad_()
    PRODUCTS[who](monkeypatch)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = grouped_mm(rows, weights, offsets)
    got = [out, *grads(out.sum(), [rows, weights])]          # the gradient has stride 0
    assert [x.dtype for x in got] == [dtype] * 3
    close(got, want, tol)
    assert not out[63:].any() and not got[1][63:].any() and not got[2][2].any()


def test_experts_errors():
    x = torch.randn(6, 8)
    plan = plan_permutation(torch.zeros(6, 2).long(), 4)

    def mlp(tokens=x, **options):
        operands = dict(plan=plan, probs=torch.rand(6, 2), fc1=torch.zeros(4, 2, 4, 8),
                        fc2=torch.zeros(4, 8, 4))
        return expert_mlp(tokens, **{**operands, **options})

    check_error_table("""
        grouped_mm(x, zeros(4, 9, 2), ends) => weights has shape [4, 9, 2]; needs [E, H = 8
        grouped_mm(x, zeros(8, 2), ends) => weights has shape [8, 2]
        grouped_mm(x[0], zeros(4, 8, 2), ends) => rows has shape [8]
        grouped_mm(x, zeros(4, 8, 2), ends[:, None]) => offsets has shape [4, 1]
        grouped_mm(x, zeros(4, 8, 2).double(), ends) => TypeError: rows is torch.float32
        grouped_mm(x, zeros(4, 8, 2), ends.long()) => TypeError: offsets is torch.int64
        mlp(fc1=zeros(4, 1, 4, 8)) => fc1 has shape [4, 1, 4, 8]; needs [E = 4, P = 2
        mlp(fc1=zeros(2, 4, 8)) => fc1 has shape [2, 4, 8]
        mlp(fc2=zeros(4, 7, 4)) => fc2 has shape [4, 7, 4]
        mlp(x[None]) => tokens has shape [1, 6, 8]
        mlp(x[:, :7]) => F, H = 7]
        mlp(x[:5]) => tokens has shape [5, 8]; needs [T = 6
        mlp(probs=x[:, :1]) => probs has shape [6, 1]; needs [T = 6, K = 2]
        mlp(indices=plan.inverse[:5]) => indices has shape [5, 2]; needs [T = 6, K = 2]
        mlp(plan=plan._replace(counts=x[0, :5])) => fc1 has shape [4, 2, 4, 8]; needs [E = 5
        mlp(fc1_bias=zeros(4, 4, 2)) => fc1_bias has shape [4, 4, 2]
        mlp(fc2_bias=zeros(4, 1)) => fc2_bias has shape [4, 1]
        mlp(fc1_bias=zeros(4, 2, 4).double()); mlp(fc2=zeros(4, 8, 4).double()) => TypeError: tokens
        mlp(fc2_bias=zeros(4, 8).double()); mlp(x.double()) => TypeError: tokens is torch.float
        mlp(kind="silu") => kind is 'silu'
        mlp(kind="relu2"); mlp(kind=relu2) => needs [E = 4, P = 1
        mlp(kind=relu2, alpha=1.0) => has no such constant, it has none
        """, mlp=mlp, x=x, plan=plan, ends=plan.offsets, zeros=torch.zeros,
        relu2=kernels.ACTIVATIONS["relu2"])


def test_experts_without_rows_are_not_multiplied(monkeypatch):
    """The loop on a CPU multiplies only experts that have rows."""
    multiplied = []
    product = grouped._mm

    def counted(rows, *args, **kwargs):
        multiplied.append(len(rows))
        product(rows, *args, **kwargs)
    monkeypatch.setattr(grouped, "_mm", counted)
    offsets = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    grouped._rows_times_weights(
        torch.randn(9, 6), torch.randn(5, 6, 4), torch.randn(5, 4), offsets)
    assert multiplied == [4, 5]


@pytest.mark.parametrize("who", PRODUCTS)
def test_experts_gradients_have_the_strides_of_the_weight(monkeypatch, who):
    """Otherwise autograd would copy them."""
    PRODUCTS[who](monkeypatch)
    rows, offsets = torch.randn(6, 8).bfloat16(), torch.tensor([2, 6], dtype=torch.int32)
    for weights in (torch.randn(2, 8, 16), torch.randn(2, 16, 8).mT):
        weights = weights.bfloat16().requires_grad_()
        grad, = grads(grouped_mm(rows, weights, offsets).sin(), [weights])
        assert grad.stride() == weights.stride()


@pytest.mark.parametrize("name", ["x", "fc1", "fc2"])
def test_experts_refuse_a_backward_after_a_change(name):
    """The backward makes rows and activation again: of what the forward had, or not at all."""
    layer = small_layer()
    x = fp32_leaf(7, 8) * 1
    y = layer(x)
    with torch.no_grad():
        (x if name == "x" else getattr(layer.experts, name)).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def loads(T: int, E: int, K: int) -> dict[str, Tensor]:
    """indices [T, K] of different loads. An expert may come twice for a token; E is nowhere."""
    power = (1 / torch.arange(1.0, E + 1)).cumsum(0)
    return {
        "even": torch.arange(T * K).view(T, K) % E,
        "random": torch.randint(E + 1, (T, K)),
        "power law": torch.bucketize(torch.rand(T, K) * power[-1], power).clamp(max=E - 1),
        "half to one": torch.where(torch.rand(T, K) < 0.5, E // 2, torch.randint(E, (T, K))),
        "every second": torch.randint(E, (T, K)) // 2 * 2,
        "one": torch.full((T, K), E - 1),
        "nowhere": torch.full((T, K), E),
    }


@pytest.mark.parametrize("T, E, K, order", [
    (40, 30, 3, (0, 2, 1, 3)), (60, 16, 2, (0, 2, 3, 1)), (7, 20, 2, (0, 3, 1, 2)),
    (9, 1, 1, (0, 1, 3, 2)), (0, 3, 2, (0, 2, 1, 3))])
@pytest.mark.parametrize("who, backend", slow_but(
    [("this device", None), ("triton", "eager")],
    [("this device", None), ("triton", "eager"), ("triton", "aot_eager"), ("a loop", "eager")]))
def test_experts_match_loop(monkeypatch, T, E, K, order, who, backend):
    """expert_mlp for each load: output and every gradient. It takes indices as they are; a layer
    merges repeats before. What is nowhere adds nothing and gives its prob no gradient. The weights
    may lie in any order: gate and up interleaved in memory, or transposed."""
    PRODUCTS[who](monkeypatch)
    c = exact_config(num_experts=E, topk=K, add_bias_linear=True)
    names = "experts.fc1", "experts.fc2", "experts.fc1_bias", "experts.fc2_bias"
    shapes = (T, 6), (T, K), (E, 2, 5, 6), (E, 6, 5), (E, 2, 5), (E, 6)
    back_again = torch.tensor(order).argsort().tolist()

    def ours(x, probs, indices, *weights):
        return expert_mlp(x, probs, plan_permutation(indices, E), *weights)
    # Dynamo refuses zero rows of an emulated card.
    function = compiled(ours, backend if T else None)
    for load, indices in loads(T, E, K).items():
        x, probs, fc1, fc2, *biases = [leaf(*shape) for shape in shapes]
        laid_out = fc1.permute(order).contiguous().permute(back_again)
        transposed = fc2.mT.contiguous().mT
        with about(load):
            for weights in [(fc1, fc2), (laid_out, transposed), (fc1, transposed.detach())]:
                inputs = [x, probs, fc1, *biases, *[fc2] * weights[1].requires_grad]
                weights = *weights, *biases
                out = function(x, probs, indices, *weights)
                want = 0 * x + moe_loop(x, probs, indices, c=c, w=dict(zip(names, weights)))
                upstream = torch.randn(T, 6).double()
                want_grads = torch.autograd.grad(
                    want, inputs, upstream, allow_unused=True, materialize_grads=True)
                close([out, *grads(out, inputs, upstream)], [want, *want_grads])
                same(function(x, probs, indices, *weights), out)
    products = []
    with Watch(lambda name, args, out: products.append(name == "product_in")):
        ours(x, probs, indices, *weights)
    assert sum(products) == 1                            # probs [T, E] · fc2_bias


# ---- Config and errors ----

# A call, or several; => what the error says.
CONFIG_ERRORS = """
    config(hidden_size=0); config(ffn_hidden_size=-1); config(topk=0) => needs a positive int
    config(num_experts=8.0) => num_experts = 8.0: needs a positive int
    config(topk=True) => topk = True: needs a positive int
    groups(group_score_topk=True) => group_score_topk = True: needs a positive int, or None
    groups(num_groups="4"); groups(group_topk=2.0) => needs a positive int, or None
    config(enable_expert_bias="false") => enable_expert_bias = 'false': needs True or False
    config(add_bias_linear="no"); config(pre_softmax=None) => needs True or False
    config(sequence_parallel=1); config(router_bias=torch.ones(())) => needs True or False
    config(norm_topk_prob=1); config(batch_first="yes") => needs True or False, or None
    config(latent_size=0); config(shared_expert_intermediate_size=0) => a positive int, or None
    config(topk=9) => topk = 9, num_experts = 8
    config(activation="silu") => swiglu, geglu, quick_geglu, situ, relu2, relu, gelu
    config(score_function="tanh") => softmax, sigmoid, sqrtsoftplus
    config(apply_probs_on="x") => needs one of activation, input
    config(apply_probs_on="input") => "input" is for topk = 1
    config(token_drop_policy="random", capacity_factor=1.0) => one of probs, position
    config(bias_update="median") => bias_update = 'median': needs one of sign, quantile
    config(pre_softmax=True, score_function="sigmoid") => pre_softmax = True
    config(router_dtype=torch.int64); config(params_dtype="bf16") => needs torch.float16, bfloat16
    config(router_dtype=torch.float8_e4m3fn) => needs torch.float16, bfloat16, float32 or float64
    config(probs_dtype=torch.float8_e5m2) => bfloat16, float32 or float64, or None
    config(params_dtype=torch.float8_e4m3fn); config(params_dtype=torch.complex64) => float64
    config(num_groups=4); config(group_topk=4); config(group_score_topk=1) => has no effect
    config(token_drop_policy="position"); config(pad_to_capacity=True) => has no effect
    config(shared_expert_gate=True); config(shared_expert_overlap=True) => has no effect
    config(latent_norm=True); quantile(enable_expert_bias=False) => has no effect
    config(bias_update_rate=0.1) => bias_update_rate has no effect unless enable_expert_bias is set
    config(latent_size=4, latent_norm_eps=1e-6) => has no effect unless latent_norm is set
    config(calculate_per_token_loss=True) => has no effect without a loss
    sinkhorn(calculate_per_token_loss=True) => has no effect without a loss
    groups(num_groups=3) => num_groups = 3 does not divide
    groups(group_topk=1, topk=3) => cannot hold topk = 3
    groups(group_topk=4) => group_score_topk is 0
    groups(group_score_topk=3) => group_score_topk is 3
    config(activation="relu2", glu_linear_offset=1.0) => 'relu2', glu_linear_offset = 1.0
    config(activation="relu2", activation_clamp_value=7.0) => activation_clamp_value = 7.0
    situ(activation_clamp_value=1.0); config(glu_alpha=1.0) => has no such constant
    config(situ_beta=2.0); config(situ_linear_beta=2.0) => has no such constant
    situ(situ_beta=0.0); config(latent_size=4, latent_norm_eps=0.0) => needs a positive number
    config(init_std=-1.0); config(norm_eps=-5.0) => needs 0 or more
    situ(situ_linear_beta=-1.0) => a positive number, or None
    config(activation_clamp_value=0.0) => a positive number, or
    config(activation_clamp_value="7") => a positive number, or
    config(capacity_factor=0.0); config(capacity_factor=-1) => a positive number below 2 ** 31
    config(z_loss_coeff=-1.0); config(input_jitter_eps=-0.1) => 0 or more, or None
    config(output_init_std=-1.0) => 0 or more, or None
    config(capacity_factor=INF); config(capacity_factor=1e308) => a positive number below 2 **
    config(capacity_factor="2"); config(capacity_factor=NAN) => a positive number below 2 ** 31
    config(init_std=INF); config(norm_eps="0"); config(norm_eps=None) => needs 0 or more
    config(scaling_factor=True); config(scaling_factor=[2.0]) => needs a finite number, or None
    config(z_loss_coeff="1"); config(input_jitter_eps=NAN) => needs 0 or more, or None
    config(load_balancing_type="aux_loss", aux_loss_coeff="0.1") => aux_loss needs a finite numb
    config(load_balancing_type="auxloss") => none, aux_loss, seq_aux_loss, global_aux
    losses(aux_loss_coeff=0.1); config(aux_loss_coeff=(0.1,)) => a tuple of the same length
    losses(aux_loss_coeff=(0.1, 0.2)) => a tuple of the same length
    losses(load_balancing_type=("none", "aux_loss"), aux_loss_coeff=(0.0, 0.1)) => at most once
    losses(load_balancing_type=("aux_loss",) * 2, aux_loss_coeff=(0.1, 0.1)) => at most once
    config(load_balancing_type="aux_loss") => aux_loss_coeff = 0.0: aux_loss needs
    config(load_balancing_type="seq_aux_loss", aux_loss_coeff=-0.1) => -0.1: seq_aux_loss needs
    config(load_balancing_type="global_aux_loss", aux_loss_coeff=NAN) => nan: global_aux_loss
    losses(aux_loss_coeff=(INF,)); losses(aux_loss_coeff=(None,)) => ,): aux_loss needs
    config(aux_loss_coeff=0.1) => load_balancing_type = 'none', aux_loss_coeff = 0.1
    sinkhorn(num_groups=2, group_topk=1); sinkhorn(scaling_factor=2.0) => its own choice
    sinkhorn(enable_expert_bias=True); sinkhorn(norm_topk_prob=True) => its own choice
    sinkhorn(pre_softmax=True) => 'sinkhorn', pre_softmax
    sinkhorn(score_function="sigmoid") => 'sinkhorn', score_function = 'sigmoid': sinkhorn has
    sinkhorn(aux_loss_coeff=0.1) => aux_loss_coeff = 0.1: 'sinkhorn' is no loss
    losses(load_balancing_type=("sinkhorn", "aux_loss"), aux_loss_coeff=(0, 0.1)) => go alone
    quantile(bias_update_rate=1e-2) => bias_update = 'quantile', bias_update_rate = 0.01
    quantile(topk=8); quantile(num_groups=4, group_topk=2) => quantile needs topk < num_experts
    quantile(score_function="sqrtsoftplus") => quantile needs topk < num_experts
    """


@pytest.mark.parametrize("row", CONFIG_ERRORS.strip().splitlines(), ids=str.strip)
def test_config_errors(row):
    def config(**fields):
        sizes = dict(hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2)
        return MoEConfig(**{**sizes, **fields})

    quantile = functools.partial(config, bias_update="quantile", enable_expert_bias=True)
    sinkhorn = functools.partial(config, load_balancing_type="sinkhorn")
    situ = functools.partial(config, activation="situ")
    groups = functools.partial(config, num_groups=4, group_topk=2)
    losses = functools.partial(config, load_balancing_type=("aux_loss",))
    check_error_table(row, **locals())


def test_config_errors_for_every_field():
    """An object of no meaning is refused in each, as is None, except where it is the default."""
    for field in dataclasses.fields(MoEConfig):
        for value in (object(), None):
            if value is not None or field.default is not None:
                text = error(small_config, **{field.name: value})
                assert re.match(f"ValueError: .*{field.name} = .*needs ", text), text


@pytest.mark.parametrize("backend", slow_but([None], [None, "aot_eager"]))
def test_config_takes_an_activation(backend):
    """A function of gate and up, or an Activation, with constants bound by a partial. What cannot
    work is refused when the config is made."""
    named = dict(activation="quick_geglu", glu_alpha=1.3, glu_linear_offset=1.0)
    made = functools.partial(kernels.quick_geglu, alpha=1.3, linear_offset=1.0)
    layer = exact_layer(activation=made)
    same_layer = twin(layer, **named)
    x = leaf(5, 2, 6)
    agree(layer, same_layer, x, tol=0)
    for dynamic in (None, True):
        agree(compiled(layer, backend, dynamic=dynamic), same_layer, x)
    assert dataclasses.replace(layer.config) == layer.config

    def bilinear(gate, up, scale=0.5):
        return gate * up * scale

    shared = dict(shared_expert_overlap=True, shared_expert_gate=True)
    layer = exact_layer(activation=bilinear, **shared)
    want = twin(layer, activation="quick_geglu", glu_alpha=0.0)          # its sigmoid is 1/2
    agree(layer, want, x)
    agree(compiled(layer, backend), want, x)
    layer = exact_layer(activation=Activation(cubed, parts=1), **shared)
    assert layer.config.parts == 1 and layer.experts.fc1.shape[1] == 1
    torch.autograd.gradcheck(layer, x)
    agree(compiled(layer, backend), layer, x)
    check_error_table("""
        small_config(activation=torch.nn.functional.silu(torch.ones(1))) => needs one of swiglu, ge
        small_config(activation=Activation(cubed, parts=3)) => needs parts 1, or 2 for gate and up
        small_config(activation=Activation(cubed, 1, True)) => only a method Experts.activate gets
        small_config(activation=torch.nn.PReLU()) => its parameters would be in no layer; give Exper
        small_config(score_function=bilinear) => needs one of softmax, sigmoid
        small_config(activation=made, glu_alpha=1.5) => a function's constants are bound by functoo
        small_config(activation="geglu", activation_fp8_input_store=True) => only the input of "swi
        small_config(activation=bilinear, activation_fp8_input_store=True) => only the input of "sw
        """, **globals(), **locals())


class XIELU(moe.Experts):
    """α·relu(y)² + softplus(β)·y, whose two numbers are trained."""

    def __init__(self, config, pg_collection=None):
        super().__init__(config, pg_collection)
        self.alpha = torch.nn.Parameter(torch.full((), 0.8, dtype=config.params_dtype))
        self.beta = torch.nn.Parameter(torch.full((), -0.3, dtype=config.params_dtype))

    def activate(self, y):
        return self.alpha * y.relu().square() + F.softplus(self.beta) * y


@pytest.mark.parametrize("way", slow_but(["compiled"], [*WAYS][1:]))
def test_config_takes_an_activation_with_parameters(way):
    """Experts.activate may be overridden: its parameters get their gradients, in one graph too."""
    layer = exact_layer(activation="relu2", shared_expert_intermediate_size=None)
    layer.experts = XIELU(layer.config)
    x = leaf(4, 1, 6)
    torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.experts.parameters()))
    agree(run_as(way, layer), layer, x)
    without = exact_layer(activation="relu2", shared_expert_intermediate_size=None)
    without.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        layer.experts.alpha.fill_(1.0), layer.experts.beta.fill_(-INF)
    close(layer(x), without(x))


def cubed(y):
    return y ** 3


def leaky(slope, y, gain=1.0):
    return F.leaky_relu(y, slope) * gain


def leaky_by(y, slope=0.1):
    return F.leaky_relu(y, slope)


def test_config_takes_an_activation_with_bound_positions():
    """What functools.partial binds is no part; a module is called. A wrong number of parts is
    Python's own error, at the first forward."""
    for made, function in (
            (functools.partial(leaky, 0.1), lambda y: F.leaky_relu(y, 0.1)),
            (functools.partial(functools.partial(leaky, 0.1), gain=2.0),
             lambda y: F.leaky_relu(y, 0.1) * 2.0),
            (torch.nn.SiLU(), F.silu)):
        layer = exact_layer(activation=Activation(made, parts=1))
        assert layer.config.parts == 1
        x = leaf(7, 1, 6)
        want = twin(layer, activation=Activation(lambda y, function=function: function(y), 1))
        agree(layer, want, x)
        agree(compiled(layer), want, x)
    layer = exact_layer(activation=torch.nn.SiLU())
    for function in (layer, compiled(layer)):
        with pytest.raises(Exception, match="positional arguments but|Argument mismatch|Observed"):
            function(x)
    made = Activation(leaky_by, parts=1, constants=("slope",))
    close(activation(x, made, slope=0.5), F.leaky_relu(x, 0.5))


class Noisy(torch.nn.Module):
    """An activation that draws numbers in training, and keeps what it drew and the largest gate."""

    def __init__(self):
        super().__init__()
        self.masks, self.largest = [], torch.zeros(())

    def forward(self, gate, up):
        self.largest = torch.maximum(self.largest, gate.detach().amax())
        self.masks.append(F.dropout(torch.ones_like(gate), 0.5, self.training))
        return F.silu(gate) * self.masks[-1] * up


@pytest.mark.parametrize("way", slow_but(["plain", "reentrant"], EAGER_WAYS[:5]))
def test_activation_of_your_own_may_draw_and_keep_a_state(way):
    """In eager mode it is computed once for each forward, so its gradient is that of the numbers
    drawn; also if it draws only from the second forward on."""
    noisy = Noisy()
    layer = exact_layer(activation=noisy, shared_expert_intermediate_size=None)
    x = leaf(7, 1, 6)
    for training in (False, True):
        noisy.train(training)
        noisy.masks.clear()
        got = outcome(run_as(way, layer), x)
        mask = noisy.masks[-1]
        want = twin(layer, activation=lambda gate, up, mask=mask: F.silu(gate) * mask * up)
        close(got, outcome(want, x))
        assert way != "plain" or len(noisy.masks) == 1
        assert (mask == 0).any() == training and noisy.largest > 0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=slow)])
def test_activation_of_your_own_draws_the_same_numbers_again_in_a_graph(backend):
    """There the backward computes it again. The numbers are eager mode's, so all is equal."""
    with torch._inductor.config.patch(fallback_random=True):
        layer = exact_layer(activation=lambda gate, up: F.dropout(F.silu(gate), 0.5) * up)
        x = leaf(7, 1, 6)
        results = []
        for function in (layer, compiled(layer, backend)):
            torch.manual_seed(1)
            results.append(outcome(function, x))
        close(*results)
        state = torch.get_rng_state()
        layer(x)
        assert not state.equal(torch.get_rng_state())


def test_activation_of_your_own_in_place():
    """Autograd refuses it where the gradient needs what was overwritten. Elsewhere it is right, in
    the shared expert too, and no argument of kernels.activation changes."""
    x = leaf(7, 1, 6)
    layer = exact_layer(activation=lambda gate, up: F.relu(gate).mul_(up))
    assert "modified by an inplace operation" in error(lambda: layer(x).sum().backward())
    with pytest.raises(Exception, match="inplace"):
        compiled(layer)(x)
    for function in (lambda gate, up: gate.mul_(up), lambda gate, up: (gate * 1.0).mul_(up)):
        layer = exact_layer(activation=function)
        want = twin(layer, activation=lambda gate, up: gate * up)
        agree(layer, want, x)
        agree(compiled(layer), want, x)
        with torch.no_grad():
            close(compiled(layer)(x), want(x))               # few tokens
        for how in (lambda f: f, compiled):
            for dtype in (torch.float64, torch.bfloat16):
                y = torch.randn(3, 8, dtype=dtype)
                before = y.clone()
                want = (y[:, :4].double() * y[:, 4:].double()).to(dtype)
                same(how(lambda y: activation(y, function))(y), want)
                same(y, before)
    layer = exact_layer(activation=Activation(lambda y: F.rrelu(y, training=False), 1))
    mean = Activation(lambda y: F.leaky_relu(y, (1 / 8 + 1 / 3) / 2), 1)
    agree(layer, twin(layer, activation=mean), x)


def test_activation_of_your_own_returns_a_part():
    """Its result is checked in each forward."""
    def layer_of(function):
        return small_layer(
            activation=Activation(function, 1), shared_expert_intermediate_size=None)

    x = fp32_leaf(3, 8)
    check_error_table("""
        layer_of(lambda y: None)(x) => returns a NoneType; needs a tensor [6, 4]
        layer_of(lambda y: y + 0j)(x) => returns torch.complex64 [6, 4]; needs a floating
        layer_of(lambda y: y.sum(-1, keepdim=True))(x) => returns torch.float32 [6, 1]; needs a flo
        layer_of(lambda y: y.sum())(x) => returns torch.float32 []; needs a floating dtype
        layer_of(lambda y: y.long())(x) => returns torch.int64 [6, 4]; needs a floating dtype
        activation(torch.ones(2, 3), Activation(cubed, 1, True)) => takes the row's expert, which on
        activation(torch.ones(2, 4), lambda *y: y[0].sum()) => returns torch.float32 []; needs a f
        activation(torch.ones(2, 4), lambda *y: y[0], fp8_input_store=True) => the function would be
        """, **globals(), **locals())


class WithActivate(moe.Experts):
    """Experts whose `activate` is given as `how` when they are made."""

    def __init__(self, config, how):
        super().__init__(config)
        self.slope = torch.nn.Parameter(torch.full((), 0.3, dtype=config.params_dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.activate = how.__get__(self)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("how, wanted", [
    (lambda self, gate, up: gate * up, "missing 1 required|Argument mismatch|Observed exception"),
    (lambda self, y: y[..., 0], r"needs a floating dtype and the shape of a part, \[6, 5\]")])
def test_experts_refuse_an_activate_of_another_form(how, wanted, compile):
    """In each forward of the layer, and when a graph of it is made."""
    layer = exact_layer(activation="relu2")
    layer.experts = WithActivate(layer.config, how)
    function = layer
    if compile:
        function = compiled(layer)
        wanted += "|Observed exception"              # torch 2.11 quotes no error in a checkpoint
    with pytest.raises(Exception, match=wanted):
        function(leaf(3, 1, 6))


def test_experts_activate_counts_its_calls():
    """Once a forward, with a backward or without."""
    def counts_calls(self, y):
        self.calls += 1
        return F.leaky_relu(y, 0.1) * self.slope

    layer = exact_layer(activation="relu2", shared_expert_intermediate_size=None)
    layer.experts = WithActivate(layer.config, counts_calls)
    layer(leaf(3, 1, 6)).sum().backward()
    layer(leaf(5, 1, 6))
    assert layer.experts.calls == 2 and layer.experts.slope.grad != 0


class SlopePerExpert(moe.Experts):
    """leaky_relu with a slope for every expert."""
    takes_expert = True
    per_expert = *moe.Experts.per_expert, "slope"
    sharded = {**moe.Experts.sharded, "slope": ("ep", 0, "expt_dp")}

    def __init__(self, config, pg_collection=None):
        super().__init__(config, pg_collection)
        first = torch.linspace(-1, 1, len(self.fc1), dtype=config.params_dtype)
        self.slope = torch.nn.Parameter(first)

    def activate(self, y, expert):
        return torch.where(y > 0, y, self.slope[expert] * y)


def slope_layer(**fields) -> MoELayer:
    layer = exact_layer(
        activation="relu2", shared_expert_intermediate_size=None, num_experts=8, **fields)
    layer.experts = SlopePerExpert(layer.config)
    return layer


def slope_loop(layer, x):
    """Oracle of a slope_layer: one token and one expert at a time."""
    probs, indices = layer.router.route(x)
    fc1, fc2, slope = layer.experts.fc1, layer.experts.fc2, layer.experts.slope
    y = []
    for t in range(len(x)):
        outputs = []
        for p, e in zip(probs[t], indices[t]):
            hidden = fc1[e, 0] @ x[t]
            outputs.append(p * (fc2[e] @ torch.where(hidden > 0, hidden, slope[e] * hidden)))
        y.append(sum(outputs))
    return torch.stack(y)


@pytest.mark.parametrize("T", slow_but([5], [1, 5, 40]))
def test_experts_activate_with_the_expert_of_each_row(T):
    """In the plan's order, and in a graph without gradients for few tokens in the tokens'; with
    padding and experts without tokens too."""
    layer = slope_layer()
    x = leaf(T, 6)
    agree(layer, of_module(layer, slope_loop), x)
    padding = torch.arange(T) % 2 == 0
    with torch.no_grad():
        want = slope_loop(layer, x)
        for function in (layer, compiled(layer)):
            close(function(x), want)
            close(function(x, padding)[~padding], want[~padding])
    agree(compiled(layer), of_module(layer, slope_loop), x)


def test_experts_activate_reads_parameters_that_change():
    """In eager mode autograd keeps what it read in the forward: functional_call's parameters, and
    a change before the backward is right or refused by autograd. An optimizer may step in it."""
    layer = exact_layer(activation="relu2")
    layer.experts = XIELU(layer.config)
    x = leaf(4, 1, 6)
    others = {name: (p * 1.5).detach().requires_grad_() for name, p in layer.named_parameters()}
    changed = copy.deepcopy(layer)
    changed.load_state_dict(others, strict=False)
    want = torch.autograd.grad(changed(x).sin().sum(), [*changed.parameters()])
    y = torch.func.functional_call(layer, others, (x,))
    close(torch.autograd.grad(y.sin().sum(), [*others.values()]), want)
    y = layer(x)
    with torch.no_grad():
        layer.experts.alpha.add_(1.0)
    assert "modified by an inplace operation" in error(y.sum().backward)

    def half(p):
        with torch.no_grad():
            p.mul_(0.5)
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(half)
    before = layer.experts.fc2.detach().clone()
    layer(x).sum().backward()
    same(layer.experts.fc2, before / 2)


FIRST_WAYS = ["plain", "reentrant", "non-reentrant", "selective", "compiled",
              "compiled inside non-reentrant", "compiled around non-reentrant"]


@pytest.mark.parametrize("way", FIRST_WAYS)
def test_experts_activate_beside_a_checkpoint(way):
    """Around the layer or inside it, in the first forward."""
    layer = exact_layer(activation="relu2")
    layer.experts = XIELU(layer.config)
    x = leaf(4, 1, 6)
    got = outcome(run_as(way, layer), x)
    close(got, outcome(layer, x))


def test_experts_take_any_activate():
    """A module too, which torch keeps beside the attributes; one that is set later; a copy."""
    layer = exact_layer(activation="relu2", shared_expert_intermediate_size=None)
    layer.experts.activate = torch.nn.SiLU()
    x = leaf(5, 1, 6)
    agree(layer, twin(layer, activation=Activation(F.silu, parts=1)), x)
    agree(compiled(layer), layer, x)
    again = copy.deepcopy(layer)
    del again.experts.activate
    again.experts.activate = lambda y: y + 1.0
    agree(again, twin(layer, activation=Activation(lambda y: y + 1.0, parts=1)), x)
    with torch.inference_mode():
        made = exact_layer(activation="relu2")
        made.experts = XIELU(made.config)
        made(x.detach())


@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("fields", [{}, dict(topk=1, pre_softmax=True, apply_probs_on="input")])
def test_config_takes_an_activation_that_sees_no_garbage(monkeypatch, fields):
    """Its parameters' gradients are sums over all rows. Unrouted ones are ones for it, also where
    torch's product leaves NaN in them."""
    layer = small_layer(activation="relu2", init_std=0.5, **fields)
    layer.experts = XIELU(layer.config)
    call = fp32_leaf(7, 1, 8), torch.arange(7)[:, None] % 3 == 1
    want = outcome(layer, call)
    with_native_products(monkeypatch)
    with torch.autograd.detect_anomaly():
        close(outcome(layer, call), want, 1e-5)


@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("fields", [
    {}, dict(add_bias_linear=True), dict(activation="relu2"), dict(activation_fp8_input_store=True),
    dict(activation=lambda gate, up: F.silu(gate) * up, add_bias_linear=True)], ids=str)
def test_layer_in_a_graph_lets_nothing_out_of_raw_rows(monkeypatch, fields):
    """There native products leave unrouted rows as they were: NaN here. Without any of it the
    output and all gradients are those of products that write zeros, biases and parameters of an
    activation among them; of grouped_mm alone too."""
    layer = small_layer(ffn_hidden_size=8, params_dtype=torch.bfloat16, init_std=0.5, **fields)
    if fields.get("activation") == "relu2":
        layer.experts = XIELU(layer.config)
    call = leaf(7, 1, 8, dtype=torch.bfloat16), torch.arange(7)[:, None] % 3 == 1
    want = outcome(layer, call)
    offsets = torch.tensor([3, 3, 5], dtype=torch.int32)
    matrices = leaf(6, 8, dtype=torch.bfloat16), leaf(3, 8, 8, dtype=torch.bfloat16)
    product = functools.partial(grouped.grouped_mm, offsets=offsets)
    want += outcome(product, matrices)
    with_native_products(monkeypatch, in_graphs=True)
    close(outcome(compiled(layer), call) + outcome(compiled(product), matrices), want, 0.05)


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_experts_activate_may_have_an_infinite_slope_at_zero(way):
    """An unrouted row of zeros would make the gradient of its parameter NaN."""
    class Root(XIELU):
        def activate(self, y):
            return (y.abs() * self.alpha ** 2).sqrt() + self.beta

    layer = exact_layer(activation="relu2", shared_expert_intermediate_size=None)
    layer.experts = Root(layer.config)
    x, padding = leaf(7, 1, 6), torch.arange(7)[:, None] % 3 == 1
    got = grads(WAYS[way](layer)(x, padding).sin().sum(), [*layer.parameters()])
    close(got, grads(layer(x[~padding[:, 0]]).sin().sum(), [*layer.parameters()]))


@pytest.mark.parametrize("T, E, K", [(9, 6, 2), (7, 5, 3), (0, 4, 2), (4, 4, 4)])
def test_router_round_robin(T, E, K):
    """Token t has the experts (t·K + k) mod E: no load differs by more than one. The probs are
    those of the logits; given indices win; one graph."""
    router = TopKRouter(small_config(
        num_experts=E, topk=K, score_function="sigmoid", force_load_balancing="round_robin"))
    x = fp32_leaf(T, 8)
    probs, indices = router.route(x)
    want = torch.tensor(
        [[(t * K + k) % E for k in range(K)] for t in range(T)], dtype=torch.int64).view(T, K)
    same(indices, want)
    scores = router.gating(x).sigmoid().gather(1, want)
    close(probs, scores / scores.sum(1, keepdim=True), 1e-6)
    same(router.route(x, None, want.flip(0))[1], want.flip(0))
    same(compiled(router.route)(x)[1], want)
    assert 'needs True, False or "round_robin"' in error(small_config, force_load_balancing="even")


def test_router_counts_what_is_dropped():
    """NaN before the first forward, and for a layer without a capacity. (How many they are:
    check_against_loop.)"""
    model = torch.nn.Sequential(small_layer(capacity_factor=0.5), small_layer())
    assert load_balancing_metrics(model)["dropped"].isnan().all()
    model(torch.randn(20, 8)).sum().backward()
    dropped = load_balancing_metrics(model)["dropped"]
    assert dropped[0] > 0 and dropped[1].isnan()
    same(load_balancing_metrics(model, reduce=True)["dropped"], dropped)
    assert "dropped" not in load_balancing_metrics(model[1])


def test_config_makes_what_forwards_ask_for():
    """It is there before the first forward: Dynamo cannot make a cached_property."""
    config = MoEConfig(
        4, 4, 4, topk=2, activation="situ", situ_beta=1.5, situ_linear_beta=0.5,
        load_balancing_type=("global_aux_loss", "aux_loss"), aux_loss_coeff=(0.2, 0.1))
    for copied in (config, copy.deepcopy(config), dataclasses.replace(config, topk=3)):
        made = vars(copied)
        assert made["balancing"] == {"global_aux_loss": 0.2, "aux_loss": 0.1}
        assert made["losses"] == made["balancing"]
        assert made["routing_options"]["topk"] == copied.topk
        assert made["bound_activation"].function.keywords == dict(beta=1.5, linear_beta=0.5)
    lists = dataclasses.replace(
        config, load_balancing_type=["global_aux_loss", "aux_loss"], aux_loss_coeff=[0.2, 0.1])
    assert lists == config and hash(lists) == hash(config)
    sinkhorn = dataclasses.replace(config, load_balancing_type="sinkhorn", aux_loss_coeff=0.0)
    assert not sinkhorn.losses and sinkhorn.balancing == {"sinkhorn": 0.0}


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


def test_config_is_set_once():
    """Of a layer and its parts. What the error says works."""
    layer = small_layer(topk=4)
    for part, name in ((layer, "MoELayer"), (layer.router, "TopKRouter")):
        with pytest.raises(AttributeError, match=f"set once; needs a new {name} of dataclasses"):
            part.config = small_config(topk=2)
        assert part.config.topk == 4
    new = MoELayer(dataclasses.replace(layer.config, topk=2))
    new.load_state_dict(layer.state_dict())
    x = torch.randn(7, 8)
    same(new.router.route(x)[1], layer.router.route(x)[1][:, :2])


def test_config_of_one_expert_with_a_constant_prob():
    """It cannot train the router. In eval mode, or with a frozen router, it works."""
    x = torch.randn(7, 8)
    for sure in (dict(topk=1), dict(topk=1, score_function="sigmoid", norm_topk_prob=True)):
        layer = small_layer(**sure)
        given = f"ValueError: topk = 1, norm_topk_prob = {sure.get('norm_topk_prob')}"
        assert error(layer, x).startswith(given)
        assert layer.eval()(x).shape == x.shape
        layer.train().router.requires_grad_(False)
        layer(x)


# ---- Layer ----

def test_layer_computes_the_definition():
    """kernels.moe_loop, for every token; on shapes that all differ."""
    layer = exact_layer(topk=3, shared_expert_intermediate_size=None)
    x = leaf(7, 6)
    weights = layer.router.weight, layer.experts.fc1, layer.experts.fc2
    agree(lambda x, *w: layer(x), lambda x, *w: kernels.moe_loop(x, *w, topk=3), (x, *weights))


def check_against_loop(seed: int, whole: bool, backend: str | None = None) -> None:
    """Two microbatches through a random layer, or through its router alone: outputs, every
    gradient, what the losses attach, counts."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = random_config(rng)
    S, B = rng.choice([(3, 2), (4, 3), (7, 1)])
    padding = rng.choice([0.0, 0.0, 0.3, 0.9])
    replay = rng.random() < 0.3
    scale = rng.choice([1.0, 0.5])
    packed = B == 1 and rng.random() < 0.5
    with about(f"seed {seed}", config):
        layer = random_layer(config)
        router = layer.router
        module, call = (layer, layer) if whole else (router, router.route)
        function = compiled(call, backend)
        oracle = RouterLoop(router)
        for _ in range(2):
            x = leaf(S, B, 6)
            mask = torch.rand(S, B) < padding if padding else None
            given = random_indices(S * B, 8, config.topk, repeats=0.3) if replay else None
            bounds = random_bounds(S, rng) if packed else None
            got = function(x, mask, given, cu_seqlens=bounds)
            want, indices, loss = oracle(x, mask, given, bounds)
            if whole:
                want = layer_loop(layer, x, want, indices)
            else:
                same(got[1], indices)
                got = got[0]
            close(got, want)
            inputs = [x, *module.parameters()]
            upstream = torch.randn_like(got)
            set_aux_loss_scale(module, scale)        # between forward and backward
            total = (want * upstream).sum() + scale * loss
            want_grads = torch.autograd.grad(
                total, inputs, allow_unused=True, materialize_grads=True)
            close(grads(got, inputs, upstream), want_grads, 1e-8)
            set_aux_loss_scale(module, 1.0)
            if config.capacity_factor is not None:           # in the latest forward
                assert load_balancing_metrics(router)["dropped"] == oracle.dropped
        if config.enable_expert_bias:
            assert router.local_tokens_per_expert.tolist() == oracle.counts
        if "global_aux_loss" in config.balancing:
            assert router.global_tokens_per_expert.tolist() == oracle.sums
            assert router.ga_steps == oracle.steps


FUZZ = int(os.environ.get("MOE_FUZZ", "200"))         # random configurations; MOE_FUZZ=5000


fuzz = pytest.mark.parametrize(
    "seeds", slow_but([range(60)], [range(60), range(60, FUZZ)]), ids=len)


@fuzz
def test_layer_matches_loop(seeds):
    """All options mixed; indices given, unrouted, repeated; padding."""
    for seed in seeds:
        check_against_loop(seed, whole=True)


@fuzz
def test_router_matches_loop(seeds):
    for seed in seeds:
        check_against_loop(1000 + seed, whole=False)


@pytest.mark.parametrize("backend, seeds", [
    ("aot_eager", range(2)),
    pytest.param("aot_eager", range(2, 25), marks=slow),
    pytest.param("inductor", range(3), marks=slow)])
def test_layer_in_one_graph_matches_loop(backend, seeds):
    for seed in seeds:
        check_against_loop(2000 + seed, whole=seed % 3 < 2, backend=backend)


@pytest.mark.parametrize("way", slow_but(["plain"], ["plain", "compiled"]))
@pytest.mark.parametrize("name", ["losses", "sinkhorn", "dropping", "batch first"])
def test_layer_without_tokens_or_with_padding_alone(name, way):
    """An empty or zero result, and zero gradients, not None."""
    options = CONFIGS.get(name, dict(**LOSSES, batch_first=True))
    layer = small_layer(**{
        **options, "capacity_factor": 1.0, "input_jitter_eps": 0.1, "shared_expert_gate": False})
    mask = torch.ones(3, 2, dtype=torch.bool)
    for args in [(fp32_leaf(3, 2, 8), mask), (fp32_leaf(0, 3, 8),)]:
        y = WAYS[way](layer)(*args)
        assert y.shape == args[0].shape
        for zeros in (y, *grads(y, [args[0], *layer.parameters()])):
            assert (zeros == 0).all()


def test_layer_padding_mask_true_means_padding():
    """What a padded token holds changes no other output, no loss and no gradient
    (Megatron-LM #1984 #5569 #6111)."""
    layer = small_layer(
        load_balancing_type=("aux_loss", "seq_aux_loss"), aux_loss_coeff=(0.5, 0.3),
        z_loss_coeff=0.5)
    weights = list(layer.parameters())
    x = torch.randn(6, 1, 8)
    mask = torch.rand(6, 1) < 0.4
    noisy = torch.where(mask[..., None], torch.randn_like(x) * 10, x)
    same(outcome(layer, (noisy, mask)), outcome(layer, (x, mask)))
    got = layer(x, mask)
    assert (got[mask] == 0).all()
    want = layer(x[~mask][:, None])                  # the same tokens with no padding at all
    close([got[~mask][:, None], *grads(got, weights)], [want, *grads(want, weights)], 1e-6)


def test_layer_nan_in_one_token_stays_there():
    layer = small_layer(add_bias_linear=True, init_std=0.5)
    x = torch.randn(9, 8)
    others = torch.arange(9) != 4
    finite = x.clone()
    x[4] = NAN
    used = layer.router.route(x)[1]
    untouched = [e for e in range(6) if e not in used[4]]
    want = layer(finite, topk_indices=used)              # so each expert has as many rows
    y = layer(x)
    assert y[4].isnan().all()
    same(y[others], want[others])
    for g in grads(y.nan_to_num(), list(layer.experts.parameters())):
        assert untouched and g[untouched].isfinite().all()


def test_layer_jitter_reaches_the_router_alone():
    """Same experts' input, other routing weights; off in eval (transformers #33969)."""
    layer = small_layer(input_jitter_eps=0.5, init_std=0.5)
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


@pytest.mark.parametrize("backend", slow_but([None, "aot_eager"], [None, "aot_eager", "inductor"]))
def test_layer_aux_loss_reaches_the_router(backend):
    """Without the caller's help, at its full size, only in training (Automodel #1412, transformers
    #28255). One graph for all scales: the value at the backward counts."""
    layer = exact_layer(
        load_balancing_type="aux_loss", aux_loss_coeff=0.3, z_loss_coeff=0.2)
    coeffs = [layer.router.get_aux_loss_coeff(kind) for kind in LOSS_TYPES]
    assert coeffs == [0.3, 0, 0] and layer.router.is_aux_loss_enabled()
    weights = [layer.router.weight]
    x = leaf(7, 2, 6)
    function = compiled(layer, backend)
    _, _, loss = RouterLoop(layer.router)(x)
    want = grads(loss, weights)[0]
    for scale in (1.0, 0.5, torch.tensor(4.0)):
        y = function(x)
        set_aux_loss_scale(layer, scale)
        close(grads(y, weights, torch.zeros_like(y)), [want * scale])
    assert graphs_made() == (backend is not None)
    layer.eval()
    y = layer(x)
    assert (grads(y, weights, torch.zeros_like(y))[0] == 0).all()


def test_layer_metrics_of_the_latest_training_forward():
    """Layers of different sizes: experts that a layer has not are counted as -1."""
    first = small_layer(load_balancing_type="aux_loss", aux_loss_coeff=0.3)
    second = small_layer(topk=3, num_experts=5, z_loss_coeff=0.2)
    model = torch.nn.Sequential(first, second)
    assert load_balancing_metrics(model)["max_violation"].isnan().all()
    x = fp32_leaf(9, 8)
    y = first(x)
    counts = [torch.bincount(layer.router.route(rows)[1].flatten(), minlength=E)
              for layer, rows, E in ((first, x, 6), (second, y, 5))]
    for way in ("plain", "reentrant"):
        WAYS[way](model)(x).sum().backward()
        m = load_balancing_metrics(model)
        assert list(m) == ["load_balancing_loss", "z_loss", "max_violation", "tokens_per_expert"]
        assert m["tokens_per_expert"].tolist() == [counts[0].tolist(), [*counts[1].tolist(), -1]]
        violations = torch.stack([n.max() / n.double().mean() - 1 for n in counts])
        close(m["max_violation"], violations, 1e-6)
        assert m["load_balancing_loss"].isnan().tolist() == [False, True]
        assert m["z_loss"].isnan().tolist() == [True, False]
        close(m["z_loss"][1], z_loss_func(second.router.gating(y), 1.0), 1e-6)
        model.eval()(torch.randn(5, 8))              # is not counted
        same(load_balancing_metrics(model.train())["tokens_per_expert"], m["tokens_per_expert"])
    assert "z_loss" not in load_balancing_metrics(first)


def test_layer_prints_what_it_is():
    layer = small_layer(latent_size=4)
    assert_expected_inline(str(layer), """\
MoELayer(
  hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=2, latent_size=4, batch_first=False
  (router): TopKRouter(weight [6, 8])
  (experts): Experts(fc1 [6, 2, 4, 4], fc2 [6, 4, 4])
  (latent_down): LatentDown(weight [4, 8])
  (latent_up): LatentUp(weight [8, 4])
)""")
    config = dataclasses.replace(layer.config, latent_size=None, enable_expert_bias=True)
    assert str(TopKRouter(config)) == "TopKRouter(weight [6, 8], expert_bias [6])"


def test_layer_errors():
    check_error_table("""
        layer(torch.randn(6, 9)) => input has shape [6, 9]
        layer(x[0]); overlap(x[0]) => input has shape [8]; needs [S, B, 8] or [T, 8]
        layer(x[0, 0]); layer(x[None, None]) => input has shape [
        overlap(x.bfloat16()) => TypeError: hidden_states is torch.bfloat16, and the experts' weigh
        overlap.shared_experts(x.bfloat16()) => TypeError: hidden_states is torch.bfloat16, and the
        layer(x.bfloat16()) => TypeError: hidden_states is torch.bfloat16, and the experts' weights
        layer(x.double()) => TypeError: hidden_states is torch.float64, and the experts' weights
        layer(x.long()); autocast(layer)(x.long()) => TypeError: hidden_states is torch.int64
        layer(x, torch.zeros(5).bool()) => padding_mask is [5] torch.bool
        layer(x, torch.zeros(6)) => padding_mask is [6] torch.float32
        layer(x, None, zeros.long()); layer(x, None, zeros[:, :2]) => topk_indices is [6,
        layer(x, None, torch.zeros(6, 2).bool()) => [6, 2] torch.bool; needs [6, 2] or [6, 2] of an
        load_balancing_metrics(torch.nn.Linear(2, 2)) => (Linear) has no Router
        """, layer=small_layer(), x=torch.randn(6, 8), zeros=torch.zeros(6, 3),
        autocast=torch.autocast(DEVICE, torch.bfloat16),
        overlap=small_layer(
            shared_expert_intermediate_size=4, shared_expert_overlap=True))


@pytest.mark.parametrize("backend", slow_but([None, "aot_eager"], [None, "aot_eager", "inductor"]))
def test_layer_finish_step_warns_where_nothing_was_counted(backend):
    """As small.py's finish_step: after no backward, or one by torch.autograd.grad that stops before
    the counts. A model in eval mode, or with frozen routers, need not count."""
    model = TwoLayers(**BIASED)
    function = compiled(model, backend)
    x = fp32_leaf(5, 8)

    def warnings_of_a_step():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            finish_step(model)
        return [str(w.message)[:35] for w in caught if w.filename == __file__]

    nothing = ["no backward has counted on this ran"]
    assert warnings_of_a_step() == nothing
    for _ in range(2):
        function(x).sum().backward()
        assert warnings_of_a_step() == []
        assert warnings_of_a_step() == nothing
    function(x)                                          # it had no backward
    assert warnings_of_a_step() == nothing
    model.eval()
    assert warnings_of_a_step() == []
    model.train()
    for router in router_file._routers(model):
        router.weight.requires_grad_(False)
    assert warnings_of_a_step() == []


def test_layer_batch_first_is_the_transposed_layer():
    """[B, S, H] in and out, masks and indices too; each loss has its gradient, in one graph too."""
    def transposed(layer, *args):
        return layer(*[t.transpose(0, 1) for t in args]).transpose(0, 1)
    layer = exact_layer(**LOSSES)
    mine = twin(layer, batch_first=True)
    x = leaf(7, 3, 6)
    mask = torch.rand(7, 3) < 0.3
    indices = torch.rand(7, 3, 4).argsort(-1)[..., :2]
    for args in ((x,), (x, mask), (x, mask, indices)):
        agree(of_module(mine, transposed), layer, args)
    agree(of_module(mine, compiled(transposed)), layer, args)
    # Taken the other way round, the sequences' loss is another one.
    layer(x.transpose(0, 1)).sum().backward(), mine(x.transpose(0, 1)).sum().backward()
    right, wrong = [load_balancing_metrics(m)["seq_load_balancing_loss"] for m in (mine, layer)]
    assert (wrong - right).abs() > 1e-3
    assert "needs [B, S, 6] or [T, 6]" in error(mine, x[..., :5])


def test_layer_seq_loss_asks_which_axis_is_the_sequence():
    """batch_first is None by default: with seq_aux_loss two token axes are refused, in eval mode
    too, and nothing changes. A pack, and [T, H], say it themselves. Without the loss None is
    False."""
    layer = exact_layer(**LOSSES, batch_first=None)
    x = leaf(7, 3, 6)
    for call in (layer, layer.eval(), layer.router.route, layer.router,
                 lambda x: layer.router.routing(layer.router.gating(x))):
        text = error(call, x)
        assert "needs batch_first=True for [B, S, 6] or batch_first=False for [S, B, 6]" in text
    layer.train()
    assert not any(tensor.nan_to_num().any() for tensor in counts_of(layer))
    right = twin(layer, batch_first=False)
    agree(layer, right, (leaf(1, 21, 6), None, None, torch.tensor([0, 9, 21])))
    agree(layer, of_module(right, lambda right, x: right(x[:, None])[:, 0]), leaf(21, 6))
    plain = exact_layer(batch_first=None)
    agree(plain, twin(plain, batch_first=False), x, tol=0)
    assert "batch_first = 1: needs True or False, or None" in error(small_config, batch_first=1)


@pytest.mark.parametrize("batch_first", [False, True])
def test_layer_flattened_sequences_need_their_bounds(batch_first):
    """With seq_aux_loss a [T, H] is one sequence, so a layer that was told which axis is the
    sequence refuses it, in eval mode and under a graph too. With bounds output, loss and gradients
    are those of the sequences. Without the loss [T, H] needs no bounds."""
    layer = exact_layer(**LOSSES, batch_first=batch_first)
    B, S, H = 3, 7, 6
    x = leaf(B, S, H)
    flat = x.flatten(0, 1)
    bounds = torch.arange(0, B * S + 1, S)
    for call in (layer, layer.router, layer.router.route, compiled(layer), layer.eval(),
                 lambda x: layer.router.routing(layer.router.gating(x))):
        text = error(call, flat)
        assert "cu_seqlens is None, and input is [T, 6]: seq_aux_loss would be of one " in text
        assert f"sequence of 21 tokens, and batch_first={batch_first} promises sequences" in text
    assert not any(tensor.nan_to_num().any() for tensor in counts_of(layer))
    layer.train()

    def of_sequences(layer, x):
        return layer(x) if batch_first else layer(x.transpose(0, 1)).transpose(0, 1)
    want = of_module(layer, of_sequences)
    agree(of_module(layer, lambda layer, x: layer(x.flatten(0, 1), cu_seqlens=bounds).view_as(x)),
          want, x)
    one = twin(layer, batch_first=None)
    of_sequences(layer, x).sum().backward(), one(flat).sum().backward()
    losses = [load_balancing_metrics(m)["seq_load_balancing_loss"] for m in (layer, one)]
    assert (losses[0] - losses[1]).abs() > 1e-3              # the loss of one sequence is another
    plain = exact_layer(batch_first=batch_first)
    assert plain(flat).shape == flat.shape


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


# ---- Router: balancing, counting ----

def test_router_base_class_is_ready_to_use():
    """A router of one's own: two methods, and the weight is drawn as TopKRouter's."""
    config = small_config(router_bias=True)
    torch.manual_seed(1)
    mine = Thresholded(config)
    torch.manual_seed(1)
    same(mine.weight, TopKRouter(config).weight)
    same(mine.bias, torch.zeros(6))
    mine.set_layer_number(3)
    assert mine.layer_number == 3
    with pytest.raises(TypeError):
        moe.Router(config)

    drawn = mine.weight.clone()
    mine.scale = torch.nn.Parameter(torch.full((), 3.0))     # not the base's to draw
    torch.manual_seed(1)
    mine.reset_parameters()
    same(mine.weight, drawn)
    assert mine.scale == 3


@about_the_cpu("elsewhere a look at the values would sync")
def test_router_checks_the_bounds_of_a_pack():
    router = TopKRouter(small_config())
    for bounds in ([1, 6], [0], [0, 7, 5], [0, 4, 6], [0, 3, 2, 5]):
        text = error(router, torch.zeros(5, 8), cu_seqlens=torch.tensor(bounds))
        assert f"cu_seqlens is {bounds}; needs 0 first, ascending, 5 last" in text
    router(torch.zeros(5, 8), cu_seqlens=torch.tensor([0, 0, 3, 5, 5]))


class Thresholded(moe.Router):
    """The two abstract methods alone: at most K experts, whose softmax is over 0.15."""

    def forward(self, input):
        return self.routing(self.gating(input))

    def routing(self, logits):
        scores = logits.flatten(0, -2).softmax(-1)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(
            1, scores.topk(self.config.topk).indices, True) & (scores > 0.15)
        return scores * routing_map, routing_map


def test_router_of_two_methods_in_a_layer():
    """A layer takes it, in one graph too; fewer than K experts, and padding. What route cannot
    take is refused by name."""
    layer = exact_layer(num_experts=6, topk=3)
    layer.router = Thresholded(layer.config)
    x = leaf(5, 3, 6)
    mask = torch.rand(5, 3) < 0.3
    probs, routing_map = layer.router(x)
    got, indices = layer.router.route(x, mask)
    fewer = routing_map.sum(1)
    assert fewer.min() < 3 and indices.dtype == torch.int64
    want = torch.where(mask.flatten()[:, None], 0.0, probs)
    same(kernels.routing_to_map(got, indices, 6), (want, want > 0))
    assert ((indices == 6).sum(1) == torch.where(mask.flatten(), 3, 3 - fewer)).all()
    close(layer(x, mask), layer_loop(layer, x, got, indices))
    agree(compiled(layer), layer, (x, mask))
    text = error(layer, x, None, torch.zeros(15, 3).long())
    assert "topk_indices is given, and Thresholded.route is that of Router" in text
    assert "cu_seqlens is given" in error(
        layer.router.route, x[:, 0], cu_seqlens=torch.tensor([0, 5]))


class Counting(Thresholded):
    """It counts as Megatron's routers do, in its forward."""

    def forward(self, input):
        probs, routing_map = super().forward(input)
        self._apply_expert_bias(routing_map)
        return probs, routing_map


@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "compiled"])
def test_router_of_ones_own_counts_once(way):
    """In a layer, and by route alone; in eval mode, and without a backward, not."""
    layer = small_layer(topk=3, enable_expert_bias=True)
    layer.router = Counting(layer.config)
    counts = layer.router.local_tokens_per_expert
    x = fp32_leaf(7, 8)
    once = layer.router.routing(layer.router.gating(x))[1].sum(0)
    function = WAYS[way](layer)
    for n in (1, 2):
        function(x).sum().backward()
        same(counts, n * once.float())
    layer.router.route(x)[0].sum().backward()
    same(counts, 3 * once.float())
    layer.router(x), layer.router(x)                         # leave nothing to the next forward
    assert not layer.router.counts.waiting
    layer.eval()(x).sum().backward()
    layer.train()(x).sum().backward()
    same(counts, 4 * once.float())


class CountsTwice(Thresholded):
    """It counts a half of its map at a time, and tokens in a buffer of its own before that."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = torch.zeros(1)

    def forward(self, input):
        probs, routing_map = super().forward(input)
        tokens = torch.full((1,), float(len(probs)), device=probs.device)
        self.add_in_backward(probs.detach(), self.seen, tokens)      # needs no gradient
        for half in routing_map.tensor_split(2):
            self._apply_expert_bias(half)
        return probs, routing_map


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "compiled"])
def test_router_of_ones_own_counts_when_called_alone(way, frozen):
    """What it counts in its forward is added in the backward of what forward returns, and several
    calls in one forward add up. A frozen router counts through the output of its layer."""
    layer = small_layer(topk=3, enable_expert_bias=True)
    router = layer.router = CountsTwice(layer.config)
    router.requires_grad_(not frozen)
    called = layer if frozen else router
    x = fp32_leaf(7, 8)
    once = router.routing(router.gating(x))[1].sum(0).float()
    function = WAYS[way](lambda x: called(x) if frozen else called(x)[0])
    router(x.detach())                                       # without a backward: not counted
    for n in (1, 2):
        y = function(x)
        assert router.seen == 7 * (n - 1)
        y.sum().backward()
        same(router.local_tokens_per_expert, n * once)
        same(load_balancing_metrics(router)["tokens_per_expert"][0], once.long())
        assert router.seen == 7 * n


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_router_counts_beside_a_number(way):
    """The activation may be 0-d."""
    router = TopKRouter(small_config(**LOSSES))
    buffer = torch.zeros(3, dtype=torch.int64)

    def loss(x):
        y = router.attach_and_log_load_balancing_loss(
            x.sum(), 0.5, aux_loss=x.mean(), aux_loss_name="z_loss", reduce_group=None)
        return router.add_in_backward(y, buffer, torch.tensor([1, 2, 3]))
    x = fp32_leaf(4, 3)
    WAYS[way](loss)(x).backward()
    close(x.grad, torch.full((4, 3), 1 + 1 / 12), 1e-6)
    same(buffer, torch.tensor([1, 2, 3]))
    same(router.counts.z_loss, 2 * x.detach().mean())


@about_the_cpu("elsewhere the check would sync")
def test_router_refuses_numbers_that_are_no_experts():
    """Before the probs are gathered; in a replay -1 is no mistake, and the router is named."""
    router, model = TopKRouter(small_config()), TwoLayers()
    x, three = torch.randn(5, 8), torch.full((5, 2), 3)

    def replay(*indices):
        with replay_routing(model, indices):
            model(x)
    check_error_table("""
        router.route(x, None, three + 4) => topk_indices has values from 7 to 7; needs 0 to 6, where
        router.route(x, None, three - 4) => topk_indices has values from -1 to -1; needs 0 to 6
        replay(three, three + 4) => indices of second.router has values from 7 to 7; needs -1 to 6
        replay(three, three - 5) => indices of second.router has values from -2 to -2; needs -1 to 6
        """, router=router, x=x, three=three, replay=replay)
    same(router.route(x, None, three.to(torch.uint16)), router.route(x, None, three))


def test_router_errors():
    check_error_table("""
        router.routing(zeros(5, 3, 6), mask) => is [3, 5] torch.bool; needs [5, 3] torch.bool, True
        router(zeros(8)) => input has shape [8]; needs [S, B, 8] or [T, 8]
        router(zeros(())) => input has shape []; needs [S, B, 8] or [T, 8]
        router(zeros(2, 5, 3, 8)) => input has shape [2, 5, 3, 8]
        router.route(x, None, zeros(5, 2).long()) => topk_indices is [5, 2] torch.int64
        router.route(x, None, zeros(5, 2).long()) => needs [15, 2] or [5, 3, 2] of an integer dtype
        router.route(x, None, zeros(3, 5, 2).long()) => is [3, 5, 2]
        router.route(x[:, 0], None, zeros(5, 2)) => is [5, 2] torch.float32
        router(x, cu_seqlens=pack) => and input has [5, 3] tokens; needs [T], or one axis of length
        router(x[:, 0], cu_seqlens=pack.short()) => cu_seqlens is [2] torch.int16; needs [n + 1] to
        router(x[:, 0], cu_seqlens=zeros(2)) => is [2] torch.float32; needs [n + 1] torch.int32 or
        router.route(x[:, 0], cu_seqlens=pack[None]) => cu_seqlens is [1, 2] torch.int64
        router.route(x[:, 0], cu_seqlens=pack[0]); router(x[:, 0], cu_seqlens=pack[:0]) => needs [n
        attach(zeros(5), 0.1, zeros(()), "mse", None) => is 'mse'; known: 'load_balancing_loss'
        router.add_in_backward(x, zeros(2).long(), zeros(2)) => TypeError: value is torch.float32 an
        router.add_in_backward(x, zeros(2), zeros(3)) => value has shape [3], buffer has shape [2]
        """, router=(router := TopKRouter(small_config())), zeros=torch.zeros,
        attach=router.attach_and_log_load_balancing_loss, x=torch.zeros(5, 3, 8),
        mask=torch.zeros(3, 5).bool(), pack=torch.tensor([0, 5]))


def test_router_forward_and_route_are_one_choice():
    """Padded to the capacity, the [T, E] form holds the fillers too, at prob 0."""
    x = torch.randn(13, 1, 8)
    mask = torch.rand(13, 1) < 0.4
    router = random_layer(small_config(
        score_function="sigmoid", enable_expert_bias=True, router_bias=True)).router
    both = router(x, mask)
    same(both, kernels.routing_to_map(*router.route(x, mask), 6))
    same(both, router.routing(router.gating(x), mask))
    assert both[1].sum(1).tolist() == (~mask.flatten() * 2).tolist()

    router = TopKRouter(small_config(capacity_factor=1.0, pad_to_capacity=True))
    probs_TE, map_TE = router(x)
    assert map_TE.sum(0).tolist() == [math.ceil(13 * 2 / 6)] * 6
    real_probs, real_map = kernels.routing_to_map(*router.route(x), 6)
    same(probs_TE, real_probs)
    assert (map_TE & real_map).equal(real_map)
    assert (probs_TE[map_TE & ~real_map] == 0).all()


def test_router_packed_sequences_are_a_batch():
    """Megatron-LM #5696: a pack of equal sequences has the losses and gradients of their batch.
    Nothing but seq_aux_loss sees the bounds."""
    layer = exact_layer(batch_first=True, **LOSSES)
    x = leaf(3, 7, 6)
    mask = torch.rand(3, 7) < 0.3
    mask[1] = True                                           # counts as a sequence, at loss 0
    bounds = torch.tensor([0, 7, 14, 14, 21, 21])

    for axes in ((21,), (21, 1), (1, 21)):
        def packed(layer, x, mask):
            y = layer(x.view(*axes, 6), mask.view(axes), cu_seqlens=bounds)
            return y.view(x.shape)
        agree(of_module(layer, packed), layer, (x, mask))
    layer = small_layer(**dict(
        LOSSES, load_balancing_type=LOSS_TYPES[::2], aux_loss_coeff=(0.1, 0.3)), **QUANTILE)
    x = fp32_leaf(21, 8)
    same(outcome(layer, (x, None, None, bounds)), outcome(layer, x))
    same(layer.eval()(x, cu_seqlens=bounds), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_bias_rounds_once(dtype):
    """Product and bias in one rounding: each logit is the nearest value of router_dtype, but for
    ties that fp32 sums leave open. Gradients as of an addition."""
    tokens, weight, bias = torch.randn(200, 8), torch.randn(16, 8), 3 * torch.randn(16)
    leaves = [z.requires_grad_() for z in (tokens, weight, bias)]
    logits = kernels.router_gating_linear(*leaves, router_dtype=dtype)
    exact = tokens.to(dtype).double() @ weight.to(dtype).double().t() + bias.double()
    right = exact.to(dtype)
    assert logits.dtype == dtype and (logits != right).float().mean() < 0.002
    twice = (tokens.to(dtype) @ weight.to(dtype).t() + bias.to(dtype))
    assert (twice != right).float().mean() > 0.1
    upstream = torch.randn(200, 16).to(dtype)
    grad_bias = grads(logits, leaves, upstream)[2]
    close(grad_bias, upstream.float().sum(0), 1e-4)


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, WAYS))
def test_router_counts_exactly_once(way):
    """torchtitan #1593: a checkpoint's second forward must not count again. One step, two forwards
    in flight, three accumulated; nothing in eval or under no_grad. The histogram of biases too."""
    jitter = 0.0 if "around" in way else 0.1
    layer = small_layer(**QUANTILE, input_jitter_eps=jitter)
    function = WAYS[way](layer)
    counts = layer.router.local_tokens_per_expert

    def forward():
        return function(fp32_leaf(7, 8)).sum()
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


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_router_recomputation_is_bitwise(way):
    """Ties, jitter and dropping in a checkpoint: routing and gradients of the run without
    (Automodel #2635 #3140 #3325 #3743, NeMo-RL #1203)."""
    layer = small_layer(**LOSSES, input_jitter_eps=0.3, capacity_factor=0.7)
    with torch.no_grad():
        layer.router.weight[1:4] = layer.router.weight[:1]
    x = fp32_leaf(6, 2, 8)
    results = []
    for name in ("plain", way):
        torch.manual_seed(3)
        results.append(outcome(run_as(name, layer), x))
    same(*results)


def test_router_counts_do_not_depend_on_the_split():
    """Bias counts exactly, per-token losses' gradient to rounding, however a batch is cut
    (Megatron-LM #3672 #5798 #7213, torchtitan #4148)."""
    layer = small_layer(
        score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.25,
        load_balancing_type="seq_aux_loss", aux_loss_coeff=0.2, z_loss_coeff=0.1,
        calculate_per_token_loss=True)
    router = layer.router
    x = torch.randn(5, 8, 8)
    results = []
    for pieces in (1, 4):
        layer.zero_grad()
        router.expert_bias.zero_()
        for piece in x.chunk(pieces, dim=1):
            layer(piece).sum().backward()
        counts = router.local_tokens_per_expert.clone()
        update_expert_bias(layer)
        assert counts.sum() == 80 and (router.local_tokens_per_expert == 0).all()
        same(router.expert_bias, (counts.mean() - counts).sign() * 0.25)
        results.append([counts, router.weight.grad])
    same(results[0][0], results[1][0])
    close(*results, 1e-5)


def test_router_counts_beyond_what_bf16_holds():
    """Units survive in sums that bf16 would round (Megatron-LM #7081)."""
    layer = small_layer(enable_expert_bias=True).bfloat16()
    counts = layer.router.local_tokens_per_expert.fill_(2.0 ** 23)
    layer(torch.randn(7, 8).bfloat16()).sum().backward()
    assert (counts - 2.0 ** 23).sum() == 14 and counts.dtype == torch.float32


def test_router_hooks_fire():
    """A forward hook fires once a call: in a layer, through route, and alone."""
    layer = small_layer()
    calls = []
    layer.router.register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(4, 8)
    layer(x), layer.router.route(x), layer.router(x)
    assert len(calls) == 3


def test_router_keeps_no_copy_of_a_transposed_input():
    """[B, S, H] passed as [S, B, H] is kept as it is, although the product needs a copy."""
    router = TopKRouter(small_config(hidden_size=512))
    x = torch.randn(4, 8, 512).transpose(0, 1).requires_grad_()
    kept = saved_bytes(lambda: router(x), exclude=[x, *router.parameters()])
    assert kept == saved_bytes(
        lambda: router(x.detach().contiguous()), exclude=[*router.parameters()]) - x.nbytes


def test_router_asks_for_the_coefficient():
    """A subclass may change it from step to step."""
    router = TopKRouter(small_config(load_balancing_type="aux_loss", aux_loss_coeff=0.1))
    x = torch.randn(5, 3, 8)
    found = []
    for coeff in (0.1, 0.2):
        router.get_aux_loss_coeff = {"aux_loss": coeff}.get
        found += grads(0 * router.route(x)[0].sum(), [router.weight])
    assert found[0].any()
    close(found[1], 2 * found[0])


def test_router_balance_losses_see_the_plain_top_k():
    """By definition the losses count the plain top K: neither groups nor the expert bias change
    their map (Megatron-LM #5195 asks whether they should)."""
    plain = TopKRouter(small_config(score_function="sigmoid", **LOSSES))
    routers = plain, twin(plain, num_groups=3, group_topk=1, enable_expert_bias=True)
    routers[1].expert_bias.copy_(torch.arange(6.0))
    x = torch.randn(5, 3, 8)
    chosen = []
    for router in routers:
        probs, indices = router.route(x)
        probs.sum().backward()
        chosen.append(indices.sort(1).values)
    assert not torch.equal(*chosen)
    logged = [load_balancing_metrics(router) for router in routers]
    for name in moe.LOSS_NAMES.values():
        assert logged[0][name].isfinite().all()
        same(logged[1][name], logged[0][name])


def test_router_forced_balance():
    """Random experts of even load whatever the weights, and still a gradient. A masked logit (-inf)
    stays out of the random values."""
    router = TopKRouter(small_config(force_load_balancing=True, pre_softmax=True))
    with torch.no_grad():
        router.weight[0] += 100
    probs, indices = router.route(torch.rand(2400, 8))
    counts = torch.bincount(indices.flatten(), minlength=6)
    assert (counts - 800).abs().max() < 120
    assert grads(probs[:, 0], [router.weight])[0].any()
    logits = torch.randn(6, 6)
    logits[:, 1] = -INF
    logits[2] = -INF
    for route in (router.routing, compiled(router.routing)):
        logits = logits.detach().requires_grad_()
        probs, routing_map = route(logits)
        assert probs.isfinite().all() and (routing_map.sum(1) == 2).all()
        grad = grads(probs.sin(), [logits])[0]
        assert grad.isfinite().all() and grad.abs().sum() > 0


# ---- Shared expert ----

STEPS = {                     # each step, and the state that it needs
    "pre_forward_comm": "IDLE",
    "linear_fc1_forward_and_act": "PRE_FORWARD_COMM_DONE",
    "linear_fc2_forward": "FC1_FORWARD_DONE",
    "post_forward_comm": "FC2_FORWARD_DONE",
    "get_output": "POST_FORWARD_COMM_DONE"}


def in_steps(shared, x: Tensor) -> Tensor:
    shared.pre_forward_comm(x)
    for name in [*STEPS][1:]:
        out = getattr(shared, name)()
    return out


@pytest.mark.parametrize("fields", ACTIVATIONS)
def test_shared_matches_loop(fields):
    """At once, in five steps and as one graph: the output and gradients of the loop. The steps give
    the same bits. (In a layer: test_layer_matches_loop.)"""
    config = exact_config(shared_expert_overlap=True, **fields)
    x = leaf(5, 3, 6)
    for gate in (False, True):
        shared = SharedExpertMLP(config, gate)
        agree(shared, of_module(shared, shared_loop), x)
        agree(of_module(shared, in_steps), shared, x, tol=0)
    agree(compiled(shared), shared, x)


def test_shared_steps_refuse_every_wrong_order():
    """In every state every other step is refused, and nothing changes. The right one goes on."""
    shared = SharedExpertMLP(exact_config(shared_expert_overlap=True), gate=True)
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    given = {name: [x] if name == "pre_forward_comm" else [] for name in STEPS}
    caches = ("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output",
              "gate_score")

    def state():
        return [getattr(shared, name) for name in (*caches, "_overlap_state")]

    def refused(step, phrase):
        before = state()
        message = error(getattr(shared, step), *given[step])
        assert message == f"RuntimeError: {step} needs {phrase}; reset_overlap() starts again"
        assert all(a is b for a, b in zip(before, state()))

    found = 0
    for right, found_state in STEPS.items():
        for step, needed in STEPS.items():
            if step != right:
                refused(step, f"the state {needed}, found {found_state}")
        for name in caches:
            value = getattr(shared, name)
            if value is not None:
                found += 1
                setattr(shared, name, None)
                refused(right, f"{name} from the step before, found None")
                setattr(shared, name, value)
        out = getattr(shared, right)(*given[right])
    assert found == 8
    close(out, shared(x))
    assert state() == [None] * 5 + [SharedExpertState.IDLE]

    shared_experts.set_tensor_grad_fn_sequence_sr(torch.zeros(3), 7)      # no grad_fn: no effect
    plain = SharedExpertMLP(exact_config(), gate=False)
    plain.wait_current_stream()
    assert plain.stream is None
    check_error_table("""
        plain.get_output() => RuntimeError: get_output needs shared_expert_overlap=True, found False
        plain(x[..., 1:]) => hidden_states has shape [4, 1, 5]; needs [.., 6]
        SharedExpertMLP(small_config(), False) => shared_expert_intermediate_size is None
    """, plain=plain, x=x)


def test_shared_layer_works_again_after_an_exception(monkeypatch):
    """In any step, in the router, in the experts, in a wrong input: the next forward is right."""
    layer = exact_layer(shared_expert_overlap=True, shared_expert_gate=True)
    shared = layer.shared_experts
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    want = layer(x)

    def check(call, owner, name):
        def fail(*_, **__):
            raise ZeroDivisionError
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(owner, name, fail)
            call()
        assert shared._overlap_state is SharedExpertState.IDLE
        assert shared.cached_fc1_input is None and shared.gate_score is None
        same(layer(x), want)

    for name in ("_score", "_enter", "_fc1_and_act", "_fc2", "_leave", *STEPS):
        check(lambda: layer(x), shared, name)
    for owner, name in [(layer.router, "forward"), (layer.experts, "forward"), (layer, "dispatch")]:
        check(lambda: layer(x), owner, name)
    check(lambda: layer(x[..., 1:]), shared, "_score")
    shared.pre_forward_comm(x)                               # a step by itself, too
    check(shared.linear_fc1_forward_and_act, shared, "_fc1_and_act")


def test_shared_steps_compile_one_by_one():
    shared = SharedExpertMLP(exact_config(shared_expert_overlap=True), gate=True)
    steps = copy.deepcopy(shared)
    for name in STEPS:
        setattr(steps, name, compiled(getattr(steps, name)))
    agree(of_module(steps, in_steps), shared, leaf(4, 1, 6))


# ---- Record and replay ----

class TwoLayers(torch.nn.Module):
    """A MoE layer, a dense one, another MoE layer. Each choice may be given."""

    def __init__(self, **options):
        super().__init__()
        self.first = small_layer(**options)
        self.dense = torch.nn.Linear(8, 8)
        self.second = small_layer(**options)

    def forward(self, x, first=None, second=None):
        y = self.dense(self.first(x, topk_indices=first))
        return self.second(y, topk_indices=second)


def random_choices(T: int) -> list[Tensor]:
    """For the routers of TwoLayers."""
    return [random_indices(T, 6, 2, nowhere=0) for _ in range(2)]


@pytest.mark.parametrize("way", slow_but(EAGER_WAYS, WAYS))
def test_record_and_replay(way):
    """verl #7340, #5037: what is recorded is what each router chose, in module order. A replay
    takes effect, in each router with its own record, and a recomputation replays the same."""
    model = TwoLayers(**BIASED)
    function = run_as(way, model)
    x = fp32_leaf(9, 8)
    with torch.no_grad():
        first = model.first.router.route(x)[1]
        second = model.second.router.route(model.dense(model.first(x)))[1]
    with record_routing(model) as record:
        want = outcome(function, x)
    same(record.indices, [first, second])

    others = random_choices(9)
    expected = outcome(model, (x, *others))
    for indices in (others, torch.stack(others)):
        with replay_routing(model, indices), record_routing(model) as record:
            close(outcome(function, x), expected, 1e-5)
        same(record.indices, others)
    close(outcome(function, x), want, 1e-6)                  # nothing stays behind


def test_record_has_probs_and_names():
    """The probs are those that the experts multiply by: 0 where a capacity has dropped."""
    model = torch.nn.Sequential(
        small_layer(capacity_factor=0.7), small_layer())
    x = fp32_leaf(9, 8)
    for function in (model, compiled(model)):
        with record_routing(model) as record:
            assert record.indices == record.probs == [None, None]
            function(x)
            middle = model[0](x)
        assert record.names == ["0.router", "1.router"]
        for router, z, indices, probs in zip(
                [model[0].router, model[1].router], [x, middle], record.indices, record.probs):
            want, kept = router.route(z)
            close(probs, want, 1e-6)
            assert not probs.requires_grad
            same(indices.where(kept != 6, 6), kept)
    with record_routing(model[0].router) as record:
        model[0](x)
    assert record.names == [""]


class IgnoresGiven(TopKRouter):
    """Its choice is its own, whatever it is given."""

    def choose(self, logits, padding_mask=None, topk_indices=None):
        return super().choose(logits, padding_mask)


@about_the_cpu("a card's values are not read")
def test_record_holds_what_was_used():
    """A choose that ignores given indices is refused in eager mode on a CPU, before anything is
    counted; a graph's record holds what was used. Padding may differ, repeats may not be left."""
    router = IgnoresGiven(small_config())
    x = fp32_leaf(9, 8)
    own = router.route(x)[1]
    given = (own + 1) % 6
    router.route(x, topk_indices=own)
    padding = torch.arange(9) < 3
    partly = torch.where(padding[:, None], given, own)
    router.route(x, padding, topk_indices=partly)
    wrong = "IgnoresGiven.choose was given topk_indices and returned {} of 18 others"
    assert wrong.format(18) in error(router.route, x, topk_indices=given)
    assert wrong.format(6) in error(router.route, x, topk_indices=partly)
    with replay_routing(router, [given]):
        assert wrong.format(18) in error(router, x)
    assert not any(tensor.nan_to_num().any() for tensor in counts_of(router))
    route = compiled(router.route)
    with record_routing(router) as record:
        route(x, topk_indices=given)
    same(record.indices, [own])


def test_record_replay_of_given_logits():
    """router.routing takes part in a replay as router.route does."""
    router = TopKRouter(small_config(score_function="sigmoid"))
    x, other = torch.randn(2, 7, 8)
    with record_routing(router) as record:
        probs, routing_map = router.routing(router.gating(x))
    assert router.routing(router.gating(other))[1].ne(routing_map).any()
    with replay_routing(router, record.indices):
        same(router.routing(router.gating(x)), (probs, routing_map))
        same(router.routing(router.gating(other))[1], routing_map)
        assert "needs [5, 2]" in error(router.routing, router.gating(x[:5]))


def test_record_replayed_padding_reaches_no_expert():
    """miles #2697: E is no expert, neither 0 .. K-1. A mask holds for tokens routed live too."""
    layer = small_layer()
    x = torch.randn(40, 8)
    real = torch.arange(40) < 10
    choice = random_choices(40)[0]
    want = torch.bincount(choice[real].flatten(), minlength=6)
    for mask, padding in ((None, 6), (~real, 6), (~real, -1), (~real, 0)):
        with replay_routing(layer, [choice.where(real[:, None], padding)]):
            y = layer(x, mask)
            y.sum().backward()
        assert not y[~real].any() and y[real].any(1).all()
        same(load_balancing_metrics(layer)["tokens_per_expert"][0], want)


@pytest.mark.parametrize("how", [lambda f: f, pytest.param(compiled, marks=slow)])
def test_record_holds_the_choice_before_dropping(how):
    """E where padding is; in eval too; the latest forward; it stays after the context."""
    model = TwoLayers(capacity_factor=0.25, pre_softmax=True)
    mask = torch.arange(9) % 4 == 1
    router = model.first.router
    route = how(router.route)
    x = torch.randn(9, 8)
    with record_routing(model) as record:
        assert record.indices == [None] * 2
        route(x[:4])
        router.eval()
        dropped = route(x, mask)[1]
    router.train()
    chosen, other = record.indices
    assert other is None
    assert (chosen == 6).equal(mask[:, None].expand(9, 2))
    assert (dropped == 6).sum() > (chosen == 6).sum()
    with replay_routing(model, record.indices[:1] * 2):
        same(route(x)[1], dropped)
    with record_routing(model) as record:                     # repeats as given: replayed the same
        want = router.route(x, mask, torch.zeros(9, 2, dtype=torch.int16))
    with replay_routing(model, record.indices):
        same(router.route(x, mask), want)
    with torch.inference_mode(), record_routing(model) as record:
        model(x)
    with replay_routing(model, record.indices):      # tensors of inference mode, in training
        model(x).sum().backward()


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_record_replay_routes_unknown_rows_itself(way):
    """A token whose row has a -1 goes where its router sends it; E in other rows is unrouted."""
    model = TwoLayers(**BIASED, capacity_factor=0.9)
    model.first.router.expert_bias.normal_()
    x = fp32_leaf(9, 8)
    others = random_choices(9)
    others[0][[2, 8], 1] = -1
    others[0][3, 0] = 6
    others[1][-1] = -1
    given = []
    y = x
    with torch.no_grad():
        for indices, layer in zip(others, (model.first, model.second)):
            chosen = layer.router.choose(layer.router.gating(y))[1]
            given.append(torch.where((indices < 0).any(1, keepdim=True), chosen, indices))
            y = model.dense(layer(y, topk_indices=given[-1]))
    want = outcome(model, (x, *given))
    function = run_as(way, model)
    for choices in (others, given):                          # one graph
        with replay_routing(model, choices), record_routing(model) as record:
            close(outcome(function, x), want, 1e-5)
        same(record.indices, given)
    assert graphs_made() == (way != "plain")
    with replay_routing(model, [i.short() for i in others]), record_routing(model) as record:
        model(x)
    same(record.indices, given)


def test_record_replay_refuses_what_does_not_fit():
    model = TwoLayers(**BIASED)

    def replay(*indices):
        with replay_routing(model, indices):
            model(torch.randn(5, 8))

    def twice(context, *args):
        with context(model, *args), context(model, *args):
            pass
    a, b = random_choices(5)
    model(torch.randn(5, 8)).sum().backward()
    check_error_table("""
        replay(a) => is for 1 layers; the model has 2 routers: first.router, second.router
        twice(replay_routing, [a, b]) => is replaying already; leave replay_routing first
        twice(record_routing) => recorded already; leave record_routing first
        record_routing(torch.nn.Linear(2, 2)).__enter__() => (Linear) has no Router
        replay(a, None) => indices of second.router is None:
        replay(a, b[:4]) => second.router is [4, 2] torch.int64; needs [5, 2] or [5, 2] of an int
        replay(a, b[:, :1]) => second.router is [5, 1] torch.int64; needs [5, 2] or [5, 2] of an
        replay(a, b.float()) => second.router is [5, 2] torch.float32; needs [5, 2] or [5, 2]
        """, a=a, b=b, replay=replay, twice=twice)
    for router in router_file._routers(model):
        assert router.local_tokens_per_expert.sum() == 10    # what is refused changes nothing
    with pytest.raises(ZeroDivisionError):
        with replay_routing(model, [a, b]), record_routing(model):
            raise ZeroDivisionError
    for router in router_file._routers(model):
        assert not router._recording and router._replayed is None


