"""What the batch produced without gradient: BigStep's first check sees it, and accuses no program that is exact."""

import gc
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, counted
from bigbatch.errors import CoupledLoss
from tests.support.reference import sgd, trained

Batch = tuple[Tensor, Tensor]
SEEDS = 8


class Case(NamedTuple):
    """A loss whose samples depend on each other through values without gradient."""

    loss: Callable[[Any, Batch], Tensor]
    classes: int
    samples: int
    micro_batch: int


def advantages(model: Any, batch: Batch) -> Tensor:
    """A policy gradient with advantages normalized over the batch."""
    x, y = batch
    reward = x.square().sum(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
    return (F.cross_entropy(model(x), y, reduction="none") * advantage).mean()


def class_weights(model: Any, batch: Batch) -> Tensor:
    """Classes weighed by how often they are in the batch."""
    x, y = batch
    logits = model(x)
    weight = 1 / torch.bincount(y, minlength=logits.shape[1]).clamp(min=1).to(x.dtype)
    return F.cross_entropy(logits, y, weight=weight)


def mined(model: Any, batch: Batch) -> Tensor:
    """Samples above a detached threshold."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return each[each.detach() > each.detach().mean()].mean()


def smaller_half(model: Any, batch: Batch) -> Tensor:
    """The half with the smaller loss, as against noisy labels."""
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return each[each.detach().argsort()[: len(each) // 2]].mean()


def hard_pairs(model: Any, batch: Batch) -> Tensor:
    """Positives farther than the nearest negative and negatives nearer than the farthest positive, as sentences are."""
    x, y = batch
    distance = (model(x) - model(x.flip(1))).square().sum(1)
    positive, negative = distance[y % 2 == 1], distance[y % 2 == 0]
    low = negative.detach().min() if len(negative) else distance.detach().mean()
    high = positive.detach().max() if len(positive) else distance.detach().mean()
    return positive[positive.detach() > low].sum() + F.relu(1 - negative[negative.detach() < high]).square().sum()


def on_policy(model: Any, batch: Batch) -> Tensor:
    """As TRL has it: with normalized advantages it is zero at any weights, and its gradient is not."""
    x, y = batch
    chosen = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
    reward = x.square().sum(1)
    advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-8)
    return -((chosen - chosen.detach()).exp() * advantage).mean()


def nearly_apart(model: Any, batch: Batch) -> Tensor:
    """Moves the loss by less than rounding may, and its gradient by some per cent."""
    found = model(batch[0])
    together = found.detach().mean(0)
    return F.cross_entropy(found, batch[1]) + 0.5 * ((found - found.detach()) * together).sum(1).mean()


def several_counts(model: Any, batch: Batch) -> Tensor:
    """Normalized advantages beside a mean over some of the features and a sum."""
    x, _ = batch
    scores = model(x)
    chosen = scores[x[:, :4] > 0]
    return advantages(model, batch) + 0.5 * chosen.square().mean() + 0.01 * counted(scores.abs().sum(), "sum")


UNSEEN = {
    "advantages beside other counts": Case(several_counts, 4, 32, 4),
    "an on-policy loss": Case(on_policy, 4, 32, 4),
    "a gradient alone": Case(nearly_apart, 4, 32, 4),
    "normalized advantages": Case(advantages, 4, 32, 4),
    "class weights": Case(class_weights, 4, 32, 4),
    "class weights of 1,000 classes": Case(class_weights, 1000, 256, 32),
    "class weights of 1,000 classes, two at a time": Case(class_weights, 1000, 256, 2),
    "mined examples": Case(mined, 4, 32, 4),
    "the smaller half": Case(smaller_half, 4, 32, 4),
    "hard pairs": Case(hard_pairs, 4, 32, 4),
}


def data(case: Case, seed: int, dtype: torch.dtype) -> Batch:
    """Features and labels."""
    by = torch.Generator().manual_seed(seed)
    x = torch.randn(case.samples, 8, generator=by).to(dtype)
    return x, torch.randint(case.classes, (case.samples,), generator=by)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("what", UNSEEN)
def test_values_without_gradient_are_seen_before_the_first_update(what: str, dtype: torch.dtype) -> None:
    """On each of eight seeds; nothing is changed."""
    case, found = UNSEEN[what], 0
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, case.classes)).to(dtype)
        before = [p.detach().clone() for p in model.parameters()]
        step = BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=case.micro_batch)
        try:
            step(data(case, seed, dtype))
        except CoupledLoss:
            found += 1
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert found == SEEDS


class Vae(nn.Module):
    """Samples its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A reconstruction, and the code's distribution."""
        mean, logarithm = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (logarithm / 2).exp()), mean, logarithm


