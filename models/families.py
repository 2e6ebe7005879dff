"""Published Mixture-of-Experts models as a table of knobs, and their weights in and out:

    layer = MoELayer(config_from_hf(hf_config))
    from_hf(layer, tensors, "qwen3_moe", prefix="model.layers.3.mlp.")
    tensors = to_hf(layer, "qwen3_moe", prefix="model.layers.3.mlp.")

A config is a dict or an object with attributes, tensors a plain mapping. This file needs the layer,
ranks/sharding.py and einops. There are two ways into a live model of the Hugging Face library:

    replace_blocks(model, enable_expert_bias=True, bias_update="quantile")     # router and experts
    model.set_experts_implementation(register_experts())                       # the experts alone

The table FAMILIES at the end sets no balance loss: set load_balancing_type with
dataclasses.replace, or as a change of replace_blocks. The letters are those of kernels.py.
"""
import copy
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if __package__ == "models":                  # beside the flat files of the layer
    import moe
    from base import Local, OneProcess
    from ranks.sharding import share_out, sharded_state_dict          # noqa: F401
else:                                        # the layer is a package
    from .. import moe
    from ..base import Local, OneProcess
    from ..ranks.sharding import share_out, sharded_state_dict        # noqa: F401

# einops keeps a list of the types of tensors that it has met. If it met one in a graph, the graph's
# second call would find the list changed, and compile once more. So it meets them here.
for met in (torch.empty(1), nn.Parameter(torch.empty(1))):
    rearrange(met, "n -> n")


# ---- Configs ----

def config_from_hf(hf_config, layer_idx: int | None = None) -> moe.MoEConfig:
    """The MoEConfig of a published model's MoE layer.

    hf_config: config.json as a dict, the library's to_dict(), or its config object. model_type
      chooses the row of FAMILIES: with a text_config the outermost known one, while the fields are
      the innermost config's.
    layer_idx: the layer's number, needed if the MoE layers of the config differ.

    batch_first is True, as the library's hidden states are [B, S, H]. params_dtype is the config's
    dtype or torch_dtype, else float32; in bf16 and fp16 the router has the library's precision.
    Sizes must be in the config; any other field has the library's default. ValueError: lists all
    that the layer cannot express. A warning lists fields of routers, gates, experts or limits that
    nothing reads: the library does not know them either, or they are another model's.

    >>> hf_config = {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 16,
    ...              "num_local_experts": 4, "num_experts_per_tok": 2}
    >>> config_from_hf(hf_config).ffn_hidden_size
    16
    """
    reading = read_config(hf_config, layer_idx)
    problems = reading.problems + reading.of_the_block
    if reading.quantized:
        problems.append("quantization_config is given; "
                        "needs dequantised weights and a config without it")
    reading.refuse(problems)
    if reading.unread:
        warnings.warn(f"this {reading.model_type} config has fields that nothing reads: "
                      f"{', '.join(reading.unread)}", stacklevel=2)
    return moe.MoEConfig(**reading.fields)


class Reading(NamedTuple):
    """What a row of the table makes of a published config.

    fields: of MoEConfig -> value. sources: the same names -> fields of the published config.
    problems: what the router cannot express. of_the_block: what the rest of the layer cannot.
    after: what the library makes of the output y; None: nothing.
    by_layer: the layers differ, and layer_idx was not given.
    limits: "limit" and "shared_limit", if the layer clamps after the activation.
    unread: fields that speak of routers, gates, experts or limits, and that nothing reads.
    dense, sparse: the layers without and with experts; both empty if the config has no number of
      layers.
    """
    model_type: str
    row: "Family"
    fields: dict
    sources: dict
    problems: list[str]
    of_the_block: list[str]
    after: str | None
    quantized: bool
    by_layer: bool
    limits: dict[str, float]
    unread: list[str]
    dense: list[int]
    sparse: list[int]

    def refuse(self, problems: list[str]) -> None:
        if problems:
            problems = _listed(list(dict.fromkeys(problems)), "; ")
            raise ValueError(f"this {self.model_type} config cannot be expressed: {problems}")


def read_config(hf_config, layer_idx: int | None = None) -> Reading:
    """What the row of its type makes of a published config. The arguments are config_from_hf's.

    ValueError: an unknown type, or a model without experts. All other problems are in the Reading.
    """
    model_type, reads = type_of(hf_config, layer_idx)
    refuse_dense(model_type, reads[0])
    row = family(model_type)
    router, block = reads[0], Reader(reads[0].config, layer_idx)
    fields, sources = {}, {}
    for name, knob in (row.knobs | {"after": row.after}).items():
        fields[name] = knob
        if callable(knob):
            read = block if name in (*OF_THE_BLOCK, "after") else router
            read.log = []
            fields[name] = knob(read)
            sources[name] = list(dict.fromkeys(read.log))
    after = fields.pop("after")

    dtype = _dtype_of(reads)
    if dtype not in DTYPES:
        router.problems.append(f"dtype is {dtype}; needs {', '.join(DTYPES)}")
        dtype = "float32"
    dense, sparse = _dense_and_sparse(block.config, row)
    if layer_idx is not None:
        _check_layer_idx(block, row, sparse)
    needs = _usual_needs(fields, row)
    for name, fine in (needs | row.needs).items():
        if name not in router.names | block.names:
            fine = fine if isinstance(fine, tuple) else (fine, None)
            read = block if name in NOT_OF_THE_ROUTER else router
            read(name, default=fine[0], among=dict.fromkeys(fine))

    params_dtype = getattr(torch, dtype)
    fields |= _router_dtypes(row.precision, params_dtype)
    fields |= {"params_dtype": params_dtype, "batch_first": True}
    return Reading(
        model_type, row, fields, sources, problems=router.problems,
        of_the_block=block.problems, after=after,
        quantized=any(each.get("quantization_config") is not None for each in reads),
        by_layer=router.by_layer or block.by_layer,
        limits={of: block.get(name) for name, of in LIMITS.items() if block.get(name)},
        unread=_unread(router.config, router.names | block.names), dense=dense, sparse=sparse)


class Slot(NamedTuple):
    """Where a published tensor lies in the layer.

    part: an index of the parameter's axis p (gate, up), or "" for the whole parameter.
    axes: of the published tensor, for einops. "e h (f p)" is gate and up interleaved.
    """
    parameter: str
    part: str
    axes: str


class Family(NamedTuple):
    """A row of the table.

    knobs: field of MoEConfig -> a constant, or a function of the config's Reader. A field that is
      left out has its default.
    layouts: the first is the published one, the last is the one held in memory. Each maps a tensor
      name after the prefix to its Slot. A name with {e} stands for one tensor per expert.
    needs: field of the published config -> the values with which the layer computes the same model.
      A value without a tuple stands for itself or None. The field may be absent.
    precision: four dtypes, of the gate's weight as the library loads it, of the gate's product, of
      its scores, and of the probs that it returns. "model" is the model's dtype, "gate" that of the
      gate's weight, and "fp32" is fp32 in bf16 and fp16 models. Read in the code of transformers
      5.24.
    dense: field of has_experts -> its value where the config lacks it.
    others: a pattern for names after the prefix that are not the layer's: they are left alone.
    after: what becomes of the output y in the library: an expression, or a knob that gives one. A
      live model keeps it; the layer does not have it.
    block_scales: the library's block multiplies by scaling_factor, its gate does not.
    """
    knobs: dict[str, object]
    layouts: tuple[dict[str, Slot], ...]
    needs: dict[str, object] = {}
    precision: str = "fp32 fp32 fp32 fp32"
    dense: dict[str, object] = {}
    others: str = ""
    after: str | Callable = ""
    block_scales: bool = False

    def dtypes(self) -> list[str]:
        """Of the product, the scores and the probs: "fp32" or "model"."""
        gate, *others = self.precision.split()
        return [gate if word == "gate" else word for word in others]


DTYPES = ("float64", "float32", "bfloat16", "float16")
SAFETENSORS_DTYPES = ("F64", "F32", "BF16", "F16")
_ABSENT = object()


class Missing(str):
    """Stands for a value: the name of a field that the config lacks, or "field = value" where the
    value cannot be used.
    """

    def __repr__(self):
        return str(self)

    def __mul__(self, other):
        return Missing(f"{self} * {other}")

    def __rmul__(self, other):
        return Missing(f"{other} * {self}")


class Reader:
    """Reads fields of a published config.

    names: the fields read. log: of these, those that had a value; if none had, the first in
      parentheses.
    problems: what cannot be expressed. by_layer: a problem is that layers differ.
    """

    def __init__(self, config, layer_idx: int | None = None):
        self.config = config
        self.layer_idx = layer_idx
        self.names = set()
        self.log = []
        self.problems = []
        self.by_layer = False

    def differ(self, how: str) -> None:
        """The layers differ, and layer_idx is not given."""
        self.problems.append(f"{how}; needs layer_idx")
        self.by_layer = True

    def whole(self, name: str, default=None):
        """The value of a field ("ffn_config.moe_top_k": a field of a field), or the default."""
        value = self.config
        for part in name.split("."):
            if isinstance(value, Mapping):
                value = value.get(part, _ABSENT)
            else:
                value = getattr(value, part, _ABSENT)
        return default if value is _ABSENT else value

    def get(self, name: str, default=None):
        """The same for this layer. A list has one value per layer: layer_idx chooses one; without
        it all must be equal.
        """
        value = self.whole(name, default)
        return self.of_layer(name, value) if isinstance(value, (list, tuple)) else value

    def of_layer(self, name: str, value: list | tuple | str):
        index = self.layer_idx or 0
        if index >= len(value):
            self.problems.append(f"{name} has {len(value)} values; layer_idx is {self.layer_idx}")
            return None
        if self.layer_idx is None and any(other != value[0] for other in value):
            kinds = {repr(each): [] for each in value}
            for layer, each in enumerate(value):
                kinds[repr(each)].append(layer)
            several = _or(f"{each} in {layers(where)}" for each, where in kinds.items())
            self.differ(f"{name} is {several}")
        return value[index]

    def __call__(self, *names: str, default=_ABSENT, among: dict | None = None):
        """The value under any of the names, or the default. among: published value -> knob; any
        other value is a problem.
        """
        self.names.update(names)
        found = {name: self.get(name, default=_ABSENT) for name in names}
        found = {name: value for name, value in found.items() if value is not _ABSENT}
        value, *others = found.values() or [default]
        self.log += [*found, f"({names[0]})"][:1]
        if any(other != value for other in others):
            got = " and ".join(f"{name} = {each!r}" for name, each in found.items())
            self.problems.append(f"{got} contradict each other")
        if value is _ABSENT:
            self.problems.append(f"{_or(names)} is missing")
            return Missing(names[0])
        if among is None:
            return value
        if value not in list(among):                         # a value may not be hashable
            name = next(iter(found), names[0])
            self.problems.append(f"{name} is {value!r}; needs {_or(map(repr, among))}")
            return Missing(f"{name} = {value!r}")
        return among[value]


