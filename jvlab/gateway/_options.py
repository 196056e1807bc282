"""Options of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from jvlab._errors import ConfigError
from jvlab.wire import _security as security


@dataclass(frozen=True)
class GatewayOptions:
    """Options shared by `jv.Lab(...)`, `jvlab gateway` and the gateway's actor on Ray."""

    lease: float = 600.0  # seconds until a lab without holders ends
    beat: float = 1.0  # seconds between two heartbeats of a replica
    missed_beats: int = 10  # after this many a replica counts as lost
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    tls: security.Tls | None = None
    metrics_port: int | None = None  # Prometheus metrics on loopback; 0: a free one, None: none
    place: str = "local"  # who starts a pool's processes, unless its launch says otherwise
    max_message: int = security.MAX_MESSAGE

    def check(self) -> GatewayOptions:
        """Itself; raises ConfigError if an option is invalid."""
        security.check_bind(self.host, self.tls)
        for name in ("lease", "beat", "missed_beats"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)):
                raise ConfigError(f"{name}={given!r} is not a number", remedy=f"pass {name}=... in seconds, or a count")
        if not self.lease > 0:
            raise ConfigError(
                f"lease must be positive, not {self.lease}", remedy="lab.detach() keeps a lab until it is closed"
            )
        if not self.beat > 0 or self.missed_beats < 1:
            raise ConfigError(f"beat={self.beat:g} and missed_beats={self.missed_beats} must be positive")
        return self

    def command_line(self) -> list[str]:
        """As arguments of `jvlab gateway`."""
        words = ["--lease", self.lease, "--beat", self.beat, "--missed-beats", self.missed_beats]
        words += ["--host", self.host, "--port", self.port]
        if self.metrics_port is not None:
            words += ["--metrics-port", self.metrics_port]
        if self.tls is not None:
            words += ["--tls-cert", self.tls.certificate, "--tls-key", self.tls.key]
        return [str(word) for word in words]
