"""Tests of the layer, moe.py to compat.py: plain-loop oracles first, then a section a topic.

    python -m pytest test_moe.py                in minutes
    python -m pytest test_moe.py -k test_route_ one section: its word begins its tests' names
    SLOW=1 python -m pytest test_moe.py         also what is slow by nature; SLOW=only: nothing else
    DEVICE=cuda python -m pytest test_moe.py    on that device, see card/README.md

The words: route, balance, permute, activation, experts, config, layer, router, groups, shared,
graph, parallel, trainer, compile, card.

The oracles share no code with their subjects, walk one token and one choice at a time, and run in
float64. Every letter has a different size wherever it can, so that a swapped axis fails.
"""
import contextlib
import copy
import dataclasses
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
import time
import warnings
from pathlib import Path
from typing import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

if __package__:                                      # copied into a package
    from . import base, compat, grouped, kernels, maps, moe, shared_experts
    from . import router as router_file
    from .grouped import grouped_mm
    from .kernels import (
        activation, combine_rows, compute_routing_scores_for_aux_loss, expert_mlp, gather_rows,
        get_capacity, get_updated_expert_bias, plan_permutation, quantile_expert_bias,
        required_bias_histogram, sinkhorn, switch_load_balancing_loss_func, z_loss_func)
    from .maps import (
        activation_back, apply_router_token_dropping, group_limited_topk, pad_routing_map, permute,
        sort_chunks_by_idxs, swiglu, swiglu_back, topk_routing_with_score_function, unpermute,
        weighted_swiglu, weighted_swiglu_back)
    from .moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics, record_routing, replay_routing, set_aux_loss_scale,
        update_expert_bias)
    from .ranks import parallel, sharding
    from .ranks.parallel import ProcessGroups
    from .ranks.sharding import reduce_gradients
else:
    import base
    import compat
    import grouped
    import kernels
    import maps
    import moe
    import router as router_file
    import shared_experts
    from grouped import grouped_mm
    from kernels import (
        activation, combine_rows, compute_routing_scores_for_aux_loss, expert_mlp, gather_rows,
        get_capacity, get_updated_expert_bias, plan_permutation, quantile_expert_bias,
        required_bias_histogram, sinkhorn, switch_load_balancing_loss_func, z_loss_func)
    from maps import (
        activation_back, apply_router_token_dropping, group_limited_topk, pad_routing_map, permute,
        sort_chunks_by_idxs, swiglu, swiglu_back, topk_routing_with_score_function, unpermute,
        weighted_swiglu, weighted_swiglu_back)
    from moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics, record_routing, replay_routing, set_aux_loss_scale,
        update_expert_bias)
    from ranks import parallel, sharding
    from ranks.parallel import ProcessGroups
    from ranks.sharding import reduce_gradients

LAYER = compat, grouped, kernels, base, router_file, shared_experts, moe
SOURCES = *LAYER, maps, sharding, parallel
INF = math.inf
NAN = math.nan
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="slow: runs with SLOW=1")

# The tests run on this device. The emulated card of card/ has an environment variable of its own.
DEVICE = torch.device(os.environ.get("DEVICE", "cpu")).type
EMULATED = "CARD_PRELOAD" in os.environ
RANK_DEVICE = DEVICE if EMULATED else "cpu"          # ranks talk over gloo


def about_the_cpu(reason: str):
    """Marks a test that runs on the CPU alone."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"about the CPU: {reason}")


on_a_card = pytest.mark.skipif(DEVICE != "cuda", reason="needs a card: DEVICE=cuda")


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
def fresh_start(request):
    """Every test draws from one seed, and leaves no compiled code, dtype or loss scale behind."""
    if os.environ.get("SLOW") == "only" and slow.mark not in request.node.iter_markers():
        pytest.skip("quick: runs without SLOW")
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    set_aux_loss_scale(1.0)


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
            text = error(eval, call, {**globals(), **names})
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


# ---- Ranks ----

def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@functools.cache
def rank_server():
    """Ranks are forked from one server, which has imported torch and this file once for all tests.

    It starts with the first rank and ends with this process. It sees no CUDA device: a process that
    has asked for one cannot be forked. Ranks on the emulated card make it after the fork.
    """
    from multiprocessing import forkserver
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        __name__, "torch._inductor.compile_fx", "torch.distributed.checkpoint",
        "torch.distributed.fsdp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        if EMULATED:
            patch.setenv("LD_PRELOAD", os.environ["CARD_PRELOAD"])
        forkserver.ensure_running()


def over_ranks(ranks: int):
    """A test whose body(rank, ranks, **fixtures) runs in `ranks` processes of one gloo group."""
    def decorate(body):
        @functools.wraps(body)
        def test(**fixtures):
            spawn_gloo(body, ranks, **fixtures)
        test.body = body
        _, _, *fixtures = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(fixtures)
        return test
    return decorate


@contextlib.contextmanager
def started_ranks(function, ranks: int, **kwargs):
    """Processes of function(rank, ranks, **kwargs), and what joins them. All are killed at the end.
    """
    rank_server()
    name = function.__module__, function.__name__
    started = torch.multiprocessing.start_processes(
        _rank_main, (ranks, free_port(), name, kwargs), ranks, join=False, daemon=True,
        start_method="forkserver")
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def spawn_gloo(function, ranks: int, seconds: float = 480, **kwargs) -> None:
    """function(rank, ranks, **kwargs) in `ranks` processes of one gloo group.

    If a rank raises, dies or takes too long, all are killed, and the error has its traceback.
    """
    deadline = time.monotonic() + seconds
    with started_ranks(function, ranks, **kwargs) as started:
        while not started.join(max(deadline - time.monotonic(), 0)):
            assert time.monotonic() < deadline, f"{function.__name__}: ranks hang"


def _rank_main(rank, ranks, port, name, kwargs):
    from datetime import timedelta
    module, function = name
    if EMULATED:
        importlib.import_module("card.emulate").install()
        if not function.startswith("test_card_"):
            torch.set_default_device(DEVICE)
    function = getattr(sys.modules.get(module) or importlib.import_module(module), function)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60))
    getattr(function, "body", function)(rank, ranks, **kwargs)
    torch.distributed.barrier()                      # nobody leaves while others still connect
    torch.distributed.destroy_process_group()


def mesh_of(**sizes: int):
    """mesh_of(dp=2, ep=2): dp is the outer dim."""
    names = tuple(sizes)
    return torch.distributed.init_device_mesh(
        RANK_DEVICE, tuple(sizes.values()), mesh_dim_names=names)


def groups_over(**sizes: int) -> ProcessGroups:
    """The groups of mesh_of."""
    return ProcessGroups.from_mesh(mesh_of(**sizes))


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
            options = {**c.routing_options}
            assert options.pop("probs_dtype") is None
            route = functools.partial(
                topk_routing_with_score_function, logits, expert_bias=bias,
                precomputed_indices=given, **options)
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


def test_route_with_probs_of_another_dtype():
    """Wider than the logits or narrower: the arithmetic is that of the wider dtype, and is rounded
    once. Of two 16-bit dtypes every step is rounded, and rounded scores are compared."""
    logits = torch.randn(256, 8).bfloat16()
    bias = torch.randn(8) * 0.1
    score = dict(softmax=lambda x: x.softmax(-1), sigmoid=torch.sigmoid,
                 sqrtsoftplus=lambda x: F.softplus(x).sqrt())
    for kind in score:
        route = functools.partial(
            kernels.topk_routing, topk=3, score_function=kind, norm_topk_prob=True,
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
        plain = functools.partial(kernels.topk_routing, logits, topk=3, score_function=kind)
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
        same(probs, kernels.topk_routing(logits.flatten(0, 1), 3, probs_dtype=probs_dtype)[0])
        (probs * torch.randn_like(probs)).sum().backward()
        assert router.weight.grad.abs().sum() > 0
        same(compiled(lambda x: router.route(x)[1])(x), indices)


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
        group_limited_topk(x, 2, 6, 4, 2, 1) => scores has shape [1, 6, 4]
        kernels.routing_to_map(x, indices, 4) => probs has shape [1, 6, 4]
        kernels.routing_to_map(logits, indices, 4) => indices has shape [6, 3]
        """, route=topk_routing_with_score_function, aux=compute_routing_scores_for_aux_loss,
        groups=functools.partial(topk_routing_with_score_function, logits, topk=2, num_groups=2),
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
            layer(x).sum().backward()
        assert router.bias_histogram.sum() == 4 * 1000 * 32
        violations.append((router.local_tokens_per_expert.max() / 500 - 1).item())
        update_expert_bias(layer)
        assert router.local_tokens_per_expert.sum() == 0 and router.bias_histogram.sum() == 0
    assert violations[0] > 0.5 and max(violations[1:]) < 0.2, violations

    mask = torch.rand(1000) < 0.5                                    # a padding token needs no bias
    layer(xs[0], mask).sum().backward()
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
    """In fp32, eager and in a graph, as in float64 to a few units of the last place."""
    logits = torch.randn(T, 8) * 0.3
    leaves = logits, torch.rand(8)
    functions = [
        lambda x, n: switch_load_balancing_loss_func(x.softmax(1), n, T, 2, 8, 0.1),
        lambda x, n: z_loss_func(x, 0.1),
        lambda x, n: kernels.weighted_token_sum(torch.full_like(x, 1 / 3), n)]
    for function in functions:
        want = function(*[x.double() for x in leaves])
        got = compiled(function, backend)(*leaves)
        assert got.dtype == torch.float32
        close(got.double(), want, 3e-7)


def test_balance_errors():
    logits = torch.randn(6, 4)
    routing_map = torch.rand(6, 4) < 0.5
    check_error_table("""
        loss(logits[None], bias, 6, 2, 4, 0.1) => probs has shape [1, 6, 4]
        loss(logits, logits[:4], 6, 2, 4, 0.1) => tokens_per_expert has shape [4, 4]; needs [E = 4]
        sinkhorn(logits[None]) => cost has shape [1, 6, 4]
        drop(logits, routing_map, 2, 1.0, "random") => drop_policy is 'random'
        drop(logits, routing_map[:5], 2, 1.0) => routing_probs has shape [6, 4]; needs [T = 5
        drop(logits[None], routing_map[None], 2, 1.0) => routing_map has shape [1, 6, 4]
        required(logits, bias, 4); required(logits, bias, 0) => topk is
        required(logits, bias, 2, 0) => topk is 2 and num_bins 0
        required(logits, bias[:3], 2) => expert_bias has shape [3]
        required(logits[None], bias, 2) => scores has shape [1, 6, 4]
        quantile_expert_bias(logits, bias, 2) => expert_bias has shape [4]; needs [E = 6]
        quantile_expert_bias(bias, bias, 2) => histogram has shape [4]
        quantile_expert_bias(logits[:4], bias, 4) => topk is 4; needs 1 <= topk < num_experts = 4
        """, loss=switch_load_balancing_loss_func, drop=apply_router_token_dropping,
        required=required_bias_histogram, logits=logits, routing_map=routing_map, bias=logits[0])


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
        order = kernels._plan_permutation._init_fn(indices, E)[0]
    assert set(sorted_in) == {dtype}
    same(order, indices.flatten().argsort(stable=True))


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
    assert unpermute(rows, torch.zeros(9).long(), (1, 1)).item() == 264


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


def test_permute_errors():
    check_error_table("""
        permute(x, ones[:5]) => routing_map has shape [5, 4]; needs [T = 6
        permute(x[None], ones); gather_rows(x[None], plan) => tokens has shape [1, 6, 8]
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
        plan_permutation(zeros, 4); plan_permutation(index, 4) => TypeError: indices is [6
        gather_rows(x[:5], plan) => tokens has shape [5, 8]
        combine_rows(x, plan) => rows has shape [6, 8]
        combine_rows(torch.zeros(12, 8), plan, probs) => probs has shape [6, 4]
        sort_chunks_by_idxs(x, sizes, sizes[:2]) => sorted_idxs has shape [2]
        sort_chunks_by_idxs(x, sizes[None], sizes[None]) => split_sizes has shape [1, 3]
        sort_chunks_by_idxs(x, sizes, sizes, probs[:5]) => probs has 5 rows and input 6
        pad_routing_map(ones, 0) => pad_multiple is 0
        """, x=torch.randn(6, 8), probs=torch.randn(6, 4), ones=torch.ones(6, 4).bool(),
        index=torch.zeros(6).long(), sizes=torch.full((3,), 2), zeros=torch.zeros(6, 2),
        plan=plan_permutation(torch.zeros(6, 2).long(), 4))


def test_permute_index_times_width_is_int64():
    """torchtitan #2430: beyond 2^31 elements an int32 product of an index and a row's width
    overflows."""
    x = fp32_leaf(6, 8)
    indices = random_indices(6, 3, 2)
    routing_map = torch.rand(6, 4) < 0.5
    probs = torch.rand(6, 4)
    ops = ("mul", "floor_divide", "remainder", "index_select", "gather", "index_add", "index")
    seen = {}

    def note(name, args, out):
        """Integers that an op computes, or takes as indices."""
        tensors = torch.utils._pytree.tree_leaves(out if name in ops[:3] else args[1:])
        if name in ops:
            dtypes = [x.dtype for x in tensors if isinstance(x, Tensor)]
            seen[name] = seen.get(name, set()).union(dtypes)
    with Watch(note):
        small_layer(**CONFIGS["padded"])(x).sum().backward()
        plan = kernels.pad_plan(plan_permutation(indices, 3), 6)
        combine_rows(gather_rows(x, plan), plan, probs[:, :2]).sum().backward()
        for pad in (False, True):
            there_and_back(x, routing_map, probs, 12, drop_and_pad=pad)
        sort_chunks_by_idxs(x, torch.tensor([2, 1, 3]).int(), torch.tensor([1, 2, 0]))
    assert len(seen) >= 6
    assert set().union(*seen.values()) <= {torch.int64, torch.bool, torch.float32}, seen


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
        router.counts.carried_by(fp32_leaf(1)).backward()
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


# ---- Activations ----

@pytest.mark.parametrize("fields", ACTIVATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_activation_matches_autograd(fields, weighted):
    """Values, and both ways to the gradient, against autograd through the plain formula in fp64."""
    c = MoEConfig(4, 4, 4, topk=2, **fields)
    kind = c.activation_function
    y = leaf(5, 3, 8)
    w = leaf(5, 3, 1) if weighted else None
    inputs = [y, w] if weighted else [y]
    want = torch.stack([act_loop(row, c) for row in y.flatten(0, 1)]).unflatten(0, (5, 3))
    if weighted:
        want = want * w
    g = torch.randn_like(want)
    got = activation(y, kind, w)
    constants = getattr(kind, "keywords", {})
    same(activation(y, c.activation, w, **constants), got)
    got_grads = grads(got, inputs, g)
    close([got, *got_grads], [want, *grads(want, inputs, g)])
    with torch.no_grad():
        for options in (dict(kind=kind), dict(kind=c.activation, **constants)):
            back = activation_back(g, y, weights=w, **options)
            same(list(back) if weighted else [back], got_grads)


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
    same(activation_back(torch.ones(1, 3), y, clamp_value=0.7) == 0, want == 0)


@pytest.mark.parametrize("kind", list(kernels.ACTIVATIONS))
def test_activation_back_compiles_where_its_input_requires_grad(kind):
    """torch's backward functions have no derivative of their own."""
    g, y = torch.randn(3, 4), fp32_leaf(3, 8)
    if kernels.parts_of(kernels.ACTIVATIONS[kind]) == 1:
        y = fp32_leaf(3, 4)
    w = torch.rand(3, 1, requires_grad=True)
    for weights in (None, w):
        want = activation_back(g, y, kind, weights)
        close(compiled(activation_back)(g, y, kind, weights), want, 1e-6)
    if kind == "swiglu":
        same(compiled(swiglu_back)(g, y), swiglu_back(g, y))
        close(compiled(weighted_swiglu_back)(g, y, w), weighted_swiglu_back(g, y, w), 1e-6)


class TwoExperts(torch.nn.Module):
    """expert_mlp twice, activation and activation_back, with an activation that is made already."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.plan = plan_permutation(random_indices(7, 3, 2), 3)

    def forward(self, x, probs, fc1, fc2):
        y = x
        for _ in range(2):
            y = expert_mlp(y, probs, self.plan, fc1, fc2, kind=self.made)
        x_and_gate = x.repeat(1, kernels.parts_of(self.made))
        gradient = activation_back(x.detach(), x_and_gate.detach(), self.made)
        return y + activation(x_and_gate, self.made) + gradient[:, :4]


@pytest.mark.parametrize("made", [
    kernels.activation_of("quick_geglu", alpha=1.3, linear_offset=1.0, clamp_value=0.7),
    kernels.activation_of("situ", beta=1.5, linear_beta=2.0), kernels.relu2])
def test_activation_made_before_it_is_compiled(made):
    """With dynamic=True the compiler makes symbolic numbers of its constants."""
    two = TwoExperts(made)
    shapes = (7, 4), (7, 2), (3, kernels.parts_of(made), 5, 4), (3, 4, 5)
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


def check_keeps_little(*backends: str | None, fp8: bool = False) -> None:
    """A bf16 layer keeps tokens and fc1's output for the backward, 5 % more, ids, probs and logits,
    in eager mode the activation's output too; not the gathered rows."""
    T, H, F_, E, K = 256, 64, 32, 8, 4
    layer = MoELayer(MoEConfig(
        H, F_, E, topk=K, params_dtype=torch.bfloat16, activation_fp8_input_store=fp8)).to(DEVICE)
    x = torch.randn(T, H).to(DEVICE, torch.bfloat16).requires_grad_()
    most = 1.05 * (2 * T * H + (1 if fp8 else 2) * T * K * 2 * F_) + T * K * (3 * 8 + 8) + T * E * 4
    if DEVICE != "cpu":
        most += 4 * (E + T * K * 13 // 10)                   # the index of batches
    for backend in backends:
        function = compiled(layer, backend)
        kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
        eager = backend is None
        assert kept <= most + eager * 2 * T * K * F_, (backend, kept)


def test_activation_keeps_only_its_input():
    """With fp8_input_store as fp8, which the backward alone sees."""
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
    same(grads(out, [y], g)[0], activation_back(g, stored, weights=w)[0])


def test_activation_errors():
    check_error_table("""
        activation(x, "silu") => kind is 'silu'
        activation(x[:, :7]) => y has shape [6, 7]; needs an even last axis
        activation(x, torch.add) => does not say which parameters it has; needs a function written
        activation(x, weights=torch.ones(6)) => weights has shape [6]
        swiglu_back(x, x) => g has shape [6, 8]; needs [6, 4]
        activation_back(half, x, "relu2") => g has shape [6, 4]; needs [6, 8]
        activation(x, "relu2", clamp_value=None) => relu2 has no such constant, it has none
        activation_back(half, x, made, alpha=1.702) => it has linear_offset, clamp_value
        activation(x, alpha=1.702); activation(x, beta=2.0) => it has linear_offset, clamp_value
        activation(x, "situ", clamp_value=1.0) => situ has no such constant, it has beta, linear_
        activation(x, "situ", beta=0.0) => beta is 0.0
        activation_back(half, x, "situ", linear_beta=-1.0) => linear_beta is -1.0
        """, x=torch.randn(6, 8), half=torch.randn(6, 4), made=kernels.swiglu)


# ---- Grouped product and experts ----

def test_experts_backward_ignores_autocast():
    layer = MoELayer(MoEConfig(6, 5, 4, topk=2, init_std=0.5, add_bias_linear=True))
    x = fp32_leaf(9, 6)
    leaves = [x, *layer.parameters()]
    want = grads(layer(x), leaves)
    y = layer(x)
    with torch.autocast(DEVICE, torch.bfloat16):
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
    monkeypatch.setattr(
        grouped, "where_read", lambda offsets, *_: grouped.Read(offsets, native=True))


def on_a_card_without_products(monkeypatch) -> None:
    """From now on the CPU is a card on which torch's grouped product reads no offsets. Experts of
    similar size are multiplied as one batch."""
    monkeypatch.setattr(grouped, "where_read", lambda offsets, num_rows, *_: grouped.Read(
        *grouped._read_in_batches(offsets, num_rows)))


def on_a_cpu_without_products(monkeypatch) -> None:
    """From now on one expert is multiplied after the other."""
    monkeypatch.setattr(grouped, "where_read", lambda offsets, *_: grouped.Read(offsets.cpu()))


# Who multiplies, and what makes it so.
PRODUCTS = {
    "this device": lambda monkeypatch: None,
    "a loop": on_a_cpu_without_products,
    "batches": on_a_card_without_products,
    "native": with_native_products,
}


@pytest.mark.parametrize("who, dtype, tol", [
    ("this device", torch.float64, 1e-9),
    *[(who, *case) for who in ("this device", "a loop", "batches") for case in [
        (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)]],
    pytest.param("native", torch.float32, 1e-5, marks=about_the_cpu("it stands in for a card"))])
def test_experts_grouped_mm_matches_loop(monkeypatch, who, dtype, tol):
    """NaN in the rows past the last offset, which spare slots of a batch read; an expert without
    rows; an expanded gradient. Autocast changes nothing."""
    sizes = [3, 4, 0, *[3, 4] * 8]
    offsets = torch.tensor(sizes).cumsum(0).int()
    alone, parts = grouped._plan_batches(tuple(offsets.tolist()))
    assert [alone, len(sum(parts, []))] == [[], 2]           # some slots are spare
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


@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("options", [
    dict(),
    dict(add_bias_linear=True, apply_probs_on="input", topk=1, pre_softmax=True),
    dict(add_bias_linear=True, activation="relu2"),
    dict(add_bias_linear=True, activation_fp8_input_store=True)])
def test_experts_formulas_for_cuda_equal_the_ops(monkeypatch, options):
    """The branch that runs torch's own grouped product, on the CPU, where it runs eagerly."""
    layer = random_layer(small_config(init_std=0.5, **options))
    args = fp32_leaf(20, 8), torch.arange(20) % 4 == 0                # rows past the last offset
    want = outcome(layer, args)
    with_native_products(monkeypatch)
    close(outcome(layer, args), want, 1e-5)


@about_the_cpu("it stands in for a card")
def test_experts_formulas_for_cuda_keep_as_little(monkeypatch, no_cpp_compiler):
    with_native_products(monkeypatch)
    check_keeps_little("inductor")


@about_the_cpu("for a card only the biases differ")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {}, dict(activation="relu2"), dict(latent_size=8), dict(latent_size=4),
    dict(shared_expert_intermediate_size=12, add_bias_linear=True)])
