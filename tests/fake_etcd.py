"""As much of etcd as `EtcdStore` uses, in memory, behind gRPC; it can lose answers and let a lease end."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from swift_ft._pb import etcd_pb2 as pb
from swift_ft._pb import etcd_pb2_grpc as pb_grpc

# ruff: noqa: N802  (gRPC names its methods so)

OPS_MAX = 128
BYTES_MAX = 3 << 19


class FakeEtcd(pb_grpc.KVServicer, pb_grpc.LeaseServicer):
    """(context manager) Leases end only by `end_leases`."""

    def __init__(self) -> None:
        self.rows: dict[bytes, pb.KeyValue] = {}
        self.revision = 1
        self.lost_answers = 0
        """So many answers to transactions are lost from now on: they are carried out, and the caller gets an error."""
        self.bytes_per_s = math.inf
        """Of answers to `Range`."""
        self.transactions = 0
        self._leases: set[int] = set()
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        pb_grpc.add_KVServicer_to_server(self, self._server)
        pb_grpc.add_LeaseServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "FakeEtcd":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def end_leases(self) -> None:
        with self._lock:
            for lease in list(self._leases):
                self._end(lease)

    def _end(self, lease: int) -> None:
        self._leases.discard(lease)
        for key in [key for key, kv in self.rows.items() if kv.lease == lease]:
            del self.rows[key]

    def Range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        with self._lock:
            reply = self._range(request)
        time.sleep(reply.ByteSize() / self.bytes_per_s)
        return reply

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        found = [self.rows[key] for key in sorted(self.rows) if _in(key, request.key, request.range_end)]
        more = bool(request.limit) and len(found) > request.limit
        header = pb.ResponseHeader(revision=self.revision)
        return pb.RangeResponse(header=header, kvs=found[: request.limit or None], more=more)

    def Txn(self, request: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        if len(request.success) > OPS_MAX or request.ByteSize() > BYTES_MAX:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
        with self._lock:
            reply = self._txn(request)
            lost = self.lost_answers > 0
            self.lost_answers -= lost
        if lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed")
        return reply

    def _txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        self.transactions += 1
        holds = all(self._compare(compare) for compare in request.compare)
        operations = request.success if holds else request.failure
        changes = [op for op in operations if not op.HasField("request_range")]
        self.revision += bool(changes)
        put = [op.request_put.key for op in changes if op.HasField("request_put")]
        assert len(put) == len(set(put)), "duplicate key given in txn request"
        responses = [self._carry_out(op) for op in operations]
        return pb.TxnResponse(
            header=pb.ResponseHeader(revision=self.revision), succeeded=holds, responses=responses
        )

    def _compare(self, compare: pb.Compare) -> bool:
        there = self.rows.get(compare.key, pb.KeyValue())
        if compare.target == pb.Compare.CREATE:
            return there.create_revision == compare.create_revision
        assert compare.target == pb.Compare.MOD
        return there.mod_revision == compare.mod_revision

    def _carry_out(self, op: pb.RequestOp) -> pb.ResponseOp:
        if op.HasField("request_range"):
            return pb.ResponseOp(response_range=self._range(op.request_range))
        if op.HasField("request_delete_range"):
            asked = op.request_delete_range
            for key in [key for key in self.rows if _in(key, asked.key, asked.range_end)]:
                del self.rows[key]
            return pb.ResponseOp(response_delete_range=pb.DeleteRangeResponse())
        put = op.request_put
        assert not put.lease or put.lease in self._leases
        created = self.rows[put.key].create_revision if put.key in self.rows else self.revision
        self.rows[put.key] = pb.KeyValue(
            key=put.key, value=put.value, lease=put.lease, create_revision=created, mod_revision=self.revision
        )
        return pb.ResponseOp(response_put=pb.PutResponse())

    def LeaseGrant(self, request: pb.LeaseGrantRequest, context: Any) -> pb.LeaseGrantResponse:
        with self._lock:
            self.revision += 1
            self._leases.add(self.revision)
            return pb.LeaseGrantResponse(ID=self.revision, TTL=request.TTL)

    def LeaseRevoke(self, request: pb.LeaseRevokeRequest, context: Any) -> pb.LeaseRevokeResponse:
        with self._lock:
            self._end(request.ID)
        return pb.LeaseRevokeResponse()

    def LeaseKeepAlive(
        self, requests: Iterator[pb.LeaseKeepAliveRequest], context: Any
    ) -> Iterator[pb.LeaseKeepAliveResponse]:
        for request in requests:
            with self._lock:
                yield pb.LeaseKeepAliveResponse(ID=request.ID, TTL=3 * (request.ID in self._leases))


def _in(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key < end if end else key == first
