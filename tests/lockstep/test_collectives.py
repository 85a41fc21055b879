"""What a loss or a model asks of all micro-batches: the big batch's gradients, or an error that changes nothing."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, across
from bigbatch.errors import ConfigurationError, CoupledLoss, LossError, PathsDiffer, UnreadableLoss
from bigbatch.lockstep.threads import current
from bigbatch.memory.meter import LiveBytes
from tests.support.coupled import (
    LossFunction,
    assert_big_batch,
    assert_refused,
    centred_rows,
    gradients_of,
    mine,
    plain,
    twins,
)
from tests.support.reference import distance, sgd, trained
from tests.support.samples import CLASSES, Batch, generator, rows, seeded


def test_what_each_micro_batch_is_told() -> None:
    """Rows in the batch's own order, from where its own begin; sums and means of all; types as they came."""
    batch = rows(7, 0)
    seen: list[tuple[int, int]] = []

    def loss_fn(model: Any, b: Batch) -> Tensor:
        worker = current()
        if worker is not None and worker.size == 3:
            seen.append((across.offset(), len(b["x"])))
            gathered = across.gather(b["x"])
            assert torch.equal(gathered, batch["x"])
            assert torch.equal(gathered[mine(b["x"])], b["x"])
            assert torch.equal(across.gather(b["label"]), batch["label"])
            assert across.gather(b["label"] > 1).dtype == torch.bool
            assert torch.equal(across.gather(b["x"].bfloat16()), batch["x"].bfloat16())
            assert torch.allclose(across.sum(b["x"].sum(0)), batch["x"].sum(0), rtol=1e-13)
            assert torch.allclose(across.mean(b["x"].mean(0)), batch["x"].mean(0), rtol=1e-13)
            assert across.sum(torch.tensor(len(b["x"]))) == 7
            assert across.sum(torch.tensor(1.0 if across.offset() else 256.0).bfloat16()) == 258  # not rounded to 256
            number = (b["partly"] != -100).sum()
            kept = b["scalar"][b["partly"] != -100]
            found = across.mean(kept.mean() if number else torch.zeros((), dtype=torch.float64), number)
            assert torch.allclose(found, batch["scalar"][batch["partly"] != -100].mean(), rtol=1e-13)
            assert across.mean(torch.ones(2, dtype=torch.float16), count=70_000).eq(1).all()  # no number of float16
        return F.mse_loss(model.one(b["x"]) + 0 * across.offset(), b["value"])

    model, options = twins(), Options(activations="keep", check=False)
    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=3, options=options)(batch)
    assert seen == [(0, 3), (3, 2), (5, 2)]


def test_low_precision_is_added_up_in_float32() -> None:
    """A sum of many bf16 values is rounded once; against float64, beside the whole batch."""
    batch = {"x": torch.randn(64, 3, generator=generator(0))}
    make = seeded(lambda: nn.Linear(3, 4))

    def loss_fn(model: Any, b: Batch) -> Tensor:
        return across.once(across.sum(model(b["x"].bfloat16()).sum(0)).float().square().sum())

    def run(size: int) -> list[Tensor]:
        model, found = make().bfloat16(), list[Tensor]()
        step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, micro_batch_size=size)
        step.before_step(lambda: found.extend(gradients_of(model)))
        step(batch)
        return found

    exact = make().bfloat16().double()
    exact(batch["x"].bfloat16().double()).sum(0).square().sum().backward()
    true = gradients_of(exact)
    assert distance(run(1), true) <= max(2.5 * distance(run(64), true), 2**-8)


# Terms that are the same in every micro-batch.

