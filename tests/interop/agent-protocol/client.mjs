// The TypeScript client SDK of the Synadia Agent Protocol against one agent behind the bridge.
// Environment, checks and output are those of client.py.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { connect } from "@nats-io/transport-node";
import { Agents, ServiceError } from "@synadia-ai/agents";

const AGENT = process.env.AGENT;
const SOON = 30_000;
const QUESTIONS = {
  demo: [["report about tides", ["on paper", "as PDF"]]],
  "a2a-sdk-1": [["ask me", ["blue"]], ["ask me", ["green"]]],
}[AGENT];
const ANSWERS = { demo: ["Report: report about tides"], "a2a-sdk-1": ["you said blue", "you said green"] }[AGENT];
const STREAM = {
  demo: ["stream one two three", ["one ", "two ", "three"]],
  "a2a-sdk-1": ["stream", ["chunk 0 ", "chunk 1 ", "chunk 2 "]],
}[AGENT];

function startAgent() {
  const [program, ...rest] = JSON.parse(process.env.AGENT_COMMAND);
  return spawn(program, rest, { stdio: ["ignore", "ignore", "inherit"] });
}

async function until(look) {
  const deadline = Date.now() + SOON;
  while (Date.now() < deadline) {
    const found = await look();
    if (found) return found;
    await new Promise((wake) => setTimeout(wake, 50));
  }
  throw new Error("it did not become true in time");
}

const nc = await connect({ servers: process.env.NATS_URL });
const agents = new Agents({ nc });
// Before the agent: its first heartbeat is to be heard.
await agents.startTracking();
let child = startAgent();
let agent;

async function found() {
  const all = await agents.discover({ timeoutMs: 500 });
  return all.find((one) => one.name === AGENT && one.endpoints.some((e) => e.name === "status"));
}

async function ask(prompt, answers = [], options = {}) {
  const left = [...answers];
  const [texts, questions, attachments] = [[], [], []];
  for await (const message of await agent.prompt(prompt, options)) {
    if (message.type === "query") {
      questions.push(message.prompt);
      const answer = left.shift();
      // Once as text, once as an envelope.
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
    agent = await until(found);
    assert.deepEqual([agent.agent, agent.owner, agent.protocolVersion], ["a2a", "interop", "0.3"]);
    assert.equal(agent.promptEndpoint.maxPayloadBytes, 1 << 20);
    assert.equal(agent.promptEndpoint.attachmentsOk, true);
    return agent.promptSubject;
  },
  async prompt() {
    const { texts } = await ask("hello there");
    assert.equal(texts.join(""), "hello there");
    return texts.join("");
  },
  async stream() {
    const [prompt, expected] = STREAM;
    const { texts } = await ask(prompt);
    assert.deepEqual(texts, expected);
    return `${texts.length} chunks`;
  },
  async two_questions() {
    const [seen, told] = [[], []];
    for (const [prompt, answers] of QUESTIONS) {
      const { texts, questions } = await ask(prompt, answers);
      assert.equal(questions.length, answers.length);
      seen.push(...questions);
      told.push(texts.join(""));
    }
    assert.equal(seen.length, 2);
    assert.deepEqual(told, ANSWERS);
    return `${seen.length} answered`;
  },
  async attachments() {
    const content = Uint8Array.from({ length: 256 }, (_, n) => n);
    const sent = { attachments: [{ filename: "sent.bin", content }] };
    const { texts, attachments: back } = await ask("here is a file", [], sent);
    assert.equal(texts.join(""), "here is a file");
    if (AGENT === "demo") {
      assert.equal(back[0].filename, "sent.bin");
      assert.deepEqual(new Uint8Array(Buffer.from(back[0].content, "base64")), content);
    }
    const { attachments: got } = await ask("file please");
    const png = got.find((one) => one.filename === "a.png");
    assert.equal(Buffer.from(png.content, "base64").toString("hex"), "89504e470001");
    return `sent 1, received ${back.length + got.length}`;
  },
  async error() {
    try {
      await ask("fail as planned");
    } catch (error) {
      assert.ok(error instanceof ServiceError, String(error));
      assert.equal(error.code, 500);
      assert.match(error.message, /planned failure/);
      return error.message;
    }
    throw new Error("no error");
  },
  async liveness() {
    const first = agent.instanceId;
    assert.ok(await agents.ping(first));
    child.kill("SIGKILL");
    await until(async () => !(await agents.ping(first)));
    assert.equal(await found(), undefined);
    child = startAgent();
    agent = await until(found);
    assert.notEqual(agent.instanceId, first);
    assert.ok(await agents.ping(agent.instanceId));
    await until(async () => agents.liveness(agent.instanceId)?.isOnline);
    return "went and came";
  },
};

let failed = false;
for (const [name, check] of Object.entries(checks)) {
  let verdict = "ok";
  const seen = await check().catch((problem) => {
    verdict = "FAILED";
    failed = true;
    return `${problem.name}: ${problem.message}`;
  });
  console.log(`${name}\t${verdict}\t${String(seen).split(/\s+/).join(" ")}`);
}
child.kill("SIGKILL");
await agents.close();
await nc.close();
process.exit(failed ? 1 : 0);
