"""Tests of atlas.py and published.py: formulas that are run, against the library's gates.

    python -m pytest models/test_atlas.py
"""
import dataclasses
import json
import math
import re
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import small
from models import atlas, published, table
from models.cases import (
    E8, F5, H6, IN_THE_LIBRARY, LOCAL, OWN, PLAIN, PUBLISHED, ROUTED, SIZES, SMALL, WIDE,
    close_grads, double, fam_config, fam_fields, family_of, gate_of_the_library, library_block,
    library_config, library_fields, modeling_of, whole_model)
from models.configs import KNOWN, config_from_hf, read_config, small_fields, type_of
from models.reader import Reader
from models.weights import small_weights
from moe import MoEConfig, MoELayer
from test_moe import about, best, close, error, fresh_start, needs, same
from tests.test_sources import HERE


def printed(capsys, monkeypatch, *arguments) -> tuple[str, str, int]:
    """(stdout, stderr, exit status) of `python models/atlas.py` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["atlas.py", *map(str, arguments)])
    status = 0
    try:
        runpy.run_path(atlas.__file__, run_name="__main__")
    except SystemExit as stopped:
        status = stopped.code
    return (*capsys.readouterr(), status)


def test_atlas_small_fields():
    """Of each published model that small.py computes: its layer at small widths has the output and
    the gradients of the MoELayer without roundings, to the bit."""
    computed, rounded, lacking = [], [], []
    for name, model in published.MODELS.items():
        try:
            fields_of = atlas.readings_of(model.config)[-1][1].fields
            rounded += [name] * ("probs_dtype" in fields_of)
            config = MoEConfig(**{
                **fields_of, "hidden_size": 24, "ffn_hidden_size": 16, "probs_dtype": None,
                "params_dtype": torch.float32, "router_dtype": torch.float32})
        except (ValueError, TypeError):
            continue
        if config.shared_expert_intermediate_size:
            config = dataclasses.replace(config, shared_expert_intermediate_size=20)
        try:
            layer = small.MoE(**small_fields(config))
        except ValueError as refused:
            assert str(refused).startswith("small.py lacks "), refused
            lacking.append(name)
            continue
        whole = MoELayer(config)
        with torch.no_grad():
            whole.router.weight.mul_(20)
            if whole.router.expert_bias is not None:
                whole.router.expert_bias.copy_(0.1 * torch.randn(config.num_experts))
        layer.load_state_dict(small_weights(whole))
        x = torch.randn(30, 24, requires_grad=True)
        results = [[y.detach(), *torch.autograd.grad(y.sin().sum(), [x, one_router])]
                   for y, one_router in ((layer(x), layer.router), (whole(x), whole.router.weight))]
        with about(name):
            same(*results)
        computed.append(name)
    counted = len(published.MODELS), len(computed), len({*computed} & {*rounded})
    assert counted == (57, 48, 4), counted
    page = (HERE / "docs/routers.md").read_text().split("## In one file")[1].split("##")[0]
    assert re.findall(r"`(\w+)`", page.split("all but")[1].split(". ")[0]) == lacking
    assert "computes 48 of the 57 models" in page.replace("\n", " ")


def test_atlas_small_fields_of_options():
    """What a config can say that no published model says: small.MoE of the fields is the layer, or
    the error names what small.py lacks."""
    sizes = dict(hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=3)
    taken = {
        "pre_softmax=True": dict(norm_topk_prob=False),
        "pre_softmax=True, topk=1": dict(norm_topk_prob=False, topk=1),
        "score_function='sigmoid', topk=1": dict(score_function="sigmoid", topk=1),
        "load_balancing_type='aux_loss', aux_loss_coeff=0.1": dict(aux_loss_coeff=0.1),
        "load_balancing_type=('aux_loss',), aux_loss_coeff=(0.1,)": dict(aux_loss_coeff=0.1),
        "enable_expert_bias=True, router_dtype=torch.bfloat16": dict(enable_expert_bias=True),
    }
    for options, fields in taken.items():
        config = eval(f"MoEConfig(**{{**sizes, **dict({options})}})")
        assert small_fields(config) == {**sizes, **fields}, options
        layer, whole = small.MoE(**small_fields(config)), MoELayer(config)
        layer.load_state_dict(small_weights(whole))
        x = torch.randn(5, 8)
        close(layer.eval()(x), whole.eval()(x), 2e-2 if "bfloat16" in options else 1e-6)
    lacking = {
        "topk=1": "a prob that is always 1",
        "score_function='sqrtsoftplus'": "score_function='sqrtsoftplus'",
        "load_balancing_type='seq_aux_loss', aux_loss_coeff=0.1, batch_first=True":
            "load_balancing_type='seq_aux_loss'",
        "load_balancing_type=('aux_loss', 'seq_aux_loss'), aux_loss_coeff=(0.1, 0.1)":
            "load_balancing_type=('aux_loss', 'seq_aux_loss')",
        "capacity_factor=1.5, router_bias=True": "router_bias=True, capacity_factor=1.5",
    }
    for options, words in lacking.items():
        config = eval(f"MoEConfig(**{{**sizes, **dict({options})}})")
        text = error(small_fields, config)
        assert text.startswith("ValueError: small.py lacks "), options
        assert {*words.split(", ")} <= {*text.split("lacks ")[1].split(", ")}, text


def test_atlas_in_the_docs(capsys, monkeypatch):
    """docs/routers.md has what `python models/atlas.py` prints: of one router, of three side by
    side, and the table, a line per family, refused or not."""
    page = (HERE / "docs/routers.md").read_text()
    blocks = re.findall(r"^```\n\$ python models/atlas.py(.*)\n((?:.*\n)*?)```$", page, re.M)
    assert len(blocks) == 2
    for arguments, want in blocks:
        assert printed(capsys, monkeypatch, *arguments.split()) == (want, "", 0)
    out, err, status = printed(capsys, monkeypatch)
    assert (err, status) == ("", 0)
    _, after = page.split("<!-- routers table -->\n")
    assert after.split("<!-- end of the table -->")[0] == out
    _, _, *lines = out.splitlines()
    assert [line.split("`")[1] for line in lines] == [*table.FAMILIES, *table.INEXPRESSIBLE]
    assert len({line.count(" | ") for line in out.splitlines()}) == 1


def test_atlas_refuses(capsys, monkeypatch, tmp_path):
    """One line and exit status 2, but for a type that is refused: its reason is the answer."""
    why = table.INEXPRESSIBLE["doge"]
    out, err, status = printed(capsys, monkeypatch, "doge")
    assert (out, err, status) == (f"doge is refused: {why}\n", "", 0)
    file = tmp_path / "config.json"
    for content, phrase in [
            (None, "No such file"), ("{", "Expecting property name"), ("[1]", "dict"),
            ("{}", "hidden_size is missing"),
            (json.dumps(fam_fields("mixtral", router_jitter_noise=0.1)), "router_jitter_noise")]:
        if content is not None:
            file.write_text(content)
        out, err, status = printed(capsys, monkeypatch, "mixtral", file)
        assert (out, err.count("\n"), status) == ("", 1, 2) and phrase in err, err
    for arguments in (["mixtrall"], ["mixtral", "mixtrall"]):
        out, err, status = printed(capsys, monkeypatch, *arguments)
        assert (out, err.count("\n"), status) == ("", 1, 2)
        assert "'mixtrall'" in err and ", ".join(table.FAMILIES) in err


@pytest.mark.parametrize("case", OWN)
def test_atlas_ends_with_the_config(case):
    """From any config of the type. A family without a knob for it has no line for it."""
    fields = fam_fields(case)
    text = atlas.router(family_of(case), fields)
    assert eval(text.splitlines()[-1]) == config_from_hf(fields)
    assert 10 <= len(text.splitlines()) <= 20 and "None" not in text
    row = table.TYPES[family_of(case)]
    assert ("expert_bias" in text) == ("enable_expert_bias" in row.knobs)
    assert ("latent_down" in text) == (case in ("nemotron_h-latent", "kimi_k3"))


SPEAKS = re.compile(
    "expert|moe|rout|gate|limit|shared?_|topk|top_k|group|norm|scor|swiglu|situ|latent|_act|aux")


@pytest.mark.parametrize("name", published.MODELS)
def test_atlas_reads_what_a_published_config_says(name, monkeypatch):
    """Every field that may change the router or the experts is read, or needed, or named. The
    others are of the loss, or are listed in configs.py."""
    seen = set()
    whole = Reader.whole
    monkeypatch.setattr(Reader, "whole", lambda read, name, default=None:
                        seen.add(name) or whole(read, name, default))
    config = published.MODELS[name].config
    (_, reading), *_ = atlas.readings_of(config)
    assert reading.unread == (["need_fp32_gate"] if name == "step3p5" else [])
    nested = {f"{field}.{inner}" for field in config if isinstance(config[field], dict)
              for inner in config[field]} - {"quantization_config.quant_method"}
    fields = {*config, *nested} - seen - {"ffn_config", "aux_loss_alpha", "seq_aux"}
    unread = {field.split(".")[-1] for field in fields if SPEAKS.search(field)}
    assert unread - {*reading.unread} <= KNOWN
    assert type_of(config)[0] in table.TYPES


def test_atlas_of_a_named_model_has_its_numbers():
    """Each field in brackets is in the config, and its number is in the line: what stands beside a
    model's name is that model's. A field in parentheses is not in the config."""
    for name, model in published.MODELS.items():
        title, *lines = atlas.router(name).splitlines()
        assert title.startswith(f"{name}: {model.model}") and title.endswith(f"({model.source})")
        assert ("from memory" in title) == (model.found == "memory")
        numbers = 0
        for line in lines:
            text, _, origin = line.rstrip("]").partition(" [")
            values = []
            for field in filter(None, origin.split(", ")):
                value = model.config
                for part in field.strip("()").split("."):
                    value = (value or {}).get(part)
                assert (value is None) == field.startswith("("), (name, line)
                if isinstance(value, list):
                    value = value[3]
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    values.append(value)
                if field == "activation_situ_beta" and "beta =" not in text:
                    values.pop()                             # it says which activation
            if "shared_expert(x)" in text and "(" not in origin:
                values = [math.prod(values)]
            if not re.search(r"expert_bias|rms_norm|latent_up|y / 2|shared_expert.*\(shared", line):
                printed = [float(number) for number in re.findall(r"(?<![\w.])[\d.]+", text)]
                assert set(values) <= set(printed), (name, line)
                numbers += len(values)
        assert numbers >= 4, name


def test_atlas_without_a_published_config():
    """Letters in the place of numbers, and no model's name."""
    for name, fields in published.FIELDS.items():
        title, *lines = atlas.router(name).splitlines()
        assert title == f"{name}: no config found"
        for field in fields.split():
            assert any(field in line for line in lines), (name, field)
        numbers = re.findall(r"(?<![\w.-])\d[\d.e-]*", "\n".join(lines[:-1]))
        assert set(numbers) <= {"1e-20", "2"}, name          # 2 of a group are summed


