/** An OrchestratorService without models: token p is p and reads "p ", so gaps are seen. */

import { EventEmitter, once } from "node:events";
import {
  Metadata,
  Server,
  ServerCredentials,
  type ServerWritableStream,
  status,
} from "@grpc/grpc-js";
import type { PacelineError } from "#dist/errors.js";
import * as wire from "#dist/generated/paceline/v1/orchestrator_service.js";
import { VerificationRule } from "#dist/generated/paceline/v1/sampling.js";
import {
  BadRequest,
  type Detail,
  ErrorInfo,
  RetryInfo,
  Status,
} from "#dist/generated/status_details.js";

export const PROMPT_LENGTH = 3;
export const SEED = 7;

type Call = ServerWritableStream<wire.GenerateRequest, wire.GenerateResponse>;

/** How one call of Generate goes: normally, or with what is set here. */
export interface Leg {
  /** Raised after `chunks` chunks. */
  readonly error?: PacelineError;
  /** Raised before anything else. */
  readonly refusal?: PacelineError;
  /** After how many chunks the error or the hanging comes. Default 0. */
  readonly chunks?: number;
  /** Says nothing any more after `chunks` chunks. */
  readonly hangs?: boolean;
  /** Says nothing at all. */
  readonly silent?: boolean;
  readonly fingerprint?: string;
  /** Added to positions: a broken server. */
  readonly shift?: number;
  readonly omitsFinish?: boolean;
  /** Follows each token's text. */
  readonly padding?: string;
}

/** Serves Generate by its script, one leg for each call, and remembers what it was asked. */
export class ScriptedServer implements AsyncDisposable {
  readonly requests: wire.GenerateRequest[] = [];
  /** The connection that each request came by. */
  readonly peers: string[] = [];
  readonly #events = new EventEmitter();
  readonly #server = new Server();
  readonly #script: Leg[];
  address = "";
  cancelledCount = 0;
  sentCount = 0;

  private constructor(script: readonly Leg[]) {
    this.#script = [...script];
    this.#server.addService(wire.OrchestratorServiceService, {
      generate: (call: Call) => void this.#generate(call),
      getSystemInfo: (_: unknown, answer: (error: null, response: object) => void) =>
        answer(null, wire.GetSystemInfoResponse.create({ version: "1", modelName: "scripted" })),
    });
  }

  static async start(
    script: readonly Leg[] = [],
    credentials = ServerCredentials.createInsecure(),
  ): Promise<ScriptedServer> {
    const scripted = new ScriptedServer(script);
    const port = await new Promise<number>((resolve, reject) => {
      scripted.#server.bindAsync("127.0.0.1:0", credentials, (error, bound) =>
        error ? reject(error) : resolve(bound),
      );
    });
    scripted.address = `127.0.0.1:${port}`;
    return scripted;
  }

  /** Wait until this many calls have been cancelled. */
  async cancelled(count = 1): Promise<void> {
    while (this.cancelledCount < count) {
      await once(this.#events, "cancelled");
    }
  }

  /** Wait until this many calls have arrived. */
  async called(count = 1): Promise<void> {
    while (this.requests.length < count) {
      await once(this.#events, "called");
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#server.forceShutdown();
  }

  async #generate(call: Call): Promise<void> {
    const leg = this.#script.shift() ?? {};
    call.on("cancelled", () => {
      this.cancelledCount += 1;
      this.#events.emit("cancelled");
    });
    this.requests.push(call.request);
    this.peers.push(call.getPeer());
    this.#events.emit("called");
    if (leg.silent) {
      return;
    }
    if (leg.refusal) {
      call.emit("error", { code: codeOf(leg.refusal), metadata: trailersOf(leg.refusal) });
      return;
    }
    for (const event of answerOf(call.request, leg)) {
      await new Promise((resolve) => call.write({ event }, resolve));
      this.sentCount += 1;
    }
    if (leg.error) {
      call.emit("error", { code: codeOf(leg.error), metadata: trailersOf(leg.error) });
    } else if (!leg.hangs) {
      call.end();
    }
  }
}

function* answerOf(
  request: wire.GenerateRequest,
  leg: Leg,
): Generator<wire.GenerateResponse["event"]> {
  yield { $case: "started", value: startedOf(request, leg) };
  const received = request.resumeTokenIds.length;
  const total = request.maxTokens ?? 5;
  const breaks = leg.hangs || leg.error !== undefined;
  const end = breaks ? Math.min(total, received + (leg.chunks ?? 0)) : total;
  for (let index = received; index < end; index += 1) {
    yield { $case: "chunk", value: chunkOf(PROMPT_LENGTH + index, leg) };
    if (request.streamTimeline) {
      const kind = wire.TimelineEventKind.TIMELINE_EVENT_KIND_DRAFTED;
      yield { $case: "timelineEvent", value: wire.TimelineEvent.create({ kind, server: "d-0" }) };
    }
  }
  if (!breaks && !leg.omitsFinish) {
    yield { $case: "finished", value: finishedOf(total) };
  }
}

function startedOf(request: wire.GenerateRequest, leg: Leg): wire.GenerationStarted {
  return wire.GenerationStarted.create({
    requestId: request.requestId || "r-1",
    seed: request.seed ?? SEED,
    modelFingerprint: leg.fingerprint ?? "model-a",
    strategy: wire.Strategy.STRATEGY_DISTRIBUTED,
    promise: VerificationRule.VERIFICATION_RULE_EXACT,
    promptTokenCount: PROMPT_LENGTH,
  });
}

function chunkOf(position: number, leg: Leg): wire.GenerationChunk {
  return wire.GenerationChunk.create({
    position: position + (leg.shift ?? 0),
    tokenIds: [position],
    text: `${position} ${leg.padding ?? ""}`,
    origins: [wire.TokenOrigin.TOKEN_ORIGIN_ACCEPTED_DRAFT],
  });
}

function finishedOf(total: number): wire.GenerationFinished {
  return wire.GenerationFinished.create({
    finishReason: wire.FinishReason.FINISH_REASON_LENGTH,
    promptTokenCount: PROMPT_LENGTH,
    completionTokenCount: total,
    statistics: {
      targetForwardCount: total,
      fallbacks: [{ kind: wire.FallbackKind.FALLBACK_KIND_TARGET_LOST, count: 1 }],
    },
  });
}

function codeOf(error: PacelineError): status {
  return status[error.code as keyof typeof status];
}

/** Put an error into the trailers, as a server does. */
export function trailersOf(error: PacelineError): Metadata {
  const { reason, metadata, retryAfterSeconds: seconds } = error;
  const details = [
    detailOf(
      "ErrorInfo",
      ErrorInfo.encode({ reason, domain: "paceline", metadata: { ...metadata } }),
    ),
    detailOf("BadRequest", BadRequest.encode({ fieldViolations: [...error.violations] })),
  ];
  if (seconds !== undefined) {
    const whole = Math.floor(seconds);
    const retryDelay = { seconds: whole, nanos: Math.round(1e9 * (seconds - whole)) };
    details.push(detailOf("RetryInfo", RetryInfo.encode({ retryDelay })));
  }
  const trailers = new Metadata();
  const bytes = Status.encode({ message: error.message, details }).finish();
  trailers.set("grpc-status-details-bin", Buffer.from(bytes));
  return trailers;
}

function detailOf(name: string, message: { finish(): Uint8Array }): Detail {
  return {
    typeUrl: `type.googleapis.com/google.rpc.${name}`,
    value: Buffer.from(message.finish()),
  };
}
