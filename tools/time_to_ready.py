"""Seconds from starting `twinspark serve` to the first 200 of /health, a few times.

python tools/time_to_ready.py [RUNS] [PACK]
"""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

PORT = 8765


def ready_after() -> float:
    """Start a server, wait until it is ready, stop it."""
    began = time.monotonic()
    command = [sys.executable, "-m", "twinspark", "serve", *sys.argv[2:3], "--port", str(PORT)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                    return time.monotonic() - began
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


if __name__ == "__main__":
    runs = sorted(ready_after() for _ in range(int(sys.argv[1]) if sys.argv[1:] else 5))
    print(f"ready after {runs[0]:.2f} to {runs[-1]:.2f} s, median {runs[len(runs) // 2]:.2f} s")
