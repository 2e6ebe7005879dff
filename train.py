"""A byte-level language model with Mixture-of-Experts feed-forwards, trained on the Python
standard library's source.

    python train.py                                  # minutes on two CPU cores; takes a GPU if there is one
    python train.py --out out/two --baseline dense   # then also a dense model of the same active parameters
    python train.py --out out/mine --data my_texts/  # a file or a folder of your own
    python train.py --resume --steps 2000            # goes on from the last checkpoint in out/
    torchrun --nproc-per-node 2 train.py --ep 2      # the experts spread over two processes
    python train.py --out out/compare --compare --layers 2 --experts 16 --steps 300    # one picture

Letters are those of kernels.py (S context, B batch, H hidden size, E experts, K experts per token,
F expert FFN size). V is 256 byte values, N the attention heads, D the size of one. A run is a
function of its settings: the batch of a step depends on (seed, step) alone, and no sum depends on
the order in which threads arrive. So a resumed run has the same losses as one in one go.
"""
import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe import (
    MoEConfig, MoELayer, ProcessGroups, TopKRouter, gradient_norm, load_balancing_metrics,
    reduce_gradients, update_expert_bias)

V = 256
LAST = 4                                       # bytes that the embedding of a position looks at
BALANCE = {                                    # --balance -> fields of the router's config
    "aux": lambda args: dict(load_balancing_type="aux_loss", aux_loss_coeff=0.01),
    "seq": lambda args: dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.01),
    # Gradients are averaged over the processes: see ProcessGroups.
    "global": lambda args: dict(
        load_balancing_type="global_aux_loss", aux_loss_coeff=0.01 * args.world),
    # A step is 0.8 % of the mean score, which is 1 / E.
    "bias": lambda args: dict(enable_expert_bias=True, bias_update_rate=0.008 / args.experts),
    "quantile": lambda args: dict(enable_expert_bias=True, bias_update="quantile"),
    "sinkhorn": lambda args: dict(load_balancing_type="sinkhorn"),
    "none": lambda args: dict(),
}


