"""Draw what ranks send per update, by the number of micro-batches, for the page on several devices.

python -m benchmarks.wire_plot   # docs/wire.svg, from results/wire.json
"""

import json
import sys
from pathlib import Path

from benchmarks.report import RESULTS
from benchmarks.wire_counting import Wire

PAGE = Path(__file__).parent.parent / "docs" / "wire.svg"
RANKS = 4
_MEGA = 1e6
_EVERY, _ONCE = "#d1495b", "#2e86ab"  # dark enough on white, light enough on black


def main() -> int:
    """Draw the bytes that really went over the interface, all loops beside each other."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "wire", "font.size": 10, "text.color": "#808080"})
    kept = [Wire(**row) for row in json.loads((RESULTS / "wire.json").read_text())["measured"]]
    figure, axes = plt.subplots(figsize=(7, 3.4))
    here = [each for each in kept if each.ranks == RANKS]
    first, *others = dict.fromkeys(each.loop for each in here)
    for loop in (first, *others):
        mine = [each for each in here if each.loop == loop]
        sent = [(each.loopback or 0) / _MEGA for each in mine]
        # The others lie on one line, and have one name.
        label = first if loop == first else "all others: no_sync, Accelerate, bigbatch" if loop == others[-1] else ""
        colour = _EVERY if loop == first else _ONCE
        axes.plot([each.steps for each in mine], sent, "-o", color=colour, label=label, markersize=4, linewidth=1.3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({each.steps for each in kept})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("micro-batches per update", color="#808080")
    axes.set_ylabel(f"MB sent, {RANKS} ranks", color="#808080")
    axes.tick_params(which="both", colors="#808080")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#808080")
    axes.legend(frameon=False, fontsize=9, labelcolor="#808080")
    figure.tight_layout()
    figure.savefig(PAGE, transparent=True, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
