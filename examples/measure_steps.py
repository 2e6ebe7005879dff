"""What each step of steps.py keeps for the backward, and how long it takes.

    python examples/measure_steps.py [--shape T H F E K] [--dtype bf16] [--device cpu] [--loop]

--loop adds the first step compiled, which takes minutes. The columns: docs/compile.md.
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
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.steps import STEPS, Loop                                        # noqa: E402

EAGER, *_, LAST = STEPS
LOOP_COMPILED = "1 loop, compiled"


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
    show("step", f"{'ms':>9}{'/ step 5':>10}")
    for name, ms in medians.items():
        show(name, f"{ms:9.1f}{ms / medians[LAST]:10.2f}")

    # After the times: a graph for every T would take part in them.
    show("step", "graphs for 4 T")
    for name, step in steps.items():
        if step.compiled:
            show(name, step.graphs())


def show(name, columns) -> None:
    print(f"{name:21}{columns}", flush=True)


if __name__ == "__main__":
    main()
