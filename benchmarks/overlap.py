"""The shared expert in steps on its own stream beside the routed path, and in one go.

    python benchmarks/overlap.py [--profile]    # --profile reads a trace of a CUDA card

On CUDA also beside copies of as many rows as the all-to-alls of ep would send.
"""
import json
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import (
    BOTH, CARD, DEVICE, FORWARD, LAYER, Candidate, Case, Report, check, in_fp64, layer_and_input,
    loop_over_experts, parser_of, run)


def bench_overlap(report: Report, profile: bool) -> None:
    """With and without overlap: bitwise the same. Only CUDA has a second stream to save time."""
    case = report.cases(LAYER)[0]
    candidates = {}
    for name, overlap in {"in steps, eager": True, "one go, eager": False}.items():
        config = case.config(shared_expert_intermediate_size=1024, shared_expert_overlap=overlap)
        layer, x, grads = layer_and_input(config, case.T)
        candidates[name] = Candidate(layer, [x], grads)
    right = in_fp64(partial(loop_over_experts, case.K), like=candidates[name])
    check(candidates, right, case.dtype)
    results = [candidate.step() for candidate in candidates.values()]
    differ = sum(not torch.equal(a, b) for a, b in zip(*results))
    report.figure(case, "tensors that differ, overlap on / off", value=differ)
    report.compare(case, BOTH, candidates, ["one go"])
    if profile:
        trace = traced(candidates["in steps, eager"])
        for phase, (shared, routed, exchange) in beside_in(trace).items():
            print(f"{phase}: the shared expert's kernels run {shared:.0f} us, {routed:.0f} of them "
                  f"beside the routed path and {exchange:.0f} beside an exchange")


def traced(candidate: Candidate) -> dict:
    """One step under torch.profiler, as the JSON that Chrome reads. A forward and its backward are
    marked by these words."""
    candidate.step()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function("forward"):
            output = candidate.forward()
        with torch.profiler.record_function("backward"):
            torch.autograd.backward(output, candidate.grads)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())


def beside_in(trace: dict) -> dict[str, tuple[float, float, float]]:
    """"forward" and "backward" -> microseconds: in which kernels of the shared expert run, in which
    some of the routed path run at the same time, and in which an exchange does.

    Of the streams without an exchange (NCCL's kernels), the main one has the most kernel time; the
    shared expert's is the other. A kernel is of the direction in which the host launched it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events
             if event.get("cat") == "user_annotation"}
    launched = {event["args"]["correlation"]: event["ts"] for event in events
                if "correlation" in event.get("args", ()) and event["cat"] != "kernel"}
    kernels_of = {}                                        # stream -> kernels
    for event in events:
        if event.get("cat") == "kernel":
            stream = "exchange" if "nccl" in event["name"].lower() else event["args"]["stream"]
            kernels_of.setdefault(stream, []).append(event)
    exchange = kernels_of.pop("exchange", [])
    main, *others = sorted(kernels_of.values(), key=lambda kernels: -busy(intervals(kernels)))
    shared = others[0] if others else []

    result = {}
    for phase in ("forward", "backward"):
        start, end = marks[phase]
        own = intervals(kernel for kernel in shared
                        if start <= launched[kernel["args"]["correlation"]] <= end)
        result[phase] = (
            busy(own), busy(common(own, intervals(main))), busy(common(own, intervals(exchange))))
    return result


def intervals(kernels: Iterable[dict]) -> list[tuple[float, float]]:
    """When any of the kernels runs: intervals in order, which do not touch."""
    merged = []
    for start, end in sorted((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def common(first: list, second: list) -> list[tuple[float, float]]:
    """When both are on."""
    cuts = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in cuts if start < end]


def busy(spans: list) -> float:
    return sum(end - start for start, end in spans)


class Exchanged:
    """One rank's dispatch, which copies as many rows as the all-to-alls out and back would."""

    def __init__(self, local, rows: Tensor):
        self.local = local
        self.rows = rows
        self.wait_and_combine = local.wait_and_combine

    def wait_for_rows(self) -> tuple:
        self.rows.clone()
        return self.local.wait_for_rows()

    def send_back(self, y: Tensor) -> Tensor:
        self.rows.clone()
        return self.local.send_back(y)


def beside_copies(report: Report, case: Case) -> None:
    """The shared expert in steps on its own stream beside copies, and in one go. Eager mode."""
    candidates = {}
    for name, overlap in {"in steps": True, "one go": False}.items():
        config = case.config(
            shared_expert_intermediate_size=case.K * case.F, shared_expert_overlap=overlap)
        layer, x, grads = layer_and_input(config, case.T)
        rows = x.detach().flatten(0, 1).repeat(case.K, 1)
        dispatch = layer.dispatch
        layer.dispatch = lambda *args, dispatch=dispatch, rows=rows, **kwargs: Exchanged(
            dispatch(*args, **kwargs), rows)
        candidates[name] = Candidate(layer, [x], grads)
    check({"in steps": candidates["in steps"]}, candidates["one go"].step(), case.dtype)
    for what in (FORWARD, BOTH):
        report.compare(case, f"beside copies, {what}", candidates, ["one go"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.profile and DEVICE != "cuda":
        parser.error(f"--profile reads a trace of a CUDA card; this device is {DEVICE}")

    def bench(report):
        bench_overlap(report, args.profile)
        if DEVICE == "cuda":
            for case in report.cases(CARD):
                beside_copies(report, case)

    run(bench, args)


if __name__ == "__main__":
    main()
