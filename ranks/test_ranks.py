"""Tests of the layer over several ranks: parallel.py and sharding.py, in processes of one gloo
group on this machine; over many ranks in threads of one process.

    python -m pytest ranks/test_ranks.py
    python -m pytest ranks/test_ranks.py -k test_groups_      one section, by its tests' first word

The words: groups, shared, parallel. It needs test_moe.py and the layer's seven files in the folder
above.
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
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

if __package__ in ("", "ranks"):             # beside the flat files of the layer
    import moe
    from kernels import combine_rows, gather_rows, plan_permutation
    from moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics)
    from ranks import parallel, sharding
    from ranks.parallel import ProcessGroups
    from ranks.sharding import reduce_gradients
    from test_moe import (
        BIASED, CONFIGS, DEVICE, EMULATED, LOSSES, LOSS_TYPES, QUANTILE, SlopePerExpert, Watch,
        about, about_the_cpu, agree, check_error_table, checkpointed, close, compiled, counts_of,
        error, exact_config, exact_layer, fp32_leaf, fresh_start, graphs_made, in_steps,
        integers_used, leaf, on_device, random_indices, run_as, same, saved_bytes, slow,
        small_config)
else:                                        # the layer is a package
    from .. import moe
    from ..kernels import combine_rows, gather_rows, plan_permutation
    from ..moe import (
        MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, finish_step,
        load_balancing_metrics)
    from ..test_moe import (
        BIASED, CONFIGS, DEVICE, EMULATED, LOSSES, LOSS_TYPES, QUANTILE, SlopePerExpert, Watch,
        about, about_the_cpu, agree, check_error_table, checkpointed, close, compiled, counts_of,
        error, exact_config, exact_layer, fp32_leaf, fresh_start, graphs_made, in_steps,
        integers_used, leaf, on_device, random_indices, run_as, same, saved_bytes, slow,
        small_config)
    from . import parallel, sharding
    from .parallel import ProcessGroups
    from .sharding import reduce_gradients

RANK_DEVICE = DEVICE if EMULATED else "cpu"          # ranks talk over gloo


# ---- Processes of a group ----

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


def in_threads(ranks: int, function) -> list:
    """[function(rank), ..]. The ranks are threads of this process in the group that torch's own
    tests use, so there may be hundreds. They share what is global, such as the random generator.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded
    results, errors = [None] * ranks, []
    store = torch.distributed.HashStore()

    def run(rank):
        try:
            torch.distributed.init_process_group(
                "threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = function(rank)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        except BaseException as failed:
            errors.append(failed)
            threaded.ProcessLocalGroup.exception_handle(failed)      # ends those that wait for it

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(ranks)]
    if not hasattr(threaded.ThreadLocalWorld, "comms"):
        threaded.ThreadLocalWorld.comms = []                 # torch 2.11 reads it, and lacks it
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads), "ranks hang"
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results


def mesh_of(**sizes: int):
    """mesh_of(dp=2, ep=2): dp is the outer dim."""
    names = tuple(sizes)
    return torch.distributed.init_device_mesh(
        RANK_DEVICE, tuple(sizes.values()), mesh_dim_names=names)


def groups_over(**sizes: int) -> ProcessGroups:
    """The groups of mesh_of."""
    return ProcessGroups.from_mesh(mesh_of(**sizes))


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
    for changes in ([2, -1], [1, -2, 1], [-1, 2, -1]):       # Σ place · change is 0, too
        drifted = model_of()
        if rank == 2:
            bits = drifted[1].router.weight.data.view(torch.int64).flatten()
            bits[:len(changes)] += torch.tensor(changes)
        with about(changes):
            names, text = found(drifted)
            assert names == ["1.router.weight"] and "on ranks [0, 1, 3] and [2]" in text
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


class WithPReLU(moe.Experts):
    """Experts whose activation is a module: with one number, and with some for each expert."""
    sharded = {**moe.Experts.sharded, "act.slopes": ("ep", 0, "expt_dp")}

    def __init__(self, config, pg_collection=None):
        super().__init__(config, pg_collection)
        self.act = torch.nn.PReLU(dtype=config.params_dtype)
        self.act.slopes = torch.nn.Parameter(torch.arange(len(self.fc2), dtype=torch.float64))

    def activate(self, y):
        return self.act(y)


