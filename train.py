"""A byte-level language model with Mixture-of-Experts feed-forwards, trained on the Python standard library's source.

    python train.py                                   # a few minutes on two CPU cores; a GPU is used when there is one
    python train.py --baseline dense                  # then also a dense model of the same active parameters
    python train.py --data my_texts/ --steps 2000     # a file or folder of one's own
    python train.py --resume                          # go on from out/checkpoint.pt, bit for bit
    torchrun --nproc-per-node 2 train.py --ep 2       # the experts spread over two processes; the same loss curve

Letters as in kernels.py (S context, B batch, H hidden size, E experts, K experts per token, F expert FFN size), and
V = 256 byte values, N attention heads of size D. Runs are functions of their settings: the batch of a step is drawn from
(seed, step) alone, and no sum in here depends on the order in which threads arrive.
"""
import argparse
import hashlib
import json
import math
import os
import shlex
import signal
import sys
import sysconfig
import time
import zlib
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moe import (
    MoEConfig, MoELayer, ProcessGroups, TopKRouter, gradient_norm, load_balancing_metrics, reduce_gradients,
    update_expert_bias)

V = 256
LAST = 4                                       # bytes that the embedding of a position looks at
BALANCE = {                                    # --balance: what the router's config gets
    "aux": lambda args: dict(load_balancing_type="aux_loss", aux_loss_coeff=0.01),
    "seq": lambda args: dict(load_balancing_type="seq_aux_loss", aux_loss_coeff=0.01),
    # times the processes, over which gradients are averaged: see ProcessGroups
    "global": lambda args: dict(load_balancing_type="global_aux_loss", aux_loss_coeff=0.01 * args.world),
    # a step is 0.8 % of the mean score, which is 1 / E
    "bias": lambda args: dict(enable_expert_bias=True, bias_update_rate=0.008 / args.experts),
    "quantile": lambda args: dict(enable_expert_bias=True, bias_update="quantile"),
    "sinkhorn": lambda args: dict(load_balancing_type="sinkhorn"),
    "none": lambda args: dict(),
}
FORMAT = "moe train.py checkpoint 1"
CONTENT = {"settings", "step", "model", "optimizer", "history"}


