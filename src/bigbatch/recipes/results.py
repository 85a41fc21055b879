"""What a comparison measured: plain numbers, frozen."""

from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its standard deviation, which one seed does not have."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Of one value per seed."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Clipped:
    """What clipping did."""

    updates: Spread
    """Updates whose gradient was larger than the clip."""
    largest_norm: float
    """Of a gradient before clipping, in any update of any seed."""


@dataclass(frozen=True)
class ArmResult:
    """One column of the table."""

    name: str
    micro_batch: int
    steps: int
    learning_rate: float
    rescaled: bool
    updates: int
    clipped: Clipped | None
    """None where nothing is clipped."""
    samples_used: int
    """Samples that went into an update, over all epochs."""
    loss: Spread
    accuracy_first: Spread
    accuracy_last: Spread
    ms_per_update: float
    ms_per_epoch: float
    peak_bytes: int
    distance: float
    """‖w - w_true‖ / ‖w_true‖ of the final weights, w_true of the true big batch at the same rate; worst seed."""


@dataclass(frozen=True)
class Comparison:
    """The whole table, and what it was measured on."""

    recipe: str
    origin: str
    title: str
    claim: str | None
    seeds: int
    epochs: int
    samples: int
    validation: int
    micro_batch: int
    steps: int
    clip_norm: float | None
    dtype: str
    torch: str
    arms: tuple[ArmResult, ...]

    @property
    def batch(self) -> int:
        """Samples behind one accumulated update."""
        return self.micro_batch * self.steps

    @property
    def small(self) -> ArmResult:
        """One update per micro-batch."""
        return self.arms[0]

    @property
    def textbook(self) -> ArmResult:
        """The textbook's accumulation."""
        return self.arms[1]

    @property
    def accumulated(self) -> ArmResult:
        """This library's, at the unchanged rate."""
        return self.arms[2]

    @property
    def true(self) -> ArmResult:
        """The big batch in one piece."""
        return self.arms[3]

    @property
    def rescaled(self) -> ArmResult:
        """This library's, at the rate that the big batch asks for."""
        return self.arms[4]
