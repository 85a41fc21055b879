"""Put Hugging Face's Trainer to the proof, on tiny language models with padded sentences.

Trainer divides a window's loss by its labels that are not ignored, but for the first of each sentence, which a causal
language model does not predict. With a Llama it is exact. It knows by the name of a class that labels are shifted, and
that of GPT-2 does not tell (transformers 5.22): there it counts the first ones, too, and the gradient is too small.

python -m examples.verify_hf_trainer
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from bigbatch import verify

Batch = dict[str, Tensor]


def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
    """Train for one step of `gradient_accumulation_steps`, on the micro-batches as they are."""

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(micro_batches, batch_size=None))  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=1,
            gradient_accumulation_steps=len(micro_batches),
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(model, arguments, train_dataset=micro_batches)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def llama() -> nn.Module:
    """A Llama of two layers."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads)
    return LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    """A GPT-2 of two layers, without its dropout."""
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, **settings)
    ).train()


def samples(number: int) -> Batch:
    """Sentences of unlike length, padded."""
    words = torch.randint(1, 50, (number, 12))
    mask = (torch.arange(12) < torch.randint(3, 13, (number, 1))).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def main() -> None:
    """Prove both on ten sentences, four at a time."""
    torch.manual_seed(0)
    for network in (llama, gpt2):
        print(f"--- {network.__name__}\n")
        print(verify(network(), None, samples(10), micro_batch_size=4, train_window=train_window), "\n")


if __name__ == "__main__":
    main()
