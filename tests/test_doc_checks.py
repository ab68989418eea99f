"""What is wrong in a page is found."""

import re

import doc_shell
import pytest
from doc_blocks import ROOT, blocks_of
from doc_python import Names

PAGE = ROOT / "README.md"
INSTALL = re.compile(r"pip (install(?: +(?:-e )?[\w.'/$\[\]-]+)+)")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import art_core_x", "No module named"),
        ("from art_core import trian", "trian"),
        ("art.trian()", "there is no art.trian"),
        ("art.train(agent, tasks, model='tiny')", "missing a required argument: 'steps'"),
        ("art.train_sync(agent, tasks, model='tiny', steps=1, gruop_size=2)", "gruop_size is no setting"),
        ("from art_ruler import Ruler\njudge = Ruler(rubrik='x')", "unexpected keyword argument 'rubrik'"),
        ("async with art.open_run() as run:\n    await run.collect(agent, tasks, size=2)", "argument 'size'"),
        ("art.train(agent, ..., seeds=2)", "seeds is no setting"),
    ],
)
def test_python_that_does_not_fit_the_signatures_is_found(code, said):
    (wrong,) = Names().check(code)
    assert said in wrong


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("art trian", "trian"),
        ("art train a.py:a tasks.jsonl --stesp 3", "--stesp"),
        ("art train ... --stesp 3", "--stesp"),
        ("art judge runs/mine --judge m --votess 3", "--votess"),
        ("make tset", "tset"),
        ("make demo SEEDS=1", "SEEDS"),
        ("cd art && python -m bench.nothing", "bench.nothing"),
        ("python -m bench.peers --olny step", "--olny"),
        ("python -m pip install -e plugins/art-nothing", "plugins/art-nothing"),
        ("pip install -e . -e 'plugins/art-openai[respones]'", "no extra respones"),
        ("X=1 pip install art-openai | cat", "art-openai is on no package index"),
        ("pip install -e plugins/art-openai", "plugins/art-openai needs art-core"),
        ("pip install -e . -e integrations/art-cli -e 'plugins/art-openai[responses]'", "needs art-gateway"),
        ("git clone <this repository> art", "files to read and write"),
        ("python nothing.py", "nothing.py"),
        ("atr doctor", "atr"),
    ],
)
def test_a_command_that_is_not_there_is_found(code, said):
    (wrong,) = doc_shell.check(code, PAGE)
    assert said in wrong


def test_what_messages_and_templates_say_to_install_can_be_installed():
    patterns = (
        "art_core/**/*.py",
        "integrations/art-cli/art_cli/templates/**/*.txt",
        "plugins/*/art_*/**/*.py",
        "integrations/*/art_*/**/*.py",
    )
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    found = {it for path in files for it in INSTALL.findall(path.read_text())}
    assert len(found) > 8
    for command in found:
        doc_shell.check_pip(command.replace("'", "").split(), have=doc_shell.INSTALLED)


def test_commands_as_pages_show_them_are_found_right():
    code = """
        # a comment
        cat > .env << 'EOF'
        nothing that is a command
        EOF
        ART_JUDGE=openai/gpt-6-luna art train agent.py:agent tasks.jsonl \\
            --steps 3 > log.txt &     # in the background
        python -m bench.peers --only step; make demo SEED=1
        pip install -e '.[train,chart]' -e integrations/art-cli -e integrations/art-embedded -e plugins/art-openai
    """
    assert list(doc_shell.check(code.replace("\n        ", "\n"), PAGE)) == []


def test_the_blocks_of_a_page_have_their_languages_marks_and_what_is_given(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- given:\nx = 1\n-->\n<!-- not run: needs a GPU -->\n```python\nx\n```\n\n- in a list\n\n"
        "    ```sh\n    art demo\n    ```\n\n    indented\n\n<!-- tests/test_readme.py runs this -->\n```python\ny\n```\n"
    )
    given, marked, command, by_test = blocks_of(page)
    assert (given.code, given.not_run) == ("x = 1", "")
    assert (marked.language, marked.code, marked.not_run) == ("python", "x\n", "needs a GPU")
    assert (command.language, command.code, command.not_run) == ("sh", "art demo\n", "")
    assert by_test.run_by == by_test.not_run == "tests/test_readme.py"
