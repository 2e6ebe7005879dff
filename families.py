"""Published Mixture-of-Experts models as one table of knobs; their weights into the layer and out again.

    layer = from_hf(MoELayer(config_from_hf(hf_config)), tensors, "qwen3_moe", prefix="model.layers.3.mlp.")
    tensors = to_hf(layer, "qwen3_moe", prefix="model.layers.3.mlp.")

Configs are dicts or objects with attributes, tensors plain mappings: no other library is needed.
For live models of the Hugging Face library there are two ways in:

    replace_blocks(model, enable_expert_bias=True, bias_update="quantile")     # the whole layer
    model.set_experts_implementation(register_experts())                       # its experts alone

The table FAMILIES is at the end. Balance losses stay off (set load_balancing_type with
dataclasses.replace, or as a change of replace_blocks). Letters: kernels.py.
"""
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

if __package__:
    from . import moe
else:
    import moe


# ---- A row of the table ----

class Family(NamedTuple):
    """knobs: MoEConfig field -> a constant, or a function of the config's Reader; what is left out has its default.

    layouts: the first as published, then as held in memory; each from a tensor's name behind the prefix to where it lies,
    "parameter[part] axes". A name with {e} stands for one tensor per expert; part is an index of axis p (gate, up); axes
    are those of the file, einops style: "e h (f p)" is gate and up interleaved. needs: config field -> the values with
    which the layer computes the same model; absent is fine too. others: a pattern for the names
    behind the prefix that are not the layer's, and are neither read nor written. returns: what the
    library's block gives beside its output, "probs" [T, K] or "logits" [T, E].
    """
    knobs: dict[str, object]
    layouts: tuple[dict[str, str], ...]
    needs: dict[str, tuple] = {}
    others: str = ""
    returns: str = ""


AXES = {"router.weight": "e h", "router.bias": "e", "router.expert_bias": "e",
        "experts.fc1": "e p f h", "experts.fc2": "e h f",
        "experts.fc1_bias": "e p f", "experts.fc2_bias": "e h",
        "shared_experts.fc1": "p s h", "shared_experts.fc2": "h s", "shared_experts.gate_weight": "1 h",
        "latent.down": "l h", "latent.up": "h l", "latent.norm": "l", "hash_table": "v k"}
DTYPES = ("float64", "float32", "bfloat16", "float16")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
QUANTISED = "quantization_config is given; needs dequantised weights and a config without it"
_ABSENT = object()


# ---- Configs ----

class Reader:
    """Reads a published config, a mapping or an object with attributes; keeps what was read and what cannot be."""

    def __init__(self, config, layer_idx: int | None = None):
        self.config, self.layer_idx = config, layer_idx
        self.names, self.problems = set(), []

    def look(self, name: str):
        """The value of a field, or _ABSENT; "ffn_config.moe_top_k" is a field inside another. A
        list has one value per layer: layer_idx chooses; without it all have to be equal."""
        value = self.config
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else getattr(value, part, _ABSENT)
        if not isinstance(value, (list, tuple)):
            return value
        index = self.layer_idx or 0
        if index >= len(value):
            self.problems.append(f"{name} has {len(value)} values; layer_idx is {self.layer_idx}")
            return None
        if self.layer_idx is None and any(x != value[0] for x in value):
            several = " or ".join(dict.fromkeys(map(repr, value)))
            self.problems.append(f"{name} is {several}, by layer; needs layer_idx")
        return value[index]

    def get(self, name: str):
        """The value of a field, None where it is absent."""
        value = self.look(name)
        return None if value is _ABSENT else value

    def __call__(self, *names: str, default=_ABSENT, among: dict | None = None):
        """The value under any of the names, or the default. among: published value -> knob, others are refused."""
        self.names.update(names)
        found = {name: value for name in names if (value := self.look(name)) is not _ABSENT}
        values = list(found.values()) or [default]
        if any(value != values[0] for value in values):
            got = " and ".join(f"{name} = {value!r}" for name, value in found.items())
            self.problems.append(f"{got} contradict each other")
        if values[0] is _ABSENT:
            self.problems.append(f"{' or '.join(dict.fromkeys(names))} is missing")
            return None
        if among is None:
            return values[0]
        if values[0] not in list(among):                               # ==, since a published value may not be hashable
            self.problems.append(f"{next(iter(found), names[0])} is {values[0]!r}; needs {_or(among)}")
            return None
        return among[values[0]]


def _or(values) -> str:
    return " or ".join(map(repr, values))


def _listed(items: list[str], separator: str) -> str:
    """The first ten, and how many there are."""
    more = [f".. {len(items)} in all"] if len(items) > 10 else []
    return separator.join([*items[:10], *more])


def _family(model_type) -> Family:
    if model_type in INEXPRESSIBLE:
        raise ValueError(f"model_type is {model_type!r}: {INEXPRESSIBLE[model_type]}")
    if model_type not in TYPES:
        raise ValueError(f"model_type is {model_type!r}; known: {', '.join(FAMILIES)}")
    return TYPES[model_type]


def _type_of(hf_config, layer_idx: int | None = None) -> tuple[str, list[Reader]]:
    """(model_type, a Reader of every config, the innermost first)"""
    reads = [Reader(hf_config, layer_idx)]
    while (inner := reads[0].get("text_config")) is not None:
        reads.insert(0, Reader(inner, layer_idx))
    types = [each.get("model_type") for each in reads]
    known = [name for name in types if name in TYPES or name in INEXPRESSIBLE]
    return known[-1] if known else types[0], reads