def layers(numbers: list[int]) -> str:
    """ "layer 4", or "layers 0 to 2, 5"."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [" to ".join(map(str, dict.fromkeys(run))) for run in runs]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(texts)}"


def _or(items):
    """The items, each once, with "or" between them."""
    return " or ".join(dict.fromkeys(items))


def _listed(items, separator):
    """The first ten items, joined; if there are more, also their number."""
    if len(items) > 10:
        items = [*items[:10], f".. {len(items)} in all"]
    return separator.join(items)


def type_of(hf_config, layer_idx=None):
    """(model_type, a Reader of every config, the innermost first). The model_type is the outermost
    known one, else the innermost.
    """
    reads = [Reader(hf_config, layer_idx)]
    while (inner := reads[0].get("text_config")) is not None:
        reads.insert(0, Reader(inner, layer_idx))
    types = [read.get("model_type") for read in reads]
    known = [name for name in types if name in TYPES or name in REFUSED]
    return [types[0], *known][-1], reads


def family(model_type):
    if model_type in REFUSED:
        raise ValueError(f"model_type is {model_type!r}: {REFUSED[model_type]}")
    if model_type not in TYPES:
        near = difflib.get_close_matches(str(model_type), [*TYPES, *REFUSED], n=1)
        nearest = f"nearest: {near[0]}; " if near else ""
        raise ValueError(f"model_type is {model_type!r}; {nearest}known: {', '.join(FAMILIES)}")
    return TYPES[model_type]


def refuse_dense(model_type, read):
    """Refuses the config of a model without experts, by a ValueError."""
    for name in ("enable_moe_block", *NUMBERS_OF_EXPERTS):
        value = read.whole(name)
        if value is not None and value == 0:                 # False too
            raise ValueError(f"this {model_type} config is of a dense model: {name} is {value}")


def _dtype_of(reads):
    for read in reads:
        dtype = read.get("dtype", default=_ABSENT)
        if dtype is _ABSENT:             # the library's objects have dtype, and warn of torch_dtype
            dtype = read.get("torch_dtype")
        if dtype:
            return str(dtype).removeprefix("torch.")
    return "float32"


def _gate_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gate's weight when the library loads a model in this dtype. precision: that
    of the Family.
    """
    if precision.startswith("fp32"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _router_dtypes(
    precision: str, dtype: torch.dtype, gate_dtype: torch.dtype | None = None,
) -> dict:
    """The fields of MoEConfig that give a router this precision in a model of this dtype.

    gate_dtype: of the router's weight; None: as the library loads it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {"model": dtype, "fp32": wide, "gate": gate_dtype or _gate_dtype(precision, dtype)}
    product, scores, probs = [dtypes[word] for word in precision.split()[1:]]
    fields = {"router_dtype": product}
    if probs != product or scores != wide:
        fields["probs_dtype"] = probs
    return fields


def _usual_needs(values, row):
    """The needs that every family has, beside its own. Fields that its knobs read need nothing."""
    has_bias = values.get("enable_expert_bias", False)
    score_function = values.get("score_function", "softmax")
    needs = {
        "router_jitter_noise": 0.0,
        "mlp_bias": False,
        "moe_latent_size": None,
        "hidden_act": ("silu", "swish", None),
        "topk_method": "noaux_tc" if has_bias else "greedy",
        **dict.fromkeys(BIASES, has_bias),
        **dict.fromkeys(SCORINGS, score_function),
        "moe_router_use_sigmoid": score_function == "sigmoid",
        "scale_router_input": False,
        **dict.fromkeys(GROUPS, (1, 0, None)),
        **dict.fromkeys(NORMS, meaning(values)["norm_topk_prob"]),
        "routed_scaling_factor": (1.0, 0, None),
        **dict.fromkeys(SHARED_SIZES, 0),
        "n_shared_experts": 0,
        "shared_expert_gate": values.get("shared_expert_gate", False),
        "swiglu_limit": None,
        **dict.fromkeys(LIMITS, 0),
        "moe_router_logit_softcapping": 0,
        "moe_apply_router_weight_on_input": False,
        "use_moe": True,
    }
    if row.dtypes()[0] == "fp32":
        needs |= dict.fromkeys(("router_dtype", "moe_router_dtype"), ("float32", "fp32", None))
    return needs


# Other names of one field.
SCORINGS = ("scoring_func", "score_func", "score_function", "moe_router_activation",
            "moe_router_activation_func")
BIASES = ("use_routing_bias", "moe_router_enable_expert_bias", "use_moe_router_bias",
          "use_expert_bias", "e_score_correction_bias")
GROUPS = "n_group", "num_expert_groups", "num_limited_groups"
NORMS = "norm_topk_prob", "route_norm", "norm_expert_weight"
SHARED_SIZES = "shared_expert_intermediate_size", "shared_intermediate_size"
LIMITS = {                                                   # by layer
    "swiglu_limits": "limit",
    "expert_swiglu_limit_list": "limit",
    "swiglu_limits_shared": "shared_limit",
    "share_expert_swiglu_limit_list": "shared_limit",
}
FACTORS = ("routed_scaling_factor", "route_scale", "router_scaling_factor",
           "moe_router_scaling_factor", "moe_routed_scaling_factor")


# Fields that say which layers have experts: by a list or a pattern with a value for each layer, or
# by the numbers of the layers with experts. The first that a config has decides alone.
EACH_LAYER = ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "is_moe_layer",
              "moe_layer_freq")
SPARSE = "sparse", "moe", "hash_moe", "E", True
NUMBERS = "moe_layers", "moe_layers_enum"


def from_layer(first, layer):
    return layer >= first


def every(step, layer):
    return (layer + 1) % step == 0


# In a config with none of those, a layer has experts if all of these conditions hold.
WHERE = {
    "first_k_dense_replace": from_layer,
    "first_last_k_dense_replace": from_layer,
    "num_dense_layers": from_layer,
    "moe_layer_num_skipped": from_layer,
    "moe_layer_start_index": from_layer,
    "moe_layer_end_index": lambda last, layer: last == -1 or layer <= last,
    "moe_layer_interval": every,
    "interleave_moe_layer_step": every,
    "decoder_sparse_step": every,
    "mlp_only_layers": lambda dense, layer: layer not in dense,
    "moe_layer_freq": lambda step, layer: layer % step == 0,
}


def has_experts(read: Reader, row: Family) -> bool:
    """Whether the Reader's layer has the MoE block. The other layers are dense."""
    layer = read.layer_idx
    for name in EACH_LAYER:
        kinds = read.whole(name)
        is_list = isinstance(kinds, (list, tuple, str))
        # Only Nemotron's layers_block_type has "moe": other models list kinds of attention there.
        if is_list and (name != "layers_block_type" or "moe" in kinds):
            return read.of_layer(name, kinds) in (*SPARSE, None)       # None: it has no such layer
    for name in NUMBERS:
        numbers = read.whole(name)
        if numbers is not None:
            numbers = numbers.split(",") if isinstance(numbers, str) else numbers
            return layer in map(int, numbers)

    def get(name):
        value = read.whole(name)
        return row.dense.get(name) if value is None else value

    for name, rule in WHERE.items():
        value = get(name)
        if value and not rule(value, layer):
            return False
    period = get("expert_layer_period")
    return not period or layer % period == get("expert_layer_offset")


def _dense_and_sparse(config, row):
    """The numbers of the layers without experts, and of those with experts."""
    read = Reader(config)
    number = read.get("num_hidden_layers") or read.get("n_layers")
    number = number or len(read.whole("layers_block_type") or [])
    found = [], []
    for layer in range(number):
        found[has_experts(Reader(config, layer), row)].append(layer)
    return found


def _check_layer_idx(read, row, sparse):
    if read.layer_idx < 0:
        read.problems.append(f"layer_idx is {read.layer_idx}; needs 0 or more")
    elif not has_experts(read, row):
        which = layers(sparse) if sparse else "another"
        read.problems.append(
            f"layer_idx is {read.layer_idx}, a layer without experts; needs {which}")


# A field whose name matches this speaks of routers, gates, experts or limits, not of attention.
SPEAKS = re.compile("(?!index_|attn_|attention_|mla_|kda_|output_)"
                    ".*(rout|gat(e|ing)|expert|moe|top_?k|limit|scor)")
# Fields with such a name that change nothing here.
IGNORED = {
    "the loss": "router_aux_loss_coef moe_loss_weight",
    "read by has_experts, or beside what it reads":
        "expert_layer_period expert_layer_offset moe_every_n_layer moe_layer_offset",
    "of groups, where there is one": "topk_group use_grouped_topk",
    "how something is computed or stored":
        "enable_moe_fp32_combine expert_dtype moe_shared_expert_overlap",
    "of attention, of loops, of generate":
        "gating gated_norm_rank loop_gate_rank time_step_limit top_k",
}
KNOWN = {*EACH_LAYER, *NUMBERS, *WHERE, *" ".join(IGNORED.values()).split()}


def _unread(config, names):
    """The fields that speak of routers, gates, experts or limits and are not among `names`."""
    if not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    fields = dict(config)
    for outer in {name.split(".")[0] for name in names if "." in name}:
        inner = fields.get(outer)
        if isinstance(inner, Mapping):
            fields |= {f"{outer}.{name}": value for name, value in inner.items()}
    return [name for name, value in fields.items()
            if value is not None and name not in names and name.split(".")[-1] not in KNOWN
            and SPEAKS.match(name)]


def meaning(values):
    """All fields of a MoEConfig, where values that compute the same are written alike."""
    defaults = {known.name: known.default for known in dataclasses.fields(moe.MoEConfig)}
    values = defaults | values
    if values["norm_topk_prob"] is None:
        if values["score_function"] == "softmax":
            values["norm_topk_prob"] = not values["pre_softmax"]
        else:
            values["norm_topk_prob"] = values["topk"] != 1
    return values


# ---- Weights in, weights out ----

def from_hf(
    layer: moe.MoELayer, tensors: Mapping, model_type: str, prefix: str = "",
) -> moe.MoELayer:
    """Copies the weights of one published block into the layer, and returns the layer.

    tensors: name -> tensor of float64, float32, bfloat16 or float16, with published names and
      layouts or those held in memory. Each is cast to its parameter's dtype; the expert bias stays
      float32, and so does the router's weight in the families in which the library keeps it. One is
      loaded at a time, through [name] or safetensors' get_tensor. Without safetensors' get_slice
      each is loaded twice, first for its shape.
    prefix: the text in front of the block's own names, such as "model.layers.3.mlp.". Names without
      it are ignored.

    Over ep this rank's experts are read (others may be missing), over tp its part of the shared
    expert. A batch_first of None becomes True without tp: the library has [B, S, H].

    ValueError: lists the missing, misshapen and unexpected tensors; or the layer is no block of
    this family, or on the meta device. The layer is then unchanged.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> tensors = to_hf(moe.MoELayer(config), "mixtral")
    >>> layer = from_hf(moe.MoELayer(config), tensors, "mixtral")
    """
    inner, row = _checked(layer, model_type)
    if not hasattr(tensors, "keys"):
        raise TypeError(f"tensors is a {type(tensors).__name__}; needs a mapping, name -> tensor")
    if inner.router.weight.is_meta:
        raise ValueError("layer is on the meta device and cannot take weights; call "
                         "layer.to_empty(device=..) and reset_parameters() of its modules first")
    source = Source(tensors, prefix)
    places = _matched(inner, model_type, source)

    dtype = _gate_dtype(row.precision, inner.router.weight.dtype)
    if dtype != inner.router.weight.dtype:
        # Rounded to the layer's dtype, a gate that the library keeps in fp32 chooses other experts.
        inner.router.to(dtype)
        gate = next(iter(places))
        places[gate] = places[gate]._replace(view=inner.router.weight.detach())
    _fill(places, source)
    if inner.config.batch_first is None and inner.pg_collection.size("tp") == 1:
        inner.set_config(dataclasses.replace(inner.config, batch_first=True))
    return layer


def to_hf(layer: moe.MoELayer, model_type: str, prefix: str = "") -> dict[str, Tensor]:
    """prefix + name -> a copy of the tensor, as published, in its parameter's dtype.

    Over ep the result has this rank's experts, under their global numbers. ValueError: names the
    tensors that are spread over ranks: over ep those of all experts, over tp the shared expert's.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> to_hf(moe.MoELayer(config), "mixtral", prefix="mlp.")["mlp.experts.3.w1.weight"].shape
    torch.Size([16, 8])
    """
    layer, row = _checked(layer, model_type)
    places = _places(layer, row.layouts[0])
    spread = [prefix + name for name, place in places.items() if place.cut]
    if spread:
        raise ValueError(f"spread over ranks: {_listed(spread, ', ')}; needs a layer without ep "
                         f"and tp: save sharded_state_dict() and load it there")
    return {prefix + name: place.take()
            for name, place in places.items() if place.view is not None}


AXES = {
    "router.weight": "e h",
    "router.bias": "e",
    "router.expert_bias": "e",
    "experts.fc1": "e p f h",
    "experts.fc2": "e h f",
    "experts.fc1_bias": "e p f",
    "experts.fc2_bias": "e h",
    "shared_experts.fc1": "p s h",
    "shared_experts.fc2": "h s",
    "shared_experts.gate_weight": "1 h",
    "latent_down.weight": "l h",
    "latent_up.weight": "h l",
    "latent_up.norm": "l",
}
GATED_OR_NOT = {True: "gated", False: "not gated"}

# The fields of MoEConfig that must be as the row says, unless the row reads them from a config.
COMPARED = """
    activation glu_alpha glu_linear_offset activation_clamp_value add_bias_linear apply_probs_on
    score_function norm_topk_prob num_groups group_topk scaling_factor router_bias
    enable_expert_bias shared_expert_intermediate_size shared_expert_gate
    latent_size latent_norm situ_beta situ_linear_beta
""".split()


def _checked(layer, model_type):
    """(the layer without torch.compile's wrapper, the row of its family). ValueError: the layer is
    no block of this family.
    """
    inner = getattr(layer, "_orig_mod", layer)
    if not isinstance(inner, moe.MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; needs a MoELayer "
                        f"(how to fill a small.MoE is said in small.py)")
    row = family(model_type)
    want = meaning({**row.knobs, "topk": inner.config.topk})
    have = meaning(vars(inner.config))
    wrong = []

    # Without a gate there is only part 0.
    parts = {slot.part for slot in row.layouts[0].values() if slot.parameter == "experts.fc1"}
    gated = parts != {"0"}
    if inner.config.parts != 1 + gated:
        kind = GATED_OR_NOT[gated]
        wrong.append(f"activation = {have['activation']!r} (needs one that is {kind})")
    for name in COMPARED:
        if not callable(want[name]) and have[name] != want[name]:
            wrong.append(f"{name} = {have[name]!r} (needs {want[name]!r})")
    if wrong:
        raise ValueError(f"layer is no {model_type} block: {', '.join(wrong)}; "
                         f"build it with config_from_hf")
    return inner, row


class Source:
    """The tensors of one block: those of a mapping whose names begin with the prefix."""

    def __init__(self, tensors: Mapping, prefix: str):
        self.tensors = tensors
        self.prefix = prefix
        self.names = [name.removeprefix(prefix)
                      for name in tensors.keys() if name.startswith(prefix)]

    def load(self, name: str) -> Tensor:
        """Loads the tensor, and does not keep it."""
        if hasattr(self.tensors, "get_tensor"):
            return self.tensors.get_tensor(self.prefix + name)
        return self.tensors[self.prefix + name]

    def shape_and_dtype(self, name: str) -> tuple[list[int], str]:
        """(shape, dtype), from safetensors' get_slice, or else from the loaded tensor."""
        if hasattr(self.tensors, "get_slice"):
            part = self.tensors.get_slice(self.prefix + name)
            return list(part.get_shape()), part.get_dtype()
        tensor = self.load(name)
        return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class Place(NamedTuple):
    """One published tensor, and the part of a parameter that it fills."""
    slot: Slot
    shape: list[int]                       # of the published tensor
    view: Tensor | None                    # of the parameter; None: an expert of another rank
    axes: list[str]                        # of the view
    merged: dict[str, int]                 # sizes of axes that the published tensor may merge
    cut: dict[str, tuple[int, int]]        # axis cut over ranks -> this rank's start and length

    def put(self, tensor: Tensor) -> None:
        """Copies the published tensor into the layer, in the parameter's dtype."""
        tensor = rearrange(tensor, f"{self.slot.axes} -> {' '.join(self.axes)}", **self.merged)
        for axis, part in self.cut.items():
            tensor = tensor.narrow(self.axes.index(axis), *part)
        self.view.copy_(tensor)

    def take(self) -> Tensor:
        """A copy of the layer's part, as the published tensor."""
        tensor = rearrange(self.view, f"{' '.join(self.axes)} -> {self.slot.axes}", **self.merged)
        return tensor.clone(memory_format=torch.contiguous_format)


def _tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _places(layer, layout):
    """name after the prefix -> Place, for parameters that the layer has."""
    tensors = _tensors(layer)
    ranks = layer.pg_collection
    cut_over = {"experts": ("e", "ep"), "shared_experts": ("s", "tp")}
    places = {}
    for name, slot in layout.items():
        if slot.parameter not in tensors:
            continue
        view = tensors[slot.parameter].detach()
        axes = AXES[slot.parameter].split()
        sizes = dict(zip(axes, view.shape))

        # Sizes over all ranks, and this rank's part.
        axis, group = cut_over.get(slot.parameter.split(".")[0], ("", "tp"))
        cut = {}
        if axis in axes and ranks.size(group) > 1:
            length = sizes[axis]
            sizes[axis] = ranks.size(group) * length
            cut[axis] = ranks.rank(group) * length, length

        if slot.part:
            view = view.select(axes.index("p"), int(slot.part))
            axes.remove("p")
        if "{e}" in name:
            axes.remove("e")

        merged = {axis: sizes[axis] for axis in "ep" if axis in slot.axes}
        blank = torch.empty([sizes[axis] for axis in axes], device="meta")
        shape = rearrange(blank, f"{' '.join(axes)} -> {slot.axes}", **merged).shape
        place = Place(slot=slot, shape=list(shape), view=view, axes=axes, merged=merged, cut=cut)

        if "{e}" in name:
            first, _ = cut.pop("e", (0, 0))
            local = dict(enumerate(view, first))
            for e in range(sizes["e"]):
                places[name.format(e=e)] = place._replace(view=local.get(e))
        else:
            places[name] = place
    return places


def _nearest(layer, layouts, source):
    """The layout that has most of the names. Of two layouts with the same names, one holds the
    experts' weights transposed: it is the one that has most of the shapes. (At 2F = H or F = H one
    of the two weights has the same shape in both.)
    """
    alike = len(layouts) > 1 and layouts[0].keys() == layouts[1].keys()

    def fit(layout):
        places = _places(layer, layout)
        here = places.keys() & set(source.names)
        if alike:
            here = [name for name in here if source.shape_and_dtype(name)[0] == places[name].shape]
        return len(here)
    return max(layouts, key=fit)


def _first_of_experts(layout):
    return next(name for name in layout if layout[name].parameter.startswith("experts."))


def _prefixes(names, layouts):
    """The prefixes of blocks. A block has a router, and experts beside it."""
    found = {}
    for layout in layouts:
        router = next(iter(layout))
        experts = _first_of_experts(layout)
        for name in names:
            prefix = name.removesuffix(router)
            start = prefix + experts.split("{e}")[0]
            if name.endswith(router) and any(other.startswith(start) for other in names):
                found[prefix] = None
    return list(found)


def _matched(layer, model_type, source):
    """name after the prefix -> Place on this rank, in the source's layout. ValueError: a tensor is
    missing, does not fit, or is unexpected.
    """
    row = TYPES[model_type]
    prefix = source.prefix
    here = set(source.names)
    places = _places(layer, _nearest(layer, row.layouts, source))
    all_names = list(source.tensors.keys())
    if all_names and not here & places.keys():
        fitting = _listed(_prefixes(all_names, row.layouts), ", ") or "none"
        raise ValueError(f"no tensor of a {model_type} block is at prefix {prefix!r}; "
                         f"prefixes that fit: {fitting}")

    local = {name: place for name, place in places.items() if place.view is not None}
    problems = []
    for name, place in local.items():
        if name not in here:
            problems.append(f"{prefix}{name} {place.shape} is missing")
            continue
        shape, dtype = source.shape_and_dtype(name)
        if shape != place.shape:
            problems.append(f"{prefix}{name} is {shape}; needs {place.shape}")
        if dtype not in DTYPES + SAFETENSORS_DTYPES and place.view.is_floating_point():
            problems.append(f"{prefix}{name} is {dtype}; needs {', '.join(DTYPES)}")
    for name in source.names:
        if name in places or re.fullmatch(row.others, name):
            continue
        if re.search(r"(packed|blocks|scales?|scale_inv)$", name):
            problems.append(f"{prefix}{name} is of quantised weights; dequantise them first")
        else:
            problems.append(f"{prefix}{name} is unexpected")
    if problems:
        raise ValueError(f"tensors do not make a {model_type} block, nothing was changed:\n  "
                         + _listed(problems, "\n  "))
    return local


@torch.no_grad()
def _fill(places, source):
    for name, place in places.items():
        place.put(source.load(name))


# ---- Weights from a dense FFN ----

def upcycle(
    config: moe.MoEConfig, gate_proj: Tensor | None, up_proj: Tensor, down_proj: Tensor,
    noise: float = 0.0,
) -> moe.MoELayer:
    """A layer whose experts all start as one dense FFN: sparse upcycling (arXiv 2212.05055).

    gate_proj [F, H], or None where the activation is not gated. up_proj [F, H], down_proj [H, F].
      They are cast to params_dtype.
    noise: the standard deviation of normal noise on every expert's matrices, as a share of the
      weights' own.

    The router is drawn anew. Biases are zero, and so is a shared expert's down projection. The
    output at the start is the dense FFN's if a token's probs sum to 1 and are not applied to the
    input. ValueError: shapes that do not fit, a latent_size, negative noise. TypeError: a module in
    the place of its weight.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> gate_proj, up_proj, down_proj = torch.rand(16, 8), torch.rand(16, 8), torch.rand(8, 16)
    >>> layer = upcycle(config, gate_proj, up_proj=up_proj, down_proj=down_proj)
    """
    moe.kernels.check_shapes(
        {"F": config.ffn_hidden_size, "H": config.hidden_size},
        gate_proj=(gate_proj, "F H"), up_proj=(up_proj, "F H"), down_proj=(down_proj, "H F"))
    parts = [part for part in (gate_proj, up_proj) if part is not None]
    if len(parts) != config.parts:
        raise ValueError(f"gate_proj and up_proj are {len(parts)} matrices; "
                         f"activation = {config.activation!r} needs {config.parts}")
    if config.latent_size is not None:
        raise ValueError(f"latent_size is {config.latent_size}; needs None, since an expert is as "
                         f"wide as the dense FFN")
    if noise < 0:
        raise ValueError(f"noise is {noise}; needs 0 or more")

    layer = moe.MoELayer(config).to(up_proj.device)
    fc1_PFH = torch.stack(parts)
    with torch.no_grad():
        layer.experts.fc1.copy_(fc1_PFH)
        layer.experts.fc2.copy_(down_proj)
        if noise:
            # [E, F, H] for each part, and [E, H, F]
            for weight in (*layer.experts.fc1.unbind(1), layer.experts.fc2):
                draw = torch.randn(weight.shape, device=weight.device)
                weight.add_(noise * weight.float().std() * draw)
        if layer.shared_experts is not None:
            layer.shared_experts.fc2.zero_()
    return layer


# ---- The experts of a live Hugging Face model ----

OURS = "moe_py"


def register_experts(name: str = OURS) -> str:
    """Registers kernels.expert_mlp with the Hugging Face library, and returns its name there, for
    `model.set_experts_implementation(name)` or `experts_implementation=name` when a model is
    loaded.

    Router, losses, weights and checkpoints stay the library's. No weight is copied: transposed and
    interleaved weights are used as views. An index of E or more is unrouted. ImportError: no
    library. ValueError: the name is an implementation of the library. A forward raises
    NotImplementedError, which names what cannot be expressed.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as missing:
        raise ImportError("register_experts needs the Hugging Face library: pip install "
                          "'transformers>=5'") from missing
    known = {"eager": None, **ALL_EXPERTS_FUNCTIONS}
    if known.get(name, _library_experts) is not _library_experts:
        raise ValueError(f"name is {name!r}, an implementation of the library; needs another name")
    ALL_EXPERTS_FUNCTIONS.register(name, _library_experts)
    return name


def _library_experts(experts, hidden_states, top_k_index, top_k_weights):
    """The experts' forward for the library: hidden_states [T, H], top_k_index and top_k_weights
    [T, K] -> [T, H] in hidden_states.dtype.
    Products are in the weights' dtype.
    """
    router = vars(experts).get("moe_router")                 # of replace_blocks
    options, fc1, fc2 = _weights_of(experts)
    E = len(fc1) if router is None else router.config.num_experts
    indices = top_k_index.clamp(max=E)
    plan = moe.kernels.plan_permutation(indices, E)
    x_TH = hidden_states.to(fc1.dtype)
    dispatched = Local(x_TH, top_k_weights, plan)
    if router is not None:
        dispatched = router.pg_collection.dispatch(
            x_TH, top_k_weights, indices, plan, router.config)
    rows, probs, local_plan = dispatched.wait_for_rows()
    output = moe.kernels.expert_mlp(
        rows, probs, local_plan, fc1=fc1, fc2=fc2, indices=indices if local_plan is plan else None,
        **options)
    y_TH = dispatched.wait_and_combine(dispatched.send_back(output))
    return y_TH.to(hidden_states.dtype)


def _weights_of(experts):
    """(options of expert_mlp, fc1 [E, P, F, H], fc2 [E, H, F]): views of the module's weights."""
    options = _options_of(experts)
    if hasattr(experts, "mlp"):                              # DBRX's
        w1, v1, w2 = [weight.unflatten(0, (-1, experts.ffn_hidden_size))
                      for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)]
        return options, torch.stack((w1, v1), 1), w2.mT
    flags = _flags_of(experts)
    up = "gate_up_proj" if flags["has_gate"] else "up_proj"
    rows = "(p f)" if flags["is_concatenated"] else "(f p)"
    fc1_axes = f"e {rows} h"
    fc2_axes = "e h f"
    if flags["is_transposed"]:
        fc1_axes = f"e h {rows}"
        fc2_axes = "e f h"

    parts = 1 + flags["has_gate"]
    if flags["has_bias"]:
        fc1_bias = getattr(experts, up + "_bias")
        options["fc1_bias"] = rearrange(fc1_bias, f"e {rows} -> e p f", p=parts)
        options["fc2_bias"] = experts.down_proj_bias
    fc1 = rearrange(getattr(experts, up), f"{fc1_axes} -> e p f h", p=parts)
    return options, fc1, rearrange(experts.down_proj, f"{fc2_axes} -> e h f")


