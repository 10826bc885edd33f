/**
 * A generation's messages as plain data, without protobuf.
 *
 * Names, units and meanings are those of orchestrator_service.proto. Positions are absolute: they
 * count the prompt.
 */

export const STRATEGIES = [
  "auto",
  "autoregressive",
  "speculative",
  "distributed",
  "self_speculative",
] as const;
export const VERIFICATION_RULES = ["exact", "rejection"] as const;
export const DISPATCH_POLICIES = ["work_conserving", "blocks"] as const;
export const DRAFTER_KINDS = ["server", "max_gram", "server_and_max_gram"] as const;
export const FINISH_REASONS = ["length", "eos", "stop_string"] as const;
export const TOKEN_ORIGINS = ["accepted_draft", "target"] as const;
export const TIMELINE_EVENT_KINDS = [
  "drafted",
  "verifying",
  "accepted",
  "corrected",
  "discarded",
  "cancelled",
] as const;

/** How a request is decoded. The output is the same with every strategy. */
export type Strategy = (typeof STRATEGIES)[number];
/** The promise about the output: the target's own tokens for the seed, or its distribution. */
export type VerificationRule = (typeof VERIFICATION_RULES)[number];
/** The drafter, for strategies that need one. */
export type DrafterKind = (typeof DRAFTER_KINDS)[number];
/** When draft tokens are sent to targets. */
export type DispatchPolicy = (typeof DISPATCH_POLICIES)[number];
/** Why a generation ended. */
export type FinishReason = (typeof FINISH_REASONS)[number];
/** The origin of a token: an accepted draft token, or the target's own token. */
export type TokenOrigin = (typeof TOKEN_ORIGINS)[number];
/** The kind of a timeline event. */
export type TimelineEventKind = (typeof TIMELINE_EVENT_KINDS)[number];
/** A word of the list, or a value of a newer server that this client does not know. */
export type OrUnknown<Word extends string> = Word | "unknown";

/** The first message of a generation, before any token. */
export interface Started {
  readonly requestId: string;
  /** The seed in use; the same seed gives the same text again. */
  readonly seed: number;
  readonly modelFingerprint: string;
  /** The strategy in use; never "auto". */
  readonly strategy: OrUnknown<Strategy>;
  /** The promise about the output. */
  readonly promise: OrUnknown<VerificationRule>;
  readonly promptTokenCount: number;
  readonly lookahead: number;
  readonly targetCount: number;
  /** The reason for the choice of "auto", in one line; empty without "auto". */
  readonly planNote: string;
  /** Number of tokens that drafters find at a position; 1: chains. */
  readonly width: number;
  /** Number of runners-up that each drafter forward also extends. */
  readonly branches: number;
}

/** A token, and the natural logarithm of its probability. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
  /** If requested. */
  readonly tokenBytes?: Uint8Array;
}

/**
 * Tokens of the prompt, and if requested how likely the target thinks each of them. `logprobs`,
 * `topLogprobs` and `tokenBytes` have one entry for each token, if they were requested. The prompt's
 * first token comes in a chunk of its own, without the first two.
 */
export interface PromptChunk {
  readonly position: number;
  readonly tokenIds: readonly number[];
  readonly tokenBytes: readonly Uint8Array[];
  readonly logprobs: readonly number[];
  readonly topLogprobs: readonly (readonly TokenLogprob[])[];
}

/**
 * Final tokens and their text. `origins` and `textLengths` (the characters, as Unicode code points,
 * that the token adds to `text`) have one entry for each token. So have, if requested, `logprobs`
 * and `topLogprobs`: the likeliest tokens at the position, the likeliest first.
 */
export interface Chunk {
  readonly type: "chunk";
  readonly position: number;
  readonly tokenIds: readonly number[];
  readonly text: string;
  readonly logprobs: readonly number[];
  readonly topLogprobs: readonly (readonly TokenLogprob[])[];
  readonly origins: readonly OrUnknown<TokenOrigin>[];
  readonly textLengths: readonly number[];
  /** If requested: the bytes of each token. */
  readonly tokenBytes: readonly Uint8Array[];
}

/** A draft, a verification or its result; times are ns since the request arrived. */
export interface TimelineEvent {
  readonly type: "timeline";
  readonly kind: OrUnknown<TimelineEventKind>;
  readonly server: string;
  readonly startNs: number;
  readonly endNs: number;
  readonly position: number;
  readonly tokenIds: readonly number[];
  readonly callId: number;
  readonly speculationDepth: number;
  /** Tokens beside the chain in a draft or a verification. */
  readonly branchTokenCount: number;
  /** Whether the event is a verification of tokens beside the chain. */
  readonly isBranch: boolean;
}