def config_from_hf(hf_config, layer_idx: int | None = None) -> moe.MoEConfig:
    """The MoE layer of a published config: config.json as a dict, the library's to_dict(), or its
    object. The model_type chooses the row; with a text_config inside, the outermost known type
    chooses, and the fields are those of the innermost config.

    layer_idx: the number of the layer. A config whose MoE layers differ needs it.
    params_dtype is the config's dtype or torch_dtype, the inner's before the outer's, and fp32
    without both. Whatever else a config leaves out has its published default, but sizes have to be
    there. ValueError lists all that the layer cannot express: it computes what was published, or
    nothing.
    """
    model_type, reads = _type_of(hf_config, layer_idx)
    read = reads[0]
    row = _family(model_type)
    values = {name: knob(read) if callable(knob) else knob for name, knob in row.knobs.items()}
    # the library's objects have dtype, and warn when asked for torch_dtype
    given = [each.get("torch_dtype" if each.look("dtype") is _ABSENT else "dtype") for each in reads]
    dtype = str(next(filter(None, given), "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        read.problems.append(f"dtype is {dtype}; needs {', '.join(DTYPES)}")
    # what some family's config may ask for, and this one's does not read
    usual = {"router_jitter_noise": (0.0, None), "mlp_bias": (False, None),
             "moe_latent_size": (None,), "hidden_act": ("silu", "swish", None), "topk_method": ("greedy", None),
             "scoring_func": (values.get("score_function", "softmax"), None), "n_group": (1, 0, None),
             "norm_topk_prob": (_meaning(values)["norm_topk_prob"], None), "routed_scaling_factor": (1.0, 0, None),
             "n_shared_experts": (0, None), "swiglu_limit": (None,)}
    if layer_idx is not None:
        usual["mlp_layer_types"] = "sparse", "moe", None
        dense = read.get("first_k_dense_replace") or 0
        if 0 <= layer_idx < dense and read.get("mlp_layer_types") is None:
            read.problems.append(f"the first {dense} layers are dense; layer_idx is {layer_idx}")
        if layer_idx < 0:
            read.problems.append(f"layer_idx is {layer_idx}; needs 0 or more")
    for name, fine in {**usual, **row.needs}.items():
        if name not in read.names and (value := read.look(name)) is not _ABSENT and value not in fine:
            read.problems.append(f"{name} is {value!r}; needs {_or(fine)}")
    if any(each.get("quantization_config") is not None for each in reads):
        read.problems.append(QUANTISED)
    if read.problems:
        problems = _listed(list(dict.fromkeys(read.problems)), "; ")
        raise ValueError(f"this {model_type} config cannot be expressed: {problems}")
    return moe.MoEConfig(**values, params_dtype=getattr(torch, dtype))


def _meaning(values: dict) -> dict:
    """Fields as what they compute: "activation" and "output" are one place of the probs, normalised has two ways."""
    values = {**{known.name: known.default for known in dataclasses.fields(moe.MoEConfig)}, **values}
    if values["norm_topk_prob"] is None:
        softmax = values["score_function"] == "softmax"
        values["norm_topk_prob"] = not values["pre_softmax"] if softmax else values["topk"] != 1
    if values["apply_probs_on"] == "activation":
        values["apply_probs_on"] = "output"
    return values


# ---- Where a published tensor lies in the layer ----

class Place(NamedTuple):
    """One published tensor, and the part of a parameter that it fills."""
    shape: list[int]                       # in the file
    axes: str                              # in the file, einops style
    parameter: str
    view: Tensor | None                    # of the parameter; None: an expert of another rank
    view_axes: str
    sizes: dict[str, int]                  # of the axes that others are merged with
    cut: dict[str, tuple[int, int]]        # axis cut over ranks -> start and length of this part

    def put(self, tensor: Tensor) -> None:
        """The file's tensor into the layer, cast to the parameter's dtype."""
        tensor = rearrange(tensor, f"{self.axes} -> {self.view_axes}", **self.sizes)
        for axis, part in self.cut.items():
            tensor = tensor.narrow(self.view_axes.split().index(axis), *part)
        self.view.copy_(tensor)

    def take(self) -> Tensor:
        """The layer's part as the file holds it: the parameter's own memory where the file has it in
        the same order and alone, else a copy."""
        view = self.view.detach()
        tensor = rearrange(view, f"{self.view_axes} -> {self.axes}", **self.sizes).contiguous()
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if alone else tensor.clone()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _places(layer: moe.MoELayer, layout: dict[str, str], tensors: dict | None = None) -> dict[str, Place]:
    """Name behind the prefix -> Place in the layer's tensors, or in those given, without the
    parameters that the layer does not have."""
    tensors, groups, places = tensors or _tensors(layer), layer.pg_collection, {}
    for pattern, where in layout.items():
        parameter, part, axes = re.fullmatch(r"([^[ ]+)(?:\[(\d)\])? (.*)", where).groups()
        if parameter not in tensors:
            continue
        view, view_axes = tensors[parameter], AXES[parameter]
        whole, cut = dict(zip(view_axes.split(), view.shape)), {}
        for axis, group, owner in (("e", groups.ep, "experts."), ("s", groups.tp, "shared_experts.")):
            if group is not None and group.size() > 1 and parameter.startswith(owner) and axis in whole:
                cut[axis] = group.rank() * whole[axis], whole[axis]
                whole[axis] *= group.size()
        if part is not None:
            view, view_axes = view.select(view_axes.split().index("p"), int(part)), view_axes.replace("p ", "")
        each = "{e}" in pattern
        if each:
            view_axes = view_axes.replace("e ", "")
        sizes = {axis: whole[axis] for axis in "ep" if axis in axes}
        in_file = torch.empty([whole[axis] for axis in view_axes.split()], device="meta")
        shape = list(rearrange(in_file, f"{view_axes} -> {axes}", **sizes).shape)
        place = Place(shape, axes, parameter, view, view_axes, sizes, cut)
        if not each:
            places[pattern] = place
            continue
        first, count = cut.pop("e", (0, whole["e"]))
        for e in range(whole["e"]):
            local = view[e - first] if first <= e < first + count else None
            places[pattern.replace("{e}", str(e))] = place._replace(view=local)
    return places


def _nearest(layer: moe.MoELayer, layouts, names, tensors: dict | None = None) -> dict[str, Place]:
    """The places of the layout that has most of the names, of two alike those of the first."""
    layouts = [_places(layer, layout, tensors) for layout in layouts]
    return max(layouts, key=lambda places: len(places.keys() & set(names)))


def _prefixes(names, layouts) -> list[str]:
    """Where blocks begin: with a router, and experts beside it."""
    found = {}
    for layout in layouts:
        router = next(iter(layout))
        experts = next(name for name, where in layout.items() if where.startswith("experts."))
        for name in names:
            prefix = name.removesuffix(router)
            start = prefix + experts.split("{e}")[0]
            if prefix != name and any(other.startswith(start) for other in names):
                found[prefix] = None
    return list(found)


def _fitting(layer: moe.MoELayer, model_type: str) -> tuple[moe.MoELayer, Family]:
    """(the layer, its row), or an error where the layer computes something else than the family."""
    if not isinstance(getattr(layer, "_orig_mod", layer), moe.MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; needs a MoELayer")
    row, layer = _family(model_type), getattr(layer, "_orig_mod", layer)               # inside of torch.compile(layer)
    read_from_config = {name for name, knob in row.knobs.items() if callable(knob)}
    want = _meaning({**row.knobs, "topk": layer.config.topk})
    have = _meaning(vars(layer.config))
    wrong = [f"{name} = {have[name]!r} (needs {want[name]!r})" for name in FIXED
             if name not in read_from_config and have[name] != want[name]]
    gated = any(re.match(r"experts\.fc1(\[1\]|.*p)", where) for where in row.layouts[0].values())
    if layer.config.parts != 1 + gated:
        wrong.insert(0, f"activation = {have['activation']!r} (needs one that is {'' if gated else 'not '}gated)")
    if wrong:
        raise ValueError(f"layer is no {model_type} block: {', '.join(wrong)}; build it with config_from_hf")
    return layer, row


FIXED = ("activation", "glu_alpha", "glu_linear_offset", "activation_clamp_value", "add_bias_linear", "apply_probs_on",
         "score_function", "norm_topk_prob", "num_groups", "group_topk", "scaling_factor", "router_bias",
         "enable_expert_bias", "shared_expert_intermediate_size", "shared_expert_gate",
         "latent_size", "latent_norm", "situ_beta", "situ_linear_beta")


# ---- Weights in, weights out, weights from a dense FFN ----

def from_hf(layer: moe.MoELayer, tensors: Mapping, model_type: str, prefix: str = "") -> moe.MoELayer:
    """Copies one block's weights into the layer, and returns it. Names are looked up behind `prefix`
    ("model.layers.3.mlp.", "model.layers.3.block_sparse_moe.", ..), as published or as held in memory; others are left.

    tensors: name -> tensor, fp64, fp32, bf16 or fp16, cast to the parameters' dtype (the expert bias stays fp32). Only
    keys() and [name] are used, or safetensors' get_slice and get_tensor; one tensor is loaded at a time, without
    get_slice twice, first for its shape. Over ep only this rank's experts are read and may be all that is there; over tp
    the shared expert's part is taken.
    ValueError lists every missing, unexpected and misshapen tensor, the first ten of them; then, and where the layer is
    no block of this family, or on the meta device, nothing has changed.
    """
    inner, _ = _fitting(layer, model_type)
    if not hasattr(tensors, "keys"):
        raise TypeError(f"tensors is a {type(tensors).__name__}; needs a mapping, name -> tensor")
    if inner.router.weight.is_meta:
        raise ValueError("layer is on the meta device and cannot take weights; call "
                         "layer.to_empty(device=..) and reset_parameters() of its modules first")
    _fill(_matched(inner, tensors, model_type, prefix), tensors, prefix)
    return layer


def _loader(tensors: Mapping) -> Callable:
    return getattr(tensors, "get_tensor", None) or tensors.__getitem__


def _fill(places: dict[str, Place], tensors: Mapping, prefix: str) -> None:
    load = _loader(tensors)
    with torch.no_grad():
        for name, place in places.items():
            place.put(load(prefix + name))


def _matched(
    layer: moe.MoELayer, tensors: Mapping, model_type: str, prefix: str,
) -> dict[str, Place]:
    """Name behind the prefix -> Place, in the layout that the tensors have; all are there and fit."""
    row = TYPES[model_type]
    names = [name.removeprefix(prefix) for name in tensors.keys() if name.startswith(prefix)]
    here, load = set(names), _loader(tensors)
    places = _nearest(layer, row.layouts, names)
    if tensors.keys() and not here & places.keys():
        fitting = _listed(_prefixes(list(tensors.keys()), row.layouts), ", ") or "none"
        raise ValueError(f"no tensor of a {model_type} block is at prefix {prefix!r}; prefixes that fit: {fitting}")
    local = {name: place for name, place in places.items() if place.view is not None}
    problems = [f"{prefix}{name} {place.shape} is missing" for name, place in local.items() if name not in here]
    for name in names:
        if name not in places and not re.fullmatch(row.others, name):
            quantised = re.search(r"(packed|blocks|scales?|scale_inv)$", name)
            kind = "of quantised weights; dequantise them first" if quantised else "unexpected"
            problems.append(f"{prefix}{name} is {kind}")
    for name, place in local.items():
        if name in here:
            shape, dtype = _described(tensors, load, prefix + name)
            if shape != place.shape:
                problems.append(f"{prefix}{name} is {shape}; needs {place.shape}")
            if dtype not in DTYPES and place.view.is_floating_point():
                problems.append(f"{prefix}{name} is {dtype}; needs {', '.join(DTYPES)}")
    if problems:
        raise ValueError(f"tensors do not make a {model_type} block, nothing was changed:\n  "
                         + _listed(problems, "\n  "))
    return local


def _described(tensors: Mapping, load: Callable, name: str) -> tuple[list[int], str]:
    """(shape, dtype), with nothing kept."""
    if hasattr(tensors, "get_slice"):
        part = tensors.get_slice(name)
        return list(part.get_shape()), _SAFETENSORS.get(part.get_dtype(), part.get_dtype())
    tensor = load(name)
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def to_hf(layer: moe.MoELayer, model_type: str, prefix: str = "") -> dict[str, Tensor]:
    """prefix + name -> a copy of the tensor, in the layer's dtypes and the published layout: the inverse of from_hf.

    Over ep: this rank's experts, under their global numbers. ValueError where a published tensor is
    spread over ranks: all experts in one over ep, the shared expert over tp.
    """
    layer, row = _fitting(layer, model_type)
    places = _places(layer, row.layouts[0])
    spread = [prefix + name for name, place in places.items() if place.cut]
    if spread:
        raise ValueError(f"spread over ranks: {_listed(spread, ', ')}; needs a layer without ep and tp: "
                         f"save sharded_state_dict() and load it there")
    return {prefix + name: place.take().clone() for name, place in places.items() if place.view is not None}


def upcycle(
    config: moe.MoEConfig, gate_proj: Tensor | None, up_proj: Tensor, down_proj: Tensor, noise: float = 0.0,
) -> moe.MoELayer:
    """A layer whose experts all start as one dense FFN: sparse upcycling (arXiv 2212.05055).

    gate_proj [F, H] (None where the activation is not gated), up_proj [F, H], down_proj [H, F]; cast to params_dtype.
    The router is drawn anew, biases are zero, and so is the down projection of a shared expert. Where a token's probs
    sum to 1 and are not on the input, the output at the start is the dense FFN's.
    noise: each expert's matrices get normal noise of this share of their own standard deviation.
    """
    F, H = config.ffn_hidden_size, config.hidden_size
    given = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
    needs = {"gate_proj": [F, H] if config.parts == 2 else None, "up_proj": [F, H], "down_proj": [H, F]}
    got = {name: None if tensor is None else list(tensor.shape) for name, tensor in given.items()}
    wrong = [f"{name} is {got[name]}; needs {needs[name]}" for name in given if got[name] != needs[name]]
    if config.latent_size is not None:
        wrong.append(f"latent_size is {config.latent_size}; needs None, since an expert is as wide "
                     f"as the dense FFN")
    if wrong or noise < 0:
        raise ValueError("; ".join(wrong + ([f"noise is {noise}; needs 0 or more"] if noise < 0 else [])))
    layer = moe.MoELayer(config).to(up_proj.device)
    with torch.no_grad():
        layer.experts.fc1.copy_(torch.stack([up_proj] if gate_proj is None else [gate_proj, up_proj]))
        layer.experts.fc2.copy_(down_proj)
        if noise:
            for weight in [*layer.experts.fc1.unbind(1), layer.experts.fc2]:               # [E, F, H] twice, [E, H, F]
                weight.add_(torch.randn(weight.shape, device=weight.device).mul_(noise * weight.float().std()))
        if layer.shared_experts is not None:
            layer.shared_experts.fc2.zero_()
    return layer


# ---- Live models of the Hugging Face library ----

def register_experts(name: str = "moe_py") -> str:
    """Makes kernels.expert_mlp an experts implementation of the Hugging Face library, and returns its
    name: model.set_experts_implementation(name), or experts_implementation=name at load.

    Router, losses, weights and checkpoints stay the library's. No weight is copied: transposed and
    interleaved ones are taken as views. An index of E or more is nowhere. In a forward,
    NotImplementedError names what cannot be expressed. ImportError without the library.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as missing:
        raise ImportError("register_experts needs the Hugging Face library: pip install "
                          "'transformers>=5'") from missing
    if name in ("eager", *ALL_EXPERTS_FUNCTIONS) and ALL_EXPERTS_FUNCTIONS.get(name) is not _library_experts:
        raise ValueError(f"name is {name!r}, an implementation of the library; needs another name")
    ALL_EXPERTS_FUNCTIONS.register(name, _library_experts)
    return name


# Class that defines the gate -> activation, or act_fn for that one, and its constants as attributes.
GATES = {"BeamExperts": "act_fn", "DeepseekV4Experts": "act_fn clamp_value=limit",
         "Glm5NextTextExperts": "swiglu clamp_value=swiglu_limit",
         "HYV4Experts": "swiglu clamp_value=swiglu_limit",
         "GptOssExperts": "quick_geglu alpha=alpha clamp_value=limit",
         "OpenAIPrivacyFilterExperts": "quick_geglu alpha=alpha clamp_value=limit",
         "MiniMaxM3VLExperts": "quick_geglu alpha=swiglu_alpha clamp_value=swiglu_limit",
         "Inkling2Experts": "situ beta=act_fn.gate_softcap.softcap linear_beta=act_fn.up_softcap.softcap"}
ACT_FNS = {"transformers.activations.SiLUActivation": "swiglu", "torch.nn.modules.activation.SiLU": "swiglu",
           "torch.nn.functional.silu": "swiglu", "transformers.activations.GELUTanh": "geglu",
           "transformers.activations.ReLUSquaredActivation": "relu2"}


@torch.compiler.assume_constant_result                       # Dynamo does not know __qualname__
def _full_name(owner, method: str | None = None) -> str:
    named = owner if method is None else getattr(owner, method)
    return f"{named.__module__}.{named.__qualname__}"


def _gate_of(experts: nn.Module) -> dict:
    """Keyword arguments of kernels.expert_mlp: the activation of an experts module of the library."""
    def refuse(what: str):
        raise NotImplementedError(f"{type(experts).__name__}: {what} cannot be expressed by "
                                  f"kernels.expert_mlp; try replace_blocks, or another implementation")
    if experts.has_post_expert_norm:
        refuse("has_post_expert_norm")
    gate = _full_name(type(experts), "_apply_gate")
    known = "act_fn"
    if gate != "transformers.integrations.moe._default_apply_gate":
        owner = gate.split(".")[-2]
        if owner not in GATES or not gate.startswith("transformers.models."):
            refuse(f"the overridden _apply_gate ({gate})")
        known = GATES[owner]
    kind, *constants = known.split()
    if kind == "act_fn":
        act = experts.act_fn
        act = _full_name(type(act) if isinstance(act, nn.Module) else act)
        kind = ACT_FNS.get(act) or refuse(f"act_fn {act}")
    if moe.kernels.ACTIVATIONS[kind].gated != experts.has_gate:
        refuse(f"has_gate = {experts.has_gate} with {kind}")
    options = {}
    for constant in constants:
        name, path = constant.split("=")
        options[name] = operator.attrgetter(path)(experts)
    return {"kind": kind, "linear_offset": float(kind == "quick_geglu"), **options}


def _library_experts(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H], in the weights' dtype."""
    options, kernels = _gate_of(experts), moe.kernels
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = "(p f)" if experts.is_concatenated else "(f p)"
    fc1_axes, fc2_axes = (f"e h {rows}", "e f h") if experts.is_transposed else (f"e {rows} h", "e h f")
    parts = 2 if experts.has_gate else 1
    fc1 = rearrange(getattr(experts, up), f"{fc1_axes} -> e p f h", p=parts)
    fc2 = rearrange(experts.down_proj, f"{fc2_axes} -> e h f")
    biases = ()
    if experts.has_bias:
        fc1_bias = rearrange(getattr(experts, up + "_bias"), f"e {rows} -> e p f", p=parts)
        biases = fc1_bias, experts.down_proj_bias
    plan = kernels.plan_permutation(top_k_index.clamp(max=len(fc1)), len(fc1))
    x_TH = hidden_states.to(fc1.dtype)
    y_TH = kernels.expert_mlp(x_TH, top_k_weights, plan, fc1, fc2, *biases, **options)
    return y_TH.to(hidden_states.dtype)


def _same(logits: Tensor) -> Tensor:
    return logits


class BatchFirstRouter(moe.TopKRouter):
    """TopKRouter on [B, S, H]. Its logits also go through what is left of the library's router, whose
    hooks collect them for output_router_logits."""

    def gating(self, input: Tensor) -> Tensor:
        logits = super().gating(input)
        self.library_router(logits.flatten(0, -2))
        return logits

    def _apply_losses(self, probs: Tensor, logits: Tensor, padding_T: Tensor | None) -> Tensor:
        return super()._apply_losses(probs, logits.transpose(0, 1), padding_T)


class HuggingFaceBlock(moe.MoELayer):
    """MoELayer in the place of a block of the library: [B, S, H] in, what the block returned out.
    Its state dict has the library's names in memory; it loads those, and the published ones."""

    def __init__(self, config: moe.MoEConfig, model_type: str):
        super().__init__(config)
        self.model_type, self.router = model_type, BatchFirstRouter(config)
        self.register_buffer("hash_table", None)             # [vocabulary, K] of a hash layer

    @property
    def row(self) -> Family:                                 # not kept: its functions cannot be pickled
        return TYPES[self.model_type]

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None):
        indices = None if self.hash_table is None else self.hash_table[input_ids]
        y, probs = self.forward_with_probs(hidden_states, topk_indices=indices)
        if self.row.returns == "logits":
            logits = moe.Router.gating(self.router, hidden_states)
            return y.flatten(0, 1), logits.flatten(0, 1)
        return (y, probs) if self.row.returns == "probs" else y

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, Tensor]:
        tensors = super().state_dict(*args, prefix=prefix, **kwargs)
        for name, place in _places(self, self.row.layouts[-1]).items():
            tensors.pop(prefix + place.parameter, None)
            tensors[prefix + name] = place.take()
        return tensors

    @torch.no_grad()
    def _load_from_state_dict(self, tensors, prefix, metadata, strict, missing, unexpected, errors):
        names, own = [name.removeprefix(prefix) for name in tensors], _tensors(self)
        layouts = self.row.layouts[::-1]
        places = _nearest(self, layouts, names)
        if metadata.get("assign_to_params_buffers"):         # into new memory, like what is given
            for name, place in places.items():
                if prefix + name in tensors:
                    old, like = own[place.parameter], tensors[prefix + name]
                    new = torch.empty_like(old, dtype=like.dtype, device=like.device)
                    own[place.parameter] = new if old.is_meta else new.copy_(old)
            places = _nearest(self, layouts, names, own)
        for name, place in places.items():
            tensor = tensors.pop(prefix + name, None)
            if tensor is None:
                missing.append(prefix + name)
            elif list(tensor.shape) != place.shape:
                errors.append(f"{prefix}{name} is {list(tensor.shape)}; needs {place.shape}")
            else:
                place.put(tensor)
            tensors[prefix + place.parameter] = own[place.parameter]
        super()._load_from_state_dict(tensors, prefix, metadata, strict, missing, unexpected, errors)


def replace_blocks(model: nn.Module, **changes) -> list[str]:
    """In place: every MoE block of a live Hugging Face model becomes this project's layer, with the
    block's weights, dtypes, device and requires_grad. Returns the names of the blocks, in order.

    changes: fields of MoEConfig, such as enable_expert_bias=True, bias_update="quantile". All is
    checked before the first block is touched; memory holds one block twice. Make the optimizer
    afterwards. state_dict() has the library's names, and its own for what `changes` has added,
    which is drawn anew. Not for models that fully_shard has sharded. ValueError: unknown model type,
    no block, a block that the layer cannot express, meta tensors.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "config"):
        raise TypeError(f"model is a {type(model).__name__}; needs a model of the Hugging Face library")
    if "params_dtype" in changes:
        raise ValueError("changes has params_dtype; blocks keep their dtypes: cast the model instead")
    model_type, _ = _type_of(model.config)
    row, tensors = _family(model_type), _tensors(model)
    prefixes = _prefixes(tensors, row.layouts[-1:])
    if not prefixes:
        done = [name for name, module in model.named_modules() if isinstance(module, HuggingFaceBlock)]
        raise ValueError(f"model has no {model_type} block to replace; replaced already: {_listed(done, ', ') or 'none'}")
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("model has tensors on the meta device; needs weights: load it first")
    router_dtype = torch.promote_types(model.dtype, torch.float32)
    changes = {"router_dtype": router_dtype, **changes, "params_dtype": model.dtype}
    layers = [_blank_block(model.config, model_type, tensors, prefix, changes) for prefix in prefixes]
    del tensors                                              # so that each old block can go
    names = [prefix.removesuffix(".") for prefix in prefixes]
    for name, layer in zip(names, layers):
        _put_block(model, name, layer)
    return names


def _blank_block(hf_config, model_type: str, tensors: dict, prefix: str, changes: dict) -> HuggingFaceBlock:
    """The layer on the meta device, checked against the block's tensors, with their dtypes."""
    layer_idx = int(re.findall(r"\d+", "0." + prefix)[-1])
    published = config_from_hf(hf_config, layer_idx)
    config = dataclasses.replace(published, **changes)
    if config.parts != published.parts:
        raise ValueError(f"changes has activation = {config.activation!r}; needs one that is "
                         f"{'' if published.parts == 2 else 'not '}gated, as {published.activation!r}")
    with torch.device("meta"):
        layer = HuggingFaceBlock(config, model_type)
    if prefix + HASH_TABLE in tensors:
        layer.hash_table = tensors[prefix + HASH_TABLE].to("meta")
    parameters = dict(layer.named_parameters())
    for name, place in _matched(layer, tensors, model_type, prefix).items():
        if place.parameter in parameters:
            parameter, tensor = parameters[place.parameter], tensors[prefix + name]
            parameter.data = parameter.data.to(tensor.dtype)
            parameter.requires_grad_(tensor.requires_grad)
    return layer


def _put_block(model: nn.Module, name: str, layer: HuggingFaceBlock) -> None:
    block = model.get_submodule(name)
    tensors = _tensors(block)
    layer.to_empty(device=next(iter(tensors.values())).device).train(block.training)
    places = _nearest(layer, layer.row.layouts, tensors)
    filled = {place.parameter for place in places.values()}
    for part, module in layer.named_children():
        added = {f"{part}.{name}" for name, _ in module.named_parameters()} - filled
        if added or module is layer.router:                  # whose counts and bias start at zero
            module.reset_parameters()
    _fill(places, tensors, "")
    # Of the library's router only the hooks stay.
    library_router = block.get_submodule(next(iter(layer.row.layouts[-1])).split(".")[0])
    for held in (library_router._parameters, library_router._buffers, library_router._modules):
        held.update(dict.fromkeys(held))
    library_router.forward = _same
    layer.router.library_router = library_router
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is block:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)


