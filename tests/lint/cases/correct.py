# --- a_backbone_that_is_only_evaluated: nothing
from torchvision.models import resnet50
backbone = resnet50(weights="DEFAULT")
backbone.eval()
for i, (x, y) in enumerate(cycle(loader)):
    (criterion(head(backbone(x)), y) / accum).backward()
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()

# --- a_backward_beside_the_loop_is_no_micro_batch: nothing
import torch
def step(model, optimizer, chunks):
    with torch.no_grad():
        whole = torch.cat([model(chunk) for chunk in chunks])
    whole.requires_grad_()
    loss = contrast(whole)
    loss.backward()
    for chunk, gradient in zip(chunks, whole.grad.split(8)):
        model(chunk).backward(gradient=gradient)
    optimizer.step()
    optimizer.zero_grad()

# --- a_factor_that_happens_to_be_one_over_the_steps_accelerate_0 (after the head): nothing
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(0.5 * F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

# --- a_factor_that_happens_to_be_one_over_the_steps_accumulator_f_2 (after the head): nothing
from bigbatch import Accumulator
accumulator = Accumulator(model, optimizer, steps=2)
for x, y in accumulator.over(loader):
    accumulator.backward((F.mse_loss(model(x), y) + F.l1_loss(model(x), y)) / 2)

# --- a_masked_sum_over_the_window_s_count (after the head): nothing
for window in windows:
    tokens = sum((y != -100).sum() for _, y in window)
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()

# --- a_mean_times_its_count_gradients_divided_by_all_of_them_in_a (after the head): nothing
from training import scale_grads
tokens = 0
for i, (x, y) in enumerate(loader):
    n = (y != -100).sum()
    tokens += n
    loss = F.cross_entropy(model(x), y) * n
    loss.backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        scale_grads(model, 1 / tokens)
        optimizer.step()
        optimizer.zero_grad()
        tokens = 0

# --- a_method_that_cannot_be_seen_may_clear_and_unscale: nothing
class Mine(Base):
    def fit(self, loader):
        for batch in loader:
            self.scaler.scale(self.model(batch).mean()).backward()
            self.clip_gradients(1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.reset_gradients()

# --- a_schedule_that_is_told_where_it_stands (after the head): nothing
for epoch in range(3):
    for i, (x, y) in enumerate(cycle(loader)):
        (criterion(model(x), y) / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(epoch + i / 1000)

# --- a_step_at_the_top_of_a_round_counted_by_something_unseen (after the head): nothing
for x, y in loader:
    if counter.count % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    (criterion(model(x), y) / window_size(i)).backward()
optimizer.step()

# --- accelerate_accumulating_where_this_file_does_not_see: nothing
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    context = accelerator.accumulate(model)
    context.__enter__()
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    context.__exit__(None, None, None)

# --- accelerate_gathered_item: nothing
import math
import torch, torch.nn.functional as F
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from tqdm.auto import tqdm
def main(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision, log_with="wandb")
    unet, vae, text_encoder, noise_scheduler = load(args)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate * args.gradient_accumulation_steps)
    train_dataloader = make_loader(args)
    lr_scheduler = get_scheduler(args.lr_scheduler, optimizer=optimizer, num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(unet, optimizer, train_dataloader, lr_scheduler)
    global_step = 0
    progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    for epoch in range(args.num_train_epochs):
        train_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(unet):
                latents = vae.encode(batch["pixel_values"]).latent_dist.sample().detach() * 0.18215
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=latents.device).long()
                noisy = noise_scheduler.add_noise(latents, noise, timesteps)
                pred = unet(noisy, timesteps, text_encoder(batch["input_ids"])[0]).sample
                loss = F.mse_loss(pred.float(), noise.float(), reduction="mean")
                avg_loss = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                train_loss = 0.0
            if global_step >= args.max_train_steps:
                break

# --- accelerate_whose_engine_accumulates: nothing
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4, deepspeed_plugin=plugin)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()

# --- another_library_with_the_same_words: nothing
import paddle
for i, (x, y) in enumerate(loader):
    loss = model(x).mean()
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.clear_grad()

# --- another_optimizer_cleared_before_the_step (after the head): nothing
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / window_size(i)).backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        frozen_optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

