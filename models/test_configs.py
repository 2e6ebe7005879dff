"""Tests of configs.py, reader.py and table.py: published configs, and what of them is refused.

    python -m pytest models/test_configs.py
"""
import dataclasses
import functools
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

from models import atlas, published, reader, table
from models.cases import (
    IN_THE_LIBRARY, PRECISION, PUBLISHED, WITH_A_ROW, check_errors, fam_config, fam_fields,
    fam_layer, fam_tensors, family_of, library_config, library_fields, whole_model)
from models.configs import config_from_hf, read_config
from models.table import prefixes_of, tensors_of
from models.weights import from_hf, to_hf
from moe import MoEConfig, MoELayer
from test_moe import error, fresh_start, needs, same
from tests.test_sources import HERE, check_examples


def test_configs_are_those_listed_here():
    assert set(table.FAMILIES) == set(WITH_A_ROW)
    assert sorted(table.FAMILIES) == sorted([*published.MODELS, *published.FIELDS])
    assert set(WITH_A_ROW) - set(IN_THE_LIBRARY) == {"kimi_k2", "kimi_k3"}


def library_types() -> list[str]:
    """Every model_type of the library with MoE blocks. Imports nothing. In a folder with such a
    class, or without models, it is those of the configs with a number of experts; if a folder with
    such a class has none, all."""
    types = []
    library = importlib.util.find_spec("transformers").origin
    for folder in sorted(Path(library).parent.glob("models/*")):
        def text(kind):
            return "\n".join(file.read_text() for file in folder.glob(f"{kind}_*.py"))
        models = text("modeling")
        if models and not re.search(r"^class \w*(Experts|MoE|Moe)\(", models, re.M):
            continue
        parts = re.split(r"^class ", text("configuration"), flags=re.M)[1:]
        typed = {match[1]: part for part in parts
                 if (match := re.search(r'^    model_type = "(.+)"', part, re.M))}
        counted = [name for name in typed if re.search(r"^    \w*experts:", typed[name], re.M)]
        types += counted
        if models:
            types += [] if counted else typed
            types += [name for name in typed if '"text_config":' in typed[name]]
    return types


@needs("transformers")
def test_configs_know_every_type_of_the_library():
    """SkyRL #1908: a newer model is unknown. Each type is a row or is refused by a reason of its
    own, and none is both."""
    types = library_types()
    refused = table.INEXPRESSIBLE
    unknown = set(types) - set(table.TYPES) - set(table.REFUSED)
    assert not unknown and len(types) > 70
    assert not set(table.FAMILIES) & set(refused) and len(set(refused.values())) == len(refused)
    assert set(table.FAMILIES) - set(types) == {"kimi_k2", "kimi_k3"}
    assert set(refused) - set(types) == {"qwen3_omni_moe"}
    assert "gemma4" in table.REFUSED
    for name, why in table.REFUSED.items():
        for call in (lambda: config_from_hf({"model_type": name}),
                     lambda: from_hf(fam_layer("mixtral"), {}, name)):
            assert error(call) == f"ValueError: model_type is {name!r}: {why}"


# type, field and value, the refusal; "-" where it is only named
UNREAD = """
deepseek_v3    router_temperature=2.0       -
deepseek_v3    moe_router_noise_std=0.1     -
deepseek_v3    group_score_topk=1           -
deepseek_v3    use_expert_bias=False        needs True or None
deepseek_v3    router_dtype='bfloat16'      needs 'float32' or 'fp32' or None
deepseek_v3    shared_expert_gate=True      needs False or None
qwen3_moe      expert_capacity_factor=1.25  -
qwen3_moe      e_score_correction_bias=True needs False or None
qwen3_moe      router_dtype='float32'       -
mimo_v2_flash  moe_router_dtype='bfloat16'  needs 'float32' or 'fp32' or None
step3p5        need_fp32_gate=True          -
dbrx           ffn_config.moe_noise=0.1     -
qwen2_moe      use_moe=False                needs True or None
"""


