"""A model of the transformers library that computes rows of many sequences in one forward.

Theory of operation
-------------------

A *row* is one token position that is computed. A sequence with n missing tokens and a proposal of k
has n + k rows, of which the last k + 1 are *scored*: they decide what follows the prefix and each
proposed token. A forward computes the rows of all feeds side by side,

    rows     | seq. A: a7 a8 p1 p2 | seq. B: b3 | seq. C: c5 p1 |
    scored   |            ^  ^  ^  |        ^   |          ^ ^  |

and only attention depends on the sequence of a row (`shared_rows.py`, `attention.py`).

The decoder, which computes forwards, is chosen at load (`decoders.choose_decoder`): each
candidate's logits are compared with the library's.

1. `FusedLlama`: Llama, Mistral, Qwen 2 and Qwen 3 in few, large steps.
2. `LibraryDecoder`: the library's own layers, with our rows and attention put into its interface.
   `RecurrentDecoder`: with open rows beside the state of recurrent layers, too (`recurrent/`).
3. None: the library computes one sequence at a time, with its own cache (`score_alone`), because
   the model's attention cannot be replaced; or row by row (`recurrent/stepped_text.py`), because
   its state cannot be taken back.

On CUDA with `capture` forwards of few rows are recorded, each size at its first run, and replayed
(`cuda_graphs.py`); trees, and parts of prompts, are computed anew.

What must hold, and is easy to break:

- A sequence's cache stands for exactly its `token_ids`, also after a forward that raised or was
  interrupted: `ModelCache.extend` comes after the forward, and `settle` cuts the rows it left.
- Logits are valid until the next forward only, because a replayed forward writes over them.
- The interrupt is checked before each layer. Rows of an interrupted forward are never read: they
  lie beyond the sequence's length, and the next forward writes over them.
- The host does not wait for a CUDA device before it reads the logits, so it can run ahead.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from paceline_engine.deciding.shapers import Shapers
from paceline_engine.model_backend import Feed, ModelBackend
from paceline_engine.terms.backend import (
    PLAIN,
    ForwardInterrupted,
    Interrupt,
    ModelLoadError,
    TokenMemory,
)
from paceline_engine.torch_backend.attention import TextRows
from paceline_engine.torch_backend.chain_drafting import layers_beside
from paceline_engine.torch_backend.compiled_layers import LayerRun
from paceline_engine.torch_backend.cuda_graphs import capture_forwards
from paceline_engine.torch_backend.decoders import choose_decoder, take_sample, use_compiled
from paceline_engine.torch_backend.device import on_device, wait_for
from paceline_engine.torch_backend.families import rotations_change
from paceline_engine.torch_backend.feature_rows import FeatureLayers
from paceline_engine.torch_backend.invariant import LEAST_MULTIPLE, TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.library import LibraryText, decoder_layers, score_alone
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.memory import free_memory, return_freed_memory
from paceline_engine.torch_backend.packed_linear import PackedModules
from paceline_engine.torch_backend.recurrent.invariant_rows import InvariantRecurrentRows
from paceline_engine.torch_backend.recurrent.library_state import has_recurrent_state
from paceline_engine.torch_backend.recurrent.probe import prove_steps
from paceline_engine.torch_backend.recurrent.recurrent_decoder import OpenTiles, choose_open_tiles
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentRows
from paceline_engine.torch_backend.recurrent.recurrent_text import RecurrentText
from paceline_engine.torch_backend.recurrent.stepped_text import SteppedText
from paceline_engine.torch_backend.shared_rows import SharedRows
from paceline_engine.torch_backend.whole_products import replace_products

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.torch_backend.adapters.eagle import EagleHead
    from paceline_engine.torch_backend.adapters.mtp_head import MtpHead
    from paceline_engine.torch_backend.cuda_graphs import CapturedForwards
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.draft_head import DraftHead
    from paceline_engine.torch_backend.int8_linear import Int8Product
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_adapters import LoraAdapters
    from paceline_engine.torch_backend.own_guesses import OwnGuesses
    from paceline_engine.torch_backend.packed_linear import Product
    from paceline_engine.torch_backend.recurrent.probe import Continuation

_Text: TypeAlias = KeyValues | LibraryText | SteppedText


class ComputedModel(ModelBackend):
    """A model of the transformers library, as loaded; its scores are logits, (rows, V).

    If its head scores some tokens only, there is a column for each of them, and not for all V.
    A subclass adds the decisions.

    Attributes:
        model: The library's.
        decoder: What computes rows of sequences; None: the library does, one sequence at a time.
        together: Whether one kernel attends to several sequences; see `SharedRows`.
        features: Where the features of its rows lie, which a head reads; None: nothing reads them.
        captured: Records forwards of few rows, to be replayed; None: they are computed.
        own_guesses: What the model guesses beside the rows that decide; None: nothing.
        shapers: What shapes the logits of its sequences, with their grammars.
        draft_head: Says which tokens the head scores; None: all.
        row_multiple: The multiple up to which invariant forwards are filled.
        lora: The LoRA adapters that its sequences can have; None: none.

    Cancellation:
        A hook before each decoder layer looks at the running forward's interrupt. On CUDA that is
        the moment of the launch: kernels that are launched already still run. A captured forward
        always runs to its end.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        device: torch.device,
        capture: bool = False,
        invariant: bool = False,
        weights: str = PLAIN,
        compiled: bool = True,
        head: EagleHead | MtpHead | None = None,
    ) -> None:
        """Choose how to compute a model. The subclass sets its description.

        Args:
            name: The model's name, for the log.
            model: The library's, on its device.
            device: That device.
            capture: On CUDA, record forwards of few rows and replay them.
            invariant: See `TransformersBackend`.
            weights: PLAIN; or INT8, INT4, W8A8 or W4A16: see `replace_products`.
            compiled: Compile what is computed between products on a CPU, where that is possible.
            head: What keeps features beside keys and values; None: nothing does.

        Raises:
            ModelLoadError: it cannot be computed with such weights, or the head is for another
                model.
        """
        self.model = model
        self.device = device
        self._invariant = invariant
        self.row_multiple = LEAST_MULTIPLE
        self._stepped: Continuation | None = None
        self._tiles: OpenTiles | None = None
        # On an accelerator launching kernels takes most of the time: one kernel for all sequences.
        self.together = device.type != "cpu"
        self.decoder: Decoder | None = None
        self._bytes_per_text = 0
        with on_device():
            if has_recurrent_state(model):
                shape = self._choose_recurrent(name, packs=weights == PLAIN)
            else:
                sample = take_sample(model)
                shape, self._bytes_per_token = sample.shape, sample.bytes_per_token
                self.decoder = choose_decoder(
                    name, model, sample=sample, together=self.together, packs=weights == PLAIN
                )
            products: list[Product] = []
            large: Mapping[torch.Size, Int8Product] = {}
            if weights != PLAIN:
                products, large = replace_products(
                    name, model, self.decoder, kind=weights, beside=head.parts() if head else ()
                )
            elif head is not None:
                for each in head.parts():
                    PackedModules(each)
            if compiled and device.type == "cpu":
                use_compiled(name, self.decoder, products, large)
        del products, large  # a large product of each shape
        return_freed_memory()
        tile = TILE if invariant else 1
        self.features: FeatureLayers | None = None
        if shape is not None and head is not None:
            # After the layer with the head's own keys and values.
            self.features = FeatureLayers(head, first_layer=shape.layers + 1)
            shape = replace(shape, layers=shape.layers + layers_beside(head, shape))
            self._bytes_per_token = max(self._bytes_per_token, shape.bytes_per_token)
        self._slabs = None if shape is None else Slabs(shape, tile=tile)
        self._layers = self.decoder.layers if self.decoder else decoder_layers(model)
        runs = self.decoder.runs if isinstance(self.decoder, FusedLlama) else ()
        for each in (*self._layers, *runs):
            each.register_forward_pre_hook(self._before_layer)
        self.interrupt = Interrupt()
        self._layers_run = 0
        self.lora: LoraAdapters | None = None
        self.own_guesses: OwnGuesses | None = None
        self.shapers = Shapers(lambda: self.description.vocabulary_size)
        self.draft_head: DraftHead | None = None
        self.captured = (
            capture_forwards(name, self.decoder, shape, device=device, beside=self.features)
            if capture
            else None
        )

    def _choose_recurrent(self, name: str, *, packs: bool) -> KeyValueShape | None:
        """Choose how to compute a model with a recurrent state; return its shape with tiles."""
        tiles = choose_open_tiles(
            name,
            self.model,
            together=self.together,
            packs=packs,
            invariant=self._invariant,
        )
        if tiles is None and self._invariant:
            raise ModelLoadError(
                f"model {name!r} cannot be served with --invariant: its recurrent state has no form"
                " that keeps rows beside it"
            )
        found = tiles or prove_steps(name, self.model)
        self._bytes_per_token = found.bytes_per_token
        self._bytes_per_text = found.bytes_per_text
        if isinstance(found, OpenTiles):
            self._tiles, self.decoder = found, found.decoder
            return found.shape
        self._stepped = found
        return None

    @property
    def _attention_places(self) -> Mapping[int, int] | None:
        """Of a model with open tiles: see `RecurrentRows`."""
        return None if self._tiles is None else self._tiles.attention_places

    @property
    def captures(self) -> bool:
        """Whether forwards of few rows are recorded and replayed."""
        return self.captured is not None and self.captured.work

    @property
    def layers_run(self) -> int:
        """How many decoder layers forwards have gone through so far."""
        return self._layers_run

    @property
    def cuts_prompts(self) -> bool:
        """Whether a part of a long prompt is computed as in the whole: rotations stay the same."""
        blocks_are_right = self._stepped is None or self._stepped.takes_blocks
        return blocks_are_right and not rotations_change(self.model.config)

    @property
    def shares_forwards(self) -> bool:
        """Whether a forward computes rows of several sequences."""
        return self.decoder is not None and not rotations_change(self.model.config)

    @property
    def judges_row_by_row(self) -> bool:
        """Whether each token of a proposal takes a forward: its state cannot be taken back."""
        return self._stepped is not None

    @on_device()
    def token_memory(self) -> TokenMemory:
        """Measure the memory for tokens: the free memory, and the memory of one token."""
        free = free_memory(self.device)
        return TokenMemory(
            free_bytes=free.byte_count,
            usable_share=free.usable_share,
            bytes_per_token=self._bytes_per_token,
            kept_share=free.kept_share,
            bytes_per_text=self._bytes_per_text,
        )

    def new_cache(self, spec: SessionSpec) -> _Text:
        """Begin an empty sequence for a session."""
        if self._stepped is not None:
            return SteppedText(self.model, takes_blocks=self._stepped.takes_blocks)
        if self.decoder is None or self._slabs is None:
            return LibraryText()
        kind = KeyValues if self._tiles is None else RecurrentText
        return kind(
            self._slabs,
            reserve_length=spec.reserve_length,
            can_be_copied=not rotations_change(self.model.config),
        )

    @on_device()
    def _make_room(self, feed: Feed) -> None:
        if isinstance(feed.cache, KeyValues):
            beside = self.own_guesses.most_streams(feed) if self.own_guesses else 0
            feed.cache.make_room(len(feed.token_ids), beside=beside)

    @on_device()
    def _forward(self, feeds: Sequence[Feed], interrupt: Interrupt) -> list[Tensor]:
        self.interrupt = interrupt
        if self.description.shares_forwards:
            logits = self._score(feeds)
        else:
            logits = [each for feed in feeds for each in self._score([feed])]
        if not any(feed.scored_count for feed in feeds):
            wait_for(self.device)
        return [self._of_known_tokens(rows) for rows in logits]

    def _of_known_tokens(self, logits: Tensor) -> Tensor:
        """Leave out the columns of no token."""
        if self.draft_head is not None:
            return logits
        return logits[:, : self.description.vocabulary_size]

    def _score(self, feeds: Sequence[Feed]) -> Sequence[Tensor]:
        """Return the logits of each feed's scored rows; they are valid until the next forward."""
        if self.decoder is None:
            (feed,) = feeds
            if isinstance(feed.cache, SteppedText):
                return [self._step(feed, feed.cache)]
            ids = torch.tensor(feed.token_ids.tolist()).to(self.device, non_blocking=True)
            text = cast("LibraryText", feed.cache)
            return [score_alone(self.model, text, ids, rows=feed.scored_count)]
        if self.captured is not None and self.captured.work:
            replayed = self._replay(feeds, self.captured)
            if replayed is not None:
                return replayed
        # In the order in which the sequences lie, so that neighbours go into one kernel.
        order = sorted(range(len(feeds)), key=lambda index: _address(feeds[index]))
        logits = self._compute_rows([feeds[index] for index in order])
        return [each for _, each in sorted(zip(order, logits, strict=True), key=itemgetter(0))]

    def _step(self, feed: Feed, text: SteppedText) -> Tensor:
        """Compute a feed row by row, up to the first rejection."""
        scores = text.append(feed.token_ids, scored_count=feed.scored_count, accepts=feed.accepts)
        if len(scores) == feed.scored_count:
            return scores
        feed.stop(len(scores) - 1)
        return torch.cat((scores, scores[-1:]))  # the row after the rejected token is never read

    def _compute_rows(self, feeds: Sequence[Feed]) -> Sequence[Tensor]:
        assert self.decoder is not None
        texts = [_text_of(feed) for feed in feeds]
        token_ids = [feed.token_ids for feed in feeds]
        counts = [feed.scored_count for feed in feeds]
        parents = [feed.parents for feed in feeds]
        rows = self._rows_of(texts, token_ids, counts, parents=parents)
        if self.lora is not None:
            rows.lora = self.lora.rows([(feed.lora, len(feed.token_ids)) for feed in feeds])
        if self.own_guesses is not None and self.own_guesses.reads(feeds):
            logits = self.own_guesses.compute(self.decoder, feeds, rows, together=self.together)
            counts = [feed.scored_count for feed in feeds]  # trees may have been pruned
        else:
            logits = self.decoder(rows)
        return torch.split(logits[: sum(counts)], counts)

    def _rows_of(
        self,
        texts: Sequence[KeyValues],
        token_ids: Sequence[Sequence[int]],
        scored_counts: Sequence[int],
        *,
        parents: Sequence[Sequence[int]],
    ) -> SharedRows:
        """Return the rows of a forward in the form in which the model computes them."""
        kind: Any = InvariantRows if self._invariant else SharedRows
        options: dict[str, Any] = (
            {"multiple": self.row_multiple} if self._invariant else {"together": self.together}
        )
        if self._tiles is not None:
            kind = InvariantRecurrentRows if self._invariant else RecurrentRows
            options["attention_places"] = self._tiles.attention_places
        rows: SharedRows = kind(texts, token_ids, scored_counts, parents=parents, **options)
        return rows

    def _replay(self, feeds: Sequence[Feed], captured: CapturedForwards) -> Sequence[Tensor] | None:
        """Replay a forward; the first of a size is computed, and recorded. None: it is neither."""
        if any(feed.parents or feed.lora for feed in feeds):
            return None
        if self.own_guesses is not None and not self.own_guesses.replays(feeds):
            return None
        if not captured.take([len(feed.token_ids) for feed in feeds]):
            return None
        texts = [TextRows(_text_of(feed), len(feed.token_ids)) for feed in feeds]
        token_ids = [*chain.from_iterable(feed.token_ids for feed in feeds)]
        ends = accumulate(text.count for text in texts)
        scored = [
            range(end - feed.scored_count, end) for end, feed in zip(ends, feeds, strict=True)
        ]
        forward = captured.find(texts)
        if forward is not None:
            if self.own_guesses is not None:
                self.own_guesses.begin_replay(feeds)
            with self._counting(len(self._layers)):
                logits = forward(texts, token_ids)
            return [logits[rows.start : rows.stop] for rows in scored]
        computed = self._compute_rows(feeds)
        with self._counting(0):  # the same rows are computed again, to be recorded
            is_there = captured.record(
                texts,
                token_ids,
                scored=[*chain.from_iterable(scored)],
                expected=torch.cat([*computed]),
                name=self.description.name,
            )
        if not captured.work:  # from now on every forward goes from layer to layer
            self.description = replace(self.description, cancels_between_layers=True)
        # The second computation writes over the rows of the first.
        return computed if is_there else self._compute_rows(feeds)

    @contextmanager
    def _counting(self, layer_count: int) -> Iterator[None]:
        """Count so many layers for the code in the context, not the layers that it runs."""
        before = self._layers_run
        try:
            yield
        finally:
            self._layers_run = before + layer_count

    def _before_layer(self, module: object, _: object) -> None:
        if self.interrupt.is_set():
            raise ForwardInterrupted
        self._layers_run += module.depth if isinstance(module, LayerRun) else 1


def _text_of(feed: Feed) -> KeyValues:
    return cast("KeyValues", feed.cache)


def _address(feed: Feed) -> tuple[int, int]:
    place = _text_of(feed).place
    assert place is not None, "it has room"
    return place.address
