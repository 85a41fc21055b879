# --- accelerate_clip: BB301
accelerator = Accelerator(gradient_accumulation_steps=2)
model, opt, loader = accelerator.prepare(model, opt, loader_of_equal_lengths())
for epoch in range(3):
    for article, summary in loader:
        with accelerator.accumulate(model):
            loss = model(article, summary)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
            opt.step()
            opt.zero_grad()
# --- global_step_clip: BB301, (BB103)
def train(model, loader, epochs, accum=4):
    global_step = 0
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: BB301
            global_step += 1
            if global_step % accum == 0:  # windows may reach across epochs
                opt.step()
                opt.zero_grad()
# --- stock_clip_after: BB301
for epoch in range(12):
	for past, future in days(batch=128):
		optim.zero_grad()
		loss.backward()
		optim.step()
		torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: BB301