def test_experts_flops_are_counted(options, dtype):
    """By torch.utils.flop_counter: forward and backward, as many as dense products on the N rows
    of the assignments, and the router's. In bf16 the products may be torch's, which has no formula,
    and the gradient of fc1's bias a product with eight columns of ones."""
    from torch.utils.flop_counter import FlopCounterMode
    T, H, F_, E, K = 10, 16, 8, 4, 2
    layer = MoELayer(MoEConfig(H, F_, E, topk=K, params_dtype=dtype, **options))
    x = fp32_leaf(T, H).to(dtype)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    parts, width = layer.config.parts, options.get("latent_size", H)
    Fs = options.get("shared_expert_intermediate_size", 0)
    want = 2 * T * H * E + 2 * T * K * (parts + 1) * F_ * width + 2 * T * 3 * Fs * H
    if width != H:
        want += 2 * 2 * T * H * width
    if options.get("add_bias_linear"):
        want += 2 * T * E * H                            # probs [T, E] · fc2_bias
    assert forward.get_total_flops() == want
    sums = 0
    if options.get("add_bias_linear") and grouped._native(layer.experts.fc2):
        sums = 2 * T * K * layer.config.parts * F_ * 8
    assert backward.get_total_flops() == 2 * want + sums


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
        relu2=kernels.relu2)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a CUDA device."""
    device = torch.device("cuda", 0)


@about_the_cpu("it stands in for a card")
def test_experts_native_product_where_it_fits(monkeypatch):
    """torch's grouped product: in bf16, on two generations of cards, never on ROCm, on a CPU that
    multiplies in bf16, with fewer than 1,024 experts, in multiples of 16 bytes. What reads the
    device runs inside a graph."""
    card = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", None)

    def native(weights):
        return grouped._native(rows.as_subclass(OnCuda), weights.as_subclass(OnCuda))
    rows = torch.empty(10, 16).bfloat16()
    weights = torch.empty(4, 16, 24).bfloat16()
    pair = torch.empty(4 * 16 * 24 + 8).bfloat16()
    many = torch.empty(1024, 8, 8).bfloat16()
    offsets = torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    for slow in (True, False):                               # on a CPU
        monkeypatch.setattr(grouped, "_slow_on_cpu", lambda dtype: slow)
        assert grouped.where_read(offsets, 10, rows, weights).native is not slow
    for operand in (weights, weights.transpose(1, 2), pair[8:].view(4, 16, 24), many[1:]):
        assert native(operand), (operand.shape, operand.stride())
    for operand in (
            many,
            weights.float(),
            rows[:, :12].contiguous(),
            weights[:, :, :12].contiguous(),
            weights.repeat(1, 1, 2)[:, :, ::2],                             # strided
            torch.empty(4, 16, 20).bfloat16()[:, :, :16],                   # 20 apart
            weights[:1].expand(4, 16, 24),
            pair[1:1 - 8].view(4, 16, 24)):                                 # its pointer
        assert not native(operand), (operand.shape, operand.stride(), operand.dtype)
    for card in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)):
        assert native(weights) is (card[0] in (9, 10)), card
        assert grouped._cuda_generation(torch.device("cuda")) == card[0]
    card = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not native(weights)
    function = compiled(lambda x: x + grouped._has_native_product(x.device))
    same(function(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("reads, options", [
    (6, dict()), (7, dict(add_bias_linear=True)), (6, dict(latent_size=7))])
def test_experts_read_the_offsets_on_the_host_once(monkeypatch, reads, options):
    """On a card without torch's own product: one copy for all products of forward and backward.
    The card is the CPU; its offsets may not be read but in the copy."""
    copies = []
    read = []
    alone = grouped._alone
    _read_in_batches = grouped._read_in_batches

    def in_batches(*args):
        offsets, index = _read_in_batches(*args)
        copies.append(offsets)
        return offsets, index
    layer = small_layer(init_std=0.5, **options)
    x = fp32_leaf(20, 8)
    want = outcome(layer, x)
    on_a_card_without_products(monkeypatch)
    monkeypatch.setattr(grouped, "_read_in_batches", in_batches)
    monkeypatch.setattr(grouped, "_alone", lambda offsets, *args: (
        read.append(offsets.data_ptr()) or alone(offsets, *args)))
    monkeypatch.setattr(F, "grouped_mm", None)
    close(outcome(layer, x), want, 1e-5)
    assert read == [copies[0].data_ptr()] * reads and len(copies) == 1
    offsets = torch.tensor([3, 9, 20], dtype=torch.int32)
    grads(grouped_mm(x, fp32_leaf(3, 8, 4), offsets), [x])
    assert len(copies) == 2


@about_the_cpu("it stands in for a card")
def test_experts_without_rows_have_zero_gradients_on_a_card(monkeypatch):
    """Torch's product may leave them uninitialised (pytorch #172439). The card is a stand-in."""
    a, b = torch.randn(9, 6), torch.randn(9, 4)
    offsets = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    read = grouped.Read(offsets)
    want = grouped.weight_grad(a, b, read)
    assert [bool(grad.any()) for grad in want] == [False, True, False, True, False]

    def garbage(rows_t, rows, offs):
        grad = grouped._rows_times_rows(rows_t.t(), None, rows, None, offs, None)
        grad[[0, 2, 4]] = torch.tensor([NAN, INF, -7.0])[:, None, None]
        return grad
    monkeypatch.setattr(F, "grouped_mm", garbage)
    read = grouped.Read(offsets, native=True)
    monkeypatch.setattr(grouped, "_cuda_generation", lambda device: 10)
    same(grouped.weight_grad(a, b, read), want)


def test_experts_without_rows_are_not_multiplied(monkeypatch):
    """Of the loop on a CPU."""
    multiplied = []
    product = grouped._mm

    def counted(rows, *args, **kwargs):
        multiplied.append(len(rows))
        product(rows, *args, **kwargs)
    monkeypatch.setattr(grouped, "_mm", counted)
    offsets = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    grouped._rows_times_weights(
        torch.randn(9, 6), None, torch.randn(5, 6, 4), torch.randn(5, 4), offsets, None)
    assert multiplied == [4, 5]


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
@pytest.mark.parametrize("who, backend", [
    ("this device", None), ("batches", "eager"), ("batches", "aot_eager")])
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
    maps = []
    with Watch(lambda name, args, out: maps.append(name == "scatter_columns")):
        ours(x, probs, indices, *weights)
    assert sum(maps) == 1                                # probs [T, E] · fc2_bias


def test_experts_batches_hold_each_expert_and_row_once():
    """Many loads: few slots, few batches, no copy of weights where all experts are of one size."""
    for T, E, K in [(2048, 256, 8), (300, 64, 8), (64, 256, 8), (50, 13, 2), (5, 7, 1), (0, 2, 1)]:
        for load, indices in loads(T, E, K).items():
            counts = torch.bincount(indices.flatten(), minlength=E + 1)[:E]
            offsets = counts.cumsum(0).int()
            alone, parts = grouped._plan_batches(tuple(offsets.tolist()))
            batches = sum(parts, [])
            on_host, index = grouped._read_in_batches(offsets, T * K)
            assert on_host.tolist() == offsets.tolist()
            ids, row = index[:E].tolist(), index[E:].tolist()
            assert index.dtype == torch.int32 and len(row) == T * K + 3 * T * K // 10
            with about(T, E, K, load):
                batched = [e for experts, _ in batches for e in experts]
                assert sorted(alone + batched) == counts.nonzero().flatten().tolist()
                assert ids[:len(batched)] == batched
                slot = 0
                for experts, size in batches:
                    assert experts == sorted(experts)
                    for e in experts:
                        own = list(range(int(offsets[e] - counts[e]), int(offsets[e])))
                        assert row[slot:slot + size] == own + [T * K] * (size - len(own))
                        slot += size
                assert set(row[slot:]) <= {T * K}
                assert slot <= 1.3 * counts.sum()
                quarter = max(slot / 4, 4 * len(batched))
                for part in parts:                       # without its last expert
                    widths = [len(experts) * size for experts, size in part]
                    assert sum(widths) - part[-1][1] < quarter
                assert len(parts) <= 4
                for experts, _ in batches:               # a third, unless no weights are copied
                    apart = experts[-1] - experts[0] >= len(experts)
                    assert not apart or len(experts) <= math.ceil(len(batched) / 3)
                    assert not (apart and load == "even" and T * K >= E)
                if load == "even" and T * K >= E:
                    assert len(batches) <= 4
                assert len(alone) + len(batches) <= (16 if load != "random" else 14), batches


