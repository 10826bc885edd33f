/** A generation's options in JavaScript's types, and the wire's request from them. */

import { InvalidFieldError } from "./errors.js";
import * as wire from "./generated/paceline/v1/orchestrator_service.js";
import {
  VerificationRule as VerificationRules,
  type Grammar as WireGrammar,
} from "./generated/paceline/v1/sampling.js";
import {
  DISPATCH_POLICIES,
  type DispatchPolicy,
  DRAFTER_KINDS,
  type DrafterKind,
  STRATEGIES,
  type Strategy,
  VERIFICATION_RULES,
  type VerificationRule,
} from "./generation.js";

/** Token ids, each in [0, 2^32). */
export type TokenIds = readonly number[] | Uint32Array;

/** Text, or token ids. */
export type Prompt = string | TokenIds;

/**
 * All options of a generation. An option that is left out has the server's default.
 *
 * Limits are checked by the server, and reported as `InvalidFieldError`.
 */
export interface GenerateOptions {
  /** Most tokens to generate. Default 256, or fewer if the context has less room. */
  maxTokens?: number | undefined;
  /** End before the first of these strings. */
  stop?: string | readonly string[] | undefined;
  /** 0 (the default) is greedy. */
  temperature?: number | undefined;
  /** Keep the topK most likely tokens; 0 keeps all. */
  topK?: number | undefined;
  /** Keep the fewest likeliest tokens whose probabilities add up to this; 1 keeps all. */
  topP?: number | undefined;
  /** Keep tokens with at least this fraction of the likeliest token's probability. */
  minP?: number | undefined;
  /** Numbers in [-100, 100] to add to the logits of token ids. */
  logitBias?: Readonly<Record<number, number>> | undefined;
  /** Taken once from the logit of each token that the answer has already. */
  presencePenalty?: number | undefined;
  /** Taken from it for each time that the answer has the token. */
  frequencyPenalty?: number | undefined;
  /** Makes tokens of prompt and answer less likely if above 1, the default. */
  repetitionPenalty?: number | undefined;
  /** The text does not end by itself before it has so many tokens. */
  minTokens?: number | undefined;
  /** What the text has to follow, from its first token to its end. */
  grammar?: Grammar | undefined;
  /**
   * The same seed gives the same text, with every strategy. In [0, 2^53). Default: chosen,
   * and told in `started`.
   */
  seed?: number | undefined;
  /** Default "auto". */
  strategy?: Strategy | undefined;
  /** Draft tokens in a verification. Default: the planner's choice. */
  lookahead?: number | undefined;
  /** Most targets to use. Default: the planner's choice. */
  targets?: number | undefined;
  /** Most drafters to use. Default 1. */
  drafters?: number | undefined;
  /**
   * Number of tokens that drafters find at a position: with 2 or more, targets judge trees, and
   * corrections are found ahead. Default 1; with AUTO the planner's choice.
   */
  width?: number | undefined;
  /** Number of runners-up that each drafter forward also extends. Default 0. */
  branches?: number | undefined;
  /** The drafter. Default: servers, and Max-Gram while there is no drafter server. */
  drafter?: DrafterKind | undefined;
  /** The promise about the output. Default "exact". */
  rule?: VerificationRule | undefined;
  /** When blocks are sent to targets, and whether SI drafts ahead. Default "work_conserving". */
  dispatch?: DispatchPolicy | undefined;
  /** Continue after an end-of-text token. */
  ignoreEos?: boolean | undefined;
  /** Return each token's log probability. */
  logprobs?: boolean | undefined;
  /** Number of likeliest tokens to return at each position, at most 20. */
  topLogprobs?: number | undefined;
  /**
   * Return each prompt token's log probability, and so many of the likeliest tokens at its position,
   * at most 20. With it `maxTokens` may be 0.
   */
  promptLogprobs?: number | undefined;
  /** Return the bytes of each token that is told. */
  includeTokenBytes?: boolean | undefined;
  /** Return the prompt's tokens, which `promptLogprobs` also does. */
  includePrompt?: boolean | undefined;
  /** What the answer will probably be: Max-Gram drafts from it. */
  predictedText?: string | undefined;
  /** The name of the LoRA adapter to generate with. Default: none, the model alone. */
  lora?: string | undefined;
  /** Let the tokenizer add its special tokens to a text prompt. Default true. */
  addSpecialTokens?: boolean | undefined;
  /** Parse special tokens written in a text prompt. Default false. */
  parseSpecialTokens?: boolean | undefined;
  /** Put every draft and verification into `finished.timeline`. */
  includeTimeline?: boolean | undefined;
  /** Yield them in `events()` as they happen. */
  streamTimeline?: boolean | undefined;
  /** A name for logs. Default: chosen. */
  requestId?: string | undefined;
  /** Tokens of this generation received earlier; needs their seed. */
  resumeTokenIds?: TokenIds | undefined;
}

