"""Published models, for the tests of this folder: a small config with the published field names,
tensors under the published names, and a forward of one token at a time, written from the published
equations and nothing else; then the library's own config, block and whole model of the same sizes.
"""
import dataclasses
import importlib
import math

import pytest
import torch
from torch import Tensor

import router as router_file
from models.configs import config_from_hf
from models.live import replace_blocks
from models.weights import from_hf
from moe import MoEConfig, MoELayer
from test_moe import best, close, error, grads, score_loop, slow


def check_errors(table, kind: type = ValueError) -> None:
    """Each row is a call and a phrase of the error, of type `kind`, that it raises."""
    for call, phrase in table:
        text = error(call)
        assert text.startswith(kind.__name__) and phrase in text, f"{phrase!r} is not in {text!r}"


# ---- Published models ----

# The case "beam-one_group" is the family beam with other fields.

E8, H6, F5, T7, L4 = 8, 6, 5, 7, 4
AXIS = dict(E=E8, H=H6, F=F5, L=L4, S=4)             # L: latent size; S: of some shared experts
GUD = ("gate_proj", "up_proj", "down_proj")
W132 = ("w1", "w3", "w2")


def sigmoid_loop(a):
    return 1 / (1 + (-a).exp())


def swiglu_loop(a, b):
    return a * sigmoid_loop(a) * b


def clamped_swiglu(a, b):
    return swiglu_loop(a.clamp(max=0.9), b.clamp(-0.9, 0.9))


def relu2(a):
    return a.clamp(min=0) ** 2


def situ(beta: float, linear_beta: float):
    """beta·tanh(a/beta)·sigmoid(a) times b, which is squashed in the same way."""
    def act(a, b):
        gate = beta * (a / beta).tanh() * sigmoid_loop(a)
        return gate * linear_beta * (b / linear_beta).tanh()
    return act


def oai_glu(limit: float):
    def act(a, b):
        gate = a.clamp(max=limit)
        up = b.clamp(-limit, limit)
        return (up + 1) * gate * sigmoid_loop(1.702 * gate)
    return act


@dataclasses.dataclass
class Published:
    """block: the library's config and block, or "". tensors: a line has a name after the prefix
    and its axes, the router's first; {e} stands for every expert. score: "chosen" is a softmax
    over the chosen logits alone. fused: tensors -> gate above up [E, 2F, H] and down [E, H, F],
    where experts have no matrices of their own. held: part of a published name -> of the
    name in memory. whole: fields of the library's config for a tiny whole model."""
    block: str
    config: dict
    tensors: str
    score: str = "softmax"
    act: object = swiglu_loop
    fused: object = None
    held: dict = dataclasses.field(default_factory=dict)
    whole: dict = dataclasses.field(default_factory=dict)
    norm: bool = True                                 # where the config does not say
    eps: float = 0.0


def ffn_of(name, parts=GUD, F="F", H="H") -> str:
    *ups, down = parts
    lines = [f"{name}.{up}.weight {F} {H}" for up in ups]
    return "\n".join([*lines, f"{name}.{down}.weight {H} {F}", ""])


