"""Tests of families.py and atlas.py: published models against their formulas, live ones against the
library.

    python -m pytest models/test_models.py                  in half a minute
    python -m pytest models/test_models.py -k test_live_    one section, by its tests' first word
    SLOW=1 python -m pytest models/test_models.py           also what is slow by nature

The words of the sections: families, atlas, live. Some tests need transformers; two also need
accelerate or peft. Without them they are skipped.
"""
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import re
import runpy
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import moe
import router as router_file
from kernels import expert_mlp, plan_permutation, topk_routing
from models import atlas, families, published
from moe import (
    MoEConfig, MoELayer, TopKRouter, finish_step, load_balancing_metrics, record_routing,
    replay_routing, update_expert_bias)
from ranks import sharding
from ranks.parallel import ProcessGroups
from ranks.sharding import reduce_gradients
from ranks.test_ranks import filled, full, mesh_of, over_ranks, own_part
from test_moe import (
    about, best, close, compiled, error, fresh_start, grads, same, saved_bytes, score_loop, slow)
from tests.test_scripts import HERE, check_examples, example, run


def check_errors(table, kind: type = ValueError) -> None:
    """Each row is a call and a phrase of the error, of type `kind`, that it raises."""
    for call, phrase in table:
        text = error(call)
        assert text.startswith(kind.__name__) and phrase in text, f"{phrase!r} is not in {text!r}"


# ---- Published models ----
#
# A family is written from its published equations and nothing else: a small config with the
# published field names, tensors under the published names, and a forward of one token at a time.
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
FAMILIES = list(PUBLISHED)
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
    "case", [case for case in OWN if case in FAMILIES or case == "nemotron_h-latent"])
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


def family(case: str) -> str:
    return case.split("-")[0]


def fam_fields(case: str, **fixed) -> dict:
    return {"model_type": family(case), **PUBLISHED[case].config, **fixed}


def fam_config(case: str, dtype=torch.float64, **fixed) -> MoEConfig:
    config = families.config_from_hf(fam_fields(case, **fixed))
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
    assert families.from_hf(layer, tensors, family(case), prefix=prefix) is layer
    return layer


def close_grads(got: Tensor, want: Tensor, leaves, tol: float) -> None:
    upstream = torch.randn_like(want)
    close(grads(got, leaves, upstream), grads(want, leaves, upstream), tol)


def as_held(case: str, t: dict) -> dict:
    """The same tensors as a loaded model holds them: experts are stacked, gate above up."""
    held = {}
    stacks = {}
    for name, tensor in t.items():
        if re.match(r"experts\.\d", name):
            stacks.setdefault(name.split(".")[2], []).append(tensor)
            continue
        for old, new in PUBLISHED[case].held.items():
            name = name.replace(old, new)
        held[name] = tensor
    if stacks:
        *ups, down = map(torch.stack, stacks.values())
        fused = "experts.gate_up_proj" if len(ups) == 2 else "experts.up_proj"
        held |= {fused: torch.cat(ups, 1), "experts.down_proj": down}
    if case in ("inkling2_text", "qwen3_vl_moe_text", "step3p5"):
        held = {name: tensor for name, tensor in held.items() if not name.startswith("moe.")}
        held["experts.gate_up_proj"], held["experts.down_proj"] = PUBLISHED[case].fused(t)
    if case == "minimax_m3_vl_text":
        ups = [held.pop(f"shared_experts.{name}.weight") for name in GUD[:2]]
        held["shared_experts.gate_up_proj.weight"] = torch.cat(ups)
    return held


def test_families_are_those_listed_here():
    assert set(families.FAMILIES) == set(FAMILIES)
    assert sorted(families.FAMILIES) == sorted([*published.MODELS, *published.FIELDS])
    assert set(FAMILIES) - set(IN_THE_LIBRARY) == {"kimi_k2", "kimi_k3"}


def library_types() -> list[str]:
    """Every model_type of the library with MoE blocks. Imports nothing. In a folder with such a
    class, or without models, it is those of the configs with a number of experts; if a folder with
    such a class has none, all."""
    found = importlib.util.find_spec("transformers")
    if found is None:
        return []
    types = []
    for folder in sorted(Path(found.origin).parent.glob("models/*")):
        def text(kind):
            return "\n".join(file.read_text() for file in folder.glob(f"{kind}_*.py"))
        models = text("modeling")
        if models and not re.search(r"^class \w*(Experts|MoE|Moe)\(", models, re.M):
            continue
        parts = re.split(r"^class ", text("configuration"), flags=re.M)[1:]
        typed = {match[1]: part for part in parts
                 if (match := re.search(r'^    model_type = "(.+)"', part, re.M))}
        counted = [name for name in typed if re.search(r"^    \w*experts:", typed[name], re.M)]
        types += counted
        if models:
            types += [] if counted else typed
            types += [name for name in typed if '"text_config":' in typed[name]]
    return types


def test_families_know_every_type_of_the_library():
    """SkyRL #1908: a newer model is unknown. Each type is a row or is refused by a reason of its
    own, and none is both."""
    types = library_types()
    if not types:
        pytest.skip("walks transformers")
    refused = families.INEXPRESSIBLE
    unknown = set(types) - set(families.TYPES) - set(families.REFUSED)
    assert not unknown and len(types) > 70
    assert not set(families.FAMILIES) & set(refused) and len(set(refused.values())) == len(refused)
    assert set(families.FAMILIES) - set(types) == {"kimi_k2", "kimi_k3"}
    assert set(refused) - set(types) == {"qwen3_omni_moe"}
    assert "gemma4" in families.REFUSED
    for name, why in families.REFUSED.items():
        for call in (lambda: families.config_from_hf({"model_type": name}),
                     lambda: families.from_hf(fam_layer("mixtral"), {}, name)):
            assert error(call) == f"ValueError: model_type is {name!r}: {why}"


def printed(capsys, monkeypatch, *arguments) -> tuple[str, str, int]:
    """(stdout, stderr, exit status) of `python models/atlas.py` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["atlas.py", *map(str, arguments)])
    status = 0
    try:
        runpy.run_path(atlas.__file__, run_name="__main__")
    except SystemExit as stopped:
        status = stopped.code
    return (*capsys.readouterr(), status)


def test_atlas_in_the_docs(capsys, monkeypatch):
    """docs/routers.md has what `python models/atlas.py` prints: of one router, of three side by
    side, and the table, a line per family, refused or not."""
    page = (HERE / "docs/routers.md").read_text()
    blocks = re.findall(r"^```\n\$ python models/atlas.py(.*)\n((?:.*\n)*?)```$", page, re.M)
    assert len(blocks) == 2
    for arguments, want in blocks:
        assert printed(capsys, monkeypatch, *arguments.split()) == (want, "", 0)
    out, err, status = printed(capsys, monkeypatch)
    assert (err, status) == ("", 0)
    _, after = page.split("<!-- families table -->\n")
    assert after.split("<!-- end of the table -->")[0] == out
    _, _, *lines = out.splitlines()
    assert [line.split("`")[1] for line in lines] == [*families.FAMILIES, *families.INEXPRESSIBLE]
    assert len({line.count(" | ") for line in out.splitlines()}) == 1


def test_atlas_refuses(capsys, monkeypatch, tmp_path):
    """One line and exit status 2, but for a type that is refused: its reason is the answer."""
    why = families.INEXPRESSIBLE["doge"]
    out, err, status = printed(capsys, monkeypatch, "doge")
    assert (out, err, status) == (f"doge is refused: {why}\n", "", 0)
    file = tmp_path / "config.json"
    for content, phrase in [
            (None, "No such file"), ("{", "Expecting property name"), ("[1]", "dict"),
            ("{}", "hidden_size is missing"),
            (json.dumps(fam_fields("mixtral", router_jitter_noise=0.1)), "router_jitter_noise")]:
        if content is not None:
            file.write_text(content)
        out, err, status = printed(capsys, monkeypatch, "mixtral", file)
        assert (out, err.count("\n"), status) == ("", 1, 2) and phrase in err, err
    for arguments in (["mixtrall"], ["mixtral", "mixtrall"]):
        out, err, status = printed(capsys, monkeypatch, *arguments)
        assert (out, err.count("\n"), status) == ("", 1, 2)
        assert "'mixtrall'" in err and ", ".join(families.FAMILIES) in err


@pytest.mark.parametrize("case", OWN)
def test_atlas_ends_with_the_config(case):
    """From any config of the type. A family without a knob for it has no line for it."""
    fields = fam_fields(case)
    text = atlas.router(family(case), fields)
    assert eval(text.splitlines()[-1]) == families.config_from_hf(fields)
    assert 10 <= len(text.splitlines()) <= 19 and "None" not in text
    row = families.TYPES[family(case)]
    assert ("expert_bias" in text) == ("enable_expert_bias" in row.knobs)
    assert ("latent_down" in text) == (case in ("nemotron_h-latent", "kimi_k3"))


SPEAKS = re.compile(
    "expert|moe|rout|gate|limit|shared?_|topk|top_k|group|norm|scor|swiglu|situ|latent|_act|aux")


@pytest.mark.parametrize("name", published.MODELS)
def test_atlas_reads_what_a_published_config_says(name, monkeypatch):
    """Every field that may change the router or the experts is read, or needed, or named. The
    others are of the loss, or are listed in families.py."""
    seen = set()
    whole = families.Reader.whole
    monkeypatch.setattr(families.Reader, "whole", lambda read, name, default=None:
                        seen.add(name) or whole(read, name, default))
    config = published.MODELS[name].config
    (_, reading), *_ = atlas.readings_of(config)
    assert reading.unread == (["need_fp32_gate"] if name == "step3p5" else [])
    nested = {f"{field}.{inner}" for field in config if isinstance(config[field], dict)
              for inner in config[field]} - {"quantization_config.quant_method"}
    fields = {*config, *nested} - seen - {"ffn_config", "aux_loss_alpha", "seq_aux"}
    unread = {field.split(".")[-1] for field in fields if SPEAKS.search(field)}
    assert unread - {*reading.unread} <= families.KNOWN
    assert families.type_of(config)[0] in families.TYPES


# type, field and value, the refusal; "-" where it is only named
UNREAD = """
deepseek_v3    router_temperature=2.0       -
deepseek_v3    moe_router_noise_std=0.1     -
deepseek_v3    group_score_topk=1           -
deepseek_v3    use_expert_bias=False        needs True or None
deepseek_v3    router_dtype='bfloat16'      needs 'float32' or 'fp32' or None
deepseek_v3    shared_expert_gate=True      needs False or None
qwen3_moe      expert_capacity_factor=1.25  -
qwen3_moe      e_score_correction_bias=True needs False or None
qwen3_moe      router_dtype='float32'       -
mimo_v2_flash  moe_router_dtype='bfloat16'  needs 'float32' or 'fp32' or None
step3p5        need_fp32_gate=True          -
dbrx           ffn_config.moe_noise=0.1     -
qwen2_moe      use_moe=False                needs True or None
"""


@pytest.mark.parametrize("line", UNREAD.strip().splitlines())
def test_families_unread_fields(line):
    """What speaks of routers, gates, experts or limits is read, and refused, or it is named: by the
    atlas, and in one warning."""
    name, given, needs = line.split(maxsplit=2)
    field, value = given.split("=")
    fields = fam_fields(name)
    if "." in field:
        fields["ffn_config"] = fields["ffn_config"] | {field.split(".")[1]: eval(value)}
    else:
        fields[field] = eval(value)
    if needs != "-":
        assert error(families.config_from_hf, fields).endswith(f": {field} is {value}; {needs}")
        return
    text = f"this {name} config has fields that nothing reads: {field}"
    with pytest.warns(UserWarning, match=re.escape(text) + "$"):
        config = families.config_from_hf(fields)
    assert config == families.config_from_hf(fam_fields(name))
    lines = atlas.router(name, fields).splitlines()
    assert f"not read: {field}" in lines and eval(lines[-1]) == config


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_families_no_warning_for_the_librarys_configs(case, recwarn):
    for config in (library_config(case, **library_fields(case)), fam_fields(case)):
        assert families.read_config(config).unread == []
        if "hy_v4" not in case:                       # its shared experts are refused
            families.config_from_hf(config)
    assert not [warning for warning in recwarn if "nothing reads" in str(warning.message)]


def test_atlas_of_a_named_model_has_its_numbers():
    """Each field in brackets is in the config, and its number is in the line: what stands beside a
    model's name is that model's. A field in parentheses is not in the config."""
    for name, model in published.MODELS.items():
        title, *lines = atlas.router(name).splitlines()
        assert title.startswith(f"{name}: {model.model}") and title.endswith(f"({model.source})")
        assert ("from memory" in title) == (model.found == "memory")
        numbers = 0
        for line in lines:
            text, _, origin = line.rstrip("]").partition(" [")
            values = []
            for field in filter(None, origin.split(", ")):
                value = model.config
                for part in field.strip("()").split("."):
                    value = (value or {}).get(part)
                assert (value is None) == field.startswith("("), (name, line)
                if isinstance(value, list):
                    value = value[3]
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    values.append(value)
                if field == "activation_situ_beta" and "beta =" not in text:
                    values.pop()                             # it says which activation
            if "shared_expert(x)" in text and "(" not in origin:
                values = [math.prod(values)]
            if not re.search(r"expert_bias|rms_norm|latent_up|y / 2|shared_expert.*\(shared", line):
                printed = [float(number) for number in re.findall(r"(?<![\w.])[\d.]+", text)]
                assert set(values) <= set(printed), (name, line)
                numbers += len(values)
        assert numbers >= 4, name


def test_atlas_without_a_published_config():
    """Letters in the place of numbers, and no model's name."""
    for name, fields in published.FIELDS.items():
        title, *lines = atlas.router(name).splitlines()
        assert title == f"{name}: no config found"
        for field in fields.split():
            assert any(field in line for line in lines), (name, field)
        numbers = re.findall(r"(?<![\w.-])\d[\d.e-]*", "\n".join(lines[:-1]))
        assert set(numbers) <= {"1e-20", "2"}, name          # 2 of a group are summed


def test_atlas_says_why_no_config_computes_it(capsys, monkeypatch, tmp_path):
    """What MoEConfig refuses is not printed as one. Exit status 0: the formulas are right."""
    for name, given, why in [
            ("deepseek_v3", dict(n_routed_experts=96, n_group=7),
             "num_groups = 7 does not divide num_experts = 96; groups need equal sizes"),
            ("deepseek_v3", dict(routed_scaling_factor="1.75"),
             "scaling_factor = '1.75': needs a finite number, or None"),
            ("qwen3_moe", dict(hidden_act="gelu"),
             "hidden_act is 'gelu'; needs 'silu' or 'swish' or 'gelu_pytorch_tanh'")]:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(fam_fields(name, **given)))
        out, err, status = printed(capsys, monkeypatch, file)
        assert out.splitlines()[-1] == f"no MoEConfig: {why}" and (err, status) == ("", 0)
    assert f"{E8} experts, hidden_act = 'gelu', {F5} wide" in out


def test_atlas_of_dense_models(capsys, monkeypatch, tmp_path):
    """Granite 4.0's and Gemma 4's configs also describe models without experts."""
    file = tmp_path / "config.json"
    for name, fields, says in [
            ("granitemoehybrid", dict(num_local_experts=0, num_experts_per_tok=0),
             "num_local_experts is 0"),
            ("gemma4", dict(text_config=dict(model_type="gemma4_text", enable_moe_block=False)),
             "enable_moe_block is False")]:
        fields = {"model_type": name, **fields}
        text = f"this {name} config is of a dense model: {says}"
        assert error(families.config_from_hf, fields) == f"ValueError: {text}"
        file.write_text(json.dumps(fields))
        assert printed(capsys, monkeypatch, file) == ("", f"{file}: {text}\n", 2)
    moe_block = dict(model_type="gemma4_text", enable_moe_block=True)
    assert atlas.router("gemma4_text", moe_block).startswith("gemma4_text\nx: ")


def test_atlas_side_by_side(capsys, monkeypatch):
    """Each row has a name; no line is longer than 120; what all share has a title only if there is
    some."""
    out, *_ = printed(capsys, monkeypatch, "mixtral", "gpt_oss", "nemotron_h")
    lines = out.splitlines()
    assert lines[0] == "1. mixtral: mistralai/Mixtral-8x7B-v0.1" and lines[1].startswith("2. gpt")
    at = lines.index("constants: _")
    assert lines[at + 1] == "    2: alpha = 1.702, linear_offset = 1.0, clamp_value = 7.0"
    assert max(map(len, lines)) <= 120 and "_" not in lines
    out, *_ = printed(capsys, monkeypatch, "glm4_moe", "deepseek_v3")
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["type", "model", "without"]
    out, *_ = printed(capsys, monkeypatch, "glm4_moe", "glm4v_moe_text")
    assert "In all of them:\nwithout experts: layer 0\n" in out
    one_router = "\n\nsoftmax(logits[chosen]) is softmax(logits)[chosen], divided by its sum.\n\n"
    for names in (["mixtral", "qwen3_moe"], ["mixtral", "jamba"], ["glm4_moe", "deepseek_v3"]):
        out, *_ = printed(capsys, monkeypatch, *names)
        assert (one_router in out) == ("qwen3_moe" in names)
    z = torch.randn(9, 8)
    probs, chosen = z.softmax(1).topk(3)
    close(probs / (probs.sum(1, keepdim=True) + 1e-20), z.gather(1, chosen).softmax(1), 1e-6)
    same(probs.sum(1) + 1e-20, probs.sum(1))
    nothing = [("glm4_moe", "a", fam_fields("glm4_moe")), ("kimi_k3", "b", fam_fields("kimi_k3"))]
    monkeypatch.setattr(atlas, "lines_of", lambda reading: [])
    assert "In all of them:" not in atlas.compare(nothing)


def test_atlas_prints_one_rank_and_no_factor_of_one():
    for name in families.FAMILIES:
        text = atlas.router(name)
        assert ("rank = logits" in text) == ("softmax(logits[chosen])" in text)
        assert ("rank = scores" in text) == ("scores = " in text) and "* 1.0" not in text


# type, fields, what the model makes of the layer's output; "-" for nothing
BEHIND = """
axk1              -                                       post_mlp_layernorm(y)
afmoe             -                                       post_mlp_layernorm(y)
flex_olmo         -                                       post_feedforward_layernorm(y)
beam              -                                       post_feedforward_layernorm(y)
granitemoe        residual_multiplier=0.22                y * 0.22
granitemoe        residual_multiplier=1.0                 -
granitemoeshared  residual_multiplier=0.5                 y * 0.5
granitemoehybrid  shared_intermediate_size=7              y + shared_mlp(x), 7 wide
granitemoe_swa  residual_multiplier=0.5,shared_intermediate_size=7 (y + shared_mlp(x)) * 0.5, 7 wide
minimax           mlp_beta_factor=0.5                     y * 0.5
minimax           -                                       -
"""


def test_atlas_says_what_comes_after_the_layer():
    """And in the library's decoder layer: a field that it multiplies by is an attribute, a norm is
    a module."""
    for line in BEHIND.strip().splitlines():
        name, given, after = line.split(maxsplit=2)
        given = {} if given == "-" else eval(f"dict({given})")
        text = atlas.router(name, fam_fields(name, **given))
        assert re.findall("after the layer: y = (.*?)(?: +\\[|\n)", text) == (
            [] if after == "-" else [after])
        assert families.config_from_hf(fam_fields(name, **given)) == fam_config(name, torch.float32)
        with torch.device("meta"):
            layers = [module for module in whole_model(name, **given).modules()
                      if type(module).__name__.endswith("DecoderLayer")]
        attribute = after.split("(")[0]
        factor = next((value for field, value in given.items() if "shared" not in field), None)
        assert factor is None or factor in vars(layers[-1]).values()
        assert not attribute.endswith("norm") or any(
            attribute in dict(layer.named_modules()) or name == "axk1" for layer in layers)


