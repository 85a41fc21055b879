"""What a script asks about its rounds: counters set back or living in objects, properties, a framework's word."""

import pytest

from tests.linting import HEAD, codes, findings, of_loop

LOOPS = {
    "Accumulator": """
    from bigbatch import Accumulator

    accumulator = Accumulator(model, optimizer, steps=2)
    for x, y in accumulator.over(loader):
        accumulator.backward({loss})
    """,
    "Accelerate": """
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward({loss})
            optimizer.step()
            optimizer.zero_grad()
    """,
    "by hand": """
    for i in range(len(stream)):
        loss = {loss}
        (loss / 2).backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    """,
}


@pytest.mark.parametrize(
    ("loss", "twice"),
    [
        ("0.5 * F.mse_loss(model(x), y)", False),
        ("F.mse_loss(model(x), y) * 0.5", False),
        ("(F.mse_loss(model(x), y) + F.l1_loss(model(x), y)) / 2", False),
        ("F.mse_loss(model(x), y) / 2", True),
    ],
)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_factor_that_happens_to_be_one_over_the_steps(loop: str, loss: str, *, twice: bool) -> None:
    """A weight and a mean of terms are a loss of their own; a plain division by as many is suspected."""
    assert ("BB202" in of_loop(loop.format(loss=loss))) is twice


SET_BACK = """
count = {start}
for x, y in loader:
    (criterion(model(x), y) / {steps}).backward()
    {first}
    if count == {steps}:
        optimizer.step()
        optimizer.zero_grad()
        count = {back}
    {last}
"""


@pytest.mark.parametrize("steps", ["4", "accumulation_steps"])
@pytest.mark.parametrize(
    ("start", "back", "counted_first", "found"),
    [
        (0, 0, True, ["BB103"]),  # windows of 4, 4, 4
        (1, 0, False, ["BB103"]),  # 4, 4, 4
        (0, 0, False, ["BB103", "BB105"]),  # 5, 4, 4: the first is one too long
    ],
)
def test_a_counter_that_is_set_back(
    steps: str, start: int, back: int, *, counted_first: bool, found: list[str]
) -> None:
    """Between setting it back and the next question it grows by one, whichever is written first."""
    first, last = ("count += 1", "") if counted_first else ("", "count += 1")
    loop = SET_BACK.format(steps=steps, start=start, back=back, first=first, last=last)
    assert of_loop(loop) == found


def test_a_first_window_that_is_too_long_is_called_so() -> None:
    """The message says which way round it is."""
    loop = SET_BACK.format(steps=4, start=0, back=0, first="", last="count += 1")
    (message,) = [each.message for each in findings(HEAD + loop) if each.code == "BB105"]
    assert message.endswith("the first window is one too long")


OBJECT = """
class Trainer:
    def __init__(self, model, optimizer, scheduler, accum_steps):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.accum_steps = accum_steps
        self.counter = 0

    {decorator}
    def at_boundary(self):
        return self.counter % self.accum_steps == 0

    def step(self, batch):
        (self.model.loss(batch) / self.accum_steps).backward()
        self.counter += 1
        if {due}:
            self.optimizer.step()
            self.optimizer.zero_grad()
            {back}
        {after}

    def run(self, stream):
        for epoch in range(10):
            for batch in stream:
                self.step(batch)
"""


@pytest.mark.parametrize(
    ("due", "decorator", "back"),
    [
        ("self.counter == self.accum_steps", "", "self.counter = 0"),
        ("self.at_boundary", "@property", "pass"),
        ("self.at_boundary()", "", "pass"),
    ],
)
def test_a_counter_in_an_object_counts_the_innermost_loop(due: str, decorator: str, back: str) -> None:
    """The loop over epochs, and the function, stand around the call as well, and it is not theirs."""
    script = OBJECT.format(due=due, decorator=decorator, back=back, after="{after}")
    assert codes(script.format(after="pass")) == []
    assert codes(script.format(after="self.scheduler.step()")) == ["BB304"]


@pytest.mark.parametrize("whole", ["n - n % steps", "n // steps * steps", "len(loader) - len(loader) % steps"])
@pytest.mark.parametrize(
    "head", ["for i in range(whole):\n    x, y = next(stream)", "for i, (x, y) in zip(range(whole), loader):"]
)
@pytest.mark.parametrize(("divided", "found"), [("/ steps", []), ("", ["BB201"])])
def test_a_number_of_rounds_that_is_a_multiple(whole: str, head: str, divided: str, found: list[str]) -> None:
    """Nothing is left over; what else is wrong is found, also where `zip` counts the rounds."""
    lines = f"""
steps, n = 8, len(loader)
whole = {whole}
{head}
    (criterion(model(x), y) {divided}).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
    assert of_loop(lines) == found


def test_lightning_says_which_batch_is_the_last() -> None:
    """`is_last_batch` steps the leftover, divided as if it were whole."""
    script = """
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.net(batch).mean() / 4)
            if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert codes(script) == ["BB104"]


def test_a_backward_beside_the_loop_is_no_micro_batch() -> None:
    """As with a gradient cache: the loss is of the whole batch, and the chunks get its gradients."""
    script = """
    import torch

    def step(model, optimizer, chunks):
        with torch.no_grad():
            whole = torch.cat([model(chunk) for chunk in chunks])
        whole.requires_grad_()
        loss = contrast(whole)
        loss.backward()
        for chunk, gradient in zip(chunks, whole.grad.split(8)):
            model(chunk).backward(gradient=gradient)
        optimizer.step()
        optimizer.zero_grad()
    """
    assert codes(script) == []


def test_clipping_every_micro_batch_may_clip_scaled_gradients_too() -> None:
    """Both are true: it is in the wrong place, and nothing was unscaled before."""
    loop = """
    scaler = torch.amp.GradScaler()
    for i in range(4000):
        x, y = next(stream)
        scaler.scale(criterion(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """
    assert of_loop(loop) == ["BB301", "BB302"]


@pytest.mark.parametrize(
    ("given", "found"),
    [("", ["BB103"]), (", drop_last=False", ["BB103"]), (", drop_last=True", []), (", drop_last=drop", ["BB103"])],
)
def test_a_loader_drops_its_last_batch_where_it_says_so(given: str, found: list[str]) -> None:
    """63 batches, or 62, in windows of two; a setting that is not seen is as a loader of unknown length."""
    loop = f"""
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(1000, 10), torch.randint(2, (1000,))), batch_size=16{given})
    for i, (x, y) in enumerate(loader):
        (criterion(model(x), y) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    """
    assert of_loop(loop) == found
