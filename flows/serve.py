"""`make serve`: a Prefect server with its UI and a worker for the pool `nereus`, until Ctrl-C or SIGTERM.

python -m flows.serve --port 4200
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

POOL = "nereus"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0  # a worker gives its flow runs 30 s


def serve(port: int) -> int:
    """Run server and worker until a signal comes or one of them ends; return the exit status."""
    api = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, "PREFECT_API_URL": api}
    processes = [_prefect(environment, "server", "start", "--host", "127.0.0.1", "--port", str(port))]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _wait_for_server(api, processes[0])
        processes.append(_prefect(environment, "worker", "start", "--pool", POOL, "--type", "process"))
        print(f"UI at http://127.0.0.1:{port}; `make deploy PORT={port}` adds the deployments; Ctrl-C ends both.")
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        return 1
    except (KeyboardInterrupt, SystemExit):
        return 0
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        # The worker first: it reports to the server how its runs ended.
        for process in reversed(processes):
            _stop(process)


def _prefect(environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "prefect", *arguments], env=environment)


def _wait_for_server(api: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{api}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise TimeoutError(f"No Prefect server at {api} after {START_TIMEOUT_S:.0f} s; is the port taken?")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=4200)
    sys.exit(serve(parser.parse_args().port))
