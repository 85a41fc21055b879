"""The loops of the teaching pages, judged as they deserve: some of them are called correct there."""

from tests.linting import codes, findings

EXERCISE = """\
import torch
from torch import nn

model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()
batches = [(torch.tensor([[1.0]]), torch.tensor([[2.0]])), (torch.tensor([[2.0]]), torch.tensor([[4.0]]))]
accumulation_steps = 2
"""
THREE = EXERCISE.replace("batches = [", "batches = [(torch.zeros(1, 1), torch.zeros(1, 1)), ")


def test_three_batches_a_window_of_two_and_one_more_step() -> None:
    """Nothing is divided, so the first window is twice too large; the leftover, as it is, is just as undivided."""
    loop = """\
for i, (x, y) in enumerate(batches):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
optimizer.step()
"""
    (found,) = findings(THREE + loop)
    assert (found.code, found.line) == ("BB201", 11)
    assert found.message.startswith("2 losses are added up and none is divided: the gradient is 2 times")


def test_the_leftover_is_never_cleared() -> None:
    """In one pass that harms nobody; in the second epoch its gradients are still there."""
    loop = """\
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        criterion(model(x), y).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
"""
    assert [(found.code, found.line) for found in findings(THREE + loop)] == [("BB201", 11), ("BB106", 15)]
    cleared = loop + "    optimizer.zero_grad()\n"
    assert codes(THREE + cleared) == ["BB201"]


def test_the_same_with_the_division() -> None:
    """Divided, the leftover of one is divided by two as well."""
    loop = """\
for i, (x, y) in enumerate(batches):
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
optimizer.step()
"""
    (found,) = findings(THREE + loop)
    assert (found.code, found.line) == ("BB104", 15)


def test_two_batches_make_one_whole_window() -> None:
    """The exercise about `weight.grad` has no leftover: two batches, a window of two."""
    loop = """\
for i, (x, y) in enumerate(batches):
    (criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
print(model.weight.grad)
"""
    assert codes(EXERCISE + loop) == []


EXPERIMENT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn({samples}, 10)
dataset = TensorDataset(X, (X.sum(dim=1) > 0).long())
loader = DataLoader(dataset, batch_size=16, shuffle=True)
model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
accumulation_steps = 4

for epoch in range(10):
    {cleared}
    for i, (inputs, labels) in enumerate(loader):
        loss = criterion(model(inputs), labels) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_sixty_three_batches_are_no_multiple_of_four() -> None:
    """The experiment throws away 40 of 1,000 samples, or lets them leak into the next epoch."""
    (found,) = findings(EXPERIMENT.format(samples=1000, cleared="optimizer.zero_grad()"))
    assert (found.code, found.message) == ("BB103", "the last 3 of 63 micro-batches are never stepped")
    (found,) = findings(EXPERIMENT.format(samples=1000, cleared="pass"))
    assert found.message == (
        "the last 3 of 63 micro-batches are never stepped and leak into the next epoch's first window"
    )


def test_sixty_four_are() -> None:
    """The same loop over 1,024 samples is right."""
    assert codes(EXPERIMENT.format(samples=1024, cleared="pass")) == []


def test_myth_it_updates_after_every_micro_batch() -> None:
    """Dividing by the steps and stepping each time accumulates nothing."""
    loop = """
    for inputs, labels in loader:
        loss = criterion(model(inputs), labels) / accumulation_steps
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    assert codes(loop) == ["BB102"]


def test_myth_zero_grad_before_every_micro_batch() -> None:
    """`zero before backward` is right in a plain loop and wrong in one that accumulates."""
    loop = """
    for i, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        {divide}
        loss.backward()
        {condition}
            optimizer.step()
    """
    plain = loop.format(divide="pass", condition="if True:")
    accumulating = loop.format(divide="loss /= 4", condition="if (i + 1) % 4 == 0 or i + 1 == len(loader):")
    assert codes(plain) == []
    assert codes(accumulating) == ["BB101", "BB104"]


def test_myth_identical_to_a_big_batch() -> None:
    """Not with BatchNorm, and not with a masked mean."""
    loop = """
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))
    for i, (inputs, labels) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), labels, ignore_index=-100) / 4
        loss.backward()
        if (i + 1) % 4 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    """
    assert codes(loop) == ["BB104", "BB203", "BB601"]


def test_loops_called_correct_that_never_divide() -> None:
    """The pages print this one as the solution."""
    loop = """
    optimizer.zero_grad(set_to_none=True)
    for step, batch in enumerate(loader):
        output = model(batch["x"])
        loss = criterion(output, batch["y"])
        loss.backward()
        if (step + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    """
    assert codes(loop) == ["BB103", "BB201"]
