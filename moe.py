"""A Mixture-of-Experts layer: config, layer, experts, latent pair. It shows how the parts fit
together. What they compute is in the other files of the layer, first of all in kernels.py:

    router.py           logits, choice, drops, balance losses, counts; all routers of a model
    shared_experts.py   an MLP for every token, in one call or beside the routed path
    kernels.py          the tensor functions: first the definition, and the letters
    grouped.py          the grouped product, on every kind of device; where torch's own would make
                        the host wait, it calls grouped_triton.py, if that is there
    base.py             what all modules have: config, weights, and the ranks, here only one
    compat.py           what torch makes necessary

Nothing in these files needs several ranks. If you have several, add both files of ranks/:
parallel.py has what crosses ranks in a forward, and sharding.py has what each rank holds.

    hidden_states [S, B, H] ─┬─> TopKRouter ─> probs, indices [T, K] ─> plan ─┐
                             ├────────────────────────────────────────────────┴─> Experts ─┐
                             └─> SharedExpertMLP ──────────────────────────────────────────┴─> sum

Where is it?
    tokens over capacity        TopKRouter._is_over_capacity; kernels.place_in_expert
    balance losses              TopKRouter._apply_losses; MoEAuxLossAutoScaler
    counts, when recomputed     RouterCounts; _WriteInBackward
    host syncs                  grouped.row_blocks; ranks.parallel.ExpertParallel
    the router alone            TopKRouter; copy all seven files, since MoEConfig is in moe.py
    kept for the backward       kernels.again; kernels._mlp_of_rows
    index E                     "Unrouted" at the top of kernels.py
    the all-to-all, its waits   ranks.parallel.ExpertParallel; ranks.parallel.AllToAll
    a dispatcher of your own    MoELayer.dispatch; base.Dispatch
    what tp changes             SharedExpertMLP._enter and _leave; ranks.parallel.ProcessGroups
    a layer's ranks             base.OneProcess
    a score function            kernels.SCORE_FUNCTIONS
    bitwise repeatability       "Permute, index form" in kernels.py
    what a config refuses       check_config
"""
import functools
import math
from dataclasses import dataclass, fields
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from . import compat, kernels
    from .base import Dispatch, MoEModule, OneProcess, Sharding, owner_of
    from .router import (
        LOAD_BALANCING_TYPES, LOSS_NAMES, Router, TopKRouter, finish_step, load_balancing_metrics,
        record_routing, refuse_input, replay_routing, set_aux_loss_scale, update_expert_bias)
    from .shared_experts import (
        OverlappedDispatch, SharedExpertMLP, SharedExpertState, ends_overlap)
else:
    import compat
    import kernels
    from base import Dispatch, MoEModule, OneProcess, Sharding, owner_of
    from router import (
        LOAD_BALANCING_TYPES, LOSS_NAMES, Router, TopKRouter, finish_step, load_balancing_metrics,
        record_routing, refuse_input, replay_routing, set_aux_loss_scale, update_expert_bias)
    from shared_experts import (
        OverlappedDispatch, SharedExpertMLP, SharedExpertState, ends_overlap)


__all__ = [
    "MoEConfig", "MoELayer", "Experts", "Router", "TopKRouter", "SharedExpertMLP",
    "SharedExpertState", "finish_step", "update_expert_bias", "load_balancing_metrics",
    "set_aux_loss_scale", "record_routing", "replay_routing"]


# ---- Config ----

