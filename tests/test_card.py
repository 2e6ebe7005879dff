"""Tests of the code for cards. First the CPU stands in for a card. Then come tests that need one,
named test_card_: DEVICE=cuda runs them on a real card or on the emulated one (card/README.md).

    python -m pytest tests/test_card.py
    DEVICE=cuda python -m pytest tests/test_card.py -k test_card_
"""
import copy
import functools
import gc
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grouped
import kernels
import shared_experts
import small
import test_small
from grouped import grouped_mm
from kernels import combine_rows, expert_mlp, gather_rows, plan_permutation
from moe import MoEConfig, MoELayer
from ranks.test_ranks import RANK_DEVICE, over_ranks, overlapped_layer
from test_moe import (
    CONFIGS, DEVICE, EMULATED, INF, NAN, QUANTILE, RouterLoop, WAYS, about, about_the_cpu, agree,
    close, compiled, counts_of, exact_config, fp32_leaf, fresh_start, grads, graphs_made,
    layer_loop, loads, on_a_card, on_device, outcome, random_indices,
    random_layer, same, saved_bytes, slow_but, small_config, small_layer, with_native_products,
    without_products)
from tests.test_graphs import check_keeps_little


# ---- The CPU in place of a card ----

@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("options", [
    dict(),
    dict(add_bias_linear=True, apply_probs_on="input", topk=1, pre_softmax=True),
    dict(add_bias_linear=True, activation="relu2"),
    dict(add_bias_linear=True, activation_fp8_input_store=True)])
