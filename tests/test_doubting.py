"""Before the first check accuses a model: the precision that it computes in, and whether it repeats itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options, verify
from bigbatch.errors import BatchError, CoupledLoss
from bigbatch.micro_steps import first_check
from bigbatch.micro_steps.coupling import Part
from bigbatch.micro_steps.doubting import Precisions, rounding
from tests.bombs import seed
from tests.defects import Batch, mean
from tests.reference import sgd, trained

WIDE = 64


def samples(number: int, dtype: torch.dtype, at: int = 0) -> Batch:
    """Inputs and labels."""
    by = torch.Generator().manual_seed(at)
    return torch.randn(number, WIDE, generator=by).to(dtype), torch.randint(0, 3, (number,), generator=by)


def step_of(model: nn.Module, batch: Batch, size: int = 24, options: Options | None = None) -> None:
    """One first step, which is checked."""
    BigStep(model, sgd(trained(model)), mean, micro_batch_size=size, options=options or Options())(batch)


class InAnyOrder(nn.Module):
    """Adds up in another order each time, as atomic additions do, in the dtype that it is told."""

    def __init__(self, dtype: torch.dtype | None, coupling: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        seed()
        self.dtype, self.coupling, self.noise = dtype, coupling, noise
        self.first, self.last = nn.Parameter(torch.randn(WIDE, 8)), nn.Linear(8, 3)
        self.calls = [0]  # shared by copies: no two calls of any of them are alike

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, one feature after the other."""
        self.calls[0] += 1
        by = torch.Generator().manual_seed(self.calls[0])
        given, weight = (each.to(self.dtype or each.dtype) for each in (x, self.first))
        found = torch.zeros(len(x), 8, dtype=given.dtype)
        for k in torch.randperm(WIDE, generator=by).tolist():
            found = found + given[:, k : k + 1] * weight[k]
        hidden = torch.tanh(found.to(x.dtype) * 0.1)
        hidden = hidden * (1 + self.noise * torch.rand(1, generator=by, dtype=x.dtype))
        return self.last(hidden + self.coupling * hidden.mean(0))

    def __deepcopy__(self, memo: Any) -> "InAnyOrder":
        """Copy the weights alone."""
        twin = InAnyOrder(self.dtype, self.coupling, self.noise).to(self.first.dtype)
        twin.load_state_dict(self.state_dict())
        twin.calls = self.calls
        return twin


class InBlocks(nn.Module):
    """Adds up in blocks that depend on the number of rows, as kernels of a GPU are chosen; perhaps without a graph."""

    def __init__(self, dtype: torch.dtype, coupling: float = 0.0, *, frozen: bool = False) -> None:
        super().__init__()
        seed()
        self.dtype, self.coupling, self.frozen = dtype, coupling, frozen
        self.first, self.last = nn.Parameter(torch.randn(WIDE, 8), requires_grad=not frozen), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, block by block."""
        with torch.set_grad_enabled(not self.frozen):
            given, weight = x.to(self.dtype), self.first.to(self.dtype)
            found = torch.zeros(len(x), 8, dtype=self.dtype)
            for block in torch.arange(WIDE).split(3 + len(x) % 5):
                found = found + given[:, block] @ weight[block]
        hidden = torch.tanh(found.to(x.dtype) * 0.1)
        return self.last(hidden + self.coupling * hidden.mean(0))


def accused_without_a_doubt(make: Callable[[int], None], number: int) -> int:
    """Count the accusations where no second look is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_check, "rounding", lambda parts, *_: max(part.tolerance for part in parts))
        return sum(is_accused(make, at) for at in range(number))


def is_accused(make: Callable[[int], None], at: int) -> bool:
    """Whether it is said to be coupled."""
    try:
        make(at)
    except CoupledLoss:
        return True
    return False


def in_any_order(at: int) -> None:
    """A float64 model that adds up in float32, in any order."""
    step_of(InAnyOrder(torch.float32).double(), samples(64, torch.float64, at))


def in_blocks(at: int) -> None:
    """A float64 model that computes in float32, as many rows at a time as there happen to be."""
    step_of(InBlocks(torch.float32).double(), samples(64, torch.float64, at))


def frozen_in_blocks(at: int) -> None:
    """The same, where no gradient comes: the graph shows float64 alone."""
    step_of(InBlocks(torch.float32, frozen=True).double(), samples(64, torch.float64, at))


def frozen_in_bfloat16(at: int) -> None:
    """A float32 head on a frozen body in bf16."""
    step_of(InBlocks(torch.bfloat16, frozen=True), samples(64, torch.float32, at))


@pytest.mark.parametrize("make", [in_any_order, in_blocks, frozen_in_blocks, frozen_in_bfloat16])
def test_rounding_to_less_than_the_loss_is_no_coupling(make: Callable[[int], None]) -> None:
    """Whether a graph shows it or not; without a second look at least some would be accused."""
    for at in range(10):
        make(at)
    assert accused_without_a_doubt(make, 10) > 0


