/**
 * Every error of Paceline.
 *
 *     PacelineError
 *     ├── InvalidFieldError               fix the request
 *     │   └── ContextLengthExceededError
 *     ├── MalformedRequestError           fix the client
 *     ├── UnsupportedError                leave it out, or ask another server
 *     ├── PermissionDeniedError           fix the credentials
 *     │   └── UnauthenticatedError        send the credential that it names
 *     ├── SessionError                    an orchestrator repairs it by itself
 *     │   ├── SessionNotFoundError
 *     │   ├── PrefixNotHeldError
 *     │   ├── PrefixMismatchError
 *     │   ├── StaleCallError
 *     │   └── SupersededError
 *     ├── ModelMismatchError              pick another server
 *     ├── ModelNotFoundError              ask for another LoRA adapter, or for none
 *     ├── TokenizerMismatchError          pair other models
 *     ├── TryAgainError                   retry after `retryAfterSeconds`, or elsewhere
 *     │   ├── CacheExhaustedError
 *     │   ├── OverloadedError
 *     │   ├── LoadingError
 *     │   ├── DrainingError
 *     │   ├── NoTargetError
 *     │   └── ConnectionLostError         has no reason on the wire: the transport broke
 *     ├── DeadlineError                   resume, with a later deadline
 *     │   └── SlowConsumerError           resume, and read faster
 *     ├── ClientCancelledError
 *     ├── InvariantViolatedError          report it
 *     └── InternalError                   report it
 *
 * `code` is the name of a gRPC status code, `reason` that of an ErrorReason without its prefix.
 */

/** A field out of its limits: its path in the request, and the fault. */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** The details of an error. */
export interface ErrorDetails extends ErrorOptions {
  readonly metadata?: Readonly<Record<string, string>>;
  readonly violations?: readonly FieldViolation[];
  readonly retryAfterSeconds?: number | undefined;
}

/** A class of errors. */
export interface ErrorClass {
  readonly code: string;
  readonly reason: string;
  new (message: string, details?: ErrorDetails): PacelineError;
}

/** The base of all errors. */
export class PacelineError extends Error {
  static readonly code: string = "INTERNAL";
  static readonly reason: string = "";

  /** More facts, as in google.rpc.ErrorInfo; never prompts or tokens. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The wrong fields, if the request is wrong. */
  readonly violations: readonly FieldViolation[];
  /** Time until a retry is useful, in seconds, if the server said one. */
  readonly retryAfterSeconds: number | undefined;

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details);
    this.name = new.target.name;
    this.metadata = details.metadata ?? {};
    this.violations = details.violations ?? [];
    this.retryAfterSeconds = details.retryAfterSeconds;
  }

  /** Name of the gRPC status code. */
  get code(): string {
    return (this.constructor as ErrorClass).code;
  }

  /** Name of the ErrorReason, without its prefix; empty for a class that only groups. */
  get reason(): string {
    return (this.constructor as ErrorClass).reason;
  }
}

/** A field is out of its limits: fix the request. */
export class InvalidFieldError extends PacelineError {
  static override readonly code: string = "INVALID_ARGUMENT";
  static override readonly reason: string = "INVALID_FIELD";

  /** Name one field and its limit. */
  static of(field: string, description: string): InvalidFieldError {
    return new InvalidFieldError(`${field}: ${description}`, {
      violations: [{ field, description }],
    });
  }
}

/** Prompt and maxTokens do not fit the model's context: fix the request. */
export class ContextLengthExceededError extends InvalidFieldError {
  static override readonly reason = "CONTEXT_LENGTH_EXCEEDED";
}

/** The bytes are not the request message: fix the client. */
export class MalformedRequestError extends PacelineError {
  static override readonly code = "INVALID_ARGUMENT";
  static override readonly reason = "MALFORMED_REQUEST";
}

/** This server does not support the request: leave the option out, or ask another server. */
export class UnsupportedError extends PacelineError {
  static override readonly code = "UNIMPLEMENTED";
  static override readonly reason = "UNSUPPORTED";
}

/** The peer may not call this method: fix the credentials. */
export class PermissionDeniedError extends PacelineError {
  static override readonly code: string = "PERMISSION_DENIED";
  static override readonly reason: string = "PERMISSION_DENIED";
}

/** A credential is missing or wrong: send the one that the message names. */
export class UnauthenticatedError extends PermissionDeniedError {
  static override readonly code = "UNAUTHENTICATED";
  static override readonly reason = "UNAUTHENTICATED";
}

/** An error between an orchestrator and a model server; the orchestrator repairs it. */
export class SessionError extends PacelineError {}

