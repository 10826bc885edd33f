/** The client of one orchestrator, and a generation as it streams. */

import { on, setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { type ClientReadableStream, Metadata } from "@grpc/grpc-js";
import { type ChannelSettings, openChannel } from "./channel.js";
import { ClientCancelledError, InvalidFieldError } from "./errors.js";
import type {
  GenerateResponse,
  GetSystemInfoResponse,
  OrchestratorServiceClient,
} from "./generated/paceline/v1/orchestrator_service.js";
import type {
  Chunk,
  Completion,
  Finished,
  Started,
  SystemInfo,
  TimelineEvent,
} from "./generation.js";
import { buildRequest, type GenerateOptions, type Prompt } from "./request.js";
import { readSystemInfo } from "./responses.js";
import { decode } from "./status.js";
import { CallPlan, Transcript } from "./transcript.js";

/** The default deadline of a call, in seconds. */
export const DEFAULT_TIMEOUT_SECONDS = 120;

const BUFFERED_MESSAGES = 128;
const READING = { close: ["end"], highWaterMark: BUFFERED_MESSAGES, lowWaterMark: 64 };

/** How to connect, and how long a call may take. */
export interface ClientSettings extends ChannelSettings {
  /** The default deadline of a call, in seconds. Default 120. */
  readonly timeoutSeconds?: number | undefined;
}

/** How long a call may take, and what ends it earlier. */
export interface CallSettings {
  /** The deadline for all of it, in seconds. Default: the client's. */
  readonly timeoutSeconds?: number | undefined;
  /** Cancels the call, and everything that the servers do for it, when it is aborted. */
  readonly signal?: AbortSignal | undefined;
}

/** How a generation is called. */
export interface GenerateSettings extends CallSettings {
  /**
   * How often to go on by itself after a `TryAgainError`, such as a broken connection. The text has
   * no gap and no duplicate. Default 0.
   */
  readonly resumeAttempts?: number | undefined;
}

/**
 * A client of one orchestrator; any number of generations can run at once.
 *
 *     const client = new Client("127.0.0.1:50050");
 *     for await (const chunk of client.generate("def fib(n):", { maxTokens: 64 })) {
 *       process.stdout.write(chunk.text);
 *     }
 *     client.close();
 */
export class Client implements Disposable {
  readonly #stub: OrchestratorServiceClient;
  readonly #timeoutSeconds: number;
  readonly #closing = new AbortController();

  /**
   * @param address HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT.
   * @throws InvalidFieldError The address is malformed, a TLS file is unusable, or plaintext would
   *   leave this machine unasked.
   */
  constructor(address: string, settings: ClientSettings = {}) {
    this.#timeoutSeconds = seconds(settings.timeoutSeconds ?? DEFAULT_TIMEOUT_SECONDS);
    this.#stub = openChannel(address, settings);
  }

  /**
   * Continue a prompt. Nothing is sent before the result is iterated over or awaited.
   *
   * @param prompt Text, or token ids.
   * @throws InvalidFieldError An option has a value that cannot be sent.
   */
  generate(prompt: Prompt, options: GenerateOptions & GenerateSettings = {}): Generation {
    const { timeoutSeconds, resumeAttempts, signal, ...rest } = options;
    const transcript = new Transcript(buildRequest(prompt, rest));
    return this.#generation(transcript, { timeoutSeconds, resumeAttempts, signal });
  }

  /**
   * Go on with a generation that was left or broken, here or at another orchestrator.
   *
   * Iterating gives what is missing; `collect` and `text` give the whole.
   */
  resume(generation: Generation, settings: GenerateSettings = {}): Generation {
    return this.#generation(generation.transcript.branch(), settings);
  }

  /** Describe the models and servers the orchestrator works with now. */
  async systemInfo(settings: CallSettings = {}): Promise<SystemInfo> {
    const plan = new CallPlan(seconds(settings.timeoutSeconds ?? this.#timeoutSeconds));
    const pass = new Pass([this.#closing.signal, settings.signal]);
    try {
      pass.begin();
      return readSystemInfo(await getSystemInfo(this.#stub, plan, pass.signal));
    } finally {
      pass.end();
    }
  }

  /** Close the connection, and cancel what runs on it. */
  close(): void {
    this.#closing.abort(new ClientCancelledError("the client was closed"));
    this.#stub.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #generation(transcript: Transcript, settings: GenerateSettings): Generation {
    const timeoutSeconds = seconds(settings.timeoutSeconds ?? this.#timeoutSeconds);
    const signals = [this.#closing.signal, settings.signal];
    return new Generation(this.#stub, transcript, { ...settings, timeoutSeconds, signals });
  }
}

interface GenerationSettings {
  readonly timeoutSeconds: number;
  readonly resumeAttempts?: number | undefined;
  readonly signals: readonly (AbortSignal | undefined)[];
}

/**
 * A generation as it streams; iterating sends the request. `Client.generate` makes it.
 *
 * Leaving the iteration (break, return, an exception), aborting the signal, `close`, and closing
 * the client cancel the RPC, and with it everything the servers do for it. What was received stays:
 * iterating again, or after `close` `Client.resume`, goes on from there.
 *
 * A consumer that is slower than the servers holds them up: some messages wait here, the rest at
 * the orchestrator.
 */
export class Generation implements AsyncIterable<Chunk>, Disposable {
  readonly #stub: OrchestratorServiceClient;
  readonly #transcript: Transcript;
  readonly #settings: GenerationSettings;
  readonly #closing = new AbortController();

  /** @internal */
  constructor(
    stub: OrchestratorServiceClient,
    transcript: Transcript,
    settings: GenerationSettings,
  ) {
    this.#stub = stub;
    this.#transcript = transcript;
    this.#settings = settings;
  }

  /** What the generation will be; undefined until it is known. */
  get started(): Started | undefined {
    return this.#transcript.started;
  }

  /** How it ended, with statistics; undefined until it has. */
  get finished(): Finished | undefined {
    return this.#transcript.finished;
  }

  /** Everything received so far. */
  get transcript(): Transcript {
    return this.#transcript;
  }

  [Symbol.asyncIterator](): AsyncIterableIterator<Chunk> {
    const pass = this.#pass();
    return leavable(chunksOf(this.#events(pass)), pass);
  }

  /** Iterate over chunks and, with `streamTimeline`, what happens behind them. */
  events(): AsyncIterableIterator<Chunk | TimelineEvent> {
    const pass = this.#pass();
    return leavable(this.#events(pass), pass);
  }

  /** Wait for the end and return the whole; of a resumed generation, all its parts. */
  async collect(): Promise<Completion> {
    for await (const _ of this.events()) {
      // The transcript has it.
    }
    return this.#transcript.completion();
  }

  /** Wait for the end and return the whole text. */
  async text(): Promise<string> {
    return (await this.collect()).text;
  }

  /** Cancel the RPC, if it is running. It can be called again. */
  close(): void {
    this.#closing.abort(
      new ClientCancelledError("the generation was closed; resume() goes on with it"),
    );
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #pass(): Pass {
    return new Pass([this.#closing.signal, ...this.#settings.signals]);
  }

  async *#events(pass: Pass): AsyncGenerator<Chunk | TimelineEvent, void> {
    const { timeoutSeconds, resumeAttempts = 0 } = this.#settings;
    const plan = new CallPlan(timeoutSeconds, { resumeAttempts });
    try {
      pass.begin();
      while (this.finished === undefined) {
        pass.signal.throwIfAborted();
        yield* this.#stream(plan, pass.signal);
      }
    } finally {
      pass.end();
    }
  }

  async *#stream(plan: CallPlan, signal: AbortSignal): AsyncGenerator<Chunk | TimelineEvent, void> {
    const request = this.#transcript.nextRequest();
    const call = this.#stub.generate(request, new Metadata(), { deadline: deadlineOf(plan) });
    try {
      for await (const response of responsesOf(call, signal)) {
        const event = this.#transcript.add(response);
        if (event !== undefined) {
          yield event;
        }
      }
      this.#transcript.completion();
    } catch (error) {
      if (this.finished === undefined) {
        await pause(plan.delaySeconds(error), signal);
      }
    }
  }
}

/** One iteration or unary call: its signal is aborted with the error that ends it. */
class Pass {
  readonly #controller = new AbortController();
  readonly #sources: readonly AbortSignal[];

  constructor(sources: readonly (AbortSignal | undefined)[]) {
    this.#sources = sources.filter((source) => source !== undefined);
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** End with the first of the signals; that can be at once. */
  begin(): void {
    setMaxListeners(0, ...this.#sources); // many calls may follow one signal: that is no leak
    for (const source of this.#sources) {
      source.addEventListener("abort", this.#follow);
    }
    this.#follow();
  }

  leave(): void {
    this.#controller.abort(new ClientCancelledError("the iteration was left"));
    this.end();
  }

  /** Let go of the signals that outlive it. */
  end(): void {
    for (const source of this.#sources) {
      source.removeEventListener("abort", this.#follow);
    }
  }

  readonly #follow = (): void => {
    const source = this.#sources.find((each) => each.aborted);
    if (source !== undefined) {
      this.#controller.abort(cancellation(source.reason));
    }
  };
}

function cancellation(reason: unknown): ClientCancelledError {
  if (reason instanceof ClientCancelledError) {
    return reason;
  }
  return new ClientCancelledError("the call's signal was aborted", { cause: reason });
}

/** Let `return` and `throw` cancel at once, also where `next` waits: a generator would queue them. */
function leavable<T>(inner: AsyncGenerator<T, void>, pass: Pass): AsyncIterableIterator<T> {
  let left = false;
  const leave = () => {
    left = true;
    pass.leave();
  };
  return {
    async next() {
      try {
        return await inner.next();
      } catch (error) {
        if (left) {
          return { done: true, value: undefined };
        }
        throw error;
      }
    },
    return() {
      leave();
      return inner.return();
    },
    throw(error) {
      leave();
      return inner.throw(error);
    },
    [Symbol.asyncIterator]() {
      return this;
    },
  };
}

async function* chunksOf(
  events: AsyncGenerator<Chunk | TimelineEvent, void>,
): AsyncGenerator<Chunk, void> {
  for await (const event of events) {
    if (event.type === "chunk") {
      yield event;
    }
  }
}

/**
 * Read a stream; nothing comes any more once the signal is aborted.
 *
 * The stream is paused where the consumer is `BUFFERED_MESSAGES` behind. Reading ahead so far is for
 * streams that break: @grpc/grpc-js drops what waits behind its own short buffer when a status other
 * than OK arrives.
 */
async function* responsesOf(
  call: ClientReadableStream<GenerateResponse>,
  signal: AbortSignal,
): AsyncGenerator<GenerateResponse, void> {
  const cancel = () => call.cancel();
  call.on("error", () => undefined); // a cancelled call still reports it when nobody reads
  signal.addEventListener("abort", cancel);
  try {
    for await (const [response] of on(call, "data", READING)) {
      yield response as GenerateResponse;
      signal.throwIfAborted();
    }
  } catch (error) {
    signal.throwIfAborted();
    throw decode(error);
  } finally {
    signal.removeEventListener("abort", cancel);
    call.cancel();
  }
}

async function getSystemInfo(
  stub: OrchestratorServiceClient,
  plan: CallPlan,
  signal: AbortSignal,
): Promise<GetSystemInfoResponse> {
  signal.throwIfAborted();
  return await new Promise((resolve, reject) => {
    const options = { deadline: deadlineOf(plan) };
    const call = stub.getSystemInfo({}, new Metadata(), options, (error, response) => {
      if (error === null) {
        resolve(response);
      } else {
        reject(signal.aborted ? signal.reason : decode(error));
      }
    });
    signal.addEventListener("abort", () => call.cancel());
  });
}

async function pause(delaySeconds: number, signal: AbortSignal): Promise<void> {
  try {
    await sleep(1000 * delaySeconds, undefined, { signal });
  } catch {
    signal.throwIfAborted();
  }
}

function deadlineOf(plan: CallPlan): number {
  return Date.now() + 1000 * plan.remainingSeconds;
}

function seconds(timeout: number): number {
  if (!(Number.isFinite(timeout) && timeout >= 0)) {
    throw InvalidFieldError.of("timeoutSeconds", `must be finite and >= 0, not ${timeout}`);
  }
  return timeout;
}
