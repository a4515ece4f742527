"""The list of workloads as lines: the head of the screen, the columns, a row each, and what gputail itself costs and misses.

In comes the model and a width, out come lines. Pure; used by the live screen and by the single view alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gputail.surfaces.top.drawing import Line, Pen, compact
from gputail.surfaces.top.model import Model, Workload, title
from gputail.surfaces.words import duration, number, size

MIN_NAME, MAX_NAME, MIN_CAUSE, MIN_SPARK, MAX_SPARK = 12, 28, 14, 8, 24
CONTAINER, GPU = 14, 6
_FIXED = (("RATE", 5, "rate"), ("P50", 6, "p50"), ("P99", 6, "p99"), ("P99.9", 6, "p99.9"), ("OUT/m", 6, "outliers"))
MIN_PID, MAX_PID = 4, 8


@dataclass(frozen=True)
class Layout:
    """Widths of the columns that depend on the room; 0 where a column is left out."""

    pid: int
    name: int
    spark: int
    gpu: int
    container: int
    cause: int


def layout(width: int, pid: int, has_gpu: bool, has_container: bool) -> Layout:
    """Divide a width: what must be there first, then container and GPU where known, then longer names and sparklines."""
    room = width - pid - 1 - sum(columns + 1 for _, columns, _ in _FIXED)
    name, spark, cause = MIN_NAME, MIN_SPARK, MIN_CAUSE
    room -= name + 1 + spark + cause + 1
    container = gpu = 0
    if has_container and room >= CONTAINER + 1:
        container, room = CONTAINER, room - CONTAINER - 1
    if has_gpu and room >= GPU + 1:
        gpu, room = GPU, room - GPU - 1
    if room > 0:
        more = min(max(room - 20, 0) // 3, MAX_SPARK - MIN_SPARK)
        spark, room = spark + more, room - more
        wider = min(room // 2, MAX_NAME - MIN_NAME)
        name, cause = name + wider, cause + room - wider
    return Layout(pid, name, spark, gpu, container, cause)


def layout_for(model: Model, width: int) -> Layout:
    rows = model.workloads.values()
    pid = max((len(str(row["pid"])) for row in rows), default=MIN_PID)
    return layout(width, min(max(pid, MIN_PID), MAX_PID), any(row["gpu"] for row in rows), any(row["container"] for row in rows))


def head(model: Model, pen: Pen, places: Layout) -> Line:
    """Names of the columns, the one that is sorted by marked."""
    mark = "*" if pen.ascii else "▴" if model.is_inverted else "▾"

    def name(text: str, columns: int, sort: str, right: bool = True) -> str:
        return pen.fit(text + (mark if model.sort == sort else ""), columns, right)

    cells = [pen.fit("PID", places.pid, True), name("WORKLOAD", places.name, "name", False)]
    if places.gpu:
        cells.append(pen.fit("GPU", places.gpu))
    if places.container:
        cells.append(pen.fit("CONTAINER", places.container))
    cells += [name(text, columns, sort) for text, columns, sort in _FIXED]
    cells += [pen.fit("TAIL", places.spark), pen.fit("CAUSE, CULPRIT", places.cause)]
    return ((" ".join(cells), "head"),)


def row(workload: Workload, figures: str, pen: Pen, places: Layout) -> Line:
    """A workload. What is not known is "-" or "?"."""
    f = workload[figures]
    is_silent = not workload["recent"]["requests"]
    usual = workload["baseline_ns"]
    outliers = f["outliers_per_min"]
    name = pen.text(title(workload))
    if len(name) > places.name:  # the script says more than its interpreter
        name = name.rpartition(" ")[2]
    name += " " + pen.text(workload["shape"])
    spans = [
        (pen.fit(str(workload["pid"]), places.pid, True) + " ", "dim"),
        (pen.fit(name, places.name) + " ", "dim" if is_silent else "bold"),
    ]
    if places.gpu:
        spans.append((pen.fit(pen.text(workload["gpu"]) if workload["gpu"] else "-", places.gpu) + " ", ""))
    if places.container:
        spans.append((pen.fit(pen.text(workload["container"]) if workload["container"] else "-", places.container) + " ", ""))
    spans.append((pen.fit(number(f["rate"]), 5, True) + " ", ""))
    for field in ("p50_ns", "p99_ns", "p999_ns"):
        spans.append((pen.fit(compact(f[field]), 6, True) + " ", _style_of_tail(f[field], usual)))
    spans.append((pen.fit(number(outliers), 6, True) + " ", "" if not outliers else "bad" if outliers >= 10 else "warn"))
    spans.append((pen.spark(workload["trend"], places.spark, usual) + " ", "accent"))
    spans.append((pen.fit(cause(workload["top"], pen), places.cause), "warn" if workload["top"] else "dim"))
    if is_silent:
        return tuple((text, "dim") for text, _ in spans)
    return tuple(spans)


def _style_of_tail(ns: int | None, usual_ns: int | None) -> str:
    if ns is None or not usual_ns:
        return ""
    return "bad" if ns >= 2 * usual_ns else "warn" if ns >= 1.3 * usual_ns else ""


def cause(top: dict[str, Any] | None, pen: Pen) -> str:
    """What most of the latest excess went to and who is to blame for it: "foreign_kernel pid 556 gemm"."""
    if not top:
        return "-"
    return " ".join(filter(None, (pen.text(top["cause"], 24), culprit(top, pen))))


def culprit(part: dict[str, Any], pen: Pen) -> str:
    """Who is to blame: pid and name; "" where nobody is known. Names are the daemon's: pids here may be others there."""
    text = pen.text(part["culprit"]) if part["culprit"] else ""
    pid = part["culprit_pid"]
    if pid is None or f"pid {pid}" in text:
        return text
    return f"pid {pid} {text or '(not visible)'}"


