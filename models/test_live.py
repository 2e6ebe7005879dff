"""Tests of live.py: whole models with replaced blocks against the library's.

    python -m pytest models/test_live.py
"""
import contextlib
import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import router as router_file
from models.cases import (
    E8, IN_THE_LIBRARY, PUBLISHED, T7, WITH_A_ROW, check_errors, one_step, padded_ids, random_ids,
    randomised, replaced, router_of, same_model, some_quick, whole_logits, whole_model,
    whole_output)
from models.configs import config_from_hf
from models.experts import register_experts
from models.live import replace_blocks, restore_blocks
from models.weights import from_hf
from moe import (
    MoELayer, finish_step, load_balancing_metrics, record_routing, replay_routing,
    update_expert_bias)
from ranks.test_ranks import filled
from test_moe import close, compiled, error, fresh_start, needs, same, slow
from tests.test_docs import example
from tests.test_sources import HERE, run

pytestmark = needs("transformers")


def names_of(model) -> list[list[str]]:
    """Of its parameters, buffers and state dict."""
    tensors = (model.named_parameters(), model.named_buffers(), model.state_dict().items())
    return [[name for name, _ in pairs] for pairs in tensors]


@pytest.mark.parametrize("case", IN_THE_LIBRARY)
def test_live_guests_are_the_librarys_models(case):
    """Logits, and every name: of parameters, buffers and the state dict. restore_blocks is the way
    back, and a deep copy is replaced too."""
    theirs = same_model(case).eval()
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    names = replace_blocks(ours)
    assert names_of(ours) == names_of(theirs)
    with torch.no_grad():
        want = whole_logits(theirs, ids)
        got = whole_logits(ours, ids)
        assert (got - want).abs().max() < 2e-6
        again = copy.deepcopy(ours)
        assert restore_blocks(ours) == names
        same(whole_logits(ours, ids), want)
        same(whole_logits(again, ids), got)
    assert not [name for name, _ in ours.named_modules() if "moe_router" in name]
    whole_logits(again.train(), ids).sum().backward()
    counts = load_balancing_metrics(again)["tokens_per_expert"]
    assert counts.sum(1).tolist() == [2 * T7 * router_of(again).config.topk] * len(names)


@needs("safetensors")
@pytest.mark.parametrize("case", [case for case in IN_THE_LIBRARY if case in WITH_A_ROW])
def test_live_published_names_load_too(case, tmp_path):
    """What save_pretrained has written, by load_state_dict, also of a file cut into three: whatever
    the library renames, joins or transposes when it loads. Not all of it: an error."""
    import safetensors.torch as safetensors
    saved = replaced(case)
    with torch.no_grad():
        for parameter in saved.parameters():
            if not parameter.isfinite().all():                # Flint's sinks are not initialised
                parameter.fill_(0.5)
    saved.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for files in (1, 3):
        model = filled(replaced(case), 0)
        names = sorted(state)
        for i in range(files):
            model.load_state_dict({name: state[name] for name in names[i::files]}, strict=False)
        same(model.state_dict(), saved.state_dict())
    if case == "mixtral":
        model.load_state_dict({name: state[name] for name in names[:9]}, strict=False)
        text = error(whole_logits, model, random_ids())
        assert text == ("RuntimeError: load_state_dict got a part of what makes "
                        "model.layers.0.mlp.experts.down_proj, model.layers.0.mlp.experts."
                        "gate_up_proj; needs all files of the checkpoint")


IN_A_FRESH_PROCESS = f"""
import sys, torch
sys.path.insert(0, {str(HERE)!r})
model, ids, mask, want = torch.load("model.pt", weights_only=False)
assert torch.equal(model(ids, attention_mask=mask).logits, want)
"""


