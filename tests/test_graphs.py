"""Tests of what the compiler makes of the layer: how many graphs, which kernels and bytes, the same
bits again, export, and of the ops that the graphs hold.

    python -m pytest tests/test_graphs.py
    python -m pytest tests/test_graphs.py -k test_graph_      one section, by its tests' first word

The words: graph, compile, experts.
"""
import dataclasses
import functools
import importlib
import itertools
import math
import re
import sys
import textwrap
import types

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, metrics
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.utils._pytree import tree_map_only

import compat
import grouped
import kernels
import maps
import prune
import router as router_file
import shared_experts
import small
from grouped import grouped_mm
from kernels import (
    activation, combine_rows, compute_routing_scores_for_aux_loss, expert_mlp, gather_rows,
    get_updated_expert_bias, plan_permutation, quantile_expert_bias, required_bias_histogram,
    sinkhorn, switch_load_balancing_loss_func, z_loss_func)
from maps import (
    apply_router_token_dropping, pad_routing_map, permute, sort_chunks_by_idxs, swiglu_back,
    topk_routing_with_score_function, unpermute, weighted_swiglu)
from moe import (
    MoEConfig, MoELayer, SharedExpertMLP, SharedExpertState, TopKRouter, load_balancing_metrics,
    record_routing, replay_routing, update_expert_bias)
from ranks import parallel, sharding
from test_maps import there_and_back
from test_moe import (
    ACTIVATIONS, CONFIGS, DEVICE, EAGER_WAYS, LAYER, LOSSES, WAYS, Watch, about, about_the_cpu,
    agree, checkpointed, close, compiled, exact_config, exact_layer, fp32_leaf, fresh_start, grads,
    graphs_made, leaf, of_module, on_device, ops_of, outcome, random_indices, random_layer, run_as,
    same, saved_bytes, slow, slow_but, small_config, small_layer, twin, with_native_products,
    with_triton)

SOURCES = *LAYER, maps, prune, sharding, parallel


# ---- One graph for every configuration ----

def graphs_over_T(
    layer, sizes, mask: bool = False, given: bool = False, axes: tuple = (2,), **how,
) -> int:
    """How many graphs the compiled layer needs for inputs [T, *axes, H] of these T. Each result is
    that of eager mode."""
    function = compiled(layer, **how)
    for T in sizes:
        calls = []
        for _ in range(2):
            padding = torch.rand(T, *axes) < 0.2 if mask else None
            choice = None
            if given:
                choice = random_indices(T * math.prod(axes), 4, layer.config.topk, repeats=0.3)
            calls.append((leaf(T, *axes, 6), padding, choice))
        with about(f"T = {T}"):
            agree(function, layer, *calls)
    return graphs_made()


@slow
@pytest.mark.parametrize("name, first, dynamic", [
    ("losses", 4, True), ("losses", 1000, True),
    *itertools.product(CONFIGS, [7], [None, True])])
def test_graph_with_overlap(name, first, dynamic):
    """What eager mode gives. Two graphs, the second for every T, with a mask; or a dynamic one from
    the first call, with a replayed choice. The first T may be E, or the number of the losses, or of
    the histogram's bins."""
    layer = exact_layer(shared_expert_overlap=True, **CONFIGS[name])
    given = dynamic and name != "sinkhorn"
    graphs = graphs_over_T(layer, (first, 9, 40), mask=not dynamic, given=given, dynamic=dynamic)
    assert graphs == (1 if dynamic else 2)
    assert layer.shared_experts._overlap_state is SharedExpertState.IDLE


@slow
@pytest.mark.parametrize("overlap, shared, sizes, graphs", [
    (True, 8, (20, 37, 64), 2),
    (False, 8, (20, 37, 64), 2),
    (False, 8, (5,), 1),
    (False, None, (5,), 1)])
def test_graph_through_inductor(overlap, shared, sizes, graphs):
    """At T = 5, Inductor's code for CPUs read the target of a scatter before it was written
    (pytorch #185509): the gradient of the chosen scores was lost beside that of a balance loss.
    This depends on what Inductor fuses, so test_compile_without_host_sync wants no graph that
    scatters."""
    layer = exact_layer(
        shared_expert_overlap=overlap, shared_expert_intermediate_size=shared,
        load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1)
    assert graphs_over_T(layer, sizes, mask=len(sizes) > 1, backend="inductor") == graphs


@slow
@pytest.mark.parametrize("axes", [(), (2,)])
def test_graphs_over_all_T(axes):
    """Tokens [T, H], or [T, 2, H]. For T from 1 on at most four graphs: the first T, all others,
    T = 1, and where T · topk passes 32,767. One more for T = 0."""
    layer = exact_layer(load_balancing_type="aux_loss", aux_loss_coeff=0.1)
    K = layer.config.topk
    sizes = 20, 37, 1, 32768 // K + 1, 2, 1000
    assert graphs_over_T(layer, sizes, axes=axes, backend="inductor") <= 4
    assert graphs_over_T(layer, (0,), axes=axes, backend="inductor") <= 5      # all that were made


LAYERS = {
    "small": lambda: small.MoE(6, 4, 16, 2, enable_expert_bias=True, aux_loss_coeff=0.1),
    "layer": lambda: MoELayer(MoEConfig(
        6, 4, 16, 2, load_balancing_type="aux_loss", aux_loss_coeff=0.1)),
    "biased layer": lambda: MoELayer(MoEConfig(
        6, 4, 16, 2, score_function="sigmoid", enable_expert_bias=True, router_bias=True)),
}


def check_shapes_of(layer, function, shapes) -> None:
    """A step, or without gradients the outputs, for inputs of these shapes [.., H]."""
    for shape in shapes:
        x = fp32_leaf(*shape, 6)
        with about(f"x {shape}, {graphs_made()} graphs"):
            y = function(x)
            close(y, layer(x), 1e-5)
        if torch.is_grad_enabled():
            y.sum().backward()


