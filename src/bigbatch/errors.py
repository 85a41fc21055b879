"""What can go wrong, in one tree.

BigBatchError
 ├── ConfigurationError     an argument that cannot work; raised when the object is made     (also a ValueError)
 │    └── BatchNormError    training-mode BatchNorm, whose statistics would be a micro-batch's
 ├── BatchError             this big batch cannot be cut into micro-batches                  (also a ValueError)
 ├── OutOfMemory            not even one sample fits; says how much was missing              (also a RuntimeError)
 ├── LossError              this loss cannot be accumulated as it stands; nothing was added  (also a ValueError)
 │    ├── UnreadableLoss    its graph does not tell what it was averaged over
 │    ├── CoupledLoss       a sample's loss depends on the other samples
 │    ├── PathsDiffer       micro-batches in lock-step wait at different operations
 │    └── SeveralCounts     terms averaged over different things need their totals in advance
 ├── WindowError            the window is not in a state for this call                       (also a RuntimeError)
 │    ├── WindowOpen        a window was left open by `break` or an exception
 │    ├── WindowDisturbed   something else stepped, zeroed or added gradients inside the window
 │    └── WindowBroken      a backward or a step failed halfway; its message says which
 ├── RankFailed             another rank has failed in this window, so it cannot be made       (also a RuntimeError)
 ├── StateError             a state_dict that does not fit                                   (also a ValueError)
 └── GradientsDiffer        verify found another gradient than the big batch's           (also an AssertionError)

Every message says what happened, what was found and what to type instead. Code decides by type and field, not by text.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class BigBatchError(Exception):
    """Base of every error that bigbatch raises on purpose.

    `problem` is a sentence on what is wrong and `found` is what was passed. `fix` is what to type instead in a loop
    with an `Accumulator`, and `fix_in_step` what to type where a `BigStep` runs the loop; None: the same.
    """

    def __init__(self, problem: str = "", *, found: str = "", fix: str = "", fix_in_step: str | None = None) -> None:
        """Keep the fields and render the text once, for a loop with an `Accumulator`."""
        self.problem, self.found, self.fix = problem, found, fix
        self.fix_in_step = fix if fix_in_step is None else fix_in_step
        super().__init__(self._rendered(fix))

    def speak_to_step(self) -> None:
        """Render the text for someone who uses a `BigStep`, and has no accumulator to call."""
        self.args = (self._rendered(self.fix_in_step),)

    def _rendered(self, fix: str) -> str:
        found = f" Got {self.found}." if self.found else ""
        return f"{self.problem}{found}" + (f"\nUse: {fix}" if fix else "")


@contextmanager
def spoken_to_step() -> Iterator[None]:
    """Have errors inside say what to type where a `BigStep` runs the loop."""
    try:
        yield
    except BigBatchError as error:
        error.speak_to_step()
        raise


class ConfigurationError(BigBatchError, ValueError):
    """An argument that cannot work."""


class BatchNormError(ConfigurationError):
    """Training-mode BatchNorm under accumulation normalises by the micro-batch, not the big batch."""


class BatchError(BigBatchError, ValueError):
    """A big batch that cannot be cut into micro-batches."""


class OutOfMemory(BigBatchError, RuntimeError):
    """The smallest micro-batch does not fit; the model, the optimizer and the random state are as before."""


class LossError(BigBatchError, ValueError):
    """This loss cannot be accumulated as it stands; nothing was added to any gradient."""

    fix_of_term: str = ""  # what to type where the loss has other terms, too: a count of all of it would be wrong

    def speak_of_term(self) -> None:
        """Render the text for a loss of several terms."""
        if self.fix_of_term:
            self.fix = self.fix_in_step = self.fix_of_term
            self.speak_to_step()


class UnreadableLoss(LossError):
    """The loss's graph does not tell what it was averaged over."""


class CoupledLoss(LossError):
    """A sample's loss depends on the other samples of its batch, so no weights make the parts add up."""


class PathsDiffer(LossError):
    """Micro-batches that run in lock-step took different paths, and cannot meet."""


class SeveralCounts(LossError):
    """The terms of the loss were averaged over different things, and their totals are not known yet."""


class WindowError(BigBatchError, RuntimeError):
    """The window is not in a state for this call."""


class WindowOpen(WindowError):
    """A window was left open by `break` or an exception."""


class WindowDisturbed(WindowError):
    """Something other than the accumulator stepped, zeroed or added gradients inside the window."""


class WindowBroken(WindowError):
    """A backward failed halfway and has added part of its gradients, or a step failed."""


class RankFailed(BigBatchError, RuntimeError):
    """Another rank has failed in this window; the model and the optimizer of this one are as before it."""


class StateError(BigBatchError, ValueError):
    """A state_dict that does not fit the object it is loaded into."""


class GradientsDiffer(BigBatchError, AssertionError):
    """The accumulated gradient is not the big batch's; its text is the whole verification."""