/** What a text has to follow: one of these. */
export type Grammar =
  /** A JSON schema: the text is one JSON value. `{ type: "object" }` allows any object. */
  | { jsonSchema: object | string }
  /** A regular expression in the syntax of Rust's crate regex, for the whole text. */
  | { regex: string }
  /** A context-free grammar in llguidance's form of Lark, or in llama.cpp's (GBNF). */
  | { lark: string }
  /** The text is one of these. */
  | { choices: readonly string[] };

/** Says what is wrong with a value, if anything. */
type Check = (value: unknown) => string | undefined;

const CHECKS: Readonly<Record<keyof GenerateOptions, Check>> = {
  maxTokens: uint32,
  stop: textOrTexts,
  temperature: finite,
  topK: uint32,
  topP: finite,
  minP: finite,
  logitBias: biases,
  presencePenalty: finite,
  frequencyPenalty: finite,
  repetitionPenalty: finite,
  minTokens: uint32,
  grammar: grammar,
  seed: integerTo(Number.MAX_SAFE_INTEGER),
  strategy: oneOf(STRATEGIES),
  lookahead: uint32,
  targets: uint32,
  drafters: uint32,
  width: uint32,
  branches: uint32,
  drafter: oneOf(DRAFTER_KINDS),
  rule: oneOf(VERIFICATION_RULES),
  dispatch: oneOf(DISPATCH_POLICIES),
  ignoreEos: flag,
  logprobs: flag,
  topLogprobs: uint32,
  promptLogprobs: uint32,
  includeTokenBytes: flag,
  includePrompt: flag,
  predictedText: text,
  lora: text,
  addSpecialTokens: flag,
  parseSpecialTokens: flag,
  includeTimeline: flag,
  streamTimeline: flag,
  requestId: text,
  resumeTokenIds: tokenIds,
};

/**
 * Build the wire's request.
 *
 * @throws InvalidFieldError A field cannot hold the value; the server checks all other limits.
 * @throws TypeError No option has that name.
 */
export function buildRequest(prompt: Prompt, options: GenerateOptions): wire.GenerateRequest {
  check("prompt", prompt, typeof prompt === "string" ? text : tokenIds);
  checkOptions(options);
  const { stop = [] } = options;
  return {
    prompt:
      typeof prompt === "string"
        ? { $case: "text", value: prompt }
        : { $case: "tokenIds", value: { ids: [...prompt] } },
    addSpecialTokens: options.addSpecialTokens,
    parseSpecialTokens: options.parseSpecialTokens,
    maxTokens: options.maxTokens,
    stopStrings: typeof stop === "string" ? [stop] : [...stop],
    ignoreEos: options.ignoreEos ?? false,
    logprobs: options.logprobs ?? false,
    topLogprobs: options.topLogprobs ?? 0,
    promptLogprobs: options.promptLogprobs,
    includeTokenBytes: options.includeTokenBytes ?? false,
    includePrompt: options.includePrompt ?? false,
    predictedText: options.predictedText ?? "",
    lora: options.lora ?? "",
    sampling: samplingOf(options),
    seed: options.seed,
    strategy: wire.Strategy[`STRATEGY_${upper(options.strategy ?? "unspecified")}`],
    lookahead: options.lookahead,
    targetCount: options.targets,
    drafterCount: options.drafters,
    width: options.width,
    branches: options.branches,
    drafter: wire.DrafterKind[`DRAFTER_KIND_${upper(options.drafter ?? "unspecified")}`],
    verificationRule:
      VerificationRules[`VERIFICATION_RULE_${upper(options.rule ?? "unspecified")}`],
    dispatchPolicy:
      wire.DispatchPolicy[`DISPATCH_POLICY_${upper(options.dispatch ?? "unspecified")}`],
    resumeTokenIds: [...(options.resumeTokenIds ?? [])],
    includeTimeline: options.includeTimeline ?? false,
    streamTimeline: options.streamTimeline ?? false,
    requestId: options.requestId ?? "",
  };
}

