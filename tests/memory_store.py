"""A MetadataStore in memory."""

from collections.abc import Collection, Mapping

from swift_ft_services.coordinator.store import StoreHeld


class MemoryStore:
    """Keeps rows as `SqliteStore` does, without a file."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self._held = False

    async def hold(self) -> None:
        if self._held:
            raise StoreHeld("another coordinator uses it")
        self._held = True

    def holds(self) -> bool:
        return True

    async def read(self, prefix: str = "") -> dict[str, str]:
        return {key: value for key, value in sorted(self.rows.items()) if key.startswith(prefix)}

    async def commit(self, puts: Mapping[str, str], deletes: Collection[str] = ()) -> None:
        for key in deletes:
            self.rows.pop(key, None)
        self.rows.update(puts)

    async def close(self) -> None:
        self._held = False
