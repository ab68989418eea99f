"""A W&B server on 127.0.0.1: it knows runs, the rows of their history, files and artifacts, as far as wandb asks.

A run's rows are lines of a file that clients write at an offset, as W&B keeps them.
"""

import gzip
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "a" * 40


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked = []
        """The names of all GraphQL requests."""
        self.rows, self.summaries, self.files, self.artifacts = {}, {}, {}, {}
        """Rows and summaries by run, contents of files by their path, aliases of artifacts by their name."""
        self.status = 200
        """Of every answer."""

    def handle_error(self, request, client_address):
        pass  # wandb drops connections when it ends

    def environment(self):
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def answer(self, name, given):
        """Return the data of a GraphQL answer."""
        owner = {"id": "e1", "name": "team"}
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if name == "Viewer":
            return {"viewer": {"id": "u1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "RunResumeStatus":
            return {
                "model": {"id": "p1", "name": given["project"], "entity": owner, "bucket": self._resumed(given["name"])}
            }
        if name == "UpsertBucket":
            known = given["name"] in self.rows
            self.rows.setdefault(given["name"], [])
            project = {"id": "p1", "name": given["project"], "entity": owner}
            bucket = {
                "id": given["name"],
                "name": given["name"],
                "displayName": given["displayName"],
                "project": project,
            }
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": not known}}
        if name == "CreateRunFiles":
            files = [{"name": it, "uploadUrl": f"{self.url}/{given['run']}/{it}"} for it in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        return self._artifact(name, given)

    def _resumed(self, run):
        if run not in self.rows:
            return None
        rows = self.rows[run]
        return {
            "id": run, "name": run, "historyLineCount": len(rows), "historyTail": json.dumps(rows[-1:]),
            "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]", "summaryMetrics": self.summaries.get(run, "{}"),
            "config": "{}", "wandbConfig": '{"t": {}}', "tags": [],
        }  # fmt: skip

    def _artifact(self, name, given):
        if name == "ArtifactType":
            return {"project": {"artifact": None}}
        if name == "CreateArtifact":
            name = given["input"]["artifactCollectionName"]
            self.artifacts.setdefault(name, []).append({it["alias"] for it in given["input"]["aliases"]})
            made = {"id": name, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if name == "CreateArtifactManifest":
            file = {"id": "f", "uploadUrl": f"{self.url}/{given['artifactID']}/manifest", "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
        if name == "CreateArtifactFiles":
            nodes = [
                {
                    "storagePath": it["name"], "uploadUrl": f"{self.url}/{it['artifactID']}/{it['name']}", "uploadHeaders": [],
                    "uploadMultipartUrls": None, "artifact": {"id": it["artifactID"]},
                }
                for it in given["input"]["artifactFiles"]
            ]  # fmt: skip
            return {"createArtifactFiles": {"files": {"edges": [{"node": it} for it in nodes]}}}
        if name == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}
        return {}


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_PUT(self):
        self.server.files[self.path.lstrip("/")] = self._body()
        self._answer({})

    def do_POST(self):
        asked = json.loads(self._body())
        if not self.path.endswith("/graphql"):
            self._keep_rows(self.path.split("/")[-2], asked.get("files") or {})
            return self._answer({"exitcode": None, "limits": {}})
        name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
        self.server.asked.append(name)
        self._answer({"data": self.server.answer(name, asked.get("variables") or {})})

    def _keep_rows(self, run, files):
        if found := files.get("wandb-history.jsonl"):
            rows, at = self.server.rows[run], found["offset"]
            rows[at : at + len(found["content"])] = found["content"]
        if found := files.get("wandb-summary.json"):
            self.server.summaries[run] = found["content"][-1]

    def _body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, answered):
        body = json.dumps(answered if self.server.status == 200 else {"errors": [{"message": "no"}]}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
