"""Tests of the order of what runs on two streams (docs/overlap.md): in eager mode, in a graph, over
ranks. The streams are stand-ins on the CPU, and the code generated for a card is read.

    python -m pytest tests/test_overlap.py
"""
import collections
import dataclasses
import functools
import itertools
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

import shared_experts
from moe import MoELayer, SharedExpertMLP
from ranks import parallel
from ranks.parallel import ProcessGroups
from ranks.test_ranks import mesh_of, over_ranks, overlapped_layer
from test_moe import (
    CONFIGS, EAGER_WAYS, STEPS, WAYS, about, agree, close, compiled, exact_config, fresh_start,
    leaf, outcome, saved_bytes, slow, slow_but, small_config)
from tests.test_sources import HERE, run


class Recorder:
    """A stream that writes down who waits for whom, and every operation that runs on it."""
    current: list = []

    def __init__(self, name, trace):
        self.name = name
        self.trace = trace

    def wait_stream(self, other):
        self.trace.append(f"{self.name}  waits for {other.name}")

    def __enter__(self):
        Recorder.current.append(self)

    def __exit__(self, *_):
        Recorder.current.pop()


def stand_in(patch, main, side, record_stream=lambda tensor, stream: None) -> None:
    """From now on the CPU is an accelerator with these two streams, on any build of torch."""
    Recorder.current = [main]
    patch.setattr(shared_experts, "_current_stream", lambda device: Recorder.current[-1])
    patch.setitem(shared_experts._SIDE_STREAMS, torch.device("cpu"), side)
    patch.setattr(torch.Tensor, "record_stream", record_stream)


def in_runs(trace: list[str]) -> str:
    """`where  what, what x2, ..`: one line for each run of steps at the same place."""
    lines = []
    for where, together in itertools.groupby(trace, lambda step: step.partition("  ")[0]):
        repeated = [(what, len([*same_steps])) for what, same_steps in itertools.groupby(together)]
        what = [step.removeprefix(where).strip() + f" x{n}" * (n > 1) for step, n in repeated]
        line = f"{where}  {', '.join(what)}".strip()
        lines.append(textwrap.fill(line, 95, subsequent_indent="      "))
    return "\n".join(lines)


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, trace):
        ctx.name = name
        ctx.trace = trace
        trace.append(f"{Recorder.current[-1].name}  {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.trace.append(f"backward  {ctx.name}")
        return grad, None, None


def noted(owner, name: str, label: str, trace, monkeypatch) -> None:
    """From now on owner.name writes to the trace."""
    function = getattr(owner, name)

    def noting(*args):
        y = function(*args)
        return None if y is None else Note.apply(y, label, trace)
    monkeypatch.setattr(owner, name, noting)


def recorded(shared, trace, monkeypatch) -> None:
    """From now on the shared expert's streams and products write to the trace."""
    stand_in(monkeypatch, Recorder("main", trace), Recorder("side", trace), lambda _, stream: (
        trace.append(f"{stream.name}  keeps a tensor")))
    for name in ("_score", "_enter", "_fc1_and_act", "_fc2", "_leave"):
        noted(shared, name, "shared" + name, trace, monkeypatch)


def test_overlap_order_and_waits(monkeypatch):
    """The steps get `overlapped_comm_output`. In the backward each communication then goes first,
    and the side stream waits for it."""
    shared = SharedExpertMLP(exact_config(shared_expert_overlap=True), gate=True)
    trace = []
    recorded(shared, trace, monkeypatch)
    x = leaf(4, 1, 6)
    shared.pre_forward_comm(x)
    dispatched = Note.apply(x.sin(), "dispatch", trace)
    shared.linear_fc1_forward_and_act(dispatched)
    rows = Note.apply(dispatched.cos(), "experts", trace)
    combined = Note.apply(rows.sin(), "combine", trace)
    shared.linear_fc2_forward(combined)
    shared.post_forward_comm()
    out = combined + shared.get_output()
    trace.append("")
    out.sum().backward()
    assert_expected_inline(in_runs(trace), """\
side  waits for main, keeps a tensor, shared_score, shared_enter
main  dispatch
side  shared_fc1_and_act
main  experts, combine
side  shared_fc2, shared_leave
main  waits for side, keeps a tensor

backward  combine
side  waits for main, keeps a tensor
backward  shared_leave, shared_fc2, experts, dispatch
side  waits for main
backward  shared_fc1_and_act, shared_enter, shared_score
main  waits for side, keeps a tensor x4""")


def test_overlap_on_two_streams_matches_one(monkeypatch):
    """What is frozen gets no gradient. The rest gets those of the layer without overlap."""
    config = exact_config(shared_expert_overlap=True, shared_expert_gate=True, init_std=0.5)
    fc1, fc2, gate = [f"shared_experts.{name}" for name in ("fc1", "fc2", "gate_weight")]
    for frozen in [(), ("x",), ("router.weight", "experts.fc1", "experts.fc2"), (fc2,),
                   ("x", fc1), ("x", fc1, gate)]:
        layer = MoELayer(config)
        plain = MoELayer(dataclasses.replace(config, shared_expert_overlap=False))
        plain.load_state_dict(layer.state_dict())
        for name, parameter in [*layer.named_parameters(), *plain.named_parameters()]:
            parameter.requires_grad_(name not in frozen)
        x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad="x" not in frozen)
        shared = layer.shared_experts
        with about(frozen), monkeypatch.context() as patch:
            recorded(shared, [], patch)
            agree(layer, plain, x)
            shared.pre_forward_comm(x)
            trained = [weight.requires_grad for weight in shared._weights]
            assert trained == [weight.requires_grad for weight in shared.parameters()]
            shared.reset_overlap()


