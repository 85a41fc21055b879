"""A big batch through `BigStep` is that batch in one piece: weights, optimizer state, loss and norm, in float64."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch import Accumulator, BigStep, Options, counted
from bigbatch.batch.split import balanced
from bigbatch.errors import (
    BatchError,
    BigBatchError,
    ConfigurationError,
    LossError,
    SeveralCounts,
    StateError,
    WindowDisturbed,
)
from bigbatch.options import checked_size
from tests.support.batches import (
    STRUCTURES,
    Structure,
    batch_sizes,
    cuttable,
    micro_batch_sizes,
    samples_of,
    structures,
)
from tests.support.losses import EITHER, SEVERAL
from tests.support.reference import (
    Run,
    assert_equal,
    big_batches,
    distance,
    sgd,
    state,
    taken_down,
    trained,
    weights,
)
from tests.support.samples import Batch, Loss, mlp, normal, rows, sequences
from tests.support.samples import generator as seeded_generator
from tests.support.strategies import OPTIMIZERS, clip_norms, optimizers, seeds
from tests.support.training import MASKED, PLAIN

pytestmark = pytest.mark.filterwarnings(
    "ignore:reduction.*divides the total loss:UserWarning"
)  # kl_div(reduction="mean")
PLAINLY = STRUCTURES[0]


def big_steps(
    case: Loss,
    batches: Sequence[Batch],
    size: int,
    structure: Structure = PLAINLY,
    *,
    optimizer: str = "sgd",
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> Run:
    """Train on each batch as one update, in micro-batches of a size."""
    model = case.model()
    updater = OPTIMIZERS[optimizer](trained(model))
    step = BigStep(
        model,
        updater,
        structure.loss(case),
        micro_batch_size=size,
        clip_norm=clip_norm,
        scaler=scaler,
        options=Options(**options),
    )
    run = Run([], [], [], [], [], [])
    before = weights(model)
    for batch in batches:
        update = step(structure.wrap(batch))
        assert all(p.grad is None for p in trained(model))
        if update.skipped:
            continue
        assert update.micro_batches == math.ceil(samples_of(batch) / size)
        before = taken_down(run, update, before, model, case)
    run.weights.extend(before)
    run.state.extend(state(updater))
    return run


def bounded(run: Run) -> bool:
    """Whether training did not diverge, where rounding grows from update to update."""
    return all(bool(w.isfinite().all()) and float(w.abs().max()) < 20 for w in run.weights if w.numel())


@given(
    case=cuttable,
    structure=structures,
    sizes=batch_sizes,
    size=micro_batch_sizes,
    optimizer=optimizers,
    clip_norm=clip_norms,
    scaled=st.booleans(),
    seed=seeds,
)
@settings(max_examples=100)
def test_any_batch_in_any_split_is_exact(
    *,
    case: Loss,
    structure: Structure,
    sizes: list[int],
    size: int,
    optimizer: str,
    clip_norm: float | None,
    scaled: bool,
    seed: int,
) -> None:
    """Any loss, container, micro-batch size, optimizer and clipping, over several updates, scaled or not."""
    assume(structure.name != "company" or sizes[0] > 1)  # rows of one sample and rows for all look alike at first
    batches = case.micro_batches(sizes, seed)
    true = big_batches(case, batches, 1, optimizer=OPTIMIZERS[optimizer], clip_norm=clip_norm)
    assume(bounded(true))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled and "fused" not in optimizer else None
    ours = big_steps(case, batches, size, structure, optimizer=optimizer, clip_norm=clip_norm, scaler=scaler)
    assert_equal(ours, true)


@given(st.sampled_from(EITHER), st.lists(st.integers(2, 9), min_size=1, max_size=2), micro_batch_sizes, seeds)
@settings(max_examples=40)
def test_a_tempting_loss_is_exact_or_refused(case: Loss, sizes: list[int], size: int, seed: int) -> None:
    """The losses that may go either way go one of the two, and the check finds what even micro-batches hide."""
    batches = case.micro_batches(sizes, seed)
    try:
        ours = big_steps(case, batches, size)
    except LossError:
        return
    assert_equal(ours, big_batches(case, batches, 1, optimizer=OPTIMIZERS["sgd"]))


# Update for update the accumulator's.


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """The samples of a batch as `BigStep` cuts them."""
    parts = balanced(samples_of(batch), size)
    columns = {name: leaf.split(parts) for name, leaf in batch.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(parts))]


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float64, None], ids=str)
def test_bf16_parameters_add_up_as_an_accumulators_do(gradient_dtype: torch.dtype | None) -> None:
    """Bit for bit, in each of the dtypes."""
    batch = {name: leaf.bfloat16() if leaf.is_floating_point() else leaf for name, leaf in PLAIN.batch(9, 0).items()}
    ours, theirs = PLAIN.model().bfloat16(), PLAIN.model().bfloat16()

    def loss_fn(model: Any, part: Batch) -> Tensor:
        return F.mse_loss(model(part["x"]).float(), part["value"].float())

    options = Options(gradient_dtype=gradient_dtype)
    BigStep(ours, sgd(trained(ours)), loss_fn, micro_batch_size=2, options=options)(batch)
    accumulator = Accumulator(theirs, sgd(trained(theirs)), steps=5, gradient_dtype=gradient_dtype)
    for part in accumulator.over(micro_batches(batch, 2)):
        accumulator.backward(loss_fn(theirs, part))
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(theirs), strict=True))
    assert not torch.equal(weights(ours)[0], weights(PLAIN.model().bfloat16())[0])


# Several counts, without help.


def term(name: str) -> Any:
    """One mean or sum of a loss, by its name."""
    return {
        "masked": lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["labels"].flatten()),
        "mean": lambda m, b: F.mse_loss(m(b["x"]), b["value"]),
        "sum": lambda m, b: m(b["x"]).abs().sum(),
        "selected": lambda m, b: m(b["x"])[b["mask"]].pow(2).mean(),
        "counted": lambda m, b: counted(m(b["x"]).sigmoid().sum() / b["lengths"].sum(), b["lengths"].sum()),
        "once": lambda m, _: 0.1 * m[0].weight.pow(2).sum(),
        "counted-once": lambda m, _: counted(m[2].bias.exp().sum(), "once"),
        "counted-sum": lambda m, b: counted(m(b["x"]).tanh().sum(), "sum"),
    }[name]


TERMS = ("masked", "mean", "sum", "selected", "counted", "once", "counted-once", "counted-sum")


@given(
    st.lists(st.tuples(st.sampled_from(TERMS), st.sampled_from([1.0, 0.3, -0.2, 2.0])), min_size=2, max_size=4),
    batch_sizes,
    micro_batch_sizes,
    seeds,
)
@example([("masked", 1.0), ("mean", 1.0), ("once", 1.0)], [1, 6], 1, 447)
@settings(max_examples=40)
def test_terms_with_counts_of_their_own(terms: list[tuple[str, float]], sizes: list[int], size: int, seed: int) -> None:
    """Any sum of means, sums and regularisers, each over something else."""
    names = [name for name, _ in terms]
    assume(set(names) - {"once", "counted-once"})

    def loss(model: Any, batch: Batch) -> Tensor:
        # A sum over data times a number may hide a count, and is refused.
        found: Any = [
            term(name)(model, batch) * factor if name != "sum" else term(name)(model, batch) for name, factor in terms
        ]
        return sum(found)

    case = Loss(" + ".join(names), mlp(), sequences, loss, told=False)
    batches = case.micro_batches(sizes, seed)
    true = big_batches(case, batches, 1, optimizer=OPTIMIZERS["adamw"], clip_norm=1.0)
    assume(bounded(true))
    assert_equal(big_steps(case, batches, size, optimizer="adamw", clip_norm=1.0), true)


def test_several_counts_are_counted_in_a_pass_of_their_own_from_the_first_that_shows() -> None:
    """Once it is known, no window is begun in vain: two forwards for each micro-batch."""
    case = SEVERAL[0]
    model, calls = case.model(), []

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        calls.append(samples_of(batch))
        return case.loss(m, batch)

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=Options(check=False))
    batch = case.batch(6, 0)
    step(batch)
    calls.clear()
    update = step(batch)
    assert calls == [2] * 6
    assert isinstance(update.count, tuple)


# What else an update does.


def test_what_is_skipped_changes_nothing() -> None:
    """All labels ignored, or a gradient that is not finite; the next update is as if it had not been."""
    model, twin = MASKED.model(), MASKED.model()
    optimizer = sgd(trained(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = Options(skip_nonfinite=True, check=False)
    step = BigStep(model, optimizer, MASKED.loss, micro_batch_size=2, scheduler=scheduler, options=options)
    batch = MASKED.batch(5, 0)
    assert step({**batch, "partly": torch.full_like(batch["partly"], -100)}).skipped
    assert step({**batch, "x": torch.where(torch.arange(5)[:, None] == 0, math.nan, batch["x"])}).skipped
    assert step.gradients({**batch, "partly": torch.full_like(batch["partly"], -100)}).skipped
    assert all(p.grad is None for p in model.parameters())
    remove = step.before_step(lambda: torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None]))
    assert not step.gradients(batch).skipped
    assert not any(p.grad.any() for p in trained(model) if p.grad is not None)  # a hook may change it
    remove()
    optimizer.zero_grad()
    assert scheduler.last_epoch == 0
    assert not step(batch).skipped
    assert scheduler.last_epoch == 1
    MASKED.loss(twin, batch).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_two_models_and_two_optimizers_are_one_window() -> None:
    """One global norm, seen by hooks before it is clipped, until they are removed; no gradient for a third model."""
    models, twins, other = (mlp()(), mlp()()), (mlp()(), mlp()()), mlp()()
    with torch.no_grad():
        for pair in (models, twins):
            next(pair[1].parameters()).mul_(0.5)

    def loss_fn(pair: Any, batch: Batch) -> Tensor:
        return (pair[0](batch["x"]) * pair[1](batch["x2"]) * other(batch["x3"])).pow(2).mean()

    def optimizers(pair: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(pair[0].parameters(), lr=0.1),
            torch.optim.AdamW(pair[1].parameters(), lr=0.1, eps=1e-3),
        ]

    parameters, seen = [p for twin in twins for p in twin.parameters()], list[list[Tensor]]()
    step = BigStep(models, optimizers(models), loss_fn, micro_batch_size=3, clip_norm=0.01)
    remove = step.before_step(
        lambda: seen.append([p.grad.clone() for model in models for p in model.parameters() if p.grad is not None])
    )
    plain = optimizers(twins)
    for n in range(2):
        update = step(rows(7, n))
        remove()
        loss_fn(twins, rows(7, n)).backward()
        if not n:
            assert distance(seen[0], [p.grad for p in parameters if p.grad is not None]) <= 1e-12
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
        assert update.grad_norm is not None
        assert abs(float(update.grad_norm) - float(norm)) <= 1e-12
        assert all(p.grad is None for p in models[0].parameters())
    assert len(seen) == 1
    for mine, true in zip(models, twins, strict=True):
        assert distance(weights(mine), weights(true)) <= 1e-12


# A list of samples.


class Sample(NamedTuple):
    """What a dataset yields: of its own length."""

    tokens: Tensor
    label: Tensor


def padded(samples: list[Sample]) -> Batch:
    """Pad to the longest, as a collate function does."""
    return {
        "x": nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True),
        "mask": nn.utils.rnn.pad_sequence([torch.ones(len(s.tokens)) for s in samples], batch_first=True),
        "label": torch.stack([sample.label for sample in samples]),
    }


def ragged(n: int, seed: int) -> list[Sample]:
    """Samples of 1 to 6 vectors."""
    by = seeded_generator(seed)
    lengths = torch.randint(1, 7, (n,), generator=by).tolist()
    return [Sample(normal(length, 3, by=by), torch.randint(4, (), generator=by)) for length in lengths]


def pooled(model: Any, batch: Batch) -> Tensor:
    """Mean over a sample's own vectors, then over samples."""
    mask = batch["mask"][..., None].double()
    return F.cross_entropy((model(batch["x"]) * mask).sum(1) / mask.sum(1), batch["label"])


