"""The direction of imports is the architecture, so it is tested; so is its size."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import art_core
from art_core import plugin_api

ROOT = Path(__file__).parent.parent
CORE = ROOT / "art_core"
MODULES = sorted(path for path in CORE.rglob("*.py"))

# Each entry is a file or folder of art_core; it may import only from rows above its own.
ROWS = [
    {"types", "errors", "redaction", "hookspecs"},
    {"config", "runtime", "attribution", "capture", "store", "token_tree", "losses"},
    {"learner", "serving", "scoring"},
    {"builtin"},
    {"plugins"},
    {"loop"},
    {"__init__", "testing", "plugin_api"},
]
PUBLIC = {"plugin_api", "types", "errors", "testing", "losses", "scoring", "token_tree"}
"""What every plugin may import, beside the names of ``art_core`` itself."""
OF_RUNS = {"capture", "store", "learner"}
"""What integrations may import too, and the plugins that hold a run."""
HOLD_RUNS = {"art-classic", "art-openpipe"}
CORE_LINES = 12_229
"""Without ``learner`` and ``testing``."""
ROW = {module: number for number, modules in enumerate(ROWS) for module in modules}
EDGE_FOLDERS = [*ROOT.glob("plugins/art-*"), *ROOT.glob("integrations/art-*")]
EDGES = {folder.name.replace("-", "_") for folder in EDGE_FOLDERS}
HEAVY = {
    "torch",
    "transformers",
    "unsloth",
    "litellm",
    "langchain",
    "langchain_core",
    "langgraph",
    "openai",
    "aiohttp",
    "matplotlib",
}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path, *, at_the_top=False):
    """Return every imported dotted name, or those of imports at the top of the module; never those for type checkers alone."""
    tree, names = tree_of(path), []
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in tree.body if at_the_top else ast.walk(tree):
        if node in guarded:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return names


def module_of(path):
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def core_modules(path):
    """The modules of art_core that a file imports, its own package left out."""
    for name in imports_of(path):
        package, *rest = name.split(".")
        if package == "art_core":
            found = rest[0] if rest and rest[0] in ROW else "__init__"
            if found != module_of(path):
                yield found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CORE)))
def test_imports_point_up_the_rows(path):
    assert module_of(path) in ROW, f"{path.name} has no row: say where it belongs"
    for target in core_modules(path):
        assert ROW[target] < ROW[module_of(path)], f"{path.relative_to(CORE)} may not import {target}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CORE)))
def test_the_core_imports_no_plugin(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & EDGES


def of_the_core(folder):
    """Yield what the code in a folder imports from the core, as dotted names below ``art_core``, and the file."""
    for path in folder.rglob("*.py"):
        if not {".venv", "tests"} & set(path.parts):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "art_core":
                    yield from (
                        ((node.module + "." + alias.name).removeprefix("art_core."), path) for alias in node.names
                    )
                elif isinstance(node, ast.Import):
                    names = (alias.name for alias in node.names)
                    yield from (
                        (name.removeprefix("art_core."), path) for name in names if name.startswith("art_core.")
                    )


@pytest.mark.parametrize("folder", EDGE_FOLDERS, ids=lambda it: it.name)
def test_plugins_and_integrations_build_on_what_is_public(folder):
    public = PUBLIC | (OF_RUNS if folder.parent.name == "integrations" or folder.name in HOLD_RUNS else set())
    for name, path in of_the_core(folder):
        assert name in art_core.__all__ or name.split(".")[0] in public, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", EDGE_FOLDERS, ids=lambda it: it.name)
def test_a_distribution_declares_those_that_it_imports(folder):
    """What is imported inside a function may be missing: the function says what to install."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", it)[0].replace("-", "_") for it in project["dependencies"]}
    package = folder.name.replace("-", "_")
    for path in [*folder.glob(f"{package}.py"), *folder.glob(f"{package}/**/*.py")]:
        for name in imports_of(path, at_the_top=True):
            assert name.split(".")[0] not in EDGES - declared - {package}, f"{path.relative_to(ROOT)} imports {name}"


def test_the_plugin_api_is_small_and_all_of_it_is_used():
    assert len(plugin_api.__all__) <= 41
    used = {name for folder in EDGE_FOLDERS for name, _ in of_the_core(folder)}
    assert {f"plugin_api.{name}" for name in plugin_api.__all__} <= used


