"""Tiny checkpoints with a module that predicts further tokens, in the layouts that people publish.

Beside them stand two references: the module of Qwen3.5 written out from its weights by name, and
the library's own module for the other families. Both compute all rows anew for each guess.
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from support.families import build_family

LAYERS = 2
APART = {
    "fc": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}
BEHIND = {
    "fc": f"model.layers.{LAYERS}.eh_proj",
    "embedding": f"model.layers.{LAYERS}.enorm",
    "hidden": f"model.layers.{LAYERS}.hnorm",
    "norm": f"model.layers.{LAYERS}.shared_head.norm",
    "layer": f"model.layers.{LAYERS}",
}
LAYOUTS = {
    "qwen3.5": APART,
    "qwen3.5-moe": APART,
    "qwen3-next": APART,
    "glm4-moe": BEHIND,
    "deepseek-v3": BEHIND,
}


def build_with_module(family, directory, *, seed=7):
    """Write a model of a family with a module; return its directory."""
    build_family(family, directory)
    names = LAYOUTS[family]
    generator = torch.Generator().manual_seed(seed)

    def drawn(like, std):
        return torch.empty(like).normal_(std=std, generator=generator)

    def add(weights):
        width = weights["model.embed_tokens.weight"].shape[1]
        last = f"model.layers.{LAYERS - 1}."
        for name in [each for each in weights if each.startswith(last)]:
            own = name.replace(last, f"{names['layer']}.")
            centre = 1.0 if "norm" in name and names is BEHIND else 0.0
            weights[own] = drawn(weights[name].shape, 0.3) + centre
        for each in ("embedding", "hidden", "norm"):
            weights[f"{names[each]}.weight"] = drawn((width,), 0.3) + (names is BEHIND)
        weights[f"{names['fc']}.weight"] = drawn((width, 2 * width), 0.3)
        if names is BEHIND:  # copies of the model's, as published
            weights[f"{names['layer']}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
            weights[f"{names['layer']}.shared_head.head.weight"] = weights["lm_head.weight"]

    change_weights(directory, add)
    if names is APART:
        change_config(directory, mtp_num_hidden_layers=1)
    return directory


def let_it_guess_well(family, directory, *, depends=0.01):
    """Let most of a module's guesses be right: what the model says depends little on the past.

    Args:
        depends: How much of what the model's layers add remains; the module's add nothing.
    """
    names = LAYOUTS[family]

    def change(weights):
        for name, each in weights.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                each *= 0.0 if name.startswith(names["layer"]) else depends
        fc = weights[f"{names['fc']}.weight"]
        fc.copy_(torch.eye(len(fc), 2 * len(fc)))
        weights[f"{names['embedding']}.weight"].fill_(float(names is BEHIND))
        weights[f"{names['norm']}.weight"].copy_(weights["model.norm.weight"])

    change_weights(directory, change)


def change_weights(directory, change):
    """Let a function change a checkpoint's weights by name."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: each.clone() for name, each in weights.items()}, path, {"format": "pt"})


def change_config(directory, **settings):
    """Say something else in a checkpoint's config.json; None: say nothing."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    kept = {key: each for key, each in config.items() if each is not None}
    path.write_text(json.dumps(kept))


def module_reference(family, directory):
    """Return a function from a text with its next token to the logits of each guess.

    Its arguments are the text's tokens, the next one included, and what chooses the token of each
    guess: from its number and its logits.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    if family == "qwen3.5":
        compute = SlowModule(load_file(directory / "model.safetensors"), model.config)
    else:
        compute = _library_module(family, model)

    @torch.no_grad()
    def guess(tokens, *, steps, choose):
        features = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        following = list(tokens[1:])
        for step in range(steps):
            output = compute(features, following)[-1]
            token = choose(step, model.lm_head(output))
            features = torch.cat((features, output[None]))
            following.append(token)

    return guess


def _library_module(family, model):
    """Return the library's own computation of all rows."""
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    own = r"^mtp\." if LAYOUTS[family] is APART else rf"^model\.layers\.{LAYERS}\."
    model._keys_to_ignore_on_load_unexpected = [own]
    module = MtpModel.from_pretrained(model).double().eval()

    def compute(features, following):
        positions = torch.arange(1, 1 + len(following))[None]
        ids = torch.tensor([following])
        return module.forward_layer(0, features[None], positions, MtpCache(), input_ids=ids)[0]

    return compute


class SlowModule:
    """Qwen3.5's module, from its weights by name: a head after the other, a row after the other."""

    def __init__(self, weights, config):
        self._weights = {name: each.double() for name, each in weights.items()}
        self._config = config

    def __call__(self, features, following):
        """Return the output of each row after the norm: (rows, E)."""
        own, width = self._weight, self._config.head_dim
        table = own("model.embed_tokens")
        begun = [
            own("mtp.fc")
            @ torch.cat(
                (
                    self._norm(table[token], "mtp.pre_fc_norm_embedding"),
                    self._norm(feature, "mtp.pre_fc_norm_hidden"),
                )
            )
            for token, feature in zip(following, features, strict=True)
        ]
        part = "mtp.layers.0.self_attn."
        keys, values, found = [], [], []
        for position, residual in enumerate(begun):
            entering = self._norm(residual, "mtp.layers.0.input_layernorm")
            asked = (own(f"{part}q_proj") @ entering).view(-1, 2 * width)
            key = (own(f"{part}k_proj") @ entering).view(-1, width)
            keys.append([self._turn(self._norm(it, f"{part}k_norm"), position) for it in key])
            values.append((own(f"{part}v_proj") @ entering).view(-1, width))
            seen = []
            for head, both in enumerate(asked):
                query = self._turn(self._norm(both[:width], f"{part}q_norm"), position)
                group = head * len(key) // len(asked)
                scores = torch.stack([query @ each[group] for each in keys]) / width**0.5
                shares = scores.softmax(0)
                mixed = sum(s * each[group] for s, each in zip(shares, values, strict=True))
                seen.append(mixed * torch.sigmoid(both[width:]))
            hidden = residual + own(f"{part}o_proj") @ torch.cat(seen)
            inner = self._norm(hidden, "mtp.layers.0.post_attention_layernorm")
            gate = own("mtp.layers.0.mlp.gate_proj") @ inner
            product = gate * torch.sigmoid(gate) * (own("mtp.layers.0.mlp.up_proj") @ inner)
            found.append(
                self._norm(hidden + own("mtp.layers.0.mlp.down_proj") @ product, "mtp.norm")
            )
        return torch.stack(found)

    def _weight(self, name):
        return self._weights[f"{name}.weight"]

    def _norm(self, vector, name):
        scale = (vector.square().mean() + self._config.rms_norm_eps) ** -0.5
        return vector * scale * (1 + self._weight(name))

    def _turn(self, vector, position):
        rope = self._config.rope_parameters
        count = int(len(vector) * rope.get("partial_rotary_factor", 1.0))
        half = count // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = position * rope["rope_theta"] ** -exponents
        turned = torch.complex(vector[:half], vector[half:count]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat((turned.real, turned.imag, vector[count:]))
