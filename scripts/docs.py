"""Writes the reference pages that follow from the code: configuration, metrics, command line, errors.

    python scripts/docs.py            write docs/reference/*.md
    python scripts/docs.py --check    exit 1 when a page on disk is not what would be written

One source each: the configuration tree, the metric catalogue, the commands, the error classes, the marks of tests.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from warmfront import cli, config_schema, errors
from warmfront.obs import catalog

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for tests, which load this file by its path
import bugs_page

ROOT = Path(__file__).resolve().parents[1]
NOTICE = "<!-- Written by scripts/docs.py from the code. Do not edit. -->"
TERMINAL_WIDTH = 100


def configuration() -> str:
    """Return the page about configuration."""
    parts = [CONFIGURATION_HEAD]
    for section in config_schema.sections():
        if not section.fields:
            continue
        rows = [
            (f"`{field.path.rpartition('.')[2]}`", field.type, _default(field.default), field.doc)
            for field in section.fields
        ]
        parts += [f"## `{section.path}`", section.doc, _table(("field", "value", "default", "meaning"), rows)]
    return _page(parts)


def metrics() -> str:
    """Return the page about metrics."""
    parts = [METRICS_HEAD]
    for title, section in catalog.SECTIONS.items():
        rows = [
            (f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
            for metric in section
        ]
        parts += [f"## {title}", _table(("name", "kind", "labels", "meaning"), rows)]
    buckets = [
        (f"`{metric.name}`", ", ".join(f"{bound:g}" for bound in metric.buckets))
        for metric in catalog.METRICS
        if metric.buckets
    ]
    return _page([*parts, "## Buckets", _table(("histogram", "upper bounds"), buckets)])


def command_line() -> str:
    """Return the page about commands."""
    main = click.Context(cli.main, info_name="warmfront", terminal_width=TERMINAL_WIDTH, **cli.main.context_settings)
    parts = [CLI_HEAD, *_help(main)]
    for name in cli.COMMANDS:
        command = cli.main.get_command(main, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=main)
        parts += _help(context)
        for part in command.commands.values() if isinstance(command, click.Group) else ():
            parts += _help(click.Context(part, info_name=part.name, parent=context))
    return _page(parts)


def error_faces() -> str:
    """Return the page about errors."""
    classes = sorted(_faces(errors.ClientError), key=lambda face: (face.status, face.code))
    rows = [
        (str(face.status), f"`{face.type}`", f"`{face.code}`", inspect.getdoc(face) or "", f"`{face.__name__}`")
        for face in classes
    ]
    return _page([ERRORS_HEAD, _table(("status", "`type`", "`code`", "meaning", "class"), rows), ERRORS_TAIL])


def bugs_of_others() -> str:
    """Return the page about bugs of other routers."""
    return _page(bugs_page.parts(ROOT))


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/configuration.md": configuration,
    "docs/reference/metrics.md": metrics,
    "docs/reference/cli.md": command_line,
    "docs/reference/errors.md": error_faces,
    "docs/reference/bugs-of-others.md": bugs_of_others,
}
"""Path in the repository → what writes it."""


def stale(root: Path) -> list[str]:
    """Return the pages under `root` that are not what would be written."""
    return [path for path, write in PAGES.items() if _read(root / path) != write()]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _help(context: click.Context) -> list[str]:
    return [f"## `{context.command_path}`", f"```text\n{context.get_help()}\n```"]


def _faces(base: type[errors.ClientError]) -> Iterator[type[errors.ClientError]]:
    """Every class below `base` that a client can meet: those that name a code of their own, and `CoreError`."""
    for child in base.__subclasses__():
        if "code" in vars(child) or child is errors.CoreError:
            yield child
        yield from _faces(child)


def _default(text: str) -> str:
    return text if text == "required" else f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _page(parts: Iterable[str]) -> str:
    head, *others = parts
    title, _, rest = head.partition("\n")
    return "\n\n".join([title, NOTICE, rest.strip(), *others]) + "\n"


CONFIGURATION_HEAD = """# Configuration

Sources, weakest first:

1. the defaults below;
2. a YAML file: `warmfront serve --config FILE`;
3. the environment: `WARMFRONT_` and the path with `__` between its parts, for example
   `WARMFRONT_ROUTER__FLOW__QUEUE_TIMEOUT_S=5`;
4. `--set path.to.field=value`, the value in YAML, for example `--set router.policy.name=round_robin`;
5. the other flags of the command, for example `--replica`.

Mappings are merged key by key; everything else, lists among it, is replaced whole. Unknown fields are refused. An error
names the path and the source: `front.io_threads: expected int >= 1 (--set)`. `warmfront config` prints what is in force
and where it came from, `warmfront config --schema` the JSON Schema of the file, `warmfront check` also looks at the
servers. No time is above 1e9 s, which is as good as never, and no count above 1e15.

```yaml
fleet:
  servers:
    - url: http://10.0.0.1:8000
    - url: http://10.0.0.2:8000
      headers: {authorization: Bearer the-engines-key}
  models:
    my-model:
      tokenizer: /models/my-model
router:
  policy:
    cost: {ttft_target_s: 1.0}
```

Units are the last word of a name: `_s` seconds, `_bytes` bytes, `_max` an upper bound."""

METRICS_HEAD = """# Metrics

Prometheus text at `/metrics` of the clients' port. Every metric is listed here; `warmfront.obs.catalog` declares them.

A label takes at most `metrics.label_values_max` values in one metric; the rest count under `other`. `replica` is the
server's URL, with `#rank` behind it where a server has several data-parallel ranks; `pool` and `model` are served
names."""

CLI_HEAD = """# Command line

Exit codes: 0 success, 1 something asked about does not work (`warmfront check`), 2 a wrong option, configuration or
address; the reason is one line on standard error."""

ERRORS_HEAD = """# Errors

What warmfront itself answers, in the OpenAI form:

```json
{"error": {"message": "…", "type": "rate_limit_error", "param": null, "code": "queue_timeout"}}
```

An engine's own error passes through unchanged. Statuses 429 and 503 carry `Retry-After` where a time is known. 415 says
in `Accept-Encoding` what is taken: no encoding at all. Of a request whose head cannot be read (400, 414, 431) the path
is not known: its answer has this form on every path."""

ERRORS_TAIL = """After the first byte of a stream, an error is one SSE `data:` line with the same body (for
`/v1/responses` and `/v1/messages` their `error` event), and the stream ends without `[DONE]`."""


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        wrong = stale(ROOT)
        print("\n".join(f"{path} is not up to date: run scripts/docs.py" for path in wrong), file=sys.stderr)
        return 1 if wrong else 0
    for path, write in PAGES.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(write(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