# field of MoEConfig -> constant of an activation
_CONSTANTS = {
    "glu_alpha": "alpha",
    "glu_linear_offset": "linear_offset",
    "activation_clamp_value": "clamp_value",
    "situ_beta": "beta",
    "situ_linear_beta": "linear_beta",
}


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. A config that cannot work is refused when it is made: the ValueError
    names the fields and the way out. (topk = 1 with normalised probs can be evaluated, so only a
    forward in training refuses it.)

    Most names are Megatron's, without moe_ or moe_router_ in front. H is hidden_size, F is
    ffn_hidden_size (of one expert), E is num_experts, K is topk. kernels.topk_routing explains the
    fields from score_function to scaling_factor, kernels.activation those of the activation.

    apply_probs_on: "activation" is p · expert(x), "input" is expert(p·x), for topk = 1.
    load_balancing_type, aux_loss_coeff: one type and a positive float, or two tuples, equally long.
    batch_first: which axis is the sequence. Only seq_aux_loss with two token axes needs it. If it
      is set, seq_aux_loss refuses a [T, H] without cu_seqlens; if it is None, that is one sequence.

    >>> MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2).balancing
    {'none': 0.0}
    """
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    # A name in kernels.ACTIVATIONS, a function of gate and up, or a kernels.Activation.
    activation: "str | Callable | kernels.Activation" = "swiglu"
    glu_alpha: float = 1.702                       # for quick_geglu
    glu_linear_offset: float = 0.0                 # for swiglu, geglu and quick_geglu
    activation_clamp_value: float | None = None    # for swiglu, geglu and quick_geglu
    situ_beta: float = 1.0                         # for situ
    situ_linear_beta: float | None = None          # for situ
    activation_fp8_input_store: bool = False       # keep fc1's output as fp8 e4m3
    add_bias_linear: bool = False                  # biases in the experts
    apply_probs_on: str = "activation"             # "activation", "input"
    score_function: str = "softmax"                # "softmax", "sigmoid", "sqrtsoftplus"
    pre_softmax: bool = False                      # softmax over all E, not over the chosen
    norm_topk_prob: bool | None = None             # None: Megatron's convention
    norm_eps: float = 1e-20
    num_groups: int | None = None                  # of experts: see kernels.topk_routing
    group_topk: int | None = None
    group_score_topk: int | None = None            # None: topk // group_topk
    scaling_factor: float | None = None
    router_bias: bool = False                      # a trainable bias on the logits
    router_dtype: torch.dtype = torch.float32
    probs_dtype: torch.dtype | None = None         # None: router_dtype; see kernels.topk_routing
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
    sequence_parallel: bool = False                # each tp rank (if several) has its part of S
    params_dtype: torch.dtype = torch.float32
    init_std: float = 0.02
    output_init_std: float | None = None           # of fc2, latent_up; None: init_std
    batch_first: bool | None = None                # hidden_states are [B, S, H]

    @property
    def output_std(self) -> float:
        """The standard deviation that output projections are drawn with."""
        return self.init_std if self.output_init_std is None else self.output_init_std

    @functools.cached_property
    def balancing(self):
        """Balancing type -> its coefficient."""
        if isinstance(self.load_balancing_type, tuple):
            return dict(zip(self.load_balancing_type, self.aux_loss_coeff))
        return {self.load_balancing_type: self.aux_loss_coeff}

    @functools.cached_property
    def losses(self) -> dict[str, float]:
        """Balance loss that is on -> its coefficient."""
        return {kind: coeff for kind, coeff in self.balancing.items() if kind in LOSS_NAMES}

    @functools.cached_property
    def routing_options(self) -> dict:
        """Keyword arguments of kernels.topk_routing."""
        names = ("topk", "score_function", "num_groups", "group_topk", "group_score_topk",
                 "norm_topk_prob", "norm_eps", "scaling_factor", "probs_dtype")
        options = {name: getattr(self, name) for name in names}
        return {**options, "use_pre_softmax": self.pre_softmax}

    @functools.cached_property
    def bound_activation(self) -> kernels.Activation:
        """The activation, its constants bound."""
        made = kernels.activation_of(self.activation)
        return kernels.activation_of(made, **{
            constant: getattr(self, name) for name, constant in _CONSTANTS.items()
            if constant in made.constants})

    @functools.cached_property
    def parts(self) -> int:
        """Parts P of fc1's output: 2 (gate and up), or 1."""
        return self.bound_activation.parts

    @functools.cached_property
    def always_one(self) -> bool:
        """Whether the only prob of a token is divided by itself, so the router gets no gradient."""
        if self.topk > 1 or "sinkhorn" in self.balancing:
            return False
        if self.norm_topk_prob is None:
            return self.score_function == "softmax" and not self.pre_softmax
        return self.norm_topk_prob

    def __post_init__(self):
        for name in ("load_balancing_type", "aux_loss_coeff"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))     # to be hashable
        check_config(self)
        # A compiled forward could not make a cached_property, so they are made here.
        for name, value in vars(MoEConfig).items():
            if isinstance(value, functools.cached_property):
                getattr(self, name)


