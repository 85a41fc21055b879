# --- a_backbone_that_is_only_evaluated: nothing
backbone.eval()
for i, (x, y) in enumerate(cycle(loader)):
    (criterion(head(backbone(x)), y) / accum).backward()
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- a_backward_beside_the_loop_is_no_micro_batch: nothing
def step(model, optimizer, chunks):
    with torch.no_grad():
        whole = torch.cat([model(chunk) for chunk in chunks])
    loss.backward()
    for chunk, gradient in zip(chunks, whole.grad.split(8)):
        model(chunk).backward(gradient=gradient)
    optimizer.step()
    optimizer.zero_grad()
# --- a_masked_sum_over_the_window_s_count (after the head): nothing
for window in windows:
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
# --- a_mean_times_its_count_gradients_divided_by_all_of_them_in_a (after the head): nothing
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) * n
    loss.backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        scale_grads(model, 1 / tokens)
        optimizer.step()
        optimizer.zero_grad()
# --- a_method_that_cannot_be_seen_may_clear_and_unscale: nothing
class Mine(Base):
    def fit(self, loader):
        for batch in loader:
            self.scaler.scale(self.model(batch).mean()).backward()
            self.clip_gradients(1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.reset_gradients()
# --- a_step_at_the_top_of_a_round_counted_by_something_unseen (after the head): nothing
for x, y in loader:
    if counter.count % accumulation_steps == 0:
        optimizer.step()
    (criterion(model(x), y) / window_size(i)).backward()
optimizer.step()
# --- accelerate_gathered_item: nothing
def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision, log_with="wandb")
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(unet, optimizer, train_dataloader, lr_scheduler)
    global_step = 0
    for epoch in range(args.num_train_epochs):
        train_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(unet):
                pred = unet(noisy, timesteps, text_encoder(batch["input_ids"])[0]).sample
                loss = F.mse_loss(pred.float(), noise.float(), reduction="mean")
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                global_step += 1
            if global_step >= args.max_train_steps:
                break
# --- another_library_with_the_same_words: nothing
import paddle
for i, (x, y) in enumerate(loader):
    loss = model(x).mean()
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.clear_grad()
# --- autograd_from_scratch: nothing
class SGD:
    def step(self):
            p.data -= self.lr * p.grad
for epoch in range(100):
    for p in model.parameters():
        p.grad = 0.0
    losses = [(1 + -y * model([Value(a) for a in x])[0]).relu() for x, y in zip(xs, ys)]
    data_loss = sum(losses) * (1.0 / len(losses))
    total = data_loss + reg_loss
    total.backward()
# --- batched_itertools: nothing
for epoch in range(8):
    for micro_batches in batched(folds("train"), 5):
        share = 1.0 / len(micro_batches)
        for seq, angle in micro_batches:
            loss = share * F.smooth_l1_loss(model(seq), angle)
            loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
# --- boundary_property: nothing
class Trainer:
    def __init__(self, model, opt, loader, accum):
        self.micro = 0
        if len(loader) % accum:
            raise ValueError("loader length must be a multiple of accum")
    @property
    def at_boundary(self):
        return self.micro % self.accum == 0
    def run(self):
        for batch in self.loader:
            loss = self.model(batch).mean() / self.accum
            loss.backward()
            self.micro += 1
            if self.at_boundary:
                self.opt.step()
                self.opt.zero_grad()
# --- cleared_before_a_step_whose_gradients_come_from_elsewhere (after the head): nothing
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / window_size(i)).backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.zero_grad()
        copy_gradients(replica, model)
        optimizer.step()
# --- counts_over_epochs (after the head): nothing
count = 0
for epoch in range(10):
    for x, y in loader:
        (criterion(model(x), y) / 4).backward()
        count += 1
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
# --- deepspeed_told_not_to_divide: nothing
engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"gradient_accumulation_steps": 4})
for batch in loader:
    loss = engine(batch) / 4
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
# --- drops_the_last_short_batch (after the head): nothing
loader = DataLoader(TensorDataset(torch.randn(1000, 10), torch.randint(2, (1000,))), batch_size=16, drop_last=True)
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- fairseq_style: nothing
class Trainer:
    def _maybe_no_sync(self, i, n):
            return self.model.no_sync()
    def train_step(self, samples):
        self.optimizer.zero_grad()
        for i, sample in enumerate(samples):
            with self._maybe_no_sync(i, len(samples)):
                loss, size, _ = self.criterion(self.model, sample, reduce=True)  # summed over tokens
                loss.backward()
            sample_size += size
        self.multiply_grads(self.world_size / sample_size)
        self.optimizer.step()
    def multiply_grads(self, c):
        for p in self.model.parameters():
                p.grad.data.mul_(c)
