"""Tests the bridge with the Python client SDK of the Synadia Agent Protocol and one agent behind the bridge.

Environment: NATS_URL; AGENT, the agent's name in the bridge's configuration; AGENT_COMMAND, a JSON list
that starts it; EXPECTATIONS, the path of expectations.json. This program starts the agent, and restarts it
for the check of liveness. Prints one line for each check: name, tab, `ok` or `FAILED`, tab, details.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import time

import nats
from synadia_ai.agents import Agents, Attachment, Envelope, ProtocolError, Query, ResponseChunk

AGENT = os.environ["AGENT"]
EXPECTED = json.loads(pathlib.Path(os.environ["EXPECTATIONS"]).read_text())[AGENT]
TIMEOUT = 30.0


def start_agent():
    return subprocess.Popen(json.loads(os.environ["AGENT_COMMAND"]), stdout=subprocess.DEVNULL)


async def wait_for(condition):
    """Polls until the condition returns something true; returns that."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if result := await condition():
            return result
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{condition.__name__} did not become true within {TIMEOUT} s")


class Checks:
    def __init__(self, agents, process):
        self.agents, self.process = agents, process

    async def find_agent(self):
        for agent in await self.agents.discover(timeout=0.5):
            if agent.session_name == AGENT and any(endpoint.name == "status" for endpoint in agent.endpoints):
                return agent
        return None

    async def send(self, prompt, answers=(), **options):
        """Returns the texts, questions and attachments of one prompt."""
        answers, texts, questions, attachments = list(answers), [], [], []
        async for message in self.agent.prompt(prompt, **options):
            if isinstance(message, Query):
                questions.append(message.prompt)
                answer = answers.pop(0)
                # The first answer is text, the second an envelope.
                await message.reply(Envelope(prompt=answer) if len(questions) % 2 == 0 else answer)
            elif isinstance(message, ResponseChunk):
                if message.text:
                    texts.append(message.text)
                attachments += message.attachments or []
        return texts, questions, attachments

    async def discover(self):
        self.agent = await wait_for(self.find_agent)
        agent = self.agent
        assert (agent.agent, agent.owner, agent.protocol_version) == ("a2a", "interop", "0.3")
        assert agent.prompt_endpoint.max_payload_bytes == 1 << 20, agent.prompt_endpoint
        assert agent.prompt_endpoint.attachments_ok is True
        assert (await agent.status()).instance_id == agent.instance_id
        return agent.prompt_subject

    async def prompt(self):
        texts, _, _ = await self.send("hello there")
        assert "".join(texts) == "hello there", texts
        return "".join(texts)

    async def stream(self):
        texts, _, _ = await self.send(EXPECTED["stream"]["prompt"])
        assert texts == EXPECTED["stream"]["chunks"], texts
        return f"{len(texts)} chunks"

    async def two_questions(self):
        answered = 0
        for expected in EXPECTED["questions"]:
            texts, questions, _ = await self.send(expected["prompt"], expected["answers"])
            assert len(questions) == len(expected["answers"]), questions
            assert "".join(texts) == expected["reply"], texts
            answered += len(questions)
        assert answered == 2, answered
        return f"{answered} answered"

    async def attachments(self):
        sent = Attachment.from_bytes("sent.bin", bytes(range(256)))
        texts, _, echoed = await self.send("here is a file", attachments=[sent])
        assert "".join(texts) == "here is a file", texts
        if AGENT == "demo":
            assert [(file.filename, file.to_bytes()) for file in echoed] == [("sent.bin", bytes(range(256)))]
        _, _, received = await self.send("file please")
        png = next(file for file in received if file.filename == "a.png")
        assert png.to_bytes() == b"\x89PNG\x00\x01"
        return f"sent 1, received {len(echoed) + len(received)}"

    async def error(self):
        try:
            await self.send("fail as planned")
        except ProtocolError as error:
            assert "500" in str(error) and "planned failure" in str(error), error
            return str(error)
        raise AssertionError("the prompt did not fail")

    async def liveness(self):
        first = self.agent.instance_id
        assert await self.agents.ping(first)
        self.process.kill()
        self.process.wait()

        async def is_offline():
            return not await self.agents.ping(first)

        await wait_for(is_offline)
        assert await self.find_agent() is None
        self.process = start_agent()
        self.agent = await wait_for(self.find_agent)
        second = self.agent.instance_id
        assert second != first and await self.agents.ping(second)

        async def is_online():
            liveness = self.agents.liveness(second)
            return liveness and liveness.is_online

        await wait_for(is_online)
        return "stopped and restarted"


async def main():
    connection = await nats.connect(os.environ["NATS_URL"])
    agents = Agents(nc=connection)
    # Subscribes before the agent starts, to receive its first heartbeat.
    await agents.start_tracking()
    checks = Checks(agents, start_agent())
    failed = False
    try:
        for check in ("discover", "prompt", "stream", "two_questions", "attachments", "error", "liveness"):
            try:
                details, result = await getattr(checks, check)(), "ok"
            except Exception as problem:  # noqa: BLE001: a failed check must not stop the others
                details, result, failed = f"{type(problem).__name__}: {problem}", "FAILED", True
            print(check, result, " ".join(str(details).split()), sep="\t", flush=True)
    finally:
        checks.process.kill()
        await agents.close()
        await connection.close()
    return int(failed)


sys.exit(asyncio.run(main()))
