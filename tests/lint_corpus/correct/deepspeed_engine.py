import argparse

import deepspeed
import torch

from corpus import token_loader
from gpt import GPT, GPTConfig

ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 200}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.parse_args()
    model = GPT(GPTConfig())
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    for tokens in token_loader(micro_batch=4, length=1024):
        tokens = tokens.to(engine.device)
        logits = engine(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        # the engine divides, counts micro-batches, clips, steps and clears by itself
        engine.backward(loss)
        engine.step()
        if engine.global_steps >= 20_000:
            break


if __name__ == "__main__":
    main()
