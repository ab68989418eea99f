// A weather agent with OpenAI's package: node agent.js TASK [plain|stream|tools|structured|responses]
import OpenAI from "openai";

const client = new OpenAI();
const model = "gpt-6-luna";
const asked = (content) => [{ role: "user", content }];

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const weather = { name: "weather", description: "The weather now.", parameters: city };
const MOST_TURNS = 8;

// A policy in training sometimes writes broken arguments; it must see the error.
function call(args) {
  try {
    return `sunny in ${JSON.parse(args).city}`;
  } catch (error) {
    return `error: ${error.message}`;
  }
}

const ways = {
  plain: async (task) => {
    const answer = await client.chat.completions.create({ model, messages: asked(task) });
    return answer.choices[0].message.content;
  },
  stream: async (task) => {
    const stream = await client.chat.completions.create({ model, messages: asked(task), stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    return text;
  },
  tools: async (task) => {
    const messages = asked(task);
    const tools = [{ type: "function", function: weather }];
    for (let turn = 0; turn < MOST_TURNS; turn++) {
      const { message } = (await client.chat.completions.create({ model, messages, tools })).choices[0];
      if (!message.tool_calls?.length) return message.content;
      messages.push(message);
      for (const { id, function: called } of message.tool_calls) {
        messages.push({ role: "tool", tool_call_id: id, content: call(called.arguments) });
      }
    }
    throw new Error(`no answer after ${MOST_TURNS} turns`);
  },
  structured: async (task) => {
    const response_format = { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } };
    const answer = await client.chat.completions.create({ model, messages: asked(task), response_format });
    return JSON.parse(answer.choices[0].message.content).city;
  },
  responses: async (task) => {
    const input = asked(task);
    const tools = [{ type: "function", ...weather, strict: true }];
    for (let turn = 0; turn < MOST_TURNS; turn++) {
      const answer = await client.responses.stream({ model, input, tools }).finalResponse();
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return answer.output_text;
      input.push(...answer.output);
      for (const called of calls) {
        input.push({ type: "function_call_output", call_id: called.call_id, output: call(called.arguments) });
      }
    }
    throw new Error(`no answer after ${MOST_TURNS} turns`);
  },
};

const [task = "What is the weather in Paris?", way = "tools"] = process.argv.slice(2);
console.log(await ways[way](task));