def test_experts_formulas_for_cuda_equal_the_ops(monkeypatch, options):
    """The branch that runs torch's own grouped product, on the CPU, where it runs eagerly."""
    layer = random_layer(small_config(init_std=0.5, **options))
    args = fp32_leaf(20, 8), torch.arange(20) % 4 == 0                # rows past the last offset
    want = outcome(layer, args)
    with_native_products(monkeypatch)
    close(outcome(layer, args), want, 1e-5)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a CUDA device."""
    device = torch.device("cuda", 0)


@about_the_cpu("it stands in for a card")
def test_experts_native_product_where_it_fits(monkeypatch):
    """torch's grouped product: in bf16, on two generations of cards, never on ROCm, on a CPU that
    multiplies in bf16, with fewer than 1,024 experts, in multiples of 16 bytes. What reads the
    device runs inside a graph."""
    card = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", None)

    def native(weights):
        return grouped._native(rows.as_subclass(OnCuda), weights.as_subclass(OnCuda))
    rows = torch.empty(10, 16).bfloat16()
    weights = torch.empty(4, 16, 24).bfloat16()
    pair = torch.empty(4 * 16 * 24 + 8).bfloat16()
    many = torch.empty(1024, 8, 8).bfloat16()
    offsets = torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    for slow in (True, False):                               # on a CPU
        monkeypatch.setattr(grouped, "_slow_on_cpu", lambda dtype: slow)
        assert grouped.row_blocks(offsets, 10, rows, weights).by == ("loop" if slow else "torch")
    for operand in (weights, weights.transpose(1, 2), pair[8:].view(4, 16, 24), many[1:]):
        assert native(operand), (operand.shape, operand.stride())
    for operand in (
            many,
            weights.float(),
            rows[:, :12].contiguous(),
            weights[:, :, :12].contiguous(),
            weights.repeat(1, 1, 2)[:, :, ::2],                             # strided
            torch.empty(4, 16, 20).bfloat16()[:, :, :16],                   # 20 apart
            weights[:1].expand(4, 16, 24),
            pair[1:1 - 8].view(4, 16, 24)):                                 # its pointer
        assert not native(operand), (operand.shape, operand.stride(), operand.dtype)
    for card in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)):
        assert native(weights) is (card[0] in (9, 10)), card
        assert grouped._cuda_generation(torch.device("cuda")) == card[0]
    card = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not native(weights)
    function = compiled(lambda x: x + grouped._has_native_product(x.device))
    same(function(torch.zeros(2)), torch.ones(2))


@about_the_cpu("it stands in for a card")
def test_experts_product_of_each_device(monkeypatch):
    """Where torch's product does not fit, Triton's, if that has code for the card; fp64, other
    devices, and a folder without grouped_triton.py have the loop."""
    generation = 8
    monkeypatch.setattr(grouped, "_cuda_generation", lambda device: generation)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(grouped, "_triton", lambda: grouped)
    half, single, double = torch.bfloat16, torch.float32, torch.float64

    def has(device, dtype):
        return bool(grouped._has_triton_product(torch.device(device), dtype))
    for dtype in (half, torch.float16, single, double):
        assert has("cuda", dtype) is has("xpu", dtype) is (dtype != double)
    assert not has("mps", half) and not has("cpu", half)
    generation = 7                                           # there Triton's code spills
    assert not has("cuda", half)
    generation = 0
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert has("cuda", half)
    monkeypatch.setattr(grouped, "_triton", lambda: None)
    assert not has("cuda", half)


@pytest.mark.parametrize("reads, options", [
    (7, dict()), (8, dict(add_bias_linear=True)), (7, dict(latent_size=7))])
def test_experts_read_the_offsets_on_the_host_once(monkeypatch, reads, options):
    """On a card without a grouped product: one copy for all products of forward and backward, one
    of which eager mode makes again. The card is the CPU; its offsets may not be read but in the
    copy."""
    copies = []
    read = []
    blocks_with_rows = grouped._blocks_with_rows
    read_on_host = grouped._read_on_host

    def on_host(offsets):
        copies.append(read_on_host(offsets))
        return copies[-1]
    layer = small_layer(init_std=0.5, **options)
    x = fp32_leaf(20, 8)
    want = outcome(layer, x)
    without_products(monkeypatch)
    monkeypatch.setattr(grouped, "_read_on_host", on_host)
    monkeypatch.setattr(grouped, "_blocks_with_rows", lambda offsets: (
        read.append(offsets.data_ptr()) or blocks_with_rows(offsets)))
    monkeypatch.setattr(F, "grouped_mm", None)
    close(outcome(layer, x), want, 1e-5)
    assert read == [copies[0].data_ptr()] * reads and len(copies) == 1
    offsets = torch.tensor([3, 9, 20], dtype=torch.int32)
    grads(grouped_mm(x, fp32_leaf(3, 8, 4), offsets), [x])
    assert len(copies) == 2


@about_the_cpu("it stands in for a card")
def test_experts_without_rows_have_zero_gradients_on_a_card(monkeypatch):
    """Torch's product may leave them uninitialised (pytorch #172439). The card is a stand-in."""
    a, b = torch.randn(9, 6), torch.randn(9, 4)
    offsets = torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32)
    blocks = grouped.RowBlocks(offsets)
    want = grouped.weight_grad(a, b, blocks)
    assert [bool(grad.any()) for grad in want] == [False, True, False, True, False]

    def garbage(rows_t, rows, offs):
        grad = grouped._rows_times_rows(rows_t.t(), rows, offs, exact=False)
        grad[[0, 2, 4]] = torch.tensor([NAN, INF, -7.0])[:, None, None]
        return grad
    monkeypatch.setattr(F, "grouped_mm", garbage)
    blocks = grouped.RowBlocks(offsets, "torch")
    monkeypatch.setattr(grouped, "_cuda_generation", lambda device: 10)
    same(grouped.weight_grad(a, b, blocks), want)


