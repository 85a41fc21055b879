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
