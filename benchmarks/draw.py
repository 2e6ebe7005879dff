"""Two pictures.

    python benchmarks/draw.py order                # docs/overlap.svg, from docs/overlap.md
    python benchmarks/draw.py curves FOLDER ..     # of examples/train.py --out FOLDER

The curves need matplotlib.
"""
import argparse
import json
import re
from pathlib import Path

import torch


# ---- The runs of examples/train.py ----

def draw_curves(folder: Path) -> None:
    """The losses of the run and of its baselines; for every MoE each expert's load over the steps.
    Needs matplotlib."""
    from matplotlib.figure import Figure
    runs = {}
    for path in [folder / "log.jsonl", *sorted(folder.glob("*/log.jsonl"))]:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        runs[path.parent.name] = {
            key: [(record["step"], record[key]) for record in records if key in record]
            for key in ("loss", "held_out", "tokens_per_expert")}
    moes = {name: run for name, run in runs.items() if run["tokens_per_expert"]}
    figure = Figure(figsize=(5 + 3 * len(moes), 4), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(moes), width_ratios=[5] + [3] * len(moes))
    for i, (name, run) in enumerate(runs.items()):
        for key, style in (("loss", ":"), ("held_out", "o-")):
            left.plot(*zip(*run[key]), f"C{i}{style}", label=f"{name}, {key}")
    left.set(title="loss in bits per byte", xlabel="step")
    left.legend(ncols=2)
    for axes, (name, run) in zip(others, moes.items()):
        steps, loads = zip(*run["tokens_per_expert"])
        load_TLE = torch.tensor(loads, dtype=torch.float64)          # T: reports, L: layers
        share_TLE = load_TLE / load_TLE.mean(2, keepdim=True)
        layers = share_TLE.shape[1]
        image = axes.imshow(
            share_TLE.flatten(1).t(), aspect="auto", vmin=0, vmax=2, cmap="RdBu_r",
            interpolation="nearest", extent=(0, steps[-1], layers, 0))
        axes.set(title=f"load, {name}", xlabel="step", ylabel="layer, its experts",
                 yticks=range(layers + 1))
    if moes:
        figure.colorbar(image, label="share of an expert, 1 = even")
    figure.savefig(folder / "curves.png")
    print(f"curves: {folder / 'curves.png'}")


# ---- The order of launches with overlap ----

COLORS = {"main": "#9ec5e8", "side": "#f5b971", "ep": "#cfd8cf"}
LANES = {"main": "main stream", "side": "side stream", "ep": "all-to-all"}
HEIGHT, GAP, LEFT = 20, 14, 96                       # of a box, between lanes, of the first box
LETTER = 6.4                                         # width of a letter


class Picture:
    """Boxes in lanes, from left to right in the order of their launches, as SVG. A width is that of
    the words in a box, not a time."""

    def __init__(self):
        self.shapes = []
        self.top, self.right = 8, 0

    def text(self, x: float, y: float, words: str, size: int = 11) -> None:
        self.shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}">{words}</text>')

    def box(self, lane: str, x: float, width: float, y: float, words: str) -> None:
        self.shapes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="3" '
            f'fill="{COLORS[lane]}"/>')
        self.text(x + 5, y + 14, words)

    def direction(self, title: str, lines: list[str]) -> None:
        """One panel. A line is `where  what, what x2, ..`; where: main, side, ep or backward."""
        self.text(8, self.top + 12, title, size=13)
        rows = dict(main=self.top + 22)
        rows["side"] = rows["main"] + HEIGHT + GAP
        rows["ep"] = rows["side"] + HEIGHT + GAP
        for lane, y in rows.items():
            self.text(8, y + 14, LANES[lane])
        x = LEFT
        flying = []                                  # (what, where it begins, y) of the exchanges
        for line in lines:
            where, _, steps = line.partition("  ")
            for step in re.sub(r"(\w+) x2", r"\1, \1", steps).split(", "):
                if step.startswith("waits for"):
                    start, end = rows[step.split()[-1]] + HEIGHT, rows[where]
                    if start > end:
                        start, end = start - HEIGHT, end + HEIGHT
                    self.shapes.append(
                        f'<path d="M{x:.0f} {start:.0f}V{end:.0f}" stroke="#444" stroke-width="2" '
                        f'marker-end="url(#tip)"/>')
                    x += 10
                elif step.endswith(" issued"):
                    used = [y for *_, y in flying]
                    y = rows["ep"] if rows["ep"] not in used else rows["ep"] + HEIGHT + 2
                    flying.append((step.removesuffix(" issued"), x, y))
                elif step == "waited":
                    what, begin, y = flying.pop(0)
                    x = max(x, begin + LETTER * len(what) + 10)
                    self.box("ep", begin, x - begin, y, what)
                else:
                    lane = "side" if step.startswith("shared") else "main"
                    words = step.removeprefix("shared_").replace("_and_", ", ")
                    width = LETTER * len(words) + 10
                    self.box(lane, x, width, rows[lane], words)
                    x += width + 2
        self.right = max(self.right, x + 10)
        self.top = rows["ep"] + 2 * HEIGHT + 16

    def __str__(self) -> str:
        width, height = round(self.right), round(self.top)
        shapes = "\n".join(self.shapes)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"
 font-family="sans-serif">
<marker id="tip" markerWidth="5" markerHeight="5" refX="4" refY="2.5" orient="auto">
<path d="M0 0L5 2.5L0 5z" fill="#444"/></marker>
<rect width="100%" height="100%" fill="white"/>
{shapes}
</svg>
"""


def draw_order(page: Path) -> str:
    """The SVG of the order that stands in the page: a forward, an empty line, its backward."""
    _, after = page.read_text().split("<!-- order -->\n```\n")
    forward, backward = after.split("\n```")[0].split("\n\n")
    picture = Picture()
    picture.direction("forward", forward.splitlines())
    picture.direction("backward", backward.splitlines())
    return str(picture)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["order", "curves"])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="curves: of which runs")
    args = parser.parse_args()
    if (args.what == "curves") != bool(args.folders):
        parser.error("curves needs a FOLDER, order takes none")
    if args.what == "order":
        docs = Path(__file__).resolve().parents[1] / "docs"
        (docs / "overlap.svg").write_text(draw_order(docs / "overlap.md"))
    for folder in args.folders:
        draw_curves(Path(folder))


if __name__ == "__main__":
    main()
