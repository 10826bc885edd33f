"""Asks a gateway with packages that are built on its interfaces, each in its own usual way.

    python packages.py litellm

It reads a line of JSON for each thing to do, `{"what": "call", "interface": "chat", "url": ...,
"model": ...}`, and prints what came of it as a line of JSON. It runs without Paceline, in an
environment of its own (`make test-agents`), so each package is imported where it is used.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

QUESTION = "What is the weather in Bonn?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def some_of(items, most, text=lambda item: item, leave=lambda: None):
    """Return the texts of a stream, and leave it after so many of them."""
    found = []
    try:
        async for item in items:
            found += [said] if (said := text(item)) else []
            if len(found) == most:
                leave()
                break
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
    return found


class Package:
    """A package.

    Args:
        asked: What is asked of it: the gateway's `url`, the `model`, and the `interface`.
    """

    def __init__(self, asked):
        from pydantic import BaseModel

        class Place(BaseModel):
            city: str

        self.url, self.model, self.interface = asked["url"], asked["model"], asked["interface"]
        self.place = Place
        self.called = []

    def weather(self, city: str) -> str:
        """Tell the weather."""
        self.called.append(city)
        return "clear"

    @property
    def openai(self):
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)


class OpenaiAgents(Package):
    """Its own loop of a model and its tools."""

    def agent(self, **more):
        import agents

        agents.set_tracing_disabled(disabled=True)
        over_chat = self.interface == "chat"
        kind = agents.OpenAIChatCompletionsModel if over_chat else agents.OpenAIResponsesModel
        return agents.Agent(
            name="a", instructions="Be brief.", model=kind(self.model, self.openai), **more
        )

    async def call(self):
        import agents

        tools = [agents.function_tool(self.weather)]
        return (await agents.Runner.run(self.agent(tools=tools), QUESTION)).final_output

    async def structured(self):
        import agents

        agent = self.agent(output_type=self.place)
        return (await agents.Runner.run(agent, QUESTION)).final_output.model_dump()

    async def stream(self, most):
        import agents

        result = agents.Runner.run_streamed(self.agent(), QUESTION)

        def text(event):
            data = getattr(event, "data", None)
            return data.delta if getattr(data, "type", "") == "response.output_text.delta" else ""

        return await some_of(result.stream_events(), most, text, leave=result.cancel)


class LangchainOpenai(Package):
    """Its chat model."""

    @property
    def chat(self):
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(
            model=self.model,
            base_url=f"{self.url}/v1",
            api_key="-",
            max_retries=0,
            use_responses_api=self.interface == "responses",
        )

    async def call(self):
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import StructuredTool

        tool = StructuredTool.from_function(self.weather)
        chat = self.chat.bind_tools([tool])
        answer = await chat.ainvoke(messages := [HumanMessage(QUESTION)])
        messages += [answer, *[await tool.ainvoke(it) for it in answer.tool_calls]]
        return (await chat.ainvoke(messages)).text

    async def structured(self):
        chat = self.chat.with_structured_output(self.place)
        return (await chat.ainvoke(QUESTION)).model_dump()

    async def stream(self, most):
        return await some_of(self.chat.astream(QUESTION), most, lambda it: it.text)


class Litellm(Package):
    """A provider of OpenAI's form, or of Anthropic's."""

    async def ask(self, messages=MESSAGES, **more):
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        is_anthropics = self.interface == "messages"
        return await litellm.acompletion(
            model=f"{'anthropic' if is_anthropics else 'openai'}/{self.model}",
            api_base=self.url if is_anthropics else f"{self.url}/v1",
            api_key="-",
            messages=messages,
            num_retries=0,
            max_tokens=64,
            **more,
        )

    async def call(self):
        function = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        answer = (await self.ask(tools=tools)).choices[0].message
        messages = [*MESSAGES, answer]
        for each in answer.tool_calls or []:
            told = self.weather(**json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": told})
        return (await self.ask(messages, tools=tools)).choices[0].message.content

    async def structured(self):
        answer = await self.ask(response_format=self.place)
        return json.loads(answer.choices[0].message.content)

    async def stream(self, most):
        answer = await self.ask(stream=True)
        return await some_of(
            answer, most, lambda it: it.choices[0].delta.content if it.choices else ""
        )


class Instructor(Package):
    """Objects, of a demanded call or of an answer in JSON; it has no loop and no texts."""

    def ask(self, mode):
        import instructor

        client = instructor.from_openai(self.openai, mode=instructor.Mode[mode])
        asked = {"model": self.model, "response_model": self.place, "messages": MESSAGES}
        return client, {**asked, "max_retries": 0}

    async def call(self):
        client, asked = self.ask("TOOLS")
        return self.weather((await client.create(**asked)).city)

    async def structured(self):
        client, asked = self.ask("JSON_SCHEMA")
        return (await client.create(**asked)).model_dump()

    async def stream(self, most):
        client, asked = self.ask("JSON_SCHEMA")
        return await some_of(client.create_partial(**asked), most, lambda it: it.city)


class PydanticAi(Package):
    """Its own loop of a model and its tools."""

    def agent(self, **more):
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIChatModel if self.interface == "chat" else OpenAIResponsesModel
        model = kind(self.model, provider=OpenAIProvider(openai_client=self.openai))
        return Agent(model, instructions="Be brief.", retries=0, **more)

    async def call(self):
        return (await self.agent(tools=[self.weather]).run(QUESTION)).output

    async def structured(self):
        from pydantic_ai import NativeOutput

        agent = self.agent(output_type=NativeOutput(self.place))
        return (await agent.run(QUESTION)).output.model_dump()

    async def stream(self, most):
        async with self.agent().run_stream(QUESTION) as result:
            return await some_of(result.stream_text(delta=True, debounce_by=None), most)


class Llm(Package):
    """A model of its file of models."""

    @property
    def chat(self):
        import llm

        (Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(
            f"- model_id: paceline\n  model_name: {self.model}\n  api_base: {self.url}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )
        model = llm.get_async_model("paceline")
        model.key = "-"
        return model

    async def call(self):
        return await self.chat.chain(QUESTION, tools=[self.weather]).text()

    async def structured(self):
        return json.loads(await self.chat.prompt(QUESTION, schema=self.place).text())

    async def stream(self, most):
        return await some_of(self.chat.prompt(QUESTION), most)


PACKAGES = {
    "instructor": Instructor,
    "langchain-openai": LangchainOpenai,
    "litellm": Litellm,
    "llm": Llm,
    "openai-agents": OpenaiAgents,
    "pydantic-ai": PydanticAi,
}


async def answered(asked):
    package = PACKAGES[sys.argv[1]](asked)
    more = {"most": asked["most"]} if asked["what"] == "stream" else {}
    try:
        told = await getattr(package, asked["what"])(**more)
    except Exception as error:  # noqa: BLE001 - packages have classes of their own
        names = [it.__name__ for it in type(error).__mro__]
        return {"error": names, "message": str(error)}
    return {"told": told, "called": package.called}


def main():
    for line in sys.stdin:
        # A loop for each: at its end it closes what a package has left open.
        print(json.dumps(asyncio.run(answered(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