# --- autograd_from_scratch: nothing
import random
from engine import Value
from layers import MLP
class SGD:
    def __init__(self, params, lr=0.05):
        self.params, self.lr = params, lr
    def step(self):
        for p in self.params:
            p.data -= self.lr * p.grad
model = MLP(2, [16, 16, 1])
opt = SGD(model.parameters())
xs, ys = [(random.random(), random.random()) for _ in range(64)], [random.choice([-1, 1]) for _ in range(64)]
for epoch in range(100):
    for p in model.parameters():
        p.grad = 0.0
    losses = [(1 + -y * model([Value(a) for a in x])[0]).relu() for x, y in zip(xs, ys)]
    data_loss = sum(losses) * (1.0 / len(losses))
    reg_loss = 1e-4 * sum(p * p for p in model.parameters())
    total = data_loss + reg_loss
    total.backward()
    opt.step()
    if epoch % 10 == 0:
        print(epoch, total.data)

# --- batch_size_warmup: nothing
import torch
from lm import TinyLM, next_tokens
def accum_for(update: int) -> int:
    if update < 1_000:
        return 1
    return 4 if update < 5_000 else 16
model = TinyLM().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20_000)
for update in range(20_000):
    n = accum_for(update)
    loss_sum = torch.zeros((), device="cuda")
    for _ in range(n):
        x, y = next_tokens(batch=8)
        loss = model(x, y) / n
        loss.backward()
        loss_sum += loss.detach()
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    if update % 100 == 0:
        print(f"{update=} {n=} loss={loss_sum.item():.3f}")

# --- batched_itertools: nothing
# needs Python 3.12 for itertools.batched
from itertools import batched
import torch
import torch.nn.functional as F
from folds import FoldNet, folds
model = FoldNet()
opt = torch.optim.Adam(model.parameters())
sched = torch.optim.lr_scheduler.LinearLR(opt, total_iters=500)
for epoch in range(8):
    for micro_batches in batched(folds("train"), 5):
        share = 1.0 / len(micro_batches)
        for seq, angle in micro_batches:
            loss = share * F.smooth_l1_loss(model(seq), angle)
            loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()

# --- boundary_property: nothing
import torch
class Trainer:
    def __init__(self, model, opt, loader, accum):
        self.model, self.opt, self.loader, self.accum = model, opt, loader, accum
        self.micro = 0
        if len(loader) % accum:
            raise ValueError("loader length must be a multiple of accum")
    @property
    def at_boundary(self):
        return self.micro % self.accum == 0
    def run(self):
        for batch in self.loader:
            loss = self.model(batch).mean() / self.accum
            loss.backward()
            self.micro += 1
            if self.at_boundary:
                self.opt.step()
                self.opt.zero_grad()

# --- buffers_micro_batches (after the head): nothing
buffer = []
for batch in loader:
    buffer.append(batch)
    if len(buffer) == accumulation_steps:
        for x, y in buffer:
            (criterion(model(x), y) / len(buffer)).backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.clear()

# --- cleared_before_a_step_whose_gradients_come_from_elsewhere (after the head): nothing
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / window_size(i)).backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        optimizer.zero_grad()
        copy_gradients(replica, model)
        optimizer.step()

# --- cleared_by_hand (after the head): nothing
for x, y in loader:
    for p in model.parameters():
        p.grad = None
    criterion(model(x), y).backward()
    optimizer.step()

# --- counts_over_epochs (after the head): nothing
count = 0
for epoch in range(10):
    for x, y in loader:
        (criterion(model(x), y) / 4).backward()
        count += 1
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

# --- ddp_exit_stack: nothing
import contextlib
import torch
from torch.nn import parallel
ACC_STEPS = 4
class Runner:
    def __init__(self, net, opt, stream, rank):
        self.net = parallel.DistributedDataParallel(net, device_ids=[rank])
        self.opt = opt
        self.stream = stream
    def update(self):
        self.opt.zero_grad()
        for j in range(ACC_STEPS):
            with contextlib.ExitStack() as stack:
                if j < ACC_STEPS - 1:
                    stack.enter_context(self.net.no_sync())
                x, y = next(self.stream)
                loss = torch.nn.functional.huber_loss(self.net(x), y)
                loss.div(ACC_STEPS).backward()
        self.opt.step()
        return loss.detach()
    def run(self, updates, log_every=25):
        for u in range(updates):
            loss = self.update()
            if u % log_every == 0:
                print(f"update {u}: {loss.item():.4f}")