def fail(message: str):
    """The one way out for a user's mistake: one line, exit code 2."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- Settings ----

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def parse_args(argv=None) -> argparse.Namespace:
    parser = Parser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="PATH", help="a file or folder to train on (default: the standard library's .py "
        "files without its tests); of ten or more files every tenth is held out, else the last tenth of the bytes")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="checkpoint.pt, log.jsonl and curves.png go there")
    add("--resume", nargs="?", type=Path, const=Path(), metavar="PT", help="go on from this checkpoint (alone: from "
        "OUT/checkpoint.pt), with the same settings")
    add("--baseline", choices=["dense"], help="after the MoE train a dense model with the same active parameters, data "
        "and steps, and print both")
    add("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=8, help="sequences a step")
    add("--context", type=int, default=256, help="bytes a sequence")
    add("--lr", type=float, default=1e-2, help="the embedding's, at the peak of the "
        "schedule (a warmup, then linear to 0 at --steps); make_optimizer says what the matrices get")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data; what is held out stays")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=128, help="H, width of the model")
    add("--experts", type=int, default=8, help="E, experts a layer")
    add("--topk", type=int, default=2, help="K, experts a byte goes to")
    add("--ffn", type=int, help="F, width of one expert (default: 4 H / K, rounded up to a multiple of 8)")
    add("--shared", type=int, metavar="SIZE", help="a shared expert of this width in every layer")
    add("--overlap", action="store_true", help="the shared expert beside the routed path, on a stream of its own")
    add("--ep", type=int, default=1, metavar="RANKS", help="spread the experts over so many processes (under torchrun)")
    add("--fsdp", action="store_true", help="shard all that is not a MoE layer over the processes (under torchrun)")
    add("--balance", choices=list(BALANCE), default="bias", help="what keeps the experts evenly used")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the products; auto is bfloat16 on a GPU "
        "and on a CPU with bf16 instructions, else float32")
    add("--save-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    args = parser.parse_args(argv)
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    for name in "steps batch context layers hidden experts topk ffn shared ep save_every".split():
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; needs 1 or more")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr is {args.lr}; needs a positive number")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed is {args.seed}; needs 0 to 2**32 - 1")
    if args.topk > args.experts:
        parser.error(f"--topk is {args.topk}; a byte cannot go to more experts than --experts = {args.experts}")
    if args.hidden % 2:
        parser.error(f"--hidden is {args.hidden}; needs an even number, rotary embeddings turn pairs")
    if args.overlap and args.shared is None:
        parser.error("--overlap needs a shared expert: set --shared SIZE")
    if args.world % args.ep or args.experts % args.ep:
        parser.error(f"--ep is {args.ep}; needs to divide the {args.world} processes (torchrun --nproc-per-node {args.ep} "
                     f"train.py ..) and --experts = {args.experts}")
    if args.batch % args.world:
        parser.error(f"--batch is {args.batch}; needs a multiple of the {args.world} processes")
    if args.ffn is None:
        args.ffn = math.ceil(4 * args.hidden / args.topk / 8) * 8
    return args


# ---- Data: bytes; whole files are held out ----

def as_bytes(tensor: Tensor) -> bytes:
    """Of uint8, without numpy, which torch does not install."""
    return bytes(tensor.flatten().tolist())


def corpus_files(path: Path | None, out: Path) -> list[Path]:
    """Files in an order that does not depend on the machine."""
    if path is not None and path.is_file():
        return [path]
    root = path or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        fail(f"--data {root}: no such file or folder")
    skipped = {"__pycache__"} if path else {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = [(p.relative_to(root).as_posix(), p) for p in root.rglob("*" if path else "*.py") if p.is_file()]
    return [p for name, p in sorted(found)
            if not any(part in skipped or part.startswith(".") for part in name.split("/"))
            and out.resolve() not in p.resolve().parents]                    # a run must not read what it writes


def load_data(path: Path | None, context: int, out: Path) -> tuple[Tensor, Tensor]:
    """(train bytes [n] uint8, held-out blocks [chunks, B, S + 1] uint8, evenly spread over the held-out bytes)."""
    try:
        texts = [p.read_bytes() for p in corpus_files(path, out)]
    except OSError as error:
        fail(f"--data: cannot read {error.filename}: {error.strerror}")
    if len(texts) >= 10:
        train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
        held_out = b"".join(texts[9::10])
    else:
        joined = b"".join(texts)
        train, held_out = joined[:len(joined) * 9 // 10], joined[len(joined) * 9 // 10:]
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= context:
            fail(f"--data {path or 'standard library'}: {len(part)} {name} bytes; needs more than --context = {context}")
    held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)
    n = min(128, (len(held_out) - 1) // context)
    chunk = min(16, n)                                   # every chunk has one shape: one graph for all of them
    n -= n % chunk
    starts = torch.linspace(0, len(held_out) - context - 1, n).long()
    blocks = held_out[starts[:, None] + torch.arange(context + 1)]
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), blocks.view(n // chunk, chunk, context + 1)


def get_batch(data: Tensor, args, step: int, device) -> tuple[Tensor, Tensor]:
    """(inputs, targets), both [B, S] int64: a function of (seed, step), so that a resumed run needs no other state."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
    block = data[starts[:, None] + torch.arange(args.context + 1)].to(device, torch.int64)
    return block[:, :-1], block[:, 1:]


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
        self.register_buffer("cos", angle_SD2.cos(), persistent=False)
        self.register_buffer("sin", angle_SD2.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, N, S, D]: pairs (d, d + D/2) are turned by an angle that grows with s."""
        a, b = F.rms_norm(x, (self.head_dim,)).chunk(2, dim=-1)
        cos, sin = self.cos[:x.shape[2]].to(x.dtype), self.sin[:x.shape[2]].to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))              # [B, S, 3, N, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                 # each [B, N, S, D]
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DenseFFN(nn.Module):
    """SwiGLU of width K·F: the weights that a byte meets in an MoELayer, router apart."""

    def __init__(self, args):
        super().__init__()
        self.fc1 = nn.Linear(args.hidden, 2 * args.topk * args.ffn, bias=False)
        self.fc2 = nn.Linear(args.topk * args.ffn, args.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def make_ffn(args, kind: str, groups: ProcessGroups) -> nn.Module:
    if kind == "dense":
        return DenseFFN(args)
    return MoELayer(MoEConfig(
        hidden_size=args.hidden, ffn_hidden_size=args.ffn, num_experts=args.experts, topk=args.topk,
        shared_expert_intermediate_size=args.shared, shared_expert_overlap=args.overlap,
        # one expert's softmax, normalised, is always 1: the router would learn nothing
        pre_softmax=args.topk == 1 and args.balance != "sinkhorn", **BALANCE[args.balance](args)), groups)


class Block(nn.Module):
    def __init__(self, args, kind: str, groups: ProcessGroups):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(args.hidden), Attention(args)
        self.ffn_norm, self.ffn = nn.RMSNorm(args.hidden), make_ffn(args, kind, groups)
        self.sequence_first = kind == "moe" and args.balance == "seq"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        if self.sequence_first:                              # the one loss that asks which tokens are a sequence: [S, B, H]
            return x + self.ffn(self.ffn_norm(x).transpose(0, 1)).transpose(0, 1)
        return x + self.ffn(self.ffn_norm(x))


class ByteModel(nn.Module):
    """bytes [B, S] int64 -> logits [B, S, V], or with targets [B, S] the mean cross-entropy in nats, 0-d."""

    def __init__(self, args, kind: str, groups: ProcessGroups = ProcessGroups()):
        super().__init__()
        self.embedding = nn.Linear(V, LAST * args.hidden, bias=False)
        self.blocks = nn.ModuleList(Block(args, kind, groups) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, V, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:                              # all experts are drawn, those of this process kept
                drawn = torch.empty(args.experts if is_expert(name) else len(weight), *weight.shape[1:])
                drawn.normal_(std=weight.shape[-1] ** -0.5)
                weight.data = drawn.chunk(args.ep)[groups.ep.rank()] if is_expert(name) and groups.ep else drawn
            if name.endswith(("out.weight", "fc2.weight", "experts.fc2")):
                weight.data /= (2 * args.layers) ** 0.5      # what is added to the residual stream: 2 terms a layer
        nn.init.normal_(self.embedding.weight, std=LAST ** -0.5)
        nn.init.zeros_(self.head.weight)                     # the first prediction is uniform: 8 bits a byte

    def forward(self, bytes_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        # a product with one-hot rows: the backward of a lookup adds rows in whatever order the threads come
        each_BSJH = self.embedding(F.one_hot(bytes_BS, V).float()).float().unflatten(-1, (LAST, -1))
        # a position starts as the sum over its last bytes, each by its distance j: byte pairs need no attention to form
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
    experts = args.ep * sum(p.numel() for name, p in model.named_parameters() if is_expert(name))
    others = sum(p.numel() for name, p in model.named_parameters() if not is_expert(name))
    return others + experts, others + experts * args.topk // args.experts


def make_optimizer(model: nn.Module, args) -> torch.optim.Optimizer:
    """Adam's steps are as long for a weight with one active input as for one with 512, so their effect on the output
    grows with the fan-in. Hence lr for the embedding, whose rows are looked up, 0.4 lr for the head, and
    lr · 20 / fan-in for matrices (arXiv 2203.03466): one --lr then suits the wide dense FFN and the narrow experts."""
    groups = []
    for name, p in model.named_parameters():
        if p.ndim == 1:
            scale = 0.15
        else:
            scale = {"embedding.weight": 1.0, "head.weight": 0.4}.get(name, 20 / p.shape[-1])
        groups.append(dict(params=[p], lr=args.lr * scale, scale=scale, weight_decay=0.1 if p.ndim > 1 else 0.0))
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, args) -> float:
    """Of step 0 .. steps - 1: up in the first twentieth of the run, then in a line to 0."""
    warmup = max(1, args.steps // 20)
    return args.lr * min((step + 1) / warmup, (args.steps - step) / max(1, args.steps - warmup), 1.0)


# ---- Machine ----

def pick_device(wanted: str) -> tuple[torch.device, torch.dtype]:
    """The device, and the dtype of the products: `wanted` is --dtype."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)             # attention's backward, among others
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if wanted == "auto":
        # without bf16 matrix instructions a bf16 product is many times slower than an fp32 one
        fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        wanted = "bfloat16" if fast else "float32"
    return device, getattr(torch, wanted)


