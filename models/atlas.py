"""Published routers as formulas, with the numbers that their models publish.

    python models/atlas.py                           # the table of docs/routers.md
    python models/atlas.py TYPE [config.json]        # one router: of a known model or a config
    python models/atlas.py TYPE .. [config.json ..]  # how several differ

Nothing here is written for a family, except the routers that no MoEConfig expresses, OF_REFUSED. A
router's text is made of the knobs of its row in table.py, and of a config from published.py or
from a file. So a formula says what config_from_hf builds.

A formula is Python, with three functions:

    best_groups(rank, G, k, n)   rank, with -inf outside of the k best of G groups of experts; a
                                 group is as good as the sum of its n best
    top(rank, K)                 the places of the K largest
    experts(chosen, x)           the outputs of the chosen experts
"""
import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

if not __package__:                          # a script: the layer's files are a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __package__ and __package__ != "models":  # the layer is a package
    from .. import moe
    from . import configs, published, reader, table
else:
    import moe
    from models import configs, published, reader, table


# Three columns: a condition, the column in the table of docs/routers.md, the formula. A condition
# is a key of _facts, or its opposite after "not". {name} is replaced by the fact of that name.
FORMULAS = """
    always             | -       | x: {hidden_size} wide
    not router_bias    | -       | logits = x @ W.T
    router_bias        | scores  | logits = x @ W.T + b
    not over_chosen    | scores  | scores = {score_function}(logits)
    over_chosen        | choice  | rank = logits
    not over_chosen    | choice  | rank = scores
    enable_expert_bias | choice  | rank = rank + expert_bias
    num_groups         | choice  | rank = best_groups(rank, {num_groups}, {group_topk}, {best})
    always             | choice  | chosen = top(rank, {topk})
    has_table          | choice  | in hash layers: chosen = table[token]
    over_chosen        | probs   | probs = softmax(logits[chosen])
    not over_chosen    | probs   | probs = scores[chosen]
    normed             | probs   | probs = probs / (sum(probs) + {norm_eps}){if_named}
    may_be_normed      | probs   | not divided by their sum
    scaling_factor     | probs   | probs = probs * {scaling_factor}
    always             | experts | {num_experts} experts, {activation}, {ffn_hidden_size} wide
    constants          | experts | constants: {constants}
    limit              | experts | in an expert: {limit}
    add_bias_linear    | experts | with biases
    latent_size        | special | z = latent_down(x), {latent_size} wide
    not on_input       | -       | y = sum(probs * experts(chosen, {z}))
    on_input           | special | y = sum(experts(chosen, probs * {z}))
    latent_norm        | special | y = rms_norm(y)
    latent_size        | special | y = latent_up(y)
    shared             | shared  | y = y + shared_expert(x), {shared} wide
    gated_shared       | shared  | y = y + sigmoid(x @ g) * shared_expert(x), {gated_shared} wide
    shared_limit       | shared  | in the shared expert: {shared_limit}
    after              | special | after the layer: y = {after}
    always             | -       | product in {product}, scores in {scores}, probs in {probs_in}
"""
FORMULAS = [re.split(r" *\| *", line.strip()) for line in FORMULAS.strip().splitlines()]
COLUMNS = ("scores", "choice", "probs", "experts", "shared", "special")

# Field of MoEConfig -> the letter that stands for its number in the table's formulas.
LETTERS = {"hidden_size": "H", "num_experts": "E", "topk": "K", "ffn_hidden_size": "F",
           "shared_expert_intermediate_size": "S"}


