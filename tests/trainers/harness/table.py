"""The table of docs/trainers.md, made from the trainers' headers."""

from tests.integration.logserver_world import REPOSITORY
from tests.trainers.harness import header

PAGE = REPOSITORY / "docs" / "trainers.md"
BEGIN, END = "<!-- scripts/trainers --table -->", "<!-- end of the table -->"


def lines() -> list[str]:
    found = ["| trainer | what it does | ranks | verdict |", "|---|---|---|---|"]
    for trainer in header.trainers():
        worlds = ", ".join(map(str, trainer.worlds))
        usual, *others = dict.fromkeys(map(str, trainer.expected.values()))
        verdict = "; ".join([usual, *(f"with {max(trainer.worlds)}: {other}" for other in others)])
        if trainer.plain:
            verdict += ", also as without a session"
        if trainer.device:
            verdict += ", also on a device"
        if trainer.misses:
            verdict += f". Not yet with {', '.join(map(str, trainer.misses))}: {trainer.because}"
        link = f"[{trainer.name}](../tests/trainers/{trainer.name}.py)"
        found.append(f"| {link} | {trainer.about.rstrip('.')} | {worlds} | {verdict.replace('|', '/')} |")
    return found


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *lines(), END + after])


def write() -> None:
    PAGE.write_text(page(PAGE.read_text()))
