# --- bci_decoder: BB103, BB106
def main():
    for _ in range(hp.epochs):
        for n, (eeg, intent) in enumerate(sessions):
            ce(net(eeg), intent).div(hp.accum).backward()
            if (n + 1) % hp.accum == 0:  # expect: BB103
                optimizer.step()  # expect: BB106
# --- never_cleared (after the head): BB106
for x, y in loader:
    criterion(model(x), y).backward()
    optimizer.step()
# --- the_leftover_is_never_cleared: BB106, BB201
batches = [(torch.zeros(1, 1), torch.zeros(1, 1)), (torch.tensor([[1.0]]), torch.tensor([[2.0]])), (torch.tensor([[2.0]]), torch.tensor([[4.0]]))]
accumulation_steps = 2
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        criterion(model(x), y).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
