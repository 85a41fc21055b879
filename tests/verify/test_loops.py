"""Loops written without this library, and real frameworks: right ones are proved, wrong ones are told what is wrong."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.silence import silence
from bigbatch import Accumulator, verify
from tests.support import defects
from tests.support.defects import Batch, by_samples, mean, network, samples

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from accelerate import Accelerator
from lightning.fabric import Fabric

from examples import verify_accelerate, verify_hand_loop, verify_hf_trainer, verify_lightning

EVEN, UNEVEN = 12, 11
RIGHT = by_samples(mean)
CLIPS = "The loop clips its gradient; what was compared is the gradient before that."


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Frameworks advise on workers, batch sizes and precision."""
    torch.manual_seed(0)
    with silence("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        yield


FRAMEWORKS: dict[str, Callable[[Any, list[Any]], None]] = {
    "a hand-written loop": verify_hand_loop.textbook,
    "Accelerate": verify_accelerate.train_window,
    "Lightning's Trainer": verify_lightning.with_trainer,
    "Lightning Fabric": verify_lightning.with_fabric,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_exact_for_equal_micro_batches_alone(name: str) -> None:
    """What its optimizer steps with is judged, wherever that is; a short micro-batch weighs as much as a full one."""
    found = verify(network(), mean, samples(EVEN), 4, train_window=FRAMEWORKS[name])
    assert found.exact, str(found)
    assert not found.causes
    found = verify(network(), mean, samples(UNEVEN), 4, train_window=FRAMEWORKS[name])
    assert [cause.kind for cause in found.causes] == ["wrong-count"]
    assert "weighted 0.333 : 0.333 : 0.333; the big batch weights them 0.364 : 0.364 : 0.273" in found.causes[0].found
    assert "in proportion to len(batch[0])" in found.causes[0].found


def test_trainer_counts_the_tokens_of_a_window_where_it_knows_that_labels_are_shifted() -> None:
    """Exact with a Llama; a GPT-2's gradient is too small, by the first tokens that it counts as well."""
    batch = verify_hf_trainer.samples(10)
    llama = verify(verify_hf_trainer.llama(), None, batch, 4, train_window=verify_hf_trainer.train_window)
    assert llama.exact, str(llama)
    gpt2 = verify(verify_hf_trainer.gpt2(), None, batch, 4, train_window=verify_hf_trainer.train_window)
    assert [cause.kind for cause in gpt2.causes] == ["wrong-scale"], str(gpt2)
    tokens, predicted = (int((labels != -100).sum()) for labels in (batch["labels"], batch["labels"][..., 1:]))
    assert f"the big batch's, as if divided by {tokens}, (batch['labels'] != -100).sum()" in gpt2.causes[0].found
    assert f"instead of {predicted}, (batch['labels'][..., 1:] != -100).sum()" in gpt2.causes[0].found


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """As a loop makes it."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accelerate_and_a_division(model: nn.Module, micro_batches: list[Batch]) -> None:
    """A division of one's own that was taken over into `accumulate`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(micro_batches))
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    for batch in micro_batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(mean(prepared, batch) / len(micro_batches))
            optimizer.step()
            optimizer.zero_grad()


def fabric_without_a_division(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Fabric leaves it to its user."""
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, optimizer_of(model))
    for batch in micro_batches:
        fabric.backward(mean(wrapped, batch))
    optimizer.step()


def fabric_clips(model: nn.Module, micro_batches: list[Batch]) -> None:
    """By value, once."""
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, optimizer_of(model))
    RIGHT(wrapped, micro_batches)
    fabric.clip_gradients(wrapped, optimizer, clip_val=1e-3)
    optimizer.step()


def accumulator_of_ours(model: nn.Module, micro_batches: list[Batch]) -> None:
    """This library's other entrance is a loop like any other."""
    accumulator = Accumulator(model, torch.optim.AdamW(model.parameters()), steps=len(micro_batches))
    for batch in accumulator.over(micro_batches):
        accumulator.backward(mean(model, batch))


def unscaled_by_the_step(model: nn.Module, micro_batches: list[Batch]) -> None:
    """A scaler takes its factor out before the optimizer's step."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), optimizer_of(model)
    by_samples(lambda model, batch: scaler.scale(mean(model, batch)))(model, micro_batches)
    scaler.step(optimizer)
    scaler.update()


def clip_another(_: object, __: object) -> None:
    """Clip and step another model: it goes on as it is."""
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([other], lr=0.1)
    other.grad = torch.full((3,), 10.0)
    nn.utils.clip_grad_norm_([other], 1.0)
    optimizer.step()
    assert float(other.grad.norm()) == pytest.approx(1.0, rel=1e-3)
    assert float(other.detach().max()) < 1


def norm(parameters: Any, most: float) -> Any:
    """Clip by norm, by torch's function as it is now."""
    return nn.utils.clip_grad_norm_(parameters, most)


def both(model: Any, sgd: torch.optim.Optimizer) -> None:
    """Clip by value and by norm, each of them once."""
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    norm(model.parameters(), 1e-3)
    sgd.step()


part_by_part = by_samples(end=lambda model, _: [norm(part.parameters(), 1e-3) for part in (model[0], model[-1])])
at_nothing = defects.textbook(after=lambda model, _: norm(model.parameters(), 1e9))  # left out, it changes nothing
step_twice = by_samples(end=lambda _, sgd: (sgd.step(), sgd.step()))
# The loop, the model's middle, the kinds that are found and no others, and a part of the text.
LOOPS: list[tuple[Any, tuple[nn.Module, ...], set[str], str]] = [
    (verify_hand_loop.by_samples, (), set(), "Exact"),
    (accelerate_and_a_division, (), {"wrong-scale", "wrong-count"}, ""),
    (fabric_without_a_division, (), {"wrong-scale", "wrong-count"}, ""),
    (fabric_clips, (), set(), CLIPS),
    (verify_lightning.with_trainer, (nn.BatchNorm1d(8),), {"batch-norm", "wrong-count"}, ""),
    (accumulator_of_ours, (), set(), "Exact"),
    (accumulator_of_ours, (nn.Dropout(0.2),), {"randomness"}, ""),
    (unscaled_by_the_step, (), set(), "Exact"),
    (step_twice, (), {"stepped-inside"}, "stepped 2 times in the window: once with the right gradient"),
    (by_samples(after=defects.step), (), {"stepped-inside"}, "stepped 3 times in the window"),
    (part_by_part, (), set(), CLIPS),
    (by_samples(end=both), (), set(), CLIPS),
    (at_nothing, (), {"wrong-count"}, ""),
    (by_samples(after=clip_another), (), set(), "Exact"),
]


@pytest.mark.parametrize(("loop", "middle", "expected", "said"), LOOPS)
def test_what_a_loop_does_is_judged(loop: Any, middle: tuple[nn.Module, ...], expected: set[str], said: str) -> None:
    """Right ones are exact, and of wrong ones the causes are named, and nothing else."""
    found = verify(network(*middle), mean, samples(UNEVEN), 4, train_window=loop)
    assert {cause.kind for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected)
    assert said in str(found)
    assert said != "Exact" or CLIPS not in found.notes


@pytest.mark.parametrize("example", [verify_hand_loop, verify_accelerate, verify_lightning, verify_hf_trainer])
def test_the_examples_run(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prints what it proved, or what is wrong."""
    example.main()
    printed = capsys.readouterr().out
    assert "Exact: the gradient of" in printed or "Not exact: the gradient of" in printed
    assert "not found" not in printed