def title_line(model: Model, state: str, clock: str, pen: Pen, width: int) -> Line:
    """Who is looked at, and whether the picture is live."""
    daemon = model.snapshot.get("daemon", {})
    style = {"live": "good", "paused": "warn"}.get(state.partition(" ")[0], "bad")
    about = f"daemon pid {daemon['pid']}, {daemon['version']}" if daemon else ""
    span = "last minute" if model.figures == "recent" else "since tracing began"
    left = f"gputail top  {clock}  "
    rest = (f"  filter: {pen.text(model.filter, 30)}" if model.filter else "") + f"  {about}  figures: {span}"
    return ((left, "bold"), (state, style), (pen.fit(rest, max(width - len(left) - len(state), 0)), "dim"))


def totals_line(model: Model, pen: Pen) -> Line:
    """All workloads together, and the worst."""
    rows = model.workloads.values()
    rate = sum(row["recent"]["rate"] or 0 for row in rows)
    outliers = sum(row["recent"]["outliers_per_min"] or 0 for row in rows)
    hidden = model.hidden()
    text = f"{len(rows)} workloads" + (f" ({hidden} silent)" if hidden else "") + f", {number(rate)} requests/s, "
    spans = [(text, ""), (f"{number(outliers)} outliers/min", "bad" if outliers >= 10 else "warn" if outliers else "good")]
    hanging = [one for known in model.snapshot.get("communicators", ()) for one in known["open"]]
    if hanging:
        oldest = max(one["age_ns"] for one in hanging)
        spans.append((f", {len(hanging)} collective{'s' if len(hanging) > 1 else ''} open for {duration(oldest)}", "bad"))
    if worst := model.worst():
        spans.append((f", worst: {pen.text(title(worst), 24)}[{worst['pid']}] {cause(worst['top'], pen)}", ""))
    return tuple(spans)


def cost_line(model: Model) -> Line:
    """What gputail itself costs and misses."""
    health, lost = model.snapshot["health"], sum(model.snapshot["lost"].values())
    share = model.cpu_share()
    cpu = "-" if share is None else f"{100 * share:.1f}%"
    missing = health["unattached_count"]
    spans = [
        (f"gputail: {cpu} of a core, {size(health['resident_bytes'])}, {number(model.events_per_s())} events/s, ", "dim"),
        (f"lost {number(lost) if lost else 'nothing'}", "bad" if lost else "dim"),
        (f", {health['traced_processes']} processes, {health['attached_functions']} functions", "dim"),
    ]
    shed = [one for one in health["processes"] if one["tier"] != "full"]
    if shed:
        spans.append((f", {len(shed)} below the full tier (c)", "warn"))
    if missing:
        spans.append((f", {missing} not attached (c)", "warn"))
    return tuple(spans)


def cost_page(model: Model, pen: Pen, width: int) -> list[Line]:
    """Everything gputail says of its own cost and losses."""
    health, snapshot = model.snapshot["health"], model.snapshot
    share, ratio = model.cpu_share(), health["overhead_ratio"]
    facts = [
        ("CPU of gputail", "-" if share is None else f"{100 * share:.2f}% of a core"),
        ("CPU time since its start", "-" if health["cpu_s"] is None else duration(health["cpu_s"] * 1e9)),
        ("resident memory", size(health["resident_bytes"])),
        ("cost to traced programs", "not measured" if ratio is None else f"{100 * ratio:.2f}% of their CPU time"),
        ("traced processes", str(health["traced_processes"])),
        ("attached", f"{health['attached_functions']} functions in {health['attached_libraries']} libraries"),
        ("events", f"{snapshot['events']} in all, {number(model.events_per_s())}/s"),
        ("incomplete requests", str(sum(row["incomplete"] for row in model.workloads.values()))),
    ]
    lines: list[Line] = [(("what gputail itself costs and misses", "bold"),)]
    lines += [((f"  {what:26}", "dim"), (text, "")) for what, text in facts]
    lines.append((("", ""),))
    lines.append((("cost to each process, at which tier", "bold"),))
    for one in health["processes"]:
        cost = "-" if one["share"] is None else f"{100 * one['share']:.2f}%"
        text = f"  {pen.text(one['comm'] or '?', 20)}[{one['pid']}]"
        below = f", less than full for {duration(one['shed_s'] * 1e9)}" if one["shed_s"] else ""
        lines.append(((f"{text:32}", "dim"), (f"{cost:>7} at {number(one['hits_per_s'])} hits/s, {one['tier']}{below}", "")))
    lines.append((("", ""),))
    lines.append((("lost, by stage", "bold"),))
    lines += [((f"  {pen.text(stage):26}", "dim"), (str(count), "bad")) for stage, count in sorted(snapshot["lost"].items())]
    if not snapshot["lost"]:
        lines.append((("  nothing", "good"),))
    lines.append((("", ""),))
    lines.append((("not attached", "bold"),))
    lines += [((f"  {pen.text(what)}: {pen.text(why)}"[:width], "warn"),) for what, why in health["unattached"].items()]
    if (more := health["unattached_count"] - len(health["unattached"])) > 0:
        lines.append(((f"  and {more} more", "warn"),))
    if not health["unattached_count"]:
        lines.append((("  nothing that was found", "good"),))
    return lines
