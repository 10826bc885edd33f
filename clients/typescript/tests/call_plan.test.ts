import assert from "node:assert/strict";
import { test } from "node:test";
import { CallPlan, checkedTimeout, RetryBudget } from "#dist/call_plan.js";
import {
  ConnectionLostError,
  DeadlineError,
  DrainingError,
  InvalidFieldError,
  OverloadedError,
} from "#dist/errors.js";

const LOST = new ConnectionLostError("gone");
const DRAINING = new DrainingError("leaving");
const CUT = { wasRefused: false };
const REFUSED = { wasRefused: true };

function still(resumeAttempts: number, chance = 0): CallPlan {
  return new CallPlan(100, { resumeAttempts, clock: () => 0, chance: () => chance });
}

test("the waits double up to two seconds and end with the attempts", () => {
  const plan = still(7);
  const delays = Array.from({ length: 7 }, () => plan.delaySeconds(LOST, CUT));
  assert.deepEqual(delays, [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]);
  assert.throws(() => plan.delaySeconds(LOST, CUT), LOST);
});

test("a wait is longer by chance, up to half of it and up to a second", () => {
  assert.equal(still(1, 0.5).delaySeconds(LOST, CUT), 0.125);
  const full = new OverloadedError("full", { retryAfterSeconds: 30 });
  assert.equal(still(1, 0.5).delaySeconds(full, CUT), 30.5);
});

test("chance differs from generation to generation", () => {
  const first = () =>
    new CallPlan(9, { resumeAttempts: 1, clock: () => 0 }).delaySeconds(LOST, CUT);
  const drawn = new Set(Array.from({ length: 10 }, first));
  assert.ok(drawn.size > 1);
  assert.ok([...drawn].every((each) => each >= 0.1 && each < 0.15));
});

test("the server's delay counts, unless it is longer than the time left", () => {
  let now = 0;
  const clock = () => now;
  const plan = new CallPlan(10, { resumeAttempts: 3, clock, chance: () => 0 });
  const full = new OverloadedError("full", { retryAfterSeconds: 5 });
  assert.equal(plan.delaySeconds(full, CUT), 5);
  now = 6;
  assert.equal(plan.remainingSeconds, 4);
  assert.throws(() => plan.delaySeconds(full, CUT), OverloadedError);
});

test("a delay that is over is the client's own", () => {
  for (const retryAfterSeconds of [0, -1]) {
    const lost = new ConnectionLostError("gone", { retryAfterSeconds });
    assert.equal(still(1).delaySeconds(lost, CUT), 0.1);
  }
});

test("only what can work in a moment is tried again", () => {
  assert.throws(() => still(3).delaySeconds(new DeadlineError("over"), CUT), DeadlineError);
});

test("three refusals of a draining orchestrator are no resumptions", () => {
  const plan = still(1);
  for (let count = 0; count < 4; count += 1) {
    plan.delaySeconds(DRAINING, REFUSED);
  }
  assert.throws(() => plan.delaySeconds(DRAINING, REFUSED), DRAINING);
  assert.throws(() => still(0).delaySeconds(DRAINING, CUT), DRAINING);
});

test("a hundred streams go on at once, and then ten a second", () => {
  let now = 0;
  const budget = new RetryBudget(() => now);
  const waits = Array.from({ length: 130 }, () => budget.take(60) ?? Number.NaN);
  assert.deepEqual(waits.slice(0, 100), new Array(100).fill(0));
  assert.ok(Math.abs((waits.at(-1) ?? 0) - 3) < 1e-6);
  assert.equal(budget.take(0.5), undefined); // and takes no place
  assert.ok(Math.abs((budget.take(60) ?? 0) - 3.1) < 1e-6);
  now = 20;
  assert.equal(budget.take(60), 0);
});

test("a time is as long as it says, and a week at most", () => {
  for (const seconds of [0, 0.5, 604_800]) {
    assert.equal(checkedTimeout(seconds), seconds);
  }
  for (const seconds of [1e10, Number.MAX_SAFE_INTEGER, Number.POSITIVE_INFINITY]) {
    assert.equal(checkedTimeout(seconds), 604_800);
  }
  for (const seconds of [-1, Number.NEGATIVE_INFINITY, Number.NaN]) {
    assert.throws(() => checkedTimeout(seconds), InvalidFieldError);
  }
});

test("a refused stream is sent again, and is no resumption", () => {
  for (const words of [
    "Stream refused by server",
    "Received RST_STREAM with error code 7",
    "reset reason: remote refused stream reset",
  ]) {
    const refused = new ConnectionLostError(words);
    const plan = still(0);
    const delays = Array.from({ length: 10 }, () => plan.delaySeconds(refused, REFUSED));
    assert.deepEqual(delays, [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1, 1, 1]);
    assert.throws(() => plan.delaySeconds(refused, REFUSED), refused);
    assert.throws(() => still(0).delaySeconds(refused, CUT), refused);
  }
  for (const words of ["RST_STREAM with error code 8", "RST_STREAM with error code 77"]) {
    const other = new ConnectionLostError(words);
    assert.throws(() => still(0).delaySeconds(other, REFUSED), other);
  }
});
