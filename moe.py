"""A Mixture-of-Experts layer: config, layer, router, experts, latent pair, shared expert.

After the section "Experts" you have read the layer. The features, what is kept from step to
step, functions of a whole model, and checks come later. The tensor functions are in
kernels.py, which also explains the letters. Process groups and the exchanges between ranks
are in parallel.py.

    hidden_states [S, B, H] ─┬─> TopKRouter ─> probs, indices [T, K] ─> plan ─┐
                             ├────────────────────────────────────────────────┴─> Experts ─┐
                             └─> SharedExpertMLP ──────────────────────────────────────────┴─> sum

Where is it?
    tokens over capacity        TopKRouter._drop; kernels.apply_router_token_dropping decides
    balance losses              TopKRouter._apply_losses; MoEAuxLossAutoScaler puts them into
                                the gradient
    counts, and activation      RouterCounts; _update_once
      checkpoints
    host syncs                  kernels._where_read; parallel.ExpertParallel
    the router alone            TopKRouter; copy all three files
    kept for the backward       kernels._ExpertMLP
    index E                     "Unrouted" at the top of kernels.py
    the all-to-all, its waits   parallel.ExpertParallel; parallel.AllToAll
    a dispatcher of your own    MoELayer.dispatch; parallel.Dispatch
    what tp changes             SharedExpertMLP._enter and _leave; parallel.ProcessGroups
    a score function            kernels.SCORE_FUNCTIONS
    bitwise repeatability       "Permute, index form" in kernels.py
    what a config refuses       check_config
"""
import contextlib
import enum
import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Some of these are here for those who import them from moe.
if __package__:
    from . import kernels, parallel
    from .parallel import (
        AllToAll, Dispatch, ExpertParallel, Local, ParallelModule, ProcessGroups, Splits, all_sum,
        enter_tp, exchange, gathered, gradient_norm, group_rank, group_size, leave_tp,
        reduce_gradients, sharded_state_dict, wait)
else:
    import kernels
    import parallel
    from parallel import (
        AllToAll, Dispatch, ExpertParallel, Local, ParallelModule, ProcessGroups, Splits, all_sum,
        enter_tp, exchange, gathered, gradient_norm, group_rank, group_size, leave_tp,
        reduce_gradients, sharded_state_dict, wait)


# ---- Config ----

# balancing type -> name of its loss in the metrics
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
LOAD_BALANCING_TYPES = ("none", *LOSS_NAMES, "sinkhorn")
METRICS = (*LOSS_NAMES.values(), "z_loss")
LOGGED = ("dropped", *METRICS)                       # the order of RouterCounts.last_logged

# field of MoEConfig -> constant of an activation
_CONSTANTS = {
    "glu_alpha": "alpha",
    "glu_linear_offset": "linear_offset",
    "activation_clamp_value": "clamp_value",
    "situ_beta": "beta",
    "situ_linear_beta": "linear_beta",
}

_MADE_WITH = (
    "hidden_size ffn_hidden_size num_experts add_bias_linear router_bias enable_expert_bias "
    "latent_size latent_norm shared_expert_intermediate_size shared_expert_gate params_dtype")


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. A setting that cannot work is a ValueError here, which names
    the fields and the way out.

    Most names are Megatron's, without the prefix moe_ or moe_router_. hidden_size is H,
    ffn_hidden_size is F of one expert, num_experts is E, topk is K. For score_function to
    scaling_factor see kernels.topk_routing_with_score_function, for the activation fields
    kernels.activation. apply_probs_on: "activation" is p · expert(x), with p multiplied in
    before fc2; "input" is expert(p·x), another function, for topk = 1. load_balancing_type and
    aux_loss_coeff are one type and a float, or tuples of the same length; every balance
    loss needs a positive coefficient. batch_first says which axis is the sequence. It
    matters to seq_aux_loss alone, which needs True or False for an input with two token axes;
    elsewhere None is False.

    >>> MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2).balancing
    {'none': 0.0}
    """
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    activation: "str | kernels.Activation" = "swiglu"      # a name in kernels.ACTIVATIONS, or one
    glu_alpha: float = 1.702                       # for quick_geglu
    glu_linear_offset: float = 0.0                 # for swiglu, geglu and quick_geglu
    activation_clamp_value: float | None = None    # for swiglu, geglu and quick_geglu
    situ_beta: float = 1.0                         # for situ
    situ_linear_beta: float | None = None          # for situ
    activation_fp8_input_store: bool = False       # keep fc1's output for the backward as fp8 e4m3
    add_bias_linear: bool = False                  # biases in the experts
    apply_probs_on: str = "activation"             # "activation", "input"
    score_function: str = "softmax"                # "softmax", "sigmoid", "sqrtsoftplus"
    pre_softmax: bool = False                      # probs are a softmax over all E, not the chosen
    norm_topk_prob: bool | None = None             # None: Megatron's convention
    norm_eps: float = 1e-20
    num_groups: int | None = None                  # of experts: see kernels.group_limited_topk
    group_topk: int | None = None
    group_score_topk: int | None = None            # None: topk // group_topk
    scaling_factor: float | None = None
    router_bias: bool = False                      # a trainable bias on the logits
    router_dtype: torch.dtype = torch.float32
    enable_expert_bias: bool = False               # a bias that only chooses
    bias_update: str = "sign"                      # "sign" (arXiv 2408.15664), "quantile"
    bias_update_rate: float = 1e-3                 # for "sign"
    latent_size: int | None = None                 # width ℓ of the routed experts; None: H
    latent_norm: bool = False                      # an RMSNorm after the latent experts
    latent_norm_eps: float = 1e-5
    load_balancing_type: str | tuple[str, ...] = "none"
    aux_loss_coeff: float | tuple[float, ...] = 0.0
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None          # noise on the router's input, in training
    force_load_balancing: bool | str = False       # True: random logits; "round_robin": even loads
    calculate_per_token_loss: bool = False         # losses times the count of valid tokens
    capacity_factor: float | None = None           # None: dropless
    token_drop_policy: str = "probs"               # "probs", "position"
    pad_to_capacity: bool = False
    shared_expert_intermediate_size: int | None = None     # Fs; None: no shared expert
    shared_expert_gate: bool = False               # its output times sigmoid(x · gate_weightᵀ)
    shared_expert_overlap: bool = False            # in five steps, beside the routed path
    sequence_parallel: bool = False                # over tp each rank has its part of the sequence
    params_dtype: torch.dtype = torch.float32
    init_std: float = 0.02
    output_init_std: float | None = None           # of fc2, latent_up; None: init_std
    batch_first: bool | None = None                # hidden_states are [B, S, H], token t is b·S + s

    @property
    def output_std(self) -> float:
        """The standard deviation that output projections are drawn with."""
        return self.init_std if self.output_init_std is None else self.output_init_std

    @functools.cached_property
    def balancing(self) -> dict[str, float]:
        """Balancing type -> its coefficient."""
        if isinstance(self.load_balancing_type, tuple):
            return dict(zip(self.load_balancing_type, self.aux_loss_coeff))
        return {self.load_balancing_type: self.aux_loss_coeff}

    @functools.cached_property
    def losses(self) -> dict[str, float]:
        """Balance loss that is on -> its coefficient."""
        return {kind: coeff for kind, coeff in self.balancing.items() if kind in LOSS_NAMES}

    @functools.cached_property
    def choice_options(self) -> dict:
        """Keyword arguments of kernels.scores_for_choice."""
        names = "topk", "score_function", "num_groups", "group_topk", "group_score_topk"
        return {name: getattr(self, name) for name in names}

    @functools.cached_property
    def prob_options(self) -> dict:
        """Keyword arguments of kernels.probs_of_chosen."""
        normalise = kernels.normalisation(
            self.score_function, self.topk, use_pre_softmax=self.pre_softmax,
            norm_topk_prob=self.norm_topk_prob)
        return {"score_function": self.score_function, "normalise": normalise,
                "norm_eps": self.norm_eps, "scaling_factor": self.scaling_factor}

    @functools.cached_property
    def activation_function(self) -> "kernels.Activation":
        """The activation with its constants, for kernels.activation and kernels.expert_mlp."""
        if isinstance(self.activation, kernels.Activation):
            return kernels.make_activation(self.activation)
        known = kernels.constants_of(self.activation)
        constants = {
            constant: getattr(self, name) for name, constant in _CONSTANTS.items()
            if constant in known}
        return kernels.make_activation(self.activation, **constants)

    @functools.cached_property
    def made_with(self) -> dict:
        """Field -> what the tensors of a layer depend on. Another config for the same layer has
        the same.
        """
        return {
            **{name: getattr(self, name) for name in _MADE_WITH.split()},
            "activation": self.parts,
            "bias_update": self.bias_update == "quantile",
            "load_balancing_type": "global_aux_loss" in self.losses,
        }

    @property
    def always_one(self) -> bool:
        """One expert a token, and its prob is divided by itself: the router gets no gradient."""
        return self.topk == 1 and self.prob_options["normalise"] and (
            "sinkhorn" not in self.balancing)

    @property
    def parts(self) -> int:
        """Parts P of fc1's output: gate and up, or one where the activation is not gated."""
        return self.activation_function.parts

    def __post_init__(self):
        for name in ("load_balancing_type", "aux_loss_coeff"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))     # it can be hashed
        check_config(self)
        # Made here, once: a compiled forward could not make a cached_property.
        self.losses, self.choice_options, self.prob_options, self.activation_function
        self.made_with


# ---- Layer ----

def ends_overlap(forward):
    """Decorator of the layer's forward: the shared expert keeps nothing after it, also after an
    exception. (A checkpoint ends its recomputation by one.)
    """
    @functools.wraps(forward)
    def ended(self, *args, **kwargs):
        try:
            return forward(self, *args, **kwargs)
        finally:
            if self.config.shared_expert_overlap:
                self.shared_experts.reset_overlap()

    return ended


