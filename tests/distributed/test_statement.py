"""What all rows come to is a pure function of them: no process is started here."""

from typing import Any

import pytest
import torch
from torch import nn

from bigbatch.distributed.statement import (
    Statement,
    agree,
    bits_in_one,
    fingerprint,
    in_words,
    of_optimizers,
    rates,
    trained,
)
from bigbatch.errors import BigBatchError, ConfigurationError, LossError, SeveralCounts, WindowError
from tests.support.messages import approve

EMPTY = Statement(common=7.0, weights=2.0)
WORDS: dict[str, list[Any]] = {
    "common": [{"lr": "0.1", "clip_norm": "None"}, {"lr": "0.2", "clip_norm": "None"}],
    "form": [{"loss": "MseLoss times 2"}, {"loss": "MseLoss times 3"}],
}


def row(**other: Any) -> Statement:
    """Return what a rank says that has a micro-batch."""
    return Statement(
        **{"kind": "mean", "total": 4.0, "loss": 2.0, "micro_batches": 1, "common": 7.0, "weights": 2.0, **other}
    )


def agreed(*rows: Statement) -> Statement:
    """Agree, with some ranks of a larger group."""
    return agree([[float(each) for each in row.numbers] for row in rows], WORDS.__getitem__, range(1, len(rows) + 1))


def test_totals_are_added_up() -> None:
    """And a rank without a micro-batch has no kind of loss."""
    found = agreed(row(), row(total=6.0, loss=5.0, going=1, missing=True), EMPTY)
    assert (found.kind, found.total, found.loss, found.micro_batches) == ("mean", 10.0, 7.0, 2)
    assert (found.going, found.missing, found.loss_known) == (1, True, True)
    assert found.big_loss() == 0.7
    assert agreed(EMPTY, EMPTY) == Statement(missing=False)


def test_a_loss_that_is_not_known_is_the_average() -> None:
    """Of the micro-batches of all ranks."""
    one, other = ({"kind": "known", "plain": plain, "loss_known": plain > 3} for plain in (3.0, 6.0))
    assert agreed(row(**one), row(**other)).big_loss() == 4.5


DIFFER: dict[str, tuple[dict[str, Any], type[BigBatchError]]] = {
    "kind": ({"kind": "sum"}, LossError),
    "form": ({"form": 3.0}, LossError),
    "ratio": ({"ratio": 0.5000001}, SeveralCounts),
    "weights": ({"weights": 2.1}, WindowError),
    "common": ({"common": 8.0}, ConfigurationError),
    "reduced": ({"reduced": 5.0}, LossError),
    "reached": ({"reached": 5.0}, WindowError),
}


@pytest.mark.parametrize("name", DIFFER)
def test_what_differs_is_refused(name: str) -> None:
    """The text names the rank, and is the same whoever asks."""
    other, kind = DIFFER[name]
    alike = {"form": 2.0, "ratio": 0.5}
    with pytest.raises(kind) as raised:
        agreed(row(**alike), row(**{**alike, **other}))
    approve("distributed", f"statement: {name}", raised.value)


def test_a_term_that_counts_once_needs_every_rank() -> None:
    """Beside a sum each rank adds its share of it."""
    with pytest.raises(WindowError, match="rank 2 has no micro-batch"):
        agreed(row(kind="sum", shares_once=True), EMPTY)


def test_what_is_no_difference() -> None:
    """Parts that each replica reaches by itself; and what an empty rank does not have."""
    agreed(row(reached=1.0, replica=0.0), row(reached=2.0, replica=2.0))
    agreed(row(form=2.0, ratio=0.5), EMPTY)


def test_fingerprints_are_numbers_that_a_wire_holds_exactly() -> None:
    """Whole numbers below 2 ** 53; kinds are numbers, too."""
    assert 0 < fingerprint("MseLoss") == int(fingerprint("MseLoss")) < 2**53
    assert fingerprint() == fingerprint("") == 0.0
    assert Statement("mean", 3.0, going=1).numbers[:2] == [1, 3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.uint8], ids=str)
def test_other_weights_are_other_numbers(dtype: torch.dtype) -> None:
    """Or the same in another order."""
    one, other = (torch.full((512, 512), 1.0 + n, dtype=dtype) for n in range(2))
    other[1:] = 1.0
    assert len({bits_in_one(each) for each in ([one, one], [one, other], [other, one])}) == 3
    assert bits_in_one([one, other]) == bits_in_one([one.clone(), other.mT.contiguous().mT])


def test_which_parameters_are_trained_is_told_in_words() -> None:
    """By their places."""
    weight, bias = nn.Linear(1, 1).parameters()
    found = {trained([weight, bias]), trained([weight.detach(), bias]), trained([weight, bias.detach()])}
    assert len(found) == 3


def test_settings_are_told_in_words() -> None:
    """Without digits in which machines may round differently, and without waiting for a device."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1 * (1 + 1e-12), betas=(0.9, 0.99))
    assert rates([optimizer]) == "0.1"
    assert "betas=(0.9, 0.99)" in of_optimizers([optimizer])["options of the optimizer"]
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")  # whoever reads it raises
    assert rates([optimizer]) == "on the device"
    assert in_words({}) == in_words(None) == "None"
    assert in_words(object()) == "object"
