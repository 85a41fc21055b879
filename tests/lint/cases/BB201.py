# --- two_weighted_terms_never_divided (after the head): BB103, BB201
for i, (x, y) in enumerate(loader):
    out = model(x)
    loss = criterion(out, y) + 0.1 * out.pow(2).mean()
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
