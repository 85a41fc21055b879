"""`GradientNoise`: it sees a window as it is, its interval holds a known answer, its words say what that means."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.amp.grad_scaler import GradScaler

from benchmarks.noise_truth import Regression, holds, loss_of, measured
from bigbatch import Accumulator, BigStep, GradientNoise, Options
from bigbatch.errors import ConfigurationError
from bigbatch.noise.noise_report import (
    LEAST,
    Estimate,
    Norms,
    Verdict,
    correlation_time,
    estimate,
    judge,
    make_report,
    student,
)
from tests.support.emulated_graphs import emulated
from tests.support.losses import READABLE, SEVERAL
from tests.support.reference import OptimizerFactory, sgd, trained, windows
from tests.support.samples import Batch, Loss, mlp
from tests.support.strategies import seeds, splits
from tests.support.training import MASKED, PLAIN, SUMMED, Training, micro_batches

SIZES = (3, 1, 4, 2, 5, 1, 2, 3, 2)
ONE_COUNT = "mse-mean cross_entropy-functional-2-D-ignored-weights-mean binary_cross_entropy-mean smooth_l1-mean sparse"


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, so that the truth can be had afterwards."""
    return torch.optim.SGD(parameters, lr=0.0)


def gradient_of(case: Loss, model: nn.Module, batch: Batch) -> float:
    """Return |∇loss|² over a batch, by plain torch."""
    model.zero_grad()
    case.loss(model, batch).backward()
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return sum(float((each.coalesce().values() if each.is_sparse else each).square().sum()) for each in gradients)


def assert_seen(
    noise: GradientNoise, case: Loss, model: nn.Module, each: Sequence[Sequence[Batch]], tolerance: float = 1e-11
) -> None:
    """Every number of every window: of its first micro-batch and of all of it, with their counts."""
    assert case.count is not None
    pairs = [(window[0], case.join(window)) for window in each if len(window) > 1]
    true = [[n for part in pair for n in (gradient_of(case, model, part), float(case.count(part)))] for pair in pairs]
    assert [list(norms) for norms in noise._read()] == [pytest.approx(each, rel=tolerance) for each in true]


def measured_on(
    case: Loss, sizes: Sequence[int], steps: int = 2, *, every: int = 1, broken: int | None = None, **settings: Any
) -> tuple[GradientNoise, Loss, nn.Module, list[Sequence[Batch]]]:
    """Measure windows of a training, of which one micro-batch may have an inf."""
    training, batches = Training(steps, case=case, optimizer=still, **settings), case.micro_batches(sizes)
    if broken is not None:
        batches[broken]["value"][0, 0] = math.inf
    noise = GradientNoise(training.accumulator, every=every)

    def double() -> None:
        for p in trained(training.model):
            p.grad = None if p.grad is None else p.grad.mul_(2)

    if steps == DOUBLED:
        training.accumulator.before_step(double)
    training.train(batches)
    return noise, case, training.model, windows(batches, steps)[::every]


# What is seen of a window.


