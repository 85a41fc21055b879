"""Loops written without this library, and real frameworks: right ones are proved, wrong ones hear what is wrong."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.silence import silence
from bigbatch import Accumulator, verify
from tests.support.defects import Batch, by_samples, mean, network, samples

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from examples import verify_accelerate, verify_hand_loop, verify_hf_trainer, verify_lightning

EVEN, UNEVEN = 12, 11


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Frameworks advise on workers, batch sizes and precision."""
    with silence("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        yield


FRAMEWORKS: dict[str, Callable[[Any, list[Any]], None]] = {
    "a hand-written loop": verify_hand_loop.textbook,
    "Accelerate": verify_accelerate.train_window,
    "Lightning's Trainer": verify_lightning.with_trainer,
    "Lightning Fabric": verify_lightning.with_fabric,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_exact_for_equal_micro_batches(name: str) -> None:
    """What its optimizer steps with is the big batch's gradient, wherever in the loop that is."""
    torch.manual_seed(0)
    found = verify(network(), mean, samples(EVEN), 4, train_window=FRAMEWORKS[name])
    assert found.exact, str(found)
    assert not found.causes


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_weighs_a_short_micro_batch_as_a_full_one(name: str) -> None:
    """And is told so, with the weights that it used and should have used."""
    torch.manual_seed(0)
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=FRAMEWORKS[name])
    assert [cause.kind for cause in found.causes] == ["wrong-count"]
    assert "weighted 0.333 : 0.333 : 0.333; the big batch weights them 0.364 : 0.364 : 0.273" in found.causes[0].found
    assert "in proportion to len(batch[0])" in found.causes[0].found


def test_a_hand_written_loop_that_weighs_by_samples_is_exact() -> None:
    """The second one of the example."""
    torch.manual_seed(0)
    assert verify(network(), mean, samples(UNEVEN), 4, train_window=verify_hand_loop.by_samples).exact


def test_trainer_counts_the_tokens_of_a_window_where_it_knows_that_labels_are_shifted() -> None:
    """Exact with a Llama; a GPT-2's gradient is too small, by the first tokens that it counts as well."""
    torch.manual_seed(0)
    batch = verify_hf_trainer.samples(10)
    llama = verify(verify_hf_trainer.llama(), None, batch, 4, train_window=verify_hf_trainer.train_window)
    assert llama.exact, str(llama)
    gpt2 = verify(verify_hf_trainer.gpt2(), None, batch, 4, train_window=verify_hf_trainer.train_window)
    assert [cause.kind for cause in gpt2.causes] == ["wrong-scale"], str(gpt2)
    tokens, predicted = (int((labels != -100).sum()) for labels in (batch["labels"], batch["labels"][..., 1:]))
    assert f"the big batch's, as if divided by {tokens}, (batch['labels'] != -100).sum()" in gpt2.causes[0].found
    assert f"instead of {predicted}, (batch['labels'][..., 1:] != -100).sum()" in gpt2.causes[0].found


def test_accelerate_around_a_division_of_ones_own_divides_twice() -> None:
    """As people write who take the division over into `accumulate`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(micro_batches))
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in micro_batches:
            with accelerator.accumulate(prepared):
                accelerator.backward(mean(prepared, batch) / len(micro_batches))
                optimizer.step()
                optimizer.zero_grad()

    torch.manual_seed(0)
    found = verify(network(), mean, samples(EVEN), 4, train_window=train_window)
    assert [cause.kind for cause in found.causes] == ["wrong-scale"]


def test_fabric_that_forgets_the_division() -> None:
    """Fabric leaves it to its user."""
    from lightning.fabric import Fabric

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in micro_batches:
            fabric.backward(mean(wrapped, batch))
        optimizer.step()

    torch.manual_seed(0)
    found = verify(network(), mean, samples(EVEN), 4, train_window=train_window)
    assert [cause.kind for cause in found.causes] == ["wrong-scale"]


def test_lightning_with_batch_norm_and_a_short_micro_batch() -> None:
    """Both are found through its Trainer, which puts the model into training mode itself."""
    torch.manual_seed(0)
    model = network(nn.BatchNorm1d(8))
    found = verify(model, mean, samples(UNEVEN), 4, train_window=verify_lightning.with_trainer)
    assert {cause.kind for cause in found.causes} == {"batch-norm", "wrong-count"}, str(found)


def test_an_accumulator_is_proved() -> None:
    """This library's other entrance is a loop like any other; its random numbers can be turned off, too."""

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), steps=len(micro_batches))
        for batch in accumulator.over(micro_batches):
            accumulator.backward(mean(model, batch))

    torch.manual_seed(0)
    assert verify(network(), mean, samples(UNEVEN), 4, train_window=train_window).exact
    dropping = verify(network(nn.Dropout(0.2)), mean, samples(UNEVEN), 4, train_window=train_window)
    assert [cause.kind for cause in dropping.causes] == ["randomness"]


