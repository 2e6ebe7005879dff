"""A byte-level language model with Mixture-of-Experts feed-forwards, trained on the source of the
Python standard library.

    python train.py                                # minutes on two CPU cores; a GPU if there is one
    python train.py --out out2 --baseline dense    # then a dense model, as many active parameters
    python train.py --out out3 --data my_texts/    # a file or a folder of your own
    python train.py --resume --steps 2000          # goes on from the last checkpoint in out/
    python train.py --out out4 --baseline none quantile dense --layers 2 --experts 16 --steps 250
    torchrun --nproc-per-node 2 train.py --ep 2    # the experts spread over two processes

Letters are those of kernels.py (S context, B batch, H hidden size, E experts, K experts per token,
F expert FFN size). V is 256 byte values, N the attention heads, D the size of one.

A run is a function of its settings: the batch of a step depends on (seed, step) alone, and no sum
depends on the order of threads. So a resumed run has the losses of an uninterrupted one.

One object, `run`, goes through all functions. It has the settings of the command line. Then
start_machine adds the device and the process groups, load_data the data, and start_run the model,
the optimizer, the step and the history.
"""
import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import warnings
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe import (
    MoEConfig, MoELayer, ProcessGroups, SharedExpertMLP, finish_step, gradient_norm,
    load_balancing_metrics, reduce_gradients)

V = 256
LAST = 4                                       # bytes that the embedding of a position looks at
BALANCE = {                                    # --balance -> fields of the router's config
    "aux": lambda run: dict(load_balancing_type="aux_loss", aux_loss_coeff=0.01),
    "seq": lambda run: dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.01),
    # Gradients are averaged over the processes: see ProcessGroups.
    "global": lambda run: dict(
        load_balancing_type="global_aux_loss", aux_loss_coeff=0.01 * run.world),
    # A step is 0.8 % of the mean score, which is 1 / E.
    "bias": lambda run: dict(enable_expert_bias=True, bias_update_rate=0.008 / run.experts),
    "quantile": lambda run: dict(enable_expert_bias=True, bias_update="quantile"),
    "sinkhorn": lambda run: dict(load_balancing_type="sinkhorn"),
    "none": lambda run: {},
}


