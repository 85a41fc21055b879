"""Every rule has a page whose examples are what they say, and whose figures are those that were measured."""

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks.lint import codes
from benchmarks.lint_consequences import MISTAKES, cost
from bigbatch_lint.cli import page
from bigbatch_lint.rules import RULES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"Measured: after one epoch the weights are \*\*([0-9.e-]+)\*\* away")


@pytest.mark.parametrize("code", RULES)
def test_a_page_is_what_it_says(code: str) -> None:
    """The wrong example has this mistake and no other, the right one and ours none; title, parts and their order."""
    rule, text = RULES[code], page(code)
    wrong, *right = BLOCK.findall(text)
    assert codes(wrong) == [code]
    assert right
    for example in right:
        ast.parse(example)
        assert codes(example) == []
    assert text.startswith(f"# {code} {rule.slug}\n\n*{rule.severity}*\n")
    parts = ["## What it finds", "## Why that is wrong", "## Wrong", "## Right"]
    assert sorted(parts, key=text.index) == parts


@pytest.mark.parametrize("code", MISTAKES)
def test_the_figures_are_those_measured(code: str) -> None:
    """What a page says a mistake costs is what it costs, here and in the results that are kept."""
    found = cost(code).distance
    kept = json.loads((ROOT / "benchmarks" / "results" / "lint.json").read_text())["measured"]
    (recorded,) = [row["distance"] for row in kept if row.get("code") == code and "distance" in row]
    if code == "none":
        assert max(found, recorded) < 1e-14
        return
    assert found == pytest.approx(recorded, rel=1e-6)
    (said,) = MEASURED.findall(page(code))
    assert said == f"{found:.2g}"


def test_the_index_lists_every_rule() -> None:
    """With name and severity, each linked to its page; a page whose mistake was not measured has no figure."""
    assert {code for code in RULES if MEASURED.search(page(code))} == set(MISTAKES) - {"none"}
    index = (ROOT / "docs" / "lint" / "index.md").read_text()
    for code, rule in RULES.items():
        assert f"| [{code}]({code}.md) | {rule.slug} | {rule.severity} |" in index
    assert len(list((ROOT / "docs" / "lint").glob("*.md"))) == len(RULES) + 1
    assert len({rule.slug for rule in RULES.values()}) == len(RULES)
    assert all(re.fullmatch(r"BB\d{3}", code) and code == rule.code for code, rule in RULES.items())
    assert not any(rule.remedy.endswith(".") for rule in RULES.values())
