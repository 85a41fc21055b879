import argparse

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from unet import UNet, loaders


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--accum-steps", type=int, default=4, help="batches per optimizer step")
    return p.parse_args()


def main():
    args = get_args()
    model = UNet(3, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, val = loaders()
    for epoch in range(args.epochs):
        model.train()
        for image, mask in train:
            pred = model(image.cuda())
            loss = bce(pred, mask.cuda()) / args.accum_steps
            loss.backward()
            optimizer.step()  # expect: BB102
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            val_loss = sum(bce(model(x.cuda()), m.cuda()) for x, m in val) / len(val)
        print(f"epoch {epoch}: val {val_loss:.4f}")


if __name__ == "__main__":
    main()
