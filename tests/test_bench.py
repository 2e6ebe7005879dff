"""Tests of bench.py and of the scripts in benchmarks/.

    python -m pytest tests/test_bench.py
"""
import ast
import json
import sys

import pytest

import bench
from benchmarks import draw, overlap
from test_moe import fresh_start, needs, slow
from tests.test_sources import HERE, LAYER, run


@slow
def test_bench_runs_quickly(tmp_path):
    """The shortest script; .ci/run runs the others, and bench.py beside the layer alone."""
    out = tmp_path / "out.json"
    done = run(HERE / "benchmarks/overlap.py", "--quick", "--json", out)
    assert done.returncode == 0, done.stderr
    figure = json.loads(out.read_text())["figures"][0]
    assert figure["what"] == "tensors that differ, overlap on / off"
    assert figure["value"] == 0


def test_bench_says_how_long_is_left(monkeypatch, capsys):
    """Two of three cases took a minute: half a minute is left."""
    times = iter([0.0, 20.0, 60.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(times))
    assert list(bench.Report.progress(None, ["a", "b", "c"])) == ["a", "b", "c"]
    assert capsys.readouterr().out.split("\n\n")[-1] == (
        "2 of 3 cases in 1.0 min, about 0.5 left\n")


def test_bench_reads_a_trace_with_two_streams():
    """Forward: the shared expert runs for 30 us, 15 of them beside the routed path and 5 beside an
    exchange. Backward: its 7 us are beside nothing."""
    def kernel(stream, start, length, launch, name="gemm"):
        correlation = len(events)
        events.append(dict(ph="X", cat="cuda_runtime", name="launch", ts=launch, dur=1,
                           args=dict(correlation=correlation)))
        events.append(dict(ph="X", cat="kernel", name=name, ts=start, dur=length,
                           args=dict(stream=stream, correlation=correlation)))
    events = [dict(ph="X", cat="user_annotation", name="forward", ts=0, dur=50),
              dict(ph="X", cat="user_annotation", name="backward", ts=50, dur=50),
              dict(ph="s", cat="ac2g", name="a flow", ts=3)]
    kernel(7, 100, 45, launch=10)
    kernel(20, 130, 20, launch=11)
    kernel(20, 150, 10, launch=12)
    kernel(24, 155, 30, launch=13, name="ncclDevKernel_SendRecv")
    kernel(7, 200, 45, launch=60)
    kernel(20, 250, 7, launch=61)
    assert overlap.beside_in(dict(traceEvents=events)) == {
        "forward": (30, 15, 5), "backward": (7, 0, 0)}
    one_stream = [event for event in events if event.get("args", {}).get("stream") != 20]
    assert overlap.beside_in(dict(traceEvents=one_stream))["forward"] == (0, 0, 0)


def test_bench_refuses_a_profile_without_a_card(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--profile"])
    monkeypatch.setattr(overlap, "DEVICE", "cpu")
    with pytest.raises(SystemExit):
        overlap.main()
    assert "--profile reads a trace of a CUDA card; this device is cpu" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["order", "out"], ["curves"]])
def test_bench_draws_what_is_asked(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw.py", *words])
    with pytest.raises(SystemExit):
        draw.main()
    assert "curves needs a FOLDER, order takes none" in capsys.readouterr().err


def test_bench_copies_with_the_layer():
    """bench.py imports the layer's files and small.py, and of others only what Python or torch has,
    or transformers inside a function."""
    tree = ast.parse((HERE / "bench.py").read_text())
    names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}
    names |= {node.module.split(".")[0] for node in ast.walk(tree)
              if isinstance(node, ast.ImportFrom)}
    own = {path.stem for path in HERE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names & own <= {*LAYER, "small"} and "moe" in names
    assert names - own - sys.stdlib_module_names == {"torch", "transformers"}
    assert not any("transformers" in ast.unparse(node) for node in tree.body
                   if isinstance(node, (ast.Import, ast.ImportFrom)))


@needs("matplotlib")
def test_bench_draws_the_curves_of_a_run(tmp_path):
    """A run and a baseline without experts."""
    for folder, loads in ((tmp_path, [[3, 1], [2, 2]]), (tmp_path / "dense", None)):
        folder.mkdir(exist_ok=True)
        records = [dict(step=1, loss=8.0, **(dict(tokens_per_expert=loads) if loads else {})),
                   dict(step=1, held_out=7.9)]
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    done = run(HERE / "benchmarks/draw.py", "curves", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_bench_draws_the_pictures_of_the_docs():
    """`python benchmarks/draw.py order` draws what is there; the pictures are small."""
    drawn = draw.draw_order(HERE / "docs/overlap.md")
    assert drawn == (HERE / "docs/overlap.svg").read_text()
    assert drawn.count("<rect") == 21 and drawn.count("marker-end") == 5
    pictures = [*HERE.glob("docs/*.png"), *HERE.glob("docs/*.svg")]
    assert sum(picture.stat().st_size for picture in pictures) < 150_000