def fail(message):
    """The one way out for a user's mistake: one line, exit code 2."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- Settings ----

def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.error = fail
    add = parser.add_argument

    def setting(name, default, help, choices=None):
        help += f" (default: {default})"
        add(name, type=type(default), default=default, choices=choices, help=help)

    def switch(name, help):
        add(name, action="store_true", help=f"{help} (default: off)")

    add("--data", type=Path, help="a file or a folder to train on (default: the standard library's "
        ".py files without its tests). Of ten or more files every tenth is held out, else the last "
        "tenth of the bytes")
    setting("--out", Path("out"), "folder for checkpoint-STEP/, log.jsonl and curves.png")
    add("--resume", nargs="?", type=Path, const=Path(), help="go on from this checkpoint (alone: "
        "from the last one in OUT) with the same settings; with more --steps the run gets longer. "
        "Resume only what you trust: a checkpoint can run code")
    add("--baseline", nargs="+", default=[], choices=["dense", *BALANCE], help="after the MoE "
        "train these with the same data and steps: a dense model of the same active parameters, or "
        "the MoE with another balance")
    switch("--no-compile", "run without torch.compile")
    setting("--steps", 500, "steps of the optimizer")
    setting("--batch", 8, "sequences a step")
    setting("--context", 256, "bytes a sequence")
    setting("--lr", 1e-2, "of the embedding, at the peak of the schedule (a warmup, then linear to "
            "0 at --steps); make_optimizer says what the matrices get")
    setting("--seed", 0, "of the weights and of the order of the data, not of what is held out")
    setting("--layers", 4, "blocks of attention and feed-forward")
    setting("--hidden", 128, "H, width of the model")
    setting("--experts", 8, "E, experts a layer")
    setting("--topk", 2, "K, experts a byte goes to")
    add("--ffn", type=int, help="F, width of one expert (default: 4 H / K, up to a multiple of 8)")
    add("--shared", type=int, help="width of a shared expert in every layer (default: none)")
    switch("--overlap", "the shared expert runs beside the routed path, on a stream of its own")
    setting("--ep", 1, "processes over which the experts are spread (under torchrun)")
    switch("--fsdp", "shard all that is not a MoE layer over the processes (under torchrun)")
    setting("--balance", "bias", "what keeps the experts evenly used", choices=list(BALANCE))
    setting("--dtype", "auto", "of the products; auto is bfloat16 on a GPU and on a CPU with bf16 "
            "instructions, else float32", choices=["auto", "float32", "bfloat16"])
    setting("--save-every", 100, "steps between checkpoints")
    run = parser.parse_args(argv)
    run.kind = "moe"
    run.compile = not run.no_compile
    run.groups = ProcessGroups()
    run.rank = int(os.environ.get("RANK", 0))
    run.world = int(os.environ.get("WORLD_SIZE", 1))

    for name in "steps batch context layers hidden experts topk ffn shared ep save_every".split():
        value = getattr(run, name)
        if value is not None and value < 1:
            fail(f"--{name.replace('_', '-')} is {value}; needs 1 or more")
    if not 0 < run.lr < math.inf:
        fail(f"--lr is {run.lr}; needs a positive number")
    if run.topk > run.experts:
        fail(f"--topk is {run.topk}; a byte cannot go to more experts than "
             f"--experts = {run.experts}")
    if run.hidden % 2:
        fail(f"--hidden is {run.hidden}; needs an even number, rotary embeddings turn pairs")
    if run.overlap and run.shared is None:
        fail("--overlap needs a shared expert: set --shared SIZE")
    if run.world % run.ep or run.experts % run.ep:
        fail(f"--ep is {run.ep}; needs to divide the {run.world} processes (torchrun "
             f"--nproc-per-node {run.ep} train.py ..) and --experts = {run.experts}")
    if run.batch % run.world:
        fail(f"--batch is {run.batch}; needs a multiple of the {run.world} processes")
    run.ffn = run.ffn or math.ceil(4 * run.hidden / run.topk / 8) * 8
    return run


def planned_runs(run):
    """Name -> run, in the order of training. Each baseline has a folder of its own in OUT."""
    runs = {"moe": run}
    for name in run.baseline:
        change = dict(out=run.out / name, resume=run.resume and Path(), balance=name)
        if name == "dense":
            change.update(kind="dense", balance="none")
        runs[name] = argparse.Namespace(**vars(run) | change)
    return runs


# ---- Data: bytes; whole files are held out ----

def corpus_files(run):
    """Files in an order that does not depend on the machine."""
    root, pattern, skipped = run.data, "*", r"/(\.|__pycache__/)"
    if root is None:
        root, pattern = Path(sysconfig.get_paths()["stdlib"]), "*.py"
        skipped = r"/(\.|(site-packages|dist-packages|tests?|idle_test)/)"
    if not root.exists():
        fail(f"--data {root}: no such file or folder")
    found = [root] if root.is_file() else sorted(root.rglob(pattern), key=Path.as_posix)
    for path in found:
        own = run.out.resolve() in path.resolve().parents      # a run must not read what it writes
        if path.is_file() and not own:
            if not re.search(skipped, path.as_posix().removeprefix(root.as_posix())):
                yield path


def load_data(run):
    """Gives the run train_bytes [n] uint8, held_out blocks [8, 16, S + 1] uint8, spread evenly over
    all held-out bytes, and a checksum of all bytes."""
    texts = [path.read_bytes() for path in corpus_files(run)]
    if len(texts) < 10:
        text = b"".join(texts)
        texts = [text[len(text) * i // 10:len(text) * (i + 1) // 10] for i in range(10)]
    held_out = b"".join(texts[9::10])
    del texts[9::10]
    train_bytes = b"".join(texts)
    shorter = min(len(train_bytes), len(held_out))
    if shorter <= run.context:
        fail(f"--data: {len(train_bytes)} bytes to train on and {len(held_out)} held out; both "
             f"have to be more than --context = {run.context}")

    run.checksum = zlib.crc32(train_bytes + held_out)
    corpus = torch.frombuffer(bytearray(train_bytes + held_out), dtype=torch.uint8)
    run.train_bytes, scored = corpus.split([len(train_bytes), len(held_out)])
    starts = torch.linspace(0, len(scored) - run.context - 1, 128).long()
    blocks = cut_blocks(scored, starts, run)
    run.held_out = rearrange(blocks, "(chunks b) s -> chunks b s", b=16)


def cut_blocks(data, starts, run):
    """[.., S + 1]: the inputs and, one byte later, the targets."""
    return data[starts[:, None] + torch.arange(run.context + 1)]


def get_batch(run):
    """This process's part of the batch, [B / processes, S + 1]."""
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + run.step)
    starts = torch.randint(
        len(run.train_bytes) - run.context, (run.batch,), generator=generator)
    return cut_blocks(run.train_bytes, starts.chunk(run.world)[run.rank], run)


