// @a2a-js/sdk 1.x deterministic agent: JSON-RPC at /, REST at /rest. Env PORT
import express from 'express';
import { randomUUID as uid } from 'node:crypto';
import { Role, TaskState as S } from '@a2a-js/sdk';
import { AgentEvent, DefaultRequestHandler, InMemoryTaskStore } from '@a2a-js/sdk/server';
import { agentCardHandler, jsonRpcHandler, restHandler, UserBuilder } from '@a2a-js/sdk/server/express';
const PORT = +(process.env.PORT || 9091);
const part = ($case, value, extra = {}) => ({ content: { $case, value }, metadata: undefined, filename: '', mediaType: '', ...extra });
class Exec {
  async execute({ taskId, contextId, userMessage, task }, bus) {
    const text = userMessage.parts[0]?.content?.value ?? '';
    const message = (s, of = taskId) => ({ messageId: uid(), role: Role.ROLE_AGENT, parts: [part('text', s)], taskId: of, contextId, extensions: [], referenceTaskIds: [], metadata: undefined });
    const status = (state, s) => bus.publish(AgentEvent.statusUpdate({ taskId, contextId, status: { state, message: s && message(s), timestamp: new Date().toISOString() }, metadata: undefined }));
    const artifact = (parts, x = {}) => bus.publish(AgentEvent.artifactUpdate({ taskId, contextId, artifact: { artifactId: x.id ?? uid(), name: 'out', description: '', parts, metadata: undefined, extensions: [] }, append: x.append ?? false, lastChunk: x.last ?? true, metadata: undefined }));
    if (text.startsWith('message')) { bus.publish(AgentEvent.message(message('direct reply', ''))); bus.finished(); return; }
    if (task) { artifact([part('text', 'you said ' + text)]); status(S.TASK_STATE_COMPLETED); bus.finished(); return; }
    bus.publish(AgentEvent.task({ id: taskId, contextId, status: { state: S.TASK_STATE_SUBMITTED, message: undefined, timestamp: new Date().toISOString() }, artifacts: [], history: [userMessage], metadata: undefined }));
    status(S.TASK_STATE_WORKING);
    if (text.startsWith('ask')) { status(S.TASK_STATE_INPUT_REQUIRED, 'which colour?'); bus.finished(); return; }
    if (text.startsWith('fail')) { status(S.TASK_STATE_FAILED, 'planned failure'); bus.finished(); return; }
    if (text.startsWith('crash')) throw new Error('planned crash');
    if (text.startsWith('file')) artifact([part('raw', Buffer.from('iVBORwAB', 'base64'), { filename: 'a.png', mediaType: 'image/png' }), part('data', { n: 1 })]);
    else if (text.startsWith('stream')) for (let i = 0; i < 3; i++) { artifact([part('text', `chunk ${i} `)], { id: 'a1', append: i > 0, last: i === 2 }); await new Promise(r => setTimeout(r, 100)); }
    else artifact([part('text', text)]);
    status(S.TASK_STATE_COMPLETED); bus.finished();
  }
  async cancelTask(taskId, bus) {
    bus.publish(AgentEvent.statusUpdate({ taskId, contextId: '', status: { state: S.TASK_STATE_CANCELED, message: undefined, timestamp: new Date().toISOString() }, metadata: undefined }));
    bus.finished();
  }
}
const at = (path, protocolBinding) => ({ url: `http://127.0.0.1:${PORT}${path}`, protocolBinding, protocolVersion: '1.0', tenant: '' });
const card = {
  name: 'echo', description: 'echo', version: '0.0.1', supportedInterfaces: [at('/', 'JSONRPC'), at('/rest', 'HTTP+JSON')],
  provider: undefined, capabilities: { streaming: true, extensions: [] }, securitySchemes: {}, securityRequirements: [], signatures: [],
  defaultInputModes: ['text/plain'], defaultOutputModes: ['text/plain'],
  skills: [{ id: 'echo', name: 'Echo', description: 'echoes', tags: ['t'], examples: [], inputModes: [], outputModes: [], securityRequirements: [] }],
};
const handler = new DefaultRequestHandler(card, new InMemoryTaskStore(), new Exec()), app = express();
app.use('/.well-known/agent-card.json', agentCardHandler({ agentCardProvider: handler }));
app.use('/rest', restHandler({ requestHandler: handler, userBuilder: UserBuilder.noAuthentication }));
app.use('/', jsonRpcHandler({ requestHandler: handler, userBuilder: UserBuilder.noAuthentication }));
app.listen(PORT, '127.0.0.1');
