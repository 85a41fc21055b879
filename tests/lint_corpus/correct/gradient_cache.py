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
