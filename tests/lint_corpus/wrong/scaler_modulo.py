import torch
from torch.cuda.amp import GradScaler, autocast
from tqdm import tqdm

from kitti import Flow, FlowNetS, epe

ACC = 4
model = FlowNetS().cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
scaler = GradScaler()
loader = torch.utils.data.DataLoader(Flow("train"), batch_size=2, shuffle=True)

for epoch in range(60):
    for i, (a, b, flow) in enumerate(tqdm(loader)):
        with autocast(dtype=torch.float16):
            loss = epe(model(a.cuda(), b.cuda()), flow.cuda()) / ACC
        scaler.scale(loss).backward()

        if (i + 1) % ACC == 0:  # expect: BB103
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)

        scaler.update()  # expect: BB303
