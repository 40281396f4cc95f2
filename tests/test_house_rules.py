"""House rules that a program can check: sizes, names, rooms and what must never be imported or executed."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULES = [*SOURCES, *sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

MAX_MODULE_LINES, MAX_FUNCTION_LINES = 500, 80
MAX_MODULES_PER_PACKAGE = 14
MIN_LINES_OF_A_SINGLE_USE_MODULE = 60
VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base"}
VAGUE_SUFFIXES = ("Manager", "Helper", "Utils", "Util", "Handler", "Processor", "Impl")
# Kernels are loop nests that must compile to one function; dispatch between pieces is what they exist to avoid.
LONG_ON_PURPOSE = {"_policy_gradient", "train_joint"}
# Adjectives and states that PyTorch, asyncio and the standard library use the same way, and words that only look alike.
STATES = {"closed", "finished", "failed", "terminated", "truncated", "expired", "resolved"}
LOOKALIKES = {"seed", "feed", "need", "embed", "speed", "exceed", "proceed", "succeed"}
IRREGULAR_PARTICIPLES = set(
    "said told found made taken kept held given shown seen known sent begun done gone written drawn broken chosen "
    "thrown met laid lent spent built left lost bound led brought caught taught sought stood worn fallen hidden".split()
)
# The classes that the specifications name live beside the ones that do the work.
SAME_IDEA_AT_TWO_LEVELS = {"ActorPool", "TaskRunner", "Trainer"}
DIALECT = re.compile(r"\b(whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_is_small_and_named_after_what_it_holds(path):
    lines = path.read_text().count("\n")
    assert lines <= MAX_MODULE_LINES, f"{path} has {lines} lines: split it along the nouns it holds"
    assert path.stem not in VAGUE_MODULES, f"{path}: name the module after the thing inside it"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_functions_fit_on_a_page_and_classes_are_named_after_things(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_ON_PURPOSE:
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} is {length} lines: name its steps"
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(VAGUE_SUFFIXES), f"{path}:{node.lineno} {node.name}: say what it is"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_opens_by_saying_what_it_owns(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_is_ever_unpickled(path):
    if path.name in ("children.py", "collector_process.py", "weight_sync.py"):
        return  # talks to processes it started itself, over pipes nobody else can reach
    text = path.read_text()
    clean = text.replace(".eval()", "").replace("policy.eval", "").replace("application.exec()", "")  # Qt's event loop
    for way in (r"pickle\.load", "Unpickler", "cloudpickle", r"\beval\(", r"\bexec\("):
        assert not re.search(way, clean), f"{path} uses {way}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in map(ast.unparse, node.keywords), f"{path}:{node.lineno} unpickles objects"


def _is_lone_participle(name):
    word = name.strip("_")
    if "_" in word or word in STATES | LOOKALIKES:
        return False
    return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and len(word) > 3)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_function_is_named_by_a_verb_or_a_noun_and_not_by_a_lone_participle(path):
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lone = [f"{node.lineno} {node.name}" for node in functions if _is_lone_participle(node.name)]
    assert not lone, f"{path}: {lone}: say what the function does or returns"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_prose_has_a_named_subject(path):
    found = [
        f"{number} {word}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in DIALECT.findall(line)
    ]
    assert not found, f"{path}: {found}: name the component, the process or the user"


def test_two_public_classes_do_not_share_a_name():
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} <= SAME_IDEA_AT_TWO_LEVELS


@pytest.mark.parametrize("package", sorted({path.parent for path in SOURCES}), ids=_name)
def test_a_package_shows_about_a_dozen_modules(package):
    modules = [path.name for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(modules) <= MAX_MODULES_PER_PACKAGE, f"{package} has {len(modules)} modules: it holds several concepts"


def test_a_small_module_has_more_than_one_reader():
    """A fragment that one other module imports belongs into that module."""
    modules = {_module_name(path): path for path in SOURCES}
    importers = defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    importers[inner if inner in modules else node.module].add(name)
    fragments = [
        name
        for name, path in modules.items()
        if path.name != "__init__.py"
        and len(importers[name]) == 1
        and path.read_text().count("\n") < MIN_LINES_OF_A_SINGLE_USE_MODULE
    ]
    assert not fragments, f"merge each into the one module that imports it: {fragments}"


def _module_name(path):
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
