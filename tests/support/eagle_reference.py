"""EAGLE-3's head as the paper tells it: row by row, in a loop, with nothing kept in between."""

from __future__ import annotations

import torch


class SlowHead:
    """Guesses after one text, from a head's weights by name."""

    def __init__(self, state, shape, model):
        self._weights = {name: tensor.double() for name, tensor in state.items()}
        self._shape = shape
        self._embedding = model.model.embed_tokens.weight.double()
        self._ids = [index + int(offset) for index, offset in enumerate(state["d2t"])]
        if shape.own_embedding:
            self._embedding = self._weights["embed_tokens.weight"]
        head = model.lm_head.weight.double()[self._ids]
        self._head = self._weights["lm_head.weight"] if shape.own_head else head

    def chain(self, features, tokens, *, steps, choose):
        """Return each step's logits, (V,), with -inf for tokens that it cannot guess.

        Args:
            features: (p + 1, 3 E) of the target's rows 0 .. p.
            tokens: x(0) .. x(p + 1).
            choose: From the step and its logits to the token that the next step reads.
        """
        carried = self._reduce(features.double())
        rows = [self._row(carried[at], tokens[at + 1], at) for at in range(len(features))]
        found = []
        for step in range(steps):
            place, (residual, query, _, _) = len(rows) - 1, rows[-1]
            seen = [
                self._see(query[head], [(key[group], value[group]) for _, _, key, value in rows])
                for head in range(self._shape.heads)
                for group in [head // (self._shape.heads // self._shape.kv_heads)]
            ]
            hidden = residual + self._weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(seen)
            inner = self._norm(hidden, "midlayer.post_attention_layernorm")
            gate, up = (
                self._weights[f"midlayer.mlp.{part}_proj.weight"] @ inner for part in ("gate", "up")
            )
            product = gate * torch.sigmoid(gate) * up
            output = hidden + self._weights["midlayer.mlp.down_proj.weight"] @ product
            normed = self._norm(output, "norm")
            logits = torch.full((len(self._embedding),), -torch.inf, dtype=torch.float64)
            logits[self._ids] = self._head @ normed
            found.append(logits)
            token = choose(step, logits)
            if token is None:
                break
            output = normed if self._shape.norm_output else output
            rows.append(self._row(output, token, place + 1))
        return torch.stack(found)

    def _reduce(self, features):
        if self._shape.feature_norms == "together":
            features = torch.stack([self._norm(row, "input_norm") for row in features])
        if self._shape.feature_norms == "each":
            parts = features.chunk(3, -1)
            features = torch.stack(
                [
                    torch.cat([self._norm(row, f"fc_norm.{at}") for at, row in enumerate(rows)])
                    for rows in zip(*parts, strict=True)
                ]
            )
        return features @ self._weights["fc.weight"].T

    def _row(self, feature, token, position):
        normed = self._norm(feature, "midlayer.hidden_norm")
        embedded = self._norm(self._embedding[token], "midlayer.input_layernorm")
        both = torch.cat((embedded, normed))
        query, key, value = (
            (self._weights[f"midlayer.self_attn.{part}_proj.weight"] @ both).view(
                -1, self._shape.head_width
            )
            for part in "qkv"
        )
        residual = normed if self._shape.norm_before_residual else feature
        return residual, self._turn(query, position), self._turn(key, position), value

    def _see(self, query, pairs):
        scores = torch.stack([query @ key for key, _ in pairs]) * len(query) ** -0.5
        return sum(
            share * value for share, (_, value) in zip(scores.softmax(0), pairs, strict=True)
        )

    def _turn(self, vectors, position):
        half = self._shape.head_width // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = position * self._shape.rope["rope_theta"] ** -exponents
        turned = torch.complex(vectors[:, :half], vectors[:, half:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag), -1)

    def _norm(self, vector, name):
        scale = (vector.square().mean() + self._shape.epsilon) ** -0.5
        return vector * scale * self._weights[f"{name}.weight"]


def slow_tree(rank, *, size, beam, depth):
    """Return a tree of EAGLE-2's, with everything computed again for each guess.

    Args:
        rank: From a path of guesses to the tokens that may follow, each with its probability.
        size: The most guesses.
        beam: How many guesses of a depth are gone on from, and the tokens found after each.
        depth: The most guesses on a path.
    """
    worth = {(): 1.0}
    level = [()]
    for _ in range(depth):
        found = []
        for path in level:
            for token, probability in rank(path)[:beam]:
                worth[*path, token] = worth[path] * min(1.0, probability)
                found.append((*path, token))
        found.sort(key=lambda path: -worth[path])
        level = found[:beam]
    del worth[()]
    best = sorted(worth, key=lambda path: (-worth[path], len(path)))[:size]
    return {path for path in best if worth[path] > 0}
