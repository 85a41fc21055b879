# --- scaler_and_schedule: BB303, BB304
def train(cfg):
    for update in range(cfg.updates):
        for micro_step in range(cfg.accum):
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
# --- scaler_modulo: BB103, BB303
ACC = 4
for epoch in range(60):
    for i, (a, b, flow) in enumerate(tqdm(loader)):
        with autocast(dtype=torch.float16):
            loss = epe(model(a.cuda(), b.cuda()), flow.cuda()) / ACC
        scaler.scale(loss).backward()
        if (i + 1) % ACC == 0:  # expect: BB103
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()  # expect: BB303
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
