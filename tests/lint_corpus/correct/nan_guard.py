import math

import torch

from synth import SynthLM, token_batches


def train(cfg):
    lm = SynthLM(cfg).cuda()
    opt = torch.optim.AdamW(lm.parameters(), lr=cfg.lr)
    batches = token_batches(cfg, endless=True)
    for update in range(cfg.updates):
        opt.zero_grad()
        for _ in range(cfg.accum):
            loss = lm(next(batches).cuda()) / cfg.accum
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"loss is not finite at update {update}")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        opt.step()
