"""Small tensors between host and device without a wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` (on the CPU) on ``device``, ordered with the current stream.

    From pageable memory a copy of more than some kB may first wait for everything queued on the stream; from pinned memory none does, and
    torch reuses that only once it was read.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A small tensor on its way to the host; the copy runs while the scheduler goes on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """The values on the CPU; blocks only while the copy is under way."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
