"""Hugging Face's Trainer, one update at a time, so that it can be timed in rounds with others.

Trainer owns its loop. Here `train()` runs on a thread of its own and waits in `on_step_end` until it is asked for the
next update; what is timed is everything from one `on_step_end` to the next: its loader, its micro-steps, its clipping.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler

from benchmarks.racing import Contestant

Sample = dict[str, Tensor]
Collate = Callable[[list[Sample]], Sample]


@dataclass(frozen=True)
class Samples(Dataset[Sample]):
    """Some samples over and over, in their order, so that every window holds the same number of them."""

    samples: list[Sample]

    def __len__(self) -> int:
        return len(self.samples) * (1_000_000 // len(self.samples))

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]


def trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    *,
    micro_batch: int,
    steps: int,
    device: str,
    collate: Collate | None = None,
) -> Contestant:
    """Set up a Trainer in bf16 autocast with clipping, as a careful user does: fused AdamW, no logging, no saving."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(Trainer):
        """Trainer on the samples in their order; it adds the losses of a window up where somebody wants to see them."""

        window_loss: Tensor | None = None
        watched = False

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *positional: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*positional, **named)
            if self.watched:
                self.window_loss = loss if self.window_loss is None else self.window_loss + loss
            return loss

    SharedState.clear()
    arguments = TrainingArguments(
        output_dir="/tmp/bigbatch-trainer",  # noqa: S108  (nothing is saved)
        use_cpu=not device.startswith("cuda"),
        bf16=True,
        max_steps=1_000_000,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=steps,
        max_grad_norm=1.0,
        # Its check for a NaN waits for the device after every micro-batch; a tuned Trainer goes without.
        logging_nan_inf_filter=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    built = InOrder(
        model,
        arguments,
        train_dataset=Samples(samples),
        data_collator=collate,
        optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
    )
    built.remove_callback(PrinterCallback)
    return _stepped(model, built)


def _stepped(model: nn.Module, built: Any) -> Contestant:
    from transformers import TrainerCallback

    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    stop = threading.Event()
    failed: list[BaseException] = []
    state = SharedState()

    class Wait(TrainerCallback):
        def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
            done.release()
            asked.acquire()
            control.should_training_stop = stop.is_set()

    def train() -> None:
        asked.acquire()
        try:
            if not stop.is_set():
                built.train()
        except BaseException as error:  # noqa: BLE001  (raised again on the thread that asked)
            failed.append(error)
        done.release()

    built.add_callback(Wait())
    thread = threading.Thread(target=train, daemon=True)
    thread.start()

    def update(number: int) -> Tensor | None:
        built.watched, built.window_loss = number == 0, None
        with state.own():
            asked.release()
            done.acquire()
        if failed:
            raise failed.pop()
        return built.window_loss

    def close() -> None:
        stop.set()
        with state.own():
            asked.release()
            thread.join()
        failed.clear()

    return Contestant(model, update, close)


class SharedState:
    """What Accelerate keeps once per process: one contestant's steps would be every contestant's.

    The state that is there when this is made belongs to its maker; `own()` brings it back for a while.
    """

    def __init__(self) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        # Each of its state objects is a view of one dictionary of its class.
        self._live: list[dict[str, Any]] = [
            kind._shared_state  # noqa: SLF001  (it has no other name)
            for kind in (PartialState, AcceleratorState, GradientState)
        ]
        self._mine = [dict(live) for live in self._live]

    @staticmethod
    def clear() -> None:
        """Start afresh, before a contestant is built: Accelerate keeps the first precision that it was given."""
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for kind in (PartialState, AcceleratorState, GradientState):
            kind._shared_state.clear()  # noqa: SLF001  (as above)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Swap the maker's state in, and out again with what has become of it."""
        theirs = [dict(live) for live in self._live]
        self._put(self._mine)
        try:
            yield
        finally:
            self._mine = [dict(live) for live in self._live]
            self._put(theirs)

    def _put(self, states: list[dict[str, Any]]) -> None:
        for live, state in zip(self._live, states, strict=True):
            live.clear()
            live.update(state)