def test_live_model_is_saved_whole(tmp_path):
    """And opened in a fresh process, which does not know the implementation of the experts."""
    model = replaced("qwen2_moe", enable_expert_bias=True).eval()
    ids, mask = padded_ids(left=3)
    saved = model, ids, mask, model(ids, attention_mask=mask).logits.detach()
    torch.save(saved, tmp_path / "model.pt")
    done = run("-c", IN_A_FRESH_PROCESS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_live_changes_begin_at_zero():
    """What they add lies under the gate, and goes when the blocks are restored."""
    plain = same_model("mixtral")
    model = replaced("mixtral", router_bias=True, enable_expert_bias=True)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert len(added) == 4 and all(".gate.moe_router.added_" in name for name in added)
    assert not any(model.state_dict()[name].any() for name in added)
    ids = random_ids()
    close(whole_logits(model, ids), whole_logits(plain, ids), 1e-6)
    whole_logits(model, ids).square().sum().backward()
    assert router_of(model).bias.grad.any()
    finish_step(model)
    assert router_of(model).expert_bias.any()
    without = replaced("deepseek_v3", enable_expert_bias=False)
    assert router_of(without).expert_bias is None


def test_live_block_at_two_places_is_replaced_at_both():
    model = same_model("qwen3_moe")
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    assert replace_blocks(model) == ["model.layers.0.mlp"]
    assert layers[1].mlp.gate.moe_router is router_of(model)


def test_live_blocks_have_all_of_this_project():
    """Changes, a bias with its update, metrics, record and replay, a loss per sequence, jitter."""
    changes = dict(enable_expert_bias=True, bias_update="quantile", aux_loss_coeff=0.1,
                   load_balancing_type="seq_aux_loss")
    model = replaced(**changes)
    again = replaced(**changes)
    ids = random_ids()
    with record_routing(model) as record:
        logits = whole_logits(model, ids)
    with replay_routing(model, [record.indices[0].flip(0), record.indices[1]]):
        assert not torch.equal(whole_logits(model, ids), logits)
    with replay_routing(model, record.indices):
        same(whole_logits(model, ids), logits)
    logits.sum().backward()
    assert load_balancing_metrics(model)["tokens_per_expert"].sum(1).tolist() == [2 * T7 * 3] * 2
    update_expert_bias(model)
    assert router_of(model).expert_bias.abs().max() > 0
    again.load_state_dict(model.state_dict())
    same(router_of(again).expert_bias, router_of(model).expert_bias)
    jittered = replaced(input_jitter_eps=0.5).train()
    assert not torch.equal(*(whole_logits(jittered, ids) for _ in range(2)))


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_live_losses_know_the_sequences(case):
    """[B, S] is known to the model alone, since most gates get [T, H]; and the bounds of packed
    texts. The losses are those of each text by itself."""
    changes = dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.1, router_bias=True)
    ids = random_ids()

    def grads_of(*forwards):
        model = same_model(case).double()
        replace_blocks(model, **changes)
        for forward in forwards:
            (whole_output(model, **forward).logits.sum() * 0).backward()
        return [router.bias.grad for router in router_file._routers(model)]
    want = grads_of(*[dict(ids=text[None]) for text in ids])
    got = grads_of(dict(ids=ids))
    assert want[0].abs().max() > 1e-5
    close(got, [grad / 2 for grad in want], 1e-9)
    bounds = torch.tensor([0, T7, 2 * T7], dtype=torch.int32)
    packed = dict(ids=ids.view(1, -1), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
                  position_ids=torch.arange(T7).repeat(2)[None])
    close(grads_of(packed)[0], got[0], 1e-9)
    assert not torch.allclose(grads_of(dict(ids=ids.view(1, -1)))[0], got[0], rtol=1e-3)


@pytest.mark.parametrize("shapes", [
    [(3, T7)], pytest.param([(3, T7), (2, 9), (4, T7)], marks=slow)])
def test_live_block_is_one_graph(shapes):
    block = replaced(enable_expert_bias=True).model.layers[0].mlp
    graph = compiled(block)
    for shape in shapes:
        x = torch.randn(*shape, 32)
        close(graph(x), block(x), 1e-5)