def vae(model: Any, batch: Batch) -> Tensor:
    """As the examples of torch have it."""
    found, mean, logarithm = model(batch[0])
    divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(1).mean()
    return F.mse_loss(found, batch[0], reduction="none").sum(1).mean() + divergence


def diffusion(model: Any, batch: Batch) -> Tensor:
    """Noise of a random strength for each sample."""
    x = batch[0]
    time, noise = torch.randint(1, 10, (len(x),)), torch.randn_like(x)
    strength = (time / 10).to(x.dtype)[:, None]
    return F.mse_loss(model(x * (1 - strength) + noise * strength), noise[:, :4])


def augmented(model: Any, batch: Batch) -> Tensor:
    """Noise, a flip for some samples, and a factor for all."""
    x = batch[0] + 0.1 * torch.randn(batch[0].shape, dtype=batch[0].dtype)
    flipped = torch.where(torch.rand(len(x), 1) < 0.5, x.flip(1), x)
    return F.cross_entropy(model(flipped * random.uniform(0.9, 1.1)), batch[1])  # noqa: S311 - as a user would


def masked(model: Any, batch: Batch) -> Tensor:
    """Features are left out by numbers that are drawn from probabilities of the data."""
    keep = torch.bernoulli(batch[0].sigmoid())
    chosen = torch.multinomial(batch[0].softmax(1), 2)
    return F.cross_entropy(model(batch[0] * keep + batch[0].gather(1, chosen).sum(1, keepdim=True)), batch[1])


def counts(model: Any, batch: Batch) -> Tensor:
    """Three terms, over samples, over some features, and added up, one of them counted by hand, and a regularizer."""
    x, y = batch
    scores = model(x)
    chosen = scores[x[:, :4] > 0]
    once = sum(p.square().sum() for p in model.parameters())
    terms = counted(chosen.square().mean(), chosen.numel()) * 0.3 - 0.01 * scores.abs().sum()
    return 1 - F.cross_entropy(scores, y) + terms + 1e-3 * once


