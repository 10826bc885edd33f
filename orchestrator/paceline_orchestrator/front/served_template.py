"""The chat template of the model that is served: which target is asked for it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from paceline.errors import ConnectionLostError, NoTargetError, PacelineError, UnsupportedError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.questions import Question
from paceline_orchestrator.fleet.wire import fetch_chat_template

if TYPE_CHECKING:
    from paceline.v1.model_service_pb2 import ChatTemplate
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer

_log = logging.getLogger(__name__)


class ServedTemplate:
    """Asks targets for their model's chat template each time; clients keep it.

    Args:
        pool: The targets.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._question = Question()

    async def fetch(self) -> tuple[str, ChatTemplate]:
        """Return the model's fingerprint, and what the first target that has it tells.

        Raises:
            UnsupportedError: Each target with the model has said that there is none.
            NoTargetError: No target tells it, and one that could is away, or has failed.
        """
        model = self._pool.model()
        targets = self._pool.targets(model)
        is_complete = not self._pool.has_target_away(model)
        in_turn = iter(self._question.in_turn(targets))
        refusals: list[str] = []

        async def ask(target: ModelServer) -> ChatTemplate | None:
            asked_at = time.monotonic()
            try:
                template = await fetch_chat_template(target.models)
            except UnsupportedError as error:
                # Or it is too old to know the question: another one may have it.
                refusals.append(error.message)
                self._question.note_answer(target)
            except PacelineError as error:
                _log.warning("%s does not tell its chat template: %s", target.name, error.message)
                if not isinstance(error, ConnectionLostError):  # else its health tells
                    self._question.note_failure(target, asked_at=asked_at)
            else:
                self._question.note_answer(target)
                return template
            return None

        template = await self._question.ask(lambda: next(in_turn, None), ask)
        if template is not None:
            return model.fingerprint, template
        if refusals and is_complete and len(refusals) == len(targets):
            raise UnsupportedError(refusals[-1])
        raise NoTargetError(
            "no target tells its chat template", retry_after_seconds=shortage.RETRY_SECONDS
        )