# ---- Model ----

class Attention(nn.Module):
    """Causal, with rotary positions (arXiv 2104.09864) and normed queries and keys (2010.04245)."""

    def __init__(self, run):
        super().__init__()
        self.head_dim = math.gcd(run.hidden, 32)
        self.qkv = nn.Linear(run.hidden, 3 * run.hidden, bias=False)
        self.out = nn.Linear(run.hidden, run.hidden, bias=False)
        frequency_D2 = 10_000.0 ** -torch.linspace(0, 1, self.head_dim // 2)
        angle_SD2 = torch.arange(run.context)[:, None] * frequency_D2
        turn = torch.stack((angle_SD2.cos(), angle_SD2.sin()))
        self.register_buffer("turn", turn, persistent=False)

    def rotate(self, x_BNSD):
        """The pairs (d, d + D/2) are turned by an angle that grows with s."""
        a, b = F.rms_norm(x_BNSD, (self.head_dim,)).chunk(2, dim=-1)
        cos, sin = self.turn[:, :x_BNSD.shape[2]].to(x_BNSD.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x_BSH):
        q, k, v = rearrange(
            self.qkv(x_BSH), "b s (three n d) -> three b n s d", three=3, d=self.head_dim)
        q, k = self.rotate(q), self.rotate(k)
        y_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y_BNSD, "b n s d -> b s (n d)"))


def make_ffn(run):
    """A MoELayer; for "dense" an MLP of width K·F, the weights that a byte meets in the layer."""
    shared = run.topk * run.ffn
    if run.kind == "moe":
        shared = run.shared
    config = MoEConfig(
        hidden_size=run.hidden,
        ffn_hidden_size=run.ffn,
        num_experts=run.experts,
        topk=run.topk,
        shared_expert_intermediate_size=shared,
        shared_expert_overlap=run.overlap,
        batch_first=True,
        # Normalised after the choice, the one prob of K = 1 would be 1: the router would not learn.
        pre_softmax=run.topk == 1 and run.balance != "sinkhorn",
        **BALANCE[run.balance](run))
    if run.kind == "moe":
        return MoELayer(config, run.groups)
    return SharedExpertMLP(config, gate=False, pg_collection=run.groups)


class Block(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.attention_norm = nn.RMSNorm(run.hidden)
        self.attention = Attention(run)
        self.ffn_norm = nn.RMSNorm(run.hidden)
        self.ffn = make_ffn(run)

    def forward(self, x_BSH):
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.ffn(self.ffn_norm(x_BSH))


class ByteModel(nn.Module):
    """bytes [B, S] int64 -> logits [B, S, V]; with targets [B, S] the mean loss in nats, 0-d."""

    def __init__(self, run):
        super().__init__()
        self.embedding = nn.Linear(V, LAST * run.hidden, bias=False)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.norm = nn.RMSNorm(run.hidden)
        self.head = nn.Linear(run.hidden, V, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                continue
            # Every process draws all experts and keeps its own: one model at any --ep.
            ranks = run.ep if is_expert(name) else 1
            drawn = torch.empty(ranks * len(weight), *weight.shape[1:])
            drawn.normal_(std=weight.shape[-1] ** -0.5)
            weight.data = drawn.chunk(ranks)[run.rank % ranks]
            if name.endswith(("out.weight", "fc2")):
                weight.data /= (2 * run.layers) ** 0.5   # two terms a layer join the residual
        nn.init.normal_(self.embedding.weight, std=LAST ** -0.5)
        nn.init.zeros_(self.head.weight)                 # the first prediction is 8 bits a byte

    def forward(self, bytes_BS, targets_BS=None):
        # A product with one-hot rows: a lookup's backward would add rows in the order of threads.
        each_BSJH = self.embedding(F.one_hot(bytes_BS, V).float()).float().unflatten(-1, (LAST, -1))
        # A position starts as the sum over its last bytes, each by its distance j. So pairs of
        # bytes form without attention.
        S = bytes_BS.shape[1]
        x_BSH = sum(F.pad(each_BSJH[:, :, j], (0, 0, j, 0))[:, :S] for j in range(LAST))
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV = self.head(self.norm(x_BSH)).float()
        if targets_BS is None:
            return logits_BSV
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def is_expert(name):
    return ".experts." in name


def make_optimizer(run):
    """Adam's steps are as long for a weight with one active input as for one with 512, so their
    effect on the output grows with the fan-in. Hence lr for the embedding, whose rows are looked
    up, 0.4 lr for the head, and lr · 20 / fan-in for matrices (arXiv 2203.03466). Then one --lr
    suits the wide dense FFN and the narrow experts."""
    scales = {"embedding.weight": 1.0, "head.weight": 0.4}
    groups = []
    for name, p in run.model.named_parameters():
        scale, decay = 0.15, 0.0
        if p.ndim > 1:
            scale, decay = scales.get(name, 20 / p.shape[-1]), 0.1
        groups.append(dict(params=[p], scale=scale, weight_decay=decay))
    return torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.95), fused=True)


