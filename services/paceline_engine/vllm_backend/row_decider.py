"""The logits processor that decides every row of vLLM's by our rule.

vLLM hands it the logits of a step, one row for each request. It chooses each row's token as our own
backend does (`deciding/sampling.py`: shaping, filters, position-keyed noise), and leaves that token
as the row's largest. Requests are greedy, so vLLM's sampler takes it.
"""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from paceline_contract.proposal import NOTHING
from paceline_engine.deciding.gumbel import noise_kernel
from paceline_engine.deciding.sampling import Draw, choose_each
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.vllm_backend.row_tasks import FIELD, model_of_row_task, read_row_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline_engine.terms.calls import SessionSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """A request in vLLM's batch.

    Attributes:
        prompt: Its tokens before the first decided one.
        output: vLLM's own list of its decided tokens, which grows.
        shaper: Shapes its logits; None: nothing does.
    """

    spec: SessionSpec
    prompt: Sequence[int]
    output: Sequence[int]
    shaper: Shaper | None = field(default=None)

    @property
    def position(self) -> int:
        """The position of the token that its row decides."""
        return len(self.prompt) + len(self.output)


class RowDecider(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Decides the rows of the requests that carry a row task."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        del is_pin_memory
        told = vllm_config.additional_config[FIELD]
        self._vocabulary_size: int = told["vocabulary_size"]
        self._fingerprint: str = told["fingerprint"]
        self._rows: dict[int, _Row] = {}
        noise_kernel(device)  # compiled now, so that no request waits for it

    def is_argmax_invariant(self) -> bool:
        """Return False: it decides the largest logit."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests to their rows: removed, added, moved, in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            if (spec := read_row_task(params.extra_args)) is not None:
                self._check_model(model_of_row_task(params.extra_args))
                self._rows[index] = _Row(spec, prompt, output, self._new_shaper(spec))
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Make each row's token its largest logit; a row that has no largest number stays."""
        due = [(index, row) for index, row in sorted(self._rows.items()) if index < len(logits)]
        if not due:
            return logits
        indices = [index for index, _ in due]
        own = logits[indices, : self._vocabulary_size]
        for place, (_, row) in enumerate(due):
            if row.shaper is not None:
                prefix = array("I", (*row.prompt, *row.output))
                own[place] = row.shaper.shape(own[place : place + 1], prefix, NOTHING)[0]
        draws = [Draw(row.position, row.spec.sampling, row.spec.seed) for _, row in due]
        chosen = choose_each(own, draws)
        sure = {row: token for row, token in zip(indices, chosen, strict=True) if token is not None}
        if sure:
            logits[[*sure], [*sure.values()]] = math.inf
        return logits

    def _check_model(self, fingerprint: str) -> None:
        """End this process if the node that serves has another model: its texts would be neither's.

        vLLM tells nobody of an error here, and the others would wait for this one.
        """
        if fingerprint != self._fingerprint:
            _log.critical(
                "this node has the model %s and the one that serves has %s: they need the same"
                " files, dtype and engine options",
                self._fingerprint,
                fingerprint,
            )
            raise SystemExit(1)

    def _new_shaper(self, spec: SessionSpec) -> Shaper | None:
        if not spec.sampling.shapes:
            return None
        return Shaper(spec, vocabulary_size=self._vocabulary_size)