def _facts(reading: configs.Reading) -> dict:
    """What the formulas name: all fields of MoEConfig, and what follows from them."""
    fields = reading.fields
    facts = configs.meaning(fields)
    over_chosen = (facts["score_function"] == "softmax" and not facts["pre_softmax"]
                   and fields.get("norm_topk_prob") is None)
    norm = facts["norm_topk_prob"]
    size, gate = facts["shared_expert_intermediate_size"], facts["shared_expert_gate"]
    constants = [f"{constant} = {fields[field]}" for field, constant in moe._CONSTANTS.items()
                 if fields.get(field) is not None and facts["activation"] in moe.kernels.ACTIVATIONS
                 and constant in moe.kernels.ACTIVATIONS[facts["activation"]].constants]
    product, scores, probs = [word.replace("model", "the model's dtype")
                              for word in reading.row.dtypes()]
    return facts | {
        "always": True,
        "product": product,
        "scores": scores,
        "probs_in": probs,
        "over_chosen": over_chosen,
        "scaling_factor": None if facts["scaling_factor"] == 1 else facts["scaling_factor"],
        "best": facts["group_score_topk"],
        "has_table": table.HASH_TABLE in reading.row.layouts[-1],
        "normed": norm and not over_chosen,
        "if_named": f", if {norm}" if isinstance(norm, reader.Missing) else "",
        "may_be_normed": not norm and callable(reading.row.knobs.get("norm_topk_prob")),
        "on_input": facts["apply_probs_on"] == "input",
        "constants": ", ".join(constants),
        "z": "z" if facts["latent_size"] else "x",
        "shared": None if gate else size,
        "gated_shared": size if gate else None,
        **dict.fromkeys(("limit", "shared_limit")),
        **{name: f"min(silu(gate), {limit}) * clip(up, -{limit}, {limit})"
           for name, limit in reading.limits.items()},
        "after": reading.after,
    }


# Fact -> the fields of MoEConfig that decide it.
DECIDED_BY = {
    "normed": ["norm_topk_prob"],
    "may_be_normed": ["norm_topk_prob"],
    "constants": [*moe._CONSTANTS],
    "shared": ["shared_expert_intermediate_size"],
    "gated_shared": ["shared_expert_intermediate_size"],
}


class Line(NamedTuple):
    """A line of a router.

    column: the table's column for this line. template: the formula, with {..} in the place of
    values. values: name in a {..} -> its value. origin: in brackets, the fields of the published
    config that decide the line.
    """
    column: str
    template: str
    values: dict
    origin: str

    def __str__(self):
        return self.template.format_map(self.values)


def lines_of(reading: configs.Reading) -> list[Line]:
    """The lines of FORMULAS that hold for a router, with its values."""
    facts = _facts(reading)
    lines = []
    for when, column, template in FORMULAS:
        *negated, fact = when.split()
        if bool(facts[fact]) == bool(negated):
            continue
        used = re.findall(r"{(\w+)}", template)
        names = []
        for each in (fact, *used):
            for field in DECIDED_BY.get(each, [each]):
                names += reading.sources.get(field, [])
        origin = f"[{', '.join(dict.fromkeys(names))}]" if names else ""
        lines.append(Line(column, template, {name: facts[name] for name in used}, origin))
    return lines


# ---- Routers that no MoEConfig expresses ----

