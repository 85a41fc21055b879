"""What a loss or a model asks of all micro-batches: the big batch's gradients, or an error that changes nothing.

The losses of examples/coupled are their own reference, called plainly on a whole batch. That each is the textbook's
loss is tested beside it, in formulas that hold all pairs at once.
"""

import importlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import Accumulator, across
from bigbatch.batch.tree import mapped
from bigbatch.errors import (
    BatchNormError,
    ConfigurationError,
    CoupledLoss,
    LossError,
    PathsDiffer,
    UnreadableLoss,
)
from bigbatch.lockstep.threads import current
from bigbatch.memory.meter import LiveBytes
from tests.support import coupled
from tests.support.coupled import (
    CALM,
    LossFunction,
    Make,
    assert_big_batch,
    assert_refused,
    centred_rows,
    gradients_of,
    mine,
    model,
    plain,
    step_of,
    twins,
)
from tests.support.reference import TOLERANCE, close, distance, sgd, trained
from tests.support.samples import CLASSES, Batch, generator, rows, seeded

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


def error(m: Any, b: Batch) -> Tensor:
    """A plain loss, which asks for nothing."""
    return F.mse_loss(m.one(b["x"]), b["value"])


def without_gradient(m: Any, b: Batch) -> Tensor:
    """A question without gradient has another answer in a micro-batch, too."""
    return F.mse_loss(m.one(b["x"]) * (1 + across.mean(b["x"].mean())), b["value"])


ASKING: dict[str, LossFunction] = {
    "at the top": lambda m, b: across.gather(error(m, b).view(1)).squeeze(),
    "beside a loss": lambda m, b: error(m, b) + across.once(across.mean(m.one(b["x"]).mean())),
    "centred below": lambda m, b: F.mse_loss(centred_rows(m.one(b["x"])), b["value"]),
    "without gradient": without_gradient,
    "an offset": lambda m, b: F.mse_loss(m.one(b["x"]) * (1 + across.offset()), b["value"]),
}


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("how", ASKING)
def test_an_accumulator_refuses_a_loss_that_asks(how: str, over: bool) -> None:
    """At the top of the loss or below, every time; nothing was added. No count makes the parts add up."""
    made = twins()
    accumulator = Accumulator(made, sgd(trained(made)), steps=2)
    ASKING[how](made, rows(4, 0))  # as in validation, before a batch is given out
    batch = next(iter(accumulator.over([rows(4, 0), rows(4, 1)]))) if over else rows(4, 0)
    loss = ASKING[how](made, batch)
    for count in ({}, {"count": 4}):
        with pytest.raises(CoupledLoss, match=r"(?s)(asks for|asked for).*Use: BigStep"):
            accumulator.backward(loss, **count)
    assert all(p.grad is None for p in trained(made))


def test_an_accumulator_refuses_a_model_that_asks() -> None:
    """Hidden between its layers; also after a call that was refused, and where it did not ask at first."""
    made: Any = model(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=lambda: nn.Linear(3, 6), two=lambda: nn.Linear(6, 4)
    )()
    accumulator = Accumulator(made, sgd(trained(made)), steps=3)
    batch = rows(4, 0)
    accumulator.backward(F.cross_entropy(made(batch["x"]), batch["label"]))
    made.how = lambda m, x: m.two(torch.tanh(centred_rows(m.one(x))))
    for _ in range(2):
        with pytest.raises(CoupledLoss, match=r"asks for all|were asked for"):
            accumulator.backward(F.cross_entropy(made(batch["x"]), batch["label"]))


def test_questions_of_others_are_no_part_of_the_next_loss() -> None:
    """Those of validation under no_grad, and of a BigStep, at its first check, too."""
    made, other = twins(), twins()
    accumulator, step = Accumulator(other, sgd(trained(other)), steps=2), step_of(made, coupled.clip, 2)
    for number in range(3):
        with torch.no_grad():
            without_gradient(other, rows(4, number))
        for size in (5, 2):  # of several micro-batches, and of one
            step(rows(size, number))
        accumulator.backward(error(other, rows(4, number)))


# The examples.