# The library's flags of a module's weights, with the values for modules without them.
FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True, "is_transposed": False,
         "has_post_expert_norm": False}


def _flags_of(experts):
    transposed = {"is_transposed": type(experts).__name__ == "Llama4TextExperts"}
    return {name: getattr(experts, name, usual) for name, usual in (FLAGS | transposed).items()}


class Gate(NamedTuple):
    """What an experts class of the library computes between its two products.

    activation: a name of kernels.ACTIVATIONS, or "act_fn" for the module's.
    constants: constant of the activation -> attribute of the module.
    """
    activation: str
    constants: dict[str, str]


QUICK_GEGLU_GATE = Gate("quick_geglu", {"alpha": "alpha", "clamp_value": "limit"})
CLAMPED_SWIGLU_GATE = Gate("swiglu", {"clamp_value": "swiglu_limit"})
SITU_GATE = Gate("situ", {
    "beta": "act_fn.gate_softcap.softcap", "linear_beta": "act_fn.up_softcap.softcap"})

# class that defines the gate -> the gate
GATES = {
    "BeamExperts": Gate("act_fn", {}),
    "Step3p7Experts": Gate("act_fn", {}),
    "DeepseekV4Experts": Gate("act_fn", {"clamp_value": "limit"}),
    "Glm5NextTextExperts": CLAMPED_SWIGLU_GATE,
    "HYV4Experts": CLAMPED_SWIGLU_GATE,
    "HYV4VLExperts": CLAMPED_SWIGLU_GATE,
    "GptOssExperts": QUICK_GEGLU_GATE,
    "OpenAIPrivacyFilterExperts": QUICK_GEGLU_GATE,
    "MiniMaxM3VLExperts": Gate("quick_geglu", {
        "alpha": "swiglu_alpha", "clamp_value": "swiglu_limit"}),
    "Inkling2Experts": SITU_GATE,
    "Inkling2LoopExperts": SITU_GATE,
}
ACT_FNS = {
    "transformers.activations.SiLUActivation": "swiglu",
    "torch.nn.modules.activation.SiLU": "swiglu",
    "torch.nn.functional.silu": "swiglu",
    "transformers.activations.GELUTanh": "geglu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
    "torch.nn.modules.activation.ReLU": "relu",
}


