"""A big batch through `BigStep` is that batch in one piece: weights, optimizer state, loss and norm, in float64."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
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
@settings(max_examples=150)
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
@settings(max_examples=60)
def test_a_tempting_loss_is_exact_or_refused(case: Loss, sizes: list[int], size: int, seed: int) -> None:
    """The losses that may go either way go one of the two, and the check finds what even micro-batches hide."""
    batches = case.micro_batches(sizes, seed)
    try:
        ours = big_steps(case, batches, size)
    except LossError:
        return
    assert_equal(ours, big_batches(case, batches, 1, optimizer=OPTIMIZERS["sgd"]))


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_structure(structure: Structure, size: int) -> None:
    """Each container, in single samples, unevenly and whole."""
    batches = MASKED.micro_batches((8, 5))
    assert_equal(
        big_steps(MASKED, batches, size, structure, clip_norm=0.3),
        big_batches(MASKED, batches, 1, optimizer=OPTIMIZERS["sgd"], clip_norm=0.3),
    )


def test_a_single_tensor_and_a_pair() -> None:
    """A batch may be a tensor, or the two of a textbook."""
    x, y = normal(7, 3, by=seeded_generator(0)), normal(7, 4, by=seeded_generator(1))
    for batch in (x, (x, y), [x, y]):
        model, twin = mlp()(), mlp()()

        def loss_fn(m: Any, b: Any) -> Tensor:
            return m(b).pow(2).mean() if isinstance(b, Tensor) else F.mse_loss(m(b[0]), b[1])

        update = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=3)(batch)
        loss = loss_fn(twin, batch)
        loss.backward()
        sgd(trained(twin)).step()
        assert distance(weights(model), weights(twin)) <= 1e-12
        assert abs(update.loss.item() - loss.item()) <= 1e-12


# Update for update the accumulator's.


@pytest.mark.filterwarnings("ignore:this loss looks divided")  # a factor of 0.5 and two steps
@given(
    case=cuttable,
    sizes=batch_sizes,
    size=micro_batch_sizes,
    optimizer=optimizers,
    clip_norm=clip_norms,
    seed=seeds,
)
@settings(max_examples=60)
def test_the_same_as_an_accumulator(
    *, case: Loss, sizes: list[int], size: int, optimizer: str, clip_norm: float | None, seed: int
) -> None:
    """The same samples cut the same way give the same bits, with counts given where there are several."""
    batches = case.micro_batches(sizes, seed)
    ours = big_steps(case, batches, size, optimizer=optimizer, clip_norm=clip_norm)
    model = case.model()
    updater = OPTIMIZERS[optimizer](trained(model))
    accumulator = Accumulator(model, updater, steps=1, clip_norm=clip_norm, counts=case.counts)
    for batch in batches:
        cut = micro_batches(batch, size)
        accumulator.steps = len(cut)
        for micro_batch in accumulator.over(cut):
            accumulator.backward(case.loss(model, micro_batch))
    same = all(torch.equal(a, b) for a, b in zip(ours.weights, weights(model), strict=True))
    # A second term may be weighed on its way or at the end, which rounds differently.
    assert same or (case.counts is not None and distance(ours.weights, weights(model)) <= 1e-12)
    assert distance(ours.state, state(updater), 1e-2) <= 1e-12


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
@settings(max_examples=60)
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


def test_a_term_that_only_some_micro_batches_have_is_refused() -> None:
    """The error says that a big batch has one loss."""
    model = mlp()()

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        loss = F.cross_entropy(m(batch["x"]), batch["partly"])
        return loss + F.mse_loss(m(batch["x"]), batch["value"]) if float(batch["scalar"][0]) > 0 else loss

    batch = rows(6, 0)
    batch["scalar"] = torch.tensor([1.0, 1, 1, 1, -1, -1])
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2, options=Options(check=False))
    with pytest.raises(LossError, match=r"changes within a batch|changed within a window|another number of terms"):
        step(batch)


def test_counts_that_cannot_be_weighed_apart_are_refused() -> None:
    """What no pass of counting helps is told as it is, and nothing was changed."""
    case = next(each for each in SEVERAL if each.name == "masked+mean")
    model = case.model().bfloat16()
    batch = {name: leaf.bfloat16() if leaf.is_floating_point() else leaf for name, leaf in case.batch(5, 0).items()}
    before = weights(model)
    with pytest.raises(SeveralCounts, match=r"a torch\.bfloat16 loss would round them"):
        BigStep(model, sgd(trained(model)), case.loss, micro_batch_size=2)(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert all(p.grad is None for p in trained(model))


# What else an update does.


def test_a_scheduler_steps_once_per_update() -> None:
    """The learning rates are those of plain training."""
    model = PLAIN.model()
    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = BigStep(model, optimizer, PLAIN.loss, micro_batch_size=2, scheduler=scheduler)
    rates = []
    for batch in PLAIN.micro_batches((5, 3, 4)):
        rates.append(optimizer.param_groups[0]["lr"])
        step(batch)
    assert [*rates, optimizer.param_groups[0]["lr"]] == [1.0, 0.5, 0.25, 0.125]


def test_two_models_and_two_optimizers_are_one_window() -> None:
    """One global norm, and no gradient for a third model."""
    models, twins, other = (mlp()(), mlp()()), (mlp()(), mlp()()), mlp()()
    with torch.no_grad():
        for pair in (models, twins):
            next(pair[1].parameters()).mul_(0.5)

    def loss_fn(pair: Any, batch: Batch) -> Tensor:
        return (pair[0](batch["x"]) * pair[1](batch["x2"]) * other(batch["x3"])).pow(2).mean()

    batch = rows(7, 0)
    ours = [
        torch.optim.SGD(models[0].parameters(), lr=0.1),
        torch.optim.AdamW(models[1].parameters(), lr=0.1, eps=1e-3),
    ]
    update = BigStep(models, ours, loss_fn, micro_batch_size=3, clip_norm=0.01)(batch)
    loss_fn(twins, batch).backward()
    parameters = [p for twin in twins for p in twin.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    torch.optim.SGD(twins[0].parameters(), lr=0.1).step()
    torch.optim.AdamW(twins[1].parameters(), lr=0.1, eps=1e-3).step()
    for mine, true in zip(models, twins, strict=True):
        assert distance(weights(mine), weights(true)) <= 1e-12
    assert update.grad_norm is not None
    assert abs(float(update.grad_norm) - float(norm)) <= 1e-12
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in models[0].parameters())


def test_a_foreign_model_keeps_no_gradient() -> None:
    """Neither the window nor the probing for a size adds to parameters that are not the optimizer's."""
    model, other = mlp()(), mlp()()
    step = BigStep(model, sgd(trained(model)), lambda m, b: (m(b["x"]) - other(b["x2"])).pow(2).mean(), memory=0.9)
    step(rows(6, 0))
    assert all(p.grad is None for p in other.parameters())


