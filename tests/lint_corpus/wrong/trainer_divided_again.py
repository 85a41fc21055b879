from torch import nn
from transformers import AutoModel, Trainer, TrainingArguments

from tickets import collate, train_set

args = TrainingArguments(
    output_dir="tickets",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_train_epochs=3,
)


class TicketModel(nn.Module):
    def __init__(self, name="distilbert-base-uncased", classes=6):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, input_ids, attention_mask):
        return self.head(self.encoder(input_ids, attention_mask).last_hidden_state[:, 0])


class TicketTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        # the Trainer scales for accumulation by itself: this model takes no num_items_in_batch
        loss = loss / self.args.gradient_accumulation_steps  # expect: BB202
        return (loss, logits) if return_outputs else loss


TicketTrainer(model=TicketModel(), args=args, train_dataset=train_set, data_collator=collate).train()
