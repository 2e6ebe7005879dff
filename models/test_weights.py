"""Tests of weights.py: layers with published weights against the published equations, and against
the library's own blocks.

    python -m pytest models/test_weights.py
"""
import copy
import dataclasses
import itertools
import re
import types
import weakref

import pytest
import torch

import small
from models import table
from models.cases import (
    AXIS, E8, EVERY_CASE, EVERY_LAYOUT, F5, GUD, H6, IN_THE_LIBRARY, L4, OWN, PUBLISHED, T7,
    W_HELD, OneOf, check_errors, close_grads, double, fam_config, fam_fields, fam_layer,
    fam_tensors, family_of, ffn_loop, library_block, library_config, library_fields,
    only_chooses, published_loop, relu2, some_quick, swiglu_loop)
from models.configs import config_from_hf, small_fields
from models.weights import from_hf, small_weights, to_hf, upcycle
from moe import MoEConfig, MoELayer
from ranks.parallel import ProcessGroups
from ranks.test_ranks import mesh_of, over_ranks, own_part
from test_moe import close, compiled, error, fresh_start, grads, needs, same, slow
from tests.test_docs import example


def as_held(case: str, t: dict) -> dict:
    """The same tensors as a loaded model holds them: experts are stacked, gate above up."""
    held = {}
    stacks = {}
    for name, tensor in t.items():
        if re.match(r"experts\.\d", name):
            stacks.setdefault(name.split(".")[2], []).append(tensor)
            continue
        for old, new in PUBLISHED[case].held.items():
            name = name.replace(old, new)
        held[name] = tensor
    if stacks:
        *ups, down = map(torch.stack, stacks.values())
        fused = "experts.gate_up_proj" if len(ups) == 2 else "experts.up_proj"
        held |= {fused: torch.cat(ups, 1), "experts.down_proj": down}
    if case in ("inkling2_text", "qwen3_vl_moe_text", "step3p5"):
        held = {name: tensor for name, tensor in held.items() if not name.startswith("moe.")}
        held["experts.gate_up_proj"], held["experts.down_proj"] = PUBLISHED[case].fused(t)
    if case == "minimax_m3_vl_text":
        ups = [held.pop(f"shared_experts.{name}.weight") for name in GUD[:2]]
        held["shared_experts.gate_up_proj.weight"] = torch.cat(ups)
    return held


def match_published_loop(case: str, through) -> None:
    """Output, and gradients under the published names."""
    prefix = "model.layers.3.mlp."
    t = fam_tensors(case)
    other = dict.fromkeys(("model.layers.33.mlp.gate.weight", "lm_head.weight"), torch.zeros(1))
    tensors = other | fam_tensors(case, prefix=prefix)
    layer = fam_layer(case, tensors=tensors, prefix=prefix)
    leaves = {key: t[key].requires_grad_() for key in t if not only_chooses(key)}
    x = double(T7, 2, H6, requires_grad=True)
    want = published_loop(case, x, t)
    got = through(layer)(x)
    close(got, want, 1e-8)

    upstream = torch.randn_like(x)
    inputs = [x, *leaves.values()]               # an expert without tokens has a gradient of zeros
    wants = torch.autograd.grad(want, inputs, upstream, materialize_grads=True)
    gots = grads(got, [x, *layer.parameters()], upstream)
    close(gots[0], wants[0], 1e-8)
    with torch.no_grad():
        for parameter, grad in zip(layer.parameters(), gots[1:], strict=True):
            parameter.copy_(grad)
    named = to_hf(layer, family_of(case))
    close([named[key] for key in leaves], wants[1:], 1e-8)


@EVERY_CASE
def test_weights_match_published_loop(case):
    match_published_loop(case, through=lambda layer: layer)


