"""Tests of live.py in training: the library's Trainer, LoRA, offload, FSDP2, several ranks.

    python -m pytest models/test_live_training.py
"""
import copy
import dataclasses
import math
import os
import sys
import types

import pytest
import torch
from torch import Tensor

import router as router_file
from models.cases import (
    E8, H6, OneOf, T7, double, fam_config, one_step, padded_ids, random_ids, replaced,
    same_model, whole_logits, whole_model)
from models.experts import register_experts
from models.live import MoECallback, _callback_class, replace_blocks, restore_blocks
from moe import MoEConfig, MoELayer, finish_step, load_balancing_metrics
from ranks import sharding
from ranks.parallel import ProcessGroups
from ranks.sharding import reduce_gradients
from ranks.test_ranks import filled, full, mesh_of, over_ranks, own_part
from test_moe import about, close, compiled, error, fresh_start, needs, same
from tests.test_docs import example


def trained_by_callback(callback, pieces: int, model, x: Tensor, upstream: Tensor):
    """Two steps as the library's Trainer makes them, in `pieces` microbatches -> its log."""
    args = types.SimpleNamespace(gradient_accumulation_steps=pieces)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    state = types.SimpleNamespace(log_history=[])
    for _ in range(2):
        callback.on_step_begin(args, state, None, model=model, optimizer=optimizer)
        for x_m, upstream_m in zip(x.chunk(pieces), upstream.chunk(pieces)):
            (model[0](x_m) * upstream_m).sum().backward()
        optimizer.step()
        callback.on_optimizer_step(args, state, None, model=model, optimizer=optimizer)
        optimizer.zero_grad()
        logs = {"loss": 1.0}
        state.log_history.append(dict(logs, step=1))
        callback.on_log(args, state, None, model=model, logs=logs)
        assert state.log_history[-1] == {**logs, "step": 1}
        evaluation = {"eval_loss": 1.0}
        callback.on_log(args, state, None, model=model, logs=evaluation)
        assert evaluation == {"eval_loss": 1.0}
    assert [layer.router.counts.loss_scale for layer in model] == [1 / pieces] * 2
    callback.on_train_end(args, state, None, model=model)
    assert [layer.router.counts.loss_scale for layer in model] == [1, 1]
    return logs


@over_ranks(2)
def test_live_callback_over_ranks_that_routers_do_not_know(rank, ranks):
    """As under DDP without groups: it logs this rank's metrics; with groups those of all."""
    sys.modules["transformers"] = types.SimpleNamespace(TrainerCallback=object)
    _callback_class.cache_clear()
    callback = MoECallback()
    groups = ProcessGroups.from_mesh(mesh_of(dp=ranks)["dp"])
    config = MoEConfig(8, 4, 6, topk=2, load_balancing_type="aux_loss", aux_loss_coeff=0.1)
    for known in (None, groups):
        layer = MoELayer(config, known)
        torch.manual_seed(rank)
        layer(torch.randn(9, 8)).sum().backward()
        logs = {"loss": 1.0}
        state = types.SimpleNamespace(log_history=[{}])
        callback.on_log(None, state, None, model=layer, logs=logs)
        want = load_balancing_metrics(layer, reduce=known is not None)
        assert logs["max_violation"] == want["max_violation"].item()
        assert state.log_history[-1] == {key: logs[key] for key in logs if key != "loss"}