# ---- Layer ----

class MoELayer(MoEModule):
    """y_t = Σ_k probs[t, k] · expert_{indices[t, k]}(x_t), plus the shared expert's output.

    hidden_states [S, B, H] -> the same shape and dtype. With batch_first it is [B, S, H], and masks
    and given indices are [B, S, ..]. The parts are layer.router, layer.experts, layer.latent_down,
    layer.latent_up (see LatentDown) and layer.shared_experts; the last three are None if not
    configured.

    `torch.compile(layer, fullgraph=True)` takes every configuration, as one graph for a fixed
    shape. For [T, H] there are at most four over all T from 1 on, without gradients five. With
    [S, B, H] each axis counts by itself: if both change, compile with dynamic=True too, or flatten
    first (docs/compile.md, "How many graphs"). Flattened sequences need bounds, cu_seqlens, if
    seq_aux_loss is on. A graph may become a CUDA graph, except with shared_expert_overlap. The same
    input and state give bitwise the same output and gradients, unless input_jitter_eps or
    force_load_balancing draw numbers.

    Under ep each rank has E / ep experts and its own tokens, and must run every forward and
    backward, even with T = 0. With pad_to_capacity all ranks need the same T, with
    sequence_parallel all tp ranks the same S. ValueError: sizes that ep or tp do not divide, tp
    without sequence_parallel or with batch_first, wrong shapes.

    >>> layer = MoELayer(MoEConfig(hidden_size=8, ffn_hidden_size=4, num_experts=4, topk=2))
    >>> layer(torch.randn(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(self, config: MoEConfig, pg_collection: OneProcess | None = None):
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

    def extra_repr(self) -> str:
        """The config's sizes, and what in it is not a default, for print."""
        given = {field.name: getattr(self.config, field.name) for field in fields(self.config)
                 if getattr(self.config, field.name) != field.default}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    @ends_overlap
    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [S, B, H] or [T, H], finite, even where padding_mask is True, since the
        gradient of the router's weight is a sum over all tokens. The other arguments are
        TopKRouter.forward's.
        """
        config = self.config
        shared = self.shared_experts
        self._check_input(hidden_states)
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
            x_TH = (x_TH * probs_TK).to(x_TH.dtype)
            expert_probs_TK = torch.ones_like(probs_TK)

        # Rows go to their experts and come back. (FSDP2's output_dtype makes the casts necessary.)
        dispatched = self.dispatch(x_TH, expert_probs_TK, indices_TK, plan)
        if config.shared_expert_overlap:
            dispatched = OverlappedDispatch(dispatched, shared)
        rows, probs, local_plan = dispatched.wait_for_rows()
        indices = indices_TK if local_plan is plan else None     # rows from other ranks have others
        output = self.experts(rows, probs, local_plan, indices).to(rows.dtype)
        y_TH = dispatched.wait_and_combine(dispatched.send_back(output))

        if self.latent_up is not None:
            y_TH = self.latent_up(y_TH).to(y_TH.dtype)
        y = compat.as_no_view(y_TH, hidden_states.shape)
        if shared is not None:
            added = shared.get_output() if config.shared_expert_overlap else shared(hidden_states)
            y = y + added.to(y.dtype)
        return self.result(self.router.counts.attach_to(y), probs_TK)

    def _check_input(self, hidden_states):
        if hidden_states.ndim not in (2, 3):
            refuse_input(hidden_states, self.config)
        if not hidden_states.is_floating_point():
            raise TypeError(f"hidden_states is {hidden_states.dtype}; needs a floating-point dtype")
        # Weights that FSDP2 has not gathered yet, or that a parametrization makes, may get another
        # dtype then. So only plain ones are compared.
        fc1 = self.experts._parameters.get("fc1")
        plain = fc1 is not None and not compat.is_in_parts(fc1)
        if plain and hidden_states.dtype != fc1.dtype and not compat.is_any_autocast():
            raise TypeError(
                f"hidden_states is {hidden_states.dtype}, and the experts' weights are "
                f"{fc1.dtype}; needs one dtype, or torch.autocast")

    def result(self, y: Tensor, probs: Tensor):
        """What forward returns: y. Override this to return the router's probs [T, K] too."""
        return y

    def dispatch(
        self, x: Tensor, probs: Tensor, indices: Tensor, plan: kernels.Plan,
    ) -> Dispatch:
        """Sends the rows to their experts. Override this for a dispatcher of your own.

        x [T, H] is what the experts see: [T, ℓ] with latent experts, times the prob with
          apply_probs_on "input".
        probs [T, K]: the experts multiply by them; ones with "input".
        indices [T, K], E unrouted: the router's; plan: kernels.plan_permutation's of them.
        """
        return self.pg_collection.dispatch(x, probs, indices, plan, self.config)


