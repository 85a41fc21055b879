"""What all rows come to is a pure function of them: no process is started here."""

import math
from typing import Any

import pytest

from bigbatch.distributed.statement import KINDS, Agreement, Row, Statement, agree, fingerprint
from bigbatch.errors import BigBatchError, ConfigurationError, LossError, SeveralCounts, WindowError
from tests.support.messages import approve

MEAN, SUM, KNOWN = (float(KINDS.index(kind)) for kind in ("mean", "sum", "known"))
ROW = Row(kind=MEAN, total=4.0, loss=2.0, micro_batches=1.0, windows=3.0, parameters=7.0, weights=2.0, rates=0.1)
WORDS: dict[str, list[Any]] = {
    "settings": [{"lr": "0.1", "clip_norm": "None"}, {"lr": "0.2", "clip_norm": "None"}],
    "form": ["MseLoss times 2", "MseLoss times 3"],
}


def agreed(*rows: Row, sharded: bool = False) -> Agreement:
    """Agree, with two ranks of a group of four."""
    return agree(rows, WORDS.__getitem__, range(1, len(rows) + 1), sharded=sharded)


def test_totals_are_added_up() -> None:
    """And a rank without a micro-batch has no kind of loss."""
    found = agreed(
        ROW,
        ROW._replace(total=6.0, loss=5.0, going=1.0, missing=2.0),
        Row(windows=3.0, parameters=7.0, weights=2.0, rates=0.1),
    )
    assert (found.kind, found.total, found.loss, found.micro_batches) == ("mean", 10.0, 7.0, 2)
    assert (found.going, found.missing, found.loss_known, found.hooks) == (1, True, True, False)
    assert found.big_loss() == 0.7


def test_nobody_has_a_micro_batch() -> None:
    """Nothing was counted."""
    found = agreed(Row(), Row())
    assert (found.kind, found.total, found.micro_batches) == ("", 0.0, 0)


def test_an_infinite_loss_is_added_up() -> None:
    """It is the loss of the batch; the gradient decides what becomes of the step."""
    assert math.isnan(agreed(ROW._replace(loss=math.inf), ROW._replace(loss=-math.inf)).loss)


def test_a_loss_that_is_not_known_is_the_average() -> None:
    """Of the micro-batches of all ranks."""
    row = ROW._replace(kind=KNOWN, plain=3.0, unknown=1.0)
    assert agreed(row, row._replace(plain=5.0, unknown=0.0)).big_loss() == 4.0


REFUSED: dict[str, tuple[dict[str, float], type[BigBatchError]]] = {
    "kinds": ({"kind": SUM}, LossError),
    "forms": ({"form": fingerprint("MseLoss times 3")}, LossError),
    "ratios": ({"ratio": 0.5000001}, SeveralCounts),
    "several counts": ({"several": 1.0}, SeveralCounts),
    "windows": ({"windows": 4.0}, WindowError),
    "parameters": ({"parameters": 8.0}, WindowError),
    "weights": ({"weights": 2.1}, WindowError),
    "settings": ({"settings": fingerprint("0.2", "None")}, ConfigurationError),
    "rates": ({"rates": 0.2}, ConfigurationError),
    "sparse": ({"sparse": 1.0}, ConfigurationError),
    "hooked": ({"hooked": 1.0}, ConfigurationError),
    "left out": ({"left_out": 2.0, "overlapped": 1.0}, LossError),
    "not overlapped": ({"overlapped": 1.0}, WindowError),
    "reached": ({"reached": 5.0}, WindowError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused(name: str) -> None:
    """The text names the rank, and is the same whoever asks."""
    other, kind = REFUSED[name]
    common = {"form": fingerprint("MseLoss times 2"), "ratio": 0.5, "settings": fingerprint("0.1", "None")}
    rows = [ROW._replace(**common), ROW._replace(**{**common, **other})]
    with pytest.raises(kind) as raised:
        agreed(*rows)
    approve("distributed", name, raised.value)


def test_a_term_that_counts_once_needs_every_rank() -> None:
    """Beside a sum each rank adds its share of it."""
    rows = ROW._replace(kind=SUM, shares_once=1.0), ROW._replace(kind=0.0, micro_batches=0.0, total=0.0, loss=0.0)
    with pytest.raises(WindowError) as raised:
        agreed(*rows)
    approve("distributed", "a share is missing", raised.value)


def test_shards_with_a_hook_are_not_called_ddp() -> None:
    """They have a hook of another kind."""
    with pytest.raises(ConfigurationError) as raised:
        agreed(ROW, ROW._replace(hooked=1.0), sharded=True)
    approve("distributed", "hooked shards", raised.value)


def test_replicas_of_shards_may_reach_other_parts() -> None:
    """What a replica scatters is added up among its own ranks alone."""
    agreed(ROW._replace(reached=1.0, replica=0.0), ROW._replace(reached=2.0, replica=2.0))


def test_rounding_of_weights_and_rates_is_no_difference() -> None:
    """Machines may round their last digits differently."""
    agreed(ROW, ROW._replace(weights=2.0 * (1 + 1e-8), rates=0.1 * (1 + 1e-12)))


def test_fingerprints_are_numbers_that_a_wire_holds_exactly() -> None:
    """Whole numbers below 2 ** 53; and what a window came to goes into the row."""
    assert 0 < fingerprint("MseLoss") == int(fingerprint("MseLoss")) < 2**53
    assert fingerprint() == fingerprint("") == 0.0
    row = Statement(Row(going=1.0)).with_totals(Agreement("mean", 3.0, 1.5, micro_batches=2))
    assert (row.kind, row.total, row.going, row.ratio) == (MEAN, 3.0, 1.0, -1.0)
