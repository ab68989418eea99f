// A weather agent with the OpenAI Agents SDK: node agent.js TASK [plain|stream|tools|structured|nested]
import { Agent, run, tool } from "@openai/agents";
import { z } from "zod";

const model = "gpt-6-luna";
const city = z.object({ city: z.string() });

const weather = tool({
  name: "weather",
  description: "The weather now.",
  parameters: city,
  execute: ({ city }) => `sunny in ${city}`,
});
const writer = new Agent({ name: "writer", instructions: "Be brief.", model });
const forecaster = new Agent({ name: "forecaster", instructions: "Be brief.", model, tools: [weather] });
const geographer = new Agent({ name: "geographer", instructions: "Name the city.", model, outputType: city });
const desk = new Agent({ name: "desk", instructions: "Hand over to the forecaster.", model, handoffs: [forecaster] });

const ways = {
  plain: async (task) => (await run(writer, task)).finalOutput,
  tools: async (task) => (await run(forecaster, task)).finalOutput,
  nested: async (task) => (await run(desk, task)).finalOutput,
  structured: async (task) => (await run(geographer, task)).finalOutput.city,
  stream: async (task) => {
    const result = await run(forecaster, task, { stream: true });
    let text = "";
    for await (const part of result.toTextStream()) text += part;
    await result.completed;
    return text;
  },
};

const [task = "What is the weather in Paris?", way = "tools"] = process.argv.slice(2);
console.log(await ways[way](task));
