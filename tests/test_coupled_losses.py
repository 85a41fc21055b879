"""Losses that couple the samples of a batch: in a `BigStep` each is the big batch's, whatever the split.

The losses are those of examples/coupled. Called plainly on a whole batch, a `loss_fn` is its own reference; that it is
the textbook's loss is tested beside it, in formulas that hold all pairs at once.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator, BigStep, Options, across, counted
from bigbatch.batch.tree import mapped
from bigbatch.errors import ConfigurationError, CoupledLoss, LossError, PathsDiffer
from examples.coupled import barlow_twins, clip, correlation, dice, info_nce, moe, rmse, supcon, vicreg
from tests.support.reference import FLOOR, TOLERANCE, close, distance, sgd, state, trained, weights

LossFunction = Callable[[Any, Any], Tensor]

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
ROWS_OF_PAIRS = {"clip": 1, "info_nce": 1, "supcon": supcon.VIEWS}  # and how many rows a sample has
MEETS_INSIDE = {"moe"}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    # A large eps keeps Adam from turning the rounding of a zero gradient into a step.
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
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


def assert_big_batch(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS["sgd-momentum"],
    *,
    clip_norm: float | None = None,
    **given: Any,
) -> list[int]:
    """An update of each batch by BigStep ends where plain torch on the whole batch does; returns the micro-batches."""
    twin = copy.deepcopy(model)
    mine, plain = optimizer(trained(model)), optimizer(trained(twin))
    step = BigStep(model, mine, loss_fn, clip_norm=clip_norm, **given)
    numbers, gradients = [], list[Tensor]()
    step.before_step(lambda: gradients.extend(p.grad.clone() for p in trained(model) if p.grad is not None))
    for batch in batches:
        gradients.clear()
        update = step(batch)
        plain.zero_grad()
        loss = loss_fn(twin, batch)
        loss.backward()
        true = [p.grad for p in trained(twin) if p.grad is not None]
        assert distance(gradients, true, FLOOR) <= TOLERANCE, "the gradient differs"
        if clip_norm is not None:
            clip_grad_norm_(trained(twin), clip_norm)
        plain.step()
        assert close(float(update.loss), float(loss.detach()), TOLERANCE), "the loss differs"
        assert distance(weights(model), weights(twin)) <= TOLERANCE, "the weights differ"
        assert distance(list(model.buffers()), list(twin.buffers())) <= TOLERANCE, "the buffers differ"
        numbers.append(update.micro_batches)
    assert distance(state(mine), state(plain), FLOOR) <= TOLERANCE, "the optimizer's state differs"
    return numbers


# The examples.


@pytest.mark.parametrize("name", EXAMPLES)
@given(data=st.data())
@settings(max_examples=20)
def test_an_example_is_the_big_batch(name: str, data: st.DataObject) -> None:
    """Several updates of batches of any size in micro-batches of any size, wherever activations stay."""
    sizes = data.draw(st.lists(st.integers(3, 13), min_size=2, max_size=3), "batches")
    seed = data.draw(st.integers(0, 99), "seed")
    kept = ["keep", "auto"] if name in MEETS_INSIDE else ["keep", "auto", "recompute"]
    micro = data.draw(st.integers(1, 7), "micro-batch")
    numbers = assert_big_batch(
        network(name, seed),
        EXAMPLES[name].loss_fn,
        [batch_of(name, size, seed + at) for at, size in enumerate(sizes)],
        OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)), "optimizer")],
        micro_batch_size=micro,
        clip_norm=data.draw(st.sampled_from([None, 0.05, 1e6]), "clip_norm"),
        options=Options(activations=data.draw(st.sampled_from(kept), "activations")),
    )
    assert numbers == [-(-size // micro) for size in sizes]


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_micro_batch_after_the_other_would_differ(name: str) -> None:
    """What is tested here is not true of any split: gradients of the parts, weighed by size, are another gradient."""
    model, batch = network(name), batch_of(name, 12)
    loss_fn: LossFunction = EXAMPLES[name].loss_fn
    true = torch.autograd.grad(loss_fn(model, batch), trained(model))
    parts = [mapped(batch, lambda _, leaf, at=at: leaf[at : at + 4]) for at in (0, 4, 8)]  # type: ignore[misc]
    added = [torch.zeros_like(p) for p in trained(model)]
    for part in parts:
        for total, each in zip(added, torch.autograd.grad(loss_fn(model, part), trained(model)), strict=True):
            total.add_(each, alpha=1 / 3)
    assert distance(added, true) > 1e-3


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_of_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a loss for each update, and the last is lower than the first."""
    EXAMPLES[name].main()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("loss ") and line.endswith(" in 7 micro-batches") for line in lines)
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_accumulator_refuses_an_example(name: str) -> None:
    """It gets one micro-batch after the other, so nobody can be asked; the error names BigStep."""
    model = network(name)
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(CoupledLoss, match="Use: BigStep, which has the whole batch"):
        accumulator.backward(EXAMPLES[name].loss_fn(model, batch_of(name, 6)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_first_step_says_nothing_and_draws_nothing(name: str) -> None:
    """No example has random numbers: the check can be made, and the generator is left as it was."""
    model, before = network(name), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BigStep(model, sgd(trained(model)), EXAMPLES[name].loss_fn, micro_batch_size=4)(batch_of(name, 11))
    assert torch.equal(torch.get_rng_state(), before)


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
@pytest.mark.parametrize("number", [3, 10])
def test_outside_a_window_an_example_is_the_textbook_s_loss(name: str, number: int) -> None:
    """Value and gradient."""
    model, batch = network(name), batch_of(name, number)
    found, true = EXAMPLES[name].loss_fn(model, batch), TEXTBOOK[name](model, batch)
    assert close(float(found.detach()), float(true.detach()), TOLERANCE)
    ours, theirs = (torch.autograd.grad(loss, trained(model)) for loss in (found, true))
    assert distance(ours, theirs) <= TOLERANCE * 10


# Memory.


FEATURES = 8  # of an embedding: gathered and transposed, it is as wide as the batch, too


class Widest(TorchDispatchMode):
    """Sees the most rows of any matrix that is as wide as the batch, and of all such that are there at once."""

    alive: ClassVar[list[tuple[StorageWeakRef, int]]] = []

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.width, self.rows, self.at_once = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and look."""
        del types
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and each.dim() == 2 and each.shape[1] >= self.width and len(each) != FEATURES:
                self.rows = max(self.rows, len(each))
                self.alive.append((StorageWeakRef(each.untyped_storage()), len(each)))
        self.alive[:] = [each for each in self.alive if not each[0].expired()]
        self.at_once = max(self.at_once, sum({ref.cdata: rows for ref, rows in self.alive}.values()))
        return found


@pytest.mark.parametrize("name", ROWS_OF_PAIRS)
def test_no_micro_batch_holds_more_than_its_own_rows_of_all_pairs(name: str) -> None:
    """Of 48 samples in micro-batches of 6, each computes its 6 rows; the whole batch computes 48."""
    model, each = network(name), ROWS_OF_PAIRS[name]
    seen = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        with Widest(48 * each) as widest:
            loss: Tensor = EXAMPLES[name].loss_fn(model, batch)
        seen.append(widest.rows)
        return loss

    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=6)(batch_of(name, 48))
    assert seen[-8:] == [6 * each] * 8
    loss_fn(model, batch_of(name, 48))
    assert seen[-1] == 48 * each


def by_rows(model: Any, batch: Any) -> Tensor:
    """CLIP's first direction, whose rows are made again in backward."""
    images, texts, scale = model(*batch)

    def rows(mine: Tensor, every: Tensor, scale: Tensor) -> Tensor:
        with Widest(48) as widest:
            loss = F.cross_entropy(scale * mine @ every.T, own(mine))
        at_once.append(widest.at_once)
        return loss

    loss = checkpoint(rows, images, across.gather(texts), scale, use_reentrant=False)
    return counted(loss, len(images))


def all_rows(model: Any, batch: Any) -> Tensor:
    """The same, kept."""
    images, texts, scale = model(*batch)
    with Widest(48) as widest:
        loss = F.cross_entropy(scale * images @ across.gather(texts).T, own(images))
    at_once.append(widest.at_once)
    return loss


at_once: list[int] = []


def test_rows_that_are_made_again_in_backward_are_never_there_together() -> None:
    """Kept, those of all wait for backward; made again, one micro-batch's logits and their softmax are there."""
    for loss_fn, most in ((by_rows, 2 * 6), (all_rows, 48 + 6)):
        Widest.alive.clear()
        at_once.clear()
        model = network("clip")
        options = Options(check=False)
        BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=6, options=options)(batch_of("clip", 48))
        assert max(at_once) == most
    assert_big_batch(network("clip"), by_rows, [batch_of("clip", number) for number in (11, 7)], micro_batch_size=4)


def test_recomputing_keeps_nothing_of_the_model_but_its_inputs() -> None:
    """Where micro-batches meet in the loss alone, what the model saves for backward is made again there."""
    kept = {}
    for activations in ("keep", "recompute", "auto"):
        model, saved, forwards = network("clip"), list[int](), list[int]()
        model.get_submodule("images").register_forward_hook(lambda *_, at=forwards: at.append(1))

        def loss_fn(model: Any, batch: Any, saved: list[int] = saved) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                embedded = model(*batch)
            return EXAMPLES["clip"].loss_fn(lambda *_: embedded, batch)

        options = Options(activations=activations)
        step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=5, options=options)
        for _ in range(2):  # samples are compared in both
            step(batch_of("clip", 20))
        saved.clear()
        forwards.clear()
        step(batch_of("clip", 20))
        kept[activations] = sum(saved), len(forwards)
    assert kept["keep"][0] > 1000
    assert kept["keep"][1] == 4
    # The first micro-batch, whose backward comes first, runs once.
    assert kept["recompute"] == kept["auto"] == (kept["keep"][0] // 4, 7)


def test_recomputing_is_refused_where_micro_batches_meet_inside_the_model() -> None:
    """The balancing loss is computed in the model: the error says what to take instead."""
    model = network("moe")
    step = BigStep(
        model,
        sgd(trained(model)),
        moe.loss_fn,
        micro_batch_size=3,
        options=Options(activations="recompute"),
    )
    before = weights(model)
    with pytest.raises(ConfigurationError, match=r'(?s)across.mean .*inside.*"keep".*"offload"'):
        step(batch_of("moe", 7))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_packed_sequences_meet_in_any_order() -> None:
    """Micro-batches of as many tokens, sorted by length, with as many samples as it comes."""
    numbers = assert_big_batch(
        network("moe"),
        moe.loss_fn,
        [batch_of("moe", 11, seed) for seed in range(3)],
        options=Options(lengths="mask", token_budget=12),
    )
    assert max(numbers) > 2


def test_extras_of_coupled_samples_are_joined() -> None:
    """One row per sample, in the batch's own order."""
    model, batch = network("supcon"), batch_of("supcon", 11)
    step = BigStep(model, sgd(trained(model)), lambda m, b: (supcon.loss_fn(m, b), {"label": b[1]}), micro_batch_size=4)
    assert torch.equal(step(batch).extras["label"], batch[1])


# Losses beside the examples, in which a model of one output is set against all samples.


def encoder(*between: nn.Module) -> nn.Module:
    """Two layers, with something between them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 4)).double()


def pairs_of(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two inputs and a label per sample."""
    by = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, number, 6, generator=by, dtype=torch.float64)
    return inputs[0], inputs[1], torch.randint(4, (number,), generator=by)


