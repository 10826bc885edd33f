// Does what packages.py does, with packages of npm: `ai` over chat, `@anthropic-ai/sdk` over messages.
//
//   node packages.mjs ai     # in the folder that has node_modules

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(`${process.cwd()}/package.json`);
const QUESTION = "What is the weather in Bonn?";
const MESSAGES = [{ role: "user", content: QUESTION }];
const PLACE = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const DESCRIPTION = "Tells the weather.";

async function ai(asked) {
  const lib = await import(require.resolve("ai"));
  const { createOpenAICompatible } = await import(require.resolve("@ai-sdk/openai-compatible"));
  const provider = createOpenAICompatible({
    name: "paceline",
    baseURL: `${asked.url}/v1`,
    apiKey: "-",
    supportsStructuredOutputs: true,
  });
  const given = { model: provider(asked.model), prompt: QUESTION, maxRetries: 0 };
  const called = [];
  const weather = lib.tool({
    description: DESCRIPTION,
    inputSchema: lib.jsonSchema(PLACE),
    execute: async ({ city }) => called.push(city) && "clear",
  });
  const does = {
    async call() {
      const stopWhen = lib.stepCountIs(3);
      return (await lib.generateText({ ...given, tools: { weather }, stopWhen })).text;
    },
    async structured() {
      const output = lib.Output.object({ schema: lib.jsonSchema(PLACE) });
      return (await lib.generateText({ ...given, output })).output;
    },
    async stream() {
      const leaving = new AbortController();
      let failed;
      const onError = ({ error }) => {
        failed = error;
      };
      const abortSignal = leaving.signal;
      const result = lib.streamText({ ...given, abortSignal, onError });
      const pieces = await someOf(result.textStream, asked.most);
      leaving.abort();
      if (failed) throw failed;
      return pieces;
    },
  };
  return { told: await does[asked.what](), called };
}

async function anthropic(asked) {
  const { Anthropic } = require("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: asked.url, apiKey: "-", maxRetries: 0 });
  const given = { model: asked.model, max_tokens: 64, messages: MESSAGES };
  const called = [];
  const does = {
    async call() {
      const tools = [{ name: "weather", description: DESCRIPTION, input_schema: PLACE }];
      const answer = await client.messages.create({ ...given, tools });
      const results = answer.content
        .filter((it) => it.type === "tool_use")
        .map((it) => {
          called.push(it.input.city);
          return { type: "tool_result", tool_use_id: it.id, content: "clear" };
        });
      const said = { role: "assistant", content: answer.content };
      const messages = [...MESSAGES, said, { role: "user", content: results }];
      return (await client.messages.create({ ...given, tools, messages })).content[0].text;
    },
    async structured() {
      const format = { type: "json_schema", schema: PLACE };
      const answer = await client.messages.create({ ...given, output_config: { format } });
      return JSON.parse(answer.content[0].text);
    },
    async stream() {
      const events = await client.messages.create({ ...given, stream: true });
      async function* texts() {
        for await (const event of events) yield event.delta?.text;
      }
      return someOf(texts(), asked.most);
    },
  };
  return { told: await does[asked.what](), called };
}

async function someOf(items, most) {
  const found = [];
  for await (const item of items) {
    if (item) found.push(item);
    if (found.length === most) break;
  }
  return found;
}

function failed(error) {
  const names = [];
  for (let it = error.constructor; it?.name; it = Object.getPrototypeOf(it)) names.push(it.name);
  return { error: names, message: error.message };
}

const does = { ai, "@anthropic-ai/sdk": anthropic }[process.argv[2]];
for await (const line of createInterface({ input: process.stdin })) {
  const told = await does(JSON.parse(line)).catch(failed);
  process.stdout.write(`${JSON.stringify(told)}\n`);
}
