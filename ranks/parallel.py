"""What crosses ranks in a forward: process groups, the dispatch of rows to their experts, the
all-to-all over ep in two halves, the tensor-parallel pair. In one process nothing here
communicates, and you can leave it closed.
"""
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DeviceMesh

if __package__ == "ranks":                   # beside the flat files of the layer
    import compat
    import grouped
    import kernels
    from base import Local, OneProcess, group_size
else:                                        # the layer is a package
    from .. import compat, grouped, kernels
    from ..base import Local, OneProcess, group_size
from . import sharding
from .sharding import all_sum, all_sums, group_rank


# ---- Process groups ----

# None is a group of one rank here. (To torch.distributed None is the group of all ranks.)
_Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class ProcessGroups(OneProcess):
    """torch.distributed groups. None is a group of one rank, over which nothing communicates.

    tp        ranks that shard the shared expert; other weights are whole on each. Each routes its
              own part of the sequence (sequence_parallel).
    ep        ranks that share out the experts, each with tokens of its own.
    tp_cp     ranks that hold one sequence between them.
    dp_cp     all ranks with the same tp rank, including the ep ranks.
    tp_dp_cp  all ranks.
    expt_dp   all ranks with the same experts: those with the same ep rank.

    Each rank's gradients are partial and have to be summed (reduce_gradients). aux_loss,
    seq_aux_loss and the z-loss are defined for one data-parallel rank's tokens, so over n such
    ranks the sum has n of each, as over n microbatches. global_aux_loss is defined for the tokens
    of all ranks, so the sum has one. If a trainer averages over R ranks instead, multiply the
    coefficients of the first three by the size of tp_cp, and that of global_aux_loss by R.
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

    def size(self, name):
        return group_size(getattr(self, name))

    def rank(self, name):
        return group_rank(getattr(self, name))

    def sum(self, x, group):
        return all_sum(x, group)

    def sums(self, tensors, groups):
        return all_sums(tensors, groups)

    def dispatch(self, x, probs, indices, plan, config):
        if self.size("ep") == 1:
            return Local(x, probs, plan)
        sharding.refuse_ddp_of_parts()
        capacity_factor = config.capacity_factor if config.pad_to_capacity else None
        return ExpertParallel(
            x, probs, indices, plan.counts, group=self.ep, capacity_factor=capacity_factor)

    def enter_tp(self, x, sequence_parallel):
        return enter_tp(x, self.tp, sequence_parallel)

    def leave_tp(self, x, sequence_parallel):
        return leave_tp(x, self.tp, sequence_parallel)

    def adopt(self, module):
        sharding.hook_state_dicts(module)

    def compare_replicas(self, model, biases):
        sharding.compare_replicas(model, biases)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ProcessGroups":
        """The groups of a mesh with any of the dims "dp", "cp", "tp", "ep". Collective over all
        ranks of the mesh. ValueError: other names.
        """
        names = mesh.mesh_dim_names
        if not names or not set(names) <= {"dp", "cp", "tp", "ep"}:
            raise ValueError(f"mesh has the dims {names}; needs names among dp, cp, tp, ep")

        def group_over(wanted):
            dims = tuple(name for name in names if name in wanted.split())
            if not dims:
                return None
            return as_one_dim(mesh[dims]).get_group()

        return cls(
            tp=group_over("tp"), ep=group_over("ep"), tp_cp=group_over("tp cp"),
            dp_cp=group_over("dp cp ep"), tp_dp_cp=group_over("dp cp tp ep"),
            expt_dp=group_over("dp cp tp"))


# ---- Over ep: an all-to-all in two halves, with other work between them ----
# The first half issues the exchange, the second waits for it; in the backward the second half
# issues the opposite exchange, and the first waits. So what runs between the halves runs beside
# the exchange in both directions, in eager mode and in a graph.
#
# In the backward the second half has to hand the gradient in flight to the first. Autograd hands
# over only what is the gradient of a tensor, in that tensor's shape. So the first half has a second
# output, the shadow: one number, expanded to the shape of the rows sent, which takes no memory. The
# gradient in flight is returned as the shadow's.

class Splits(NamedTuple):
    """Of an all-to-all: `send[r]` rows to rank r, `receive[r]` from it."""
    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup

    def back(self):
        return Splits(self.receive, self.send, self.group)


def exchange(rows: Tensor, splits: Splits) -> Tensor:
    """Issues an all-to-all of rows, without a gradient; the result is valid after `wait`."""
    return all_to_all(rows.contiguous(), *splits)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, splits):
        ctx.set_materialize_grads(False)
        # Autograd compares the shapes of a tensor and of its gradient, so the shadow has the shape
        # of the gradient that it carries.
        shadow = rows.new_zeros(()).expand_as(rows)
        return exchange(rows, splits), shadow

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, _, grad_in_flight):
        # rows, splits
        return wait(grad_in_flight), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, shadow, splits):
        ctx.splits = splits
        return wait(buffer)

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        in_flight = exchange(grad, ctx.splits.back())
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            wait(in_flight)                  # detect_anomaly reads the returned gradient at once
        # buffer, shadow, splits
        return None, in_flight, None


class AllToAll:
    """Rows [sum(send), ..] in flight. `wait` returns [sum(receive), ..], differentiably."""

    def __init__(self, rows: Tensor, splits: Splits):
        self.splits = splits
        self.buffer, self.shadow = _Start.apply(rows, splits)

    def wait(self) -> Tensor:
        return _Finish.apply(self.buffer, self.shadow, self.splits)


# ---- Dispatch over ep: rows to their experts, and their outputs back ----

def _cut(x, rows):
    return x[:rows]


def _extend(x, rows):
    """x with zeros behind it."""
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _first_rows(x, rows):
    """x[:rows], where `rows` was read from the device. It has a gradient of its own, because a
    graph of torch 2.11 makes none for such a slice.
    """
    return kernels.with_gradient(x, partial(_cut, rows=rows), partial(_extend, rows=x.shape[0]))


class ExpertParallel:
    """A Dispatch: a token goes once to each rank that holds experts of it, and back.

    So a row is a (token, rank), and a token has at most D = min(K, ranks) rows. A row carries the
    token's K probs and experts. Experts of other ranks become unrouted in it, and the receiving
    rank sums what its own experts return.

    The ranks first exchange how many rows and assignments go where, and read that on the host: the
    dispatch's one sync. With capacity_factor, which is None without pad_to_capacity, every rank
    gets as many rows as there can be: no exchange of counts, no sync. M is the number of rows
    received.
    """

    def __init__(self, x_TH, probs_TK, indices_TK, counts_E, group, capacity_factor):
        T, K = probs_TK.shape
        E, ranks = len(counts_E), group.size()
        local = E // ranks                                   # experts of one rank
        rank_TK, _ = kernels.merge_repeats(indices_TK // local, ranks)
        # Slots that name no rank go to the end, beyond D; the others keep their order.
        slots_TD = (rank_TK == ranks).argsort(dim=1, stable=True)[:, :ranks]
        plan = kernels.plan_permutation(rank_TK.gather(1, slots_TD), ranks)
        if capacity_factor is not None:
            most = local * min(T, kernels.get_capacity(T * K, E, capacity_factor))
            rows_to_each = min(T, most)
            plan = pad_plan(plan, rows_to_each)
            send = receive = [rows_to_each] * ranks
            assignments = ranks * min(T * K, most)
        else:
            # The counts are sent first, so that the rows are gathered while they are under way.
            sent_R2 = torch.stack((plan.counts, counts_E.view(ranks, local).sum(1)), 1)
            each = [1] * ranks
            counts_in_flight = exchange(sent_R2, Splits(each, each, group))
            # _first_rows would need a second graph for the case that it cuts nothing off. So the
            # plan gets one more row, unrouted, and there is always a row to cut off.
            plan = plan._replace(order=F.pad(plan.order, (0, 1)))
        rows = kernels.gather_rows(x_TH, plan)
        # The experts travel beside the probs, as numbers from 1, exact below 2²⁴; 0: no token.
        # Both in one dtype, since under autocast `cat` takes no fp16 beside fp32.
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
        return rows_MH, probs_MK.to(self.probs_dtype), cut_plan(plan, self.assignments)

    def send_back(self, output):
        return AllToAll(output, self.splits.back())

    def wait_and_combine(self, handle):
        return kernels.combine_rows(_extend(handle.wait(), len(self.plan.order)), self.plan)


def pad_plan(plan: kernels.Plan, capacity: int) -> kernels.Plan:
    """The plan with exactly C = `capacity` rows an expert: row e·C + c is the c-th row of expert e.

        rows of the plan      a b | c d e | u v         two experts; u and v are unrouted
        with capacity = 3     a b - | c d e | *

    "-" is a filler: its order is T·K, and gather_rows makes it zeros. "*" is row E·C, to which
    `inverse` sends all unrouted assignments. So the order has E·C + 1 entries. No expert may have
    more than C rows. This is not checked: that would sync the device.
    """
    E = len(plan.counts)
    N = plan.order.shape[0]
    start_E = F.pad(plan.offsets, (1, 0))                # of the unrouted rows too
    expert_TK = grouped.expert_of(plan.inverse, plan.offsets)
    place_TK = plan.inverse - start_E[expert_TK]
    inverse = torch.where(expert_TK < E, expert_TK * capacity + place_TK, E * capacity)

    place_C = torch.arange(capacity, device=inverse.device)
    row_EC = torch.where(place_C < plan.counts[:, None], start_E[:-1, None] + place_C, N)
    filler_1 = torch.arange(N, N + 1, device=inverse.device)         # F.pad would fix a symbolic N
    order = torch.cat((plan.order, filler_1))[row_EC.flatten()]
    order = F.pad(order, (0, 1))                         # the last one is masked
    # Inductor of torch 2.13 fails on a cumsum of the counts where C is symbolic.
    offsets = (capacity * torch.arange(1, E + 1, device=inverse.device)).int()
    return kernels.Plan(
        order, inverse, counts=torch.full_like(plan.counts, capacity), offsets=offsets)


def cut_plan(plan: kernels.Plan, num_rows: int) -> kernels.Plan:
    """The plan's first num_rows rows, which must include all routed ones, and one row for the rest.
    """
    inverse = plan.inverse.clamp(max=num_rows)
    return plan._replace(order=plan.order[:num_rows + 1], inverse=inverse)


# ---- Over tp: into the sharded product and out of it ----

# In a graph of torch 2.11 the output of a collective loses its gradient, but a view of it does not.
# So _gather and _sum return views.

def _gather(group, sequence_parallel, x):
    if not sequence_parallel:
        return x.view_as(x)
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.view_as(out)


def _sum(group, sequence_parallel, x):
    if not sequence_parallel:
        return all_sum(x, group).view_as(x)
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out.view_as(out)


def _gather_and_sum(group, sequence_parallel):
    """The two as functions of x only. Each is the other's gradient."""
    return partial(_gather, group, sequence_parallel), partial(_sum, group, sequence_parallel)