class Clock(Recorder):
    """A stream of a RaceCheck. `seen[stream]` is the last operation of that stream which is done
    before the next operation here."""

    def __init__(self, check, name):
        super().__init__(name, None)
        self.check = check
        self.seen = collections.Counter()

    def wait_stream(self, other):
        if self.check.notices("waits"):
            self.seen |= other.seen


class Used(NamedTuple):
    """A block of memory: the stream whose pool it is from, and (stream, number) of operations."""
    gone: Callable
    home: Clock
    recorded: set
    written: list
    read: list


class RaceCheck(torch.utils._python_dispatch.TorchDispatchMode):
    """Whether an eager forward and backward on two streams would race on an accelerator.

    Each operation reads and writes memory at a time of its stream's clock. An operation of the
    other stream has to be waited for before its result is read, before what it reads is written
    over, and before its memory is given out again, unless the memory was recorded on that stream.
    Autograd runs a node on the stream of its forward. Its own waits between nodes are not counted:
    they would hide that one of the project's is missing, which a graph then lacks.

    `ignored` is what does not happen: "_fork_stream waits, forward", ..
    """
    bodies = {op._qualname: op._init_fn
              for op in (shared_experts._fork_stream, shared_experts._join_stream)}

    def __init__(self, patch, ignored=None):
        super().__init__()
        self.main = Clock(self, "main")
        self.node_streams = {}               # a node's sequence number -> its forward's stream
        self.memory = {}
        self.freed = []                      # (pool, stream, number): freed before that was done
        self.races = []
        self.ignored = ignored
        self.noticed = []
        stand_in(patch, self.main, Clock(self, "side"), lambda tensor, stream: (
            self.notices("records") and self.used(tensor).recorded.add(stream)))
        patch.setattr(shared_experts, "_current_stream", lambda device: self.current())

    def notices(self, what) -> bool:
        frame = sys._getframe()
        while frame.f_code.co_filename != shared_experts.__file__:
            frame = frame.f_back
        direction = "forward" if torch._C._current_autograd_node() is None else "backward"
        self.noticed.append(f"{frame.f_code.co_name} {what}, {direction}")
        return self.noticed[-1] != self.ignored

    def current(self) -> Clock:
        node = torch._C._current_autograd_node()
        if len(Recorder.current) > 1:                        # a stream is entered
            return Recorder.current[-1]
        return self.main if node is None else self.node_streams.get(node._sequence_nr(), self.main)

    def used(self, tensor) -> Used:
        from torch.multiprocessing.reductions import StorageWeakRef
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            gone = StorageWeakRef(storage).expired
            self.memory[storage._cdata] = Used(gone, self.current(), set(), [], [])
        return self.memory[storage._cdata]

    def check(self, what, stream, operations):
        for other, number in operations:
            if stream.seen[other] < number:
                self.races.append(f"{what} on {stream.name} before {other.name} is done")

    def collect(self):
        for key, used in list(self.memory.items()):
            if used.gone():
                del self.memory[key]
                self.freed += [(used.home, *operation) for operation in used.written + used.read
                               if operation[0] not in (used.home, *used.recorded)]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        stream = self.current()
        # An autograd function's node is made before its forward runs.
        self.node_streams.setdefault(torch._C._autograd._get_sequence_nr() - 1, stream)
        name = function.name()
        body = self.bodies.get(name.split(".")[0])
        if body is not None:
            with self:
                return body(*args, **kwargs)

        def tensors_in(values):
            return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor)]

        self.collect()
        stream.seen[stream] += 1
        now = stream, stream.seen[stream]
        given = {**dict(zip((a.name for a in function._schema.arguments), args)), **kwargs}
        read = [self.used(x) for x in tensors_in(given)]
        changed = [self.used(x) for a in function._schema.arguments
                   if a.alias_info and a.alias_info.is_write for x in tensors_in(given.get(a.name))]
        before = set(self.memory)
        out = function(*args, **kwargs)
        outputs = tensors_in(out)
        new = [x for x in outputs if x.untyped_storage()._cdata not in before]
        if new:
            freed = [operation for home, *operation in self.freed if home is stream]
            self.check(f"memory is given to {name}", stream, freed)
            self.freed = [row for row in self.freed if row[0] is not stream]
        if outputs and not new and not changed:              # a view touches nothing
            return out
        if not re.match(r"aten::(new_\w+|\w+_like)$", name.split(".")[0]):      # a shape alone
            for used in read:
                self.check(f"{name} reads", stream, used.written)
                used.read.append(now)
        for used in changed:
            self.check(f"{name} writes", stream, used.read)
            used.written[:], used.read[:] = [now], []
        for tensor in new:
            self.used(tensor).written[:] = [now]
        return out


