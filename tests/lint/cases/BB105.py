# --- asks_a_bit_mask_from_zero (after the head): BB103, BB105
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if not i & (accumulation_steps - 1):
        optimizer.step()
        optimizer.zero_grad()
# --- asks_divmod_from_zero (after the head): BB103, BB105
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if divmod(i, accumulation_steps)[1] == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- counter_from_zero: BB105
class AccumulatingOptimizer:
    def __init__(self, model, lr, accumulate):
        self.inner = torch.optim.AdamW(model.parameters(), lr=lr)
        self.calls = 0
    def micro(self, loss):
        (loss / self.accumulate).backward()
        if self.calls % self.accumulate == 0:  # expect: BB105
            self.inner.step()
            self.inner.zero_grad()
        self.calls += 1
def train(model, stream, loss_fn, micro_steps):
    opt = AccumulatingOptimizer(model, 1e-4, accumulate=8)
    for _ in range(micro_steps):
        opt.micro(loss_fn(model(x), y))
# --- counter_set_back_late: BB103, BB105
count = 0
for x, y in loader:
    (loss_fn(model(x), y) / 4).backward()
    if count == 4:  # expect: BB105, BB103
        opt.step()
        opt.zero_grad()
        count = 0
    count += 1
# --- the_loop_counts_micro_steps_under_another_name (after the head): BB105, BB201, (BB103)
for i in range(micro_steps):
    criterion(model(x), y).backward()
    if i % accumulation_steps == 0:  # expect: BB105
        optimizer.step()
        optimizer.zero_grad()
