"""Pages of `--html`: all that was found stands on them, nothing is fetched, and no name gets out of its place."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.commands import run, written
from tests.support.pages import EVIL, PAGES


class Seen(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, its text, and what was left open."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element."""
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """See that it is the one that is open."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep text."""
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.text).split())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_fetches_nothing_and_can_be_read_without_seeing_it(name: str) -> None:
    """Every element is closed, nothing has an address elsewhere, no name is taken for HTML; headings are in order."""
    page, seen = PAGES[name], Seen(PAGES[name])
    assert page.startswith("<!doctype html>")
    assert seen.open == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in seen.elements}
    keys = {key for _, attributes in seen.elements for key in attributes}
    assert not any(key.startswith("on") for key in keys)
    assert not {"href", "xlink:href", "src", "id"} & keys
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert (EVIL in "".join(seen.text)) == ("evil" in name)
    levels = [int(tag[1]) for tag, _ in seen.elements if re.fullmatch(r"h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert seen.named("html") == [{"lang": "en"}]
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in seen.named("svg"))
    assert all(head.get("scope") in {"col", "row"} for head in seen.named("th"))
    assert len(seen.named("table")) == len(seen.named("caption"))
    assert "main" in {tag for tag, _ in seen.elements}


def luminance(color: str) -> float:
    """Return how light a color is, as WCAG has it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["muted", "good", "bad"])
def test_words_stand_out(scheme: int, name: str) -> None:
    """4.5 to 1 at least, for every color that words have, on a card and on the page itself."""
    style = (Path(__file__).parents[2] / "src/bigbatch/report/style.css").read_text()
    color, card = (re.findall(rf"--{each}: (#[0-9a-f]{{6}})", style)[scheme] for each in (name, "card"))
    for ground in (card, ["#ffffff", "#121212"][scheme]):  # Chromium's own
        light, dark = sorted((luminance(color), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


# What stands on a page, in words, and what does not.
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plan, measured": (
        (
            "32 × 8 Batch of 256: micro-batches of 32, 8 steps, within 24 GiB on a large GPU.",
            "3.3 GiB are held at any size, weights and optimizer state in it",
            "Time per sample is still falling.",
            "Peaks are the whole process's.",
            "32 18.5 GiB 64 ran out of memory",
            "budget, 24 GiB",
            "8 6.4 ms 32 4.68 ms",
            "bigbatch train, with micro_batch_size=32 in the Setup.",
            "32 8 18.5 GiB 4.68 <- take this",
            "64 4 out of memory does not fit",
        ),
        ("predicted",),
    ),
    "plan, traced": (("predicted by tracing",), ("measured peak", "ms")),
    "plan, nothing fits": (("nothing fits",), ("Why",)),
    "plan, far below the budget": (("all at once",), ("budget, ",)),
    "verify, differs": (
        (
            "Not exact",
            "The gradient of 32 of 64 samples in 7 micro-batches, as BigStep accumulates them",
            "differs from the big batch's, by 0.21 at norm.weight.",
            "batch-norm at layer.1.norm",
            "Frozen, 93 % of the difference goes. Freeze it: norm.eval()",
            "wrong-count",
            "The whole batch did not fit.",
        ),
        (),
    ),
    "verify, exact": (
        (
            "Exact The gradient of 64 samples in 4 micro-batches, as your train_window accumulates them, is the big",
            "38 more, each nearer to the big batch's",
        ),
        ("Why, and what to do",),
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_what_was_found_stands_on_the_page(name: str) -> None:
    """The answer, its reason, every row, what to know and what to type; nothing that was not measured."""
    there, missing = WORDS[name]
    words = Seen(PAGES[name]).words
    assert [part for part in there if part not in words] == []
    assert [part for part in missing if part in words.split("Made with")[0]] == []


def test_bars_are_as_long_as_what_they_say() -> None:
    """Peaks up to the budget, which is where one ran out of memory, and times."""
    lengths = [float(bar["width"] or 0) for bar in Seen(PAGES["plan, measured"]).named("rect")]
    peaks, times = [length / lengths[3] for length in lengths[:4]], [length / lengths[4] for length in lengths[4:]]
    assert peaks == pytest.approx([3.92 / 24, 7.45 / 24, 18.5 / 24, 1], rel=1e-2)
    assert times == pytest.approx([1, 6.4 / 21.2, 4.68 / 21.2], rel=1e-2)


LOOP = """
def train_window(model, micro_batches):
    for x, y in micro_batches:
        F.cross_entropy(model(x), y).backward()
"""


@pytest.mark.parametrize(
    ("command", "loop", "told", "status"),
    [("plan", "", "take this", 0), ("verify", "", "Exact", 0), ("verify", LOOP, "wrong-scale", 1)],
)
def test_a_command_writes_a_page_beside_its_result(
    tmp_path: Path, command: str, loop: str, told: str, status: int
) -> None:
    """The result is on stdout, also as JSON, where the page is on stderr; no path of this machine is on the page."""
    page = tmp_path / "page.html"
    flags = ["--json", "--micro-batch-size", "4"] if loop else []
    done = run(command, written(tmp_path, loop=loop), *flags, "--html", str(page))
    assert done.exit_code == status, done.output
    assert told in done.stdout
    assert not loop or json.loads(done.stdout)["exact"] is False
    assert f"Wrote {page}" in done.stderr
    assert "Wrote" not in done.stdout
    words = Seen(page.read_text()).words
    assert "mine.py" in words
    assert told in words
    assert str(tmp_path) not in page.read_text()


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize("page", ["no/page.html", "."])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, command: str, page: str
) -> None:
    """A folder that is not there, or a folder instead of a file."""
    refused = run(command, written(tmp_path), "--html", str(tmp_path / page))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "name a file in a folder that exists" in " ".join(refused.stderr.split())