/** Tokens in the prompt, and tokens generated, resumed ones included. */
export interface Usage {
  readonly promptTokenCount: number;
  readonly completionTokenCount: number;
  /** Prompt tokens that a target had computed before, for an earlier request of this client. */
  readonly cachedPromptTokenCount: number;
}

/** Times and counts of a generation; of a resumed generation, of its last part. */
export interface Statistics {
  readonly targetForwardCount: number;
  readonly drafterForwardCount: number;
  readonly draftedTokenCount: number;
  readonly acceptedTokenCount: number;
  readonly rejectedTokenCount: number;
  readonly discardedTokenCount: number;
  readonly acceptanceRate: number;
  readonly cancelledRpcCount: number;
  /** Deviations from the plan, counted, such as "target_lost" or a newer "fallback 12". */
  readonly fallbacks: Readonly<Record<string, number>>;
  readonly queueNs: number;
  readonly forwardNs: number;
  readonly networkNs: number;
  readonly timeToFirstTokenNs: number;
  readonly totalNs: number;
  /** Corrections that were among the tokens beside a drafter's chain. */
  readonly correctionsAheadCount: number;
  /** Judged tokens beside the chains. */
  readonly branchTokenCount: number;
  /** The ones that became output. */
  readonly branchAcceptedCount: number;
  /** Draft tokens that Max-Gram found in the text. */
  readonly maxGramDraftedTokenCount: number;
  /** The ones that became output. */
  readonly maxGramAcceptedTokenCount: number;
  /** The drafters' forwards by model; a stack's largest model comes first. */
  readonly drafterModels: readonly ModelForwards[];
  /**
   * SWI: the new tokens at the mean time of a target's forward, over the time in all forwards; 0
   * if calls were withdrawn, so that it is not known.
   */
  readonly walltimeImprovement: number;
  /** Tokens of `predictedText`. */
  readonly predictedTokenCount: number;
  /** Tokens of the answer that were drafted from it. */
  readonly predictedAcceptedTokenCount: number;
  /** Draft tokens that a grammar forced, without a forward. */
  readonly forcedDraftedTokenCount: number;
  /** Tokens of the answer that a grammar had forced. */
  readonly forcedAcceptedTokenCount: number;
}

/** The forwards of one model. */
export interface ModelForwards {
  readonly modelName: string;
  readonly forwardCount: number;
  /** Time in these forwards. */
  readonly forwardNs: number;
}

/** The end of a generation; `timeline` is empty unless it was requested. */
export interface Finished {
  readonly finishReason: OrUnknown<FinishReason>;
  readonly stopString: string;
  readonly promise: OrUnknown<VerificationRule>;
  readonly lookahead: number;
  readonly targetsUsed: number;
  readonly usage: Usage;
  readonly statistics: Statistics;
  readonly timeline: readonly TimelineEvent[];
}

/** A whole generation. */
export interface Completion {
  readonly started: Started;
  readonly chunks: readonly Chunk[];
  readonly finished: Finished;
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** Tokens from before the last part of a resumed generation. */
  readonly resumedTokenCount: number;
  /** The prompt's tokens, with `promptLogprobs` or `includePrompt`. */
  readonly promptChunks: readonly PromptChunk[];
}

/** A model server, as the orchestrator describes it. */
export interface ServerInfo {
  readonly name: string;
  readonly address: string;
  /** "drafter" or "target"; a newer one is "role 12". */
  readonly role: string;
  readonly ready: boolean;
  /** Why it is not ready, in one line. */
  readonly status: string;
  readonly modelFingerprint: string;
  readonly decodeStepNs: number;
  /** The kind of adapter with which it drafts for itself, such as "medusa". */
  readonly selfDraftKind: string;
  /** Whether its logits for a sequence depend on this sequence alone, bit by bit. */
  readonly isInvariant: boolean;
  /**
   * "used", "resting", or in one word why the server is not used, such as "other_dtype"; a newer
   * word is "standing 99". Empty: the orchestrator is older than this field.
   */
  readonly standing: string;
  /** The rest of a sentence that begins with the server's name; may be empty. */
  readonly standingDetail: string;
}

/** The models and servers of an orchestrator. */
export interface SystemInfo {
  readonly version: string;
  readonly modelName: string;
  readonly modelFingerprint: string;
  readonly tokenizerFingerprint: string;
  readonly vocabularySize: number;
  readonly contextLength: number;
  readonly servers: readonly ServerInfo[];
  readonly runningRequestCount: number;
}
