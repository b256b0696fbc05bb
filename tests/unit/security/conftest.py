"""Keys for tokens, and a CA, each in a directory of the test's."""

from pathlib import Path

import pytest

from swift_ft.tools.credentials import CertificateAuthority
from tests.unit.security.world import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca")