# ---- Experts ----

def _as_autocast(*tensors):
    """The tensors in autocast's dtype, if it is on. If one is in fp64, none is cast. (torch casts
    each by itself, and then refuses the mix.)
    """
    device_type = tensors[0].device.type
    if not compat.has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return [x if x is None else x.to(dtype) for x in tensors]


class Experts(MoEModule):
    """All experts of this rank, in one tensor per projection: see kernels.expert_mlp."""
    per_expert = "fc1", "fc2", "fc1_bias", "fc2_bias"    # prune.select_experts takes rows of these
    sharded = dict.fromkeys(per_expert, Sharding("ep", axis=0, summed_over="expt_dp"))
    # In place of the config's activation a subclass may define `activate`, of the same parts: of
    # (self, gate, up) or (self, y), with parameters of its own. If takes_expert is True, it gets
    # `expert` too: the number of each row's expert among this rank's, [.., 1]. See docs/change.md.
    activate: "Callable[..., Tensor]"
    takes_expert = False

    def __init__(self, config: MoEConfig, pg_collection: OneProcess | None = None):
        super().__init__(config, pg_collection)
        ranks = self.pg_collection.size("ep")
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

    def forward(
        self, tokens: Tensor, probs: Tensor, plan: kernels.Plan, indices: Tensor | None = None,
    ) -> Tensor:
        """tokens [T, H] (or [T, ℓ]), probs [T, K], their plan -> like tokens. indices: see
        kernels.expert_mlp.

        Under autocast the products are in its dtype; gradients have the parameters' dtypes.
        ValueError: see check_own.
        """
        self.check_own()
        dtype = tokens.dtype
        weights = self.fc1, self.fc2, self.fc1_bias, self.fc2_bias
        if compat.is_any_autocast():
            tokens, *weights = _as_autocast(tokens, *weights)
        out = kernels.expert_mlp(
            tokens, probs, plan, *weights,
            kind=self._made_activation(),
            fp8_input_store=self.config.activation_fp8_input_store, indices=indices)
        return out.to(dtype)

    @torch.compiler.assume_constant_result           # a graph runs this while it is traced
    def check_own(self) -> None:
        """ValueError: ep > 1, and a parameter of a subclass may have a row for each expert, and is
        not in `sharded`: the ranks would sum its gradients, although their experts are different.
        """
        if self.pg_collection.size("ep") > 1:
            self.refuse_undeclared(self.sharded)

    def _made_activation(self) -> kernels.Activation:
        made = self.config.bound_activation
        if not hasattr(self, "activate"):
            return made
        return kernels.Activation(self.activate, made.parts, self.takes_expert)

    def refuse_undeclared(self, declared) -> None:
        """ValueError if a parameter or buffer may have a row for each expert, and its name is not
        in `declared`.
        """
        for path, tensor in [*self.named_parameters(), *self.named_buffers()]:
            _, name = owner_of(self, path)
            # A module such as nn.PReLU has a tensor of one number. If there is one expert, the
            # tensor looks like a row for each.
            module_of_one = len(self.fc1) == 1 and "." in name
            fits = tensor.shape[:1] == self.fc1.shape[:1] and not module_of_one
            if fits and name not in declared:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, and there are {len(self.fc1)} "
                    f"experts; if it has a row for each, name it in per_expert and sharded of "
                    f'{type(self).__name__}, else in sharded as ("tp", None, "tp_dp_cp")')