def own(rows: Tensor) -> Tensor:
    """Where these rows are among all."""
    return across.offset() + torch.arange(len(rows))


def centred(rows: Tensor) -> Tensor:
    """Rows less their mean over the batch: still one per sample."""
    return rows - across.mean(rows.mean(0))


def contrast(similarity: Callable[[Tensor, Tensor], Tensor]) -> LossFunction:
    """InfoNCE of a model's rows against all, by some similarity."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        rows = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(similarity(rows, across.gather(F.normalize(model(batch[1]), dim=1))) / 0.2, own(rows))

    return loss_fn


def siglip(model: Any, batch: Any) -> Tensor:
    """A sigmoid for every pair (Zhai et al. 2023)."""
    rows, every = model(batch[0]), across.gather(model(batch[1]))
    signs = 2.0 * (own(rows)[:, None] == torch.arange(len(every))) - 1
    return -F.logsigmoid(signs * (rows @ every.T - 1)).sum() / len(rows)


def simclr(model: Any, batch: Any) -> Tensor:
    """Two views in one tensor, each against all but itself (Chen et al. 2020)."""
    one, two = (F.normalize(model(each), dim=1) for each in batch[:2])
    every = torch.cat([across.gather(one), across.gather(two)])
    half = len(every) // 2
    itself = torch.cat([own(one), half + own(one)])[:, None] == torch.arange(len(every))
    logits = (torch.cat([one, two]) @ every.T / 0.2).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.cat([half + own(one), own(one)]))


def batch_hard(model: Any, batch: Any) -> Tensor:
    """The farthest of a sample's class and the nearest of the others (Hermans et al. 2017)."""
    rows = model(batch[0])
    distances = torch.cdist(rows, across.gather(rows))
    same = batch[2][:, None] == across.gather(batch[2])
    farthest, nearest = distances.masked_fill(~same, 0.0).amax(1), distances.masked_fill(same, 1e3).amin(1)
    return F.relu(farthest - nearest + 1).mean()


