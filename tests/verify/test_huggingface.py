"""Hugging Face models from their configurations: proved as they are, and told what is wrong with what is planted."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbatch import Options, verify

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

Batch = dict[str, Tensor]
WORDS, WIDTH = 50, 7
LAYER = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SIZES = {**LAYER, "vocab_size": WORDS, "num_hidden_layers": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, **ENDS}
LLAMA = {**SIZES, "num_key_value_heads": 2}
ROUTED = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 4}
SENTENCE = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": WORDS - 1, "bos_token_id": 1}
CLIP = {
    "text_config": {**LAYER, **SENTENCE, "num_hidden_layers": 1},
    "vision_config": {**LAYER, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
    "projection_dim": 8,
}


def made(name: str, config: dict[str, Any]) -> Any:
    """Make a model of its configuration."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config)).train()


def bert(dropout: float) -> dict[str, Any]:
    """Return the configuration of a small BERT."""
    return {**SIZES, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def text(number: int = 9) -> Batch:
    """Sentences of unlike length."""
    words = torch.randint(1, WORDS, (number, WIDTH))
    mask = (torch.arange(WIDTH) < torch.randint(3, WIDTH + 1, (number, 1))).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def images(number: int = 9) -> Batch:
    """Noise of four classes."""
    return {"pixel_values": torch.randn(number, 3, 16, 16), "labels": torch.randint(0, 4, (number,))}


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
    model = made("GPT2LMHeadModel", {**GPT2, **DROPOUT})
    model.gradient_checkpointing_enable()
    return model


def gpt2(**dropout: float) -> Callable[[], Any]:
    """Make a GPT-2."""
    return lambda: made("GPT2LMHeadModel", {**GPT2, **dropout})


def llama() -> Any:
    """Make a Llama."""
    return made("LlamaForCausalLM", LLAMA)


def resnet() -> Any:
    """Make a ResNet of two stages, with its BatchNorm."""
    return made("ResNetForImageClassification", RESNET)


LOOP: dict[str, Any] = {"train_window": textbook}
DROPS = {"randomness": "transformer.drop, transformer.h.0.attn.resid_dropout and 5 more"}
BERT_DROPS = {"randomness": "bert.embeddings.dropout, bert.encoder.layer.0.attention.self and 5 more"}
NORM = "resnet.embedder.embedder.normalization, resnet.encoder.stages.0.layers.0.layer.0.normalization and 4 more"
MIXTRAL = {"coupled-samples": "MixtralForCausalLM.forward"}
# The model, its batch, how it is verified, and the kinds and places that are found, and nothing else.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Batch], dict[str, Any], dict[str, str]]] = {
    "Llama": (llama, text, {}, {}),
    "Llama in the textbook's loop": (llama, text, LOOP, {"wrong-count": ""}),
    "GPT-2": (gpt2(**NO_DROPOUT), text, {}, {}),
    "GPT-2 in bfloat16": (lambda: gpt2(**NO_DROPOUT)().bfloat16(), text, {}, {}),
    "GPT-2 with dropout and checkpoints": (checkpointed, text, {}, DROPS),
    "GPT-2 with dropout in the textbook's loop": (gpt2(**DROPOUT), text, LOOP, {**DROPS, "wrong-count": ""}),
    "BERT": (lambda: made("BertForMaskedLM", bert(0.0)), text, {}, {}),
    "BERT, as many samples as words": (lambda: made("BertForMaskedLM", bert(0.0)), lambda: text(WIDTH), {}, {}),
    "BERT with dropout": (lambda: made("BertForMaskedLM", bert(0.1)), text, {}, BERT_DROPS),
    "ResNet": (resnet, images, {}, {}),
    "ResNet by the micro-batch": (resnet, images, {"options": Options(batch_norm="micro")}, {"batch-norm": NORM}),
    "ResNet in a loop": (resnet, lambda: images(8), LOOP, {"batch-norm": NORM}),
    "CLIP": (
        lambda: made("CLIPModel", CLIP),
        lambda: {**text(), **images()},
        {"loss_fn": contrastive},
        {"coupled-samples": "loss_fn"},
    ),
    "Mixtral": (lambda: made("MixtralForCausalLM", {**LLAMA, **ROUTED}), text, {}, MIXTRAL),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_it_comes_is_proved_and_what_is_wrong_is_found(name: str) -> None:
    """No cause is named where nothing is wrong, also of those that round to float32 inside; a count is named."""
    torch.manual_seed(3)
    make, batch, settings, expected = MODELS[name]
    size = 3 if name.startswith("BERT, as many") else 4
    found = verify(make(), **{"loss_fn": None, "batch": batch(), "micro_batch_size": size, **settings})
    assert {cause.kind: cause.where for cause in found.causes} == expected, str(found)
    assert found.exact == (not expected)
    shifted = "in proportion to (batch['labels'][..., 1:] != -100).sum()"
    assert name != "Llama in the textbook's loop" or shifted in found.causes[0].found


@pytest.mark.parametrize("seed", [0, 20, 23])
def test_a_bias_whose_gradient_cancels_is_judged_by_its_own_rounding(seed: int) -> None:
    """Electra computes its loss in float32: what is left of a sum that nearly vanishes is no mistake."""
    torch.manual_seed(seed)
    model = made("ElectraForPreTraining", {**bert(0.0), "num_hidden_layers": 1, "embedding_size": 16})
    batch = {"input_ids": torch.randint(WORDS, (10, 8)), "labels": torch.randint(2, (10, 8))}
    assert verify(model, None, batch, 4).exact