CLAMPED = [
    ("step3p5", {"swiglu_limits": [0.0, 7, 0.0], "swiglu_limits_shared": [0.0, 16, 0.0]}),
    ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 7, 0],
                        "share_expert_swiglu_limit_list": [0, 16, 0]})]


@pytest.mark.parametrize("name, limits", CLAMPED)
def test_atlas_has_the_clamps_of_a_layer(name, limits):
    """As a formula, and in Step's experts of the library."""
    fields = fam_fields(name, **limits, num_hidden_layers=3, mlp_layer_types=["sparse"] * 3)
    routed, shared = limits
    *_, title, in_an_expert, in_shared, why, usual, _ = atlas.router(name, fields).splitlines()
    assert title == "in layer 1:" and usual == "in layers 0, 2:"
    assert why == (f"no MoEConfig: {routed} is 7; needs 0 or None; {shared} is 16; needs 0 or None")
    if name == "step3p5":
        config = library_config(name, **library_fields(name), **limits)
        block = library_block(name, config)
        names = dict(silu=F.silu, clip=torch.clip, min=lambda a, b: a.clamp(max=b))
        x = torch.randn(9, H6) * 3
        ffn = block.shared_experts
        names |= dict(gate=ffn.gate_proj(x) * 9, up=ffn.up_proj(x) * 9)
        ffn.gate_proj.weight.data *= 9
        ffn.up_proj.weight.data *= 9
        formula = in_shared.removeprefix("in the shared expert: ")
        close(ffn(x), ffn.down_proj(eval(formula, names)), 1e-4)
        assert in_an_expert == f"in an expert: {formula.replace('16', '7')}"
        assert block.experts.limit == 7


def test_families_unknown_type_names_the_nearest():
    for name, nearest in [("mimo_v2", "mimo_v2_flash"), ("qwen3_moee", "qwen3_moe")]:
        text = error(families.config_from_hf, {"model_type": name})
        assert text.startswith(f"ValueError: model_type is {name!r}; nearest: {nearest}; known: ")


def test_families_configs_as_models_publish_them():
    """dots.llm1 names its method as its score function; Step-3.7-Flash says twice that it has a
    shared expert."""
    dots = fam_fields("dots1", scoring_func="noaux_tc")
    assert families.config_from_hf(dots) == fam_config("dots1", torch.float32)
    step = fam_fields("step3p5", n_shared_experts=1)
    assert families.config_from_hf(step) == fam_config("step3p5", torch.float32)


# Refused type -> the library's config, the class of the block (or of the router, where no block
# holds it), the config's fields, and weight in the formulas -> name in the block.
CORRECTED_GATE = "W=gate.weight expert_bias=gate.e_score_correction_bias"
GEMMA = "W=proj.weight scale=scale per_expert_scale=per_expert_scale"
REFUSED_ROUTERS = {
    "phimoe": (
        "Phimoe PhimoeSparseMoeBlock", SMALL | dict(
            num_experts_per_tok=2, num_local_experts=E8, router_jitter_noise=0.2),
        "W=router.weight"),
    "gemma4_text": (
        "Gemma4Text Gemma4TextRouter", dict(
            hidden_size=H6, num_experts=E8, top_k_experts=3, moe_intermediate_size=F5,
            rms_norm_eps=0.1, enable_moe_block=True), GEMMA),
    "diffusion_gemma_text": (
        "DiffusionGemmaText DiffusionGemmaTextRouter", dict(
            hidden_size=H6, num_experts=E8, top_k_experts=3, moe_intermediate_size=F5,
            rms_norm_eps=0.1), GEMMA),
    "ernie4_5_vl_moe_text": (
        "Ernie4_5_VLMoeText Ernie4_5_VLMoeMoeBlock", SIZES | dict(
            moe_num_experts=E8, moe_k=3, moe_intermediate_size=[F5, 3], moe_num_shared_experts=2,
            moe_norm_min=0.4),
        "W=text_moe.gate.weight expert_bias=text_moe.gate.moe_statics.e_score_correction_bias"),
    "inkling_text": (
        "InklingText InklingMoE", ROUTED | dict(n_shared_experts=2, route_scale=2.5),
        CORRECTED_GATE + " global_scale=gate.global_scale"),
    "jetmoe": (
        "JetMoe JetMoeMoE", LOCAL | dict(num_key_value_heads=1, num_attention_heads=3),
        "W=router.layer.weight bias=bias"),
    "kolibri1": (
        "Kolibri1 Kolibri1SparseMoeBlock", PLAIN | dict(shared_expert_intermediate_size=4),
        CORRECTED_GATE),
    "kolibri1-unnormed": (
        "Kolibri1 Kolibri1SparseMoeBlock",
        PLAIN | dict(norm_topk_prob=False, shared_expert_intermediate_size=4), CORRECTED_GATE),
    "longcat_flash": (
        "LongcatFlash LongcatFlashMoE", dict(
            hidden_size=H6, moe_topk=3, expert_ffn_hidden_size=F5, n_routed_experts=5,
            zero_expert_num=3, routed_scaling_factor=2.5),
        "W=router.classifier.weight expert_bias=router.e_score_correction_bias"),
    "muse_spark_text": (
        "MuseSparkText MuseSparkMoE", LOCAL | dict(
            moe_intermediate_size=F5, moe_hidden_size=4, routed_scaling_factor=2.5,
            output_multiplier=0.3, num_attention_heads=2, num_key_value_heads=2), CORRECTED_GATE),
    "nllb-moe": (
        "NllbMoe NllbMoeTop2Router", dict(d_model=H6, num_experts=E8, router_bias=True),
        "W=classifier.weight b=classifier.bias"),
    "switch_transformers": (
        "SwitchTransformers SwitchTransformersSparseMLP", dict(
            d_model=H6, d_ff=F5, num_experts=E8, expert_capacity=99, router_bias=True),
        "W=router.classifier.weight b=router.classifier.bias"),
    "zaya": (
        "Zaya ZayaSparseMoeBlock", WIDE | dict(
            num_experts=E8, num_experts_per_tok=1, router_hidden_size=4, rms_norm_eps=0.1), """
            D=gate.down_proj.weight d=gate.down_proj.bias scale=gate.router_states_scale
            g=gate.router_mlp.norm.weight W1=gate.router_mlp.fc1.weight b1=gate.router_mlp.fc1.bias
            W2=gate.router_mlp.fc2.weight b2=gate.router_mlp.fc2.bias
            W=gate.router_mlp.out_proj.weight expert_bias=gate.balancing_biases"""),
}


def refused_block(case: str):
    """(the library's config of a refused type, its block in eval mode, with random weights)."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    block, fields, _ = REFUSED_ROUTERS[case]
    config_class, block_class = block.split()
    config = getattr(transformers, config_class + "Config")(**fields)
    config._experts_implementation = "eager"
    layer_idx = [1] if case == "zaya" else []
    block = getattr(modeling_of(config), block_class)(config, *layer_idx).eval().double()
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.7)
    return config, block


def check_refused_formulas(case: str, text: str, block) -> None:
    """Choice, probs and output of the library's block, or what its router alone returns, from the
    printed lines alone. Routers compute in fp32."""
    _, _, where = REFUSED_ROUTERS[case]
    weights = {name: block.state_dict()[path].double().squeeze()
               for name, path in (pair.split("=") for pair in where.split())}
    E = len(weights["W"])
    x = double(1, 32, H6)
    before = double(1, 32, 4)
    called = []
    inner = block.text_moe if hasattr(block, "text_moe") else block
    router = getattr(inner, "gate", getattr(inner, "router", inner))
    has_block = router is not block
    router.register_forward_hook(lambda module, args, out: called.append(out))
    with torch.no_grad():
        y = block(x, before) if case == "zaya" else block(x if has_block else x[0])
    y = (y[0] if isinstance(y, tuple) else y).view(32, -1)
    out = called[0]
    if case == "jetmoe":                             # its router returns rows in the experts' order
        order, token, gates, sizes, _ = out
        chosen_by = torch.arange(E).repeat_interleave(torch.tensor(sizes))
        want = torch.zeros(32, E, dtype=torch.float64)
        want[token, chosen_by] = gates
    elif case in ("switch_transformers", "nllb-moe"):
        want = out[1] if case == "nllb-moe" else (out[0] * out[1])[0]
    else:
        want = torch.zeros(32, E, dtype=torch.float64).scatter_add(1, out[2], out[1].double())

    def experts(chosen, x):
        """[H, K]: each expert's output, from the library's experts alone."""
        if case == "jetmoe":
            fc1 = inner.input_linear.weight
            halves = [(fc1[e] @ x).chunk(2) for e in chosen]
            return torch.stack([inner.output_linear.weight[e] @ (F.silu(a) * b)
                                for e, (a, b) in zip(chosen, halves)], 1)
        rows = []
        for e in chosen:
            if case == "switch_transformers":
                rows.append(inner.experts[f"expert_{e}"](x))
            elif case == "zaya" and e == E - 1:
                rows.append(torch.zeros_like(x))
            else:
                once = torch.tensor([[1.0, 0.0]], dtype=x.dtype)     # LongCat's needs two slots
                rows.append(inner.experts(x[None], e.expand(1, 2), once)[0])
        return torch.stack(rows, 1)

    norm = None
    if case == "muse_spark_text":                    # its experts have the norm inside
        norm = inner.experts.post_expert_norm
        inner.experts.post_expert_norm = torch.nn.Identity()
    shared = getattr(block, "shared_experts", None)
    if case == "inkling_text":
        one_hot = torch.eye(2, dtype=torch.float64)
        weights["shared_experts"] = lambda x: torch.stack(
            [shared(x.view(1, 1, -1), gamma.view(1, 1, -1)).flatten() for gamma in one_hot], 1)
    names = weights | dict(
        inf=math.inf, where=torch.where, sum=lambda a: a.sum(-1), mean=torch.mean, abs=torch.abs,
        max=torch.max, sqrt=torch.sqrt, gelu=F.gelu, softmax=lambda a: a.softmax(-1),
        sigmoid=torch.sigmoid, experts=experts, shared_expert=shared,
        top=lambda rank, n: torch.tensor(best(rank.tolist(), n)),
        maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
        without=lambda rank, chosen: rank.scatter(0, chosen, -math.inf),
        concat=lambda *parts: torch.cat([torch.as_tensor(part) for part in parts]),
        pre_expert_proj=getattr(block, "pre_expert_proj", None),
        pre_expert_norm=getattr(block, "pre_expert_norm", None),
        post_expert_proj=getattr(block, "post_expert_proj", None),
        post_expert_norm=lambda rows: norm(rows.T).T)
    for t in range(32):
        given = names | dict(x=x[0, t], before=before[0, t])
        for line in text.splitlines():
            match = re.match(r"(\w+) = (.*?)(, \w+ wide)?( +\[|$)", line)
            if match and (has_block or match[1] not in "yz"):
                with torch.no_grad():
                    given[match[1]] = eval(match[2], given)
        got = torch.zeros(E, dtype=torch.float64).scatter_add(0, given["chosen"], given["probs"])
        if case == "zaya":
            got[-1] = 0                              # the expert that computes nothing
        close(got, want[t], 1e-5)
        if has_block:
            close(given["y"], y[t], 1e-5)


@pytest.mark.parametrize("case", REFUSED_ROUTERS)
def test_atlas_has_the_formulas_of_refused_routers(case):
    """With the numbers of a config, and with the names of its fields. The last line is the reason
    why there is no MoEConfig."""
    config, block = refused_block(case)
    name = family(case) if case != "nllb-moe" else case
    text = atlas.router(name, config)
    assert text == atlas.router(name, config.to_dict())
    title, *lines, last = text.splitlines()
    assert title == name and last == f"no MoEConfig: {families.REFUSED[name]}"
    check_refused_formulas(case, "\n".join(lines), block)
    title, *unnumbered, end = atlas.router(name).splitlines()
    assert title == f"{name}: no config found" and end == last
    assert len(unnumbered) >= len(lines) and not any("  [" in line for line in unnumbered)


def test_atlas_refused_routers_under_other_names():
    config = dict(model_type="gemma4", text_config=dict(
        model_type="gemma4_text", enable_moe_block=True, num_experts=128, top_k_experts=8))
    text = atlas.router("gemma4", config)
    assert "rank = scores\nchosen = top(rank, 8) " in text
    assert text.splitlines()[-1] == f"no MoEConfig: {families.INEXPRESSIBLE['gemma4_text']}"


def test_families_switch_lacks_only_its_capacity():
    """Switch's block is a layer with ReLU as long as no expert is full. Beyond expert_capacity, a
    number of tokens of each sequence, its tokens get nothing: a capacity_factor is a multiple of
    the mean over all tokens."""
    config, block = refused_block("switch_transformers")
    block.router.classifier.bias.data.zero_()
    ours = MoEConfig(H6, F5, topk=1, num_experts=E8, activation="relu", pre_softmax=True,
                     params_dtype=torch.float64, batch_first=True)
    layer = MoELayer(ours)
    experts = [block.experts[f"expert_{e}"] for e in range(E8)]
    with torch.no_grad():
        layer.router.weight.copy_(block.router.classifier.weight)
        layer.experts.fc1.copy_(torch.stack([expert.wi.weight for expert in experts])[:, None])
        layer.experts.fc2.copy_(torch.stack([expert.wo.weight for expert in experts]))
    x = double(2, 9, H6, requires_grad=True)
    want, got = block(x), layer(x)
    close(got, want, 1e-5)                               # their router computes in fp32
    close_grads(got, want, [x], tol=1e-5)
    block.router.expert_capacity = 1
    _, indices = layer.router.route(x)
    first = torch.stack([F.one_hot(row, E8).cumsum(0).gather(1, row[:, None])[:, 0] == 1
                         for row in indices.view(2, 9)])
    assert 0 < first.sum() < 18
    close(block(x), got * first[..., None], 1e-5)


def test_families_nllb_runs_two_experts_in_the_library():
    """transformers 5.24 takes the 0 and 1 of a mask for the numbers of experts, so there is no
    block to hold a layer against."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.nllb_moe import NllbMoeConfig, modeling_nllb_moe
    block = modeling_nllb_moe.NllbMoeSparseMLP(NllbMoeConfig(d_model=H6, num_experts=E8), F5)
    run_experts = set()
    for e in range(E8):
        block.experts[f"expert_{e}"].register_forward_hook(
            lambda *args, e=e: run_experts.add(e))
    block.eval()(torch.randn(2, 32, H6))
    assert run_experts == {0, 1}


# The library's block multiplies by its scaling factor, its gate does not.
SCALED_ELSEWHERE = "beam", "minimax_m3_vl_text", "step3p5", "laguna"


def interpreted(text: str, x: Tensor, **names) -> dict[int, float]:
    """expert -> prob of one token: the printed formulas, line by line."""
    def best_groups(rank, groups, kept, n):
        size = len(rank) // groups
        parts = rank.view(groups, size)
        good = best([sum(sorted(part.tolist())[-n:]) for part in parts], kept)
        outside = torch.tensor([e // size not in good for e in range(len(rank))])
        return rank.masked_fill(outside, -math.inf)

    names |= dict(
        x=x, best_groups=best_groups, top=lambda rank, n: best(rank.tolist(), n),
        softmax=lambda a: a.softmax(-1), sigmoid=torch.sigmoid,
        sqrtsoftplus=lambda a: (1 + a.exp()).log().sqrt())
    for line in text.splitlines():
        if match := re.match(r"(logits|scores|rank|chosen|probs) = (.*?)( +\[|$)", line):
            names[match[1]] = eval(match[2], names)
    return dict(zip(names["chosen"], names["probs"].tolist(), strict=True))


def check_formulas(case: str, config, text: str, layer_idx: int = 1) -> None:
    """The choice and the weights of the library's gate, in fp32, from the printed lines alone."""
    block = library_block(case, config, layer_idx)
    layout = families.TYPES[family(case)].layouts[-1]
    tensors = {slot.parameter: block.state_dict().get(name) for name, slot in layout.items()}
    names = {"W": tensors["router.weight"], "b": tensors.get("router.bias"),
             "expert_bias": tensors.get("router.expert_bias")}
    names = {name: None if t is None else t.double().flatten(0, -2 if name == "W" else -1)
             for name, t in names.items()}
    x = torch.randn(1, 32, H6)
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, block, x)
    scale = 1.0
    if case in SCALED_ELSEWHERE:
        scale = families.read_config(config, layer_idx).fields["scaling_factor"]
    for t in range(32):
        pairs = interpreted(text, x[0, t].double(), **names)
        assert sorted(pairs) == sorted(indices[t].tolist())
        want = {e: w * scale for e, w in zip(indices[t].tolist(), weights[t].tolist())}
        assert pairs == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_atlas_gives_what_the_librarys_gate_gives(case):
    config = library_config(case, **library_fields(case))
    check_formulas(case, config, atlas.router(family(case), config))


@pytest.mark.parametrize("name", [name for name in published.MODELS if PUBLISHED[name].block])
def test_atlas_of_a_named_model_is_the_librarys_of_its_config(name):
    """The published fields in the library's config: the gate that it builds, with all its experts,
    and the same text. The model is narrow, so that it fits."""
    narrow = dict.fromkeys(("hidden_size", "d_model"), H6) | dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "expert_hidden_dim", "share_expert_dim",
         "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_intermediate_size"), F5)
    one = {field: value[5] for field, value in published.MODELS[name].config.items()
           if isinstance(value, list) and not re.search("limits|layer_", field)}
    fields = {field: one.get(field, value)
              for field, value in published.MODELS[name].config.items()
              if value is not None and field not in ("quantization_config", "model_type")}
    fields = {field: narrow.get(field, value) if value else value
              for field, value in fields.items()}
    attention = dict(num_attention_heads=2, num_key_value_heads=2)
    if name == "granitemoehybrid":
        attention |= dict(mamba_n_heads=4)
    if name == "dbrx":
        attention = {}
        fields["ffn_config"] = fields["ffn_config"] | {"ffn_hidden_size": F5}
    config = library_config(name, **fields, **attention)
    for text in (atlas.router(name), atlas.router(name, config)):
        check_formulas(name, config, text, layer_idx=5)      # after the hash layers


def match_published_loop(case: str, through) -> None:
    """Output, and gradients under the published names."""
    prefix = "model.layers.3.mlp."
    t = fam_tensors(case)
    other = dict.fromkeys(("model.layers.33.mlp.gate.weight", "lm_head.weight"), torch.zeros(1))
    tensors = other | fam_tensors(case, prefix=prefix)
    layer = fam_layer(case, tensors=tensors, prefix=prefix)
    leaves = {key: t[key].requires_grad_() for key in t if not only_chooses(key)}
    x = double(T7, 2, H6, requires_grad=True)
    want = published_loop(case, x, t)
    got = through(layer)(x)
    close(got, want, 1e-8)

    upstream = torch.randn_like(x)
    inputs = [x, *leaves.values()]               # an expert without tokens has a gradient of zeros
    wants = torch.autograd.grad(want, inputs, upstream, materialize_grads=True)
    gots = grads(got, [x, *layer.parameters()], upstream)
    close(gots[0], wants[0], 1e-8)
    with torch.no_grad():
        for parameter, grad in zip(layer.parameters(), gots[1:], strict=True):
            parameter.copy_(grad)
    named = families.to_hf(layer, family(case))
    close([named[key] for key in leaves], wants[1:], 1e-8)


