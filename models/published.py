"""What published models say of their routers and experts: fields of their config.json.

    config_from_hf(MODELS["qwen3_moe"].config)

Facts alone, for atlas.py. A field that says nothing of routers or experts is left out.
"""
from typing import NamedTuple


class Published(NamedTuple):
    """The config of one published model.

    model: its name on the Hugging Face Hub.
    source: of its formulas.
    found: how sure the config is. "file": read from a copy of the model's config.json. "quoted":
      from a text or a conversion that gives its fields. "memory": from neither.
    """
    model: str
    source: str
    found: str
    config: dict


def published(model: str, source: str, found: str, **config) -> Published:
    return Published(model, source, found, config)


# A row of table.FAMILIES -> a model of it. No config was found for the other rows.
MODELS = {
    "mixtral": published(
        "mistralai/Mixtral-8x7B-v0.1", "arXiv 2401.04088", "file",
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, hidden_act="silu",
        num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02,
        torch_dtype="bfloat16", num_hidden_layers=32),
    "granitemoe": published(
        "ibm-granite/granite-3.0-1b-a400m-instruct", "model card", "quoted",
        model_type="granitemoe", hidden_size=1024, intermediate_size=512, num_local_experts=32,
        num_experts_per_tok=8, num_hidden_layers=24),
    "jamba": published(
        "ai21labs/Jamba-v0.1", "arXiv 2403.19887", "file",
        model_type="jamba", hidden_size=4096, intermediate_size=14336, hidden_act="silu",
        num_experts=16, num_experts_per_tok=2, expert_layer_offset=1, expert_layer_period=2,
        router_aux_loss_coef=0.001, torch_dtype="bfloat16", num_hidden_layers=32),
    "olmoe": published(
        "allenai/OLMoE-1B-7B-0924", "arXiv 2409.02060", "file",
        model_type="olmoe", hidden_size=2048, intermediate_size=1024, hidden_act="silu",
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, router_aux_loss_coef=0.01,
        torch_dtype="bfloat16", num_hidden_layers=16),
    "qwen3_moe": published(
        "Qwen/Qwen3-30B-A3B", "arXiv 2505.09388", "file",
        model_type="qwen3_moe", hidden_size=2048, moe_intermediate_size=768, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, router_aux_loss_coef=0.001,
        torch_dtype="bfloat16", num_hidden_layers=48),
    "qwen2_moe": published(
        "Qwen/Qwen1.5-MoE-A2.7B", "arXiv 2407.10671", "file",
        model_type="qwen2_moe", hidden_size=2048, moe_intermediate_size=1408, hidden_act="silu",
        num_experts=60, num_experts_per_tok=4, norm_topk_prob=False,
        shared_expert_intermediate_size=5632, router_aux_loss_coef=0.001, torch_dtype="bfloat16",
        num_hidden_layers=24, decoder_sparse_step=1),
    "qwen3_next": published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "model card", "file",
        model_type="qwen3_next", hidden_size=2048, moe_intermediate_size=512, hidden_act="silu",
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True,
        shared_expert_intermediate_size=512, router_aux_loss_coef=0.001, torch_dtype="bfloat16",
        num_hidden_layers=48, decoder_sparse_step=1),
    "deepseek_v2": published(
        "deepseek-ai/DeepSeek-V2", "arXiv 2405.04434", "file",
        model_type="deepseek_v2", hidden_size=5120, moe_intermediate_size=1536, hidden_act="silu",
        n_routed_experts=160, num_experts_per_tok=6, n_group=8, topk_group=3,
        scoring_func="softmax", topk_method="group_limited_greedy", norm_topk_prob=False,
        routed_scaling_factor=16.0, n_shared_experts=2, moe_layer_freq=1, aux_loss_alpha=0.001,
        seq_aux=True, torch_dtype="bfloat16", num_hidden_layers=60, first_k_dense_replace=1),
    "deepseek_v3": published(
        "deepseek-ai/DeepSeek-V3", "arXiv 2412.19437", "file",
        model_type="deepseek_v3", hidden_size=7168, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        topk_method="noaux_tc", n_shared_experts=1, moe_layer_freq=1, torch_dtype="bfloat16",
        quantization_config=dict(quant_method="fp8"), num_hidden_layers=61,
        first_k_dense_replace=3),
    "glm4_moe": published(
        "zai-org/GLM-4.5-Air", "arXiv 2508.06471", "file",
        model_type="glm4_moe", hidden_size=4096, moe_intermediate_size=1408, hidden_act="silu",
        n_routed_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, n_shared_experts=1, torch_dtype="bfloat16",
        num_hidden_layers=46, first_k_dense_replace=1),
    "dots1": published(
        "rednote-hilab/dots.llm1.inst", "arXiv 2506.05767", "quoted",
        model_type="dots1", hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128,
        num_experts_per_tok=6, n_group=None, topk_group=None, scoring_func="noaux_tc",
        norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=2, num_hidden_layers=62,
        first_k_dense_replace=1),
    "llama4_text": published(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "model card", "file",
        model_type="llama4_text", hidden_size=5120, intermediate_size=8192, hidden_act="silu",
        num_local_experts=16, num_experts_per_tok=1, router_aux_loss_coef=0.001,
        torch_dtype="bfloat16", interleave_moe_layer_step=1, num_hidden_layers=48),
    "gpt_oss": published(
        "openai/gpt-oss-20b", "arXiv 2508.10925", "file",
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, hidden_act="silu",
        num_local_experts=32, num_experts_per_tok=4, swiglu_limit=7.0, router_aux_loss_coef=0.9,
        experts_per_token=4, quantization_config=dict(quant_method="mxfp4"), num_hidden_layers=24),
    "ernie4_5_moe": published(
        "baidu/ERNIE-4.5-21B-A3B-PT", "technical report", "quoted",
        model_type="ernie4_5_moe", hidden_size=2560, moe_intermediate_size=1536, hidden_act="silu",
        moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_layer_start_index=1,
        moe_layer_end_index=27, moe_layer_interval=1, use_bias=False, num_hidden_layers=28),
    "minimax_m2": published(
        "MiniMaxAI/MiniMax-M2", "model card", "file",
        model_type="minimax_m2", hidden_size=3072, intermediate_size=1536, hidden_act="silu",
        num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid", use_routing_bias=True,
        shared_intermediate_size=0, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
        quantization_config=dict(quant_method="fp8"), num_hidden_layers=62),
    "hunyuan_v1_moe": published(
        "tencent/Hunyuan-A13B-Instruct", "technical report", "file",
        model_type="hunyuan", hidden_size=4096, intermediate_size=3072,
        moe_intermediate_size=[3072] * 32, hidden_act="silu", num_experts=64, moe_topk=[8] * 32,
        n_group=None, topk_group=None, norm_topk_prob=True, routed_scaling_factor=1.0,
        num_shared_expert=[1] * 32, use_mixed_mlp_moe=True, moe_drop_tokens=False,
        num_hidden_layers=32, torch_dtype="bfloat16"),
    "lfm2_moe": published(
        "LiquidAI/LFM2-8B-A1B", "arXiv 2511.23404", "quoted",
        model_type="lfm2_moe", hidden_size=2048, moe_intermediate_size=1792, num_experts=32,
        num_experts_per_tok=4, norm_topk_prob=True, use_expert_bias=True,
        routed_scaling_factor=1.0, num_hidden_layers=24, num_dense_layers=2),
    "nemotron_h": published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "arXiv 2512.20848", "file",
        model_type="nemotron_h", hidden_size=2688, moe_intermediate_size=1856,
        mlp_hidden_act="relu2", n_routed_experts=128, num_experts_per_tok=6, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1,
        moe_shared_expert_intermediate_size=3712, torch_dtype="bfloat16", mlp_bias=False,
        num_hidden_layers=52,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    "dbrx": published(
        "databricks/dbrx-base", "model card", "file",
        model_type="dbrx", d_model=6144,
        ffn_config=dict(ffn_hidden_size=10752, moe_jitter_eps=0, moe_loss_weight=0.05,
                        moe_num_experts=16, moe_top_k=4),
        router_aux_loss_coef=0.05, torch_dtype="bfloat16", n_layers=40),
    "kimi_linear": published(
        "moonshotai/Kimi-Linear-48B-A3B-Base", "arXiv 2510.26692", "file",
        model_type="kimi_linear", hidden_size=2304, moe_intermediate_size=1024, hidden_act="silu",
        num_experts=256, num_experts_per_token=8, num_expert_group=1, topk_group=1,
        use_grouped_topk=True, moe_router_activation_func="sigmoid", moe_renormalize=True,
        routed_scaling_factor=2.446, num_shared_experts=1, moe_layer_freq=1, dtype="bfloat16",
        num_hidden_layers=27, first_k_dense_replace=1),
    "deepseek_v4": published(
        "deepseek-ai/DeepSeek-V4-Flash", "technical report", "file",
        model_type="deepseek_v4", hidden_size=4096, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=6, scoring_func="sqrtsoftplus",
        norm_topk_prob=True, routed_scaling_factor=1.5, topk_method="noaux_tc", n_shared_experts=1,
        num_hash_layers=3, swiglu_limit=10.0, num_hidden_layers=43, torch_dtype="bfloat16",
        expert_dtype="fp4", quantization_config=dict(quant_method="fp8")),
    "minimax_m3_vl_text": published(
        "MiniMaxAI/MiniMax-M3", "transformers 5.24", "file",
        model_type="minimax_m3", hidden_size=6144, intermediate_size=3072,
        moe_intermediate_size=3072, hidden_act="swigluoai", num_local_experts=128,
        num_experts_per_tok=4, scoring_func="sigmoid", routed_scaling_factor=2.0,
        use_routing_bias=True, n_shared_experts=1, shared_intermediate_size=3072, swiglu_limit=7.0,
        swiglu_alpha=1.702, torch_dtype="bfloat16", num_hidden_layers=60, first_k_dense_replace=3),
    "bailing_hybrid": published(
        "inclusionAI/Ling-3.0-flash", "transformers 5.24", "file",
        model_type="bailing_hybrid", hidden_size=2560, moe_intermediate_size=768, hidden_act="silu",
        num_experts=512, num_experts_per_tok=8, n_group=8, topk_group=4, score_function="sigmoid",
        scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_router_enable_expert_bias=True, num_shared_experts=1,
        moe_shared_expert_intermediate_size=768, expert_swiglu_limit_list=[0] * 35 + [4] * 7,
        share_expert_swiglu_limit_list=[0] * 34 + [5] * 6 + [7] * 2, router_dtype="fp32",
        scale_router_input=False, seq_aux=True, num_hidden_layers=42, torch_dtype="bfloat16",
        first_k_dense_replace=2),
    "sarvam_moe": published(
        "sarvamai/sarvam-30b", "transformers 5.24", "file",
        model_type="sarvam_moe", hidden_size=4096, moe_intermediate_size=1024, hidden_act="silu",
        num_experts=128, num_experts_per_tok=6, n_group=1, topk_group=1, score_function="sigmoid",
        norm_topk_prob=True, routed_scaling_factor=2.5, moe_router_enable_expert_bias=True,
        num_shared_experts=1, moe_shared_expert_intermediate_size=1024, router_dtype="fp32",
        num_hidden_layers=19, first_k_dense_replace=1, dtype="float32"),
    "dots3_note_text": published(
        "dots-studio/dots3-note-prev", "transformers 5.24", "quoted",
        model_type="dots3_note_text", hidden_size=5120, moe_intermediate_size=1536,
        hidden_act="silu", n_routed_experts=256, num_experts_per_tok=8, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.0, n_shared_experts=1,
        moe_layer_freq=1, num_hidden_layers=46, first_k_dense_replace=1),
    "mellum": published(
        "JetBrains/Mellum2-12B-A2.5B-Thinking", "transformers 5.24", "file",
        model_type="mellum", hidden_size=2304, moe_intermediate_size=896, hidden_act="silu",
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, router_aux_loss_coef=0.001,
        dtype="bfloat16", num_hidden_layers=28),
    "qwen3_vl_moe_text": published(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "arXiv 2511.21631", "file",
        model_type="qwen3_vl_moe_text", hidden_size=2048, moe_intermediate_size=768,
        hidden_act="silu", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        dtype="bfloat16", num_hidden_layers=48),
    "qwen3_5_moe_text": published(
        "Qwen/Qwen3.5-35B-A3B", "transformers 5.24", "file",
        model_type="qwen3_5_moe_text", hidden_size=2048, moe_intermediate_size=512,
        hidden_act="silu", num_experts=256, num_experts_per_tok=8,
        shared_expert_intermediate_size=512, router_aux_loss_coef=0.001, dtype="bfloat16",
        num_hidden_layers=40),
    "granitemoe_swa": published(
        "ibm-granite/granite-swash-3b-a600m", "transformers 5.24", "quoted",
        model_type="granitemoe_swa", hidden_size=1280, intermediate_size=512, num_local_experts=48,
        num_experts_per_tok=4, shared_intermediate_size=1280, num_hidden_layers=28),
    "aria_text": published(
        "rhymes-ai/Aria", "arXiv 2410.05993", "memory",
        model_type="aria_text", hidden_size=2560, intermediate_size=1664, moe_num_experts=64,
        moe_topk=6, moe_num_shared_experts=2),
    "cohere2_moe": published(
        "CohereLabs/command-a-plus-05-2026-w4a4", "transformers 5.24", "file",
        model_type="cohere2_moe", hidden_size=4096, intermediate_size=4096, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, expert_selection_fn="sigmoid", norm_topk_prob=True,
        num_shared_experts=4, shared_expert_combination_strategy="average", dtype="bfloat16",
        num_hidden_layers=32, first_k_dense_replace=0),
    "mistral4": published(
        "mistralai/Mistral-Small-4-119B-2603", "transformers 5.24", "file",
        model_type="mistral4", hidden_size=4096, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=128, num_experts_per_tok=4, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, n_shared_experts=1, mlp_bias=False, dtype="bfloat16",
        num_hidden_layers=36, first_k_dense_replace=0),
    "afmoe": published(
        "arcee-ai/Trinity-Mini", "transformers 5.24", "quoted",
        model_type="afmoe", hidden_size=2048, moe_intermediate_size=1024, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1, num_expert_groups=1,
        num_limited_groups=1, score_func="sigmoid", route_norm=True, route_scale=2.826,
        num_shared_experts=1, num_hidden_layers=32, num_dense_layers=2),
    "hy_v3": published(
        "tencent/Hy3-preview", "transformers 5.24", "file",
        model_type="hy_v3", hidden_size=4096, moe_intermediate_size=1536, expert_hidden_dim=1536,
        hidden_act="silu", num_experts=192, num_experts_per_tok=8,
        moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True, route_norm=True,
        router_scaling_factor=2.826, num_shared_experts=1, enable_moe_fp32_combine=False,
        num_hidden_layers=80, first_k_dense_replace=1),
    "laguna": published(
        "poolside/Laguna-XS.2", "transformers 5.24", "file",
        model_type="laguna", hidden_size=2048, moe_intermediate_size=512, num_experts=256,
        num_experts_per_tok=8, moe_routed_scaling_factor=2.5,
        moe_apply_router_weight_on_input=False, shared_expert_intermediate_size=512,
        router_aux_loss_coef=0.0, num_hidden_layers=40, torch_dtype="bfloat16",
        mlp_layer_types=["dense"] + ["sparse"] * 39),
    "step3p5": published(
        "stepfun-ai/Step-3.5-Flash", "transformers 5.24", "file",
        model_type="step3p5", hidden_size=4096, moe_intermediate_size=1280, moe_num_experts=288,
        moe_top_k=8, moe_router_activation="sigmoid", moe_router_scaling_factor=3.0,
        norm_expert_weight=True, use_moe_router_bias=True, need_fp32_gate=True,
        share_expert_dim=1280, swiglu_limits=[0.0] * 43 + [7] * 2 + [0.0] * 3,
        swiglu_limits_shared=[0.0] * 44 + [16] * 1 + [0.0] * 3, num_hidden_layers=45,
        torch_dtype="bfloat16",
        moe_layers_enum=",".join(map(str, range(3, 45)))),
    "exaone_moe": published(
        "LGAI-EXAONE/K-EXAONE-236B-A23B", "transformers 5.24", "quoted",
        model_type="exaone_moe", hidden_size=6144, moe_intermediate_size=2048, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5,
        num_shared_experts=1, dtype="bfloat16", num_hidden_layers=48,
        first_last_k_dense_replace=1),
    "mimo_v2_flash": published(
        "XiaomiMiMo/MiMo-V2-Flash", "transformers 5.24", "file",
        model_type="mimo_v2_flash", hidden_size=4096, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=None,
        topk_method="noaux_tc", n_shared_experts=None, torch_dtype="bfloat16",
        quantization_config=dict(quant_method="fp8"), num_hidden_layers=48,
        moe_layer_freq=[0] + [1] * 47),
    "glm_moe_dsa": published(
        "zai-org/GLM-5", "transformers 5.24", "file",
        model_type="glm_moe_dsa", hidden_size=6144, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        topk_method="noaux_tc", n_shared_experts=1, moe_layer_freq=1, dtype="bfloat16",
        num_hidden_layers=78, first_k_dense_replace=3),
    "glm4_moe_lite": published(
        "zai-org/GLM-4.7-Flash", "transformers 5.24", "file",
        model_type="glm4_moe_lite", hidden_size=2048, moe_intermediate_size=1536, hidden_act="silu",
        n_routed_experts=64, num_experts_per_tok=4, n_group=1, topk_group=1, topk_method="noaux_tc",
        norm_topk_prob=True, routed_scaling_factor=1.8, n_shared_experts=1, dtype="bfloat16",
        num_hidden_layers=47, first_k_dense_replace=1),
    "glm5_next_text": published(
        "zai-org/GLM-5.3-Flash", "transformers 5.24", "file",
        model_type="glm5_next_text", hidden_size=4096, moe_intermediate_size=2048,
        hidden_act="silu", n_routed_experts=288, num_experts_per_tok=8, n_group=1, topk_group=1,
        scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
        routed_scaling_factor=2.5, n_shared_experts=1, swiglu_limit=10.0,
        moe_router_dtype="float32", router_aux_loss_coef=0.001, num_hidden_layers=45,
        dtype="bfloat16", quantization_config=dict(quant_method="fp8"), first_k_dense_replace=3,
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 42),
    "axk1": published(
        "skt/A.X-K1", "transformers 5.24", "quoted",
        model_type="axk1", hidden_size=7168, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=192, num_experts_per_tok=8, n_group=8, topk_group=4,
        scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
        routed_scaling_factor=2.5, n_shared_experts=1, moe_layer_freq=1, aux_loss_alpha=0.0001,
        seq_aux=True, num_hidden_layers=61, first_k_dense_replace=1),
    "hy_v4": published(
        "tencent/Hy4-preview", "transformers 5.24", "file",
        model_type="hy_v4", hidden_size=6144, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.827, n_shared_experts=1, swiglu_limit=10.0, num_hidden_layers=78,
        dtype="bfloat16", mlp_layer_types=["dense"] + ["sparse"] * 77),
    "kimi_k2": published(
        "moonshotai/Kimi-K2-Instruct", "arXiv 2507.20534", "file",
        model_type="kimi_k2", hidden_size=7168, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=384, num_experts_per_tok=8, n_group=1, topk_group=1,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.827,
        topk_method="noaux_tc", n_shared_experts=1, aux_loss_alpha=0.001, seq_aux=True,
        moe_layer_freq=1, torch_dtype="bfloat16", quantization_config=dict(quant_method="fp8"),
        num_hidden_layers=61, first_k_dense_replace=1),
    "kimi_k3": published(
        "moonshotai/Kimi-K3", "technical report", "file",
        model_type="kimi_k3", hidden_size=7168, moe_intermediate_size=3072, hidden_act="situ",
        num_experts=896, num_experts_per_token=16, topk_group=1, num_expert_group=1,
        moe_router_activation_func="sigmoid", moe_renormalize=True, routed_scaling_factor=1.0,
        topk_method="noaux_tc", num_shared_experts=2, routed_expert_hidden_size=3584,
        latent_moe_use_norm=True, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        use_grouped_topk=True, moe_layer_freq=1, dtype="bfloat16",
        quantization_config=dict(quant_method="compressed-tensors"), num_hidden_layers=93,
        first_k_dense_replace=1),
    "qwen4_exp_text": published(
        "Qwen/Qwen3.8-Flash-Next", "transformers 5.24", "file",
        model_type="qwen4_exp_text", hidden_size=2560, moe_intermediate_size=640, hidden_act="silu",
        num_experts=512, num_experts_per_tok=10, shared_expert_intermediate_size=640,
        router_aux_loss_coef=0.001, dtype="bfloat16", num_hidden_layers=48),
    "flex_olmo": published(
        "allenai/FlexOlmo-7x7B-1T", "arXiv 2507.07024", "quoted",
        model_type="flex_olmo", hidden_size=4096, intermediate_size=11008, num_experts=7,
        num_experts_per_tok=7, norm_topk_prob=False),
    "minimax": published(
        "MiniMaxAI/MiniMax-Text-01", "arXiv 2501.08313", "file",
        model_type="minimax_text_01", hidden_size=6144, intermediate_size=9216, hidden_act="silu",
        num_local_experts=32, num_experts_per_tok=2, router_aux_loss_coef=0.001,
        router_jitter_noise=0.0, shared_intermediate_size=0, num_hidden_layers=80),
    "granitemoehybrid": published(
        "ibm-granite/granite-4.0-h-small", "transformers 5.24", "quoted",
        model_type="granitemoehybrid", hidden_size=4096, intermediate_size=768,
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536,
        torch_dtype="bfloat16", num_hidden_layers=40),
    "deepseek_v32": published(
        "deepseek-ai/DeepSeek-V3.2", "transformers 5.24", "file",
        model_type="deepseek_v32", hidden_size=7168, moe_intermediate_size=2048, hidden_act="silu",
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        topk_method="noaux_tc", n_shared_experts=1, moe_layer_freq=1, torch_dtype="bfloat16",
        quantization_config=dict(quant_method="fp8"), num_hidden_layers=61,
        first_k_dense_replace=3),
    "sarvam_mla": published(
        "sarvamai/sarvam-105b", "transformers 5.24", "file",
        model_type="sarvam_mla", hidden_size=4096, moe_intermediate_size=2048, hidden_act="silu",
        num_experts=128, num_experts_per_tok=8, routed_scaling_factor=2.5,
        moe_router_enable_expert_bias=True, num_shared_experts=1, num_hidden_layers=32,
        first_k_dense_replace=1, dtype="float32"),
    "glm4v_moe_text": published(
        "zai-org/GLM-4.5V", "arXiv 2507.01006", "quoted",
        model_type="glm4v_moe_text", hidden_size=4096, moe_intermediate_size=1408,
        hidden_act="silu", n_routed_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_shared_experts=1,
        router_aux_loss_coef=0.0001, dtype="bfloat16", num_hidden_layers=46,
        first_k_dense_replace=1),
    "solar_open": published(
        "upstage/Solar-Open-100B", "transformers 5.24", "quoted",
        model_type="solar_open", hidden_size=4096, moe_intermediate_size=1280, n_routed_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, routed_scaling_factor=1.0, n_shared_experts=1,
        torch_dtype="bfloat16", num_hidden_layers=48, first_k_dense_replace=0),
    "deepseek_ocr2_text": published(
        "deepseek-ai/DeepSeek-OCR-2", "transformers 5.24", "quoted",
        model_type="deepseek_ocr2_text", hidden_size=1280, moe_intermediate_size=896,
        n_routed_experts=64, num_experts_per_tok=6, topk_method="greedy", n_shared_experts=2,
        torch_dtype="bfloat16", n_group=1, topk_group=1, num_hidden_layers=12,
        first_k_dense_replace=1),
    "unlimited_ocr_text": published(
        "baidu/Unlimited-OCR", "transformers 5.24", "quoted",
        model_type="unlimited_ocr_text", hidden_size=1280, moe_intermediate_size=896,
        n_routed_experts=64, num_experts_per_tok=6, topk_method="greedy", n_shared_experts=2,
        torch_dtype="bfloat16", num_hidden_layers=12, first_k_dense_replace=1),
    "qwen3_omni_moe_text": published(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct, thinker", "arXiv 2509.17765", "quoted",
        model_type="qwen3_omni_moe_text", hidden_size=2048, moe_intermediate_size=768,
        hidden_act="silu", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        shared_expert_intermediate_size=0, router_aux_loss_coef=0.001, dtype="bfloat16",
        num_hidden_layers=48, decoder_sparse_step=1),
    "qwen3_omni_moe_talker_text": published(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct, talker", "arXiv 2509.17765", "quoted",
        model_type="qwen3_omni_moe_talker_text", hidden_size=1024, moe_intermediate_size=384,
        hidden_act="silu", num_local_experts=128, num_experts_per_tok=6, norm_topk_prob=True,
        shared_expert_intermediate_size=768, router_aux_loss_coef=0.001, dtype="bfloat16",
        num_hidden_layers=20, decoder_sparse_step=1),
}

