import torch

from flow import decoder, encoder, frames, losses_of

params = [*encoder.parameters(), *decoder.parameters()]
optim = torch.optim.Adam(params, lr=1e-4)

for frame, depth, normal in frames():
    features = encoder(frame)
    terms = losses_of(decoder(features), depth, normal)
    optim.zero_grad()
    # each term goes back by itself so that its share of the gradient can be watched
    names = list(terms)
    for name in names:
        terms[name].backward(retain_graph=name != names[-1])
    optim.step()
