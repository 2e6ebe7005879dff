"""Published weights of one MoE block, in and out, and the start from a dense model:

    from_hf(layer, tensors, "qwen3_moe", prefix="model.layers.3.mlp.")
    tensors = to_hf(layer, "qwen3_moe", prefix="model.layers.3.mlp.")
    layer = upcycle(config, gate_proj, up_proj, down_proj)
    small_layer.load_state_dict(small_weights(layer))        # of small.py

tensors is a plain mapping, or an open file of safetensors. The names and axes are in table.py.
"""
import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

if __package__ == "models":                  # beside the flat files of the layer
    import moe
    from models.configs import DTYPES, dtype_of_gate, meaning
    from models.reader import listed
    from models.table import TYPES, Slot, family, prefixes_of, tensors_of
else:                                        # the layer is a package
    from .. import moe
    from .configs import DTYPES, dtype_of_gate, meaning
    from .reader import listed
    from .table import TYPES, Slot, family, prefixes_of, tensors_of

SAFETENSORS_DTYPES = ("F64", "F32", "BF16", "F16")


# ---- Weights in, weights out ----

def from_hf(
    layer: moe.MoELayer, tensors: Mapping, model_type: str, prefix: str = "",
) -> moe.MoELayer:
    """Copies the weights of one published block into the layer, and returns the layer.

    tensors: name -> tensor of float64, float32, bfloat16 or float16, with published names and
      layouts or those held in memory. Each is cast to its parameter's dtype; the expert bias stays
      float32, and so does the router's weight in the families in which the library keeps it. One is
      loaded at a time, through [name] or safetensors' get_tensor. Without safetensors' get_slice
      each is loaded twice, first for its shape.
    prefix: the text in front of the block's own names, such as "model.layers.3.mlp.". Names without
      it are ignored.

    Over ep this rank's experts are read (others may be missing), over tp its part of the shared
    expert. A batch_first of None becomes True without tp: the library has [B, S, H].

    ValueError: lists the missing, misshapen and unexpected tensors; or the layer is no block of
    this family, or on the meta device. The layer is then unchanged.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> tensors = to_hf(moe.MoELayer(config), "mixtral")
    >>> layer = from_hf(moe.MoELayer(config), tensors, "mixtral")
    """
    inner, row = _checked(layer, model_type)
    if not hasattr(tensors, "keys"):
        raise TypeError(f"tensors is a {type(tensors).__name__}; needs a mapping, name -> tensor")
    if inner.router.weight.is_meta:
        raise ValueError("layer is on the meta device and cannot take weights; call "
                         "layer.to_empty(device=..) and reset_parameters() of its modules first")
    source = Source(tensors, prefix)
    places = _matched(inner, model_type, source)

    dtype = dtype_of_gate(row.precision, inner.router.weight.dtype)
    if dtype != inner.router.weight.dtype:
        # Rounded to the layer's dtype, a gate that the library keeps in fp32 chooses other experts.
        inner.router.to(dtype)
        gate = next(iter(places))
        places[gate] = places[gate]._replace(view=inner.router.weight.detach())
    _fill(places, source)
    if inner.config.batch_first is None and inner.pg_collection.size("tp") == 1:
        inner.set_config(dataclasses.replace(inner.config, batch_first=True))
    return layer


def to_hf(layer: moe.MoELayer, model_type: str, prefix: str = "") -> dict[str, Tensor]:
    """prefix + name -> a copy of the tensor, as published, in its parameter's dtype.

    Over ep the result has this rank's experts, under their global numbers. ValueError: names the
    tensors that are spread over ranks: over ep those of all experts, over tp the shared expert's.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> to_hf(moe.MoELayer(config), "mixtral", prefix="mlp.")["mlp.experts.3.w1.weight"].shape
    torch.Size([16, 8])
    """
    layer, row = _checked(layer, model_type)
    places = _places(layer, row.layouts[0])
    spread = [prefix + name for name, place in places.items() if place.cut]
    if spread:
        raise ValueError(f"spread over ranks: {listed(spread, ', ')}; needs a layer without ep "
                         f"and tp: save sharded_state_dict() and load it there")
    return {prefix + name: place.take()
            for name, place in places.items() if place.view is not None}


