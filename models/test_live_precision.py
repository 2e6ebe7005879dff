"""Tests of the dtypes of live.py's routers: those of the library's gates.

    python -m pytest models/test_live_precision.py
"""
import copy
import dataclasses
import importlib
import re

import pytest
import torch

from kernels import topk_routing
from models import table
from models.cases import (
    IN_THE_LIBRARY, PRECISION, T7, fam_fields, family_of, gate_of_the_library, library_block,
    library_config, library_fields, only_chooses, random_ids, replaced, router_of, same_model,
    some_quick, whole_logits, whole_model)
from models.configs import config_from_hf
from models.live import replace_blocks, restore_blocks
from models.table import prefixes_of, tensors_of
from models.weights import from_hf
from moe import MoELayer
from test_moe import close, compiled, fresh_start, needs, same

pytestmark = needs("transformers")


def block_router(case: str, dtype, **changes):
    model = OneBlock(case, dtype, **wide_fields(case))
    replace_blocks(model, **changes)
    return router_of(model)


def many_experts(case: str) -> dict:
    """Fields of a whole model whose blocks have 64 experts, 4 of them a token (Llama's 1)."""
    wide = {name: {128: 64, 8: 4}.get(value, value) for name, value in wide_fields(case).items()
            if re.search("experts|per_tok|moe_k|top_?k$|^n_group", name) and "shared" not in name}
    if case == "dbrx":
        wide = dict(ffn_config=wide_fields(case)["ffn_config"] | dict(ffn_hidden_size=24))
    return wide


@needs("safetensors")
@pytest.mark.filterwarnings("ignore:this .* config has fields that nothing reads")
@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_precision_is_that_of_the_loaded_model(case, tmp_path):
    """A gate is saved in fp32, and loaded with dtype=torch.bfloat16: the library keeps it in fp32
    or rounds it. The layer of from_hf and the replaced gate have its numbers, its dtypes, and its
    choice for every token."""
    import safetensors.torch as safetensors
    torch.manual_seed(3)
    saved = whole_model(case, **many_experts(case))
    saved.save_pretrained(tmp_path)
    model = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16)
    held = table.TYPES[family_of(case)].layouts[-1]
    prefix = prefixes_of(tensors_of(model), [held])[-1]
    block = model.get_submodule(prefix[:-1])
    x = torch.randn(2, 2048, 32).bfloat16()
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, block, x.clone())
        fields = model.config.to_dict()
        tensors = safetensors.load_file(tmp_path / "model.safetensors")
        if "hy_v4" in case:                          # a layer would clamp its shared expert too
            fields["n_shared_experts"] = 0
            tensors = {name: t for name, t in tensors.items() if "shared_experts" not in name}
        config = config_from_hf(fields, table.layer_of(prefix))
        found = prefixes_of(tensors, table.TYPES[family_of(case)].layouts)
        layer = from_hf(MoELayer(config), tensors, family_of(case), found[-1])
        replace_blocks(model)
        for router in (layer.router, router_of(model, -1)):
            probs, chosen = router.route(x)
            same(router.weight, tensors_of(block)[next(iter(held))])
            assert torch.equal(chosen.sort(1).values, indices.sort(1).values)
            assert probs.dtype == weights.dtype


@pytest.mark.parametrize("dtype, cases", [
    (torch.bfloat16, IN_THE_LIBRARY),
    (torch.float16, ["mixtral", "gpt_oss", "lfm2_moe", "ernie4_5_moe", "deepseek_v3"])])
