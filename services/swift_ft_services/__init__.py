"""The services: coordinator and log server, and what both share: authorization, limits, health. No torch.

program        the frame of both programs: flags, the protected port, exit codes, signals
authorization  the check of every call: token, role, job and generation; limits of requests;
               concurrent calls; the audit file
interceptors   the same check as interceptors of gRPC's two kinds of servers
health         grpc.health.v1
threads        thread pool that starts its threads ahead of the work
"""
