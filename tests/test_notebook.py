"""The notebook of the quick start is the page's code, has no outputs in it, and runs."""

import asyncio

import nbformat
import pytest
from doc_blocks import ROOT, blocks_of

FILE = ROOT / "examples" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(FILE, as_version=4)


def test_its_agent_tasks_and_reward_are_those_of_the_page_and_no_output_is_stored(notebook):
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    page = [block.code.rstrip() for block in blocks_of(ROOT / "docs" / "quickstart.md") if block.language == "python"]
    assert [cell.source for cell in codes[:2]] == page[:2]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in codes)


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
async def test_it_runs_learns_and_draws(notebook, tmp_path):
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    await asyncio.wait_for(client.async_execute(), 300)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    said = "".join(output.get("text", "") for output in outputs)
    before, after = said.partition("right words: ")[2].split("%")[:2]
    assert int(after.rpartition(" ")[2]) > int(before) + 30
