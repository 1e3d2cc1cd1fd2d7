"""NativeVLA: the native vision-language-action model as a policy."""

import math
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from sparring.contract import POLICY_MEMORY, EnvSpec, entry_of, images_of
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.configs import DenoisingConfig
from sparring.policies.critic import Critic
from sparring.policies.encoders import STATE
from sparring.policies.flow.chain import FlowChain
from sparring.policies.instructions import BYTES, ByteTokenizer, Instructions
from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import SavedModel, read_model
from sparring.policies.native.config import NativeVLAConfig, Sizes
from sparring.policies.native.hopper.forward import Cache
from sparring.policies.native.hopper.graphs import ActingGraphs
from sparring.policies.native.model import Inputs, NativeModel, Prefix
from sparring.policies.pi0 import ImagePreparation
from sparring.policies.weights import load_strictly

_GRID = 4  # the memory reads each image averaged over a grid of _GRID x _GRID cells


class NativeVLA(FlowChain):
    """The network is `model`. The critic reads its features of images and text, and the memory, without gradients."""

    config: NativeVLAConfig

    def __init__(self, config: NativeVLAConfig, spec: EnvSpec, chunk: int):
        saved = None if config.model_path is None else read_model(config.model_path)
        sizes = config.sizes(saved.sizes if saved else None)
        # settings that are null come from the checkpoint, or else from the defaults
        default = DenoisingConfig.model_fields["sampling_steps"].default
        horizon = config.horizon or (saved.horizon if saved else None)
        steps = config.sampling_steps or (saved.sampling_steps if saved else None) or default
        config = config.model_copy(update={"horizon": horizon, "sampling_steps": steps})
        super().__init__(config, spec, chunk, sizes.width, config.normalize_actions)
        if self.action_dim > sizes.max_action_dim:
            limit, advice = sizes.max_action_dim, _advice_for_size(config, "max_action_dim", self.action_dim)
            raise UserError(f"env actions have {self.action_dim} numbers, but policy.max_action_dim={limit}; {advice}")
        self.encoder = _NativeInputs(config, spec, sizes, saved)
        self.model = NativeModel(sizes)
        if saved is not None:
            load_strictly(self.model, saved.weights, f"policy.model_path={config.model_path}", new=("memory_in.",))
        adapt(self.model, config, frozen=config.frozen)
        unused = _unused_parts(sizes.layers - 1, bool(self.encoder.cameras), self.kernel.learns_noise)
        for name, weight in self.model.named_parameters():
            if name.startswith(unused):
                # they are in no loss: only weight decay would change them, and with them the critic's features
                weight.requires_grad_(False)
            if config.precision == "bf16":
                # frozen weights are used in bf16 anyway; weights that learn need the precision of fp32
                weight.data = weight.data.to(torch.float32 if weight.requires_grad else torch.bfloat16)
        self.memory_size = sizes.memory_size
        self.critic = Critic(config, spec, sizes.width + self.memory_size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys, *self.trace_keys]
        self._graphs: ActingGraphs | None = None
        self._learned = False  # whether the weights may have changed since the graphs were last refreshed

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        """Add actions that are not clipped (the env clips them) and carry no autograd graph."""
        graphs = self._acting_graphs(len(td))
        if graphs is None:
            return super().act(td)
        if td.get("noise", None) is None:
            return td.set("action", self._action_of(graphs.sample(self.encoder(td), self._start(td))))
        # `velocity` uses the last prefix, which the graphs keep
        encode, denoise = lambda td: _packed(graphs.prefix(self.encoder(td)), td), lambda x, t, _: graphs.velocity(x, t)
        return self._act_with(encode, denoise, td)

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        inputs = self.encoder(td)
        self._learned |= torch.is_grad_enabled()  # gradients are computed for an update of the weights
        with self._precision():
            return _packed(self.model.prefix(inputs), td)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        with self._precision():
            return self.model.velocity(x, t, Prefix(*(prefix[name] for name in Prefix._fields)))

    def value_of(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        features, memory = features.detach(), self.encoder.memory(td)
        return self.critic(features if memory is None else torch.cat([features, memory], -1), td)

    def value(self, td: TensorDict) -> torch.Tensor:
        with torch.no_grad(), self._precision():  # the critic's loss does not train the network
            features = self.model.features(self.encoder(td))
        return self.value_of(features, td)

    def remember(self, td: TensorDict) -> torch.Tensor:
        return self.encoder.remember(td)

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"observation/state": self.encoder.normalizer}

    def _acting_graphs(self, robots: int) -> ActingGraphs | None:
        """Graphs with the current weights; None if policy.fast is off, or there are graphs for too many batch sizes."""
        device, half = self.times.device, self.config.precision == "bf16"
        fast = half and device.type == "cuda" if self.config.fast is None else self.config.fast
        if self.training or not fast:
            return None
        if device.type != "cuda":
            raise UserError(f"policy.fast=true needs a GPU, but the policy is on {device}; remove the setting")
        if self._graphs is None or not self._graphs.is_valid():
            room = self.horizon + 2  # tokens of a denoising step: the chunk, state and memory
            self._graphs = ActingGraphs(self.model, self.sampling_steps, half, kernels=half, room=room)
            self._learned = False
        if not self._graphs.supports(robots):
            return None
        self._graphs.refresh(self._learned)
        self._learned = False
        return self._graphs