@torch.compiler.assume_constant_result                       # Dynamo does not know __qualname__
def _full_name(owner, method=None):
    named = owner if method is None else getattr(owner, method)
    return f"{named.__module__}.{named.__qualname__}"


def _options_of(experts):
    """The activation of an experts module, as keyword arguments of kernels.expert_mlp.
    NotImplementedError: names what expert_mlp cannot express.
    """
    def refuse(what):
        raise NotImplementedError(
            f"{type(experts).__name__}: {what} cannot be expressed by kernels.expert_mlp; "
            f"try another implementation")

    flags = _flags_of(experts)
    if flags["has_post_expert_norm"]:
        refuse("has_post_expert_norm")
    method = "transformers.integrations.moe._default_apply_gate"
    if hasattr(experts, "_apply_gate"):                      # not in Llama 4 and DBRX
        method = _full_name(type(experts), "_apply_gate")
    gate = Gate("act_fn", {})
    if method != "transformers.integrations.moe._default_apply_gate":
        owner = method.split(".")[-2]
        if owner not in GATES or not method.startswith("transformers.models."):
            refuse(f"the overridden _apply_gate ({method})")
        gate = GATES[owner]
        if owner == "Step3p7Experts" and experts.limit != math.inf:
            refuse(f"limit = {experts.limit}, which clamps after the activation,")

    kind = gate.activation
    if kind == "act_fn":
        act = experts.mlp.activation_fn if hasattr(experts, "mlp") else experts.act_fn
        act = _full_name(type(act) if isinstance(act, nn.Module) else act)
        if act not in ACT_FNS:
            refuse(f"act_fn {act}")
        kind = ACT_FNS[act]
    if moe.kernels.parts_of(moe.kernels.ACTIVATIONS[kind]) != 1 + flags["has_gate"]:
        refuse(f"has_gate = {flags['has_gate']} with {kind}")

    options = {"kind": kind}
    if kind == "quick_geglu":
        options["linear_offset"] = 1.0
    for name, path in gate.constants.items():
        options[name] = operator.attrgetter(path)(experts)
    return options