def test_live_callback_makes_microbatches_one_batch(monkeypatch):
    """Without the library: its TrainerCallback is an empty class. A layer that has not run is left
    out of the logged means."""
    monkeypatch.setitem(
        sys.modules, "transformers", types.SimpleNamespace(TrainerCallback=object))
    _callback_class.cache_clear()
    callback = MoECallback()
    x, upstream = double(2, 4, T7, H6)
    results = []
    for pieces in (1, 2, 4):
        torch.manual_seed(1)
        config = dataclasses.replace(
            fam_config("qwen3_moe"), enable_expert_bias=True, bias_update="quantile",
            z_loss_coeff=0.3, load_balancing_type="seq_aux_loss", aux_loss_coeff=0.5)
        model = torch.nn.ModuleList([MoELayer(config), MoELayer(config)])
        logs = trained_by_callback(callback, pieces, model, x=x, upstream=upstream)
        assert list(logs) == ["loss", "seq_load_balancing_loss", "z_loss", "max_violation"]
        assert all(isinstance(value, float) and math.isfinite(value) for value in logs.values())
        assert model[0].router.expert_bias.any()
        results.append(model.state_dict())
    for other in results[1:]:
        for name, tensor in results[0].items():
            close(other[name].double(), tensor.double(), 1e-6)
    scaler = types.SimpleNamespace(get_scale=lambda: 512.0)
    args = types.SimpleNamespace(gradient_accumulation_steps=4)
    scaled = types.SimpleNamespace(scaler=scaler)
    callback.on_step_begin(args, None, None, model=model, optimizer=scaled)
    assert model[0].router.counts.loss_scale == 128
    _callback_class.cache_clear()


