// OpenAI's client for Node: one scenario per run; prints what the client returned as JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, scenario, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const messages = [{ role: "user", content: "hi" }];
const chat = { model: "smollm2", messages };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

async function texts(stream, text) {
  const found = [];
  for await (const event of stream) found.push(text(event));
  return found;
}

const scenarios = {
  models: async () => [...(await client.models.list()).data, await client.models.retrieve("smollm2")].map((m) => m.id),
  chat: async () => await client.chat.completions.create({ ...chat, n: 2, logprobs: true, top_logprobs: 2 }),
  stream: async () => {
    const stream = await client.chat.completions.create({
      ...chat,
      stream: true,
      stream_options: { include_usage: true },
    });
    return await texts(stream, (chunk) => chunk);
  },
  tools: async () => (await client.chat.completions.create({ ...chat, tools: [weather] })).choices[0],
  tools_stream: async () =>
    (await client.chat.completions.stream({ ...chat, tools: [weather] }).finalChatCompletion()).choices[0],
  thinking: async () => (await client.chat.completions.create(chat)).choices[0].message,
  schema: async () => {
    const format = zodResponseFormat(z.object({ city: z.string() }), "place");
    const answer = await client.chat.completions.parse({ ...chat, response_format: format });
    return answer.choices[0].message.parsed;
  },
  completions: async () => await client.completions.create({ model: "smollm2", prompt: "hi", echo: true }),
  completions_stream: async () => {
    const stream = await client.completions.create({ model: "smollm2", prompt: "hi", stream: true });
    return (await texts(stream, (chunk) => chunk.choices[0].text)).join("");
  },
  responses: async () => {
    const answer = await client.responses.create({ model: "smollm2", input: "hi", store: false });
    return { text: answer.output_text, status: answer.status, usage: answer.usage };
  },
  responses_stream: async () => {
    const stream = client.responses.stream({ model: "smollm2", input: "hi" });
    const types = await texts(stream, (event) => event.type);
    return { types, text: (await stream.finalResponse()).output_text };
  },
  cancel: async () => {
    const stream = await client.chat.completions.create({ ...chat, stream: true, max_tokens: 400 });
    for await (const _ of stream) break; // leaves the stream
    return "left";
  },
  retries: async () => (await client.chat.completions.create(chat)).choices[0].message.content,
};

try {
  console.log(JSON.stringify(await scenarios[scenario]()));
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  const { status, message, code, param, type } = error;
  console.log(JSON.stringify({ class: error.constructor.name, status, message, code, param, type }));
}
