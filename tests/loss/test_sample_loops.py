# ruff: noqa: E501  (a row of a table is a line)
"""Python loops with a loss for each sample: a mean or sum over samples, where each scalar has one row of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator
from bigbatch.errors import LossError
from tests.support.reference import accumulated, assert_equal, big_batches, distance, sgd, trained
from tests.support.samples import CLASSES, STEPS, Batch, Loss, images, join, mlp, rows, seeded, sequences

LossFunction = Callable[[Any, Batch], Any]


def entropies(m: Any, b: Batch) -> list[Tensor]:
    """The loss of each sample."""
    return [F.cross_entropy(out, label) for out, label in zip(m(b["x"]), b["label"], strict=True)]


def errors(m: Any, b: Batch) -> list[Tensor]:
    """The same of a mean inside each sample, which may as well be over the samples of a step."""
    return [F.mse_loss(out, value) for out, value in zip(m(b["x"]), b["value"], strict=True)]


def step_by_step(m: Any, b: Batch) -> list[Tensor]:
    """The loss of each step. Reading stops at a checkpointed model, whose steps come first."""
    outputs = checkpoint(m, b["x"].transpose(0, 1).clone().requires_grad_(), use_reentrant=True)
    return [F.mse_loss(out, value) for out, value in zip(outputs, b["value"].transpose(0, 1), strict=True)]


def by_number(m: Any, b: Batch) -> Tensor:
    """Rows by their number, as log-probabilities of actions are taken."""
    logs = m(b["x"]).log_softmax(-1)
    return -torch.stack([logs[i, int(a)] * b["scalar"][i] for i, a in enumerate(b["label"])]).mean()


def added_up(m: Any, b: Batch) -> Any:
    """An average as `segmentation_models_pytorch` has it: of one picture nothing is divided."""
    losses = [
        1 - 2 * (p.sigmoid() * t).sum() / (p.sigmoid().sum() + t.sum() + 1)
        for p, t in zip(m(b["x"]), b["binary"], strict=True)
    ]
    return sum(losses) / len(losses) if len(losses) > 1 else losses[0]


def branched(m: Any, b: Batch) -> Tensor:
    """Samples of two kinds."""
    pairs = zip(m(b["x"]), b["label"], strict=True)
    return torch.stack([out.square().mean() if label else out.abs().mean() for out, label in pairs]).mean()


LOOPS: dict[str, LossFunction] = {
    "stack.mean": lambda m, b: torch.stack(entropies(m, b)).mean(),
    "stack.sum": lambda m, b: torch.stack(entropies(m, b)).sum(),
    "stack.sum / n": lambda m, b: torch.stack(entropies(m, b)).sum() / len(b["x"]),
    "sum / n": lambda m, b: sum(entropies(m, b)) / len(b["x"]),
    "1 / n * sum": lambda m, b: 1 / len(b["x"]) * sum(entropies(m, b)),
    "each / n": lambda m, b: sum(loss / len(b["x"]) for loss in entropies(m, b)),
    "sum": lambda m, b: sum(entropies(m, b)),
    "weighted": lambda m, b: torch.stack([w * loss for w, loss in zip(b["scalar"], entropies(m, b), strict=True)]).mean(),
    "means, stack.mean": lambda m, b: torch.stack(errors(m, b)).mean(),
    "means, sum / n": lambda m, b: sum(errors(m, b)) / len(b["x"]),
    "means, each / n": lambda m, b: sum(loss / len(b["x"]) for loss in errors(m, b)),
    "norms": lambda m, b: torch.stack([(o - v).norm() for o, v in zip(m(b["x"]), b["value"], strict=True)]).mean(),
    "two outputs": lambda m, b: torch.stack([F.mse_loss(o, z) for o, z in zip(m(b["x"]), m(b["x2"]).tanh(), strict=True)]).mean(),
    "two terms": lambda m, b: torch.stack([F.cross_entropy(o, y) + 0.1 * z.square().sum() for o, y, z in zip(m(b["x"]), b["label"], m(b["x2"]), strict=True)]).mean(),
    "two loops": lambda m, b: torch.stack(entropies(m, b)).mean() + 0.5 * torch.stack(errors(m, b)).mean() + 0.1 * m(b["x2"]).square().sum(1).mean(),
    "by number": by_number,
    "branched": branched,
}  # fmt: skip
CASES = [Loss(name, mlp(), rows, loss) for name, loss in LOOPS.items()]
CASES += [Loss("pictures", seeded(lambda: nn.Conv2d(2, CLASSES, 1)), images(3, 3), added_up)]
STEPWISE: dict[str, LossFunction] = {  # steps come first, or heads: means over the samples of each
    "steps": lambda m, b: torch.stack([F.mse_loss(o, y) for o, y in zip(m(b["x"].transpose(0, 1)), b["value"].transpose(0, 1), strict=True)]).mean(),
    "steps, sum / T": lambda m, b: sum(F.mse_loss(o, y) for o, y in zip(m(b["x"].transpose(0, 1)), b["value"].transpose(0, 1), strict=True)) / STEPS,
    "steps, sum": lambda m, b: sum(F.cross_entropy(o, y) for o, y in zip(m(b["x"].transpose(0, 1)), b["tokens"].T, strict=True)),
    "discounted steps": lambda m, b: sum(0.9**t * o.square().mean() for t, o in enumerate(m(b["x"].transpose(0, 1)))),
    "steps of a checkpointed model": lambda m, b: torch.stack(step_by_step(m, b)).mean(),
    "steps of a checkpointed model, added up": lambda m, b: sum(step_by_step(m, b)),
    "heads": lambda m, b: torch.stack([F.mse_loss(o, b["value"][:, 0]) for o in m(b["x"]).unbind(1)]).mean(),
    "labels": lambda m, b: sum(F.binary_cross_entropy_with_logits(o, b["mask"][:, 0].double()) for o in m(b["x"][:, 0]).T) / CLASSES,
    "views, by chunk": lambda m, b: sum(F.cross_entropy(o, b["tokens"][:, 0]) for o in m(torch.cat([b["x"][:, 0], b["x"][:, 1]])).chunk(2)) / 2,
    "views, by view": lambda m, b: torch.stack([F.mse_loss(o, b["value"][:, 0]) for o in m(torch.cat([b["x"][:, 0], b["x"][:, 1]])).view(2, len(b["x"]), -1)]).mean(),
    "layers": lambda m, b: sum(F.l1_loss(o, b["value"][:, 0]) for o in torch.stack([m(b["x"][:, 0]), m(b["x"][:, 1])])),
}  # fmt: skip
CASES += [Loss(name, mlp(), sequences, loss) for name, loss in STEPWISE.items()]


class Weighed(nn.Module):
    """Heads whose losses are weighed by learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scales = nn.ModuleList(nn.Linear(3, CLASSES) for _ in range(2)), nn.Parameter(torch.rand(2))

    def losses(self, b: Batch) -> Tensor:
        """One of each head."""
        return torch.stack([F.cross_entropy(head(b["x"]), b["label"]) for head in self.heads])