@pytest.mark.parametrize("size", [1, 2, 7, 24])
def test_whatever_the_size(size: int) -> None:
    """Of micro-batches: of one sample, four are looked at together."""
    for at in range(3):
        step_of(InAnyOrder(torch.float32).double(), samples(25, torch.float64, at), size)
        step_of(InBlocks(torch.float32).double(), samples(25, torch.float64, at), size)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_verify_names_no_cause_for_it(dtype: torch.dtype | None) -> None:
    """A model in float32 is judged in float64, with what it computes in float32 all the same."""
    found = verify(InAnyOrder(dtype), mean, samples(64, torch.float32), 24)
    assert found.exact, str(found)


@pytest.mark.parametrize("model", [InAnyOrder, InBlocks])
@pytest.mark.parametrize("coupling", [3e-2, 1.0])
def test_coupling_beside_it_is_refused(model: Callable[..., nn.Module], coupling: float) -> None:
    """In verify, too."""
    with pytest.raises(CoupledLoss, match="the samples of this batch are coupled"):
        step_of(model(torch.float32, coupling).double(), samples(64, torch.float64))
    found = verify(model(torch.float32, coupling), mean, samples(64, torch.float32), 24)
    assert "coupled-samples" in {cause.kind for cause in found.causes}


class Coupled(nn.Module):
    """A little of a statistic of the batch in each sample, and some float32 inside."""

    def __init__(self, coupling: float, inside: torch.dtype | None = None) -> None:
        super().__init__()
        seed()
        self.coupling, self.inside = coupling, inside
        self.first, self.last = nn.Linear(WIDE, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers, and the mean between."""
        hidden = self.first(x)
        if self.inside is not None:
            hidden = (hidden.to(self.inside) * 1.1).to(x.dtype)
        return self.last(torch.tanh(hidden + self.coupling * hidden.mean(0)))


@pytest.mark.parametrize(
    ("dtype", "inside", "coupling"),
    [
        (torch.float64, None, 1e-6),
        (torch.float64, torch.float32, 1e-6),  # it rounds alike for any number of rows, which is measured
        (torch.float32, None, 0.1),
    ],
)
def test_a_coupling_as_small_as_ever_is_found(dtype: torch.dtype, inside: torch.dtype | None, coupling: float) -> None:
    """A second look takes nothing away where there is no other rounding."""
    with pytest.raises(CoupledLoss):
        step_of(Coupled(coupling, inside).to(dtype), samples(64, dtype))


def test_a_batch_in_less_than_the_model_is_no_excuse() -> None:
    """Numbers that are moved and cast up are not rounded."""
    model = Coupled(1e-6).double()
    batch = samples(64, torch.float32)
    step = BigStep(
        model, sgd(trained(model)), lambda m, b: F.cross_entropy(m(b[0].double()), b[1]), micro_batch_size=24
    )
    with pytest.raises(CoupledLoss):
        step(batch)


def test_what_does_not_repeat_itself_is_not_judged_finer_than_it_does() -> None:
    """Noise as small as the rounding of float32, of whatever origin; not more."""
    for at in range(5):
        step_of(InAnyOrder(None, noise=1e-7).double(), samples(64, torch.float64, at))
    with pytest.raises(CoupledLoss):
        step_of(InAnyOrder(None, noise=0.5).double(), samples(64, torch.float64))


def test_a_second_look_that_fails_is_none() -> None:
    """The accusation stands, and what failed is not told."""
    parts = [Part(1.0, ("mean",), (2.0,), 1e-9)] * 3

    def fail() -> list[Part]:
        raise ValueError

    assert rounding(parts, fail, ()) == 1e-9
    assert rounding(parts, lambda: parts, (fail,)) == 1e-9


def test_what_a_second_look_allows() -> None:
    """The dtype's tolerance at most, and no more than a hundred times what was measured."""

    def parts(*values: float) -> list[Part]:
        return [Part(value, ("mean",), (2.0,), 1e-9) for value in values]

    def low() -> list[Part]:
        torch.ones(2).add(1)  # in float32
        return parts(1.0, 1.0, 1.0)

    found = parts(1.0, 1.0, 1.0)
    assert rounding(found, lambda: found, ()) == 1e-9
    assert rounding(found, low, ()) == 1e-4
    assert rounding(found, low, (lambda: parts(1.0, 1.0, 1.0),)) == 1e-9
    assert rounding(found, low, (lambda: parts(1.0, 1.0, 1.0 + 1e-8),)) == pytest.approx(1e-6)
    assert rounding(found, low, (lambda: parts(1.0, 1.0, 2.0),)) == 1e-4
    assert rounding(found, lambda: parts(1.0, 1.0 + 1e-9, 1.0), (lambda: found,)) == pytest.approx(1e-7)


def test_the_lowest_precision_is_of_what_is_rounded() -> None:
    """Not of what is made, moved or cast up; of what is cast down."""
    table = torch.randn(4, 3)

    def lowest(work: Callable[[], Tensor]) -> torch.dtype | None:
        with Precisions() as precisions:
            work()
        return precisions.lowest

    assert lowest(lambda: torch.cat([table[1:], torch.zeros(2, 3)]).clone().flatten().double()) is None
    assert lowest(lambda: table.double() * 2) == torch.float64
    assert lowest(lambda: table.add(1).double() * 2) == torch.float32
    assert lowest(lambda: table.to(torch.bfloat16).double() * 2) == torch.bfloat16
    assert lowest(lambda: torch.zeros(2, dtype=torch.float16).copy_(table[0, :2])) == torch.float16


class OverTokens(nn.Module):
    """Scores tokens after sums in float32, in blocks that depend on how wide the batch is."""

    def __init__(self, padding: float) -> None:
        super().__init__()
        seed()
        self.padding, self.table, self.last = padding, nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, steps) → (n, steps, 10)."""
        rows = self.table(tokens).float()
        found = torch.zeros_like(rows[:, 0])
        for block in torch.arange(tokens.shape[1]).split(1 + tokens.shape[1] % 3):
            found = found + (rows * (tokens != 0)[..., None])[:, block].sum(1)
        found = found + self.padding * (tokens == 0).sum(1, keepdim=True)
        return self.last(self.table(tokens) + found[:, None].to(self.last.weight.dtype))


@pytest.mark.parametrize("padding", [0.0, 1e-2])
def test_padding_is_judged_to_the_same_rounding(padding: float) -> None:
    """A loss that is another without its padding only by rounding is not accused; one that looks at it is."""
    by = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 10, (8, 40), generator=by)
    lengths = [40, 37, 31, 23, 17, 11, 7, 5]
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    batch = {"tokens": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}
    model = OverTokens(padding).double()
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: F.cross_entropy(m(b["tokens"]).flatten(0, 1), b["labels"].flatten()),
        options=Options(lengths=lambda b: (b["tokens"] != 0).sum(1), token_budget=80),
    )
    if padding:
        with pytest.raises(BatchError, match="counts padding"):
            step(batch)
    else:
        step(batch)


def test_last_bits_that_differ_are_no_leave_for_more() -> None:
    """In float64 they are far below its tolerance: what else the halves differ by is no rounding."""

    def parts(*values: float) -> list[Part]:
        return [Part(value, ("mean",), (2.0,), 1e-9) for value in values]

    found = parts(1.0, 1.0, 1.0)
    assert rounding(found, lambda: parts(1.0, 1.0 + 1e-15, 1.0), (lambda: parts(1.0, 1.0, 2.0),)) == 1e-9
    assert rounding(found, lambda: parts(1.0, 1.0 + 1e-9, 1.0), (lambda: parts(1.0, 1.0, 2.0),)) == 1e-4


def test_padding_in_float64_is_judged_by_how_it_repeats() -> None:
    """Without samples that are there twice, the last bits that do not repeat themselves are no leave for 1e-4."""

    def parts(*values: float) -> list[Part]:
        return [Part(value, ("mean",), (2.0,), 1e-9) for value in values]

    found = parts(1.0, 1.0)
    assert rounding(found, lambda: parts(1.0, 1.0 + 1e-15), ()) == 1e-9
    assert rounding(found, lambda: parts(1.0, 1.0 + 1e-9), ()) == pytest.approx(1e-7)
    assert rounding(found, lambda: parts(1.0, 2.0), ()) == 1e-4
    assert rounding(parts(1.0, 1.0 + 1e-6), lambda: found, ()) == pytest.approx(1e-4, rel=1e-3)


class Restless(nn.Module):
    """Scores tokens in float64, never the same in the last bits, and looks at padding a little."""

    def __init__(self, padding: float) -> None:
        super().__init__()
        seed()
        self.padding, self.table, self.last, self.calls = padding, nn.Embedding(10, 8), nn.Linear(8, 10), 0

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, steps) → (n, steps, 10)."""
        self.calls += 1
        noise = 1 + 1e-15 * (self.calls % 3)
        return self.last(self.table(tokens) + self.padding * (tokens == 0).sum(1)[:, None, None].double()) * noise


@pytest.mark.parametrize("padding", [0.0, 1e-6])
def test_padding_that_counts_little_is_found_where_the_last_bits_differ(padding: float) -> None:
    """As kernels do that add up in any order: in float64 that hides no more than it moves."""
    lengths = [12, 11, 9, 7, 5, 3]
    tokens = torch.randint(1, 10, (len(lengths), 12), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    batch = {"tokens": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}
    model = Restless(padding).double()
    step = BigStep(
        model,
        sgd(trained(model)),
        lambda m, b: F.cross_entropy(m(b["tokens"]).flatten(0, 1), b["labels"].flatten()),
        options=Options(lengths=lambda b: (b["tokens"] != 0).sum(1), token_budget=24),
    )
    if padding:
        with pytest.raises(BatchError, match="counts padding"):
            step(batch)
    else:
        step(batch)