def test_live_router_has_the_precision_of_its_family(dtype, cases):
    """Automodel #3650, sglang #38695: some families compute logits in bf16, some in fp32; some
    round their weights, some do not."""
    for case in cases:
        product, scores, weights = [
            {"model": dtype, "fp32": torch.float32}[word]
            for word in PRECISION.get(case, ["fp32"] * 3)]
        router = block_router(case, dtype)
        x = torch.randn(3, T7, 64, dtype=dtype)
        logits = router.gating(x)
        probs, indices = router.route(x)
        assert (logits.dtype, probs.dtype) == (product, weights), case
        bias = 0.0 if router.bias is None else router.bias.double()
        exact = x.double() @ router.weight.double().T + bias
        close(logits.double(), exact, 1e-5 if product == torch.float32 else 0.02)
        in_fp32, _ = topk_routing(
            logits.flatten(0, 1).float(), precomputed_indices=indices,
            **router.config.routing_options | dict(probs_dtype=torch.float32))
        assert torch.equal(probs, in_fp32.to(weights)) == (scores == torch.float32), case
        config = config_from_hf(fam_fields(case, dtype=str(dtype)))
        assert config.router_dtype == router.config.router_dtype == product
        assert config.probs_dtype == router.config.probs_dtype


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "lfm2_moe", "ernie4_5_moe", "deepseek_v3"])
def test_live_router_has_another_precision_if_told(case):
    """In fp32 and fp64 nothing is rounded either."""
    def dtypes(dtype, **changes):
        config = block_router(case, dtype, **changes).config
        return config.router_dtype, config.probs_dtype
    assert dtypes(torch.bfloat16, router_dtype=torch.float32) == (torch.float32, None)
    given = dict(router_dtype=torch.bfloat16, probs_dtype=torch.float32)
    assert dtypes(torch.bfloat16, **given) == (torch.bfloat16, torch.float32)
    for dtype in (torch.float32, torch.float64):
        assert dtypes(dtype) == (dtype, None)
    plain = config_from_hf(fam_fields(case))
    assert (plain.router_dtype, plain.probs_dtype) == (torch.float32, None)


def test_live_router_kept_in_fp32_has_fp32_logits():
    """In the model's dtype is in that of the router's weight, where the library's gate casts its
    input to it; the weights are rounded or not as before."""
    for case, weights in [("hunyuan_v1_moe", torch.float32), ("minimax_m2", torch.float32),
                          ("ernie4_5_moe", torch.bfloat16)]:
        model = OneBlock(case, **wide_fields(case))
        model.block.gate.float()
        replace_blocks(model)
        router = router_of(model)
        x = torch.randn(3, T7, 64, dtype=torch.bfloat16)
        assert router.gating(x).dtype == torch.float32
        assert router.route(x)[0].dtype == weights


@pytest.mark.parametrize("case", ["hy_v3", "deepseek_v3", "ernie4_5_moe", "laguna", "lfm2_moe"])
def test_live_expert_bias_stays_in_fp32(case):
    """Through model.to(..), wherever the library's buffer lies."""
    model = replaced(case)
    router = router_of(model)
    bias = torch.rand_like(router.expert_bias)
    router.expert_bias = bias.clone()
    for cast in (model.bfloat16, model.half, model.float):
        cast()
        assert router.weight.dtype == model.dtype
        same(router.expert_bias, bias)
    restore_blocks(model)
    model.bfloat16()
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.parameters())


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "deepseek_v4", "lfm2_moe", "mixtral"])
def test_live_router_follows_the_models_dtype(case):
    """As the library's gate does: replaced in bf16 and cast, or cast and replaced."""
    models = [same_model(case).bfloat16() for _ in range(2)]
    replace_blocks(models[0])
    for model in models:
        model.float()
    replace_blocks(models[1])
    first, second = (router_of(model).config for model in models)
    assert first == dataclasses.replace(second, params_dtype=torch.bfloat16)
    ids = random_ids()
    same(*(whole_logits(model, ids) for model in models))
    model = same_model(case)
    replace_blocks(model, router_dtype=torch.float64)
    model.bfloat16()
    assert router_of(model).config.router_dtype == torch.float64


