"""The code that Inductor writes for a card, and what each kernel moves. No card is needed.

    python card/code.py small
    python card/code.py layer --set shared_expert_intermediate_size=512 --set topk=4
    python card/code.py layer --source 5         the source of the fifth launch
    python card/code.py layer --machine          what the kernels become in machine code
    python card/code.py my_model.py:block        what a function of your own returns
    python card/code.py small --device cpu       the C++ that Inductor writes for this CPU
    python card/code.py products                 the machine code of grouped_triton.py

CASE is small (small.py), layer (moe.py), step2, step3, step4 (examples/steps.py), hf (the Qwen3
block of the library transformers, with grouped products) or FILE:FUNCTION. That function takes no
arguments and returns (module, input) or (module, (input, ..)). It is called with the device and
bf16 as defaults, and its tensors get no memory. An input has a gradient if it was made with
requires_grad=True.

A launch is a kernel that Inductor wrote, or an op of torch or of this project, which may be several
kernels on a card. Of an op of this project the steps inside are counted, and listed if there are
more than one; not those of a grouped product, or of an op that reads values on the host. MB count
each tensor of a launch once and whole, so a gather that misses the cache moves more. Of a Triton
kernel that somebody wrote by hand, all tensors count as read.

"grouped" are the products of rows with their experts' weights. What all other launches move stands
beside the least possible for experts like small.py's, which compute the activation again in the
backward. In numbers of 2 bytes, with T tokens, hidden size H (or latent_size), FFN size F, topk K
and N = T*K rows:

    forward    2*(T*H + N*H) + 3*N*F    a gather, a sum; the activation reads 2*F and writes F
    backward   3*(T*H + N*H) + 6*N*F    two gathers, of x and of the gradient, and a sum; the
                                        activation reads 2*F and F, writes 2*F and F

These add, their products included: a shared expert of FFN size Fs T*(3*H + 6*Fs) and
T*(5*H + 12*Fs), its gate T*H and 4*T*H (x for the score; x, the output and its gradient for the
gate's, and the gradient times the score), the projections to latent_size L and back T*2*(H + L) and
T*4*(H + L), the experts' biases nothing and T*H, since fc2's reads the output's gradient. The
router and all weights are left out, so no code reaches the least.
"""
import argparse
import ast
import functools
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # In place of this folder, in which code.py would hide Python's module of that name.
    sys.path[0] = str(ROOT)
from card import emulate                                                      # noqa: E402

SIZES = dict(hidden_size=1024, ffn_hidden_size=512, num_experts=64, topk=8)


class Refusal(Exception):
    """What was asked for cannot be, in one line."""


# ---- The cases. torch is imported late: the emulated card has to be there before it ----

def small(**sizes):
    from small import MoE
    return MoE(**sizes)


def layer(**sizes):
    import torch
    from moe import MoEConfig, MoELayer
    if sizes.get("shared_expert_overlap"):
        raise Refusal("shared_expert_overlap is True; two streams do not fit into one list")
    return MoELayer(MoEConfig(**{"params_dtype": torch.bfloat16, **sizes}))


def step(number, **sizes):
    from examples.steps import STEPS
    return list(STEPS.values())[number - 1](**sizes)


def hf(*, ffn_hidden_size, topk, **sizes):
    if importlib.util.find_spec("transformers") is None:
        raise Refusal("hf needs the library transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    config = Qwen3MoeConfig(
        moe_intermediate_size=ffn_hidden_size, num_experts_per_tok=topk, norm_topk_prob=True,
        **sizes)
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeSparseMoeBlock(config)


CASES = {
    "small": small, "layer": layer, "step2": functools.partial(step, 2),
    "step3": functools.partial(step, 3), "step4": functools.partial(step, 4), "hf": hf}


