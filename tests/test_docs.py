"""Tests of the examples, tables and formulas in README and docs/. They are slow tests, all of them.

    SLOW=1 python -m pytest tests/test_docs.py
"""
import ast
import copy
import dataclasses
import importlib
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import kernels
import maps
import moe
import prune
import small
from moe import (
    MoEConfig, MoELayer, TopKRouter, finish_step, load_balancing_metrics, record_routing,
    replay_routing, set_aux_loss_scale)
from ranks.parallel import ProcessGroups
from ranks.test_ranks import check_gradients, mesh_of, over_ranks, whole_and_mine
from test_moe import (
    BIASED, PRODUCTS, WAYS, TwoLayers, about_the_cpu, agree, close, compiled, fresh_start,
    grads, graphs_made, leaf, needs, same, saved_bytes, slow, small_config)
from tests.test_sources import HERE, LAYER, run

pytestmark = slow


PAGES = [HERE / "README.md", *sorted(HERE.glob("docs/*.md"))]


def example(marker: str) -> str:
    """The Python code after <!-- marker example --> in README.md or a page of docs/."""
    text = "\n".join(page.read_text() for page in PAGES)
    _, after = text.split(f"<!-- {marker} example -->")
    return re.search(r"```python\n(.*?)```", after, re.S)[1]


def test_docs_say_why_each_op_is_one():
    """The table of docs/compile.md has every custom op of the sources, and no other."""
    found = set()
    for name in (*LAYER, "maps", "small"):
        for node in ast.walk(ast.parse((HERE / f"{name}.py").read_text())):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in (
                        "op", "compat.op", "torch.library.custom_op"):
                    found.add(node.name.strip("_"))
    page = (HERE / "docs/compile.md").read_text()
    cells = re.findall(r"^\| (`[^|]*`) \|", page.split("## Why there are ops")[1], re.M)
    named = re.findall(r"`(?:\w+\.)?(\w+)`", " ".join(cells))
    assert set(named) == found


def test_docs_use(capsys):
    """README's full layer: a step changes the weights, and the metrics are printed."""
    names = {}
    code = example("use").replace("torch.compile(model, fullgraph=True)", "model")
    exec(code.replace("torch.randn(128, 4, 512)", "torch.randn(2, 3, 512)"), names)
    assert "max_violation" in capsys.readouterr().out
    assert names["optimizer"].state[names["model"].router.weight]["exp_avg"].any()


def test_docs_features():
    """The parts alone give bitwise the layer; a replay of a record gives the same choice."""
    names = {}
    exec(example("parts"), names)
    layer = MoELayer(names["config"])
    layer.router.load_state_dict(names["router"].state_dict())
    layer.experts.load_state_dict(names["experts"].state_dict())
    same(names["y"], layer(names["x"]))
    exec(example("record"), names)
    assert names["loss"] == names["model"](names["x"]).square().mean()


def test_docs_options_of_the_probs():
    """Each row of the table in docs/features.md: the layer's probs are its formula."""
    page = (HERE / "docs/features.md").read_text().split("## Options that decide the probs")[1]
    rows = re.findall(r"^\| (none|`[^|]*`) \| `([^|]*)` \| [^|]* \|$", page.split("## ")[0], re.M)
    assert len(rows) == 8
    scope = dict(
        softmax=lambda z: z.softmax(-1), sigmoid=torch.sigmoid, sqrt=torch.sqrt,
        softplus=F.softplus, normed=lambda p: p / p.sum())
    for fields, formula in rows:
        fields = {} if fields == "none" else eval(f"dict({fields.strip('`')})")
        router = TopKRouter(MoEConfig(
            hidden_size=8, ffn_hidden_size=4, num_experts=6, topk=3, init_std=1.0, **fields))
        x = torch.randn(5, 8)
        probs, indices = router.route(x)
        for z, chosen, got in zip(router.gating(x), indices, probs):
            close(got, eval(formula, scope | dict(z=z, chosen=chosen)), 1e-5)


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_docs_ops_in_a_profile(way):
    """The table of docs/features.md is what a profile shows: names, and how often. On torch 2.15
    it shows no op whose arguments are all tensors."""
    page = (HERE / "docs/features.md").read_text()
    rows = re.findall(r"\| `(moe_\w+::\w+)` \|.*\| (\d) \|\n", page)
    layer = MoELayer(small_config())
    function = WAYS[way](layer)
    x = torch.randn(6, 4, 8, requires_grad=True)
    for _ in range(2):                                       # the first step compiles
        with torch.profiler.profile() as profile:
            function(x).sum().backward()
    seen = {event.key: event.count for event in profile.key_averages()
            if event.key.startswith("moe_")}
    want = {name: int(count) for name, count in rows}
    want["moe_grouped::rows_times_weights"] += way == "plain"
    if torch.__version__[:4] == "2.15":
        del want["moe_compat::copy_after"]
    assert seen == want


def test_docs_model(tmp_path, monkeypatch, capsys):
    """It learns, and goes on from its checkpoint."""
    monkeypatch.chdir(tmp_path)
    code = example("model").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    names = {}
    exec(code, names)
    first, second, evaluation = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("step 0: loss 5.") and "max violation [" in second
    assert float(evaluation.split()[1]) < float(first.split()[3].strip(","))
    assert names["optimizer"].state_dict()["state"][0]["step"] == 20

    exec(example("prune"), names)
    assert [len(block.moe.experts.fc1) for block in names["model"].blocks] == [7, 7]
    torch._dynamo.reset()
    names["loss_of"](names["ids"]).backward()
    names["optimizer"].step()


