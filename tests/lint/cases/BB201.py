# --- a_number_of_rounds_that_is_a_multiple_found1_for_i_2 (after the head): BB201
steps, n = 8, len(loader)
whole = n // steps * steps
for i, (x, y) in zip(range(whole), loader):
    (criterion(model(x), y) ).backward()
    if (i + 1) % steps == 0:
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
