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

SEEN = ("plan, measured", "verify, differs", "plan, evil", "verify, evil")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all pages."""
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=SEEN)
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page in a file."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    path.write_text(PAGES[request.param], encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_a_page_opens_quietly(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    """No message on the console, no request beside its own, no dialog, nothing wider than the screen."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    try:
        page = context.new_page()
        said: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())
        assert said == []
        assert requests == [page_file.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(_WIDER, width) == []
    finally:
        context.close()


# What sticks out to the right, and is not inside of something that scrolls by itself.
_WIDER = """width => [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scrolls') && !e.closest('pre') && !e.closest('svg'))
    .filter(e => e.getBoundingClientRect().right > width + 0.5).map(e => e.tagName)"""