function samplingOf(options: GenerateOptions) {
  const given = {
    temperature: options.temperature,
    topK: options.topK,
    topP: options.topP,
    minP: options.minP,
    logitBias: options.logitBias,
    presencePenalty: options.presencePenalty,
    frequencyPenalty: options.frequencyPenalty,
    repetitionPenalty: options.repetitionPenalty,
    minTokens: options.minTokens,
    grammar: options.grammar === undefined ? undefined : grammarOf(options.grammar),
  };
  const isGiven = Object.values(given).some((value) => value !== undefined);
  return isGiven ? { ...given, logitBias: { ...given.logitBias } } : undefined;
}

function grammarOf(given: Grammar): WireGrammar {
  if ("jsonSchema" in given) {
    const { jsonSchema } = given;
    const value = typeof jsonSchema === "string" ? jsonSchema : JSON.stringify(jsonSchema);
    return { definition: { $case: "jsonSchema", value } };
  }
  if ("regex" in given) {
    return { definition: { $case: "regex", value: given.regex } };
  }
  if ("lark" in given) {
    return { definition: { $case: "lark", value: given.lark } };
  }
  return { definition: { $case: "choices", value: { texts: [...given.choices] } } };
}

function checkOptions(options: GenerateOptions): void {
  for (const [name, value] of Object.entries(options)) {
    if (!Object.hasOwn(CHECKS, name)) {
      throw new TypeError(`there is no option ${name}`);
    }
    if (value !== undefined) {
      check(name, value, CHECKS[name as keyof GenerateOptions]);
    }
  }
}

function check(name: string, value: unknown, problemOf: Check): void {
  const problem = problemOf(value);
  if (problem !== undefined) {
    throw InvalidFieldError.of(name, problem);
  }
}

function upper<Word extends string>(word: Word): Uppercase<Word> {
  return word.toUpperCase() as Uppercase<Word>;
}

function uint32(value: unknown): string | undefined {
  return integerTo(2 ** 32 - 1)(value);
}

function integerTo(limit: number): Check {
  return (value) =>
    Number.isInteger(value) && Number(value) >= 0 && Number(value) <= limit
      ? undefined
      : `must be an integer in [0, ${limit}], not ${shown(value)}`;
}

function finite(value: unknown): string | undefined {
  return Number.isFinite(value) ? undefined : `must be a finite number, not ${shown(value)}`;
}

function grammar(value: unknown): string | undefined {
  const names = ["jsonSchema", "regex", "lark", "choices"];
  const given = typeof value === "object" && value !== null ? Object.entries(value) : [];
  const [name, definition] = given[0] ?? ["", undefined];
  if (given.length !== 1 || !names.includes(name)) {
    return `must have one of ${names.join(", ")}`;
  }
  if (name === "choices") {
    return textOrTexts(definition);
  }
  return name === "jsonSchema" && typeof definition !== "string" ? undefined : text(definition);
}

function biases(value: unknown): string | undefined {
  if (typeof value !== "object" || value === null) {
    return `must be an object of token ids and numbers, not ${shown(value)}`;
  }
  const problem = firstProblem(Object.keys(value).map(Number), uint32);
  return problem ?? firstProblem(Object.values(value), finite);
}

function flag(value: unknown): string | undefined {
  return typeof value === "boolean" ? undefined : `must be true or false, not ${shown(value)}`;
}

function text(value: unknown): string | undefined {
  if (typeof value !== "string") {
    return `must be text, not ${shown(value)}`;
  }
  // UTF-8 has no half of a surrogate pair: an encoder would put another character there.
  return /\p{Surrogate}/u.test(value) ? "must be well-formed Unicode" : undefined;
}

function textOrTexts(value: unknown): string | undefined {
  return Array.isArray(value) ? firstProblem(value, text) : text(value);
}

function tokenIds(value: unknown): string | undefined {
  if (value instanceof Uint32Array) {
    return undefined;
  }
  return Array.isArray(value)
    ? firstProblem(value, uint32)
    : `must be token ids, not ${shown(value)}`;
}

function firstProblem(values: readonly unknown[], problemOf: Check): string | undefined {
  for (const value of values) {
    const problem = problemOf(value);
    if (problem !== undefined) {
      return problem;
    }
  }
  return undefined;
}

function oneOf(words: readonly string[]): Check {
  return (value) =>
    typeof value === "string" && words.includes(value)
      ? undefined
      : `must be one of ${words.join(", ")}, not ${shown(value)}`;
}

/** Show a value in a message; an object, which could be large, by its kind. */
function shown(value: unknown): string {
  return typeof value === "object" && value !== null ? value.constructor.name : String(value);
}