# parameter of MoELayer -> of small.MoE
IN_SMALL = {
    "router.weight": "router",
    "router.expert_bias": "expert_bias",
    "experts.fc1": "fc1",
    "experts.fc2": "fc2",
    "shared_experts.fc1": "shared_fc1",
    "shared_experts.fc2": "shared_fc2",
    "shared_experts.gate_weight": "shared_gate",
}


def small_weights(layer: moe.MoELayer) -> dict[str, Tensor]:
    """The layer's weights under the names of small.MoE, for its load_state_dict. ValueError:
    tensors that small.MoE does not have.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> list(small_weights(moe.MoELayer(config)))
    ['router', 'fc1', 'fc2']
    """
    tensors = layer.state_dict()
    others = [name for name in tensors if name not in IN_SMALL]
    if others:
        raise ValueError(f"small.MoE has no {listed(others, ', ')}; needs the MoELayer")
    return {IN_SMALL[name]: tensor for name, tensor in tensors.items()}


AXES = {
    "router.weight": "e h",
    "router.bias": "e",
    "router.expert_bias": "e",
    "experts.fc1": "e p f h",
    "experts.fc2": "e h f",
    "experts.fc1_bias": "e p f",
    "experts.fc2_bias": "e h",
    "shared_experts.fc1": "p s h",
    "shared_experts.fc2": "h s",
    "shared_experts.gate_weight": "1 h",
    "latent_down.weight": "l h",
    "latent_up.weight": "h l",
    "latent_up.norm": "l",
}
GATED_OR_NOT = {True: "gated", False: "not gated"}

# The fields of MoEConfig that must be as the row says, unless the row reads them from a config.
COMPARED = """
    activation glu_alpha glu_linear_offset activation_clamp_value add_bias_linear apply_probs_on
    score_function norm_topk_prob num_groups group_topk scaling_factor router_bias
    enable_expert_bias shared_expert_intermediate_size shared_expert_gate
    latent_size latent_norm situ_beta situ_linear_beta
""".split()


def _checked(layer, model_type):
    """(the layer without torch.compile's wrapper, the row of its family). ValueError: the layer is
    no block of this family.
    """
    inner = getattr(layer, "_orig_mod", layer)
    if not isinstance(inner, moe.MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; needs a MoELayer "
                        f"(for a small.MoE see small_weights)")
    row = family(model_type)
    want = meaning({**row.knobs, "topk": inner.config.topk})
    have = meaning(vars(inner.config))
    wrong = []

    # Without a gate there is only part 0.
    parts = {slot.part for slot in row.layouts[0].values() if slot.parameter == "experts.fc1"}
    gated = parts != {"0"}
    if inner.config.parts != 1 + gated:
        kind = GATED_OR_NOT[gated]
        wrong.append(f"activation = {have['activation']!r} (needs one that is {kind})")
    for name in COMPARED:
        if not callable(want[name]) and have[name] != want[name]:
            wrong.append(f"{name} = {have[name]!r} (needs {want[name]!r})")
    if wrong:
        raise ValueError(f"layer is no {model_type} block: {', '.join(wrong)}; "
                         f"build it with config_from_hf")
    return inner, row


