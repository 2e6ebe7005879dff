"""From a loop to the layer in four steps. Each is a class that computes the same, with one change.

    python examples/steps.py [--shape T H F E K] [--dtype bf16] [--device cpu] [--loop]

prints what each step keeps for the backward and how long it takes. Why each change helps:
docs/compile.md. --loop adds the first step compiled, which takes minutes. T tokens, H hidden size,
E experts, K experts per token, N = T·K rows, M rows of one expert, F FFN size of an expert (W where
F is torch.nn.functional). Capitals at the end of a name are the tensor's axes.
"""
import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.metrics
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import small                                                                  # noqa: E402


# ---- The steps ----

class Loop(nn.Module):
    """1. A loop over the experts, each with its tokens.

    How many tokens an expert has is known only at run time: for each expert the host reads it, also
    in a graph. With fullgraph=True the compiler makes one graph of the loop, with code for each
    expert by itself. Without fullgraph=True the graph breaks at `torch.where`.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, topk: int):
        super().__init__()
        H, W, E = hidden_size, ffn_hidden_size, num_experts
        self.topk = topk
        self.router = nn.Parameter(0.02 * torch.randn(E, H))
        self.fc1 = nn.Parameter(0.02 * torch.randn(E, 2, W, H))                # gate and up
        self.fc2 = nn.Parameter(0.02 * torch.randn(E, H, W))

    def forward(self, x_TH: Tensor) -> Tensor:
        probs_TK, indices_TK = self.route(x_TH)
        y_TH = torch.zeros_like(x_TH)
        for e in range(len(self.fc1)):
            token_M, k_M = torch.where(indices_TK == e)
            hidden = F.linear(x_TH[token_M], self.fc1[e].flatten(0, 1))
            rows_MH = F.linear(self.swiglu(hidden), self.fc2[e])
            y_TH.index_add_(0, token_M, (rows_MH * probs_TK[token_M, k_M, None]).to(x_TH.dtype))
        return y_TH

    def route(self, x_TH):
        chosen_TK, indices_TK = self.logits(x_TH).topk(self.topk)
        return chosen_TK.softmax(-1), indices_TK

    def logits(self, x_TH):
        return x_TH.float() @ self.router.float().t()

    def swiglu(self, hidden, prob=1.0):
        gate, up = hidden.float().chunk(2, -1)
        return (F.silu(gate) * up * prob).to(hidden.dtype)


class Sorted(Loop):
    """2. The rows of an expert lie side by side, so one grouped product takes all experts.

    Every shape is known, so it is one graph. This is what one writes first: some twenty lines.
    Compiled it keeps the gathered rows, the outputs of both products and the activation.
    """

    def forward(self, x_TH: Tensor) -> Tensor:
        probs_TK, indices_TK = self.route(x_TH)
        order_N, offsets_E = self.sort(indices_TK)
        token_N = order_N // self.topk
        hidden = F.grouped_mm(x_TH[token_N], self.fc1.flatten(1, 2).mT, offs=offsets_E)
        rows_NH = F.grouped_mm(self.swiglu(hidden), self.fc2.mT, offs=offsets_E)
        rows_NH = (rows_NH * probs_TK.flatten()[order_N, None]).to(x_TH.dtype)
        return torch.zeros_like(x_TH).index_add(0, token_N, rows_NH)

    def sort(self, indices_TK):
        """(order [N]: row -> assignment t·K + k, offsets [E]: where the rows of an expert end)."""
        ids_N, experts_E = indices_TK.flatten(), torch.arange(len(self.fc1), device=self.fc1.device)
        offsets_E = (ids_N[:, None] == experts_E).sum(0).cumsum(0).int()
        return ids_N.argsort(stable=True), offsets_E


def again(function, *args):
    """function(*args), computed once more in the backward: only the arguments are kept."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Checkpoints(Sorted):
    """3. The prob goes in front of fc2, and two checkpoints say what to keep: x and fc1's output.

    A prob behind fc2 needs fc2's output for its gradient; in front of it the activation is enough,
    and that is made again. The compiler repeats no product for it: it keeps what a product needs
    and computes the rest in the kernels that read it.
    """

    def forward(self, x_TH: Tensor) -> Tensor:
        chosen_TK, indices_TK = again(self.logits, x_TH).topk(self.topk)
        order_N, offsets_E = self.sort(indices_TK)
        prob_N1 = chosen_TK.softmax(-1).flatten()[order_N, None]
        hidden = again(self.up, x_TH, order_N, offsets_E)                      # [N, 2F]
        rows_NH = again(self.down, hidden, prob_N1, offsets_E)
        # The rows of each token, added in their order
        inverse_TK = order_N.argsort().view_as(indices_TK)           # assignment -> row
        return sum(rows_NH[row_T].float() for row_T in inverse_TK.unbind(1)).to(x_TH.dtype)

    def up(self, x_TH, order_N, offsets_E):
        rows_NH = x_TH[order_N // self.topk]
        return F.grouped_mm(rows_NH, self.fc1.flatten(1, 2).mT, offs=offsets_E)

    def down(self, hidden, prob_N1, offsets_E):
        act_NF = self.swiglu(hidden, prob_N1)
        return F.grouped_mm(act_NF, self.fc2.mT, offs=offsets_E)


# 4. small.py: its `experts` has the same checkpoints. Autograd's gradient of x[token] adds rows to
# tokens with atomics, in another order in each run. But which rows a token has is known, so small's
# with_gradient makes it a gather too. Its GroupedLinear gives a weight's gradient the weight's
# layout.
STEPS = {"1 loop, eager": Loop, "2 sorted rows": Sorted, "3 two checkpoints": Checkpoints,
         "4 small.py": small.MoE}
EAGER = "1 loop, eager"
LOOP_COMPILED = "1 loop, compiled"


# ---- The table ----

def bytes_kept(forward, parameters) -> int:
    """Bytes of the storages that forward() keeps for the backward, but for the parameters'."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = forward()
    for parameter in parameters:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


# What a graph runs: kernels that the compiler wrote, and ops, in Inductor's Python code.
CALLS = re.compile(r"\b(?:cpp_fused\w*|triton_\w+\.run|(?:extern_kernels|torch\.ops)[\w.]+)\(")


class Measured:
    """A step on one input."""

    def __init__(self, layer: nn.Module, x: Tensor, compiled: bool):
        self.layer = layer
        self.x = x
        self.parameters = list(layer.parameters())
        self.compiled = compiled
        self.function = torch.compile(layer, fullgraph=True) if compiled else layer
        self.ms = []
        torch._inductor.metrics.reset()
        codes = []
        with mock.patch.object(GraphLowering, "save_output_code", codes.append):
            start = time.perf_counter()
            first = self.step()
            self.synchronize()
            self.first_call = time.perf_counter() - start        # seconds
        counts = [len(CALLS.findall(code)) for code in dict.fromkeys(codes)]
        self.kernels = " + ".join(map(str, counts))              # forward, backward
        self.loops = torch._inductor.metrics.generated_kernel_count
        self.kept = bytes_kept(self.forward, self.parameters)
        self.repeats = all(torch.equal(*pair) for _ in range(5) for pair in zip(first, self.step()))

    def graphs(self) -> int:
        """After four numbers of tokens: that of x is the first."""
        before = counters["stats"]["unique_graphs"]
        for part in (2, 3, 4):
            self.step(len(self.x) // part)
        return 1 + counters["stats"]["unique_graphs"] - before

    def forward(self) -> Tensor:
        return self.function(self.x.clone().requires_grad_())

    def step(self, tokens: int | None = None) -> list[Tensor]:
        """The output, and the gradients of x and of the parameters."""
        x = self.x[:tokens].clone().requires_grad_()
        y = self.function(x)
        return [y, *torch.autograd.grad(y, [x, *self.parameters], torch.ones_like(y))]

    def synchronize(self) -> None:
        torch.get_device_module(self.x.device).synchronize()

    def time(self) -> None:
        self.synchronize()
        start = time.perf_counter()
        self.step()
        self.synchronize()
        self.ms.append(1e3 * (time.perf_counter() - start))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=5, default=[2048, 512, 256, 64, 8],
                        metavar=("T", "H", "F", "E", "K"))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loop", action="store_true",
                        help="also the loop, compiled: minutes for 64 experts")
    args = parser.parse_args()
    torch._inductor.config.force_disable_caches = True       # a cache counts other kernels
    T, *sizes = args.shape
    try:
        layers = {name: step(*sizes) for name, step in STEPS.items()}
        if args.loop:
            layers[LOOP_COMPILED] = Loop(*sizes)                 # last, since it takes longest
    except ValueError as error:
        parser.error(f"--shape is {args.shape}: {error}")
    print(f"T, H, F, E, K = {args.shape}, {args.dtype}, {args.device}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")
    torch.manual_seed(0)
    weights = Loop(*sizes).state_dict()
    x = torch.randn(T, sizes[0]).to(args.device, DTYPES[args.dtype])
    # What a process loads at its first compile belongs to no row.
    torch.compile(nn.Linear(1, 1).to(x))(x[:, :1]).sum().backward()
    # Each row is printed as soon as it is measured, so that an interrupt loses none.
    steps = {}
    show("step", f"{'kB kept a token':>16}   the same bits   kernels   loops   first call, s")
    for name, layer in layers.items():
        print(f"{name} ..", file=sys.stderr)
        layer.load_state_dict(weights)
        try:
            step = steps[name] = Measured(layer.to(x), x, compiled=name != EAGER)
        except RuntimeError as error:                        # F.grouped_mm refuses this dtype
            while error.__context__ is not None:             # the compiler's error hides that one
                error = error.__context__
            show(name, f"refused: {error}")
            continue
        compiled = "-"
        if step.compiled:
            compiled = f"{step.kernels:10}{step.loops:<8}{step.first_call:.1f}"
        bits = "yes" if step.repeats else "no"
        show(name, f"{step.kept / T / 1e3:16.2f}   {bits:16}{compiled}")

    for _ in range(20):                                      # in turn
        for step in steps.values():
            if sum(step.ms) < 5e3:
                step.time()
    medians = {name: statistics.median(step.ms) for name, step in steps.items()}
    show("step", f"{'ms':>9}{'/ step 4':>10}")
    for name, ms in medians.items():
        show(name, f"{ms:9.1f}{ms / medians['4 small.py']:10.2f}")

    # After the times: a graph for every T would take part in them.
    show("step", "graphs for 4 T")
    for name, step in steps.items():
        if step.compiled:
            show(name, step.graphs())


def show(name, columns) -> None:
    print(f"{name:21}{columns}", flush=True)


if __name__ == "__main__":
    main()
