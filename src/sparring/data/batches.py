"""BatchBuilder: prepares batches from any store ahead of time, on the device of their consumer."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict


class BatchBuilder:
    """An iterator over batches; its thread prepares `prefetch` of them ahead.

    From a source with `sample(batch_size, generator)` it draws batch k with a generator that depends on (seed, k) only,
    without end. The items of any other iterable are the batches; if the iterable has a `state_dict`, its state after
    the last returned batch is saved. A resumed builder returns the same batches if the source has the same content; a
    source that grows during training is read up to `prefetch` batches early. After an error, `sample` is tried again
    for the same batch; an iterable has ended, and its error is raised again.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        prefetch: int = 2,
    ):
        if hasattr(source, "sample") == (batch_size is None):
            raise ValueError("expected batch_size if the source has sample(), and otherwise none")
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: expected at least 1, the next batch")
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.device, self.prefetch = torch.device(device), prefetch
        # batches returned so far
        self.consumed = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._has_state = batch_size is None and hasattr(source, "state_dict")
        # after the last returned batch
        self._source_state: dict | None = source.state_dict() if self._has_state else None
        self._restart()

    def __iter__(self) -> "BatchBuilder":
        return self

    def __next__(self) -> TensorDict:
        self._submit()
        wait([self._pending[0]])
        self._raise_failure()
        batch, copied, source_state = self._pending[0].result()
        if batch is None:
            raise StopIteration
        self._pending.popleft()
        self._source_state = source_state
        self.consumed += 1
        self._submit()
        if copied is not None:
            # the consumer's stream waits for the copy; record_stream keeps the memory until the stream has used it
            stream = torch.cuda.current_stream(batch.device)
            stream.wait_event(copied)
            for tensor in batch.values(True, True):
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread, after it has finished its current batch, which is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> "BatchBuilder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def state_dict(self) -> dict:
        return {"seed": self.seed, "consumed": self.consumed, "source": self._source_state}

    def load_state_dict(self, state: dict) -> None:
        # the thread may be working on one of them
        wait([future for future in self._pending if not future.cancel()])
        self.seed, self.consumed, self._source_state = state["seed"], state["consumed"], state["source"]
        if self._has_state:
            self.source.load_state_dict(self._source_state)
        self._restart()

    def _restart(self) -> None:
        self._pending: deque[Future] = deque()
        # created by the thread, because the first item may take long
        self._batches: Iterator[TensorDict] | None = None
        self._next = self.consumed

    def _submit(self) -> None:
        while len(self._pending) < self.prefetch:
            self._pending.append(self._thread.submit(self._make, self._next))
            self._next += 1

    def _raise_failure(self) -> None:
        """Raise a failure at once, even if earlier batches are ready: their store is broken."""
        failed = [future for future in self._pending if future.done() and future.exception() is not None]
        if not failed:
            return
        if self.batch_size is not None:
            for future in self._pending:
                future.cancel()
            self._restart()
        raise failed[0].exception()  # type: ignore[misc]

    @torch.inference_mode(False)
    def _make(self, number: int) -> tuple[TensorDict | None, "torch.cuda.Event | None", dict | None]:
        """In the thread: batch `number` on the device (None: the end), the event of its copy, the source's state."""
        batch = self._draw(number) if self.batch_size is not None else self._next_item(number)
        source_state = self.source.state_dict() if self._has_state else None
        if batch is None:
            return None, None, source_state
        if self._stream is None or next(iter(batch.values(True, True))).is_cuda:
            return batch.to(self.device), None, source_state
        with torch.cuda.stream(self._stream):
            batch = batch.pin_memory().to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return batch, copied, source_state

    def _draw(self, number: int) -> TensorDict:
        assert self.batch_size is not None
        # hashed: a generator uses 32 bits of its seed, so that sums or products of large numbers could coincide
        (seed,) = np.random.SeedSequence((self.seed, number)).generate_state(1)
        return self.source.sample(self.batch_size, torch.Generator().manual_seed(int(seed)))

    def _next_item(self, number: int) -> TensorDict | None:
        if self._batches is None:
            self._batches = islice(iter(self.source), 0 if self._has_state else number, None)  # type: ignore[arg-type]
        return next(self._batches, None)
