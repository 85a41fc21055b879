"""Imports point down the floor plan (docs/architecture.md), also those inside functions; no module is in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/bigbatch"
# Each room imports only rooms to its left. Rooms of one line do not import each other.
FLOORS = [
    "errors caller",
    "loss state arguments default_loss batch",
    "learning_rate update options memory loop",
    "distributed",
    "window setup",
    "execute planner accumulator",
    "lockstep first_step_parts",
    "first_step_check",
    "across big_step",
    "noise recipes verification",
    "report",
    "cli",
    "__main__",
]
PLACE = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}


def imports() -> Iterator[tuple[str, str]]:
    """Yield each import of one of our modules by another, as dotted names inside the package."""
    names = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    for name, path in names.items():
        for node in run_nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bigbatch":
                base = (node.module or "").removeprefix("bigbatch").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".strip(".")
                    yield name.removesuffix(".__init__"), inner if inner in names else base
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("bigbatch."):
                        yield name.removesuffix(".__init__"), alias.name.removeprefix("bigbatch.")


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs; imports for annotations alone do not."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from run_nodes(node)


def room(name: str) -> str:
    """Return the folder of a module, or the module itself."""
    return name.split(".", maxsplit=1)[0]


def test_imports_point_down() -> None:
    """From a room to one that stands below it; `__init__` imports public names when they are asked for."""
    wrong = {
        f"{room(one)} -> {room(other)} ({one} imports {other})"
        for one, other in imports()
        if other and one != "__init__" and room(one) != room(other) and PLACE[room(one)] <= PLACE[room(other)]
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_is_in_a_circle() -> None:
    """Inside a room, too."""
    needs: dict[str, set[str]] = {}
    for one, other in imports():
        if other and one != "__init__":
            needs.setdefault(one, set()).add(other)
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for below in sorted(needs.get(name, ())):
                visit(below, (*way, name))
            done.add(name)

    for name in sorted(needs):
        visit(name, ())


def test_no_two_modules_share_a_name() -> None:
    """A search for a name finds one file."""
    seen: dict[str, Path] = {}
    for path in SOURCE.rglob("*.py"):
        if path.stem not in {"__init__", "__main__"}:
            assert path.stem not in seen, f"{path} and {seen[path.stem]}"
            seen[path.stem] = path
