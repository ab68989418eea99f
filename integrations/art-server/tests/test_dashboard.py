"""The dashboard in a real browser: a real run of the tiny model, hostile answers, and a server's workers."""

import re

import pytest
import warm
from fastapi import Depends, FastAPI, HTTPException, Request
from recorded_runs import call, record

from art_core.store import Store
from art_server.folders import RunFolders
from art_server.pages import pages
from art_server.read_routes import read_routes

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

TRAINING = """
import sys
import art_core as art
from art_core.testing import ScriptedAgent

def reward(trajectory):
    text = trajectory.output or ""
    trajectory.metrics["success"] = float(len(set(text)) > 12)
    trajectory.notes["ruler"] = f"{len(set(text))} different letters"
    return float(len(set(text)))

if __name__ == "__main__":
    agent = ScriptedAgent(turns=2, max_tokens=24)
    tasks = ["Which city is the offsite in?", "Who wrote about the invoice?"]
    art.train_sync(agent, tasks, model="tiny", reward=reward, steps=int(sys.argv[2]), tasks_per_step=2, group_size=4,
                   eval_tasks=tasks, run_dir=sys.argv[1], progress=False)
"""


def train(folder, steps):
    assert warm.program(TRAINING, [folder, steps], cwd=folder.parent, stdout=2, stderr=2).wait(200) == 0
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "tiny-run", 3)