# A type, and its lines. {name} is a field of the config: its value, or its name without a config.
# A line that ends with ", if {name}" is left out where the field is false. These formulas also have
# where, maximum, concat, and without(rank, chosen): rank, with -inf at the chosen.
OF_REFUSED = """
phimoe
    x: {hidden_size} wide
    logits = x @ W.T
    first = top(logits, 1)
    others = without(logits, first)
    second = top(others, 1)
    chosen = concat(first, second)
    far = max(logits) - logits > 2 * {router_jitter_noise} * maximum(abs(logits), max(logits))
    prob = softmax(where(far, -inf, logits))[first]
    far = max(others) - logits > 2 * {router_jitter_noise} * maximum(abs(logits), max(others))
    probs = concat(prob, softmax(where(far, -inf, others))[second])
    in training both are drawn from the softmax that gives their prob (arXiv 2409.12136)
    {num_local_experts} experts, {hidden_act}, {intermediate_size} wide
    y = sum(probs * experts(chosen, x))
gemma4_text, diffusion_gemma_text
    x: {hidden_size} wide, before the norm of the dense FFN
    n = x / sqrt(mean(x ** 2) + {rms_norm_eps}) * scale * {hidden_size} ** -0.5
    logits = n @ W.T
    scores = softmax(logits)
    rank = scores
    chosen = top(rank, {top_k_experts})
    probs = scores[chosen]
    probs = probs / sum(probs)
    probs = probs * per_expert_scale[chosen]
    {num_experts} experts, {hidden_activation}, {moe_intermediate_size} wide
    z = pre_feedforward_layernorm_2(x)
    y = post_feedforward_layernorm_2(sum(probs * experts(chosen, z)))
    y = y + post_feedforward_layernorm_1(mlp(pre_feedforward_layernorm(x)))
ernie4_5_vl_moe_text
    x: {hidden_size} wide
    W, expert_bias and experts: one set for text, another one for images
    logits = x @ W.T
    scores = softmax(logits)
    rank = scores + expert_bias
    chosen = top(rank, {moe_k})
    probs = scores[chosen]
    probs = probs / maximum(sum(probs), {moe_norm_min})
    {moe_num_experts} experts, {hidden_act}, {moe_intermediate_size} wide
    y = sum(probs * experts(chosen, x))
    y = y + shared_expert(x), if {moe_num_shared_experts}
inkling_text
    x: {hidden_size} wide
    logits = x @ W.T
    scores = sigmoid(logits)
    rank = scores[:{n_routed_experts}] + expert_bias
    chosen = top(rank, {num_experts_per_tok})
    weighed = concat(chosen, range({n_routed_experts}, {n_routed_experts} + {n_shared_experts}))
    weights = scores[weighed] / sum(scores[weighed]) * {route_scale} * global_scale
    probs = weights[:{num_experts_per_tok}]
    {n_routed_experts} experts, {hidden_act}, {moe_intermediate_size} wide
    y = sum(probs * experts(chosen, x))
    y = y + sum(weights[{num_experts_per_tok}:] * shared_experts(x)), {moe_intermediate_size} wide
jetmoe
    x: {hidden_size} wide
    logits = x @ W.T
    rank = logits
    chosen = top(rank, {num_experts_per_tok})
    probs = softmax(logits[chosen])
    {num_local_experts} experts, {activation_function}, {intermediate_size} wide
    y = sum(probs * experts(chosen, x)) + bias
    in attention such a router chooses the projections of the queries, and of the output
kolibri1
    x: {hidden_size} wide
    logits = x @ W.T
    rank = logits + expert_bias
    chosen = top(rank, {num_experts_per_tok})
    probs = sigmoid(logits[chosen])
    probs = probs / sum(probs), if {norm_topk_prob}
    {num_local_experts} experts, {hidden_act}, {moe_intermediate_size} wide
    y = sum(probs * experts(chosen, x))
    y = y + shared_expert(x), {shared_expert_intermediate_size} wide
longcat_flash
    x: {hidden_size} wide
    logits = x @ W.T
    scores = softmax(logits)
    rank = scores + expert_bias
    chosen = top(rank, {moe_topk})
    probs = scores[chosen]
    probs = probs * {routed_scaling_factor}
    {n_routed_experts} experts, {hidden_act}, {expert_ffn_hidden_size} wide
    then {zero_expert_num} experts that return x
    y = sum(probs * experts(chosen, x))
muse_spark_text
    x: {hidden_size} wide
    logits = x @ W.T * {output_multiplier}
    scores = sigmoid(logits)
    rank = scores + expert_bias
    chosen = top(rank, {num_experts_per_tok})
    probs = scores[chosen]
    probs = probs / (sum(probs) + 1e-15)
    probs = probs * {routed_scaling_factor}
    {num_local_experts} experts, {hidden_act}, {moe_intermediate_size} wide
    z = pre_expert_norm(pre_expert_proj(x)), {moe_hidden_size} wide
    y = post_expert_proj(sum(probs * post_expert_norm(experts(chosen, z))))
nllb-moe
    x: {d_model} wide
    logits = x @ W.T
    logits = logits + b, if {router_bias}
    scores = softmax(logits)
    rank = scores
    chosen = top(rank, 2)
    probs = scores[chosen]
    probs = probs / maximum(sum(probs), 1.2e-07)
    an expert takes {moe_eval_capacity_token_fraction} of all tokens, in training {expert_capacity}
    {num_experts} experts, {activation_function}, with biases
    y = sum(probs * experts(chosen, x)) * (1 - {moe_token_dropout})
switch_transformers
    x: {d_model} wide
    logits = x @ W.T
    logits = logits + b, if {router_bias}
    scores = softmax(logits)
    rank = scores
    chosen = top(rank, 1)
    probs = scores[chosen]
    {num_experts} experts, {dense_act_fn}, {d_ff} wide
    y = sum(probs * experts(chosen, x))
    an expert takes its first {expert_capacity} tokens of a sequence, in training too: others get 0
zaya
    x: {hidden_size} wide
    h = x @ D.T + d, {router_hidden_size} wide
    h = h + before * scale          # before: h of the layer before; not in layer 0
    n = h / sqrt(mean(h ** 2) + {rms_norm_eps}) * g
    a = gelu(n @ W1.T + b1)
    a = gelu(a @ W2.T + b2)
    logits = a @ W.T
    scores = softmax(logits)
    rank = scores + expert_bias
    chosen = top(rank, {num_experts_per_tok})
    probs = scores[chosen]
    {num_experts} experts, {hidden_act}, {moe_intermediate_size} wide
    then one expert that returns 0
    y = sum(probs * experts(chosen, x))
"""
OF_REFUSED = re.findall(r"^(\w.*)\n((?: .*\n)+)", OF_REFUSED, re.M)
OF_REFUSED = table.with_outer_names({
    name: textwrap.dedent(lines).splitlines()
    for names, lines in OF_REFUSED for name in names.split(", ")})


