"""A Mixture-of-Experts layer: config, process groups, layer, router, experts, shared expert, what crosses ranks. The
tensor functions are in kernels.py, with the letters.

    hidden_states [S, B, H] ──┬─> TopKRouter.route ──> probs [T, K], indices [T, K]
                              ├──────────────────> plan_permutation ──> Experts ──┬─> [S, B, H]
                              └──────────────────> SharedExpertMLP ───────────────┘
"""
import enum
import functools
import math
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

if __package__:
    from . import kernels
else:
    import kernels


# ---- Config ----

LOSS_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss",
              "global_aux_loss": "global_load_balancing_loss"}                 # balancing type -> name in the metrics
LOAD_BALANCING_TYPES = ("none", *LOSS_NAMES, "sinkhorn")


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. Names are Megatron's without the moe_ / moe_router_ prefix; all are checked here.

    hidden_size H, ffn_hidden_size F (of one expert), num_experts E, topk K. score_function to scaling_factor: see
    kernels.topk_routing_with_score_function; activation fields: kernels.activation; apply_probs_on: kernels.expert_mlp.
    load_balancing_type and aux_loss_coeff: one type and a float, or tuples of the same length; a coefficient of 0 is no loss.
    """
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    activation: str = "swiglu"                     # "swiglu", "geglu", "quick_geglu", "relu2"
    glu_alpha: float = 1.702                       # of quick_geglu
    glu_linear_offset: float = 0.0
    activation_clamp_value: float | None = None
    activation_fp8_input_store: bool = False       # keep fc1's output for the backward as fp8 e4m3
    add_bias_linear: bool = False                  # the experts' biases
    apply_probs_on: str = "activation"             # "input", "activation", "output"
    score_function: str = "softmax"                # "softmax", "sigmoid", "sqrtsoftplus"
    pre_softmax: bool = False                      # softmax over all E before the choice, not over the chosen after it
    norm_topk_prob: bool | None = None             # None: Megatron's convention
    norm_eps: float = 1e-20
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None            # None: topk // group_topk
    scaling_factor: float | None = None
    router_bias: bool = False                      # a trainable bias on the logits
    router_dtype: torch.dtype = torch.float32
    enable_expert_bias: bool = False               # a buffer added to the scores for the choice alone, kept by
    bias_update_rate: float = 1e-3                 # update_expert_bias (arXiv 2408.15664)
    load_balancing_type: str | tuple[str, ...] = "none"
    aux_loss_coeff: float | tuple[float, ...] = 0.0
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None          # noise on the router's input, in training
    force_load_balancing: bool = False             # random logits, for benchmarks
    calculate_per_token_loss: bool = False         # losses times the count of valid tokens
    capacity_factor: float | None = None           # None: dropless
    token_drop_policy: str = "probs"               # "probs", "position"
    pad_to_capacity: bool = False
    shared_expert_intermediate_size: int | None = None     # Fs; None: no shared expert
    shared_expert_gate: bool = False               # its output times sigmoid(x · gate_weightᵀ)
    shared_expert_overlap: bool = False            # in five steps, on a side stream, around the routed path
    sequence_parallel: bool = False                # over tp each rank has its part of the sequence
    params_dtype: torch.dtype = torch.float32
    init_std: float = 0.02

    def __post_init__(self):
        def refuse(fields: str, why: str):
            got = ", ".join(f"{name} = {getattr(self, name)!r}" for name in fields.split())
            raise ValueError(f"{got}: {why}")

        for name in ("hidden_size", "ffn_hidden_size", "num_experts", "topk"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                refuse(name, "needs a positive int")
        for name, known in (("activation", kernels.ACTIVATIONS), ("score_function", tuple(kernels.SCORE_FUNCTIONS)),
                            ("apply_probs_on", ("input", "activation", "output")),
                            ("token_drop_policy", ("probs", "position"))):
            if getattr(self, name) not in known:
                refuse(name, f"needs one of {', '.join(known)}")
        for name in ("router_dtype", "params_dtype"):
            if not isinstance(getattr(self, name), torch.dtype) or not getattr(self, name).is_floating_point:
                refuse(name, "needs a floating torch.dtype")
        if self.topk > self.num_experts:
            refuse("topk num_experts", "a token cannot have more experts than there are; lower topk")

        if self.activation == "relu2" and (self.glu_linear_offset != 0.0 or self.activation_clamp_value is not None):
            refuse("activation glu_linear_offset activation_clamp_value", "relu2 is not gated; leave the other two out")
        if self.activation != "quick_geglu" and self.glu_alpha != 1.702:
            refuse("activation glu_alpha", "only quick_geglu has an alpha; leave glu_alpha out")
        if self.activation_clamp_value is not None and self.activation_clamp_value <= 0:
            refuse("activation_clamp_value", "needs a positive bound, or None")

        normalised = self.norm_topk_prob
        if normalised is None:
            normalised = self.score_function == "softmax" and not self.pre_softmax
        if self.topk == 1 and normalised and "sinkhorn" not in self.balancing:
            refuse("topk norm_topk_prob pre_softmax", "the one prob is always 1, so the router gets no gradient; set "
                   "pre_softmax=True or norm_topk_prob=False")
        if self.pre_softmax and self.score_function != "softmax":
            refuse("pre_softmax score_function", "only softmax has a before and an after; leave pre_softmax out")

        if (self.num_groups is None) != (self.group_topk is None):
            refuse("num_groups group_topk", "give both or neither")
        if self.num_groups is None:
            if self.group_score_topk is not None:
                refuse("group_score_topk num_groups", "no groups to score; set num_groups and group_topk too")
        else:
            if self.num_groups < 1 or self.num_experts % self.num_groups:
                refuse("num_groups num_experts", "groups need equal sizes; num_groups must divide num_experts")
            size = self.num_experts // self.num_groups
            if not 1 <= self.group_topk <= self.num_groups or self.group_topk * size < self.topk:
                refuse("group_topk num_groups topk", f"group_topk groups of {size} experts must exist and hold topk experts")
            if self.group_score_topk is None and not 1 <= self.topk // self.group_topk <= size:
                refuse("topk group_topk group_score_topk", f"topk // group_topk = {self.topk // self.group_topk} scores a "
                       f"group of {size}; set group_score_topk to 1..{size}")
            if self.group_score_topk is not None and not 1 <= self.group_score_topk <= size:
                refuse("group_score_topk num_groups", f"a group has {size} experts; needs 1..{size}")

        types, coeffs = self.load_balancing_type, self.aux_loss_coeff
        if isinstance(types, str) == isinstance(coeffs, (tuple, list)) or \
                not isinstance(types, str) and len(types) != len(coeffs):
            refuse("load_balancing_type aux_loss_coeff", "one type takes a float, several a tuple of the same length")
        for kind in self.balancing:
            if kind not in LOAD_BALANCING_TYPES:
                refuse("load_balancing_type", f"needs {', '.join(LOAD_BALANCING_TYPES)}, or a tuple of them")
        if len(set(self.balancing)) != len(self.balancing) or len(self.balancing) > 1 and "none" in self.balancing:
            refuse("load_balancing_type", "each type at most once, and \"none\" beside no other")
        if "none" in self.balancing and self.balancing["none"]:
            refuse("load_balancing_type aux_loss_coeff", "a coefficient of no loss; name the type, or leave it out")
        if "sinkhorn" in self.balancing:
            for name in ("num_groups", "scaling_factor", "enable_expert_bias", "norm_topk_prob", "pre_softmax"):
                if getattr(self, name):
                    refuse(f"load_balancing_type {name}", f"sinkhorn has its own choice and probs; leave {name} out")
            if len(self.balancing) > 1 or self.balancing["sinkhorn"] or self.score_function != "softmax":
                refuse("load_balancing_type aux_loss_coeff score_function", "sinkhorn goes alone, without a coefficient, "
                       "and with softmax")
        if self.capacity_factor is None and (self.pad_to_capacity or self.token_drop_policy != "probs"):
            refuse("capacity_factor pad_to_capacity token_drop_policy", "nothing is dropped; set capacity_factor too")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            refuse("capacity_factor", "needs a positive factor, or None")
        size = self.shared_expert_intermediate_size
        if size is None and (self.shared_expert_gate or self.shared_expert_overlap):
            refuse("shared_expert_intermediate_size shared_expert_gate shared_expert_overlap",
                   "there is no shared expert; set shared_expert_intermediate_size too")
        if size is not None and (not isinstance(size, int) or size < 1):
            refuse("shared_expert_intermediate_size", "needs a positive int, or None")
        for name in ("z_loss_coeff", "input_jitter_eps"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                refuse(name, "needs 0 or more, or None")

    @property
    def balancing(self) -> dict[str, float]:
        """Balancing type -> its coefficient."""
        if isinstance(self.load_balancing_type, str):
            return {self.load_balancing_type: self.aux_loss_coeff}
        return dict(zip(self.load_balancing_type, self.aux_loss_coeff))

    @property
    def parts(self) -> int:
        """Parts of fc1's output: gate and up, or one where the activation is not gated."""
        return 1 if self.activation == "relu2" else 2


