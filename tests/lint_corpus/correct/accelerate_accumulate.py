import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from paws import PawsDataset, TextClassifier


def training_function(config):
    accelerator = Accelerator(gradient_accumulation_steps=config["gradient_accumulation_steps"])
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    train_dl = DataLoader(PawsDataset("train"), batch_size=16, shuffle=True)
    eval_dl = DataLoader(PawsDataset("dev"), batch_size=32)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=config["updates"])
    loss_function = torch.nn.CrossEntropyLoss()

    model, optimizer, train_dl, eval_dl, scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in train_dl:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        hits = 0
        for inputs, targets in eval_dl:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            hits += (predictions == targets).sum()
        accelerator.print(f"epoch {epoch}: {hits / len(eval_dl.dataset):.3f}")
