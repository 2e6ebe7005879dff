"""The experts of a live model of the Hugging Face library, computed by kernels.expert_mlp:

    model.set_experts_implementation(register_experts())

Router, losses, weights and checkpoints stay the library's. live.py replaces the router too.
"""
import math
import operator
from typing import NamedTuple

import torch
from torch import nn

if __package__ == "models":                  # beside the flat files of the layer
    import moe
    from base import Local
else:                                        # the layer is a package
    from .. import moe
    from ..base import Local


OURS = "moe_py"


def register_experts(name: str = OURS) -> str:
    """Registers kernels.expert_mlp with the Hugging Face library, and returns its name there, for
    `model.set_experts_implementation(name)` or `experts_implementation=name` when a model is
    loaded.

    Router, losses, weights and checkpoints stay the library's. No weight is copied: transposed and
    interleaved weights are used as views. An index of E or more is unrouted. ImportError: no
    library. ValueError: the name is an implementation of the library. A forward raises
    NotImplementedError, which names what cannot be expressed.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as missing:
        raise ImportError("register_experts needs the Hugging Face library: pip install "
                          "'transformers>=5'") from missing
    known = {"eager": None, **ALL_EXPERTS_FUNCTIONS}
    if known.get(name, experts_forward) is not experts_forward:
        raise ValueError(f"name is {name!r}, an implementation of the library; needs another name")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return name


def experts_forward(experts, hidden_states, top_k_index, top_k_weights):
    """The experts' forward for the library: hidden_states [T, H], top_k_index and top_k_weights
    [T, K] -> [T, H] in hidden_states.dtype.
    Products are in the weights' dtype.
    """
    router = vars(experts).get("moe_router")                 # of replace_blocks
    options, fc1, fc2 = _weights_of(experts)
    E = len(fc1) if router is None else router.config.num_experts
    indices = top_k_index.clamp(max=E)
    plan = moe.kernels.plan_permutation(indices, E)
    x_TH = hidden_states.to(fc1.dtype)
    if router is None:
        dispatched = Local(x_TH, top_k_weights, plan)
    else:
        dispatched = router.pg_collection.dispatch(
            x_TH, top_k_weights, indices, plan, router.config)
    rows, probs, local_plan = dispatched.wait_for_rows()
    output = moe.kernels.expert_mlp(
        rows, probs, local_plan, fc1=fc1, fc2=fc2, indices=indices if local_plan is plan else None,
        **options)
    y_TH = dispatched.wait_and_combine(dispatched.send_back(output))
    return y_TH.to(hidden_states.dtype)


def _weights_of(experts):
    """(options of expert_mlp, fc1 [E, P, F, H], fc2 [E, H, F]): views of the module's weights."""
    options = options_of(experts)
    if hasattr(experts, "mlp"):                              # DBRX's
        w1, v1, w2 = [weight.unflatten(0, (-1, experts.ffn_hidden_size))
                      for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)]
        return options, torch.stack((w1, v1), 1), w2.mT
    flags = _flags_of(experts)
    parts = 1 + flags["has_gate"]

    def in_parts(rows):                                      # [E, P·F, ..] -> [E, P, F, ..]
        if flags["is_concatenated"]:
            return rows.unflatten(1, (parts, -1))
        return rows.unflatten(1, (-1, parts)).transpose(1, 2)

    up = "gate_up_proj" if flags["has_gate"] else "up_proj"
    if flags["has_bias"]:
        options["fc1_bias"] = in_parts(getattr(experts, up + "_bias"))
        options["fc2_bias"] = experts.down_proj_bias
    fc1, fc2 = getattr(experts, up), experts.down_proj
    if flags["is_transposed"]:
        fc1, fc2 = fc1.mT, fc2.mT
    return options, in_parts(fc1), fc2


# The library's flags of a module's weights, with the values for modules without them.
FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True, "is_transposed": False,
         "has_post_expert_norm": False}


def _flags_of(experts):
    transposed = {"is_transposed": type(experts).__name__ == "Llama4TextExperts"}
    return {name: getattr(experts, name, usual) for name, usual in (FLAGS | transposed).items()}