@EVERY_CASE
def test_families_match_published_loop(case):
    match_published_loop(case, through=lambda layer: layer)


@some_quick(OWN, "kimi_k3")
def test_families_compiled_match_published_loop(case):
    match_published_loop(case, through=compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_LAYOUT
def test_families_round_trip(case, dtype):
    """Both layouts in, one out: bitwise, under a prefix; the copies share no memory. A gate that
    the library keeps in fp32 comes out in fp32, with the same numbers."""
    want = fam_tensors(case, dtype, "a.b.")
    layer = fam_layer(case, dtype, want, prefix="a.b.")
    out = families.to_hf(layer, family(case), "a.b.")
    if families.TYPES[family(case)].precision.startswith("fp32"):
        gate = "a.b." + PUBLISHED[case].tensors.split()[0]
        want[gate] = want[gate].float()
    same(out, want)
    for tensor in out.values():
        assert tensor.is_contiguous()
        tensor.zero_()
    held = fam_layer(case, dtype, as_held(case, fam_tensors(case, dtype)))
    same(held.state_dict(), layer.state_dict())


@pytest.mark.parametrize("case, size", [
    ("qwen3_moe", 3), ("granitemoe", 3), ("llama4_text", 3), ("gpt_oss", 3),
    ("qwen3_vl_moe_text", 3), ("qwen3_vl_moe_text", H6)])
def test_families_layouts_where_two_F_equal_H(case, size, monkeypatch):
    """unsloth-zoo #849: at 2F = H a matrix has the shape of its transpose; no shape tells which.
    Qwen3-VL's two layouts have the same names: there the shapes of both weights tell, also at
    F = H."""
    monkeypatch.setitem(AXIS, "F", size)
    for name in ("intermediate_size", "moe_intermediate_size"):
        monkeypatch.setitem(PUBLISHED[case].config, name, size)
    match_published_loop(case, through=lambda layer: layer)
    held = as_held(case, fam_tensors(case))
    assert (held["experts.gate_up_proj"].shape == (E8, 6, 6)) == (size == 3)
    same(fam_layer(case, tensors=held).state_dict(), fam_layer(case).state_dict())


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
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
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


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_families_match_the_library(case):
    """The library's own block on its own random weights; its config, as object and as dict."""
    theirs = library_config(case, **library_fields(case))
    config = families.config_from_hf(theirs)
    assert config == families.config_from_hf(theirs.to_dict())
    limit = {"swiglu_limit": 7.0} if case == "gpt_oss" else {}
    assert config == families.config_from_hf(fam_fields(case, **limit))

    block = library_block(case, theirs)
    tensors = {name: tensor for name, tensor in block.state_dict().items() if tensor.numel()}
    layer = families.from_hf(MoELayer(config), tensors, family(case))
    x = torch.randn(2, T7, H6, requires_grad=True)
    want = block(x.clone())
    got = layer(x)
    if case == "axk1":                                # the norm stays outside of the layer
        got = block.post_mlp_layernorm(got)
    if isinstance(want, tuple):
        want = want[0]
    close(got, want.view(x.shape), 1e-5)
    close_grads(got, want.view(x.shape), [x], tol=1e-5)


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_families_defaults_are_the_librarys(case):
    fields = library_fields(case)
    ends = "_size", "_experts", "_tok", "_token", "_k", "topk", "d_model", "_heads", "_dim"
    counts = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    sizes = {name: value for name, value in fields.items()
             if name.endswith(ends) and (name not in counts or value == 0)}
    for name in sizes.keys() & {"n_routed_experts", "num_experts"}:
        sizes[name] *= 4                              # the default groups divide it
    if case == "dbrx":
        ffn = fields["ffn_config"].items()
        sizes["ffn_config"] = {name: value for name, value in ffn if "normalize" not in name}
    layer_idx = 3 if case == "deepseek_v4" else None  # the first without a table
    by_default = families.config_from_hf(library_config(case, **sizes), layer_idx)
    assert by_default == families.config_from_hf({"model_type": family(case)} | sizes, layer_idx)


def test_families_config_dtype():
    """The dtype is the config's; text_config is looked into, and the inner dtype wins."""
    read, base, outer = families.config_from_hf, fam_fields("deepseek_v3"), {"model_type": "kimi"}
    config = read(base)
    bf16 = dataclasses.replace(config, params_dtype=torch.bfloat16)
    assert config.params_dtype == torch.float32 and read(types.SimpleNamespace(**base)) == config
    assert read(outer | {"text_config": base}) == config
    for name, dtype in [("torch_dtype", "bfloat16"), ("dtype", torch.bfloat16),
                        ("dtype", "torch.bfloat16")]:
        given = {name: dtype}
        assert read(base | given) == bf16
        assert read(outer | {"text_config": base} | given) == bf16
    inner = outer | {"text_config": base | {"dtype": "bfloat16"}}
    for text in (inner, outer | {"text_config": inner}):
        assert read(text | {"torch_dtype": "float16"}) == bf16


# family, fields, what is published where the config leaves it out
DEFAULTS = """
olmoe                -                     norm_topk_prob=False
qwen3_moe            -                     norm_topk_prob=False
qwen2_moe            -                     norm_topk_prob=False
qwen3_next           -                     norm_topk_prob=True
deepseek_v2          -                     num_groups=None scaling_factor=1.0 norm_topk_prob=False
deepseek_v2          topk_method='greedy'  num_groups=None group_topk=None group_score_topk=None
deepseek_v3          -                     num_groups=8 group_topk=4 group_score_topk=2
deepseek_v3          -                     scaling_factor=2.5 norm_topk_prob=True
deepseek_v3          -                     shared_expert_intermediate_size=16
deepseek_v3          n_shared_experts=None shared_expert_intermediate_size=None
kimi_k2              -                     num_groups=8 group_topk=4 scaling_factor=2.5
glm4_moe             -                     num_groups=None scaling_factor=1.0 norm_topk_prob=True
dots1                -                     num_groups=None scaling_factor=1.0 norm_topk_prob=False
dots1                n_group=None          num_groups=None group_topk=None
gpt_oss              -                     activation='quick_geglu' glu_alpha=1.702
gpt_oss              -                     glu_linear_offset=1.0 activation_clamp_value=7.0
mixtral              hidden_act='swish'    activation='swiglu'
mixtral              hidden_act='gelu_pytorch_tanh'  activation='geglu'
ernie4_5_moe         -                     shared_expert_intermediate_size=32
lfm2_moe             -                     norm_topk_prob=True enable_expert_bias=True
lfm2_moe             use_expert_bias=False enable_expert_bias=False
kimi_linear          -                     scaling_factor=2.446 norm_topk_prob=True situ_beta=1.0
kimi_linear          -                     latent_size=None latent_norm=False num_groups=None
deepseek_v4          num_hash_layers=0     scaling_factor=1.5 activation_clamp_value=10.0
deepseek_v4          num_hash_layers=0     score_function='sqrtsoftplus' enable_expert_bias=True
inkling2_text        -                     situ_beta=4.0 situ_linear_beta=25.0 scaling_factor=8.0
flint                shared_expert_intermediate_size=4  norm_topk_prob=True
mistral_large4_text  -                     scaling_factor=1.0 num_groups=None
minimax_m3_vl_text   shared_intermediate_size=4  scaling_factor=2.0 glu_alpha=1.702
minimax_m3_vl_text   shared_intermediate_size=4  activation_clamp_value=7.0
bailing_hybrid       -                     num_groups=8 group_topk=4 scaling_factor=2.5
axk2                 -                     scaling_factor=2.5 shared_expert_intermediate_size=16
dots3_note_text      shared_experts_intermediate_size=4  num_groups=None scaling_factor=1.0
beam                 -                     num_groups=8 group_topk=4 scaling_factor=2.5
mellum               -                     norm_topk_prob=True
flex_olmo            -                     norm_topk_prob=False
qwen3_omni_moe_text  -                     norm_topk_prob=True
qwen3_omni_moe_talker_text  -              norm_topk_prob=False
aria_text            -                     shared_expert_intermediate_size=32
cohere2_moe          -                     score_function='softmax' norm_topk_prob=True
cohere2_moe          -                     shared_expert_intermediate_size=None
cohere2_moe          norm_topk_prob=False  norm_topk_prob=True
cohere2_moe          expert_selection_fn='sigmoid',norm_topk_prob=False  norm_topk_prob=False
mistral4             -                     scaling_factor=1.0 num_groups=None norm_topk_prob=True
mistral4             norm_topk_prob=False  norm_topk_prob=False
afmoe                -                     scaling_factor=1.0 shared_expert_intermediate_size=32
hy_v3                -                     scaling_factor=2.826 shared_expert_intermediate_size=16
laguna               -                     scaling_factor=1.0
step3p5              share_expert_dim=4    scaling_factor=1.0
step3p5              share_expert_dim=4,swiglu_limits=[0.0,0.0]  activation_clamp_value=None
exaone_moe           -                     scaling_factor=2.5 num_groups=None
mimo_v2_flash        routed_scaling_factor=None  scaling_factor=None
glm_moe_dsa          -                     scaling_factor=2.5 num_groups=None
glm4_moe_lite        -                     scaling_factor=1.8 num_groups=None
glm5_next_text       -                     scaling_factor=2.5 activation_clamp_value=10.0
axk1                 -                     num_groups=8 group_topk=4 scaling_factor=2.5
hy_v4                n_shared_experts=0    activation_clamp_value=10.0 scaling_factor=2.827
"""


def test_families_config_values():
    """Published defaults, and fields that no small config above has."""
    sizes = dict(hidden_size=64, num_experts=32, num_experts_per_tok=4)
    sizes |= dict(intermediate_size=16, moe_intermediate_size=16)
    for line in DEFAULTS.strip().split("\n"):
        name, given, *want = line.split()
        fields = {"model_type": name} | sizes
        if "shared_expert_intermediate_size" in PUBLISHED[name].config:
            fields["shared_expert_intermediate_size"] = 4
        if given != "-":
            fields |= eval(f"dict({given})")
        config = families.config_from_hf(fields)
        for field, value in eval(f"dict({','.join(want)})").items():
            assert getattr(config, field) == value, line
    dbrx = PUBLISHED["dbrx"].config["ffn_config"] | dict(moe_normalize_expert_weights=None)
    assert not fam_config("dbrx", ffn_config=dbrx).norm_topk_prob


@pytest.mark.parametrize("outer, text", [
    *((name, f"{name}_text") for name in (
        "inkling2", "mistral_large4", "minimax_m3_vl", "dots3_note", "qwen4_exp", "aria",
        "glm4v_moe", "glm5_next", "qwen3_5_moe", "qwen3_vl_moe")),
    ("kimi_k3", "kimi_k3")])
def test_families_composite_models(outer, text):
    """The outer config and the outer name do as the text model's; the library's objects too."""
    inner = fam_fields(text)
    plain = fam_config(text, torch.float32)
    other = inner | {"model_type": "minimax_m2" if outer != "kimi_k3" else "kimi_linear"}
    for config in ({"model_type": outer, "text_config": inner}, {"text_config": inner},
                   {"model_type": outer, "text_config": other},
                   inner | {"model_type": outer}):           # dots3_note is published like this
        assert families.config_from_hf(config) == plain
    t = fam_tensors(text, torch.float32)
    layer = families.from_hf(MoELayer(plain), t, outer)
    same(families.to_hf(layer, outer), t)
    if outer == "kimi_k3":                                   # which the library does not have
        del other["hidden_act"]                              # situ, since it has a beta
        assert families.config_from_hf(other) == plain
        return
    transformers = pytest.importorskip("transformers", reason="reads the configs of transformers")
    theirs = transformers.PreTrainedConfig()
    theirs.model_type = outer
    theirs.text_config = library_config(text, **library_fields(text))
    assert families.config_from_hf(theirs) == plain


def test_families_layers_that_differ():
    """DeepSeek-V4's first layers choose by a table: which layer it is has to be said."""
    read = families.config_from_hf
    types_4 = ["hash_moe", "hash_moe", "moe", "moe"]
    v4 = fam_fields("deepseek_v4", num_hidden_layers=4)
    untyped = {name: value for name, value in v4.items() if name != "mlp_layer_types"}
    typed = v4 | {"mlp_layer_types": types_4}
    by_score = read(v4)
    by_table = dataclasses.replace(by_score, enable_expert_bias=False)
    for given, hashed in ((typed, 2), (untyped | {"num_hash_layers": 2}, 2), (untyped, 3),
                          (v4 | {"mlp_layer_types": None, "num_hash_layers": 2}, 2)):
        want = [by_table] * hashed + [by_score] * (4 - hashed)
        assert [read(given, i) for i in range(4)] == want
    assert read(untyped | {"num_hash_layers": 0}) == by_score

    hunyuan = fam_fields("hunyuan_v1_moe", moe_topk=[3, 2, 1, 2])
    assert read(hunyuan, layer_idx=1).topk == 2
    assert read(hunyuan | {"moe_topk": [3]}).topk == 3
    dense = v4 | {"mlp_layer_types": ["moe", "dense"]}
    check_errors([
        (lambda: read(typed), "mlp_layer_types is 'hash_moe' in layers 0 to 1 or "
                              "'moe' in layers 2 to 3; needs layer_idx"),
        (lambda: read(untyped), "the first 3 layers are hash layers; needs layer_idx"),
        (lambda: read(typed, 4), "mlp_layer_types has 4 values; layer_idx is 4"),
        (lambda: read(typed, -1), "layer_idx is -1; needs 0 or more"),
        (lambda: read(dense, 1), "layer_idx is 1, a layer without experts; needs layers 0"),
        (lambda: read(hunyuan),
         "moe_topk is 3 in layer 0 or 2 in layers 1, 3 or 1 in layer 2; needs layer_idx")])


# type, fields of published configs, which of 8 layers are dense
DENSE_LAYERS = """
deepseek_v3   first_k_dense_replace=2  0 1
glm_moe_dsa   first_k_dense_replace=2,mlp_layer_types=['sparse']*8  -
kimi_linear   mlp_layer_types=['dense']+['sparse']*6+['dense']  0 7
kimi_linear   first_k_dense_replace=2,moe_layer_freq=1  0 1
axk1          first_k_dense_replace=1,moe_layer_freq=2  0 1 3 5 7
mimo_v2_flash moe_layer_freq=[0]+[1]*7  0
dots3_note_text  moe_layer_freq=[0,1]*4  0 2 4 6
minimax_m3_vl_text  moe_layer_freq=[0]*3+[1]*5  0 1 2
step3p5       moe_layers_enum='3,4,6,7'  0 1 2 5
llama4_text   interleave_moe_layer_step=2  0 2 4 6
llama4_text   moe_layers=[1,2]  0 3 4 5 6 7
jamba         expert_layer_period=4,expert_layer_offset=2  0 1 3 4 5 7
lfm2_moe      num_dense_layers=3  0 1 2
afmoe         num_dense_layers=0  -
ernie4_5_moe  moe_layer_start_index=1,moe_layer_end_index=6  0 7
ernie4_5_moe  moe_layer_start_index=1,moe_layer_end_index=-1,moe_layer_interval=2  0 2 4 6
qwen3_moe     mlp_only_layers=[3],decoder_sparse_step=2  0 2 3 4 6
qwen3_next    mlp_only_layers=[3]  3
flint         mlp_only_layers=[]  -
nemotron_h    hybrid_override_pattern='MEMEM*EE'  0 2 4 5
nemotron_h    layers_block_type=['mamba','moe']*4  0 2 4 6
"""


def sparse_in_the_library(case: str, **fields) -> tuple[list[int], object]:
    """The layers with experts in the library's own model, on the meta device, and its config.
    PUBLISHED says of most types that all layers have experts. That is left out here."""
    whole = PUBLISHED[case].whole
    fixed = dict.fromkeys(["mlp_layer_types", "first_k_dense_replace", "num_dense_layers",
                           "mlp_only_layers", "moe_layer_start_index"])
    fixed |= dict(num_hidden_layers=8) | fields
    if case == "dbrx":
        fixed = dict(n_layers=8)
    if case == "deepseek_ocr2_text" and not fields:
        fixed["mlp_layer_types"] = ["dense"] + ["sparse"] * 7          # it has no default
    if "layer_types" in whole:
        fixed["layer_types"] = whole["layer_types"] * 4
    with torch.device("meta"):
        model = whole_model(case, **fixed)
    prefixes = families._prefixes(families._tensors(model), families.TYPES[case].layouts[-1:])
    return [families._layer_of(prefix) for prefix in prefixes], model.config


@pytest.mark.parametrize("case", [case for case in IN_THE_LIBRARY if case in FAMILIES])
def test_families_dense_layers_are_the_librarys(case):
    """Of every type, where its config does not say: of the config object, and of a dict without
    that field."""
    sparse, config = sparse_in_the_library(case)
    assert families.read_config(config).sparse == sparse
    sizes = {name: value for name, value in fam_fields(case).items() if name != "mlp_layer_types"}
    if case not in ("deepseek_ocr2_text", "nemotron_h"):     # which have no default
        assert families.read_config(sizes | {"num_hidden_layers": 8}).sparse == sparse


@pytest.mark.parametrize("line", DENSE_LAYERS.strip().splitlines())
def test_families_dense_layers(line):
    """In all the ways in which configs say it: as the library has it, refused by their numbers, and
    printed first."""
    name, given, *dense = line.split()
    dense = [] if dense == ["-"] else [int(layer) for layer in dense]
    given = eval(f"dict({given})")
    fields = fam_fields(name, **{"num_hidden_layers": 8, **given})
    sparse = [layer for layer in range(8) if layer not in dense]
    assert sparse_in_the_library(name, **given)[0] == sparse
    text = atlas.router(name, fields)
    assert (text.splitlines()[1] == f"without experts: {families.layers(dense)}"
            or not dense and "without" not in text)
    for layer in range(8):
        call = functools.partial(families.config_from_hf, fields, layer)
        if layer in dense:
            assert error(call) == (
                f"ValueError: this {name} config cannot be expressed: layer_idx is {layer}, "
                f"a layer without experts; needs {families.layers(sparse)}")
        else:
            assert call() == families.config_from_hf(fields)


def test_families_dense_layers_that_the_library_does_not_read():
    """The code of K-EXAONE and of Hunyuan does."""
    for name, given in [
            ("exaone_moe", dict(first_last_k_dense_replace=2)),
            ("exaone_moe", dict(is_moe_layer=[False] * 2 + [True] * 6)),
            ("hunyuan_v1_moe", dict(moe_layer_num_skipped=2))]:
        read = families.read_config(fam_fields(name, num_hidden_layers=8, **given))
        assert (read.dense, read.sparse) == ([0, 1], [2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("through", [lambda layer: layer, pytest.param(compiled, marks=slow)])
def test_families_hash_layer(through):
    """The table stays with the caller: neither read nor unexpected, and not given back."""
    layer = MoELayer(fam_config("deepseek_v4", mlp_layer_types=["hash_moe", "hash_moe"]))
    t = fam_tensors("deepseek_v4")
    missing = error(families.from_hf, MoELayer(fam_config("deepseek_v4")),
                    {name: t[name] for name in t if name != "gate.bias"}, "deepseek_v4")
    assert missing.splitlines()[1:] == ["  gate.bias [8] is missing"]
    del t["gate.bias"]
    table = torch.rand(9, E8).topk(3).indices
    lazy = Lazy({**t, "gate.tid2eid": table}, slices=True)
    families.from_hf(layer, lazy, "deepseek_v4")
    assert sorted(lazy.loads) == sorted(t) and layer.router.expert_bias is None
    same(families.to_hf(layer, "deepseek_v4"), t)

    indices = table[torch.randint(9, (T7, 2))]
    x = double(T7, 2, H6)
    want = published_loop("deepseek_v4", x, t, chosen=indices.flatten(0, 1).tolist())
    close(through(layer)(x, topk_indices=indices), want, 1e-8)


def test_families_block_without_a_name_of_its_own():
    """Mistral Large 4: attention and norms lie under the same prefix, and are left alone. A text
    model that is saved without the rest has the shared expert's held names."""
    name = "mistral_large4_text"
    prefix = "layers.3."
    t = fam_tensors(name, prefix=prefix)
    names = [f"{prefix}{other}.weight" for other in ("attention.wo", "ffn_norm", "gate_up")]
    around = {other: torch.zeros(2) for other in names}
    layer = fam_layer(name, tensors=t | around, prefix=prefix)
    same(families.to_hf(layer, name, prefix), t)
    renamed = dict(around)
    for key, tensor in t.items():
        for old, new in W_HELD.items():
            key = key.replace(old, new)
        renamed[key] = tensor
    other = fam_layer(name, tensors=renamed, prefix=prefix)
    same(other.state_dict(), layer.state_dict())
    wrong = {f"{prefix}experts.0.{part}": torch.zeros(2) for part in ("w4.weight", "w1.scale")}
    text = error(families.from_hf, layer, t | around | wrong, name, prefix)
    assert text.splitlines()[1:] == [
        "  layers.3.experts.0.w4.weight is unexpected",
        "  layers.3.experts.0.w1.scale is of quantised weights; dequantise them first"]

    t = fam_tensors("step3p5", prefix=prefix)                # its shared expert lies beside `moe.`
    layer = fam_layer("step3p5", tensors=t | around, prefix=prefix)
    same(families.to_hf(layer, "step3p5", prefix), t)
    wrong = {f"{prefix}moe.bias": torch.zeros(2)}
    text = error(families.from_hf, layer, t | around | wrong, "step3p5", prefix)
    assert text.splitlines()[1:] == ["  layers.3.moe.bias is unexpected"]


# family, field, value, needs
REFUSED = """
mixtral              router_jitter_noise   0.1           0.0 or None
mixtral              hidden_act            'gelu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
qwen3_moe            n_group               4             1 or 0 or None
qwen3_moe            scoring_func          'sigmoid'     'softmax' or None
qwen3_moe            moe_latent_size       3             None
qwen3_moe            swiglu_limit          7.0           None
qwen3_moe            topk_method           'noaux_tc'    'greedy' or None
qwen3_moe            n_shared_experts      1             0 or None
qwen3_moe            routed_scaling_factor 2.5           1.0 or 0 or None
deepseek_v2          topk_method           'noaux_tc'    'greedy' or 'group_limited_greedy'
deepseek_v2          norm_topk_prob        True          False or None
deepseek_v2          mlp_bias              True          False or None
deepseek_v3          topk_method           'greedy'      'noaux_tc' or None
deepseek_v3          scoring_func          'softmax'     'sigmoid' or None
ernie4_5_moe         use_bias              True          False or None
ernie4_5_moe         moe_norm_min          0.1           1e-12 or 0.0
minimax_m2           use_routing_bias      False         True
minimax_m2           shared_intermediate_size 4          0 or None
hunyuan_v1_moe       num_shared_expert     2             1
hunyuan_v1_moe       use_mixed_mlp_moe     False         True
hunyuan_v1_moe       group_limited_greedy  True          False or None
nemotron_h           mlp_hidden_act        'silu'        'relu2'
nemotron_h           n_shared_experts      2             1 or None
nemotron_h           topk_method           'greedy'      'noaux_tc' or None
jamba                norm_topk_prob        True          False or None
llama4_text          hidden_act            'relu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
gpt_oss              hidden_act            'gelu'        'silu' or 'swish' or None
kimi_linear          topk_method           'greedy'      'noaux_tc' or None
kimi_linear          moe_router_activation_func 'softmax' 'sigmoid' or None
kimi_linear          hidden_act  'gelu'  'silu' or 'swish' or 'gelu_pytorch_tanh' or 'situ'
deepseek_v4          scoring_func          'softmax'     'sqrtsoftplus' or 'sigmoid'
deepseek_v4          norm_topk_prob        False         True or None
deepseek_v4          n_shared_experts      2             1 or None
inkling2_text        hidden_act            'gelu'        'silu' or 'swish' or None
inkling2_text        scoring_func          'softmax'     'sigmoid' or None
flint                hidden_act            'gelu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
flint                n_group               2             1 or 0 or None
mistral_large4_text  norm_topk_prob        False         True or None
axk2                 n_group               8             1 or 0 or None
minimax_m3_vl_text   hidden_act            'gelu'        'swigluoai' or 'silu' or None
minimax_m3_vl_text   use_routing_bias      False         True or None
minimax_m3_vl_text   n_shared_experts      2             1 or None
bailing_hybrid       score_function        'softmax'     'sigmoid' or None
bailing_hybrid       moe_router_enable_expert_bias False True or None
dots3_note_text      mlp_bias              True          False or None
beam                 scoring_func          'softmax'     'sigmoid' or None
beam                 n_shared_experts      1             0 or None
qwen4_exp_text       scoring_func          'sigmoid'     'softmax' or None
qwen3_vl_moe_text    norm_topk_prob        False         True or None
qwen3_5_moe_text     norm_topk_prob        False         True or None
aria_text            hidden_act            'gelu_pytorch_tanh'  'silu' or 'swish' or None
aria_text            mlp_bias              True          False or None
cohere2_moe          expert_selection_fn   'relu'        'softmax' or 'sigmoid'
cohere2_moe          shared_expert_combination_strategy 'average' 'sum'
afmoe                route_norm            False         True or None
afmoe                score_func            'softmax'     'sigmoid' or None
laguna               moe_router_logit_softcapping 30.0   0 or None
laguna               moe_apply_router_weight_on_input True False or None
step3p5              swiglu_limits         7.0           0 or None
step3p5              swiglu_limits_shared  16.0          0 or None
step3p5              moe_router_activation 'softmax'     'sigmoid' or None
step3p5              norm_expert_weight    False         True or None
hy_v4  n_shared_experts  1  0, since a layer would clamp its shared expert too
bailing_hybrid       expert_swiglu_limit_list 4         0 or None
bailing_hybrid       scale_router_input    True          False or None
hy_v3                moe_router_use_sigmoid False        True or None
minimax              shared_intermediate_size 4          0 or None
glm5_next_text       hidden_act            'gelu_pytorch_tanh'  'silu' or 'swish' or None
"""


def test_families_refused_fields():
    """What would make another model is named; nothing is computed as something else."""
    for line in REFUSED.strip().split("\n"):
        name, field, value, needs = line.split(maxsplit=3)
        text = error(families.config_from_hf, fam_fields(name, **{field: eval(value)}))
        assert text == (f"ValueError: this {name} config cannot be expressed: "
                        f"{field} is {value}; needs {needs}")


def test_families_refused_configs():
    """One error lists all that is wrong."""
    def dbrx(**fixed):
        return fam_fields("dbrx", ffn_config=PUBLISHED["dbrx"].config["ffn_config"] | fixed)

    missing = (
        "hidden_size is missing; num_experts_per_tok or num_experts_per_token or experts_per_token "
        "or moe_k or moe_topk or moe_top_k is missing; num_experts or num_local_experts or "
        "n_routed_experts or moe_num_experts is missing; intermediate_size is missing")
    quantised = "quantization_config is given; needs dequantised weights and a config without it"
    table = [
        ({"model_type": "gpt2"}, f"model_type is 'gpt2'; known: {', '.join(families.FAMILIES)}"),
        ({}, "model_type is None; known: mixtral, "),
        ({"model_type": "phimoe"}, "'phimoe': its SparseMixer router masks the first expert"),
        ({"model_type": "mixtral"}, f"this mixtral config cannot be expressed: {missing}"),
        (fam_fields("kimi_k3", hidden_act="silu"), "situ_beta = 0.8"),
        ({"model_type": "kimi_k3", "text_config": {"quantization_config": {"bits": 4}}}, quantised),
        ({"model_type": "llama4", "quantization_config": {}, "text_config": {}},
         f"this llama4 config cannot be expressed: {missing}; {quantised}"),
        (fam_fields("mixtral", num_local_experts=None, num_experts=4),
         "num_experts = 4 and num_local_experts = None contradict each other"),
        (fam_fields("qwen3_moe", dtype="float8_e4m3fn"),
         "dtype is float8_e4m3fn; needs float64, float32, bfloat16, float16"),
        (fam_fields("qwen3_moe", num_experts_per_tok=[2, 2, 4]),
         "num_experts_per_tok is 2 in layers 0 to 1 or 4 in layer 2; needs layer_idx"),
        (fam_fields("hunyuan_v1_moe", moe_intermediate_size=[7, 7]),
         "intermediate_size = 5 and moe_intermediate_size = 7 contradict each other"),
        (dbrx(moe_normalize_expert_weights=2.0),
         "ffn_config.moe_normalize_expert_weights is 2.0; needs 1.0 or None"),
        (dbrx(moe_jitter_eps=0.01, ffn_act_fn={"name": "gelu"}),
         "ffn_config.moe_jitter_eps is 0.01; needs 0.0 or None; "
         "ffn_config.ffn_act_fn.name is 'gelu'; needs 'silu' or 'swish' or 'gelu_pytorch_tanh'")]
    read = families.config_from_hf
    check_errors((functools.partial(read, config), phrase) for config, phrase in table)


def test_families_misfits():
    """One error for all that is wrong under the prefix, and a layer that stays as it was."""
    layer = fam_layer("mixtral", torch.float32)
    before = copy.deepcopy(layer.state_dict())
    t = fam_tensors("mixtral", torch.float32, "mlp.")
    del t["mlp.experts.1.w3.weight"], t["mlp.gate.weight"]
    t["mlp.experts.0.w1.weight"] = torch.zeros(H6, F5)
    t["mlp.experts.0.w1.weight_scale"] = t["other.experts.0.w1.weight"] = torch.zeros(1)
    t["mlp.experts.3.w1.weight_packed"] = torch.zeros(1, dtype=torch.uint8)
    t["mlp.experts.2.w2.weight"] = torch.zeros(H6, F5, dtype=torch.float8_e4m3fn)
    t["mlp.experts.8.w2.weight"] = torch.zeros(H6, F5)
    text = error(families.from_hf, layer, t, "mixtral", "mlp.")
    assert text.splitlines() == [
        "ValueError: tensors do not make a mixtral block, nothing was changed:",
        "  mlp.gate.weight [8, 6] is missing",
        "  mlp.experts.0.w1.weight is [6, 5]; needs [5, 6]",
        "  mlp.experts.1.w3.weight [5, 6] is missing",
        "  mlp.experts.2.w2.weight is float8_e4m3fn; needs float64, float32, bfloat16, float16",
        "  mlp.experts.0.w1.weight_scale is of quantised weights; dequantise them first",
        "  mlp.experts.3.w1.weight_packed is of quantised weights; dequantise them first",
        "  mlp.experts.8.w2.weight is unexpected"]
    held = as_held("mixtral", fam_tensors("mixtral", torch.float32))
    held["experts.gate_up_proj"] = held["experts.gate_up_proj"].mT
    fused, read, write = MoELayer(fam_config("gpt_oss")), families.from_hf, families.to_hf
    not_normalised = MoELayer(dataclasses.replace(fam_config("mixtral"), pre_softmax=True))
    check_errors([
        (lambda: read(layer, held, "mixtral"),
         "changed:\n  experts.gate_up_proj is [8, 6, 10]; needs [8, 10, 6]"),
        (lambda: read(layer, t, "qwen4"), "model_type is 'qwen4'; nearest: qwen"),
        (lambda: read(layer, t, "phimoe"), "model_type is 'phimoe'"),
        (lambda: read(layer, t, "gpt_oss"),
         "layer is no gpt_oss block: activation = 'swiglu' (needs 'quick_geglu'), "
         "glu_linear_offset = 0.0 (needs 1.0), add_bias_linear = False (needs True), "
         "router_bias = False (needs True); build it with config_from_hf"),
        (lambda: write(layer, "jamba"), "block: norm_topk_prob = True (needs False); build"),
        (lambda: write(layer, "qwen2_moe"), "shared_expert_gate = False (needs True); build"),
        (lambda: write(not_normalised, "mixtral"), "norm_topk_prob = False (needs True); build"),
        (lambda: write(fam_layer("nemotron_h"), "deepseek_v3"),
         "block: activation = 'relu2' (needs one that is gated); build"),
        (lambda: write(fam_layer("deepseek_v3"), "nemotron_h"),
         "block: activation = 'swiglu' (needs one that is not gated); build"),
        (lambda: write(fam_layer("kimi_k3"), "deepseek_v3"),
         "layer is no deepseek_v3 block: latent_size = 4 (needs None), latent_norm = True (needs "
         "False), situ_beta = 0.8 (needs 1.0), situ_linear_beta = 1.5 (needs None); build"),
        (lambda: read(fused, {}, "gpt_oss", "mlp."),
         "mlp.experts.gate_up_proj [8, 6, 10] is missing\n  mlp.experts.gate_up_proj_bias [8,")])
    same(layer.state_dict(), before)
    by_convention = dataclasses.replace(fam_config("minimax_m2"), norm_topk_prob=None)
    assert write(MoELayer(by_convention), "minimax_m2")                # sigmoid: normalised


def test_families_lists_are_cut_at_ten():
    """A prefix that fits nothing is one line; long lists have ten entries and their number."""
    layer, name, prefix, t = fam_layer("qwen3_moe"), "qwen3_moe", "model.layers.3.mlp.", {}
    for i in range(11):
        t |= fam_tensors(name, prefix=f"model.layers.{i}.mlp.")
    t["model.layers.11.mlp.gate.weight"] = gate = torch.zeros(E8, H6)
    meta = MoELayer(layer.config).to("meta")
    read = families.from_hf
    fitting = ", ".join(f"model.layers.{i}.mlp." for i in range(10))
    missing = [f"experts.{e}.gate_proj.weight [5, 6] is missing" for e in range(8)]
    missing += [f"experts.{e}.up_proj.weight [5, 6] is missing" for e in range(2)]
    more = "\n  ".join([*missing, ".. 24 in all"])
    for wrong in ("", "model.layers.3.mlp", "model.layers.3.", "layers.3.mlp."):
        assert error(read, layer, t, name, wrong) == (
            f"ValueError: no tensor of a qwen3_moe block is at prefix {wrong!r}; "
            f"prefixes that fit: {fitting}, .. 11 in all")
    check_errors([
        (lambda: read(layer, {"lm_head.weight": gate}, name), "prefix ''; prefixes that fit: none"),
        (lambda: read(layer, {"gate.weight": gate}, name), f"nothing was changed:\n  {more}"),
        (lambda: read(layer, t, prefix), f"model_type is {prefix!r}; known: mixtral,"),
        (lambda: read(meta, t, name, prefix),
         "layer is on the meta device and cannot take weights; call layer.to_empty(device=..) and "
         "reset_parameters() of its modules first")])
    check_errors(kind=TypeError, table=[
        (lambda: read(t, layer, name),
         "layer is a dict; needs a MoELayer (how to fill a small.MoE is said in small.py)"),
        (lambda: read(layer, list(t), name), "tensors is a list; needs a mapping, name -> tensor")])


class Lazy(dict):
    """Loads a tensor on [name], one at a time; with `slices` also in safetensors' way."""

    def __init__(self, tensors: dict, slices: bool):
        super().__init__(tensors)
        self.loads = []
        self.last = lambda: None
        if slices:
            self.get_slice = lambda name: types.SimpleNamespace(
                get_shape=lambda: list(tensors[name].shape), get_dtype=lambda: "F32")

    def __getitem__(self, name):
        assert self.last() is None
        tensor = super().__getitem__(name).clone()
        self.loads.append(name)
        self.last = weakref.ref(tensor)
        return tensor


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_families_stream(name, slices):
    """One tensor at a time, nothing outside of the prefix; each once where shapes are known before,
    else twice."""
    t = fam_tensors(name, prefix="mlp.")
    lazy = Lazy(t | {"lm_head.weight": torch.zeros(3)}, slices)
    layer = fam_layer(name, tensors=lazy, prefix="mlp.")
    same(layer.state_dict(), fam_layer(name).state_dict())
    assert sorted(lazy.loads) == sorted(t if slices else [*t, *t])
    del lazy[next(iter(t))]
    lazy.loads.clear()
    error(families.from_hf, layer, lazy, name, "mlp.")
    assert lazy.last() is None and (not slices or not lazy.loads)


def test_families_read_safetensors_files(tmp_path):
    """An open file as it is: shapes from its header, one tensor after the other."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a safetensors file")
    name, file, t = "ernie4_5_moe", tmp_path / "a", fam_tensors("ernie4_5_moe", torch.bfloat16)
    safetensors.save_file(t, file)
    with safetensors.safe_open(file, "pt") as tensors:
        layer = fam_layer(name, torch.float32, tensors)
    same(layer.state_dict(), fam_layer(name, torch.float32, t).state_dict())
    out = families.to_hf(layer, name)
    safetensors.save_file(out, file)
    same(safetensors.load_file(file), out)
    t["gate.weight"] = t["gate.weight"].to(torch.float8_e4m3fn)
    safetensors.save_file(t, file)
    with safetensors.safe_open(file, "pt") as tensors:
        text = error(families.from_hf, layer, tensors, name)
    assert "gate.weight is F8_E4M3; needs" in text


class OneOf:
    """As much of a process group as from_hf and to_hf ask for."""

    def __init__(self, rank: int, ranks: int):
        self.rank = lambda: rank
        self.size = lambda: ranks


def shard(layer: MoELayer, group: OneOf, **groups) -> MoELayer:
    """The layer as one rank of ep or tp holds it."""
    def cut(x, dim):
        return torch.nn.Parameter(x.detach().chunk(group.size(), dim)[group.rank()].clone())
    part = copy.deepcopy(layer)
    part.pg_collection = ProcessGroups(tp_dp_cp=group, **groups)
    if "ep" in groups:
        for name, parameter in list(part.experts.named_parameters()):
            setattr(part.experts, name, cut(parameter, 0))
    else:
        shared = part.shared_experts
        shared.fc1 = cut(shared.fc1, 1)
        shared.fc2 = cut(shared.fc2, 1)
    return part


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "dbrx", "nemotron_h", "kimi_k3"])
def test_families_over_ep_ranks(name):
    """Each rank takes its experts from either layout, and needs no others; together they give the
    whole model back."""
    whole, t, found = fam_layer(name), fam_tensors(name), {}
    blank = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.zero_()
    for group in (OneOf(rank, 4) for rank in range(4)):
        want = shard(whole, group, ep=group)
        for tensors in (t, as_held(name, t)):
            lazy = Lazy(tensors, slices=True)
            part = shard(blank, group, ep=group)
            families.from_hf(part, lazy, name)
            same(part.state_dict(), want.state_dict())
            read = re.findall(r"^experts\.(\d+)", "\n".join(lazy.loads), re.M)
            assert {int(e) // 2 for e in read} <= {group.rank()}
        if name not in ("gpt_oss", "dbrx"):
            out = families.to_hf(want, name)
            part = families.from_hf(shard(blank, group, ep=group), out, name)
            same(part.state_dict(), want.state_dict())
            found.update(out)
    if name in ("gpt_oss", "dbrx"):
        spread = ", ".join(key for key in t if key.startswith("experts."))
        assert error(families.to_hf, want, name) == (
            f"ValueError: spread over ranks: {spread}; needs a layer without ep and tp: "
            "save sharded_state_dict() and load it there")
    else:
        same(found, families.to_hf(whole, name))


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m3_vl_text"])
def test_families_over_tp_ranks(name):
    """Each rank takes its part of the shared expert, from either layout; writing it refuses."""
    whole = fam_layer(name)
    t = fam_tensors(name)
    for rank, tensors in itertools.product((0, 1), (t, as_held(name, t))):
        group = OneOf(rank, 2)
        part = shard(MoELayer(whole.config), group, tp=group)
        families.from_hf(part, tensors, name)
        same(part.state_dict(), shard(whole, group, tp=group).state_dict())
    spread = ", ".join(f"shared_experts.{part}.weight" for part in GUD)
    check_errors([(lambda: families.to_hf(part, name), f"spread over ranks: {spread}; needs")])


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("options", [
    {}, {"shared_expert_intermediate_size": 8}, {"score_function": "sigmoid", "router_bias": True},
    {"add_bias_linear": True}])
def test_families_upcycle(kind, options):
    """At the start the dense FFN where probs sum to 1, a shared expert included; with noise the
    experts part."""
    sizes = dict(hidden_size=H6, ffn_hidden_size=F5, num_experts=E8, topk=3)
    config = MoEConfig(**sizes, activation=kind, params_dtype=torch.float64,
                       router_dtype=torch.float64, **options)
    gate, up, down = double(3, F5, H6)
    gate = gate if kind == "swiglu" else None
    down = down.T
    layer = families.upcycle(config, gate, up, down_proj=down)
    x = double(T7, 2, H6)
    matrices = [up, down] if gate is None else [gate, up, down]
    act = relu2 if gate is None else swiglu_loop
    dense = [ffn_loop(x_H, matrices, act) for x_H in x.flatten(0, 1)]
    close(layer(x), torch.stack(dense).view(x.shape), 1e-6)

    noisy = families.upcycle(config, gate, up, down_proj=down, noise=0.1).experts
    for weight in (*noisy.fc1.unbind(1), noisy.fc2):
        spread = (weight - weight.mean(0)).std() / weight.mean(0).std()
        assert 0.05 < spread < 0.2 and (weight[0] - weight[1]).abs().min() > 0


def test_families_upcycle_refuses():
    config = MoEConfig(H6, F5, E8, topk=3)
    narrow = dataclasses.replace(config, latent_size=L4)
    ungated = dataclasses.replace(config, activation="relu2")
    up, down, upcycle = torch.zeros(F5, H6), torch.zeros(H6, F5), families.upcycle
    check_errors([
        (lambda: upcycle(narrow, up, up, down_proj=down),
         "latent_size is 4; needs None, since an expert is as wide as the dense FFN"),
        (lambda: upcycle(ungated, up, up, down_proj=down),
         "gate_proj and up_proj are 2 matrices; activation = 'relu2' needs 1"),
        (lambda: upcycle(config, None, up, down_proj=down),
         "gate_proj and up_proj are 1 matrices; activation = 'swiglu' needs 2"),
        (lambda: upcycle(config, up, down, down_proj=down),
         "up_proj has shape [6, 5]; needs [F = 5, H = 6]"),
        (lambda: upcycle(config, up, up, down_proj=down, noise=-1.0),
         "noise is -1.0; needs 0 or more")])
    text = error(upcycle, config, torch.nn.Linear(H6, F5), up, down_proj=down)
    assert text == "TypeError: gate_proj is a Linear; needs a tensor [F H]"


@over_ranks(2)
def test_families_over_ranks(rank, ranks):
    """Each rank reads its experts out of a whole model's tensors, and writes them under their
    global numbers."""
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    config = families.config_from_hf(dict(
        model_type="qwen2_moe", hidden_size=6, moe_intermediate_size=5, num_experts=8,
        num_experts_per_tok=2, shared_expert_intermediate_size=4, norm_topk_prob=True))
    torch.manual_seed(3)
    whole = MoELayer(config)
    mine = MoELayer(config, groups)
    tensors = families.to_hf(whole, "qwen2_moe", "mlp.")
    families.from_hf(mine, tensors, "qwen2_moe", prefix="mlp.")
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        same(a, own_part(name, b, groups))
    out = families.to_hf(mine, "qwen2_moe", "mlp.")
    for name, tensor in out.items():
        same(tensor, tensors[name])
    local = 8 // ranks
    assert {name for name in out if ".experts." in name} == {
        f"mlp.experts.{e}.{part}_proj.weight"
        for e in range(rank * local, rank * local + local) for part in ("gate", "up", "down")}


SIGNATURES = """\
config_from_hf: hf_config layer_idx
from_hf: layer tensors model_type prefix
to_hf: layer model_type prefix
upcycle: config gate_proj up_proj down_proj noise
register_experts: name
replace_blocks: model pg_collection padding_mask changes
sharded_state_dict: model optimizer"""


def test_families_signatures():
    """Other people's code depends on names and their order."""
    for row in SIGNATURES.splitlines():
        name, arguments = row.split(": ")
        assert list(inspect.signature(getattr(families, name)).parameters) == arguments.split()


def test_families_examples_in_docstrings():
    check_examples(families)


# ---- Live models of the Hugging Face library ----

def replaced(case: str = "qwen3_moe", **changes) -> torch.nn.Module:
    """A tiny model of the library, always the same, with replaced blocks."""
    model = same_model(case)
    families.replace_blocks(model, **changes)
    return model


def router_of(model, layer: int = 0):
    return router_file._routers(model)[layer]


def names_of(model) -> list[list[str]]:
    """Of its parameters, buffers and state dict."""
    tensors = (model.named_parameters(), model.named_buffers(), model.state_dict().items())
    return [[name for name, _ in pairs] for pairs in tensors]


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_guests_are_the_librarys_models(case):
    """Logits, and every name: of parameters, buffers and the state dict. restore_blocks is the way
    back, and a deep copy is replaced too."""
    theirs = same_model(case).eval()
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    names = families.replace_blocks(ours)
    assert names_of(ours) == names_of(theirs)
    with torch.no_grad():
        want = whole_logits(theirs, ids)
        got = whole_logits(ours, ids)
        assert (got - want).abs().max() < 2e-6
        again = copy.deepcopy(ours)
        assert families.restore_blocks(ours) == names
        same(whole_logits(ours, ids), want)
        same(whole_logits(again, ids), got)
    assert not [name for name, _ in ours.named_modules() if "moe_router" in name]
    whole_logits(again.train(), ids).sum().backward()
    counts = load_balancing_metrics(again)["tokens_per_expert"]
    assert counts.sum(1).tolist() == [2 * T7 * router_of(again).config.topk] * len(names)


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


def test_families_precisions_in_the_docs():
    """The table of docs/models.md has every precision, with types that have it."""
    page = (HERE / "docs/models.md").read_text()
    _, _, after = page.partition("| product | scores | probs |")
    rows = [line.split(" | ") for line in after.split("\n\n")[0].splitlines()[2:]]
    said = {name: " ".join(row[:3]).removeprefix("| ")
            for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    precisions = {name: " ".join(row.dtypes()) for name, row in families.FAMILIES.items()}
    assert said == {name: precisions[name] for name in said}
    assert set(said.values()) == set(precisions.values()) and len(rows) == 5
    assert PRECISION == {name: words.split() for name, words in precisions.items()
                         if words != "fp32 fp32 fp32"}


def block_router(case: str, dtype, **changes):
    model = OneBlock(case, dtype, **wide_fields(case))
    families.replace_blocks(model, **changes)
    return router_of(model)


def many_experts(case: str) -> dict:
    """Fields of a whole model whose blocks have 64 experts, 4 of them a token (Llama's 1)."""
    wide = {name: {128: 64, 8: 4}.get(value, value) for name, value in wide_fields(case).items()
            if re.search("experts|per_tok|moe_k|top_?k$|^n_group", name) and "shared" not in name}
    if case == "dbrx":
        wide = dict(ffn_config=wide_fields(case)["ffn_config"] | dict(ffn_hidden_size=24))
    return wide


@pytest.mark.filterwarnings("ignore:this .* config has fields that nothing reads")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_precision_is_that_of_the_loaded_model(case, tmp_path):
    """A gate is saved in fp32, and loaded with dtype=torch.bfloat16: the library keeps it in fp32
    or rounds it. The layer of from_hf and the replaced gate have its numbers, its dtypes, and its
    choice for every token."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a safetensors file")
    torch.manual_seed(3)
    saved = whole_model(case, **many_experts(case))
    saved.save_pretrained(tmp_path)
    model = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16)
    held = families.TYPES[family(case)].layouts[-1]
    prefix = families._prefixes(families._tensors(model), [held])[-1]
    block = model.get_submodule(prefix[:-1])
    x = torch.randn(2, 2048, 32).bfloat16()
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, block, x.clone())
        fields = model.config.to_dict()
        tensors = safetensors.load_file(tmp_path / "model.safetensors")
        if "hy_v4" in case:                          # a layer would clamp its shared expert too
            fields["n_shared_experts"] = 0
            tensors = {name: t for name, t in tensors.items() if "shared_experts" not in name}
        config = families.config_from_hf(fields, families._layer_of(prefix))
        found = families._prefixes(tensors, families.TYPES[family(case)].layouts)
        layer = families.from_hf(MoELayer(config), tensors, family(case), found[-1])
        families.replace_blocks(model)
        for router in (layer.router, router_of(model, -1)):
            probs, chosen = router.route(x)
            same(router.weight, families._tensors(block)[next(iter(held))])
            assert torch.equal(chosen.sort(1).values, indices.sort(1).values)
            assert probs.dtype == weights.dtype


@pytest.mark.parametrize("dtype, cases", [
    (torch.bfloat16, IN_THE_LIBRARY),
    (torch.float16, ["mixtral", "gpt_oss", "lfm2_moe", "ernie4_5_moe", "deepseek_v3"])])
def test_live_router_has_the_precision_of_its_family(dtype, cases):
    """Automodel #3650, sglang #38695: some families compute logits in bf16, some in fp32; some
    round their weights, some do not."""
    for case in cases:
        product, scores, weights = [
            {"model": dtype, "fp32": torch.float32}[word]
            for word in PRECISION.get(case, ["fp32"] * 3)]
        router = block_router(case, dtype)
        x = torch.randn(3, T7, 64, dtype=dtype)
        logits = router.gating(x)
        probs, indices = router.route(x)
        assert (logits.dtype, probs.dtype) == (product, weights), case
        bias = 0.0 if router.bias is None else router.bias.double()
        exact = x.double() @ router.weight.double().T + bias
        close(logits.double(), exact, 1e-5 if product == torch.float32 else 0.02)
        in_fp32, _ = topk_routing(
            logits.flatten(0, 1).float(), precomputed_indices=indices,
            **router.config.routing_options | dict(probs_dtype=torch.float32))
        assert torch.equal(probs, in_fp32.to(weights)) == (scores == torch.float32), case
        config = families.config_from_hf(fam_fields(case, dtype=str(dtype)))
        assert config.router_dtype == router.config.router_dtype == product
        assert config.probs_dtype == router.config.probs_dtype


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "lfm2_moe", "ernie4_5_moe", "deepseek_v3"])
def test_live_router_has_another_precision_if_told(case):
    """In fp32 and fp64 nothing is rounded either."""
    def dtypes(dtype, **changes):
        config = block_router(case, dtype, **changes).config
        return config.router_dtype, config.probs_dtype
    assert dtypes(torch.bfloat16, router_dtype=torch.float32) == (torch.float32, None)
    given = dict(router_dtype=torch.bfloat16, probs_dtype=torch.float32)
    assert dtypes(torch.bfloat16, **given) == (torch.bfloat16, torch.float32)
    for dtype in (torch.float32, torch.float64):
        assert dtypes(dtype) == (dtype, None)
    plain = families.config_from_hf(fam_fields(case))
    assert (plain.router_dtype, plain.probs_dtype) == (torch.float32, None)


def test_live_router_kept_in_fp32_has_fp32_logits():
    """In the model's dtype is in that of the router's weight, where the library's gate casts its
    input to it; the weights are rounded or not as before."""
    for case, weights in [("hunyuan_v1_moe", torch.float32), ("minimax_m2", torch.float32),
                          ("ernie4_5_moe", torch.bfloat16)]:
        model = OneBlock(case, **wide_fields(case))
        model.block.gate.float()
        families.replace_blocks(model)
        router = router_of(model)
        x = torch.randn(3, T7, 64, dtype=torch.bfloat16)
        assert router.gating(x).dtype == torch.float32
        assert router.route(x)[0].dtype == weights


@pytest.mark.parametrize("case", ["hy_v3", "deepseek_v3", "ernie4_5_moe", "laguna", "lfm2_moe"])
def test_live_expert_bias_stays_in_fp32(case):
    """Through model.to(..), wherever the library's buffer lies."""
    model = replaced(case)
    router = router_of(model)
    bias = torch.rand_like(router.expert_bias)
    router.expert_bias = bias.clone()
    for cast in (model.bfloat16, model.half, model.float):
        cast()
        assert router.weight.dtype == model.dtype
        same(router.expert_bias, bias)
    families.restore_blocks(model)
    model.bfloat16()
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.parameters())


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "deepseek_v4", "lfm2_moe", "mixtral"])
def test_live_router_follows_the_models_dtype(case):
    """As the library's gate does: replaced in bf16 and cast, or cast and replaced."""
    models = [same_model(case).bfloat16() for _ in range(2)]
    families.replace_blocks(models[0])
    for model in models:
        model.float()
    families.replace_blocks(models[1])
    first, second = (router_of(model).config for model in models)
    assert first == dataclasses.replace(second, params_dtype=torch.bfloat16)
    ids = random_ids()
    same(*(whole_logits(model, ids) for model in models))
    model = same_model(case)
    families.replace_blocks(model, router_dtype=torch.float64)
    model.bfloat16()
    assert router_of(model).config.router_dtype == torch.float64


@pytest.mark.parametrize("case", [case for case in IN_THE_LIBRARY if case in FAMILIES])
def test_live_published_names_load_too(case, tmp_path):
    """What save_pretrained has written, by load_state_dict, also of a file cut into three: whatever
    the library renames, joins or transposes when it loads. Not all of it: an error."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reads a safetensors file")
    saved = replaced(case)
    with torch.no_grad():
        for parameter in saved.parameters():
            if not parameter.isfinite().all():                # Flint's sinks are not initialised
                parameter.fill_(0.5)
    saved.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for files in (1, 3):
        model = filled(replaced(case), 0)
        names = sorted(state)
        for i in range(files):
            model.load_state_dict({name: state[name] for name in names[i::files]}, strict=False)
        same(model.state_dict(), saved.state_dict())
    if case == "mixtral":
        model.load_state_dict({name: state[name] for name in names[:9]}, strict=False)
        text = error(whole_logits, model, random_ids())
        assert text == ("RuntimeError: load_state_dict got a part of what makes "
                        "model.layers.0.mlp.experts.down_proj, model.layers.0.mlp.experts."
                        "gate_up_proj; needs all files of the checkpoint")


IN_A_FRESH_PROCESS = f"""
import sys, torch
sys.path.insert(0, {str(HERE)!r})
model, ids, mask, want = torch.load("model.pt", weights_only=False)
assert torch.equal(model(ids, attention_mask=mask).logits, want)
"""


def test_live_model_is_saved_whole(tmp_path):
    """And opened in a fresh process, which does not know the implementation of the experts."""
    model = replaced("qwen2_moe", enable_expert_bias=True).eval()
    ids, mask = padded_ids(left=3)
    saved = model, ids, mask, model(ids, attention_mask=mask).logits.detach()
    torch.save(saved, tmp_path / "model.pt")
    done = run("-c", IN_A_FRESH_PROCESS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_live_tensors_that_are_cast():
    """A bias that only chooses stays fp32: ours, and the library's from its next forward on."""
    for case, changes in (("qwen2_moe", dict(enable_expert_bias=True)), ("deepseek_v3", {})):
        model = replaced(case, **changes).to(torch.bfloat16)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        whole_logits(model, random_ids())
        assert router_of(model).expert_bias.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_live_changes_begin_at_zero():
    """What they add lies under the gate, and goes when the blocks are restored."""
    plain = same_model("mixtral")
    model = replaced("mixtral", router_bias=True, enable_expert_bias=True)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert len(added) == 4 and all(".gate.moe_router.added_" in name for name in added)
    assert not any(model.state_dict()[name].any() for name in added)
    ids = random_ids()
    close(whole_logits(model, ids), whole_logits(plain, ids), 1e-6)
    whole_logits(model, ids).square().sum().backward()
    assert router_of(model).bias.grad.any()
    finish_step(model)
    assert router_of(model).expert_bias.any()
    without = replaced("deepseek_v3", enable_expert_bias=False)
    assert router_of(without).expert_bias is None


def trained_by_callback(callback, pieces: int, model, x: Tensor, upstream: Tensor):
    """Two steps as the library's Trainer makes them, in `pieces` microbatches -> its log."""
    args = types.SimpleNamespace(gradient_accumulation_steps=pieces)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    state = types.SimpleNamespace(log_history=[])
    for _ in range(2):
        callback.on_step_begin(args, state, None, model=model, optimizer=optimizer)
        for x_m, upstream_m in zip(x.chunk(pieces), upstream.chunk(pieces)):
            (model[0](x_m) * upstream_m).sum().backward()
        optimizer.step()
        callback.on_optimizer_step(args, state, None, model=model, optimizer=optimizer)
        optimizer.zero_grad()
        logs = {"loss": 1.0}
        state.log_history.append(dict(logs, step=1))
        callback.on_log(args, state, None, model=model, logs=logs)
        assert state.log_history[-1] == {**logs, "step": 1}
        evaluation = {"eval_loss": 1.0}
        callback.on_log(args, state, None, model=model, logs=evaluation)
        assert evaluation == {"eval_loss": 1.0}
    assert router_file._LOSS_SCALE[router_file._CPU] == 1 / pieces
    callback.on_train_end(args, state, None)
    assert router_file._LOSS_SCALE[router_file._CPU] == 1
    return logs


@over_ranks(2)
def test_live_callback_over_ranks_that_routers_do_not_know(rank, ranks):
    """As under DDP without groups: it logs this rank's metrics; with groups those of all."""
    sys.modules["transformers"] = types.SimpleNamespace(TrainerCallback=object)
    families._callback_class.cache_clear()
    callback = families.MoECallback()
    groups = ProcessGroups.from_mesh(mesh_of(dp=ranks)["dp"])
    config = MoEConfig(8, 4, 6, topk=2, load_balancing_type="aux_loss", aux_loss_coeff=0.1)
    for known in (None, groups):
        layer = MoELayer(config, known)
        torch.manual_seed(rank)
        layer(torch.randn(9, 8)).sum().backward()
        logs = {"loss": 1.0}
        state = types.SimpleNamespace(log_history=[{}])
        callback.on_log(None, state, None, model=layer, logs=logs)
        want = load_balancing_metrics(layer, reduce=known is not None)
        assert logs["max_violation"] == want["max_violation"].item()
        assert state.log_history[-1] == {key: logs[key] for key in logs if key != "loss"}


def test_live_callback_makes_microbatches_one_batch(monkeypatch):
    """Without the library: its TrainerCallback is an empty class. A layer that has not run is left
    out of the logged means."""
    monkeypatch.setitem(
        sys.modules, "transformers", types.SimpleNamespace(TrainerCallback=object))
    families._callback_class.cache_clear()
    callback = families.MoECallback()
    x, upstream = double(2, 4, T7, H6)
    results = []
    for pieces in (1, 2, 4):
        torch.manual_seed(1)
        config = dataclasses.replace(
            fam_config("qwen3_moe"), enable_expert_bias=True, bias_update="quantile",
            z_loss_coeff=0.3, load_balancing_type="seq_aux_loss", aux_loss_coeff=0.5)
        model = torch.nn.ModuleList([MoELayer(config), MoELayer(config)])
        logs = trained_by_callback(callback, pieces, model, x=x, upstream=upstream)
        assert list(logs) == ["loss", "seq_load_balancing_loss", "z_loss", "max_violation"]
        assert all(isinstance(value, float) and math.isfinite(value) for value in logs.values())
        assert model[0].router.expert_bias.any()
        results.append(model.state_dict())
    for other in results[1:]:
        for name, tensor in results[0].items():
            close(other[name].double(), tensor.double(), 1e-6)
    scaler = types.SimpleNamespace(get_scale=lambda: 512.0)
    args = types.SimpleNamespace(gradient_accumulation_steps=4)
    callback.on_step_begin(args, None, None, optimizer=types.SimpleNamespace(scaler=scaler))
    assert router_file._LOSS_SCALE[router_file._CPU] == 128
    callback.on_train_end(args, None, None)
    families._callback_class.cache_clear()


def test_live_blocks_of_a_model_on_several_ranks():
    """The groups go to every router, and each rank keeps its experts under the library's names.
    What ep and tp cannot share is refused, and so are experts of the library on a part."""
    two = OneOf(1, 2)
    groups = ProcessGroups(ep=two, tp_dp_cp=two)
    model = replaced(pg_collection=groups, enable_expert_bias=True)
    whole = same_model("qwen3_moe")
    assert all(router.pg_collection is groups for router in router_file._routers(model))
    assert len(dict(model.named_parameters())) == len(dict(whole.named_parameters()))
    for name, other in whole.named_parameters():
        same(model.get_parameter(name), other[E8 // 2:] if ".experts." in name else other)
    three = OneOf(0, 3)
    for wrong, phrase in [
            (dict(tp=two), "pg_collection has 2 ranks in tp; needs one"),
            (dict(ep=three, tp_dp_cp=three), "num_experts is 8; needs a multiple of the ep size")]:
        assert phrase in error(families.replace_blocks, same_model("qwen3_moe"),
                               pg_collection=ProcessGroups(**wrong))
    assert "are spread over ranks; needs a model of one process" in error(
        families.restore_blocks, model)
    model.set_experts_implementation("batched_mm")
    assert "RuntimeError: another implementation computes the experts" in error(
        model, random_ids())


def one_step(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of the texts; their loss is a sum over tokens, and has been backpropagated."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits.square().mean(-1) * mask).sum().backward()
    return logits


def check_gradients_over_ranks(model, names, whole, groups: ProcessGroups) -> None:
    """Those of the blocks with these names, and of all else, are this rank's part of the whole."""
    reduce_gradients(model)
    for (name, mine), other in zip(model.named_parameters(), whole.parameters()):
        owner = next((block for block in names if name.startswith(block + ".")), None)
        if owner is None:
            torch.distributed.all_reduce(mine.grad)
            close(mine.grad, other.grad, 1e-4)
        else:
            path = name.removeprefix(owner + ".")
            close(mine.grad, own_part(path, other.grad, groups), 1e-4)


@over_ranks(2)
def experts_over_ranks(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    ids = torch.randint(1, 64, (4, T7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    texts = slice(2 * rank, 2 * rank + 2)
    for case, layers, through in OVER_EP:
        whole = same_model(case, num_hidden_layers=layers)
        model = copy.deepcopy(whole)
        families.replace_blocks(whole)
        names = families.replace_blocks(model, pg_collection=groups)
        want = one_step(whole, ids, mask)[texts]
        got = one_step(through(model), ids[texts], mask[texts])
        close(got[mask[texts] == 1], want[mask[texts] == 1], 1e-5)

        check_gradients_over_ranks(model, names, whole, groups)
    # The example of docs/models.md, which saves. What is loaded is what was saved.
    os.chdir(folder)
    model = same_model("gpt_oss")
    mesh = mesh_of(ep=ranks)
    code = example("experts over ranks").replace("AdamW(model.parameters(), 1e-3)", SGD)
    exec(code, dict(torch=torch, model=model, mesh=mesh, batches=texts_of_rank(rank)))
    assert "give save_pretrained a state_dict=" in error(model.save_pretrained, "ours")
    exec(example("save over ranks"), dict(model=model, dist=torch.distributed))
    want = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters())
    dcp.load(sharding.sharded_state_dict(model, optimizer), checkpoint_id="shards")
    same([parameter.detach() for parameter in model.parameters()], want)
    given = copy.deepcopy(model.state_dict())
    for state in (given, {name: full(tensor) for name, tensor in given.items()}):
        filled(model, 0).load_state_dict(state)
        same([parameter.detach() for parameter in model.parameters()], want)


FIVE = ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_moe", "mixtral"]


@over_ranks(2)
def sharded_by_fsdp(rank, ranks):
    from torch.distributed.fsdp import fully_shard
    ids = torch.randint(1, 64, (4, T7))
    for case in FIVE:
        whole = same_model(case)
        whole_logits(whole, ids).square().sum().backward()
        for before in (True, False):
            model = same_model(case)
            if before:
                families.replace_blocks(model, enable_expert_bias=True)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh_of(dp=ranks))
            if not before:
                families.replace_blocks(model, enable_expert_bias=True)
            whole_logits(model, ids.chunk(ranks)[rank]).square().sum().backward()
            for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                close(ranks * full(mine.grad), other.grad, 1e-4)


def test_live_models_sharded_by_fsdp():
    """Before or after fully_shard: the gradients of the library's model in one process."""
    pytest.importorskip("transformers", reason="shards a model of transformers")
    sharded_by_fsdp()


@over_ranks(2)
def sharded_by_the_library(rank, ranks, folder):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    plans = {
        "tensor parallel": dict(tp_plan="auto"),
        "expert parallel": dict(distributed_config=DistributedConfig(
            enable_expert_parallel=True, tp_plan="auto"))}
    for case in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        whole = same_model(case)
        ids = random_ids()
        if rank == 0:
            whole.save_pretrained(folder / case)
        torch.distributed.barrier()
        want = whole_logits(whole, ids)
        want.square().sum().backward()
        for name, plan in plans.items():
            with about(case, name):
                model = AutoModelForCausalLM.from_pretrained(folder / case, **plan).train()
                families.replace_blocks(model)
                got = whole_logits(model, ids)
                close(got, want, 1e-5)
                got.square().sum().backward()
                counts = load_balancing_metrics(model)["tokens_per_expert"]
                assert (counts.sum(1) == 2 * T7 * 3).all()
                for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                    close(full(mine.grad), other.grad, 1e-4)


def test_live_models_sharded_by_the_library(tmp_path):
    """Its tensor parallelism and its expert parallelism: logits and gradients of one process."""
    pytest.importorskip("transformers", reason="shards a model of transformers")
    sharded_by_the_library(folder=tmp_path)


@over_ranks(4)
def experts_over_dp_and_ep(rank, ranks, folder):
    """A step on left-padded texts, one a rank, is that of one process on all four. What is saved on
    dp 2 × ep 2 is loaded on ep 4, saved there and loaded in one process."""
    import torch.distributed.checkpoint as dcp
    balance = dict(enable_expert_bias=True, load_balancing_type="global_aux_loss",
                   aux_loss_coeff=0.1)
    torch.manual_seed(3)
    ids = torch.randint(1, 64, (4, T7))
    mask = torch.ones_like(ids)
    for text, left in ((0, 3), (2, 5)):
        mask[text, :left] = 0
    groups = ProcessGroups.from_mesh(mesh_of(dp=2, ep=2))
    by_itself, _ = torch.distributed.new_subgroups(1)
    mine = slice(rank, rank + 1)
    for case in ("qwen3_moe", "deepseek_v3"):
        whole, model = same_model(case), same_model(case)
        families.replace_blocks(whole, pg_collection=ProcessGroups(tp_dp_cp=by_itself), **balance)
        names = families.replace_blocks(model, pg_collection=groups, **balance)
        want = one_step(whole, ids, mask)[mine]
        got = one_step(model, ids[mine], mask[mine])
        close(got[mask[mine] == 1], want[mask[mine] == 1], 1e-5)

        check_gradients_over_ranks(model, names, whole, groups)
        finish_step(model), finish_step(whole)
        same(*([router.expert_bias for router in router_file._routers(each)]
               for each in (model, whole)))

        other = filled(same_model(case), 0)
        families.replace_blocks(
            other, pg_collection=ProcessGroups.from_mesh(mesh_of(ep=ranks)), **balance)
        alone = filled(same_model(case), 0)
        families.replace_blocks(alone, **balance)
        for i, (source, target) in enumerate([(model, other), (other, alone)]):
            dcp.save(sharding.sharded_state_dict(source), checkpoint_id=f"{folder}/{case}{i}")
            dcp.load(sharding.sharded_state_dict(target), checkpoint_id=f"{folder}/{case}{i}")
        same(alone.state_dict(), whole.state_dict())


def test_live_experts_over_dp_and_ep(tmp_path):
    pytest.importorskip("transformers")
    experts_over_dp_and_ep(folder=str(tmp_path))


# family, layers, eager or compiled
OVER_EP = [
    ("qwen3_moe", 1, compiled),
    ("deepseek_v3", 2, compiled),
    ("gpt_oss", 1, compiled),
    ("qwen3_moe", 2, lambda model: model),
    ("deepseek_v3", 2, lambda model: model),
    ("gpt_oss", 2, lambda model: model),
    ("qwen2_moe", 2, lambda model: model),
    ("mixtral", 2, lambda model: model),
    ("llama4_text", 2, lambda model: model),
    ("dbrx", 2, lambda model: model)]


SGD = "SGD(model.parameters(), 1.0)"


def texts_of_rank(rank: int) -> list[dict[str, Tensor]]:
    """Two batches of two texts. No label is predicted from padding."""
    torch.manual_seed(7 + rank)
    batches = [padded_ids(left=0), padded_ids(left=0)]
    return [dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
            for ids, mask in batches]


def test_live_experts_over_two_ranks(tmp_path):
    """Each rank has half of the experts and texts of its own: logits and gradients of one process.
    What two ranks have trained and saved, loaded and saved by one process, is the library's model
    as one process trains it."""
    import torch.distributed.checkpoint as dcp
    pytest.importorskip("transformers", reason="compares with transformers")
    experts_over_ranks(folder=tmp_path)
    theirs = same_model("gpt_oss")
    optimizer = torch.optim.SGD(theirs.parameters(), 1.0)
    for batches in zip(texts_of_rank(0), texts_of_rank(1)):
        sum(theirs(**batch).loss for batch in batches).backward()
        optimizer.step(), optimizer.zero_grad()
    ours = whole_model("gpt_oss")
    families.replace_blocks(ours)
    dcp.load(families.sharded_state_dict(ours), checkpoint_id=f"{tmp_path}/shards")
    ours.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path).state_dict()
    for name, tensor in theirs.state_dict().items():
        close(again[name], tensor, 1e-4)
    same(type(theirs).from_pretrained(tmp_path / "saved").state_dict(), again)


def test_live_block_at_two_places_is_replaced_at_both():
    model = same_model("qwen3_moe")
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    assert families.replace_blocks(model) == ["model.layers.0.mlp"]
    assert layers[1].mlp.gate.moe_router is router_of(model)


def test_live_blocks_have_all_of_this_project():
    """Changes, a bias with its update, metrics, record and replay, a loss per sequence, jitter."""
    changes = dict(enable_expert_bias=True, bias_update="quantile", aux_loss_coeff=0.1,
                   load_balancing_type="seq_aux_loss")
    model = replaced(**changes)
    again = replaced(**changes)
    ids = random_ids()
    with record_routing(model) as record:
        logits = whole_logits(model, ids)
    with replay_routing(model, [record.indices[0].flip(0), record.indices[1]]):
        assert not torch.equal(whole_logits(model, ids), logits)
    with replay_routing(model, record.indices):
        same(whole_logits(model, ids), logits)
    logits.sum().backward()
    assert load_balancing_metrics(model)["tokens_per_expert"].sum(1).tolist() == [2 * T7 * 3] * 2
    update_expert_bias(model)
    assert router_of(model).expert_bias.abs().max() > 0
    again.load_state_dict(model.state_dict())
    same(router_of(again).expert_bias, router_of(model).expert_bias)
    jittered = replaced(input_jitter_eps=0.5).train()
    assert not torch.equal(*(whole_logits(jittered, ids) for _ in range(2)))


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_live_losses_know_the_sequences(case):
    """[B, S] is known to the model alone, since most gates get [T, H]; and the bounds of packed
    texts. The losses are those of each text by itself."""
    changes = dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.1, router_bias=True)
    ids = random_ids()

    def grads_of(*forwards):
        model = same_model(case).double()
        families.replace_blocks(model, **changes)
        for forward in forwards:
            (whole_output(model, **forward).logits.sum() * 0).backward()
        return [router.bias.grad for router in router_file._routers(model)]
    want = grads_of(*[dict(ids=text[None]) for text in ids])
    got = grads_of(dict(ids=ids))
    assert want[0].abs().max() > 1e-5
    close(got, [grad / 2 for grad in want], 1e-9)
    bounds = torch.tensor([0, T7, 2 * T7], dtype=torch.int32)
    packed = dict(ids=ids.view(1, -1), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
                  position_ids=torch.arange(T7).repeat(2)[None])
    close(grads_of(packed)[0], got[0], 1e-9)
    assert not torch.allclose(grads_of(dict(ids=ids.view(1, -1)))[0], got[0], rtol=1e-3)


@pytest.mark.parametrize("shapes", [
    [(3, T7)], pytest.param([(3, T7), (2, 9), (4, T7)], marks=slow)])
def test_live_block_is_one_graph(shapes):
    block = replaced(enable_expert_bias=True).model.layers[0].mlp
    graph = compiled(block)
    for shape in shapes:
        x = torch.randn(*shape, 32)
        close(graph(x), block(x), 1e-5)


def test_live_refusals_change_nothing():
    model, misshapen, meta, dense, other, odd = (same_model("deepseek_v3") for _ in range(6))
    before = {name: id(module) for name, module in model.named_modules()}
    gate = misshapen.model.layers[1].mlp.gate
    gate.weight = torch.nn.Parameter(torch.zeros(4, 32))
    meta.model.layers[1].to("meta")
    dense.model.layers = dense.model.layers[:1]
    other.config.model_type = "qwen3"
    odd.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    replace = families.replace_blocks
    none = "model has no deepseek_v3 block to replace; "
    check_errors([
        (lambda: replace(model, topk=9), "topk = 9, num_experts = 8: a token cannot have more"),
        *[(lambda field=field: replace(model, **{field: value}),
           f"changes has {field}, which the library's block decides itself; needs fields of the "
           f"router. For another layer see from_hf")
          for field, value in dict(params_dtype=torch.bfloat16, batch_first=False,
                                   activation="relu2", shared_expert_overlap=True).items()],
        (lambda: replace(model, num_experts=16),
         "model.layers.1.mlp.gate.weight is [8, 32]; needs [16, 32]"),
        (lambda: replace(misshapen), "model.layers.1.mlp.gate.weight is [4, 32]; needs [8, 32]"),
        (lambda: replace(meta), "model has tensors on the meta device; needs weights: load it"),
        (lambda: replace(dense), f"{none}replaced already: none"),
        (lambda: replace(other), "model_type is 'qwen3'; nearest: qwen3_moe; known: mixtral,"),
        (lambda: families.restore_blocks(model), "model has no block that replace_blocks has")])
    check_errors(kind=TypeError, table=[
        (lambda: replace(model, top_k=2), "got an unexpected keyword argument 'top_k'"),
        (lambda: replace("model"), "model is a str; needs a model of the Hugging Face library")])
    check_errors(kind=NotImplementedError, table=[
        (lambda: replace(odd), "act_fn torch.nn.modules.activation.Tanh cannot be expressed")])
    for each in (model, misshapen, odd):
        assert {name: id(module) for name, module in each.named_modules()}.keys() == before.keys()
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert model.config._experts_implementation == "eager"
    replace(model)
    check_errors([(lambda: replace(model), f"{none}replaced already: model.layers.1.mlp")])
    model.model.layers[1].mlp.gate.forward = None
    assert "mlp.gate has another forward than that of" in error(families.restore_blocks, model)


def test_live_what_a_block_does_itself_is_not_refused():
    """The average of routed and shared experts, which a layer cannot express."""
    theirs = same_model("cohere2_moe", shared_expert_combination_strategy="average")
    ours = copy.deepcopy(theirs)
    assert "cannot be expressed" in error(families.config_from_hf, theirs.config)
    families.replace_blocks(ours)
    ids = random_ids()
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-6)


def test_live_experts_by_another_implementation():
    """The library's own, chosen afterwards, do not know the index of what is unrouted."""
    ids, mask = padded_ids(left=3)
    for case in ("qwen3_moe", "deepseek_v3"):
        ours = replaced(case, capacity_factor=0.5).eval()
        want = ours(ids, attention_mask=mask).logits
        for implementation in ("eager", "batched_mm"):
            ours.set_experts_implementation(implementation)
            got = ours(ids, attention_mask=mask).logits
            close(got[mask == 1], want[mask == 1], 1e-5)
        families.restore_blocks(ours)
        assert ours.config._experts_implementation == "batched_mm"


def test_live_register_experts_needs_the_library(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="library: pip install 'transformers>=5'"):
        families.register_experts()


def experts_classes() -> dict:
    """Class that uses the experts interface of the library -> its file. Imports nothing."""
    found = importlib.util.find_spec("transformers")
    if found is None:
        return {}
    files = Path(found.origin).parent.glob("models/*/modeling_*.py")
    decorated = r"^@use_experts_implementation.*?\nclass (\w+)"
    return {name: file for file in sorted(files)
            for name in re.findall(decorated, file.read_text(), re.M)}


def library_experts(name: str, file: Path) -> torch.nn.Module:
    """An experts module with random weights, of the first config that it can be made of. Those of
    vision encoders come last: they have other activations."""
    path = f"transformers.models.{file.parent.name}.{file.stem}"
    modeling = importlib.import_module(path)
    configs = importlib.import_module(path.replace("modeling_", "configuration_"))
    sizes = dict(hidden_size=8, moe_intermediate_size=6, intermediate_size=6, num_experts=4,
                 num_local_experts=4, n_routed_experts=4, moe_num_experts=4)
    classes = [c for c in vars(configs).values() if isinstance(c, type)]
    for config_class in sorted(classes, key=lambda c: not hasattr(c, "moe_intermediate_size")):
        with contextlib.suppress(Exception):                 # of a model's other parts
            config = config_class()
            if getattr(config, "moe_latent_size", None):
                config.moe_latent_size = 8
            for field, size in sizes.items():
                with contextlib.suppress(Exception):
                    setattr(config, field, size)
            config._experts_implementation = "eager"
            size = [6] if name.startswith("Ernie4_5_VL") else []     # one of two in its config
            experts = getattr(modeling, name)(config, *size)
            return randomised(experts)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module


EXPERTS_CLASSES = experts_classes()
EXPERTS_REFUSED = {
    "MuseSparkExperts": "has_post_expert_norm",
}


@some_quick(EXPERTS_CLASSES, *(
    "BeamExperts DeepseekV4Experts GptOssExperts Inkling2Experts MiniMaxM3VLExperts "
    "NemotronHExperts Qwen3MoeExperts MuseSparkExperts").split())
def test_live_experts_match_the_library(case):
    """Output and gradients with an index that goes nowhere, or a refusal. Inputs are so large that
    clamps act. Quick: one class of each activation and layout."""
    families.register_experts()
    experts = library_experts(case, EXPERTS_CLASSES[case]).double()
    E = experts.num_experts
    H = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = (8 * double(T7, H)).requires_grad_()
    probs = double(T7, 2, requires_grad=True)
    indices = torch.rand(T7, E).topk(2).indices
    indices[2, 1], indices[3] = E, E + 5
    nowhere = indices >= E                                   # not every loop of theirs takes E
    want = experts(x, indices.masked_fill(nowhere, 0), probs.masked_fill(nowhere, 0.0))
    experts.config._experts_implementation = "moe_py"
    if case in EXPERTS_REFUSED:
        refusal = f"{case}: {EXPERTS_REFUSED[case]} cannot be expressed by kernels.expert_mlp; try "
        with pytest.raises(NotImplementedError, match=re.escape(refusal)):
            experts(x, indices, probs)
        return
    got = experts(x, indices, probs)
    close(got, want, 2e-5)                                   # some of theirs compute in fp32
    close_grads(got, want, [x, probs, *experts.parameters()], tol=2e-4)


def test_live_experts_refused_by_class():
    """An overridden gate is recognised by the class that has it: a subclass of a known one is
    unknown. The test above has seen all classes."""
    pytest.importorskip("transformers", reason="compares with transformers")
    assert len(EXPERTS_CLASSES) >= 65 and set(EXPERTS_REFUSED) < set(EXPERTS_CLASSES)
    from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss
    from transformers.models.nemotron_h import NemotronHConfig, modeling_nemotron_h
    families.register_experts()
    taken = "an implementation of the library; needs another name"
    check_errors([(functools.partial(families.register_experts, name), f"name is {name!r}, {taken}")
                  for name in ("eager", "grouped_mm")])

    class GptOssExperts(modeling_gpt_oss.GptOssExperts):
        def _apply_gate(self, gate_up):
            return gate_up[..., ::2]
    sizes = dict(hidden_size=8, intermediate_size=6, moe_intermediate_size=6, n_routed_experts=4)
    gpt_oss = GptOssExperts(GptOssConfig(**sizes, num_local_experts=4))
    gated = modeling_nemotron_h.NemotronHExperts(NemotronHConfig(**sizes, mlp_hidden_act="silu"))
    gate = f"{__name__}.{GptOssExperts._apply_gate.__qualname__}"
    x, indices, probs = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for experts, why in [(gpt_oss, f"GptOssExperts: the overridden _apply_gate ({gate}) cannot be"),
                         (gated, "NemotronHExperts: has_gate = False with swiglu cannot be")]:
        experts.config._experts_implementation = "moe_py"
        with torch.no_grad(), pytest.raises(NotImplementedError, match=re.escape(why)):
            experts(x, indices, probs)


def test_live_experts_with_relu():
    """Experts without a gate, with the library's ReLU: output and gradients."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.nemotron_h import NemotronHConfig, modeling_nemotron_h
    config = NemotronHConfig(
        hidden_size=8, moe_intermediate_size=6, n_routed_experts=4, mlp_hidden_act="relu")
    experts = randomised(modeling_nemotron_h.NemotronHExperts(config)).double()
    x = double(T7, 8, requires_grad=True)
    probs = double(T7, 2, requires_grad=True)
    indices = torch.rand(T7, 4).topk(2).indices
    config._experts_implementation = "eager"
    want = experts(x, indices, probs)
    config._experts_implementation = families.register_experts()
    got = experts(x, indices, probs)
    close(got, want, 1e-8)
    close_grads(got, want, [x, probs, *experts.parameters()], tol=1e-8)


def qwen3_experts(H: int, F: int, E: int) -> torch.nn.Module:
    """With register_experts()."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E)
    config._experts_implementation = families.register_experts()
    return randomised(modeling_qwen3_moe.Qwen3MoeExperts(config))


def test_live_experts_in_the_weights_dtype():
    """fp32 tokens, as a norm gives them under autocast, and bf16 weights: products in bf16, an
    output in fp32."""
    experts = qwen3_experts(H=8, F=6, E=4).bfloat16()
    x, indices, probs = torch.randn(T7, 8), torch.randint(4, (T7, 1)), torch.rand(T7, 1)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x, indices, probs)
    assert got.dtype == torch.float32
    same(got, experts(x.bfloat16(), indices, probs).float())


def test_live_experts_keep_little_for_the_backward():
    """At Qwen3-MoE's proportions: T·H + N·3F in eager mode, within 5%; the library's grouped_mm
    keeps more than twice that."""
    T, H, F, E, K = 256, 128, 48, 16, 4
    experts = qwen3_experts(H, F, E)
    kept = {}
    x = torch.randn(T, H, requires_grad=True)
    probs = torch.rand(T, K, requires_grad=True)
    indices = torch.rand(T, E).topk(K).indices
    for name in ("moe_py", "grouped_mm"):
        experts.config._experts_implementation = name
        kept[name] = saved_bytes(lambda: experts(x, indices, probs), exclude=experts.parameters())
    small = T * K * (3 * 8 + 4) + E * 4
    assert kept["moe_py"] - small <= 1.05 * 4 * (T * H + T * K * 3 * F)
    assert 2 * kept["moe_py"] <= kept["grouped_mm"], kept


LAYOUTS = {                                           # fc1, fc2 and the bias of fc1
    "in order": ("e p f h", "e h f", "e p f"), "transposed": ("e h p f", "e f h", "e p f"),
    "interleaved": ("e f p h", "e h f", "e f p"),
    "transposed and interleaved": ("e h f p", "e f h", "e f p")}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("through", [lambda f: f, pytest.param(compiled, marks=slow)])
def test_live_experts_take_weights_in_any_layout(how, bias, through):
    """Views: the same output and gradients as of weights in order, and no copy of a weight."""
    E, T, K, size = 4, 7, 3, dict(e=4, p=2, f=5, h=6)
    options = dict(clamp_value=0.5) if bias else {}
    in_file = [*LAYOUTS[how], "e h"]
    in_order = [*LAYOUTS["in order"], "e h"]
    shapes = [[size[axis] for axis in axes.split()] for axes in in_file]
    held = [double(shape, requires_grad=True) for shape in shapes[:4 if bias else 2]]
    x = double(T, size["h"], requires_grad=True)
    probs = double(T, K, requires_grad=True)
    plan = plan_permutation(torch.rand(T, E + 1).topk(K).indices, E)

    def views(held):
        return [rearrange(t, f"{a} -> {b}") for t, a, b in zip(held, in_file, in_order)]

    def ours(x, probs, *held):
        return expert_mlp(x, probs, plan, *views(held), **options)

    copies = [view.contiguous() for view in views(held)]
    function = through(ours)
    got = function(x, probs, *held)
    want = expert_mlp(x, probs, plan, *copies, **options)
    close(got, want)
    close_grads(got, want, [x, probs, *held], tol=1e-9)
    kept = saved_bytes(lambda: function(x, probs, *held), exclude=held)
    in_order = saved_bytes(lambda: expert_mlp(x, probs, plan, *copies), exclude=copies)
    assert kept <= in_order


@pytest.mark.parametrize("how", LAYOUTS)
def test_live_experts_take_few_tokens_in_any_layout(how):
    """Without gradients, in a graph, the weights are read where they are."""
    E, T, K, size = 16, 2, 2, dict(e=16, p=2, f=5, h=6)
    held = [double([size[axis] for axis in axes.split()]) for axes in [*LAYOUTS[how], "e h"]]
    weights = [rearrange(t, f"{a} -> {b}") for t, a, b in
               zip(held, [*LAYOUTS[how], "e h"], [*LAYOUTS["in order"], "e h"])]
    x, probs, indices = double(T, size["h"]), double(T, K), torch.tensor([[3, 15], [16, 0]])

    def ours(indices):
        plan = plan_permutation(indices, E)
        return expert_mlp(x, probs, plan, *weights, clamp_value=0.5, indices=indices)

    function = compiled(ours, dynamic=False)
    with torch.no_grad():
        close(function(indices), ours(indices))
        with torch.profiler.profile() as profile:
            function(indices)
    assert not [e.key for e in profile.key_averages() if e.key.startswith("moe_")]


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


def three_steps(model, ids: Tensor) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        logits = whole_logits(model, ids)
        targets = ids[:, 1:].flatten() % logits.shape[-1]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@some_quick(IN_THE_LIBRARY, "gpt_oss", "deepseek_v3", "inkling2_text", "llama4_text", "laguna")
def test_live_models_of_the_library(case, tmp_path):
    """Logits, generate, the block's own output, router logits, saving, loading, training,
    checkpoints, bf16."""
    theirs = whole_model(case).eval()
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    block_name = PUBLISHED[case].block.split()[1]
    names = [name for name, module in theirs.named_modules()
             if type(module).__name__ == block_name]
    assert names and families.replace_blocks(ours) == names
    with torch.no_grad():
        close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)
        x = torch.randn(2, T7, 32)
        options = {"input_ids": ids} if case == "deepseek_v4" else {}
        outputs = [model.get_submodule(names[0])(x.clone(), **options) for model in (ours, theirs)]
        close(*outputs, 1e-4)
        recorded = [whole_output(model, ids, output_router_logits=True).router_logits
                    for model in (ours, theirs)]
        again = 2 if case == "inkling2_loop_text" else 0         # its one looped layer runs 3 times
        assert len(recorded[0]) == len(recorded[1]) == len(names) + again
        close(*recorded, 1e-4)
    same(ours.state_dict(), theirs.state_dict())
    if hasattr(theirs, "generate"):
        same(*(model.generate(ids, max_new_tokens=4, do_sample=False) for model in (ours, theirs)))

    ours.save_pretrained(tmp_path)
    again, found = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    same(again.state_dict(), theirs.state_dict())
    close(whole_logits(again.eval(), ids), whole_logits(theirs.eval(), ids), 1e-4)

    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable()
    losses = three_steps(theirs, ids)
    assert losses == pytest.approx(three_steps(ours, ids), abs=1e-3)
    assert losses == pytest.approx(three_steps(checkpointed, ids), abs=1e-3)
    if not case.startswith("inkling2"):               # which mixes dtypes in bf16 itself
        halves = ours.to(torch.bfloat16)
        assert whole_logits(halves, ids).isfinite().all()
        assert {p.dtype for p in halves.parameters()} - {torch.float32} == {torch.bfloat16}