def races_of(function, x: Tensor, leaves, ignored=None, noticed=None) -> list[str]:
    """The races of a forward without grad, of two forwards in a row, and of both backwards."""
    for tensor in leaves:
        tensor.grad = None
    with pytest.MonkeyPatch.context() as patch, RaceCheck(patch, ignored) as check:
        with torch.no_grad():
            function(x.detach()).sin()
        (function(x).sin().sum() + function(x).sin().sum()).backward()
        for tensor in leaves:
            tensor.grad.sin()
    if noticed is not None:
        noticed += check.noticed
    return check.races


def behind_norms(*layers):
    """A cheap op before each layer, in place of a model."""
    def model(x):
        for layer in layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]))
        return x
    return model


@pytest.mark.parametrize("way", slow_but(["plain", "non-reentrant"], EAGER_WAYS))
@pytest.mark.parametrize("gate", [pytest.param(False, marks=slow), True])
def test_overlap_has_no_race(gate, way):
    """Automodel #3109: every configuration, alone, behind a norm, twice, and in checkpoints."""
    for name in CONFIGS if way in ("plain", "non-reentrant") else ["losses"]:
        options = {**CONFIGS[name], "shared_expert_overlap": True, "shared_expert_gate": gate}
        one, _ = layers = [MoELayer(exact_config(**options)) for _ in range(2)]
        weights = [p for layer in layers for p in layer.parameters()]
        half = len(weights) // 2
        x = leaf(4, 3, 6)
        behind_norms(*layers)(x)                             # what is made at the first call
        for model, used in [(one, weights[:half]), (behind_norms(one), weights[:half]),
                            (behind_norms(*layers), weights)]:
            races = races_of(WAYS[way](model), x, [x, *used])
            assert not races, (name, races[:3])


