"""Refusals in the words of whoever reads them: they speak of an `Accumulator`, which not every user has."""

import re

_WITH_COUNT = re.compile(r"accumulator\.backward\((.+?), count=(.+?)\)(?=\s*(#|$))", re.MULTILINE)
_ON_WINDOWS = re.compile(r"^.*accumulator\.(discard|flush)\(\).*\n?", re.MULTILINE)


def in_words_of(entrance: str, message: str) -> str:
    """Say where a thing is typed: count= as counted(...) in loss_fn, options in the `entrance`, windows nowhere."""
    message = _WITH_COUNT.sub(r"return counted(\1, \2)", message)
    message = _ON_WINDOWS.sub("", message)
    return message.replace("Accumulator(", f"{entrance}(").replace("this accumulator", f"this {entrance}").rstrip()
