"""The layer with overlap over two and four processes: one graph beside eager mode.

    python benchmarks/over_ep.py [--against FOLDER]    # beside another copy of these files
"""
import importlib
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

if not __package__:                          # a script: what it imports is a folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import moe
from bench import BOTH, FP32, Candidate, Case, Report, check, parser_of, run, time_in_turn
from ranks.parallel import ProcessGroups

RANKS = [Case(1024, 512, 256, E, K, FP32) for E, K in ((16, 4), (64, 8))]


def other_copy(folder: str) -> tuple:
    """(moe.py, ProcessGroups) of another copy of these files, as a package of its own."""
    package = types.ModuleType("other_copy")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    in_ranks = Path(folder, "ranks").is_dir()              # not in older copies
    parallel = "ranks.parallel" if in_ranks else "parallel"
    files = [importlib.import_module(f"other_copy.{file}") for file in ("moe", parallel)]
    return files[0], files[1].ProcessGroups


def time_on_rank(
    rank: int, ranks: int, store: str, case: Case, rounds: int, against: str | None, queue,
) -> None:
    """The layer over ep = ranks, gloo, one thread each. All results are compared; all ranks run
    the candidates in the same order, with a barrier before each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    modules = {"layer": (moe, ProcessGroups)}
    if against:
        modules["other copy"] = other_copy(against)
    torch.manual_seed(rank)
    x = torch.randn(case.T, 1, case.H, requires_grad=True)
    grads = [torch.randn_like(x)]
    candidates = {}
    weights = None
    torch.manual_seed(0)
    for name, (module, groups) in modules.items():
        config = case.config(
            module, shared_expert_intermediate_size=1024, shared_expert_overlap=True)
        layer = module.MoELayer(config, groups.from_mesh(mesh))
        weights = weights or layer.state_dict()            # a copy may draw others from the seed
        layer.load_state_dict(weights)
        candidates |= Candidate(layer, [x], grads).both(name)
    check(candidates, candidates["layer, eager"].step(), case.dtype)
    samples = time_in_turn(candidates, rounds, float("inf"), before=dist.barrier)
    if rank == 0:
        queue.put(samples)
    dist.destroy_process_group()


def bench_ranks(report: Report, against: str | None) -> None:
    sizes = [(ranks, case) for ranks in (2, 4) for case in report.cases(RANKS)]
    for ranks, case in report.progress(sizes[::3 if report.quick else 1]):
        queue = torch.multiprocessing.get_context("forkserver").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            args = (ranks, f"{folder}/store", case, report.rounds, against, queue)
            torch.multiprocessing.start_processes(
                time_on_rank, args, nprocs=ranks, start_method="forkserver")
        beside = ["layer, eager", "other copy, compiled"]
        report.times(case, f"ep {ranks}, {BOTH}", queue.get(), beside)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--against", metavar="FOLDER")
    args = parser.parse_args()
    run(partial(bench_ranks, against=args.against), args)


if __name__ == "__main__":
    main()