NAMES = "clip supcon info_nce barlow_twins vicreg moe dice correlation rmse".split()
EXAMPLES: dict[str, Any] = {name: importlib.import_module(f"examples.coupled.{name}") for name in NAMES}


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


def clip_in_full(m: Any, batch: Any) -> Tensor:
    """Both directions of the whole matrix (Radford et al. 2021, figure 3)."""
    images, texts, scale = m(*batch)
    logits = scale * images @ texts.T
    labels = torch.arange(len(images))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def supcon_in_full(m: Any, batch: Any) -> Tensor:
    """Equation 2 of Khosla et al., anchor by anchor."""
    z = F.normalize(m(batch[0].flatten(0, 1)), dim=1)
    labels, each = batch[1].repeat_interleave(2), (z @ z.T / EXAMPLES["supcon"].TEMPERATURE).exp()
    anchors: list[Tensor] = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        positives = [a for a in others if labels[a] == labels[i]]
        anchors.append(-(each[i, positives] / each[i, others].sum()).log().mean())
    return torch.stack(anchors).mean()


def info_nce_in_full(m: Any, batch: Any) -> Tensor:
    """The likelihood of each question's own answer among all passages."""
    questions, *passages = (F.normalize(m(batch[each]), dim=1) for each in ("questions", "answers", "distractors"))
    likely = (questions @ torch.cat(passages).T / EXAMPLES["info_nce"].TEMPERATURE).exp()
    return -(likely.diagonal() / likely.sum(1)).log().mean()


def off_diagonal(c: Tensor) -> Tensor:
    """The sum of squares beside a matrix's diagonal."""
    return c[~torch.eye(len(c), dtype=torch.bool)].pow(2).sum()


def barlow_twins_in_full(m: Any, batch: Any) -> Tensor:
    """The authors' own code: a BatchNorm without weights, then a matrix product."""
    norm = nn.BatchNorm1d(8, affine=False, dtype=torch.float64)
    c = norm(m(batch[0])).T @ norm(m(batch[1])) / len(batch[0])
    return (c.diagonal() - 1).pow(2).sum() + EXAMPLES["barlow_twins"].OFF_DIAGONAL * off_diagonal(c)


def vicreg_in_full(m: Any, batch: Any) -> Tensor:
    """The authors' own code."""
    x, y = m(batch[0]), m(batch[1])
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() / 2 for z in (x, y))
    redundancy = sum(off_diagonal(torch.cov(z.T)) / z.shape[1] for z in (x, y))
    return 25 * F.mse_loss(x, y) + 25 * spread + redundancy


def moe_in_full(m: Any, batch: Any) -> Tensor:
    """Equations 4 to 6 of Fedus et al. over all tokens in one row."""
    scores, _ = m(batch["tokens"], batch["mask"])
    likes, experts = m.mixture.router(m.first(batch["tokens"]))[batch["mask"]].softmax(-1), EXAMPLES["moe"].EXPERTS
    chosen = likes.argmax(-1)
    terms = [(chosen == expert).double().mean() * likes[:, expert].mean() for expert in range(experts)]
    return F.cross_entropy(scores, batch["labels"]) + 0.01 * experts * torch.stack(terms).sum()


def dice_in_full(m: Any, batch: Any) -> Tensor:
    """Class by class."""
    found, labels = m(batch[0]).softmax(1), batch[1]
    both = [(found[:, c], labels == c) for c in range(EXAMPLES["dice"].CLASSES)]
    return 1 - torch.stack([(2 * p[own].sum() + 1) / (p.sum() + own.sum() + 1) for p, own in both]).mean()


