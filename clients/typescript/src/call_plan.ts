/** When a client tries again, and when it gives up: deadlines, delays and their budget, no I/O. */

import {
  ConnectionLostError,
  DrainingError,
  InvalidFieldError,
  OverloadedError,
  TryAgainError,
} from "./errors.js";

const FIRST_DELAY_SECONDS = 0.1;
const LONGEST_DELAY_SECONDS = 2;

/**
 * A delay is lengthened by a random part, at most half of it and at most a second, so that clients
 * that were refused at the same time do not return at the same time.
 */
const LONGEST_JITTER_SECONDS = 1;

/** More than any generation takes, and little enough for Node's timers, which end at 24.8 days. */
const LONGEST_TIMEOUT_SECONDS = 7 * 86_400;

/** A draining orchestrator refuses for moments, until its name leads to another one. */
const REFUSALS = 3;

/**
 * A stream that a server refused unread is sent again so often (REFUSED_STREAM: too many streams on
 * one connection): 13 s in all.
 */
const RESENDS = 10;

/** How gRPC's libraries, and proxies, say REFUSED_STREAM, HTTP/2's error 7; no reason stands beside. */
const REFUSED_STREAM = /refused[ _]stream|stream refused|RST_STREAM.*error code:? 7\b/i;

/**
 * Rounds over all orchestrators that bring no text, before a generation gives up. A generation that
 * has begun tries longer, since its user would lose the text so far.
 */
const ROUNDS = 30;
const ROUNDS_UNHEARD = 2;

/**
 * All streams of one connection can break at once, and resume at once. After that a client retries
 * at most ten times a second, all its generations together.
 */
const RETRIES_AT_ONCE = 100;
const RETRIES_PER_SECOND = 10;

/** A monotonic clock, in seconds. */
export type Clock = () => number;

export const monotonicSeconds: Clock = () => performance.now() / 1000;

/**
 * Check a timeout: any number from 0 on, of which more than a week is a week.
 *
 * @throws InvalidFieldError It is negative, or no number.
 */
export function checkedTimeout(timeout: number): number {
  if (!(typeof timeout === "number" && timeout >= 0)) {
    const description = `must be a number of seconds >= 0, not ${String(timeout)}`;
    throw InvalidFieldError.of("timeoutSeconds", description);
  }
  return Math.min(timeout, LONGEST_TIMEOUT_SECONDS);
}

/**
 * Check a number of attempts.
 *
 * @throws InvalidFieldError It is no whole number from 0 on.
 */
export function checkedAttempts(attempts: number): number {
  if (!(Number.isInteger(attempts) && attempts >= 0)) {
    const description = `must be a whole number >= 0, not ${String(attempts)}`;
    throw InvalidFieldError.of("resumeAttempts", description);
  }
  return attempts;
}

/**
 * Limits how often a client's generations retry, all of them together.
 *
 * A generation over the limit waits and does not fail: when an orchestrator ends, all its streams
 * may continue at another one, but not all at the same moment.
 */
export class RetryBudget {
  readonly #clock: Clock;
  #nextAt = Number.NEGATIVE_INFINITY; // when one retry a time, without pause, would be due

  constructor(clock: Clock = monotonicSeconds) {
    this.#clock = clock;
  }

  /** Take the next place, and return how long until it; undefined, and no place, if too long. */
  take(withinSeconds: number): number | undefined {
    const now = this.#clock();
    const at = Math.max(this.#nextAt, now - (RETRIES_AT_ONCE - 1) / RETRIES_PER_SECOND);
    const waitSeconds = Math.max(0, at - now);
    if (waitSeconds >= withinSeconds) {
      return undefined;
    }
    this.#nextAt = at + 1 / RETRIES_PER_SECOND;
    return waitSeconds;
  }
}

/** One deadline and a number of tries for all streams of a generation. */
export class CallPlan {
  readonly #clock: Clock;
  readonly #chance: () => number;
  readonly #budget: RetryBudget;
  readonly #deadline: number;
  readonly #endpointCount: number;
  /** Who has failed since the last text; the others come first. */
  readonly asked = new Set<unknown>();
  /** Undefined: as many as make sense. */
  #resumptionsLeft: number | undefined;
  #refusalsLeft = REFUSALS;
  #resendCount = 0;
  #delaySeconds = FIRST_DELAY_SECONDS;
  #rounds = 0;
  #mostRounds = ROUNDS_UNHEARD;

  constructor(timeoutSeconds: number, options: CallPlanOptions = {}) {
    this.#clock = options.clock ?? monotonicSeconds;
    this.#chance = options.chance ?? Math.random;
    this.#budget = options.budget ?? new RetryBudget(this.#clock);
    this.#deadline = this.#clock() + timeoutSeconds;
    this.#endpointCount = options.endpointCount ?? 1;
    this.#resumptionsLeft = options.resumeAttempts;
  }