COUNTED_OFTEN: dict[str, LossFunction] = {
    "a root of a mean": lambda m, b: across.mean(F.mse_loss(m.one(b["x"]), b["value"])).sqrt(),
    "a sum": lambda m, b: across.sum(F.mse_loss(m.one(b["x"]), b["value"], reduction="sum")),
    "a sum of gathered rows": lambda m, b: across.gather(m.one(b["x"])).square().sum(),
    "a product of means": lambda m, b: across.mean(m.one(b["x"]).mean()) * across.mean(m.two(b["x"]).mean()),
    "a ratio of sums, one without gradient": lambda m, b: (
        1
        - (2 * across.sum((m.one(b["x"]).sigmoid() * b["value"].sigmoid()).sum()) + 1)
        / (across.sum(m.one(b["x"]).sigmoid().sum()) + across.sum(b["value"].sigmoid().sum()) + 1)
    ),
    "beside a mean over samples": lambda m, b: (
        F.mse_loss(m.one(b["x"]), b["value"]) + 0.1 * across.mean(m.one(b["x"]).mean()).square()
    ),
    "all against all": lambda m, b: F.cross_entropy(
        across.gather(m.one(b["x"])) @ across.gather(m.two(b["x2"])).T,
        torch.arange(across.gather(b["x"]).shape[0]),
    ),
    "through a layer, summed": lambda m, b: m.two(across.gather(m.one(b["x"]))[:, :3]).square().sum(),
}


@pytest.mark.parametrize("how", COUNTED_OFTEN)
def test_a_term_of_values_of_all_counts_once(how: str) -> None:
    """Marked or not; where the whole loss is one, what it costs is said once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_big_batch(twins, COUNTED_OFTEN[how], [rows(6, number) for number in range(2)], 3)
    alone = [str(each.message) for each in caught if "computes all of it" in str(each.message)]
    assert len(alone) == (0 if "beside" in how else 1)
    if "beside" not in how:
        assert_big_batch(twins, lambda m, b: across.once(COUNTED_OFTEN[how](m, b)), [rows(7, 0)], 3)


def _two_terms(m: Any, b: Batch) -> tuple[Tensor, Tensor]:
    """One that is the same in every micro-batch, and one that is not."""
    out = m.one(b["x"])
    return across.mean(out.square().mean()).sqrt(), F.mse_loss(out, b["value"]).sqrt() * across.mean(out.mean()).exp()


def _beside_a_mean(m: Any, b: Batch) -> Tensor:
    out = m.one(b["x"])
    return F.mse_loss(out, b["value"]) + across.once(out.square().mean() * across.mean(out.mean()))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "loss",
    [
        _beside_a_mean,
        lambda m, b: sum((across.once(t) for t in _two_terms(m, b)), start=torch.zeros(())),  # one line marks several
        lambda m, b: across.once(F.mse_loss(centred_rows(m.one(b["x"])), b["value"])),
    ],
)
def test_a_term_marked_though_it_is_a_micro_batchs_own(loss: LossFunction, check: bool) -> None:
    """The first window looks: the values differ, and are shown."""
    told = r"(?s)the same in every micro-batch.*Got .*, .*Use: across\.gather"
    assert_refused(twins, loss, rows(6, 0), 2, LossError, told, check=check)


def test_a_marked_term_is_looked_at_when_it_says_something() -> None:
    """A hinge that is zero before it is passed, and a term that begins after a warm-up."""
    for late in (False, True):

        def loss_fn(m: Any, b: Batch, late: bool = late) -> Tensor:
            out = m.one(b["x"])
            own = F.relu((out - b["value"]).square().mean().sqrt() - 1e3 * b["x"][0, 0]) * across.mean(out.mean()).exp()
            loss = F.mse_loss(out, b["value"]) + across.once(across.mean(out.mean()))
            return loss if late and b["x"][0, 0] else loss + across.once(own)

        model = twins()
        step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
        batch = rows(6, 0)
        batch["x"][:, 0] = 1.0
        step(batch)
        step(batch)
        batch["x"][:, 0] = 0.0
        with pytest.raises(LossError, match="the same in every micro-batch"):
            step(batch)


@pytest.mark.xfail(
    strict=True,
    reason="own values without gradient, a target or a weight, do not count as data where values of all are met: a "
    "mean over this micro-batch's samples is refused as if it were the same in each",
)
def test_values_of_all_against_what_has_no_gradient_are_a_mean_over_samples() -> None:
    """A prediction for all, set against each sample's own target."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return F.mse_loss(across.mean(model.one(batch["x"]).mean(0)) * batch["signs"], batch["value"])

    assert_big_batch(twins, loss_fn, [rows(7, 0)], 3)