TEXTBOOK: dict[str, LossFunction] = {
    **{name: each for name in EXAMPLES if (each := globals().get(f"{name}_in_full"))},
    "correlation": lambda m, b: 1 - torch.corrcoef(torch.stack([m(b[0]).squeeze(1), b[1]]))[0, 1],
    "rmse": lambda m, b: (m(b[0]) - b[1]).pow(2).mean().sqrt(),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_outside_a_window_an_example_is_the_textbook_s_loss(name: str) -> None:
    """Value and gradient."""
    made, batch = network(name), batch_of(name, 10)
    found, true = EXAMPLES[name].loss_fn(made, batch), TEXTBOOK[name](made, batch)
    assert close(float(found.detach()), float(true.detach()), TOLERANCE)
    ours, theirs = (torch.autograd.grad(loss, trained(made)) for loss in (found, true))
    assert distance(ours, theirs) <= TOLERANCE * 10


# Exact beside them; other losses are in tests/lockstep/test_run.py.


def test_packed_sequences_meet_in_any_order() -> None:
    """Micro-batches of as many tokens, sorted by length, with as many samples as it comes."""
    batches = [batch_of("moe", 11, seed) for seed in range(3)]
    assert_big_batch(lambda: network("moe"), EXAMPLES["moe"].loss_fn, batches, lengths="mask", token_budget=12)


def test_a_model_that_computes_its_own_loss_beside_a_coupled_term() -> None:
    """Activations are kept: a loss that were recomputed could not be read."""

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        loss, scores = m(batch["x"], batch["label"])
        return loss + across.once(across.mean(scores.softmax(1).mean(0)).square().sum())

    own = model(lambda m, x, y: (F.cross_entropy(m.body(x), y), m.body(x)), body=lambda: nn.Linear(3, CLASSES))
    assert_big_batch(own, loss_fn, [rows(11, 0)], 4)


def test_what_each_micro_batch_is_told() -> None:
    """Rows in the batch's own order, from where its own begin; sums and means of all; types as they came."""
    batch = rows(7, 0)
    seen: list[tuple[int, int]] = []

    def loss_fn(m: Any, b: Batch) -> Tensor:
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
        return F.mse_loss(m.one(b["x"]) + 0 * across.offset(), b["value"])

    step_of(twins(), loss_fn, 3, activations="keep", check=False)(batch)
    assert seen == [(0, 3), (3, 2), (5, 2)]


def test_low_precision_is_added_up_in_float32() -> None:
    """A sum of many bf16 values is rounded once; against float64, beside the whole batch."""
    batch = {"x": torch.randn(64, 3, generator=generator(0))}
    make = seeded(lambda: nn.Linear(3, 4))

    def loss_fn(m: Any, b: Batch) -> Tensor:
        return across.once(across.sum(m(b["x"].bfloat16()).sum(0)).float().square().sum())

    def run(size: int) -> list[Tensor]:
        made, found = make().bfloat16(), list[Tensor]()
        step = step_of(made, loss_fn, size)
        step.before_step(lambda: found.extend(gradients_of(made)))
        step(batch)
        return found

    exact = make().bfloat16().double()
    exact(batch["x"].bfloat16().double()).sum(0).square().sum().backward()
    true = gradients_of(exact)
    assert distance(run(1), true) <= max(2.5 * distance(run(64), true), 2**-8)


# Terms that are the same in every micro-batch.


def overlap(m: Any, b: Batch) -> Tensor:
    """A ratio of sums, one without gradient."""
    own, other = m.one(b["x"]).sigmoid(), b["value"].sigmoid()
    return 1 - (2 * across.sum((own * other).sum()) + 1) / (across.sum(own.sum()) + across.sum(other.sum()) + 1)


def all_against_all(m: Any, b: Batch) -> Tensor:
    """As open_clip has it."""
    every = across.gather(m.one(b["x"]))
    return F.cross_entropy(every @ across.gather(m.two(b["x2"])).T, torch.arange(len(every)))


COUNTED_OFTEN: dict[str, LossFunction] = {
    "a root of a mean": lambda m, b: across.mean(error(m, b)).sqrt(),
    "a sum": lambda m, b: across.sum(F.mse_loss(m.one(b["x"]), b["value"], reduction="sum")),
    "a sum of gathered rows": lambda m, b: across.gather(m.one(b["x"])).square().sum(),
    "a product of means": lambda m, b: across.mean(m.one(b["x"]).mean()) * across.mean(m.two(b["x"]).mean()),
    "a ratio of sums": overlap,
    "beside a mean over samples": lambda m, b: error(m, b) + 0.1 * across.mean(m.one(b["x"]).mean()).square(),
    "all against all": all_against_all,
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


@pytest.mark.parametrize("late", [False, True])
def test_a_marked_term_is_looked_at_when_it_says_something(late: bool) -> None:
    """A hinge that is zero before it is passed, and a term that begins after a warm-up."""

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        own = F.relu((out - b["value"]).square().mean().sqrt() - 1e3 * b["x"][0, 0]) * across.mean(out.mean()).exp()
        loss = F.mse_loss(out, b["value"]) + across.once(across.mean(out.mean()))
        return loss if late and b["x"][0, 0] else loss + across.once(own)

    step, batch = step_of(twins(), loss_fn, 2), rows(6, 0)
    batch["x"][:, 0] = 1.0
    step(batch)
    step(batch)
    batch["x"][:, 0] = 0.0
    with pytest.raises(LossError, match="the same in every micro-batch"):
        step(batch)


def test_another_term_that_is_marked_later_is_compared_as_well() -> None:
    """Where one was seen to be the same in every micro-batch, the one in its place is another by its line."""
    later = False

    def loss_fn(m: Any, b: Batch) -> Tensor:
        out = m.one(b["x"])
        shared = across.once(across.gather(out).mean(0).square().sum()) if not later else 0.0
        own = across.once(out.mean(0).square().sum()) if later else 0.0
        return F.mse_loss(out, b["value"]) + shared + own

    step = step_of(twins(), loss_fn, 4, check=False)
    for number in range(2):
        step(rows(11, number))
    later = True
    with pytest.raises(LossError, match=r"across\.once marks a term"):
        step(rows(11, 2))


@pytest.mark.xfail(
    strict=True,
    reason="own values without gradient, a target or a weight, do not count as data where values of all are met: a "
    "mean over this micro-batch's samples is refused as if it were the same in each",
)
def test_values_of_all_against_what_has_no_gradient_are_a_mean_over_samples() -> None:
    """A prediction for all, set against each sample's own target."""
    loss_fn = lambda m, b: F.mse_loss(across.mean(m.one(b["x"]).mean(0)) * b["signs"], b["value"])  # noqa: E731
    assert_big_batch(twins, loss_fn, [rows(7, 0)], 3)


# Refused.


def encoder(*between: nn.Module) -> Make:
    """Two layers, with something between them."""
    return seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *between, nn.Linear(8, CLASSES)))


