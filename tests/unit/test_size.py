"""What `scripts/size` counts."""

from pathlib import Path

from tests import size


def test_a_name_of_a_module_counts_for_the_module(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import a.b\ndef f():\n    from a import c, NAME\n    from other import c\n")
    assert set(size.imported(path, ["a", "a.b", "a.c"])) == {"a.b", "a.c", "a", "other"}


def test_who_imports_what_is_known() -> None:
    found = size.importers(size.sources(*size.PRODUCT))
    assert found["swift_ft.log.sender"] == {"swift_ft.log.sidecar", "swift_ft.train.replay_helper"}


def test_what_is_counted() -> None:
    found = size.figures()
    product, laboratory, tests = (
        int(found[what].replace(",", ""))
        for what in ("product, lines", "  of it the laboratory", "tests, lines")
    )
    assert laboratory < product
    assert tests == size.lines(size.sources("tests"))
    assert size.lines([size.ROOT / "scripts" / "size"]) == 7
    assert not any("_pb" in path.parts for path in size.sources(*size.PRODUCT))
