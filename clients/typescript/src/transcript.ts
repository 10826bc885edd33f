/** The received part of a generation, and the request for the missing part: no I/O here. */

import { InvariantViolatedError, ModelMismatchError } from "./errors.js";
import type {
  GenerateRequest,
  GenerateResponse,
} from "./generated/paceline/v1/orchestrator_service.js";
import type {
  Chunk,
  Completion,
  Finished,
  PromptChunk,
  Started,
  TimelineEvent,
} from "./generation.js";
import {
  readChunk,
  readFinished,
  readPromptChunk,
  readStarted,
  readTimelineEvent,
} from "./responses.js";

/**
 * A request and its answer, which can come over several streams.
 *
 * Invariant: each chunk starts at the absolute position where the one
 * before ended, and none is missing at the end. A stream that breaks this rule ends in an error,
 * never in a gap or a duplicate.
 */
export class Transcript {
  readonly #request: GenerateRequest;
  #started: Started | undefined;
  #finished: Finished | undefined;
  #chunks: Chunk[] = [];
  #promptChunks: PromptChunk[] = [];
  #nextPosition = 0;
  #resumedCount = 0; // tokens that the current stream did not have to send

  constructor(request: GenerateRequest) {
    this.#request = request;
  }

  get started(): Started | undefined {
    return this.#started;
  }

  get finished(): Finished | undefined {
    return this.#finished;
  }

  /** The prompt's tokens, if they were asked for: all of them, once there is a chunk. */
  get promptChunks(): readonly PromptChunk[] {
    return this.#promptChunks;
  }

  get chunks(): readonly Chunk[] {
    return this.#chunks;
  }

  /** Return the request for the missing part. */
  nextRequest(): GenerateRequest {
    if (this.#started === undefined) {
      return this.#request;
    }
    const resumeTokenIds = [...this.#request.resumeTokenIds, ...tokenIdsOf(this.#chunks)];
    const seed = this.#started.seed;
    // Chunks come after all of the prompt.
    const isPromptKnown = this.#chunks.length > 0;
    const promptLogprobs = isPromptKnown ? undefined : this.#request.promptLogprobs;
    const includePrompt = this.#request.includePrompt && !isPromptKnown;
    return { ...this.#request, seed, resumeTokenIds, promptLogprobs, includePrompt };
  }

  /**
   * Add a message, and return the event for the caller, if any.
   *
   * @throws ModelMismatchError The resumed stream comes from another model.
   * @throws InvariantViolatedError Tokens are missing or come twice.
   */
  add({ event }: GenerateResponse): Chunk | TimelineEvent | undefined {
    switch (event?.$case) {
      case "started":
        this.#start(readStarted(event.value));
        return undefined;
      case "promptChunk":
        this.#appendPrompt(readPromptChunk(event.value));
        return undefined;
      case "chunk":
        return this.#append(readChunk(event.value));
      case "timelineEvent":
        return readTimelineEvent(event.value);
      case "finished":
        this.#finish(readFinished(event.value));
        return undefined;
      default:
        return undefined; // a newer server's
    }
  }

  /**
   * Return the whole completion.
   *
   * @throws InvariantViolatedError The server closed the stream without its last message.
   */
  completion(): Completion {
    if (this.#started === undefined || this.#finished === undefined) {
      throw new InvariantViolatedError("the stream ended before its last message");
    }
    return {
      started: this.#started,
      chunks: [...this.#chunks],
      promptChunks: [...this.#promptChunks],
      finished: this.#finished,
      text: this.#chunks.map((chunk) => chunk.text).join(""),
      tokenIds: tokenIdsOf(this.#chunks),
      resumedTokenCount: this.#resumedCount,
    };
  }

  /** Return a copy that another generation continues. */
  branch(): Transcript {
    const twin = new Transcript(this.#request);
    twin.#started = this.#started;
    twin.#finished = this.#finished;
    twin.#chunks = [...this.#chunks];
    twin.#promptChunks = [...this.#promptChunks];
    twin.#nextPosition = this.#nextPosition;
    twin.#resumedCount = this.#resumedCount;
    return twin;
  }

  #start(started: Started): void {
    const before = this.#started;
    if (before === undefined) {
      this.#nextPosition = started.promptTokenCount + this.#request.resumeTokenIds.length;
    } else if (before.modelFingerprint !== started.modelFingerprint) {
      throw new ModelMismatchError(
        "the stream was resumed with another model: " +
          `${started.modelFingerprint} instead of ${before.modelFingerprint}`,
      );
    }
    this.#started = started;
    this.#resumedCount = tokenIdsOf(this.#chunks).length;
  }

  /** Add tokens of the prompt; a stream that was resumed before the answer tells them anew. */
  #appendPrompt(chunk: PromptChunk): void {
    const before = chunk.position === 0 ? [] : this.#promptChunks;
    const last = before.at(-1);
    const due = last === undefined ? 0 : last.position + last.tokenIds.length;
    if (chunk.position !== due) {
      throw new InvariantViolatedError(
        `tokens of the prompt at position ${chunk.position} came where ${due} was due`,
      );
    }
    before.push(chunk);
    this.#promptChunks = before;
  }

  #append(chunk: Chunk): Chunk {
    if (this.#started === undefined) {
      throw new InvariantViolatedError("tokens came before the first message");
    }
    if (chunk.position !== this.#nextPosition) {
      throw new InvariantViolatedError(
        `tokens at position ${chunk.position} came where ${this.#nextPosition} was due`,
      );
    }
    this.#nextPosition += chunk.tokenIds.length;
    this.#chunks.push(chunk);
    return chunk;
  }

  #finish(finished: Finished): void {
    const { promptTokenCount, completionTokenCount } = finished.usage;
    const end = promptTokenCount + completionTokenCount;
    if (end !== this.#nextPosition) {
      throw new InvariantViolatedError(
        `the stream ended at position ${this.#nextPosition} instead of ${end}`,
      );
    }
    this.#finished = finished;
  }
}

function tokenIdsOf(chunks: readonly Chunk[]): number[] {
  return chunks.flatMap((chunk) => chunk.tokenIds);
}
