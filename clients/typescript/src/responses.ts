/** Reads the wire's messages into the client's data. */

import { ModelRole } from "./generated/paceline/v1/model_service.js";
import * as wire from "./generated/paceline/v1/orchestrator_service.js";
import { type LikeliestTokens, VerificationRule } from "./generated/paceline/v1/sampling.js";
import {
  type Chunk,
  FINISH_REASONS,
  type Finished,
  type OrUnknown,
  type PromptChunk,
  STRATEGIES,
  type Started,
  type Statistics,
  type SystemInfo,
  TIMELINE_EVENT_KINDS,
  type TimelineEvent,
  TOKEN_ORIGINS,
  type TokenLogprob,
  VERIFICATION_RULES,
} from "./generation.js";

/** Read the first message. */
export function readStarted(message: wire.GenerationStarted): Started {
  return { ...message, strategy: strategy(message.strategy), promise: promise(message.promise) };
}

/** Read final tokens. */
export function readChunk(message: wire.GenerationChunk): Chunk {
  const origins = message.origins.map(origin);
  return { type: "chunk", ...message, origins, topLogprobs: message.topLogprobs.map(likeliest) };
}

/** Read tokens of the prompt. */
export function readPromptChunk(message: wire.PromptChunk): PromptChunk {
  return { ...message, topLogprobs: message.topLogprobs.map(likeliest) };
}

function likeliest({ tokenIds, logprobs, tokenBytes }: LikeliestTokens): TokenLogprob[] {
  return tokenIds.map((tokenId, rank) => {
    const told = { tokenId, logprob: logprobs[rank] ?? Number.NaN };
    const bytes = tokenBytes[rank];
    return bytes === undefined ? told : { ...told, tokenBytes: bytes };
  });
}

/** Read a timeline event. */
export function readTimelineEvent(message: wire.TimelineEvent): TimelineEvent {
  return { type: "timeline", ...message, kind: timelineEventKind(message.kind) };
}

/** Read the last message. */
export function readFinished(message: wire.GenerationFinished): Finished {
  const { promptTokenCount, completionTokenCount, cachedPromptTokenCount, ...rest } = message;
  return {
    ...rest,
    finishReason: finishReason(message.finishReason),
    promise: promise(message.promise),
    usage: { promptTokenCount, completionTokenCount, cachedPromptTokenCount },
    statistics: readStatistics(message.statistics ?? wire.GenerationStatistics.create()),
    timeline: message.timeline.map(readTimelineEvent),
  };
}

/** Read the models and servers of an orchestrator. */
export function readSystemInfo(message: wire.GetSystemInfoResponse): SystemInfo {
  const servers = message.servers.map((server) => ({
    ...server,
    role: role(server.role),
    standing: server.standing === 0 ? "" : standing(server.standing),
  }));
  return { ...message, servers };
}

function readStatistics(message: wire.GenerationStatistics): Statistics {
  const fallbacks = message.fallbacks.map(
    ({ kind, count }) => [fallbackKind(kind), count] as const,
  );
  return { ...message, fallbacks: Object.fromEntries(fallbacks) };
}

const strategy = wordsOf(STRATEGIES, wire.Strategy, "STRATEGY_");
const promise = wordsOf(VERIFICATION_RULES, VerificationRule, "VERIFICATION_RULE_");
const origin = wordsOf(TOKEN_ORIGINS, wire.TokenOrigin, "TOKEN_ORIGIN_");
const finishReason = wordsOf(FINISH_REASONS, wire.FinishReason, "FINISH_REASON_");
const timelineEventKind = wordsOf(
  TIMELINE_EVENT_KINDS,
  wire.TimelineEventKind,
  "TIMELINE_EVENT_KIND_",
);
const fallbackKind = namesOf(wire.FallbackKind, "FALLBACK_KIND_", "fallback");
const role = namesOf(ModelRole, "MODEL_ROLE_", "role");
const standing = namesOf(wire.ServerStanding, "SERVER_STANDING_", "standing");

/** Make the reader of an enum: from a number of the wire to a word. */
function wordsOf<Word extends string, Prefix extends string>(
  words: readonly Word[],
  numbers: Readonly<Record<`${Prefix}${Uppercase<Word>}`, number>>,
  prefix: Prefix,
): (number: number) => OrUnknown<Word> {
  const numberOf = (word: Word) =>
    numbers[`${prefix}${word.toUpperCase() as Uppercase<Word>}`] as number;
  const wordOf = new Map(words.map((word) => [numberOf(word), word]));
  return (number) => wordOf.get(number) ?? "unknown";
}

/** Make the reader of an enum: from a number to its name, or a name made of it, as in "role 12". */
function namesOf(
  names: Readonly<Record<number, string>>,
  prefix: string,
  noun: string,
): (number: number) => string {
  return (number) => {
    const name = number === 0 ? undefined : names[number];
    return name?.slice(prefix.length).toLowerCase() ?? `${noun} ${number}`;
  };
}