# --- deepspeed_told_not_to_divide: nothing
import deepspeed
engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"gradient_accumulation_steps": 4})
for batch in loader:
    loss = engine(batch) / 4
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()

# --- dqn_cartpole: nothing
import math
import random
import gymnasium as gym
import torch
import torch.nn.functional as F
from replay import ReplayMemory
from nets import DQN
GAMMA, TAU, BATCH_SIZE = 0.99, 0.005, 128
env = gym.make("CartPole-v1")
policy_net, target_net = DQN(4, 2), DQN(4, 2)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True)
memory = ReplayMemory(10000)
steps_done = 0
def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    state, action, reward, next_state, alive = memory.sample(BATCH_SIZE)
    q = policy_net(state).gather(1, action).squeeze(1)
    with torch.no_grad():
        target = reward + GAMMA * alive * target_net(next_state).max(1).values
    loss = F.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
def select_action(state):
    global steps_done
    eps = 0.05 + 0.85 * math.exp(-steps_done / 1000)
    steps_done += 1
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).argmax(1, keepdim=True)
    return torch.tensor([[env.action_space.sample()]])
for episode in range(600):
    obs, _ = env.reset()
    done = False
    while not done:
        state = torch.tensor(obs).unsqueeze(0)
        action = select_action(state)
        obs, reward, terminated, truncated, _ = env.step(action.item())
        done = terminated or truncated
        memory.push(state, action, reward, obs, not terminated)
        optimize_model()
        for tp, pp in zip(target_net.parameters(), policy_net.parameters()):
            tp.data.lerp_(pp.data, TAU)

# --- drops_the_last_short_batch (after the head): nothing
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(1000, 10), torch.randint(2, (1000,))), batch_size=16, drop_last=True)
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()

# --- fairseq_style: nothing
import contextlib
import torch
class Trainer:
    def __init__(self, model, criterion, optimizer, clip_norm, world_size=1):
        self.model, self.criterion, self.optimizer = model, criterion, optimizer
        self.clip_norm, self.world_size = clip_norm, world_size
    def _maybe_no_sync(self, i, n):
        if self.world_size > 1 and hasattr(self.model, "no_sync") and i < n - 1:
            return self.model.no_sync()
        return contextlib.nullcontext()
    def train_step(self, samples):
        self.model.train()
        self.optimizer.zero_grad()
        sample_size = torch.zeros(1, device="cuda")
        for i, sample in enumerate(samples):
            with self._maybe_no_sync(i, len(samples)):
                loss, size, _ = self.criterion(self.model, sample, reduce=True)  # summed over tokens
                loss.backward()
            sample_size += size
        if self.world_size > 1:
            torch.distributed.all_reduce(sample_size)
        self.multiply_grads(self.world_size / sample_size)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
    def multiply_grads(self, c):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.data.mul_(c)
def train_epoch(trainer, grouped_iterator):
    for samples in grouped_iterator:
        trainer.train_step(samples)

# --- federated_rounds: nothing
import copy
import torch
def local_update(model, loader, local_epochs, lr):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(local_epochs):
        for x, y in loader:
            model.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return model.state_dict()
def federated(model, clients, rounds=50, frac=0.1, local_epochs=5):
    k = max(1, int(frac * len(clients)))
    for r in range(rounds):
        chosen = torch.randperm(len(clients))[:k].tolist()
        states = [local_update(model, clients[i], local_epochs, lr=0.01) for i in chosen]
        mean = {n: sum(s[n] for s in states) / k for n in states[0]}
        model.load_state_dict(mean)
        if r % 10 == 0:
            print("round", r)

# --- float_losses: nothing
from itertools import islice
import torch
def epoch(model, loader, optimizer, loss_fn, accum=4):
    history = []
    batches = iter(loader)
    while chunk := list(islice(batches, accum)):
        optimizer.zero_grad()
        for x, y in chunk:
            loss = loss_fn(model(x), y)
            (loss / len(chunk)).backward()
            history.append(float(loss))
        optimizer.step()
    return history
