import torch

from pose import HeatmapNet, PoseDataset, heatmap_loss


def train_one_epoch(model, loader, optimizer, scaler, device, accum=4):
    model.train()
    optimizer.zero_grad()
    for i, (img, heat) in enumerate(loader):
        img, heat = img.to(device, non_blocking=True), heat.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = heatmap_loss(model(img), heat)
        scaler.scale(loss / accum).backward()
        scaler.step(optimizer)  # expect: BB102
        if (i + 1) % accum == 0:
            scaler.update()
            optimizer.zero_grad()


def main():
    model = HeatmapNet(17).cuda()
    loader = torch.utils.data.DataLoader(PoseDataset(), batch_size=12, shuffle=True, num_workers=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(210):
        train_one_epoch(model, loader, optimizer, scaler, "cuda")