def test_live_refusals_change_nothing():
    model, misshapen, meta, dense, other, odd = (same_model("deepseek_v3") for _ in range(6))
    before = {name: id(module) for name, module in model.named_modules()}
    gate = misshapen.model.layers[1].mlp.gate
    gate.weight = torch.nn.Parameter(torch.zeros(4, 32))
    meta.model.layers[1].to("meta")
    dense.model.layers = dense.model.layers[:1]
    other.config.model_type = "qwen3"
    odd.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    replace = replace_blocks
    none = "model has no deepseek_v3 block to replace; "
    check_errors([
        (lambda: replace(model, topk=9), "topk = 9, num_experts = 8: a token cannot have more"),
        *[(lambda field=field: replace(model, **{field: value}),
           f"changes has {field}, which the library's block decides itself; needs fields of the "
           f"router. For another layer see from_hf")
          for field, value in dict(params_dtype=torch.bfloat16, batch_first=False,
                                   activation="relu2", shared_expert_overlap=True).items()],
        (lambda: replace(model, num_experts=16),
         "model.layers.1.mlp.gate.weight is [8, 32]; needs [16, 32]"),
        (lambda: replace(misshapen), "model.layers.1.mlp.gate.weight is [4, 32]; needs [8, 32]"),
        (lambda: replace(meta), "model has tensors on the meta device; needs weights: load it"),
        (lambda: replace(dense), f"{none}replaced already: none"),
        (lambda: replace(other), "model_type is 'qwen3'; nearest: qwen3_moe; known: mixtral,"),
        (lambda: restore_blocks(model), "model has no block that replace_blocks has")])
    check_errors(kind=TypeError, table=[
        (lambda: replace(model, top_k=2), "got an unexpected keyword argument 'top_k'"),
        (lambda: replace("model"), "model is a str; needs a model of the Hugging Face library")])
    check_errors(kind=NotImplementedError, table=[
        (lambda: replace(odd), "act_fn torch.nn.modules.activation.Tanh cannot be expressed")])
    for each in (model, misshapen, odd):
        assert {name: id(module) for name, module in each.named_modules()}.keys() == before.keys()
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert model.config._experts_implementation == "eager"
    replace(model)
    check_errors([(lambda: replace(model), f"{none}replaced already: model.layers.1.mlp")])
    model.model.layers[1].mlp.gate.forward = None
    assert "mlp.gate has another forward than that of" in error(restore_blocks, model)


def test_live_what_a_block_does_itself_is_not_refused():
    """The average of routed and shared experts, which a layer cannot express."""
    theirs = same_model("cohere2_moe", shared_expert_combination_strategy="average")
    ours = copy.deepcopy(theirs)
    assert "cannot be expressed" in error(config_from_hf, theirs.config)
    replace_blocks(ours)
    ids = random_ids()
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-6)


def three_steps(model, ids: Tensor) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        logits = whole_logits(model, ids)
        targets = ids[:, 1:].flatten() % logits.shape[-1]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@some_quick(IN_THE_LIBRARY, "gpt_oss", "deepseek_v3", "inkling2_text", "llama4_text", "laguna")
def test_live_models_of_the_library(case, tmp_path):
    """Logits, generate, the block's own output, router logits, saving, loading, training,
    checkpoints, bf16."""
    theirs = whole_model(case).eval()
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    block_name = PUBLISHED[case].block.split()[1]
    names = [name for name, module in theirs.named_modules()
             if type(module).__name__ == block_name]
    assert names and replace_blocks(ours) == names
    with torch.no_grad():
        close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)
        x = torch.randn(2, T7, 32)
        options = {"input_ids": ids} if case == "deepseek_v4" else {}
        outputs = [model.get_submodule(names[0])(x.clone(), **options) for model in (ours, theirs)]
        close(*outputs, 1e-4)
        recorded = [whole_output(model, ids, output_router_logits=True).router_logits
                    for model in (ours, theirs)]
        again = 2 if case == "inkling2_loop_text" else 0         # its one looped layer runs 3 times
        assert len(recorded[0]) == len(recorded[1]) == len(names) + again
        close(*recorded, 1e-4)
    same(ours.state_dict(), theirs.state_dict())
    if hasattr(theirs, "generate"):
        same(*(model.generate(ids, max_new_tokens=4, do_sample=False) for model in (ours, theirs)))

    ours.save_pretrained(tmp_path)
    again, found = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    same(again.state_dict(), theirs.state_dict())
    close(whole_logits(again.eval(), ids), whole_logits(theirs.eval(), ids), 1e-4)

    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable()
    losses = three_steps(theirs, ids)
    assert losses == pytest.approx(three_steps(ours, ids), abs=1e-3)
    assert losses == pytest.approx(three_steps(checkpointed, ids), abs=1e-3)
    if not case.startswith("inkling2"):               # which mixes dtypes in bf16 itself
        halves = ours.to(torch.bfloat16)
        assert whole_logits(halves, ids).isfinite().all()
        assert {p.dtype for p in halves.parameters()} - {torch.float32} == {torch.bfloat16}


