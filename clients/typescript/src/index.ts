/** Paceline's client for Node: a large model's exact output, faster. */

export type { CallMetadata, MetadataSource, TokenSource } from "./call_metadata.js";
export type { ChannelSettings, Tls } from "./channel.js";
export {
  type CallSettings,
  Client,
  type ClientSettings,
  DEFAULT_TIMEOUT_SECONDS,
  type GenerateSettings,
} from "./client.js";
export * from "./errors.js";
export type * from "./generation.js";
export type { GenerateOptions, Grammar, Prompt, TokenIds } from "./request.js";
export type { Generation } from "./streaming.js";
