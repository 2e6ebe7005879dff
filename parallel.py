"""What crosses ranks: process groups, the dispatch of rows to their experts, the all-to-all
over ep in two halves, the tensor-parallel pair, and the weights, state dicts and gradients
of which each rank holds a part.

To understand the layer in one process, read moe.py: without process groups nothing here
communicates.
"""
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Iterable, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import (
    DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor)

if __package__:
    from . import compat, kernels
else:
    import compat
    import kernels


# ---- Process groups ----

_Group = dist.ProcessGroup | None             # None is a group of one rank


@dataclass(frozen=True)
class ProcessGroups:
    """torch.distributed groups. None is a group of one rank. Nothing communicates over a group
    of one rank, whether it is None or made.

    tp        ranks that shard the shared expert (enter_tp, leave_tp). The rest is whole on
              each of them. Each routes its own part of the sequence (sequence_parallel), so
              losses are shared over tp_cp, and reduce_gradients sums the router's gradient.
    ep        ranks that share out the experts, each with tokens of its own.
    tp_cp     ranks that hold one sequence between them.
    dp_cp     all ranks with the same tp rank, including the ep ranks.
    tp_dp_cp  all ranks.
    expt_dp   all ranks with the same experts: those with the same ep rank.

    Each rank's gradients are partial and have to be summed: see reduce_gradients. The
    balance losses are made for that sum: a rank has its part of a loss over tp_cp, and of
    the global loss. So over n data-parallel ranks the sum has n aux, seq and z-losses, as n
    microbatches would, and one global loss. If a trainer averages over R ranks instead,
    multiply the coefficients of aux, seq and z-loss by the size of tp_cp, and that of the
    global loss by R.
    ValueError: ep without tp_dp_cp.
    """
    tp: _Group = None
    ep: _Group = None
    tp_cp: _Group = None
    dp_cp: _Group = None
    tp_dp_cp: _Group = None
    expt_dp: _Group = None

    def __deepcopy__(self, memo):
        return self                                  # a copy of a layer is on the same ranks

    def __post_init__(self):
        if self.ep is not None and self.tp_dp_cp is None:
            raise ValueError(
                "ep is given and tp_dp_cp is None; needs tp_dp_cp too, the group of all ranks: the "
                "expert biases of the ranks would drift apart (ProcessGroups.from_mesh makes all "
                "groups)")

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ProcessGroups":
        """The groups of a mesh with any of the dims "dp", "cp", "tp", "ep".

        This is collective: every rank of the mesh has to call it. ValueError: other names.
        """
        names = mesh.mesh_dim_names
        if not names or not set(names) <= {"dp", "cp", "tp", "ep"}:
            raise ValueError(f"mesh has the dims {names}; needs names among dp, cp, tp, ep")

        def group_over(wanted):
            dims = tuple(name for name in names if name in wanted.split())
            if not dims:
                return None
            return compat.as_one_dim(mesh[dims]).get_group()

        return cls(
            tp=group_over("tp"), ep=group_over("ep"), tp_cp=group_over("tp cp"),
            dp_cp=group_over("dp cp ep"), tp_dp_cp=group_over("dp cp tp ep"),
            expt_dp=group_over("dp cp tp"))


def group_size(group) -> int:
    return 1 if group is None else group.size()


def group_rank(group) -> int:
    return 0 if group is None else group.rank()


def all_sum(x: Tensor, group) -> Tensor:
    """The sum of x over the group, in a new tensor without gradient. With one rank, x itself."""
    return x if group_size(group) == 1 else _all_reduced(x, group)


def _all_reduced(x, group):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


# ---- Over ep: an all-to-all in two halves, with other work between them ----
# The first half issues the exchange, the second waits for it. In the backward the second
# half comes first: it issues the opposite exchange, and the first half waits for that. So
# what runs between the halves in the forward runs beside the exchange in the backward too,
# in eager mode and in a graph. The first half has a second output, the shadow: an expanded
# scalar, which has the shape of the rows sent and needs no memory. The second half returns the
# gradient in flight as the shadow's gradient, so autograd hands it to the first half.

class Splits(NamedTuple):
    """Of an all-to-all: `send[r]` rows to rank r, `receive[r]` from it."""
    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup

    def back(self):
        """Those of the opposite exchange."""
        return Splits(self.receive, self.send, self.group)


