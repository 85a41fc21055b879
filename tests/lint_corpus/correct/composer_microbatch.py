import composer
import torch
from composer.models import HuggingFaceModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from imdb import make_dataloaders

name = "bert-base-uncased"
net = HuggingFaceModel(
    AutoModelForSequenceClassification.from_pretrained(name), tokenizer=AutoTokenizer.from_pretrained(name)
)
train_dl, eval_dl = make_dataloaders(batch_size=256)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-5)
trainer = composer.Trainer(
    model=net,
    train_dataloader=train_dl,
    eval_dataloader=eval_dl,
    optimizers=optimizer,
    schedulers=composer.optim.LinearWithWarmupScheduler(t_warmup="100ba"),
    max_duration="3ep",
    device_train_microbatch_size="auto",
    precision="amp_bf16",
)
trainer.fit()