def autocast(device: torch.device, dtype: torch.dtype):
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def compiler_works(device: torch.device) -> bool:
    """Compiles x + 1. Only what goes wrong here is forgiven: no compiler or no headers, never an error of the model."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return True
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).strip().splitlines()[0]
        print(f"torch.compile does not work on this machine, so this run goes without it ({reason})")
        return False


# ---- Processes: gradients are averaged over them, checkpoints hold whole tensors ----

def start_processes(args, device: torch.device) -> ProcessGroups:
    if args.world == 1:
        return ProcessGroups()
    if args.rank:
        sys.stdout = open(os.devnull, "w")                   # the first process speaks
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    return ProcessGroups.from_mesh(dist.init_device_mesh(device.type, (args.world // args.ep, args.ep), mesh_dim_names=("dp", "ep")))


def mean_over_processes(x: Tensor, args) -> Tensor:
    if args.world > 1:
        dist.all_reduce(x)
    return x / args.world


def moe_parameters(model: nn.Module) -> set[nn.Parameter]:
    return {p for layer in model.modules() if isinstance(layer, MoELayer) for p in layer.parameters()}


def shard(model: nn.Module) -> None:
    """FSDP2 for all but the MoE layers, which ep spreads."""
    ignored = moe_parameters(model)
    for part in (*model.blocks, model):
        fully_shard(part, ignored_params=ignored)


def average_gradients(model: nn.Module, args) -> None:
    if args.world == 1:
        return
    reduce_gradients(model)
    reduced = moe_parameters(model)
    for p in model.parameters():
        if isinstance(p, DTensor):                           # FSDP2 has averaged already
            continue
        if p not in reduced:
            dist.all_reduce(p.grad)
        p.grad /= args.world


def clip_gradients(model: nn.Module, args, groups: ProcessGroups) -> None:
    """To a norm of 1, over all experts wherever they are."""
    if args.world == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    factor = (1.0 / (gradient_norm(model, groups) + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad *= factor


def layouts(model: nn.Module) -> dict[str, Tensor]:
    """State-dict name -> tensor, a DTensor where this process holds a part."""
    tensors = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer):
            tensors |= layer.sharded_state_dict(f"{name}.")
    return tensors


def whole(part: Tensor, like: Tensor) -> Tensor:
    """All of a tensor of which this process has `part`, laid out as `like`. Collective."""
    if isinstance(like, DTensor) and not isinstance(part, DTensor):
        part = DTensor.from_local(part, like.device_mesh, like.placements, run_check=False)
    return part.full_tensor() if isinstance(part, DTensor) else part


def own_part(tensor: Tensor, like: Tensor, plain: bool) -> Tensor:
    """The opposite of `whole`; a plain tensor or a DTensor."""
    if not isinstance(like, DTensor):
        return tensor
    part = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return part.to_local() if plain else part


def convert_states(model: nn.Module, state: tuple[dict, dict], change) -> tuple[dict, dict]:
    """(model's, optimizer's state dict) with every tensor t changed to change(t, layout, whether the parameter is plain)."""
    like, parameters = layouts(model), dict(model.named_parameters())
    names = list(parameters)                                 # one group a parameter, in this order

    def plain(name):
        return not isinstance(parameters.get(name), DTensor)
    weights = {name: change(tensor, like[name], plain(name)) for name, tensor in state[0].items()}
    moments = {i: {key: change(value, like[names[i]], plain(names[i])) if value.ndim else value for key, value in of.items()}
               for i, of in state[1]["state"].items()}
    return weights, {**state[1], "state": moments}


# ---- Checkpoints ----

def settings_of(args, kind: str, data: Tensor, blocks: Tensor, device, dtype) -> dict:
    """All that the numbers depend on. A checkpoint goes on only under the same."""
    names = "steps batch context lr seed layers hidden experts topk ffn shared overlap balance compile".split()
    digest = hashlib.sha256(as_bytes(data) + as_bytes(blocks)).hexdigest()[:16]
    return {**{name: getattr(args, name) for name in names}, "model": kind, "data": digest, "device": device.type,
            "precision": str(dtype).removeprefix("torch.")}


def save_checkpoint(path: Path, args, **content) -> None:
    """Written beside the old one, then put in its place in one move: at any moment one of the two is whole. The first
    process writes."""
    if args.rank:
        return
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        fail(f"could not write {path} (what was there before is untouched): {error}")


def load_checkpoint(path: Path, settings: dict) -> dict:
    """A dict with the keys CONTENT, or one clear line and exit code 2."""
    if not path.is_file():
        fail(f"--resume: no checkpoint at {path}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                # foreign bytes can fail anywhere in the unpickler, with any type of error
        fail(f"--resume: {path} is truncated or no checkpoint ({type(error).__name__})")
    if not isinstance(saved, dict) or saved.get("format") != FORMAT or not CONTENT <= saved.keys():
        fail(f"--resume: {path} is no checkpoint of train.py")
    differing = [f"{name} (checkpoint {saved['settings'].get(name)}, now {value})"
                 for name, value in settings.items() if saved["settings"].get(name) != value]
    if differing:
        fail(f"--resume: {path} was made with other settings: {', '.join(differing)}")
    return saved


# ---- Progress ----

def load_picture(record: dict) -> str:
    """A row a layer, a column an expert: a half block is an even share, a full one twice that or more."""
    ramp = " ▁▂▃▄▅▆▇█"
    try:
        ramp.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        ramp = " .:-=+*%#"
    rows = []
    for i, (counts, violation) in enumerate(zip(record["tokens_per_expert"], record["max_violation"])):
        mean = sum(counts) / len(counts)
        bars = "".join(ramp[min(8, math.ceil(4 * n / mean))] for n in counts)
        rows.append(f"    layer {i}  |{bars}|  max violation {violation:.2f}")
    return "\n".join(rows)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def draw_curves(path: Path, histories: dict[str, list], zlib_bpb: float) -> None:
    """Loss and held-out bits over the steps, and the last load of every layer, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {path} left out")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (kind, history), color in zip(histories.items(), ("tab:blue", "tab:orange")):
        tested = [r for r in history if "held_out" in r]
        left.plot([r["step"] for r in history], [r["loss"] for r in history], color=color, alpha=0.5, label=f"{kind}, training")
        left.plot([r["step"] for r in tested], [r["held_out"] for r in tested], color=color, marker="o", label=f"{kind}, held out")
    left.axhline(zlib_bpb, color="gray", linestyle="--", label="zlib -9")
    left.set(xlabel="step", ylabel="bits per byte", title="Loss")
    left.legend()
    load = torch.tensor(histories["moe"][-1]["tokens_per_expert"]).double()
    image = right.imshow(load / load.mean(1, keepdim=True), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
    right.set(xlabel="expert", ylabel="layer", title="Load at the last step (1 = even)", yticks=range(len(load)))
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=120)
    print(f"curves: {path}")


