// A weather agent with the Vercel AI SDK: node agent.js TASK [plain|stream|tools|structured|nested]
import { openai } from "@ai-sdk/openai";
import { generateText, Output, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const model = openai("gpt-6-luna");
const city = z.object({ city: z.string() });

const weather = tool({
  description: "The weather now.",
  inputSchema: city,
  execute: ({ city }) => `sunny in ${city}`,
});
const forecaster = new ToolLoopAgent({ model, instructions: "Be brief.", tools: { weather } });

const ask = tool({
  description: "Ask the forecaster.",
  inputSchema: z.object({ question: z.string() }),
  execute: async ({ question }) => (await forecaster.generate({ prompt: question })).text,
});
const editor = new ToolLoopAgent({ model, instructions: "Rewrite what the forecaster says.", tools: { ask } });

const ways = {
  plain: async (prompt) => (await generateText({ model, prompt })).text,
  tools: async (prompt) => (await forecaster.generate({ prompt })).text,
  nested: async (prompt) => (await editor.generate({ prompt })).text,
  structured: async (prompt) => {
    const { output } = await generateText({ model, prompt, output: Output.object({ schema: city }) });
    return output.city;
  },
  stream: async (prompt) => {
    const result = await forecaster.stream({ prompt });
    let text = "";
    for await (const part of result.textStream) text += part;
    await result.finishReason; // a failed call only ends textStream, but rejects this
    return text;
  },
};

const [task = "What is the weather in Paris?", way = "tools"] = process.argv.slice(2);
console.log(await ways[way](task));
