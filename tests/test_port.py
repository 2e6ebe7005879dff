"""Tests of examples/port.py and docs/port.md: what stands in many MoE layers, and what replaces it.

    SLOW=1 python -m pytest tests/test_port.py
"""
import re
from pathlib import Path

import pytest
import torch

from examples import port
from test_moe import about_the_cpu, close, slow

HERE = Path(__file__).resolve().parents[1]
PAGE = (HERE / "docs/port.md").read_text()

# Of what the new function has more than the old one.
MORE = {"1 a loop with where": {"graphs", "kernels", "kept"}, "2 tolist, split": {"kept"},
        "3 x[mask]": {"kernels"}, "4 bincount": {"kernels"}, "10 x.float()": {"kernels"},
        "11 if T < n": {"kept"}}


def outcome(function, make, T: int) -> list:
    arguments = make(T)
    y = function(*arguments)
    leaves = [x for x in arguments if x.requires_grad]
    if not leaves:
        return [y]
    return [y, *torch.autograd.grad(y.sin().sum(), leaves)]


@pytest.mark.parametrize("name", port.PAIRS)
def test_port_pairs_compute_the_same(name):
    """Outputs and gradients, for several lengths."""
    pair = port.PAIRS[name]
    for T in (1, *port.LENGTHS):
        want = outcome(pair.today, pair.make, T)
        close([x.double() for x in outcome(pair.instead, pair.make, T)],
              [x.double() for x in want], 1e-4)


@slow
@about_the_cpu("it counts in the C++ of a CPU")
@pytest.mark.parametrize("name", port.PAIRS)
def test_port_numbers_are_those_of_the_page(name):
    """Of both functions, on every torch. The new one has less of something, and more only of what
    is said above."""
    pair = port.PAIRS[name]
    row = re.search(rf"^{re.escape(name)} +today +(.*)\n +instead +(.*)$", PAGE, re.M)
    said = [port.Made(*map(int, numbers.split())) for numbers in row.groups()]
    today, instead = [port.made_of(function, pair.make) for function in pair[:2]]
    assert [today, instead] == said
    pairs = list(zip(port.Made._fields, today, instead))
    assert {field for field, old, new in pairs if new > old} == MORE.get(name, set())
    assert any(new < old for _, old, new in pairs) or name == "1 a loop with where"
