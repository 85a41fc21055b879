"""The page of each rule: what it finds, why that is wrong, an example, the fix."""

from pathlib import Path

# In an installed package the pages lie beside this file; in the repository they are part of its documentation.
_HOMES = (Path(__file__).parent / "pages", Path(__file__).parents[3] / "docs" / "lint")


def page_of(code: str) -> str | None:
    """Return a rule's page as Markdown; None if it is not there."""
    for home in _HOMES:
        page = home / f"{code}.md"
        if page.is_file():
            return page.read_text(encoding="utf-8")
    return None
