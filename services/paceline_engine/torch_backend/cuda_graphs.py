"""Forwards of few rows on CUDA, recorded once and replayed.

A small model's kernels take less time than their launches, and a large one's hardly more. A
recording is launched as a whole, but it does the same to the same addresses each time. Therefore
tokens, positions and the places of keys and values are read from tables on the device
(`in_place.py`), and one recording serves all sequences. There is one for each size: a number of
rows, and of sequences, that are filled up with rows of no sequence.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from paceline_engine.torch_backend.attention import FEW_ROWS
from paceline_engine.torch_backend.decoders import agree
from paceline_engine.torch_backend.device import lacks_memory
from paceline_engine.torch_backend.feature_rows import FeatureRows, cut_into_layers
from paceline_engine.torch_backend.in_place import Kernels, RowsInPlace, Tables, in_place_kernels
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import ForwardRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.torch_backend.attention import TextRows
    from paceline_engine.torch_backend.attention_kernels import Attention
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.feature_rows import FeatureLayers

_log = logging.getLogger(__name__)

_MOST_ROWS = 64
_WARM_UPS = 3
# After a recording for which there was no memory. Each attempt costs as much as several forwards.
_FORWARDS_WITHOUT_MEMORY = 64
# Rotations of so many positions are computed before the first recording.
_FIRST_POSITIONS = 4096

_Result = TypeVar("_Result")
_Recorder: TypeAlias = "Callable[[Callable[[], Tensor]], Callable[[], Tensor]]"


@dataclass(frozen=True, slots=True)
class Size:
    """What a recording has room for.

    Attributes:
        rows: How many rows, T: a power of two, as the others.
        tiles: How many sequences.
        tile_rows: The most rows of a sequence: 1 or FEW_ROWS.
    """

    rows: int
    tiles: int
    tile_rows: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> Self:
        """Return the size for sequences with so many rows."""
        rows, tiles = (1 << (number - 1).bit_length() for number in (sum(counts), len(counts)))
        return cls(rows, tiles, 1 if max(counts) == 1 else FEW_ROWS)


class CapturedForward(ForwardRows):
    """A forward of a size, for any sequences.

    On another device than CUDA it is computed anew each time, also with all its rows.

    Invariants:
        The logits are the decoder's own, apart from rounding
        (tests/unit/engine/test_captured.py).
    """

    def __init__(
        self,
        decoder: FusedLlama,
        size: Size,
        *,
        nobody: KeyValues,
        kernels: Kernels,
        longest: int,
        record: _Recorder,
        beside: FeatureLayers | None = None,
    ) -> None:
        """Record it; no sequence is written to.

        Args:
            nobody: A sequence of no session, with room for one row. The rows that fill up are its.
            longest: More than the largest position of a row.
            record: Makes a recording of a function (`CapturedForwards.recorded`).
            beside: Where the rows' features are kept, too; None: they are not.

        Raises:
            RuntimeError: It cannot be recorded here; or there is no memory for it
                (`device.lacks_memory`).
        """
        self._size = size
        self.longest = longest
        # Held, because a recording holds addresses only; so are the rotations, because the decoder
        # replaces its table when a sequence gets longer, which a recording must not do.
        self._nobody = nobody
        self._rotations = decoder.rotations(longest)
        keys, values = nobody.places_from(nobody)
        self._no_row = [*keys, *values]
        # One tensor, so that the host sends one.
        self._told = torch.zeros(8 * size.rows + 9 * size.tiles, dtype=torch.int64)
        self._told = self._told.to(nobody.keys.device)
        parts = torch.split(self._told, [size.rows, size.rows, 6 * size.rows, 9 * size.tiles])
        self.token_ids, self.positions = parts[:2]
        self.scored = slice(0, size.rows)
        self._in_place = RowsInPlace(
            kernels,
            like=nobody,
            rows=parts[2],
            tiles=parts[3],
            tile_rows=size.tile_rows,
            longest=longest,
        )
        self._tell([], [], Tables([], like=nobody))
        self._replay = record(lambda: self._compute(decoder, beside))

    def __call__(self, texts: Sequence[TextRows], token_ids: Sequence[int]) -> Tensor:
        """Compute rows of sequences, (T,) in all; return the logits: (T or more, V).

        They are valid until the next call.
        """
        positions = [position for text in texts for position in text.positions]
        self._tell(token_ids, positions, Tables(texts, like=self._nobody))
        return self._replay()

    def _compute(self, decoder: FusedLlama, beside: FeatureLayers | None) -> Tensor:
        if beside is None:
            return decoder(self)
        store = partial(self._store, first_layer=beside.first_layer)
        self.features = FeatureRows(beside.head, store=store)
        try:
            return decoder(self)
        finally:
            self.features = None  # a cycle of references would keep the recording

    def _store(self, features: Tensor, *, first_layer: int) -> None:
        """Write the rows' reduced features, (T, E), where their keys and values are written."""
        like = self._nobody
        cut = cut_into_layers(
            features,
            layers=like.keys.shape[0] - first_layer,
            heads=like.keys.shape[2],
            widths=(like.keys.shape[-1], like.values.shape[-1]),
        )
        for layer, (keys, values) in enumerate(cut, start=first_layer):
            self._in_place.keep(layer, keys, values)

    def attend(
        self, layer: int, queries: Tensor, *, keys: Tensor, values: Tensor, how: Attention
    ) -> Tensor:
        """Write the rows in their places, and look at all that is before each."""
        self._in_place.keep(layer, keys, values)
        return self._in_place.attend(layer, queries, how=how).transpose(0, 1)

    def _tell(self, token_ids: Sequence[int], positions: Sequence[int], tables: Tables) -> None:
        size = self._size
        lacking = size.rows - len(token_ids)
        numbers = [
            *token_ids, *[0] * lacking,
            *positions, *[0] * lacking,
            *tables.rows, *self._no_row * lacking,
            *tables.tiles, *[0] * (9 * size.tiles - len(tables.tiles)),
        ]  # fmt: skip
        self._told.copy_(torch.tensor(numbers), non_blocking=True)


