"""The frame of a page: its head, its style, its parts. Nothing is fetched when it is read."""

from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata, resources
from pathlib import Path

from bigbatch.errors import ConfigurationError
from bigbatch.report.markup import Html, element, together

# A page that was mailed or put on a server must not reach out, whatever a name in it may say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, *parts: str) -> str:
    """Return the document."""
    style = (resources.files("bigbatch.report") / "style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element("body", element("main", *parts), element("footer", element("p", _made())))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def opening(kicker: str, title: str, lead: str, *, verdict: str, tone: str) -> Html:
    """Return what a page begins with: what it is, of what, and its answer; `tone` is good or bad."""
    badge = (element("span", verdict, class_=f"badge {tone}"),) if verdict else ()
    return element(
        "header",
        element("p", kicker, class_="kicker"),
        element("h1", title),
        element("p", *badge, " " if verdict else "", lead, class_="lead"),
    )


def figures(numbers: Sequence[tuple[str, str, str]]) -> Html:
    """Return a few numbers to see at a glance: each a name, a value and what it means."""
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", meaning)))
            for name, value, meaning in numbers
        ),
        class_="figures",
    )


def section(heading: str, *parts: str) -> Html:
    """Return a part of the page under a heading."""
    return element("section", element("h2", heading), *parts)


def code(text: str) -> Html:
    """Return what is to be typed."""
    return element("pre", element("code", text), tabindex="0")


def write(text: str, to: Path) -> None:
    """Write a page, in one go."""
    to.write_text(text, encoding="utf-8")


def refuse_target(to: Path) -> None:
    """Refuse a place where no page can be written, before anything is measured for it."""
    if to.is_dir():
        raise ConfigurationError(f"--html {to}: this is a folder.\nName a file in it:  --html {to / 'page.html'}")
    if not to.parent.is_dir():
        raise ConfigurationError(f"--html {to}: there is no folder {to.parent}.\nMake it first:  mkdir -p {to.parent}")


def _made() -> Html:
    versions = " and ".join(f"{name} {version}" for name in ("bigbatch", "torch") if (version := _version(name)))
    day = datetime.now(timezone.utc).date().isoformat()
    return together([f"Made with {versions} on {day}. This page holds all that it shows and fetches nothing."])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