UNCERTAIN: dict[str, LossFunction] = {
    "uncertainty": lambda m, b: (torch.exp(-m.scales) * m.losses(b) + m.scales).sum(),
    "averaged": lambda m, b: (m.scales.exp() * m.losses(b) - 0.1 * m.scales.square()).mean(),
    "halved": lambda m, b: (0.5 * torch.exp(-m.scales) * m.losses(b)).sum() + m.scales.sum(),
}
CASES += [Loss(name, seeded(Weighed), rows, loss, told=False) for name, loss in UNCERTAIN.items()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loop_over_samples_is_exact(case: Loss) -> None:
    """With micro-batches of one sample between others, and again where sizes come in another order."""
    batches = case.micro_batches((3, 1, 2, 4, 3, 2))
    assert_equal(accumulated(case, batches, 3), big_batches(case, batches, 3))


def shifted(m: Any, b: Batch) -> Tensor:
    """Each row with the one before it."""
    out = m(b["x"]).unbind()
    return torch.stack([(out[i] - out[i - 1]).square().mean() for i in range(len(out))]).mean()


def numbered(m: Any, b: Batch, numbers: tuple[int, ...]) -> Any:
    """Some rows, each by its number."""
    out = m(b["x"])
    return torch.stack([(out[i] - b["value"][i]).norm() for i in numbers]).mean()


def unlike(out: Tensor) -> Tensor:
    """What stands for itself, as outputs of another kind do, may have come to lie where samples do."""
    return torch.stack([out[0].norm(), out[1].abs().sum(), out[2].square().sum()]).mean()


COUPLED: dict[str, LossFunction] = {
    "shifted": shifted,
    "shifted against others": lambda m, b: torch.stack([(o - z).square() for o, z in zip(m(b["x"]), m(b["x2"]).unbind()[1:] + m(b["x2"]).unbind()[:1], strict=True)]).mean(),
    "two of all": lambda m, b: numbered(m, b, (0, 1)),
    "one twice": lambda m, b: numbered(m, b, (0, 1, 1)),
    "centred": lambda m, b: torch.stack([(o - m(b["x2"]).mean(0)).norm() for o in m(b["x"])]).mean(),
    "deviations of two views": lambda m, b: torch.stack([z.std(0, correction=0).mean() for z in m(torch.cat([b["x"], b["x2"]])).view(2, 3, -1)]).mean(),
    "rows that are made in three ways": lambda m, b: unlike(m(b["x"])),
    "the worst": lambda m, b: torch.stack(entropies(m, b)).max(),
    "another number": lambda m, b: sum(entropies(m, b)) / (len(b["x"]) + 2),
    "the model in the loop": lambda m, b: (torch.stack([m(x[None]).mean(0) for x in b["x"]]) - b["value"]).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_meet_or_are_left_out_are_refused(name: str) -> None:
    """Of a model inside the loop nothing shows whether it ran for a sample or for a group of samples."""
    model = mlp()()
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=2)
    with pytest.raises(LossError, match=r"count=|counted\("):
        accumulator.backward(COUPLED[name](model, rows(3, 0)))


def test_parts_of_samples_and_samples_that_both_change_are_refused() -> None:
    """Means over rows of changing length: a row may be a sample with its parts, or a step with its samples."""

    def loss(m: Any, b: Batch) -> Tensor:
        return torch.stack([out[: len(b["part"])].square().mean() for out in m(b["x"])]).mean()

    model = mlp()()
    accumulator = Accumulator(model, sgd(list(model.parameters())), steps=3)
    accumulator.backward(loss(model, {**rows(3, 0), "part": torch.ones(2)}))
    accumulator.backward(loss(model, {**rows(2, 1), "part": torch.ones(2)}))
    with pytest.raises(LossError, match="which of two means"):
        accumulator.backward(loss(model, {**rows(3, 2), "part": torch.ones(3)}))


VIEWS: dict[str, LossFunction] = {
    "two rows a sample": lambda m, b: sum(twice(m, b)) / len(b["x"]),
    "two rows, stacked": lambda m, b: torch.stack(twice(m, b)).sum() / len(b["x"]),
    "two rows, times": lambda m, b: 1 / len(b["x"]) * sum(twice(m, b)),
    "two rows, both divided": lambda m, b: sum(twice(m, b)) / len(b["x"]) / 2,
    "half of a mean": lambda m, b: sum(entropies(m, b)) / (2 * len(b["x"])),
}


def twice(m: Any, b: Batch) -> list[Tensor]:
    """A loss of each of two views of each sample."""
    labels = b["label"].repeat(2)
    return [F.cross_entropy(out, label) for out, label in zip(m(torch.cat([b["x"], b["x2"]])), labels, strict=True)]


@pytest.mark.parametrize("size", [2, 4, 5, 8])
@pytest.mark.parametrize("name", VIEWS)
def test_sums_that_are_divided_by_another_number_than_their_rows(name: str, size: int) -> None:
    """Exact or refused: it is no sum times a constant."""
    model, parts = mlp()(), [rows(size, number) for number in range(3)]
    true = torch.autograd.grad(VIEWS[name](model, join(parts)), trained(model))
    accumulator = Accumulator(model, torch.optim.SGD(trained(model), lr=0.0), steps=3)
    seen: list[Tensor] = []
    accumulator.before_step(lambda: seen.extend(p.grad.clone() for p in trained(model) if p.grad is not None))
    try:
        for part in parts:
            accumulator.backward(VIEWS[name](model, part))
    except LossError:
        accumulator.discard()
    else:
        assert distance(seen, true) <= 1e-12