def set_learning_rate(run):
    """Up in the first twentieth of the run, then in a line to 0."""
    warmup = max(1, run.steps // 20)
    fall = (run.steps - run.step + 1) / max(1, run.steps - warmup)
    for group in run.optimizer.param_groups:
        group["lr"] = group["scale"] * run.lr * min(run.step / warmup, fall, 1.0)


# ---- Machine: the device, and processes over which gradients are averaged ----

def start_machine(run):
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    run.device = accelerator or torch.device("cpu")
    if accelerator:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)     # attention's backward too
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    if run.dtype == "auto":
        # Without bf16 instructions a bf16 product is many times slower than an fp32 one.
        fast = accelerator or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        run.dtype = "bfloat16" if fast else "float32"

    if run.world > 1:
        if run.rank:
            sys.stdout = open(os.devnull, "w")           # the first process speaks
        backend = dist.get_default_backend_for_device(run.device)
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
        run.groups = ProcessGroups.from_mesh(dist.init_device_mesh(
            run.device.type, (run.world // run.ep, run.ep), mesh_dim_names=("dp", "ep")))
    elif run.fsdp:
        print("--fsdp does nothing in one process; torchrun starts more")
        run.fsdp = False
    run.compile = run.compile and compiler_works(run.device)


def autocast(run):
    bf16 = run.dtype == "bfloat16"
    return torch.autocast(run.device.type, torch.bfloat16, enabled=bf16)


def compiler_works(device):
    """Compiles x + 1. Only this failure is forgiven: a missing compiler, never a model's error."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return True
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).strip().splitlines()[0]
        print(f"torch.compile does not work on this machine; this run goes without it ({reason})")
        return False


def compile_model(run):
    """One graph. FSDP's hooks gather weights between the parts: there it is one graph a part."""
    torch.compiler.reset()                               # the graphs of the model before
    if run.compile and run.fsdp:
        for block in run.model.blocks:
            block.attention.compile(fullgraph=True)
            block.ffn.compile(fullgraph=True)
    elif run.compile:
        return torch.compile(run.model, fullgraph=True, dynamic=False)
    return run.model


def mean_over_processes(x, run):
    if run.world > 1:
        dist.all_reduce(x)
    return x.item() / run.world


def layer_parameters(model):
    """Those that ep may spread, and that reduce_gradients reduces."""
    layers = [m for m in model.modules() if isinstance(m, (MoELayer, SharedExpertMLP))]
    return {p for layer in layers for p in layer.parameters()}


def average_gradients(model, world):
    reduce_gradients(model)
    reduced = layer_parameters(model)
    for p in model.parameters():
        if isinstance(p, DTensor):                       # FSDP2 has averaged it already
            continue
        if p not in reduced:
            dist.all_reduce(p.grad)
        p.grad /= world


# ---- Runs and their checkpoints ----

def start_run(run):
    """A new model, or that of a checkpoint."""
    torch.manual_seed(run.seed)
    run.model = ByteModel(run).to(run.device)
    run.step = 0
    run.history = []
    held = sum(p.numel() for p in run.model.parameters())
    experts = sum(p.numel() for name, p in run.model.named_parameters() if is_expert(name))
    total = held + experts * (run.ep - 1)
    active = held - experts + experts * run.ep * run.topk // run.experts
    shape = f"{run.topk} of {run.experts} experts of {run.ffn}, balance {run.balance}"
    if run.kind == "dense":
        shape = f"FFN of {run.topk * run.ffn}"
    print(f"\n{run.kind}: {run.layers} layers of width {run.hidden}, {shape}; "
          f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active for a byte")

    if run.fsdp:
        for part in (*run.model.blocks, run.model):
            fully_shard(part, ignored_params=layer_parameters(run.model))
    run.optimizer = make_optimizer(run)
    checkpoint = run.resume
    if checkpoint == Path():
        *_, checkpoint = [None, *checkpoints(run)]
    if checkpoint is not None:
        load_checkpoint(run, checkpoint)
    run.out.mkdir(parents=True, exist_ok=True)
    write_log(run)


def checkpoints(run):
    return sorted(run.out.glob("checkpoint-*"))


def settings_of(run):
    """All that the numbers depend on. A checkpoint goes on with the same; only steps may grow."""
    names = ("steps batch context lr seed layers hidden experts topk ffn shared overlap balance "
             "compile kind checksum dtype")
    return {"device": run.device.type} | {name: getattr(run, name) for name in names.split()}


def sharded_state(run):
    """Name -> the model's and the optimizer's own tensors, as DTensors where each process holds a
    part. DCP saves them, and loads into them."""
    state = dict(run.model.state_dict())
    for name, layer in run.model.named_modules():
        if isinstance(layer, MoELayer):
            state |= layer.sharded_state_dict(f"{name}.")
    for name, p in run.model.named_parameters():
        like = state[name]
        for key, tensor in run.optimizer.state[p].items():
            # Like their parameters, the moments of this process's experts are plain tensors.
            plain = tensor.ndim > 0 and not isinstance(tensor, DTensor)
            if plain and isinstance(like, DTensor):
                tensor = DTensor.from_local(tensor, like.device_mesh, like.placements)
            state[f"optimizer.{name}.{key}"] = tensor
    return state


def save_checkpoint(run):
    """Written beside the last one, then renamed: at any moment one of the two is whole."""
    path = run.out / f"checkpoint-{run.step:07}"
    beside = run.out / "unfinished"
    if run.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        with open(beside / "run.json", "w") as file:
            json.dump([settings_of(run), run.step, run.history], file)
            file.flush()
            os.fsync(file.fileno())
    dcp.save(sharded_state(run), checkpoint_id=beside)
    if run.rank == 0:
        older = checkpoints(run)
        beside.rename(path)
        for folder in older:
            shutil.rmtree(folder)
    return path


def load_checkpoint(run, path):
    """At any number of processes. What does not fit is one clear line and exit code 2."""
    try:
        saved, run.step, run.history = json.loads((path / "run.json").read_text())
        if saved["steps"] < run.steps:
            print(f"{run.steps} steps, not {saved['steps']}: the learning rate falls more slowly")
            saved["steps"] = run.steps
        differing = [f"{name} (checkpoint {saved.get(name)}, now {value})"
                     for name, value in settings_of(run).items() if saved.get(name) != value]
        if differing:
            fail(f"--resume: {path} was made with other settings: {', '.join(differing)}")

        for p in run.model.parameters():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()                             # makes the state that is loaded into
        run.optimizer.zero_grad()
        dcp.load(sharded_state(run), checkpoint_id=path)
    except (OSError, ValueError, LookupError, TypeError, dcp.CheckpointException) as error:
        fail(f"--resume: {path} is damaged or no checkpoint of train.py ({type(error).__name__})")
    print(f"resumed {path} at step {run.step}")


# ---- Progress ----

def write_log(run):
    if run.rank == 0:
        lines = [json.dumps(record) + "\n" for record in run.history]
        (run.out / "log.jsonl").write_text("".join(lines))


def load_picture(record):
    """A row for each layer, a column for each expert. A half block is an even share, a full block
    is twice that or more."""
    for i, counts in enumerate(record["tokens_per_expert"]):
        mean = sum(counts) / len(counts)
        bars = "".join(" ▁▂▃▄▅▆▇█"[min(8, math.ceil(4 * n / mean))] for n in counts)
        print(f"    layer {i}  |{bars}|  max violation {record['max_violation'][i]:.2f}")


def draw_curves(path, runs, zlib_bpb):
    """The losses, and for every MoE the load of every expert over the steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"matplotlib is not installed: {path} left out")
        return
    moes = [name for name, each in runs.items() if each.kind == "moe"]
    figure = Figure(figsize=(5 + 3 * len(moes), 4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(moes), width_ratios=[5] + [3] * len(moes))
    for i, (name, each) in enumerate(runs.items()):
        for key, style in (("loss", ":"), ("held_out", "o-")):
            points = [(record["step"], record[key]) for record in each.history if key in record]
            left.plot(*zip(*points), f"C{i}{style}", label=f"{name}, {key}")
    left.set(title="loss in bits per byte", xlabel="step", ylim=(None, zlib_bpb))
    left.legend(ncols=2)

    for axes, name in zip(others, moes):
        history, layers = runs[name].history, runs[name].layers
        load_TLE = torch.tensor([record["tokens_per_expert"] for record in history]).double()
        share_TLE = load_TLE / load_TLE.mean(2, keepdim=True)
        image = axes.imshow(
            rearrange(share_TLE, "t l e -> (l e) t"), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r",
            interpolation="nearest", extent=(0, history[-1]["step"], layers, 0))
        axes.set(title=f"load, balance {runs[name].balance}", xlabel="step",
                 ylabel="layer, its experts", yticks=range(layers + 1))
    figure.colorbar(image, label="share of an expert, 1 = even")
    figure.savefig(path)
    print(f"curves: {path}")


# ---- Train, evaluate, sample ----

def train_step(run, forward):
    """One step of the optimizer and of the routers' balance -> the loss of this process's part."""
    set_learning_rate(run)
    loss = loss_of(run, forward, get_batch(run))
    loss.backward()
    if run.world > 1:
        average_gradients(run.model, run.world)
    norm = gradient_norm(run.model, run.groups)
    nn.utils.clip_grads_with_norm_(run.model.parameters(), 1.0, norm, foreach=False)
    run.optimizer.step()
    run.optimizer.zero_grad()

    if run.kind == "moe":
        finish_step(run.model)
    return loss.detach()


def report(run, loss, held_out, began, rate):
    """One record for the history, the log and the screen. The losses are bits per byte."""
    seconds = round(time.perf_counter() - began, 1)
    record = dict(step=run.step, loss=loss, tokens_per_second=round(rate), seconds=seconds)
    line = f"step {run.step:>{len(str(run.steps))}}/{run.steps}  loss {loss:.3f}"
    if held_out is not None:
        record["held_out"] = held_out
        line += f"  held-out {held_out:.3f}"
    left = timedelta(seconds=int((run.steps - run.step) * run.batch * run.context / rate))
    print(f"{line:<50}  {rate:>9,.0f} tokens/s  {left} left")

    if run.kind == "moe":
        metrics = load_balancing_metrics(run.model, reduce=True)
        for name in ("tokens_per_expert", "max_violation"):
            record[name] = metrics[name].tolist()
        if held_out is not None:
            load_picture(record)
    run.history.append(record)
    write_log(run)


def train(run):
    """The last record of the history has the final "held_out". Ctrl-C ends the program: after a
    checkpoint, or before the first step without one."""
    start_run(run)
    forward = compile_model(run)
    first = run.step + 1
    every = max(1, run.steps // 25)
    losses, asked = [], []

    def leave(*_):
        """Ctrl-C before the first step is done. The compiler could swallow an exception."""
        os.write(2, b"\nstopped\n")
        os._exit(130)

    def ask(*_):
        """The first Ctrl-C stops the loop after its step, a second one the program at once."""
        asked.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"stopping after this step ..\n")    # print itself may be interrupted here

    mark = began = time.perf_counter()
    if run.history:
        began -= run.history[-1]["seconds"]
    if run.compile and run.step < run.steps:
        print("compiling, about a minute ..", flush=True)
    signal.signal(signal.SIGINT, leave)

    while run.step < run.steps:
        run.step += 1
        losses.append(train_step(run, forward))
        if run.step == first:
            signal.signal(signal.SIGINT, ask)

        last = run.step == run.steps
        test = last or run.step % (5 * every) == 0
        if test or run.step == first or run.step % every == 0:
            loss = mean_over_processes(torch.stack(losses).mean(), run) / math.log(2)
            rate = len(losses) * run.batch * run.context / (time.perf_counter() - mark)
            held_out = evaluate(run, forward) if test else None
            report(run, loss, held_out, began=began, rate=rate)
            losses, mark = [], time.perf_counter()

        counts = torch.tensor(float(len(asked)), device=run.device)
        stop = mean_over_processes(counts, run) > 0      # on any process
        if last or stop or run.step % run.save_every == 0:
            path = save_checkpoint(run)
        if stop and not last:
            print(f"saved {path}; to go on: {command_to_go_on(run)}")
            sys.exit(130)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def command_to_go_on(run):
    """The command that was run, or torchrun's, with --resume."""
    command = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *sys.argv]
        parent = Path(f"/proc/{os.getppid()}/cmdline")   # on Linux: with all of torchrun's options
        if parent.exists():
            command = parent.read_text().split("\0")[:-1]
    if run.resume != Path():
        command = [*command, "--resume"]
    return shlex.join(command)


def loss_of(run, forward, block):
    """In nats, of [B, S + 1] bytes."""
    block = block.to(run.device, torch.int64)
    with autocast(run):
        return forward(block[:, :-1], block[:, 1:])


@torch.no_grad()
def evaluate(run, forward):
    """Bits per byte of the held-out blocks."""
    run.model.eval()
    losses = [loss_of(run, forward, block) for block in run.held_out]
    run.model.train()
    return torch.stack(losses).cpu().double().mean().item() / math.log(2)


@torch.no_grad()
def sample(run, prompt, length=400):
    """What the model writes after the prompt, at temperature 0.8."""
    run.model.eval()
    generator = torch.Generator().manual_seed(run.seed)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-run.context:]], device=run.device)
        with autocast(run), torch.compiler.set_stance("force_eager"):        # lengths differ
            logits_V = run.model(window)[0, -1].cpu()
        byte = torch.multinomial((logits_V / 0.8).softmax(-1), 1, generator=generator)
        text.append(byte.item())
    return bytes(text[len(prompt):])