def exchange(rows: Tensor, splits: Splits) -> Tensor:
    """Issues an all-to-all of rows. The result is valid once `wait` has returned it. There
    is no gradient.
    """
    return compat.all_to_all(rows.contiguous(), *splits)


wait = compat.wait_for


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, splits):
        ctx.set_materialize_grads(False)
        # The shadow has the shape of the gradient that it carries: autograd compares the two.
        shadow = rows.new_zeros(()).expand_as(rows)
        return exchange(rows, splits), shadow

    @staticmethod
    @compat.once_differentiable
    def backward(ctx, _, grad_in_flight):
        # rows, splits
        return wait(grad_in_flight), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, shadow, splits):
        ctx.splits = splits
        return wait(buffer)

    @staticmethod
    @compat.once_differentiable
    def backward(ctx, grad):
        in_flight = exchange(grad, ctx.splits.back())
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            wait(in_flight)                                  # detect_anomaly reads it at once
        # buffer, shadow, splits
        return None, in_flight, None


class AllToAll:
    """Rows [sum(send), ..] in flight. `wait` returns the rows [sum(receive), ..] that arrive.
    It is differentiable.
    """

    def __init__(self, rows: Tensor, splits: Splits):
        self.splits = splits
        self.buffer, self.shadow = _Start.apply(rows, splits)

    def wait(self) -> Tensor:
        return _Finish.apply(self.buffer, self.shadow, self.splits)


# ---- Dispatch: rows to their experts, and their outputs back ----

class Dispatch(Protocol):
    """What MoELayer.dispatch returns. The layer calls the three methods once each, in this
    order, with the experts between the first and the second.

    What the experts see has the width H, or ℓ with latent experts. The experts multiply by
    the probs. So the way back is a sum without weights.
    """

    def wait_for_rows(self) -> tuple[Tensor, Tensor, kernels.Plan]:
        """(rows [M, H], probs [M, K], plan): the arguments of Experts.forward.

        The plan is kernels.plan_permutation(experts [M, K], E / ep), where experts holds for
        each row the numbers of its experts among those of this rank, and E / ep for what is
        unrouted. A dispatcher whose rows have one expert each gives one column.
        """

    def send_back(self, output: Tensor):
        """output [M, H] of the experts, in the order of the rows -> a handle. It may start
        the send without waiting; the shared expert then runs.
        """

    def wait_and_combine(self, handle) -> Tensor:
        """[T, H]: for each token of this rank the sum of what its experts returned."""


class Local(NamedTuple):
    """A Dispatch where nothing crosses ranks, so there is nothing to wait for.
    kernels.expert_mlp gathers the rows from the tokens and combines them, and the methods
    pass their input on.
    """
    tokens: Tensor
    probs: Tensor
    plan: kernels.Plan

    def wait_for_rows(self):
        return self.tokens, self.probs, self.plan

    def send_back(self, output):
        return output

    def wait_and_combine(self, handle):
        return handle


def _cut(x, rows):
    return x[:rows]


def _extend(x, rows):
    """x with zeros behind it."""
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _first_rows(x, rows):
    """x[:rows], for a number that comes from the device: a graph of torch 2.11 cannot hold the
    gradient of such a slice.
    """
    functions = partial(_cut, rows=rows), partial(_extend, rows=x.shape[0])
    return kernels.Adjoint.apply(x, functions)


