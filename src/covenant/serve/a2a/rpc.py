"""The gRPC binding of the A2A protocol, with health and reflection beside it.

`tenant` names the agent. What the other bindings carry in headers is metadata here, and an error is a
`google.rpc.Status` in the trailers. A call that its client gives up ends what it waited for; when the daemon ends, a
stream that is not at its end is told so, and its client takes it up again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from time import perf_counter
from traceback import walk_tb
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from covenant.a2a.fault import INTERNAL, Fault, details_of, kind_of, message_of
from covenant.exchange.bounds import Bounds
from covenant.exchange.exchange import Exchange
from covenant.model.error import CovenantError, Draining, Unauthenticated
from covenant.model.peer import Caller
from covenant.rules.whereabouts import Reached
from covenant.serve.a2a import dialect, parameters
from covenant.serve.a2a.calls import CALLS, Call, Desk, Talk
from covenant.serve.a2a.codec import Reader, Writer, write_card
from covenant.serve.a2a.directory import Directory
from covenant.serve.a2a.operations import Operations
from covenant.serve.a2a.proto import POOL, SERVICE, AgentCard
from covenant.serve.http import GONE, OnRequest

FINISH_S: Final = 5
_LOOK_S: Final = 0.5  # for whether gRPC is still there
_LAST_WORD_S: Final = 0.1  # for those who watch the health of the daemon to be told that it ends
_ACCEPTING: Final = "_server_main_loop"  # where gRPC reads the path of a call
_STATUS: Final = "grpc-status-details-bin"
_LAST_ID: Final = "last-event-id"  # in the trailers of a stream, what an event's id is over HTTP
_SERVED: Final = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
_KEEPALIVE_MS: Final = 60_000
_KEEPALIVE_ANSWER_MS: Final = 20_000
_PINGS_APART_MS: Final = 10_000  # a client may ask that often whether we are there
_DETAILS: Final = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest)  # loaded, so that they can be written

log = logging.getLogger("covenant.grpc")
_grpc_log: Final = logging.getLogger("grpc._cython.cygrpc")
_loop_log: Final = logging.getLogger("asyncio")

Write: TypeAlias = Callable[[Any], bytes]


class Rpc:
    def __init__(self, exchange: Exchange, directory: Directory) -> None:
        self._exchange = exchange
        self._desk = Desk(Operations(exchange), directory)
        self._calls: set[asyncio.Task[Any]] = set()
        self._server: Any = None
        self._health: Any = None
        self._credentials: Any = None
        self._watching: asyncio.Task[None] | None = None
        self.on_request: OnRequest | None = None

    @property
    def count(self) -> int:
        """Of the calls that are under way."""
        return len(self._calls)

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self, address: str, tls_cert: Path | None, tls_key: Path | None) -> int:
        """Says which port it has taken."""
        _grpc_log.addFilter(_is_worth_a_line)
        _loop_log.addFilter(_is_of_no_path)
        self._health = health.aio.HealthServicer()
        for name in _SERVED:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._credentials = _credentials_of(tls_cert, tls_key)
        host = address.rpartition(":")[0]
        self._server, port = await self._serving(address)
        self._watching = asyncio.create_task(self._watch(f"{host}:{port}"))
        return port

    async def _serving(self, address: str) -> tuple[Any, int]:
        bounds = self._exchange.bounds
        server = grpc.aio.server(options=_options(bounds), maximum_concurrent_rpcs=bounds.connections_total_max)
        methods = grpc.method_handlers_generic_handler(SERVICE.full_name, self._methods())
        server.add_generic_rpc_handlers([methods])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(_SERVED, server, POOL)
        if self._credentials is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._credentials)
        await server.start()
        return server, port

    async def _watch(self, address: str) -> None:
        """gRPC ends its server for a call whose path is no text, and anybody can send one. Then there is another in its
        place, as whatever else ended it. Who was under way is cut off, and comes back."""
        while True:
            try:
                await self._server.wait_for_termination(_LOOK_S)
            except Exception as fault:
                log.warning("gRPC on %s has ended (%s): it begins anew", address, type(fault).__name__)
                await self._server.stop(None)
                self._server = await self._again(address)

    async def _again(self, address: str) -> Any:
        while True:
            try:
                return (await self._serving(address))[0]
            except RuntimeError as failed:
                log.error("gRPC cannot begin anew on %s: %s", address, failed)
                await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """The exchange drains: what is under way comes to its end by itself, and then nobody is waited for."""
        if self._watching is None:
            return
        self._watching.cancel()
        await asyncio.wait((self._watching,))
        await self._health.enter_graceful_shutdown()
        ending = asyncio.ensure_future(self._server.stop(FINISH_S))
        if self._calls:
            await asyncio.wait(self._calls, timeout=FINISH_S)
        await asyncio.sleep(_LAST_WORD_S)
        await self._server.stop(None)
        await ending

    def _methods(self) -> dict[str, Any]:
        """Messages come and go as bytes: what does not read is then refused like everything else."""
        found = {}
        for method in SERVICE.methods:
            call = CALLS[method.name]
            reader = Reader(method.input_type, call.request)
            is_card = method.output_type.full_name == AgentCard.DESCRIPTOR.full_name
            write = write_card if is_card else Writer(method.output_type).write
            if call.stream is None:
                handler = partial(self._serve, call.request, partial(self._answer, call, reader, write))
                found[method.name] = grpc.unary_unary_rpc_method_handler(handler)
            else:
                handler = partial(self._serve, call.request, partial(self._stream, call, reader, write))
                found[method.name] = grpc.unary_stream_rpc_method_handler(handler)
        return found

    # --- one call -----------------------------------------------------------------------------------------

    async def _serve(
        self, shape: type, handler: Callable[[bytes, Any], Awaitable[Any]], data: bytes, context: Any
    ) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        started, status = perf_counter(), GONE
        try:
            try:
                reply = await handler(data, context)
                status = 200
                return reply
            except Exception as failed:
                error = _error_of(failed)
                status = kind_of(error).http
            await _refuse(context, error)
        finally:
            self._calls.discard(task)
            if self.on_request is not None:
                self.on_request(shape, status, perf_counter() - started)

    async def _answer(self, call: Call, reader: Reader, write: Write, data: bytes, context: Any) -> bytes:
        assert call.answer is not None
        talk, request = await self._open(reader, data, context)
        return write(await call.answer(self._desk, talk, request))

    async def _stream(self, call: Call, reader: Reader, write: Write, data: bytes, context: Any) -> None:
        assert call.stream is not None
        talk, request = await self._open(reader, data, context)
        is_over = False
        async with aclosing(call.stream(self._desk, talk, request)) as events:
            async for event in events:
                is_over = event.is_last
                await context.write(write(event.response))
                context.set_trailing_metadata(((_LAST_ID, str(event.generation)),))
        if self._exchange.is_draining and not is_over:
            raise Draining("the daemon is ending: subscribe again, from the last generation")

    async def _open(self, reader: Reader, data: bytes, context: Any) -> tuple[Talk, Any]:
        """Who speaks, and what is asked for."""
        metadata = parameters.gathered_metadata(context.invocation_metadata() or ())
        caller = await self._authenticate(metadata.get("authorization"))
        self._exchange.meter(caller)
        said = parameters.read(metadata)
        request = reader.read(data)
        agent = await self._desk.directory.find(request.tenant)
        active = parameters.check(said, agent)
        if active:
            await context.send_initial_metadata((("a2a-extensions", ", ".join(active)),))
        talk = Talk(caller, agent, request.tenant, said, active, False, Reached())
        return talk, dialect.heard(said, request)

    async def _authenticate(self, header: str | None) -> Caller:
        scheme, _, token = (header or "").partition(" ")
        try:
            return await self._exchange.recognise(token.strip() if scheme.lower() == "bearer" else None)
        except Unauthenticated:
            await self._exchange.note_stranger("grpc")
            raise


def _credentials_of(tls_cert: Path | None, tls_key: Path | None) -> Any:
    """Read once: what begins anew does not depend on what has become of the files."""
    if tls_cert is None or tls_key is None:
        return None
    return grpc.ssl_server_credentials([(tls_key.read_bytes(), tls_cert.read_bytes())])


def _options(bounds: Bounds) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port has one daemon
        ("grpc.max_receive_message_length", bounds.body_bytes_max),
        ("grpc.max_send_message_length", -1),  # a task is as large as it is; how much to take is the client's to say
        ("grpc.max_metadata_size", bounds.head_bytes_max),
        ("grpc.absolute_max_metadata_size", bounds.head_bytes_max),
        ("grpc.max_concurrent_streams", bounds.waits_max),
        ("grpc.server.max_pending_requests", bounds.waits_max),  # above the first it cancels at random
        ("grpc.server.max_pending_requests_hard_limit", bounds.waits_max),
        ("grpc.server_handshake_timeout_ms", bounds.head_ms_max),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PINGS_APART_MS),
    ]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not that metadata is no text: gRPC repeats it in full, secret or not, each time that anybody sends it. Nor that a
    path is none, which is told once."""
    return not isinstance(record.msg, UnicodeDecodeError) and not str(record.msg).startswith("Invalid encoding")


def _is_of_no_path(record: logging.LogRecord) -> bool:
    """gRPC leaves the task that ends its server with the fault that ended it, and asyncio tells of it with the path."""
    fault = record.exc_info[1] if record.exc_info else None
    if not isinstance(fault, UnicodeDecodeError):
        return True
    return all(frame.f_code.co_name != _ACCEPTING for frame, _ in walk_tb(fault.__traceback__))


def _error_of(failed: Exception) -> CovenantError:
    if isinstance(failed, CovenantError):
        return failed
    log.error("a call failed", exc_info=failed)
    return Fault(INTERNAL, "something went wrong inside; it is in the daemon's log")


async def _refuse(context: Any, error: CovenantError) -> None:
    code = grpc.StatusCode[kind_of(error).grpc]
    told = {"code": code.value[0], "message": message_of(error), "details": details_of(error)}
    status = json_format.ParseDict(told, status_pb2.Status())
    trailers = (*(context.trailing_metadata() or ()), (_STATUS, status.SerializeToString()))
    await context.abort(code, status.message, trailers)