def test_overlap_every_wait_is_needed():
    """Without it, the check finds a race. In a layer the side stream waits before it works again:
    a record for the current stream is needed only where the steps do not wait by themselves. What
    _BackwardStreamWait waits for is an order, not a tensor."""
    config = exact_config(shared_expert_overlap=True, shared_expert_gate=True)
    layer = MoELayer(config)
    shared = SharedExpertMLP(config, gate=True)

    def without_waiting(x):
        """Two inputs, for both of which the side stream waits at once."""
        inputs = [x.cos(), x.sin()]
        shared.wait_current_stream()
        while inputs:
            shared.pre_forward_comm(inputs.pop(), wait_current_stream=False)
            for name in [*STEPS][1:]:
                y = getattr(shared, name)()
            y = y.cos()
            if y.requires_grad:
                y.sum().backward()
        return y.detach().requires_grad_()
    x = leaf(4, 3, 6)
    lines = []
    for function, module in ((behind_norms(layer), layer), (without_waiting, shared)):
        noticed = []
        leaves = [x, *module.parameters()]
        assert not races_of(function, x, leaves, noticed=noticed)
        for what in dict.fromkeys(noticed):
            found = races_of(function, x, leaves, ignored=what)
            race = found[0].replace("moe_compat::", "") if found else "no race"
            lines.append(f"{what}: {race}")
        lines.append("")
    assert_expected_inline("\n".join(lines), """\
_fork_stream waits, forward: aten::mm reads on side before main is done
_fork_stream records, forward: memory is given to aten::arange on main before side is done
_join_stream waits, forward: aten::clone reads on main before side is done
_join_stream records, forward: no race
_fork_stream waits, backward: aten::mul.Tensor reads on side before main is done
_fork_stream records, backward: memory is given to copy_after on main before side is done
backward waits, backward: no race
_join_stream waits, backward: aten::clone reads on main before side is done
_join_stream records, backward: no race

wait_current_stream waits, forward: aten::mm reads on side before main is done
forward records, forward: memory is given to aten::new_empty on main before side is done
_join_stream waits, forward: aten::clone reads on main before side is done
_join_stream records, forward: memory is given to aten::mm on side before main is done
_fork_stream waits, backward: aten::mul.Tensor reads on side before main is done
_fork_stream records, backward: no race
backward waits, backward: no race
_join_stream waits, backward: aten::clone reads on main before side is done
_join_stream records, backward: memory is given to aten::mm on side before main is done
""")


@slow
def test_overlap_checkpoint_in_a_graph_that_comes_first():
    """In a new process: what a library notes at its first call, Dynamo refuses in a checkpoint."""
    done = run("-c", """if True:
        import torch, moe
        from torch.utils.checkpoint import checkpoint
        layer = moe.MoELayer(moe.MoEConfig(
            32, 16, 8, topk=2, score_function="sigmoid", num_groups=4, group_topk=2,
            batch_first=True, load_balancing_type="seq_aux_loss", aux_loss_coeff=0.1,
            latent_size=8, latent_norm=True, add_bias_linear=True, enable_expert_bias=True,
            shared_expert_intermediate_size=8, shared_expert_overlap=True))
        @torch.compile(backend="aot_eager", fullgraph=True)
        def function(x):
            return checkpoint(layer, x, use_reentrant=False)
        function(torch.randn(2, 5, 32)).sum().backward()
        print(layer.experts.fc1.grad.isfinite().all().item())
        """)
    assert done.stdout == "True\n", done.stderr[-2000:]


