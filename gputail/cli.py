"""The command line: verbs, their options, exit statuses, and errors printed once.

In comes argv, out goes an exit status: 0 fine, 1 a finding or a failure, 2 usage, 130 after ctrl-C. Data goes to
stdout, talk to stderr. A verb's own modules are imported when it runs, so that `replay` needs no bcc and `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gputail import __version__, config, effective, journal
from gputail.errors import GputailError, UsageError

EPILOG = """\
examples:
  gputail check                      can this node be traced, and what is missing
  gputail demo                       trace a simulated GPU for 20 seconds
  gputail top                        what the GPU programs do now, and what makes them slow
  gputail run                        trace every process that uses the GPU; metrics on 127.0.0.1:9490
  gputail record -o slow.gpt -p 4242
  gputail replay slow.gpt

exit status: 0 fine, 1 a finding or a failure, 2 wrong usage.
Each verb has a --help of its own."""

RUN_EPILOG = """\
examples:
  gputail run
  gputail run -p 4242 --jsonl | jq 'select(.outlier)'
  gputail run --listen 0.0.0.0:9490 --jsonl /var/log/gputail.jsonl
  GPUTAIL_BUDGET_PERCENT=0.5 gputail run --print-config
  gputail run --duration 60 -- python3 serve.py --port 8000"""

RECORD_EPILOG = """\
examples:
  gputail record -o slow.gpt --duration 30
  gputail record -o slow.gpt -p 4242 -p 4243
  gputail record -o slow.gpt -- python3 bench.py
  gputail record -o - | ssh desk 'cat > slow.gpt'"""

REPLAY_EPILOG = """\
examples:
  gputail replay slow.gpt
  gputail replay slow.gpt --jsonl | jq 'select(.outlier) | .cause'
  gputail replay trace.npz --jsonl records.jsonl"""

CHECK_EPILOG = """\
examples:
  gputail check
  gputail check --json | jq .

