"""LangChain's runnables keep every rule of an adapter, whichever provider's chat model is in them."""

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import art_langchain
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain

pytestmark = pytest.mark.system


def openai_model(base_url):
    return ChatOpenAI(model="m", api_key="k", base_url=base_url, max_retries=0)


def anthropic_model(base_url):
    return ChatAnthropic(model="m", api_key="k", base_url=base_url.removesuffix("/v1"), max_retries=0, max_tokens=64)


def agents_of(model):  # noqa: C901 - a list of small agents
    weather = tool("weather")(rain)

    def chain(base_url):
        return ChatPromptTemplate.from_template("{text}") | model(base_url)

    def streaming(base_url):
        async def agent(text):
            return "".join([chunk.text async for chunk in model(base_url).astream(text)])

        return agent

    def with_tools(base_url):
        asks = model(base_url).bind_tools([weather])

        async def agent(text):
            messages = [HumanMessage(text)]
            while True:
                answer = await asks.ainvoke(messages)
                messages.append(answer)
                if not answer.tool_calls:
                    return answer.text
                for call in answer.tool_calls:
                    messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))

        return agent

    def nested(base_url):
        inner = chain(base_url)

        async def twice(text):
            return (await inner.ainvoke((await inner.ainvoke(text)).text + text)).text

        return RunnableLambda(twice)

    def failing(base_url):
        async def agent(text):
            raise LookupError((await model(base_url).ainvoke(text)).text)

        return agent

    return {
        "sync": lambda base_url: lambda text: model(base_url).invoke(text).text,
        "async": chain,
        "stream": streaming,
        "tools": with_tools,
        "structured output": lambda base_url: model(base_url).with_structured_output(City),
        "threads": lambda base_url: lambda text: [m.text for m in model(base_url).batch([text, f"{text} Again."])],
        "nested agents": nested,
        "failing": failing,
    }


@pytest.mark.parametrize(
    ("framework", "model"), [("LangChain, ChatOpenAI", openai_model), ("LangChain, ChatAnthropic", anthropic_model)]
)
@pytest.mark.usefixtures("trap_network")
async def test_runnables_keep_every_rule(framework, model):
    report = await check_adapter(
        agents_of(model),
        framework=framework,
        plugin=art_langchain,
        packages=["langchain_core", "langchain"],
        to_output=lambda output: getattr(output, "text", output),
        # ChatOpenAI asks in the place of other models; both names are LangChain's.
        refusals={"AnthropicInvalidRequestError": "OpenAIInvalidRequestError"},
    )
    assert_documented(report)
