// The page: the form, the key, the link, and the buttons.

import { showNumbers } from "./numbers.js";
import { Race } from "./race.js";
import { ask } from "./stream.js";

// Of a model that chats; others have the texts to continue alone.
const QUESTIONS = [
  ["a question", "What is the capital of France, and what is it known for?"],
  ["a correction", "Correct the mistakes in this text, and write it again: Yesterday I goed to the market and buyed three apples, two bread and a bottle of milk. Then I walked home and eated them."],
  ["an explanation", "Why is the sky blue? Answer in two sentences."],
];
const TEXTS = [
  ["a Python class", 'class Stack:\n    """A stack of items, the last one first."""\n\n    def __init__(self, items=()):\n        self._items = list(items)\n\n    def push(self, item):\n        """'],
  ["a Python function", "def fibonacci(n):"],
  ["a repetitive list", "NUMBERS = {\n    1: \"one\",\n    2: \"two\",\n    3: \"three\",\n"],
  ["a story", "Once upon a time, in a town by the sea,"],
];
// The contents of a link; each is the id of a field.
const VALUES = ["prompt", "seed", "max_tokens", "temperature", "top_p", "lookahead", "targets", "width", "branches"];
const CHECKS = ["together", "chat", "ignore_eos"];
const KEY = "paceline-key";

const at = (id) => document.getElementById(id);
let system = null;
let race = null;
let stopping = null;

function tell(words, isBad = false) {
  at("status").textContent = words;
  at("status").classList.toggle("bad", isBad);
}

/** Ask for the model and the servers, and for the key if one is required. */
async function enter() {
  try {
    system = await ask("paceline/info", { key: sessionStorage.getItem(KEY) });
  } catch (error) {
    at("system").textContent = "";
    if (error.status === 401) wantKey(error);
    else tell(`Cannot ask the gateway: ${error.message}`, true);
    return;
  }
  at("door").hidden = true;
  tell("");
  describe();
  offer();
  suggest();
  read();
}

function wantKey(error) {
  const wasWrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  at("door").hidden = false;
  at("key").focus();
  tell(wasWrong ? error.message : "", wasWrong);
}

function describe() {
  const count = (role) => system.servers.filter((each) => each.role === role && each.ready).length;
  const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  at("system").textContent = `${system.model} on ${plural(count("drafter"), "drafter")} and`
    + ` ${plural(count("target"), "target")}`;
}

/** Show the strategies that the gateway offers. */
function offer() {
  const legend = at("strategies").querySelector("legend");
  at("strategies").replaceChildren(legend, ...system.strategies.map(({ name, abbreviation }) => {
    const label = document.createElement("label");
    label.className = "check";
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", name: "strategy", value: name, checked: true });
    label.append(box, abbreviation);
    label.title = name;
    return label;
  }));
}

/** Offer examples that suit the model: questions, if it chats, and texts to continue. */
function suggest() {
  const [first] = at("examples").options;
  at("chat").parentElement.hidden = !system.chats;
  at("chat").checked = system.chats;
  at("ignore_eos").checked = !system.chats;
  const option = ([name, text], chats) => {
    const made = new Option(name, text);
    made.dataset.chats = chats;
    return made;
  };
  at("examples").replaceChildren(
    first,
    ...(system.chats ? QUESTIONS : []).map((each) => option(each, "1")),
    ...TEXTS.map((each) => option(each, "")),
  );
}

const boxes = () => [...at("strategies").querySelectorAll("input")];

/** Fill the fields from the address; nothing runs before the user starts it. */
function read() {
  const link = new URLSearchParams(location.hash.slice(1));
  for (const id of VALUES) if (link.has(id)) at(id).value = link.get(id);
  for (const id of CHECKS) if (link.has(id)) at(id).checked = link.get(id) === "1";
  if (link.has("strategies")) {
    const wanted = link.get("strategies").split(",");
    for (const box of boxes()) box.checked = wanted.includes(box.value);
  }
  if (!at("prompt").value) at("prompt").value = (system?.chats ? QUESTIONS : TEXTS)[0][1];
  if (link.has("model") && link.get("model") !== system?.fingerprint) {
    tell("This link was made with another model: the texts will differ.");
  }
}

