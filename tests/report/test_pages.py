"""Pages of `--html`: all that was found stands on them, nothing is fetched, and no name gets out of its place."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from bigbatch.errors import ConfigurationError
from bigbatch.report.page import Html, check_page, element, join
from tests.support.commands import run, written
from tests.support.pages import (
    DIFFERS,
    EVIL,
    EVIL_FOUND,
    EVIL_PLAN,
    EXACT,
    NOTHING,
    PAGES,
    PLAN,
    TRACED,
    of_plan,
    of_verification,
    row,
)

pytest.importorskip("matplotlib", reason="pages are drawn with matplotlib, which is not installed")


class Seen(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, its text, and what was left open."""

    EMPTY = frozenset({"meta", "br", "hr", "path", "use", "rect", "line", "circle"})

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
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of an element that closes itself."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """See that it is the one that is open."""
        if tag not in self.EMPTY:
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


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_a_page_is_whole_and_fetches_nothing(make: Callable[[], str]) -> None:
    """Every element is closed, no id comes twice, and nothing on it has an address elsewhere."""
    page = make()
    seen = Seen(page)
    assert page.startswith("<!doctype html>")
    assert seen.open == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in seen.elements}
    ids = [attributes["id"] for _, attributes in seen.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in seen.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"href", "xlink:href", "src"}:
                assert (value or "").startswith("#")
    assert not re.search(r"https?://|@import|url\((?!#)", page)


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_a_page_can_be_read_without_seeing_it(make: Callable[[], str]) -> None:
    """One title and one first heading, headings in order, plots in words, tables with heads, a language."""
    seen = Seen(make())
    levels = [int(tag[1]) for tag, _ in seen.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert seen.named("html") == [{"lang": "en"}]
    plots = seen.named("svg")
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 40 for plot in plots)
    heads = seen.named("th")
    assert all(head.get("scope") in {"col", "row"} for head in heads)
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
WORDS: dict[str, tuple[Callable[[], str], tuple[str, ...], tuple[str, ...]]] = {
    "plan": (
        lambda: of_plan(PLAN),
        (
            "32 × 8 Batch of 256: micro-batches of 32, 8 steps, within 24 GiB on a large GPU.",
            "3.3 GiB are held at any size, weights and optimizer state in it",
            "Time per sample is still falling.",
            "Peaks are the whole process's.",
            "budget, 24 GiB",
            "milliseconds per sample",
            "bigbatch train train.py With micro_batch_size=32 in its Setup.",
            "32 8 18.6 GiB 18.5 GiB 4.68 take this",
            "64 4 33 GiB ran out of memory",
        ),
        ("were faster",),
    ),
    "plan, traced": (lambda: of_plan(TRACED), ("predicted by tracing",), ("measured peak", "milliseconds per sample")),
    "plan, nothing": (lambda: of_plan(NOTHING), ("nothing fits",), ()),
    "plan, a tie": (
        lambda: of_plan(replace(PLAN, rows=(row(32, 18.6, 18.5, 4.72), row(64, 22.1, 22.3, 4.68)))),
        ("Micro-batches of 64 were faster: 4.68 ms, not 4.72. Sizes within 2% count as equally fast",),
        (),
    ),
    "verify": (
        lambda: of_verification(DIFFERS),
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
        lambda: of_verification(replace(EXACT, accumulated_by="train_window")),
        (
            "Exact The gradient of 64 samples in 4 micro-batches, as your train_window accumulates them, is the big",
            "38 more, each nearer to the big batch's",
        ),
        ("Why, and what to do",),
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_what_was_found_stands_on_the_page(case: str) -> None:
    """The answer, its reason, every row, what to know and what to type; nothing that was not measured."""
    make, there, missing = WORDS[case]
    words = Seen(make()).words
    assert [part for part in there if part not in words] == []
    assert [part for part in missing if part in words] == []


@pytest.mark.parametrize("page", [of_plan(EVIL_PLAN, EVIL), of_verification(EVIL_FOUND, EVIL)], ids=["plan", "verify"])
def test_no_name_is_taken_for_html(page: str) -> None:
    """Names of files, modules, parameters and devices, and messages, are text wherever they stand."""
    seen = Seen(page)
    assert seen.open == []
    assert not {"script", "img"} & {tag for tag, _ in seen.elements}
    assert not any(name.startswith("on") for _, attributes in seen.elements for name in attributes)
    assert EVIL in "".join(seen.text)


def test_html_is_put_in_as_it_is() -> None:
    """What is known to be HTML is not escaped twice; a sum of texts is text again."""
    assert join(["<", Html("<b>")]) == "&lt;<b>"
    assert element("p", Html("<b>x</b>") + "<i>") == "<p>&lt;b&gt;x&lt;/b&gt;&lt;i&gt;</p>"
    assert element("meta", charset="utf-8", lang=None) == '<meta charset="utf-8">'


# The command.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a setup()."""
    return Path(written(tmp_path))


def test_plan_writes_a_page_beside_its_table(file: Path) -> None:
    """The table is on stdout, where the page is on stderr; no path of this machine is on the page."""
    page = file.parent / "plan.html"
    done = run("plan", str(file), "--html", str(page))
    assert done.exit_code == 0, done.output
    assert "take this" in done.stdout
    assert f"Wrote {page}" in done.stderr
    assert "Wrote" not in done.stdout
    text = page.read_text()
    assert "mine.py" in Seen(text).words
    assert str(file.parent) not in text


def test_verify_writes_a_page_beside_its_table(file: Path) -> None:
    """Of what is exact and of what is not; the exit status is that of the verdict."""
    page = file.parent / "verify.html"
    done = run("verify", str(file), "--html", str(page))
    assert done.exit_code == 0, done.output
    assert f"Wrote {page}" in done.stderr
    assert "Exact The gradient of 16 samples" in Seen(page.read_text()).words
    loop = "\ndef train_window(model, micro_batches):\n    for x, y in micro_batches:\n"
    written(file.parent, loop=f"{loop}        F.cross_entropy(model(x), y).backward()\n")
    wrong = run("verify", str(file), "--micro-batch-size", "4", "--json", "--html", str(page))
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["exact"] is False
    words = Seen(page.read_text()).words
    assert "Not exact" in words
    assert "wrong-scale" in words
    assert str(file.parent) not in page.read_text()


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(file: Path, command: str) -> None:
    """A folder that is not there, or a folder instead of a file."""
    missing = run(command, str(file), "--html", str(file.parent / "no" / "plan.html"))
    assert missing.exit_code == 2
    assert missing.stdout == ""
    assert "name a file in a folder that exists" in " ".join(missing.stderr.split())
    with pytest.raises(ConfigurationError, match=r"name a file in a folder that exists"):
        check_page(file.parent)


def test_without_matplotlib_the_error_says_what_to_type(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="matplotlib, which is not installed"):
        check_page(Path("page.html"))
    done = run("plan", str(file), "--html", str(file.parent / "plan.html"))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "pip install 'bigbatch[html]'" in done.stderr
