"""Calls agents built on public A2A SDKs through a running bridge and prints the results.

Usage: drive.py BRIDGE NATS_SERVER INSTALLED OUTPUT [--ci]

BRIDGE and NATS_SERVER are programs, INSTALLED is the folder of the agents' environments, OUTPUT is the
page to write (none with --ci). One NATS server and one bridge serve all agents; every call is a
plain NATS request, as any caller would make it. The exit status is 1 when a cell fails unexpectedly.

Standard library only: the part of the NATS protocol that this needs is a page long.
"""
import contextlib
import json
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid

AGENTS = pathlib.Path(__file__).resolve().parent / "agents"
# Seconds.
CALL_TIMEOUT, READY_TIMEOUT = 30, 60

# name, folder, environment, settings, expected A2A version and binding
ROWS = [
    ("a2a-sdk-0.2", "a2a-sdk-0.2", {}, {}, "0.2 JSONRPC"),
    ("a2a-sdk-0.3", "a2a-sdk-0.3", {}, {}, "0.3 JSONRPC"),
    ("a2a-sdk-0.3-rest", "a2a-sdk-0.3", {"APP": "rest"}, {}, "0.3 HTTP+JSON"),
    ("a2a-sdk-1", "a2a-sdk-1", {}, {}, "1.0 JSONRPC"),
    ("a2a-sdk-1-rest", "a2a-sdk-1", {}, {"binding": "rest"}, "1.0 HTTP+JSON"),
    ("a2a-sdk-1-as-0.3", "a2a-sdk-1", {"COMPAT": "1"}, {"protocol": "0.3"}, "0.3 JSONRPC"),
    ("a2a-sdk-1-as-0.3-rest", "a2a-sdk-1", {"COMPAT": "1"}, {"protocol": "0.3", "binding": "rest"}, "0.3 HTTP+JSON"),
    ("fasta2a-old", "fasta2a-old", {}, {}, "0.1 JSONRPC"),
    ("fasta2a-0.6", "fasta2a-0.6", {}, {}, "0.3 JSONRPC"),
    ("fasta2a-2", "fasta2a-2", {}, {}, "1.0 JSONRPC"),
    ("python-a2a", "python-a2a", {}, {}, "0.1 JSONRPC"),
    ("bindu", "bindu", {}, {}, "0.3 JSONRPC"),
    ("bindu-stream", "bindu", {"STREAM": "1"}, {}, "0.3 JSONRPC"),
    ("a2a-js-0.3", "a2a-js-0.3", {}, {}, "0.3 JSONRPC"),
    ("a2a-js-0.3-rest", "a2a-js-0.3", {}, {"binding": "rest"}, "0.3 HTTP+JSON"),
    ("a2a-js-1", "a2a-js-1", {}, {}, "1.0 JSONRPC"),
    ("a2a-js-1-rest", "a2a-js-1", {}, {"binding": "rest"}, "1.0 HTTP+JSON"),
]
# Cells that an agent, or its version of the protocol, cannot do.
NO_FILES = "the test agent sends no files"
TASKS_ONLY = "the SDK answers with tasks only"
V01_MESSAGES = "A2A 0.1 has no direct messages"
CANNOT = {
    "fasta2a-old": {"file": NO_FILES, "message": V01_MESSAGES},
    "fasta2a-0.6": {"file": NO_FILES, "message": TASKS_ONLY},
    "fasta2a-2": {"file": NO_FILES, "message": TASKS_ONLY},
    "python-a2a": {"file": NO_FILES, "message": V01_MESSAGES},
    "bindu": {"file": NO_FILES, "message": TASKS_ONLY},
    "bindu-stream": {"file": NO_FILES, "message": TASKS_ONLY},
}


