/** What ends a call before its time: abort signals, closing, leaving an iteration. */

import { setMaxListeners } from "node:events";
import { ClientCancelledError, DeadlineError } from "./errors.js";

/** One iteration or unary call: its signal is aborted with the error that ends it. */
export class Pass {
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

/**
 * Wait for the caller's token, but not beyond the call's time or the signal, which end gRPC's calls by
 * themselves and nothing else.
 */
export async function inTime<T>(
  token: Promise<T>,
  { seconds, signal }: { seconds: number; signal: AbortSignal },
): Promise<T> {
  signal.throwIfAborted();
  let letGo = () => {};
  const over = new Promise<never>((_, reject) => {
    const abort = () => reject(signal.reason);
    const late = () => reject(new DeadlineError("the token did not come in time"));
    const timer = setTimeout(late, 1000 * seconds);
    signal.addEventListener("abort", abort);
    letGo = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", abort);
    };
  });
  try {
    return await Promise.race([token, over]);
  } finally {
    letGo();
  }
}

function cancellation(reason: unknown): ClientCancelledError {
  if (reason instanceof ClientCancelledError) {
    return reason;
  }
  return new ClientCancelledError("the call's signal was aborted", { cause: reason });
}
