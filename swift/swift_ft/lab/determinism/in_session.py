"""Imported by the ranks of a session (`swift-ft run --preload`): from then on their steps are recorded."""

from swift_ft.lab.determinism import recorder

recorder.install(session=True)
