"""Event files for tests, written with the tensorboard package as a trainer would."""

import struct

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from palaestra.runs.ingest.event_file import masked_crc32c

HEADER = Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString()


def scalar(tag, step, value, wall_time=100.0):
    value = Summary.Value(tag=tag, simple_value=value)
    return Event(wall_time=wall_time, step=step, summary=Summary(value=[value])).SerializeToString()


def session_start(step):
    return Event(wall_time=5.0, step=step, session_log=SessionLog(status=SessionLog.START)).SerializeToString()


def framed(*payloads):
    def one(payload):
        length = struct.pack("<Q", len(payload))
        return length + struct.pack("<I", masked_crc32c(length)) + payload + struct.pack("<I", masked_crc32c(payload))

    return b"".join(map(one, payloads))
