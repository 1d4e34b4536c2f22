"""How the engine's listening socket is set up."""

from __future__ import annotations

import socket

import pytest

from hermes_rl.engine.process import listen
from hermes_rl.errors import EngineError


def test_small_replies_do_not_wait_for_the_clients_acknowledgement():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(EngineError, match=str(port)):
            listen("127.0.0.1", port)