class Centred(nn.Module):
    """Looks at the other samples of whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """Take their mean away."""
        return x - x.mean(0)


def against_all(m: Any, batch: Batch, *, offset: bool = True) -> Tensor:
    """Own rows against all."""
    one = m(batch["x"])
    return F.cross_entropy(one @ across.gather(m(batch["x2"])).T, mine(one) if offset else torch.arange(len(one)))


def one_side_forgotten(m: Any, batch: Batch) -> Tensor:
    """The second direction is over this micro-batch alone."""
    one, two = m(batch["x"]), m(batch["x2"])
    return F.cross_entropy(one @ across.gather(two).T, mine(one)) + F.cross_entropy(two @ one.T, torch.arange(len(one)))


def centred_pairs(m: Any, batch: Batch) -> Tensor:
    """Own rows centred by the batch are still own rows."""
    return F.cross_entropy(m(batch["x"]) @ centred_rows(m(batch["x2"])).T, torch.arange(len(batch["x"])))


def on_threads(m: Any, x: Tensor) -> Tensor:
    """Two norms at once."""
    h = m.one(x)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda norm: norm(h), m.norms)
    return torch.as_tensor(first + second)


def offset_on_a_thread(m: Any, b: Batch) -> Tensor:
    """There is no micro-batch there: the answer is another."""
    one, two, scale = m(b)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(across.offset).result() + torch.arange(len(one))
    return F.cross_entropy(scale * one @ across.gather(two).T, own)


def own_number(m: Any, b: Batch) -> Tensor:
    """It has no gradient, and no place in a graph; where it is the same in all, it is not the big batch's."""
    own = torch.tensor(float(len(b["x"])), dtype=torch.float64)
    return across.sum(m.one(b["x"]).square().sum()) / (across.sum(m.two(b["x"]).square().sum()) + own)


