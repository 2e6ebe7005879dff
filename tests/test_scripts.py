"""Tests of the sources' imports and signatures, of the scripts, of the examples in README and docs.
They are slow tests, all of them: what the functions compute is tested elsewhere.

    SLOW=1 python -m pytest tests/test_scripts.py
    SLOW=1 python -m pytest tests/test_scripts.py -k test_train_      one section

The words of the sections: sources, train, steps, docs.
"""
import ast
import copy
import dataclasses
import doctest
import gzip
import importlib
import inspect
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import check
import grouped
import kernels
import maps
import moe
import prune
import router as router_file
import shared_experts
import small
from examples import measure_steps, steps, train
from moe import (
    MoEConfig, MoELayer, TopKRouter, finish_step, load_balancing_metrics,
    record_routing, replay_routing, set_aux_loss_scale)
from ranks import parallel
from ranks.parallel import ProcessGroups
from ranks.test_ranks import (
    check_gradients, free_port, full, mesh_of, over_ranks, own_part, whole_and_mine)
from test_moe import (
    BIASED, PRODUCTS, TwoLayers, WAYS, about_the_cpu, agree, close, compiled, fresh_start, grads,
    graphs_made, leaf, needs, same, saved_bytes, slow, small_config, switch_loss_loop)
from tests.test_graphs import SOURCES

pytestmark = slow
HERE = Path(__file__).resolve().parents[1]
# The files of the layer. Each may import those before it.
LAYER = [
    "compat", "grouped", "kernels", "base", "router", "shared_experts", "moe"]
RANKS = ["sharding", "parallel"]
MODELS = "reader table configs weights atlas published experts live".split()


def run(*args, cwd=HERE) -> subprocess.CompletedProcess:
    """A Python process with these arguments."""
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, timeout=300, capture_output=True, text=True)


# ---- Sources ----