class ExpertParallel:
    """A Dispatch: a token goes once to each rank that holds experts of it, and back.

    So a row is a (token, rank), and a token has at most D = min(K, ranks) of them. A row has K
    probs and experts, those of the token, and what is elsewhere is unrouted. The rank sums what
    its experts return for a row.

    The ranks first exchange how many rows and assignments go where, and read it on the host:
    the one sync of the dispatch. With capacity_factor and pad_to_capacity every rank gets as
    many rows as there can be: no exchange of counts, no sync. M is the number of rows that this
    rank receives. Without padding capacity_factor is None.
    """

    def __init__(self, x_TH, probs_TK, indices_TK, counts_E, group, capacity_factor):
        T, K = probs_TK.shape
        E, ranks = len(counts_E), group.size()
        local = E // ranks                                   # experts of one rank
        rank_TK, _ = kernels.merge_repeats(indices_TK // local, ranks)
        # The slots that name no rank go to the end, beyond D. The others keep their order.
        slots_TD = (rank_TK == ranks).argsort(dim=1, stable=True)[:, :min(K, ranks)]
        plan = kernels.plan_permutation(rank_TK.gather(1, slots_TD), ranks)
        if capacity_factor is not None:
            most = local * min(T, kernels.get_capacity(T * K, E, capacity_factor))
            rows_to_each = min(T, most)
            plan = kernels.pad_plan(plan, rows_to_each)
            send = receive = [rows_to_each] * ranks
            assignments = ranks * min(T * K, most)
        else:
            # Issued before the rows are gathered, so that it runs beside that.
            sent_R2 = torch.stack((plan.counts, counts_E.view(ranks, local).sum(1)), 1)
            each = [1] * ranks
            counts_in_flight = exchange(sent_R2, Splits(each, each, group))
            # Add one unrouted row. Then _first_rows always cuts something off, so that the
            # compiler needs only one graph.
            plan = plan._replace(order=F.pad(plan.order, (0, 1)))
        rows = kernels.gather_rows(x_TH, plan)
        # The experts travel beside the probs, as numbers from 1: 0 is a row without a token. Each
        # number below 2²⁴ is exact in fp32. Under autocast `cat` takes no fp16 beside fp32.
        wide = torch.promote_types(probs_TK.dtype, torch.float32)
        beside_T2K = torch.cat((probs_TK.to(wide), (indices_TK + 1).to(wide)), 1)
        beside = kernels.gather_rows(beside_T2K, plan)
        if capacity_factor is None:
            received_R2 = wait(counts_in_flight)
            with compat.reads_on_host():
                send, receive, assignments = torch.stack((plan.counts, *received_R2.t())).tolist()
            assignments = sum(assignments)
        self.plan = plan
        self.first = group.rank() * local
        self.local = local
        self.assignments = assignments
        self.probs_dtype = probs_TK.dtype
        self.splits = Splits(send, receive, group)
        self.in_flight = [
            AllToAll(_first_rows(x, sum(send)), self.splits) for x in (rows, beside)]

    def wait_for_rows(self):
        rows_MH, beside = [x.wait() for x in self.in_flight]
        probs_MK, numbers_MK = beside.chunk(2, dim=1)
        local_MK = numbers_MK.long() - 1 - self.first
        elsewhere_MK = (local_MK < 0) | (local_MK >= self.local)
        plan = kernels.plan_permutation(
            local_MK.masked_fill(elsewhere_MK, self.local), self.local)
        return rows_MH, probs_MK.to(self.probs_dtype), kernels.cut_plan(plan, self.assignments)

    def send_back(self, output):
        return AllToAll(output, self.splits.back())

    def wait_and_combine(self, handle):
        return kernels.combine_rows(_extend(handle.wait(), len(self.plan.order)), self.plan)


# ---- Over tp: into the sharded product and out of it ----

# _gather and _sum return views: in a graph of torch 2.11 a collective's output would lose its
# gradient if it were returned as it is.

def _gather(group, sequence_parallel, x):
    """With sequence_parallel the x of all ranks, one after the other along the first axis;
    else x.
    """
    if not sequence_parallel:
        return x.view_as(x)
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.view_as(out)


def _sum(group, sequence_parallel, x):
    """The sum of x over the group; with sequence_parallel this rank's part of it, along axis 0.
    """
    if not sequence_parallel:
        return all_sum(x, group).view_as(x)
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out.view_as(out)


def _gather_and_sum(group, sequence_parallel):
    """The two as functions of x only. Each is the other's gradient."""
    return partial(_gather, group, sequence_parallel), partial(_sum, group, sequence_parallel)


def enter_tp(x: Tensor, group, sequence_parallel: bool) -> Tensor:
    """The tokens of all ranks. With sequence_parallel x is this rank's part and is gathered,
    else x is all of them already. The backward sums over the ranks.
    """
    if group_size(group) == 1:
        return x
    return kernels.Adjoint.apply(x, _gather_and_sum(group, sequence_parallel))


def leave_tp(x: Tensor, group, sequence_parallel: bool) -> Tensor:
    """The opposite of enter_tp: x is a partial sum for all tokens. The result is the whole
    sum, with sequence_parallel this rank's part of it.
    """
    if group_size(group) == 1:
        return x
    sum_and_gather = _gather_and_sum(group, sequence_parallel)[::-1]
    return kernels.Adjoint.apply(x, sum_and_gather)


# ---- Modules over ranks: weights, sharded state dicts, gradients ----

def gathered(parameter: Tensor | None) -> Tensor | None:
    """The whole parameter.

    Inside the call of a module that FSDP2 has sharded it is gathered already. If you call
    the router of a sharded layer directly, not through the layer, the weight is gathered here,
    and its gradient is averaged as FSDP2 does.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    average = [Partial("avg")] * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=average)


# parameter -> the value with which all of it begins; the others are drawn
_FILLED_WITH = {"bias": 0.0, "fc1_bias": 0.0, "fc2_bias": 0.0, "norm": 1.0}


def _own_part(parameter, group, axis):
    """(this rank's part, the shape of one unsharded expert, the indices where the part begins).

    The first axis is that of the experts. What has none gets one of length 1.
    """
    own = parameter
    shape = list(parameter.shape)
    starts = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        own = parameter.to_local()
        starts = list(compat.place_of_part(parameter))
    if axis is not None:
        starts[axis] += group_rank(group) * shape[axis]
        shape[axis] *= group_size(group)
    if axis == 0:
        return own, shape[1:], starts
    return own[None], shape, [0, *starts]


class ParallelModule(nn.Module):
    """A module of the layer.

    It knows which of its parameters are sharded, over which group, and over which ranks
    their gradients are summed.
    """
    # parameter -> the field of the config with the standard deviation that it is drawn with
    std_fields = {
        "weight": "init_std", "fc1": "init_std", "fc2": "output_std", "gate_weight": "init_std"}

    def __init__(self, config, pg_collection: ProcessGroups | None):
        super().__init__()
        self._config = config
        self.pg_collection = pg_collection or ProcessGroups()
        self.register_state_dict_post_hook(_give_shards)
        self.register_load_state_dict_pre_hook(_take_shards)

    @property
    def config(self):
        return self._config

    @config.setter
    def config(self, config):
        raise AttributeError(
            f"a config is set once; needs a new {type(self).__name__} of "
            f"dataclasses.replace(module.config, ..), and its load_state_dict with this one's")

    def set_config(self, config) -> None:
        """Of this module and its parts, for who knows that their tensors are those of `config`."""
        for part in self.modules():
            if isinstance(part, ParallelModule):
                part._config = config

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights anew (normal). Biases become zero, norms one. The parts of a layer
        are drawn by their own reset_parameters.

        A seed gives the same model at every ep and tp and in every dtype, on one kind of device:
        torch's default generator draws a seed for each parameter, the same on every rank, and
        that seed and the number of an expert give its weights. So a rank draws its own experts
        alone, one after the other, unsharded over tp and in fp32, and keeps its part.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name in _FILLED_WITH:
                parameter.fill_(_FILLED_WITH[name])
            elif name in self.std_fields and compat.has_values(parameter):
                std = getattr(self.config, self.std_fields[name])
                own, shape, (first, *starts) = _own_part(parameter, *self.shard(name))
                part = tuple(slice(at, at + size) for at, size in zip(starts, own.shape[1:]))
                seed = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
                generator = torch.Generator(own.device)
                for e, expert in enumerate(own, first):
                    generator.manual_seed(seed + e)
                    drawn = torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32,
                                         device=own.device)
                    expert.copy_(drawn[part])

    def shard(self, name: str) -> tuple:
        """(group, axis): parameter `name` is sharded over group along axis. Axis None: it
        is replicated.
        """
        return self.pg_collection.tp, None

    def gradient_group(self, name: str):
        """The group over which the gradients of parameter `name` are summed."""
        return self.pg_collection.tp_dp_cp

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None,
    ) -> dict[str, Tensor]:
        """prefix + name -> tensor: see the function sharded_state_dict.

        ValueError: sharded_offsets or metadata are not empty.
        """
        if sharded_offsets or metadata:
            raise ValueError(f"sharded_offsets is {sharded_offsets!r} and metadata {metadata!r}; "
                             f"both need to be empty: layers are told apart by their prefix")
        state = sharded_state_dict(self)
        return {prefix + path: tensor for path, tensor in state.items()}


def share_out(module: nn.Module, groups: ProcessGroups, over_ep: bool) -> None:
    """Says of a module that is no ParallelModule what that says of itself: over_ep its tensors are
    this rank's part along axis 0, a part of the experts. Else they are whole on every rank.
    """
    vars(module)["_shared_out"] = groups, over_ep
    if over_ep:
        module.register_state_dict_post_hook(_give_shards)
        module.register_load_state_dict_pre_hook(_take_shards)


def _place(module, path, tensor, prefix=""):
    """(group, axis, gradient group) of the tensor at this path of the module: see
    ParallelModule. All are None where neither that nor share_out says anything.

    The tensors of a parametrization (torch.nn.utils.parametrize) go with the parameter that
    they make. If that is sharded, they are sharded like it: each needs as many axes, and
    its size on the sharded one. (So with one expert a rank an adapter that is meant for all
    experts cannot be told from one of its own.)
    """
    made = re.sub(r"\bparametrizations\.([^.]+)\..*", r"\1", path)
    owner, _, name = made.rpartition(".")
    owner = module.get_submodule(owner)
    if not isinstance(owner, ParallelModule):
        groups, over_ep = vars(owner).get("_shared_out", (ProcessGroups(), False))
        if over_ep:
            return groups.ep, 0, groups.expt_dp
        return None, None, groups.tp_dp_cp
    group, axis = owner.shard(name)
    if made != path and axis is not None and group_size(group) > 1:
        whole = getattr(owner.parametrizations[name], "original", None)
        if whole is None:
            whole = getattr(owner, name)
        if tensor.ndim != whole.ndim or tensor.shape[axis] != whole.shape[axis]:
            raise ValueError(
                f"{prefix}{path} has shape {list(tensor.shape)}, and {name} {list(whole.shape)} is "
                f"sharded along axis {axis}: needs as many axes and that size there, else the "
                f"ranks' copies would drift apart")
    return group, axis, owner.gradient_group(name)


# -- state dicts --

def sharded_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Tensor]:
    """Name -> tensor, of a model and its optimizer, for torch.distributed.checkpoint.

    Pass it to save or load; no other step is needed. The tensors are the model's and the
    optimizer's own; those that are sharded over ranks are DTensors. So it loads at other sizes
    of tp and ep, and without any process group. The optimizer's are optimizer.NAME.KEY; its
    hyperparameters, such as lr, are not among them. Names are those without torch.compile and
    checkpoint_wrapper.

    A parameter that the optimizer has not stepped yet gets its state here, that of step 0.
    ValueError: the optimizer has a parameter that the model lacks; it keeps what is no tensor, or,
    for a sharded parameter, a tensor of another shape.

    >>> model = nn.Linear(2, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    >>> list(sharded_state_dict(model, optimizer))
    ['weight', 'bias', 'optimizer.weight.momentum_buffer', 'optimizer.bias.momentum_buffer']
    """
    state = {}
    for path, tensor in model.state_dict().items():
        state[_unwrapped(path)] = tensor
    if optimizer is None:
        return state
    _make_optimizer_state(optimizer)
    others = set(optimizer.state)
    for path, parameter in model.named_parameters():
        others.discard(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                name = f"optimizer.{_unwrapped(path)}.{key}"
                state[name] = _moment(model, path, parameter, name, value)
    if others:
        raise ValueError(f"optimizer has {len(others)} parameters that model lacks; needs the "
                         f"model that holds all of them")
    return state


def _unwrapped(path):
    return re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module)\.", "", path)


def _moment(module, path, parameter, name, value):
    """A value of the state that the optimizer keeps for the parameter, sharded as that is."""
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
    """Gives the parameters that have no state yet that of step 0, by a step of a stand-in. The
    hooks of a step do not run.
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
# What a step without gradients changes in the state of torch's optimizers: the values before it.
_FIRST_VALUES = {"step": 0.0, "mu_product": 1.0}


def _keep_first_step_undamped(optimizer):
    """SGD without momentum yet takes the gradient for it, and with zeros a part of the gradient,
    1 - dampening. So zeros that are new in the next step, made here or loaded, are taken out there.
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
    """(path, tensor, group, axis) of what the module holds itself and shards over more than one
    rank. In the place of a parameter with a parametrization stand the tensors that make it.
    """
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if "parametrizations" in module._modules:
        makers = module.parametrizations
        tensors += makers.named_parameters("parametrizations", remove_duplicate=False)
        tensors += makers.named_buffers("parametrizations", remove_duplicate=False)
    for path, tensor in tensors:
        group, axis, _ = _place(module, path, tensor, prefix)
        if axis is not None and group_size(group) > 1:
            yield path, tensor, group, axis


def _give_shards(module, state, prefix, _):
    """Runs after state_dict() of every ParallelModule: what is sharded becomes DTensors."""
    for path, _, group, axis in _own_shards(module, prefix):
        if prefix + path in state:
            state[prefix + path] = as_shard(prefix + path, state[prefix + path], group, axis)


def as_shard(name, tensor, group, axis):
    """This rank's part along the axis as a DTensor over the group, in the memory of the part.

    A part that FSDP2 holds is sharded over two dims: the group, then FSDP2's. RuntimeError:
    FSDP2 holds it in a way that this does not describe.
    """
    if not isinstance(tensor, DTensor):
        mesh = DeviceMesh.from_group(group, tensor.device.type)
        return DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False)
    ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu")
    inner = tensor.device_mesh
    alike = inner.mesh.cpu()                             # the ranks that hold the same part
    plain = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
    if not plain or torch.isin(alike, ranks).sum() != 1:
        raise RuntimeError(
            f"{name} is a DTensor with {tensor.placements} over ranks {alike.tolist()}, beside a "
            f"group of ranks {ranks.tolist()} that hold other parts; needs fully_shard over ranks "
            f"that hold the same part, such as mesh['dp']")
    # Of each rank of the group, the ranks that hold its part are placed as here.
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
    """Runs before load_state_dict() of every ParallelModule: takes this rank's part of DTensors
    and of whole tensors.
    """
    for path, own, group, axis in _own_shards(module, prefix):
        given = state.get(prefix + path)
        if isinstance(given, Tensor) and given.shape == _whole_shape(own, group, axis):
            part = part_of(prefix + path, given, own, group, axis)
            if metadata.get("assign_to_params_buffers"):
                part = part.clone()                      # else it would hold the whole in memory
            state[prefix + path] = part


def part_of(name, given, own, group, axis):
    """Of the whole tensor, a DTensor or not: the part that `own` holds, in its layout."""
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


# -- gradients --

def reduce_gradients(module: nn.Module) -> None:
    """Sums the gradients of all MoE parameters in `module` over the ranks that hold them.

    Each module says over which ranks: router and latent weights over tp_dp_cp, the shared
    expert over dp_cp (its gate over tp_dp_cp with sequence_parallel), the experts over
    expt_dp. Call it before the optimizer step if you train without FSDP or DDP. This is
    collective. A parameter without a gradient on this rank counts as zero. A parametrization's
    parameters (LoRA) go with the one that they make. ValueError: that one is sharded, and
    they lack its sharded axis.
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
    module_or_parameters: nn.Module | Iterable[Tensor], groups: ProcessGroups | None,
) -> Tensor:
    """The L2 norm of the gradients over all ranks, 0-d, in fp32 at least: what one process
    would get.

    Each expert counts once, and so does each shard over tp or of a DTensor (FSDP2). What
    several ranks hold alike counts once too. `groups` are the layer's own,
    layer.pg_collection; None: one process. Call it after the gradients have been reduced.
    This is collective. A parameter without a gradient counts as zero. ValueError:
    parameters instead of the module, with more than one rank in ep or tp.
    """
    groups = groups or ProcessGroups()
    if isinstance(module_or_parameters, nn.Module):
        shards = _shards_of_module(module_or_parameters, groups)
    else:
        ep, tp = group_size(groups.ep), group_size(groups.tp)
        if max(ep, tp) > 1:
            raise ValueError(f"module_or_parameters is no module, with {ep} ranks of ep and {tp} "
                             f"of tp; needs the module: parameters do not say which are sharded")
        shards = [(parameter, []) for parameter in module_or_parameters]

    squares = defaultdict(float)                 # groups -> the sum over the parameters sharded so
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