@given(st.integers(1, 9), micro_batch_sizes, st.sampled_from([None, 1, 7, 12, 100]), seeds)
@settings(max_examples=25)
def test_a_list_of_samples_with_collate(n: int, size: int, budget: int | None, seed: int) -> None:
    """Each micro-batch is collated by itself, padded as far as it needs; packed by length or as they come."""
    samples = ragged(n, seed)
    model, twin = mlp()(), mlp()()
    packing: dict[str, Any] = (
        {"lengths": lambda b: [len(s.tokens) for s in b], "token_budget": budget} if budget else {}
    )
    step = BigStep(
        model, sgd(trained(model)), pooled, micro_batch_size=size, options=Options(collate=padded, **packing)
    )
    update = step(samples)
    loss = pooled(twin, padded(samples))
    loss.backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert abs(update.loss.item() - loss.item()) <= 1e-12


# Extras.


def test_extras_come_back_in_the_batchs_own_order() -> None:
    """Per sample joined, per micro-batch stacked, what is no tensor in a list; no graph is kept."""
    model = mlp()()
    batch = rows(7, 0)

    def loss_fn(m: Any, part: Batch) -> Any:
        out = m(part["x"])
        return F.mse_loss(out, part["value"]), {"out": out, "mean": out.mean(), "n": len(out), "pair": (out[:, 0], "a")}

    expected = model(batch["x"]).detach()
    extras = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=3)(batch).extras
    assert torch.allclose(extras["out"], expected, rtol=1e-12, atol=1e-14)
    assert extras["mean"].shape == (3,)
    assert extras["n"] == [3, 2, 2]
    assert torch.equal(extras["pair"][0], extras["out"][:, 0])
    assert extras["pair"][1] == ["a", "a", "a"]
    assert not extras["out"].requires_grad