class MoELayer(ParallelModule):
    """y_t = Σ_k probs[t, k] · expert_{indices[t, k]}(x_t), plus the shared expert's output.

    hidden_states [S, B, H] -> the same shape and dtype. The parts are layer.router,
    layer.experts, layer.latent_down and layer.latent_up (see LatentDown), and
    layer.shared_experts; the last three are None if not configured. With batch_first
    hidden_states are [B, S, H], and masks and given indices [B, S, ..].

    `torch.compile(layer, fullgraph=True)` takes every configuration as one graph. (CUDA
    graphs do not go together with shared_expert_overlap.) The same input and state give
    bitwise the same output and gradients, unless input_jitter_eps or force_load_balancing
    draw numbers. Under ep each rank has E / ep experts and tokens of its own. Every rank
    must run every forward and backward, also with T = 0. With pad_to_capacity all ranks
    need the same T, with sequence_parallel the same S over tp. ValueError: sizes that ep
    or tp do not divide, tp without sequence_parallel or with batch_first, and in the forward
    wrong shapes.

    `layer.config = dataclasses.replace(layer.config, topk=1)` holds for all parts from now on. A
    field that the shape of a tensor depends on is a ValueError.

    >>> layer = MoELayer(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, topk=2))
    >>> layer(torch.randn(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.router = TopKRouter(config, pg_collection)
        self.experts = Experts(config, pg_collection)
        self.latent_down = None
        self.latent_up = None
        if config.latent_size is not None:
            self.latent_down = LatentDown(config, pg_collection)
            self.latent_up = LatentUp(config, pg_collection)
        self.shared_experts = None
        if config.shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExpertMLP(config, config.shared_expert_gate, pg_collection)

    @ends_overlap
    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [S, B, H] or [T, H]. padding_mask [S, B] or [T] bool: a token with
        True gets no routed expert. topk_indices [T, K] or [S, B, K] replaces the router's
        choice. cu_seqlens [n + 1] are the bounds of packed sequences. See TopKRouter.forward.
        """
        config = self.config
        shared = self.shared_experts
        if hidden_states.ndim not in (2, 3):
            _refuse_input(hidden_states, config)
        if config.shared_expert_overlap:
            hidden_states = shared.pre_forward_comm(hidden_states)
        x_TH = hidden_states.flatten(0, -2)
        probs_TK, indices_TK = self.router.route(
            hidden_states, padding_mask, topk_indices, cu_seqlens)
        plan = kernels.plan_permutation(indices_TK, config.num_experts)

        if self.latent_down is not None:
            x_TH = self.latent_down(x_TH).to(x_TH.dtype)
        expert_probs_TK = probs_TK
        if config.apply_probs_on == "input":                     # K = 1
            x_TH, expert_probs_TK = _multiplied(x_TH, probs_TK)

        # Rows go to their experts and come back. (The casts are for FSDP2: its output_dtype may
        # change what a part returns.)
        dispatched = self.dispatch(x_TH, expert_probs_TK, indices_TK, plan)
        if config.shared_expert_overlap:
            dispatched = OverlappedDispatch(dispatched, shared)
        rows, probs, local_plan = dispatched.wait_for_rows()
        output = self.experts(rows, probs, local_plan).to(rows.dtype)
        y_TH = dispatched.wait_and_combine(dispatched.send_back(output))

        if self.latent_up is not None:
            y_TH = self.latent_up(y_TH).to(y_TH.dtype)
        y = kernels.as_no_view(y_TH, hidden_states.shape)
        if shared is not None:
            beside = shared.get_output() if config.shared_expert_overlap else shared(hidden_states)
            y = y + beside.to(y.dtype)
        return self.result(y, probs_TK)

    def result(self, y: Tensor, probs: Tensor):
        """What forward returns: y. Override this to return the router's probs [T, K] too."""
        return y

    def dispatch(
        self, x: Tensor, probs: Tensor, indices: Tensor, plan: kernels.Plan,
    ) -> Dispatch:
        """Sends the rows to their experts. Override this for a dispatcher of your own.

        x [T, H] is what the experts see: [T, ℓ] with latent experts, times the prob with
        apply_probs_on "input". The experts multiply by probs [T, K], ones with "input".
        indices [T, K] are the router's, index E is unrouted, and the plan is of the indices.
        """
        group = self.pg_collection.ep
        if group_size(group) == 1:
            return Local(x, probs, plan)
        capacity_factor = self.config.capacity_factor if self.config.pad_to_capacity else None
        return ExpertParallel(x, probs, plan=plan, group=group, capacity_factor=capacity_factor)


def _multiplied(x_TH, probs_T1):
    """(x times the probs, the probs that are left for the experts: ones)."""
    return (x_TH * probs_T1).to(x_TH.dtype), torch.ones_like(probs_T1)


# ---- Router ----

def _counted(name):
    """A property of the router: the tensor of this name in its counts."""
    return property(lambda router: getattr(router.counts, name))


class Router(ParallelModule, ABC):
    """The base of a router: weight [E, H], the logits, the expert bias and what is counted. A
    subclass turns the logits into a choice. With `forward` and `routing` alone it works in a layer.
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.check_config(config)
        self.layer_number = None
        self.weight = self.parameter(config.num_experts, config.hidden_size)
        self.bias = None
        if config.router_bias:
            self.bias = self.parameter(config.num_experts)
        expert_bias = None
        if config.enable_expert_bias:
            expert_bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", expert_bias)
        self.counts = RouterCounts(config, group_size(self.pg_collection.tp_cp))
        # See record_routing and replay_routing.
        self._recording = False
        self._recorded = None, None                  # indices, probs
        self._replayed = None
        self.reset_parameters()

    def check_config(self, config: MoEConfig) -> None:
        super().check_config(config)
        ranks = group_size(self.pg_collection.tp)
        if ranks > 1 and (config.batch_first or not config.sequence_parallel):
            raise ValueError(
                f"tp has {ranks} ranks, sequence_parallel is {config.sequence_parallel} and "
                f"batch_first is {config.batch_first}; needs sequence_parallel=True and "
                f"batch_first=False: each rank routes its own part of the first axis, the sequence")

    @abstractmethod
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """input [S, B, H] -> (probs [T, E], routing_map [T, E] bool)."""

    @abstractmethod
    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""

    def route(
        self, input: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(probs [T, K], indices [T, K] int64), the form that the layer runs on, made of what
        forward(input) returns.

        They are the ones of each row of the map, by descending prob. A row with fewer than K
        ones ends with index E and prob 0, one with more is cut to K. Padding is unrouted.
        ValueError: topk_indices or cu_seqlens are given. Override this to take them.
        """
        for name, given in (("topk_indices", topk_indices), ("cu_seqlens", cu_seqlens)):
            if given is not None:
                raise ValueError(f"{name} is given, and {type(self).__name__}.route is that of "
                                 f"Router, which calls forward(input) alone; override route")
        probs_TE, map_TE = self(input)
        kept_TE = probs_TE.detach().masked_fill(~map_TE, -math.inf)
        best = kept_TE.topk(self.config.topk, dim=1)
        unrouted = best.values == -math.inf
        if padding_mask is not None:
            unrouted = unrouted | _check_mask(padding_mask, list(input.shape[:-1]))[:, None]
        indices = best.indices.masked_fill(unrouted, self.config.num_experts)
        return kernels.pick(probs_TE, indices), indices

    def gating(self, input: Tensor) -> Tensor:
        """input [.., H] -> logits [.., E] in router_dtype. Autocast does not change it."""
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor):
            weight, bias = gathered(weight), gathered(bias)
        return kernels.router_gating_linear(
            input, weight, bias, router_dtype=self.config.router_dtype)

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def reset_parameters(self) -> None:
        """Also empties the expert bias, counts and sums."""
        super().reset_parameters()
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.counts.reset()
        _loss_scale(self.weight.device)              # made here, not by the first compiled forward

    def _given_indices(self, topk_indices, axes):
        """The indices [T, K] int64 that replace the choice: replay_routing's, or the argument."""
        name, indices = self._replayed or ("topk_indices", topk_indices)
        if indices is None:
            raise ValueError(f"{name} is None: this router had not run in record_routing; "
                             f"needs a tensor [T, {self.config.topk}] of an integer dtype")
        T, K = math.prod(axes), self.config.topk
        # Not by `in`: in a graph that takes sizes for different that are symbolic.
        fits = indices.shape == (T, K) or indices.shape == (*axes, K)
        if not fits or not kernels.is_integer(indices):
            raise ValueError(f"{name} is {list(indices.shape)} {indices.dtype}; "
                             f"needs {[T, K]} or {[*axes, K]} of an integer dtype")
        return indices.flatten(0, -2).long()

    # -- what is counted, in training with grad --

    local_tokens_per_expert = _counted("local_tokens_per_expert")
    bias_histogram = _counted("bias_histogram")
    global_tokens_per_expert = _counted("global_tokens_per_expert")
    ga_steps = _counted("ga_steps")

    def _in_training_forward(self):
        return self.training and torch.is_grad_enabled()

    def _apply_expert_bias(self, routing_map):
        """Adds the counts of the map [T, E], which is before dropping and without padding,
        to those of the expert bias: once per training forward with grad. For a router of your
        own; TopKRouter counts its indices.
        """
        if self._in_training_forward():
            self.counts.count(routing_map.sum(0))

    def _update_histogram(self, logits_TE, padding_T):
        scores_TE = kernels.SCORE_FUNCTIONS[self.config.score_function](kernels.upcast(logits_TE))
        histogram = kernels.required_bias_histogram(
            scores_TE, self.expert_bias, self.config.topk, padding_mask=padding_T)
        _update_once(self.bias_histogram, histogram, add=True)

    def reset_bias_histogram(self) -> None:
        """Empties the histogram of bias_update="quantile", which was made with the old bias.

        Call it after writing the expert bias by hand. load_state_dict does so for you, and
        empties local_tokens_per_expert too.
        """
        self.counts.zero("bias_histogram")

    def reset_global_aux_loss_tracker(self) -> None:
        """Starts the averages of the global loss anew. finish_step calls it."""
        self.counts.zero("global_tokens_per_expert", "ga_steps")

    # -- the expert bias stays in fp32: in bf16 an update of 1e-3 is rounded away --

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        self.counts.move(fn)
        _loss_scale(self.weight.device)
        return self

    def _maintain_float32_expert_bias(self):
        """Casts the expert bias back if something other than `_apply` has cast it."""
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.float()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._maintain_float32_expert_bias()         # load_state_dict(assign=True) takes any dtype
        self.counts.zero("local_tokens_per_expert", "bias_histogram")        # of another bias

    def _save_to_state_dict(self, *args, **kwargs):
        self._maintain_float32_expert_bias()
        super()._save_to_state_dict(*args, **kwargs)