def embeddings() -> nn.Module:
    """A model with sparse gradients."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(12, 1)).double()


SPARSE = Loss(
    "sparse",
    embeddings,
    lambda n, _: {"x": torch.randint(7, (n, 4)), "y": torch.randn(n, 1, dtype=torch.float64)},
    lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
    count=lambda batch: batch["y"].numel(),
)
DOUBLED = 4  # steps of a window whose gradient a hook doubles
SITUATIONS: dict[str, dict[str, Any]] = {
    **{case.name: {"case": case} for case in (*READABLE, SPARSE) if case.name in ONE_COUNT.split()},
    "clipped": {"clip_norm": 0.05},
    "scaled": {"scaler": GradScaler("cpu", init_scale=1024.0)},
    "counted in advance": {"counts": lambda batch: (MASKED.count(batch),) if MASKED.count else ()},
    "a hook": {"steps": DOUBLED},
    "windows in between": {"every": 2, "sizes": [2] * 18},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_an_accumulator_is_seen_as_it_is(name: str) -> None:
    """The gradients of the first micro-batch and of the whole window, before scaling, clipping and hooks."""
    assert_seen(*measured_on(**{"case": MASKED, "sizes": SIZES, "steps": 3, **SITUATIONS[name]}))


@given(splits(), seeds)
@settings(max_examples=15)
def test_any_split_is_seen_as_it_is(sizes: list[int], seed: int) -> None:
    """However uneven micro-batches are, and however short the last window is."""
    torch.manual_seed(seed)
    assert_seen(*measured_on(MASKED, sizes))


@pytest.mark.parametrize("what", ["several optimizers", "bf16", "bf16 in its own"])
def test_gradients_of_any_kind_are_seen(what: str) -> None:
    """One norm over all optimizers' parameters; bf16 to its rounding."""
    low, batches = what.startswith("bf16"), micro_batches(SIZES, PLAIN)
    model = PLAIN.model().to(torch.bfloat16 if low else torch.float64)
    optimizers = [still(trained(model))] if low else [still(trained(model)[:1]), still(trained(model)[1:])]
    dtype = None if what == "bf16 in its own" else torch.float32
    accumulator = Accumulator(model, optimizers, steps=3, gradient_dtype=dtype)
    noise = GradientNoise(accumulator, every=1)
    for batch in accumulator.over(batches):
        given = {key: value.bfloat16() if low and value.is_floating_point() else value for key, value in batch.items()}
        accumulator.backward(PLAIN.loss(model, given))
    assert_seen(noise, PLAIN, model.double(), windows(batches, 3), tolerance=0.05 if low else 1e-12)


ON_GPU = [pytest.param(how, False, marks=pytest.mark.cuda) for how in ("on a GPU", "on a GPU, replayed")]
WAYS = [("launched", False), ("launched", True), ("replayed", False), ("replayed", True), *ON_GPU]


@pytest.mark.parametrize(("how", "scaled"), WAYS)
def test_a_big_step_is_seen_as_it_is(monkeypatch: pytest.MonkeyPatch, how: str, scaled: bool) -> None:
    """Micro-batches as the step cuts them, launched or replayed from a captured graph."""
    device = "cuda" if "GPU" in how else "cpu"
    model, scaler = PLAIN.model().to(device), GradScaler(device, init_scale=256.0) if scaled else None
    options = Options(cuda_graph=how == "on a GPU, replayed")
    step = BigStep(model, still(trained(model)), PLAIN.loss, micro_batch_size=3, scaler=scaler, options=options)
    if how == "replayed":
        emulated(step, monkeypatch)
    noise = GradientNoise(step, every=1)
    batches = [PLAIN.batch(9, seed) for seed in range(4)]
    for batch in batches:
        step(batch)
    cut = [{key: value[at : at + 3] for key, value in batch.items()} for batch in batches for at in (0, 3, 6)]
    assert_seen(noise, PLAIN, model.cpu(), windows(cut, 3), tolerance=1e-10)


def test_being_looked_at_changes_nothing() -> None:
    """Bitwise the same weights."""
    plain, looked_at = (Training(steps=3, clip_norm=0.05) for _ in range(2))
    GradientNoise(looked_at.accumulator, every=1)
    for training in (plain, looked_at):
        training.train(micro_batches(SIZES))
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, looked_at.weights, strict=True))


def test_a_window_that_is_dropped_is_looked_at_in_the_next() -> None:
    """A look is not lost with its window, nor is what was seen of it mixed with another."""
    training, batches = Training(steps=2, optimizer=still), micro_batches(SIZES)
    noise = GradientNoise(training.accumulator, every=2)
    training.backward(batches[0])
    training.accumulator.discard()
    for batch in batches[1:5]:
        training.backward(batch)
    assert_seen(noise, MASKED, training.model, [batches[1:3]])