def fail(message: str):
    """The one way out for a user's mistake: one line, exit code 2."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def or_fail(what: str):
    """What the file system refuses is one line too. `what` names it."""
    try:
        yield
    except OSError as error:
        fail(f"{what}: {error}")
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        fail(f"{what}: {cause!r}")


# ---- Settings ----

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)

    def setting(self, name: str, default, help: str, **more):
        help += f" (default: {default})"
        self.add_argument(name, type=type(default), default=default, help=help, **more)

    def switch(self, name: str, help: str):
        self.add_argument(name, action="store_true", help=f"{help} (default: off)")


def parse_args(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="a file or a folder to train on (default: the "
        "standard library's .py files without its tests). Of ten or more files every tenth is "
        "held out, else the last tenth of the bytes")
    parser.setting(
        "--out", Path("out"), "checkpoint-STEP/, log.jsonl and curves.png go there", metavar="DIR")
    parser.add_argument(
        "--resume", nargs="?", type=Path, const=Path(), metavar="CHECKPOINT", help="go on from this "
        "checkpoint (alone: from the last one in OUT). The settings have to be the same; with more "
        "--steps the run gets longer. Resume from checkpoints that you trust")
    parser.add_argument(
        "--baseline", choices=["dense"], help="after the MoE also train a dense model with the same "
        "active parameters, data and steps, and print both")
    parser.switch("--compare", "train a MoE with each balance of none, bias and quantile, and a "
                  "dense model; draw their losses and loads")
    parser.switch("--no-compile", "run without torch.compile")
    parser.setting("--steps", 500, "steps of the optimizer")
    parser.setting("--batch", 8, "sequences a step")
    parser.setting("--context", 256, "bytes a sequence")
    parser.setting(
        "--lr", 1e-2, "the embedding's, at the peak of the schedule (a warmup, then linear to 0 at "
        "--steps); make_optimizer says what the matrices get")
    parser.setting("--seed", 0, "of the weights and of the order of the data, not of what is held out")
    parser.setting("--layers", 4, "blocks of attention and feed-forward")
    parser.setting("--hidden", 128, "H, width of the model")
    parser.setting("--experts", 8, "E, experts a layer")
    parser.setting("--topk", 2, "K, experts a byte goes to")
    parser.add_argument(
        "--ffn", type=int, help="F, width of one expert (default: 4 H / K, up to a multiple of 8)")
    parser.add_argument(
        "--shared", type=int, metavar="SIZE", help="a shared expert of this width in every layer")
    parser.switch("--overlap", "run the shared expert on its own stream beside the routed path")
    parser.setting(
        "--ep", 1, "spread the experts over so many processes (under torchrun)", metavar="RANKS")
    parser.switch("--fsdp", "shard all that is not a MoE layer over the processes (under torchrun)")
    parser.setting(
        "--balance", "bias", "what keeps the experts evenly used", choices=list(BALANCE))
    parser.setting(
        "--dtype", "auto", "of the products; auto is bfloat16 on a GPU and on a CPU with bf16 "
        "instructions, else float32", choices=["auto", "float32", "bfloat16"])
    parser.setting("--save-every", 100, "steps between checkpoints", metavar="STEPS")
    args = parser.parse_args(argv)
    args.model, args.compile = "moe", not args.no_compile
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))

    for name in "steps batch context layers hidden experts topk ffn shared ep save_every".split():
        value = getattr(args, name)
        if value is not None and value < 1:
            fail(f"--{name.replace('_', '-')} is {value}; needs 1 or more")
    if not 0 < args.lr < math.inf:
        fail(f"--lr is {args.lr}; needs a positive number")
    if not 0 <= args.seed < 2**32:
        fail(f"--seed is {args.seed}; needs 0 to 2**32 - 1")
    if args.topk > args.experts:
        fail(f"--topk is {args.topk}; a byte cannot go to more experts than --experts = {args.experts}")
    if args.hidden % 2:
        fail(f"--hidden is {args.hidden}; needs an even number, rotary embeddings turn pairs")
    if args.overlap and args.shared is None:
        fail("--overlap needs a shared expert: set --shared SIZE")
    if args.world % args.ep or args.experts % args.ep:
        fail(f"--ep is {args.ep}; needs to divide the {args.world} processes (torchrun "
             f"--nproc-per-node {args.ep} train.py ..) and --experts = {args.experts}")
    if args.batch % args.world:
        fail(f"--batch is {args.batch}; needs a multiple of the {args.world} processes")
    if args.ffn is None:
        args.ffn = math.ceil(4 * args.hidden / args.topk / 8) * 8
    return args


def planned_runs(args) -> dict[str, argparse.Namespace]:
    """Name -> settings of the models to train, in this order. All but "moe" have a folder in OUT."""
    def changed(name, **settings):
        resume = args.resume and Path()
        return argparse.Namespace(
            **{**vars(args), "out": args.out / name, "resume": resume, **settings})

    runs = {"moe": args}
    if args.compare:
        runs = {name: changed(name, balance=name) for name in ("none", "bias", "quantile")}
    if args.compare or args.baseline:
        runs["dense"] = changed("dense", model="dense")
    return runs


# ---- Data: bytes; whole files are held out ----

class Corpus(NamedTuple):
    train: Tensor                              # [n] uint8
    blocks: Tensor                             # held out: [chunks, B, S + 1] uint8
    digest: str                                # of both


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.flatten().tolist())


def corpus_files(args) -> list[Path]:
    """Files in an order that does not depend on the machine."""
    root, pattern = args.data, "*"
    skipped = {"__pycache__"}
    if root is None:
        root, pattern = Path(sysconfig.get_paths()["stdlib"]), "*.py"
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    if root.is_file():
        return [root]
    if not root.is_dir():
        fail(f"--data {root}: no such file or folder")

    def wanted(path: Path) -> bool:
        if args.out.resolve() in path.resolve().parents:         # a run must not read what it writes
            return False
        parts = path.relative_to(root).parts
        return path.is_file() and not any(part in skipped or part[0] == "." for part in parts)
    return sorted(filter(wanted, root.rglob(pattern)), key=Path.as_posix)


def load_data(args) -> Corpus:
    with or_fail("--data"):
        texts = [path.read_bytes() for path in corpus_files(args)]
    if len(texts) >= 10:
        held_out = b"".join(texts[9::10])
        del texts[9::10]
        train = b"".join(texts)
    else:
        text = b"".join(texts)
        cut = len(text) * 9 // 10
        train, held_out = text[:cut], text[cut:]
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= args.context:
            fail(f"--data {args.data or 'standard library'}: {len(part)} {name} bytes; needs more "
                 f"than --context = {args.context}")

    # At most 128 blocks, evenly spread. All chunks have one shape, so one graph serves all.
    n = min(128, (len(held_out) - 1) // args.context)
    chunk = min(16, n)
    starts = torch.linspace(0, len(held_out) - args.context - 1, n - n % chunk).long()
    blocks = cut_blocks(torch.frombuffer(bytearray(held_out), dtype=torch.uint8), starts, args)
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        blocks=rearrange(blocks, "(chunks b) s -> chunks b s", b=chunk),
        digest=hashlib.sha256(train + held_out).hexdigest()[:16])


def cut_blocks(data: Tensor, starts: Tensor, args) -> Tensor:
    """[.., S + 1]: inputs and, one byte later, targets."""
    return data[starts[:, None] + torch.arange(args.context + 1)]


def get_batch(data: Tensor, args, step: int) -> Tensor:
    """This process's part of the batch, [B / processes, S + 1]: a function of (seed, step), so a
    resumed run needs no random state."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
    return cut_blocks(data, starts.chunk(args.world)[args.rank], args)


