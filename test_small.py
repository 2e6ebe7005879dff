"""Tests of small.py, against its own plain loop. It needs small.py beside it, torch and pytest.

    python -m pytest test_small.py
    SLOW=1 python -m pytest test_small.py       the slow tests too
    DEVICE=cuda python -m pytest test_small.py  on that device
"""
import copy
import functools
import importlib.util
import itertools
import os
import pickle
import re
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

if __package__:                                      # copied into a package
    from . import small
    from .small import MoE
else:
    import small
    from small import MoE

DEVICE = torch.device(os.environ.get("DEVICE", "cpu")).type
slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="slow: runs with SLOW=1")
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU")


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test draws from one seed, on DEVICE, and leaves no compiled code behind."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    torch.set_default_device(None if DEVICE == "cpu" else DEVICE)
    yield
    torch.set_default_device(None)


def close(got, want, tol: float = 1e-9) -> None:
    """Tensors, or lists of them. `want` is cast to the dtype of `got`."""
    if isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, want.to(got.dtype), rtol=tol, atol=tol)
    else:
        for pair in zip(got, want, strict=True):
            close(*pair, tol)


def same(got, want) -> None:
    """Equal to the last bit, dtypes too."""
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def grads(output, inputs, upstream=None) -> list[torch.Tensor]:
    if upstream is None:
        upstream = torch.ones_like(output)
    return list(torch.autograd.grad(output, inputs, upstream))


def error(function, *args, **kwargs) -> str:
    """The type and text of the error that a call raises."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


def compiled(function, backend="aot_eager", **kwargs):
    """One graph; the function itself where the backend is None."""
    if backend is None:
        return function
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


def graphs_made() -> int:
    return counters["stats"]["unique_graphs"]


def set_precision(how: str) -> None:
    """Lets products of fp32 operands be in bf16 or TF32, where the device has instructions."""
    if how.startswith("torch.backends"):
        torch.backends.fp32_precision = how.split()[-1]
    else:
        torch.set_float32_matmul_precision(how)


H, F_, E, K = 12, 10, 6, 3
GROUPS = "num_groups", "group_topk", "group_score_topk"
CASES = {
    "plain": {},
    "sigmoid": dict(score_function="sigmoid"),
    "bias": dict(score_function="sigmoid", enable_expert_bias=True),
    "softmax and bias": dict(enable_expert_bias=True),
    "loss": dict(aux_loss_coeff=0.1),
    "sigmoid and loss": dict(score_function="sigmoid", aux_loss_coeff=0.1),
    "shared": dict(shared_expert_intermediate_size=14),
    "all": dict(
        score_function="sigmoid", enable_expert_bias=True, aux_loss_coeff=0.1,
        shared_expert_intermediate_size=14),
}


def layer_of(case: str, dtype=torch.float32, sizes=(H, F_, E, K)) -> MoE:
    """The layer of a case. Its bias, if any, is random."""
    layer = MoE(*sizes, **CASES[case]).to(dtype)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(0.1 * torch.randn(sizes[2]))
    return layer


def step(layer, x, *mask, autocast=False, function=None) -> list[torch.Tensor]:
    """The output, and the gradients of x and all parameters."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y = (layer if function is None else function)(x, *mask)
    leaves = [x, *layer.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y.backward(torch.arange(1.0, 1 + y.numel(), device=y.device).sin().view_as(y).to(y))
    slopes = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [y.detach(), *slopes]


def test_small_equals_its_loop():
    """In fp64, where the layer is the loop but for rounding."""
    layer = MoE(H, F_, E, K).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
    x = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    y = small.moe_loop(x, layer.router, layer.fc1, layer.fc2, topk=K)
    close(layer(x), y)
    close(grads(layer(x), [x, *layer.parameters()]), grads(y, [x, *layer.parameters()]))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=slow)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_small_reads_the_weights_of_few_tokens_in_place(monkeypatch, dtype, backend):
    """Few assignments without gradients: like the plan's in eager mode, without a sort. With a
    dynamic T there are two graphs, of few and of more."""
    layer = MoE(H, F_, 4, 2, enable_expert_bias=True).to(dtype).eval()
    products = []
    multiply = small.multiply
    monkeypatch.setattr(small, "multiply", lambda *args: products.append(1) or multiply(*args))
    most = 4 if DEVICE == "cpu" else 1
    for dynamic, sizes in ((False, (1, 4, 5)), (True, (2, 30, 4, 3, 31))):
        torch._dynamo.reset()
        counters.clear()
        function = compiled(layer, backend, dynamic=dynamic)
        tol = 1e-9 if dtype == torch.float64 else 0.02
        for T in sizes:
            x = torch.randn(T, H, dtype=dtype)
            padding = torch.arange(T) % 3 == 1
            with torch.no_grad():
                close(function(x, padding), layer(x, padding), tol)
                products.clear()
                function(x, padding)
            assert bool(products) == (T > most)
        assert graphs_made() == (2 if dynamic and most > 1 else 1 if dynamic else 3)