# ---- Train, evaluate, sample ----

class Interrupt:
    """Ctrl-C asks the loop to stop behind its step; a second one ends the program at once, as usual."""

    def __init__(self):
        self.asked = False

    def listen(self):
        signal.signal(signal.SIGINT, signal.default_int_handler if self.asked else self.ask)

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"stopping after this step ..\n")        # not print: the signal may have come inside of one


@torch.no_grad()
def evaluate(model, blocks: Tensor, device, dtype) -> float:
    """Bits per byte of the blocks [chunks, B, S + 1]."""
    model.eval()
    with autocast(device, dtype):
        losses = [model(block[:, :-1], block[:, 1:]) for block in blocks.to(device, torch.int64)]
    model.train()
    return torch.stack(losses).double().mean().item() / math.log(2)


def compile_model(model: nn.Module, args):
    """One graph. With --fsdp, whose hooks gather the weights between the parts, a graph a part."""
    if not args.compile:
        return model
    if not (args.fsdp and args.world > 1):
        return torch.compile(model, fullgraph=True, dynamic=False)
    for block in model.blocks:
        block.attention.compile(fullgraph=True)
        block.ffn.compile(fullgraph=True)
    return model


def train(kind: str, args, data: Tensor, blocks: Tensor, device, dtype, interrupt: Interrupt, groups: ProcessGroups):
    """-> (model, history): one dict a report, the last with the final "held_out" bits per byte. Ends the program when
    interrupted, behind a checkpoint."""
    prefix = "" if kind == "moe" else f"{kind}-"
    checkpoint, log = args.out / f"{prefix}checkpoint.pt", args.out / f"{prefix}log.jsonl"
    settings = settings_of(args, kind, data, blocks, device, dtype)

    torch.manual_seed(args.seed)
    model = ByteModel(args, kind, groups).to(device)
    total, active = parameter_counts(model, args)
    if args.fsdp and args.world > 1:
        shard(model)
    optimizer = make_optimizer(model, args)
    history, start = [], 0
    source = args.resume if kind == "moe" and args.resume != Path() else checkpoint
    if args.resume is not None and (kind == "moe" or source.is_file()):
        saved = load_checkpoint(source, settings)
        weights, moments = convert_states(model, (saved["model"], saved["optimizer"]), own_part)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        history, start = saved["history"], saved["step"]
        print(f"resumed {source} at step {start}")
    if args.rank == 0:
        log.write_text("".join(json.dumps(record) + "\n" for record in history))
    shape = f"{args.experts} experts of {args.ffn}, top {args.topk}" if kind == "moe" else f"FFN of {args.topk * args.ffn}"
    print(f"\n{kind}: {args.layers} layers of width {args.hidden}, {shape}; {total / 1e6:.2f} M parameters, "
          f"{active / 1e6:.2f} M active for a byte")
    forward, mine = compile_model(model, args), slice(args.rank * args.batch // args.world, (args.rank + 1) * args.batch // args.world)

    interrupt.listen()
    report_every, test_every = max(1, args.steps // 25), max(1, args.steps // 5)
    before = history[-1]["seconds"] if history else 0.0
    losses, began, mark = [], time.perf_counter(), time.perf_counter()
    for step in range(start + 1, args.steps + 1):
        inputs, targets = get_batch(data, args, step, device)
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate(step - 1, args)
        with autocast(device, dtype):
            loss = forward(inputs[mine], targets[mine])
        loss.backward()
        average_gradients(model, args)
        clip_gradients(model, args, groups)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "moe":
            balance_step(model)
        losses.append(loss.detach())

        last, test = step == args.steps, step == args.steps or step % test_every == 0
        if test or step == start + 1 or step % report_every == 0:
            mean_loss = mean_over_processes(torch.stack(losses).mean(), args).item() / math.log(2)
            rate = len(losses) * inputs.numel() / (time.perf_counter() - mark)
            record = dict(step=step, loss=mean_loss, tokens_per_second=round(rate))
            line = f"step {step:>{len(str(args.steps))}}/{args.steps}  loss {mean_loss:.3f}"
            if test:
                record["held_out"] = evaluate(forward, blocks, device, dtype)
                line += f"  held-out {record['held_out']:.3f}"
            if kind == "moe":
                metrics = load_balancing_metrics(model, reduce=True)
                record |= {name: metrics[name].tolist() for name in ("tokens_per_expert", "max_violation")}
            record["seconds"] = round(before + time.perf_counter() - began, 1)
            left = (args.steps - step) * inputs.numel() / rate
            line = f"{line:<50}" + ("  (with compiling)" if args.compile and step == start + 1 else f"  {rate:>9,.0f} tokens/s  {clock(left)} left")
            print(line + ("\n" + load_picture(record) if test and kind == "moe" else ""), flush=True)
            history.append(record)
            if args.rank == 0:
                with open(log, "a") as file:
                    file.write(json.dumps(record) + "\n")
            losses, mark = [], time.perf_counter()
        stop = mean_over_processes(torch.tensor(float(interrupt.asked), device=device), args).item() > 0     # on any of them
        if last or stop or step % args.save_every == 0:
            pause = time.perf_counter()
            weights, moments = convert_states(model, (model.state_dict(), optimizer.state_dict()),
                                              lambda tensor, like, _: whole(tensor, like))
            save_checkpoint(checkpoint, args, settings=settings, step=step, history=history, model=weights, optimizer=moments)
            mark += time.perf_counter() - pause
        if stop and not last:
            command = shlex.join(["python", *sys.argv, *([] if args.resume == Path() else ["--resume"])])
            print(f"saved step {step} to {checkpoint}; to go on: {command}")
            sys.exit(130)
    signal.signal(signal.SIGINT, signal.default_int_handler)                 # from here on there is nothing to save
    return model, history


def balance_step(model: nn.Module) -> None:
    """What the routers need after an optimizer step."""
    update_expert_bias(model)
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router.reset_global_aux_loss_tracker()


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, args, device, dtype, temperature: float = 0.8) -> bytes:
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.tensor(list(prompt), device=device)[None]                   # [1, S]
    for _ in range(length):
        with autocast(device, dtype), torch.compiler.set_stance("force_eager"):              # every step has its length
            logits_V = model(text[:, -args.context:])[0, -1]
        probs_V = (logits_V.cpu() / temperature).softmax(-1)
        byte = torch.multinomial(probs_V, 1, generator=generator).to(device)
        text = torch.cat((text, byte[None]), dim=1)
    return bytes(text[0, len(prompt):].tolist())


def zlib_bits_per_byte(blocks: Tensor) -> float:
    """Level 9, each block by itself, of the bytes that the model predicts: blocks [.., S + 1] without their first."""
    texts = [as_bytes(block) for block in blocks.flatten(0, 1)[:, 1:]]
    return 8 * sum(len(zlib.compress(text, 9)) for text in texts) / sum(map(len, texts))


def printable(text: bytes) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text.decode("utf-8", errors="replace"))


