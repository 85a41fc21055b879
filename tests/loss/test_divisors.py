# ruff: noqa: E501  (a row of a table is a line)
"""Masked means as people write them, `(loss * mask).sum() / mask.sum()`: a BigStep takes the divisor for the count."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from bigbatch.errors import CoupledLoss, UnreadableLoss
from bigbatch.loss import divisors, readings
from bigbatch.loss.origin import Surroundings
from bigbatch.loss.readings import Reader
from tests.support.reference import sgd, trained

Batch = dict[str, Tensor]
LossFunction = Callable[[Any, Batch], Tensor]
SIZE, CLASSES = 4, 5  # samples of a micro-batch, and classes


def each(model: Any, batch: Batch) -> Tensor:
    """Squared errors, one for each position."""
    return (model(batch["x"]) - batch["y"]).square().mean(-1)


def entropies(model: Any, batch: Batch, how: str) -> Tensor:
    """Cross-entropies; labels of -100 are ignored."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction=how)


def smoothed(model: Any, batch: Batch) -> Tensor:
    """Label smoothing as transformers' Trainer has it."""
    logs = -model(batch["x"]).log_softmax(-1)
    padding = ~batch["mask"].unsqueeze(-1)
    nll = logs.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    smooth = logs.sum(-1, keepdim=True).masked_fill(padding, 0.0)
    return 0.9 * nll.sum() / active + 0.1 * smooth.sum() / (active * logs.shape[-1])


def policy(model: Any, batch: Batch) -> Tensor:
    """A policy gradient over all tokens, the mask not last."""
    ratio = (model(batch["x"]).log_softmax(-1)[..., 0] - 0.1).exp()
    return -(batch["mask"] * ratio * batch["w"]).sum() / batch["mask"].sum().clamp(min=1)


EXACT: dict[str, LossFunction] = {
    "mask": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum(),
    "mask of numbers": lambda m, b: (b["mask"].double() * each(m, b)).sum() / b["mask"].double().sum(),
    "clamp": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
    "maximum": lambda m, b: (each(m, b) * b["mask"]).sum() / torch.maximum(b["mask"].sum(), torch.tensor(1)),
    "divided inside": lambda m, b: (each(m, b) * b["mask"] / b["mask"].sum().clamp(min=1)).sum(),
    "rows": lambda m, b: each(m, b)[b["mask"]].sum() / b["mask"].sum().clamp(min=1),
    "where": lambda m, b: torch.where(b["mask"], each(m, b), 0.0).sum() / b["mask"].sum().clamp(min=1),
    "fill": lambda m, b: each(m, b).masked_fill(~b["mask"], 0.0).sum() / b["mask"].sum().clamp(min=1),
    "weights": lambda m, b: (each(m, b) * b["w"]).sum() / b["w"].sum(),
    "both masked": lambda m, b: (F.mse_loss(m(b["x"]) * b["mask"][..., None], b["y"] * b["mask"][..., None], reduction="sum") / b["mask"].sum().clamp(min=1)),
    "ignored": lambda m, b: entropies(m, b, "sum") / (b["labels"] != -100).sum().clamp(min=1),
    "ignored one by one": lambda m, b: entropies(m, b, "none").sum() / (b["labels"] != -100).sum().clamp(min=1),
    "two terms": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1) + 0.3 * each(m, b).mean(),
    "per sample, then over samples": lambda m, b: ((each(m, b) * b["mask"]).sum(1) / b["mask"].sum(1).clamp(min=1)).mean(),
    "smoothed": smoothed,
    "policy": policy,
}  # fmt: skip


def batch_of(seed: int, samples: int = 3 * SIZE) -> Batch:
    """Samples with masks of unequal sizes."""
    source = torch.Generator().manual_seed(seed)
    mask = torch.rand(samples, 6, generator=source) < torch.linspace(0.1, 0.9, samples)[:, None]
    labels = torch.randint(CLASSES, (samples, 6), generator=source).masked_fill(~mask, -100)
    x, y = torch.randn(2, samples, 6, CLASSES, generator=source, dtype=torch.float64)
    return {"x": x, "y": y, "mask": mask, "labels": labels, "w": torch.rand(samples, 6, generator=source).double()}


def emptied(batch: Batch) -> Batch:
    """Nothing is counted in the second micro-batch."""
    batch["mask"][SIZE : 2 * SIZE] = False
    batch["labels"][SIZE : 2 * SIZE] = -100
    return batch


def nets() -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights."""
    torch.manual_seed(0)
    one, two = (nn.Linear(CLASSES, CLASSES).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    return one, two


def trained_by(loss: LossFunction, batches: list[Batch], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Train in micro-batches, and by the big batch."""
    model, twin = nets()
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=SIZE, options=Options(**options))
    optimizer = sgd(trained(twin))
    for batch in batches:
        step(batch)
        loss(twin, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, twin


@pytest.mark.parametrize("empty", [None, 0, 1], ids=["never empty", "empty at first", "empty in update 2"])
@pytest.mark.parametrize("name", EXACT)
def test_masked_means_are_exact(name: str, empty: int | None) -> None:
    """Also where a micro-batch has nothing in it, and a clamped divisor counts 1, in an update that is not checked."""
    if empty is not None and name in {"mask", "mask of numbers", "smoothed"}:
        pytest.skip("0 / 0")
    batches = [emptied(batch_of(seed)) if seed == empty else batch_of(seed) for seed in range(3)]
    model, twin = trained_by(EXACT[name], batches)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one - two).norm() <= 1e-12 * two.norm()