@needs("transformers")
def test_live_blocks_of_a_model_on_several_ranks():
    """The groups go to every router, and each rank keeps its experts under the library's names.
    What ep and tp cannot share is refused, and so are experts of the library on a part."""
    two = OneOf(1, 2)
    groups = ProcessGroups(ep=two, tp_dp_cp=two)
    model = replaced(pg_collection=groups, enable_expert_bias=True)
    whole = same_model("qwen3_moe")
    assert all(router.pg_collection is groups for router in router_file._routers(model))
    assert len(dict(model.named_parameters())) == len(dict(whole.named_parameters()))
    for name, other in whole.named_parameters():
        same(model.get_parameter(name), other[E8 // 2:] if ".experts." in name else other)
    three = OneOf(0, 3)
    for wrong, phrase in [
            (dict(tp=two), "pg_collection has 2 ranks in tp; needs one"),
            (dict(ep=three, tp_dp_cp=three), "num_experts is 8; needs a multiple of the ep size")]:
        assert phrase in error(replace_blocks, same_model("qwen3_moe"),
                               pg_collection=ProcessGroups(**wrong))
    assert "are spread over ranks; needs a model of one process" in error(
        restore_blocks, model)
    model.set_experts_implementation("batched_mm")
    assert "RuntimeError: another implementation computes the experts" in error(
        model, random_ids())


def check_gradients_over_ranks(model, names, whole, groups: ProcessGroups) -> None:
    """Those of the blocks with these names, and of all else, are this rank's part of the whole."""
    reduce_gradients(model)
    for (name, mine), other in zip(model.named_parameters(), whole.parameters()):
        owner = next((block for block in names if name.startswith(block + ".")), None)
        if owner is None:
            torch.distributed.all_reduce(mine.grad)
            close(mine.grad, other.grad, 1e-4)
        else:
            path = name.removeprefix(owner + ".")
            close(mine.grad, own_part(path, other.grad, groups), 1e-4)


@over_ranks(2)
def experts_over_ranks(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    ids = torch.randint(1, 64, (4, T7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    texts = slice(2 * rank, 2 * rank + 2)
    for case, layers, through in OVER_EP:
        whole = same_model(case, num_hidden_layers=layers)
        model = copy.deepcopy(whole)
        replace_blocks(whole)
        names = replace_blocks(model, pg_collection=groups)
        want = one_step(whole, ids, mask)[texts]
        got = one_step(through(model), ids[texts], mask[texts])
        close(got[mask[texts] == 1], want[mask[texts] == 1], 1e-5)

        check_gradients_over_ranks(model, names, whole, groups)
    # The example of docs/models.md, which saves. What is loaded is what was saved.
    os.chdir(folder)
    model = same_model("gpt_oss")
    mesh = mesh_of(ep=ranks)
    code = example("experts over ranks").replace("AdamW(model.parameters(), 1e-3)", SGD)
    exec(code, dict(torch=torch, model=model, mesh=mesh, batches=texts_of_rank(rank)))
    assert "give save_pretrained a state_dict=" in error(model.save_pretrained, "ours")
    exec(example("save over ranks"), dict(model=model, dist=torch.distributed))
    want = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters())
    dcp.load(sharding.sharded_state_dict(model, optimizer), checkpoint_id="shards")
    same([parameter.detach() for parameter in model.parameters()], want)
    given = copy.deepcopy(model.state_dict())
    for state in (given, {name: full(tensor) for name, tensor in given.items()}):
        filled(model, 0).load_state_dict(state)
        same([parameter.detach() for parameter in model.parameters()], want)


FIVE = ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_moe", "mixtral"]


@over_ranks(2)
def sharded_by_fsdp(rank, ranks):
    from torch.distributed.fsdp import fully_shard
    ids = torch.randint(1, 64, (4, T7))
    for case in FIVE:
        whole = same_model(case)
        whole_logits(whole, ids).square().sum().backward()
        for before in (True, False):
            model = same_model(case)
            if before:
                replace_blocks(model, enable_expert_bias=True)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh_of(dp=ranks))
            if not before:
                replace_blocks(model, enable_expert_bias=True)
            whole_logits(model, ids.chunk(ranks)[rank]).square().sum().backward()
            for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                close(ranks * full(mine.grad), other.grad, 1e-4)


@needs("transformers")
def test_live_models_sharded_by_fsdp():
    """Before or after fully_shard: the gradients of the library's model in one process."""
    sharded_by_fsdp()


@over_ranks(2)
def sharded_by_the_library(rank, ranks, folder):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    plans = {
        "tensor parallel": dict(tp_plan="auto"),
        "expert parallel": dict(distributed_config=DistributedConfig(
            enable_expert_parallel=True, tp_plan="auto"))}
    for case in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        whole = same_model(case)
        ids = random_ids()
        if rank == 0:
            whole.save_pretrained(folder / case)
        torch.distributed.barrier()
        want = whole_logits(whole, ids)
        want.square().sum().backward()
        for name, plan in plans.items():
            with about(case, name):
                model = AutoModelForCausalLM.from_pretrained(folder / case, **plan).train()
                replace_blocks(model)
                got = whole_logits(model, ids)
                close(got, want, 1e-5)
                got.square().sum().backward()
                counts = load_balancing_metrics(model)["tokens_per_expert"]
                assert (counts.sum(1) == 2 * T7 * 3).all()
                for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
                    close(full(mine.grad), other.grad, 1e-4)


@needs("transformers")
def test_live_models_sharded_by_the_library(tmp_path):
    """Its tensor parallelism and its expert parallelism: logits and gradients of one process."""
    sharded_by_the_library(folder=tmp_path)


@over_ranks(4)
def experts_over_dp_and_ep(rank, ranks, folder):
    """A step on left-padded texts, one a rank, is that of one process on all four. What is saved on
    dp 2 × ep 2 is loaded on ep 4, saved there and loaded in one process."""
    import torch.distributed.checkpoint as dcp
    balance = dict(enable_expert_bias=True, load_balancing_type="global_aux_loss",
                   aux_loss_coeff=0.1)
    torch.manual_seed(3)
    ids = torch.randint(1, 64, (4, T7))
    mask = torch.ones_like(ids)
    for text, left in ((0, 3), (2, 5)):
        mask[text, :left] = 0
    groups = ProcessGroups.from_mesh(mesh_of(dp=2, ep=2))
    by_itself, _ = torch.distributed.new_subgroups(1)
    mine = slice(rank, rank + 1)
    for case in ("qwen3_moe", "deepseek_v3"):
        whole, model = same_model(case), same_model(case)
        replace_blocks(whole, pg_collection=ProcessGroups(tp_dp_cp=by_itself), **balance)
        names = replace_blocks(model, pg_collection=groups, **balance)
        want = one_step(whole, ids, mask)[mine]
        got = one_step(model, ids[mine], mask[mine])
        close(got[mask[mine] == 1], want[mask[mine] == 1], 1e-5)

        check_gradients_over_ranks(model, names, whole, groups)
        finish_step(model), finish_step(whole)
        same(*([router.expert_bias for router in router_file._routers(each)]
               for each in (model, whole)))

        other = filled(same_model(case), 0)
        replace_blocks(
            other, pg_collection=ProcessGroups.from_mesh(mesh_of(ep=ranks)), **balance)
        alone = filled(same_model(case), 0)
        replace_blocks(alone, **balance)
        for i, (source, target) in enumerate([(model, other), (other, alone)]):
            dcp.save(sharding.sharded_state_dict(source), checkpoint_id=f"{folder}/{case}{i}")
            dcp.load(sharding.sharded_state_dict(target), checkpoint_id=f"{folder}/{case}{i}")
        same(alone.state_dict(), whole.state_dict())


@needs("transformers")
def test_live_experts_over_dp_and_ep(tmp_path):
    experts_over_dp_and_ep(folder=str(tmp_path))


# family, layers, eager or compiled
OVER_EP = [
    ("qwen3_moe", 1, compiled),
    ("deepseek_v3", 2, compiled),
    ("gpt_oss", 1, compiled),
    ("qwen3_moe", 2, lambda model: model),
    ("deepseek_v3", 2, lambda model: model),
    ("gpt_oss", 2, lambda model: model),
    ("qwen2_moe", 2, lambda model: model),
    ("mixtral", 2, lambda model: model),
    ("llama4_text", 2, lambda model: model),
    ("dbrx", 2, lambda model: model)]


SGD = "SGD(model.parameters(), 1.0)"


def texts_of_rank(rank: int) -> list[dict[str, Tensor]]:
    """Two batches of two texts. No label is predicted from padding."""
    torch.manual_seed(7 + rank)
    batches = [padded_ids(left=0), padded_ids(left=0)]
    return [dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
            for ids, mask in batches]


@needs("transformers")
def test_live_experts_over_two_ranks(tmp_path):
    """Each rank has half of the experts and texts of its own: logits and gradients of one process.
    What two ranks have trained and saved, loaded and saved by one process, is the library's model
    as one process trains it."""
    import torch.distributed.checkpoint as dcp
    experts_over_ranks(folder=tmp_path)
    theirs = same_model("gpt_oss")
    optimizer = torch.optim.SGD(theirs.parameters(), 1.0)
    for batches in zip(texts_of_rank(0), texts_of_rank(1)):
        sum(theirs(**batch).loss for batch in batches).backward()
        optimizer.step(), optimizer.zero_grad()
    ours = whole_model("gpt_oss")
    replace_blocks(ours)
    dcp.load(sharding.sharded_state_dict(ours), checkpoint_id=f"{tmp_path}/shards")
    ours.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path).state_dict()
    for name, tensor in theirs.state_dict().items():
        close(again[name], tensor, 1e-4)
    same(type(theirs).from_pretrained(tmp_path / "saved").state_dict(), again)


@needs("transformers", "accelerate")
def test_live_padding_in_the_trainer(tmp_path):
    """Texts of other lengths, padded by the library's collator: tokens alone are counted."""
    import transformers
    model = whole_model("qwen3_moe")
    replace_blocks(model, enable_expert_bias=True)
    lengths = [3, 9, 5, 12]
    data = [dict(input_ids=torch.randint(1, 64, (n,))) for n in lengths]

    def collate(texts):
        texts = [text["input_ids"] for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=ids)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_checkpointing=True)
    transformers.Trainer(model, args, train_dataset=data, data_collator=collate).train()
    for router in router_file._routers(model):
        assert router.local_tokens_per_expert.sum() == sum(lengths) * router.config.topk


def trainer_of(model, folder, *callbacks, **options):
    """The library's Trainer on twenty-four texts, by plain SGD."""
    import transformers
    torch.manual_seed(1)
    data = [dict(input_ids=text, labels=text) for text in torch.randint(64, (24, 12))]
    options = dict(per_device_train_batch_size=8, save_strategy="no") | options
    args = transformers.TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, report_to=[], optim="sgd", learning_rate=0.5,
        lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, **options)
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[*callbacks])
    trainer.callback_handler.callbacks.insert(0, MoECallback())     # as the README says
    assert isinstance(trainer.callback_handler.callbacks[0], transformers.TrainerCallback)
    return trainer


