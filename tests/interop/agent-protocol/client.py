"""The Python client SDK of the Synadia Agent Protocol against one agent behind the bridge.

Environment: NATS_URL; AGENT, the agent's name in the bridge's settings; AGENT_COMMAND, a JSON list
that starts it. The agent is started here, and ended and started again to see its liveness. Prints one
line for each check: name, tab, `ok` or `FAILED`, tab, what was seen.
"""

import asyncio
import json
import os
import subprocess
import sys
import time

import nats
from synadia_ai.agents import Agents, Attachment, Envelope, ProtocolError, Query, ResponseChunk

AGENT = os.environ["AGENT"]
SOON = 30.0
# What the agents do depends on the first word: a prompt that asks, and the answers to its questions.
QUESTIONS = {
    "demo": [("report about tides", ["on paper", "as PDF"])],
    "a2a-sdk-1": [("ask me", ["blue"]), ("ask me", ["green"])],
}[AGENT]
ANSWERS = {"demo": ["Report: report about tides"], "a2a-sdk-1": ["you said blue", "you said green"]}[AGENT]
STREAM = {
    "demo": ("stream one two three", ["one ", "two ", "three"]),
    "a2a-sdk-1": ("stream", ["chunk 0 ", "chunk 1 ", "chunk 2 "]),
}[AGENT]


def start_agent():
    return subprocess.Popen(json.loads(os.environ["AGENT_COMMAND"]), stdout=subprocess.DEVNULL)


async def until(look):
    """The first answer that is true."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        if found := await look():
            return found
        await asyncio.sleep(0.05)
    raise TimeoutError("it did not become true in time")


class Run:
    def __init__(self, agents, process):
        self.agents, self.process = agents, process

    async def found(self):
        for agent in await self.agents.discover(timeout=0.5):
            if agent.session_name == AGENT and any(e.name == "status" for e in agent.endpoints):
                return agent
        return None

    async def ask(self, prompt, answers=(), **options):
        """Texts, questions and attachments of one prompt."""
        answers, texts, questions, attachments = list(answers), [], [], []
        async for message in self.agent.prompt(prompt, **options):
            if isinstance(message, Query):
                questions.append(message.prompt)
                answer = answers.pop(0)
                # Once as text, once as an envelope.
                await message.reply(Envelope(prompt=answer) if len(questions) % 2 == 0 else answer)
            elif isinstance(message, ResponseChunk):
                if message.text:
                    texts.append(message.text)
                attachments += message.attachments or []
        return texts, questions, attachments

    async def discover(self):
        self.agent = await until(self.found)
        agent = self.agent
        assert (agent.agent, agent.owner, agent.protocol_version) == ("a2a", "interop", "0.3")
        assert agent.prompt_endpoint.max_payload_bytes == 1 << 20, agent.prompt_endpoint
        assert agent.prompt_endpoint.attachments_ok is True
        assert (await agent.status()).instance_id == agent.instance_id
        return agent.prompt_subject

    async def prompt(self):
        texts, _, _ = await self.ask("hello there")
        assert "".join(texts) == "hello there", texts
        return "".join(texts)

    async def stream(self):
        prompt, expected = STREAM
        texts, _, _ = await self.ask(prompt)
        assert texts == expected, texts
        return f"{len(texts)} chunks"

    async def two_questions(self):
        seen, told = [], []
        for prompt, answers in QUESTIONS:
            texts, questions, _ = await self.ask(prompt, answers)
            assert len(questions) == len(answers), questions
            seen += questions
            told.append("".join(texts))
        assert len(seen) == 2 and told == ANSWERS, (seen, told)
        return f"{len(seen)} answered"

    async def attachments(self):
        sent = Attachment.from_bytes("sent.bin", bytes(range(256)))
        texts, _, back = await self.ask("here is a file", attachments=[sent])
        assert "".join(texts) == "here is a file", texts
        if AGENT == "demo":
            assert [(a.filename, a.to_bytes()) for a in back] == [("sent.bin", bytes(range(256)))]
        _, _, got = await self.ask("file please")
        png = next(a for a in got if a.filename == "a.png")
        assert png.to_bytes() == b"\x89PNG\x00\x01"
        return f"sent 1, received {len(back) + len(got)}"

    async def error(self):
        try:
            await self.ask("fail as planned")
        except ProtocolError as error:
            assert "500" in str(error) and "planned failure" in str(error), error
            return str(error)
        raise AssertionError("no error")

    async def liveness(self):
        first = self.agent.instance_id
        assert await self.agents.ping(first)
        self.process.kill()
        self.process.wait()

        async def is_gone():
            return not await self.agents.ping(first)

        await until(is_gone)
        assert await self.found() is None
        self.process = start_agent()
        self.agent = await until(self.found)
        second = self.agent.instance_id
        assert second != first and await self.agents.ping(second)

        async def is_online():
            liveness = self.agents.liveness(second)
            return liveness and liveness.is_online

        await until(is_online)
        return "went and came"


async def main():
    connection = await nats.connect(os.environ["NATS_URL"])
    agents = Agents(nc=connection)
    # Before the agent: its first heartbeat is to be heard.
    await agents.start_tracking()
    run = Run(agents, start_agent())
    failed = False
    try:
        for check in ("discover", "prompt", "stream", "two_questions", "attachments", "error", "liveness"):
            try:
                seen, verdict = await getattr(run, check)(), "ok"
            except Exception as problem:  # noqa: BLE001: every check is to be tried
                seen, verdict, failed = f"{type(problem).__name__}: {problem}", "FAILED", True
            line = " ".join(str(seen).split())
            print(f"{check}\t{verdict}\t{line}", flush=True)
    finally:
        run.process.kill()
        await agents.close()
        await connection.close()
    return int(failed)


sys.exit(asyncio.run(main()))