exit status: 0 this node can be traced, 1 something needed is missing."""

DEMO_EPILOG = """\
examples:
  gputail demo
  gputail demo --seconds 5"""

TOP_EPILOG = """\
examples:
  gputail top
  gputail top --filter serve.py --sort p99
  gputail top --once
  gputail top --json | jq '.workloads[].recent.p99_ns'"""

EVENTS_EPILOG = """\
examples:
  gputail events
  gputail events --cause foreign_kernel --min-ms 5
  gputail events --pid 4242 --json | jq .contributions"""

COMPLETION_EPILOG = """\
examples:
  gputail completion bash > /etc/bash_completion.d/gputail
  gputail completion zsh > /usr/local/share/zsh/site-functions/_gputail
  gputail completion fish > ~/.config/fish/completions/gputail.fish"""

REPORT_EPILOG = """\
examples:
  gputail report slow.gpt
  gputail report slow.gpt --worst 10 --workload python3/4242
  COLUMNS=80 gputail report slow.gpt --ascii > incident.txt
  gputail report slow.gpt --html slow.html --perfetto slow.json"""

EXPORT_EPILOG = """\
examples:
  gputail export /var/lib/gputail/*.gpt --parquet /srv/gputail
  gputail export --query who-hurt-whom"""


SHELLS = ("bash", "zsh", "fish")
SORTS = ("outliers", "name", "rate", "p50", "p99", "p99.9")
MAX_RECENT = 256  # verdicts from before that can be asked for
MAX_WORST = 100  # requests with a timeline in a report


class Parser(argparse.ArgumentParser):
    """Wrong usage becomes a UsageError, so that main prints every error the same way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


def _value(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse name the option in front of what `parse` says is wrong."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _option(name: str) -> Callable[[str], str]:
    """Checks the value of one of config.OPTIONS, so that argparse names the flag, and leaves it text: what it means is for
    effective.load, which tells "off" from a flag that was not given.
    """

    def check(text: str) -> str:
        config.OPTIONS[name].parse(text)
        return text

    return _value(check)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_WORST:
        raise ValueError(f"{text!r} is no number from 0 to {MAX_WORST}")
    return int(text)


def _path_of_socket(text: str) -> str:
    if text == "off":
        raise ValueError('"off" is for gputail run')
    return config.parse_socket(text) or text


def _recent(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_RECENT:
        raise ValueError(f"{text!r} is no number from 0 to {MAX_RECENT}")
    return int(text)


def parser() -> Parser:
    """The parser of the whole command line; the man page is compared with it."""
    top = Parser(prog="gputail", description="Names, live, what makes the slow requests of a GPU node slow.", epilog=EPILOG, **_RAW)
    top.add_argument("--version", action="version", version=f"gputail {__version__}")
    verbs = top.add_subparsers(title="verbs", dest="verb", metavar="VERB", parser_class=Parser)

    def verb(name: str, action: Callable[[argparse.Namespace], int], summary: str, epilog: str) -> Parser:
        added: Parser = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog, **_RAW)
        added.set_defaults(action=action)
        added.add_argument("--debug", action="store_true", help="print a traceback with an unexpected error")
        return added

    run = verb("run", _run, "trace the node's GPU programs: metrics, and a record of each request", RUN_EPILOG)
    _what_to_trace(run)
    run.add_argument(
        "--jsonl",
        nargs="?",
        const="-",
        type=_option("jsonl"),
        metavar="FILE",
        help="append a JSON object per request to FILE; stdout without FILE or with -; or off (default)",
    )
    run.add_argument(
        "--listen",
        type=_option("listen"),
        metavar="HOST:PORT",
        help=f"serve Prometheus metrics there, or off (default {config.DEFAULT_LISTEN})",
    )
    run.add_argument(
        "--max-workloads",
        type=_option("max_workloads"),
        metavar="N",
        help=f"give so many workloads series of their own, and count the rest as one (default {config.Settings.max_workloads})",
    )
    run.add_argument(
        "--metrics-tls-cert",
        type=_option("metrics_tls_cert"),
        metavar="FILE",
        help="serve metrics over TLS with this certificate (PEM), or off (default)",
    )
    run.add_argument(
        "--metrics-tls-key", type=_option("metrics_tls_key"), metavar="FILE", help="the key of that certificate, or off (default)"
    )
    run.add_argument(
        "--metrics-auth-file",
        type=_option("metrics_auth_file"),
        metavar="FILE",
        help="serve metrics only to those whose names and passwords are in this file of htpasswd (bcrypt), or off (default)",
    )
    run.add_argument(
        "--socket",
        type=_option("socket"),
        metavar="PATH",
        help=f"let gputail top and events look, there, or off (default {config.DEFAULT_SOCKET})",
    )
    run.add_argument(
        "--otlp",
        type=_option("otlp"),
        metavar="URL",
        help="send metrics and outliers to the OpenTelemetry receiver there (http, https, grpc or grpcs://HOST:PORT), or off (default)",
    )
    run.add_argument(
        "--otlp-spans", action="store_const", const="on", help="send outliers as spans, too, with the stretches of their time as children"
    )
    run.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file with settings (default {effective.DEFAULT_FILE}, if there is one); GPUTAIL_* and flags win over it",
    )
    run.add_argument("--print-config", action="store_true", help="print the effective configuration, say where each value is from, and end")

    top_verb = verb("top", _top, "a live view of the workloads, their tails and their outliers", TOP_EPILOG)
    _where_the_daemon_is(top_verb)
    top_verb.add_argument("--once", action="store_true", help="print one view as plain text; so without a terminal, too")
    top_verb.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    top_verb.add_argument("--ascii", action="store_true", help="draw with ASCII alone, as is done where the locale is not UTF-8")
    top_verb.add_argument(
        "-d", "--delay", type=_value(config.parse_duration), default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )
    top_verb.add_argument("--filter", default="", metavar="TEXT", help="show only workloads that have TEXT in a column")
    top_verb.add_argument("--sort", choices=SORTS, default="outliers", help="order of the rows (default outliers)")

    events = verb("events", _events, "follow the verdicts of the running daemon, a line each", EVENTS_EPILOG)
    _where_the_daemon_is(events)
    events.add_argument("--cause", action="append", default=[], metavar="CAUSE", help="only verdicts of this cause (repeatable)")
    events.add_argument(
        "-p",
        "--pid",
        dest="pids",
        action="append",
        default=[],
        type=_value(lambda text: config.parse_pids(text)[0]),
        metavar="PID",
        help="only verdicts on requests of this process (repeatable)",
    )
    events.add_argument("--workload", default="", metavar="NAME", help="only verdicts on workloads that have NAME in their name")
    events.add_argument(
        "--min-ms", type=_value(config.parse_duration), default=0.0, metavar="MS", help="only requests that took MS longer than usual"
    )
    events.add_argument("-n", "--recent", type=_value(_recent), default=10, metavar="N", help="begin with the last N (default 10)")
    events.add_argument("--json", action="store_true", help="print the record of each request as JSON")

    check = verb("check", _check, "say whether this node can be traced, what is missing and how to get it", CHECK_EPILOG)
    check.add_argument("--json", action="store_true", help="print one JSON object")

    record = verb("record", _record, "write what the probes see to a file, to be replayed later", RECORD_EPILOG)
    record.add_argument("-o", "--output", required=True, metavar="FILE", help="the recording; an existing file is replaced; - for stdout")
    _what_to_trace(record)

    replay = verb("replay", _replay, "analyse a recording, or a .npz trace, as the live run would have", REPLAY_EPILOG)
    replay.add_argument("file", metavar="FILE", help="written by gputail record, or a .npz trace; - for stdin")
    replay.add_argument(
        "--jsonl",
        nargs="?",
        const="-",
        type=_value(config.parse_jsonl),
        metavar="OUT",
        help="instead of the summary, write a JSON object per request to OUT; stdout without OUT or with -",
    )

    report = verb("report", _report, "a page about a recording, or a .npz trace, for an incident: text, HTML, Perfetto", REPORT_EPILOG)
    report.add_argument("file", metavar="FILE", help="written by gputail record, or a .npz trace; it is read twice")
    report.add_argument("--html", metavar="OUT", help="write the page with plots, too, as one HTML file that needs nothing else")
    report.add_argument("--perfetto", metavar="OUT", help="write requests, calls and verdicts, too, as a trace that ui.perfetto.dev opens")
    report.add_argument(
        "--worst", type=_value(_count), default=5, metavar="N", help=f"show the N worst requests (default 5, at most {MAX_WORST})"
    )
    report.add_argument("--workload", default="", metavar="NAME", help="report only on workloads that have NAME in their name")
    report.add_argument("--ascii", action="store_true", help="draw with ASCII alone, as is done where the locale is not UTF-8")

    export = verb(
        "export", _export, "write the requests and verdicts of recordings as Parquet, for many nodes' worth of them", EXPORT_EPILOG
    )
    export.add_argument("files", nargs="*", metavar="FILE", help="written by gputail record")
    export.add_argument("--parquet", metavar="DIR", help="the folder for the tables, which are partitioned by node and hour")
    export.add_argument("--node", metavar="NAME", help="name of the node, instead of what the recordings say")
    export.add_argument("--query", metavar="NAME", help="print the SQL of a question that is shipped; list for their names")

    demo = verb("demo", _demo, "trace simulated programs and show which of the slow requests were named right", DEMO_EPILOG)
    demo.add_argument("--seconds", type=_value(config.parse_duration), default=20.0, metavar="S", help="how long to trace (default 20)")

    completion = verb("completion", _completion, "print a shell's completion of this command line", COMPLETION_EPILOG)
    completion.add_argument("shell", choices=SHELLS, help="the shell it is for")
    return top


def _where_the_daemon_is(verb: Parser) -> None:
    verb.add_argument(
        "--socket",
        type=_value(_path_of_socket),
        metavar="PATH",
        help=f"the daemon's control socket (default: that of its configuration, {config.DEFAULT_SOCKET})",
    )


_RAW: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}


def _what_to_trace(verb: Parser) -> None:
    verb.usage = f"{verb.prog} [options] [-- COMMAND ...]"
    verb.add_argument(
        "-p",
        "--pid",
        dest="pids",
        action="append",
        type=_option("pids"),
        metavar="PID",
        help="trace only this process (repeatable); default: every process that uses the GPU",
    )
    verb.add_argument(
        "--library",
        dest="libraries",
        action="append",
        type=_option("libraries"),
        metavar="PATH",
        help="trace this libcuda or libnccl before any process has it mapped (repeatable)",
    )
    verb.add_argument(
        "--budget",
        dest="budget_percent",
        type=_option("budget_percent"),
        metavar="PERCENT",
        help=f"what tracing may cost each process, in percent of its CPU time (default {config.Settings.budget_percent:g})",
    )
    verb.add_argument(
        "--tier",
        choices=config.TIER_CHOICES,
        help="which calls to probe, whatever it costs: light (all but those made for each kernel), launch (of those the entries, too) "
        f"or full; or {config.AUTO}: as the budget allows (default)",
    )
    verb.add_argument("--duration", dest="duration_s", type=_option("duration_s"), metavar="S", help="end after S seconds")
    verb.add_argument(
        "--flush-ms",
        type=_option("flush_ms"),
        metavar="MS",
        help=f"drain the rings every MS milliseconds (default {config.Settings.flush_ms})",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse argv; what follows the first -- is the program to start and is left as it is."""
    own, command = list(argv), None
    if "--" in own and own[0] in ("run", "record"):
        split = own.index("--")
        own, command = own[:split], own[split + 1 :]
        if not command:
            raise UsageError("no program after --", f"see gputail {own[0]} --help")
    args = parser().parse_args(own)
    args.command = tuple(command or ())
    return args


def _run(args: argparse.Namespace) -> int:
    def load() -> effective.Effective:
        return effective.load(vars(args), os.environ, args.config)

    configuration = load()
    if args.print_config:
        sys.stdout.write(configuration.toml())
        return 0
    from gputail import daemon

    return daemon.run(configuration, load)


def _record(args: argparse.Namespace) -> int:
    settings = effective.of_flags(vars(args))
    from gputail import daemon

    return daemon.record(settings)


def _replay(args: argparse.Namespace) -> int:
    from gputail import replay

    return replay.run(args.file, args.jsonl)


def _report(args: argparse.Namespace) -> int:
    from gputail import report

    return report.run(report.Options(args.file, args.worst, args.workload, args.html, args.perfetto, args.ascii))


def _export(args: argparse.Namespace) -> int:
    from gputail import export

    if args.query is not None:
        return _print_query(args.query, export.queries())
    if not args.files or not args.parquet:
        raise UsageError("name the recordings, and with --parquet a folder", "see gputail export --help")
    return export.run(args.files, args.parquet, args.node)


def _print_query(name: str, queries: dict[str, str]) -> int:
    if name == "list":
        sys.stdout.writelines(f"{known:24}{text.splitlines()[0].removeprefix('-- ')}\n" for known, text in queries.items())
    elif name in queries:
        sys.stdout.write(queries[name])
    else:
        raise UsageError(f"no question is named {name!r}", "gputail export --query list")
    return 0


def _check(args: argparse.Namespace) -> int:
    from gputail import check

    return check.run(args.json)


def _demo(args: argparse.Namespace) -> int:
    from gputail import demo

    return demo.run(args.seconds)


def _top(args: argparse.Namespace) -> int:
    from gputail.surfaces import top

    path = args.socket or effective.daemon_socket(os.environ)
    return top.run(top.Options(path, args.once, args.json, args.ascii, args.delay, args.filter, args.sort))


def _events(args: argparse.Namespace) -> int:
    from gputail.surfaces import follow

    wanted = follow.Filter(tuple(args.cause), tuple(args.pids), args.workload, args.min_ms)
    return follow.run(args.socket or effective.daemon_socket(os.environ), wanted, args.recent, args.json)


def _completion(args: argparse.Namespace) -> int:
    from gputail import completion

    sys.stdout.write(completion.script(parser(), args.shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; prints every error, once."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        # Names of other processes may hold what the locale cannot show.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        args = parse(argv)
        if args.verb is None:
            parser().print_help(sys.stderr)
            return UsageError.exit_status
        status: int = args.action(args)
        sys.stdout.flush()
        return status
    except GputailError as error:
        journal.say_error(error)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough. Python flushes stdout once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        _report_unexpected(error, "--debug" in argv)
        return 1


def _report_unexpected(error: Exception, debug: bool) -> None:
    """A fault of ours: one line, and the traceback in a file (or on stderr, asked for or where no file can be written)."""
    hint = "please report it with the traceback above"
    log = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "gputail" / "crash.log"
    if not debug:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"gputail {__version__}, {sys.argv}\n" + "".join(traceback.format_exception(error)))
            hint = f"please report it with the traceback in {log}"
        except (OSError, RuntimeError):
            debug = True
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    journal.say_error(GputailError(f"unexpected error: {what}", hint))


def entry() -> NoReturn:
    """What the installed command runs."""
    sys.exit(main())
