"""Tests of examples/train.py. They are slow tests, all of them.

    SLOW=1 python -m pytest examples/test_train.py
"""
import gzip
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from examples import train
from moe import load_balancing_metrics
from ranks.parallel import ProcessGroups
from ranks.test_ranks import free_port, full, mesh_of, over_ranks, own_part
from test_moe import close, fresh_start, same, slow, switch_loss_loop
from tests.test_sources import HERE, run

pytestmark = slow


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
