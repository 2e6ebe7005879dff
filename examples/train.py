"""A byte-level language model with Mixture-of-Experts feed-forwards, trained on the source of the
Python standard library.

    python examples/train.py                               # minutes on two CPU cores, or on a GPU
    python examples/train.py --resume --steps 2000         # goes on from its last checkpoint
    torchrun --nproc-per-node 2 examples/train.py --ep 2   # the experts spread over two processes
    python examples/train.py --out out2 --baseline dense   # then a dense model of the same cost
    python examples/train.py --out out3 --data my_texts/   # a file or a folder of your own
    python examples/train.py --out out4 --baseline none quantile --layers 2 --experts 16 --steps 250

In this order: settings, data, model, step, checkpoint, loop; then what stands around the loop:
log, processes, Ctrl-C and the command line.

Letters are those of kernels.py (S context, B batch, H hidden size, E experts, K experts per token,
F expert FFN size). V is 256 byte values, N the attention heads, D the size of one.

A run is a function of its settings: the batch of a step depends only on (seed, step), and no sum
depends on the order of threads. So with the same --steps a resumed run has the losses of an
uninterrupted one.
"""
import argparse
import gzip
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import warnings
import zlib
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compat                                                                 # noqa: E402
from moe import (                                                             # noqa: E402
    MoEConfig, MoELayer, SharedExpertMLP, finish_step, load_balancing_metrics)
from ranks.parallel import ProcessGroups                                      # noqa: E402
from ranks.sharding import gradient_norm, reduce_gradients, sharded_state_dict     # noqa: E402

V = 256
LAST = 4                                       # bytes that the embedding of a position looks at
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
BALANCE = "aux seq global bias quantile sinkhorn none dense".split()


def fail(message):
    """The one way out for a user's mistake: one line, exit code 2."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- Settings ----

def parse_args(argv=None):
    """The settings of the run and of this process."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--data", default="", help=(
        'a file or a folder to train on, without hidden files and tests; "" is the Python '
        'standard library. Of ten or more files every tenth is held out, else the last tenth of '
        'the bytes'))
    add("--out", default="out", help="folder for checkpoint-STEP/ and log.jsonl")
    add("--resume", default="", nargs="?", const="last", help=(
        "go on from this checkpoint (alone: from the last one in OUT) with the same settings; "
        "with more --steps the run gets longer. Resume only what you trust: a checkpoint can run "
        "code"))
    add("--baseline", default="", nargs="+", choices=BALANCE, help=(
        "then train these with the same data and steps: the model with another balance, or a "
        "dense one"))
    add("--no-compile", action="store_true", help=(
        "run without torch.compile, as on mps and where CXX or g++ is missing"))
    add("--steps", type=int, default=500, help="steps of the optimizer")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--context", type=int, default=256, help="bytes a sequence")
    add("--lr", type=float, default=1e-2, help=(
        "of the embedding, at the peak of the schedule; make_optimizer says what the matrices get"))
    add("--optimizer", default="muon", choices=["muon", "adamw"], help=(
        "muon is for the matrices of attention and feed-forward, with AdamW for the rest; adamw "
        "is for all, and wants --lr 2e-2"))
    add("--seed", type=int, default=0, help=(
        "of the weights and of the order of the data, not of what is held out"))
    add("--layers", type=int, default=4, help="blocks of attention and feed-forward")
    add("--hidden", type=int, default=128, help="H, width of the model")
    add("--experts", type=int, default=8, help="E, experts a layer")
    add("--topk", type=int, default=2, help="K, experts a byte goes to")
    add("--ffn", type=int, default=0, help=(
        "F, width of one expert; 0 is 4 H / K, up to a multiple of 8"))
    add("--shared", type=int, default=0, help="width of a shared expert in every layer; 0 is none")
    add("--overlap", action="store_true", help=(
        "the shared expert runs beside the routed path, on a stream of its own"))
    add("--ep", type=int, default=1, help=(
        "processes over which the experts are spread (under torchrun)"))
    add("--fsdp", action="store_true", help=(
        "shard all that is not a MoE layer over the processes (under torchrun)"))
    add("--balance", default="bias", choices=BALANCE, help=(
        "what keeps the experts evenly used; dense is a model without experts, of the same active "
        "parameters"))
    add("--device", default="auto", help=(
        "cpu, or the kind of accelerator that this machine has (cuda, xpu, mps); auto is the "
        "accelerator if there is one"))
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help=(
        "of the products; auto is bfloat16 on a GPU and on a CPU with bf16 instructions, else "
        "float32, on mps too"))
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args(argv)

    for name in "steps batch context lr layers hidden experts topk ep save_every".split():
        value = getattr(args, name)
        if not 0 < value < math.inf:
            fail(f"--{name.replace('_', '-')} is {value}; needs a positive number")
    if args.hidden % 2:
        fail(f"--hidden is {args.hidden}; needs an even number, rotary embeddings turn pairs")
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))
    alone = args.fsdp and args.world == 1
    if alone or args.world % args.ep or args.batch % args.world:
        fail(f"{args.world} processes run (torchrun --nproc-per-node); needs a multiple of --ep = "
             f"{args.ep} that divides --batch = {args.batch}; with --fsdp more than one")

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [accelerator.type, "cpu"] if accelerator else ["cpu"]
    if args.device not in ("auto", *devices):
        fail(f"--device is {args.device}; this machine has {' and '.join(devices)}")
    if args.device == "auto":
        args.device = devices[0]
    if args.dtype == "auto":
        # Without bf16 instructions a bf16 product is many times slower than an fp32 one.
        fast = args.device != "cpu" or compat.cpu_multiplies_in(torch.bfloat16)
        args.dtype = "bfloat16" if fast and args.device != "mps" else "float32"
    args.ffn = args.ffn or math.ceil(4 * args.hidden / args.topk / 8) * 8
    args.data = Path(args.data or LIBRARY)
    args.out = Path(args.out)
    args.no_compile |= not shutil.which(os.environ.get("CXX", "g++")) or args.device == "mps"
    return args