def test_experts_batches_keep_few_bytes(monkeypatch):
    """Beside the input, fc1's output and the activation: five bytes and a little for each row."""
    on_a_card_without_products(monkeypatch)
    T, H, F_, E, K = 64, 48, 40, 32, 4
    plan = plan_permutation(random_indices(T, E, K), E)
    x, probs = torch.randn(T, H), torch.rand(T, K)
    fc1, fc2 = fp32_leaf(E, 2, F_, H), torch.randn(E, H, F_)
    kept = saved_bytes(lambda: expert_mlp(x * 1, probs, plan, fc1, fc2), exclude=[
        fc1, fc2, probs, plan.order, plan.inverse, plan.offsets])
    N = T * K
    rows = (N + 1) * 2 * F_ + N * F_
    assert kept == 4 * (T * H + rows) + 4 * (E + N + 3 * N // 10) + 4 * E


# ---- Config and errors ----

def test_config_errors():
    """Each of the calls in a row is refused with the row's phrase."""
    def config(**fields):
        sizes = dict(hidden_size=8, ffn_hidden_size=8, num_experts=8, topk=2)
        return MoEConfig(**{**sizes, **fields})

    quantile = functools.partial(config, bias_update="quantile", enable_expert_bias=True)
    sinkhorn = functools.partial(config, load_balancing_type="sinkhorn")
    situ = functools.partial(config, activation="situ")
    groups = functools.partial(config, num_groups=4, group_topk=2)
    losses = functools.partial(config, load_balancing_type=("aux_loss",))
    check_error_table("""
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
        config(activation="silu") => swiglu, geglu, quick_geglu, situ, relu2, gelu
        config(score_function="tanh") => softmax, sigmoid, sqrtsoftplus
        config(apply_probs_on="x") => needs one of activation, input
        config(apply_probs_on="input") => "input" is for topk = 1
        config(token_drop_policy="random", capacity_factor=1.0) => one of probs, position
        config(bias_update="median") => bias_update = 'median': needs one of sign, quantile
        config(pre_softmax=True, score_function="sigmoid") => pre_softmax = True
        config(router_dtype=torch.int64); config(params_dtype="bf16") => a floating torch.dtype
        config(probs_dtype=torch.int64) => needs a floating torch.dtype, or None
        config(num_groups=4); config(group_topk=4); config(group_score_topk=1) => has no effect
        config(token_drop_policy="position"); config(pad_to_capacity=True) => has no effect
        config(shared_expert_gate=True); config(shared_expert_overlap=True) => has no effect
        config(latent_norm=True); quantile(enable_expert_bias=False) => has no effect
        groups(num_groups=3) => num_groups = 3 does not divide
        groups(group_topk=1, topk=3) => cannot hold topk = 3
        groups(group_topk=4) => group_score_topk is 0
        groups(group_score_topk=3) => group_score_topk is 3
        config(activation="relu2", glu_linear_offset=1.0) => 'relu2', glu_linear_offset = 1.0
        config(activation="relu2", activation_clamp_value=7.0) => activation_clamp_value = 7.0
        situ(activation_clamp_value=1.0); config(glu_alpha=1.0) => has no such constant
        config(situ_beta=2.0); config(situ_linear_beta=2.0) => has no such constant
        situ(situ_beta=0.0); config(latent_size=4, latent_norm_eps=0.0) => needs a positive number
        situ(situ_linear_beta=-1.0) => a positive number, or None
        config(activation_clamp_value=0.0) => a positive number, or
        config(activation_clamp_value="7") => a positive number, or
        config(capacity_factor=0.0); config(capacity_factor=-1) => a positive number below 2 ** 31
        config(z_loss_coeff=-1.0); config(input_jitter_eps=-0.1) => 0 or more, or None
        config(output_init_std=-1.0) => 0 or more, or None
        config(capacity_factor=INF); config(capacity_factor=1e308) => a positive number below 2 **
        config(capacity_factor="2"); config(capacity_factor=NAN) => a positive number below 2 ** 31
        config(init_std=INF); config(norm_eps="0"); config(norm_eps=None) => needs a finite number
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
        """, **locals())


def test_config_takes_an_activation():
    """A function of one part or two, one of one's own too, its constants bound by a partial. What
    cannot work is refused when the config is made."""
    named = dict(activation="quick_geglu", glu_alpha=1.3, glu_linear_offset=1.0)
    made = functools.partial(kernels.quick_geglu, alpha=1.3, linear_offset=1.0)
    layer = exact_layer(activation=made)
    same_layer = twin(layer, **named)
    x = leaf(5, 2, 6)
    agree(layer, same_layer, x, tol=0)
    for dynamic in (None, True):
        agree(compiled(layer, dynamic=dynamic), same_layer, x)
    assert dataclasses.replace(layer.config) == layer.config

    def bilinear(gate, up, scale=0.5):
        return gate * up * scale

    def cubed(y):
        return y ** 3

    shared = dict(shared_expert_overlap=True, shared_expert_gate=True)
    layer = exact_layer(activation=bilinear, **shared)
    want = twin(layer, activation="quick_geglu", glu_alpha=0.0)          # its sigmoid is 1/2
    agree(layer, want, x)
    agree(compiled(layer), want, x)
    layer = exact_layer(activation=cubed, **shared)
    assert layer.config.parts == 1 and layer.experts.fc1.shape[1] == 1
    torch.autograd.gradcheck(layer, x)
    agree(compiled(layer), layer, x)
    check_error_table("""
        small_config(activation=torch.nn.functional.silu(torch.ones(1))) => needs one of swiglu, ge
        small_config(activation=lambda: 1); small_config(activation=lambda a, b, c: a) => needs one
        small_config(activation=torch.add) => does not say which parameters it has; needs a function
        small_config(activation=torch.nn.SiLU()) => takes any number of arguments; needs a function
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
        assert made["activation_function"].keywords == dict(beta=1.5, linear_beta=0.5)
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
            set_aux_loss_scale(scale)                # between forward and backward
            total = (want * upstream).sum() + scale * loss
            want_grads = torch.autograd.grad(
                total, inputs, allow_unused=True, materialize_grads=True)
            close(grads(got, inputs, upstream), want_grads, 1e-8)
            set_aux_loss_scale(1.0)
            if config.capacity_factor is not None:           # in the latest forward
                assert load_balancing_metrics(router)["dropped"] == oracle.dropped
        if config.enable_expert_bias:
            assert router.local_tokens_per_expert.tolist() == oracle.counts
        if "global_aux_loss" in config.balancing:
            assert router.global_tokens_per_expert.tolist() == oracle.sums
            assert router.ga_steps == oracle.steps


def random_bounds(T: int, rng: random.Random) -> Tensor:
    """cu_seqlens of a pack of T tokens. Some sequences have no tokens; the last ones are such."""
    inner = sorted(rng.choices(range(T + 1), k=rng.randrange(5)))
    dtype = rng.choice([torch.int32, torch.int64])
    return torch.tensor([0, *inner, *[T] * rng.randint(1, 3)], dtype=dtype)


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
    want = layer(x[~mask])                           # the same tokens with no padding at all
    close([got[~mask], *grads(got, weights)], [want, *grads(want, weights)], 1e-6)


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


@pytest.mark.parametrize("way", slow_but(["plain"], ["plain", "compiled"]))
def test_layer_router_stays_fp32(way):
    """In a bf16 model and under autocast, also compiled (megablocks #91, prime-rl #2952)."""
    bf16 = torch.bfloat16
    for dtype, weight_dtype in ((bf16, bf16), (bf16, torch.float32), (torch.float32,) * 2):
        layer = small_layer(params_dtype=dtype, init_std=0.3)
        layer.router.to(weight_dtype)
        function = WAYS[way](layer)
        x = leaf(50, 8, dtype=dtype)
        want = layer(x)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
            logits = layer.router.gating(x)
            y = function(x)
        assert logits.dtype == torch.float32 and y.dtype == dtype
        close(logits, x.double() @ layer.router.weight.double().t(), 1e-5)
        inputs = [x, *layer.parameters()]
        assert [g.dtype for g in grads(y, inputs)] == [p.dtype for p in inputs]
        close(y, want, 0.05)
    assert not torch.equal(y, want)                  # under autocast the experts ran in bf16


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
        set_aux_loss_scale(scale)
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


def test_layer_dtype_casts_keep_the_expert_bias():
    """fp32 through casts and round trips: steps of 1e-3 vanish in bf16 (Megatron-LM #1482)."""
    layer = small_layer(enable_expert_bias=True)
    want = torch.tensor([1.001, 1.002, -0.5003, 0.0, 0.1, 0.2])
    layer.router.expert_bias.copy_(want)
    for cast in (MoELayer.half, MoELayer.double, lambda layer: layer.to(torch.bfloat16),
                 MoELayer.bfloat16, copy.deepcopy):
        layer = cast(layer)
        same(layer.router.expert_bias, want)
    assert layer.router.weight.dtype == torch.bfloat16
    same(twin(layer).bfloat16().router.expert_bias, want)


def test_layer_errors():
    check_error_table("""
        layer(torch.randn(6, 9)) => input has shape [6, 9]
        layer(x[0]); overlap(x[0]) => input has shape [8]; needs [S, B, 8] or [T, 8]
        layer(x[0, 0]); layer(x[None, None]) => input has shape [
        overlap(x.bfloat16()) => TypeError: hidden_states is torch.bfloat16, and the shared expert
        layer(x.bfloat16()) => TypeError: tokens is torch.bfloat16
        layer(x, torch.zeros(5).bool()) => padding_mask is [5] torch.bool
        layer(x, torch.zeros(6)) => padding_mask is [6] torch.float32
        layer(x, None, zeros.long()); layer(x, None, zeros[:, :2]) => topk_indices is [6,
        layer(x, None, torch.zeros(6, 2).bool()) => [6, 2] torch.bool; needs [6, 2] or [6, 2] of an
        load_balancing_metrics(torch.nn.Linear(2, 2)) => (Linear) has no Router
        """, layer=small_layer(), x=torch.randn(6, 8), zeros=torch.zeros(6, 3),
        overlap=small_layer(
            shared_expert_intermediate_size=4, shared_expert_overlap=True))


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
    close(mine(x.flatten(0, 1)), layer(x.flatten(0, 1)))     # [T, H] is one sequence


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
    agree(layer, right, leaf(21, 6))
    plain = exact_layer(batch_first=None)
    agree(plain, twin(plain, batch_first=False), x, tol=0)
    assert "batch_first = 1: needs True or False, or None" in error(small_config, batch_first=1)


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


def test_layer_prune_and_grow():
    """Pruned, it is the old layer with an expert that nobody chooses; then it trains on, with its
    moments. Grown, the second expert is a copy of the first."""
    config = exact_config(
        num_experts=5, topk=2, router_bias=True, enable_expert_bias=True, score_function="sigmoid",
        add_bias_linear=True, shared_expert_gate=True)
    layer = random_layer(config)
    optimizer = torch.optim.AdamW([*layer.parameters(), torch.nn.Parameter(torch.ones(2))], lr=0.1)
    x = leaf(9, 6)

    def step(model):
        model(x).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    step(layer)
    keep = [4, 0, 3, 2]
    before = {name: (p.detach().clone(), optimizer.state[p]["exp_avg"].clone())
              for name, p in layer.named_parameters()}
    with torch.no_grad():
        layer.router.expert_bias[1] = -10                     # excluded
        want = layer(x)
    pruned = moe.select_experts(layer, keep, optimizer)
    close(pruned(x), want)
    close(compiled(pruned)(x), want)
    assert pruned.router.local_tokens_per_expert.shape == (4,) and pruned.config.num_experts == 4
    assert layer.config.num_experts == 5 and len(layer.experts.fc1) == 5
    for name, p in pruned.named_parameters():
        rows = keep if name.startswith(("router.", "experts.")) else slice(None)
        same([p, optimizer.state[p]["exp_avg"]], [before[name][0][rows], before[name][1][rows]])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {*map(id, pruned.parameters())} < {*map(id, held)} and len(optimizer.state) == 9
    step(pruned)
    finish_step(pruned)
    assert not torch.equal(pruned.experts.fc1, before["experts.fc1"][0][keep])

    grown = moe.select_experts(layer, [*range(5), 0])
    same(grown.experts.fc1[5], grown.experts.fc1[0])
    same(grown.router.weight[:5], layer.router.weight)
    assert grown(x).isfinite().all()
    layer.pg_collection = ProcessGroups(ep=TwoRanks(), tp_dp_cp=TwoRanks())
    copies = copy.copy(layer)
    copies.pg_collection = ProcessGroups(tp_dp_cp=TwoRanks())
    check_error_table("""
        select(grown, [0, 6]) => experts is [0, 6]; needs numbers of 0 to 5
        select(grown, [-1, 2]) => experts is [-1, 2]
        select(grown, [3]) => topk = 2, num_experts = 1
        select(layer, [0, 1]); select(copies, [0, 1]) => is on several ranks; needs one process
        """, select=moe.select_experts, grown=grown, layer=layer, copies=copies)


def test_layer_selects_what_a_router_declares():
    """A tensor of a router of one's own goes along if its class names it in `per_expert`; else it
    stays, even if its length happens to be E. A parametrized parameter is taken by its parts."""
    class Mine(TopKRouter):
        per_expert = (*TopKRouter.per_expert, "load")

        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("seen", torch.arange(2.0))              # assignments, tokens
            self.register_buffer("load", torch.arange(1.0, 1 + config.num_experts))
            self.scale = torch.nn.Linear(2, config.num_experts)

    layer = small_layer(num_experts=2, topk=1, pre_softmax=True)
    layer.router = Mine(layer.config)
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "fc2", torch.nn.Tanh())
    raw = layer.experts.parametrizations.fc2.original.data.uniform_(0.1, 0.9)
    new = moe.select_experts(layer, [1, 0, 1])
    same(new.router.seen, layer.router.seen)
    same(new.router.load, torch.tensor([2.0, 1, 2]))
    same(new.router.scale.weight, layer.router.scale.weight)
    same(new.router.weight, layer.router.weight[[1, 0, 1]])
    same(new.experts.parametrizations.fc2.original, raw[[1, 0, 1]])
    same(new.experts.fc2, raw[[1, 0, 1]].tanh())


def test_layer_selected_experts_train_on():
    """In another order, with moments of whatever shape, they take the step that they would have
    taken. Of a compiled layer too: the new one is not compiled. Moments without an axis of experts
    are refused, and nothing is changed."""
    config = exact_config(
        num_experts=5, topk=2, router_bias=True, add_bias_linear=True, shared_expert_gate=True)
    order = [4, 0, 3, 1, 2]
    x = leaf(9, 6)
    kinds = [torch.optim.Adafactor, functools.partial(torch.optim.SGD, momentum=0.9)]
    for kind in kinds if DEVICE == "cpu" else kinds[1:]:      # 2.13's Adafactor refuses a card
        layer = random_layer(config)
        optimizer = kind(layer.parameters(), lr=0.1)

        def step(model, optimizer):
            model(x).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        step(layer, optimizer)
        old, old_optimizer = copy.deepcopy((layer, optimizer))
        new = moe.select_experts(compiled(layer), order, optimizer)
        assert type(new) is MoELayer
        step(old, old_optimizer), step(new, optimizer)
        for (name, a), b in zip(new.named_parameters(), old.parameters(), strict=True):
            close(a, b[order] if name.startswith(("router.", "experts.")) else b, 1e-9)

    state = optimizer.state[new.experts.fc1]
    state["row"] = torch.ones(5, 2, 4)
    before = copy.copy(state)
    text = error(moe.select_experts, new, [0, 1], optimizer)
    assert text.startswith("ValueError: optimizer keeps row of shape [5, 2, 4] for experts.fc1; ")
    assert optimizer.state[new.experts.fc1] == before
    text = error(moe.select_experts, torch.nn.Linear(2, 2), [0])
    assert text == "TypeError: layer is a Linear; needs a MoELayer"


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


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, WAYS))
def test_router_packed_sequences_in_a_graph_or_checkpoint(way):
    """Another number of sequences is no recompile."""
    layer = exact_layer(
        load_balancing_type="seq_aux_loss", aux_loss_coeff=0.2)
    function = run_as(way, layer)
    x = leaf(1, 19, 6)
    mask = torch.rand(1, 19) < 0.3
    for pack in ([0, 4, 4, 11, 18, 19, 19, 19], [0, 19], [0, 0, 7, 19]):
        args = x, mask, None, torch.tensor(pack, dtype=torch.int32)
        agree(function, layer, args, args, tol=1e-8)
    if way == "compiled around non-reentrant":
        assert graphs_made() == 2


def test_router_packed_sequences_through_inductor():
    """One dynamic graph for any T and any number of sequences."""
    router = TopKRouter(small_config(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.2))
    function = compiled(router.route, "inductor", dynamic=True)
    for T, pack in ((40, [0, 3, 40]), (41, [0, 9, 9, 40, 41]), (2, [0, 2]), (90, range(91))):
        args = fp32_leaf(T, 8), None, None, torch.tensor([*pack])
        got, want = [[y, *grads(y, [args[0], router.weight])] for y in (
            function(*args)[0], router.route(*args)[0])]
        close(got, want, 1e-5)
    assert graphs_made() == 1


def set_precision(how: str) -> None:
    """Lets products of fp32 operands be in bf16 or TF32, where the device has instructions."""
    if how.startswith("torch.backends"):
        torch.backends.fp32_precision = how.split()[-1]
    else:
        torch.set_float32_matmul_precision(how)


class TwoRanks:
    """A group of two ranks, for what only asks for its size."""
    def size(self):
        return 2

    def rank(self):
        return 0


def test_router_over_two_ranks_without_communication():
    """What tp refuses; and a loss without valid_token_count counts the rows of both ranks."""
    def over_tp(**fields):
        return TopKRouter(small_config(**fields), ProcessGroups(tp=TwoRanks()))
    check_error_table("""
        over_tp() => is False and batch_first is False; needs sequence_parallel=True and batch_firs
        over_tp(sequence_parallel=True, batch_first=True) => is True and batch_first is True; needs
        """, over_tp=over_tp)
    over_tp(sequence_parallel=True)

    router = TopKRouter(
        small_config(calculate_per_token_loss=True), ProcessGroups(tp_cp=TwoRanks()))
    x, loss = torch.ones(5, 3, requires_grad=True), torch.tensor(0.25, requires_grad=True)
    router.attach_and_log_load_balancing_loss(
        x, 0.5, aux_loss=loss, aux_loss_name="z_loss", reduce_group=None).sum().backward()
    assert loss.grad == 10 and router.counts.z_loss == 0.5


@pytest.mark.parametrize("how", ["medium", "high", "torch.backends bf16", "torch.backends tf32"])
def test_router_fp32_products_are_in_fp32(how):
    """prime-rl #2952: whatever the user sets, these are in fp32, eager and compiled: logits and
    their gradients, P · fc2_bias, gradients of the experts' biases, sinkhorn. The setting stays as
    it is, also where it is inherited."""
    matmuls = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    seen = {}

    def note(name, args, out):
        for op in watch.inside:
            if name in ("matmul", "mm", "bmm", "_grouped_mm"):
                seen.setdefault(op, set()).update(matmul.fp32_precision for matmul in matmuls)
    try:
        set_precision("torch.backends none")
        set_precision("highest")
        for matmul in matmuls:
            matmul.fp32_precision = "none"
        layer = random_layer(small_config(
            hidden_size=64, num_experts=16, add_bias_linear=True, router_bias=True, init_std=1.0))
        x = fp32_leaf(512, 64)
        router = layer.router
        logits = x.double() @ router.weight.double().t() + router.bias.double()
        upstream = torch.randn(512, 16)
        leaves = [x, router.weight, router.bias]
        want = [logits, *grads(logits, leaves, upstream.double())]

        set_precision(how)
        before = [matmul.fp32_precision for matmul in matmuls]
        for gating in (router.gating, compiled(router.gating)):
            got = gating(x)
            for a, b in zip([got, *grads(got, leaves, upstream)], want):
                assert (a - b).norm() <= 1e-6 * b.norm()
        with Watch(note, inside=True) as watch:
            sinkhorn(torch.randn(8, 4))
            layer(x).sum().backward()
        for op in ("product_in", "block_sums", "sinkhorn"):
            assert seen[op] <= {"ieee", "none"}, op          # none: nothing is set, so fp32
        assert [matmul.fp32_precision for matmul in matmuls] == before
        if how.startswith("torch.backends"):
            torch.backends.fp32_precision = "ieee"
            assert {matmul.fp32_precision for matmul in matmuls} == {"ieee"}
    finally:
        set_precision("torch.backends none")
        set_precision("highest")


def test_router_writes_no_global_setting_without_need(monkeypatch):
    """The switches of all threads are written where one says TF32 or bf16, and then set back."""
    class Setting:
        def __init__(self, precision):
            vars(self).update(fp32_precision=precision, written=[])

        def __setattr__(self, name, value):
            vars(self)[name] = value
            self.written.append(value)
    x, weight = torch.randn(5, 8), torch.randn(4, 8)
    for precision, written in (("none", []), ("ieee", []), ("tf32", ["ieee", "none", "tf32"])):
        settings = [Setting(precision), Setting("ieee")]
        monkeypatch.setattr(compat, "_PRECISIONS", settings)
        kernels.router_gating_linear(x, weight, None, router_dtype=torch.float32)
        assert settings[0].written == written and settings[0].fp32_precision == precision
        assert settings[1].written == []


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


def test_router_counts_beside_random_numbers_of_a_checkpoint_in_a_graph():
    """One forward at a time; with two in flight torch takes the counts for inputs that its second
    backward needs unchanged, which is an error."""
    layer = small_layer(**BIASED, input_jitter_eps=0.1)
    function = WAYS["compiled around non-reentrant"](layer)
    for _ in range(2):
        function(fp32_leaf(7, 8)).sum().backward()
    assert layer.router.local_tokens_per_expert.sum() == 28
    a, b = function(fp32_leaf(7, 8)), function(fp32_leaf(7, 8))
    a.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        b.sum().backward()


def test_router_counts_once_under_compiled_autograd():
    """For a layer in eager mode. A compiled one is torch's IndexError there: its backward does not
    get what an autograd function has put on ctx."""
    from torch._dynamo import compiled_autograd

    def counts_of_a_step(way):
        layer = small_layer(**BIASED)
        function = WAYS[way](layer)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            function(fp32_leaf(7, 8)).sum().backward()
        return layer.router.local_tokens_per_expert.sum().item()
    for way in ("plain", "reentrant", "non-reentrant", "hooks in non-reentrant"):
        with about(way):
            assert counts_of_a_step(way) == 14
    with pytest.raises(IndexError, match="list index out of range"):
        counts_of_a_step("compiled")


def test_router_counts_in_a_checkpoint_of_ones_own():
    """Its second pass is inside its backward, beside a hook."""
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = hooked(ctx.layer)(x)
            return torch.autograd.grad(y, x, grad)[0], None
    layer = small_layer(**BIASED)
    y = Again.apply(fp32_leaf(7, 8), layer).sum()
    assert not layer.router.local_tokens_per_expert.any()    # the first pass had no grad
    y.backward()
    assert layer.router.local_tokens_per_expert.sum() == 14


@pytest.mark.parametrize("way", [
    "plain", "non-reentrant", "compiled", "inductor around non-reentrant"])
def test_router_frozen_counts_through_the_output(way):
    """Where the probs need no gradient the layer counts in the backward of its output, if that has
    one; a router alone counts nothing, and its forward leaves nothing to the layer's next one."""
    layer = small_layer(**QUANTILE, load_balancing_type="aux_loss", aux_loss_coeff=0.5)
    layer.router.requires_grad_(False)
    router = layer.router
    function = WAYS[way](layer)
    router(torch.randn(9, 8))
    for _ in range(2):
        function(torch.randn(7, 8)).sum().backward()
    assert router.local_tokens_per_expert.sum() == 28
    assert (router.bias_histogram.sum(1) == 14).all()
    metrics = load_balancing_metrics(layer)
    assert metrics["tokens_per_expert"].sum() == 14 and metrics["load_balancing_loss"] > 0
    layer.requires_grad_(False)
    assert not function(torch.randn(7, 8)).requires_grad
    layer.experts.requires_grad_()
    function(torch.randn(5, 8)).sum().backward()
    assert router.local_tokens_per_expert.sum() == 38