class CapturedForwards:
    """Records a model's forwards, and has the memory in which recordings compute.

    A size is recorded beside the first forward of this size, which is computed.

    All recordings share the memory for intermediate results: they run one after the other on one
    thread, and only logits outlive a forward. Each recording has logits of its own.

    Attributes:
        work: Whether forwards can be captured; False for good once that has failed.
    """

    def __init__(
        self,
        decoder: FusedLlama,
        shape: KeyValueShape,
        kernels: Kernels,
        *,
        beside: FeatureLayers | None = None,
    ) -> None:
        """Build it without memory: the first recording takes that.

        Args:
            beside: Where rows' features are kept, too; None: they are not.
        """
        self.work = True
        self._decoder = decoder
        self._shape, self._kernels, self._beside = shape, kernels, beside
        self._device = shape.device
        self._forwards: dict[Size, CapturedForward] = {}
        self._longest = _FIRST_POSITIONS
        self._unrecorded_left = 0
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def take(counts: Sequence[int]) -> bool:
        """Whether forwards of sequences with so many rows, and no trees, are captured."""
        return sum(counts) <= _MOST_ROWS and max(counts) <= FEW_ROWS

    def find(self, texts: Sequence[TextRows]) -> CapturedForward | None:
        """Return the recording for sequences' rows, if it is there."""
        longest = max(text.length for text in texts)
        if longest > self._longest:
            self._longest = 1 << (longest - 1).bit_length()
            self._forwards.clear()
        return self._forwards.get(Size.of([text.count for text in texts]))

    def record(
        self,
        texts: Sequence[TextRows],
        token_ids: Sequence[int],
        *,
        scored: Sequence[int],
        expected: Tensor,
        name: str,
    ) -> bool:
        """Record a size; return whether the rows lie in their places, as computed before.

        Args:
            scored: Which rows were scored.
            expected: The logits of these rows, as computed.
            name: The model's name, for the log.
        """
        if self._unrecorded_left:
            self._unrecorded_left -= 1
            return True
        if not bool(expected.isfinite().all()):
            return True  # nothing can be compared with it, which says nothing about recordings
        size = Size.of([text.count for text in texts])
        try:
            forward = CapturedForward(
                self._decoder,
                size,
                nobody=self._nobody(),
                kernels=self._kernels,
                longest=self._longest,
                record=self.recorded,
                beside=self._beside,
            )
            features = self._features_of(texts)
            actual = forward(texts, token_ids)[[*scored]]
            pairs = [(expected, actual)] if len(scored) else []
            if features is not None and (found := self._features_of(texts)) is not None:
                pairs.append((features, found))
            if all(agree(*pair, dtype=self._shape.dtype) for pair in pairs):
                self._forwards[size] = forward
                return True
            reason = "they are off"
        except RuntimeError as error:
            if lacks_memory(error):
                self._unrecorded_left = _FORWARDS_WITHOUT_MEMORY
                return False
            reason = str(error)
        _log.warning("model %s: forwards are not captured: %s", name, reason)
        self.work = False
        self._forwards.clear()
        return False

    def _features_of(self, texts: Sequence[TextRows]) -> Tensor | None:
        """Return a copy of the features that the last forward kept of rows; None: it keeps none."""
        if self._beside is None:
            return None
        first = self._beside.first_layer
        pairs = [text.kept.between(text.start, text.count) for text in texts]
        return torch.cat([each.flatten() for pair in pairs for own in pair for each in own[first:]])

    def _nobody(self) -> KeyValues:
        text = KeyValues(Slabs(self._shape), reserve_length=1)
        text.make_room(1)
        return text

    def recorded(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a recording of a function; on another device than CUDA the function itself.

        Raises:
            RuntimeError: It cannot be recorded here, or there is no memory for it.
        """
        if self._device.type != "cuda":
            return run
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = self._take_memory()
            graph, logits = self._record_on(self._stream, run)

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return logits

        return replay

    def _take_memory(self) -> torch.cuda.Stream:
        """Begin the memory pool, and return the stream on which recordings are made."""
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Once no graph uses a pool, as after the last session, torch may refuse it to the next one.
        # So an empty graph always uses this one; torch warns that it is empty.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._empty_graph, _ = self._capture(lambda: None, stream=stream)
        return stream

    def _record_on(
        self, stream: torch.cuda.Stream, run: Callable[[], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph to replay, and where its result will lie."""
        before = torch.cuda.current_stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                # The first calls also do things that cannot be recorded, such as choosing kernels.
                for _ in range(_WARM_UPS):
                    run()
            return self._capture(run, stream=stream)
        finally:
            # Also after a failure half way: the calls so far write to the sequence's next row.
            before.wait_stream(stream)

    def _capture(
        self, run: Callable[[], _Result], *, stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, _Result]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        )
        # A capture that fails does not go back to the stream before it by itself.
        with torch.cuda.stream(stream), capture:
            result = run()
        return graph, result


def capture_forwards(
    name: str,
    decoder: Decoder | None,
    shape: KeyValueShape | None,
    *,
    device: torch.device,
    beside: FeatureLayers | None = None,
) -> CapturedForwards | None:
    """Return what records a model's forwards; None, with a line in the log, if nothing can.

    Args:
        name: The model's name, for the log.
        shape: A token's keys and values; None: not known.
        beside: Where rows' features are kept, too; None: they are not.
    """
    if device.type == "cuda" and isinstance(decoder, FusedLlama) and shape is not None:
        kernels = in_place_kernels(
            device,
            shape.dtype,
            kv_heads=shape.heads,
            group=decoder.group,
            key_width=shape.key_width,
            value_width=shape.value_width,
        )
        if kernels is not None:
            return CapturedForwards(decoder, shape, kernels, beside=beside)
    if device.type != "cpu":
        _log.info("model %s: its forwards are not captured", name)
    return None
