"""Takes the linter from the repository around this folder, or from the sdist, which holds it."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Sources(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Adds the package and the pages of its rules to the sdist and to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Say where each comes from and where it goes."""
        del version
        here, installed = Path(self.root), {"src/bigbatch_lint": "bigbatch_lint", "docs/lint": "bigbatch_lint/pages"}
        unpacked = (here / "src").is_dir()  # the sdist's own package is found without a word
        for source in ["docs/lint"] if unpacked else installed:
            goes_to = source if self.target_name == "sdist" else installed[source]
            build_data["force_include"][str((here if unpacked else here.parent) / source)] = goes_to