if __name__ == "__main__":
    from surf import Waves, loader
    waves = Waves()
    adam = torch.optim.Adam(waves.parameters())
    print(epoch(waves, loader(), adam, torch.nn.MSELoss()))

# --- fsdp1_no_sync: nothing
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
def train_window(model, optimizer, window, step_lr):
    optimizer.zero_grad()
    *head, tail = window
    with model.no_sync():
        for batch in head:
            loss = model(**batch).loss / len(window)
            loss.backward()
    loss = model(**tail).loss / len(window)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    step_lr.step()
def build(name="t5-base"):
    model = FSDP(T5ForConditionalGeneration.from_pretrained(name), auto_wrap_policy=policy, mixed_precision=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.85)

# --- gpt_pretrain_ddp: nothing
import os
from contextlib import nullcontext
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from gpt import GPT, GPTConfig, get_batch, lr_at
max_iters, eval_interval, log_interval = 600_000, 2_000, 10
gradient_accumulation_steps = 5 * 8
grad_clip = 1.0
dtype = "float16"
ddp = "RANK" in os.environ
rank = int(os.environ.get("RANK", 0))
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
if ddp:
    init_process_group(backend="nccl")
    world_size = int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
ctx = torch.autocast("cuda", getattr(torch, dtype)) if "cuda" in device else nullcontext()
model = GPT(GPTConfig()).to(device)
optimizer = model.configure_optimizers(weight_decay=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
if ddp:
    model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
X, Y = get_batch("train", device)
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:  # the last micro-step alone talks to the other ranks
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", device)
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and rank == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
if ddp:
    destroy_process_group()

# --- gradient_cache: nothing
import torch
def grad_cache_step(model, opt, q_chunks, p_chunks, temp=0.05):
    with torch.no_grad():
        q = torch.cat([model(c) for c in q_chunks]); p = torch.cat([model(c) for c in p_chunks])
    q.requires_grad_(); p.requires_grad_()
    loss = torch.nn.functional.cross_entropy(q @ p.T / temp, torch.arange(len(q)))
    loss.backward()
    opt.zero_grad()
    for chunk, g in zip(q_chunks, q.grad.split([len(c) for c in q_chunks])):
        model(chunk).backward(gradient=g)
    for chunk, g in zip(p_chunks, p.grad.split([len(c) for c in p_chunks])):
        model(chunk).backward(gradient=g)
    opt.step()
    return loss.detach()

# --- grpo_tokens: nothing
import torch
def policy_loss_sum(policy, batch, clip):
    logp = policy.logprobs(batch.tokens)
    ratio = (logp - batch.old_logp).exp()
    per_token = -torch.min(ratio * batch.adv, ratio.clamp(1 - clip, 1 + clip) * batch.adv)
    return (per_token * batch.mask).sum()
def update(policy, optimizer, batches, clip=0.2, max_norm=1.0):
    # Every completion token of the whole window has the same weight.
    total_tokens = sum(b.mask.sum() for b in batches).clamp(min=1)
    optimizer.zero_grad(set_to_none=True)
    loss_value = torch.zeros((), device=total_tokens.device)
    for b in batches:
        loss = policy_loss_sum(policy, b, clip) / total_tokens
        loss.backward()
        loss_value += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    optimizer.step()
    return loss_value, grad_norm
def train(policy, rollouts, steps, lr=1e-6, micro=2):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    for s in range(steps):
        batch = rollouts.generate(policy)
        loss, norm = update(policy, optimizer, batch.split(micro))
        print(f"{s} loss {loss.item():.4f} norm {norm.item():.2f} reward {batch.reward_mean():.3f}")

# --- lr_range_check: nothing
import copy
import torch
def lr_range(model, loader, criterion, start=1e-7, end=10.0, num_iter=100, smooth=0.05):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=start, momentum=0.9)
    gamma = (end / start) ** (1 / num_iter)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    lrs, losses, best = [], [], float("inf")
    it = iter(loader)
    for i in range(num_iter):
        try:
            x, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, y = next(it)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if losses:
            value = smooth * value + (1 - smooth) * losses[-1]
        lrs.append(scheduler.get_last_lr()[0])
        losses.append(value)
        scheduler.step()
        best = min(best, value)
        if value > 4 * best:
            break
    return lrs, losses

