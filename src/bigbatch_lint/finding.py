"""What a rule found, and where."""

from dataclasses import asdict, dataclass

from bigbatch_lint.rules import Severity


@dataclass(frozen=True, order=True)
class Finding:
    """One mistake at one place; lines and columns count from 1, in a notebook within their cell."""

    path: str
    cell: int  # of a notebook, from 1; 0 in a plain file
    line: int
    column: int
    code: str
    slug: str
    severity: Severity
    message: str
    remedy: str
    end_line: int

    def place(self) -> str:
        """Where it is, as editors and terminals read it."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; a plain file has no cell."""
        return {**asdict(self), "severity": self.severity.value, "cell": self.cell or None}