# ---- The blocks of a live Hugging Face model ----

# What a block or its experts do: no fields of the router.
OF_THE_BLOCK = """
    ffn_hidden_size activation glu_alpha glu_linear_offset activation_clamp_value situ_beta
    situ_linear_beta activation_fp8_input_store add_bias_linear apply_probs_on latent_size
    latent_norm latent_norm_eps shared_expert_intermediate_size shared_expert_gate
    shared_expert_overlap sequence_parallel params_dtype init_std output_init_std batch_first
""".split()

# Fields of published configs that say nothing of the router.
NOT_OF_THE_ROUTER = """
    mlp_bias moe_latent_size hidden_act n_shared_experts swiglu_limit num_shared_expert
    use_mixed_mlp_moe use_bias use_moe shared_expert_gate
""".split() + [*SHARED_SIZES, *LIMITS]


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
    prefixes = _prefixes(_tensors(model), row.layouts[-1:])
    names = [prefix.removesuffix(".") for prefix in prefixes]
    done = [name for name in names
            if hasattr(_gate_of(model.get_submodule(name), row), "moe_router")]
    names = [name for name in names if name not in done]
    if not names:
        raise ValueError(f"model has no {model_type} block to replace; "
                         f"replaced already: {_listed(done, ', ') or 'none'}")
    if any(tensor.is_meta for tensor in _tensors(model).values()):
        raise ValueError("model has tensors on the meta device; needs weights: load it first")
    groups = pg_collection or OneProcess()
    if groups.size("tp") > 1:
        raise ValueError(f"pg_collection has {groups.tp.size()} ranks in tp; needs one: "
                         f"each rank gives a block its own whole sequences")
    routers = {name: _router_for(model, name, row, changes, groups) for name in names}

    register_experts()
    batch = Batch(padding_mask)
    batch.published = Published(model)
    batch.hooks.append(batch.published.hook)
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


# -- a guest: the router of a library's gate --

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
    y_TH = _library_experts(
        block.experts, (x_TH * probs_T1).to(x_TH.dtype), indices_T1, torch.ones_like(probs_T1))
    return block.shared_expert(x_TH) + y_TH, logits_TE


def _dbrx_block(block, hidden_states):
    """The forward of a DBRX block, whose gate returns only logits."""
    _, probs_TK, indices_TK = block.router(hidden_states)
    y_TH = _library_experts(block.experts, hidden_states.flatten(0, -2), indices_TK, probs_TK)
    return y_TH.view_as(hidden_states)


# Blocks that do not call gate(x) -> (logits, probs, indices), then experts(x, indices, probs):
# class -> forward of its gate, and its own
BLOCK_FORWARDS = {"Llama4TextMoe": (_llama4_route, _llama4_block), "DbrxFFN": (_route, _dbrx_block)}
GATE_FORWARDS = _route, _llama4_route
REPLACEMENTS = *GATE_FORWARDS, _library_experts, _llama4_block, _dbrx_block


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
    weight = _tensors(block)[path]
    if row.block_scales:
        fields["scaling_factor"] = None
    dtypes = functools.partial(_dtypes_of_gate, row.precision, changes)
    fields |= dtypes(model.dtype, weight.dtype)
    reading = read_config(model.config, _layer_of(name))
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
    _options_of(block.experts)                               # refuses what cannot be expressed

    used = {"router.weight": True, "router.bias": config.router_bias, "hash_table": True,
            "router.expert_bias": config.enable_expert_bias}
    places = {}
    for path, slot in row.layouts[-1].items():
        if used.get(slot.parameter) and path in _tensors(block):
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
        fields |= _router_dtypes(precision, dtype, gate_dtype)
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
        _put_forward(experts, _library_experts)

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


def _layer_of(name):
    return int(re.findall(r"\d+", "0." + name)[-1])


# -- what save_pretrained has written, by load_state_dict --

class Renamed(NamedTuple):
    """Tensors of a save_pretrained file that make tensors of the model.

    transform: the library's, from the one to the other. pattern: published name -> its pattern.
    """
    transform: object
    pattern: dict[str, str]


class Published:
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


# -- what a block does not see of the model's forward --

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
    published: takes what save_pretrained wrote. A forward refuses a part of a checkpoint.
    """

    def __init__(self, padding_mask: bool = True):
        self.padding_mask = padding_mask
        self.texts = None
        self.has_our_experts = True
        self.published = None
        self.hooks = []

    def follow(self, model: nn.Module) -> None:
        names = tuple(inspect.signature(model.forward).parameters)
        enter = functools.partial(self.enter, names)
        self.hooks += [model.register_forward_pre_hook(enter, with_kwargs=True),
                       model.register_forward_hook(self.leave, always_call=True)]

    def enter(self, names, model, args, kwargs):
        if self.published.waiting:
            raise RuntimeError(f"load_state_dict got a part of what makes "
                               f"{_listed(list(self.published.waiting), ', ')}; needs all files of "
                               f"the checkpoint")
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

    def on_step_begin(self, args, state, control, optimizer=None, **others):
        scale = 1.0 / args.gradient_accumulation_steps
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            scale = scale * scaler.get_scale()
        moe.set_aux_loss_scale(scale)

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

    def on_train_end(self, args, state, control, **others):
        moe.set_aux_loss_scale(1.0)


# ---- Words of the table: knobs ----

NUMBERS_OF_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}


def field(*names: str, default=_ABSENT, among: dict | None = None) -> Callable:
    """A knob: a field of the published config, under any of these names."""
    return lambda read: read(*names, default=default, among=among)


def flag(*names: str, default: bool) -> Callable:
    """A knob that is True or False; None is False."""
    def knob(read):
        value = read(*names, default=default)
        return value if isinstance(value, Missing) else bool(value)
    return knob


def sizes(*F: str) -> dict:
    """Knobs of H, F, E, K and activation. F: its field's names, default moe_intermediate_size."""
    return {
        "hidden_size": field("hidden_size"),
        "ffn_hidden_size": field(*F or ["moe_intermediate_size"]),
        "topk": field("num_experts_per_tok", "num_experts_per_token", "experts_per_token",
                      "moe_k", "moe_topk", "moe_top_k"),
        "num_experts": field(*NUMBERS_OF_EXPERTS),
        "activation": field("hidden_act", default="silu", among=GATED),
    }


