"""A Llama-shaped model of 1.04 billion frozen bf16 weights with low-rank adapters on its queries and values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin float32 matrices beside it (Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.scale = alpha / rank
        device = frozen.weight.device
        self.down = nn.Parameter(torch.empty(rank, frozen.in_features, device=device, dtype=torch.float32))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank, device=device, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Autocast brings the adapters to the frozen weights' type."""
        return self.frozen(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


@dataclass(frozen=True)
class LlamaShape:
    """What makes a Llama; the defaults are Llama 3.2 1B's with a vocabulary of 32,000."""

    layers: int = 16
    width: int = 2048
    intermediate: int = 8192
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 32_000
    context: int = 4096


def llama_with_lora(shape: LlamaShape, device: str, rank: int = 16) -> nn.Module:
    """Build it on the device with random weights: the same for everyone; checkpointed and ready to be trained."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = LoraLinear(attention.q_proj, rank, alpha=2.0 * rank)
        attention.v_proj = LoraLinear(attention.v_proj, rank, alpha=2.0 * rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """Return what is trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