def in_halves(rows: Tensor) -> Tensor:
    """[E, 2F, H], gate and up interleaved -> gate above up."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)


SIZES = dict(hidden_size=H6, hidden_act="silu")
SMALL = SIZES | dict(num_experts_per_tok=3, intermediate_size=F5)
LOCAL = SMALL | dict(num_local_experts=E8)
WIDE = SIZES | dict(moe_intermediate_size=F5, intermediate_size=17)
MOE = WIDE | dict(num_experts_per_tok=3)
PLAIN = MOE | dict(num_experts=E8, norm_topk_prob=True)
WITH_SHARED = PLAIN | dict(shared_expert_intermediate_size=4)
ROUTED = MOE | dict(n_routed_experts=E8)
TWO_SHARED = ROUTED | dict(n_shared_experts=2)
GROUPS = dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
V3 = TWO_SHARED | GROUPS | dict(scoring_func="sigmoid", topk_method="noaux_tc")
ONE_GROUP = dict(n_group=1, topk_group=1)
DOTS = TWO_SHARED | ONE_GROUP | dict(norm_topk_prob=True, routed_scaling_factor=1.4)
KIMI = WIDE | dict(
    num_experts=E8, num_experts_per_token=3, num_shared_experts=2, moe_renormalize=True,
    routed_scaling_factor=2.446, num_expert_group=1, topk_group=1)

# Parts of a whole model's config: attention, and which layers are of which kind.
MLA = dict(
    num_key_value_heads=4, head_dim=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    kv_lora_rank=8, q_lora_rank=8)
LINEAR = dict(
    num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8)
SPARSE = dict(mlp_layer_types=["sparse"] * 2)
DSA = MLA | SPARSE | dict(index_n_heads=2, index_head_dim=16, index_topk=16)
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
MROPE = dict(rope_parameters=dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 0]))
MIXED = MLA | SPARSE | HYBRID

GATE = "gate.weight E H\n"
ROUTER = "router.weight E H\n"
CORRECTION = "gate.e_score_correction_bias"
CORRECTED = GATE + f"{CORRECTION} E\n"
EACH = ffn_of("experts.{e}")
EACH_W = ffn_of("experts.{e}", W132)
SHARED = ffn_of("shared_experts", F="2F")
ONE_SHARED = ffn_of("shared_expert", F="S")
QWEN2 = GATE + EACH + ONE_SHARED + "shared_expert_gate.weight 1 H"
V3_TENSORS = CORRECTED + EACH + SHARED
STACKED = "experts.gate_up_proj E 2F H\n experts.down_proj E H F\n"
AFMOE = "router.gate.weight E H\n expert_bias E\n"
NEMOTRON = CORRECTED + "shared_experts.up_proj.weight S H\nshared_experts.down_proj.weight H S\n"
W_HELD = {f"shared_experts.{w}": f"shared_experts.{name}" for w, name in zip(W132, GUD)}

PUBLISHED = {
    "mixtral": Published(
        "Mixtral MixtralSparseMoeBlock", LOCAL | dict(router_jitter_noise=0.0), GATE + EACH_W,
        score="chosen"),
    "granitemoe": Published(
        "GraniteMoe GraniteMoeMoE", LOCAL,
        "router.layer.weight E H\n input_linear.weight E 2F H\n output_linear.weight E H F",
        score="chosen",
        held={"router.layer": "router", "input_linear.weight": "experts.gate_up_proj",
              "output_linear.weight": "experts.down_proj"},
        fused=lambda t: (t["input_linear.weight"], t["output_linear.weight"])),
    "jamba": Published(
        "Jamba JambaSparseMoeBlock", SMALL | dict(num_experts=E8), ROUTER + EACH, norm=False,
        whole=dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
                   use_mamba_kernels=False, mamba_dt_rank=2)),
    "olmoe": Published(
        "Olmoe OlmoeSparseMoeBlock", SMALL | dict(num_experts=E8, norm_topk_prob=False),
        GATE + EACH),
    "qwen3_moe": Published("Qwen3Moe Qwen3MoeSparseMoeBlock", PLAIN, GATE + EACH),
    "qwen2_moe": Published(
        "Qwen2Moe Qwen2MoeSparseMoeBlock", WITH_SHARED | dict(norm_topk_prob=False), QWEN2),
    "qwen3_next": Published(
        "Qwen3Next Qwen3NextSparseMoeBlock", WITH_SHARED, QWEN2, whole=LINEAR),
    "deepseek_v2": Published(
        "DeepseekV2 DeepseekV2Moe", V3 | dict(
            scoring_func="softmax", topk_method="group_limited_greedy", norm_topk_prob=False,
            routed_scaling_factor=16.0), GATE + EACH + SHARED, whole=MLA),
    "deepseek_v3": Published(
        "DeepseekV3 DeepseekV3MoE", V3, V3_TENSORS, score="sigmoid",
        whole=MLA | dict(first_k_dense_replace=1)),
    "kimi_k2": Published(
        "", V3 | ONE_GROUP | dict(routed_scaling_factor=2.827), V3_TENSORS, score="sigmoid"),
    "glm4_moe": Published("Glm4Moe Glm4MoeMoE", DOTS, V3_TENSORS, score="sigmoid"),
    "dots1": Published("Dots1 Dots1MoE", DOTS, V3_TENSORS, score="sigmoid"),
    "llama4_text": Published(
        "Llama4Text Llama4TextMoe",
        LOCAL | dict(num_experts_per_tok=1, intermediate_size_mlp=17, router_jitter_noise=0.0),
        ROUTER + "experts.gate_up_proj E H 2F\n experts.down_proj E F H\n"
        + ffn_of("shared_expert"), score="sigmoid", norm=False,
        fused=lambda t: (t["experts.gate_up_proj"].mT, t["experts.down_proj"].mT)),
    "gpt_oss": Published(
        "GptOss GptOssMLP", LOCAL | dict(swiglu_limit=1.5), ROUTER + """
            router.bias E
            experts.gate_up_proj E H 2F
            experts.gate_up_proj_bias E 2F
            experts.down_proj E F H
            experts.down_proj_bias E H""", score="chosen"),
    "ernie4_5_moe": Published(
        "Ernie4_5_Moe Ernie4_5_MoeSparseMoeBlock", WIDE | dict(
            moe_num_experts=E8, moe_k=3, moe_num_shared_experts=2, use_bias=False),
        GATE + "moe_statics.e_score_correction_bias 1 E\n" + EACH + SHARED,
        held={"moe_statics": "gate.moe_statics"}),
    "minimax_m2": Published(
        "MiniMaxM2 MiniMaxM2SparseMoeBlock", LOCAL | dict(
            scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0),
        GATE + "e_score_correction_bias E\n" + EACH_W, score="sigmoid"),
    "hunyuan_v1_moe": Published(
        "HunYuanMoEV1 HunYuanMoEV1Moe", SIZES | dict(
            intermediate_size=F5, num_experts=E8, moe_topk=[3] * 4, moe_intermediate_size=[F5] * 4,
            num_shared_expert=[1] * 4, use_mixed_mlp_moe=True, norm_topk_prob=True),
        "gate.wg.weight E H\n" + EACH + ffn_of("shared_mlp")),
    "lfm2_moe": Published(
        "Lfm2Moe Lfm2MoeSparseMoeBlock", dict(
            hidden_size=H6, num_experts_per_tok=3, moe_intermediate_size=F5, intermediate_size=17,
            num_experts=E8, norm_topk_prob=True, routed_scaling_factor=1.3, use_expert_bias=True),
        GATE + "expert_bias E\n" + EACH_W, score="sigmoid", eps=1e-6,
        whole=dict(layer_types=["conv", "full_attention"], num_dense_layers=0)),
    "nemotron_h": Published(
        "NemotronH NemotronHMoE", GROUPS | dict(
            hidden_size=H6, num_experts_per_tok=3, moe_intermediate_size=F5, n_shared_experts=1,
            moe_shared_expert_intermediate_size=4, mlp_hidden_act="relu2", mlp_bias=False,
            n_routed_experts=E8),
        NEMOTRON + ffn_of("experts.{e}", GUD[1:]), score="sigmoid", act=relu2,
        whole=dict(mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2)),
    "dbrx": Published(
        "Dbrx DbrxFFN", dict(d_model=H6, ffn_config=dict(
            ffn_hidden_size=F5, moe_num_experts=E8, moe_top_k=3, moe_jitter_eps=0,
            moe_normalize_expert_weights=1.0)),
        ROUTER.replace(".", ".layer.") + "".join(
            f"experts.mlp.{name} EF H\n" for name in ("w1", "v1", "w2")),
        fused=lambda t: (
            torch.cat([t[f"experts.mlp.{name}"].view(E8, F5, H6) for name in ("w1", "v1")], 1),
            t["experts.mlp.w2"].view(E8, F5, H6).mT),
        whole=dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64, attn_config=dict(
            kv_n_heads=2, clip_qkv=8, rope_theta=1e4))),
    "kimi_linear": Published(
        "KimiLinear KimiLinearMoE", KIMI, CORRECTED + SHARED + EACH_W, score="sigmoid",
        whole=MIXED),
    "kimi_k3": Published(
        "", KIMI | dict(
            hidden_act="situ", activation_situ_beta=0.8, activation_situ_linear_beta=1.5,
            routed_expert_hidden_size=L4, latent_moe_use_norm=True, rms_norm_eps=1e-3,
            moe_router_activation_func="sigmoid", topk_method="noaux_tc"),
        CORRECTED + SHARED + ffn_of("experts.{e}", W132, H="L") + """
            routed_expert_down_proj.weight L H
            routed_expert_up_proj.weight H L
            routed_expert_norm.weight L""", score="sigmoid", act=situ(0.8, 1.5)),
    "deepseek_v4": Published(
        "DeepseekV4 DeepseekV4SparseMoeBlock", SIZES | dict(
            num_experts_per_tok=3, moe_intermediate_size=F5, n_routed_experts=E8,
            n_shared_experts=1, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
            norm_topk_prob=True, routed_scaling_factor=1.5, swiglu_limit=0.9, num_hidden_layers=2,
            mlp_layer_types=["moe", "moe"]),
        GATE + "gate.bias E\n" + EACH_W + ffn_of("shared_experts", W132), score="sqrtsoftplus",
        act=clamped_swiglu, held=W_HELD | {"gate.bias": CORRECTION}),
    "inkling2_text": Published(
        "Inkling2Text Inkling2SparseMoeBlock", SIZES | dict(
            num_experts_per_tok=3, moe_intermediate_size=F5, n_routed_experts=E8, route_scale=2.5,
            scoring_func="sigmoid", mlp_gate_softcap=0.7, mlp_up_softcap=1.2),
        GATE + "gate.bias E\n experts.w13_weight E 2F H\n experts.w2_weight E H F", score="sigmoid",
        act=situ(0.7, 1.2), held={
            "gate.bias": CORRECTION, "w13_weight": "gate_up_proj", "w2_weight": "down_proj"},
        fused=lambda t: (in_halves(t["experts.w13_weight"]), t["experts.w2_weight"]),
        whole=dict(unpadded_vocab_size=64)),
    "flint": Published(
        "Flint FlintSparseMoeBlock", WITH_SHARED, GATE + EACH + ONE_SHARED, score="sigmoid",
        whole=dict(mlp_only_layers=[])),
    "mistral_large4_text": Published(
        "MistralLarge4Text MistralLarge4TextMoE",
        TWO_SHARED | dict(n_group=4, topk_group=2, routed_scaling_factor=1.3),
        GATE + EACH_W + ffn_of("shared_experts", W132, "2F"), held=W_HELD, whole=MLA),
    "minimax_m3_vl_text": Published(
        "MiniMaxM3VLText MiniMaxM3VLSparseMoeBlock", LOCAL | dict(
            hidden_act="swigluoai", shared_intermediate_size=4, dense_intermediate_size=17,
            n_shared_experts=1, scoring_func="sigmoid", use_routing_bias=True,
            routed_scaling_factor=2.0, swiglu_alpha=1.702, swiglu_limit=0.9),
        GATE + "e_score_correction_bias E\n" + EACH_W + ffn_of("shared_experts", F="S"),
        score="sigmoid", act=oai_glu(0.9), held={"e_score_correction_bias": CORRECTION}),
    "bailing_hybrid": Published(
        "BailingHybrid BailingHybridMoE", PLAIN | GROUPS | dict(
            num_shared_experts=2, score_function="sigmoid", moe_router_enable_expert_bias=True),
        GATE + "gate.expert_bias E\n" + EACH + SHARED, score="sigmoid",
        held={"gate.expert_bias": CORRECTION}, whole=MIXED),
    "axk2": Published(
        "AXK2 AXK2MoE", DOTS | dict(n_group=None, topk_group=None), V3_TENSORS, score="sigmoid",
        whole=MLA),
    "dots3_note_text": Published(
        "Dots3NoteText Dots3NoteTextMoE", V3 | dict(shared_experts_intermediate_size=2),
        CORRECTED + EACH + ffn_of("shared_experts", F="S"), score="sigmoid", whole=MLA),
    "beam": Published(
        "Beam BeamMoE", PLAIN | GROUPS, CORRECTED + EACH, score="sigmoid", whole=SPARSE),
    "qwen4_exp_text": Published(
        "Qwen4ExpText Qwen4ExpTextSparseMoeBlock", WITH_SHARED, QWEN2, whole=LINEAR | dict(
            indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=16,
            indexer_compress_ratio=4)),
    "mellum": Published("Mellum MellumSparseMoeBlock", PLAIN, GATE + EACH, whole=SPARSE),
    "qwen3_vl_moe_text": Published(
        "Qwen3VLMoeText Qwen3VLMoeTextSparseMoeBlock", MOE | dict(num_experts=E8), GATE
        + "experts.gate_up_proj E H 2F\n experts.down_proj E F H",
        fused=lambda t: (t["experts.gate_up_proj"].mT, t["experts.down_proj"].mT)),
    "qwen3_5_moe_text": Published(
        "Qwen3_5MoeText Qwen3_5MoeSparseMoeBlock",
        MOE | dict(num_experts=E8, shared_expert_intermediate_size=4), QWEN2, whole=LINEAR),
    "granitemoe_swa": Published(
        "GraniteMoeSWA GraniteMoeSWAMoE", LOCAL, ROUTER + STACKED, score="chosen",
        fused=lambda t: (t["experts.gate_up_proj"], t["experts.down_proj"])),
    "aria_text": Published(
        "AriaText AriaTextMoELayer", SIZES | dict(
            moe_topk=3, moe_num_experts=E8, moe_num_shared_experts=2, intermediate_size=F5),
        ROUTER + "experts.fc1.weight E H 2F\n experts.fc2.weight E F H\n" + SHARED,
        score="chosen", held={"fc1.weight": "gate_up_proj", "fc2.weight": "down_proj"},
        fused=lambda t: (t["experts.fc1.weight"].mT, t["experts.fc2.weight"].mT)),
    "cohere2_moe": Published(
        "Cohere2Moe Cohere2MoeSparseMoeBlock", SMALL | dict(
            num_experts=E8, num_shared_experts=2, norm_topk_prob=True,
            shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid"),
        GATE + EACH + SHARED, score="sigmoid"),
    "mistral4": Published(
        "Mistral4 Mistral4MoE", TWO_SHARED | GROUPS, GATE + STACKED + SHARED, whole=MLA,
        fused=lambda t: (t["experts.gate_up_proj"], t["experts.down_proj"])),
    "afmoe": Published(
        "Afmoe AfmoeSparseMoeBlock", MOE | dict(
            num_experts=E8, num_shared_experts=2, route_scale=2.5, route_norm=True,
            score_func="sigmoid"), AFMOE + EACH + SHARED, score="sigmoid",
        whole=dict(num_dense_layers=0)),
    "hy_v3": Published(
        "HYV3 HYV3MoE", MOE | dict(num_experts=E8, num_shared_experts=2, router_scaling_factor=2.5),
        AFMOE + EACH + ffn_of("shared_mlp", F="2F"), score="sigmoid", whole=SPARSE, held={
            "router.gate": "gate", "expert_bias": "e_score_correction_bias",
            "shared_mlp": "shared_experts"}),
    "laguna": Published(
        "Laguna LagunaSparseMoeBlock", MOE | dict(
            num_experts=E8, shared_expert_intermediate_size=4, moe_routed_scaling_factor=2.5,
            moe_router_logit_softcapping=0.0, moe_apply_router_weight_on_input=False),
        GATE + "experts.e_score_correction_bias E\n" + EACH + ONE_SHARED, score="sigmoid",
        held={"experts.e_score": "gate.e_score", "shared_expert": "shared_experts"}, whole=SPARSE),
    "step3p5": Published(
        "Step3p7Text Step3p7SparseMoeBlock", WIDE | dict(
            moe_num_experts=E8, moe_top_k=3, share_expert_dim=4, moe_router_scaling_factor=2.5,
            moe_router_activation="sigmoid", norm_expert_weight=True), """
            moe.gate.weight E H
            moe.router_bias E
            moe.gate_proj.weight E F H
            moe.up_proj.weight E F H
            moe.down_proj.weight E H F
            """ + ffn_of("share_expert", F="S"), score="sigmoid",
        whole=SPARSE | dict(sliding_window=16), held={
            "moe.gate.": "gate.", "moe.router_bias": CORRECTION, "share_": "shared_",
            "expert.": "experts."},
        fused=lambda t: (torch.cat([t[f"moe.{name}.weight"] for name in GUD[:2]], 1),
                         t["moe.down_proj.weight"])),
    "exaone_moe": Published(
        "ExaoneMoe ExaoneMoeSparseMoEBlock", PLAIN | GROUPS | dict(num_shared_experts=2),
        GATE + "e_score_correction_bias E\n" + EACH + SHARED, score="sigmoid",
        held={"e_score_correction_bias": CORRECTION}, whole=dict(first_k_dense_replace=0)),
    "mimo_v2_flash": Published(
        "MiMoV2Flash MiMoV2FlashMoE", ROUTED | GROUPS, CORRECTED + EACH, score="sigmoid",
        whole=SPARSE),
    "glm_moe_dsa": Published(
        "GlmMoeDsa GlmMoeDsaMoE", V3, V3_TENSORS, score="sigmoid", whole=DSA),
    "glm4_moe_lite": Published(
        "Glm4MoeLite Glm4MoeLiteMoE", V3, V3_TENSORS, score="sigmoid", whole=MLA | SPARSE),
    "glm5_next_text": Published(
        "Glm5NextText Glm5NextTextMoE", V3 | dict(swiglu_limit=0.9), V3_TENSORS, score="sigmoid",
        act=clamped_swiglu, whole=DSA | HYBRID | dict(
            qk_rope_head_dim=0, linear_num_heads=2, linear_head_dim=8)),
    "axk1": Published("AXK1 AXK1MoE", V3, V3_TENSORS, score="sigmoid", whole=MLA | SPARSE),
    "sarvam_moe": Published(
        "SarvamMoE Glm4MoeMoE", MOE | GROUPS | dict(num_experts=E8, num_shared_experts=2),
        GATE + "gate.expert_bias E\n" + EACH + SHARED, score="sigmoid",
        held={"gate.expert_bias": CORRECTION}, whole=dict(first_k_dense_replace=0)),
    "lara_mini": Published(
        "LaraMini LaraMiniSparseMoeBlock", WITH_SHARED, GATE + EACH + ONE_SHARED, whole=dict(
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8)),
    "hy_v4": Published(
        "HYV4 HYV4MoE", V3 | dict(swiglu_limit=0.9, n_shared_experts=0), CORRECTED + EACH,
        score="sigmoid", act=clamped_swiglu, whole=DSA | dict(n_shared_experts=2)),
}
SAME = {
    "flex_olmo": ("olmoe", "FlexOlmo FlexOlmoSparseMoeBlock", {}),
    "minimax": ("mixtral", "MiniMax MiniMaxSparseMoeBlock", {}),
    "granitemoeshared": ("granitemoe", "GraniteMoeShared GraniteMoeSharedMoE", {}),
    "granitemoehybrid": ("granitemoe", "GraniteMoeHybrid GraniteMoeHybridMoE", HYBRID),
    "deepseek_v32": ("deepseek_v3", "DeepseekV32 DeepseekV32MoE", DSA),
    "sarvam_mla": ("glm_moe_dsa", "SarvamMLA DeepseekV3MoE", MLA | dict(first_k_dense_replace=0)),
    "hy_v4_vl_text": ("hy_v4", "HYV4VLText HYV4VLMoE", DSA | dict(
        n_shared_experts=2, rope_parameters=dict(
            rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))),
    "inkling2_loop_text": (
        "inkling2_text", "Inkling2LoopText Inkling2LoopSparseMoeBlock", dict(
            num_hidden_layers=4, unpadded_vocab_size=64, loop_layer_index_start=1,
            loop_layer_index_end=2, n_layers_per_attn_res_block=1)),
    "glm4v_moe_text": ("glm4_moe", "Glm4vMoeText Glm4vMoeTextMoE", MROPE),
    "solar_open": ("glm4_moe", "SolarOpen SolarOpenMoE", {}),
    "deepseek_ocr2_text": ("deepseek_v2", "DeepseekOcr2Text DeepseekOcr2TextMoe", SPARSE),
    "unlimited_ocr_text": ("deepseek_v2", "UnlimitedOcrText UnlimitedOcrTextMoe", SPARSE),
    "qwen3_omni_moe_text": (
        "mellum", "Qwen3OmniMoeText Qwen3OmniMoeThinkerTextSparseMoeBlock", {}),
    "qwen3_omni_moe_talker_text": (
        "qwen2_moe", "Qwen3OmniMoeTalkerText Qwen3OmniMoeTalkerTextSparseMoeBlock", {}),
}
for case, (like, block, whole) in SAME.items():
    PUBLISHED[case] = dataclasses.replace(PUBLISHED[like], block=block, whole=whole)
WITH_A_ROW = list(PUBLISHED)
PUBLISHED["nemotron_h-latent"] = dataclasses.replace(
    PUBLISHED["nemotron_h"],
    config=PUBLISHED["nemotron_h"].config | dict(moe_latent_size=L4),
    tensors=NEMOTRON + ffn_of("experts.{e}", GUD[1:], H="L")
    + "fc1_latent_proj.weight L H\n fc2_latent_proj.weight H L")
for case, fixed in {
        "deepseek_v2-greedy": dict(topk_method="greedy"),
        "deepseek_v3-unnormed": dict(norm_topk_prob=False),
        "qwen3_moe-unnormed": dict(norm_topk_prob=False),
        "olmoe-normed": dict(norm_topk_prob=True),
        "mixtral-top2": dict(num_experts_per_tok=2),
        "flint-unnormed": dict(norm_topk_prob=False),
        "kimi_linear-unnormed": dict(moe_renormalize=False),
        "mistral_large4_text-one_group": ONE_GROUP, "beam-one_group": ONE_GROUP}.items():
    plain = PUBLISHED[case.split("-")[0]]
    PUBLISHED[case] = dataclasses.replace(plain, block="", config=plain.config | fixed)

OWN = [case for case in PUBLISHED if case not in SAME]
EVERY_CASE = pytest.mark.parametrize("case", OWN)
EVERY_LAYOUT = pytest.mark.parametrize(
    "case", [case for case in OWN if case in WITH_A_ROW or case == "nemotron_h-latent"])
IN_THE_LIBRARY = [case for case in PUBLISHED if PUBLISHED[case].block]


def some_quick(cases, *quick: str):
    """A parametrisation; all but some cases are slow."""
    marked = [case if case in quick else pytest.param(case, marks=slow) for case in cases]
    return pytest.mark.parametrize("case", marked)


def by_name(t: dict, name: str) -> list[Tensor]:
    """The matrices under this name: gate, up and down, or up and down, or none."""
    names = [f"{name}.{part}.weight" for part in (*GUD, *W132)]
    return [t[name] for name in names if name in t]


def ffn_loop(x, matrices, act):
    *ups, down = matrices
    return down @ act(*(up @ x for up in ups))


def gpt_oss_expert(x, t, e):
    y = x @ t["experts.gate_up_proj"][e] + t["experts.gate_up_proj_bias"][e]
    y = oai_glu(1.5)(y[0::2], y[1::2])
    return y @ t["experts.down_proj"][e] + t["experts.down_proj_bias"][e]


def only_chooses(name: str) -> bool:
    """Whether this is the bias that takes part in the choice and not in the weights."""
    return any(word in name for word in ("expert_bias", "correction", "router_bias", "gate.bias"))


def published_route(case, logits, t, K, chosen=None) -> list:
    """[(expert, weight)] of a token: chosen by score + bias, in the groups with the best sum of two
    (DeepSeek-V2: of one); weighed by the score, normalised or not, times a factor."""
    p = PUBLISHED[case]
    c = p.config
    if p.score == "chosen":
        chosen = best(list(logits), K)
        return list(zip(chosen, score_loop([logits[e] for e in chosen], "softmax")))
    scores = score_loop(list(logits), p.score)
    biased = [score.item() for score in scores]
    for name in filter(only_chooses, t):
        biased = [score + b for score, b in zip(biased, t[name].flatten().tolist())]

    method = c.get("topk_method")
    groups = 1 if method == "greedy" else c.get("n_group") or 1
    tops = 1 if method == "group_limited_greedy" else 2
    size = E8 // groups
    parts = [sorted(biased[first:first + size]) for first in range(0, E8, size)]
    kept = best([sum(part[-tops:]) for part in parts], c.get("topk_group") or 1)
    if chosen is None:
        masked = [b if e // size in kept else -math.inf for e, b in enumerate(biased)]
        chosen = best(masked, K)

    norm = c.get("norm_topk_prob", c.get("moe_renormalize", p.norm))
    total = sum(scores[e] for e in chosen) + p.eps if norm else 1.0
    scale = math.prod(c[name] for name in c if "scaling_factor" in name or name == "route_scale")
    return [(e, scores[e] / total * scale) for e in chosen]


def published_loop(case, x: Tensor, t: dict, chosen=None) -> Tensor:
    """The family's block, one token at a time. chosen: the experts of every token, from a table."""
    p = PUBLISHED[case]
    rows = []
    fields = p.config | p.config.get("ffn_config", {})
    names = "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"
    K = next(fields[name] for name in names if name in fields)
    K = K[0] if isinstance(K, list) else K
    router = t[p.tensors.split()[0]]

    def expert(x, e):
        if case == "gpt_oss":
            return gpt_oss_expert(x, t, e)
        if p.fused is None:
            return ffn_loop(x, by_name(t, f"experts.{e}"), p.act)
        gate_and_up, down = (tensor[e] for tensor in p.fused(t))
        return ffn_loop(x, [*gate_and_up.chunk(2), down], p.act)

    for i, x_H in enumerate(x.flatten(0, -2)):
        logits = router @ x_H + t.get("router.bias", 0.0)
        pairs = published_route(case, logits, t, K=K, chosen=chosen and chosen[i])
        z = x_H
        for name in ("fc1_latent_proj", "routed_expert_down_proj"):
            z = t[f"{name}.weight"] @ z if f"{name}.weight" in t else z
        if case == "llama4_text":
            y = sum(expert(weight * z, e) for e, weight in pairs)
        else:
            y = sum(weight * expert(z, e) for e, weight in pairs)
        if "routed_expert_norm.weight" in t:
            y = y / (y.square().mean() + 1e-3).sqrt() * t["routed_expert_norm.weight"]
        for name in ("fc2_latent_proj", "routed_expert_up_proj"):
            y = t[f"{name}.weight"] @ y if f"{name}.weight" in t else y

        for name in ("shared_experts", "shared_expert", "shared_mlp", "share_expert"):
            if matrices := by_name(t, name):
                beside = ffn_loop(x_H, matrices, p.act)
                if "shared_expert_gate.weight" in t:
                    logit = t["shared_expert_gate.weight"] @ x_H
                    beside = beside * sigmoid_loop(logit)
                y = y + beside
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def family_of(case: str) -> str:
    return case.split("-")[0]


