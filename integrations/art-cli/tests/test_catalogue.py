"""What is said about distributions of this repository that are not installed."""

import importlib
import shlex
from pathlib import Path

import doc_shell
import pytest
import typer
from typer.testing import CliRunner

import art_cli
from art_cli import catalogue
from art_cli.arguments import Commands
from art_cli.catalogue import ADAPTERS, COMMANDS, INTEGRATIONS, PLUGINS, PROVIDERS, WITHOUT_PLUGIN, how_to_install
from art_cli.doctor import Finding, frameworks
from art_cli.main import app
from art_cli.variables import CHECKED
from art_core.errors import AgentError, ConfigError
from art_core.plugins import Plugins


def adapt(agent):
    return Plugins(art_cli, installed=False).adapt(agent)


def test_an_agent_of_a_known_framework_gets_the_name_of_its_plugin(monkeypatch):
    monkeypatch.setattr(catalogue, "_is_installed", lambda distribution: False)
    Alien = type("CompiledStateGraph", (), {"__module__": "langgraph.graph.state"})
    with pytest.raises(AgentError, match=r"-e plugins/art-openai -e plugins/art-langchain -e plugins/art-langgraph\."):
        adapt(Alien())


def test_an_agent_of_a_framework_without_a_plugin_is_told_how_it_works_as_a_function():
    Alien = type("Agent", (), {"__module__": "semantic_kernel.agents"})
    with pytest.raises(
        AgentError, match=r"def agent\(task\), with OpenAIChatCompletion.*art-openai, or with any client and address"
    ):
        adapt(Alien())


def test_an_agent_of_a_framework_whose_plugin_is_missing_is_told_how_to_install_it():
    Alien = type("LlmAgent", (), {"__module__": "google.adk.agents"})
    with pytest.raises(
        AgentError, match="pip install -e integrations/art-gateway -e plugins/art-http -e plugins/art-google-adk"
    ):
        adapt(Alien())


def test_an_engine_whose_distribution_is_missing_is_told_how_to_install_it():
    with pytest.raises(ConfigError, match=r"'live'.*pip install -e integrations/art-gateway -e plugins/art-http"):
        Plugins(art_cli, installed=False).choose("register_engines", "live")


def test_an_unknown_reward_is_refused_with_how_a_command_line_names_ones_own():
    with pytest.raises(
        ConfigError, match=r"'my_reward' \(a command line names your own as FILE.py:NAME or MODULE:NAME"
    ):
        Plugins(art_cli, installed=False).choose("register_rewards", "my_reward")


@pytest.mark.parametrize(("folder", "names"), [("plugins", PLUGINS), ("integrations", INTEGRATIONS)])
def test_all_distributions_of_the_repository_are_known(folder, names):
    root = Path(__file__).parents[3]
    assert {path.parent.name for path in root.glob(f"{folder}/*/pyproject.toml")} == names


def test_frameworks_are_listed_with_what_they_need(monkeypatch):
    there = {"instructor", "pydantic_ai", "google"}

    def find_spec(name):
        if name == "google.adk":
            raise ModuleNotFoundError("as where the package around it is missing")
        return name if name in there else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"agents": ["somebodys-own"]})
    missing, function = frameworks([])
    assert (missing.name, missing.advice) == (
        "pydantic_ai",
        "pip install -e plugins/art-openai -e plugins/art-pydantic-ai",
    )
    assert (function.name, function.state) == ("instructor", "works as a function")
    assert "address.base_url" in function.advice
    installed, _ = frameworks(["art-pydantic-ai"])
    assert (installed.state, installed.advice) == ("art-pydantic-ai", "")
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"agents": ["openai-agents"]})
    assert ("agents", "pip install -e plugins/art-openai") in [(it.name, it.advice) for it in frameworks([])]


def test_what_is_not_installed_is_installed_from_the_checkout():
    for distribution in {*ADAPTERS.values(), *PROVIDERS.values(), *(it.needs for it in CHECKED)} - {""}:
        doc_shell.check_pip(shlex.split(how_to_install(distribution))[1:], have=doc_shell.INSTALLED)


def test_doctor_shows_the_names_of_extras(monkeypatch):
    advice = "needed for LoRA: pip install -e '.[train]' -e integrations/art-cli -e integrations/art-embedded"
    monkeypatch.setattr("art_cli.doctor.examine", lambda: [Finding("peft", "missing", advice)])
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output
    assert advice in shown


def test_what_is_called_a_frameworks_plugin_is_what_its_agents_are_told():
    assert not set(ADAPTERS) & set(WITHOUT_PLUGIN)


def test_a_command_whose_distribution_is_missing_is_told_how_to_install_it():
    missing = typer.Typer(cls=Commands, callback=lambda: None)
    result = CliRunner().invoke(missing, ["gateway", "--port", "1"])
    assert isinstance(result.exception, ConfigError)
    assert "`art gateway` is a command of art-gateway" in str(result.exception)
    assert str(result.exception).endswith("run: pip install -e integrations/art-gateway")
    unknown = CliRunner().invoke(missing, ["gatewy"])
    assert unknown.exit_code == 2 and "No such command 'gatewy'" in unknown.output


def test_all_commands_of_other_distributions_are_known():
    provided = {}
    for distribution in INTEGRATIONS - {"art-cli"}:
        registered = typer.Typer(callback=lambda: None)
        module = importlib.import_module(distribution.replace("-", "_"))
        Plugins(module, installed=False).call("register_commands", app=registered)
        provided |= dict.fromkeys(typer.main.get_command(registered).commands, distribution)
    assert provided == COMMANDS