def test_sources_emulated_card_says_what_it_needs(monkeypatch, tmp_path):
    """A torch without CUDA, Triton, g++: one sentence each, before anything is started."""
    emulate = importlib.import_module("card.emulate")
    found = {"torch": types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))}
    monkeypatch.setattr(emulate.importlib.util, "find_spec", found.get)
    monkeypatch.setattr(emulate.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(emulate.shutil, "which", lambda name: None)

    def refusal(version: str) -> str:
        (tmp_path / "version.py").write_text(version)
        with pytest.raises(SystemExit) as stopped:
            emulate.build("preloaded")
        return str(stopped.value)
    assert "without CUDA, and this one is 2.15.0+cu132" in refusal(
        "__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None")
    cpu = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None"
    assert "needs Triton" in refusal(cpu)
    found["triton"] = True
    assert "needs g++" in refusal(cpu)
    found.clear()
    assert "needs a torch without CUDA" in refusal(cpu)


EVERYTHING_ALONE = """
import copy, io, pickle, sys, torch, moe
config = moe.MoEConfig(
    8, 4, 4, 2, shared_expert_intermediate_size=8, shared_expert_overlap=True, latent_size=4,
    enable_expert_bias=True, load_balancing_type="global_aux_loss", aux_loss_coeff=0.1)
layer = moe.MoELayer(config)
other = moe.MoELayer(config)
other.load_state_dict(layer.state_dict())
compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
unpickled = pickle.loads(pickle.dumps(layer))
outputs = []
for function in (layer, other, compiled, unpickled):
    x = torch.arange(24.0).view(3, 8).requires_grad_()
    y = function(x)
    y.sum().backward()
    moe.finish_step(function, check_replicas=True)
    moe.load_balancing_metrics(function, reduce=True)
    outputs.append((y, x.grad))
assert layer.sharded_state_dict("a.").keys() == {"a." + name for name in layer.state_dict()}
assert all(torch.allclose(a, b) for pair in outputs for a, b in zip(pair, outputs[0]))
assert not {"maps", "ranks"} & sys.modules.keys() and layer.pg_collection.tp_cp is None
print("alike")
"""


def test_sources_copied_elsewhere(tmp_path):
    """The seven files work in a folder and in a package. One process imports both copies: their
    ops must not collide."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for folder in (tmp_path, package):
        for name in LAYER:
            shutil.copy(HERE / f"{name}.py", folder)

    # Without ranks/ and maps.py: a step in eager mode and compiled, state dict, pickle.
    alone = run("-c", EVERYTHING_ALONE, cwd=tmp_path)
    assert alone.stdout == "alike\n", alone.stderr

    code = (
        "import torch, moe, package.moe\n"
        "x = torch.ones(3, 8)\n"
        "for m in (moe, package.moe):\n"
        "    y = m.MoELayer(m.MoEConfig(8, 4, 4, 2))(x)\n"
        "    print(tuple(y.shape), m.kernels.__name__)")
    done = run("-Werror::SyntaxWarning", "-c", code, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["(3, 8) kernels", "(3, 8) package.kernels"], done.stderr

    for name in ("maps", "prune", "small"):                      # the tests go along
        shutil.copy(HERE / f"{name}.py", package)
        shutil.copy(HERE / f"test_{name}.py", package)
    shutil.copy(HERE / "test_moe.py", package)
    shutil.copytree(HERE / "ranks", package / "ranks")
    (package / "ranks" / "__init__.py").touch()
    some = "layout or in_both_forms or equals_its_loop or of_a_mesh or refuses_several_ranks"
    done = run("-m", "pytest", "-q", "package", "-k", some, cwd=tmp_path)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout


def test_sources_installed_as_a_package(tmp_path):
    """One package, which works from another folder; nothing else is installed beside it."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", *[f.name for f in HERE.glob("*.py")]):
        shutil.copy(HERE / file, source)
    for folder in ("ranks", "models", "package"):
        shutil.copytree(HERE / folder, source / folder)
    done = run("-m", "pip", "install", "-q", "--no-deps", "--target", target, source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    installed = target / "minimal_moe"
    names = [file.stem for file in (*installed.glob("*.py"), *installed.glob("*/*.py"))]
    others = ["__init__", "maps", "prune", "small", "check", "plan", "grouped_triton"]
    assert sorted(names) == sorted(LAYER + RANKS + MODELS + others)
    tops = [path.name for path in target.iterdir() if path.suffix != ".dist-info"]
    assert tops == ["minimal_moe"]
    [metadata] = target.glob("*.dist-info/METADATA")
    needs = re.findall("^Requires-Dist: (.*)$", metadata.read_text(), re.M)
    assert needs == ["torch>=2.11", "einops; extra == 'models'"]
    done = run("-c", f"import sys; sys.path.insert(0, {str(target)!r})\n"
               "import torch, minimal_moe.models.live, minimal_moe.check, minimal_moe.small\n"
               "import minimal_moe.maps, minimal_moe.prune\n"
               "import minimal_moe.ranks.parallel, minimal_moe.ranks.plan\n"
               "from minimal_moe.moe import MoEConfig, MoELayer\n"
               "print(minimal_moe.__version__)\n"
               "print(MoELayer(MoEConfig(8, 4, 4, 2))(torch.ones(3, 8)).shape)", cwd=tmp_path)
    version = re.search('^version = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.M)[1]
    assert done.stdout.split("\n")[:2] == [version, "torch.Size([3, 8])"], done.stderr


def imported_modules(file: str) -> set[str]:
    """The first words of all imports, those inside functions too; of models/ the first two."""
    found = set()
    for node in ast.walk(ast.parse((HERE / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "models":
            found |= {f"models.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module if node.module.startswith("models.") else
                      node.module.split(".")[0])
    return found


@pytest.mark.parametrize("file, local", [
    ("small.py", set()),
    ("check.py", set()),
    *[(f"{name}.py", {*LAYER[:i]}) for i, name in enumerate(LAYER)],
    ("maps.py", {"compat", "kernels"}),
    ("prune.py", {"base", "moe", "router"}),
    ("ranks/sharding.py", {"compat", "base"}),
    ("ranks/parallel.py", {"compat", "grouped", "kernels", "base"}),
    ("ranks/plan.py", {"moe", "kernels", "base", "models.atlas"}),
    ("models/reader.py", set()),
    ("models/table.py", {"models.reader"}),
    ("models/configs.py", {"moe", "models.reader", "models.table"}),
    ("models/weights.py", {"moe", "models.reader", "models.table", "models.configs"}),
    ("models/published.py", set()),
    ("models/atlas.py",
     {"moe", "models.reader", "models.table", "models.configs", "models.published"}),
    # transformers: in the functions that need it
    ("models/experts.py", {"moe", "base", "transformers"}),
    ("models/live.py", {"moe", "base", "ranks", "transformers", "models.reader", "models.table",
                        "models.configs", "models.experts"}),
    ("examples/steps.py", {"small"}),
    ("examples/measure_steps.py", {"examples"}),
    ("examples/port.py", {"examples", "grouped"}),
])
def test_sources_import_torch_and_einops_alone(file, local):
    known = {"torch", "einops"} if file == "models/weights.py" else {"torch"}
    others = imported_modules(file) - known - local
    assert others <= sys.stdlib_module_names, f"{file} imports {others - sys.stdlib_module_names}"


@pytest.mark.parametrize(
    "file", [*[f"{name}.py" for name in LAYER], *[f"ranks/{name}.py" for name in RANKS],
             "ranks/plan.py", "maps.py", "prune.py", "small.py",
             *[f"models/{name}.py" for name in MODELS],
             "examples/train.py"])
def test_sources_private_names_of_torch(file):
    """They stand in one section of compat.py, of ranks/parallel.py and of ranks/sharding.py. What
    nn.Module is made of, and its methods that are there to be overridden, are none; nor is what
    Python offers, nor a field of transformers. In small.py are six: torch._dynamo.mark_static,
    which torch's manual explains, Tensor._version, aten._unsafe_view, aten._unsafe_index,
    aten._grouped_mm, and whether the CPU has instructions for bf16."""
    others = {"_apply", "_load_from_state_dict", "_save_to_state_dict", "_parameters", "_buffers",
              "_modules", "_replace", "_exit", "_experts_implementation"}
    text = (HERE / file).read_text()
    if file == "small.py":
        others |= {"_dynamo", "_version", "_unsafe_view", "_unsafe_index", "_grouped_mm",
                   "_is_mkldnn_bf16_supported"}
    if file in ("compat.py", *[f"ranks/{name}.py" for name in RANKS]):
        text, _, section = text.partition("\n# ---- Private names of torch ----\n")
        assert section
    tree = ast.parse(text)
    definitions = ast.FunctionDef, ast.ClassDef
    own = {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)}
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {part for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              for part in (node.module or "").split(".")}
    private = {name for name in found if re.match("_[a-z]", name)}
    assert private <= own | others, private - own - others


# A function and its arguments, with those defaults that are neither None nor False.
SIGNATURES = """
maps.topk_routing_with_score_function: logits topk use_pre_softmax num_groups group_topk
    scaling_factor score_function=softmax expert_bias dense_output precomputed_indices
    norm_topk_prob norm_eps=1e-20 group_score_topk
maps.group_limited_topk: scores topk num_tokens num_experts num_groups group_topk
    group_score_topk
kernels.compute_routing_scores_for_aux_loss: logits topk score_function padding_mask
kernels.switch_load_balancing_loss_func: probs tokens_per_expert total_num_tokens topk
    num_experts moe_aux_loss_coeff
kernels.z_loss_func: logits z_loss_coeff padding_mask
kernels.sinkhorn: cost tol=0.0001 padding_mask
kernels.get_capacity: num_tokens num_experts capacity_factor min_capacity
maps.apply_router_token_dropping: routing_probs routing_map router_topk capacity_factor
    drop_policy=probs pad_to_capacity
kernels.get_updated_expert_bias: tokens_per_expert expert_bias expert_bias_update_rate
    tp_dp_cp_group
kernels.required_bias_histogram: scores expert_bias topk num_bins=1000 padding_mask
kernels.quantile_expert_bias: histogram expert_bias topk
kernels.plan_permutation: indices num_experts
kernels.gather_rows: tokens plan
kernels.combine_rows: rows plan probs
maps.permute: tokens routing_map probs num_out_tokens fused drop_and_pad
maps.unpermute: permuted_tokens sorted_indices restore_shape probs routing_map fused
    drop_and_pad
maps.sort_chunks_by_idxs: input split_sizes sorted_idxs probs
maps.pad_routing_map: routing_map pad_multiple
kernels.activation: y kind=swiglu weights fp8_input_store constants
maps.activation_back: g y kind=swiglu weights constants
maps.weighted_swiglu: y weights
maps.swiglu_back: g y
maps.weighted_swiglu_back: g y weights
grouped.grouped_mm: rows weights offsets
kernels.expert_mlp: tokens probs plan fc1 fc2 fc1_bias fc2_bias kind=swiglu fp8_input_store
    indices constants
moe.replay_routing: model indices
moe.load_balancing_metrics: model reduce
shared_experts.overlap_state_check: required_state next_state
shared_experts.set_tensor_grad_fn_sequence_sr: tensor value
parallel.ProcessGroups: tp ep tp_cp dp_cp tp_dp_cp expt_dp
moe.TopKRouter: config pg_collection
moe.TopKRouter.forward: input padding_mask topk_indices dense_output cu_seqlens
moe.TopKRouter.route: input padding_mask topk_indices cu_seqlens
moe.TopKRouter.routing: logits padding_mask
moe.TopKRouter.choose: logits padding_mask topk_indices
moe.TopKRouter.apply_z_loss: logits padding_mask
moe.TopKRouter.attach_and_log_load_balancing_loss: activation aux_loss_coeff aux_loss
    aux_loss_name reduce_group reduce_group_has_dp valid_token_count
moe.SharedExpertMLP: config gate pg_collection
moe.SharedExpertMLP.pre_forward_comm: input wait_current_stream=True
moe.MoELayer: config pg_collection
moe.MoELayer.forward: hidden_states padding_mask topk_indices cu_seqlens
moe.MoELayer.dispatch: x probs indices plan
prune.select_experts: layer experts optimizer
small.MoE: hidden_size ffn_hidden_size num_experts topk score_function=softmax
    enable_expert_bias aux_loss_coeff shared_expert_intermediate_size shared_expert_gate
    norm_topk_prob scaling_factor=1.0 num_groups group_topk group_score_topk
small.MoE.forward: x padding_mask
small.MoE.finish_step: rate=0.001 group
small.moe_loop: x router fc1 fc2 topk
kernels.moe_loop: x router fc1 fc2 topk
check.check_experts: function dtype=torch.float32 device=cpu case shapes=()
check.check_router: function topk=2 score_function=softmax pre_softmax norm_topk_prob
    norm_eps=1e-20 scaling_factor num_groups group_topk group_score_topk with_bias num_experts=16
    device=cpu case
"""


def test_sources_signatures():
    """Other people's code depends on the names of arguments, on their order and defaults."""
    for row in re.sub(r"\n +", " ", SIGNATURES).strip().splitlines():
        name, want = row.split(": ")
        parameters = inspect.signature(eval(name)).parameters.values()
        got = [p.name if p.default in (p.empty, None, False) else f"{p.name}={p.default}"
               for p in parameters if p.name != "self"]
        assert got == want.split(), name


@pytest.mark.parametrize(
    "name",
    ["models.atlas", "ranks.plan", "check", "examples.measure_steps", "examples.train"])
def test_sources_help(name, capsys, monkeypatch):
    """--help begins with what the script's docstring says."""
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    first, *_ = script.__doc__.split("\n\n")
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and " ".join(first.split()) in said


def failed_examples(docstring: str, names: dict) -> str:
    """What doctest reports of the `>>>` examples in a docstring; empty if they all hold."""
    test = doctest.DocTestParser().get_doctest(docstring, dict(names), "example", None, 0)
    reports = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)   # not pytest's -v
    runner.run(test, out=reports.append)
    return "".join(reports)


def check_examples(module) -> None:
    """Those in the docstrings of the module, and of every function, method and class in it."""
    assert failed_examples(">>> 1 + 1\n3", {}) and failed_examples(">>> 1 / 0", {})
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            torch.manual_seed(0)
            names = {**vars(moe), **vars(module)}
            reports = failed_examples(ast.get_docstring(node) or "", names)
            assert not reports, reports


def test_sources_names_are_where_people_import_them_from():
    """moe.py imports what it hands on by name, and lists it. No module makes up names."""
    names = {}
    exec("from moe import *", names)
    assert {*moe.__all__} == {name for name in names if not name.startswith("__")}
    assert moe.finish_step is router_file.finish_step
    for file in (*HERE.glob("*.py"), *HERE.glob("*/*.py")):
        for node in ast.parse(file.read_text()).body:
            assert getattr(node, "name", "") != "__getattr__", file


@pytest.mark.parametrize("name", LAYER)
def test_sources_of_the_layer_know_nothing_of_ranks(name):
    """They ask base.OneProcess. What it cannot answer is in one section of compat.py; and the
    signature of one of Megatron's functions has a group to sum over."""
    tree = ast.parse((HERE / f"{name}.py").read_text())
    allowed = {
        "compat": {"is_in_parts", "whole", "own_part", "num_processes", "place_of_part"},
        "kernels": {"get_updated_expert_bias"}}
    tree.body = [
        node for node in tree.body if getattr(node, "name", "") not in allowed.get(name, ())]
    words = set()
    for node in ast.walk(tree):
        words |= {getattr(node, "id", ""), getattr(node, "attr", "")}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= {*re.split(r"\W+", ast.unparse(node))}
    assert not words & {"dist", "distributed", "DTensor", "ProcessGroup", "ProcessGroups"}


def test_sources_examples_in_docstrings():
    for module in SOURCES:
        check_examples(module)


# ---- train ----

TINY = (
    "--steps 6 --layers 1 --hidden 16 --experts 4 --batch 2 --context 32 --save-every 3 "
    "--no-compile --dtype float32").split()


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    """The arguments of a run on a folder of ten files, without --out. In this process it runs in
    one thread: a second one costs such small products more than it gains."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"file {i}: " + "all work and no play " * 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield [*TINY, "--data", str(folder)]
    torch.set_num_threads(threads)


@pytest.fixture
def interrupts(monkeypatch) -> list:
    """What stands for Ctrl-C in a run in this process."""
    pressed = []
    monkeypatch.setattr(train, "catch_interrupts", lambda: pressed)
    return pressed


def saved_tensors(folder: Path) -> dict:
    """The tensors of a run's last checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    *_, checkpoint = sorted(folder.glob("checkpoint-*"))
    dcp_to_torch_save(checkpoint, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=True)


def read_log(folder: Path, key: str) -> dict:
    """Step -> the value in a run's log. The last record of a step holds."""
    records = [json.loads(line) for line in open(folder / "log.jsonl")]
    return {record["step"]: record[key] for record in records if key in record}


def at_step(n: int, action):
    """A get_batch that calls the action at step n."""
    def get_batch(data, args, step):
        if step == n:
            action()
        return real(data, args, step)
    real = train.get_batch
    return get_batch


@pytest.mark.parametrize("optimizer, moment", [
    ("adamw", "head.weight.exp_avg_sq"), ("muon", "blocks.0.ffn.experts.fc1.momentum")])
def test_train_resumes_bit_for_bit(
        tmp_path, tiny, interrupts, monkeypatch, capsys, optimizer, moment):
    """One run is stopped by an exception in step 4, with a checkpoint of step 3. Another one is
    stopped by Ctrl-C in step 4. Resumed, each ends with the weights, the optimizer state and the
    losses of a run that was never stopped."""
    whole = tmp_path / "whole"
    tiny += ["--optimizer", optimizer]
    train.main([*tiny, "--out", str(whole)])
    want = saved_tensors(whole)
    assert {
        "head.weight",
        f"optimizer.{moment}",
        "blocks.0.ffn.router.expert_bias",
    } <= want.keys()
    assert list(read_log(whole, "loss")) == [1, 2, 3, 4, 5, 6]

    def cut():
        raise InterruptedError

    def press():
        interrupts.append(True)

    for action, kind, step in ((cut, InterruptedError, 3), (press, SystemExit, 4)):
        out = tmp_path / action.__name__
        args = [*tiny, "--out", str(out)]
        with monkeypatch.context() as patch, pytest.raises(kind):
            patch.setattr(train, "get_batch", at_step(4, action))
            train.main(args)
        interrupts.clear()
        assert [path.name for path in out.glob("c*")] == [f"checkpoint-000000{step}"], action

        # A kill during a save leaves such a folder.
        (out / "unfinished").mkdir()
        (out / "unfinished" / "run.json").write_text("[")
        train.main([*args, "--resume"])
        assert [path.name for path in out.glob("c*")] == ["checkpoint-0000006"], action
        same(saved_tensors(out), want)
        assert read_log(out, "loss") == read_log(whole, "loss"), action
    assert "saved step 4" in capsys.readouterr().out


def test_train_refuses_checkpoints(tmp_path, tiny, interrupts, capsys):
    """--resume refuses a damaged checkpoint, other settings and a folder without a checkpoint."""
    train.main([*tiny, "--out", str(tmp_path / "run")])
    good = tmp_path / "run" / "checkpoint-0000006"
    args = [*tiny, "--out", str(tmp_path / "out")]
    train.main([*args, "--resume", str(good)])
    capsys.readouterr()

    def refused(checkpoint, *changes) -> str:
        with pytest.raises(SystemExit, match="2"):
            train.main([*args, *changes, "--resume", str(checkpoint)])
        said = capsys.readouterr().err
        assert said.startswith(f"train.py: error: --resume: {checkpoint} ")
        assert said.count("\n") == 1, said
        return said

    for name in ("run.json", ".metadata", "__0_0.distcp"):
        content = (good / name).read_bytes()
        for damaged in (content[:len(content) // 2], b"not a checkpoint", b""):
            bad = shutil.copytree(good, tmp_path / "bad", dirs_exist_ok=True)
            (bad / name).write_bytes(damaged)
            assert "is damaged" in refused(bad), (name, damaged)

    assert "other settings, {'lr': 0.01}" in refused(good, "--lr", "0.1")
    assert "other settings, {'steps': 6}" in refused(good, "--steps", "5")
    said = refused(tmp_path / "nowhere")
    assert "no checkpoint of train.py (FileNotFoundError)" in said


def test_train_is_a_script(tmp_path, tiny, capsys, monkeypatch):
    """In a process of its own it warns of nothing. A folder that it cannot make is one line."""
    done = run(HERE / "examples/train.py", *tiny, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "step 6" in done.stdout and "held_out" in done.stdout

    (tmp_path / "file").touch()
    monkeypatch.setattr(
        sys, "argv", ["train.py", *tiny, "--out", str(tmp_path / "file" / "out")])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(HERE / "examples/train.py"), run_name="__main__")
    finally:
        restore_interrupts(handler)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "file/out" in said, said


def restore_interrupts(handler):
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def test_train_refuses_settings_that_do_not_fit(tmp_path, tiny, interrupts, capsys):
    def refused(args) -> str:
        with pytest.raises(SystemExit, match="2"):
            train.main([*tiny, "--out", str(tmp_path / "out"), *args.split()])
        said = capsys.readouterr().err
        assert said.startswith("train.py: error: ") and said.count("\n") == 1, f"{args}: {said}"
        return said.removeprefix("train.py: error: ")

    # Of argparse, and of MoEConfig.
    for args in ("--balance no", "--overlap", "--topk 9", "--experts 1"):
        refused(args)

    said = [refused(args) for args in (
        "--ep 2", "--fsdp", "--hidden 3", "--steps 0", "--lr nan", "--context 9999",
        "--data nowhere", "--resume")]
    # The messages are wider than the page, so each breaks after its semicolons.
    said = "".join(said).replace(str(tmp_path), "TMP").replace("; ", ";\n    ")
    assert_expected_inline(said, """\
1 processes run (torchrun --nproc-per-node);
    needs a multiple of --ep = 2 that divides --batch = 2;
    with --fsdp more than one
1 processes run (torchrun --nproc-per-node);
    needs a multiple of --ep = 1 that divides --batch = 2;
    with --fsdp more than one
--hidden is 3;
    needs an even number, rotary embeddings turn pairs
--steps is 0;
    needs a positive number
--lr is nan;
    needs a positive number
--data TMP/data: 1268 of 12680 bytes are held out;
    needs more than --context = 9999
--data nowhere: 0 of 0 bytes are held out;
    needs more than --context = 32
--resume: no checkpoint in TMP/out
""")


def test_train_does_not_write_over_a_run(tmp_path, tiny, interrupts, capsys):
    args = [*tiny, "--out", str(tmp_path / "out")]
    train.main(args)
    with pytest.raises(SystemExit, match="2"):
        train.main(args)
    assert "holds a run; --resume goes on with it" in capsys.readouterr().err


def test_train_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        train.parse_args(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for shown in ("--no-compile run without torch.compile", "(default: False)",
                  "--steps STEPS steps of the optimizer (default: 500)"):
        assert shown in said, said


def test_train_baselines(tmp_path, tiny, interrupts, capsys):
    """Each has its own folder. The dense model has no experts. At the end the results stand beside
    what everybody's codes make of the same bytes. A resumed run without a step left ends so too."""
    out = tmp_path / "out"
    train.main([*tiny, "--out", str(out), "--baseline", "none", "quantile", "dense"])
    for name in ("", "none", "quantile", "dense"):
        steps = list(read_log(out / name, "loss"))
        loads = list(read_log(out / name, "tokens_per_expert"))
        assert steps == [1, 2, 3, 4, 5, 6], name
        assert loads == ([] if name == "dense" else steps), name
        assert list(read_log(out / name, "held_out")) == [3, 6], name
    ends = [read_log(out / name, "held_out")[6] for name in ("", "none", "quantile", "dense")]
    assert len(set(ends)) > 2, ends
    end = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    held_out = (tmp_path / "data" / "9.txt").read_bytes()
    starts = torch.linspace(0, len(held_out) - 33, 128).long().tolist()
    text = b"".join(held_out[i + 1:i + 33] for i in starts)
    assert end[0].startswith(f"bits per byte of {len(text):,} held-out bytes")
    assert len(end) == 7
    want = [8, 8 * len(gzip.compress(text, 9)) / len(text), *ends]
    assert [line.split()[0] for line in end[1:]] == [f"{bits:.3f}" for bits in want]

    train.main([*tiny, "--out", str(out), "--resume"])
    end = capsys.readouterr().out.splitlines()
    assert f"{ends[0]:.3f}  this model, balance bias" in end[-2]
    assert "--baseline dense" in end[-1]


def test_train_chooses_a_device(monkeypatch, capsys):
    """auto is the accelerator. On mps nothing is compiled, and all is fp32."""
    seen = {}
    for kind in ("cuda", "mps"):
        found = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        for words in ([], ["--device", "cpu", "--dtype", "bfloat16"], ["--device", kind]):
            args = train.parse_args(words)
            seen[kind, str(words)] = args.device, args.dtype, args.no_compile
    without = not shutil.which(os.environ.get("CXX", "g++"))
    assert list(seen.values()) == [
        ("cuda", "bfloat16", without), ("cpu", "bfloat16", without), ("cuda", "bfloat16", without),
        ("mps", "float32", True), ("cpu", "bfloat16", without), ("mps", "float32", True)]
    with pytest.raises(SystemExit, match="2"):
        train.parse_args(["--device", "cuda"])
    assert "--device is cuda; this machine has mps and cpu" in capsys.readouterr().err


def test_train_balances_each_sequence():
    """--balance seq: the sequences are the rows of the batch, not the positions."""
    words = "--balance seq --layers 1 --hidden 16 --experts 4 --context 12 --batch 3 --no-compile"
    args = train.parse_args(words.split())
    block = train.ByteModel(args).blocks[0]
    seen = []
    block.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    block(torch.randn(3, 12, 16)).sum().backward()                    # [B, S, H]
    logits = block.ffn.router.gating(seen[0]).double()
    each = [switch_loss_loop(sequence, block.ffn.config, 1.0, valid=list(range(12)))
            for sequence in logits.unbind(0)]
    got = load_balancing_metrics(block)["seq_load_balancing_loss"]
    close(got, torch.stack(each).mean()[None], 1e-5)


def muon_loop(w: Tensor, slopes: list, lr: float) -> Tensor:
    """Oracle: steps of Muon on one matrix [out, in], each on the singular values by themselves."""
    momentum = torch.zeros_like(w)
    for slope in slopes:
        momentum = 0.95 * momentum + 0.05 * slope
        U, s, V = torch.linalg.svd(0.95 * momentum + 0.05 * slope, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
        w = w - lr * 0.1 * w - lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * (U * s) @ V
    return w


def small_byte_model(groups=None, **changes):
    words = ("--layers 1 --hidden 16 --experts 4 --shared 24 --context 8 --optimizer muon "
             "--dtype float32 --no-compile")
    args = train.parse_args(words.split())
    vars(args).update(changes)
    torch.manual_seed(0)
    return train.ByteModel(args, groups)


def random_slopes(model) -> dict:
    torch.manual_seed(1)
    return {name: [torch.randn(p.shape) for _ in range(3)] for name, p in model.named_parameters()}


def step_along(model, slopes: dict, part=lambda name, p, slope: slope) -> dict:
    """The weights after steps along given gradients."""
    optimizer = train.make_optimizer(model, lr=0.1)
    for i in range(3):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"]
        for name, p in model.named_parameters():
            p.grad = part(name, p, slopes[name][i])
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_train_muon_is_a_loop_over_matrices():
    """pytorch #190597: torch.optim.Muon refuses expert weights. Here every expert's gate, up and
    down projection is a matrix. What is no matrix of a block has AdamW's step to the bit."""
    model = small_byte_model()
    slopes = random_slopes(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with_adamw = step_along(small_byte_model(optimizer="adamw"), slopes)
    got = step_along(model, slopes)
    others = []
    for name, w in start.items():
        if "block" not in name or w.ndim == 1 or "router" in name:
            same(got[name], with_adamw[name])
            others.append(name)
            continue
        matrices = list(w.reshape(-1, *w.shape[-2:]))
        each = [list(slope.reshape(-1, *w.shape[-2:])) for slope in slopes[name]]
        steps = [list(slope) for slope in zip(*each)]
        want = [muon_loop(m.double(), [s.double() for s in slope], lr=0.2)
                for m, slope in zip(matrices, steps)]
        close(got[name], torch.stack(want).view_as(w), 1e-4)
        for m, slope, ours in zip(matrices, steps, got[name].reshape(-1, *w.shape[-2:])):
            theirs = torch.nn.Parameter(m.clone())
            muon = torch.optim.Muon([theirs], lr=0.2, weight_decay=0.1)      # its products are bf16
            for theirs.grad in slope:
                muon.step()
            assert (ours - theirs).norm() < 0.03 * (m - theirs).norm(), name
    assert others == [
        "embedding.weight", "blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight",
        "blocks.0.ffn.router.weight", "norm.weight", "head.weight"]


@over_ranks(2)
def test_train_muon_over_two_ranks(rank, ranks):
    """Each rank steps its own experts. FSDP cuts the other matrices, but not their steps."""
    whole = small_byte_model()
    slopes = random_slopes(whole)
    want = step_along(whole, slopes)
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))

    def part(name, p, slope):
        slope = own_part(name.rpartition("ffn.")[2], slope, groups)
        if isinstance(p, torch.distributed.tensor.DTensor):
            return torch.distributed.tensor.distribute_tensor(slope, p.device_mesh, p.placements)
        return slope
    for fsdp in (False, True):
        model = small_byte_model(groups, rank=rank, world=ranks, ep=ranks)
        if fsdp:
            train.shard(model)
        for name, p in step_along(model, slopes, part).items():
            close(full(p), own_part(name.rpartition("ffn.")[2], want[name], groups), 1e-4)


def test_train_shields_the_compiler_from_ctrl_c():
    """A linker that dies half-way leaves a broken library in Inductor's cache (the "file too short"
    of pytorch #102539). Child processes inherit the mask, and the handler still runs."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        interrupts = train.catch_interrupts()
        show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        blocked = subprocess.check_output([sys.executable, "-c", show], text=True)
        assert "SIGINT" in blocked
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not interrupts and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupts == [True]
    finally:
        restore_interrupts(handler)


def interrupt(line: str, command: list, presses: int = 1, **env: str) -> tuple[int, str]:
    """The exit code and the output of a run that gets Ctrl-C after it has printed `line`. The
    signal goes to the whole process group, as a terminal sends it."""
    process = subprocess.Popen(
        [str(word) for word in command], cwd=HERE, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env})
    try:
        said = ""
        for text in process.stdout:
            said += text
            if text.startswith(line):
                break
        for _ in range(presses):
            time.sleep(2 * (presses - 1))                             # into the compilation
            os.killpg(process.pid, signal.SIGINT)
        said += process.communicate(timeout=120)[0]
        return process.returncode, said
    finally:
        process.kill()


def test_train_stops_while_it_compiles(tmp_path, tiny):
    """The second Ctrl-C ends the program at once, and without a checkpoint."""
    command = [sys.executable, "examples/train.py", *tiny, "--out", tmp_path / "out"]
    command.remove("--no-compile")
    cache = str(tmp_path / "cache")
    code, said = interrupt("compiling", command, presses=2, TORCHINDUCTOR_CACHE_DIR=cache)
    assert code == 130, said
    assert said.endswith("once more: at once\n"), said
    assert not list(tmp_path.glob("out/checkpoint-*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_stops_and_goes_on(tmp_path, tiny, ranks):
    """A Ctrl-C leaves a checkpoint. The same command with --resume ends with the weights of an
    uninterrupted run. More steps make the run longer."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run"]
        command += ["--nproc-per-node", ranks, "--master-port", free_port()]
    command += ["examples/train.py", *tiny, "--steps", 100, "--save-every", 1000]
    stopped = [*command, "--out", tmp_path / "stopped"]

    code, said = interrupt("step 8 ", stopped)
    assert code, said
    assert "stopping after this step" in said, said
    assert "the same command with --resume goes on from there" in said, said

    for words in ([*command, "--out", tmp_path / "whole"], [*stopped, "--resume"]):
        done = run(*words[1:])
        assert done.returncode == 0, done.stderr
    same(saved_tensors(tmp_path / "stopped"), saved_tensors(tmp_path / "whole"))

    done = run(*stopped[1:], "--resume", "--steps", 120)
    assert done.returncode == 0, done.stderr
    assert max(read_log(tmp_path / "stopped", "held_out")) == 120


def start_train(ranks: int, args: list, out: Path) -> list[subprocess.Popen]:
    """train.py in `ranks` processes, as torchrun starts them."""
    command = [sys.executable, "examples/train.py", *args, "--out", out]
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    return [
        subprocess.Popen(
            [str(word) for word in command], cwd=HERE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)]


def finish_train(processes, kill_last_at: Path | None = None) -> list[int]:
    """The exit codes. With a path, the last process is killed as soon as that file exists; without
    one, every process must succeed."""
    try:
        if kill_last_at is not None:
            deadline = time.monotonic() + 300
            last = processes[-1]
            while not kill_last_at.exists() and last.poll() is None:
                assert time.monotonic() < deadline, f"{kill_last_at} is never written"
                time.sleep(0.01)
            last.kill()

        outputs = [process.communicate(timeout=300)[0] for process in processes]
        codes = [process.returncode for process in processes]
        if kill_last_at is None:
            assert not any(codes), outputs
        return codes
    finally:
        for process in processes:
            process.kill()


def test_train_with_a_killed_rank(tmp_path):
    """Two ranks follow the curve of one process. When one rank is killed, the other ends with an
    error, and --resume goes on bit for bit. A checkpoint of ep 2 goes on at ep 1. One of ep 1 goes
    on at ep 2 with FSDP."""
    lines = [b"%d squared is %d\n" % (i, i * i) for i in range(2000)]
    (tmp_path / "text").write_bytes(b"".join(lines))
    one_rank = (
        "--steps 20 --layers 1 --hidden 16 --experts 4 --batch 2 --context 32 --save-every 8 "
        "--shared 16 --overlap --no-compile --dtype float32").split()
    one_rank += ["--data", tmp_path / "text"]
    two_ranks = [*one_rank, "--ep", 2]

    def losses(name):
        loss = read_log(tmp_path / name, "loss")
        assert sorted(loss) == list(range(1, 21)), name
        return torch.tensor([loss[step] for step in sorted(loss)], dtype=torch.float64)

    runs = [
        start_train(2, two_ranks, tmp_path / "two"),
        start_train(1, one_rank, tmp_path / "one")]
    for processes in runs:
        finish_train(processes)
    close(losses("two"), losses("one"), 1e-5)

    # Each run loses its last process at its first checkpoint.
    killed = start_train(2, two_ranks, tmp_path / "killed")
    codes = finish_train(killed, tmp_path / "killed" / "checkpoint-0000008")
    assert len(codes) == 2
    assert all(codes), codes
    alone = start_train(1, one_rank, tmp_path / "alone")
    finish_train(alone, tmp_path / "alone" / "checkpoint-0000008")

    shutil.copytree(tmp_path / "killed", tmp_path / "killed1")
    shutil.copytree(tmp_path / "alone", tmp_path / "alone2")
    resumed = [
        start_train(2, [*two_ranks, "--resume"], tmp_path / "killed"),
        start_train(1, [*one_rank, "--resume"], tmp_path / "killed1"),
        start_train(2, [*two_ranks, "--fsdp", "--resume"], tmp_path / "alone2")]
    for processes in resumed:
        finish_train(processes)
    same(losses("killed"), losses("two"))
    close(losses("killed1"), losses("one"), 1e-5)
    close(losses("alone2"), losses("one"), 1e-5)


# ---- steps ----

def of_a_step(layer, x: Tensor, function=None) -> list[Tensor]:
    """The output and the gradients of x and of the parameters, in fp64."""
    x = x.detach().to(layer.router.dtype).requires_grad_()
    y = layer(x) if function is None else function(x)
    upstream = torch.linspace(-1, 1, y.numel()).view_as(y)
    found = [y, *grads(y, [x, *layer.parameters()], upstream.to(y.dtype))]
    return [tensor.detach().double() for tensor in found]


@pytest.mark.parametrize("name", [*steps.STEPS, measure_steps.LOOP_COMPILED])
def test_steps_compute_the_loop(name):
    """Each against the plain loop in fp64, in eager mode in fp32, and compiled in bf16; on rounded
    weights, so that all choose the same."""
    T, H, W, E, K = 24, 16, 8, 5, 3
    torch.manual_seed(0)
    step = steps.STEPS.get(name, steps.Loop)(H, W, E, K)
    step.load_state_dict({key: (tensor * 20).bfloat16() for key, tensor in
                          steps.Loop(H, W, E, K).state_dict().items()})
    x = torch.randn(T, H).bfloat16()
    exact = copy.deepcopy(step).double()
    want = of_a_step(exact, x, lambda x: kernels.moe_loop(
        x, exact.router, exact.fc1, exact.fc2, K))
    close(of_a_step(step, x), want, 1e-5)
    step.bfloat16()
    function = None if name == measure_steps.EAGER else compiled(step)
    for got, right in zip(of_a_step(step, x, function), want, strict=True):
        assert (got - right).norm() < 2e-2 * right.norm()


def test_steps_graphs_of_the_loop():
    """With fullgraph=True one graph, and a second for all other T, with the host's read and the
    products of each expert. Without it the graph breaks."""
    E = 5
    targets = []

    def count(gm, inputs):
        targets.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward
    loop = steps.Loop(16, 8, E, 2)
    for name, options in (("one", dict(fullgraph=True)), ("parts", {})):
        torch._dynamo.reset()
        counters.clear()
        function = torch.compile(loop, backend=aot_autograd(fw_compiler=count), **options)
        x = torch.randn(24, 16)
        close(function(x), loop(x), 1e-5)
        if name == "one":
            assert graphs_made() == 1
            forward = targets[0]
            assert forward.count("aten.nonzero.default") == E
            assert forward.count("aten.mm.default") == 2 * E + 1                 # and the router's
            function(torch.randn(20, 16)), function(torch.randn(9, 16))
            assert graphs_made() == 2
    assert graphs_made() > 2


def test_steps_print_their_tables(capfd, monkeypatch):
    """A row for each step: its bytes, bits, kernels and first call, its time over the last's, its
    graphs; with --loop one for the compiled loop. In fp32 a graph of torch 2.13 refuses
    F.grouped_mm, and its rows say so. An interrupt loses no row before it."""
    def run(dtype, *options):
        arguments = ["--shape", *"64 32 16 4 2".split(), "--dtype", dtype, *options]
        monkeypatch.setattr(sys, "argv", ["measure_steps.py", *arguments])
        torch._dynamo.reset()
        measure_steps.main()

    def tables(dtype):
        """Of what was printed: the words of each row, by the step's name."""
        header, *lines = capfd.readouterr().out.splitlines()
        assert header.startswith(f"T, H, F, E, K = [64, 32, 16, 4, 2], {dtype}, cpu")
        assert not any("TORCHDYNAMO_VERBOSE" in line for line in lines)
        found = []
        for line in lines:
            name, words = line[:21].strip(), line[21:].split()
            if name == "step":
                found.append({})
            else:
                found[-1][name] = words
        return found

    def interrupt(step):
        raise KeyboardInterrupt

    loop, two, three, four, last = steps.STEPS
    with torch._inductor.config.patch(force_disable_caches=False):
        run("bf16", "--loop")
        kept, times, graphs = tables("bf16")
        assert [*kept] == [*times] == [*steps.STEPS, measure_steps.LOOP_COMPILED]
        assert kept[loop][1:] == ["yes", "-"]
        assert kept[four][1] == kept[last][1] == "yes"
        assert all(float(kept[name][-1]) > 0.5 for name in [*kept][1:])           # seconds
        kernels = {name: int(words[2]) + int(words[4]) for name, words in kept.items() if words[3:]}
        assert kernels[measure_steps.LOOP_COMPILED] > 2 * kernels[last]
        each = [float(kept[name][0]) for name in steps.STEPS]
        assert each[1] > 2 * each[2] and each[2:] == pytest.approx([each[-1]] * 3, rel=0.1)
        assert times[last][1] == "1.00" and graphs == {
            name: ["2"] for name in [*kept][1:]}

        monkeypatch.setattr(measure_steps.Measured, "graphs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("fp32")
        kept, times, graphs = tables("fp32")
    refused = [name for name, words in kept.items() if words[0] == "refused:"]
    assert [*kept] == [*steps.STEPS] and times[last][1] == "1.00" and not graphs
    assert [*times] == [name for name in steps.STEPS if name not in refused]
    if torch.__version__[:4] == "2.13":
        assert refused == [two, three, four]


# ---- docs: README and docs ----

PAGES = [HERE / "README.md", *sorted(HERE.glob("docs/*.md"))]


def example(marker: str) -> str:
    """The Python code after <!-- marker example --> in README.md or a page of docs/."""
    text = "\n".join(page.read_text() for page in PAGES)
    _, after = text.split(f"<!-- {marker} example -->")
    return re.search(r"```python\n(.*?)```", after, re.S)[1]


def test_docs_say_why_each_op_is_one():
    """The table of docs/compile.md has every custom op of the sources, and no other."""
    found = set()
    for name in (*LAYER, "maps", "small"):
        for node in ast.walk(ast.parse((HERE / f"{name}.py").read_text())):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in (
                        "op", "compat.op"):
                    found.add(node.name.strip("_"))
    page = (HERE / "docs/compile.md").read_text()
    cells = re.findall(r"^\| (`[^|]*`) \|", page.split("## Why there are ops")[1], re.M)
    named = re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(cells))
    assert set(named) == found


def test_docs_use(capsys):
    """README's full layer: a step changes the weights, and the metrics are printed."""
    names = {}
    code = example("use").replace("torch.compile(model, fullgraph=True)", "model")
    exec(code.replace("torch.randn(128, 4, 512)", "torch.randn(2, 3, 512)"), names)
    assert "max_violation" in capsys.readouterr().out
    assert names["optimizer"].state[names["model"].router.weight]["exp_avg"].any()


def test_docs_features():
    """The parts alone give bitwise the layer; a replay of a record gives the same choice."""
    names = {}
    exec(example("parts"), names)
    layer = MoELayer(names["config"])
    layer.router.load_state_dict(names["router"].state_dict())
    layer.experts.load_state_dict(names["experts"].state_dict())
    same(names["y"], layer(names["x"]))
    exec(example("record"), names)
    assert names["loss"] == names["model"](names["x"]).square().mean()


def test_docs_options_of_the_probs():
    """Each row of the table in docs/features.md: the layer's probs are its formula."""
    page = (HERE / "docs/features.md").read_text().split("## Options that decide the probs")[1]
    rows = re.findall(r"^\| (none|`[^|]*`) \| `([^|]*)` \| [^|]* \|$", page.split("## ")[0], re.M)
    assert len(rows) == 8
    scope = dict(
        softmax=lambda z: z.softmax(-1), sigmoid=torch.sigmoid, sqrt=torch.sqrt,
        softplus=F.softplus, normed=lambda p: p / p.sum())
    for fields, formula in rows:
        fields = {} if fields == "none" else eval(f"dict({fields.strip('`')})")
        router = TopKRouter(MoEConfig(
            hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=3, init_std=1.0, **fields))
        x = torch.randn(5, 8)
        probs, indices = router.route(x)
        for z, chosen, got in zip(router.gating(x), indices, probs):
            close(got, eval(formula, scope | dict(z=z, chosen=chosen)), 1e-5)


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_docs_ops_in_a_profile(way):
    """The table of docs/features.md is what a profile shows: names, and how often. On torch 2.15
    it shows no op whose arguments are all tensors."""
    page = (HERE / "docs/features.md").read_text()
    rows = re.findall(r"\| `(moe_\w+::\w+)` \|.*\| (\d) \|\n", page)
    layer = MoELayer(small_config())
    function = WAYS[way](layer)
    x = torch.randn(6, 4, 8, requires_grad=True)
    for _ in range(2):                                       # the first step compiles
        with torch.profiler.profile() as profile:
            function(x).sum().backward()
    seen = {event.key: event.count for event in profile.key_averages()
            if event.key.startswith("moe_")}
    want = {name: int(count) for name, count in rows}
    want["moe_grouped::rows_times_weights"] += way == "plain"
    if torch.__version__[:4] == "2.15":
        del want["moe_compat::copy_after"]
    assert seen == want


def test_docs_model(tmp_path, monkeypatch, capsys):
    """It learns, and goes on from its checkpoint."""
    monkeypatch.chdir(tmp_path)
    code = example("model").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    names = {}
    exec(code, names)
    first, second, evaluation = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("step 0: loss 5.") and "max violation [" in second
    assert float(evaluation.split()[1]) < float(first.split()[3].strip(","))
    assert names["optimizer"].state_dict()["state"][0]["step"] == 20

    exec(example("prune"), names)
    assert [len(block.moe.experts.fc1) for block in names["model"].blocks] == [7, 7]
    torch._dynamo.reset()
    names["loss_of"](names["ids"]).backward()
    names["optimizer"].step()


def test_docs_small_layer():
    """README's first example is a step of training."""
    names = {}
    torch.manual_seed(0)
    exec(example("small"), names)
    torch.manual_seed(0)
    model = names["model"]
    before = small.MoE(512, 256, 64, 8)
    assert model.expert_bias.abs().max() == 1e-3 and not model.counts.any()
    for name, weight in before.named_parameters():
        assert (weight != model.get_parameter(name)).float().mean() > 0.5, name


def test_docs_score_function(monkeypatch):
    """The example's scores choose, and are normalised over the chosen; the graph agrees."""
    monkeypatch.setitem(kernels.SCORE_FUNCTIONS, "softsign", None)    # taken out at the end
    names = {}
    exec(example("score"), names)
    layer = names["layer"]
    x = torch.randn(30, 64)
    logits = layer.router.gating(x)
    scores = 0.5 + 0.5 * logits / (1 + logits.abs())
    chosen, indices = scores.topk(4)
    probs, got = layer.router.route(x)
    same(got, indices)
    close(probs, chosen / chosen.sum(1, keepdim=True), 1e-6)
    close(compiled(layer)(x), layer(x), 1e-5)


@about_the_cpu("a card keeps the index of batches too")
def test_docs_activation():
    """A function, in eager mode and in a graph; and experts that train two numbers of theirs."""
    names = {}
    exec(example("activation"), names)
    layer = names["layer"]
    x = leaf(3, 64).float()
    agree(compiled(layer), layer, x.detach().requires_grad_(), tol=1e-5)
    gate, up = leaf(3, 5), leaf(3, 5)
    close(layer.config.bound_activation.function(gate, up), 2 * gate * up)

    exec(example("xielu"), names)
    layer = names["layer"].double()
    x = leaf(3, 64)
    agree(compiled(layer), layer, x)
    layer(x).sin().sum().backward()
    assert layer.experts.slopes.grad.abs().min() > 0
    assert all(p.ndim > 0 for p in layer.parameters())           # fully_shard refuses others
    a = F.softplus(torch.tensor(0.8).double())
    for y, want in ((2.0, 4 * a + 1), (-2.0, (0.5 + a) * (math.exp(-2) - 1 + 2) - 1)):
        close(layer.experts.activate(torch.tensor(y).double()), want, 1e-7)

    exec(example("slope"), names)
    layer = names["layer"].double()
    with torch.no_grad():
        layer.experts.slope.copy_(torch.linspace(-1, 1, 16))
    x = leaf(3, 64)
    agree(compiled(layer), layer, x)
    with torch.no_grad():
        close(compiled(layer)(x), layer(x))              # few tokens
    layer(x).sin().sum().backward()
    used = layer.router.route(x)[1].unique()
    assert layer.experts.slope.grad.nonzero().flatten().equal(used)
    assert layer.experts.slope[[3, 1]].equal(prune.select_experts(
        layer, [3, 1, 0, 2]).experts.slope[:2])


def test_docs_logits():
    """The loss on them reaches the router's weight."""
    made = {}
    exec(example("logits"), made)
    router, entropy = made["layer"].router, made["entropy"]
    assert router.logits.shape == (20, 16)
    logits = router.logits.detach()
    want = torch.distributions.Categorical(logits=logits).entropy().mean()
    close(entropy.detach(), want, 1e-5)
    assert router.weight.grad.abs().sum() > 0


def test_docs_bytes_kept():
    """The formulas of results.md, and forward.md's, are the bytes that eager mode keeps."""
    T, H, F_, E, K, Fs, latent = 40, 24, 12, 10, 3, 20, 8
    sizes = dict(T=T, H=H, F=F_, E=E, K=K, Fs=Fs, ℓ=latent)
    page = (HERE / "docs/results.md").read_text()

    def value(formula: str) -> int:
        return eval(formula.replace("·", " * ").replace("−", "-"), sizes)

    def said(row: str) -> int:
        """The formula in the row that begins so; that of eager mode if it has its own."""
        [cell] = re.findall(rf"^\| {row}[^|]*\| ([^|]+) \|$", page, re.M)
        cell = re.sub(r".*in eager mode (up to )?", "", cell).removesuffix(" at most")
        return value(cell.split(";")[0])

    def kept(autocast=False, x_dtype=torch.bfloat16, **options) -> int:
        options = dict(topk=K, params_dtype=torch.bfloat16) | options
        layer = MoELayer(MoEConfig(H, F_, E, **options))
        x = torch.randn(T, H, dtype=x_dtype, requires_grad=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            return saved_bytes(lambda: layer(x), exclude=layer.parameters())

    base = said("the layer")
    assert "2·T·H + 4·T·K·F + 28·T·K + 12·E" in (HERE / "docs/forward.md").read_text()
    shared = dict(shared_expert_intermediate_size=Fs)
    wide = dict(params_dtype=torch.float32)
    top_one = dict(topk=1, pre_softmax=True)
    rows = {
        "a shared expert": kept(**shared) - base,
        "its gate": kept(**shared, shared_expert_gate=True) - kept(**shared),
        "scores other": kept(score_function="sqrtsoftplus") - base,
        "`scaling_factor`": kept(scaling_factor=2.5) - base,
        "`load_balancing_type=\"sinkhorn\"`": kept(load_balancing_type="sinkhorn") - base,
        "`bias_update=\"quantile\"`": kept(enable_expert_bias=True, bias_update="quantile") - base,
        "`capacity_factor`": kept(capacity_factor=1.0) - base,
        "`input_jitter_eps`": kept(input_jitter_eps=0.1) - base,
        "`add_bias_linear`": kept(add_bias_linear=True) - base,
        "z-loss": kept(z_loss_coeff=0.1) - base,
        "autocast": kept(autocast=True, **wide) - base,
        "`apply_probs_on": kept(**top_one, apply_probs_on="input") - kept(**top_one),
        "`latent_size`": kept(latent_size=latent) - kept(),
        "`latent_norm`": kept(latent_size=latent, latent_norm=True) - kept(latent_size=latent),
        "an activation": kept(activation="relu2") - base,
        "fp32": kept(x_dtype=torch.float32, **wide) - base,
    }
    assert kept() == base
    assert rows == {row: said(row) for row in rows}
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        loss = dict(load_balancing_type=kind, aux_loss_coeff=0.1)
        assert 4 * T * E <= kept(**loss) - base <= said("a balance loss")
    stand_in = 2                                             # a zero in the shape of fc1's output
    assert rows["an activation"] + stand_in == kept(activation_fp8_input_store=True) - base
    both = kept(autocast=True, x_dtype=torch.float32, **wide) - base
    assert both == rows["autocast"] + 4 * T * H


@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("who", ["triton", "native"])
def test_docs_bytes_kept_in_a_graph(monkeypatch, who):
    """By the layer itself: 8·E less than results.md says for eager mode, and T·K more for a mask,
    which a graph of torch 2.15 makes again."""
    PRODUCTS[who](monkeypatch)
    T, H, F_, E, K = 40, 24, 16, 10, 3
    layer = MoELayer(MoEConfig(H, F_, E, topk=K, params_dtype=torch.bfloat16))
    x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    function = compiled(layer, "inductor")
    base = 2 * T * H + 4 * T * K * F_ + 28 * T * K + 12 * E
    kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
    want = base - 8 * E + T * K
    assert kept == want if torch.__version__ < (2, 14) else want - T * K <= kept <= want
    eager = saved_bytes(lambda: layer(x), exclude=layer.parameters())
    assert eager == base + 2 * T * K * F_


def test_docs_first_compile(capsys):
    names = {}
    exec(example("first compile").replace("fullgraph=True", 'backend="aot_eager"'), names)
    assert capsys.readouterr().out.count(" s\n") == 3


def test_docs_unequal_microbatches():
    """The gradients are the mean of the microbatches' own, weighted by their tokens; without a
    balance loss on counts they are those of one batch."""
    names = {}
    exec(example("unequal"), names)
    texts = [torch.randint(256, (length + 1,)) for length in (40, 9, 25)]
    for coeff in (0.3, 0.0):
        losses = dict(load_balancing_type="aux_loss", aux_loss_coeff=coeff) if coeff else {}
        config = MoEConfig(64, 32, 8, topk=2, init_std=0.3, z_loss_coeff=0.1, **losses)
        model = torch.nn.Sequential(
            torch.nn.Embedding(256, 64), MoELayer(config), torch.nn.Linear(64, 256)).double()
        per_token = names["config"].calculate_per_token_loss
        names["model"] = copy.deepcopy(model)
        names["model"][1].set_config(
            dataclasses.replace(config, calculate_per_token_loss=per_token))
        names["backward"](texts)
        for text in texts:
            loss = F.cross_entropy(model(text[:-1]), text[1:])
            loss.backward()
            for parameter in model.parameters():
                total = getattr(parameter, "total", 0.0)
                parameter.total = total + parameter.grad * (len(text) - 1) / 74
                parameter.grad = None
        got = [parameter.grad for parameter in names["model"].parameters()]
        close(got, [parameter.total for parameter in model.parameters()], 1e-6)
        if not coeff:
            ids = torch.cat([text[:-1] for text in texts])
            labels = torch.cat([text[1:] for text in texts])
            F.cross_entropy(model(ids), labels).backward()
            close(got, [parameter.grad for parameter in model.parameters()], 1e-6)


def test_docs_rows_sent():
    """The table of docs/ranks.md: to how many ranks a token goes."""
    torch.manual_seed(0)
    logits = torch.randn(8192, 256)
    place = torch.arange(1, 257)[torch.randperm(256)]
    groups = dict(num_groups=8, group_topk=4, score_function="sigmoid")
    page = (HERE / "docs/ranks.md").read_text()
    rows = [row for row in page.splitlines()
            if row.startswith(("| random", "| power law"))]
    for row, x, options in zip(
            rows, (logits, logits, logits - 2 * place.log()), ({}, groups, {}), strict=True):
        _, indices = maps.topk_routing_with_score_function(x, 8, dense_output=True, **options)
        means = []
        for R in (2, 4, 8, 16):
            home = indices // (256 // R)
            means.append(sum((home == r).any(1).float().mean() for r in range(R)))
        assert row.endswith("| 8 | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
        if row.startswith("| random |"):
            ours = [2 * mean * (1 - 1 / R) * (4 * 512 + 8 * 8) for mean, R in zip(means, (2, 4, 8))]
            each = [2 * 8 * (1 - 1 / R) * (4 * 512 + 4) for R in (2, 4, 8)]
            said = [re.findall(r"[\d.]+\d", part)[-3:] for part in re.search(
                r"sends (.*) kB a token.*\nwould be (.*)\.", page).groups()]
            for kilobytes, values in zip(said, (ours, each)):
                assert kilobytes == [f"{value / 1e3:.1f}" for value in values]


def test_docs_links_lead_somewhere():
    """To a file that exists, and to a heading of it."""
    def anchors(page):
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if ":" not in path:
                assert not path or (page.parent / path).exists(), f"{page.name}: {target}"
                file = page.parent / path if path else page
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_docs_router_of_your_own():
    """A threshold for scores: a token has its best experts over it, in eager mode and in a graph.
    With normalised sigmoids none of the probs would reach it."""
    names = {}
    exec(example("choose"), names)
    layer = names["layer"]
    x = torch.randn(30, 1, 64)
    logits = layer.router.gating(x.flatten(0, 1)) - 0.2
    layer.router.gating = lambda input: logits.view(*input.shape[:-1], 16)
    all_probs, all_indices = TopKRouter.choose(layer.router, logits)
    probs, indices = layer.router.route(x)
    fewer = 0
    for t in range(30):
        kept = min((logits[t].sigmoid() >= 0.5).sum().item(), 4)
        fewer += kept < 4
        assert indices[t].tolist() == [*all_indices[t, :kept].tolist(), *[16] * (4 - kept)]
        same(probs[t, :kept], all_probs[t, :kept])
        same(probs[t, kept:], torch.zeros(4 - kept))
    assert 5 < fewer < 30 and (indices < 16).any()
    del layer.router.gating
    y = layer(x)
    _, indices = layer.router.route(x)
    same(compiled(layer)(x), y)
    y.sum().backward()
    assert load_balancing_metrics(layer)["tokens_per_expert"].sum() == (indices < 16).sum()
    with replay_routing(layer, [all_indices]):                   # also below the threshold
        same(layer.router.route(x)[1], all_indices)


def test_docs_expert_choice():
    """Each expert takes its C best tokens, and C is that of the tokens without padding; with a
    smaller topk a token keeps its best experts. Output and gradients are those of a loop over
    experts, the graph's too. Given indices are the choice, and a record holds what was chosen."""
    names = {}
    exec(example("expert choice"), names)
    T, E, mean = 30, 16, 2
    x = leaf(T, 64)
    padding = torch.arange(T) % 9 == 3
    for topk in (E, 3):
        config = MoEConfig(64, 32, E, topk=topk, init_std=0.3, params_dtype=torch.float64,
                           router_dtype=torch.float64)
        layer = MoELayer(config)
        layer.router = names["ExpertChoice"](config)

        def loop(x):
            scores = (x @ layer.router.weight.T).softmax(1)
            taken = torch.zeros(T, E, dtype=torch.bool)
            for e in range(E):
                own = scores[:, e].masked_fill(padding, -1.0)
                valid = T - int(padding.sum())
                taken[own.argsort(descending=True)[:math.ceil(valid * mean / E)], e] = True
            y = torch.zeros_like(x)
            for t in range(T):
                chosen = sorted(taken[t].nonzero().flatten(), key=lambda e: -scores[t, e])[:topk]
                for e in chosen:
                    gate, up = layer.experts.fc1[e] @ x[t]
                    y[t] = y[t] + scores[t, e] * (layer.experts.fc2[e] @ (F.silu(gate) * up))
            return y

        def ours(x):
            return layer(x, padding)
        upstream = torch.randn(T, 64, dtype=torch.float64)
        leaves = [x, *layer.parameters()]
        want = loop(x)
        want_grads = grads(want, leaves, upstream)
        for got in (ours(x), compiled(ours)(x)):
            close(got, want)
            close(grads(got, leaves, upstream), want_grads)

        with record_routing(layer) as record:
            ours(x)
        assert (record.indices[0] < E).sum() == (record.probs[0] > 0).sum() > 0
        other = leaf(T, 64)
        for function in (ours, compiled(ours)):
            with replay_routing(layer, record.indices), record_routing(layer) as again:
                close(function(x), want)
                function(other)                      # it would choose others itself
            same(again.indices, record.indices)
    layer = names["layer"]
    layer(torch.randn(40, 64)).sum().backward()
    assert load_balancing_metrics(layer)["tokens_per_expert"].tolist() == [[5] * 16]


@over_ranks(2)
def test_docs_loss_of_your_own(rank, ranks):
    """Two ranks with unequal parts of a sequence have the loss and the gradients of one process."""
    scope = {}
    exec(example("own loss"), scope)
    layer = scope["layer"]
    layer(torch.randn(40, 64)).sum().backward()
    groups = ProcessGroups.from_mesh(mesh_of(cp=ranks))
    config = MoEConfig(
        hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, init_std=0.5,
        params_dtype=torch.float64, router_dtype=torch.float64, load_balancing_type="aux_loss",
        aux_loss_coeff=0.1)
    whole, mine = whole_and_mine(config, groups, kind=scope["EvenScores"])
    x = torch.randn(12, 1, 6, dtype=torch.float64)
    mask = (torch.arange(12) < 2)[:, None]
    scores = (x[2:, 0] @ whole.weight.T).softmax(1).mean(0)
    loss = (scores * (4 * scores).log()).sum()
    (attached,) = torch.autograd.grad(0.1 * loss, whole.weight, retain_graph=True)
    (main,) = torch.autograd.grad(whole.eval().route(x, mask)[0].sin().sum(), whole.weight)
    whole.train().route(x, mask)[0].sin().sum().backward()
    close(whole.weight.grad, main + attached)
    mine.route(x.tensor_split([5])[rank], mask.tensor_split([5])[rank])[0].sin().sum().backward()
    check_gradients(mine, whole)
    both = [load_balancing_metrics(router, reduce=router is mine)["load_balancing_loss"]
            for router in (mine, whole)]
    close(both[0].double(), both[1].double(), 1e-5)
    close(both[1].double(), loss.detach()[None], 1e-5)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@over_ranks(2)
def test_docs_dispatcher(rank, ranks, backend):
    """It gives what all-to-alls give, gradients of router and experts included (Automodel #2995),
    eager and as one graph; unrouted assignments, overlap and latent experts too."""
    scope = {}
    exec(example("dispatcher"), scope)
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    overlap = dict(
        shared_expert_overlap=True, load_balancing_type="aux_loss", aux_loss_coeff=0.1,
        z_loss_coeff=0.1)
    drops = dict(capacity_factor=0.8, latent_size=7, add_bias_linear=True)
    for options in (overlap, drops):
        config = MoEConfig(
            hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, score_function="sigmoid",
            shared_expert_intermediate_size=8, init_std=0.5, params_dtype=torch.float64,
            router_dtype=torch.float64, **options)
        torch.manual_seed(0)
        theirs = MoELayer(config, groups)
        mine = scope["AllGatherLayer"](config, groups)
        mine.load_state_dict(theirs.state_dict())
        torch.manual_seed(rank)
        x = leaf(5, 3, 6)
        mask = torch.rand(5, 3) < 0.2
        upstream = torch.randn(5, 3, 6, dtype=torch.float64)

        y = theirs(x, mask)
        want = [y, *grads(y, [x, *theirs.parameters()], upstream)]
        y = (compiled(mine, backend) if backend else mine)(x, mask)
        got = [y, *grads(y, [x, *mine.parameters()], upstream)]
        torch.testing.assert_close(
            got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{options}: {text}")


def test_docs_engine_record():
    """Two sequences in a pack; a dense layer; rows of -1 and of zeros, none for a last token."""
    names = {}
    exec(example("engine"), names)
    model = TwoLayers(**BIASED)
    lengths = 5, 7
    x = torch.randn(12, 8)
    with record_routing(model) as record:
        want = model(x)
    first, second = [list(own.split(lengths)) for own in record.indices]
    records = []
    for i, T in enumerate(lengths):
        layers = [first[i], torch.zeros(T, 2), second[i]]
        records.append(torch.stack(layers, dim=1)[:-1].short())        # [T - 1, layers, K]
    records[0][2, 0] = 0
    records[1][1, 2, 1] = -1
    indices = names["from_engine"]([records[0], records[1].numpy()], lengths, moe_layers=[0, 2])

    for own, got, lost in zip(record.indices, indices, ([2, 4, 11], [4, 6, 11])):
        for t in range(12):
            if t in lost:
                assert -1 in got[t], t
            else:
                same(got[t], own[t])
    with replay_routing(model, indices):
        same(model(x), want)
    same(names["agreement"](model, indices, x), torch.ones(2))

    shifted = indices.flip(0)
    shares = []
    for own, others in zip(record.indices, shifted.tolist()):
        known = [t for t in range(12) if -1 not in others[t]]
        both = [e for t in known for e in others[t] if e in own[t].tolist()]
        shares.append(len(both) / len(known) / 2)
    close(names["agreement"](model, shifted, x), torch.tensor(shares), 1e-6)
    assert max(shares) < 0.7


def test_docs_loop():
    """Four microbatches of two and one batch of eight give the same model; what is not decayed."""
    routers = []
    for pieces, size in ((4, 2), (1, 8)):
        code = example("loop").replace("microbatches = 4", f"microbatches = {pieces}")
        code = code.replace("(2, 33)", f"({size}, 33)").replace("range(20)", "range(3)")
        scope = {}
        torch.manual_seed(7)
        exec(code, scope)
        router = scope["model"][1].router
        assert router.expert_bias.abs().max() > 0, pieces
        assert router.local_tokens_per_expert.sum() == 0, pieces
        routers.append(router)
    small, large = routers
    close(small.weight, large.weight, 1e-4)
    same(small.expert_bias, large.expert_bias)

    names = {id(p): name for name, p in scope["model"].named_parameters()}
    undecayed = {names[id(p)] for p in scope["others"]}
    assert undecayed == {"1.experts.fc1_bias", "1.experts.fc2_bias", "2.bias"}
    assert len(scope["decayed"]) + len(undecayed) == len(names)


# ---- recipes: docs/recipes.md ----

def small_model(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2, **options)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), MoELayer(config))


def loss_of(model, x):
    return model(x).square().mean()


def plain_steps(model, batches, microbatches: int):
    """What each recipe of a trainer has to equal: a loop, with the sum of the microbatches."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(0, len(batches), microbatches):
        set_aux_loss_scale(model, 1 / microbatches)
        for x in batches[step:step + microbatches]:
            (loss_of(model, x) / microbatches).backward()
        optimizer.step(), optimizer.zero_grad(), finish_step(model)
    return model


BALANCED = dict(enable_expert_bias=True, load_balancing_type="aux_loss", aux_loss_coeff=0.1)


@over_ranks(2)
def test_docs_ddp(rank, ranks):
    """Two ranks are one process that takes the batches of both, as microbatches."""
    config = small_model(**BALANCED)[1].config
    torch.manual_seed(1)
    batches = list(torch.randn(12, 10, 64))                  # 3 steps of 2 microbatches on 2 ranks
    torch.manual_seed(0)
    scope = dict(torch=torch, config=config, mesh=mesh_of(dp=ranks), loss_of=loss_of, steps=3,
                 microbatches=2, batches=iter(batches[rank::2]))
    exec(example("ddp"), scope)
    torch.manual_seed(0)
    alone = ProcessGroups.from_mesh(mesh_of(dp=1, others=ranks)["dp"])
    whole = torch.nn.Sequential(MoELayer(config, alone), torch.nn.Linear(64, 64))
    plain_steps(whole, batches, 4)
    same(scope["model"][0].router.expert_bias, whole[0].router.expert_bias)
    close(list(scope["model"].parameters()), list(whole.parameters()), 1e-4)


@over_ranks(2)
def test_docs_small_loop(rank, ranks):
    """As test_docs_ddp, for small.py."""
    torch.manual_seed(1)
    batches = list(torch.randn(12, 10, 64))
    torch.manual_seed(0)
    scope = dict(
        torch=torch, loss_of=loss_of, steps=3, microbatches=2, batches=iter(batches[rank::2]))
    exec(example("small loop"), scope)
    torch.manual_seed(0)
    layer = small.MoE(64, 32, 8, topk=2, enable_expert_bias=True, aux_loss_coeff=0.1 / 4)
    whole = torch.nn.Sequential(layer, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(whole.parameters())
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    for i, x in enumerate(batches, 1):
        (loss_of(whole, x) / 4).backward()
        if i % 4 == 0:
            optimizer.step(), optimizer.zero_grad(), layer.finish_step(group=alone)
    same(scope["layer"].expert_bias, layer.expert_bias)
    close(list(scope["model"].parameters()), list(whole.parameters()), 1e-4)


def test_docs_small_weights():
    """The same layer in one file: its output is the layer's, to the bit."""
    config = MoEConfig(64, 32, 8, topk=2, score_function="sigmoid", enable_expert_bias=True,
                       shared_expert_intermediate_size=16, params_dtype=torch.bfloat16)
    other = MoELayer(config)
    other.router.expert_bias.copy_(torch.randn(8))
    scope = dict(other=other)
    exec(example("small weights"), scope)
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    same(scope["layer"](x), other(x))


def test_docs_lightning(monkeypatch):
    """lightning.LightningModule and its loop are stood for by a class and a loop that call the same
    hooks in the same order: the last microbatch of a step runs inside of optimizer_step."""
    class LightningModule(torch.nn.Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(optimizer_closure)
    monkeypatch.setitem(sys.modules, "lightning", types.SimpleNamespace(
        LightningModule=LightningModule))
    config = small_model(**BALANCED)[1].config
    batches = list(torch.randn(6, 10, 64))
    scope = dict(torch=torch, config=config, loss_of=loss_of, make_mesh=lambda: None)
    code = example("lightning").replace("ProcessGroups.from_mesh(make_mesh())", "None")
    exec(code, scope)
    lit = scope["Lit"]()
    torch.manual_seed(0)
    lit.configure_model(), lit.configure_model()
    lit.trainer = types.SimpleNamespace(accumulate_grad_batches=2)
    lit.on_fit_start()
    optimizer = lit.configure_optimizers()
    for i, batch in enumerate(batches):
        def closure():
            loss = lit.training_step(batch, i) / 2
            optimizer.zero_grad() if i % 2 == 0 else None
            loss.backward()
            return loss
        if i % 2:
            lit.optimizer_step(0, i, optimizer, closure)
        else:
            closure()
    torch.manual_seed(0)
    want = plain_steps(MoELayer(config), batches, 2)
    same(lit.model.state_dict(), want.state_dict())


@needs("accelerate")
def test_docs_accelerate():
    """Six batches in steps of four: the last step has two."""
    from accelerate import state
    data = torch.randn(6, 10, 64)
    model = small_model(**BALANCED)
    want = plain_steps(copy.deepcopy(model), list(data), 4)
    state.AcceleratorState._reset_state(reset_partial_state=True)        # of other tests
    exec(example("accelerate"), dict(
        model=model, optimizer=torch.optim.AdamW(model.parameters()),
        loader=torch.utils.data.DataLoader(data, batch_size=1),
        loss_of=lambda model, x: loss_of(model, x[0])))
    state.AcceleratorState._reset_state(reset_partial_state=True)
    close(list(model.parameters()), list(want.parameters()), 1e-5)
    same(model[1].router.expert_bias, want[1].router.expert_bias)
    assert model[1].router.expert_bias.any()


def test_docs_scaler():
    """The gradients, unscaled, are those without a scaler, the balance loss's too."""
    model = small_model(**BALANCED)
    want = plain_steps(copy.deepcopy(model), batches := list(torch.randn(3, 10, 64)), 1)
    optimizer = torch.optim.AdamW(model.parameters())
    code = example("scaler").replace('torch.autocast("cuda", torch.float16)', "autocast")
    code = code.replace("1.0)", "1e9)").replace('"cuda"', '"cpu"')
    exec(code, dict(
        torch=torch, model=model, optimizer=optimizer, batches=batches, loss_of=loss_of,
        finish_step=finish_step, set_aux_loss_scale=set_aux_loss_scale,
        autocast=torch.autocast("cpu", enabled=False)))
    close(list(model.parameters()), list(want.parameters()), 1e-4)

    model = small_model(**BALANCED)
    before = copy.deepcopy(model.state_dict())
    exec(code, dict(                                         # a step that the scaler skips
        torch=torch, model=model, optimizer=torch.optim.AdamW(model.parameters()),
        batches=batches[:1], loss_of=lambda model, x: loss_of(model, x) * torch.inf,
        finish_step=finish_step, set_aux_loss_scale=set_aux_loss_scale,
        autocast=torch.autocast("cpu", enabled=False)))
    moved = [name for name, x in model.state_dict().items() if not x.equal(before[name])]
    assert moved == ["1.router.expert_bias"]


def test_docs_ema():
    """The copy has the mean weights and the model's own bias; the model's counts are its own."""
    model = small_model(**BALANCED)
    scope = dict(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), loss_of=loss_of,
        batches=torch.randn(3, 10, 64), finish_step=finish_step)
    exec(example("ema"), scope)
    copied = scope["ema"].module[1].router
    same(copied.expert_bias, model[1].router.expert_bias)
    assert copied.expert_bias.any()
    assert not torch.equal(copied.weight, model[1].router.weight)
    assert load_balancing_metrics(model)["tokens_per_expert"].sum() == 20
    model.ema = scope["ema"]
    assert load_balancing_metrics(model)["max_violation"].isnan().tolist() == [False, True]


def test_docs_tensorboard():
    """Two layers, one with fewer experts and without a loss. The writer writes into a dict."""
    written = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            written[tag] = value

        def add_histogram(self, tag, values, step):
            written[tag] = values.tolist()
    sizes = dict(hidden_size=64, ffn_hidden_size=32, topk=2)
    model = torch.nn.Sequential(
        MoELayer(MoEConfig(num_experts=8, load_balancing_type="aux_loss", aux_loss_coeff=0.1,
                           **sizes)),
        MoELayer(MoEConfig(num_experts=4, **sizes)))
    texts = torch.randn(3, 10, 64)
    exec(example("tensorboard"), dict(
        torch=torch, model=model, microbatches=texts, loss_of=loss_of, writer=Writer(), step=7))
    assert set(written) == {
        "load/0.router", "load/1.router", "max_violation/0.router", "max_violation/1.router",
        "load_balancing_loss/0.router"}
    assert sum(written["load/0.router"]) == sum(written["load/1.router"]) == 60
    losses = []
    for x in texts:
        loss_of(model, x).backward()
        losses.append(load_balancing_metrics(model)["load_balancing_loss"][0].item())
    assert written["load_balancing_loss/0.router"] == pytest.approx(sum(losses) / 3)


@needs("transformers")
def test_docs_upcycle():
    """Without noise the logits stay; with noise the experts differ."""
    import transformers
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2))
    ids = torch.randint(64, (2, 9))
    want = llama(ids).logits
    for noise in ("noise=0.0", "noise=0.1"):
        model = copy.deepcopy(llama)
        exec(example("upcycle").replace("noise=0.1", noise), dict(llama=model))
        fc1 = model.model.layers[0].mlp.experts.fc1
        assert torch.equal(fc1[0], fc1[1]) == (noise == "noise=0.0")
        if noise == "noise=0.0":
            close(model(ids).logits, want, 1e-5)


@needs("transformers", "peft")
def test_docs_lora(tmp_path):
    """A reloaded adapter has the bias, and gives the same logits."""
    import peft
    import transformers

    from models.live import replace_blocks
    base = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2))
    scope = dict(model=copy.deepcopy(base))
    exec(example("lora"), scope)
    model = scope["model"]
    ids = torch.randint(64, (2, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step(), optimizer.zero_grad(), finish_step(model)
    model.eval().save_pretrained(tmp_path)
    replace_blocks(base, enable_expert_bias=True)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    biases = [module.expert_bias for module in again.modules() if isinstance(module, moe.Router)]
    assert any(bias.any() for bias in biases)
    close(again(ids).logits, model(ids).logits, 1e-6)


def test_docs_dynamic():
    """One graph for three lengths, and with dynamic=True too; without either there are two."""
    layer = MoELayer(MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2))
    code = example("dynamic").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    mark = re.search(r"    torch._dynamo.mark_dynamic.*\n", code)[0]
    unmarked = code.replace(mark, "")
    all_axes = unmarked.replace("fullgraph", "dynamic=True, fullgraph")
    for text, graphs in [(code, 1), (unmarked, 2), (all_axes, 1)]:
        torch._dynamo.reset()
        counters.clear()
        exec(text, dict(torch=torch, layer=layer))
        assert graphs_made() == graphs, text


def test_docs_regional():
    """Three layers, compiled one by one, have one graph, and the model's output is the same. An
    input without a gradient has one more."""
    config = MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2)
    model = torch.nn.Sequential(*(MoELayer(config) for _ in range(3)))
    x = torch.randn(9, 16, requires_grad=True)
    want = model(x)
    code = example("regional").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    exec(code, dict(model=model))
    counters.clear()
    close(model(x), want, 1e-6)
    assert graphs_made() == 1
    close(model(x.detach()), want, 1e-6)
    assert graphs_made() == 2


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_docs_modes_compile(mode):
    """On a CPU they change little; outputs and gradients stay."""
    assert f'mode="{mode}"' in (HERE / "docs/recipes.md").read_text()
    layer = MoELayer(small_config(hidden_size=16, shared_expert_intermediate_size=8))
    x = torch.randn(9, 16, requires_grad=True)
    close(torch.compile(layer, fullgraph=True, mode=mode)(x), layer(x), 1e-5)
    assert graphs_made() == 1


def test_docs_caches(tmp_path):
    """A second process, whose own cache is empty, finds the code of forward and backward."""
    setup = """
import torch
from torch._dynamo.utils import counters
from moe import MoEConfig, MoELayer
layer = MoELayer(MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2))
x = torch.randn(9, 16, requires_grad=True)
"""
    found = []
    for name in ("save cache", "load cache"):
        code = setup + example(name).replace('"cache.bin"', repr(str(tmp_path / "cache.bin")))
        code += "print(counters['inductor']['fxgraph_cache_hit'])\n"
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / name[:4]))
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=HERE, env=environment, timeout=300, check=True,
            capture_output=True, text=True)
        found.append(int(done.stdout.split()[-1]))
    assert found == [0, 2]


