import torch.nn.functional as F
from transformers import Trainer, TrainingArguments


class SmoothedTrainer(Trainer):
    """Label smoothing of our own. The Trainer tells how many targets the whole window has."""

    def __init__(self, *args, smoothing=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=-100, label_smoothing=self.smoothing, reduction="sum")
        if num_items_in_batch is None:
            num_items_in_batch = (targets != -100).sum()
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def make(model, train, collator):
    args = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=8, num_train_epochs=2)
    return SmoothedTrainer(model=model, args=args, train_dataset=train, data_collator=collator)