@pytest.mark.parametrize("line", UNREAD.strip().splitlines())
def test_configs_unread_fields(line):
    """What speaks of routers, gates, experts or limits is read, and refused, or it is named: by the
    atlas, and in one warning."""
    name, given, needs = line.split(maxsplit=2)
    field, value = given.split("=")
    fields = fam_fields(name)
    if "." in field:
        fields["ffn_config"] = fields["ffn_config"] | {field.split(".")[1]: eval(value)}
    else:
        fields[field] = eval(value)
    if needs != "-":
        assert error(config_from_hf, fields).endswith(f": {field} is {value}; {needs}")
        return
    text = f"this {name} config has fields that nothing reads: {field}"
    with pytest.warns(UserWarning, match=re.escape(text) + "$"):
        config = config_from_hf(fields)
    assert config == config_from_hf(fam_fields(name))
    lines = atlas.router(name, fields).splitlines()
    assert f"not read: {field}" in lines and eval(lines[-1]) == config


@needs("transformers")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_configs_no_warning_for_the_librarys_configs(case, recwarn):
    for config in (library_config(case, **library_fields(case)), fam_fields(case)):
        assert read_config(config).unread == []
        if "hy_v4" not in case:                       # its shared experts are refused
            config_from_hf(config)
    assert not [warning for warning in recwarn if "nothing reads" in str(warning.message)]


def test_configs_unknown_type_names_the_nearest():
    for name, nearest in [("mimo_v2", "mimo_v2_flash"), ("qwen3_moee", "qwen3_moe")]:
        text = error(config_from_hf, {"model_type": name})
        assert text.startswith(f"ValueError: model_type is {name!r}; nearest: {nearest}; known: ")


def test_configs_configs_as_models_publish_them():
    """dots.llm1 names its method as its score function; Step-3.7-Flash says twice that it has a
    shared expert."""
    dots = fam_fields("dots1", scoring_func="noaux_tc")
    assert config_from_hf(dots) == fam_config("dots1", torch.float32)
    step = fam_fields("step3p5", n_shared_experts=1)
    assert config_from_hf(step) == fam_config("step3p5", torch.float32)


@needs("transformers")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_configs_defaults_are_the_librarys(case):
    fields = library_fields(case)
    ends = "_size", "_experts", "_tok", "_token", "_k", "topk", "d_model", "_heads", "_dim"
    counts = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    sizes = {name: value for name, value in fields.items()
             if name.endswith(ends) and (name not in counts or value == 0)}
    for name in sizes.keys() & {"n_routed_experts", "num_experts"}:
        sizes[name] *= 4                              # the default groups divide it
    if case == "dbrx":
        ffn = fields["ffn_config"].items()
        sizes["ffn_config"] = {name: value for name, value in ffn if "normalize" not in name}
    layer_idx = 3 if case == "deepseek_v4" else None  # the first without a table
    by_default = config_from_hf(library_config(case, **sizes), layer_idx)
    assert by_default == config_from_hf({"model_type": family_of(case)} | sizes, layer_idx)


def test_configs_config_dtype():
    """The dtype is the config's; text_config is looked into, and the inner dtype wins."""
    read, base, outer = config_from_hf, fam_fields("deepseek_v3"), {"model_type": "kimi"}
    config = read(base)
    bf16 = dataclasses.replace(config, params_dtype=torch.bfloat16)
    assert config.params_dtype == torch.float32 and read(types.SimpleNamespace(**base)) == config
    assert read(outer | {"text_config": base}) == config
    for name, dtype in [("torch_dtype", "bfloat16"), ("dtype", torch.bfloat16),
                        ("dtype", "torch.bfloat16")]:
        given = {name: dtype}
        assert read(base | given) == bf16
        assert read(outer | {"text_config": base} | given) == bf16
    inner = outer | {"text_config": base | {"dtype": "bfloat16"}}
    for text in (inner, outer | {"text_config": inner}):
        assert read(text | {"torch_dtype": "float16"}) == bf16


