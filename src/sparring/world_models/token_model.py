"""TokenWorldModel: frames as discrete tokens, predicted at once by an ensemble that shares a memory. Letters: N rows, B
windows of T decisions, V cameras, P patches of all, R registers, W width, K digits of a token with L values each, E
size of a code, M members of the ensemble, S state dims, D memory."""

import math

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.world_models.configs import PRESETS, TokenWorldModelConfig
from sparring.world_models.dynamics import DecisionEncoder, EnsembleMember, Trunk
from sparring.world_models.tokenizers import FSQ, PATCH, SIDE, VQ, ContextTokenizer, FrameTokenizer, merge_cells
from sparring.world_models.world_model import WorldModel

# share of a batch's windows that each member learns from. It is drawn again in each gradient step, unlike in bagging:
# over a run all members learn from all episodes, and differ by their initial weights and these draws
_WINDOWS_OF_MEMBER = 0.75
_PICTURED = 8  # transitions per batch whose frames are decoded: many small steps learn faster than few large ones
# learning rate of the tokenizer relative to the dynamics; weight of the picture loss relative to the token loss
_TOKENIZER_RATE, _PICTURES = 2.0, 10.0
_IMAGES = ("observation", "image"), ("next", "observation", "image")
_NEVER = -1e4  # logit of the values that a digit cannot have


