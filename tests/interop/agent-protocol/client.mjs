// Tests the bridge with the TypeScript client SDK of the Synadia Agent Protocol and one agent behind the bridge.
// Environment, checks and output are the same as in client.py.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { connect } from "@nats-io/transport-node";
import { Agents, ServiceError } from "@synadia-ai/agents";

const AGENT = process.env.AGENT;
const EXPECTED = JSON.parse(readFileSync(process.env.EXPECTATIONS))[AGENT];
const TIMEOUT = 30_000;

function startAgent() {
  const [program, ...parameters] = JSON.parse(process.env.AGENT_COMMAND);
  return spawn(program, parameters, { stdio: ["ignore", "ignore", "inherit"] });
}

async function waitFor(condition) {
  const deadline = Date.now() + TIMEOUT;
  while (Date.now() < deadline) {
    const result = await condition();
    if (result) return result;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error(`${condition.name} did not become true within ${TIMEOUT} ms`);
}

const nc = await connect({ servers: process.env.NATS_URL });
const agents = new Agents({ nc });
// Subscribes before the agent starts, to receive its first heartbeat.
await agents.startTracking();
let child = startAgent();
let agent;

async function findAgent() {
  const discovered = await agents.discover({ timeoutMs: 500 });
  return discovered.find(({ name, endpoints }) => name === AGENT && endpoints.some((endpoint) => endpoint.name === "status"));
}

// Returns the texts, questions and attachments of one prompt.
async function send(prompt, answers = [], options = {}) {
  const remaining = [...answers];
  const [texts, questions, attachments] = [[], [], []];
  for await (const message of await agent.prompt(prompt, options)) {
    if (message.type === "query") {
      questions.push(message.prompt);
      const answer = remaining.shift();
      // The first answer is text, the second an envelope.
      await message.reply(questions.length % 2 === 0 ? { prompt: answer } : answer);
    } else if (message.type === "response") {
      if (message.text) texts.push(message.text);
      attachments.push(...(message.attachments ?? []));
    }
  }
  return { texts, questions, attachments };
}

const checks = {
  async discover() {
    agent = await waitFor(findAgent);
    assert.deepEqual([agent.agent, agent.owner, agent.protocolVersion], ["a2a", "interop", "0.3"]);
    assert.equal(agent.promptEndpoint.maxPayloadBytes, 1 << 20);
    assert.equal(agent.promptEndpoint.attachmentsOk, true);
    return agent.promptSubject;
  },
  async prompt() {
    const { texts } = await send("hello there");
    assert.equal(texts.join(""), "hello there");
    return texts.join("");
  },
  async stream() {
    const { texts } = await send(EXPECTED.stream.prompt);
    assert.deepEqual(texts, EXPECTED.stream.chunks);
    return `${texts.length} chunks`;
  },
  async two_questions() {
    let answered = 0;
    for (const { prompt, answers, reply } of EXPECTED.questions) {
      const { texts, questions } = await send(prompt, answers);
      assert.equal(questions.length, answers.length);
      assert.equal(texts.join(""), reply);
      answered += questions.length;
    }
    assert.equal(answered, 2);
    return `${answered} answered`;
  },
  async attachments() {
    const content = Uint8Array.from({ length: 256 }, (_, n) => n);
    const sent = { attachments: [{ filename: "sent.bin", content }] };
    const { texts, attachments: echoed } = await send("here is a file", [], sent);
    assert.equal(texts.join(""), "here is a file");
    if (AGENT === "demo") {
      assert.equal(echoed[0].filename, "sent.bin");
      assert.deepEqual(new Uint8Array(Buffer.from(echoed[0].content, "base64")), content);
    }
    const { attachments: received } = await send("file please");
    const png = received.find((file) => file.filename === "a.png");
    assert.equal(Buffer.from(png.content, "base64").toString("hex"), "89504e470001");
    return `sent 1, received ${echoed.length + received.length}`;
  },
  async error() {
    try {
      await send("fail as planned");
    } catch (error) {
      assert.ok(error instanceof ServiceError, String(error));
      assert.equal(error.code, 500);
      assert.match(error.message, /planned failure/);
      return error.message;
    }
    throw new Error("the prompt did not fail");
  },
  async liveness() {
    const first = agent.instanceId;
    assert.ok(await agents.ping(first));
    child.kill("SIGKILL");
    await waitFor(async function isOffline() {
      return !(await agents.ping(first));
    });
    assert.equal(await findAgent(), undefined);
    child = startAgent();
    agent = await waitFor(findAgent);
    assert.notEqual(agent.instanceId, first);
    assert.ok(await agents.ping(agent.instanceId));
    await waitFor(async function isOnline() {
      return agents.liveness(agent.instanceId)?.isOnline;
    });
    return "stopped and restarted";
  },
};

let failed = false;
for (const [name, check] of Object.entries(checks)) {
  let result = "ok";
  const details = await check().catch((problem) => {
    result = "FAILED";
    failed = true;
    return `${problem.name}: ${problem.message}`;
  });
  console.log([name, result, String(details).split(/\s+/).join(" ")].join("\t"));
}
child.kill("SIGKILL");
await agents.close();
await nc.close();
process.exit(failed ? 1 : 0);
