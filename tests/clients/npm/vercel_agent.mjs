// An agent of the Vercel AI SDK with two tools and a structured answer; prints what happened as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, apiKey] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "triptych", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
const model = provider(name);
const called = [];
const city = z.object({ city: z.string() });
const tools = {
  weather: tool({
    description: "Returns the weather of a city.",
    inputSchema: city,
    execute: async () => (called.push("weather"), "sunny, 21 degrees"),
  }),
  population: tool({
    description: "Returns the number of people who live in a city.",
    inputSchema: city,
    execute: async () => (called.push("population"), "2 million"),
  }),
};
const prompt = "What is the weather in Paris?";
const common = {
  model,
  temperature: 0,
  maxOutputTokens: 200,
  providerOptions: { triptych: { parallel_tool_calls: false } },
};

// The first step must call a tool: a small model would answer from memory.
const agent = await generateText({
  ...common,
  tools,
  prompt,
  stopWhen: stepCountIs(3),
  prepareStep: async ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
const report = await generateObject({
  ...common,
  schema: z.object({ city: z.string(), is_sunny: z.boolean() }),
  prompt: "Paris is sunny. Write a report.",
});
let chunks = 0;
const stream = streamText({ ...common, prompt, maxOutputTokens: 40 });
for await (const _ of stream.textStream) chunks += 1;
console.log(
  JSON.stringify({
    called,
    steps: agent.steps.length,
    finish: agent.finishReason,
    text: agent.text.length > 0,
    report: report.object,
    chunks,
    usage: (await stream.usage).outputTokens,
  }),
);
