"""`--diff`: patches that apply, parse, and when run give the big batch's own weights."""

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigbatch.lint.patching.diffs import Patch, patch
from bigbatch.lint.sources import read_source
from tests.test_cli_lint import run

MICRO, STEPS, EPOCHS = 4, 4, 2


def patched(script: str, name: str = "train.py") -> Patch:
    """Return the patch of a script."""
    return patch(read_source(name, textwrap.dedent(script).encode()))


def names() -> dict[str, Any]:
    """Return what the scripts below find: a model, data in 11 micro-batches, an optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = torch.randn(11 * MICRO, 6).double(), torch.randint(0, 3, (11 * MICRO,))
    y[::5] = -100
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "scaler": torch.amp.GradScaler("cpu", enabled=True),
        "criterion": nn.CrossEntropyLoss(),
        "loader": list(zip(x.split(MICRO), y.split(MICRO), strict=True)),
        "steps": STEPS,
        "epochs": EPOCHS,
        "log": [],
    }


def weights(model: nn.Module) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def executed(script: str) -> torch.Tensor:
    """Run a script and return the weights that it ends with."""
    found = names()
    exec(compile(script, "train.py", "exec"), found)  # noqa: S102 - that is the test
    return weights(found["model"])


def true(
    *, clip: float | None = None, schedule: bool = False, windows: int | None = None, weight: float = 1.0
) -> torch.Tensor:
    """Return the weights after training with the big batches themselves."""
    found = names()
    loader, model, optimizer = found["loader"], found["model"], found["optimizer"]
    cut = [loader[i : i + STEPS] for i in range(0, len(loader), STEPS)][:windows]
    for _ in range(EPOCHS):
        for window in cut:
            x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
            (weight * F.cross_entropy(model(x), y)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                found["scheduler"].step()
    return weights(model)


LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "the textbook's": (
        """
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                loss = loss / steps
                loss.backward()
                if (i + 1) % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {},
    ),
    "with the tail stepped as a whole": (
        """
        for epoch in range(epochs):
            optimizer.zero_grad()
            for i, (x, y) in enumerate(loader):
                (criterion(model(x), y) / steps).backward()
                if (i + 1) % steps == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {},
    ),
    "with the tail behind the loop": (
        """
        def train():
            for epoch in range(epochs):
                for i, (x, y) in enumerate(loader):
                    loss = criterion(model(x), y) / steps
                    loss.backward()
                    if not (i + 1) % steps:
                        optimizer.step()
                        optimizer.zero_grad()
                if len(loader) % steps:
                    optimizer.step()
                    optimizer.zero_grad()

        train()
        """,
        {},
    ),
    "never divided, cleared each time, off by one": (
        """
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                if i % steps == 0:
                    optimizer.step()
        """,
        {},
    ),
    "clipped and scheduled in the wrong places": (
        """
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                loss /= steps
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scheduler.step()
                if (i + 1) % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {"clip": 0.1, "schedule": True},
    ),
    "with a log in the window": (
        """
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / steps
                loss.backward()
                last = (i + 1) % steps == 0
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    log.append(loss.item())
                    log.append(i)
        """,
        {"clip": 0.1},
    ),
    "a scaler that clips what is scaled": (
        """
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / steps
                scaler.scale(loss).backward()
                if (i + 1) % steps == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        {"clip": 0.1},
    ),
    "a weight that comes and goes": (
        """
        steps, criterion = 4, nn.CrossEntropyLoss()
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 2
                loss = loss / steps
                loss = loss * 2
                loss.backward()
                if (i + 1) % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {},
    ),
    "a weight of its own beside the steps": (
        """
        steps, criterion = 4, nn.CrossEntropyLoss()
        for epoch in range(epochs):
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y) / 2
                loss = loss / steps
                loss.backward()
                if (i + 1) % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {"weight": 0.5},
    ),
    "a numbered progress bar with a name": (
        """
        for epoch in range(epochs):
            rounds = list(enumerate(loader))
            for i, (x, y) in rounds:
                loss = criterion(model(x), y) / steps
                loss.backward()
                if (i + 1) % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        {},
    ),
    "an inner loop, whole windows": (
        """
        for epoch in range(epochs):
            batches = iter(loader)
            for window in range(2):
                for micro in range(steps):
                    x, y = next(batches)
                    loss = criterion(model(x), y) / steps
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        {"windows": 2},
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # one of them makes that mistake
@pytest.mark.parametrize(("script", "case"), LOOPS.values(), ids=LOOPS)
def test_a_patched_loop_is_exact(script: str, case: dict[str, Any]) -> None:
    """Run as it is, it ends with other weights than the big batches; patched, with theirs."""
    script = textwrap.dedent(script)
    made = patched(script)
    assert made.refused == ()
    assert "accumulator.backward(" in made.after
    right = true(**case)
    distance = (executed(made.after) - right).norm() / right.norm()
    assert distance <= 1e-12
    assert (executed(script) - right).norm() / right.norm() > 1e-3


def test_what_else_a_window_does_is_done_once_per_update() -> None:
    """The log of a loop that lost its last window has that one too."""
    script = textwrap.dedent(LOOPS["with a log in the window"][0])
    executed(script + "assert len(log) == 2 * epochs * 2\n")
    executed(patched(script).after + "assert len(log) == 2 * epochs * 3\n")


REFUSED = {
    "BatchNorm": ("model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))", "it has BatchNorm, which Accumulator"),
    "DDP": ("model = DistributedDataParallel(model)", "its model is spread over several processes"),
}
INSIDE = {
    "if x is None:\n            continue": "it leaves a round or the loop early",
    "for p in model.parameters():\n            p.grad.mul_(2)": "gradients are rescaled by hand",
    "print(loss.item() * steps)": "it uses steps for something else too",
    "norms.append(model.weight.grad.norm())": "something looks at gradients by hand",
    "nn.utils.clip_grad_value_(model.parameters(), 1.0)": "it clips by value",
}
LOOP = """\
{above}
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / steps
        loss.backward()
        {inside}
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("above", "why"), REFUSED.values(), ids=REFUSED)
def test_what_accumulator_would_refuse_is_left_alone(above: str, why: str) -> None:
    """With the reason."""
    made = patched(LOOP.format(above=above, inside="pass"))
    assert made.after == made.before
    assert why in made.refused[0][1]