def test_docs_small_layer():
    """README's first example is a step of training."""
    names = {}
    torch.manual_seed(0)
    exec(example("small"), names)
    torch.manual_seed(0)
    model = names["model"]
    before = small.MoE(512, 256, 64, 8)
    assert model.expert_bias.abs().max() == 1e-3 and not model.counts.any()
    for name, weight in before.named_parameters():
        assert (weight != model.get_parameter(name)).float().mean() > 0.5, name


def test_docs_score_function(monkeypatch):
    """The example's scores choose, and are normalised over the chosen; the graph agrees."""
    monkeypatch.setitem(kernels.SCORE_FUNCTIONS, "softsign", None)    # taken out at the end
    names = {}
    exec(example("score"), names)
    layer = names["layer"]
    x = torch.randn(30, 64)
    logits = layer.router.gating(x)
    scores = 0.5 + 0.5 * logits / (1 + logits.abs())
    chosen, indices = scores.topk(4)
    probs, got = layer.router.route(x)
    same(got, indices)
    close(probs, chosen / chosen.sum(1, keepdim=True), 1e-6)
    close(compiled(layer)(x), layer(x), 1e-5)


@about_the_cpu("a card keeps the index of batches too")
def test_docs_activation():
    """A function, in eager mode and in a graph; and experts that train two numbers of theirs."""
    names = {}
    exec(example("activation"), names)
    layer = names["layer"]
    x = leaf(3, 64).float()
    agree(compiled(layer), layer, x.detach().requires_grad_(), tol=1e-5)
    gate, up = leaf(3, 5), leaf(3, 5)
    close(layer.config.bound_activation.function(gate, up), 2 * gate * up)

    exec(example("xielu"), names)
    layer = names["layer"].double()
    x = leaf(3, 64)
    agree(compiled(layer), layer, x)
    layer(x).sin().sum().backward()
    assert layer.experts.slopes.grad.abs().min() > 0
    assert all(p.ndim > 0 for p in layer.parameters())           # fully_shard refuses others
    a = F.softplus(torch.tensor(0.8).double())
    for y, want in ((2.0, 4 * a + 1), (-2.0, (0.5 + a) * (math.exp(-2) - 1 + 2) - 1)):
        close(layer.experts.activate(torch.tensor(y).double()), want, 1e-7)

    exec(example("slope"), names)
    layer = names["layer"].double()
    with torch.no_grad():
        layer.experts.slope.copy_(torch.linspace(-1, 1, 16))
    x = leaf(3, 64)
    agree(compiled(layer), layer, x)
    with torch.no_grad():
        close(compiled(layer)(x), layer(x))              # few tokens
    layer(x).sin().sum().backward()
    used = layer.router.route(x)[1].unique()
    assert layer.experts.slope.grad.nonzero().flatten().equal(used)
    assert layer.experts.slope[[3, 1]].equal(prune.select_experts(
        layer, [3, 1, 0, 2]).experts.slope[:2])


def test_docs_logits():
    """The loss on them reaches the router's weight."""
    made = {}
    exec(example("logits"), made)
    router, entropy = made["layer"].router, made["entropy"]
    assert router.logits.shape == (20, 16)
    logits = router.logits.detach()
    want = torch.distributions.Categorical(logits=logits).entropy().mean()
    close(entropy.detach(), want, 1e-5)
    assert router.weight.grad.abs().sum() > 0


