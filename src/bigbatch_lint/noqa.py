"""Comments that silence a finding, as ruff and flake8 read them.

loss.backward()  # noqa               everything on this line
loss.backward()  # noqa: BB201,BB203  these rules, on this line
# bigbatch: noqa                      everything in this file
# bigbatch: noqa: BB2                 all rules whose code begins so, in this file
"""

import io
import re
import tokenize
from contextlib import suppress
from dataclasses import dataclass

_CODES = r"(?:\s*:\s*(?P<codes>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]+)*))?"
_LINE = re.compile(rf"#\s*noqa\b{_CODES}", re.IGNORECASE)
_FILE = re.compile(rf"#\s*bigbatch\s*:\s*noqa\b{_CODES}", re.IGNORECASE)
_EVERYTHING = ("",)  # a code's beginning that fits all


@dataclass(frozen=True)
class Silenced:
    """What the comments of a file silence: beginnings of codes, for the file and by line."""

    in_file: tuple[str, ...]
    on_line: dict[int, tuple[str, ...]]

    def silences(self, code: str, first_line: int, last_line: int) -> bool:
        """Tell whether a finding is not to be shown: by a comment on its first line or where its statement ends."""
        codes = self.in_file + self.on_line.get(first_line, ()) + self.on_line.get(last_line, ())
        return code.startswith(codes) if codes else False


def read_noqa(text: str) -> Silenced:
    """Read the comments of a module; strings that look like comments are not."""
    in_file: list[str] = []
    on_line: dict[int, tuple[str, ...]] = {}
    if "noqa" not in text.lower():
        return Silenced((), {})
    for line, comment in _comments(text):
        if found := _FILE.search(comment):
            in_file += _codes(found)
        elif found := _LINE.search(comment):
            on_line[line] = _codes(found)
    return Silenced(tuple(in_file), on_line)


def _comments(text: str) -> list[tuple[int, str]]:
    """Return the comments, up to where the text stops being Python."""
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        tokens.extend(tokenize.generate_tokens(io.StringIO(text).readline))
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _codes(found: re.Match[str]) -> tuple[str, ...]:
    codes = found["codes"]
    return tuple(re.split(r"[\s,]+", codes.upper())) if codes else _EVERYTHING