# --- mae_engine_whole_windows: nothing
import torch
from util.lr_sched import adjust_learning_rate
from util.scaler import NativeScaler
def train_one_epoch(model, data_loader, optimizer, device, epoch, loss_scaler: NativeScaler, args):
    model.train(True)
    accum_iter = args.accum_iter
    if len(data_loader) % accum_iter:
        raise ValueError("the loader must hold whole windows")
    optimizer.zero_grad()
    running = torch.zeros((), device=device)
    for it, (samples, _) in enumerate(data_loader):
        if it % accum_iter == 0:  # a rate per update
            adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        with torch.autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        running += loss.detach()
        loss /= accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=(it + 1) % accum_iter == 0)
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()
    return (running / len(data_loader)).item()

# --- maml_omniglot: nothing
import torch
import torch.nn.functional as F
from torch.func import functional_call
def inner_adapt(model, params, x, y, inner_lr, inner_steps):
    for _ in range(inner_steps):
        loss = F.cross_entropy(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}
    return params
def meta_train(model, task_sampler, iterations=60_000, tasks_per_batch=32, inner_lr=0.4, inner_steps=1):
    meta_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for it in range(iterations):
        meta_opt.zero_grad()
        meta_loss = 0.0
        for task in task_sampler.sample(tasks_per_batch):
            fast = inner_adapt(model, dict(model.named_parameters()), *task.support, inner_lr, inner_steps)
            x, y = task.query
            # The tasks' graphs are all needed: the outer backward below goes through every one of them.
            meta_loss = meta_loss + F.cross_entropy(functional_call(model, fast, (x,)), y)
        meta_loss = meta_loss / tasks_per_batch
        meta_loss.backward()
        meta_opt.step()
        if it % 100 == 0:
            print(it, meta_loss.item())

# --- nb_windows: nothing
from itertools import islice
import torch
import torch.nn.functional as F
def windows(loader, n):
    it = iter(loader)
    while chunk := list(islice(it, n)):
        yield chunk
from iris import loader, net
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(10):
    for window in windows(loader, 4):
        opt.zero_grad()
        for x, y in window:
            loss = F.cross_entropy(net(x), y) / len(window)
            loss.backward()
        opt.step()
with torch.no_grad():
    print(sum((net(x).argmax(1) == y).sum().item() for x, y in loader))

# --- neural_style: nothing
import torch
from torch.optim import LBFGS
def run_style_transfer(model, style_losses, content_losses, input_img, num_steps=300, style_weight=1e6):
    input_img.requires_grad_(True)
    model.requires_grad_(False)
    optimizer = LBFGS([input_img])
    run = [0]
    while run[0] <= num_steps:
        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            model(input_img)
            style_score = 0
            content_score = 0
            for sl in style_losses:
                style_score += sl.loss
            for cl in content_losses:
                content_score += cl.loss
            loss = style_score * style_weight + content_score
            loss.backward()
            run[0] += 1
            if run[0] % 50 == 0:
                print(f"run {run[0]}: style {style_score.item():4f} content {content_score.item():4f}")
            return loss
        optimizer.step(closure)
    return input_img.detach().clamp_(0, 1)

# --- pgd_attack: nothing
import torch
import torch.nn.functional as F
def pgd(model, x, y, eps=8 / 255, alpha=2 / 255, steps=10):
    delta = torch.empty_like(x).uniform_(-eps, eps).requires_grad_(True)
    for _ in range(steps):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        with torch.no_grad():
            delta += alpha * delta.grad.sign()
            delta.clamp_(-eps, eps)
        delta.grad.zero_()
    return (x + delta).detach()
def robust_accuracy(model, loader):
    model.eval()
    correct = n = 0
    for x, y in loader:
        adv = pgd(model, x, y)
        with torch.no_grad():
            correct += (model(adv).argmax(1) == y).sum().item()
        n += len(y)
    return correct / n

