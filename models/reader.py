"""Reads a published config, field by field, and notes what the layer cannot express. The knobs of
table.py are functions of a Reader.
"""
from collections.abc import Mapping

ABSENT = object()


class Missing(str):
    """Stands for a value: the name of a field that the config lacks, or "field = value" where the
    value cannot be used.
    """

    def __repr__(self):
        return str(self)

    def __mul__(self, other):
        return Missing(f"{self} * {other}")

    def __rmul__(self, other):
        return Missing(f"{other} * {self}")


class Reader:
    """Reads fields of a published config.

    names: the fields read. log: of these, those that had a value; if none had, the first in
      parentheses.
    problems: what cannot be expressed. by_layer: a problem is that layers differ.
    """

    def __init__(self, config, layer_idx: int | None = None):
        self.config = config
        self.layer_idx = layer_idx
        self.names = set()
        self.log = []
        self.problems = []
        self.by_layer = False

    def differ(self, how: str) -> None:
        """The layers differ, and layer_idx is not given."""
        self.problems.append(f"{how}; needs layer_idx")
        self.by_layer = True

    def whole(self, name: str, default=None):
        """The value of a field ("ffn_config.moe_top_k": a field of a field), or the default."""
        value = self.config
        for part in name.split("."):
            if isinstance(value, Mapping):
                value = value.get(part, ABSENT)
            else:
                value = getattr(value, part, ABSENT)
        return default if value is ABSENT else value

    def get(self, name: str, default=None):
        """The same for this layer. A list has one value per layer: layer_idx chooses one; without
        it all must be equal.
        """
        value = self.whole(name, default)
        return self.of_layer(name, value) if isinstance(value, (list, tuple)) else value

    def of_layer(self, name: str, value: list | tuple | str):
        index = self.layer_idx or 0
        if index >= len(value):
            self.problems.append(f"{name} has {len(value)} values; layer_idx is {self.layer_idx}")
            return None
        if self.layer_idx is None and any(other != value[0] for other in value):
            kinds = {repr(each): [] for each in value}
            for layer, each in enumerate(value):
                kinds[repr(each)].append(layer)
            several = either(f"{each} in {layers(where)}" for each, where in kinds.items())
            self.differ(f"{name} is {several}")
        return value[index]

    def __call__(self, *names: str, default=ABSENT, among: dict | None = None):
        """The value under any of the names, or the default. among: published value -> knob; any
        other value is a problem.
        """
        self.names.update(names)
        found = {name: self.get(name, default=ABSENT) for name in names}
        found = {name: value for name, value in found.items() if value is not ABSENT}
        value, *others = found.values() or [default]
        self.log += [*found, f"({names[0]})"][:1]
        if any(other != value for other in others):
            got = " and ".join(f"{name} = {each!r}" for name, each in found.items())
            self.problems.append(f"{got} contradict each other")
        if value is ABSENT:
            self.problems.append(f"{either(names)} is missing")
            return Missing(names[0])
        if among is None:
            return value
        if value not in list(among):                         # a value may not be hashable
            name = next(iter(found), names[0])
            self.problems.append(f"{name} is {value!r}; needs {either(map(repr, among))}")
            return Missing(f"{name} = {value!r}")
        return among[value]


def layers(numbers: list[int]) -> str:
    """ "layer 4", or "layers 0 to 2, 5"."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [" to ".join(map(str, dict.fromkeys(run))) for run in runs]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(texts)}"


def either(items):
    """The items, each once, with "or" between them."""
    return " or ".join(dict.fromkeys(items))


def listed(items, separator):
    """The first ten items, joined; if there are more, also their number."""
    if len(items) > 10:
        items = [*items[:10], f".. {len(items)} in all"]
    return separator.join(items)
