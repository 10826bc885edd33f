/** What ends a call before its time: abort signals, closing, leaving an iteration. */

import { setMaxListeners } from "node:events";
import { ClientCancelledError } from "./errors.js";

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

function cancellation(reason: unknown): ClientCancelledError {
  if (reason instanceof ClientCancelledError) {
    return reason;
  }
  return new ClientCancelledError("the call's signal was aborted", { cause: reason });
}
