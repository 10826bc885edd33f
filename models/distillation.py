"""A drafter as it is trained: the target's texts, some of its layers, a narrow head, the loss.

Letters: B texts, L positions, K stored tokens of a position, E width, N tokens of the head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from accepted_runs import MOST_LOOKAHEAD, Runs
from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.model_loading import load_model
from text_writers import OWN, TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ROWS_AT_ONCE = {"cpu": 8, "cuda": 128}
_COUNTED_AT_ONCE = 1 << 10  # Texts.
_OWN_PARTS = ("layers.", "norm.")


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a target, with the distributions that it gave them.

    Attributes:
        token_ids: (B, L) int32.
        origins: (B, L) uint8; where each token comes from.
        best_ids: (B, L, K) int32; the most probable tokens after each position.
        best_log_probs: (B, L, K) float16; their log probabilities.
    """

    token_ids: Tensor
    origins: Tensor
    best_ids: Tensor
    best_log_probs: Tensor

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, Tensor]]) -> Texts:
        """Put batches together, as `DeviceTexts` writes them."""
        return cls(**{name: torch.cat([it[name] for it in batches]) for name in batches[0]})

    def rows(self, rows: Tensor | slice) -> Texts:
        """Return some of them."""
        return Texts(
            self.token_ids[rows], self.origins[rows], self.best_ids[rows], self.best_log_probs[rows]
        )

    def before(self, *origins: int) -> Tensor:
        """Tell after which positions a token of one of the origins stands: (B, L) bool."""
        following = functional.pad(self.origins[:, 1:], (0, 1), value=TEMPLATE)
        return torch.isin(following, following.new_tensor(origins))

    def learnt(self) -> Tensor:
        """Tell after which positions the target's distribution is learnt: (B, L) bool.

        Given words count too: what the target thinks of them is known, and worth as much.
        """
        return ~self.before(TEMPLATE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a drafter is made of.

    Attributes:
        layers: The target's layers that it begins with, in their order.
        token_ids: The tokens that its head scores, ascending.
    """

    layers: tuple[int, ...]
    token_ids: tuple[int, ...]


def load_target(target: str, device: torch.device | str = "cpu") -> LlamaForCausalLM:
    """Load a target in float32, from whatever a server takes."""
    model = load_model(find_model_files(target), dtype="float32")
    if not isinstance(model, LlamaForCausalLM):
        raise SystemExit(f"{target} is a {type(model).__name__}, and no Llama")
    return nn.Module.to(model, device).requires_grad_(requires_grad=False)


def embeddings_digest(model: LlamaForCausalLM) -> str:
    """Hash a target's embeddings: a drafter that was trained on them needs these and no others."""
    weight = model.model.embed_tokens.weight.detach().float().cpu().contiguous()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def shallow(target: LlamaForCausalLM, layers: Sequence[int]) -> LlamaForCausalLM:
    """Build a model of some of a target's layers. Embeddings and head are the target's own."""
    sizes = {"num_hidden_layers": len(layers), "layer_types": None}
    config = LlamaConfig.from_dict(target.config.to_dict() | sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.embed_tokens = target.model.embed_tokens
    model.lm_head = target.lm_head
    model.model.rotary_emb = target.model.rotary_emb
    parts = [(model.model.norm, target.model.norm)]
    parts += [
        (new, target.model.layers[old]) for new, old in zip(model.model.layers, layers, strict=True)
    ]
    for part, source in parts:
        state = {name: weight.clone() for name, weight in source.state_dict().items()}
        part.load_state_dict(state, assign=True)
        part.requires_grad_()
    return model


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drafter beside its target, after each position of texts.

    Attributes:
        hits: (B, L) bool; whether both find the same token the most probable.
        shared: (B, L) the sum over the stored tokens of the smaller of both probabilities.
        losses: (B, L) the cross-entropy.
    """

    hits: Tensor
    shared: Tensor
    losses: Tensor


class Drafter(nn.Module):
    """A drafter in training: its layers and its last norm learn, embeddings and head do not."""

    def __init__(self, target: LlamaForCausalLM, choice: Choice) -> None:
        """Begin with the target's own layers."""
        super().__init__()
        self.choice = choice
        self.model = shallow(target, choice.layers).model
        every = target.lm_head.weight.detach()
        self._token_ids = torch.tensor(choice.token_ids, device=every.device)
        self._head = every[self._token_ids]
        # A token's place in the head; N for the tokens that it does not score.
        count = len(choice.token_ids)
        self._places = torch.full((len(every),), count, device=every.device)
        self._places[self._token_ids] = torch.arange(count, device=every.device)

    def logits(self, token_ids: Tensor, at: Tensor) -> Tensor:
        """Return the logits after the positions `at`, (M, N) float32, of (B, L) tokens.

        On a CPU that has no bfloat16 this is slow, and it is what the shipped weights are for.
        """
        with torch.autocast(self._head.device.type, torch.bfloat16):
            hidden = self.model(token_ids.long(), use_cache=False).last_hidden_state[at]
            return functional.linear(hidden, self._head).float()

    def loss(self, texts: Texts) -> Tensor:
        """Return the cross-entropy with the target's distributions, in nats for each position.

        What the target gives to tokens that the head does not score is left out.
        """
        at = texts.learnt()
        logits = self.logits(texts.token_ids, at)
        return _cross_entropy(logits, *self._beside(logits, texts, at)).mean()

    def compare(self, texts: Texts) -> Comparison:
        """Compare it with the target after each position."""
        everywhere = torch.ones_like(texts.learnt())
        logits = self.logits(texts.token_ids, everywhere)
        scored, wanted = self._beside(logits, texts, everywhere)
        best = self._token_ids[logits.argmax(-1)]
        probs = (scored - logits.logsumexp(-1, keepdim=True)).exp()
        shape = texts.origins.shape
        return Comparison(
            hits=best.view(shape) == texts.best_ids[..., 0],
            shared=torch.minimum(probs, wanted).sum(-1).view(shape),
            losses=_cross_entropy(logits, scored, wanted).view(shape),
        )

    def _beside(self, logits: Tensor, texts: Texts, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the target's best tokens, and their probabilities: (M, K) each.

        Tokens that the head does not score get the probability 0.
        """
        places = self._places[texts.best_ids[at].long()]
        is_scored = places < len(self.choice.token_ids)
        scored = logits.gather(-1, places.clamp(max=logits.shape[-1] - 1))
        return scored, texts.best_log_probs[at].float().exp() * is_scored

    def own_weights(self) -> dict[str, Tensor]:
        """Return the weights that are not the target's, by their names in its `model`."""
        return {
            name: weight.detach()
            for name, weight in self.model.state_dict().items()
            if name.startswith(_OWN_PARTS)
        }


def _cross_entropy(logits: Tensor, scored: Tensor, wanted: Tensor) -> Tensor:
    """Return (M,) from all logits, the logits of some tokens, and these tokens' probabilities."""
    return ((logits.logsumexp(-1, keepdim=True) - scored) * wanted).sum(-1)


def choose_tokens(
    texts: Texts, *, count: int, always: Iterable[int], vocabulary_size: int
) -> tuple[tuple[int, ...], float]:
    """Choose the tokens to which a target gives most of the probability.

    Args:
        always: Tokens that are chosen in any case, such as ends.

    Returns:
        The tokens, ascending, and their share of the probability.
    """
    sums = torch.zeros(vocabulary_size, dtype=torch.float64, device=texts.token_ids.device)
    for start in range(0, len(texts.token_ids), _COUNTED_AT_ONCE):
        part = texts.rows(slice(start, start + _COUNTED_AT_ONCE))
        at = part.learnt()
        probs = part.best_log_probs[at].double().exp().flatten()
        sums.index_add_(0, part.best_ids[at].long().flatten(), probs)
    ranked = sums.clone()
    ranked[list(always)] = torch.inf
    chosen = ranked.topk(count).indices.sort().values
    return tuple(chosen.tolist()), float(sums[chosen].sum() / sums.sum())


@dataclass(frozen=True, slots=True)
class Reached:
    """How well a drafter says what its target says, on texts that it does not learn from.

    Attributes:
        loss: In nats for each position, as `Drafter.loss`.
        greedy: How often both find the same token the most probable, in what the target wrote.
        sampled: The share of tokens that rejection sampling would accept at temperature 1.
        accepted: For each lookahead from 1 on, how many tokens would be accepted on average if the
            target's text were greedy.
    """

    loss: float
    greedy: float
    sampled: float
    accepted: tuple[float, ...]

    def as_row(self, step: int) -> dict[str, Any]:
        """Return it as an object of the curve."""
        return {
            "step": step,
            "loss": self.loss,
            "greedy": self.greedy,
            "sampled": self.sampled,
            "accepted": self.accepted,
        }


@torch.inference_mode()
def evaluate(drafter: Drafter, texts: Texts) -> Reached:
    """Compare a drafter with its target where the target answers or goes on."""
    hits, shares, losses, runs = [], [], [], []
    rows = _ROWS_AT_ONCE[texts.token_ids.device.type]
    for start in range(0, len(texts.token_ids), rows):
        part = texts.rows(slice(start, start + rows))
        own = part.before(OWN)
        found = drafter.compare(part)
        hits.append(found.hits[own])
        shares.append(found.shared[own])
        losses.append(found.losses[part.learnt()])
        lines = zip(found.hits.cpu(), own.cpu(), strict=True)
        runs += [Runs.of(line, is_own) for line, is_own in lines]
    return Reached(
        loss=float(torch.cat(losses).mean()),
        greedy=float(torch.cat(hits).float().mean()),
        sampled=float(torch.cat(shares).mean()),
        accepted=Runs.together(runs).accepted(MOST_LOOKAHEAD),
    )
