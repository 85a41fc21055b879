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
