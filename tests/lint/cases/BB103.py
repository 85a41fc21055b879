# --- apex_leftover: BB103
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for epoch in range(args.epochs):
    for step, batch in enumerate(train_dataloader):
        outputs = model(*batch)
        loss = outputs[0]
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        tr_loss += loss.item()
        if (step + 1) % args.gradient_accumulation_steps == 0:  # expect: BB103
            optimizer.step()
            scheduler.step()
            model.zero_grad()
# --- asks_a_bit_mask (after the head): BB103
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) & 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- counts_down (after the head): BB103
left = accumulation_steps
for x, y in loader:
    left -= 1
    (criterion(model(x), y) / accumulation_steps).backward()
    if left == 0:
        optimizer.step()
        optimizer.zero_grad()
        left = accumulation_steps
# --- counts_with_itertools (after the head): BB103
rounds = itertools.count(1)
for x, y in loader:
    (criterion(model(x), y) / accumulation_steps).backward()
    if next(rounds) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- divided_by_a_method_in_place (after the head): BB103
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.div_(accumulation_steps)
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- keeps_the_last_short_batch (after the head): BB103
loader = DataLoader(TensorDataset(torch.randn(1000, 10), torch.randint(2, (1000,))), batch_size=16, drop_last=False)
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- matches_the_remainder (after the head): BB103
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    match (i + 1) % accumulation_steps:
        case 0:
            optimizer.step()
            optimizer.zero_grad()
# --- multiplied_by_the_number_itself (after the head): BB103
for i, (x, y) in enumerate(loader):
    (0.25 * criterion(model(x), y)).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- numbers_with_itertools (after the head): BB103
for i, (x, y) in zip(count(), loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if i % accumulation_steps == accumulation_steps - 1:
        optimizer.step()
        optimizer.zero_grad()
# --- super_resolution: BB103
CONFIG = dict(lr=1e-4, k=4, epochs=300, patch=96)
for epoch in range(CONFIG["epochs"]):
    opt.zero_grad()
    for i, (lo, hi) in enumerate(div2k(CONFIG["patch"])):
        step_idx = i // k
        l1 = F.l1_loss(net(lo.cuda()), hi.cuda())
        (l1 / k).backward()
        if (i + 1) // k > step_idx:  # expect: BB103
            opt.step()
            opt.zero_grad()
            if step_idx % 100 == 0:
                print(epoch, step_idx, "%.5f" % l1.item())
