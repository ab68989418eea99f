"""An MCP server for the tests that does what servers may do and few do.

python mcp_odd.py [no-tools | slow | names | leaves-once NAME]
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
NAMES = ("a.b/c",) if KIND == "names" else ("first", "second", "third")
ADDRESSES = ("odd://text", "odd://broken", "odd://picture", "odd://long")


def page(items, params):
    """One item, and the cursor of the next."""
    at = int(params.cursor) if params and params.cursor else 0
    return items[at], str(at + 1) if at + 1 < len(items) else None


async def list_tools(ctx, params):
    if KIND == "slow":
        await asyncio.sleep(60)
    if KIND == "leaves-once" and not (left := Path(tempfile.gettempdir(), sys.argv[2])).exists():
        left.touch()
        os._exit(3)
    name, after = page(NAMES, params)
    return types.ListToolsResult(tools=[types.Tool(name=name, input_schema={"type": "object"})], next_cursor=after)


async def call_tool(ctx, params):
    if params.name == "second":
        return types.CallToolResult(content=[types.TextContent(text=str(os.getpid()))])
    if params.name == "third":
        return types.CallToolResult(content=[], structured_content={"days": 79})
    if params.name == "a.b/c":
        return types.CallToolResult(content=[types.TextContent(text=f"called {params.name}")])
    inside = types.TextResourceContents(uri="odd://text", text="the text inside")
    return types.CallToolResult(
        content=[
            types.EmbeddedResource(resource=inside),
            types.ResourceLink(name="more", uri="odd://more"),
            types.ImageContent(data="aGk=", mime_type="image/png"),
        ]
    )


async def list_resources(ctx, params):
    address, after = page(ADDRESSES, params)
    return types.ListResourcesResult(resources=[types.Resource(name=address, uri=address)], next_cursor=after)


async def read_resource(ctx, params):
    uri = str(params.uri)
    if uri == "odd://broken":
        raise ValueError("the file is gone")
    if uri == "odd://picture":
        return types.ReadResourceResult(contents=[types.BlobResourceContents(uri=uri, blob="aGk=")])
    text = "long " * 1000 if uri == "odd://long" else "short"
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, text=text)])


async def main():
    tools = {} if KIND == "no-tools" else {"on_list_tools": list_tools, "on_call_tool": call_tool}
    resources = {} if KIND == "slow" else {"on_list_resources": list_resources, "on_read_resource": read_resource}
    server = Server("odd", **tools, **resources)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