  /** The time left for the next call. */
  get remainingSeconds(): number {
    return Math.max(0, this.#deadline - this.#clock());
  }

  /** Note that text has come: endpoints that failed earlier may be asked again. */
  hear(): void {
    this.#mostRounds = ROUNDS;
    this.#rounds = 0;
    this.#resendCount = 0;
    this.asked.clear();
    if (this.#resumptionsLeft === undefined) {
      this.#delaySeconds = FIRST_DELAY_SECONDS;
    }
  }

  /**
   * How long to wait before going on after an error: not at all while another orchestrator is left.
   *
   * @param endpoint Who was asked.
   * @param wasRefused Nothing had come. If the orchestrator is shutting down, asking another one is
   *   then no resumption, and not counted as one.
   * @throws The same error, if going on makes no sense.
   */
  delaySeconds(error: unknown, { wasRefused, endpoint }: Failure): number {
    const pause = wasRefused ? this.resendSeconds(error, endpoint) : undefined;
    if (pause !== undefined) {
      return pause;
    }
    this.asked.add(endpoint);
    const isAnotherLeft = this.asked.size < this.#endpointCount;
    if (!(error instanceof TryAgainError && this.#mayGoOn(error, wasRefused, isAnotherLeft))) {
      throw error;
    }
    const delay = isAnotherLeft ? 0 : this.#roundDelay(error);
    const remaining = this.remainingSeconds;
    const wait = delay < remaining ? this.#budget.take(remaining) : undefined;
    if (wait === undefined) {
      throw error;
    }
    return Math.max(delay, wait);
  }

  /**
   * How long to wait before a refused stream is sent again: no resumption, nor counted as one.
   * Undefined if it was not refused, or was too often, or there is no time.
   *
   * The pauses are random, so that refused streams return one by one; the server works, so the
   * budget is not used.
   *
   * @param error Why the call ended, of which nothing had come.
   * @param endpoint Who was asked.
   */
  resendSeconds(error: unknown, endpoint?: unknown): number | undefined {
    const delay = Math.min(FIRST_DELAY_SECONDS * 2 ** this.#resendCount, LONGEST_DELAY_SECONDS);
    const pause = delay * (0.5 + this.#chance());
    const mayResend = this.#resendCount < RESENDS && pause < this.remainingSeconds;
    if (!(isRefusedStream(error) && mayResend)) {
      return undefined;
    }
    this.#resendCount += 1;
    this.asked.add(endpoint);
    if (this.asked.size < this.#endpointCount) {
      return 0;
    }
    this.asked.clear();
    return pause;
  }

  #mayGoOn(error: TryAgainError, wasRefused: boolean, isAnotherLeft: boolean): boolean {
    if (error instanceof DrainingError && wasRefused && this.#refusalsLeft > 0) {
      this.#refusalsLeft -= 1;
      return true;
    }
    if (this.#resumptionsLeft === undefined) {
      return isAnotherLeft || this.#beginRound(error);
    }
    this.#resumptionsLeft -= 1;
    return this.#resumptionsLeft >= 0;
  }

  /** Say whether all are to be asked once more. */
  #beginRound(error: TryAgainError): boolean {
    this.#rounds += 1;
    const isUnheard = this.#mostRounds === ROUNDS_UNHEARD;
    return this.#rounds < this.#mostRounds && !(isUnheard && error instanceof OverloadedError);
  }

  #roundDelay(error: TryAgainError): number {
    this.asked.clear();
    const own = this.#nextDelay(error);
    return own + this.#chance() * Math.min(own / 2, LONGEST_JITTER_SECONDS);
  }

  /** The server's own delay; without one, a delay that doubles each time. */
  #nextDelay({ retryAfterSeconds = 0 }: TryAgainError): number {
    const own = this.#delaySeconds;
    this.#delaySeconds = Math.min(2 * own, LONGEST_DELAY_SECONDS);
    return retryAfterSeconds > 0 ? retryAfterSeconds : own;
  }
}

/** Whether the server refused a stream unread, on a connection that works. */
function isRefusedStream(error: unknown): boolean {
  return error instanceof ConnectionLostError && REFUSED_STREAM.test(error.message);
}

interface Failure {
  readonly wasRefused: boolean;
  readonly endpoint?: unknown;
}

interface CallPlanOptions {
  /** Left out: until all orchestrators have been asked in vain, again and again. */
  readonly resumeAttempts?: number | undefined;
  /** How many there are to ask. Default 1. */
  readonly endpointCount?: number;
  /** The client's. */
  readonly budget?: RetryBudget;
  readonly clock?: Clock;
  /** Draws from [0, 1). */
  readonly chance?: () => number;
}