# ---- Model ----

class Attention(nn.Module):
    """Causal, with rotary positions (arXiv 2104.09864) and normed queries and keys (2010.04245)."""

    def __init__(self, args):
        super().__init__()
        self.head_dim = math.gcd(args.hidden, 32)
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.out = nn.Linear(args.hidden, args.hidden, bias=False)
        frequency_D2 = 10_000.0 ** -torch.linspace(0, 1, self.head_dim // 2)
        angle_SD2 = torch.arange(args.context)[:, None] * frequency_D2
        turn = torch.stack((angle_SD2.cos(), angle_SD2.sin()))
        self.register_buffer("turn", turn, persistent=False)

    def rotate(self, x_BNSD: Tensor) -> Tensor:
        """The pairs (d, d + D/2) are turned by an angle that grows with s."""
        a, b = F.rms_norm(x_BNSD, (self.head_dim,)).chunk(2, dim=-1)
        cos, sin = self.turn[:, :x_BNSD.shape[2]].to(x_BNSD.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q, k, v = rearrange(
            self.qkv(x_BSH), "b s (three n d) -> three b n s d", three=3, d=self.head_dim)
        y_BNSD = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(rearrange(y_BNSD, "b n s d -> b s (n d)"))


class DenseFFN(nn.Module):
    """SwiGLU of width K·F: the weights that a byte meets in a MoELayer, without the router."""

    def __init__(self, args):
        super().__init__()
        self.fc1 = nn.Linear(args.hidden, 2 * args.topk * args.ffn, bias=False)
        self.fc2 = nn.Linear(args.topk * args.ffn, args.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def make_ffn(args, groups: ProcessGroups) -> nn.Module:
    if args.model == "dense":
        return DenseFFN(args)
    config = MoEConfig(
        hidden_size=args.hidden,
        ffn_hidden_size=args.ffn,
        num_experts=args.experts,
        topk=args.topk,
        shared_expert_intermediate_size=args.shared,
        shared_expert_overlap=args.overlap,
        # Normalised after the choice, the one prob of K = 1 is always 1: the router would not learn.
        pre_softmax=args.topk == 1 and args.balance != "sinkhorn",
        **BALANCE[args.balance](args))
    return MoELayer(config, groups)


class Block(nn.Module):
    def __init__(self, args, groups: ProcessGroups):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.hidden)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.hidden)
        self.ffn = make_ffn(args, groups)
        self.sequence_first = args.balance == "seq"

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        if not self.sequence_first:
            return x_BSH + self.ffn(self.ffn_norm(x_BSH))
        # This loss alone asks which tokens are a sequence. The layer takes [S, B, H].
        y_SBH = self.ffn(self.ffn_norm(x_BSH).transpose(0, 1))
        return x_BSH + y_SBH.transpose(0, 1)


class ByteModel(nn.Module):
    """bytes [B, S] int64 -> logits [B, S, V]; with targets [B, S] the mean cross-entropy in nats."""

    def __init__(self, args, groups: ProcessGroups = ProcessGroups()):
        super().__init__()
        self.embedding = nn.Linear(V, LAST * args.hidden, bias=False)
        self.blocks = nn.ModuleList(Block(args, groups) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, V, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                self.draw(name, weight, args)
        nn.init.normal_(self.embedding.weight, std=LAST ** -0.5)
        nn.init.zeros_(self.head.weight)                 # the first prediction is 8 bits a byte

    def draw(self, name: str, weight: Tensor, args):
        """Every process draws all experts and keeps its own, so a seed gives one model at any --ep."""
        ranks = args.ep if is_expert(name) else 1
        drawn = torch.empty(ranks * len(weight), *weight.shape[1:])
        drawn.normal_(std=weight.shape[-1] ** -0.5)
        if name.endswith(("out.weight", "fc2.weight", "experts.fc2")):
            drawn /= (2 * args.layers) ** 0.5            # two terms a layer join the residual stream
        weight.data = drawn.chunk(ranks)[args.rank % ranks]

    def forward(self, bytes_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        # A product with one-hot rows. A lookup's backward would add rows in the order of the threads.
        each_BSJH = self.embedding(F.one_hot(bytes_BS, V).float()).float().unflatten(-1, (LAST, -1))
        # A position starts as the sum over its last bytes, each by its distance j. So pairs of bytes
        # form without attention.
        S = bytes_BS.shape[1]
        x_BSH = sum(F.pad(each_BSJH[:, :, j], (0, 0, j, 0))[:, :S] for j in range(LAST))
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV = self.head(self.norm(x_BSH)).float()
        if targets_BS is None:
            return logits_BSV
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def is_expert(name: str) -> bool:
    return ".experts." in name


def parameter_counts(model: nn.Module, args) -> tuple[int, int]:
    """(all, those that one byte meets)."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = args.ep * sum(size for name, size in sizes.items() if is_expert(name))
    others = sum(size for name, size in sizes.items() if not is_expert(name))
    return others + experts, others + experts * args.topk // args.experts


def make_optimizer(model: nn.Module, args) -> torch.optim.Optimizer:
    """Adam's steps are as long for a weight with one active input as for one with 512, so their
    effect on the output grows with the fan-in. Hence lr for the embedding, whose rows are looked up,
    0.4 lr for the head, and lr · 20 / fan-in for matrices (arXiv 2203.03466). Then one --lr suits the
    wide dense FFN and the narrow experts."""
    scales = {"embedding.weight": 1.0, "head.weight": 0.4}
    groups = []
    for name, p in model.named_parameters():
        group = dict(params=[p], scale=0.15, weight_decay=0.0)
        if p.ndim > 1:
            group.update(scale=scales.get(name, 20 / p.shape[-1]), weight_decay=0.1)
        groups.append(group)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args) -> float:
    """Of step 1 .. steps: up in the first twentieth of the run, then in a line to 0."""
    warmup = max(1, args.steps // 20)
    fall = (args.steps - step + 1) / max(1, args.steps - warmup)
    return args.lr * min(step / warmup, fall, 1.0)


# ---- Machine: the device, and processes over which gradients are averaged ----

@dataclass
class Machine:
    device: torch.device
    dtype: torch.dtype                         # of the products
    groups: ProcessGroups = ProcessGroups()

    def autocast(self):
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def start_machine(args) -> Machine:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)     # attention's backward too
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dtype = args.dtype
    if dtype == "auto":
        # Without bf16 instructions a bf16 product is many times slower than an fp32 one.
        fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    machine = Machine(device, getattr(torch, dtype))

    if args.world > 1:
        if args.rank:
            sys.stdout = open(os.devnull, "w")           # the first process speaks
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
        mesh = dist.init_device_mesh(
            device.type, (args.world // args.ep, args.ep), mesh_dim_names=("dp", "ep"))
        machine.groups = ProcessGroups.from_mesh(mesh)
    elif args.fsdp:
        print("--fsdp does nothing in one process; torchrun starts more")
    return machine


def compiler_works(device: torch.device) -> bool:
    """Compiles x + 1. Only what fails here is forgiven: a missing compiler, never a model's error."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return True
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).strip().splitlines()[0]
        print(f"torch.compile does not work on this machine; this run goes without it ({reason})")
        return False


def compile_model(model: nn.Module, args):
    """One graph. FSDP's hooks gather weights between the parts: there it is one graph a part."""
    torch.compiler.reset()                               # the graphs of the model before
    if not args.compile:
        return model
    if not (args.fsdp and args.world > 1):
        return torch.compile(model, fullgraph=True, dynamic=False)
    for block in model.blocks:
        block.attention.compile(fullgraph=True)
        block.ffn.compile(fullgraph=True)
    return model


def mean_over_processes(x: Tensor, args) -> float:
    if args.world > 1:
        dist.all_reduce(x)
    return x.item() / args.world


def moe_parameters(model: nn.Module) -> set[nn.Parameter]:
    return {p for layer in model.modules() if isinstance(layer, MoELayer) for p in layer.parameters()}


def shard(model: nn.Module) -> None:
    """FSDP2 for all but the MoE layers, which ep spreads."""
    ignored = moe_parameters(model)
    for part in (*model.blocks, model):
        fully_shard(part, ignored_params=ignored)


def average_gradients(model: nn.Module, args) -> None:
    reduce_gradients(model)
    reduced = moe_parameters(model)
    for p in model.parameters():
        if isinstance(p, DTensor):                       # FSDP2 has averaged it already
            continue
        if p not in reduced:
            dist.all_reduce(p.grad)
        p.grad /= args.world


# ---- Runs and their checkpoints ----

@dataclass
class Run:
    """A model in training. `history` has one record a report."""
    args: argparse.Namespace
    settings: dict
    model: nn.Module
    optimizer: torch.optim.Optimizer
    history: list
    step: int = 0

    def write_log(self) -> None:
        path = self.args.out / "log.jsonl"
        if self.args.rank == 0:
            with or_fail(f"cannot write {path}"):
                path.write_text("".join(json.dumps(record) + "\n" for record in self.history))


def settings_of(args, corpus: Corpus, machine: Machine) -> dict:
    """All that the numbers depend on. A checkpoint goes on under the same alone, but for the steps."""
    names = ("steps batch context lr seed layers hidden experts topk ffn shared overlap balance "
             "compile model")
    return {name: getattr(args, name) for name in names.split()} | dict(
        data=corpus.digest, device=machine.device.type, precision=str(machine.dtype))


def start_run(args, corpus: Corpus, machine: Machine) -> Run:
    """A new model, or that of a checkpoint."""
    torch.manual_seed(args.seed)
    model = ByteModel(args, machine.groups).to(machine.device)
    total, active = parameter_counts(model, args)
    shape = f"{args.experts} experts of {args.ffn}, top {args.topk}, balance {args.balance}"
    if args.model == "dense":
        shape = f"FFN of {args.topk * args.ffn}"
    print(f"\n{args.model}: {args.layers} layers of width {args.hidden}, {shape}; "
          f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active for a byte")

    if args.fsdp and args.world > 1:
        shard(model)
    optimizer = make_optimizer(model, args)
    run = Run(args, settings_of(args, corpus, machine), model, optimizer, history=[])
    checkpoint = args.resume
    if args.resume == Path():
        checkpoint = max(checkpoints(args), key=step_of, default=None)
    if checkpoint is not None:
        load_checkpoint(run, checkpoint)
    with or_fail(f"--out {args.out}"):
        args.out.mkdir(parents=True, exist_ok=True)
    run.write_log()
    return run


def checkpoints(args) -> list[Path]:
    return list(args.out.glob("checkpoint-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def sharded_state(run: Run) -> dict[str, Tensor]:
    """Name -> the model's and the optimizer's own tensors, as DTensors where each process holds a
    part. DCP saves them and loads into them."""
    state = dict(run.model.state_dict())
    for name, layer in run.model.named_modules():
        if isinstance(layer, MoELayer):
            state |= layer.sharded_state_dict(f"{name}.")
    for name, parameter in run.model.named_parameters():
        like = state[name]
        for key, tensor in run.optimizer.state[parameter].items():
            # An expert's moments are plain parts, as its parameter is. A count of steps is no part.
            if isinstance(like, DTensor) and tensor.shape == like.to_local().shape:
                tensor = DTensor.from_local(
                    tensor, like.device_mesh, like.placements, run_check=False)
            state[f"optimizer.{name}.{key}"] = tensor
    return state


def save_checkpoint(run: Run) -> Path:
    """Written beside the last one, then renamed: at any moment one of the two is whole."""
    args = run.args
    path = args.out / f"checkpoint-{run.step}"
    beside = args.out / "unfinished"
    with or_fail(f"could not write {path} (the checkpoint before is untouched)"):
        if args.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            with open(beside / "run.json", "w") as file:
                json.dump(dict(settings=run.settings, step=run.step, history=run.history), file)
                file.flush()
                os.fsync(file.fileno())
        dcp.save(sharded_state(run), checkpoint_id=beside, no_dist=args.world == 1)
        if args.rank == 0:
            older = checkpoints(args)
            beside.rename(path)
            for folder in older:
                shutil.rmtree(folder)
    return path


def load_checkpoint(run: Run, path: Path) -> None:
    """Into the run, at any number of processes. One clear line and exit code 2 where it does not fit.
    DCP unpickles the checkpoint's metadata, so trust where it is from."""
    try:
        saved = json.loads((path / "run.json").read_text())
        settings = saved["settings"]
        run.step, run.history = saved["step"], saved["history"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--resume: {path} is no checkpoint of train.py ({type(error).__name__})")
    differing = [
        f"{name} (checkpoint {settings.get(name)}, now {value})"
        for name, value in run.settings.items() if name != "steps" and settings.get(name) != value]
    if differing:
        fail(f"--resume: {path} was made with other settings: {', '.join(differing)}")
    before, now = settings["steps"], run.args.steps
    if now < before:
        fail(f"--resume: {path} is of a run of {before} steps; --steps is {now}, needs {before} or more")

    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    run.optimizer.step()                                 # makes the state that is loaded into
    run.optimizer.zero_grad()
    with or_fail(f"--resume: {path} is damaged"):
        dcp.load(sharded_state(run), checkpoint_id=path, no_dist=run.args.world == 1)
    print(f"resumed {path} at step {run.step}")
    if now > before:
        print(f"{now} steps in place of {before}: the learning rate follows the longer schedule")


# ---- Progress ----

def load_picture(record: dict) -> str:
    """A row a layer, a column an expert: a half block is an even share, a full one twice it or more."""
    rows = []
    for i, counts in enumerate(record["tokens_per_expert"]):
        mean = sum(counts) / len(counts)
        bars = "".join(" ▁▂▃▄▅▆▇█"[min(8, math.ceil(4 * n / mean))] for n in counts)
        rows.append(f"    layer {i}  |{bars}|  max violation {record['max_violation'][i]:.2f}")
    return "\n".join(rows)


def draw_curves(path: Path, histories: dict[str, list], zlib_bpb: float) -> None:
    """The losses, and for every MoE the load of every expert over the steps."""
    try:
        from matplotlib import figure
    except ImportError:
        print(f"matplotlib is not installed: {path} left out")
        return
    loads = {name: [record["tokens_per_expert"] for record in history]
             for name, history in histories.items() if "tokens_per_expert" in history[-1]}
    page = figure.Figure(figsize=(5 + 3 * len(loads), 4), dpi=110, layout="constrained")
    left, *others = page.subplots(1, 1 + len(loads), width_ratios=[5] + [3] * len(loads))

    for i, (name, history) in enumerate(histories.items()):
        for key, style in (("loss", dict(alpha=0.3)), ("held_out", dict(marker="o", label=name))):
            points = [(record["step"], record[key]) for record in history if key in record]
            left.plot(*zip(*points), color=f"C{i}", **style)
    left.axhline(zlib_bpb, color="gray", linestyle="--", label="zlib -9")
    left.set(xlabel="step", ylabel="bits per byte", ylim=(None, 1.1 * zlib_bpb))
    left.set_title("Loss: training (pale), held out (dots)")
    left.legend()

    for axes, (name, load) in zip(others, loads.items()):
        load_TLE = torch.tensor(load).double()                           # T reports, L layers
        share_TLE = load_TLE / load_TLE.mean(2, keepdim=True)
        T, L, E = share_TLE.shape
        image = axes.imshow(
            rearrange(share_TLE, "t l e -> (l e) t"), aspect="auto", interpolation="nearest",
            vmin=0, vmax=2, cmap="RdBu_r", extent=(0, histories[name][-1]["step"], L * E, 0))
        axes.set(xlabel="step", title=f"Load of the experts: {name}")
        axes.set_yticks([E * (i + 0.5) for i in range(L)], [f"layer {i}" for i in range(L)])
        for i in range(1, L):
            axes.axhline(E * i, color="black", linewidth=0.8)
    page.colorbar(image, ax=others, label="share (1 = even)")
    with or_fail(f"cannot write {path}"):
        page.savefig(path)
    print(f"curves: {path}")


# ---- Train, evaluate, sample ----

class Interrupt:
    """Ctrl-C asks the loop to stop after its step. A second one ends the program at once, as usual."""
    asked = False

    def __call__(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"stopping after this step ..\n")    # print may be what the signal interrupted


def train_step(run: Run, forward, data: Tensor, machine: Machine) -> Tensor:
    """One step of the optimizer and of the routers' balance -> the loss of this process's part."""
    args, model = run.args, run.model
    for group in run.optimizer.param_groups:
        group["lr"] = group["scale"] * learning_rate(run.step, args)
    block = get_batch(data, args, run.step).to(machine.device, torch.int64)

    with machine.autocast():
        loss = forward(block[:, :-1], block[:, 1:])
    loss.backward()
    if args.world > 1:
        average_gradients(model, args)
    norm = gradient_norm(model, machine.groups)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)
    run.optimizer.step()
    run.optimizer.zero_grad()

    if args.model == "moe":
        update_expert_bias(model)
        for router in model.modules():
            if isinstance(router, TopKRouter):
                router.reset_global_aux_loss_tracker()
    return loss.detach()


def report(run: Run, loss: float, held_out: float | None, began: float, rate: float) -> None:
    """One record for the history, the log and the screen. Loss and held-out are bits per byte."""
    args = run.args
    seconds = round(time.perf_counter() - began, 1)
    record = dict(step=run.step, loss=loss, tokens_per_second=round(rate), seconds=seconds)
    line = f"step {run.step:>{len(str(args.steps))}}/{args.steps}  loss {loss:.3f}"
    if held_out is not None:
        record["held_out"] = held_out
        line += f"  held-out {held_out:.3f}"
    left = int((args.steps - run.step) * args.batch * args.context / rate)
    print(f"{line:<50}  {rate:>9,.0f} tokens/s  {left // 60}:{left % 60:02} left", flush=True)

    if args.model == "moe":
        metrics = load_balancing_metrics(run.model, reduce=True)
        for name in ("tokens_per_expert", "max_violation"):
            record[name] = metrics[name].tolist()
        if held_out is not None:
            print(load_picture(record), flush=True)
    run.history.append(record)
    run.write_log()


def train(args, corpus: Corpus, machine: Machine) -> tuple[nn.Module, list[dict]]:
    """-> (model, history); the last record has the final "held_out". Ends the program when
    interrupted, with a checkpoint after the first step, without one before."""
    run = start_run(args, corpus, machine)
    forward = compile_model(run.model, args)
    interrupt = Interrupt()
    first, losses = run.step + 1, []
    mark = began = time.perf_counter()
    if run.history:
        began -= run.history[-1]["seconds"]
    if args.compile and run.step < args.steps:
        print("compiling, about a minute ..", flush=True)

    while run.step < args.steps:
        run.step += 1
        losses.append(train_step(run, forward, corpus.train, machine))
        if run.step == first:
            signal.signal(signal.SIGINT, interrupt)

        last = run.step == args.steps
        test = last or run.step % max(1, args.steps // 5) == 0
        if test or run.step == first or run.step % max(1, args.steps // 25) == 0:
            loss = mean_over_processes(torch.stack(losses).mean(), args) / math.log(2)
            rate = len(losses) * args.batch * args.context / (time.perf_counter() - mark)
            held_out = evaluate(forward, corpus.blocks, machine) if test else None
            report(run, loss, held_out, began=began, rate=rate)
            losses, mark = [], time.perf_counter()

        asked = torch.tensor(float(interrupt.asked), device=machine.device)
        stop = mean_over_processes(asked, args) > 0      # on any process
        if last or stop or run.step % args.save_every == 0:
            path = save_checkpoint(run)
        if stop and not last:
            print(f"saved {path}; to go on: {shlex.join(command_to_go_on(args))}")
            sys.exit(130)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run.model, run.history


def command_to_go_on(args) -> list[str]:
    """The command that was run, or that of torchrun, with --resume."""
    command = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            command = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
        except OSError:                                  # not on Linux
            command = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *sys.argv]
    return command + ["--resume"] * (args.resume != Path())


@torch.no_grad()
def evaluate(model, blocks: Tensor, machine: Machine) -> float:
    """Bits per byte of the blocks [chunks, B, S + 1]."""
    model.eval()
    with machine.autocast():
        blocks = blocks.to(machine.device, torch.int64)
        losses = [model(block[:, :-1], block[:, 1:]) for block in blocks]
    model.train()
    return torch.stack(losses).double().mean().item() / math.log(2)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, args, machine: Machine, length: int = 400) -> str:
    """What the model writes after the prompt, at temperature 0.8."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-args.context:]], device=machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):   # lengths differ
            logits_V = model(window)[0, -1].cpu()
        byte = torch.multinomial((logits_V / 0.8).softmax(-1), 1, generator=generator)
        text.append(byte.item())
    return printable(bytes(text[len(prompt):]))


def printable(text: bytes) -> str:
    text = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def zlib_bits_per_byte(blocks: Tensor) -> float:
    """Level 9, each block alone, of the bytes that the model predicts: all but a block's first."""
    texts = [as_bytes(block) for block in blocks.flatten(0, 1)[:, 1:]]
    return 8 * sum(len(zlib.compress(text, 9)) for text in texts) / sum(map(len, texts))


def check_out(args) -> None:
    """A run without --resume must not write over another. --resume alone needs a checkpoint."""
    if args.resume == Path():
        if not list(args.out.rglob("checkpoint-*")):
            fail(f"--resume: no checkpoint in {args.out}")
    elif any(path.is_file() and path.stat().st_size for path in args.out.rglob("*")):
        fail(f"--out {args.out} is not empty; --resume goes on there, or name another folder")


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(errors="replace")             # a terminal's encoding may lack characters
    check_out(args)
    machine = start_machine(args)
    corpus = load_data(args)
    print(f"{args.data or 'Python standard library'}: {len(corpus.train):,} bytes to train on, "
          f"{corpus.blocks[..., 1:].numel():,} held-out bytes to score; {machine.device.type}, "
          f"{machine.dtype}; loss and held-out in bits per byte")
    args.compile = args.compile and compiler_works(machine.device)

    models, histories = {}, {}
    for name, settings in planned_runs(args).items():
        models[name], histories[name] = train(settings, corpus, machine)

    zlib_bpb = zlib_bits_per_byte(corpus.blocks)
    print("\nheld-out bits per byte")
    for name, history in histories.items():
        end = history[-1]
        print(f"    {name:<8}  {end['held_out']:.3f}   {end['step']} steps, {end['seconds']:.0f} s")
    print(f"    zlib -9   {zlib_bpb:.3f}   on blocks of {args.context} bytes\n")
    if args.rank == 0:
        draw_curves(args.out / "curves.png", histories, zlib_bpb)

    prompt = as_bytes(corpus.blocks[len(corpus.blocks) // 2, 0, :64])
    first, *_ = models.values()
    text = sample(first, prompt, args, machine)
    print(f"\nsample, after 64 held-out bytes:\n{printable(prompt)}⟫{text}")
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped")
        sys.exit(130)
