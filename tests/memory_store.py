"""A MetadataStore in memory."""

from swift_ft_services.coordinator.store import Stored, StoreHeld, Transaction, _check


class MemoryStore:
    """Keeps rows as `SqliteStore` does, without a file."""

    def __init__(self) -> None:
        self.rows: dict[str, Stored] = {}
        self._revision = 0
        self._held = False

    async def hold(self) -> None:
        if self._held:
            raise StoreHeld("another coordinator uses it")
        self._held = True

    def holds(self) -> bool:
        return True

    async def read(self, prefix: str = "") -> dict[str, Stored]:
        return {key: stored for key, stored in sorted(self.rows.items()) if key.startswith(prefix)}

    async def commit(self, transaction: Transaction) -> int:
        """As `MetadataStore.commit`."""
        for key, expected in transaction.expected.items():
            there = self.rows.get(key)
            _check(key, 0 if there is None else there.revision, expected)
        self._revision += 1
        for key in transaction.deletes:
            self.rows.pop(key, None)
        for key, value in transaction.puts.items():
            self.rows[key] = Stored(value=value, revision=self._revision)
        return self._revision

    async def close(self) -> None:
        self._held = False
