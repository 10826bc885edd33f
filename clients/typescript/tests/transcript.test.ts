import assert from "node:assert/strict";
import { test } from "node:test";
import { DeadlineError, OverloadedError } from "#dist/errors.js";
import { GenerateResponse } from "#dist/generated/paceline/v1/orchestrator_service.js";
import { buildRequest } from "#dist/request.js";
import { CallPlan, Transcript } from "#dist/transcript.js";

test("events and fields of a newer server are ignored", () => {
  const transcript = new Transcript(buildRequest("x", {}));
  const unknownEvent = GenerateResponse.decode(Buffer.from([0xa2, 0x06, 0x00])); // field 100, empty
  assert.equal(transcript.add(unknownEvent), undefined);
  const extended = Buffer.from([0x0a, 0x05, 0x30, 0x02, 0xa0, 0x06, 0x01]); // started, field 100
  assert.equal(transcript.add(GenerateResponse.decode(extended)), undefined);
  assert.equal(transcript.started?.promptTokenCount, 2);
});

test("words of a newer server are unknown", () => {
  const transcript = new Transcript(buildRequest("x", {}));
  const started = GenerateResponse.decode(Buffer.from([0x0a, 0x04, 0x20, 0x63, 0x28, 0x63]));
  transcript.add(started);
  assert.equal(transcript.started?.strategy, "unknown");
  assert.equal(transcript.started?.promise, "unknown");
});

test("the delays double up to two seconds and end with the attempts", () => {
  const plan = new CallPlan(100, { resumeAttempts: 7, clock: () => 0 });
  const full = new OverloadedError("full");
  const delays = Array.from({ length: 7 }, () => plan.delaySeconds(full));
  assert.deepEqual(delays, [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]);
  assert.throws(() => plan.delaySeconds(full), full);
});

test("the server's delay counts, unless it is longer than the time left", () => {
  let milliseconds = 0;
  const plan = new CallPlan(10, { resumeAttempts: 3, clock: () => milliseconds });
  assert.equal(plan.delaySeconds(new OverloadedError("full", { retryAfterSeconds: 5 })), 5);
  milliseconds = 6000;
  assert.equal(plan.remainingSeconds, 4);
  assert.throws(
    () => plan.delaySeconds(new OverloadedError("full", { retryAfterSeconds: 5 })),
    OverloadedError,
  );
});

test("only what can work in a moment is tried again", () => {
  const plan = new CallPlan(10, { resumeAttempts: 3 });
  assert.throws(() => plan.delaySeconds(new DeadlineError("over")), DeadlineError);
});
