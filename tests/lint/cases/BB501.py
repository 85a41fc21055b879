# --- a_list_of_losses_with_their_graphs_beside_accumulator: BB501
accumulator = Accumulator(model, optimizer, steps=4)
for x, y in accumulator.over(loader):
    loss = criterion(model(x), y)
    update = accumulator.backward(loss)
    losses.append(loss)
# --- losses_list: BB501
def train(model, windows, optimizer):
    for window in windows:
        optimizer.zero_grad()
        for x, y in window:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            (loss / len(window)).backward()
            losses.append(loss)  # expect: BB501
        optimizer.step()
# --- running_mean_graph: BB501
for update in range(20_000):
    opt.zero_grad()
    for _ in range(4):
        loss = F.smooth_l1_loss(net(grey.cuda()), ab.cuda())
        (loss / 4).backward()
        ema_loss = loss if ema_loss is None else 0.99 * ema_loss + 0.01 * loss  # expect: BB501
    opt.step()
    if update % 200 == 0:
        print(update, ema_loss)
