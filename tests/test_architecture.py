"""docs/architecture.md draws the imports as they are, and what it says of adding a method, an operator and so on holds.

The picture of the packages leaves out an arrow wherever other arrows lead to the same package, and leaves out the small
modules that every part may use. With these two rules it follows from the imports, so the comparison is exact.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import kvc_trt.methods
import kvc_trt.operators
from kvc_trt import policies
from kvc_trt.methods.base import discovery
from kvc_trt.models import presets
from kvc_trt.operators import registry as operator_registry

PACKAGE = Path(kvc_trt.__file__).parent
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES_SECTION = PAGE.split("\n## The packages\n")[1].split("\n## ")[0]
ADDING_SECTION = PAGE.split("\n## What to touch\n")[1].split("\n## ")[0]

Graph = dict[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Return every module of kvc_trt by its dotted name."""
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


def imported_names(path: Path, package: str) -> Iterator[tuple[str, str | None]]:
    """(module, name imported from it or None) of every import in a file, wherever in the file it is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


@cache
def module_imports() -> Graph:
    """Module -> modules of kvc_trt that it imports."""
    found: Graph = {}
    for name, path in modules().items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for module, member in imported_names(path, package):
            submodule = f"{module}.{member}"
            target = submodule if submodule in modules() else module
            if target in modules() and target != name:
                found.setdefault(name, set()).add(target)
    return found


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def part(module: str) -> str | None:
    """The package (or module) directly below kvc_trt that a module is in; None for kvc_trt itself, a list of names."""
    _, *below = module.split(".")
    return below[0] if below and below[0] != "__main__" else None


def not_drawn() -> set[str]:
    """Return the small modules, and the package `files/`, that the page lists as left out of the picture."""
    (sentence,) = re.findall(r"are\s+not\s+drawn:(.*?)\.\n\n", PACKAGES_SECTION, flags=re.DOTALL)
    return set(re.findall(r"`(\w+)(?:\.py|/)`", sentence))


@cache
def package_imports() -> Graph:
    """Drawn package -> other drawn packages that it imports."""
    drawn = {part(module) for module in modules()} - not_drawn() - {None}
    found: Graph = {str(package): set() for package in drawn}
    for module, targets in module_imports().items():
        own = part(module)
        if own in found:
            found[own] |= {other for target in targets if (other := part(target)) in found and other != own}
    return found


def arrows_of_the_picture() -> set[tuple[str, str]]:
    (picture,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", PACKAGES_SECTION, flags=re.DOTALL)
    found = set()
    for line in picture.strip().splitlines():
        sources, targets = line.split("-->")
        found |= {(a.strip(), b.strip()) for a in sources.split("&") for b in targets.split("&")}
    return found


def arrows_of_the_imports() -> set[tuple[str, str]]:
    """Return the imports between packages, without those that others imply."""
    graph = package_imports()
    implied = {package: {far for near in graph[package] for far in reachable(graph, near)} for package in graph}
    return {(package, target) for package, targets in graph.items() for target in targets - implied[package]}


def written(arrows: set[tuple[str, str]]) -> list[str]:
    return sorted(f"{source} --> {target}" for source, target in arrows)


def test_the_picture_shows_every_import() -> None:
    assert written(arrows_of_the_imports() - arrows_of_the_picture()) == []


def test_the_picture_shows_nothing_else() -> None:
    assert written(arrows_of_the_picture() - arrows_of_the_imports()) == []


def test_every_folder_is_drawn_and_described() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= not_drawn() | {end for arrow in arrows_of_the_picture() for end in arrow}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in PACKAGES_SECTION] == []


def test_undrawn_modules_import_no_drawn_package() -> None:
    small = not_drawn()
    assert small <= {path.stem for path in PACKAGE.iterdir()}
    for module, targets in module_imports().items():
        if part(module) in small:
            assert {part(target) for target in targets} <= small, module


def test_every_name_that_a_package_offers_exists() -> None:
    lists = [path for path in PACKAGE.rglob("__init__.py") if "__all__" in path.read_text(encoding="utf-8")]
    packages = [importlib.import_module(".".join(path.parent.relative_to(ROOT).parts)) for path in lists]
    missing = [f"{one.__name__}.{name}" for one in packages for name in one.__all__ if not hasattr(one, name)]
    assert len(packages) > 10
    assert missing == []


def test_packages_import_each_other_in_one_direction() -> None:
    graph = package_imports()
    assert [package for package in sorted(graph) if package in reachable(graph, package)] == []


def test_modules_import_each_other_in_one_direction() -> None:
    graph = module_imports()
    assert [module for module in sorted(graph) if module in reachable(graph, module)] == []


def folder_imports() -> Graph:
    """Folder -> other folders whose modules its own modules import; faces (`__init__.py`) aside."""
    found: Graph = {}
    for module, targets in module_imports().items():
        for target in targets:
            if "__init__.py" not in (modules()[module].name, modules()[target].name):
                own, other = module.rpartition(".")[0], target.rpartition(".")[0]
                found.setdefault(own, set()).update({other} - {own})
    return found


def test_folders_side_by_side_import_each_other_in_one_direction() -> None:
    graph = folder_imports()
    pairs = [(a, b) for a, targets in graph.items() for b in targets if a.rpartition(".")[0] == b.rpartition(".")[0]]
    assert [(a, b) for a, b in pairs if a in graph.get(b, ())] == []


FOLDERS_OF_EQUALS = {"commands", "families", "methods"}
"""Folders with a file for each command, family or method."""


def test_a_folder_shows_one_subject() -> None:
    """A reader takes in about fourteen modules at a glance; folders of equals may have more."""
    shown = {folder: len(list(folder.glob("[!_]*.py"))) for folder in (PACKAGE, *PACKAGE.rglob("*/"))}
    assert {
        str(folder.relative_to(ROOT)): count
        for folder, count in shown.items()
        if count > 15 and folder.name not in FOLDERS_OF_EQUALS
    } == {}


def test_a_module_holds_one_subject() -> None:
    """Up to about 500 lines: more are two subjects."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > 550} == {}


