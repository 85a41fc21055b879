import torch
import torch.nn.functional as F


@torch.no_grad()
def soft_targets(teacher, x, T):
    teacher.eval()
    return F.softmax(teacher(x) / T, dim=-1)


def distill(student, teacher, loader, *, epochs: int, T: float = 4.0, alpha: float = 0.7, device="cuda"):
    opt = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.05)
    for epoch in range(epochs):
        student.train()
        epoch_loss = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            q = soft_targets(teacher, x, T)
            logits = student(x)
            hard = F.cross_entropy(logits, y)
            soft = F.kl_div(F.log_softmax(logits / T, dim=-1), q, reduction="batchmean") * T * T
            loss = alpha * soft + (1 - alpha) * hard
            opt.zero_grad()
            loss.backward()
            opt.step()
            epoch_loss += loss.detach()
        print(f"epoch {epoch}: {(epoch_loss / len(loader)).item():.4f}")
