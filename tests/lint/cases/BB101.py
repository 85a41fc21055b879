# --- an_inner_loop_that_clears (after the head): BB101
for update in range(1000):
    for micro in range(accumulation_steps):
        optimizer.zero_grad()
        (criterion(model(x), y) / accumulation_steps).backward()
    optimizer.step()
# --- cleared_right_before_the_step (after the head): BB101
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / window_size(i)).backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.zero_grad()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
# --- cleared_right_before_the_step_after_an_inner_loop (after the head): BB101
for update in range(1000):
    for micro in range(accumulation_steps):
        (criterion(model(x), y) / accumulation_steps).backward()
    optimizer.zero_grad()
    optimizer.step()