class Function(NamedTuple):
    """A function or a method."""

    module: str
    name: str
    parameters: tuple[str, ...]
    lines: int
    """Those of its text, the docstring included, decorators not."""


@cache
def functions() -> list[Function]:
    found = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append(Function(module, node.name, tuple(one.arg for one in taken), lines))
    return found


def test_a_function_is_read_on_one_screen() -> None:
    assert [f"{one.module}.{one.name}" for one in functions() if one.lines > 60] == []


def test_options_of_a_run_travel_as_one_object() -> None:
    """`Engine.open` takes them one by one; behind it they are `RunOptions`."""
    takers = [f"{one.module}.{one.name}" for one in functions() if "prefill_precision" in one.parameters]
    assert takers == ["kvc_trt.api.engine.open"]


LONG_SIGNATURES = {
    "kvc_trt.api": {"build"},
    "kvc_trt.api.engine": {"open"},
    "kvc_trt.reference.bounds": {"append"},
    "kvc_trt.reference.methods.expected_attention": {"keep_expected"},
    "kvc_trt.reference.methods.hybrid": {"hybrid_attention"},
    "kvc_trt.reference.methods.quest": {"quest_attention"},
    "kvc_trt.reference.methods.sparq": {"sparq_attention"},
    "kvc_trt.reference.turn": {"append_block", "compact_turn"},
    "kvc_trt.runtime.chat.conversation": {"__init__"},
    "kvc_trt.runtime.scheduler.scheduler": {"__init__"},
    "kvc_trt.runtime.session.session": {"__init__"},
    "kvc_trt.tasks.dataset": {"draw_data_set"},
    "kvc_trt.verify.ladder": {"verify"},
}
"""Interfaces of the package or of one of its parts; almost all of their parameters are named, and have defaults."""


def test_no_other_function_takes_more_than_eight_parameters() -> None:
    found: dict[str, set[str]] = {}
    for one in functions():
        if len(one.parameters) > 8:
            found.setdefault(one.module, set()).add(one.name)
    assert found == LONG_SIGNATURES