class Nats:
    """A connection that makes requests, one at a time."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=CALL_TIMEOUT + 5)
        self.file = self.socket.makefile("rb")
        self.file.readline()
        self.inbox = f"_INBOX.{uuid.uuid4().hex}"
        self.write(f'CONNECT {{"verbose":false,"headers":true,"no_responders":true}}\r\nSUB {self.inbox}.* 1\r\nPING\r\n')
        while self.file.readline().strip() != b"PONG":
            pass

    def write(self, text):
        self.socket.sendall(text.encode())

    def read_message(self):
        """The headers and the payload of the next message."""
        while True:
            line = self.file.readline().decode().strip()
            if not line:
                raise ConnectionError("nats-server closed the connection")
            if line == "PING":
                self.write("PONG\r\n")
            elif line.startswith(("MSG", "HMSG")):
                fields = line.split()
                total, header_length = int(fields[-1]), int(fields[-2]) if fields[0] == "HMSG" else 0
                data = self.file.read(total + 2)[:-2]
                return data[:header_length].decode(), data[header_length:]

    def request(self, subject, body, headers=None):
        self.publish(subject, body, headers)
        headers, payload = self.read_message()
        if headers.startswith("NATS/1.0 503"):
            return {"status": "NO_RESPONDERS", "message": f"no responders at {subject}"}
        return json.loads(payload)

    def publish(self, subject, body, headers=None):
        payload = json.dumps(body).encode()
        reply = f"{self.inbox}.{uuid.uuid4().hex}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"NATS/1.0\r\n{lines}\r\n".encode()
        line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(payload)}\r\n".encode()
        self.socket.sendall(line + head + payload + b"\r\n")

    def frames(self, subject, body, headers):
        """The frames of a stream, which ends with an empty message."""
        self.publish(subject, body, {"A2A-Reply": "stream"} | headers)
        frames = []
        while True:
            head, payload = self.read_message()
            if not payload:
                if head:
                    raise Failed(f"no responders at {subject}, or the last message has headers: {head!r}")
                return frames
            if "A2A-Seq:" not in head:  # a keep-alive
                continue
            if f"A2A-Seq: {len(frames)}" not in head:
                raise Failed(f"frame {len(frames)} is out of order: {head!r}")
            frames.append(json.loads(payload))


class Failed(Exception):
    pass


def expect(reply, status, **wanted):
    if reply.get("status") != status:
        raise Failed(f"expected {status}, got {json.dumps(reply)[:400]}")
    for key, value in wanted.items():
        if reply.get(key) != value:
            raise Failed(f"expected {key} {value!r}, got {json.dumps(reply)[:400]}")
    return reply


class Agent:
    def __init__(self, nats, name):
        self.nats, self.name, self.skill = nats, token(name), None

    def call(self, action, body, timeout=CALL_TIMEOUT):
        return self.nats.request(self.subject(action), body, {"A2A-Timeout": f"{timeout}s"})

    def prompt(self, text, **options):
        return self.call(self.skill, {"prompt": text}, **options)

    def stream(self, text):
        return self.nats.frames(self.subject(self.skill), {"prompt": text}, {"A2A-Timeout": f"{CALL_TIMEOUT}s"})

    def subject(self, action):
        return f"a2a.action.{self.name}.{action}"

    def wait_until_ready(self):
        """Finds the agent's first skill; returns the metadata of its NATS service."""
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline:
            info = self.nats.request(f"$SRV.INFO.{self.name}", {})
            endpoints = info.get("endpoints", [])
            skills = [endpoint["name"] for endpoint in endpoints if endpoint["metadata"].get("a2a.skill")]
            # The bridge publishes the action `prompt` for a card without skills.
            skills = skills or [endpoint["name"] for endpoint in endpoints if endpoint["name"] == "prompt"]
            if skills:
                self.skill = skills[0]
                return info["metadata"]
            time.sleep(0.2)
        raise Failed(f"the agent did not become ready within {READY_TIMEOUT} s")


def token(name):
    """Agent names without dots, which the bridge would escape."""
    return name.replace(".", "-")


def echo(agent):
    """text there and back, with characters outside ASCII"""
    reply = expect(agent.prompt("echo hello é你 world"), "COMPLETED", success=True)
    if not reply["message"].endswith("echo hello é你 world"):
        raise Failed(f"unexpected text: {reply['message']!r}")


