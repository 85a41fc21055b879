"""Hooks of mkdocs: links that lead out of `docs/`, and figures drawn from the committed results."""

import io
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SHOWN = ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/LOG.md", "benchmarks/results/*.md"]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)[^)#\s]*)(#[^)\s]*)?\)")
_EXACT = 1e-12
_INK, _OURS, _OURS_TOO = "#808792", "#8f63d9", "#c3a9f0"  # to be read on white and on black
_PEERS = ["#70757c", "#8f959c", "#aeb3b9", "#c8ccd1"]


def on_files(files: Any, config: Any) -> Any:
    """Show pages that are not in `docs/`, too, and the figures."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            name = name.replace("benchmarks/README.md", "benchmarks/index.md")
            files.append(File.generated(config, f"repository/{name}", content=_without_links(path)))
    for name, draw in FIGURES.items():
        files.append(File.generated(config, f"figures/{name}.svg", content=_drawn(name, draw)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of `docs/` to the pages shown above; others are shown as text."""
    return _LINK.sub(lambda found: _link(page.file.src_uri, *found.groups()), markdown)


def _link(page: str, text: str, target: str, anchor: str | None) -> str:
    if page.startswith("repository/"):
        return f"[{text}]({target}{anchor or ''})"
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    if found.startswith("docs/"):
        return f"[{text}]({target}{anchor or ''})"
    if not any(path == ROOT / found for pattern in SHOWN for path in ROOT.glob(pattern)):
        return text
    found = f"repository/{found}".replace("benchmarks/README.md", "benchmarks/index.md")
    return f"[{text}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor or ''})"


def _without_links(path: Path) -> str:
    """Read a page that lies elsewhere; its relative links lead nowhere here."""
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", path.read_text())


def measured(name: str) -> list[dict[str, Any]]:
    """Return the rows of a committed result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["measured"]
    return rows


def _drawn(name: str, draw: Callable[[Axes], None]) -> str:
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, which="both")
    for text in (axes.xaxis.label, axes.yaxis.label, *axes.get_legend().get_texts()):
        text.set_color(_INK)
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Title": name})
    return written.getvalue()


def _row(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def _exactness(axes: Axes) -> None:
    """How far from the true big batch each way of accumulating ends."""
    rows, ways = measured("exactness"), {"textbook loop": _PEERS[0], "Lightning": _PEERS[2], "BigStep": _OURS}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for number, (way, color) in enumerate(ways.items()):
        lengths = [_row(rows, case=case, contestant=way)["distance"] for case in cases]
        axes.barh([at + 0.25 * (number - 1) for at in range(len(cases))], lengths, 0.24, 1e-17, color=color, label=way)
    axes.set_xscale("log")
    axes.axvline(_EXACT, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.set_xlabel("relative distance of the final weights from the true big batch's (dotted: 1e-12)")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=3)


def _overhead(axes: Axes) -> None:
    """What an Accumulator costs beside a hand-written loop on a CPU."""
    rows = [row for row in measured("overhead-cpu") if row["contestant"] != "hand loop"]
    names = [f"{row['workload']}{', clipped' if row['clip_norm'] else ''}" for row in rows]
    works, ways = list(dict.fromkeys(names)), list(dict.fromkeys(row["contestant"] for row in rows))
    for number, way in enumerate(ways):
        mine = {name: row["ratio"] for name, row in zip(names, rows, strict=True) if row["contestant"] == way}
        places = [works.index(name) + 0.2 * number - 0.3 for name in mine]
        color = _OURS if way == "bigbatch" else _PEERS[number]
        axes.barh(places, list(mine.values()), 0.19, color=color, label=way)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(works)), works)
    axes.invert_yaxis()
    axes.set_xlabel("time per update, as a multiple of the hand-written loop's")
    axes.legend(frameon=False)


def _gpu(axes: Axes) -> None:
    """Time per update on one H200, as a multiple of one full batch's."""
    rows, works = measured("gpu"), ["1x32", "4x8", "8x8"]
    ways = ["hand loop", "Accelerate", "Fabric", "HF Trainer", "bigbatch", "bigbatch, CUDA graph"]
    for number, (way, color) in enumerate(zip(ways, [*_PEERS, _OURS_TOO, _OURS], strict=True)):
        heights = [_row(rows, work=work, contestant=way)["compared"] for work in works]
        axes.bar([at + 0.14 * number - 0.35 for at in range(len(works))], heights, 0.13, color=color, label=way)
    axes.axhline(1, color=_INK, linewidth=0.8)
    axes.set_xticks(range(len(works)), [work.replace("x", " × ") for work in works])
    axes.set_xlabel("micro-batch × steps, GPT-124M in bf16, one H200")
    axes.set_ylabel("× one full batch")
    axes.legend(frameon=False)


FIGURES: dict[str, Callable[[Axes], None]] = {"exactness": _exactness, "overhead": _overhead, "gpu": _gpu}