def swav(model: Any, batch: Any) -> Tensor:
    """Assignments that are balanced over the batch, without gradient (Caron et al. 2020)."""
    with torch.no_grad():
        shares = model(batch[1]).exp()
        for _ in range(3):
            shares = shares / across.sum(shares.sum(0))
            shares = shares / shares.sum(1, keepdim=True)
    return F.cross_entropy(model(batch[0]), shares)


def full_matrix(model: Any, batch: Any) -> Tensor:
    """All pairs in each micro-batch: the same term everywhere, so it counts once."""
    one, two = (across.gather(F.normalize(model(each), dim=1)) for each in batch[:2])
    return across.once(F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one))))


def several_terms(model: Any, batch: Any) -> Tensor:
    """A mean, a term of all samples, and one of parameters."""
    scores = model(batch[0])
    share = across.mean(scores.softmax(1).mean(0))
    decay = counted(sum(p.square().sum() for p in model.parameters()), "once")
    return F.cross_entropy(scores, batch[2]) + 0.1 * across.once((share * share.log()).sum()) + 0.01 * decay


def moco(model: Any, batch: Any) -> Tensor:
    """Keys without gradient, as of a momentum encoder."""
    rows = model(batch[0])
    with torch.no_grad():
        keys = across.gather(model(batch[1]))
    return F.cross_entropy(rows @ keys.T, own(rows))