class Imports(NamedTuple):
    """The imports of a module that run; those for type checking do not."""

    at_the_top: frozenset[str]
    in_functions: frozenset[str]


@cache
def imports_that_run() -> dict[str, Imports]:
    """Return the modules that each module imports: our own by their whole names, libraries by their first parts."""
    found = {}
    for name, path in modules().items():
        top: set[str] = set()
        inside: set[str] = set()
        _collect(ast.parse(path.read_text(encoding="utf-8")), top, inside)
        parents = {name.rpartition(".")[0]} | {one.rpartition(".")[0] for one in top if one in modules()}
        found[name] = Imports(frozenset(top | (parents & set(modules()))), frozenset(inside))
    return found


def _collect(node: ast.AST, top: set[str], inside: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for one in child.orelse:
                _collect(ast.Module([one], []), top, inside)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, inside, inside)
        elif isinstance(child, ast.Import):
            top |= {one.name if one.name in modules() else one.name.partition(".")[0] for one in child.names}
        elif isinstance(child, ast.ImportFrom):
            source = child.module or ""
            own = {f"{source}.{one.name}" for one in child.names} & set(modules())
            top |= own or {source if source in modules() else source.partition(".")[0]}
        else:
            _collect(child, top, inside)


def libraries_of(module: str) -> set[str]:
    """Return the libraries that are loaded with a module."""
    top = {name: imports.at_the_top for name, imports in imports_that_run().items()}
    loaded = reachable({name: set(targets) for name, targets in top.items()}, module) | {module}
    return {one for one in loaded if one.partition(".")[0] != "kvc_trt"} - set(sys.stdlib_module_names)


IMPORTS_FOR_ONE_CALL = {"kvc_trt.api", "kvc_trt.api.engine"}
"""Each of their functions loads the part of the package that it needs."""
IMPORTS_OF_A_REGISTRY = {"kvc_trt.methods.base.registry", "kvc_trt.operators.native"}
"""The registry of operators imports every module of operators."""


def test_an_import_inside_a_function_spares_a_library() -> None:
    """Where it spares none, it stands at the top of the file, where a reader looks for it."""
    spared = {}
    for module, imports in imports_that_run().items():
        for target in imports.in_functions & set(modules()):
            spared[module, target] = libraries_of(target) - libraries_of(module)
    assert len(spared) > 30
    needless = {module for (module, _), libraries in spared.items() if not libraries}
    assert needless == IMPORTS_FOR_ONE_CALL | IMPORTS_OF_A_REGISTRY


LONGER_FAMILIES = {"falcon", "gpt_oss", "qwen3_next"}
"""Falcon is two architectures; the others have experts in MXFP4, and linear layers."""


def test_a_family_is_one_file_of_at_most_100_lines() -> None:
    files = (PACKAGE / "models" / "families").glob("*.py")
    assert {file.stem for file in files if len(file.read_text().splitlines()) > 100} == LONGER_FAMILIES


ARCHITECTURE = re.compile(r"\w+For(?:CausalLM|ConditionalGeneration)")


def test_no_family_is_named_outside_of_its_file() -> None:
    """Executors, graphs and the reference know parts: no branch names a class of transformers."""
    allowed = (PACKAGE / "models" / "families", PACKAGE / "models" / "checkpoints")
    files = [path for path in modules().values() if not any(path.is_relative_to(one) for one in allowed)]
    trees = ((path, ast.walk(ast.parse(path.read_text()))) for path in files)
    named = {
        str(path.relative_to(PACKAGE)): node.value
        for path, nodes in trees
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ARCHITECTURE.fullmatch(node.value)
    }
    assert named == {}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring in a file: of modules, classes and functions, and those below attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


@pytest.mark.parametrize("folder", ["kvc_trt", "benchmarks", "tests"])
def test_no_docstring_is_an_indirect_question(folder: str) -> None:
    """A function's docstring says what it does or returns; that of an attribute, class or module names the thing."""
    found = [(path, line, text) for path in (ROOT / folder).rglob("*.py") for line, text in docstrings(path)]
    assert len(found) > 100
    asking = [f"{path.relative_to(ROOT)}:{line}" for path, line, text in found if re.match(r"(What|Whether)\b", text)]
    assert asking == []


