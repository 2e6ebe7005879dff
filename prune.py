"""Prune and grow: a layer with some experts of another, or with some of them twice. It needs the
layer, which does not need it.
"""
import copy
from dataclasses import replace
from typing import Sequence

import torch
from torch import nn

if __package__:
    from .base import GROUPS, owner_of
    from .moe import Experts, MoELayer
    from .router import RouterCounts
else:
    from base import GROUPS, owner_of
    from moe import Experts, MoELayer
    from router import RouterCounts


def select_experts(
    layer: MoELayer, experts: Sequence[int], optimizer: torch.optim.Optimizer | None = None,
) -> MoELayer:
    """A layer with these experts of `layer`, in this order. Leave some out to prune; name some
    twice to grow, as [*range(E), 0].

    The router's rows and expert bias are selected too: all tensors that its class names in
    `per_expert`, where a router of your own may name more. Counts start from nothing, and all else
    is copied. In the optimizer the new parameters replace the old ones and take over their state.
    The new layer is not compiled. ValueError: several ranks, a number that is no expert's, state of
    an unknown shape, and what the config refuses.

    >>> layer = MoELayer(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, topk=2))
    >>> select_experts(layer, [3, 0, 2]).router.weight.shape
    torch.Size([3, 8])
    """
    layer = getattr(layer, "_orig_mod", layer)
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; needs a MoELayer")
    E = layer.config.num_experts
    if any(layer.pg_collection.size(name) > 1 for name in GROUPS):
        raise ValueError("layer is on several ranks; needs one process, with a checkpoint of it")
    if not all(0 <= e < E for e in experts):
        raise ValueError(f"experts is {list(experts)}; needs numbers of 0 to {E - 1}")
    config = replace(layer.config, num_experts=len(experts))
    if isinstance(layer.experts, Experts):
        whole = [name for name in layer.experts.sharded if layer.experts.shard(name).axis is None]
        layer.experts.refuse_undeclared([*layer.experts.per_expert, *whole])
    new = copy.deepcopy(layer)
    new.set_config(config)
    chosen = torch.tensor(experts, device=layer.router.weight.device)

    def selected(name, old, tensor, key=None):
        owner, own_name = owner_of(layer, name)
        per_expert = own_name in getattr(owner, "per_expert", ()) and old.shape[:1] == (E,)
        if not per_expert or not torch.is_tensor(tensor) or tensor.ndim == 0:
            return tensor
        # Adafactor's means over an axis have size 1 in it.
        fits = [n in (1, size) for n, size in zip(tensor.shape, old.shape)]
        if tensor.ndim != old.ndim or not all(fits):
            raise ValueError(f"optimizer keeps {key} of shape {list(tensor.shape)} for {name}; "
                             f"needs the shape {list(old.shape)}, or 1 for some of its axes")
        return tensor.detach()[chosen] if len(tensor) == E else tensor

    for name, old in [*layer.named_parameters(), *layer.named_buffers()]:
        path, _, own_name = name.rpartition(".")
        tensor = selected(name, old, old)
        if tensor is old:
            continue
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        setattr(new.get_submodule(path), own_name, tensor)
    new.router.counts = RouterCounts(config, layer.pg_collection.size("tp_cp"))
    new.router.counts.follow(chosen.device)
    if layer.router.counts.has_scale:
        new.router.counts.set_scale(layer.router.counts.loss_scale)

    if optimizer is not None:
        names: dict = {old: name for name, old in layer.named_parameters()}
        parameters = dict(new.named_parameters())
        states = {
            old: {key: selected(names[old], old, value, key) for key, value in state.items()}
            for old, state in optimizer.state.items() if old in names}
        for old, state in states.items():
            del optimizer.state[old]
            optimizer.state[parameters[names[old]]] = state
        for group in optimizer.param_groups:
            group["params"] = [parameters[names[p]] if p in names else p for p in group["params"]]
    return new