@pytest.mark.parametrize("name", slow_but(["small"], LAYERS))
def test_graphs_of_tokens(name):
    """[T, H]: the first T, all others, T = 1 and T = 0. Without gradients one more, of few
    tokens."""
    layer = LAYERS[name]()
    check_shapes_of(layer, compiled(layer), [(20,), (37,), (1,), (2,), (100,)])
    assert graphs_made() == 3
    check_shapes_of(layer, compiled(layer), [(0,)])
    assert graphs_made() == 4
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        check_shapes_of(layer.eval(), compiled(layer), [(20,), (37,), (1,), (2,), (4,), (100,)])
        assert graphs_made() == 4
        check_shapes_of(layer, compiled(layer), [(0,)])
    assert graphs_made() == 5


@pytest.mark.parametrize("name", slow_but(["small"], LAYERS))
@pytest.mark.parametrize("returned", [True, False])
def test_graph_counts_what_the_loss_leaves_out(name, returned):
    """A layer whose output the graph returns, and none whose output it does not."""
    used, unused = LAYERS[name](), LAYERS[name]()

    def both(x):
        y, z = used(x), unused(x)
        return (y, z) if returned else (y,)
    compiled(both)(fp32_leaf(20, 6))[0].sum().backward()
    counts = [layer.counts if name == "small" else layer.router.counts.last_tokens_per_expert
              for layer in (used, unused)]
    assert counts[0].sum() == 40
    assert counts[1].nansum() == (40 if returned else 0)


# As docs/compile.md counts them, for each shape [B, S] in turn.
WAYS_OF_AXES = {
    "default": [1, 2, 3, 4, 5, 6, 7, 8, 8],                  # the tenth shape is an error
    "dynamic": [1, 1, 1, 2, 3, 4, 5, 6, 6, 7],
    "a view": [1, 2, 2, 3, 3, 4, 5, 6, 6, 7],
    "flat": [1, 2, 2, 3, 3, 4, 5, 5, 5, 5],
    "flat, dynamic": [1, 1, 1, 2, 2, 3, 4, 4, 4, 4],
}


@pytest.mark.parametrize("name, way", slow_but(
    [("small", "dynamic")], itertools.product(LAYERS, WAYS_OF_AXES)))
def test_graphs_of_a_session(name, way):
    """x [B, S, H] in training, evaluation and decoding, under Dynamo's limit of 8. A view outside
    of the graph still has the axes of x; what is no view has T alone."""
    assert torch._dynamo.config.recompile_limit == 8
    layer = LAYERS[name]()
    graph = compiled(layer, dynamic=True if "dynamic" in way else None)

    def flat(x):
        if way == "a view":
            return x.flatten(0, -2)
        return small.as_no_view(x, (-1, 6)) if name == "small" else compat.as_no_view(x, (-1, 6))

    def function(x):
        return graph(x) if way in ("default", "dynamic") else graph(flat(x)).view(x.shape)

    made = []

    def run(shapes):
        for shape in shapes:
            check_shapes_of(layer, function, [shape])
            made.append(graphs_made())

    run([(4, 128), (4, 64), (8, 64)])
    layer.eval()
    with torch.no_grad():
        run([(4, 128), (1, 100), (1, 3), (1, 1), (2, 1), (4, 1)])
        if way == "default":
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                function(torch.randn(64, 1, 6))
        else:
            run([(64, 1)])
    assert made == WAYS_OF_AXES[way]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["small", "layer", "biased layer"])
def test_graph_of_one_token_calls_nothing(name, dtype):
    """Without gradients the graph for one token is code that Inductor writes, the router's product
    too: no op and no library's product but the sorts of a top k. As in eager mode, also where fp32
    products may be in bf16, and with a transposed x."""
    layer = LAYERS[name]().to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    function = compiled(layer, "inductor")
    torch.set_float32_matmul_precision("medium")
    try:
        for shape in ((1, 6), (1, 1, 6)):
            x = torch.randn(6, 1).to(dtype).t().view(shape)
            with torch.no_grad():
                y, codes = run_and_get_code(function, x)
            called = re.findall(r"(?:extern_kernels|torch\.ops)\.([\w.]+)\(", "".join(codes))
            assert codes and {*called} <= {"aten.topk.default"}, called
            want = layer(x)
            size = want.abs().max()                      # bf16 rounds what is between the products
            close(y / size, want / size, 1e-5 if dtype == torch.float32 else 1e-2)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_graphs_of_a_loss_scale():
    """aux_loss_coeff of small.py follows a GradScaler: one graph for the first value, one for all
    others. Torch 2.11 and 2.12 make one of each value."""
    layer, x = LAYERS["small"](), torch.randn(7, 6)
    function = compiled(layer, "aot_eager")
    for factor in (1.0, 2.0, 4.0, 8.0, 2.0):
        layer.aux_loss_coeff = 0.1 * factor
        close(outcome(function, x)[1], outcome(layer, x)[1], 1e-5)
    assert graphs_made() == (4 if torch.__version__ < "2.13" else 2)


@pytest.mark.parametrize("name", slow_but(["small"], LAYERS))
def test_graphs_of_ten_layers(name):
    """Compiled one by one they share their graphs: that of the first T, and that of all others."""
    layers = [LAYERS[name]() for _ in range(10)]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for T in (20, 37, 50):
        for layer in layers:
            layer(fp32_leaf(T, 6)).sum().backward()
    assert graphs_made() == 2


@pytest.mark.parametrize("way", slow_but(
    ["reentrant", "non-reentrant", "nested non in re", "compiled around non-reentrant"],
    [*WAYS][1:]))
def test_graph_with_overlap_and_checkpoints(way):
    """Two layers, with either checkpoint around the compiled ones and inside the graph: outputs,
    gradients and counts of eager mode, and without a compiler its bits."""
    layers = torch.nn.Sequential(*[
        exact_layer(
            shared_expert_overlap=overlap, shared_expert_gate=True,
            score_function="sigmoid", enable_expert_bias=True)
        for overlap in (True, False)])
    tol = 0 if way in EAGER_WAYS else 1e-9
    agree(run_as(way, layers), layers, leaf(5, 2, 6), leaf(5, 2, 6), tol=tol)
    assert layers[0].shared_experts._overlap_state is SharedExpertState.IDLE


@slow
def test_graph_of_packed_sequences_through_inductor():
    """One dynamic graph for any T and any number of sequences."""
    router = TopKRouter(small_config(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.2))
    function = compiled(router.route, "inductor", dynamic=True)
    for T, pack in ((40, [0, 3, 40]), (41, [0, 9, 9, 40, 41]), (2, [0, 2]), (90, range(91))):
        args = fp32_leaf(T, 8), None, None, torch.tensor([*pack])
        got, want = [[y, *grads(y, [args[0], router.weight])] for y in (
            function(*args)[0], router.route(*args)[0])]
        close(got, want, 1e-5)
    assert graphs_made() == 1


