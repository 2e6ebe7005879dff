"""What all modules of the layer have: a config, weights, and the ranks that they run on. Open it to
see what the layer asks of its ranks, and how weights are drawn.

Here there is one process. Several ranks are in ranks/parallel.py, whose ProcessGroups answers the
same questions; the layer does not know which of the two it has.
"""
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if __package__:
    from . import compat
else:
    import compat
if TYPE_CHECKING:
    from .kernels import Plan


# ---- Dispatch: rows to their experts, and their outputs back ----

class Dispatch(Protocol):
    """What MoELayer.dispatch returns. The layer calls the three methods once each, in this order,
    with the experts between the first and the second. Rows have width H, or ℓ with latent experts.
    The experts multiply by the probs, so the way back is a plain sum.
    """

    def wait_for_rows(self) -> "tuple[Tensor, Tensor, Plan]":
        """(rows [M, H], probs [M, K], plan): the arguments of Experts.forward.

        The plan is kernels.plan_permutation(experts [M, K], E / ep), where experts holds numbers of
        this rank's experts, from 0, and E / ep for what is unrouted. If each row has one expert,
        probs and experts have one column.
        """

    def send_back(self, output: Tensor):
        """output [M, H] of the experts, in the order of the rows -> a handle. It may start the send
        without waiting; the shared expert then runs.
        """

    def wait_and_combine(self, handle) -> Tensor:
        """[T, H]: for each token of this rank the sum of its experts' outputs."""


class Local(NamedTuple):
    """A Dispatch where nothing crosses ranks: kernels.expert_mlp gathers and combines the rows."""
    tokens: Tensor
    probs: Tensor
    plan: "Plan"

    def wait_for_rows(self):
        return self.tokens, self.probs, self.plan

    def send_back(self, output):
        return output

    def wait_and_combine(self, handle):
        return handle


# ---- Ranks: what the layer asks of them, with the answers of one process ----

# The names of groups: see ranks.parallel.ProcessGroups.
GROUPS = "tp", "ep", "tp_cp", "dp_cp", "tp_dp_cp", "expt_dp"


