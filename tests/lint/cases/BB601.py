# --- batchnorm_in_a_model_that_is_evaluated_and_trained: BB601
head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
for i, (x, y) in enumerate(loader):
    (crit(network(x), y) / size_of_window(i)).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
# --- batchnorm_in_an_accumulating_loop: BB104, BB601
net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
for i, (x, y) in enumerate(loader):
    (crit(net(x), y) / 4).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step()
        opt.zero_grad()
# --- resnet_small_batches: BB601
def main(batch_size=4, accum=16, epochs=10):
    net = models.resnet50(weights="IMAGENET1K_V2").cuda()  # expect: BB601
    assert len(loader) % accum == 0
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(net(x.cuda()), y.cuda()) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
if __name__ == "__main__":
    main()