# ---- Data: bytes; whole files are held out ----

Data = namedtuple("Data", "train held_out checksum")   # [n] uint8, [8, 16, S + 1], int


def load_data(root, context, device):
    """The files are in an order that does not depend on the machine."""
    pattern = "*.py" if root == LIBRARY else "*"
    files = sorted(root.rglob(pattern), key=Path.as_posix) or [root]
    # A run does not read what it writes.
    skipped = (r"/(\.|log.jsonl|(checkpoint-.*|unfinished|"
               r"__pycache__|site-packages|dist-packages|tests?|idle_test)/)")
    texts = [path.read_bytes() for path in files if path.is_file()
             and not re.search(skipped, path.as_posix().removeprefix(root.as_posix()))]
    held_out = texts[9::10]
    del texts[9::10]
    text = b"".join(texts + held_out)
    held_out_bytes = sum(map(len, held_out)) or len(text) // 10
    train_bytes = len(text) - held_out_bytes
    if held_out_bytes <= context:
        fail(f"--data {root}: {held_out_bytes} of {len(text)} bytes are held out; needs more than "
             f"--context = {context}")

    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    starts = torch.linspace(0, held_out_bytes - context - 1, 128).long()
    blocks = cut_blocks(corpus[train_bytes:], starts, context)
    return Data(corpus[:train_bytes], blocks.unflatten(0, (8, 16)), zlib.crc32(text))


def cut_blocks(data, starts, context):
    """[.., S + 1] int64: the inputs and, one byte later, the targets."""
    return data[starts[:, None] + torch.arange(context + 1)].long()