def locked_texts(model: Any, batch: Any) -> Tensor:
    """A frozen tower's rows against all that are trained (LiT)."""
    texts = batch[1][:, :4]
    return F.cross_entropy(texts @ across.gather(model(batch[0])).T, own(texts))


def centred_contrast(model: Any, batch: Any) -> Tensor:
    """Own rows, centred by the batch, against all."""
    rows = centred(model(batch[0]))
    return F.cross_entropy(rows @ across.gather(centred(model(batch[1]))).T, own(rows))


def relative_error(model: Any, batch: Any) -> Tensor:
    """A mean over samples, divided by something of the whole batch."""
    return F.mse_loss(model(batch[0]), batch[1][:, :4]) / across.mean(model(batch[1]).square().mean())


def masked_mean(model: Any, batch: Any) -> Tensor:
    """A sum over this micro-batch's own, divided by the batch's count: it adds up."""
    mask = (batch[2] > 0).double()
    return (F.cross_entropy(model(batch[0]), batch[2], reduction="none") * mask).sum() / across.sum(mask.sum())


LOSSES: list[Any] = [
    pytest.param(contrast(lambda rows, every: rows @ every.T), id="mm"),
    pytest.param(contrast(F.linear), id="linear"),
    pytest.param(contrast(lambda rows, every: torch.einsum("id,jd->ij", rows, every)), id="einsum"),
    pytest.param(contrast(lambda rows, every: (every @ rows.T).T), id="transposed"),
    pytest.param(contrast(lambda rows, every: -torch.cdist(rows, every)), id="cdist"),
    pytest.param(contrast(lambda rows, every: -(rows[:, None] - every).square().sum(-1)), id="differences"),
    pytest.param(
        contrast(lambda rows, every: F.cosine_similarity(rows[:, None], every[None], dim=-1)), id="cosine_similarity"
    ),
    pytest.param(siglip, id="siglip"),
    pytest.param(simclr, id="simclr"),
    pytest.param(batch_hard, id="batch_hard"),
    pytest.param(swav, id="swav"),
    pytest.param(full_matrix, id="full_matrix"),
    pytest.param(several_terms, id="several_terms"),
    pytest.param(lambda m, b: F.mse_loss(centred(m(b[0])), b[1][:, :4]), id="centred"),
    pytest.param(lambda m, b: F.cross_entropy(F.batch_norm(m(b[0]), None, None, training=True), b[2]), id="batch_norm"),
    pytest.param(lambda m, b: (m(b[0]) @ across.gather(m(b[0])).T).square().mean(), id="mean_of_pairs"),
    pytest.param(moco, id="moco"),
    pytest.param(locked_texts, id="lit"),
    pytest.param(centred_contrast, id="centred_contrast"),
    pytest.param(relative_error, id="relative_error"),
    pytest.param(masked_mean, id="masked_mean"),
]


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_other_coupled_losses_are_the_big_batch(loss_fn: LossFunction, activations: Any) -> None:
    """As people write them, read without a word."""
    options = Options(activations=activations)
    batches = [pairs_of(number, number) for number in (11, 6, 9)]
    assert_big_batch(encoder(), loss_fn, batches, micro_batch_size=4, options=options)


