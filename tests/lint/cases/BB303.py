# --- scaler_and_schedule: BB303, BB304
def train(cfg):
    for update in range(cfg.updates):
        for micro_step in range(cfg.accum):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = lm(x, y) / cfg.accum
            scaler.scale(loss).backward()
            if micro_step == cfg.accum - 1:
                scaler.unscale_(opt)
                scaler.step(opt)
                opt.zero_grad(set_to_none=True)
            scaler.update()  # expect: BB303
            lr_sched.step()  # expect: BB304
# --- scaler_update_each: BB303
n_micro = 8
for update in range(30_000):
    for _ in range(n_micro):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(video.cuda()), word.cuda()) / n_micro
        scaler.scale(loss).backward()
        scaler.update()  # expect: BB303
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    opt.zero_grad()