def make(case, sizes, tokens):
    """(module, inputs) of a name in CASES."""
    import torch
    try:
        module = CASES[case](**sizes)
    except (TypeError, ValueError) as error:
        raise Refusal(f"{case}: {error}") from error
    axes = [tokens] if case.startswith("step") else [tokens // 4, 4]
    return module, (torch.randn(*axes, sizes["hidden_size"], requires_grad=True),)


def load(file, function):
    """(module, inputs) of a function in a file."""
    sys.path.append(str(Path(file).resolve().parent))        # of what the file imports
    spec = importlib.util.spec_from_loader(
        "given_file", importlib.machinery.SourceFileLoader("given_file", file))
    # Dynamo looks in sys.modules for the globals of what the file defines.
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    if not hasattr(found, function):
        raise Refusal(f"{file} has no function {function}")
    module, inputs = getattr(found, function)()
    return module, inputs if isinstance(inputs, (tuple, list)) else (inputs,)


def least(sizes, tokens):
    """Direction -> bytes, by the formulas above."""
    T, H, F = tokens, sizes["hidden_size"], sizes["ffn_hidden_size"]
    L = sizes.get("latent_size") or 0
    N = T * sizes["topk"]
    moved = (T + N) * (L or H)                               # by a gather or a sum
    forward, backward = 2 * moved + 3 * N * F, 3 * moved + 6 * N * F
    Fs = sizes.get("shared_expert_intermediate_size")
    if Fs:
        forward += T * (3 * H + 6 * Fs)
        backward += T * (5 * H + 12 * Fs)
        if sizes.get("shared_expert_gate"):
            forward += T * H
            backward += 4 * T * H
    if L:
        forward += T * 2 * (H + L)
        backward += T * 4 * (H + L)
    if sizes.get("add_bias_linear"):
        backward += T * (L or H)
    return {"forward": 2 * forward, "backward": 2 * backward}


# ---- The tables ----

def short(name, most=64):
    """A long name without its middle: a kernel's number is at the end."""
    if len(name) <= most:
        return name
    start, _, number = name.rpartition("_")
    return f"{start[:most - 6]}.._{number}"


def as_text(counts):
    return ", ".join(f"{what}: {times}" for what, times in counts.items()) or "-"


def show_launches(launches):
    number = 0
    for direction, listed in launches.items():
        print(f"{direction:17}MB read     written")
        for launch in listed:
            number += 1
            print(f"{number:3}  {launch.kind:8}{launch.read / 1e6:11.2f}"
                  f"{launch.written / 1e6:12.2f}   {short(launch.name)}")
            if len(launch.inside) > 1:
                for part in launch.inside:
                    print(f"{'':11}{part.read / 1e6:12.2f}{part.written / 1e6:12.2f}     "
                          f"{short(part.name)}")
        print()


def show_machine_code(launches, capability):
    from card.machine import machine_code
    print(f"{'':10}registers   spills  shared  barriers  before loads   "
          f"{'loads by their bits':30}   stores")
    for number, launch in enumerate(itertools.chain(*launches.values()), 1):
        if launch.source:
            code = machine_code(launch.source, capability)
            print(f"{number:3}{code.registers:16}{code.spills:9}{code.shared:8}"
                  f"{code.barriers:10}{code.before_loads:14}   {as_text(code.loads):30}   "
                  f"{as_text(code.stores)}")
    print()


def show_products(capability):
    """A row for each kernel of grouped_triton.py and each setting that `tiles` may choose."""
    from card.machine import PRODUCTS, disassembled, nvidia, product, settings_of
    print(f"{'':18}rows  {'dtype':15}registers   spills  shared   multiply     "
          f"{'copies by their bits':23}stores")
    for name, fixed in PRODUCTS.items():
        for dtype, precision, settings in settings_of():
            code = disassembled(product(
                name, dtype, nvidia(capability), PRECISION=precision, **fixed, **settings))
            print(f"{name.strip('_').removesuffix('_kernel'):18}{settings['ROWS']:4}  "
                  f"{dtype + ' ' + precision:15}{code.registers:9}{code.spills:9}{code.shared:8}"
                  f"   {as_text(code.multiplies):13}{as_text(code.copies):23}"
                  f"{as_text(code.stores)}")


def show_sums(launches, least):
    both = [launch for listed in launches.values() for launch in listed]
    titles = "kernels", "ops", "grouped", "MB grouped", "MB of others"
    print(" " * 8, *[f"{title:>13}" for title in titles], "  least  ratio" if least else "", sep="")
    for direction, listed in {**launches, "both": both}.items():
        count = dict.fromkeys(("kernel", "op", "grouped"), 0)
        moved = dict.fromkeys(count, 0.0)
        for launch in listed:
            count[launch.kind] += 1
            moved[launch.kind] += (launch.read + launch.written) / 1e6
        others = moved["kernel"] + moved["op"]
        print(f"{direction:8}", *[f"{n:13}" for n in count.values()],
              f"{moved['grouped']:13.1f}{others:13.1f}", sep="", end="")
        if least:
            possible = least.get(direction, sum(least.values())) / 1e6
            print(f"{possible:7.0f}{others / possible:7.2f}", end="")
        print()


# ---- Command line ----

def value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", metavar="CASE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of small.MoE "
        "or moe.MoEConfig (may be repeated). The defaults: " + ", ".join(
            f"{name}={size}" for name, size in SIZES.items()))
    parser.add_argument("--tokens", type=int, default=8192, help="T, a multiple of 4")
    parser.add_argument("--source", type=int, metavar="NUMBER", help="a launch: print its source")
    parser.add_argument(
        "--machine", action="store_true", help="of each kernel: registers, spills, shared "
        "memory, barriers, loads and stores; with --source its instructions for memory and control "
        "in their order")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--capability", default="9,0", help="9,0 is an H100, 8,0 an A100")
    options = parser.parse_args()
    try:
        run(options)
    except Refusal as refusal:
        parser.exit(2, f"code.py: {refusal}\n")


