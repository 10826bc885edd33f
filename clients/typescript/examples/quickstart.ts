import { Client } from "paceline";

const client = new Client("127.0.0.1:50050");
const stream = client.generate("def fibonacci(n):", { maxTokens: 64 });
for await (const chunk of stream) {
  process.stdout.write(chunk.text);
}
const { statistics } = (await stream.collect()).finished;
console.log(`\nacceptance ${Math.round(100 * statistics.acceptanceRate)}%`);
client.close();
