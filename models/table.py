"""Published Mixture-of-Experts models as a table, FAMILIES. Above it stand the words in which its
rows are written. A row has the knobs of the layer's config, the names and axes of the published
weights, and what else the model's block does. To add a model, add a row.

The table sets no balance loss: set load_balancing_type with dataclasses.replace, or as a change of
live.replace_blocks. The letters are those of kernels.py.
"""
import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

if __package__ == "models":                  # beside the flat files of the layer
    from models.reader import ABSENT, Missing, Reader
else:                                        # the layer is a package
    from .reader import ABSENT, Missing, Reader


# ---- A row ----

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


# ---- Words of the table: knobs ----

FACTORS = ("routed_scaling_factor", "route_scale", "router_scaling_factor",
           "moe_router_scaling_factor", "moe_routed_scaling_factor")
NUMBERS_OF_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}


def field(*names: str, default=ABSENT, among: dict | None = None) -> Callable:
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


def shared_times(*sizes: str, default: int | None = 1, size: object = ABSENT) -> dict:
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


# ---- To look something up ----

def family(model_type) -> Family:
    """The row of a type. ValueError: the type is refused, or unknown."""
    if model_type in REFUSED:
        raise ValueError(f"model_type is {model_type!r}: {REFUSED[model_type]}")
    if model_type not in TYPES:
        near = difflib.get_close_matches(str(model_type), [*TYPES, *REFUSED], n=1)
        nearest = f"nearest: {near[0]}; " if near else ""
        raise ValueError(f"model_type is {model_type!r}; {nearest}known: {', '.join(FAMILIES)}")
    return TYPES[model_type]


def _first_of_experts(layout):
    return next(name for name in layout if layout[name].parameter.startswith("experts."))


def prefixes_of(names, layouts):
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


def tensors_of(module):
    """name -> tensor, of all parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def layer_of(name):
    """The number of a layer in the name of its block; without one it is 0."""
    return int(re.findall(r"\d+", "0." + name)[-1])
