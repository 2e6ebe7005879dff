"""The published routers in words: the rows of families.FAMILIES as formulas.

    python families.py                        # the table of docs/routers.md
    python families.py TYPE [config.json]     # one router, with the numbers of a config

Nothing here is written for a family. The text is made of the knobs of its row, so a formula says
what config_from_hf builds. It is Python, but for its functions:

    best_groups(rank, G, k, n)   rank, with -inf outside of the k best of G groups of experts; a
                                 group is as good as the sum of its n best
    top(rank, K)                 the places of the K largest
    experts(chosen, x)           the outputs of the chosen experts
"""
import dataclasses
import json
import re
import sys
from pathlib import Path

if __package__:
    from . import families, moe
else:
    import families
    import moe


# Three columns: when, the column of the table, the formula. "when" is a field of MoEConfig or one
# of _facts; with "not" it is the opposite. {..} is the value of one.
FORMULAS = """
    always             | -       | x: {hidden_size} wide
    not router_bias    | -       | logits = x @ W.T
    router_bias        | scores  | logits = x @ W.T + b
    not over_chosen    | scores  | scores = {score_function}(logits)
    not by_score       | choice  | rank = logits
    by_score           | choice  | rank = scores
    enable_expert_bias | choice  | rank = rank + expert_bias
    num_groups         | choice  | rank = best_groups(rank, {num_groups}, {kept}, {summed})
    always             | choice  | chosen = top(rank, {topk})
    has_table          | choice  | in hash layers: chosen = table[token]
    over_chosen        | probs   | probs = softmax(logits[chosen])
    not over_chosen    | probs   | probs = scores[chosen]
    normed             | probs   | probs = probs / (sum(probs) + {norm_eps})
    may_be_normed      | probs   | not divided by their sum
    scaling_factor     | probs   | probs = probs * {scaling_factor}
    always             | experts | {num_experts} experts, {activation}, {ffn_hidden_size} wide
    constants          | experts | {constants}
    add_bias_linear    | experts | with biases
    latent_size        | special | z = latent_down(x), {latent_size} wide
    not on_input       | -       | y = sum(probs * experts(chosen, {z}))
    on_input           | special | y = sum(experts(chosen, probs * {z}))
    latent_norm        | special | y = rms_norm(y)
    latent_size        | special | y = latent_up(y)
    shared             | shared  | y = y + shared_expert(x), {shared_size} wide
    gated_shared       | shared  | y = y + sigmoid(x @ g) * shared_expert(x), {shared_size} wide
    after              | special | behind the layer: y = {after}(y)
"""
FORMULAS = [re.split(r" *\| *", line.strip()) for line in FORMULAS.strip().splitlines()]
COLUMNS = ("scores", "choice", "probs", "experts", "shared", "special")

# What stands for a size in the table.
LETTERS = {"num_experts": "E", "topk": "K", "ffn_hidden_size": "F"}


def _facts(row: families.Family, values: dict) -> dict:
    """What the formulas name: all fields of MoEConfig, and what follows from them."""
    facts = families.meaning(values)
    over_chosen = (facts["score_function"] == "softmax" and not facts["pre_softmax"]
                   and values.get("norm_topk_prob") is None)
    size, gate = facts["shared_expert_intermediate_size"], facts["shared_expert_gate"]
    known = moe.kernels.constants_of(facts["activation"])
    constants = [f"{constant} = {values[field]}" for field, constant in moe._CONSTANTS.items()
                 if constant in known and values.get(field) is not None]
    narrow = row.precision.split()[1] == "model"
    return facts | {
        "always": True,
        "over_chosen": over_chosen,
        "by_score": facts["enable_expert_bias"] or facts["num_groups"] or narrow,
        "kept": facts["group_topk"],
        "summed": facts["group_score_topk"],
        "has_table": families.HASH_TABLE in row.layouts[-1],
        "normed": facts["norm_topk_prob"] and not over_chosen,
        "may_be_normed": not facts["norm_topk_prob"] and callable(row.knobs.get("norm_topk_prob")),
        "on_input": facts["apply_probs_on"] == "input",
        "constants": ", ".join(constants),
        "z": "z" if facts["latent_size"] else "x",
        "shared_size": size,
        "shared": size and not gate,
        "gated_shared": size and gate,
        "after": row.after,
    }


# Fact -> the fields of MoEConfig that decide it.
DECIDED_BY = {
    "kept": ["group_topk"],
    "normed": ["norm_topk_prob"],
    "may_be_normed": ["norm_topk_prob"],
    "constants": [*moe._CONSTANTS],
    "shared_size": ["shared_expert_intermediate_size"],
}