class OneBlock(torch.nn.Module):
    """A model in a low dtype with one MoE block, in layer 3. As the library loads it: a router that
    it keeps in fp32 is fp32, and so is a bias that only chooses."""

    def __init__(self, case: str, dtype=torch.bfloat16, **fields):
        super().__init__()
        self.dtype = dtype
        self.config = library_config(case, **fields, dtype=dtype)
        block = library_block(case, self.config, layer_idx=3)
        modeling = importlib.import_module(type(block).__module__)
        kept = [name for model in vars(modeling).values()
                for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
        kept.append("gate.wg")                       # Hunyuan's is made in fp32
        router = next(iter(families.TYPES[family(case)].layouts[-1]))
        with torch.no_grad():
            block.get_parameter(router).mul_(0.2)    # sigmoid scores of large logits are all 1
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                if only_chooses(name):
                    tensor.mul_(0.03)                # so that it does not choose alone
                elif not any(part in f"mlp.{name}" for part in kept):
                    tensor.data = tensor.data.to(dtype)
        layers = [torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity(),
                  torch.nn.ModuleDict({"mlp": block})]
        self.layers = torch.nn.ModuleList(layers)

    @property
    def block(self) -> torch.nn.Module:
        return self.layers[3]["mlp"]


def wide_fields(case: str) -> dict:
    """The fields of a block with 128 experts, 8 of them a token, from 8 groups, and H = 64."""
    fields = library_fields(case)
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts",
                           "moe_num_experts"), 128)
    sizes |= dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
                            "moe_top_k"), 8 if case != "llama4_text" else 1)
    sizes |= dict(hidden_size=64, d_model=64, num_hidden_layers=4, mlp_layer_types=["moe"] * 4)
    if fields.get("n_group") == 4:
        sizes |= dict(n_group=8, topk_group=4)
    if case == "dbrx":
        fields["ffn_config"] = {name: sizes.get(name, value)
                                for name, value in fields["ffn_config"].items()}
    return {name: sizes.get(name, value) for name, value in fields.items()}


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


