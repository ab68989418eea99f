"""Do the tests notice a changed line? Runs mutmut, module by module, each with the tests of its own, and prints a table.

    python tests/mutation.py [losses capture/admission ...]     # run by make mutation; docs/quality.md has the results

mutmut changes no annotations, docstrings, decorated functions, or code outside functions. Messages, that is strings with a space
in them, are also left unchanged, with what is formatted into them.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".mutation"
"""mutmut itself, and a folder for each module with its mutants and their outcomes."""
UPSTREAM = [
    f"test_upstream.py::test_{name}"
    for name in (
        "a_stream_ends_when_every_choice_has",
        "retry_after_is_passed_on_if_it_is_a_number_of_seconds",
        "a_long_request_reaches_the_server_whole",
        "a_raw_prompt_is_answered_in_the_shape_of_a_chat_completion",
        "proxy_settings_of_the_machine_are_not_used",
    )
]
"""The quick ones of a file that waits for servers to be late."""
DISTILLATION = [
    f"test_distillation.py::test_{name}"
    for name in (
        "a_token_is_worth_what_the_teacher_gives_it_above_the_student_and_its_reward",
        "the_expected_gradient_is_that_of_the_reverse_divergence",
        "a_teacher_with_other_tokens_is_refused",
        "only_distillation_needs_a_teacher",
    )
]
"""Those of the loss itself."""
STAMPED = [
    f"test_serving_commands.py::test_{name}"
    for name in (
        "a_stamped_answer_has_the_stamps_version",
        "closing_a_stamped_stream_closes_the_engines",
    )
]
PROCESS = [
    f"test_capture_process.py::test_{name}"
    for name in (
        "an_engines_start_error_is_raised_here",
        "an_early_process_can_import_from_a_path_added_later",
        "an_early_process_is_not_used_in_another_environment",
        "an_engines_prints_go_to_stderr",
        "a_process_that_cannot_be_started_raises_and_leaves_no_file_open",
        "too_many_open_files_is_an_error_that_names_the_limit",
        "a_process_that_ends_before_its_first_command_is_reported_with_its_exit_code",
        "a_start_that_times_out_is_reported_even_if_the_process_dies_while_stopping",
        "an_error_that_cannot_be_pickled_is_raised_as_text",
        "calls_and_log_records_of_the_process_reach_this_one",
        "a_failing_log_handler_does_not_break_replies",
        "a_dead_process_fails_pending_and_later_commands",
        "a_killed_process_is_reported_with_its_signal",
        "a_command_that_a_killed_process_has_not_read_fails",
        "a_process_whose_child_lives_on_is_seen_to_be_dead",
        "look_and_stacks_work_from_any_thread_and_time_out",
        "a_closure_is_refused_with_what_to_pass_instead",
        "stop_raises_the_engines_error_from_the_process",
        "stop_raises_its_own_errors",
        "an_orphan_whose_engine_never_stops_ends_in_time",
        "an_engine_of_an_unimportable_module_is_refused_with_where_to_define_it",
        "a_process_whose_start_failed_refuses_commands_and_can_be_stopped",
        "an_error_that_cannot_be_unpickled_here_is_reported",
        "idle_threads_of_the_process_do_not_spin_by_default",
    )
]
"""The ones that need no torch and never wait many seconds for a process to end."""
TESTS = {
    "losses": ["test_losses.py", *DISTILLATION],
    "token_tree": ["test_token_tree.py"],
    "scoring": ["test_scoring.py"],
    "serving/proxy": ["test_serving_commands.py", *PROCESS],
    "capture/admission": ["test_admission_gate.py", "test_call_activity.py"],
    "serving/process": PROCESS,
    "capture/record": ["test_recording.py"],
    "capture/replay": ["test_replay.py"],
    "capture/dialect": ["test_http_exchange.py", "test_capture_app.py"],
    "capture/http": ["test_http_exchange.py"],
    "capture/server": ["test_capture_app.py", "test_calls_in_flight.py", "test_relayed_calls.py"],
    "serving/service": ["test_serving_commands.py", "test_engine_methods.py"],
    "capture/listening": ["test_listening.py", "test_request_heads.py"],
    "capture/shape": ["test_malformed_answers.py", "test_capture_app.py"],
    "capture/upstream": ["test_upstream_shapes.py", *UPSTREAM, *STAMPED],
}
SAMPLED = {"serving/process": ["*3", "*7"]}
"""Modules whose mutants all start processes: only mutants whose names match, a fifth of them, are tried."""
COPIED = ["conftest.py", "tests", "examples", "bench", "plugins", "integrations", "docs", "README.md"]
PLUGINS = ["-p", "no:cacheprovider", "-p", "mutation", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
TIMED_OUT = {24, -24, 36, 152}
"""mutmut's exit codes of a mutant that never ended: it ran at least five times as long as the tests usually do."""