def _refused_router(model_type, hf_config):
    """The formulas of a refused router, if it has any, and the reason why no MoEConfig has them."""
    why = table.REFUSED[model_type]
    title, read = f"{model_type}: no config found", reader.Reader({})
    if hf_config is not None:
        title, read = model_type, configs.type_of(hf_config)[1][0]
        configs.refuse_dense(model_type, read)
    if model_type not in OF_REFUSED:
        return f"{model_type} is refused: {why}"
    text = [title]
    for template in OF_REFUSED[model_type]:
        names = dict.fromkeys(re.findall(r"{(\w+)}", template))
        values = {name: read.whole(name, reader.Missing(name)) for name in names}
        template, _, condition = template.partition(", if ")
        if condition:
            condition = values[condition.strip("{}")]
            if isinstance(condition, reader.Missing):
                template += f", if {condition}"
            elif not condition:
                continue
        found = [name for name, value in values.items() if not isinstance(value, reader.Missing)]
        line = template.format_map(values)
        text.append(f"{line:59} [{', '.join(found)}]" if found else line)
    return "\n".join([*text, f"no MoEConfig: {why}"])


# ---- Configs ----

# A type, under any of its names -> its name in published.py.
NAMES = table.with_outer_names({name: name for name in table.FAMILIES})


def published_config(model_type: str) -> tuple[str, dict]:
    """(the model and where its numbers are from, its config). If no config was found, the value of
    each field is its own name.
    """
    table.family(model_type)                              # refuses an unknown one
    name = NAMES[model_type]
    if name in published.FIELDS:
        fields = {field: reader.Missing(field) for field in published.FIELDS[name].split()}
        return "no config found", {**fields, "model_type": name}
    known = published.MODELS[name]
    found = {"file": "", "quoted": ", numbers quoted", "memory": ", numbers from memory"}
    return f"{known.model}{found[known.found]} ({known.source})", known.config


def readings_of(hf_config) -> list[tuple[str, configs.Reading]]:
    """(the layers, their reading) of each kind of layer, the most frequent kind last. If all layers
    are alike, one pair with "" for the layers.

    ValueError: an unknown type, or a router that cannot be expressed.
    """
    whole = configs.read_config(hf_config)
    kinds = {}
    if whole.by_layer:
        for layer in whole.sparse:
            reading = configs.read_config(hf_config, layer)
            kinds.setdefault(str(reading), (reading, []))[1].append(layer)
    readings = [(reader.layers(numbers), reading)
                for reading, numbers in sorted(kinds.values(), key=lambda kind: len(kind[1]))]
    readings = readings or [("", whole)]
    for _, reading in readings:
        reading.refuse(reading.problems)
    return readings