class OneProcess:
    """The ranks of a layer that runs in one process: every group has one rank, and is None."""
    tp = ep = tp_cp = dp_cp = tp_dp_cp = expt_dp = None

    def size(self, name: str) -> int:
        """How many ranks the group of this name has."""
        return 1

    def rank(self, name: str) -> int:
        """This rank's number in the group."""
        return 0

    def sum(self, x, group):
        """The sum of x over the group, without gradient. With one rank, x itself."""
        return x

    def sums(self, tensors: list[Tensor], groups: list) -> list[Tensor]:
        """`sum` of each tensor over its own group, with as few collectives as possible."""
        return tensors

    def dispatch(self, x: Tensor, probs: Tensor, indices: Tensor, plan: "Plan", config) -> Dispatch:
        """For the arguments see MoELayer.dispatch."""
        return Local(x, probs, plan)

    def enter_tp(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """The tokens of all tp ranks. With sequence_parallel each rank has a part of them, and the
        parts are gathered. Without it every rank has all tokens, so the result is x.
        """
        return x

    def leave_tp(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """The opposite: the sum of x over the tp ranks. With sequence_parallel each rank gets its
        part of the sum.
        """
        return x

    def adopt(self, module: "MoEModule") -> None:
        """Called by each new module, before it has tensors. Over several ranks the module's state
        dicts get their hooks here; in one process there are none.
        """

    def compare_replicas(self, model: nn.Module, biases: dict[str, Tensor]) -> None:
        """RuntimeError on every rank, if ranks hold different bits where they should hold the same:
        in a MoE parameter, or in one of these expert biases (name -> [E]). In one process there is
        nothing to compare.
        """


def group_size(group) -> int:
    """The number of ranks of a process group. None is a group of one rank."""
    return 1 if group is None else group.size()


# ---- Modules ----

class Sharding(NamedTuple):
    """How ranks hold a parameter."""
    over: str                          # the name of the group that shares it out
    axis: int | None                   # along which axis; None: whole on every rank
    summed_over: str                   # the name of the group that sums its gradient


WHOLE = Sharding("tp", axis=None, summed_over="tp_dp_cp")


# parameter -> its first value; the others are drawn
_FILLED_WITH = {"bias": 0.0, "fc1_bias": 0.0, "fc2_bias": 0.0, "norm": 1.0}


class MoEModule(nn.Module):
    """A module of the layer. It declares which of its parameters ranks share out, and how."""
    # parameter -> the config's field with its standard deviation
    std_fields = {
        "weight": "init_std", "fc1": "init_std", "fc2": "output_std", "gate_weight": "init_std"}
    # parameter -> its Sharding, or a tuple of a Sharding's three fields; a parameter that is not
    # here is whole. One in a submodule that is no MoEModule is named as in "act.weight".
    sharded: dict[str, tuple] = {}

    def __init__(self, config, pg_collection: OneProcess | None = None):
        super().__init__()
        self._config = config
        self.pg_collection = pg_collection or OneProcess()
        self.pg_collection.adopt(self)

    @property
    def config(self):
        return self._config

    @config.setter
    def config(self, config):
        raise AttributeError(
            f"a config is set once; needs a new {type(self).__name__} of "
            f"dataclasses.replace(module.config, ..), and its load_state_dict with this one's")

    def set_config(self, config) -> None:
        """Sets the config of this module and its parts. Their tensors must fit it already."""
        for part in self.modules():
            if isinstance(part, MoEModule):
                part._config = config

    def extra_repr(self) -> str:
        """The shapes of this module's own tensors, for print."""
        own = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in own)

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))

    def shard(self, name: str) -> Sharding:
        """How ranks hold this parameter."""
        return Sharding(*self.sharded.get(name, WHOLE))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws this module's own weights anew (normal). Biases become zero, norms one.

        On one kind of device a seed gives the same model for every ep, tp and dtype. For this
        torch's default generator draws one seed for each parameter, and expert e is drawn whole and
        in fp32, from seed + e. A rank draws only its own experts, and keeps its part of each.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if name in _FILLED_WITH:
                parameter.fill_(_FILLED_WITH[name])
            elif name in self.std_fields and compat.has_values(parameter):
                std = getattr(self.config, self.std_fields[name])
                own, shape, (first, *starts) = self._own_part(name, parameter)
                part = tuple(slice(at, at + size) for at, size in zip(starts, own.shape[1:]))
                seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
                generator = torch.Generator(own.device)
                for e, expert in enumerate(own, first):
                    generator.manual_seed(seed + e)
                    drawn = torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32,
                                         device=own.device)
                    expert.copy_(drawn[part])

    def _own_part(self, name, parameter):
        """(this rank's part [experts, ..], the shape of one whole expert, where the part begins).
        A parameter without an axis of experts gets one of length 1.
        """
        own, starts = compat.own_part(parameter)
        shape = list(parameter.shape)
        over, axis, _ = self.shard(name)
        if axis is not None:
            starts[axis] += self.pg_collection.rank(over) * shape[axis]
            shape[axis] *= self.pg_collection.size(over)
        if axis == 0:
            return own, shape[1:], starts
        return own[None], shape, [0, *starts]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None,
    ) -> dict[str, Tensor]:
        """prefix + name -> tensor: see ranks.sharding.sharded_state_dict. ValueError:
        sharded_offsets or metadata are not empty.
        """
        if sharded_offsets or metadata:
            raise ValueError(f"sharded_offsets is {sharded_offsets!r} and metadata {metadata!r}; "
                             f"both need to be empty: layers are told apart by their prefix")
        return {prefix + unwrapped(path): tensor for path, tensor in self.state_dict().items()}


def unwrapped(path: str) -> str:
    """The path without the names that torch.compile and checkpoint_wrapper put into it."""
    return re.sub(r"\b(_orig_mod|_checkpoint_wrapped_module)\.", "", path)


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """(the module that says which ranks hold the parameter, the parameter's name in that module).

    The module is the nearest MoEModule above the parameter, else the one that holds it. A parameter
    of a submodule has a name such as "act.weight". The tensors of a parametrization count as the
    parameter that they make.
    """
    names = re.sub(r"\bparametrizations\.([^.]+)\..*", r"\1", path).split(".")
    above = [module]
    for name in names[:-1]:
        above.append(above[-1].get_submodule(name))
    for depth in reversed(range(len(above))):
        if isinstance(above[depth], MoEModule):
            return above[depth], unwrapped(".".join(names[depth:]))
    return above[-1], names[-1]
