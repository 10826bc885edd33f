"""Speculative Streaming as the paper tells it, step by step: what an engine has to equal.

One text at a time, through the library's own layers and cache. Lower layers compute all nodes of a
tree, upper layers the kept ones, and afterwards every layer is cut back to the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from paceline_engine.terms.rank_paths import propose, prune_by_threshold


@dataclass
class StreamingDecoder:
    """Decodes greedily.

    Attributes:
        model, streams: What to compute.
        paths: The tree of guesses.
        threshold: Below which a guess is pruned; None computes no early exit.
        forwards: How many there were.
        lengths: Of each layer's cache, after the last one.
        row_counts: Main rows of the upper layers, one number for each forward.
    """

    model: object
    streams: object
    paths: tuple
    threshold: float | None = None

    @torch.no_grad()
    def decode(self, prompt: list[int], *, count: int) -> list[int]:
        """Return at least `count` tokens: whole forwards of them."""
        self.forwards, self.row_counts = 0, []
        self._cache = DynamicCache()
        if len(prompt) > 1:
            self.model.model(torch.tensor([prompt[:-1]]), past_key_values=self._cache)
        root, guesses, made = prompt[-1], [], []
        self._length = len(prompt) - 1  # what the cache holds; the root comes behind it
        while len(made) < count:
            tokens, guesses = self._forward(root, guesses)
            made += tokens
            root = tokens[-1]
        self.lengths = [layer.get_seq_length() for layer in self._cache.layers]
        return made

    def _forward(self, root, guesses):
        proposal = propose(self.paths, guesses)
        ids = [root, *proposal.token_ids]
        parents = [None, *proposal.parents]  # by row; the root is row 0
        sees = self._sees(parents)
        positions = torch.tensor([self._length + len(_way(parents, row)) - 1 for row in _all(ids)])
        layers = self.model.model.layers
        first = len(layers) - self.streams.upper_layers
        hidden = self.model.model.embed_tokens(torch.tensor([ids]))
        hidden = self._through(layers[:first], hidden, positions, sees)
        kept = self._kept(hidden, ids, proposal)
        columns = [*range(self._length), *(self._length + row for row in kept)]
        entering, sees = hidden[:, kept], sees[kept][:, columns]
        hidden = self._through(layers[first:], entering, positions[kept], sees)
        chosen = self._logits(hidden)[0].argmax(-1).tolist()
        way = self._walk(kept, chosen, ids, parents)
        last = kept.index(way[-1])
        upper = self._cache.layers[first:]
        streams = self.streams.stream_rows(
            self.model,
            entering,
            positions=positions[kept],
            keys=[layer.keys for layer in upper],
            values=[layer.values for layer in upper],
            sees=sees,
        )
        guesses = self._logits(streams)[0, last].argsort(-1, descending=True).tolist()
        self._keep(way, kept, first)
        self.forwards += 1
        self.row_counts.append(len(kept))
        return [ids[row] for row in way[1:]] + [chosen[last]], guesses

    def _sees(self, parents):
        sees = torch.zeros(len(parents), self._length + len(parents), dtype=torch.bool)
        sees[:, : self._length] = True
        for row in _all(parents):
            sees[row, [self._length + each for each in _way(parents, row)]] = True
        return sees

    def _through(self, layers, hidden, positions, sees):
        mask = torch.zeros(sees.shape, dtype=hidden.dtype).masked_fill(~sees, -math.inf)
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=mask[None, None],
                position_ids=positions[None],
                position_embeddings=self.model.model.rotary_emb(hidden, positions[None]),
                past_key_values=self._cache,
            )
        return hidden

    def _logits(self, hidden):
        return self.model.lm_head(self.model.model.norm(hidden))

    def _kept(self, hidden, ids, proposal):
        """Return the rows that upper layers compute, the root first."""
        if self.threshold is None:
            return [*_all(ids)]
        early = self._logits(hidden + self.streams.early_exit(hidden))[0].softmax(-1)
        likely = [
            float(early[parent, token])
            for parent, token in zip(proposal.parents, proposal.token_ids, strict=True)
        ]
        nodes = prune_by_threshold(proposal.parents, likely, threshold=self.threshold)
        return [0, *(node + 1 for node in nodes)]

    def _walk(self, kept, chosen, ids, parents):
        """Return the rows whose tokens the main stream chose, the root first."""
        way = [0]
        while True:
            right = chosen[kept.index(way[-1])]
            hits = [row for row in kept if parents[row] == way[-1] and ids[row] == right]
            if not hits:
                return way
            way.append(hits[0])

    def _keep(self, way, kept, first):
        """Cut every layer's keys and values back to the text: its context, and the way."""
        for index, layer in enumerate(self._cache.layers):
            rows = way if index < first else [kept.index(row) for row in way]
            columns = torch.tensor([*range(self._length), *(self._length + row for row in rows)])
            layer.keys = layer.keys.index_select(2, columns)
            layer.values = layer.values.index_select(2, columns)
        self._length += len(way)


def _all(rows):
    return range(len(rows))


def _way(parents, row):
    """Return a row's ancestors and itself, the root first."""
    return [row] if parents[row] is None else [*_way(parents, parents[row]), row]
