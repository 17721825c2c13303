"""The serving side: accepts peers, checks who they are, and has their requests answered."""

import logging
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from kvstrata.core.errors import ProtocolError, TierError
from kvstrata.tiers.p2p.handshake import Credentials, Remote, answer
from kvstrata.tiers.p2p.serving import Serving
from kvstrata.tiers.p2p.settings import P2pSettings
from kvstrata.tiers.p2p.transport import Channel, accept_tls
from kvstrata.tiers.p2p.wire import Message

logger = logging.getLogger("kvstrata.p2p")


@dataclass(eq=False, slots=True)
class Conversation:
    """One accepted connection."""

    channel: Channel
    thread: threading.Thread | None = None
    peer: Remote | None = None


class PeerServer:
    """Serves peers that proved who they are.

    One thread accepts, one more serves each connection. A connection that breaks the protocol is
    closed; the others go on.

    Thread: any. Blocks: `stop` only.
    """

    def __init__(
        self,
        listener: socket.socket,
        own: Credentials,
        settings: P2pSettings,
        serving: Serving,
    ) -> None:
        """Take over a listening socket; `start` begins to accept."""
        self.address = listener.getsockname()
        self._listener = listener
        self._own = own
        self._settings = settings
        self._serving = serving
        self._lock = threading.Lock()
        self._conversations: set[Conversation] = set()
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="p2p-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def stop(self, timeout_s: float) -> None:
        """Close every connection and end the threads. Blocks: at most about `timeout_s`."""
        with self._lock:
            self._is_closed = True
            conversations = list(self._conversations)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for conversation in conversations:
            conversation.channel.abort()
        self._acceptor.join(timeout_s)
        for conversation in conversations:
            if conversation.thread is not None:
                conversation.thread.join(timeout_s)
        self._listener.close()

    @property
    def num_connections(self) -> int:
        """Connections accepted and not yet closed."""
        return len(self._conversations)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                self._serving.count("failed_accepts")  # such as no file descriptor left: go on
                continue
            self._receive_stranger(sock, address)

    def _receive_stranger(self, sock: socket.socket, address: tuple[str, int]) -> None:
        with self._lock:
            num_strangers = sum(other.peer is None for other in self._conversations)
            if self._is_closed or num_strangers >= self._settings.num_strangers_max:
                self._serving.count("refused_connections")
                sock.close()
                return
            channel = Channel(sock, f"peer at {address[0]}", self._settings.silence_timeout_s)
            conversation = Conversation(channel)
            self._conversations.add(conversation)
            conversation.thread = threading.Thread(
                target=self._converse, args=(conversation, sock), name="p2p-serve", daemon=True
            )
        try:
            conversation.thread.start()
        except RuntimeError:  # no more threads: this one peer is not served
            self._close(conversation)

    def _converse(self, conversation: Conversation, sock: socket.socket) -> None:
        try:
            peer = self._greet(conversation, sock)
            while True:
                message = conversation.channel.receive(
                    Message, wait_s=2 * self._settings.idle_timeout_s
                )
                conversation.channel.set_deadline(self._settings.transfer_timeout_s)
                self._serving.answer(conversation.channel, peer.identity, message)
                conversation.channel.set_deadline(None)
        except ProtocolError as error:
            num = self._serving.count("protocol_errors")
            if num.bit_count() == 1:  # 1, 2, 4, 8 …: a stranger can't flood the log
                logger.warning("%s; connection closed (%d so far)", error, num)
        except (OSError, TierError) as error:
            logger.debug("connection ended: %s", error)
        except Exception:
            self._serving.count("internal_errors")
            logger.exception("a connection was given up")
        finally:
            self._close(conversation)

    def _close(self, conversation: Conversation) -> None:
        conversation.channel.close()
        with self._lock:
            self._conversations.discard(conversation)

    def _greet(self, conversation: Conversation, sock: socket.socket) -> Remote:
        """Authenticate the caller within the connect timeout, or raise."""
        timeout_s = self._settings.connect_timeout_s
        if self._own.called_tls is not None:
            encrypted = accept_tls(sock, self._own.called_tls, timeout_s)
            conversation.channel = Channel(
                encrypted, conversation.channel.name, self._settings.silence_timeout_s
            )
        channel = conversation.channel
        channel.set_deadline(timeout_s)
        peer = answer(channel, self._own)
        channel.set_deadline(None)
        channel.name = f"peer {peer.identity}"
        self._admit(conversation, peer)
        return peer

    def _admit(self, conversation: Conversation, peer: Remote) -> None:
        """Count the connection as the peer's; end those of its former process, leases and all."""
        with self._lock:
            others = [
                other
                for other in self._conversations
                if other.peer is not None and other.peer.identity == peer.identity
            ]
            former = [other for other in others if other.peer != peer]
            num_current = len(others) - len(former)
            if num_current >= self._settings.num_peer_connections_max:
                raise ProtocolError(
                    conversation.channel.name, f"has {num_current} connections already"
                )
            if self._is_closed:
                raise ConnectionAbortedError("shutting down")
            conversation.peer = peer
        for other in former:
            other.channel.abort()
        self._serving.count("accepted_connections")
