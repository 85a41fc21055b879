"""Error texts are approved, not pinned one by one: `tests/messages/AREA.txt` holds all of an area, one section each.

    approve("loss", "pairs by broadcasting", error)

compares the text with its section. `pytest --approve` writes the sections instead, so that an edit of English is one
readable diff.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "messages"
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
writing = False  # set by `--approve`


def approve(area: str, name: str, error: object) -> None:
    """Compare what an error says with what was approved; numbers that differ between runs are to be replaced before."""
    path = FOLDER / f"{area}.txt"
    sections = _read(path)
    text = str(error).rstrip()
    if writing:
        sections[name] = text
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n\n".join(f"## {each}\n{sections[each]}" for each in sorted(sections)) + "\n")
    assert name in sections, f"no approved text of {name!r} in {path.name}: run  pytest --approve"
    assert text == sections[name], f"{path.name}, {name}: the text differs from the approved one"


def _read(path: Path) -> dict[str, str]:
    text = path.read_text() if path.exists() else ""
    return {name: body.rstrip() for name, body in _SECTION.findall(text)}
