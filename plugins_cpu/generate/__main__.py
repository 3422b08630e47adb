"""`python -m plugins_cpu.generate`: bring every generated file up to date."""

from __future__ import annotations

from plugins_cpu.generate import PLUGINS, generated

for path, text in generated().items():
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
        print(f"wrote {path.relative_to(PLUGINS.parent)}")
