import assert from "node:assert/strict";
import { once } from "node:events";
import { type AddressInfo, createServer } from "node:net";
import { test } from "node:test";
import {
  type Chunk,
  Client,
  ClientCancelledError,
  ConnectionLostError,
  DeadlineError,
  DrainingError,
  type Generation,
  InvalidFieldError,
  InvariantViolatedError,
  LoadingError,
  ModelMismatchError,
  OverloadedError,
  type TimelineEvent,
} from "paceline";
import { type Leg, PROMPT_LENGTH, ScriptedServer, SEED } from "./scripted_server.js";

const WHOLE = "3 4 5 6 7 ";

/** Run a test with a server that follows a script, and a client of it. */
async function withServer(
  script: readonly Leg[],
  body: (client: Client, server: ScriptedServer) => Promise<void>,
): Promise<void> {
  const server = await ScriptedServer.start(script);
  const client = new Client(server.address);
  try {
    await body(client, server);
  } finally {
    client.close();
    await server[Symbol.asyncDispose]();
  }
}

async function textOf(chunks: AsyncIterable<Chunk>): Promise<string> {
  let text = "";
  for await (const chunk of chunks) {
    text += chunk.text;
  }
  return text;
}

/** Read until it breaks. */
async function readUntilError(generation: Generation): Promise<[string, unknown]> {
  let text = "";
  try {
    for await (const chunk of generation) {
      text += chunk.text;
    }
  } catch (error) {
    return [text, error];
  }
  throw new assert.AssertionError({ message: "it did not break" });
}

test("a generation streams typed chunks and ends with statistics", () =>
  withServer([], async (client) => {
    const generation = client.generate("x", { maxTokens: 2 });
    const before = generation.started;
    assert.equal(before, undefined);
    const chunks: Chunk[] = [];
    for await (const chunk of generation) {
      chunks.push(chunk);
    }
    const [type, origins] = ["chunk", ["accepted_draft"]] as const;
    const told = { logprobs: [], topLogprobs: [], textLengths: [], tokenBytes: [], origins };
    assert.deepEqual(chunks, [
      { type, position: 3, tokenIds: [3], text: "3 ", ...told },
      { type, position: 4, tokenIds: [4], text: "4 ", ...told },
    ]);
    assert.equal(generation.started?.strategy, "distributed");
    assert.equal(generation.finished?.finishReason, "length");
    assert.deepEqual(generation.finished?.statistics.fallbacks, { target_lost: 1 });
  }));

test("the whole can be awaited as text or as a completion", () =>
  withServer([], async (client) => {
    const generation = client.generate([1, 2, 3]);
    assert.equal(await generation.text(), WHOLE);
    const completion = await generation.collect();
    assert.deepEqual(completion.tokenIds, [3, 4, 5, 6, 7]);
    assert.deepEqual(completion.finished.usage, {
      promptTokenCount: PROMPT_LENGTH,
      completionTokenCount: 5,
      cachedPromptTokenCount: 0,
    });
  }));

test("events tells of the timeline between the chunks", () =>
  withServer([], async (client) => {
    const events: (Chunk | TimelineEvent)[] = [];
    for await (const event of client
      .generate("x", { maxTokens: 1, streamTimeline: true })
      .events()) {
      events.push(event);
    }
    assert.deepEqual(
      events.map((event) => (event.type === "timeline" ? event.kind : event.text)),
      ["3 ", "drafted"],
    );
  }));

test("nothing is sent before the iteration", () =>
  withServer([], async (client, server) => {
    client.generate("not sent");
    await client.generate("sent").text();
    assert.deepEqual(server.requests[0]?.prompt, { $case: "text", value: "sent" });
  }));

test("any number of generations run at once, also with one signal", () =>
  withServer([], async (client) => {
    const warnings: Error[] = [];
    process.on("warning", (warning) => warnings.push(warning));
    const { signal } = new AbortController();
    const texts = Array.from({ length: 20 }, () => client.generate("x", { signal }).text());
    assert.deepEqual(new Set(await Promise.all(texts)), new Set([WHOLE]));
    assert.deepEqual(warnings, []);
  }));

