"""Perplexity of a causal language model over a padded test set. Nothing is trained here."""

import math

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def perplexity(name, texts, batch_size=8):
    tok = AutoTokenizer.from_pretrained(name)
    tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).eval().cuda()
    nll, n = 0.0, 0
    steps = 0
    for chunk in DataLoader(texts, batch_size=batch_size):
        enc = tok(list(chunk), return_tensors="pt", padding=True, truncation=True).to("cuda")
        labels = enc.input_ids.masked_fill(enc.attention_mask == 0, -100)
        loss = model(**enc, labels=labels).loss
        tokens = (labels[:, 1:] != -100).sum()
        nll += loss * tokens
        n += tokens
        steps += 1
        if steps % 4 == 0:
            print(f"{steps} batches, perplexity so far {math.exp((nll / n).item()):.2f}")
    return math.exp((nll / n).item())