# ---- Latent experts: from H to ℓ dimensions, and back ----

class LatentDown(MoEModule):
    """x [T, H] -> x · weightᵀ [T, ℓ], the space of the routed experts (arXiv 2601.18089)."""

    def __init__(self, config: MoEConfig, pg_collection: OneProcess | None = None):
        super().__init__(config, pg_collection)
        self.weight = self.parameter(config.latent_size, config.hidden_size)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentUp(MoEModule):
    """rows [T, ℓ] -> norm(rows) · weightᵀ [T, H]. norm: an RMSNorm (arXiv 1910.07467), or none."""
    std_fields = {"weight": "output_std"}

    def __init__(self, config: MoEConfig, pg_collection: OneProcess | None = None):
        super().__init__(config, pg_collection)
        self.weight = self.parameter(config.hidden_size, config.latent_size)
        self.norm = None
        if config.latent_norm:
            self.norm = self.parameter(config.latent_size)
        self.reset_parameters()

    def forward(self, rows: Tensor) -> Tensor:
        if self.norm is not None:
            rows = F.rms_norm(rows, self.norm.shape, self.norm, self.config.latent_norm_eps)
        return F.linear(rows, self.weight)


# ---- What a config refuses ----

def _is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
# (fields, whether a value fits, what they need). None fits too where it is the default.
_RULES = (
    ("hidden_size ffn_hidden_size num_experts topk num_groups group_topk group_score_topk "
     "latent_size shared_expert_intermediate_size",
     lambda x: isinstance(x, int) and not isinstance(x, bool) and x > 0, "a positive int"),
    ("glu_alpha glu_linear_offset scaling_factor bias_update_rate", _is_number, "a finite number"),
    ("activation_clamp_value situ_beta situ_linear_beta latent_norm_eps",
     lambda x: _is_number(x) and x > 0, "a positive number"),
    ("activation_fp8_input_store add_bias_linear pre_softmax norm_topk_prob router_bias "
     "enable_expert_bias latent_norm calculate_per_token_loss pad_to_capacity shared_expert_gate "
     "shared_expert_overlap sequence_parallel batch_first",
     lambda x: isinstance(x, bool), "True or False"),
    ("norm_eps z_loss_coeff input_jitter_eps init_std output_init_std",
     lambda x: _is_number(x) and x >= 0, "0 or more"),
    ("router_dtype probs_dtype params_dtype", _DTYPES.__contains__,
     "torch.float16, bfloat16, float32 or float64"),
    ("force_load_balancing", lambda x: isinstance(x, bool) or x == "round_robin",
     'True, False or "round_robin"'),
    ("capacity_factor",
     lambda x: _is_number(x) and 0 < x < 2 ** 31, "a positive number below 2 ** 31"),
)
_CHOICES = {
    "activation": kernels.ACTIVATIONS,
    "apply_probs_on": ("activation", "input"),
    "score_function": kernels.SCORE_FUNCTIONS,
    "bias_update": ("sign", "quantile"),
    "token_drop_policy": ("probs", "position"),
}
# field -> fields without effect unless it is set
_NEEDED_BY = {
    "num_groups": "group_topk group_score_topk",
    "group_topk": "num_groups",
    "enable_expert_bias": "bias_update bias_update_rate",
    "latent_size": "latent_norm",
    "latent_norm": "latent_norm_eps",
    "capacity_factor": "pad_to_capacity token_drop_policy",
    "shared_expert_intermediate_size": "shared_expert_gate shared_expert_overlap",
}


