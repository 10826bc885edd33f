/** Connections to a server: TLS, and transport settings that notice a dead peer. */

import { X509Certificate } from "node:crypto";
import { readFileSync } from "node:fs";
import { BlockList, isIP } from "node:net";
import { type ChannelCredentials, type ChannelOptions, credentials } from "@grpc/grpc-js";
import { InvalidFieldError } from "./errors.js";
import { OrchestratorServiceClient } from "./generated/paceline/v1/orchestrator_service.js";

/**
 * A frozen peer is noticed in about 25 s. A server that comes back is found again within half a
 * second. The receive limit has room for the timeline of a long request. Nothing but this client's
 * `resumeAttempts` retries, and each client has connections of its own, so that closing it ends them.
 */
const OPTIONS: ChannelOptions = {
  "grpc.keepalive_time_ms": 20_000,
  "grpc.keepalive_timeout_ms": 5_000,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 500,
  "grpc.max_receive_message_length": 64 * 1024 * 1024,
  "grpc.enable_retries": 0,
  "grpc.service_config_disable_resolution": 1,
  "grpc.use_local_subchannel_pool": 1,
};

/** The certificates of TLS and mTLS: PEM, in files or as it is. */
export interface Tls {
  /** Whom to trust. Default: the certificate authorities that come with Node. */
  readonly caFile?: string | undefined;
  /** The client's own certificate, for mTLS. */
  readonly certificateFile?: string | undefined;
  /** Its private key. */
  readonly keyFile?: string | undefined;
  /** The name in the server's certificate, if it differs from the address. */
  readonly serverName?: string | undefined;
  /** The content of a caFile. */
  readonly ca?: string | Uint8Array | undefined;
  /** The content of a certificateFile. */
  readonly certificate?: string | Uint8Array | undefined;
  /** The content of a keyFile. */
  readonly key?: string | Uint8Array | undefined;
}

/** How to connect. */
export interface ChannelSettings {
  /** How to trust the server. Without it the connection is plaintext. */
  readonly tls?: Tls | undefined;
  /** Allow plaintext to another machine. Default false. */
  readonly insecure?: boolean | undefined;
  /** @grpc/grpc-js's own options for channels, where they have to differ from this client's. */
  readonly channelOptions?: ChannelOptions | undefined;
}

/** A checked way to a server. */
export interface Route {
  readonly address: string;
  /** Opens a channel. */
  readonly open: () => OrchestratorServiceClient;
}

/**
 * All addresses of a name are connected to, and take turns. DNS is asked again when a connection
 * ends. gRPC's default waits 30 s between two queries: new pods would not be found for so long.
 */
const SPREAD: ChannelOptions = {
  "grpc.dns_min_time_between_resolutions_ms": 1_000,
  "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
};

/**
 * Check everything that can be checked without connecting, and return what opens channels.
 *
 * @throws InvalidFieldError The address is malformed, a TLS file is unusable, or the connection
 *   would be plaintext off loopback and `insecure` does not allow that.
 */
export function routeTo(
  address: string,
  { tls, insecure = false, channelOptions = {} }: ChannelSettings,
): Route {
  const local = isLoopback(address);
  if (!(tls || local || insecure)) {
    throw InvalidFieldError.of(
      "address",
      `${address} is not on this machine and there is no TLS: ` +
        "give TLS options, or allow plaintext with the option insecure",
    );
  }
  const trust = credentialsOf(tls);
  const options = {
    ...OPTIONS,
    ...(local && { "grpc.enable_http_proxy": 0 }),
    ...(!leadsToOne(address) && SPREAD),
    ...(tls?.serverName && { "grpc.ssl_target_name_override": tls.serverName }),
    ...channelOptions,
  };
  return { address, open: () => new OrchestratorServiceClient(address, trust, options) };
}

/**
 * Say whether every endpoint of a gRPC target is on this machine.
 *
 * @throws InvalidFieldError An endpoint has no port, or there is none.
 */