@contextlib.contextmanager
def tokens_seen(model):
    """The tokens [B, S] that the first block routes, forward by forward, as ones in a list."""
    gate = next(module for module in model.modules() if "moe_router" in module._modules)
    router = gate.moe_router
    seen = []

    def note(gate, args, output):
        routed = output[2] < router.config.num_experts
        tokens = gate.moe_router.batch.texts.tokens
        seen.append(routed.all(-1).view(len(tokens), -1).long())
    hook = gate.register_forward_hook(note)
    yield seen
    hook.remove()



PADDED = pytest.mark.parametrize("case", [
    "gpt_oss", *(pytest.param(case, marks=slow) for case in ("deepseek_v3", "qwen3_next"))])


@PADDED
def test_live_padding_is_unrouted(case):
    """In whatever way the mask is given; others are ignored. The tokens' logits stay the same."""
    theirs = whole_model(case).eval()
    ours, off = copy.deepcopy(theirs), copy.deepcopy(theirs)
    replace_blocks(ours)
    replace_blocks(off, padding_mask=False)
    ids, mask = padded_ids(left=3)
    with torch.no_grad(), tokens_seen(ours) as seen, tokens_seen(off) as all_seen:
        logits, plain = [model(ids, attention_mask=mask).logits for model in (ours, off)]
        embeds = ours.get_input_embeddings()(ids)
        ours(ids, mask)
        ours(ids, mask.bool())
        ours(ids, attention_mask=mask.float())
        ours(inputs_embeds=embeds, attention_mask=mask)
        copy.deepcopy(ours.model)(ids, attention_mask=mask)
        ours.model(ids, mask)
        ours(ids[:1], attention_mask=mask[:1])
        cached = ours(ids[:, :4], attention_mask=mask[:, :4]).past_key_values
        end = ours(ids[:, 4:], attention_mask=mask, past_key_values=cached).logits
    same(seen, [mask] * 7 + [mask[:1], mask[:, :4], mask[:, 4:]])
    same(all_seen, [torch.ones_like(mask)])
    want = theirs(ids, attention_mask=mask).logits
    valid = mask.bool()
    for got in (logits, plain):
        close(got[valid], want[valid], 1e-4)
    close(end[valid[:, 4:]], want[:, 4:][valid[:, 4:]], 1e-4)

    # After a forward, and after one that failed, no mask is left.
    everything = torch.ones_like(mask)
    causal = torch.ones(2, 1, T7, T7, dtype=torch.bool).tril()
    with torch.no_grad(), tokens_seen(ours) as seen:
        error(ours, ids, attention_mask=mask[:, :4])
        seen.clear()
        ours(ids)
        ours(ids, attention_mask=causal)
    same(seen, [everything] * 2)


