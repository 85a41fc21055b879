"""`across`, as users have it: alone, in an `Accumulator` and in the examples.

The losses of examples/coupled are their own reference, called plainly on a whole batch. That each is the textbook's
loss is tested beside it, in formulas that hold all pairs at once.
"""

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options, across
from bigbatch.batch.tree import mapped
from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from examples.coupled import barlow_twins, clip, correlation, dice, info_nce, moe, rmse, supcon, vicreg
from tests.support import coupled
from tests.support.coupled import (
    CALM,
    Inside,
    LossFunction,
    assert_big_batch,
    assert_refused,
    centred_rows,
    mine,
    plain,
    twins,
)
from tests.support.reference import TOLERANCE, close, distance, sgd, trained
from tests.support.samples import CLASSES, Batch, rows, seeded

# Alone, and in an `Accumulator`.


def test_outside_of_a_window_a_batch_is_the_whole_batch() -> None:
    """Values and gradients are those of the argument."""
    x = torch.randn(4, 3, requires_grad=True)
    for ask in (across.gather, across.sum, across.mean, lambda x: across.mean(x, 3)):
        found = ask(x)
        assert torch.equal(found, x)
        (gradient,) = torch.autograd.grad((found * torch.arange(12).view(4, 3)).sum(), x)
        assert torch.equal(gradient, torch.arange(12.0).view(4, 3))
        with torch.no_grad():
            assert torch.equal(ask(x), x)
    assert torch.equal(across.gather(x.detach()), x)
    assert int(across.sum(torch.tensor([True, True]))[0]) == 1
    assert across.offset() == 0
    assert across.once(x.sum()) == x.sum()
    with pytest.raises(LossError, match=r"(?s)takes rows.*0-d tensor.*across\.sum\(x\)"):
        across.gather(torch.tensor(1.0))


def without_gradient(m: Any, b: Batch) -> Tensor:
    """A question without gradient has another answer in a micro-batch, too."""
    return F.mse_loss(m.one(b["x"]) * (1 + across.mean(b["x"].mean())), b["value"])


ASKING: dict[str, LossFunction] = {
    "at the top": lambda m, b: across.gather(F.mse_loss(m.one(b["x"]), b["value"]).view(1)).squeeze(),
    "beside a loss": lambda m, b: (
        F.mse_loss(m.one(b["x"]), b["value"]) + across.once(across.mean(m.one(b["x"]).mean()))
    ),
    "centred below": lambda m, b: F.mse_loss(centred_rows(m.one(b["x"])), b["value"]),
    "without gradient": without_gradient,
    "an offset": lambda m, b: F.mse_loss(m.one(b["x"]) * (1 + across.offset()), b["value"]),
}


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("how", ASKING)
def test_an_accumulator_refuses_a_loss_that_asks(how: str, over: bool) -> None:
    """At the top of the loss or below, every time; nothing was added. No count makes the parts add up."""
    model = twins()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    ASKING[how](model, rows(4, 0))  # as in validation, before a batch is given out
    batch = next(iter(accumulator.over([rows(4, 0), rows(4, 1)]))) if over else rows(4, 0)
    loss = ASKING[how](model, batch)
    for count in ({}, {"count": 4}):
        with pytest.raises(CoupledLoss, match=r"(?s)(asks for|asked for).*Use: BigStep"):
            accumulator.backward(loss, **count)
    assert all(p.grad is None for p in trained(model))


def test_questions_of_validation_are_no_part_of_the_next_loss() -> None:
    """Under no_grad, beside a loss that asks for nothing."""
    model: Any = twins()
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with torch.no_grad():
        without_gradient(model, rows(4, 0))
    accumulator.backward(F.mse_loss(model.one(rows(4, 0)["x"]), rows(4, 0)["value"]))


def test_an_accumulator_refuses_a_model_that_asks() -> None:
    """Hidden between its layers; also after a call that was refused, and where it did not ask at first."""
    model: Any = seeded(lambda: Inside("nothing"))()
    accumulator = Accumulator(model, sgd(trained(model)), steps=3)
    batch = rows(4, 0)
    accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))
    model.how = "centred"
    for _ in range(2):
        with pytest.raises(CoupledLoss, match=r"asks for all|were asked for"):
            accumulator.backward(F.cross_entropy(model(batch["x"]), batch["label"]))


