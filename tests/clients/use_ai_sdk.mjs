// The ai package with its OpenAI-compatible provider: text, a stream, and a tool loop.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const ours = createOpenAICompatible({
  name: "ours", baseURL: process.env.BASE_URL, apiKey: "none", includeUsage: true,
});
const model = ours("tiny");
const prompt = "What is two and three?";

const whole = await generateText({ model, prompt });
assert.equal(whole.text, "The answer is five.");
assert.equal(whole.reasoningText, "Let me think.");
assert.ok(whole.usage.outputTokens > 0);

const streamed = streamText({ model, prompt });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, "The answer is five.");
assert.equal(await streamed.finishReason, "stop");
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);

let numAdded = 0;
const tools = {
  add: tool({
    description: "Adds.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => { numAdded += 1; return a + b; },
  }),
};
const loop = streamText({ model, prompt, tools, stopWhen: stepCountIs(5) });
text = "";
for await (const piece of loop.textStream) text += piece;
assert.ok(text.endsWith("The answer is five."), text);
assert.equal((await loop.steps).length, 2);
const once = await generateText({ model, prompt, tools, stopWhen: stepCountIs(5) });
assert.equal(once.text, "The answer is five.");
assert.equal(numAdded, 2);
console.log("ok");