def _call(reading):
    """The MoEConfig, with a comment on the fields that small.MoE lacks; or why there is none."""
    problems = list(dict.fromkeys(reading.of_the_block))
    missing = any(isinstance(value, reader.Missing) for value in reading.fields.values())
    comment = ""
    if not problems and not missing:
        try:
            config = moe.MoEConfig(**reading.fields)
        except ValueError as refused:
            problems = [str(refused)]
        else:
            comment = _about_small(config, reading.fields)
    if problems:
        return f"no MoEConfig: {'; '.join(problems)}"
    given = [f"{name}={value!r}" for name, value in configs.given(reading.fields).items()]
    return f"MoEConfig({', '.join(given)}){comment}"


def _about_small(config, options):
    try:
        taken = configs.small_fields(config)
    except ValueError as refused:
        return f"    # {refused}"
    left = [name for name in configs.given(options) if name not in taken]
    return f"    # small.MoE: the same but for {', '.join(left)}"


# ---- What is printed ----

def router(model_type: str, hf_config=None) -> str:
    """One router in formulas. The last line is the MoEConfig that computes it, or why none does. If
    there are numbers for it, a comment names the fields without which small.MoE computes the same,
    or what small.py lacks.

    hf_config: config.json as a dict, or the library's object; None: of the named model. The experts
      may be quantised.
    If layers differ, the formulas are those of the most frequent kind. What the other kinds have
    instead follows. Of a refused type only some have formulas: those of eval mode. ValueError: an
    unknown type, or a config that cannot be expressed.
    """
    if model_type in table.REFUSED:
        return _refused_router(model_type, hf_config)
    title = model_type
    if hf_config is None:
        model, hf_config = published_config(model_type)
        title += f": {model}"
    elif isinstance(hf_config, dict):
        hf_config = {**hf_config, "model_type": model_type}
    readings = readings_of(hf_config)
    _, usual = readings[-1]
    text = [title]
    if usual.dense:
        text.append(f"without experts: {reader.layers(usual.dense)}")
    usual_lines = _with_origins(usual)
    text += usual_lines
    if usual.unread:
        text.append(f"not read: {', '.join(usual.unread)}")
    if usual.quantized:
        text.append("quantised experts: config_from_hf needs dequantised weights, and a config "
                    "without quantization_config")
    for layers, reading in readings:
        text += [f"in {layers}:"] * bool(layers)
        text += [line for line in _with_origins(reading) if line not in usual_lines]
        text.append(_call(reading))
    return "\n".join(text)


def _with_origins(reading):
    return [f"{str(line):59} {line.origin}".rstrip() for line in lines_of(reading)]


def compare(models: list[tuple[str, str, dict]]) -> str:
    """A table with a row for each line of the formulas in which the routers differ, then the lines
    that all of them have.

    models: (type, name, config), two or more. If the layers of one differ, its most frequent kind
    counts.
    """
    types, names, given = zip(*models)
    readings = [readings_of(config)[-1][1] for config in given]
    routers = [{line.template: line for line in lines_of(reading)} for reading in readings]
    dense = [reader.layers(reading.dense) if reading.dense else "-" for reading in readings]
    rows = [["type", *types], ["model", *(name.split(" (")[0] for name in names)]]
    same = []
    if len(set(dense)) > 1:
        rows.append(["without experts", *dense])
    elif dense[0] != "-":
        same.append(f"without experts: {dense[0]}")
    for _, _, template in FORMULAS:
        lines = [lines.get(template) for lines in routers]
        texts = {str(line) for line in lines}
        if len(texts) > 1:
            label = re.sub(r"{\w+}", "_", template.removesuffix("{if_named}"))
            rows.append([label, *map(_cell, lines)])
        elif lines[0]:
            same += texts
    text = _side_by_side(rows)
    facts = [_facts(reading) for reading in readings]
    if any(fact["over_chosen"] for fact in facts) and any(
            fact["normed"] is True and fact["score_function"] == "softmax" for fact in facts):
        text += ["", "softmax(logits[chosen]) is softmax(logits)[chosen], divided by its sum."]
    if same:
        text += ["", "In all of them:", *same]
    return "\n".join(text)