def get_batch(data, args, step):
    """This process's part of the batch, [B / processes, S + 1]."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
    return cut_blocks(data, starts.chunk(args.world)[args.rank], args.context)


# ---- Model ----

class Attention(nn.Module):
    """Causal, with rotary positions (arXiv 2104.09864) and normed queries and keys (2010.04245)."""

    def __init__(self, hidden, context):
        super().__init__()
        self.head_dim = math.gcd(hidden, 32)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        frequency_D2 = 10_000.0 ** -torch.linspace(0, 1, self.head_dim // 2)
        angle_SD2 = torch.arange(context)[:, None] * frequency_D2
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
        y_BNSD = F.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(rearrange(y_BNSD, "b n s d -> b s (n d)"))


def make_ffn(args, groups):
    """A MoELayer; for "dense" an MLP of width K·F, the weights that a byte meets in the layer."""
    sizes = args.hidden, args.ffn, args.experts, args.topk
    if args.balance == "dense":
        config = MoEConfig(*sizes, shared_expert_intermediate_size=args.topk * args.ffn)
        return SharedExpertMLP(config, gate=False, pg_collection=groups)
    balance = dict(
        aux=dict(load_balancing_type="aux_loss", aux_loss_coeff=0.01),
        seq=dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.01),
        # Gradients are averaged over the processes: see ProcessGroups.
        **{"global": dict(
            load_balancing_type="global_aux_loss", aux_loss_coeff=0.01 * args.world)},
        # A step is 0.8 % of the mean score, which is 1 / E.
        bias=dict(enable_expert_bias=True, bias_update_rate=0.008 / args.experts),
        quantile=dict(enable_expert_bias=True, bias_update="quantile"),
        sinkhorn=dict(load_balancing_type="sinkhorn"),
        none={})
    config = MoEConfig(
        *sizes,
        shared_expert_intermediate_size=args.shared or None,
        shared_expert_overlap=args.overlap,
        batch_first=True,
        # Normalised after the choice, the one prob of K = 1 would be 1: the router would not learn.
        pre_softmax=args.topk == 1 and args.balance != "sinkhorn",
        **balance[args.balance])
    return MoELayer(config, groups)


class Block(nn.Module):
    def __init__(self, args, groups):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.hidden)
        self.attention = Attention(args.hidden, args.context)
        self.ffn_norm = nn.RMSNorm(args.hidden)
        self.ffn = make_ffn(args, groups)

    def forward(self, x_BSH):
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.ffn(self.ffn_norm(x_BSH))


class ByteModel(nn.Module):
    """bytes [B, S] int64 -> logits [B, S, V]; with targets [B, S] the mean loss in nats, 0-d."""

    def __init__(self, args, groups=None):
        super().__init__()
        self.args = args
        self.groups = groups
        self.embedding = nn.Linear(V, LAST * args.hidden, bias=False)
        self.blocks = nn.ModuleList(Block(args, groups) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, V, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                continue
            # Every process draws all experts and keeps its own: one model at any --ep.
            ranks = args.ep if ".experts." in name else 1
            drawn = torch.randn(ranks * len(weight), *weight.shape[1:])
            weight.data = drawn.chunk(ranks)[args.rank % ranks] * weight.shape[-1] ** -0.5
            if name.endswith(("out.weight", "fc2")):
                weight.data /= (2 * args.layers) ** 0.5  # two terms a layer join the residual
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


def loss_of(model, block):
    """In nats, of [B, S + 1] bytes."""
    bf16 = model.args.dtype == "bfloat16"
    with torch.autocast(block.device.type, torch.bfloat16, enabled=bf16):
        return model(block[:, :-1], block[:, 1:])


# ---- Step ----

def make_optimizer(model, lr):
    """Adam's steps are as long for a weight with one active input as for one with 512, so their
    effect on the output grows with the fan-in. Hence lr for the embedding, whose rows are looked
    up, 0.4 lr for the head, and lr · 20 / fan-in for matrices (arXiv 2203.03466). Then one --lr
    suits the wide dense FFN and the narrow experts. Muon's steps have the same effect at any
    fan-in: 2 lr."""
    scales = {"embedding.weight": 1.0, "head.weight": 0.4}
    groups = []
    for name, p in model.named_parameters():
        scale, decay, muon = 0.15, 0.0, None
        if p.ndim > 1:
            scale, decay = scales.get(name, 20 / p.shape[-1]), 0.1
            inside = name.startswith("blocks.") and not name.endswith("router.weight")
            if inside and model.args.optimizer == "muon":
                scale, muon = 2.0, getattr(torch, model.args.dtype)
        groups.append(dict(params=[p], peak_lr=scale * lr, weight_decay=decay, muon=muon))
    return MuonOrAdamW(groups, betas=(0.9, 0.95), fused=True)


class MuonOrAdamW(torch.optim.AdamW):
    """AdamW; in groups with `muon`, the dtype of its products, the steps of torch.optim.Muon, for
    all matrices [.., out, in] of a weight at once. Each process takes its own experts."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["muon"]:
                [p] = group["params"]
                self.muon_step(p, **group)
                p.grad = None                            # AdamW leaves it out
        super().step()

    def muon_step(self, p, lr, weight_decay, muon, **_):
        if not self.state[p]:
            self.state[p]["momentum"] = torch.zeros_like(p)
        momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
        x = p.grad.lerp(momentum, 0.95)                  # Nesterov's
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        x = orthogonal(whole.to(muon)).to(p.dtype)
        if isinstance(p, DTensor):
            x = distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)
        p.mul_(1 - lr * weight_decay).sub_(x, alpha=lr * max(1, p.shape[-2] / p.shape[-1]) ** 0.5)


def orthogonal(x):
    """The matrices [.., out, in] with all singular values near 1: five rounds of Newton-Schulz
    (arXiv 2502.16982), a polynomial that takes a value from 0.003 to 1 to one from 0.68 to 1.21."""
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x.mT if tall else x