export function isLoopback(address: string): boolean {
  return isSocket(address) || hostsOf(address).every(isLoopbackHost);
}

/** Say whether a gRPC target is one server: a socket, or one IP address. */
export function leadsToOne(address: string): boolean {
  if (isSocket(address)) {
    return true;
  }
  const [host, ...others] = hostsOf(address);
  return others.length === 0 && (host === "localhost" || isIP(host ?? "") !== 0);
}

function isSocket(address: string): boolean {
  return /^unix(-abstract)?:/.test(address);
}

function hostsOf(address: string): string[] {
  const [, rest] = /^(?:dns|ipv4|ipv6|passthrough):(.*)$/.exec(address) ?? [];
  const endpoints = rest === undefined ? address : rest.slice(rest.lastIndexOf("/") + 1);
  return endpoints.split(",").map(hostOf);
}

function credentialsOf(tls: Tls | undefined): ChannelCredentials {
  if (tls === undefined) {
    return credentials.createInsecure();
  }
  const isMissing = (path: unknown, content: unknown) =>
    path === undefined && content === undefined;
  if (isMissing(tls.certificateFile, tls.certificate) !== isMissing(tls.keyFile, tls.key)) {
    throw InvalidFieldError.of("tls", "a certificate and its key belong together");
  }
  const authorities = contentOf("ca", tls.caFile, tls.ca);
  const key = contentOf("key", tls.keyFile, tls.key);
  const certificate = contentOf("certificate", tls.certificateFile, tls.certificate);
  checkAuthorities(tls, authorities);
  try {
    return credentials.createSsl(authorities, key, certificate);
  } catch (error) {
    const isFile = tls.certificateFile !== undefined;
    const files = isFile ? `${tls.certificateFile} and ${tls.keyFile}: ` : "";
    const why = (error as Error).message;
    throw InvalidFieldError.of(
      isFile ? "tls.certificateFile" : "tls.certificate",
      `${files}are no usable certificate and key: ${why}`,
    );
  }
}

/** Refuse what has no certificate: Node would trust nobody, and say so at each connection. */
function checkAuthorities(tls: Tls, authorities: Buffer | null): void {
  if (authorities === null) {
    return;
  }
  const pem = /-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----/g;
  const found = authorities.toString().match(pem) ?? [];
  try {
    found.map((each) => new X509Certificate(each));
  } catch {
    found.length = 0;
  }
  if (found.length === 0) {
    const [field, file] = tls.caFile === undefined ? ["tls.ca", ""] : ["tls.caFile", tls.caFile];
    throw InvalidFieldError.of(field, `${file && `${file}: `}has no usable certificate`);
  }
}

function contentOf(
  name: string,
  path: string | undefined,
  content: string | Uint8Array | undefined,
): Buffer | null {
  if (path === undefined) {
    return content === undefined ? null : Buffer.from(content);
  }
  if (content !== undefined) {
    throw InvalidFieldError.of(`tls.${name}`, `and ${name}File are both given: give one`);
  }
  try {
    return readFileSync(path);
  } catch (error) {
    throw InvalidFieldError.of(`tls.${name}File`, `${path}: ${(error as Error).message}`);
  }
}

function hostOf(endpoint: string): string {
  const [, host, port] = /^(.+):([0-9]+)$/.exec(endpoint) ?? [];
  if (host === undefined || Number(port) > 65535) {
    throw InvalidFieldError.of("address", `${JSON.stringify(endpoint)} must be HOST:PORT`);
  }
  return host.replace(/^\[(.*)\]$/, "$1");
}

function isLoopbackHost(host: string): boolean {
  if (host === "localhost") {
    return true;
  }
  const version = isIP(host); // 0 for a name: its addresses are not known here
  const loopback = new BlockList();
  loopback.addSubnet("127.0.0.0", 8, "ipv4");
  loopback.addAddress("::1", "ipv6");
  return version !== 0 && loopback.check(host, version === 4 ? "ipv4" : "ipv6");
}