test("break cancels the call", () =>
  withServer([{ hangs: true, chunks: 2 }], async (client, server) => {
    for await (const _ of client.generate("x")) {
      break;
    }
    await server.cancelled();
  }));

test("an exception in the loop cancels the call", () =>
  withServer([{ hangs: true, chunks: 1 }], async (client, server) => {
    await assert.rejects(async () => {
      for await (const _ of client.generate("x")) {
        throw new RangeError("of the caller");
      }
    }, RangeError);
    await server.cancelled();
  }));

test("return cancels the call also while next waits, and ends the wait", () =>
  withServer([{ hangs: true }], async (client, server) => {
    const chunks = client.generate("x")[Symbol.asyncIterator]();
    const waiting = chunks.next();
    await server.called();
    await chunks.return?.();
    assert.deepEqual(await waiting, { done: true, value: undefined });
    await server.cancelled();
  }));

test("an aborted signal cancels the call in the middle of the stream", () =>
  withServer([{ hangs: true, chunks: 1 }], async (client, server) => {
    const stop = new AbortController();
    const generation = client.generate("x", { signal: stop.signal });
    const reading = readUntilError(generation);
    await server.called();
    stop.abort("enough");
    const [, error] = await reading;
    assert.ok(error instanceof ClientCancelledError);
    assert.equal(error.cause, "enough");
    await server.cancelled();
  }));

test("no chunk comes after an abort", () =>
  withServer([], async (client) => {
    const stop = new AbortController();
    let count = 0;
    await assert.rejects(async () => {
      for await (const _ of client.generate("x", { signal: stop.signal })) {
        count += 1;
        stop.abort();
      }
    }, ClientCancelledError);
    assert.equal(count, 1);
  }));

test("an abort before the headers settles at once", () =>
  withServer([{ silent: true }], async (client, server) => {
    const stop = new AbortController();
    const text = client.generate("x", { signal: stop.signal }).text();
    await server.called();
    stop.abort();
    await assert.rejects(text, ClientCancelledError);
    await server.cancelled();
  }));

test("an abort settles where the peer accepts a connection and never speaks", async () => {
  const mute = createServer().listen(0, "127.0.0.1");
  await once(mute, "listening");
  const client = new Client(`127.0.0.1:${(mute.address() as AddressInfo).port}`);
  const stop = new AbortController();
  const text = client.generate("x", { signal: stop.signal }).text();
  const info = client.info({ signal: stop.signal });
  const [socket] = await once(mute, "connection");
  stop.abort();
  await assert.rejects(text, ClientCancelledError);
  await assert.rejects(info, ClientCancelledError);
  client.close();
  socket.destroy();
  mute.close();
});

test("a signal that is aborted already sends nothing", () =>
  withServer([], async (client, server) => {
    const signal = AbortSignal.abort();
    await assert.rejects(client.generate("x", { signal }).text(), ClientCancelledError);
    await assert.rejects(client.info({ signal }), ClientCancelledError);
    assert.equal(server.requests.length, 0);
  }));

test("closing the client ends what runs with ClientCancelledError", () =>
  withServer([{ hangs: true, chunks: 1 }, { silent: true }], async (client, server) => {
    const running = [readUntilError(client.generate("x")), readUntilError(client.generate("y"))];
    await server.called(2);
    client.close();
    for (const [, error] of await Promise.all(running)) {
      assert.ok(error instanceof ClientCancelledError);
    }
    await server.cancelled(2);
  }));

test("a closed client refuses calls with ClientCancelledError", () =>
  withServer([], async (client) => {
    client.close();
    client.close();
    await assert.rejects(client.generate("x").text(), ClientCancelledError);
    await assert.rejects(client.info(), ClientCancelledError);
  }));

test("closing a generation ends the iteration, and resume goes on", () =>
  withServer([{ hangs: true, chunks: 2 }], async (client, server) => {
    const generation = client.generate("x");
    let text = "";
    await assert.rejects(async () => {
      for await (const chunk of generation) {
        text += chunk.text;
        if (text === "3 4 ") {
          generation.close();
        }
      }
    }, ClientCancelledError);
    await assert.rejects(generation.text(), ClientCancelledError);
    assert.equal(await textOf(client.resume(generation)), "5 6 7 ");
    assert.deepEqual(server.requests[1]?.resumeTokenIds, [3, 4]);
    assert.equal(server.requests[1]?.seed, SEED);
  }));

