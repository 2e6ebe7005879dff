"""The router: logits, choice, drops, balance losses, counts. Then functions for all routers of a
model: finish_step, record and replay, metrics. Open it to see how tokens find their experts.
"""
import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Sequence

import torch
from torch import Tensor, nn

if __package__:
    from . import compat, kernels
    from .base import MoEModule, OneProcess, group_size
else:
    import compat
    import kernels
    from base import MoEModule, OneProcess, group_size
if TYPE_CHECKING:
    from .moe import MoEConfig


# balancing type -> name of its loss in the metrics
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
LOAD_BALANCING_TYPES = ("none", *LOSS_NAMES, "sinkhorn")
METRICS = (*LOSS_NAMES.values(), "z_loss")
LOGGED = ("dropped", *METRICS)                       # names of tensors of RouterCounts


# ---- Router ----

def _counted(name):
    """The tensor of this name in the router's counts."""
    return property(lambda router: getattr(router.counts, name))


class Router(MoEModule, ABC):
    """The base of a router: weight [E, H], logits, expert bias and counts. A subclass with
    `forward` and `routing` works in a layer.
    """
    per_expert = "weight", "bias", "expert_bias"         # prune.select_experts takes rows of these

    def __init__(self, config: "MoEConfig", pg_collection: OneProcess | None = None):
        super().__init__(config, pg_collection)
        ranks = self.pg_collection.size("tp")
        if ranks > 1 and (config.batch_first or not config.sequence_parallel):
            raise ValueError(
                f"tp has {ranks} ranks, sequence_parallel is {config.sequence_parallel} and "
                f"batch_first is {config.batch_first}; needs sequence_parallel=True and "
                f"batch_first=False: each rank routes its own part of the first axis, the sequence")
        self.layer_number: int | None = None
        self.make_tensors()
        self.counts = RouterCounts(config, self.pg_collection.size("tp_cp"))
        self._recording = False
        self._recorded = None, None                  # indices, probs
        self._replayed = None
        self.register_forward_pre_hook(_begin_counting)
        self.register_forward_hook(_attach_counts)
        self.reset_parameters()

    def make_tensors(self) -> None:
        """weight [E, H]; if configured, bias [E] and the buffer expert_bias [E] in fp32."""
        config = self.config
        self.weight = self.parameter(config.num_experts, config.hidden_size)
        self.bias = None
        if config.router_bias:
            self.bias = self.parameter(config.num_experts)
        expert_bias = None
        if config.enable_expert_bias:
            expert_bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", expert_bias)

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
        """(probs [T, K], indices [T, K] int64): the K most probable experts of each row of
        forward(input)'s map. A row with fewer ends with index E and prob 0; padding is unrouted.
        ValueError: topk_indices or cu_seqlens are given. Override this to take them.
        """
        for name, given in (("topk_indices", topk_indices), ("cu_seqlens", cu_seqlens)):
            if given is not None:
                raise ValueError(f"{name} is given, and {type(self).__name__}.route is that of "
                                 f"Router, which calls only forward(input); override route")
        probs_TE, map_TE = self(input)
        kept_TE = probs_TE.detach().masked_fill(~map_TE, -math.inf)
        best = kept_TE.topk(self.config.topk, dim=1)
        unrouted = best.values == -math.inf
        if padding_mask is not None:
            unrouted = unrouted | _check_mask(padding_mask, list(input.shape[:-1]))[:, None]
        indices = best.indices.masked_fill(unrouted, self.config.num_experts)
        return kernels.pick(probs_TE, indices), indices

    def gating(self, input: Tensor) -> Tensor:
        """input [.., H] -> logits [.., E] in router_dtype, under autocast too."""
        weight, bias = compat.whole(self.weight), compat.whole(self.bias)
        return kernels.router_gating_linear(
            input, weight, bias, router_dtype=self.config.router_dtype)

    def reset_parameters(self) -> None:
        """Also empties the expert bias, counts and sums."""
        super().reset_parameters()
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.reset_counts()

    def reset_counts(self) -> None:
        """Empties counts and sums."""
        self.counts.reset()

    def _given_indices(self, topk_indices, axes):
        """The indices [T, K] int64 that replace the choice: replay_routing's, else the argument."""
        name, indices = self._replayed or ("topk_indices", topk_indices)
        if indices is None:
            raise ValueError(f"{name} is None: this router had not run in record_routing; "
                             f"needs a tensor [T, {self.config.topk}] of an integer dtype")
        T, K = math.prod(axes), self.config.topk
        # `in` would take equal symbolic sizes for different ones in a graph.
        fits = indices.shape == (T, K) or indices.shape == (*axes, K)
        if not fits or not compat.is_integer(indices):
            raise ValueError(f"{name} is {list(indices.shape)} {indices.dtype}; "
                             f"needs {[T, K]} or {[*axes, K]} of an integer dtype")
        _check_range(name, indices, 0 if self._replayed is None else -1, self.config.num_experts)
        return indices.flatten(0, -2).long()

    # -- what is counted, in training with grad --

    local_tokens_per_expert = _counted("local_tokens_per_expert")
    bias_histogram = _counted("bias_histogram")
    global_tokens_per_expert = _counted("global_tokens_per_expert")
    ga_steps = _counted("ga_steps")

    def _in_training_forward(self):
        return self.training and torch.is_grad_enabled()

    def _apply_expert_bias(self, routing_map):
        """Counts the tokens of the map [T, E], which is before dropping and without padding. They
        are counted in the backward of the probs that `forward` returns. Call it in the forward of a
        router of your own, once or more often; TopKRouter counts by itself.
        """
        if self._in_training_forward():
            self.counts.count(None, routing_map.sum(0))

    def _count_biases(self, probs, logits_TE, padding_T):
        """probs, whose backward adds to the histogram of bias_update="quantile"."""
        score = kernels.SCORE_FUNCTIONS[self.config.score_function]
        scores_TE = score(compat.upcast(logits_TE.detach()))
        histogram = kernels.required_bias_histogram(
            scores_TE, self.expert_bias, self.config.topk, padding_mask=padding_T)
        return self.counts.write(probs, self.bias_histogram, histogram, add=True)

    def reset_bias_histogram(self) -> None:
        """Empties the histogram of bias_update="quantile". Call it after you have written the
        expert bias by hand, since the histogram holds for the old bias. load_state_dict also
        empties it.
        """
        self.counts.zero("bias_histogram")

    def reset_global_aux_loss_tracker(self) -> None:
        """Starts the averages of the global loss again from nothing; finish_step calls it."""
        self.counts.zero("global_tokens_per_expert", "ga_steps")

    def add_in_backward(self, activation: Tensor, buffer: Tensor, value: Tensor) -> Tensor:
        """Returns activation, whose backward adds value to buffer: for a count of your own in
        `choose` or `forward`. So under an activation checkpoint it is added once, and in a forward
        without a backward not at all. If the activation needs no gradient, the backward of
        `forward`'s probs adds it.

        TypeError: value is fractional, and buffer has an integer dtype, which would truncate it.
        ValueError: the shapes differ.
        """
        if value.is_floating_point() and not buffer.is_floating_point():
            raise TypeError(f"value is {value.dtype} and buffer {buffer.dtype}, which cannot hold "
                            f"it; needs a buffer of a floating dtype")
        if value.shape != buffer.shape:
            raise ValueError(f"value has shape {list(value.shape)}, buffer has shape "
                             f"{list(buffer.shape)}; they need one shape")
        if not self._in_training_forward():
            return activation
        return self.counts.write(activation, buffer, value, add=True)

    def end_step(self) -> None:
        """Override it to update a state of your own: finish_step calls it after the biases."""

    # -- the expert bias stays in fp32: bf16 rounds updates of 1e-3 away --

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        self.counts.move(fn)
        return self

    def begin_counting(self):
        """Called at the start of a forward. Drops the counts of an earlier forward that had no
        backward, and brings the counts to the weight's device.
        """
        self._bring_counts()
        if self.counts.waiting:
            self.counts.set_waiting([])

    @torch.compiler.assume_constant_result           # a graph runs this while it is traced
    def _bring_counts(self):
        """Brings the counts to the weight's device, if fully_shard or assign=True has moved the
        weight without `_apply`.
        """
        if self.counts.last_tokens_per_expert.device != self.weight.device:
            self.counts.follow(self.weight.device)

    def _maintain_float32_expert_bias(self):
        """Casts the expert bias back if something other than `_apply` has cast it."""
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            with torch.inference_mode(False):        # else training could not update it
                self.expert_bias = self.expert_bias.float()

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._maintain_float32_expert_bias()         # load_state_dict(assign=True) takes any dtype
        self.begin_counting()                        # and any device
        self.counts.zero("local_tokens_per_expert", "bias_histogram")        # of the old bias

    def _save_to_state_dict(self, *args, **kwargs):
        self._maintain_float32_expert_bias()
        super()._save_to_state_dict(*args, **kwargs)

    # -- Megatron's names, which nothing here calls --

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number


