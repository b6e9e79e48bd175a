"""The layout that CONTRIBUTING.md promises: which room may import which, and how large a method is.

A room is a package or a module directly under src/whence.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

import whence

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "whence"

#: A room imports only from itself and from rooms before it.
ROOMS = (
    "errors",
    "draws",
    "table",
    "progress",
    "world",
    "persist",
    "task",
    "language",
    "sets",
    "documents",
    "data",
    "run",
    "layers",
    "operators",
    "projections",
    "scores",
    "study",
    "engine",
    "replay",
    "integrations",
    "retrain",
    "methods",
    "store",
    "evaluate",
    "present",
    "report",
    "explore",
    "demo",
    "cli",
)

#: (file, room): why the file may import from a room after its own
FORWARDERS = {
    ("run/run.py", "integrations"): "Run.from_huggingface is one line that calls the reader",
    ("scores/result.py", "report"): "Scores.report is one line that calls the page's writer",
}

#: modules that `import whence` may load from outside the standard library
OUTSIDE = {"torch", "numpy", "safetensors", "tqdm"}

#: lines that a method's file may have; the others have 150
LONGEST = {"Source": 120}


@dataclass(frozen=True)
class Import:
    file: str  # under src/whence
    line: int
    module: str  # of whence

    @property
    def importer(self) -> str:
        return Path(self.file).parts[0].removesuffix(".py")

    @property
    def imported(self) -> str:
        return self.module.split(".")[1]

    def __str__(self) -> str:
        return f"src/whence/{self.file}:{self.line}: {self.importer} imports {self.module}"


def home(name: str) -> str:
    """The module that `whence.<name>` comes from."""
    return whence._HOME.get(name, f"whence.{name}")


def modules(node: ast.AST, importer: str) -> Iterator[str]:
    """Modules of whence that a node imports; `importer` is the file's own module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = importer.split(".")[: -node.level] if node.level else []
        module = ".".join([*package, *([node.module] if node.module else [])])
        names = [alias.name for alias in node.names]
        yield from map(home, names) if module == "whence" else [module]
    elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
        name = node.args[0]
        yield from [name.value] if isinstance(name, ast.Constant) else []
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "whence":
        yield home(node.attr)  # after `import whence`


def imports(path: Path) -> Iterator[Import]:
    """Everything that a file imports from whence: at the top, in functions, for types."""
    file = path.relative_to(PACKAGE)
    importer = ".".join(["whence", *file.with_suffix("").parts])
    for node in ast.walk(ast.parse(path.read_text())):
        for module in modules(node, importer):
            if module.startswith("whence.") and not module.startswith("whence._"):
                yield Import(file.as_posix(), node.lineno, module)


def every_import() -> list[Import]:
    # the package's own __init__ and __main__ name everything, and nothing imports them
    inside = (p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in ROOMS)
    return [each for path in sorted(inside) for each in imports(path)]


def test_every_room_has_its_place() -> None:
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    unknown = {room for room in rooms - set(ROOMS) if not room.startswith("_")}
    assert not unknown, f"add {sorted(unknown)} to ROOMS, and to the table in CONTRIBUTING.md"


def column(heading: str) -> list[str]:
    """Words in backticks in the first column of the table under a heading of CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition(f"{heading}\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [word.rstrip("/") for row in rows for word in re.findall(r"`([^`]+)`", row)]


def test_contributors_are_shown_this_order() -> None:
    assert column("## Where things are") == list(ROOMS)


def test_the_glossary_explains_names_that_exist() -> None:
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    names = column("### Code")
    assert names
    assert not [name for name in names if not re.search(rf"^class {name}\b", code, re.M)]


def test_rooms_import_only_from_rooms_before_them() -> None:
    place = {room: k for k, room in enumerate(ROOMS)}
    backwards = [
        each
        for each in every_import()
        if each.imported in place and place[each.imported] > place[each.importer]
    ]
    offending = [str(e) for e in backwards if (e.file, e.imported) not in FORWARDERS]
    assert not offending, "\n" + "\n".join(offending)
    unused = FORWARDERS.keys() - {(each.file, each.imported) for each in backwards}
    assert not unused, f"remove from FORWARDERS: {sorted(unused)}"


@pytest.mark.parametrize(
    "code",
    [
        "from whence.report.page import write",
        "import whence.report.page",
        "from whence import report",
        "from ..report import page",
        "def later():\n    from whence.report import page",
        "if TYPE_CHECKING:\n    from whence.report import page",
        "import whence\nwhence.report.write(1)",
        "import_module('whence.report')",
    ],
)
def test_every_way_to_import_is_seen(code: str) -> None:
    nodes = ast.walk(ast.parse(code))
    imported = [m for node in nodes for m in modules(node, "whence.scores.result")]
    assert any(module.startswith("whence.report") for module in imported)


def test_every_exported_name_exists() -> None:
    for path in sorted(PACKAGE.rglob("__init__.py")):
        module = import_module(".".join(["whence", *path.parent.relative_to(PACKAGE).parts]))
        missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
        assert not missing, f"{module.__name__}.__all__ has {missing}"


def test_no_module_is_a_drawer() -> None:
    """A thing lives where its word is defined."""
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    for folder in ("src", "tests", "experiments", "benchmarks", "docs", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            file = path.relative_to(ROOT)
            words = {word for part in file.with_suffix("").parts for word in part.split("_")}
            assert not words & drawers, file


def test_messages_name_the_distribution() -> None:
    """`whence` on the package index belongs to someone else."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"""pip install ['"]?whence(?!-tda)""", line)
    ]
    assert not wrong, wrong


def test_importing_whence_needs_four_packages() -> None:
    """With all of its public names, which are imported when they are first used."""
    code = """
import sys
import numpy, safetensors.numpy, safetensors.torch, torch, tqdm.auto
before = {name.partition(".")[0] for name in sys.modules}
import whence
for name in whence.__all__:
    getattr(whence, name)
after = {name.partition(".")[0] for name in sys.modules}
print(*(after - before - sys.stdlib_module_names - {"whence"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split(), f"{done.stdout.split()} are not among {sorted(OUTSIDE)}"


@pytest.mark.parametrize("name", sorted(whence._HOMES["whence.methods"]))
def test_a_method_is_short(name: str) -> None:
    file = Path(inspect.getfile(getattr(whence, name)))
    lines, most = len(file.read_text().splitlines()), LONGEST.get(name, 150)
    assert lines <= most, f"{file.relative_to(PACKAGE)} has {lines} lines, more than {most}"