def test_small_takes_as_many_tokens_as_a_mask_has():
    """A size that is known only when the graph runs: no guard can ask whether they are few."""
    layer = layer_of("plain").eval()

    def of_some(x, mask):
        return layer(x[mask])
    x, mask = torch.randn(9, H), torch.arange(9) % 3 == 0
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        close(compiled(of_some)(x, mask), of_some(x, mask), 1e-6)


@on_the_cpu
def test_small_takes_the_products_of_the_layer(monkeypatch):
    """torch's in bf16, on a CPU with instructions for that; else a loop, in fp32 if there are none
    for the dtype."""
    calls = []
    for name in ("grouped_mm", "mm"):
        module = torch.nn.functional if name == "grouped_mm" else torch
        product = getattr(module, name)
        monkeypatch.setattr(module, name, lambda a, *args, product=product, name=name, **kwargs: (
            calls.append(f"{name} {a.dtype}"), product(a, *args, **kwargs))[1])
    layer = MoE(16, 8, 4, 2)
    for has_bf16, dtype, want in [
            (True, torch.bfloat16, {"grouped_mm torch.bfloat16"}),
            (False, torch.bfloat16, {"mm torch.float32"}),
            (True, torch.float16, {"mm torch.float32"}),
            (False, torch.float32, {"mm torch.float32"})]:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
        calls.clear()
        step(layer.to(dtype), torch.randn(64, 16, dtype=dtype, requires_grad=True))
        assert set(calls) == want, (has_bf16, dtype, calls)

    calls.clear()                                        # one token: two experts, seven products
    _, _, _, *weights = step(MoE(16, 8, 64, 2), torch.randn(1, 16, requires_grad=True))
    assert calls == 14 * ["mm torch.float32"]
    assert all(weight.flatten(1).any(1).sum() == 2 for weight in weights)


@slow
@pytest.mark.parametrize("case", CASES)
def test_small_compiled(case):
    """One graph for the first T and one for all others; few tokens too, where Inductor's scatter
    would lose a gradient, and more than 4096, where one sum over tokens would be made anew."""
    layer = layer_of(case)
    function = compiled(layer, "inductor")
    for T in (20, 8, 33, 4100):
        x = torch.randn(T, 1, H, requires_grad=True)
        mask = torch.rand(T, 1) < 0.2
        want = step(layer, x, mask)
        counts = layer.counts.clone()
        close(step(layer, x, mask, function=function), want, 1e-5)
        same(layer.counts, 2 * counts)
        layer.counts.zero_()
    assert graphs_made() <= 2


def test_small_compiled_for_any_length_at_once():
    """One graph from the first call on, which has as many tokens as there are experts."""
    layer = layer_of("all")
    function = compiled(layer, dynamic=True)
    for T in (E, 7, 40):
        step(layer, torch.randn(T, H, requires_grad=True), function=function)
    assert graphs_made() == 1


@pytest.mark.parametrize("shape", [(0, H), (2, 0, H), (1, H), (2, 3, 4, H)])
def test_small_any_number_of_tokens(shape):
    layer = layer_of("all")
    x = torch.randn(shape, requires_grad=True)
    for function in (layer, compiled(layer)):
        y, *slopes = step(layer, x, function=function)
        assert y.shape == x.shape
        assert all(slope.isfinite().all() for slope in slopes)


@slow
def test_small_no_tokens_in_bf16():
    """For an empty [0, H], Inductor computes strides of the transpose that torch's product
    refuses."""
    layer = layer_of("plain", torch.bfloat16, sizes=(16, 8, 32, 2))
    x = torch.randn(0, 16, dtype=torch.bfloat16, requires_grad=True)
    for result in step(layer, x, function=compiled(layer, "inductor")):
        assert not result.any()


@pytest.mark.parametrize("dtype, sizes, tol", [
    (torch.float32, (H, F_, E, K), 1e-6), (torch.bfloat16, (16, 8, E, K), 2e-2)])
