import torch
perm = torch.randperm(len(X))
bs, acc = 32, 4
nb = len(X) // bs
for b in range(nb):
    idx = perm[b * bs:(b + 1) * bs]
    out = model(X[idx])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(out, Y[idx])
    loss.backward()  # expect: BB201
    if b % acc == acc - 1:  # expect: BB103
        optimizer.step()
        optimizer.zero_grad()
