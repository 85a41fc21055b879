# --- messy_ddp_amp: BB104, BB303, BB304, BB401
import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
def train(rank, model, loader, epochs, accum=8):
    model = DDP(model.cuda(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * len(loader) // accum + epochs)
    scaler = GradScaler()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            with autocast():
                loss = torch.nn.functional.cross_entropy(model(x.cuda(rank)), y.cuda(rank)) / accum
            scaler.scale(loss).backward()  # expect: BB401
            if (step + 1) % accum == 0 or step + 1 == len(loader):  # expect: BB104
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()  # expect: BB303
            scheduler.step()  # expect: BB304
            if rank == 0:
                print(epoch, step, loss.item())

# --- scaler_and_schedule: BB303, BB304
import torch
from lm_data import blocks
from lm_model import LM
def train(cfg):
    lm = LM(cfg).cuda()
    opt = torch.optim.AdamW(lm.parameters(), lr=cfg.lr)
    lr_sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.updates)
    scaler = torch.amp.GradScaler("cuda")
    data = blocks(cfg.block, cfg.micro_batch)
    for update in range(cfg.updates):
        for micro_step in range(cfg.accum):
            x, y = next(data)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = lm(x, y) / cfg.accum
            scaler.scale(loss).backward()
            if micro_step == cfg.accum - 1:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
                scaler.step(opt)
                opt.zero_grad(set_to_none=True)
            scaler.update()  # expect: BB303
            lr_sched.step()  # expect: BB304

# --- scaler_class: BB303
import torch
class HalfPrecisionLoop:
    def __init__(self, model, optimizer, source, window):
        self.model = model
        self.optimizer = optimizer
        self.source = source
        self.window = window
        self.grad_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    def micro(self):
        x, y = next(self.source)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.grad_scaler.scale(loss / self.window).backward()
        self.grad_scaler.update()  # expect: BB303
    def macro(self):
        for _ in range(self.window):
            self.micro()
        self.grad_scaler.step(self.optimizer)
        self.optimizer.zero_grad()
    def run(self, updates):
        for _ in range(updates):
            self.macro()

# --- scaler_modulo: BB103, BB303
import torch
from torch.cuda.amp import GradScaler, autocast
from tqdm import tqdm
from kitti import Flow, FlowNetS, epe
ACC = 4
model = FlowNetS().cuda()
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
scaler = GradScaler()
loader = torch.utils.data.DataLoader(Flow("train"), batch_size=2, shuffle=True)
for epoch in range(60):
    for i, (a, b, flow) in enumerate(tqdm(loader)):
        with autocast(dtype=torch.float16):
            loss = epe(model(a.cuda(), b.cuda()), flow.cuda()) / ACC
        scaler.scale(loss).backward()
        if (i + 1) % ACC == 0:  # expect: BB103
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()  # expect: BB303

# --- scaler_update_each: BB303
import torch
import torch.nn.functional as F
from lipreading import LipNet, clips
net = LipNet().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cuda")
it = clips(batch=4, endless=True)
n_micro = 8
for update in range(30_000):
    for _ in range(n_micro):
        video, word = next(it)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(video.cuda()), word.cuda()) / n_micro
        scaler.scale(loss).backward()
        scaler.update()  # expect: BB303
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    opt.zero_grad()

# --- scaler_update_outside: BB303
import torch
from torch.cuda import amp
from tumours import Tumours, SwinTiny
def train_one_epoch(model, optimizer, loader, scaler, accumulation):
    if len(loader) % accumulation:
        raise RuntimeError("pad the epoch")
    criterion = torch.nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        with amp.autocast():
            loss = criterion(model(x.cuda()), y.cuda()) / accumulation
        scaler.scale(loss).backward()
        if (step + 1) % accumulation == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()  # expect: BB303
if __name__ == "__main__":
    model = SwinTiny(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = amp.GradScaler()
    loader = torch.utils.data.DataLoader(Tumours(), batch_size=8, shuffle=True, drop_last=True)
    for _ in range(30):
        train_one_epoch(model, optimizer, loader, scaler, 4)