# Refused.


def own_number(m: Any, b: Batch) -> Tensor:
    """It has no gradient, and no place in a graph; where it is the same in all, it is not the big batch's."""
    own = torch.tensor(float(len(b["x"])), dtype=torch.float64)
    return across.sum(m.one(b["x"]).square().sum()) / (across.sum(m.two(b["x"]).square().sum()) + own)


def changing(m: Any, b: Batch) -> Tensor:
    """A loss that is another one for some."""
    out = centred_rows(m.one(b["x"]))
    return F.mse_loss(out, b["value"]) if _some(b) else F.cross_entropy(out, b["label"])


def changed_in_place(m: Any, b: Batch, *, ask: Callable[[Tensor], Tensor], late: bool = False) -> Tensor:
    """A result is one tensor for all micro-batches."""
    out = m.one(b["x"])
    shared = ask(out if ask is across.gather else out.mean(0))

    def change(_: Tensor) -> None:
        with torch.no_grad():
            shared.mul_(2)

    if late:
        shared.register_hook(change)
    else:
        shared.mul_(2)
    return F.mse_loss(out * shared.sum(0), b["value"])


def penalized(m: Any, b: Batch) -> Tensor:
    """A penalty on the slope of a model that asks would see this micro-batch alone."""
    x = b["x"].clone().requires_grad_()
    out = m.one(x)
    (slope,) = torch.autograd.grad((out * across.gather(out).square().mean(0)).square().sum(), x, create_graph=True)
    return F.mse_loss(slope, torch.ones_like(slope)) + F.mse_loss(out, b["value"])