# family, fields, what is published where the config leaves it out
DEFAULTS = """
olmoe                -                     norm_topk_prob=False
qwen3_moe            -                     norm_topk_prob=False
qwen2_moe            -                     norm_topk_prob=False
qwen3_next           -                     norm_topk_prob=True
deepseek_v2          -                     num_groups=None scaling_factor=1.0 norm_topk_prob=False
deepseek_v2          topk_method='greedy'  num_groups=None group_topk=None group_score_topk=None
deepseek_v3          -                     num_groups=8 group_topk=4 group_score_topk=2
deepseek_v3          -                     scaling_factor=2.5 norm_topk_prob=True
deepseek_v3          -                     shared_expert_intermediate_size=16
deepseek_v3          n_shared_experts=None shared_expert_intermediate_size=None
kimi_k2              -                     num_groups=8 group_topk=4 scaling_factor=2.5
glm4_moe             -                     num_groups=None scaling_factor=1.0 norm_topk_prob=True
dots1                -                     num_groups=None scaling_factor=1.0 norm_topk_prob=False
dots1                n_group=None          num_groups=None group_topk=None
gpt_oss              -                     activation='quick_geglu' glu_alpha=1.702
gpt_oss              -                     glu_linear_offset=1.0 activation_clamp_value=7.0
mixtral              hidden_act='swish'    activation='swiglu'
mixtral              hidden_act='gelu_pytorch_tanh'  activation='geglu'
ernie4_5_moe         -                     shared_expert_intermediate_size=32
lfm2_moe             -                     norm_topk_prob=True enable_expert_bias=True
lfm2_moe             use_expert_bias=False enable_expert_bias=False
kimi_linear          -                     scaling_factor=2.446 norm_topk_prob=True situ_beta=1.0
kimi_linear          -                     latent_size=None latent_norm=False num_groups=None
deepseek_v4          num_hash_layers=0     scaling_factor=1.5 activation_clamp_value=10.0
deepseek_v4          num_hash_layers=0     score_function='sqrtsoftplus' enable_expert_bias=True
inkling2_text        -                     situ_beta=4.0 situ_linear_beta=25.0 scaling_factor=8.0
flint                shared_expert_intermediate_size=4  norm_topk_prob=True
mistral_large4_text  -                     scaling_factor=1.0 num_groups=None
minimax_m3_vl_text   shared_intermediate_size=4  scaling_factor=2.0 glu_alpha=1.702
minimax_m3_vl_text   shared_intermediate_size=4  activation_clamp_value=7.0
bailing_hybrid       -                     num_groups=8 group_topk=4 scaling_factor=2.5
axk2                 -                     scaling_factor=2.5 shared_expert_intermediate_size=16
dots3_note_text      shared_experts_intermediate_size=4  num_groups=None scaling_factor=1.0
beam                 -                     num_groups=8 group_topk=4 scaling_factor=2.5
mellum               -                     norm_topk_prob=True
flex_olmo            -                     norm_topk_prob=False
qwen3_omni_moe_text  -                     norm_topk_prob=True
qwen3_omni_moe_talker_text  -              norm_topk_prob=False
aria_text            -                     shared_expert_intermediate_size=32
cohere2_moe          -                     score_function='softmax' norm_topk_prob=True
cohere2_moe          -                     shared_expert_intermediate_size=None
cohere2_moe          norm_topk_prob=False  norm_topk_prob=True
cohere2_moe          expert_selection_fn='sigmoid',norm_topk_prob=False  norm_topk_prob=False
mistral4             -                     scaling_factor=1.0 num_groups=None norm_topk_prob=True
mistral4             norm_topk_prob=False  norm_topk_prob=False
afmoe                -                     scaling_factor=1.0 shared_expert_intermediate_size=32
hy_v3                -                     scaling_factor=2.826 shared_expert_intermediate_size=16
laguna               -                     scaling_factor=1.0
step3p5              share_expert_dim=4    scaling_factor=1.0
step3p5              share_expert_dim=4,swiglu_limits=[0.0,0.0]  activation_clamp_value=None
exaone_moe           -                     scaling_factor=2.5 num_groups=None
mimo_v2_flash        routed_scaling_factor=None  scaling_factor=None
glm_moe_dsa          -                     scaling_factor=2.5 num_groups=None
glm4_moe_lite        -                     scaling_factor=1.8 num_groups=None
glm5_next_text       -                     scaling_factor=2.5 activation_clamp_value=10.0
axk1                 -                     num_groups=8 group_topk=4 scaling_factor=2.5
hy_v4                n_shared_experts=0    activation_clamp_value=10.0 scaling_factor=2.827
"""


