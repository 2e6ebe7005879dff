"""What each rank holds: parts of weights, state dicts of parts, sums of gradients. Open it to save,
load or train over ranks. A forward uses only its sums over a group and its check for DDP.
"""
import weakref
from collections import defaultdict
from typing import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

if __package__ == "ranks":                   # beside the flat files of the layer
    import compat
    from base import MoEModule, OneProcess, group_size, owner_of, unwrapped
else:                                        # the layer is a package
    from .. import compat
    from ..base import MoEModule, OneProcess, group_size, owner_of, unwrapped


# ---- Sums over a group ----

def group_rank(group) -> int:
    return 0 if group is None else group.rank()


def all_sum(x: Tensor, group) -> Tensor:
    """The sum of x over the group, without gradient, in a new tensor. With one rank, x itself."""
    return x if group_size(group) == 1 else _all_reduced(x, group)


def all_sums(tensors: list[Tensor], groups: list) -> list[Tensor]:
    """all_sum of each tensor over its group, in one collective for all that have group, dtype and
    device in common.
    """
    alike = defaultdict(list)
    for i, (x, group) in enumerate(zip(tensors, groups)):
        if group_size(group) > 1:
            alike[group, x.dtype, x.device].append(i)
    sums = list(tensors)
    for (group, _, _), places in alike.items():
        flat = all_sum(torch.cat([tensors[i].flatten() for i in places]), group)
        for i, part in zip(places, flat.split([tensors[i].numel() for i in places])):
            sums[i] = part.view_as(tensors[i])
    return sums