def test_atlas_says_why_no_config_computes_it(capsys, monkeypatch, tmp_path):
    """What MoEConfig refuses is not printed as one. Exit status 0: the formulas are right."""
    for name, given, why in [
            ("deepseek_v3", dict(n_routed_experts=96, n_group=7),
             "num_groups = 7 does not divide num_experts = 96; groups need equal sizes"),
            ("deepseek_v3", dict(routed_scaling_factor="1.75"),
             "scaling_factor = '1.75': needs a finite number, or None"),
            ("qwen3_moe", dict(hidden_act="gelu"),
             "hidden_act is 'gelu'; needs 'silu' or 'swish' or 'gelu_pytorch_tanh'")]:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(fam_fields(name, **given)))
        out, err, status = printed(capsys, monkeypatch, file)
        assert out.splitlines()[-1] == f"no MoEConfig: {why}" and (err, status) == ("", 0)
    assert f"{E8} experts, hidden_act = 'gelu', {F5} wide" in out


def test_atlas_of_dense_models(capsys, monkeypatch, tmp_path):
    """Granite 4.0's and Gemma 4's configs also describe models without experts."""
    file = tmp_path / "config.json"
    for name, fields, says in [
            ("granitemoehybrid", dict(num_local_experts=0, num_experts_per_tok=0),
             "num_local_experts is 0"),
            ("gemma4", dict(text_config=dict(model_type="gemma4_text", enable_moe_block=False)),
             "enable_moe_block is False")]:
        fields = {"model_type": name, **fields}
        text = f"this {name} config is of a dense model: {says}"
        assert error(config_from_hf, fields) == f"ValueError: {text}"
        file.write_text(json.dumps(fields))
        assert printed(capsys, monkeypatch, file) == ("", f"{file}: {text}\n", 2)
    moe_block = dict(model_type="gemma4_text", enable_moe_block=True)
    assert atlas.router("gemma4_text", moe_block).startswith("gemma4_text\nx: ")


