"""Running out of memory anywhere loses nothing, and no other error leaves a trace."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigbatch import BigStep, Options
from bigbatch.errors import ConfigurationError, OutOfMemory
from tests.support.bombs import (
    OTHER,
    OUT_OF_MEMORY,
    POINTS,
    Bomb,
    Restless,
    everything,
    restless_loss,
    seed,
    two_counts,
)
from tests.support.reference import distance, sgd, trained, weights
from tests.support.samples import Batch, mlp, rows, sequences
from tests.support.training import PLAIN

LOSSES: dict[str, Callable[[Any, Batch], Tensor]] = {"one count": restless_loss, "two counts": two_counts}
points = st.sampled_from(POINTS)
# Where one sample fits, the check may not: it needs two.
pytestmark = pytest.mark.filterwarnings("ignore:the check of this batch could not run:UserWarning")


class Session:
    """A restless model in training."""

    def __init__(self, bomb: Bomb | None = None, *, loss: str = "one count", size: Any = 8, **options: Any) -> None:
        seed()
        self.model = Restless(bomb)
        self.optimizer = torch.optim.AdamW(trained(self.model), lr=0.05, foreach=False)
        self.step = BigStep(
            self.model, self.optimizer, LOSSES[loss], micro_batch_size=size, clip_norm=1.0, options=Options(**options)
        )

    @property
    def all(self) -> list[Any]:
        """All that a step may change."""
        return everything(self.model, self.optimizer)


def learned(step: BigStep) -> int:
    """The one size that was learned."""
    (found,) = step.state_dict()["sizes"].values()
    size: int = found["size"]
    return size


@given(
    point=points,
    error=st.sampled_from(OUT_OF_MEMORY),
    loss=st.sampled_from(sorted(LOSSES)),
    n=st.integers(3, 9),
    size=st.integers(3, 10),
    fits=st.integers(1, 2),
    after=st.integers(0, 9),
    check=st.booleans(),
    warm=st.booleans(),
)
@settings(max_examples=45)
def test_out_of_memory_anywhere_is_as_if_it_had_never_been(
    *,
    point: str,
    error: Callable[[], BaseException],
    loss: str,
    n: int,
    size: int,
    fits: int,
    after: int,
    check: bool,
    warm: bool,
) -> None:
    """Weights, optimizer state, buffers and random generators are, bit by bit, those of the smaller size all along."""
    bomb = Bomb()
    session = Session(bomb, loss=loss, size=size, check=check)
    if warm:
        session.step(rows(n, 1))
    bomb.point, bomb.fits, bomb.after, bomb.error = point, fits, after, error
    update, found = session.step(rows(n, 0)), session.all
    if not bomb.went_off:
        return
    assert learned(session.step) < min(size, n)
    true = Session(loss=loss, size=size, check=check)
    if warm:
        true.step(rows(n, 1))
    true.step.load_state_dict(session.step.state_dict())
    expected = true.step(rows(n, 0))
    assert found == true.all
    assert (update.micro_batches, update.count) == (expected.micro_batches, expected.count)
    assert update.grad_norm is not None
    assert expected.grad_norm is not None
    assert torch.equal(update.grad_norm, expected.grad_norm)


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_the_smaller_size_is_remembered(point: str) -> None:
    """The next batch of that shape does not fail again; another shape has its own size; a checkpoint keeps it."""
    bomb = Bomb(point, fits=2)
    session, again = (Session(bomb, size=8, check=False) for _ in range(2))
    session.step(rows(8, 0))
    assert bomb.went_off == 2  # with 8, and with 4
    assert session.step(rows(8, 1)).micro_batches == 4
    assert session.step(rows(5, 1)).micro_batches == 3
    again.step.load_state_dict(session.step.state_dict())
    assert again.step(rows(8, 0)).micro_batches == 4
    assert bomb.went_off == 2
    bomb.fits = 9
    other = {name: leaf.float() if name == "x3" else leaf for name, leaf in rows(8, 0).items()}
    assert again.step(other).micro_batches == 1


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("number", range(len(POINTS)))
def test_a_sample_that_does_not_fit(number: int, size: Any) -> None:
    """The error says how much and what to try, nothing is changed, and a smaller model goes on."""
    bomb = Bomb(POINTS[number], fits=0, error=OUT_OF_MEMORY[number % len(OUT_OF_MEMORY)])
    session = Session(bomb, size=size)
    before = session.all
    said = r"one sample at a time; .*(20\.00 GiB|41000000000 bytes|does not say how much).*Use: activation check"
    with pytest.raises(
        (OutOfMemory, ConfigurationError), match=rf"(?s){said}|one sample does not fit.*checkpoint"
    ) as caught:
        session.step(rows(6, 0))
    assert size == "auto" or caught.value.__cause__ is not None
    assert session.all == before
    bomb.fits = 9
    session.step(rows(6, 0))
    found, true = session.all, Session(size=learned(session.step))
    true.step(rows(6, 0))
    assert found == true.all


@given(
    point=points,
    error=st.sampled_from(OTHER),
    loss=st.sampled_from(sorted(LOSSES)),
    size=st.sampled_from([2, 3, "auto"]),
    after=st.integers(0, 24),
    warm=st.booleans(),
)
@example(point="forward", error=lambda: StopIteration("done"), loss="one count", size="auto", after=2, warm=False)
@settings(max_examples=40)
def test_other_errors_leave_everything_as_it_was(
    *, point: str, error: Callable[[], BaseException], loss: str, size: Any, after: int, warm: bool
) -> None:
    """Weights, gradients, optimizer state, buffers, generators and training flags; and the next step works."""
    session = Session(Bomb(), loss=loss, size=size)
    session.model.first.eval()  # flags that differ
    if warm:
        session.step(rows(7, 0))
    before, bomb = session.all, session.model.bomb
    bomb.point, bomb.after, bomb.error = point, after, error
    try:
        session.step(rows(7, 1))
    except BaseException as caught:  # noqa: BLE001 - whatever was injected
        assert type(caught) is type(error())  # noqa: PT017 - or nothing, where it was not reached
    else:
        return
    assert session.all == before
    bomb.point = ""
    session.step(rows(7, 1))
    if not warm and size != "auto":
        found, true = session.all, Session(loss=loss, size=size)
        true.model.first.eval()
        true.step(rows(7, 1))
        assert found == true.all


def test_probing_takes_failures_for_an_answer() -> None:
    """What does not fit is not chosen; nothing is left of the probes; the update is that of the size."""
    bomb = Bomb("backward", fits=3)
    session = Session(bomb, size="auto")
    session.step(rows(9, 0))
    assert bomb.went_off
    assert learned(session.step) <= 3
    found, true = session.all, Session(size=learned(session.step))
    true.step(rows(9, 0))
    assert found == true.all
    session.step(rows(9, 1))  # samples are compared once more
    seen = len(bomb.seen)
    session.step(rows(9, 2))
    assert len(bomb.seen) - seen == -(-9 // learned(session.step))  # no further probes


class Wandering(torch.optim.SGD):
    """Adds noise to every step, as an optimizer that samples weights does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move, and add noise."""
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


def test_probing_draws_no_numbers_of_an_optimizer_that_does() -> None:
    """The state to come is seen on a twin, whose step is not the training's: the update is that of a given size."""
    found: list[list[Tensor]] = []
    size: Any = "auto"
    for _ in range(2):
        seed()
        model = PLAIN.model()
        step = BigStep(model, Wandering(trained(model), lr=0.1), PLAIN.loss, micro_batch_size=size)
        step(PLAIN.batch(6, 0))
        found.append([*weights(model), torch.rand(3)])
        size = learned(step) if size == "auto" else size
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Nothing is held.