def test_hooks_see_the_big_batchs_gradient() -> None:
    """Corrected, not yet clipped; and removed when asked."""
    model, twin = MASKED.model(), MASKED.model()
    batch = MASKED.batch(7, 0)
    step = BigStep(model, sgd(trained(model)), MASKED.loss, micro_batch_size=2, clip_norm=1e-3)
    seen: list[list[Tensor]] = []
    remove = step.before_step(lambda: seen.append([p.grad.clone() for p in trained(model) if p.grad is not None]))
    step(batch)
    remove()
    step(batch)
    MASKED.loss(twin, batch).backward()
    assert len(seen) == 1
    assert distance(seen[0], [p.grad for p in trained(twin) if p.grad is not None]) <= 1e-12


def test_a_window_without_anything_to_count_is_skipped() -> None:
    """All labels ignored: no update, and the next one is as if it had not been."""
    model = MASKED.model()
    batch = MASKED.batch(5, 0)
    step = BigStep(model, sgd(trained(model)), MASKED.loss, micro_batch_size=2)
    before = weights(model)
    assert step({**batch, "partly": torch.full_like(batch["partly"], -100)}).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert not step(batch).skipped


def test_a_nonfinite_gradient_is_skipped_where_asked() -> None:
    """The optimizer is left alone, and the update says so."""
    model = PLAIN.model()
    batch = PLAIN.batch(5, 0)
    step = BigStep(model, sgd(trained(model)), PLAIN.loss, micro_batch_size=2, options=Options(skip_nonfinite=True))
    before = weights(model)
    assert step({**batch, "x": torch.where(torch.arange(5)[:, None] == 4, math.inf, batch["x"])}).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


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
@settings(max_examples=40)
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


def test_collate_that_pads_what_the_loss_counts_is_refused() -> None:
    """How far a sample is padded would depend on its micro-batch."""
    samples = sorted(ragged(9, 1), key=lambda sample: len(sample.tokens))
    for options in (Options(collate=padded), Options(collate=padded, lengths=lambda b: [len(s.tokens) for s in b])):
        model = mlp()()
        step = BigStep(
            model, sgd(trained(model)), lambda m, b: m(b["x"]).pow(2).mean(), micro_batch_size=3, options=options
        )
        if options.lengths is not None:
            step = BigStep(
                model,
                sgd(trained(model)),
                lambda m, b: m(b["x"]).pow(2).mean(),
                options=Options(collate=padded, lengths=options.lengths, token_budget=6),
            )
        with pytest.raises(BigBatchError, match=r"padding that the loss counts|this loss counts padding"):
            step(samples)


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


