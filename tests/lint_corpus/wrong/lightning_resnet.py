import lightning as L
import torch
import torch.nn.functional as F
import torchvision


class Skin(L.LightningModule):
    def __init__(self, classes=7):
        super().__init__()
        self.net = torchvision.models.resnet34(num_classes=classes)  # expect: BB601

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def main(loader):
    trainer = L.Trainer(max_epochs=20, accumulate_grad_batches=8, precision="16-mixed")
    trainer.fit(Skin(), loader)
