"""A published config becomes the MoEConfig of its MoE layers:

    layer = MoELayer(config_from_hf(hf_config))
    layer = small.MoE(**small_fields(config_from_hf(hf_config)))

A config is config.json as a dict, or the library's object. One error lists all that the layer
cannot express. table.py says which fields mean what.
"""
import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

if __package__ == "models":                  # beside the flat files of the layer
    import moe
    from models.reader import ABSENT, Reader, layers, listed
    from models.table import NUMBERS_OF_EXPERTS, REFUSED, TYPES, Family, family
else:                                        # the layer is a package
    from .. import moe
    from .reader import ABSENT, Reader, layers, listed
    from .table import NUMBERS_OF_EXPERTS, REFUSED, TYPES, Family, family


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
    row: Family
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
            problems = listed(list(dict.fromkeys(problems)), "; ")
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

    dtype = _published_dtype(reads)
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
    fields |= router_dtypes(row.precision, params_dtype)
    fields |= {"params_dtype": params_dtype, "batch_first": True}
    return Reading(
        model_type, row, fields, sources, problems=router.problems,
        of_the_block=block.problems, after=after,
        quantized=any(each.get("quantization_config") is not None for each in reads),
        by_layer=router.by_layer or block.by_layer,
        limits={of: block.get(name) for name, of in LIMITS.items() if block.get(name)},
        unread=_unread(router.config, router.names | block.names), dense=dense, sparse=sparse)


DTYPES = ("float64", "float32", "bfloat16", "float16")


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


def refuse_dense(model_type, read):
    """Refuses the config of a model without experts, by a ValueError."""
    for name in ("enable_moe_block", *NUMBERS_OF_EXPERTS):
        value = read.whole(name)
        if value is not None and value == 0:                 # False too
            raise ValueError(f"this {model_type} config is of a dense model: {name} is {value}")


# ---- Dtypes ----

def _published_dtype(reads):
    for read in reads:
        dtype = read.get("dtype", default=ABSENT)
        if dtype is ABSENT:              # the library's objects have dtype, and warn of torch_dtype
            dtype = read.get("torch_dtype")
        if dtype:
            return str(dtype).removeprefix("torch.")
    return "float32"


def dtype_of_gate(precision: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gate's weight when the library loads a model in this dtype. precision: that
    of the Family.
    """
    if precision.startswith("fp32"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def router_dtypes(
    precision: str, dtype: torch.dtype, gate_dtype: torch.dtype | None = None,
) -> dict:
    """The fields of MoEConfig that give a router this precision in a model of this dtype.

    gate_dtype: of the router's weight; None: as the library loads it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {"model": dtype, "fp32": wide, "gate": gate_dtype or dtype_of_gate(precision, dtype)}
    product, scores, probs = [dtypes[word] for word in precision.split()[1:]]
    fields = {"router_dtype": product}
    if probs != product or scores != wide:
        fields["probs_dtype"] = probs
    return fields


# ---- What every family needs ----

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


# ---- Which layers have experts ----

# Fields that say it: by a list or a pattern with a value for each layer, or
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


# ---- Fields that nothing reads ----

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


DEFAULTS = {field.name: field.default for field in dataclasses.fields(moe.MoEConfig)}


def given(values):
    """Those fields of a MoEConfig that have another value than the default."""
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def meaning(values):
    """All fields of a MoEConfig, where values that compute the same are written alike."""
    values = DEFAULTS | values
    if values["norm_topk_prob"] is None:
        if values["score_function"] == "softmax":
            values["norm_topk_prob"] = not values["pre_softmax"]
        else:
            values["norm_topk_prob"] = values["topk"] != 1
    return values


# ---- small.py ----

# Fields of MoEConfig that small.MoE takes, and those that change no formula of its forward:
# small.py computes logits and probs in fp32, has the weights' dtype by .to(dtype), and its
# finish_step takes the rate.
TAKEN_BY_SMALL = (
    "hidden_size ffn_hidden_size num_experts topk score_function enable_expert_bias aux_loss_coeff "
    "shared_expert_intermediate_size shared_expert_gate norm_topk_prob scaling_factor num_groups "
    "group_topk group_score_topk").split()
WITHOUT_FORMULA = (
    "load_balancing_type pre_softmax router_dtype probs_dtype params_dtype batch_first init_std "
    "output_init_std bias_update_rate").split()


def small_fields(config: moe.MoEConfig) -> dict[str, object]:
    """The fields with which small.MoE(**fields) computes what the layer of this config does, but
    that its logits and probs are in fp32. bias_update_rate is the `rate` of its finish_step.
    ValueError: what small.py lacks for it.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> small_fields(config)
    {'hidden_size': 8, 'ffn_hidden_size': 16, 'num_experts': 4, 'topk': 2}
    """
    values = given({name: getattr(config, name) for name in DEFAULTS})
    lacks = [f"{name}={value!r}" for name, value in values.items()
             if name not in TAKEN_BY_SMALL and name not in WITHOUT_FORMULA]
    if config.score_function not in ("softmax", "sigmoid"):
        lacks.append(f"score_function={config.score_function!r}")
    if set(config.balancing) - {"none", "aux_loss"}:
        lacks.append(f"load_balancing_type={config.load_balancing_type!r}")
    if config.always_one:
        lacks.append("a prob that is always 1")
    if lacks:
        raise ValueError(f"small.py lacks {listed(lacks, ', ')}")
    taken = {name: values[name] for name in TAKEN_BY_SMALL if name in values}
    if config.pre_softmax and config.norm_topk_prob is None:
        taken["norm_topk_prob"] = False
    if "aux_loss" in config.balancing:
        taken["aux_loss_coeff"] = config.balancing["aux_loss"]
    return taken