def normed(default: bool) -> dict:
    """Knob: the config says whether the probs are normalised."""
    return {"norm_topk_prob": flag("norm_topk_prob", default=default)}


def scaled(default: float) -> dict:
    """Knob: a factor of the config, on the probs."""
    return {"scaling_factor": field("routed_scaling_factor", default=default)}


def shared(*sizes: str) -> dict:
    """Knob of one shared expert. sizes: the names of the field with its size."""
    return {"shared_expert_intermediate_size": field(*sizes)}


def shared_times(*sizes: str, default: int | None = 1, size: object = _ABSENT) -> dict:
    """Knob of several shared experts, which side by side are one.

    sizes: the names of the field with the size of each; without one it is F.
    default, size: the defaults of their number and of that size.
    """
    names = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    each = field(*sizes or ["moe_intermediate_size"], default=size)

    def total(read):
        count = read(*names, default=default) or 0
        width = each(read) or 0
        return count and width and count * width or None
    return {"shared_expert_intermediate_size": total}


def grouped(
    groups: int | None, kept: int | None, best: int = 2, on: Callable | None = None,
) -> dict:
    """Knobs of n_group groups of experts, of which the topk_group best are kept.

    groups, kept: the defaults of the two fields.
    best: how many scores make a group's score.
    on: a function of the Reader: whether groups are used. None: if there are several.
    """
    number = field("n_group", "num_expert_group", default=groups)

    def several(read):
        return number(read) not in (None, 0, 1)

    def if_used(knob):
        def value(read):
            got = knob(read)                                 # always, so that it is not refused
            return got if used(read) else None
        return value

    used = on or several
    return {
        "num_groups": if_used(number),
        "group_topk": if_used(field("topk_group", default=kept)),
        "group_score_topk": if_used(lambda read: best),
    }


def biased(scaling: float, norm: bool = True) -> dict:
    """Knobs of a router with sigmoid scores, a bias only for the choice, and a factor."""
    return SIGMOID | EXPERT_BIAS | {
        "norm_topk_prob": flag("norm_topk_prob", "moe_renormalize", default=norm),
        "scaling_factor": field(*FACTORS, default=scaling),
    }


def noaux(scaling: float, norm: bool = True, groups: int = 1, kept: int = 1) -> dict:
    """Knobs of DeepSeek-V3's router (arXiv 2412.19437): biased, and with groups."""
    return biased(scaling, norm) | grouped(groups, kept)


def averaged(read: Reader) -> str | None:
    """After Cohere's sum of routed and shared output: its half, unless the config says "sum"."""
    if read("num_shared_experts", default=0):
        strategy = read(
            "shared_expert_combination_strategy", default="average", among={"sum": None})
        return strategy and "y / 2"


def multiplied(name: str) -> Callable:
    """After a block: the factor of this field."""
    def knob(read):
        factor = read(name, default=1.0)
        return None if factor in (1, None) else f"y * {factor}"
    return knob


def beside(read: Reader) -> str | None:
    """After Granite's block: the dense FFN that its layer adds, and the factor of both."""
    factor = multiplied("residual_multiplier")(read)
    size = read("shared_intermediate_size", default=0)
    if not size:
        return factor
    both = "y + shared_mlp(x)" if factor is None else factor.replace("y", "(y + shared_mlp(x))", 1)
    return f"{both}, {size} wide"


def unclamped(read: Reader) -> int | None:
    """The size of shared experts that are not clamped, where the routed ones are."""
    size = shared_times()["shared_expert_intermediate_size"](read)
    if size:
        read.problems.append(f"n_shared_experts is {read.get('n_shared_experts', 1)}; needs 0, "
                             f"since a layer would clamp its shared expert too")
    return size


def kimi_activation(read: Reader) -> str:
    """The activation: SiTU if the config has SiTU's beta and names no other."""
    default = "silu"
    if read("activation_situ_beta", default=None) is not None:
        default = "situ"
    return read("hidden_act", default=default, among={**GATED, "situ": "situ"})


def chosen_by_score(read: Reader) -> bool:
    """Whether a DeepSeek-V4 layer has a bias. In a hash layer a table chooses the experts."""
    kind = read("mlp_layer_types", default=None)
    if kind is not None:
        return kind != "hash_moe"
    hashed = read("num_hash_layers", default=3) or 0
    if hashed and read.layer_idx is None:
        read.differ(f"the first {hashed} layers are hash layers")
    return (read.layer_idx or 0) >= hashed


# A router without one of these two takes the softmax over the chosen experts.
SOFTMAX_OVER_ALL = {"pre_softmax": True}
SIGMOID = {"score_function": "sigmoid"}

ALWAYS_NORMED = {"norm_topk_prob": True}
NEVER_NORMED = {"norm_topk_prob": False}
SWIGLU = {"activation": "swiglu"}                            # another hidden_act is refused
CLAMPED = {"activation_clamp_value": field("swiglu_limit", default=10.0)}
COHERE = {
    "norm_topk_prob": lambda read: (
        flag("norm_topk_prob", default=True)(read)           # read in any case
        or read("expert_selection_fn", default="softmax") == "softmax"),
    "score_function": field("expert_selection_fn", default="softmax",
                            among={"softmax": "softmax", "sigmoid": "sigmoid"}),
    **shared_times("intermediate_size", default=0),
}
EXPERT_BIAS = {"enable_expert_bias": True}
V3_ROUTER = noaux(2.5, groups=8, kept=4)
QUICK_GEGLU = {
    "activation": "quick_geglu",
    "glu_alpha": field("swiglu_alpha", default=1.702),
    "glu_linear_offset": 1.0,
    "activation_clamp_value": field("swiglu_limit", default=7.0),
}
V2_GROUPED = field("topk_method", default="greedy",
                   among={"greedy": False, "group_limited_greedy": True})


# ---- Words of the table: layouts ----

def columns(text: str, number: int) -> list[list[str]]:
    """The lines of a text, cut into columns. The last may have spaces."""
    return [line.split(maxsplit=number - 1) for line in text.splitlines() if line.strip()]


def layout(text: str) -> dict[str, Slot]:
    """A layout, from lines of three columns: name, parameter or parameter[part], axes."""
    slots = {}
    for name, where, axes in columns(text, 3):
        parameter, _, part = where.removesuffix("]").partition("[")
        slots[name] = Slot(parameter, part, axes)
    return slots


def layouts(others: str, experts: str | None = None, held: str | None = None) -> tuple[dict, dict]:
    """(the layout as published, the layout in memory).

    The published one is `others` and `experts`, by default one tensor per expert and projection.
    The one in memory is `held`, by default `others`, with gate and up in one tensor.
    """
    return layout(others + (experts or EACH)), layout((held or others) + FUSED)


def w132(text: str) -> str:
    """The text with w1, w3 and w2 for gate, up and down projections."""
    return text.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")


def expert_bias(name: str, axes: str = "e") -> str:
    return f"{name}    router.expert_bias    {axes}\n"


def shared_expert(name: str) -> str:
    return f"""
        {name}.gate_proj.weight    shared_experts.fc1[0]    s h
        {name}.up_proj.weight      shared_experts.fc1[1]    s h
        {name}.down_proj.weight    shared_experts.fc2       h s
    """


GATE = "gate.weight    router.weight    e h\n"
ROUTER = "router.weight    router.weight    e h\n"
CORRECTED = GATE + expert_bias("gate.e_score_correction_bias")
BESIDE = GATE + expert_bias("e_score_correction_bias")
SHARED = shared_expert("shared_experts")
EACH = """
    experts.{e}.gate_proj.weight    experts.fc1[0]    f h
    experts.{e}.up_proj.weight      experts.fc1[1]    f h
    experts.{e}.down_proj.weight    experts.fc2       h f
"""
FUSED = """
    experts.gate_up_proj    experts.fc1    e (p f) h
    experts.down_proj       experts.fc2    e h f
"""

