"""Tests of prune.py: a layer with some experts of another.

    python -m pytest test_prune.py

It needs test_moe.py and the layer's seven files.
"""
import copy
import functools

import torch

if __package__:                                      # copied into a package
    from .base import OneProcess
    from .moe import Experts, MoELayer, TopKRouter, finish_step
    from .prune import select_experts
    from .test_moe import (
        DEVICE, SlopePerExpert, agree, check_error_table, close, compiled, error, exact_config,
        exact_layer, leaf, of_module, on_device, random_layer, same, slope_layer, slope_loop,
        small_layer)
else:
    from base import OneProcess
    from moe import Experts, MoELayer, TopKRouter, finish_step
    from prune import select_experts
    from test_moe import (
        DEVICE, SlopePerExpert, agree, check_error_table, close, compiled, error, exact_config,
        exact_layer, leaf, of_module, on_device, random_layer, same, slope_layer, slope_loop,
        small_layer)


def test_prune_and_grow():
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
    pruned = select_experts(layer, keep, optimizer)
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

    grown = select_experts(layer, [*range(5), 0])
    same(grown.experts.fc1[5], grown.experts.fc1[0])
    same(grown.router.weight[:5], layer.router.weight)
    assert grown(x).isfinite().all()
    check_error_table("""
        select(grown, [0, 6]) => experts is [0, 6]; needs numbers of 0 to 5
        select(grown, [-1, 2]) => experts is [-1, 2]
        select(grown, [3]) => topk = 2, num_experts = 1
        """, select=select_experts, grown=grown)


def test_prune_selects_a_parameter_of_each_expert():
    """That of an `activate` with the expert of each row."""
    layer = slope_layer()
    new = select_experts(layer, [5, 0, 3, 3])
    same(new.experts.slope, layer.experts.slope[[5, 0, 3, 3]])
    agree(new, of_module(new, slope_loop), leaf(5, 6))


def test_prune_selects_what_a_router_declares():
    """A tensor of a router or of experts of one's own goes along if its class names it in
    `per_expert`; else it stays, in a router even if its length happens to be E. A parametrized
    parameter is taken by its parts."""
    class Mine(TopKRouter):
        per_expert = (*TopKRouter.per_expert, "load")

        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("seen", torch.arange(2.0))              # assignments, tokens
            self.register_buffer("load", torch.arange(1.0, 1 + config.num_experts))
            self.scale = torch.nn.Linear(2, config.num_experts)

    layer = small_layer(num_experts=2, topk=1, pre_softmax=True)
    layer.router = Mine(layer.config)
    layer.experts.whole, layer.experts.act = torch.nn.PReLU(3), torch.nn.PReLU(2)
    layer.experts.per_expert = (*Experts.per_expert, "act.weight")
    layer.experts.act.weight.data = torch.tensor([0.3, 0.7])
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "fc2", torch.nn.Tanh())
    raw = layer.experts.parametrizations.fc2.original.data.uniform_(0.1, 0.9)
    new = select_experts(layer, [1, 0, 1])
    same(new.router.seen, layer.router.seen)
    same(new.router.load, torch.tensor([2.0, 1, 2]))
    same(new.router.scale.weight, layer.router.scale.weight)
    same(new.experts.whole.weight, layer.experts.whole.weight)
    same(new.experts.act.weight, torch.tensor([0.7, 0.3, 0.7]))
    same(new.router.weight, layer.router.weight[[1, 0, 1]])
    same(new.experts.parametrizations.fc2.original, raw[[1, 0, 1]])
    same(new.experts.fc2, raw[[1, 0, 1]].tanh())


def test_prune_lets_experts_train_on():
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
        new = select_experts(compiled(layer), order, optimizer)
        assert type(new) is MoELayer
        step(old, old_optimizer), step(new, optimizer)
        for (name, a), b in zip(new.named_parameters(), old.parameters(), strict=True):
            close(a, b[order] if name.startswith(("router.", "experts.")) else b, 1e-9)

    state = optimizer.state[new.experts.fc1]
    state["row"] = torch.ones(5, 2, 4)
    before = copy.copy(state)
    text = error(select_experts, new, [0, 1], optimizer)
    assert text.startswith("ValueError: optimizer keeps row of shape [5, 2, 4] for experts.fc1; ")
    assert optimizer.state[new.experts.fc1] == before
    text = error(select_experts, torch.nn.Linear(2, 2), [0])
    assert text == "TypeError: layer is a Linear; needs a MoELayer"


def test_prune_refuses_a_parameter_that_may_be_one_per_expert():
    """select_experts would leave it as it is. It may be said to be whole."""
    layer = slope_layer()
    refused = "ValueError: other has shape [8], and there are 8 experts; if it has a row for each"
    layer.experts.other = torch.nn.Parameter(torch.zeros(8))
    for entry in ({}, {"other": ("ep", 0, "expt_dp")}):
        layer.experts.sharded = {**SlopePerExpert.sharded, **entry}
        assert error(select_experts, layer, [0, 1, 2]).startswith(refused)
    layer.experts.sharded = {**SlopePerExpert.sharded, "other": ("tp", None, "tp_dp_cp")}
    assert select_experts(layer, [0, 1, 2]).experts.other.shape == (8,)
    layer.experts.register_buffer("another", torch.zeros(8))
    assert "another has shape [8]" in error(select_experts, layer, [0, 1, 2])


class TwoRanks(OneProcess):
    """Two ranks in the groups of these names."""

    def __init__(self, *names):
        self.names = names

    def size(self, name):
        return 2 if name in self.names else 1


def test_prune_refuses_several_ranks():
    """Experts that are shared out, or whole on each."""
    layer = exact_layer()
    for names in (("ep", "tp_dp_cp"), ("tp_dp_cp",)):
        layer.pg_collection = TwoRanks(*names)
        assert "is on several ranks; needs one process" in error(select_experts, layer, [0, 1])
