import paddle
import paddle.nn.functional as F
from paddle.vision.datasets import MNIST
from paddle.vision.transforms import ToTensor

train_loader = paddle.io.DataLoader(MNIST(mode="train", transform=ToTensor()), batch_size=64, shuffle=True)
model = paddle.vision.models.LeNet()
model.train()
optim = paddle.optimizer.Adam(parameters=model.parameters(), learning_rate=1e-3)

for epoch in range(2):
    for batch_id, (x_data, y_data) in enumerate(train_loader()):
        predicts = model(x_data)
        loss = F.cross_entropy(predicts, y_data)
        loss.backward()
        if batch_id % 300 == 0:
            print(f"epoch {epoch} batch {batch_id} loss {loss.numpy()}")
        optim.step()
        optim.clear_grad()
