"""Tests of the layer in other people's trainers: checkpoints, frozen parameters, state dicts, DDP,
FSDP2, LoRA, pipelines.

    python -m pytest tests/test_trainers.py
"""
import copy
import dataclasses
import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

from moe import (
    MoELayer, SharedExpertState, TopKRouter, finish_step, load_balancing_metrics,
    set_aux_loss_scale, update_expert_bias)
from ranks import sharding
from ranks.parallel import ProcessGroups
from ranks.sharding import reduce_gradients
from ranks.test_ranks import full, mesh_of, over_ranks, own_part
from test_moe import (
    BIASED, DEVICE, LOSSES, QUANTILE, QUICK_WAYS, WAYS, Watch, about, about_the_cpu, agree, best,
    close, compiled, counts_of, error, exact_config, exact_layer, fp32_leaf, fresh_start, grads,
    graphs_made, hooked, leaf, on_device, outcome, run_as, same, saved_bytes, slow, slow_but,
    small_config, small_layer)


# ---- Checkpoints: what is counted, and once ----

@pytest.mark.parametrize("way", slow_but(
    ["plain", "reentrant", "non-reentrant", "compiled around non-reentrant"], WAYS))
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


@slow
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


@pytest.mark.parametrize("way", slow_but(
    ["plain", "non-reentrant", "compiled"],
    ["plain", "non-reentrant", "compiled", "inductor around non-reentrant"]))
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
    first pass, over three accumulated forwards. Where possible, two forwards are in flight. A
    reentrant checkpoint, and one inside a graph, use the sums at the time of the backward."""
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


# ---- Frozen parameters, state dicts, inference mode ----

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
        function(torch.randn(5, 1, 8))
    layer.train()
    function(torch.randn(5, 1, 8)).sum().backward()
    finish_step(layer)
    assert layer.router.expert_bias.any() and layer.router.expert_bias.dtype == torch.float32
    assert not any(tensor.is_inference() for tensor in [*layer.buffers(), *counts_of(layer)])


# frozen -> calls in the backward of rows_times_weights, of rows_times_rows (for fc1's bias too), of
# mm, of product_in (the router's product, and that of fc2_bias), and sums over tokens, for the
# router's bias.
FROZEN = {
    "": [2, 3, 4, 4, 1],
    "experts": [2, 0, 4, 3, 1],
    "experts.fc1": [2, 1, 4, 4, 1],                           # and its bias
    "experts.fc2": [2, 2, 4, 3, 1],
    "router": [2, 3, 4, 3, 0],
    "router.bias": [2, 3, 4, 4, 0],
    "x": [2, 3, 3, 3, 1],
    "latent_down": [2, 3, 3, 4, 1],
    "x latent": [1, 3, 1, 3, 1],
    "x latent experts": [1, 0, 1, 2, 1],
    "x latent router experts.fc1": [0, 1, 1, 1, 0],
}


@pytest.mark.parametrize("cases, how", [
    (FROZEN, "eager"), (["experts"], "compiled"),
    pytest.param(FROZEN, "compiled", marks=slow)])
def test_trainer_frozen_parameters_cost_nothing(cases, how):
    """Products in the backward: of the experts, the router and the latent pair. In eager mode
    fc1's product runs once more, if anything needs a gradient from there. The other gradients
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

        def note(name, args, out):
            to_blocks = name == "constant_pad_nd" and args[1][-1] > 1
            calls.append("sum_tokens" if to_blocks else name)
        with Watch(note):
            got = grads(loss, [named[name] for name in live])
        close(got, [want[name] for name in live])
        counted = [calls.count(op) for op in (
            "rows_times_weights", "rows_times_rows", "mm", "product_in", "sum_tokens")]
        reaches_fc1 = layer.experts.fc1.requires_grad or not frozen.startswith("x latent")
        counted[0] -= how == "eager" and reaches_fc1
        counted[-1] /= 2                                     # a sum has two levels of blocks
        assert counted == FROZEN[frozen], frozen