def trainer_steps(pieces: int, folder, **changes):
    """Three steps of the library's Trainer on eight texts a step, in `pieces` microbatches."""
    import transformers
    model = replaced(**changes)
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            seen.append(dict(logs))
    trainer = trainer_of(model, folder, Reporter(), per_device_train_batch_size=8 // pieces,
                         gradient_accumulation_steps=pieces)
    trainer.train()
    assert {router.counts.loss_scale.item() for router in router_file._routers(model)} == {1.0}
    return model.state_dict(), trainer.state.log_history, seen


@needs("transformers", "accelerate")
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_live_trainer_resumes(case, cut, tmp_path):
    """Two steps, a checkpoint, whole or cut into files, and the third: as three steps."""
    changes = {} if case == "deepseek_v3" else dict(enable_expert_bias=True)
    whole = replaced(case, **changes)
    trainer_of(whole, tmp_path, save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    if cut:
        resumed = replaced(case, **changes)
        trainer = trainer_of(resumed, tmp_path)
        trainer._load_from_checkpoint(str(folder))
        (folder / "model.safetensors").unlink()
        resumed.save_pretrained(folder, max_shard_size="24KB")
        assert len(list(folder.glob("model-*"))) >= 3
    resumed = replaced(case, **changes)
    trainer_of(resumed, tmp_path).train(resume_from_checkpoint=str(folder))
    same(resumed.state_dict(), whole.state_dict())


@needs("transformers", "accelerate")
def test_live_trainer_of_the_library(tmp_path):
    """Four microbatches of two texts, or one of eight: the same routers, biases and losses."""
    _callback_class.cache_clear()
    changes = dict(
        enable_expert_bias=True, bias_update="quantile", z_loss_coeff=0.3,
        load_balancing_type="seq_aux_loss", aux_loss_coeff=0.5)
    (one, log, seen), (four, *_) = [trainer_steps(n, tmp_path, **changes) for n in (1, 4)]
    for name, tensor in one.items():
        close(four[name].double(), tensor.double(), 1e-4)
    for entry, logged in zip(log[:3], seen):
        assert {"loss", "seq_load_balancing_loss", "z_loss", "max_violation"} <= set(entry)
        assert entry == {**logged, "step": entry["step"]}
    assert "max_violation" not in log[-1]


@needs("transformers", "peft")
def test_live_lora_by_peft():
    """Replaced blocks, and register_experts, under PEFT: the library's modules, loss and
    gradients."""
    import peft
    ids = random_ids()
    experts = dict(target_modules=[], target_parameters=[
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for case, options in (("qwen3_moe", experts), ("qwen2_moe", dict(target_modules="all-linear"))):
        want = None
        for how in ("the library's", "registered", "replaced"):
            model = same_model(case)
            if how == "registered":
                model.set_experts_implementation(register_experts())
            elif how == "replaced":
                replace_blocks(model)
            torch.manual_seed(2)
            config = peft.LoraConfig(r=3, init_lora_weights=False, **options)
            model = peft.get_peft_model(model, config)
            loss = model(ids, labels=ids).loss
            loss.backward()
            got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            want = want or (loss, got)
            assert len(got) >= 4 * 2 and got.keys() == want[1].keys()
            close([loss, *got.values()], [want[0], *want[1].values()], 1e-5)
    model = peft.get_peft_model(replaced(enable_expert_bias=True), peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["gate"]))
    ids, mask = padded_ids(left=3)
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    counts = load_balancing_metrics(model)["tokens_per_expert"].sum(1)
    assert counts.tolist() == [0, (2 * T7 - 4) * 3] * 2
    violations = load_balancing_metrics(model)["max_violation"]
    assert violations.isnan().tolist() == [True, False] * 2  # of the originals, which do not run


@needs("transformers", "peft")
@pytest.mark.parametrize("case, module", [("qwen3_moe", "moe_router"), ("deepseek_v3", "gate")])
def test_live_lora_saves_the_expert_bias(case, module, tmp_path):
    """With the modules that docs/recipes.md names. A reloaded adapter gives the same logits."""
    import peft
    changes = {} if case == "deepseek_v3" else dict(enable_expert_bias=True)
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=[module])
    model = peft.get_peft_model(replaced(case, **changes), config)
    ids = random_ids()
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        finish_step(model)
    want = whole_logits(model.eval(), ids)
    assert not torch.equal(whole_logits(replaced(case, **changes).eval(), ids), want)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(replaced(case, **changes), tmp_path)
    same(whole_logits(again.eval(), ids), want)


@needs("transformers", "accelerate")
@pytest.mark.parametrize("case", FIVE)
def test_live_models_are_offloaded_and_quantised(case, tmp_path):
    """What works by the library's names: accelerate's hooks, put on before or after; dynamic
    quantization takes the layers that it takes in the library's model."""
    import accelerate
    ids = random_ids()

    def logits(model):
        with torch.no_grad():
            return whole_logits(model, ids)

    def guest():
        return replaced(case, enable_expert_bias=True).eval()
    want = logits(guest())
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
              "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    options = dict(main_device="cpu", force_hooks=True)
    same(logits(accelerate.cpu_offload(guest(), "cpu")), want)
    same(logits(accelerate.disk_offload(guest(), tmp_path / "a", "cpu")), want)
    same(logits(accelerate.dispatch_model(
        guest(), places, offload_dir=tmp_path / "b", **options)), want)
    class Counted(accelerate.hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counted.calls += 1
            return args, kwargs
    hooked = accelerate.dispatch_model(same_model(case).eval(), {"": "cpu"}, **options)
    block = hooked.model.layers[1].mlp
    accelerate.hooks.add_hook_to_module(getattr(block, "gate", None) or block.router, Counted())
    theirs = logits(hooked)
    replace_blocks(hooked)
    same(logits(hooked), want)
    restore_blocks(hooked)
    same(logits(hooked), theirs)
    assert Counted.calls == 3

    quantised = [torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
                 for model in (guest(), same_model(case).eval())]
    layers = [[name for name, module in model.named_modules()
               if ".quantized." in type(module).__module__] for model in quantised]
    assert layers[0] == layers[1] and len(layers[0]) > 8
    close(*map(logits, quantised), 1e-5)


@needs("transformers")
def test_live_model_under_the_librarys_trainer_loss():
    """The library's own balance loss, from router logits, has the same gradients through our
    router."""
    theirs = whole_model("qwen3_moe", router_aux_loss_coef=0.1)
    ids = random_ids()
    theirs.double()(ids[:1], use_cache=False, output_router_logits=True)     # installs the hooks
    ours = copy.deepcopy(theirs)
    replace_blocks(ours)
    outs = [model(ids, labels=ids, use_cache=False, output_router_logits=True)
            for model in (ours, theirs)]
    close(outs[0].aux_loss, outs[1].aux_loss, 1e-9)
    close(outs[0].loss, outs[1].loss, 1e-9)
    for out in outs:
        out.loss.backward()
    first, old = (model.model.layers[0].mlp for model in (ours, theirs))
    close(first.gate.weight.grad, old.gate.weight.grad, 1e-7)