@PADDED
def test_live_padding_in_generate(case):
    """On the left, with a cache: the prompt's padding is unrouted; what is written is routed. With
    a static cache the library gives the model a 4-D mask, which is ignored."""
    theirs = whole_model(case).eval()
    ours = copy.deepcopy(theirs)
    replace_blocks(ours)
    ids = torch.randint(1, 64, (2, T7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    written = F.pad(mask, (0, 2), value=1)
    for options in (dict(), dict(use_cache=False), dict(prefill_chunk_size=3),
                    dict(cache_implementation="static")):
        options |= dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
        with tokens_seen(ours) as seen:
            got = ours.generate(ids, **options)
        same(got, theirs.generate(ids, **options))
        if "use_cache" in options:
            same(seen[-1], written)
        elif "cache_implementation" in options:
            same(torch.cat(seen, 1), torch.ones_like(written))
        else:
            same(torch.cat(seen, 1), written)


@pytest.mark.parametrize("reentrant", [False, True])
def test_live_padding_under_checkpoints(reentrant):
    """The recomputation of a forward has the mask of that forward, also after others: without a
    mask, of another padding, of a copy. Tokens alone are counted, once."""
    plain = whole_model("qwen3_moe").train()
    replace_blocks(plain, enable_expert_bias=True)
    texts = [padded_ids(left=3), padded_ids(left=5), (random_ids(), None)]
    results = []
    for model in (plain, copy.deepcopy(plain)):
        if results:
            options = dict(use_reentrant=reentrant)
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        losses = []
        for ids, mask in texts:
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            valid = torch.ones_like(ids) if mask is None else mask
            losses.append((logits.square().mean(-1) * valid).sum())
        copy.deepcopy(model)(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        for i in (1, 0, 2):
            losses[i].backward()
        results.append([parameter.grad for parameter in model.parameters()])
        for router in router_file._routers(model):
            tokens = 2 * 3 * T7 - (3 + 1) - (5 + 1)
            assert router.local_tokens_per_expert.sum() == tokens * router.config.topk
    same(*results)


def test_live_padding_is_not_lost_in_silence():
    """A checkpoint around a decoder layer that is not the library's, by masks and without."""
    model = whole_model("qwen3_moe").train()
    replace_blocks(model)
    ids, mask = padded_ids(left=3)
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model(ids, use_cache=False).logits.sum().backward()
    loss = model(ids, attention_mask=mask, use_cache=False).logits.sum()
    text = error(loss.backward)
    assert text.startswith("RuntimeError: a checkpoint that is not the library's recomputes")


@pytest.mark.parametrize("how", [
    "whole", *(pytest.param(how, marks=slow) for how in ("checkpoints", "layers"))])
def test_live_padding_in_a_graph(how):
    """One graph for every length and padding: of the model, or of a layer."""
    eager = whole_model("qwen3_moe", num_hidden_layers=1).train()
    replace_blocks(eager, enable_expert_bias=True)
    model = copy.deepcopy(eager)
    if how == "checkpoints":
        model.activation_checkpointing_enable()
        model.eval()(random_ids(), use_cache=False)          # the checkpoints get the masks here
        model.train()
    function = compiled(model, dynamic=True)
    if how == "layers":
        function = model
        model.model.layers[0].compile(fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset(), counters.clear()
    for S, left in [(7, 3), (9, 5), (12, 1), (6, 2)]:
        ids, mask = padded_ids(left, S)
        valid = mask.bool()
        want = one_step(eager, ids, mask)[valid]
        close(one_step(function, ids, mask)[valid], want, 1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    for got, want in zip(model.parameters(), eager.parameters()):
        close(got.grad, want.grad, 1e-5)
    routers = [router_file._routers(each)[0] for each in (model, eager)]
    same(*(router.local_tokens_per_expert for router in routers))
    tokens = 2 * (7 + 9 + 12 + 6) - (3 + 5 + 1 + 2) - 4
    assert routers[0].local_tokens_per_expert.sum() == tokens * 3


@pytest.mark.parametrize("how", ["experts", "blocks"])
def test_live_few_tokens_in_a_graph(how):
    """Without gradients: logits of the library, and neither a plan nor a grouped product."""
    model = whole_model("qwen3_moe", num_hidden_layers=1).eval()
    ids = torch.tensor([[7]])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        if how == "experts":
            model.set_experts_implementation(register_experts())
        else:
            replace_blocks(model)
        function = compiled(model, dynamic=False)
        close(function(ids, use_cache=False).logits, want, 1e-5)
        with torch.profiler.profile() as profile:
            function(ids, use_cache=False)
    ours = {e.key for e in profile.key_averages() if e.key.startswith("moe_")}
    assert ours <= {"moe_kernels::product_in"}


def test_live_model_with_hash_layers():
    """DeepSeek-V4's table goes with the block, is saved, and the forward gets the token numbers."""
    theirs = whole_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]).eval()
    table = torch.rand(64, E8).topk(3).indices
    with torch.no_grad():
        theirs.model.layers[0].mlp.gate.tid2eid.copy_(table)
    ours = copy.deepcopy(theirs)
    ids = random_ids()
    replace_blocks(ours)
    want = whole_logits(theirs, ids)
    close(whole_logits(ours, ids), want, 1e-4)
    same(ours.state_dict(), theirs.state_dict())


def test_live_model_whose_published_experts_are_transposed(tmp_path):
    """Qwen3-VL: published names are those in memory. It is saved, and read in both layouts."""
    import transformers
    text = whole_model("qwen3_vl_moe_text").config
    config = transformers.Qwen3VLMoeConfig(text_config=text.to_dict(), vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
        deepstack_visual_indexes=[0]))
    theirs = randomised(transformers.Qwen3VLMoeForConditionalGeneration(config)).eval()
    ours = copy.deepcopy(theirs)
    names = replace_blocks(ours)
    assert names == [f"model.language_model.layers.{i}.mlp" for i in (0, 1)]
    ids = random_ids()
    close(whole_logits(ours, ids), whole_logits(theirs, ids), 1e-4)
    ours.save_pretrained(tmp_path)
    again, found = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    same(again.state_dict(), theirs.state_dict())

    layers = []
    for axes in (1, 2), (2, 1):                              # as in memory, and as published
        tensors = {name: tensor.transpose(*axes) if axes == (2, 1) else tensor
                   for name, tensor in theirs.state_dict().items() if ".experts." in name}
        layers.append(MoELayer(config_from_hf(config)))
        from_hf(layers[-1], theirs.state_dict() | tensors, "qwen3_vl_moe",
                         prefix=f"{names[1]}.")
    same(*(layer.state_dict() for layer in layers))


def test_live_example(tmp_path, monkeypatch, capsys):
    """What is saved gives the same logits again."""
    monkeypatch.chdir(tmp_path)
    exec(example("replace"), {})
    names, violation, equal = capsys.readouterr().out.strip().split("\n")
    assert names == "['model.layers.0.mlp', 'model.layers.1.mlp']" and equal == "True"
    assert violation.startswith("tensor([")


def test_live_compiled_generate():
    """The page's way compiles the step of one token, without it nothing is compiled on a CPU; the
    tokens are those of eager mode."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=32, eos_token_id=None, pad_token_id=0)).eval()
    replace_blocks(model)
    ids = torch.randint(1, 256, (1, 8))
    want = model.generate(ids, max_new_tokens=20)
    code = example("generate").replace('mode="default"', 'mode=None, backend="aot_eager"')
    for source in (code.replace("_all_devices = True", "_all_devices = False"), code):
        names = dict(model=model, ids=ids)
        counters.clear()
        exec(source, names)
        same(names["tokens"], want)
        if model.device.type == "cpu":
            assert counters["stats"]["unique_graphs"] == (source is code)
    assert not counters["graph_break"]


def test_live_from_a_package(tmp_path):
    """The files copied into a package of somebody's, as README says: the name `kernels` is then
    free for Hugging Face's package."""
    package = tmp_path / "package"
    package.mkdir()
    files = [*HERE.glob("*.py"), *HERE.glob("*/*.py")]
    folders = {str(file.relative_to(HERE).parent) for file in files} - {"."}
    names = "|".join([*folders, *(file.stem for file in files)])
    for file in files:
        text = file.read_text()
        up = "." * len(file.relative_to(HERE).parts)
        for old, new in ((rf"import ({names})( as \w+)?$", rf"from {up} import \1\2"),
                         (rf"from ((?:{names})(?:\.\w+)?) import", rf"from {up}\1 import")):
            text = re.sub(f"^{old}", new, text, flags=re.M)
        target = package / file.relative_to(HERE)
        target.parent.mkdir(exist_ok=True)
        (target.parent / "__init__.py").touch()              # for pytest
        target.write_text(text)
    done = run("-m", "pytest", "-q", *map(str, (package / "models").glob("test_live*.py")), "-k",
               "test_live_blocks or lora", cwd=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