def test_small_padding_reaches_nothing(dtype, sizes, tol):
    """All padding, and memory that nobody writes holds NaN, of which autograd sees none."""
    layer = layer_of("bias", dtype, sizes)
    x = torch.randn(10, sizes[0], dtype=dtype, requires_grad=True)
    mask = torch.arange(10) >= 6
    torch.use_deterministic_algorithms(True)             # fills new memory with NaN
    try:
        with torch.autograd.detect_anomaly():
            y, slope, *_ = step(layer, x, mask)
            some = step(layer, x, torch.ones(10, dtype=torch.bool))
    finally:
        torch.use_deterministic_algorithms(False)
    alone = x[:6].detach().requires_grad_()
    want, want_slope, *_ = step(layer, alone)
    close((y[:6], slope[:6]), (want, want_slope), tol)   # products of other shapes round otherwise
    assert not any(tensor[6:].any() for tensor in (y, slope))
    assert not any(tensor.any() for tensor in some)
    assert layer.counts.sum() == 2 * 6 * K


def test_small_bias_stays_in_fp32_and_moves_by_the_sign():
    layer = layer_of("bias", torch.bfloat16)
    before = layer.expert_bias.clone()
    x = torch.randn(50, H, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    counts = layer.counts.double()
    assert counts.sum() == 50 * K
    layer.finish_step()
    close(layer.expert_bias, before + 1e-3 * (counts.mean() - counts).sign(), 1e-7)
    assert layer.expert_bias.dtype == torch.float32 and not before.equal(layer.expert_bias)
    assert not layer.counts.any()
    for name in ("half", "double", "float"):
        same(getattr(copy.deepcopy(layer), name)().expert_bias, layer.expert_bias)
    state = layer.state_dict()
    assert set(state) == {"router", "fc1", "fc2", "expert_bias"}

    torch.set_default_dtype(torch.bfloat16)
    try:
        made = MoE(H, F_, E, K, enable_expert_bias=True)
        made.counts[1] = 7
        made.finish_step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.expert_bias.abs().unique().tolist() == [torch.tensor(1e-3).item()]    # not bf16's
    assert made.router.dtype == torch.bfloat16 and made.expert_bias.dtype == torch.float32
    assert made.counts.dtype == made.leaf.dtype == torch.float32
    made.load_state_dict({name: value.bfloat16() for name, value in state.items()}, assign=True)
    made.counts[0] = 9
    made.finish_step()
    assert made.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("way", ["copied", "copied in place", "assigned", "drawn"])
def test_small_from_meta(way):
    """Whatever fills a layer that was made on meta, its counts begin with 0 and its bias moves."""
    layer = layer_of("all")
    with torch.device("meta"):
        made = MoE(H, F_, E, K, **CASES["all"])
    torch.use_deterministic_algorithms(True)             # fills new memory
    try:
        if way != "assigned":
            made.to_empty(device=DEVICE)
        if way == "drawn":
            torch.manual_seed(0)
            made.reset_parameters()
            torch.manual_seed(0)
            layer = MoE(H, F_, E, K, **CASES["all"])
        elif way == "copied in place":                   # as torch.distributed.checkpoint does
            for name, value in made.state_dict().items():
                value.copy_(layer.state_dict()[name])
        else:
            state = copy.deepcopy(layer.state_dict())
            made.load_state_dict(state, assign=way == "assigned")
    finally:
        torch.use_deterministic_algorithms(False)
    x = torch.randn(40, H, requires_grad=True)
    same(step(made, x), step(layer, x))
    before = layer.expert_bias.clone()
    for one in (made, layer):
        one.finish_step()
    same(made.expert_bias, layer.expert_bias)
    assert not before.equal(layer.expert_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [DEVICE, "meta"])
def test_small_flops_are_counted(device, dtype):
    """By torch.utils.flop_counter, on the meta device too: forward and backward as many as dense
    products on the N rows. In eager mode the backward multiplies by fc1 once more, but on meta."""
    T, H, F_, E, K, Fs = 10, 16, 8, 4, 2, 24
    with torch.device(device):
        layer = MoE(
            H, F_, E, K, enable_expert_bias=True, aux_loss_coeff=0.1, num_groups=2, group_topk=1,
            group_score_topk=2, shared_expert_intermediate_size=Fs, shared_expert_gate=True,
        ).to(dtype)
        x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    want = 2 * T * H * E + 2 * T * K * 3 * F_ * H + 2 * T * 3 * Fs * H + 2 * T * H
    again = 0 if device == "meta" else 2 * T * K * 2 * F_ * H
    if device == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None:
        again += 2 * 2 * 2 * T * H * E               # the router's two gradients, in three parts
    assert forward.get_total_flops() == want
    assert backward.get_total_flops() == 2 * want + again


@pytest.mark.parametrize("case", CASES)
def test_small_on_the_meta_device(case):
    """Forward and backward give shapes and dtypes, also where autocast is on for another device."""
    with torch.device("meta"):
        layer = layer_of(case, torch.bfloat16)
        x = torch.randn(2, 5, H, dtype=torch.bfloat16, requires_grad=True)
        padding_mask = torch.zeros(2, 5, dtype=torch.bool)
    for autocast in (False, True):
        for like, found in zip([x, x, *layer.parameters()],
                               step(layer, x, padding_mask, autocast=autocast), strict=True):
            assert found.is_meta and found.shape == like.shape and found.dtype == like.dtype
    with torch.no_grad():
        assert layer.eval()(x).is_meta


@pytest.mark.parametrize("compile", [False, True])
def test_small_router_under_autocast(compile):
    """Its product is in fp32, also in a backward inside autocast, and in that of a graph."""
    layer = layer_of("loss")
    function = compiled(layer) if compile else layer
    x = torch.randn(40, H, requires_grad=True)
    leaves = [x, *layer.parameters()]
    upstream = torch.randn(40, H)
    with torch.autocast(DEVICE, torch.bfloat16):
        same(layer.route(x), layer.route(x.detach()))
        assert layer.route(x)[0].dtype == torch.float32
        inside = grads(function(x), leaves, upstream)
        y = function(x)
        eager = layer(x)
    for other in (grads(y, leaves, upstream), grads(eager, leaves, upstream)):
        for got, want in zip(inside, other):
            assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("compile", [False, True])
def test_small_fp64_stays_under_autocast(compile):
    """As in torch's own products."""
    layer = layer_of("all").double()
    function = compiled(layer) if compile else layer
    x = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    close(step(layer, x, function=function, autocast=True), step(layer, x))


def test_small_makes_no_gradient_that_nobody_wants(monkeypatch):
    """One product for the logits, and one for each operand that wants a gradient."""
    calls = []
    product = small.upcast_product
    monkeypatch.setattr(small, "upcast_product", lambda *args: calls.append(1) or product(*args))
    for want_x, want_router in ((True, True), (True, False), (False, True)):
        layer = layer_of("sigmoid")
        layer.router.requires_grad_(want_router)
        x = torch.randn(9, H, requires_grad=want_x)
        calls.clear()
        layer(x).sum().backward()
        assert len(calls) == 1 + want_x + want_router
        assert [x.grad is None, layer.router.grad is None] == [not want_x, not want_router]


@pytest.mark.parametrize("how", ["medium", "high", "torch.backends bf16", "torch.backends tf32"])
def test_small_logits_are_in_fp32(monkeypatch, how):
    """Whatever precision the user sets for products, eager and compiled. The test notes the setting
    while the operands are read, since not every CPU has other instructions. Afterwards the user's
    setting is as before, also where it is inherited."""
    settings = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    x, router = [torch.randn(n, 64, requires_grad=True) for n in (512, 16)]
    upstream = torch.randn(512, 16)
    right = x.double() @ router.double().t()
    want = [right, *grads(right, [x, router], upstream.double())]
    seen = []
    upcast = small.upcast

    def noting(x):
        seen.extend(setting.fp32_precision for setting in settings)
        return upcast(x)
    monkeypatch.setattr(small, "upcast", noting)
    try:
        set_precision("torch.backends none")
        set_precision("highest")
        for setting in settings:
            setting.fp32_precision = "none"
        set_precision(how)
        before = [setting.fp32_precision for setting in settings]
        for function in (small.Logits.apply, compiled(small.Logits.apply, "inductor")):
            seen.clear()
            logits = function(x, router)
            for got, exact in zip([logits, *grads(logits, [x, router], upstream)], want):
                assert (got - exact).norm() <= 1e-6 * exact.norm()
            assert seen and set(seen) <= {"ieee", "none"}            # none: nothing is set, so fp32
            assert [setting.fp32_precision for setting in settings] == before
        if how.startswith("torch.backends"):
            torch.backends.fp32_precision = "ieee"
            assert {setting.fp32_precision for setting in settings} == {"ieee"}
    finally:
        set_precision("torch.backends none")
        set_precision("highest")


@pytest.mark.parametrize("reentrant", [False, True])
def test_small_checkpoint_in_a_graph(reentrant):
    layer = layer_of("all")
    x = torch.randn(20, H, requires_grad=True)
    want = step(layer, x)
    counts = layer.counts.clone()
    layer.counts.zero_()
    again = functools.partial(checkpoint, layer, use_reentrant=reentrant)
    function = torch.compile(again, backend="aot_eager")
    close(step(layer, x, function=function), want, 1e-6)
    same(layer.counts, counts)


def test_small_frozen_experts_cost_no_product(monkeypatch):
    layer = layer_of("plain")
    layer.fc1.requires_grad_(False)
    calls = []
    product = small.grouped_mm
    monkeypatch.setattr(small, "grouped_mm", lambda *args: calls.append(1) or product(*args))
    layer(torch.randn(5, H, requires_grad=True)).sum().backward()
    assert len(calls) == 6 and layer.fc2.grad is not None and layer.fc1.grad is None


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_small_under_a_checkpoint(reentrant, backend):
    """The same gradients and counts."""
    layer = layer_of("all")
    x = torch.randn(20, H, requires_grad=True)
    want = step(layer, x)
    counts = layer.counts.clone()
    layer.counts.zero_()
    inner = layer if backend is None else compiled(layer, backend)
    y = checkpoint(inner, x, use_reentrant=reentrant)
    inner(x.detach()).sum().backward()                   # two forwards in flight
    layer.zero_grad()
    y.backward(torch.arange(1.0, 1 + y.numel()).sin().view_as(y))
    close([y, x.grad, *[weight.grad for weight in layer.parameters()]], want, 1e-6)
    same(layer.counts, 2 * counts)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_small_counts_once_for_each_backward(backend):
    """With a frozen router too, and three forwards in flight. A forward without a backward is not
    counted, nor one in eval mode. One graph, and one tensor that zero_grad leaves alone."""
    layer = layer_of("all")
    layer.router.requires_grad_(False)
    function = compiled(layer, backend)
    x = torch.randn(20, H, requires_grad=True)
    place = layer.counts.data_ptr()
    for n in (3, 6, 9):
        outputs = [function(x) for _ in range(4)]
        for y in outputs[1:]:
            y.sum().backward()
        torch.optim.SGD(layer.parameters()).zero_grad()
        layer.zero_grad()
        assert layer.counts.sum() == n * 20 * K and layer.counts.dtype == torch.float32
    assert layer.counts.data_ptr() == place
    assert backend is None or graphs_made() == 1
    with torch.no_grad():
        function(x)
    layer.eval()(x).sum().backward()
    assert layer.counts.sum() == 9 * 20 * K


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "dtype", "assign", "fully_shard"])
def test_small_counts_stay_one_tensor(way):
    """What was counted stays, in fp32, and the next step adds to it."""
    layer = layer_of("bias")
    x = torch.randn(20, H, requires_grad=True)
    step(layer, x)
    counts = layer.counts.clone()
    first = layer
    layer.compile(backend="eager")                           # a copy is not compiled
    if way == "deepcopy":
        layer = copy.deepcopy(layer)
    elif way == "pickle":
        layer = pickle.loads(pickle.dumps(layer))
    elif way == "dtype":
        layer = layer.double().bfloat16().float()
    elif way == "assign":
        layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
        assert not layer.counts.any()                    # those were of the old bias
        step(layer, x)
    else:                                                # it moves all but the counts
        with torch.device("meta"):
            layer = MoE(H, F_, E, K, **CASES["bias"])
        layer.expert_bias = first.expert_bias
        for name, weight in first.named_parameters():
            setattr(layer, name, torch.nn.Parameter(weight.detach().clone()))
        step(layer, x)
    same(layer.counts, counts)
    before = layer.leaf.grad
    step(layer, x)
    step(layer, x, function=compiled(layer))
    same(layer.counts, 3 * counts)
    assert layer.leaf.grad is before and layer.counts.data_ptr() == before.data_ptr()
    assert layer is first or first.leaf.grad is not before and first.counts.equal(counts)
    assert not {id(layer.leaf), id(before)} & {
        id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}