def test_docs_bytes_kept():
    """The formulas of results.md, and forward.md's, are the bytes that eager mode keeps."""
    T, H, F_, E, K, Fs, latent = 40, 24, 12, 10, 3, 20, 8
    sizes = dict(T=T, H=H, F=F_, E=E, K=K, Fs=Fs, ℓ=latent)
    page = (HERE / "docs/results.md").read_text()

    def value(formula: str) -> int:
        return eval(formula.replace("·", " * ").replace("−", "-"), sizes)

    def said(row: str) -> int:
        """The formula in the row that begins so; that of eager mode if it has its own."""
        [cell] = re.findall(rf"^\| {row}[^|]*\| ([^|]+) \|$", page, re.M)
        cell = re.sub(r".*in eager mode (up to )?", "", cell).removesuffix(" at most")
        return value(cell.split(";")[0])

    def kept(autocast=False, x_dtype=torch.bfloat16, **options) -> int:
        options = dict(topk=K, params_dtype=torch.bfloat16) | options
        layer = MoELayer(MoEConfig(H, F_, E, **options))
        x = torch.randn(T, H, dtype=x_dtype, requires_grad=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            return saved_bytes(lambda: layer(x), exclude=layer.parameters())

    base = said("the layer")
    assert "2·T·H + 4·T·K·F + 28·T·K + 12·E" in (HERE / "docs/forward.md").read_text()
    shared = dict(shared_expert_intermediate_size=Fs)
    wide = dict(params_dtype=torch.float32)
    top_one = dict(topk=1, pre_softmax=True)
    rows = {
        "a shared expert": kept(**shared) - base,
        "its gate": kept(**shared, shared_expert_gate=True) - kept(**shared),
        "scores other": kept(score_function="sqrtsoftplus") - base,
        "`scaling_factor`": kept(scaling_factor=2.5) - base,
        "`load_balancing_type=\"sinkhorn\"`": kept(load_balancing_type="sinkhorn") - base,
        "`bias_update=\"quantile\"`": kept(enable_expert_bias=True, bias_update="quantile") - base,
        "`capacity_factor`": kept(capacity_factor=1.0) - base,
        "`input_jitter_eps`": kept(input_jitter_eps=0.1) - base,
        "`add_bias_linear`": kept(add_bias_linear=True) - base,
        "z-loss": kept(z_loss_coeff=0.1) - base,
        "autocast": kept(autocast=True, **wide) - base,
        "`apply_probs_on": kept(**top_one, apply_probs_on="input") - kept(**top_one),
        "`latent_size`": kept(latent_size=latent) - kept(),
        "`latent_norm`": kept(latent_size=latent, latent_norm=True) - kept(latent_size=latent),
        "an activation": kept(activation="relu2") - base,
        "fp32": kept(x_dtype=torch.float32, **wide) - base,
    }
    assert kept() == base
    assert rows == {row: said(row) for row in rows}
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        loss = dict(load_balancing_type=kind, aux_loss_coeff=0.1)
        assert 4 * T * E <= kept(**loss) - base <= said("a balance loss")
    stand_in = 2                                             # a zero in the shape of fc1's output
    assert rows["an activation"] + stand_in == kept(activation_fp8_input_store=True) - base
    both = kept(autocast=True, x_dtype=torch.float32, **wide) - base
    assert both == rows["autocast"] + 4 * T * H


@about_the_cpu("it stands in for a card")
@pytest.mark.parametrize("who", ["triton", "native"])
def test_docs_bytes_kept_in_a_graph(monkeypatch, who):
    """By the layer itself: 8·E less than results.md says for eager mode, and T·K more for a mask,
    which a graph of torch 2.15 makes again."""
    PRODUCTS[who](monkeypatch)
    T, H, F_, E, K = 40, 24, 16, 10, 3
    layer = MoELayer(MoEConfig(H, F_, E, topk=K, params_dtype=torch.bfloat16))
    x = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    function = compiled(layer, "inductor")
    base = 2 * T * H + 4 * T * K * F_ + 28 * T * K + 12 * E
    kept = saved_bytes(lambda: function(x), exclude=layer.parameters())
    want = base - 8 * E + T * K
    assert kept == want if torch.__version__ < (2, 14) else want - T * K <= kept <= want
    eager = saved_bytes(lambda: layer(x), exclude=layer.parameters())
    assert eager == base + 2 * T * K * F_


def test_docs_first_compile(capsys):
    names = {}
    exec(example("first compile").replace("fullgraph=True", 'backend="aot_eager"'), names)
    assert capsys.readouterr().out.count(" s\n") == 3


def test_docs_unequal_microbatches():
    """The gradients are the mean of the microbatches' own, weighted by their tokens; without a
    balance loss on counts they are those of one batch."""
    names = {}
    exec(example("unequal"), names)
    texts = [torch.randint(256, (length + 1,)) for length in (40, 9, 25)]
    for coeff in (0.3, 0.0):
        losses = dict(load_balancing_type="aux_loss", aux_loss_coeff=coeff) if coeff else {}
        config = MoEConfig(64, 32, 8, topk=2, init_std=0.3, z_loss_coeff=0.1, **losses)
        model = torch.nn.Sequential(
            torch.nn.Embedding(256, 64), MoELayer(config), torch.nn.Linear(64, 256)).double()
        per_token = names["config"].calculate_per_token_loss
        names["model"] = copy.deepcopy(model)
        names["model"][1].set_config(
            dataclasses.replace(config, calculate_per_token_loss=per_token))
        names["backward"](texts)
        for text in texts:
            loss = F.cross_entropy(model(text[:-1]), text[1:])
            loss.backward()
            for parameter in model.parameters():
                total = getattr(parameter, "total", 0.0)
                parameter.total = total + parameter.grad * (len(text) - 1) / 74
                parameter.grad = None
        got = [parameter.grad for parameter in names["model"].parameters()]
        close(got, [parameter.total for parameter in model.parameters()], 1e-6)
        if not coeff:
            ids = torch.cat([text[:-1] for text in texts])
            labels = torch.cat([text[1:] for text in texts])
            F.cross_entropy(model(ids), labels).backward()
            close(got, [parameter.grad for parameter in model.parameters()], 1e-6)


def test_docs_rows_sent():
    """The table of docs/ranks.md: to how many ranks a token goes."""
    torch.manual_seed(0)
    logits = torch.randn(8192, 256)
    place = torch.arange(1, 257)[torch.randperm(256)]
    groups = dict(num_groups=8, group_topk=4, score_function="sigmoid")
    page = (HERE / "docs/ranks.md").read_text()
    rows = [row for row in page.splitlines()
            if row.startswith(("| random", "| power law"))]
    for row, x, options in zip(
            rows, (logits, logits, logits - 2 * place.log()), ({}, groups, {}), strict=True):
        _, indices = maps.topk_routing_with_score_function(x, 8, dense_output=True, **options)
        means = []
        for R in (2, 4, 8, 16):
            home = indices // (256 // R)
            means.append(sum((home == r).any(1).float().mean() for r in range(R)))
        assert row.endswith("| 8 | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
        if row.startswith("| random |"):
            ours = [2 * mean * (1 - 1 / R) * (4 * 512 + 8 * 8) for mean, R in zip(means, (2, 4, 8))]
            each = [2 * 8 * (1 - 1 / R) * (4 * 512 + 4) for R in (2, 4, 8)]
            said = [re.findall(r"[\d.]+\d", part)[-3:] for part in re.search(
                r"sends (.*) kB a token.*\nwould be (.*)\.", page).groups()]
            for kilobytes, values in zip(said, (ours, each)):
                assert kilobytes == [f"{value / 1e3:.1f}" for value in values]


def test_docs_links_lead_somewhere():
    """To a file that exists, and to a heading of it."""
    def anchors(page):
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if ":" not in path:
                assert not path or (page.parent / path).exists(), f"{page.name}: {target}"
                file = page.parent / path if path else page
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_docs_router_of_your_own():
    """A threshold for scores: a token has its best experts over it, in eager mode and in a graph.
    With normalised sigmoids none of the probs would reach it."""
    names = {}
    exec(example("choose"), names)
    layer = names["layer"]
    x = torch.randn(30, 1, 64)
    logits = layer.router.gating(x.flatten(0, 1)) - 0.2
    layer.router.gating = lambda input: logits.view(*input.shape[:-1], 16)
    all_probs, all_indices = TopKRouter.choose(layer.router, logits)
    probs, indices = layer.router.route(x)
    fewer = 0
    for t in range(30):
        kept = min((logits[t].sigmoid() >= 0.5).sum().item(), 4)
        fewer += kept < 4
        assert indices[t].tolist() == [*all_indices[t, :kept].tolist(), *[16] * (4 - kept)]
        same(probs[t, :kept], all_probs[t, :kept])
        same(probs[t, kept:], torch.zeros(4 - kept))
    assert 5 < fewer < 30 and (indices < 16).any()
    del layer.router.gating
    y = layer(x)
    _, indices = layer.router.route(x)
    same(compiled(layer)(x), y)
    y.sum().backward()
    assert load_balancing_metrics(layer)["tokens_per_expert"].sum() == (indices < 16).sum()
    with replay_routing(layer, [all_indices]):                   # also below the threshold
        same(layer.router.route(x)[1], all_indices)


def test_docs_expert_choice():
    """Each expert takes its C best tokens, and C is that of the tokens without padding; with a
    smaller topk a token keeps its best experts. Output and gradients are those of a loop over
    experts, the graph's too. Given indices are the choice, and a record holds what was chosen."""
    names = {}
    exec(example("expert choice"), names)
    T, E, mean = 30, 16, 2
    x = leaf(T, 64)
    padding = torch.arange(T) % 9 == 3
    for topk in (E, 3):
        config = MoEConfig(64, 32, E, topk=topk, init_std=0.3, params_dtype=torch.float64,
                           router_dtype=torch.float64)
        layer = MoELayer(config)
        layer.router = names["ExpertChoice"](config)

        def loop(x):
            scores = (x @ layer.router.weight.T).softmax(1)
            taken = torch.zeros(T, E, dtype=torch.bool)
            for e in range(E):
                own = scores[:, e].masked_fill(padding, -1.0)
                valid = T - int(padding.sum())
                taken[own.argsort(descending=True)[:math.ceil(valid * mean / E)], e] = True
            y = torch.zeros_like(x)
            for t in range(T):
                chosen = sorted(taken[t].nonzero().flatten(), key=lambda e: -scores[t, e])[:topk]
                for e in chosen:
                    gate, up = layer.experts.fc1[e] @ x[t]
                    y[t] = y[t] + scores[t, e] * (layer.experts.fc2[e] @ (F.silu(gate) * up))
            return y

        def ours(x):
            return layer(x, padding)
        upstream = torch.randn(T, 64, dtype=torch.float64)
        leaves = [x, *layer.parameters()]
        want = loop(x)
        want_grads = grads(want, leaves, upstream)
        for got in (ours(x), compiled(ours)(x)):
            close(got, want)
            close(grads(got, leaves, upstream), want_grads)

        with record_routing(layer) as record:
            ours(x)
        assert (record.indices[0] < E).sum() == (record.probs[0] > 0).sum() > 0
        other = leaf(T, 64)
        for function in (ours, compiled(ours)):
            with replay_routing(layer, record.indices), record_routing(layer) as again:
                close(function(x), want)
                function(other)                      # it would choose others itself
            same(again.indices, record.indices)
    layer = names["layer"]
    layer(torch.randn(40, 64)).sum().backward()
    assert load_balancing_metrics(layer)["tokens_per_expert"].tolist() == [[5] * 16]


@over_ranks(2)
def test_docs_loss_of_your_own(rank, ranks):
    """Two ranks with unequal parts of a sequence have the loss and the gradients of one process."""
    scope = {}
    exec(example("own loss"), scope)
    layer = scope["layer"]
    layer(torch.randn(40, 64)).sum().backward()
    groups = ProcessGroups.from_mesh(mesh_of(cp=ranks))
    config = MoEConfig(
        hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, init_std=0.5,
        params_dtype=torch.float64, router_dtype=torch.float64, load_balancing_type="aux_loss",
        aux_loss_coeff=0.1)
    whole, mine = whole_and_mine(config, groups, kind=scope["EvenScores"])
    x = torch.randn(12, 1, 6, dtype=torch.float64)
    mask = (torch.arange(12) < 2)[:, None]
    scores = (x[2:, 0] @ whole.weight.T).softmax(1).mean(0)
    loss = (scores * (4 * scores).log()).sum()
    (attached,) = torch.autograd.grad(0.1 * loss, whole.weight, retain_graph=True)
    (main,) = torch.autograd.grad(whole.eval().route(x, mask)[0].sin().sum(), whole.weight)
    whole.train().route(x, mask)[0].sin().sum().backward()
    close(whole.weight.grad, main + attached)
    mine.route(x.tensor_split([5])[rank], mask.tensor_split([5])[rank])[0].sin().sum().backward()
    check_gradients(mine, whole)
    both = [load_balancing_metrics(router, reduce=router is mine)["load_balancing_loss"]
            for router in (mine, whole)]
    close(both[0].double(), both[1].double(), 1e-5)
    close(both[1].double(), loss.detach()[None], 1e-5)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@over_ranks(2)
def test_docs_dispatcher(rank, ranks, backend):
    """It gives what all-to-alls give, gradients of router and experts included (Automodel #2995),
    eager and as one graph; unrouted assignments, overlap and latent experts too."""
    scope = {}
    exec(example("dispatcher"), scope)
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    overlap = dict(
        shared_expert_overlap=True, load_balancing_type="aux_loss", aux_loss_coeff=0.1,
        z_loss_coeff=0.1)
    drops = dict(capacity_factor=0.8, latent_size=7, add_bias_linear=True)
    for options in (overlap, drops):
        config = MoEConfig(
            hidden_size=6, ffn_hidden_size=5, num_experts=4, topk=2, score_function="sigmoid",
            shared_expert_intermediate_size=8, init_std=0.5, params_dtype=torch.float64,
            router_dtype=torch.float64, **options)
        torch.manual_seed(0)
        theirs = MoELayer(config, groups)
        mine = scope["AllGatherLayer"](config, groups)
        mine.load_state_dict(theirs.state_dict())
        torch.manual_seed(rank)
        x = leaf(5, 3, 6)
        mask = torch.rand(5, 3) < 0.2
        upstream = torch.randn(5, 3, 6, dtype=torch.float64)

        y = theirs(x, mask)
        want = [y, *grads(y, [x, *theirs.parameters()], upstream)]
        y = (compiled(mine, backend) if backend else mine)(x, mask)
        got = [y, *grads(y, [x, *mine.parameters()], upstream)]
        torch.testing.assert_close(
            got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{options}: {text}")


def test_docs_engine_record():
    """Two sequences in a pack; a dense layer; rows of -1 and of zeros, none for a last token."""
    names = {}
    exec(example("engine"), names)
    model = TwoLayers(**BIASED)
    lengths = 5, 7
    x = torch.randn(12, 8)
    with record_routing(model) as record:
        want = model(x)
    first, second = [list(own.split(lengths)) for own in record.indices]
    records = []
    for i, T in enumerate(lengths):
        layers = [first[i], torch.zeros(T, 2), second[i]]
        records.append(torch.stack(layers, dim=1)[:-1].short())        # [T - 1, layers, K]
    records[0][2, 0] = 0
    records[1][1, 2, 1] = -1
    indices = names["from_engine"]([records[0], records[1].numpy()], lengths, moe_layers=[0, 2])

    for own, got, lost in zip(record.indices, indices, ([2, 4, 11], [4, 6, 11])):
        for t in range(12):
            if t in lost:
                assert -1 in got[t], t
            else:
                same(got[t], own[t])
    with replay_routing(model, indices):
        same(model(x), want)
    same(names["agreement"](model, indices, x), torch.ones(2))

    shifted = indices.flip(0)
    shares = []
    for own, others in zip(record.indices, shifted.tolist()):
        known = [t for t in range(12) if -1 not in others[t]]
        both = [e for t in known for e in others[t] if e in own[t].tolist()]
        shares.append(len(both) / len(known) / 2)
    close(names["agreement"](model, shifted, x), torch.tensor(shares), 1e-6)
    assert max(shares) < 0.7


def test_docs_loop():
    """Four microbatches of two and one batch of eight give the same model; what is not decayed."""
    routers = []
    for pieces, size in ((4, 2), (1, 8)):
        code = example("loop").replace("microbatches = 4", f"microbatches = {pieces}")
        code = code.replace("(2, 33)", f"({size}, 33)").replace("range(20)", "range(3)")
        scope = {}
        torch.manual_seed(7)
        exec(code, scope)
        router = scope["model"][1].router
        assert router.expert_bias.abs().max() > 0, pieces
        assert router.local_tokens_per_expert.sum() == 0, pieces
        routers.append(router)
    small, large = routers
    close(small.weight, large.weight, 1e-4)
    same(small.expert_bias, large.expert_bias)

    names = {id(p): name for name, p in scope["model"].named_parameters()}
    undecayed = {names[id(p)] for p in scope["others"]}
    assert undecayed == {"1.experts.fc1_bias", "1.experts.fc2_bias", "2.bias"}
    assert len(scope["decayed"]) + len(undecayed) == len(names)


# ---- recipes: docs/recipes.md ----

def small_model(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2, **options)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), MoELayer(config))


def loss_of(model, x):
    return model(x).square().mean()


def plain_steps(model, batches, microbatches: int):
    """What each recipe of a trainer has to equal: a loop, with the sum of the microbatches."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(0, len(batches), microbatches):
        set_aux_loss_scale(model, 1 / microbatches)
        for x in batches[step:step + microbatches]:
            (loss_of(model, x) / microbatches).backward()
        optimizer.step(), optimizer.zero_grad(), finish_step(model)
    return model


BALANCED = dict(enable_expert_bias=True, load_balancing_type="aux_loss", aux_loss_coeff=0.1)


@over_ranks(2)
def test_docs_ddp(rank, ranks):
    """Two ranks are one process that takes the batches of both, as microbatches."""
    config = small_model(**BALANCED)[1].config
    torch.manual_seed(1)
    batches = list(torch.randn(12, 10, 64))                  # 3 steps of 2 microbatches on 2 ranks
    torch.manual_seed(0)
    scope = dict(torch=torch, config=config, mesh=mesh_of(dp=ranks), loss_of=loss_of, steps=3,
                 microbatches=2, batches=iter(batches[rank::2]))
    exec(example("ddp"), scope)
    torch.manual_seed(0)
    alone = ProcessGroups.from_mesh(mesh_of(dp=1, others=ranks)["dp"])
    whole = torch.nn.Sequential(MoELayer(config, alone), torch.nn.Linear(64, 64))
    plain_steps(whole, batches, 4)
    same(scope["model"][0].router.expert_bias, whole[0].router.expert_bias)
    close(list(scope["model"].parameters()), list(whole.parameters()), 1e-4)


@over_ranks(2)
def test_docs_small_loop(rank, ranks):
    """As test_docs_ddp, for small.py."""
    torch.manual_seed(1)
    batches = list(torch.randn(12, 10, 64))
    torch.manual_seed(0)
    scope = dict(
        torch=torch, loss_of=loss_of, steps=3, microbatches=2, batches=iter(batches[rank::2]))
    exec(example("small loop"), scope)
    torch.manual_seed(0)
    layer = small.MoE(64, 32, 8, topk=2, enable_expert_bias=True, aux_loss_coeff=0.1 / 4)
    whole = torch.nn.Sequential(layer, torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(whole.parameters())
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    for i, x in enumerate(batches, 1):
        (loss_of(whole, x) / 4).backward()
        if i % 4 == 0:
            optimizer.step(), optimizer.zero_grad(), layer.finish_step(group=alone)
    same(scope["layer"].expert_bias, layer.expert_bias)
    close(list(scope["model"].parameters()), list(whole.parameters()), 1e-4)


def test_docs_small_weights():
    """The same layer in one file: its output is the layer's, to the bit."""
    config = MoEConfig(64, 32, 8, topk=2, score_function="sigmoid", enable_expert_bias=True,
                       shared_expert_intermediate_size=16, params_dtype=torch.bfloat16)
    other = MoELayer(config)
    other.router.expert_bias.copy_(torch.randn(8))
    scope = dict(other=other)
    exec(example("small weights"), scope)
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    same(scope["layer"](x), other(x))


@needs("transformers")
@pytest.mark.parametrize("model_type, name", [
    ("mixtral", "MixtralSparseMoeBlock"), ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    ("deepseek_v3", "DeepseekV3MoE")])
def test_docs_small_by_hand(model_type, name):
    """The block's output."""
    import transformers
    H, W, E, K = 12, 10, 6, 3
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=H, intermediate_size=W, moe_intermediate_size=W, num_experts=E,
        num_local_experts=E, num_experts_per_tok=K, norm_topk_prob=True, n_routed_experts=E,
        n_group=3, topk_group=2, routed_scaling_factor=2.5, n_shared_experts=1)
    file = f"transformers.models.{model_type}.modeling_{model_type}"
    block = getattr(importlib.import_module(file), name)(config).eval()
    for weight in block.state_dict().values():
        torch.nn.init.normal_(weight)
    layer = small.MoE(H, W, E, K)
    if model_type == "deepseek_v3":
        layer = small.MoE(
            H, W, E, K, "sigmoid", True, shared_expert_intermediate_size=W, scaling_factor=2.5,
            num_groups=3, group_topk=2, group_score_topk=2)
    exec(example("small by hand"), dict(torch=torch, block=block, layer=layer))
    x = torch.randn(2, 7, H)
    want = block(x)
    close(layer(x), want[0] if isinstance(want, tuple) else want, 1e-5)


