import assert from "node:assert/strict";
import { test } from "node:test";
import { inspect } from "node:util";
import { InvalidFieldError } from "#dist/errors.js";
import {
  DispatchPolicy,
  DrafterKind,
  GenerateRequest,
  Strategy,
} from "#dist/generated/paceline/v1/orchestrator_service.js";
import { VerificationRule } from "#dist/generated/paceline/v1/sampling.js";
import { buildRequest, type GenerateOptions } from "#dist/request.js";

/** Build a request from what no type would let through. */
function build(prompt: unknown, options: object = {}): GenerateRequest {
  return buildRequest(prompt as string, options as GenerateOptions);
}

function refused(prompt: unknown, options: object, field: string): void {
  assert.throws(
    () => build(prompt, options),
    (error) => error instanceof InvalidFieldError && error.violations[0]?.field === field,
    inspect(options),
  );
}

test("every option reaches its field", () => {
  const request = buildRequest("def", {
    maxTokens: 1,
    stop: ["a", "b"],
    temperature: 0.5,
    topK: 2,
    topP: 0.75,
    minP: 0.25,
    logitBias: { 7: -1.5 },
    presencePenalty: 0.5,
    frequencyPenalty: -0.5,
    repetitionPenalty: 1.5,
    minTokens: 3,
    grammar: { jsonSchema: { type: "object" } },
    seed: Number.MAX_SAFE_INTEGER,
    strategy: "speculative",
    lookahead: 3,
    targets: 4,
    drafters: 5,
    width: 8,
    branches: 9,
    drafter: "max_gram",
    rule: "rejection",
    dispatch: "blocks",
    ignoreEos: true,
    logprobs: true,
    topLogprobs: 10,
    promptLogprobs: 0,
    includeTokenBytes: true,
    includePrompt: true,
    predictedText: "p",
    lora: "a",
    addSpecialTokens: false,
    parseSpecialTokens: true,
    includeTimeline: true,
    streamTimeline: true,
    requestId: "r",
    resumeTokenIds: new Uint32Array([6, 7]),
  });
  assert.deepEqual(GenerateRequest.decode(GenerateRequest.encode(request).finish()), {
    prompt: { $case: "text", value: "def" },
    maxTokens: 1,
    stopStrings: ["a", "b"],
    sampling: {
      temperature: 0.5,
      topK: 2,
      topP: 0.75,
      minP: 0.25,
      logitBias: { 7: -1.5 },
      presencePenalty: 0.5,
      frequencyPenalty: -0.5,
      repetitionPenalty: 1.5,
      minTokens: 3,
      grammar: { definition: { $case: "jsonSchema", value: '{"type":"object"}' } },
    },
    seed: Number.MAX_SAFE_INTEGER,
    strategy: Strategy.STRATEGY_SPECULATIVE,
    lookahead: 3,
    targetCount: 4,
    drafterCount: 5,
    width: 8,
    branches: 9,
    drafter: DrafterKind.DRAFTER_KIND_MAX_GRAM,
    verificationRule: VerificationRule.VERIFICATION_RULE_REJECTION,
    dispatchPolicy: DispatchPolicy.DISPATCH_POLICY_BLOCKS,
    ignoreEos: true,
    logprobs: true,
    topLogprobs: 10,
    promptLogprobs: 0,
    includeTokenBytes: true,
    includePrompt: true,
    predictedText: "p",
    lora: "a",
    addSpecialTokens: false,
    parseSpecialTokens: true,
    includeTimeline: true,
    streamTimeline: true,
    requestId: "r",
    resumeTokenIds: [6, 7],
  });
});

test("what is left out is left to the server", () => {
  const empty = GenerateRequest.create({ prompt: { $case: "tokenIds", value: { ids: [1] } } });
  assert.deepEqual(
    GenerateRequest.encode(buildRequest([1], {})).finish(),
    GenerateRequest.encode(empty).finish(),
  );
});

test("one stop string needs no list", () => {
  assert.deepEqual(buildRequest("x", { stop: "end" }).stopStrings, ["end"]);
});

test("a value that its field cannot hold is refused with the option's name", () => {
  const bad: Record<string, readonly unknown[]> = {
    maxTokens: [-1, 1.5, 2 ** 32, "5", null, Number.NaN],
    temperature: [Number.NaN, Number.POSITIVE_INFINITY, "0.5"],
    seed: [-1, 2 ** 53, 0.5, 7n],
    strategy: ["fast", "unknown", "unspecified", 3],
    rule: ["EXACT"],
    dispatch: ["unknown"],
    stop: [5, [5], "\ud800"],
    ignoreEos: ["yes", 1],
    requestId: [7, "\udc00"],
    resumeTokenIds: [[-1], "12", Buffer.from([1])],
  };
  for (const [field, values] of Object.entries(bad)) {
    for (const value of values) {
      refused("x", { [field]: value }, field);
    }
  }
});

test("a prompt that is neither text nor token ids is refused", () => {
  for (const prompt of [undefined, null, 5, "\ud800", [0.5], [-1], Buffer.from("x"), {}]) {
    refused(prompt, {}, "prompt");
  }
});

test("an option that does not exist is a mistake of the program", () => {
  assert.throws(() => build("x", { max_tokens: 5 }), TypeError);
  assert.throws(() => build("x", { constructor: 5 }), TypeError);
});