def formulas_of(row: families.Family, values: dict, sources: dict) -> list[tuple[str, str, str]]:
    """(column of the table, formula, the fields of the published config that it is from), in order.

    values, sources: of families.values_of.
    """
    facts = _facts(row, values)
    lines = []
    for when, column, text in FORMULAS:
        *negated, fact = when.split()
        if bool(facts[fact]) == bool(negated):
            continue
        names = []
        for used in (fact, *re.findall(r"{(\w+)}", text)):
            for field in DECIDED_BY.get(used, [used]):
                names += sources.get(field, [])
        origin = f"[{', '.join(dict.fromkeys(names))}]" if names else ""
        lines.append((column, text.format_map(facts), origin))
    return lines


def table() -> str:
    """The table of docs/routers.md: a line per family, with the defaults of its knobs, then a line
    per refused type."""
    head = ["model_type", "example (source)", *COLUMNS, "product, scores, weights"]
    lines = [head, ["---"] * len(head)]
    first = {}                                               # cells -> the first family with them
    for name, row in families.FAMILIES.items():
        read = families.Reader({}, layer_idx=99)             # behind the layers with a hash table
        values, sources = families.values_of(row, read)
        sources = {field: names for field, names in sources.items() if field not in LETTERS}
        formulas = formulas_of(row, values | LETTERS, sources)
        cells = []
        for column in COLUMNS:
            cells.append("; ".join(
                f"`{text}` {origin}".rstrip() for at, text, origin in formulas if at == column))
        cells.append(row.precision)
        same = first.setdefault(tuple(cells), name)
        if same != name:
            cells = [f"as `{same}`", *[""] * len(COLUMNS)]
        lines.append([f"`{name}`", families.EXAMPLES[name], *cells])
    for name, why in families.INEXPRESSIBLE.items():
        lines.append([f"`{name}`", "", f"refused: {why}", *[""] * len(COLUMNS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def router(model_type: str, hf_config=None) -> str:
    """One router in formulas. The last line is the MoEConfig that computes it.

    hf_config: config.json as a dict, or the library's object; None: the library's defaults. Where
      the library is missing or does not have the type, a size is the name of its field.
    If the layers of the config differ it is the last one. ValueError: an unknown type, or a config
    that cannot be expressed.
    """
    if model_type in families.REFUSED:
        return f"{model_type} is refused: {families.REFUSED[model_type]}"
    row = families.family(model_type)
    if hf_config is None:
        hf_config = _library_config(model_type)
    elif isinstance(hf_config, dict):
        hf_config = {**hf_config, "model_type": model_type}
    inner = families.type_of(hf_config)[1][0].config
    layer_idx = _layer_of(hf_config)
    values, sources = families.values_of(row, families.Reader(inner, layer_idx))
    fields = {**values, "batch_first": True}
    if hf_config:
        config = families.config_from_hf(hf_config, layer_idx)
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

    product, scores, weights = row.precision.split()
    lines = [f"{model_type}: {families.EXAMPLES.get(model_type, '')}".rstrip(": ")]
    for _, text, origin in formulas_of(row, values, sources):
        lines.append(f"{text:59} {origin}".rstrip())
    lines.append(f"product in {product}, scores in {scores}, weights in {weights}"
                 .replace("model", "the model's dtype"))
    given = [f"{name}={value if isinstance(value, families.Missing) else repr(value)}"
             for name, value in fields.items()
             if value != getattr(moe.MoEConfig, name, None)]             # the default
    return "\n".join([*lines, f"MoEConfig({', '.join(given)})"])


def _layer_of(hf_config):
    """None, or the number of the last layer if the config needs one."""
    try:
        families.config_from_hf(hf_config)
    except ValueError:
        inner = families.type_of(hf_config)[1][0]
        return (inner.get("num_hidden_layers") or 100) - 1


def _library_config(model_type):
    """The library's config of the type with its defaults; {} if it has none with all sizes."""
    try:
        from transformers import AutoConfig
        hf_config = AutoConfig.for_model(model_type)
        families.config_from_hf(hf_config, _layer_of(hf_config))
    except (ImportError, ValueError):
        return {}
    return hf_config


def main() -> None:
    """Prints the table, or one router. Exit status 2, and one line, for a type that is unknown, and
    for a config that cannot be read or expressed."""
    if len(sys.argv) == 1:
        print(table())
        return
    model_type, *files = sys.argv[1:]
    try:
        hf_config = None
        if files:
            hf_config = dict(json.loads(Path(files[0]).read_text()))
        print(router(model_type, hf_config))
    except (OSError, ValueError, TypeError) as refused:      # TypeError: the file is no dict
        print(f"{' '.join(sys.argv[1:])}: {' '.join(str(refused).split())}", file=sys.stderr)
        sys.exit(2)