class CapturedStream(torch.Stream):
    def wait_stream(self, other): ...


def captured(layer: MoELayer, x: Tensor, grad: bool = True) -> str:
    """The products, exchanges and stream crossings of the layer's compiled forward and backward, in
    the graphs' order, each with its stream; both give what eager mode gives. Streams of the CPU
    stand in for an accelerator's, and what AOTAutograd asks an accelerator for is answered here.
    The partitioner is Inductor's."""
    import torch._dynamo.graph_bytecode_inputs as inputs
    import torch._dynamo.variables.streams as streams
    import torch._functorch._aot_autograd.streams as passes
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.source import CurrentStreamSource
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    shown = ("mm", "addmm", "product_in", "rows_times_weights", "rows_times_rows", "fork_stream",
             "join_stream", "all_to_all_single", "wait_tensor")
    cpu = torch.device("cpu")
    side, main = CapturedStream(cpu), CapturedStream(cpu)
    events = itertools.count(100)
    lines = []

    class Current(streams.SymbolicStreamState):       # the current stream has index 0
        def __init__(self):
            super().__init__()
            inputs.reset_user_object_tracking()
            inputs.register_user_object(main, CurrentStreamSource(cpu))

    def record(title, graph_module, _):
        lines.append(title)
        for node in graph_module.graph.nodes:
            name = str(node.target).removesuffix(".default").removesuffix(".dtype_layout")
            name = name.split(".")[-1]
            if node.op == "call_function" and name in shown:
                on_side = (node.meta.get("custom") or {}).get("stream") is not None
                behind = f", behind {len(node.args[1])} more" if name == "join_stream" else ""
                name = name.replace("addmm", "mm")
                lines.append(f"{'side' if on_side else 'main'}  {name}{behind}")
        return make_boxed_func(graph_module.forward)

    def run(function):
        if grad:
            return outcome(function, x)
        with torch.no_grad():
            return [function(x)]
    want = run(layer)
    backend = aot_autograd(
        fw_compiler=functools.partial(record, "forward"),
        bw_compiler=functools.partial(record, "backward"),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"))
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, main, side)
        patch.setattr(torch._dynamo.symbolic_convert, "SymbolicStreamState", Current, raising=False)
        patch.setattr(streams, "_get_stream_by_index", lambda index: side)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: main)
        for module in (torch._dynamo.utils, torch._dynamo.guards):                # torch 2.15
            patch.setattr(module, "get_current_stream", lambda *_: main, raising=False)
        patch.setattr(passes, "new_event", lambda *_: next(events))
        patch.setattr(passes, "get_roofline_estimate", lambda _: 0.0)
        patch.setattr(passes, "get_current_stream", lambda _: 0)
        patch.setattr(passes, "get_device", lambda _: types.SimpleNamespace(type="cuda"))
        got = run(compiled(layer, backend))
    close(got, want, 1e-9 if x.dtype == torch.float64 else 1e-4)
    return "\n".join(lines)


def test_overlap_graph_puts_the_shared_expert_on_the_side_stream():
    """Forward and backward, without ranks: gate, fc1 and fc2 of the shared expert are on the side
    stream, between a fork and a join; the rest is on the main one."""
    layer = MoELayer(exact_config(shared_expert_overlap=True, shared_expert_gate=True))
    assert_expected_inline(in_runs(captured(layer, leaf(20, 6)).splitlines()), """\
forward
main  fork_stream
side  mm
main  product_in
side  mm
main  rows_times_weights x2
side  mm
main  join_stream, behind 0 more
backward
main  fork_stream
side  mm x2
main  rows_times_weights, rows_times_rows, rows_times_weights, rows_times_rows
side  mm x2
main  product_in x2
side  mm x2
main  join_stream, behind 4 more""")


