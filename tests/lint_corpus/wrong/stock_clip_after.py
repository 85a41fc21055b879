# plain loop, one batch one step
import torch

from stocks import days, Net

net = Net()
optim = torch.optim.Adam(net.parameters(), lr=3e-4)
for epoch in range(12):
	for past, future in days(batch=128):
		optim.zero_grad()
		loss = torch.nn.functional.huber_loss(net(past), future)
		loss.backward()
		optim.step()
		torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # expect: BB301