@dataclass(frozen=True)
class ProcessGroups:
    """torch.distributed groups; None is a group of one, without communication and without init_process_group.

    tp: ranks that shard the shared expert. ep: ranks that share out the experts, each with tokens of its own. tp_cp: ranks
    that hold one sequence between them. dp_cp: all with the same tp rank. tp_dp_cp: all. expt_dp: all with the same
    experts (the same ep rank). Gradients are partial on each rank and are to be summed: reduce_gradients. A trainer that
    averages over R ranks instead gets the global loss R times too weak: multiply its coefficient by R. ValueError: ep
    without tp_dp_cp.
    """
    tp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    tp_cp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    tp_dp_cp: dist.ProcessGroup | None = None
    expt_dp: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo):
        return self                                                   # a copy of a layer is on the same ranks

    def __post_init__(self):
        if self.ep is not None and self.tp_dp_cp is None:
            raise ValueError("ep is given and tp_dp_cp is None; needs tp_dp_cp too, the group of all ranks: the expert "
                             "biases of the ranks would drift apart (ProcessGroups.from_mesh makes all groups)")

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ProcessGroups":
        """Of a mesh with any of the dims "dp", "cp", "tp", "ep"; other names are a ValueError. Collective: every rank of the
        mesh calls it."""
        names = mesh.mesh_dim_names or ()
        if not names or not set(names) <= {"dp", "cp", "tp", "ep"}:
            raise ValueError(f"mesh has the dims {names or None}; needs names among dp, cp, tp, ep")

        def over(*dims):
            dims = tuple(name for name in names if name in dims)
            return (mesh[dims]._flatten() if len(dims) > 1 else mesh[dims]).get_group() if dims else None
        return cls(tp=over("tp"), ep=over("ep"), tp_cp=over("tp", "cp"), dp_cp=over("dp", "cp", "ep"),
                   tp_dp_cp=over("dp", "cp", "tp", "ep"), expt_dp=over("dp", "cp", "tp"))


def _size(group) -> int:
    return 1 if group is None else group.size()


def _rank(group) -> int:
    return 0 if group is None else group.rank()


