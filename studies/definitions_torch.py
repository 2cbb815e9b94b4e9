"""Definitions in plain PyTorch, and of graphs: each after a publication."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from studies.definitions import Example, Registry, library, registering

DEFINITIONS: Registry = {}
define = registering(DEFINITIONS, "torch")
define_graph = registering(DEFINITIONS, "torch_geometric")

WORDS, WIDTH, TAGS = 300, 64, 12


def example(model: nn.Module, *args: Any, **kwargs: Any) -> Example:
    return Example(model=model.train(), args=args, kwargs=kwargs)


def words(batch: int = 16, length: int = 32) -> Tensor:
    return torch.randint(1, WORDS, (batch, length))


# --- recurrent ---------------------------------------------------------------------


def feed_forward() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)
    )


class LstmTagger(nn.Module):
    """Tags of words by a network of both directions (Huang et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.before = nn.ModuleList(feed_forward() for _ in range(3))
        self.lstm = nn.LSTM(WIDTH, 32, bidirectional=True, batch_first=True)
        self.after = nn.ModuleList(feed_forward() for _ in range(3))
        self.tags = nn.Linear(WIDTH, TAGS)

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.before:
            x = x + block(x)
        return x

    def decode(self, x: Tensor, tags: Tensor) -> Tensor:
        for block in self.after:
            x = x + block(x)
        return functional.cross_entropy(self.tags(x).flatten(0, 1), tags.flatten())

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        found, _ = self.recurrent(self.encode(ids))
        return self.decode(found, tags)

    def recurrent(self, embedded: Tensor) -> Any:
        return self.lstm(embedded)


@define("Huang et al. 2015; nn.LSTM of both directions, labels")
def lstm_tagger() -> Example:
    return example(LstmTagger(), words(), torch.randint(0, TAGS, (16, 32)))


class PackedGru(nn.Module):
    """Classes of sequences of unequal length (Cho et al. 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 5))

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.head(self.states(self.embed(ids), lengths)), labels
        )

    def states(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            embedded, lengths, batch_first=True, enforce_sorted=False
        )
        found, _ = self.gru(packed)
        padded, _ = pad_packed_sequence(found, batch_first=True)
        return padded.mean(1)


@define("Cho et al. 2014; nn.GRU on packed sequences")
def packed_gru() -> Example:
    lengths = torch.randint(4, 33, (16,))
    return example(PackedGru(), words(), lengths, torch.randint(0, 5, (16,)))


class CellLoop(nn.Module):
    """A language model by a cell in a loop (Hochreiter and Schmidhuber 1997)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        found = []
        for step in self.embed(ids).unbind(1):
            state = self.cell(step, state)
            found.append(state[0])
        scores = self.head(torch.stack(found, 1))
        return functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


@define("Hochreiter and Schmidhuber 1997; nn.LSTMCell in a loop over time")
def lstm_cells() -> Example:
    return example(CellLoop(), words())


class Attended(nn.Module):
    """Translation with attention, one word at a time (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.score = nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, WORDS)

    def encode(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embed(ids))[0]

    def decode(self, memory: Tensor, target: Tensor) -> Tensor:
        state = (
            memory.new_zeros(len(memory), WIDTH),
            memory.new_zeros(len(memory), WIDTH),
        )
        losses = []
        for position in range(target.shape[1] - 1):
            query = state[0].unsqueeze(1).expand_as(memory)
            weights = self.score(torch.cat([memory, query], 2)).softmax(1)
            seen = (weights * memory).sum(1)
            word = self.embed(target[:, position])
            state = self.cell(torch.cat([word, seen], 1), state)
            losses.append(
                functional.cross_entropy(self.head(state[0]), target[:, position + 1])
            )
        return torch.stack(losses).mean()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(self.encode(source), target)


@define("Bahdanau et al. 2015; nn.GRU, attention, cells in a loop")
def attention_translator() -> Example:
    return example(Attended(), words(), words(16, 12))


# --- values decide -----------------------------------------------------------------


class Watched(nn.Module):
    """Residual blocks with a number read and printed after each (He et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(128, TAGS)

    def body(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks[first : first + 2]:
            x = x + block(x)
        return x

    def watch(self, x: Tensor) -> None:
        if x.abs().max().item() > 1e6:
            raise ValueError("the values explode")
        print("mean", round(x.mean().item(), 3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.body(self.stem(x), 0)
        self.watch(x)
        x = self.body(x, 2)
        return functional.cross_entropy(self.head(x), labels)


@define("He et al. 2016; .item(), a print and a branch between blocks")
def item_and_print() -> Example:
    return example(Watched(), torch.randn(512, WIDTH), torch.randint(0, TAGS, (512,)))


class Equilibrium(nn.Module):
    """A fixed point, iterated until it hardly moves (Bai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(WIDTH, 128)
        self.cell = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.LayerNorm(128)
        )
        self.head = nn.Linear(128, TAGS)

    def once(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(z) * 0.2 + x)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.inject(x)
        z = torch.zeros_like(x)
        for _ in range(12):
            after = self.once(z, x)
            moved = (after - z).norm() / after.norm()
            z = after
            if moved.item() < 1e-2:
                break
        return functional.cross_entropy(self.head(z), labels)


@define("Bai et al. 2019; iterated until it converges, by .item() in a loop")
def equilibrium() -> Example:
    return example(
        Equilibrium(), torch.randn(512, WIDTH), torch.randint(0, TAGS, (512,))
    )


class Detector(nn.Module):
    """A head that takes what scores well, by nonzero (Girshick 2015, in short)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)]
        for _ in range(4):
            layers += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.score = nn.Conv2d(32, 1, 1)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(images)
        return found, self.score(found)

    def chosen(self, features: Tensor, scores: Tensor) -> Tensor:
        where = (scores.squeeze(1) > scores.mean()).nonzero()
        return features.permute(0, 2, 3, 1)[where[:, 0], where[:, 1], where[:, 2]]

    def boxes(self, rows: Tensor) -> Tensor:
        return self.head(rows).square().mean()

    def forward(self, images: Tensor) -> Tensor:
        features, scores = self.features(images)
        return self.boxes(self.chosen(features, scores)) + scores.square().mean()


@define("Girshick 2015 in short; a head on what nonzero finds")
def nonzero_detector() -> Example:
    images = torch.randn(8, 3, 48, 48).to(memory_format=torch.channels_last)
    return example(Detector().to(memory_format=torch.channels_last), images)


class MaskedLoss(nn.Module):
    """Loss on the words that are hidden only, by x[mask] (Devlin et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        found = self.encoder(self.embed(ids.masked_fill(hidden, 0)))
        return functional.cross_entropy(self.head(found[hidden]), ids[hidden])


@define("Devlin et al. 2019; scores of hidden words only, x[mask]")
def masked_words() -> Example:
    return example(MaskedLoss(), words(), torch.rand(16, 32) < 0.3)


class EarlyExit(nn.Module):
    """Blocks with exits, taken where a head is sure (Teerapittayanon et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
            for _ in range(4)
        )
        self.heads = nn.ModuleList(nn.Linear(128, 5) for _ in range(4))

    def stage(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        x = x + self.blocks[position](x)
        return x, self.heads[position](x)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = torch.zeros(())
        for position in range(4):
            x, scores = self.stage(x, position)
            loss = loss + functional.cross_entropy(scores, labels)
            if scores.softmax(1).max(1).values.mean() > 0.9:
                break
        return loss


@define("Teerapittayanon et al. 2016; exits by a branch on values")
def early_exit() -> Example:
    return example(EarlyExit(), torch.randn(512, 128), torch.randint(0, 5, (512,)))


# --- experts, state spaces ---------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to two of four experts (Shazeer et al. 2017)."""

    def __init__(self, *, is_dense: bool) -> None:
        super().__init__()
        self.is_dense = is_dense
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.embed(ids).flatten(0, 1)
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        out = (
            self.dense(x, weights, chosen)
            if self.is_dense
            else self.sent(x, weights, chosen)
        )
        loss = functional.cross_entropy(self.head(x + out), ids.flatten())
        balance = (shares.mean(0) * 4).square().mean()
        return {
            "loss": loss + 0.01 * balance,
            "router": {"shares": shares, "bias": None},
        }

    def dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gates = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        parts = [
            gate.unsqueeze(1) * e(x)
            for gate, e in zip(gates.unbind(1), self.experts, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def sent(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for position, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == position)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@define("Shazeer et al. 2017; every expert on every token, nested outputs")
def experts_dense() -> Example:
    return example(Experts(is_dense=True), words())


@define("Shazeer et al. 2017; tokens sent to experts by torch.where")
def experts_sent() -> Example:
    return example(Experts(is_dense=False), words())


class Selective(nn.Module):
    """A selective state space by a loop over time (Gu and Dao 2023)."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rate = nn.Parameter(torch.rand(WIDTH, states))
        self.step = nn.Linear(WIDTH, WIDTH)
        self.maps = nn.Linear(WIDTH, 2 * states)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        step = functional.softplus(self.step(x))
        into, out = self.maps(x).chunk(2, -1)
        decay = torch.exp(-step.unsqueeze(-1) * self.rate)
        fed = (step * x).unsqueeze(-1) * into.unsqueeze(2)
        state = torch.zeros_like(fed[:, 0])
        found = []
        for position in range(ids.shape[1]):
            state = decay[:, position] * state + fed[:, position]
            found.append((state * out[:, position, None]).sum(-1))
        scores = self.head(torch.stack(found, 1) + x)
        return functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )


@define("Gu and Dao 2023; a state space in a loop over time")
def state_space() -> Example:
    return example(Selective(), words(8, 24))


# --- speech ------------------------------------------------------------------------


class Conformer(nn.Module):
    """Attention and convolutions, trained by CTC (Gulati et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(20, WIDTH, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.depth = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 20)

    def scores(self, sound: Tensor, lengths: Tensor) -> Tensor:
        x = self.stem(sound).transpose(1, 2)
        is_padding = torch.arange(x.shape[1]) >= lengths[:, None]
        query = self.norm(x)
        x = x + self.attend(query, query, query, key_padding_mask=is_padding)[0]
        y = functional.silu(self.batch_norm(self.depth(x.transpose(1, 2)))).transpose(
            1, 2
        )
        x = x + y + self.feed(x)
        return self.head(x).log_softmax(-1).transpose(0, 1)

    def forward(
        self, sound: Tensor, lengths: Tensor, labels: Tensor, counts: Tensor
    ) -> Tensor:
        scores = self.scores(sound, lengths)
        return functional.ctc_loss(scores, labels, lengths, counts, zero_infinity=True)


@define("Gulati et al. 2020; padding mask, CTC")
def conformer_ctc() -> Example:
    lengths = torch.tensor([60, 50, 40, 30])
    labels = torch.randint(1, 20, (4, 10))
    sound = torch.randn(4, 20, 120)
    return example(Conformer(), sound, lengths, labels, torch.tensor([10, 8, 6, 4]))


class WaveNet(nn.Module):
    """Dilated convolutions with gates (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 32, 1)
        self.gates = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(
                nn.Conv1d(32, 64, 2, dilation=2**power)
            )
            for power in range(5)
        )
        self.skips = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(5))
        self.head = nn.Conv1d(32, 64, 1)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        x, total = self.stem(sound), torch.zeros(())
        for power, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            a, b = gate(functional.pad(x, (2**power, 0))).chunk(2, 1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return functional.cross_entropy(self.head(functional.relu(total)), labels)


@define("van den Oord et al. 2016; dilated convolutions, parametrised weights")
def wavenet() -> Example:
    return example(WaveNet(), torch.randn(4, 1, 512), torch.randint(0, 64, (4, 512)))


# --- diffusion, generation ---------------------------------------------------------


class Diffusion(nn.Module):
    """A denoiser that draws its moments and its noise (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.down = nn.Conv2d(1, 32, 3, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 32, 4, stride=2, padding=1)
        self.out = nn.Conv2d(64, 1, 3, padding=1)
        self.kept = nn.Buffer(torch.linspace(0.99, 0.01, 100))

    def forward(self, images: Tensor) -> Tensor:
        moment = torch.randint(0, 100, (len(images),))
        noise = torch.randn_like(images)
        share = self.kept[moment].view(-1, 1, 1, 1)
        x = share.sqrt() * images + (1 - share).sqrt() * noise
        first = functional.silu(self.down(x) + self.embed(moment)[:, :, None, None])
        second = functional.silu(self.norm(self.middle(first)))
        return functional.mse_loss(
            self.out(torch.cat([first, self.up(second)], 1)), noise
        )


@define("Ho et al. 2020; draws moments and noise in forward")
def diffusion() -> Example:
    return example(Diffusion(), torch.randn(16, 1, 28, 28))


class Couplings(nn.Module):
    """An invertible flow with the log of its determinant (Dinh et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for position, net in enumerate(self.nets):
            a, b = x.chunk(2, 1)
            if position % 2:
                a, b = b, a
            scale, shift = net(a).chunk(2, 1)
            b = b * torch.exp(torch.tanh(scale)) + shift
            total = total + torch.tanh(scale).sum(1)
            x = torch.cat([a, b], 1)
        return (0.5 * x.square().sum(1) - total).mean()


@define("Dinh et al. 2017; couplings")
def coupling_flow() -> Example:
    return example(Couplings(), torch.randn(512, 32))


@dataclass
class Coded:
    """What a variational autoencoder returns."""

    loss: Tensor
    decoded: Tensor
    mean: Tensor | None = None


class Variational(nn.Module):
    """Samples a code, returns a dataclass (Kingma and Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Coded:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        decoded = self.decoder(code)
        spread = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return Coded(functional.mse_loss(decoded, x) + spread, decoded)


@define("Kingma and Welling 2014; returns a dataclass of its own with a None")
def variational() -> Example:
    return example(Variational(), torch.randn(256, 256))


class Critic(nn.Module):
    """A critic with a penalty on its gradient (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        mixed = (0.5 * real + 0.5 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(
            self.net(mixed).sum(), mixed, create_graph=True
        )
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        return self.net(made).mean() - self.net(real).mean() + 10 * penalty


class CriticApart(Critic):
    """The same, with the penalty where the tracer does not look."""

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        return self.net(made).mean() - self.net(real).mean() + self.penalty(real, made)

    @torch.compiler.disable
    def penalty(self, real: Tensor, made: Tensor) -> Tensor:
        mixed = (0.5 * real + 0.5 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(
            self.net(mixed).sum(), mixed, create_graph=True
        )
        return 10 * (gradient.norm(dim=1) - 1).square().mean()


@define("Gulrajani et al. 2017; the penalty as the error of the other one says")
def gradient_penalty_apart() -> Example:
    return example(CriticApart(), torch.randn(256, 64), torch.randn(256, 64))


@define("Gulrajani et al. 2017; a penalty on a gradient taken in forward")
def gradient_penalty() -> Example:
    return example(Critic(), torch.randn(256, 64), torch.randn(256, 64))


# --- sets, spaces, tables ----------------------------------------------------------


class PointNet(nn.Module):
    """Points without an order (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1)
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.head(self.points(points).max(2).values), labels
        )


@define("Qi et al. 2017; maximum over points")
def pointnet() -> Example:
    return example(PointNet(), torch.randn(16, 3, 256), torch.randint(0, 5, (16,)))


class Field(nn.Module):
    """Densities and colours along rays (Mildenhall et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(36, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 4),
        )

    def forward(self, origins: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        depths = torch.linspace(0, 1, 24) + torch.rand(len(origins), 24) / 24
        points = origins[:, None] + depths[..., None] * directions[:, None]
        waves = [f(points * 2.0**k) for k in range(6) for f in (torch.sin, torch.cos)]
        found = self.net(torch.cat(waves, -1))
        alpha = 1 - torch.exp(-functional.relu(found[..., 3]) / 24)
        seen = torch.cumprod(1 - alpha + 1e-6, 1)
        return functional.mse_loss(
            ((alpha * seen)[..., None] * found[..., :3].sigmoid()).sum(1), colours
        )


@define("Mildenhall et al. 2020; random depths, cumulative products")
def radiance_field() -> Example:
    return example(Field(), *torch.randn(3, 64, 3))


class Clicks(nn.Module):
    """Tables of categories beside dense features (Naumov et al. 2019)."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(100, 16, mode="sum", sparse=is_sparse) for _ in range(4)
        )
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(26, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        rows = [self.bottom(dense)]
        rows += [t(c) for t, c in zip(self.tables, categories.unbind(1), strict=True)]
        stacked = torch.stack(rows, 1)
        products = stacked @ stacked.transpose(1, 2)
        above = torch.triu_indices(5, 5, 1)
        pairs = products[:, above[0], above[1]]
        scores = self.top(torch.cat([rows[0], pairs], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, clicks)


def _clicks() -> tuple[Tensor, Tensor, Tensor]:
    categories = torch.randint(0, 100, (256, 4, 3))
    return torch.randn(256, 8), categories, torch.rand(256).round()


@define("Naumov et al. 2019 (DLRM); bags of embeddings")
def click_tables() -> Example:
    return example(Clicks(), *_clicks())


@define("Naumov et al. 2019 (DLRM); bags with sparse gradients")
def click_tables_sparse() -> Example:
    return example(Clicks(is_sparse=True), *_clicks())


class SkipGram(nn.Module):
    """Words by their neighbours, with sparse gradients (Mikolov et al. 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.outside = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, centre: Tensor, others: Tensor) -> Tensor:
        scores = self.outside(others) @ self.inside(centre).unsqueeze(2)
        return functional.softplus(-scores).mean()


@define("Mikolov et al. 2013; embeddings with sparse gradients")
def skip_gram_sparse() -> Example:
    return example(SkipGram(), words(256, 1).squeeze(1), words(256, 8))


class Sampled(nn.Module):
    """Looks at a part of the image that it finds (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 6)
        )
        self.look = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        theta = self.find(images).view(-1, 2, 3)
        grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
        seen = self.look(functional.grid_sample(images, grid, align_corners=False))
        return functional.cross_entropy(self.head(seen.mean((2, 3))), labels)


@define("Jaderberg et al. 2015; affine grids")
def spatial_transformer() -> Example:
    return example(Sampled(), torch.randn(16, 1, 28, 28), torch.randint(0, 5, (16,)))


class Fourier(nn.Module):
    """Products in the frequency domain (Li et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 32)
        weights = torch.randn(3, 32, 32, 12, dtype=torch.complex64) / 32
        self.weights = nn.Parameter(weights)
        self.local = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        for weight, local in zip(self.weights, self.local, strict=True):
            waves = torch.fft.rfft(x)[..., :12]
            mixed = torch.einsum("bim,iom->bom", waves, weight)
            x = functional.gelu(
                torch.fft.irfft(functional.pad(mixed, (0, 21)), n=64) + local(x)
            )
        return functional.mse_loss(self.head(x.transpose(1, 2)), y)


@define("Li et al. 2021; complex weights, Fourier transforms")
def fourier_operator() -> Example:
    return example(Fourier(), torch.randn(16, 64, 1), torch.randn(16, 64, 1))


class Recomputed(nn.Module):
    """Blocks under torch's own checkpoints (Chen et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@define("Chen et al. 2016; torch.utils.checkpoint around blocks, dropout")
def own_checkpoints() -> Example:
    return example(Recomputed(), torch.randn(512, 128))


class Straight(torch.autograd.Function):
    """Signs whose gradient is passed on (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= 1)


class Binary(nn.Module):
    """A network of signs (Courbariaux et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 5)
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = Straight.apply(self.norm(self.first(x)))
        return functional.cross_entropy(self.last(found), labels)


@define("Courbariaux et al. 2016; an autograd.Function of its own")
def binary_network() -> Example:
    return example(Binary(), torch.randn(256, 64), torch.randint(0, 5, (256,)))


class PerExample(nn.Module):
    """One set of weights for each task, by torch.func.vmap (Ha et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, 64, 64) / 8)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.func.vmap(lambda w, rows: torch.tanh(rows @ w))(self.weights, x)
        return self.head(found).square().mean()


@define("Ha et al. 2017; torch.func.vmap inside forward")
def vmapped_weights() -> Example:
    return example(PerExample(), torch.randn(8, 64, 64))


class Penalised(nn.Module):
    """The size of a Jacobian, by torch.func (Rifai et al. 2011)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        def hidden(row: Tensor) -> Tensor:
            return torch.sigmoid(row @ self.weight)

        slopes = torch.func.vmap(torch.func.jacrev(hidden))(x)
        return slopes.square().mean() + hidden(x).mean()


@define("Rifai et al. 2011; torch.func.jacrev inside forward")
def contractive() -> Example:
    return example(Penalised(), torch.randn(64, 32))


class Averaged(nn.Module):
    """Batch norm that averages over all batches (Ioffe and Szegedy 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32, momentum=None), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images).square().mean()


@define("Ioffe and Szegedy 2015; momentum=None, an average over all batches")
def cumulative_norm() -> Example:
    return example(Averaged(), torch.randn(8, 3, 24, 24))


class Siamese(nn.Module):
    """One network for three images (Schroff et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(32, 16)

    def embed(self, images: Tensor) -> Tensor:
        return functional.normalize(self.head(self.net(images).mean((2, 3))), dim=1)

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> dict[str, Any]:
        found = [self.embed(images) for images in (anchor, same, other)]
        loss = functional.triplet_margin_loss(found[0], found[1], found[2])
        return {"loss": loss, "found": {"list": found, "tuple": (found[0], None)}}


@define("Schroff et al. 2015; one network three times, nested outputs with a None")
def triplet() -> Example:
    return example(Siamese(), *torch.randn(3, 8, 3, 32, 32))


class Tree(nn.Module):
    """Words put together along a tree in nested tuples (Tai et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.join = nn.Sequential(
            nn.Linear(2 * WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH)
        )

    def node(self, tree: Any, ids: Tensor) -> Tensor:
        if isinstance(tree, int):
            return self.embed(ids[:, tree])
        left, right = (self.node(part, ids) for part in tree)
        return self.join(torch.cat([left, right], 1))

    def forward(self, ids: Tensor, tree: Any) -> Tensor:
        return self.node(tree, ids).square().mean()


@define("Tai et al. 2015; recursion along a tree of Python tuples")
def tree_network() -> Example:
    return example(Tree(), words(64, 6), (((0, 1), 2), ((3, 4), 5)))


class Ode(nn.Module):
    """A differential equation in steps of fourth order (Chen et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):
            a = self.slope(x)
            b = self.slope(x + h / 2 * a)
            c = self.slope(x + h / 2 * b)
            d = self.slope(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x.square().mean()


@define("Chen et al. 2018; steps of fourth order")
def neural_ode() -> Example:
    return example(Ode(), torch.randn(256, 32))


class Perceiver(nn.Module):
    """A few latents look at many inputs (Jaegle et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(8, WIDTH))
        self.read = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.think = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            found, _weights = self.read(latents, x, x, key_padding_mask=mask)
            latents = self.think(latents + found)
        return latents.square().mean()


@define("Jaegle et al. 2021; nn.MultiheadAttention with weights, padding mask")
def perceiver() -> Example:
    mask = torch.zeros(8, 128, dtype=torch.bool)
    mask[:, 100:] = True
    return example(Perceiver(), torch.randn(8, 128, WIDTH), mask)


class Translator(nn.Module):
    """nn.Transformer with masks (Vaswani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.net = nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        found = self.net(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        scores = self.head(found)[:, :-1].flatten(0, 1)
        return functional.cross_entropy(scores, target[:, 1:].flatten(), ignore_index=0)


@define("Vaswani et al. 2017; nn.Transformer, padding and causal masks")
def translator() -> Example:
    source = words()
    source[:, 28:] = 0
    return example(Translator(), source, words(16, 24))


class Spectral(nn.Module):
    """A critic whose weights are divided by their norm (Miyato et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(
            norm(nn.Conv2d(3, 32, 3)),
            nn.LeakyReLU(),
            norm(nn.Conv2d(32, 32, 3)),
            nn.LeakyReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).square().mean()


@define("Miyato et al. 2018; spectral norm, buffers that move in forward")
def spectral_critic() -> Example:
    return example(Spectral(), torch.randn(8, 3, 24, 24))


class Capsules(nn.Module):
    """Routing by agreement (Sabour et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(32, 5, 8, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bif,iofd->biod", x, self.weights)
        logits = torch.zeros(len(x), 32, 5)
        out = votes.sum(1)
        for _ in range(3):
            out = (logits.softmax(2).unsqueeze(3) * votes).sum(1)
            size = out.square().sum(-1, keepdim=True)
            out = out * size / (1 + size) / (size + 1e-8).sqrt()
            logits = logits + (votes * out.unsqueeze(1)).sum(-1)
        return out.norm(dim=-1).mean()


@define("Sabour et al. 2017; routing by agreement")
def capsules() -> Example:
    return example(Capsules(), torch.randn(32, 32, 8))


class Slots(nn.Module):
    """Slots that compete for inputs, by nn.GRUCell (Locatello et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(32, 64), nn.Linear(32, 64)
        self.queries, self.cell = nn.Linear(64, 64), nn.GRUCell(64, 64)
        self.mean = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.keys(x), self.values(x)
        slots = self.mean + torch.randn(len(x), 4, 64)
        for _ in range(3):
            weights = (keys @ self.queries(slots).transpose(1, 2) / 8).softmax(-1)
            weights = weights / weights.sum(1, keepdim=True)
            found = weights.transpose(1, 2) @ values
            slots = self.cell(found.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots.square().mean()


@define("Locatello et al. 2020; slot attention, nn.GRUCell, random slots")
def slot_attention() -> Example:
    return example(Slots(), torch.randn(16, 64, 32))


# --- graphs ------------------------------------------------------------------------


class Messages(nn.Module):
    """Messages along edges, added up at nodes (Gilmer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.message = nn.Sequential(
            nn.Linear(2 * WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)
        )
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(nodes)
        for _ in range(3):
            sent = self.message(torch.cat([x[edges[0]], x[edges[1]]], 1))
            x = self.update(torch.zeros_like(x).index_add(0, edges[1], sent), x)
        return functional.cross_entropy(self.head(x), labels)


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Return features of nodes, edges, and classes of nodes, at random."""
    edges = torch.randint(0, 100, (2, 600))
    return torch.randn(100, 16), edges, torch.randint(0, 5, (100,))


@define("Gilmer et al. 2017; messages by index_add")
def message_passing() -> Example:
    return example(Messages(), *graph())


class Nodes(nn.Module):
    """Layers of torch_geometric with the loss of the classes of nodes."""

    def __init__(self, first: nn.Module, last: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.head = first, last, head

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = functional.dropout(
            functional.elu(self.first(nodes, edges)), 0.2, self.training
        )
        return functional.cross_entropy(self.head(self.last(x, edges)), labels)


def _layers(kind: str, **settings: Any) -> Example:
    layers = library("torch_geometric.nn")
    make = getattr(layers, kind)
    first, last = make(16, WIDTH, **settings), make(WIDTH, WIDTH, **settings)
    return example(Nodes(first, last, nn.Linear(WIDTH, 5)), *graph())


@define_graph("Kipf and Welling 2017; loops added, degrees counted")
def graph_convolution() -> Example:
    return _layers("GCNConv")


@define_graph("Hamilton et al. 2017 (GraphSAGE)")
def graph_sage() -> Example:
    return _layers("SAGEConv")


@define_graph("Brody et al. 2022 (GATv2); softmax over the edges of a node")
def graph_attention() -> Example:
    return _layers("GATv2Conv", heads=4, concat=False)


@define_graph("Xu et al. 2019 (GIN); pooled over graphs of a batch")
def graph_isomorphism() -> Example:
    layers = library("torch_geometric.nn")

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, WIDTH))
            self.layer, self.head = layers.GINConv(inner), nn.Linear(WIDTH, 5)

        def forward(
            self, nodes: Tensor, edges: Tensor, graphs: Tensor, labels: Tensor
        ) -> Tensor:
            found = layers.global_add_pool(self.layer(nodes, edges), graphs)
            return functional.cross_entropy(self.head(found), labels)

    nodes, edges, _ = graph()
    graphs = torch.arange(100) // 25
    return example(Pooled(), nodes, edges, graphs, torch.randint(0, 5, (4,)))


class Pairs(nn.Module):
    """Attention with biases of distance (Ying et al. 2021, Graphormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.bias = nn.Embedding(6, 4)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, distances: Tensor) -> Tensor:
        x = self.embed(nodes)
        q, k, v = (
            self.projections(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(16)
        scores = scores + self.bias(distances).permute(0, 3, 1, 2)
        found = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(x + found).square().mean()


@define("Ying et al. 2021 (Graphormer); biases of distance")
def graphormer() -> Example:
    return example(Pairs(), torch.randn(8, 48, 16), torch.randint(0, 6, (8, 48, 48)))