# Rows for which no config was found: the fields of the library's config that they read.
FIELDS = {
    "inkling2_text":
        "hidden_size moe_intermediate_size n_routed_experts num_experts_per_tok route_scale "
        "mlp_gate_softcap mlp_up_softcap",
    "flint":
        "hidden_size moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob "
        "shared_expert_intermediate_size",
    "mistral_large4_text":
        "hidden_size moe_intermediate_size n_routed_experts num_experts_per_tok n_group topk_group "
        "routed_scaling_factor n_shared_experts",
    "lara_mini":
        "hidden_size moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob "
        "shared_expert_intermediate_size",
    "axk2":
        "hidden_size moe_intermediate_size n_routed_experts num_experts_per_tok norm_topk_prob "
        "routed_scaling_factor n_shared_experts",
    "beam":
        "hidden_size moe_intermediate_size num_experts num_experts_per_tok n_group topk_group "
        "norm_topk_prob routed_scaling_factor",
    "hy_v4_vl_text":
        "hidden_size moe_intermediate_size n_routed_experts num_experts_per_tok n_group topk_group "
        "norm_topk_prob routed_scaling_factor swiglu_limit n_shared_experts",
    "granitemoeshared":
        "hidden_size intermediate_size num_local_experts num_experts_per_tok "
        "shared_intermediate_size residual_multiplier",
}
FIELDS["inkling2_loop_text"] = FIELDS["inkling2_text"]