def test_docs_lightning(monkeypatch):
    """lightning.LightningModule and its loop are stood for by a class and a loop that call the same
    hooks in the same order: the last microbatch of a step runs inside of optimizer_step."""
    class LightningModule(torch.nn.Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(optimizer_closure)
    monkeypatch.setitem(sys.modules, "lightning", types.SimpleNamespace(
        LightningModule=LightningModule))
    config = small_model(**BALANCED)[1].config
    batches = list(torch.randn(6, 10, 64))
    scope = dict(torch=torch, config=config, loss_of=loss_of, make_mesh=lambda: None)
    code = example("lightning").replace("ProcessGroups.from_mesh(make_mesh())", "None")
    exec(code, scope)
    lit = scope["Lit"]()
    torch.manual_seed(0)
    lit.configure_model(), lit.configure_model()
    lit.trainer = types.SimpleNamespace(accumulate_grad_batches=2)
    lit.on_fit_start()
    optimizer = lit.configure_optimizers()
    for i, batch in enumerate(batches):
        def closure():
            loss = lit.training_step(batch, i) / 2
            optimizer.zero_grad() if i % 2 == 0 else None
            loss.backward()
            return loss
        if i % 2:
            lit.optimizer_step(0, i, optimizer, closure)
        else:
            closure()
    torch.manual_seed(0)
    want = plain_steps(MoELayer(config), batches, 2)
    same(lit.model.state_dict(), want.state_dict())


@needs("accelerate")
def test_docs_accelerate():
    """Six batches in steps of four: the last step has two."""
    from accelerate import state
    data = torch.randn(6, 10, 64)
    model = small_model(**BALANCED)
    want = plain_steps(copy.deepcopy(model), list(data), 4)
    state.AcceleratorState._reset_state(reset_partial_state=True)        # of other tests
    exec(example("accelerate"), dict(
        model=model, optimizer=torch.optim.AdamW(model.parameters()),
        loader=torch.utils.data.DataLoader(data, batch_size=1),
        loss_of=lambda model, x: loss_of(model, x[0])))
    state.AcceleratorState._reset_state(reset_partial_state=True)
    close(list(model.parameters()), list(want.parameters()), 1e-5)
    same(model[1].router.expert_bias, want[1].router.expert_bias)
    assert model[1].router.expert_bias.any()


def test_docs_scaler():
    """The gradients, unscaled, are those without a scaler, the balance loss's too."""
    model = small_model(**BALANCED)
    want = plain_steps(copy.deepcopy(model), batches := list(torch.randn(3, 10, 64)), 1)
    optimizer = torch.optim.AdamW(model.parameters())
    code = example("scaler").replace('torch.autocast("cuda", torch.float16)', "autocast")
    code = code.replace("1.0)", "1e9)").replace('"cuda"', '"cpu"')
    exec(code, dict(
        torch=torch, model=model, optimizer=optimizer, batches=batches, loss_of=loss_of,
        finish_step=finish_step, set_aux_loss_scale=set_aux_loss_scale,
        autocast=torch.autocast("cpu", enabled=False)))
    close(list(model.parameters()), list(want.parameters()), 1e-4)

    model = small_model(**BALANCED)
    before = copy.deepcopy(model.state_dict())
    exec(code, dict(                                         # a step that the scaler skips
        torch=torch, model=model, optimizer=torch.optim.AdamW(model.parameters()),
        batches=batches[:1], loss_of=lambda model, x: loss_of(model, x) * torch.inf,
        finish_step=finish_step, set_aux_loss_scale=set_aux_loss_scale,
        autocast=torch.autocast("cpu", enabled=False)))
    moved = [name for name, x in model.state_dict().items() if not x.equal(before[name])]
    assert moved == ["1.router.expert_bias"]


def test_docs_ema():
    """The copy has the mean weights and the model's own bias; the model's counts are its own."""
    model = small_model(**BALANCED)
    scope = dict(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), loss_of=loss_of,
        batches=torch.randn(3, 10, 64), finish_step=finish_step)
    exec(example("ema"), scope)
    copied = scope["ema"].module[1].router
    same(copied.expert_bias, model[1].router.expert_bias)
    assert copied.expert_bias.any()
    assert not torch.equal(copied.weight, model[1].router.weight)
    assert load_balancing_metrics(model)["tokens_per_expert"].sum() == 20
    model.ema = scope["ema"]
    assert load_balancing_metrics(model)["max_violation"].isnan().tolist() == [False, True]


