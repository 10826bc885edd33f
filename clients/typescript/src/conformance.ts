/**
 * The conformance driver: one JSON request a line in, one JSON answer a line out.
 *
 * What the lines say is in tests/contract/vectors/clients/README.md. It acts and reports; it judges
 * nothing. Not part of the published package.
 */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import {
  type CallMetadata,
  type CallSettings,
  type Chunk,
  Client,
  ClientCancelledError,
  type GenerateOptions,
  type Generation,
  PacelineError,
  type TimelineEvent,
  type Tls,
  type TokenSource,
} from "./index.js";

type Json = Record<string, unknown>;

interface Request {
  readonly do: string;
  readonly case?: string;
  readonly client: string;
  readonly address: string;
  readonly addresses?: string[];
  readonly tls_from_memory?: boolean;
  readonly client_metadata?: Record<string, string>;
  readonly metadata?: Record<string, string>;
  readonly tokens?: (string | null)[];
  readonly tls?: { ca?: string; certificate?: string; key?: string } | null;
  readonly insecure?: boolean | null;
  readonly prompt: { text: string } | { token_ids: number[] };
  readonly options?: Json | null;
  readonly timeout_seconds?: number | string | null;
  readonly client_timeout_seconds?: number | string | null;
  readonly resume_attempts?: number | null;
  readonly cancel?: { after_seconds?: number; after_chunks?: number } | null;
  readonly pause_seconds?: number | null;
  readonly then_resume?: boolean | null;
  readonly events?: boolean | null;
  readonly second_reader?: boolean | null;
}

class UnsupportedRequest extends Error {}

/** The received data of one stream. */
class Reading {
  readonly chunks: Chunk[] = [];
  readonly events: TimelineEvent[] = [];
  readonly #began = performance.now();
  generation: Generation | undefined;
  error: PacelineError | undefined;
  cancelled = false;
  firstChunkSeconds: number | null = null;

