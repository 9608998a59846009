"""The walk from step 1 to a right step 3: its commands print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learn.walk import PAGE, walked, without_seconds


@pytest.mark.slow
def test_the_walk_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    assert without_seconds(walked(page)) == without_seconds(page)
    assert page.count("\nright: ") == 3, "three right steps"
    assert "\n3 of " in page.rpartition("$ make exercises")[2]
    assert page.count("\nwrong: ") >= 6, "mistakes are part of it"
