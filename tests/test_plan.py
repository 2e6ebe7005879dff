"""Tests of plan.py: its bytes and rows are those that are counted on ranks.

    python -m pytest tests/test_plan.py

It needs the whole repository.
"""
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from models import atlas
from moe import MoEConfig, MoELayer
from ranks import parallel, plan
from ranks.test_ranks import groups_over, in_threads, over_ranks
from test_moe import about, about_the_cpu, compiled, saved_bytes, slow

HERE = Path(__file__).resolve().parents[1]


def small_layer_of(model_type: str, **sizes) -> MoEConfig:
    """Of a published model's kind, but small."""
    model_type, _, dtype = model_type.partition(" in ")
    if dtype:
        sizes = dict(params_dtype=getattr(torch, dtype), **sizes)
    fields = atlas.readings_of(atlas.published_config(model_type)[1])[-1][1].fields
    small = dict(hidden_size=64, ffn_hidden_size=80, num_experts=16, topk=4)
    if fields.get("num_groups"):
        small |= dict(num_groups=4, group_topk=2)
    if fields.get("shared_expert_intermediate_size"):
        small |= dict(shared_expert_intermediate_size=56)
    if fields.get("latent_size"):
        small |= dict(latent_size=24)
    if fields.get("apply_probs_on") == "input":
        small |= dict(topk=1)
    return MoEConfig(**{**fields, **small, **sizes})


def layer_and_tokens(config: MoEConfig, groups=None) -> tuple[MoELayer, torch.Tensor]:
    """512 tokens that choose among all experts alike."""
    layer = MoELayer(config, groups)
    orthogonal = torch.nn.init.orthogonal_(torch.empty(layer.router.weight.shape))
    layer.router.weight.data.copy_(orthogonal)               # so logits are independent, and alike
    return layer, torch.randn(512, 64, dtype=config.params_dtype, requires_grad=True)


def bytes_kept(function, layer, *args) -> int:
    return saved_bytes(lambda: function(*args), exclude=layer.parameters())


@about_the_cpu("so is the group of threads")
@pytest.mark.parametrize("model_type", [
    "qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_k3", "kimi_k3 in float32", "llama4_text",
    "qwen3_next"])
def test_plan_is_what_ranks_count(model_type, monkeypatch):
    """On 8 ranks: weights, moments and the sum of the bytes sent, to the byte; bytes kept to 1 %,
    and the mean of the rows that a rank receives to 2 %."""
    config, ep = small_layer_of(model_type), 8
    sent = [0] * ep
    all_to_all = parallel.all_to_all

    def counted(rows, send, receive, group):
        me = group.rank()
        sent[me] += (sum(send) - send[me]) * rows[:1].nbytes
        return all_to_all(rows, send, receive, group)
    monkeypatch.setattr(parallel, "all_to_all", counted)

    def step(rank):
        layer, x = layer_and_tokens(config, groups_over(ep=ep))
        found = []
        layer.dispatch = lambda *args: found.append(MoELayer.dispatch(layer, *args)) or found[-1]
        kept = bytes_kept(layer, layer, x)
        sent[rank] = 0
        layer(x).sum().backward()
        dispatched = found[-1]
        send, receive, _ = dispatched.splits
        crossing = sum(send) - send[rank] + sum(receive) - receive[rank]
        rows = plan.Rows(len(x), sum(receive), dispatched.assignments, crossing)
        assert kept == pytest.approx(plan.kept_bytes(config, ep, rows, compiled=False), rel=0.01)

        held = [0, 0]
        for name, parameter in layer.named_parameters():
            held[not name.startswith("experts.")] += parameter.nbytes
        assert (*held,) == plan.weight_bytes(config, ep)
        optimizer = torch.optim.AdamW(layer.parameters())
        optimizer.step()
        assert 2 * sum(held) == sum(
            state[key].nbytes for state in optimizer.state.values() for key in MOMENTS)
        return rows
    found = in_threads(ep, step)
    assert sum(sent) == sum(plan.sent_bytes(config, ep, rows) for rows in found)
    mean = [sum(numbers) / ep for numbers in zip(*found)]
    assert mean == pytest.approx(plan.expected_rows(config, ep, 512), rel=0.02)

    layer, x = layer_and_tokens(config)
    alone = plan.kept_bytes(config, 1, plan.expected_rows(config, 1, 512), compiled=False)
    assert bytes_kept(layer, layer, x) == pytest.approx(alone, rel=0.01)


MOMENTS = "exp_avg", "exp_avg_sq"


@slow
@about_the_cpu("its graphs are those of a CPU")
@over_ranks(2)
def test_plan_is_what_a_graph_keeps(rank, ranks):
    """What is said, to 1 %."""
    for model_type in ("qwen3_moe", "kimi_k3 in float32", "llama4_text"):
        config = small_layer_of(model_type)
        layer, x = layer_and_tokens(config, groups_over(ep=ranks))
        kept = torch.tensor(bytes_kept(compiled(layer, "inductor"), layer, x))
        mean = parallel.all_sum(kept, layer.pg_collection.ep).item() / ranks
        rows = plan.expected_rows(config, ranks, len(x))
        with about(model_type, mean, plan.kept_bytes(config, ranks, rows, compiled=True)):
            assert 0.94 < mean / plan.kept_bytes(config, ranks, rows, compiled=True) < 1.01


def printed(capsys, monkeypatch, *arguments) -> tuple[str, str, int]:
    """(stdout, stderr, exit status) of `python ranks/plan.py` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
    status = 0
    try:
        runpy.run_path(plan.__file__, run_name="__main__")
    except SystemExit as stopped:
        status = stopped.code
    return (*capsys.readouterr(), status)


def test_plan_in_the_docs(capsys, monkeypatch):
    """docs/ranks.md has what `python ranks/plan.py` prints."""
    page = (HERE / "docs/ranks.md").read_text()
    blocks = re.findall(r"^\$ python ranks/plan.py(.*)\n((?:[^$`].*\n)+)", page, re.M)
    assert [arguments.split()[0] for arguments, _ in blocks] == ["deepseek_v3", "qwen3_moe"]
    for arguments, want in blocks:
        assert printed(capsys, monkeypatch, *arguments.split()) == (want, "", 0)


def test_plan_refuses(capsys, monkeypatch, tmp_path):
    """One line, and exit status 2."""
    file = tmp_path / "config.json"
    file.write_text("[1]")
    for arguments, phrase in [
            (["mixtrall"], "'mixtrall'"), (["phimoe"], "SparseMixer"), ([file], "dict"),
            ([tmp_path / "none.json"], "No such file"),
            (["flint"], "no config of it was found"),
            (["qwen3_moe", "--ep", "0", "3"], "0, 3 of --ep: needs divisors of E = 128"),
            (["qwen3_moe", "--tokens", "-1"], "tokens is -1; needs a number from 1 on")]:
        out, err, status = printed(capsys, monkeypatch, *arguments)
        assert (out, err.count("\n"), status) == ("", 1, 2) and phrase in err, err
