"""Whole models of the Hugging Face library, of about 90 M random parameters: with our experts, with
the library's, and with our blocks. Needs transformers.

    python benchmarks/whole_models.py
"""
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import (
    BOTH, DEVICE, FP32, SHORT, Candidate, Case, Report, check, parser_of, published_fields, run)
from models.experts import register_experts
from models.live import replace_blocks

MODELS = {                                    # F, E, K
    "qwen3_moe": (384, 32, 4),
    "deepseek_v3": (256, 64, 6),
    "gpt_oss": (768, 16, 4),
}
DEEPSEEK = dict(
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    kv_lora_rank=128,
    q_lora_rank=256)


class LossOf(nn.Module):
    """The loss of a random model, the same for every implementation of the experts."""

    def __init__(self, model_type: str, case: Case, experts: str):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type,
            vocab_size=8192,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            **DEEPSEEK if model_type == "deepseek_v3" else {"head_dim": 64},
            **published_fields(case))
        self.model = AutoModelForCausalLM.from_config(config).to(DEVICE, case.dtype)
        if experts == "blocks":
            replace_blocks(self.model)
        else:
            self.model.set_experts_implementation(experts)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, labels=tokens, use_cache=False).loss


def bench_model(report: Report, model_type: str, case: Case) -> None:
    """One model with our experts, the library's and our blocks."""
    torch._dynamo.reset()
    inputs = [torch.randint(1, 64, (1, case.T), device=DEVICE)]
    grads = [torch.ones((), device=DEVICE)]
    candidates = {}
    for experts in (register_experts(), "grouped_mm", "eager"):
        loss = LossOf(model_type, case, experts)
        candidates |= Candidate(loss, inputs, grads).both(experts)
    del candidates["eager, compiled"]                      # its loop is no graph
    if case.dtype == FP32:
        check(candidates, candidates["eager, eager"].step(), FP32)
    loss = LossOf(model_type, case, "blocks")
    candidates |= Candidate(loss, inputs, grads).both("blocks")
    report.compare(case, f"{model_type}, {BOTH}", candidates, ["grouped_mm"])


def bench_models(report: Report) -> None:
    """Every model with few and with many tokens; with --quick one case."""
    pairs = []
    for model_type, sizes in MODELS.items():
        cases = [Case(T, 512, *sizes, dtype) for T in (64, 512) for dtype in SHORT]
        pairs += [(model_type, case) for case in report.cases(cases)]
    for model_type, case in report.progress(pairs[:1] if report.quick else pairs):
        bench_model(report, model_type, case)


if __name__ == "__main__":
    run(bench_models, parser_of(__doc__).parse_args())