# Misuse.


def step_of(loss_fn: Any = PLAIN.loss, **named: Any) -> BigStep:
    """A step over rows."""
    model = mlp()()
    return BigStep(model, sgd(trained(model)), loss_fn, **{"micro_batch_size": 2, **named})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"micro_batch_size": 0}, 'micro_batch_size must be a positive integer or "auto"; found 0'),
        ({"micro_batch_size": 2.0}, 'micro_batch_size must be a positive integer or "auto"; found 2.0'),
        ({"micro_batch_size": True}, 'micro_batch_size must be a positive integer or "auto"; found True'),
        ({"micro_batch_size": "all"}, "micro_batch_size must be a positive integer or \"auto\"; found 'all'"),
        ({"micro_batch_size": "auto", "options": Options(batch_norm="micro")}, "the result depend on the size"),
        ({"memory": "much"}, "memory='much'"),
        ({"clip_norm": 0}, "clip_norm must be a positive number"),
        ({"options": {"check": False}}, "options must be an Options"),
        ({"scheduler": 3}, "scheduler must be"),
        ({"scaler": 1.0}, "scaler must be"),
        ({"options": Options(cuda_graph=True)}, "needs the model on a CUDA device"),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"found CrossEntropyLoss.*\n.*criterion\(model"),
        ({"loss_fn": lambda m, x, y: m(x) - y}, r"loss; found one that takes \(.*\n.*lambda model, batch"),
        ({"loss_fn": lambda b: b.mean()}, r"loss; found one that takes \(.*\n.*lambda model, batch"),
        ({"loss_fn": lambda m, b, *, scale: m(b) * scale}, r"loss; found one that takes \("),
        ({"lengths": 3}, "lengths must be the name of a mask or a function"),
        ({"token_budget": 8}, "token_budget=8 needs lengths"),
        ({"token_budget": 0, "lengths": "mask"}, "token_budget must be a positive integer"),
        ({"collate": "list"}, "collate must be a function"),
        ({"cuda_graph": 1}, "cuda_graph must be True or False"),
        ({"cuda_graph": True, "lengths": len, "collate": list}, "serves micro-batches whose shapes come again"),
        ({"check": None}, "check must be True or False"),
        ({"batch_norm": "sync"}, "batch_norm must be"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype must be"),
        ({"skip_nonfinite": 1}, "skip_nonfinite must be"),
        ({"mesh": 1}, "mesh= is gone"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], said: str) -> None:
    """Refused when the object is made, and in words that know no accumulator; numpy's numbers work."""
    make: Any = Options if arguments.keys() <= Options.__dataclass_fields__.keys() else step_of
    with pytest.raises(ConfigurationError, match=said) as caught:
        make(**arguments)
    assert "ccumulator" not in str(caught.value)
    assert step_of(micro_batch_size=np.int64(2))(rows(4, 0)).micro_batches == 2


