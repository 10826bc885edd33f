/** A generation as it streams. */

import { on } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import type { ClientReadableStream, Metadata } from "@grpc/grpc-js";
import type { CallMetadata, Credentials } from "./call_metadata.js";
import { CallPlan, type RetryBudget } from "./call_plan.js";
import { inTime, Pass } from "./cancellation.js";
import type { Endpoint, Endpoints } from "./endpoints.js";
import { ClientCancelledError, InvalidFieldError, TryAgainError } from "./errors.js";
import type { GenerateResponse } from "./generated/paceline/v1/orchestrator_service.js";
import type { Chunk, Completion, Finished, Started, TimelineEvent } from "./generation.js";
import type { Transcript } from "./transcript.js";

const BUFFERED_MESSAGES = 128;
const READING = { close: ["end"], highWaterMark: BUFFERED_MESSAGES, lowWaterMark: 64 };

interface GenerationSettings {
  readonly timeoutSeconds: number;
  /** Undefined: as often as makes sense, where there may be several orchestrators. */
  readonly resumeAttempts: number | undefined;
  readonly budget: RetryBudget;
  readonly credentials: Credentials;
  readonly metadata: CallMetadata | undefined;
  readonly signals: readonly (AbortSignal | undefined)[];
}

/**
 * A generation as it streams; iterating sends the request. `Client.generate` makes it.
 *
 * Leaving the iteration (break, return, an exception), aborting the signal, `close`, and closing
 * the client cancel the RPC, and all work of the servers for it. The received part stays: a new
 * iteration continues there, and after `close` so does `Client.resume`.
 *
 * It has one reader at a time; a second one gets an `InvalidFieldError`.
 *
 * A consumer that is slower than the servers holds them up: some messages wait here, the rest at
 * the orchestrator.
 */
export class Generation implements AsyncIterable<Chunk>, Disposable {
  readonly #endpoints: Endpoints;
  readonly #transcript: Transcript;
  readonly #settings: GenerationSettings;
  readonly #closing = new AbortController();
  #reading: Pass | undefined;
  #resumptionCount = 0;

  /** @internal */
  constructor(endpoints: Endpoints, transcript: Transcript, settings: GenerationSettings) {
    this.#endpoints = endpoints;
    this.#transcript = transcript;
    this.#settings = settings;
  }

  /** Seed, model and plan of the generation; undefined before its first message. */
  get started(): Started | undefined {
    return this.#transcript.started;
  }

  /** The end, with statistics; undefined until then. */
  get finished(): Finished | undefined {
    return this.#transcript.finished;
  }

  /** How often the generation resumed by itself, at another orchestrator if there is one. */
  get resumptionCount(): number {
    return this.#resumptionCount;
  }

  /** Everything received so far. */
  get transcript(): Transcript {
    return this.#transcript;
  }

  [Symbol.asyncIterator](): AsyncIterableIterator<Chunk> {
    const pass = this.#pass();
    return leavable(chunksOf(this.#events(pass)), pass);
  }

  /** Iterate over chunks and, with `streamTimeline`, over the timeline's events. */
  events(): AsyncIterableIterator<Chunk | TimelineEvent> {
    const pass = this.#pass();
    return leavable(this.#events(pass), pass);
  }

  /** Wait for the end, and return the whole completion, a resumed one from its start. */
  async collect(): Promise<Completion> {
    for await (const _ of this.events()) {
      // The transcript has it.
    }
    return this.#transcript.completion();
  }

  /** Wait for the end, and return the whole text. */
  async text(): Promise<string> {
    return (await this.collect()).text;
  }

  /** Cancel the RPC, if it runs. A second call does nothing. */
  close(): void {
    this.#closing.abort(
      new ClientCancelledError("the generation was closed; resume() continues it"),
    );
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #pass(): Pass {
    return new Pass([this.#closing.signal, ...this.#settings.signals]);
  }

  async *#events(pass: Pass): AsyncGenerator<Chunk | TimelineEvent, void> {
    if (this.#reading && !this.#reading.signal.aborted) {
      const description = "has two readers: let one read it, or give each its own by resume()";
      throw InvalidFieldError.of("generation", description);
    }
    this.#reading = pass;
    const plan = this.#plan();
    try {
      pass.begin();
      while (this.finished === undefined) {
        pass.signal.throwIfAborted();
        yield* this.#stream(plan, pass.signal);
      }
    } finally {
      pass.end();
      if (this.#reading === pass) {
        this.#reading = undefined;
      }
    }
  }

  #plan(): CallPlan {
    const { timeoutSeconds, resumeAttempts, budget } = this.#settings;
    return new CallPlan(timeoutSeconds, {
      resumeAttempts: resumeAttempts ?? (this.#endpoints.mayBeSeveral ? undefined : 0),
      budget,
      endpointCount: this.#endpoints.all.length,
    });
  }

  async *#stream(plan: CallPlan, signal: AbortSignal): AsyncGenerator<Chunk | TimelineEvent, void> {
    const { credentials, metadata } = this.#settings;
    const seconds = plan.remainingSeconds;
    const along = await inTime(credentials.metadata(metadata), { seconds, signal });
    signal.throwIfAborted(); // the token may have taken long
    const endpoint = this.#endpoints.choose(plan.asked as ReadonlySet<Endpoint>);
    endpoint.runningCount += 1;
    try {
      yield* this.#read(endpoint, { plan, along, signal });
    } finally {
      endpoint.runningCount -= 1;
    }
  }

  async *#read(
    endpoint: Endpoint,
    { plan, along, signal }: { plan: CallPlan; along: Metadata; signal: AbortSignal },
  ): AsyncGenerator<Chunk | TimelineEvent, void> {
    const request = this.#transcript.nextRequest();
    const { connection } = endpoint;
    const { stub } = connection;
    const call = stub.generate(request, along, { deadline: deadlineOf(plan) });
    let wasRefused = true;
    try {
      for await (const response of responsesOf(call, signal)) {
        wasRefused = false;
        const event = this.#transcript.add(response);
        if (event?.type === "chunk") {
          plan.hear();
          this.#endpoints.answered(endpoint);
        }
        if (event !== undefined) {
          yield event;
        }
      }
      this.#transcript.completion();
    } catch (failure) {
      if (this.finished === undefined) {
        const error = connection.decoded(failure, stub);
        if (error instanceof TryAgainError) {
          this.#endpoints.failed(endpoint);
        }
        const delaySeconds = plan.delaySeconds(error, { wasRefused, endpoint });
        this.#resumptionCount += 1;
        await pause(delaySeconds, signal);
      }
    }
  }
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
  call.on("error", () => undefined); // a cancelled call reports an error even without a reader
  signal.addEventListener("abort", cancel);
  try {
    for await (const [response] of on(call, "data", READING)) {
      yield response as GenerateResponse;
      signal.throwIfAborted();
    }
  } catch (error) {
    signal.throwIfAborted();
    throw error;
  } finally {
    signal.removeEventListener("abort", cancel);
    call.cancel();
  }
}

export async function pause(delaySeconds: number, signal: AbortSignal): Promise<void> {
  try {
    await sleep(1000 * delaySeconds, undefined, { signal });
  } catch {
    signal.throwIfAborted();
  }
}

/** Say by when a call must be over, in ms since the epoch, as grpc-js takes it. */
export function deadlineOf(plan: CallPlan): number {
  return Date.now() + 1000 * plan.remainingSeconds;
}
