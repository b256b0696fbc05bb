"""Imported by a session's ranks (`swift-ft run --preload`): records their steps from then on."""

from swift_ft.lab.determinism import recorder

recorder.install(session=True)