def two_on_one_line(m: Any, b: Batch) -> Any:
    """One term that is the same in every micro-batch, and one that is not."""
    out = m.one(b["x"])
    two = across.mean(out.square().mean()).sqrt(), F.mse_loss(out, b["value"]).sqrt() * across.mean(out.mean()).exp()
    return sum(across.once(each) for each in two)


def beside_a_mean(m: Any, b: Batch) -> Tensor:
    """A term of the micro-batch's own that is marked."""
    out = m.one(b["x"])
    return F.mse_loss(out, b["value"]) + across.once(out.square().mean() * across.mean(out.mean()))


def changing(m: Any, b: Batch) -> Tensor:
    """A loss that is another one for some."""
    out = centred_rows(m.one(b["x"]))
    return F.mse_loss(out, b["value"]) if _some(b) else F.cross_entropy(out, b["label"])


def _some(batch: Batch) -> bool:
    return bool(batch["x"][0, 0] > 0)


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
COUPLED = "the samples of this batch are coupled"
OWN = r"(?s)the same in every micro-batch.*Got .*, .*Use: across\.gather"
ON_THREADS = r"(?s)was called on a thread of the model's own.*Use: F.batch_norm"
threaded = model(
    on_threads,
    one=lambda: nn.Linear(3, CLASSES),
    norms=lambda: nn.ModuleList([nn.BatchNorm1d(CLASSES), nn.BatchNorm1d(CLASSES)]),
)
Refusal = tuple[Make, LossFunction, Any, str | None]
# What no graph shows is seen by the first check: in lock-step, too, another split must have the same loss.
IN_SECRET: dict[str, Refusal] = {
    "beside BatchNorm": (encoder(nn.BatchNorm1d(8), Centred()), plain, CoupledLoss, COUPLED),
    "beside across": (encoder(Centred()), against_all, CoupledLoss, COUPLED),
    "offset forgotten": (encoder(), partial(against_all, offset=False), CoupledLoss, COUPLED),
    "an offset on a thread": (twins, offset_on_a_thread, CoupledLoss, None),
}
# What a graph shows is refused without it.
REFUSED: dict[str, Refusal] = {
    "one side forgotten": (encoder(), one_side_forgotten, CoupledLoss, r"across\.gather"),
    "own pairs": (encoder(), centred_pairs, CoupledLoss, None),
    "an own mean that is marked": (
        encoder(), lambda m, b: across.once(F.mse_loss(m(b["x"]), b["value"])), LossError, None
    ),
    "norms on threads": (threaded, plain, (BatchNormError, CoupledLoss), f"{ON_THREADS}|coupled"),
    "a term marked beside a mean": (twins, beside_a_mean, LossError, OWN),
    "a term marked on a line of two": (twins, two_on_one_line, LossError, OWN),
    "a term marked that is centred": (
        twins, lambda m, b: across.once(F.mse_loss(centred_rows(m.one(b["x"])), b["value"])), LossError, OWN
    ),
    "an own number": (twins, own_number, (UnreadableLoss, CoupledLoss), "made of values of all|coupled"),
    "own rows of values of all": (
        twins,
        lambda m, b: across.gather(m.one(b["x"]))[mine(b["x"])].square().mean(),
        (UnreadableLoss, CoupledLoss),
        r"(?s)made of values of all micro-batches alone.*counted\(term, n\)|coupled",
    ),
    "a gathered number": (
        twins, lambda m, b: across.gather(m.one(b["x"]).mean()), LossError, r"(?s)takes rows.*0-d.*across\.sum\(x\)"
    ),
    "a term with rows": (twins, lambda m, b: across.once(m.one(b["x"]).mean(1)), LossError, "takes a 0-d tensor"),
    "a sum of a number": (
        twins, lambda m, b: across.sum(1.0) * m(b)[2], LossError, r"takes a tensor\. Got float"  # type: ignore[arg-type]
    ),
    "a count with gradient": (
        twins, lambda m, b: across.once(across.mean(m.one(b["x"]).mean(), m.scale.exp())), LossError, "without gradient"
    ),
    "a count below nothing": (
        twins, lambda m, b: across.once(across.mean(m.one(b["x"]).mean(), torch.tensor(-2.0))), LossError, r"Got -2"
    ),
    "a second derivative": (twins, penalized, RuntimeError, "cannot be differentiated twice"),
    "an attack": (twins, attacked, LossError, "a derivative inside of the loss goes through across"),
}  # fmt: skip
UNCHECKED: dict[str, Refusal] = {
    "another loss": (twins, changing, LossError, r"changed within a window: its terms were .* and are .* now"),
    "summed, changed": (twins, partial(changed_in_place, ask=across.sum), RuntimeError, IN_PLACE),
    "gathered, changed late": (twins, partial(changed_in_place, ask=across.gather, late=True), RuntimeError, IN_PLACE),
    "norms on threads, unchecked": (threaded, plain, BatchNormError, ON_THREADS),
}


