import torch
from torch.utils.data import DataLoader

from faces import AgeNet, FaceAges


def main(epochs=20, micro=8, steps=16):
    loader = DataLoader(FaceAges(), batch_size=micro, shuffle=True, drop_last=True, num_workers=4)
    if len(loader) % steps != 0:
        raise SystemExit(f"{len(loader)} batches do not divide by {steps}; choose another batch size")
    model = AgeNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        running = torch.zeros((), device="cuda")
        for i, (face, age) in enumerate(loader):
            loss = torch.nn.functional.l1_loss(model(face.cuda()), age.cuda())
            (loss / steps).backward()
            running += loss.detach()
            if (i + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} mae {running.item() / len(loader):.2f}")


if __name__ == "__main__":
    main()