def test_atlas_side_by_side(capsys, monkeypatch):
    """Each row has a name; no line is longer than 120; what all share has a title only if there is
    some."""
    out, *_ = printed(capsys, monkeypatch, "mixtral", "gpt_oss", "nemotron_h")
    lines = out.splitlines()
    assert lines[0] == "1. mixtral: mistralai/Mixtral-8x7B-v0.1" and lines[1].startswith("2. gpt")
    at = lines.index("constants: _")
    assert lines[at + 1] == "    2: alpha = 1.702, linear_offset = 1.0, clamp_value = 7.0"
    assert max(map(len, lines)) <= 120 and "_" not in lines
    out, *_ = printed(capsys, monkeypatch, "glm4_moe", "deepseek_v3")
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["type", "model", "without"]
    out, *_ = printed(capsys, monkeypatch, "glm4_moe", "glm4v_moe_text")
    assert "In all of them:\nwithout experts: layer 0\n" in out
    one_router = "\n\nsoftmax(logits[chosen]) is softmax(logits)[chosen], divided by its sum.\n\n"
    for names in (["mixtral", "qwen3_moe"], ["mixtral", "jamba"], ["glm4_moe", "deepseek_v3"]):
        out, *_ = printed(capsys, monkeypatch, *names)
        assert (one_router in out) == ("qwen3_moe" in names)
    z = torch.randn(9, 8)
    probs, chosen = z.softmax(1).topk(3)
    close(probs / (probs.sum(1, keepdim=True) + 1e-20), z.gather(1, chosen).softmax(1), 1e-6)
    same(probs.sum(1) + 1e-20, probs.sum(1))
    nothing = [("glm4_moe", "a", fam_fields("glm4_moe")), ("kimi_k3", "b", fam_fields("kimi_k3"))]
    monkeypatch.setattr(atlas, "lines_of", lambda reading: [])
    assert "In all of them:" not in atlas.compare(nothing)


