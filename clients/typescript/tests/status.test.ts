import assert from "node:assert/strict";
import { test } from "node:test";
import { Metadata, type ServiceError, status } from "@grpc/grpc-js";
import * as errors from "#dist/errors.js";
import { ErrorReason } from "#dist/generated/paceline/v1/error_reason.js";
import { decode } from "#dist/status.js";
import { trailersOf } from "./scripted_server.js";

function serviceError(code: status, metadata = new Metadata(), details = "of gRPC"): ServiceError {
  return Object.assign(new Error("x"), { code, details, metadata });
}

test("every reason of the protos has a class, and the class its reason", () => {
  const reasons = Object.keys(ErrorReason)
    .filter((name) => name.startsWith("ERROR_REASON_") && !name.endsWith("_UNSPECIFIED"))
    .map((name) => name.slice("ERROR_REASON_".length));
  assert.deepEqual(new Set(errors.ERROR_CLASSES.keys()), new Set(reasons));
});

test("every error comes back as its class with all that it said", () => {
  for (const errorClass of errors.ERROR_CLASSES.values()) {
    const sent = new errorClass("what happened", {
      metadata: { request_id: "r-1" },
      violations: [{ field: "max_tokens", description: "must be 1 or more" }],
      retryAfterSeconds: 1.25,
    });
    const code = status[sent.code as keyof typeof status];
    const received = decode(serviceError(code, trailersOf(sent)));
    assert.ok(received instanceof errors.PacelineError);
    assert.equal(received.constructor, errorClass);
    assert.equal(received.name, errorClass.name);
    for (const name of ["message", "code", "reason", "retryAfterSeconds"] as const) {
      assert.equal(received[name], sent[name]);
    }
    assert.deepEqual({ ...received.metadata }, sent.metadata);
    assert.deepEqual(received.violations, sent.violations);
  }
});

test("a status without a reason of ours leaves the class to its code", () => {
  const expected = {
    CANCELLED: errors.DrainingError,
    DEADLINE_EXCEEDED: errors.DeadlineError,
    INVALID_ARGUMENT: errors.InvalidFieldError,
    PERMISSION_DENIED: errors.PermissionDeniedError,
    RESOURCE_EXHAUSTED: errors.InvalidFieldError,
    UNAUTHENTICATED: errors.UnauthenticatedError,
    UNAVAILABLE: errors.ConnectionLostError,
    UNIMPLEMENTED: errors.UnsupportedError,
    INTERNAL: errors.InternalError,
    UNKNOWN: errors.InternalError,
  };
  for (const [name, errorClass] of Object.entries(expected)) {
    const received = decode(serviceError(status[name as keyof typeof status]));
    assert.ok(received instanceof errorClass, name);
    assert.equal(received.message, "of gRPC");
  }
});

test("details that are no status do no harm", () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff, 0xff]));
  const received = decode(serviceError(status.UNAVAILABLE, metadata));
  assert.ok(received instanceof errors.ConnectionLostError);
});

test("what is no status at all stays what it is", () => {
  const error = new RangeError("a bug");
  assert.equal(decode(error), error);
});
