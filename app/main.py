"""Reads the options, binds the port, starts the server. Decides no default of the engine."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import FrameType

from app.address import PORT_TAKEN, bind, running_page, state_file
from app.engine_status import EngineLike, EngineLoader, RamAloneError
from app.gradio_import import import_gradio
from app.home_lock import HomeInUseError, home_lock, in_use
from app.models.service import ModelsService
from app.service import ChatService
from app.settings import check_answers
from localmoe.cli.streams import sound_streams
from localmoe.core.config import EngineConfig
from localmoe.core.errors import BudgetError, LocalMoeError, NoMtpLayerError
from localmoe.core.home import localmoe_home
from localmoe.core.types import ProgressCallback
from localmoe.core.uncollected import uncollected
from localmoe.core.units import format_bytes
from localmoe.engine import import_all
from localmoe.hub.disk import is_full
from localmoe.server.address import PortTakenError

_LOG = logging.getLogger(__name__)
_MANY_CORES = 4


def load_engine(
    model: str, config: EngineConfig, *, progress: ProgressCallback, cancel: threading.Event
) -> EngineLike:
    """The real engine. Imported here, in the loading thread, because torch takes seconds.

    The page's drafter is chosen for whatever is loaded next: a model without an MTP layer is loaded with its
    own low-bit draft, and its info says so. Who names a model and a drafter on a command line is refused.

    Raises:
        LocalMoeError: as `Engine.load`; RamAloneError where experts on the disk are a way on.
    """
    import_all()
    from localmoe.engine import Engine

    def load(config: EngineConfig) -> EngineLike:
        try:
            return Engine.load(model, config, progress=progress, cancel=cancel)
        except BudgetError as error:
            if error.budget_bytes is not None or not _runs_from_disk(model, config):
                raise
            raise RamAloneError(str(error), context=error.context) from error

    try:
        return load(config)
    except NoMtpLayerError as error:  # from headers alone
        _LOG.info("its low-bit draft is loaded instead: %s", error)
        return load(replace(config, drafter="self"))


def _runs_from_disk(model: str, config: EngineConfig) -> bool:
    """Whether a model that RAM refuses would run with its experts there."""
    import_all()
    from localmoe.engine.planning import plan_model

    if config.experts_on == "disk":
        return False
    try:
        plan_model(model, replace(config, experts_on="disk"))
    except LocalMoeError:
        return False
    return True


def local_models() -> list[tuple[str, str]]:
    """(label, value) of the models on this computer."""
    from localmoe.hub.catalogue import list_models

    return [(f"{model.name} ({format_bytes(model.num_bytes)})", model.name) for model in list_models()]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, as texts; their values are checked with the settings."""
    parser = argparse.ArgumentParser(
        prog="python -m app", description="Chat with a Mixture-of-Experts model."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of this computer (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=7860, help="port of the page (default 7860; 0: a free one)"
    )
    parser.add_argument(
        "--model", help="demo, a folder or a repo id on this computer (default: the last one)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    parser.add_argument("--vram-budget", metavar="SIZE", help="auto, or device memory to use, e.g. 12GiB")
    parser.add_argument("--draft-length", metavar="auto|N", help="drafted tokens a step; 0: no drafting")
    parser.add_argument("--policy", help="prefetch policy")
    parser.add_argument("--context", metavar="N", help="tokens of prompt plus answer")
    parser.add_argument("--emulated-link", metavar="SPEED", help="limit copies, e.g. 2GB/s (CPU only)")
    parser.add_argument(
        "--better-draft", metavar="on|off", help="build a better draft in the pauses between answers"
    )
    return parser.parse_args(argv)


def choose_settings(service: ChatService, options: argparse.Namespace) -> None:
    """Lay the options over the kept settings, for this run.

    Raises:
        LocalMoeError: an option is out of range.
    """
    chosen = {
        "model": options.model, "vram_budget": options.vram_budget, "context": options.context,
        "emulated_link": options.emulated_link, "better_draft": options.better_draft,
    }  # fmt: skip
    kept = service.load_settings
    kept = kept if options.model is None else kept.of_model(options.model.strip())
    load = replace(kept, **{k: v for k, v in chosen.items() if v is not None})
    answers = {"draft_length": options.draft_length, "policy": options.policy}
    values = {**asdict(service.answers), **{k: v for k, v in answers.items() if v is not None}}
    service.answers = check_answers(values)
    load.engine_config(service.answers)
    service.load_settings = load


def main(
    argv: Sequence[str] | None = None,
    *,
    engine_loader: EngineLoader = load_engine,
    list_models: Callable[[], Sequence[tuple[str, str]]] = local_models,
) -> int:
    """Run the app; its exit code: 0, 1 (refused), 2 (bad usage) or 98 (port taken). Where stderr takes
    nothing, as on a full disk, it runs without a word."""
    options = parse_arguments(argv)
    with sound_streams():
        return _main(options, engine_loader, list_models)


def _main(
    options: argparse.Namespace,
    engine_loader: EngineLoader,
    list_models: Callable[[], Sequence[tuple[str, str]]],
) -> int:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the first import of gradio
    started_with = dict(os.environ)  # for the process that may ask the Hub
    os.environ["HF_HUB_OFFLINE"] = "1"  # this one may not: a model is loaded from this computer
    home = localmoe_home()
    try:
        sock = bind(options.host, options.port)
    except PortTakenError as error:
        own = (running_page(home) or "").endswith(f":{options.port}/")
        sentence = f"Port {options.port} is taken: {in_use(home)}" if own else str(error)
        return _refuse(sentence, PORT_TAKEN)
    except LocalMoeError as error:
        return _refuse(str(error), 2)
    with sock, ExitStack() as held:
        try:
            held.enter_context(home_lock(home))  # before anything of it is read
            service = ChatService(home, engine_loader, list_models)
            choose_settings(service, options)
            models = ModelsService(home, service, started_with)
            service.logs.install()
            held.callback(service.logs.remove)
            held.enter_context(state_file(home, options.host, int(sock.getsockname()[1])))
        except HomeInUseError as error:
            return _refuse(str(error), 1)
        except LocalMoeError as error:
            return _refuse(str(error), 2)
        except OSError as error:
            reason = f"{home} cannot be used for chats and settings ({error.strerror or error})"
            remedy = "make room there" if is_full(error) else "make it writable"
            return _refuse(f"{reason}: {remedy}, or set LOCALMOE_HOME to another folder.", 1)
        return _run(service, models, sock, options)


def _run(
    service: ChatService, models: ModelsService, sock: socket.socket, options: argparse.Namespace
) -> int:
    signal.signal(signal.SIGTERM, _end)
    _look_ahead(service, models)  # beside the import below: its process imports for seconds, too
    try:
        with uncollected(for_good=True):
            import_gradio()  # here, because it takes seconds
            from app.server import serve

        serve(service, models, sock, options.host, open_browser=not options.no_browser)
    except (KeyboardInterrupt, SystemExit):
        return 0
    return 0


def _look_ahead(service: ChatService, models: ModelsService) -> None:
    """Look at the models here before anybody waits for it, but not beside a load: that counts what memory is
    free. The embedded model has room anyway; where cores are few it would be ready later."""
    beside = service.load_settings.model == "demo" and (os.cpu_count() or 1) >= _MANY_CORES
    models.shelf.look_ahead(lambda: beside or service.holder.status().phase != "loading")


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)  # so that everything open is closed in order


def _refuse(sentence: str, code: int) -> int:
    print(f"localmoe: {sentence}", file=sys.stderr)
    return code
