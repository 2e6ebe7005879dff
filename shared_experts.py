"""The shared expert: an MLP for every token, in one call or in five steps beside the routed path.
Open it to see how the steps overlap.
"""
import contextlib
import enum
import functools
from typing import TYPE_CHECKING, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from . import compat, kernels
    from .base import WHOLE, Dispatch, MoEModule, OneProcess, Sharding
else:
    import compat
    import kernels
    from base import WHOLE, Dispatch, MoEModule, OneProcess, Sharding
if TYPE_CHECKING:
    from .moe import MoEConfig


# ---- Shared expert: the order of its five steps ----

class SharedExpertState(enum.Enum):
    """Which of the five steps was the last."""
    IDLE = 0
    PRE_FORWARD_COMM_DONE = 1
    FC1_FORWARD_DONE = 2
    FC2_FORWARD_DONE = 3
    POST_FORWARD_COMM_DONE = 4


_State = SharedExpertState
# state -> the tensors that later steps need
_CACHED_IN = {
    _State.IDLE: (),
    _State.PRE_FORWARD_COMM_DONE: ("cached_fc1_input", "gate_score"),
    _State.FC1_FORWARD_DONE: ("cached_fc2_input", "gate_score"),
    _State.FC2_FORWARD_DONE: ("cached_fc2_output", "gate_score"),
    _State.POST_FORWARD_COMM_DONE: ("cached_output", "gate_score"),
}


def overlap_state_check(required_state: SharedExpertState, next_state: SharedExpertState):
    """Decorator of a step: it runs only in `required_state`, and leads to `next_state`.

    RuntimeError, before anything changes: overlap is off, the state is another, or a tensor of the
    step before is missing. An exception inside the step drops all caches.
    """
    def decorate(step):
        @compat.unchecked_side_effects
        @functools.wraps(step)
        def checked(self, *args, **kwargs):
            _check_step(self, step.__name__, required_state)
            try:
                result = step(self, *args, **kwargs)
                self._overlap_state = next_state
                return result
            except BaseException:
                self.reset_overlap()
                raise

        return checked

    return decorate


def _check_step(shared, step, required_state):
    if not shared.config.shared_expert_overlap:
        raise RuntimeError(f"{step} needs shared_expert_overlap=True, found False: "
                           f"call the module itself")
    if shared._overlap_state is not required_state:
        raise RuntimeError(f"{step} needs the state {required_state.name}, found "
                           f"{shared._overlap_state.name}; reset_overlap() starts again")
    for name in _CACHED_IN[required_state]:
        without_gate = name == "gate_score" and shared.gate_weight is None
        if getattr(shared, name) is None and not without_gate:
            raise RuntimeError(f"{step} needs {name} from the step before, found None; "
                               f"reset_overlap() starts again")


# ---- Shared expert: to the side stream and back ----
# A tensor returns to the current stream, forward or backward, by an op that waits and copies. In a
# graph of torch 2.13 a wait by itself could be moved after the op that reads the data.

_SIDE_STREAMS: dict = {}                     # device -> torch.Stream


@torch.compiler.assume_constant_result       # a graph cannot make a stream, so its tracer does
def _has_side_stream(device) -> bool:
    """Whether this device has streams. If so, its side stream is made at the first call."""
    if device not in _SIDE_STREAMS and device.type not in ("cpu", "meta"):
        if hasattr(torch.get_device_module(device), "Stream"):       # MPS has none
            _SIDE_STREAMS[device] = torch.Stream(device)
    return device in _SIDE_STREAMS


def _current_stream(device):
    return torch.accelerator.current_stream(device)


def _empty_on_other_stream(tensor, others=()):
    if compat.makes_cuda_graphs():
        raise RuntimeError(
            "shared_expert_overlap with CUDA graphs (mode=\"reduce-overhead\"): graphs of one "
            "memory pool must not run on two streams; compile without them, or without overlap")
    return torch.empty_like(tensor)


@compat.op(_empty_on_other_stream)
def _fork_stream(tensor: Tensor) -> Tensor:
    """A copy for the side stream, which waits for the current one."""
    copy = tensor.clone()
    side = _SIDE_STREAMS[tensor.device]
    side.wait_stream(_current_stream(tensor.device))
    copy.record_stream(side)                 # keeps its memory until it is read
    return copy