# ---- DDP, FSDP2, LoRA, pipelines (docs/ranks.md) ----

over_gloo = about_the_cpu("gloo gathers and sends no tensors of a card")


@over_gloo
@over_ranks(2)
def test_trainer_ddp_leaves_the_counts_alone(rank, ranks):
    """DDP broadcasts rank 0's buffers before every forward. Counts must not be among them."""
    torch.manual_seed(1)
    config = exact_config(**BIASED, load_balancing_type="global_aux_loss", aux_loss_coeff=0.3)
    mine = MoELayer(config, ProcessGroups(tp_dp_cp=torch.distributed.group.WORLD))
    alone = copy.deepcopy(mine)
    model = torch.nn.parallel.DistributedDataParallel(mine)
    want = torch.zeros(4)
    for x in torch.randn(3, ranks, 7, 6, dtype=torch.float64)[:, rank]:
        for logits_E in (x @ alone.router.weight.T).tolist():
            want[best(logits_E, 2)] += 1
        model(x).sum().backward()
        alone(x).sum().backward()
    same(mine.router.local_tokens_per_expert, want)
    close(counts_of(mine), counts_of(alone), 1e-6)
    for a, b in zip(mine.parameters(), alone.parameters()):  # DDP averages over ranks
        torch.distributed.all_reduce(b.grad)
        close(a.grad, b.grad / ranks)
    torch.distributed.all_reduce(want)
    update_expert_bias(model)
    close(mine.router.expert_bias, 1e-3 * (want.mean() - want).sign())
    assert [name for name, _ in mine.named_buffers()] == ["router.expert_bias"]