def attacked(m: Any, b: Batch) -> Tensor:
    """A derivative inside of the loss would add up those of all micro-batches."""
    x = b["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(centred_rows(m.one(x)), b["label"], reduction="sum"), x)
    return F.cross_entropy(centred_rows(m.one(b["x"] + 0.1 * slope.sign())), b["label"])


IN_PLACE = r"(?s)across\.\w+ of .* was changed in place.*clone it first"
REFUSED: dict[str, tuple[LossFunction, Any, str]] = {
    "an own number": (own_number, (UnreadableLoss, CoupledLoss), "made of values of all|coupled"),
    "own rows of values of all": (
        lambda m, b: across.gather(m.one(b["x"]))[mine(b["x"])].square().mean(),
        (UnreadableLoss, CoupledLoss),
        r"(?s)made of values of all micro-batches alone.*counted\(term, n\)|coupled",
    ),
    "another loss": (changing, LossError, r"changed within a window: its terms were .* and are .* now"),
    "a gathered number": (
        lambda m, b: across.gather(m.one(b["x"]).mean()).mean(), LossError, r"(?s)takes rows.*0-d.*across\.sum\(x\)"
    ),
    "a term with rows": (lambda m, b: across.once(m.one(b["x"]).mean(1)), LossError, "takes a 0-d tensor"),
    "a sum of a number": (lambda m, b: across.sum(1.0) * m(b)[2], LossError, r"takes a tensor\. Got float"),  # type: ignore[arg-type]
    "a count with gradient": (
        lambda m, b: across.once(across.mean(m.one(b["x"]).mean(), m.scale.exp())), LossError, "without gradient"
    ),
    "a count below nothing": (
        lambda m, b: across.once(across.mean(m.one(b["x"]).mean(), torch.tensor(-2.0))), LossError, r"Got -2"
    ),
    "summed, changed": (partial(changed_in_place, ask=across.sum), RuntimeError, IN_PLACE),
    "gathered, changed in backward": (partial(changed_in_place, ask=across.gather, late=True), RuntimeError, IN_PLACE),
    "a second derivative": (penalized, RuntimeError, "cannot be differentiated twice"),
    "an attack": (attacked, LossError, "a derivative inside of the loss goes through across"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused(how: str) -> None:
    """In words, with and without a check; nothing is changed."""
    loss, error, told = REFUSED[how]
    batch = rows(5, 0)
    batch["x"][:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    for check in (True, False) if "changed" not in how and how != "another loss" else (False,):
        activations = "keep" if "changed" in how else "auto"
        assert_refused(twins, loss, batch, 2, error, told, check=check, activations=activations)


# Different paths.


def _some(batch: Batch) -> bool:
    return bool(batch["x"][0, 0] > 0)


def _either(values: Sequence[Tensor], first: bool) -> Tensor:
    return values[0] + values[1].detach() if first else values[0].detach() + values[1]


def mean_of(m: Any, b: Batch, scale: float = 1) -> Tensor:
    """The mean output over the batch."""
    return across.mean(m.one(b["x"]).mean(0) * scale)


ADDED: dict[str, Callable[[Any, Batch], Any]] = {
    "gathered by some": lambda m, b: across.gather(m.one(b["x"])).mean(0) if _some(b) else 0,
    "another shape": lambda m, b: across.sum(m.one(b["x"])[:, : 3 if _some(b) else 2].sum(0)).sum(),
    "once more by some": lambda m, b: sum(mean_of(m, b) for _ in range(1 + _some(b))),
    "without gradient in some": lambda m, b: across.mean(
        (m.one(b["x"]) if _some(b) else m.one(b["x"]).detach()).mean(0)
    ),
    "one of two means that look alike": lambda m, b: _either([mean_of(m, b, s) for s in (1, 2)], _some(b)),
    "on two lines": lambda m, b: across.mean(m.one(b["x"]).mean(0)) if _some(b) else mean_of(m, b),
    "used in the loss of some": lambda m, b: mean_of(m, b) if _some(b) else mean_of(m, b).detach(),
}


@pytest.mark.parametrize("how", ADDED)
def test_micro_batches_that_take_different_paths_are_reported(how: str) -> None:
    """With what each waits at; never a hang, and nothing is changed."""
    loss = lambda m, b: F.mse_loss(m.one(b["x"]) + ADDED[how](m, b), b["value"])  # noqa: E731
    batch = rows(6, 0)
    batch["x"][:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    told = r"(?s)took different paths.*micro-batch.* (is|are) at .*micro-batch.* at "
    step = assert_refused(twins, loss, batch, 2, PathsDiffer, told, check=False, activations="keep")
    batch["x"][:, 0] = 1.0
    step(batch)  # all take one path


# Where activations stay.


class Wide(nn.Module):
    """Much inside, little outside."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.one(x)
        return centred_rows(h) if self.how == "meeting" else h


def test_recomputing_holds_one_micro_batch_at_a_time() -> None:
    """Tensor memory is about that of one micro-batch; kept, it is that of all of them."""

    def peak(n: int, activations: Any) -> int:
        model = seeded(Wide)()
        options = Options(activations=activations, check=False)
        loss = lambda m, b: F.mse_loss(centred_rows(m(b["x"])), b["value"])  # noqa: E731
        step = BigStep(model, torch.optim.SGD(trained(model), lr=0.1), loss, micro_batch_size=128, options=options)
        batch = {name: leaf for name, leaf in rows(n, 0).items() if name in {"x", "value"}}
        step(batch)
        with LiveBytes() as live:
            step(batch)
        return live.peak

    one, kept, recomputed, chosen = (
        peak(n, how) for n, how in ((128, "keep"), (1024, "keep"), (1024, "recompute"), (1024, "auto"))
    )
    assert kept > 4 * one
    assert recomputed < 1.7 * one
    assert chosen < 1.7 * one


def test_recomputing_a_model_that_meets_inside_is_refused() -> None:
    """It says what to take instead, and nothing is changed; `auto` keeps them then."""
    make = seeded(lambda: Wide("meeting"))
    told = r'(?s)runs again.*across\.mean.*inside.*"keep".*"offload"'
    assert_refused(make, plain, rows(6, 0), 2, ConfigurationError, told, check=False, activations="recompute")
    assert_big_batch(make, plain, [rows(6, 0), rows(5, 1)], 2)
    normed = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))
    told = "BatchNorm '1' over"
    assert_refused(normed, plain, rows(6, 0), 2, ConfigurationError, told, activations="recompute")