@compat.op(_empty_on_other_stream)
def _join_stream(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy of `tensor`, after the current stream has waited for the side stream. `others` are
    further tensors that the current stream may read from now on: this op comes after those that
    made them.
    """
    current = _current_stream(tensor.device)
    current.wait_stream(_SIDE_STREAMS[tensor.device])
    for made_there in (tensor, *others):
        made_there.record_stream(current)
    return tensor.clone()


class _ToSideStream(torch.autograd.Function):
    """(input, *weights) -> (input for the current stream; input and weights for the side stream).

    With `wait` the side stream first waits for the current one, and gets a copy of the input. In
    the backward the current stream waits for the side stream's gradients.
    """

    # The tensors have no names here. Else Dynamo up to torch 2.14 might leave out ctx: without
    # gradients it does if `apply` gets as many arguments as `forward` has names, ctx among them.
    @staticmethod
    def forward(ctx, stream, wait, *tensors):
        ctx.stream = stream
        ctx.set_materialize_grads(False)
        input, *weights = tensors
        if wait:
            side_input = _fork_stream(input)
        else:
            input.record_stream(stream)
            side_input = input.view_as(input)
        outputs = input.view_as(input), side_input, *[x.view_as(x) for x in weights]
        sources = input, input, *weights
        frozen = [y for x, y in zip(sources, outputs) if not x.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad_main, *grads):
        # In a graph an output that got no gradient has zeros here. Nobody has to wait for them.
        _, _, *needed = ctx.needs_input_grad
        grad_main = grad_main if needed[0] else None
        grads = [grad if need else None for grad, need in zip(grads, needed)]
        grad_side, *grad_weights = _joined(grads, grad_main, ctx.stream)
        grad_input = grad_main if grad_side is None else grad_side
        if grad_side is not None and grad_main is not None:
            grad_input = grad_side + grad_main
        # stream, wait, input, *weights
        return None, None, grad_input, *grad_weights


def _joined(grads, grad_main, stream):
    """The side stream's gradients, some of them None, after the current stream has waited for them.

    The join has grad_main, the gradient of the current stream's path, as an argument: so in a graph
    it comes after that path, and the two overlap.
    """
    i = next((i for i, grad in enumerate(grads) if grad is not None), None)
    if i is None:
        return grads
    # In a graph an op is sure to come after those that make its arguments, and after no others. So
    # the join takes a view that is made on the side stream: then it comes after what the side
    # stream does with the gradient.
    with stream:
        grad = grads[i].view_as(grads[i])
    others = [x for x in (*grads[i + 1:], grad_main) if x is not None]
    return [*grads[:i], _join_stream(grad, others), *grads[i + 1:]]


class _BackwardStreamWait(torch.autograd.Function):
    """input -> input. In the backward the side stream waits for the routed path's launches."""

    @staticmethod
    def forward(ctx, input):
        return input.view_as(input)

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        _SIDE_STREAMS[grad.device].wait_stream(_current_stream(grad.device))
        return grad


class _FromSideStream(torch.autograd.Function):
    """A copy of output. First the current stream waits for the side stream. In the backward the
    side stream waits for the current one, and gets a copy of the gradient.

    A non-reentrant checkpoint recomputes when the first node of the backward unpacks a saved
    tensor, on the stream of that node. If it were the side stream, nobody would wait for the
    recomputation. This node is the first, on the current stream: so it saves a tensor to unpack.
    """

    @staticmethod
    def forward(ctx, output):
        ctx.save_for_backward(output.new_empty(0))
        return _join_stream(output, [])

    @staticmethod
    @compat.first_derivative_only
    def backward(ctx, grad):
        _ = ctx.saved_tensors                # a checkpoint recomputes here
        return _fork_stream(grad)


def set_tensor_grad_fn_sequence_sr(tensor: Tensor | None, value: int) -> None:
    """Sets the priority of the tensor's node. The backward runs, of all nodes that are ready, the
    one with the highest priority first. Without a tensor or a grad_fn this does nothing.
    """
    node = getattr(tensor, "grad_fn", None)
    if node is not None:
        compat.set_backward_order(node, value)


# ---- Shared expert: for every token, in one call or in five steps beside the routed path ----

class SharedExpertMLP(MoEModule):
    """An MLP for every token, of width Fs = shared_expert_intermediate_size, without biases.

    hidden_states [.., H] -> the same shape. With `gate` the output is multiplied by
    sigmoid(gate_weight · x). Over tp each rank has its part of the first axis with
    sequence_parallel, else all of it.

    With shared_expert_overlap five steps do what `forward` does, on the side stream:
    pre_forward_comm, linear_fc1_forward_and_act, linear_fc2_forward, post_forward_comm, get_output.
    A step out of order is a RuntimeError. The module keeps what is between two steps, so only one
    thread at a time may run such a layer.
    """
    sharded = dict.fromkeys(("fc1", "fc2"), Sharding("tp", axis=1, summed_over="dp_cp"))

    def __init__(self, config: "MoEConfig", gate: bool, pg_collection: OneProcess | None = None):
        super().__init__(config, pg_collection)
        size = config.shared_expert_intermediate_size
        ranks = self.pg_collection.size("tp")
        if size is None or size % ranks:
            raise ValueError(f"shared_expert_intermediate_size is {size}; "
                             f"needs a multiple of the tp size, {ranks}")
        P, H = config.parts, config.hidden_size
        self.fc1 = self.parameter(P, size // ranks, H)
        self.fc2 = self.parameter(H, size // ranks)
        self.gate_weight = self.parameter(1, H) if gate else None
        # A tp rank that has a part of the tokens has a part of the gate's gradient, else all of it.
        over = "tp_dp_cp" if ranks == 1 or config.sequence_parallel else "dp_cp"
        self.sharded = {**self.sharded, "gate_weight": WHOLE._replace(summed_over=over)}
        self.reset_overlap()
        self.reset_parameters()

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_score = self._score(hidden_states, self.gate_weight)
        act = self._fc1_and_act(self._enter(hidden_states), self.fc1)
        output = self._leave(self._fc2(act, self.fc2))
        return output if gate_score is None else output * gate_score

    # The weights are arguments, since in five steps they are outputs of _ToSideStream. Its backward
    # waits for their gradients.

    def _score(self, x, gate_weight=None):
        H = self.config.hidden_size
        if x.shape[-1] != H:
            raise ValueError(f"hidden_states has shape {list(x.shape)}; needs [.., {H}]")
        if x.dtype != self.fc1.dtype and not compat.is_any_autocast():
            raise TypeError(f"hidden_states is {x.dtype}, and the shared expert {self.fc1.dtype}; "
                            f"they need one dtype")
        return None if gate_weight is None else F.linear(x, gate_weight).sigmoid()

    def _enter(self, x):
        return self.pg_collection.enter_tp(x, self.config.sequence_parallel)

    def _fc1_and_act(self, x, fc1):
        hidden = F.linear(x, fc1.flatten(0, 1))
        return kernels.activation(
            hidden, self.config.bound_activation,
            fp8_input_store=self.config.activation_fp8_input_store)

    def _fc2(self, x, fc2):
        return F.linear(x, fc2)

    def _leave(self, y):
        return self.pg_collection.leave_tp(y, self.config.sequence_parallel)

    # -- the same in five steps --

    @property
    def stream(self) -> torch.Stream | None:
        """The side stream of the parameters' device. None without overlap or an accelerator."""
        if not self.config.shared_expert_overlap or not _has_side_stream(self.fc1.device):
            return None
        return _SIDE_STREAMS[self.fc1.device]

    def _on_side_stream(self):
        return contextlib.nullcontext() if self.stream is None else self.stream

    @overlap_state_check(_State.IDLE, _State.PRE_FORWARD_COMM_DONE)
    def pre_forward_comm(self, input: Tensor, wait_current_stream: bool = True) -> Tensor:
        """Computes the gate's score, and gathers the tokens of all tp ranks. Returns the input for
        the routed path. Without wait_current_stream the side stream must have waited for the input
        already.
        """
        if compat.is_in_parts(self.fc1):
            raise RuntimeError("pre_forward_comm needs whole weights, found a DTensor: fully_shard "
                               "gathers them for a call, not for steps; shard the layer, not its "
                               "shared expert alone")
        weights = [x for x in (self.fc1, self.fc2, self.gate_weight) if x is not None]
        main_input = side_input = input
        if self.stream is not None:
            main_input, side_input, *weights = _ToSideStream.apply(
                self.stream, wait_current_stream, input, *weights)
            if torch.compiler.is_compiling() and not side_input.requires_grad:
                # Without gradients nothing but this ties the main path to the fork, and a graph
                # might launch the fork last.
                main_input = compat.copy_after(main_input, side_input)
        self._weights = weights
        with self._on_side_stream():
            self.gate_score = self._score(side_input, *weights[2:])
            self.cached_fc1_input = self._enter(side_input)
        return main_input

    @overlap_state_check(_State.PRE_FORWARD_COMM_DONE, _State.FC1_FORWARD_DONE)
    def linear_fc1_forward_and_act(self, overlapped_comm_output: Tensor | None = None) -> None:
        """Computes fc1 and the activation. overlapped_comm_output: what a dispatcher of your own
        communicates beside this step; its backward is launched first.
        """
        with self._on_side_stream():
            act = self._fc1_and_act(self.cached_fc1_input, self._weights[0])
        # In a graph the order is fixed already.
        if self.stream is not None and not torch.compiler.is_compiling():
            act = _BackwardStreamWait.apply(act)
        node = getattr(overlapped_comm_output, "grad_fn", None)
        if node is not None:
            set_tensor_grad_fn_sequence_sr(act, compat.backward_order(node) - 1)
        self.cached_fc1_input = None
        self.cached_fc2_input = act

    @overlap_state_check(_State.FC1_FORWARD_DONE, _State.FC2_FORWARD_DONE)
    def linear_fc2_forward(self, overlapped_comm_output: Tensor | None = None) -> None:
        """Computes fc2. Of all nodes that are ready, the backward runs that of
        overlapped_comm_output first.
        """
        if overlapped_comm_output is not None:
            set_tensor_grad_fn_sequence_sr(overlapped_comm_output, torch.iinfo(torch.int).max)
        with self._on_side_stream():
            self.cached_fc2_output = self._fc2(self.cached_fc2_input, self._weights[1])
        self.cached_fc2_input = None

    @overlap_state_check(_State.FC2_FORWARD_DONE, _State.POST_FORWARD_COMM_DONE)
    def post_forward_comm(self) -> None:
        """Sums over the tp ranks."""
        with self._on_side_stream():
            self.cached_output = self._leave(self.cached_fc2_output)
        self.cached_fc2_output = None

    @overlap_state_check(_State.POST_FORWARD_COMM_DONE, _State.IDLE)
    def get_output(self) -> Tensor:
        """Applies the gate and returns the output, for which the current stream waits."""
        with self._on_side_stream():
            output = self.cached_output
            if self.gate_score is not None:
                output = output * self.gate_score
        if self.stream is not None:
            output = _FromSideStream.apply(output)
        self.reset_overlap()
        return output

    def wait_current_stream(self) -> None:
        """The side stream waits for what is on the current one so far."""
        if self.stream is not None:
            self.stream.wait_stream(_current_stream(self.fc1.device))

    @compat.unchecked_side_effects
    def reset_overlap(self) -> None:
        """Back to IDLE, without caches. Call it after an exception outside of the steps."""
        self._overlap_state = SharedExpertState.IDLE
        self.gate_score = None
        self.cached_fc1_input = None
        self.cached_fc2_input = None
        self.cached_fc2_output = None
        self.cached_output = None
        self._weights = None                 # fc1, fc2, gate_weight, for the side stream


class OverlappedDispatch(NamedTuple):
    """A Dispatch, with the shared expert's steps beside its communication."""
    dispatched: Dispatch
    shared: SharedExpertMLP

    def wait_for_rows(self):
        self.shared.linear_fc1_forward_and_act()
        return self.dispatched.wait_for_rows()

    def send_back(self, output):
        return self.dispatched.send_back(output)

    def wait_and_combine(self, handle):
        self.shared.linear_fc2_forward()
        self.shared.post_forward_comm()
        return self.dispatched.wait_and_combine(handle)


def ends_overlap(forward):
    """Decorator of the layer's forward: after it the shared expert keeps nothing. That holds after
    an exception too, since a checkpoint ends its recomputation by raising one.
    """
    @functools.wraps(forward)
    def ended(self, *args, **kwargs):
        try:
            return forward(self, *args, **kwargs)
        finally:
            if self.config.shared_expert_overlap:
                self.shared_experts.reset_overlap()

    return ended
