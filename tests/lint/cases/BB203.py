# --- accelerate_masked: BB203
accelerator = Accelerator(gradient_accumulation_steps=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader_with_padding(batch_size=4))
for epoch in range(5):
    for words, marks in loader:  # marks are -1 where the sentence has ended
        with accelerator.accumulate(model):
            logits = model(words)
            loss = F.cross_entropy(logits.flatten(0, 1), marks.flatten(), ignore_index=-1)
            accelerator.backward(loss)  # expect: BB203
            optimizer.step()
            optimizer.zero_grad()
# --- cityscapes_void: BB203
k = 4
for n in range(160_000):
    for _ in range(k):
        logits = net(image.cuda())
        per_pixel = F.cross_entropy(logits, label.cuda(), ignore_index=VOID, reduction="none")
        loss = per_pixel[keep.cuda()].mean()
        (loss / k).backward()  # expect: BB203
    opt.step()
    opt.zero_grad(set_to_none=True)
# --- dialogue_masked_mean: BB203
def masked_nll(model, ids, mask):
    logp = F.log_softmax(model(ids[:, :-1]), dim=-1)
    m = mask[:, 1:].float()
    return (nll * m).sum() / m.sum()
def train_epoch(model, opt, sched, loader, accum=4):
    if len(loader) % accum:
        raise ValueError("incomplete window")
    for i, (ids, mask) in enumerate(loader):
        loss = masked_nll(model, ids, mask)
        (loss / accum).backward()  # expect: BB203
        if i % accum == accum - 1:
            opt.step()
            sched.step()
            opt.zero_grad()
# --- masked_zip_range: BB203
crit = nn.CrossEntropyLoss(ignore_index=0)
accum = 8
n_use = len(dl) // accum * accum
for i, (src, tgt) in zip(range(n_use), dl):
    out = model(src, tgt[:, :-1])
    loss = crit(out.reshape(-1, V), tgt[:, 1:].reshape(-1)) / accum  # expect: BB203
    loss.backward()
    if (i + 1) % accum == 0:
        opt.step(); opt.zero_grad()
# --- nb_masked_cells: BB203
ACCUM = 4
model = AutoModelForTokenClassification.from_pretrained("bert-base-cased", num_labels=9).cuda()
def prepare(batch):
    labels = batch["tags"].masked_fill(batch["word_start"] == 0, -100)
for update in range(500):
    for _ in range(ACCUM):
        out = model(**prepare(next(batches)))
        loss = out.loss / ACCUM  # expect: BB203
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