def test_atlas_prints_one_rank_and_no_factor_of_one():
    for name in table.FAMILIES:
        text = atlas.router(name)
        assert ("rank = logits" in text) == ("softmax(logits[chosen])" in text)
        assert ("rank = scores" in text) == ("scores = " in text) and "* 1.0" not in text


# type, fields, what the model makes of the layer's output; "-" for nothing
BEHIND = """
axk1              -                                       post_mlp_layernorm(y)
afmoe             -                                       post_mlp_layernorm(y)
flex_olmo         -                                       post_feedforward_layernorm(y)
beam              -                                       post_feedforward_layernorm(y)
granitemoe        residual_multiplier=0.22                y * 0.22
granitemoe        residual_multiplier=1.0                 -
granitemoeshared  residual_multiplier=0.5                 y * 0.5
granitemoehybrid  shared_intermediate_size=7              y + shared_mlp(x), 7 wide
granitemoe_swa  residual_multiplier=0.5,shared_intermediate_size=7 (y + shared_mlp(x)) * 0.5, 7 wide
minimax           mlp_beta_factor=0.5                     y * 0.5
minimax           -                                       -
"""


@needs("transformers")
def test_atlas_says_what_comes_after_the_layer():
    """And in the library's decoder layer: a field that it multiplies by is an attribute, a norm is
    a module."""
    for line in BEHIND.strip().splitlines():
        name, given, after = line.split(maxsplit=2)
        given = {} if given == "-" else eval(f"dict({given})")
        text = atlas.router(name, fam_fields(name, **given))
        assert re.findall("after the layer: y = (.*?)(?: +\\[|\n)", text) == (
            [] if after == "-" else [after])
        assert config_from_hf(fam_fields(name, **given)) == fam_config(name, torch.float32)
        with torch.device("meta"):
            layers = [module for module in whole_model(name, **given).modules()
                      if type(module).__name__.endswith("DecoderLayer")]
        attribute = after.split("(")[0]
        factor = next((value for field, value in given.items() if "shared" not in field), None)
        assert factor is None or factor in vars(layers[-1]).values()
        assert not attribute.endswith("norm") or any(
            attribute in dict(layer.named_modules()) or name == "axk1" for layer in layers)


CLAMPED = [
    ("step3p5", {"swiglu_limits": [0.0, 7, 0.0], "swiglu_limits_shared": [0.0, 16, 0.0]}),
    ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 7, 0],
                        "share_expert_swiglu_limit_list": [0, 16, 0]})]


