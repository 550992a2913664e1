"""Plans in the memory of a GPU: those of forests, uploaded once for all calls, and those in a DevicePlan,
whose address stays, for CUDA graphs."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref

import torch

from . import _abi
from ._library import Handle, library
from ._tensors import refuse_capture
from .forest import SegmentForest, plan, tile_sizes, window_argument


class DevicePlan:
    """Device memory of a fixed size that holds the plan of one forest at a time, for CUDA graphs.

    A captured graph keeps the address of the plan that its kernels read. `dualkv.attention` takes a
    DevicePlan in place of the forest, inside a capture or not, and the graph can be replayed with another
    forest after `load`:

        slot = dualkv.DevicePlan(forest, num_heads=32, num_kv_heads=8, head_dim=128, max_tokens=65536,
                                 max_bytes=1 << 20)
        with torch.cuda.graph(graph):
            out = dualkv.attention(q, k, v, slot)      # q, k and v have slot.max_tokens rows or more
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        slot.load(next_forest)
        q.copy_(..)                                    # rows past next_forest's may hold anything
        graph.replay()                                 # their results are 0

    Keep it until the backward has been computed, and for as long as a graph that has captured it may be
    replayed. Streams other than the one of `load` have to wait for that one, as for any tensor.

    Its image must stay where it is: a backward does not find the plan, and raises, if a hook has moved the
    saved tensors, as torch.autograd.graph.save_on_cpu does. Forests have no such limit.

    Attributes:
        forest: the SegmentForest that is loaded.
        max_tokens: rows that a loaded forest may have.
        max_bytes: bytes that the image of its plan may have.
        image: uint8 CUDA tensor [max_bytes], what the operators take in place of a forest's segments.

    Args:
        forest: the forest to load first.
        num_heads: H of the calls that use the plan.
        num_kv_heads: Hk.
        head_dim: D. Plans depend on H, Hk and D only by the kernels' tile sizes and the backward's parts:
            calls with other dimensions are served if these agree.
        window_left: that of the calls, as in `dualkv.attention`.
        max_tokens: forest's rows if None.
        max_bytes: that of forest if None. An image takes 16 bytes for each query tile and some 32 for each
            segment that the tile sees, 48 for each key tile of the backward and 16 for each of its runs:
            16 bytes a row and 64 KiB are enough for groups of responses of 100 tokens or more. With a window
            it is 24 bytes a row, and one more for each 1,024 tokens of the window.
        device: a CUDA device.

    Raises:
        ValueError: `forest` does not fit in max_tokens or max_bytes, or `device` is not a CUDA device.
        NotImplementedError: this build has no kernels for these dimensions.
        RuntimeError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        forest: SegmentForest,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window_left: int | None = None,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        device="cuda",
    ):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
        _require_forest(forest)
        self._window_left = window_argument(window_left)
        self._tiles = tile_sizes(_abi.CUDA, num_heads, num_kv_heads, head_dim)
        self.max_tokens = forest.total_tokens if max_tokens is None else max_tokens
        self.max_bytes = _image_bytes(self._plan_of(forest)) if max_bytes is None else max_bytes
        with torch.inference_mode(False):  # so that it can be written to outside of inference mode too
            self.image = torch.empty(self.max_bytes, dtype=torch.uint8, device=device)
        self._memory = _SharedMemory(self.image)
        self.load(forest)
        _device_plans[self.image.data_ptr()] = self

    def load(self, forest: SegmentForest) -> None:
        """Puts the plan of another forest in place of the one loaded before.

        The copy is ordered on the current stream, as a kernel would be, and not waited for. A forward that
        was called before it cannot be differentiated any more, unless both are in a graph; nor may gradient
        checkpointing compute it again.

        Raises:
            TypeError: it is no SegmentForest.
            ValueError: the forest has more than max_tokens rows, or its image more than max_bytes.
            RuntimeError: a CUDA graph is being captured.
        """
        _require_forest(forest)
        schedule = self._plan_of(forest)
        size = _image_bytes(schedule)
        if forest.total_tokens > self.max_tokens:
            raise ValueError(
                f"forest must have at most max_tokens rows, got {forest.total_tokens} and {self.max_tokens}"
            )
        if size > self.max_bytes:
            raise ValueError(
                f"the image of forest's plan must have at most max_bytes, got {size} and {self.max_bytes}"
            )
        with torch.cuda.device(self.image.device):
            refuse_capture("a DevicePlan is made and loaded outside of the capture, before the replay")
            # torch keeps pinned memory until the copies from it have been done.
            self.image[:size].copy_(_pinned_image(schedule), non_blocking=True)
            self._memory.used_by(torch.cuda.current_stream())
        self.forest = forest
        self._plan = schedule

    def _plan_of(self, forest: SegmentForest) -> Handle:
        return plan(forest.segments, self._window_left, 0, self._tiles)

    def _plan_for(self, q, k, window_left: int, stream) -> Handle:
        """The loaded plan, if it serves a call with these arguments."""
        rows = min(len(q), len(k))
        if rows < self.max_tokens:
            raise ValueError(
                "q, k and v must have at least the max_tokens rows of the DevicePlan, "
                f"got {rows} and {self.max_tokens}"
            )
        if window_left != self._window_left:
            raise ValueError(
                "window_left must be that of the DevicePlan, got "
                f"{_window_text(window_left)} and {_window_text(self._window_left)}"
            )
        tiles = _cuda_tiles(q, k)
        if tiles != self._tiles:
            raise ValueError(
                f"{q.shape[1]} heads, {k.shape[1]} KV heads and head dim {q.shape[2]} need a DevicePlan that "
                f"was made for them: their tiles and parts are {tiles}, those of this one {self._tiles}"
            )
        self._memory.used_by(stream)
        return self._plan


