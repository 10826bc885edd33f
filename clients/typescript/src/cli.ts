#!/usr/bin/env node
/** `paceline-generate`: continue a prompt, and stream the text. */

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { STRATEGIES } from "./generation.js";
import {
  Client,
  ClientCancelledError,
  type ClientSettings,
  type Completion,
  ConnectionLostError,
  DeadlineError,
  type GenerateOptions,
  type GenerateSettings,
  InvalidFieldError,
  PacelineError,
  PermissionDeniedError,
  TryAgainError,
  UnauthenticatedError,
  UnsupportedError,
} from "./index.js";

const HELP = `\
usage: paceline-generate [options] PROMPT

Continue a prompt, and stream the text to standard output. The last line, on standard error, has
the numbers of tokens and seconds. Ctrl-C cancels the work on all servers.

  --address HOST:PORT     address of the orchestrator (127.0.0.1:50050)
  --max-tokens N          most tokens to generate (server: 256)
  --temperature T         0 is greedy (the server's default)
  --seed S                the same seed gives the same text; without it one is chosen
  --strategy WORD         how to decode; the text is the same:
                          ${STRATEGIES.join(", ")}
  --stop TEXT             end before this string; can be given again
  --ca FILE               PEM file with the certificates to trust; turns TLS on
  --certificate FILE      PEM file with this client's certificate, for mTLS
  --key FILE              PEM file with the certificate's private key
  --api-key-file FILE     file with the API key, if the orchestrator requires one
  --insecure              allow plaintext to another machine
  --timeout SECONDS       give up after this time (120)
  --resume-attempts N     how often a broken generation resumes by itself (2)
`;

const OPTIONS = {
  address: { type: "string", default: "127.0.0.1:50050" },
  "max-tokens": { type: "string" },
  temperature: { type: "string" },
  seed: { type: "string" },
  strategy: { type: "string" },
  stop: { type: "string", multiple: true },
  ca: { type: "string" },
  certificate: { type: "string" },
  key: { type: "string" },
  "api-key-file": { type: "string" },
  insecure: { type: "boolean", default: false },
  timeout: { type: "string" },
  "resume-attempts": { type: "string", default: "2" },
  help: { type: "boolean", short: "h" },
} as const;

const FAILED = 1;
const BAD_USAGE = 2;
const INTERRUPTED = 130; // 128 + SIGINT, as shells have it
const BROKEN_PIPE = 141; // 128 + SIGPIPE

/** What to do about an error: the first class that it belongs to. */
const ADVICE = [
  [
    ConnectionLostError,
    "`paceline up` starts a system on this machine; --address says where one is",
  ],
  [TryAgainError, "try again in a moment"],
  [DeadlineError, "--timeout allows more time"],
  [UnauthenticatedError, "--api-key-file names the file with your key"],
  [PermissionDeniedError, "--certificate and --key say who you are"],
  [InvalidFieldError, "change what it names"],
  [UnsupportedError, "leave it out, or ask another server"],
  [PacelineError, "report it to who runs the server"],
] as const;

class UsageError extends Error {}

type Values = ReturnType<typeof parse>["values"];

function parse(args: readonly string[]) {
  try {
    return parseArgs({ args: [...args], options: OPTIONS, allowPositionals: true });
  } catch (error) {
    throw new UsageError((error as Error).message);
  }
}

async function main(args: readonly string[]): Promise<number> {
  const { values, positionals } = parse(args);
  if (values.help) {
    process.stdout.write(HELP);
    return 0;
  }
  const [prompt] = positionals;
  if (prompt === undefined || positionals.length > 1) {
    throw new UsageError("give one PROMPT");
  }
  const [settings, options] = [settingsOf(values), optionsOf(values)];
  const interrupted = new AbortController();
  process.once("SIGINT", () => interrupted.abort());
  const client = new Client(values.address, settings);
  try {
    await stream(client, prompt, { ...options, signal: interrupted.signal });
  } catch (error) {
    if (error instanceof ClientCancelledError && interrupted.signal.aborted) {
      return INTERRUPTED;
    }
    throw error;
  } finally {
    client.close();
  }
  return 0;
}

async function stream(
  client: Client,
  prompt: string,
  options: GenerateOptions & GenerateSettings,
): Promise<void> {
  const generation = client.generate(prompt, options);
  for await (const chunk of generation) {
    await write(shown(chunk.text));
  }
  const completion = await generation.collect();
  if (process.stdout.isTTY && !completion.text.endsWith("\n")) {
    await write("\n");
  }
  console.error(statisticsLine(completion));
}

