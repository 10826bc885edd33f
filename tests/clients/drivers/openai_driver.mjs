// Asks a gateway one thing with the npm package `openai`, and prints what came of it as JSON.
//
//   node openai_driver.mjs '{"url": ..., "key": ..., "retries": 0, "what": "chat.completions",
//                            "body": {...}, "leave_after": 1, "seconds": 5}'

import { createRequire } from "node:module";

const home = new URL("../../../clients/typescript/package.json", import.meta.url);
const openai = createRequire(home)("openai");

const asked = JSON.parse(process.argv[2]);
const client = new openai.OpenAI({
  baseURL: `${asked.url}/v1`,
  apiKey: asked.key,
  maxRetries: asked.retries,
  timeout: asked.seconds * 1000,
});

async function answer() {
  if (asked.what === "models") {
    return { whole: (await client.models.list()).data };
  }
  const resource = asked.what.split(".").reduce((found, name) => found[name], client);
  const response = await resource.create(asked.body);
  if (!asked.body.stream) {
    return { whole: response, request_id: response._request_id };
  }
  const events = [];
  try {
    for await (const event of response) {
      events.push(event);
      if (events.length === asked.leave_after) {
        break;
      }
    }
  } catch (error) {
    return { events, error: facts(error) };
  }
  return { events };
}

function facts(error) {
  if (!(error instanceof openai.APIError)) {
    throw error;
  }
  const { status = null, code = null, param = null, message } = error;
  return { class: error.constructor.name, status, code, param, message };
}

const told = await answer().catch((error) => ({ error: facts(error) }));
process.stdout.write(JSON.stringify(told));
