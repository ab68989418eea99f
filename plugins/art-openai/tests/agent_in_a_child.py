"""An agent that works in child processes and knows nothing of art."""

import openai

HELLO = [{"role": "user", "content": "hello"}]


def ask(base_url: str | None = None) -> str:
    """Ask a model, at ``base_url`` or where the environment says."""
    with openai.OpenAI(base_url=base_url, api_key="agent" if base_url else None, max_retries=0) as client:
        return client.chat.completions.create(model="m", messages=HELLO).choices[0].message.content


def send(connection, base_url: str | None) -> None:
    connection.send(ask(base_url))
    connection.close()


if __name__ == "__main__":
    print(ask())
