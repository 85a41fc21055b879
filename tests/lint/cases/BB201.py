# --- a_number_of_rounds_that_is_a_multiple_found1_for_i (after the head): BB201
steps, n = 8, len(loader)
whole = n - n % steps
for i, (x, y) in zip(range(whole), loader):
    (criterion(model(x), y) ).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- a_number_of_rounds_that_is_a_multiple_found1_for_i_2 (after the head): BB201
steps, n = 8, len(loader)
whole = n // steps * steps
for i, (x, y) in zip(range(whole), loader):
    (criterion(model(x), y) ).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- a_number_of_rounds_that_is_a_multiple_found1_for_i_3 (after the head): BB201
steps, n = 8, len(loader)
whole = len(loader) - len(loader) % steps
for i, (x, y) in zip(range(whole), loader):
    (criterion(model(x), y) ).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- an_inner_loop_that_never_divides (after the head): BB201
for update in range(1000):
    optimizer.zero_grad()
    for micro in range(accumulation_steps):
        criterion(model(x), y).backward()
    optimizer.step()
# --- divided_for_the_log_alone (after the head): BB103, BB201
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# --- permuted_rows: BB103, BB201
for b in range(nb):
    out = model(X[idx])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(out, Y[idx])
    loss.backward()  # expect: BB201
    if b % acc == acc - 1:  # expect: BB103
        optimizer.step()
        optimizer.zero_grad()
# --- two_weighted_terms_never_divided (after the head): BB103, BB201
for i, (x, y) in enumerate(loader):
    out = model(x)
    loss = criterion(out, y) + 0.1 * out.pow(2).mean()
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