def changing(m: Any, batch: Batch) -> Tensor:
    """Micro-batches have other terms than each other."""
    loss = F.cross_entropy(m(batch["x"]), batch["label"])
    return loss + F.mse_loss(m(batch["x"]), batch["value"]) if len(batch["x"]) == 2 else loss


def rounded(m: Any, batch: Batch) -> Tensor:
    """Two counts in one number of low precision."""
    return F.cross_entropy(m(batch["x"]), batch["partly"]).bfloat16() + m(batch["x"]).square().mean().bfloat16()


def extra(m: Any, batch: Batch) -> Any:
    """Extras have other structures in each micro-batch."""
    out = m(batch["x"])
    return F.mse_loss(out, batch["value"]), out.long() if len(out) == 2 else {"out": out}


@pytest.mark.parametrize(
    ("loss_fn", "kind", "said"),
    [
        (lambda m, b: (m(b["x"]).mean(), 1, 2), ConfigurationError, "Got 3 values"),
        (lambda m, b: m(b["x"]), LossError, "one number, a mean or a sum"),
        (lambda m, b: m(b["x"]).mean().item(), LossError, "a tensor; found float"),
        (lambda m, b: m(b["x"]).detach().mean(), LossError, "no graph"),
        (lambda m, b: m(b["x"]).sum() / 3, LossError, r"return counted\(loss, n\)"),
        (lambda m, b: m(b["x"]).square().mean().sqrt(), LossError, r"return counted\(loss, n\)"),
        (rounded, SeveralCounts, r"a torch\.bfloat16 loss would round them"),
        (changing, LossError, "changes within a batch|changed within a window|another number of terms"),
        (extra, ConfigurationError, r"differ in structure.*Got .*Tensor"),
    ],
)
def test_losses_that_cannot_be(loss_fn: Any, kind: type[Exception], said: str) -> None:
    """Whatever is wrong, the model is as it was; nobody who uses BigStep has an accumulator."""
    model = mlp()()
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=Options(check=False))
    with pytest.raises(kind, match=said) as caught:
        step(rows(5, 0))
    with pytest.raises(BatchError, match="this batch is a tuple"):
        BigStep(model, sgd(trained(model)), micro_batch_size=2)((torch.zeros(4, 3),))
    assert "accumulator" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(mlp()()), strict=True))