@pytest.mark.parametrize(("inside", "why"), INSIDE.items(), ids=INSIDE.values())
def test_what_is_not_simple_is_left_alone(inside: str, why: str) -> None:
    """With the loop's line and the reason."""
    made = patched(LOOP.format(above="norms = []", inside=inside))
    assert made.diff() == ""
    assert made.refused == ((3, why),)


OWN_MEANS = {
    "by a mask's sum": (
        """each = F.cross_entropy(model(x), y, reduction="none")
        loss = (each * batch["mask"]).sum() / batch["mask"].sum()
        loss = loss / steps""",
        "with count=",
    ),
    "by the number of samples": (
        """loss = F.cross_entropy(model(x), y, reduction="sum") / len(y)
        loss = loss / steps""",
        "its loss is divided by len(y) too: Accumulator needs to be told, with count=",
    ),
    "by a batch size that is as large as the window": (
        """loss = F.cross_entropy(model(x), y, reduction="sum") / 4
        loss = loss / 4""",
        "its loss is divided by 4 too",
    ),
    "by a name that happens to hold as much": (
        """loss = own_loss(model(x), y) / batch_size
        loss = loss / steps""",
        "its loss is divided by batch_size too",
    ),
    "by ranks as well": (
        """loss = criterion(model(x), y) / (steps * ranks)""",
        "its loss is divided by steps * ranks too",
    ),
    "by one number here and by another there": (
        """loss = criterion(model(x), y)
        if i < whole:
            loss = loss / rest
        else:
            loss = loss / steps""",
        "what its loss is multiplied or divided by cannot be told",
    ),
    "and multiplied by something unknown": (
        """loss = criterion(model(x), y) * scale_of(x)
        loss = loss / steps""",
        "what its loss is multiplied or divided by cannot be told",
    ),
}


