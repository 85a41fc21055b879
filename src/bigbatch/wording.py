"""Refusals in the words of whoever reads them: they speak of an `Accumulator`, which not every user has."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from bigbatch.errors import BigBatchError

_WITH_COUNT = re.compile(r"accumulator\.backward\((.+?), count=(.+?)\)(?=\s*(#|$))", re.MULTILINE)
_ON_WINDOWS = re.compile(r"^.*accumulator\.(discard|flush)\(\).*\n?", re.MULTILINE)
# Whoever writes a loss_fn leaves the loop to us.
_OF_LOOPS = {
    "Inside `over` call accumulator.backward(loss) alone: it adds up, steps and clears.": (
        "Let loss_fn return the loss and leave gradients alone: they are added up, stepped with and cleared for it."
    ),
    ", and the window is as it was": "",
    "accumulator.backward(loss) steps when the window is full.": "the step is made when all of the batch is added up.",
    " between windows, after accumulator.flush() or accumulator.discard()": " between two updates",
    "Pass it as it is:  accumulator.backward(loss)": "Return it as it is:  return loss",
    "backward takes": "loss_fn must return",
    ", steps=...": "",
}
_OF_NORMS = {
    "Either use BigStep, which normalises by the big batch, or freeze it": (
        'Either leave batch_norm="exact", which normalises by the big batch, or freeze it'
    ),
}
# BigStep counts by itself, by calling loss_fn twice.
_OF_COUNTS = (
    (re.compile(r"counts= (came to|gave)"), r"counting in advance \1"),
    (re.compile(r"^If the function counts something else.*\n", re.MULTILINE), ""),
    (
        re.compile(r"^(If a batch was passed over|Return one count per term).*$", re.MULTILINE),
        "loss_fn is called twice for the same samples, and must have the same terms and counts both times.",
    ),
)


def in_words_of(entrance: str, message: str) -> str:
    """Say where a thing is typed: count= as counted(...) in loss_fn, options in the `entrance`, windows nowhere."""
    message = _WITH_COUNT.sub(r"return counted(\1, \2)", message)
    for said, instead in _OF_LOOPS.items():
        message = message.replace(said, instead)
    for said, instead in _OF_NORMS.items() if entrance in {"BigStep", "Setup"} else ():
        message = message.replace(said, instead)
    for pattern, instead in _OF_COUNTS if entrance == "BigStep" else ():
        message = pattern.sub(instead, message)
    message = _ON_WINDOWS.sub("", message)
    message = message.replace("Accumulator(", f"{entrance}(").replace("this accumulator", f"this {entrance}")
    return message.replace("the accumulator", f"the {entrance}").rstrip()


@contextmanager
def speaking_of(entrance: str) -> Iterator[None]:
    """Let refusals inside speak to someone who has written an `entrance`, and no accumulator."""
    try:
        yield
    except BigBatchError as error:
        if error.fix_in_step != error.fix and entrance in {"BigStep", "Setup"}:
            error.speak_to_step()
        error.args = (in_words_of(entrance, str(error)),)
        raise
