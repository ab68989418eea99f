// A weather agent with LangGraph.js: node agent.js TASK [plain|stream|tools|structured|nested]
import { tool } from "@langchain/core/tools";
import { MessagesAnnotation, START, StateGraph } from "@langchain/langgraph";
import { ToolNode, toolsCondition } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const model = new ChatOpenAI({ model: "gpt-6-luna" });
const city = z.object({ city: z.string() });

const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "weather",
  description: "The weather now.",
  schema: city,
});
const withTools = model.bindTools([weather]);
const forecaster = new StateGraph(MessagesAnnotation)
  .addNode("forecast", async ({ messages }) => ({ messages: await withTools.invoke(messages) }))
  .addNode("tools", new ToolNode([weather]))
  .addEdge(START, "forecast")
  .addConditionalEdges("forecast", toolsCondition)
  .addEdge("tools", "forecast")
  .compile();

const desk = new StateGraph(MessagesAnnotation)
  .addNode("forecaster", forecaster)
  .addNode("edit", async ({ messages }) => ({ messages: await model.invoke([...messages, ["user", "Say it in one word."]]) }))
  .addEdge(START, "forecaster")
  .addEdge("forecaster", "edit")
  .compile();

const asked = (task) => ({ messages: [{ role: "user", content: task }] });
const lastText = ({ messages }) => messages.at(-1).text;

const ways = {
  plain: async (task) => (await model.invoke(task)).text,
  tools: async (task) => lastText(await forecaster.invoke(asked(task))),
  nested: async (task) => lastText(await desk.invoke(asked(task))),
  structured: async (task) => (await model.withStructuredOutput(city).invoke(task)).city,
  stream: async (task) => {
    let text = "";
    for await (const [message, { langgraph_node }] of await forecaster.stream(asked(task), { streamMode: "messages" })) {
      if (langgraph_node === "forecast") text += message.text;
    }
    return text;
  },
};

const [task = "What is the weather in Paris?", way = "tools"] = process.argv.slice(2);
console.log(await ways[way](task));