def prepare(module: str) -> Path:
    """Return the folder in which mutmut runs for ``module``."""
    folder = FOLDER / module.replace("/", ".")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ["art_core", "pyproject.toml", *COPIED]:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    options = {
        "source_paths": ["art_core"],
        "only_mutate": [f"art_core/{module}.py"],
        "also_copy": COPIED,
        "pytest_add_cli_args": ["-m", "not engines and not long", *PLUGINS],
        "pytest_add_cli_args_test_selection": [f"tests/{name}" for name in TESTS[module]],
        "timeout_multiplier": ["5"],
        "timeout_constant": ["1"],
        "on_dependency_change": ["ignore"],
        "use_git_change_detection": ["false"],
    }
    lines = [line for name, values in options.items() for line in (f"{name} =", *(f"    {it}" for it in values))]
    (folder / "setup.cfg").write_text("\n".join(["[mutmut]", *lines, ""]))
    return folder


def is_text(node) -> bool:
    """Whether a syntax node is a string for people: it has a blank in it."""
    import libcst

    if isinstance(node, libcst.FormattedString):
        return any(isinstance(part, libcst.FormattedStringText) and " " in part.value for part in node.parts)
    if isinstance(node, libcst.ConcatenatedString):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, libcst.SimpleString) and " " in node.value


def spare_texts() -> None:
    """Make mutmut leave messages unchanged, also as arguments."""
    import libcst
    from mutmut.mutation import file_mutation, mutators

    visit = file_mutation.MutationVisitor.on_visit

    def arguments(call):
        texts = [argument for argument in call.args if is_text(argument.value)]
        for mutant in mutators.operator_arg_removal(call):
            if all(any(text is argument for argument in mutant.args) for text in texts):
                yield mutant

    file_mutation.MutationVisitor.on_visit = lambda self, node: not is_text(node) and visit(self, node)
    operators = mutators.mutation_operators
    operators[operators.index((libcst.Call, mutators.operator_arg_removal))] = (libcst.Call, arguments)


def fit_tests() -> None:
    """Make mutmut run quick tests first, and all tests for functions that only child processes call, which it can't see.

    Exits of other children, left over from the tests that mutmut ran first, are ignored, because mutmut would crash on them.
    """
    from mutmut import __main__ as program
    from mutmut.runners.harness import PytestRunner
    from mutmut.state import state
    from mutmut.utils.format_utils import mangled_name_from_mutant_name as function_of
    from mutmut.workers.isolation import ForkRunner

    collect, arguments = program.collect_source_file_mutation_data, PytestRunner._pytest_args_regular_run
    wait = ForkRunner.wait_for_result

    def with_all_tests(**options):
        mutants, files = collect(**options)
        tests = state().tests_by_mangled_function_name
        for _, name, _ in mutants:
            tests[function_of(name)] = tests[function_of(name)] or set(state().duration_by_test)
        return mutants, files

    def quick_first(self, tests):
        return arguments(self, sorted(tests, key=lambda name: (state().duration_by_test.get(name, 0.0), name)))

    def of_a_mutant(self, timeout=None):
        while True:
            with contextlib.suppress(KeyError):
                return wait(self, timeout)

    ForkRunner.wait_for_result = of_a_mutant
    program.collect_source_file_mutation_data = with_all_tests
    PytestRunner._pytest_args_regular_run = quick_first


def pytest_configure() -> None:
    """As a pytest plugin: property tests try the same cases every time, and don't shrink failures."""
    from hypothesis import Phase, settings

    settings.register_profile("mutation", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutation")


def try_survivors_again(folder: Path) -> None:
    """Forget the survivors. Killed mutants are not run again as long as their function is unchanged."""
    for file in (folder / "mutants" / "art_core").rglob("*.meta"):
        results = json.loads(file.read_text())
        codes = results["exit_code_by_key"]
        results["exit_code_by_key"] = {name: code or None for name, code in codes.items()}
        file.write_text(json.dumps(results))


def outcomes(folder: Path) -> Counter:
    """Return how many mutants were killed, never ended, and survived."""
    [file] = (folder / "mutants" / "art_core").rglob("*.meta")
    codes = json.loads(file.read_text())["exit_code_by_key"].values()
    return Counter(
        "survived" if code in (0, 33) else "not run" if code is None else "timed out" if code in TIMED_OUT else "killed"
        for code in codes
    )


def main(modules: list[str]) -> None:
    table = ["| module | mutants | killed | of these never ended | survived | killed |", "|---|---|---|---|---|---|"]
    for module in modules or TESTS:
        folder = prepare(module)
        try_survivors_again(folder)
        # Python ignores folders on its path that don't exist when it starts.
        (folder / "mutants" / "tests").mkdir(parents=True, exist_ok=True)
        paths = [folder / "mutants", folder / "mutants" / "tests", FOLDER]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--mutmut", "run", "--max-children", os.environ.get("WORKERS", "2")]
        command += SAMPLED.get(module, [])
        with (folder / "output.txt").open("wb") as output:
            subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=True)
        counts = outcomes(folder)
        killed, mutants = counts["killed"] + counts["timed out"], counts.total() - counts["not run"]
        table.append(
            f"| `{module}` | {mutants} | {killed} | {counts['timed out']} | {counts['survived']} "
            f"| {killed / mutants:.1%} |"
        )
        print(table[-1], flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mutmut"]:
        spare_texts()
        fit_tests()
        from mutmut.__main__ import cli

        cli(sys.argv[2:])
    else:
        main(sys.argv[1:])