def fam_fields(case: str, **fixed) -> dict:
    return {"model_type": family_of(case), **PUBLISHED[case].config, **fixed}


def fam_config(case: str, dtype=torch.float64, **fixed) -> MoEConfig:
    config = config_from_hf(fam_fields(case, **fixed))
    router_dtype = torch.promote_types(dtype, torch.float32)
    return dataclasses.replace(config, params_dtype=dtype, router_dtype=router_dtype)


def double(*shape, **options) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, **options)


def fam_tensors(case: str, dtype=torch.float64, prefix: str = "") -> dict:
    """Always the same numbers. A bias that only chooses is fp32, and small beside the scores."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for line in filter(str.strip, PUBLISHED[case].tensors.split("\n")):
        name, *axes = line.split()
        shape = [math.prod(AXIS.get(c) or int(c) for c in axis) for axis in axes]
        scale, to = (0.2, torch.float32) if only_chooses(name) else (0.7, dtype)
        for e in range(E8 if "{e}" in name else 1):
            tensor = double(shape, generator=generator) * scale
            found[prefix + name.format(e=e)] = tensor.to(to)
    return found


def fam_layer(case: str, dtype=torch.float64, tensors=None, prefix: str = "") -> MoELayer:
    """The layer with these tensors, or those of fam_tensors."""
    if tensors is None:
        tensors = fam_tensors(case, dtype)
    layer = MoELayer(fam_config(case, dtype))
    assert from_hf(layer, tensors, family_of(case), prefix=prefix) is layer
    return layer


def close_grads(got: Tensor, want: Tensor, leaves, tol: float) -> None:
    upstream = torch.randn_like(want)
    close(grads(got, leaves, upstream), grads(want, leaves, upstream), tol)


# ---- The library's config, block and whole model ----

def library_fields(case: str) -> dict:
    """The small config as the library's class takes it; a field of one value per layer is one."""
    fields = {name: value[0] if isinstance(value, list) and name != "mlp_layer_types" else value
              for name, value in PUBLISHED[case].config.items()}
    if case == "gpt_oss":
        del fields["swiglu_limit"]                    # always 7 there
    if case != "dbrx":
        fields |= dict(num_attention_heads=2, num_key_value_heads=2)         # hidden_size divides
    if case == "granitemoehybrid":
        fields |= dict(mamba_n_heads=4)
    return fields