@needs("transformers")
@pytest.mark.parametrize("name, limits", CLAMPED)
def test_atlas_has_the_clamps_of_a_layer(name, limits):
    """As a formula, and in Step's experts of the library."""
    fields = fam_fields(name, **limits, num_hidden_layers=3, mlp_layer_types=["sparse"] * 3)
    routed, shared = limits
    *_, title, in_an_expert, in_shared, why, usual, _ = atlas.router(name, fields).splitlines()
    assert title == "in layer 1:" and usual == "in layers 0, 2:"
    assert why == (f"no MoEConfig: {routed} is 7; needs 0 or None; {shared} is 16; needs 0 or None")
    if name == "step3p5":
        config = library_config(name, **library_fields(name), **limits)
        block = library_block(name, config)
        names = dict(silu=F.silu, clip=torch.clip, min=lambda a, b: a.clamp(max=b))
        x = torch.randn(9, H6) * 3
        ffn = block.shared_experts
        names |= dict(gate=ffn.gate_proj(x) * 9, up=ffn.up_proj(x) * 9)
        ffn.gate_proj.weight.data *= 9
        ffn.up_proj.weight.data *= 9
        formula = in_shared.removeprefix("in the shared expert: ")
        close(ffn(x), ffn.down_proj(eval(formula, names)), 1e-4)
        assert in_an_expert == f"in an expert: {formula.replace('16', '7')}"
        assert block.experts.limit == 7


# Refused type -> the library's config, the class of the block (or of the router, where no block
# holds it), the config's fields, and weight in the formulas -> name in the block.
CORRECTED_GATE = "W=gate.weight expert_bias=gate.e_score_correction_bias"
GEMMA = "W=proj.weight scale=scale per_expert_scale=per_expert_scale"
REFUSED_ROUTERS = {
    "phimoe": (
        "Phimoe PhimoeSparseMoeBlock", SMALL | dict(
            num_experts_per_tok=2, num_local_experts=E8, router_jitter_noise=0.2),
        "W=router.weight"),
    "gemma4_text": (
        "Gemma4Text Gemma4TextRouter", dict(
            hidden_size=H6, num_experts=E8, top_k_experts=3, moe_intermediate_size=F5,
            rms_norm_eps=0.1, enable_moe_block=True), GEMMA),
    "diffusion_gemma_text": (
        "DiffusionGemmaText DiffusionGemmaTextRouter", dict(
            hidden_size=H6, num_experts=E8, top_k_experts=3, moe_intermediate_size=F5,
            rms_norm_eps=0.1), GEMMA),
    "ernie4_5_vl_moe_text": (
        "Ernie4_5_VLMoeText Ernie4_5_VLMoeMoeBlock", SIZES | dict(
            moe_num_experts=E8, moe_k=3, moe_intermediate_size=[F5, 3], moe_num_shared_experts=2,
            moe_norm_min=0.4),
        "W=text_moe.gate.weight expert_bias=text_moe.gate.moe_statics.e_score_correction_bias"),
    "inkling_text": (
        "InklingText InklingMoE", ROUTED | dict(n_shared_experts=2, route_scale=2.5),
        CORRECTED_GATE + " global_scale=gate.global_scale"),
    "jetmoe": (
        "JetMoe JetMoeMoE", LOCAL | dict(num_key_value_heads=1, num_attention_heads=3),
        "W=router.layer.weight bias=bias"),
    "kolibri1": (
        "Kolibri1 Kolibri1SparseMoeBlock", PLAIN | dict(shared_expert_intermediate_size=4),
        CORRECTED_GATE),
    "kolibri1-unnormed": (
        "Kolibri1 Kolibri1SparseMoeBlock",
        PLAIN | dict(norm_topk_prob=False, shared_expert_intermediate_size=4), CORRECTED_GATE),
    "longcat_flash": (
        "LongcatFlash LongcatFlashMoE", dict(
            hidden_size=H6, moe_topk=3, expert_ffn_hidden_size=F5, n_routed_experts=5,
            zero_expert_num=3, routed_scaling_factor=2.5),
        "W=router.classifier.weight expert_bias=router.e_score_correction_bias"),
    "muse_spark_text": (
        "MuseSparkText MuseSparkMoE", LOCAL | dict(
            moe_intermediate_size=F5, moe_hidden_size=4, routed_scaling_factor=2.5,
            output_multiplier=0.3, num_attention_heads=2, num_key_value_heads=2), CORRECTED_GATE),
    "nllb-moe": (
        "NllbMoe NllbMoeTop2Router", dict(d_model=H6, num_experts=E8, router_bias=True),
        "W=classifier.weight b=classifier.bias"),
    "switch_transformers": (
        "SwitchTransformers SwitchTransformersSparseMLP", dict(
            d_model=H6, d_ff=F5, num_experts=E8, expert_capacity=99, router_bias=True),
        "W=router.classifier.weight b=router.classifier.bias"),
    "zaya": (
        "Zaya ZayaSparseMoeBlock", WIDE | dict(
            num_experts=E8, num_experts_per_tok=1, router_hidden_size=4, rms_norm_eps=0.1), """
            D=gate.down_proj.weight d=gate.down_proj.bias scale=gate.router_states_scale
            g=gate.router_mlp.norm.weight W1=gate.router_mlp.fc1.weight b1=gate.router_mlp.fc1.bias
            W2=gate.router_mlp.fc2.weight b2=gate.router_mlp.fc2.bias
            W=gate.router_mlp.out_proj.weight expert_bias=gate.balancing_biases"""),
}