# These functions are hooks, so that a Router counts whether or not a MoELayer calls it.

def _begin_counting(router, inputs):
    router.begin_counting()


def _attach_counts(router, inputs, outputs):
    if router.counts.waiting:
        probs, *others = outputs
        return router.counts.attach_to(probs), *others


class _RandomLogits(torch.autograd.Function):
    """Random values with the logits' gradient."""

    @staticmethod
    def forward(ctx, logits):
        return torch.randn_like(logits)

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        return grad


class TopKRouter(Router):
    """Sends each token to its top K experts.

    route(input)     -> (probs [T, K], indices [T, K]), the form that the layer runs on
    forward(input)   -> (probs [T, E], routing_map [T, E]), Megatron's form of the same choice
    routing(logits)  -> (probs [T, E], routing_map [T, E])
    gating(input)    -> logits
    choose(logits)   -> (probs [T, K], indices [T, K]): override it for a routing of your own

    In training the backward of the probs and logits adds the gradients of the balance losses and
    the z-loss, so do not add these losses to yours. Counts are in `counts`, a RouterCounts.

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
        """input [S, B, H], with batch_first [B, S, H], or [T, H] -> (probs [T, E] in probs_dtype,
        routing_map [T, E] bool), or with `dense_output` (probs [T, K], indices [T, K] int64), where
        index E is unrouted and has prob 0.

        padding_mask [S, B] or [T] bool: tokens with True are unrouted.
        topk_indices [T, K] or [S, B, K] in [0, E], of any integer dtype: the choice (replay, hash
          routing). The range is checked only in eager mode on a CPU: elsewhere that would sync.
        cu_seqlens [n + 1] int32 or int64, 0 first, ascending, T last: the bounds of a pack's
          sequences, for seq_aux_loss. The pack is [T, H], or has one token axis of length 1. Within
          tp_cp each rank gives the bounds of its own part, for the same n sequences. The values are
          checked only in eager mode on a CPU. Without bounds a [T, H] is one sequence; with
          seq_aux_loss and batch_first set it is a ValueError.
        """
        axes = list(input.shape[:-1])
        if len(axes) not in (1, 2) or input.shape[-1] != self.config.hidden_size:
            refuse_input(input, self.config)
        if padding_mask is not None:
            padding_mask = _check_mask(padding_mask, axes)
        if cu_seqlens is not None:
            _check_bounds(cu_seqlens, axes)
        if self.config.input_jitter_eps:
            input = self.apply_input_jitter(input)
        probs_TK, indices_TK = self.route_logits(
            self.gating(input), padding_mask, topk_indices, cu_seqlens=cu_seqlens)
        return (probs_TK, indices_TK) if dense_output else self._to_map(probs_TK, indices_TK)

    def route(
        self, input: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """forward with dense_output."""
        return self(input, padding_mask, topk_indices, dense_output=True, cu_seqlens=cu_seqlens)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (probs [T, E], routing_map [T, E] bool)."""
        if padding_mask is not None:
            padding_mask = _check_mask(padding_mask, list(logits.shape[:-1]))
        return self._to_map(*self.route_logits(logits, padding_mask))

    # -- the choice --

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """In training, the router's input · uniform[1 - eps, 1 + eps] (arXiv 2101.03961)."""
        eps = self.config.input_jitter_eps
        if not self.training:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def route_logits(
        self, logits: Tensor, padding_T: Tensor | None = None, topk_indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] or [T, E], padding_T [T] -> probs, indices [T, K]. The shapes of logits,
        padding_T and cu_seqlens are not checked.
        """
        config = self.config
        if topk_indices is not None or self._replayed is not None:
            topk_indices = self._given_indices(topk_indices, list(logits.shape[:-1]))
        if cu_seqlens is None and "seq_aux_loss" in config.losses:
            _check_sequences(config, list(logits.shape[:-1]))
        if config.always_one and self.weight.requires_grad and self._in_training_forward():
            _refuse_training(config)

        # 1. Logits [T, E], with the z-loss in their gradient.
        logits_TE = logits.flatten(0, -2)
        if config.force_load_balancing:
            logits_TE, topk_indices = self._force(logits_TE, topk_indices)
        if config.z_loss_coeff:
            logits_TE = self.apply_z_loss(logits_TE, padding_T)

        # 2. Choose. This choice is what is counted and recorded.
        if config.enable_expert_bias:
            self._maintain_float32_expert_bias()
        if self._replayed is not None:
            topk_indices = self._fill_unknown(topk_indices, logits_TE, padding_T)
        probs_TK, chosen_TK = self.choose(logits_TE, padding_T, topk_indices)
        if padding_T is not None:
            probs_TK, chosen_TK = self._unroute(probs_TK, chosen_TK, where=padding_T[:, None])
        if topk_indices is not None and _can_be_read(chosen_TK):
            _check_obeyed(self, self._obeys(chosen_TK, topk_indices, padding_T))

        # 3. Drop what is over capacity. The other probs are not normalised again.
        indices_TK = chosen_TK
        if config.capacity_factor is not None:
            over_TK = self._is_over_capacity(probs_TK, chosen_TK)
            probs_TK, indices_TK = self._unroute(probs_TK, chosen_TK, where=over_TK)

        # 4. Balance and count.
        if self._in_training_forward():
            if config.losses:
                probs_TK = self._apply_losses(
                    probs_TK, logits_TE, padding_T, axes=logits.shape[:-1], cu_seqlens=cu_seqlens)
            counts_E = kernels.count_experts(chosen_TK, config.num_experts)
            probs_TK = self.counts.count(probs_TK, counts_E)
            if config.capacity_factor is not None:
                dropped = (indices_TK != chosen_TK).sum()
                probs_TK = self.counts.log(probs_TK, "dropped", dropped, sharers=None)
            if self.bias_histogram is not None:
                probs_TK = self._count_biases(probs_TK, logits_TE, padding_T)
        if self._recording:
            self._record(chosen_TK, topk_indices, padding_T, probs_TK)
        return probs_TK, indices_TK

    def choose(
        self, logits: Tensor, padding_mask: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> (probs [T, K], indices [T, K] int64 in [0, E]), before padding and
        dropping. Override this for a routing of your own.

        Index E is unrouted; its prob is 0. The balance losses still see the top K of the logits.
        padding_mask [T] and topk_indices [T, K] are forward's, or None. Given indices are the
        choice: return them, each in its slot (ValueError, in eager mode on a CPU). They may name an
        expert twice, returned ones may not: kernels.merge_repeats leaves the first.
        """
        config = self.config
        if "sinkhorn" in config.balancing:
            return self._choose_by_sinkhorn(logits, padding_mask, topk_indices)
        return kernels.topk_routing(
            logits, expert_bias=self.expert_bias, precomputed_indices=topk_indices,
            **config.routing_options)

    def _choose_by_sinkhorn(self, logits, padding_mask=None, topk_indices=None):
        K = self.config.topk
        if topk_indices is None:
            balanced_TE = compat.upcast(logits.detach())
            if self.training:
                balanced_TE = kernels.sinkhorn(balanced_TE, padding_mask=padding_mask)
            topk_indices = balanced_TE.topk(K, dim=1).indices
        return kernels.topk_routing(
            logits, K, score_function="sigmoid" if K == 1 else "softmax", norm_topk_prob=False,
            precomputed_indices=topk_indices)

    def _force(self, logits_TE, topk_indices):
        """(logits, indices) under force_load_balancing. Given indices stay."""
        if self.config.force_load_balancing != "round_robin":
            return _RandomLogits.apply(logits_TE), topk_indices
        if topk_indices is None:
            T, E = logits_TE.shape
            number_N = torch.arange(T * self.config.topk, device=logits_TE.device)
            topk_indices = (number_N % E).view(T, self.config.topk)
        return logits_TE, topk_indices

    def _fill_unknown(self, indices_TK, logits_TE, padding_T):
        """Replayed indices; tokens with a -1 take the router's own choice."""
        with torch.no_grad():
            _, own_TK = self.choose(logits_TE, padding_T)
        return torch.where((indices_TK < 0).any(1, keepdim=True), own_TK, indices_TK)

    def _obeys(self, indices_TK, given_TK, padding_T):
        """[T, K] bool: whether a slot has the given index. Padding does."""
        wanted_TK, _ = kernels.merge_repeats(given_TK, self.config.num_experts)
        same_TK = indices_TK == wanted_TK
        return same_TK if padding_T is None else same_TK | padding_T[:, None]

    @compat.unchecked_side_effects
    def _record(self, indices_TK, given_TK, padding_T, probs_TK):
        if given_TK is not None:                     # with its repeats
            indices_TK = indices_TK.where(~self._obeys(indices_TK, given_TK, padding_T), given_TK)
        if padding_T is not None:
            indices_TK = indices_TK.masked_fill(padding_T[:, None], self.config.num_experts)
        self._recorded = indices_TK, probs_TK.detach()

    # -- drop --

    def _is_over_capacity(self, probs_TK, indices_TK):
        """[T, K] bool, also True for unrouted assignments. An expert keeps its C most probable
        tokens, or its first C (arXiv 2006.16668).
        """
        E = self.config.num_experts
        by = probs_TK.detach() if self.config.token_drop_policy == "probs" else None
        place_TK = kernels.place_in_expert(indices_TK, by, E)
        return (place_TK >= self._capacity(indices_TK.shape[0])) | (indices_TK == E)

    def _unroute(self, probs_TK, indices_TK, where):
        unrouted_TK = indices_TK.masked_fill(where, self.config.num_experts)
        return probs_TK.masked_fill(where, 0.0), unrouted_TK

    def _capacity(self, num_tokens):
        config = self.config
        return kernels.get_capacity(
            num_tokens * config.topk, config.num_experts, config.capacity_factor)

    def _to_map(self, probs_TK, indices_TK):
        """The [T, E] form. With pad_to_capacity the map also marks the fillers: for each expert the
        first tokens that are not its own, as many as its capacity has left.
        """
        probs_TE, map_TE = kernels.routing_to_map(probs_TK, indices_TK, self.config.num_experts)
        if self.config.pad_to_capacity:
            left_E = self._capacity(map_TE.shape[0]) - map_TE.sum(0)
            map_TE = map_TE | ((~map_TE).cumsum(0) <= left_E)
        return probs_TE, map_TE

    # -- losses --

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """The coefficient of a balancing type; 0.0: off."""
        return self.config.balancing.get(aux_loss_type, 0.0)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits [.., E], in training with the z-loss attached (arXiv 2202.08906):
          coeff · Σ logsumexp² over this rank's valid tokens / the valid tokens of tp_cp.
        """
        coeff = self.config.z_loss_coeff
        ranks = self.pg_collection
        if not self._in_training_forward():
            return logits
        loss = kernels.z_loss_func(logits, coeff, padding_mask)
        local = math.prod(logits.shape[:-1])
        if padding_mask is not None:
            local = (~padding_mask).sum()
        elif ranks.size("tp_cp") > 1:
            local = torch.full((), local, device=logits.device)
        tokens = ranks.sum(local, ranks.tp_cp)
        if ranks.size("tp_cp") > 1:
            loss = loss * local / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(
            logits, coeff, aux_loss=loss, aux_loss_name="z_loss", reduce_group=ranks.tp_cp,
            valid_token_count=tokens)

    def _apply_losses(self, probs, logits_TE, padding_T, axes, cu_seqlens):
        """probs [T, K] with every balance loss that is on. axes: the tokens' [S, B], with
        batch_first [B, S], or [T]: one sequence, or a pack with the bounds cu_seqlens.
        """
        map_TE, scores_TE = kernels.compute_routing_scores_for_aux_loss(
            logits_TE, self.config.topk, score_function=self.config.score_function,
            padding_mask=padding_T)
        losses = self.config.losses
        if "aux_loss" in losses:
            probs = self._apply_aux_loss(probs, scores_TE, map_TE)
        if "seq_aux_loss" in losses:
            sequence_T, num_sequences = self._sequences(axes, cu_seqlens, map_TE.device)
            probs = self._apply_loss_of_sequences(
                probs, scores_TE, map_TE, sequence_T, num_sequences=num_sequences)
        if "global_aux_loss" in losses:
            probs = self._apply_global_aux_loss(probs, scores_TE, map_TE)
        return probs

    def _sequences(self, axes, cu_seqlens, device):
        """(each token's sequence [T], how many there are)."""
        token_T = torch.arange(math.prod(axes), device=device)
        if cu_seqlens is not None:
            # The numbers begin at 1. An empty sequence 0 is counted with them, so that there are
            # always two or more: the compiler would make a graph of its own for one sequence.
            return torch.searchsorted(cu_seqlens.long(), token_T, right=True), len(cu_seqlens)
        if len(axes) == 1:
            return torch.zeros_like(token_T), 1
        first, second = axes
        if self.config.batch_first:
            return token_T // max(second, 1), first
        return token_T % max(second, 1), second

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map):
        """probs with the switch loss attached (arXiv 2101.03961). scores and routing_map [T, E] are
        zero at padding; counts and T are summed over tp_cp.
        """
        group = self.pg_collection.tp_cp
        counts_E = self.pg_collection.sum(routing_map.sum(0), group)
        return self._attach_switch_loss("aux_loss", probs, scores_for_aux_loss, counts_E, group)

    def _apply_loss_of_sequences(self, probs, scores, routing_map, sequence_T, num_sequences):
        """probs with the mean of the switch losses of the sequences attached. Token t belongs to
        sequence sequence_T[t]. Counts and valid tokens are summed over tp_cp, and the mean is over
        all sequences that have tokens on some rank of it. A sequence of padding gives 0.
        """
        group = self.pg_collection.tp_cp
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        counts = kernels.sequence_counts(routing_map, sequence_T, num_sequences)
        counts = self.pg_collection.sum(counts, group)
        loss = kernels.switch_loss_of_sequences(
            scores, counts, sequence_T, self.config.topk, moe_aux_loss_coeff=coeff)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, aux_loss=loss, aux_loss_name=LOSS_NAMES["seq_aux_loss"],
            reduce_group=group,
            valid_token_count=counts[:, :-1].sum().to(scores.dtype) / self.config.topk)

    def _apply_global_aux_loss(self, probs, scores_for_aux_loss, routing_map):
        """probs with the global switch loss attached (arXiv 2501.11873). Counts and T are summed
        over tp_dp_cp. They are averaged over this forward and all forwards that have had their
        backward since reset_global_aux_loss_tracker.
        """
        ranks = self.pg_collection
        local_E = routing_map.sum(0)
        counts_E = ranks.sum(local_E, ranks.tp_dp_cp).float()
        sums_E, steps = self.global_tokens_per_expert, self.ga_steps
        # Otherwise the compiler might compute the mean in the backward, of sums that other
        # microbatches have changed since.
        probs, mean_E = keep_in_forward(probs, (sums_E + counts_E) / (steps + 1))
        mean_E = mean_E.to(scores_for_aux_loss.dtype)
        probs = self.counts.write(probs, sums_E, counts_E, add=True)
        probs = self.counts.write(probs, steps, torch.ones_like(steps), add=True)
        valid = ranks.sum(local_E.sum(), ranks.tp_cp).to(mean_E.dtype) / self.config.topk
        return self._attach_switch_loss(
            "global_aux_loss", probs, scores_for_aux_loss, mean_E, ranks.tp_dp_cp, valid=valid)

    def _attach_switch_loss(self, kind, probs, scores, counts_E, group, valid=None):
        """probs with the switch loss of these counts attached. valid: how many tokens are valid;
        None: Σ counts / K.
        """
        config = self.config
        coeff = self.get_aux_loss_coeff(kind)
        tokens = counts_E.sum().to(scores.dtype) / config.topk
        loss = kernels.switch_load_balancing_loss_func(
            scores, counts_E, total_num_tokens=tokens, topk=config.topk,
            num_experts=config.num_experts, moe_aux_loss_coeff=coeff)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, aux_loss=loss, aux_loss_name=LOSS_NAMES[kind], reduce_group=group,
            reduce_group_has_dp=kind == "global_aux_loss",
            valid_token_count=tokens if valid is None else valid)

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str,
        reduce_group, reduce_group_has_dp: bool = False,
        valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        """Returns activation, whose backward adds the gradient of aux_loss.

        aux_loss / aux_loss_coeff is kept for load_balancing_metrics, which sums it over
        reduce_group, and averages it over the data-parallel ranks unless reduce_group_has_dp. With
        calculate_per_token_loss the attached loss is multiplied by valid_token_count (by default
        the rows of the activation over tp_cp). ValueError: an unknown aux_loss_name.
        """
        compat.check_known("aux_loss_name", aux_loss_name, METRICS)
        sharers = None if reduce_group_has_dp else group_size(reduce_group)
        value = aux_loss.detach() / aux_loss_coeff
        activation = self.counts.log(activation, aux_loss_name, value, sharers)
        if self.config.calculate_per_token_loss:
            aux_loss = aux_loss * self._tokens_of(activation, valid_token_count)
        if compat.is_any_autocast():
            self._warn_without_scale(activation.device.type)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss, self.counts.loss_scale)

    def _tokens_of(self, activation, valid_token_count):
        if valid_token_count is None:
            return activation.shape[0] * self.pg_collection.size("tp_cp")
        return valid_token_count

    @torch.compiler.assume_constant_result           # so that a graph runs it while it is traced
    def _warn_without_scale(self, device_type):
        """fp16 needs a loss scale, which GradScaler multiplies into the main loss alone."""
        if self.counts.has_scale or not compat.has_autocast(device_type):
            return
        fp16 = torch.get_autocast_dtype(device_type) == torch.float16
        if fp16 and torch.is_autocast_enabled(device_type):
            warnings.warn(
                "balance losses under autocast to fp16, and set_aux_loss_scale was never called: "
                "with a GradScaler their gradients are too small by its scale. Needs "
                "set_aux_loss_scale(model, scaler.get_scale()) before each backward, or (model, "
                "1.0) without a scaler", stacklevel=2)

    # -- Megatron's names, which nothing here calls --

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [.., E] -> (probs [T, E], routing_map [T, E]): the top K of sinkhorn(logits) in
        training, of the logits in eval. The probs are the sigmoid (K = 1) or the softmax over all
        E, in the dtype of the logits.
        """
        probs_TK, indices_TK = self._choose_by_sinkhorn(logits.flatten(0, -2))
        return kernels.routing_to_map(probs_TK, indices_TK, self.config.num_experts)

    def is_aux_loss_enabled(self) -> bool:
        """Whether any balance loss is on."""
        return bool(self.config.losses)

    def _apply_seq_aux_loss(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz):
        """_apply_loss_of_sequences for B = bsz sequences: token s·B + b belongs to sequence b."""
        sequence_T = torch.arange(seq_length * bsz, device=probs.device) % max(bsz, 1)
        return self._apply_loss_of_sequences(
            probs, scores_for_aux_loss, routing_map, sequence_T=sequence_T, num_sequences=bsz)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """activation -> activation. In the backward `loss` gets the gradient `scale` (0-d), as if
    scale·loss were in the main loss. For Megatron's set_loss_scale see set_aux_loss_scale.
    """

    @staticmethod
    def forward(ctx, activation, loss, scale):
        # The scale may change between forward and backward, which save_for_backward would refuse.
        ctx.scale = scale
        ctx.dtype = loss.dtype
        return compat.as_no_view(activation, activation.shape)

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        # activation, loss, scale
        return grad, compat.copy_after(ctx.scale, grad).to(ctx.dtype), None


# ---- You have read the router. What it keeps: counts, written in the backward ----
# A checkpoint runs a forward twice, but its backward once.

@compat.op(lambda buffer, value, grad, add: None, mutates_args=("buffer",))
def _write(buffer: Tensor, value: Tensor, grad: Tensor, add: bool) -> None:
    """buffer += value, or buffer = value. `grad` is unused. It ties the op to the backward: without
    it the compiler would run the op in the forward, on the buffer's value there, and lose what
    other backwards add in between. A slice of the gradient is enough.
    """
    buffer.copy_(buffer + value if add else value)


def keep_in_forward(activation: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(activation, value), copied so that the compiler computes the value in the forward and keeps
    it. The value's copy is an op, which no graph computes again, and the activation's copy comes
    after it.
    """
    value = compat.copy_after(value, activation.detach())
    copied = compat.copy_after(activation.detach(), value)
    return kernels.straight_through(copied, gradient_of=activation), value