def library_config(case: str, **fields):
    import transformers
    config = getattr(transformers, PUBLISHED[case].block.split()[0] + "Config")(**fields)
    config._experts_implementation = "eager"
    if case == "dbrx":
        config.ffn_config.hidden_size = config.d_model
    return config


MODELED_BY = {"sarvam_moe": "glm4_moe", "sarvam_mla": "deepseek_v3"}     # configs without models


def modeling_of(config):
    """The module with the models of this config."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    own = name.rpartition("modeling_")[2]
    return importlib.import_module(name.replace(own, MODELED_BY.get(own, own)))


def library_block(case: str, config, layer_idx: int = 1) -> torch.nn.Module:
    """The library's own block, with random weights."""
    modeling = modeling_of(config)
    layer_idx = [layer_idx] if case in ("deepseek_v4", "step3p5") else []
    block = getattr(modeling, PUBLISHED[case].block.split()[1])(config, *layer_idx)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.7)
    return block


class OneOf:
    """As much of a process group as from_hf and to_hf ask for."""

    def __init__(self, rank: int, ranks: int):
        self.rank = lambda: rank
        self.size = lambda: ranks


# ---- Live models of the Hugging Face library ----

def replaced(case: str = "qwen3_moe", **changes) -> torch.nn.Module:
    """A tiny model of the library, always the same, with replaced blocks."""
    model = same_model(case)
    replace_blocks(model, **changes)
    return model