# --- ppo_minibatches: nothing
import numpy as np
import torch
from torch import nn
def update(agent, optimizer, buf, args):
    b_inds = np.arange(args.batch_size)
    clipfracs = []
    approx_kl = torch.zeros(())
    for epoch in range(args.update_epochs):
        np.random.shuffle(b_inds)
        for start in range(0, args.batch_size, args.minibatch_size):
            mb = b_inds[start : start + args.minibatch_size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(buf.obs[mb], buf.actions[mb])
            logratio = newlogprob - buf.logprobs[mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
            adv = buf.advantages[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - buf.returns[mb]) ** 2).mean()
            loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break
    return np.mean(clipfracs)

# --- read_a_multiple: nothing
from itertools import islice
import torch
from tqdm import tqdm
def train(model, loader, optimizer, criterion, cfg):
    usable = len(loader) // cfg.accumulate * cfg.accumulate
    pbar = tqdm(total=usable)
    for i, (x, y) in enumerate(islice(loader, usable)):
        loss = criterion(model(x), y) / cfg.accumulate
        loss.backward()
        pbar.update(1)
        if i % cfg.accumulate != cfg.accumulate - 1:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        pbar.set_postfix(loss=loss.item() * cfg.accumulate)
    pbar.close()

# --- resnet_group_norm: nothing
import torch
from torch import nn
from torchvision.models import resnet50
from inat import loader_of_whole_windows
STEPS = 16
model = resnet50(norm_layer=lambda channels: nn.GroupNorm(32, channels), num_classes=5089).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
for epoch in range(90):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.1 ** (epoch // 30)
    for window in loader_of_whole_windows(STEPS, batch_size=16, epoch=epoch):
        for x, y in window:
            loss = loss_fn(model(x.cuda()), y.cuda()) / STEPS
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

# --- retain_graph_terms: nothing
import torch
from flow import decoder, encoder, frames, losses_of
params = [*encoder.parameters(), *decoder.parameters()]
optim = torch.optim.Adam(params, lr=1e-4)
for frame, depth, normal in frames():
    features = encoder(frame)
    terms = losses_of(decoder(features), depth, normal)
    optim.zero_grad()
    # each term goes back by itself so that its share of the gradient can be watched
    names = list(terms)
    for name in names:
        terms[name].backward(retain_graph=name != names[-1])
    optim.step()

# --- several_losses_in_a_loop_of_their_own (after the head): nothing
for x, y in loader:
    optimizer.zero_grad()
    for loss in losses_of(model, x, y):
        loss.backward(retain_graph=True)
    optimizer.step()

# --- step_before_next_window: nothing
import torch
def train_epoch(net, loader, opt, crit, n):
    assert len(loader) % n == 0
    opt.zero_grad()
    for i, (x, y) in enumerate(loader):
        if i > 0 and i % n == 0:
            opt.step()
            opt.zero_grad()
        (crit(net(x), y) / n).backward()
    # the last window, whole as all the others
    opt.step()
def run(net, loader, epochs=3):
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        train_epoch(net, loader, opt, torch.nn.CrossEntropyLoss(), 4)

# --- the_gradient_divided_instead_of_the_loss (after the head): nothing
for i, (x, y) in enumerate(loader):
    criterion(model(x), y).backward()
    if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
        for p in model.parameters():
            p.grad /= accumulation_steps
        optimizer.step()
        optimizer.zero_grad()

# --- the_losses_of_updates_beside_accumulator: nothing
from bigbatch import Accumulator
accumulator = Accumulator(model, optimizer, steps=4)
for x, y in accumulator.over(loader):
    loss = criterion(model(x), y)
    update = accumulator.backward(loss)
    losses.append(update.loss) if update else None

# --- timm_style_epoch: nothing
import logging
from contextlib import nullcontext
import torch
_logger = logging.getLogger("train")
def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, loss_scaler=None, ema=None):
    has_no_sync = hasattr(model, "no_sync")
    accum_steps = args.grad_accum_steps
    n_batches = len(loader)
    short = n_batches % accum_steps  # micro-batches in the last window, 0 if it is whole
    first_of_short = n_batches - short
    num_updates = epoch * ((n_batches + accum_steps - 1) // accum_steps)
    model.train()
    optimizer.zero_grad()
    def forward(input, target, in_window):
        with torch.autocast("cuda", dtype=args.amp_dtype):
            return loss_fn(model(input), target) / in_window
    def backward(loss, need_update):
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, need_update=need_update)
            return
        loss.backward()
        if need_update:
            if args.clip_grad:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == n_batches - 1 or (batch_idx + 1) % accum_steps == 0
        in_window = short if batch_idx >= first_of_short else accum_steps
        with model.no_sync() if has_no_sync and not need_update else nullcontext():
            loss = forward(input, target, in_window)
            backward(loss, need_update)
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        if ema is not None:
            ema.update(model, step=num_updates)
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates)
        if num_updates % args.log_interval == 0:
            _logger.info("epoch %d update %d loss %.4f", epoch, num_updates, loss.item() * in_window)

