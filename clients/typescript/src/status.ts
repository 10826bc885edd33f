/** Errors on the wire: `google.rpc.Status` in the trailers, back to the error that was raised. */

import { type ServiceError, status as StatusCode } from "@grpc/grpc-js";
import {
  ConnectionLostError,
  DeadlineError,
  DrainingError,
  ERROR_CLASSES,
  type ErrorClass,
  InternalError,
  InvalidFieldError,
  OverloadedError,
  PermissionDeniedError,
  UnauthenticatedError,
  UnsupportedError,
} from "./errors.js";
import {
  BadRequest,
  type Delay,
  type Detail,
  ErrorInfo,
  RetryInfo,
  Status,
} from "./generated/status_details.js";

const DETAILS_KEY = "grpc-status-details-bin";
const DOMAIN = "paceline";

/**
 * The meaning of a status without a reason of ours: the transport's, a proxy's, a newer server's.
 *
 * gRPC itself says RESOURCE_EXHAUSTED of a message that is too large: the same call would fail again.
 * Some of its servers say CANCELLED to calls that arrive as they stop, and that they cut then; a
 * client does not call this for its own cancels.
 */
const CLASS_OF_CODE: ReadonlyMap<StatusCode, ErrorClass> = new Map<StatusCode, ErrorClass>([
  [StatusCode.CANCELLED, DrainingError],
  [StatusCode.DEADLINE_EXCEEDED, DeadlineError],
  [StatusCode.INVALID_ARGUMENT, InvalidFieldError],
  [StatusCode.PERMISSION_DENIED, PermissionDeniedError],
  [StatusCode.RESOURCE_EXHAUSTED, InvalidFieldError],
  [StatusCode.UNAUTHENTICATED, UnauthenticatedError],
  [StatusCode.UNAVAILABLE, ConnectionLostError],
  [StatusCode.UNIMPLEMENTED, UnsupportedError],
]);

/**
 * Rebuild the error that a server raised, or name the transport's error.
 *
 * If the details are not a `google.rpc.Status`, or have no reason that this version knows, the
 * status code decides the class. A value that is not a status is returned unchanged.
 */
export function decode(error: unknown): unknown {
  if (!isServiceError(error)) {
    return error;
  }
  const { message, details } = statusOf(error);
  const info = unpack(details, "ErrorInfo", ErrorInfo);
  const known = info?.domain === DOMAIN ? ERROR_CLASSES.get(info.reason) : undefined;
  const retryAfterSeconds = secondsOf(unpack(details, "RetryInfo", RetryInfo)?.retryDelay);
  const errorClass = known ?? classOf(error.code, retryAfterSeconds !== undefined);
  return new errorClass(message || error.details || (StatusCode[error.code] ?? ""), {
    metadata: info?.metadata ?? {},
    violations: unpack(details, "BadRequest", BadRequest)?.fieldViolations ?? [],
    retryAfterSeconds,
    cause: error,
  });
}

function classOf(code: StatusCode, mayPass: boolean): ErrorClass {
  if (code === StatusCode.RESOURCE_EXHAUSTED && mayPass) {
    return OverloadedError;
  }
  return CLASS_OF_CODE.get(code) ?? InternalError;
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error
    ? typeof error.code === "number"
    : false;
}

function statusOf(error: ServiceError): Status {
  const [bytes] = error.metadata.get(DETAILS_KEY);
  const status = bytes instanceof Buffer ? parse(bytes, Status) : undefined;
  return status ?? Status.create();
}

function unpack<Message>(
  details: readonly Detail[],
  name: string,
  type: Decoder<Message>,
): Message | undefined {
  const detail = details.findLast(({ typeUrl }) => typeUrl.endsWith(`/google.rpc.${name}`));
  return detail && parse(detail.value, type);
}

interface Decoder<Message> {
  decode(bytes: Uint8Array): Message;
}

function parse<Message>(bytes: Uint8Array, type: Decoder<Message>): Message | undefined {
  try {
    return type.decode(bytes);
  } catch {
    return undefined;
  }
}

function secondsOf(delay: Delay | undefined): number | undefined {
  return delay && delay.seconds + delay.nanos / 1e9;
}