/** Write, and wait until it is written: a slow reader holds the servers up. */
async function write(text: string): Promise<void> {
  await new Promise<void>((resolve, reject) => {
    process.stdout.write(text, (error) => (error ? reject(error) : resolve()));
  });
}

/** Take control characters out of a text for a terminal: it must not move the cursor. */
function shown(text: string): string {
  return process.stdout.isTTY ? text.replace(/[^\P{Cc}\n\t]/gu, "\ufffd") : text;
}

function settingsOf(values: Values): ClientSettings {
  const { ca, certificate, key, insecure } = values;
  const plaintext = ca === undefined && certificate === undefined && key === undefined;
  const tls = { caFile: ca, certificateFile: certificate, keyFile: key };
  return { tls: plaintext ? undefined : tls, insecure, token: tokenOf(values["api-key-file"]) };
}

/** Read the one key that a file holds. What else is in it is not shown. */
function tokenOf(file: string | undefined): (() => string) | undefined {
  if (file === undefined) {
    return undefined;
  }
  const key = textOf(file).trim();
  if (!/^[!-~]+$/.test(key)) {
    throw new UsageError(
      `--api-key-file: ${file}: must hold one key: printable ASCII without spaces`,
    );
  }
  return () => key;
}

function textOf(file: string): string {
  try {
    return readFileSync(file, "utf8");
  } catch (error) {
    throw new UsageError(`--api-key-file: ${(error as Error).message}`);
  }
}

function optionsOf(values: Values): GenerateOptions & GenerateSettings {
  return {
    maxTokens: number("max-tokens", values["max-tokens"]),
    temperature: number("temperature", values.temperature),
    seed: number("seed", values.seed),
    strategy: word("strategy", STRATEGIES, values.strategy),
    stop: values.stop,
    timeoutSeconds: number("timeout", values.timeout),
    resumeAttempts: number("resume-attempts", values["resume-attempts"]),
  };
}

function number(name: string, text: string | undefined): number | undefined {
  if (text !== undefined && !/^-?[0-9]+(\.[0-9]+)?$/.test(text)) {
    throw new UsageError(`--${name}: must be a number, not ${JSON.stringify(text)}`);
  }
  return text === undefined ? undefined : Number(text);
}

function word<Word extends string>(
  name: string,
  words: readonly Word[],
  text: string | undefined,
): Word | undefined {
  const found = words.find((each) => each === text);
  if (text !== undefined && found === undefined) {
    throw new UsageError(`--${name}: must be one of ${words.join(", ")}, not ${text}`);
  }
  return found;
}

function statisticsLine({ started, finished, tokenIds, resumedTokenCount }: Completion): string {
  const { statistics } = finished;
  const seconds = statistics.totalNs / 1e9;
  const count = tokenIds.length - resumedTokenCount;
  const parts = [
    resumedTokenCount > 0 && `resumed after ${resumedTokenCount} tokens`,
    `${count} tokens in ${seconds.toFixed(2)} s`,
    seconds > 0 && `${(count / seconds).toFixed(1)} tokens/s`,
    `first after ${(statistics.timeToFirstTokenNs / 1e6).toFixed(0)} ms`,
    `${started.strategy}, lookahead ${finished.lookahead}, targets ${finished.targetsUsed}`,
    `${statistics.targetForwardCount} target forwards`,
    statistics.draftedTokenCount > 0 &&
      `acceptance ${Math.round(100 * statistics.acceptanceRate)}%`,
    statistics.cancelledRpcCount > 0 && `${statistics.cancelledRpcCount} cancelled`,
    `seed ${started.seed}`,
    `ended by ${finished.finishReason}`,
    ...Object.entries(statistics.fallbacks).map(([kind, times]) => `${kind} x${times}`),
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Say in a few lines what went wrong, and return the exit code. */
function explain(error: unknown): number {
  if (error instanceof PacelineError) {
    const reason = error.reason ? ` (${error.reason})` : "";
    const [, advice] = ADVICE.find(([errorClass]) => error instanceof errorClass) ?? [];
    console.error(`paceline-generate: ${error.message}${reason}\n${advice}`);
    return FAILED;
  }
  if (error instanceof UsageError) {
    console.error(
      `paceline-generate: ${error.message}\npaceline-generate --help lists the options`,
    );
    return BAD_USAGE;
  }
  if (error instanceof Error && "code" in error && error.code === "EPIPE") {
    return BROKEN_PIPE; // the reader left, as in `paceline-generate ... | head`
  }
  throw error;
}

process.stdout.on("error", () => undefined); // every write reports its own
process.exitCode = await main(process.argv.slice(2)).catch(explain);