@pytest.mark.parametrize("way", slow_but([None], [None, "aot_eager"]))
def test_shared_overlap_has_a_side_stream_wherever_it_is(way):
    """However the weights came to a card: drawn there, unpickled, copied, moved, or assigned by
    load_state_dict, which does not tell the module."""
    import pickle
    on_cpu = exact_config(shared_expert_overlap=True)
    with torch.device("cpu"):
        state = MoELayer(on_cpu).state_dict()
        assigned, moved = MoELayer(on_cpu), MoELayer(on_cpu)
    drawn = MoELayer(on_cpu)
    drawn.load_state_dict(state)
    assigned.load_state_dict({name: x.to(DEVICE) for name, x in state.items()}, assign=True)
    moved.load_state_dict(state)
    layers = [drawn, assigned, moved.to(DEVICE), copy.deepcopy(drawn),
              pickle.loads(pickle.dumps(drawn))]
    x = torch.randn(4, 1, 6, dtype=torch.float64)
    for layer in layers:
        shared_experts._SIDE_STREAMS.clear()                 # as in a fresh process
        torch._dynamo.reset()
        y = compiled(layer, way)(x)
        assert [device.type for device in shared_experts._SIDE_STREAMS] == (
            [] if DEVICE == "cpu" else [DEVICE])
        same(y, drawn(x)) if way is None else close(y, drawn(x))
    assert layer.to("meta").shared_experts.stream is None


@on_a_card
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_trainer_counts_follow_the_weight_to_a_card(way):
    """fully_shard brings parameters and buffers there, and tells the module nothing."""
    with torch.device("cpu"):
        layer = small_layer(**QUANTILE)
    for part in layer.modules():
        for name, tensor in [*part.named_parameters(recurse=False),
                             *part.named_buffers(recurse=False)]:
            moved = tensor.detach().to(DEVICE)
            setattr(part, name, torch.nn.Parameter(moved) if tensor.requires_grad else moved)
    function = WAYS[way](layer)
    for n in (1, 2):
        function(fp32_leaf(7, 8)).sum().backward()
        assert all(tensor.device.type == DEVICE for tensor in counts_of(layer))
        assert layer.router.local_tokens_per_expert.sum() == 14 * n


# ---- On a card ----

def is_native(dtype) -> bool:
    """Whether torch's grouped product reads the offsets on this card."""
    return dtype == torch.bfloat16 and grouped._cuda_generation(torch.device(DEVICE)) in (9, 10)


def syncs_of(step) -> int:
    """How often a step makes the host wait for the card."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def launches_of(step) -> int:
    """Launches of ops in a step on the emulated card. The generated kernels are not in it."""
    import card_device
    before = card_device.launches()
    step()
    return card_device.launches() - before


def check_near(got, want, tol: float) -> None:
    """Tensors of a card and of the oracle: the norm of the difference is small beside theirs."""
    for a, b in zip(got, want, strict=True):
        difference = (a.detach().cpu().double() - b).norm()
        assert difference <= tol * (b.norm() + 1e-3), (difference, b.norm(), list(b.shape))


def card_config(**fields) -> MoEConfig:
    """Widths that torch's grouped product takes in bf16."""
    return MoEConfig(**{**dict(
        hidden_size=32, ffn_hidden_size=24, num_experts=8, topk=3, init_std=0.3,
        shared_expert_intermediate_size=16, shared_expert_gate=True, shared_expert_overlap=True,
        batch_first=False), **fields})