# ---- Kernels, bytes, repeatability ----

@pytest.fixture
def no_cpp_compiler(monkeypatch):
    """Inductor generates its kernels, but none is compiled or run. Counts and sizes are right; the
    numbers are zeros."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def zeros(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", zeros)
    def no_kernel(*args):                                    # which could leave any number of a row
        for x in args:
            if isinstance(x, Tensor) and x.dtype == torch.int64:
                x.zero_()
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: no_kernel)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield
    PyCodeCache.cache_clear()


def check_keeps_little(*backends: str | None, fp8: bool = False) -> None:
    """A bf16 layer keeps tokens and fc1's output for the backward, 5 % more, ids, probs and logits,
    in eager mode the activation's output too; not the gathered rows."""
    T, H, F_, E, K = 256, 64, 32, 8, 4
    layer = MoELayer(MoEConfig(
        H, F_, E, topk=K, params_dtype=torch.bfloat16, activation_fp8_input_store=fp8)).to(DEVICE)
    x = torch.randn(T, H).to(DEVICE, torch.bfloat16).requires_grad_()
    most = 1.05 * (2 * T * H + (1 if fp8 else 2) * T * K * 2 * F_) + T * K * (3 * 8 + 8) + T * E * 4
    if DEVICE != "cpu":
        most += 4 * (E + 2 * T * K)                             # the index of batches
    for backend in backends:
        function = compiled(layer, backend)
        kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
        eager = backend is None
        assert kept <= most + eager * 2 * T * K * F_, (backend, kept)


@about_the_cpu("it stands in for a card")
def test_experts_formulas_for_cuda_keep_as_little(monkeypatch, no_cpp_compiler):
    with_native_products(monkeypatch)
    check_keeps_little("inductor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {}, dict(activation="relu2"), dict(latent_size=8), dict(latent_size=4),
    dict(shared_expert_intermediate_size=12, add_bias_linear=True)])
def test_experts_flops_are_counted(options, dtype):
    """By torch.utils.flop_counter: forward and backward, as many as dense products on the N rows
    of the assignments, and the router's. In eager mode the backward multiplies by fc1 once more,
    and the gradient of fc1's bias is a product with eight columns of ones."""
    from torch.utils.flop_counter import FlopCounterMode
    T, H, F_, E, K = 10, 16, 8, 4, 2
    layer = MoELayer(MoEConfig(H, F_, E, topk=K, params_dtype=dtype, **options))
    x = fp32_leaf(T, H).to(dtype)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    parts, width = layer.config.parts, options.get("latent_size", H)
    Fs = options.get("shared_expert_intermediate_size", 0)
    want = 2 * T * H * E + 2 * T * K * (parts + 1) * F_ * width + 2 * T * 3 * Fs * H
    if width != H:
        want += 2 * 2 * T * H * width
    if options.get("add_bias_linear"):
        want += 2 * T * E * H                            # probs [T, E] · fc2_bias
    assert forward.get_total_flops() == want
    again = 2 * T * K * parts * F_ * width
    if DEVICE == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None:
        again += 2 * 2 * 2 * T * H * E               # the router's two gradients, in three parts
        if options.get("add_bias_linear"):
            again += 2 * 2 * T * H * E                   # that of fc2's bias
    sums = 0
    if options.get("add_bias_linear"):
        sums = 2 * T * K * parts * F_ * 8
    assert backward.get_total_flops() == 2 * want + again + sums


def calls_of_a_step(**fields) -> list[list[str]]:
    """What the generated code of forward and backward calls, in its order: ops by their names, and
    "kernel" for each that Inductor has written."""
    torch._dynamo.reset()
    function = compiled(MoELayer(MoEConfig(64, 32, 16, topk=4, **fields)), "inductor")
    x = fp32_leaf(512, 64)
    _, codes = run_fw_bw_and_get_code(lambda: function(x))
    names = r"(cpp_fused)\w*\(|(?:extern_kernels|ops\.aten|ops\.moe_\w+)\.(\w+)(?:\.\w+)?\("
    return [["kernel" if kernel else name
             for kernel, name in re.findall(names, code[code.index("def call("):])]
            for code in codes]


@slow
@about_the_cpu("the code of its compiler")
def test_compile_experts_run_in_this_order(no_cpp_compiler):
    """No product runs twice, and what the backward makes again it makes after the gradient."""
    def products(**fields):
        return [[name for name in calls if name == "copy_after" or name.startswith("rows_times")]
                for calls in calls_of_a_step(**fields)]
    weights, rows, copy_ = "rows_times_weights", "rows_times_rows", "copy_after"
    assert products() == [[weights, weights], [copy_, weights, rows, weights, rows]]
    assert products(activation_fp8_input_store=True) == [
        [weights, copy_, weights], [copy_, weights, rows, weights, rows]]


@slow
@about_the_cpu("the code of its compiler")
def test_compile_what_a_step_runs(no_cpp_compiler):
    if torch.__version__[:4] != "2.13":
        pytest.skip("another torch, another order")

    def ran(**fields) -> str:
        codes = calls_of_a_step(**fields)
        return "\n\n".join(textwrap.fill(" ".join(calls), 80) for calls in codes)

    assert_expected_inline(ran(), """\
product_in topk kernel sort kernel searchsorted kernel sort kernel
rows_times_weights kernel rows_times_weights kernel

copy_after kernel rows_times_weights kernel rows_times_rows rows_times_weights
kernel rows_times_rows kernel write kernel product_in product_in kernel""")
    assert_expected_inline(ran(latent_size=16, latent_norm=True), """\
product_in topk kernel sort kernel searchsorted kernel sort mm kernel
rows_times_weights kernel rows_times_weights kernel mm

mm mm kernel copy_after kernel rows_times_weights kernel rows_times_rows
rows_times_weights kernel rows_times_rows kernel mm kernel write product_in
product_in addmm""")
    assert_expected_inline(ran(activation_fp8_input_store=True), """\
product_in kernel topk kernel sort searchsorted kernel rows_times_weights sort
kernel copy_after kernel kernel rows_times_weights kernel

copy_after kernel rows_times_weights kernel rows_times_rows rows_times_weights
kernel rows_times_rows kernel write kernel product_in product_in kernel""")


