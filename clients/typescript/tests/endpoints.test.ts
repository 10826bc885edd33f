import assert from "node:assert/strict";
import { test } from "node:test";
import { CallPlan } from "#dist/call_plan.js";
import { routeTo } from "#dist/channel.js";
import { type Endpoint, Endpoints, listed } from "#dist/endpoints.js";
import { ConnectionLostError, InvalidFieldError, OverloadedError } from "#dist/errors.js";

const LOST = new ConnectionLostError("gone");
const NOBODY: ReadonlySet<Endpoint> = new Set();

function endpoints(addresses: readonly string[], clock = () => 0): Endpoints {
  return new Endpoints(
    addresses.map((each) => routeTo(each, { insecure: true })),
    clock,
  );
}

function chosen(some: Endpoints, count = 6): Endpoint[] {
  return Array.from({ length: count }, () => some.choose(NOBODY));
}

const THREE = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"];

test("equal ones take turns, and who has the fewest calls is next", () => {
  const three = endpoints(THREE);
  assert.deepEqual(new Set(chosen(three, 3)), new Set(three.all));
  const [busy] = chosen(three, 1) as [Endpoint];
  busy.runningCount = 1;
  assert.ok(!chosen(three).includes(busy));
  three.close();
});

test("who was asked comes last", () => {
  const three = endpoints(THREE);
  const [first, second, third] = three.all as [Endpoint, Endpoint, Endpoint];
  assert.equal(three.choose(new Set([first, second])), third);
  assert.ok(three.choose(new Set(three.all)));
  three.close();
});

test("who failed rests longer each time until it answers", () => {
  let now = 0;
  const three = endpoints(THREE, () => now);
  const [sick] = three.all as [Endpoint];
  for (const seconds of [0.1, 0.2, 0.4]) {
    three.failed(sick);
    three.failed(sick); // calls that end together are one failure
    now += 0.99 * seconds;
    assert.ok(!chosen(three).includes(sick));
    now += 0.02 * seconds;
    assert.ok(chosen(three).includes(sick));
  }
  three.answered(sick);
  three.failed(sick);
  now += 0.11;
  assert.ok(chosen(three).includes(sick));
  three.close();
});

test("several addresses or a name may be several orchestrators", () => {
  const isSeveral = (...addresses: string[]) => {
    const some = endpoints(addresses);
    some.close();
    return some.mayBeSeveral;
  };
  for (const one of ["127.0.0.1:1", "localhost:1", "[::1]:1", "10.0.0.1:1", "unix:/tmp/x"]) {
    assert.ok(!isSeveral(one), one);
  }
  assert.ok(isSeveral("127.0.0.1:1", "127.0.0.1:2"));
  for (const one of ["paceline.example:1", "dns:///paceline.example:1"]) {
    assert.ok(isSeveral(one), one);
  }
  assert.ok(isSeveral("ipv4:127.0.0.1:1,127.0.0.1:2"));
});

test("addresses are a list, or stand between commas", () => {
  assert.deepEqual(listed("a:1, b:2"), ["a:1", "b:2"]);
  assert.deepEqual(listed(["a:1"]), ["a:1"]);
  assert.deepEqual(listed("ipv4:1.1.1.1:1,1.1.1.2:1"), ["ipv4:1.1.1.1:1,1.1.1.2:1"]);
  assert.throws(() => listed([]), InvalidFieldError);
});

test("nothing is waited for while another is left, and a text that has begun is worth 30 rounds", () => {
  const plan = () => new CallPlan(120, { endpointCount: 2, clock: () => 0, chance: () => 0 });
  const wait = (calls: CallPlan, endpoint: number, error = LOST) =>
    calls.delaySeconds(error, { wasRefused: true, endpoint });
  const unheard = plan();
  assert.deepEqual([wait(unheard, 0), wait(unheard, 1), wait(unheard, 0)], [0, 0.1, 0]);
  assert.throws(() => wait(unheard, 1), LOST);
  const heard = plan();
  heard.hear();
  for (let count = 0; count < 59; count += 1) {
    wait(heard, count % 2);
  }
  assert.throws(() => wait(heard, 1), LOST);
  const full = new OverloadedError("full");
  const refused = plan();
  assert.equal(wait(refused, 0, full), 0);
  assert.throws(() => wait(refused, 1, full), full);
});