def test_small_says_if_nothing_was_counted():
    """torch.autograd.grad counts nothing, and .backward() once is enough, at any time."""
    layer = layer_of("bias")
    x = torch.randn(20, H, requires_grad=True)
    bias = layer.expert_bias.clone()
    grads(layer(x), [x, *layer.parameters()])
    with pytest.warns(UserWarning, match="no backward has counted") as caught:
        layer.finish_step()
    assert caught[0].filename == __file__
    same(layer.expert_bias, bias)
    layer(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.finish_step()
        assert not layer.expert_bias.equal(bias)
        layer(x).sum().backward()
        copy.deepcopy(layer).finish_step()
        layer.finish_step()


def test_small_bias_of_counts_beyond_fp32():
    """Their sum is made of integers: in fp32 it would be rounded, and this step be 0 for all."""
    layer = MoE(H, F_, 4, 2, enable_expert_bias=True)
    layer.counts.fill_(2**24)
    layer.counts[0] -= 1
    layer.finish_step(rate=1.0)
    assert layer.expert_bias.tolist() == [1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=slow)])
def test_small_plan_in_a_graph(dynamic):
    """Inductor's sort and scatter, whose target other loops read: eager mode's plan."""
    def plan(indices):
        order, row_KT, offsets = small.sort_by_expert(indices, E)
        return order, row_KT, offsets, small.rows_of_each(offsets), row_KT + order[0]
    function = compiled(plan, "inductor", dynamic=dynamic)
    for n in range(30):
        indices = torch.randint(E + 1, (2 + 37 * n if dynamic else 500, K))
        same(function(indices), plan(indices))


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=slow)])
def test_small_repeats_to_the_bit(backend):
    layer = layer_of("all")
    function = compiled(layer, backend)
    x = torch.randn(40, H, requires_grad=True)
    same(step(layer, x, function=function), step(layer, x, function=function))