def test_an_accumulator_beside_a_step_that_asks() -> None:
    """A BigStep's own questions, at its first check, too, are not those of another loss."""
    model, other = twins(), twins()
    accumulator = Accumulator(other, sgd(trained(other)), steps=2)
    step = BigStep(model, sgd(trained(model)), coupled.clip, micro_batch_size=2)
    for number in range(3):
        for size in (5, 2):  # of several micro-batches, and of one
            step(rows(size, number))
        accumulator.backward(F.mse_loss(other.get_submodule("one")(rows(4, number)["x"]), rows(4, number)["value"]))


# On threads of one's own.


class OnThreads(nn.Module):
    """Two norms at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norms = nn.Linear(3, CLASSES), nn.ModuleList([nn.BatchNorm1d(CLASSES), nn.BatchNorm1d(CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) → (n, classes)."""
        h = self.one(x)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda norm: norm(h), self.norms)
        return torch.as_tensor(first + second)


def on_a_thread(m: Any, b: Batch) -> Tensor:
    """There is no micro-batch there: the answer is another."""
    one, two, scale = m(b)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(across.offset).result() + torch.arange(len(one))
    return F.cross_entropy(scale * one @ across.gather(two).T, own)


def test_threads_of_ones_own_are_refused() -> None:
    """A norm at once, a question by the first check."""
    told = r"(?s)was called on a thread of the model's own.*Use: F.batch_norm"
    assert_refused(seeded(OnThreads), plain, rows(6, 0), 2, BatchNormError, told, check=False)
    assert_refused(twins, on_a_thread, rows(6, 0), 2, CoupledLoss)


EXAMPLES: dict[str, ModuleType] = {
    "clip": clip,
    "supcon": supcon,
    "info_nce": info_nce,
    "barlow_twins": barlow_twins,
    "vicreg": vicreg,
    "moe": moe,
    "dice": dice,
    "correlation": correlation,
    "rmse": rmse,
}


def network(name: str, seed: int = 0) -> nn.Module:
    """The model of an example, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: nn.Module = EXAMPLES[name].network()
    return made.double()


def batch_of(name: str, number: int, seed: int = 0) -> Any:
    """Samples of an example, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = EXAMPLES[name].samples(number)
    return mapped(made, lambda _, leaf: leaf.double() if leaf.is_floating_point() else leaf)


# The examples.