# Not to the bit: how far, at most, in units of the last place of the weights' dtype. The first
# three divide a softmax over all by its sum over the chosen: K + 2 roundings in fp32, of which a
# softmax over the chosen has K + 1. Cohere2 rounds its sigmoid scores,
# their sum and the quotient, where the layer rounds once; it chooses by its logits. In gpt-oss a
# logit is summed up in another order on some CPUs, and one in ten thousand rounds the other way:
# below 8 by 2^-5, which moves a prob by twice that share, or 16 units of 2^-8.
UNITS = dict(mixtral=19, minimax=19, hunyuan_v1_moe=19, cohere2_moe=4, gpt_oss=16)


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_router_in_bf16_chooses_as_the_librarys_gate(case):
    """For all of 4,096 tokens. Weights to the bit, when they are summed in the library's order,
    which does not sort the chosen; but for those in UNITS."""
    torch.manual_seed(3)
    model = OneBlock(case, **wide_fields(case))
    x = torch.randn(2, 2048, 64).bfloat16()
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, model.block, x.clone())
        families.replace_blocks(model)
        router = router_of(model)
        probs, chosen = router.route(x, topk_indices=indices)
        assert torch.equal(chosen, indices)
        assert torch.equal(router.route(x)[1].sort(1).values, indices.sort(1).values)
    assert probs.dtype == weights.dtype and (probs > 0).all()
    integers = torch.int32 if probs.dtype == torch.float32 else torch.int16
    units = (probs.view(integers).long() - weights.view(integers).long()).abs()
    assert units.max() <= UNITS.get(case, 0)
    assert case != "gpt_oss" or (units > 0).float().mean() < 1e-3