def _require_forest(forest) -> None:
    if not isinstance(forest, SegmentForest):
        raise TypeError(f"forest must be a dualkv.SegmentForest, got {type(forest).__name__}")


def plan_on_device(
    segments, window_left: int, query_row_begin: int, q, k, stream: torch.cuda.Stream
) -> tuple[Handle, torch.Tensor]:
    """The plan for the operators' argument `segments`, and its image in the memory of q's device, which is
    the current one, for work on its current stream `stream`. The caller keeps both until that has been
    launched.

    segments: int64 CPU tensor [S, 2], or the image of a DevicePlan on that device. q [Tq, H, D], k
    [Tk, Hk, D].
    """
    if segments.is_cuda:
        slot = _device_plans.get(segments.data_ptr())
        if slot is None:
            raise ValueError(
                "segments must be an int64 CPU tensor [S, 2] or the image of a dualkv.DevicePlan that is still "
                f"there, got {segments.dtype} {list(segments.shape)} on {segments.device}: keep a DevicePlan until "
                "the backward has been computed"
            )
        return slot._plan_for(q, k, window_left, stream), segments
    refuse_capture(
        "it would keep the address of the forest's plan, which is freed when the plan drops out of its "
        "cache; give dualkv.attention a dualkv.DevicePlan in place of the forest"
    )
    with _lock:
        schedule = plan(segments, window_left, query_row_begin, _cuda_tiles(q, k))
        images = _images.setdefault(schedule, {})
        if q.device not in images:
            images[q.device] = _SharedMemory(_upload(schedule, q.device))
        memory = images[q.device]
    memory.used_by(stream)
    return schedule, memory.tensor


class _SharedMemory:
    """Device memory that several streams read: freed, it is not used again before they have done so."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self._streams = set()

    def used_by(self, stream: torch.cuda.Stream) -> None:
        if stream.cuda_stream not in self._streams:
            self.tensor.record_stream(stream)
            self._streams.add(stream.cuda_stream)


# The images of each plan by device; they live as long as the plan does. The lock makes one of a plan that two
# threads ask for at once.
_images: weakref.WeakKeyDictionary[Handle, dict[torch.device, _SharedMemory]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()

# By the address of their image, by which an operator finds them.
_device_plans: weakref.WeakValueDictionary[int, DevicePlan] = weakref.WeakValueDictionary()


def _upload(schedule: Handle, device: torch.device) -> torch.Tensor:
    """The image of a plan in memory of the device, ready for any stream."""
    stream = _upload_stream(device)
    with torch.cuda.stream(stream):
        image = _pinned_image(schedule).to(device, non_blocking=True)
    stream.synchronize()  # this stream alone: kernels on others keep running
    return image


@functools.lru_cache(maxsize=None)
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pinned_image(schedule: Handle) -> torch.Tensor:
    image = torch.empty(_image_bytes(schedule), dtype=torch.uint8, device="cpu", pin_memory=True)
    library.dualkv_plan_write_image(schedule, image.data_ptr(), image.numel())
    return image


def _image_bytes(schedule: Handle) -> int:
    size = ctypes.c_size_t()
    library.dualkv_plan_image_bytes(schedule, ctypes.byref(size))
    return size.value


def _cuda_tiles(q, k) -> tuple[int, ...]:
    return tile_sizes(_abi.CUDA, q.shape[1], k.shape[1], q.shape[2])


def _window_text(window_left: int) -> str:
    return "None" if window_left == _abi.NO_WINDOW else str(window_left)