def head() -> nn.Module:
    """Eight features, four classes, and some dropout."""
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("make", "loss"),
    [(Vae, vae), (head, diffusion), (head, augmented), (head, masked), (head, counts)],
    ids=lambda each: each.__name__,
)
def test_random_numbers_are_no_matter(make: Callable[[], nn.Module], loss: Any, dtype: torch.dtype) -> None:
    """Neither a warning nor an accusation, at any of the checks; the numbers of the step are those without it."""
    case, found = Case(loss, 4, 20, 4), []
    for check in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        model = make().to(dtype)
        options = Options(check=check)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        step = BigStep(model, optimizer, loss, micro_batch_size=case.micro_batch, options=options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _ = [step(data(case, number, dtype)) for number in range(5)]
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class InBlocks(nn.Module):
    """Adds up in blocks that depend on the number of rows, as kernels of a GPU are chosen; perhaps without a graph."""

    def __init__(self, inside: torch.dtype, coupling: float = 0.0, *, frozen: bool = False) -> None:
        super().__init__()
        self.inside, self.coupling, self.frozen = inside, coupling, frozen
        self.first, self.last = nn.Parameter(torch.randn(64, 8), requires_grad=not frozen), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, block by block."""
        x = x.repeat(1, 8)
        with torch.set_grad_enabled(not self.frozen):
            given, weight = x.to(self.inside), self.first.to(self.inside)
            found = torch.zeros(len(x), 8, dtype=self.inside)
            for block in torch.arange(64).split(3 + len(x) % 5):
                found = found + given[:, block] @ weight[block]
        hidden = torch.tanh(found.to(self.last.weight.dtype) * 0.1)
        return self.last(hidden + self.coupling * hidden.mean(0))


def plain(model: Any, batch: Batch) -> Tensor:
    """A mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.float64, torch.float32), (torch.float64, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_the_tolerance_is_that_of_the_least_precise_numbers(
    dtype: torch.dtype, inside: torch.dtype, frozen: bool
) -> None:
    """Also where no gradient comes and no graph shows them; a coupling that is larger is refused all the same."""
    case = Case(plain, 4, 64, 24)
    for seed in range(6):
        torch.manual_seed(seed)
        model = InBlocks(inside, frozen=frozen).to(dtype)
        BigStep(model, sgd(trained(model)), plain, micro_batch_size=case.micro_batch)(data(case, seed, dtype))
    torch.manual_seed(0)
    model = InBlocks(inside, 30.0 if inside == torch.bfloat16 else 0.1, frozen=frozen).to(dtype)
    with pytest.raises(CoupledLoss):
        BigStep(model, sgd(trained(model)), plain, micro_batch_size=case.micro_batch)(data(case, 0, dtype))


def one_after_the_other(model: Any, batch: Batch) -> Tensor:
    """A critic's loss, of two means."""
    return model(batch[0]).mean() - model(batch[1]).mean()


def of_one_call(model: Any, batch: Batch) -> Tensor:
    """A critic's loss, of one forward."""
    real, fake = model(torch.cat(batch)).chunk(2)
    return (real.mean(0) - fake.mean(0)).view(1)


def summed(model: Any, batch: Batch) -> Tensor:
    """A critic's loss, of two sums."""
    return model(batch[0]).sum() - model(batch[1]).sum()


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("loss", [one_after_the_other, of_one_call, summed])
def test_terms_that_cancel_leave_their_rounding(loss: Any, scale: float) -> None:
    """A critic's loss is small beside what it says of real and of fake samples; a coupling is refused all the same."""
    for seed in range(4):
        torch.manual_seed(seed)
        last = nn.Linear(64, 1)
        critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), last)
        last.bias.data.fill_(scale)
        last.weight.data.mul_(scale)
        real = torch.randn(64, 64)
        batch = real, real + 1e-3 * torch.randn(64, 64)
        BigStep(critic, torch.optim.SGD(critic.parameters(), 1e-9), loss, micro_batch_size=8)(batch)
        coupled = BigStep(
            critic,
            torch.optim.SGD(critic.parameters(), 1e-9),
            lambda m, b: loss(m, (b[0] - b[0].mean(0), b[1])),
            micro_batch_size=8,
        )
        with pytest.raises(CoupledLoss):
            coupled(batch)


def test_a_batch_in_less_than_the_model_is_no_excuse() -> None:
    """Numbers that are moved and cast up are not rounded."""
    torch.manual_seed(0)
    model = InBlocks(torch.float64, 1e-4).double()
    step = BigStep(model, sgd(trained(model)), lambda m, b: plain(m, (b[0].double(), b[1])), micro_batch_size=24)
    with pytest.raises(CoupledLoss):
        step(data(Case(plain, 4, 64, 24), 0, torch.float32))


@pytest.mark.parametrize("loss", [mined, advantages, class_weights, smaller_half])
def test_a_batch_of_one_micro_batch_is_exact(loss: Any) -> None:
    """Whatever couples its samples: it is the big batch."""
    case = Case(loss, 4, 16, 16)
    torch.manual_seed(0)
    model = head()
    update = BigStep(model, sgd(trained(model)), loss, micro_batch_size=case.micro_batch)(data(case, 0, torch.float32))
    assert update.micro_batches == 1


def hardest(model: Any, batch: Batch) -> Tensor:
    """The two largest features of each pair of samples; fails for one sample."""
    pairs = model(batch[0]).view(-1, 2, 4)
    return pairs.flatten(1).topk(5, dim=1).values.mean()