def exact_loop(layer: MoELayer, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Oracle of a step on a card: output, gradients of x and of the parameters, on the CPU in fp64,
    from the same rounded values."""
    layer = copy.deepcopy(layer).cpu().double()
    x = x.detach().cpu().double().requires_grad_()
    probs, indices, loss = RouterLoop(layer.router)(x, mask.cpu())
    y = layer_loop(layer, x, probs, indices)
    total = (y * y.detach()).sum() + loss
    return [y, *torch.autograd.grad(
        total, [x, *layer.parameters()], materialize_grads=True, allow_unused=True)]

CARD_VARIANTS = {
    **{name: {**fields, "latent_size": fields.get("latent_size") and 16}
       for name, fields in CONFIGS.items()},
    "bias and groups": dict(CONFIGS["bias and groups"], activation="geglu", glu_linear_offset=0.5),
    "fp8": dict(activation_fp8_input_store=True),
}

# In fp8 rounding is coarse. In bf16 it takes values over the bound of a clamp, where the gradient
# jumps.
COARSE = {
    ("fp8", torch.bfloat16): 0.1, ("fp8", torch.float32): 0.1, ("gpt_oss", torch.bfloat16): 0.2}


@on_a_card
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", CARD_VARIANTS)
def test_card_layer_matches_loop(name, dtype, tol):
    """Eager and compiled, one graph for two T, with padding: the fp64 loop, the same bits again,
    and no sync."""
    layer = random_layer(card_config(**CARD_VARIANTS[name], params_dtype=dtype)).to(DEVICE)
    for function in (layer, compiled(layer, "inductor", dynamic=True)):
        for S in (10, 19):
            x = torch.randn(S, 2, 32).to(DEVICE, dtype).requires_grad_()
            mask = (torch.rand(S, 2) < 0.2).to(DEVICE)
            want = exact_loop(layer, x, mask)
            upstream = want[0].to(DEVICE, dtype)

            def step():
                x.grad = None
                layer.zero_grad()
                layer.router.reset_global_aux_loss_tracker()
                y = function(x, mask)
                y.backward(upstream)
                return [y, *[p.grad for p in (x, *layer.parameters())]]
            with about(name, type(function), S):
                steps = [step()]
                check_near(steps[0], want, COARSE.get((name, dtype), tol))
                assert syncs_of(lambda: steps.append(step())) == 0
                same(*steps)
    assert graphs_made() == 1


@on_a_card
@pytest.mark.parametrize("dtype, tol", [
    (torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)])
def test_card_triton_products(dtype, tol):
    """Both kernels against fp64: odd sizes, experts without rows, unrouted rows, which hold NaN, no
    rows at all, more experts than torch's product takes; weights transposed, strided and of one
    expert for all; the same bits again. They read no rows of another expert."""
    triton = grouped._triton()
    sizes = [(70, 24, 40, [3, 20, 0, 0, 40]), (33, 130, 17, [0, 33]), (150, 8, 150, [145]),
             (5, 3, 5, [0] * 1100 + [5]), (9, 8, 8, [0, 0]), (0, 8, 16, [0, 0])]
    for N, H, F_, counts in sizes:
        E = len(counts)
        offsets = torch.tensor(counts).cumsum(0).int()
        rows, other = torch.randn(N, H).to(dtype), torch.randn(N, F_).to(dtype)
        weights = torch.randn(E, H, F_).to(dtype)
        block_of = torch.bucketize(torch.arange(N), offsets, right=True)
        one_hot = F.one_hot(block_of, E + 1)[:, :E].double()
        both = torch.einsum("nh,ehf,ne->nf", rows.double(), weights.double(), one_hot)
        of_blocks = torch.einsum("nh,nf,ne->ehf", rows.double(), other.double(), one_hot)
        rows[block_of == E] = other[block_of == E] = NAN
        rows, other, weights, ends = [x.to(DEVICE) for x in (rows, other, weights, offsets)]
        ends = torch.stack((ends, ends + 7), 1)[:, 0]              # any strides here too
        layouts = weights, weights.mT.contiguous().mT, weights.repeat(1, 1, 2)[..., :F_]
        with about(N, H, F_, E):
            for given in layouts if E < 1000 else layouts[:1]:
                got = triton.rows_times_weights(rows, given, ends)
                check_near([got], [both], tol)
                same(triton.rows_times_weights(rows, given, ends), got)
            for left in (rows, rows.t().contiguous().t())[:1 + (E < 1000)]:
                got = triton.rows_times_rows(left, other, ends, exact=True)
                check_near([got], [of_blocks], tol)
                same(triton.rows_times_rows(left, other, ends, exact=True), got)
            for count, block in zip(counts, got):
                assert count or not block.any()


@on_a_card
@pytest.mark.skipif(not EMULATED, reason="the numbers lie in a sparse file")
def test_card_triton_addresses_have_64_bits(tmp_path):
    """Rows and experts that lie more than 2^31 numbers behind the first."""
    far = 2 ** 30 + 8
    triton = grouped._triton()

    memory = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=2 * far + 8, dtype=torch.bfloat16)
    memory[:8], memory[far:][:8], memory[2 * far:] = 1.0, 2.0, 3.0
    ends = torch.tensor([1, 2, 3], dtype=torch.int32)
    rows = memory.as_strided((3, 8), (far, 1))
    near = torch.ones(3, 8).bfloat16()
    weights = torch.ones(3, 8, 8).bfloat16()
    want = torch.tensor([8.0, 16.0, 24.0]).bfloat16()
    same(triton.rows_times_weights(rows, weights, ends)[:, 0], want)
    same(triton.rows_times_rows(rows, near, ends, exact=False)[:, 0, 0], want / 8)
    same(triton.rows_times_rows(near, rows, ends, exact=False)[:, 0, 0], want / 8)
    weights = memory.as_strided((3, 8, 8), (far, 0, 1))
    same(triton.rows_times_weights(near, weights, ends)[:, 0], want)


@on_a_card
def test_card_under_autocast():
    """An fp32 layer: the experts in bf16, the router as without autocast."""
    layer = random_layer(card_config(**CARD_VARIANTS["losses"])).to(DEVICE)
    x = torch.randn(10, 2, 32).to(DEVICE).requires_grad_()
    mask = torch.zeros(10, 2, dtype=torch.bool)
    want = exact_loop(layer, x, mask)
    logits = layer.router.gating(x)
    for function in (layer, compiled(layer, "inductor")):
        with torch.autocast(DEVICE, torch.bfloat16):
            same(layer.router.gating(x), logits)
            y = function(x, mask.to(DEVICE))
        assert y.dtype == torch.float32
        got = torch.autograd.grad(y, [x, *layer.parameters()], want[0].to(y))
        check_near([y, *got], want, 3e-2)


@on_a_card
@pytest.mark.parametrize("which", ["layer", "small"])
def test_card_router_in_bf16_multiplies_in_fp32(which):
    """bf16 tokens and weight, fp32 logits: logits and gradients are the exact ones, rounded once,
    and no product copies the tokens to fp32. cuBLAS is not let to add in bf16, and may again
    afterwards."""
    T, H, E = 300, 64, 16
    x = torch.randn(T, H).to(DEVICE, torch.bfloat16).requires_grad_()
    weight = torch.randn(E, H).to(DEVICE, torch.bfloat16).requires_grad_()
    upstream = (torch.randn(T, E) * torch.randn(T, 1).exp()).to(DEVICE)
    x64, weight64, up64 = [t.detach().cpu().double() for t in (x, weight, upstream)]
    want = x64 @ weight64.T, up64 @ weight64, up64.T @ x64
    if which == "small":
        product = small.Logits.apply
    else:
        product = functools.partial(
            kernels.router_gating_linear, bias=None, router_dtype=torch.float32)
        sums = kernels._weight_grad(upstream, x.detach(), torch.float32, torch.float32)
        check_near([sums], want[2:], 3e-7)
    setting = torch.backends.cuda.matmul
    for function in (product, compiled(product, "inductor")):
        logits = function(x, weight)
        got = torch.autograd.grad(logits, (x, weight), upstream)
        check_near([logits], want[:1], 3e-7)
        for value, right in zip(got, want[1:], strict=True):
            assert value.dtype == torch.bfloat16
            # Rounded once; a sum that cancels is as exact as its terms.
            off = (value.cpu().double() - right).abs() - (2 ** -8 + 1e-6) * right.abs()
            assert off.max() <= 1e-6 * right.abs().max(), off.max()
        assert setting.allow_bf16_reduced_precision_reduction is True


@on_a_card
def test_card_keeps_as_little():
    check_keeps_little(None, "inductor")


@on_a_card
@pytest.mark.parametrize("E, K", [(8, 2), (256, 8)])
def test_card_triton_launches_little(E, K):
    """In fp32, for which no card has a product of torch's that reads the offsets itself. Compiled
    and eager equal the CPU, and themselves to the bit. No sync."""
    T, H, F_ = 128, 16, 8
    weights = torch.randn(E, 2, F_, H), torch.randn(E, H, F_)
    x, probs = torch.randn(T, H), torch.rand(T, K)

    def ours(x, probs, indices, fc1, fc2):
        return expert_mlp(x, probs, plan_permutation(indices, E), fc1, fc2)

    def run(function, leaves, indices):
        out = function(*leaves[:2], indices, *leaves[2:])
        return [out, *grads(out, leaves)]
    on_cpu, on_the_card = [
        [t.detach().to(device).requires_grad_() for t in (x, probs, *weights)]
        for device in ("cpu", DEVICE)]
    function = compiled(ours, "inductor")
    for load, indices in loads(T, E, K).items():
        if EMULATED and E > 8 and load != "even":
            continue                                         # an interpreter takes long
        with about(load):
            want = run(ours, on_cpu, indices)
            for way in (ours, function):
                there = indices.to(DEVICE)
                steps = [run(way, on_the_card, there)]
                close([t.cpu() for t in steps[0]], want, 1e-4)

                def step():
                    steps.append(run(way, on_the_card, there))
                assert syncs_of(step) == 0
                same(*steps)
            if EMULATED and load == "even":
                assert launches_of(step) <= 45


@on_a_card
def test_card_peak_of_a_step(monkeypatch):
    """In bf16, compiled: 9 MiB on every card."""
    monkeypatch.setenv("CARD_MEMORY", "1")               # else the interpreter keeps dead buffers
    T, H, F_, E, K = 512, 256, 128, 16, 8
    new = functools.partial(torch.zeros, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    x, fc1, fc2 = new(T, H), new(E, 2, F_, H), new(E, H, F_)
    probs = torch.rand(T, K, device=DEVICE, requires_grad=True)
    indices = torch.rand(T, E, device=DEVICE).topk(K).indices

    @functools.partial(compiled, backend="inductor")
    def experts(x, probs, indices, fc1, fc2):
        return expert_mlp(x, probs, plan_permutation(indices, E), fc1, fc2)
    for _ in range(2):                                   # the first step makes cuBLAS its memory
        x.grad = fc1.grad = fc2.grad = probs.grad = None
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        experts(x, probs, indices, fc1, fc2).sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 9.5 * 2 ** 20


@on_a_card
@over_ranks(2)
def test_card_over_ranks(rank, ranks):
    """Experts over two ranks beside the shared expert, uneven T and T = 0, eager and compiled. (On
    a real card the ranks are on CPUs.)"""
    fp32 = dict(params_dtype=torch.float32, router_dtype=torch.float32)
    layer = overlapped_layer(fp32, ep=ranks).to(RANK_DEVICE)
    function = compiled(layer, "inductor")
    for T in ([20, 31], [40, 18], [25, 0]):
        x = torch.randn(T[rank], 6).to(RANK_DEVICE).requires_grad_()
        agree(function, layer, x, tol=1e-5)


@on_a_card
@pytest.mark.skipif(EMULATED, reason="the emulated card has no time")
def test_card_overlap_is_side_by_side():
    """Overlap on and off give the same bits, except for the input's gradient, whose parts are added
    in another order. The kernels of the two streams run side by side."""
    from torch.profiler import ProfilerActivity, profile
    one, two = [MoELayer(MoEConfig(
        1024, 512, 16, topk=4, shared_expert_intermediate_size=2048, shared_expert_gate=True,
        shared_expert_overlap=overlap, params_dtype=torch.bfloat16)).cuda()
        for overlap in (False, True)]
    two.load_state_dict(one.state_dict())
    for _ in range(100):
        x = torch.randn(4096, 1, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y, grad_x, *others = outcome(two, x)
        want_y, want_grad_x, *want_others = outcome(one, x)
        same([y, *others], [want_y, *want_others])
        close(grad_x, want_grad_x, 2e-2)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        two(x).sum().backward()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type.name == "CUDA"]
    spans = [(e.time_range.start, e.time_range.end, e.device_resource_id) for e in events]
    pairs = [(a, b) for a, b in itertools.product(spans, spans) if a[2] != b[2]]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs)


@on_a_card
def test_card_permutes_rows_beyond_two_to_the_31_elements():
    if EMULATED or torch.cuda.mem_get_info()[1] < 60 << 30:
        pytest.skip("no card of 60 GiB")
    T, K, H = 1 << 16, 8, 8192                               # 2^32 elements
    values = torch.arange(T, device="cuda").remainder(251).bfloat16()
    tokens = values[:, None].expand(T, H).contiguous()
    plan = plan_permutation(torch.arange(K, device="cuda").repeat(T, 1), K)
    for how in (lambda function: function, lambda function: compiled(function, "inductor")):
        rows = how(gather_rows)(tokens, plan)
        same(rows[-3:, -1].cpu(), tokens[-3:, -1].cpu())
        same(how(combine_rows)(rows, plan)[-3:, -1].cpu(), (tokens[-3:, -1] * K).cpu())


# ---- small.py on a card ----

@on_a_card
@pytest.mark.parametrize("compile", [False, True])
def test_card_small_counts_follow_the_weights(compile):
    """fully_shard moves parameters and buffers to the card, and tells the module nothing."""
    with torch.device("cpu"):
        layer = test_small.layer_of("all")
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        moved = tensor.detach().to(DEVICE)
        setattr(layer, name, torch.nn.Parameter(moved) if tensor.requires_grad else moved)
    function = compiled(layer) if compile else layer
    for n in (1, 2):
        x = torch.randn(7, test_small.H, device=DEVICE, requires_grad=True)
        test_small.step(layer, x, function=function)
        assert layer.counts.device.type == DEVICE and layer.counts.sum() == n * 7 * test_small.K


@on_a_card
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", ["plain", "all"])
def test_card_small(case, dtype, tol):
    """As on the CPU, with padding: eager and compiled, the same bits again, and a sync a step at
    most, none where the product is the card's."""
    layer = test_small.layer_of(case, dtype, sizes=(32, 16, 8, 2))
    there = copy.deepcopy(layer).to(DEVICE)
    native = is_native(dtype)
    for function in (there, compiled(there, "inductor", dynamic=True)):
        for T in (10, 19):
            x = torch.randn(T, 2, 32, dtype=dtype, requires_grad=True)
            mask = torch.rand(T, 2) < 0.2
            want = test_small.step(layer, x, mask)
            on_card = x.detach().to(DEVICE).requires_grad_(), mask.to(DEVICE)

            def run():
                return test_small.step(there, *on_card, function=function)
            with about(case, T, type(function)):
                got = run()
                same(run(), got)
                for value, right in zip(got, want, strict=True):
                    error = (value.cpu() - right).float().norm() / right.float().norm()
                    assert error < tol, error
                assert syncs_of(run) == (0 if native else 1)
    assert graphs_made() == 1


@on_a_card
@pytest.mark.skipif(not EMULATED, reason="counts launches: on the emulated card alone")
def test_card_small_launches():
    """Where the product is the card's, as many for 32 experts as for 64. Elsewhere one for each
    expert and product."""
    launches = []
    for experts in (32, 64):
        layer = test_small.layer_of("plain", torch.bfloat16, sizes=(64, 32, experts, 4))
        layer.to(DEVICE)
        function = compiled(layer, "inductor")
        x = torch.randn(256, 64, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
        test_small.step(layer, x, function=function)
        launches.append(launches_of(lambda: function(x).sum().backward()))
    of_products = 0 if is_native(torch.bfloat16) else 6
    assert launches[0] <= 32 + 32 * of_products
    assert launches[1] - launches[0] == (64 - 32) * of_products