@some_quick(IN_THE_LIBRARY, "gpt_oss", "lfm2_moe", "deepseek_v4", "qwen3_moe")
def test_live_router_in_bf16_chooses_the_same_in_a_graph(case):
    """As in eager mode, in the same order, and so as the library's gate: a kernel of Inductor's
    rounds nothing between its steps, and rounded logits and scores have ties."""
    torch.manual_seed(3)
    model = OneBlock(case, **wide_fields(case))
    x = torch.randn(2, 2048, 64).bfloat16()
    with torch.no_grad():
        _, indices = gate_of_the_library(case, model.block, x.clone())
        families.replace_blocks(model)
        router = router_of(model)
        chosen = compiled(router.route, backend="inductor")(x)[1]
        assert torch.equal(chosen, router.route(x)[1])
    assert torch.equal(chosen.sort(1).values, indices.sort(1).values)


def padded_ids(left: int, S: int = T7) -> tuple[Tensor, Tensor]:
    """Two texts of S tokens and their attention_mask: the first has `left` tokens of padding on its
    left, the second one on its right."""
    ids = torch.randint(1, 64, (2, S))
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    mask[1, -1] = 0
    return ids, mask


@contextlib.contextmanager
def tokens_seen(model):
    """The tokens [B, S] that the first block routes, forward by forward, as ones in a list."""
    gate = next(module for module in model.modules() if "moe_router" in module._modules)
    router = gate.moe_router
    seen = []

    def note(gate, args, output):
        routed = output[2] < router.config.num_experts
        tokens = gate.moe_router.batch.texts.tokens
        seen.append(routed.all(-1).view(len(tokens), -1).long())
    hook = gate.register_forward_hook(note)
    yield seen
    hook.remove()



