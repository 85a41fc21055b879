"""Every loss in the tables, accumulated over uneven micro-batches, is the loss of one real big batch."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bigbatch import Accumulator, counted
from bigbatch.errors import LossError, SeveralCounts
from tests.support.losses import AMBIGUOUS_WHEN_EVEN, EITHER, READABLE, SEVERAL, SPLIT, sizes
from tests.support.reference import accumulated, assert_equal, big_batches, distance, gentle, one
from tests.support.refused import SETTLED
from tests.support.samples import Batch, Loss, mlp, rows, sequences
from tests.support.strategies import Epoch, either, epochs, readable, several

pytestmark = pytest.mark.filterwarnings(
    "ignore:reduction.*divides the total loss:UserWarning",  # kl_div(reduction="mean")
    "ignore:The .grad attribute of a Tensor:UserWarning",  # torch.compile looks at it
    "ignore:this loss looks divided by steps:UserWarning",  # some of the doubtful ones are divided by as much
    "ignore:this loss is a sum over data:UserWarning",  # by a number that is also another size
)

BY_NAME = {case.name: case for case in READABLE}


@pytest.mark.parametrize("case", READABLE, ids=str)
def test_readable_loss_is_the_big_batch(case: Loss) -> None:
    """A loss of the table needs no argument to accumulate to the big batch's gradient and loss."""
    batches = case.micro_batches(sizes(case))
    assert_equal(accumulated(case, batches, steps=4), big_batches(case, batches, steps=4))


@given(epochs(readable))
@settings(max_examples=60)
def test_readable_loss_in_any_split(epoch: Epoch) -> None:
    """Any sizes, any number of micro-batches per update, with a short last window."""
    ours = accumulated(epoch.case, epoch.batches, epoch.steps)
    assert_equal(ours, big_batches(epoch.case, epoch.batches, epoch.steps))


def assert_exact_or_refused(epoch: Epoch) -> None:
    """What is not refused must be exact."""
    try:
        ours = accumulated(epoch.case, epoch.batches, epoch.steps, optimizer=gentle)
    except LossError:
        return
    assert_equal(ours, big_batches(epoch.case, epoch.batches, epoch.steps, optimizer=gentle))


