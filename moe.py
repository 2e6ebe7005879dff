"""A Mixture-of-Experts layer: config, layer, router, experts. The tensor functions are in kernels.py, with the letters.

    hidden_states [S, B, H] ──┬─> TopKRouter.route ──> probs [T, K], indices [T, K]
                              │                          │
                              └──────────────────> plan_permutation ──> Experts ──> [S, B, H]
"""
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

if __package__:
    from . import kernels
else:
    import kernels


# ---- Config ----

LOAD_BALANCING_TYPES = ("none", "aux_loss")


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. Names are Megatron's without the moe_ / moe_router_ prefix; all are checked here.

    hidden_size H, ffn_hidden_size F (of one expert), num_experts E, topk K. score_function to scaling_factor: see
    kernels.topk_routing_with_score_function; activation fields: kernels.activation; apply_probs_on: kernels.expert_mlp.
    load_balancing_type and aux_loss_coeff: one type and a float, or tuples of the same length.
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
    enable_expert_bias: bool = False               # a buffer added to the scores for the choice alone
    load_balancing_type: str | tuple[str, ...] = "none"
    aux_loss_coeff: float | tuple[float, ...] = 0.0
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None          # noise on the router's input, in training
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
                            ("apply_probs_on", ("input", "activation", "output"))):
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
        if self.topk == 1 and normalised:
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


def _normal(shape: tuple, std: float, like: Tensor) -> Tensor:
    """Drawn in fp32 whatever the dtype, so that a seed gives the same model in every dtype."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).normal_(0.0, std)


# ---- Layer ----

class MoELayer(nn.Module):
    """hidden_states [S, B, H] -> same shape and dtype: y_t = Σ_k probs[t, k] · expert_{indices[t, k]}(x_t).

    One device; `torch.compile(layer, fullgraph=True)` takes it whole. layer.router, layer.experts.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.router = TopKRouter(config)
        self.experts = Experts(config)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None) -> Tensor:
        """hidden_states [S, B, H] or [T, H]; padding_mask [S, B] (or [T]) bool, True = padding: no expert, output 0;
        topk_indices [T, K] or [S, B, K] int64 replaces the router's choice (see TopKRouter.route)."""
        probs_TK, indices_TK = self.router.route(hidden_states, padding_mask, topk_indices)
        plan = kernels.plan_permutation(indices_TK, self.config.num_experts)
        y_TH = self.experts(hidden_states.flatten(0, -2), probs_TK, plan)
        return y_TH.view(hidden_states.shape)


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

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.layer_number: int | None = None
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=config.params_dtype)) if config.router_bias else None

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