class Hoarder(torch.nn.Module):
    """Keeps weak references to what it computes, and the error with which it fails for more than a few samples."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.body, self.fits = mlp()(), fits
        self.made: list[weakref.ref[Tensor]] = []
        self.alive_at_retry: list[int] = []
        self.kept: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Fail where there are too many."""
        self.alive_at_retry.append(sum(ref() is not None for ref in self.made))
        hidden = self.body(x).exp()
        self.made.append(weakref.ref(hidden))
        try:
            if len(x) > self.fits:
                raise torch.OutOfMemoryError
        except RuntimeError as error:
            self.kept = error
            raise
        return hidden


@pytest.mark.parametrize("fits", [0, 2])
def test_failed_activations_are_freed(fits: int) -> None:
    """Before the window is run again; where that ends in an error, the user has the memory, and the lines of code."""
    model = Hoarder(fits)
    options = Options(check=False)
    step = BigStep(model, sgd(trained(model)), lambda m, b: m(b["x"]).mean(), micro_batch_size=8, options=options)
    if fits:
        step(rows(8, 0))
        assert model.alive_at_retry == [0] * 6  # 8, 4, and four times 2
        return
    with pytest.raises(OutOfMemory) as caught:
        step(rows(4, 0))
    assert not any(ref() is not None for ref in model.made)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("loss", LOSSES)
