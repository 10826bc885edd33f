/**
 * What a client hears of a generation: plain data, without protobuf.
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

/** How a request is decoded. The output is the same with every one. */
export type Strategy = (typeof STRATEGIES)[number];
/** What the output promises: the target's own tokens for the seed, or its distribution. */
export type VerificationRule = (typeof VERIFICATION_RULES)[number];
/** Who drafts, where a strategy has work for a drafter. */
export type DrafterKind = (typeof DRAFTER_KINDS)[number];
/** When draft tokens are sent to targets. */
export type DispatchPolicy = (typeof DISPATCH_POLICIES)[number];
/** Why a generation ended. */
export type FinishReason = (typeof FINISH_REASONS)[number];
/** Where a token came from: a drafter's guess, or the target itself. */
export type TokenOrigin = (typeof TOKEN_ORIGINS)[number];
/** What a timeline event tells of. */
export type TimelineEventKind = (typeof TIMELINE_EVENT_KINDS)[number];
/** A word of the list, or what a newer server says and this client has no word for. */
export type OrUnknown<Word extends string> = Word | "unknown";

/** What the generation will be; told before any token. */
export interface Started {
  readonly requestId: string;
  /** The seed in use: with it the same text can be had again. */
  readonly seed: number;
  readonly modelFingerprint: string;
  /** The strategy in use; never "auto". */
  readonly strategy: OrUnknown<Strategy>;
  /** What the output promises. */
  readonly promise: OrUnknown<VerificationRule>;
  readonly promptTokenCount: number;
  readonly lookahead: number;
  readonly targetCount: number;
  /** Why "auto" chose so, in one line; else empty. */
  readonly planNote: string;
  /** How many tokens drafters find at a place; 1: chains. */
  readonly width: number;
  /** How many tokens beside the likeliest ones each drafter forward follows. */
  readonly branches: number;
}

/** A token, and the natural logarithm of its probability. */
export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
}

/**
 * Final tokens and their text. `origins` and `textLengths` (the characters of `text`, as Unicode code
 * points, that it adds) have one for each and, if asked for, `logprobs` and `topLogprobs`: what was
 * likeliest at its place, the likeliest first.
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
}

/** A draft, a verification, or what became of them, in ns since the request arrived. */
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
  /** Tokens beside the chain that a draft found, or a verification judges. */
  readonly branchTokenCount: number;
  /** Whether it is a verification of what is beside the chain. */
  readonly isBranch: boolean;
}

/** Tokens in the prompt, and tokens generated, resumed ones included. */
export interface Usage {
  readonly promptTokenCount: number;
  readonly completionTokenCount: number;
  /** Of the prompt's, those that a target had computed before, for an earlier request of this client. */
  readonly cachedPromptTokenCount: number;
}

/** What it took. Of a resumed generation: what its last part took. */
export interface Statistics {
  readonly targetForwardCount: number;
  readonly drafterForwardCount: number;
  readonly draftedTokenCount: number;
  readonly acceptedTokenCount: number;
  readonly rejectedTokenCount: number;
  readonly discardedTokenCount: number;
  readonly acceptanceRate: number;
  readonly cancelledRpcCount: number;
  /** What had to be done differently, such as "target_lost" or a newer "fallback 12"; how often. */
  readonly fallbacks: Readonly<Record<string, number>>;
  readonly queueNs: number;
  readonly forwardNs: number;
  readonly networkNs: number;
  readonly timeToFirstTokenNs: number;
  readonly totalNs: number;
  /** Corrections that a drafter had found beside its chain. */
  readonly correctionsAheadCount: number;
  /** Tokens beside the chains that targets judged. */
  readonly branchTokenCount: number;
  /** Those of them that became output. */
  readonly branchAcceptedCount: number;
  /** Of the draft tokens, those that Max-Gram found in the text. */
  readonly maxGramDraftedTokenCount: number;
  /** Those of them that became output. */
  readonly maxGramAcceptedTokenCount: number;
  /** The drafters' forwards by model, of a stack the largest model first. */
  readonly drafterModels: readonly ModelForwards[];
  /**
   * SWI: the new tokens at the mean time of a target's forward, over the time in all forwards; 0
   * where it is not known, since calls were withdrawn.
   */
  readonly walltimeImprovement: number;
}

/** What a model ran. */
export interface ModelForwards {
  readonly modelName: string;
  readonly forwardCount: number;
  /** Time in these forwards. */
  readonly forwardNs: number;
}

/** The end of a generation; `timeline` is there if asked for. */
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
  /** Of a resumed generation: tokens from before its last part. */
  readonly resumedTokenCount: number;
}

/** A model server as the orchestrator sees it. */
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
  /** What it drafts for itself with, such as "medusa"; empty if it does not. */
  readonly selfDraftKind: string;
  /** Whether its choices are the same bit by bit, whatever it computes beside. */
  readonly isInvariant: boolean;
  /**
   * In one word whether it is "used", "resting", or not used and why, such as "other_dtype"; a newer
   * one is "standing 99". Empty: the orchestrator is too old to say.
   */
  readonly standing: string;
  /** More on that, for people, mostly about "it"; may be empty. */
  readonly standingDetail: string;
}

/** What an orchestrator works with. */
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