def layer_with_prelu(config, pg_collection=None):
    layer = MoELayer(config, pg_collection)
    layer.experts = WithPReLU(config, pg_collection)
    return layer


def layer_with_slopes(config, pg_collection=None):
    layer = MoELayer(config, pg_collection)
    layer.experts = SlopePerExpert(config, pg_collection)
    return layer


@over_ranks(2)
def test_groups_activate_with_a_parameter_for_every_expert(rank, ranks):
    """It gets the numbers of this rank's experts. One that no table names is refused: gradients of
    different experts would be summed."""
    groups = groups_over(ep=2)
    config = exact_config(
        activation="relu2", num_experts=6, shared_expert_intermediate_size=None)
    whole, mine = whole_and_mine(config, groups, layer_with_slopes)
    mine.load_state_dict(whole.state_dict())
    inputs = [leaf(9, 6) for _ in range(ranks)]
    for x in inputs:
        want = whole(x)
        want.sin().sum().backward()
        if x is inputs[rank]:
            close(mine(x.detach()), want)
    mine(inputs[rank].detach()).sin().sum().backward()
    reduce_gradients(mine)
    slope = mine.experts.slope.grad
    close(slope, own_part("experts.slope", whole.experts.slope.grad, groups))
    assert slope.shape == (3,) and whole.experts.slope.grad.unique().numel() == 6
    with torch.no_grad():
        for x in torch.randn(3, 1, 6, dtype=torch.float64):
            close(compiled(mine)(x), whole(x))

    _, mine = whole_and_mine(config, groups)
    mine.experts.other = torch.nn.Parameter(torch.zeros(3))
    text = error(mine, inputs[rank])
    assert text.startswith("ValueError: other has shape [3], and there are 3 experts; if it"), text


@over_ranks(2)
def test_groups_activate_under_fsdp(rank, ranks):
    """FSDP2 gathers the parameters of `activate` anew for the backward: the same ones to it."""
    def layer_of(config, pg_collection=None):
        layer = MoELayer(config)
        layer.experts = SlopePerExpert(config)
        return layer
    whole, mine = whole_and_mine(exact_config(activation="relu2"), None, layer_of)
    mesh = mesh_of(world=ranks)
    fully_shard(mine.experts, mesh=mesh)
    fully_shard(mine, mesh=mesh)
    x = leaf(8, 6)
    for _ in range(2):
        mine(x.detach().chunk(ranks)[rank]).sin().sum().backward()
        whole(x).sin().sum().div(ranks).backward()
    for a, b in zip(mine.parameters(), whole.parameters(), strict=True):
        close(a.grad.full_tensor(), b.grad)


@over_ranks(4)
def test_groups_own_a_module_inside_the_experts(rank, ranks):
    """Its parameters are the experts': whole on every rank, unless `sharded` names them by their
    path. Gradients, norm, comparison, state dicts and moments."""
    groups = groups_over(dp=2, ep=2)
    whole, mine = whole_and_mine(exact_config(activation="relu2"), groups, layer_with_prelu)
    whole.experts.act.slopes.grad = torch.ones(4, dtype=torch.float64)
    mine.experts.act.slopes.grad = torch.full((2,), 0.5, dtype=torch.float64)
    inputs = [leaf(3, 2, 6) for _ in range(ranks)]
    for x in inputs:
        whole(x).sin().sum().backward()
    mine(inputs[rank].detach()).sin().sum().backward()
    reduce_gradients(mine)
    act, of_whole = mine.experts.act, whole.experts.act
    close([act.weight.grad, act.slopes.grad], [of_whole.weight.grad, of_whole.slopes.grad[:2]])
    close(sharding.gradient_norm(mine, groups), sharding.gradient_norm(whole, None))

    optimizer = torch.optim.Adam(mine.parameters())
    optimizer.step()
    finish_step(mine, check_replicas=True)
    state = sharding.sharded_state_dict(mine, optimizer)
    for name in ("experts.act.weight", "optimizer.experts.act.weight.exp_avg"):
        assert not isinstance(state[name], DTensor)
    for name in ("experts.act.slopes", "optimizer.experts.act.slopes.exp_avg"):
        assert state[name].placements == (Shard(0),)
    mine.load_state_dict(whole.state_dict())
    same(act.slopes, own_part("experts.act.slopes", of_whole.slopes, groups))

    if rank == 3:
        act.weight.data.add_(1.0)
    text = error(finish_step, mine, check_replicas=True)
    assert "1 tensors" in text and "experts.act.weight on ranks [0, 1, 2] and [3]" in text


