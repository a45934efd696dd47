"""The daemon's log on stderr: a readable line or a JSON object for each record."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final

from covenant.cli.words import json_escaped, safe

FORMATS: Final = ("text", "json")


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self.default_msec_format = "%s.%03d"

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = safe(record.message).replace("\n", "\\n")  # one line each: nobody else's words begin another
        return super().formatMessage(record)

    def formatException(self, failed: Any) -> str:
        return safe(super().formatException(failed))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json_escaped(json.dumps(row, ensure_ascii=False))


def start_logging(form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # that it starts and ends is told by the daemon