def main() -> None:
    args = parse_args()
    sys.stdout.reconfigure(errors="replace")                 # a sample may hold what the terminal's encoding lacks
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {args.out}: {error.strerror}")
    device, dtype = pick_device(args.dtype)
    groups = start_processes(args, device)
    data, blocks = load_data(args.data, args.context, args.out)
    print(f"{args.data or 'Python standard library'}: {len(data):,} bytes to train on, {blocks[..., 1:].numel():,} held-out "
          f"bytes to score; {device.type}, {str(dtype).removeprefix('torch.')}; loss and held-out in bits per byte")
    args.compile = args.compile and compiler_works(device)
    interrupt = Interrupt()

    model, history = train("moe", args, data, blocks, device, dtype, interrupt, groups)
    histories = {"moe": history}
    if args.baseline:
        histories[args.baseline] = train(args.baseline, args, data, blocks, device, dtype, interrupt, groups)[1]

    zlib_bpb = zlib_bits_per_byte(blocks)
    print("\nheld-out bits per byte")
    for kind, history in histories.items():
        print(f"    {kind:<8}  {history[-1]['held_out']:.3f}   {history[-1]['step']} steps, {history[-1]['seconds']:.0f} s")
    print(f"    zlib -9   {zlib_bpb:.3f}   on blocks of {args.context} bytes\n")
    if args.rank == 0:
        draw_curves(args.out / "curves.png", histories, zlib_bpb)

    prompt = as_bytes(blocks[len(blocks) // 2, 0, :64])
    print(f"\nsample, after 64 held-out bytes:\n{printable(prompt)}⟫{printable(sample(model, prompt, 400, args, device, dtype))}")
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