def check_config(config: MoEConfig) -> None:
    """ValueError for the first thing refused. The functions below give (the fields, why) in order;
    each relies on the checks before it.
    """
    for refused in (_refused_values, _refused_experts, _refused_routing, _refused_balancing):
        for names, why in refused(config):
            got = ", ".join(f"{name} = {getattr(config, name)!r}" for name in names.split())
            raise ValueError(f"{got}: {why}")


def _changed(config, name):
    return getattr(config, name) != getattr(MoEConfig, name)


def _refused_values(c):
    """Each field by itself, then those without effect."""
    for names, fits, need in _RULES:
        for name in names.split():
            value = getattr(c, name)
            optional = getattr(MoEConfig, name, 0) is None         # its default
            if not (optional and value is None) and not fits(value):
                yield name, f"needs {need}, or None" if optional else f"needs {need}"
    for name, known in _CHOICES.items():
        value = getattr(c, name)
        own = name == "activation" and (
            callable(value) or isinstance(value, kernels.Activation))
        if not own and value not in [*known]:
            yield name, f"needs one of {', '.join(known)}"
    for needed, names in _NEEDED_BY.items():
        for name in names.split():
            if getattr(c, needed) in (None, False) and _changed(c, name):
                yield f"{name} {needed}", f"{name} has no effect unless {needed} is set"


def _refused_experts(c):
    own = not isinstance(c.activation, str)
    made = kernels.activation_of(c.activation)
    for name, constant in _CONSTANTS.items():
        if _changed(c, name) and (own or constant not in made.constants):
            yield (f"activation {name}", "a function's constants are bound by functools.partial"
                   if own else f"{c.activation} has no such constant; leave {name} out")
    if own:
        if isinstance(made.function, nn.Module) and [*made.function.parameters()]:
            yield "activation", ("its parameters would be in no layer; give Experts a method "
                                 "activate that has them")
        if made.parts not in (1, 2):
            yield "activation", "needs parts 1, or 2 for gate and up"
        if made.takes_expert:
            yield "activation", "only a method Experts.activate gets each row's expert"
    if c.activation_fp8_input_store and c.activation != "swiglu":
        yield ("activation_fp8_input_store activation",
               'only the input of "swiglu" is stored so; leave activation_fp8_input_store out')
    if c.apply_probs_on == "input" and c.topk > 1:
        yield ("apply_probs_on topk",
               '"input" is for topk = 1: it makes another input for every expert of a token; leave '
               "apply_probs_on out")


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
    if c.calculate_per_token_loss and not (kinds & {*LOSS_NAMES} or c.z_loss_coeff):
        yield ("calculate_per_token_loss load_balancing_type z_loss_coeff",
               "calculate_per_token_loss has no effect without a loss; name one, or leave it out")
    if "sinkhorn" in kinds:
        others = ("num_groups scaling_factor enable_expert_bias norm_topk_prob pre_softmax "
                  "score_function probs_dtype")
        for name in others.split():
            if getattr(c, name) not in (None, False, "softmax"):
                yield (f"load_balancing_type {name}",
                       f"sinkhorn has its own choice and probs; leave {name} out")
