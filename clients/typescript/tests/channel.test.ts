import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { ServerCredentials } from "@grpc/grpc-js";
import { Client, type ClientSettings, ConnectionLostError, InvalidFieldError } from "paceline";
import { isLoopback } from "#dist/channel.js";
import { ScriptedServer } from "./scripted_server.js";

function refusal(address: string, settings: ClientSettings = {}): string | undefined {
  try {
    new Client(address, settings).close();
    return undefined;
  } catch (error) {
    assert.ok(error instanceof InvalidFieldError);
    return error.violations[0]?.field;
  }
}

test("this machine is known by its addresses", () => {
  const local = ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "ipv6:[::1]:1"];
  const alsoLocal = ["dns:///localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:2", "unix:/tmp/x"];
  for (const address of [...local, ...alsoLocal]) {
    assert.equal(isLoopback(address), true, address);
  }
  const others = ["10.0.0.1:1", "paceline.example:1", "localhost.example:1", "[::2]:1"];
  for (const address of [...others, "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///example:1"]) {
    assert.equal(isLoopback(address), false, address);
  }
});

test("plaintext to another machine has to be asked for", () => {
  assert.equal(refusal("10.0.0.1:50050"), "address");
  assert.equal(refusal("10.0.0.1:50050", { insecure: true }), undefined);
  assert.equal(refusal("10.0.0.1:50050", { tls: {} }), undefined);
});

test("an address without host or port is refused", () => {
  for (const address of ["", "127.0.0.1", ":1", "localhost:", "localhost:x", "localhost:70000"]) {
    assert.equal(refusal(address), "address", address);
  }
});

test("a timeout that is no length of time is refused", () => {
  for (const timeoutSeconds of [-1, Number.NaN, Number.NEGATIVE_INFINITY]) {
    assert.equal(refusal("127.0.0.1:1", { timeoutSeconds }), "timeoutSeconds");
  }
  for (const timeoutSeconds of [0, Number.MAX_SAFE_INTEGER, Number.POSITIVE_INFINITY]) {
    assert.equal(refusal("127.0.0.1:1", { timeoutSeconds }), undefined);
  }
});

test("TLS files that cannot be used are refused", () => {
  const [caFile, noPem] = ["/nowhere/ca.pem", fileURLToPath(import.meta.url)];
  assert.equal(refusal("127.0.0.1:1", { tls: { caFile } }), "tls.caFile");
  assert.equal(refusal("127.0.0.1:1", { tls: { certificateFile: caFile } }), "tls");
  const pair = { certificateFile: noPem, keyFile: noPem };
  assert.equal(refusal("127.0.0.1:1", { tls: pair }), "tls.certificateFile");
  assert.equal(refusal("127.0.0.1:1", { tls: { caFile: noPem } }), "tls.caFile");
});

test("TLS with the right files reaches the server, and with others does not", async (context) => {
  const directory = mkdtempSync(join(tmpdir(), "paceline-"));
  context.after(() => rmSync(directory, { recursive: true }));
  const [certificateFile, keyFile] = [join(directory, "own.pem"), join(directory, "own.key")];
  if (!issue(certificateFile, keyFile)) {
    context.skip("there is no openssl");
    return;
  }
  const [cert_chain, private_key] = [readFileSync(certificateFile), readFileSync(keyFile)];
  const pairs = [{ cert_chain, private_key }];
  const server = await ScriptedServer.start(
    [],
    ServerCredentials.createSsl(cert_chain, pairs, true),
  );
  const trusted = new Client(server.address, {
    tls: { caFile: certificateFile, certificateFile, keyFile },
  });
  assert.equal(await trusted.generate("x").text(), "3 4 5 6 7 ");
  const anonymous = new Client(server.address, { tls: { caFile: certificateFile } });
  await assert.rejects(anonymous.generate("x").text(), ConnectionLostError);
  const trusting = new Client(server.address, { tls: {} });
  await assert.rejects(trusting.generate("x").text(), ConnectionLostError);
  for (const client of [trusted, anonymous, trusting]) {
    client.close();
  }
  await server[Symbol.asyncDispose]();
});

/** Issue a throw-away certificate for 127.0.0.1 that trusts itself. */
function issue(certificateFile: string, keyFile: string): boolean {
  const [curve, name] = ["ec_paramgen_curve:prime256v1", "subjectAltName=IP:127.0.0.1"];
  try {
    execFileSync(
      "openssl",
      ["req", "-x509", "-newkey", "ec", "-pkeyopt", curve, "-nodes", "-days", "2"].concat([
        "-subj",
        "/CN=paceline",
        "-addext",
        name,
        "-keyout",
        keyFile,
        "-out",
        certificateFile,
      ]),
      { stdio: "pipe" },
    );
    return true;
  } catch (error) {
    assert.equal((error as NodeJS.ErrnoException).code, "ENOENT", String(error));
    return false;
  }
}