def _all_sum(x: Tensor, group) -> Tensor:
    """x summed over the group, without gradient."""
    if group is None:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def _gather_dim0(x: Tensor, group) -> Tensor:
    """The ranks' x one after the other along the first axis."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter_sum(x: Tensor, group) -> Tensor:
    """This rank's part, along the first axis, of x summed over the group."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _normal(shape: tuple, std: float, like: Tensor) -> Tensor:
    """Drawn in fp32 whatever the dtype, so that a seed gives the same model in every dtype."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).normal_(0.0, std)


# ---- Layer ----

class MoELayer(nn.Module):
    """hidden_states [S, B, H] -> same shape and dtype: y_t = Σ_k probs[t, k] · expert_{indices[t, k]}(x_t), plus the
    shared expert's output. Parts: layer.router, layer.experts, layer.shared_experts (None without).

    `torch.compile(layer, fullgraph=True)` takes it whole; with shared_expert_overlap or ep, where streams and all-to-alls
    are kept in order by eager code, `layer.compile()` compiles the pieces between. Under ep each rank has E / ep experts
    and tokens of its own, and every rank runs every forward and backward, also with T = 0; with pad_to_capacity all have
    the same T; with sequence_parallel the same S over tp. ValueError: sizes that ep or tp do not divide, tp without
    sequence_parallel, and in the forward wrong shapes.
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__()
        self.config, self.groups = config, pg_collection or ProcessGroups()
        self.router = TopKRouter(config, pg_collection)
        self.experts = Experts(config, pg_collection)
        self.shared_experts = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(config, config.shared_expert_gate, pg_collection)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None) -> Tensor:
        """hidden_states [S, B, H] or [T, H]; padding_mask [S, B] (or [T]) bool, True = padding: no routed expert;
        topk_indices [T, K] or [S, B, K] int64 replaces the router's choice (see TopKRouter.route)."""
        if self._in_steps:
            return self._forward_in_steps(hidden_states, padding_mask, topk_indices)
        probs_TK, plan = self._plan(hidden_states, padding_mask, topk_indices)
        y_TH = self.experts(hidden_states.flatten(0, -2), probs_TK, plan)
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        return self._add(y_TH, shared, hidden_states)

    @torch.compiler.disable(reason="streams and all-to-alls are kept in order by eager code: use layer.compile(), which "
                                   "compiles the pieces between")
    def _forward_in_steps(self, hidden_states: Tensor, padding_mask: Tensor | None, topk_indices: Tensor | None) -> Tensor:
        """The routed path, over ep if there is one; with overlap the shared expert's steps between, on their stream.
        The backward runs through it in reverse: a communication issued, the shared expert's part, the wait."""
        overlap, shared, ep = self.config.shared_expert_overlap, self.shared_experts, self.groups.ep
        try:
            if overlap:
                shared.pre_forward_comm(hidden_states)
            if ep is None:
                probs_TK, plan = self._plan(hidden_states, padding_mask, topk_indices)
            else:
                rows_NH, probs_N, plan = self._plan_and_gather(hidden_states, padding_mask, topk_indices)
                send, receive, local = self._splits(plan)
                out, back = _Exchange(ep, send, receive), _Exchange(ep, receive, send)
                pending = _Issue.apply(out, rows_NH[:sum(send)], probs_N[:sum(send)])
            if overlap:
                shared.linear_fc1_forward_and_act()
            if ep is None:
                y_TH = self.experts(hidden_states.flatten(0, -2), probs_TK, plan)
            else:
                rows_MH, probs_M = _Wait.apply(out, *pending)
                rows_MH = self.experts(rows_MH, probs_M[:, None], local)
                pending = _Issue.apply(back, rows_MH)
            if overlap:
                shared.linear_fc2_forward()
                shared.post_forward_comm()
            if ep is not None:
                y_TH = self._combine(_Wait.apply(back, *pending)[0], plan, hidden_states)
            output = None if shared is None else shared.get_output() if overlap else shared(hidden_states)
            return self._add(y_TH, output, hidden_states)
        except BaseException:
            if overlap:
                shared.reset_overlap()
            raise

    def _plan(self, hidden_states, padding_mask, topk_indices) -> tuple[Tensor, kernels.Permutation]:
        probs_TK, indices_TK = self.router.route(hidden_states, padding_mask, topk_indices)
        return probs_TK, kernels.plan_permutation(indices_TK, self.config.num_experts)

    def _plan_and_gather(self, hidden_states, padding_mask, topk_indices) -> tuple[Tensor, Tensor, kernels.Permutation]:
        """(rows [N, H], their probs [N], plan): in the order of all E experts, so of the ranks that hold them."""
        config = self.config
        probs_TK, indices_TK = self.router.route(hidden_states, padding_mask, topk_indices)
        x_TH = hidden_states.flatten(0, -2)
        if config.pad_to_capacity:                                    # fillers come from a token of zeros that goes nowhere
            x_TH, probs_TK = F.pad(x_TH, (0, 0, 0, 1)), F.pad(probs_TK, (0, 0, 0, 1))
            indices_TK = F.pad(indices_TK, (0, 0, 0, 1), value=config.num_experts)
        plan = kernels.plan_permutation(indices_TK, config.num_experts)
        if config.pad_to_capacity:
            T = x_TH.shape[0] - 1
            plan = kernels.pad_plan(plan, min(T, kernels.get_capacity(T * config.topk, config.num_experts, config.capacity_factor)))
        return kernels.gather_rows(x_TH, plan), kernels.gather_probs(probs_TK, plan), plan

    def _splits(self, plan: kernels.Permutation) -> tuple[list[int], list[int], kernels.Permutation]:
        """(rows to each rank, rows from each rank, plan of the received rows over the local experts). The one host sync;
        with pad_to_capacity none: all splits are equal, for which all ranks need the same T."""
        ep, ranks, (E,) = self.groups.ep, self.groups.ep.size(), plan.counts.shape
        expert_M = torch.arange(E // ranks, device=plan.counts.device).repeat(ranks)          # of each block received
        if self.config.pad_to_capacity:
            send = receive = [(plan.order.shape[0] - 1) // ranks] * ranks
            expert_M = expert_M.repeat_interleave((plan.order.shape[0] - 1) // E)
        else:
            received = torch.empty_like(plan.counts)                                          # [ranks · E / ranks]
            dist.all_to_all_single(received, plan.counts, group=ep)
            send, receive = torch.stack((plan.counts, received)).view(2, ranks, -1).sum(2).tolist()
            expert_M = expert_M.repeat_interleave(received, output_size=sum(receive))
        return send, receive, kernels.plan_permutation(expert_M[:, None], E // ranks)

    def _combine(self, rows: Tensor, plan: kernels.Permutation, hidden_states: Tensor) -> Tensor:
        rows_NH = F.pad(rows, (0, 0, 0, plan.order.shape[0] - rows.shape[0]))                  # those that went nowhere
        return kernels.combine_rows(rows_NH, plan)[:hidden_states[..., 0].numel()]

    def _add(self, y_TH: Tensor, shared: Tensor | None, hidden_states: Tensor) -> Tensor:
        y = y_TH.view(hidden_states.shape)
        return y if shared is None else y + shared.to(y.dtype)

    @property
    def _in_steps(self) -> bool:
        return self.config.shared_expert_overlap or self.groups.ep is not None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Tensor]:
        """prefix + state-dict name -> the layer's own tensors, as DTensors over tp or ep where those are given:
        torch.distributed.checkpoint.save writes them and load into them is the whole load, also at other sizes of tp and
        ep, and without any process group. ValueError unless sharded_offsets and metadata are empty."""
        state = {}
        for name, part in self.named_children():
            state |= part.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state

    def compile(self, **options) -> None:
        """In place, with torch.compile's options: the whole layer as one graph; with shared_expert_overlap or ep its
        pieces (router and plan, experts, shared fc1, shared fc2, combine, sum), each one graph."""
        options = {"fullgraph": True, **options}
        if not self._in_steps:
            return super().compile(**options)
        for owner, names in ((self, ("_plan", "_plan_and_gather", "_combine", "_add")), (self.experts, ("forward",)),
                             (self.shared_experts, ("_fc1_and_act", "_fc2"))):
            for name in names if owner is not None else ():           # a bound method, so that deepcopy binds it anew
                setattr(owner, name, types.MethodType(torch.compile(getattr(type(owner), name), **options), owner))


# ---- Router ----

_LOSS_SCALE: dict[torch.device, Tensor] = {torch.device("cpu"): torch.ones(())}


def _loss_scale(device: torch.device) -> Tensor:
    if device not in _LOSS_SCALE:
        _LOSS_SCALE[device] = _LOSS_SCALE[torch.device("cpu")].to(device)
    return _LOSS_SCALE[device]


def set_aux_loss_scale(scale: float | Tensor) -> None:
    """Factor on the gradients of all balance losses and z-losses: what the main loss is scaled by before its backward
    (a loss scaler's factor, 1 / microbatches, ..). A float or a 0-d tensor; holds for every backward from now on, also
    of forwards already done, and in compiled code without a recompile."""
    for tensor in _LOSS_SCALE.values():
        tensor.copy_(scale) if isinstance(scale, Tensor) else tensor.fill_(scale)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """activation -> activation, with `loss` hung onto its backward: the loss gets the gradient `scale` (0-d tensor)."""

    @staticmethod
    def forward(ctx, activation, loss, scale):
        ctx.scale, ctx.dtype = scale, loss.dtype     # not save_for_backward: the scale may change before the backward
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx, grad):
        return grad, kernels.value_in_backward(ctx.scale, grad).to(ctx.dtype), None


class Router(ABC, nn.Module):
    """weight [E, H] -> logits. Subclasses say what the logits choose: `routing` and `forward`."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__()
        self.config, self.groups = config, pg_collection or ProcessGroups()
        if _size(self.groups.tp) > 1 and not config.sequence_parallel:
            raise ValueError(f"tp has {_size(self.groups.tp)} ranks and sequence_parallel is False: they would route the same "
                             f"tokens; set sequence_parallel=True")
        self.layer_number: int | None = None
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=config.params_dtype)) if config.router_bias else None
        Router.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Draws the weight anew (normal, init_std); the bias becomes zero."""
        with torch.no_grad():
            self.weight.copy_(_normal(self.weight.shape, self.config.init_std, self.weight))
            if self.bias is not None:
                self.bias.zero_()

    def gating(self, input: Tensor) -> Tensor:
        """input [.., H] -> logits [.., E] in router_dtype, immune to autocast."""
        return kernels.router_gating_linear(input, self.weight, self.bias, self.config.router_dtype)

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""

    @abstractmethod
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """input [S, B, H] -> (probs [T, E], routing_map [T, E] bool)."""

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number


def _recomputing() -> bool:
    """Whether a non-reentrant checkpoint is running its forward again, inside a backward. (A reentrant one runs its
    first pass without grad, so there the second pass is the one to count.) Private names of torch, in this one place."""
    if torch._C._current_graph_task_id() == -1:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


# Ops, since only the running program can tell a recomputation, compiled code cannot.

@functools.partial(kernels._op, mutates_args=("buffer",))
def _update_once(buffer: Tensor, value: Tensor, add: bool) -> None:
    """buffer += value, or = value; nothing in a recomputation."""
    if not _recomputing():
        buffer.copy_(buffer + value if add else value)


@functools.partial(kernels._op, mutates_args=("sums", "steps"))
def _running_mean(sums: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """Adds counts [E] to sums [E] and 1 to steps [], not in a recomputation; returns sums / steps in fp64."""
    if not _recomputing():
        sums.add_(counts)
        steps.add_(1)
    return sums.double() / steps.double().clamp(min=1)


@_running_mean.register_fake
def _(sums, steps, counts):
    return torch.empty_like(sums, dtype=torch.float64)


class TopKRouter(Router):
    """Each token to its top K experts. `route` gives the [T, K] form that the layer runs on, `forward` the [T, E] form.

    In training, with grad enabled, losses are attached to probs: they are in the gradient already, do not add them.
    Counts and the running sums of the global loss grow once per training forward, under activation checkpoints too.
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        E = config.num_experts

        def buffer(name, *shape, dtype=torch.float32, on=True, persistent=False):
            self.register_buffer(name, torch.empty(shape, dtype=dtype) if on else None, persistent=persistent)
        buffer("expert_bias", E, on=config.enable_expert_bias, persistent=True)
        buffer("local_tokens_per_expert", E, on=config.enable_expert_bias)          # since the last update_expert_bias
        buffer("global_tokens_per_expert", E, on="global_aux_loss" in config.balancing)
        buffer("ga_steps", on="global_aux_loss" in config.balancing)                # forwards in the sums above
        buffer("last_tokens_per_expert", E, dtype=torch.int64)                      # of the latest training forward
        buffer("last_losses", len(METRICS))
        # loss -> (how many ranks hold parts of it, whether these are data-parallel ranks too)
        self._reduced_over = {name: (_size(self.groups.tp_cp), False) for name in METRICS}
        self._reduced_over["global_load_balancing_loss"] = _size(self.groups.tp_dp_cp), True
        self._reset_buffers()

    def reset_parameters(self) -> None:
        """Draws the weight anew (normal, init_std); biases, counts and sums become zero."""
        super().reset_parameters()
        self._reset_buffers()

    def _reset_buffers(self) -> None:
        for tensor in self.buffers(recurse=False):
            tensor.zero_()
        self.last_losses.fill_(math.nan)
        _loss_scale(self.weight.device)                               # made here, not by the first compiled forward

    # -- the buffers stay fp32: a bias in bf16 would lose its updates of 1e-3, counts their units --

    def _apply(self, fn, recurse=True):
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        _loss_scale(self.weight.device)
        return self

    def _maintain_float32_expert_bias(self) -> None:
        """Casts the expert bias back where something outside of `_apply` has cast it."""
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.float()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._maintain_float32_expert_bias()                          # load_state_dict(assign=True) takes any dtype

    def _save_to_state_dict(self, *args, **kwargs):
        self._maintain_float32_expert_bias()
        super()._save_to_state_dict(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Tensor]:
        """See MoELayer.sharded_state_dict."""
        return _sharded(self, self.groups.tp, {}, prefix, sharded_offsets, metadata)

    # -- the steps of a routing, in order --

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """In training, input · uniform[1 - eps, 1 + eps] (arXiv 2101.03961); the experts see the clean input."""
        eps = self.config.input_jitter_eps
        if not self.training or not eps:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits [S, B, E] with the z-loss attached, in training with grad (arXiv 2202.08906). Over tp_cp: the sum over
        the local valid tokens, divided by the valid tokens of all."""
        coeff, group = self.config.z_loss_coeff, self.groups.tp_cp
        if not coeff or not self._losses_on():
            return logits
        loss = kernels.z_loss_func(logits, coeff, padding_mask)
        if padding_mask is None:
            tokens = math.prod(logits.shape[:-1]) * _size(group)
            loss = loss / _size(group)
        else:
            local = (~padding_mask).sum()
            tokens = _all_sum(local, group)
            loss = loss * local / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(logits, coeff, loss, "z_loss", group, valid_token_count=tokens)

    def _choose(self, logits_TE: Tensor, padding_T: Tensor | None, topk_indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """(probs [T, K], indices [T, K]) before padding and dropping."""
        config = self.config
        if "sinkhorn" in config.balancing:
            return self._choose_sinkhorn(logits_TE, padding_T, topk_indices)
        return kernels.topk_routing_with_score_function(
            logits_TE, config.topk, config.pre_softmax, config.num_groups, config.group_topk, config.scaling_factor,
            config.score_function, self.expert_bias, True, topk_indices, config.norm_topk_prob, config.norm_eps,
            config.group_score_topk)

    def _choose_sinkhorn(self, logits_TE: Tensor, padding_T: Tensor | None, topk_indices: Tensor | None):
        K, E = self.config.topk, self.config.num_experts
        if topk_indices is None:
            with torch.no_grad():
                balanced_TE = kernels.sinkhorn(kernels._wide(logits_TE), padding_mask=padding_T) if self.training else logits_TE
                topk_indices = balanced_TE.topk(K, dim=1).indices
        wide_TE = kernels._wide(logits_TE)
        scores_TE = wide_TE.sigmoid() if K == 1 else wide_TE.softmax(-1)
        probs_TK = scores_TE.gather(1, topk_indices.clamp(max=E - 1)).masked_fill(topk_indices >= E, 0.0)
        return probs_TK.to(logits_TE.dtype), topk_indices

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [.., E] -> (probs [T, E], routing_map [T, E]): in training the top K of sinkhorn(logits), in eval of the
        logits; probs are, there, the sigmoid (K = 1) or the fp32 softmax over all E, not normalised again."""
        return kernels.routing_to_map(*self._choose_sinkhorn(logits.flatten(0, -2), None, None), self.config.num_experts)

    def _drop(self, probs_TK: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
        """What is over an expert's capacity goes nowhere."""
        config, E = self.config, self.config.num_experts
        probs_TE, map_TE = kernels.routing_to_map(probs_TK.detach(), indices_TK, E)
        kept_TE = kernels.apply_router_token_dropping(
            probs_TE, map_TE, config.topk, config.capacity_factor, config.token_drop_policy)[1]
        gone_TK = ~kept_TE.gather(1, indices_TK.clamp(max=E - 1)) | (indices_TK >= E)
        return probs_TK.masked_fill(gone_TK, 0.0), indices_TK.masked_fill(gone_TK, E)

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor) -> Tensor:
        """probs with the switch loss attached. scores, routing_map [T, E]: those of the balance losses, zero where
        padding is. Counts and T are those of tp_cp (arXiv 2101.03961)."""
        config, coeff = self.config, self.get_aux_loss_coeff("aux_loss")
        counts_E = _all_sum(routing_map.sum(0), self.groups.tp_cp)
        tokens = counts_E.sum() / config.topk
        loss = kernels.switch_load_balancing_loss_func(
            scores_for_aux_loss, counts_E, tokens, config.topk, config.num_experts, coeff)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, "load_balancing_loss", self.groups.tp_cp, valid_token_count=tokens)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, seq_length: int, bsz: int,
    ) -> Tensor:
        """probs with the switch loss of each sequence attached, the mean over the B = bsz sequences, S = seq_length (of
        this rank). Each has its own counts and its own valid tokens, over tp_cp; all padding gives 0."""
        config, coeff, shape = self.config, self.get_aux_loss_coeff("seq_aux_loss"), (seq_length, bsz * self.config.num_experts)
        counts_BE = _all_sum(routing_map.view(shape).sum(0).view(bsz, config.num_experts), self.groups.tp_cp).double()
        tokens_B1 = counts_BE.sum(1, keepdim=True) / config.topk
        slope_BE = counts_BE / tokens_B1.clamp(min=1).square() * (coeff * config.num_experts / config.topk / max(bsz, 1))
        loss = kernels.weighted_token_sum(scores_for_aux_loss.view(shape), slope_BE.flatten())
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, "seq_load_balancing_loss", self.groups.tp_cp, valid_token_count=tokens_B1.sum())

    def _apply_global_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor) -> Tensor:
        """probs with the global switch loss attached (arXiv 2501.11873): counts and T over tp_dp_cp, averaged over the
        forwards since reset_global_aux_loss_tracker."""
        config, coeff = self.config, self.get_aux_loss_coeff("global_aux_loss")
        local_E = routing_map.sum(0)
        mean_E = _running_mean(
            self.global_tokens_per_expert, self.ga_steps, _all_sum(local_E, self.groups.tp_dp_cp).float())
        loss = kernels.switch_load_balancing_loss_func(
            scores_for_aux_loss, mean_E, mean_E.sum() / config.topk, config.topk, config.num_experts, coeff)
        valid = _all_sum(local_E.sum(), self.groups.tp_cp) / config.topk
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, "global_load_balancing_loss", self.groups.tp_dp_cp, True, valid_token_count=valid)

    def reset_global_aux_loss_tracker(self) -> None:
        """Starts the averages of the global loss anew: call it after each optimizer step."""
        if self.ga_steps is not None:
            self.global_tokens_per_expert.zero_()
            self.ga_steps.zero_()

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, reduce_group,
        reduce_group_has_dp: bool = False, valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        """activation with aux_loss in its backward; the loss over its coefficient is kept for load_balancing_metrics,
        which sums it over reduce_group and, unless that has the data-parallel ranks, averages over those. With
        calculate_per_token_loss it is attached times valid_token_count (default: the activation's rows over tp_cp)."""
        if aux_loss_name not in METRICS:
            raise ValueError(f"aux_loss_name is {aux_loss_name!r}; known: {', '.join(METRICS)}")
        _update_once(self.last_losses[METRICS.index(aux_loss_name)], (aux_loss.detach() / aux_loss_coeff).float(), False)
        if self._reduced_over[aux_loss_name] != (_size(reduce_group), reduce_group_has_dp):
            self._reduced_over[aux_loss_name] = (_size(reduce_group), reduce_group_has_dp)
        if self.config.calculate_per_token_loss:
            if valid_token_count is None:
                valid_token_count = activation.shape[0] * _size(self.groups.tp_cp)
            aux_loss = aux_loss * valid_token_count
        return MoEAuxLossAutoScaler.apply(activation, aux_loss, _loss_scale(activation.device))

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """The coefficient of a balancing type, 0.0 when it is off."""
        return self.config.balancing.get(aux_loss_type, 0.0)

    def is_aux_loss_enabled(self) -> bool:
        """Whether any balance loss has a coefficient other than 0."""
        return any(self.get_aux_loss_coeff(kind) for kind in LOSS_NAMES)

    def _losses_on(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _apply_losses(self, probs: Tensor, logits: Tensor, padding_T: Tensor | None) -> Tensor:
        """probs [T, K] with every balance loss that is on; logits [S, B, E], or [T, E]: one sequence."""
        map_TE, scores_TE = kernels.compute_routing_scores_for_aux_loss(
            logits.flatten(0, -2), self.config.topk, self.config.score_function, padding_T)
        if self.get_aux_loss_coeff("aux_loss"):
            probs = self._apply_aux_loss(probs, scores_TE, map_TE)
        if self.get_aux_loss_coeff("seq_aux_loss"):
            S, B = logits.shape[0], logits.shape[1] if logits.ndim == 3 else 1
            probs = self._apply_seq_aux_loss(probs, scores_TE, map_TE, S, B)
        if self.get_aux_loss_coeff("global_aux_loss"):
            probs = self._apply_global_aux_loss(probs, scores_TE, map_TE)
        return probs

    def _apply_expert_bias(self, routing_map: Tensor) -> None:
        """Adds the map's [T, E] counts, before dropping and without padding, to those of the expert bias: once per
        training forward with grad."""
        self._count(routing_map.sum(0))

    def _count(self, counts_E: Tensor) -> None:
        if self._losses_on():
            _update_once(self.last_tokens_per_expert, counts_E, False)
            if self.local_tokens_per_expert is not None:
                _update_once(self.local_tokens_per_expert, counts_E, True)

    @staticmethod
    def _check_mask(padding_mask: Tensor | None, shape) -> None:
        if padding_mask is not None and (padding_mask.shape != shape or padding_mask.dtype != torch.bool):
            raise ValueError(f"padding_mask is {list(padding_mask.shape)} {padding_mask.dtype}; needs {list(shape)} "
                             f"torch.bool, True = padding")

    def _route_logits(self, logits: Tensor, padding_mask: Tensor | None, topk_indices: Tensor | None):
        """logits [S, B, E] or [T, E] -> (probs [T, K], indices [T, K])."""
        config = self.config
        self._maintain_float32_expert_bias()
        if config.force_load_balancing:                               # random values, the gradient of the logits
            logits = logits + (torch.randn_like(logits) - logits).detach()
        logits = self.apply_z_loss(logits, padding_mask)
        padding_T = None if padding_mask is None else padding_mask.flatten()
        probs_TK, indices_TK = self._choose(logits.flatten(0, -2), padding_T, topk_indices)
        if padding_T is not None:
            indices_TK = indices_TK.masked_fill(padding_T[:, None], config.num_experts)
            probs_TK = probs_TK.masked_fill(padding_T[:, None], 0.0)
        chosen_TK = indices_TK
        if config.capacity_factor is not None:
            probs_TK, indices_TK = self._drop(probs_TK, indices_TK)
        if self._losses_on() and self.is_aux_loss_enabled():
            probs_TK = self._apply_losses(probs_TK, logits, padding_T)
        if self._losses_on():
            self._count(kernels.count_experts(chosen_TK, config.num_experts))
        return probs_TK, indices_TK

    def _to_map(self, probs_TK: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The [T, E] form, with the capacity fillers that only it can hold."""
        config = self.config
        probs_TE, map_TE = kernels.routing_to_map(probs_TK, indices_TK, config.num_experts)
        if config.pad_to_capacity:
            map_TE = kernels.apply_router_token_dropping(
                probs_TE.detach(), map_TE, config.topk, config.capacity_factor, config.token_drop_policy, True)[1]
        return probs_TE, map_TE

    # -- the three ways in --

    def route(self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None):
        """input [S, B, H] or [T, H] -> (probs [T, K] in router_dtype, indices [T, K] int64; E = nowhere, with prob 0).

        padding_mask [S, B] (or [T]) bool, True = padding: goes nowhere; of tp_cp all ranks give one, or none. topk_indices [T, K] or [S, B, K] int64 in
        [0, E] takes the place of the choice (replay, hash routing); the range is not checked, that would sync.
        """
        config = self.config
        if input.ndim not in (2, 3) or input.shape[-1] != config.hidden_size:
            raise ValueError(f"input has shape {list(input.shape)}; needs [S, B, {config.hidden_size}] or "
                             f"[T, {config.hidden_size}]")
        self._check_mask(padding_mask, input.shape[:-1])
        if topk_indices is not None:
            T, shape = math.prod(input.shape[:-1]), topk_indices.shape
            fits = shape[-1] == config.topk and (shape[:-1] == input.shape[:-1] or len(shape) == 2 and shape[0] == T)
            if not fits or topk_indices.dtype != torch.int64:
                raise ValueError(f"topk_indices is {list(shape)} {topk_indices.dtype}; needs [{T}, {config.topk}] or "
                                 f"{[*input.shape[:-1], config.topk]} torch.int64")
            topk_indices = topk_indices.flatten(0, -2)
        return self._route_logits(self.gating(self.apply_input_jitter(input)), padding_mask, topk_indices)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""
        self._check_mask(padding_mask, logits.shape[:-1])
        return self._to_map(*self._route_logits(logits, padding_mask, None))

    def forward(self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None):
        """`route` in its [T, E] form: (probs [T, E], routing_map [T, E] bool)."""
        return self._to_map(*self.route(input, padding_mask, topk_indices))


METRICS = (*LOSS_NAMES.values(), "z_loss")                            # the order of TopKRouter.last_losses


def _routers(model: nn.Module) -> list[TopKRouter]:
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    if not routers:
        raise ValueError(f"model ({type(model).__name__}) has no TopKRouter")
    return routers


def update_expert_bias(model: nn.Module) -> None:
    """After the optimizer step: every router's expert bias moves by bias_update_rate towards an even load, by the counts
    of all ranks since the last update, which become zero (arXiv 2408.15664)."""
    for router in _routers(model):
        if router.expert_bias is not None:
            router._maintain_float32_expert_bias()
            router.expert_bias.copy_(kernels.get_updated_expert_bias(
                router.local_tokens_per_expert, router.expert_bias, router.config.bias_update_rate, router.groups.tp_dp_cp))
            router.local_tokens_per_expert.zero_()


def load_balancing_metrics(model: nn.Module, reduce: bool = False) -> dict[str, Tensor]:
    """Of each router's latest training forward, layers in module order: "tokens_per_expert" [layers, E] int64, before
    dropping and without padding; "max_violation" [layers] = max_e n_e / mean n - 1 (arXiv 2408.15664); and each loss that
    is on in any layer, [layers], divided by its coefficient, NaN for a layer without it.

    reduce: over all ranks (collective): counts summed, losses summed over the ranks that share them and averaged over
    the others. For logging only: the losses are in the gradient already, do not add them.
    """
    routers = _routers(model)
    counts, losses = [r.last_tokens_per_expert for r in routers], [r.last_losses for r in routers]
    if reduce:
        groups = [r.groups.tp_dp_cp or r.groups.tp_cp for r in routers]
        counts = [_all_sum(n, group) for n, group in zip(counts, groups)]
        losses = [_all_sum(x, group) / torch.tensor(
            [1.0 if has_dp else _size(group) / ranks for ranks, has_dp in map(r._reduced_over.get, METRICS)], device=x.device)
            for x, r, group in zip(losses, routers, groups)]
    counts = torch.stack(counts)
    metrics = {name: torch.stack([x[i] for x in losses]) for i, name in enumerate(METRICS)
               if any(r.config.z_loss_coeff for r in routers) and name == "z_loss" or
               any(r.get_aux_loss_coeff(kind) for r in routers for kind in LOSS_NAMES if LOSS_NAMES[kind] == name)}
    mean = counts.double().mean(1).clamp(min=torch.finfo(torch.float64).tiny)
    return {**metrics, "max_violation": (counts.amax(1) / mean - 1).float(), "tokens_per_expert": counts}


# ---- Experts ----

class Experts(nn.Module):
    """All experts in one tensor per projection; see kernels.expert_mlp."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__()
        self.config, self.groups = config, pg_collection or ProcessGroups()
        E, P, F, H = config.num_experts, config.parts, config.ffn_hidden_size, config.hidden_size
        if E % _size(self.groups.ep):
            raise ValueError(f"num_experts is {E}; needs a multiple of the ep size, {_size(self.groups.ep)}")
        E //= _size(self.groups.ep)                                                 # the local ones

        def parameter(*shape):
            return nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.fc1 = parameter(E, P, F, H)                                            # P: gate, up
        self.fc2 = parameter(E, H, F)
        self.fc1_bias = parameter(E, P, F) if config.add_bias_linear else None
        self.fc2_bias = parameter(E, H) if config.add_bias_linear else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights of all E experts on every rank and keeps its part: the same at every ep. Biases to zero."""
        E_local, first = len(self.fc1), _rank(self.groups.ep) * len(self.fc1)
        with torch.no_grad():
            for e in range(self.config.num_experts):
                for weight in (self.fc1, self.fc2):
                    drawn = _normal(weight.shape[1:], self.config.init_std, weight)
                    if first <= e < first + E_local:
                        weight[e - first].copy_(drawn)
            for bias in (self.fc1_bias, self.fc2_bias):
                if bias is not None:
                    bias.zero_()

    def forward(self, tokens: Tensor, probs: Tensor, plan: kernels.Permutation) -> Tensor:
        """tokens [T, H], probs [T, K], their plan -> [T, H] in tokens.dtype. Under autocast the products are in its
        dtype; the gradients arrive in the parameters' dtypes."""
        config, device_type = self.config, tokens.device.type
        operands = [tokens, self.fc1, self.fc2, self.fc1_bias, self.fc2_bias]
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            operands = [x if x is None else x.to(dtype) for x in operands]
        x, fc1, fc2, fc1_bias, fc2_bias = operands
        out = kernels.expert_mlp(
            x, probs, plan, fc1, fc2, fc1_bias, fc2_bias, config.apply_probs_on, config.activation, config.glu_alpha,
            config.glu_linear_offset, config.activation_clamp_value, config.activation_fp8_input_store)
        return out.to(tokens.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Tensor]:
        """See MoELayer.sharded_state_dict."""
        names = dict(self.named_parameters())
        return _sharded(self, self.groups.ep, dict.fromkeys(names, 0), prefix, sharded_offsets, metadata)


# ---- Shared expert: every token's; in one go, or in five steps on a side stream beside the routed path ----

class _NoStream:
    """Stands where there is no accelerator: everything runs in the order of the program, nothing has to wait."""

    def wait_stream(self, stream) -> None: ...

    def __enter__(self): ...

    def __exit__(self, *_): ...


def _side_stream():
    return torch.Stream(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else _NoStream()


def _current_stream():
    return torch.accelerator.current_stream() if torch.accelerator.is_available() else _NoStream()


def _used_on(tensor: Tensor, stream) -> None:
    """Keeps the memory of a tensor that crosses to `stream` until that has read it, in the backward too."""
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)


class SharedExpertState(enum.Enum):
    """Which of the five steps was the last."""
    IDLE = 0
    PRE_FORWARD_COMM_DONE = 1
    FC1_FORWARD_DONE = 2
    FC2_FORWARD_DONE = 3
    POST_FORWARD_COMM_DONE = 4


_CACHED_IN = {SharedExpertState.PRE_FORWARD_COMM_DONE: "cached_fc1_input", SharedExpertState.FC1_FORWARD_DONE: "cached_fc2_input",
              SharedExpertState.FC2_FORWARD_DONE: "cached_fc2_output", SharedExpertState.POST_FORWARD_COMM_DONE: "cached_output"}


def overlap_state_check(required_state: SharedExpertState, next_state: SharedExpertState):
    """Decorates a step: RuntimeError, and nothing changes, unless overlap is on, the state is `required_state` and the
    step before has left its tensors; then runs it and moves to `next_state`. An exception in it drops all caches."""
    def decorate(step):
        @functools.wraps(step)
        def checked(self, *args, **kwargs):
            if not self.config.shared_expert_overlap:
                raise RuntimeError(f"{step.__name__} needs shared_expert_overlap=True, found False: call the module itself")
            if self._overlap_state is not required_state:
                raise RuntimeError(f"{step.__name__} needs the state {required_state.name}, found {self._overlap_state.name}")
            needed = [_CACHED_IN[required_state]] if required_state in _CACHED_IN else []
            needed += ["gate_score"] if needed and self.gate_weight is not None else []
            for name in needed:
                if getattr(self, name) is None:
                    raise RuntimeError(f"{step.__name__} needs {name} from the step before, found None")
            try:
                result = step(self, *args, **kwargs)
            except BaseException:
                self.reset_overlap()
                raise
            self._overlap_state = next_state
            return result
        return checked
    return decorate


class _BackwardStreamWait(torch.autograd.Function):
    """input -> input; in the backward `stream` waits for the current one, so that what runs there next does not start
    before what the routed path has launched."""

    @staticmethod
    def forward(ctx, input, stream):
        ctx.stream = stream
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):
        ctx.stream.wait_stream(_current_stream())
        return grad, None


def set_tensor_grad_fn_sequence_sr(tensor: Tensor, value: int) -> None:
    """Of the nodes that are ready, the backward takes the one with the highest number first. Without a grad_fn: nothing."""
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(value)


class _EnterTP(torch.autograd.Function):
    """Each rank's part of the tokens -> all of them (sequence parallel); else all tokens stay. Backward: the sum."""

    @staticmethod
    def forward(ctx, x, group, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return _gather_dim0(x, group) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _scatter_sum(grad, ctx.group) if ctx.sequence_parallel else _all_sum(grad, ctx.group), None, None


class _LeaveTP(torch.autograd.Function):
    """Partial sums of all tokens -> each rank's part, summed (sequence parallel); else all, summed. The other way round
    of _EnterTP."""

    @staticmethod
    def forward(ctx, x, group, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return _scatter_sum(x, group) if sequence_parallel else _all_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gather_dim0(grad, ctx.group) if ctx.sequence_parallel else grad, None, None


class SharedExpertMLP(nn.Module):
    """An MLP of width shared_expert_intermediate_size with the config's activation, without biases; with `gate` its
    output times sigmoid(x · gate_weightᵀ). hidden_states [.., H] -> the same shape; over tp, with sequence_parallel the
    first axis is each rank's part of the sequence, else every rank holds all of it.

    `forward` is one go. With shared_expert_overlap five steps do the same on the class-wide `stream`, for a dispatcher
    to put between its communications: pre_forward_comm, linear_fc1_forward_and_act, linear_fc2_forward,
    post_forward_comm, get_output. Each gives RuntimeError out of order.
    """
    stream = None                                                     # of the class; an instance without overlap: None

    def __init__(self, config: MoEConfig, gate: bool, pg_collection: ProcessGroups | None = None):
        super().__init__()
        self.config, self.groups = config, pg_collection or ProcessGroups()
        size, ranks = config.shared_expert_intermediate_size, _size(self.groups.tp)
        if size is None or size % ranks:
            raise ValueError(f"shared_expert_intermediate_size is {size}; needs a multiple of the tp size, {ranks}")
        shape = config.parts, size // ranks, config.hidden_size
        self.fc1 = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))                       # [P, Fs / tp, H]
        self.fc2 = nn.Parameter(torch.empty(shape[2], shape[1], dtype=config.params_dtype))          # [H, Fs / tp]
        self.gate_weight = nn.Parameter(torch.empty(1, shape[2], dtype=config.params_dtype)) if gate else None
        if not config.shared_expert_overlap:
            self.stream = None
        elif SharedExpertMLP.stream is None:
            SharedExpertMLP.stream = _side_stream()
        self.reset_overlap()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the unsharded weights (normal, init_std) on every rank and keeps its part: the same at every tp."""
        (P, F, H), std = self.fc1.shape, self.config.init_std
        rank, ranks = _rank(self.groups.tp), _size(self.groups.tp)
        with torch.no_grad():
            self.fc1.copy_(_normal((P, F * ranks, H), std, self.fc1).chunk(ranks, 1)[rank])
            self.fc2.copy_(_normal((H, F * ranks), std, self.fc2).chunk(ranks, 1)[rank])
            if self.gate_weight is not None:
                self.gate_weight.copy_(_normal(self.gate_weight.shape, std, self.gate_weight))

    # -- the parts --

    def _score(self, x: Tensor) -> Tensor | None:
        if x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"hidden_states has shape {list(x.shape)}; needs [.., {self.config.hidden_size}]")
        return None if self.gate_weight is None else F.linear(x, self.gate_weight).sigmoid()

    def _enter(self, x: Tensor) -> Tensor:
        tp = self.groups.tp
        return x if tp is None else _EnterTP.apply(x, tp, self.config.sequence_parallel)

    def _fc1_and_act(self, x: Tensor) -> Tensor:
        config = self.config
        return kernels.activation(
            F.linear(x, self.fc1.flatten(0, 1)), config.activation, None, config.glu_alpha, config.glu_linear_offset,
            config.activation_clamp_value, config.activation_fp8_input_store)

    def _fc2(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc2)

    def _leave(self, y: Tensor) -> Tensor:
        tp = self.groups.tp
        return y if tp is None else _LeaveTP.apply(y, tp, self.config.sequence_parallel)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_score = self._score(hidden_states)
        output = self._leave(self._fc2(self._fc1_and_act(self._enter(hidden_states))))
        return output if gate_score is None else output * gate_score

    # -- the same in five steps --

    def reset_overlap(self) -> None:
        """Back to IDLE, without caches: after an exception outside of the steps."""
        self._overlap_state, self.gate_score = SharedExpertState.IDLE, None
        self.cached_fc1_input = self.cached_fc2_input = self.cached_fc2_output = self.cached_output = None

    def wait_current_stream(self) -> None:
        """The side stream waits for what is on the current one so far."""
        if self.stream is not None:
            self.stream.wait_stream(_current_stream())

    @overlap_state_check(SharedExpertState.IDLE, SharedExpertState.PRE_FORWARD_COMM_DONE)
    def pre_forward_comm(self, input: Tensor, wait_current_stream: bool = True) -> None:
        """The gate's score; the tokens of all tp ranks."""
        if wait_current_stream:
            self.wait_current_stream()
        _used_on(input, self.stream)
        with self.stream:
            self.gate_score = self._score(input)
            self.cached_fc1_input = self._enter(input)

    @overlap_state_check(SharedExpertState.PRE_FORWARD_COMM_DONE, SharedExpertState.FC1_FORWARD_DONE)
    def linear_fc1_forward_and_act(self, overlapped_comm_output: Tensor | None = None) -> None:
        """overlapped_comm_output: of the communication that runs beside this step. Its backward is launched before this
        step's, which then waits for what is on the main stream."""
        with self.stream:
            act = self._fc1_and_act(self.cached_fc1_input)
        act = _BackwardStreamWait.apply(act, self.stream)
        if overlapped_comm_output is not None and overlapped_comm_output.grad_fn is not None:
            set_tensor_grad_fn_sequence_sr(act, overlapped_comm_output.grad_fn._sequence_nr() - 1)
        self.cached_fc1_input, self.cached_fc2_input = None, act

    @overlap_state_check(SharedExpertState.FC1_FORWARD_DONE, SharedExpertState.FC2_FORWARD_DONE)
    def linear_fc2_forward(self, overlapped_comm_output: Tensor | None = None) -> None:
        """overlapped_comm_output: its backward goes before everything else that is ready."""
        if overlapped_comm_output is not None:
            set_tensor_grad_fn_sequence_sr(overlapped_comm_output, torch.iinfo(torch.int).max)
        with self.stream:
            self.cached_fc2_output = self._fc2(self.cached_fc2_input)
        self.cached_fc2_input = None

    @overlap_state_check(SharedExpertState.FC2_FORWARD_DONE, SharedExpertState.POST_FORWARD_COMM_DONE)
    def post_forward_comm(self) -> None:
        """The sum over the tp ranks."""
        with self.stream:
            self.cached_output = self._leave(self.cached_fc2_output)
        self.cached_fc2_output = None

    @overlap_state_check(SharedExpertState.POST_FORWARD_COMM_DONE, SharedExpertState.IDLE)
    def get_output(self) -> Tensor:
        """The output, gated; the current stream waits for it."""
        with self.stream:
            output = self.cached_output if self.gate_score is None else self.cached_output * self.gate_score
        current = _current_stream()
        current.wait_stream(self.stream)
        _used_on(output, current)
        self.cached_output = self.gate_score = None
        return output

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Tensor]:
        """See MoELayer.sharded_state_dict."""
        return _sharded(self, self.groups.tp, {"fc1": 1, "fc2": 1}, prefix, sharded_offsets, metadata)


