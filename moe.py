"""A Mixture-of-Experts layer: config, layer, router, experts, shared expert. The tensor functions are in
kernels.py, with the letters; what crosses ranks is in parallel.py.

    hidden_states [S, B, H] ──┬─> TopKRouter ──> probs [T, K], indices [T, K]
                              ├──────────────> plan_permutation ──> Experts ──┬─> [S, B, H]
                              └──────────────> SharedExpertMLP ───────────────┘
"""
import contextlib
import enum
import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if __package__:
    from . import kernels, parallel
    from .parallel import (
        ParallelModule, ProcessGroups, all_sum, copy_rows, gradient_norm, group_rank, group_size, reduce_gradients)
else:
    import kernels
    import parallel
    from parallel import (
        ParallelModule, ProcessGroups, all_sum, copy_rows, gradient_norm, group_rank, group_size, reduce_gradients)


# ---- Config ----

LOSS_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss",
              "global_aux_loss": "global_load_balancing_loss"}                 # balancing type -> name in the metrics
_CONSTANTS = {"glu_alpha": "alpha", "glu_linear_offset": "linear_offset", "activation_clamp_value": "clamp_value",
              "situ_beta": "beta", "situ_linear_beta": "linear_beta"}          # field -> name in kernels.Constants
LOAD_BALANCING_TYPES = ("none", *LOSS_NAMES, "sinkhorn")


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. Names are Megatron's without the moe_ / moe_router_ prefix; all are checked here.

    hidden_size H, ffn_hidden_size F (of one expert), num_experts E, topk K. score_function to scaling_factor: see
    kernels.topk_routing_with_score_function; activation fields: kernels.activation; apply_probs_on: kernels.expert_mlp.
    load_balancing_type and aux_loss_coeff: one type and a float, or tuples of the same length; every loss needs a
    positive coefficient.
    """
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    activation: str = "swiglu"                     # "swiglu", "geglu", "quick_geglu", "situ", "relu2"
    glu_alpha: float = 1.702                       # of quick_geglu
    glu_linear_offset: float = 0.0                 # of the three named ..glu
    activation_clamp_value: float | None = None    # of the same
    situ_beta: float = 1.0                         # of situ, like the next
    situ_linear_beta: float | None = None
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
    enable_expert_bias: bool = False               # added to the scores for the choice alone: update_expert_bias
    bias_update: str = "sign"                      # "sign" (arXiv 2408.15664), "quantile"
    bias_update_rate: float = 1e-3                 # of "sign"
    latent_size: int | None = None                 # width ℓ of the routed experts; None: H
    latent_norm: bool = False                      # an RMSNorm behind the latent experts
    latent_norm_eps: float = 1e-5
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
                            ("apply_probs_on", ("input", "activation", "output")), ("bias_update", ("sign", "quantile")),
                            ("token_drop_policy", ("probs", "position"))):
            if getattr(self, name) not in known:
                refuse(name, f"needs one of {', '.join(known)}")
        for name in ("router_dtype", "params_dtype"):
            if not isinstance(getattr(self, name), torch.dtype) or not getattr(self, name).is_floating_point:
                refuse(name, "needs a floating torch.dtype")
        if self.topk > self.num_experts:
            refuse("topk num_experts", "a token cannot have more experts than there are; lower topk")

        for name, constant in _CONSTANTS.items():
            taken = constant in kernels.ACTIVATIONS[self.activation].takes
            if not taken and getattr(self, name) != getattr(kernels.Constants(), constant):
                refuse(f"activation {name}", f"{self.activation} has no such constant; leave {name} out")
        for name in ("activation_clamp_value", "situ_beta", "situ_linear_beta", "capacity_factor"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                refuse(name, "needs a positive number, or None")

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
            kernels.check_groups(
                self.topk, self.num_experts, self.num_groups, self.group_topk, self.group_score_topk)

        types, coeffs = self.load_balancing_type, self.aux_loss_coeff
        if isinstance(types, str) == isinstance(coeffs, (tuple, list)) or \
                not isinstance(types, str) and len(types) != len(coeffs):
            refuse("load_balancing_type aux_loss_coeff", "one type takes a float, several a tuple of the same length")
        for kind in self.balancing:
            if kind not in LOAD_BALANCING_TYPES:
                refuse("load_balancing_type", f"needs {', '.join(LOAD_BALANCING_TYPES)}, or a tuple of them")
        if len(set(self.balancing)) != len(self.balancing) or len(self.balancing) > 1 and "none" in self.balancing:
            refuse("load_balancing_type", "each type at most once, and \"none\" beside no other")
        for kind in LOSS_NAMES:
            if kind in self.balancing and not 0 < self.balancing[kind] < math.inf:
                refuse("load_balancing_type aux_loss_coeff", f"{kind} needs a positive coefficient; give one, or leave "
                       f"the type out")
        if "none" in self.balancing and self.balancing["none"]:
            refuse("load_balancing_type aux_loss_coeff", "a coefficient of no loss; name the type, or leave it out")
        if "sinkhorn" in self.balancing:
            for name in ("num_groups", "scaling_factor", "enable_expert_bias", "norm_topk_prob", "pre_softmax"):
                if getattr(self, name):
                    refuse(f"load_balancing_type {name}", f"sinkhorn has its own choice and probs; leave {name} out")
            if len(self.balancing) > 1 or self.balancing["sinkhorn"] or self.score_function != "softmax":
                refuse("load_balancing_type aux_loss_coeff score_function", "sinkhorn goes alone, without a coefficient, "
                       "and with softmax")
        if self.bias_update == "quantile":
            if not self.enable_expert_bias:
                refuse("bias_update enable_expert_bias", "there is no bias to update; set enable_expert_bias=True too")
            if self.bias_update_rate != 1e-3:
                refuse("bias_update bias_update_rate", "quantile has no rate; leave bias_update_rate out")
            if self.topk == self.num_experts or self.num_groups is not None or self.score_function == "sqrtsoftplus":
                refuse("bias_update topk num_experts num_groups score_function", "quantile needs topk < num_experts, "
                       "no groups, and scores in [0, 1], of softmax or sigmoid")
        if self.latent_size is None and self.latent_norm:
            refuse("latent_norm latent_size", "there is nothing to normalise; set latent_size too")
        if self.latent_norm_eps <= 0:
            refuse("latent_norm_eps", "needs a positive number")
        if self.capacity_factor is None and (self.pad_to_capacity or self.token_drop_policy != "probs"):
            refuse("capacity_factor pad_to_capacity token_drop_policy", "nothing is dropped; set capacity_factor too")
        size = self.shared_expert_intermediate_size
        for name in ("shared_expert_intermediate_size", "latent_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                refuse(name, "needs a positive int, or None")
        if size is None and (self.shared_expert_gate or self.shared_expert_overlap):
            refuse("shared_expert_intermediate_size shared_expert_gate shared_expert_overlap",
                   "there is no shared expert; set shared_expert_intermediate_size too")
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
        return 2 if kernels.ACTIVATIONS[self.activation].gated else 1

    @property
    def activation_options(self) -> dict:
        """Keyword arguments of kernels.activation and kernels.expert_mlp."""
        constants = {constant: getattr(self, name) for name, constant in _CONSTANTS.items()}
        return {"kind": self.activation, **constants, "fp8_input_store": self.activation_fp8_input_store}


def _normal(shape: tuple, std: float, like: Tensor) -> Tensor:
    """Drawn in fp32 whatever the dtype, so that a seed gives the same model in every dtype."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).normal_(0.0, std)