def _packed(prefix: Prefix | Cache, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
    """The features of decisions `td`, and the prefix as a TensorDict with one row per decision."""
    assert prefix.features is not None
    return prefix.features, TensorDict(prefix._asdict(), td.batch_size, device=prefix.mask.device)


class _NativeInputs(nn.Module):
    """Maps observations to the network's inputs: scaled images, tokens of the instruction, state and memory."""

    def __init__(self, config: NativeVLAConfig, spec: EnvSpec, sizes: Sizes, saved: SavedModel | None):
        super().__init__()
        self.spec, entries = spec, spec.observation
        self.cameras = [name for name in entries if name.startswith("image/")]
        self.image_size, self.memory_size = sizes.image_size, sizes.memory_size
        self.prepare: ImagePreparation | None = None  # for a pi0 checkpoint: its own image processing
        if saved is not None and saved.is_pi0:
            assert config.model_path is not None
            self.prepare = ImagePreparation(Path(config.model_path).expanduser(), sizes.image_size)
        state_size = math.prod(entries["state"][0]) if "state" in entries else 0
        if state_size > sizes.max_state_dim:
            limit, advice = sizes.max_state_dim, _advice_for_size(config, "max_state_dim", state_size)
            raise UserError(f"the env's state has {state_size} numbers, but policy.max_state_dim={limit}; {advice}")
        self.has_state = state_size > 0
        self.normalizer = RunningNormalizer(state_size) if state_size and config.normalize_observations else None
        self.instructions = _instructions(config, spec, sizes.vocabulary, saved)
        others = ((STATE, self.has_state), (POLICY_MEMORY, self.memory_size))
        self.in_keys = [("observation", *name.split("/")) for name in self.cameras]
        self.in_keys += [*self.instructions.in_keys, *(key for key, is_read in others if is_read)]
        observed = state_size + 3 * _GRID**2 * len(self.cameras)
        self.traces = _MemoryTraces(observed, self.memory_size) if self.memory_size else None

    def forward(self, td: TensorDict) -> Inputs:
        batch, device = len(td), self.instructions.ids.device
        state = self._state(td) if self.has_state else torch.zeros(batch, 1, device=device)
        views = [(self.prepare or self._scaled)(view) for view in images_of(td, self.spec, self.cameras)]
        images = torch.stack(views, 1) if views else torch.zeros(batch, 0, 3, 1, 1, device=device)  # [B, N, 3, S, S]
        tokens, text = self.instructions(td)
        return Inputs(images, tokens, text, state, self.memory(td))

    def memory(self, td: TensorDict) -> torch.Tensor | None:
        """The memory of the decisions [B, M]; if `td` has none, zeros, as at the start of an episode."""
        if not self.memory_size:
            return None
        memory = td.get(POLICY_MEMORY, None)
        return torch.zeros(len(td), self.memory_size, device=self.instructions.ids.device) if memory is None else memory

    def remember(self, td: TensorDict) -> torch.Tensor:
        observed = [self._state(td)] if self.has_state else []
        # [B, 3, h, w] -> [B, 3 * G * G] in [-1, 1]
        views = images_of(td, self.spec, self.cameras)
        observed += [F.adaptive_avg_pool2d(view.float(), _GRID).flatten(1) / 127.5 - 1.0 for view in views]
        memory = self.memory(td)
        assert memory is not None and self.traces is not None
        return self.traces(memory, torch.cat([memory[:, :0], *observed], 1))

    def _state(self, td: TensorDict) -> torch.Tensor:
        state = entry_of(td, self.spec, "state")
        return state if self.normalizer is None else self.normalizer(state)

    def _scaled(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3, h, w] -> [B, 3, S, S] in [-1, 1]
        images, size = images.float(), (self.image_size, self.image_size)
        if images.shape[2:] != size:
            shrinks = min(images.shape[2:]) > self.image_size
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=shrinks)
        return images / 127.5 - 1.0