PADDED = pytest.mark.parametrize("case", [
    "gpt_oss", *(pytest.param(case, marks=slow) for case in ("deepseek_v3", "qwen3_next"))])


@PADDED
def test_live_padding_is_unrouted(case):
    """In whatever way the mask is given; others are ignored. The tokens' logits stay the same."""
    theirs = whole_model(case).eval()
    ours, off = copy.deepcopy(theirs), copy.deepcopy(theirs)
    families.replace_blocks(ours)
    families.replace_blocks(off, padding_mask=False)
    ids, mask = padded_ids(left=3)
    with torch.no_grad(), tokens_seen(ours) as seen, tokens_seen(off) as all_seen:
        logits, plain = [model(ids, attention_mask=mask).logits for model in (ours, off)]
        embeds = ours.get_input_embeddings()(ids)
        ours(ids, mask)
        ours(ids, mask.bool())
        ours(ids, attention_mask=mask.float())
        ours(inputs_embeds=embeds, attention_mask=mask)
        copy.deepcopy(ours.model)(ids, attention_mask=mask)
        ours.model(ids, mask)
        ours(ids[:1], attention_mask=mask[:1])
        cached = ours(ids[:, :4], attention_mask=mask[:, :4]).past_key_values
        end = ours(ids[:, 4:], attention_mask=mask, past_key_values=cached).logits
    same(seen, [mask] * 7 + [mask[:1], mask[:, :4], mask[:, 4:]])
    same(all_seen, [torch.ones_like(mask)])
    want = theirs(ids, attention_mask=mask).logits
    valid = mask.bool()
    for got in (logits, plain):
        close(got[valid], want[valid], 1e-4)
    close(end[valid[:, 4:]], want[:, 4:][valid[:, 4:]], 1e-4)

    # After a forward, and after one that failed, no mask is left.
    everything = torch.ones_like(mask)
    causal = torch.ones(2, 1, T7, T7, dtype=torch.bool).tril()
    with torch.no_grad(), tokens_seen(ours) as seen:
        error(ours, ids, attention_mask=mask[:, :4])
        seen.clear()
        ours(ids)
        ours(ids, attention_mask=causal)
    same(seen, [everything] * 2)


