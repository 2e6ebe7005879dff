"""Tests that hold small.py and the layer together: what both compute is equal to the bit.

    python -m pytest tests/test_small_and_layer.py
"""
import itertools

import pytest
import torch

import grouped
from moe import MoEConfig, MoELayer, load_balancing_metrics, update_expert_bias
from small import MoE
from test_moe import (
    about, about_the_cpu, compiled, fresh_start, on_device, same, saved_bytes, slow_but)
from test_small import CASES, E, F_, H, K, layer_of, step


def pair(case: str, dtype=torch.float32, sizes=(H, F_, E, K)) -> tuple[MoE, MoELayer]:
    """small.py's layer, and MoELayer with its weights and its bias."""
    layer = layer_of(case, dtype, sizes)
    options = CASES[case]
    coeff = options.get("aux_loss_coeff", 0.0)
    config = MoEConfig(
        *sizes, score_function=layer.score_function, params_dtype=dtype,
        router_dtype=torch.promote_types(dtype, torch.float32),
        enable_expert_bias=layer.expert_bias is not None,
        load_balancing_type="aux_loss" if coeff else "none", aux_loss_coeff=coeff,
        shared_expert_intermediate_size=options.get("shared_ffn_hidden_size"))
    names = {
        "router": "router.weight", "expert_bias": "router.expert_bias",
        "fc1": "experts.fc1", "fc2": "experts.fc2",
        "shared_fc1": "shared_experts.fc1", "shared_fc2": "shared_experts.fc2"}
    whole = MoELayer(config)
    whole.load_state_dict({names[name]: value for name, value in layer.state_dict().items()})
    return layer, whole


CPUS = {"AVX512": [torch.float16], "AVX2": [torch.bfloat16, torch.float16]}     # slow dtypes


@about_the_cpu("on a card the order of a sum is the card's")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, cpu, topk", [
    (torch.float32, "AVX512", K), (torch.float32, "AVX512", 5), (torch.float64, "AVX512", K),
    (torch.bfloat16, "AVX512", K), (torch.bfloat16, "AVX2", 5), (torch.float16, "AVX512", K)])
def test_small_equals_the_layer(monkeypatch, case, dtype, cpu, topk):
    """In eager mode, with padding and under autocast too: output, gradients, counts, bias."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    monkeypatch.setattr(grouped, "_slow_on_cpu", CPUS[cpu].__contains__)
    layer, whole = pair(case, dtype, sizes=(H, F_, E, topk))
    x = torch.randn(5, 7, H, dtype=dtype, requires_grad=True)
    for masked, autocast in itertools.product((False, True), repeat=2):
        mask = [torch.rand(5, 7) < 0.3] * masked
        with about(masked, autocast):
            same(step(layer, x, *mask, autocast=autocast), step(whole, x, *mask, autocast=autocast))
            [counts] = load_balancing_metrics(whole)["tokens_per_expert"]
            same(layer.counts.to(counts), counts)
            if layer.expert_bias is None:
                layer.counts.zero_()
                continue
            layer.update_bias(), update_expert_bias(whole)
            same(layer.expert_bias, whole.router.expert_bias)
    layer.eval()
    y = layer(x[0])
    same(y, whole.eval()(x[0]))
    y.sum().backward()
    with torch.no_grad():
        same(layer.train()(x[0]), whole.train()(x[0]))
    assert not layer.counts.any()


@pytest.mark.parametrize("backend", slow_but([None], [None, "aot_eager", "inductor"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_keeps_as_few_bytes(dtype, backend):
    """small.py keeps what the layer keeps: x, fc1's output, ids, probs, and in eager mode the
    activation. It keeps a little more: the counts [E] and their sum, and with a loss n_e [E], which
    the layer keeps where no hook sees it."""
    T, width, experts = 256, 64, 8
    for case in ("plain", "shared", "sigmoid and loss"):
        kept = []
        for layer in pair(case, dtype, sizes=(width, 32, experts, 4)):
            function = layer if backend is None else compiled(layer, backend)
            x = torch.randn(T, width, dtype=dtype, requires_grad=True)
            kept.append(saved_bytes(lambda: function(x), exclude=layer.parameters()))
        more = 8 + experts * (8 + 4 * (case == "sigmoid and loss"))
        assert kept[0] <= kept[1] + more, (case, kept, more)