def test_configs_config_values():
    """Published defaults, and fields that no small config above has."""
    sizes = dict(hidden_size=64, num_experts=32, num_experts_per_tok=4)
    sizes |= dict(intermediate_size=16, moe_intermediate_size=16)
    for line in DEFAULTS.strip().split("\n"):
        name, given, *want = line.split()
        fields = {"model_type": name} | sizes
        if "shared_expert_intermediate_size" in PUBLISHED[name].config:
            fields["shared_expert_intermediate_size"] = 4
        if given != "-":
            fields |= eval(f"dict({given})")
        config = config_from_hf(fields)
        for field, value in eval(f"dict({','.join(want)})").items():
            assert getattr(config, field) == value, line
    dbrx = PUBLISHED["dbrx"].config["ffn_config"] | dict(moe_normalize_expert_weights=None)
    assert not fam_config("dbrx", ffn_config=dbrx).norm_topk_prob


@needs("transformers")
@pytest.mark.parametrize("outer, text", [
    *((name, f"{name}_text") for name in (
        "inkling2", "mistral_large4", "minimax_m3_vl", "dots3_note", "qwen4_exp", "aria",
        "glm4v_moe", "glm5_next", "qwen3_5_moe", "qwen3_vl_moe")),
    ("kimi_k3", "kimi_k3")])
def test_configs_composite_models(outer, text):
    """The outer config and the outer name do as the text model's; the library's objects too."""
    inner = fam_fields(text)
    plain = fam_config(text, torch.float32)
    other = inner | {"model_type": "minimax_m2" if outer != "kimi_k3" else "kimi_linear"}
    for config in ({"model_type": outer, "text_config": inner}, {"text_config": inner},
                   {"model_type": outer, "text_config": other},
                   inner | {"model_type": outer}):           # dots3_note is published like this
        assert config_from_hf(config) == plain
    t = fam_tensors(text, torch.float32)
    layer = from_hf(MoELayer(plain), t, outer)
    same(to_hf(layer, outer), t)
    if outer == "kimi_k3":                                   # which the library does not have
        del other["hidden_act"]                              # situ, since it has a beta
        assert config_from_hf(other) == plain
        return
    import transformers
    theirs = transformers.PreTrainedConfig()
    theirs.model_type = outer
    theirs.text_config = library_config(text, **library_fields(text))
    assert config_from_hf(theirs) == plain


