"""An environment as users write one, for the tests of environments and of agents in them."""

from art_classic.environment import Environment


class Search(Environment):
    """Keeps no state itself and takes what it needs, not a config."""

    def __init__(self, emails=("a", "b")):
        super().__init__()
        self.emails = list(emails)

    async def reset(self):
        return {"query": "which?", "search_results": [], "step": 0}

    async def step(self, action):
        state = await self.get_state()
        state["step"] += 1
        state["search_results"] += self.emails
        return state, 0.5, action["type"] == "select", {}
