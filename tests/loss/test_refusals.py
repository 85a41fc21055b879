"""Every loss that no weights can accumulate is refused before anything is added, and the error names the operation."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Accumulator
from bigbatch.errors import BigBatchError, CoupledLoss, LossError, UnreadableLoss
from bigbatch.loss import refusals
from tests.support.losses import SEVERAL, squares
from tests.support.messages import approve
from tests.support.reference import big_batches, distance, sgd, trained
from tests.support.refused import COUPLED, INVISIBLE_ALONE, UNREADABLE, Refused
from tests.support.samples import Batch, Loss
from tests.support.training import PLAIN, Training, micro_batches

SPLIT = (5, 3, 4)
REFUSED = [*UNREADABLE, *COUPLED]
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using a target size:UserWarning",  # some of them are that mistake
    "ignore:reduction.*divides the total loss:UserWarning",  # kl_div(reduction="mean")
    "ignore:The .grad attribute of a Tensor:UserWarning",  # torch.compile looks at it
)


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients there are; zeros for none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained(model)]


def first_refusal(case: Refused) -> LossError:
    """The error of the first micro-batch, or of the second where only a difference in size shows the trouble."""
    model = case.model()
    accumulator = Accumulator(model, sgd(trained(model)), steps=len(SPLIT))
    batches = iter(accumulator.over(case.micro_batches(SPLIT)))
    if case.late:
        accumulator.backward(case.loss(model, next(batches)))
    before = gradients(model)
    with pytest.raises(LossError) as caught:
        accumulator.backward(case.loss(model, next(batches)))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True)), "a refusal left a gradient"
    return caught.value


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_at_the_first_micro_batch(case: Refused) -> None:
    """The first loss raises, names the operation it found and what to type, and leaves no gradient behind."""
    error = first_refusal(case)
    assert isinstance(error, case.error), f"{type(error).__name__}: {error}"
    assert re.search(case.names, str(error).splitlines()[0], re.IGNORECASE), str(error)
    assert re.search("across" if isinstance(error, CoupledLoss) else r"count=|counted\(|across", error.fix or ""), str(
        error
    )


@pytest.mark.parametrize("case", [case for case in COUPLED if case.name not in INVISIBLE_ALONE], ids=str)
def test_coupled_also_when_a_micro_batch_is_one_sample(case: Refused) -> None:
    """A softmax over one sample couples nothing yet, but in the big batch it would."""
    model = case.model()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    (batch,) = case.micro_batches((1,))
    loss = case.loss(model, batch)
    with pytest.raises(LossError):
        accumulator.backward(loss)


def weighted_split(case: Loss, batches: list[Batch]) -> list[Tensor]:
    """The gradient that weighing micro-batches by their number of samples gives: as good as weights can do."""
    model = case.model()
    total = sum(len(batch["x"]) for batch in batches)
    for batch in batches:
        (case.loss(model, batch) * len(batch["x"]) / total).backward()
    return [-0.5 * p.grad if p.grad is not None else torch.zeros_like(p) for p in trained(model)]


@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_refusing_is_right(case: Refused) -> None:
    """A coupled loss really differs from its big batch, however the parts are weighed by size."""
    batches = case.micro_batches(SPLIT)
    (true,) = big_batches(case, batches, steps=len(SPLIT)).steps
    assert distance(weighted_split(case, batches), true) > 1e-3


FACTORS: dict[str, Callable[[Batch], float | Tensor]] = {
    "number": lambda batch: len(batch["x"]),
    "tensor": lambda batch: batch["probs"].sum(),
    "drawn": lambda batch: float(batch["unit"][0, 0]),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_a_factor_that_changes_within_a_window_is_refused(factor: Callable[[Batch], float | Tensor]) -> None:
    """The big batch has one factor: another one per micro-batch may be a count in disguise."""
    training = Training(2, case=replace(PLAIN, loss=lambda m, b: factor(b) * PLAIN.loss(m, b)))
    first, second = micro_batches((3, 2), PLAIN)
    training.backward(first)
    with pytest.raises(UnreadableLoss, match=r"not the same in all micro-batches.*\n.*count=n"):
        training.backward(second)


def test_a_changing_factor_is_exact_with_a_count() -> None:
    """Mixup draws a factor for each micro-batch; `count=` says that the loss is a mean all the same."""
    batches = micro_batches(SPLIT, PLAIN)
    for batch in batches:
        batch["unit"][:] = batch["unit"][0, 0]
    training = Training(len(SPLIT), case=replace(PLAIN, loss=lambda m, b: (b["unit"] * squares(m, b)).mean()))
    for batch in batches:
        loss = batch["unit"][0, 0] * PLAIN.loss(training.model, batch)
        training.accumulator.backward(loss, count=batch["value"].numel())
    training.assert_big_batches(batches)


def test_a_factor_may_change_between_windows() -> None:
    """A weight that is annealed from update to update is a constant to each of them."""
    batches = micro_batches((3, 2, 1, 4), PLAIN)
    for place, batch in enumerate(batches):
        batch["factor"] = torch.full((len(batch["x"]), 1), (1.0, 0.3)[place // 2], dtype=torch.float64)
    training = Training(2, case=replace(PLAIN, loss=lambda m, b: float(b["factor"][0]) * PLAIN.loss(m, b)))
    training.train(batches)
    training.assert_big_batches(batches[:2], batches[2:])


def test_counts_of_the_wrong_length_are_refused() -> None:
    """`counts=` must give one number per data term; the error says how many terms were found."""
    training = Training(2, case=SEVERAL[0], counts=lambda batch: (len(batch["x"]),))
    batches = iter(training.accumulator.over(SEVERAL[0].micro_batches((3, 2))))
    with pytest.raises(LossError, match="2"):
        training.backward(next(batches))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), True, "mean", torch.ones(2), 1j])
def test_nonsense_counts_are_refused(count: Any) -> None:
    """A count is a number of things, 0 or more."""
    training, (batch,) = Training(2, case=PLAIN), micro_batches((3,), PLAIN)
    with pytest.raises(LossError, match="count"):
        training.accumulator.backward(PLAIN.loss(training.model, batch), count=count)


# The texts.


TEXTS: dict[str, BigBatchError] = {
    "coupled": refusals.coupled("Softmax"),
    "coupled, by an unknown name": refusals.coupled("Renorm"),
    "coupled, of steps": refusals.coupled("Select"),
    "coupled, by rows of labels": refusals.coupled("Mm", chosen=True),
    "unknown operation": refusals.unknown("Square"),
    "written over": refusals.written("CopySlices"),
    "rows put where an index says": refusals.pooled("IndexAdd"),
    "factor without gradient": refusals.gradless_factor("Mm"),
    "no cast of a weight": refusals.other_weight((4, 4)),
    "pairs by broadcasting": refusals.expanded("Sub"),
    "rows one by one": refusals.lone_rows(),
    "derivative of a mean": refusals.slope("MseLoss"),
    "sum by a tensor": refusals.scaled_sum("Div", "a tensor"),
    "sum by a number": refusals.scaled_sum("Mul", "the number 0.3"),
    "zero beside a mean": refusals.zero_beside_mean(),
    "factor that changes": refusals.changing_factor("MseLoss", "0.3", "0.4"),
    "function of a mean": refusals.nonlinear("Exp"),
    "nansum": refusals.nonlinear("Nansum"),
    "matrix product of a batch": refusals.nonlinear("Mm"),
    "custom function": refusals.custom("Square"),
    "hidden count": refusals.hidden("NllLoss"),
    "data or constant": refusals.data_or_constant("Sum"),
    "shared values that differ": refusals.shared_alone([1.0, 2.0]),
    "alone": refusals.alone(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_approved(name: str) -> None:
    """In a loop with an accumulator and in a `BigStep`; three lines at most."""
    error = TEXTS[name]
    approve("loss", name, error)
    assert str(error).count("\n") <= 2
    if error.fix_in_step != error.fix:
        in_step = copy.copy(error)
        in_step.speak_to_step()
        approve("loss", f"{name}, in a BigStep", in_step)
        assert "accumulator" not in str(in_step)


@pytest.mark.parametrize("swapped", [False, True])
def test_an_error_about_one_term_of_several_counts_that_term_alone(*, swapped: bool) -> None:
    """Typed for the whole loss, its count would weigh the other terms by it."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    terms = [model(x).square().mean(), (model(x).sum(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()]
    with pytest.raises(UnreadableLoss) as caught:
        accumulator.backward(terms[swapped] + terms[not swapped])
    assert "counted(term, mask.sum())" in str(caught.value)
    assert "backward(" not in str(caught.value)