/** The session is unknown here. */
export class SessionNotFoundError extends SessionError {
  static override readonly code = "NOT_FOUND";
  static override readonly reason = "SESSION_NOT_FOUND";
}

/** The session holds fewer tokens than were assumed; `metadata.held_length` says how many. */
export class PrefixNotHeldError extends SessionError {
  static override readonly code = "OUT_OF_RANGE";
  static override readonly reason = "PREFIX_NOT_HELD";
}

/** The session holds other tokens than were assumed. */
export class PrefixMismatchError extends SessionError {
  static override readonly code = "FAILED_PRECONDITION";
  static override readonly reason = "PREFIX_MISMATCH";
}

/** A call with a higher sequence arrived before. */
export class StaleCallError extends SessionError {
  static override readonly code = "ABORTED";
  static override readonly reason = "STALE_CALL";
}

/** A newer call of the session replaced this one. */
export class SupersededError extends SessionError {
  static override readonly code = "ABORTED";
  static override readonly reason = "SUPERSEDED";
}

/** The server's model is not the expected one: pick another server. */
export class ModelMismatchError extends PacelineError {
  static override readonly code = "FAILED_PRECONDITION";
  static override readonly reason = "MODEL_MISMATCH";
}

/** No target has the LoRA adapter that the request names: ask for another, or for none. */
export class ModelNotFoundError extends PacelineError {
  static override readonly code = "NOT_FOUND";
  static override readonly reason = "MODEL_NOT_FOUND";
}

/** Drafter and target have different tokenizers: pair other models. */
export class TokenizerMismatchError extends PacelineError {
  static override readonly code = "FAILED_PRECONDITION";
  static override readonly reason = "TOKENIZER_MISMATCH";
}

/** The cause may pass: retry after `retryAfterSeconds`, or at another server. */
export class TryAgainError extends PacelineError {
  static override readonly code: string = "UNAVAILABLE";
}

/** There is no memory for another session. */
export class CacheExhaustedError extends TryAgainError {
  static override readonly code = "RESOURCE_EXHAUSTED";
  static override readonly reason = "CACHE_EXHAUSTED";
}

/** There are too many requests at once. */
export class OverloadedError extends TryAgainError {
  static override readonly code = "RESOURCE_EXHAUSTED";
  static override readonly reason = "OVERLOADED";
}

/** The server is still loading. */
export class LoadingError extends TryAgainError {
  static override readonly reason = "LOADING";
}

/** The server is shutting down. */
export class DrainingError extends TryAgainError {
  static override readonly reason = "DRAINING";
}

/** No target is reachable. */
export class NoTargetError extends TryAgainError {
  static override readonly reason = "NO_TARGET";
}

/** The connection broke or could not be made; no server reports this error. */
export class ConnectionLostError extends TryAgainError {}

/** The call's deadline passed: resume with a later deadline. */
export class DeadlineError extends PacelineError {
  static override readonly code = "DEADLINE_EXCEEDED";
  static override readonly reason: string = "DEADLINE";
}

/** The client read nothing for too long: resume, and read faster. */
export class SlowConsumerError extends DeadlineError {
  static override readonly reason = "SLOW_CONSUMER";
}

/** The caller went away; `cause` is the abort signal's reason, where there was one. */
export class ClientCancelledError extends PacelineError {
  static override readonly code = "CANCELLED";
  static override readonly reason = "CLIENT_CANCELLED";
}

/** The stream was stopped before it could break a promise: report it. */
export class InvariantViolatedError extends PacelineError {
  static override readonly code = "DATA_LOSS";
  static override readonly reason = "INVARIANT_VIOLATED";
}

/** A bug: report it. The server's log has it under the request id. */
export class InternalError extends PacelineError {
  static override readonly reason = "INTERNAL";
}

/** Every class that has a reason, by its reason. */
export const ERROR_CLASSES: ReadonlyMap<string, ErrorClass> = new Map(
  [
    InvalidFieldError,
    ContextLengthExceededError,
    MalformedRequestError,
    UnsupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    SessionNotFoundError,
    PrefixNotHeldError,
    PrefixMismatchError,
    StaleCallError,
    SupersededError,
    ModelMismatchError,
    ModelNotFoundError,
    TokenizerMismatchError,
    CacheExhaustedError,
    OverloadedError,
    LoadingError,
    DrainingError,
    NoTargetError,
    DeadlineError,
    SlowConsumerError,
    ClientCancelledError,
    InvariantViolatedError,
    InternalError,
  ].map((errorClass): [string, ErrorClass] => [errorClass.reason, errorClass]),
);