def test_extras_may_be_what_a_hugging_face_model_returns() -> None:
    """A ModelOutput, with its Nones."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    model = mlp()()
    batch = rows(5, 0)

    def loss_fn(m: Any, part: Batch) -> Any:
        output = SequenceClassifierOutput(loss=F.mse_loss(m(part["x"]), part["value"]), logits=m(part["x"]))
        return output.loss, output

    expected = model(batch["x"]).detach()
    extras = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)(batch).extras
    assert torch.allclose(extras.logits, expected, rtol=1e-12, atol=1e-14)
    assert extras.loss.shape == (3,)


def test_extras_that_change_their_structure_change_nothing_else() -> None:
    """They are joined before the step: whatever is wrong with them, the model is as it was."""
    model = mlp()()
    before = weights(model)

    def loss_fn(m: Any, part: Batch) -> Any:
        out = m(part["x"])
        return F.mse_loss(out, part["value"]), out.long() if len(out) == 2 else {"out": out}

    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=3)
    with pytest.raises(ConfigurationError, match=r"differ in structure.*Got Tensor, dict"):
        step(rows(5, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


# Misuse.


def step_of(**options: Any) -> BigStep:
    """A step over rows."""
    model = mlp()()
    arguments = {"micro_batch_size": 2, **options}
    return BigStep(model, sgd(trained(model)), PLAIN.loss, **arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(0, 3), "value": torch.zeros(0, 4)}, "this batch is empty"),
        (
            {"x": torch.zeros(4, 3), "value": torch.zeros(5, 4)},
            r"4 and 5 rows are found equally often\. Got batch\['x'\]",
        ),
        ({"x": 3, "value": "text"}, r"no tensor with samples.*dict of int, str"),
        ((), "no tensor with samples"),
        (None, "no tensor with samples"),
        ({}, "no tensor with samples"),
        (torch.tensor(3.0), "no tensor with samples"),
        (["a", "b"], "no tensor with samples"),
        (iter([torch.zeros(3)]), "no tensor with samples"),
        (nn.utils.rnn.pack_sequence([torch.zeros(2), torch.zeros(1)]), "(?s)PackedSequence.*pack_padded_sequence"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    """Each with its reason, and what to do."""
    with pytest.raises(BatchError, match=message):
        step_of()(batch)


def test_collate_takes_lists_of_samples() -> None:
    """A batch that is collated already, and an empty list."""
    step = step_of(options=Options(collate=padded))
    with pytest.raises(BatchError, match=r"(?s)Got dict of Tensor.*collate_fn=list"):
        step({"x": torch.zeros(4, 3)})
    with pytest.raises(BatchError, match="this batch is empty"):
        step([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 0}, 'positive integer or "auto"; found 0'),
        ({"micro_batch_size": 2.0}, 'positive integer or "auto"; found 2.0'),
        ({"micro_batch_size": True}, 'positive integer or "auto"; found True'),
        ({"micro_batch_size": "all"}, "positive integer or \"auto\"; found 'all'"),
        ({"memory": "much"}, "memory='much'"),
        ({"memory": -1}, "memory=-1"),
        ({"clip_norm": 0}, "clip_norm must be a positive number"),
        ({"options": {"check": False}}, "options must be an Options"),
        ({"scheduler": 3}, "scheduler must be"),
        ({"scaler": 1.0}, "scaler must be"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    """Refused when the object is made."""
    with pytest.raises(ConfigurationError, match=message):
        step_of(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": 3}, "lengths must be the name of a mask or a function"),
        ({"token_budget": 8}, "token_budget=8 needs lengths"),
        ({"token_budget": 0, "lengths": "mask"}, "token_budget must be a positive integer"),
        ({"collate": "list"}, "collate must be a function"),
        ({"cuda_graph": 1}, "cuda_graph must be True or False"),
        ({"check": None}, "check must be True or False"),
        ({"batch_norm": "sync"}, "batch_norm must be"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype must be"),
        ({"skip_nonfinite": 1}, "skip_nonfinite must be"),
    ],
)
def test_options_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    """Refused where they are written."""
    with pytest.raises(ConfigurationError, match=message):
        Options(**arguments)


def test_losses_that_cannot_be() -> None:
    """A criterion, a tuple of three, an output, a tensor of several numbers, no mapping without loss_fn."""
    model = mlp()()
    with pytest.raises(ConfigurationError, match=r"found CrossEntropyLoss.*\n.*criterion\(model"):
        BigStep(model, sgd(trained(model)), nn.CrossEntropyLoss())
    misshapen: list[Any] = [lambda m, x, y: m(x) - y, lambda b: model(b).mean(), lambda m, b, *, scale: m(b) * scale]
    for each in misshapen:
        with pytest.raises(ConfigurationError, match=r"loss; found one that takes \(.*\n.*lambda model, batch"):
            BigStep(model, sgd(trained(model)), each)
    returned: list[tuple[Any, type[Exception], str]] = [
        (lambda m, b: (m(b["x"]).mean(), 1, 2), ConfigurationError, "Got 3 values"),
        (lambda m, b: m(b["x"]), LossError, "one number, a mean or a sum"),
        (lambda m, b: m(b["x"]).mean().item(), LossError, "a tensor; found float"),
        (lambda m, b: m(b["x"]).detach().mean(), LossError, "no graph"),
        (None, BatchError, "this batch is a tuple"),
    ]
    for loss_fn, kind, message in returned:
        step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2)
        with pytest.raises(kind, match=message):
            step(rows(4, 0) if loss_fn is not None else (torch.zeros(4, 3),))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(mlp()()), strict=True))


def test_gradients_left_by_others_are_refused_and_kept() -> None:
    """They are not ours to drop."""
    model = PLAIN.model()
    PLAIN.loss(model, PLAIN.batch(2, 0)).backward()
    kept = [p.grad for p in trained(model)]
    with pytest.raises(WindowDisturbed, match=r"optimizer\.zero_grad"):
        BigStep(model, sgd(trained(model)), PLAIN.loss, micro_batch_size=2)(PLAIN.batch(4, 0))
    assert all(p.grad is g for p, g in zip(trained(model), kept, strict=True))


@pytest.mark.parametrize(
    "state_dict", [{}, {"version": 2, "sizes": {}}, {"version": 1, "sizes": {"a": 0}}, {"version": 1, "sizes": 3}, None]
)
def test_states_that_do_not_fit(state_dict: Any) -> None:
    """Refused, with what was found."""
    with pytest.raises(StateError):
        step_of().load_state_dict(state_dict)


def test_a_size_found_on_a_small_batch_is_found_again_on_a_large_one() -> None:
    """A first batch of two samples says nothing about one of sixty-four; one that is little larger costs no probes."""
    model, calls = PLAIN.model(), []

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        calls.append(samples_of(batch))
        return PLAIN.loss(m, batch)

    step = BigStep(model, sgd(trained(model)), loss_fn, options=Options(check=False))
    step(PLAIN.batch(2, 0))
    resumed = BigStep(model, sgd(trained(model)), loss_fn)
    resumed.load_state_dict(step.state_dict())
    for each in (resumed, step):
        calls.clear()
        each(PLAIN.batch(64, 0))
        assert max(calls) > 2
    calls.clear()
    update = step(PLAIN.batch(100, 0))
    assert len(calls) == update.micro_batches


def test_a_given_size_is_never_exceeded_by_a_remembered_one() -> None:
    """Sizes that were learned with more memory do not overrule the user's word."""
    wide = step_of(micro_batch_size=6)
    wide.load_state_dict({"version": 1, "sizes": {(wide_signature := _signature(PLAIN.batch(6, 0))): 6}})
    narrow = step_of(micro_batch_size=2)
    narrow.load_state_dict(wide.state_dict())
    assert wide_signature in narrow.state_dict()["sizes"]
    assert narrow(PLAIN.batch(6, 0)).micro_batches == 3


