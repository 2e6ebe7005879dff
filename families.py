"""Published Mixture-of-Experts models as one table of knobs; their weights into the layer and out again.

    layer = from_hf(MoELayer(config_from_hf(hf_config)), tensors, "qwen3_moe", prefix="model.layers.3.mlp.")
    tensors = to_hf(layer, "qwen3_moe", prefix="model.layers.3.mlp.")

Configs are dicts or objects with attributes, tensors plain mappings: no other library is needed. The table FAMILIES is at
the end. Balance losses stay off (set load_balancing_type with dataclasses.replace). Letters: kernels.py.
"""
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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
    which the layer computes the same model; absent is fine too.
    """
    knobs: dict[str, object]
    layouts: tuple[dict[str, str], ...]
    needs: dict[str, tuple] = {}


AXES = {"router.weight": "eh", "router.bias": "e", "router.expert_bias": "e",
        "experts.fc1": "epfh", "experts.fc2": "ehf", "experts.fc1_bias": "epf", "experts.fc2_bias": "eh",
        "shared_experts.fc1": "psh", "shared_experts.fc2": "hs", "shared_experts.gate_weight": "1h"}
DTYPES = ("float64", "float32", "bfloat16", "float16")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
QUANTISED = "quantization_config is given; needs dequantised weights and a config without it"
_ABSENT = object()


# ---- Configs ----

class Reader:
    """Reads a published config, a mapping or an object with attributes; keeps what was read and what cannot be."""

    def __init__(self, config):
        self.config, self.names, self.problems = config, set(), []

    def look(self, name: str):
        """The value of a field ("ffn_config.moe_top_k": inside), or _ABSENT; a uniform per-layer list is one value."""
        value = self.config
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else getattr(value, part, _ABSENT)
        if isinstance(value, (list, tuple)):
            if not value or any(x != value[0] for x in value):
                self.problems.append(f"{name} is {list(value)}; needs one value, that of the layer's own entry")
            value = value[0] if value else None
        return value

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


def _family(model_type) -> Family:
    if model_type in INEXPRESSIBLE:
        raise ValueError(f"model_type is {model_type!r}: {INEXPRESSIBLE[model_type]}")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def config_from_hf(hf_config) -> moe.MoEConfig:
    """The MoE layer of a published config (config.json as a dict, the library's to_dict(), or its object), by model_type;
    of one with a text_config, that of the language model.

    params_dtype is the config's dtype or torch_dtype, the inner's before the outer's, fp32 where it has none; what else a config leaves out has its
    published default, but sizes have to be there. ValueError lists all that the layer cannot express: it computes what
    was published or nothing.
    """
    reads = [Reader(hf_config)]                              # the innermost first
    while (model_type := reads[0].look("model_type")) not in {**FAMILIES, **INEXPRESSIBLE}:
        if reads[0].look("text_config") in (_ABSENT, None):
            break
        if reads[0].look("quantization_config") not in (_ABSENT, None):
            raise ValueError(QUANTISED)
        reads.insert(0, Reader(reads[0].look("text_config")))
    read = reads[0]
    row = _family(None if model_type is _ABSENT else model_type)
    values = {name: knob(read) if callable(knob) else knob for name, knob in row.knobs.items()}
    given = [value for each in reads for name in ("dtype", "torch_dtype")
             if (value := each.look(name)) not in (_ABSENT, None)]
    dtype = str([*given, "float32"][0]).removeprefix("torch.")
    if dtype not in DTYPES:
        read.problems.append(f"dtype is {dtype}; needs {', '.join(DTYPES)}")
    # what some family's config may ask for, and this one's does not read
    usual = {"quantization_config": (None,), "router_jitter_noise": (0.0, None), "mlp_bias": (False, None),
             "moe_latent_size": (None,), "hidden_act": ("silu", "swish", None), "topk_method": ("greedy", None),
             "scoring_func": (values.get("score_function", "softmax"), None), "n_group": (1, 0, None),
             "norm_topk_prob": (_meaning(values)["norm_topk_prob"], None), "routed_scaling_factor": (1.0, 0, None),
             "n_shared_experts": (0, None), "swiglu_limit": (None,)}
    for name, fine in {**usual, **row.needs}.items():
        if name not in read.names and (value := read.look(name)) is not _ABSENT and value not in fine:
            quantised = name == "quantization_config"
            read.problems.append(QUANTISED if quantised else f"{name} is {value!r}; needs {_or(fine)}")
    if read.problems:
        problems = "; ".join(dict.fromkeys(read.problems))
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
    """One published tensor: its shape and axes in the file, and the part of a parameter, axes again, that it fills."""
    shape: list[int]
    axes: str
    view: Tensor | None                                # None: an expert of another rank
    view_axes: str
    sizes: dict[str, int]                              # axis -> its whole size
    cut: dict[str, tuple[int, int]]                    # axis cut over ranks -> start and length of this rank's part

    def put(self, tensor: Tensor) -> None:
        """The file's tensor into the layer, cast to the parameter's dtype."""
        tensor = tensor.reshape([self.sizes[a] for a in self.axes]).permute([self.axes.index(a) for a in self.view_axes])
        for dim, a in enumerate(self.view_axes):
            if a in self.cut:
                tensor = tensor.narrow(dim, *self.cut[a])
        self.view.copy_(tensor.reshape(self.view.shape))

    def take(self) -> Tensor:
        """A copy of the layer's part as the file holds it."""
        tensor = self.view.detach().reshape([self.sizes[a] for a in self.view_axes])
        tensor = tensor.permute([self.view_axes.index(a) for a in self.axes])
        return tensor.reshape(self.shape).clone(memory_format=torch.contiguous_format)


def _places(layer: moe.MoELayer, layout: dict[str, str]) -> dict[str, Place]:
    """Name behind the prefix -> Place, without the parameters that the layer does not have."""
    config, groups = layer.config, layer.groups
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    sizes = {"e": config.num_experts, "p": config.parts, "f": config.ffn_hidden_size, "h": config.hidden_size,
             "s": config.shared_expert_intermediate_size, "1": 1}
    places = {}
    for pattern, where in layout.items():
        parameter, part, axes = re.fullmatch(r"([^[ ]+)(?:\[(\d)\])? (.*)", where).groups()
        if parameter not in tensors:
            continue
        view, view_axes, cut = tensors[parameter], AXES[parameter], {}
        for axis, group, owner in (("e", groups.ep, "experts."), ("s", groups.tp, "shared_experts.")):
            if group is not None and parameter.startswith(owner) and axis in view_axes:
                length = sizes[axis] // group.size()
                cut[axis] = group.rank() * length, length
        if part is not None:
            view, view_axes = view.select(view_axes.index("p"), int(part)), view_axes.replace("p", "")
        shape = [math.prod(sizes[a] for a in axis.strip("()").split(" ")) for axis in re.findall(r"\(.*?\)|\S", axes)]
        flat = "".join(a for a in axes if a.isalpha())
        if "{e}" not in pattern:
            places[pattern] = Place(shape, flat, view, view_axes.replace("1", ""), sizes, cut)
            continue
        first, count = cut.pop("e", (0, config.num_experts))
        for e in range(config.num_experts):
            local = view[e - first] if first <= e < first + count else None
            places[pattern.replace("{e}", str(e))] = Place(shape, flat, local, view_axes.replace("e", ""), sizes, cut)
    return places


def _fitting(layer: moe.MoELayer, model_type: str) -> tuple[moe.MoELayer, Family]:
    """(the layer, its row), or ValueError where the layer computes something else than the family."""
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
         "enable_expert_bias", "shared_expert_intermediate_size", "shared_expert_gate")


