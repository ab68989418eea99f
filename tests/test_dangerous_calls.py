"""What turns data into code, or a text into a command, is called in a few places only, each with its reason."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(
    path
    for folder in (
        "art_core",
        "examples",
        "bench",
        "tiny",
        *ROOT.glob("plugins/*/art_*"),
        *ROOT.glob("integrations/*/art_*"),
    )
    for path in ([ROOT / folder] if str(folder).endswith(".py") else (ROOT / folder).rglob("*.py"))
)
ALLOWED = {
    (
        "art_core/serving/process.py",
        "pickle.loads",
    ): "commands from the parent and replies of the child that it started, over a pipe that only they have",
    (
        "integrations/art-ray/art_ray/travel.py",
        "pickle.loads",
    ): "agents and outputs between processes of the user's own cluster",
    (
        "integrations/art-tinker/art_tinker/service.py",
        "tarfile.open",
    ): "adapters of the server that the user chose; the filter 'data' keeps every member inside the folder",
    ("examples/coding/jail.py", "exec"): "what the sandbox is for: inside it",
    ("examples/coding/jail.py", "compile"): "the same",
    ("examples/coding/demonstrations.py", "exec"): "programs that this file writes itself",
}
"""(file, call) -> why it may. A new one has to be argued for here."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
LOADS = {"load", "loads", "Unpickler", "open"}
CALLS = {
    "torch.load", "torch.hub.load", "torch.package.PackageImporter", "torch.jit.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "numpy.load", "pandas.read_pickle", "jinja2.Environment",
    "jinja2.Template", "shutil.unpack_archive", "zipfile.ZipFile", "tarfile.open", "xml.etree.ElementTree.parse",
    "runpy.run_path", "asyncio.create_subprocess_shell", "logging.config.listen", "code.interact",
}  # fmt: skip
KEYWORDS = {
    "shell": True,
    "trust_remote_code": True,
    "weights_only": False,
    "allow_pickle": True,
    "use_safetensors": False,
}


def full_names(tree: ast.AST) -> dict[str, str]:
    """What every imported name stands for, wherever it is imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:  # "import a.b" names a, "import a.b as c" names a.b
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dangerous(source: str) -> list[str]:
    """The calls and names in a source that turn data into code, or a text into a command."""
    tree = ast.parse(source)
    names, found = full_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS and node.id not in names:
            found.append(node.id)
        elif isinstance(node, ast.Name | ast.Attribute):
            module, _, last = _dotted(node, names).rpartition(".")
            known = module.replace("ray.cloudpickle", "cloudpickle")
            if (known in MODULES and last in LOADS) or f"{module}.{last}" in CALLS:
                found.append(f"{known}.{last}")
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS and not _harmless(node):
            found.append(f"{node.arg}={ast.unparse(node.value)}")
    return found


def _harmless(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value != KEYWORDS[keyword.arg]


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


def test_the_places_are_those_that_are_argued_for():
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in PRODUCT
        for name in dangerous(path.read_text())
        if name != "re.compile"
    }
    assert found - ALLOWED.keys() == set(), "say in ALLOWED why it may, or do without"
    assert ALLOWED.keys() - found == set(), "argued for, and no longer there"
    assert {path.parts[len(ROOT.parts)] for path in PRODUCT} >= {"art_core", "plugins", "integrations", "examples"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("eval(text)", "eval"),
        ("map(exec, texts)", "exec"),
        ("__import__(name)", "__import__"),
        ("import pickle\npickle.loads(data)", "pickle.loads"),
        ("import pickle as p\np.load(file)", "pickle.load"),
        ("def f():\n    from pickle import loads as read\n    return read(data)", "pickle.loads"),
        ("from pickle import Unpickler\nclass Mine(Unpickler): pass", "pickle.Unpickler"),
        ("from ray import cloudpickle\ncloudpickle.loads(data)", "cloudpickle.loads"),
        ("import torch\ntorch.load(file, weights_only=True)", "torch.load"),
        ("from torch import load\nload(file)", "torch.load"),
        ("import yaml\nyaml.load(text, yaml.SafeLoader)", "yaml.load"),
        ("import os\nos.system(line)", "os.system"),
        ("import subprocess\nsubprocess.run(line, shell=True)", "shell=True"),
        ("import subprocess\nsubprocess.run(line, shell=wanted)", "shell=wanted"),
        ("load(model, trust_remote_code=config.trust)", "trust_remote_code=config.trust"),
        ("import tarfile\ntarfile.open(file)", "tarfile.open"),
        ("import jinja2\njinja2.Environment()", "jinja2.Environment"),
    ],
)
def test_each_of_them_is_found_whatever_it_is_called(source, name):
    assert name in dangerous(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile(text)",
        "import json\njson.loads(text)",
        "import yaml\nyaml.safe_load(text)",
        "import pickle\npickle.dumps(thing)",
        "load(model, trust_remote_code=False)",
        "from graph import compile\ncompile(nodes)",
        "import ast\nast.literal_eval(text)",
    ],
)
def test_what_only_looks_like_one_is_not(source):
    assert dangerous(source) == []


SECRETS = ("token", "key", "secret", "password", "api_key")


def compared(source: str) -> list[str]:
    """Comparisons by == or != in which a secret takes part: how long they take tells how much of a guess is right."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(it, ast.Eq | ast.NotEq) for it in node.ops):
            sides = [node.left, *node.comparators]
            of_self = [it.attr.strip("_") for it in sides if isinstance(it, ast.Attribute)]
            bare = [
                it.id
                for it in sides
                if isinstance(it, ast.Name) and it.id in ("token", "api_key", "secret", "password")
            ]
            constant = any(isinstance(it, ast.Constant) for it in sides)
            if not constant and (bare or set(of_self) & set(SECRETS)):
                found.append(ast.unparse(node))
    return found


def test_secrets_are_compared_in_constant_time_only():
    served = [path for path in PRODUCT if path.relative_to(ROOT).parts[0] in ("art_core", "plugins", "integrations")]
    assert {str(path.relative_to(ROOT)): found for path in served if (found := compared(path.read_text()))} == {}
    guards = [path for path in PRODUCT if "compare_digest" in path.read_text()]
    assert [path.name for path in guards] == ["app.py", "guard.py"], "where requests are let in: gateway and server"


def test_a_comparison_that_tells_how_much_is_right_is_found():
    assert (
        compared("given == self._token") and compared("if self.api_key != header: pass") and compared("token == given")
    )
    assert not compared("kind == 'token'") and not compared("len(token) == 3")
