"""Calls agents built on public A2A SDKs through a running bridge and prints the results.

Usage: drive.py BRIDGE NATS_SERVER INSTALLED OUTPUT [--ci]

BRIDGE and NATS_SERVER are programs, INSTALLED is the folder of the agents' environments, OUTPUT is the
page to write (none with --ci). One NATS server and one bridge serve all agents; every call is a
plain NATS request, as any caller would make it. The exit status is 1 when a cell fails unexpectedly.

Standard library only: the part of the NATS protocol that this needs is a page long.
"""
import contextlib, json, os, pathlib, socket, subprocess, sys, tempfile, time, uuid

HERE = pathlib.Path(__file__).resolve().parent
AGENTS = HERE / "agents"
LIMIT = 30

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
NO_FILES, OLD = "the test agent sends no files", "A2A 0.1 has no direct messages"
NO_MESSAGES = "the SDK answers with tasks only"
CANNOT = {
    ("fasta2a-old", "file"): NO_FILES, ("fasta2a-old", "message"): OLD,
    ("fasta2a-0.6", "file"): NO_FILES, ("fasta2a-0.6", "message"): NO_MESSAGES,
    ("fasta2a-2", "file"): NO_FILES, ("fasta2a-2", "message"): NO_MESSAGES,
    ("python-a2a", "file"): NO_FILES, ("python-a2a", "message"): OLD,
    ("bindu", "file"): NO_FILES, ("bindu", "message"): NO_MESSAGES,
    ("bindu-stream", "file"): NO_FILES, ("bindu-stream", "message"): NO_MESSAGES,
}


class Nats:
    """A connection that makes requests, one at a time."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT + 5)
        self.file = self.socket.makefile("rb")
        self.file.readline()
        self.inbox = f"_INBOX.{uuid.uuid4().hex}"
        self.write(f'CONNECT {{"verbose":false,"headers":true,"no_responders":true}}\r\nSUB {self.inbox}.* 1\r\nPING\r\n')
        while self.file.readline().strip() != b"PONG":
            pass

    def write(self, text):
        self.socket.sendall(text.encode())

    def message(self):
        while True:
            line = self.file.readline().decode().strip()
            if not line:
                raise ConnectionError("the broker left")
            if line == "PING":
                self.write("PONG\r\n")
            elif line.startswith(("MSG", "HMSG")):
                words = line.split()
                total, head = int(words[-1]), int(words[-2]) if words[0] == "HMSG" else 0
                data = self.file.read(total + 2)[:-2]
                return data[:head].decode(), data[head:]

    def request(self, subject, body, headers=None):
        self.publish(subject, body, headers)
        status, answer = self.message()
        if status.startswith("NATS/1.0 503"):
            return {"status": "NO_RESPONDERS", "message": f"nobody answers at {subject}"}
        return json.loads(answer)

    def publish(self, subject, body, headers=None):
        payload = json.dumps(body).encode()
        reply = f"{self.inbox}.{uuid.uuid4().hex}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"NATS/1.0\r\n{lines}\r\n".encode()
        line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(payload)}\r\n".encode()
        self.socket.sendall(line + head + payload + b"\r\n")

    def frames(self, subject, body, headers):
        """The frames of a stream, to its empty end."""
        self.publish(subject, body, {"A2A-Reply": "stream"} | headers)
        frames = []
        while True:
            head, data = self.message()
            if not data:
                if head:
                    raise Failed(f"nobody answers at {subject}, or the end has headers: {head!r}")
                return frames
            if "A2A-Seq:" not in head:  # a keep-alive
                continue
            if f"A2A-Seq: {len(frames)}" not in head:
                raise Failed(f"frame {len(frames)} is out of order: {head!r}")
            frames.append(json.loads(data))


class Failed(Exception):
    pass


def expect(reply, status, **wanted):
    if reply.get("status") != status:
        raise Failed(f"{status} expected, got {json.dumps(reply)[:400]}")
    for key, value in wanted.items():
        if reply.get(key) != value:
            raise Failed(f"{key} {value!r} expected, got {json.dumps(reply)[:400]}")
    return reply


class Agent:
    def __init__(self, nats, name):
        self.nats, self.name = nats, name

    def action(self, action, body, **headers):
        headers = {"A2A-Timeout": f"{LIMIT}s"} | headers
        return self.nats.request(f"a2a.action.{token(self.name)}.{action}", body, headers)

    def skill(self, prompt):
        return self.action(self.skill_token, {"prompt": prompt})

    def prepare(self):
        """Waits until the agent is ready; gives its registry object."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            info = self.nats.request(f"$SRV.INFO.{token(self.name)}", {})
            endpoints = info.get("endpoints", [])
            actions = [e for e in endpoints if e["metadata"].get("a2a.skill")]
            # A card without skills is called as a whole.
            actions = actions or [e for e in endpoints if e["name"] == "prompt"]
            if actions:
                self.skill_token = actions[0]["name"]
                return info["metadata"]
            time.sleep(0.2)
        raise Failed("it did not become ready")