def printable(text):
    """Without the control characters, which a terminal would obey."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", "?", text.decode(errors="replace"))


def zlib_bits_per_byte(blocks):
    """Level 9, each block alone, of the bytes that the model predicts: all but a block's first."""
    blocks = blocks[..., 1:].flatten(0, 1)
    sizes = [len(zlib.compress(bytes(block), 9)) for block in blocks.tolist()]
    return 8 * sum(sizes) / blocks.numel()


def check_out(run):
    """A run without --resume must not write over another. --resume alone needs a checkpoint."""
    log = run.out / "log.jsonl"
    if run.resume == Path():
        if not checkpoints(run):
            fail(f"--resume: no checkpoint in {run.out}")
    elif log.is_file() and log.stat().st_size > 0:
        fail(f"--out {run.out} holds a run; --resume goes on with it, or name another folder")


def main():
    run = parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")       # in one process
    sys.stdout.reconfigure(errors="replace")             # a terminal's encoding may lack characters
    check_out(run)
    start_machine(run)
    load_data(run)
    print(f"{run.data or 'Python standard library'}: {len(run.train_bytes):,} bytes to train on; "
          f"{run.device.type}, {run.dtype}; loss and held-out in bits per byte")
    runs = planned_runs(run)
    for each in runs.values():
        train(each)

    zlib_bpb = zlib_bits_per_byte(run.held_out)
    print("\nheld-out bits per byte")
    for name, each in runs.items():
        end = each.history[-1]
        print(f"    {name:<8}  {end['held_out']:.3f}   {end['step']} steps, {end['seconds']:.0f} s")
    print(f"    zlib -9   {zlib_bpb:.3f}   on blocks of {run.context} bytes\n")
    if run.rank == 0:
        draw_curves(run.out / "curves.png", runs, zlib_bpb)

    prompt = bytes(run.held_out[4, 0, :64].tolist())
    text = sample(run, prompt)
    print(f"\nsample, after 64 held-out bytes:\n{printable(prompt)}⟫{printable(text)}")
    if run.world > 1:
        dist.destroy_process_group()


def shield_compiler():
    """A Ctrl-C that kills the C++ compiler would leave a broken library in Inductor's cache.

    So another thread takes the signal: child processes inherit what this thread blocks. Python
    still runs the handler in this thread.
    """
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


if __name__ == "__main__":
    if os.name == "posix":
        shield_compiler()
    try:
        main()
    except OSError as error:                             # what the file system refuses
        fail(error)
    except dcp.CheckpointException as error:
        *_, (cause, _) = error.failures.values()
        fail(f"could not write a checkpoint, the last one is untouched: {cause}")
    except KeyboardInterrupt:
        print("\nstopped")
        sys.exit(130)