QWEN2 = GATE + shared_expert("shared_expert") + """
    shared_expert_gate.weight    shared_experts.gate_weight    1 h
"""
GRANITE = """
    router.layer.weight     router.weight    e h
    input_linear.weight     experts.fc1      e (p f) h
    output_linear.weight    experts.fc2      e h f
"""
ERNIE_HELD = GATE + SHARED + expert_bias("gate.moe_statics.e_score_correction_bias", axes="1 e")
TRANSPOSED = """
    experts.gate_up_proj    experts.fc1    e h (p f)
    experts.down_proj       experts.fc2    e f h
"""
NESTED = "router.gate.weight    router.weight    e h\n" + expert_bias("expert_bias")
STEP = """
    moe.gate.weight         router.weight         e h
    moe.router_bias         router.expert_bias    e
    moe.gate_proj.weight    experts.fc1[0]        e f h
    moe.up_proj.weight      experts.fc1[1]        e f h
    moe.down_proj.weight    experts.fc2           e h f
""" + shared_expert("share_expert")
ARIA = ROUTER + SHARED + """
    experts.fc1.weight    experts.fc1    e h (p f)
    experts.fc2.weight    experts.fc2    e f h
"""
LAGUNA = GATE + expert_bias("experts.e_score_correction_bias") + shared_expert("shared_expert")
GPT_OSS = ROUTER + """
    router.bias                  router.bias         e
    experts.gate_up_proj         experts.fc1         e h (f p)
    experts.gate_up_proj_bias    experts.fc1_bias    e (f p)
    experts.down_proj            experts.fc2         e f h
    experts.down_proj_bias       experts.fc2_bias    e h
"""
DBRX = """
    router.layer.weight    router.weight     e h
    experts.mlp.w1         experts.fc1[0]    (e f) h
    experts.mlp.v1         experts.fc1[1]    (e f) h
    experts.mlp.w2         experts.fc2       (e f) h
"""
NEMOTRON = CORRECTED + """
    shared_experts.up_proj.weight      shared_experts.fc1[0]    s h
    shared_experts.down_proj.weight    shared_experts.fc2       h s
    fc1_latent_proj.weight             latent_down.weight       l h
    fc2_latent_proj.weight             latent_up.weight         h l
"""
NEMOTRON_EACH = """
    experts.{e}.up_proj.weight      experts.fc1[0]    f h
    experts.{e}.down_proj.weight    experts.fc2       h f
"""
NEMOTRON_FUSED = """
    experts.up_proj      experts.fc1[0]    e f h
    experts.down_proj    experts.fc2       e h f
"""
LATENT = """
    routed_expert_down_proj.weight    latent_down.weight    l h
    routed_expert_up_proj.weight      latent_up.weight      h l
    routed_expert_norm.weight         latent_up.norm        l
"""
INKLING = """
    experts.w13_weight    experts.fc1    e (f p) h
    experts.w2_weight     experts.fc2    e h f
"""
MINIMAX_M3 = """
    shared_experts.gate_up_proj.weight    shared_experts.fc1    (p s) h
    shared_experts.down_proj.weight       shared_experts.fc2    h s
"""
AROUND = r"(?!(gate|experts|shared_experts|moe|share_expert)\.).*"
HASH_TABLE = "gate.tid2eid"
TABLE = f"{HASH_TABLE}    hash_table    v k\n"


# ---- The table ----

def qwen2_moe(norm: dict) -> Family:
    """A model with Qwen2-MoE's tensor names: the shared expert has a sigmoid gate."""
    return Family(
        sizes() | SOFTMAX_OVER_ALL | norm
        | shared("shared_expert_intermediate_size") | {"shared_expert_gate": True},
        layouts(QWEN2))


def deepseek(router: dict, shared_experts: dict | None = None) -> Family:
    """A model with DeepSeek-V3's tensor names."""
    if shared_experts is None:
        shared_experts = shared_times()
    return Family(sizes() | router | shared_experts, layouts(CORRECTED + SHARED))