class ParamWrapper(torch.nn.Module):
    """As PEFT's: adapters for experts, of rank 3 for each, in a module around them."""

    def __init__(self, base_layer, experts: int = 2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(6, 3 * experts, bias=False)
        self.lora_B = torch.nn.Linear(3 * experts, 5, bias=False)


class OwnWrapper(moe.MoEModule):
    """The same, and it says how ranks hold them."""
    sharded = {"adapters.lora_A.weight": ("ep", 0, "expt_dp"),
               "adapters.lora_B.weight": ("ep", 1, "expt_dp")}

    def __init__(self, experts):
        super().__init__(experts.config, experts.pg_collection)
        self.base_layer = experts
        self.adapters = ParamWrapper(None)


@over_ranks(2)
def test_groups_refuse_adapters_around_experts(rank, ranks):
    """A rank's adapters are for its own experts, and nothing says so. Summed over all ranks, those
    of different experts would learn the same."""
    def layer_of(wrap, **sizes):
        layer = MoELayer(exact_config(), groups_over(**sizes))
        layer.experts = wrap(layer.experts)
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1)
        return layer

    for wrap in (ParamWrapper, lambda experts: ParamWrapper(ParamWrapper(experts))):
        layer = layer_of(wrap, ep=2)
        optimizer = torch.optim.Adam(layer.parameters())
        for function, *args in [
                (reduce_gradients, layer), (sharding.gradient_norm, layer, layer.pg_collection),
                (sharding.sharded_state_dict, layer, optimizer),
                (functools.partial(finish_step, check_replicas=True), layer)]:
            text = error(function, *args)
            assert text.startswith("ValueError: experts."), text
            assert "lora_A.weight is in ParamWrapper, around weights that ranks share out" in text

    block = torch.nn.Module()                    # of a live model, adapted after replace_blocks
    block.experts = torch.nn.Linear(6, 2)
    for module in block.modules():
        sharding.share_out(module, groups_over(ep=2), over_ep=module is block.experts)
    block.experts = ParamWrapper(block.experts)
    model = torch.nn.ModuleDict(dict(block=block, norm=torch.nn.LayerNorm(6)))
    assert "block.experts.lora_A.weight is in Param" in error(reduce_gradients, model)

    whole = layer_of(ParamWrapper, dp=2)                 # each rank has all experts
    reduce_gradients(whole)
    assert (whole.experts.lora_A.weight.grad == 3).all()
    own = layer_of(OwnWrapper, ep=2)
    reduce_gradients(own)
    assert (own.experts.adapters.lora_B.weight.grad == rank + 1).all()
    assert (own.router.weight.grad == 3).all()
    state = own.state_dict()
    assert state["experts.adapters.lora_A.weight"].shape == (12, 6)
    assert state["experts.adapters.lora_B.weight"].shape == (5, 12)


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


class TwoRanks:
    """A group of two ranks, for what only asks for its size."""
    def size(self):
        return 2

    def rank(self):
        return 0


def test_groups_over_two_ranks_without_communication():
    """What tp refuses; and a loss without valid_token_count counts the rows of both ranks."""
    def over_tp(**fields):
        return TopKRouter(small_config(**fields), ProcessGroups(tp=TwoRanks()))
    check_error_table("""
        over_tp() => is False and batch_first is False; needs sequence_parallel=True and batch_firs
        over_tp(sequence_parallel=True, batch_first=True) => is True and batch_first is True; needs
        """, over_tp=over_tp)
    over_tp(sequence_parallel=True)

    router = TopKRouter(
        small_config(calculate_per_token_loss=True, z_loss_coeff=0.5),
        ProcessGroups(tp_cp=TwoRanks()))
    x, loss = torch.ones(5, 3, requires_grad=True), torch.tensor(0.25, requires_grad=True)
    router.attach_and_log_load_balancing_loss(
        x, 0.5, aux_loss=loss, aux_loss_name="z_loss", reduce_group=None).sum().backward()
    assert loss.grad == 10 and router.counts.z_loss == 0.5


