# --- accelerate_told_of_steps_and_never_asked_to_accumulate: BB102
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
# --- an_inner_loop_that_steps (after the head): BB102
for update in range(1000):
    optimizer.zero_grad()
    for micro in range(accumulation_steps):
        (criterion(model(x), y) / accumulation_steps).backward()
        optimizer.step()
# --- myth_it_updates_after_every_micro_batch: BB102
for inputs, labels in loader:
    loss = criterion(model(inputs), labels) / accumulation_steps
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# --- step_in_while: BB102
batch_size = 10  # episodes for one update
while done < 100_000:
    optimizer.zero_grad()
    collected = 0
    while collected < batch_size:
        loss = -(logp * advantage).mean() / batch_size
        loss.backward()
        optimizer.step()  # expect: BB102
        collected += 1