@pytest.mark.parametrize(("lines", "why"), OWN_MEANS.values(), ids=OWN_MEANS)
def test_a_loss_that_has_its_own_mean_is_left_alone(lines: str, why: str) -> None:
    """Only the division by the steps is ours to take out; where it is not the only one, nothing is."""
    loop = LOOP.format(above="steps, batch_size = 4, 4", inside="pass")
    made = patched(loop.replace("loss = criterion(model(x), y) / steps", lines))
    assert made.diff() == ""
    assert why in made.refused[0][1]


def test_the_patch_of_a_loop() -> None:
    """Nothing else is touched: comments, blank lines, other code."""
    made = patched(LOOP.format(above="import torch  # first\n\nsteps = 4  # per window\n", inside="# a comment"))
    assert made.after == (
        "import torch  # first\n"
        "from bigbatch import Accumulator\n"
        "\n"
        "steps = 4  # per window\n"
        "\n"
        "accumulator = Accumulator(model, optimizer, steps=steps)\n"
        "for epoch in range(3):\n"
        "    for x, y in accumulator.over(loader):\n"
        "        loss = criterion(model(x), y)\n"
        "        accumulator.backward(loss)\n"
        "        # a comment\n"
    )


def test_names_that_are_taken() -> None:
    """A second accumulator, and a name for its updates, that the file has no use for yet."""
    loop = LOOP.format(above="accumulator, update = 1, 2", inside="pass") + "            print(epoch)\n"
    after = patched(loop).after
    assert "accumulator_2 = Accumulator(" in after
    assert "completed = accumulator_2.backward(loss)" in after
    assert "if completed is not None:" in after


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch on stdout, which git takes; the rest on stderr; 1 if there is one, 0 if there is none."""
    monkeypatch.chdir(tmp_path)
    good, hard = LOOP.format(above="", inside="pass"), LOOP.format(above="", inside="if x is None:\n            break")
    Path("good.py").write_text(good)
    Path("windows.py").write_bytes(good.replace("\n", "\r\n").encode())
    Path("hard.py").write_text(hard)
    Path("fine.py").write_text("x = 1\n")
    result = run("--diff", ".")
    assert result.exit_code == 1
    assert result.stderr == "hard.py:3: left as it is: it leaves a round or the loop early\nWould change 2 files.\n"
    subprocess.run(["git", "apply", "-"], input=result.stdout_bytes, check=True)  # noqa: S607 - git is on the path
    assert "accumulator.over(loader)" in Path("good.py").read_text()
    assert Path("windows.py").read_bytes() == Path("good.py").read_bytes().replace(b"\n", b"\r\n")
    assert Path("hard.py").read_text() == hard
    again = run("--diff", "good.py")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "All checks passed: nothing to change.\n")
    hopeless = run("--diff", "hard.py")
    assert hopeless.exit_code == 0
    assert hopeless.stderr.endswith("\nNo loop is simple enough to change.\n")


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its JSON is changed where the code is, and nowhere else."""
    monkeypatch.chdir(tmp_path)
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Größe × Zahl"]},
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["%matplotlib inline\n", "steps = 4"]},
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": ["import torch"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": LOOP.format(above="", inside="pass").strip().splitlines(keepends=True),
        },
    ]
    raw = json.dumps({"cells": cells, "nbformat": 4}, indent=1, ensure_ascii=False) + "\n"
    Path("a.ipynb").write_text(raw, encoding="utf-8")
    result = run("--diff", "a.ipynb")
    subprocess.run(["git", "apply", "-"], input=result.stdout_bytes, check=True)  # noqa: S607 - git is on the path
    after = json.loads(Path("a.ipynb").read_text(encoding="utf-8"))["cells"]
    assert after[:2] == cells[:2]
    assert after[2] == cells[2]
    assert after[3]["source"][0] == "from bigbatch import Accumulator\n"
    assert "    for x, y in accumulator.over(loader):\n" in after[3]["source"]


def test_a_notebook_laid_out_otherwise_is_left_alone() -> None:
    """A patch of the whole file would be no patch."""
    data = {"cells": [{"cell_type": "code", "source": LOOP.format(above="", inside="pass")}]}
    made = patched(json.dumps(data, separators=(",", ":")), "a.ipynb")
    assert made.diff() == ""
    assert made.refused == ((1, "its JSON is not laid out as Jupyter writes it"),)