def token(name):
    """Agent names without dots, which the bridge would escape."""
    return name.replace(".", "-")


def echo(agent):
    """text there and back, with characters outside ASCII"""
    reply = expect(agent.skill("echo hello é你 world"), "COMPLETED", success=True)
    if not reply["message"].endswith("echo hello é你 world"):
        raise Failed(f"unexpected text: {reply['message']!r}")


def ask(agent):
    """the agent asks, the answer completes the task, a second answer is refused"""
    reply = expect(agent.skill("ask me"), "INPUT_REQUIRED", success=False, message="which colour?")
    answer = {"follow_up_id": reply["data"]["follow_up_id"], "user_response": "blue"}
    reply = expect(agent.action("provide_required_input", answer), "COMPLETED")
    if reply["message"] not in ("you said blue", "echo: blue"):
        raise Failed(f"unexpected answer: {reply['message']!r}")
    again = agent.action("provide_required_input", answer)
    if again.get("error_info", {}).get("code") != "follow_up_used":
        raise Failed(f"a second answer was accepted: {json.dumps(again)[:300]}")


def fail(agent):
    """the task fails, with its reason"""
    reply = expect(agent.skill("fail please"), "FAILED", success=False)
    if reply["error_info"]["code"] != "task_failed":
        raise Failed(f"unexpected code: {reply['error_info']}")


def file(agent):
    """the agent sends a file and a data part"""
    reply = expect(agent.skill("file please"), "COMPLETED")
    [given] = reply["files"]
    if given.get("bytes") != "iVBORwAB" or given.get("mime_type") != "image/png" or given.get("size") != 6:
        raise Failed(f"unexpected file: {given}")
    if (reply["data"] or {}).get("n") != 1:
        raise Failed(f"unexpected data: {reply['data']}")


def message(agent):
    """the agent answers with a direct message instead of a task"""
    reply = expect(agent.skill("message please"), "COMPLETED", message="direct reply")
    if reply["task"]["id"] is not None:
        raise Failed(f"unexpected task: {reply['task']}")


def cancel(agent):
    """cancel a task that waits for an answer"""
    reply = expect(agent.skill("ask me"), "INPUT_REQUIRED")
    expect(agent.action("cancel_task", {"task_id": reply["task"]["id"]}), "CANCELED", success=True)


def unknown(agent):
    """look up a task that does not exist"""
    reply = expect(agent.action("get_task", {"task_id": str(uuid.uuid4())}), "ERROR")
    if reply["error_info"]["code"] != "not_found":
        raise Failed(f"unexpected code: {reply['error_info']}")


def crash(agent):
    """the agent raises an exception: one reply, and no success"""
    reply = agent.action(agent.skill_token, {"prompt": "crash please"}, **{"A2A-Timeout": "3s"})
    if reply.get("success") is not False or reply["status"] not in ("FAILED", "ERROR"):
        raise Failed(f"unexpected reply to a crash: {json.dumps(reply)[:300]}")


def stream(agent):
    """the streamed text matches the text of the result"""
    frames = agent.nats.frames(f"a2a.action.{token(agent.name)}.{agent.skill_token}", {"prompt": "stream please"},
                               {"A2A-Timeout": f"{LIMIT}s"})
    if frames[0] != {"type": "status", "data": "ack"}:
        raise Failed(f"the first frame is {frames[0]}")
    reply = expect(frames[-1]["data"], "COMPLETED", success=True)
    streamed = "".join(frame["data"] for frame in frames if frame["type"] == "response")
    if streamed != reply["message"] or not streamed:
        raise Failed(f"streamed {streamed!r}, then {reply['message']!r}")


