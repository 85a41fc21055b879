import torch

from pong import Agent, rollouts

agent = Agent()
optimizer = torch.optim.RMSprop(agent.parameters(), lr=1e-4)
episodes = rollouts(agent)
batch_size = 10  # episodes for one update
done = 0

while done < 100_000:
    optimizer.zero_grad()
    collected = 0
    while collected < batch_size:
        logp, advantage = next(episodes)
        loss = -(logp * advantage).mean() / batch_size
        loss.backward()
        optimizer.step()  # expect: BB102
        collected += 1
    done += collected
