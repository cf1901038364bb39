"""A weather agent on a2a-sdk: one skill streams its answer, the other one asks a question first."""
import asyncio, os
import uvicorn
from a2a.helpers import new_task_from_user_message, new_text_part
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill
from starlette.applications import Starlette

PORT = int(os.environ["PORT"])
SKILLS = [
    AgentSkill(id="forecast", name="Forecast", tags=["weather"], description="Forecast for {city}, {days} days"),
    AgentSkill(id="pack", name="Packing list", tags=["travel"], description="What to pack for a trip"),
]

class Weather(AgentExecutor):
    async def execute(self, context, events):
        skill, text = context.message.metadata["skill_id"], context.get_user_input()
        if context.current_task is None:
            await events.enqueue_event(new_task_from_user_message(context.message))
        task = TaskUpdater(events, context.task_id, context.context_id)
        await task.start_work()
        if skill == "pack" and context.current_task is None:
            question = new_text_part("Sea or mountains?")
            return await task.requires_input(task.new_agent_message([question]))
        answer = f"For {text}: boots, and a coat" if skill == "pack" else f"{text}: sun, then rain, then sun again"
        for number, word in enumerate(answer.split(" ")):
            part = new_text_part(word if number == 0 else " " + word)
            await task.add_artifact([part], artifact_id="answer", append=number > 0)
            await asyncio.sleep(0.1)
        await task.complete()

    async def cancel(self, context, events):
        await TaskUpdater(events, context.task_id, context.context_id).cancel()

card = AgentCard(
    name="Weather", description="Forecasts and packing lists", version="1.0.0", skills=SKILLS,
    capabilities=AgentCapabilities(streaming=True),
    default_input_modes=["text/plain"], default_output_modes=["text/plain"],
    supported_interfaces=[AgentInterface(url=f"http://127.0.0.1:{PORT}/", protocol_binding="JSONRPC", protocol_version="1.0")],
)
handler = DefaultRequestHandler(agent_executor=Weather(), task_store=InMemoryTaskStore(), agent_card=card)
uvicorn.run(Starlette(routes=create_agent_card_routes(card) + create_jsonrpc_routes(handler, "/")), host="127.0.0.1", port=PORT)