# ---- Parts that rows share ----

def field(*names, default=_ABSENT, among=None):
    """A knob that is a field of the config, under any of these names."""
    return lambda read: read(*names, default=default, among=among)


def flag(*names, default):
    return lambda read: bool(read(*names, default=default))


def by_config(norm: bool) -> dict:
    """Softmax over all experts, normalised over the chosen or not: as the config says, else `norm`."""
    return dict(pre_softmax=True, norm_topk_prob=flag("norm_topk_prob", default=norm))


def knobs(ffn: str, experts: str = "num_local_experts", topk: str = "num_experts_per_tok", **others) -> dict:
    """Where H, F, E, K and the activation are read, E and K also under other versions' names; and a row's other knobs."""
    return dict(hidden_size=field("hidden_size"), ffn_hidden_size=field(ffn),
                topk=field(topk, "num_experts_per_tok", "num_experts_per_token"),
                num_experts=field(experts, "num_experts", "num_local_experts"),
                activation=field("hidden_act", default="silu", among=GATED)) | others


def shared(default: int | None, *sizes: str) -> dict:
    """Several shared experts side by side are one expert. `sizes` names the size of each; without
    names it is F."""
    counts = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"

    def size(read):
        count = read(*counts, default=default) or 0
        return count * (read(*sizes or ["moe_intermediate_size"]) or 0) or None
    return dict(shared_expert_intermediate_size=size)