def enter_tp(x: Tensor, group, sequence_parallel: bool) -> Tensor:
    """The tokens of all tp ranks. With sequence_parallel each rank has a part of them, and the
    parts are gathered. Without it every rank has all tokens, so the result is x. The backward sums
    over the ranks.
    """
    if group_size(group) == 1:
        return x
    return kernels.with_gradient(x, *_gather_and_sum(group, sequence_parallel))


def leave_tp(x: Tensor, group, sequence_parallel: bool) -> Tensor:
    """The opposite of enter_tp: the sum of x over the tp ranks. With sequence_parallel each rank
    gets its part of the sum.
    """
    if group_size(group) == 1:
        return x
    gather, sum_ = _gather_and_sum(group, sequence_parallel)
    return kernels.with_gradient(x, sum_, gather)


# ---- Private names of torch ----
# Those of the layer are in compat.py. Only code for several ranks needs what is here.

def as_one_dim(mesh):
    """A DeviceMesh of one dim over all ranks of this one. Collective."""
    return mesh._flatten()


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group) -> Tensor:
    """The rows in flight. The public functions wait at once, or break a graph."""
    return torch.ops._c10d_functional.all_to_all_single(
        rows, output_split_sizes=receive, input_split_sizes=send, group_name=group.group_name)


def wait(buffer: Tensor) -> Tensor:
    """The tensor in flight, once it has arrived."""
    return torch.ops._c10d_functional.wait_tensor(buffer)

