"""Checks a service's health from inside its container: `python -m deploy.healthcheck ADDRESS [SERVICE]`.

ADDRESS is an HTTP URL, or `host:port` or `unix:PATH` of a gRPC server. SERVICE names one gRPC service;
without it the check covers the whole server.
"""

import sys
import urllib.error
import urllib.request

_TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Checks once.

    Returns:
        0 if healthy, 1 if not, 2 for wrong arguments.
    """
    match argv:
        case [str(url)] if url.startswith("http://"):
            problem = check_http(url)
        case [str(address)]:
            problem = check_grpc(address, "")
        case [str(address), str(service)]:
            problem = check_grpc(address, service)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    if problem:
        print(problem)
    return int(bool(problem))


def check_http(url: str) -> str:
    """Returns what is wrong at a URL; empty if it answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return "" if answer.status == 200 else f"{url}: {answer.status}"
    except (OSError, urllib.error.HTTPError) as error:
        return f"{url}: {error}"


def check_grpc(address: str, service: str) -> str:
    """Returns what is wrong with a gRPC service; empty if it reports SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            details = getattr(error, "details", None)
            return f"{address}: {details() if details else error}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if status == "SERVING" else f"{address}: {status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
