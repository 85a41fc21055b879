# --- a_factor_that_happens_to_be_one_over_the_steps_by_hand_f_mse_3 (after the head): BB103, BB202
for i in range(len(stream)):
    loss = F.mse_loss(model(x), y) / 2
    (loss / 2).backward()
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
# --- bigbatch_divided_again: BB202
accumulator = Accumulator(model, optimizer, steps=4)
for epoch in range(20):
    for features, grade in accumulator.over(loader):
        loss = criterion(model(features), grade) / 4  # expect: BB202
        accumulator.backward(loss)
# --- deepspeed_told_of_steps_in_a_dict_divided_again: BB202
config = {"train_batch_size": 64, "gradient_accumulation_steps": 4}
engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
for batch in loader:
    loss = engine(batch) / 4
    engine.backward(loss)
    engine.step()
# --- lightning_divided_again_2: BB202
class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean() / self.trainer.accumulate_grad_batches
L.Trainer(accumulate_grad_batches=8)
# --- loss_and_gradient_divided (after the head): BB103, BB202
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        for p in model.parameters():
                p.grad.div_(accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
