"""A deterministic agent on Bindu: no model, no authentication, state in memory. The first word of the prompt selects what
it does.

Environment: PORT; STREAM=1 makes the card announce streaming.
"""
import os

# Bindu writes its keys and logs to the current folder.
os.chdir(os.path.dirname(os.path.abspath(__file__)))
PORT = os.environ["PORT"]
os.environ.update({
    "BINDU_PORT": PORT, "STORAGE_TYPE": "memory", "SCHEDULER_TYPE": "memory", "AUTH_ENABLED": "false",
    "AUTH__ENABLED": "false", "TELEMETRY_ENABLED": "false",
})
# Bindu reads the environment when it is imported.
from bindu.penguin.bindufy import bindufy  # noqa: E402


def handler(messages):
    text = "".join(part.get("text", "") for part in messages[-1].get("parts", []))
    if text.startswith("ask"):
        return {"state": "input-required", "prompt": "which colour?"}
    if text.startswith(("fail", "crash")):
        raise RuntimeError("planned failure")
    return f"echo: {text}"


bindufy({
    "author": "a@example.com", "name": "echo", "description": "echo", "telemetry": False, "skills": [],
    "capabilities": {"streaming": os.environ.get("STREAM") == "1"},
    "deployment": {"url": f"http://127.0.0.1:{PORT}", "expose": False},
}, handler)
