#!/usr/bin/env python
"""Reptile: k ordinary SGD steps on one task, then move the weights a little towards where they ended."""
from copy import deepcopy

import torch
import torch.nn.functional as F

K = 10
META_ITERS = 20000
outer_step = 0.1


def train(net, tasks):
	for it in range(META_ITERS):
		before = deepcopy(net.state_dict())
		task = tasks.sample()
		optim = torch.optim.SGD(net.parameters(), lr=0.02)
		for k in range(K):
			x, y = task.minibatch(10)
			optim.zero_grad()
			F.mse_loss(net(x), y).backward()
			optim.step()
		after = net.state_dict()
		frac = outer_step * (1 - it / META_ITERS)
		net.load_state_dict({n: before[n] + (after[n] - before[n]) * frac for n in before})
		if it % 1000 == 0:
			print("iteration", it, "evaluating ...")