def refused_block(case: str):
    """(the library's config of a refused type, its block in eval mode, with random weights)."""
    import transformers
    block, fields, _ = REFUSED_ROUTERS[case]
    config_class, block_class = block.split()
    config = getattr(transformers, config_class + "Config")(**fields)
    config._experts_implementation = "eager"
    layer_idx = [1] if case == "zaya" else []
    block = getattr(modeling_of(config), block_class)(config, *layer_idx).eval().double()
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.normal_(0, 0.7)
    return config, block


def check_refused_formulas(case: str, text: str, block) -> None:
    """Choice, probs and output of the library's block, or what its router alone returns, from the
    printed lines alone. Routers compute in fp32."""
    _, _, where = REFUSED_ROUTERS[case]
    weights = {name: block.state_dict()[path].double().squeeze()
               for name, path in (pair.split("=") for pair in where.split())}
    E = len(weights["W"])
    x = double(1, 32, H6)
    before = double(1, 32, 4)
    called = []
    inner = block.text_moe if hasattr(block, "text_moe") else block
    router = getattr(inner, "gate", getattr(inner, "router", inner))
    has_block = router is not block
    router.register_forward_hook(lambda module, args, out: called.append(out))
    with torch.no_grad():
        y = block(x, before) if case == "zaya" else block(x if has_block else x[0])
    y = (y[0] if isinstance(y, tuple) else y).view(32, -1)
    out = called[0]
    if case == "jetmoe":                             # its router returns rows in the experts' order
        order, token, gates, sizes, _ = out
        chosen_by = torch.arange(E).repeat_interleave(torch.tensor(sizes))
        want = torch.zeros(32, E, dtype=torch.float64)
        want[token, chosen_by] = gates
    elif case in ("switch_transformers", "nllb-moe"):
        want = out[1] if case == "nllb-moe" else (out[0] * out[1])[0]
    else:
        want = torch.zeros(32, E, dtype=torch.float64).scatter_add(1, out[2], out[1].double())

    def experts(chosen, x):
        """[H, K]: each expert's output, from the library's experts alone."""
        if case == "jetmoe":
            fc1 = inner.input_linear.weight
            halves = [(fc1[e] @ x).chunk(2) for e in chosen]
            return torch.stack([inner.output_linear.weight[e] @ (F.silu(a) * b)
                                for e, (a, b) in zip(chosen, halves)], 1)
        rows = []
        for e in chosen:
            if case == "switch_transformers":
                rows.append(inner.experts[f"expert_{e}"](x))
            elif case == "zaya" and e == E - 1:
                rows.append(torch.zeros_like(x))
            else:
                once = torch.tensor([[1.0, 0.0]], dtype=x.dtype)     # LongCat's needs two slots
                rows.append(inner.experts(x[None], e.expand(1, 2), once)[0])
        return torch.stack(rows, 1)

    norm = None
    if case == "muse_spark_text":                    # its experts have the norm inside
        norm = inner.experts.post_expert_norm
        inner.experts.post_expert_norm = torch.nn.Identity()
    shared = getattr(block, "shared_experts", None)
    if case == "inkling_text":
        one_hot = torch.eye(2, dtype=torch.float64)
        weights["shared_experts"] = lambda x: torch.stack(
            [shared(x.view(1, 1, -1), gamma.view(1, 1, -1)).flatten() for gamma in one_hot], 1)
    names = weights | dict(
        inf=math.inf, where=torch.where, sum=lambda a: a.sum(-1), mean=torch.mean, abs=torch.abs,
        max=torch.max, sqrt=torch.sqrt, gelu=F.gelu, softmax=lambda a: a.softmax(-1),
        sigmoid=torch.sigmoid, experts=experts, shared_expert=shared,
        top=lambda rank, n: torch.tensor(best(rank.tolist(), n)),
        maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
        without=lambda rank, chosen: rank.scatter(0, chosen, -math.inf),
        concat=lambda *parts: torch.cat([torch.as_tensor(part) for part in parts]),
        pre_expert_proj=getattr(block, "pre_expert_proj", None),
        pre_expert_norm=getattr(block, "pre_expert_norm", None),
        post_expert_proj=getattr(block, "post_expert_proj", None),
        post_expert_norm=lambda rows: norm(rows.T).T)
    for t in range(32):
        given = names | dict(x=x[0, t], before=before[0, t])
        for line in text.splitlines():
            match = re.match(r"(\w+) = (.*?)(, \w+ wide)?( +\[|$)", line)
            if match and (has_block or match[1] not in "yz"):
                with torch.no_grad():
                    given[match[1]] = eval(match[2], given)
        got = torch.zeros(E, dtype=torch.float64).scatter_add(0, given["chosen"], given["probs"])
        if case == "zaya":
            got[-1] = 0                              # the expert that computes nothing
        close(got, want[t], 1e-5)
        if has_block:
            close(given["y"], y[t], 1e-5)


