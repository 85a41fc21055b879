import torch


def consistency_step(student, teacher, views, opt, temperature=0.1):
    """One image, many crops: the crops are terms of one loss, not micro-batches."""
    n_views = len(views)
    with torch.no_grad():
        target = (teacher(views[0]) / 0.04).softmax(-1)
    loss = 0
    for v in views[1:]:
        logp = (student(v) / temperature).log_softmax(-1)
        loss += -(target * logp).sum(-1).mean() / (n_views - 1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 0.004)
    return loss.detach()


def train(student, teacher, loader, epochs=100):
    opt = torch.optim.AdamW(student.parameters(), lr=5e-4)
    for _ in range(epochs):
        for views in loader:
            consistency_step(student, teacher, views, opt)
