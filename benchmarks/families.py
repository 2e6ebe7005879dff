"""The routed experts of published models, scaled down to H = 256, beside their bare products.

    python benchmarks/families.py
"""
import sys
from dataclasses import replace
from pathlib import Path

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import moe
from bench import (
    BOTH, FP32, Candidate, Case, Report, bare_products, check, layer_and_input, parser_of,
    published_fields, run)
from models.configs import read_config

FAMILIES = {                                  # F in the published proportion to H, and E, K
    "mixtral": (896, 8, 2),
    "olmoe": (128, 64, 8),
    "qwen3_moe": (96, 128, 8),
    "qwen2_moe": (176, 60, 4),
    "qwen3_next": (64, 512, 10),
    "deepseek_v2": (80, 160, 6),
    "deepseek_v3": (72, 256, 8),
    "kimi_k2": (72, 384, 8),
    "llama4_text": (408, 16, 1),
    "gpt_oss": (256, 32, 4),
    "ernie4_5_moe": (152, 64, 6),
    "nemotron_h": (176, 128, 6),
    "dbrx": (448, 16, 4),
}


def bench_families(report: Report) -> None:
    for model_type in report.progress(list(FAMILIES)[::5 if report.quick else 1]):
        sizes = (512, 256, *FAMILIES[model_type])
        case = report.cases([Case(*sizes, FP32)])[0]
        fields = published_fields(case)
        published = {"model_type": model_type, "ffn_config": fields, **fields}
        config = moe.MoEConfig(**read_config(published).fields)
        config = replace(config, shared_expert_intermediate_size=None, shared_expert_gate=False)
        layer, x, grads = layer_and_input(config, case.T)
        candidates = Candidate(layer, [x], grads).both("layer")
        check(candidates, candidates["layer, eager"].step(), case.dtype)
        candidates |= bare_products(layer, x)
        report.compare(case, f"{model_type}, {BOTH}", candidates, ["products"])


if __name__ == "__main__":
    run(bench_families, parser_of(__doc__).parse_args())
