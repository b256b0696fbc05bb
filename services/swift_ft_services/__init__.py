"""The services: the coordinator and the log server, and what both share: authorization, limits, health. No torch.

listening      flags of a server that say how it is protected, and the port that they make
authorization  the check of every call: token, role, job and generation; limits of requests;
               concurrent calls; the audit file
interceptors   the same as interceptors of gRPC's two kinds of servers
health         grpc.health.v1
threads        threads that are started before there is work for them
"""