def test_configs_layers_that_differ():
    """DeepSeek-V4's first layers choose by a table: which layer it is has to be said."""
    read = config_from_hf
    types_4 = ["hash_moe", "hash_moe", "moe", "moe"]
    v4 = fam_fields("deepseek_v4", num_hidden_layers=4)
    untyped = {name: value for name, value in v4.items() if name != "mlp_layer_types"}
    typed = v4 | {"mlp_layer_types": types_4}
    by_score = read(v4)
    by_table = dataclasses.replace(by_score, enable_expert_bias=False)
    for given, hashed in ((typed, 2), (untyped | {"num_hash_layers": 2}, 2), (untyped, 3),
                          (v4 | {"mlp_layer_types": None, "num_hash_layers": 2}, 2)):
        want = [by_table] * hashed + [by_score] * (4 - hashed)
        assert [read(given, i) for i in range(4)] == want
    assert read(untyped | {"num_hash_layers": 0}) == by_score

    hunyuan = fam_fields("hunyuan_v1_moe", moe_topk=[3, 2, 1, 2])
    assert read(hunyuan, layer_idx=1).topk == 2
    assert read(hunyuan | {"moe_topk": [3]}).topk == 3
    dense = v4 | {"mlp_layer_types": ["moe", "dense"]}
    check_errors([
        (lambda: read(typed), "mlp_layer_types is 'hash_moe' in layers 0 to 1 or "
                              "'moe' in layers 2 to 3; needs layer_idx"),
        (lambda: read(untyped), "the first 3 layers are hash layers; needs layer_idx"),
        (lambda: read(typed, 4), "mlp_layer_types has 4 values; layer_idx is 4"),
        (lambda: read(typed, -1), "layer_idx is -1; needs 0 or more"),
        (lambda: read(dense, 1), "layer_idx is 1, a layer without experts; needs layers 0"),
        (lambda: read(hunyuan),
         "moe_topk is 3 in layer 0 or 2 in layers 1, 3 or 1 in layer 2; needs layer_idx")])


# type, fields of published configs, which of 8 layers are dense
DENSE_LAYERS = """
deepseek_v3   first_k_dense_replace=2  0 1
glm_moe_dsa   first_k_dense_replace=2,mlp_layer_types=['sparse']*8  -
kimi_linear   mlp_layer_types=['dense']+['sparse']*6+['dense']  0 7
kimi_linear   first_k_dense_replace=2,moe_layer_freq=1  0 1
axk1          first_k_dense_replace=1,moe_layer_freq=2  0 1 3 5 7
mimo_v2_flash moe_layer_freq=[0]+[1]*7  0
dots3_note_text  moe_layer_freq=[0,1]*4  0 2 4 6
minimax_m3_vl_text  moe_layer_freq=[0]*3+[1]*5  0 1 2
step3p5       moe_layers_enum='3,4,6,7'  0 1 2 5
llama4_text   interleave_moe_layer_step=2  0 2 4 6
llama4_text   moe_layers=[1,2]  0 3 4 5 6 7
jamba         expert_layer_period=4,expert_layer_offset=2  0 1 3 4 5 7
lfm2_moe      num_dense_layers=3  0 1 2
afmoe         num_dense_layers=0  -
ernie4_5_moe  moe_layer_start_index=1,moe_layer_end_index=6  0 7
ernie4_5_moe  moe_layer_start_index=1,moe_layer_end_index=-1,moe_layer_interval=2  0 2 4 6
qwen3_moe     mlp_only_layers=[3],decoder_sparse_step=2  0 2 3 4 6
qwen3_next    mlp_only_layers=[3]  3
flint         mlp_only_layers=[]  -
nemotron_h    hybrid_override_pattern='MEMEM*EE'  0 2 4 5
nemotron_h    layers_block_type=['mamba','moe']*4  0 2 4 6
"""


def sparse_in_the_library(case: str, **fields) -> tuple[list[int], object]:
    """The layers with experts in the library's own model, on the meta device, and its config.
    PUBLISHED says of most types that all layers have experts. That is left out here."""
    whole = PUBLISHED[case].whole
    fixed = dict.fromkeys(["mlp_layer_types", "first_k_dense_replace", "num_dense_layers",
                           "mlp_only_layers", "moe_layer_start_index"])
    fixed |= dict(num_hidden_layers=8) | fields
    if case == "dbrx":
        fixed = dict(n_layers=8)
    if case == "deepseek_ocr2_text" and not fields:
        fixed["mlp_layer_types"] = ["dense"] + ["sparse"] * 7          # it has no default
    if "layer_types" in whole:
        fixed["layer_types"] = whole["layer_types"] * 4
    with torch.device("meta"):
        model = whole_model(case, **fixed)
    prefixes = prefixes_of(tensors_of(model), table.TYPES[case].layouts[-1:])
    return [table.layer_of(prefix) for prefix in prefixes], model.config


