/** What goes along with a client's calls beside their messages: headers, and who calls. */

import { Metadata } from "@grpc/grpc-js";
import { InvalidFieldError } from "./errors.js";

/** Names and values; bytes go with names in -bin. */
export type CallMetadata = Readonly<Record<string, string | Uint8Array>>;

/** Metadata, or a function that returns it for each call. */
export type MetadataSource = CallMetadata | (() => CallMetadata);

/** Tells the bearer token, for each call again. */
export type TokenSource = () => string | Promise<string>;

/** A client's headers and credentials. Errors never show values: they may be secret. */
export class Credentials {
  readonly #source: MetadataSource;
  readonly #token: TokenSource | undefined;

  /** @throws InvalidFieldError A name or value cannot be sent. */
  constructor(source: MetadataSource = {}, token?: TokenSource) {
    this.#source = source;
    this.#token = token;
    if (typeof source !== "function") {
      checkMetadata(source);
    }
  }

  /**
   * Find what goes along with a call that has metadata of its own.
   *
   * @throws InvalidFieldError A name or value cannot be sent; or what the callbacks throw.
   */
  async metadata(own: CallMetadata = {}): Promise<Metadata> {
    const token = await this.#token?.();
    const source = typeof this.#source === "function" ? this.#source() : this.#source;
    const all = new Metadata();
    for (const each of [source, own]) {
      checkMetadata(each);
      for (const [name, value] of Object.entries(each)) {
        all.add(name.toLowerCase(), typeof value === "string" ? value : Buffer.from(value));
      }
    }
    if (this.#token !== undefined) {
      if (typeof token !== "string" || !/^[!-~]+$/.test(token)) {
        throw InvalidFieldError.of("token", "must be printable ASCII without spaces");
      }
      all.set("authorization", `Bearer ${token}`);
    }
    return all;
  }
}

/** @throws InvalidFieldError A name or value cannot be sent. */
export function checkMetadata(metadata: CallMetadata = {}): void {
  for (const [name, value] of Object.entries(metadata)) {
    const lower = name.toLowerCase();
    if (!/^[0-9a-z_.-]+$/.test(lower) || lower.startsWith("grpc-")) {
      const description = `${JSON.stringify(name)} is not a metadata name: use letters, digits, - _ . and no prefix grpc-`;
      throw InvalidFieldError.of("metadata", description);
    }
    if (lower.endsWith("-bin") !== value instanceof Uint8Array) {
      throw InvalidFieldError.of(
        "metadata",
        `${name}: a name that ends in -bin takes bytes, every other name takes text`,
      );
    }
    if (!(value instanceof Uint8Array || (typeof value === "string" && /^[ -~]*$/.test(value)))) {
      throw InvalidFieldError.of("metadata", `${name}: must be printable ASCII`);
    }
  }
}
