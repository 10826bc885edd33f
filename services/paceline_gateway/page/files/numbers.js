// The table of times, and whether all texts are equal.

/** Fill the table, a row for each finished run, and write the verdict. */
export function showNumbers(race, { rows, verdict, hint }) {
  hint.hidden = race.finished.every((run) => seconds(run) <= seconds(race.baseline));
  rows.replaceChildren(...race.finished.map((run) => row(race, run)));
  const different = race.finished.filter((run) => !race.isEqual(run));
  verdict.classList.toggle("bad", different.length > 0);
  verdict.textContent = words(race, different);
}

function words(race, different) {
  const count = race.finished.length;
  if (different.length > 0) {
    const names = different.map((run) => run.strategy.abbreviation).join(", ");
    return `A TEXT DIFFERS from that of ${race.baseline.strategy.abbreviation}: ${names}.`;
  }
  if (count < 2) return count ? "One text only: there is nothing to compare." : "";
  const which = count < race.runs.length ? `The ${count} finished texts` : `All ${count} texts`;
  return `${which} are equal, token by token: ${race.baseline.lane.tokens.length} tokens.`;
}

function row(race, run) {
  const { statistics } = run.lane.finished;
  const tokens = run.lane.tokens.length;
  const speedUp = seconds(race.baseline) / seconds(run);
  const judged = statistics.accepted_token_count + statistics.rejected_token_count;
  const made = document.createElement("tr");
  made.append(cell("th", run.strategy.abbreviation));
  made.firstChild.scope = "row";
  made.append(...[
    String(tokens),
    `${(statistics.time_to_first_token_ns / 1e6).toFixed(0)} ms`,
    `${seconds(run).toFixed(2)} s`,
    (tokens / seconds(run)).toFixed(1),
    `${speedUp.toFixed(2)}x`,
    String(statistics.target_forward_count),
    judged ? `${(100 * statistics.acceptance_rate).toFixed(0)} %` : "–",
    String(statistics.cancelled_rpc_count),
    race.isEqual(run) ? "equal" : "DIFFERENT",
  ].map((text) => cell("td", text)));
  return made;
}

/** Time by the orchestrator's clock. */
function seconds(run) {
  return run.lane.finished.statistics.total_ns / 1e9;
}

function cell(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}