def router_of(model, layer: int = 0):
    return router_file._routers(model)[layer]


# In the library's gates, read in their code: the dtypes of the product, of the scores and of the
# weights; "model" is the model's dtype. All others are fp32 throughout.
PRECISION = {
    "model fp32 fp32": "mixtral minimax_m2 minimax_m3_vl_text afmoe step3p5 minimax",
    "model fp32 model": """
        granitemoe jamba olmoe qwen3_moe qwen2_moe qwen3_next llama4_text gpt_oss mellum
        qwen3_vl_moe_text qwen3_5_moe_text granitemoe_swa aria_text cohere2_moe laguna
        qwen4_exp_text flex_olmo granitemoeshared granitemoehybrid qwen3_omni_moe_text
        qwen3_omni_moe_talker_text""",
    "model model model": "lfm2_moe dbrx deepseek_v4 mistral4",
    "fp32 fp32 model": "ernie4_5_moe lara_mini",
}
PRECISION = {case: words.split() for words, cases in PRECISION.items() for case in cases.split()}


def one_step(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of the texts; their loss is a sum over tokens, and has been backpropagated."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits.square().mean(-1) * mask).sum().backward()
    return logits


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module


WHOLE = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, intermediate_size=24, moe_intermediate_size=24, pad_token_id=0,
    max_position_embeddings=64)


