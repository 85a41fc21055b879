"""What a verification says, what it refuses, and that it leaves everything as it was."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Options, errors, verify
from bigbatch.verifying.verification import Cause, Difference, Verification
from tests import defects
from tests.bombs import OUT_OF_MEMORY, seed
from tests.defects import Batch, by_samples, mean, network, samples


def draw() -> tuple[float, float, float]:
    """One number of each generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002, S311 - those that are restored


class Changing(nn.Module):
    """Every kind of state: BatchNorm, dropout, a buffer that is replaced, a frozen part, a layer at rest."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.frozen, self.resting = nn.Linear(8, 8), nn.Dropout(0.5).eval()
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Draw, count and write."""
        self.scale = self.scale * (1 + 1e-3 * random.random())  # noqa: S311 - no secret
        return self.last(self.drop(self.resting(self.frozen(self.norm(self.first(x)).tanh())))) * self.scale


def state(model: nn.Module) -> dict[str, Any]:
    """All of a model that a proof may not change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "tensors": {name: id(value) for name, value in model.state_dict(keep_vars=True).items()},
        "gradients": {name: (p.grad, p.requires_grad) for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
    }


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    """Compare, by identity where a tensor is to be the same one."""
    after = state(model)
    assert all(torch.equal(value, after["values"][name]) for name, value in before["values"].items())
    assert before["tensors"] == after["tensors"]
    assert all(
        a is b and x == y
        for (a, x), (b, y) in zip(*(each["gradients"].values() for each in (before, after)), strict=True)
    )
    assert before["modes"] == after["modes"]
    assert before["hooks"] == after["hooks"]
    assert before["attributes"] == after["attributes"]


def stepping_window(model: Any, micro_batches: list[Batch]) -> None:
    """A loop that changes weights, modes and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train()
    for batch in micro_batches:
        mean(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


WAYS: dict[str, dict[str, Any]] = {
    "BigStep": {},
    "plain statistics": {"options": Options(batch_norm="micro", check=False)},
    "a loop": {"train_window": stepping_window},
}


@pytest.mark.parametrize("in_place", [False, True], ids=["on a copy", "in place"])
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_as_it_was(way: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, the tensors that hold them, gradients, buffers, modes, hooks and generators."""
    seed()
    model, batch = Changing(), samples()
    model.first.weight.grad = torch.ones(8, 6)
    if in_place:
        refuse_copies(monkeypatch)
    before, numbers = state(model), None
    seed()
    numbers = draw()
    seed()
    verification = verify(model, mean, batch, 4, **WAYS[way])
    assert draw() == numbers
    assert_untouched(before, model)
    assert {"randomness"} <= {cause.kind for cause in verification.causes}


def refuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no module be copied, as one that holds a file or a lock."""

    def refuse(_self: object, _memo: object) -> object:
        raise TypeError("cannot pickle '_io.TextIOWrapper' object")

    monkeypatch.setattr(nn.Module, "__deepcopy__", refuse, raising=False)


@pytest.mark.parametrize("in_place", [False, True], ids=["on a copy", "in place"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_everything_is_as_it_was_after_an_error(
    error: type[BaseException], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised in the middle of a run, it comes out as it is."""
    seed()
    model, batch, calls = Changing(), samples(), 0

    def failing(network: Any, given: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise error("in the middle")
        return mean(network, given)

    if in_place:
        refuse_copies(monkeypatch)
    before = state(model)
    seed()
    numbers = draw()
    seed()
    with pytest.raises(error, match="in the middle"):
        verify(model, failing, batch, 4)
    assert draw() == numbers
    assert_untouched(before, model)


@pytest.mark.parametrize("in_place", [False, True], ids=["on a copy", "in place"])
def test_a_proof_is_the_same_on_a_copy_and_in_place(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact where it is, and with the same cause where it is not."""
    torch.manual_seed(0)
    clean, norm, batch = network(), network(nn.BatchNorm1d(8)), samples()
    if in_place:
        refuse_copies(monkeypatch)
    assert verify(clean, mean, batch, 4).exact
    found = verify(norm, mean, batch, 4, options=Options(batch_norm="micro"))
    assert [cause.kind for cause in found.causes] == ["batch-norm"]


def test_a_loss_that_knows_its_model_is_run_on_it() -> None:
    """A closure does not use the copy that it is given: then the model itself is lent, and comes back."""
    torch.manual_seed(0)
    model, batch = network(), samples()
    before = state(model)
    assert verify(model, lambda _, given: mean(model, given), batch, 4).exact

    def train_window(_: nn.Module, micro_batches: list[Batch]) -> None:
        defects.undivided(mean)(model, micro_batches)

    wrong = verify(model, mean, samples(12), 4, train_window=train_window)
    assert [cause.kind for cause in wrong.causes] == ["not-divided"]
    assert_untouched(before, model)


def test_a_gradient_hook_counts() -> None:
    """A copy would lose the hooks of parameters, so a model with some is lent itself."""
    torch.manual_seed(0)
    model = network()
    calls: list[int] = []

    def doubled(gradient: Tensor) -> Tensor:
        calls.append(1)
        return 2 * gradient

    next(model.parameters()).register_hook(doubled)
    assert verify(model, mean, samples(), 4).exact
    assert calls


def test_a_number_beside_the_buffers_is_put_back_in_place() -> None:
    """Each run finds it as it was given, so that it is a cause and no riddle."""
    torch.manual_seed(0)
    model = network(defects.Counting())
    next(model.parameters()).register_hook(lambda gradient: gradient)
    found = verify(model, mean, samples(), 4, options=Options(check=False))
    assert [cause.kind for cause in found.causes] == ["buffers-written"], str(found)
    assert vars(model[1])["calls"] == 0


def test_several_models() -> None:
    """As loss_fn takes them; parameters are named by the model's number."""
    torch.manual_seed(0)
    models = [nn.Linear(6, 8), nn.Linear(8, 3)]

    def loss_fn(both: list[nn.Module], batch: Batch) -> Tensor:
        return F.cross_entropy(both[1](both[0](batch[0])), batch[1])

    found = verify(models, loss_fn, samples(), 4)
    assert found.exact
    assert [each.name for each in found.differences] == ["[0].weight", "[0].bias", "[1].weight", "[1].bias"]


def test_a_model_that_knows_its_loss_and_extras() -> None:
    """Without loss_fn, and with one that returns extras."""
    torch.manual_seed(0)
    model, batch = network(), samples()
    assert verify(model, lambda m, b: (mean(m, b), {"inputs": b[0]}), batch, 4).exact

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Knowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Output:
            return Output(F.cross_entropy(self.inner(x), labels))

    assert verify(Knowing(), None, {"x": batch[0], "labels": batch[1]}, 4).exact


def test_a_list_of_samples_is_collated() -> None:
    """As BigStep takes it, in float64, too."""
    torch.manual_seed(0)
    inputs, labels = samples()
    options = Options(collate=torch.utils.data.default_collate)
    pairs = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)]
    assert verify(network(), mean, pairs, 4, options=options).exact
    assert verify(network(), mean, pairs, 4, options=options, train_window=by_samples(mean)).exact


def test_packed_sequences_are_verified_as_they_are_packed() -> None:
    """The sizes are those of BigStep's own micro-batches."""
    torch.manual_seed(0)
    lengths = torch.tensor([2, 7, 3, 5, 7, 1])
    mask = (torch.arange(7) < lengths[:, None]).float()
    batch = {"x": torch.randn(6, 7, 4) * mask[..., None], "attention_mask": mask}

    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def loss_fn(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        labels = torch.where(given["attention_mask"] > 0, 1, -100)
        return F.cross_entropy(model(given["x"]).flatten(0, 1), labels.flatten())

    found = verify(PerToken(), loss_fn, batch, 3, options=Options(lengths="attention_mask", token_budget=8))
    assert found.exact, str(found)
    assert sum(found.micro_batches) == 6
    assert len(found.micro_batches) > 2


# Low precision.


def same_sign(number: int) -> Batch:
    """Samples whose gradients agree in sign, so that small ones are lost in a large sum."""
    return torch.rand(number, 6) + 0.5, torch.zeros(number, dtype=torch.long)


def test_sums_in_low_precision_are_found() -> None:
    """Exact in float64, and a bfloat16 sum of many that agree loses more than the big batch does."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).bfloat16()

    def summed(given: Any, batch: Batch) -> Tensor:
        return given(batch[0].to(given.weight.dtype)).sum(1).mean()

    found = verify(model, summed, same_sign(512), 1, train_window=by_samples(summed))
    assert not found.exact
    assert [cause.kind for cause in found.causes] == ["low-precision-sums"], str(found)
    assert found.worst is not None
    assert found.worst.exact_difference <= 1e-12
    assert str(found).count("Exact in float64, not in bfloat16")
    assert verify(model, summed, same_sign(512), 1).exact  # float32 sums
    narrow = verify(model, summed, same_sign(512), 1, options=Options(gradient_dtype=None))
    assert [cause.kind for cause in narrow.causes] == ["low-precision-sums"]
    assert "Options(gradient_dtype=torch.float32)" in narrow.causes[0].remedy


def test_gradients_kept_in_fewer_digits_are_found() -> None:
    """A loop that keeps float32 copies of a float64 model's gradients."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.to(torch.bfloat16).to(p.dtype)

    found = verify(network(), mean, samples(), 4, train_window=train_window)
    assert [(cause.kind, cause.where) for cause in found.causes] == [("low-precision-sums", "bfloat16 gradients")]


def test_a_model_that_does_not_run_in_float64_is_judged_in_its_own() -> None:
    """And says so; a mistake is still found."""
    torch.manual_seed(0)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise RuntimeError("expected scalar type Float but found Double")
            return self.inner(x)

    found = verify(Narrow(), mean, samples(), 4)
    assert found.exact, str(found)
    assert not found.in_float64
    assert "This does not run in float64 (RuntimeError: expected scalar type Float" in found.notes[0]
    assert found.to_dict()["differences"][0]["exact_difference"] is None
    wrong = verify(Narrow(), mean, samples(), 4, train_window=defects.textbook(mean))
    assert [cause.kind for cause in wrong.causes] == ["wrong-count"], str(wrong)


def test_a_loop_under_autocast_is_judged_by_a_big_batch_under_autocast() -> None:
    """Its rounding is the autocast's, not a mistake."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        total = sum(len(labels) for _, labels in micro_batches)
        for batch in micro_batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean(model, batch)
            (loss * len(batch[1]) / total).backward()

    found = verify(network(), mean, samples(), 4, train_window=train_window)
    assert found.exact, str(found)
    assert found.differences[0].own_floor > 1e-4


# Memory.


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_that_does_not_fit_is_proved_in_part(error: Callable[[], BaseException]) -> None:
    """Half of it, or a quarter, and the text says how much."""
    torch.manual_seed(0)

    def small(model: Any, batch: Batch) -> Tensor:
        if len(batch[1]) > 5:
            raise error()
        return mean(model, batch)

    found = verify(network(), small, samples(22), 4)
    assert found.exact
    assert (found.samples, found.samples_proved, found.micro_batches) == (22, 5, (2, 2, 1))
    assert "5 of 22 samples" in str(found)
    proved = "The whole batch of 22 did not fit into memory: the claim is proved on its first 5 samples"
    assert found.notes[0] == f"{proved}, in micro-batches of 2 instead of 4."
    wrong = verify(network(), small, samples(22), 2, train_window=defects.textbook(small))
    assert [cause.kind for cause in wrong.causes] == ["wrong-count"]


def test_a_model_that_fits_in_its_own_dtype_alone_is_judged_in_that() -> None:
    """All of the batch, once float64 was given up."""
    torch.manual_seed(0)

    def small(model: Any, batch: Batch) -> Tensor:
        if batch[0].dtype == torch.float64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return mean(model, batch)

    found = verify(network(), small, samples(), 4)
    assert found.exact, str(found)
    assert (found.samples_proved, found.in_float64) == (11, False)
    assert found.notes[0].startswith("Not even two samples fit into memory in float64, so it was judged in float32")


def test_what_does_not_fit_at_all_is_an_error() -> None:
    """With two samples there is nothing left to halve."""

    def never(_: Any, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError(f"Tried to allocate 20.00 GiB for {len(batch)}")

    model = network()
    before = state(model)
    with pytest.raises(
        errors.OutOfMemory, match="out of memory with two samples; the allocation that failed asked for"
    ):
        verify(model, never, samples(), 4)
    assert_untouched(before, model)


# What is said.


def test_the_text_has_table_verdict_and_causes() -> None:
    """The worst first, at most ten rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    text = str(verify(network(*layers, nn.BatchNorm1d(8)), mean, samples(), 4, options=Options(batch_norm="micro")))
    parts = [
        "parameter",
        "and 8 more",
        "Not exact: the gradient of 11 samples in 3 micro-batches",
        "1. batch-norm at 7",
    ]
    places = [text.index(part) for part in [*parts, "goes from", 'Options(batch_norm="exact")']]
    assert places == sorted(places)


def test_the_result_as_plain_data() -> None:
    """JSON takes it, and has all fields."""
    torch.manual_seed(0)
    found = verify(network(), mean, samples(), 4)
    data = json.loads(json.dumps(found.to_dict()))
    assert set(data) == {*Verification.__dataclass_fields__, "worst"}
    assert data["micro_batches"] == [4, 4, 3]
    assert data["dtype"] == "float32"
    assert data["loss"][0] == pytest.approx(data["loss"][1])
    assert found.worst in found.differences


def difference(**changed: float) -> Difference:
    """One parameter's figures."""
    figures = {"exact_difference": 0.0, "exact_floor": 1e-16, "own_difference": 0.0, "own_floor": 1e-7, **changed}
    return Difference("weight", (2, 3), **figures)


def test_a_difference_is_judged_by_its_rounding() -> None:
    """1e-12 in float64 or eight times the measured rounding; without float64, the model's own."""
    assert difference(exact_difference=9e-13).exact
    assert not difference(exact_difference=2e-12).exact
    assert difference(exact_difference=7e-8, exact_floor=1e-8).exact
    assert not difference(exact_difference=9e-8, exact_floor=1e-8).exact
    assert difference(exact_difference=math.nan, own_difference=7e-7).exact
    assert not difference(exact_difference=math.nan, own_difference=9e-7).exact
    assert difference(exact_difference=math.nan, own_floor=0.0).exact
    assert not difference(exact_difference=math.nan, own_difference=1e-30, own_floor=0.0).exact
    assert difference(exact_difference=math.inf).excess == math.inf


def verification(*causes: str, exact: bool = False, **changed: Any) -> Verification:
    """A result with some causes."""
    told = tuple(Cause(kind, "", 1.0, "Seen.", "Do this.") for kind in causes)
    fields: dict[str, Any] = {"differences": (difference(exact_difference=0.5),), "samples": 8, "samples_proved": 8}
    fields |= {"micro_batches": (4, 4), "dtype": "float32", "loss": (1.0, math.nan), "notes": ()}
    return Verification(exact=exact, causes=told, **{**fields, **changed})


def test_a_test_suite_can_ask() -> None:
    """An AssertionError with the whole text, unless all causes are accepted."""
    verification(exact=True).raise_if_wrong()
    with pytest.raises(errors.GradientsDiffer, match="Not exact") as raised:
        verification("batch-norm").raise_if_wrong()
    assert isinstance(raised.value, AssertionError)
    verification("randomness").raise_if_wrong(allow={"randomness"})
    with pytest.raises(errors.GradientsDiffer):
        verification("randomness", "batch-norm").raise_if_wrong(allow={"randomness"})
    with pytest.raises(errors.GradientsDiffer):
        verification().raise_if_wrong(allow={"randomness"})  # its cause was not found


def test_the_verdict_in_words() -> None:
    """One sentence for each way that it can come out."""
    nothing: dict[str, Any] = {"differences": ()}
    fine: dict[str, Any] = {"differences": (difference(),)}
    assert "Exact: the gradient of 8 samples" in str(verification(exact=True, **fine))
    assert "Equal in distribution: " in str(verification("randomness"))
    assert "Exact in float64, not in float32: " in str(verification("low-precision-sums", **fine))
    assert "No proof: " in str(verification("wrong-count", **fine))
    assert "Nothing to compare" in str(verification(**nothing))
    assert "4 of 8 samples" in str(verification(exact=True, samples_proved=4, **fine))
    assert verification(**nothing).worst is None
    assert verification().to_dict()["loss"] == [1.0, None]


def test_causes_that_hide_behind_others_say_so() -> None:
    """A share of nothing is no accusation of nothing."""
    large, small = (Cause(kind, "here", share, "Seen.", "Do this.") for kind, share in (("a", 1.0), ("b", 0.0)))
    text = str(Verification(False, (), (large, small), 8, 8, (4, 4), "float32", (1.0, 1.0)))
    assert "1. a at here (100% of the difference)" in text
    assert "2. b at here (hidden behind the others)" in text


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no model": (lambda: verify(3, mean, samples(), 4), errors.ConfigurationError, "model must be an nn.Module"),  # type: ignore[arg-type]
    "a criterion": (
        lambda: verify(network(), nn.CrossEntropyLoss(), samples(), 4),
        errors.ConfigurationError,
        "loss_fn must be a function",
    ),
    "a loop that is none": (
        lambda: verify(network(), mean, samples(), 4, train_window=3),  # type: ignore[arg-type]
        errors.ConfigurationError,
        "train_window must be a function",
    ),
    "options that are none": (
        lambda: verify(network(), mean, samples(), 4, options={"check": False}),  # type: ignore[arg-type]
        errors.ConfigurationError,
        "options must be an Options",
    ),
    "no size": (lambda: verify(network(), mean, samples(), 0), errors.ConfigurationError, "must be a positive integer"),
    "all at once": (
        lambda: verify(network(), mean, samples(), 11),
        errors.ConfigurationError,
        "takes all 11 samples of this batch at once, so nothing is accumulated.\nTake a smaller one",
    ),
    "one sample": (lambda: verify(network(), mean, samples(1), 1), errors.BatchError, "this batch has one sample"),
    "nothing to train": (
        lambda: verify(network().requires_grad_(False), mean, samples(), 4),
        errors.ConfigurationError,
        "no parameter of the model requires a gradient",
    ),
    "a loss of something else": (
        lambda: verify(network(), lambda _, b: (b[0] * torch.ones((), requires_grad=True)).mean(), samples(), 4),
        errors.LossError,
        "no parameter of the model got a gradient from loss_fn",
    ),
    "no loss": (
        lambda: verify(network(), lambda m, b: m(b[0]), samples(), 4),
        errors.LossError,
        "must return one number",
    ),
    "a loss that is no number": (
        lambda: verify(network(), lambda m, b: mean(m, b) * math.nan, samples(), 4),
        errors.LossError,
        "the big batch itself has a loss of nan",
    ),
    "a loop that leaves nothing": (
        lambda: verify(network(), mean, samples(), 4, train_window=lambda *_: None),
        errors.LossError,
        "left no gradient",
    ),
    "a batch that cannot be cut": (lambda: verify(network(), mean, "text", 4), errors.BatchError, "no tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_verified_is_refused(case: str) -> None:
    """In the house manner: what was found and what to type."""
    call, kind, text = REFUSED[case]
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)
    assert "ccumulator" not in str(raised.value)


def test_a_refusal_of_big_step_is_told_and_its_cause_is_found() -> None:
    """It goes on without BigStep, and says so; the refusal itself is no proof."""
    torch.manual_seed(1)
    found = verify(network(), defects.masked, samples(), 4)
    assert found.notes[0].startswith("BigStep refuses this: cannot tell what this loss was averaged over")
    cause = found.causes[0]
    assert "in proportion to (batch[1] != 0).sum()" in cause.found
    assert cause.remedy == "Say what the loss was averaged over:  return counted(loss, (batch[1] != 0).sum())"
    even = torch.randn(8, 6), torch.tensor([0, 1] * 4)
    equal = verify(network(), defects.masked, even, 4)
    assert not equal.exact  # by chance the counts are the same; a step would refuse it all the same
    assert [cause.kind for cause in equal.causes] == ["wrong-count"]
    assert "No proof: " in str(equal)


def test_a_difference_whose_cause_is_not_found_is_said_to_be_so() -> None:
    """No experiment knows a loop that turns its gradients around."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sin()

    found = verify(network(), mean, samples(), 4, train_window=train_window)
    assert not found.exact
    assert not found.causes
    assert found.notes[-1] == "No experiment took this difference away: its cause was not found."


def test_what_is_left_unexplained_is_not_accepted_with_the_rest() -> None:
    """Dropout is allowed, and a mistake beside it that no experiment knows is not."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.sin()

    found = verify(network(nn.Dropout(0.3)), mean, samples(), 4, train_window=train_window)
    assert [cause.kind for cause in found.causes] == ["randomness"]
    assert found.unexplained > 1e-3
    assert "Not exact: " in str(found)
    with pytest.raises(errors.GradientsDiffer):
        found.raise_if_wrong(allow={"randomness"})


def test_what_big_step_refuses_is_not_accepted_with_its_dropout() -> None:
    """A step would raise: that the counts are equal by chance is no proof."""
    torch.manual_seed(0)
    even = torch.randn(8, 6), torch.tensor([0, 1] * 4)
    found = verify(network(nn.Dropout(0.3)), defects.masked, even, 4)
    assert [cause.kind for cause in found.causes] == ["randomness", "wrong-count"]
    with pytest.raises(errors.GradientsDiffer):
        found.raise_if_wrong(allow={"randomness"})


def test_a_mistake_in_the_own_dtype_alone_is_no_proof() -> None:
    """As of a kernel that float64 goes around."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 1.3 if p.dtype == torch.float32 else 1.0

    found = verify(network(), mean, samples(), 4, train_window=train_window)
    assert not found.exact
    assert "No proof: " in str(found)
    assert found.notes[0].startswith("In float32 the gradient is off by 0.3, where the big batch's own is off by")
    with pytest.raises(errors.GradientsDiffer):
        found.raise_if_wrong()


def test_rounding_to_few_digits_inside_is_no_mistake_in_the_own_dtype() -> None:
    """It is the same in float32 and in float64 for the big batch, and another one for its parts."""

    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16().tanh().to(x.dtype)

    torch.manual_seed(0)
    found = verify(network(Coarse()), mean, samples(), 4)
    assert found.exact, str(found)


@pytest.mark.parametrize(("allow", "said"), [({"dropout"}, "'dropout'"), ("randomness", "'randomness'")])
def test_a_kind_that_is_none_is_not_allowed(allow: Any, said: str) -> None:
    """A slip would accept nothing, and not say so; a plain string is one."""
    with pytest.raises(errors.ConfigurationError, match=f"found {said}") as raised:
        verification("randomness").raise_if_wrong(allow=allow)
    assert "batch-norm, randomness, buffers-written" in str(raised.value)


def test_a_loop_that_returns_its_loss() -> None:
    """It stands beside the big batch's."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> float:
        by_samples(mean)(model, micro_batches)
        return 0.25

    assert verify(network(), mean, samples(), 4, train_window=train_window).loss[1] == 0.25


def test_sums_that_cost_one_parameter_its_digits_are_told() -> None:
    """Though the model's own rounding is as large elsewhere, which makes it no failure."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3)).bfloat16()
    batch = (torch.randn(256, 10), torch.randint(0, 3, (256,)))

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].to(model[0].weight.dtype)), batch[1])

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        for each in micro_batches:
            (loss_fn(model, each) / len(micro_batches)).backward()

    found = verify(model, loss_fn, batch, 1, train_window=train_window)
    assert found.exact
    assert found.notes[0].startswith("In bfloat16 the gradient of '2.weight' is off by ")
    assert "added up in float64 come to" in found.notes[0]
    assert not verify(model, loss_fn, batch, 1).notes  # BigStep adds up in float32


def test_functions_of_other_arguments_are_refused() -> None:
    """Before anything runs, or, where only the order is wrong, after it was tried the other way round."""

    def swapped(batch: Any, model: Any) -> Tensor:
        return mean(model, batch)

    def broken(*_: Any) -> Tensor:
        raise TypeError("my own")

    with pytest.raises(errors.ConfigurationError, match=r"loss_fn takes a batch and a model.*\nSwap its arguments"):
        verify(network(), swapped, samples(), 4)
    one: Any = nn.Module.eval
    with pytest.raises(errors.ConfigurationError, match=r"loss_fn cannot be called with a model and a batch"):
        verify(network(), one, samples(), 4)
    with pytest.raises(errors.ConfigurationError, match=r"train_window cannot be called with a model and one window"):
        verify(network(), mean, samples(), 4, train_window=one)
    with pytest.raises(TypeError, match="my own"):
        verify(network(), broken, samples(), 4)


def test_a_loop_without_gradients_hears_what_it_did() -> None:
    """It cleared them, trained another model, or did nothing."""
    other = network()

    def cleared(model: nn.Module, micro_batches: list[Batch]) -> None:
        by_samples(mean)(model, micro_batches)
        for p in model.parameters():
            p.grad = None

    def of_another(_model: nn.Module, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        by_samples(mean)(other, micro_batches)
        optimizer.step()

    def nothing(_model: nn.Module, _micro_batches: list[Batch]) -> None: ...

    for train_window, said in (
        (cleared, "backward came to the model 3 times, but .grad is None everywhere after it"),
        (of_another, "an optimizer stepped, but none of its parameters is the model's"),
        (nothing, "no backward came to the model, and no optimizer of torch stepped"),
    ):
        with pytest.raises(errors.LossError, match="left no gradient") as raised:
            verify(network(), mean, samples(), 4, train_window=train_window)
        assert said in str(raised.value)


def test_a_loop_that_clips_once_is_compared_before_that() -> None:
    """Clipping is no mistake where it belongs."""
    torch.manual_seed(0)

    def train_window(model: nn.Module, micro_batches: list[Batch]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        by_samples(mean)(model, micro_batches)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    found = verify(network(), mean, samples(), 4, train_window=train_window)
    assert found.exact
    assert found.notes == ("The loop clips its gradient; what was compared is the gradient before that.",)


def test_no_hook_is_left_on_optimizers() -> None:
    """Those that read a loop's steps are gone, and torch is as it was."""
    from torch.optim import optimizer as of_torch

    zero_grad, module_zero_grad = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    clip = nn.utils.clip_grad._clip_grads_with_norm_
    verify(network(), mean, samples(), 4, train_window=defects.stepping(mean))
    assert not of_torch._global_optimizer_pre_hooks
    assert not of_torch._global_optimizer_post_hooks
    assert torch.optim.Optimizer.zero_grad is zero_grad
    assert nn.Module.zero_grad is module_zero_grad
    assert nn.utils.clip_grad._clip_grads_with_norm_ is clip


def test_the_documentation_lists_every_kind() -> None:
    """A kind that is named on a screen can be looked up."""
    from bigbatch.verifying.evidence import REMEDIES
    from bigbatch.verifying.verification import KINDS

    assert set(KINDS) == set(REMEDIES)
    page = (Path(__file__).parent.parent / "docs" / "verify.md").read_text()
    assert all(f"`{kind}`" in page for kind in REMEDIES)


def test_numbers_of_python_are_placed_where_they_are_drawn() -> None:
    """No operation shows them: the module that runs while a generator moves is the one."""

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()  # noqa: S311 - no secret

    torch.manual_seed(0)
    inside = verify(network(nn.Identity(), Drawing()), mean, samples(), 4)
    assert [(cause.kind, cause.where) for cause in inside.causes] == [("randomness", "2")], str(inside)

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        return mean(model, batch) * (1 + random.random())  # noqa: S311

    outside = verify(network(), loss_fn, samples(), 4, train_window=by_samples(loss_fn))
    assert [(cause.kind, cause.where) for cause in outside.causes] == [("randomness", "loss_fn")], str(outside)


@pytest.mark.parametrize(
    ("layers", "loop", "least", "most"),
    [
        ((), None, 6, 11),
        ((), by_samples, 6, 6),
        ((), defects.textbook, 14, 16),
        ((nn.BatchNorm1d(8), nn.Dropout(0.3), defects.Attending(), defects.Fading()), defects.undivided, 20, 43),
    ],
    ids=["exact", "a loop that is exact", "one cause", "six causes"],
)
def test_what_a_proof_costs(layers: tuple[nn.Module, ...], loop: Any, least: int, most: int) -> None:
    """How often all samples go through the model, as the documentation has it."""
    torch.manual_seed(0)
    passed = 0

    def counting(model: Any, batch: Batch) -> Tensor:
        nonlocal passed
        passed += len(batch[1])
        return mean(model, batch)

    window = None if loop is None else loop(counting)
    verify(network(*layers), counting, samples(), 4, train_window=window)
    assert least * 11 <= passed <= most * 11


def test_a_copy_of_the_model_is_what_runs() -> None:
    """A model that notes what it was given has heard nothing."""

    class Listening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.heard = network(), list[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.heard.append(len(x))
            return self.inner(x)

    model = Listening()
    assert verify(model, mean, samples(), 4).exact
    assert not model.heard