/** Put the fields into the address. */
function write() {
  const link = new URLSearchParams();
  for (const id of VALUES) if (at(id).value) link.set(id, at(id).value);
  for (const id of CHECKS) link.set(id, at(id).checked ? "1" : "0");
  link.set("strategies", boxes().filter((box) => box.checked).map((box) => box.value).join(","));
  link.set("model", system.fingerprint);
  history.replaceState(null, "", `#${link}`);
  at("link").href = `#${link}`;
  at("link").hidden = false;
}

function body() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  return {
    model: system.model,
    ...(system.chats && at("chat").checked
      ? { messages: [{ role: "user", content: at("prompt").value }] }
      : { prompt: at("prompt").value }),
    seed: number("seed"),
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    top_p: number("top_p"),
    paceline: {
      lookahead: number("lookahead"),
      targets: number("targets"),
      width: number("width"),
      branches: number("branches"),
      ignore_eos: at("ignore_eos").checked,
    },
  };
}

/** Run work that can be cancelled, and set the buttons accordingly. */
async function busy(work) {
  stopping = new AbortController();
  at("start").disabled = at("again").disabled = true;
  at("cancel").disabled = false;
  try {
    await work(stopping.signal);
  } finally {
    const hadFocus = document.activeElement === at("cancel");
    at("start").disabled = false;
    at("cancel").disabled = true;
    at("again").disabled = !race?.finished.length;
    if (hadFocus) at("start").focus();
  }
}

async function start() {
  const chosen = system.strategies.filter((each) => boxes().some((box) => box.checked && box.value === each.name));
  if (!chosen.length) return tell("Choose a strategy.", true);
  write();
  at("results").hidden = false;
  at("verdict").textContent = "";
  at("hint").hidden = true;
  at("numbers").tBodies[0].replaceChildren();
  // An answer begins in a line of its own.
  const shown = at("prompt").value + (body().messages ? "\n\n" : "");
  race = new Race(chosen, { prompt: shown, lanes: at("lanes"), timelines: at("timelines") });
  const together = at("together").checked;
  await busy(async (signal) => {
    await race.go(body(), { key: sessionStorage.getItem(KEY), signal, together, tell });
    showNumbers(race, { rows: at("numbers").tBodies[0], verdict: at("verdict"), hint: at("hint") });
    if (race.runs.some((run) => run.error?.status === 401)) return wantKey(race.runs[0].error);
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (!signal.aborted && !together && !isStill && race.finished.length > 1) await replay(signal);
    conclude();
  });
}

async function replay(signal) {
  tell("The strategies ran one after another, so that none disturbed another. Now they are shown side by side.");
  await race.replay({ speed: Number(at("speed").value), signal });
}

function conclude() {
  const failed = race.runs.filter((run) => run.outcome === "failed");
  const names = failed.map((run) => `${run.strategy.abbreviation}: ${run.error.message}`).join("; ");
  if (failed.length) tell(`Not all strategies finished. ${names}`, true);
  else if (race.finished.length < race.runs.length) tell("Cancelled.");
  else tell(`Done. ${at("verdict").textContent}`);
}

at("question").addEventListener("submit", (event) => {
  event.preventDefault();
  if (system && at("start").disabled === false) start();
});
at("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  enter();
});
at("cancel").addEventListener("click", () => stopping?.abort());
at("again").addEventListener("click", () => busy(async (signal) => {
  await replay(signal);
  conclude();
}));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("question").requestSubmit();
});
at("examples").addEventListener("change", () => {
  if (!at("examples").value) return;
  at("prompt").value = at("examples").value;
  at("chat").checked = Boolean(at("examples").selectedOptions[0].dataset.chats);
});
addEventListener("hashchange", read);
enter();