def test_the_agent_of_the_example_knows_nothing_of_art():
    for name in ("agent.py", "mailbox.py"):
        text = (ROOT / "examples" / "email_search" / name).read_text()
        assert "import art" not in text and "from art" not in text and "art_core" not in text


@pytest.mark.smoke
@pytest.mark.system
def test_importing_the_core_and_its_plugins_is_light():
    names = ["art_core", "art_core.plugins", "art_core.testing", *sorted(EDGES)]
    # Plugins that are tested apart are not installed here.
    folders = [str(folder.parent) for folder in ROOT.glob("plugins/*/apart")]
    code = f"import sys; sys.path += {folders}; import {', '.join(names)}; print(sorted({HEAVY} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_only_a_learner_with_an_adapter_imports_peft():
    files = set((CORE / "learner").glob("*.py")) - {
        CORE / "learner" / it for it in ("adapters.py", "unsloth_learner.py")
    }
    for path in files | {CORE / "learner" / "pretrained.py"}:
        top = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "peft" not in " ".join(map(ast.unparse, top)), f"{path.name} imports PEFT for every learner"


def test_losses_and_types_name_torch_for_type_checkers_only():
    for name in ("losses.py", "types/nouns.py", "types/parts.py"):
        assert not any(imported.split(".")[0] == "torch" for imported in imports_of(CORE / name))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CORE)))
def test_files_and_functions_stay_short_and_say_their_job(path):
    text, tree = path.read_text(), tree_of(path)
    assert len(text.splitlines()) <= 400
    if text.strip():
        assert ast.get_docstring(tree), f"{path.name} does not say its job"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.end_lineno - node.body[0].lineno + 1
            assert body <= 50, f"{path.name}: {node.name} has {body} lines"


# Budgets of the whole


def lines(*files):
    return sum(len(path.read_text().splitlines()) for path in files)


def test_the_core_is_small_enough_to_read_in_an_afternoon():
    core = [path for path in MODULES if module_of(path) not in ("learner", "testing")]
    assert lines(*core) <= CORE_LINES
    assert lines(*(path for path in MODULES if module_of(path) == "learner")) <= 2_506


def test_the_first_level_of_the_core_is_small_and_shallow():
    imports = {module: set() for module in ROW}
    for path in MODULES:
        imports[module_of(path)] |= set(core_modules(path))

    def level(module):
        return 1 + max(map(level, imports[module]), default=0)

    assert len(ROW) <= 20
    assert max(map(level, ROW)) <= 9
    assert sum(map(len, imports.values())) <= 70


def test_the_core_names_no_distribution():
    names = [path.parent.name for path in ROOT.glob("*/art-*/pyproject.toml")]
    strings = {
        (path.name, node.value)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [(file, name) for file, text in strings for name in names if re.search(rf"\b{name}\b", text)] == []


def packages():
    """Return every module of the repository's packages by its dotted name."""
    folders = [(ROOT, name) for name in ("art_core", "bench", "examples")]
    folders += [(path.parent, path.parent.name.replace("-", "_")) for path in ROOT.glob("*/art-*/pyproject.toml")]
    found = {}
    for base, name in folders:
        for path in [*(base / name).rglob("*.py"), *base.glob(f"{name}.py")]:
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def absolute(name, module, path):
    """Return an imported name without leading dots, as ``module`` means it."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - dots + 1], name[dots:]])


def test_no_modules_import_each_other_in_a_circle():
    modules = packages()
    imported = {}
    for module, path in modules.items():
        names = {absolute(name, module, path) for name in imports_of(path)}
        known = {name if name in modules else name.rpartition(".")[0] for name in names}
        imported[module] = (known & modules.keys()) - {module}
    while free := [module for module, names in imported.items() if not names & imported.keys()]:
        for module in free:
            del imported[module]
    assert sorted(imported) == [], "these import each other, or what does"


def test_the_files_to_read_first_are_few_and_short():
    head = (ROOT / "docs" / "design.md").read_text().partition("\n## ")[0]
    files = [ROOT / name for name in re.findall(r"^\d+\. `(\S+)`", head, flags=re.MULTILINE)]
    assert 5 < len(files) <= 10
    assert lines(*files) <= 2_200
