"""InfoNCE with in-batch negatives: a question's own passage among those of all questions, and a hard negative of each.

python -m examples.coupled.info_nce
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across

TEMPERATURE = 0.05


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every passage of the batch is a candidate for each question of this micro-batch."""
    questions, answers, distractors = (
        F.normalize(model(batch[name]), dim=1) for name in ("questions", "answers", "distractors")
    )
    candidates = torch.cat([across.gather(answers), across.gather(distractors)])
    own = across.offset() + torch.arange(len(questions), device=questions.device)
    return F.cross_entropy(questions @ candidates.T / TEMPERATURE, own)


def network() -> nn.Module:
    """One encoder for questions and passages."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def samples(number: int) -> dict[str, Tensor]:
    """Questions, passages that answer them, and others that look alike."""
    questions = torch.randn(number, 16)
    return {
        "questions": questions,
        "answers": questions + 0.5 * torch.randn(number, 16),
        "distractors": questions + 2.0 * torch.randn(number, 16),
    }


def main() -> None:
    """Train on batches of 100 questions, 16 at a time."""
    torch.manual_seed(0)
    model = network()
    step = BigStep(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, micro_batch_size=16)
    for _ in range(5):
        update = step(samples(100))
        print(f"loss {update.loss:.4f} of {update.count:.0f} questions in {update.micro_batches} micro-batches")


if __name__ == "__main__":
    main()