# ---- Across ranks: rows, checkpoints, gradients ----

class _Exchange:
    """An all-to-all of rows over `group`: send, receive say how many go to and come from each rank. Between start and
    finish other work runs. Its backward is the opposite exchange, started where the forward finishes."""

    def __init__(self, group, send: list[int], receive: list[int]):
        self.group, self.send, self.receive, self.pending = group, send, receive, []

    def start(self, tensors, backward: bool) -> tuple[Tensor, ...]:
        send, receive = (self.receive, self.send) if backward else (self.send, self.receive)
        buffers = tuple(x.new_empty(sum(receive), *x.shape[1:]) for x in tensors)
        self.pending = [(buffer, dist.all_to_all_single(buffer, x.contiguous(), receive, send, self.group, async_op=True))
                        for buffer, x in zip(buffers, tensors)]
        return buffers

    def finish(self) -> tuple[Tensor, ...]:
        pending, self.pending = self.pending, []
        for _, work in pending:
            work.wait()
        return tuple(buffer for buffer, _ in pending)


class _Issue(torch.autograd.Function):
    """Tensors -> buffers that _Wait makes valid. Its backward waits for what _Wait's backward has issued."""

    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange = exchange
        return exchange.start(tensors, backward=False)

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.exchange.finish()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *buffers):
        ctx.exchange = exchange
        exchange.finish()
        return tuple(buffer.view_as(buffer) for buffer in buffers)

    @staticmethod
    def backward(ctx, *grads):
        ctx.exchange.start(grads, backward=True)
        return None, *grads                                           # _Issue's backward takes the buffers in their place


