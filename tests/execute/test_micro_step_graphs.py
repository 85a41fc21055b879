"""Replayed micro-steps, on emulated graphs: always the big batch's update, whatever the model does meanwhile."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.batch.batch import Batch as Cut
from bigbatch.batch.split import Division
from bigbatch.execute import graph_record
from bigbatch.execute.graph_replay import Replayed
from bigbatch.loss.count import Term
from bigbatch.window.tally import Ledger
from tests.support.emulated_graphs import emulated, gave_up
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import seeded
from tests.support.tables import (
    LONG,
    SHORT,
    AsAttribute,
    AsBuffer,
    ByWidth,
    InATuple,
    OfTheLatestWidth,
    PutAside,
    Turning,
    text,
    token_loss,
)


def run(
    kind: type[nn.Module], patch: pytest.MonkeyPatch, lengths: Sequence[Sequence[int]], *, check: bool = True
) -> tuple[BigStep, Replayed]:
    """Train packed batches beside a true big step, and compare after every update."""
    model, twin = seeded(kind)(), seeded(kind)()
    optimizer = sgd(trained(twin))
    options = Options(lengths="mask", token_budget=32, check=check)
    step = BigStep(model, sgd(trained(model)), token_loss, options=options)
    graphs = emulated(step, patch)
    for number, each in enumerate(lengths):
        step(text(each, number))
        optimizer.zero_grad()
        token_loss(twin, text(each, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12, f"step {number}"
    return step, graphs


@pytest.mark.parametrize("kind", [Turning, AsBuffer, AsAttribute, InATuple, PutAside])
def test_a_table_that_grows_in_a_launch_is_seen_by_the_replays_after_it(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that knew the old one are captured anew, and go on being replayed."""
    step, graphs = run(kind, monkeypatch, [SHORT] * 3 + [LONG] * 3)
    assert not gave_up(step)
    renewed = kind in {AsBuffer, AsAttribute, InATuple}
    # Four of width 8, two of 16, the one left over, perhaps all again, and one of width 24 and of 32.
    assert graphs.captures == (7 if renewed else 5)
    assert graphs.replays > graphs.launches > 0


class Failing(OfTheLatestWidth):
    """Cannot be captured for another reason, after a table was made."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, width) → (n, width, 5)."""
        out = super().forward(tokens)
        if any(
            type(mode).__name__ == "Tape" for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ):
            raise graph_record.NotCapturable("it waits")
        return out


REPLACES = "replaces a buffer or an attribute, "


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OfTheLatestWidth, rf"{REPLACES}OfTheLatestWidth\.kept;"),
        (ByWidth, rf"{REPLACES}ByWidth\.\d+;"),
        (Failing, "it waits"),
    ],
)
def test_a_capture_that_replaces_a_table_is_refused_and_leaves_none(
    kind: type[nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has made was never computed: the micro-steps that are launched instead must not read it."""
    with pytest.warns(UserWarning, match=words):
        step, _ = run(kind, monkeypatch, [[16] * 4 + [8] * 8 + [24] * 2] * 3)
    assert gave_up(step)


# What is captured, and when.


def squares(model: Any, batch: Any) -> Tensor:
    """A mean over elements: its shape tells the count."""
    return model(batch["x"]).square().mean()


def small_step(patch: pytest.MonkeyPatch, **named: Any) -> tuple[BigStep, Replayed, nn.Module]:
    """A step of a linear layer, replayed."""
    model = seeded(lambda: nn.Linear(3, 1))()
    step = BigStep(model, sgd(trained(model)), squares, **{"micro_batch_size": 4, **named})
    return step, emulated(step, patch), model


def samples(number: int, seed: int = 0) -> Tensor:
    """Rows of three."""
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_captures_that_are_hardly_replayed_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that changes with every batch is part of a shape: capturing it anew takes longer than it saves."""
    step, graphs, model = small_step(monkeypatch)
    twin = seeded(lambda: nn.Linear(3, 1))()
    optimizer = sgd(trained(twin))
    data = [{"x": samples(16, number), "step": number} for number in range(140)]
    with pytest.warns(UserWarning, match="128 were captured, and 256 replayed") as caught:
        list(map(step, data))
    assert len(caught) == 1
    assert gave_up(step)
    assert graphs.captures == 128
    for batch in data:
        optimizer.zero_grad()
        squares(twin, batch).backward()
        optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_shapes_that_never_come_again_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are launched all the same."""
    step, graphs, _ = small_step(monkeypatch, micro_batch_size=300)
    with pytest.warns(UserWarning, match="of 257 calls 257 were the first of their shape"):
        list(map(step, [{"x": samples(number + 1)} for number in range(258)]))
    assert graphs.captures == 0


def test_what_was_launched_in_another_mode_is_launched_again_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first time in every state: what a capture needs, as weights in low precision, is made by launching."""
    step, graphs, model = small_step(monkeypatch)
    seen: list[tuple[int, int]] = []
    for training in (True, False, False, True, True):  # the first window is launched as a whole
        model.train(training)
        step({"x": samples(8)})
        seen.append((graphs.launches, graphs.captures))
    assert seen == [(1, 0), (2, 1), (2, 1), (3, 2), (3, 2)]


def test_a_packed_batch_in_full_groups_is_captured_whole() -> None:
    """The left-over group counts as recurring where it can only have few sizes, or is the only one."""

    def recurring(lengths: list[int], budget: int, most: int | None = None) -> tuple[list[bool], tuple[int, ...]]:
        batch = Cut.of({"x": torch.zeros(len(lengths), max(lengths))})
        division = Division.packed(batch, lengths, budget, most, alike=True)
        return [division.comes_again(number) for number in range(len(division))], division.sizes

    assert recurring([16] * 8, 128) == ([True], (8,))
    assert recurring([16] * 5, 128) == ([True], (5,))
    assert recurring([16] * 5, 128, 8) == ([True], (5,))
    assert recurring([16] * 16, 128) == ([True, True], (8, 8))
    assert recurring([16] * 8, 128, 4) == ([True, True], (4, 4))
    assert recurring([16] * 7, 128, 4) == ([True, True], (3, 4))
    assert recurring([16] * 70, 512) == ([True, False, True], (32, 6, 32))


@pytest.mark.parametrize("kind", [Turning, AsAttribute])
def test_a_packed_batch_of_one_group_is_replayed(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes again with every batch; a table that the first one has made is none that has changed."""
    _, graphs = run(kind, monkeypatch, [[16, 16]] * 4, check=False)
    assert (graphs.captures, graphs.replays, graphs.launches) == (1, 2, 1)


# Counts as numbers and as tensors in one window.


def on_device(number: float) -> Tensor:
    """A count as a GPU has it."""
    return torch.tensor(float(number), dtype=torch.float64)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("first", [float, on_device])
@pytest.mark.parametrize("second", [float, on_device])
def test_a_number_and_a_tensor_make_one_count(
    first: Callable[[float], Any], second: Callable[[float], Any], small: bool
) -> None:
    """`counted(x, max(n, 1))` is a number where n is 0, and a tensor otherwise: in any order, each has its share."""
    ledger = Ledger(3, small=small)
    given = [first(4), second(12), first(16)]
    shares = []
    for count in given:
        terms = [Term(None, "mean", count, "counted")]
        share = ledger.weigh(terms)
        shares.append(share.whole)
        ledger.enter(terms, share, torch.ones((), dtype=torch.float64), {})
    correction = ledger.correction()
    assert [float(share * correction) for share in shares] == pytest.approx([4 / 32, 12 / 32, 16 / 32], rel=1e-12)
