import deepspeed
import torch.nn.functional as F

from protein import ProteinLM, sequences

GAS = 16
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": GAS,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
net = ProteinLM()
model_engine, _, loader, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), training_data=sequences(), config=config
)

for tokens in loader:
    tokens = tokens.to(model_engine.local_rank)
    out = model_engine(tokens[:, :-1])
    loss = F.cross_entropy(out.transpose(1, 2), tokens[:, 1:])
    model_engine.backward(loss / GAS)  # expect: BB202
    model_engine.step()