def assert_no_horizontal_scroll(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.url


def test_charts_update_while_a_run_trains(trained, desk):
    address = desk.view(trained)
    page = desk.open(address)
    page.wait_for_selector(".chart .u-wrap canvas")
    assert "#/run/tiny-run" in page.url
    page.get_by_text("Numerical health").click()
    titles = page.locator(".chart .title").all_inner_texts()
    assert titles[:2] == ["Reward", "Success"]
    assert {"loss", "kl_old", "entropy", "mismatch"} <= set(titles)
    steps = page.locator(".tile").first
    assert "3 of 3" in steps.inner_text()
    page.get_by_text("Metrics as a table").click()
    page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 3")
    before = page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
    train(trained, 5)
    page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 5")
    assert page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()") != before
    assert "not running" in page.locator("#live").inner_text() or "live" in page.locator("#live").inner_text()
    assert page.locator("#workers").is_hidden()


def test_keyboard_opens_a_trajectory_and_moves_between_its_tokens(trained, desk):
    address = desk.view(trained)
    page = desk.open(f"{address}#/run/tiny-run/rollouts?split=train")
    page.wait_for_selector("tbody [data-item]")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("[...document.querySelectorAll('[data-item]')].indexOf(document.activeElement)") == 1
    page.keyboard.press("Enter")
    page.wait_for_selector(".trajectory .message.assistant")
    assert page.locator(".message").count() == 4 and "different letters" in page.locator(".note").first.inner_text()
    assert page.locator("[role=treeitem][data-call]").count() == 2
    page.keyboard.press("v")
    page.wait_for_selector("[data-token]")
    assert "view=tokens" in page.url
    page.keyboard.press("c")
    page.wait_for_selector("[data-token][class*=s]")
    page.locator("[data-token]").first.focus()
    page.keyboard.press("ArrowRight")
    details = page.locator(".readout").inner_text()
    assert "position 1" in details and re.search(r"logprob −?\d", details) and "advantage" in details
    before = page.url
    page.keyboard.press("]" if page.get_by_label("Next rollout in the group").count() else "[")
    page.wait_for_url(lambda url: url != before)


def test_tokens_are_coloured_by_advantage_and_logprob(tmp_path, desk):
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("model", "tiny")
        for name in ("good", "bad"):
            store.add_rollout(name, task="t", step=1, split="train", group="g", task_id="t")
            store.record(name, call((1, 2), tuple(range(300, 340)), forced=(0,)))
            store.finish_rollout(name, output="x")
        store.add_scores(["good", "bad"], [1.0, 0.0], advantages=[0.5, -0.5])
    address = desk.view(tmp_path)
    for name, kind in (("good", "p5"), ("bad", "n5")):
        page = desk.open(f"{address}#/run/{tmp_path.name}/rollout/{name}?view=tokens")
        page.wait_for_selector("[data-token]")
        classes = [token.get_attribute("class") for token in page.locator("[data-token]").all()]
        assert classes == ["forced", *[kind] * 39]
        page.get_by_role("button", name="Logprob").click()
        classes = [token.get_attribute("class") for token in page.locator("[data-token]").all()]
        assert classes[1] == "s1" and classes[29] == "s5" and classes[30] == ""


def test_compare_shows_two_trajectories_of_a_task(trained, desk):
    address = desk.view(trained)
    page = desk.open(f"{address}#/run/tiny-run/compare")
    page.wait_for_selector(".side-by-side .message")
    first, second = page.locator(".side-head select").all()
    assert first.locator("option:checked").inner_text().startswith("step 0")
    assert not second.locator("option:checked").inner_text().startswith("step 0")
    assert page.get_by_text("differs from here on").count() == 2
    before = page.url
    page.get_by_role("button", name="Worst and best").click()
    page.wait_for_url(lambda url: url != before)
    page.get_by_role("button", name="Tokens").click()
    page.wait_for_function("() => document.querySelectorAll('.side-by-side [data-token]').length > 2")
    again = desk.open(page.url)  # the selection is in the URL
    again.wait_for_selector(".side-by-side [data-token]")
    assert [select.input_value() for select in again.locator(".side-head select").all()] == [
        select.input_value() for select in page.locator(".side-head select").all()
    ]


def test_theme_follows_the_system_and_the_switch(trained, desk):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    address = desk.view(trained)
    light, dark = desk.open(address, color_scheme="light"), desk.open(address, color_scheme="dark")
    light.wait_for_selector(".chart")
    dark.wait_for_selector(".chart")
    light_background, dark_background = background(light), background(dark)
    assert light_background != dark_background
    light.keyboard.press("d")
    assert background(light) == dark_background
    light.reload()
    light.wait_for_selector(".chart")
    assert background(light) == dark_background
    light.locator("#theme").click()
    assert background(light) == light_background


def test_every_page_fits_a_phone_and_has_a_heading(trained, desk):
    address = desk.view(trained)
    page = desk.open(address, viewport={"width": 390, "height": 844}, has_touch=True)
    page.wait_for_selector(".chart .u-wrap")
    assert_no_horizontal_scroll(page)
    for number, heading in enumerate(["tiny-run", "Groups", "Trajectories", None, "Checkpoints", "Settings"], start=1):
        page.keyboard.press(str(number))
        if heading:
            page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()
        else:
            page.wait_for_selector(".side-by-side .message")
        assert_no_horizontal_scroll(page)
        assert page.locator("[aria-current=page]").count() == 1
    page.keyboard.press("3")
    page.locator("tbody [data-item]").first.click()
    page.wait_for_selector(".message")
    assert_no_horizontal_scroll(page)


def test_question_mark_opens_the_help_and_the_focus_is_visible(trained, desk):
    address = desk.view(trained)
    page = desk.open(f"{address}#/run/tiny-run/groups")
    page.wait_for_selector(".strip a")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    seen = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        outline = page.evaluate(
            "(element => [getComputedStyle(element).outlineStyle, element.tagName])(document.activeElement)"
        )
        assert outline[0] != "none", outline
        seen.add(outline[1])
    assert {"A", "BUTTON", "SELECT", "INPUT"} <= seen


HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


def test_hostile_output_is_shown_as_text(tmp_path, desk):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r", task={"input": HOSTILE}, step=1, split="train", group=HOSTILE, task_id="t")
        messages = [
            {"role": "user", "content": HOSTILE},
            {"role": HOSTILE, "content": [{"type": "text", "text": HOSTILE}]},
        ]
        store.record("r", call((1,), (2,), agent=HOSTILE, messages=messages, answer=HOSTILE))
        store.finish_rollout("r", output=HOSTILE, error=HOSTILE)
        store.add_scores(["r"], [1.0], metrics=[{HOSTILE: 1.0}], notes=[{HOSTILE: HOSTILE}], by=HOSTILE)
        store.add_step(1, {HOSTILE: 1.0, "reward": 1.0})
        store.set_meta("config", {HOSTILE: HOSTILE})
    address = desk.view(tmp_path)
    for path in (
        "",
        "/groups",
        "/rollouts",
        "/rollout/r",
        "/rollout/r?view=tokens",
        "/rollout/r?view=request",
        "/compare",
        "/settings",
    ):
        page = desk.open(f"{address}#/run/{tmp_path.name}{path}")
        page.wait_for_selector("h1")
        assert page.title() == f"{tmp_path.name} · art"
        assert page.locator("main img, main script").count() == 0
    page = desk.open(f"{address}#/run/{tmp_path.name}/rollout/r")
    page.wait_for_selector(".message")
    assert HOSTILE in page.locator(".message.user").inner_text()


def test_a_long_error_does_not_widen_the_page(tmp_path, desk):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r", task="t", step=1, split="train", group="g", task_id="t")
        store.finish_rollout("r", output=None, error="ValueError: " + "no such order, " * 50 + "x" * 5000)
    page = desk.open(f"{desk.view(tmp_path)}#/run/{tmp_path.name}/rollout/r")
    page.wait_for_selector(".chip.bad")
    assert_no_horizontal_scroll(page)


def test_empty_and_damaged_runs_show_a_message(tmp_path, desk):
    with Store(tmp_path / "fresh" / "run.sqlite"):
        pass
    record(tmp_path / "whole", steps=1)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.sqlite").write_text("no database" * 100)
    address = desk.view(tmp_path)
    page = desk.open(address)
    page.wait_for_selector("tbody tr")
    assert "damaged" in page.locator("tbody").inner_text()
    for path, message in (
        ("fresh", "This run is empty"),
        ("fresh/groups", "No groups"),
        ("fresh/rollouts", "No trajectories"),
        ("fresh/compare", "Nothing to compare yet"),
        ("fresh/checkpoints", "No checkpoints yet"),
    ):
        page.goto(f"{address}#/run/{path}")
        page.get_by_text(message).wait_for()


def test_evaluations_and_open_run_programs_are_shown(tmp_path, desk):
    program = """
import asyncio, sys
import art_core as art
from art_core.testing import ScriptedAgent

async def main(runs):
    agent, tasks = ScriptedAgent(max_tokens=8), ["Which city?", "Who wrote?"]
    await art.evaluate(agent, tasks, model="tiny", reward=lambda trajectory: 1.0, run_dir=f"{runs}/measured", progress=False)
    async with art.open_run(f"{runs}/own", model="tiny") as run:
        await run.learn(await run.score(await run.collect(agent, tasks, group_size=2), lambda trajectory: 1.0))

asyncio.run(main(sys.argv[1]))
"""
    assert warm.program(program, [tmp_path], cwd=tmp_path, stdout=2, stderr=2).wait(200) == 0
    page = desk.open(desk.view(tmp_path))
    page.wait_for_selector("tbody tr")
    own, measured = (row.locator("td[data-name=Steps]").inner_text() for row in page.locator("tbody tr").all())
    assert (own, measured) == ("1", "evaluation")
    page.get_by_role("link", name="measured").click()
    page.get_by_text("Evaluation of tiny").wait_for()
    assert "100.0 %" in page.locator(".tile").first.inner_text()
    assert page.locator("tbody tr").count() == 2 and page.get_by_text("No steps yet").count() == 0
    page.locator(".decision").get_by_text("All are solved, of 2 held-out tasks").wait_for()
    assert page.locator(".verdict").count() == 0


def evaluated_at_two_temperatures(folder):
    record(folder, steps=4)
    with Store(folder / "run.sqlite") as store:
        pairs = {1.0: (0.207, 0.747), None: (0.093, 0.843)}
        evaluations, ids = [], iter(range(8))
        for temperature, (before, after) in pairs.items():
            for name, step, success in (("before", 0, before), ("after", 4, after)):
                rollout = f"{name}-{next(ids)}"
                store.add_rollout(rollout, task="q", step=step, split="eval", group=rollout, task_id="q")
                store.record(rollout, call((1,), (2,), answer=rollout))
                store.finish_rollout(rollout, output="x")
                store.add_scores([rollout], [success])
                result = {"name": name, "step": step, "temperature": temperature, "success": success, "n": 75}
                evaluations.append({**result, "counts_successes": True, "rollout_ids": [rollout]})
        store.set_meta("evaluations", sorted(evaluations, key=lambda evaluation: evaluation["step"]))
        store.set_meta("stopped", {"step": 4, "reason": "all rewards are equal"})
        store.set_meta("planned_steps", 9)
    return folder


def test_before_and_after_are_shown_per_temperature(tmp_path, desk):
    record(tmp_path / "other", steps=1)
    evaluated_at_two_temperatures(tmp_path / "a-name-that-is-much-longer-than-the-column-in-which-it-stands")
    page = desk.open(desk.view(tmp_path))
    page.wait_for_selector(".change")
    row = page.locator("tbody tr", has_text="a-name")
    pairs = ["20.7 % → 74.7 % temperature 1", "9.3 % → 84.3 % the agent's own temperature"]
    assert row.locator(".change").all_inner_texts() == pairs
    assert row.locator(".status").inner_text() == "stopped" and "all rewards are equal" in row.inner_text()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 860})
        assert page.locator(".card").evaluate("card => card.scrollWidth <= card.clientWidth")
        assert_no_horizontal_scroll(page)
    row.get_by_role("link").click()
    page.wait_for_selector(".verdict")
    lines = [text.partition("\n")[0] for text in page.locator(".verdict p").all_inner_texts()]
    assert lines == [
        "20.7 % → 74.7 % held out, temperature 1",
        "9.3 % → 84.3 % held out, the agent's own temperature",
        "Stopped: all rewards are equal",
    ]
    assert page.locator(".status").inner_text() == "stopped"
    page.goto(f"{page.url}/compare?task_id=q")
    page.wait_for_selector(".side-by-side .message")
    chosen = [select.locator("option:checked").inner_text() for select in page.locator(".side-head select").all()]
    assert [text.rpartition(" · ")[0] for text in chosen] == [
        "step 0 · eval, temperature 1",
        "step 4 · eval, temperature 1",
    ]