def grouped(on: Callable, best: int, groups=None, group_topk=None) -> dict:
    """Where on(read): n_group groups of experts, of which the topk_group with the best sum of their `best` best stay."""
    def knob(*names, default):
        def value(read):
            got = read(*names, default=default)              # always, so that it is not refused
            return got if on(read) else None
        return value
    return dict(num_groups=knob("n_group", "num_expert_group", default=groups),
                group_topk=knob("topk_group", default=group_topk),
                group_score_topk=lambda read: best if on(read) else None)


def grouped_by_two(groups: int, group_topk: int) -> dict:
    """Groups by the sum of their two best, where there are several."""
    def several(read):
        return read("n_group", "num_expert_group", default=groups) not in (None, 0, 1)
    return grouped(several, 2, groups, group_topk)


def biased(scaling: float, norm: bool) -> dict:
    """DeepSeek-V3's router without groups: sigmoid, a bias that only chooses, a factor."""
    return dict(score_function="sigmoid", enable_expert_bias=True,
                norm_topk_prob=flag("norm_topk_prob", "moe_renormalize", default=norm),
                scaling_factor=field("routed_scaling_factor", "route_scale", default=scaling))


def noaux(groups: int, group_topk: int, scaling: float, norm: bool) -> dict:
    """DeepSeek-V3's router (arXiv 2412.19437), with a family's defaults."""
    return biased(scaling, norm) | grouped_by_two(groups, group_topk)