def test_a_scaler_is_unscaled_before_its_step() -> None:
    """What the optimizer steps with is what counts."""

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            scaled: Tensor = scaler.scale(mean(model, batch) * len(batch[1]) / total)
            scaled.backward()
        scaler.step(optimizer)
        scaler.update()

    torch.manual_seed(0)
    assert verify(network(), mean, samples(UNEVEN), 4, train_window=train_window).exact


def stepping_twice(model: nn.Module, micro_batches: list[Batch]) -> None:
    """The right gradient, stepped with once too often."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_samples(mean)(model, micro_batches)
    optimizer.step()
    optimizer.step()


def test_a_second_step_with_the_right_gradient_is_no_proof() -> None:
    """The first step had it, so the difference is none; the update is twice the big batch's all the same."""
    torch.manual_seed(0)
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=stepping_twice)
    assert not found.exact
    assert [cause.kind for cause in found.causes] == ["stepped-inside"]
    assert "stepped 2 times in the window: once with the right gradient, and on" in found.causes[0].found


def test_steps_without_clearing_are_steps_and_nothing_else() -> None:
    """A gradient that stays for the next step is not counted again, so no weights look wrong."""

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            (mean(model, batch) * len(batch[1]) / total).backward()
            optimizer.step()

    torch.manual_seed(0)
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=train_window)
    assert [cause.kind for cause in found.causes] == ["stepped-inside"], str(found)


def test_parts_of_a_model_may_be_clipped_one_by_one() -> None:
    """Each once, before the step: that is not inside of the window."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by_samples(mean)(model, micro_batches)
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[-1].parameters(), 1e-3)
        optimizer.step()

    torch.manual_seed(0)
    assert verify(network(), mean, samples(UNEVEN), 4, train_window=train_window).exact


def test_clipping_at_a_norm_that_is_never_reached_is_not_named() -> None:
    """Left out, it changes nothing: the cause is another."""

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (mean(model, batch) / len(micro_batches)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)

    torch.manual_seed(0)
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=train_window)
    assert [cause.kind for cause in found.causes] == ["wrong-count"], str(found)


def test_a_loop_that_clips_by_value_is_compared_before_that() -> None:
    """By hand and in frameworks, whoever imported the function."""
    from lightning.fabric import Fabric

    def by_torch(model: nn.Module, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by_samples(mean)(model, micro_batches)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # each of them once is no clipping inside
        optimizer.step()

    def by_fabric(model: nn.Module, micro_batches: list[Batch]) -> None:
        fabric = Fabric(accelerator="cpu", devices=1)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        by_samples(mean)(wrapped, micro_batches)
        fabric.clip_gradients(wrapped, optimizer, clip_val=1e-3)
        optimizer.step()

    torch.manual_seed(0)
    for train_window in (by_torch, by_fabric):
        found = verify(network(), mean, samples(UNEVEN), 4, train_window=train_window)
        assert found.exact, str(found)
        assert found.notes == ("The loop clips its gradient; what was compared is the gradient before that.",)


def test_a_loop_finds_no_hooks_on_its_parameters() -> None:
    """Training may take another path where there are some, and the proof would be of that one."""
    seen: list[Any] = []

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        seen.extend(getattr(p, name, None) for p in model.parameters() for name in names)
        by_samples(mean)(model, micro_batches)

    assert verify(network(), mean, samples(UNEVEN), 4, train_window=train_window).exact
    assert seen
    assert not any(seen)


def test_clipping_of_another_model_goes_on() -> None:
    """It is done as asked, though that of the model in question is left out."""
    other = nn.Parameter(torch.zeros(3))
    norms = []

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        other.grad = torch.full((3,), 10.0)
        nn.utils.clip_grad_norm_([other], 1.0)
        norms.append(float(other.grad.norm()))

    torch.manual_seed(0)
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=train_window)
    assert found.exact
    assert not found.notes
    assert norms == pytest.approx([1.0] * len(norms), rel=1e-3)


def test_another_thread_trains_on() -> None:
    """Its optimizer keeps its state while a window is watched."""
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([other], lr=0.1, momentum=0.9)

    def step() -> None:
        other.grad = torch.ones(3)
        optimizer.step()

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        by_samples(mean)(model, micro_batches)

    torch.manual_seed(0)
    assert verify(network(), mean, samples(UNEVEN), 4, train_window=train_window).exact
    assert optimizer.state[other]["momentum_buffer"][0] > 1  # of several steps


@pytest.mark.parametrize("example", [verify_hand_loop, verify_accelerate, verify_lightning, verify_hf_trainer])
def test_the_examples_run(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prints what it proved, or what is wrong."""
    example.main()
    printed = capsys.readouterr().out
    assert "Exact: the gradient of" in printed or "Not exact: the gradient of" in printed
    assert "not found" not in printed
