import torch

from lm_data import blocks
from lm_model import LM


def train(cfg):
    lm = LM(cfg).cuda()
    opt = torch.optim.AdamW(lm.parameters(), lr=cfg.lr)
    lr_sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.updates)
    scaler = torch.amp.GradScaler("cuda")
    data = blocks(cfg.block, cfg.micro_batch)
    for update in range(cfg.updates):
        for micro_step in range(cfg.accum):
            x, y = next(data)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = lm(x, y) / cfg.accum
            scaler.scale(loss).backward()
            if micro_step == cfg.accum - 1:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
                scaler.step(opt)
                opt.zero_grad(set_to_none=True)
            scaler.update()  # expect: BB303
            lr_sched.step()  # expect: BB304