class _WriteInBackward(torch.autograd.Function):
    """activation -> activation. Its backward writes value to buffer: see _write."""

    @staticmethod
    def forward(ctx, activation, buffer, value, add):
        # Other backwards may write to the buffer first, which save_for_backward would refuse.
        ctx.buffer = buffer
        ctx.add = add
        ctx.save_for_backward(value)
        return compat.as_no_view(activation, activation.shape)

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        value, = ctx.saved_tensors
        _write(ctx.buffer, value, grad[:1] if grad.ndim else grad, ctx.add)
        # activation, buffer, value, add
        return grad, None, None, None


class RouterCounts:
    """What a router counts: plain tensors in fp32 (the histogram in int32), updated in place in the
    backward of a training forward. They are no buffers, since DistributedDataParallel would
    overwrite buffers by rank 0's. A tensor that is not configured is None.

    local_tokens_per_expert [E]      since the last update_expert_bias
    bias_histogram [E, 1000]         of needed biases, since then
    global_tokens_per_expert [E]     the running sum of the global loss
    ga_steps []                      forwards in that sum
    last_tokens_per_expert [E]       of the latest training forward, for load_balancing_metrics
    each name in LOGGED []           a loss of that forward, or its assignments over capacity
    loss_scale []                    no count: what set_aux_loss_scale has set; 1 without it
    """

    def __init__(self, config, tp_cp_size):
        E = config.num_experts

        def counter(*shape, dtype=torch.float32):
            return compat.with_fixed_address(torch.empty(shape, dtype=dtype))

        quantile = config.bias_update == "quantile"
        with_global = "global_aux_loss" in config.losses
        self.local_tokens_per_expert = counter(E) if config.enable_expert_bias else None
        self.bias_histogram = counter(E, 1000, dtype=torch.int32) if quantile else None
        self.global_tokens_per_expert = counter(E) if with_global else None
        self.ga_steps = counter() if with_global else None
        self.last_tokens_per_expert = counter(E)
        for name in LOGGED:
            setattr(self, name, counter())
        self.loss_scale = counter().fill_(1.0)
        self.has_scale = False                       # whether set_aux_loss_scale has set it
        # Name -> how many ranks share the value. None means all ranks, the data-parallel ones too.
        self.sharers = {**dict.fromkeys(METRICS, tp_cp_size), "global_load_balancing_loss": None,
                        "dropped": None}
        self.waiting = []                            # writes without a backward
        self.seen = None                             # for has_grown
        self.reset()

    def has_grown(self) -> bool:
        """Whether a backward has counted since the last call; True if the counts were moved since.
        Only versions are compared, since the values would need a sync.
        """
        old, self.seen = self.seen, compat.version_of(self.last_tokens_per_expert)
        return old != self.seen

    def tensors(self):
        """What is counted, by name."""
        return {name: x for name, x in vars(self).items()
                if isinstance(x, Tensor) and name != "loss_scale"}

    def count(self, activation, counts_E):
        activation = self.write(activation, self.last_tokens_per_expert, counts_E, add=False)
        if self.local_tokens_per_expert is not None:
            activation = self.write(activation, self.local_tokens_per_expert, counts_E, add=True)
        return activation

    def log(self, activation, name, value, sharers):
        """Returns activation, whose backward keeps the value for load_balancing_metrics."""
        # Dynamo refuses to write to an object in a checkpointed region of a graph. So this writes
        # only where the value changes, which it does in no forward of this file.
        if self.sharers[name] != sharers:
            self.sharers[name] = sharers
        return self.write(activation, getattr(self, name), value.float(), add=False)

    def write(self, activation, buffer, value, add):
        """Returns activation, whose backward adds value to buffer, or with add=False replaces the
        buffer's value. For an activation without a backward see attach_to.
        """
        if activation is None or not activation.requires_grad:
            self._defer(buffer, value, add)
            return activation
        return _WriteInBackward.apply(activation, buffer, value, add)

    def _defer(self, buffer, value, add):
        """Keeps a write for attach_to. All writes of one forward to one buffer add up."""
        others = []
        for write in self.waiting:
            if write[0] is buffer:
                value = value + write[1]
            else:
                others.append(write)
        self.set_waiting([*others, (buffer, value, add)])

    @compat.unchecked_side_effects
    def set_waiting(self, writes):
        self.waiting = writes

    def attach_to(self, activation):
        """Returns activation. Its backward also does the writes in `waiting`: those of
        _apply_expert_bias, or of a frozen router, whose probs need no gradient.
        """
        if self.waiting and activation.requires_grad:
            for write in self.waiting:
                activation = _WriteInBackward.apply(activation, *write)
            self.set_waiting([])
        return activation

    def shares(self, ranks):
        """For each name in LOGGED the number by which its sum over all ranks is divided."""
        shares = [ranks / (self.sharers[name] or ranks) for name in LOGGED]
        return self.last_tokens_per_expert.new_tensor(shares)

    def zero(self, *names):
        for name, tensor in self.tensors().items():
            if name in names:
                tensor.zero_()

    def set_scale(self, scale):
        with torch.no_grad():
            self.loss_scale.fill_(scale)
        self.has_scale = True

    def reset(self):
        """Empties what is counted. The loss scale stays."""
        self.zero(*self.tensors())
        for name in LOGGED:
            getattr(self, name).fill_(math.nan)
        self.has_grown()

    def move(self, fn):
        """Moves the counts to where fn moves a tensor. Their dtype stays, since a large count in
        bf16 no longer grows by 1. Their values stay too, even under to_empty. But on the meta
        device they have none, so from there they begin at 0.
        """
        was_meta = self.last_tokens_per_expert.is_meta
        for name, tensor in {**self.tensors(), "loss_scale": self.loss_scale}.items():
            device = fn(tensor).device
            moved = torch.empty_like(tensor, device=device) if was_meta else tensor.to(device)
            setattr(self, name, compat.with_fixed_address(moved))
        self.seen = None
        if was_meta:
            self.loss_scale.fill_(1.0)
            self.has_scale = False
            self.reset()

    def follow(self, device):
        """Moves the counts to this device, with their values."""
        with torch.inference_mode(False):            # else training could not update them
            self.move(lambda tensor: torch.empty_like(tensor, device=device))