def whole_output(model, ids: Tensor, **options):
    if hasattr(model, "codec_embedding"):             # Qwen3-Omni's talker takes embeddings alone
        return model(inputs_embeds=model.codec_embedding(ids), use_cache=False, **options)
    return model(ids, use_cache=False, **options)


def whole_model(case: str, **fixed) -> torch.nn.Module:
    """A tiny language model of the library with random weights; experts by the library's loop."""
    fields = library_fields(case)
    if case == "dbrx":
        ffn = fields["ffn_config"] | dict(ffn_hidden_size=24)
        fields = dict(vocab_size=64, ffn_config=ffn)
    else:
        fields |= WHOLE
    fields |= PUBLISHED[case].whole | fixed
    fields = {name: value for name, value in fields.items() if value is not None}
    config = library_config(case, **fields)
    modeling = modeling_of(config)
    types = config.model_type, MODELED_BY.get(config.model_type)
    own = {name: value for name, value in vars(modeling).items()
           if getattr(getattr(value, "config_class", None), "model_type", "") in types}
    ends = "ForCausalLM", "ForConditionalGeneration", "TextModel", "TalkerModel"
    model = next(own[name] for end in ends for name in own if name.endswith(end))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model


def same_model(case: str, **fixed) -> torch.nn.Module:
    """The same weights in every call, and on every rank."""
    torch.manual_seed(1)
    return whole_model(case, **fixed)


def random_ids() -> Tensor:
    return torch.randint(1, 64, (2, T7))


def whole_logits(model, ids: Tensor) -> Tensor:
    out = whole_output(model, ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def gate_of_the_library(case: str, block, x: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [T, K], indices [T, K]) that the library's gate gives its experts."""
    if case == "llama4_text":                        # whose experts all compute all tokens
        scores, logits = block.router(x.flatten(0, 1))
        indices = logits.topk(1).indices
        return scores.gather(1, indices), indices
    given = []

    def experts(x, indices, weights):
        given.extend((weights, indices))
        return x
    block.experts.forward = experts
    block(x)
    del block.experts.forward
    return tuple(given)


def padded_ids(left: int, S: int = T7) -> tuple[Tensor, Tensor]:
    """Two texts of S tokens and their attention_mask: the first has `left` tokens of padding on its
    left, the second one on its right."""
    ids = torch.randint(1, 64, (2, S))
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[1, -1] = 0
    return ids, mask