def _sharded(module: nn.Module, group, dims: dict[str, int], prefix: str, sharded_offsets, metadata) -> dict[str, Tensor]:
    """The module's state dict, each tensor as a DTensor over the group: sharded along dims[name], else replicated."""
    if sharded_offsets or metadata:
        raise ValueError(f"sharded_offsets is {sharded_offsets!r} and metadata {metadata!r}; both need to be empty: layers "
                         f"are told apart by their prefix")
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if group is not None:
        mesh = DeviceMesh.from_group(group, next(iter(tensors.values())).device.type)
        tensors = {name: DTensor.from_local(tensor, mesh, [Shard(dims[name]) if name in dims else Replicate()], run_check=False)
                   for name, tensor in tensors.items()}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def reduce_gradients(module: nn.Module) -> None:
    """Sums the gradients of all MoE parameters in `module` over the ranks that hold them: the router's and the gate's over
    tp_dp_cp, the shared expert's over dp_cp, the experts' over expt_dp, never ep. For who trains without FSDP and DDP,
    before the optimizer step. Collective; a parameter that got no gradient on this rank counts as zero."""
    for part in module.modules():
        if not isinstance(part, (Router, Experts, SharedExpertMLP)):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            groups = part.groups
            # a gate that sees the same tokens on every tp rank has its whole gradient on each
            whole = name == "gate_weight" and (groups.tp is None or part.config.sequence_parallel)
            group = groups.expt_dp if isinstance(part, Experts) else \
                groups.tp_dp_cp if isinstance(part, Router) or whole else groups.dp_cp
            if group is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
