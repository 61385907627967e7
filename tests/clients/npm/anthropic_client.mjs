// Anthropic's client for Node: one scenario per run; prints what the client returned as JSON.
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, scenario, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey });
const message = { model: "smollm2", max_tokens: 100, messages: [{ role: "user", content: "hi" }] };
const weather = {
  name: "weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

const scenarios = {
  message: async () => await client.messages.create({ ...message, system: "Be brief." }),
  stream: async () => {
    const stream = client.messages.stream(message);
    const types = [];
    for await (const event of stream) types.push(event.type);
    return { types, final: await stream.finalMessage() };
  },
  tools: async () => await client.messages.create({ ...message, tools: [weather] }),
  tools_stream: async () => await client.messages.stream({ ...message, tools: [weather] }).finalMessage(),
  thinking: async () =>
    await client.messages.create({ ...message, thinking: { type: "enabled", budget_tokens: 50 } }),
  count: async () => await client.messages.countTokens({ model: "smollm2", messages: message.messages }),
  models: async () => (await client.models.list()).data.map((model) => model.id),
  cancel: async () => {
    const stream = client.messages.stream({ ...message, max_tokens: 400 });
    for await (const _ of stream) break; // leaves the stream
    stream.abort();
    return "left";
  },
  retries: async () => (await client.messages.create(message)).content[0].text,
  wrong_model: async () => await client.messages.create({ ...message, model: "other" }),
};

try {
  console.log(JSON.stringify(await scenarios[scenario]()));
} catch (error) {
  if (!(error instanceof Anthropic.APIError)) throw error;
  console.log(JSON.stringify({ class: error.constructor.name, status: error.status, body: error.error }));
}