def penalized(model: Any, batch: Batch) -> Tensor:
    """A gradient penalty, which wants a graph."""
    x = batch[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize(("loss", "size"), [(hardest, 2), (hardest, 4), (hardest, 6), (penalized, 1), (penalized, 4)])
def test_a_check_that_cannot_run_is_no_error(loss: Any, size: int) -> None:
    """Where pieces or parts fail that are not the step's own, others are compared, or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    update = BigStep(model, sgd(trained(model)), loss, micro_batch_size=size)(
        data(Case(loss, 4, 24, size), 0, torch.float64)
    )
    assert update.micro_batches == 24 // size


def test_pairs_that_are_coupled_are_seen_beside_failing_pieces() -> None:
    """A part of one sample fails; two micro-batches tell."""

    def loss(model: Any, batch: Batch) -> Tensor:
        pairs = model(batch[0]).view(-1, 2, 4)
        return (pairs - pairs.detach().mean(0)).square().mean()

    model = head().double().eval()
    with pytest.raises(CoupledLoss):
        BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)(data(Case(loss, 4, 24, 4), 0, torch.float64))


def test_an_error_that_comes_once_is_the_users_own() -> None:
    """It is neither an accusation, nor does it end the step where only the check has met it."""
    calls = [0]

    def loss(model: Any, batch: Batch) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError("once")
        return plain(model, batch)

    model = head()
    assert BigStep(model, sgd(trained(model)), loss, micro_batch_size=4)(
        data(Case(loss, 4, 8, 4), 0, torch.float32)
    ).micro_batches


class Remembering(nn.Module):
    """A recurrent model that goes on with the state that it was left in, where as many samples come."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(8, 16), nn.Linear(16, 4)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """One step."""
        if self.h is None or len(self.h) != len(x):
            self.h = x.new_zeros(len(x), 16)
        found = self.cell(x, self.h)
        self.h = found.detach()
        return self.last(found)


def test_a_state_that_is_left_for_the_next_call_is_seen() -> None:
    """The parts are micro-batches as they are, so that it fits the next one."""
    model = Remembering().double()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=4)
    with pytest.raises(CoupledLoss, match="moves in every call"):
        step(data(Case(plain, 4, 12, 4), 0, torch.float64))


class GhostNorm(nn.Module):
    """BatchNorm over virtual batches of a fixed size, as tabular networks have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.size = nn.BatchNorm1d(8), size

    def forward(self, x: Tensor) -> Tensor:
        """Normalize one virtual batch after the other."""
        return torch.cat([self.norm(each) for each in x.split(self.size)])


@pytest.mark.parametrize(("size", "virtual"), [(4, 4), (8, 4), (4, 2), (12, 100)])
def test_batch_norm_over_virtual_batches_is_refused(size: int, virtual: int) -> None:
    """Statistics of all micro-batches would be merged; where a batch is one virtual batch, it is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(GhostNorm(virtual), nn.Linear(8, 4)).double()
    step = BigStep(model, sgd(trained(model)), plain, micro_batch_size=size)
    batch = data(Case(plain, 4, 24, size), 0, torch.float64)
    if virtual > size:
        assert step(batch).micro_batches == 2
    else:
        with pytest.raises(CoupledLoss, match=r"BatchNorm is called \d+ times for .*ghost"):
            step(batch)


def test_a_compiled_model_stays_compiled() -> None:
    """The check runs it as it is written, and the step as it was compiled."""
    torch.manual_seed(0)
    model, calls = head().double(), list[int]()

    def backend(graph: Any, _: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append(1)
            return graph(*given)

        return run

    compiled = torch.compile(model, backend=backend)
    step = BigStep(model, sgd(trained(model)), lambda _, b: plain(compiled, b), micro_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for number in range(2):
            step(data(Case(plain, 4, 12, 4), number, torch.float64))
    assert len(calls) == 6


def test_a_refused_loss_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a second and more in a process with large libraries; memory has not run out."""
    collected: list[object] = []
    monkeypatch.setattr(gc, "collect", collected.append)
    model = nn.Linear(3, 3)
    step = BigStep(model, sgd(trained(model)), lambda m, x: m(x).sort(0).values.square().mean(), micro_batch_size=3)
    with pytest.raises(CoupledLoss):
        step(torch.randn(12, 3))
    assert not collected


class Policy(nn.Module):
    """An actor and a critic, and what the actor thought of its actions when it acted."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(7, 16), nn.Linear(16, 4), nn.Linear(16, 1)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions, and values."""
        found = self.body(states).tanh()
        return (self.actor(found) + self.up(self.down(found))).log_softmax(-1), self.critic(found)[:, 0]


def surrogate(model: Any, batch: tuple[Tensor, ...], *, normalizes: bool, values: bool) -> Tensor:
    """PPO's loss: zero as long as the policy is the one that has acted, if advantages are around zero."""
    states, actions, before, advantages, returns = batch
    if normalizes:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    every, value = model(states)
    ratio = (every.gather(1, actions[:, None])[:, 0] - before).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return policy + 0.5 * F.mse_loss(value, returns) if values else policy


def low_rank(model: Policy) -> None:
    """Train two matrices beside what is frozen, as LoRA does."""
    for p in (*model.body.parameters(), *model.actor.parameters()):
        p.requires_grad_(False)


def zero_head(model: Policy) -> None:
    """Begin with all actions alike."""
    for p in model.actor.parameters():
        nn.init.zeros_(p)


ZEROS: dict[str, Callable[[Policy], object]] = {"a head of zeros": zero_head, "an adapter of zeros": low_rank}


@pytest.mark.parametrize("values", [False, True], ids=["policy alone", "policy and values"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("seed", "begins"), [*((seed, "anywhere") for seed in range(4)), *((4, each) for each in ZEROS)]
)
def test_a_loss_of_zero_hides_nothing(seed: int, begins: str, dtype: torch.dtype, values: bool) -> None:
    """Where a term is zero in the piece and in its parts, its gradient is not."""
    torch.manual_seed(seed)
    model = Policy().to(dtype)
    ZEROS.get(begins, id)(model)
    states, actions, rewards = torch.randn(48, 7, dtype=dtype), torch.randint(0, 4, (48,)), torch.randn(48, dtype=dtype)
    before = model(states)[0].gather(1, actions[:, None])[:, 0].detach()
    summed = rewards.cumsum(0)
    weights = [p.detach().clone() for p in model.parameters()]

    def update(advantages: Tensor, *, normalizes: bool) -> None:
        loss = partial(surrogate, normalizes=normalizes, values=values)
        step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, micro_batch_size=12)
        step((states, actions, before, advantages, rewards))

    with pytest.raises(CoupledLoss):
        update(summed, normalizes=True)
    update((summed - summed.mean()) / summed.std(), normalizes=False)
    assert all(torch.equal(was, now) for was, now in zip(weights, model.parameters(), strict=True))


def test_data_that_spreads_samples_is_left_to_the_check() -> None:
    """A difference does not keep what it subtracts: each sample's own steps are exact, half of the batch is refused."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    batch = (torch.randn(10, 5).double(), torch.randn(10, 7).double())

    def own(model: Any, batch: Batch) -> Tensor:
        return (model(batch[0])[:, :, None] - batch[1][:, None]).square().mean()

    def others(model: Any, batch: Batch) -> Tensor:
        return (model(batch[0])[:, :, None] - batch[1][: len(batch[1]) // 2].T.flatten()).square().mean()

    true = torch.autograd.grad(own(model, batch), list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    BigStep(model, torch.optim.SGD(model.parameters(), lr=1.0), own, micro_batch_size=4)(batch)
    moved = [was - now.detach() for was, now in zip(before, model.parameters(), strict=True)]
    assert all(torch.allclose(ours, big, rtol=1e-12, atol=1e-13) for ours, big in zip(moved, true, strict=True))
    with pytest.raises(CoupledLoss):
        BigStep(model, torch.optim.SGD(model.parameters(), lr=1.0), others, micro_batch_size=4)(batch)


def test_a_term_that_is_used_twice_is_no_coupling() -> None:
    """It is one number in the graph, and counts once."""

    def twice(model: Any, batch: Batch) -> Tensor:
        found = model(batch[0]).square().mean()
        return found + 0.5 * found

    model = nn.Linear(8, 4).double()
    step = BigStep(model, sgd(trained(model)), twice, micro_batch_size=1)
    assert step(data(Case(twice, 4, 8, 1), 0, torch.float64)).micro_batches == 8