def _all_reduced(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


# ---- Modules whose weights may be parts ----

def hook_state_dicts(module: nn.Module) -> None:
    """Its state_dict gives DTensors for what is shared out, and its load_state_dict takes them."""
    module.register_state_dict_post_hook(_give_shards)
    module.register_load_state_dict_pre_hook(_take_shards)


def share_out(module: nn.Module, groups: OneProcess, over_ep: bool) -> None:
    """Tells a module that is no MoEModule that its tensors are this rank's experts along axis
    0 (over_ep), or whole on every rank.
    """
    vars(module)["_shared_out"] = groups, over_ep
    if over_ep:
        hook_state_dicts(module)


def _place(module, path, tensor, prefix=""):
    """(group, axis, gradient group) of the tensor, as its owner or share_out says. The axis is None
    if every rank has the whole tensor.

    The tensors of a parametrization (torch.nn.utils.parametrize) are sharded like the parameter
    that they make: each needs as many axes as that parameter, and the same size on the sharded
    axis. (With one expert a rank, an adapter for all experts therefore looks like the rank's own.)
    """
    _refuse_adapters_around_parts(module, path, prefix)
    owner, name = owner_of(module, path)
    groups, over_ep = _ranks_of(owner)
    if not isinstance(owner, MoEModule):
        if over_ep:
            return groups.ep, 0, groups.expt_dp
        return None, None, groups.tp_dp_cp
    over, axis, summed_over = owner.shard(name)
    group = getattr(groups, over)
    if "parametrizations." in path and axis is not None and group_size(group) > 1:
        part, _, own_name = name.rpartition(".")
        part = owner.get_submodule(part)
        whole = getattr(part.parametrizations[own_name], "original", None)
        if whole is None:
            whole = getattr(part, own_name)
        if tensor.ndim != whole.ndim or tensor.shape[axis] != whole.shape[axis]:
            raise ValueError(
                f"{prefix}{path} has shape {list(tensor.shape)}, and {name} {list(whole.shape)} is "
                f"sharded along axis {axis}: needs as many axes and that size there, else the "
                f"ranks' copies would drift apart")
    return group, axis, getattr(groups, summed_over)


def _ranks_of(owner):
    """(the groups of a module that owner_of gives, whether share_out has told it of experts)."""
    if isinstance(owner, MoEModule):
        return owner.pg_collection, False
    return vars(owner).get("_shared_out", (OneProcess(), False))


def _refuse_adapters_around_parts(module, path, prefix):
    """ValueError: the parameter is in a module that was put around experts of this rank, as PEFT's
    ParamWrapper is. A rank's adapters are for its own experts, in an order that nothing says.
    """
    above = [module]
    for name in path.split(".")[:-1]:
        above.append(above[-1].get_submodule(name))
    says = [i for i, each in enumerate(above)
            if isinstance(each, MoEModule) or "_shared_out" in vars(each)]
    for around in above[says[-1] + 1:] if says else []:
        if any([*_own_shards(part, prefix)] for part in around.modules()):
            raise ValueError(
                f"{prefix}{path} is in {type(around).__name__}, around weights that ranks share "
                f"out; needs a MoEModule there, whose table `sharded` says which ranks hold it")


# ---- State dicts ----

def sharded_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Tensor]:
    """Name -> tensor, of a model and its optimizer, for torch.distributed.checkpoint. Pass it to
    save or load; no other step is needed.

    The tensors are the model's and the optimizer's own, DTensors where they are sharded: so it
    loads at other sizes of tp and ep, and without process groups. The optimizer's are
    optimizer.NAME.KEY, without hyperparameters such as lr. The call gives a parameter that has not
    stepped yet the state of step 0. Names leave out torch.compile and checkpoint_wrapper.

    ValueError: the optimizer has a parameter that the model lacks; its state holds something other
    than a tensor; the state of a sharded parameter has another shape than the parameter.

    >>> model = nn.Linear(2, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    >>> list(sharded_state_dict(model, optimizer))
    ['weight', 'bias', 'optimizer.weight.momentum_buffer', 'optimizer.bias.momentum_buffer']
    """
    state = {unwrapped(path): tensor for path, tensor in model.state_dict().items()}
    if optimizer is None:
        return state
    _make_optimizer_state(optimizer)
    others = set(optimizer.state)
    for path, parameter in model.named_parameters():
        others.discard(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                name = f"optimizer.{unwrapped(path)}.{key}"
                state[name] = _moment(model, path, parameter, name, value)
    if others:
        raise ValueError(f"optimizer has {len(others)} parameters that model lacks; needs the "
                         f"model that holds all of them")
    return state


def _moment(module, path, parameter, name, value):
    """A value of the optimizer's state of the parameter, sharded as that is."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; needs a tensor, to be loaded into")
    group, axis, _ = _place(module, path, parameter)
    if axis is None or group_size(group) == 1 or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise ValueError(f"{name} has shape {list(value.shape)} and its parameter, which is "
                         f"sharded over ranks, {list(parameter.shape)}; needs the same")
    return as_shard(name, value, group, axis)


def _make_optimizer_state(optimizer):
    """Gives parameters that have no state the state of step 0. To make it, the optimizer steps a
    stand-in, with zeros as its value and gradient, and with all hooks off.
    """
    groups = optimizer.param_groups
    _keep_first_step_undamped(optimizer)
    hooks = {name: getattr(optimizer, name) for name in _STEP_HOOKS if hasattr(optimizer, name)}
    try:
        vars(optimizer).update({name: {} for name in hooks})
        for group in groups:
            for parameter in group["params"]:
                if optimizer.state.get(parameter) or not parameter.requires_grad:
                    continue
                stand_in = nn.Parameter(torch.zeros_like(parameter))
                stand_in.grad = torch.zeros_like(parameter)
                optimizer.param_groups = [{**group, "params": [stand_in]}]
                optimizer.step()
                made = optimizer.state.pop(stand_in, {})
                for key, value in {**_FIRST_VALUES, "eta": group.get("lr")}.items():
                    if isinstance(made.get(key), Tensor):
                        made[key].fill_(value)
                optimizer.state[parameter] = made
    finally:
        optimizer.param_groups = groups
        vars(optimizer).update(hooks)


_STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
# A step changes these entries even if all gradients are zero. They are set back to these values.
_FIRST_VALUES = {"step": 0.0, "mu_product": 1.0}


def _keep_first_step_undamped(optimizer):
    """SGD's first momentum is the gradient; from a momentum of zeros it would be 1 - dampening
    times that. So the next step first removes zeros that are new, made here or loaded.
    """
    def momentum(parameter):
        return optimizer.state.get(parameter, {}).get("momentum_buffer")

    damped = [parameter for group in optimizer.param_groups if group.get("dampening")
              for parameter in group["params"]
              if momentum(parameter) is None or momentum(parameter).any()]

    def take_out(*_):
        handle.remove()
        for parameter in damped:
            if momentum(parameter) is not None and not momentum(parameter).any():
                optimizer.state[parameter]["momentum_buffer"] = None

    if damped:
        handle = optimizer.register_step_pre_hook(take_out)


def _own_shards(module, prefix):
    """(path, tensor, group, axis) of all tensors that the module shards over more than one rank. A
    parametrized parameter is represented by the tensors that make it.
    """
    tensors = [*module.named_parameters(remove_duplicate=False),
               *module.named_buffers(remove_duplicate=False)]
    for path, tensor in tensors:
        owner, _ = owner_of(module, path)
        if owner is module:
            group, axis, _ = _place(module, path, tensor, prefix)
            if axis is not None and group_size(group) > 1:
                yield path, tensor, group, axis


def _give_shards(module, state, prefix, _):
    """After state_dict() of every MoEModule: what is sharded becomes DTensors."""
    for path, _, group, axis in _own_shards(module, prefix):
        if prefix + path in state:
            state[prefix + path] = as_shard(prefix + path, state[prefix + path], group, axis)


def as_shard(name, tensor, group, axis):
    """This rank's part along the axis as a DTensor over the group, in the part's memory. If FSDP2
    shards the part further, the DTensor has the group's dim, then FSDP2's. RuntimeError: FSDP2
    shards it over ranks that hold different parts.
    """
    if not isinstance(tensor, DTensor):
        mesh = DeviceMesh.from_group(group, tensor.device.type)
        return DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False)
    ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu")
    inner = tensor.device_mesh
    alike = inner.mesh.cpu()                             # ranks with the same part
    plain = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
    if not plain or torch.isin(alike, ranks).sum() != 1:
        raise RuntimeError(
            f"{name} is a DTensor with {tensor.placements} over ranks {alike.tolist()}, beside a "
            f"group of ranks {ranks.tolist()} that hold other parts; needs fully_shard over ranks "
            f"that hold the same part, such as mesh['dp']")
    # `alike` are the ranks with this rank's part. The ranks with another part of the group lie at
    # the same distances from the group's rank that holds it. So each rank of the group shifts them.
    mesh_ranks = (ranks - dist.get_rank()).view(-1, *[1] * inner.ndim) + alike
    mesh = DeviceMesh.from_group(
        [group, *inner.get_all_groups()], inner.device_type, mesh=mesh_ranks,
        mesh_dim_names=tuple(f"dim_{i}" for i in range(1 + inner.ndim)))
    shape = _whole_shape(tensor, group, axis)
    return DTensor.from_local(
        tensor.to_local(), mesh, [Shard(axis), *tensor.placements], run_check=False, shape=shape,
        stride=torch.empty(shape, device="meta").stride())


def _whole_shape(part, group, axis):
    shape = list(part.shape)
    shape[axis] *= group_size(group)
    return torch.Size(shape)


@torch.no_grad()
def _take_shards(module, state, prefix, metadata, *_):
    """Before load_state_dict() of a MoEModule: DTensors and whole tensors become this rank's part.
    """
    for path, own, group, axis in _own_shards(module, prefix):
        given = state.get(prefix + path)
        if isinstance(given, Tensor) and given.shape == _whole_shape(own, group, axis):
            part = part_of(prefix + path, given, own, group, axis)
            if metadata.get("assign_to_params_buffers"):
                part = part.clone()                      # else the whole stays in memory
            state[prefix + path] = part


def part_of(name, given, own, group, axis):
    """The part of the whole tensor `given`, a DTensor or not, that `own` holds, in its layout."""
    if isinstance(given, DTensor):
        mesh = given.device_mesh
        like = as_shard(name, own.detach(), group, axis)
        same_ranks = mesh.mesh.tolist() == like.device_mesh.mesh.tolist()
        as_here = same_ranks and given.placements == like.placements
        here = (mesh.mesh == dist.get_rank()).nonzero().tolist()
        unpickled_elsewhere = here != [list(mesh.get_coordinate() or ())]
        if not as_here and not unpickled_elsewhere:
            sizes = [mesh.get_group(dim).size() for dim in range(mesh.ndim)]
            unpickled_elsewhere = sizes != list(mesh.shape)
        if unpickled_elsewhere:
            raise RuntimeError(
                f"{name} is the part of another rank, or of a run with other ranks; needs the "
                f"file that this rank has saved, or torch.distributed.checkpoint")
        if not as_here:
            given = given.full_tensor()
        elif not isinstance(own, DTensor):
            return given.to_local()
        else:
            return DTensor.from_local(
                given.to_local(), own.device_mesh, own.placements, run_check=False,
                shape=own.shape, stride=own.stride())
    part = given.chunk(group.size(), axis)[group.rank()]
    if isinstance(own, DTensor):
        part = distribute_tensor(part, own.device_mesh, own.placements, src_data_rank=None)
    return part


# ---- Replicas: what several ranks hold alike ----

def compare_replicas(model: nn.Module, biases: dict[str, Tensor]) -> None:
    """RuntimeError, on every rank, if ranks that should hold the same bits of a MoE parameter or of
    one of these expert biases (name -> [E]) do not. It names the tensors and the ranks.

    One all-gather over tp_dp_cp of a checksum per tensor, and one read on the host. Collective.
    """
    held = defaultdict(list)                     # tp_dp_cp -> (name, tensor, which part it is)
    for path, tensor in [*model.named_parameters(), *biases.items()]:
        owner, _ = owner_of(model, path)
        groups, _ = _ranks_of(owner)
        if group_size(groups.tp_dp_cp) > 1:
            group, axis, _ = _place(model, path, tensor)
            part = group_rank(group) if axis is not None else 0
            held[groups.tp_dp_cp].append((unwrapped(path), tensor, part))
    for group, tensors in held.items():
        ranks = dist.get_process_group_ranks(group)
        own = torch.stack([_fingerprint(tensor, part) for _, tensor, part in tensors])
        table = own.new_empty(len(ranks) * len(own), 2)
        dist.all_gather_into_tensor(table, own, group=group)
        table = table.view(len(ranks), len(own), 2).tolist()
        found = [text for i, (name, _, _) in enumerate(tensors)
                 if (text := _differences(name, ranks, [row[i] for row in table]))]
        if found:
            raise RuntimeError(
                f"{len(found)} tensors differ between ranks that hold them alike: "
                f"{'; '.join(found[:10])}. Needs one seed on all ranks, gradients that are summed "
                f"before the optimizer's step (reduce_gradients, DDP or FSDP2), and a norm over "
                f"all ranks for clipping (gradient_norm)")


_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# splitmix64: its step and its two rounds (shift, factor), in int64, whose products wrap around
_STEP = -0x61C8864680B583EB
_ROUNDS = (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)


def _fingerprint(tensor, part):
    """[2] int64: a checksum of this rank's bits, and a number for the part that they are."""
    tensor, starts = compat.own_part(tensor)
    bits = tensor.detach().contiguous().flatten().view(_INTEGER_OF_SIZE[tensor.itemsize])
    checksum = torch.zeros((), dtype=torch.int64, device=bits.device)
    first = 0
    for block in bits.split(2 ** 20):            # a few MB at a time
        place = torch.arange(first, first + block.numel(), device=bits.device)
        # In a sum of bits · place, differences at two places could cancel. So the bits of each
        # element are mixed with its place before they are added.
        mixed = place.mul_(_STEP).add_(block)
        for shift, factor in _ROUNDS:
            mixed ^= (mixed >> shift) & (1 << 64 - shift) - 1        # zeros come from the left
            mixed *= factor
        checksum += mixed.sum()
        first += block.numel()
    return torch.stack((checksum, torch.full_like(checksum, hash((part, *starts)))))


def _differences(name, ranks, fingerprints):
    """What is said of a tensor; "" if all ranks that hold a part hold the same bits."""
    holders = defaultdict(lambda: defaultdict(list))       # part -> checksum -> ranks
    for rank, (checksum, part) in zip(ranks, fingerprints):
        holders[part][checksum].append(rank)
    for by_checksum in holders.values():
        if len(by_checksum) > 1:
            return f"{name} on ranks {' and '.join(map(str, by_checksum.values()))}"
    return ""


# ---- Under DistributedDataParallel ----

_CHECKED = weakref.WeakSet()                     # each DDP once


@torch.compiler.assume_constant_result           # so that a graph runs it while it is traced
def refuse_ddp_of_parts() -> None:
    """RuntimeError in a forward under a DistributedDataParallel that averages different parts:
    parameters that the layer shares out over ranks and that DDP does not ignore.
    """
    ddp = active_ddp()
    if ddp is None or ddp in _CHECKED:
        return
    averaging = {*dist.get_process_group_ranks(ddp.process_group)}
    for path, parameter in ddp.module.named_parameters():
        if path in ddp.parameters_to_ignore:
            continue
        group, axis, over = _place(ddp.module, path, parameter)
        shared_out = axis is not None and group_size(group) > 1
        alike = {dist.get_rank()} if over is None else {*dist.get_process_group_ranks(over)}
        if shared_out and not averaging <= alike:
            raise RuntimeError(
                f"DistributedDataParallel averages {path} over ranks {sorted(averaging)}, of which "
                f"only {sorted(alike)} hold the same part, and has overwritten it by that of the "
                f"first rank; needs reduce_gradients or FSDP2 in place of DDP (docs/ranks.md)")
    _CHECKED.add(ddp)


# ---- Gradients ----

def reduce_gradients(module: nn.Module) -> None:
    """Sums the gradients of all MoE parameters in `module` over the ranks that hold them. If you
    train without FSDP or DDP, call it before the optimizer step. Collective.

    The ranks are tp_dp_cp for router and latent weights, dp_cp for the shared expert (its gate:
    tp_dp_cp with sequence_parallel), expt_dp for experts, and tp_dp_cp for the parameters of other
    modules, such as an nn.PReLU in the experts. A missing gradient counts as zero. A
    parametrization's parameters (LoRA) go with the one that they make. ValueError: that one is
    sharded along an axis that they lack; or a module that is no MoEModule was put around experts
    that ranks share out, with parameters of its own (PEFT's LoRA of experts).
    """
    for path, parameter in module.named_parameters():
        _, _, group = _place(module, path, parameter)
        if group_size(group) > 1 and parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def _shards_of_module(module, groups):
    """(parameter, the groups over which the layer shards it) of all parameters."""
    for path, parameter in module.named_parameters():
        group, axis, _ = _place(module, path, parameter)
        is_sharded = axis is not None and group_size(group) > 1
        if is_sharded and group not in (groups.ep, groups.tp):
            raise ValueError(f"{path} is sharded over a group that groups lacks; "
                             f"needs the layer's own, layer.pg_collection")
        yield parameter, [group] if is_sharded else []


@torch.no_grad()
def gradient_norm(
    module_or_parameters: nn.Module | Iterable[Tensor], groups: OneProcess | None,
) -> Tensor:
    """The L2 norm of the gradients as one process would get it, 0-d, in fp32 at least: each expert,
    each shard over tp or of a DTensor (FSDP2), and what ranks hold alike count once.

    `groups` are the layer's own, layer.pg_collection; None: one process. Call it after the
    gradients were reduced. Collective. A missing gradient counts as zero. ValueError: parameters
    instead of the module, with more than one rank in ep or tp.
    """
    groups = groups or OneProcess()
    if isinstance(module_or_parameters, nn.Module):
        shards = _shards_of_module(module_or_parameters, groups)
    else:
        ep, tp = group_size(groups.ep), group_size(groups.tp)
        if max(ep, tp) > 1:
            raise ValueError(f"module_or_parameters is no module, with {ep} ranks of ep and {tp} "
                             f"of tp; needs the module: parameters do not say which are sharded")
        shards = [(parameter, []) for parameter in module_or_parameters]

    squares = defaultdict(float)                 # groups -> the sum for parameters sharded so
    for parameter, over in shards:
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
        if isinstance(parameter, DTensor):
            grad = grad.redistribute(placements=parameter.placements).to_local()
            for dim, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    over.append(parameter.device_mesh.get_group(dim))
        dtype = torch.promote_types(grad.dtype, torch.float32)
        square = torch.linalg.vector_norm(grad, dtype=dtype).square()
        squares[tuple(over)] += square
    sums = []
    for over, square in squares.items():
        for group in over:
            square = all_sum(square, group)
        sums.append(square)
    return torch.stack(sums).sum().sqrt()


# ---- Private names of torch ----
# Those of the layer are in compat.py. Only code for several ranks needs this one.

def active_ddp():
    """The DistributedDataParallel whose forward is running, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