def _signature(batch: Batch) -> str:
    from bigbatch.batch.batch import Batch as Cut

    return str(Cut.of(batch).signature())


# Shared tensors.


def test_a_later_batch_as_large_as_a_shared_tensor() -> None:
    """What was shared stays so: the last batch of an epoch may have as many samples as there are classes."""
    weight = torch.tensor([0.3, 1.7, 0.9, 2.4], dtype=torch.float64)
    names = ["a", "b", "c", "d"]

    def loss_fn(model: Any, batch: Any) -> Tensor:
        assert batch["names"] == names
        return F.cross_entropy(model(batch["x"]), batch["label"], weight=batch["weight"])

    model, twin = mlp()(), mlp()()
    step, plain = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=2), sgd(trained(twin))
    for n in (7, 4, 1, 4):
        batch = {
            **{name: leaf for name, leaf in rows(n, n).items() if name in {"x", "label"}},
            "weight": weight,
            "names": names,
        }
        step(batch)
        plain.zero_grad()
        loss_fn(twin, batch).backward()
        plain.step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_a_batch_of_another_kind() -> None:
    """What one kind of batch shares says nothing about the next kind."""
    model = mlp()()
    step = BigStep(
        model, sgd(trained(model)), lambda m, b: m(b[0] if b[0] is not None else b[1]).pow(2).mean(), micro_batch_size=2
    )
    x = normal(6, 3, by=seeded_generator(0))
    assert step((x, torch.zeros(4), x)).micro_batches == 3
    assert step((None, x)).micro_batches == 3


