"""However it is written, a condition on the window is understood; what is not understood is left alone."""

import textwrap

import pytest

from tests.linting import of_loop

# Each is what stands between `backward` and the two lines of the update, with `i` from 0.
FULL = {
    "plain": "if (i + 1) % accumulation_steps == 0:",
    "turned": "if 0 == (i + 1) % accumulation_steps:",
    "one and i": "if (1 + i) % accumulation_steps == 0:",
    "not": "if not (i + 1) % accumulation_steps:",
    "not not equal": "if not (i + 1) % accumulation_steps != 0:",
    "last remainder": "if i % accumulation_steps == accumulation_steps - 1:",
    "last remainder, a number": "if i % 4 == 3:",
    "at least the last remainder": "if i % accumulation_steps >= accumulation_steps - 1:",
    "bool": "if bool((i + 1) % accumulation_steps == 0):",
    "is true": "if ((i + 1) % accumulation_steps == 0) is True:",
    "window number": "if (i + 1) // accumulation_steps > i // accumulation_steps:",
    "with parentheses": "if ((i + 1) % (accumulation_steps)) == (0):",
    "or no accumulation": "if accumulation_steps == 1 or (i + 1) % accumulation_steps == 0:",
    "and accumulation": "if accumulation_steps > 0 and (i + 1) % accumulation_steps == 0:",
}
BEFORE = {
    "variable": ("is_update = (i + 1) % accumulation_steps == 0", "if is_update:"),
    "negated variable": ("accumulating = (i + 1) % accumulation_steps != 0", "if not accumulating:"),
    "ternary": ("last = True if (i + 1) % accumulation_steps == 0 else False", "if last:"),
    "walrus": ("n = accumulation_steps", "if (full := (i + 1) % n == 0):"),
    "flag": (
        "step_now = False\n    if (i + 1) % accumulation_steps == 0:\n        step_now = True",
        "if step_now:",
    ),
    "step number": ("step = i + 1", "if step % accumulation_steps == 0:"),
    "another name": ("n_acc = accumulation_steps", "if (i + 1) % n_acc == 0:"),
    "early continue": ("", "if (i + 1) % accumulation_steps != 0:\n        continue\n    if True:"),
    "early continue, truth": ("", "if (i + 1) % accumulation_steps:\n        continue\n    if True:"),
}
LOOP = """
for i, (x, y) in enumerate(loader):
    {before}
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
    {condition}
        optimizer.step()
        optimizer.zero_grad()
"""


def loop(condition: str, before: str = "pass", body: str = LOOP) -> str:
    """Return a loop that divides, and steps under a condition."""
    return body.format(before=before, condition=condition)


@pytest.mark.parametrize("condition", FULL.values(), ids=FULL)
def test_a_full_window(condition: str) -> None:
    """All of them mean the same: only the leftover is forgotten."""
    assert of_loop(loop(condition)) == ["BB103"]


@pytest.mark.parametrize(("before", "condition"), BEFORE.values(), ids=BEFORE)
def test_a_full_window_said_in_two_lines(before: str, condition: str) -> None:
    """Names are followed to what they stand for."""
    assert of_loop(loop(condition, before or "pass")) == ["BB103"]


@pytest.mark.parametrize("condition", FULL.values(), ids=FULL)
def test_clearing_outside_the_condition(condition: str) -> None:
    """With the same conditions, a clear in every round is found."""
    body = LOOP.replace("        optimizer.zero_grad()\n", "").replace("    {before}", "    optimizer.zero_grad()")
    assert of_loop(loop(condition, body=body)) == ["BB101", "BB103"]


OR_LAST = [
    "i + 1 == len(loader)",
    "i == len(loader) - 1",
    "len(loader) == i + 1",
    "(i + 1) >= len(loader)",
    "i == num_batches - 1",
    "i == last_index",
    "is_last",
]


@pytest.mark.parametrize("last", OR_LAST)
def test_the_tail_stepped_as_a_whole(last: str) -> None:
    """The loader's last micro-batch is known, however it is asked for."""
    before = "is_last = i == len(loader) - 1"
    head = "num_batches = len(loader)\nlast_index = num_batches - 1\n"
    assert of_loop(head + loop(f"if (i + 1) % accumulation_steps == 0 or {last}:", before)) == ["BB104"]


def test_a_last_round_that_never_comes() -> None:
    """`i == len(loader)` is never true with i from 0: nothing steps the leftover."""
    assert of_loop(loop("if (i + 1) % accumulation_steps == 0 or i == len(loader):")) == ["BB103"]


