"""Prometheus' text format 0.0.4, written directly: ten thousand samples take milliseconds, not a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[str, float]]  # labels as `labelled` writes them, and the value


def labelled(labels: Mapping[str, str]) -> str:
    """Labels in braces; nothing where there are none."""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def family(name: str, kind: str, text: str, samples: Samples) -> str:
    """A metric with its help text, its type (counter, gauge) and its samples."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{labels} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def histogram(name: str, text: str, bounds: Iterable[float], series: Iterable[tuple[str, list[int], float]]) -> str:
    """A histogram: of each series its labels (`name="value",...`, without braces), counts by bucket, and the sum."""
    texts = [*(repr(bound) for bound in bounds), "+Inf"]
    lines = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    for labels, buckets, total in series:
        count = 0
        for bound, more in zip(texts, buckets, strict=True):
            count += more
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {count}')
        lines += [f"{name}_count{{{labels}}} {count}", f"{name}_sum{{{labels}}} {total!r}"]
    return "\n".join(lines) + "\n"
