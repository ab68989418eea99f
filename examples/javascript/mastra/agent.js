// A weather agent with Mastra: node agent.js TASK [plain|stream|tools|structured|nested]
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const model = "openai/gpt-6-luna";
const city = z.object({ city: z.string() });

const weather = createTool({
  id: "weather",
  description: "The weather now.",
  inputSchema: city,
  execute: async ({ city }) => `sunny in ${city}`,
});
const writer = new Agent({ id: "writer", name: "writer", instructions: "Be brief.", model });
const forecaster = new Agent({
  id: "forecaster",
  name: "forecaster",
  description: "Knows the weather.",
  instructions: "Be brief.",
  model,
  tools: { weather },
});
const editor = new Agent({
  id: "editor",
  name: "editor",
  instructions: "Ask the forecaster and rewrite the answer.",
  model,
  agents: { forecaster },
});

const ways = {
  plain: async (task) => (await writer.generate(task)).text,
  tools: async (task) => (await forecaster.generate(task)).text,
  nested: async (task) => (await editor.generate(task)).text,
  structured: async (task) => (await writer.generate(task, { structuredOutput: { schema: city } })).object.city,
  stream: async (task) => {
    const result = await forecaster.stream(task);
    let text = "";
    for await (const part of result.textStream) text += part;
    if (result.error) throw result.error; // a failed call only ends textStream
    return text;
  },
};

const [task = "What is the weather in Paris?", way = "tools"] = process.argv.slice(2);
console.log(await ways[way](task));