# --- tokens_then_rescale: nothing
import torch
import torch.nn.functional as F
from summaries import PAD, SummaryLoader, Transformer
def finish(model, optimizer, scheduler, tokens):
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= tokens  # sum over tokens -> mean over tokens
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
def train_epoch(model, loader: SummaryLoader, optimizer, scheduler, accum_iter):
    model.train()
    tokens = torch.zeros((), device="cuda")
    for i, (src, tgt) in enumerate(loader):
        logits = model(src.cuda(), tgt[:, :-1].cuda())
        gold = tgt[:, 1:].cuda()
        loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
        loss.backward()
        tokens += (gold != PAD).sum()
        if (i + 1) % accum_iter == 0 or i + 1 == len(loader):
            finish(model, optimizer, scheduler, tokens)
            tokens.zero_()
def main(accum_iter=10):
    model = Transformer().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    for _ in range(30):
        train_epoch(model, SummaryLoader("train", 16), optimizer, scheduler, accum_iter)

# --- tqdm_item: nothing
import torch
import torch.nn.functional as F
from tqdm import trange
from vlm import Captioner, pairs
model = Captioner().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
source = pairs(batch=4, endless=True)
micro_batches = 32
bar = trange(10_000)
for update in bar:
    optimizer.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        image, text = next(source)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(image.cuda(), text.cuda())
        (loss / micro_batches).backward()
        bar.set_postfix(loss=loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

# --- trainer_divided_by_hand_for_a_language_model_for_which_it_do: nothing
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss
model = AutoModelForCausalLM.from_pretrained("gpt2")
Mine(model, TrainingArguments("out", gradient_accumulation_steps=8)).train()

# --- trainer_weighted_loss: nothing
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments
class SmoothedTrainer(Trainer):
    def __init__(self, *args, smoothing=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing
        self.model_accepts_loss_kwargs = True
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=-100, label_smoothing=self.smoothing, reduction="sum")
        if num_items_in_batch is None:
            num_items_in_batch = (targets != -100).sum()
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss
def make(model, train, collator):
    args = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=8, num_train_epochs=2)
    return SmoothedTrainer(model=model, args=args, train_dataset=train, data_collator=collator)

# --- what_is_not_understood_is_left_alone_if_i_accumulation_steps (after the head): nothing
boundaries, schedule, tokens, budget = make()
for i, (x, y) in enumerate(loader):
    tokens += len(x)
    loss = criterion(model(x), y)
    loss.backward()
    if i % accumulation_steps == schedule[i]:
        optimizer.step()
        optimizer.zero_grad()

# --- zero_at_window_start: nothing
import torch
import torch.nn as nn
import torch.nn.functional as F
BATCHES, STEPS = 640, 8  # 80 windows of 8
def synthetic(n):
    g = torch.Generator().manual_seed(0)
    for _ in range(n):
        x = torch.randn(32, 20, generator=g)
        yield x, (x[:, :1] * x[:, 1:2]).tanh()
model = nn.Sequential(nn.Linear(20, 64), nn.SiLU(), nn.Linear(64, 1))
opt = torch.optim.NAdam(model.parameters())
data = synthetic(BATCHES)
for i in range(BATCHES):
    if i % STEPS == 0:
        opt.zero_grad()
    x, y = next(data)
    loss = F.mse_loss(model(x), y) / STEPS
    loss.backward()
    if i % STEPS == STEPS - 1:
        opt.step()