@pytest.mark.parametrize("way", slow_but(QUICK_WAYS, [
    "reentrant", "non-reentrant", "compiled", "compiled inside reentrant", "nested re in re",
    "hooks in non-reentrant", "offload in non-reentrant",
    "compiled around non-reentrant", "inductor around non-reentrant"]))
def test_router_global_loss_under_checkpoints(way):
    """The running sums grow once, in the backward. Each forward's gradient uses the sums of its own
    first pass, over three accumulated forwards. Two are in flight where that is possible: a
    reentrant checkpoint, and one inside a graph, takes those of its backward."""
    in_turn = way not in ("non-reentrant", "compiled") and not way.endswith("in non-reentrant")
    layer = small_layer(load_balancing_type="global_aux_loss", aux_loss_coeff=0.5)
    router = layer.router
    a, b, c = [fp32_leaf(8, 8) for _ in range(3)]
    results = []
    for name in ("plain", way):
        function = WAYS[name](layer)
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

        router.reset_global_aux_loss_tracker()
        assert router.ga_steps == 0 and router.global_tokens_per_expert.sum() == 0
        layer.zero_grad()

        if way == "reentrant" or "around" in way:
            pending = function(a) if name == way else None
            function(b).sum().backward()
            (function(a) if pending is None else pending).sum().backward()
            results[-1].append(router.weight.grad.clone())
            router.reset_global_aux_loss_tracker()
            layer.zero_grad()
    close(*results, 1e-5)


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
    """In the layer, and through route: each is the router's call."""
    layer = small_layer()
    calls = []
    layer.router.register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(4, 8)
    layer(x), layer.router.route(x), layer.router(x)
    assert len(calls) == 3


def test_router_keeps_no_copy_of_a_transposed_input():
    """[B, S, H] that is handed on as [S, B, H]: kept as it is, though the product needs a copy."""
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


def test_router_token_counts_ignore_the_default_dtype():
    """By calculate_per_token_loss a loss is multiplied by 301 tokens, which bf16 rounds to 302."""
    layer = small_layer(
        load_balancing_type=("seq_aux_loss", "global_aux_loss"), aux_loss_coeff=(0.1, 0.2),
        calculate_per_token_loss=True)
    x = torch.randn(301, 1, 8)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        layer.router.reset_global_aux_loss_tracker()
        try:
            torch.set_default_dtype(dtype)
            results.append(grads(layer(x).sum(), [layer.router.weight]))
        finally:
            torch.set_default_dtype(torch.float32)
    same(*results)


def test_router_loss_scale_whatever_is_on_at_import(monkeypatch):
    """What is on where moe.py is imported does not reach the scale: fp32, on the CPU, outside of
    inference mode. Nor does the graph of what it is set to."""
    lse = 1 + math.log(4)                    # the slope of 0.1·lse² is 0.1·2·lse
    want = torch.full((3,), 2.0 ** 18 * 0.1 * 2 * lse / 3)
    package = f"{__package__}." if __package__ else ""
    for dtype, on in [(torch.float16, contextlib.nullcontext()), (torch.float32, torch.no_grad()),
                      (torch.float32, torch.inference_mode()),
                      (torch.float32, torch.device("meta"))]:
        torch.set_default_dtype(dtype)
        try:
            with on:
                name = type(on).__name__
                for source in LAYER:                         # the later ones import it
                    file = Path(source.__file__).stem
                    module = imported_as(f"{package}{file}_{name}", source, monkeypatch)
                    monkeypatch.setitem(sys.modules, f"{package}{file}", module)
                    if package:
                        monkeypatch.setattr(sys.modules[__package__], file, module)
                scale = sys.modules[f"{package}router"]._loss_scale(torch.device("cpu"))
        finally:
            torch.set_default_dtype(torch.float32)
        assert scale.dtype == torch.float32 and scale.device.type == "cpu"
        module.set_aux_loss_scale(torch.tensor(2.0 ** 17, requires_grad=True) * 2)
        assert scale == 2 ** 18 and not scale.is_inference() and not scale.requires_grad
        router = module.TopKRouter(module.MoEConfig(8, 4, 4, 2, z_loss_coeff=0.1))
        logits = torch.ones(3, 4, requires_grad=True)
        gradient = grads(router.routing(logits)[0].mul(0).sum(), [logits])[0]
        close(gradient.sum(1), want, 1e-5)
    assert "needs a float or a 0-d tensor" in error(set_aux_loss_scale, torch.ones(2))


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_router_warns_of_fp16_without_a_loss_scale(monkeypatch, way):
    """A GradScaler cannot be seen, but autocast to fp16 can. No scale is needed without balance
    losses, in bf16, or where one was set."""
    monkeypatch.setattr(router_file, "_is_scale_set", False)
    balanced = small_layer(load_balancing_type="aux_loss", aux_loss_coeff=0.1)

    def warnings_of(layer, dtype):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, torch.autocast(DEVICE, dtype):
            warnings.simplefilter("always")
            WAYS[way](layer)(fp32_leaf(5, 8)).sum().backward()
        return sum("set_aux_loss_scale was never called" in str(w.message) for w in caught)
    assert warnings_of(balanced, torch.float16) == 1
    assert warnings_of(balanced, torch.bfloat16) == 0
    assert warnings_of(small_layer(), torch.float16) == 0
    set_aux_loss_scale(2.0)
    assert warnings_of(balanced, torch.float16) == 0


def test_router_counts_where_a_backward_reaches_the_probs():
    """docs/features.md has the list. What one graph runs is counted if any of it has a backward."""
    layer = small_layer(**BIASED)
    count = layer.router.local_tokens_per_expert
    x = fp32_leaf(5, 8)

    def counted():
        n = count.sum().item() / 10
        count.zero_()
        return n
    torch.autograd.grad(layer(x).sum(), [layer.experts.fc2])
    layer(x).sum().backward(inputs=[*layer.experts.parameters()])
    assert counted() == 0
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    assert counted() == 1
    loss.backward()
    assert counted() == 1

    def both(x):
        return layer(x).sum(), layer(2 * x).sum()
    both(x)[0].backward()
    assert counted() == 1
    compiled(both)(x)[0].backward()
    assert counted() == 2


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


# ---- Process groups ----

def failing_steps(rank, ranks, how):
    """Three steps. Rank 1 fails in the second one, while the others wait for it or sleep."""
    def fail(grad=None):
        if how.startswith("killed"):
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError
    world = torch.distributed.group.WORLD
    layer = MoELayer(exact_config(), ProcessGroups(ep=world, tp_dp_cp=world))
    for step in (1, 2, 3):
        fails = rank == 1 and step == 2
        if rank == 0 and step == 2 and how.endswith("sleep"):
            time.sleep(600)
        if fails and how != "backward raises":
            fail()
        y = layer(leaf(4, 6))
        if fails:
            y.register_hook(fail)
        y.sum().backward()


def test_groups_report_a_rank_that_fails():
    """spawn_gloo, on which all tests over ranks stand: no failure passes, no rank stays behind."""
    start = time.monotonic()
    for how, text in [("forward raises", "Error"), ("killed, others sleep", "SIGKILL"),
                      ("others sleep", "ZeroDivisionError")]:
        with pytest.raises(Exception, match=text):
            spawn_gloo(failing_steps, 2, how=how)
        assert not torch.multiprocessing.active_children()
    with pytest.raises(AssertionError, match="ranks hang"):
        spawn_gloo(failing_steps, 1, how="others sleep", seconds=2)
    assert time.monotonic() - start < 300


@over_ranks(4)
def test_groups_of_a_mesh(rank, ranks):
    """from_mesh: who is in which group, as rank 1 of 4 sees it."""
    def members(**sizes):
        groups = vars(groups_over(**sizes))
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


def own_part(name: str, tensor: Tensor, groups) -> Tensor:
    """What a rank holds of one process's parameter or gradient."""
    if name.startswith("experts.") and groups.ep is not None:
        return tensor.chunk(groups.ep.size())[groups.ep.rank()]
    if name.removeprefix("shared_experts.").startswith("fc") and groups.tp is not None:
        return tensor.chunk(groups.tp.size(), 1)[groups.tp.rank()]
    return tensor


def whole_and_mine(config: MoEConfig, groups, kind=MoELayer) -> tuple[MoELayer, MoELayer]:
    """One process's layer, and this rank's with the same weights. It sets the seed, so all ranks
    draw the same inputs afterwards."""
    torch.manual_seed(0)
    whole = kind(dataclasses.replace(config, shared_expert_overlap=False))
    torch.manual_seed(0)
    return whole, kind(config, pg_collection=groups)


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


def check_gradients(mine, whole) -> None:
    """This rank has its part of the weights and of their gradients, and forgets the latter."""
    reduce_gradients(mine)
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        same(a, own_part(name, b, mine.pg_collection))
        close(a.grad, own_part(name, b.grad, mine.pg_collection))
    mine.zero_grad(), whole.zero_grad()


@over_ranks(2)
def test_groups_share_counts_losses_and_bias(rank, ranks):
    """Two microbatches on each rank are what one process computes on the whole batch. The ranks cut
    up the sequence, the batch, or a pack."""
    world = torch.distributed.group.WORLD
    batch, sequence = ProcessGroups(tp_dp_cp=world), ProcessGroups(tp_cp=world)
    both = ProcessGroups(tp_dp_cp=world, tp_cp=world)
    global_loss = dict(load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    of_sequences = dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.3,
                        calculate_per_token_loss=True)
    pack = torch.tensor([0, 3, 3, 8, 8, 13, 16, 16])
    for groups, options, shape, axis, cut, bounds in [
            (both, dict(BIASED, **LOSSES), (8, 4), 0, 4, None),
            (both, dict(QUANTILE, **LOSSES), (8, 4), 0, 4, None),
            (batch, dict(BIASED, **global_loss), (8, 4), 1, 2, None),
            (batch, dict(QUANTILE, **global_loss), (8, 4), 1, 2, None),
            (sequence, of_sequences, (16, 1), 0, 6, pack),
            (sequence, {}, (8, 4), 0, 4, None)]:
        whole, mine = whole_and_mine(exact_config(**options), groups)
        own = None
        if bounds is not None:
            own = (bounds - cut * rank).clamp(0, [cut, 16 - cut][rank])
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(*shape, 6, dtype=torch.float64)
                mask = torch.rand(shape) < 0.3
                part = [tensor.tensor_split([cut], axis)[rank] for tensor in (x, mask)]
                whole.router.route(x, mask, cu_seqlens=bounds)[0].sin().sum().backward()
                mine.router.route(*part, cu_seqlens=own)[0].sin().sum().backward()
            with about(options):
                total = parallel.all_sum(mine.router.weight.grad, world)
                close(total, whole.router.weight.grad)
                got = load_balancing_metrics(mine, reduce=True)
                for name, want in load_balancing_metrics(whole).items():
                    exact = name in ("tokens_per_expert", "max_violation")
                    close(got[name].double(), want.double(), 0 if exact else 1e-5)
                finish_both(mine, whole)
            mine.zero_grad(), whole.zero_grad()


@over_ranks(2)
def test_groups_sum_over_ranks_once_a_model(rank, ranks):
    """One all-reduce a dtype for all routers, whatever their updates: biases and metrics are those
    of each layer alone."""
    groups = ProcessGroups(tp_dp_cp=torch.distributed.group.WORLD)
    model = torch.nn.Sequential(*[
        MoELayer(small_config(**fields), groups) for fields in (
            BIASED, QUANTILE, dict(BIASED, num_experts=5), LOSSES, QUANTILE)])
    model(torch.randn(9 + rank, 3, 8)).sum().backward()
    alone = [copy.deepcopy(layer) for layer in model]
    got = load_balancing_metrics(model, reduce=True)
    for i, layer in enumerate(alone):
        for name, value in load_balancing_metrics(layer, reduce=True).items():
            same(got[name][i, :layer.config.num_experts] if value.ndim == 2 else got[name][i],
                 value[0])
        finish_step(layer)
    sums = []
    with pytest.MonkeyPatch.context() as patch:
        all_reduce = torch.distributed.all_reduce
        patch.setattr(torch.distributed, "all_reduce", lambda x, group=None: (
            sums.append([x.dtype, x.numel()]), all_reduce(x, group=group)))
        load_balancing_metrics(model, reduce=True)
        finish_step(model)
    assert sums == [
        [torch.int64, 29], [torch.float32, 25], [torch.int64, 11], [torch.int32, 12000]]
    for layer, other in zip(model, alone):
        same([*layer.buffers(), *counts_of(layer)], [*other.buffers(), *counts_of(other)])


@over_ranks(4)
def test_groups_find_replicas_that_drift(rank, ranks):
    """finish_step names the tensor and the ranks, on every rank. With ep and dp, with tp, with what
    FSDP2 has sharded; what ranks hold differently, by design, is not compared."""
    fields = dict(**BIASED, latent_size=3)
    x = torch.randn(ranks, 5, 2, 6, dtype=torch.float64)[rank]

    def model_of(seed=0, tp=False):
        groups = groups_over(dp=2, tp=2) if tp else groups_over(dp=2, ep=2)
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 6).double(), MoELayer(
            exact_config(**fields, sequence_parallel=tp), groups))

    def step(model, reduced=True):
        model(x).square().sum().backward()
        if reduced:
            reduce_gradients(model)
        torch.optim.SGD(model[1].parameters(), lr=0.1).step()

    def found(model):
        text = error(finish_step, model, check_replicas=True)
        assert text.startswith("RuntimeError") and "needs" in text.lower()
        names = re.findall(r"[\w.]+(?= on ranks)", text)
        return names, text

    for tp in (False, True):
        good = model_of(tp=tp)
        good[0].weight.data.add_(rank)                       # not the layer's
        for _ in range(2):
            step(good)
            finish_step(good, check_replicas=True)
        names, _ = found(model_of(seed=rank, tp=tp))
        assert {"1.router.weight", "1.experts.fc1", "1.shared_experts.fc2"} < {*names}
        forgotten = model_of(tp=tp)
        step(forgotten, reduced=False)
        names, text = found(forgotten)
        assert {"1.router.weight", "1.experts.fc1", "1.latent_up.weight"} < {*names}
        assert "1.router.weight on ranks [0] and [1] and [2] and [3]" in text

    drifted = model_of()
    layer = drifted[1]
    with torch.no_grad():                                    # a swap: the sum of the bits is equal
        layer.router.expert_bias[:2] = torch.tensor([1e-3, -1e-3] if rank == 2 else [-1e-3, 1e-3])
    with about("swapped"):
        names, text = found(drifted)
        assert names == ["1.router.expert_bias"] and "on ranks [0, 1, 3] and [2]" in text
    layer = model_of()[1]
    if rank == 3:
        layer.experts.fc2.data[0, 0, 0] *= 1 + 1e-15
    names, text = found(layer)
    assert names == ["experts.fc2"] and "experts.fc2 on ranks [1] and [3]" in text

    mesh = mesh_of(dp=2, ep=2)
    torch.manual_seed(0)
    layer = MoELayer(exact_config(**fields), ProcessGroups.from_mesh(mesh))
    fully_shard(layer.experts, mesh=mesh["dp"])
    fully_shard(layer, mesh=mesh["dp"])
    finish_step(layer, check_replicas=True)
    layer.router.weight.data.to_local().add_(rank % 2)       # ep ranks hold the same shard
    assert found(layer)[0] == ["router.weight"]

    alone = exact_layer(**fields)
    assert "tp_dp_cp is None and 4 ranks run" in error(finish_step, alone, check_replicas=True)
    alone.router.pg_collection = group_of_one()
    finish_step(alone, check_replicas=True)


