import click, torch
@click.command()
@click.option("--accum", default=4)
def main(accum):
    model = get_model(); opt = torch.optim.AdamW(model.parameters())
    total = len(loader) - len(loader) % accum
    it = iter(loader)
    for i in range(total):
        x, y = next(it)
        loss = torch.nn.functional.cross_entropy(model(x), y).div(accum)
        loss.backward()
        if not (i + 1) % accum:
            opt.step(); opt.zero_grad()
main()
