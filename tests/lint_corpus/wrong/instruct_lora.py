import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import prompts_and_answers

name = "EleutherAI/pythia-410m"
tok = AutoTokenizer.from_pretrained(name)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(r=8)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ACCUM = 16


def encode(prompt, answer):
    p, a = tok(prompt).input_ids, tok(answer).input_ids
    ids = torch.tensor([p + a])
    labels = torch.tensor([[-100] * len(p) + a])  # learn the answer alone
    return ids.cuda(), labels.cuda()


examples = prompts_and_answers(endless=True)
for update in range(1500):
    optimizer.zero_grad()
    for _ in range(ACCUM):
        ids, labels = encode(*next(examples))
        out = model(input_ids=ids, labels=labels)
        loss = out.loss / ACCUM  # expect: BB203
        loss.backward()
    optimizer.step()
    if update % 50 == 0:
        print(update, loss.item() * ACCUM)