# ---- Shared expert ----

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


def test_parallel_padded_plan():
    """Its rows are those of the plan with zeros behind each expert's, and both combine to the same,
    with int64 indices: see test_permute_index_times_width_is_int64."""
    plan = plan_permutation(random_indices(6, 3, 2, nowhere=0.3), 3)
    x, probs = fp32_leaf(6, 8), torch.rand(6, 2)
    rows = [*gather_rows(x, plan).split(plan.counts.tolist() + [12 - int(plan.counts.sum())])]

    def run():
        padded = parallel.pad_plan(plan, 7)
        got = gather_rows(x, padded)
        same(got, torch.cat([*[parallel._extend(r, 7) for r in rows[:3]], torch.zeros(1, 8)]))
        y = combine_rows(got, padded, probs)
        same(y, combine_rows(torch.cat(rows), plan, probs))
        y.sum().backward()
    seen = integers_used(run)
    assert set().union(*seen.values()) <= {torch.int64, torch.bool, torch.float32}, seen


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
        # Tokens and probs to the ranks; rows to the experts and from there; the way back; and rows
        # to the experts once more, in the backward.
        to_ranks, to_experts = T * D + 1, assignments + 1
        assert made == [to_ranks, to_ranks, to_experts, to_experts, to_ranks, to_experts]
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


@slow
@about_the_cpu("so is the group of threads")
@pytest.mark.parametrize("experts, sizes", [
    (256, dict(ep=64)), (256, dict(dp=8, ep=8)), (64, dict(ep=64))])
def test_parallel_layer_over_many_ranks(experts, sizes, tmp_path):
    """A step of DeepSeek-V3's routing, with the global loss, is that of one process: outputs,
    gradients, counts, biases. What it saves is loaded at 8 ranks. Every seventh rank has no token.
    """
    ranks = math.prod(sizes.values())
    config = exact_config(
        num_experts=experts, topk=8, num_groups=8, group_topk=4, score_function="sigmoid",
        enable_expert_bias=True, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    whole = MoELayer(config)
    first = copy.deepcopy(whole.state_dict())
    inputs = [leaf(rank % 7, 1, 6) for rank in range(ranks)]
    y = whole(torch.cat(inputs))
    y.sin().sum().backward()
    outputs = y.split([len(x) for x in inputs])
    of_whole = load_balancing_metrics(whole)

    def end_step(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        finish_step(layer, check_replicas=True)
        return sharding.sharded_state_dict(layer, optimizer)       # momentum: the gradients

    def step(rank):
        layer = MoELayer(config, groups_over(**sizes))
        layer.load_state_dict(first)
        x = inputs[rank].detach().requires_grad_()
        y = layer(x)
        y.sin().sum().backward()
        close([y, x.grad], [outputs[rank], inputs[rank].grad])
        reduce_gradients(layer)
        of_ranks = load_balancing_metrics(layer, reduce=True)
        for name in ("tokens_per_expert", "global_load_balancing_loss"):
            close(of_ranks[name], of_whole[name], 0 if "tokens" in name else 1e-6)
        for name, parameter in layer.named_parameters():
            with about(name):
                want = own_part(name, whole.get_parameter(name).grad, layer.pg_collection)
                close(parameter.grad, want)
        dcp.save(end_step(layer), checkpoint_id=tmp_path)

    in_threads(ranks, step)
    want = end_step(whole)
    assert want["router.expert_bias"].unique().numel() > 1

    def load(rank):
        layer = MoELayer(config, groups_over(ep=8))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        state = sharding.sharded_state_dict(layer, optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        for name, tensor in state.items():
            with about(name):
                close(full(tensor), want[name], 0 if "bias" in name else 1e-9)
    in_threads(8, load)


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
    fields = dict(options, sequence_parallel=True, batch_first=None)     # [T, H] is one sequence
    layer = MoELayer(exact_config(**fields), groups_over(**{dim: ranks}))
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