@slow
@about_the_cpu("the code of its compiler")
@pytest.mark.parametrize("count, fields", [
    (33, dict(latent_size=256, latent_norm=True)),
    (24, dict()),
    (24 + 2 * compat.cpu_multiplies_in(torch.bfloat16), dict(params_dtype=torch.bfloat16)),
    (24, dict(latent_size=256))])
def test_compile_loops_and_bytes(count, fields, no_cpp_compiler):
    """How many loops the kernels of torch 2.13 hold says what is fused; two more where the product
    is torch's own, for the number of routed rows, forward and backward. Kept for the backward:
    T·H + 2·T·ℓ + N·2F elements, in eager mode another N·F, indices and probs, and at most 1% more.
    The norm of latent experts keeps another T·ℓ, and more in eager mode."""
    T, H, F_, K = 512, 512, 256, 8
    layer = MoELayer(MoEConfig(H, F_, 16, topk=K, **fields))
    function = compiled(layer, "inductor")
    x = leaf(T, H, dtype=layer.config.params_dtype)
    metrics.reset()
    function(x).sum().backward()
    if torch.__version__[:4] == "2.13":
        assert metrics.generated_kernel_count == count
    norm = fields.get("latent_norm", False)
    latent = (2 + norm) * T * fields.get("latent_size", 0)
    least = x.element_size() * (T * H + latent + T * K * 2 * F_)
    small = T * K * (8 + 8 + 4) + T * 4 * 16
    for call in (function,) if norm else (layer, function):
        kept = saved_bytes(lambda: call(x), exclude=layer.parameters())
        activated = x.element_size() * T * K * F_ * (call is layer)
        assert least + activated <= kept <= 1.01 * least + activated + small


@slow
def test_compile_no_tokens_in_bf16():
    """Where the product is torch's own, as on an H100: for an empty [0, H], Inductor computes
    strides of the transpose that the product refuses."""
    layer = MoELayer(MoEConfig(32, 16, 8, topk=2, params_dtype=torch.bfloat16))
    function = compiled(layer, "inductor")
    for T in (0, 5):
        x = leaf(T, 32, dtype=torch.bfloat16)
        close(outcome(function, x), outcome(layer, x), 5e-2)


@slow
def test_compile_fp8_store_halves_what_bf16_keeps():
    check_keeps_little(None, "inductor", fp8=True)
    plain = MoELayer(MoEConfig(64, 32, 16, topk=8, params_dtype=torch.bfloat16))
    layer = twin(plain, activation_fp8_input_store=True)
    x = leaf(256, 64, dtype=torch.bfloat16)
    same(layer(x), plain(x))
    close(outcome(layer, x)[1], outcome(plain, x)[1], 0.05)


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_compile_bitwise_repeatable(backend):
    layer = MoELayer(MoEConfig(64, 32, 16, topk=4, add_bias_linear=True, **LOSSES))
    function = compiled(layer, backend)
    x = fp32_leaf(257, 64)
    first = outcome(function, x)
    for _ in range(20):
        same(outcome(function, x), first)


@slow
def test_compile_no_recompile_over_T():
    """One dynamic graph from T = 2 on, and one more beyond 32767 assignments, where a sort's own
    lowering guards. T = 0 and T = 1 may each have a graph of their own."""
    layer = MoELayer(MoEConfig(
        8, 4, 16, topk=8, load_balancing_type="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.1,
        router_bias=True, add_bias_linear=True))
    function = compiled(layer, "inductor", dynamic=True)
    for most, *sizes in [
            (1, 64), (1, 2, 3, 17, 100, 1000, 4095), (2, 4096, 4097, 5000, 8192),
            (4, 0, 1, 0, 1, 65)]:
        for T in sizes:
            function(fp32_leaf(T, 8)).sum().backward()
        assert graphs_made() <= most


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_compile_sums_over_tokens_lose_little(backend):
    """One sum in a graph, on a CPU, is 4e-6 off."""
    scores = torch.rand(8192, 64)
    function = compiled(kernels.weighted_token_sum, backend)
    for e, factors in enumerate(torch.eye(64)):
        exact = scores[:, e].double().sum()
        assert abs(function(scores, factors) - exact) <= 3e-7 * exact


@about_the_cpu("names of ops in a profile")
@slow
@pytest.mark.parametrize("fields, backend", [
    *((fields, "aot_eager") for fields in ({}, ACTIVATIONS[5], ACTIVATIONS[9])),
    *((fields, "inductor") for fields in (
        dict(latent_size=4, shared_expert_intermediate_size=8, capacity_factor=0.5),
        dict(params_dtype=torch.bfloat16, activation_fp8_input_store=True)))])
def test_compile_few_tokens_read_weights_where_they_are(fields, backend):
    """Few assignments without gradients: no plan, and no grouped product, which would multiply row
    by row. With a dynamic T there are two graphs, of few and of more; in an export there is one."""
    layer = random_layer(exact_config(num_experts=16, add_bias_linear=True, **fields)).eval()
    dtype = layer.config.params_dtype
    tol = 1e-9 if dtype == torch.float64 else 0.02
    function = compiled(layer, backend, dynamic=False)

    def ops(T):
        x = torch.randn(T, 1, 6, dtype=dtype)
        function(x)                                                  # compiles
        with torch.profiler.profile() as profile:
            function(x)
        return {event.key.partition("::")[2] for event in profile.key_averages()}

    with torch.no_grad():
        for T in (1, 2, 4):
            torch._dynamo.reset()                                    # which bounds recompilations
            given = torch.tensor([[4, 1], [16, 2], [16, 16], [0, 15]])[:T]         # 16: unrouted
            padding = (torch.arange(T) % 2 == 1)[:, None]
            for x in torch.randn(3, T, 1, 6, dtype=dtype):
                for rest in ((), (padding, given)):
                    close(function(x, *rest), layer(x, *rest), tol)
        used = {"sort", "rows_times_weights"}
        if "capacity_factor" in fields:                           # a drop sorts too
            used = {"rows_times_weights"}
        if dtype == torch.float64:                                # bf16: torch's own, on some CPUs
            assert used <= ops(T=17)
        assert not used & ops(T=16) and "product_in" in ops(T=16)         # the router's

        torch._dynamo.reset()
        function = compiled(layer, backend, dynamic=True)
        counters.clear()
        for T in (2, 17, 4, 30, 16, 9):
            x = torch.randn(T, 1, 6, dtype=dtype)
            close(function(x), layer(x), tol)
        if dtype == torch.float64:
            assert used <= ops(T=20)
        assert not used & ops(T=5)
        assert graphs_made() == 2

        torch._dynamo.reset()                                        # as in use: automatic
        function = compiled(layer, backend)
        counters.clear()
        for T in (30, 1, 9, 17, 4, 1, 16, 12, 3, 40):
            x = torch.randn(T, 1, 6, dtype=dtype)
            close(function(x), layer(x), tol)
        assert graphs_made() <= 4

        x = torch.randn(30, 1, 6, dtype=dtype)
        T = torch.export.Dim("T", min=1, max=100)
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: T},)).module()
        for T in (1, 4, 30):
            close(program(x[:T]), layer(x[:T]), tol)


