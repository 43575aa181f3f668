"""`looplab serve MODEL`: an OpenAI-compatible server whose tokens may stop early."""

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from looplab.cli import exit_codes
from looplab.cli.checkpoint import open_checkpoint
from looplab.cli.config_file import parsed
from looplab.cli.engine_options import EngineOptions, open_engine
from looplab.cli.exit_codes import UserError, user_error

if TYPE_CHECKING:
    from looplab.server.config import ServerConfig

EPILOGUE = """
The API is that of OpenAI: /v1/completions, /v1/chat/completions, /v1/models. Depth is asked for per request, through
extra_body of the client: num_steps, or exit_rule with exit_threshold. Answers say under usage.depth what they ran.
A page to try it is at /, counters are at /metrics, /health and /ready are for whoever watches the process.

Only this machine can reach it, unless --host says otherwise; then it wants an API key: set LOOPLAB_API_KEYS, or name a
file with --keys. SIGTERM lets answers under way finish for --drain-seconds.

Examples:
  looplab serve demo
  looplab serve demo --port 8001 --exit-rule hazard --exit-threshold 0.5
  looplab serve demo --replicas 2
  looplab serve FOLDER --served-name my-model --numerics exact --launch-rows 32
  LOOPLAB_API_KEYS=secret looplab serve FOLDER --host 0.0.0.0 --allow-host models.example.org

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "def f(", "max_tokens": 16, "num_steps": 2}'
"""


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Serve a model over HTTP."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder, or the name of a built-in checkpoint (see `looplab list`)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    served_name: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """What clients call the model; may be given several times. Default: the name of the checkpoint."""
    keys: Path | None = None
    """File with one API key per line; keys of LOOPLAB_API_KEYS, separated by commas, count too."""
    insecure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Listen on an address that others can reach without asking for a key."""
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further name that clients may use for this server, without port; "*" allows all."""
    cors: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An origin, such as https://example.org, whose pages may read answers; may be given several times."""
    no_page: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave out the page at /."""
    send_timeout: float = 60.0
    """Seconds without progress after which a client that does not read is dropped."""
    drain_seconds: float = 30.0
    """How long answers may go on after SIGTERM."""
    replicas: int = 1
    """Engines behind the address, on the machines of a Ray cluster (extra `cluster`); each holds the whole model."""
    address: str = ""
    """Of a Ray cluster, for --replicas. Default: one that is started on this machine."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the address and nothing else."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parsed(Options, "serve", argv, EPILOGUE)
    # The web framework takes a while to import and is an extra: nothing above needs it.
    from looplab.server.app import build_app, require_serve
    from looplab.server.config import LOCAL, ServerConfig
    from looplab.server.lifecycle import bind, check_binding, check_port, read_keys, serve

    with user_error(exit_codes.USAGE, (ImportError, ValueError, OSError)):
        require_serve()
        check_port(options.port)
        keys = read_keys(options.keys, os.environ)
        check_binding(options.host, keys, insecure=options.insecure)
        config = ServerConfig(
            names=options.served_name or (Path(options.model).name,),
            keys=keys,
            hosts=(*LOCAL, options.host.lower(), *(name.lower() for name in options.allow_host)),
            cors=options.cors,
            page=not options.no_page,
            send_timeout=options.send_timeout,
            drain_seconds=options.drain_seconds,
        )
    if options.replicas != 1 or options.address:
        return _serve_replicas(options, config)
    try:
        listening = bind(options.host, options.port)
    except OSError as error:
        said = f"--port must be free on {options.host}. Got {options.port} ({error}). Choose another with --port."
        raise UserError(said, exit_codes.BUSY) from None
    with listening, open_engine(options.model, options) as engine:
        if options.min_coda_rows is not None:
            engine.predict()
        with user_error(exit_codes.MODEL, (ValueError,)):
            app = build_app(engine, engine.tokenizer, config)
        engine.start()
        if not options.quiet:
            print("\n".join(start_lines(engine.describe(), config.names)), file=sys.stderr)
        address = listening.getsockname()
        print(f"Serving {config.names[0]} at {url(address[0], address[1])}", file=sys.stderr, flush=True)
        return serve(app, listening)


def _serve_replicas(options: Options, config: "ServerConfig") -> int:
    from looplab.server.replicas import Replicas, connected, deploy

    if not options.port:
        raise UserError("--port must be named with --replicas. Got 0. Choose one, such as 8000.", exit_codes.USAGE)
    sizes = options.engine_config()
    rows = sizes.launch_rows or (16 if options.device == "cpu" else 64)
    with user_error(exit_codes.USAGE, (ImportError, ValueError)):
        replicas = Replicas(
            count=options.replicas,
            host=options.host,
            port=options.port,
            ongoing=(sizes.max_resident or rows + max(1, rows // 2)) + sizes.max_waiting,
            resources={"CPU": 1.0} if options.device == "cpu" else {"CPU": 1.0, "GPU": 1.0},
        )
    open_checkpoint(options.model, options)  # what cannot be opened here is said before a cluster is asked
    with user_error(exit_codes.USAGE, (ImportError, ConnectionError)), connected(options.address) as until_told:
        where = deploy(functools.partial(open_engine, options.model, options), config, replicas)
        print(f"Serving {config.names[0]} at {where} ({options.replicas} replicas)", file=sys.stderr, flush=True)
        return until_told()


def start_lines(card: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """What an operator has to know of an engine before the first request."""
    yield f"model: {', '.join(names)} ({card['architecture']}), trained steps {card['trained_steps']}"
    default = card["config"]["exit_rule"]
    threshold = card["config"]["exit_threshold"]
    rule = f"{default}({threshold:g})" if default and threshold is not None else default or "full, every token"
    yield f"depth: at most {card['max_steps']} steps; exit rule {rule}; loaded: {', '.join(card['exit_rules'])}"
    if card["draft_steps"]:
        yield f"drafts: up to {card['draft_tokens']} tokens guessed at {card['draft_steps']} steps, full depth confirms"
    for name, why in card["refused_rules"].items():
        yield f"depth: {name} is not loaded: {why}"
    yield (
        f"launches: W {card['launch_rows']} rows, R {card['max_resident']} residents, m {card['min_coda_rows']} rows "
        f"per readout; bound at half depth {card['bound_at_half_depth']:.2f}x, {_realised(card)}"
    )
    yield (
        f"KV cache: rule {card['kv_rule']} ({card['kv_reason']}), {card['pages']:,} pages of {card['page_tokens']} "
        f"tokens = {card['kv_tokens']:,} tokens at {card['kv_bytes_per_token']:,} bytes; context {card['context']:,}"
    )
    verdict = "not asked, as no token stops early by default" if card["reuse"] == "full depth" else card["reuse"]
    yield f"reuse of KV after early exits: {verdict} (looplab reuse)"
    yield f"numerics: {card['numerics']}; first states: {card['noise']}"


def url(host: str, port: int) -> str:
    """The address as a browser takes it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _realised(card: Mapping[str, Any]) -> str:
    share = card["predicted_realised"]
    if share is None:
        return "realised fraction not predicted: launches of one row, or of the whole plan, or too few pages"
    return f"predicted realised fraction {share:.3f} {card['predicted_for']}"
