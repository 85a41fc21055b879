from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ProgressBar
from ignite.metrics import Accuracy, Loss
from torch import nn, optim

from birdsong import model, train_loader, val_loader

criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
trainer = create_supervised_trainer(model, optimizer, criterion, device="cuda", gradient_accumulation_steps=4)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(criterion)}, device="cuda")
ProgressBar().attach(trainer, output_transform=lambda x: {"loss": x})


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    evaluator.run(val_loader)
    print(engine.state.epoch, evaluator.state.metrics)


trainer.run(train_loader, max_epochs=20)