@over_gloo
@over_ranks(2)
def test_trainer_fsdp_from_the_meta_device(rank, ranks):
    """Meta device, fully_shard, to_empty, reset_parameters: what one process draws and computes.
    Each part alone, all of them nested, the layer; in bf16 by FSDP2's own casts."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    config = exact_config(
        **BIASED, router_bias=True, add_bias_linear=True, shared_expert_gate=True, num_experts=5,
        init_std=0.5, latent_size=7, latent_norm=True)
    parts = ("router", "latent_down", "experts", "latent_up", "shared_experts")
    torch.manual_seed(5)
    plain = MoELayer(config)
    x = leaf(7, 6).detach()                  # the same x on both ranks: averages change nothing
    want = outcome(plain, x)

    def by_rows(parameter):
        return torch.distributed.tensor.Shard(1) if parameter.ndim == 3 else None
    alone = [(None, name) for name in (*parts, "")]
    for placement, *names in [*alone, (None, *parts, ""), (by_rows, "shared_experts")]:
        with torch.device("meta"):
            layer = MoELayer(config)
        for name in names:
            fully_shard(layer.get_submodule(name), shard_placement_fn=placement)
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        same([full(a) for a in layer.state_dict().values()], list(plain.state_dict().values()))
        close([full(a) for a in outcome(layer, x)], want)

        chosen = []
        for router in (layer.router, plain.router):          # without the layer's call
            router.zero_grad()
            probs, indices = router.route(x)
            probs[:, 0].sum().backward()
            chosen.append([indices, *[full(p.grad) for p in router.parameters()]])
        close(*chosen)

    bf16 = torch.bfloat16
    for dtype, *sharded in itertools.product((bf16, torch.float32), *[[False, True]] * 3):
        policy = MixedPrecisionPolicy(param_dtype=bf16, output_dtype=dtype)
        half = copy.deepcopy(plain)
        for name in (*itertools.compress(parts[1:4], sharded), ""):      # parts give fp32 into bf16
            fully_shard(half.get_submodule(name), mp_policy=policy)
        got = half(x)
        assert got.dtype == dtype
        close(got.double(), want[0], 0.1)
        got.sum().backward()
        assert all(full(p.grad).isfinite().all() for p in half.parameters()), sharded
    for name in parts:                                       # the layer keeps its input's dtype
        layer = MoELayer(dataclasses.replace(config, params_dtype=torch.float32))
        fully_shard(layer.get_submodule(name), mp_policy=MixedPrecisionPolicy(output_dtype=bf16))
        assert layer(x.float()).dtype == torch.float32, name

    alone = exact_config(shared_expert_intermediate_size=None, **{**LOSSES, "batch_first": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)          # "returned a view tensor"
        fully_shard(TopKRouter(alone)).route(x)[0].sum().backward()
        fully_shard(MoELayer(alone))(x).sum().backward()
    layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=True))
    fully_shard(layer.shared_experts)
    assert "shard the layer, not its shared expert alone" in error(layer, x)
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


class LoRA(torch.nn.Module):
    """W -> W + B · A. With experts, [E, F, H] matrices each have their own A and B."""

    def __init__(self, *shape: int):
        super().__init__()
        *batch, rows, columns = shape
        self.A = torch.nn.Parameter(leaf(*batch, 3, columns).detach())
        self.B = torch.nn.Parameter(leaf(*batch, rows, 3).detach())

    def forward(self, weight):
        return weight + self.B @ self.A


def test_trainer_lora_costs_a_weight():
    """docs/recipes.md: W + B · A of all experts is formed, and kept for the backward."""
    from torch.nn.utils.parametrize import register_parametrization
    layer = MoELayer(exact_config(num_experts=8))
    x = leaf(3, 6)
    kept = [saved_bytes(lambda: layer(x), layer.parameters())]
    weight = layer.experts.fc1
    register_parametrization(layer.experts, "fc1", LoRA(*weight.shape))
    kept.append(saved_bytes(lambda: layer(x), layer.parameters()))
    assert kept[1] - kept[0] == weight.nbytes


@over_ranks(2)
def test_trainer_lora_over_two_ranks(rank, ranks, tmp_path):
    """LoRA by parametrization over ep: gradients, their norm and a checkpoint of one process."""
    import torch.distributed.checkpoint as dcp
    from torch.nn.utils.parametrize import register_parametrization
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    torch.manual_seed(0)
    whole, mine = [MoELayer(exact_config(latent_size=7), own) for own in (None, groups)]
    for layer in (whole, mine):
        for module, name in ((layer.router, "weight"), (layer.latent_up, "weight"),
                             (layer.experts, "fc1"), (layer.experts, "fc2")):
            weight = getattr(module, name).requires_grad_(False)
            register_parametrization(module, name, LoRA(*weight.shape))
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        a.data.copy_(own_part(name, b, groups))
    assert sharding.gradient_norm(whole, None) == 0
    x = torch.randn(8, 6, dtype=torch.float64)
    want, got = whole(x), mine(x.chunk(ranks)[rank])
    close(got, want.chunk(ranks)[rank])
    want.sin().sum().backward(), got.sin().sum().backward()
    reduce_gradients(mine)
    trained = []
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        assert a.requires_grad == b.requires_grad
        if a.requires_grad:
            trained.append(b.grad.norm())
            close(a.grad, own_part(name, b.grad, groups))
    assert len(trained) == 4 * 2 + 3                         # also latent_down, shared fc1 and fc2
    want = torch.stack(trained).norm()
    close(sharding.gradient_norm(mine, groups), want)
    close(sharding.gradient_norm(whole, None), want)
    close(sharding.gradient_norm(list(whole.parameters()), ProcessGroups()), want)

    state = mine.sharded_state_dict()
    assert list(state) == list(mine.state_dict())
    assert state["experts.parametrizations.fc1.0.A"].shape == (4, 2, 3, 7)
    dcp.save(state, checkpoint_id=str(tmp_path))
    for parameter in mine.parameters():
        parameter.data.zero_()
    dcp.load(mine.sharded_state_dict(), checkpoint_id=str(tmp_path))
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        same(a, own_part(name, b, groups))

    register_parametrization(mine.experts, "fc1", LoRA(2, 5, 7))     # one for all experts
    for call in (mine.sharded_state_dict, lambda: reduce_gradients(mine)):
        text = error(call)
        assert "experts.parametrizations.fc1.1.A has shape [2, 3, 7], and fc1 [2, 2, 5, 7]" in text
        assert "is sharded along axis 0: needs as many axes and that size there" in text, text


@over_gloo
@over_ranks(2)
def test_trainer_refuses_ranks_that_it_does_not_know(rank, ranks):
    """Several ranks and a router without groups are refused before anything changes. Both ways out
    work."""
    config = small_config(
        enable_expert_bias=True, load_balancing_type="global_aux_loss", aux_loss_coeff=0.1)
    torch.manual_seed(rank)
    x = torch.randn(9, 8)
    known = ProcessGroups.from_mesh(mesh_of(dp=ranks)["dp"])
    alone = ProcessGroups(tp_dp_cp=torch.distributed.new_subgroups(1)[0])
    layers = [MoELayer(config, groups) for groups in (None, known, alone)]
    for layer in layers:
        layer.load_state_dict(layers[1].state_dict())
        layer(x).sum().backward()
    kept = copy.deepcopy(counts_of(layers[0]))
    reduced = functools.partial(load_balancing_metrics, reduce=True)
    for call in (update_expert_bias, finish_step, reduced):
        text = error(call, torch.nn.Sequential(layers[1], layers[0]))
        assert text.startswith("ValueError: tp_dp_cp is None and 2 ranks run"), text
        assert 'MoELayer(config, ProcessGroups.from_mesh(mesh["dp"]))' in text
        assert "ProcessGroups(tp_dp_cp=group) with a group of one rank" in text
    same(counts_of(layers[0]), kept)
    assert not layers[1].router.expert_bias.any()
    for layer, pooled in zip(layers[1:], (True, False)):
        finish_step(layer)
        both = [torch.empty(6) for _ in range(ranks)]
        torch.distributed.all_gather(both, layer.router.expert_bias)
        assert torch.equal(*both) is pooled
    finish_step(MoELayer(small_config()))                    # nothing to pool


@over_gloo
@over_ranks(2)
def test_trainer_pipeline_of_two_ranks(rank, ranks):
    """PipelineStage with the shapes given: counts, gradients and biases of one process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    mesh = mesh_of(pp=ranks, dp=1)
    config = exact_config(
        **BIASED, **LOSSES, batch_first=True, init_std=0.5, params_dtype=torch.float32,
        router_dtype=torch.float32)
    alone = ProcessGroups(tp_dp_cp=torch.distributed.new_subgroups(1)[0])
    torch.manual_seed(3)
    whole = torch.nn.Sequential(*[MoELayer(config, alone) for _ in range(ranks)])
    mine = MoELayer(config, ProcessGroups.from_mesh(mesh["dp"]))
    mine.load_state_dict(whole[rank].state_dict())
    x, target = torch.randn(2, 8, 5, 6)
    small = torch.empty(2, 5, 6, requires_grad=True)
    stage = PipelineStage(
        mine, rank, ranks, torch.device("cpu"), input_args=(small,), output_args=(small,))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)    # scale_grads=True
    for _ in range(2):
        mine.zero_grad(), whole.zero_grad()
        schedule.step(*[x][rank:], **(dict(target=target) if rank == ranks - 1 else {}))
        set_aux_loss_scale(whole, 1 / 4)                     # the schedule divides all gradients
        pairs = zip(x.chunk(4), target.chunk(4))
        losses = [F.mse_loss(whole(x_m), target_m) / 4 for x_m, target_m in pairs]
        for loss in losses:                                  # after all forwards, as there
            loss.backward()
        assert mine.router.local_tokens_per_expert.sum() == 8 * 5 * 2
        for a, b in zip(mine.parameters(), whole[rank].parameters(), strict=True):
            close(a.grad, b.grad, 1e-5)
        finish_step(mine), finish_step(whole)
        same(mine.router.expert_bias, whole[rank].router.expert_bias)