class Gate(NamedTuple):
    """What an experts class of the library computes between its two products.

    activation: a name of kernels.ACTIVATIONS, or "act_fn" for the module's.
    constants: constant of the activation -> attribute of the module.
    """
    activation: str
    constants: dict[str, str]


QUICK_GEGLU_GATE = Gate("quick_geglu", {"alpha": "alpha", "clamp_value": "limit"})
CLAMPED_SWIGLU_GATE = Gate("swiglu", {"clamp_value": "swiglu_limit"})
SITU_GATE = Gate("situ", {
    "beta": "act_fn.gate_softcap.softcap", "linear_beta": "act_fn.up_softcap.softcap"})

# class that defines the gate -> the gate
GATES = {
    "BeamExperts": Gate("act_fn", {}),
    "Step3p7Experts": Gate("act_fn", {}),
    "DeepseekV4Experts": Gate("act_fn", {"clamp_value": "limit"}),
    "Glm5NextTextExperts": CLAMPED_SWIGLU_GATE,
    "HYV4Experts": CLAMPED_SWIGLU_GATE,
    "HYV4VLExperts": CLAMPED_SWIGLU_GATE,
    "GptOssExperts": QUICK_GEGLU_GATE,
    "OpenAIPrivacyFilterExperts": QUICK_GEGLU_GATE,
    "MiniMaxM3VLExperts": Gate("quick_geglu", {
        "alpha": "swiglu_alpha", "clamp_value": "swiglu_limit"}),
    "Inkling2Experts": SITU_GATE,
    "Inkling2LoopExperts": SITU_GATE,
}
ACT_FNS = {
    "transformers.activations.SiLUActivation": "swiglu",
    "torch.nn.modules.activation.SiLU": "swiglu",
    "torch.nn.functional.silu": "swiglu",
    "transformers.activations.GELUTanh": "geglu",
    "transformers.activations.ReLUSquaredActivation": "relu2",
    "torch.nn.modules.activation.ReLU": "relu",
}


@torch.compiler.assume_constant_result                       # Dynamo does not know __qualname__
def _full_name(owner, method=None):
    named = owner if method is None else getattr(owner, method)
    return f"{named.__module__}.{named.__qualname__}"


def options_of(experts):
    """The activation of an experts module, as keyword arguments of kernels.expert_mlp.
    NotImplementedError: names what expert_mlp cannot express.
    """
    def refuse(what):
        raise NotImplementedError(
            f"{type(experts).__name__}: {what} cannot be expressed by kernels.expert_mlp; "
            f"try another implementation")

    flags = _flags_of(experts)
    if flags["has_post_expert_norm"]:
        refuse("has_post_expert_norm")
    method = "transformers.integrations.moe._default_apply_gate"
    if hasattr(experts, "_apply_gate"):                      # not in Llama 4 and DBRX
        method = _full_name(type(experts), "_apply_gate")
    gate = Gate("act_fn", {})
    if method != "transformers.integrations.moe._default_apply_gate":
        owner = method.split(".")[-2]
        if owner not in GATES or not method.startswith("transformers.models."):
            refuse(f"the overridden _apply_gate ({method})")
        gate = GATES[owner]
        if owner == "Step3p7Experts" and experts.limit != math.inf:
            refuse(f"limit = {experts.limit}, which clamps after the activation,")

    kind = gate.activation
    if kind == "act_fn":
        act = experts.mlp.activation_fn if hasattr(experts, "mlp") else experts.act_fn
        act = _full_name(type(act) if isinstance(act, nn.Module) else act)
        if act not in ACT_FNS:
            refuse(f"act_fn {act}")
        kind = ACT_FNS[act]
    if moe.kernels.ACTIVATIONS[kind].parts != 1 + flags["has_gate"]:
        refuse(f"has_gate = {flags['has_gate']} with {kind}")

    options = {"kind": kind}
    if kind == "quick_geglu":
        options["linear_offset"] = 1.0
    for name, path in gate.constants.items():
        options[name] = operator.attrgetter(path)(experts)
    return options
