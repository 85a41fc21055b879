"""Comments that silence a finding, as ruff and flake8 read them.

loss.backward()  # noqa               everything on this line
loss.backward()  # noqa: BB201,BB203  these rules, on this line
# bigbatch: noqa                      everything in this file
# bigbatch: noqa: BB2                 all rules whose code begins so, in this file
"""

import io
import re
import tokenize
from collections import defaultdict
from contextlib import suppress

_COMMENT = re.compile(
    r"#\s*(?P<whole>bigbatch\s*:\s*)?noqa\b(?:\s*:\s*(?P<codes>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE
)


def read_noqa(text: str) -> dict[int, tuple[str, ...]]:
    """Return the beginnings of codes that comments silence, by line; 0 is the whole file. An empty one fits all."""
    silenced: dict[int, tuple[str, ...]] = defaultdict(tuple)
    if "noqa" not in text.lower():
        return silenced
    # Strings that look like a comment are none, and the tokens end where the text is no Python.
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if found:
                codes = re.split(r"[\s,]+", found["codes"].upper()) if found["codes"] else [""]
                silenced[0 if found["whole"] else token.start[0]] += tuple(codes)
    return silenced