def ask(agent):
    """the agent asks, the answer completes the task, a second answer is refused"""
    reply = expect(agent.prompt("ask me"), "INPUT_REQUIRED", success=False, message="which colour?")
    answer = {"follow_up_id": reply["data"]["follow_up_id"], "user_response": "blue"}
    reply = expect(agent.call("provide_required_input", answer), "COMPLETED")
    if reply["message"] not in ("you said blue", "echo: blue"):
        raise Failed(f"unexpected answer: {reply['message']!r}")
    again = agent.call("provide_required_input", answer)
    if again.get("error_info", {}).get("code") != "follow_up_used":
        raise Failed(f"a second answer was accepted: {json.dumps(again)[:300]}")


def fail(agent):
    """the task fails, with its reason"""
    reply = expect(agent.prompt("fail please"), "FAILED", success=False)
    if reply["error_info"]["code"] != "task_failed":
        raise Failed(f"unexpected code: {reply['error_info']}")


def file(agent):
    """the agent sends a file and a data part"""
    reply = expect(agent.prompt("file please"), "COMPLETED")
    [received] = reply["files"]
    if received.get("bytes") != "iVBORwAB" or received.get("mime_type") != "image/png" or received.get("size") != 6:
        raise Failed(f"unexpected file: {received}")
    if (reply["data"] or {}).get("n") != 1:
        raise Failed(f"unexpected data: {reply['data']}")


def message(agent):
    """the agent answers with a direct message instead of a task"""
    reply = expect(agent.prompt("message please"), "COMPLETED", message="direct reply")
    if reply["task"]["id"] is not None:
        raise Failed(f"unexpected task: {reply['task']}")


def cancel(agent):
    """cancel a task that waits for an answer"""
    reply = expect(agent.prompt("ask me"), "INPUT_REQUIRED")
    expect(agent.call("cancel_task", {"task_id": reply["task"]["id"]}), "CANCELED", success=True)


def unknown(agent):
    """look up a task that does not exist"""
    reply = expect(agent.call("get_task", {"task_id": str(uuid.uuid4())}), "ERROR")
    if reply["error_info"]["code"] != "not_found":
        raise Failed(f"unexpected code: {reply['error_info']}")


def crash(agent):
    """the agent raises an exception: one reply, and no success"""
    reply = agent.prompt("crash please", timeout=3)
    if reply.get("success") is not False or reply["status"] not in ("FAILED", "ERROR"):
        raise Failed(f"unexpected reply to a crash: {json.dumps(reply)[:300]}")


def stream(agent):
    """the streamed text matches the text of the result"""
    frames = agent.stream("stream please")
    if frames[0] != {"type": "status", "data": "ack"}:
        raise Failed(f"the first frame is {frames[0]}")
    reply = expect(frames[-1]["data"], "COMPLETED", success=True)
    streamed = "".join(frame["data"] for frame in frames if frame["type"] == "response")
    if streamed != reply["message"] or not streamed:
        raise Failed(f"streamed {streamed!r}, then {reply['message']!r}")


# The columns of the table: the name of a function is the name of its column, its description is on the page.
CHECKS = {check.__name__: check for check in (echo, ask, fail, file, message, stream, cancel, unknown, crash)}


def free_ports(count):
    """Distinct ports that are free, and that no outgoing connection takes: those use higher ones."""
    ports = []
    for port in random.sample(range(10_000, 32_000), 22_000):
        if len(ports) == count:
            break
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def command(folder, installed):
    if (AGENTS / folder / "package.json").exists():
        return ["node", str(installed / folder / "agent.mjs")]
    return [str(installed / folder / "bin" / "python"), str(installed / folder / "agent.py")]


def configuration(rows, installed, nats_port):
    agents = []
    for (name, folder, environment, settings, _), port in zip(rows, free_ports(len(rows))):
        agents.append({
            "name": token(name), "url": f"http://127.0.0.1:{port}", "command": command(folder, installed),
            "env": {"PORT": str(port), **environment}, "startup_timeout": f"{READY_TIMEOUT}s", **settings,
        })
    # JSON is YAML.
    return json.dumps({"nats": {"url": f"nats://127.0.0.1:{nats_port}"}, "agents": agents}, indent=1)