@pytest.mark.parametrize("name", EXAMPLES)
@given(data=st.data())
@settings(max_examples=5)
def test_an_example_is_the_big_batch(name: str, data: st.DataObject) -> None:
    """Several updates of batches of any size in micro-batches of any size, wherever activations stay."""
    sizes = data.draw(st.lists(st.integers(3, 13), min_size=2, max_size=3), "batches")
    seed = data.draw(st.integers(0, 99), "seed")
    assert_big_batch(
        lambda: network(name, seed),
        EXAMPLES[name].loss_fn,
        [batch_of(name, size, seed + at) for at, size in enumerate(sizes)],
        data.draw(st.integers(1, 7), "micro-batch"),
        optimizer=CALM[data.draw(st.sampled_from(sorted(CALM)), "optimizer")],
        clip_norm=data.draw(st.sampled_from([None, 0.05, 1e6]), "clip_norm"),
        activations=data.draw(st.sampled_from(["keep", "auto"] + ["recompute"] * (name != "moe")), "activations"),
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_of_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a loss for each update, and the last is lower than the first."""
    EXAMPLES[name].main()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("loss ") and line.endswith(" in 7 micro-batches") for line in lines)
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


# Each is the textbook's loss.


def clip_in_full(model: Any, batch: Any) -> Tensor:
    """Both directions of the whole matrix (Radford et al. 2021, figure 3)."""
    images, texts, scale = model(*batch)
    logits = scale * images @ texts.T
    labels = torch.arange(len(images))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def supcon_in_full(model: Any, batch: Any) -> Tensor:
    """Equation 2 of Khosla et al., anchor by anchor."""
    views, labels = batch
    z = F.normalize(model(views.flatten(0, 1)), dim=1)
    labels = labels.repeat_interleave(2)
    anchors: list[Tensor] = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        denominator = torch.stack([(z[i] @ z[a] / supcon.TEMPERATURE).exp() for a in others]).sum()
        positives = [z[a] for a in others if labels[a] == labels[i]]
        likely = torch.stack([(z[i] @ p / supcon.TEMPERATURE).exp() / denominator for p in positives])
        anchors.append(-likely.log().sum() / len(positives))
    return torch.stack(anchors).mean()


def info_nce_in_full(model: Any, batch: Any) -> Tensor:
    """The likelihood of each question's own answer among all passages."""
    questions, answers, distractors = (
        F.normalize(model(batch[each]), dim=1) for each in ("questions", "answers", "distractors")
    )
    likely = (questions @ torch.cat([answers, distractors]).T / info_nce.TEMPERATURE).exp()
    return -(likely.diagonal() / likely.sum(1)).log().mean()


def barlow_twins_in_full(model: Any, batch: Any) -> Tensor:
    """The authors' own code: a BatchNorm without weights, then a matrix product."""
    norm = nn.BatchNorm1d(8, affine=False, dtype=torch.float64)
    c = norm(model(batch[0])).T @ norm(model(batch[1])) / len(batch[0])
    off = c[~torch.eye(len(c), dtype=torch.bool)].pow(2).sum()
    return (c.diagonal() - 1).pow(2).sum() + barlow_twins.OFF_DIAGONAL * off


def vicreg_in_full(model: Any, batch: Any) -> Tensor:
    """The authors' own code."""
    x, y = model(batch[0]), model(batch[1])
    invariance = F.mse_loss(x, y)
    x, y = x - x.mean(0), y - y.mean(0)
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2 for z in (x, y))
    covariances = [z.T @ z / (len(z) - 1) for z in (x, y)]
    redundancy = sum(c[~torch.eye(len(c), dtype=torch.bool)].pow(2).sum() / len(c) for c in covariances)
    return 25 * invariance + 25 * spread + redundancy


def moe_in_full(model: Any, batch: Any) -> Tensor:
    """Equations 4 to 6 of Fedus et al. over all tokens in one row."""
    scores, _ = model(batch["tokens"], batch["mask"])
    likes = model.mixture.router(model.first(batch["tokens"]))[batch["mask"]].softmax(-1)
    chosen = likes.argmax(-1)
    terms = [(chosen == expert).double().mean() * likes[:, expert].mean() for expert in range(moe.EXPERTS)]
    return F.cross_entropy(scores, batch["labels"]) + 0.01 * moe.EXPERTS * torch.stack(terms).sum()


def dice_in_full(model: Any, batch: Any) -> Tensor:
    """Class by class."""
    found, labels = model(batch[0]).softmax(1), batch[1]
    scores = [
        (2 * found[:, c][labels == c].sum() + 1) / (found[:, c].sum() + (labels == c).sum() + 1)
        for c in range(dice.CLASSES)
    ]
    return 1 - torch.stack(scores).mean()