@on_the_cpu
def test_small_product_of_a_card(monkeypatch):
    """As a card may have it: NaN in rows that nobody writes, on a B200 also in the gradients of
    experts without rows. Taken in bf16 alone, for aligned widths and fewer than 1024 experts, on
    two generations of cards and on a CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
        for capability, name in {
                (8, 0): "none", (9, 0): "H100", (10, 0): "B200", (10, 3): "B200", (12, 0): "none"
                }.items():
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            assert small.native_product(torch.device("cuda")) == name
        assert small.native_product(torch.device("cpu")) == "bf16 CPU"
        assert small.native_product(torch.device("mps")) == "none"
        patch.setattr(torch.version, "hip", "7.0")
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        for device in ("cuda", "cpu"):
            assert small.native_product(torch.device(device)) == "none"
    calls = []
    grouped_mm = torch.nn.functional.grouped_mm

    def of_a_card(a, b, offs):
        calls.append(b.ndim)
        out = grouped_mm(a, b, offs=offs)
        if b.ndim == 3:
            out[offs[-1]:] = torch.nan
        elif small.native_product(a.device) == "B200":
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    def calls_of(*sizes, dtype=torch.bfloat16):
        layer = MoE(*sizes).to(dtype)
        x = torch.randn(9, sizes[0], dtype=dtype, requires_grad=True)
        mask = torch.arange(9) % 3 == 0
        monkeypatch.setattr(small, "native_product", lambda device: "none")
        want = step(layer, x, mask)
        for name in ("none", "H100", "B200", "bf16 CPU"):
            calls.clear()
            monkeypatch.setattr(small, "native_product", lambda device: name)
            close(step(layer, x, mask), want, 2e-2)
            yield len(calls)
    monkeypatch.setattr(small.F, "grouped_mm", of_a_card)
    assert [*calls_of(16, 8, 32, 2)] == [0, 7, 7, 7]
    assert [*calls_of(16, 8, 1023, 2)] == [0, 7, 7, 7]
    assert [*calls_of(16, 8, 1024, 2)] == [0] * 4
    assert [*calls_of(16, 12, 32, 2)] == [*calls_of(12, 16, 32, 2)] == [0] * 4
    assert [*calls_of(16, 8, 32, 2, dtype=torch.float32)] == [0] * 4


@on_the_cpu
def test_small_logits_of_threads():
    """No thread undoes the setting of another, and the user's is there afterwards."""
    a, b = torch.randn(256, 512), torch.randn(512, 64)
    exact = a.double() @ b.double()

    def largest_error(_):
        return max((small.upcast_product(a, b, torch.float32) - exact).norm() for _ in range(1000))
    try:
        torch.set_float32_matmul_precision("medium")
        before = torch.backends.mkldnn.matmul.fp32_precision
        with ThreadPoolExecutor(2) as threads:
            assert max(threads.map(largest_error, range(2))) <= 1e-6 * exact.norm()
        assert torch.backends.mkldnn.matmul.fp32_precision == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_small_output_is_no_view():
    """FSDP2 frees what a view would be of: then y += 1 fails. The gate keeps the dtype."""
    for case, training in itertools.product(("plain", "shared"), (True, False)):
        assert not layer_of(case).train(training)(torch.randn(2, 3, H))._is_view()
    layer = MoE(H, F_, E, K, shared_expert_intermediate_size=4, shared_expert_gate=True).half()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(torch.randn(3, H, dtype=torch.float16)).dtype == torch.float16