def test_the_reference_does_not_know_the_methods() -> None:
    assert "methods" not in reachable(package_imports(), "reference")


def test_every_operator_is_in_the_table() -> None:
    listed = dict(re.findall(r"^\| (`Kvc.*?) \|.*\| (`.*?`) \|$", PAGE, flags=re.MULTILINE))
    names = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    files = {name for cell in listed.values() for name in re.findall(r"`(\w+\.py)`", cell)}
    assert names == set(operator_registry.OPERATORS)
    assert [name for name in sorted(files) if not (PACKAGE / "operators" / name).is_file()] == []


def adding_rows() -> list[tuple[str, str, str]]:
    rows = [line.strip("|").split("|") for line in ADDING_SECTION.splitlines() if line.startswith("| ")]
    return [(what.strip(), write.strip(), held.strip()) for what, write, held in rows[1:]]


@pytest.mark.parametrize(("what", "write", "held"), adding_rows(), ids=lambda cell: cell[:20])
def test_every_line_of_what_to_touch_is_held_by_a_test(what: str, write: str, held: str) -> None:
    folders = re.findall(r"`([\w/]+/)`", write)
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held)
    assert tests
    for file, name in tests:
        defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{what}: {file} has no {name}"


METHOD = '''
"""The sliding window under another name."""

from dataclasses import replace

from kvc_trt.methods.sliding_window import SLIDING_WINDOW as ORIGINAL

THROW_AWAY = replace(ORIGINAL, name="throw-away", summary="only in this test")
'''


def test_a_file_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Composed of kinds that exist. No list elsewhere names it."""
    (tmp_path / "throw_away.py").write_text(METHOD)
    monkeypatch.setattr(kvc_trt.methods, "__path__", [*kvc_trt.methods.__path__, str(tmp_path)])
    request.addfinalizer(lambda: sys.modules.pop("kvc_trt.methods.throw_away", None))
    request.addfinalizer(discovery._by_name.cache_clear)
    request.addfinalizer(discovery._values.cache_clear)
    model = presets.load_preset("retrieval-tiny").config
    parameters = policies.resolve("throw-away", model=model, token_budget=64, max_input_len=512, max_output_len=32)
    assert (parameters.policy, parameters.recent) == ("throw-away", 64)
    assert ("throw-away", "only in this test") in [(name, summary) for name, summary, _ in policies.available()]


OPERATOR = '''
"""Dense attention under another name."""

from dataclasses import replace

from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION

THROW_AWAY = replace(DENSE_ATTENTION, name="KvcThrowAway", kernel=None)
'''


def test_a_file_is_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The schema reaches the registry, and with it every user of operators."""
    (tmp_path / "throw_away.py").write_text(OPERATOR)
    monkeypatch.setattr(kvc_trt.operators, "__path__", [*kvc_trt.operators.__path__, str(tmp_path)])
    request.addfinalizer(lambda: sys.modules.pop("kvc_trt.operators.throw_away", None))
    found = {operator.name: operator for operator in operator_registry._found()}
    assert set(found) == {*operator_registry.OPERATORS, "KvcThrowAway"}
    assert [tensor.name for tensor in found["KvcThrowAway"].state] == ["k_cache", "v_cache"]


def test_a_yaml_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    source = presets.build_configs_directory() / "models" / "retrieval-tiny.yaml"
    (tmp_path / "models" / "throw-away.yaml").write_text(source.read_text())
    monkeypatch.setattr(presets, "build_configs_directory", lambda: tmp_path)
    assert presets.list_presets() == ["throw-away"]
    assert presets.load_preset("throw-away").config == presets.parse_config(_architecture(source), "")


def _architecture(source: Path) -> dict[str, object]:
    architecture: dict[str, object] = yaml.safe_load(source.read_text())["architecture"]
    return architecture