@pytest.mark.parametrize("loss_fn", [moco, locked_texts, centred_contrast, relative_error])
def test_a_word_settles_what_is_refused(loss_fn: LossFunction) -> None:
    """`counted` says what the loss is a mean over."""
    batches = [pairs_of(number, number) for number in (11, 6, 9)]
    assert_big_batch(encoder(), lambda m, b: counted(loss_fn(m, b), len(b[0])), batches, micro_batch_size=4)


def test_a_model_that_computes_its_own_loss_beside_a_coupled_term() -> None:
    """Its loss is inside what would be recomputed, so it is kept."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = encoder()

        def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.body(x)
            return F.cross_entropy(scores, label), scores

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss, scores = model(batch[0], batch[2])
        return loss + across.once(across.mean(scores.softmax(1).mean(0)).square().sum())

    assert_big_batch(Own(), loss_fn, [pairs_of(11)], micro_batch_size=4)


# What must be refused.


def step_once(loss_fn: LossFunction, model: nn.Module | None = None, **options: Any) -> None:
    """One step of a batch of eleven, four at a time."""
    model = encoder() if model is None else model
    BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(**options))(pairs_of(11))


def one_side_forgotten(model: Any, batch: Any) -> Tensor:
    """The second direction is over this micro-batch alone."""
    one, two = model(batch[0]), model(batch[1])
    return F.cross_entropy(one @ across.gather(two).T, own(one)) + F.cross_entropy(two @ one.T, torch.arange(len(one)))


def columns_of_own_rows(model: Any, batch: Any) -> Tensor:
    """A row block has no whole columns."""
    logits = model(batch[0]) @ across.gather(model(batch[1])).T
    return F.cross_entropy(logits, own(logits)) + F.cross_entropy(logits.T, torch.arange(logits.shape[1]) % len(logits))


@pytest.mark.parametrize("loss_fn", [one_side_forgotten, columns_of_own_rows])
def test_what_is_coupled_beside_across_is_refused(loss_fn: LossFunction) -> None:
    """Gathering in one place does not excuse the other."""
    with pytest.raises(CoupledLoss, match=r"across\.gather"):
        step_once(loss_fn)


@pytest.mark.parametrize("check", [True, False])
def test_own_rows_centred_by_the_batch_are_still_own_rows(check: bool) -> None:
    """Each against each other of the micro-batch alone is coupled, and the graph shows it without a check."""
    with pytest.raises(CoupledLoss):
        step_once(
            lambda m, b: F.cross_entropy(m(b[0]) @ centred(m(b[1])).T, torch.arange(len(b[0]))),
            check=check,
        )


def test_a_marked_term_must_be_the_same_in_every_micro_batch() -> None:
    """The error shows the values."""
    with pytest.raises(LossError, match=r"the same in every micro-batch, and.*Got \d.*, \d"):
        step_once(lambda m, b: across.once(F.mse_loss(centred(m(b[0])), b[1][:, :4])))


@pytest.mark.parametrize("check", [True, False])
def test_a_marked_term_is_looked_at_where_nothing_else_is_asked_for(check: bool) -> None:
    """A mean over this micro-batch's samples does not count once."""
    with pytest.raises(LossError):
        step_once(lambda m, b: across.once(F.mse_loss(m(b[0]), b[1][:, :4])), check=check)