def kimi_activation(read) -> str:
    situ = read("activation_situ_beta", default=None) is not None
    return read("hidden_act", default="situ" if situ else "silu", among={**GATED, "situ": "situ"})


def kimi_norm_eps(read) -> float:
    normed = read("latent_moe_use_norm", default=False)
    return read("rms_norm_eps", default=1e-5) if normed else 1e-5


def chosen_by_score(read) -> bool:
    """DeepSeek-V4: in a hash layer a table chooses the experts, and there is no bias."""
    kinds = {"moe": True, "hash_moe": False, None: None}
    by_score = read("mlp_layer_types", default=None, among=kinds)
    hashed = read("num_hash_layers", default=3) or 0         # where types are not given
    if by_score is not None:
        return by_score
    if hashed and read.layer_idx is None:
        read.problems.append(f"the first {hashed} layers are hash layers; needs layer_idx")
    return (read.layer_idx or 0) >= hashed


def layout(text: str) -> dict[str, str]:
    """A line has a name behind the prefix, and where the tensor lies."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def layouts(others: str, experts: str | None = None, held: str | None = None) -> tuple[dict, dict]:
    """(as published, as held in memory). Published are the others, and one tensor per expert and
    projection. In memory gate and up of all experts are one tensor, and the others are `held`."""
    return layout(others + (experts or EACH)), layout((held or others) + FUSED)


def w132(text: str) -> str:
    """The text with w1, w3 and w2 for the gate, up and down projections."""
    return text.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")


def qwen2_moe(norm: bool) -> Family:
    return Family(
        knobs("moe_intermediate_size", "num_experts", **by_config(norm), shared_expert_gate=True,
              shared_expert_intermediate_size=field("shared_expert_intermediate_size")),
        layouts(GATE + SHARED_EXPERT + "shared_expert_gate.weight shared_experts.gate_weight 1 h"))


def deepseek_v3(*router_defaults, shared_default: int | None = 1) -> Family:
    return Family(
        knobs("moe_intermediate_size", "n_routed_experts", **noaux(*router_defaults),
              **shared(shared_default)),
        layouts(CORRECTED + SHARED), NOAUX)


GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
GATE = "gate.weight    router.weight e h\n"
ROUTER = "router.weight    router.weight e h\n"
CORRECTED = GATE + "gate.e_score_correction_bias    router.expert_bias e\n"
EACH = """
    experts.{e}.gate_proj.weight    experts.fc1[0] f h
    experts.{e}.up_proj.weight      experts.fc1[1] f h
    experts.{e}.down_proj.weight    experts.fc2 h f
