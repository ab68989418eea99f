// An agent in Node. It knows the OpenAI package and one address, and doesn't notice that its calls are recorded.
// Prints one line of JSON per step.
import OpenAI from "openai";

// Reads OPENAI_BASE_URL (a rollout's address, http://HOST:PORT/rollouts/ID/v1) and OPENAI_API_KEY (any, unless one is set).
const client = new OpenAI({ maxRetries: 2 });
const model = process.env.MODEL ?? "policy";
const task = process.argv[2] ?? "What is the weather in Paris?";
const say = (step, result) => console.log(JSON.stringify({ step, ...result }));

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `sunny in ${city ?? "an unknown place"}`;
// A policy in training sometimes writes broken arguments; it must see the error.
const run = (args) => {
  try {
    return weather(JSON.parse(args || "{}"));
  } catch (error) {
    return `error: ${error.message}`;
  }
};

async function chat() {
  const answer = await client.chat.completions.create({ model, messages: [{ role: "user", content: task }] });
  say("chat", { text: answer.choices[0].message.content });
}

async function chatStream() {
  const messages = [{ role: "user", content: task }];
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  say("chat stream", { text });
}

async function chatTools() {
  const tools = [{ type: "function", function: { name: "weather", description: "The weather now.", parameters: city } }];
  const messages = [{ role: "user", content: task }];
  const called = [];
  for (let turn = 0; turn < 4; turn++) {
    const { message } = (await client.chat.completions.create({ model, messages, tools })).choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) break;
    for (const call of message.tool_calls) {
      called.push(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: run(call.function.arguments) });
    }
  }
  say("chat tools", { called, text: messages.at(-1).content });
}

async function responses() {
  const answer = await client.responses.create({ model, instructions: "Be brief.", input: task });
  say("responses", { text: answer.output_text });
}

async function responsesTools() {
  const tools = [{ type: "function", name: "weather", description: "The weather now.", parameters: city, strict: false }];
  const input = [{ role: "user", content: task }];
  const called = [];
  let text = "";
  for (let turn = 0; turn < 4; turn++) {
    const stream = client.responses.stream({ model, input, tools });
    const answer = await stream.finalResponse();
    input.push(...answer.output);
    text = answer.output_text;
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) break;
    for (const call of calls) {
      called.push(call.arguments);
      input.push({ type: "function_call_output", call_id: call.call_id, output: run(call.arguments) });
    }
  }
  say("responses stream with tools", { called, text });
}

for (const step of [chat, chatStream, chatTools, responses, responsesTools]) await step();