class Source:
    """The tensors of one block: those of a mapping whose names begin with the prefix."""

    def __init__(self, tensors: Mapping, prefix: str):
        self.tensors = tensors
        self.prefix = prefix
        self.names = [name.removeprefix(prefix)
                      for name in tensors.keys() if name.startswith(prefix)]

    def load(self, name: str) -> Tensor:
        """Loads the tensor, and does not keep it."""
        if hasattr(self.tensors, "get_tensor"):
            return self.tensors.get_tensor(self.prefix + name)
        return self.tensors[self.prefix + name]

    def shape_and_dtype(self, name: str) -> tuple[list[int], str]:
        """(shape, dtype), from safetensors' get_slice, or else from the loaded tensor."""
        if hasattr(self.tensors, "get_slice"):
            part = self.tensors.get_slice(self.prefix + name)
            return list(part.get_shape()), part.get_dtype()
        tensor = self.load(name)
        return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class Place(NamedTuple):
    """One published tensor, and the part of a parameter that it fills."""
    slot: Slot
    shape: list[int]                       # of the published tensor
    view: Tensor | None                    # of the parameter; None: an expert of another rank
    axes: list[str]                        # of the view
    merged: dict[str, int]                 # sizes of axes that the published tensor may merge
    cut: dict[str, tuple[int, int]]        # axis cut over ranks -> this rank's start and length

    def put(self, tensor: Tensor) -> None:
        """Copies the published tensor into the layer, in the parameter's dtype."""
        tensor = rearrange(tensor, f"{self.slot.axes} -> {' '.join(self.axes)}", **self.merged)
        for axis, part in self.cut.items():
            tensor = tensor.narrow(self.axes.index(axis), *part)
        self.view.copy_(tensor)

    def take(self) -> Tensor:
        """A copy of the layer's part, as the published tensor."""
        tensor = rearrange(self.view, f"{' '.join(self.axes)} -> {self.slot.axes}", **self.merged)
        return tensor.clone(memory_format=torch.contiguous_format)


def _places(layer, layout):
    """name after the prefix -> Place, for parameters that the layer has."""
    tensors = tensors_of(layer)
    ranks = layer.pg_collection
    cut_over = {"experts": ("e", "ep"), "shared_experts": ("s", "tp")}
    places = {}
    for name, slot in layout.items():
        if slot.parameter not in tensors:
            continue
        view = tensors[slot.parameter].detach()
        axes = AXES[slot.parameter].split()
        sizes = dict(zip(axes, view.shape))

        # Sizes over all ranks, and this rank's part.
        axis, group = cut_over.get(slot.parameter.split(".")[0], ("", "tp"))
        cut = {}
        if axis in axes and ranks.size(group) > 1:
            length = sizes[axis]
            sizes[axis] = ranks.size(group) * length
            cut[axis] = ranks.rank(group) * length, length

        if slot.part:
            view = view.select(axes.index("p"), int(slot.part))
            axes.remove("p")
        if "{e}" in name:
            axes.remove("e")

        merged = {axis: sizes[axis] for axis in "ep" if axis in slot.axes}
        blank = torch.empty([sizes[axis] for axis in axes], device="meta")
        shape = rearrange(blank, f"{' '.join(axes)} -> {slot.axes}", **merged).shape
        place = Place(slot=slot, shape=list(shape), view=view, axes=axes, merged=merged, cut=cut)

        if "{e}" in name:
            first, _ = cut.pop("e", (0, 0))
            local = dict(enumerate(view, first))
            for e in range(sizes["e"]):
                places[name.format(e=e)] = place._replace(view=local.get(e))
        else:
            places[name] = place
    return places


def _nearest(layer, layouts, source):
    """The layout that has most of the names. Of two layouts with the same names, one holds the
    experts' weights transposed: it is the one that has most of the shapes. (At 2F = H or F = H one
    of the two weights has the same shape in both.)
    """
    alike = len(layouts) > 1 and layouts[0].keys() == layouts[1].keys()

    def fit(layout):
        places = _places(layer, layout)
        here = places.keys() & set(source.names)
        if alike:
            here = [name for name in here if source.shape_and_dtype(name)[0] == places[name].shape]
        return len(here)
    return max(layouts, key=fit)


