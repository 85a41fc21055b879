"""Pages in a real browser: no error, no request, both colour schemes, nothing wider than a telephone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import PAGES

playwright: Any = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

# What sticks out to the right, and is not inside of something that scrolls by itself.
WIDER = """width => [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scrolls') && !e.closest('pre') && !e.closest('svg'))
    .filter(e => e.getBoundingClientRect().right > width + 0.5).map(e => e.tagName)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all pages."""
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("name", ["plan, measured", "verify, differs", "plan, evil", "verify, evil"])
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_a_page_opens_quietly(browser: Any, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    """No message on the console, no request beside its own, no dialog, nothing wider than the screen."""
    file = tmp_path / "page.html"
    file.write_text(PAGES[name], encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    try:
        seen: list[str] = []
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("dialog", lambda dialog: seen.append(dialog.message))
        page.on("request", lambda request: seen.append(request.url))
        page.goto(file.as_uri())
        assert seen == [file.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(WIDER, width) == []
    finally:
        page.close()