TEXTBOOK: dict[str, LossFunction] = {
    "clip": clip_in_full,
    "supcon": supcon_in_full,
    "info_nce": info_nce_in_full,
    "barlow_twins": barlow_twins_in_full,
    "vicreg": vicreg_in_full,
    "moe": moe_in_full,
    "dice": dice_in_full,
    "correlation": lambda m, b: 1 - torch.corrcoef(torch.stack([m(b[0]).squeeze(1), b[1]]))[0, 1],
    "rmse": lambda m, b: (m(b[0]) - b[1]).pow(2).mean().sqrt(),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_outside_a_window_an_example_is_the_textbook_s_loss(name: str) -> None:
    """Value and gradient."""
    model, batch = network(name), batch_of(name, 10)
    found, true = EXAMPLES[name].loss_fn(model, batch), TEXTBOOK[name](model, batch)
    assert close(float(found.detach()), float(true.detach()), TOLERANCE)
    ours, theirs = (torch.autograd.grad(loss, trained(model)) for loss in (found, true))
    assert distance(ours, theirs) <= TOLERANCE * 10


def test_packed_sequences_meet_in_any_order() -> None:
    """Micro-batches of as many tokens, sorted by length, with as many samples as it comes."""
    batches = [batch_of("moe", 11, seed) for seed in range(3)]
    assert_big_batch(lambda: network("moe"), moe.loss_fn, batches, lengths="mask", token_budget=12)


# Losses beside the examples; others are in tests/lockstep/test_run.py.


def encoder(*between: nn.Module) -> nn.Module:
    """Two layers, with something between them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *between, nn.Linear(8, CLASSES)).double()


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder()

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """A loss, and scores."""
        scores = self.body(x)
        return F.cross_entropy(scores, label), scores


def beside_its_own(model: Any, batch: Batch) -> Tensor:
    """A loss inside what would be recomputed, so it is kept."""
    loss, scores = model(batch["x"], batch["label"])
    return loss + across.once(across.mean(scores.softmax(1).mean(0)).square().sum())


def test_a_model_that_computes_its_own_loss_beside_a_coupled_term() -> None:
    """Activations are kept."""
    assert_big_batch(Own, beside_its_own, [rows(11, 0)], 4)


# What must be refused.


class Centred(nn.Module):
    """Looks at the other samples of whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """Take their mean away."""
        return x - x.mean(0)


def against_all(model: Any, batch: Batch) -> Tensor:
    """Own rows against all."""
    one = model(batch["x"])
    return F.cross_entropy(one @ across.gather(model(batch["x2"])).T, mine(one))


def one_side_forgotten(model: Any, batch: Batch) -> Tensor:
    """The second direction is over this micro-batch alone."""
    one, two = model(batch["x"]), model(batch["x2"])
    return F.cross_entropy(one @ across.gather(two).T, mine(one)) + F.cross_entropy(two @ one.T, torch.arange(len(one)))


def without_offset(model: Any, batch: Batch) -> Tensor:
    """Labels that do not begin at the offset."""
    one, every = model(batch["x"]), across.gather(model(batch["x2"]))
    return F.cross_entropy(one @ every.T, torch.arange(len(one)))


IN_SECRET: dict[str, tuple[LossFunction, tuple[nn.Module, ...]]] = {
    "beside BatchNorm": (lambda m, b: F.cross_entropy(m(b["x"]), b["label"]), (nn.BatchNorm1d(8), Centred())),
    "beside across": (against_all, (Centred(),)),
    "offset forgotten": (without_offset, ()),
}


@pytest.mark.parametrize("how", list(IN_SECRET))
def test_what_no_graph_shows_is_seen_at_the_first_step(how: str) -> None:
    """In lock-step, too: another split of the same samples must have the same loss."""
    loss_fn, between = IN_SECRET[how]
    told = "the samples of this batch are coupled"
    assert_refused(lambda: encoder(*between), loss_fn, rows(11, 0), 4, CoupledLoss, told)


@pytest.mark.parametrize("check", [True, False])
def test_what_a_graph_shows_is_refused_without_a_check(check: bool) -> None:
    """Gathering in one place does not excuse the other; own rows centred by the batch are still own rows."""
    assert_refused(encoder, one_side_forgotten, rows(11, 0), 4, CoupledLoss, r"across\.gather", check=check)
    own_pairs = lambda m, b: F.cross_entropy(m(b["x"]) @ centred_rows(m(b["x2"])).T, torch.arange(len(b["x"])))  # noqa: E731
    assert_refused(encoder, own_pairs, rows(11, 0), 4, CoupledLoss, check=check)
    own = lambda m, b: across.once(F.mse_loss(m(b["x"]), b["value"]))  # noqa: E731
    assert_refused(encoder, own, rows(11, 0), 4, LossError, check=check)


def test_another_term_that_is_marked_later_is_compared_as_well() -> None:
    """Where one was seen to be the same in every micro-batch, the one in its place is another by its line."""
    model, later = encoder(), False

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m(b["x"])
        shared = across.once(across.gather(out).mean(0).square().sum()) if not later else 0.0
        own = across.once(out.mean(0).square().sum()) if later else 0.0
        return F.mse_loss(out, b["value"]) + shared + own

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=False))
    for number in range(2):
        step(rows(11, number))
    later = True
    with pytest.raises(LossError, match=r"across\.once marks a term"):
        step(rows(11, 2))
