"""Tests that hold small.py and the layer together: what both compute is equal to the bit.

    python -m pytest tests/test_small_and_layer.py
"""
import ast
import inspect
import itertools

import pytest
import torch

import compat
import grouped
import kernels
import small
from models.weights import IN_SMALL
from moe import MoEConfig, MoELayer, load_balancing_metrics, update_expert_bias
from small import MoE
from test_moe import (
    about, about_the_cpu, close, compiled, fresh_start, on_device, same, saved_bytes, slow_but)
from test_small import CASES, E, F_, H, K, layer_of, step


def pair(case: str, dtype=torch.float32, sizes=(H, F_, E, K)) -> tuple[MoE, MoELayer]:
    """small.py's layer, and MoELayer with its weights and its bias."""
    layer = layer_of(case, dtype, sizes)
    return layer, layer_like(layer)


def layer_like(mine: MoE) -> MoELayer:
    """The MoELayer of the same fields, with the same weights."""
    fields = eval(f"dict({mine.extra_repr()})")
    dtype = mine.fc1.dtype
    if mine.aux_loss_coeff:
        fields |= dict(load_balancing_type="aux_loss")
    config = MoEConfig(
        **fields, params_dtype=dtype, router_dtype=torch.promote_types(dtype, torch.float32))
    whole = MoELayer(config)
    weights = mine.state_dict()
    whole.load_state_dict({
        name: weights[short] for name, short in IN_SMALL.items() if short in weights})
    return whole


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_small_splits_fp32_exactly(backend):
    """Three numbers in bf16 add up to each number in fp32, to the bit, in a graph too, where a cast
    to bf16 and back need not round."""
    x = torch.randn(64, 8) * torch.randn(64, 1).mul(20).exp()
    x[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(torch.float32).max, 1 + 2.0 ** -23])
    parts = compiled(small.in_bf16_parts, backend)(x)
    assert parts.dtype == torch.bfloat16 and parts.shape == (64, 24)
    same(sum(part.double() for part in parts.split(8, dim=1)).float(), x)


@pytest.mark.parametrize("name, file", [
    ("cast", compat), ("upcast", compat), ("is_exporting", compat), ("is_decoding", compat),
    ("holds_in_this_graph", compat),
    ("as_no_view", compat), ("take_rows", compat), ("takes_bf16", kernels),
    ("multiply_bf16", kernels), ("in_bf16_parts", kernels), ("rows_of_each", grouped),
    ("sum_tokens", kernels), ("with_gradient", kernels), ("only_best_groups", kernels)])
def test_small_and_layer_have_one_form(name, file):
    """What both need is the same code in both, but for docstrings and types."""
    def code(function):
        tree = ast.parse(inspect.getsource(inspect.unwrap(function))).body[0]
        arguments = [argument.arg for argument in tree.args.args]
        return arguments, [ast.unparse(line) for line in tree.body[bool(ast.get_docstring(tree)):]]

    assert getattr(file, name).__module__ == file.__name__
    assert code(getattr(small, name)) == code(getattr(file, name))


@about_the_cpu("on a card the order of a sum is the card's")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, has_bf16, topk", [
    (torch.float32, True, K), (torch.float32, True, 5), (torch.float64, True, K),
    (torch.bfloat16, True, K), (torch.bfloat16, False, 5), (torch.float16, True, K)])
