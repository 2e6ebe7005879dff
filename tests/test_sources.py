"""Tests of the sources' imports and signatures, of copies and packages, and of the examples in
docstrings. They are slow tests, all of them: what the functions compute is tested elsewhere.

    SLOW=1 python -m pytest tests/test_sources.py
"""
import ast
import doctest
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import check
import grouped
import kernels
import maps
import moe
import prune
import router as router_file
import shared_experts
import small
from ranks import parallel
from test_moe import fresh_start, slow
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
    norm_topk_prob scaling_factor num_groups group_topk group_score_topk
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
