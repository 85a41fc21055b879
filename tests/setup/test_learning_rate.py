"""`scale_lr` and `warmup`: what changes, what is said of it, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, SequentialLR

from bigbatch.errors import ConfigurationError
from bigbatch.learning_rate import GroupScaling, scale_lr, warmup
from tests.support.messages import approve


def sgd(lr: Any = 0.1) -> torch.optim.SGD:
    """An SGD over one small layer."""
    return torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=lr)


def two_groups(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer with a second group of its own learning rate."""
    first, second = nn.Linear(3, 2), nn.Linear(2, 2)
    return make([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.01}], **settings)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam"])
def test_the_adam_family_gets_the_square_root_and_keeps_its_half_life(name: str) -> None:
    """The rate grows by the root; beta2's half-life stays the same number of samples; beta1 stays."""
    optimizer = two_groups(getattr(torch.optim, name), lr=0.001)
    scale_lr(optimizer, 32, 128, scale_beta2=True)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.002, 0.02])
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, pytest.approx(0.999**4))] * 2


def test_a_tensor_rate_is_changed_in_place_and_once() -> None:
    """Groups that share one lr tensor see it multiplied once, and it stays the same tensor."""
    rate, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    groups = [{"params": nn.Linear(2, 2).parameters()} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=rate, betas=betas, capturable=True, foreach=False)
    scale_lr(optimizer, 16, 64, scale_beta2=True)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == pytest.approx(0.2)
    assert betas[1].item() == pytest.approx(0.99**4)


@pytest.mark.parametrize(
    ("make", "rule", "factor"),
    [(torch.optim.SGD, "auto", 4), (torch.optim.RMSprop, "auto", 2), (torch.optim.Adagrad, "linear", 4)],
)
def test_every_group_follows_the_rule(make: Callable[..., torch.optim.Optimizer], rule: Any, factor: float) -> None:
    """There and back again; a rule that is named opens optimizers that none is known for."""
    optimizer = two_groups(make, lr=0.1)
    scale_lr(optimizer, 16, 64, rule, scale_beta2=True)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.01 * factor])
    assert optimizer.param_groups[0].get("alpha", 0.99**4) == pytest.approx(0.99**4)
    scale_lr(optimizer, 64, 16, rule, scale_beta2=True)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize(("make", "name"), [(torch.optim.AdamW, "betas"), (torch.optim.RMSprop, "alpha")])
def test_beta2_stays_unless_it_is_asked_for(make: Callable[..., torch.optim.Optimizer], name: str) -> None:
    """Language models take 0.95, whose half-life no larger batch can keep: the rate alone is scaled."""
    decay: Any = (0.9, 0.95) if name == "betas" else 0.95
    optimizer = make(nn.Linear(3, 2).parameters(), lr=0.001, **{name: decay})
    scaling = scale_lr(optimizer, 32, 512)
    assert optimizer.param_groups[0][name] == decay
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.004)
    assert scaling.groups[0].beta2_after is None


def test_it_returns_what_it_changed_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The result as text says it in a line."""
    scaling = scale_lr(sgd(), 16, 64)
    assert str(scaling) == "SGD, batch 16 -> 64, linear rule: lr 0.1 -> 0.4"
    assert scaling.groups == (GroupScaling(0.1, 0.4),)
    scaling = scale_lr(two_groups(torch.optim.AdamW, lr=0.001), 32, 128, scale_beta2=True)
    assert capsys.readouterr().out == ""
    assert str(scaling) == (
        "AdamW, batch 32 -> 128, sqrt rule: group 0: lr 0.001 -> 0.002, beta2 0.999 -> 0.996006; "
        "group 1: lr 0.01 -> 0.02, beta2 0.999 -> 0.996006"
    )


def after_a_scheduler() -> object:
    """A scheduler has already copied the base rates, and would undo the change."""
    optimizer = sgd()
    warmup(optimizer, 10)
    return scale_lr(optimizer, 16, 64)


REFUSED: dict[str, Callable[[], object]] = {
    "after a scheduler": after_a_scheduler,
    "unknown optimizer": lambda: scale_lr(torch.optim.Adagrad(nn.Linear(3, 2).parameters()), 16, 64),
    "unknown rule": lambda: scale_lr(sgd(), 16, 64, rule="cubic"),  # type: ignore[arg-type]
    "LBFGS": lambda: scale_lr(torch.optim.LBFGS(nn.Linear(3, 2).parameters()), 16, 64, rule="linear"),
    "several optimizers": lambda: scale_lr([sgd(), sgd()], 16, 64),  # type: ignore[arg-type]
    "quiet": lambda: scale_lr(sgd(), 16, 64, quiet=True),
    "no batch size": lambda: scale_lr(sgd(), 16, 0.5),  # type: ignore[arg-type]
    "batch size True": lambda: scale_lr(sgd(), True, 16),
    "updates of a warmup": lambda: warmup(sgd(), 0),
    "warmup of a model": lambda: warmup(nn.Linear(2, 2), 5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_type(name: str) -> None:
    """No rule is guessed."""
    with pytest.raises(ConfigurationError) as caught:
        REFUSED[name]()
    approve("learning_rate", name, caught.value)


def test_a_half_life_shorter_than_an_update_is_refused_and_nothing_changes() -> None:
    """beta2 = 0.95 cannot keep its half-life of 13.5 updates in batches 64 times the size."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.001)
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "betas": (0.9, 0.95)})
    with pytest.raises(ConfigurationError) as caught:
        scale_lr(optimizer, 16, 1024, scale_beta2=True)
    approve("learning_rate", "half-life", caught.value)
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.001]
    assert [group["betas"][1] for group in optimizer.param_groups] == [0.999, 0.95]


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, updates: int) -> list[float]:
    """The learning rate of each of the next updates."""
    seen = []
    for _ in range(updates):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize("updates", [1, 2, 5, 1000])
def test_warmup_starts_above_zero_and_ends_at_the_full_rate(updates: int, lr: Any) -> None:
    """Update n runs at n / updates of the rate, and stays there afterwards."""
    optimizer = sgd(lr.clone() if isinstance(lr, torch.Tensor) else lr)
    expected = [0.1 * min(n, updates) / updates for n in range(1, updates + 3)]
    assert rates(optimizer, warmup(optimizer, updates), updates + 2) == pytest.approx(expected, rel=1e-10)


COSINE = [0.05 * (1 + math.cos(math.pi * n / 6)) for n in range(6)]
SCHEDULES: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "before": (lambda o, *each: SequentialLR(o, [*each], milestones=[4]), [0.025, 0.05, 0.075, 0.1, *COSINE]),
    "on top": (lambda o, *each: ChainedScheduler([*each], o), [min(n + 1, 4) / 4 * COSINE[n] for n in range(6)]),
}


@pytest.mark.parametrize("how", SCHEDULES)
def test_warmup_composes_with_other_schedules(how: str) -> None:
    """Before a cosine and on top of one."""
    optimizer, (make, expected) = sgd(), SCHEDULES[how]
    scheduler = make(optimizer, warmup(optimizer, 4), CosineAnnealingLR(optimizer, 6))
    assert rates(optimizer, scheduler, len(expected)) == pytest.approx(expected)