def test_compile_few_tokens_are_less_on_a_card(monkeypatch):
    """At most E / 2 assignments, since nobody has measured more there."""
    asked = []
    monkeypatch.setattr(
        kernels, "holds_in_this_graph", lambda holds: asked.append(bool(holds)) or False)
    layer = small_layer(num_experts=16)
    for device, T, want in (("cpu", 16, True), ("cpu", 17, False), ("meta", 4, True),
                            ("meta", 5, False)):
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(layer.to_empty(device=device), "eager")(torch.empty(T, 8, device=device))
        assert asked.pop() is want, (device, T)


@about_the_cpu("the code generated for it")
@pytest.mark.parametrize("transposed", [False, True])
def test_compile_few_tokens_make_no_tensor_of_weights(transposed):
    """Of the weights that are read nothing is as large as those of one expert."""
    E, T, K, H, F_ = 64, 4, 4, 32, 16
    fc1, fc2 = torch.randn(E, 2, F_, H), torch.randn(E, H, F_)
    if transposed:                                   # parts interleaved, as gpt_oss has them
        fc1 = fc1.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        fc2 = fc2.mT.contiguous().mT
    x, probs = torch.randn(T, H), torch.rand(T, K)
    indices = random_indices(T, E, K)

    def mlp(x, probs, indices):
        return kernels.expert_mlp(
            x, probs, kernels.plan_permutation(indices, E), fc1, fc2, indices=indices)

    with torch.no_grad():
        y, (code,) = run_and_get_code(compiled(mlp, "inductor", dynamic=False), x, probs, indices)
        close(y, mlp(x, probs, indices), 1e-5)
    sizes = [math.prod(map(int, re.findall(r"\d+", shape)))
             for shape in re.findall(r"empty_strided_cpu\(\((.*?)\),", code)]
    assert 0 < max(sizes) <= T * K * 2 * F_ and "sort" not in code

VARIANTS = {name: small_config(shared_expert_intermediate_size=8, **fields) for name, fields in {
    **{kind: dict(activation=kind) for kind in kernels.ACTIVATIONS},
    **CONFIGS,
    "fp8": dict(activation_fp8_input_store=True),
    "bf16": dict(params_dtype=torch.bfloat16, router_dtype=torch.bfloat16, router_bias=True),
    "random": dict(CONFIGS["losses"], force_load_balancing=True, input_jitter_eps=0.1,
                   capacity_factor=2.0),
    "chosen": dict(CONFIGS["bias and groups"], load_balancing_type="aux_loss", aux_loss_coeff=0.1,
                   add_bias_linear=True, router_bias=True),
}.items()}


@pytest.mark.parametrize("name", slow_but([*CONFIGS, "chosen"], VARIANTS))
def test_compile_without_host_sync(name):
    """The joint graph holds no .item(), no nonzero, no unbacked size: ready for CUDA graphs and
    export. It has no scatter (see test_graph_through_inductor), except where integers are added."""
    from torch._functorch.aot_autograd import aot_module_simplified
    targets = []

    def record(graph_module, _):
        for node in graph_module.graph.nodes:
            targets.append(str(node.target))
            shape = getattr(node.meta.get("val"), "shape", ())
            assert not any(str(size).startswith("u") for size in shape)
        return graph_module

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=record, bw_compiler=record)
    config = VARIANTS[name]
    x = leaf(6, 2, 8, dtype=config.params_dtype)
    layer = MoELayer(config)
    compiled(layer, backend)(x).sum().backward()
    if "seq_aux_loss" in config.balancing:
        pack = x.view(12, 8), None, None, torch.tensor([0, 5, 5, 12])
        compiled(layer, backend)(*pack).sum().backward()
        assert any("searchsorted" in target for target in targets)
    assert any("aten.sort" in target for target in targets)
    for op in ("_local_scalar_dense", "nonzero", "aten.item", "aten.scatter."):
        assert not [target for target in targets if op in target]


@pytest.mark.parametrize("name", VARIANTS)
def test_compile_needs_no_numbers(name):
    """On the meta device a layer gives shapes and dtypes, also under the autocast of another."""
    config = VARIANTS[name]
    with torch.device("meta"):
        layer = MoELayer(config)
    x = torch.empty(6, 2, 8, dtype=config.params_dtype, device="meta", requires_grad=True)
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast):
            y = layer(x)
        found = y, *grads(y, [x, *layer.parameters()])
        for given, tensor in zip([x, x, *layer.parameters()], found, strict=True):
            assert tensor.is_meta and [tensor.shape, tensor.dtype] == [given.shape, given.dtype]