@pytest.mark.parametrize("arguments", [{"memory": 0.9}, {"micro_batch_size": 2}], ids=["probes", "counts"])
def test_a_batch_changed_in_place_is_refused_where_it_would_be_used_again(arguments: dict[str, Any]) -> None:
    """Probing, counting in advance and trying again run samples twice; views of the batch would be normalised twice."""
    case = SEVERAL[0]
    model = case.model()
    before = weights(model)

    def loss_fn(m: Any, batch: Batch) -> Tensor:
        batch["x"].sub_(1.0)
        return case.loss(m, batch)

    with pytest.raises(BatchError, match=r"(?s)changed its batch in place.*or clone"):
        BigStep(model, sgd(trained(model)), loss_fn, **arguments)(case.batch(6, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("arguments", [{"memory": 0.9}, {"micro_batch_size": 2}, {"micro_batch_size": 6}], ids=str)
@pytest.mark.parametrize("case", [PLAIN, SEVERAL[0]], ids=["one count", "several"])
def test_arrays_that_loss_fn_writes_into(case: Loss, arguments: dict[str, Any]) -> None:
    """Probing, checking and counting write into copies: samples are normalised once, as in plain training."""
    model, twin = case.model(), case.model()

    def loss_fn(m: Any, batch: Any) -> Tensor:
        tensors = {name: torch.as_tensor(leaf) for name, leaf in batch.items()}
        tensors["x"].sub_(1.0).div_(3.0)
        return case.loss(m, tensors)

    arrays = {name: leaf.numpy().copy() for name, leaf in case.batch(6, 0).items()}
    BigStep(model, sgd(trained(model)), loss_fn, **arguments)(arrays)
    loss_fn(twin, case.batch(6, 0)).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12
    assert all(np.array_equal(arrays[name], leaf.numpy()) for name, leaf in case.batch(6, 0).items())


@pytest.mark.parametrize("arguments", [{"memory": 0.9}, {"micro_batch_size": 2}], ids=["probes", "checks"])
@pytest.mark.parametrize("how", ["tensors", "arrays", "entries"])
def test_collate_that_changes_its_samples(how: str, arguments: dict[str, Any]) -> None:
    """Tensors that it has written into are refused, and not called coupled; all else is its own to change."""

    def samples() -> list[Any]:
        batch = PLAIN.batch(6, 0)
        return [
            {name: leaf[i].numpy() if how == "arrays" else leaf[i] for name, leaf in batch.items()} for i in range(6)
        ]

    def collate(chosen: list[Any]) -> Batch:
        for sample in chosen:
            if how == "entries":
                sample["x"] = (sample["x"] - 1) / 3
            else:
                sample["x"] -= 1
                sample["x"] /= 3
        found: Batch = torch.utils.data.default_collate(chosen)
        return found

    model, twin = PLAIN.model(), PLAIN.model()
    before = weights(model)
    step = BigStep(model, sgd(trained(model)), PLAIN.loss, options=Options(collate=collate), **arguments)
    if how == "tensors":
        with pytest.raises(BatchError, match=r"(?s)collate has changed its samples in place.*or clone"):
            step(samples())
        assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
        return
    step(samples())
    PLAIN.loss(twin, collate(samples())).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


def test_rows_of_every_sample_go_into_every_micro_batch() -> None:
    """As unlabeled images beside labeled ones."""
    by = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(8, 3, dtype=torch.float64, generator=by),
        "label": torch.randint(4, (8,), generator=by),
        "unlabeled": torch.randn(56, 3, dtype=torch.float64, generator=by),
    }

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["label"]) + model(batch["unlabeled"]).square().mean()

    model, twin = mlp()(), mlp()()
    step, optimizer = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4), sgd(trained(twin))
    step(batch)
    loss_fn(twin, batch).backward()
    optimizer.step()
    assert distance(weights(model), weights(twin)) <= 1e-12