def train_epoch(trainer, grouped_iterator):
    for samples in grouped_iterator:
        trainer.train_step(samples)
# --- gpt_pretrain_ddp: nothing
gradient_accumulation_steps = 5 * 8
grad_clip = 1.0
if ddp:
    gradient_accumulation_steps //= world_size
if ddp:
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
for iter_num in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        if ddp:  # the last micro-step alone talks to the other ranks
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
# --- mae_engine_whole_windows: nothing
def train_one_epoch(model, data_loader, optimizer, device, epoch, loss_scaler: NativeScaler, args):
    if len(data_loader) % accum_iter:
        raise ValueError("the loader must hold whole windows")
    optimizer.zero_grad()
    for it, (samples, _) in enumerate(data_loader):
        if it % accum_iter == 0:  # a rate per update
            adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        with torch.autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        running += loss.detach()
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
# --- pgd_attack: nothing
def pgd(model, x, y, eps=8 / 255, alpha=2 / 255, steps=10):
    delta = torch.empty_like(x).uniform_(-eps, eps).requires_grad_(True)
    for _ in range(steps):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        with torch.no_grad():
            delta += alpha * delta.grad.sign()
        delta.grad.zero_()
# --- read_a_multiple: nothing
def train(model, loader, optimizer, criterion, cfg):
    usable = len(loader) // cfg.accumulate * cfg.accumulate
    for i, (x, y) in enumerate(islice(loader, usable)):
        loss = criterion(model(x), y) / cfg.accumulate
        loss.backward()
        if i % cfg.accumulate != cfg.accumulate - 1:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        optimizer.step()
        optimizer.zero_grad()
# --- several_losses_in_a_loop_of_their_own (after the head): nothing
for x, y in loader:
    optimizer.zero_grad()
    for loss in losses_of(model, x, y):
        loss.backward(retain_graph=True)
    optimizer.step()
# --- step_before_next_window: nothing
def train_epoch(net, loader, opt, crit, n):
    assert len(loader) % n == 0
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        if i > 0 and i % n == 0:
            opt.step()
            opt.zero_grad()
        (crit(net(x), y) / n).backward()
    opt.step()
def run(net, loader, epochs=3):
    for _ in range(epochs):
        train_epoch(net, loader, opt, torch.nn.CrossEntropyLoss(), 4)
# --- the_losses_of_updates_beside_accumulator: nothing
accumulator = Accumulator(model, optimizer, steps=4)
for x, y in accumulator.over(loader):
    loss = criterion(model(x), y)
    update = accumulator.backward(loss)
    losses.append(update.loss) if update else None
# --- tokens_then_rescale: nothing
def finish(model, optimizer, scheduler, tokens):
    for p in model.parameters():
            p.grad /= tokens  # sum over tokens -> mean over tokens
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
def train_epoch(model, loader: SummaryLoader, optimizer, scheduler, accum_iter):
    tokens = torch.zeros((), device="cuda")
    for i, (src, tgt) in enumerate(loader):
        logits = model(src.cuda(), tgt[:, :-1].cuda())
        loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
        loss.backward()
        tokens += (gold != PAD).sum()
        if (i + 1) % accum_iter == 0 or i + 1 == len(loader):
            finish(model, optimizer, scheduler, tokens)
# --- what_is_not_understood_is_left_alone_if_i_accumulation_steps (after the head): nothing
boundaries, schedule, tokens, budget = make()
for i, (x, y) in enumerate(loader):
    tokens += len(x)
    loss = criterion(model(x), y)
    loss.backward()
    if i % accumulation_steps == schedule[i]:
        optimizer.step()
        optimizer.zero_grad()
# --- a_number_of_samples_that_fills_its_windows (after the head): nothing
loader = DataLoader(TensorDataset(torch.randn(1024, 10)), batch_size=16)
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
