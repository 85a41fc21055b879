"""The figures of the GPU benchmark, and how they read."""

from dataclasses import dataclass
from textwrap import shorten

from benchmarks.racing import Outcome
from benchmarks.report import Grid

GIB = 2**30
UNKNOWN = "–"
OURS = "bigbatch"  # how the names of our contestants begin: only they have a bar


@dataclass(frozen=True)
class Figure:
    """One contestant on one work."""

    work: str
    contestant: str
    milliseconds: float | None  # per update, the median of rounds
    spread: float | None  # half the interquartile range, in milliseconds
    rounds: int
    compared: float | None  # with whom and which way round, the table's header says
    peak_bytes: int | None
    peak_ratio: float | None  # over the hand loop's
    reserved_bytes: int | None
    loss: float | None  # of the first update
    loss_after: float | None  # of the first batch, when it was trained on
    bar: str
    met: str
    error: str
    note: str


@dataclass(frozen=True)
class Bar:
    """What is asked of `compared`: at most (`below`) or at least `must`; `stretch` is what is hoped for."""

    must: float
    stretch: float | None = None
    below: bool = True
    peak_ratio: float | None = None  # the most over the hand loop's peak
    peak_bytes: int | None = None  # the most at all

    def __str__(self) -> str:
        sign = "≤" if self.below else "≥"
        return f"{sign} {self.must:g}" + (f" ({self.stretch:g})" if self.stretch is not None else "")

    def verdict(self, compared: float | None, peak: int | None, peak_ratio: float | None) -> str:
        """Say whether it is met, and if not, where."""
        if compared is None:
            return "no (not measured)"
        if self.peak_ratio is not None and (peak_ratio is None or peak_ratio > self.peak_ratio):
            return "no (memory)"
        if self.peak_bytes is not None and (peak is None or peak > self.peak_bytes):
            return "no (memory)"
        if not self._reached(compared, self.must):
            return "no"
        return "stretch" if self.stretch is not None and self._reached(compared, self.stretch) else "yes"

    def _reached(self, compared: float, bar: float) -> bool:
        return compared <= bar if self.below else compared >= bar


def figure(
    work: str, name: str, outcome: Outcome, compared: float | None, *, hand: Outcome | None = None, bar: Bar | None
) -> Figure:
    """Put what was measured beside what was asked; `hand` is whose memory it is compared with."""
    median, spread = outcome.median, outcome.spread
    peak_ratio = outcome.peak / hand.peak if outcome.peak and hand is not None and hand.peak else None
    return Figure(
        work=work,
        contestant=name,
        milliseconds=None if median is None else median * 1e3,
        spread=None if spread is None else spread * 1e3,
        rounds=len(outcome.seconds),
        compared=compared,
        peak_bytes=outcome.peak,
        peak_ratio=peak_ratio,
        reserved_bytes=outcome.reserved,
        loss=outcome.loss,
        loss_after=outcome.loss_after,
        bar="" if bar is None else str(bar),
        met="" if bar is None else bar.verdict(compared, outcome.peak, peak_ratio),
        error=outcome.error,
        note=outcome.note,
    )


def grid(title: str, compared: str, figures: list[Figure]) -> Grid:
    """Return one table for one work."""
    loss = "first loss" if all(figure.loss_after is None for figure in figures) else "loss after 2"
    header = ("", "ms", compared, "GiB", "/ hand's", loss, "bar", "met", "note")
    rows = [_row(figure) for figure in figures]
    # Not every work has every figure.
    kept = [place for place in range(len(header)) if any(row[place] not in ("", UNKNOWN) for row in rows)]
    return Grid(title, tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows])


def _row(figure: Figure) -> tuple[str, ...]:
    time = _number(figure.milliseconds, ",.1f")
    if figure.spread is not None:
        time += f" ± {figure.spread:,.1f}"
    peak = None if figure.peak_bytes is None else figure.peak_bytes / GIB
    return (
        figure.contestant,
        time,
        _number(figure.compared, ".3f"),
        _number(peak, ".2f" if peak is None or peak > 0.1 else ".5f"),
        _number(figure.peak_ratio, ".3f"),
        _number(figure.loss if figure.loss_after is None else figure.loss_after, ".4f"),
        figure.bar,
        figure.met,
        "; ".join(part for part in (shorten(figure.error, 100, placeholder=" …"), figure.note) if part),
    )


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
