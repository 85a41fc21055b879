import torch
from torchvision import models

from flowers import flower_loader

model = models.vgg16(weights=models.VGG16_Weights.DEFAULT)
model.classifier[6] = torch.nn.Linear(4096, 102)
optimizer = torch.optim.SGD(model.classifier.parameters(), lr=1e-3, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
n_acc = 4

for epoch in range(5):
    for window in flower_loader(batch_size=16).windows(n_acc):
        optimizer.zero_grad
        for images, labels in window:
            loss = criterion(model(images), labels) / len(window)
            loss.backward()
        optimizer.step()  # expect: BB106