def run(options):
    case, tokens = options.case, options.tokens
    file, _, function = case.rpartition(":")
    if case not in (*CASES, "products") and not Path(file).is_file():
        raise Refusal(
            f"{case} is unknown; known are {', '.join(CASES)}, products and FILE:FUNCTION")
    if not re.fullmatch(r"\d+,\d+", options.capability):
        raise Refusal(f"--capability is {options.capability}; needs two numbers, such as 9,0")
    if tokens < 4 or tokens % 4:
        raise Refusal(f"--tokens is {tokens}; needs a multiple of 4")
    if options.machine and options.device == "cpu":
        raise Refusal("--machine is for a card; leave --device out")
    for text in options.set:
        if "=" not in text:
            raise Refusal(f"--set is {text}; needs NAME=VALUE")
    given = dict(text.split("=", 1) for text in options.set)
    sizes = {**SIZES, **{name: value(text) for name, text in given.items()}}

    if options.device == "cuda":
        emulate.start(options.capability)
        # No kernel runs here. And with the interpreter Dynamo cannot trace calls of Triton kernels.
        os.environ.pop("TRITON_INTERPRET")
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled|TensorFloat32 tensor cores")
        emulate.install()
    if case == "products":
        return show_products(options.capability)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from card.launches import launches_of
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(options.device):
            module, inputs = make(case, sizes, tokens) if case in CASES else load(file, function)
        torch.set_default_dtype(torch.float32)
        launches = launches_of(module, inputs)

    if options.source is not None:
        both = [launch for listed in launches.values() for launch in listed]
        if not 1 <= options.source <= len(both):
            raise Refusal(f"--source is {options.source}; there are {len(both)} launches")
        launch = both[options.source - 1]
        if not launch.source:
            raise Refusal(f"launch {options.source} is the op {launch.name}; a kernel has a source")
        if options.machine:
            from card.machine import in_short, machine_code
            print(in_short(machine_code(launch.source, options.capability).order))
        else:
            print(launch.source.strip())
        return
    where = f"capability {options.capability}" if options.device == "cuda" else "this CPU"
    print(f"{case}, torch {torch.__version__}, code for {where}")
    if case in CASES:
        print(", ".join(f"{name}={size}" for name, size in sizes.items()) + f", {tokens} tokens")
    print()
    show_launches(launches)
    if options.machine:
        show_machine_code(launches, options.capability)
    show_sums(launches, least(sizes, tokens) if case in CASES else None)


if __name__ == "__main__":
    main()