@needs("transformers")
@pytest.mark.parametrize("case", [case for case in IN_THE_LIBRARY if case in WITH_A_ROW])
def test_configs_dense_layers_are_the_librarys(case):
    """Of every type, where its config does not say: of the config object, and of a dict without
    that field."""
    sparse, config = sparse_in_the_library(case)
    assert read_config(config).sparse == sparse
    sizes = {name: value for name, value in fam_fields(case).items() if name != "mlp_layer_types"}
    if case not in ("deepseek_ocr2_text", "nemotron_h"):     # which have no default
        assert read_config(sizes | {"num_hidden_layers": 8}).sparse == sparse


@needs("transformers")
@pytest.mark.parametrize("line", DENSE_LAYERS.strip().splitlines())
def test_configs_dense_layers(line):
    """In all the ways in which configs say it: as the library has it, refused by their numbers, and
    printed first."""
    name, given, *dense = line.split()
    dense = [] if dense == ["-"] else [int(layer) for layer in dense]
    given = eval(f"dict({given})")
    fields = fam_fields(name, **{"num_hidden_layers": 8, **given})
    sparse = [layer for layer in range(8) if layer not in dense]
    assert sparse_in_the_library(name, **given)[0] == sparse
    text = atlas.router(name, fields)
    assert (text.splitlines()[1] == f"without experts: {reader.layers(dense)}"
            or not dense and "without" not in text)
    for layer in range(8):
        call = functools.partial(config_from_hf, fields, layer)
        if layer in dense:
            assert error(call) == (
                f"ValueError: this {name} config cannot be expressed: layer_idx is {layer}, "
                f"a layer without experts; needs {reader.layers(sparse)}")
        else:
            assert call() == config_from_hf(fields)


def test_configs_dense_layers_that_the_library_does_not_read():
    """The code of K-EXAONE and of Hunyuan does."""
    for name, given in [
            ("exaone_moe", dict(first_last_k_dense_replace=2)),
            ("exaone_moe", dict(is_moe_layer=[False] * 2 + [True] * 6)),
            ("hunyuan_v1_moe", dict(moe_layer_num_skipped=2))]:
        read = read_config(fam_fields(name, num_hidden_layers=8, **given))
        assert (read.dense, read.sparse) == ([0, 1], [2, 3, 4, 5, 6, 7])