@pytest.mark.parametrize(
    ("how", "check"),
    [*((how, check) for how in REFUSED for check in (True, False)), *((how, True) for how in IN_SECRET)]
    + [(how, False) for how in UNCHECKED],
)
def test_what_is_refused(how: str, check: bool) -> None:
    """In words, with and without a check; nothing is changed."""
    make, loss, error, told = (REFUSED | IN_SECRET | UNCHECKED)[how]
    batch = rows(11, 0)
    batch["x"][:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, *[-1.0] * 7])
    activations = "keep" if "changed" in how else "auto"
    assert_refused(make, loss, batch, 4, error, told, check=check, activations=activations)


# Different paths.


def mean_of(m: Any, b: Batch, scale: float = 1) -> Tensor:
    """The mean output over the batch."""
    return across.mean(m.one(b["x"]).mean(0) * scale)


def one_of_two(m: Any, b: Batch) -> Tensor:
    """Means that look alike."""
    first, second = (mean_of(m, b, scale) for scale in (1, 2))
    return first + second.detach() if _some(b) else first.detach() + second


ADDED: dict[str, Callable[[Any, Batch], Any]] = {
    "gathered by some": lambda m, b: across.gather(m.one(b["x"])).mean(0) if _some(b) else 0,
    "another shape": lambda m, b: across.sum(m.one(b["x"])[:, : 3 if _some(b) else 2].sum(0)).sum(),
    "once more by some": lambda m, b: sum(mean_of(m, b) for _ in range(1 + _some(b))),
    "without gradient in some": lambda m, b: across.mean(
        (m.one(b["x"]) if _some(b) else m.one(b["x"]).detach()).mean(0)
    ),
    "one of two means that look alike": one_of_two,
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


def test_recomputing_holds_one_micro_batch_at_a_time() -> None:
    """Tensor memory is about that of one micro-batch; kept, it is that of all of them."""

    def peak(n: int, activations: Any) -> int:
        layers = nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
        loss = lambda m, b: F.mse_loss(centred_rows(m(b["x"])), b["value"])  # noqa: E731
        step = step_of(nn.Sequential(*layers).double(), loss, 128, activations=activations, check=False)
        batch = {name: leaf for name, leaf in rows(n, 0).items() if name in {"x", "value"}}
        step(batch)
        with LiveBytes() as live:
            step(batch)
        return live.peak

    one, kept = peak(128, "keep"), peak(1024, "keep")
    assert kept > 4 * one
    assert max(peak(1024, "recompute"), peak(1024, "auto")) < 1.7 * one


def test_recomputing_a_model_that_meets_inside_is_refused() -> None:
    """It says what to take instead, and nothing is changed; `auto` keeps them then."""
    make = coupled.inside("centred", last=True)
    told = r'(?s)runs again.*across\.mean.*inside.*"keep".*"offload"'
    assert_refused(make, plain, rows(6, 0), 2, ConfigurationError, told, check=False, activations="recompute")
    assert_big_batch(make, plain, [rows(6, 0), rows(5, 1)], 2)
    told = "BatchNorm '2' over"
    make = encoder(nn.BatchNorm1d(8))
    assert_refused(make, plain, rows(6, 0), 2, ConfigurationError, told, activations="recompute")
