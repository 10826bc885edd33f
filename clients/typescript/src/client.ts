/** The client of one or several orchestrators. */

import type { Metadata } from "@grpc/grpc-js";
import {
  type CallMetadata,
  Credentials,
  checkMetadata,
  type MetadataSource,
  type TokenSource,
} from "./call_metadata.js";
import { CallPlan, checkedAttempts, checkedTimeout, RetryBudget } from "./call_plan.js";
import { inTime, Pass } from "./cancellation.js";
import { type ChannelSettings, routeTo } from "./channel.js";
import { type Endpoint, Endpoints, listed } from "./endpoints.js";
import { ClientCancelledError, TryAgainError } from "./errors.js";
import type { GetSystemInfoResponse } from "./generated/paceline/v1/orchestrator_service.js";
import type { SystemInfo } from "./generation.js";
import { buildRequest, type GenerateOptions, type Prompt } from "./request.js";
import { readSystemInfo } from "./responses.js";
import { deadlineOf, Generation, pause } from "./streaming.js";
import { Transcript } from "./transcript.js";

/** The default deadline of a call, in seconds. */
export const DEFAULT_TIMEOUT_SECONDS = 120;

/** How to connect, and how long a call may take. */
export interface ClientSettings extends ChannelSettings {
  /** The default deadline of a call, in seconds; more than a week is a week. Default 120. */
  readonly timeoutSeconds?: number | undefined;
  /**
   * What goes along with every call; or what is called for each call and returns that, such as the
   * current trace's `traceparent`.
   */
  readonly metadata?: MetadataSource | undefined;
  /**
   * Called for each call, resumptions included: what it returns goes along as
   * `authorization: Bearer ...`. What it throws, the call throws. It is waited for as long as the call
   * has time and is wanted.
   */
  readonly token?: TokenSource | undefined;
}

/** How long a call may take, and what ends it earlier. */
export interface CallSettings {
  /** The deadline for all of it, in seconds. Default: the client's. */
  readonly timeoutSeconds?: number | undefined;
  /** Cancels the call, and everything that the servers do for it, when it is aborted. */
  readonly signal?: AbortSignal | undefined;
  /** What goes along with the call, beside the client's. */
  readonly metadata?: CallMetadata | undefined;
}

/** How a generation is called. */
export interface GenerateSettings extends CallSettings {
  /**
   * How often a generation resumes by itself after a `TryAgainError`, such as a broken connection.
   * The text has no gap and no duplicate. A request that is refused because the orchestrator is
   * shutting down goes to the next one in any case. Default: never with one orchestrator; with
   * several, until all of them have failed several times. 0 leaves it to the caller.
   */
  readonly resumeAttempts?: number | undefined;
}

/**
 * A client of one or several orchestrators; any number of generations can run at once.
 *
 * The client spreads requests over the orchestrators that serve. A generation that one of them
 * leaves unfinished continues at another: under EXACT with the text that it would have had there.
 *
 *     const client = new Client("127.0.0.1:50050");
 *     for await (const chunk of client.generate("def fib(n):", { maxTokens: 64 })) {
 *       process.stdout.write(chunk.text);
 *     }
 *     client.close();
 */
export class Client implements Disposable {
  readonly #endpoints: Endpoints;
  readonly #credentials: Credentials;
  readonly #timeoutSeconds: number;
  readonly #budget = new RetryBudget();
  readonly #closing = new AbortController();

  /**
   * @param address HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT; or several of them,
   *   as a list or between commas. A name can lead to several, too.
   * @throws InvalidFieldError The address is malformed, a TLS file is unusable, the timeout is
   *   negative, metadata cannot be sent, or plaintext would leave this machine unasked.
   */
  constructor(address: string | readonly string[], settings: ClientSettings = {}) {
    this.#timeoutSeconds = checkedTimeout(settings.timeoutSeconds ?? DEFAULT_TIMEOUT_SECONDS);
    this.#credentials = new Credentials(settings.metadata, settings.token);
    this.#endpoints = new Endpoints(listed(address).map((each) => routeTo(each, settings)));
  }