class Interfering:
    """A loss_fn that does, with the third micro-batch, what is the library's to do."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, model: Any, x: Tensor) -> Tensor:
        """Interfere."""
        self.calls += 1
        out = model(x)
        if self.what == "counts":  # the pass of counting finds others than the window
            return counted(out.mean(), len(x)) + counted(out.square().mean(), len(x) + self.calls % 3)
        if self.what == "terms":
            first, second = counted(out.mean(), 3 + self.calls % 2), counted(out.square().mean(), len(x))
            return first + second if self.calls < 7 else first
        if self.calls == 3 and self.what == "zero":
            self.optimizer.zero_grad()
        if self.calls == 3 and self.what == "step":
            self.optimizer.step()
        if self.calls == 3 and self.what == "freeze":
            model.bias.requires_grad_(False)
        return F.mse_loss(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("counts", SeveralCounts, "(?s)the counts in advance came to .*it is called twice for the same sam"),
        ("terms", SeveralCounts, "(?s)there are 2 counts in advance, .*a loss_fn with the same terms"),
        ("zero", WindowDisturbed, "(?s)not by this library: 2 were set to None.*a loss_fn that returns the loss"),
        ("step", WindowDisturbed, r"(?s)optimizer.step\(\) was called.*the step is made when all of the batch"),
        ("freeze", WindowDisturbed, "(?s)was frozen inside a window.*Freeze, unfreeze and cast between"),
        ("gradients", WindowDisturbed, r"optimizer\.zero_grad"),
    ],
)
def test_what_others_do_to_a_window_is_noticed(what: str, error: type[BigBatchError], said: str) -> None:
    """Said in words of loss_fn, and all is as before; gradients that were there are not ours to drop."""
    loss_fn = Interfering(what)
    if what == "gradients":
        loss_fn.model.bias.grad = torch.ones(1)
    step = BigStep(loss_fn.model, loss_fn.optimizer, loss_fn, micro_batch_size=2, options=Options(check=False))
    with pytest.raises(error, match=said) as caught:
        step(torch.randn(8, 4))
    for word in ("accumulator", "Accumulator", "counts=", "`over`"):
        assert word not in str(caught.value)
    assert [p.grad is None for p in loss_fn.model.parameters()] == [True, what != "gradients"]


@pytest.mark.parametrize(
    "state_dict",
    [{}, {"version": 2, "sizes": {}}, {"version": 1, "sizes": {"a": 0}}, {"version": 1, "sizes": 3}, None],
    ids=str,
)
def test_states_that_do_not_fit(state_dict: Any) -> None:
    """Refused, with what was found."""
    with pytest.raises(StateError):
        step_of().load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("size", "options"),
    [("auto", Options()), (8, Options(lengths="attention_mask")), (8, Options(cuda_graph=True))],
)
def test_what_shards_cannot_have_is_named(size: Any, options: Options) -> None:
    """With what to type in its place."""
    with pytest.raises(ConfigurationError, match="Use: BigStep"):
        checked_size(size, options, torch.device("cuda"), sharded=True)
    assert checked_size(8, Options(), torch.device("cpu"), sharded=True) == 8


# What samples share, and what is written into.


def test_what_samples_share_stays_shared() -> None:
    """Also where a later batch has as many samples as there are classes; as unlabeled images beside labeled ones."""
    by = torch.Generator().manual_seed(0)
    weight, unlabeled = normal(4, by=by).abs(), normal(56, 3, by=by)
    names = ["a", "b", "c", "d"]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        assert batch["names"] == names
        found = F.cross_entropy(model(batch["x"]), batch["label"], weight=batch["weight"])
        return found + model(batch["unlabeled"]).square().mean()

    model, twin = mlp()(), mlp()()
    step, plain = step_on(model, loss_fn), sgd(trained(twin))
    for n in (7, 4, 1, 4):
        samples = {name: leaf for name, leaf in rows(n, n).items() if name in {"x", "label"}}
        batch = {**samples, "weight": weight, "names": names, "unlabeled": unlabeled}
        step(batch)
        plain.zero_grad()
        loss_fn(twin, batch).backward()
        plain.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def step_on(model: nn.Module, loss_fn: Any, **named: Any) -> BigStep:
    """A step of a model."""
    return BigStep(model, sgd(trained(model)), loss_fn, **(named or {"micro_batch_size": 2}))


def normalizing(samples: list[Any]) -> Batch:
    """Collate samples that it writes into."""
    for sample in samples:
        sample["x"] -= 1
        sample["x"] /= 3
    found: Batch = torch.utils.data.default_collate(samples)
    return found


HOW: list[dict[str, Any]] = [{"memory": 0.9}, {"micro_batch_size": 2}]  # probes run samples twice, or checks


@pytest.mark.parametrize("arguments", HOW, ids=str)
def test_a_batch_changed_in_place_is_refused_where_it_would_be_used_again(arguments: dict[str, Any]) -> None:
    """Views of the batch would be normalised twice; so would samples that `collate` writes into."""

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        batch["x"].sub_(1.0)
        return SEVERAL[0].loss(m, batch)

    model, batch = SEVERAL[0].model(), SEVERAL[0].batch(6, 0)
    before = weights(model)
    with pytest.raises(BatchError, match=r"(?s)changed its batch in place.*or clone"):
        step_on(model, loss_fn, **arguments)(batch)
    samples = [{name: leaf[i] for name, leaf in batch.items()} for i in range(6)]
    with pytest.raises(BatchError, match=r"(?s)collate has changed its samples in place.*or clone"):
        step_on(model, SEVERAL[0].loss, options=Options(collate=normalizing), **arguments)(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("arguments", [*HOW, {"micro_batch_size": 6}], ids=str)
@pytest.mark.parametrize("how", ["one count", "several", "collate"])
def test_arrays_are_a_micro_batchs_own_to_write_into(how: str, arguments: dict[str, Any]) -> None:
    """Probing, checking and counting write into copies: samples are normalised once, as in plain training."""
    case = SEVERAL[0] if how == "several" else PLAIN
    model, twin = case.model(), case.model()

    def loss_fn(m: Any, batch: Any) -> Tensor:
        tensors = {name: torch.as_tensor(leaf) for name, leaf in batch.items()}
        if how != "collate":
            tensors["x"].sub_(1.0).div_(3.0)
        return case.loss(m, tensors)

    whole = {name: leaf.numpy().copy() for name, leaf in case.batch(6, 0).items()}
    samples = [{name: leaf[i] for name, leaf in whole.items()} for i in range(6)]
    options = Options(collate=normalizing if how == "collate" else None)
    step_on(model, loss_fn, options=options, **arguments)(samples if how == "collate" else whole)
    assert all(np.array_equal(whole[name], leaf.numpy()) for name, leaf in case.batch(6, 0).items())
    true = case.batch(6, 0)
    true["x"] = (true["x"] - 1) / 3
    case.loss(twin, true).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_that_is_dropped_is_gone(norm: bool) -> None:
    """Its model, optimizer state and threads wait for no garbage collector, which a loop may have turned off."""
    x = rows(8, 0)["x"]
    model = nn.Sequential(nn.Linear(x.shape[1], 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 2)).to(x)
    step = step_on(model, lambda m, b: F.mse_loss(m(b), m(b).detach() + 1))
    step(x)
    gone = weakref.ref(step)
    gc.collect()
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()


def test_a_warning_points_to_the_line_of_a_script() -> None:
    """It has no package: finding the line to blame must not fail there."""
    mixed = lambda m, b: m(b["x"] + 0.3 * b["x"][torch.randperm(len(b["x"]))]).square().mean()  # noqa: E731
    named = {"__name__": "__main__", "step": step_on(mlp()(), mixed), "batch": rows(8, 0)}
    with pytest.warns(UserWarning, match="cannot be drawn again") as caught:
        exec(compile("step(batch)", "script.py", "exec"), named)  # noqa: S102 - as Python runs it
    assert caught[0].filename == "script.py"


@pytest.mark.parametrize(
    "output", [lambda z: z.squeeze(), lambda z: z.view(-1, 2, 4).diff(dim=1)[:, 0]], ids=["squeezed", "pairs"]
)
def test_a_program_that_cannot_run_one_sample_is_sized(output: Callable[[Tensor], Tensor]) -> None:
    """Sizes are looked for from one sample on; where that fails, from two."""
    model, batch = mlp()(), rows(8, 0)["x"]
    step = BigStep(model, sgd(trained(model)), lambda m, b: F.cross_entropy(z := output(m(b[:, None])), z.argmax(1)))
    assert not step(batch).skipped
