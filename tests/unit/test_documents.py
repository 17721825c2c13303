"""Examples in documents run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{document.relative_to(ROOT)}-{number}")
    for document in DOCUMENTS
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_in_a_document_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {"__name__": "example"})