  /**
   * Continue a prompt. The request is not sent before the result is iterated over or awaited.
   *
   * @param prompt Text, or token ids.
   * @throws InvalidFieldError An option has a value that cannot be sent, or a time or number of
   *   attempts is negative.
   */
  generate(prompt: Prompt, options: GenerateOptions & GenerateSettings = {}): Generation {
    const { timeoutSeconds, resumeAttempts, signal, metadata, ...rest } = options;
    const transcript = new Transcript(buildRequest(prompt, rest));
    return this.#generation(transcript, { timeoutSeconds, resumeAttempts, signal, metadata });
  }

  /**
   * Continue a generation that was left or broken, here or at another orchestrator.
   *
   * Iterating gives the missing part; `collect` and `text` give the whole.
   */
  resume(generation: Generation, settings: GenerateSettings = {}): Generation {
    return this.#generation(generation.transcript.branch(), settings);
  }

  /** Describe the models and servers that the orchestrator works with now. */
  async info(settings: CallSettings = {}): Promise<SystemInfo> {
    const plan = new CallPlan(checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds), {
      endpointCount: this.#endpoints.all.length,
    });
    const pass = new Pass([this.#closing.signal, settings.signal]);
    checkMetadata(settings.metadata);
    try {
      pass.begin();
      return readSystemInfo(await this.#ask(plan, { pass, metadata: settings.metadata }));
    } finally {
      pass.end();
    }
  }

  /** Ask one orchestrator after the other until one answers. */
  async #ask(
    plan: CallPlan,
    { pass, metadata }: { pass: Pass; metadata: CallMetadata | undefined },
  ): Promise<GetSystemInfoResponse> {
    const asked = plan.asked as Set<Endpoint>;
    for (;;) {
      const along = await inTime(this.#credentials.metadata(metadata), {
        seconds: plan.remainingSeconds,
        signal: pass.signal,
      });
      const endpoint = this.#endpoints.choose(asked);
      try {
        return await getSystemInfo(endpoint, { plan, along, signal: pass.signal });
      } catch (error) {
        const pauseSeconds = plan.resendSeconds(error, endpoint);
        if (pauseSeconds !== undefined) {
          await pause(pauseSeconds, pass.signal);
          continue;
        }
        asked.add(endpoint);
        if (!(error instanceof TryAgainError) || asked.size === this.#endpoints.all.length) {
          throw error;
        }
        this.#endpoints.failed(endpoint);
      }
    }
  }

  /** Close the connections, and cancel the calls on them. */
  close(): void {
    this.#closing.abort(new ClientCancelledError("the client was closed"));
    this.#endpoints.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #generation(transcript: Transcript, settings: GenerateSettings): Generation {
    const { resumeAttempts, metadata } = settings;
    checkMetadata(metadata);
    return new Generation(this.#endpoints, transcript, {
      timeoutSeconds: checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds),
      resumeAttempts: resumeAttempts === undefined ? undefined : checkedAttempts(resumeAttempts),
      budget: this.#budget,
      credentials: this.#credentials,
      metadata,
      signals: [this.#closing.signal, settings.signal],
    });
  }
}

async function getSystemInfo(
  { connection }: Endpoint,
  { plan, along, signal }: { plan: CallPlan; along: Metadata; signal: AbortSignal },
): Promise<GetSystemInfoResponse> {
  signal.throwIfAborted();
  const { stub } = connection;
  return await new Promise((resolve, reject) => {
    const options = { deadline: deadlineOf(plan) };
    const call = stub.getSystemInfo({}, along, options, (error, response) => {
      if (error === null) {
        resolve(response);
      } else {
        reject(signal.aborted ? signal.reason : connection.decoded(error, stub));
      }
    });
    signal.addEventListener("abort", () => call.cancel());
  });
}