# family, field, value, needs
REFUSED = """
mixtral              router_jitter_noise   0.1           0.0 or None
mixtral              hidden_act            'gelu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
qwen3_moe            n_group               4             1 or 0 or None
qwen3_moe            scoring_func          'sigmoid'     'softmax' or None
qwen3_moe            moe_latent_size       3             None
qwen3_moe            swiglu_limit          7.0           None
qwen3_moe            topk_method           'noaux_tc'    'greedy' or None
qwen3_moe            n_shared_experts      1             0 or None
qwen3_moe            routed_scaling_factor 2.5           1.0 or 0 or None
deepseek_v2          topk_method           'noaux_tc'    'greedy' or 'group_limited_greedy'
deepseek_v2          norm_topk_prob        True          False or None
deepseek_v2          mlp_bias              True          False or None
deepseek_v3          topk_method           'greedy'      'noaux_tc' or None
deepseek_v3          scoring_func          'softmax'     'sigmoid' or None
ernie4_5_moe         use_bias              True          False or None
ernie4_5_moe         moe_norm_min          0.1           1e-12 or 0.0
minimax_m2           use_routing_bias      False         True
minimax_m2           shared_intermediate_size 4          0 or None
hunyuan_v1_moe       num_shared_expert     2             1
hunyuan_v1_moe       use_mixed_mlp_moe     False         True
hunyuan_v1_moe       group_limited_greedy  True          False or None
nemotron_h           mlp_hidden_act        'silu'        'relu2'
nemotron_h           n_shared_experts      2             1 or None
nemotron_h           topk_method           'greedy'      'noaux_tc' or None
jamba                norm_topk_prob        True          False or None
llama4_text          hidden_act            'relu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
gpt_oss              hidden_act            'gelu'        'silu' or 'swish' or None
kimi_linear          topk_method           'greedy'      'noaux_tc' or None
kimi_linear          moe_router_activation_func 'softmax' 'sigmoid' or None
kimi_linear          hidden_act  'gelu'  'silu' or 'swish' or 'gelu_pytorch_tanh' or 'situ'
deepseek_v4          scoring_func          'softmax'     'sqrtsoftplus' or 'sigmoid'
deepseek_v4          norm_topk_prob        False         True or None
deepseek_v4          n_shared_experts      2             1 or None
inkling2_text        hidden_act            'gelu'        'silu' or 'swish' or None
inkling2_text        scoring_func          'softmax'     'sigmoid' or None
flint                hidden_act            'gelu'        'silu' or 'swish' or 'gelu_pytorch_tanh'
flint                n_group               2             1 or 0 or None
mistral_large4_text  norm_topk_prob        False         True or None
axk2                 n_group               8             1 or 0 or None
minimax_m3_vl_text   hidden_act            'gelu'        'swigluoai' or 'silu' or None
minimax_m3_vl_text   use_routing_bias      False         True or None
minimax_m3_vl_text   n_shared_experts      2             1 or None
bailing_hybrid       score_function        'softmax'     'sigmoid' or None
bailing_hybrid       moe_router_enable_expert_bias False True or None
dots3_note_text      mlp_bias              True          False or None
beam                 scoring_func          'softmax'     'sigmoid' or None
beam                 n_shared_experts      1             0 or None
qwen4_exp_text       scoring_func          'sigmoid'     'softmax' or None
qwen3_vl_moe_text    norm_topk_prob        False         True or None
qwen3_5_moe_text     norm_topk_prob        False         True or None
aria_text            hidden_act            'gelu_pytorch_tanh'  'silu' or 'swish' or None
aria_text            mlp_bias              True          False or None
cohere2_moe          expert_selection_fn   'relu'        'softmax' or 'sigmoid'
cohere2_moe          shared_expert_combination_strategy 'average' 'sum'
afmoe                route_norm            False         True or None
afmoe                score_func            'softmax'     'sigmoid' or None
laguna               moe_router_logit_softcapping 30.0   0 or None
laguna               moe_apply_router_weight_on_input True False or None
step3p5              swiglu_limits         7.0           0 or None
step3p5              swiglu_limits_shared  16.0          0 or None
step3p5              moe_router_activation 'softmax'     'sigmoid' or None
step3p5              norm_expert_weight    False         True or None
hy_v4  n_shared_experts  1  0, since a layer would clamp its shared expert too
bailing_hybrid       expert_swiglu_limit_list 4         0 or None
bailing_hybrid       scale_router_input    True          False or None
hy_v3                moe_router_use_sigmoid False        True or None
minimax              shared_intermediate_size 4          0 or None
glm5_next_text       hidden_act            'gelu_pytorch_tanh'  'silu' or 'swish' or None
"""


def test_configs_refused_fields():
    """What would make another model is named; nothing is computed as something else."""
    for line in REFUSED.strip().split("\n"):
        name, field, value, needs = line.split(maxsplit=3)
        text = error(config_from_hf, fam_fields(name, **{field: eval(value)}))
        assert text == (f"ValueError: this {name} config cannot be expressed: "
                        f"{field} is {value}; needs {needs}")


