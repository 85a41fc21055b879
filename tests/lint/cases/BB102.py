# --- accelerate_told_of_steps_and_never_asked_to_accumulate: BB102
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()

# --- accelerate_unprepared: BB102
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from iris import IrisData, Mlp
accelerator = Accelerator(gradient_accumulation_steps=4)
model = Mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(IrisData(), batch_size=8, shuffle=True)
loss_fn = torch.nn.CrossEntropyLoss()
model, loader = accelerator.prepare(model, loader)
for epoch in range(20):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            # never went through prepare(), so nothing holds it back
            optimizer.step()  # expect: BB102
            optimizer.zero_grad()
accelerator.save_state("out")

# --- an_inner_loop_that_steps (after the head): BB102
for update in range(1000):
    optimizer.zero_grad()
    for micro in range(accumulation_steps):
        x, y = next(stream)
        (criterion(model(x), y) / accumulation_steps).backward()
        optimizer.step()

# --- masked_autoencoder_class: BB102
import torch
class Pretrainer:
    def __init__(self, model, data, cfg):
        self.model = model
        self.data = data
        self.update_freq = cfg.update_freq
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.updates)
    def one_update(self):
        self.optimizer.zero_grad()
        for _ in range(self.update_freq):
            images = next(self.data)
            loss, _, _ = self.model(images, mask_ratio=0.75)
            (loss / self.update_freq).backward()
            self.optimizer.step()  # expect: BB102
        self.scheduler.step()
    def run(self, updates):
        for _ in range(updates):
            self.one_update()

# --- myth_it_updates_after_every_micro_batch: BB102
for inputs, labels in loader:
    loss = criterion(model(inputs), labels) / accumulation_steps
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

# --- nb_step_each: BB102
import torch, torch.nn as nn
from housing import net, loader
virtual_batch, real_batch = 256, 32
accum_steps = virtual_batch // real_batch
optim = torch.optim.Adam(net.parameters())
mse = nn.MSELoss()
for epoch in range(5):
    for step, (x, y) in enumerate(loader):
        loss = mse(net(x), y)
        loss = loss / accum_steps
        loss.backward()
        optim.step()  # expect: BB102
        optim.zero_grad()
    print(epoch)

# --- step_in_while: BB102
import torch
from pong import Agent, rollouts
agent = Agent()
optimizer = torch.optim.RMSprop(agent.parameters(), lr=1e-4)
episodes = rollouts(agent)
batch_size = 10  # episodes for one update
done = 0
while done < 100_000:
    optimizer.zero_grad()
    collected = 0
    while collected < batch_size:
        logp, advantage = next(episodes)
        loss = -(logp * advantage).mean() / batch_size
        loss.backward()
        optimizer.step()  # expect: BB102
        collected += 1
    done += collected
