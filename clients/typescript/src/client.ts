/** The client of one orchestrator. */

import { Metadata } from "@grpc/grpc-js";
import { CallPlan, checkedAttempts, checkedTimeout, RetryBudget } from "./call_plan.js";
import { Pass } from "./cancellation.js";
import { type ChannelSettings, routeTo } from "./channel.js";
import { Connection } from "./connection.js";
import { ClientCancelledError } from "./errors.js";
import type { GetSystemInfoResponse } from "./generated/paceline/v1/orchestrator_service.js";
import type { SystemInfo } from "./generation.js";
import { buildRequest, type GenerateOptions, type Prompt } from "./request.js";
import { readSystemInfo } from "./responses.js";
import { deadlineOf, Generation } from "./streaming.js";
import { Transcript } from "./transcript.js";

/** The default deadline of a call, in seconds. */
export const DEFAULT_TIMEOUT_SECONDS = 120;

/** How to connect, and how long a call may take. */
export interface ClientSettings extends ChannelSettings {
  /** The default deadline of a call, in seconds; more than a week is a week. Default 120. */
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
   * no gap and no duplicate. A request that is refused because the orchestrator is shutting down
   * goes to the next one in any case. Default 0.
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
  readonly #connection: Connection;
  readonly #timeoutSeconds: number;
  readonly #budget = new RetryBudget();
  readonly #closing = new AbortController();

  /**
   * @param address HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT.
   * @throws InvalidFieldError The address is malformed, a TLS file is unusable, the timeout is
   *   negative, or plaintext would leave this machine unasked.
   */
  constructor(address: string, settings: ClientSettings = {}) {
    this.#timeoutSeconds = checkedTimeout(settings.timeoutSeconds ?? DEFAULT_TIMEOUT_SECONDS);
    this.#connection = new Connection(routeTo(address, settings));
  }

  /**
   * Continue a prompt. Nothing is sent before the result is iterated over or awaited.
   *
   * @param prompt Text, or token ids.
   * @throws InvalidFieldError An option has a value that cannot be sent, or a time or number of
   *   attempts is negative.
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
    const plan = new CallPlan(checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds));
    const pass = new Pass([this.#closing.signal, settings.signal]);
    try {
      pass.begin();
      return readSystemInfo(await getSystemInfo(this.#connection, plan, pass.signal));
    } finally {
      pass.end();
    }
  }

  /** Close the connection, and cancel what runs on it. */
  close(): void {
    this.#closing.abort(new ClientCancelledError("the client was closed"));
    this.#connection.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  #generation(transcript: Transcript, settings: GenerateSettings): Generation {
    return new Generation(this.#connection, transcript, {
      timeoutSeconds: checkedTimeout(settings.timeoutSeconds ?? this.#timeoutSeconds),
      resumeAttempts: checkedAttempts(settings.resumeAttempts ?? 0),
      budget: this.#budget,
      signals: [this.#closing.signal, settings.signal],
    });
  }
}

async function getSystemInfo(
  connection: Connection,
  plan: CallPlan,
  signal: AbortSignal,
): Promise<GetSystemInfoResponse> {
  signal.throwIfAborted();
  const { stub } = connection;
  return await new Promise((resolve, reject) => {
    const options = { deadline: deadlineOf(plan) };
    const call = stub.getSystemInfo({}, new Metadata(), options, (error, response) => {
      if (error === null) {
        resolve(response);
      } else {
        reject(signal.aborted ? signal.reason : connection.decoded(error, stub));
      }
    });
    signal.addEventListener("abort", () => call.cancel());
  });
}
