// One strategy's lane: its text, token by token, with its timeline below.

import { Timeline } from "./timeline.js";

const MARKS = {
  accepted: "accepted draft",
  corrected: "correction: the target's own token instead of a guess",
  own: "target's own token, where no guess stood",
};

/** Shows one generation, live or as a replay. */
export class Lane {
  constructor(strategy, prompt) {
    this.strategy = strategy;
    this.prompt = prompt;
    this.root = copy("lane-template");
    this.figure = copy("timeline-template");
    const isNamed = strategy.abbreviation !== strategy.name;
    this.root.querySelector(".short").textContent = strategy.abbreviation;
    this.root.querySelector(".long").textContent = isNamed ? strategy.name : "";
    this.text = this.root.querySelector(".text");
    this.text.setAttribute("aria-label", `Text of ${strategy.abbreviation}`);
    this.facts = this.root.querySelector(".facts");
    this.figure.querySelector("figcaption").textContent = strategy.abbreviation;
    this.tracks = this.figure.querySelector(".tracks");
    this.timeline = new Timeline(this.tracks);
    this.reset();
  }

  reset() {
    const prompt = document.createElement("span");
    prompt.className = "prompt";
    prompt.textContent = this.prompt;
    this.text.replaceChildren(prompt);
    this.timeline.reset();
    this.tokens = [];
    this.started = null;
    this.finished = null;
    this.rejected = new Set(); // positions at which a guess stood that the target decided against
    this.last = -1; // the position that became final last
    this.say("");
  }

  /** Show one event of the stream, `at` ms after the request. */
  take(name, data, at) {
    this.root.classList.add("running");
    if (name === "started") this.#start(data);
    if (name === "timeline") this.#happen(data);
    if (name === "chunk") this.#append(data, at);
    if (name === "finished") this.#finish(data);
  }

  say(words, isBad = false) {
    this.facts.textContent = words;
    this.facts.classList.toggle("bad", isBad);
  }

  /** Show that the generation was cancelled or failed. */
  fail(words, isBad) {
    this.say(words, isBad);
    this.#stop();
  }

  #start(data) {
    if (this.started) this.timeline.goOn();
    this.started = data;
  }

  #happen(event) {
    this.timeline.take(event);
    if (event.kind === "accepted" || event.kind === "corrected") this.last = event.position;
    // A draft that the new final token makes useless has another token at this position.
    if (event.kind === "discarded" && event.position === this.last) this.rejected.add(this.last);
  }

  #append(chunk, at) {
    this.tokens.push(...chunk.token_ids);
    this.say(`${this.tokens.length} tokens · ${(at / 1000).toFixed(2)} s`);
    const mark = this.#mark(chunk);
    const token = document.createElement("span");
    token.className = `token ${mark}`;
    token.textContent = chunk.text;
    token.title = `position ${chunk.position}: ${MARKS[mark]}`;
    const box = this.text;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.append(token);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  /** Mark the origin of a chunk; all of its tokens have the same origin. */
  #mark(chunk) {
    if (chunk.origins[0] === "accepted_draft") return "accepted";
    return this.rejected.has(chunk.position) ? "corrected" : "own";
  }

  #finish(data) {
    this.finished = data;
    this.timeline.finish(data.usage.prompt_token_count + data.usage.completion_token_count);
    const seconds = data.statistics.total_ns / 1e9;
    const rate = this.tokens.length / seconds;
    this.say(`${this.tokens.length} tokens · ${seconds.toFixed(2)} s · ${rate.toFixed(1)} tokens/s`);
    this.#stop();
  }

  #stop() {
    this.timeline.stop();
    this.root.classList.remove("running");
    this.tracks.setAttribute("role", "img");
    this.tracks.setAttribute("aria-label", this.timeline.summary());
  }
}

function copy(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}