def schedule(step, steps):
    """Of the learning rate: up in the first twentieth of the run, then in a line to 0."""
    warmup = max(1, steps // 20)
    return min(step / warmup, (steps - step + 1) / max(1, steps - warmup), 1.0)


def train_step(model, optimizer, block, rate):
    """One step of the optimizer and of the routers' balance -> the loss of this process's block.
    The learning rates are `rate` times their peaks."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate
    loss = loss_of(model, block)
    loss.backward()
    if model.args.world > 1:
        average_gradients(model)
    norm = gradient_norm(model, model.groups)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    if model.args.balance != "dense":
        finish_step(model)
    return loss.detach()


@torch.no_grad()
def evaluate(model, blocks):
    """Bits per byte."""
    model.eval()
    losses = [loss_of(model, block) for block in blocks]
    model.train()
    return torch.stack(losses).cpu().double().mean().item() / math.log(2)


# ---- Checkpoint ----

def save_checkpoint(model, optimizer, settings, step):
    """Written beside the last one, then renamed: at any moment one of the two is whole."""
    beside = model.args.out / "unfinished"
    dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=beside)
    if model.args.rank == 0:
        (beside / "run.json").write_text(json.dumps([settings, step]))
        older = list(beside.parent.glob("checkpoint-*"))
        beside.rename(beside.with_name(f"checkpoint-{step:07}"))
        for folder in older:
            shutil.rmtree(folder)


def load_checkpoint(model, optimizer, settings, path):
    """-> its step. The number of processes may differ. What does not fit is refused."""
    try:
        saved, step = json.loads((path / "run.json").read_text())
        saved["steps"] = max(saved["steps"], settings["steps"])
        other = dict(saved.items() - settings.items())
        if other:
            fail(f"--resume: {path} was made with other settings, {other}")
        dcp.load(sharded_state_dict(model, optimizer), checkpoint_id=path)
    except (OSError, ValueError, LookupError, dcp.CheckpointException) as error:
        fail(f"--resume: {path} is damaged or no checkpoint of train.py ({type(error).__name__})")
    return step


# ---- Loop ----

def train(args, groups, data, interrupts):
    """A new model, or that of a checkpoint, up to step args.steps -> held-out bits per byte."""
    torch.manual_seed(args.seed)
    try:
        model = ByteModel(args, groups).to(args.device)
    except ValueError as error:                          # settings that do not fit each other
        fail(error)
    if args.fsdp:
        shard(model)
    optimizer = make_optimizer(model, args.lr)
    # All that the numbers depend on. A checkpoint goes on with the same; only steps may grow.
    settings = dict(data=data.checksum)
    for name in ("steps batch context lr optimizer seed layers hidden experts topk ffn shared "
                 "overlap balance no_compile device dtype").split():
        settings[name] = getattr(args, name)
    first = 1
    path = args.resume
    if path == "last":
        path = max(args.out.glob("checkpoint-*"), default="")
    if path:
        first += load_checkpoint(model, optimizer, settings, Path(path))
    if not args.no_compile:
        compile_model(model)
    args.out.mkdir(parents=True, exist_ok=True)

    held_out = None
    losses, start = [], time.perf_counter()
    for step in range(first, args.steps + 1):
        block = get_batch(data.train, args, step)
        losses.append(train_step(model, optimizer, block, schedule(step, args.steps)))
        last = step == args.steps
        if last or step == first or step % math.ceil(args.steps / 25) == 0:
            loss = mean_over_processes(torch.stack(losses).mean(), args) / math.log(2)
            a_step = (time.perf_counter() - start) / len(losses)
            rate = args.batch * args.context / a_step
            metrics = {}
            if args.balance != "dense":
                metrics = load_balancing_metrics(model, reduce=True)
            left = a_step * (args.steps - step)
            log(args, step=step, loss=loss, tokens_per_second=rate, seconds_left=left, **metrics)
            losses, start = [], time.perf_counter()

        stop = mean_over_processes(len(interrupts), args) > 0                # on any process
        if last or stop or step % args.save_every == 0:
            save_checkpoint(model, optimizer, settings, step)
            held_out = evaluate(model, data.held_out)
            log(args, step=step, held_out=held_out)
        if stop:
            print(f"saved step {step}; the same command with --resume goes on from there")
            sys.exit(130)
    if held_out is None:                                 # a resumed run had no step left
        held_out = evaluate(model, data.held_out)
    return held_out


def compare(results, args, data):
    """What to think of the results, [(balance, held-out bits per byte)]: what the same bytes take
    in codes that everybody has."""
    text = bytes(data.held_out[..., 1:].flatten().tolist())
    packed = 8 * len(gzip.compress(text, 9)) / len(text)
    print(f"\nbits per byte of {len(text):,} held-out bytes; less is better")
    print(f"{8.0:7.3f}  uncompressed")
    print(f"{packed:7.3f}  gzip -9, of all these bytes in one file")
    for balance, held_out in results:
        kind = "a dense model" if balance == "dense" else f"this model, balance {balance}"
        print(f"{held_out:7.3f}  {kind}: it sees up to {args.context} bytes before a byte")
    if "dense" not in dict(results):
        print("(--baseline dense trains a dense model too, with as many active parameters)")


def log(args, **record):
    """Losses are bits per byte. The screen shows the largest value of a metric of each layer."""
    called = {"tokens_per_expert": "largest_load"}
    print(*(f"{called.get(name, name)} {torch.as_tensor(value).max():<8.4g}"
            for name, value in record.items()))
    if args.rank == 0:
        with open(args.out / "log.jsonl", "a") as file:
            print(json.dumps(record, default=torch.Tensor.tolist), file=file)


# ---- Processes: gradients are averaged over them ----

def start_processes(args):
    if args.device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)     # attention's backward too
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    if args.world == 1:
        return ProcessGroups()
    if args.rank:
        sys.stdout = open(os.devnull, "w")               # the first process speaks
    dist.init_process_group(dist.get_default_backend_for_device(args.device))
    return ProcessGroups.from_mesh(dist.init_device_mesh(
        args.device, (args.world // args.ep, args.ep), mesh_dim_names=("dp", "ep")))


def mean_over_processes(x, args):
    x = torch.as_tensor(x, device=args.device)
    if args.world > 1:
        dist.all_reduce(x)
    return x.item() / args.world


def average_gradients(model):
    """Those of the layers are summed by reduce_gradients; FSDP2 has averaged its DTensors."""
    reduce_gradients(model)
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            if ".ffn." not in name:
                dist.all_reduce(p.grad)
            p.grad /= model.args.world


def shard(model):
    """All but the layers, whose experts ep may spread."""
    ignored = {p for name, p in model.named_parameters() if ".ffn." in name}
    for part in (*model.blocks, model):
        fully_shard(part, ignored_params=ignored)


def compile_model(model):
    """One graph. FSDP's hooks gather weights between the parts: there it is one graph a part."""
    print("compiling, about a minute ..", flush=True)
    torch.compiler.reset()                               # the graphs of the model before
    parts = [model]
    if model.args.fsdp:
        parts = [part for block in model.blocks for part in (block.attention, block.ffn)]
    for part in parts:
        part.compile(fullgraph=True, dynamic=False)


# ---- Ctrl-C ----

def catch_interrupts():
    """-> a list that grows by one with the first Ctrl-C; a second one ends the program at once.

    A Ctrl-C that kills the C++ compiler would leave a broken library in Inductor's cache. So
    another thread takes the signal: child processes inherit what this thread blocks. Python still
    runs the handler in this thread.
    """
    seen = []

    def handle(*_):
        if seen:
            os._exit(130)                                # the compiler could swallow an exception
        seen.append(True)
        os.write(2, b"stopping after this step; once more: at once\n")      # print is not reentrant

    signal.signal(signal.SIGINT, handle)
    if os.name == "posix":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    return seen


# ---- Command line ----

def main(argv=None):
    args = parse_args(argv)
    holds_run = any(args.out.glob("checkpoint-*"))
    if args.resume == "last" and not holds_run:
        fail(f"--resume: no checkpoint in {args.out}")
    if holds_run and not args.resume:
        fail(f"--out {args.out} holds a run; --resume goes on with it, or name another folder")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")       # in one process
    groups = start_processes(args)
    data = load_data(args.data, args.context, args.device)
    print(f"{args.data}: {len(data.train):,} bytes to train on; {args.device}, {args.dtype}; "
          f"loss and held-out in bits per byte")
    interrupts = catch_interrupts()
    results = []
    for name in ("", *args.baseline):
        each = argparse.Namespace(**vars(args))
        if name:
            each.out = args.out / name
            each.balance = name
            each.resume = args.resume and "last"
        print(f"\nbalance {each.balance}")
        results.append((each.balance, train(each, groups, data, interrupts)))
    compare(results, args, data)
    if args.world > 1:
        dist.destroy_process_group()
        # A thread of gloo may still have a tensor to free. If Python is shutting down by then, it
        # aborts the process (pytorch #190489). So it is not shut down.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:                             # what the file system refuses
        fail(error)