@pytest.mark.parametrize("split", [(1, 1, 1), (1, 3, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("case", [case for case in READABLE if case.smallest > 1], ids=str)
def test_a_loss_too_small_to_be_told_is_exact_or_refused(case: Loss, split: tuple[int, ...]) -> None:
    """Below the size from which it must be read a loss may be refused, but not read as another."""
    assert_exact_or_refused(Epoch(case, list(split), 0, 4))


@pytest.mark.parametrize("split", [SPLIT, (1, 1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("case", EITHER, ids=str)
def test_a_doubtful_loss_is_exact_or_refused(case: Loss, split: tuple[int, ...]) -> None:
    """A loss that tempts a reader to guess is read exactly or not at all."""
    if split == SPLIT or case.name not in AMBIGUOUS_WHEN_EVEN:
        assert_exact_or_refused(Epoch(case, list(split), 0, 4))


@given(epochs(either))
def test_a_doubtful_loss_is_exact_or_refused_in_any_split(epoch: Epoch) -> None:
    """The same for any sizes, among them those that make a guess look right."""
    assert_exact_or_refused(epoch)


@pytest.mark.parametrize("case", SETTLED, ids=str)
def test_counted_settles_what_a_graph_cannot_tell(case: Loss) -> None:
    """What the error's advice leads to is exact."""
    batches = case.micro_batches(SPLIT)
    assert_equal(accumulated(case, batches, steps=4), big_batches(case, batches, steps=4))


def test_counted_is_the_identity() -> None:
    """Outside an accumulator, `counted` changes neither value nor gradient."""
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    value = counted(x**2, 5)
    assert value == 9.0
    value.backward()
    assert x.grad == 6.0


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_several_counts_are_exact_with_totals(case: Loss) -> None:
    """Terms averaged over different things cannot share one correction; `counts=fn(batch)` makes every term exact."""
    batches = case.micro_batches(SPLIT)
    with pytest.raises(SeveralCounts, match="counts="):
        accumulated(case, batches, steps=4)
    ours = accumulated(case, batches, steps=4, counts=case.counts)
    assert_equal(ours, big_batches(case, batches, steps=4))


@given(epochs(several))
@settings(max_examples=40)
def test_several_counts_in_any_split(epoch: Epoch) -> None:
    """Totals are known in advance for any sizes and a short last window."""
    ours = accumulated(epoch.case, epoch.batches, epoch.steps, counts=epoch.case.counts)
    assert_equal(ours, big_batches(epoch.case, epoch.batches, epoch.steps))


# What may be wrapped around a model.

WRAPPED = [
    "cross_entropy-functional-2-D-ignored-weights-smoothing-mean",
    "cross_entropy-functional-2-D-probabilities-mean",
    "sum",
    "dice-per-sample",
    "next-token",
    "two-terms",
    "sum+norms",
    "dpo-two-calls",
    "attention",
    "lstm",
]


class Checkpointed(nn.Module):
    """A model whose activations are computed again in backward."""

    def __init__(self, model: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.model = model
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The model's output; reentrant checkpointing wants an input that takes gradients."""
        if x.is_floating_point():
            x = x.requires_grad_()
            return checkpoint(self.model, x, use_reentrant=self.reentrant)
        anchor = torch.zeros((), requires_grad=True)
        return checkpoint(lambda tokens, _: self.model(tokens), x, anchor, use_reentrant=self.reentrant)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real process group of one."""
    store = tmp_path_factory.mktemp("store") / "init"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpointed": functools.partial(Checkpointed, reentrant=False),
    "checkpointed, reentrant": functools.partial(Checkpointed, reentrant=True),
    "DDP": DistributedDataParallel,
    "DDP that looks for unused parameters": functools.partial(DistributedDataParallel, find_unused_parameters=True),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models_are_read(name: str, wrapper: str) -> None:
    """What is around a model changes nothing about its loss."""
    case = BY_NAME[name]
    batches = case.micro_batches(SPLIT)
    ours = accumulated(case, batches, 4, model=WRAPPERS[wrapper](case.model()))
    assert_equal(ours, big_batches(case, batches, 4))


@pytest.mark.parametrize("name", ["next-token", "attention"])
def test_reading_recomputes_nothing(name: str) -> None:
    """A checkpointed model runs twice per micro-batch, forward and backward, and not once more to be read."""
    case = BY_NAME[name]
    calls = 0

    def count_call(*_: object) -> None:
        nonlocal calls
        calls += 1

    model = Checkpointed(case.model(), reentrant=False)
    next(m for m in model.model.modules() if isinstance(m, nn.Linear)).register_forward_hook(count_call)
    by_hand = case.model()
    hand = Checkpointed(by_hand, reentrant=False)
    next(m for m in by_hand.modules() if isinstance(m, nn.Linear)).register_forward_hook(count_call)
    batches = case.micro_batches(SPLIT)
    for batch in batches:
        case.loss(hand, batch).backward()
    expected, calls = calls, 0
    accumulated(case, batches, 4, model=model)
    assert calls == expected


@pytest.mark.parametrize("name", WRAPPED)
def test_a_loss_offloaded_by_saved_tensor_hooks_is_exact_or_refused(name: str) -> None:
    """Hooks on saved tensors, which `save_on_cpu` and activation offloading set, are never run to read a loss."""
    case = BY_NAME[name]
    unpacked = 0

    def unpack(tensor: Tensor) -> Tensor:
        nonlocal unpacked
        unpacked += 1
        return tensor

    def hooked(model: Any, batch: Batch) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
            return case.loss(model, batch)

    batches = case.micro_batches(SPLIT)
    hooked(model := case.model(), batches[0]).backward()
    expected, unpacked = unpacked, 0
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=1)
    model.zero_grad()
    try:
        accumulator.backward(hooked(model, batches[0]))
    except LossError as error:
        assert unpacked == 0
        assert "hook" in str(error)  # noqa: PT017
    else:
        assert unpacked == expected
        assert_equal(accumulated(case, batches, 4, loss=hooked), big_batches(case, batches, 4))


AUTOCAST = [name for name in WRAPPED if name not in {"dice-per-sample", "lstm"}]


@pytest.mark.parametrize("name", AUTOCAST)
def test_losses_under_autocast_are_read(name: str) -> None:
    """Under bf16 autocast the parts are weighed as exactly as without it: only the model's own rounding remains."""
    case = BY_NAME[name]

    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss(model, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})

    batches = case.micro_batches((5, 1, 3, 2), seed=3)
    ours = accumulated(case, batches, 4, model=case.model().float(), loss=loss)
    true = big_batches(case, batches, 4, model=case.model().float(), loss=loss)
    assert_equal(ours, true, tolerance=0.03)


def test_counts_under_autocast_are_not_rounded() -> None:
    """A bf16 loss over 1,001 targets weighs 1,001, not the 1,000 that bf16 can hold."""
    case = Loss("bf16", mlp(), rows, lambda m, b: F.cross_entropy(m(b["x"]).bfloat16(), b["label"]))
    batches = case.micro_batches((1001, 3))
    model = case.model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    (update,) = [u for batch in accumulator.over(batches) if (u := accumulator.backward(case.loss(model, batch)))]
    assert one(update.count) == 1004.0


# What is compiled.


def test_a_compiled_model_is_where_reading_stops() -> None:
    """The loss above a compiled model is read as ever."""
    case = BY_NAME["cross_entropy-functional-2-D-ignored-mean"]
    batches = case.micro_batches(SPLIT)
    model = torch.compile(case.model(), backend="aot_eager", dynamic=True)
    assert isinstance(model, nn.Module)
    assert_equal(accumulated(case, batches, 4, model=model), big_batches(case, batches, 4))


# What changes within a window.


def test_a_loss_whose_shape_changes_within_a_window() -> None:
    """Sequences of another length in every micro-batch: the count is that of each."""
    lengths = (6, 3, 5, 2)

    def cut(batch: Batch, length: int) -> Batch:
        return {"tokens": batch["tokens"][:, :length], "labels": batch["labels"][:, :length]}

    def pad(batches: Any) -> Batch:
        width = max(b["tokens"].shape[1] for b in batches)
        padded = [
            (
                F.pad(b["tokens"], (0, width - b["tokens"].shape[1])),
                F.pad(b["labels"], (0, width - b["labels"].shape[1]), value=-100),
            )
            for b in batches
        ]
        return {"tokens": torch.cat([t for t, _ in padded]), "labels": torch.cat([y for _, y in padded])}

    plain = BY_NAME["next-token"]
    case = Loss("ragged", plain.model, sequences, plain.loss, count=plain.count, join=pad)
    batches = [cut(batch, length) for batch, length in zip(case.micro_batches(SPLIT), lengths, strict=True)]
    assert_equal(accumulated(case, batches, 4), big_batches(case, batches, 4))


def test_a_loss_that_changes_within_a_window() -> None:
    """Another loss for the second micro-batch is refused: a window makes one big batch, which has one loss."""
    case = BY_NAME["mse-mean"]
    first, second = case.micro_batches((3, 2))
    model = case.model()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    accumulator.backward(F.mse_loss(model(first["x"]), first["value"]))
    with pytest.raises(LossError, match=r"loss changed within a window.*MseLoss.*Mean.*\n.*one accumulator per loss"):
        accumulator.backward(F.l1_loss(model(second["x"]), second["value"]))


def assert_gradients_equal(model: nn.Module, loss: Any, data: list[Tensor], tolerance: float) -> None:
    """Those of one window are the big batch's."""
    true = torch.autograd.grad(loss(model, torch.cat(data)), list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), steps=len(data))
    for x in data:
        accumulator.backward(loss(model, x))
    assert (
        distance([was - p.detach() for was, p in zip(before, model.parameters(), strict=True)], list(true)) <= tolerance
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_samples_of_a_recurrent_layer_are_where_it_has_them(kind: Any, batch_first: bool) -> None:
    """In float32, where oneDNN has a node of its own, with steps first whatever it was told."""
    torch.manual_seed(0)
    model, data = kind(8, 3, batch_first=batch_first), [torch.randn(n, 5, 8) for n in (4, 2, 3)]

    def outputs(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x if batch_first else x.transpose(0, 1))[0]
        return out if batch_first else out.transpose(0, 1)

    for loss in (
        lambda m, x: outputs(m, x).square().sum() / len(x),
        lambda m, x: outputs(m, x)[:, -1].square().mean(),
        lambda m, x: outputs(m, x).square().sum(1).mean(),
    ):
        assert_gradients_equal(model, loss, data, 1e-5)


@pytest.mark.parametrize("order", [2, "nuc"])
def test_norms_of_matrices_are_read(order: Any) -> None:
    """They are of parameters alone, and count once."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(9, 8).double()

    def loss(model: Any, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(model[2].weight, order)
        return model(x).square().mean() + norm

    assert_gradients_equal(model, loss, list(data.split((4, 2, 3))), 1e-12)