def test_docs_decode():
    """Token by token it chooses what the model chooses for the whole sequence."""
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), MoELayer(config), torch.nn.Linear(16, 32))
    code = example("decode").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    scope = dict(torch=torch, model=model, token=torch.tensor([3]))
    exec(code, scope)
    token = torch.tensor([3])
    for _ in range(20):
        token = model(token).argmax(-1)
    same(scope["token"], token)

    [option] = re.findall(r"options=({.*?})", (HERE / "docs/recipes.md").read_text())
    function = torch.compile(model, fullgraph=True, options=eval(option))
    with torch.no_grad():
        for T in (1, 3, 1):
            close(function(torch.arange(T)), model(torch.arange(T)), 1e-5)


def test_docs_export(tmp_path):
    """A fresh process that imports the ops gives the layer's output; one that does not cannot. The
    output of torch 2.11's AOTInductor is wrong, without an error."""
    layer = MoELayer(MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2))
    x = torch.randn(12, 64)
    package = tmp_path / "layer.pt2"
    exec(example("export").replace('"layer.pt2"', repr(str(package))),
         dict(torch=torch, layer=layer, x=x))
    torch.save([x, layer(x).detach()], tmp_path / "expected.pt")
    code = f"import torch\nx, want = torch.load({str(tmp_path / 'expected.pt')!r})\n"
    code += example("load").replace('"layer.pt2"', repr(str(package)))
    if torch.__version__ >= (2, 13):
        code += "torch.testing.assert_close(y, want)\n"
        code += "torch.testing.assert_close(run(x[:5]), want[:5])\n"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    done = run("-c", re.sub("import moe .*", "", code))
    assert "Could not find schema for moe_kernels" in done.stderr


def test_docs_threshold():
    """The threshold moves until a token has two experts; a graph gives the same."""
    scope = {}
    torch.manual_seed(0)
    exec(example("threshold"), scope)
    layer = scope["layer"]
    assert "router.threshold" in layer.state_dict()
    x = torch.randn(200, 64)
    with torch.no_grad():
        layer.router.weight.mul_(20)
    means = []
    for _ in range(40):
        layer(x).square().mean().backward()
        finish_step(layer)
        means.append(load_balancing_metrics(layer)["tokens_per_expert"].sum() / 200)
    assert means[0] > 2.5 and abs(means[-1] - 2) < 0.3
    same(compiled(layer)(x), layer(x))

    seen = layer.router.seen
    for way in ("plain", "non-reentrant", "reentrant", "compiled", "compiled around non-reentrant"):
        WAYS[way](layer)(x.clone().requires_grad_()).sum().backward()
        counted = load_balancing_metrics(layer)["tokens_per_expert"].sum()
        assert seen.tolist() == [counted, 200]
        seen.zero_()
    layer.eval()(x).sum().backward()
    assert not seen.any()
    given = torch.rand(200, 16).argsort(1)[:, :4]                # also below the threshold
    same(layer.router.route(x, topk_indices=given)[1], given)