COUPLED: dict[str, LossFunction] = {
    "a norm": lambda m, b: each(m, b).sum() / each(m, b).detach().norm(),
    "a constant": lambda m, b: each(m, b).sum() / torch.tensor(7.0, dtype=torch.float64),
    "one": lambda m, b: each(m, b).sum() / torch.tensor(1.0, dtype=torch.float64),
    "positives": lambda m, b: each(m, b).sum() / b["mask"].sum().clamp(min=1),
    "one more": lambda m, b: (each(m, b) * b["mask"]).sum() / (b["mask"].sum() + 1),
    "a constant times a mask": lambda m, b: (each(m, b) * b["mask"]).sum() / torch.tensor(3.0),
    "centered": lambda m, b: (each(m, b) * (b["w"] - b["w"].mean()) * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
}


CLAMPED: dict[str, LossFunction] = {  # above the smallest masks; what it makes of them may be a multiple of their sums
    "4": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=4),
    "4, of features": lambda m, b: (
        ((m(b["x"]) - b["y"])[..., :2] * b["mask"][..., None]).square().sum() / b["mask"].sum().clamp(min=4)
    ),
    "1, of weights": lambda m, b: (each(m, b) * 0.1 * b["w"]).sum() / (0.1 * b["w"]).sum().clamp(min=1),
    "rows": lambda m, b: each(m, b)[b["mask"]].sum() / b["mask"].sum().clamp(min=4),
}


@pytest.mark.parametrize("counts", [(2, 2, 2), (5, 2, 5), (8, 8, 2), (2, 5, 8), (4, 2, 4), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_clamp_that_acts_is_refused_or_makes_no_difference(name: str, counts: tuple[int, ...], device: str) -> None:
    """Also in an update that is not checked, in shapes that were read before."""
    model, twin = (net.to(device) for net in nets())
    step = BigStep(model, sgd(trained(model)), CLAMPED[name], micro_batch_size=SIZE)
    batches = [{key: value.to(device) for key, value in batch_of(seed).items()} for seed in range(3)]
    for micro_batch, kept in enumerate(counts):
        mask = torch.zeros(SIZE * 6, dtype=torch.bool, device=device)
        mask[:kept] = True
        batches[2]["mask"][micro_batch * SIZE : (micro_batch + 1) * SIZE] = mask.view(SIZE, 6)
        batches[2]["w"][micro_batch * SIZE : (micro_batch + 1) * SIZE] *= kept / 8
    optimizer = sgd(trained(twin))
    for batch in batches:
        try:
            step(batch)
        except (CoupledLoss, UnreadableLoss):
            return
        CLAMPED[name](twin, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert (one - two).norm() <= 1e-12 * two.norm()


def test_a_clamp_that_acts_on_a_device_is_refused_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading the divisor would wait, its count is NaN; an empty micro-batch still counts nothing."""
    plain = divisors.divided_by

    def waited_for(division: Any, by: Any) -> Tensor:
        count = plain(division, by)
        return torch.tensor(math.nan if count is None else count, dtype=torch.float64)

    model, _ = nets()
    step = BigStep(model, sgd(trained(model)), CLAMPED["4"], micro_batch_size=SIZE)
    monkeypatch.setattr(divisors, "divided_by", waited_for)
    monkeypatch.setattr(readings, "divided_by", waited_for)
    full, empty, clamped = batch_of(0, SIZE), emptied(batch_of(1)), batch_of(0, SIZE)
    full["mask"][:] = True
    clamped["mask"][:] = False
    clamped["mask"][0, :2] = True
    step(full)
    step(empty)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnreadableLoss, match="cannot tell"):
        step({key: torch.cat([full[key], clamped[key]]) for key in full})
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_ragged_batches_are_read_once() -> None:
    """Masked means of many shapes; a mask that counts something else changes nothing."""
    model, _ = nets()
    reader = Reader(Surroundings(own=frozenset(map(id, model.parameters())), divisors=True))
    fresh = []
    for seed in range(2):
        for steps in range(1, 41):
            batch = {key: value[:, :1].expand(-1, steps, *value.shape[2:]) for key, value in batch_of(seed).items()}
            reader.read(EXACT["clamp"](model, batch))
            fresh.append(reader.fresh)
    assert fresh == [True] * 40 + [False] * 40


@pytest.mark.parametrize("name", COUPLED)
def test_a_divisor_that_is_no_count_is_refused(name: str) -> None:
    """By its numbers, or by the first check; nothing is changed."""
    model, _ = nets()
    before = [p.clone() for p in model.parameters()]
    step = BigStep(model, sgd(trained(model)), COUPLED[name], micro_batch_size=SIZE)
    with pytest.raises((CoupledLoss, UnreadableLoss), match=r"counted|a divisor that is no count"):
        step(batch_of(0))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_without_the_check_the_line_to_type_is_named() -> None:
    """A constant looks the same in one micro-batch."""
    model, _ = nets()
    step = BigStep(model, sgd(trained(model)), EXACT["mask"], micro_batch_size=SIZE, options=Options(check=False))
    with pytest.raises(UnreadableLoss, match=r"return counted\(loss, mask.sum\(\)\)"):
        step(batch_of(0))


def test_graphs_of_one_kind_that_were_read_both_ways_settle_nothing() -> None:
    """A mean over 3 samples, and then one over 5 features: the number may be a count that was 3 by chance, and 5 now."""
    model = nn.Linear(CLASSES, 5).double()
    reader = Reader(Surroundings(own=frozenset(map(id, model.parameters()))))

    def read(samples: int, divisor: int) -> str:
        (term,) = reader.read(model(torch.ones(samples, CLASSES, dtype=torch.float64)).square().sum() / divisor)
        return term.kind

    assert read(3, 3) == "mean"
    for samples in (3, 5):
        with pytest.raises(UnreadableLoss, match="may be a count"):
            read(samples, 5)