def _side_by_side(rows):
    """The lines of the table. If one were longer than 120 columns, the models are numbered and each
    row becomes a paragraph.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    text = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if max(map(len, text)) <= 120:
        return text
    (_, *types), (_, *names), *rows = rows
    text = [f"{i}. {': '.join(model)}" for i, model in enumerate(zip(types, names), 1)]
    for label, *cells in rows:
        text.append(label)
        for cell in dict.fromkeys(cell for cell in cells if cell != "-"):
            where = ", ".join(str(i) for i, other in enumerate(cells, 1) if other == cell)
            text += textwrap.wrap(f"{where}: {cell}", 120, initial_indent="    ",
                                  subsequent_indent="        ")
    return text


def _cell(line):
    """The values in the places of the row's _; "yes" for a line without values, "-" for a router
    without the line.
    """
    if line is None:
        return "-"
    return ", ".join(str(value) for value in line.values.values() if value != "") or "yes"


def table_of_routers() -> str:
    """The table of docs/routers.md: a line per family, with its published model, then a line per
    refused type."""
    head = ["model_type", "model (source of the formulas)", "H, E, K, F, S", *COLUMNS,
            "product, scores, probs"]
    rows = [head, ["---"] * len(head)]
    first = {}                                               # cells -> the first family with them
    for name in table.FAMILIES:
        model, config = published_config(name)
        readings = readings_of(config)
        _, usual = readings[-1]
        sizes = {field: usual.fields.get(field) for field in LETTERS}
        letters = {field: LETTERS[field] for field, size in sizes.items() if size}
        sources = {field: of for field, of in usual.sources.items() if field not in LETTERS}
        lines = lines_of(usual._replace(fields=usual.fields | letters, sources=sources))
        cells = [[f"`{line}` {line.origin}".rstrip() for line in lines if line.column == column]
                 for column in COLUMNS]
        for layers, reading in readings:
            if reading.of_the_block:
                cells[-1].append(f"{layers} {_call(reading)}".strip())
        cells = [*map("; ".join, cells), ", ".join(usual.row.dtypes())]
        same = first.setdefault(tuple(cells), name)
        if same != name:
            cells = [f"as `{same}`", *[""] * (len(cells) - 1)]
        numbers = "" if NAMES[name] in published.FIELDS else ", ".join(
            str(size or "-") for size in sizes.values())
        rows.append([f"`{name}`", model, numbers, *cells])
    for name, why in table.INEXPRESSIBLE.items():
        rows.append([f"`{name}`", "", "", f"refused: {why}", *[""] * len(COLUMNS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Prints the table, one router, or how several differ. A type that is unknown, or a config that
    cannot be read or expressed, gets one line on stderr and the exit status 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="TYPE or config.json")
    words = parser.parse_args().words
    models = []                                              # (type, name, config or None)
    try:
        for word in words:
            if not word.endswith(".json"):
                models.append((word, "", None))
                continue
            config = dict(json.loads(Path(word).read_text()))
            model_type, _ = configs.type_of(config)
            if models and models[-1][2] is None:             # the config of the type before it
                model_type = models.pop()[0]
            models.append((model_type, word, {**config, "model_type": model_type}))
        if not models:
            print(table_of_routers())
        elif len(models) == 1:
            print(router(models[0][0], models[0][2]))
        else:
            print(compare([(model_type, name, config) if config else
                           (model_type, *published_config(model_type))
                           for model_type, name, config in models]))
    except (OSError, ValueError, TypeError) as refused:      # TypeError: the file is no dict
        print(f"{' '.join(words)}: {' '.join(str(refused).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
