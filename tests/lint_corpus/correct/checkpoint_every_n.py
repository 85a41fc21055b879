import torch
import torch.nn.functional as F

from segmentation import make_loader, make_model

SAVE_STEPS, LOG_STEPS, EMA_STEPS = 1000, 50, 4

model = make_model().cuda()
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = make_loader(batch_size=32)
running, global_step = 0.0, 0

for epoch in range(100):
    for image, mask in loader:
        loss = F.cross_entropy(model(image.cuda()), mask.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() / LOG_STEPS
        if global_step % EMA_STEPS == 0:
            ema.update_parameters(model)
        if global_step % LOG_STEPS == 0:
            print(global_step, running)
            running = 0.0
        if global_step % SAVE_STEPS == 0:
            torch.save({"model": model.state_dict(), "step": global_step}, "ckpt.pt")
        global_step += 1