class Centred(nn.Module):
    """Looks at the other samples of whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        """Take their mean away."""
        return x - x.mean(0)


def marked(model: Any, batch: Any) -> Tensor:
    """A mean beside a term of all."""
    scores = model(batch[0])
    return F.cross_entropy(scores, batch[2]) + across.once(across.mean(scores.mean(0)).square().sum())


IN_SECRET: dict[str, tuple[LossFunction, tuple[nn.Module, ...]]] = {
    "beside BatchNorm": (lambda m, b: F.cross_entropy(m(b[0]), b[2]), (nn.BatchNorm1d(8), Centred())),
    "beside across": (contrast(lambda rows, every: rows @ every.T), (Centred(),)),
    "offset forgotten": (lambda m, b: F.cross_entropy(m(b[0]) @ across.gather(m(b[1])).T, torch.arange(len(b[0]))), ()),
    "beside a marked term": (marked, (Centred(),)),
}


@pytest.mark.parametrize("how", list(IN_SECRET))
def test_what_no_graph_shows_is_seen_at_the_first_step(how: str) -> None:
    """In lock-step, too: another split of the same samples must have the same loss."""
    loss_fn, between = IN_SECRET[how]
    with pytest.raises(CoupledLoss, match="the samples of this batch are coupled"):
        step_once(loss_fn, encoder(*between))


class OverPadding(nn.Module):
    """Normalises real and padded places alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(n, steps, 6) → (n, 3)."""
        hidden = self.norm(self.first(tokens).transpose(1, 2)).transpose(1, 2) * mask[..., None]
        return self.last(hidden.sum(1) / mask.sum(1, keepdim=True))


def test_batch_norm_over_padding_is_not_packed() -> None:
    """Without padding its statistics are others."""
    model = OverPadding().double()
    options = Options(lengths="mask", token_budget=12)
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: F.cross_entropy(m(b["tokens"], b["mask"]), b["labels"]),
        options=options,
    )
    with pytest.raises(ValueError, match="counts padding"):
        step(batch_of("moe", 11))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("asks", ["first", "second"])
def test_micro_batches_that_take_different_paths_say_where_they_are(asks: str, check: bool) -> None:
    """An `if` on the data, after which only some ask for the others."""

    def loss_fn(model: Any, batch: Any) -> Tensor:
        scores = model(batch[0])
        return F.cross_entropy(centred(scores) if bool((batch[2] == 1).all()) else scores, batch[2])

    labels = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2])
    model = encoder()
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4, options=Options(check=check))
    with pytest.raises(PathsDiffer, match=r"at across\.mean of \[4\] float64"):
        step((*pairs_of(8)[:2], labels if asks == "first" else labels.flip(0)))


@pytest.mark.parametrize("between", ["BatchNorm", "across"])
def test_a_gradient_of_a_gradient_is_refused(between: str) -> None:
    """A meeting's backward has no backward: as in plain torch an error, and not a gradient without that part."""

    def penalised(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        scores = model(x)
        if between == "across":
            scores = scores / across.mean(scores.square().mean(0)).sqrt()
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[2]) + slope.square().sum(1).mean()

    with pytest.raises((LossError, RuntimeError), match="twice"):
        step_once(penalised, encoder(*([nn.BatchNorm1d(8)] if between == "BatchNorm" else [])))


def test_an_accumulator_refuses_a_coupled_loss_with_a_count_too() -> None:
    """No count makes the parts add up."""
    model = network("clip")
    accumulator = Accumulator(model, sgd(trained(model)), steps=2)
    with pytest.raises(CoupledLoss, match="Use: BigStep, which has the whole batch"):
        accumulator.backward(clip.loss_fn(model, batch_of("clip", 6)), count=6)


# Hugging Face.


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Their models compute losses in float32, by `logits.float()`: in a float64 model let that be what it was."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("transformers")
    monkeypatch.setattr(Tensor, "float", lambda self: self)
    return found


