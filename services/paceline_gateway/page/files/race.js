// A race: the same request with several strategies; each run is kept for the replay.

import { Lane } from "./lane.js";
import { drawAxis } from "./timeline.js";
import { Refusal, generate } from "./stream.js";

const BASELINE = "autoregressive"; // what the others are compared with, if it takes part

/** One strategy's run. `outcome` is "", then "finished", "cancelled" or "failed". */
class Run {
  constructor(strategy, prompt) {
    this.strategy = strategy;
    this.lane = new Lane(strategy, prompt);
    this.events = [];
    this.outcome = "";
  }

  async go(body, { key, signal }) {
    const began = performance.now();
    this.began = began;
    const asked = { ...body, paceline: { ...body.paceline, strategy: this.strategy.name } };
    try {
      for await (const [name, data] of generate(asked, { key, signal })) {
        const at = performance.now() - began;
        this.events.push([at, name, data]);
        this.lane.take(name, data, at);
      }
      this.outcome = "finished";
    } catch (error) {
      this.outcome = signal.aborted ? "cancelled" : "failed";
      this.error = error;
      this.#explain();
    }
    this.began = undefined;
  }

  /** Show the events until `now`, in ms; return whether they are all. */
  showUntil(now) {
    while (this.shown < this.events.length && this.events[this.shown][0] <= now) {
      const [at, name, data] = this.events[this.shown++];
      this.lane.take(name, data, at);
    }
    if (this.shown < this.events.length) return false;
    if (this.outcome !== "finished") this.#explain();
    return true;
  }

  rewind() {
    this.lane.reset();
    this.shown = 0;
  }

  /** The least length of the scale, in ms. */
  get length() {
    const live = this.began === undefined ? 0 : performance.now() - this.began;
    const last = this.events.at(-1)?.[0] ?? 0;
    return Math.max(live, last, this.lane.timeline.end);
  }

  #explain() {
    const isBad = this.outcome === "failed";
    const words = isBad && !(this.error instanceof Refusal) ? "the gateway cannot be reached" : this.error.message;
    this.lane.fail(isBad ? words : "cancelled", isBad);
  }
}

/** All runs, with their places on the page. */
export class Race {
  constructor(strategies, { prompt, lanes, timelines }) {
    this.runs = strategies.map((strategy) => new Run(strategy, prompt));
    this.timelines = timelines;
    this.axis = document.createElement("div");
    this.axis.className = "track axis";
    const inner = document.createElement("div");
    inner.className = "timeline";
    inner.append(this.axis);
    lanes.replaceChildren(...this.runs.map((run) => run.lane.root));
    timelines.replaceChildren(...this.runs.map((run) => run.lane.figure), inner);
    this.span = 0;
  }

  /** Run all strategies, one after another or together. `tell` gets the status line. */
  async go(body, { key, signal, together, tell }) {
    const drawing = this.#draw();
    try {
      if (together) {
        tell("All strategies run at once, on the same servers.");
        await Promise.all(this.runs.map((run) => run.go(body, { key, signal })));
        return;
      }
      for (const [index, run] of this.runs.entries()) {
        tell(`${run.strategy.abbreviation} runs, ${index + 1} of ${this.runs.length}.`);
        await run.go(body, { key, signal });
      }
    } finally {
      clearInterval(drawing);
      this.#scale();
    }
  }

  /** Replay all runs side by side; `speed` 1 is the original speed. */
  async replay({ speed, signal }) {
    for (const run of this.runs) run.rewind();
    const began = performance.now();
    for (let isOver = false; !isOver; ) {
      await new Promise((resolve) => requestAnimationFrame(resolve));
      const now = signal.aborted ? Infinity : (performance.now() - began) * speed;
      this.timelines.style.setProperty("--now", now);
      isOver = this.runs.map((run) => run.showUntil(now)).every(Boolean);
    }
  }

  get finished() {
    return this.runs.filter((run) => run.outcome === "finished");
  }

  get baseline() {
    return this.finished.find((run) => run.strategy.name === BASELINE) ?? this.finished[0];
  }

  /** Whether a run's tokens equal the baseline's. */
  isEqual(run) {
    return String(run.lane.tokens) === String(this.baseline.lane.tokens);
  }

  /** Lengthen bars without an end, and keep the scale long enough. */
  #draw() {
    return setInterval(() => {
      const now = Math.max(...this.runs.map((run) => (run.began === undefined ? 0 : run.length)));
      this.timelines.style.setProperty("--now", now);
      this.#scale(1.25);
    }, 50);
  }

  /** Fit the scale; with `room` it grows by more than needed, and so less often. */
  #scale(room = 1) {
    const length = Math.max(100, ...this.runs.map((run) => run.length));
    if (room > 1 && length <= this.span) return;
    this.span = length * room;
    this.timelines.style.setProperty("--span", this.span);
    drawAxis(this.axis, this.span);
  }
}