BEHAVIOURS = [
    ("echo", echo), ("ask", ask), ("fail", fail), ("file", file), ("message", message),
    ("stream", stream), ("cancel", cancel), ("unknown", unknown), ("crash", crash),
]


def free_ports(count):
    """Different ports: they are all held until the last is found."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


def command(folder, installed):
    if (AGENTS / folder / "package.json").exists():
        return ["node", str(installed / folder / "agent.mjs")]
    return [str(installed / folder / "bin" / "python"), str(installed / folder / "agent.py")]


def settings(rows, installed, nats_port):
    agents = []
    for (name, folder, environment, extra, _), port in zip(rows, free_ports(len(rows))):
        agents.append({
            "name": token(name), "url": f"http://127.0.0.1:{port}", "command": command(folder, installed),
            "env": {"PORT": str(port), **environment}, "startup_timeout": "60s", **extra,
        })
    # JSON is YAML.
    return json.dumps({"nats": {"url": f"nats://127.0.0.1:{nats_port}"}, "agents": agents}, indent=1)


def start_broker(program, folder):
    [port] = free_ports(1)
    broker = subprocess.Popen([program, "-a", "127.0.0.1", "-p", str(port)], stderr=open(folder / "nats.log", "wb"))
    for _ in range(100):
        try:
            return broker, port, Nats(port)
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the broker does not start")


def run(rows, bridge, nats_server, installed, folder):
    """Gives {name: (wire, because, {behaviour: None or why not})}."""
    broker, port, nats = start_broker(nats_server, folder)
    (folder / "bridge.yaml").write_text(settings(rows, installed, port))
    log = open(folder / "bridge.log", "wb")
    process = subprocess.Popen([bridge, "run", "--config", str(folder / "bridge.yaml")], stdout=log, stderr=log)
    results = {}
    try:
        for name, _, _, _, _ in rows:
            if process.poll() is not None:
                raise SystemExit(f"the bridge has ended:\n{(folder / 'bridge.log').read_text()}")
            agent, cells = Agent(nats, name), {}
            try:
                facts = agent.prepare()
            except (Failed, ConnectionError) as error:
                results[name] = ("-", str(error), {behaviour: str(error) for behaviour, _ in BEHAVIOURS})
                continue
            for behaviour, check in BEHAVIOURS:
                try:
                    check(agent)
                    cells[behaviour] = None
                except Failed as error:
                    cells[behaviour] = str(error)
                except Exception as error:
                    cells[behaviour] = f"{type(error).__name__}: {error}"
            wire = f"{facts.get('a2a.protocol_version')} {facts.get('a2a.binding')}"
            results[name] = (wire, facts.get("a2a.chosen_because", ""), cells)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        broker.terminate()
        broker.wait(10)
    return results


def page(rows, results):
    names = [behaviour for behaviour, _ in BEHAVIOURS]
    lines = [
        "# Interoperability",
        "",
        "`scripts/interop` launches agents on public A2A SDKs through the bridge, calls them over NATS, and writes this page.",
        "The [support matrix](support.md#sdks) has the versions of the SDKs.",
        "",
        "`ok`: the agent behaves as the [protocol](protocol.md) promises. `–`: the agent itself cannot do this; the reason is below the table.",
        "",
        "| column | what the call does |",
        "| --- | --- |",
        *(f"| {behaviour} | {check.__doc__} |" for behaviour, check in BEHAVIOURS),
        "",
        f"| agent | A2A | {' | '.join(names)} |",
        f"| --- | --- | {' | '.join('---' for _ in names)} |",
    ]
    notes, failures = [], []
    for name, _, _, _, expected in rows:
        wire, because, cells = results[name]
        marks = []
        if wire != expected:
            failures.append(f"{name}: the bridge speaks {wire}, not {expected} ({because})")
        for behaviour in names:
            problem, reason = cells[behaviour], CANNOT.get((name, behaviour))
            if reason:
                marks.append("–")
                notes.append(f"- {name}, {behaviour}: {reason}.")
            elif problem:
                marks.append("FAILED")
                failures.append(f"{name}, {behaviour}: {problem}")
            else:
                marks.append("ok")
        lines.append(f"| {name} | {wire} | {' | '.join(marks)} |")
    lines += ["", "## What an agent cannot do", "", *notes]
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
