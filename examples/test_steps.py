"""Tests of examples/steps.py and measure_steps.py. They are slow tests, all of them.

    SLOW=1 python -m pytest examples/test_steps.py
"""
import copy
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import kernels
from examples import measure_steps, steps
from test_moe import close, compiled, fresh_start, grads, graphs_made, slow

pytestmark = slow


def of_a_step(layer, x: Tensor, function=None) -> list[Tensor]:
    """The output and the gradients of x and of the parameters, in fp64."""
    x = x.detach().to(layer.router.dtype).requires_grad_()
    y = layer(x) if function is None else function(x)
    upstream = torch.linspace(-1, 1, y.numel()).view_as(y)
    found = [y, *grads(y, [x, *layer.parameters()], upstream.to(y.dtype))]
    return [tensor.detach().double() for tensor in found]


@pytest.mark.parametrize("name", [*steps.STEPS, measure_steps.LOOP_COMPILED])
def test_steps_compute_the_loop(name):
    """Each against the plain loop in fp64, in eager mode in fp32, and compiled in bf16; on rounded
    weights, so that all choose the same."""
    T, H, W, E, K = 24, 16, 8, 5, 3
    torch.manual_seed(0)
    step = steps.STEPS.get(name, steps.Loop)(H, W, E, K)
    step.load_state_dict({key: (tensor * 20).bfloat16() for key, tensor in
                          steps.Loop(H, W, E, K).state_dict().items()})
    x = torch.randn(T, H).bfloat16()
    exact = copy.deepcopy(step).double()
    want = of_a_step(exact, x, lambda x: kernels.moe_loop(
        x, exact.router, exact.fc1, exact.fc2, K))
    close(of_a_step(step, x), want, 1e-5)
    step.bfloat16()
    function = None if name == measure_steps.EAGER else compiled(step)
    for got, right in zip(of_a_step(step, x, function), want, strict=True):
        assert (got - right).norm() < 2e-2 * right.norm()


def test_steps_graphs_of_the_loop():
    """With fullgraph=True one graph, and a second for all other T, with the host's read and the
    products of each expert. Without it the graph breaks."""
    E = 5
    targets = []

    def count(gm, inputs):
        targets.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward
    loop = steps.Loop(16, 8, E, 2)
    for name, options in (("one", dict(fullgraph=True)), ("parts", {})):
        torch._dynamo.reset()
        counters.clear()
        function = torch.compile(loop, backend=aot_autograd(fw_compiler=count), **options)
        x = torch.randn(24, 16)
        close(function(x), loop(x), 1e-5)
        if name == "one":
            assert graphs_made() == 1
            forward = targets[0]
            assert forward.count("aten.nonzero.default") == E
            assert forward.count("aten.mm.default") == 2 * E + 1                 # and the router's
            function(torch.randn(20, 16)), function(torch.randn(9, 16))
            assert graphs_made() == 2
    assert graphs_made() > 2


def test_steps_print_their_tables(capfd, monkeypatch):
    """A row for each step: its bytes, bits, kernels and first call, its time over the last's, its
    graphs; with --loop one for the compiled loop. In fp32 a graph of torch 2.13 refuses
    F.grouped_mm, and its rows say so. An interrupt loses no row before it."""
    def run(dtype, *options):
        arguments = ["--shape", *"64 32 16 4 2".split(), "--dtype", dtype, *options]
        monkeypatch.setattr(sys, "argv", ["measure_steps.py", *arguments])
        torch._dynamo.reset()
        measure_steps.main()

    def tables(dtype):
        """Of what was printed: the words of each row, by the step's name."""
        header, *lines = capfd.readouterr().out.splitlines()
        assert header.startswith(f"T, H, F, E, K = [64, 32, 16, 4, 2], {dtype}, cpu")
        assert not any("TORCHDYNAMO_VERBOSE" in line for line in lines)
        found = []
        for line in lines:
            name, words = line[:21].strip(), line[21:].split()
            if name == "step":
                found.append({})
            else:
                found[-1][name] = words
        return found

    def interrupt(step):
        raise KeyboardInterrupt

    loop, two, three, four, last = steps.STEPS
    with torch._inductor.config.patch(force_disable_caches=False):
        run("bf16", "--loop")
        kept, times, graphs = tables("bf16")
        assert [*kept] == [*times] == [*steps.STEPS, measure_steps.LOOP_COMPILED]
        assert kept[loop][1:] == ["yes", "-"]
        assert kept[four][1] == kept[last][1] == "yes"
        assert all(float(kept[name][-1]) > 0.5 for name in [*kept][1:])           # seconds
        kernels = {name: int(words[2]) + int(words[4]) for name, words in kept.items() if words[3:]}
        assert kernels[measure_steps.LOOP_COMPILED] > 2 * kernels[last]
        each = [float(kept[name][0]) for name in steps.STEPS]
        assert each[1] > 2 * each[2] and each[2:] == pytest.approx([each[-1]] * 3, rel=0.1)
        assert times[last][1] == "1.00" and graphs == {
            name: ["2"] for name in [*kept][1:]}

        monkeypatch.setattr(measure_steps.Measured, "graphs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run("fp32")
        kept, times, graphs = tables("fp32")
    refused = [name for name, words in kept.items() if words[0] == "refused:"]
    assert [*kept] == [*steps.STEPS] and times[last][1] == "1.00" and not graphs
    assert [*times] == [name for name in steps.STEPS if name not in refused]
    if torch.__version__[:4] == "2.13":
        assert refused == [two, three, four]