# ---- Routers of a whole model ----

def _routers(model):
    return list(_named_routers(model).values())


def _named_routers(model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; needs a Module that contains a Router")
    routers = {
        name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not routers:
        raise ValueError(f"model ({type(model).__name__}) has no Router")
    return routers


def set_aux_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Sets the factor on the gradients of the balance losses and z-losses of this model's routers:
    the factor by which you multiply its main loss (a loss scaler's, 1 / microbatches), a float or a
    0-d tensor. It holds for every backward from now on, without a recompile. Each router keeps it,
    and a copy of the model copies it; no state dict has it. ValueError: another shape, or a router
    is on the meta device, where a scale would be lost.
    """
    if isinstance(scale, Tensor) and scale.ndim:
        raise ValueError(f"scale has shape {list(scale.shape)}; needs a float or a 0-d tensor")
    routers = _named_routers(model)
    for name, router in routers.items():
        router._bring_counts()
        if router.counts.loss_scale.is_meta:
            raise ValueError(f"{name or 'model'} is on the meta device; needs a device: call "
                             f"set_aux_loss_scale after to_empty")
    for router in routers.values():
        router.counts.set_scale(scale)


def finish_step(model: nn.Module, check_replicas: bool = False) -> None:
    """Ends a training step: updates the expert biases, and starts new averages for the global loss.
    Call it after the optimizer's step, once for all microbatches: docs/recipes.md has the place in
    Lightning and others. Collective.

    It warns if routers train and no backward has counted on this rank since the last call.

    A PipelineStage needs its input_args and output_args. Without them it may first run on empty
    tensors, and that forward would be counted.

    check_replicas: a RuntimeError names the MoE parameters and expert biases that ranks should hold
    alike and do not, as after a forgotten reduce_gradients. This costs one collective and a read of
    all weights, so use it in the first steps. ValueError: several ranks run, and a router has no
    group of them.
    """
    routers = _named_routers(model)
    training = [x for x in routers.values() if x.training and x.weight.requires_grad]
    counted = [router for router in routers.values() if router.counts.has_grown()]
    if training and not counted:
        warnings.warn(
            "no backward has counted on this rank since the last finish_step: a forward in train() "
            "is counted in its backward. Call finish_step once a step, after the backwards",
            stacklevel=2)
    update_expert_bias(model)
    for router in routers.values():
        router.reset_global_aux_loss_tracker()
        router.end_step()
    if check_replicas:
        for router in routers.values():
            if router.pg_collection.tp_dp_cp is None:
                _check_one_process("which of them hold one model is not known")
        biases = {
            f"{name}.expert_bias".lstrip("."): router.expert_bias
            for name, router in routers.items() if router.expert_bias is not None}
        ranks = next(iter(routers.values())).pg_collection
        ranks.compare_replicas(model, biases)


def _check_one_process(otherwise):
    """ValueError if several ranks run: for a router that has no group of all ranks."""
    ranks = compat.num_processes()
    if ranks > 1:
        raise ValueError(
            f"tp_dp_cp is None and {ranks} ranks run: {otherwise}. For one model on all ranks give "
            f"the layer their group, MoELayer(config, ProcessGroups.from_mesh(mesh[\"dp\"])); for "
            f"independent models ProcessGroups(tp_dp_cp=group) with a group of one rank")


def update_expert_bias(model: nn.Module) -> None:
    """Updates the expert bias of every router from the tokens of all ranks since the last update.
    Each bias moves by bias_update_rate towards an even load (arXiv 2408.15664), or becomes that of
    kernels.quantile_expert_bias with bias_update="quantile". finish_step calls this. Collective.
    ValueError: several ranks run, and a router has no group to sum its counts over.
    """
    routers = [router for router in _routers(model) if router.expert_bias is not None]
    for router in routers:
        if router.pg_collection.tp_dp_cp is None:
            _check_one_process("each would balance its own tokens, and their expert biases would "
                               "drift apart")
    counts = [
        router.local_tokens_per_expert.long() if router.bias_histogram is None
        else router.bias_histogram for router in routers]
    if routers:
        groups = [router.pg_collection.tp_dp_cp for router in routers]
        counts = routers[0].pg_collection.sums(counts, groups)
    for router, counted in zip(routers, counts):
        router._maintain_float32_expert_bias()
        if router.expert_bias.is_inference():        # a graph has cast it, in inference mode
            router.expert_bias = router.expert_bias.clone()
        config = router.config
        if config.bias_update == "quantile":
            bias = kernels.quantile_expert_bias(counted, router.expert_bias, config.topk)
        else:
            bias = kernels.get_updated_expert_bias(
                counted, router.expert_bias, expert_bias_update_rate=config.bias_update_rate)
        router.expert_bias.copy_(bias)
        router.counts.zero("local_tokens_per_expert", "bias_histogram")


class RoutingRecord:
    """What the routers chose: see record_routing. names: the routers' names in the model."""

    def __init__(self, routers):
        self.names = list(routers)
        self._routers = list(routers.values())
        self._kept = None

    @property
    def indices(self) -> list[Tensor | None]:
        """Each router's latest choice [T, K] int64 before dropping, in module order. Index E is
        unrouted. None: the router has not run.
        """
        return [indices for indices, _ in self._latest()]

    @property
    def probs(self) -> list[Tensor | None]:
        """The probs [T, K] of these indices, detached, 0 where an assignment was dropped."""
        return [probs for _, probs in self._latest()]

    def _latest(self):
        return self._kept or [router._recorded for router in self._routers]


@contextlib.contextmanager
def record_routing(model: nn.Module):
    """A context that gives a RoutingRecord of what the model's routers choose inside it, in eager
    and compiled code. It holds the latest forward. To keep all of a `generate`:

        model.register_forward_hook(lambda *_: kept.append(record.indices))      # kept = []

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
    """A context in which every router of the model takes `indices` as its choice, with new probs.

    indices: one tensor [T, K] per router, in module order, as record_routing gives them, or a
    tensor [layers, T, K], of any integer dtype. E is unrouted. A token with a -1, which inference
    engines write for what they do not know, is routed by the router. Run the backward inside the
    context too: outside of it a reentrant checkpoint would make a new choice, and its gradients
    would be wrong without an error. ValueError: no router, another number of layers, or nested on
    one model. In the forward, with the router's name: a wrong shape or dtype, None, or (in eager
    mode on a CPU) a number that is no expert's.
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
    """Metrics of each router's latest training forward that had its backward, layers in module
    order. For logging only: the losses are in the gradient already.

    "tokens_per_expert" [layers, max E] int64: before dropping, without padding; -1 where a
      layer has no such expert.
    "max_violation" [layers]: max_e n_e / mean n - 1 (arXiv 2408.15664).
    "dropped" [layers]: assignments over capacity, if any layer has one.
    the name of each loss that is on in any layer, [layers]: divided by its coefficient.
    A value is NaN in a layer without this loss, and before anything is counted.

    reduce: True: the values are of all ranks (collective). False: of this rank alone. Counts are
    summed. Losses are summed over the ranks that share them, and averaged over the others.
    ValueError: several ranks run, and a router has no group of them.
    """
    routers = _routers(model)
    counts = [router.counts.last_tokens_per_expert.long() for router in routers]
    logged = [
        torch.stack([getattr(router.counts, name) for name in LOGGED]) for router in routers]
    if reduce:
        groups = [
            router.pg_collection.tp_dp_cp or router.pg_collection.tp_cp for router in routers]
        if None in groups:
            _check_one_process("each would return its own values")
        ranks = routers[0].pg_collection
        counts = ranks.sums(counts, groups)
        logged = [
            sums / router.counts.shares(group_size(group))
            for sums, router, group in zip(ranks.sums(logged, groups), routers, groups)]

    on = set()
    for router in routers:
        on |= {LOSS_NAMES[kind] for kind in router.config.losses}
        if router.config.z_loss_coeff:
            on.add("z_loss")
        if router.config.capacity_factor is not None:
            on.add("dropped")
    # 0 / 0 before any forward
    violations = [
        (counts_E.amax() * counts_E.numel()).float() / counts_E.sum() - 1 for counts_E in counts]
    return {
        **{name: values for name, values in zip(LOGGED, torch.stack(logged, 1)) if name in on},
        "max_violation": torch.stack(violations),
        "tokens_per_expert": nn.utils.rnn.pad_sequence(
            counts, batch_first=True, padding_value=-1),
    }


# ---- Checks of a router's arguments ----

def refuse_input(input, config):
    axes = "B, S" if config.batch_first else "S, B"
    raise ValueError(f"input has shape {list(input.shape)}; "
                     f"needs [{axes}, {config.hidden_size}] or [T, {config.hidden_size}]")


def _check_sequences(config, axes):
    """ValueError: seq_aux_loss cannot know which tokens are a sequence."""
    H = config.hidden_size
    if len(axes) == 2 and config.batch_first is None:
        raise ValueError(f"batch_first is None, and seq_aux_loss has to know which of the axes "
                         f"{axes} is the sequence; needs batch_first=True for [B, S, {H}] or "
                         f"batch_first=False for [S, B, {H}]")
    if len(axes) == 1 and config.batch_first is not None:
        raise ValueError(f"cu_seqlens is None, and input is [T, {H}]: seq_aux_loss would be of one "
                         f"sequence of {axes[0]} tokens, and batch_first={config.batch_first} "
                         f"promises sequences; needs their bounds cu_seqlens, an axis for them, or "
                         f"batch_first=None if it is one")


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


def _can_be_read(tensor):
    """Whether a check may read the values: in eager mode on a CPU. Elsewhere it would sync."""
    return tensor.is_cpu and not torch.compiler.is_compiling() and compat.has_values(tensor)


def _check_obeyed(router, obeyed_TK):
    others = obeyed_TK.numel() - int(obeyed_TK.sum())
    if others:
        raise ValueError(f"{type(router).__name__}.choose was given topk_indices and returned "
                         f"{others} of {obeyed_TK.numel()} others; needs the given ones, each in "
                         f"its slot, and E in place of repeats: see kernels.merge_repeats")


def _check_range(name, indices, least, most):
    if indices.numel() and _can_be_read(indices):
        low, high = (int(x) for x in indices.long().aminmax())
        if low < least or high > most:
            raise ValueError(f"{name} has values from {low} to {high}; needs {least} to {most}, "
                             f"where {most} is unrouted")


def _check_bounds(cu_seqlens, axes):
    integer = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or not cu_seqlens.numel() or not integer:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)} {cu_seqlens.dtype}; "
                         f"needs [n + 1] torch.int32 or torch.int64, the bounds of n sequences")
    if len(axes) == 2 and 1 not in axes:
        raise ValueError(f"cu_seqlens is for packed sequences, and input has {list(axes)} tokens; "
                         f"needs [T], or one axis of length 1")
    if _can_be_read(cu_seqlens):
        bounds = cu_seqlens.tolist()
        T = math.prod(axes)
        if bounds[0] != 0 or bounds[-1] != T or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens is {bounds}; needs 0 first, ascending, {T} last")
