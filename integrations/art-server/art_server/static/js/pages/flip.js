// A task that two runs were measured on: the transcripts of both, side by side. The list has the tasks that changed, lost ones first.

import { get, rolloutPath } from "../api.js";
import { field, fill, h, select } from "../dom.js";
import { signed, taskText, truncate } from "../format.js";
import { sharedMessages, transcript, viewSwitch } from "./transcript.js";

// The address of a task's page; `task` is one of the comparison's.
export const flipLink = (context, task) =>
  context.link(context.run, "versus", context.argument, { a: task.before, b: task.after });

export async function flip(context, tasks) {
  const selection = {
    a: context.parameters.get("a"),
    b: context.parameters.get("b"),
    view: context.parameters.get("view") ?? "messages",
  };
  const sides = [
    [context.run, "a", "First run"],
    [context.argument, "b", "Second run"],
  ];
  const heading = h("h1"),
    body = h("div", { class: "pair" });
  const draw = async () => {
    const { a, b, view } = selection;
    const pair = await Promise.all(
      sides.map(([run, name]) => get(rolloutPath(run, selection[name]), {}, context.signal)),
    );
    if (a !== selection.a || b !== selection.b || view !== selection.view) return; // something else was chosen since
    const shared = sharedMessages(...pair);
    fill(heading, taskText(pair[0].task));
    fill(
      body,
      sides.map(([run, , label], index) => {
        const head = h("h2", {}, h("a", { href: context.link(run) }, run));
        return transcript(context, run, pair[index], { label, head, shared, view });
      }),
    );
  };
  const change = (changes) => {
    Object.assign(selection, changes);
    context.saveParameters(selection);
    return draw();
  };
  await draw();
  const options = tasks.map((task) => [task.before, `${signed(task.change)} ${truncate(taskText(task.task), 70)}`]);
  if (!tasks.some((task) => task.before === selection.a)) options.unshift([selection.a, heading.textContent]);
  const choose = (before) => {
    const task = tasks.find((each) => each.before === before);
    if (task) change({ a: task.before, b: task.after });
  };
  return {
    node: h(
      "section",
      {},
      h(
        "div",
        {},
        h(
          "p",
          { class: "soft" },
          h(
            "a",
            { href: context.link(context.run, "versus", context.argument) },
            `${context.argument} compared with ${context.run}`,
          ),
        ),
        heading,
      ),
      h(
        "div",
        { class: "row" },
        field("Task", select(options, selection.a, choose)),
        viewSwitch(selection.view, (view) => change({ view })),
      ),
      body,
    ),
  };
}