@slow
@pytest.mark.parametrize("gate", [False, True])
def test_overlap_graph_without_gradients(gate):
    """In evaluation, and in training where the input or the shared expert is frozen. The fork comes
    first; a frozen weight has no product in the backward."""
    layer = MoELayer(exact_config(shared_expert_overlap=True, shared_expert_gate=gate))
    x = leaf(20, 6)
    products = 4 + 2 * gate                                  # of the shared expert's backward
    assert captured(layer, x.detach(), grad=False).splitlines()[1] == "main  fork_stream"
    forward, backward = captured(layer, x.detach()).split("\nbackward\n")
    assert forward.splitlines()[1] == "main  fork_stream"
    assert backward.count("side  mm") < products
    layer.shared_experts.requires_grad_(False)
    forward, backward = captured(layer, x).split("\nbackward\n")
    assert backward.count("side  mm") == products - 2 - gate
    assert backward.splitlines()[-1] == "main  join_stream, behind 1 more"


@over_ranks(2)
def test_overlap_over_ranks_has_no_race(rank, ranks):
    for dim, options in ("ep", {}), ("ep", CONFIGS["padded"]), ("tp", {}):
        groups = ProcessGroups.from_mesh(mesh_of(**{dim: ranks}))
        config = exact_config(
            shared_expert_overlap=True, shared_expert_gate=True, sequence_parallel=True, **options)
        layer = MoELayer(config, groups)
        x = leaf(6, 6)
        races = races_of(behind_norms(layer), x, [x, *layer.parameters()])
        assert not races, (dim, options, races[:3])


def order_of_a_step(layer) -> str:
    """The exchanges, waits and parts of forward and backward, in the order of their launches, each
    part with its stream."""
    trace = []
    exchange, wait, tolist = parallel.exchange, parallel.wait, Tensor.tolist

    def exchanged(rows, *args, **kwargs):
        kinds = {2: "counts", 4: "probs", 16: "rows"}                 # 4: probs and experts, K = 2
        kind = kinds[rows.shape[1]]
        trace.append(f"ep  {kind} issued")
        return exchange(rows, *args, **kwargs)

    def read(tensor):
        if sys._getframe(1).f_code.co_filename == parallel.__file__:
            trace.append("ep  host sync")
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch:
        recorded(layer.shared_experts, trace, patch)
        noted(layer.router, "gating", "router", trace, patch)
        noted(layer.experts, "forward", "experts", trace, patch)
        patch.setattr(parallel, "exchange", exchanged)
        patch.setattr(parallel, "wait", lambda rows: trace.append("ep  waited") or wait(rows))
        patch.setattr(Tensor, "tolist", read)
        out = layer(leaf(8, 16))
        trace.append("")
        out.sum().backward()
    return in_runs([step for step in trace if "keeps" not in step])


@over_ranks(4)
def order_and_memory(rank, ranks, folder):
    groups = ProcessGroups.from_mesh(mesh_of(ep=ranks))
    config = exact_config(shared_expert_intermediate_size=4, ffn_hidden_size=32, hidden_size=16)
    padded = dict(capacity_factor=2.0, pad_to_capacity=True)
    for name, options in (("dropless", {}), ("padded", padded)):
        layer = MoELayer(dataclasses.replace(config, shared_expert_overlap=True, **options), groups)
        assert layer.experts.fc1.shape[0] == 1               # of four, over four ranks
        order = order_of_a_step(layer)
        if rank == 0:
            Path(folder, name).write_text(order)

    layer = MoELayer(config, groups)
    layer.shared_experts = None
    T = 256
    K = 2
    rows = T * K                                             # even: every rank receives as many
    even = (torch.arange(4)[None] + torch.arange(2)[:, None]).t().repeat(64, 1) % 4
    x = leaf(T, 16)
    kept = saved_bytes(lambda: layer(x, topk_indices=even), [*layer.parameters()])
    least = 8 * (T * 16 + rows * 16 + rows * 3 * 32)         # x, its rows, h, activation
    small = 8 * (T * 4 + 3 * rows + 8 * rows)                # logits; probs; orders and inverses
    assert least <= kept <= 1.05 * least + small, (kept, least, small)


