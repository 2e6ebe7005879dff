"""Tests of torch's settings for a whole process: autocast, the precision of products, the default
dtype and device. What has to be in fp32 is, whatever they say.

    python -m pytest tests/test_settings.py
"""
import copy
import warnings

import pytest
import torch

import compat
import grouped
import kernels
from kernels import sinkhorn
from moe import MoEConfig, MoELayer, set_aux_loss_scale
from prune import select_experts
from test_moe import (
    DEVICE, LAYER, WAYS, Watch, close, compiled, error, exact_layer, fp32_leaf, fresh_start, grads,
    leaf, on_device, outcome, random_layer, run_as, same, slow_but, small_config, small_layer, twin)


def test_experts_backward_ignores_autocast():
    layer = MoELayer(MoEConfig(6, 5, 4, topk=2, init_std=0.5, add_bias_linear=True))
    x = fp32_leaf(9, 6)
    leaves = [x, *layer.parameters()]
    want = grads(layer(x), leaves)
    y = layer(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = grads(y, leaves)
    same(got, want)


@pytest.mark.parametrize("way", slow_but(["plain"], ["plain", "compiled"]))
def test_layer_router_stays_fp32(way):
    """In a bf16 model and under autocast, also compiled (megablocks #91, prime-rl #2952)."""
    bf16 = torch.bfloat16
    for dtype, weight_dtype in ((bf16, bf16), (bf16, torch.float32), (torch.float32,) * 2):
        layer = small_layer(params_dtype=dtype, init_std=0.3)
        layer.router.to(weight_dtype)
        function = WAYS[way](layer)
        x = leaf(50, 8, dtype=dtype)
        want = layer(x)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
            logits = layer.router.gating(x)
            y = function(x)
        assert logits.dtype == torch.float32 and y.dtype == dtype
        close(logits, x.double() @ layer.router.weight.double().t(), 1e-5)
        inputs = [x, *layer.parameters()]
        assert [g.dtype for g in grads(y, inputs)] == [p.dtype for p in inputs]
        close(y, want, 0.05)
    assert not torch.equal(y, want)                  # under autocast the experts ran in bf16


def test_layer_fp64_stays_under_autocast():
    """As in torch's own products, in each of the layer's parts."""
    layer = exact_layer(
        add_bias_linear=True, latent_size=4, latent_norm=True, shared_expert_gate=True)
    x = leaf(9, 1, 6)
    want = outcome(layer, x)
    for function in (layer, run_as("compiled", layer)):
        with torch.autocast(DEVICE, torch.bfloat16):
            close(outcome(function, x), want)


def test_layer_dtype_casts_keep_the_expert_bias():
    """fp32 through casts and round trips: steps of 1e-3 vanish in bf16 (Megatron-LM #1482)."""
    layer = small_layer(enable_expert_bias=True)
    want = torch.tensor([1.001, 1.002, -0.5003, 0.0, 0.1, 0.2])
    layer.router.expert_bias.copy_(want)
    for cast in (MoELayer.half, MoELayer.double, lambda layer: layer.to(torch.bfloat16),
                 MoELayer.bfloat16, copy.deepcopy):
        layer = cast(layer)
        same(layer.router.expert_bias, want)
    assert layer.router.weight.dtype == torch.bfloat16
    same(twin(layer).bfloat16().router.expert_bias, want)


def set_precision(how: str) -> None:
    """Lets products of fp32 operands be in bf16 or TF32, where the device has instructions."""
    if how.startswith("torch.backends"):
        torch.backends.fp32_precision = how.split()[-1]
    else:
        torch.set_float32_matmul_precision(how)


@pytest.mark.parametrize("how", ["medium", "high", "torch.backends bf16", "torch.backends tf32"])
def test_router_fp32_products_are_in_fp32(monkeypatch, how):
    """prime-rl #2952: whatever the user sets, these are in fp32, eager and compiled: logits and
    their gradients, P · fc2_bias, gradients of the experts' biases, sinkhorn. The setting stays as
    it is, also where it is inherited."""
    matmuls = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    seen = {}

    def note(name, args, out):
        for op in watch.inside:
            if name in ("matmul", "mm", "bmm", "_grouped_mm"):
                if op == "rows_times_rows" and args[1].shape[-1] == 8:
                    op = "sums of rows"                      # a product with eight columns of ones
                seen.setdefault(op, set()).update(matmul.fp32_precision for matmul in matmuls)
    if DEVICE != "cpu":                                      # Triton is told for each product
        triton = grouped._triton()
        rows_times_rows = triton.rows_times_rows

        def noted(a, b, offsets, exact):
            if b.shape[-1] == 8:
                seen.setdefault("sums of rows", set()).add(triton.precision(a.dtype, exact))
            return rows_times_rows(a, b, offsets, exact)
        monkeypatch.setattr(triton, "rows_times_rows", noted)
    try:
        set_precision("torch.backends none")
        set_precision("highest")
        for matmul in matmuls:
            matmul.fp32_precision = "none"
        layer = random_layer(small_config(
            hidden_size=64, num_experts=16, add_bias_linear=True, router_bias=True, init_std=1.0))
        x = fp32_leaf(512, 64)
        router = layer.router
        logits = x.double() @ router.weight.double().t() + router.bias.double()
        upstream = torch.randn(512, 16)
        leaves = [x, router.weight, router.bias]
        want = [logits, *grads(logits, leaves, upstream.double())]

        set_precision(how)
        before = [matmul.fp32_precision for matmul in matmuls]
        for gating in (router.gating, compiled(router.gating)):
            got = gating(x)
            for a, b in zip([got, *grads(got, leaves, upstream)], want):
                assert (a - b).norm() <= 1e-6 * b.norm()
        with Watch(note, into=LAYER) as watch:
            sinkhorn(torch.randn(8, 4))
            layer(x).sum().backward()
        for op in ("product_in", "sums of rows", "sinkhorn"):
            assert seen[op] <= {"ieee", "none"}, op          # none: nothing is set, so fp32
        assert [matmul.fp32_precision for matmul in matmuls] == before
        if how.startswith("torch.backends"):
            torch.backends.fp32_precision = "ieee"
            assert {matmul.fp32_precision for matmul in matmuls} == {"ieee"}
    finally:
        set_precision("torch.backends none")
        set_precision("highest")


def test_router_writes_no_global_setting_without_need(monkeypatch):
    """The switches of all threads are written where one says TF32 or bf16, and then set back."""
    class Setting:
        def __init__(self, precision):
            vars(self).update(fp32_precision=precision, written=[])

        def __setattr__(self, name, value):
            vars(self)[name] = value
            self.written.append(value)
    x, weight = torch.randn(5, 8), torch.randn(4, 8)
    for precision, written in (("none", []), ("ieee", []), ("tf32", ["ieee", "none", "tf32"])):
        settings = [Setting(precision), Setting("ieee")]
        monkeypatch.setattr(compat, "_PRECISIONS", settings)
        kernels.router_gating_linear(x, weight, None, router_dtype=torch.float32)
        assert settings[0].written == written and settings[0].fp32_precision == precision
        assert settings[1].written == []


def test_router_token_counts_ignore_the_default_dtype():
    """By calculate_per_token_loss a loss is multiplied by 301 tokens, which bf16 rounds to 302."""
    layer = small_layer(
        load_balancing_type=("seq_aux_loss", "global_aux_loss"), aux_loss_coeff=(0.1, 0.2),
        calculate_per_token_loss=True)
    x = torch.randn(301, 1, 8)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        layer.router.reset_global_aux_loss_tracker()
        try:
            torch.set_default_dtype(dtype)
            results.append(grads(layer(x).sum(), [layer.router.weight]))
        finally:
            torch.set_default_dtype(torch.float32)
    same(*results)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_loss_scale_of_each_model(backend):
    """Two models with two scales, set between forward and backward: each one's gradients have its
    own. The scale stays through casts, copies, resets, a new choice of experts, and whatever is on
    where it is set; the expert bias's counts and state dicts know nothing of it."""
    options = dict(load_balancing_type="aux_loss", aux_loss_coeff=0.3, z_loss_coeff=0.1)
    models = [torch.nn.Sequential(exact_layer(**options)) for _ in range(2)]
    x = leaf(7, 1, 6)

    def gradient(model, *scale):
        y = compiled(model, backend)(x)
        for other, value in zip(models, scale):
            set_aux_loss_scale(other, value)
        return grads(y, [model[0].router.weight], torch.zeros_like(y))[0]

    alone = [gradient(model) for model in models]
    for scales in ((0.25, 3.0), (torch.tensor(2.0, requires_grad=True) * 2, 0.5)):
        for model, want, scale in zip(models, alone, scales):
            close(gradient(model, *scales), want * scale)
    first, second = models
    for on in (torch.inference_mode(), torch.no_grad(), torch.device("meta")):
        with on:
            set_aux_loss_scale(first, 8.0)
        close(gradient(first), alone[0] * 8)
    first.to(torch.bfloat16).to(torch.float64)
    first[0].router.reset_counts()
    scale = first[0].router.counts.loss_scale
    assert scale == 8 and scale.dtype == torch.float32 and not scale.requires_grad
    first[0] = select_experts(copy.deepcopy(first)[0], range(first[0].config.num_experts))
    assert first[0].router.counts.loss_scale == 8 and second[0].router.counts.loss_scale == 0.5
    assert not any("scale" in name for name in first.state_dict())


def test_loss_scale_refusals():
    """Nothing changes before all routers are known to take it. From the meta device a layer begins
    with a scale of 1."""
    model = torch.nn.Sequential(small_layer(), small_layer().to("meta"))
    assert "needs a float or a 0-d tensor" in error(set_aux_loss_scale, model, torch.ones(2))
    assert "1.router is on the meta device" in error(set_aux_loss_scale, model, 2.0)
    assert model[0].router.counts.loss_scale == 1
    assert "has no Router" in error(set_aux_loss_scale, torch.nn.Linear(2, 2), 2.0)
    assert "model is float; needs a Module" in error(set_aux_loss_scale, 2.0, model)
    model.to_empty(device=DEVICE)
    set_aux_loss_scale(model[0], 2.0)
    assert [layer.router.counts.loss_scale for layer in model] == [2, 1]
    model.to("meta").to_empty(device=DEVICE)                 # the scale is lost, and known to be
    counts = model[0].router.counts
    assert counts.loss_scale == 1 and not counts.has_scale
    layer = small_layer().to("meta")                             # its weight comes without `_apply`
    layer.router.weight = torch.nn.Parameter(torch.randn(layer.router.weight.shape))
    set_aux_loss_scale(layer, 2.0)
    assert layer.router.counts.loss_scale == 2


@pytest.mark.parametrize("way", slow_but(["plain"], ["plain", "compiled"]))
def test_router_warns_of_fp16_without_a_loss_scale(way):
    """A GradScaler cannot be seen, but autocast to fp16 can. No scale is needed without balance
    losses, in bf16, or where this model has one."""
    balanced = small_layer(load_balancing_type="aux_loss", aux_loss_coeff=0.1)

    def warnings_of(layer, dtype):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, torch.autocast(DEVICE, dtype):
            warnings.simplefilter("always")
            WAYS[way](layer)(fp32_leaf(5, 8)).sum().backward()
        return sum("set_aux_loss_scale was never called" in str(w.message) for w in caught)
    assert warnings_of(balanced, torch.float16) == 1
    assert warnings_of(balanced, torch.bfloat16) == 0
    assert warnings_of(small_layer(), torch.float16) == 0
    set_aux_loss_scale(small_layer(), 2.0)
    assert warnings_of(balanced, torch.float16) == 1
    set_aux_loss_scale(balanced, 2.0)
    assert warnings_of(balanced, torch.float16) == 0


def test_shared_under_autocast():
    """The products run in bf16; the sum with the routed experts' output is in fp32."""
    layer = exact_layer(
        shared_expert_overlap=True, shared_expert_gate=True, latent_size=7, latent_norm=True,
        init_std=0.3, params_dtype=torch.float32, router_dtype=torch.float32)
    x = fp32_leaf(9, 6)
    exact = outcome(layer, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = outcome(layer, x)
        whole = outcome(compiled(layer), x)
    assert not torch.equal(got[0], exact[0])
    without_counts = 2 + len([*layer.parameters()])
    for a, b, c in [*zip(got, whole, exact, strict=True)][:without_counts]:
        assert a.dtype == b.dtype == torch.float32
        unit = c.abs().max().item()
        close(a, c, 0.05 * unit)
        close(b, a, 0.02 * unit)