@needs("transformers")
@pytest.mark.parametrize("case", REFUSED_ROUTERS)
def test_atlas_has_the_formulas_of_refused_routers(case):
    """With the numbers of a config, and with the names of its fields. The last line is the reason
    why there is no MoEConfig."""
    config, block = refused_block(case)
    name = family_of(case) if case != "nllb-moe" else case
    text = atlas.router(name, config)
    assert text == atlas.router(name, config.to_dict())
    title, *lines, last = text.splitlines()
    assert title == name and last == f"no MoEConfig: {table.REFUSED[name]}"
    check_refused_formulas(case, "\n".join(lines), block)
    title, *unnumbered, end = atlas.router(name).splitlines()
    assert title == f"{name}: no config found" and end == last
    assert len(unnumbered) >= len(lines) and not any("  [" in line for line in unnumbered)


def test_atlas_refused_routers_under_other_names():
    config = dict(model_type="gemma4", text_config=dict(
        model_type="gemma4_text", enable_moe_block=True, num_experts=128, top_k_experts=8))
    text = atlas.router("gemma4", config)
    assert "rank = scores\nchosen = top(rank, 8) " in text
    assert text.splitlines()[-1] == f"no MoEConfig: {table.INEXPRESSIBLE['gemma4_text']}"


@needs("transformers")
def test_atlas_switch_lacks_only_its_capacity():
    """Switch's block is a layer with ReLU as long as no expert is full. Beyond expert_capacity, a
    number of tokens of each sequence, its tokens get nothing: a capacity_factor is a multiple of
    the mean over all tokens."""
    config, block = refused_block("switch_transformers")
    block.router.classifier.bias.data.zero_()
    ours = MoEConfig(H6, F5, topk=1, num_experts=E8, activation="relu", pre_softmax=True,
                     params_dtype=torch.float64, batch_first=True)
    layer = MoELayer(ours)
    experts = [block.experts[f"expert_{e}"] for e in range(E8)]
    with torch.no_grad():
        layer.router.weight.copy_(block.router.classifier.weight)
        layer.experts.fc1.copy_(torch.stack([expert.wi.weight for expert in experts])[:, None])
        layer.experts.fc2.copy_(torch.stack([expert.wo.weight for expert in experts]))
    x = double(2, 9, H6, requires_grad=True)
    want, got = block(x), layer(x)
    close(got, want, 1e-5)                               # their router computes in fp32
    close_grads(got, want, [x], tol=1e-5)
    block.router.expert_capacity = 1
    _, indices = layer.router.route(x)
    first = torch.stack([F.one_hot(row, E8).cumsum(0).gather(1, row[:, None])[:, 0] == 1
                         for row in indices.view(2, 9)])
    assert 0 < first.sum() < 18
    close(block(x), got * first[..., None], 1e-5)