def test_small_counts_if_only_the_shared_expert_trains():
    layer = layer_of("shared").requires_grad_(False)
    layer.shared_fc2.requires_grad_(True)
    layer(torch.randn(5, H)).sum().backward()
    assert layer.counts.sum() == 5 * K


def test_small_errors():
    layer = layer_of("shared")
    x = torch.randn(4, H, requires_grad=True)
    names = dict(
        MoE=MoE, grouped=lambda *groups: MoE(12, 10, 6, 3, **dict(zip(GROUPS, groups))),
        layer=layer, x=x, double=copy.deepcopy(layer).double(),
        autocast=lambda x, layer=layer: torch.autocast(DEVICE, torch.bfloat16)(layer)(x))
    table = """
        MoE(12, 10, 6, 3, score_function="relu") => score_function is 'relu'; needs "softmax" or
        MoE(12, 10, 6, 7); MoE(12, 10, 6, 0); MoE(12, 10, 6, 2.0) => needs an integer from 1 to 6
        MoE(12, 10, 6, None); MoE(12, 10, 6, True) => ; needs an integer from 1 to 6
        MoE(12, 10, 6, 1); MoE(12, 10, 6, 1, norm_topk_prob=True) => the one prob is always 1
        MoE(12, 10, 6, 1, "sigmoid", norm_topk_prob=True) => the one prob is always 1
        MoE(12, 10, 6, 0, score_function="sigmoid") => topk is 0; needs an integer from 1
        MoE(12, 10, 6, 3, scaling_factor=float("nan")) => scaling_factor is nan; needs a finite numb
        MoE(12, 10, 6, 3, aux_loss_coeff=float("inf")) => aux_loss_coeff is inf; needs a finite numb
        MoE(12, 10, 6, 3, shared_expert_gate=True) => needs shared_expert_intermediate_size
        grouped(3, None); grouped(None, 2); grouped(None, None, 1) => needs integers
        grouped(3, 2, 1.0); grouped(3.0, 2); grouped(True, 1) => needs integers
        grouped(4, 2, 1) => group_score_topk are (4, 2, 1); needs integers: a divisor of 6 experts
        grouped(0, 2, 1); grouped(3, 1, 1); grouped(3, 4, 1); grouped(3, 2, 3) => hold topk, 3, of
        grouped(3, 2, 0); grouped(6, 4); grouped(3, 0); grouped(-3, -2, 1) => hold topk, 3, of them
        layer(x[:, :5]); layer.route(x[:, :5]) => x has shape [4, 5]; needs [.., T, 12]
        layer(x[0]); layer.route(x[0]) => x has shape [12]; needs [.., T, 12]
        layer(x.double()); autocast(x.double()) => x is torch.float64; needs torch.float32
        autocast(x, double) => x is torch.float32; needs torch.float64
        autocast(x.long()) => x is torch.int64; needs torch.float32
        layer(x, x > 0); layer(x, x[:, 0]); layer.route(x, x > 0) => padding_mask is
        """
    for row in table.strip().splitlines():
        calls, phrase = row.strip().split(" => ")
        kind = "" if "Error: " in phrase else "ValueError: "
        for call in calls.split("; "):
            text = error(eval, call, dict(names))
            assert text.startswith(kind) and phrase in text, f"{call}: {text}"
    assert "create_graph is True" in error(
        torch.autograd.grad, layer(x).sum(), [x], create_graph=True)