def test_check_and_counting_hold_one_graph_at_a_time(loss: str) -> None:
    """Neither the parts of the check nor the micro-batches of the pass of counting are alive together."""
    gc.collect()
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    model = mlp()()

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        out = m(batch["x"])
        made.append(weakref.ref(out))
        value = F.cross_entropy(out, batch["partly"])
        return value if loss == "one count" else value + F.mse_loss(out, batch["value"])

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
    gc.disable()
    try:
        step(rows(6, 0))
        step(rows(6, 0))
    finally:
        gc.enable()
    # A window that is found to have several counts is given up by an error, which holds the loss it was about.
    assert max(alive) <= (0 if loss == "one count" else 1), alive


# No step is made twice.


class Heavy(Tensor):
    """A tensor that cannot be joined: it would not fit."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be joined."""
        if func is torch.cat:
            raise torch.OutOfMemoryError
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_extras_that_do_not_fit_cost_no_update() -> None:
    """They are joined before the step; where that fails with every size, nothing was changed."""
    model = mlp()()
    before = weights(model)

    def loss_fn(m: Any, batch: Batch) -> Any:
        out = m(batch["x"])
        return out.pow(2).mean(), out.detach().as_subclass(Heavy)

    with pytest.raises(OutOfMemory):
        BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4)(rows(8, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


class Greedy(torch.optim.SGD):
    """Runs out of memory when it has changed some parameters."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        """Change one parameter, then fail."""
        del closure
        self.steps += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("Tried to allocate 3.00 MiB.")


def failing(epoch: int) -> float:
    """Run out of memory when it is asked for the rate after an update."""
    if epoch:
        raise MemoryError
    return 1.0


def test_a_step_that_has_begun_is_not_made_again() -> None:
    """Where it fails halfway nothing can be promised, and the error says so; where the scheduler fails, it was made."""
    model, twin = PLAIN.model(), PLAIN.model()
    optimizer = Greedy(trained(model), lr=0.1)
    step = BigStep(model, optimizer, PLAIN.loss, micro_batch_size=2)
    with pytest.raises(OutOfMemory, match=r"(?s)the optimizer's own step; .*3.00 MiB.*load both from a checkpoint"):
        step(PLAIN.batch(4, 0))
    assert optimizer.steps == 1
    assert all(p.grad is None for p in trained(model))
    assert step.state_dict()["sizes"] == {}

    model = PLAIN.model()
    plain = sgd(trained(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, failing)
    with pytest.raises(OutOfMemory):
        BigStep(model, plain, PLAIN.loss, micro_batch_size=2, scheduler=scheduler)(PLAIN.batch(4, 0))
    BigStep(twin, sgd(trained(twin)), PLAIN.loss, micro_batch_size=2)(PLAIN.batch(4, 0))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


def test_a_hook_that_runs_out_of_memory_is_survived() -> None:
    """Nothing was stepped yet; also after a sample that is alone, and had nothing to do with it."""
    failures = list[BaseException]()

    def hook() -> None:
        if failures:
            raise failures.pop()

    model, twin = PLAIN.model(), PLAIN.model()
    steps = BigStep(model, sgd(trained(model)), PLAIN.loss, micro_batch_size=4), packing(only_up_to(9, 24))
    for step, batch in zip(steps, (PLAIN.batch(4, 0), padded([12, 12, 6, 6, 6, 6, 3])), strict=True):
        failures.append(MemoryError())
        step.before_step(hook)
        assert step(batch).micro_batches > 1
    BigStep(twin, sgd(trained(twin)), PLAIN.loss, micro_batch_size=2)(PLAIN.batch(4, 0))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


# Packed micro-batches.


@pytest.mark.parametrize(
    ("lengths", "fits", "budget", "made"),
    [
        *(([6, 2, 1, 2, 1, 2], 0, budget, 0) for budget in (4, 14, "auto")),  # no budget helps: the longest is named
        ([24, *[3] * 8], 4, 24, 3),  # one is alone, whatever the budget, and stands for none
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_packed_micro_batches_shrink_until_they_fit(
    *, lengths: list[int], fits: int, budget: Any, made: int, check: bool
) -> None:
    """Or end in an error: a sample longer than the budget must not make it grow again."""
    step = packing(only_up_to(fits, 24), budget, check=check)
    if made:
        assert step(padded(lengths)).micro_batches == made
        assert learned(step) == 12
    else:
        with pytest.raises((OutOfMemory, ConfigurationError), match=r"one sample (of length 6|does not fit)"):
            step(padded(lengths))


def test_packed_micro_batches_shrink_and_are_exact() -> None:
    """Half the tokens, until they fit; the update is the big batch's."""
    model, twin, sizes = mlp()(), mlp()(), list[int]()
    batch = sequences(8, 3)
    batch = {"x": batch["x"] * batch["mask"][..., None], "mask": batch["mask"]}

    def loss_fn(m: Any, part: Batch) -> Tensor:
        sizes.append(len(part["x"]))
        return only_up_to(2, 24)(m, part)

    step = BigStep(model, sgd(trained(model)), loss_fn, options=Options(lengths="mask", token_budget=48, check=False))
    optimizer = sgd(trained(twin))
    for _ in range(2):
        sizes.clear()
        step(batch)
        optimizer.zero_grad()
        only_up_to(9, 24)(twin, batch).backward()
        optimizer.step()
    assert max(sizes) == 2  # none failed in the second step
    assert distance(weights(model), weights(twin)) <= 1e-12


def only_up_to(samples: int, length: int) -> Any:
    """A loss that does not fit with more samples, or longer ones."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        if len(batch["x"]) > samples or batch["x"].shape[1] > length:
            raise torch.OutOfMemoryError
        loss: Tensor = model(batch["x"])[batch["mask"]].mean()
        return loss

    return loss_fn


def packing(loss_fn: Any, budget: Any = 24, **options: Any) -> BigStep:
    """A step that packs."""
    model = mlp()()
    options = {"lengths": "mask", **options}
    return BigStep(model, sgd(trained(model)), loss_fn, options=Options(token_budget=budget, **options))


def padded(lengths: list[int]) -> Batch:
    """Sequences of these lengths."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"x": torch.ones(*mask.shape, 3, dtype=torch.float64) * mask[..., None], "mask": mask}


def test_a_sample_that_fails_alone_does_not_make_the_others_smaller() -> None:
    """No budget helps it, so it is said at once, and nothing is learned."""
    fits = [24]

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        loss: Tensor = only_up_to(9, fits[-1])(m, batch)
        return loss

    step = packing(loss_fn)
    assert step(padded([24, *[3] * 8])).micro_batches == 2  # and what is looked at once was
    fits.append(23)
    with pytest.raises(OutOfMemory, match="one sample of length 24 at a time"):
        step(padded([24, *[3] * 8]))
    assert step.state_dict()["sizes"] == {}
    assert step(padded([3] * 16)).micro_batches == 2


@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory_while_packing_is_survived_once(times: int) -> None:
    """Lengths that are computed on a full device: once more, after all that can be has been freed."""
    failures = [MemoryError("alone") for _ in range(times)]

    def lengths(batch: Batch) -> Tensor:
        if failures:
            raise failures.pop()
        return batch["mask"].sum(1)

    step = packing(only_up_to(9, 24), lengths=lengths)
    if times == 1:
        assert step(padded([12, 12, 6, 6, 6, 6, 3])).micro_batches
    else:
        with pytest.raises(MemoryError, match="alone"):
            step(padded([12, 12, 6, 6, 6, 6, 3]))