@PADDED
def test_live_padding_in_generate(case):
    """On the left, with a cache: the prompt's padding is unrouted; what is written is routed. With
    a static cache the library gives the model a 4-D mask, which is ignored."""
    theirs = whole_model(case).eval()
    ours = copy.deepcopy(theirs)
    families.replace_blocks(ours)
    ids = torch.randint(1, 64, (2, T7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    written = F.pad(mask, (0, 2), value=1)
    for options in (dict(), dict(use_cache=False), dict(prefill_chunk_size=3),
                    dict(cache_implementation="static")):
        options |= dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
        with tokens_seen(ours) as seen:
            got = ours.generate(ids, **options)
        same(got, theirs.generate(ids, **options))
        if "use_cache" in options:
            same(seen[-1], written)
        elif "cache_implementation" in options:
            same(torch.cat(seen, 1), torch.ones_like(written))
        else:
            same(torch.cat(seen, 1), written)


@pytest.mark.parametrize("reentrant", [False, True])
def test_live_padding_under_checkpoints(reentrant):
    """The recomputation of a forward has the mask of that forward, also after others: without a
    mask, of another padding, of a copy. Tokens alone are counted, once."""
    plain = whole_model("qwen3_moe").train()
    families.replace_blocks(plain, enable_expert_bias=True)
    texts = [padded_ids(left=3), padded_ids(left=5), (random_ids(), None)]
    results = []
    for model in (plain, copy.deepcopy(plain)):
        if results:
            options = dict(use_reentrant=reentrant)
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        losses = []
        for ids, mask in texts:
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            valid = torch.ones_like(ids) if mask is None else mask
            losses.append((logits.square().mean(-1) * valid).sum())
        copy.deepcopy(model)(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        for i in (1, 0, 2):
            losses[i].backward()
        results.append([parameter.grad for parameter in model.parameters()])
        for router in router_file._routers(model):
            tokens = 2 * 3 * T7 - (3 + 1) - (5 + 1)
            assert router.local_tokens_per_expert.sum() == tokens * router.config.topk
    same(*results)


def test_live_padding_is_not_lost_in_silence():
    """A checkpoint around a decoder layer that is not the library's, by masks and without."""
    model = whole_model("qwen3_moe").train()
    families.replace_blocks(model)
    ids, mask = padded_ids(left=3)
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model(ids, use_cache=False).logits.sum().backward()
    loss = model(ids, attention_mask=mask, use_cache=False).logits.sum()
    text = error(loss.backward)
    assert text.startswith("RuntimeError: a checkpoint that is not the library's recomputes")


@pytest.mark.parametrize("how", [
    "whole", *(pytest.param(how, marks=slow) for how in ("checkpoints", "layers"))])
def test_live_padding_in_a_graph(how):
    """One graph for every length and padding: of the model, or of a layer."""
    eager = whole_model("qwen3_moe", num_hidden_layers=1).train()
    families.replace_blocks(eager, enable_expert_bias=True)
    model = copy.deepcopy(eager)
    if how == "checkpoints":
        model.activation_checkpointing_enable()
        model.eval()(random_ids(), use_cache=False)          # the checkpoints get the masks here
        model.train()
    function = compiled(model, dynamic=True)
    if how == "layers":
        function = model
        model.model.layers[0].compile(fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset(), counters.clear()
    for S, left in [(7, 3), (9, 5), (12, 1), (6, 2)]:
        ids, mask = padded_ids(left, S)
        valid = mask.bool()
        want = one_step(eager, ids, mask)[valid]
        close(one_step(function, ids, mask)[valid], want, 1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    for got, want in zip(model.parameters(), eager.parameters()):
        close(got.grad, want.grad, 1e-5)
    routers = [router_file._routers(each)[0] for each in (model, eager)]
    same(*(router.local_tokens_per_expert for router in routers))
    tokens = 2 * (7 + 9 + 12 + 6) - (3 + 5 + 1 + 2) - 4
    assert routers[0].local_tokens_per_expert.sum() == tokens * 3


@pytest.mark.parametrize("how", ["experts", "blocks"])
def test_live_few_tokens_in_a_graph(how):
    """Without gradients: logits of the library, and neither a plan nor a grouped product."""
    model = whole_model("qwen3_moe", num_hidden_layers=1).eval()
    ids = torch.tensor([[7]])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        if how == "experts":
            model.set_experts_implementation(families.register_experts())
        else:
            families.replace_blocks(model)
        function = compiled(model, dynamic=False)
        close(function(ids, use_cache=False).logits, want, 1e-5)
        with torch.profiler.profile() as profile:
            function(ids, use_cache=False)
    ours = {e.key for e in profile.key_averages() if e.key.startswith("moe_")}
    assert ours <= {"moe_kernels::product_in"}


def test_live_padding_in_the_trainer(tmp_path):
    """Texts of other lengths, padded by the library's collator: tokens alone are counted."""
    transformers = pytest.importorskip("transformers", reason="trains a model of transformers")
    pytest.importorskip("accelerate", reason="the library's Trainer needs accelerate")
    model = whole_model("qwen3_moe")
    families.replace_blocks(model, enable_expert_bias=True)
    lengths = [3, 9, 5, 12]
    data = [dict(input_ids=torch.randint(1, 64, (n,))) for n in lengths]

    def collate(texts):
        texts = [text["input_ids"] for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=ids)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_checkpointing=True)
    transformers.Trainer(model, args, train_dataset=data, data_collator=collate).train()
    for router in router_file._routers(model):
        assert router.local_tokens_per_expert.sum() == sum(lengths) * router.config.topk


def trainer_of(model, folder, *callbacks, **options):
    """The library's Trainer on twenty-four texts, by plain SGD."""
    transformers = pytest.importorskip("transformers", reason="trains a model of transformers")
    pytest.importorskip("accelerate", reason="the library's Trainer needs accelerate")
    torch.manual_seed(1)
    data = [dict(input_ids=text, labels=text) for text in torch.randint(64, (24, 12))]
    options = dict(per_device_train_batch_size=8, save_strategy="no") | options
    args = transformers.TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, report_to=[], optim="sgd", learning_rate=0.5,
        lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, **options)
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[*callbacks])
    trainer.callback_handler.callbacks.insert(0, families.MoECallback())     # as the README says
    assert isinstance(trainer.callback_handler.callbacks[0], transformers.TrainerCallback)
    return trainer


def trainer_steps(pieces: int, folder, **changes):
    """Three steps of the library's Trainer on eight texts a step, in `pieces` microbatches."""
    transformers = pytest.importorskip("transformers", reason="trains a model of transformers")
    model = replaced(**changes)
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            seen.append(dict(logs))
    trainer = trainer_of(model, folder, Reporter(), per_device_train_batch_size=8 // pieces,
                         gradient_accumulation_steps=pieces)
    trainer.train()
    return model.state_dict(), trainer.state.log_history, seen


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_live_trainer_resumes(case, cut, tmp_path):
    """Two steps, a checkpoint, whole or cut into files, and the third: as three steps."""
    changes = {} if case == "deepseek_v3" else dict(enable_expert_bias=True)
    whole = replaced(case, **changes)
    trainer_of(whole, tmp_path, save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    if cut:
        resumed = replaced(case, **changes)
        trainer = trainer_of(resumed, tmp_path)
        trainer._load_from_checkpoint(str(folder))
        (folder / "model.safetensors").unlink()
        resumed.save_pretrained(folder, max_shard_size="24KB")
        assert len(list(folder.glob("model-*"))) >= 3
    resumed = replaced(case, **changes)
    trainer_of(resumed, tmp_path).train(resume_from_checkpoint=str(folder))
    same(resumed.state_dict(), whole.state_dict())


def test_live_trainer_of_the_library(tmp_path):
    """Four microbatches of two texts, or one of eight: the same routers, biases and losses."""
    families._callback_class.cache_clear()
    changes = dict(
        enable_expert_bias=True, bias_update="quantile", z_loss_coeff=0.3,
        load_balancing_type="seq_aux_loss", aux_loss_coeff=0.5)
    (one, log, seen), (four, *_) = [trainer_steps(n, tmp_path, **changes) for n in (1, 4)]
    for name, tensor in one.items():
        close(four[name].double(), tensor.double(), 1e-4)
    assert router_file._LOSS_SCALE[router_file._CPU] == 1
    for entry, logged in zip(log[:3], seen):
        assert {"loss", "seq_load_balancing_loss", "z_loss", "max_violation"} <= set(entry)
        assert entry == {**logged, "step": entry["step"]}
    assert "max_violation" not in log[-1]


def test_live_lora_by_peft():
    """Replaced blocks, and register_experts, under PEFT: the library's modules, loss and
    gradients."""
    peft = pytest.importorskip("peft", reason="adapts a model with peft")
    ids = random_ids()
    experts = dict(target_modules=[], target_parameters=[
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for case, options in (("qwen3_moe", experts), ("qwen2_moe", dict(target_modules="all-linear"))):
        want = None
        for how in ("the library's", "registered", "replaced"):
            model = same_model(case)
            if how == "registered":
                model.set_experts_implementation(families.register_experts())
            elif how == "replaced":
                families.replace_blocks(model)
            torch.manual_seed(2)
            config = peft.LoraConfig(r=3, init_lora_weights=False, **options)
            model = peft.get_peft_model(model, config)
            loss = model(ids, labels=ids).loss
            loss.backward()
            got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            want = want or (loss, got)
            assert len(got) >= 4 * 2 and got.keys() == want[1].keys()
            close([loss, *got.values()], [want[0], *want[1].values()], 1e-5)
    model = peft.get_peft_model(replaced(enable_expert_bias=True), peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["gate"]))
    ids, mask = padded_ids(left=3)
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    counts = load_balancing_metrics(model)["tokens_per_expert"].sum(1)
    assert counts.tolist() == [0, (2 * T7 - 4) * 3] * 2
    violations = load_balancing_metrics(model)["max_violation"]
    assert violations.isnan().tolist() == [True, False] * 2  # of the originals, which do not run


@pytest.mark.parametrize("case, module", [("qwen3_moe", "moe_router"), ("deepseek_v3", "gate")])
def test_live_lora_saves_the_expert_bias(case, module, tmp_path):
    """With the modules that docs/recipes.md names. A reloaded adapter gives the same logits."""
    peft = pytest.importorskip("peft", reason="adapts a model with peft")
    changes = {} if case == "deepseek_v3" else dict(enable_expert_bias=True)
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=[module])
    model = peft.get_peft_model(replaced(case, **changes), config)
    ids = random_ids()
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        finish_step(model)
    want = whole_logits(model.eval(), ids)
    assert not torch.equal(whole_logits(replaced(case, **changes).eval(), ids), want)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(replaced(case, **changes), tmp_path)
    same(whole_logits(again.eval(), ids), want)


@pytest.mark.parametrize("case", FIVE)
def test_live_models_are_offloaded_and_quantised(case, tmp_path):
    """What works by the library's names: accelerate's hooks, put on before or after; dynamic
    quantization takes the layers that it takes in the library's model."""
    accelerate = pytest.importorskip("accelerate", reason="offloads a model with accelerate")
    ids = random_ids()

    def logits(model):
        with torch.no_grad():
            return whole_logits(model, ids)

    def guest():
        return replaced(case, enable_expert_bias=True).eval()
    want = logits(guest())
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
              "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    options = dict(main_device="cpu", force_hooks=True)
    same(logits(accelerate.cpu_offload(guest(), "cpu")), want)
    same(logits(accelerate.disk_offload(guest(), tmp_path / "a", "cpu")), want)
    same(logits(accelerate.dispatch_model(
        guest(), places, offload_dir=tmp_path / "b", **options)), want)
    class Counted(accelerate.hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counted.calls += 1
            return args, kwargs
    hooked = accelerate.dispatch_model(same_model(case).eval(), {"": "cpu"}, **options)
    block = hooked.model.layers[1].mlp
    accelerate.hooks.add_hook_to_module(getattr(block, "gate", None) or block.router, Counted())
    theirs = logits(hooked)
    families.replace_blocks(hooked)
    same(logits(hooked), want)
    families.restore_blocks(hooked)
    same(logits(hooked), theirs)
    assert Counted.calls == 3

    quantised = [torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
                 for model in (guest(), same_model(case).eval())]
    layers = [[name for name, module in model.named_modules()
               if ".quantized." in type(module).__module__] for model in quantised]
    assert layers[0] == layers[1] and len(layers[0]) > 8
    close(*map(logits, quantised), 1e-5)


def test_live_model_with_hash_layers():
    """DeepSeek-V4's table goes with the block, is saved, and the forward gets the token numbers."""
    theirs = whole_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]).eval()
    table = torch.rand(64, E8).topk(3).indices
    with torch.no_grad():
        theirs.model.layers[0].mlp.gate.tid2eid.copy_(table)
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    families.replace_blocks(ours)
    want = whole_logits(theirs, ids)
    close(whole_logits(ours, ids), want, 1e-4)
    same(ours.state_dict(), theirs.state_dict())


def test_live_model_whose_published_experts_are_transposed(tmp_path):
    """Qwen3-VL: published names are those in memory. It is saved, and read in both layouts."""
    transformers = pytest.importorskip("transformers", reason="builds a model of transformers")
    text = whole_model("qwen3_vl_moe_text").config
    config = transformers.Qwen3VLMoeConfig(text_config=text.to_dict(), vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
        deepstack_visual_indexes=[0]))
    theirs = randomised(transformers.Qwen3VLMoeForConditionalGeneration(config)).eval()
    ours = copy.deepcopy(theirs)
    names = families.replace_blocks(ours)
    assert names == [f"model.language_model.layers.{i}.mlp" for i in (0, 1)]
    ids = random_ids()
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)
    ours.save_pretrained(tmp_path)
    again, found = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    same(again.state_dict(), theirs.state_dict())

    layers = []
    for axes in (1, 2), (2, 1):                              # as in memory, and as published
        tensors = {name: tensor.transpose(*axes) if axes == (2, 1) else tensor
                   for name, tensor in theirs.state_dict().items() if ".experts." in name}
        layers.append(MoELayer(families.config_from_hf(config)))
        families.from_hf(layers[-1], theirs.state_dict() | tensors, "qwen3_vl_moe",
                         prefix=f"{names[1]}.")
    same(*(layer.state_dict() for layer in layers))


def test_live_model_under_the_librarys_trainer_loss():
    """The library's own balance loss, from router logits, has the same gradients through our
    router."""
    theirs = whole_model("qwen3_moe", router_aux_loss_coef=0.1)
    ids = random_ids()
    theirs.double()(ids[:1], use_cache=False, output_router_logits=True)     # installs the hooks
    ours = copy.deepcopy(theirs)
    families.replace_blocks(ours)
    outs = [model(ids, labels=ids, use_cache=False, output_router_logits=True)
            for model in (ours, theirs)]
    close(outs[0].aux_loss, outs[1].aux_loss, 1e-9)
    close(outs[0].loss, outs[1].loss, 1e-9)
    for out in outs:
        out.loss.backward()
    first, old = (model.model.layers[0].mlp for model in (ours, theirs))
    close(first.gate.weight.grad, old.gate.weight.grad, 1e-7)


@some_quick(["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "inkling2_text", "lfm2_moe"],
            "gpt_oss")
def test_live_registered_experts_in_whole_models(case):
    """Loss and every gradient as with the library's loop; each experts module is one graph;
    generate; autocast."""
    model = whole_model(case)
    ids = random_ids()
    leaves = list(model.parameters())

    def logits_and_grads():
        logits = whole_logits(model, ids)
        upstream = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        gradients = torch.autograd.grad(logits, leaves, upstream, materialize_grads=True)
        return [logits, *gradients]

    def match():
        for a, b in zip(logits_and_grads(), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item() + 1e-6)
        same(model.generate(ids, max_new_tokens=4, do_sample=False), written)

    want = logits_and_grads()
    written = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.set_experts_implementation(families.register_experts())
    match()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = whole_logits(model, ids)
    assert logits.isfinite().all() and logits.shape == want[0].shape
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "has_gate"):
            module.compile(fullgraph=True, backend="aot_eager")
    match()


def test_families_example():
    """With the tensors of one block: the published output, and the same tensors back."""
    code = example("families")
    assert len(code.strip().split("\n")) <= 10
    tensors = fam_tensors("qwen3_moe", torch.float32, "model.layers.0.mlp.")
    scope = {"hf_config": fam_fields("qwen3_moe"), "tensors": tensors, "x": torch.randn(4, 2, H6)}
    exec(code, scope)
    want = published_loop("qwen3_moe", scope["x"].double(), fam_tensors("qwen3_moe"))
    close(scope["y"], want, 1e-5)
    same(scope["back"], tensors)


def test_families_sharded_example(tmp_path):
    """A checkpoint in several files, with a dense layer: each MoE layer gives its block's
    output."""
    pytest.importorskip("transformers", reason="writes a checkpoint of transformers")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, intermediate_size=24, num_attention_heads=2, head_dim=8,
        mlp_only_layers=[1]))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    scope = {"folder": tmp_path}
    exec(example("sharded"), scope)
    assert list(scope["layers"]) == [0, 2]
    x = torch.randn(2, 5, 16)
    for i, layer in scope["layers"].items():
        close(layer(x), model.model.layers[i].mlp(x), 1e-5)


def test_live_example(tmp_path, monkeypatch, capsys):
    """What is saved gives the same logits again."""
    pytest.importorskip("transformers", reason="builds a model of transformers")
    monkeypatch.chdir(tmp_path)
    exec(example("replace"), {})
    names, violation, equal = capsys.readouterr().out.strip().split("\n")
    assert names == "['model.layers.0.mlp', 'model.layers.1.mlp']" and equal == "True"
    assert violation.startswith("tensor([")


def test_live_compiled_generate():
    """The page's way compiles the step of one token, without it nothing is compiled on a CPU; the
    tokens are those of eager mode."""
    pytest.importorskip("transformers", reason="builds a model of transformers")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=32, eos_token_id=None, pad_token_id=0)).eval()
    families.replace_blocks(model)
    ids = torch.randint(1, 256, (1, 8))
    want = model.generate(ids, max_new_tokens=20)
    code = example("generate").replace('mode="default"', 'mode=None, backend="aot_eager"')
    for source in (code.replace("_all_devices = True", "_all_devices = False"), code):
        names = dict(model=model, ids=ids)
        counters.clear()
        exec(source, names)
        same(names["tokens"], want)
        if model.device.type == "cpu":
            assert counters["stats"]["unique_graphs"] == (source is code)
    assert not counters["graph_break"]


@slow
def test_live_yardstick_in_bf16():
    """The table of docs/models.md: this project's ways are as far from the library's eager mode as
    its grouped_mm is, give or take a half, and not farther from fp32."""
    pytest.importorskip("transformers", reason="compares with transformers")
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        initializer_range=0.02, max_position_embeddings=512)).eval()
    ids = torch.randint(1000, (4, 256))

    def run(how, dtype=torch.bfloat16):
        own = copy.deepcopy(model).to(dtype)
        if how == "replace_blocks":
            families.replace_blocks(own)
        else:
            own.set_experts_implementation(how)
        chosen = []
        for layer in own.model.layers:
            layer.mlp.gate.register_forward_hook(
                lambda module, args, out: chosen.append(out[-1].sort(-1).values))
        with torch.no_grad():
            return own(ids).logits.float(), torch.stack(chosen)

    def apart(a, b):
        return (a[0] - b[0]).abs().max().item(), (a[1] != b[1]).any(-1).sum().item()
    exact, eager = run("eager", torch.float32), run("eager")
    from_eager, from_exact = {}, {"eager": apart(eager, exact)}
    for how in ("grouped_mm", families.register_experts(), "replace_blocks"):
        found = run(how)
        from_eager[how], from_exact[how] = apart(found, eager), apart(found, exact)
        print(how, from_eager[how], from_exact[how])
    for i in range(2):
        most = 1.5 * from_eager["grouped_mm"][i]
        assert 0 < from_eager["moe_py"][i] <= most and from_eager["replace_blocks"][i] <= most
        farthest = 1.1 * max(from_exact["eager"][i], from_exact["grouped_mm"][i])
        assert max(from_exact["moe_py"][i], from_exact["replace_blocks"][i]) <= farthest


def test_live_from_a_package(tmp_path):
    """The files copied into a package of somebody's, as README says: the name `kernels` is then
    free for Hugging Face's package."""
    pytest.importorskip("transformers", reason="runs models of transformers")
    package = tmp_path / "package"
    package.mkdir()
    files = [*HERE.glob("*.py"), *HERE.glob("*/*.py")]
    folders = {str(file.relative_to(HERE).parent) for file in files} - {"."}
    names = "|".join([*folders, *(file.stem for file in files)])
    for file in files:
        text = file.read_text()
        up = "." * len(file.relative_to(HERE).parts)
        for old, new in ((rf"import ({names})( as \w+)?$", rf"from {up} import \1\2"),
                         (rf"from ((?:{names})(?:\.\w+)?) import", rf"from {up}\1 import")):
            text = re.sub(f"^{old}", new, text, flags=re.M)
        target = package / file.relative_to(HERE)
        target.parent.mkdir(exist_ok=True)
        (target.parent / "__init__.py").touch()              # for pytest
        target.write_text(text)
    done = run("-m", "pytest", "-q", "package/models/test_models.py", "-k",
               "test_live_models_of_the_library or test_live_blocks or lora", cwd=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