# In a checkpoint inside a graph Dynamo refuses to keep a tensor on a module. Here it is safe: a recomputation
# keeps the same, or a later step takes it back. The switch has a private name; eager mode just runs the step.
_tracing_side_effects = getattr(
    torch._dynamo.utils, "_disable_side_effect_safety_checks_for_current_subtracer",
    lambda step, *args, **kwargs: step(*args, **kwargs))


# ---- Layer ----

class MoELayer(ParallelModule):
    """hidden_states [S, B, H] -> same shape and dtype: y_t = Σ_k probs[t, k] · expert_{indices[t, k]}(x_t), plus the
    shared expert's output. Parts: layer.router, layer.experts, layer.latent and layer.shared_experts (None without).

    `torch.compile(layer, fullgraph=True)` takes every configuration as one graph. Under ep each rank
    has E / ep experts and tokens of its own, and every rank runs every forward and backward, also with
    T = 0. With pad_to_capacity all ranks have the same T, with sequence_parallel the same S over tp.
    ValueError: sizes that ep or tp do not divide, tp without sequence_parallel, and in the forward
    wrong shapes.
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.router = TopKRouter(config, pg_collection)
        self.experts = Experts(config, pg_collection)
        self.latent = None if config.latent_size is None else Latent(config, pg_collection)
        self.shared_experts = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(config, config.shared_expert_gate, pg_collection)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [S, B, H] or [T, H]; padding_mask [S, B] (or [T]) bool, True = padding: no routed expert;
        topk_indices [T, K] or [S, B, K] int64 replaces the router's choice (see TopKRouter.route)."""
        return self.forward_with_probs(hidden_states, padding_mask, topk_indices)[0]

    def forward_with_probs(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(forward's result, the router's probs [T, K])."""
        shared, overlap = self.shared_experts, self.config.shared_expert_overlap
        x_TH = hidden_states.flatten(0, -2)
        try:
            if overlap:
                shared.pre_forward_comm(hidden_states)
            probs_TK, indices_TK = self.router(hidden_states, padding_mask, topk_indices, dense_output=True)
            plan = kernels.plan_permutation(indices_TK, self.config.num_experts)

            def routed(x_TH, down=None):
                dispatched = self.dispatch(x_TH, down, probs_TK, plan)
                if overlap:
                    shared.linear_fc1_forward_and_act()
                rows = self.experts(*dispatched.receive())
                rows = dispatched.send_back(rows)
                if overlap:
                    shared.linear_fc2_forward()
                    shared.post_forward_comm()
                return dispatched.combine(rows)
            y = routed(x_TH) if self.latent is None else self.latent(x_TH, routed)
            y = y.view(hidden_states.shape)

            if shared is not None:
                y = y + (shared.get_output() if overlap else shared(hidden_states)).to(y.dtype)
            return y, probs_TK
        except BaseException:
            if overlap:
                shared.reset_overlap()
            raise

    def dispatch(self, x_TH: Tensor, down: Tensor | None, probs_TK: Tensor, plan: kernels.Permutation):
        """Sends the rows to their experts; what it returns gives them to the experts and takes their
        output back. `down` [ℓ, H]: rows are x · downᵀ."""
        if self.pg_collection.ep is None:
            return Local(x_TH, probs_TK, plan, down)
        x_TH = x_TH if down is None else F.linear(x_TH, down).to(x_TH.dtype)
        return ExpertParallel(x_TH, probs_TK, plan, self.config, self.pg_collection.ep)


class Local(NamedTuple):
    """Nothing crosses ranks: the experts gather their rows from the tokens, and combine them."""
    tokens: Tensor
    probs: Tensor
    plan: kernels.Permutation
    down: Tensor | None

    def receive(self) -> "Local":
        return self

    def send_back(self, y_TH: Tensor) -> Tensor:
        return y_TH

    def combine(self, y_TH: Tensor) -> Tensor:
        return y_TH


class ExpertParallel:
    """Rows go to the ranks that hold their experts, and back.

    Dropless, the ranks first exchange how many rows go where, and read it on the host: the one sync.
    With pad_to_capacity every expert gets equally many rows from every rank: no exchange, no sync.
    """

    def __init__(self, x_TH: Tensor, probs_TK: Tensor, plan: kernels.Permutation, config: MoEConfig, group):
        (T, K), E, ranks = plan.inverse.shape, config.num_experts, group.size()
        padded, local = config.pad_to_capacity, E // ranks
        if padded:
            capacity = min(T, kernels.get_capacity(T * K, E, config.capacity_factor))
            plan = kernels.pad_plan(plan, capacity)
        else:
            plan = plan._replace(order=F.pad(plan.order, (0, 1)))    # an unrouted row: never none to slice
            counts_in_flight = parallel.exchange(plan.counts, [local] * ranks, [local] * ranks, group)
        rows, probs = kernels.gather_rows(x_TH, plan), kernels.gather_probs(probs_TK, plan)

        if padded:
            received, send = plan.counts, [local * capacity] * ranks
            receive = send
        else:
            received = parallel.wait(counts_in_flight)
            # Dynamo's switch for reads on the host, open for this one
            with torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True):
                send, receive = torch.stack((plan.counts, received)).view(2, ranks, -1).sum(2).tolist()
        # the local expert of each row that arrives: from every rank a block for each
        expert_M = torch.arange(local, device=x_TH.device).repeat(ranks)
        expert_M = expert_M.repeat_interleave(received, output_size=sum(receive))
        self.plan, self.local_plan = plan, kernels.plan_permutation(expert_M[:, None], local)
        self.back = receive, send, group
        self.rows = parallel.AllToAll(rows[:sum(send)], send, receive, group)
        self.probs = parallel.AllToAll(probs[:sum(send)], send, receive, group)

    def receive(self) -> tuple[Tensor, Tensor, kernels.Permutation]:
        return self.rows.finish(), self.probs.finish()[:, None], self.local_plan

    def send_back(self, y_MH: Tensor) -> parallel.AllToAll:
        return parallel.AllToAll(y_MH, *self.back)

    def combine(self, sent_back: parallel.AllToAll) -> Tensor:
        rows = sent_back.finish()
        unrouted = self.plan.order.shape[0] - rows.shape[0]
        return kernels.combine_rows(F.pad(rows, (0, 0, 0, unrouted)), self.plan)


# ---- Router ----

_CPU = torch.device("cpu")
with torch.inference_mode(False):            # whatever is on where this file is imported
    _LOSS_SCALE = {_CPU: torch.ones((), dtype=torch.float32, device=_CPU)}


def _loss_scale(device: torch.device) -> Tensor:
    if device not in _LOSS_SCALE:
        with torch.inference_mode(False):
            _LOSS_SCALE[device] = _LOSS_SCALE[_CPU].to(device)
    return _LOSS_SCALE[device]


def set_aux_loss_scale(scale: float | Tensor) -> None:
    """Factor on the gradients of all balance losses and z-losses: what the main loss is scaled by before its backward
    (a loss scaler's factor, 1 / microbatches, ..). A float or a 0-d tensor; holds for every backward from now on, also
    of forwards already done, and in compiled code without a recompile."""
    if isinstance(scale, Tensor) and scale.ndim:
        raise ValueError(f"scale has shape {list(scale.shape)}; needs a float or a 0-d tensor")
    with torch.no_grad():
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


class Router(ParallelModule, ABC):
    """weight [E, H] -> logits. Subclasses say what the logits choose: `routing` and `forward`."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        if group_size(self.pg_collection.tp) > 1 and not config.sequence_parallel:
            raise ValueError(f"tp has {group_size(self.pg_collection.tp)} ranks and sequence_parallel is False: they would route the same "
                             f"tokens; set sequence_parallel=True")
        self.layer_number = None
        self.weight = self.parameter(config.num_experts, config.hidden_size)
        self.bias = self.parameter(config.num_experts) if config.router_bias else None
        Router.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Draws the weight anew (normal, init_std); the bias becomes zero."""
        with torch.no_grad():
            copy_rows(self.weight, _normal(self.weight.shape, self.config.init_std, self.weight))
            if self.bias is not None:
                self.bias.zero_()

    def gating(self, input: Tensor) -> Tensor:
        """input [.., H] -> logits [.., E] in router_dtype, immune to autocast."""
        weight, bias = parallel.gathered(self.weight), parallel.gathered(self.bias)
        return kernels.router_gating_linear(input, weight, bias, self.config.router_dtype)

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""

    @abstractmethod
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """input [S, B, H] -> (probs [T, E], routing_map [T, E] bool)."""

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number


def _recomputing() -> bool:
    """Whether a non-reentrant checkpoint is running its forward again: in eager mode inside a backward,
    in a graph as part of the compiled backward. (A reentrant one runs its first pass without grad, so
    there the second pass is the one to count.) Private names of torch, in this one place."""
    node = torch._C._current_autograd_node()
    if node is None:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = node.name() if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name == "CompiledFunctionBackward" or "_recomputation_hook" in name


# Ops, since only the running program can tell a recomputation, compiled code cannot.

@kernels._op(lambda buffer, value, add: None, mutates_args=("buffer",), reads_on_host=True)
def _update_once(buffer: Tensor, value: Tensor, add: bool) -> None:
    """buffer += value, or = value; nothing in a recomputation."""
    if not _recomputing():
        buffer.copy_(buffer + value if add else value)


@kernels._op(
    lambda sums, steps, counts: torch.empty_like(sums, dtype=torch.float64), mutates_args=("sums", "steps"),
    reads_on_host=True)
def _running_mean(sums: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
    """Adds counts [E] to sums [E] and 1 to steps [], not in a recomputation; returns sums / steps in fp64."""
    if not _recomputing():
        sums.add_(counts)
        steps.add_(1)
    return sums.double() / steps.double().clamp(min=1)


_COUNTS = ("local_tokens_per_expert", "bias_histogram", "global_tokens_per_expert", "ga_steps",
           "last_tokens_per_expert", "last_losses")


def _counter(tensor: Tensor) -> Tensor:
    """The tensor, which will be updated in place: CUDA graphs may rely on its address."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


class TopKRouter(Router):
    """Each token to its top K experts. `route` gives the [T, K] form that the layer runs on, `forward` the [T, E] form.

    In training, with grad enabled, losses are attached to probs: they are in the gradient already, do not add them.
    Counts and the running sums of the global loss grow once per training forward, under activation checkpoints too.
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        E = config.num_experts
        self.register_buffer("expert_bias", None)
        # Not buffers: DistributedDataParallel would overwrite them with those of rank 0.
        self.local_tokens_per_expert = None                      # since the last update_expert_bias, like the next
        self.bias_histogram = None                               # of the biases that tokens need, for "quantile"
        self.global_tokens_per_expert = self.ga_steps = None     # sums, and the forwards in them
        if config.enable_expert_bias:
            self.expert_bias = torch.empty(E, dtype=torch.float32)
            self.local_tokens_per_expert = _counter(torch.empty(E, dtype=torch.float32))
        if config.bias_update == "quantile":
            self.bias_histogram = _counter(torch.empty(E, 1000, dtype=torch.int32))
        if "global_aux_loss" in config.balancing:
            self.global_tokens_per_expert = _counter(torch.empty(E, dtype=torch.float32))
            self.ga_steps = _counter(torch.empty((), dtype=torch.float32))
        self.last_tokens_per_expert = _counter(torch.empty(E, dtype=torch.int64))     # of the latest training forward
        self.last_losses = _counter(torch.empty(len(METRICS), dtype=torch.float32))
        # loss -> ranks that hold parts of it; 0: all, the data-parallel ones too
        self._sharers = dict.fromkeys(METRICS, group_size(self.pg_collection.tp_cp)) | {"global_load_balancing_loss": 0}
        self._recording, self._recorded, self._replayed = False, None, None     # see record_routing, replay_routing
        self._reset_counts()

    def reset_parameters(self) -> None:
        """Draws the weight anew (normal, init_std); biases, counts and sums become zero."""
        super().reset_parameters()
        self._reset_counts()

    def _reset_counts(self) -> None:
        for name in (*_COUNTS, "expert_bias"):
            if getattr(self, name) is not None:
                getattr(self, name).zero_()
        self.last_losses.fill_(math.nan)
        _loss_scale(self.weight.device)                               # made here, not by the first compiled forward

    # -- bias and counts keep their dtype: a bias in bf16 would lose its updates of 1e-3, counts their units --

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        self._move_counts(fn)
        _loss_scale(self.weight.device)
        return self

    def _move_counts(self, fn) -> None:
        for name in _COUNTS:
            tensor = getattr(self, name)
            if tensor is not None:
                moved = fn(tensor)
                setattr(self, name, _counter(moved if moved.dtype == tensor.dtype else tensor.to(moved.device)))

    def _maintain_float32_expert_bias(self) -> None:
        """Casts the expert bias back where something outside of `_apply` has cast it."""
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.float()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._maintain_float32_expert_bias()                          # load_state_dict(assign=True) takes any dtype
        self.reset_bias_histogram()

    def _save_to_state_dict(self, *args, **kwargs):
        self._maintain_float32_expert_bias()
        super()._save_to_state_dict(*args, **kwargs)

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
        coeff, group = self.config.z_loss_coeff, self.pg_collection.tp_cp
        if not coeff or not self._losses_on():
            return logits
        loss = kernels.z_loss_func(logits, coeff, padding_mask)
        if padding_mask is None:
            tokens = math.prod(logits.shape[:-1]) * group_size(group)
            loss = loss / group_size(group)
        else:
            local = (~padding_mask).sum()
            tokens = all_sum(local, group)
            loss = loss * local / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(logits, coeff, loss, "z_loss", group, valid_token_count=tokens)

    def choose(self, logits_TE: Tensor, padding_T: Tensor | None, topk_indices: Tensor | None) -> tuple[Tensor, Tensor]:
        """(probs [T, K], indices [T, K]) before padding and dropping."""
        config = self.config
        if "sinkhorn" in config.balancing:
            return self._choose_by_sinkhorn(logits_TE, padding_T, topk_indices)
        return kernels.topk_routing_with_score_function(
            logits_TE, config.topk, config.pre_softmax, config.num_groups, config.group_topk, config.scaling_factor,
            config.score_function, self.expert_bias, True, topk_indices, config.norm_topk_prob, config.norm_eps,
            config.group_score_topk)

    def _choose_by_sinkhorn(self, logits_TE: Tensor, padding_T: Tensor | None, topk_indices: Tensor | None):
        K, wide_TE = self.config.topk, kernels._upcast(logits_TE)
        if topk_indices is None:
            with torch.no_grad():
                balanced_TE = kernels.sinkhorn(wide_TE, padding_mask=padding_T) if self.training else wide_TE
                topk_indices = balanced_TE.topk(K, dim=1).indices
        scores_TE = wide_TE.sigmoid() if K == 1 else wide_TE.softmax(-1)
        return kernels.pick(scores_TE, topk_indices).to(logits_TE.dtype), topk_indices

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [.., E] -> (probs [T, E], routing_map [T, E]): in training the top K of sinkhorn(logits), in eval of the
        logits; probs are, there, the sigmoid (K = 1) or the fp32 softmax over all E, not normalised again."""
        return kernels.routing_to_map(*self._choose_by_sinkhorn(logits.flatten(0, -2), None, None), self.config.num_experts)

    def _drop(self, probs_TK: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
        """What is over an expert's capacity goes nowhere."""
        config, E = self.config, self.config.num_experts
        probs_TE, map_TE = kernels.routing_to_map(probs_TK.detach(), indices_TK, E)
        kept_TE = kernels.apply_router_token_dropping(
            probs_TE, map_TE, config.topk, config.capacity_factor, config.token_drop_policy)[1]
        dropped_TK = ~kernels.pick(kept_TE, indices_TK)
        return probs_TK.masked_fill(dropped_TK, 0.0), indices_TK.masked_fill(dropped_TK, E)

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor) -> Tensor:
        """probs with the switch loss attached. scores, routing_map [T, E]: those of the balance losses, zero where
        padding is. Counts and T are those of tp_cp (arXiv 2101.03961)."""
        return self._apply_switch_loss("aux_loss", probs, scores_for_aux_loss, routing_map, len(routing_map), 1)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, seq_length: int, bsz: int,
    ) -> Tensor:
        """probs with the switch loss of each sequence attached, the mean over the B = bsz sequences, S = seq_length (of
        this rank). Each has its own counts and its own valid tokens, over tp_cp; all padding gives 0."""
        return self._apply_switch_loss("seq_aux_loss", probs, scores_for_aux_loss, routing_map, seq_length, bsz)

    def _apply_switch_loss(self, kind: str, probs, scores, routing_map, S: int, B: int) -> Tensor:
        config, coeff, E = self.config, self.get_aux_loss_coeff(kind), self.config.num_experts
        counts_BE = all_sum(routing_map.view(S, B * E).sum(0).view(B, E), self.pg_collection.tp_cp).double()
        tokens_B1 = counts_BE.sum(1, keepdim=True) / config.topk
        coefficients_BE = counts_BE / tokens_B1.clamp(min=1).square() * (coeff * E / config.topk / max(B, 1))
        loss = kernels.weighted_token_sum(scores.view(S, B * E), coefficients_BE.flatten())
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, LOSS_NAMES[kind], self.pg_collection.tp_cp, valid_token_count=tokens_B1.sum())

    def _apply_global_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor) -> Tensor:
        """probs with the global switch loss attached (arXiv 2501.11873): counts and T over tp_dp_cp, averaged over the
        forwards since reset_global_aux_loss_tracker."""
        config, coeff = self.config, self.get_aux_loss_coeff("global_aux_loss")
        local_E = routing_map.sum(0)
        mean_E = _running_mean(
            self.global_tokens_per_expert, self.ga_steps, all_sum(local_E, self.pg_collection.tp_dp_cp).float())
        loss = kernels.switch_load_balancing_loss_func(
            scores_for_aux_loss, mean_E, mean_E.sum() / config.topk, config.topk, config.num_experts, coeff)
        valid = all_sum(local_E.sum(), self.pg_collection.tp_cp) / config.topk
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, loss, "global_load_balancing_loss", self.pg_collection.tp_dp_cp, True, valid_token_count=valid)

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
        sharers = 0 if reduce_group_has_dp else group_size(reduce_group)
        if self._sharers[aux_loss_name] != sharers:
            self._sharers[aux_loss_name] = sharers
        if self.config.calculate_per_token_loss:
            if valid_token_count is None:
                valid_token_count = activation.shape[0] * group_size(self.pg_collection.tp_cp)
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

    def reset_bias_histogram(self) -> None:
        """Empties the histogram of bias_update="quantile": its tokens have met another bias. Call it after writing
        the expert bias by hand; loading a state dict does."""
        if self.bias_histogram is not None:
            self.bias_histogram.zero_()

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
            logits = kernels._Adjoint.apply(logits, torch.randn_like, torch.clone)
        logits = self.apply_z_loss(logits, padding_mask)
        padding_T = None if padding_mask is None else padding_mask.flatten()
        probs_TK, indices_TK = self.choose(logits.flatten(0, -2), padding_T, topk_indices)
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
            if self.bias_histogram is not None:
                scores_TE = kernels.SCORE_FUNCTIONS[config.score_function](kernels._upcast(logits.detach().flatten(0, -2)))
                _update_once(self.bias_histogram, kernels.required_bias_histogram(
                    scores_TE, self.expert_bias, config.topk, padding_mask=padding_T), True)
        if self._recording:
            _tracing_side_effects(setattr, self, "_recorded", chosen_TK)
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

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None,
        dense_output: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """input [S, B, H] or [T, H] -> (probs [T, E] in router_dtype, routing_map [T, E] bool), or with
        `dense_output` (probs [T, K], indices [T, K] int64; E = nowhere, with prob 0).

        padding_mask [S, B] (or [T]) bool, True = padding: goes nowhere. Within tp_cp either every rank
        passes a mask or none does. topk_indices [T, K] or [S, B, K] int64 in [0, E] takes the place of
        the choice (replay, hash routing). The range is not checked: that would sync the device.
        """
        config = self.config
        if input.ndim not in (2, 3) or input.shape[-1] != config.hidden_size:
            raise ValueError(f"input has shape {list(input.shape)}; needs [S, B, {config.hidden_size}] or "
                             f"[T, {config.hidden_size}]")
        self._check_mask(padding_mask, input.shape[:-1])
        given = "topk_indices"
        if self._replayed is not None:
            given, topk_indices = self._replayed
        if topk_indices is not None:
            T, shape = math.prod(input.shape[:-1]), topk_indices.shape
            fits = shape[-1] == config.topk and (shape[:-1] == input.shape[:-1] or len(shape) == 2 and shape[0] == T)
            if not fits or topk_indices.dtype != torch.int64:
                raise ValueError(f"{given} is {list(shape)} {topk_indices.dtype}; needs [{T}, {config.topk}] or "
                                 f"{[*input.shape[:-1], config.topk]} torch.int64")
            topk_indices = topk_indices.flatten(0, -2)
            if self._replayed is not None:
                topk_indices = topk_indices.masked_fill(topk_indices < 0, config.num_experts)
        if self.last_losses.device != self.weight.device:             # fully_shard has moved parameters and buffers
            self._move_counts(lambda tensor: tensor.to(self.weight.device))
        logits = self.gating(self.apply_input_jitter(input))
        routing = self._route_logits(logits, padding_mask, topk_indices)
        return routing if dense_output else self._to_map(*routing)

    def route(
        self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The router's call in the [T, K] form that the layer runs on: (probs, indices), see forward."""
        return self(input, padding_mask, topk_indices, dense_output=True)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""
        self._check_mask(padding_mask, logits.shape[:-1])
        return self._to_map(*self._route_logits(logits, padding_mask, None))


METRICS = (*LOSS_NAMES.values(), "z_loss")                            # the order of TopKRouter.last_losses


def _routers(model: nn.Module) -> list[TopKRouter]:
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    if not routers:
        raise ValueError(f"model ({type(model).__name__}) has no TopKRouter")
    return routers


def update_expert_bias(model: nn.Module) -> None:
    """Call it after the optimizer step. It uses the tokens of all ranks since the last update.

    bias_update="sign": every router's expert bias moves by bias_update_rate towards an even load (arXiv 2408.15664).
    "quantile": it becomes the bias with which the load would have been even, see kernels.required_bias_histogram.
    """
    for router in _routers(model):
        if router.expert_bias is None:
            continue
        router._maintain_float32_expert_bias()
        config, group = router.config, router.pg_collection.tp_dp_cp
        if config.bias_update == "quantile":
            bias = kernels.quantile_expert_bias(
                all_sum(router.bias_histogram, group), router.expert_bias, config.topk)
        else:
            bias = kernels.get_updated_expert_bias(
                router.local_tokens_per_expert, router.expert_bias, config.bias_update_rate, group)
        router.expert_bias.copy_(bias)
        router.local_tokens_per_expert.zero_()
        router.reset_bias_histogram()


class RoutingRecord:
    """`indices`: of each router's latest forward, in module order, the choice [T, K] int64 before dropping, E for
    padding; None for a router that has not run."""

    def __init__(self, routers: list[TopKRouter]):
        self._routers, self._kept = routers, None

    @property
    def indices(self) -> list[Tensor | None]:
        return self._kept or [router._recorded for router in self._routers]


@contextlib.contextmanager
def record_routing(model: nn.Module):
    """Within it, the RoutingRecord that it gives holds what the model's routers choose, in training and in eval, in
    compiled code too. ValueError: no router, or nested on one model."""
    routers = _routers(model)
    if any(router._recording for router in routers):
        raise ValueError("model is being recorded already; leave record_routing first")
    record = RoutingRecord(routers)
    try:
        for router in routers:
            router._recording = True
        yield record
    finally:
        record._kept = record.indices
        for router in routers:
            router._recording, router._recorded = False, None


@contextlib.contextmanager
def replay_routing(model: nn.Module, indices: Sequence[Tensor] | Tensor):
    """Within it, every router of the model takes `indices` for its choice: one [T, K] int64 tensor a router, in module
    order, as record_routing gives them, or a tensor [layers, T, K]. E and -1 mean nowhere. The probs are computed anew.

    A checkpoint asks the routers again in its backward, which then belongs inside. ValueError: no router, another
    number of layers, nested on one model; in the forward, naming the router, a wrong shape or dtype.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    if len(indices) != len(_routers(model)):
        raise ValueError(f"indices is for {len(indices)} layers; the model has {len(routers)} routers: {', '.join(routers)}")
    if any(router._replayed is not None for router in routers.values()):
        raise ValueError("model is replaying already; leave replay_routing first")
    try:
        for (name, router), choice in zip(routers.items(), indices):
            router._replayed = f"indices of {name}", choice
        yield
    finally:
        for router in routers.values():
            router._replayed = None


def load_balancing_metrics(model: nn.Module, reduce: bool = False) -> dict[str, Tensor]:
    """Of each router's latest training forward, layers in module order: "tokens_per_expert" [layers, E]
    int64, before dropping and without padding; "max_violation" [layers] = max_e n_e / mean n - 1 (arXiv
    2408.15664), NaN where nothing was counted; and each loss that is on in any layer, [layers], divided
    by its coefficient, NaN for a layer without it.

    reduce: over all ranks (collective): counts summed, losses summed over the ranks that share them and averaged over
    the others. For logging only: the losses are in the gradient already, do not add them.
    """
    routers = _routers(model)
    counts, losses = [r.last_tokens_per_expert for r in routers], [r.last_losses for r in routers]
    if reduce:
        for i, router in enumerate(routers):
            group = router.pg_collection.tp_dp_cp or router.pg_collection.tp_cp
            shares = [group_size(group) / (router._sharers[name] or group_size(group)) for name in METRICS]
            counts[i] = all_sum(counts[i], group)
            losses[i] = all_sum(losses[i], group) / losses[i].new_tensor(shares)
    counts, losses = torch.stack(counts), torch.stack(losses)
    on = {LOSS_NAMES[kind] for r in routers for kind in LOSS_NAMES if r.get_aux_loss_coeff(kind)}
    on |= {"z_loss" for r in routers if r.config.z_loss_coeff}
    metrics = {name: losses[:, i] for i, name in enumerate(METRICS) if name in on}
    violation = counts.amax(1) / counts.double().mean(1) - 1                       # 0 / 0 before any forward
    return {**metrics, "max_violation": violation.float(), "tokens_per_expert": counts}


# ---- Experts ----

def _as_autocast(tokens: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype where it is on."""
    device_type = tokens.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return [tokens, *others]
    dtype = torch.get_autocast_dtype(device_type)
    return [x if x is None else x.to(dtype) for x in (tokens, *others)]


class Experts(ParallelModule):
    """All experts in one tensor per projection; see kernels.expert_mlp."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        E, P, F = config.num_experts, config.parts, config.ffn_hidden_size
        H = config.latent_size or config.hidden_size
        if E % group_size(self.pg_collection.ep):
            raise ValueError(f"num_experts is {E}; needs a multiple of the ep size, {group_size(self.pg_collection.ep)}")
        E //= group_size(self.pg_collection.ep)                                                 # the local ones

        self.fc1 = self.parameter(E, P, F, H)                                       # P: gate, up
        self.fc2 = self.parameter(E, H, F)
        self.fc1_bias = self.parameter(E, P, F) if config.add_bias_linear else None
        self.fc2_bias = self.parameter(E, H) if config.add_bias_linear else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights of all E experts on every rank and keeps its part: the same at every ep. Biases to zero."""
        first = group_rank(self.pg_collection.ep) * len(self.fc1)
        with torch.no_grad():
            for e in range(self.config.num_experts):
                for weight in (self.fc1, self.fc2):
                    drawn = _normal((1, *weight.shape[1:]), self.config.init_std, weight)
                    copy_rows(weight, drawn, e - first)                   # an expert of another rank: nothing
            for bias in (self.fc1_bias, self.fc2_bias):
                if bias is not None:
                    bias.zero_()

    def forward(
        self, tokens: Tensor, probs: Tensor, plan: kernels.Permutation, down: Tensor | None = None,
    ) -> Tensor:
        """tokens [T, H], probs [T, K], their plan -> [T, H] in tokens.dtype. Under autocast the products are in its
        dtype; the gradients arrive in the parameters' dtypes. `down`: see kernels.expert_mlp."""
        x, down, *weights = _as_autocast(tokens, down, self.fc1, self.fc2, self.fc1_bias, self.fc2_bias)
        out = kernels.expert_mlp(
            x, probs, plan, *weights, self.config.apply_probs_on, down=down, **self.config.activation_options)
        return out.to(tokens.dtype)

    def shard(self, name: str) -> tuple:
        return self.pg_collection.ep, 0

    def gradient_group(self, name: str):
        return self.pg_collection.expt_dp


class Latent(ParallelModule):
    """Routed experts in a space of ℓ = latent_size dimensions (arXiv 2512.20848): y = norm(routed(x · downᵀ)) · upᵀ,
    with latent_norm an RMSNorm, else none. `forward` takes the routed path as a function: one call gathers all weights
    where FSDP2 has sharded them."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.down = self.parameter(config.latent_size, config.hidden_size)
        self.up = self.parameter(config.hidden_size, config.latent_size)
        self.norm = self.parameter(config.latent_size) if config.latent_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws down and up anew (normal, init_std); the norm becomes ones."""
        with torch.no_grad():
            for weight in (self.down, self.up):
                copy_rows(weight, _normal(weight.shape, self.config.init_std, weight))
            if self.norm is not None:
                self.norm.fill_(1.0)

    def forward(self, x_TH: Tensor, routed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x [T, H] -> [T, H]; routed(x, down) gives [T, ℓ]."""
        rows, up = _as_autocast(routed(x_TH, self.down), self.up)
        return kernels.latent_up(rows, up, self.norm, self.config.latent_norm_eps).to(x_TH.dtype)


# ---- Shared expert: every token's; in one go, or in five steps on a side stream beside the routed path ----

_SIDE_STREAMS: dict[torch.device, torch.Stream] = {}


def _make_side_stream(device: torch.device) -> None:
    """Called outside of compiled code, which can enter a stream but not make one."""
    if device.type not in ("cpu", "meta") and device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.Stream(device)


def _current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


class SharedExpertState(enum.Enum):
    """Which of the five steps was the last."""
    IDLE = 0
    PRE_FORWARD_COMM_DONE = 1
    FC1_FORWARD_DONE = 2
    FC2_FORWARD_DONE = 3
    POST_FORWARD_COMM_DONE = 4


_CACHED_IN = {
    SharedExpertState.PRE_FORWARD_COMM_DONE: ("cached_fc1_input", "gate_score"),
    SharedExpertState.FC1_FORWARD_DONE: ("cached_fc2_input", "gate_score"),
    SharedExpertState.FC2_FORWARD_DONE: ("cached_fc2_output", "gate_score"),
    SharedExpertState.POST_FORWARD_COMM_DONE: ("cached_output", "gate_score")}


def overlap_state_check(required_state: SharedExpertState, next_state: SharedExpertState):
    """Decorates a step: RuntimeError, and nothing changes, unless overlap is on, the state is `required_state` and the
    step before has left its tensors; then runs it and moves to `next_state`. An exception in it drops all caches."""
    def decorate(step):
        @functools.wraps(step)
        def checked(self, *args, **kwargs):
            if not self.config.shared_expert_overlap:
                raise RuntimeError(f"{step.__name__} needs shared_expert_overlap=True, found False: call the module itself")
            if self._overlap_state is not required_state:
                raise RuntimeError(f"{step.__name__} needs the state {required_state.name}, found "
                                   f"{self._overlap_state.name}; reset_overlap() starts again")
            for name in _CACHED_IN.get(required_state, ()):
                if getattr(self, name) is None and (name != "gate_score" or self.gate_weight is not None):
                    raise RuntimeError(f"{step.__name__} needs {name} from the step before, found None; "
                                       f"reset_overlap() starts again")
            try:
                result = _tracing_side_effects(step, self, *args, **kwargs)
            except BaseException:
                self.reset_overlap()
                raise
            self._overlap_state = next_state
            return result
        return checked
    return decorate


# Where tensors cross the streams, an op copies them and waits. So the order holds in a graph too, where
# torch 2.13 does not tie a wait by itself to what reads behind it, and cannot split at one in the backward.

def _empty_on_other_stream(tensor: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
    from torch._inductor import config
    if config.triton.cudagraphs:
        raise RuntimeError("shared_expert_overlap with CUDA graphs (mode=\"reduce-overhead\"): graphs of one memory "
                           "pool must not run on two streams; compile without them, or without overlap")
    return torch.empty_like(tensor)


@kernels._op(_empty_on_other_stream)
def _fork_stream(tensor: Tensor) -> Tensor:
    """A copy for the side stream, which waits for the current one."""
    copy, side = tensor.clone(), _SIDE_STREAMS[tensor.device]
    side.wait_stream(_current_stream(tensor.device))
    copy.record_stream(side)                 # its memory lives until that stream has read it
    return copy


@kernels._op(_empty_on_other_stream)
def _join_stream(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy for the current stream, which waits for the side stream, and there for `others` too."""
    current = _current_stream(tensor.device)
    current.wait_stream(_SIDE_STREAMS[tensor.device])
    tensor.record_stream(current)
    return tensor.clone()


class _ToSideStream(torch.autograd.Function):
    """Tensors -> the same, for the side stream. In the backward the current stream waits for all of
    their gradients; the first is copied."""

    @staticmethod
    def forward(ctx, stream, *tensors):
        ctx.stream = stream
        ctx.set_materialize_grads(False)
        tensors[0].record_stream(stream)
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*[y for x, y in zip(tensors, outputs) if not x.requires_grad])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        first, *others = filter(torch.is_tensor, grads)
        with ctx.stream:                     # in a graph, the last that reads the gradient on that stream
            joined = first.view_as(first)
        joined = _join_stream(joined, others)
        return None, *[joined if grad is first else grad for grad in grads]


class _BackwardStreamWait(torch.autograd.Function):
    """input -> input; in the backward `stream` waits for the current one, so that what runs there next
    does not start before what the routed path has launched."""

    @staticmethod
    def forward(ctx, input, stream):
        ctx.stream = stream
        return input.view_as(input)

    @staticmethod
    def backward(ctx, grad):
        ctx.stream.wait_stream(_current_stream(grad.device))
        return grad, None


class _FromSideStream(torch.autograd.Function):
    """output -> output, for which the current stream waits; in the backward the side stream waits.

    A non-reentrant checkpoint recomputes at the first node of the backward that unpacks a tensor, and
    on the stream of that node. This node is the first, and is on the current stream: nobody would wait
    for a recomputation on the side stream.
    """

    @staticmethod
    def forward(ctx, output):
        ctx.save_for_backward(output.new_empty(0))
        return _join_stream(output, [])

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors
        return _fork_stream(grad)


def set_tensor_grad_fn_sequence_sr(tensor: Tensor | None, value: int) -> None:
    """Of the nodes that are ready, the backward takes the one with the highest number first. Without
    a tensor, or a grad_fn, this does nothing."""
    node = getattr(tensor, "grad_fn", None)
    if node is not None:
        node._set_sequence_nr(value)


class SharedExpertMLP(ParallelModule):
    """An MLP of width shared_expert_intermediate_size with the config's activation, without biases; with `gate` its
    output times sigmoid(x · gate_weightᵀ). hidden_states [.., H] -> the same shape; over tp, with sequence_parallel the
    first axis is each rank's part of the sequence, else every rank holds all of it.

    `forward` is one go. With shared_expert_overlap five steps do the same on the class-wide `stream`, for a dispatcher
    to put between its communications: pre_forward_comm, linear_fc1_forward_and_act, linear_fc2_forward,
    post_forward_comm, get_output. Each gives RuntimeError out of order.
    """

    def __init__(self, config: MoEConfig, gate: bool, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        size, ranks = config.shared_expert_intermediate_size, group_size(self.pg_collection.tp)
        if size is None or size % ranks:
            raise ValueError(f"shared_expert_intermediate_size is {size}; needs a multiple of the tp size, {ranks}")
        self.fc1 = self.parameter(config.parts, size // ranks, config.hidden_size)           # [P, Fs / tp, H]
        self.fc2 = self.parameter(config.hidden_size, size // ranks)                         # [H, Fs / tp]
        self.gate_weight = self.parameter(1, config.hidden_size) if gate else None
        self.reset_overlap()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the unsharded weights (normal, init_std) on every rank and keeps its part: the same at every tp."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                group, axis = self.shard(name)
                axis, ranks = (0, 1) if axis is None else (axis, group_size(group))
                shape = list(weight.shape)
                shape[axis] *= ranks
                drawn = _normal(shape, self.config.init_std, weight)
                copy_rows(weight, drawn.chunk(ranks, axis)[group_rank(group) % ranks])

    # -- the parts: each takes its weight, which in steps has come to the side stream with the tokens --

    def _score(self, x: Tensor, gate_weight: Tensor | None = None) -> Tensor | None:
        if x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"hidden_states has shape {list(x.shape)}; needs [.., {self.config.hidden_size}]")
        return None if gate_weight is None else F.linear(x, gate_weight).sigmoid()

    def _enter(self, x: Tensor) -> Tensor:
        return parallel.enter_tp(x, self.pg_collection.tp, self.config.sequence_parallel)

    def _fc1_and_act(self, x: Tensor, fc1: Tensor) -> Tensor:
        return kernels.activation(F.linear(x, fc1.flatten(0, 1)), **self.config.activation_options)

    def _fc2(self, x: Tensor, fc2: Tensor) -> Tensor:
        return F.linear(x, fc2)

    def _leave(self, y: Tensor) -> Tensor:
        return parallel.leave_tp(y, self.pg_collection.tp, self.config.sequence_parallel)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_score = self._score(hidden_states, self.gate_weight)
        act = self._fc1_and_act(self._enter(hidden_states), self.fc1)
        output = self._leave(self._fc2(act, self.fc2))
        return output if gate_score is None else output * gate_score

    # -- the same in five steps --

    @property
    def stream(self) -> torch.Stream | None:
        """The side stream of the parameters' device; None without overlap, and without an accelerator."""
        return _SIDE_STREAMS.get(self.fc1.device) if self.config.shared_expert_overlap else None

    def _beside(self):
        return self.stream or contextlib.nullcontext()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        _make_side_stream(self.fc1.device)
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        _make_side_stream(self.fc1.device)

    def reset_overlap(self) -> None:
        """Back to IDLE, without caches: after an exception outside of the steps."""
        self._overlap_state, self.gate_score = SharedExpertState.IDLE, None
        self.cached_fc1_input = self.cached_fc2_input = self.cached_fc2_output = self.cached_output = None
        self._weights = None                                          # fc1, fc2, gate_weight, for the side stream

    def wait_current_stream(self) -> None:
        """The side stream waits for what is on the current one so far."""
        if self.stream is not None:
            self.stream.wait_stream(_current_stream(self.fc1.device))

    @overlap_state_check(SharedExpertState.IDLE, SharedExpertState.PRE_FORWARD_COMM_DONE)
    def pre_forward_comm(self, input: Tensor, wait_current_stream: bool = True) -> None:
        """The gate's score; the tokens of all tp ranks."""
        if isinstance(self.fc1, DTensor):
            raise RuntimeError("pre_forward_comm needs whole weights, found a DTensor: fully_shard gathers them "
                               "for a call, not for steps; shard the layer, not its shared expert alone")
        if wait_current_stream:
            self.wait_current_stream()
        tensors = [x for x in (input, self.fc1, self.fc2, self.gate_weight) if x is not None]
        if self.stream is not None:
            tensors = _ToSideStream.apply(self.stream, *tensors)
        input, *self._weights = tensors
        with self._beside():
            self.gate_score = self._score(input, *self._weights[2:])
            self.cached_fc1_input = self._enter(input)

    @overlap_state_check(SharedExpertState.PRE_FORWARD_COMM_DONE, SharedExpertState.FC1_FORWARD_DONE)
    def linear_fc1_forward_and_act(self, overlapped_comm_output: Tensor | None = None) -> None:
        """overlapped_comm_output: of the communication that runs beside this step. Its backward is launched before this
        step's, which then waits for what is on the main stream."""
        with self._beside():
            act = self._fc1_and_act(self.cached_fc1_input, self._weights[0])
        if self.stream is not None and not torch.compiler.is_compiling():     # a graph has its own order
            act = _BackwardStreamWait.apply(act, self.stream)
        node = getattr(overlapped_comm_output, "grad_fn", None)
        if node is not None:
            set_tensor_grad_fn_sequence_sr(act, node._sequence_nr() - 1)
        self.cached_fc1_input, self.cached_fc2_input = None, act

    @overlap_state_check(SharedExpertState.FC1_FORWARD_DONE, SharedExpertState.FC2_FORWARD_DONE)
    def linear_fc2_forward(self, overlapped_comm_output: Tensor | None = None) -> None:
        """overlapped_comm_output: its backward goes before everything else that is ready."""
        set_tensor_grad_fn_sequence_sr(overlapped_comm_output, torch.iinfo(torch.int).max)
        with self._beside():
            self.cached_fc2_output = self._fc2(self.cached_fc2_input, self._weights[1])
        self.cached_fc2_input = None

    @overlap_state_check(SharedExpertState.FC2_FORWARD_DONE, SharedExpertState.POST_FORWARD_COMM_DONE)
    def post_forward_comm(self) -> None:
        """The sum over the tp ranks."""
        with self._beside():
            self.cached_output = self._leave(self.cached_fc2_output)
        self.cached_fc2_output = None

    @overlap_state_check(SharedExpertState.POST_FORWARD_COMM_DONE, SharedExpertState.IDLE)
    def get_output(self) -> Tensor:
        """The output, gated; the current stream waits for it."""
        with self._beside():
            output = self.cached_output
            if self.gate_score is not None:
                output = output * self.gate_score
        if self.stream is not None:
            output = _FromSideStream.apply(output)
        self.cached_output = self.gate_score = self._weights = None
        return output

    # -- over ranks --

    def shard(self, name: str) -> tuple:
        return self.pg_collection.tp, None if name == "gate_weight" else 1

    def gradient_group(self, name: str):
        # without sequence parallelism every tp rank sees all tokens, so each has the gate's whole gradient
        partial = self.pg_collection.tp is None or self.config.sequence_parallel
        return self.pg_collection.tp_dp_cp if name == "gate_weight" and partial else self.pg_collection.dp_cp
