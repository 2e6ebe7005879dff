"""What a rank holds, keeps and sends for one MoE layer of a published model, over ep ranks.

    python ranks/plan.py deepseek_v3 --ep 8 32 64 256 --tokens 8192
    python ranks/plan.py config.json --ep 8

Every rank has the same number of tokens, and every expert gets as many as the others: figures for a
router that is balanced, dropless, without balance losses. The shared expert is whole on each rank.
The formulas are those of docs/ranks.md and docs/results.md. It needs models/ beside the layer.
"""
import argparse
import json
import sys
from math import comb
from pathlib import Path
from typing import NamedTuple

import torch

if not __package__:                          # a script: the layer's files are a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __package__ and __package__ != "ranks":   # the layer is a package
    from .. import base, kernels, moe
    from ..models import atlas
else:
    import base
    import kernels
    import moe
    from models import atlas


def ranks_of_a_token(config: moe.MoEConfig, ep: int) -> float:
    """On how many ranks a token's K experts lie, in the mean, if all logits are drawn alike.

    A rank has none of the K with the probability C(E - E/R, K) / C(E, K). The best groups of
    experts are no random ones: the more good experts a group has, the sooner it is among them. For
    these 8192 tokens are drawn and routed, as in the table of docs/ranks.md.
    """
    E, K = config.num_experts, config.topk
    if config.num_groups is None:
        return ep * (1 - comb(E - E // ep, K) / comb(E, K))
    logits = torch.randn(8192, E, generator=torch.Generator().manual_seed(0))
    _, chosen = kernels.topk_routing(logits, **config.routing_options)
    home = chosen // (E // ep)
    return torch.stack([(home == rank).any(1) for rank in range(ep)]).sum().item() / len(logits)


class Rows(NamedTuple):
    """Of one rank. tokens: its own, T. received: one for each token of any rank that has experts
    here, M. assignments: of its experts. crossing: those that go to other ranks or come, m + n.
    """
    tokens: int
    received: float
    assignments: float
    crossing: float


def expected_rows(config: moe.MoEConfig, ep: int, tokens: int) -> Rows:
    rows = tokens * ranks_of_a_token(config, ep)
    return Rows(tokens, rows, tokens * config.topk, crossing=2 * rows * (1 - 1 / ep))


def _width(config):
    """Of the rows that travel: H, or ℓ with latent experts."""
    return config.latent_size or config.hidden_size


def weight_bytes(config: moe.MoEConfig, ep: int) -> tuple[int, int]:
    """(of a rank's experts, of what is whole on every rank). Gradients take as much again, the two
    moments of torch's AdamW twice as much.
    """
    with torch.device("meta"):
        layer = moe.MoELayer(config)
    experts = whole = 0
    for path, parameter in layer.named_parameters():
        owner, name = base.owner_of(layer, path)
        over, axis, _ = owner.shard(name)
        if over == "ep" and axis is not None:
            experts += parameter.nbytes // ep
        else:
            whole += parameter.nbytes
    return experts, whole


def kept_bytes(config: moe.MoEConfig, ep: int, rows: Rows, compiled: bool) -> float:
    """For the backward, to about 1 %. A graph may keep 4·T·E less."""
    T, E, K, size = rows.tokens, config.num_experts, config.topk, config.params_dtype.itemsize
    parts = config.parts                                     # fc1's output is parts · F wide
    if not compiled:
        parts += 1                                           # the activation is kept too
    kept = size * T * config.hidden_size
    kept += size * rows.assignments * config.ffn_hidden_size * parts
    if config.apply_probs_on == "input" and ep == 1 and not compiled:
        kept += size * T * _width(config)                    # x · prob
    if ep == 1:
        kept += 28 * T * K
    else:
        kept += 12 * T * K + 16 * T * min(K, ep)
        kept += rows.received * (size * _width(config) + 24 * K)
        probs = config.probs_dtype or config.router_dtype
        if probs.itemsize == 2 and not compiled:             # fp32 ones arrive; a copy is kept
            kept -= 6 * rows.received * K
    over_chosen = config.score_function == "softmax" and not config.pre_softmax
    if not over_chosen or config.norm_topk_prob is not None:
        kept += 4 * T * E                                                 # the scores
    if config.add_bias_linear:
        kept += 4 * T * E + 8 * T * K
    if config.latent_size:
        kept += size * T * config.latent_size * (1 if ep > 1 else 2)
    if config.latent_norm:                                   # eager mode computes it in fp32
        kept += 4 * T + T * config.latent_size * (size if compiled else 2 * max(size, 4))
    if config.shared_expert_intermediate_size:
        kept += size * T * config.shared_expert_intermediate_size * parts
    if config.shared_expert_gate:
        kept += size * T * (config.hidden_size + 1)
    return kept


def sent_bytes(config: moe.MoEConfig, ep: int, rows: Rows) -> float:
    """To other ranks, forward and backward. In the mean as many arrive."""
    beside = 8 * config.topk                                 # probs, numbers; their gradients
    if config.apply_probs_on == "input":                     # probs that are all 1 have none
        beside /= 2
    row = 2 * _width(config) * config.params_dtype.itemsize + beside
    return rows.crossing * row + 16 * (ep - 1)


def column(config: moe.MoEConfig, ep: int, tokens: int) -> dict[str, str]:
    """Of the table: a line's name -> its figure."""
    rows = expected_rows(config, ep, tokens)
    experts, others = weight_bytes(config, ep)
    megabytes = {
        "weights of experts": experts, "other weights": others,
        "AdamW": 2 * (experts + others),
        "kept, compiled": kept_bytes(config, ep, rows, compiled=True),
        "kept, eager": kept_bytes(config, ep, rows, compiled=False),
        "sent, and received": sent_bytes(config, ep, rows)}
    return {
        "": f"ep {ep}",
        "experts held": f"{config.num_experts // ep}",
        "ranks that a token goes to": f"{rows.received / tokens:.2f}",
        "rows received": f"{rows.received:,.0f}",
        "rows of an expert": f"{rows.assignments * ep / config.num_experts:,.0f}",
        **{f"{name}, MB": f"{size / 1e6:,.0f}" for name, size in megabytes.items()}}


def table(config: moe.MoEConfig, sizes: list[int], tokens: int) -> str:
    """A column for each of these sizes of ep; a last line says which do not divide E. ValueError:
    none does; no tokens.
    """
    E = config.num_experts
    fitting = [ep for ep in sizes if ep > 0 and E % ep == 0]
    others = ", ".join(str(ep) for ep in sizes if ep not in fitting)
    left_out = f"{others} of --ep: needs divisors of E = {E}"
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; needs a number from 1 on")
    if not fitting:
        raise ValueError(left_out)
    columns = [column(config, ep, tokens) for ep in fitting]
    lines = [f"{name:26}" + "".join(f"{cells[name]:>10}" for cells in columns)
             for name in columns[0]]
    return "\n".join([*lines, f"left out: {left_out}"] if others else lines)


def plan(word: str, sizes: list[int], tokens: int) -> str:
    """The table of a known type or of a config.json, below a line that says whose it is."""
    if word.endswith(".json"):
        title, hf_config = word, dict(json.loads(Path(word).read_text()))
    else:
        title, hf_config = atlas.published_config(word)
        if title == "no config found":
            raise ValueError("no config of it was found; needs a config.json in place of the type")
    _, usual = atlas.readings_of(hf_config)[-1]              # the most frequent kind of layer
    usual.refuse(usual.of_the_block)
    config = moe.MoEConfig(**usual.fields)
    layers = f", one of {len(usual.sparse)} layers" if usual.sparse else ""
    dtype = str(config.params_dtype).removeprefix("torch.")
    return "\n".join([
        f"{title}{layers}",
        f"H={config.hidden_size} F={config.ffn_hidden_size} E={config.num_experts} "
        f"K={config.topk}, {dtype}; T={tokens} on each rank",
        table(config, sizes, tokens)])


def main() -> None:
    """A type that is unknown, or a config that cannot be read or expressed, gets one line on stderr
    and the exit status 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", metavar="TYPE or config.json")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 32, 64, 256])
    parser.add_argument("--tokens", type=int, default=8192, help="of one rank")
    args = parser.parse_args()
    try:
        print(plan(args.word, args.ep, args.tokens))
    except (OSError, ValueError, TypeError) as refused:      # TypeError: the file is no dict
        print(f"{args.word}: {' '.join(str(refused).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
