"""The models that are timed: a linear one, a perceptron and a GPT, each as small as its well-known example."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def linear() -> nn.Module:
    """Return the textbook experiment's model: ten features, two classes."""
    return nn.Linear(10, 2)


def perceptron() -> nn.Module:
    """Return the perceptron that is usually trained on MNIST: 0.67 M parameters."""
    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Every token looks at those before it."""
        split = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """A decoder-only transformer with tied embeddings, after nanoGPT."""

    def __init__(self, *, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the next token at every place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(hidden), self.tokens.weight)


def small_gpt() -> nn.Module:
    """Return nanoGPT's example for a machine without a GPU: four layers, 0.8 M parameters."""
    return GPT(vocabulary=65, context=64, layers=4, heads=4, width=128)


def gpt_124m() -> nn.Module:
    """Return GPT-2's smallest, its vocabulary padded to a multiple of 64; for a GPU."""
    return GPT(vocabulary=50304, context=1024, layers=12, heads=12, width=768)
