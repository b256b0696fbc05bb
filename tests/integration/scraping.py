"""What a process shows as Prometheus metrics, scraped and parsed by the library."""

import http.client
import urllib.request
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 20.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Scrape:
    types: dict[str, str] = field(default_factory=dict)
    """Family -> its type as Prometheus knows it. Counters with ``_total``."""
    labels: dict[str, set[str]] = field(default_factory=dict)
    """Family -> its labels, where it has samples; but for a histogram's ``le``."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def value(self, sample: str, **labels: str) -> float:
        return self.values[sample, tuple(sorted(labels.items()))]

    def get(self, sample: str, **labels: str) -> float:
        return self.values.get((sample, tuple(sorted(labels.items()))), 0.0)


def answer(address: str, path: str) -> tuple[int, str]:
    """Returns the status and the text of a page."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def scrape(address: str) -> Scrape:
    with _DIRECT.open(f"http://{address}/metrics", timeout=TIMEOUT_S) as reply:
        text = reply.read().decode()
    out = Scrape()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        out.types[name] = family.type
        for sample in family.samples:
            out.labels.setdefault(name, set()).update(sample.labels.keys() - {"le"})
            out.values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return out