@needs("transformers")
def test_atlas_nllb_runs_two_experts_in_the_library():
    """transformers 5.24 takes the 0 and 1 of a mask for the numbers of experts, so there is no
    block to hold a layer against."""
    from transformers.models.nllb_moe import NllbMoeConfig, modeling_nllb_moe
    block = modeling_nllb_moe.NllbMoeSparseMLP(NllbMoeConfig(d_model=H6, num_experts=E8), F5)
    run_experts = set()
    for e in range(E8):
        block.experts[f"expert_{e}"].register_forward_hook(
            lambda *args, e=e: run_experts.add(e))
    block.eval()(torch.randn(2, 32, H6))
    assert run_experts == {0, 1}


# The library's block multiplies by its scaling factor, its gate does not.
SCALED_ELSEWHERE = "beam", "minimax_m3_vl_text", "step3p5", "laguna"


def interpreted(text: str, x: Tensor, **names) -> dict[int, float]:
    """expert -> prob of one token: the printed formulas, line by line."""
    def best_groups(rank, groups, kept, n):
        size = len(rank) // groups
        parts = rank.view(groups, size)
        good = best([sum(sorted(part.tolist())[-n:]) for part in parts], kept)
        outside = torch.tensor([e // size not in good for e in range(len(rank))])
        return rank.masked_fill(outside, -math.inf)

    names |= dict(
        x=x, best_groups=best_groups, top=lambda rank, n: best(rank.tolist(), n),
        softmax=lambda a: a.softmax(-1), sigmoid=torch.sigmoid,
        sqrtsoftplus=lambda a: (1 + a.exp()).log().sqrt())
    for line in text.splitlines():
        if match := re.match(r"(logits|scores|rank|chosen|probs) = (.*?)( +\[|$)", line):
            names[match[1]] = eval(match[2], names)
    return dict(zip(names["chosen"], names["probs"].tolist(), strict=True))


def check_formulas(case: str, config, text: str, layer_idx: int = 1) -> None:
    """The choice and the weights of the library's gate, in fp32, from the printed lines alone."""
    block = library_block(case, config, layer_idx)
    layout = table.TYPES[family_of(case)].layouts[-1]
    tensors = {slot.parameter: block.state_dict().get(name) for name, slot in layout.items()}
    names = {"W": tensors["router.weight"], "b": tensors.get("router.bias"),
             "expert_bias": tensors.get("router.expert_bias")}
    names = {name: None if t is None else t.double().flatten(0, -2 if name == "W" else -1)
             for name, t in names.items()}
    x = torch.randn(1, 32, H6)
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, block, x)
    scale = 1.0
    if case in SCALED_ELSEWHERE:
        scale = read_config(config, layer_idx).fields["scaling_factor"]
    for t in range(32):
        pairs = interpreted(text, x[0, t].double(), **names)
        assert sorted(pairs) == sorted(indices[t].tolist())
        want = {e: w * scale for e, w in zip(indices[t].tolist(), weights[t].tolist())}
        assert pairs == pytest.approx(want, rel=1e-4)


@needs("transformers")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_atlas_gives_what_the_librarys_gate_gives(case):
    config = library_config(case, **library_fields(case))
    check_formulas(case, config, atlas.router(family_of(case), config))


@needs("transformers")
@pytest.mark.parametrize("name", [name for name in published.MODELS if PUBLISHED[name].block])
def test_atlas_of_a_named_model_is_the_librarys_of_its_config(name):
    """The published fields in the library's config: the gate that it builds, with all its experts,
    and the same text. The model is narrow, so that it fits."""
    narrow = dict.fromkeys(("hidden_size", "d_model"), H6) | dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "expert_hidden_dim", "share_expert_dim",
         "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_intermediate_size"), F5)
    one = {field: value[5] for field, value in published.MODELS[name].config.items()
           if isinstance(value, list) and not re.search("limits|layer_", field)}
    fields = {field: one.get(field, value)
              for field, value in published.MODELS[name].config.items()
              if value is not None and field not in ("quantization_config", "model_type")}
    fields = {field: narrow.get(field, value) if value else value
              for field, value in fields.items()}
    attention = dict(num_attention_heads=2, num_key_value_heads=2)
    if name == "granitemoehybrid":
        attention |= dict(mamba_n_heads=4)
    if name == "dbrx":
        attention = {}
        fields["ffn_config"] = fields["ffn_config"] | {"ffn_hidden_size": F5}
    config = library_config(name, **fields, **attention)
    for text in (atlas.router(name), atlas.router(name, config)):
        check_formulas(name, config, text, layer_idx=5)      # after the hash layers
