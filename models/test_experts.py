"""Tests of experts.py: the library's experts by kernels.expert_mlp, against the library's own.

    python -m pytest models/test_experts.py
"""
import contextlib
import copy
import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from einops import rearrange

from kernels import expert_mlp, plan_permutation
from models.cases import (
    T7, check_errors, close_grads, double, padded_ids, random_ids, randomised, replaced,
    some_quick, whole_logits, whole_model)
from models.experts import register_experts
from models.live import replace_blocks, restore_blocks
from test_moe import close, compiled, fresh_start, needs, same, saved_bytes, slow


@needs("transformers")
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
        restore_blocks(ours)
        assert ours.config._experts_implementation == "batched_mm"


def test_live_register_experts_needs_the_library(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="library: pip install 'transformers>=5'"):
        register_experts()


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


EXPERTS_CLASSES = experts_classes()
EXPERTS_REFUSED = {
    "MuseSparkExperts": "has_post_expert_norm",
}


@needs("transformers")
@pytest.mark.parametrize("case", EXPERTS_CLASSES)
def test_live_experts_match_the_library(case):
    """Output and gradients with an index that goes nowhere, or a refusal. Inputs are so large that
    clamps act."""
    register_experts()
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


@needs("transformers")
def test_live_experts_refused_by_class():
    """An overridden gate is recognised by the class that has it: a subclass of a known one is
    unknown. The test above sees all classes."""
    assert len(EXPERTS_CLASSES) >= 65 and set(EXPERTS_REFUSED) < set(EXPERTS_CLASSES)
    from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss
    from transformers.models.nemotron_h import NemotronHConfig, modeling_nemotron_h
    register_experts()
    taken = "an implementation of the library; needs another name"
    check_errors([(functools.partial(register_experts, name), f"name is {name!r}, {taken}")
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


@needs("transformers")
def test_live_experts_with_relu():
    """Experts without a gate, with the library's ReLU: output and gradients."""
    from transformers.models.nemotron_h import NemotronHConfig, modeling_nemotron_h
    config = NemotronHConfig(
        hidden_size=8, moe_intermediate_size=6, n_routed_experts=4, mlp_hidden_act="relu")
    experts = randomised(modeling_nemotron_h.NemotronHExperts(config)).double()
    x = double(T7, 8, requires_grad=True)
    probs = double(T7, 2, requires_grad=True)
    indices = torch.rand(T7, 4).topk(2).indices
    config._experts_implementation = "eager"
    want = experts(x, indices, probs)
    config._experts_implementation = register_experts()
    got = experts(x, indices, probs)
    close(got, want, 1e-8)
    close_grads(got, want, [x, probs, *experts.parameters()], tol=1e-8)


def qwen3_experts(H: int, F: int, E: int) -> torch.nn.Module:
    """With register_experts()."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E)
    config._experts_implementation = register_experts()
    return randomised(modeling_qwen3_moe.Qwen3MoeExperts(config))


@needs("transformers")
def test_live_experts_in_the_weights_dtype():
    """fp32 tokens, as a norm gives them under autocast, and bf16 weights: products in bf16, an
    output in fp32."""
    experts = qwen3_experts(H=8, F=6, E=4).bfloat16()
    x, indices, probs = torch.randn(T7, 8), torch.randint(4, (T7, 1)), torch.rand(T7, 1)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x, indices, probs)
    assert got.dtype == torch.float32
    same(got, experts(x.bfloat16(), indices, probs).float())


@needs("transformers")
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


@needs("transformers")
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
    model.set_experts_implementation(register_experts())
    match()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = whole_logits(model, ids)
    assert logits.isfinite().all() and logits.shape == want[0].shape
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "has_gate"):
            module.compile(fullgraph=True, backend="aot_eager")
    match()


@needs("transformers")
@slow
def test_live_yardstick_in_bf16():
    """The table of docs/models.md: this project's ways are as far from the library's eager mode as
    its grouped_mm is, give or take a half, and not farther from fp32."""
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
            replace_blocks(own)
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
    for how in ("grouped_mm", register_experts(), "replace_blocks"):
        found = run(how)
        from_eager[how], from_exact[how] = apart(found, eager), apart(found, exact)
        print(how, from_eager[how], from_exact[how])
    for i in range(2):
        most = 1.5 * from_eager["grouped_mm"][i]
        assert 0 < from_eager["moe_py"][i] <= most and from_eager["replace_blocks"][i] <= most
        farthest = 1.1 * max(from_exact["eager"][i], from_exact["grouped_mm"][i])
        assert max(from_exact["moe_py"][i], from_exact["replace_blocks"][i]) <= farthest