def test_it_forgets_stops_and_begins_anew() -> None:
    """The latest windows are kept; after `stop` or a `with` no window is looked at; `reset` forgets."""
    training, batches = Training(steps=2, optimizer=still), micro_batches([2] * 8)
    with GradientNoise(training.accumulator, every=1, last=2) as noise:
        training.train(batches)
    training.train(batches[:4])
    assert_seen(noise, MASKED, training.model, windows(batches, 2)[-2:])
    noise.reset()
    assert noise.report().verdict == "nothing"
    again = GradientNoise(training.accumulator)  # its place is free, until another measures
    with pytest.raises(ConfigurationError, match=r"another GradientNoise measures this(.|\n)*noise.stop\(\)"):
        GradientNoise(training.accumulator)
    again.stop()
    again.stop()
    GradientNoise(training.accumulator)


# What tells nothing.


def in_lock_step() -> GradientNoise:
    """Samples that are coupled."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    step = BigStep(model, still(trained(model)), loss_of, micro_batch_size=3)
    noise = GradientNoise(step, every=1)
    step((torch.randn(9, 3).double(), torch.randn(9, 1).double()))
    return noise


def resumed() -> GradientNoise:
    """A window whose first micro-batch was alone before a checkpoint, after one that was dropped."""
    before, after = Training(steps=3), Training(steps=3)
    batches = micro_batches(SIZES)
    before.backward(batches[0])
    noise = GradientNoise(after.accumulator, every=1)
    after.backward(batches[3])
    after.accumulator.discard()
    after.accumulator.load_state_dict(before.accumulator.state_dict())
    after.train(batches[1:3])
    return noise


def told(*arguments: Any, **settings: Any) -> Callable[[], GradientNoise]:
    """Return what measures a training."""
    return lambda: measured_on(*arguments, **settings)[0]


SCALER = GradScaler("cpu")
NOTHING: list[tuple[Callable[[], GradientNoise], str, int, str]] = [
    (told(PLAIN, (2, 2, 2), 1), "alone", 3, "3 windows told nothing: one micro-batch per window"),
    (told(SUMMED, (2, 2)), "sum", 1, "1 window told nothing: the loss is a sum"),
    (told(SEVERAL[0], (2, 3), counts=SEVERAL[0].counts), "several", 1, "the loss has several counts"),
    (in_lock_step, "coupled", 1, "micro-batches ran in lock-step"),
    (resumed, "resumed", 1, "was resumed from a checkpoint"),
    (told(PLAIN, (2, 2), broken=0, scaler=SCALER), "unusable", 1, "a gradient had an inf or NaN"),
    (told(PLAIN, (2, 2), broken=1, scaler=SCALER), "unusable", 1, "a gradient had an inf or NaN"),
]


@pytest.mark.parametrize(("make", "reason", "number", "text"), NOTHING)
def test_windows_that_say_nothing(make: Any, reason: str, number: int, text: str) -> None:
    """They are left out, and the report says why."""
    report = make().report()
    assert (report.windows, report.verdict, report.interval) == (0, "nothing", (0.0, math.inf))
    assert report.scale is report.recommended_batch is report.recommended_steps is None
    assert "The batch size cannot be judged" in str(report)
    assert dict(report.left_out) == {reason: number}
    assert text in str(report)


def test_a_first_micro_batch_without_targets_is_passed_over() -> None:
    """The first that counts anything is what the window is compared with."""
    training, batches = Training(steps=3, optimizer=still), micro_batches([2, 3, 4])
    noise = GradientNoise(training.accumulator, every=1)
    batches[0]["partly"].fill_(-100)
    training.train(batches)
    assert_seen(noise, MASKED, training.model, [batches[1:]])


# Estimates.


def test_each_window_is_solved_without_bias() -> None:
    """Of the expected norms both unknowns come out, whatever the sizes; the weight is that of the two sizes."""
    noise, signal = 5.0, 0.25
    for things, total in ((1, 8), (3, 10), (7, 8)):
        found = Norms(signal + noise / things, things, signal + noise / total, total).part
        weight = (1 - things / total) ** 2
        assert found == pytest.approx((weight * noise, weight * signal))


@pytest.mark.parametrize("seed", range(8))
def test_the_interval_is_every_ratio_that_a_t_test_lets_stand(seed: int) -> None:
    """Each ratio is tested by hand, inside and outside of the interval."""
    by = torch.Generator().manual_seed(seed)
    drawn = torch.randn(24, 2, generator=by, dtype=torch.float64) + torch.tensor([1.0, 0.3 * (seed % 4)])
    parts = [tuple(row) for row in drawn.tolist()]
    found = estimate(parts)
    reach = student(len(parts) / found.correlation - 1)

    def stands(ratio: float) -> bool:
        apart = drawn[:, 0] - ratio * drawn[:, 1]
        error = apart.std() * math.sqrt(found.correlation / len(parts))
        return bool(apart.mean().abs() <= reach * error)

    for ratio in torch.logspace(-2, 3, 200).tolist():
        if not any(abs(ratio / end - 1) < 1e-3 for end in (found.low, found.high) if end):
            inside = found.low <= ratio <= found.high
            assert stands(ratio) or not inside
            assert inside or not stands(ratio)


def test_students_t() -> None:
    """As in the tables."""
    for freedom, value in ((7, 2.3646), (15, 2.1314), (1000, 1.9623)):
        assert student(freedom) == pytest.approx(value, rel=3e-3)


def test_windows_that_resemble_each_other_count_for_less() -> None:
    """An autoregressive series of coefficient 0.6 has a quarter as many independent values; white noise has all."""
    by = torch.Generator().manual_seed(0)
    white = torch.randn(4000, generator=by, dtype=torch.float64).tolist()
    red = [0.0]
    for value in white:
        red.append(0.6 * red[-1] + value)
    assert correlation_time(white) == pytest.approx(1.0, abs=0.15)
    assert 2.5 < correlation_time(red) <= 4.0
    assert correlation_time([1.0] * 20) == 1.0


@pytest.mark.parametrize("sizes", [(8,) * 8, (6, 18, 2, 10, 4, 14, 7, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_the_interval_holds_what_is_known_in_closed_form(sizes: tuple[int, ...], spread: float) -> None:
    """Linear regression, forty times: 95 % of the intervals should hold the truth, so 34 do with a chance of 0.997."""
    problem = Regression(spread=spread)
    reports = [measured(problem, sizes, windows=24, seed=seed) for seed in range(40)]
    assert sum(holds(report, problem.noise_scale) for report in reports) >= 34


# Reports.


def seen(scale: float, *, batch: float = 64.0, number: int = 64, jitter: float = 0.02, seed: int = 0) -> list[Norms]:
    """Make windows of a noise scale, a micro-batch of 8, and some jitter."""
    by = torch.Generator().manual_seed(seed)
    around = 1 + jitter * torch.randn(number, 2, generator=by, dtype=torch.float64)
    return [Norms(small * (1 + scale / 8), 8.0, large * (1 + scale / batch), batch) for small, large in around.tolist()]


def around(small: float, large: float, number: int = 20) -> list[Norms]:
    """Windows of these squared norms, with some jitter: a micro-batch of 8 in a batch of 64."""
    return [Norms(small * (1 + 1e-3 * at), 8.0, large * (1 + 1e-3 * (at % 3)), 64.0) for at in range(number)]


# What was seen, the verdict, the batch and the steps that are recommended, and a part of the text.
UNKNOWN = None, None
NO_NOISE = [Norms(1.0, 8.0, 1.0, 64.0)] * 20
TOLD: list[tuple[list[Norms], Verdict, tuple[float | None, float | None], str]] = [
    (seen(1000), "larger", (1000, 125), r"larger batch is worth having: about [\d,]+ \(\d+ times this one, \d+ of th"),
    (seen(16), "smaller", (16, 2), r"larger than useful: about \d.* of these micro-batches\) would do"),
    (seen(64), "right", (64, 8), r"The batch is about right"),
    (seen(64, jitter=0.9, number=20), "too noisy", UNKNOWN, r"80 windows would halve the interval.*every=1"),
    (seen(64, number=LEAST - 1), "too few", UNKNOWN, rf"Too early to tell: {LEAST - 1} of {LEAST} windows.*every=1"),
    (seen(1e5, jitter=0.4, seed=1), "larger", UNKNOWN, "at least"),  # the true gradient may be zero
    (NO_NOISE, "smaller", UNKNOWN, "one micro-batch would do"),  # all samples are the same
    (around(0.9, 1.0), "smaller", UNKNOWN, "one micro-batch would do"),  # the first ones happen to be smaller
    (around(20.0, 1.0), "too noisy", UNKNOWN, "Gradient noise scale: unknown"),  # |G|² came out negative
    ([], "nothing", UNKNOWN, "The batch size cannot be judged"),
]


@pytest.mark.parametrize(("norms", "verdict", "recommended", "text"), TOLD)
def test_the_report_says_which_batch_is_worth_having(
    norms: list[Norms], verdict: str, recommended: tuple[float | None, float | None], text: str
) -> None:
    """In a word for programs, and in sentences for people; what was left out is said where it is much."""
    report = make_report(norms, {"alone": 1, "sum": 200})
    assert report.verdict == verdict
    for found, expected in zip((report.recommended_batch, report.recommended_steps), recommended, strict=True):
        assert found == (None if expected is None else pytest.approx(expected, rel=0.3))
    assert re.search(text, str(report), re.DOTALL), str(report)
    assert "200 windows told nothing: the loss is a sum" in str(report)
    assert ("1 window told nothing" in str(report)) == (report.windows < 10)  # one of many is not worth a word
    assert "nan" not in str(report)
    assert "every=1" not in str(make_report(norms, {}, every=1))  # every window is the most


# A scale in multiples of the batch with the ends of its interval, and what that says.
JUDGED: list[tuple[tuple[float, float, float], str]] = [
    ((4, 0.95, 9.4), "too noisy"),  # twice the batch could save much
    ((1.9, 0.95, 9.4), "right"),
    ((1 / 4, 0.15, 1.05), "too noisy"),
]


@pytest.mark.parametrize(("figures", "verdict"), JUDGED)
def test_a_scale_that_may_be_the_batchs_own_is_right_if_near(figures: tuple[float, float, float], verdict: str) -> None:
    """Else it cannot be told."""
    scale, low, high = (64 * each for each in figures)
    assert judge(Estimate(scale, low, high, 1.0), 64) == verdict


# Misuse.


def packing() -> GradientNoise:
    """A step that sorts samples: a micro-batch is no random part of its batch."""
    model = mlp()()
    return GradientNoise(BigStep(model, sgd(trained(model)), PLAIN.loss, options=Options(lengths="mask")))


Noise: Any = GradientNoise
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an optimizer": (
        lambda: Noise(still(trained(mlp()()))),
        r"GradientNoise\(SGD\)(.|\n)*: GradientNoise\(accumulator\)",
    ),
    "packing": (packing, r"sorts samples by length(.|\n)*Options\(\)"),
    "every": (lambda: Noise(Training(steps=2).accumulator, every=0), "every must be a positive integer; found 0"),
    "last": (lambda: Noise(Training(steps=2).accumulator, last=1.5), "last must be a positive integer; found 1.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    """The optimizer is a likely slip."""
    make, text = REFUSED[name]
    with pytest.raises(ConfigurationError, match=text):
        make()


# On a GPU.


@pytest.mark.cuda
@pytest.mark.parametrize("factory", [sgd, lambda p: torch.optim.AdamW(p, fused=True)], ids=["sgd", "adamw"])
def test_a_look_waits_for_nothing(factory: OptimizerFactory) -> None:
    """No host synchronisation before the report."""
    from tests.test_cuda import syncs

    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)).cuda()
    accumulator = Accumulator(model, factory(trained(model)), steps=3)
    data = [(torch.randn(8, 10).cuda(), torch.randint(4, (8,)).cuda()) for _ in range(6)]

    def train() -> None:
        for inputs, labels in accumulator.over(data):
            accumulator.backward(nn.functional.cross_entropy(model(inputs), labels))

    train()
    with syncs() as without:
        train()
    noise = GradientNoise(accumulator, every=1)
    train()
    torch.cuda.synchronize()
    with syncs() as found:
        train()
    assert len(found) == len(without)
    assert noise.report().windows == 4