class _RandomLogits(torch.autograd.Function):
    """Random values, with the gradient of the logits."""

    @staticmethod
    def forward(ctx, logits):
        return torch.randn_like(logits)

    @staticmethod
    @kernels.once_differentiable
    def backward(ctx, grad):
        return grad


class TopKRouter(Router):
    """Sends each token to its top K experts.

    forward(input)   -> (probs [T, E], routing_map [T, E]), Megatron's form
    route(input)     -> (probs [T, K], indices [T, K]), the same choice in the layer's form
    routing(logits)  -> (probs [T, E], routing_map [T, E]), from given logits
    gating(input)    -> logits
    choose(logits)   -> (probs [T, K], indices [T, K]): override it for a routing of your own

    A router works without a layer, as below. finish_step and load_balancing_metrics then take
    the router as the model.

    In training, with grad enabled, balance losses are attached to the probs and the z-loss
    to the logits. So the losses are in the gradient already: do not add them. What it counts
    is in `counts`, a RouterCounts.

    >>> router = TopKRouter(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, topk=2))
    >>> probs, indices = router.route(torch.randn(5, 3, 8))
    >>> probs.shape, indices.shape
    (torch.Size([15, 2]), torch.Size([15, 2]))
    """

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, dense_output: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """input [S, B, H], with batch_first [B, S, H], or [T, H] -> (probs [T, E] in
        router_dtype, routing_map [T, E] bool), or with `dense_output` (probs [T, K],
        indices [T, K] int64), where index E is unrouted and has prob 0.

        padding_mask [S, B] or [T] bool: tokens with True are unrouted. Within tp_cp either
        every rank passes a mask or none does. topk_indices [T, K] or [S, B, K] in [0, E], of
        any integer dtype, takes the place of the choice (replay, hash routing). An expert
        that it names more than once for a token counts once: see
        kernels.topk_routing_with_score_function. The range is not checked: checking would
        sync the device.

        cu_seqlens [n + 1] int32 or int64, 0 first, ascending, T last: sequence i of a pack has
        the tokens from cu_seqlens[i] to before cu_seqlens[i + 1]. The input is [T, H], or one
        of its two token axes has length 1. Only seq_aux_loss uses it: it is then the mean
        over the sequences that have tokens. Within tp_cp every rank gives the bounds of its
        own part, for the same n sequences. The values are checked in eager mode on a CPU alone.
        """
        axes = list(input.shape[:-1])
        if len(axes) not in (1, 2) or input.shape[-1] != self.config.hidden_size:
            _refuse_input(input, self.config)
        if padding_mask is not None:
            padding_mask = _check_mask(padding_mask, axes)
        if cu_seqlens is not None:
            _check_bounds(cu_seqlens, axes)
        if topk_indices is not None or self._replayed is not None:
            topk_indices = self._given_indices(topk_indices, axes)
        if self.counts.last_logged.device != self.weight.device:
            self.counts.follow(self.weight.device)

        if self.config.input_jitter_eps:
            input = self.apply_input_jitter(input)
        routing = self._route_logits(
            self.gating(input), padding_mask, topk_indices, cu_seqlens=cu_seqlens)
        return routing if dense_output else self._to_map(*routing)

    def route(
        self, input: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """forward in the [T, K] form that the layer runs on: (probs [T, K], indices [T, K])."""
        return self(input, padding_mask, topk_indices, dense_output=True, cu_seqlens=cu_seqlens)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""
        axes = list(logits.shape[:-1])
        if padding_mask is not None:
            padding_mask = _check_mask(padding_mask, axes)
        topk_indices = None
        if self._replayed is not None:
            topk_indices = self._given_indices(None, axes)
        return self._to_map(*self._route_logits(logits, padding_mask, topk_indices))

    # -- the choice --

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """In training, input · uniform[1 - eps, 1 + eps] (arXiv 2101.03961). The experts
        see the input without it.
        """
        eps = self.config.input_jitter_eps
        if not self.training:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def _route_logits(self, logits, padding_T, topk_indices=None, cu_seqlens=None):
        """logits [S, B, E] or [T, E] -> (probs [T, K], indices [T, K])."""
        config = self.config
        if cu_seqlens is None and config.batch_first is None and "seq_aux_loss" in config.losses:
            _check_order(config, list(logits.shape[:-1]))
        if config.always_one and self.weight.requires_grad and self._in_training_forward():
            _refuse_training(config)
        logits_TE = logits.flatten(0, -2)
        if config.force_load_balancing:
            logits_TE, topk_indices = self._force(logits_TE, topk_indices)
        if config.z_loss_coeff:
            logits_TE = self.apply_z_loss(logits_TE, padding_T)

        # Choose. The tokens of padding are unrouted.
        if config.enable_expert_bias:
            self._maintain_float32_expert_bias()
        if self._replayed is not None:
            topk_indices = self._fill_unknown(topk_indices, logits_TE, padding_T)
        probs_TK, indices_TK = self.choose(logits_TE, padding_T, topk_indices)
        if padding_T is not None:
            probs_TK, indices_TK = self._unroute(probs_TK, indices_TK, padding_T[:, None])

        # Drop
        chosen_TK = indices_TK                       # what is counted: the choice before dropping
        if config.capacity_factor is not None:
            probs_TK, indices_TK = self._drop(probs_TK, indices_TK)

        # Balance and count
        if self._in_training_forward():
            if config.losses:
                probs_TK = self._apply_losses(
                    probs_TK, logits_TE, padding_T, axes=logits.shape[:-1], cu_seqlens=cu_seqlens)
            counts_E = kernels.count_experts(chosen_TK, config.num_experts)
            self.counts.count(counts_E)
            if config.capacity_factor is not None:
                kept_E = kernels.count_experts(indices_TK, config.num_experts)
                self.counts.log("dropped", counts_E.sum() - kept_E.sum(), sharers=None)
            if self.bias_histogram is not None:
                self._update_histogram(logits_TE, padding_T)
        if self._recording:
            self._record(chosen_TK, topk_indices, padding_T, probs_TK)
        return probs_TK, indices_TK

    def choose(
        self, logits: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> (probs [T, K], indices [T, K] int64 in [0, E]), before padding
        and dropping.

        Override this for a routing of your own. Index E is unrouted, and its prob must be
        0. The balance losses still see the plain top K of the logits. padding_mask [T]
        bool and topk_indices [T, K] are those of `forward`, or None. The given indices may
        name an expert twice, the returned ones may not: see kernels.merge_repeats.
        """
        config = self.config
        if "sinkhorn" in config.balancing:
            return self._choose_by_sinkhorn(logits, padding_mask, topk_indices)
        logits_TE = kernels.upcast(logits)
        if topk_indices is not None:
            probs_TK, indices_TK = kernels.probs_of_given(
                logits_TE, topk_indices, **config.prob_options)
        else:
            scores_TE = logits_TE
            if self.expert_bias is not None or config.num_groups is not None:
                scores_TE = kernels.scores_for_choice(
                    logits_TE, expert_bias=self.expert_bias, **config.choice_options)
            indices_TK = scores_TE.topk(config.topk, dim=1).indices
            probs_TK = kernels.probs_of_chosen(logits_TE, indices_TK, **config.prob_options)
        return probs_TK.to(logits.dtype), indices_TK

    def _choose_by_sinkhorn(
        self, logits, padding_mask=None, topk_indices=None, dense_output=True,
    ):
        K = self.config.topk
        if topk_indices is None:
            balanced_TE = kernels.upcast(logits.detach())
            if self.training:
                balanced_TE = kernels.sinkhorn(balanced_TE, padding_mask=padding_mask)
            topk_indices = balanced_TE.topk(K, dim=1).indices
        return kernels.topk_routing_with_score_function(
            logits, K, score_function="sigmoid" if K == 1 else "softmax", norm_topk_prob=False,
            precomputed_indices=topk_indices, dense_output=dense_output)

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [.., E] -> (probs [T, E], routing_map [T, E]).

        The choice is the top K of sinkhorn(logits) in training, of the logits in eval. The
        probs are, at the chosen, the sigmoid (K = 1) or the softmax over all E, not
        normalised again.
        """
        return self._choose_by_sinkhorn(logits.flatten(0, -2), dense_output=False)

    def _force(self, logits_TE, topk_indices):
        """(logits, indices) of force_load_balancing. Given indices stay."""
        if self.config.force_load_balancing != "round_robin":
            return _RandomLogits.apply(logits_TE), topk_indices
        if topk_indices is None:
            T, E = logits_TE.shape
            number_N = torch.arange(T * self.config.topk, device=logits_TE.device)
            topk_indices = (number_N % E).view(T, self.config.topk)
        return logits_TE, topk_indices

    def _fill_unknown(self, indices_TK, logits_TE, padding_T):
        """Replayed indices, with the router's own choice for the tokens that have a -1."""
        with torch.no_grad():
            _, own_TK = self.choose(logits_TE, padding_T)
        return torch.where((indices_TK < 0).any(1, keepdim=True), own_TK, indices_TK)

    @kernels.writes_to_module
    def _record(self, indices_TK, given_TK, padding_T, probs_TK):
        if given_TK is not None:
            indices_TK = given_TK                    # with its repeats
        if padding_T is not None:
            indices_TK = indices_TK.masked_fill(padding_T[:, None], self.config.num_experts)
        self._recorded = indices_TK, probs_TK.detach()

    # -- drop --

    def _drop(self, probs_TK, indices_TK):
        """Assignments beyond an expert's capacity become unrouted. The probs that remain are
        not normalised again.
        """
        probs_TE, map_TE = kernels.routing_to_map(
            probs_TK.detach(), indices_TK, self.config.num_experts)
        kept_TE = self._cut_to_capacity(probs_TE, map_TE)
        return self._unroute(probs_TK, indices_TK, ~kernels.pick(kept_TE, indices_TK))

    def _unroute(self, probs_TK, indices_TK, where):
        unrouted_TK = indices_TK.masked_fill(where, self.config.num_experts)
        return probs_TK.masked_fill(where, 0.0), unrouted_TK

    def _cut_to_capacity(self, probs_TE, map_TE, pad=False):
        """The routing_map of kernels.apply_router_token_dropping."""
        config = self.config
        return kernels.apply_router_token_dropping(
            probs_TE, map_TE, config.topk, capacity_factor=config.capacity_factor,
            drop_policy=config.token_drop_policy, pad_to_capacity=pad)[1]

    def _to_map(self, probs_TK, indices_TK):
        """The [T, E] form. With pad_to_capacity the map also marks the fillers, for which
        the [T, K] form has no place.
        """
        probs_TE, map_TE = kernels.routing_to_map(probs_TK, indices_TK, self.config.num_experts)
        if self.config.pad_to_capacity:
            map_TE = self._cut_to_capacity(probs_TE.detach(), map_TE, pad=True)
        return probs_TE, map_TE

    # -- losses --

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """The coefficient of a balancing type, 0.0 when it is off."""
        return self.config.balancing.get(aux_loss_type, 0.0)

    def is_aux_loss_enabled(self) -> bool:
        """Whether any balance loss has a coefficient other than 0."""
        return bool(self.config.losses)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits [.., E] with the z-loss attached, in training with grad (arXiv 2202.08906).

        Over tp_cp each rank has its part: coeff · Σ logsumexp² over its valid tokens,
        divided by the valid tokens of all.
        """
        coeff = self.config.z_loss_coeff
        group = self.pg_collection.tp_cp
        if not self._in_training_forward():
            return logits
        loss = kernels.z_loss_func(logits, coeff, padding_mask)
        if padding_mask is None:
            tokens = math.prod(logits.shape[:-1]) * group_size(group)
            loss = loss / group_size(group)
        else:
            local = (~padding_mask).sum()
            tokens = all_sum(local, group)
            loss = loss * local / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(
            logits, coeff, aux_loss=loss, aux_loss_name="z_loss", reduce_group=group,
            valid_token_count=tokens)

    def _apply_losses(self, probs, logits_TE, padding_T, axes, cu_seqlens):
        """probs [T, K] with every balance loss that is on. The tokens have the axes [S, B], with
        batch_first [B, S], or [T]: one sequence, or a pack with the bounds cu_seqlens.
        """
        map_TE, scores_TE = kernels.compute_routing_scores_for_aux_loss(
            logits_TE, self.config.topk, score_function=self.config.score_function,
            padding_mask=padding_T)
        losses = self.config.losses
        if "aux_loss" in losses:
            probs = self._apply_aux_loss(probs, scores_TE, map_TE)
        if "seq_aux_loss" in losses:
            probs = self._apply_loss_of_sequences(probs, scores_TE, map_TE, axes, cu_seqlens)
        if "global_aux_loss" in losses:
            probs = self._apply_global_aux_loss(probs, scores_TE, map_TE)
        return probs

    def _apply_loss_of_sequences(self, probs, scores_TE, map_TE, axes, cu_seqlens):
        """The loss of each sequence of a pack, or of a batch whose tokens have these axes."""
        if cu_seqlens is not None:
            return self._apply_packed_aux_loss(probs, scores_TE, map_TE, cu_seqlens=cu_seqlens)
        S, *batch = axes
        B = math.prod(batch)
        by_sequence = scores_TE, map_TE
        if self.config.batch_first and batch:
            B, S = S, B
            by_sequence = [rearrange(x, "(b s) e -> (s b) e", b=B, s=S) for x in by_sequence]
        return self._apply_seq_aux_loss(probs, *by_sequence, seq_length=S, bsz=B)

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map):
        """probs with the switch loss attached (arXiv 2101.03961).

        scores and routing_map [T, E] are those of the balance losses, zero where padding
        is. Counts and T are those of tp_cp.
        """
        group = self.pg_collection.tp_cp
        counts_E = all_sum(routing_map.sum(0), group)
        return self._attach_switch_loss("aux_loss", probs, scores_for_aux_loss, counts_E, group)

    def _apply_seq_aux_loss(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz):
        """probs with the switch loss of each sequence attached: the mean over the B = bsz
        sequences of S = seq_length tokens on this rank. Each has its own counts and its own
        valid tokens, over tp_cp. A sequence of padding gives 0.
        """
        E = self.config.num_experts
        group = self.pg_collection.tp_cp
        counts_BE = all_sum(routing_map.view(seq_length, bsz, E).sum(0), group)
        return self._attach_switch_loss(
            "seq_aux_loss", probs, scores_for_aux_loss, counts_BE, group)

    def _apply_packed_aux_loss(self, probs, scores, routing_map, cu_seqlens):
        """As _apply_seq_aux_loss, for the sequences of a pack: the mean over those that have
        tokens on any rank of tp_cp.
        """
        # Differences of running sums: no scatter, so the compiler makes no atomics of it. The
        # last column counts tokens. Row 0 of the differences is no sequence: it keeps the compiler
        # from taking n = 1 for a case of its own.
        group = self.pg_collection.tp_cp
        bounds = cu_seqlens.long()
        sums = F.pad(routing_map.long(), (0, 1, 1, 0), value=1).cumsum(0)       # [T + 1, E + 1]
        counts = sums[bounds].diff(dim=0, prepend=sums[:1])                     # [n + 1, E + 1]
        counts = all_sum(counts, group)
        sequences = (counts[:, -1] > 0).sum().clamp(min=1)
        counts_BE = counts[:, :-1]
        T = scores.shape[0]
        tokens = torch.arange(T, device=scores.device)
        sequence_T = torch.searchsorted(bounds, tokens, right=True)             # from 1 on
        # Each token stands for itself, with the counts of its sequence. The mean over T such
        # "sequences" times T / sequences is the one over the sequences.
        return self._attach_switch_loss(
            "seq_aux_loss", probs, scores, counts_BE[sequence_T], group,
            valid=counts_BE.sum().to(scores.dtype) / self.config.topk,
            share=T / sequences.to(scores.dtype))

    def _apply_global_aux_loss(self, probs, scores_for_aux_loss, routing_map):
        """probs with the global switch loss attached (arXiv 2501.11873). Counts and T are those
        of tp_dp_cp, averaged over the forwards since reset_global_aux_loss_tracker.
        """
        groups = self.pg_collection
        local_E = routing_map.sum(0)
        sums_E, steps = _running_sums(
            self.global_tokens_per_expert, self.ga_steps,
            all_sum(local_E, groups.tp_dp_cp).float())
        mean_E = sums_E.to(scores_for_aux_loss.dtype) / steps
        valid = all_sum(local_E.sum(), groups.tp_cp) / self.config.topk
        return self._attach_switch_loss(
            "global_aux_loss", probs, scores_for_aux_loss, mean_E, groups.tp_dp_cp, valid=valid)

    def _attach_switch_loss(self, kind, probs, scores, counts, group, valid=None, share=1.0):
        """probs with the switch loss of the counts, [E] or [B, E] of the group, times `share`.
        `valid` is the count of valid tokens, if the counts do not say it.
        """
        config = self.config
        coeff = self.get_aux_loss_coeff(kind)
        tokens = counts.sum(-1).to(scores.dtype) / config.topk
        loss = kernels.switch_load_balancing_loss_func(
            scores, counts, total_num_tokens=tokens, topk=config.topk,
            num_experts=config.num_experts, moe_aux_loss_coeff=coeff * share)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, aux_loss=loss, aux_loss_name=LOSS_NAMES[kind], reduce_group=group,
            reduce_group_has_dp=kind == "global_aux_loss",
            valid_token_count=tokens.sum() if valid is None else valid)

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str,
        reduce_group, reduce_group_has_dp: bool = False,
        valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        """activation, with aux_loss in its backward.

        The loss divided by its coefficient is kept for load_balancing_metrics. With
        reduce=True that sums it over reduce_group, and averages it over the data-parallel
        ranks unless reduce_group_has_dp. With calculate_per_token_loss the loss is attached
        times valid_token_count (default: the rows of the activation over tp_cp).
        ValueError: an unknown aux_loss_name.
        """
        kernels.check_known("aux_loss_name", aux_loss_name, METRICS)
        sharers = None if reduce_group_has_dp else group_size(reduce_group)
        self.counts.log(aux_loss_name, aux_loss.detach() / aux_loss_coeff, sharers)
        if self.config.calculate_per_token_loss:
            aux_loss = aux_loss * self._tokens_of(activation, valid_token_count)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss, _loss_scale(activation.device))

    def _tokens_of(self, activation, valid_token_count):
        if valid_token_count is None:
            return activation.shape[0] * group_size(self.pg_collection.tp_cp)
        return valid_token_count


# ---- Experts ----

def _as_autocast(*tensors):
    """The tensors in the dtype of autocast, where it is on for their device."""
    device_type = tensors[0].device.type
    if not kernels.has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return [x if x is None else x.to(dtype) for x in tensors]


class Experts(ParallelModule):
    """All experts of this rank, in one tensor per projection: see kernels.expert_mlp."""

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        ranks = group_size(self.pg_collection.ep)
        if config.num_experts % ranks:
            raise ValueError(f"num_experts is {config.num_experts}; "
                             f"needs a multiple of the ep size, {ranks}")
        local_experts = config.num_experts // ranks
        width = config.latent_size or config.hidden_size
        fc1_shape = local_experts, config.parts, config.ffn_hidden_size
        self.fc1 = self.parameter(*fc1_shape, width)         # [E / ep, P, F, H or ℓ]
        self.fc2 = self.parameter(local_experts, width, config.ffn_hidden_size)
        self.fc1_bias = None
        self.fc2_bias = None
        if config.add_bias_linear:
            self.fc1_bias = self.parameter(*fc1_shape)
            self.fc2_bias = self.parameter(local_experts, width)
        self.reset_parameters()

    def forward(self, tokens: Tensor, probs: Tensor, plan: kernels.Plan) -> Tensor:
        """tokens [T, H], probs [T, K] and their plan -> [T, H] in tokens.dtype. With latent
        experts the width is ℓ.

        Under autocast the products are in its dtype. Gradients arrive in the dtypes of the
        parameters.
        """
        dtype = tokens.dtype
        weights = self.fc1, self.fc2, self.fc1_bias, self.fc2_bias
        if kernels.is_any_autocast():
            tokens, *weights = _as_autocast(tokens, *weights)
        out = kernels.expert_mlp(
            tokens, probs, plan, *weights, kind=self.config.activation_function,
            fp8_input_store=self.config.activation_fp8_input_store)
        return out.to(dtype)

    def shard(self, name: str) -> tuple:
        return self.pg_collection.ep, 0

    def gradient_group(self, name: str):
        return self.pg_collection.expt_dp


# ---- Latent experts: into a space of ℓ dimensions, and back ----

class _Projection(ParallelModule):
    """rows -> norm(rows) · weightᵀ, where norm is an RMSNorm, or None."""

    def forward(self, rows: Tensor) -> Tensor:
        dtype = rows.dtype
        weight = self.weight
        if kernels.is_any_autocast():
            rows, weight = _as_autocast(rows, weight)
        eps = self.config.latent_norm_eps
        return kernels.project(rows, weight, norm=self.norm, eps=eps).to(dtype)


class LatentDown(_Projection):
    """x [T, H] -> x · weightᵀ [T, ℓ], with ℓ = latent_size: the space in which the routed
    experts are (arXiv 2601.18089).
    """

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.weight = self.parameter(config.latent_size, config.hidden_size)
        self.norm = None
        self.reset_parameters()


class LatentUp(_Projection):
    """rows [T, ℓ] -> norm(rows) · weightᵀ [T, H], the way back. Without latent_norm there is
    no norm.
    """
    std_fields = {"weight": "output_std"}

    def __init__(self, config: MoEConfig, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        self.weight = self.parameter(config.hidden_size, config.latent_size)
        self.norm = None
        if config.latent_norm:
            self.norm = self.parameter(config.latent_size)
        self.reset_parameters()


# ---- Shared expert: the order of its five steps ----

class SharedExpertState(enum.Enum):
    """Which of the five steps was the last."""
    IDLE = 0
    PRE_FORWARD_COMM_DONE = 1
    FC1_FORWARD_DONE = 2
    FC2_FORWARD_DONE = 3
    POST_FORWARD_COMM_DONE = 4


_State = SharedExpertState
# For each state: the tensors that the steps after it need.
_CACHED_IN = {
    _State.IDLE: (),
    _State.PRE_FORWARD_COMM_DONE: ("cached_fc1_input", "gate_score"),
    _State.FC1_FORWARD_DONE: ("cached_fc2_input", "gate_score"),
    _State.FC2_FORWARD_DONE: ("cached_fc2_output", "gate_score"),
    _State.POST_FORWARD_COMM_DONE: ("cached_output", "gate_score"),
}


def overlap_state_check(required_state: SharedExpertState, next_state: SharedExpertState):
    """Decorator of a step: it runs in `required_state` alone, and leads to `next_state`.

    RuntimeError, and nothing changes, if overlap is off, the state is another, or a tensor
    of the step before is missing. An exception inside the step drops all caches.
    """
    def decorate(step):
        @kernels.writes_to_module
        @functools.wraps(step)
        def checked(self, *args, **kwargs):
            _check_step(self, step.__name__, required_state)
            try:
                result = step(self, *args, **kwargs)
                self._overlap_state = next_state
                return result
            except BaseException:
                self.reset_overlap()
                raise

        return checked

    return decorate


def _check_step(shared, step, required_state):
    if not shared.config.shared_expert_overlap:
        raise RuntimeError(f"{step} needs shared_expert_overlap=True, found False: "
                           f"call the module itself")
    if shared._overlap_state is not required_state:
        raise RuntimeError(f"{step} needs the state {required_state.name}, found "
                           f"{shared._overlap_state.name}; reset_overlap() starts again")
    for name in _CACHED_IN[required_state]:
        without_gate = name == "gate_score" and shared.gate_weight is None
        if getattr(shared, name) is None and not without_gate:
            raise RuntimeError(f"{step} needs {name} from the step before, found None; "
                               f"reset_overlap() starts again")


# ---- Shared expert: to the side stream and back ----
# A tensor that comes back to the current stream, in the forward or in the backward, passes
# an op that waits and copies. In a graph of torch 2.13 a wait alone could move behind the op
# that reads the data, and the graph of a backward could not be split there.

_SIDE_STREAMS = {}                           # device -> torch.Stream


def _make_side_stream(device):
    """Called outside of compiled code, which can enter a stream but not make one."""
    if device.type in ("cpu", "meta") or device in _SIDE_STREAMS:
        return
    if hasattr(torch.get_device_module(device), "Stream"):           # MPS has none
        _SIDE_STREAMS[device] = torch.Stream(device)


def _current_stream(device):
    return torch.accelerator.current_stream(device)


def _empty_on_other_stream(tensor, others=()):
    if kernels.makes_cuda_graphs():
        raise RuntimeError(
            "shared_expert_overlap with CUDA graphs (mode=\"reduce-overhead\"): graphs of one "
            "memory pool must not run on two streams; compile without them, or without overlap")
    return torch.empty_like(tensor)


@kernels.op(_empty_on_other_stream)
def _fork_stream(tensor: Tensor) -> Tensor:
    """A copy for the side stream, which waits for the current one."""
    copy = tensor.clone()
    side = _SIDE_STREAMS[tensor.device]
    side.wait_stream(_current_stream(tensor.device))
    copy.record_stream(side)                 # its memory lives until that stream has read it
    return copy


@kernels.op(_empty_on_other_stream)
def _join_stream(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The current stream waits for the side stream. Then it copies `tensor`. After the
    wait, `others` are ready too.
    """
    current = _current_stream(tensor.device)
    current.wait_stream(_SIDE_STREAMS[tensor.device])
    for made_there in (tensor, *others):
        made_there.record_stream(current)
    return tensor.clone()


class _ToSideStream(torch.autograd.Function):
    """(input, *weights) -> (input and weights for the side stream, input for the current stream).

    With `wait` the input for the side stream is a copy, for which that stream waits. In the
    backward the current stream waits for the gradients of the side stream. The join takes the
    gradient of the current stream's path as an argument, if the input needs one: in a graph it
    then stands behind that path, and the two overlap.
    """

    # Without grad, Dynamo up to torch 2.14 calls a forward without its ctx if that fits the
    # number of its named arguments. So the tensors have no names.
    @staticmethod
    def forward(ctx, stream, wait, *tensors):
        ctx.stream = stream
        ctx.set_materialize_grads(False)
        input = tensors[0]
        tensors = *tensors, input
        outputs = [tensor.view_as(tensor) for tensor in tensors]
        if wait:
            outputs[0] = _fork_stream(input)
        else:
            input.record_stream(stream)
        frozen = [y for x, y in zip(tensors, outputs) if not x.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(outputs)

    @staticmethod
    @kernels.once_differentiable
    def backward(ctx, *grads):
        # In a graph what needs no gradient gets zeros.
        _, _, *need = ctx.needs_input_grad
        grads = [grad if needed else None for grad, needed in zip(grads, (*need, need[0]))]
        first, *others = filter(torch.is_tensor, grads)
        # In a graph this view is the last op on the side stream that reads the gradient.
        with ctx.stream:
            joined = first.view_as(first)
        joined = _join_stream(joined, others)
        grad_input, *grad_weights, grad_main = [
            joined if grad is first else grad for grad in grads]
        if grad_input is None:
            grad_input = grad_main
        elif grad_main is not None:
            grad_input = grad_input + grad_main
        # stream, wait, input, *weights
        return None, None, grad_input, *grad_weights


class _BackwardStreamWait(torch.autograd.Function):
    """input -> input. In the backward the side stream waits for the current one.

    What runs there next starts after what is launched already for the routed path.
    """

    @staticmethod
    def forward(ctx, input):
        return input.view_as(input)

    @staticmethod
    @kernels.once_differentiable
    def backward(ctx, grad):
        _SIDE_STREAMS[grad.device].wait_stream(_current_stream(grad.device))
        return grad


class _FromSideStream(torch.autograd.Function):
    """A copy of output. The current stream waits for the side stream first. In the backward
    the side stream waits for the current one.

    A non-reentrant checkpoint recomputes at the first node of the backward that unpacks a
    tensor, on the stream of that node. This node is the first, and it is on the current
    stream. On the side stream nobody would wait for the recomputation.
    """

    @staticmethod
    def forward(ctx, output):
        ctx.save_for_backward(output.new_empty(0))
        return _join_stream(output, [])

    @staticmethod
    @kernels.once_differentiable
    def backward(ctx, grad):
        ctx.saved_tensors
        return _fork_stream(grad)


def set_tensor_grad_fn_sequence_sr(tensor: Tensor | None, value: int) -> None:
    """Sets the priority of the tensor's node: of the nodes that are ready, the backward
    takes the one with the highest number first. Without a tensor or a grad_fn this does
    nothing.
    """
    node = getattr(tensor, "grad_fn", None)
    if node is not None:
        kernels.set_backward_order(node, value)


# ---- Shared expert: for every token, in one call or in five steps beside the routed path ----

class SharedExpertMLP(ParallelModule):
    """An MLP for every token, of width Fs = shared_expert_intermediate_size.

    It has the activation of the config and no biases. With `gate` its output is multiplied
    by sigmoid(x · gate_weightᵀ). hidden_states [.., H] -> the same shape. Over tp, with
    sequence_parallel, the first axis is each rank's part of the sequence; without it every
    rank holds all of it.

    `forward` computes all in one call. With shared_expert_overlap five steps do the same on
    the side stream `stream`: pre_forward_comm, linear_fc1_forward_and_act,
    linear_fc2_forward, post_forward_comm, get_output. OverlappedDispatch runs the middle
    ones beside a dispatcher's communication. A step out of order is a RuntimeError.
    """

    def __init__(self, config: MoEConfig, gate: bool, pg_collection: ProcessGroups | None = None):
        super().__init__(config, pg_collection)
        size = config.shared_expert_intermediate_size
        ranks = group_size(self.pg_collection.tp)
        if size is None or size % ranks:
            raise ValueError(f"shared_expert_intermediate_size is {size}; "
                             f"needs a multiple of the tp size, {ranks}")
        P, H = config.parts, config.hidden_size
        self.fc1 = self.parameter(P, size // ranks, H)
        self.fc2 = self.parameter(H, size // ranks)
        self.gate_weight = self.parameter(1, H) if gate else None
        self.reset_overlap()
        self.reset_parameters()
        _make_side_stream(self.fc1.device)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_score = self._score(hidden_states, self.gate_weight)
        act = self._fc1_and_act(self._enter(hidden_states), self.fc1)
        output = self._leave(self._fc2(act, self.fc2))
        return output if gate_score is None else output * gate_score

    # The parts take their weights as arguments: in steps they get those that _ToSideStream
    # has returned, so that the gradients of the weights wait for the side stream.

    def _score(self, x, gate_weight=None):
        H = self.config.hidden_size
        if x.shape[-1] != H:
            raise ValueError(f"hidden_states has shape {list(x.shape)}; needs [.., {H}]")
        if x.dtype != self.fc1.dtype and not kernels.is_any_autocast():
            raise TypeError(f"hidden_states is {x.dtype}, and the shared expert {self.fc1.dtype}; "
                            f"they need one dtype")
        return None if gate_weight is None else F.linear(x, gate_weight).sigmoid()

    def _enter(self, x):
        return enter_tp(x, self.pg_collection.tp, self.config.sequence_parallel)

    def _fc1_and_act(self, x, fc1):
        hidden = F.linear(x, fc1.flatten(0, 1))
        return kernels.activation(
            hidden, self.config.activation_function,
            fp8_input_store=self.config.activation_fp8_input_store)

    def _fc2(self, x, fc2):
        return F.linear(x, fc2)

    def _leave(self, y):
        return leave_tp(y, self.pg_collection.tp, self.config.sequence_parallel)

    # -- the same in five steps --

    @property
    def stream(self) -> torch.Stream | None:
        """The side stream of the parameters' device. None without overlap or an accelerator."""
        if not self.config.shared_expert_overlap:
            return None
        return _SIDE_STREAMS.get(self.fc1.device)

    def _beside(self):
        return contextlib.nullcontext() if self.stream is None else self.stream

    @overlap_state_check(_State.IDLE, _State.PRE_FORWARD_COMM_DONE)
    def pre_forward_comm(self, input: Tensor, wait_current_stream: bool = True) -> Tensor:
        """Computes the score of the gate, and gathers the tokens of all tp ranks.

        Returns the input for the path beside this one. If that path goes on from it, the
        graph of a backward waits for the side stream behind that path, not before it. Without
        wait_current_stream the side stream must have waited for the input already.
        """
        if isinstance(self.fc1, DTensor):
            raise RuntimeError("pre_forward_comm needs whole weights, found a DTensor: fully_shard "
                               "gathers them for a call, not for steps; shard the layer, not its "
                               "shared expert alone")
        main_input = input
        tensors = [x for x in (input, self.fc1, self.fc2, self.gate_weight) if x is not None]
        if self.stream is not None:
            *tensors, main_input = _ToSideStream.apply(
                self.stream, wait_current_stream, *tensors)
            if torch.compiler.is_compiling() and not tensors[0].requires_grad:
                # A copy that is made of both: else a graph may put the fork behind the main path.
                main_input = kernels.value_in_backward(main_input, tensors[0])
        input, *self._weights = tensors
        with self._beside():
            self.gate_score = self._score(input, *self._weights[2:])
            self.cached_fc1_input = self._enter(input)
        return main_input

    @overlap_state_check(_State.PRE_FORWARD_COMM_DONE, _State.FC1_FORWARD_DONE)
    def linear_fc1_forward_and_act(self, overlapped_comm_output: Tensor | None = None) -> None:
        """Computes fc1 and the activation.

        overlapped_comm_output is the result of the communication that runs beside this
        step, for a dispatcher of your own. Its backward is launched first. The backward of
        this step waits for the current stream.
        """
        with self._beside():
            act = self._fc1_and_act(self.cached_fc1_input, self._weights[0])
        # The order in a graph is fixed when it is made.
        if self.stream is not None and not torch.compiler.is_compiling():
            act = _BackwardStreamWait.apply(act)
        node = getattr(overlapped_comm_output, "grad_fn", None)
        if node is not None:
            set_tensor_grad_fn_sequence_sr(act, kernels.backward_order(node) - 1)
        self.cached_fc1_input = None
        self.cached_fc2_input = act

    @overlap_state_check(_State.FC1_FORWARD_DONE, _State.FC2_FORWARD_DONE)
    def linear_fc2_forward(self, overlapped_comm_output: Tensor | None = None) -> None:
        """Computes fc2. The backward of overlapped_comm_output goes before all else that
        is ready.
        """
        if overlapped_comm_output is not None:
            set_tensor_grad_fn_sequence_sr(overlapped_comm_output, torch.iinfo(torch.int).max)
        with self._beside():
            self.cached_fc2_output = self._fc2(self.cached_fc2_input, self._weights[1])
        self.cached_fc2_input = None

    @overlap_state_check(_State.FC2_FORWARD_DONE, _State.POST_FORWARD_COMM_DONE)
    def post_forward_comm(self) -> None:
        """Sums over the tp ranks."""
        with self._beside():
            self.cached_output = self._leave(self.cached_fc2_output)
        self.cached_fc2_output = None

    @overlap_state_check(_State.POST_FORWARD_COMM_DONE, _State.IDLE)
    def get_output(self) -> Tensor:
        """Applies the gate and returns the output, for which the current stream waits."""
        with self._beside():
            output = self.cached_output
            if self.gate_score is not None:
                output = output * self.gate_score
        if self.stream is not None:
            output = _FromSideStream.apply(output)
        self.reset_overlap()
        return output

    def wait_current_stream(self) -> None:
        """The side stream waits for what is on the current one so far."""
        if self.stream is not None:
            self.stream.wait_stream(_current_stream(self.fc1.device))

    @kernels.writes_to_module
    def reset_overlap(self) -> None:
        """Goes back to IDLE and drops the caches. Call it after an exception outside of
        the steps.
        """
        self._overlap_state = SharedExpertState.IDLE
        self.gate_score = None
        self.cached_fc1_input = None
        self.cached_fc2_input = None
        self.cached_fc2_output = None
        self.cached_output = None
        self._weights = None                 # fc1, fc2, gate_weight, for the side stream

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        _make_side_stream(self.fc1.device)
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        _make_side_stream(self.fc1.device)

    # -- over ranks --

    def shard(self, name):
        axis = None if name == "gate_weight" else 1
        return self.pg_collection.tp, axis

    def gradient_group(self, name):
        # Without sequence parallelism every tp rank sees all tokens, so each has the whole
        # gradient of the gate.
        groups = self.pg_collection
        partial = group_size(groups.tp) == 1 or self.config.sequence_parallel
        return groups.tp_dp_cp if name == "gate_weight" and partial else groups.dp_cp


class OverlappedDispatch(NamedTuple):
    """A Dispatch, with the shared expert's steps beside its communication."""
    dispatched: Dispatch
    shared: SharedExpertMLP

    def wait_for_rows(self):
        self.shared.linear_fc1_forward_and_act()
        return self.dispatched.wait_for_rows()

    def send_back(self, output):
        return self.dispatched.send_back(output)

    def wait_and_combine(self, handle):
        self.shared.linear_fc2_forward()
        self.shared.post_forward_comm()
        return self.dispatched.wait_and_combine(handle)


# ---- Kept: the loss scale, and a loss in the backward ----

_CPU = torch.device("cpu")
with torch.inference_mode(False):            # this file may be imported inside an inference_mode
    _LOSS_SCALE = {_CPU: torch.ones((), dtype=torch.float32, device=_CPU)}


def _loss_scale(device):
    if device not in _LOSS_SCALE:
        _add_loss_scale(device)
    return _LOSS_SCALE[device]


def _add_loss_scale(device):
    with torch.inference_mode(False):
        _LOSS_SCALE[device] = _LOSS_SCALE[_CPU].to(device)


def set_aux_loss_scale(scale: float | Tensor) -> None:
    """Sets the factor on the gradients of all balance losses and z-losses.

    Give the factor by which you multiply the main loss before its backward: a loss
    scaler's, or 1 / microbatches. It is a float or a 0-d tensor. It is one value for the
    whole process. It holds for every backward from now on, also of forwards that have run
    already, and in compiled code without a recompile.
    """
    if isinstance(scale, Tensor) and scale.ndim:
        raise ValueError(f"scale has shape {list(scale.shape)}; needs a float or a 0-d tensor")
    with torch.no_grad():
        for tensor in _LOSS_SCALE.values():
            tensor.fill_(scale)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """activation -> activation. In the backward `loss` gets the gradient `scale`, a 0-d
    tensor, as if scale · loss had been added to the main loss.

    Megatron's set_loss_scale is set_aux_loss_scale here.
    """

    @staticmethod
    def forward(ctx, activation, loss, scale):
        # Not through save_for_backward: the scale may change before the backward.
        ctx.scale = scale
        ctx.dtype = loss.dtype
        return kernels.as_no_view(activation, activation.shape)

    @staticmethod
    @kernels.once_differentiable
    def backward(ctx, grad):
        # activation, loss, scale
        return grad, kernels.value_in_backward(ctx.scale, grad).to(ctx.dtype), None


# ---- Kept: counts that grow once per training forward ----
# These are ops because the check for a recomputation has to happen at run time. Traced
# into a graph, its answer would be fixed when the graph is made.

@kernels.op(lambda buffer, value, add: None, mutates_args=("buffer",), cudagraph_unsafe=True)
def _update_once(buffer: Tensor, value: Tensor, add: bool) -> None:
    """buffer += value, or buffer = value. Nothing if a checkpoint is recomputing."""
    if not kernels.is_recomputing():
        buffer.copy_(buffer + value if add else value)


@kernels.op(
    lambda sums, steps, counts: (torch.empty_like(sums), torch.empty_like(steps)),
    mutates_args=("sums", "steps"), cudagraph_unsafe=True)
def _running_sums(sums: Tensor, steps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Adds counts [E] to sums [E] and 1 to steps [], and returns copies of both.

    Nothing is added if a checkpoint is recomputing.
    """
    if not kernels.is_recomputing():
        sums.add_(counts)
        steps.add_(1)
    return sums.clone(), steps.clamp(min=1)


class RouterCounts:
    """What a router counts, beside its state dict. It follows the router from device to device.

    These are plain tensors, not buffers: DistributedDataParallel would overwrite buffers with
    those of rank 0. They are in fp32, the histogram in int32. They are updated in place, and
    once per training forward. None stands for what the config does not ask for.

    local_tokens_per_expert [E]      since the last update_expert_bias
    bias_histogram [E, 1000]         of needed biases, since that too
    global_tokens_per_expert [E]     the running sum of the global loss
    ga_steps []                      forwards in that sum
    last_tokens_per_expert [E]       of the latest training forward, for load_balancing_metrics
    last_logged [LOGGED]             losses, and assignments over capacity, of it too
    """

    def __init__(self, config, tp_cp_size):
        E = config.num_experts

        def counter(*shape, dtype=torch.float32):
            return kernels.with_fixed_address(torch.empty(shape, dtype=dtype))

        quantile = config.bias_update == "quantile"
        with_global = "global_aux_loss" in config.losses
        self.local_tokens_per_expert = counter(E) if config.enable_expert_bias else None
        self.bias_histogram = counter(E, 1000, dtype=torch.int32) if quantile else None
        self.global_tokens_per_expert = counter(E) if with_global else None
        self.ga_steps = counter() if with_global else None
        self.last_tokens_per_expert = counter(E)
        self.last_logged = counter(len(LOGGED))
        # Name -> the number of ranks that hold parts of it. None: all, the data-parallel ones too.
        self.sharers = {**dict.fromkeys(METRICS, tp_cp_size), "global_load_balancing_loss": None,
                        "dropped": None}
        self.reset()

    def tensors(self):
        """Name -> tensor."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def count(self, counts_E):
        _update_once(self.last_tokens_per_expert, counts_E, add=False)
        if self.local_tokens_per_expert is not None:
            _update_once(self.local_tokens_per_expert, counts_E, add=True)

    def log(self, name, value, sharers):
        _update_once(self.last_logged[LOGGED.index(name)], value.float(), add=False)
        # Written only if it changes: in a checkpointed region Dynamo refuses such a write.
        if self.sharers[name] != sharers:
            self.sharers[name] = sharers

    def zero(self, *names):
        for name, tensor in self.tensors().items():
            if name in names:
                tensor.zero_()

    def reset(self):
        self.zero(*self.tensors())
        self.last_logged.fill_(math.nan)

    def move(self, fn):
        """As nn.Module._apply does, but each keeps its dtype: in bf16 a large count no longer
        grows by 1.
        """
        for name, tensor in self.tensors().items():
            moved = fn(tensor)
            if moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            setattr(self, name, kernels.with_fixed_address(moved))

    def follow(self, device):
        """To the router's device: fully_shard, and load_state_dict(assign=True) from the meta
        device, move parameters and buffers without `_apply`.
        """
        if self.last_logged.is_meta:
            self.move(lambda tensor: torch.empty_like(tensor, device=device))
            self.reset()
        else:
            self.move(lambda tensor: tensor.to(device))


# ---- Routers of a whole model ----

def _routers(model):
    return list(_named_routers(model).values())


def _named_routers(model):
    routers = {
        name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not routers:
        raise ValueError(f"model ({type(model).__name__}) has no Router")
    return routers


def finish_step(model: nn.Module) -> None:
    """Ends a training step. Call it after the optimizer's step.

    It updates the expert biases (update_expert_bias) and starts the averages of the global
    loss anew (reset_global_aux_loss_tracker). With accumulation a step is all microbatches.
    Under torch.distributed.pipelining give the stage its shapes, PipelineStage(..,
    input_args=.., output_args=..): else it may find them by a training forward on empty
    tensors, whose tokens are counted. This is collective.
    """
    update_expert_bias(model)
    for router in _routers(model):
        router.reset_global_aux_loss_tracker()


def _check_one_process(otherwise):
    """For a router that has no group of all ranks."""
    ranks = group_size(dist.group.WORLD)
    if ranks > 1:
        raise ValueError(
            f"tp_dp_cp is None and {ranks} ranks run: {otherwise}. For one model on all ranks give "
            f"the layer their group, MoELayer(config, ProcessGroups.from_mesh(mesh[\"dp\"])); for "
            f"independent models ProcessGroups(tp_dp_cp=group) with a group of one rank")


def update_expert_bias(model: nn.Module) -> None:
    """Updates the expert bias of every router. finish_step calls it.

    It uses the tokens of all ranks since the last update. With bias_update="sign" the bias
    moves by bias_update_rate towards an even load (arXiv 2408.15664). With "quantile" it
    becomes that of kernels.quantile_expert_bias. This is collective. ValueError: several
    ranks run, and the router does not know over which to pool the counts.
    """
    routers = [router for router in _routers(model) if router.expert_bias is not None]
    for router in routers:
        if router.pg_collection.tp_dp_cp is None:
            _check_one_process("each would balance its own tokens, and their expert biases would "
                               "drift apart")
    for router in routers:
        router._maintain_float32_expert_bias()
        config = router.config
        group = router.pg_collection.tp_dp_cp
        if config.bias_update == "quantile":
            histogram = all_sum(router.bias_histogram, group)
            bias = kernels.quantile_expert_bias(histogram, router.expert_bias, config.topk)
        else:
            bias = kernels.get_updated_expert_bias(
                router.local_tokens_per_expert.long(), router.expert_bias,
                expert_bias_update_rate=config.bias_update_rate, tp_dp_cp_group=group)
        router.expert_bias.copy_(bias)
        router.counts.zero("local_tokens_per_expert", "bias_histogram")


class RoutingRecord:
    """What the routers chose: see record_routing. names: those of the routers in the model."""

    def __init__(self, routers):
        self.names = list(routers)
        self._routers = list(routers.values())
        self._kept = None

    @property
    def indices(self) -> list[Tensor | None]:
        """Each router's latest choice [T, K] int64 before dropping, in module order. Index
        E is unrouted. None for a router that has not run.
        """
        return [indices for indices, _ in self._latest()]

    @property
    def probs(self) -> list[Tensor | None]:
        """The probs [T, K] of these indices, detached: what the experts multiply by. They are 0
        where an assignment was dropped.
        """
        return [probs for _, probs in self._latest()]

    def _latest(self):
        return self._kept or [router._recorded for router in self._routers]


@contextlib.contextmanager
def record_routing(model: nn.Module):
    """A context that gives a RoutingRecord of what the model's routers choose inside it.

    It works in training and in eval, and in compiled code. A forward takes the place of the one
    before it. To keep those of all forwards, as of a `generate`:
    `kept = []; model.register_forward_hook(lambda *_: kept.append(record.indices))`.
    ValueError: no router, or nested on one model.

    >>> layer = MoELayer(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, topk=2))
    >>> x = torch.randn(6, 1, 8)
    >>> with record_routing(layer) as record:
    ...     y = layer(x)
    >>> with replay_routing(layer, record.indices):
    ...     torch.equal(layer(x), y)
    True
    """
    routers = _named_routers(model)
    if any(router._recording for router in routers.values()):
        raise ValueError("model is being recorded already; leave record_routing first")
    record = RoutingRecord(routers)
    try:
        for router in routers.values():
            router._recording = True
        yield record
    finally:
        record._kept = record._latest()
        for router in routers.values():
            router._recording = False
            router._recorded = None, None


@contextlib.contextmanager
def replay_routing(model: nn.Module, indices: Sequence[Tensor] | Tensor):
    """A context in which every router of the model takes `indices` as its choice.

    indices: one tensor [T, K] per router, in module order, as record_routing gives them, or
    a tensor [layers, T, K], of any integer dtype. E is unrouted. A token whose row holds a -1,
    which needs a signed dtype, is routed by the router itself: inference engines write -1 for
    what they do not know. The probs are computed anew. An activation checkpoint runs the routers
    again in the backward: run the backward inside the context too. Outside of it a non-reentrant
    checkpoint raises an error, but a reentrant one routes anew, and its gradients are wrong
    without an error. A topk_indices argument is not used meanwhile.
    ValueError: no router, another number of layers, or nested on one model; in the forward,
    naming the router, a wrong shape or dtype, or None.
    """
    routers = _named_routers(model)
    if len(indices) != len(routers):
        raise ValueError(f"indices is for {len(indices)} layers; "
                         f"the model has {len(routers)} routers: {', '.join(routers)}")
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
    """Metrics of each router's latest training forward. Layers are in module order.

    "tokens_per_expert" [layers, max E] int64: before dropping, without padding; -1 where a
    layer has no such expert.
    "max_violation" [layers]: max_e n_e / mean n - 1 (arXiv 2408.15664), NaN where nothing
    was counted. "dropped" [layers], if any layer has a capacity: the assignments over it, NaN
    for a layer without one. And each loss that is on in any layer, [layers], divided by its
    coefficient, NaN for a layer without it. The metrics are for logging only: the losses
    are in the gradient already, do not add them.

    Without reduce the counts are those of this rank, and a loss over several ranks is this
    rank's share of it. reduce: over all ranks. Counts are summed; losses are summed over the
    ranks that share them and averaged over the others. This is collective. ValueError: several
    ranks run, and a router knows no group of them.
    """
    counts, logged, violations = [], [], []
    on = set()
    for router in _routers(model):
        counts_E = router.counts.last_tokens_per_expert.long()
        last_logged = router.counts.last_logged
        if reduce:
            group = router.pg_collection.tp_dp_cp or router.pg_collection.tp_cp
            if group is None:
                _check_one_process("each would return its own values")
            ranks = group_size(group)
            shares = [ranks / (router.counts.sharers[name] or ranks) for name in LOGGED]
            counts_E = all_sum(counts_E, group)
            last_logged = all_sum(last_logged, group) / last_logged.new_tensor(shares)
        counts.append(counts_E)
        logged.append(last_logged)
        # 0 / 0 before any forward.
        violations.append((counts_E.amax() * len(counts_E)).float() / counts_E.sum() - 1)
        on |= {LOSS_NAMES[kind] for kind in router.config.losses}
        if router.config.z_loss_coeff:
            on.add("z_loss")
        if router.config.capacity_factor is not None:
            on.add("dropped")
    return {
        **{name: values for name, values in zip(LOGGED, torch.stack(logged, 1)) if name in on},
        "max_violation": torch.stack(violations),
        "tokens_per_expert": nn.utils.rnn.pad_sequence(
            counts, batch_first=True, padding_value=-1),
    }


# ---- Checks of a router's arguments ----

def _refuse_input(input, config):
    axes = "B, S" if config.batch_first else "S, B"
    raise ValueError(f"input has shape {list(input.shape)}; "
                     f"needs [{axes}, {config.hidden_size}] or [T, {config.hidden_size}]")


def _check_order(config, axes):
    H = config.hidden_size
    if len(axes) == 2:
        raise ValueError(f"batch_first is None, and seq_aux_loss has to know which of the axes "
                         f"{axes} is the sequence; needs batch_first=True for [B, S, {H}] or "
                         f"batch_first=False for [S, B, {H}]")


def _refuse_training(config):
    raise ValueError(
        f"topk = 1, norm_topk_prob = {config.norm_topk_prob}, pre_softmax = {config.pre_softmax}: "
        f"the one prob is always 1, so training gives the router no gradient; set pre_softmax=True "
        f"or norm_topk_prob=False, call eval(), or freeze the router")


def _check_mask(padding_mask, axes):
    """padding_mask as [T]."""
    if list(padding_mask.shape) != axes or padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask is {list(padding_mask.shape)} {padding_mask.dtype}; "
                         f"needs {axes} torch.bool, True = padding")
    return padding_mask.flatten()


def _check_bounds(cu_seqlens, axes):
    integer = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or not cu_seqlens.numel() or not integer:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)} {cu_seqlens.dtype}; "
                         f"needs [n + 1] torch.int32 or torch.int64, the bounds of n sequences")
    if len(axes) == 2 and 1 not in axes:
        raise ValueError(f"cu_seqlens is for packed sequences, and input has {list(axes)} tokens; "
                         f"needs [T], or one axis of length 1")
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling():          # else it would sync
        bounds = cu_seqlens.tolist()
        T = math.prod(axes)
        if bounds[0] != 0 or bounds[-1] != T or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens is {bounds}; needs 0 first, ascending, {T} last")


# ---- What a config refuses ----

_CHOICES = {
    "activation": kernels.ACTIVATIONS,
    "score_function": kernels.SCORE_FUNCTIONS,
    "apply_probs_on": ("activation", "input"),
    "bias_update": ("sign", "quantile"),
    "token_drop_policy": ("probs", "position"),
}
# field -> those that have no effect without it
_NEEDED_BY = {
    "num_groups": "group_topk group_score_topk",
    "group_topk": "num_groups",
    "enable_expert_bias": "bias_update",
    "latent_size": "latent_norm",
    "capacity_factor": "pad_to_capacity token_drop_policy",
    "shared_expert_intermediate_size": "shared_expert_gate shared_expert_overlap",
}


def check_config(config: MoEConfig) -> None:
    """ValueError for the first thing that is refused.

    The functions below give what is refused, in order: (the fields, why). Each relies on the
    checks before it.
    """
    for refused in (_refused_values, _refused_balancing, _refused_routing, _refused_experts):
        for names, why in refused(config):
            got = ", ".join(f"{name} = {getattr(config, name)!r}" for name in names.split())
            raise ValueError(f"{got}: {why}")


def _changed(config, name):
    return getattr(config, name) != getattr(MoEConfig, name)


def _is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _refused_values(c):
    """Each field by itself, then those that have no effect."""
    rules = (
        ("hidden_size ffn_hidden_size num_experts topk latent_size shared_expert_intermediate_size",
         lambda x: isinstance(x, int) and x > 0, "a positive int"),
        ("router_dtype params_dtype",
         lambda x: isinstance(x, torch.dtype) and x.is_floating_point, "a floating torch.dtype"),
        ("situ_beta latent_norm_eps activation_clamp_value situ_linear_beta",
         lambda x: _is_number(x) and x > 0, "a positive number"),
        ("capacity_factor",
         lambda x: _is_number(x) and 0 < x < 2 ** 31, "a positive number below 2 ** 31"),
        ("z_loss_coeff input_jitter_eps output_init_std",
         lambda x: _is_number(x) and x >= 0, "0 or more"),
        ("glu_alpha glu_linear_offset norm_eps scaling_factor bias_update_rate init_std",
         _is_number, "a finite number"),
        ("batch_first", lambda x: isinstance(x, bool), "True or False"),
        ("force_load_balancing", lambda x: isinstance(x, bool) or x == "round_robin",
         'True, False or "round_robin"'),
    )
    for names, fits, need in rules:
        for name in names.split():
            value = getattr(c, name)
            optional = getattr(MoEConfig, name, 0) is None         # its default
            if not (optional and value is None) and not fits(value):
                yield name, f"needs {need}, or None" if optional else f"needs {need}"
    for name, known in _CHOICES.items():
        made = name == "activation" and isinstance(c.activation, kernels.Activation)
        if not made and getattr(c, name) not in known:
            yield name, f"needs one of {', '.join(known)}"
    for needed, names in _NEEDED_BY.items():
        for name in names.split():
            if getattr(c, needed) in (None, False) and _changed(c, name):
                yield f"{name} {needed}", f"{name} is nothing without {needed}; set it too"


def _refused_balancing(c):
    both = "load_balancing_type aux_loss_coeff"
    sizes = [len(x) if isinstance(x, tuple) else None
             for x in (c.load_balancing_type, c.aux_loss_coeff)]
    if sizes[0] != sizes[1]:
        yield both, "one type takes a float, several a tuple of the same length"
    kinds = set(c.balancing)
    if not kinds <= set(LOAD_BALANCING_TYPES):
        yield "load_balancing_type", f"needs {', '.join(LOAD_BALANCING_TYPES)}, or a tuple of them"
    repeated = sizes[0] not in (None, len(kinds))
    if repeated or len(kinds) > 1 and not kinds <= set(LOSS_NAMES):
        yield "load_balancing_type", 'each type at most once; "none" and "sinkhorn" go alone'
    for kind, coeff in c.balancing.items():
        if not _is_number(coeff):
            yield both, f"{kind} needs a finite number"
        if kind in LOSS_NAMES and not coeff > 0:
            yield both, f"{kind} needs a positive coefficient; give one, or leave the type out"
        if kind not in LOSS_NAMES and coeff:
            yield both, f"{kind!r} is no loss; name a loss, or leave the coefficient out"
    if "sinkhorn" in kinds:
        others = ("num_groups scaling_factor enable_expert_bias norm_topk_prob pre_softmax "
                  "score_function")
        for name in others.split():
            if getattr(c, name) not in (None, False, "softmax"):
                yield (f"load_balancing_type {name}",
                       f"sinkhorn has its own choice and probs; leave {name} out")


def _refused_routing(c):
    if c.topk > c.num_experts:
        yield "topk num_experts", "a token cannot have more experts than there are; lower topk"
    if c.pre_softmax and c.score_function != "softmax":
        yield ("pre_softmax score_function",
               "only softmax has a before and an after; leave pre_softmax out")
    if c.num_groups is not None:
        kernels.check_groups(
            c.topk, c.num_experts, num_groups=c.num_groups, group_topk=c.group_topk,
            group_score_topk=c.group_score_topk)
    if c.bias_update == "quantile":
        if _changed(c, "bias_update_rate"):
            yield "bias_update bias_update_rate", "quantile has no rate; leave the rate out"
        in_one = c.score_function in ("softmax", "sigmoid")
        if not in_one or c.topk == c.num_experts or c.num_groups is not None:
            yield ("bias_update topk num_experts num_groups score_function",
                   "quantile needs topk < num_experts, no groups, and scores in [0, 1], of softmax "
                   "or sigmoid")


def _refused_experts(c):
    made = isinstance(c.activation, kernels.Activation)
    for name, constant in _CONSTANTS.items():
        if _changed(c, name) and (made or not hasattr(c.activation_function, constant)):
            yield f"activation {name}", f"{c.activation} has no such constant; leave {name} out"
    if c.apply_probs_on == "input" and c.topk > 1:
        yield ("apply_probs_on topk",
               '"input" is for topk = 1: it makes another input for every expert of a token; leave '
               "apply_probs_on out")
