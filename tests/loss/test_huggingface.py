# ruff: noqa: E501  (a row of a table is a line)
"""`outputs.loss` of Hugging Face models needs no argument: tiny ones from their configurations, in float64."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, across
from bigbatch.errors import LossError
from tests.support.reference import accumulated, assert_equal, big_batches, distance
from tests.support.samples import Batch, Loss, generator, normal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SPLIT = (3, 2, 1, 2)
VOCABULARY = 11
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Their own code rounds to float32 in the middle (RMSNorm), so weighing before or after differs by that rounding.
FLOAT32_INSIDE = 1e-6


@pytest.fixture(autouse=True)
def _float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses call `logits.float()`, which a float32 model does not notice: let a float64 one not notice either."""
    monkeypatch.setattr(Tensor, "float", lambda self: self)


def built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model with the same weights each time, large enough to matter, in float64."""

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = make().double().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return build


def text(n: int, seed: int) -> Batch:
    """Padded sentences, with labels of every kind."""
    by = generator(seed)
    width = 7
    lengths = torch.randint(3, width + 1, (n,), generator=by)
    mask = (torch.arange(width) < lengths[:, None]).long()
    tokens = torch.randint(2, VOCABULARY, (n, width), generator=by).masked_fill(mask == 0, 0)
    answer = (lengths * torch.rand(n, generator=by)).long()
    hidden = torch.rand(n, width, generator=by) < 0.5
    hidden[:, 1] = True
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "next": tokens.masked_fill(mask == 0, -100),
        "answers": tokens.masked_fill((mask == 0) | (torch.arange(width) < answer[:, None]), -100),
        "hidden": tokens.masked_fill(~hidden | (mask == 0), -100),
        "start": answer,
        "end": lengths - 1,
    }


def images(n: int, seed: int) -> Batch:
    """Small pictures."""
    by = generator(seed)
    return {
        "pixel_values": normal(n, 3, 8, 8, by=by),
        "class": torch.randint(3, (n,), generator=by),
    }


def asking(**names: str) -> Callable[[Any, Batch], Tensor]:
    """The loss of a model called with these inputs, as everybody calls it."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return model(**{argument: batch[name] for argument, name in names.items()}).loss

    return loss


TEXT = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
T = transformers


def tiny(cls: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of one or two small layers."""
    return built(lambda: getattr(T, cls)(getattr(T, config)(**settings)))


def bert(cls: str, **more: Any) -> Callable[[], nn.Module]:
    """BERT of two layers with the head that is asked for."""
    return tiny(cls, "BertConfig", **SIZES, **NO_DROPOUT, max_position_embeddings=16, **more)


LLAMA = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0}
llama = tiny("LlamaForCausalLM", "LlamaConfig", **LLAMA)
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0}
gpt2 = tiny("GPT2LMHeadModel", "GPT2Config", **GPT2, embd_pdrop=0.0, attn_pdrop=0.0)  # its head is its embedding's
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
t5 = tiny("T5ForConditionalGeneration", "T5Config", **T5, dropout_rate=0.0, decoder_start_token_id=0)
VISION = {key: value for key, value in SIZES.items() if key != "vocab_size"}
vit = tiny("ViTForImageClassification", "ViTConfig", **VISION, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=3)


def kept(name: str, *, shifted: bool = False) -> Callable[[Batch], float]:
    """Targets that are not ignored."""
    return lambda batch: int((batch[name][:, 1 if shifted else 0 :] != -100).sum())


MODELS: list[tuple[Loss, float]] = [
    (Loss("gpt2", gpt2, text, asking(**TEXT, labels="next"), count=kept("next", shifted=True)), 1e-12),
    (Loss("llama", llama, text, asking(**TEXT, labels="next"), count=kept("next", shifted=True)), FLOAT32_INSIDE),
    (Loss("bert-masked", bert("BertForMaskedLM"), text, asking(**TEXT, labels="hidden"), count=kept("hidden")), 1e-12),
    (Loss("bert-questions", bert("BertForQuestionAnswering"), text, asking(**TEXT, start_positions="start", end_positions="end")), 1e-12),
    (Loss("t5", t5, text, asking(**TEXT, labels="answers"), count=kept("answers")), FLOAT32_INSIDE),
    (Loss("vit", vit, images, asking(pixel_values="pixel_values", labels="class"), count=lambda b: len(b["class"])), 1e-12),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tolerance"), MODELS, ids=[case.name for case, _ in MODELS])
def test_outputs_loss_is_the_big_batch(case: Loss, tolerance: float) -> None:
    """Two updates over uneven micro-batches with labels of -100 unevenly placed, the second window short."""
    batches = case.micro_batches((*SPLIT, 1, 3))
    assert_equal(accumulated(case, batches, 4), big_batches(case, batches, 4), tolerance)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_with_their_gradient_checkpointing(reentrant: bool) -> None:
    """`gradient_checkpointing_enable()` changes nothing."""
    (case,) = [case for case, _ in MODELS if case.name == "gpt2"]
    batches = case.micro_batches(SPLIT)
    model: Any = case.model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(accumulated(case, batches, 4, model=model), big_batches(case, batches, 4))


def test_num_items_in_batch_is_refused() -> None:
    """A loss already divided by Trainer's own total is a sum over a number."""
    case = Loss(
        "items",
        gpt2,
        text,
        lambda m, b: m(b["input_ids"], labels=b["next"], num_items_in_batch=torch.tensor(40)).loss,
    )
    with pytest.raises(LossError, match="Div"):
        accumulated(case, case.micro_batches(SPLIT), 4)


EXPERTS = {"num_local_experts": 3, "output_router_logits": True, "router_aux_loss_coef": 0.5}
mixtral = tiny("MixtralForCausalLM", "MixtralConfig", **LLAMA, **EXPERTS)  # of three, balanced


def test_load_balancing_of_experts_is_exact_as_the_docs_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Accumulator refuses it; in a BigStep micro-batches meet inside the model, at a function of its module."""
    monkeypatch.undo()  # its experts count with `.float()`
    page = (Path(__file__).parents[2] / "docs" / "coupled.md").read_text()
    (code,) = re.findall(r"^(def balance.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "F": F, "across": across}
    exec(code, names)  # noqa: S102 - that is the test
    case = Loss("mixtral", lambda: mixtral().float(), text, asking(**TEXT, labels="next"))
    batches = [case.batch(10, seed) for seed in range(3)]
    with pytest.raises(LossError):
        accumulated(case, batches, 3)
    true = big_batches(case, batches, 1)
    model = case.model()
    step = BigStep(model, torch.optim.SGD(model.parameters(), lr=0.5), case.loss, micro_batch_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(T.models.mixtral.modeling_mixtral, "load_balancing_loss_func", names["balance"])
        for batch in batches:
            step(batch)
    assert distance([p.detach() for p in model.parameters()], true.weights) <= FLOAT32_INSIDE