def all_kernels(tokens, logits, y, w):
    """A number that depends on every function of kernels.py."""
    T, E = logits.shape
    bias = logits.detach()[0]
    probs, routing_map = topk_routing_with_score_function(
        logits, 2, num_groups=2, group_topk=1, expert_bias=bias)
    probs, routing_map = apply_router_token_dropping(
        probs, routing_map, 2, capacity_factor=1.0, pad_to_capacity=True)
    rows, row_probs, index = permute(
        tokens, pad_routing_map(routing_map, 2), probs, num_out_tokens=T * 4)
    out = unpermute(
        rows * row_probs[:, None], index, tokens.shape, probs=probs, routing_map=routing_map)

    indices = topk_routing_with_score_function(logits, 2, dense_output=True)[1]
    plan = plan_permutation(indices, E)
    gathered = gather_rows(tokens, plan)
    out = out + combine_rows(grouped_mm(gathered, w, plan.offsets), plan, probs[:, :2])
    out = out + combine_rows(gathered, plan) @ w[0].t()
    chunks = sort_chunks_by_idxs(gathered, plan.counts, torch.arange(E - 1, -1, -1))[0]

    map_TE, scores = compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    counts = map_TE.sum(0)
    loss = z_loss_func(logits, 0.1) + switch_load_balancing_loss_func(
        scores, counts, T, topk=2, num_experts=E, moe_aux_loss_coeff=0.1)
    bias = get_updated_expert_bias(counts.float(), bias, 0.1)
    histogram = required_bias_histogram(scores, bias, 2, num_bins=50)
    bias = bias + quantile_expert_bias(histogram, bias, 2)
    loss = loss + sinkhorn(logits).sum() + bias.sum()
    out = out.sum() + weighted_swiglu(y, row_probs[:T, None]).sum()
    return out + chunks[:T].sum() + loss


