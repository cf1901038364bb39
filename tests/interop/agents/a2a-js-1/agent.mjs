// A deterministic agent on @a2a-js/sdk 1: JSON-RPC at /, REST at /rest. The first word of the prompt selects what it
// does. Environment: PORT

import { randomUUID } from "node:crypto";
import express from "express";
import { Role, TaskState } from "@a2a-js/sdk";
import { AgentEvent, DefaultRequestHandler, InMemoryTaskStore } from "@a2a-js/sdk/server";
import { agentCardHandler, jsonRpcHandler, restHandler, UserBuilder } from "@a2a-js/sdk/server/express";

const PORT = process.env.PORT;
const metadata = undefined;
const part = ($case, value, file = {}) => ({ content: { $case, value }, metadata, filename: "", mediaType: "", ...file });
const textPart = (text) => part("text", text);
const statusUpdate = (taskId, contextId, state, message) => {
  const status = { state, message, timestamp: new Date().toISOString() };
  return AgentEvent.statusUpdate({ taskId, contextId, status, metadata });
};

class EchoExecutor {
  async execute(context, bus) {
    await this.run(context, bus);
    bus.finished();
  }

  async run({ taskId, contextId, userMessage, task }, bus) {
    const text = userMessage.parts[0]?.content?.value ?? "";
    const message = (text, taskId) => ({
      messageId: randomUUID(), role: Role.ROLE_AGENT, parts: [textPart(text)], taskId, contextId,
      extensions: [], referenceTaskIds: [], metadata,
    });
    const status = (state, text) => bus.publish(statusUpdate(taskId, contextId, state, text && message(text, taskId)));
    const artifact = (parts, artifactId = randomUUID(), chunk = { append: false, lastChunk: true }) => {
      const artifact = { artifactId, name: "out", description: "", parts, metadata, extensions: [] };
      bus.publish(AgentEvent.artifactUpdate({ taskId, contextId, artifact, ...chunk, metadata }));
    };

    if (text.startsWith("message")) return bus.publish(AgentEvent.message(message("direct reply", "")));
    if (task) {
      artifact([textPart(`you said ${text}`)]);
      return status(TaskState.TASK_STATE_COMPLETED);
    }
    const submitted = { state: TaskState.TASK_STATE_SUBMITTED, message: undefined, timestamp: new Date().toISOString() };
    bus.publish(AgentEvent.task({ id: taskId, contextId, status: submitted, artifacts: [], history: [userMessage], metadata }));
    status(TaskState.TASK_STATE_WORKING);
    if (text.startsWith("ask")) return status(TaskState.TASK_STATE_INPUT_REQUIRED, "which colour?");
    if (text.startsWith("fail")) return status(TaskState.TASK_STATE_FAILED, "planned failure");
    if (text.startsWith("crash")) throw new Error("planned crash");
    if (text.startsWith("file")) {
      const file = { filename: "a.png", mediaType: "image/png" };
      artifact([part("raw", Buffer.from("iVBORwAB", "base64"), file), part("data", { n: 1 })]);
    } else if (text.startsWith("stream")) {
      for (let i = 0; i < 3; i++) {
        artifact([textPart(`chunk ${i} `)], "a1", { append: i > 0, lastChunk: i === 2 });
        await new Promise((resolve) => setTimeout(resolve, 100));
      }
    } else {
      artifact([textPart(text)]);
    }
    status(TaskState.TASK_STATE_COMPLETED);
  }

  async cancelTask(taskId, bus) {
    bus.publish(statusUpdate(taskId, "", TaskState.TASK_STATE_CANCELED));
    bus.finished();
  }
}

const endpoint = (path, protocolBinding) => ({
  url: `http://127.0.0.1:${PORT}${path}`, protocolBinding, protocolVersion: "1.0", tenant: "",
});
const card = {
  name: "echo",
  description: "echo",
  version: "0.0.1",
  supportedInterfaces: [endpoint("/", "JSONRPC"), endpoint("/rest", "HTTP+JSON")],
  provider: undefined,
  capabilities: { streaming: true, extensions: [] },
  securitySchemes: {},
  securityRequirements: [],
  signatures: [],
  defaultInputModes: ["text/plain"],
  defaultOutputModes: ["text/plain"],
  skills: [{
    id: "echo", name: "Echo", description: "echoes", tags: ["t"],
    examples: [], inputModes: [], outputModes: [], securityRequirements: [],
  }],
};
const requestHandler = new DefaultRequestHandler(card, new InMemoryTaskStore(), new EchoExecutor());
const userBuilder = UserBuilder.noAuthentication;
const app = express();
app.use("/.well-known/agent-card.json", agentCardHandler({ agentCardProvider: requestHandler }));
app.use("/rest", restHandler({ requestHandler, userBuilder }));
app.use("/", jsonRpcHandler({ requestHandler, userBuilder }));
app.listen(PORT, "127.0.0.1");