def test_workers_and_queues_are_shown_and_updated(tmp_path, desk):
    app, status = FastAPI(), {"active_clients": 1, "episodes_queued": 12, "results_available": 3}
    worker = {
        "id": "client_1",
        "state": "busy",
        "running": 4,
        "finished": 9,
        "lost": 0,
        "version": 2,
        "last_seen": None,
    }
    app.include_router(read_routes(RunFolders(record(tmp_path / "run", steps=1))))
    app.get("/status")(lambda: status)
    app.get("/api/workers")(lambda: [worker] * status["active_clients"])
    app.mount("/", pages())
    address = desk.serve(app)
    page = desk.open(address)
    page.wait_for_selector("#workers:not([hidden])")
    assert page.locator("#client-count").inner_text() == "1"
    assert page.locator("#episode-count").inner_text() == "12"
    assert "client_1" in page.locator("#clients").inner_text()
    status.update(active_clients=0, episodes_queued=0)
    page.wait_for_function("() => document.getElementById('client-count').textContent === '0'")
    assert "art worker" in page.locator("#clients").inner_text()
    assert_no_horizontal_scroll(page)


def test_the_token_is_entered_once(tmp_path, desk):
    app, folders = FastAPI(), RunFolders(record(tmp_path / "run", steps=1))

    def check_token(request: Request):
        if request.headers.get("authorization") != "Bearer right":
            raise HTTPException(401, "missing token")

    app.include_router(read_routes(folders), dependencies=[Depends(check_token)])
    app.mount("/", pages())
    page = desk.open(desk.serve(app))
    for token in ("wrong", "right"):
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
    page.wait_for_selector(".tile")
    page.reload()
    page.wait_for_selector(".tile")
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    desk.problems = [message for message in desk.problems if message != refused]  # browsers log this for every 401


def test_an_open_trajectory_is_updated(tmp_path, desk):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r", task="t", step=1, split="train", group="g")
        store.record("r", call((1,), (2,), answer="first words"))
        store.flush()
        page = desk.open(f"{desk.view(tmp_path)}#/run/{tmp_path.name}/rollout/r")
        page.get_by_text("first words").wait_for()
        store.record("r", call((1, 2, 3), (4,), answer="second words", request_id="q"))
        store.finish_rollout("r", output="done")
        page.get_by_text("second words").wait_for()
        page.locator("[role=treeitem][data-call='0']").click()
        page.get_by_text("first words").wait_for()
        assert "call=0" in page.url
