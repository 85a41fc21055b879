"""Hugging Face models from their configurations: proved as they are, and told what is wrong with what is planted."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Options, verify

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

WORDS, WIDTH = 50, 7
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
Batch = dict[str, Tensor]


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
LAYER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(name: str, **config: Any) -> nn.Module:
    """Make a model of its configuration, of the usual sizes where nothing else is said."""
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**{**SIZES, **config})).train()
    return model


def gpt2(**dropout: float) -> nn.Module:
    """A GPT-2 of two layers."""
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(
        vocab_size=WORDS, **shape, **(dropout or NO_DROPOUT), bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).train()


def bert(dropout: float = 0.0) -> nn.Module:
    """A BERT of two layers."""
    return made("BertForMaskedLM", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def resnet() -> nn.Module:
    """A ResNet of two stages, with its BatchNorm."""
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 4}
    return made("ResNetForImageClassification", **shape)


def clip() -> nn.Module:
    """A CLIP of one layer on each side."""
    ends = {"max_position_embeddings": 16, "eos_token_id": WORDS - 1, "bos_token_id": 1}
    text_config = {**LAYER, "vocab_size": WORDS, **ends}
    vision_config = {**LAYER, "image_size": 16, "patch_size": 8}
    return made("CLIPModel", text_config=text_config, vision_config=vision_config, projection_dim=8)


llama = partial(made, "LlamaForCausalLM", num_key_value_heads=2)
experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5}
mixture = partial(made, "MixtralForCausalLM", num_key_value_heads=2, **experts)


def text(number: int = 9) -> Batch:
    """Sentences of unlike length."""
    words = torch.randint(1, WORDS, (number, WIDTH))
    mask = (torch.arange(WIDTH) < torch.randint(3, WIDTH + 1, (number, 1))).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def images(number: int = 9) -> Batch:
    """Noise of four classes."""
    return {"pixel_values": torch.randn(number, 3, 16, 16), "labels": torch.randint(0, 4, (number,))}


def pairs(number: int = 9) -> Batch:
    """Sentences beside images."""
    words = text(number)
    return {"input_ids": words["input_ids"], "attention_mask": words["attention_mask"], **images(number)}


def contrastive(model: Any, batch: Batch) -> Tensor:
    """CLIP's own loss."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    return model(**given, return_loss=True).loss


def textbook(model: Any, micro_batches: list[Batch]) -> None:
    """Divide by the number of micro-batches."""
    for batch in micro_batches:
        (model(**batch).loss / len(micro_batches)).backward()


def checkpointed() -> nn.Module:
    """A GPT-2 with dropout that runs its layers again in backward."""
    model: Any = gpt2(**DROPOUT)
    model.gradient_checkpointing_enable()
    return model


DROPS = "transformer.drop, transformer.h.0.attn.resid_dropout and 5 more"
BERT_DROPS = "bert.embeddings.dropout, bert.encoder.layer.0.attention.self and 5 more"
NORMS = "resnet.embedder.embedder.normalization, resnet.encoder.stages.0.layers.0.layer.0.normalization and 4 more"
MICRO = Options(batch_norm="micro")
# The model, its batch, how it is verified, and the kinds and places that are found, and nothing else.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], dict[str, Any], dict[str, str]]] = {
    "Llama": (llama, text, {}, {}),
    "Llama in the textbook's loop": (llama, text, {"train_window": textbook}, {"wrong-count": ""}),
    "GPT-2": (gpt2, text, {}, {}),
    "GPT-2 in bfloat16": (lambda: gpt2().bfloat16(), text, {}, {}),
    "GPT-2 with dropout and checkpoints": (checkpointed, text, {}, {"randomness": DROPS}),
    "GPT-2 with dropout in the textbook's loop": (
        lambda: gpt2(**DROPOUT), text, {"train_window": textbook}, {"randomness": DROPS, "wrong-count": ""}
    ),
    "BERT": (bert, text, {}, {}),
    "BERT, as many samples as words": (bert, lambda: text(WIDTH), {}, {}),
    "BERT with dropout": (lambda: bert(0.1), text, {}, {"randomness": BERT_DROPS}),
    "ResNet": (resnet, images, {}, {}),
    "ResNet by the micro-batch": (resnet, images, {"options": MICRO}, {"batch-norm": NORMS}),
    "ResNet in a loop": (resnet, lambda: images(8), {"train_window": textbook}, {"batch-norm": NORMS}),
    "CLIP": (clip, pairs, {"loss_fn": contrastive}, {"coupled-samples": "loss_fn"}),
    "Mixtral": (mixture, text, {}, {"coupled-samples": "MixtralForCausalLM.forward"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_comes_is_proved_and_what_is_wrong_is_found(name: str) -> None:
    """No cause is named where nothing is wrong, also of those that round to float32 inside."""
    torch.manual_seed(1)
    make, batch, settings, expected = MODELS[name]
    size = 3 if name.startswith("BERT, as many") else 4
    found = verify(make(), **{"loss_fn": None, "batch": batch(), "micro_batch_size": size, **settings})
    assert {cause.kind: cause.where for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected)


def test_the_count_of_a_language_model_is_named() -> None:
    """Its labels, shifted by one."""
    torch.manual_seed(3)
    found = verify(llama(), None, text(), 4, train_window=textbook)
    assert "in proportion to (batch['labels'][..., 1:] != -100).sum()" in found.causes[0].found


@pytest.mark.parametrize("seed", [0, 20, 23])
def test_a_bias_whose_gradient_cancels_is_judged_by_its_own_rounding(seed: int) -> None:
    """Electra computes its loss in float32: what is left of a sum that nearly vanishes is no mistake."""
    torch.manual_seed(seed)
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = made("ElectraForPreTraining", num_hidden_layers=1, embedding_size=16, **dropouts)
    batch = {"input_ids": torch.randint(WORDS, (10, 8)), "labels": torch.randint(2, (10, 8))}
    assert verify(model, None, batch, 4).exact