@about_the_cpu("gloo, with which DDP compares shapes, takes no card")
@over_ranks(2)
def test_groups_refuse_ddp_around_shared_out_parts(rank, ranks):
    """DDP would average the experts of different ranks. Where it leaves them alone it may be."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    layer = MoELayer(exact_config(), groups_over(ep=2))
    x = leaf(5, 2, 6)
    graphs = functools.partial(torch.compile, backend="aot_eager")       # DDP itself breaks them
    for wrapped in (DDP(copy.deepcopy(layer)), graphs(DDP(copy.deepcopy(layer)))):
        text = error(wrapped, x)
        assert "DistributedDataParallel averages experts.fc1 over ranks [0, 1]" in text
        assert f"only [{rank}] hold the same part" in text
    layer(x).sum().backward()
    names = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
    DDP._set_params_and_buffers_to_ignore_for_model(layer, names)
    wrapped = DDP(layer)
    for _ in range(2):
        wrapped(x).sum().backward()


@over_ranks(2)
def test_groups_share_a_sequence_that_is_cut_unevenly(rank, ranks):
    """Losses and gradients of 12 tokens, without a mask or with one on the first rank alone."""
    groups = groups_over(cp=ranks)
    for cut, per_token, masked in itertools.product((6, 9, 12), (False, True), (False, True)):
        whole, mine = whole_and_mine(
            exact_config(**LOSSES, calculate_per_token_loss=per_token), groups)
        x = torch.randn(12, 1, 6, dtype=torch.float64)
        mask = (torch.arange(12) < 2)[:, None] if masked else None
        whole.router.route(x, mask)[0].sin().sum().backward()
        own_mask = mask[:cut] if masked and rank == 0 else None
        mine.router.route(x.tensor_split([cut])[rank], own_mask)[0].sin().sum().backward()
        with about(cut, per_token, masked):
            check_gradients(mine.router, whole.router)
            got = load_balancing_metrics(mine, reduce=True)
            for name, want in load_balancing_metrics(whole).items():
                close(got[name].double(), want.double(), 1e-5)


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


def test_shared_under_autocast():
    """The products run in bf16; the sum with the routed experts' output is in fp32."""
    layer = exact_layer(
        shared_expert_overlap=True, shared_expert_gate=True, latent_size=7, latent_norm=True,
        init_std=0.3, params_dtype=torch.float32, router_dtype=torch.float32)
    x = fp32_leaf(9, 6)
    exact = outcome(layer, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = outcome(layer, x)
        whole = outcome(compiled(layer), x)
    assert not torch.equal(got[0], exact[0])
    without_counts = 2 + len([*layer.parameters()])
    for a, b, c in [*zip(got, whole, exact, strict=True)][:without_counts]:
        assert a.dtype == b.dtype == torch.float32
        unit = c.abs().max().item()
        close(a, c, 0.05 * unit)
        close(b, a, 0.02 * unit)


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


@pytest.mark.parametrize("way", [None, "aot_eager"])
def test_shared_overlap_has_a_side_stream_wherever_it_is(way):
    """However the weights came to a card: drawn there, unpickled, copied, moved, or assigned by
    load_state_dict, which does not tell the module."""
    import pickle
    on_cpu = exact_config(shared_expert_overlap=True)
    with torch.device("cpu"):
        state = MoELayer(on_cpu).state_dict()
        assigned, moved = MoELayer(on_cpu), MoELayer(on_cpu)
    drawn = MoELayer(on_cpu)
    drawn.load_state_dict(state)
    assigned.load_state_dict({name: x.to(DEVICE) for name, x in state.items()}, assign=True)
    moved.load_state_dict(state)
    layers = [drawn, assigned, moved.to(DEVICE), copy.deepcopy(drawn),
              pickle.loads(pickle.dumps(drawn))]
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    for layer in layers:
        shared_experts._SIDE_STREAMS.clear()                 # as in a fresh process
        torch._dynamo.reset()
        y = compiled(layer, way)(x)
        assert [device.type for device in shared_experts._SIDE_STREAMS] == (
            [] if DEVICE == "cpu" else [DEVICE])
        same(y, drawn(x)) if way is None else close(y, drawn(x))
    assert layer.to("meta").shared_experts.stream is None


def test_shared_steps_compile_one_by_one():
    shared = SharedExpertMLP(exact_config(shared_expert_overlap=True), gate=True)
    steps = copy.deepcopy(shared)
    for name in STEPS:
        setattr(steps, name, compiled(getattr(steps, name)))
    agree(of_module(steps, in_steps), shared, leaf(4, 1, 6))


@over_ranks(2)
def test_shared_expert_and_layer_over_two_tp_ranks(rank, ranks):
    """Each rank has the whole sequence of the shared expert, and a part of that of the layer."""
    world = torch.distributed.group.WORLD
    groups = ProcessGroups(tp=world, tp_dp_cp=world)
    for overlap in (False, True):
        config = exact_config(shared_expert_overlap=overlap)
        whole, mine = whole_and_mine(config, groups, functools.partial(SharedExpertMLP, gate=True))
        x = leaf(4, 3, 6)
        with about(f"overlap {overlap}"):
            agree(lambda x: in_steps(mine, x) if overlap else mine(x), lambda x: whole(x), x)
            check_gradients(mine, whole)
    with torch.no_grad():
        close(mine(x), whole(x))
    check_error_table("""
        SharedExpertMLP(odd, False, groups) => size is 7; needs a multiple of the tp size, 2
        MoELayer(exact_config(), groups) => needs sequence_parallel=True and batch_first=False
    """, odd=exact_config(shared_expert_intermediate_size=7), groups=groups)

    groups = groups_over(tp=ranks)
    for overlap in (False, True):
        options = dict(CONFIGS["losses"], calculate_per_token_loss=overlap)
        check_parallel_layer(rank, groups, options, overlap, at_once=True)


# ---- One graph for every configuration ----

def graphs_over_T(layer, sizes, mask: bool = False, given: bool = False, **how) -> int:
    """How many graphs the compiled layer needs for inputs of these T. Each result is that of eager
    mode."""
    function = compiled(layer, **how)
    for T in sizes:
        calls = []
        for _ in range(2):
            padding = torch.rand(T, 2) < 0.2 if mask else None
            choice = random_indices(2 * T, 4, layer.config.topk, repeats=0.3) if given else None
            calls.append((leaf(T, 2, 6), padding, choice))
        with about(f"T = {T}"):
            agree(function, layer, *calls)
    return graphs_made()


@pytest.mark.parametrize("name, first, dynamic", slow_but([("losses", 7, None)], [
    ("losses", 4, True), ("losses", 1000, True),
    *itertools.product(CONFIGS, [7], [None, True])]))
def test_graph_with_overlap(name, first, dynamic):
    """What eager mode gives. Two graphs, the second for every T, with a mask; or a dynamic one from
    the first call, with a replayed choice. The first T may be E, or the number of the losses, or of
    the histogram's bins."""
    layer = exact_layer(shared_expert_overlap=True, **CONFIGS[name])
    given = dynamic and name != "sinkhorn"
    graphs = graphs_over_T(layer, (first, 9, 40), mask=not dynamic, given=given, dynamic=dynamic)
    assert graphs == (1 if dynamic else 2)
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


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
    layer = exact_layer(
        shared_expert_overlap=overlap, shared_expert_intermediate_size=shared,
        load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1)
    assert graphs_over_T(layer, sizes, mask=len(sizes) > 1, backend="inductor") == graphs


@pytest.mark.parametrize("way", slow_but(
    ["reentrant", "non-reentrant", "nested non in re", "compiled around non-reentrant"],
    [*WAYS][1:]))
def test_graph_with_overlap_and_checkpoints(way):
    """Two layers, with either checkpoint around the compiled ones and inside the graph: outputs,
    gradients and counts of eager mode, and without a compiler its bits."""
    layers = torch.nn.Sequential(*[
        exact_layer(
            shared_expert_overlap=overlap, shared_expert_gate=True,
            score_function="sigmoid", enable_expert_bias=True)
        for overlap in (True, False)])
    tol = 0 if way in EAGER_WAYS else 1e-9
    agree(run_as(way, layers), layers, leaf(5, 2, 6), leaf(5, 2, 6), tol=tol)
    assert layers[0].shared_experts._overlap_state is SharedExpertState.IDLE


# ---- Expert parallel ----

def check_rank(rank, mine, whole, inputs, sequence: int = 1, batch: int = 1) -> None:
    """Output and gradients of `mine`, which gets this rank's arguments, are those of one process,
    which gets the arguments of every rank: those of `sequence` ranks one after the other in one
    call, and of `batch` such rows of ranks side by side."""
    def together(tensors):
        if tensors[0] is None:
            return None
        rows = [torch.cat(tensors[r:r + sequence]) for r in range(0, len(tensors), sequence)]
        return torch.cat(rows, 1) if batch > 1 else rows[0]

    width = sequence * batch
    outputs = []
    for first in range(0, len(inputs), width):
        y = whole(*map(together, zip(*inputs[first:first + width])))
        y.sin().sum().backward()
        outputs += [part for row in y.chunk(batch, 1) for part in row.chunk(sequence)]
    x, *others = inputs[rank]
    x_r = x.detach().clone().requires_grad_()
    y = mine(x_r, *others)
    y.sin().sum().backward()
    close([y, x_r.grad], [outputs[rank], x.grad])
    check_gradients(mine, whole)


def check_parallel_layer(
        rank, groups, options, overlap, at_once: bool = False, backend: str | None = None) -> None:
    """The layer on this rank against one process, which takes the whole batch at once or each
    rank's in turn. The batch is cut over dp and ep, the sequence over tp."""
    tp = parallel.group_size(groups.tp)
    ranks = groups.tp_dp_cp.size()
    whole, mine = whole_and_mine(exact_config(
        shared_expert_overlap=overlap, sequence_parallel=True, **options), groups)
    mine = copy.deepcopy(mine)                               # keeps its groups
    if backend is not None:
        mine.compile(backend=backend, fullgraph=True)
    inputs = [(leaf(4 // tp, 2, 6), torch.rand(4 // tp, 2) < 0.2) for _ in range(ranks)]
    # Losses span tp_cp, the global one all ranks. The capacity is that of a rank's own tokens.
    sequence = tp if mine.config.capacity_factor is None else 1
    batch = ranks // tp if at_once else 1
    check_rank(rank, mine, whole, inputs, sequence, batch)
    if at_once:
        a = load_balancing_metrics(mine, reduce=True)
        b = load_balancing_metrics(whole)
        same(a["tokens_per_expert"], b["tokens_per_expert"])
        close(a["global_load_balancing_loss"], b["global_load_balancing_loss"], 1e-6)
        finish_both(mine, whole)


def check_given_indices(rank, ranks, groups) -> None:
    """Uneven T, T = 0 on a rank, all padding on another; then all tokens to one rank. Megatron-LM
    #6699: experts that a token names twice, with a capacity and over ep."""
    whole, mine = whole_and_mine(exact_config(shared_expert_overlap=True), groups)
    for given in (None, torch.tensor([[0, 4]])):
        check_rank(rank, mine, whole, [
            (leaf(T, 6), torch.full((T,), T == 3), None if given is None else given.repeat(T, 1))
            for T in (5, 0, 3, 7)])
    for options in (dict(), dict(capacity_factor=0.8), CONFIGS["padded"]):
        whole, mine = whole_and_mine(exact_config(**options), groups)
        repeated = [random_indices(7, 4, 2, repeats=0.6).int() for _ in range(ranks)]
        check_rank(rank, mine, whole, [(leaf(7, 6), None, given) for given in repeated])


def saved_layer(groups=None) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(exact_config(
        shared_expert_gate=True, sequence_parallel=True, score_function="sigmoid",
        enable_expert_bias=True, add_bias_linear=True, latent_size=7, latent_norm=True), groups)
    layer.router.expert_bias.copy_(torch.arange(4.0))
    return layer


def check_gradient_norm(groups, mesh) -> None:
    """The norm of gradients that are the weights: experts over ep, the shared expert over tp, FSDP2
    over dp, all at once where the mesh has them; beside a dense layer."""
    dense = torch.nn.Linear(6, 6, dtype=torch.float64)
    model, whole = [torch.nn.Sequential(dense, saved_layer(over)) for over in (groups, None)]
    want = torch.nn.utils.get_total_norm([p.detach() for p in whole.parameters()])
    if "dp" in mesh.mesh_dim_names:
        fully_shard(model[1].experts, mesh=mesh["dp"])
        fully_shard(model[1], mesh=mesh["dp"])
    for p in model.parameters():
        p.grad = p.detach().clone()
    norm = sharding.gradient_norm(model, groups)
    close(norm, want)
    assert norm.dtype == torch.float64 and norm.ndim == 0
    if groups.ep.size() > 1:
        assert "needs the module" in error(sharding.gradient_norm, model.parameters(), groups)
        assert "a group that groups lacks" in error(sharding.gradient_norm, model, None)
    model[1].zero_grad()
    norms = [dense.weight.norm(), dense.bias.norm()]
    close(sharding.gradient_norm(model, groups), torch.stack(norms).norm())


def check_fsdp_beside_ep(rank, ranks, groups, mesh) -> None:
    """Experts sharded over the ranks that hold the same ones, the rest over all: the mean over all
    ranks (pytorch #160285, Megatron-LM #5956)."""
    whole, mine = whole_and_mine(exact_config(), groups)
    fully_shard(mine.experts, mesh=mesh["dp"])
    mine.experts.set_gradient_divide_factor(ranks)
    fully_shard(mine, mesh=mesh_of(world=ranks))
    x = torch.randn(4 * ranks, 6, dtype=torch.float64)
    mine(x.chunk(ranks)[rank]).sin().sum().backward()
    whole(x).sin().sum().div(ranks).backward()
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        close(a.grad.full_tensor(), own_part(name, b.grad, groups))
    want = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    close(sharding.gradient_norm(mine, groups), want)


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
    for groups, name in itertools.product(
            [by_hand, groups_over(dp=ranks, ep=1, tp=1)],
            ["losses", "padded"]):
        options = dict(z_loss_coeff=0.1, shared_expert_gate=True, sequence_parallel=True)
        whole, mine = whole_and_mine(exact_config(**{**CONFIGS[name], **options}), groups)
        for router in (mine.router, whole.router):
            if groups is not by_hand:                        # its tp_dp_cp is all ranks
                router._apply_global_aux_loss = lambda probs, *_: probs
        x = leaf(5, 3, 6)
        mask = torch.rand(5, 3) < 0.2
        probs, indices = whole.eval().router.route(x)
        given = probs, indices, plan_permutation(indices, 4)
        whole.train()
        with NoExchange(), about(name, groups):
            assert type(mine.dispatch(x.flatten(0, 1), *given)) is parallel.Local
            agree(mine, whole, (x, mask), tol=0)
            assert type(mine.sharded_state_dict()["experts.fc1"]) is Tensor
            if groups is by_hand and name == "losses":
                mine(x, mask), whole(x, mask)
                reduce_gradients(mine)
                finish_both(mine, whole)
    layer = fully_shard(saved_layer(), mesh=DeviceMesh.from_group(alone, RANK_DEVICE))
    for p in layer.parameters():
        p.grad = p.detach().clone()
    with NoExchange():
        sharding.gradient_norm(layer, None)
    with NoExchange(), pytest.raises(AssertionError, match="allreduce"):
        torch.distributed.all_reduce(torch.ones(1))


@over_ranks(4)
def test_parallel_layer_equals_one_process(rank, ranks):
    """ep 4, ep 2 × tp 2 with sequence parallelism, dp 2 × ep 2, ep 1; overlap on and off."""
    losses = CONFIGS["losses"]
    cases = [                                                # and whether at once
        (dict(losses, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3, z_loss_coeff=None,
              calculate_per_token_loss=False), True),
        (dict(losses, load_balancing_type=LOSS_TYPES[:2], aux_loss_coeff=(0.1, 0.2),
              add_bias_linear=True), False),
        (CONFIGS["dropping"], False),
        (dict(CONFIGS["padded"], latent_size=7, latent_norm=True), False),
        (dict(CONFIGS["padded"], capacity_factor=9.0, activation="relu2",           # above T
              probs_dtype=torch.bfloat16), False)]
    for sizes in (dict(ep=4), dict(ep=2, tp=2), dict(dp=2, ep=2), dict(dp=4, ep=1)):
        mesh = mesh_of(**sizes)
        groups = ProcessGroups.from_mesh(mesh)
        with about(sizes):
            check_gradient_norm(groups, mesh)
        for (options, at_once), overlap in itertools.product(cases, (False, True)):
            with about(sizes, options, overlap):
                check_parallel_layer(rank, groups, options, overlap, at_once)
        if sizes == dict(dp=2, ep=2):
            check_fsdp_beside_ep(rank, ranks, groups, mesh)
        if sizes == dict(ep=4):
            check_given_indices(rank, ranks, groups)
            text = error(MoELayer, exact_config(num_experts=6), groups)
            assert text == "ValueError: num_experts is 6; needs a multiple of the ep size, 4"
    check_groups_of_one(rank, ranks)


@slow
@over_ranks(4)
def test_parallel_compiled_layer_equals_one_process(rank, ranks):
    quantile = dict(QUANTILE, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    for sizes, options, overlap, at_once in [
            (dict(ep=2, tp=2), quantile, True, True), (dict(tp=4), CONFIGS["losses"], False, True),
            (dict(ep=4), CONFIGS["padded"], False, False)]:
        groups = groups_over(**sizes)
        with about(sizes, options):
            check_parallel_layer(rank, groups, options, overlap, at_once, "aot_eager")


@over_ranks(2)
def test_parallel_each_rank_draws_its_own_experts(rank, ranks):
    """And no other's. The default generator is at one place on all ranks afterwards."""
    def draw(seed, groups=None):
        drawn = []
        torch.manual_seed(seed)
        with Watch(lambda name, args, out: drawn.append(out.shape) if name == "normal" else None):
            experts = moe.Experts(small_config(), groups)
        return experts, drawn, torch.get_rng_state()

    whole, all_drawn, state = draw(1)
    mine, drawn, mine_state = draw(1, groups_over(ep=ranks))
    assert sorted(all_drawn) == sorted(drawn * ranks) and len(drawn) == 2 * 3      # fc1 and fc2
    same(mine_state, state)
    for weight, own in zip(whole.parameters(), mine.parameters()):
        same(own, weight[3 * rank:][:3])
        assert weight.flatten(1).unique(dim=0).shape[0] == 6
    assert (whole.fc1 != draw(2)[0].fc1).any()
    with torch.device("meta"):
        assert draw(1)[1] == []


@over_ranks(2)
def test_parallel_router_dtypes_under_autocast(rank, ranks):
    """Probs in any dtype travel under any autocast, forward and backward."""
    groups = groups_over(ep=ranks)
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for router_dtype, probs_dtype, autocast in itertools.product(dtypes, dtypes, dtypes[1:]):
        config = small_config(router_dtype=router_dtype, probs_dtype=probs_dtype)
        whole, mine = whole_and_mine(config, groups)
        x = torch.randn(ranks, 9, 8)
        with torch.autocast("cpu", autocast):
            want = whole(x)
            y = mine(x[rank])
        want.square().sum().backward(), y.square().sum().backward()
        with about(router_dtype, probs_dtype, autocast):
            close(y, want[rank], 0.02 * want.abs().max().item())
            got, want = mine.router.weight.grad, whole.router.weight.grad
            torch.distributed.all_reduce(got)
            close(got, want, 0.02 * want.abs().max().item())


@over_ranks(4)
def test_parallel_sends_a_token_once_to_each_rank(rank, ranks):
    """What is sent, forward and backward, has the bytes that docs/ranks.md says, and what is kept
    those of docs/results.md (in fp32; with a spare row). No row is made for an expert alone."""
    T, H, F, E, K = 40, 8, 4, 8, 3
    sent, made = [], []
    all_to_all = parallel.all_to_all
    functions = parallel.kernels.gather_rows, parallel.kernels.combine_rows

    def counted(rows, send, receive, group):
        others = sum(send) - send[group.rank()]
        sent.append(others * rows[0].numel() * rows.itemsize if len(rows) else 0)
        return all_to_all(rows, send, receive, group)

    def watched(function, x, plan):
        made.append(len(plan.order))
        return function(x, plan)

    for R in (2, 4):
        D = min(K, R)
        groups = ProcessGroups.from_mesh(mesh_of(dp=ranks // R, ep=R))
        layer = MoELayer(small_config(topk=K, num_experts=E), groups)
        x = torch.randn(T, H, requires_grad=True)
        _, indices = layer.router.route(x)
        home = (indices // (E // R))[:, None] == torch.arange(R)[:, None]        # [T, R, K]
        to_R2 = torch.stack((home.any(-1).sum(0), home.sum((0, 2))), 1)
        from_RR2 = to_R2.new_empty(R * R, 2)
        torch.distributed.all_gather_into_tensor(from_RR2, to_R2, group=groups.ep)
        me = groups.ep.rank()
        M, assignments = from_RR2.view(R, R, 2)[:, me].sum(0).tolist()
        m, n = (all_rows - to_R2[me, 0] for all_rows in (to_R2[:, 0].sum(), M))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel, "all_to_all", counted)
            for function in functions:
                patch.setattr(parallel.kernels, function.__name__,
                              functools.partial(watched, function))
            layer(x).sum().backward()
        assert sum(sent) == (m + n) * (2 * H * 4 + 8 * K) + 16 * (R - 1)
        assert len(sent) == 7                                # three of them in the backward
        assert made == 3 * [T * D + 1]                       # tokens, probs, the way back
        sent.clear(), made.clear()
        if DEVICE != "cpu":                                  # a card keeps the rows of batches too
            continue
        kept = saved_bytes(lambda: layer(x), exclude=layer.parameters())
        rows = (assignments + 1) * 3 * F                     # fc1's output, the activation
        assert kept == (4 * T * H + 12 * T * K + 16 * T * D + 8 + 4 * rows
                        + M * (4 * H + 24 * K) + 4 * (R + E // R) + 8 * E)


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """What the module itself holds: its state dict in one process."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors}


def filled(model: torch.nn.Module, value: float) -> torch.nn.Module:
    for tensor in tensors_of(model).values():
        tensor.fill_(value)
    return model


def load_zeros(layer, folder) -> dict[str, Tensor]:
    """The layer's tensors, zeroed and loaded."""
    dcp.load(filled(layer, 0).sharded_state_dict("a."), checkpoint_id=folder)
    return tensors_of(layer)


@over_ranks(4)
def checkpoints_over_ranks(rank, ranks, folders):
    layers = []
    for (dp, ep, tp), folder in list(folders.items())[1:]:
        layer = saved_layer(groups_over(dp=dp, ep=ep, tp=tp))
        state = layer.sharded_state_dict("a.")
        for name, tensor in tensors_of(layer).items():
            given = state["a." + name]
            local = getattr(given, "_local_tensor", given)
            assert local.data_ptr() == tensor.data_ptr()     # no temporary that a load would fill
        dcp.save(state, checkpoint_id=folder)
        layers.append(layer)
    whole = saved_layer().state_dict()
    for layer, folder in itertools.product(layers, folders.values()):
        for name, tensor in load_zeros(layer, folder).items():
            same(tensor, own_part(name, whole[name], layer.pg_collection))


def test_parallel_checkpoints(tmp_path):
    """Written at each size of (dp, ep, tp), read at each, bitwise; also without any process group.
    The layer's own tensors."""
    sizes = ["alone", (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
    folders = {size: f"{tmp_path}/{i}" for i, size in enumerate(sizes)}
    layer = saved_layer()
    state = layer.sharded_state_dict("a.")
    assert list(state) == ["a." + name for name in layer.state_dict()]
    assert "both need to be empty" in error(layer.sharded_state_dict, "", ((0, 1, 2),))
    assert "both need to be empty" in error(layer.sharded_state_dict, metadata={"a": 1})
    dcp.save(state, checkpoint_id=folders["alone"])
    checkpoints_over_ranks(folders=folders)
    for folder in folders.values():
        same(load_zeros(saved_layer(), folder), layer.state_dict())


def saved_model(groups=None) -> torch.nn.Module:
    """A layer in a model of one's own."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 6, dtype=torch.float64), saved_layer(groups))


def check_parts(model, whole: dict[str, Tensor]) -> None:
    """The model has this rank's part of the whole tensors."""
    tensors = tensors_of(model)
    assert tensors.keys() == whole.keys()
    for name, tensor in tensors.items():
        with about(name):
            part = own_part(name.removeprefix("1."), whole[name], model[1].pg_collection)
            same(full(tensor), part)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model, **how) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in model.state_dict(**how).items()}


def save_and_load(model, folder, whole) -> None:
    dcp.save(model.state_dict(), checkpoint_id=folder)
    dcp.load(filled(model, 0).state_dict(), checkpoint_id=folder)
    check_parts(model, whole)


def check_ordinary_ways(rank, groups, folder) -> None:
    """A checkpoint as anybody writes it who does not know of this project."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, set_model_state_dict)
    whole, model = saved_model().state_dict(), saved_model(groups)
    state = model.state_dict()
    assert list(state) == list(whole) == list(sharding.sharded_state_dict(model))
    for name, parameter in model.named_parameters():
        assert type(parameter) is torch.nn.Parameter and not isinstance(parameter, DTensor)
        part = getattr(state[name], "_local_tensor", state[name])
        assert part.data_ptr() == parameter.data_ptr() and not state[name].requires_grad
        assert isinstance(state[name], DTensor) == (parameter.shape != whole[name].shape), name
        assert state[name].shape == whole[name].shape
    same(whole_state(model), whole)
    same(whole_state(model, keep_vars=True), whole)

    save_and_load(model, folder, whole)
    options = dict(full_state_dict=True)
    same(get_model_state_dict(model, options=StateDictOptions(**options)), whole)
    given = copy.deepcopy(get_model_state_dict(model))
    set_model_state_dict(filled(model, 0), given)
    check_parts(model, whole)
    for more in ({}, dict(broadcast_from_rank0=True)):
        given = whole if not more or rank == 0 else {}
        set_model_state_dict(
            filled(model, 0), dict(given), options=StateDictOptions(**options, **more))
        check_parts(model, whole)

    # What load_state_dict takes: the whole, DTensors of any layout, the parts.
    state = copy.deepcopy(model.state_dict())
    otherwise = {name: tensor.redistribute(placements=[Replicate()])
                 if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    parts = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
             for name, tensor in state.items()}
    for given, assign in itertools.product((whole, state, otherwise, parts), (False, True)):
        other = filled(saved_model(groups), 0)
        before = {name: id(tensor) for name, tensor in given.items()}
        other.load_state_dict(given, assign=assign)
        check_parts(other, whole)
        assert before == {name: id(tensor) for name, tensor in given.items()}
        if assign and given is whole:
            for parameter in other[1].experts.parameters():
                assert parameter.untyped_storage().nbytes() == parameter.nbytes
    name = next(name for name in state if isinstance(state[name], DTensor))
    text = error(model.load_state_dict, {**whole, name: whole[name][..., :1]})
    assert f"size mismatch for {name}" in text, text

    # A file for each rank. That of another rank is not taken for this one's.
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    mine, other = [torch.load(f"{folder}/{r}.pt") for r in (rank, 1 - rank)]
    filled(model, 0).load_state_dict(mine)
    check_parts(model, whole)
    text = error(model.load_state_dict, other)
    assert "is the part of another rank" in text, text

    again = copy.deepcopy(model)
    filled(model, 0)
    same(whole_state(again), whole)
    filled(again, 0).load_state_dict(whole)
    check_parts(again, whole)
    with torch.device("meta"):
        blank = saved_model(groups)
    assert blank.state_dict()[name].shape == whole[name].shape
    blank.load_state_dict(whole, assign=True)
    check_parts(blank, whole)


@over_ranks(2)
def ordinary_checkpoints(rank, ranks, folder):
    for dim in ("ep", "tp"):
        with about(dim):
            groups = groups_over(**{dim: ranks})
            check_ordinary_ways(rank, groups, f"{folder}/{dim}")


@over_ranks(4)
def files_of_two_ranks(rank, ranks, folder):
    model = saved_model(groups_over(ep=ranks))
    text = error(model.load_state_dict, torch.load(f"{folder}/ep/{rank % 2}.pt"))
    assert "or of a run with other ranks; needs the file that this rank" in text, text


def test_parallel_ordinary_state_dicts(tmp_path):
    """state_dict() and what torch makes of it have every rank's experts (KempnerForge #202), and
    are read by one process; load_state_dict takes a whole and its part."""
    import pickle
    ordinary_checkpoints(folder=tmp_path)
    files_of_two_ranks(folder=tmp_path)
    model = saved_model()
    whole = copy.deepcopy(model.state_dict())
    for dim in ("ep", "tp"):
        dcp.load(filled(model, 0).state_dict(), checkpoint_id=f"{tmp_path}/{dim}")
        same(model.state_dict(), whole)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(tensor) is Tensor for tensor in again.state_dict().values())
        filled(again, 0).load_state_dict(whole)
        same(again.state_dict(), whole)


def steps(model, optimizer, count: int) -> None:
    """Gradients that are the same for a part as for the whole."""
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().mul(3).cos()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "damped": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
}


def check_moments(groups, folder, names=tuple(OPTIMIZERS), sharded=lambda model: model) -> None:
    """Saved before the first step and after the second, loaded into new ones: bit for bit."""
    for name in names:
        make = OPTIMIZERS[name]
        with about(name):
            model = sharded(saved_model(groups))
            optimizer = make(model.parameters())
            alone = saved_model()
            for count in (0, 2):
                path = f"{folder}/{name}{count}"
                steps(model, optimizer, count)
                if groups is not None:
                    dcp.save(sharding.sharded_state_dict(model, optimizer), checkpoint_id=path)
                again = sharded(filled(saved_model(groups), 7))
                other = make(again.parameters())
                if name != "adamw":
                    steps(again, other, 1)
                rate = other.param_groups[0]["lr"]
                hook = other.register_step_post_hook(lambda *_: pytest.fail("no step"))
                dcp.load(sharding.sharded_state_dict(again, other), checkpoint_id=path)
                hook.remove()
                assert rate == other.param_groups[0]["lr"] and len(other.param_groups) == 1
                steps(again, other, 3)
                expected = saved_model()
                steps(expected, make(expected.parameters()), count + 3)
                check_parts(again, dict(expected.named_parameters()) | dict(alone.named_buffers()))
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    names = list(sharding.sharded_state_dict(model, optimizer))
    assert list(sharding.sharded_state_dict(torch.compile(model), optimizer)) == names
    model[1] = checkpoint_wrapper(torch.compile(model[1]))
    assert list(sharding.sharded_state_dict(model, optimizer)) == names


@over_ranks(2)
def moments_over_ranks(rank, ranks, folder):
    groups = groups_over(ep=ranks)
    check_moments(groups, folder)
    model = saved_model(groups)
    optimizer = torch.optim.Adafactor(model.parameters())
    check_error_table("""
        sharded(model, optimizer) => optimizer.1.experts.fc1.row_var has shape
        sharded(model[1], adamw) => optimizer has 2 parameters that model lacks
        """, sharded=sharding.sharded_state_dict, model=model, optimizer=optimizer,
        adamw=torch.optim.AdamW(model.parameters()))


def test_parallel_checkpoints_of_an_optimizer(tmp_path):
    """The moments of all experts; written by two ranks, read by them and by one process."""
    moments_over_ranks(folder=tmp_path)
    check_moments(None, tmp_path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parallel_saving_changes_no_step(name):
    """Before the first step, between steps, and where a momentum is zero in earnest."""
    saved, plain = saved_model(), saved_model()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (saved, plain)]
    for count in (1, 2, 1):
        sharding.sharded_state_dict(saved, optimizers[0])
        for model, optimizer in zip((saved, plain), optimizers):
            steps(model, optimizer, count)
            for state in optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].zero_()
    same(saved.state_dict(), plain.state_dict())


@over_ranks(4)
def test_parallel_checkpoints_under_fsdp(rank, ranks, tmp_path):
    """FSDP2 over dp on experts over ep: two dims, or a refusal."""
    mesh = mesh_of(dp=2, ep=2)
    groups = ProcessGroups.from_mesh(mesh)

    def sharded(model, **how):
        fully_shard(model[1].experts, mesh=mesh["dp"], **how)
        return fully_shard(model, mesh=mesh_of(world=ranks))

    whole = saved_model().state_dict()
    for axis in (0, 1):
        model = sharded(saved_model(groups), shard_placement_fn=lambda parameter: Shard(
            axis if parameter.shape[axis] % 2 == 0 else 0))
        assert model.state_dict()["1.experts.fc1"].device_mesh.ndim == 2
        same(whole_state(model), whole)
        save_and_load(model, f"{tmp_path}/{axis}", whole)
        kept = copy.deepcopy(model.state_dict())
        for given in (kept, saved_model(groups).state_dict(), whole):
            filled(model, 0).load_state_dict({**kept, **{
                name: tensor for name, tensor in given.items() if name.startswith("1.experts.")}})
            check_parts(model, whole)
    with about("moments"):
        check_moments(groups, tmp_path, ["adamw"], sharded)

    # Three experts on each rank of ep, over two ranks of dp.
    whole, mine = whole_and_mine(exact_config(num_experts=6), groups)
    fully_shard(mine, mesh=mesh["dp"])
    same(full(mine.state_dict()["experts.fc1"]), whole.experts.fc1.detach())

    model = saved_model(groups)
    fully_shard(model, mesh=mesh_of(world=ranks))
    text = error(model.state_dict)
    assert "needs fully_shard over ranks that hold the same part, such as mesh['dp']" in text, text


OVERLAP = dict(shared_expert_overlap=True, shared_expert_gate=True)
DYNAMIC = dict(dynamic=True)
INDUCTOR = dict(backend="inductor", dynamic=True)
EVEN = (18, 18), (56, 56), (74, 74)                      # where all ranks need one T


@slow
@pytest.mark.parametrize("options, dim, sizes, how, graphs", [    # sizes: T of each rank, in turn
    (OVERLAP, "ep", [(5, 7), (8, 3)], DYNAMIC, 1),
    (dict(OVERLAP, **LOSSES), "ep", [(5, 7), (8, 3), (9, 20), (40, 31)], {}, 2),
    (dict(OVERLAP, **CONFIGS["padded"]), "ep", [(5, 5), (8, 8), (31, 31)], DYNAMIC, 1),
    (dict(OVERLAP, **CONFIGS["dropping"]), "ep",
     [(5, 0), (8, 3), (0, 20), (40, 0)], DYNAMIC, 2),             # T = 0 takes its own
    (CONFIGS["losses"] | OVERLAP, "ep", [(4, 4), (7, 5), (9, 4)], DYNAMIC, 1),             # 4 is E
    (dict(OVERLAP, **CONFIGS["bias and groups"]), "tp", [(4, 4), (6, 6), (8, 8)], {}, 2),
    (OVERLAP, "ep", [(40, 33), (52, 64), (90, 41)], dict(backend="inductor"), 2),
    *[(fields, "ep", [(18, 57), (63, 44), (76, 80)], INDUCTOR, 2) for fields in (
        {}, OVERLAP, dict(capacity_factor=0.8), CONFIGS["gpt_oss"],
        dict(latent_size=7, latent_norm=True))],
    (CONFIGS["padded"], "ep", EVEN, INDUCTOR, 2),
    (dict(shared_expert_overlap=True), "tp", EVEN, INDUCTOR, 2)])
@over_ranks(2)
def test_parallel_layer_through_inductor(rank, ranks, options, dim, sizes, how, graphs):
    """Compiled, by AOTAutograd too: forward and backward over these T are what eager mode gives. A
    small T may have a graph of its own: see test_graph_through_inductor."""
    layer = MoELayer(exact_config(sequence_parallel=True, **options), groups_over(**{dim: ranks}))
    function = compiled(layer, **how)
    for Ts in sizes:
        with about(Ts):
            agree(function, layer, leaf(Ts[rank], 6))
    assert graphs_made() <= graphs


def overlapped_layer(options=(), **sizes: int) -> MoELayer:
    config = exact_config(
        shared_expert_overlap=True, sequence_parallel=True, **dict(options))
    return MoELayer(config, groups_over(**sizes))


@pytest.mark.parametrize("ways", [
    ["reentrant", "non-reentrant"],
    pytest.param(["compiled inside non-reentrant", "compiled around non-reentrant"], marks=slow)])
@over_ranks(2)
def test_parallel_layer_under_checkpoints(rank, ranks, ways):
    layer = overlapped_layer(ep=ranks)
    for way in ways:
        torch._dynamo.reset()
        with about(way):
            agree(run_as(way, layer), layer, leaf(5 + rank, 6))
    # It reads every gradient at once, also one in flight: each of the three exchanges is awaited
    # where it is issued, and once more where it is due.
    with torch.autograd.set_detect_anomaly(True), pytest.MonkeyPatch.context() as patch:
        y = layer(leaf(5, 6))
        waits = []
        wait = parallel.wait
        patch.setattr(parallel, "wait", lambda buffer: waits.append(buffer) or wait(buffer))
        y.sum().backward()
        assert len(waits) == 6


@over_ranks(2)
def test_parallel_overlap_keeps_nothing_after_a_checkpoint(rank, ranks):
    """A non-reentrant checkpoint ends the forward that it runs again by an exception, here between
    two steps of the shared expert."""
    layer = overlapped_layer(ep=ranks)
    for function in (layer, checkpointed(layer, reentrant=False)):
        function(leaf(5, 6)).sum().backward()
        kept = {name: x for name, x in vars(layer.shared_experts).items()
                if name.startswith("cached_") or name in ("gate_score", "_weights")}
        assert set(kept.values()) == {None} and len(kept) == 6
        assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


def failing_rank(rank, ranks, folder, how):
    try:
        failing_steps(rank, ranks, how)
    except BaseException as e:
        Path(folder, f"{how}{rank}").write_text(type(e).__name__)
        os._exit(1)


@pytest.mark.parametrize("how", ["killed", "forward raises", "backward raises"])
def test_parallel_rank_that_fails_ends_the_others(tmp_path, how):
    """Nobody kills them: the others end by themselves, with an error."""
    with started_ranks(failing_rank, 2, folder=str(tmp_path), how=how) as started:
        for process in started.processes:
            process.join(90)
        assert all(process.exitcode for process in started.processes), started.processes
        assert (tmp_path / f"{how}0").exists()


# ---- In other people's trainers ----

def test_trainer_counts_are_where_the_weight_is():
    """fully_shard moves parameters and buffers, no other tensors. A layer of the meta device that
    is assigned a state dict makes its counts in the first forward."""
    config = small_config(**BIASED)
    router = TopKRouter(config)
    router.weight = torch.nn.Parameter(router.weight.to("meta"))
    router.expert_bias = router.expert_bias.to("meta")
    router(torch.zeros(5, 8, device="meta"))
    assert all(tensor.is_meta for tensor in counts_of(router))
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.load_state_dict(MoELayer(config).state_dict(), assign=True)
    layer(torch.randn(5, 8)).sum().backward()
    assert layer.router.local_tokens_per_expert.sum() == 10
    finish_step(layer)
    assert layer.router.expert_bias.any()


@on_a_card
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_trainer_counts_follow_the_weight_to_a_card(way):
    """fully_shard brings parameters and buffers there, and tells the module nothing."""
    with torch.device("cpu"):
        layer = small_layer(**QUANTILE)
    for part in layer.modules():
        for name, tensor in [*part.named_parameters(recurse=False),
                             *part.named_buffers(recurse=False)]:
            moved = tensor.detach().to(DEVICE)
            setattr(part, name, torch.nn.Parameter(moved) if tensor.requires_grad else moved)
    function = WAYS[way](layer)
    for n in (1, 2):
        function(fp32_leaf(7, 8)).sum().backward()
        assert all(tensor.device.type == DEVICE for tensor in counts_of(layer))
        assert layer.router.local_tokens_per_expert.sum() == 14 * n


def test_trainer_loads_a_layer_that_to_empty_has_made(tmp_path):
    """From the meta device and from a real one, by load_state_dict and by DCP: no reset_parameters.
    Memory that nobody has written holds NaN here, and large integers."""
    fields = dict(**LOSSES, **QUANTILE)
    first = small_layer(**fields)
    x = torch.randn(6, 2, 8)
    dcp.save(first.state_dict(), checkpoint_id=tmp_path)

    def step(layer):
        layer(x).sum().backward()
        metrics = load_balancing_metrics(layer)
        finish_step(layer)
        return metrics, [p.grad for p in layer.parameters()], layer.router.expert_bias
    want = step(copy.deepcopy(first))
    torch.use_deterministic_algorithms(True)
    try:
        for device, by_dcp in itertools.product(("meta", DEVICE), (False, True)):
            with torch.device(device):
                layer = small_layer(**fields)
            layer.to_empty(device=DEVICE)
            if by_dcp:
                dcp.load(layer.state_dict(), checkpoint_id=tmp_path)
            else:
                layer.load_state_dict(first.state_dict())
            same(step(layer), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_trainer_evaluates_in_inference_mode_first(backend):
    """Lightning does, before it trains. What a first forward makes is no tensor of that mode."""
    config = small_config(**BIASED, **LOSSES)
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.load_state_dict(MoELayer(config).state_dict(), assign=True)
    layer.router.expert_bias = layer.router.expert_bias.bfloat16()        # as FSDP2 may
    function = compiled(layer, backend)
    with torch.inference_mode():
        layer.eval()
        function(torch.randn(5, 8))
    layer.train()
    function(torch.randn(5, 8)).sum().backward()
    finish_step(layer)
    assert layer.router.expert_bias.any() and layer.router.expert_bias.dtype == torch.float32
    assert not any(tensor.is_inference() for tensor in [*layer.buffers(), *counts_of(layer)])


OWN_OPS = [op for module in SOURCES for op in vars(module).values()
           if isinstance(op, torch._library.custom_ops.CustomOpDef)]


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells note(name, args, out) of every op. With inside=True also of the ops that the project's
    own ops are made of; `inside` has the names of the latter while they run."""

    supports_higher_order_operators = True           # "auto_functionalized_v2" around a mutating op

    def __init__(self, note: Callable, inside: bool = False):
        super().__init__()
        self.note = note
        self.bodies = {op._qualname: op._init_fn for op in OWN_OPS if inside}
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


# frozen -> calls in the backward of rows_times_weights, rows_times_rows, block_sums, mm,
# product_in and sum_tokens. product_in is the router's product, and that of fc2_bias; sum_tokens is
# for the router's bias.
FROZEN = {
    "": [2, 2, 1, 4, 4, 1],
    "experts": [2, 0, 0, 4, 3, 1],
    "experts.fc1": [2, 1, 0, 4, 4, 1],                        # and its bias
    "experts.fc2": [2, 1, 1, 4, 3, 1],
    "router": [2, 2, 1, 4, 3, 0],
    "router.bias": [2, 2, 1, 4, 4, 0],
    "x": [2, 2, 1, 3, 3, 1],
    "latent_down": [2, 2, 1, 3, 4, 1],
    "x latent": [1, 2, 1, 1, 3, 1],
    "x latent experts": [1, 0, 0, 1, 2, 1],
    "x latent router experts.fc1": [0, 1, 0, 1, 1, 0],
}


@pytest.mark.parametrize("cases, how", [
    (FROZEN, "eager"), (["experts"], "compiled"),
    pytest.param(FROZEN, "compiled", marks=slow)])
def test_trainer_frozen_parameters_cost_nothing(cases, how):
    """Products in the backward: of the experts, the router and the latent pair. The other gradients
    stay as they are."""
    layer = exact_layer(
        add_bias_linear=True, router_bias=True, pre_softmax=True, latent_size=7, latent_norm=True,
        shared_expert_intermediate_size=None)
    x = leaf(9, 6)
    named = {"x": x, **dict(layer.named_parameters())}
    want = dict(zip(named, grads(layer(x).sin().sum(), list(named.values()))))
    for frozen in cases:
        for name, tensor in named.items():
            tensor.requires_grad_(not name.startswith(tuple(frozen.split())))
        live = [name for name, tensor in named.items() if tensor.requires_grad]
        torch._dynamo.reset()
        function = layer if how == "eager" else compiled(layer)
        loss = function(x).sin().sum()
        calls = []
        with Watch(lambda name, args, out: calls.append(name)):
            got = grads(loss, [named[name] for name in live])
        close(got, [want[name] for name in live])
        counted = [calls.count(op) for op in (
            "rows_times_weights", "rows_times_rows", "block_sums", "mm", "product_in",
            "sum_tokens")]
        assert counted == FROZEN[frozen], frozen


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
def test_trainer_record_and_replay(way):
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


def test_trainer_record_has_probs_and_names():
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


def test_trainer_replay_of_given_logits():
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


def test_trainer_replayed_padding_reaches_no_expert():
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
def test_trainer_record_holds_the_choice_before_dropping(how):
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
def test_trainer_replay_routes_unknown_rows_itself(way):
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


def test_trainer_replay_refuses_what_does_not_fit():
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
    def no_kernel(*args):                                    # which could leave any number of a row
        for x in args:
            if isinstance(x, Tensor) and x.dtype == torch.int64:
                x.zero_()
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: no_kernel)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield
    PyCodeCache.cache_clear()


@about_the_cpu("kernels of its compiler")
@pytest.mark.parametrize("count, fields", [
    (24, dict(latent_size=256, latent_norm=True)),
    pytest.param(15, dict(), marks=slow),
    pytest.param(15 + compat.cpu_multiplies_in(torch.bfloat16), dict(params_dtype=torch.bfloat16),
                 marks=slow),
    pytest.param(15, dict(latent_size=256), marks=slow)])
def test_compile_kernels_and_bytes(count, fields, no_cpp_compiler):
    """Kernels that Inductor generates for forward and backward, one more where the product is
    torch's own; the rest are products, top-k and the ops of kernels.py. Kept for the backward:
    T·H + 2·T·ℓ + N·2F elements, in eager mode another N·F, indices and probs, and at most 1% more.
    The norm of the latent experts keeps another T·ℓ, and more in eager mode."""
    T, H, F_, K = 512, 512, 256, 8
    layer = MoELayer(MoEConfig(H, F_, 16, topk=K, **fields))
    function = compiled(layer, "inductor")
    x = leaf(T, H, dtype=layer.config.params_dtype)
    metrics.reset()
    function(x).sum().backward()
    assert metrics.generated_kernel_count == count
    norm = fields.get("latent_norm", False)
    latent = (2 + norm) * T * fields.get("latent_size", 0)
    least = x.element_size() * (T * H + latent + T * K * 2 * F_)
    small = T * K * (8 + 8 + 4) + T * 4 * 16
    for call in (function,) if norm else (layer, function):
        kept = saved_bytes(lambda: call(x), exclude=layer.parameters())
        activated = x.element_size() * T * K * F_ * (call is layer)
        assert least + activated <= kept <= 1.01 * least + activated + small


def test_compile_no_tokens_in_bf16():
    """Where the product is torch's own, as on an H100: for an empty [0, H], Inductor computes
    strides of the transpose that the product refuses."""
    layer = MoELayer(MoEConfig(32, 16, 8, topk=2, params_dtype=torch.bfloat16))
    function = compiled(layer, "inductor")
    for T in (0, 5):
        x = leaf(T, 32, dtype=torch.bfloat16)
        close(outcome(function, x), outcome(layer, x), 5e-2)


def test_compile_fp8_store_halves_what_bf16_keeps():
    check_keeps_little(None, "inductor", fp8=True)
    plain = MoELayer(MoEConfig(64, 32, 16, topk=8, params_dtype=torch.bfloat16))
    layer = twin(plain, activation_fp8_input_store=True)
    x = leaf(256, 64, dtype=torch.bfloat16)
    same(layer(x), plain(x))
    close(outcome(layer, x)[1], outcome(plain, x)[1], 0.05)


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_compile_bitwise_repeatable(backend):
    layer = MoELayer(MoEConfig(64, 32, 16, topk=4, add_bias_linear=True, **LOSSES))
    function = compiled(layer, backend)
    x = fp32_leaf(257, 64)
    first = outcome(function, x)
    for _ in range(20):
        same(outcome(function, x), first)


@slow
def test_compile_no_recompile_over_T():
    """One dynamic graph from T = 2 to beyond 32767 assignments, where a sort's own lowering guards.
    T = 0 and T = 1 may each have a graph of their own."""
    layer = MoELayer(MoEConfig(
        8, 4, 16, topk=8, load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1,
        router_bias=True, add_bias_linear=True))
    function = compiled(layer, "inductor", dynamic=True)
    for most, *sizes in [
            (1, 64), (1, 2, 3, 17, 100, 1000, 4095, 4096, 4097, 5000, 8192), (3, 0, 1, 0, 1, 65)]:
        for T in sizes:
            function(fp32_leaf(T, 8)).sum().backward()
        assert graphs_made() <= most


@about_the_cpu("names of ops in a profile")
@pytest.mark.parametrize("fields, backend", [
    ({}, "aot_eager"),
    *(pytest.param(fields, "aot_eager", marks=slow) for fields in (ACTIVATIONS[5], ACTIVATIONS[9])),
    *(pytest.param(fields, "inductor", marks=slow) for fields in (
        dict(latent_size=4, shared_expert_intermediate_size=8, capacity_factor=0.5),
        dict(params_dtype=torch.bfloat16, activation_fp8_input_store=True)))])
def test_compile_few_tokens_read_weights_where_they_are(fields, backend):
    """Few assignments without gradients: no plan, and no grouped product, which would multiply row
    by row. Beyond, and with a dynamic T, the plan is one graph for all."""
    layer = random_layer(exact_config(num_experts=16, add_bias_linear=True, **fields)).eval()
    dtype = layer.config.params_dtype
    tol = 1e-9 if dtype == torch.float64 else 0.02
    function = compiled(layer, backend, dynamic=False)

    def ops(T):
        with torch.profiler.profile() as profile:
            function(torch.randn(T, 1, 6, dtype=dtype))
        return {event.key.partition("::")[2] for event in profile.key_averages()}

    with torch.no_grad():
        for T in (1, 2, 4):
            torch._dynamo.reset()                                    # which bounds recompilations
            given = torch.tensor([[4, 1], [16, 2], [16, 16], [0, 15]])[:T]         # 16: unrouted
            padding = (torch.arange(T) % 2 == 1)[:, None]
            for x in torch.randn(3, T, 1, 6, dtype=dtype):
                for rest in ((), (padding, given)):
                    close(function(x, *rest), layer(x, *rest), tol)
        used = {"plan_permutation", "rows_times_weights"}
        if dtype == torch.float64:                                # bf16: torch's own, on some CPUs
            assert used <= ops(T=5)
        assert not used & ops(T=4) and "product_in" in ops(T=4)   # the router's

        torch._dynamo.reset()
        function = compiled(layer, backend, dynamic=True)
        counters.clear()
        for T in (2, 4, 5, 30):
            x = torch.randn(T, 1, 6, dtype=dtype)
            close(function(x), layer(x), tol)
        assert graphs_made() == 1


@about_the_cpu("the code generated for it")
@pytest.mark.parametrize("transposed", [False, True])
def test_compile_few_tokens_make_no_tensor_of_weights(transposed):
    """Of the weights that are read nothing is as large as those of one expert."""
    E, T, K, H, F_ = 64, 4, 4, 32, 16
    fc1, fc2 = torch.randn(E, 2, F_, H), torch.randn(E, H, F_)
    if transposed:                                   # parts interleaved, as gpt_oss has them
        fc1 = fc1.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        fc2 = fc2.mT.contiguous().mT
    x, probs = torch.randn(T, H), torch.rand(T, K)
    indices = random_indices(T, E, K)

    def mlp(x, probs, indices):
        return kernels.expert_mlp(
            x, probs, kernels.plan_permutation(indices, E), fc1, fc2, indices=indices)

    with torch.no_grad():
        y, (code,) = run_and_get_code(compiled(mlp, "inductor", dynamic=False), x, probs, indices)
        close(y, mlp(x, probs, indices), 1e-5)
    sizes = [math.prod(map(int, re.findall(r"\d+", shape)))
             for shape in re.findall(r"empty_strided_cpu\(\((.*?)\),", code)]
    assert 0 < max(sizes) <= T * K * 2 * F_ and "plan_permutation" not in code


VARIANTS = {name: small_config(shared_expert_intermediate_size=8, **fields) for name, fields in {
    **{kind: dict(activation=kind) for kind in kernels.ACTIVATIONS},
    **CONFIGS,
    "fp8": dict(activation_fp8_input_store=True),
    "bf16": dict(params_dtype=torch.bfloat16, router_dtype=torch.bfloat16, router_bias=True),
    "random": dict(CONFIGS["losses"], force_load_balancing=True, input_jitter_eps=0.1,
                   capacity_factor=2.0),
    "chosen": dict(CONFIGS["bias and groups"], load_balancing_type="aux_loss", aux_loss_coeff=0.1,
                   add_bias_linear=True, router_bias=True),
}.items()}


@pytest.mark.parametrize("name", slow_but(["random", "chosen"], VARIANTS))
def test_compile_without_host_sync(name):
    """The joint graph holds no .item(), no nonzero, no unbacked size: ready for CUDA graphs and
    export. It has no scatter: see test_graph_through_inductor."""
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
    config = VARIANTS[name]
    x = leaf(6, 2, 8, dtype=config.params_dtype)
    layer = MoELayer(config)
    compiled(layer, backend)(x).sum().backward()
    if "seq_aux_loss" in config.balancing:
        pack = x.view(12, 8), None, None, torch.tensor([0, 5, 5, 12])
        compiled(layer, backend)(*pack).sum().backward()
        assert any("searchsorted" in target for target in targets)
    assert any("plan_permutation" in target for target in targets)
    for op in ("_local_scalar_dense", "nonzero", "aten.item", "aten.scatter"):
        assert not [target for target in targets if op in target]


@pytest.mark.parametrize("name", VARIANTS)
def test_compile_needs_no_numbers(name):
    """On the meta device a layer gives shapes and dtypes, also under the autocast of another."""
    config = VARIANTS[name]
    with torch.device("meta"):
        layer = MoELayer(config)
    x = torch.empty(6, 2, 8, dtype=config.params_dtype, device="meta", requires_grad=True)
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            y = layer(x)
        found = y, *grads(y, [x, *layer.parameters()])
        for given, tensor in zip([x, x, *layer.parameters()], found, strict=True):
            assert tensor.is_meta and [tensor.shape, tensor.dtype] == [given.shape, given.dtype]


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
    out = out + combine_rows(gathered, plan) @ w[0].t()
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


def second_derivatives():
    """(name, function of one tensor, its argument): what is public and has a gradient."""
    plan = plan_permutation(random_indices(6, 4, 2), 4)
    routing_map = torch.rand(6, 4) < 0.5
    fc1, fc2 = leaf(4, 2, 5, 8), leaf(4, 8, 5)
    for kind in kernels.ACTIVATIONS:
        yield kind, lambda y, kind=kind: activation(y, kind), leaf(6, 8)
    yield "swiglu_back", lambda y: swiglu_back(y[:, :4], y), leaf(6, 8)
    yield "expert_mlp", lambda x: expert_mlp(x, torch.rand(6, 2), plan, fc1, fc2), leaf(6, 8)
    yield "grouped_mm", lambda x: grouped_mm(x.square(), fc2, plan.offsets), leaf(12, 8)
    yield "gather_rows", lambda x: gather_rows(x, plan), leaf(6, 8)
    yield "combine_rows", lambda x: combine_rows(x, plan, torch.rand(6, 2)), leaf(12, 8)
    yield "route", lambda x: topk_routing_with_score_function(x, 2)[0], leaf(6, 4)
    yield "z_loss", lambda x: z_loss_func(x, 0.1), leaf(6, 4)
    yield "permute", lambda x: permute(x, routing_map)[0], leaf(6, 8)
    yield "unpermute", lambda x: unpermute(x, torch.arange(6) // 2, (3, 8)), leaf(6, 8)
    yield "chunks", lambda x: sort_chunks_by_idxs(x, plan.counts[:1], plan.counts[:1] * 0)[0], leaf(
        int(plan.counts[0]), 8)
    yield "gate", lambda x: kernels.router_gating_linear(
        x, fc2[0].t(), bias=None, router_dtype=torch.float64), leaf(6, 8)
    yield "shared", SharedExpertMLP(exact_config(), gate=True), leaf(6, 6)
    yield "router", TopKRouter(exact_config()).gating, leaf(6, 6)
    yield "layer", exact_layer(), leaf(6, 6)


@about_the_cpu("its products are ops of grouped.py")
def test_compile_selective_checkpoints_repeat_no_product():
    """A trainer's checkpoint that keeps products makes only elementwise code again."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    layer = small_layer()
    products = [getattr(torch.ops.moe_grouped, name).default
                for name in ("rows_times_weights", "rows_times_rows")]
    kept = [*products, torch.ops.moe_kernels.product_in.default, torch.ops.aten.topk.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.ops += [op] if op in products else []
            return op(*args, **kwargs or {})

    x = fp32_leaf(7, 8)
    with Count() as plain:
        agree(layer, layer, x, tol=0)
    with Count() as again:
        agree(of_module(layer, lambda layer, x: checkpoint(
            layer, x, use_reentrant=False, context_fn=contexts)), layer, x, tol=0)
    assert len(plain.ops) == len(again.ops) == 2 * 6


def test_compile_second_derivatives_are_right_or_refused():
    """Where a backward is written by hand, autograd would take what is kept for constants. So these
    are right, or an error of this project, and never a number that is wrong."""
    refused = []
    for name, function, x in second_derivatives():
        def slope(x):
            return torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)[0]
        with about(name):
            try:
                got, = torch.autograd.grad(slope(x).square().sum(), x)
            except RuntimeError as failed:
                assert "this project has only first derivatives" in str(failed)
                refused.append(name)
                continue
            v = torch.randn_like(x)                          # along v, by differences
            up, down = [torch.autograd.grad(function(y).sin().sum(), y)[0].square().sum()
                        for y in (x + 1e-5 * v, x - 1e-5 * v)]
            close((got * v).sum(), (up - down) / 2e-5, 1e-5)
    assert refused == [
        "swiglu_back", "expert_mlp", "grouped_mm", "gather_rows", "combine_rows", "route", "z_loss",
        "gate", "router", "layer"]
    function = compiled(exact_layer())
    x = leaf(6, 6)
    with pytest.raises(RuntimeError, match="double backward|create_graph"):
        slope, = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        slope.sum().backward()


@slow
def test_compile_every_kernel():
    """Every function of kernels.py is in one dynamic graph, forward and backward, for T >= 2."""
    function = compiled(all_kernels)
    for T in (9, 2, 31, 4096):
        torch.manual_seed(T)
        shapes = (T, 6), (T, 4), (T, 8), (4, 6, 6)
        args = [fp32_leaf(*shape) for shape in shapes]
        for tensor in args[:3]:
            torch._dynamo.mark_dynamic(tensor, 0)
        agree(function, all_kernels, tuple(args), tol=1e-4)
    assert graphs_made() == 1


@pytest.mark.parametrize("name", slow_but(
    ["dropping"], [*CONFIGS, "losses and a capacity"]))
def test_compile_export_with_dynamic_T(name):
    """Export takes the length of an axis for symbolic where it is `x.shape[0]`, and for a constant
    where it is `len(x)`."""
    fields = CONFIGS.get(name, dict(LOSSES, capacity_factor=0.8))
    layer = small_layer(**{"shared_expert_intermediate_size": 8, **fields})
    K = layer.config.topk
    for training, masked, given, flat in itertools.product([False, True], repeat=4):
        def inputs(n):
            axes = [n] if flat else [n, 3]
            x = torch.randn(*axes, 8)
            mask = torch.rand(axes) < 0.2 if masked else None
            choice = random_indices(math.prod(axes), 6, K).view(*axes, K) if given else None
            return x, mask, choice

        layer.train(training)
        first = {0: torch.export.Dim("length", min=1, max=65536)}
        shapes = first, first if masked else None, first if given else None
        with about(f"training {training}, masked {masked}, given {given}, flat {flat}"):
            program = torch.export.export(layer, inputs(12), dynamic_shapes=shapes)
            for n in (1, 5, 300):
                args = inputs(n)
                same(program.module()(*args), layer(*args))


def test_compile_ops_pass_opcheck():
    indices = random_indices(9, 4, 2)
    plan = plan_permutation(indices, 4)
    token = plan.order // 2
    offsets = plan.offsets
    x, w, b = torch.randn(9, 8), torch.randn(4, 6, 8), torch.randn(4, 6)
    h = torch.randn(18, 6)
    many = torch.arange(1, 17, dtype=torch.int32)            # offsets of sixteen experts
    of_many = torch.randn(16, 8, 6)
    _, index = grouped._read_in_batches(many, 18)
    for op, *args in [
            (kernels._plan_permutation, indices, 4),
            (kernels.copy_after, torch.ones(()), x),
            (maps._place_by_key, x),
            (kernels.scatter_columns, torch.rand(9, 2), indices, 4),
            (kernels.scatter_columns, indices, indices, 4, 7),
            (kernels._sinkhorn, x, 1e-4, None),
            (grouped._rows_times_weights, x, token, w.transpose(1, 2), b, offsets, None),
            (grouped._rows_times_weights, h, None, w, None, offsets, None),
            (grouped._rows_times_rows, x, token, h, None, offsets, None),
            (grouped._rows_times_rows, h, None, x, token, offsets, None),
            (grouped._read_in_batches, offsets, 18),
            (grouped._read_in_batches, many, 18),
            (grouped._rows_times_weights, x, token, of_many, None, many, index),
            (grouped._rows_times_rows, x, token, h, None, many, index),
            (kernels._product_in, torch.randn(4, 9), x, torch.float64, torch.float32),
            (kernels._rounded_scores, x.bfloat16(), "sqrtsoftplus"),
            (kernels.rounded, x, torch.bfloat16),
            (kernels.count_experts, indices, 4),
            (kernels._sum_tokens, x),
            (kernels._sum_weighted, x, torch.rand(8), None),
            (kernels.sequence_counts, torch.rand(18, 4) < 0.5, token % 3, 3),
            (grouped._block_sums, h, offsets, None),
            (router_file._write, torch.zeros(4), torch.ones(4), x, True),
            (router_file._running_mean, torch.zeros(4), torch.zeros(()), torch.ones(4))]:
        torch.library.opcheck(op, args)


def test_compile_ops_that_decide_on_the_host_stay_out_of_cuda_graphs():
    on_host = {op._name for op in OWN_OPS if torch.Tag.cudagraph_unsafe in op._opoverload.tags}
    assert sorted(on_host) == [
        "block_sums", "read_in_batches", "rows_times_rows", "rows_times_weights", "write"]


def test_compile_private_names_of_torch(monkeypatch):
    """What the section of this name in compat.py relies on, each by its effect or its absence."""
    assert kernels.as_number(2.5) == 2.5
    function = torch.compile(
        lambda x, by: x * math.ceil(kernels.as_number(by)), backend="eager", fullgraph=True,
        dynamic=True)
    for by in (1.5, 2.5):
        same(function(torch.ones(2), by), torch.full((2,), float(math.ceil(by))))
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(compat.cpu_multiplies_in(dtype), bool)
        with monkeypatch.context() as without:
            without.setattr(torch.backends.mkldnn, "is_available", lambda: False)
            assert compat.cpu_multiplies_in(dtype) is False

    one = torch.ones(1, 1, device="cpu")
    assert not compat.is_any_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compat.is_any_autocast() and (one @ one).dtype == torch.bfloat16
        with compat.op_without_autocast():
            assert (one @ one).dtype == torch.float32

    x = leaf(4, 3)
    assert x.sin().view(12)._is_view() and not compat.as_no_view(x.sin(), (12,))._is_view()
    assert compat.with_fixed_address(torch.zeros(2))._dynamo_static_input_type == "unguarded"
    assert compat.with_fixed_address(torch.zeros(2))._dynamo_static_indices == {0}
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2)
    assert compat.has_values(x) and not compat.has_values(fake)
    assert not compat.has_values(x.to("meta"))
    with compat.reads_on_host():
        assert torch._dynamo.config.capture_scalar_outputs
    assert not torch._dynamo.config.capture_scalar_outputs and not compat.makes_cuda_graphs()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert compat.makes_cuda_graphs()

    ran = []
    first, second = x.sin(), x.cos()
    for name, y in (("first", first), ("second", second)):
        y.register_hook(lambda grad, name=name: ran.append((name, compat.in_backward())))
    assert compat.backward_order(second.grad_fn) > compat.backward_order(first.grad_fn)
    compat.set_backward_order(first.grad_fn, compat.backward_order(second.grad_fn) + 1)
    (first * second).sum().backward()
    assert ran == [("first", True), ("second", True)] and not compat.in_backward()

    class Keeper(torch.nn.Module):
        @compat.writes_to_module
        def keep(self, x):
            self.kept = x

        def forward(self, x):
            self.keep(x.sin())
            return x.cos()
    keeper = Keeper()
    torch.compile(checkpointed(keeper, False), backend="eager", fullgraph=True)(x)
    same(keeper.kept, x.sin())


def no_float64(name, args, out) -> None:
    """A device without float64, as Apple's and Intel's: refused in every op."""
    for x in torch.utils._pytree.tree_leaves((args, out)):
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            raise TypeError(f"{name}: this device has no float64")


@pytest.mark.parametrize("name", VARIANTS)
def test_compile_nothing_is_float64_without_a_float64_input(name):
    """pytorch #122602, torch-xpu-ops #1742: forward, backward, both bias updates and metrics."""
    config = dataclasses.replace(VARIANTS[name], shared_expert_overlap=True)
    with Watch(no_float64, inside=True):
        with pytest.raises(TypeError, match="no float64"):
            kernels.copy_after(torch.ones(2).double(), torch.ones(2))
        layer = MoELayer(config)
        x = leaf(5, 3, 8, dtype=config.params_dtype)
        layer(x, torch.rand(5, 3) < 0.2).sum().backward()
        assert sharding.gradient_norm(layer, None).dtype == torch.float32
        update_expert_bias(layer)
        layer.router.reset_global_aux_loss_tracker()
        load_balancing_metrics(layer, reduce=True)
        with record_routing(layer) as record:
            layer.eval()(x)
        with replay_routing(layer, record.indices):
            layer(x)
        there_and_back(x[0], torch.ones(3, 2).bool(), torch.rand(3, 2), 5)


def imported_as(name: str, module, monkeypatch):
    """The module from its file once more, under another name."""
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, again)
    spec.loader.exec_module(again)
    return again


def test_compile_kernels_under_a_name_with_a_hyphen(monkeypatch):
    """Op names are made of the module's name, whatever it is."""
    module = imported_as("my-kernels", kernels, monkeypatch)
    assert module.plan_permutation(torch.tensor([[1], [0]]), 2).order.tolist() == [1, 0]
    op = torch.ops.moe_my_kernels.plan_permutation.default
    assert op.name() == "moe_my_kernels::plan_permutation"


# ---- On a card ----
# What a card owes. A real one runs these tests with DEVICE=cuda, and so does the emulated one.

def is_native(dtype) -> bool:
    """Whether torch's grouped product reads the offsets on this card."""
    return dtype == torch.bfloat16 and grouped._cuda_generation(torch.device(DEVICE)) in (9, 10)


def syncs_of(step) -> int:
    """How often a step makes the host wait for the card."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def launches_of(step) -> int:
    """Launches of ops in a step on the emulated card. The generated kernels are not in it."""
    import card_device
    before = card_device.launches()
    step()
    return card_device.launches() - before


def check_near(got, want, tol: float) -> None:
    """Tensors of a card and of the oracle: the norm of the difference is small beside theirs."""
    for a, b in zip(got, want, strict=True):
        difference = (a.detach().cpu().double() - b).norm()
        assert difference <= tol * (b.norm() + 1e-3), (difference, b.norm(), list(b.shape))


def card_config(**fields) -> MoEConfig:
    """Widths that torch's grouped product takes in bf16."""
    return MoEConfig(**{**dict(
        hidden_size=32, ffn_hidden_size=24, num_experts=8, topk=3, init_std=0.3,
        shared_expert_intermediate_size=16, shared_expert_gate=True, shared_expert_overlap=True,
        batch_first=False), **fields})


def exact_loop(layer: MoELayer, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Oracle of a step on a card: output, gradients of x and of the parameters, on the CPU in fp64,
    from the same rounded values."""
    layer = copy.deepcopy(layer).cpu().double()
    x = x.detach().cpu().double().requires_grad_()
    probs, indices, loss = RouterLoop(layer.router)(x, mask.cpu())
    y = layer_loop(layer, x, probs, indices)
    total = (y * y.detach()).sum() + loss
    return [y, *torch.autograd.grad(
        total, [x, *layer.parameters()], materialize_grads=True, allow_unused=True)]


CARD_VARIANTS = {
    **{name: {**fields, "latent_size": fields.get("latent_size") and 16}
       for name, fields in CONFIGS.items()},
    "bias and groups": dict(CONFIGS["bias and groups"], activation="geglu", glu_linear_offset=0.5),
    "fp8": dict(activation_fp8_input_store=True),
}
# In fp8 rounding is coarse. In bf16 it takes values over the bound of a clamp, where the gradient
# jumps.
COARSE = {
    ("fp8", torch.bfloat16): 0.1, ("fp8", torch.float32): 0.1, ("gpt_oss", torch.bfloat16): 0.2}


@on_a_card
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", CARD_VARIANTS)
def test_card_layer_matches_loop(name, dtype, tol):
    """Eager and compiled, one graph for two T, with padding: the fp64 loop, the same bits again,
    and a sync a step at most."""
    layer = random_layer(card_config(**CARD_VARIANTS[name], params_dtype=dtype)).to(DEVICE)
    native = is_native(dtype)
    for function in (layer, compiled(layer, "inductor", dynamic=True)):
        for S in (10, 19):
            x = torch.randn(S, 2, 32).to(DEVICE, dtype).requires_grad_()
            mask = (torch.rand(S, 2) < 0.2).to(DEVICE)
            want = exact_loop(layer, x, mask)
            upstream = want[0].to(DEVICE, dtype)

            def step():
                x.grad = None
                layer.zero_grad()
                layer.router.reset_global_aux_loss_tracker()
                y = function(x, mask)
                y.backward(upstream)
                return [y, *[p.grad for p in (x, *layer.parameters())]]
            with about(name, type(function), S):
                got = step()
                check_near(got, want, COARSE.get((name, dtype), tol))
                same(step(), got)
                assert syncs_of(step) == (0 if native else 1)
    assert graphs_made() == 1


@on_a_card
def test_card_under_autocast():
    """An fp32 layer: the experts in bf16, the router as without autocast."""
    layer = random_layer(card_config(**CARD_VARIANTS["losses"])).to(DEVICE)
    x = torch.randn(10, 2, 32).to(DEVICE).requires_grad_()
    mask = torch.zeros(10, 2, dtype=torch.bool)
    want = exact_loop(layer, x, mask)
    logits = layer.router.gating(x)
    for function in (layer, compiled(layer, "inductor")):
        with torch.autocast(DEVICE, torch.bfloat16):
            same(layer.router.gating(x), logits)
            y = function(x, mask.to(DEVICE))
        assert y.dtype == torch.float32
        got = torch.autograd.grad(y, [x, *layer.parameters()], want[0].to(y))
        check_near([y, *got], want, 3e-2)


@on_a_card
def test_card_keeps_as_little():
    check_keeps_little(None, "inductor")


@on_a_card
@pytest.mark.parametrize("E, K", [(8, 2), (64, 8), (256, 8)])
def test_card_batches_launch_little(E, K):
    """In fp32, for which no card has a product of torch's that reads the offsets itself. Compiled
    and eager equal the CPU, and themselves to the bit. One sync a step."""
    T, H, F_ = 128, 16, 8
    weights = torch.randn(E, 2, F_, H), torch.randn(E, H, F_)
    x, probs = torch.randn(T, H), torch.rand(T, K)

    def ours(x, probs, indices, fc1, fc2):
        return expert_mlp(x, probs, plan_permutation(indices, E), fc1, fc2)

    def run(function, leaves, indices):
        out = function(*leaves[:2], indices, *leaves[2:])
        return [out, *grads(out, leaves)]
    on_cpu, on_the_card = [
        [t.detach().to(device).requires_grad_() for t in (x, probs, *weights)]
        for device in ("cpu", DEVICE)]
    function = compiled(ours, "inductor")
    for load, indices in loads(T, E, K).items():
        with about(load):
            want = run(ours, on_cpu, indices)
            for way in (ours, function):
                step = functools.partial(run, way, on_the_card, indices.to(DEVICE))
                got = step()
                close([t.cpu() for t in got], want, 1e-4)
                same(step(), got)
                assert syncs_of(step) == 1
            if EMULATED:                                # 20 are for the rest of a layer
                most = 200 if load in ("even", "random") else 300
                assert launches_of(step) <= most - 20, launches_of(step)


@on_a_card
def test_card_peak_of_a_step():
    """In bf16, compiled: 80 MiB on an H100, less in batches. Eager mode, which casts all rows to
    fp32 at once, needs 218."""
    T, H, F_, E, K = 2048, 512, 256, 64, 8
    new = functools.partial(torch.zeros, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    x, fc1, fc2 = new(T, H), new(E, 2, F_, H), new(E, H, F_)
    probs = torch.rand(T, K, device=DEVICE, requires_grad=True)
    indices = torch.rand(T, E, device=DEVICE).topk(K).indices

    @functools.partial(compiled, backend="inductor")
    def experts(x, probs, indices, fc1, fc2):
        return expert_mlp(x, probs, plan_permutation(indices, E), fc1, fc2)
    for _ in range(2):                                   # the first step makes cuBLAS its memory
        x.grad = fc1.grad = fc2.grad = probs.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        experts(x, probs, indices, fc1, fc2).sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 84.5 * 2 ** 20


@on_a_card
@over_ranks(2)
def test_card_over_ranks(rank, ranks):
    """Experts over two ranks beside the shared expert, uneven T and T = 0, eager and compiled. (On
    a real card the ranks are on CPUs.)"""
    fp32 = dict(params_dtype=torch.float32, router_dtype=torch.float32)
    layer = overlapped_layer(fp32, ep=ranks).to(RANK_DEVICE)
    function = compiled(layer, "inductor")
    for T in ([20, 31], [40, 18], [25, 0]):
        x = torch.randn(T[rank], 6).to(RANK_DEVICE).requires_grad_()
        agree(function, layer, x, tol=1e-5)


@on_a_card
@pytest.mark.skipif(EMULATED, reason="the emulated card has no time")
def test_card_overlap_is_side_by_side():
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
        y, grad_x, *others = outcome(two, x)
        want_y, want_grad_x, *want_others = outcome(one, x)
        same([y, *others], [want_y, *want_others])
        close(grad_x, want_grad_x, 2e-2)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        two(x).sum().backward()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type.name == "CUDA"]
    spans = [(e.time_range.start, e.time_range.end, e.device_resource_id) for e in events]
    pairs = [(a, b) for a, b in itertools.product(spans, spans) if a[2] != b[2]]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs)


big_card = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] >= 60 << 30


@pytest.mark.skipif(not big_card, reason="no CUDA device of 60 GiB")
def test_card_permutes_rows_beyond_two_to_the_31_elements():
    T, K, H = 1 << 16, 8, 8192                               # 2^32 elements
    values = torch.arange(T, device="cuda").remainder(251).bfloat16()
    tokens = values[:, None].expand(T, H).contiguous()
    plan = plan_permutation(torch.arange(K, device="cuda").repeat(T, 1), K)
    for how in (lambda function: function, lambda function: compiled(function, "inductor")):
        rows = how(gather_rows)(tokens, plan)
        same(rows[-3:, -1].cpu(), tokens[-3:, -1].cpu())
        same(how(combine_rows)(rows, plan)[-3:, -1].cpu(), (tokens[-3:, -1] * K).cpu())