def _instructions(config: NativeVLAConfig, spec: EnvSpec, vocabulary: int, saved: SavedModel | None) -> Instructions:
    """Tokens by policy.tokenizer, or by the checkpoint's tokenizer; one token per byte if there is neither."""
    key, folder = "policy.tokenizer", config.tokenizer
    if folder is None and saved is not None and saved.needs_tokenizer:
        key, folder = "policy.model_path", config.model_path
    # 256 bytes, a begin token and an unused one
    tokenizer = ByteTokenizer(begin=256, vocabulary=258) if folder in (None, BYTES) else _FileTokenizer(folder, key)

    def tokens_of(text: str) -> list[int]:
        row = tokenizer(text) or [0]
        if len(row) > config.text_tokens:
            why = f"but policy.text_tokens={config.text_tokens}; increase it, or shorten the instruction"
            raise UserError(f"the instruction {text[:40]!r}... has {len(row)} tokens, {why}")
        if max(row) >= vocabulary:
            has = f"the model has {vocabulary} embeddings; set policy.vocabulary={tokenizer.vocabulary}"
            given = f"the tokenizer returns token {max(row)} for {text[:40]!r}"
            raise UserError(f"{given}, but {has}, or use the tokenizer of the pretrained weights")
        return row

    return Instructions(spec, tokens_of, config.text_tokens if "instruction" in spec.observation else None)


def _advice_for_size(config: NativeVLAConfig, name: str, size: int) -> str:
    if config.model_path is None:
        return f"set policy.{name}={size}"
    return f"the weights in policy.model_path={config.model_path} fix this size: use other weights, or a smaller env"


def _unused_parts(last: int, has_images: bool, features_learn: bool) -> tuple[str, ...]:
    """Parts that no action depends on: only keys, values and features of the trunk's last layer are used."""
    parts = () if has_images else ("vision.", "projector.")
    if features_learn:
        return parts
    return (*parts, "trunk_norm.", *(f"trunk.{last}.{part}." for part in ("out", "mlp_norm", "gate_up", "down")))


class _MemoryTraces(nn.Module):
    """A memory without weights: running means of observations over short and long spans of an episode.

    It is fixed, because a decision is scored from its own row and no gradient reaches earlier decisions. Entry 0 is a
    clock, t / (t + 1) at decision t. Every other entry averages a random projection of the observations: the plain mean
    until the episode is longer than its span, then an exponential average.
    Letters: B decisions, M size of the memory, D size of the observations."""

    longest_span = 100  # decisions over which the slowest trace averages; the fastest holds only the last decision

    def __init__(self, inputs: int, size: int):
        super().__init__()
        # [M - 1, D] unit vectors with a fixed seed, so that trained weights can be loaded into another policy
        directions = np.random.default_rng(0).standard_normal((size - 1, inputs))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        self.directions = nn.Buffer(torch.from_numpy(directions).float(), persistent=False)
        rates = 1 / np.geomspace(self.longest_span, 1, size - 1)
        self.rates = nn.Buffer(torch.from_numpy(rates).float(), persistent=False)

    @torch.no_grad()
    def forward(self, memory: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
        """The memory [B, M] and the observations [B, D] of a decision -> the memory of the next decision [B, M]."""
        clock, traces = memory[:, :1], memory[:, 1:]
        rates = torch.maximum(1 - clock, self.rates)  # 1 - clock = 1 / (t + 1): the newest one's share of a plain mean
        return torch.cat([1 / (2 - clock), traces.lerp(observed @ self.directions.T, rates)], 1)


class _FileTokenizer:
    """Reads a `tokenizer.json`; returns the tokens of pi0's prompt: <bos>, the instruction, a line break."""

    def __init__(self, folder: str, key: str):
        file = Path(folder).expanduser()
        file = file if file.name == "tokenizer.json" else file / "tokenizer.json"
        if not file.is_file():
            advice = "set policy.tokenizer to a folder with a tokenizer.json (PaliGemma's for pi0)"
            own = f"to {BYTES} for one token per byte (not for pretrained models)"
            raise UserError(f"{key}={folder}: {file} does not exist; {advice}, or {own}")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            advice = f'pip install "sparring[vla]", or set policy.tokenizer={BYTES}'
            raise UserError(f"{file} needs the package tokenizers, which is not installed; {advice}") from error
        try:
            self._library = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"'{file}' cannot be read as a tokenizer ({error}); download it again") from error
        begin = self._library.token_to_id("<bos>")
        self._begin = [] if begin is None else [begin]
        self.vocabulary = self._library.get_vocab_size()

    def __call__(self, text: str) -> list[int]:
        return [*self._begin, *self._library.encode(f"{text}\n", add_special_tokens=False).ids]
