import assert from "node:assert/strict";
import { test } from "node:test";
import { GenerateResponse } from "#dist/generated/paceline/v1/orchestrator_service.js";
import { buildRequest } from "#dist/request.js";
import { Transcript } from "#dist/transcript.js";

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
