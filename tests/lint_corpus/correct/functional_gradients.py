import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value


def loss_of(params, model, x, y):
    return F.cross_entropy(functional_call(model, params, (x,)), y)


def sgd(model, window_source, lr=0.1, updates=1000):
    """Accumulate without touching .grad at all."""
    params = {k: v.detach().clone() for k, v in model.named_parameters()}
    fn = grad_and_value(loss_of)
    for u in range(updates):
        total = None
        window = window_source()
        for x, y in window:
            grads, value = fn(params, model, x, y)
            grads = {k: g / len(window) for k, g in grads.items()}
            total = grads if total is None else {k: total[k] + grads[k] for k in total}
        params = {k: p - lr * total[k] for k, p in params.items()}
        if u % 100 == 0:
            print(u, value.item())
    return params