class TopKRouter(Router):
    """Each token to its top K experts. `route` gives the [T, K] form that the layer runs on, `forward` the [T, E] form.

    In training, with grad enabled, losses are attached to probs: they are in the gradient already, do not add them.
    """

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        E = config.num_experts
        self.register_buffer("expert_bias", torch.empty(E, dtype=torch.float32) if config.enable_expert_bias else None)
        # of the latest training forward, for load_balancing_metrics
        self.register_buffer("last_tokens_per_expert", torch.empty(E, dtype=torch.int64), persistent=False)
        self.register_buffer("last_losses", torch.empty(len(LOSSES), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight anew (normal, init_std); biases and counts become zero."""
        super().reset_parameters()
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.last_tokens_per_expert.zero_()
        self.last_losses.fill_(math.nan)

    def _apply(self, fn, recurse=True):
        """Casts reach the parameters only: a bias in bf16 would lose the updates of 1e-3 (arXiv 2408.15664)."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self

    # -- the steps of a routing, in order --

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """In training, input · uniform[1 - eps, 1 + eps] (arXiv 2101.03961); the experts see the clean input."""
        eps = self.config.input_jitter_eps
        if not self.training or not eps:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits [S, B, E] with the z-loss attached, in training with grad (arXiv 2202.08906)."""
        if not self.config.z_loss_coeff or not self._losses_on():
            return logits
        loss = kernels.z_loss_func(logits, self.config.z_loss_coeff, padding_mask)
        return self._attach(logits, loss, "z_loss", self.config.z_loss_coeff)

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor) -> Tensor:
        """probs with the switch loss attached; scores, routing_map [T, E]: those of the balance losses, padding zero."""
        config, counts_E, coeff = self.config, routing_map.sum(0), self.get_aux_loss_coeff("aux_loss")
        loss = kernels.switch_load_balancing_loss_func(
            scores_for_aux_loss, counts_E, counts_E.sum() / config.topk, config.topk, config.num_experts, coeff)
        return self._attach(probs, loss, "load_balancing_loss", coeff)

    def _attach(self, activation: Tensor, loss: Tensor, name: str, coeff: float) -> Tensor:
        self.last_losses[LOSSES.index(name)] = loss.detach() / coeff
        return MoEAuxLossAutoScaler.apply(activation, loss, _loss_scale(activation.device))

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """The coefficient of a balancing type, 0.0 when it is off."""
        return self.config.balancing.get(aux_loss_type, 0.0)

    def is_aux_loss_enabled(self) -> bool:
        """Whether any balance loss has a coefficient other than 0."""
        return any(self.get_aux_loss_coeff(kind) for kind in LOAD_BALANCING_TYPES)

    def _losses_on(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _route_logits(self, logits: Tensor, padding_mask: Tensor | None, topk_indices: Tensor | None):
        """logits [S, B, E] or [T, E] -> (probs [T, K], indices [T, K])."""
        config = self.config
        logits_TE = self.apply_z_loss(logits, padding_mask).flatten(0, -2)
        probs_TK, indices_TK = kernels.topk_routing_with_score_function(
            logits_TE, config.topk, config.pre_softmax, config.num_groups, config.group_topk, config.scaling_factor,
            config.score_function, self.expert_bias, True, topk_indices, config.norm_topk_prob, config.norm_eps,
            config.group_score_topk)
        padding_T = None if padding_mask is None else padding_mask.flatten()
        if padding_T is not None:
            indices_TK = indices_TK.masked_fill(padding_T[:, None], config.num_experts)
            probs_TK = probs_TK.masked_fill(padding_T[:, None], 0.0)
        if self._losses_on():
            kernels.record_counts(self.last_tokens_per_expert, indices_TK)
        if self._losses_on() and self.is_aux_loss_enabled():
            map_TE, scores_TE = kernels.compute_routing_scores_for_aux_loss(
                logits_TE, config.topk, config.score_function, padding_T)
            probs_TK = self._apply_aux_loss(probs_TK, scores_TE, map_TE)
        return probs_TK, indices_TK

    # -- the three ways in --

    def route(self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None):
        """input [S, B, H] or [T, H] -> (probs [T, K] in router_dtype, indices [T, K] int64; E = nowhere, with prob 0).

        padding_mask [S, B] (or [T]) bool, True = padding: goes nowhere. topk_indices [T, K] or [S, B, K] int64 in
        [0, E] takes the place of the choice (replay, hash routing); the range is not checked, that would sync.
        """
        config = self.config
        if input.ndim not in (2, 3) or input.shape[-1] != config.hidden_size:
            raise ValueError(f"input has shape {list(input.shape)}; needs [S, B, {config.hidden_size}] or "
                             f"[T, {config.hidden_size}]")
        if padding_mask is not None and (padding_mask.shape != input.shape[:-1] or padding_mask.dtype != torch.bool):
            raise ValueError(f"padding_mask is {list(padding_mask.shape)} {padding_mask.dtype}; needs "
                             f"{list(input.shape[:-1])} torch.bool, True = padding")
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
        return kernels.routing_to_map(*self._route_logits(logits, padding_mask, None), self.config.num_experts)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None, topk_indices: Tensor | None = None):
        """`route` in its [T, E] form: (probs [T, E], routing_map [T, E] bool)."""
        return kernels.routing_to_map(*self.route(input, padding_mask, topk_indices), self.config.num_experts)


LOSSES = ("load_balancing_loss", "z_loss")


def load_balancing_metrics(model: nn.Module) -> dict[str, Tensor]:
    """Of each router's latest training forward, layers in module order: "tokens_per_expert" [layers, E] int64,
    "max_violation" [layers] = max_e n_e / mean n - 1 (arXiv 2408.15664), and each loss that is on in any layer,
    [layers], divided by its coefficient, NaN for a layer without it. For logging: the gradient has the losses already."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    if not routers:
        raise ValueError(f"model ({type(model).__name__}) has no TopKRouter")
    counts = torch.stack([router.last_tokens_per_expert for router in routers])
    on = {"load_balancing_loss": "aux_loss"}
    metrics = {name: torch.stack([router.last_losses[i] for router in routers]) for i, name in enumerate(LOSSES)
               if any(r.config.z_loss_coeff if name == "z_loss" else r.get_aux_loss_coeff(on[name]) for r in routers)}
    mean = counts.double().mean(1).clamp(min=torch.finfo(torch.float64).tiny)
    return {**metrics, "max_violation": (counts.amax(1) / mean - 1).float(), "tokens_per_expert": counts}


# ---- Experts ----

class Experts(nn.Module):
    """All experts in one tensor per projection; see kernels.expert_mlp."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        E, P, F, H = config.num_experts, config.parts, config.ffn_hidden_size, config.hidden_size

        def parameter(*shape):
            return nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.fc1 = parameter(E, P, F, H)                                            # P: gate, up
        self.fc2 = parameter(E, H, F)
        self.fc1_bias = parameter(E, P, F) if config.add_bias_linear else None
        self.fc2_bias = parameter(E, H) if config.add_bias_linear else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every expert's weights in global order (normal, init_std); biases to zero."""
        with torch.no_grad():
            for fc1, fc2 in zip(self.fc1, self.fc2):
                fc1.copy_(_normal(fc1.shape, self.config.init_std, fc1))
                fc2.copy_(_normal(fc2.shape, self.config.init_std, fc2))
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