# ---- Weights in, weights out, weights from a dense FFN ----

def from_hf(layer: moe.MoELayer, tensors: Mapping, model_type: str, prefix: str = "") -> moe.MoELayer:
    """Copies one block's weights into the layer, and returns it. Names are looked up behind `prefix`
    ("model.layers.3.mlp.", "model.layers.3.block_sparse_moe.", ..), as published or as held in memory; others are left.

    tensors: name -> tensor, fp64, fp32, bf16 or fp16, cast to the parameters' dtype (the expert bias stays fp32). Only
    keys() and [name] are used, or safetensors' get_slice and get_tensor; one tensor is loaded at a time, without
    get_slice twice, first for its shape. Over ep only this rank's experts are read and may be all that is there; over tp
    the shared expert's part is taken.
    ValueError lists every missing, unexpected and misshapen tensor; then, and where the layer is no block of this family,
    nothing has changed.
    """
    whole, (layer, row) = layer, _fitting(layer, model_type)
    load = getattr(tensors, "get_tensor", None) or tensors.__getitem__
    names = [name.removeprefix(prefix) for name in tensors.keys() if name.startswith(prefix)]
    here = set(names)
    layouts = [_places(layer, layout) for layout in row.layouts]
    places = max(layouts, key=lambda layout: len(here & layout.keys()))            # of two alike the published one
    local = {name: place for name, place in places.items() if place.view is not None}
    problems = [f"{prefix}{name} {place.shape} is missing" for name, place in local.items() if name not in here]
    problems += [f"{prefix}{name} is unexpected" for name in names if name not in places]
    for name, place in local.items():
        if name in here:
            shape, dtype = _described(tensors, load, prefix + name)
            if shape != place.shape:
                problems.append(f"{prefix}{name} is {shape}; needs {place.shape}")
            if dtype not in DTYPES:
                problems.append(f"{prefix}{name} is {dtype}; needs {', '.join(DTYPES)}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(f"tensors do not make a {model_type} block, nothing was changed:{lines}")
    with torch.no_grad():
        for name, place in local.items():
            place.put(load(prefix + name))
    return whole


def _described(tensors: Mapping, load: Callable, name: str) -> tuple[list[int], str]:
    """(shape, dtype), with nothing kept."""
    if hasattr(tensors, "get_slice"):
        part = tensors.get_slice(name)
        return list(part.get_shape()), _SAFETENSORS.get(part.get_dtype(), part.get_dtype())
    tensor = load(name)
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def to_hf(layer: moe.MoELayer, model_type: str, prefix: str = "") -> dict[str, Tensor]:
    """prefix + name -> a copy of the tensor, in the layer's dtypes and the published layout: the inverse of from_hf.

    Over ep: this rank's experts, under their global numbers; ValueError where the published layout holds all experts in
    one tensor, and over tp where there is a shared expert (each rank has a part: gather with sharded_state_dict).
    """
    layer, row = _fitting(layer, model_type)
    if layer.shared_experts is not None and layer.groups.tp is not None and layer.groups.tp.size() > 1:
        raise ValueError(f"tp has {layer.groups.tp.size()} ranks and each a part of the shared expert; needs a layer "
                         f"without tp: save sharded_state_dict() and load it there")
    if layer.groups.ep is not None and layer.groups.ep.size() > 1:
        fused = [name for name, where in row.layouts[0].items() if where.startswith("experts.") and "{e}" not in name]
        if fused:
            raise ValueError(f"ep has {layer.groups.ep.size()} ranks and {model_type} holds all experts in one tensor "
                             f"({', '.join(fused)}); needs a layer without ep: save sharded_state_dict() and load it "
                             f"there")
    places = _places(layer, row.layouts[0])
    return {prefix + name: place.take() for name, place in places.items() if place.view is not None}


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


# ---- Parts that rows share ----

def field(*names, default=_ABSENT, among=None):
    """A knob that is a field of the config, under any of these names."""
    return lambda read: read(*names, default=default, among=among)


def flag(name, default):
    return lambda read: bool(read(name, default=default))


def by_config(norm: bool) -> dict:
    """Softmax over all experts, normalised over the chosen or not: as the config says, else `norm`."""
    return dict(pre_softmax=True, norm_topk_prob=flag("norm_topk_prob", norm))


def knobs(ffn: str, experts: str = "num_local_experts", topk: str = "num_experts_per_tok", **others) -> dict:
    """Where H, F, E, K and the activation are read, E and K also under other versions' names; and a row's other knobs."""
    return dict(hidden_size=field("hidden_size"), ffn_hidden_size=field(ffn), topk=field(topk, "num_experts_per_tok"),
                num_experts=field(experts, "num_experts", "num_local_experts"),
                activation=field("hidden_act", default="silu", among=GATED)) | others


def shared(count: str, default: int | None) -> dict:
    """`count` shared experts of size F side by side are one of size F · count."""
    def size(read):
        return (read(count, default=default) or 0) * (read("moe_intermediate_size") or 0) or None
    return dict(shared_expert_intermediate_size=size)


def grouped(on: Callable, best: int, groups=None, group_topk=None) -> dict:
    """Where on(read): n_group groups of experts, of which the topk_group with the best sum of their `best` best stay."""
    def knob(name, default):
        def value(read):
            got = read(name, default=default)                         # in any case: without effect it is not refused
            return got if on(read) else None
        return value
    return dict(num_groups=knob("n_group", groups), group_topk=knob("topk_group", group_topk),
                group_score_topk=lambda read: best if on(read) else None)


def noaux(groups: int, group_topk: int, scaling: float, norm: bool) -> dict:
    """DeepSeek-V3's router (arXiv 2412.19437), with a family's defaults."""
    return dict(score_function="sigmoid", enable_expert_bias=True, norm_topk_prob=flag("norm_topk_prob", norm),
                scaling_factor=field("routed_scaling_factor", default=scaling),
                **grouped(lambda read: read("n_group", default=groups) not in (None, 0, 1), 2, groups, group_topk))


def one_per_expert(gate="gate_proj", up="up_proj", down="down_proj") -> dict:
    return {f"experts.{{e}}.{gate}.weight": "experts.fc1[0] f h", f"experts.{{e}}.{up}.weight": "experts.fc1[1] f h",
            f"experts.{{e}}.{down}.weight": "experts.fc2 h f"}


def shared_names(name: str) -> dict:
    return {f"{name}.gate_proj.weight": "shared_experts.fc1[0] s h",
            f"{name}.up_proj.weight": "shared_experts.fc1[1] s h", f"{name}.down_proj.weight": "shared_experts.fc2 h s"}


def layouts(others: dict, experts: dict = one_per_expert()) -> tuple[dict, dict]:
    """(one tensor per expert and projection, as published; gate and up of all experts in one, as held)."""
    return {**others, **experts}, {**others, **FUSED}


def qwen2_moe(norm: bool) -> Family:
    return Family(
        knobs("moe_intermediate_size", "num_experts", **by_config(norm), shared_expert_gate=True,
              shared_expert_intermediate_size=field("shared_expert_intermediate_size")),
        layouts({**GATE, **shared_names("shared_expert"), "shared_expert_gate.weight": "shared_experts.gate_weight 1 h"}))


def deepseek_v3(*router_defaults, shared_default: int | None = 1) -> Family:
    return Family(
        knobs("moe_intermediate_size", "n_routed_experts", **noaux(*router_defaults),
              **shared("n_shared_experts", shared_default)),
        layouts({**CORRECTED, **shared_names("shared_experts")}), NOAUX)


GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
FUSED = {"experts.gate_up_proj": "experts.fc1 e (p f) h", "experts.down_proj": "experts.fc2 e h f"}
W132 = one_per_expert("w1", "w3", "w2")
GATE, ROUTER = {"gate.weight": "router.weight e h"}, {"router.weight": "router.weight e h"}
CORRECTED = {**GATE, "gate.e_score_correction_bias": "router.expert_bias e"}
RELU2_SHARED = {"shared_experts.up_proj.weight": "shared_experts.fc1[0] s h",
                "shared_experts.down_proj.weight": "shared_experts.fc2 h s"}
NOAUX = {"topk_method": ("noaux_tc", None)}
OVER_ALL = dict(pre_softmax=True, norm_topk_prob=False)                # softmax over all experts; else over the chosen


# ---- The table ----

INEXPRESSIBLE = {"phimoe": "its SparseMixer router takes the second expert from a softmax that masks the first, with a "
                           "gradient estimator of its own; the layer has no such router"}

FAMILIES = {
    "mixtral": Family(knobs("intermediate_size"), layouts(GATE, W132)),
    "granitemoe": Family(
        knobs("intermediate_size"),
        ({"router.layer.weight": "router.weight e h", "input_linear.weight": FUSED["experts.gate_up_proj"],
          "output_linear.weight": FUSED["experts.down_proj"]}, {**ROUTER, **FUSED})),
    "jamba": Family(knobs("intermediate_size", "num_experts", **OVER_ALL), layouts(ROUTER)),
    "olmoe": Family(knobs("intermediate_size", "num_experts", **by_config(False)), layouts(GATE)),
    "qwen3_moe": Family(knobs("moe_intermediate_size", "num_experts", **by_config(False)), layouts(GATE)),
    "qwen2_moe": qwen2_moe(False),
    "qwen3_next": qwen2_moe(True),
    "deepseek_v2": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **OVER_ALL, **shared("n_shared_experts", 2),
              **grouped(field("topk_method", default="greedy", among={"greedy": False, "group_limited_greedy": True}), 1),
              scaling_factor=field("routed_scaling_factor", default=1.0)),
        layouts({**GATE, **shared_names("shared_experts")})),
    "deepseek_v3": deepseek_v3(8, 4, 2.5, True),
    "kimi_k2": deepseek_v3(8, 4, 2.5, True),
    "glm4_moe": deepseek_v3(1, 1, 1.0, True),
    "dots1": deepseek_v3(1, 1, 1.0, False, shared_default=None),
    "llama4_text": Family(
        knobs("intermediate_size", score_function="sigmoid", norm_topk_prob=False, apply_probs_on="input",
              shared_expert_intermediate_size=field("intermediate_size")),
        ({**ROUTER, **shared_names("shared_expert"), "experts.gate_up_proj": "experts.fc1 e h (p f)",
          "experts.down_proj": "experts.fc2 e f h"},)),
    "gpt_oss": Family(
        knobs("intermediate_size", activation="quick_geglu", glu_alpha=field("swiglu_alpha", default=1.702),
              glu_linear_offset=1.0, activation_clamp_value=field("swiglu_limit", default=7.0), add_bias_linear=True,
              router_bias=True),
        ({**ROUTER, "router.bias": "router.bias e", "experts.gate_up_proj": "experts.fc1 e h (f p)",
          "experts.gate_up_proj_bias": "experts.fc1_bias e (f p)", "experts.down_proj": "experts.fc2 e f h",
          "experts.down_proj_bias": "experts.fc2_bias e h"},)),
    "ernie4_5_moe": Family(
        knobs("moe_intermediate_size", "moe_num_experts", "moe_k", **shared("moe_num_shared_experts", 2),
              pre_softmax=True, norm_topk_prob=True, enable_expert_bias=True),
        ({**GATE, **shared_names("shared_experts"), **one_per_expert(),
          "moe_statics.e_score_correction_bias": "router.expert_bias 1 e"},
         {**GATE, **shared_names("shared_experts"), **FUSED,
          "gate.moe_statics.e_score_correction_bias": "router.expert_bias 1 e"}),
        {"use_bias": (False, None), "moe_norm_min": (1e-12, 0.0)}),
    "minimax_m2": Family(
        knobs("intermediate_size", score_function="sigmoid", norm_topk_prob=True, enable_expert_bias=True),
        layouts({**GATE, "e_score_correction_bias": "router.expert_bias e"}, W132),
        {"use_routing_bias": (True,), "shared_intermediate_size": (0, None)}),
    "hunyuan_v1_moe": Family(
        knobs("intermediate_size", "num_experts", "moe_topk",
              shared_expert_intermediate_size=field("intermediate_size", "moe_intermediate_size")),
        layouts({"gate.wg.weight": "router.weight e h", **shared_names("shared_mlp")}),
        {"num_shared_expert": (1,), "use_mixed_mlp_moe": (True,), "group_limited_greedy": (False, None)}),
    "lfm2_moe": Family(
        knobs("moe_intermediate_size", "num_experts", activation="swiglu", score_function="sigmoid", norm_eps=1e-6,
              norm_topk_prob=flag("norm_topk_prob", True), enable_expert_bias=flag("use_expert_bias", True),
              scaling_factor=field("routed_scaling_factor", default=1.0)),
        layouts({**GATE, "expert_bias": "router.expert_bias e"}, W132)),
    "nemotron_h": Family(
        knobs("moe_intermediate_size", "n_routed_experts", **noaux(1, 1, 1.0, True),
              shared_expert_intermediate_size=field("moe_shared_expert_intermediate_size"),
              activation=field("mlp_hidden_act", default="relu2", among={"relu2": "relu2"})),
        ({**CORRECTED, **RELU2_SHARED, "experts.{e}.up_proj.weight": "experts.fc1[0] f h",
          "experts.{e}.down_proj.weight": "experts.fc2 h f"},
         {**CORRECTED, **RELU2_SHARED, "experts.up_proj": "experts.fc1[0] e f h",
          "experts.down_proj": "experts.fc2 e h f"}),
        {**NOAUX, "n_shared_experts": (1, None)}),
    "dbrx": Family(
        knobs("ffn_config.ffn_hidden_size", "ffn_config.moe_num_experts", "ffn_config.moe_top_k", pre_softmax=True,
              hidden_size=field("d_model", "hidden_size"),
              activation=field("ffn_config.ffn_act_fn.name", default="silu", among=GATED), norm_topk_prob=field(
                  "ffn_config.moe_normalize_expert_weights", default=1.0, among={1.0: True, None: False})),
        ({"router.layer.weight": "router.weight e h", "experts.mlp.w1": "experts.fc1[0] (e f) h",
          "experts.mlp.v1": "experts.fc1[1] (e f) h", "experts.mlp.w2": "experts.fc2 (e f) h"},),
        {"ffn_config.moe_jitter_eps": (0.0, None)}),
}