def test_configs_refused_configs():
    """One error lists all that is wrong."""
    def dbrx(**fixed):
        return fam_fields("dbrx", ffn_config=PUBLISHED["dbrx"].config["ffn_config"] | fixed)

    missing = (
        "hidden_size is missing; num_experts_per_tok or num_experts_per_token or experts_per_token "
        "or moe_k or moe_topk or moe_top_k is missing; num_experts or num_local_experts or "
        "n_routed_experts or moe_num_experts is missing; intermediate_size is missing")
    quantised = "quantization_config is given; needs dequantised weights and a config without it"
    rows = [
        ({"model_type": "gpt2"}, f"model_type is 'gpt2'; known: {', '.join(table.FAMILIES)}"),
        ({}, "model_type is None; known: mixtral, "),
        ({"model_type": "phimoe"}, "'phimoe': its SparseMixer router masks the first expert"),
        ({"model_type": "mixtral"}, f"this mixtral config cannot be expressed: {missing}"),
        (fam_fields("kimi_k3", hidden_act="silu"), "situ_beta = 0.8"),
        ({"model_type": "kimi_k3", "text_config": {"quantization_config": {"bits": 4}}}, quantised),
        ({"model_type": "llama4", "quantization_config": {}, "text_config": {}},
         f"this llama4 config cannot be expressed: {missing}; {quantised}"),
        (fam_fields("mixtral", num_local_experts=None, num_experts=4),
         "num_experts = 4 and num_local_experts = None contradict each other"),
        (fam_fields("qwen3_moe", dtype="float8_e4m3fn"),
         "dtype is float8_e4m3fn; needs float64, float32, bfloat16, float16"),
        (fam_fields("qwen3_moe", num_experts_per_tok=[2, 2, 4]),
         "num_experts_per_tok is 2 in layers 0 to 1 or 4 in layer 2; needs layer_idx"),
        (fam_fields("hunyuan_v1_moe", moe_intermediate_size=[7, 7]),
         "intermediate_size = 5 and moe_intermediate_size = 7 contradict each other"),
        (dbrx(moe_normalize_expert_weights=2.0),
         "ffn_config.moe_normalize_expert_weights is 2.0; needs 1.0 or None"),
        (dbrx(moe_jitter_eps=0.01, ffn_act_fn={"name": "gelu"}),
         "ffn_config.moe_jitter_eps is 0.01; needs 0.0 or None; "
         "ffn_config.ffn_act_fn.name is 'gelu'; needs 'silu' or 'swish' or 'gelu_pytorch_tanh'")]
    read = config_from_hf
    check_errors((functools.partial(read, config), phrase) for config, phrase in rows)


SIGNATURES = """\
configs.config_from_hf: hf_config layer_idx
weights.from_hf: layer tensors model_type prefix
weights.to_hf: layer model_type prefix
weights.upcycle: config gate_proj up_proj down_proj noise
experts.register_experts: name
live.replace_blocks: model pg_collection padding_mask changes
live.restore_blocks: model"""


def test_configs_signatures():
    """Other people's code depends on names and their order."""
    for row in SIGNATURES.splitlines():
        name, arguments = row.split(": ")
        file, name = name.split(".")
        function = getattr(importlib.import_module(f"models.{file}"), name)
        assert list(inspect.signature(function).parameters) == arguments.split()


def test_configs_examples_in_docstrings():
    for file in ("configs", "weights"):
        check_examples(importlib.import_module(f"models.{file}"))


def test_configs_precisions_in_the_docs():
    """The table of docs/models.md has every precision, with types that have it."""
    page = (HERE / "docs/models.md").read_text()
    _, _, after = page.partition("| product | scores | probs |")
    rows = [line.split(" | ") for line in after.split("\n\n")[0].splitlines()[2:]]
    said = {name: " ".join(row[:3]).removeprefix("| ")
            for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    precisions = {name: " ".join(row.dtypes()) for name, row in table.FAMILIES.items()}
    assert said == {name: precisions[name] for name in said}
    assert set(said.values()) == set(precisions.values()) and len(rows) == 5
    assert PRECISION == {name: words.split() for name, words in precisions.items()
                         if words != "fp32 fp32 fp32"}