def start_nats(program, folder):
    [port] = free_ports(1)
    process = subprocess.Popen([program, "-a", "127.0.0.1", "-p", str(port)], stderr=open(folder / "nats.log", "wb"))
    for _ in range(100):
        try:
            return process, port, Nats(port)
        except OSError:
            time.sleep(0.05)
    raise SystemExit("nats-server did not start")


def problem_with(check, agent):
    """None if the check passes."""
    try:
        check(agent)
    except Failed as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(rows, bridge, nats_server, installed, folder):
    """Returns {name: (A2A version and binding, why the bridge chose them, {check: None or the problem})}."""
    nats_process, port, nats = start_nats(nats_server, folder)
    (folder / "bridge.yaml").write_text(configuration(rows, installed, port))
    log = open(folder / "bridge.log", "wb")
    process = subprocess.Popen([bridge, "run", "--config", str(folder / "bridge.yaml")], stdout=log, stderr=log)
    results = {}
    try:
        for name, *_ in rows:
            if process.poll() is not None:
                raise SystemExit(f"the bridge exited:\n{(folder / 'bridge.log').read_text()}")
            agent = Agent(nats, name)
            try:
                metadata = agent.wait_until_ready()
            except (Failed, ConnectionError) as error:
                results[name] = ("-", str(error), dict.fromkeys(CHECKS, str(error)))
                continue
            problems = {column: problem_with(check, agent) for column, check in CHECKS.items()}
            protocol = f"{metadata.get('a2a.protocol_version')} {metadata.get('a2a.binding')}"
            results[name] = (protocol, metadata.get("a2a.chosen_because", ""), problems)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        nats_process.terminate()
        nats_process.wait(10)
    return results


def page(rows, results):
    lines = [
        "# Interoperability",
        "",
        "`scripts/interop` launches agents on public A2A SDKs through the bridge, calls them over NATS, and writes this page.",
        "The [support matrix](support.md#sdks) has the versions of the SDKs.",
        "",
        "`ok`: the agent behaves as the [protocol](protocol.md) promises. `–`: not possible, or not tested; the reason is below the table.",
        "",
        "| column | what the call does |",
        "| --- | --- |",
        *(f"| {name} | {check.__doc__} |" for name, check in CHECKS.items()),
        "",
        f"| agent | A2A | {' | '.join(CHECKS)} |",
        f"| --- | --- | {' | '.join('---' for _ in CHECKS)} |",
    ]
    notes, failures = [], []
    for name, *_, expected in rows:
        protocol, because, problems = results[name]
        if protocol != expected:
            failures.append(f"{name}: the bridge speaks {protocol}, not {expected} ({because})")
        cells = []
        for check, problem in problems.items():
            if reason := CANNOT.get(name, {}).get(check):
                cells.append("–")
                notes.append(f"- {name}, {check}: {reason}.")
            elif problem:
                cells.append("FAILED")
                failures.append(f"{name}, {check}: {problem}")
            else:
                cells.append("ok")
        lines.append(f"| {name} | {protocol} | {' | '.join(cells)} |")
    lines += ["", "## Cells without a test", "", *notes]
    return "\n".join(lines) + "\n", failures


def main():
    bridge, nats_server, installed, output = sys.argv[1:5]
    is_ci = "--ci" in sys.argv[5:]
    installed = pathlib.Path(installed)
    rows = [row for row in ROWS if (installed / row[1] / "ready").exists()]
    if not rows:
        print("skipped: no agent is installed")
        return 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="a2a-interop-"))
    results = run(rows, bridge, nats_server, installed, folder)
    text, failures = page(rows, results)
    print(text)
    for missing in sorted({row[1] for row in ROWS} - {row[1] for row in rows}):
        print(f"skipped: {missing} is not installed")
    if failures:
        print("\n".join(failures))
        print(f"logs are in {folder}")
        return 1
    if len(rows) == len(ROWS) and not is_ci:
        pathlib.Path(output).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
