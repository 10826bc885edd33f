/** The orchestrators of a client, and which of them the next call goes to. */

import { type Clock, monotonicSeconds } from "./call_plan.js";
import { leadsToOne, type Route } from "./channel.js";
import { Connection } from "./connection.js";
import { InvalidFieldError } from "./errors.js";

/** So long an endpoint that failed is asked after the others; the time doubles until it answers. */
const FIRST_REST_SECONDS = 0.1;
const LONGEST_REST_SECONDS = 10;

/** One address of a client's. */
export class Endpoint {
  readonly connection: Connection;
  /** Whether there is one orchestrator behind it, and not as many as a name says. */
  readonly leadsToOne: boolean;
  /** Calls of this client that run there. */
  runningCount = 0;
  failureCount = 0;
  restsUntil = Number.NEGATIVE_INFINITY;

  constructor({ address, open }: Route) {
    this.connection = new Connection(open);
    this.leadsToOne = leadsToOne(address);
  }
}

/**
 * All endpoints of a client; requests are spread over the ones that serve.
 *
 * An endpoint is judged by the outcomes of its calls: no call is made for that purpose.
 */
export class Endpoints {
  readonly all: readonly Endpoint[];
  readonly #clock: Clock;
  #turn = 0;

  constructor(routes: readonly Route[], clock: Clock = monotonicSeconds) {
    this.all = routes.map((route) => new Endpoint(route));
    this.#clock = clock;
  }

  /** Whether another orchestrator can continue an unfinished generation. */
  get mayBeSeveral(): boolean {
    return this.all.length > 1 || !this.all.every(({ leadsToOne }) => leadsToOne);
  }

  /**
   * Choose the best endpoint for a call: not asked yet, working, and with the fewest calls.
   *
   * If all have failed, one is asked all the same: its error says why.
   */
  choose(asked: ReadonlySet<Endpoint>): Endpoint {
    const now = this.#clock();
    const ranked = this.all.map((_, index) => {
      const endpoint = this.all[(this.#turn + index) % this.all.length] as Endpoint;
      const rank = [asked.has(endpoint), now < endpoint.restsUntil].map(Number);
      return { endpoint, rank: [...rank, endpoint.runningCount] };
    });
    this.#turn += 1;
    ranked.sort((one, other) => compare(one.rank, other.rank)); // which keeps turns
    return (ranked[0] as { endpoint: Endpoint }).endpoint;
  }

  /** An endpoint answered as it should. */
  answered(endpoint: Endpoint): void {
    endpoint.failureCount = 0;
    endpoint.restsUntil = Number.NEGATIVE_INFINITY;
  }

  /** An endpoint refused or broke a call: the others come first for a while. */
  failed(endpoint: Endpoint): void {
    const now = this.#clock();
    if (now < endpoint.restsUntil) {
      return; // one of many calls that ended together
    }
    const seconds = FIRST_REST_SECONDS * 2 ** endpoint.failureCount;
    endpoint.restsUntil = now + Math.min(seconds, LONGEST_REST_SECONDS);
    endpoint.failureCount = Math.min(endpoint.failureCount + 1, 10);
  }

  close(): void {
    for (const { connection } of this.all) {
      connection.close();
    }
  }
}

/**
 * List a client's addresses: one, several, or several separated by commas.
 *
 * @throws InvalidFieldError There is none.
 */
export function listed(address: string | readonly string[]): readonly string[] {
  if (typeof address !== "string") {
    if (address.length === 0) {
      throw InvalidFieldError.of("address", "must be HOST:PORT, or several");
    }
    return address;
  }
  // A gRPC scheme has commas of its own: ipv4:10.0.0.1:50050,10.0.0.2:50050 is one target.
  const hasScheme = /^(unix|unix-abstract|dns|ipv4|ipv6):/.test(address);
  return hasScheme ? [address] : address.split(",").map((each) => each.trim());
}

function compare(one: readonly number[], other: readonly number[]): number {
  const index = one.findIndex((each, at) => each !== other[at]);
  return index < 0 ? 0 : (one[index] as number) - (other[index] as number);
}