def test_docs_tensorboard():
    """Two layers, one with fewer experts and without a loss. The writer writes into a dict."""
    written = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            written[tag] = value

        def add_histogram(self, tag, values, step):
            written[tag] = values.tolist()
    sizes = dict(hidden_size=64, ffn_hidden_size=32, topk=2)
    model = torch.nn.Sequential(
        MoELayer(MoEConfig(num_experts=8, load_balancing_type="aux_loss", aux_loss_coeff=0.1,
                           **sizes)),
        MoELayer(MoEConfig(num_experts=4, **sizes)))
    texts = torch.randn(3, 10, 64)
    exec(example("tensorboard"), dict(
        torch=torch, model=model, microbatches=texts, loss_of=loss_of, writer=Writer(), step=7))
    assert set(written) == {
        "load/0.router", "load/1.router", "max_violation/0.router", "max_violation/1.router",
        "load_balancing_loss/0.router"}
    assert sum(written["load/0.router"]) == sum(written["load/1.router"]) == 60
    losses = []
    for x in texts:
        loss_of(model, x).backward()
        losses.append(load_balancing_metrics(model)["load_balancing_loss"][0].item())
    assert written["load_balancing_loss/0.router"] == pytest.approx(sum(losses) / 3)


@needs("transformers")
def test_docs_upcycle():
    """Without noise the logits stay; with noise the experts differ."""
    import transformers
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2))
    ids = torch.randint(64, (2, 9))
    want = llama(ids).logits
    for noise in ("noise=0.0", "noise=0.1"):
        model = copy.deepcopy(llama)
        exec(example("upcycle").replace("noise=0.1", noise), dict(llama=model))
        fc1 = model.model.layers[0].mlp.experts.fc1
        assert torch.equal(fc1[0], fc1[1]) == (noise == "noise=0.0")
        if noise == "noise=0.0":
            close(model(ids).logits, want, 1e-5)


