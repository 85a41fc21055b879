import torch
from torch import nn


def ppo_update(agent, optimizer, rollout, args):
    """Minibatches decide the gradient; micro-batches only decide the memory."""
    n = rollout.size
    for _ in range(args.update_epochs):
        perm = torch.randperm(n, device=rollout.device)
        for mb in perm.split(args.minibatch_size):
            adv = rollout.advantages[mb]
            mean, std = adv.mean(), adv.std()
            optimizer.zero_grad()
            for micro in mb.split(args.micro_batch_size):
                a = (rollout.advantages[micro] - mean) / (std + 1e-8)
                logp, entropy, value = agent.evaluate(rollout.obs[micro], rollout.actions[micro])
                ratio = (logp - rollout.logprobs[micro]).exp()
                pg = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                vf = nn.functional.mse_loss(value, rollout.returns[micro])
                loss = pg + args.vf_coef * vf - args.ent_coef * entropy.mean()
                (loss * (len(micro) / len(mb))).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