def second_derivatives():
    """(name, function of one tensor, its argument): what is public and has a gradient."""
    plan = plan_permutation(random_indices(6, 4, 2), 4)
    routing_map = torch.rand(6, 4) < 0.5
    fc1, fc2 = leaf(4, 2, 5, 8), leaf(4, 8, 5)
    for kind in kernels.ACTIVATIONS:
        yield kind, lambda y, kind=kind: activation(y, kind), leaf(6, 8)
    yield "swiglu_back", lambda y: swiglu_back(y[:, :4], y), leaf(6, 8)
    yield "expert_mlp", lambda x: expert_mlp(x, torch.rand(6, 2), plan, fc1, fc2), leaf(6, 8)
    yield "grouped_mm", lambda x: grouped_mm(x.square(), fc2, plan.offsets), leaf(12, 8)
    yield "gather_rows", lambda x: gather_rows(x, plan), leaf(6, 8)
    yield "combine_rows", lambda x: combine_rows(x, plan, torch.rand(6, 2)), leaf(12, 8)
    yield "route", lambda x: topk_routing_with_score_function(x, 2)[0], leaf(6, 4)
    yield "z_loss", lambda x: z_loss_func(x, 0.1), leaf(6, 4)
    yield "permute", lambda x: permute(x, routing_map)[0], leaf(6, 8)
    yield "unpermute", lambda x: unpermute(x, torch.arange(6) // 2, (3, 8)), leaf(6, 8)
    yield "chunks", lambda x: sort_chunks_by_idxs(x, plan.counts[:1], plan.counts[:1] * 0)[0], leaf(
        int(plan.counts[0]), 8)
    yield "gate", lambda x: kernels.router_gating_linear(
        x, fc2[0].t(), bias=None, router_dtype=torch.float64), leaf(6, 8)
    yield "shared", SharedExpertMLP(exact_config(), gate=True), leaf(6, 6)
    yield "router", TopKRouter(exact_config()).gating, leaf(6, 6)
    yield "layer", exact_layer(), leaf(6, 6)


@about_the_cpu("its products are ops of grouped.py")
def test_compile_selective_checkpoints_add_no_product():
    """Under a trainer's checkpoint that keeps products there are as many as without: in eager mode
    the six, and that with fc1 once more."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    layer = small_layer()
    products = [getattr(torch.ops.moe_grouped, name).default
                for name in ("rows_times_weights", "rows_times_rows")]
    kept = [*products, torch.ops.moe_kernels.product_in.default, torch.ops.aten.topk.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.ops += [op] if op in products else []
            return op(*args, **kwargs or {})

    x = fp32_leaf(7, 8)
    with Count() as plain:
        agree(layer, layer, x, tol=0)
    with Count() as again:
        agree(of_module(layer, lambda layer, x: checkpoint(
            layer, x, use_reentrant=False, context_fn=contexts)), layer, x, tol=0)
    assert len(plain.ops) == len(again.ops) == 2 * 7


def test_compile_second_derivatives_are_right_or_refused():
    """Where a backward is written by hand, autograd would take what is kept for constants. So these
    are right, or an error of this project, and never a number that is wrong."""
    refused = []
    for name, function, x in second_derivatives():
        def slope(x):
            return torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)[0]
        with about(name):
            try:
                got, = torch.autograd.grad(slope(x).square().sum(), x)
            except RuntimeError as failed:
                assert "this project has only first derivatives" in str(failed)
                refused.append(name)
                continue
            v = torch.randn_like(x)                          # along v, by differences
            up, down = [torch.autograd.grad(function(y).sin().sum(), y)[0].square().sum()
                        for y in (x + 1e-5 * v, x - 1e-5 * v)]
            close((got * v).sum(), (up - down) / 2e-5, 1e-5)
    assert refused == [
        "swiglu_back", "expert_mlp", "grouped_mm", "gather_rows", "combine_rows", "route", "z_loss",
        "gate", "router", "layer"]
    function = compiled(exact_layer())
    x = leaf(6, 6)
    with pytest.raises(RuntimeError, match="double backward|create_graph"):
        slope, = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
        slope.sum().backward()


@slow
def test_compile_every_kernel():
    """Every function of kernels.py is in one dynamic graph, forward and backward, for T >= 2."""
    function = compiled(all_kernels)
    for T in (9, 2, 31, 4096):
        torch.manual_seed(T)
        shapes = (T, 6), (T, 4), (T, 8), (4, 6, 6)
        args = [fp32_leaf(*shape) for shape in shapes]
        for tensor in args[:3]:
            torch._dynamo.mark_dynamic(tensor, 0)
        agree(function, all_kernels, tuple(args), tol=1e-4)
    assert graphs_made() == 1


@slow
@pytest.mark.parametrize("name", [*CONFIGS, "losses and a capacity"])
def test_compile_export_with_dynamic_T(name):
    """Export takes the length of an axis for symbolic where it is `x.shape[0]`, and for a constant
    where it is `len(x)`."""
    fields = CONFIGS.get(name, dict(LOSSES, capacity_factor=0.8))
    whole = small_layer(**{"shared_expert_intermediate_size": 8, **fields})
    one_sequence = twin(whole, batch_first=None)
    K = whole.config.topk
    for training, masked, given, flat in itertools.product([False, True], repeat=4):
        layer = one_sequence if flat else whole

        def inputs(n):
            axes = [n] if flat else [n, 3]
            x = torch.randn(*axes, 8)
            mask = torch.rand(axes) < 0.2 if masked else None
            choice = random_indices(math.prod(axes), 6, K).view(*axes, K) if given else None
            return x, mask, choice

        layer.train(training)
        first = {0: torch.export.Dim("length", min=1, max=65536)}
        shapes = first, first if masked else None, first if given else None
        with about(f"training {training}, masked {masked}, given {given}, flat {flat}"):
            program = torch.export.export(layer, inputs(12), dynamic_shapes=shapes)
            for n in (1, 5, 300):
                args = inputs(n)
                same(program.module()(*args), layer(*args))


def transposed(x: Tensor) -> Tensor:
    """x with its last two axes swapped in memory; along one axis, every second number of it."""
    return x.mT.contiguous().mT if x.ndim > 1 else torch.stack((x, x), x.ndim).select(x.ndim, 0)


def expanded(x: Tensor) -> Tensor:
    """x with its first row everywhere, once in memory."""
    return x[:1].expand_as(x) if x.ndim else x


def test_compile_ops_pass_opcheck(monkeypatch):
    """Every op of the project, with contiguous, transposed and expanded inputs: among other things
    its fake gives the strides of its results, without which Inductor's code fails in an assertion.
    """
    indices = random_indices(9, 4, 2)
    plan = plan_permutation(indices, 4)
    offsets = plan.offsets
    x, w, b = torch.randn(9, 8), torch.randn(4, 6, 8), torch.randn(4, 6)
    rows, h = torch.randn(18, 8), torch.randn(18, 6)
    of_all = offsets.new_tensor([2, 2, 9])                   # leaves no row unrouted
    with_triton(monkeypatch)
    fp32, bf16 = torch.float32, torch.bfloat16
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(shared_experts, "_current_stream", lambda device: stream)
    monkeypatch.setitem(shared_experts._SIDE_STREAMS, x.device, stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    calls = [
        (compat.copy_after, torch.ones(()), x),
        (compat.copy_after, x, x),
        (kernels._sinkhorn, x, 1e-4, None),
        (kernels._sinkhorn, x, 1e-4, x[:, 0] > 0),
        (grouped._rows_times_weights, rows, w.transpose(1, 2), b, offsets),
        (grouped._rows_times_weights, h, w, None, offsets),
        (grouped._rows_times_rows, rows, h, offsets, False),
        (grouped._rows_times_rows, rows, h, offsets, True),
        (grouped._triton_rows_times_weights, rows, w.transpose(1, 2), offsets),
        (grouped._triton_rows_times_weights, h, w, offsets),
        (grouped._triton_rows_times_rows, rows, h, offsets, False),
        (grouped._triton_rows_times_rows, rows, h, offsets, True),
        (grouped._read_on_host, offsets),
        (kernels._product_in, torch.randn(4, 9), x, torch.float64, fp32),
        (kernels._product_in, torch.randn(4, 9), x, fp32, fp32),
        (kernels._product_in, torch.randn(4, 9), x, fp32, bf16, torch.randn(8)),
        *[(kernels._rounded_probs, x.to(bf16), None, None, score, None, 0.0, None)
          for score in kernels.SCORE_FUNCTIONS],
        (kernels._rounded_probs, x.to(bf16), indices, None, "softmax", "softmax", 0.0, None),
        (kernels._rounded_probs, x.to(bf16), indices, indices, "sigmoid", "sum", 0.0, 2.5),
        (kernels._count_slots, indices.flatten(), 4),
        (router_file._write, torch.zeros(4), torch.ones(4), x, True),
        (shared_experts._fork_stream, x),
        (shared_experts._join_stream, x, [h, w]),
        (small.loop_over_experts, x, torch.randn(3, 8, 5), of_all),
        (small.loop_over_experts, x.t(), h[:9], of_all),
        (small.upcast_product, torch.randn(4, 9), x, fp32),
        (small.upcast_product, torch.randn(4, 9).to(bf16), x.to(bf16), bf16)]
    assert {op._qualname for op, *_ in calls} == {
        op._qualname for op in ops_of(*SOURCES, small)}

    written = [args[0] for op, *args in calls if op._opoverload._schema.is_mutable]
    for layout in (torch.Tensor.contiguous, transposed, expanded):
        for op, *args in calls:
            # Rows beyond all offsets are not initialised, and no op can write to an expanded
            # tensor.
            fixed = [of_all, *written] if layout is expanded else []
            given = tree_map_only(
                Tensor, lambda x: x if any(x is y for y in fixed) else layout(x), tuple(args))
            with about(f"{layout.__name__} {op._name}"):
                torch.library.opcheck(op, given)


def test_compile_ops_that_decide_on_the_host_stay_out_of_cuda_graphs():
    def left_out(*modules):
        return sorted(op._name for op in ops_of(*modules)
                      if torch.Tag.cudagraph_unsafe in op._opoverload.tags)
    assert left_out(*SOURCES) == [
        "read_on_host", "rows_times_rows", "rows_times_weights"]
    assert left_out(small) == ["loop_over_experts"]


@slow
def test_compile_buffers_that_a_backward_writes_have_fixed_addresses(monkeypatch):
    """A CUDA graph may hold a write to an input whose address it may rely on, and no other: so the
    ops that count are in it."""
    written = []

    def look(gm, inputs, **kwargs):
        if kwargs.get("is_backward"):
            places = [node for node in gm.graph.nodes if node.op == "placeholder"]
            for node in gm.graph.nodes:
                if "auto_functionalized" in str(node.target):
                    written.extend(places.index(x) in kwargs["static_input_idxs"]
                                   for x in node.kwargs["_all_bases"])
        return make_boxed_func(gm.forward)
    backend = functools.partial(compile_fx.compile_fx, inner_compile=look)
    layer = small_layer(score_function="sigmoid", enable_expert_bias=True, **LOSSES)
    torch.compile(layer, fullgraph=True, backend=backend)(fp32_leaf(20, 1, 8)).sum().backward()
    assert len(written) >= len(LOSSES) and all(written)


def test_compile_private_names_of_torch(monkeypatch):
    """What the section of this name in compat.py relies on, each by its effect or its absence."""
    assert kernels.as_number(2.5) == 2.5
    function = torch.compile(
        lambda x, by: x * math.ceil(kernels.as_number(by)), backend="eager", fullgraph=True,
        dynamic=True)
    for by in (1.5, 2.5):
        same(function(torch.ones(2), by), torch.full((2,), float(math.ceil(by))))
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(compat.cpu_multiplies_in(dtype), bool)
        with monkeypatch.context() as without:
            without.setattr(torch.backends.mkldnn, "is_available", lambda: False)
            assert compat.cpu_multiplies_in(dtype) is False

    one = torch.ones(1, 1, device="cpu")
    assert not compat.is_any_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compat.is_any_autocast() and (one @ one).dtype == torch.bfloat16
        with compat.op_without_autocast():
            assert (one @ one).dtype == torch.float32

    x = leaf(4, 3)
    assert x.sin().view(12)._is_view() and not compat.as_no_view(x.sin(), (12,))._is_view()
    assert compat.with_fixed_address(torch.zeros(2))._dynamo_static_input_type == "unguarded"
    assert compat.with_fixed_address(torch.zeros(2))._dynamo_static_indices == {0}
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2)
        layer = MoELayer(small_config(**LOSSES))
        layer(torch.randn(5, 1, layer.config.hidden_size)).sum().backward()
    assert compat.has_values(x) and not compat.has_values(fake)
    assert not compat.has_values(x.to("meta"))
    with compat.reads_on_host():
        assert torch._dynamo.config.capture_scalar_outputs
    assert not torch._dynamo.config.capture_scalar_outputs and not compat.makes_cuda_graphs()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert compat.makes_cuda_graphs()

    ran = []
    first, second = x.sin(), x.cos()
    for name, y in (("first", first), ("second", second)):
        y.register_hook(lambda grad, name=name: ran.append((name, compat.in_backward())))
    assert compat.backward_order(second.grad_fn) > compat.backward_order(first.grad_fn)
    compat.set_backward_order(first.grad_fn, compat.backward_order(second.grad_fn) + 1)
    (first * second).sum().backward()
    assert ran == [("first", True), ("second", True)] and not compat.in_backward()

    class Keeper(torch.nn.Module):
        @compat.unchecked_side_effects
        def keep(self, x):
            self.kept = x

        def forward(self, x):
            self.keep(x.sin())
            return x.cos()
    keeper = Keeper()
    torch.compile(checkpointed(keeper, False), backend="eager", fullgraph=True)(x)
    same(keeper.kept, x.sin())


@slow
def test_compile_rounds_the_steps_of_narrow_probs():
    """Logits and probs in bf16: a graph's are those of eager mode bit by bit, and the gradient is
    as near to fp64 as that of eager mode."""
    bf16 = torch.bfloat16
    logits = torch.randn(300, 16).to(bf16)
    upstream = torch.randn(300, 4).to(bf16)
    repeated = random_indices(300, 16, 4, repeats=0.3)
    for fields in (dict(score_function="sigmoid", scaling_factor=2.5),
                   dict(score_function="sqrtsoftplus", norm_eps=1e-3),
                   dict(use_pre_softmax=True, precomputed_indices=repeated)):
        def route(logits, **further):
            probs, indices = kernels.topk_routing(logits, 4, **{**fields, **further})
            return probs.detach(), indices, *grads(probs, [logits], upstream.to(probs.dtype))

        torch._dynamo.reset()
        x = logits.clone().requires_grad_()
        narrow = functools.partial(route, x, probs_dtype=bf16)
        with about(fields):
            probs, indices, grad = narrow()
            function = compiled(
                lambda x: kernels.topk_routing(x, 4, probs_dtype=bf16, **fields),
                backend="inductor")
            got = function(x)
            same([y.detach() for y in got], [probs, indices])
            exact = route(logits.double().requires_grad_(), precomputed_indices=fields.get(
                "precomputed_indices", indices))[2]
            errors = [(y - exact).norm() / exact.norm()
                      for y in (*grads(got[0], [x], upstream), grad)]
            assert errors[0] < 1.1 * errors[1] and errors[1] < 0.02


def no_float64(name, args, out) -> None:
    """A device without float64, as Apple's and Intel's: refused in every op."""
    for x in torch.utils._pytree.tree_leaves((args, out)):
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            raise TypeError(f"{name}: this device has no float64")


@pytest.mark.parametrize("name", VARIANTS)
def test_compile_nothing_is_float64_without_a_float64_input(name):
    """pytorch #122602, torch-xpu-ops #1742: forward, backward, both bias updates and metrics."""
    config = dataclasses.replace(VARIANTS[name], shared_expert_overlap=True)
    with Watch(no_float64, into=SOURCES):
        with pytest.raises(TypeError, match="no float64"):
            kernels._product_in(*[torch.ones(2, 2)] * 2, torch.float64, torch.float64)
        layer = MoELayer(config)
        x = leaf(5, 3, 8, dtype=config.params_dtype)
        layer(x, torch.rand(5, 3) < 0.2).sum().backward()
        assert sharding.gradient_norm(layer, None).dtype == torch.float32
        update_expert_bias(layer)
        layer.router.reset_global_aux_loss_tracker()
        load_balancing_metrics(layer, reduce=True)
        with record_routing(layer) as record:
            layer.eval()(x)
        with replay_routing(layer, record.indices):
            layer(x)
        there_and_back(x[0], torch.ones(3, 2).bool(), torch.rand(3, 2), 5)


def test_compile_kernels_under_a_name_with_a_hyphen(monkeypatch):
    """Op names are made of the module's name, whatever it is."""
    spec = importlib.util.spec_from_file_location("my-kernels", kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my-kernels", module)
    spec.loader.exec_module(module)
    assert module.sinkhorn(torch.zeros(2, 2)).tolist() == [[0.25, 0.25], [0.25, 0.25]]
    op = torch.ops.moe_my_kernels.sinkhorn.default
    assert op.name() == "moe_my_kernels::sinkhorn"