@needs("transformers", "peft")
def test_docs_lora(tmp_path):
    """A reloaded adapter has the bias, and gives the same logits."""
    import peft
    import transformers

    from models.live import replace_blocks
    base = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2))
    scope = dict(model=copy.deepcopy(base))
    exec(example("lora"), scope)
    model = scope["model"]
    ids = torch.randint(64, (2, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step(), optimizer.zero_grad(), finish_step(model)
    model.eval().save_pretrained(tmp_path)
    replace_blocks(base, enable_expert_bias=True)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    biases = [module.expert_bias for module in again.modules() if isinstance(module, moe.Router)]
    assert any(bias.any() for bias in biases)
    close(again(ids).logits, model(ids).logits, 1e-6)


def test_docs_dynamic():
    """One graph for three lengths, and with dynamic=True too; without either there are two."""
    layer = MoELayer(MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2))
    code = example("dynamic").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    mark = re.search(r"    torch._dynamo.mark_dynamic.*\n", code)[0]
    unmarked = code.replace(mark, "")
    all_axes = unmarked.replace("fullgraph", "dynamic=True, fullgraph")
    for text, graphs in [(code, 1), (unmarked, 2), (all_axes, 1)]:
        torch._dynamo.reset()
        counters.clear()
        exec(text, dict(torch=torch, layer=layer))
        assert graphs_made() == graphs, text


def test_docs_regional():
    """Three layers, compiled one by one, have one graph, and the model's output is the same. An
    input without a gradient has one more."""
    config = MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2)
    model = torch.nn.Sequential(*(MoELayer(config) for _ in range(3)))
    x = torch.randn(9, 16, requires_grad=True)
    want = model(x)
    code = example("regional").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    exec(code, dict(model=model))
    counters.clear()
    close(model(x), want, 1e-6)
    assert graphs_made() == 1
    close(model(x.detach()), want, 1e-6)
    assert graphs_made() == 2


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_docs_modes_compile(mode):
    """On a CPU they change little; outputs and gradients stay."""
    assert f'mode="{mode}"' in (HERE / "docs/recipes.md").read_text()
    layer = MoELayer(small_config(hidden_size=16, shared_expert_intermediate_size=8))
    x = torch.randn(9, 16, requires_grad=True)
    close(torch.compile(layer, fullgraph=True, mode=mode)(x), layer(x), 1e-5)
    assert graphs_made() == 1