def test_overlap_order_and_memory_over_ranks(tmp_path):
    """The order of launches, the host syncs, and what is kept for the backward. The shared expert
    is on the side stream, around the routed experts."""
    order_and_memory(folder=str(tmp_path))
    dropless = (tmp_path / "dropless").read_text()
    padded = (tmp_path / "padded").read_text()
    assert_expected_inline(dropless, """\
side  waits for main, shared_enter
main  router
ep  counts issued, waited, host sync, rows issued, probs issued
side  shared_fc1_and_act
ep  waited x2
main  experts
ep  rows issued
side  shared_fc2, shared_leave
ep  waited
main  waits for side

side  waits for main
ep  rows issued
backward  shared_leave, shared_fc2
ep  waited
backward  experts
ep  probs issued, rows issued
side  waits for main
backward  shared_fc1_and_act
ep  waited x2
backward  router, shared_enter
main  waits for side""")
    without_counts = dropless.replace("counts issued, waited, host sync, ", "")
    assert padded == without_counts
    assert f"<!-- order -->\n```\n{dropless}\n```\n" in (HERE / "docs/overlap.md").read_text()


@slow
@over_ranks(2)
def test_overlap_graph_padded_and_over_tp(rank, ranks):
    """The side stream works between its fork and a join that comes last."""
    for layer in overlapped_layer(CONFIGS["padded"], ep=ranks), overlapped_layer(tp=ranks):
        torch._dynamo.reset()
        for half in captured(layer, leaf(20, 6)).removeprefix("forward\n").split("\nbackward\n"):
            half = half.splitlines()
            sides = [i for i, line in enumerate(half) if line.startswith("side")]
            assert sides and "main  fork_stream" in half[:sides[0]], half
            assert half[-1].startswith("main  join_stream"), half


@over_ranks(2)
def write_graph(rank, ranks, folder):
    lines = captured(overlapped_layer(ep=ranks), leaf(20 + rank, 6))
    if rank == 0:
        Path(folder, "graph").write_text(lines)


@slow
def test_overlap_order_of_the_graph(tmp_path):
    write_graph(folder=str(tmp_path))
    assert_expected_inline(in_runs((tmp_path / "graph").read_text().splitlines()), """\
forward
main  fork_stream, product_in, all_to_all_single, wait_tensor, all_to_all_single x2
side  mm
main  wait_tensor x2, rows_times_weights x2, all_to_all_single
side  mm
main  wait_tensor, join_stream, behind 0 more
backward
main  fork_stream, all_to_all_single
side  mm x2
main  wait_tensor, rows_times_weights, rows_times_rows, rows_times_weights, rows_times_rows,
      all_to_all_single x2
side  mm x2
main  wait_tensor x2, product_in x2, join_stream, behind 3 more""")


def test_overlap_changes_no_input():
    """pytorch #197416: a graph's write to its input on a side stream may come after the join."""
    layer = MoELayer(exact_config(shared_expert_overlap=True, shared_expert_gate=True))
    x = leaf(5, 6)
    tensors = [x, *layer.shared_experts.parameters()]
    versions = [tensor._version for tensor in tensors]
    layer(x).sum().backward()
    assert [tensor._version for tensor in tensors] == versions


def test_overlap_with_cuda_graphs_is_refused():
    """mode="reduce-overhead" sets this switch; graphs of one memory pool must not be replayed on
    two streams."""
    assert torch._inductor.list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    layer = MoELayer(small_config(shared_expert_intermediate_size=8, shared_expert_overlap=True))
    x = torch.randn(20, 8, requires_grad=True)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        with pytest.raises(Exception, match="compile without them, or without overlap"):
            captured(layer, x)
