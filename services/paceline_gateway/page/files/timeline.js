// The timeline of one generation: a track for each server, a bar for each draft and verification.

/** Draws events as they arrive. Times are ms since the request; a parent's `--span` is the scale. */
export class Timeline {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.root.replaceChildren();
    this.tracks = new Map();
    this.drafts = new Map(); // by call: bars, with their positions
    this.verifications = new Map(); // by server and call
    this.offset = 0; // of the clock of the orchestrator that it went on at
    this.end = 0;
  }

  /** Note that a generation resumed at another orchestrator, whose clock begins at 0. */
  goOn() {
    this.offset = this.end;
  }

  take(event) {
    const from = this.offset + event.start_ns / 1e6;
    const to = this.offset + event.end_ns / 1e6;
    this.end = Math.max(this.end, to);
    const count = event.token_ids.length;
    switch (event.kind) {
      case "drafted": {
        const bar = this.#bar(event.server, "draft", from, to);
        bar.classList.toggle("with-branches", event.branch_token_count > 0);
        bar.title = `${event.server}: ${words(count)} drafted from position ${event.position}${beside(event)}, ${span(from, to)}`;
        const bars = this.drafts.get(event.call_id) ?? [];
        this.drafts.set(event.call_id, [...bars, { bar, from: event.position, left: count, to: event.position + count }]);
        break;
      }
      case "verifying":
        this.#verify(event, from, to);
        break;
      case "discarded":
        this.#discard(event.call_id, event.position, event.position + count);
        break;
      case "cancelled":
        this.verifications.get(`${event.server} ${event.call_id}`)?.classList.add("lost");
        break;
      case "accepted":
        this.#mark("accepted-mark", from, `draft token accepted at position ${event.position}`);
        break;
      case "corrected":
        this.#mark("own-mark", from, `target's own token at position ${event.position}`);
        break;
    }
  }

  /** Note the end: drafts beyond the text's end were useless. */
  finish(length) {
    for (const call of this.drafts.keys()) this.#discard(call, length, Infinity);
    this.stop();
  }

  /** Describe the timeline in words, for screen readers. */
  summary() {
    const verifications = this.root.querySelectorAll(".bar.verify");
    const lost = this.root.querySelectorAll(".bar.lost").length;
    const servers = [...this.tracks.keys()].filter((name) => name !== "output").join(", ");
    return `On ${servers}: ${this.root.querySelectorAll(".bar.draft").length} drafts,`
      + ` ${verifications.length} verifications; ${lost} of these cancelled or not used.`;
  }

  /** Note that no call is running. */
  stop() {
    for (const bar of this.root.querySelectorAll(".running")) {
      bar.classList.remove("running");
      bar.classList.add("lost");
      bar.style.setProperty("--to", this.end);
    }
  }

  #verify(event, from, to) {
    const name = `${event.server} ${event.call_id}`;
    const begun = this.verifications.get(name);
    const bar = begun ?? this.#bar(event.server, "verify", from, to > from ? to : undefined);
    this.verifications.set(name, bar);
    if (to > from) {
      bar.classList.remove("running");
      bar.style.setProperty("--to", to);
      this.tracks.get(event.server).ends[bar.dataset.row] = to;
    }
    bar.classList.toggle("branch", event.is_branch);
    bar.classList.toggle("with-branches", event.branch_token_count > 0);
    const ahead = event.speculation_depth ? `, ${event.speculation_depth} ahead` : "";
    bar.title = `${event.server}: ${words(event.token_ids.length)} verified from position ${event.position}${beside(event)}${ahead}, ${span(from, to)}`;
  }

  #discard(call, from, to) {
    for (const draft of this.drafts.get(call) ?? []) {
      draft.left -= Math.max(0, Math.min(to, draft.to) - Math.max(from, draft.from));
      if (draft.left <= 0) draft.bar.classList.add("lost");
    }
  }

  #bar(server, kind, from, to) {
    const track = this.#track(server, kind === "draft" ? 0 : 1);
    let row = track.ends.findIndex((end) => end <= from);
    if (row < 0) row = track.ends.length;
    track.ends[row] = to ?? Infinity;
    track.bars.style.setProperty("--rows", track.ends.length);
    const bar = element("div", `bar ${kind}${to === undefined ? " running" : ""}`);
    bar.dataset.row = row;
    bar.style.setProperty("--row", row);
    bar.style.setProperty("--from", from);
    if (to !== undefined) bar.style.setProperty("--to", to);
    track.bars.append(bar);
    return bar;
  }

  #mark(kind, at, title) {
    const mark = element("div", `mark ${kind}`);
    mark.title = title;
    mark.style.setProperty("--from", at);
    this.#track("output", 2).bars.append(mark);
  }

  /** Find a server's track, or make it: drafters first, then targets, each by name. */
  #track(name, rank) {
    const known = this.tracks.get(name);
    if (known) return known;
    const root = element("div", "track");
    const label = element("div", "name");
    label.textContent = name;
    const bars = element("div", "bars");
    root.append(label, bars);
    const track = { root, bars, rank, name, ends: [] };
    const later = [...this.tracks.values()].filter((each) => order(track, each) < 0).sort(order);
    this.root.insertBefore(root, later[0]?.root ?? null);
    this.tracks.set(name, track);
    return track;
  }
}

/** Draw the scale under all timelines. */
export function drawAxis(root, span) {
  const bars = element("div", "bars");
  const step = [1, 2, 5].flatMap((it) => [0, 1, 2, 3, 4].map((power) => it * 10 ** power))
    .sort((a, b) => a - b).find((it) => span / it <= 10) ?? span;
  for (let at = 0; at < span * 0.96; at += step) { // the last one's words need room, too
    const tick = element("div", "tick");
    tick.textContent = at >= 1000 || step >= 1000 ? `${at / 1000} s` : `${at} ms`;
    tick.style.setProperty("--from", at);
    bars.append(tick);
  }
  root.replaceChildren(element("div", "name"), bars);
}

function order(one, other) {
  return one.rank - other.rank || one.name.localeCompare(other.name, "en", { numeric: true });
}

function element(tag, classes) {
  const made = document.createElement(tag);
  made.className = classes;
  return made;
}

/** The tokens of a tree beside its chain. */
function beside(event) {
  const branch = event.is_branch ? " of a branch" : "";
  return branch + (event.branch_token_count ? `, ${event.branch_token_count} beside the chain` : "");
}

function words(count) {
  return count === 1 ? "1 token" : `${count} tokens`;
}

function span(from, to) {
  return to > from ? `${from.toFixed(1)} to ${to.toFixed(1)} ms` : `since ${from.toFixed(1)} ms`;
}