# If a row gives two knobs for one field, the later one counts.
FAMILIES = {
    "mixtral": Family(sizes("intermediate_size"), layouts(GATE, w132(EACH))),
    "granitemoe": Family(
        sizes("intermediate_size"),
        (layout(GRANITE), layout(ROUTER + FUSED)), after=multiplied("residual_multiplier")),
    "jamba": Family(
        sizes("intermediate_size") | SOFTMAX_OVER_ALL | NEVER_NORMED,
        layouts(ROUTER), dense={"expert_layer_period": 2, "expert_layer_offset": 1}),
    "olmoe": Family(
        sizes("intermediate_size") | SOFTMAX_OVER_ALL | normed(default=False),
        layouts(GATE)),
    "qwen3_moe": Family(sizes() | SOFTMAX_OVER_ALL | normed(default=False), layouts(GATE)),
    "qwen2_moe": qwen2_moe(normed(default=False)),
    "qwen3_next": qwen2_moe(normed(default=True)),
    "deepseek_v2": Family(
        sizes() | SOFTMAX_OVER_ALL | NEVER_NORMED | shared_times(default=2)
        | grouped(groups=None, kept=None, best=1, on=V2_GROUPED) | scaled(1.0),
        layouts(GATE + SHARED)),
    "deepseek_v3": deepseek(V3_ROUTER),
    "glm4_moe": deepseek(noaux(1.0)),
    "dots1": deepseek(noaux(1.0, norm=False), shared_times(default=None))._replace(
        needs={"scoring_func": ("sigmoid", "noaux_tc", None)}),
    "llama4_text": Family(
        sizes("intermediate_size") | SIGMOID | NEVER_NORMED | {"apply_probs_on": "input"}
        | shared("intermediate_size"),
        (layout(ROUTER + shared_expert("shared_expert") + TRANSPOSED),)),
    "gpt_oss": Family(
        sizes("intermediate_size") | QUICK_GEGLU
        | {"add_bias_linear": True, "router_bias": True},
        (layout(GPT_OSS),)),
    "ernie4_5_moe": Family(
        sizes() | SOFTMAX_OVER_ALL | ALWAYS_NORMED | EXPERT_BIAS
        | shared_times(default=2),
        layouts(GATE + SHARED + expert_bias("moe_statics.e_score_correction_bias", axes="1 e"),
                held=ERNIE_HELD),
        needs={"use_bias": False, "moe_norm_min": (1e-12, 0.0)},
        dense={"moe_layer_start_index": 1}),
    "minimax_m2": Family(
        sizes("intermediate_size") | SIGMOID | ALWAYS_NORMED | EXPERT_BIAS,
        layouts(BESIDE, w132(EACH)),
        needs={"use_routing_bias": (True,)}),
    "hunyuan_v1_moe": Family(
        sizes("intermediate_size")
        | shared("intermediate_size", "moe_intermediate_size"),
        layouts("gate.wg.weight    router.weight    e h" + shared_expert("shared_mlp")),
        needs={"num_shared_expert": (1,), "use_mixed_mlp_moe": (True,),
               "group_limited_greedy": False, "moe_drop_tokens": False}),
    "lfm2_moe": Family(
        sizes() | SIGMOID | normed(default=True) | scaled(1.0) | SWIGLU | {
            "norm_eps": 1e-6,
            "enable_expert_bias": flag("use_expert_bias", default=True),
        },
        layouts(GATE + expert_bias("expert_bias"), w132(EACH)), dense={"num_dense_layers": 2}),
    "nemotron_h": Family(
        sizes() | noaux(1.0)
        | shared("moe_shared_expert_intermediate_size") | {
            "latent_size": field("moe_latent_size", default=None),
            "activation": field("mlp_hidden_act", default="relu2", among={"relu2": "relu2"}),
        },
        (layout(NEMOTRON + NEMOTRON_EACH), layout(NEMOTRON + NEMOTRON_FUSED)),
        needs={"n_shared_experts": 1}),
    "dbrx": Family(
        sizes("ffn_config.ffn_hidden_size") | SOFTMAX_OVER_ALL | {
            "hidden_size": field("d_model", "hidden_size"),
            "num_experts": field("ffn_config.moe_num_experts"),
            "topk": field("ffn_config.moe_top_k"),
            "activation": field("ffn_config.ffn_act_fn.name", default="silu", among=GATED),
            "norm_topk_prob": field("ffn_config.moe_normalize_expert_weights", default=1.0,
                                    among={1.0: True, None: False}),
        },
        (layout(DBRX),),
        needs={"ffn_config.moe_jitter_eps": 0.0}),
    "kimi_linear": Family(
        sizes() | noaux(2.446) | shared_times() | {
            "activation": kimi_activation,
            "situ_beta": lambda read: read("activation_situ_beta", default=None) or 1.0,
            "situ_linear_beta": field("activation_situ_linear_beta", default=None),
            "latent_size": field("routed_expert_hidden_size", default=None),
            "latent_norm": flag("latent_moe_use_norm", default=False),
            "latent_norm_eps": field("rms_norm_eps", default=1e-5),
        },
        layouts(CORRECTED + SHARED + LATENT, w132(EACH))),
    "deepseek_v4": Family(
        sizes() | ALWAYS_NORMED | scaled(1.5) | shared("moe_intermediate_size") | CLAMPED | {
            "score_function": field("scoring_func", default="sqrtsoftplus",
                                    among={"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"}),
            "enable_expert_bias": chosen_by_score,
        },
        layouts(GATE + expert_bias("gate.bias") + w132(SHARED) + TABLE, w132(EACH),
                held=CORRECTED + SHARED + TABLE),
        needs={"n_shared_experts": 1, "topk_method": "noaux_tc"},
        others=r"gate\.tid2eid"),
    "inkling2_text": Family(
        sizes() | biased(8.0) | ALWAYS_NORMED | {
            "activation": "situ",
            "situ_beta": field("mlp_gate_softcap", default=4.0),
            "situ_linear_beta": field("mlp_up_softcap", default=25.0),
        },
        layouts(GATE + expert_bias("gate.bias"), INKLING, held=CORRECTED)),
    "flint": Family(
        sizes() | SIGMOID | normed(default=True)
        | shared("shared_expert_intermediate_size"),
        layouts(GATE + shared_expert("shared_expert")), dense={"mlp_only_layers": [0, 1]}),
    "mistral_large4_text": Family(
        sizes() | SOFTMAX_OVER_ALL | ALWAYS_NORMED | scaled(1.0)
        | grouped(groups=1, kept=1) | shared_times(),
        (layout(GATE + w132(SHARED + EACH)), *layouts(GATE + SHARED, w132(EACH))),
        others=AROUND),
    "minimax_m3_vl_text": Family(
        sizes("intermediate_size", "moe_intermediate_size") | biased(2.0) | ALWAYS_NORMED
        | QUICK_GEGLU | shared("shared_intermediate_size"),
        layouts(BESIDE + SHARED, w132(EACH),
                held=CORRECTED + MINIMAX_M3),
        needs={"hidden_act": ("swigluoai", "silu", None), "n_shared_experts": 1}),
    "bailing_hybrid": Family(
        sizes() | V3_ROUTER
        | shared_times("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        layouts(GATE + SHARED + expert_bias("gate.expert_bias"), held=CORRECTED + SHARED)),
    "sarvam_moe": Family(
        sizes() | noaux(2.5)
        | shared_times("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        layouts(GATE + SHARED + expert_bias("gate.expert_bias"), held=CORRECTED + SHARED)),
    "lara_mini": Family(
        sizes() | SOFTMAX_OVER_ALL | normed(default=True)
        | shared("shared_expert_intermediate_size"),
        layouts(GATE + shared_expert("shared_expert"))),
    "axk2": deepseek(biased(2.5)),
    "dots3_note_text": deepseek(
        noaux(1.0),
        shared_times("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
                     size=1536)),
    "beam": Family(
        sizes() | V3_ROUTER, layouts(CORRECTED), after="post_feedforward_layernorm(y)"),
    "mellum": Family(sizes() | SOFTMAX_OVER_ALL | normed(default=True), layouts(GATE)),
    "qwen3_vl_moe_text": Family(
        sizes() | SOFTMAX_OVER_ALL | ALWAYS_NORMED,
        (layout(GATE + TRANSPOSED), layout(GATE + FUSED))),
    "qwen3_5_moe_text": qwen2_moe(ALWAYS_NORMED),
    "granitemoe_swa": Family(
        sizes("intermediate_size"), (layout(ROUTER + FUSED),), after=beside),
    "aria_text": Family(
        sizes("intermediate_size") | shared_times("intermediate_size", default=2) | SWIGLU,
        (layout(ARIA), layout(ROUTER + SHARED + TRANSPOSED))),
    "cohere2_moe": Family(
        sizes("intermediate_size") | COHERE, layouts(GATE + SHARED), after=averaged),
    "mistral4": Family(
        sizes() | SOFTMAX_OVER_ALL | normed(default=True) | scaled(1.0) | shared_times()
        | grouped(groups=1, kept=1), (layout(GATE + SHARED + FUSED),)),
    "afmoe": Family(
        sizes() | biased(1.0) | ALWAYS_NORMED | shared_times(default=2), layouts(NESTED + SHARED),
        dense={"num_dense_layers": 1}, after="post_mlp_layernorm(y)"),
    "hy_v3": Family(
        sizes("moe_intermediate_size", "expert_hidden_dim") | biased(2.826) | ALWAYS_NORMED
        | shared_times(), layouts(NESTED + shared_expert("shared_mlp"), held=BESIDE + SHARED)),
    "laguna": Family(
        sizes() | biased(1.0) | ALWAYS_NORMED | shared("shared_expert_intermediate_size"),
        layouts(LAGUNA, held=CORRECTED + SHARED)),
    "step3p5": Family(
        sizes() | biased(1.0) | ALWAYS_NORMED | shared("share_expert_dim"),
        (layout(STEP), layout(CORRECTED + SHARED + FUSED)), others=AROUND,
        needs={"n_shared_experts": 1}),
    "exaone_moe": Family(
        sizes() | noaux(2.5) | shared_times(), layouts(BESIDE + SHARED, held=CORRECTED + SHARED)),
    "mimo_v2_flash": Family(sizes() | noaux(1.0), layouts(CORRECTED)),
    "glm_moe_dsa": deepseek(noaux(2.5)),
    "glm4_moe_lite": deepseek(noaux(1.8)),
    "glm5_next_text": deepseek(noaux(2.5) | SWIGLU | CLAMPED),
    "axk1": deepseek(V3_ROUTER)._replace(
        others=r"post_mlp_layernorm\..*", after="post_mlp_layernorm(y)"),
    "hy_v4": deepseek(
        noaux(2.827) | SWIGLU | CLAMPED, {"shared_expert_intermediate_size": unclamped}),
}

# Routers that do not compute everything in fp32: precision of the weight, product, scores, probs.
PRECISIONS = dict(columns("""
    mixtral                     model  gate  fp32   fp32
    minimax_m2                  model  gate  fp32   fp32
    minimax_m3_vl_text          model  gate  fp32   fp32
    afmoe                       model  gate  fp32   fp32
    step3p5                     model  gate  fp32   fp32
    granitemoe                  model  gate  fp32   model
    granitemoe_swa              model  gate  fp32   model
    jamba                       model  gate  fp32   model
    olmoe                       model  gate  fp32   model
    qwen3_moe                   model  gate  fp32   model
    qwen2_moe                   model  gate  fp32   model
    qwen3_next                  model  gate  fp32   model
    qwen3_vl_moe_text           model  gate  fp32   model
    qwen3_5_moe_text            model  gate  fp32   model
    llama4_text                 model  gate  fp32   model
    gpt_oss                     model  gate  fp32   model
    hunyuan_v1_moe              fp32   gate  fp32   gate
    mellum                      model  gate  fp32   model
    aria_text                   model  gate  fp32   model
    cohere2_moe                 model  gate  fp32   model
    laguna                      model  gate  fp32   model
    lfm2_moe                    model  gate  model  model
    dbrx                        model  gate  model  model
    deepseek_v4                 model  gate  model  model
    mistral4                    model  gate  model  model
    ernie4_5_moe                fp32   fp32  fp32   model
    lara_mini                   model  fp32  fp32   model
""", 2))
for name, words in PRECISIONS.items():
    FAMILIES[name] = FAMILIES[name]._replace(precision=words)
for name in ("beam", "laguna", "minimax_m3_vl_text", "step3p5"):
    FAMILIES[name] = FAMILIES[name]._replace(block_scales=True)

# Models with the block of another model.
SAME = dict(columns("""
    kimi_k2                     deepseek_v3
    kimi_k3                     kimi_linear
    qwen4_exp_text              qwen3_next
    flex_olmo                   olmoe
    minimax                     mixtral
    granitemoeshared            granitemoe
    granitemoehybrid            granitemoe
    deepseek_v32                deepseek_v3
    sarvam_mla                  glm_moe_dsa
    hy_v4_vl_text               hy_v4
    inkling2_loop_text          inkling2_text
    glm4v_moe_text              glm4_moe
    solar_open                  glm4_moe
    deepseek_ocr2_text          deepseek_v2
    unlimited_ocr_text          deepseek_v2
    qwen3_omni_moe_text         mellum
    qwen3_omni_moe_talker_text  qwen2_moe
""", 2))
FAMILIES |= {name: FAMILIES[other] for name, other in SAME.items()}
# How many of the first layers are dense if the config has no first_k_dense_replace.
FIRST_DENSE = {
    1: """
        glm4_moe glm4v_moe_text glm4_moe_lite kimi_linear kimi_k3 mistral_large4_text sarvam_moe
        sarvam_mla axk1 axk2 dots3_note_text exaone_moe hy_v3 hy_v4 hy_v4_vl_text laguna
        mimo_v2_flash unlimited_ocr_text""",
    2: "bailing_hybrid",
    3: "deepseek_v3 deepseek_v32 kimi_k2 beam step3p5 glm_moe_dsa glm5_next_text",
}
for number, names in FIRST_DENSE.items():
    for name in names.split():
        FAMILIES[name] = FAMILIES[name]._replace(dense={"first_k_dense_replace": number})
AFTER = {"granitemoeshared": beside, "granitemoehybrid": beside,
         "minimax": multiplied("mlp_beta_factor"), "flex_olmo": "post_feedforward_layernorm(y)"}
for name, after in AFTER.items():
    FAMILIES[name] = FAMILIES[name]._replace(after=after)

# Why the layer cannot express the other models of the library.
INEXPRESSIBLE = dict(columns("""
    phimoe                     its SparseMixer router masks the first expert, with its own gradient
    doge                       it finds experts by the sum of two keys; an expert is two vectors
    ernie4_5_vl_moe_text       it has two routers, for text and images, with experts of two sizes
    gemma4_text                its router reads another input than its experts, after a norm
    diffusion_gemma_text       its router is that of gemma4_text, with an input of its own
    inkling_text               its router weighs the shared experts too, in one sum with the others
    jetmoe                     it adds a bias to the block's output, and routes its attention too
    kolibri1                   it adds its expert bias to the logits, the layer adds it to scores
    longcat_flash              some of its experts are the identity, without weights
    muse_spark_text            it has a norm after each expert, before the probs
    zaya                       its router is an MLP that reads the router of the layer before, too
    qwen3_omni_moe             its thinker and its talker have different blocks; take one of them
    openai_privacy_filter      it is a classifier of tokens, no language model
    dots3_note_vision_encoder  it is an encoder of images, no language model
    vitpose_backbone           it has no router: an expert belongs to a data set
""", 2))
# NLLB's reasons are those of its config: the block of transformers 5.24 runs only experts 0 and 1.
INEXPRESSIBLE |= {
    "nllb-moe": "dropout acts on its experts' outputs, as a factor in eval mode; in training an "
                "expert takes a fixed number of tokens",
    "switch_transformers": "an expert takes a fixed number of tokens of each sequence, in eval "
                           "mode too; in training dropout acts on its activation",
}


# Further names of types: those of outer configs, and those in published files.
OUTER = {
    "step3p7": "step3p5", "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "inkling_mm_model": "inkling_text", "hunyuan": "hunyuan_v1_moe",
    "minimax_text_01": "minimax", "minimax_m3": "minimax_m3_vl_text"}


def with_outer_names(rows: dict) -> dict:
    """The rows, also under the names of configs that hold them: gemma4_text also as gemma4."""
    outer = {name.removesuffix("_text"): row for name, row in rows.items()}
    return outer | {name: rows[inner] for name, inner in OUTER.items() if inner in rows} | rows


TYPES = with_outer_names(FAMILIES)
REFUSED = with_outer_names(INEXPRESSIBLE)