def test_small_equals_the_layer(monkeypatch, case, dtype, has_bf16, topk):
    """In eager mode, with padding and under autocast too: output, gradients, counts, bias. On CPUs
    with and without instructions for bf16; small.py uses none for fp16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    monkeypatch.setattr(grouped, "_slow_on_cpu", grouped._slow_on_cpu.__wrapped__)    # uncached
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
            layer.finish_step(), update_expert_bias(whole)
            same(layer.expert_bias, whole.router.expert_bias)
    layer.eval()
    y = layer(x[0])
    same(y, whole.eval()(x[0]))
    y.sum().backward()
    with torch.no_grad():
        same(layer.train()(x[0]), whole.train()(x[0]))
    assert not layer.counts.any()


OPTIONS = {
    "softmax over all": dict(norm_topk_prob=False, aux_loss_coeff=0.1),
    "Qwen3": dict(norm_topk_prob=True, aux_loss_coeff=0.1),
    "of one expert": dict(norm_topk_prob=False, topk=1),
    "sigmoid as it is": dict(score_function="sigmoid", norm_topk_prob=False, scaling_factor=0.7),
    "sigmoid of one": dict(score_function="sigmoid", topk=1, scaling_factor=2.5),
    "DeepSeek-V2": dict(norm_topk_prob=False, num_groups=4, group_topk=2, scaling_factor=16.0),
    "DeepSeek-V3": dict(
        score_function="sigmoid", num_groups=4, group_topk=2, group_score_topk=2,
        scaling_factor=2.5, enable_expert_bias=True, norm_topk_prob=True, aux_loss_coeff=0.1,
        shared_expert_intermediate_size=14),
    "groups of chosen logits": dict(
        num_groups=2, group_topk=1, group_score_topk=3, enable_expert_bias=True),
    "Qwen2-MoE": dict(
        norm_topk_prob=False, shared_expert_intermediate_size=14, shared_expert_gate=True),
}


@pytest.mark.parametrize("backend", slow_but([None], [None, "aot_eager"]))
@pytest.mark.parametrize("name", OPTIONS)
def test_small_options_are_the_layers(name, backend):
    """To the bit in eager mode; with padding, and in training and evaluation."""
    options = dict(OPTIONS[name])
    mine = MoE(H, F_, 12, options.pop("topk", K), **options)
    if mine.expert_bias is not None:
        mine.expert_bias.copy_(0.1 * torch.randn(12))
    with torch.no_grad():
        mine.router.mul_(20)                            # so that groups and factors matter
    whole = layer_like(mine)
    x = torch.randn(5, 7, H, requires_grad=True)
    function = compiled(mine, backend)
    for training, mask in itertools.product((True, False), ([], [torch.rand(5, 7) < 0.3])):
        mine.train(training), whole.train(training)
        got, want = step(mine, x, *mask, function=function), step(whole, x, *mask)
        if backend is None:
            same(got, want)
        else:
            close(got, want, 1e-5)
    if mine.aux_loss_coeff:
        mine.finish_step()
        mine.train(), whole.train(), step(mine, x), step(whole, x)
        close(mine.balance_loss, load_balancing_metrics(whole)["load_balancing_loss"][0], 1e-6)
        close(mine.max_violation, load_balancing_metrics(whole)["max_violation"][0], 1e-6)


@pytest.mark.parametrize("backend", slow_but([None], [None, "aot_eager", "inductor"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_keeps_as_few_bytes(dtype, backend):
    """small.py keeps what the layer keeps: x, fc1's output, ids, probs, and in eager mode the
    activation. It keeps a little more: the counts [E] and their sum, and with a loss n_e [E], which
    the layer keeps where no hook sees it. The backend aot_eager then also keeps T ones, with which
    the loss is summed in the backward."""
    T, width, experts = 256, 64, 8
    for case in ("plain", "shared", "sigmoid and loss"):
        kept = []
        for layer in pair(case, dtype, sizes=(width, 32, experts, 4)):
            function = layer if backend is None else compiled(layer, backend)
            x = torch.randn(T, width, dtype=dtype, requires_grad=True)
            kept.append(saved_bytes(lambda: function(x), exclude=layer.parameters()))
        loss = case == "sigmoid and loss"
        more = 8 + experts * (8 + 4 * loss) + 4 * (T + 1) * (loss and backend == "aot_eager")
        assert kept[0] <= kept[1] + more, (case, kept, more)