class TokenWorldModel(WorldModel):
    """A tokenizer, which learns first and is then frozen, and dynamics that predict its tokens."""

    def __init__(self, config: TokenWorldModelConfig, spec: EnvSpec, chunk: int):
        super().__init__()
        sizes = {name: getattr(config, name) or size for name, size in PRESETS[config.preset].items()}
        self.config = config.model_copy(update=sizes)
        width, channels, heads = sizes["width"], sizes["channels"], sizes["heads"]
        self.cameras, self.image_size = _cameras(spec)
        if config.camera_dropout:
            self.dispensable = tuple(name for name in self.cameras if name in config.dropped_cameras)
        self.members = sizes["members"]
        patches = len(self.cameras) * self.image_size[0] * self.image_size[1] // PATCH**2
        quantizer = VQ(config.codebook_size) if config.tokenizer == "vq" else FSQ(config.levels)
        tokenizer = ContextTokenizer if config.tokenizer == "context_fsq" else FrameTokenizer
        self.tokenizer = tokenizer(quantizer, channels)
        self.decisions = DecisionEncoder(spec, chunk, width, config.language_features, patches)
        patch_features = SIDE**2 * channels
        self.patches = nn.Sequential(nn.LayerNorm(patch_features), nn.Linear(patch_features, width))
        self.position = nn.Parameter(torch.randn(patches, width) * 0.3)
        self.unseen = nn.Parameter(torch.randn(width) * 0.3)  # the embedding of patches of a masked camera
        self.trunk = Trunk(config, patches, width, heads, sizes["memory_channels"])
        self.memory_size = self.trunk.memory_size
        outputs = quantizer.digits * quantizer.values
        others = self.decisions.state_size + 3
        shape = (patches, width, sizes["layers"], heads, outputs, others)
        self.ensemble = nn.ModuleList(EnsembleMember(*shape) for _ in range(self.members))
        self.rewards = RunningNormalizer(1, clip=math.inf)  # not clipped: rare rewards are outliers
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @property
    def ready(self) -> bool:
        return int(self.steps) >= self.config.tokenizer_steps

    @property
    def preparing(self) -> str | None:
        return None if self.ready else f"tokenizer {100 * int(self.steps) // self.config.tokenizer_steps} % trained"

    def settle(self) -> None:
        self.steps.clamp_(min=self.config.tokenizer_steps)

    def learning(self) -> list[nn.Parameter]:
        of_tokens = {id(parameter) for parameter in self.tokenizer.parameters()}
        return [p for p in self.parameters() if p.requires_grad and (id(p) in of_tokens) != self.ready]

    def learning_rate_scale(self) -> float:
        if self.ready:
            return 1.0
        return _TOKENIZER_RATE * max(1 - int(self.steps) / self.config.tokenizer_steps, 0.05)

    def loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        self.tokenizer.requires_grad_(not self.ready)
        with self._autocast():
            loss, metrics = self._dynamics_loss(batch) if self.ready else self._tokenizer_loss(batch)
        if self.training:
            self.steps.add_(1)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _tokenizer_loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        batch["memory_after"] = self.empty_memory(batch.numel()).unflatten(0, batch.batch_size)
        some = batch.select(*_IMAGES)[_some_of(batch["mask"])]
        (now, seen), (following, seen_after) = (self._features(some[key]) for key in _IMAGES)
        parts = (part.flatten(0, 1) for part in (now, seen, following, seen_after))
        picture_loss, quantizer_loss = self.tokenizer.loss(*parts)
        return picture_loss + quantizer_loss, {"loss_tokenizer": picture_loss}

    def _dynamics_loss(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch["mask"]
        with torch.no_grad():
            images, last = batch["observation", "image"], batch["next", "observation", "image"][:, -1:]
            # with the frame after the last decision: [B, T+1, V, 3, H, W] in 0..1 -> [B, T+1, V, h, w, c]
            frames = torch.stack([torch.cat([images[name], last[name]], 1) for name in self.cameras], 2).float() / 255
            features = self.tokenizer.stem(frames.flatten(0, 2)).unflatten(0, frames.shape[:3])
            digits = self._digits(features[:, :-1].flatten(0, 2), features[:, 1:].flatten(0, 2))
            digits = digits.unflatten(0, mask.shape)
        tokens, memories = self._through_time(batch, features[:, :-1])
        batch["memory_after"] = memories.detach()
        first = int(mask.any(0).nonzero()[0])  # earlier columns only update the memory; they are not predicted
        batch, mask, digits, tokens = (each[:, first:] for each in (batch, mask, digits, tokens))  # type: ignore[assignment]
        frames, features = frames[:, first:], features[:, first:]
        logits, others = self._predictions(tokens)  # [M, B, T, P, K, L] and [M, B, T, S + 3]
        weight = mask[None].float()  # [M, B, T]
        if self.members > 1:  # each member learns from random windows of this batch
            weight = ((torch.rand(self.members, len(mask), 1, device=mask.device) < _WINDOWS_OF_MEMBER) & mask).float()
        true = digits.expand(logits.shape[:-1])[..., None]
        cross_entropy = (logits.logsumexp(-1) - logits.gather(-1, true)[..., 0]).sum(-1)  # nats, [M, B, T, P]
        losses = {"tokens": cross_entropy.mean(-1)} | self._other_losses(batch, others)
        parts = {f"loss_{name}": _mean(value, weight) for name, value in losses.items()}
        parts["loss_pictures"] = _PICTURES * self._picture_loss(frames, features, logits, _some_of(mask))
        with torch.no_grad():
            accuracies = self._accuracies(logits, digits, features, mask)
        return sum(parts.values()), parts | accuracies  # type: ignore[return-value]

    def _picture_loss(self, frames: Tensor, features: Tensor, logits: Tensor, some: tuple[Tensor, Tensor]) -> Tensor:
        """Loss of the decoded predictions for some transitions, each from a random member."""
        rows, columns = some
        member = torch.randint(self.members, rows.shape, device=rows.device)
        codes = self.tokenizer.quantizer.expected(logits[member, rows, columns].softmax(-1))
        codes = codes.unflatten(1, (len(self.cameras), -1)).flatten(0, 1)
        now, following = frames[rows, columns].flatten(0, 1), frames[rows, columns + 1].flatten(0, 1)
        predicted = self.tokenizer.decode(now, features[rows, columns].flatten(0, 1), codes)
        return self.tokenizer.picture_loss(predicted, now, following)

    def update_normalizers(self, batch: TensorDict, sum_over_processes) -> None:
        seen = batch["mask"]
        if self.decisions.state_size:
            self.decisions.normalizer.update(batch["observation", "state"][seen].flatten(1), sum_over_processes)
        self.rewards.update(batch["next", "reward"][seen].sum(-1, keepdim=True), sum_over_processes)

    @torch.no_grad()
    def observe(self, td: TensorDict, without: tuple[str, ...] = ()) -> Tensor:
        with self._autocast():
            return self._step(td, self._features(td["observation", "image"])[1], without)[1]

    @torch.no_grad()
    def predict(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        with self._autocast():
            frames, features = self._features(td["observation", "image"])
            tokens, memory = self._step(td, features, without)
            logits, others = self._predictions(tokens)
            codes = self.tokenizer.quantizer.expected(logits.softmax(-1).mean(0))
            images = self._decoded(frames, features, codes)
        others = others.mean(0)
        following = {"image": images, "memory": memory, "reward": self.rewards.inverse(others[:, -3:-2])[:, 0]}
        following |= {"terminated": others[:, -2].sigmoid(), "success": others[:, -1].sigmoid()}
        if self.decisions.state_size:
            state = td["observation", "state"]
            following["state"] = state + (others[:, :-3] / self.decisions.normalizer.scale).view_as(state)
        return TensorDict(following, td.batch_size)

    @torch.no_grad()
    def score(self, td: TensorDict, without: tuple[str, ...] = ()) -> TensorDict:
        with self._autocast():
            _, features, digits = self._transitions(td)
            tokens, memory = self._step(td, features, without)
            logs = self._predictions(tokens)[0].log_softmax(-1)
        mean = logs.exp().mean(0)
        entropy, own = _entropy(mean).sum(-1), _entropy(logs.exp()).sum(-1).mean(0)
        error = -mean.gather(-1, digits[..., None])[..., 0].clamp_min(1e-9).log().sum(-1)
        right = (mean.argmax(-1) == digits).all(-1).float()
        scores = {"error": error, "entropy": entropy, "disagreement": entropy - own, "accuracy": right}
        scores["surprise"] = error - own  # the encoder is deterministic: its KL to the prediction is the error
        return TensorDict({name: value.mean(-1) for name, value in scores.items()} | {"memory": memory}, td.batch_size)

    @torch.no_grad()
    def correct_tokens(self, td: TensorDict) -> TensorDict:
        with self._autocast():
            _, features, digits = self._transitions(td)
            copied = self._digits(features.flatten(0, 1), features.flatten(0, 1))
            logits = self._predictions(self._step(td, features, ())[0])[0]
        predicted = logits.softmax(-1).mean(0).argmax(-1)
        return TensorDict({"right": (predicted == digits).all(-1), "copied": (copied == digits).all(-1)}, td.batch_size)

    @torch.no_grad()
    def reconstruct(self, td: TensorDict) -> TensorDict:
        with self._autocast():
            frames, features, digits = self._transitions(td)
            images = self._decoded(frames, features, self.tokenizer.quantizer.codes(digits))
        return TensorDict({"image": images}, td.batch_size)

    def _transitions(self, td: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """Frames and features before the transitions `td [N]`, and the digits [N, P, K] of the true next frames."""
        frames, features = self._features(td["observation", "image"])
        following = self._features(td["next", "observation", "image"])[1]
        return frames, features, self._digits(features.flatten(0, 1), following.flatten(0, 1))

    def _features(self, images: TensorDict) -> tuple[Tensor, Tensor]:
        """Frames [N, V, 3, H, W] in 0..1 and their features [N, V, h, w, c]."""
        frames = torch.stack([images[name] for name in self.cameras], 1).float() / 255
        return frames, self.tokenizer.stem(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])

    def _digits(self, before: Tensor, after: Tensor) -> Tensor:
        """Features of frames [N * V, h, w, c] -> digits [N, P, K]."""
        with torch.no_grad():
            digits = self.tokenizer.encode(before, after)
        return digits.unflatten(0, (-1, len(self.cameras))).flatten(1, 2)

    def _seen(self, features: Tensor, masked: Tensor) -> Tensor:
        """Features [N, V, h, w, c] and masked cameras [N, V] -> patch embeddings [N, P, W]."""
        patches = self.patches(merge_cells(features.flatten(0, 1)).unflatten(0, features.shape[:2]))
        patches = torch.where(masked[:, :, None, None], self.unseen.to(patches.dtype), patches)
        return patches.flatten(1, 2) + self.position

    def _step(self, td: TensorDict, features: Tensor, without: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Tokens [N, 1+P+R, W] to predict from, and the memory [N, D] after."""
        masked = torch.tensor([name in without for name in self.cameras], device=features.device)
        patches = self._seen(features, masked.expand(len(features), -1))
        return self.trunk(patches, self.decisions(td), self._entered(td))

    def _entered(self, td: TensorDict) -> Tensor:
        memory = td.get(("memory", "world_model"), None)
        memory = self.empty_memory(len(td)) if memory is None or not self.config.remembers else memory
        is_first = td.get("is_first", None)
        return memory if is_first is None else torch.where(is_first[:, None], 0.0, memory)

    def _through_time(self, batch: TensorDict, features: Tensor) -> tuple[Tensor, Tensor]:
        """Windows: tokens [B, T, 1+P+R, W], and the memory [B, T, D] after each step."""
        rows, steps = batch.batch_size
        dropped = torch.tensor([name in self.dispensable for name in self.cameras], device=features.device)
        chosen = torch.rand(rows, 1, device=features.device) < self.config.camera_dropout
        masked = (chosen & dropped)[:, None].expand(-1, steps, -1).flatten(0, 1)
        patches = self._seen(features.flatten(0, 1), masked).unflatten(0, (rows, steps))
        decisions = self.decisions(batch.flatten()).unflatten(0, (rows, steps))
        memory, tokens, memories = self._entered(batch[:, 0]), [], []
        for t in range(steps):
            is_empty = batch["is_first"][:, t, None] | (not self.config.remembers)
            memory = torch.where(is_empty, 0.0, memory)
            token, memory = self.trunk(patches[:, t], decisions[:, t], memory)
            tokens.append(token)
            memories.append(memory)
        return torch.stack(tokens, 1), torch.stack(memories, 1)

    def _predictions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[.., 1+P+R, W] -> token logits [M, .., P, K, L] and other predictions [M, .., S + 3] of all members."""
        rows, quantizer = tokens.shape[:-2], self.tokenizer.quantizer
        outputs = [member(tokens.flatten(0, -3)) for member in self.ensemble]
        logits = torch.stack([of_tokens for of_tokens, _ in outputs]).float()
        logits = logits.unflatten(-1, (quantizer.digits, -1)).masked_fill(~quantizer.valid, _NEVER)
        others = torch.stack([other for _, other in outputs]).float()
        return logits.unflatten(1, rows), others.unflatten(1, rows)

    def _decoded(self, frames: Tensor, features: Tensor, codes: Tensor) -> TensorDict:
        """Decode codes [N, P, E] with frames [N, V, 3, H, W] -> image/<camera> uint8."""
        codes = codes.unflatten(1, (len(self.cameras), -1)).flatten(0, 1)
        images = self.tokenizer.decode(frames.flatten(0, 1), features.flatten(0, 1), codes.to(features.dtype)).float()
        images = (images * 255).round().clamp(0, 255).to(torch.uint8).unflatten(0, frames.shape[:2])
        return TensorDict(dict(zip(self.cameras, images.unbind(1), strict=True)), [len(frames)])

    def _other_losses(self, batch: TensorDict, others: Tensor) -> dict[str, Tensor]:
        """Losses of reward, flags and state, [M, B, T] each."""
        following = batch["next"]
        reward = self.rewards(following["reward"].sum(-1, keepdim=True))[..., 0]
        losses = {"reward": (others[..., -3] - reward).square()}
        for place, name in ((-2, "terminated"), (-1, "success")):
            truth = following[name].float().expand(others.shape[:-1])
            losses[name] = functional.binary_cross_entropy_with_logits(others[..., place], truth, reduction="none")
        if self.decisions.state_size:
            change = following["observation", "state"] - batch["observation", "state"]
            change = change.flatten(2) * self.decisions.normalizer.scale
            losses["state"] = (others[..., :-3] - change).square().mean(-1)
        return losses

    def _accuracies(self, logits: Tensor, digits: Tensor, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Token accuracies of one random column of the windows."""
        usable = mask.any(0).nonzero()[:, 0]
        column = int(usable[torch.randint(len(usable), ())])
        counted = mask[:, column]
        predicted, truth = logits[:, :, column].softmax(-1).mean(0).argmax(-1), digits[:, column]
        still = features[:, column].flatten(0, 1)
        right, copied = (predicted == truth).all(-1), (self._digits(still, still) == truth).all(-1)
        kinds = {"accuracy": right, "accuracy_copy": copied}
        means = {name: _mean(which.float().mean(-1), counted) for name, which in kinds.items()}
        return means | {"accuracy_changed": _mean(right.float(), counted[:, None] & ~copied)}

    def _autocast(self):
        device = self.position.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bf16")


def _some_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    usable = mask.nonzero()
    return usable[torch.randperm(len(usable), device=mask.device)[:_PICTURED]].unbind(1)  # type: ignore[return-value]


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum() / weight.expand(values.shape).sum().clamp_min(1)


def _cameras(spec: EnvSpec) -> tuple[tuple[str, ...], tuple[int, ...]]:
    shapes = {n.removeprefix("image/"): s for n, (s, _) in spec.observation.items() if n.startswith("image/")}
    if not shapes:
        advice = "it must observe image/<name> (env.name=tabletop: env.cameras=[head,wrist])"
        raise UserError(f"a world model predicts camera images and this env has none; {advice}")
    sizes = {shape[1:] for shape in shapes.values()}
    if len(sizes) > 1:
        raise UserError(f"the world model needs cameras of one size, this env has {sorted(sizes)}; use one size")
    size = sizes.pop()
    if size[0] % PATCH or size[1] % PATCH:
        advice = f"set env.image_size to a multiple of {PATCH}"
        raise UserError(f"images of {size[0]}x{size[1]} pixels cannot be cut into patches of {PATCH}; {advice}")
    return tuple(shapes), size
