"""What a helper does with the tensors that its stage sends: the log has them already, or the owner gets them."""

from collections import Counter
from collections.abc import Mapping

import torch

from swift.errors import Divergence
from swift.log.difference import differs_words
from swift.log.record import RecordKey, digest_of
from swift.runtime.tensors import byte_view, dtype_name, plain


class VerifyingCapture:
    """A `Capture` (swift.runtime.capture) that writes nothing.

    ``record``: compares with `logged`, by stream the digests that the log has; what it lacks is kept, until the owner
    is given it (`lacking`): a stream has one writer. What a stage takes in from outside is the owner's to record.
    """

    def __init__(self, logged: Mapping[str, Mapping[RecordKey, bytes]]):
        self._logged = logged
        self.compares = True
        """False: the owner is off the log, so nothing is compared, and nothing that the log lacks belongs there."""
        self.verified = 0
        self.bytes: Counter[str] = Counter()
        """By stream, of what was compared since somebody has cleared it."""
        self.lacking: list[tuple[str, RecordKey, torch.Tensor]] = []

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Compares a tensor with the log's digest, or keeps it for the owner. Raises Divergence: other bits."""
        if stream not in self._logged or not self.compares:
            return
        had = self._logged[stream].get(key)
        if had is None:
            self.lacking.append((stream, key, tensor.detach().clone()))
            return
        flat = plain(tensor)
        digest = digest_of(dtype_name(tensor), tuple(tensor.shape), byte_view(flat).data)
        if digest != had:
            raise Divergence(differs_words(stream, key, had, digest, who="a helper"))
        self.verified += 1
        self.bytes[stream] += tensor.nbytes

    def settle(self) -> None:
        """Nothing was lent."""

    drop = settle