OFF_BY_ONE = {
    "plain": "if i % accumulation_steps == 0:",
    "not": "if not i % accumulation_steps:",
    "not the first": "if i > 0 and i % accumulation_steps == 0:",
    "not the first, otherwise": "if i % accumulation_steps == 0 and i != 0:",
    "truth of i": "if i and i % accumulation_steps == 0:",
    "number": "if i % 4 == 0:",
}


@pytest.mark.parametrize("condition", OFF_BY_ONE.values(), ids=OFF_BY_ONE)
def test_off_by_one(condition: str) -> None:
    """Counting from 0 without adding 1."""
    assert of_loop(loop(condition)) == ["BB103", "BB105"]


COUNTED_FROM_ONE = [
    ("enumerate(loader, start=1)", "if i % accumulation_steps == 0:"),
    ("enumerate(loader, 1)", "if not i % accumulation_steps:"),
    ("tqdm(enumerate(loader, 1), total=len(loader))", "if i % accumulation_steps == 0:"),
    ("enumerate(tqdm(loader), start=1)", "if i % accumulation_steps == 0:"),
]


@pytest.mark.parametrize(("source", "condition"), COUNTED_FROM_ONE)
def test_counting_from_one(source: str, condition: str) -> None:
    """Then nothing is to be added, and adding it is off by one."""
    assert of_loop(loop(condition).replace("enumerate(loader)", source)) == ["BB103"]
    added = condition.replace("i %", "(i + 1) %")
    assert "BB105" in of_loop(loop(added).replace("enumerate(loader)", source))


COUNTERS = {
    "counted up, modulo": ("count = 0", "count += 1", "if count % accumulation_steps == 0:", ""),
    "set back": ("count = 0", "count += 1", "if count == accumulation_steps:", "count = 0"),
    "set back, at least": ("count = 0", "count += 1", "if count >= accumulation_steps:", "count = 0"),
    "written out": ("count = 0", "count = count + 1", "if count == accumulation_steps:", "count = 0"),
    "a number": ("count = 0", "count += 1", "if count == 4:", "count = 0"),
}


@pytest.mark.parametrize(("start", "count", "condition", "end"), COUNTERS.values(), ids=COUNTERS)
def test_counters(start: str, count: str, condition: str, end: str) -> None:
    """A counter of one's own counts as well as enumerate does."""
    body = LOOP.replace("for i, (x, y) in enumerate(loader):", f"{start}\nfor x, y in loader:")
    script = loop(condition, count, body) + (f"        {end}\n" if end else "")
    assert of_loop(script) == ["BB103"]
    assert "BB101" in of_loop(script.replace(f"    {count}\n", f"    {count}\n    optimizer.zero_grad()\n"))


def test_a_counter_that_is_asked_too_early() -> None:
    """Counting after the question is off by one."""
    script = """
    count = 0
    for x, y in loader:
        (criterion(model(x), y) / accumulation_steps).backward()
        if count % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        count += 1
    """
    assert of_loop(script) == ["BB103", "BB105"]


NOT_UNDERSTOOD = [
    "if should_step(i):",
    "if i in boundaries:",
    "if i % accumulation_steps == schedule[i]:",
    "if tokens > budget:",
    "if torch.rand(()) < 0.25:",
    "if i % accumulation_steps < 2:",
    "if (i * 3) % accumulation_steps == 0:",
    "if i == accumulation_steps:",
]


@pytest.mark.parametrize("condition", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_left_alone(condition: str) -> None:
    """No rule about windows speaks of a window that it does not know."""
    head = "boundaries, schedule, tokens, budget = make()\n"
    body = LOOP.replace("/ accumulation_steps", "").replace("    {before}", "    tokens += len(x)")
    assert of_loop(head + loop(condition, body=body)) == []


def test_a_log_s_rhythm_is_not_a_window() -> None:
    """`i % 100 == 0` around a print says nothing about accumulation."""
    script = """
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 100 == 0:
            print(loss.item())
    """
    assert of_loop(script) == []


def test_settings_are_not_conditions_on_rounds() -> None:
    """What is asked of a setting holds in all rounds or in none."""
    script = """
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        if accumulation_steps > 1:
            loss = loss / accumulation_steps
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (i + 1) % accumulation_steps == 0 or (i + 1) == len(loader):
            if use_amp:
                scaler.unscale_(optimizer)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if use_amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    """
    assert of_loop(script) == ["BB104"]


def test_after_the_loop() -> None:
    """The leftover may be asked for behind the loop."""
    tail = """
    if (i + 1) % accumulation_steps != 0:
        optimizer.step()
        optimizer.zero_grad()
    """
    whole = loop(FULL["plain"]) + textwrap.dedent(tail)
    assert of_loop(whole) == ["BB104"]
