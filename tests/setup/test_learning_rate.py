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


BETAS, LANGUAGE = (0.9, 0.999), (0.9, 0.95)  # language models take a half-life that no larger batch can keep
RULES: list[tuple[str, Any, str, float, Any, Any]] = [  # for a batch 4 times the size
    *(
        (name, "auto", "betas", 2, BETAS, (0.9, 0.999**4))
        for name in "Adam AdamW NAdam RAdam Adamax SparseAdam".split()
    ),
    ("AdamW", "linear", "betas", 4, BETAS, (0.9, 0.999**4)),
    ("RMSprop", "auto", "alpha", 2, 0.99, 0.99**4),
    ("SGD", "auto", "momentum", 4, 0.9, 0.9),
    ("Adagrad", "linear", "lr_decay", 4, 0.1, 0.1),  # a rule that is named opens optimizers that none is known for
    ("AdamW", "auto", "betas", 2, LANGUAGE, LANGUAGE),  # it stays unless that is asked for
    ("RMSprop", "auto", "alpha", 2, 0.95, 0.95),
]


@pytest.mark.parametrize("case", RULES)
def test_every_group_follows_the_rule(case: tuple[str, Any, str, float, Any, Any]) -> None:
    """There and back again; beta2's half-life stays the same number of samples where it is scaled, and beta1 stays."""
    name, rule, decay, factor, before, after = case
    optimizer = two_groups(getattr(torch.optim, name), lr=0.1, **{decay: before})
    scaled = before != after or name in {"SGD", "Adagrad"}  # which have none
    scale_lr(optimizer, 16, 64, rule, scale_beta2=scaled)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.01 * factor])
    assert [group[decay] for group in optimizer.param_groups] == [pytest.approx(after)] * 2
    scaling = scale_lr(optimizer, 64, 16, rule, scale_beta2=scaled)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.01])
    assert (scaling.groups[0].beta2_after is None) is (before == after)


def test_a_tensor_rate_is_changed_in_place_and_once() -> None:
    """Groups that share one lr tensor see it multiplied once, and it stays the same tensor."""
    rate, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    groups = [{"params": nn.Linear(2, 2).parameters()} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=rate, betas=betas, capturable=True, foreach=False)
    scale_lr(optimizer, 16, 64, scale_beta2=True)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == pytest.approx(0.2)
    assert betas[1].item() == pytest.approx(0.99**4)


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
