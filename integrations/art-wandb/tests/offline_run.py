"""Reads an offline run back from the file that ``wandb sync`` uploads.

wandb has no reader in Python (``wandb leet inspect`` prints the same); its format is LevelDB's log of protobuf records.
"""

import json
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32 * 1024


def records(path):
    """Yield every record of a ``.wandb`` file."""
    data, position, parts = Path(path).read_bytes(), HEADER, []
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:
            position += room  # a block's last bytes are left empty where no chunk's header fits in
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if not kind:
            break
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (1, 4):  # the whole record, or its last part
            yield Record.FromString(b"".join(parts))
            parts = []


def items(found):
    """Return items as the dict that was logged; a nested one has its keys in ``nested_key``."""
    whole = {}
    for it in found:
        *outer, last = it.nested_key or [it.key]
        inside = whole
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = json.loads(it.value_json)
    return whole


class OfflineRun:
    """One folder ``offline-run-...``."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.file,) = self.folder.glob("*.wandb")
        self.records = list(records(self.file))
        self.run = self._all("run")[0]
        self.config = items(self.run.config.update)
        for it in self._all("config"):
            self.config |= items(it.update)
        self.tags, self.notes = list(self.run.tags), self.run.notes
        self.history = [items(it.item) for it in self._all("history")]
        self.artifacts = self._all("artifact")
        self.metrics = {it.name or it.glob_name: it for it in self._all("metric")}
        self.finished = bool(self._all("exit"))

    @property
    def summary(self):
        found = {}
        for it in self._all("summary"):
            found |= items(it.update)
        return found

    def values(self, key):
        """The values of a metric, by step."""
        return [(row.get("step"), row[key]) for row in self.history if key in row]

    def tables(self, key):
        """The tables logged under a key: columns and rows."""
        return [
            json.loads((self.folder / "files" / row[key]["path"]).read_text()) for row in self.history if key in row
        ]

    def models(self):
        return [it for it in self.artifacts if it.type == "model"]

    def _all(self, kind):
        return [getattr(it, kind) for it in self.records if it.WhichOneof("record_type") == kind]


def runs_in(folder):
    """The offline runs of a folder, oldest first."""
    wandb.teardown()  # the end of a file is written after ``finish`` has returned
    return [OfflineRun(it) for it in sorted((Path(folder) / "wandb").glob("offline-run-*"))]