  add(event: Chunk | TimelineEvent): void {
    if (event.type === "timeline") {
      this.events.push(event);
      return;
    }
    this.firstChunkSeconds ??= (performance.now() - this.#began) / 1000;
    this.chunks.push(event);
  }

  /** Put what a second reader of the same generation read behind what the first one did. */
  extend(other: Reading): void {
    this.chunks.push(...other.chunks);
    this.error = other.error;
  }

  told(): Json {
    const { started, finished } = this.generation ?? {};
    return {
      chunks: this.chunks.map((chunk) => onWire(chunk, ["type"])),
      text: this.chunks.map((chunk) => chunk.text).join(""),
      prompt_chunks: (this.generation?.transcript.promptChunks ?? []).map((it) => onWire(it)),
      started: started ? onWire(started) : null,
      finished: finished
        ? { ...onWire(finished, ["timeline"]), timeline_length: finished.timeline.length }
        : null,
      error: this.error ? errorOf(this.error) : null,
    };
  }
}

const clients = new Map<string, Client>();
/** Letting go of a generation must not be what cancels it. */
const held = new Set<Generation>();

async function answer(request: Request): Promise<Json> {
  const began = performance.now();
  const told: Json = {
    case: request.case ?? null,
    ...new Reading().told(),
    events: [],
    cancelled: false,
    resumed: null,
    system: null,
    first_chunk_seconds: null,
  };
  try {
    Object.assign(told, await act(request));
  } catch (error) {
    if (error instanceof UnsupportedRequest) {
      return { case: told.case, unsupported: error.message };
    }
    told.error = errorOf(own(error));
  }
  return { ...told, elapsed_seconds: (performance.now() - began) / 1000 };
}

async function act(request: Request): Promise<Json> {
  switch (request.do) {
    case "generate":
      return await generate(request);
    case "system_info":
      return { system: onWire(await clientOf(request).info(callOf(request))) };
    case "close":
      clients.get(request.client)?.close();
      clients.delete(request.client);
      held.clear();
      return {};
    default:
      throw new UnsupportedRequest(`do ${request.do}`);
  }
}

async function generate(request: Request): Promise<Json> {
  const options = optionsOf(request);
  const client = clientOf(request);
  const stop = new AbortController();
  const generation = client.generate(promptOf(request), {
    ...options,
    ...callOf(request),
    // The runner's null is the client's default; without a word it is none.
    resumeAttempts:
      request.resume_attempts === undefined ? 0 : (request.resume_attempts ?? undefined),
    signal: stop.signal,
  });
  held.add(generation);
  const reading = await read(generation, request, stop);
  const told: Json = {
    ...reading.told(),
    events: reading.events.map((event) => onWire(event, ["type"])),
    cancelled: reading.cancelled,
    first_chunk_seconds: reading.firstChunkSeconds,
  };
  if (request.then_resume && (reading.error || reading.cancelled)) {
    told.resumed = (await read(client.resume(generation), {})).told();
  }
  return told;
}

async function read(
  generation: Generation,
  request: Partial<Request>,
  stop = new AbortController(),
): Promise<Reading> {
  const reading = new Reading();
  reading.generation = generation;
  const { after_seconds, after_chunks } = request.cancel ?? {};
  const alarm =
    after_seconds === undefined ? undefined : setTimeout(() => stop.abort(), 1000 * after_seconds);
  try {
    for await (const event of request.events ? generation.events() : generation) {
      reading.add(event);
      if (reading.chunks.length === after_chunks) {
        reading.cancelled = true;
        break;
      }
      if (request.second_reader && reading.chunks.length === 1) {
        reading.extend(await read(generation, {}));
      }
      if (request.pause_seconds) {
        await sleep(1000 * request.pause_seconds);
      }
    }
  } catch (error) {
    reading.cancelled = stop.signal.aborted && error instanceof ClientCancelledError;
    reading.error = reading.cancelled ? reading.error : own(error);
  } finally {
    clearTimeout(alarm);
  }
  return reading;
}

function clientOf(request: Request): Client {
  const { tls, insecure } = request;
  const found = clients.get(request.client);
  const client =
    found ??
    new Client(request.addresses ?? request.address, {
      tls: tls ? tlsOf(tls, request.tls_from_memory) : undefined,
      metadata: metadataOf(request.client_metadata),
      token: tokenOf(request.tokens),
      insecure: insecure ?? false,
      timeoutSeconds: secondsOf(request.client_timeout_seconds),
    });
  clients.set(request.client, client);
  return client;
}

function tlsOf(files: NonNullable<Request["tls"]>, fromMemory = false): Tls {
  const { ca, certificate, key } = files;
  if (!fromMemory) {
    return { caFile: ca, certificateFile: certificate, keyFile: key };
  }
  const read = (path: string | undefined) => (path === undefined ? undefined : readFileSync(path));
  return { ca: read(ca), certificate: read(certificate), key: read(key) };
}

/** Read metadata, in which bytes are hexadecimal digits. */
function metadataOf(metadata: Record<string, string> = {}): CallMetadata {
  const read = ([name, value]: [string, string]) =>
    [name, name.endsWith("-bin") ? Buffer.from(value, "hex") : value] as const;
  return Object.fromEntries(Object.entries(metadata).map(read));
}

/** Tell one token after the other, and the last one again and again. */
/** Tell one token after the other, and the last one again and again; null never comes. */
function tokenOf(tokens: (string | null)[] | undefined): TokenSource | undefined {
  const next = () => (tokens && tokens.length > 1 ? tokens.shift() : tokens?.[0]);
  return tokens && (() => next() ?? new Promise<string>(() => undefined));
}

function promptOf({ prompt }: Request): string | number[] {
  return "text" in prompt ? prompt.text : prompt.token_ids;
}

function optionsOf(request: Request): GenerateOptions {
  const options: Json = {};
  for (const [name, value] of Object.entries(request.options ?? {})) {
    if (value !== null) {
      options[inCamelCase(name)] = value === "NaN" ? Number.NaN : value;
    }
  }
  if (typeof options.seed === "string") {
    options.seed = Number(options.seed);
  }
  return options;
}

function inCamelCase(name: string): string {
  return name.replaceAll(/_(.)/g, (_, letter: string) => letter.toUpperCase());
}

function callOf(request: Request): CallSettings {
  const timeoutSeconds = secondsOf(request.timeout_seconds);
  return { metadata: metadataOf(request.metadata), timeoutSeconds };
}

/** Read a number, also "NaN" and "Infinity", which JSON has none for. */
function secondsOf(value: number | string | null | undefined): number | undefined {
  return value === null || value === undefined ? undefined : Number(value);
}

function own(error: unknown): PacelineError {
  if (error instanceof PacelineError) {
    return error;
  }
  throw error;
}

function errorOf(error: PacelineError): Json {
  return {
    kind: error.name.replace(/Error$/, ""),
    code: error.code,
    reason: error.reason,
    message: error.message,
    metadata: error.metadata,
    violations: error.violations.map(({ field, description }) => ({
      field: snake(field),
      description,
    })),
    retry_after_seconds: error.retryAfterSeconds ?? null,
  };
}

// The client's words for what the wire has in capitals.
const ENUMS = new Set(["strategy", "promise", "kind", "finishReason", "origins"]);

function onWire(record: object, without: readonly string[] = []): Json {
  const entries = Object.entries(record).filter(([name]) => !without.includes(name));
  return Object.fromEntries(
    entries.map(([name, value]) => [snake(name), valueOnWire(name, value)]),
  );
}

function valueOnWire(name: string, value: unknown): unknown {
  if (Array.isArray(value)) {
    return value.map((each) => valueOnWire(name, each));
  }
  if (typeof value === "object" && value !== null) {
    return onWire(value);
  }
  return ENUMS.has(name) ? String(value).toUpperCase() : value;
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
}
for (const client of clients.values()) {
  client.close();
}
