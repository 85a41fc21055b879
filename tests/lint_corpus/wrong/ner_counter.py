import torch

from ner import Tagger, batches

N_ACC = 5
tagger = Tagger()
opt = torch.optim.Adam(tagger.parameters(), lr=3e-5)

for epoch in range(4):
    count = 0
    opt.zero_grad()
    for sentence, tags in batches("conll/train.txt", size=8):
        loss = tagger.neg_log_likelihood(sentence, tags).mean() / N_ACC
        loss.backward()
        count += 1
        if count == N_ACC:  # expect: BB103
            opt.step()
            opt.zero_grad()
            count = 0
    print("done with epoch", epoch)