test("iterating again goes on where the iteration was left", () =>
  withServer([{ hangs: true, chunks: 1 }], async (client) => {
    const generation = client.generate("x");
    for await (const _ of generation) {
      break;
    }
    assert.equal(await textOf(generation), "4 5 6 7 ");
    assert.equal(await generation.text(), WHOLE);
    assert.equal((await generation.collect()).resumedTokenCount, 1);
  }));

test("a broken stream goes on by itself without gap or duplicate", () => {
  const retryAfterSeconds = 0.001;
  const script = [
    { error: new LoadingError("not yet", { retryAfterSeconds }) },
    { error: new DrainingError("going", { retryAfterSeconds }), chunks: 2 },
    { error: new DrainingError("going", { retryAfterSeconds }), chunks: 1 },
  ];
  return withServer(script, async (client, server) => {
    assert.equal(await textOf(client.generate("x", { resumeAttempts: 3 })), WHOLE);
    assert.deepEqual(
      server.requests.map((request) => request.resumeTokenIds),
      [[], [], [3, 4], [3, 4, 5]],
    );
  });
});

test("without attempts left the error comes, and what was received stays", () =>
  withServer([{ error: new DrainingError("going"), chunks: 2 }], async (client) => {
    const generation = client.generate("x");
    const [text, error] = await readUntilError(generation);
    assert.equal(text, "3 4 ");
    assert.ok(error instanceof DrainingError);
    assert.equal(await client.resume(generation).text(), WHOLE);
  }));

test("chunks that came before an error reach a slow reader", () =>
  withServer([{ error: new DrainingError("going"), chunks: 50 }], async (client) => {
    const chunks = client.generate("x", { maxTokens: 60 })[Symbol.asyncIterator]();
    await chunks.next();
    for (let count = 1; count < 50; count += 1) {
      await client.info();
      assert.equal((await chunks.next()).done, false);
    }
    await assert.rejects(chunks.next(), DrainingError);
  }));

test("an abort ends the wait between two attempts", () =>
  withServer(
    [{ error: new OverloadedError("full", { retryAfterSeconds: 60 }) }],
    async (client) => {
      const stop = new AbortController();
      const { signal } = stop;
      const text = client.generate("x", { signal, resumeAttempts: 1 }).text();
      await client.info();
      stop.abort();
      await assert.rejects(text, ClientCancelledError);
    },
  ));

test("an error is not waited for beyond the deadline", () =>
  withServer(
    [{ error: new OverloadedError("full", { retryAfterSeconds: 300 }) }],
    async (client) => {
      await assert.rejects(client.generate("x", { resumeAttempts: 5 }).text(), OverloadedError);
    },
  ));

test("a stream resumed with another model is refused", () =>
  withServer(
    [{ error: new DrainingError("going"), chunks: 1 }, { fingerprint: "model-b" }],
    async (client) => {
      const [, error] = await readUntilError(client.generate("x", { resumeAttempts: 1 }));
      assert.ok(error instanceof ModelMismatchError);
    },
  ));

test("a gap in the positions ends the stream", () =>
  withServer([{ shift: 1 }], async (client) => {
    await assert.rejects(client.generate("x").text(), InvariantViolatedError);
  }));

test("a stream without its last message is not taken for a whole", () =>
  withServer([{ omitsFinish: true }], async (client) => {
    const [text, error] = await readUntilError(client.generate("x"));
    assert.equal(text, WHOLE);
    assert.ok(error instanceof InvariantViolatedError);
  }));

test("the deadline ends a stream", () =>
  withServer([{ hangs: true, chunks: 1 }], async (client) => {
    const [, error] = await readUntilError(client.generate("x", { timeoutSeconds: 0.2 }));
    assert.ok(error instanceof DeadlineError);
  }));

test("a server that is not there is a lost connection", async () => {
  const server = await ScriptedServer.start();
  await server[Symbol.asyncDispose]();
  const client = new Client(server.address);
  await assert.rejects(client.generate("x").text(), ConnectionLostError);
  await assert.rejects(client.info(), ConnectionLostError);
  client.close();
});

