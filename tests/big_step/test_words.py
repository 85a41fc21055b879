"""What `BigStep` says and refuses in its own words, and what it takes from its arguments."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import BigStep, Options, counted, errors
from bigbatch.batch.packing import pack
from bigbatch.options import checked_size


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that every split adds up to."""
    loss: Tensor = model(x).square().mean()
    return loss


def step_with(loss_fn: Any = mean_square, **named: Any) -> BigStep:
    """A step of a small model."""
    model = nn.Linear(4, 1)
    return BigStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **named)


def test_a_list_of_samples_without_collate_is_refused() -> None:
    """Their features are no samples; collated lists and lists of tensors are batches."""
    with pytest.raises(errors.BatchError, match=r"a list of 8 samples(.|\n)*Options\(collate="):
        step_with()([(torch.randn(4), 1)] * 8)
    with pytest.raises(errors.BatchError, match="a list of 8 samples"):
        step_with()([{"x": torch.randn(4), "y": torch.tensor(1)}] * 8)
    pairs = [[torch.randn(8, 4), torch.randn(8, 4)], [torch.randn(8, 4), torch.randn(8, 4)]]
    assert step_with(lambda model, batch: mean_square(model, batch[0][0]))(pairs).micro_batches == 1


def test_packed_micro_batches_keep_to_the_size_that_was_given() -> None:
    """`micro_batch_size` is the most samples at once, also with lengths."""
    assert [len(group) for group, _ in pack([3] * 10, budget=100, most=4)] in ([4, 4, 2], [4, 3, 3])
    model = nn.Linear(1, 1)
    step = BigStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch["x"][..., None]).square().sum(),
        micro_batch_size=4,
        options=Options(lengths=lambda batch: [3] * len(batch["x"]), token_budget=1000),
    )
    assert step({"x": torch.randn(10, 3)}).micro_batches == 3


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda _model, _x: None, "the loss must be a tensor; found NoneType"),
        (lambda model, x: model(x).sum() / 3, r"return counted\(loss, n\)"),
        (lambda model, x: model(x).square().mean().sqrt(), r"return counted\(loss, n\)"),
    ],
)
def test_refused_losses_speak_of_loss_fn(returned: Any, said: str) -> None:
    """Nobody who uses BigStep has an accumulator."""
    with pytest.raises(errors.LossError, match=said) as caught:
        step_with(returned, micro_batch_size=2)(torch.randn(4, 4))
    assert "accumulator" not in str(caught.value)


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
        return mean_square(model, x)


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("counts", errors.SeveralCounts, "(?s)the counts in advance came to .*it is called twice for the same sam"),
        ("terms", errors.SeveralCounts, "(?s)there are 2 counts in advance, .*a loss_fn with the same terms"),
        (
            "zero",
            errors.WindowDisturbed,
            "(?s)not by this library: 2 were set to None.*a loss_fn that returns the loss",
        ),
        ("step", errors.WindowDisturbed, r"(?s)optimizer.step\(\) was called.*the step is made when all of the batch"),
        ("freeze", errors.WindowDisturbed, "(?s)was frozen inside a window.*Freeze, unfreeze and cast between"),
    ],
)
def test_what_is_found_at_the_end_of_a_window_speaks_of_loss_fn(
    what: str, error: type[errors.BigBatchError], said: str
) -> None:
    """Also where it is not the loss that is refused; all is as before."""
    loss_fn = Interfering(what)
    step = BigStep(loss_fn.model, loss_fn.optimizer, loss_fn, micro_batch_size=2, options=Options(check=False))
    with pytest.raises(error, match=said) as caught:
        step(torch.randn(8, 4))
    for word in ("accumulator", "Accumulator", "counts=", "`over`"):
        assert word not in str(caught.value)
    assert all(p.grad is None for p in loss_fn.model.parameters())


def test_refused_arguments_speak_of_big_step() -> None:
    """Also where the check is shared with the other entrance."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.ConfigurationError, match=r"model must be an nn.Module") as caught:
        BigStep(optimizer, model, mean_square)  # type: ignore[arg-type]
    assert "Accumulator" not in str(caught.value)


def test_micro_batch_statistics_need_a_size() -> None:
    """The result would depend on how much memory there is."""
    with pytest.raises(errors.ConfigurationError, match="the result depend on the size"):
        step_with(options=Options(batch_norm="micro"))
    assert step_with(micro_batch_size=2, options=Options(batch_norm="micro"))(torch.randn(4, 4)).micro_batches == 2


def test_a_budget_that_the_process_itself_fills_is_explained() -> None:
    """On a CPU, code and libraries count, too."""
    with pytest.raises(errors.OutOfMemory, match=r"This process holds .* its code and libraries included"):
        step_with(memory="2MiB")(torch.randn(4, 4))


def test_a_graph_and_packing_by_a_function_are_refused_together() -> None:
    """A graph serves shapes that come again, and `collate` makes its own."""
    with pytest.raises(errors.ConfigurationError, match="serves micro-batches whose shapes come again"):
        Options(cuda_graph=True, lengths=len, collate=list)


SCRIPT = """
import torch
from bigbatch import Accumulator
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
accumulator = Accumulator(model, optimizer, steps=1, scheduler=scheduler)
def main():
    for _ in range(2):
        accumulator.backward(model(torch.ones(3, 2)).mean())
        scheduler.step()
main()
"""


def test_a_scheduler_stepped_by_hand_in_a_script_is_warned_of() -> None:
    """A script has no package: finding the line to blame must not fail there."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "scheduler" in done.stderr


@pytest.mark.parametrize(
    ("options", "size", "instead"),
    [
        (Options(), "auto", "BigStep(..., micro_batch_size=8)"),
        (Options(lengths="attention_mask"), 8, "no lengths="),
        (Options(cuda_graph=True), 8, "no cuda_graph=True"),
    ],
    ids=lambda value: str(value)[:7],
)
def test_what_shards_cannot_have_is_named(options: Options, size: object, instead: str) -> None:
    """With what to type in its place, and nothing else."""
    with pytest.raises(errors.ConfigurationError) as error:
        checked_size(size, options, torch.device("cuda"), sharded=True)
    assert str(error.value).endswith(f".\nUse: {instead}")
    assert checked_size(8, Options(), torch.device("cpu"), sharded=True) == 8
