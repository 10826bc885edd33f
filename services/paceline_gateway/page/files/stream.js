// The gateway's answers, as plain data.

/** An error of the gateway; `status` is 0 for an error inside a stream. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Ask for JSON. */
export async function ask(path, { key }) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Generate, and yield [name, data] for each event; leaving the loop cancels the servers' work. */
export async function* generate(body, { key, signal }) {
  const response = await fetch("paceline/generate", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  let isWhole = false;
  for await (const [name, data] of events(response.body)) {
    if (data.error) throw new Refusal(data.error.message);
    isWhole = name === "finished";
    yield [name, data];
  }
  if (!isWhole) throw new Refusal("the connection was lost before the end");
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const words = body.error?.message ?? `the gateway answered ${response.status}`;
  return new Refusal(words, response.status);
}

/** Split server-sent events, as this gateway writes them. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => divide(line)));
        yield [fields.event ?? "message", JSON.parse(fields.data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function divide(line) {
  const colon = line.indexOf(": ");
  return [line.slice(0, colon), line.slice(colon + 2)];
}
