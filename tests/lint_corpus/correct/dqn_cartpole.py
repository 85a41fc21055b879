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