def test_live_tensors_that_are_cast():
    """A bias that only chooses stays fp32: ours, and the library's from its next forward on."""
    for case, changes in (("qwen2_moe", dict(enable_expert_bias=True)), ("deepseek_v3", {})):
        model = replaced(case, **changes).to(torch.bfloat16)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        whole_logits(model, random_ids())
        assert router_of(model).expert_bias.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class OneBlock(torch.nn.Module):
    """A model in a low dtype with one MoE block, in layer 3. As the library loads it: a router that
    it keeps in fp32 is fp32, and so is a bias that only chooses."""

    def __init__(self, case: str, dtype=torch.bfloat16, **fields):
        super().__init__()
        self.dtype = dtype
        self.config = library_config(case, **fields, dtype=dtype)
        block = library_block(case, self.config, layer_idx=3)
        modeling = importlib.import_module(type(block).__module__)
        kept = [name for model in vars(modeling).values()
                for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
        kept.append("gate.wg")                       # Hunyuan's is made in fp32
        router = next(iter(table.TYPES[family_of(case)].layouts[-1]))
        with torch.no_grad():
            block.get_parameter(router).mul_(0.2)    # sigmoid scores of large logits are all 1
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                if only_chooses(name):
                    tensor.mul_(0.03)                # so that it does not choose alone
                elif not any(part in f"mlp.{name}" for part in kept):
                    tensor.data = tensor.data.to(dtype)
        layers = [torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity(),
                  torch.nn.ModuleDict({"mlp": block})]
        self.layers = torch.nn.ModuleList(layers)

    @property
    def block(self) -> torch.nn.Module:
        return self.layers[3]["mlp"]


def wide_fields(case: str) -> dict:
    """The fields of a block with 128 experts, 8 of them a token, from 8 groups, and H = 64."""
    fields = library_fields(case)
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts",
                           "moe_num_experts"), 128)
    sizes |= dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk",
                            "moe_top_k"), 8 if case != "llama4_text" else 1)
    sizes |= dict(hidden_size=64, d_model=64, num_hidden_layers=4, mlp_layer_types=["moe"] * 4)
    if fields.get("n_group") == 4:
        sizes |= dict(n_group=8, topk_group=4)
    if case == "dbrx":
        fields["ffn_config"] = {name: sizes.get(name, value)
                                for name, value in fields["ffn_config"].items()}
    return {name: sizes.get(name, value) for name, value in fields.items()}


# Not to the bit: how far, at most, in units of the last place of the weights' dtype. The first
# three divide a softmax over all by its sum over the chosen: K + 2 roundings in fp32, of which a
# softmax over the chosen has K + 1. Cohere2 rounds its sigmoid scores,
# their sum and the quotient, where the layer rounds once; it chooses by its logits. In gpt-oss a
# logit is summed up in another order on some CPUs, and one in ten thousand rounds the other way:
# below 8 by 2^-5, which moves a prob by twice that share, or 16 units of 2^-8.
UNITS = dict(mixtral=19, minimax=19, hunyuan_v1_moe=19, cohere2_moe=4, gpt_oss=16)


def gate_and_router(case: str) -> tuple:
    """(x of 4,096 tokens in bf16, the weights and indices that the library's gate gives for it, the
    router in the place of this gate)."""
    torch.manual_seed(3)
    model = OneBlock(case, **wide_fields(case))
    x = torch.randn(2, 2048, 64).bfloat16()
    with torch.no_grad():
        weights, indices = gate_of_the_library(case, model.block, x.clone())
    replace_blocks(model)
    return x, weights, indices, router_of(model)


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_router_in_bf16_chooses_as_the_librarys_gate(case):
    """For all of 4,096 tokens. Weights to the bit, when they are summed in the library's order,
    which does not sort the chosen; but for those in UNITS."""
    x, weights, indices, router = gate_and_router(case)
    with torch.no_grad():
        probs, chosen = router.route(x, topk_indices=indices)
        assert torch.equal(chosen, indices)
        assert torch.equal(router.route(x)[1].sort(1).values, indices.sort(1).values)
    assert probs.dtype == weights.dtype and (probs > 0).all()
    integers = torch.int32 if probs.dtype == torch.float32 else torch.int16
    units = (probs.view(integers).long() - weights.view(integers).long()).abs()
    assert units.max() <= UNITS.get(case, 0)
    assert case != "gpt_oss" or (units > 0).float().mean() < 1e-3


@some_quick(IN_THE_LIBRARY, "gpt_oss", "lfm2_moe", "deepseek_v4", "qwen3_moe")
def test_live_router_in_bf16_chooses_the_same_in_a_graph(case):
    """As in eager mode, in the same order, and so as the library's gate: a kernel of Inductor's
    rounds nothing between its steps, and rounded logits and scores have ties."""
    x, _, indices, router = gate_and_router(case)
    with torch.no_grad():
        chosen = compiled(router.route, backend="inductor")(x)[1]
        assert torch.equal(chosen, router.route(x)[1])
    assert torch.equal(chosen.sort(1).values, indices.sort(1).values)