def test_docs_caches(tmp_path):
    """A second process, whose own cache is empty, finds the code of forward and backward."""
    setup = """
import torch
from torch._dynamo.utils import counters
from moe import MoEConfig, MoELayer
layer = MoELayer(MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2))
x = torch.randn(9, 16, requires_grad=True)
"""
    found = []
    for name in ("save cache", "load cache"):
        code = setup + example(name).replace('"cache.bin"', repr(str(tmp_path / "cache.bin")))
        code += "print(counters['inductor']['fxgraph_cache_hit'])\n"
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / name[:4]))
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=HERE, env=environment, timeout=300, check=True,
            capture_output=True, text=True)
        found.append(int(done.stdout.split()[-1]))
    assert found == [0, 2]


def test_docs_decode():
    """Token by token it chooses what the model chooses for the whole sequence."""
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=16, ffn_hidden_size=8, num_experts=8, topk=2)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16), MoELayer(config), torch.nn.Linear(16, 32))
    code = example("decode").replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"')
    scope = dict(torch=torch, model=model, token=torch.tensor([3]))
    exec(code, scope)
    token = torch.tensor([3])
    for _ in range(20):
        token = model(token).argmax(-1)
    same(scope["token"], token)

    [option] = re.findall(r"options=({.*?})", (HERE / "docs/recipes.md").read_text())
    function = torch.compile(model, fullgraph=True, options=eval(option))
    with torch.no_grad():
        for T in (1, 3, 1):
            close(function(torch.arange(T)), model(torch.arange(T)), 1e-5)


