"""Tests of the scripts (train.py, bench.py), of what the sources import, and of the examples in README
and docs.

    python -m pytest test_scripts.py
"""
import ast
import json
import os
import re
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

from moe import MoELayer, ProcessGroups, TopKRouter, load_balancing_metrics, set_aux_loss_scale
from test_moe import (
    HERE, LOSSES, close, compiled, free_port, fresh_start, grads, leaf, mesh_of, same,
    shared_config, slow, spawn_gloo, switch_loss_loop)


# ---- Files: copied, run, benchmarked ----

def run(*args, cwd=HERE, timeout=300, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, timeout=timeout,
        capture_output=True, text=True, env={**os.environ, **env})


def test_three_files_copied_elsewhere(tmp_path):
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


def test_sources_import_torch_and_einops_alone():
    standard = {
        "abc", "collections", "contextlib", "dataclasses", "enum", "functools", "math", "re",
        "types", "typing"}
    also_allowed = {
        "kernels.py": set(),
        "parallel.py": {"kernels"},
        "moe.py": {"kernels", "parallel"},
        "families.py": {"moe", "operator"},
    }
    for name, local in also_allowed.items():
        found = set()
        for node in ast.walk(ast.parse((HERE / name).read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
        if name == "families.py":            # the functions that need it import it
            found.remove("transformers")
        assert found <= {"torch", "einops"} | standard | local, found


TINY = (
    "--steps 6 --layers 1 --hidden 16 --experts 4 --batch 2 --context 32 --save-every 3 "
    "--no-compile --dtype float32").split()


@pytest.fixture
def small_texts(tmp_path):
    """A folder of ten files."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"file {i}: " + "all work and no play " * 60)
    return folder


def saved_tensors(folder: Path) -> dict:
    """The tensors of a run's last checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    *_, checkpoint = sorted(folder.glob("checkpoint-*"))
    dcp_to_torch_save(checkpoint, folder / "all.pt")
    return torch.load(folder / "all.pt", weights_only=True)


def read_log(folder: Path) -> list[dict]:
    """The records of a run's log, one a step."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def resume_here(checkpoint: Path, args: list[str]):
    """Resumes a run of train.py in this process, and stops before its first step."""
    import train
    resumed = train.parse_args(args)
    resumed.resume = checkpoint
    train.start_machine(resumed)
    train.load_data(resumed)
    train.start_run(resumed)
    return resumed


def test_train_resumes_bit_for_bit(tmp_path, small_texts, capsys):
    """An exception in step 4 stops a run whose last checkpoint is of step 3. The resumed run ends
    with the weights and the optimizer state of a run that was never stopped."""
    args = [*TINY, "--data", str(small_texts)]
    whole_args = [*args, "--out", tmp_path / "whole"]
    whole = run(HERE / "train.py", *whole_args)
    assert whole.returncode == 0, whole.stderr
    assert "Warning" not in whole.stderr, whole.stderr

    stop = (
        "import train\n"
        "real = train.get_batch\n"
        "def get_batch(run):\n"
        "    if run.step == 4: raise SystemExit(7)\n"
        "    return real(run)\n"
        "train.get_batch = get_batch\n"
        "train.main()")
    cut_args = [*args, "--out", tmp_path / "cut"]
    cut = run("-c", stop, *cut_args, PYTHONPATH=str(HERE))
    assert cut.returncode == 7, cut.stderr

    # A kill during a save leaves such a folder.
    (tmp_path / "cut" / "unfinished").mkdir()
    (tmp_path / "cut" / "unfinished" / "run.json").write_text("[")
    resumed = run(HERE / "train.py", *cut_args, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    names = [path.name for path in (tmp_path / "cut").glob("checkpoint-*")]
    assert names == ["checkpoint-0000006"]

    want = saved_tensors(tmp_path / "whole")
    assert {
        "head.weight",
        "optimizer.head.weight.exp_avg_sq",
        "blocks.0.ffn.router.expert_bias",
    } <= want.keys()
    same(want, saved_tensors(tmp_path / "cut"))

    losses = [record["loss"] for record in read_log(tmp_path / "whole")]
    assert len(losses) == 6
    assert losses == [record["loss"] for record in read_log(tmp_path / "cut")]

    check_refused_checkpoints(tmp_path, [*args, "--out", str(tmp_path / "again")], capsys)


def check_refused_checkpoints(tmp_path, args: list[str], capsys) -> None:
    """--resume takes the checkpoint of step 6. It refuses a damaged one, another config and a
    folder without a checkpoint."""
    def refused(checkpoint, *changes) -> str:
        with pytest.raises(SystemExit, match="2"):
            resume_here(checkpoint, [*args, *changes])
        return capsys.readouterr().err

    good = tmp_path / "cut" / "checkpoint-0000006"
    assert resume_here(good, args).step == 6

    for name in ("run.json", ".metadata", "__0_0.distcp"):
        content = (good / name).read_bytes()
        for damaged in (content[:len(content) // 2], b"not a checkpoint", b""):
            bad = shutil.copytree(good, tmp_path / "bad", dirs_exist_ok=True)
            (bad / name).write_bytes(damaged)
            said = refused(bad)
            assert said.startswith(f"train.py: error: --resume: {bad} is damaged")
            assert said.count("\n") == 1

    assert "topk (checkpoint 2, now 1)" in refused(good, "--topk", "1")
    assert "steps (checkpoint 6, now 5)" in refused(good, "--steps", "5")
    said = refused(tmp_path / "nowhere")
    assert "no checkpoint of train.py (FileNotFoundError)" in said


def test_train_says_what_it_does_not_do(tmp_path, small_texts, capsys):
    """train.py refuses a folder that holds a run and a log that it cannot write. It says that
    --fsdp does nothing in one process. --help shows the defaults."""
    import train
    out = tmp_path / "out"
    args = [*TINY, "--data", str(small_texts), "--out", str(out)]

    # There is no such folder yet.
    train.check_out(train.parse_args(args))
    with pytest.raises(SystemExit, match="2"):
        train.check_out(train.parse_args([*args, "--resume"]))

    # A run that made no step leaves an empty log.
    out.mkdir()
    (out / "log.jsonl").touch()
    train.check_out(train.parse_args(args))

    (out / "log.jsonl").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        train.check_out(train.parse_args(args))
    said = capsys.readouterr().err.replace(str(out), "OUT")
    assert_expected_inline(said, """\
train.py: error: --resume: no checkpoint in OUT
train.py: error: --out OUT holds a run; --resume goes on with it, or name another folder
""")

    train.start_machine(train.parse_args(["--no-compile", "--fsdp"]))
    assert "--fsdp does nothing in one process" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="0"):
        train.parse_args(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--no-compile run without torch.compile (default: off)" in said
    assert "None" not in said

    # A folder in the place of the log cannot be written.
    shutil.rmtree(out)
    (out / "log.jsonl").mkdir(parents=True)
    done = run(HERE / "train.py", *args)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "log.jsonl" in done.stderr, done.stderr


def interrupted_train(line: str, command: list, **env: str) -> tuple[int, str]:
    """The exit code and the output of a run that gets a Ctrl-C after it has printed `line`. The
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
                if "compiling" in line:
                    time.sleep(2)
                os.killpg(process.pid, signal.SIGINT)
                break
        said += process.communicate(timeout=120)[0]
        return process.returncode, said
    finally:
        process.kill()


def test_train_shields_the_compiler_from_ctrl_c():
    """A linker that dies half-way leaves a broken library in Inductor's cache (the "file too short"
    of pytorch #102539). Child processes inherit the mask, and the handler still runs."""
    script = """if True:
        import os, signal, subprocess, sys, time, train
        train.shield_compiler()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        show = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        print(subprocess.check_output([sys.executable, "-c", show], text=True))
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                time.sleep(0.1)
        except KeyboardInterrupt:
            print("interrupted")
        """
    done = run("-c", script)
    assert "SIGINT" in done.stdout and "interrupted" in done.stdout, done.stdout + done.stderr


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_stops_and_goes_on_as_it_says(tmp_path, small_texts, ranks):
    """A Ctrl-C in the first step only stops the run. A later one leaves a checkpoint and prints a
    command that goes on from there. That run ends with the weights of an uninterrupted run. More
    steps make the run longer."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run"]
        command += ["--nproc-per-node", ranks, "--master-port", free_port()]
    command += ["train.py", *TINY, "--steps", 100, "--save-every", 1000, "--data", small_texts]

    if ranks == 1:
        compiled_command = [word for word in command if word != "--no-compile"]
        code, said = interrupted_train(
            "compiling, about a minute",
            [*compiled_command, "--out", tmp_path / "none"],
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert code == 130, said
        assert said.endswith("\nstopped\n"), said
        assert "Traceback" not in said, said

    code, said = interrupted_train("step   8", [*command, "--out", tmp_path / "out"])
    assert code, said
    assert "stopping after this step" in said, said
    saved, again = re.search(r"saved (\S+); to go on: (.*)\n", said).groups()
    assert Path(saved).is_dir()
    assert again.endswith("--resume")
    assert ("torch.distributed.run" in again) == (ranks > 1)

    def finish(words):
        done = subprocess.run(
            [str(word) for word in words], cwd=HERE, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    finish([*command, "--out", tmp_path / "whole"])
    finish(shlex.split(again))
    same(saved_tensors(tmp_path / "out"), saved_tensors(tmp_path / "whole"))

    finish(shlex.split(f"{again} --steps 120"))
    last = read_log(tmp_path / "out")[-1]
    assert last["step"] == 120
    assert "held_out" in last


@slow
def test_train_draws_its_baselines(tmp_path, small_texts):
    pytest.importorskip("matplotlib")
    args = [*TINY, "--data", small_texts, "--out", tmp_path / "out"]
    args += ["--baseline", "none", "quantile", "dense"]
    done = run(HERE / "train.py", *args)
    assert done.returncode == 0, done.stderr

    scores = done.stdout.split("held-out bits per byte\n")[-1]
    names = re.findall(r"^    (\w+)", scores, re.M)
    assert names[:5] == ["moe", "none", "quantile", "dense", "zlib"]
    assert (tmp_path / "out" / "curves.png").stat().st_size < 150_000


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
def test_parallel_train_with_a_killed_rank(tmp_path):
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
        records = read_log(tmp_path / name)
        assert [record["step"] for record in records] == list(range(1, 21))
        return torch.tensor([record["loss"] for record in records], dtype=torch.float64)

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


def test_train_refuses_settings_that_do_not_fit(capsys):
    import train
    for args in ("--ep 2", "--overlap", "--topk 9", "--hidden 3", "--steps 0", "--lr nan"):
        with pytest.raises(SystemExit, match="2"):
            train.parse_args(args.split())

    # Some messages are wider than the page, so each breaks after its semicolon.
    said = capsys.readouterr().err.replace("; ", ";\n    ")
    assert_expected_inline(said, """\
train.py: error: --ep is 2;
    needs to divide the 1 processes (torchrun --nproc-per-node 2 train.py ..) and --experts = 8
train.py: error: --overlap needs a shared expert: set --shared SIZE
train.py: error: --topk is 9;
    a byte cannot go to more experts than --experts = 8
train.py: error: --hidden is 3;
    needs an even number, rotary embeddings turn pairs
train.py: error: --steps is 0;
    needs 1 or more
train.py: error: --lr is nan;
    needs a positive number
""")


def test_bench_runs_quickly(tmp_path):
    """This runs the shortest command of bench.py; .ci/run runs the others."""
    out = tmp_path / "out.json"
    args = ["overlap", "--quick", "--json", out]
    done = run(HERE / "bench.py", *args)
    assert done.returncode == 0, done.stderr
    figure = json.loads(out.read_text())["figures"][0]
    assert figure["what"] == "tensors that differ, overlap on / off"
    assert figure["value"] == 0


def test_train_balances_each_sequence():
    """--balance seq: the sequences are the rows of the batch, not the positions."""
    import train
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


# ---- README and docs ----


def example(marker: str) -> str:
    """The Python code after <!-- marker example --> in README.md or a page of docs/."""
    pages = [HERE / "README.md", *sorted(HERE.glob("docs/*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    _, after = text.split(f"<!-- {marker} example -->")
    return re.search(r"```python\n(.*?)```", after, re.S)[1]


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
        total = 0.0
        kept = 0
        while total < 0.15:
            total += float(all_probs[t, kept])
            kept += 1
        assert 0 < kept < 4
        assert indices[t].tolist() == [*all_indices[t, :kept].tolist(), *[16] * (4 - kept)]
        same(probs[t, :kept], all_probs[t, :kept])
        same(probs[t, kept:], torch.zeros(4 - kept))
    same(compiled(layer)(x), layer(x))
    assert load_balancing_metrics(layer)["tokens_per_expert"].sum() == (indices < 16).sum()


def dispatcher_of_the_readme(rank, ranks):
    """It gives what all-to-alls give, gradients of router and experts included (Automodel #2995),
    eager and as one graph; unrouted assignments, overlap and latent experts too."""
    scope = {}
    exec(example("dispatcher"), scope)
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    for options in (dict(**LOSSES, shared_expert_overlap=True),
                    dict(capacity_factor=0.8, latent_size=7, add_bias_linear=True)):
        config = shared_config(init_std=0.5, score_function="sigmoid", **options)
        for how in ("eager", "aot_eager"):
            torch.manual_seed(0)
            theirs = MoELayer(config, groups)
            mine = scope["AllGatherLayer"](config, groups)
            mine.load_state_dict(theirs.state_dict())
            call = mine if how == "eager" else compiled(mine, how)
            torch.manual_seed(rank)
            x = leaf(5, 3, 6)
            mask = torch.rand(5, 3) < 0.2
            upstream = torch.randn(5, 3, 6, dtype=torch.float64)
            for got, want in zip(*(
                    [y, *grads(y, [x, *layer.parameters()], upstream)]
                    for layer, y in ((mine, call(x, mask)), (theirs, theirs(x, mask))))):
                close(got, want)


def test_docs_dispatcher_over_two_ranks():
    spawn_gloo(dispatcher_of_the_readme, 2)


def test_docs_loop():
    """Four microbatches of two and one batch of eight give the same model; what is not decayed."""
    models = []
    for pieces, size in ((4, 2), (1, 8)):
        code = example("loop").replace("microbatches = 4", f"microbatches = {pieces}")
        code = code.replace("(2, 33)", f"({size}, 33)").replace("range(20)", "range(3)")
        scope = {}
        torch.manual_seed(7)
        exec(code, scope)
        models.append(scope["model"])
        set_aux_loss_scale(1.0)
        router = scope["model"][1].router
        assert router.expert_bias.abs().max() > 0 == router.local_tokens_per_expert.sum()
    close(*(model[1].router.weight for model in models), 1e-4)
    same(*(model[1].router.expert_bias for model in models))
    names = {id(p): name for name, p in scope["model"].named_parameters()}
    undecayed = {names[id(p)] for p in scope["others"]}
    assert undecayed == {"1.experts.fc1_bias", "1.experts.fc2_bias", "2.bias"}
    assert len(scope["decayed"]) + len(undecayed) == len(names)