def test_small_prints_what_it_is():
    assert repr(MoE(12, 10, 6, 3)) == (
        "MoE(hidden_size=12, ffn_hidden_size=10, num_experts=6, topk=3)")
    layer = MoE(12, 10, 6, 3, "sigmoid", True, 0.1, 14, norm_topk_prob=False, scaling_factor=2.5,
                num_groups=3, group_topk=2, group_score_topk=1, shared_expert_gate=True)
    assert repr(eval(repr(layer))) == repr(layer) and len(layer.extra_repr().split("=")) == 15


def test_small_logs_the_loss_and_the_load():
    """Over three forwards of different sizes, with padding, beside formulas in fp64. The next step
    begins with nothing, also without a bias; a forward without a backward is not counted."""
    layer = MoE(H, F_, E, K, "sigmoid", aux_loss_coeff=0.01)
    assert layer.balance_loss.isnan() and layer.max_violation.isnan()
    values, tokens, counts = [], [], torch.zeros(E, dtype=torch.float64)
    for T in (5, 9, 20):
        x, padding = torch.randn(T, H), torch.arange(T) % 4 == 1
        layer(x, padding).sum().backward()
        logits = x[~padding].double() @ layer.router.detach().double().t()
        n = torch.nn.functional.one_hot(logits.topk(K).indices, E).sum((0, 1))
        scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
        values.append(E / K / len(logits) ** 2 * (n * scores.sum(0)).sum())
        tokens.append(len(logits))
        counts += n
    layer(x)
    close(layer.counts, counts)
    close(layer.balance_loss, sum(v * t for v, t in zip(values, tokens)) / sum(tokens), 1e-6)
    close(layer.max_violation, counts.max() / counts.mean() - 1, 1e-6)
    layer.finish_step()
    assert not layer.leaf.grad.any() and layer.balance_loss.isnan()
    layer = layer_of("bias")
    layer(x).sum().backward()
    assert layer.balance_loss == 0
    before = layer.expert_bias.clone()
    layer.finish_step(rate=0.5)
    assert (layer.expert_bias - before).abs().max() == 0.5 and not layer.counts.any()


