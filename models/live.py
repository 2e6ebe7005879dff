"""Router and experts of this project in a live model of the Hugging Face library, with its weights:

    replace_blocks(model, enable_expert_bias=True, bias_update="quantile")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[MoECallback()])
    restore_blocks(model)
"""
import copy
import dataclasses
import functools
import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if __package__ == "models":                  # beside the flat files of the layer
    import moe
    from base import OneProcess
    from models.configs import OF_THE_BLOCK, read_config, router_dtypes, type_of
    from models.experts import OURS, experts_forward, options_of, register_experts
    from models.reader import listed
    from models.table import family, layer_of, prefixes_of, tensors_of
    from ranks.sharding import share_out
else:                                        # the layer is a package
    from .. import moe
    from ..base import OneProcess
    from ..ranks.sharding import share_out
    from .configs import OF_THE_BLOCK, read_config, router_dtypes, type_of
    from .experts import OURS, experts_forward, options_of, register_experts
    from .reader import listed
    from .table import family, layer_of, prefixes_of, tensors_of


# ---- Replace and restore ----

def replace_blocks(
    model: nn.Module, *, pg_collection: OneProcess | None = None, padding_mask: bool = True,
    **changes,
) -> list[str]:
    """Makes the MoE blocks of a live Hugging Face model route as TopKRouter and compute their
    experts by kernels.expert_mlp. Returns the blocks' names. restore_blocks is the way back.

    Two forwards are replaced, the gate's and the experts'. Modules, parameters, buffers and their
    names, shared experts and what a block returns stay. No weight is copied: each forward looks the
    library's tensors up. A gate gets one submodule, `moe_router`, with the counts and with what
    `changes` add.

    pg_collection: the groups of the ranks. Over ep the library's experts become this rank's E / ep
      experts, under the same names. Every rank needs the same whole model, and has to run every
      forward and backward. Make the optimizer after the call; state_dict() has DTensors for the
      experts, and save_pretrained needs a state_dict of whole tensors.
    padding_mask: whether the routers get the padding of the attention_mask [B, M], 1 = token; its
      last S columns count. Masks of another form are ignored.
    changes: the router's fields of MoEConfig, such as enable_expert_bias=True,
      bias_update="quantile". Biases start at zero. Without router_dtype a router has the precision
      of the library's gate, and chooses as that does.

    All is checked before the first block is touched. ValueError: an unknown model type, no block, a
    router that cannot be expressed, a field of the block in changes, tensors on the meta device,
    several ranks in tp, experts that ep does not divide. TypeError: no model of the library, or an
    unknown field in changes. NotImplementedError: experts that cannot be expressed.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; "
                        f"needs a model of the Hugging Face library")
    for name in changes:
        if name in OF_THE_BLOCK:
            raise ValueError(f"changes has {name}, which the library's block decides itself; needs "
                             f"fields of the router. For another layer see from_hf")
    model_type, _ = type_of(model.config)
    row = family(model_type)
    prefixes = prefixes_of(tensors_of(model), row.layouts[-1:])
    names = [prefix.removesuffix(".") for prefix in prefixes]
    done = [name for name in names
            if hasattr(_gate_of(model.get_submodule(name), row), "moe_router")]
    names = [name for name in names if name not in done]
    if not names:
        raise ValueError(f"model has no {model_type} block to replace; "
                         f"replaced already: {listed(done, ', ') or 'none'}")
    if any(tensor.is_meta for tensor in tensors_of(model).values()):
        raise ValueError("model has tensors on the meta device; needs weights: load it first")
    groups = pg_collection or OneProcess()
    if groups.size("tp") > 1:
        raise ValueError(f"pg_collection has {groups.tp.size()} ranks in tp; needs one: "
                         f"each rank gives a block its own whole sequences")
    routers = {name: _router_for(model, name, row, changes, groups) for name in names}

    register_experts()
    batch = Batch(padding_mask)
    batch.saved_files = SavedFiles(model)
    batch.hooks.append(batch.saved_files.hook)
    for name, router in routers.items():
        router.batch = batch
        _put_router(model, name, row, router)
    for name, router in routers.items():         # Blocks share a config: all have read it by now.
        if router.experts_before:
            model.get_submodule(name).experts.config._experts_implementation = OURS

    # Also the library's models inside it that have blocks: a text model may run alone.
    for path, module in model.named_modules():
        has_blocks = any(name.startswith(path) for name in names)
        if has_blocks and hasattr(module, "get_input_embeddings"):
            batch.follow(module)
    if groups.size("ep") > 1:
        model.save_pretrained = functools.partial(_save_pretrained, model)
    return names


def restore_blocks(model: nn.Module) -> list[str]:
    """Gives the blocks of replace_blocks the library's forwards again, and returns their names. The
    library's tensors stay; what `changes` added is gone. ValueError: no block is replaced.
    RuntimeError: the experts are spread over ranks, or a gate's forward was replaced again.
    """
    model = getattr(model, "_orig_mod", model)
    gates = {name: module for name, module in model.named_modules()
             if "moe_router" in module._modules}
    if not gates:
        raise ValueError("model has no block that replace_blocks has replaced")
    for name, gate in gates.items():
        router = gate.moe_router
        if router.pg_collection.size("ep") > 1:
            raise RuntimeError(f"the experts beside {name} are spread over ranks; needs a model of "
                               f"one process: load sharded_state_dict(model) there")
        if not _has_forward(gate, *GATE_FORWARDS):
            raise RuntimeError(f"{name} has another forward than that of replace_blocks; needs "
                               f"that what was put on it since is taken off")
    for hook in router.batch.hooks:
        hook.remove()
    for module in model.modules():
        slot = _slot(module)
        if _has_forward(module, *REPLACEMENTS):
            delattr(module, slot)
            if slot != "forward":
                _put_forward(module, type(module).forward)
        if getattr(vars(module).get("_apply"), "func", None) is _apply_to_block:
            del module._apply
        router = vars(module).pop("moe_router", None)        # of experts
        if router and router.experts_before and _are_ours(module):
            module.config._experts_implementation = router.experts_before
    for gate in gates.values():
        del gate.moe_router
    return [name.rpartition(".")[0] for name in gates]


def _save_pretrained(model, *args, state_dict=None, **kwargs):
    """save_pretrained of a model whose experts are spread over ranks."""
    if state_dict is None:
        raise RuntimeError(
            "a rank has a part of the experts, and the library writes no DTensors: give "
            "save_pretrained a state_dict= of whole tensors, as docs/models.md does")
    return type(model).save_pretrained(model, *args, state_dict=state_dict, **kwargs)


# ---- A guest: the router of a library's gate ----

def _of_the_library(name):
    """The library's tensor, looked up at each use in the module that holds it: so what offload,
    FSDP2, PEFT or a tp plan put there is followed.
    """
    def get(router):
        if name not in router.places:
            return None
        tensor = getattr(*router.places[name])
        return tensor if name == "weight" else tensor.flatten()        # ERNIE's bias is [1, E]

    def put(router, value):
        module, attribute = router.places[name]
        old = getattr(module, attribute)
        if isinstance(old, nn.Parameter):                    # Laguna's, without a gradient
            old.data = value.view_as(old)
        else:
            setattr(module, attribute, value.view_as(old))
    return property(get, put)


class Guest(moe.TopKRouter):
    """A TopKRouter that computes with the tensors of a library's gate, and holds none of them.

    places: weight, bias, expert_bias, and hash_table -> (module, attribute).
    batch: what the model's forward knows of its texts.
    dtypes: the dtypes of model and gate weight -> fields of MoEConfig.
    experts_before: the experts implementation that ours replaced.
    """
    weight = _of_the_library("weight")
    bias = _of_the_library("bias")
    expert_bias = _of_the_library("expert_bias")

    def __init__(self, config: moe.MoEConfig, places: dict, pg_collection: OneProcess):
        vars(self)["places"] = places
        super().__init__(config, pg_collection)
        self.batch = Batch()
        self.had_batch = False                               # in a training forward that needs it
        self.dtypes = None
        self.experts_before = None

    def make_tensors(self) -> None:
        """Makes what the config asks for and the library's gate has no place for."""
        E = self.config.num_experts
        if self.config.router_bias and "bias" not in self.places:
            self.added_bias = nn.Parameter(torch.zeros(E, dtype=self.weight.dtype))
            self.places["bias"] = self, "added_bias"
        if self.config.enable_expert_bias and "expert_bias" not in self.places:
            self.register_buffer("added_expert_bias", torch.zeros(E, dtype=torch.float32))
            self.places["expert_bias"] = self, "added_expert_bias"

    def reset_parameters(self) -> None:
        """Empties the counts. The library draws its tensors itself."""
        self.reset_counts()

    def __setstate__(self, state):
        super().__setstate__(state)
        register_experts()                                   # unpickled in another process

    def __deepcopy__(self, memo):
        """A gate that is copied alone, as PEFT does, keeps reading its model's masks. A copied
        model has copied them with its hooks, before its modules.
        """
        memo.setdefault(id(self.batch), self.batch)
        memo[id(self)] = new = object.__new__(type(self))
        new.__setstate__(copy.deepcopy(vars(self), memo))
        return new

    def as_gate(self, hidden_states: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [T, H] or [B, S, H] -> (logits [T, E], probs [T, K], indices [T, K])."""
        self.begin_counting()                               # the library calls its own gate
        axes, padding_T, cu_seqlens = self.batch.of(self, hidden_states)
        chosen_TK = None
        if "hash_table" in self.places:                      # others are the model's input_ids
            chosen_TK = getattr(*self.places["hash_table"])[others[0].flatten()]
        input = hidden_states.reshape(*axes, -1)
        if self.config.input_jitter_eps:
            input = self.apply_input_jitter(input)
        logits = self.gating(input)
        probs_TK, indices_TK = self.route_logits(
            logits, padding_T, chosen_TK, cu_seqlens=cu_seqlens)
        if self.experts_before and not self.batch.has_our_experts:
            indices_TK = self._for_the_library(indices_TK)
        return logits.flatten(0, -2), probs_TK, indices_TK

    def _for_the_library(self, indices_TK):
        """Indices for the library's experts, which do not know index E: an unrouted assignment goes
        to expert 0 with prob 0.
        """
        if self.pg_collection.size("ep") > 1:
            raise RuntimeError(f"another implementation computes the experts, of which each rank "
                               f"has a part; needs model.set_experts_implementation({OURS!r})")
        return indices_TK % self.config.num_experts


def _route(gate, hidden_states, *others):
    return gate.moe_router.as_gate(hidden_states, *others)


def _llama4_route(gate, hidden_states):
    """The forward of a Llama 4 gate, whose second result is the logits."""
    logits_TE, probs_T1, indices_T1 = gate.moe_router.as_gate(hidden_states)
    return probs_T1, logits_TE, indices_T1


def _llama4_block(block, hidden_states):
    """The forward of a Llama 4 block. The library's computes every expert for every token."""
    x_TH = hidden_states.flatten(0, -2)
    probs_T1, logits_TE, indices_T1 = block.router(hidden_states)
    y_TH = experts_forward(
        block.experts, (x_TH * probs_T1).to(x_TH.dtype), indices_T1, torch.ones_like(probs_T1))
    return block.shared_expert(x_TH) + y_TH, logits_TE


def _dbrx_block(block, hidden_states):
    """The forward of a DBRX block, whose gate returns only logits."""
    _, probs_TK, indices_TK = block.router(hidden_states)
    y_TH = experts_forward(block.experts, hidden_states.flatten(0, -2), indices_TK, probs_TK)
    return y_TH.view_as(hidden_states)


# Blocks that do not call gate(x) -> (logits, probs, indices), then experts(x, indices, probs):
# class -> forward of its gate, and its own
BLOCK_FORWARDS = {"Llama4TextMoe": (_llama4_route, _llama4_block), "DbrxFFN": (_route, _dbrx_block)}
GATE_FORWARDS = _route, _llama4_route
REPLACEMENTS = *GATE_FORWARDS, experts_forward, _llama4_block, _dbrx_block


def _apply_to_block(block, router, fn, recurse=True):
    """nn.Module._apply, which model.to(..) calls: the expert bias keeps its dtype, and the router
    gets the precision of the library's gate in the new dtype.
    """
    bias = router.expert_bias
    if bias is not None:
        bias = bias.detach()                                 # Laguna's is cast in place
    type(block)._apply(block, fn, recurse)
    if bias is not None and router.expert_bias.dtype != bias.dtype:
        router.expert_bias = bias.to(router.expert_bias.device)
    dtype = next(block.experts.parameters()).dtype
    if dtype.is_floating_point:
        fields = router.dtypes(dtype, router.weight.dtype)
        router.set_config(dataclasses.replace(router.config, **fields))
    return block


def _slot(module):
    """The attribute that holds a module's forward. accelerate's hooks take the name `forward`, and
    keep the forward under another.
    """
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _has_forward(module, *functions):
    return getattr(vars(module).get(_slot(module)), "func", None) in functions


def _put_forward(module, function):
    """Puts a forward in the place of the module's. It is a partial, which survives deepcopy and
    pickle.
    """
    setattr(module, _slot(module), functools.partial(function, module))


def _are_ours(holder):
    """Whether our function computes the experts of this model or module."""
    return holder.config._experts_implementation == OURS


def _gate_of(block, row):
    return block.get_submodule(next(iter(row.layouts[-1])).split(".")[0])


def _router_for(model, name, row, changes, groups):
    """A Guest for the block with this name. The model is not changed yet."""
    block = model.get_submodule(name)
    fields = {"params_dtype": model.dtype}
    path = next(iter(row.layouts[-1]))
    weight = tensors_of(block)[path]
    if row.block_scales:
        fields["scaling_factor"] = None
    dtypes = functools.partial(_dtypes_of_gate, row.precision, changes)
    fields |= dtypes(model.dtype, weight.dtype)
    reading = read_config(model.config, layer_of(name))
    reading.refuse(reading.problems)
    published = {field: value for field, value in reading.fields.items()
                 if field not in OF_THE_BLOCK}
    config = moe.MoEConfig(
        **{**published, "ffn_hidden_size": 1, "batch_first": True, **fields, **changes})

    shape = [config.num_experts, config.hidden_size]
    ranks = groups.size("ep")
    if list(weight.shape) != shape:
        raise ValueError(f"{name}.{path} is {list(weight.shape)}; needs {shape}")
    if config.num_experts % ranks:
        raise ValueError(f"num_experts is {config.num_experts}; "
                         f"needs a multiple of the ep size, {ranks}")
    if ranks > 1 and any(isinstance(p, DTensor) for p in block.experts.parameters()):
        raise ValueError(f"{name}.experts has DTensors; needs whole tensors, to cut them over ep: "
                         f"call fully_shard after replace_blocks")
    options_of(block.experts)                               # refuses what cannot be expressed

    used = {"router.weight": True, "router.bias": config.router_bias, "hash_table": True,
            "router.expert_bias": config.enable_expert_bias}
    places = {}
    for path, slot in row.layouts[-1].items():
        if used.get(slot.parameter) and path in tensors_of(block):
            owner, _, attribute = path.rpartition(".")
            places[slot.parameter.removeprefix("router.")] = block.get_submodule(owner), attribute
    with torch.device(weight.device):
        router = Guest(config, places, groups)
    router.dtypes = dtypes
    return router


def _dtypes_of_gate(precision, changes, dtype, gate_dtype):
    """The dtypes of a router, as fields of MoEConfig: those of `changes`, else those that the
    library's gate has in a model of this dtype.
    """
    fields = {"probs_dtype": None}
    if "router_dtype" not in changes:
        fields |= router_dtypes(precision, dtype, gate_dtype)
    return {name: changes.get(name, value) for name, value in fields.items()}


def _put_router(model, name, row, router):
    """Puts the router under the gate, and the forwards in the place of the library's."""
    block = model.get_submodule(name)
    gate = _gate_of(block, row)
    experts = block.experts
    gate.moe_router = router.train(gate.training)
    block._apply = functools.partial(_apply_to_block, block, router)
    vars(experts)["moe_router"] = router
    of_the_gate, of_the_block = BLOCK_FORWARDS.get(type(block).__name__, (_route, None))
    _put_forward(gate, of_the_gate)
    if of_the_block:
        _put_forward(block, of_the_block)
    elif hasattr(experts, "has_gate"):          # its own forward looks up the implementation
        router.experts_before = experts.config._experts_implementation
    else:
        _put_forward(experts, experts_forward)

    groups = router.pg_collection
    if groups.tp_dp_cp is None:
        return
    over_ep = set(experts.modules()) if groups.size("ep") > 1 else set()
    for module in over_ep:
        for own, whole in module.named_parameters(recurse=False):
            part = whole.detach().chunk(groups.ep.size())[groups.ep.rank()].clone()
            setattr(module, own, nn.Parameter(part, requires_grad=whole.requires_grad))
    for module in block.modules():
        share_out(module, groups, over_ep=module in over_ep)


# ---- What save_pretrained has written, by load_state_dict ----

class Renamed(NamedTuple):
    """Tensors of a save_pretrained file that make tensors of the model.

    transform: the library's, from the one to the other. pattern: published name -> its pattern.
    """
    transform: object
    pattern: dict[str, str]


class SavedFiles:
    """Lets load_state_dict of a live model take what save_pretrained has written, as the library's
    Trainer does to resume. Otherwise tensors that from_pretrained renames or lays out anew would
    be left out.

    waiting: name in the model -> published name -> tensor, of those cut between files.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.waiting = {}
        self.hook = model.register_load_state_dict_pre_hook(self.take)

    @functools.cached_property
    def renamed(self) -> dict[str, Renamed]:
        """Name in the model, the first of several -> what it is made of."""
        from transformers.core_model_loading import (
            WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion)
        from transformers.conversion_mapping import get_model_conversion_mapping
        shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                  for name, tensor in self.model.state_dict().items()}
        transforms = getattr(self.model, "_weight_conversions", None)
        if transforms is None:
            transforms = get_model_conversion_mapping(self.model, add_legacy=False)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        found = {}
        for name in revert_weight_conversion(self.model, shapes):
            first, pattern = rename_source_key(
                name, renamings, converters, self.model.base_model_prefix, shapes)
            transform = of_pattern.get(pattern) or WeightRenaming(name, first)
            found.setdefault(first, Renamed(transform, {})).pattern[name] = pattern or name
        return {first: each for first, each in found.items() if each.pattern.keys() - shapes.keys()}

    def take(self, model, state, prefix, *_):
        known = {prefix + name for name in model.state_dict()}
        if all(name in known for name in state if name.startswith(prefix)):
            return
        for first, (transform, pattern) in self.renamed.items():
            given = {name: state.pop(prefix + name) for name in pattern if prefix + name in state}
            if not given:
                continue
            given = self.waiting.pop(first, {}) | given
            if len(given) < len(pattern):
                self.waiting[first] = given
                continue
            transform = copy.deepcopy(transform)
            for name in pattern:                             # experts in their order
                transform.add_tensor(first, name, pattern[name], given[name])
            made = transform.convert(first, model=model, config=model.config)
            for name, tensor in made.items():
                state[prefix + name] = tensor[0] if isinstance(tensor, list) else tensor


# ---- What a block does not see of the model's forward ----

class Texts(NamedTuple):
    """What a forward is given of its texts: tokens [B, S] or embeddings [B, S, H]; the
    attention_mask [B, M], 0 = padding, whose last S columns are the tokens'; the bounds cu_seqlens
    [n + 1] of packed texts.
    """
    tokens: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


# argument of a model's forward -> field of Texts. If both token arguments are given, input_ids is
# taken.
FOUND = {"inputs_embeds": "tokens", "input_ids": "tokens", "attention_mask": "mask",
         "cu_seq_lens_q": "cu_seqlens"}


class Batch:
    """The texts of the model's forward, for all its routers.

    texts: None while no forward runs. So one thread at a time may run the model. (No
      threading.local: a graph of torch 2.13 writes it in vain.)
    saved_files: takes what save_pretrained wrote. A forward refuses a part of a checkpoint.
    """

    def __init__(self, padding_mask: bool = True):
        self.padding_mask = padding_mask
        self.texts = None
        self.has_our_experts = True
        self.saved_files = None
        self.hooks = []

    def follow(self, model: nn.Module) -> None:
        names = tuple(inspect.signature(model.forward).parameters)
        enter = functools.partial(self.enter, names)
        self.hooks += [model.register_forward_pre_hook(enter, with_kwargs=True),
                       model.register_forward_hook(self.leave, always_call=True)]

    def enter(self, names, model, args, kwargs):
        if self.saved_files.waiting:
            waiting = listed(list(self.saved_files.waiting), ", ")
            raise RuntimeError(f"load_state_dict got a part of what makes {waiting}; "
                               f"needs all files of the checkpoint")
        given = dict(zip(names, args), **kwargs)
        mask = given.get("attention_mask")
        if not self.padding_mask or not isinstance(mask, Tensor) or mask.ndim != 2:
            given["attention_mask"] = None
        found = {ours: given[name] for name, ours in FOUND.items() if given.get(name) is not None}
        # If an outer model runs, what this forward is not given keeps the outer model's value.
        self.texts = (self.texts or Texts())._replace(**found)
        self.has_our_experts = _are_ours(model)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for module in model.modules():
                checkpoint = vars(module).get("_gradient_checkpointing_func")
                if checkpoint and getattr(checkpoint, "func", None) != self.checkpoint:
                    checkpoint = functools.partial(self.checkpoint, checkpoint)
                    module._gradient_checkpointing_func = checkpoint

    def leave(self, model, args, output):
        self.texts = None

    def of(self, router: Guest, hidden_states: Tensor) -> tuple:
        """(the axes of the tokens, their padding [T] bool or None, cu_seqlens or None)."""
        axes = list(hidden_states.shape[:-1])
        texts = self.texts
        by_sequence = "seq_aux_loss" in router.config.losses
        needed = texts is not None and (by_sequence or texts.mask is not None)
        if router.training and not torch.compiler.is_compiling():
            router.had_batch |= needed
            if router.had_batch and texts is None and moe.compat.in_backward():
                raise RuntimeError(
                    "a checkpoint that is not the library's recomputes this block, without its "
                    "padding mask and its sequences: use model.activation_checkpointing_enable(), "
                    "or replace_blocks(model, padding_mask=False) without seq_aux_loss")
        if not needed:
            return axes, None, None
        padding, known = None, texts.tokens if texts.mask is None else texts.mask
        if len(axes) == 1 and known is not None:
            axes = [len(known), axes[0] // len(known)]
        if texts.mask is not None:
            padding = (texts.mask[:, -axes[-1]:].to(hidden_states.device) == 0).flatten()
        return axes, padding, texts.cu_seqlens

    def checkpoint(self, checkpoint, function, *args):
        """checkpoint(function, *args), whose recomputation has the texts of this forward."""
        if torch.compiler.is_compiling():                    # a graph keeps the texts itself
            return checkpoint(function, *args)
        texts = self.texts

        def with_texts(*args):
            outside = self.texts
            self.texts = texts
            try:
                return function(*args)
            finally:
                self.texts = outside
        return checkpoint(with_texts, *args)


# ---- The library's Trainer ----

@functools.cache
def _callback_class(cls):
    """cls, also derived from the library's TrainerCallback. It gets that base here, so that this
    file can be imported without the library.
    """
    from transformers import TrainerCallback
    if issubclass(cls, TrainerCallback):
        return cls
    return type(cls.__name__, (cls, TrainerCallback), {})


class MoECallback:
    """Does in the library's Trainer what a training loop does around MoELayers:

        Trainer(model, args, train_dataset=data, callbacks=[MoECallback()])

    Before a step it sets the scale of the balance losses from gradient_accumulation_steps and
    the fp16 loss scaler; after the optimizer's step it calls finish_step. To the training logs
    and state.log_history it adds load_balancing_metrics, each as the mean over the layers whose
    router has run: over all ranks if the routers know the group of all, else this rank's.

    The last accumulation of an epoch may be shorter: its balance losses are weaker. The Trainer
    calls the reporters of report_to before given callbacks. For them to see the metrics, leave
    the callback out of `callbacks` and put it first:

        trainer.callback_handler.callbacks.insert(0, MoECallback())
    """

    def __new__(cls):
        return object.__new__(_callback_class(cls))

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **others):
        scale = 1.0 / args.gradient_accumulation_steps
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            scale = scale * scaler.get_scale()
        moe.set_aux_loss_scale(model, scale)

    def on_optimizer_step(self, args, state, control, model=None, **others):
        moe.finish_step(model)

    def on_log(self, args, state, control, model=None, logs=None, **others):
        if "loss" not in logs:                           # an evaluation's, or the last summary
            return
        routers = [module for module in model.modules() if isinstance(module, moe.Router)]
        known = all(router.pg_collection.tp_dp_cp is not None for router in routers)
        metrics = moe.load_balancing_metrics(model, reduce=known)
        del metrics["tokens_per_expert"]
        means = {name: value.nanmean().item() for name, value in metrics.items()}
        logs.update(means)
        state.log_history[-1].update(means)

    def on_train_end(self, args, state, control, model=None, **others):
        moe.set_aux_loss_scale(model, 1.0)
