/** A client's way to its orchestrator, which can be taken again while calls run on the old one. */

import { connectivityState } from "@grpc/grpc-js";
import { ConnectionLostError, DrainingError } from "./errors.js";
import type { OrchestratorServiceClient } from "./generated/paceline/v1/orchestrator_service.js";
import { decode } from "./status.js";

/** Four round trips of 600 ms, and two lost packets. */
const CONNECT_TIMEOUT_MS = 10_000;

/**
 * The connection of a client.
 *
 * It leaves an orchestrator that says DRAINING for the one that its name leads to then; what runs
 * goes on where it is. And it gives up a peer that does not answer: @grpc/grpc-js has no limit for a
 * connection attempt, and would wait for ever on one that accepts and says nothing.
 */
export class Connection {
  readonly #open: () => OrchestratorServiceClient;
  readonly #givenUp = new WeakSet<OrchestratorServiceClient>();
  #stub: OrchestratorServiceClient;
  #watched: OrchestratorServiceClient | undefined;

  constructor(open: () => OrchestratorServiceClient) {
    this.#open = open;
    this.#stub = open();
  }

  /** What makes the next call. */
  get stub(): OrchestratorServiceClient {
    this.#watch(this.#stub);
    return this.#stub;
  }

  /** Say why a call of a stub ended; after DRAINING the next call connects again. */
  decoded(failure: unknown, stub: OrchestratorServiceClient): unknown {
    const error = decode(failure);
    if (error instanceof DrainingError) {
      this.#leave(stub);
    }
    if (error instanceof ConnectionLostError && this.#givenUp.has(stub)) {
      const seconds = CONNECT_TIMEOUT_MS / 1000;
      return new ConnectionLostError(`there was no connection within ${seconds} s`, {
        cause: failure,
      });
    }
    return error;
  }

  close(): void {
    this.#stub.close();
  }

  /** Give a stub up if its channel stays as long as that in a state that is not ready. */
  #watch(stub: OrchestratorServiceClient): void {
    const channel = stub.getChannel();
    const state = channel.getConnectivityState(false);
    const { READY, SHUTDOWN } = connectivityState;
    if (this.#watched === stub || state === READY || state === SHUTDOWN) {
      return;
    }
    this.#watched = stub;
    const timer = setTimeout(() => this.#giveUp(stub), CONNECT_TIMEOUT_MS).unref();
    channel.watchConnectivityState(state, Number.POSITIVE_INFINITY, () => {
      clearTimeout(timer);
      this.#watched = undefined;
      this.#watch(stub);
    });
  }

  #giveUp(stub: OrchestratorServiceClient): void {
    if (stub.getChannel().getConnectivityState(false) !== connectivityState.IDLE) {
      this.#givenUp.add(stub);
      this.#leave(stub);
    }
  }

  /** Take a new channel. What runs on the old one finishes; what waits for it ends with an error. */
  #leave(stub: OrchestratorServiceClient): void {
    if (this.#stub === stub) {
      this.#stub = this.#open();
      stub.close();
    }
  }
}