@slow
def test_small_example():
    """The example in the docstring trains."""
    text = re.search(r"(    layer = .*?)\n\n", small.__doc__, re.S)[1]
    x = torch.randn(3, 2, 16, 64)
    names = {"MoE": MoE, "torch": torch, "data": [(z, 0.1 * z) for z in x]}
    torch.manual_seed(1)
    before = MoE(64, 32, 8, 2).router
    torch.manual_seed(1)
    exec("\n".join(line[4:] for line in text.splitlines()), names)
    assert (names["layer"].router != before).any()
    assert names["layer"].expert_bias.any() and not names["layer"].counts.any()


def test_small_says_which_torch_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0+cpu"))
    spec = importlib.util.spec_from_file_location("copied", small.__file__)
    text = error(spec.loader.exec_module, importlib.util.module_from_spec(spec))
    assert text == "RuntimeError: torch is 2.10.0+cpu; this file needs 2.11 or later"
    assert "torch 2.11 or later" in small.__doc__
    for version in ("2.11.0.dev20260101", "2.11.0a0+git", "2.15.1"):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_small_copies_do_not_collide(tmp_path):
    """Two copies of the file in one process, one of them under another name."""
    path = tmp_path / "other.py"
    path.write_text(Path(small.__file__).read_text())
    spec = importlib.util.spec_from_file_location("package.other", path)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.loop_over_experts._qualname != small.loop_over_experts._qualname
    assert other.MoE(H, F_, E, K)(torch.ones(2, H)).shape == (2, H)


def over_two_ranks(rank: int, port: int) -> None:
    """Three steps of two microbatches, under DDP and in one process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layer = MoE(H, F_, E, K, enable_expert_bias=True)
    whole = copy.deepcopy(layer)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer)
    everyone = torch.distributed.group.WORLD
    for x in torch.randn(3, 2, 2, 20, H):
        for part in x:
            whole(part.flatten(0, 1)).square().mean().backward()
            wrapped(part[rank]).square().mean().backward()
        for one in (layer, whole):
            torch.optim.SGD(one.parameters(), lr=1.0).step()
            one.zero_grad()
        before = layer.state_dict(), layer.counts.clone()
        assert "group is None and 2 ranks run" in error(layer.finish_step)
        same((layer.state_dict(), layer.counts), before)
        layer.finish_step(group=everyone)
        whole.finish_step(group=torch.distributed.new_group([rank], use_local_synchronization=True))
        same(layer.expert_bias, whole.expert_bias)
        close([*layer.parameters()], [*whole.parameters()], 1e-5)
    assert layer.expert_bias.any()

    layer(torch.randn(5 + rank, H, requires_grad=True)).sum().backward()
    again = copy.deepcopy(layer)
    layer.finish_step(group=everyone)
    torch.distributed.all_reduce(again.counts)           # counts summed twice change no sign
    again.finish_step(group=everyone)
    same(layer.expert_bias, again.expert_bias)

    if rank == 0:
        layer(torch.randn(5, H, requires_grad=True)).sum().backward()
    for warns in (rank == 1, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer.finish_step(group=everyone)
        assert any("no backward has counted" in str(one.message) for one in caught) == warns

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    sharded = torch.distributed.fsdp.fully_shard(copy.deepcopy(whole), mesh=mesh)
    x = torch.randn(20, H)
    for n in (1, 2):
        whole(x).sum().backward()
        sharded(x).sum().backward()
        sharded.zero_grad()
        same(sharded.counts, whole.counts)
        assert sharded.counts.sum() == n * 20 * K
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@on_the_cpu
def test_small_over_ranks():
    """Under DDP: weights and bias are those of one process with all tokens. DDP overwrites buffers
    by those of rank 0: the counts are none. Without a group the biases would drift apart."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(over_two_ranks, (port,), nprocs=2)
