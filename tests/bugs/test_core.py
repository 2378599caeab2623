"""The compiled core as a guest of the interpreter."""

from __future__ import annotations

import threading

import pytest
from warmfront import core
from warmfront.config import Config, FrontConfig, core_config

JOIN_TIMEOUT_S = 20.0


@pytest.mark.bug(158)
def test_other_threads_run_while_one_waits_for_events() -> None:
    port = core.Port(core_config(Config(front=FrontConfig(listen="127.0.0.1:0"))))
    ran = threading.Event()
    waiting = threading.Thread(target=lambda: [None for _ in iter(port.receive, None)], daemon=True)
    waiting.start()
    threading.Thread(target=ran.set, daemon=True).start()
    assert ran.wait(JOIN_TIMEOUT_S)
    port.stop()
    waiting.join(JOIN_TIMEOUT_S)
    assert not waiting.is_alive()