test("a slow consumer holds the server up", { timeout: 120_000 }, () =>
  withServer([{ padding: "x".repeat(16_384) }], async (client, server) => {
    const maxTokens = 2000;
    const chunks = client.generate("x", { maxTokens })[Symbol.asyncIterator]();
    await chunks.next();
    for (let quiet = 0, before = 0; quiet < 20; quiet += 1, before = server.sentCount) {
      await client.info();
      if (server.sentCount !== before) {
        quiet = 0;
      }
    }
    assert.ok(server.sentCount < maxTokens / 2, `${server.sentCount} were sent unread`);
    let count = 1;
    for (let next = await chunks.next(); !next.done; next = await chunks.next()) {
      count += 1;
    }
    assert.equal(count, maxTokens);
  }),
);

test("a slow consumer's abort reaches the server", () =>
  withServer([{ padding: "x".repeat(16_384) }], async (client, server) => {
    const stop = new AbortController();
    const { signal } = stop;
    const chunks = client.generate("x", { maxTokens: 2000, signal })[Symbol.asyncIterator]();
    await chunks.next();
    stop.abort();
    await server.cancelled();
    await assert.rejects(chunks.next(), ClientCancelledError);
  }));

test("a second reader is told so, and the first one goes on", () =>
  withServer([{ hangs: true, chunks: 1 }], async (client, server) => {
    const generation = client.generate("x");
    const chunks = generation[Symbol.asyncIterator]();
    await chunks.next();
    await assert.rejects(generation.text(), InvalidFieldError);
    const waiting = chunks.next();
    await assert.rejects(generation.text(), InvalidFieldError);
    await chunks.return?.();
    assert.deepEqual(await waiting, { done: true, value: undefined });
    assert.equal(await generation.text(), WHOLE);
    assert.equal(server.requests.length, 2);
  }));

test("a refused request connects again, and running streams finish where they are", () =>
  withServer([{}, { refusal: new DrainingError("going") }], async (client, server) => {
    const running = client.generate("x", { maxTokens: 500 });
    const chunks = running[Symbol.asyncIterator]();
    await chunks.next();
    assert.equal(await client.generate("y").text(), WHOLE);
    let count = 1;
    for (let next = await chunks.next(); !next.done; next = await chunks.next()) {
      count += 1;
    }
    assert.equal(count, 500);
    assert.equal(running.finished?.finishReason, "length");
    const [one, refused, other] = server.peers;
    assert.equal(one, refused);
    assert.notEqual(one, other);
  }));

/** Run a test with a client whose token never comes. */
async function withoutToken(
  body: (client: Client, asked: Promise<void>) => Promise<void>,
): Promise<void> {
  const asked = new EventTarget();
  const isAsked = once(asked, "token").then(() => undefined);
  const token = () => {
    asked.dispatchEvent(new Event("token"));
    return new Promise<string>(() => undefined);
  };
  const client = new Client("127.0.0.1:1", { token });
  try {
    await body(client, isAsked);
  } finally {
    client.close();
  }
}

test("a token that does not come is waited for as long as the call has time", () =>
  withoutToken(async (client) => {
    const settings = { timeoutSeconds: 0.05 };
    await assert.rejects(client.generate("x", settings).text(), DeadlineError);
    await assert.rejects(client.info(settings), DeadlineError);
  }));

test("what cancels a call ends the wait for its token", () =>
  withoutToken(async (client, asked) => {
    const stop = new AbortController();
    const { signal } = stop;
    const closed = client.generate("x");
    const calls = [closed.text(), client.generate("x", { signal }).text(), client.info({ signal })];
    const left = client.generate("x")[Symbol.asyncIterator]();
    const waiting = left.next();
    await asked;
    closed.close();
    stop.abort();
    await left.return?.();
    assert.deepEqual(await waiting, { done: true, value: undefined });
    for (const call of calls) {
      await assert.rejects(call, ClientCancelledError);
    }
    const last = client.info();
    client.close();
    await assert.rejects(last, ClientCancelledError);
  }));

test("info describes the system", () =>
  withServer([], async (client) => {
    const info = await client.info();
    assert.equal(info.modelName, "scripted");
    assert.deepEqual(info.servers, []);
  }));
