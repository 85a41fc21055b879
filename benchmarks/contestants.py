"""One epoch of a case with each contestant, written the way its own documentation writes it.

Every function takes a case and returns the trained model. Each framework is imported where it is used, since all of
them are slow to import and none is needed by the others.
"""

import tempfile
from collections.abc import Callable

from torch import Tensor, nn

from benchmarks.cases import Batch, Case
from benchmarks.silence import silence
from bigbatch import Accumulator, BigStep

Contestant = Callable[[Case], nn.Module]


def true_big_batch(case: Case) -> nn.Module:
    """Train on the batches that were wanted: what everyone else is measured against."""
    model = case.fresh_model()
    optimizer = case.optimizer(model)
    for batch in case.big_batches():
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()
    return model


def textbook_loop(case: Case) -> nn.Module:
    """Divide by `steps`, step every `steps`; the tail is never stepped."""
    model = case.fresh_model()
    optimizer = case.optimizer(model)
    optimizer.zero_grad()
    for index, batch in enumerate(case.micro_batches()):
        loss = case.loss(model, batch) / case.steps
        loss.backward()
        if (index + 1) % case.steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def accelerate(case: Case) -> nn.Module:
    """Train with `accelerator.accumulate` around each micro-batch, everything prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.steps)
    bare = case.fresh_model()
    model, optimizer, loader = accelerator.prepare(bare, case.optimizer(bare), case.micro_batches())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return bare


def lightning(case: Case) -> nn.Module:
    """`Trainer(accumulate_grad_batches=...)` on a module with a `training_step`."""
    from lightning.pytorch import LightningModule, Trainer

    with silence("lightning.pytorch", "lightning.fabric"):

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = case.fresh_model()

            def training_step(self, batch: Batch) -> Tensor:
                return case.loss(self.model, batch)

            def configure_optimizers(self):  # type: ignore[no-untyped-def]  # noqa: ANN202  (a union of a dozen)
                return case.optimizer(self.model)

        module = Module()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=case.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, case.micro_batches())
    return module.model


def hf_trainer(case: Case) -> nn.Module:
    """`transformers.Trainer` on a model of one's own, with `compute_loss` overridden as its docstring says."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PrinterCallback, Trainer, TrainingArguments

    with silence("transformers", "accelerate"), tempfile.TemporaryDirectory() as folder:

        class OwnLoss(Trainer):
            # A mean per micro-batch, so Trainer is told that it has to do the scaling.
            loss_is_scaled_for_ga = False

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG002, FBT002
                loss = case.loss(model, inputs)
                return (loss, None) if return_outputs else loss

            def get_train_dataloader(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
                # Trainer shuffles by default; order matters here.
                return self.accelerator.prepare(case.micro_batches())

        model = case.fresh_model()
        optimizer = case.optimizer(model)
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=case.steps,
            max_grad_norm=0.0,  # its default of 1.0 would clip
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        constant = LambdaLR(optimizer, lambda _: 1.0)
        trainer = OwnLoss(
            model, arguments, train_dataset=case.micro_batches().dataset, optimizers=(optimizer, constant)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


def accumulator(case: Case) -> nn.Module:
    """Train with the three lines; raises one of `bigbatch.errors` where they cannot be exact."""
    model = case.fresh_model()
    window = Accumulator(model, case.optimizer(model), steps=case.steps, counts=case.counts)
    for batch in window.over(case.micro_batches()):
        window.backward(case.loss(model, batch))
    return model


def big_step(case: Case) -> nn.Module:
    """Train with the two lines, on the batches that were wanted, cut into the same micro-batches."""
    model = case.fresh_model()
    step = BigStep(model, case.optimizer(model), case.meeting or case.loss, micro_batch_size=case.micro_batch)
    for batch in case.big_batches():
        step(batch)
    return model


CONTESTANTS: dict[str, Contestant] = {
    "textbook loop": textbook_loop,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "HF Trainer": hf_trainer,
    "Accumulator": accumulator,
    "BigStep": big_step,
}