def _matched(layer, model_type, source):
    """name after the prefix -> Place on this rank, in the source's layout. ValueError: a tensor is
    missing, does not fit, or is unexpected.
    """
    row = TYPES[model_type]
    prefix = source.prefix
    here = set(source.names)
    places = _places(layer, _nearest(layer, row.layouts, source))
    all_names = list(source.tensors.keys())
    if all_names and not here & places.keys():
        fitting = listed(prefixes_of(all_names, row.layouts), ", ") or "none"
        raise ValueError(f"no tensor of a {model_type} block is at prefix {prefix!r}; "
                         f"prefixes that fit: {fitting}")

    local = {name: place for name, place in places.items() if place.view is not None}
    problems = []
    for name, place in local.items():
        if name not in here:
            problems.append(f"{prefix}{name} {place.shape} is missing")
            continue
        shape, dtype = source.shape_and_dtype(name)
        if shape != place.shape:
            problems.append(f"{prefix}{name} is {shape}; needs {place.shape}")
        if dtype not in DTYPES + SAFETENSORS_DTYPES and place.view.is_floating_point():
            problems.append(f"{prefix}{name} is {dtype}; needs {', '.join(DTYPES)}")
    for name in source.names:
        if name in places or re.fullmatch(row.others, name):
            continue
        if re.search(r"(packed|blocks|scales?|scale_inv)$", name):
            problems.append(f"{prefix}{name} is of quantised weights; dequantise them first")
        else:
            problems.append(f"{prefix}{name} is unexpected")
    if problems:
        raise ValueError(f"tensors do not make a {model_type} block, nothing was changed:\n  "
                         + listed(problems, "\n  "))
    return local


@torch.no_grad()
def _fill(places, source):
    for name, place in places.items():
        place.put(source.load(name))


# ---- Weights from a dense FFN ----

def upcycle(
    config: moe.MoEConfig, gate_proj: Tensor | None, up_proj: Tensor, down_proj: Tensor,
    noise: float = 0.0,
) -> moe.MoELayer:
    """A layer whose experts all start as one dense FFN: sparse upcycling (arXiv 2212.05055).

    gate_proj [F, H], or None where the activation is not gated. up_proj [F, H], down_proj [H, F].
      They are cast to params_dtype.
    noise: the standard deviation of normal noise on every expert's matrices, as a share of the
      weights' own.

    The router is drawn anew. Biases are zero, and so is a shared expert's down projection. The
    output at the start is the dense FFN's if a token's probs sum to 1 and are not applied to the
    input. ValueError: shapes that do not fit, a latent_size, negative noise. TypeError: a module in
    the place of its weight.

    >>> config = moe.MoEConfig(hidden_size=8, ffn_hidden_size=16, num_experts=4, topk=2)
    >>> gate_proj, up_proj, down_proj = torch.rand(16, 8), torch.rand(16, 8), torch.rand(8, 16)
    >>> layer = upcycle(config, gate_proj, up_proj=up_proj, down_proj=down_proj)
    """
    moe.kernels.check_shapes(
        {"F": config.ffn_hidden_size, "H": config.hidden_size},
        gate_proj=(gate_proj, "F H"), up_proj=(up_proj, "F H"), down_proj=(down_proj, "H F"))
    parts = [part for part in (gate_proj, up_proj) if part is not None]
    if len(parts) != config.parts:
        raise ValueError(f"gate_proj and up_proj are {len(parts)} matrices; "
                         f"activation = {config.activation!r} needs {config.parts}")
    if config.latent_size is not None:
        raise ValueError(f"latent_size is {config.latent_size}; needs None, since an expert is as "
                         f"wide as the dense FFN")
    if noise < 0:
        raise ValueError(f"noise is {noise}; needs 0 or more")

    layer = moe.MoELayer(config).to(up_proj.device)
    fc1_PFH = torch.stack(parts)
    with torch.no_grad():
        layer.experts.fc1.copy_(fc1_PFH)
        layer.experts.fc2.copy_(down_proj)
        if noise:
            # [E, F, H] for each part, and [E, H, F]
            for weight in (*layer.experts.fc1.unbind(1), layer.experts.fc2):
                draw = torch.randn(weight.shape, device=weight.device)
                weight.add_(noise * weight.float().std() * draw)
        if layer.shared_experts is not None:
            layer.shared_experts.fc2.zero_()
    return layer