def test_docs_export(tmp_path):
    """A fresh process that imports the ops gives the layer's output; one that does not cannot. The
    output of torch 2.11's AOTInductor is wrong, without an error."""
    layer = MoELayer(MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=8, topk=2))
    x = torch.randn(12, 64)
    package = tmp_path / "layer.pt2"
    exec(example("export").replace('"layer.pt2"', repr(str(package))),
         dict(torch=torch, layer=layer, x=x))
    torch.save([x, layer(x).detach()], tmp_path / "expected.pt")
    code = f"import torch\nx, want = torch.load({str(tmp_path / 'expected.pt')!r})\n"
    code += example("load").replace('"layer.pt2"', repr(str(package)))
    if torch.__version__ >= (2, 13):
        code += "torch.testing.assert_close(y, want)\n"
        code += "torch.testing.assert_close(run(x[:5]), want[:5])\n"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    done = run("-c", re.sub("import moe .*", "", code))
    assert "Could not find schema for moe_kernels" in done.stderr


def test_docs_threshold():
    """The threshold moves until a token has two experts; a graph gives the same."""
    scope = {}
    torch.manual_seed(0)
    exec(example("threshold"), scope)
    layer = scope["layer"]
    assert "router.threshold" in layer.state_dict()
    x = torch.randn(200, 64)
    with torch.no_grad():
        layer.router.weight.mul_(20)
    means = []
    for _ in range(40):
        layer(x).square().mean().backward()
        finish_step(layer)
        means.append(load_balancing_metrics(layer)["tokens_per_expert"].sum() / 200)
    assert means[0] > 2.5 and abs(means[-1] - 2) < 0.3
    same(compiled(layer)(x), layer(x))

    seen = layer.router.seen
    for way in ("plain", "non-reentrant", "reentrant", "compiled", "compiled around non-reentrant"):
        WAYS[way](layer)(x.clone().requires_grad_()).sum().backward()
        counted = load_balancing_metrics(layer)["tokens_per_expert"].sum()
        assert seen.tolist() == [counted, 200]
        seen.zero_()
    layer.eval()(x).sum().backward()
    assert not seen.any()
    given = torch.rand(200, 16).argsort(1)[:, :4]                # also below the threshold
    same(layer.router.route(x, topk_indices=given)[1], given)
