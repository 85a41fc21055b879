"""Every case is judged as its labels say."""

import pytest

from benchmarks.lint import Case, codes, judge, read_cases
from bigbatch_lint.rules import RULES

CASES = {case.name: case for case in read_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case(case: Case) -> None:
    """All that is labelled is found, and nothing else; where a line is labelled, it is found there."""
    judged = judge(case)
    assert (judged.missed(), judged.false()) == (frozenset(), frozenset())
    on_lines = {code for code, _ in judged.lines}
    assert on_lines & judged.found() == judged.in_place()


def test_each_rule_has_cases_and_names_are_unique() -> None:
    """At least three scripts break each rule."""
    assert len(CASES) == sum(1 for _ in read_cases())
    for rule in RULES:
        assert sum(rule in case.expected for case in CASES.values()) >= 3


EXPERIMENT = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn({samples}, 10))
loader = DataLoader(data, batch_size=16)
for epoch in range(10):
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("samples", "found"), [(1000, ["BB103"]), (1024, [])])
def test_lengths_that_the_file_says(samples: int, found: list[str]) -> None:
    """Sixty-three batches leave three, sixty-four none."""
    assert codes("import torch\n" + EXPERIMENT.format(samples=samples)) == found