"""
FUSED = """
    experts.gate_up_proj    experts.fc1 e (p f) h
    experts.down_proj       experts.fc2 e h f
"""
SHARED = """
    shared_experts.gate_proj.weight    shared_experts.fc1[0] s h
    shared_experts.up_proj.weight      shared_experts.fc1[1] s h
    shared_experts.down_proj.weight    shared_experts.fc2 h s
"""
SHARED_EXPERT = SHARED.replace("shared_experts.gate", "shared_expert.gate").replace(
    "shared_experts.up", "shared_expert.up").replace("shared_experts.down", "shared_expert.down")
NEMOTRON = CORRECTED + """
    shared_experts.up_proj.weight      shared_experts.fc1[0] s h
    shared_experts.down_proj.weight    shared_experts.fc2 h s
    fc1_latent_proj.weight             latent.down l h
    fc2_latent_proj.weight             latent.up h l
"""
LATENT = """
    routed_expert_down_proj.weight    latent.down l h
    routed_expert_up_proj.weight      latent.up h l
    routed_expert_norm.weight         latent.norm l
"""
OUTER_BIAS = GATE + "e_score_correction_bias    router.expert_bias e\n"
GATE_BIAS = GATE + "gate.bias    router.expert_bias e\n"
HASH_TABLE = "gate.tid2eid"
TABLE = f"{HASH_TABLE}    hash_table v k\n"
KIMI = Family(
    knobs("moe_intermediate_size", "num_experts", **noaux(1, 1, 2.446, True), **shared(1),
          activation=kimi_activation,
          situ_beta=lambda read: read("activation_situ_beta", default=None) or 1.0,
          situ_linear_beta=field("activation_situ_linear_beta", default=None),
          latent_size=field("routed_expert_hidden_size", default=None),
          latent_norm=flag("latent_moe_use_norm", default=False), latent_norm_eps=kimi_norm_eps),
    layouts(CORRECTED + SHARED + LATENT, w132(EACH)),
    {"topk_method": ("noaux_tc", None), "moe_router_activation_func": ("sigmoid", None)})
NOAUX = {"topk_method": ("noaux_tc", None)}
ALWAYS_NORMED = dict(norm_topk_prob=True)
OAI_GLU = dict(activation="quick_geglu", glu_alpha=field("swiglu_alpha", default=1.702),
               glu_linear_offset=1.0, activation_clamp_value=field("swiglu_limit", default=7.0))
OVER_ALL = dict(pre_softmax=True, norm_topk_prob=False)                # softmax over all experts; else over the chosen


# ---- The table ----

INEXPRESSIBLE = {"phimoe": "its SparseMixer router takes the second expert from a softmax that masks the first, with a "
                           "gradient estimator of its own; the layer has no such router",
                 "hy_v4": "it clamps gate and up of the routed experts alone; the layer's clamp "
                          "holds for the shared expert too"}

FAMILIES = {
    "mixtral": Family(knobs("intermediate_size"), layouts(GATE, w132(EACH))),
    "granitemoe": Family(
        knobs("intermediate_size"),
        (layout("""
            router.layer.weight     router.weight e h
            input_linear.weight     experts.fc1 e (p f) h
            output_linear.weight    experts.fc2 e h f"""), layout(ROUTER + FUSED))),
    "jamba": Family(knobs("intermediate_size", "num_experts", **OVER_ALL), layouts(ROUTER)),
    "olmoe": Family(knobs("intermediate_size", "num_experts", **by_config(False)), layouts(GATE)),
    "qwen3_moe": Family(knobs("moe_intermediate_size", "num_experts", **by_config(False)), layouts(GATE)),
    "qwen2_moe": qwen2_moe(False),
    "qwen3_next": qwen2_moe(True),
    "deepseek_v2": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **OVER_ALL, **shared(2),
              **grouped(field("topk_method", default="greedy", among={"greedy": False, "group_limited_greedy": True}), 1),
              scaling_factor=field("routed_scaling_factor", default=1.0)),
        layouts(GATE + SHARED)),
    "deepseek_v3": deepseek_v3(8, 4, 2.5, True),
    "kimi_k2": deepseek_v3(8, 4, 2.5, True),
    "glm4_moe": deepseek_v3(1, 1, 1.0, True),
    "dots1": deepseek_v3(1, 1, 1.0, False, shared_default=None),
    "llama4_text": Family(
        knobs("intermediate_size", score_function="sigmoid", norm_topk_prob=False, apply_probs_on="input",
              shared_expert_intermediate_size=field("intermediate_size")),
        (layout(ROUTER + SHARED_EXPERT + """
            experts.gate_up_proj    experts.fc1 e h (p f)
            experts.down_proj       experts.fc2 e f h"""),), returns="logits"),
    "gpt_oss": Family(
        knobs("intermediate_size", **OAI_GLU, add_bias_linear=True, router_bias=True),
        (layout(ROUTER + """
            router.bias                  router.bias e
            experts.gate_up_proj         experts.fc1 e h (f p)
            experts.gate_up_proj_bias    experts.fc1_bias e (f p)
            experts.down_proj            experts.fc2 e f h
            experts.down_proj_bias       experts.fc2_bias e h"""),), returns="probs"),
    "ernie4_5_moe": Family(
        knobs("moe_intermediate_size", "moe_num_experts", "moe_k", **shared(2), pre_softmax=True,
              norm_topk_prob=True, enable_expert_bias=True),
        layouts(GATE + SHARED + "moe_statics.e_score_correction_bias router.expert_bias 1 e",
                held=GATE + SHARED + "gate.moe_statics.e_score_correction_bias router.expert_bias 1 e\n"),
        {"use_bias": (False, None), "moe_norm_min": (1e-12, 0.0)}),
    "minimax_m2": Family(
        knobs("intermediate_size", score_function="sigmoid", norm_topk_prob=True, enable_expert_bias=True),
        layouts(OUTER_BIAS, w132(EACH)),
        {"use_routing_bias": (True,), "shared_intermediate_size": (0, None)}),
    "hunyuan_v1_moe": Family(
        knobs("intermediate_size", "num_experts", "moe_topk",
              shared_expert_intermediate_size=field("intermediate_size", "moe_intermediate_size")),
        layouts("gate.wg.weight router.weight e h" + SHARED_EXPERT.replace("shared_expert.", "shared_mlp.")),
        {"num_shared_expert": (1,), "use_mixed_mlp_moe": (True,), "group_limited_greedy": (False, None)}),
    "lfm2_moe": Family(
        knobs("moe_intermediate_size", "num_experts", activation="swiglu", score_function="sigmoid", norm_eps=1e-6,
              norm_topk_prob=flag("norm_topk_prob", default=True),
              enable_expert_bias=flag("use_expert_bias", default=True),
              scaling_factor=field("routed_scaling_factor", default=1.0)),
        layouts(GATE + "expert_bias router.expert_bias e\n", w132(EACH))),
    "nemotron_h": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **noaux(1, 1, 1.0, True),
              shared_expert_intermediate_size=field("moe_shared_expert_intermediate_size"),
              latent_size=field("moe_latent_size", default=None),
              activation=field("mlp_hidden_act", default="relu2", among={"relu2": "relu2"})),
        (layout(NEMOTRON + """
            experts.{e}.up_proj.weight      experts.fc1[0] f h
            experts.{e}.down_proj.weight    experts.fc2 h f"""),
         layout(NEMOTRON + """
            experts.up_proj      experts.fc1[0] e f h
            experts.down_proj    experts.fc2 e h f""")),
        {**NOAUX, "n_shared_experts": (1, None)}),
    "dbrx": Family(
        knobs("ffn_config.ffn_hidden_size", "ffn_config.moe_num_experts", "ffn_config.moe_top_k", pre_softmax=True,
              hidden_size=field("d_model", "hidden_size"),
              activation=field("ffn_config.ffn_act_fn.name", default="silu", among=GATED), norm_topk_prob=field(
                  "ffn_config.moe_normalize_expert_weights", default=1.0, among={1.0: True, None: False})),
        (layout("""
            router.layer.weight    router.weight e h
            experts.mlp.w1         experts.fc1[0] (e f) h
            experts.mlp.v1         experts.fc1[1] (e f) h
            experts.mlp.w2         experts.fc2 (e f) h"""),),
        {"ffn_config.moe_jitter_eps": (0.0, None)}),
    "kimi_linear": KIMI,
    "kimi_k3": KIMI,
    "deepseek_v4": Family(
        knobs("moe_intermediate_size", "n_routed_experts", norm_topk_prob=True,
              score_function=field("scoring_func", default="sqrtsoftplus",
                                   among={"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"}),
              scaling_factor=field("routed_scaling_factor", default=1.5),
              activation_clamp_value=field("swiglu_limit", default=10.0),
              shared_expert_intermediate_size=field("moe_intermediate_size"),
              enable_expert_bias=chosen_by_score),
        layouts(GATE_BIAS + w132(SHARED) + TABLE, w132(EACH),
                held=CORRECTED + SHARED + TABLE),
        {**NOAUX, "n_shared_experts": (1, None)}, others=r"gate\.tid2eid"),
    "inkling2_text": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **biased(8.0, True) | ALWAYS_NORMED,
              activation="situ", situ_beta=field("mlp_gate_softcap", default=4.0),
              situ_linear_beta=field("mlp_up_softcap", default=25.0)),
        layouts(GATE_BIAS, """
            experts.w13_weight    experts.fc1 e (f p) h
            experts.w2_weight     experts.fc2 e h f""", held=CORRECTED)),
    "flint": Family(
        knobs("moe_intermediate_size", "num_experts", score_function="sigmoid",
              norm_topk_prob=flag("norm_topk_prob", default=True),
              shared_expert_intermediate_size=field("shared_expert_intermediate_size")),
        layouts(GATE + SHARED_EXPERT)),
    "mistral_large4_text": Family(
        knobs("moe_intermediate_size", "n_routed_experts", pre_softmax=True, norm_topk_prob=True,
              scaling_factor=field("routed_scaling_factor", default=1.0), **grouped_by_two(1, 1),
              **shared(1)),
        (layout(GATE + w132(SHARED + EACH)), *layouts(GATE + SHARED, w132(EACH))),
        others=r"(?!gate\.|experts\.|shared_experts\.).*"),
    "minimax_m3_vl_text": Family(
        knobs("intermediate_size", **biased(2.0, True) | ALWAYS_NORMED, **OAI_GLU,
              shared_expert_intermediate_size=field("shared_intermediate_size")),
        layouts(OUTER_BIAS + SHARED, w132(EACH), held=CORRECTED + """
            shared_experts.gate_up_proj.weight    shared_experts.fc1 (p s) h
            shared_experts.down_proj.weight       shared_experts.fc2 h s
        """),
        {"hidden_act": ("swigluoai", "silu", None), "use_routing_bias": (True, None),
         "n_shared_experts": (1, None)}),
    "bailing_hybrid": Family(
        knobs("moe_intermediate_size", "num_experts", **noaux(8, 4, 2.5, True), **shared(1)),
        layouts(GATE + SHARED + "gate.expert_bias router.expert_bias e",
                held=CORRECTED + SHARED),
        {**NOAUX, "score_function": ("sigmoid", None),
         "moe_router_enable_expert_bias": (True, None)}),
    "axk2": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **biased(2.5, True), **shared(1)),
        layouts(CORRECTED + SHARED), NOAUX),
    "dots3_note_text": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **noaux(1, 1, 1.0, True),
              **shared(1, "shared_experts_intermediate_size",
                       "moe_shared_expert_intermediate_size")),
        layouts(CORRECTED + SHARED), NOAUX),
    "beam": Family(
        knobs("moe_intermediate_size", "num_experts", **noaux(8, 4, 2.5, True)),
        layouts(CORRECTED), NOAUX),
    "qwen4_exp_text": qwen2_moe(True),
}
TYPES = {**{name.removesuffix("_text"): row for name, row in FAMILIES.items()}, **FAMILIES}