def hugging_face_clip(library: Any) -> nn.Module:
    """CLIP of one layer each."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 18, "eos_token_id": 19, "pad_token_id": 0}
    config = library.CLIPConfig(
        text_config={**sizes, **text, "projection_dim": 6},
        vision_config={**sizes, "image_size": 8, "patch_size": 4, "projection_dim": 6},
        projection_dim=6,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return library.CLIPModel(config).double()


def captions(number: int, seed: int = 0) -> dict[str, Tensor]:
    """Images and texts."""
    by = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 18, (number, 6), generator=by)
    tokens[:, -1] = 19
    images = torch.randn(number, 3, 8, 8, generator=by, dtype=torch.float64)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": images}


def clip_loss(model: Any, batch: Any) -> Tensor:
    """CLIP's loss from what the model gives out."""
    outputs = model(**batch)
    embedded = outputs.image_embeds, outputs.text_embeds, model.logit_scale.exp()
    return EXAMPLES["clip"].loss_fn(lambda *_: embedded, ())


@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hugging_face_clip_is_the_big_batch(transformers: Any, optimizer: str, activations: Any) -> None:
    """With the loss written around it, also as one number of its own with the whole batch."""
    batches = [captions(number, number) for number in (11, 5, 8)]
    model = hugging_face_clip(transformers)
    true = model(**batches[0], return_loss=True).loss
    assert close(float(clip_loss(model, batches[0]).detach()), float(true.detach()), TOLERANCE)
    options = Options(activations=activations)
    assert_big_batch(model, clip_loss, batches, OPTIMIZERS[optimizer], micro_batch_size=4, options=options)


@pytest.mark.parametrize("loss_fn", [None, lambda model, batch: model(**batch, return_loss=True).loss])
def test_hugging_face_clip_s_own_loss_is_refused(transformers: Any, loss_fn: LossFunction | None) -> None:
    """It is coupled inside the model, and nothing is changed."""
    model = hugging_face_clip(transformers)
    before = weights(model)
    batch = {**captions(8), "return_loss": True} if loss_fn is None else captions(8)
    step = BigStep(model, sgd(trained(model)), loss_fn, micro_batch_size=4)
    with pytest.raises(CoupledLoss, match=r"(?s)a matrix product of samples with samples.*across\.gather"):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


VISION: dict[str, Callable[[Any], nn.Module]] = {
    "resnet-basic": lambda t: t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    ),
    "resnet-bottleneck": lambda t: t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=4, hidden_sizes=[8, 16], depths=[1, 2], layer_type="bottleneck", num_labels=3)
    ),
    "mobilenet_v2": lambda t: t.MobileNetV2ForImageClassification(
        t.MobileNetV2Config(image_size=16, depth_multiplier=0.1, classifier_dropout_prob=0.0, num_labels=3)
    ),
    "efficientnet": lambda t: t.EfficientNetForImageClassification(
        t.EfficientNetConfig(
            image_size=16,
            width_coefficient=0.1,
            hidden_dim=128,
            in_channels=[8, 8],
            out_channels=[8, 8],
            kernel_sizes=[3, 3],
            strides=[1, 2],
            num_block_repeats=[1, 1],
            expand_ratios=[1, 2],
            depthwise_padding=[],
            dropout_rate=0.0,
            drop_connect_rate=0.0,
            num_labels=3,
        )
    ),
}


@pytest.mark.parametrize("name", VISION)
def test_hugging_face_networks_with_batch_norm_are_the_big_batch(transformers: Any, name: str) -> None:
    """Nothing to do for it: weights, running statistics and `outputs.loss` are the big batch's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VISION[name](transformers).double().train()
    by = torch.Generator().manual_seed(0)
    batches = [
        {
            "pixel_values": torch.randn(number, 3, 16, 16, generator=by, dtype=torch.float64),
            "labels": torch.randint(3, (number,), generator=by),
        }
        for number in (10, 7)
    ]
    # Small steps: gradients of a deep network on little data are large, and so is what a step makes of their rounding.
    assert_big_batch(
        model, lambda m, b: m(**b).loss, batches, lambda p: torch.optim.SGD(p, lr=1e-5), micro_batch_size=4
    )


def test_an_attack_through_values_of_all() -> None:
    """A derivative inside of the loss would add up those of all micro-batches, and is refused."""

    def attacked(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(centred(model(x)), batch[2], reduction="sum"), x)
        return F.cross_entropy(centred(model(batch[0] + 0.1 * slope.sign())), batch[2])

    with pytest.raises(LossError, match="a derivative inside of the loss goes through across"):
        step_once(attacked, encoder())
