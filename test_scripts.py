"""Tests of the sources' imports, of the scripts, and of README and docs.

    python -m pytest test_scripts.py
    python -m pytest test_scripts.py -k test_train_      one section

The words of the sections: sources, train, bench, docs.
"""
import ast
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import train
from moe import (
    MoEConfig, MoELayer, ProcessGroups, TopKRouter, load_balancing_metrics, set_aux_loss_scale)
from test_moe import (
    HERE, close, compiled, free_port, fresh_start, grads, leaf, mesh_of, over_ranks, same, slow,
    switch_loss_loop)


def run(*args, cwd=HERE) -> subprocess.CompletedProcess:
    """A Python process with these arguments."""
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, timeout=300, capture_output=True, text=True)


# ---- Sources ----

def test_sources_copied_elsewhere(tmp_path):
    """The three files work in a folder and in a package. One process imports both copies: their
    ops must not collide."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for folder in (tmp_path, package):
        for name in ("kernels.py", "moe.py", "parallel.py"):
            shutil.copy(HERE / name, folder)

    code = (
        "import torch, moe, package.moe\n"
        "x = torch.ones(3, 8)\n"
        "for m in (moe, package.moe):\n"
        "    y = m.MoELayer(m.MoEConfig(8, 4, 4, 2))(x)\n"
        "    print(tuple(y.shape), m.kernels.__name__)")
    done = run("-Werror::SyntaxWarning", "-c", code, cwd=tmp_path)
    assert done.stdout.split("\n")[:2] == ["(3, 8) kernels", "(3, 8) package.kernels"], done.stderr


def imported_modules(file: str) -> set[str]:
    """The first words of all imports, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse((HERE / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("file, local", [
    ("kernels.py", set()),
    ("parallel.py", {"kernels"}),
    ("moe.py", {"kernels", "parallel"}),
    ("families.py", {"moe", "transformers"}),       # the functions that need transformers import it
])
def test_sources_import_torch_and_einops_alone(file, local):
    others = imported_modules(file) - {"torch", "einops"} - local
    assert others <= sys.stdlib_module_names, f"{file} imports {others - sys.stdlib_module_names}"


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


def test_train_resumes_bit_for_bit(tmp_path, tiny, interrupts, monkeypatch, capsys):
    """One run is stopped by an exception in step 4, with a checkpoint of step 3. Another one is
    stopped by Ctrl-C in step 4. Resumed, each ends with the weights, the optimizer state and the
    losses of a run that was never stopped."""
    whole = tmp_path / "whole"
    train.main([*tiny, "--out", str(whole)])
    want = saved_tensors(whole)
    assert {
        "head.weight",
        "optimizer.head.weight.exp_avg_sq",
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
    done = run(HERE / "train.py", *tiny, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "step 6" in done.stdout and "held_out" in done.stdout

    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny, "--out", str(tmp_path / "file" / "out")])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(HERE / "train.py"), run_name="__main__")
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


def test_train_baselines(tmp_path, tiny, interrupts):
    """Each has its own folder. The dense model has no experts."""
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


def test_train_balances_each_sequence():
    """--balance seq: the sequences are the rows of the batch, not the positions."""
    words = "--balance seq --layers 1 --hidden 16 --experts 4 --context 12 --batch 3 --no-compile"
    args = train.parse_args(words.split())
    block = train.ByteModel(args).blocks[0]
    seen = []
    block.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    block(torch.randn(3, 12, 16))                                     # [B, S, H]
    logits = block.ffn.router.gating(seen[0]).double()
    each = [switch_loss_loop(sequence, block.ffn.config, 1.0, valid=list(range(12)))
            for sequence in logits.unbind(0)]
    got = load_balancing_metrics(block)["seq_load_balancing_loss"]
    close(got, torch.stack(each).mean()[None], 1e-5)


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


@slow
def test_train_stops_while_it_compiles(tmp_path, tiny):
    """The second Ctrl-C ends the program at once, and without a checkpoint."""
    command = [sys.executable, "train.py", *tiny, "--out", tmp_path / "out"]
    command.remove("--no-compile")
    cache = str(tmp_path / "cache")
    code, said = interrupt("compiling", command, presses=2, TORCHINDUCTOR_CACHE_DIR=cache)
    assert code == 130, said
    assert said.endswith("once more: at once\n"), said
    assert not list(tmp_path.glob("out/checkpoint-*"))


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_stops_and_goes_on(tmp_path, tiny, ranks):
    """A Ctrl-C leaves a checkpoint. The same command with --resume ends with the weights of an
    uninterrupted run. More steps make the run longer."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run"]
        command += ["--nproc-per-node", ranks, "--master-port", free_port()]
    command += ["train.py", *tiny, "--steps", 100, "--save-every", 1000]
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
    command = [sys.executable, "train.py", *args, "--out", out]
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


@slow
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


# ---- bench ----

def test_bench_runs_quickly(tmp_path):
    """This runs the shortest command of bench.py; .ci/run runs the others."""
    out = tmp_path / "out.json"
    done = run(HERE / "bench.py", "overlap", "--quick", "--json", out)
    assert done.returncode == 0, done.stderr
    figure = json.loads(out.read_text())["figures"][0]
    assert figure["what"] == "tensors that differ, overlap on / off"
    assert figure["value"] == 0


# ---- docs: README and docs ----

PAGES = [HERE / "README.md", *sorted(HERE.glob("docs/*.md"))]


def example(marker: str) -> str:
    """The Python code after <!-- marker example --> in README.md or a page of docs/."""
    text = "\n".join(page.read_text() for page in PAGES)
    _, after = text.split(f"<!-- {marker} example -->")
    return re.search(r"```python\n(.*?)```", after, re.S)[1]


def test_docs_readme_is_short():
    lines = (HERE / "README.md").read_text().splitlines()
    assert len(lines) <= 220
    assert not [line for line in lines if len(line) > 120]


def test_docs_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, _ = target.partition("#")
            if path and ":" not in path:
                assert (page.parent / path).exists(), f"{page.name}: {target}"


def test_docs_cited_tests_exist():
    defined = set()
    for file in HERE.glob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))
    for page in PAGES:
        cited = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert cited <= defined, f"{page.name} cites {sorted(cited - defined)}"


def test_docs_router_of_your_own():
    """Top-p routing: the fewest experts whose probs sum to p, in eager mode and in a graph."""
    names = {}
    exec(example("choose"), names)
    layer = names["layer"]
    layer.router.p = 0.15
    x = torch.randn(30, 1, 64)
    logits = layer.router.gating(x.flatten(0, 1))
    all_probs, all_indices = TopKRouter.choose(layer.router, logits)
    probs, indices = layer.router.route(x)
    for t in range(30):
        kept = 1
        while all_probs[t, :kept].sum() < 0.15:
            kept += 1
        assert kept < 4
        assert indices[t].tolist() == [*all_indices[t, :kept].tolist(), *[16] * (4 - kept)]
        same(probs[t, :kept], all_probs[t, :kept])
        same(probs[t, kept:], torch.zeros(4 - kept))
    same(compiled(layer)(x), layer(x))
    assert load_balancing_metrics(layer)["tokens_per_expert"].sum() == (indices < 16).sum()


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


def test_docs_loop():
    """Four microbatches of two and one batch of eight give the same model; what is not decayed."""
    routers = []
    for pieces, size in ((4, 2), (1, 8)):
        code = example("loop").replace("microbatches = 4", f"microbatches = {pieces}")
        code = code.replace("(2, 33)", f"({size}, 33)").replace("range(20)", "range(3)")
        scope = {}
        torch.manual_seed(7)
        exec(code, scope)
        set_aux_loss_scale(1.0)
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