@some_quick(OWN, "kimi_k3")
def test_weights_compiled_match_published_loop(case):
    match_published_loop(case, through=compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_LAYOUT
def test_weights_round_trip(case, dtype):
    """Both layouts in, one out: bitwise, under a prefix; the copies share no memory. A gate that
    the library keeps in fp32 comes out in fp32, with the same numbers."""
    want = fam_tensors(case, dtype, "a.b.")
    layer = fam_layer(case, dtype, want, prefix="a.b.")
    out = to_hf(layer, family_of(case), "a.b.")
    if table.TYPES[family_of(case)].precision.startswith("fp32"):
        gate = "a.b." + PUBLISHED[case].tensors.split()[0]
        want[gate] = want[gate].float()
    same(out, want)
    for tensor in out.values():
        assert tensor.is_contiguous()
        tensor.zero_()
    held = fam_layer(case, dtype, as_held(case, fam_tensors(case, dtype)))
    same(held.state_dict(), layer.state_dict())


@pytest.mark.parametrize("case, size", [
    ("qwen3_moe", 3), ("granitemoe", 3), ("llama4_text", 3), ("gpt_oss", 3),
    ("qwen3_vl_moe_text", 3), ("qwen3_vl_moe_text", H6)])
def test_weights_layouts_where_two_F_equal_H(case, size, monkeypatch):
    """unsloth-zoo #849: at 2F = H a matrix has the shape of its transpose; no shape tells which.
    Qwen3-VL's two layouts have the same names: there the shapes of both weights tell, also at
    F = H."""
    monkeypatch.setitem(AXIS, "F", size)
    for name in ("intermediate_size", "moe_intermediate_size"):
        monkeypatch.setitem(PUBLISHED[case].config, name, size)
    match_published_loop(case, through=lambda layer: layer)
    held = as_held(case, fam_tensors(case))
    assert (held["experts.gate_up_proj"].shape == (E8, 6, 6)) == (size == 3)
    same(fam_layer(case, tensors=held).state_dict(), fam_layer(case).state_dict())


@needs("transformers")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_weights_match_the_library(case):
    """The library's own block on its own random weights; its config, as object and as dict."""
    theirs = library_config(case, **library_fields(case))
    config = config_from_hf(theirs)
    assert config == config_from_hf(theirs.to_dict())
    limit = {"swiglu_limit": 7.0} if case == "gpt_oss" else {}
    assert config == config_from_hf(fam_fields(case, **limit))

    block = library_block(case, theirs)
    tensors = {name: tensor for name, tensor in block.state_dict().items() if tensor.numel()}
    layer = from_hf(MoELayer(config), tensors, family_of(case))
    x = torch.randn(2, T7, H6, requires_grad=True)
    want = block(x.clone())
    got = layer(x)
    if case == "axk1":                                # the norm stays outside of the layer
        got = block.post_mlp_layernorm(got)
    if isinstance(want, tuple):
        want = want[0]
    close(got, want.view(x.shape), 1e-5)
    close_grads(got, want.view(x.shape), [x], tol=1e-5)

    try:
        one_file = small.MoE(**small_fields(config))
    except ValueError as refused:
        assert str(refused).startswith("small.py lacks ")
        return
    one_file.load_state_dict(small_weights(layer))
    got = one_file(x)
    if case == "axk1":
        got = block.post_mlp_layernorm(got)
    close(got, want.view(x.shape), 1e-5)
    same(one_file.route(x)[1], layer.router.route(x)[1])


def test_weights_of_small_refuse_what_it_does_not_have():
    config = MoEConfig(8, 4, 4, 2, latent_size=4)
    assert "small.MoE has no latent_down.weight" in error(small_weights, MoELayer(config))


@pytest.mark.parametrize("through", [lambda layer: layer, pytest.param(compiled, marks=slow)])
def test_weights_hash_layer(through):
    """The table stays with the caller: neither read nor unexpected, and not given back."""
    layer = MoELayer(fam_config("deepseek_v4", mlp_layer_types=["hash_moe", "hash_moe"]))
    t = fam_tensors("deepseek_v4")
    missing = error(from_hf, MoELayer(fam_config("deepseek_v4")),
                    {name: t[name] for name in t if name != "gate.bias"}, "deepseek_v4")
    assert missing.splitlines()[1:] == ["  gate.bias [8] is missing"]
    del t["gate.bias"]
    table = torch.rand(9, E8).topk(3).indices
    lazy = Lazy({**t, "gate.tid2eid": table}, slices=True)
    from_hf(layer, lazy, "deepseek_v4")
    assert sorted(lazy.loads) == sorted(t) and layer.router.expert_bias is None
    same(to_hf(layer, "deepseek_v4"), t)

    indices = table[torch.randint(9, (T7, 2))]
    x = double(T7, 2, H6)
    want = published_loop("deepseek_v4", x, t, chosen=indices.flatten(0, 1).tolist())
    close(through(layer)(x, topk_indices=indices), want, 1e-8)


def test_weights_block_without_a_name_of_its_own():
    """Mistral Large 4: attention and norms lie under the same prefix, and are left alone. A text
    model that is saved without the rest has the shared expert's held names."""
    name = "mistral_large4_text"
    prefix = "layers.3."
    t = fam_tensors(name, prefix=prefix)
    names = [f"{prefix}{other}.weight" for other in ("attention.wo", "ffn_norm", "gate_up")]
    around = {other: torch.zeros(2) for other in names}
    layer = fam_layer(name, tensors=t | around, prefix=prefix)
    same(to_hf(layer, name, prefix), t)
    renamed = dict(around)
    for key, tensor in t.items():
        for old, new in W_HELD.items():
            key = key.replace(old, new)
        renamed[key] = tensor
    other = fam_layer(name, tensors=renamed, prefix=prefix)
    same(other.state_dict(), layer.state_dict())
    wrong = {f"{prefix}experts.0.{part}": torch.zeros(2) for part in ("w4.weight", "w1.scale")}
    text = error(from_hf, layer, t | around | wrong, name, prefix)
    assert text.splitlines()[1:] == [
        "  layers.3.experts.0.w4.weight is unexpected",
        "  layers.3.experts.0.w1.scale is of quantised weights; dequantise them first"]

    t = fam_tensors("step3p5", prefix=prefix)                # its shared expert lies beside `moe.`
    layer = fam_layer("step3p5", tensors=t | around, prefix=prefix)
    same(to_hf(layer, "step3p5", prefix), t)
    wrong = {f"{prefix}moe.bias": torch.zeros(2)}
    text = error(from_hf, layer, t | around | wrong, "step3p5", prefix)
    assert text.splitlines()[1:] == ["  layers.3.moe.bias is unexpected"]


def test_weights_misfits():
    """One error for all that is wrong under the prefix, and a layer that stays as it was."""
    layer = fam_layer("mixtral", torch.float32)
    before = copy.deepcopy(layer.state_dict())
    t = fam_tensors("mixtral", torch.float32, "mlp.")
    del t["mlp.experts.1.w3.weight"], t["mlp.gate.weight"]
    t["mlp.experts.0.w1.weight"] = torch.zeros(H6, F5)
    t["mlp.experts.0.w1.weight_scale"] = t["other.experts.0.w1.weight"] = torch.zeros(1)
    t["mlp.experts.3.w1.weight_packed"] = torch.zeros(1, dtype=torch.uint8)
    t["mlp.experts.2.w2.weight"] = torch.zeros(H6, F5, dtype=torch.float8_e4m3fn)
    t["mlp.experts.8.w2.weight"] = torch.zeros(H6, F5)
    text = error(from_hf, layer, t, "mixtral", "mlp.")
    assert text.splitlines() == [
        "ValueError: tensors do not make a mixtral block, nothing was changed:",
        "  mlp.gate.weight [8, 6] is missing",
        "  mlp.experts.0.w1.weight is [6, 5]; needs [5, 6]",
        "  mlp.experts.1.w3.weight [5, 6] is missing",
        "  mlp.experts.2.w2.weight is float8_e4m3fn; needs float64, float32, bfloat16, float16",
        "  mlp.experts.0.w1.weight_scale is of quantised weights; dequantise them first",
        "  mlp.experts.3.w1.weight_packed is of quantised weights; dequantise them first",
        "  mlp.experts.8.w2.weight is unexpected"]
    held = as_held("mixtral", fam_tensors("mixtral", torch.float32))
    held["experts.gate_up_proj"] = held["experts.gate_up_proj"].mT
    fused, read, write = MoELayer(fam_config("gpt_oss")), from_hf, to_hf
    not_normalised = MoELayer(dataclasses.replace(fam_config("mixtral"), pre_softmax=True))
    check_errors([
        (lambda: read(layer, held, "mixtral"),
         "changed:\n  experts.gate_up_proj is [8, 6, 10]; needs [8, 10, 6]"),
        (lambda: read(layer, t, "qwen4"), "model_type is 'qwen4'; nearest: qwen"),
        (lambda: read(layer, t, "phimoe"), "model_type is 'phimoe'"),
        (lambda: read(layer, t, "gpt_oss"),
         "layer is no gpt_oss block: activation = 'swiglu' (needs 'quick_geglu'), "
         "glu_linear_offset = 0.0 (needs 1.0), add_bias_linear = False (needs True), "
         "router_bias = False (needs True); build it with config_from_hf"),
        (lambda: write(layer, "jamba"), "block: norm_topk_prob = True (needs False); build"),
        (lambda: write(layer, "qwen2_moe"), "shared_expert_gate = False (needs True); build"),
        (lambda: write(not_normalised, "mixtral"), "norm_topk_prob = False (needs True); build"),
        (lambda: write(fam_layer("nemotron_h"), "deepseek_v3"),
         "block: activation = 'relu2' (needs one that is gated); build"),
        (lambda: write(fam_layer("deepseek_v3"), "nemotron_h"),
         "block: activation = 'swiglu' (needs one that is not gated); build"),
        (lambda: write(fam_layer("kimi_k3"), "deepseek_v3"),
         "layer is no deepseek_v3 block: latent_size = 4 (needs None), latent_norm = True (needs "
         "False), situ_beta = 0.8 (needs 1.0), situ_linear_beta = 1.5 (needs None); build"),
        (lambda: read(fused, {}, "gpt_oss", "mlp."),
         "mlp.experts.gate_up_proj [8, 6, 10] is missing\n  mlp.experts.gate_up_proj_bias [8,")])
    same(layer.state_dict(), before)
    by_convention = dataclasses.replace(fam_config("minimax_m2"), norm_topk_prob=None)
    assert write(MoELayer(by_convention), "minimax_m2")                # sigmoid: normalised


def test_weights_lists_are_cut_at_ten():
    """A prefix that fits nothing is one line; long lists have ten entries and their number."""
    layer, name, prefix, t = fam_layer("qwen3_moe"), "qwen3_moe", "model.layers.3.mlp.", {}
    for i in range(11):
        t |= fam_tensors(name, prefix=f"model.layers.{i}.mlp.")
    t["model.layers.11.mlp.gate.weight"] = gate = torch.zeros(E8, H6)
    meta = MoELayer(layer.config).to("meta")
    read = from_hf
    fitting = ", ".join(f"model.layers.{i}.mlp." for i in range(10))
    missing = [f"experts.{e}.gate_proj.weight [5, 6] is missing" for e in range(8)]
    missing += [f"experts.{e}.up_proj.weight [5, 6] is missing" for e in range(2)]
    more = "\n  ".join([*missing, ".. 24 in all"])
    for wrong in ("", "model.layers.3.mlp", "model.layers.3.", "layers.3.mlp."):
        assert error(read, layer, t, name, wrong) == (
            f"ValueError: no tensor of a qwen3_moe block is at prefix {wrong!r}; "
            f"prefixes that fit: {fitting}, .. 11 in all")
    check_errors([
        (lambda: read(layer, {"lm_head.weight": gate}, name), "prefix ''; prefixes that fit: none"),
        (lambda: read(layer, {"gate.weight": gate}, name), f"nothing was changed:\n  {more}"),
        (lambda: read(layer, t, prefix), f"model_type is {prefix!r}; known: mixtral,"),
        (lambda: read(meta, t, name, prefix),
         "layer is on the meta device and cannot take weights; call layer.to_empty(device=..) and "
         "reset_parameters() of its modules first")])
    check_errors(kind=TypeError, table=[
        (lambda: read(t, layer, name),
         "layer is a dict; needs a MoELayer (for a small.MoE see small_weights)"),
        (lambda: read(layer, list(t), name), "tensors is a list; needs a mapping, name -> tensor")])


class Lazy(dict):
    """Loads a tensor on [name], one at a time; with `slices` also in safetensors' way."""

    def __init__(self, tensors: dict, slices: bool):
        super().__init__(tensors)
        self.loads = []
        self.last = lambda: None
        if slices:
            self.get_slice = lambda name: types.SimpleNamespace(
                get_shape=lambda: list(tensors[name].shape), get_dtype=lambda: "F32")

    def __getitem__(self, name):
        assert self.last() is None
        tensor = super().__getitem__(name).clone()
        self.loads.append(name)
        self.last = weakref.ref(tensor)
        return tensor


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_weights_stream(name, slices):
    """One tensor at a time, nothing outside of the prefix; each once where shapes are known before,
    else twice."""
    t = fam_tensors(name, prefix="mlp.")
    lazy = Lazy(t | {"lm_head.weight": torch.zeros(3)}, slices)
    layer = fam_layer(name, tensors=lazy, prefix="mlp.")
    same(layer.state_dict(), fam_layer(name).state_dict())
    assert sorted(lazy.loads) == sorted(t if slices else [*t, *t])
    del lazy[next(iter(t))]
    lazy.loads.clear()
    error(from_hf, layer, lazy, name, "mlp.")
    assert lazy.last() is None and (not slices or not lazy.loads)


@needs("safetensors")
def test_weights_read_safetensors_files(tmp_path):
    """An open file as it is: shapes from its header, one tensor after the other."""
    import safetensors.torch as safetensors
    name, file, t = "ernie4_5_moe", tmp_path / "a", fam_tensors("ernie4_5_moe", torch.bfloat16)
    safetensors.save_file(t, file)
    with safetensors.safe_open(file, "pt") as tensors:
        layer = fam_layer(name, torch.float32, tensors)
    same(layer.state_dict(), fam_layer(name, torch.float32, t).state_dict())
    out = to_hf(layer, name)
    safetensors.save_file(out, file)
    same(safetensors.load_file(file), out)
    t["gate.weight"] = t["gate.weight"].to(torch.float8_e4m3fn)
    safetensors.save_file(t, file)
    with safetensors.safe_open(file, "pt") as tensors:
        text = error(from_hf, layer, tensors, name)
    assert "gate.weight is F8_E4M3; needs" in text


def shard(layer: MoELayer, group: OneOf, **groups) -> MoELayer:
    """The layer as one rank of ep or tp holds it."""
    def cut(x, dim):
        return torch.nn.Parameter(x.detach().chunk(group.size(), dim)[group.rank()].clone())
    part = copy.deepcopy(layer)
    part.pg_collection = ProcessGroups(tp_dp_cp=group, **groups)
    if "ep" in groups:
        for name, parameter in list(part.experts.named_parameters()):
            setattr(part.experts, name, cut(parameter, 0))
    else:
        shared = part.shared_experts
        shared.fc1 = cut(shared.fc1, 1)
        shared.fc2 = cut(shared.fc2, 1)
    return part


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "dbrx", "nemotron_h", "kimi_k3"])
def test_weights_over_ep_ranks(name):
    """Each rank takes its experts from either layout, and needs no others; together they give the
    whole model back."""
    whole, t, found = fam_layer(name), fam_tensors(name), {}
    blank = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.zero_()
    for group in (OneOf(rank, 4) for rank in range(4)):
        want = shard(whole, group, ep=group)
        for tensors in (t, as_held(name, t)):
            lazy = Lazy(tensors, slices=True)
            part = shard(blank, group, ep=group)
            from_hf(part, lazy, name)
            same(part.state_dict(), want.state_dict())
            read = re.findall(r"^experts\.(\d+)", "\n".join(lazy.loads), re.M)
            assert {int(e) // 2 for e in read} <= {group.rank()}
        if name not in ("gpt_oss", "dbrx"):
            out = to_hf(want, name)
            part = from_hf(shard(blank, group, ep=group), out, name)
            same(part.state_dict(), want.state_dict())
            found.update(out)
    if name in ("gpt_oss", "dbrx"):
        spread = ", ".join(key for key in t if key.startswith("experts."))
        assert error(to_hf, want, name) == (
            f"ValueError: spread over ranks: {spread}; needs a layer without ep and tp: "
            "save sharded_state_dict() and load it there")
    else:
        same(found, to_hf(whole, name))


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m3_vl_text"])
def test_weights_over_tp_ranks(name):
    """Each rank takes its part of the shared expert, from either layout; writing it refuses."""
    whole = fam_layer(name)
    t = fam_tensors(name)
    for rank, tensors in itertools.product((0, 1), (t, as_held(name, t))):
        group = OneOf(rank, 2)
        part = shard(MoELayer(whole.config), group, tp=group)
        from_hf(part, tensors, name)
        same(part.state_dict(), shard(whole, group, tp=group).state_dict())
    spread = ", ".join(f"shared_experts.{part}.weight" for part in GUD)
    check_errors([(lambda: to_hf(part, name), f"spread over ranks: {spread}; needs")])


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("options", [
    {}, {"shared_expert_intermediate_size": 8}, {"score_function": "sigmoid", "router_bias": True},
    {"add_bias_linear": True}])
def test_weights_upcycle(kind, options):
    """At the start the dense FFN where probs sum to 1, a shared expert included; with noise the
    experts part."""
    sizes = dict(hidden_size=H6, ffn_hidden_size=F5, num_experts=E8, topk=3)
    config = MoEConfig(**sizes, activation=kind, params_dtype=torch.float64,
                       router_dtype=torch.float64, **options)
    gate, up, down = double(3, F5, H6)
    gate = gate if kind == "swiglu" else None
    down = down.T
    layer = upcycle(config, gate, up, down_proj=down)
    x = double(T7, 2, H6)
    matrices = [up, down] if gate is None else [gate, up, down]
    act = relu2 if gate is None else swiglu_loop
    dense = [ffn_loop(x_H, matrices, act) for x_H in x.flatten(0, 1)]
    close(layer(x), torch.stack(dense).view(x.shape), 1e-6)

    noisy = upcycle(config, gate, up, down_proj=down, noise=0.1).experts
    for weight in (*noisy.fc1.unbind(1), noisy.fc2):
        spread = (weight - weight.mean(0)).std() / weight.mean(0).std()
        assert 0.05 < spread < 0.2 and (weight[0] - weight[1]).abs().min() > 0


def test_weights_upcycle_refuses():
    config = MoEConfig(H6, F5, E8, topk=3)
    narrow = dataclasses.replace(config, latent_size=L4)
    ungated = dataclasses.replace(config, activation="relu2")
    up, down = torch.zeros(F5, H6), torch.zeros(H6, F5)
    check_errors([
        (lambda: upcycle(narrow, up, up, down_proj=down),
         "latent_size is 4; needs None, since an expert is as wide as the dense FFN"),
        (lambda: upcycle(ungated, up, up, down_proj=down),
         "gate_proj and up_proj are 2 matrices; activation = 'relu2' needs 1"),
        (lambda: upcycle(config, None, up, down_proj=down),
         "gate_proj and up_proj are 1 matrices; activation = 'swiglu' needs 2"),
        (lambda: upcycle(config, up, down, down_proj=down),
         "up_proj has shape [6, 5]; needs [F = 5, H = 6]"),
        (lambda: upcycle(config, up, up, down_proj=down, noise=-1.0),
         "noise is -1.0; needs 0 or more")])
    text = error(upcycle, config, torch.nn.Linear(H6, F5), up, down_proj=down)
    assert text == "TypeError: gate_proj is a Linear; needs a tensor [F H]"


@over_ranks(2)
def test_weights_over_ranks(rank, ranks):
    """Each rank reads its experts out of a whole model's tensors, and writes them under their
    global numbers."""
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    config = config_from_hf(dict(
        model_type="qwen2_moe", hidden_size=6, moe_intermediate_size=5, num_experts=8,
        num_experts_per_tok=2, shared_expert_intermediate_size=4, norm_topk_prob=True))
    torch.manual_seed(3)
    whole = MoELayer(config)
    mine = MoELayer(config, groups)
    tensors = to_hf(whole, "qwen2_moe", "mlp.")
    from_hf(mine, tensors, "qwen2_moe", prefix="mlp.")
    for (name, a), b in zip(mine.named_parameters(), whole.parameters()):
        same(a, own_part(name, b, groups))
    out = to_hf(mine, "qwen2_moe", "mlp.")
    for name, tensor in out.items():
        same(tensor, tensors[name])
    local = 8 // ranks
    assert {name for name in out if ".experts." in name} == {
        f"mlp.experts.{e}.{part}_proj.weight"
        for e in range(rank * local, rank * local + local) for part in ("gate", "up", "down")}


def test_weights_example():
    """With the tensors of one block: the published output, and the same tensors back."""
    code = example("weights")
    assert len(code.strip().split("\n")) <= 10
    tensors = fam_tensors("qwen3_moe", torch.float32, "model.layers.0.mlp.")
    scope = {"hf_config": fam_fields("qwen3_moe"), "tensors": tensors, "x": torch.randn(4, 2, H6)}
    exec(code, scope)
    want = published_loop("qwen3_moe", scope["x"].double(), fam_tensors("qwen3_moe"))
    close(scope["y"], want, 1e-5)
    same(scope["back"], tensors)


@needs("transformers")
def test_weights_sharded_example(tmp_path):
    """A checkpoint in several files, with a dense layer: each MoE layer gives its block's
    output."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, intermediate_size=24, num_attention_heads=2, head_dim=8,
        mlp_only_layers=[1]))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    scope = {"folder": tmp_path}
    exec(example("sharded"), scope)
    assert list(scope["layers"]) == [0, 2]
    x = torch.randn(2, 5, 16)
    for i, layer in scope["layers"].items():
        close(layer(x), model.model.layers[i].mlp(x), 1e-5)
