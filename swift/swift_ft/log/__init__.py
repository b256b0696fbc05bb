"""The log: records, frames and segment files, and the client that appends and reads them. No torch.

record, frame, codec      one tensor as bytes, as it is sent and stored
segment, manifest         files of a log server; directory: all of them
protocol, admin           client connection to a log server; calls of the coordinator
placement                 which servers keep a rank's streams
ring, sidecar_client      a trainer's end: shared memory, and the trainer's sidecar process (sidecar)
sender                    a writer's connection to one log server
reader                    the reading end, in a rank that replays
"""
